//! Output of the ranks: log files, console, error files.

use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use launch::{Error, LaunchOptions, launch};

use crate::common::is_gone;
use crate::ranks::{run, soon};

/// Shell command that writes a rank's error file with $MESSAGE.
const WRITE_ERROR: &str = r#"printf '{"message": {"message": "%s", "extraInfo": {"timestamp": "1000"}}}' "$MESSAGE" \
    >"$TORCHELASTIC_ERROR_FILE""#;

#[test]
fn earliest_error_file_is_the_root_cause() {
    // Rank 0 fails first but exits after rank 1.
    let script = r#"mkdir -p "$(dirname "$TORCHELASTIC_ERROR_FILE")"
        echo '{"message": {"message": "the cause of '$RANK'", "extraInfo":
            {"py_callstack": "", "timestamp": "'$((1000 + RANK))'"}}}' >"$TORCHELASTIC_ERROR_FILE"
        [ $RANK = 0 ] && sleep 0.2; exit $((RANK + 5))"#;
    let ran = run(2, script, |options| options.report_time = Duration::from_secs(20));
    assert_eq!(ran.code, 5, "{}", ran.stderr);
    let cause = ran.stderr.lines().nth(1).unwrap();
    assert!(cause.contains("root cause") && cause.contains("rank 0"), "{}", ran.stderr);
    assert!(cause.ends_with("exit code 5: the cause of 0"), "{}", ran.stderr);
}

#[test]
fn rank_that_changes_directory_writes_its_error_file() {
    let script = format!("cd /; MESSAGE=why; {WRITE_ERROR}; exit 3");
    for flags in [&["--log-dir=logs"][..], &["--nnodes=1"]] {
        let dir = tempfile::tempdir().unwrap();
        std::fs::create_dir(dir.path().join("tmp")).unwrap();
        let mut command = Command::new(env!("CARGO_BIN_EXE_launch"));
        command.args(flags).args(["sh", "-c", &script]).current_dir(dir.path());
        let output = command.env("TMPDIR", "tmp").output().unwrap();
        let text = String::from_utf8(output.stderr).unwrap();
        assert!(text.contains("exit code 3: why"), "{flags:?}: {text}");
    }
}

#[test]
fn message_of_a_large_error_file_is_shown() {
    let script = format!(
        "MESSAGE=$(head -c 100000 /dev/zero | tr '\\0' x)
        for _ in 1 2 3 4; do MESSAGE=$MESSAGE$MESSAGE; done; {WRITE_ERROR}; exit 3"
    );
    let ran = run(1, &script, |_| {});
    assert!(ran.stderr.contains("exit code 3: xxxx"), "{}", ran.stderr);
}

#[test]
fn error_file_that_is_a_fifo_does_not_block_the_launcher() {
    let ran = run(1, "mkfifo \"$TORCHELASTIC_ERROR_FILE\"; exit 3", |_| {});
    assert_eq!(ran.code, 3);
    assert!(
        ran.stderr.contains("exit code 3: cannot read error file: it is not a"),
        "{}",
        ran.stderr
    );
}

#[test]
fn log_file_that_a_rank_has_made_as_a_fifo_is_an_error() {
    let dir = tempfile::tempdir().unwrap();
    let script = "next=$(dirname \"$TORCHELASTIC_ERROR_FILE\")/../../attempt_1/0
        mkdir -p \"$next\"; mkfifo \"$next/stdout.log\"; exit 3";
    let mut command = Command::new(env!("CARGO_BIN_EXE_launch"));
    command.args(["--max-restarts=1", "--redirects=3", "--log-dir"]).arg(dir.path());
    let output = command.args(["sh", "-c", script]).output().unwrap();
    let said = String::from_utf8(output.stderr).unwrap();
    assert!(said.contains("attempt_1/0/stdout.log: File exists"), "{said}");
    assert_eq!(output.status.code(), Some(1));
}

#[test]
fn error_of_the_temporary_directory_names_tmpdir() {
    let mut command = Command::new(env!("CARGO_BIN_EXE_launch"));
    let output = command.arg("true").env("TMPDIR", "/proc/no").output().unwrap();
    let said = String::from_utf8(output.stderr).unwrap();
    assert!(said.starts_with("error: create /proc/no/") && said.contains("TMPDIR"), "{said}");
}

#[test]
fn limit_of_open_files_is_named_with_what_to_do() {
    let mut command = Command::new("sh");
    command.args(["-c", "ulimit -n 24; exec \"$0\" --nproc-per-node=40 sleep 60"]);
    let output = command.arg(env!("CARGO_BIN_EXE_launch")).output().unwrap();
    let said = String::from_utf8(output.stderr).unwrap();
    assert!(said.contains("Too many open files") && said.contains("ulimit -Hn"), "{said}");
}

#[test]
fn truncated_error_file_is_quoted() {
    let script = r#"printf '{"message": {"message": "the cau' >"$TORCHELASTIC_ERROR_FILE"; exit 3"#;
    let ran = run(1, script, |_| {});
    assert!(ran.stderr.contains(r#"{"message": {"message": "the cau"#), "{}", ran.stderr);
}

#[test]
fn redirects_and_tee_select_files_and_console() {
    let dir = tempfile::tempdir().unwrap();
    let logs = |options: &mut LaunchOptions| {
        options.run_id = "a/b".to_owned();
        options.max_restarts = 1;
        options.logs.dir = Some(dir.path().join("deep/logs"));
        options.logs.redirects = "0:1,1:3".parse().unwrap();
        options.logs.tee = "2:3".parse().unwrap();
    };
    let script = "echo out $RANK; echo err $RANK >&2; exit $((1 - TORCHELASTIC_RESTART_COUNT))";
    let ran = run(3, script, logs);
    assert_eq!(ran.code, 0, "{}", ran.stderr);
    assert_eq!(ran.stdout, ["[rank 2] out 2", "[rank 2] out 2"]);
    assert!(ran.stderr.contains("[rank 0] err 0") && ran.stderr.contains("[rank 2] err 2"));
    assert!(!ran.stderr.contains("err 1"), "{}", ran.stderr);
    let runs: Vec<_> = std::fs::read_dir(dir.path().join("deep/logs")).unwrap().collect();
    let folder = runs[0].as_ref().unwrap().path();
    assert!(runs.len() == 1 && ran.stderr.contains(&folder.display().to_string()));
    assert!(folder.file_name().unwrap().to_str().unwrap().starts_with("a_b_"));
    let read = |file: &str| std::fs::read_to_string(folder.join(file)).ok();
    for attempt in 0..2 {
        for (rank, out, err) in [(0, true, false), (1, true, true), (2, true, true)] {
            let file = |name| read(&format!("attempt_{attempt}/{rank}/{name}.log"));
            assert_eq!(file("stdout"), out.then(|| format!("out {rank}\n")));
            assert_eq!(file("stderr"), err.then(|| format!("err {rank}\n")));
        }
    }
}

#[test]
fn local_ranks_filter_limits_the_console() {
    let ran = run(3, "echo out; echo err >&2", |options| options.logs.shown = Some(vec![0, 2]));
    assert_eq!(ran.stdout, ["[rank 0] out", "[rank 2] out"]);
    assert_eq!(ran.stderr.lines().count(), 2, "{}", ran.stderr);
    let mut options = LaunchOptions::new(2, ["x"]);
    options.logs.tee = "2:1".parse().unwrap();
    let error = launch(options).unwrap_err();
    assert!(matches!(error, Error::Options { option: "--tee", .. }), "{error:?}");
    let error = error.to_string();
    assert!(error.contains("--tee") && error.contains("local rank 2"), "{error}");
}

#[test]
fn log_write_error_names_the_file() {
    let dir = tempfile::tempdir().unwrap();
    let script = "i=0; while [ $i -lt 100 ]; do printf '%010d\n' $i; i=$((i + 1)); done";
    let mut command = Command::new("sh");
    let limit = "ulimit -f 1; exec \"$0\" \"$@\"";
    command.args(["-c", limit, env!("CARGO_BIN_EXE_launch"), "--tee=3", "--log-dir"]);
    command.arg(dir.path()).args(["sh", "-c", script]);
    let output = command.output().unwrap();
    assert!(output.status.success(), "{output:?}");
    let text = String::from_utf8(output.stdout).unwrap();
    assert_eq!(text.lines().count(), 100);
    let said = String::from_utf8(output.stderr).unwrap();
    let line = said.lines().find(|line| line.contains("attempt_0/0/stdout.log"));
    let line = line.unwrap_or_else(|| panic!("{said}"));
    assert!(line.starts_with("launch: rank 0: ") && line.contains("File too large"), "{said}");
}

#[test]
fn console_write_error_is_reported() {
    let full = std::fs::OpenOptions::new().write(true).open("/dev/full").unwrap();
    let mut command = Command::new(env!("CARGO_BIN_EXE_launch"));
    let output = command.args(["echo", "x"]).stdout(full).stderr(Stdio::piped());
    let output = output.spawn().unwrap().wait_with_output().unwrap();
    let said = String::from_utf8(output.stderr).unwrap();
    assert!(
        said.starts_with("launch: rank 0: cannot write its output to the console: No space left"),
        "{said}"
    );
}

/// Starts a launcher with log files and a console that nobody reads; returns after its rank has
/// written more than a pipe holds to `stream` (1 or 2) and exited with `code`.
fn with_stalled_console(dir: &Path, stream: u8, code: u8) -> Child {
    let script = format!(
        "i=0; while [ $i -lt 100 ]; do printf '%01000d\\n' $i; i=$((i + 1)); done >&{stream}
        echo $$ >$1/pid; exit {code}"
    );
    let launcher = Command::new(env!("CARGO_BIN_EXE_launch"))
        .args(["--tee=3", "--log-dir"])
        .args([dir, Path::new("sh"), Path::new("-c"), Path::new(&script), Path::new("sh"), dir])
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    soon("the rank has ended", || {
        let pid = std::fs::read_to_string(dir.join("pid")).unwrap_or_default();
        pid.ends_with('\n') && is_gone(pid.trim())
    });
    launcher
}

/// Returns the number of lines in the log file of a stream.
fn logged(dir: &Path, stream: &str) -> usize {
    let runs = std::fs::read_dir(dir).unwrap().map(|entry| entry.unwrap().path());
    let logs = runs.map(|run| run.join(format!("attempt_0/0/{stream}.log")));
    let texts = logs.filter_map(|log| std::fs::read_to_string(log).ok());
    texts.map(|text| text.lines().count()).sum()
}

#[test]
fn slow_console_gets_all_output() {
    let dir = tempfile::tempdir().unwrap();
    let launcher = with_stalled_console(dir.path(), 1, 0);
    std::thread::sleep(Duration::from_secs(3));
    let output = launcher.wait_with_output().unwrap();
    let text = String::from_utf8(output.stdout).unwrap();
    assert_eq!((text.lines().count(), logged(dir.path(), "stdout")), (100, 100));
    assert_eq!(output.status.code(), Some(0));
}

#[test]
fn signal_ends_the_wait_for_the_console_and_log_files_are_complete() {
    // Case 2: the summary of a failure is blocked, too.
    for (stream, code, name) in [(1, 0, "stdout"), (2, 3, "stderr")] {
        let dir = tempfile::tempdir().unwrap();
        let mut launcher = with_stalled_console(dir.path(), stream, code);
        soon("the launcher has ended", || {
            drop(Command::new("kill").arg(launcher.id().to_string()).status());
            is_gone(&launcher.id().to_string())
        });
        launcher.wait().unwrap();
        assert_eq!(logged(dir.path(), name), 100);
    }
}

#[test]
fn slow_console_gets_the_summary() {
    let dir = tempfile::tempdir().unwrap();
    let launcher = with_stalled_console(dir.path(), 2, 3);
    std::thread::sleep(Duration::from_secs(3));
    let output = launcher.wait_with_output().unwrap();
    let text = String::from_utf8(output.stderr).unwrap();
    let ranks = text.lines().filter(|line| line.starts_with("[rank 0] ")).count();
    assert!(ranks == 100 && text.contains("launch: 1 of 1 ranks failed"), "{ranks} {text}");
    assert_eq!(output.status.code(), Some(3));
}
