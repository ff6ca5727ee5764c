//! Several metrics of an evaluation, with any number of ranks.

use std::fs::read_to_string;
use std::path::Path;
use std::sync::{Arc, Once};
use std::time::Duration;

use collective::ProcessGroup;
use runner::config::Config;
use runner::data::{Array, ArrayData, Batch, BoxError, DATASETS, Dataset, Sample, SampleRng};
use runner::evaluate::{METRICS, Metric};
use serde_json::Value;

use crate::common::from_config;

/// Batches of one sample, so that no result depends on the other samples of a batch.
const RUN: &str = r#"
model = { type = "Mlp", in_features = 64, hidden = [8], num_classes = 10 }
train_dataloader = { batch_size = 64, dataset = { type = "Digits" } }
train_cfg = { max_epochs = 1 }
randomness.seed = 3
optim_wrapper.optimizer = { type = "SGD", lr = 0.05 }
default_hooks.checkpoint = { save_best = ["accuracy/top3", "val/loss"] }

[val_dataloader]
batch_size = 1
dataset.type = "Few"

[[val_evaluator]]
type = "Accuracy"
topk = [1, 3]
[[val_evaluator]]
type = "CrossEntropy"
prefix = "val"
[[val_evaluator]]
type = "Median"
[[val_evaluator]]
type = "F1Score"
num_classes = 10
"#;

/// Data set of thirteen samples.
struct Few;

impl Dataset for Few {
    fn len(&self) -> usize {
        13
    }
    fn sample(&self, index: usize, _: &mut SampleRng) -> Result<Sample, BoxError> {
        let pixels = (0..64).map(|at| ((at + 1) * (index + 3) * 7 % 256) as u8).collect::<Vec<_>>();
        Ok(Sample::new()
            .with("inputs", Array::new([1, 8, 8], pixels)?)
            .with("labels", Array::scalar((index % 10) as i64)))
    }
}

/// Median of the largest logits, which cannot be computed from sums.
#[derive(Default)]
struct Median(Vec<Value>);

impl Metric for Median {
    fn update(&mut self, _: &Batch, outputs: &[(String, Array)]) -> Result<(), BoxError> {
        let logits = &outputs.iter().find(|(name, _)| name == "logits").ok_or("no logits")?.1;
        let ArrayData::F32(values) = logits.data() else { return Err("f32 is wanted".into()) };
        let largest =
            values.chunks(logits.shape()[1]).map(|row| row.iter().copied().fold(0.0, f32::max));
        self.0.extend(largest.map(Value::from));
        Ok(())
    }
    fn records(&mut self) -> Option<&mut Vec<Value>> {
        Some(&mut self.0)
    }
    fn compute(&self) -> Result<Vec<(String, f64)>, BoxError> {
        let mut values: Vec<_> = self.0.iter().filter_map(Value::as_f64).collect();
        values.sort_by(f64::total_cmp);
        Ok(vec![
            ("median".into(), values[values.len() / 2]),
            ("records".into(), values.len() as f64),
        ])
    }
    fn reset(&mut self) {
        self.0.clear();
    }
}

/// Metrics of a validation of the initial model, by rank.
fn validated(dir: &Path, ranks: usize) -> Vec<Vec<(String, f64)>> {
    let groups = ProcessGroup::threads(ranks, Duration::from_secs(60)).unwrap();
    std::thread::scope(|scope| {
        let threads: Vec<_> = groups
            .into_iter()
            .map(|group| {
                scope.spawn(move || {
                    let config = Config::from_text("c.toml", RUN).unwrap();
                    let run = from_config(config).unwrap().work_dir(dir).process_group(group);
                    let mut run = run.build().unwrap();
                    let first = run.validate().unwrap();
                    // Metrics are reset after each validation.
                    assert_eq!(first, run.validate().unwrap());
                    first
                })
            })
            .collect();
        threads.into_iter().map(|thread| thread.join().unwrap()).collect()
    })
}

/// Registers the components of the configuration.
fn register() {
    static ONCE: Once = Once::new();
    ONCE.call_once(|| {
        DATASETS.register("Few", |_| Ok(Box::new(|| Ok(Arc::new(Few))))).unwrap();
        METRICS.register("Median", |_| Ok(Box::new(Median::default()))).unwrap();
    });
}

#[test]
fn each_metric_is_logged_and_can_select_the_best() {
    register();
    let dir = tempfile::tempdir().unwrap();
    let group = ProcessGroup::threads(1, Duration::from_secs(60)).unwrap().remove(0);
    let run = from_config(Config::from_text("c.toml", RUN).unwrap()).unwrap();
    let mut run = run.work_dir(dir.path()).process_group(group).build().unwrap();
    let metrics = run.train().unwrap();
    assert_eq!(metrics.len(), 6);
    for best in ["best_accuracy_top3_epoch_1", "best_val_loss_epoch_1"] {
        assert!(dir.path().join(best).exists(), "{best}");
    }
    let log = std::fs::read_dir(dir.path()).unwrap().map(|entry| entry.unwrap().path());
    let log =
        log.map(|path| path.join("vis_data/scalars.json")).find(|path| path.exists()).unwrap();
    let last = read_to_string(log).unwrap();
    let last: Value = serde_json::from_str(last.lines().last().unwrap()).unwrap();
    for (name, value) in metrics {
        assert_eq!(last[&name], value, "{name}");
    }
}

#[test]
fn metrics_do_not_depend_on_the_number_of_ranks() {
    register();
    let dir = tempfile::tempdir().unwrap();
    let one = validated(&dir.path().join("one"), 1).remove(0);
    let names: Vec<_> = one.iter().map(|(name, _)| name.as_str()).collect();
    let expected = ["accuracy/top1", "accuracy/top3", "val/loss", "median", "records", "f1"];
    assert_eq!(names, expected);
    assert_eq!(one[4].1, 13.0);
    let bits = |metrics: &[(String, f64)]| -> Vec<u64> {
        metrics.iter().map(|(_, value)| value.to_bits()).collect()
    };
    for ranks in [2, 5, 14] {
        for metrics in validated(&dir.path().join(ranks.to_string()), ranks) {
            assert_eq!(bits(&metrics), bits(&one), "{ranks} ranks: {metrics:?} {one:?}");
        }
    }
}
