//! `examples/trackers/follow.py` with stand-ins for the modules `wandb` and `mlflow`.

use std::fs::{self, OpenOptions};
use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::{Child, Command};
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal, kill_process};
use serde_json::{Value, json};

/// Each call is a line of `$CALLS`.
const WANDB: &str = r#"
import json, os
def note(*call):
    with open(os.environ["CALLS"], "a") as file:
        file.write(json.dumps(call) + "\n")
class Run:
    id = "run1"
    def define_metric(self, *args, **kwargs): pass
    def log(self, metrics): note("log", metrics)
    def finish(self): note("finish")
def init(**options):
    note("init", options["id"], options["project"])
    return Run()
"#;
const MLFLOW: &str = r#"
from wandb import note
class Run:
    class info:
        run_id = "run2"
def set_experiment(name): note("experiment", name)
def start_run(run_id, run_name):
    note("start", run_id)
    return Run()
def log_metrics(metrics, step): note("log", {**metrics, "iter": step})
def end_run(): note("finish")
"#;

struct Tracker {
    dir: tempfile::TempDir,
}

impl Tracker {
    fn new() -> Self {
        let dir = tempfile::tempdir().unwrap();
        fs::write(dir.path().join("wandb.py"), WANDB).unwrap();
        fs::write(dir.path().join("mlflow.py"), MLFLOW).unwrap();
        Self { dir }
    }

    fn work_dir(&self) -> PathBuf {
        self.dir.path().join("work")
    }

    /// The scalars of the run that began at this time.
    fn scalars(&self, time: &str) -> PathBuf {
        let dir = self.work_dir().join(time).join("vis_data");
        fs::create_dir_all(&dir).unwrap();
        dir.join("scalars.json")
    }

    fn command(&self, to: &str) -> Command {
        let script =
            Path::new(env!("CARGO_MANIFEST_DIR")).join("../../examples/trackers/follow.py");
        let mut command = Command::new("python3");
        command.arg(script).arg(self.work_dir()).args(["--to", to, "--project", "digits"]);
        command.env("PYTHONPATH", self.dir.path()).env("CALLS", self.dir.path().join("calls"));
        command
    }

    /// The calls of one more start of the program.
    fn once(&self, to: &str) -> Vec<Value> {
        let _ = fs::remove_file(self.dir.path().join("calls"));
        let output = self.command(to).arg("--once").output().unwrap();
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        self.calls()
    }

    fn calls(&self) -> Vec<Value> {
        let text = fs::read_to_string(self.dir.path().join("calls")).unwrap_or_default();
        let lines = text.split_inclusive('\n').filter(|line| line.ends_with('\n'));
        lines.map(|line| serde_json::from_str(line).unwrap()).collect()
    }
}

fn append(path: &Path, text: &str) {
    let mut file = OpenOptions::new().create(true).append(true).open(path).unwrap();
    file.write_all(text.as_bytes()).unwrap();
}

#[test]
#[ignore = "needs python3"]
fn follower_goes_on_after_a_restart_a_half_line_and_a_resume() {
    let tracker = Tracker::new();
    let first = tracker.scalars("20260101_000000");
    append(
        &first,
        "{\"loss\": 2.5, \"grad_norm\": null, \"epoch\": 1, \"iter\": 10, \"step\": 10}\n",
    );
    append(&first, "{\"loss\": 1.5, \"iter\": 20, \"st");
    let log = |metrics: Value| json!(["log", metrics]);
    let calls = tracker.once("wandb");
    let sent = log(json!({ "loss": 2.5, "epoch": 1, "iter": 10 }));
    assert_eq!(calls, [json!(["init", null, "digits"]), sent, json!(["finish"])]);
    // The rest of the line, and a validation, whose step is an epoch.
    append(&first, "ep\": 20}\n{\"accuracy\": 90.0, \"step\": 1}\n[]\n");
    let init = json!(["init", "run1", "digits"]);
    let loss = log(json!({ "loss": 1.5, "iter": 20 }));
    let accuracy = log(json!({ "accuracy": 90.0, "iter": 20 }));
    assert_eq!(tracker.once("wandb"), [init.clone(), loss, accuracy, json!(["finish"])]);
    // A run that resumed repeats iterations.
    let second = tracker.scalars("20260102_000000");
    append(&second, "{\"loss\": 1.6, \"iter\": 20, \"step\": 20}\n");
    let again = log(json!({ "loss": 1.6, "iter": 20 }));
    assert_eq!(tracker.once("wandb"), [init.clone(), again, json!(["finish"])]);
    assert_eq!(tracker.once("wandb"), [init.clone(), json!(["finish"])]);
    // A file that was replaced by a shorter one.
    fs::write(&second, "{\"a\": 1, \"step\": 3}\n").unwrap();
    let replaced = log(json!({ "a": 1, "iter": 20 }));
    assert_eq!(tracker.once("wandb"), [init, replaced, json!(["finish"])]);
    // Another tracker begins with the first line.
    let calls = tracker.once("mlflow");
    assert_eq!(calls[..2], [json!(["experiment", "digits"]), json!(["start", null])]);
    assert_eq!(calls.len(), 2 + 4 + 1, "{calls:?}");
    assert_eq!(tracker.once("mlflow")[1], json!(["start", "run2"]));
}

/// A process that is killed when the test ends.
struct Killed(Child);

impl Drop for Killed {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

#[test]
#[ignore = "needs python3"]
fn follower_sends_lines_as_they_come_and_ends_at_sigterm() {
    let tracker = Tracker::new();
    let scalars = tracker.scalars("20260101_000000");
    let child = tracker.command("wandb").args(["--interval", "0.05"]).spawn().unwrap();
    let mut child = Killed(child);
    let deadline = Instant::now() + Duration::from_secs(120);
    let wait_for = |count: usize| {
        while tracker.calls().len() < count {
            assert!(Instant::now() < deadline, "{:?}", tracker.calls());
            std::thread::sleep(Duration::from_millis(20));
        }
    };
    wait_for(1);
    for count in 1..=3 {
        append(&scalars, &format!("{{\"loss\": 1.0, \"iter\": {count}, \"step\": {count}}}\n"));
        wait_for(1 + count);
    }
    kill_process(Pid::from_child(&child.0), Signal::TERM).unwrap();
    assert!(child.0.wait().unwrap().success());
    assert_eq!(tracker.calls().len(), 5);
    assert_eq!(tracker.calls()[4], json!(["finish"]));
}
