//! Whole runs with ranks as threads: resuming, failures on one rank, sizes that do not divide.

mod budget;
mod elastic;
mod frozen;
mod lora;
mod midway;
mod more;
mod overflow;
mod pretrained;
mod same_files;
mod saving;
mod stream;
mod workers;

use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use collective::ProcessGroup;
use runner::config::Config;
use runner::data::{Array, ArrayData, Batch, BoxError, Dataset, Sample, SampleRng};
use runner::evaluate::Accuracy;
use runner::hooks::Hook;
use runner::{DataLoaderConfig, Error, Result, Runner, RunnerBuilder};

use crate::common::from_config;

/// 1438 samples: 12 batches per epoch on two ranks.
const MLP: &str = r#"
model = { type = "Mlp", in_features = 64, hidden = [8], num_classes = 10 }
train_dataloader = { batch_size = 64, dataset = { type = "Digits" } }
train_cfg = { max_epochs = 2 }
randomness.seed = 3
[optim_wrapper]
type = "AmpOptimWrapper"
dtype = "float16"
accumulative_counts = 1
loss_scale = { init_scale = 256.0, growth_interval = 5 }
optimizer = { type = "SGD", lr = 0.05, momentum = 0.9 }
"#;

const VALIDATION: &str = r#"
val_dataloader = { batch_size = 64, dataset = { type = "Digits", split = "test" } }
val_evaluator = { type = "Accuracy" }
"#;

/// Metrics of a run, or its error, on each rank.
type Outcome = Vec<Result<Vec<(String, f64)>>>;

/// Runs `config` on `ranks` threads; `change` modifies each builder first.
fn run(
    config: &str,
    dir: &Path,
    ranks: usize,
    change: impl Fn(RunnerBuilder, usize) -> RunnerBuilder + Sync,
) -> Outcome {
    let groups = ProcessGroup::threads(ranks, Duration::from_secs(60)).unwrap();
    std::thread::scope(|scope| {
        let change = &change;
        let threads: Vec<_> = groups
            .into_iter()
            .map(|group| {
                scope.spawn(move || {
                    let rank = group.rank();
                    let config = Config::from_text("c.toml", config)?;
                    let builder = from_config(config)?.work_dir(dir);
                    change(builder.process_group(group), rank).build()?.train()
                })
            })
            .collect();
        threads.into_iter().map(|t| t.join().unwrap()).collect()
    })
}

fn resume(config: &str, dir: &Path, ranks: usize) {
    for outcome in run(config, dir, ranks, |builder, _| builder.resume(true)) {
        outcome.unwrap();
    }
}

/// Action of a hook.
type Act = Box<dyn FnMut(&mut Runner) -> Result<()> + Send>;

/// Calls a function before each iteration.
struct BeforeIter(Act);

impl Hook for BeforeIter {
    fn name(&self) -> &'static str {
        "BeforeIter"
    }

    fn before_train_iter(&mut self, runner: &mut Runner, _: &mut Batch) -> Result<()> {
        (self.0)(runner)
    }
}

fn before_iter(
    iter: usize,
    mut act: impl FnMut(&mut Runner) -> Result<()> + Send + 'static,
) -> Box<dyn Hook> {
    Box::new(BeforeIter(Box::new(move |runner| {
        if runner.position().iter == iter { act(runner) } else { Ok(()) }
    })))
}

/// Ends the run on all ranks before iteration `iter`, like a kill.
fn killed(config: &str, dir: &Path, ranks: usize, iter: usize) {
    let outcome = run(config, dir, ranks, |builder, _| {
        builder.hook(before_iter(iter, |_| Err(Error::data("killed"))))
    });
    assert!(outcome.iter().all(Result::is_err));
}

/// Ends the run before iteration `iter` by exhausting its time budget there. Iterations take so
/// long that the ranks exchange before each. If the budget was exhausted earlier, on a busy
/// machine, repeats with a longer one in a new `dir`.
fn out_of_time(config: &str, dir: &Path, ranks: usize, iter: usize) -> Outcome {
    for budget in [3, 12, 48] {
        let reached = Arc::new(AtomicBool::new(false));
        let outcome = run(config, dir, ranks, |builder, _| {
            let reached = Arc::clone(&reached);
            let wait = move |runner: &mut Runner| {
                let is_last = runner.position().iter == iter - 1;
                reached.fetch_or(is_last, Ordering::Relaxed);
                let left = runner.budget_left().unwrap();
                std::thread::sleep(if is_last { left } else { Duration::from_millis(25) });
                Ok(())
            };
            let budget = Some(Duration::from_secs(budget));
            builder.time_budget(budget).hook(Box::new(BeforeIter(Box::new(wait))))
        });
        if reached.load(Ordering::Relaxed) {
            return outcome;
        }
        std::fs::remove_dir_all(dir).unwrap();
    }
    panic!("48 s were exhausted before iteration {iter}");
}

fn assert_equal(a: &Path, b: &Path, checkpoint: &str) {
    for file in ["model.safetensors", "optimizer.safetensors"] {
        let read = |dir: &Path| std::fs::read(dir.join(checkpoint).join(file)).unwrap();
        assert!(read(a) == read(b), "{file} differs");
    }
}

/// Logs of rank 0 in `dir`, of all runs there.
fn log(dir: &Path) -> String {
    let files = walk(dir).into_iter().filter(|f| f.extension().is_some_and(|e| e == "log"));
    files.map(|f| std::fs::read_to_string(f).unwrap()).collect()
}

fn walk(dir: &Path) -> Vec<std::path::PathBuf> {
    let mut files = Vec::new();
    for entry in std::fs::read_dir(dir).unwrap() {
        let path = entry.unwrap().path();
        if path.is_dir() { files.extend(walk(&path)) } else { files.push(path) }
    }
    files.sort();
    files
}

fn checkpoints(dir: &Path) -> Vec<String> {
    let entries = std::fs::read_dir(dir).unwrap().map(|e| e.unwrap());
    let mut names: Vec<_> = entries
        .filter(|e| e.path().join("state.json").is_file())
        .map(|e| e.file_name().into_string().unwrap())
        .collect();
    names.sort();
    names
}

#[test]
fn drawn_seed_is_resumed() {
    let dir = tempfile::tempdir().unwrap();
    let (a, b) = (dir.path().join("a"), dir.path().join("b"));
    let unseeded = MLP.replace("randomness.seed = 3", "");
    killed(&unseeded, &a, 2, 17);
    resume(&unseeded, &a, 2);
    let state = std::fs::read(a.join("epoch_1/state.json")).unwrap();
    let state: serde_json::Value = serde_json::from_slice(&state).unwrap();
    let seed = state["seed"].as_u64().unwrap();
    let whole = run(&unseeded, &b, 2, |builder, _| builder.seed(seed));
    assert!(whole.iter().all(Result::is_ok));
    assert_equal(&a, &b, "epoch_2");
    // The seed of the checkpoint overrides the configuration's, too, and this is logged.
    resume(&format!("{unseeded}\n[randomness]\nseed = 77"), &a, 2);
    assert!(log(&a).contains(&format!("seed {seed} of the checkpoint")), "{}", log(&a));
}

#[test]
fn accumulation_across_the_end_of_an_epoch_is_resumed() {
    let dir = tempfile::tempdir().unwrap();
    let (whole, broken) = (dir.path().join("whole"), dir.path().join("broken"));
    // 12 batches per epoch: two are accumulated at its end.
    let config = MLP.replace("accumulative_counts = 1", "accumulative_counts = 5");
    resume(&config, &whole, 2);
    killed(&config, &broken, 2, 14);
    resume(&config, &broken, 2);
    assert_equal(&whole, &broken, "epoch_2");
}

#[test]
fn time_budget_exhausted_during_accumulation_is_resumed() {
    let dir = tempfile::tempdir().unwrap();
    let (whole, broken) = (dir.path().join("whole"), dir.path().join("broken"));
    let config = MLP.replace("accumulative_counts = 1", "accumulative_counts = 5");
    resume(&config, &whole, 2);
    assert!(out_of_time(&config, &broken, 2, 8).iter().all(Result::is_ok));
    assert_eq!(checkpoints(&broken), ["iter_8"]);
    let other = config.replace("type = \"Digits\" }", "type = \"Digits\", split = \"test\" }");
    for outcome in run(&other, &broken, 2, |builder, _| builder.resume(true)) {
        let said = outcome.unwrap_err().to_string();
        assert!(said.contains("iter_8 was written inside an epoch of 1438 samples"), "{said}");
    }
    resume(&config, &broken, 2);
    assert_equal(&whole, &broken, "epoch_2");
}

#[test]
fn early_stopping_also_ends_the_resumed_run() {
    let dir = tempfile::tempdir().unwrap();
    let (whole, broken) = (dir.path().join("whole"), dir.path().join("broken"));
    let stop = "[[custom_hooks]]\ntype = 'EarlyStoppingHook'\nmonitor = 'accuracy'\n\
                min_delta = 1e6\npatience = 2\n";
    let config = format!("{VALIDATION}{MLP}{stop}").replace("epochs = 2", "epochs = 9");
    resume(&config, &whole, 2);
    assert_eq!(checkpoints(&whole), ["epoch_1", "epoch_2", "epoch_3"]);
    assert!(log(&whole).contains("`accuracy` has not improved on"), "{}", log(&whole));
    killed(&config, &broken, 2, 25);
    resume(&config, &broken, 2);
    assert_eq!(checkpoints(&broken), ["epoch_1", "epoch_2", "epoch_3"]);
    assert_equal(&whole, &broken, "epoch_3");
}

/// A warm-up by iterations in addition to steps by epochs, an increasing momentum, and a plateau
/// that applies in every epoch but the first.
const SCHEDULERS: &str = r#"
[[param_scheduler]]
type = "LinearLR"
start_factor = 0.1
end = 15
by_epoch = false
[[param_scheduler]]
type = "StepLR"
step_size = 1
gamma = 0.5
[[param_scheduler]]
type = "LinearMomentum"
end = 2
convert_to_iter_based = true
[[param_scheduler]]
type = "ReduceOnPlateauLR"
monitor = "accuracy"
rule = "greater"
threshold_rule = "abs"
threshold = 1e6
patience = 0
"#;

#[test]
fn schedulers_by_iterations_epochs_and_metrics_are_resumed() {
    let dir = tempfile::tempdir().unwrap();
    let (whole, broken) = (dir.path().join("whole"), dir.path().join("broken"));
    let config = format!("{VALIDATION}{MLP}{SCHEDULERS}").replace("epochs = 2", "epochs = 3");
    let outcome = run(&config, &whole, 2, |mut builder, _| {
        // Iterations, and the optimizer's values there: at begin and end of the warm-up and the
        // momentum schedule.
        for (iter, lr, momentum) in [
            (0, 0.05 * 0.1, 0.9 / 3.0),
            (16, 0.05 * 0.5, 0.9 * (1.0 + 2.0 * 16.0 / 23.0) / 3.0),
            (25, 0.05 * 0.25 * 0.1, 0.9),
        ] {
            builder = builder.hook(before_iter(iter, move |runner| {
                let optimizer = runner.optim_wrapper().optimizer();
                let got = (optimizer.lr(0)?, optimizer.momentum(0)?.unwrap());
                let near = |a: f64, b: f64| (a - b).abs() < 0.02 * b;
                assert!(near(got.0, lr) && near(got.1, momentum), "{iter}: {got:?}");
                Ok(())
            }));
        }
        builder
    });
    assert!(outcome.iter().all(Result::is_ok), "{outcome:?}");
    // The checkpoint of the first epoch was saved before its validation, and so before the
    // plateau's step.
    killed(&config, &broken, 2, 20);
    resume(&config, &broken, 2);
    assert_equal(&whole, &broken, "epoch_3");
}

#[test]
fn momentum_schedule_without_momentum_is_an_error() {
    let dir = tempfile::tempdir().unwrap();
    let config = MLP.replace("type = \"SGD\", lr = 0.05, momentum = 0.9", "type = \"Adadelta\"");
    let config = format!("{config}{SCHEDULERS}");
    let outcome = run(&config, &dir.path().join("run"), 1, |builder, _| builder);
    let error = outcome[0].as_ref().unwrap_err().to_string();
    assert!(error.contains("adadelta has no momentum"), "{error}");
    assert!(!dir.path().join("run").exists());
}

#[test]
fn batch_statistics_of_three_ranks_are_resumed() {
    let dir = tempfile::tempdir().unwrap();
    let (whole, broken) = (dir.path().join("whole"), dir.path().join("broken"));
    let resnet =
        r#"{ type = "ResNet", in_channels = 1, num_classes = 10, width = 8, blocks = [1, 1] }"#;
    let mlp = r#"{ type = "Mlp", in_features = 64, hidden = [8], num_classes = 10 }"#;
    let config = format!("{VALIDATION}{MLP}").replace(mlp, resnet);
    resume(&config, &whole, 3);
    // Validation comes after the checkpoint and must not change the state that training resumes
    // from.
    killed(&config, &broken, 3, 9);
    resume(&config, &broken, 3);
    assert_equal(&whole, &broken, "epoch_2");
}

#[test]
fn pruning_continues_after_resume() {
    let dir = tempfile::tempdir().unwrap();
    let config = MLP.replace("max_epochs = 2", "max_epochs = 5");
    let config = format!("default_hooks.checkpoint.max_keep_ckpts = 2\n{config}");
    killed(&config, dir.path(), 2, 40);
    assert_eq!(checkpoints(dir.path()), ["epoch_2", "epoch_3"]);
    // As after a kill between saving and pruning.
    let (from, to) = (dir.path().join("epoch_2"), dir.path().join("epoch_1"));
    std::fs::create_dir(&to).unwrap();
    for file in walk(&from) {
        std::fs::copy(&file, to.join(file.file_name().unwrap())).unwrap();
    }
    resume(&config, dir.path(), 2);
    assert_eq!(checkpoints(dir.path()), ["epoch_4", "epoch_5"]);
}

#[test]
fn finished_run_resumes_without_training() {
    let dir = tempfile::tempdir().unwrap();
    resume(MLP, dir.path(), 2);
    let read = || std::fs::read(dir.path().join("epoch_2/state.json")).unwrap();
    let before = read();
    resume(MLP, dir.path(), 2);
    assert_eq!(before, read());
    assert_eq!(checkpoints(dir.path()), ["epoch_1", "epoch_2"]);
}

#[test]
fn renamed_checkpoint_is_found() {
    let dir = tempfile::tempdir().unwrap();
    killed(MLP, dir.path(), 2, 14);
    // Killed while `epoch_1` was being replaced.
    std::fs::rename(dir.path().join("epoch_1"), dir.path().join(".epoch_1.old")).unwrap();
    resume(MLP, dir.path(), 2);
    assert!(log(dir.path()).contains("epoch_1: epoch 1, iteration 12"));
    assert!(!dir.path().join(".epoch_1.old").exists());
}

/// Checks the error of each rank: rank 1's contains `reason`, the others' contain rank 1's error.
fn assert_all_end_with(outcome: Outcome, reason: &str) {
    for (rank, outcome) in outcome.into_iter().enumerate() {
        let said = outcome.unwrap_err().to_string();
        let peers = if rank == 1 { "" } else { "aborted by rank 1" };
        assert!(said.contains(reason) && said.contains(peers), "rank {rank}: {said}");
    }
}

#[test]
fn failure_of_a_hook_on_one_rank_ends_all() {
    let dir = tempfile::tempdir().unwrap();
    let errors: [fn() -> Error; 2] = [
        || Error::data("the hook's reason"),
        || Error::Collective(collective::Error::InvalidArgument("the hook's reason".into())),
    ];
    for error in errors {
        let outcome = run(MLP, dir.path(), 3, |builder, rank| {
            let act = move |_: &mut Runner| if rank == 1 { Err(error()) } else { Ok(()) };
            builder.hook(before_iter(3, act))
        });
        assert_all_end_with(outcome, "the hook's reason");
    }
}

/// A data set of `len` samples that fails at sample `broken`.
struct Few {
    len: usize,
    broken: usize,
}

impl Dataset for Few {
    fn name(&self) -> &'static str {
        "few"
    }

    fn len(&self) -> usize {
        self.len
    }

    fn sample(&self, index: usize, _: &mut SampleRng) -> Result<Sample, BoxError> {
        if index == self.broken {
            return Err("it is broken".into());
        }
        Ok(Sample::new()
            .with("inputs", Array::new([1, 8, 8], vec![index as u8; 64])?)
            .with("labels", Array::scalar((index % 10) as i64)))
    }
}

fn few(len: usize, broken: usize, batch_size: usize, drop_last: bool) -> DataLoaderConfig {
    DataLoaderConfig { drop_last, ..DataLoaderConfig::new(Few { len, broken }, batch_size) }
}

#[test]
fn failure_to_build_a_model_on_one_rank_ends_all_and_creates_nothing() {
    let dir = tempfile::tempdir().unwrap();
    let work_dir = dir.path().join("run");
    let outcome = run(MLP, &work_dir, 3, |builder, rank| match rank {
        1 => builder.model(Box::new(|_| Err(Error::engine("no memory")))),
        _ => builder,
    });
    assert_all_end_with(outcome, "no memory");
    assert!(!work_dir.exists());
    // A part that is created without communication between the ranks.
    let outcome = run(MLP, &work_dir, 3, |builder, rank| match rank {
        1 => builder.train_dataloader(few(0, 0, 2, false)),
        _ => builder,
    });
    assert_all_end_with(outcome, "it has 0 samples");
    assert!(!work_dir.exists());
}

#[test]
fn engine_error_on_one_rank_ends_all() {
    let dir = tempfile::tempdir().unwrap();
    struct Shrink;
    impl Hook for Shrink {
        fn name(&self) -> &'static str {
            "Shrink"
        }
        fn before_train_iter(&mut self, runner: &mut Runner, batch: &mut Batch) -> Result<()> {
            if runner.group().rank() == 1 && runner.position().iter == 4 {
                *batch = Batch::new();
            }
            Ok(())
        }
    }
    let outcome = run(MLP, dir.path(), 3, |builder, _| builder.hook(Box::new(Shrink)));
    assert_all_end_with(outcome, "no field `inputs`");
}

#[test]
fn fewer_samples_than_a_batch_or_than_ranks() {
    let dir = tempfile::tempdir().unwrap();
    for (len, ranks) in [(5, 2), (2, 3), (1, 1)] {
        let outcome = run(MLP, &dir.path().join(len.to_string()), ranks, |builder, _| {
            let validation = few(len, 99, 4, false);
            builder
                .train_dataloader(few(len, 99, 4, false))
                .validation(validation, Accuracy::default())
        });
        let metrics: Vec<_> = outcome.into_iter().map(Result::unwrap).collect();
        assert!(metrics.iter().all(|f| f == &metrics[0]), "{metrics:?}");
        // Each sample counts once, even if padding repeats it.
        let right = metrics[0][0].1 / 100.0 * len as f64;
        assert!((right - right.round()).abs() < 1e-9, "{metrics:?} of {len}");
    }
    let outcome = run(MLP, dir.path(), 2, |b, _| b.train_dataloader(few(5, 99, 4, true)));
    let said = outcome.into_iter().map(|o| o.unwrap_err().to_string());
    for said in said {
        assert!(
            said.contains("gives no batch of 4 to each of 2 ranks: it has 5 samples"),
            "{said}"
        );
    }
}

#[test]
fn smaller_last_batch_is_dropped_if_configured() {
    let dir = tempfile::tempdir().unwrap();
    for (drop_last, batches) in [(false, 3), (true, 2)] {
        // Three ranks have 11 samples each after padding, in batches of four.
        let dir = dir.path().join(batches.to_string());
        let outcome = run(MLP, &dir, 3, |builder, _| {
            builder.train_dataloader(few(31, 99, 4, drop_last)).hook(before_iter(
                1,
                move |runner| {
                    assert_eq!(runner.batches_per_epoch(), batches);
                    Ok(())
                },
            ))
        });
        assert!(outcome.iter().all(Result::is_ok));
        let state = std::fs::read(dir.join("epoch_2/state.json")).unwrap();
        let state: serde_json::Value = serde_json::from_slice(&state).unwrap();
        assert_eq!(state["position"]["iter"], 2 * batches);
    }
}

#[test]
fn bfloat16_parameters_learn_and_are_saved_in_bfloat16() {
    let dir = tempfile::tempdir().unwrap();
    let config = format!("{VALIDATION}{MLP}")
        .replace("\"float16\"", "\"bfloat16\"\nhalf_parameters = true")
        .replace("loss_scale = { init_scale = 256.0, growth_interval = 5 }", "")
        .replace("accumulative_counts = 1", "accumulative_counts = 2")
        .replace("hidden = [8]", "hidden = [32]")
        .replace("max_epochs = 2", "max_epochs = 6");
    let outcome = run(&config, dir.path(), 2, |builder, _| builder);
    for metrics in outcome {
        let metrics = metrics.unwrap();
        assert!(metrics[0].1 > 60.0, "{metrics:?}");
    }
    let model = std::fs::read(dir.path().join("epoch_6/model.safetensors")).unwrap();
    let tensors = safetensors::SafeTensors::deserialize(&model).unwrap();
    assert!(tensors.iter().all(|(_, view)| view.dtype() == safetensors::Dtype::BF16));
    assert!(!log(dir.path()).contains("loss_scale"), "bfloat16 has no loss scale");
}

#[test]
fn overflow_during_accumulation_skips_the_step_on_all_ranks() {
    let dir = tempfile::tempdir().unwrap();
    // 12 batches in steps of 5: the overflow of batch 7 is in the second step.
    let config = MLP.replace("accumulative_counts = 1", "accumulative_counts = 5");
    let outcome = run(&config, dir.path(), 2, |builder, rank| {
        let mut scales = Vec::new();
        builder.hook(Box::new(BeforeIter(Box::new(move |runner| {
            scales.push(runner.optim_wrapper().loss_scale());
            if rank == 1 && scales.len() == 7 {
                let mut first = true;
                runner.engine_mut().with_params(&mut |params| {
                    if let (true, fused_optim::SliceMut::F32(v)) = (first, &mut params[0]) {
                        v[0] = f32::INFINITY;
                        first = false;
                    }
                    Ok(())
                })?;
            }
            if scales.len() == 12 {
                assert_eq!(scales, [[256.0; 10].as_slice(), &[128.0; 2]].concat());
            }
            Ok(())
        }))))
    });
    for outcome in outcome {
        outcome.unwrap();
    }
}
