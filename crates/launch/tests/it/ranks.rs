//! Ranks of one node, with `/bin/sh` as their program: output, exit codes, environment, signals,
//! and that no process outlives the launcher.

use std::io::{BufRead, BufReader, Write};
use std::process::{Command, Stdio};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use launch::{Error, LaunchOptions, launch, launch_to, tie_to_parent};

use crate::common::is_gone;

pub(crate) struct Ran {
    pub(crate) code: i32,
    pub(crate) stdout: Vec<String>,
    pub(crate) stderr: String,
    took: Duration,
}

/// Runs `script` as every rank, with short timeouts.
pub(crate) fn run(nproc: usize, script: &str, change: impl FnOnce(&mut LaunchOptions)) -> Ran {
    let mut options = LaunchOptions::new(nproc, ["-c", script]);
    options.program = Some("/bin/sh".into());
    options.report_time = Duration::from_millis(300);
    options.grace = Duration::from_millis(500);
    change(&mut options);
    let stdout = Arc::new(Mutex::new(Vec::new()));
    let stderr = Arc::new(Mutex::new(Vec::new()));
    let start = Instant::now();
    let code = launch_to(options, stdout.clone(), stderr.clone()).unwrap();
    let took = start.elapsed();
    let text = |bytes: &Mutex<Vec<u8>>| String::from_utf8(bytes.lock().unwrap().clone()).unwrap();
    let mut stdout: Vec<_> = text(&stdout).lines().map(str::to_owned).collect();
    stdout.sort();
    Ran { code, stdout, stderr: text(&stderr), took }
}

pub(crate) fn soon(what: &str, holds: impl Fn() -> bool) {
    let deadline = Instant::now() + Duration::from_secs(20);
    while !holds() {
        assert!(Instant::now() < deadline, "not within 20 s: {what}");
        std::thread::sleep(Duration::from_millis(10));
    }
}

#[test]
fn output_has_the_rank_before_each_line() {
    let ran = run(2, "echo out; echo err >&2; printf partial", |_| {});
    assert_eq!(ran.code, 0);
    assert_eq!(
        ran.stdout,
        ["[rank 0] out", "[rank 0] partial", "[rank 1] out", "[rank 1] partial"]
    );
    let mut lines: Vec<_> = ran.stderr.lines().collect();
    lines.sort_unstable();
    assert_eq!(lines, ["[rank 0] err", "[rank 1] err"]);
}

#[test]
fn ranks_get_torchruns_environment() {
    let script = "env | grep -E '^(RANK|LOCAL_|WORLD_|GROUP_|ROLE_|MASTER_|TORCHELASTIC_|EXTRA)' | \
                  sed 's/^\\(TORCHELASTIC_ERROR_FILE\\)=.*\\(attempt_0.*\\)/\\1=\\2/'";
    let ran = run(2, script, |options| {
        options.run_id = "job-7".to_owned();
        options.role = "trainer".to_owned();
        options.max_restarts = 3;
        options.envs.push(("EXTRA".into(), "x".into()));
    });
    let port = ran.stdout.iter().find_map(|line| line.strip_prefix("[rank 1] MASTER_PORT="));
    let port: u16 = port.unwrap().parse().unwrap();
    let mut want: Vec<_> = [
        "EXTRA=x",
        "GROUP_RANK=0",
        "GROUP_WORLD_SIZE=1",
        "LOCAL_RANK=1",
        "LOCAL_WORLD_SIZE=2",
        "MASTER_ADDR=127.0.0.1",
        &format!("MASTER_PORT={port}"),
        "RANK=1",
        "ROLE_NAME=trainer",
        "ROLE_RANK=1",
        "ROLE_WORLD_SIZE=2",
        "TORCHELASTIC_ERROR_FILE=attempt_0/1/error.json",
        "TORCHELASTIC_MAX_RESTARTS=3",
        "TORCHELASTIC_RESTART_COUNT=0",
        "TORCHELASTIC_RUN_ID=job-7",
        "TORCHELASTIC_USE_AGENT_STORE=True",
        "WORLD_SIZE=2",
    ]
    .map(|line| format!("[rank 1] {line}"))
    .into();
    want.sort();
    let got: Vec<_> = ran.stdout.into_iter().filter(|line| line.starts_with("[rank 1]")).collect();
    assert_eq!(got, want);
}

#[test]
fn several_ranks_get_one_thread_each_by_default() {
    let script = "echo $OMP_NUM_THREADS-$RAYON_NUM_THREADS";
    if std::env::var_os("OMP_NUM_THREADS").is_none()
        && std::env::var_os("RAYON_NUM_THREADS").is_none()
    {
        assert_eq!(run(1, script, |_| {}).stdout, ["[rank 0] -"]);
        assert_eq!(run(2, script, |_| {}).stdout, ["[rank 0] 1-1", "[rank 1] 1-1"]);
    }
    let told = |options: &mut LaunchOptions| {
        options.envs.push(("OMP_NUM_THREADS".into(), "4".into()));
        options.envs.push(("RAYON_NUM_THREADS".into(), "3".into()));
    };
    assert_eq!(run(2, script, told).stdout, ["[rank 0] 4-3", "[rank 1] 4-3"]);
}

#[test]
fn output_of_python_is_not_buffered_unless_the_variable_is_set() {
    let script = "echo \"<$PYTHONUNBUFFERED>\"";
    if std::env::var_os("PYTHONUNBUFFERED").is_none() {
        assert_eq!(run(1, script, |_| {}).stdout, ["[rank 0] <1>"]);
    }
    let told = |options: &mut LaunchOptions| {
        options.envs.push(("PYTHONUNBUFFERED".into(), "".into()));
    };
    assert_eq!(run(1, script, told).stdout, ["[rank 0] <>"]);
}

#[test]
fn store_accepts_connections() {
    let script = "exec 3<>/dev/tcp/$MASTER_ADDR/$MASTER_PORT && echo yes";
    let ran = run(1, script, |options| options.program = Some("/bin/bash".into()));
    assert_eq!(ran.stdout, ["[rank 0] yes"]);
}

#[test]
fn first_failure_gives_the_exit_code_and_stops_the_others() {
    let script = "[ $RANK = 1 ] && exit 3; exec sleep 60";
    let ran = run(3, script, |_| {});
    assert_eq!(ran.code, 3);
    assert!(ran.took < Duration::from_secs(20), "{:?}", ran.took);
    let cause = ran.stderr.lines().nth(1).unwrap();
    assert!(cause.contains("root cause") && cause.contains("rank 1"), "{}", ran.stderr);
    assert!(cause.contains("exit code 3"), "{}", ran.stderr);
    assert!(ran.stderr.starts_with("launch: 3 of 3 ranks failed"), "{}", ran.stderr);
    assert_eq!(ran.stderr.matches("killed by SIGTERM").count(), 2, "{}", ran.stderr);
}

#[test]
fn other_ranks_can_report_before_they_are_stopped() {
    let script = "[ $RANK = 1 ] && exit 3; sleep 0.3; echo rank 1 died; exit 4";
    let ran = run(2, script, |options| options.report_time = Duration::from_secs(20));
    assert_eq!(ran.code, 3);
    assert_eq!(ran.stdout, ["[rank 0] rank 1 died"]);
    assert!(ran.took < Duration::from_secs(15), "waited although all ranks had ended");
}

#[test]
fn rank_killed_by_a_signal_gives_128_plus_its_number() {
    let ran = run(2, "[ $RANK = 0 ] && kill -KILL $$; exec sleep 60", |_| {});
    assert_eq!(ran.code, 137);
    assert!(ran.stderr.contains("killed by SIGKILL"), "{}", ran.stderr);
}

#[test]
fn rank_killed_by_a_signal_is_the_root_cause_even_if_another_exits_first() {
    let script = "[ $RANK = 0 ] && exit 1; sleep 0.3; kill -KILL $$";
    let ran = run(2, script, |options| options.report_time = Duration::from_secs(20));
    assert_eq!(ran.code, 137);
    let cause = ran.stderr.lines().nth(1).unwrap();
    assert!(cause.contains("root cause: rank 1"), "{}", ran.stderr);
}

#[test]
fn ranks_that_ignore_sigterm_are_killed_with_their_children() {
    let script = "[ $RANK = 1 ] && { sleep 0.2; exit 5; }; trap '' TERM; sleep 60 & echo $!; wait";
    let ran = run(2, script, |_| {});
    assert_eq!(ran.code, 5);
    assert!(ran.took < Duration::from_secs(20), "{:?}", ran.took);
    let child = ran.stdout[0].strip_prefix("[rank 0] ").unwrap().to_owned();
    soon("the rank's own child is gone", || is_gone(&child));
}

#[test]
fn children_of_a_finished_rank_are_killed() {
    let ran = run(1, "sleep 60 & echo $!", |_| {});
    assert_eq!(ran.code, 0);
    let child = ran.stdout[0].strip_prefix("[rank 0] ").unwrap().to_owned();
    soon("the child left behind is gone", || is_gone(&child));
}

#[test]
fn missing_program_is_named_in_the_error() {
    let mut options = LaunchOptions::new(2, ["x"]);
    options.program = Some("/no/such/program".into());
    let error = launch(options).unwrap_err().to_string();
    assert!(error.contains("/no/such/program") && error.contains("rank 0"), "{error}");
    let error = launch(LaunchOptions::new(0, ["x"])).unwrap_err();
    assert!(matches!(error, Error::Options { option: "--nproc-per-node", .. }), "{error:?}");
    let mut options = LaunchOptions::new(1, ["x"]);
    options.signals = vec![9];
    let error = launch(options).unwrap_err();
    assert!(matches!(error, Error::Options { option: "--signals-to-handle", .. }), "{error:?}");
}

#[test]
fn restart_has_a_new_store_and_max_restarts_is_the_limit() {
    let script = "echo attempt $TORCHELASTIC_RESTART_COUNT port $MASTER_PORT; \
                  [ $TORCHELASTIC_RESTART_COUNT$RANK = 01 ] && exit 3; \
                  [ $TORCHELASTIC_RESTART_COUNT = 0 ] && exec sleep 60; exit 0";
    let ran = run(2, script, |options| options.max_restarts = 2);
    assert_eq!(ran.code, 0, "{}", ran.stderr);
    assert!(ran.stderr.contains("restart 1 of 2") && ran.stderr.contains("exit code 3"));
    let port = |rank: usize, attempt: usize| {
        let start = format!("[rank {rank}] attempt {attempt} port ");
        let line = ran.stdout.iter().find_map(|line| line.strip_prefix(&start[..]));
        line.unwrap_or_else(|| panic!("{start}: {:?}", ran.stdout)).to_owned()
    };
    assert_eq!(port(0, 0), port(1, 0));
    assert_eq!(port(0, 1), port(1, 1));
    assert_ne!(port(0, 0), port(0, 1), "both attempts used the same store");
    assert_eq!(ran.stdout.len(), 4);

    let ran = run(2, "exit 4", |options| options.max_restarts = 2);
    assert_eq!((ran.code, ran.stderr.matches("restarting all ranks").count()), (4, 2));
}

#[test]
fn ranks_that_saved_after_an_interrupt_are_not_restarted() {
    // Rank 1 takes a second to save, and a second signal would end it before.
    let script = "trap 'exit 9' TERM; [ $RANK = 1 ] && { sleep 1 & wait; }; exit 75";
    let ran = run(3, script, |options| {
        options.max_restarts = 2;
        options.grace = Duration::from_secs(60);
    });
    assert_eq!(ran.code, 75, "{}", ran.stderr);
    assert_eq!(ran.stderr, "launch: interrupted after a checkpoint: 3 of 3 ranks\n");
}

/// SIGTERM from the launcher does not count as an interrupt.
#[test]
fn ranks_that_save_after_another_failed_do_not_prevent_a_restart() {
    let script = "[ $TORCHELASTIC_RESTART_COUNT = 1 ] && exit 0; [ $RANK = 1 ] && { sleep 0.3; exit 3; }; \
                  trap 'exit 75' TERM; while :; do sleep 0.05; done";
    let ran = run(2, script, |options| options.max_restarts = 2);
    assert_eq!(ran.code, 0, "{}", ran.stderr);
    for part in ["root cause: rank 1 ", "(restart 1 of 2)"] {
        assert!(ran.stderr.contains(part), "{part}: {}", ran.stderr);
    }
    assert!(!ran.stderr.contains("interrupted"), "{}", ran.stderr);
    let ran = run(2, script, |_| {});
    assert_eq!(ran.code, 3, "{}", ran.stderr);
}

#[test]
fn rank_that_does_not_save_after_an_interrupt_is_stopped_and_named() {
    let script = "[ $RANK = 0 ] && exit 75; exec sleep 60";
    let ran = run(2, script, |options| options.max_restarts = 2);
    assert_eq!(ran.code, 143, "{}", ran.stderr);
    for part in ["checkpoint: 1 of 2 ranks", "1 of 2 ranks failed", "root cause: rank 1 "] {
        assert!(ran.stderr.contains(part), "{part}: {}", ran.stderr);
    }
    assert!(!ran.stderr.contains("restarting"), "{}", ran.stderr);
    // After a failure, the report time applies instead of the grace period.
    let script = "[ $RANK = 0 ] && exit 75; [ $RANK = 1 ] && { sleep 0.2; exit 3; }; exec sleep 60";
    let ran = run(3, script, |options| options.grace = Duration::from_secs(30));
    assert_eq!(ran.code, 3, "{}", ran.stderr);
    assert!(ran.took < Duration::from_secs(20), "{:?}", ran.took);
}

#[test]
fn ranks_start_although_the_parent_ignores_sigchld() {
    let mut command = Command::new("env");
    let launch = ["--ignore-signal=CHLD", env!("CARGO_BIN_EXE_launch"), "--nproc-per-node=2"];
    let output = command.args(launch).args(["sh", "-c", "exit 3"]).output().unwrap();
    let said = String::from_utf8(output.stderr).unwrap();
    assert_eq!(output.status.code(), Some(3), "{said}");
    assert!(said.starts_with("launch: 2 of 2 ranks failed"), "{said}");
}

/// The kernel cuts the name of a program after 15 bytes, here within a letter.
#[test]
fn name_of_the_launcher_may_be_longer_than_15_bytes_in_any_script() {
    let dir = tempfile::tempdir().unwrap();
    let launch = dir.path().join("\u{437}\u{430}\u{43f}\u{443}\u{441}\u{43a}\u{430}\u{442}\u{44c}");
    std::os::unix::fs::symlink(env!("CARGO_BIN_EXE_launch"), &launch).unwrap();
    for (signal, script, code) in
        [("CHLD", "exit 3", 3), ("HUP", "kill -HUP $LAUNCH_PID; sleep 0.5", 0)]
    {
        let mut command = Command::new("env");
        command.arg(format!("--ignore-signal={signal}")).arg(&launch);
        let output = command.args(["sh", "-c", script]).output().unwrap();
        assert_eq!(output.status.code(), Some(code), "{output:?}");
    }
}

/// Runs this test binary with only `helper`, and `script` in its environment.
fn helper(helper: &str, script: &str) -> Command {
    // A shell without job control ignores SIGINT in background jobs, which the launcher would
    // inherit.
    let mut command = Command::new("env");
    command
        .arg("--default-signal")
        .arg(std::env::current_exe().unwrap())
        .args(["--exact", helper, "--ignored", "--nocapture"])
        .env("LAUNCH_TEST_SCRIPT", script)
        .stdout(Stdio::piped())
        .stderr(Stdio::piped());
    command
}

pub(crate) fn kill(signal: &str, pid: u32) {
    let pid = pid.to_string();
    assert!(Command::new("kill").args([signal, &pid]).status().unwrap().success());
}

#[test]
#[ignore = "a launcher process of other tests"]
fn helper_launcher() {
    let Ok(script) = std::env::var("LAUNCH_TEST_SCRIPT") else { return };
    let options = if script == "tied" {
        let args = ["--exact", "ranks::helper_tied", "--ignored", "--nocapture"];
        LaunchOptions::new(2, args)
    } else {
        let mut options = LaunchOptions::new(2, ["-c", &script]);
        options.program = Some("/bin/sh".into());
        options.max_restarts = u32::from(script.contains("TORCHELASTIC_RESTART_COUNT"));
        options
    };
    std::process::exit(launch(options).unwrap());
}

#[test]
#[ignore = "a rank process of other tests"]
fn helper_tied() {
    if std::env::var_os("LAUNCH_PID").is_none() {
        return;
    }
    tie_to_parent().unwrap();
    // With one processor, the line already contains the name of the test.
    println!("\npid {}", std::process::id());
    std::io::stdout().flush().unwrap();
    std::thread::sleep(Duration::from_secs(60));
}

/// Reads lines until `count` of them contain `text`.
fn lines_with(reader: impl std::io::Read, text: &str, count: usize) -> Vec<String> {
    let lines = BufReader::new(reader).lines().map(Result::unwrap);
    lines.filter(|line| line.contains(text)).take(count).collect()
}

#[test]
fn sigterm_is_forwarded() {
    let script = "trap 'exit 7' TERM; echo ready; while :; do sleep 0.05; done";
    let mut launcher = helper("ranks::helper_launcher", script).spawn().unwrap();
    assert_eq!(lines_with(launcher.stdout.take().unwrap(), "ready", 2).len(), 2);
    kill("-TERM", launcher.id());
    let output = launcher.wait_with_output().unwrap();
    assert_eq!(output.status.code(), Some(7), "{output:?}");
}

#[test]
fn interrupted_launcher_lets_its_ranks_save() {
    for signal in ["TERM", "INT", "HUP", "USR1", "USR2"] {
        let script = format!("trap 'exit 75' {signal}; echo ready; while :; do sleep 0.05; done");
        let mut launcher = helper("ranks::helper_launcher", &script).spawn().unwrap();
        assert_eq!(lines_with(launcher.stdout.take().unwrap(), "ready", 2).len(), 2);
        kill(&format!("-{signal}"), launcher.id());
        let output = launcher.wait_with_output().unwrap();
        assert_eq!(output.status.code(), Some(75), "{output:?}");
        let said = String::from_utf8_lossy(&output.stderr);
        assert!(said.contains("interrupted after a checkpoint: 2 of 2 ranks"), "{said}");
    }
}

#[test]
fn signal_sent_twice_at_once_is_one() {
    let script = "trap 'sleep 0.3; exit 75' INT; echo ready; while :; do sleep 0.05; done";
    let mut launcher = helper("ranks::helper_launcher", script).spawn().unwrap();
    assert_eq!(lines_with(launcher.stdout.take().unwrap(), "ready", 2).len(), 2);
    let id = launcher.id();
    // As `timeout` does. A shell's own `kill` starts no process.
    let twice = format!("kill -INT {id}; kill -INT {id}");
    assert!(Command::new("sh").args(["-c", &twice]).status().unwrap().success());
    let output = launcher.wait_with_output().unwrap();
    assert_eq!(output.status.code(), Some(75), "{output:?}");
}

#[test]
fn tied_ranks_end_with_a_killed_launcher() {
    let mut launcher = helper("ranks::helper_launcher", "tied").spawn().unwrap();
    let lines = lines_with(launcher.stdout.take().unwrap(), "] pid ", 2);
    let pids: Vec<_> = lines.iter().map(|line| line.rsplit(' ').next().unwrap()).collect();
    assert_eq!(pids.len(), 2);
    assert!(!is_gone(pids[0]) && !is_gone(pids[1]));
    kill("-KILL", launcher.id());
    launcher.wait().unwrap();
    soon("both ranks are gone", || pids.iter().all(|pid| is_gone(pid)));
}

#[test]
fn no_process_outlives_a_killed_launcher() {
    // A program that does not call `tie_to_parent`, and its child.
    let script = "sleep 60 & echo pid $!; echo pid $$; wait";
    let mut launcher = helper("ranks::helper_launcher", script).spawn().unwrap();
    let lines = lines_with(launcher.stdout.take().unwrap(), "] pid ", 4);
    let pids: Vec<_> = lines.iter().map(|line| line.rsplit(' ').next().unwrap()).collect();
    assert!(pids.len() == 4 && pids.iter().all(|pid| !is_gone(pid)));
    let id = launcher.id();
    assert!(has_files(id));
    kill("-KILL", id);
    launcher.wait().unwrap();
    soon("ranks and their children are gone", || pids.iter().all(|pid| is_gone(pid)));
    soon("the launcher's files are gone", || !has_files(id));
}

/// Returns whether a launcher's temporary directory exists.
fn has_files(launcher: u32) -> bool {
    let prefix = format!("launch-{launcher}-");
    let mut files = std::fs::read_dir(std::env::temp_dir()).unwrap();
    files.any(|file| file.unwrap().file_name().to_string_lossy().starts_with(&prefix))
}

/// Kills a launcher's guard process.
fn kill_guard(launcher: u32) {
    let processes = std::fs::read_dir("/proc").unwrap().map(|entry| entry.unwrap().path());
    let guards = processes.filter_map(|process| {
        let stat = std::fs::read_to_string(process.join("stat")).ok()?;
        let parent = stat.rsplit(") ").next()?.split(' ').nth(1)?.parse::<u32>().ok()?;
        let command = std::fs::read_to_string(process.join("cmdline")).ok()?;
        let is_guard = parent == launcher && command.contains("launch-guard");
        is_guard.then(|| process.file_name()?.to_str()?.parse::<u32>().ok())?
    });
    let guards: Vec<_> = guards.collect();
    let [guard] = guards[..] else { panic!("{guards:?}") };
    kill("-KILL", guard);
    soon("the guard is gone", || is_gone(&guard.to_string()));
}

#[test]
fn run_without_its_guard_succeeds_and_leaves_no_files() {
    let dir = tempfile::tempdir().unwrap();
    let go = dir.path().join("go");
    let script = format!("echo ready; while [ ! -e {} ]; do sleep 0.05; done", go.display());
    let mut launcher = helper("ranks::helper_launcher", &script).spawn().unwrap();
    let mut stdout = BufReader::new(launcher.stdout.take().unwrap());
    lines_with(&mut stdout, "ready", 2);
    let id = launcher.id();
    kill_guard(id);
    std::fs::write(go, "").unwrap();
    let output = launcher.wait_with_output().unwrap();
    let said = String::from_utf8(output.stderr).unwrap();
    assert_eq!((output.status.code(), said.as_str()), (Some(0), ""));
    assert!(!has_files(id));
}

#[test]
fn restart_replaces_a_killed_guard() {
    let dir = tempfile::tempdir().unwrap();
    let go = dir.path().join("go");
    let script = format!(
        "echo pid $$; [ $TORCHELASTIC_RESTART_COUNT = 1 ] && exec sleep 60
        while [ ! -e {} ]; do sleep 0.05; done; exit 1",
        go.display()
    );
    let mut launcher = helper("ranks::helper_launcher", &script).spawn().unwrap();
    let mut stdout = BufReader::new(launcher.stdout.take().unwrap());
    assert_eq!(lines_with(&mut stdout, "] pid ", 2).len(), 2);
    let id = launcher.id();
    kill_guard(id);
    std::fs::write(go, "").unwrap();
    let lines = lines_with(&mut stdout, "] pid ", 2);
    let pids: Vec<_> = lines.iter().map(|line| line.rsplit(' ').next().unwrap()).collect();
    assert!(pids.len() == 2 && pids.iter().all(|pid| !is_gone(pid)), "{pids:?}");
    kill("-KILL", id);
    launcher.wait().unwrap();
    soon("the ranks are gone", || pids.iter().all(|pid| is_gone(pid)));
    soon("the launcher's files are gone", || !has_files(id));
}

#[test]
fn rank_that_kills_its_launcher_leaves_no_process() {
    let dir = tempfile::tempdir().unwrap();
    let script = format!(
        "kill -KILL $LAUNCH_PID; sleep 60 & echo $$ $! >{0}/new; mv {0}/new {0}/$$; wait",
        dir.path().display()
    );
    for _ in 0..8 {
        let mut launcher = helper("ranks::helper_launcher", &script).spawn().unwrap();
        launcher.wait().unwrap();
    }
    // A rank may be killed before it has written its pids.
    for entry in std::fs::read_dir(dir.path()).unwrap() {
        let Ok(pids) = std::fs::read_to_string(entry.unwrap().path()) else { continue };
        soon("rank and child are gone", || pids.split_whitespace().all(is_gone));
    }
}

#[test]
fn tie_to_parent_does_nothing_without_a_launcher() {
    tie_to_parent().unwrap();
}
