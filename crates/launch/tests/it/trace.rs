//! The events that a subscriber in the launcher's process gets.

use crate::common::collector::Collector;
use crate::ranks::run;

/// Replaces the numbers of processes.
fn without_pids(line: &str) -> String {
    let words = line.split(' ').map(|word| match word.strip_prefix("pid=") {
        Some(pid) => {
            pid.parse::<u32>().unwrap();
            "pid=N"
        }
        None => word,
    });
    words.collect::<Vec<_>>().join(" ")
}

#[test]
fn events_name_each_rank_that_started_died_and_was_replaced() {
    let script = "[ $TORCHELASTIC_RESTART_COUNT$RANK = 01 ] && exit 3; \
                  [ $TORCHELASTIC_RESTART_COUNT = 0 ] && exec sleep 60; exit 0";
    let mut code = None;
    let lines = Collector::during(&["launch"], || {
        code = Some(run(2, script, |options| options.max_restarts = 1).code);
    });
    assert_eq!(code, Some(0));
    let lines: Vec<_> = lines.iter().map(|line| without_pids(line)).collect();
    let lines: Vec<_> = lines.iter().map(String::as_str).collect();
    let (first, second) = lines.split_at(6);
    assert_eq!(
        first,
        [
            "attempt_started attempt=0 restart=0 node=0 nodes=1 world_size=2",
            "rank_started rank=0 local_rank=0 pid=N",
            "rank_started rank=1 local_rank=1 pid=N",
            "rank_died rank=1 local_rank=1 pid=N code=3",
            "rank_died rank=0 local_rank=0 pid=N signal=15",
            "attempt_ended attempt=0 code=3 ranks=2 failed=2 saved=0 starts_again=true",
        ]
    );
    let mut second = second.to_vec();
    // Two ranks end at once.
    second[3..5].sort_unstable();
    assert_eq!(
        second,
        [
            "attempt_started attempt=1 restart=1 node=0 nodes=1 world_size=2",
            "rank_replaced rank=0 local_rank=0 pid=N attempt=1 restart=1",
            "rank_replaced rank=1 local_rank=1 pid=N attempt=1 restart=1",
            "rank_ended rank=0 local_rank=0 pid=N",
            "rank_ended rank=1 local_rank=1 pid=N",
            "attempt_ended attempt=1 code=0 ranks=2 failed=0 saved=0 starts_again=false",
        ]
    );
}
