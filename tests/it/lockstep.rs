//! One rank overflows: every rank skips that step and halves its scale, together.

use tests::{Job, MLP, text};

use crate::WORKER;

const CONFIG: &str = r#"
[optim_wrapper]
type = "AmpOptimWrapper"
dtype = "float16"
loss_scale = { init_scale = 1024.0 }
optimizer = { type = "SGD", lr = 0.05, momentum = 0.9 }

[train_cfg]
max_epochs = 1

[[custom_hooks]]
type = "OverflowHook"
rank = 1
iter = 3

[[custom_hooks]]
type = "TraceHook"

[randomness]
seed = 3
"#;

#[test]
fn an_overflow_on_one_rank_skips_the_step_on_all() {
    let dir = tempfile::tempdir().unwrap();
    let job = Job::new(dir.path(), "overflow", &format!("{MLP}{CONFIG}"));
    let output = job.launch(WORKER, 2, &[]);
    assert!(output.status.success(), "{}", text(&output));
    let trace = |rank: usize| -> Vec<(f32, String)> {
        let path = job.work_dir.with_extension(format!("rank{rank}.trace"));
        let lines = std::fs::read_to_string(path).unwrap();
        let rows = lines.lines().map(|line| line.split_once(' ').unwrap());
        rows.map(|(scale, digest)| (scale.parse().unwrap(), digest.to_owned())).collect()
    };
    let (zero, one) = (trace(0), trace(1));
    assert_eq!(zero, one, "the ranks went different ways");
    assert!(zero.len() > 10);
    assert_eq!(zero[2].0, 1024.0);
    assert_eq!(zero[3].0, 512.0, "the scale was not halved");
    assert_eq!(zero[2].1, zero[3].1, "the overflowing step changed parameters");
    assert_ne!(zero[3].1, zero[4].1, "training did not go on");
    assert_ne!(zero[1].1, zero[2].1, "training had not begun");
    assert_eq!(zero.last().unwrap().0, 512.0);
}
