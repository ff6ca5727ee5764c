//! Errors in configurations that were recorded with MMEngine: here each is an error with its
//! position before any side effect, whether it is in the file or on the command line.

use std::path::Path;
use std::process::{Command, Output};

use runner::config::Config;
use runner::{Error, Result};

use crate::common::from_config;

mod at_once;
mod check;
mod refused;

/// A valid configuration, equivalent to the one used for the recording.
const GOOD: &str = r#"custom_hooks = []

[model]
type = "Mlp"
in_features = 64
num_classes = 10

[optim_wrapper]
type = "OptimWrapper"
optimizer = { type = "SGD", lr = 0.1 }

[train_cfg]
by_epoch = true
max_epochs = 2

[train_dataloader]
batch_size = 64
dataset = { type = "Digits" }

[val_dataloader]
batch_size = 64
dataset = { type = "Digits", split = "test" }

[val_evaluator]
type = "Accuracy"

[default_hooks]
checkpoint = { interval = 1, rule = "greater" }
"#;

type Mistake =
    (&'static str, (&'static str, &'static str, &'static str), (&'static str, &'static str));

/// MMEngine's name of the error; the text to replace in the file, its replacement, the expected
/// error; the same on the command line, if possible there, and its expected error.
const MISTAKES: &[Mistake] = &[
    (
        "unknown_optimizer",
        ("\"SGD\"", "\"SDG\"", "c.toml:10:22: unknown optimizer `SDG`; did you mean `SGD`?"),
        ("optim_wrapper.optimizer.type=SDG", "unknown optimizer `SDG`; did you mean `SGD`?"),
    ),
    (
        "unknown_optim_kwarg",
        (
            "lr = 0.1",
            "lr = 0.1, momentom = 0.9",
            "c.toml:10:39: unknown key `momentom`; did you mean `momentum`?",
        ),
        (
            "optim_wrapper.optimizer.momentom=0.9",
            "unknown key `momentom`; did you mean `momentum`?",
        ),
    ),
    (
        "unknown_hook",
        (
            "[]",
            "[{ type = \"EMAHok\" }]",
            "c.toml:1:26: unknown hook `EMAHok`; did you mean `EMAHook`?",
        ),
        ("", ""),
    ),
    (
        "unknown_model",
        ("\"Mlp\"", "\"Mpl\"", "c.toml:4:8: unknown model `Mpl`; did you mean `Mlp`?"),
        ("model.type=Mpl", "unknown model `Mpl`; did you mean `Mlp`?"),
    ),
    (
        "model_kwarg",
        (
            "num_classes = 10",
            "num_classes = 10\nhiden = [3]",
            "c.toml:7:1: unknown key `hiden`; did you mean `hidden`?",
        ),
        ("model.hiden=3,4", "unknown key `hiden`; did you mean `hidden`?"),
    ),
    (
        "top_level_typo_ignored",
        (
            "custom_hooks",
            "optim_wraper = 1\ncustom_hooks",
            "c.toml:1:1: unknown key `optim_wraper`; did you mean `optim_wrapper`?",
        ),
        ("train_cgf.max_epochs=3", "unknown key `train_cgf`; did you mean `train_cfg`?"),
    ),
    (
        "missing_optim",
        (
            "[optim_wrapper]",
            "[param_wrapper]",
            "c.toml:1:1: missing key `optim_wrapper` at the top",
        ),
        ("optim_wrapper=None", "missing key `optim_wrapper` at the top"),
    ),
    (
        "train_cfg_typo",
        (
            "max_epochs",
            "max_epoch",
            "c.toml:12:1: missing key `max_epochs` in [train_cfg] (is `max_epoch` on line 14 meant for it?)",
        ),
        ("train_cfg.max_epoch=3", "unknown key `max_epoch`; did you mean `max_epochs`?"),
    ),
    (
        "train_cfg_type_and_by_epoch",
        (
            "by_epoch = true",
            "by_epoch = true\ntype = \"EpochBasedTrainLoop\"",
            "c.toml:14:8: `type` and `by_epoch` cannot both be set",
        ),
        ("train_cfg.type=EpochBasedTrainLoop", "`type` and `by_epoch` cannot both be set"),
    ),
    (
        "max_epochs_str",
        (
            "max_epochs = 2",
            "max_epochs = \"three\"",
            "c.toml:14:14: `max_epochs` must be a non-negative integer, got a string",
        ),
        ("train_cfg.max_epochs=three", "`max_epochs` must be a non-negative integer, got a string"),
    ),
    (
        "bad_launcher",
        (
            "custom_hooks",
            "launcher = \"torch\"\ncustom_hooks",
            "c.toml:1:12: unknown value `torch`",
        ),
        ("launcher=pytorh", "unknown value `pytorh`; did you mean `pytorch`?"),
    ),
    (
        "bad_priority",
        (
            "[]",
            "[{ type = \"EMAHook\", priority = \"HIGHER\" }]",
            "c.toml:1:48: unknown value `HIGHER`; did you mean `HIGH`?",
        ),
        (
            "default_hooks.checkpoint.priority=HIGHER",
            "unknown value `HIGHER`; did you mean `HIGH`?",
        ),
    ),
    (
        "bad_priority_int",
        (
            "[]",
            "[{ type = \"EMAHook\", priority = 101 }]",
            "c.toml:1:48: `priority` must be between 0 and 100, got 101",
        ),
        ("default_hooks.checkpoint.priority=101", "`priority` must be between 0 and 100, got 101"),
    ),
    (
        "loss_scale",
        (
            "\"OptimWrapper\"",
            "\"AmpOptimWrapper\"\nloss_scale = \"dynamc\"",
            "c.toml:10:14: unknown value `dynamc`; did you mean `dynamic`?",
        ),
        ("", ""),
    ),
    (
        "amp_dtype",
        (
            "\"OptimWrapper\"",
            "\"AmpOptimWrapper\"\ndtype = \"bf16\"",
            "c.toml:10:9: unknown value `bf16`",
        ),
        ("", ""),
    ),
    (
        "wrapper_unknown",
        (
            "[train_cfg]",
            "[model_wrapper_cfg]\ntype = \"MyDDP\"\n[train_cfg]",
            "c.toml:13:8: unknown model wrapper `MyDDP`",
        ),
        ("model_wrapper_cfg.type=MyDDP", "unknown model wrapper `MyDDP`"),
    ),
    (
        "ckpt_best",
        (
            "interval = 1",
            "interval = 1, save_best = \"acurracy\"",
            "c.toml:28:42: unknown metric `acurracy`; did you mean `accuracy`?",
        ),
        (
            "default_hooks.checkpoint.save_best=acurracy",
            "unknown metric `acurracy`; did you mean `accuracy`?",
        ),
    ),
    (
        "sched_end",
        (
            "[train_cfg]",
            "[param_scheduler]\ntype = \"LinearLR\"\nbegin = 5\nend = 5\n[train_cfg]",
            "c.toml:15:7: end should be larger than begin, but got begin=5, end=5",
        ),
        ("", ""),
    ),
    (
        "sched_unknown",
        (
            "[train_cfg]",
            "[param_scheduler]\ntype = \"CosineLR\"\n[train_cfg]",
            "c.toml:13:8: unknown scheduler `CosineLR`; did you mean `",
        ),
        ("param_scheduler.type=CosineLR", "unknown scheduler `CosineLR`; did you mean `"),
    ),
];

fn said(config: Result<Config>) -> String {
    match config.and_then(from_config) {
        Err(error @ Error::Config { .. }) => error.to_string(),
        other => panic!("not refused: {other:?}"),
    }
}

#[test]
fn mistakes_have_file_line_and_column() {
    let config =
        Config::from_text("c.toml", "launcher = 'nonee'\n[wrong]\n").and_then(|mut config| {
            config.override_with(["seeed=1"])?;
            Ok(config)
        });
    let error = config.and_then(from_config).unwrap_err();
    let Error::Config { mistakes } = &error else { panic!("{error}") };
    let at = |name: &str| {
        let found = mistakes.iter().find(|mistake| mistake.reason.contains(name));
        let place = found.and_then(|mistake| mistake.place.as_ref()).unwrap();
        (&*place.source, place.line_and_column)
    };
    assert_eq!(at("`nonee`"), ("c.toml", Some((1, 12))));
    assert_eq!(at("`wrong`"), ("c.toml", Some((2, 2))));
    assert_eq!(at("`seeed`"), ("--cfg-options seeed=1", None));
    let lines: Vec<_> = mistakes.iter().map(ToString::to_string).collect();
    assert_eq!(lines.join("\n"), error.to_string());
}

/// Runs the program in a directory that contains the configuration as `c.toml`.
fn run(dir: &Path, config: &str, args: &[&str], envs: &[(&str, &str)]) -> Output {
    std::fs::write(dir.join("c.toml"), config).unwrap();
    let mut command = Command::new(env!("CARGO_BIN_EXE_runner"));
    command.args(args).current_dir(dir).envs(envs.iter().copied()).output().unwrap()
}

fn stderr(output: &Output) -> String {
    String::from_utf8_lossy(&output.stderr).into_owned()
}

#[test]
fn environment_variable_keeps_spaces_and_commas() {
    let dir = tempfile::tempdir().unwrap();
    let text = "work_dir = '{{ $RUN_DIR }}'\nexperiment_name = '{{ $JOB }}'\nlr = '{{ $LR }}'\n";
    let envs = [("RUN_DIR", "runs/my set"), ("JOB", "a, b"), ("LR", "1e-2")];
    let shown = run(dir.path(), text, &["config", "c.toml"], &envs).stdout;
    let wanted = "work_dir = \"runs/my set\"\nexperiment_name = \"a, b\"\nlr = \"{{ $:1e-2 }}\"\n";
    assert_eq!(String::from_utf8(shown).unwrap(), wanted);
    // A number is used as a string if the key is one.
    let text = format!("experiment_name = '{{{{ $JOB }}}}'\n{GOOD}");
    let read = run(dir.path(), &text, &["check", "c.toml"], &[("JOB", "4711")]);
    assert!(read.status.success(), "{}", stderr(&read));
}

#[test]
fn errors_are_printed_without_backtrace() {
    let dir = tempfile::tempdir().unwrap();
    let backtrace = [("RUST_BACKTRACE", "1")];
    for (good, bad, says) in [
        ("num_classes = 10", "num_classes = 1", "error: forward: cross_entropy: label "),
        (
            "in_features = 64",
            "in_features = 65",
            "error: forward: linear: an input of shape [64, 64] does not fit a weight of shape ",
        ),
    ] {
        assert!(GOOD.contains(good), "{good}");
        let config = GOOD.replacen(good, bad, 1);
        let output = run(dir.path(), &config, &["train", "c.toml"], &backtrace);
        let said = stderr(&output);
        assert_eq!(output.status.code(), Some(1), "{said}");
        assert!(said.starts_with(says), "{said}");
        assert_eq!(said.lines().count(), 1, "{said}");
    }
}

/// A configuration with an error in almost every table, and with data that have more classes than
/// the model.
const MANY: &str = r#"sync_bn = "torch"

[model]
type = "Mlp"
in_features = 64
num_classes = 9

[train_dataloader]
batch_size = -1
prefetch_factor = 2
dataset = { type = "Digits" }

[val_dataloader]
batch_size = 64
dataset = { type = "Digits", split = "test" }

[val_evaluator]
type = "Accuracy"

[optim_wrapper]
type = "AmpOptimWrapper"
optimizer = { type = "SGD", lr = -0.1, momentun = 0.9 }
clip_grad = { max_norm = -2 }
loss_scale = { init_scale = -8 }

[[param_scheduler]]
type = "MultiStepLR"
milestones = [8, 5]

[[param_scheduler]]
type = "LinearLR"
start_factor = 0.1
end_factor = -1

[train_cfg]
max_epoch = 2
val_interval = 0

[default_hooks]
logger = { interval = 0 }

[[custom_hooks]]
type = "EarlyStoppingHook"
monitor = "acurracy"
patience = 0
"#;

/// Expected errors in order.
const TOLD: [&str; 17] = [
    "c.toml:1:1: `sync_bn` is not supported",
    "c.toml:24:29: invalid scale: -8 is not finite and at least min_scale",
    "c.toml:23:26: invalid max_norm: -2",
    "c.toml:22:34: invalid learning rate: -0.1",
    "c.toml:22:40: unknown key `momentun`; did you mean `momentum`?",
    "c.toml:10:19: `prefetch_factor` needs `num_workers` to be at least 1",
    "c.toml:9:14: `batch_size` must be a non-negative integer, got -1",
    "c.toml:35:1: missing key `max_epochs` in [train_cfg] (is `max_epoch` on line 36 meant for it?)",
    "c.toml:37:16: `val_interval` must be at least 1, got 0",
    "c.toml:28:14: `milestones` must be in ascending order",
    "c.toml:33:14: `end_factor` must be from 0 to 1",
    "c.toml:40:23: `interval` must be at least 1, got 0",
    "c.toml:44:11: cannot derive from the name `acurracy`",
    "c.toml:45:12: `patience` must be at least 1, got 0",
    "c.toml:44:11: unknown metric `acurracy`; did you mean `accuracy`?",
    "c.toml:8:1: train_dataloader: trying samples on the model: forward: cross_entropy: label 9 is none of 9",
    "c.toml:13:1: val_dataloader: trying samples on the model: metric `Accuracy`: label 9 (number 2 of the batch)",
];

#[test]
fn all_errors_are_reported_at_once() {
    let dir = tempfile::tempdir().unwrap();
    for command in ["check", "train"] {
        let output = run(dir.path(), MANY, &[command, "c.toml"], &[]);
        let said = stderr(&output);
        assert_eq!(output.status.code(), Some(1), "{said}");
        // `train` reports errors before it has loaded data.
        let told = if command == "check" { &TOLD[..] } else { &TOLD[..TOLD.len() - 2] };
        for (line, wanted) in said.lines().zip(told) {
            assert!(line.starts_with(&format!("error: {wanted}")), "{line}\n{wanted}\n\n{said}");
        }
        assert_eq!(said.lines().count(), told.len(), "{said}");
    }
    assert!(!dir.path().join("work_dirs").exists());
}

#[test]
fn run_by_iterations_that_saves_only_at_its_end_is_a_warning() {
    let dir = tempfile::tempdir().unwrap();
    let by_iters = "by_epoch = false\nmax_iters = 3";
    let config = GOOD.replacen("by_epoch = true\nmax_epochs = 2", by_iters, 1);
    let warned = |checkpoint: &str, command: &str| {
        let config = config.replacen("interval = 1,", checkpoint, 1);
        let _ = std::fs::remove_dir_all(dir.path().join("work_dirs"));
        let output = run(dir.path(), &config, &[command, "c.toml"], &[]);
        assert!(output.status.success(), "{}", stderr(&output));
        let said = [output.stdout, output.stderr].concat();
        String::from_utf8(said)
            .unwrap()
            .matches("no checkpoint before the end of this run of 3")
            .count()
    };
    for command in ["check", "train"] {
        assert_eq!(warned("interval = 1,", command), 1, "{command}");
        assert_eq!(warned("", command), 1, "{command}");
    }
    assert_eq!(warned("by_epoch = false, interval = 4,", "check"), 1);
    assert_eq!(warned("by_epoch = false, interval = 3,", "check"), 0);
    assert_eq!(warned("interval = -1,", "check"), 0);
}

#[test]
fn configuration_without_a_command_suggests_train_once() {
    let dir = tempfile::tempdir().unwrap();
    let launch = "runner launch ... train c.toml";
    for (args, command) in [
        (&["c.toml"][..], "runner train c.toml"),
        (&["launch", "--nproc-per-node", "2", "c.toml", "--resume"], launch),
        (&["launch", "--nproc-per-node", "2", "--", "c.toml"], launch),
        (&["launch", "./c.toml"], "runner launch ... train ./c.toml"),
    ] {
        let output = run(dir.path(), GOOD, args, &[]);
        let config = command.rsplit(' ').next().unwrap();
        let told = format!(
            "error: `{config}` is a configuration, not a command: did you mean `{command}`?\n"
        );
        assert_eq!((output.status.code(), stderr(&output)), (Some(2), told), "{args:?}");
    }
    let output = run(dir.path(), GOOD, &["launch", "--nproc-per-node=2", "trian", "c.toml"], &[]);
    let told = stderr(&output);
    assert_eq!(told.matches("unrecognized subcommand 'trian'").count(), 1);
    assert!(told.contains("note: `runner launch --no-python -- PROGRAM` starts"), "{told}");
}

#[test]
fn invalid_checkpoint_error_explains_what_is_expected() {
    let dir = tempfile::tempdir().unwrap();
    let said =
        |from: &str| stderr(&run(dir.path(), GOOD, &["train", "c.toml", "--load-from", from], &[]));
    let other = said("x.onnx");
    assert!(other.starts_with("error: x.onnx: not a checkpoint"), "{other}");
    assert!(other.contains("a directory such as work_dirs/NAME/epoch_3"), "{other}");
    assert!(other.contains("a .pth, .pt or .bin of PyTorch"), "{other}");
    assert!(said("x.pth").starts_with("error: x.pth: no such checkpoint"));
}

#[test]
fn auto_scale_lr_logs_the_rate() {
    let dir = tempfile::tempdir().unwrap();
    let config = format!("auto_scale_lr = {{ enable = true, base_batch_size = 32 }}\n{GOOD}");
    let output = run(dir.path(), &config, &["train", "c.toml"], &[]);
    let said = String::from_utf8(output.stdout).unwrap();
    let told = "auto_scale_lr: learning rate 0.2 instead of 0.1: a batch of all ranks has 64 samples, and \
                base_batch_size is 32";
    assert!(said.contains(told), "{said}{}", String::from_utf8_lossy(&output.stderr));
}

#[test]
fn recorded_errors_are_reported_with_position() {
    let recorded = include_str!("../../vectors/errors.txt");
    let recorded = recorded.lines().filter_map(|l| l.strip_prefix("### ")?.split(" ::").next());
    let names: Vec<_> = MISTAKES.iter().map(|(name, ..)| *name).collect();
    assert_eq!(recorded.collect::<Vec<_>>(), names);
    from_config(Config::from_text("c.toml", GOOD).unwrap()).unwrap();
    for (name, (good, bad, expected), (option, of_option)) in MISTAKES {
        assert!(GOOD.contains(good), "{name}");
        let text = said(Config::from_text("c.toml", GOOD.replacen(good, bad, 1)));
        assert!(text.starts_with(expected), "{name}: {text}\n{expected}");
        if option.is_empty() {
            continue;
        }
        let mut config = Config::from_text("c.toml", GOOD).unwrap();
        config.override_with([option]).unwrap();
        let text = said(Ok(config));
        // A missing key has no position of its own.
        let place = if *name == "missing_optim" { "c.toml:1:1: " } else { "--cfg-options " };
        assert!(text.starts_with(place) && text.contains(of_option), "{name}: {text}");
    }
}

#[test]
fn scheduler_with_an_unknown_metric_is_refused() {
    let scheduler = "[param_scheduler]\ntype = \"ReduceOnPlateauLR\"\n";
    let said = |more: &str| {
        let text = GOOD.replacen("[train_cfg]", &format!("{scheduler}{more}[train_cfg]"), 1);
        said(Config::from_text("c.toml", text))
    };
    let text = said("monitor = \"acurracy\"\n");
    assert!(text.starts_with("c.toml:14:11: unknown metric `acurracy`; did you mean"), "{text}");
    // The default metric is `loss`.
    let text = said("");
    assert!(text.starts_with("c.toml:13:8: unknown metric `loss`"), "{text}");
}

#[test]
fn errors_in_one_of_several_metrics_are_named() {
    let evaluator = |metrics: &str| {
        let one = "[val_evaluator]\ntype = \"Accuracy\"\n";
        let text = GOOD.replace(one, &format!("[[val_evaluator]]\ntype = \"Accuracy\"\n{metrics}"));
        said(Config::from_text("c.toml", text))
    };
    for (metrics, says) in [
        ("topk = [1, 0]", "c.toml:26:8: `topk` must each be at least 1, got 0"),
        (
            "[[val_evaluator]]\ntype = \"Accuracy\"",
            "c.toml:27:8: two metrics are named `accuracy`: set `prefix`",
        ),
        (
            "[[val_evaluator]]\ntype = \"AveragePrecision\"\nnum_classes = 10\naverage = \"micro\"",
            "c.toml:29:11: unknown value `micro`",
        ),
        (
            "[[val_evaluator]]\ntype = \"MeanIoU\"\nnum_clases = 10",
            "c.toml:26:1: missing key `num_classes` in [val_evaluator] (is `num_clases` on line 28 meant for it?)",
        ),
        ("collect_device = \"disk\"", "c.toml:26:18: unknown value `disk`"),
    ] {
        let text = evaluator(metrics);
        assert!(text.starts_with(says), "{text}");
    }
}

#[test]
fn runs_by_iterations_are_read() {
    let text = GOOD.replace(
        "by_epoch = true\nmax_epochs = 2",
        "type = \"IterBasedTrainLoop\"\nmax_iters = 9\ndynamic_intervals = [[4, 2], [6, 1]]",
    );
    let text = text.replace("batch_size = 64\ndataset = { type = \"Digits\" }", "batch_size = 64\ndataset = { type = \"Digits\" }\nsampler = { type = \"InfiniteSampler\" }");
    from_config(Config::from_text("c.toml", text.clone()).unwrap()).unwrap();
    for (good, bad, says) in [
        ("[[4, 2], [6, 1]]", "[[4, 2], [4, 1]]", "c.toml:15:21: `dynamic_intervals` must be pairs"),
        ("[[4, 2], [6, 1]]", "[[4, 0]]", "c.toml:15:21: `dynamic_intervals` must be pairs"),
        ("max_iters = 9", "max_iter = 9", "c.toml:12:1: missing key `max_iters`"),
        (
            "[val_dataloader]",
            "[val_dataloader]\nsampler = { type = \"InfiniteSampler\" }",
            "c.toml:23:11: InfiniteSampler has no end",
        ),
    ] {
        assert!(text.contains(good), "{good}");
        let said = said(Config::from_text("c.toml", text.replacen(good, bad, 1)));
        assert!(said.starts_with(says), "{said}");
    }
}
