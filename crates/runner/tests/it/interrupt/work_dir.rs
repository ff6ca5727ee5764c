//! Whole programs in one work directory: at the same time, one after another, and restarted.

use std::process::Command;

use rustix::process::{Signal, kill_process};

use super::{Job, RUNNER, rank_of, wait_for_training};

#[test]
fn work_directory_in_use_is_refused_and_is_free_after_a_kill() {
    let job = Job::new();
    let run = job.train(Some(2), "both", 100_000_000);
    wait_for_training(&job.work_dir("both"));
    let second = Command::new(RUNNER)
        .args(["train", job.config.to_str().unwrap(), "--resume", "--work-dir"])
        .arg(job.work_dir("both"))
        .output()
        .unwrap();
    let said = String::from_utf8_lossy(&second.stderr);
    let first = rank_of(run.pid(), 0).as_raw_nonzero();
    assert_eq!(second.status.code(), Some(1), "{said}");
    assert!(said.contains(&format!("is in use by process {first} on ")), "{said}");
    let logs = std::fs::read_dir(job.work_dir("both")).unwrap().flatten();
    assert_eq!(logs.filter(|e| e.file_name().to_string_lossy().starts_with("20")).count(), 1);
    kill_process(run.pid(), Signal::KILL).unwrap();
    drop(run);
    assert!(job.train(Some(2), "both", 7).end().success());
}

/// Without `--resume` a job of `launch --max-restarts` starts anew, as with torchrun.
#[test]
fn restarted_rank_may_replace_the_checkpoints_of_its_job() {
    let job = Job::new();
    let train = |restarts: &str| {
        let error_file = format!("none_1a2b3c4d/attempt_{restarts}/0/error.json");
        // The rank is started by a user's script, so its parent process differs in each attempt.
        let output = Command::new("sh")
            .args(["-c", "\"$@\"; exit $?", "sh", RUNNER])
            .args(["train", job.config.to_str().unwrap(), "--work-dir"])
            .arg(job.work_dir("again"))
            .args(["--cfg-options", "train_cfg.max_iters=7"])
            .env("TORCHELASTIC_ERROR_FILE", job.work_dir("launched").join(error_file))
            .envs([("RANK", "0"), ("WORLD_SIZE", "1"), ("LOCAL_RANK", "0")])
            .envs([("MASTER_ADDR", "127.0.0.1"), ("MASTER_PORT", "0")])
            .env("TORCHELASTIC_RESTART_COUNT", restarts)
            .output()
            .unwrap();
        (output.status.code(), String::from_utf8_lossy(&output.stderr).into_owned())
    };
    assert_eq!(train("0").0, Some(0));
    let (code, said) = train("0");
    assert!(code == Some(1) && said.contains("belongs to another run"), "{said}");
    let (code, said) = train("1");
    assert_eq!(code, Some(0), "{said}");
    // A restart after a refused attempt is refused, too.
    let state =
        || std::fs::read_to_string(job.work_dir("again").join("iter_7/state.json")).unwrap();
    let before = state();
    let output = Command::new(RUNNER)
        .args(["launch", "--nproc-per-node", "1", "--max-restarts", "2", "--", "train"])
        .args([job.config.to_str().unwrap(), "--work-dir"])
        .arg(job.work_dir("again"))
        .args(["--cfg-options", "train_cfg.max_iters=7", "randomness.seed=4"])
        .output()
        .unwrap();
    let said = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(1), "{said}");
    assert!(said.matches("belongs to another run").count() >= 3, "{said}");
    assert!(before == state(), "a restart has replaced another run's checkpoint");
}
