//! Ranks and descendants of ranks that leave their process group or session, and orphans.

use std::path::Path;
use std::process::Command;

use crate::common::is_gone;
use crate::common::process::Launcher;
use crate::ranks::{kill, run, soon};

/// Programs that run the script `$0` with their own process groups or sessions, and the exit code
/// after SIGTERM if the script exits with 75.
const WRAPPERS: [(&[&str], i32); 7] = [
    (&["timeout", "100", "sh", "-c"], 75),
    (&["setsid", "sh", "-c"], 75),
    (&["timeout", "100", "setsid", "sh", "-c"], 75),
    // These end at once, and the script goes on.
    (&["bash", "-c", r#"set -m; sh -c "$0" & wait $!"#], 143),
    (&["bash", "-c", r#"set -m; sh -c "$0"; exit $?"#], 143),
    (&["sh", "-c", r#"sh -c "$0"; exit $?"#], 143),
    (&["setsid", "--fork", "--wait", "sh", "-c"], 143),
];

/// Starts two ranks of a script that writes its pid to `DIR/pid.ATTEMPT.RANK` first.
fn start(dir: &Path, flags: &[&str], wrapper: &[&str], script: &str) -> Launcher {
    let script = format!(
        "cd {}; attempt=$TORCHELASTIC_RESTART_COUNT; echo $$ >new.$RANK; \
         mv new.$RANK pid.$attempt.$RANK; {script}",
        dir.display()
    );
    let mut command = Command::new("env");
    command.args(["--default-signal", env!("CARGO_BIN_EXE_launch"), "--nproc-per-node=2"]);
    Launcher::start(command.args(flags).args(wrapper).arg(script))
}

/// Waits for the pids of both ranks of an attempt.
fn pids(dir: &Path, attempt: u32) -> [String; 2] {
    [0, 1].map(|rank| {
        let read = || std::fs::read_to_string(dir.join(format!("pid.{attempt}.{rank}")));
        soon("the rank has started", || read().is_ok());
        read().unwrap().trim().to_owned()
    })
}

#[test]
fn rank_in_another_group_or_session_saves_on_sigterm() {
    for (wrapper, code) in WRAPPERS {
        let dir = tempfile::tempdir().unwrap();
        let script = "trap 'sleep 0.5; touch saved.$RANK; exit 75' TERM; touch ready.$RANK
            while :; do sleep 0.05; done";
        let mut launcher = start(dir.path(), &["--shutdown-timeout=60"], wrapper, script);
        let pids = pids(dir.path(), 0);
        let has =
            |name: &str| [0, 1].map(|rank| dir.path().join(format!("{name}.{rank}")).exists());
        soon("the ranks are ready", || has("ready") == [true; 2]);
        kill("-TERM", launcher.child.id());
        let ended = launcher.wait();
        assert_eq!(ended, code, "{wrapper:?}: {}", launcher.reader.text());
        assert_eq!(has("saved"), [true; 2], "{wrapper:?}: {}", launcher.reader.text());
        assert!(pids.iter().all(|pid| is_gone(pid)), "{wrapper:?}");
    }
}

#[test]
fn rank_in_another_group_or_session_is_killed_if_it_ignores_sigterm() {
    for (wrapper, _) in WRAPPERS {
        let dir = tempfile::tempdir().unwrap();
        let script = "trap '' TERM; touch ready.$RANK; while :; do sleep 0.05; done";
        let mut launcher = start(dir.path(), &["--shutdown-timeout=1"], wrapper, script);
        let pids = pids(dir.path(), 0);
        let ready = |rank: u8| dir.path().join(format!("ready.{rank}")).exists();
        soon("the ranks are ready", || ready(0) && ready(1));
        kill("-TERM", launcher.child.id());
        assert_ne!(launcher.wait(), 0);
        assert!(pids.iter().all(|pid| is_gone(pid)), "{wrapper:?}");
        let text = launcher.reader.text();
        assert!(!text.contains("still running"), "{wrapper:?}: {text}");
    }
}

#[test]
fn restart_begins_after_ranks_in_other_groups_have_ended() {
    for (wrapper, _) in WRAPPERS {
        let dir = tempfile::tempdir().unwrap();
        // Rank 1 of the first attempt ignores SIGTERM.
        let script = "[ $attempt = 1 ] && { kill -0 $(cat pid.0.1) && echo both run; exit 0; }
            [ $RANK = 1 ] && { trap '' TERM; touch ready; while :; do sleep 0.05; done; }
            while [ ! -e ready ]; do sleep 0.05; done; exit 3";
        let flags = ["--max-restarts=1", "--shutdown-timeout=1"];
        let mut launcher = start(dir.path(), &flags, wrapper, script);
        let code = launcher.wait();
        let text = launcher.reader.text();
        assert_eq!(code, 0, "{wrapper:?}: {text}");
        assert!(text.contains("restart 1 of 1") && !text.contains("both run"), "{text}");
    }
}

#[test]
fn killed_launcher_leaves_no_rank_in_another_group_or_session() {
    for (wrapper, _) in WRAPPERS {
        let dir = tempfile::tempdir().unwrap();
        let script = "touch ready.$RANK; while :; do sleep 0.05; done";
        let mut launcher = start(dir.path(), &[], wrapper, script);
        let pids = pids(dir.path(), 0);
        kill("-KILL", launcher.child.id());
        launcher.wait();
        soon("the ranks are gone", || pids.iter().all(|pid| is_gone(pid)));
    }
}

#[test]
fn ranks_of_a_killed_inner_launcher_end() {
    let dir = tempfile::tempdir().unwrap();
    let script = "[ $RANK = 0 ] && while [ ! -e pid.0.1 ]; do sleep 0.05; done
        [ $RANK = 0 ] && kill -KILL $LAUNCH_PID; while :; do sleep 0.05; done";
    let inner = [env!("CARGO_BIN_EXE_launch"), "--nproc-per-node=2", "setsid", "sh", "-c"];
    let command = format!(
        "cd {}; attempt=0; echo $$ >new.$RANK; mv new.$RANK pid.0.$RANK; {script}",
        dir.path().display()
    );
    let mut outer = Command::new(env!("CARGO_BIN_EXE_launch"));
    let mut launcher = Launcher::start(outer.args(inner).arg(command));
    let pids = pids(dir.path(), 0);
    assert_eq!(launcher.wait(), 137, "{}", launcher.reader.text());
    assert!(pids.iter().all(|pid| is_gone(pid)));
}

#[test]
fn rank_of_an_inner_launcher_gets_each_signal_once() {
    let dir = tempfile::tempdir().unwrap();
    let script = "n=0; trap 'n=$((n+1))' TERM; touch ready.$RANK
        while [ $n = 0 ]; do sleep 0.01; done
        for i in 1 2 3 4 5 6 7 8 9; do sleep 0.05; done; echo $n >signals.$RANK; exit 75";
    let inner = [env!("CARGO_BIN_EXE_launch"), "--nproc-per-node=2", "sh", "-c"];
    let mut command = Command::new("env");
    command.args(["--default-signal", env!("CARGO_BIN_EXE_launch"), "--shutdown-timeout=60"]);
    command.args(inner).arg(format!("cd {}; {script}", dir.path().display()));
    let mut launcher = Launcher::start(&mut command);
    let file = |name: &str, rank: u8| dir.path().join(format!("{name}.{rank}"));
    soon("the ranks are ready", || [0, 1].iter().all(|&rank| file("ready", rank).exists()));
    kill("-TERM", launcher.child.id());
    assert_eq!(launcher.wait(), 75, "{}", launcher.reader.text());
    let signals = [0, 1].map(|rank| std::fs::read_to_string(file("signals", rank)).unwrap());
    assert_eq!(signals, ["1\n"; 2]);
}

/// A supervisor may signal ranks first, and the launcher before it has seen their exits.
#[test]
fn program_has_time_to_save_if_its_shell_ends_before_the_launcher_is_signalled() {
    let dir = tempfile::tempdir().unwrap();
    let script = "echo $PPID >shell.$RANK; trap 'sleep 0.5; touch saved.$RANK; exit 75' TERM
        touch ready.$RANK; while :; do sleep 0.05; done";
    let wrapper = ["sh", "-c", r#"sh -c "$0"; exit $?"#];
    let mut launcher = start(dir.path(), &["--shutdown-timeout=60"], &wrapper, script);
    let file = |name: &str| [0, 1].map(|rank| dir.path().join(format!("{name}.{rank}")));
    soon("the ranks are ready", || file("ready").iter().all(|file| file.exists()));
    kill("-STOP", launcher.child.id());
    for shell in file("shell") {
        let shell = std::fs::read_to_string(shell).unwrap();
        kill("-TERM", shell.trim().parse().unwrap());
        soon("the shell has ended", || is_gone(shell.trim()));
    }
    kill("-TERM", launcher.child.id());
    kill("-CONT", launcher.child.id());
    assert_eq!(launcher.wait(), 143, "{}", launcher.reader.text());
    assert!(file("saved").iter().all(|file| file.exists()), "{}", launcher.reader.text());
}

#[test]
fn program_that_saves_on_sigint_gets_no_sigterm() {
    let dir = tempfile::tempdir().unwrap();
    // SIGTERM would end the `sleep`.
    let script = "trap 'sleep 0.5 && touch saved.$RANK; exit 75' INT; touch ready.$RANK
        while :; do sleep 0.05; done";
    let wrapper = ["bash", "-c", r#"set -m; sh -c "$0" & wait $!"#];
    let mut launcher = start(dir.path(), &["--shutdown-timeout=60"], &wrapper, script);
    let file = |name: &str| [0, 1].map(|rank| dir.path().join(format!("{name}.{rank}")));
    soon("the ranks are ready", || file("ready").iter().all(|file| file.exists()));
    kill("-INT", launcher.child.id());
    assert_eq!(launcher.wait(), 130, "{}", launcher.reader.text());
    assert!(file("saved").iter().all(|file| file.exists()), "{}", launcher.reader.text());
}

#[test]
fn process_that_a_rank_leaves_in_another_session_ends_with_the_job() {
    let ran = run(1, "setsid sleep 60 & echo $!", |_| {});
    assert_eq!((ran.code, &*ran.stderr), (0, ""));
    let child = ran.stdout[0].strip_prefix("[rank 0] ").unwrap();
    assert!(is_gone(child));
}

/// The launcher does not wait for it, although it holds the pipe open.
#[test]
fn daemon_without_the_jobs_id_outlives_the_job() {
    let script = "env -u LAUNCH_ID setsid sleep 60 & echo $!; \
                  until [ \"$(ps -o comm= -p $!)\" = sleep ]; do sleep 0.01; done";
    let ran = run(1, script, |_| {});
    assert_eq!((ran.code, &*ran.stderr), (0, ""));
    kill("-KILL", ran.stdout[0].strip_prefix("[rank 0] ").unwrap().parse().unwrap());
}

/// Starts 20 processes that end as orphans.
const ORPHANS: &str = "for i in 1 2 3 4 5 6 7 8 9 10; do (setsid sleep 0.01 & sleep 0.01 &); done";

#[test]
fn orphans_of_ranks_are_reaped() {
    let dir = tempfile::tempdir().unwrap();
    let script =
        format!("{ORPHANS}; touch ready.$RANK; while [ ! -e go ]; do sleep 0.05; done; exit 9");
    let mut launcher = start(dir.path(), &[], &["sh", "-c"], &script);
    let parent = launcher.child.id().to_string();
    soon("the orphans have been started", || {
        ["ready.0", "ready.1"].iter().all(|name| dir.path().join(name).exists())
    });
    soon("no orphan is left", || {
        let stats = std::fs::read_dir("/proc")
            .unwrap()
            .filter_map(|entry| std::fs::read_to_string(entry.unwrap().path().join("stat")).ok());
        let is_orphan = |stat: String| {
            let (name, rest) = stat.rsplit_once(") ").unwrap();
            name.ends_with("(sleep") && rest.split(' ').nth(1) == Some(&parent)
        };
        stats.map(is_orphan).filter(|&is_orphan| is_orphan).count() == 0
    });
    std::fs::write(dir.path().join("go"), "").unwrap();
    assert_eq!(launcher.wait(), 9, "{}", launcher.reader.text());
}

#[test]
#[ignore = "needs root, for a namespace of processes"]
fn launcher_as_process_1_reaps_orphans_and_keeps_exit_codes() {
    let script = format!(
        "{ORPHANS}; sleep 0.5; [ $$ != 1 ] && [ $LAUNCH_PID = 1 ] || exit 1
        grep -l '^[0-9]* (sleep) Z' /proc/[0-9]*/stat && exit 2; exit $((RANK + 7))"
    );
    let mut command = Command::new("unshare");
    command.args(["--pid", "--fork", "--kill-child", "--mount-proc"]);
    command.args([env!("CARGO_BIN_EXE_launch"), "--nproc-per-node=2", "sh", "-c", &script]);
    let mut launcher = Launcher::start(&mut command);
    let code = launcher.wait();
    let text = launcher.reader.text();
    assert!([7, 8].contains(&code), "{code}: {text}");
    assert!(text.contains("exit code 7") && text.contains("exit code 8"), "{text}");
}

#[test]
#[ignore = "needs root, to change users"]
fn rank_of_another_user_is_not_said_to_be_killed_and_nothing_restarts() {
    let dir = tempfile::tempdir().unwrap();
    // A program like sudo: afterwards the launcher's user may not send it signals.
    let (launch, other) = (dir.path().join("launch"), dir.path().join("other"));
    std::fs::copy(env!("CARGO_BIN_EXE_launch"), &launch).unwrap();
    let setpriv = Command::new("sh").args(["-c", "command -v setpriv"]).output().unwrap();
    std::fs::copy(String::from_utf8(setpriv.stdout).unwrap().trim(), &other).unwrap();
    let modes = format!("chmod 755 {0} {0}/launch && chmod 4755 {0}/other", dir.path().display());
    assert!(Command::new("sh").args(["-c", &modes]).status().unwrap().success());
    let script = "[ $RANK = 0 ] && { sleep 1; exit 3; }
        echo pid $$; exec \"$0\" --reuid=0 --regid=0 --clear-groups sleep 600";
    let mut command = Command::new("setpriv");
    command.args(["--reuid=65534", "--regid=65534", "--clear-groups"]).arg(launch);
    command.args(["--nproc-per-node=2", "--max-restarts=1", "--shutdown-timeout=1"]);
    let mut launcher = Launcher::start(command.args(["sh", "-c", script]).arg(other));
    let code = launcher.wait();
    let text = launcher.reader.text();
    let pid = text.lines().find_map(|line| line.strip_prefix("[rank 1] pid ")).unwrap();
    kill("-KILL", pid.parse().unwrap());
    assert_eq!(code, 3, "{text}");
    let said = "still running, because SIGKILL could not be sent: Operation not permitted";
    assert!(text.contains(said) && !text.contains("restarting"), "{text}");
}
