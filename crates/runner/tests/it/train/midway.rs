//! Resuming inside an epoch or a pass with all kinds of state; other initial states.

use parking_lot::Mutex;
use runner::engine::Losses;

use super::*;

/// Batch statistics, EMA of them and of the parameters, checkpoints every five iterations.
pub(super) const MIDWAY: &str = r#"
default_hooks.checkpoint = { by_epoch = false, interval = 5, max_keep_ckpts = 2, save_best = "accuracy" }
model = { type = "ResNet", in_channels = 1, num_classes = 10, width = 8, blocks = [1] }
train_dataloader = { batch_size = 64, dataset = { type = "Digits" } }
train_cfg = { max_epochs = 2 }
randomness.seed = 3
[optim_wrapper]
type = "AmpOptimWrapper"
dtype = "float16"
accumulative_counts = 2
loss_scale = { init_scale = 256.0, growth_interval = 5 }
optimizer = { type = "SGD", lr = 0.05, momentum = 0.9 }
[[custom_hooks]]
type = "EMAHook"
momentum = 0.1
update_buffers = true
[[custom_hooks]]
type = "EarlyStoppingHook"
monitor = "accuracy"
patience = 9
"#;

/// The same configuration by iterations.
pub(super) fn by_iters(config: &str) -> String {
    let train = "train_cfg = { by_epoch = false, max_iters = 24, val_interval = 9 }";
    let sampler = "batch_size = 64, sampler = { type = \"InfiniteSampler\" }, dataset = { type = \"Digits\" }";
    config
        .replace("train_cfg = { max_epochs = 2 }", train)
        .replace("batch_size = 64, dataset = { type = \"Digits\" }", sampler)
}

/// Compares everything in two checkpoints except the text of the configuration.
pub(super) fn assert_same_state(a: &Path, b: &Path, checkpoint: &str) {
    assert_equal(a, b, checkpoint);
    let read = |dir: &Path| {
        let load = |file: &str| std::fs::read(dir.join(checkpoint).join(file)).unwrap_or_default();
        let mut state: serde_json::Value = serde_json::from_slice(&load("state.json")).unwrap();
        // Leftovers of a kill are removed with the next checkpoint.
        state["hooks"]["CheckpointHook"]["written"].take();
        let part = |key: &str| state[key].clone();
        let parts = ["position", "hooks", "schedulers", "loss_scaler", "files"].map(part);
        (parts, load("ema.safetensors"), load("rank_1.safetensors"))
    };
    let (a, b) = (read(a), read(b));
    assert_eq!(a.0, b.0);
    assert!(!a.1.is_empty() && a.1 == b.1 && a.2 == b.2);
}

#[test]
fn run_killed_inside_an_epoch_or_a_pass_resumes_bit_for_bit() {
    let dir = tempfile::tempdir().unwrap();
    for (name, config) in [("epochs", MIDWAY.to_owned()), ("iters", by_iters(MIDWAY))] {
        let config = format!("{VALIDATION}{config}");
        let whole = dir.path().join(format!("{name}_whole"));
        resume(&config, &whole, 2);
        // Before any checkpoint, inside an epoch, at the end of an epoch, and after that.
        for at in [3, 8, 12, 13, 22] {
            let broken = dir.path().join(format!("{name}_{at}"));
            killed(&config, &broken, 2, at);
            resume(&config, &broken, 2);
            assert_eq!(checkpoints(&broken), checkpoints(&whole), "{name} {at}");
            assert_same_state(&whole, &broken, "iter_24");
        }
    }
}

#[test]
fn run_interrupted_inside_an_epoch_resumes_bit_for_bit() {
    let dir = tempfile::tempdir().unwrap();
    let (whole, broken) = (dir.path().join("whole"), dir.path().join("broken"));
    // Each rank's batch statistics must be restored, because they have not been averaged at that
    // point.
    let config = format!("{VALIDATION}{}", MIDWAY.replace("interval = 5", "interval = 24"));
    resume(&config, &whole, 2);
    assert!(out_of_time(&config, &broken, 2, 8).iter().all(Result::is_ok));
    assert!(broken.join("iter_8/rank_1.safetensors").is_file());
    resume(&config, &broken, 2);
    assert_equal(&whole, &broken, "iter_24");
}

#[test]
fn damaged_checkpoint_is_named_and_skipped() {
    let dir = tempfile::tempdir().unwrap();
    let (whole, broken) = (dir.path().join("whole"), dir.path().join("broken"));
    let config = format!("{VALIDATION}{MIDWAY}");
    resume(&config, &whole, 2);
    for file in ["state.json", "optimizer.safetensors", "ema.safetensors", "rank_1.safetensors"] {
        killed(&config, &broken, 2, 11);
        let damaged = broken.join("iter_10").join(file);
        let mut bytes = std::fs::read(&damaged).unwrap();
        let middle = bytes.len() / 2;
        bytes[middle] ^= 4;
        std::fs::write(&damaged, bytes).unwrap();
        resume(&config, &broken, 2);
        let log = log(&broken);
        assert!(log.contains(&format!("skipping a checkpoint: {}", damaged.display())), "{log}");
        assert!(log.contains("iter_5: epoch 0, iteration 5"), "{log}");
        assert_same_state(&whole, &broken, "iter_24");
        std::fs::remove_dir_all(&broken).unwrap();
    }
}

/// Samples with their index in a field.
pub(super) struct Numbered(pub(super) usize);

impl Dataset for Numbered {
    fn name(&self) -> &'static str {
        "numbered"
    }

    fn len(&self) -> usize {
        self.0
    }

    fn sample(&self, index: usize, random: &mut SampleRng) -> Result<Sample, BoxError> {
        let few = Few { len: self.0, broken: usize::MAX }.sample(index, random)?;
        Ok(few.with("number", Array::scalar(index as i64)))
    }
}

/// Records the samples that were trained on.
#[derive(Clone, Default)]
pub(super) struct Notes(pub(super) Arc<Mutex<Vec<i64>>>);

impl Hook for Notes {
    fn name(&self) -> &'static str {
        "Notes"
    }

    fn after_train_iter(&mut self, _: &mut Runner, batch: &Batch, _: &Losses) -> Result<()> {
        let ArrayData::I64(numbers) = batch.get("number")?.data() else { panic!("not numbered") };
        self.0.lock().extend(numbers);
        Ok(())
    }
}

#[test]
fn another_number_of_ranks_resumes_with_the_remaining_samples() {
    let dir = tempfile::tempdir().unwrap();
    let config = format!("default_hooks.checkpoint = {{ by_epoch = false, interval = 5 }}\n{MLP}");
    let config = config.replace("accumulative_counts = 1", "accumulative_counts = 3");
    let notes = Notes::default();
    let go_on = |ranks: usize, len: usize, stop: usize, elastic: bool| {
        run(&config, dir.path(), ranks, |builder, _| {
            let loader = DataLoaderConfig::new(Numbered(len), 4).shuffled();
            let builder = builder.train_dataloader(loader).resume(true).elastic(elastic);
            let stop = before_iter(stop, |_| Err(Error::data("killed")));
            builder.hook(Box::new(notes.clone())).hook(stop)
        })
    };
    // 101 samples: two ranks have 13 batches each, and are killed before the fifth batch of the
    // first epoch.
    assert!(go_on(2, 101, 5, false).iter().all(Result::is_err));
    assert_eq!(notes.0.lock().len(), 40);
    for (ranks, len, elastic, why) in [
        (3, 101, false, "was written by 2 ranks, but this run has 3"),
        (
            3,
            150,
            true,
            "written inside an epoch of 101 samples (shuffle = true), but this run has 150",
        ),
    ] {
        for outcome in go_on(ranks, len, usize::MAX, elastic) {
            let said = outcome.unwrap_err().to_string();
            assert!(said.contains(why), "{said}");
        }
    }
    // Three ranks continue with 61 samples, in six batches of nine. Four batches of twelve samples
    // later, ten of the thirteen batches of two ranks are completed: a checkpoint. One rank has the
    // remaining samples, and the second epoch.
    assert!(go_on(3, 101, 7, true).iter().all(Result::is_err));
    assert!(log(dir.path()).contains("2 ranks wrote this checkpoint, and 3 resume"));
    let seen = |times: usize| {
        let mut counts = [0; 101];
        notes.0.lock().iter().for_each(|i| counts[*i as usize] += 1);
        counts.iter().filter(|count| **count == times).count()
    };
    assert_eq!([seen(0), seen(1)], [13, 88]);
    go_on(1, 101, usize::MAX, true).remove(0).unwrap();
    assert_eq!(seen(2), 101);
}

type Judge = fn(&mut Runner) -> Result<Vec<(String, f64)>>;

#[test]
fn weights_are_loaded_without_other_state_and_tested() {
    let dir = tempfile::tempdir().unwrap();
    let config = format!("{VALIDATION}{MIDWAY}");
    let config = format!("{}{config}", VALIDATION.replace("val_", "test_"));
    let metrics = run(&config, &dir.path().join("a"), 2, |builder, _| builder);
    let best = checkpoints(&dir.path().join("a")).remove(0);
    assert!(best.starts_with("best_accuracy_iter_"), "{best}");
    let best = dir.path().join("a").join(best);
    let again = |judge: Judge| {
        let group = ProcessGroup::threads(1, Duration::from_secs(60)).unwrap().remove(0);
        let builder = from_config(Config::from_text("c.toml", config.clone()).unwrap());
        let builder = builder.unwrap().process_group(group).work_dir(dir.path().join("b"));
        judge(&mut builder.load_from(&best).build().unwrap()).unwrap()
    };
    let best_metric = again(Runner::validate);
    assert_eq!(again(Runner::test), best_metric);
    // Other batches may round differently, for a sample or two.
    assert!(best_metric[0].1 >= metrics[0].as_ref().unwrap()[0].1 - 1.0);
    // It cannot be resumed from.
    let outcome =
        run(&config, &dir.path().join("c"), 2, |builder, _| builder.load_from(&best).resume(true));
    for error in outcome {
        let said = error.unwrap_err().to_string();
        assert!(said.contains("has no optimizer to resume from"), "{said}");
    }
}

#[test]
fn learning_rate_is_scaled_to_the_batch_size() {
    let dir = tempfile::tempdir().unwrap();
    let config = format!("auto_scale_lr = {{ enable = true, base_batch_size = 32 }}\n{MLP}");
    let outcome = run(&config, dir.path(), 2, |builder, _| {
        builder.hook(before_iter(0, |runner| {
            // Twice 64 is four times 32.
            assert!((runner.lr() - 4.0 * 0.05).abs() < 1e-12);
            Ok(())
        }))
    });
    assert!(outcome.iter().all(Result::is_ok), "{outcome:?}");
}
