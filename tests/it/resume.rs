//! Killed between checkpoints and resumed: the same bits as the uninterrupted run.

use tests::{Job, text};

use crate::WORKER;

/// Batch norm, half parameters with f32 masters, momentum, a growing loss scale: all that a
/// checkpoint must bring back.
fn config(custom: &str) -> String {
    format!(
        r#"
[model]
type = "ResNet"
in_channels = 1
num_classes = 10
width = 4
blocks = [1]

[train_dataloader]
batch_size = 64
dataset = {{ type = "Digits", split = "train" }}

[optim_wrapper]
type = "AmpOptimWrapper"
dtype = "float16"
loss_scale = {{ init_scale = 256.0, growth_interval = 5 }}
optimizer = {{ type = "SGD", lr = 0.05, momentum = 0.9, weight_decay = 1e-4 }}

[train_cfg]
max_epochs = 4

{custom}

[randomness]
seed = 5
"#
    )
}

#[test]
fn killed_and_resumed_is_the_same_run() {
    let dir = tempfile::tempdir().unwrap();
    let whole = Job::new(dir.path(), "whole", &config(""));
    let output = whole.launch(WORKER, 2, &[]);
    assert!(output.status.success(), "{}", text(&output));

    // 12 batches an epoch: iteration 29 is inside the third.
    let kill = "[[custom_hooks]]\ntype = \"KillHook\"\nrank = 0\niter = 29\n";
    let killed = Job::new(dir.path(), "killed", &config(kill));
    let output = killed.launch(WORKER, 2, &[]);
    assert_eq!(output.status.code(), Some(128 + 9), "{}", text(&output));
    assert!(killed.work_dir.join("epoch_2").is_dir());
    assert!(!killed.work_dir.join("epoch_3").exists());

    let resumed = Job::new(dir.path(), "killed", &config(""));
    let output = resumed.launch(WORKER, 2, &["--resume"]);
    assert!(output.status.success(), "{}", text(&output));
    assert!(text(&output).contains("epoch_2: epoch 2, iteration 24"), "{}", text(&output));
    for file in ["model.safetensors", "optimizer.safetensors"] {
        let read = |job: &Job| std::fs::read(job.work_dir.join("epoch_4").join(file)).unwrap();
        assert!(read(&whole) == read(&resumed), "{file} differs");
    }
}

#[test]
fn another_number_of_ranks_is_refused() {
    let dir = tempfile::tempdir().unwrap();
    let job = Job::new(dir.path(), "job", &config("").replace("max_epochs = 4", "max_epochs = 1"));
    let output = job.launch(WORKER, 1, &[]);
    assert!(output.status.success(), "{}", text(&output));
    let output = job.launch(WORKER, 2, &["--resume"]);
    let said = text(&output);
    assert_eq!(output.status.code(), Some(1), "{said}");
    assert!(said.contains("was written by 1 ranks, but this run has 2"), "{said}");
}
