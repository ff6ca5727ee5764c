//! Mistakes in a configuration: refused with their place, before anything is created.

use tests::{Job, run, text};

use crate::WORKER;

const GOOD: &str = r#"[model]
type = "Mlp"
in_features = 64
hidden = [32]
num_classes = 10

[train_dataloader]
batch_size = 32
dataset = { type = "Digits", split = "train" }

[optim_wrapper]
type = "OptimWrapper"
optimizer = { type = "SGD", lr = 0.1 }

[train_cfg]
max_epochs = 1
"#;

/// The text to replace, its replacement, and the expected error after the file's name.
const MISTAKES: &[(&str, &str, &str)] = &[
    ("\"Mlp\"", "\"Mpl\"", ":2:8: unknown model `Mpl`; did you mean `Mlp`?"),
    (
        "batch_size",
        "batchsize",
        ":7:1: missing key `batch_size` in [train_dataloader] (is `batchsize` on line 8 meant for it?)",
    ),
    ("batch_size = 32", "batch_size = 32.5", ":8:14: `batch_size` must be a non-negative integer"),
    (
        "lr = 0.1",
        "lr = 0.1, momentun = 0.9",
        ":13:39: unknown key `momentun`; did you mean `momentum`?",
    ),
    ("\"train\"", "\"trian\"", ":9:38: unknown value `trian`; did you mean `train`?"),
    (
        "[train_cfg]",
        "[train_cgf]",
        ":1:1: missing key `train_cfg` at the top (is `train_cgf` on line 15 meant for it?)",
    ),
    (
        "max_epochs = 1",
        "max_epochs = 1\nval_intervall = 1",
        ":17:1: unknown key `val_intervall`; did you mean `val_interval`?",
    ),
    ("hidden = [32]", "hidden = [32, \"x\"]", ":4:10: `hidden` must be an array"),
    ("\"SGD\"", "\"Adamw\"", ":13:22: unknown optimizer `Adamw`; did you mean `AdamW`?"),
    ("max_epochs = 1", "max_epochs = ", ":16:"),
    (
        "batch_size = 32",
        "batch_size = -1",
        ":8:14: `batch_size` must be a non-negative integer, got -1",
    ),
    ("hidden = [32]", "hidden = [32]\nstd = [0]", ":5:7: `std` must be positive"),
    (
        "[train_cfg]",
        "[model_wrapper_cfg]\nbucket_cap_mb = -1\n[train_cfg]",
        ":16:17: `bucket_cap_mb` must be positive, got -1",
    ),
    ("lr = 0.1", "lr = -0.1", ":13:"),
    ("lr = 0.1", "lr = nan", ":13:"),
    ("lr = 0.1", "lr = 0.1, nesterov = true", ":13:"),
    ("lr = 0.1", "lr = \"0.1\"", ":13:34: `lr` must be a number, got a string"),
    (
        "[train_cfg]",
        "[val_evaluator]\ntype = \"Accuracy\"\n[train_cfg]",
        ":1:1: missing key `val_dataloader` at the top",
    ),
    (
        "[train_cfg]",
        "[val_dataloader]\nbatch_size = 1\ndataset = { type = \"Digits\" }\n[train_cfg]",
        ":1:1: missing key `val_evaluator` at the top",
    ),
    (
        "[train_cfg]",
        "[[custom_hooks]]\ntype = \"TraceHook\"\n[[custom_hooks]]\ntype = \"TraceHok\"\n[train_cfg]",
        ":18:8: unknown hook `TraceHok`; did you mean `TraceHook`?",
    ),
    ("\"OptimWrapper\"", "\"OptimWrapper\"\nloss_scale = 1.0", ":13:1: unknown key `loss_scale`"),
    ("\"OptimWrapper\"", "\"AmpOptimWrapper\"\nloss_scale = \"dynamc\"", ":13:14: unknown value"),
    ("\"OptimWrapper\"", "\"AmpOptimWrapper\"\nloss_scale = 0", ":13:14: `loss_scale` must be"),
    ("\"OptimWrapper\"", "\"AmpOptimWrapper\"\nloss_scale = 1e-40", ":13:14: "),
    ("\"OptimWrapper\"", "\"AmpOptimWrapper\"\nloss_scale.growth_factor = 0.5", ":13:"),
    ("\"OptimWrapper\"", "\"AmpOptimWrapper\"\nloss_scale.init = 1", ":13:12: unknown key `init`"),
];

#[test]
fn every_mistake_is_named_before_anything_is_created() {
    let dir = tempfile::tempdir().unwrap();
    for (good, bad, expected) in MISTAKES {
        assert!(GOOD.contains(good), "`{good}` is not in the configuration");
        let job = Job::new(dir.path(), "job", &GOOD.replacen(good, bad, 1));
        let output = run(WORKER, job.args());
        let said = text(&output);
        assert_eq!(output.status.code(), Some(1), "{bad}: {said}");
        let expected = format!("{}{expected}", job.config.display());
        assert!(said.contains(&expected), "{bad}:\n{said}\nexpected {expected}");
        assert!(!job.work_dir.exists(), "{bad}: a work directory was created");
    }
}

/// Other ways to say what the good one says.
#[test]
fn other_spellings_are_fine() {
    let dir = tempfile::tempdir().unwrap();
    for (good, other) in [
        ("\n", "\r\n"),
        ("lr = 0.1", "lr = 1, momentum = 0"),
        ("[train_cfg]\nmax_epochs = 1", "[train_cfg]\nmax_epochs = 0x1"),
        ("[train_dataloader]\n", "[train_dataloader]\nsampler.shuffle = false\n"),
        ("\"OptimWrapper\"", "\"AmpOptimWrapper\"\nloss_scale = 1024"),
        ("\"OptimWrapper\"", "\"AmpOptimWrapper\"\nloss_scale = \"dynamic\""),
        ("\"OptimWrapper\"", "\"AmpOptimWrapper\"\nloss_scale = { init_scale = 512 }"),
    ] {
        assert!(GOOD.contains(good), "`{good}` is not in the configuration");
        let job = Job::new(dir.path(), "job", &GOOD.replace(good, other));
        let output = run(WORKER, job.args());
        assert!(output.status.success(), "{other}: {}", text(&output));
        std::fs::remove_dir_all(&job.work_dir).unwrap();
    }
}

#[test]
fn what_is_no_text_file_is_named() {
    let dir = tempfile::tempdir().unwrap();
    let work_dir = dir.path().join("run");
    let latin1 = dir.path().join("latin1.toml");
    std::fs::write(&latin1, b"# caf\xe9\n").unwrap();
    for path in [&latin1, &dir.path().join("absent.toml"), dir.path()] {
        let work_dir = work_dir.to_str().unwrap();
        let output = run(WORKER, ["train", path.to_str().unwrap(), "--work-dir", work_dir]);
        let said = text(&output);
        assert_eq!(output.status.code(), Some(1), "{said}");
        assert!(said.contains(&format!("error: {}: cannot read: ", path.display())), "{said}");
    }
    assert!(!work_dir.exists());
}

#[test]
fn the_configuration_they_were_made_from_is_fine() {
    let dir = tempfile::tempdir().unwrap();
    let job = Job::new(dir.path(), "job", GOOD);
    let output = run(WORKER, job.args());
    assert!(output.status.success(), "{}", text(&output));
    assert!(job.work_dir.join("epoch_1/state.json").is_file());
}
