//! The spans and events that a subscriber gets.

use std::time::Duration;

use collective::reducer::{ParamInfo, Reducer, ReducerOptions};
use collective::{DType, ProcessGroup, ReduceOp};

use crate::common::collector::Collector;
use crate::common::threads;

const TIMEOUT: Duration = Duration::from_secs(30);

/// Averages two parameters, each in a bucket of its own, and returns the second pass's lines.
fn second_pass(group: ProcessGroup) -> Vec<String> {
    let params = ["a", "b"].map(|name| ParamInfo::new(name, 4, DType::F32)).to_vec();
    let mut options = ReducerOptions::default();
    (options.first_bucket_bytes, options.bucket_bytes) = (1, 1);
    let mut reducer = Reducer::new(group, params, options).unwrap();
    let mut pass = || {
        reducer.prepare(true).unwrap();
        reducer.ready(1, &[1.0_f32; 4]).unwrap();
        reducer.ready(0, &[1.0_f32; 4]).unwrap();
        reducer.finish().unwrap();
    };
    pass();
    Collector::during(&["collective"], pass)
}

#[test]
fn event_reached_first_by_a_thread_without_subscriber_is_collected() {
    let emit = || tracing::info!(name: "emitted", target: "collective", number = 1);
    let lines = Collector::during(&["collective"], || {
        std::thread::spawn(emit).join().unwrap();
        emit();
    });
    assert_eq!(lines, ["emitted number=1"]);
}

#[test]
fn bucket_span_lasts_from_launch_to_average() {
    for (rank, lines) in threads(2, TIMEOUT, second_pass).into_iter().enumerate() {
        let of = |what: &str| -> Vec<&String> {
            lines.iter().filter(|line| line.contains(what)).collect()
        };
        let opened =
            |bucket| format!("open bucket rank={rank} pass=2 bucket={bucket} bytes=16 dtype=f32");
        assert_eq!(of("open bucket"), [&opened(0), &opened(1)], "{lines:?}");
        // Once where it is launched, and once where it is averaged.
        assert_eq!((of("enter bucket").len(), of("exit bucket").len()), (4, 4), "{lines:?}");
        assert_eq!(of("open finish"), [&format!("open finish rank={rank} pass=2")]);
        let call = format!("open call group=default rank={rank} op=all_reduce of 4 f32, avg");
        assert_eq!(of("open call"), [&call, &call], "{lines:?}");
        assert_eq!(of("close ").len(), 5);
        let at = |line: &str| lines.iter().rposition(|other| other == line).unwrap();
        assert!(at("close bucket") < at("exit finish"), "{lines:?}");
    }
}

#[test]
fn failure_of_a_group_is_one_event() {
    let group = ProcessGroup::threads(1, TIMEOUT).unwrap().remove(0);
    let lines = Collector::during(&["collective"], || {
        group.abort("enough");
        group.barrier().unwrap_err();
        group.all_reduce(&mut [1_u8], ReduceOp::Max).unwrap_err();
    });
    let failed: Vec<_> = lines.iter().filter(|line| line.starts_with("group_failed")).collect();
    assert_eq!(failed.len(), 1, "{lines:?}");
    assert!(
        failed[0].contains("group=default rank=0 error=the group was aborted by rank 0"),
        "{failed:?}"
    );
}

#[test]
fn subscriber_of_the_caller_gets_the_calls_of_the_communication_thread() {
    for lines in threads(2, TIMEOUT, |group| {
        Collector::during(&["collective", "program"], || {
            let span = tracing::info_span!(target: "program", "forward");
            let work = span.in_scope(|| group.all_reduce_async(vec![1.0_f32; 8], ReduceOp::Sum));
            work.unwrap().wait().unwrap();
        })
    }) {
        let calls = lines.iter().filter(|line| line.starts_with("open call")).count();
        assert_eq!(calls, 1, "{lines:?}");
    }
}
