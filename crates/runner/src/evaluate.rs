//! Metrics of a validation or test over all ranks: the types of [`train_data::metrics`], and the
//! registry of metrics for configurations.
//!
//! Every rank updates an [`Evaluator`] with its share of the samples; each sample is on one rank.
//! Then one all-reduce sums the states of all metrics. Records are gathered, for metrics that have
//! any.
//!
//! | `type` in `[val_evaluator]` | keys, with their defaults |
//! |---|---|
//! | `Accuracy` | `topk = 1`, or several |
//! | `Precision`, `Recall`, `F1Score`, `MeanIoU` | `num_classes`; `average = "macro"` |
//! | `ConfusionMatrix` | `num_classes` |
//! | `AveragePrecision` | `num_classes`; `thresholds = 100`; `average = "macro"` |
//! | `Perplexity`, `CrossEntropy` | |
//! | `MeanLoss` | `outputs = ["loss"]` |
//!
//! All but the last take `output = "logits"`, `labels = "labels"` and `ignore_index`, see
//! [`Fields`]; all take MMEngine's `prefix`. `average` can also be `weighted` or `none`, and except
//! for `AveragePrecision`, `micro`. Several metrics are an array of tables, `[[val_evaluator]]`.

use std::collections::HashSet;

use collective::{ProcessGroup, ReduceOp};
use serde_json::Value;
pub use train_data::metrics::{
    Accuracy, Average, AveragePrecision, ClassScore, ConfusionMatrix, CrossEntropy, Evaluator,
    ExactSum, Fields, MeanLoss, Metric, Perplexity, Score,
};

use crate::Result;
use crate::config::{Section, Span, unknown};
use crate::registry::Registry;

/// Metrics that a configuration can name: `[val_evaluator]`.
pub static METRICS: Registry<Box<dyn Metric>> = Registry::with(
    "metric",
    &[
        ("Accuracy", read_accuracy),
        ("AveragePrecision", read_average_precision),
        ("ConfusionMatrix", |s| {
            let classes = read_classes(s, |classes| classes.checked_mul(classes))?;
            let fields = read_fields(s)?;
            Ok(Box::new(ConfusionMatrix::new(classes).with_fields(fields)))
        }),
        ("CrossEntropy", |s| Ok(Box::new(CrossEntropy::new().with_fields(read_fields(s)?)))),
        ("F1Score", |s| read_score(s, Score::F1)),
        ("MeanIoU", |s| read_score(s, Score::Iou)),
        ("MeanLoss", read_mean_loss),
        ("Perplexity", |s| Ok(Box::new(Perplexity::new().with_fields(read_fields(s)?)))),
        ("Precision", |s| read_score(s, Score::Precision)),
        ("Recall", |s| read_score(s, Score::Recall)),
    ],
);

fn read_fields(section: &mut Section) -> Result<Fields> {
    let Fields { output, labels, .. } = Fields::default();
    Ok(Fields {
        output: section.or("output", output)?,
        labels: section.or("labels", labels)?,
        ignore_index: section.optional("ignore_index")?,
    })
}

/// Reads `num_classes` of a metric that keeps `numbers(num_classes)` numbers: at most
/// [`MAX_STATE`].
fn read_classes(section: &mut Section, numbers: impl Fn(usize) -> Option<usize>) -> Result<usize> {
    if !section.has("num_classes") {
        section.attempt(|section| section.required::<usize>("num_classes"))?;
    }
    let place = section.offset_of("num_classes");
    let classes = section.count("num_classes", 1)?;
    if numbers(classes).is_none_or(|numbers| numbers > MAX_STATE) {
        let text = format!("`num_classes` = {classes} needs more than {MAX_STATE} sums");
        section.note(place.error(text))?;
        return Ok(1);
    }
    Ok(classes)
}

/// Maximum number of values that a metric of a configuration keeps: 512 MiB.
const MAX_STATE: usize = 1 << 26;

fn read_accuracy(section: &mut Section) -> Result<Box<dyn Metric>> {
    let place = section.offset_of("topk");
    let mut topk = section.one_or_more("topk")?;
    if topk.contains(&0) {
        section.note(place.error("`topk` must each be at least 1, got 0"))?;
    }
    topk.retain(|k| *k > 0);
    if topk.is_empty() {
        topk.push(1);
    }
    Ok(Box::new(Accuracy::new(topk).with_fields(read_fields(section)?)))
}

const AVERAGES: [(&str, Average); 4] = [
    ("macro", Average::Macro),
    ("weighted", Average::Weighted),
    ("none", Average::None),
    ("micro", Average::Micro),
];

fn read_score(section: &mut Section, score: Score) -> Result<Box<dyn Metric>> {
    let average = section.choice("average", "macro", &AVERAGES)?;
    let classes = read_classes(section, |classes| classes.checked_mul(3))?;
    let fields = read_fields(section)?;
    Ok(Box::new(ClassScore::new(score, classes).with_average(average).with_fields(fields)))
}

fn read_average_precision(section: &mut Section) -> Result<Box<dyn Metric>> {
    let average = section.choice("average", "macro", &AVERAGES[..3])?;
    let thresholds: usize =
        section.or_checked("thresholds", 100, "at least 2", |count| *count >= 2)?;
    let numbers = |classes: usize| classes.checked_mul(thresholds.checked_add(1)?)?.checked_mul(2);
    let (classes, fields) = (read_classes(section, numbers)?, read_fields(section)?);
    let metric = AveragePrecision::new(classes, thresholds);
    Ok(Box::new(metric.with_average(average).with_fields(fields)))
}

fn read_mean_loss(section: &mut Section) -> Result<Box<dyn Metric>> {
    let outputs: Vec<String> = section.one_or_more("outputs")?;
    Ok(Box::new(if outputs.is_empty() { MeanLoss::default() } else { MeanLoss::new(outputs) }))
}

/// Reads `[val_evaluator]`: a metric, an array of them, or MMEngine's `Evaluator` with `metrics`.
pub(crate) fn read_evaluator(root: &mut Section, key: &'static str) -> Result<Evaluator> {
    if !root.has(key) {
        root.section(key)?;
    }
    let mut sections = root.sections(key)?;
    if let [one] = &mut sections[..]
        && one.has("metrics")
    {
        one.choice("type", "Evaluator", &[("Evaluator", ())])?;
        let metrics = one.sections("metrics")?;
        sections.remove(0).finish()?;
        sections = metrics;
    }
    let mut evaluator = Evaluator::new();
    let mut known: HashSet<String> = HashSet::new();
    for mut section in sections {
        let place = section.offset_of("type");
        let prefix: Option<String> = section.optional("prefix")?;
        // Accepted for compatibility: ranks exchange a few bytes, on the device of the group.
        section.choice("collect_device", "cpu", &[("cpu", ()), ("gpu", ())])?;
        let Some(metric) = root.attempt_whole(|_| METRICS.build(section))? else { continue };
        let part = match prefix {
            Some(prefix) => Evaluator::new().with_prefix(prefix, metric),
            None => Evaluator::from(metric),
        };
        let names = part.names().unwrap_or_default();
        if let Some(name) = names.iter().find(|name| known.contains(*name)) {
            let text = format!("two metrics are named `{name}`: set `prefix`");
            root.note(place.error(text))?;
        }
        known.extend(names);
        evaluator = evaluator.and(part);
    }
    Ok(evaluator)
}

/// Sums the states of the metrics, and gathers their records, over the ranks. Every rank must call
/// it; all get equal results.
///
/// Rank `r` holds samples `r, r + world_size, ...` of a data set, and records are sorted into that
/// order; for a stream the order depends on the number of ranks.
///
/// # Errors
///
/// Those of the collectives.
pub fn reduce(group: &ProcessGroup, evaluator: &mut Evaluator) -> Result<()> {
    evaluator.reduce(|states| group.all_reduce(states, ReduceOp::Sum))?;
    let mut own: Vec<_> = evaluator.records().collect();
    if own.is_empty() {
        return Ok(());
    }
    let mine: Vec<Vec<Value>> = own.iter_mut().map(|records| std::mem::take(*records)).collect();
    let all: Vec<Vec<Vec<Value>>> = collective::object::all_gather_object(group, &mine)?;
    for (metric, records) in own.into_iter().enumerate() {
        let of_ranks: Vec<_> = all.iter().map(|of_rank| &of_rank[metric]).collect();
        let longest = of_ranks.iter().map(|of_rank| of_rank.len()).max().unwrap_or(0);
        let sample = |k: usize| of_ranks.iter().filter_map(move |of_rank| of_rank.get(k));
        records.extend((0..longest).flat_map(sample).cloned());
    }
    Ok(())
}

/// Returns an error for a metric that the validation does not have, if its metrics are known.
pub(crate) fn check_metric(name: &str, known: Option<&[String]>, place: &Span) -> Result<()> {
    match known.filter(|known| !known.iter().any(|metric| metric == name)) {
        Some(known) => Err(place.error(unknown("metric", name, known))),
        None => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;
    use crate::config::Config;
    use crate::data::{Array, Batch, BoxError};

    /// A metric with the batch's values as its records.
    #[derive(Default)]
    struct Values(Vec<Value>);

    impl Metric for Values {
        fn update(&mut self, batch: &Batch, _: &[(String, Array)]) -> Result<(), BoxError> {
            let crate::data::ArrayData::I64(values) = batch.get("values")?.data() else {
                return Err("no i64".into());
            };
            self.0.extend(values.iter().map(|value| Value::from(*value)));
            Ok(())
        }
        fn records(&mut self) -> Option<&mut Vec<Value>> {
            Some(&mut self.0)
        }
        fn compute(&self) -> Result<Vec<(String, f64)>, BoxError> {
            let values = self.0.iter().filter_map(Value::as_f64);
            Ok(values.enumerate().map(|(at, value)| (at.to_string(), value)).collect())
        }
        fn reset(&mut self) {
            self.0.clear();
        }
    }

    /// One of the ranks has no sample.
    #[test]
    fn ranks_reduce_states_and_gather_records_in_data_set_order() {
        let groups = ProcessGroup::threads(3, Duration::from_secs(20)).unwrap();
        let dealt = [vec![10_i64, 12, 14], vec![11, 13], vec![]];
        std::thread::scope(|scope| {
            let ranks = groups.into_iter().zip(dealt).map(|(group, mine)| {
                scope.spawn(move || {
                    let len = mine.len();
                    let logits = Array::new([len, 1], vec![0.5_f32; len]).unwrap();
                    let batch = Batch::new()
                        .with("values", Array::new([len], mine).unwrap())
                        .with("labels", Array::new([len], vec![0_i64; len]).unwrap());
                    let mut evaluator = Evaluator::from(Values::default())
                        .with(Accuracy::default())
                        .with_prefix("more", Values::default())
                        .with(ConfusionMatrix::new(1));
                    evaluator.update(&batch, &[("logits".to_owned(), logits)]).unwrap();
                    reduce(&group, &mut evaluator).unwrap();
                    evaluator.compute().unwrap()
                })
            });
            let ranks: Vec<_> = ranks.collect();
            for rank in ranks {
                let numbers = rank.join().unwrap().into_iter().map(|(_, value)| value);
                let expected =
                    [10.0, 11.0, 12.0, 13.0, 14.0, 100.0, 10.0, 11.0, 12.0, 13.0, 14.0, 5.0];
                assert_eq!(numbers.collect::<Vec<_>>(), expected);
            }
        });
    }

    fn names(config: &str) -> Vec<String> {
        let mut root = Config::from_text("c.toml", config).unwrap().into_section();
        let evaluator = read_evaluator(&mut root, "val_evaluator").unwrap();
        root.finish().unwrap();
        evaluator.names().unwrap()
    }

    #[test]
    fn metric_names_are_mmengines() {
        let one = |metric: &str| names(&format!("val_evaluator = {{ {metric} }}"));
        assert_eq!(one("type = 'Accuracy'"), ["accuracy"]);
        assert_eq!(one("type = 'Accuracy', topk = 1"), ["accuracy"]);
        assert_eq!(one("type = 'Accuracy', topk = [1, 5]"), ["accuracy/top1", "accuracy/top5"]);
        assert_eq!(one("type = 'Accuracy', topk = 5, prefix = 'a'"), ["a/top5"]);
        assert_eq!(one("type = 'CrossEntropy', prefix = 'val'"), ["val/loss"]);
        assert_eq!(
            one("type = 'Recall', num_classes = 2, average = 'none'"),
            ["recall_0", "recall_1"]
        );
        let several = "[[val_evaluator]]\ntype = 'Accuracy'\n[[val_evaluator]]\ntype = 'Accuracy'\n\
                       prefix = 'b'\ncollect_device = 'gpu'\n[[val_evaluator]]\ntype = 'MeanIoU'\nnum_classes = 3\n\
                       ignore_index = 255\n[[val_evaluator]]\ntype = 'MeanLoss'\noutputs = ['loss', 'loss_mask']\n\
                       [[val_evaluator]]\ntype = 'AveragePrecision'\nnum_classes = 3\nthresholds = 50";
        let expected = ["accuracy", "b/accuracy", "mIoU", "loss", "loss_mask", "mAP"];
        assert_eq!(names(several), expected);
        let evaluator = "val_evaluator = { type = 'Evaluator', metrics = [{ type = 'Perplexity', ignore_index = -100 }, \
                         { type = 'F1Score', num_classes = 3 }] }";
        assert_eq!(names(evaluator), ["perplexity", "f1"]);
    }
}
