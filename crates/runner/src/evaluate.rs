//! Metrics: a model's outputs evaluated over all ranks, each sample once.
//!
//! A [`Metric`] turns each batch into one small record per sample. The records travel: they are
//! gathered from all ranks, put back into data-set order, cut to the data set's length (a sampler
//! pads so that ranks are equally long), and every rank computes the same numbers from them.

use collective::ProcessGroup;
use serde_json::Value;

use crate::config::{Span, unknown};
use crate::data::{Array, ArrayData, Batch};
use crate::registry::Registry;
use crate::{Error, Result};

/// Turns a model's outputs on a data set into named numbers.
pub trait Metric: Send {
    /// Names of the numbers, if they are known beforehand: a hook that needs another is refused then.
    fn names(&self) -> Option<Vec<String>> {
        None
    }

    /// One record per sample of the batch, in order; any other number ends the run.
    ///
    /// # Errors
    ///
    /// [`Error::Data`] if the outputs or the batch lack what the metric needs.
    fn process(&self, batch: &Batch, outputs: &[(String, Array)]) -> Result<Vec<Value>>;

    /// The named numbers, from the records of the whole data set.
    ///
    /// # Errors
    ///
    /// [`Error::Data`] if there are no records.
    fn compute(&self, records: &[Value]) -> Result<Vec<(String, f64)>>;
}

/// Share of samples, in per cent, whose largest logit is at the label. Reported as `accuracy`.
///
/// Reads the output `logits` of shape `[batch, classes]` (f32) and the field `labels` of shape
/// `[batch]` (i64). A row with a NaN counts as wrong.
#[derive(Clone, Copy, Debug, Default)]
pub struct Accuracy;

impl Metric for Accuracy {
    fn names(&self) -> Option<Vec<String>> {
        Some(vec!["accuracy".into()])
    }

    fn process(&self, batch: &Batch, outputs: &[(String, Array)]) -> Result<Vec<Value>> {
        let logits = outputs.iter().find(|(name, _)| name == "logits").map(|(_, a)| a);
        let logits = logits.ok_or_else(|| {
            let names: Vec<_> = outputs.iter().map(|(n, _)| n.as_str()).collect();
            Error::Data(format!("Accuracy needs the output `logits`; the model gave {names:?}"))
        })?;
        let labels = batch.get("labels")?;
        let (ArrayData::F32(values), &[rows, classes]) = (logits.data(), logits.shape()) else {
            return Err(wrong_shape(logits));
        };
        if classes == 0 {
            return Err(wrong_shape(logits));
        }
        let ArrayData::I64(labels) = labels.data() else {
            return Err(Error::Data("Accuracy needs i64 labels".into()));
        };
        if labels.len() != rows {
            return Err(Error::Data(format!("{rows} rows of logits but {} labels", labels.len())));
        }
        let rows = values.chunks_exact(classes).zip(labels);
        Ok(rows
            .map(|(row, label)| Value::from(u8::from(argmax(row) == usize::try_from(*label).ok())))
            .collect())
    }

    fn compute(&self, records: &[Value]) -> Result<Vec<(String, f64)>> {
        if records.is_empty() {
            return Err(Error::Data("Accuracy of no samples".into()));
        }
        let right: u64 = records.iter().filter_map(Value::as_u64).sum();
        Ok(vec![("accuracy".into(), 100.0 * right as f64 / records.len() as f64)])
    }
}

fn wrong_shape(logits: &Array) -> Error {
    Error::Data(format!(
        "Accuracy needs f32 logits of shape [batch, classes] with at least one class, got shape {:?}",
        logits.shape()
    ))
}

/// Index of the first largest value; none if any is NaN.
fn argmax(row: &[f32]) -> Option<usize> {
    if row.iter().any(|v| v.is_nan()) {
        return None;
    }
    (0..row.len()).reduce(|best, i| if row[i] > row[best] { i } else { best })
}

/// Refuses the records of a batch unless there is one for each of its `samples`: padding and rank order are known by
/// sample only. `part` is `val` or `test`.
pub(crate) fn check_records(part: &str, records: usize, samples: usize) -> Result<()> {
    if records == samples {
        return Ok(());
    }
    Err(Error::Data(format!(
        "{part}_evaluator: the metric made {records} records of a batch of {samples} samples: \
         `Metric::process` must return one record for each sample, from which `compute` makes the sums and means"
    )))
}

/// Brings the ranks' records into data-set order: rank `r` holds samples `r, r + world_size, ...`.
/// Call it on every rank; all get the same.
///
/// # Errors
///
/// Those of the gather.
pub fn collect_results(group: &ProcessGroup, mine: &Vec<Value>, len: usize) -> Result<Vec<Value>> {
    let per_rank: Vec<Vec<Value>> = collective::object::all_gather_object(group, mine)?;
    let longest = per_rank.iter().map(Vec::len).max().unwrap_or(0);
    let interleaved = (0..longest).flat_map(|k| per_rank.iter().filter_map(move |r| r.get(k)));
    Ok(interleaved.take(len).cloned().collect())
}

/// Refuses a metric that is not among those that a validation will have, if these are known.
pub(crate) fn check_metric(name: &str, known: Option<&[String]>, place: &Span) -> Result<()> {
    match known.filter(|known| !known.iter().any(|metric| metric == name)) {
        Some(known) => Err(place.error(unknown("metric", name, known))),
        None => Ok(()),
    }
}

/// The metric called `name`; the error text lists those there are.
pub(crate) fn find_metric(metrics: &[(String, f64)], name: &str) -> Result<f64, String> {
    let found = metrics.iter().find(|(known, _)| known == name);
    found.map(|(_, value)| *value).ok_or_else(|| {
        let names: Vec<_> = metrics.iter().map(|(name, _)| name.as_str()).collect();
        format!("`{name}` is not among: {}", names.join(", "))
    })
}

/// The metrics a configuration can name: `[val_evaluator]`.
pub static METRICS: Registry<Box<dyn Metric>> =
    Registry::with("metric", &[("Accuracy", |_| Ok(Box::new(Accuracy)))]);

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    fn outputs(logits: Vec<f32>) -> Vec<(String, Array)> {
        let shape = [logits.len() / 2, 2];
        vec![("logits".into(), Array::new(shape, ArrayData::F32(logits)).unwrap())]
    }

    #[test]
    fn counts_the_right_ones_and_no_nan() {
        let labels = Array::new([3], ArrayData::I64(vec![0, 1, 1])).unwrap();
        let batch = Batch::new().with("labels", labels);
        let logits = vec![2.0, 1.0, 2.0, 1.0, f32::NAN, 9.0];
        let records = Accuracy.process(&batch, &outputs(logits)).unwrap();
        assert_eq!(records, [1, 0, 0]);
        let metrics = Accuracy.compute(&records).unwrap();
        assert!((metrics[0].1 - 100.0 / 3.0).abs() < 1e-12);
    }

    #[test]
    fn a_missing_output_is_named() {
        let error = Accuracy.process(&Batch::new(), &[]).unwrap_err().to_string();
        assert!(error.contains("`logits`"), "{error}");
    }

    #[test]
    fn logits_of_no_class_are_an_error() {
        let labels = Array::new([2], ArrayData::I64(vec![0, 1])).unwrap();
        let logits = Array::new([2, 0], ArrayData::F32(Vec::new())).unwrap();
        let batch = Batch::new().with("labels", labels);
        let error = Accuracy.process(&batch, &[("logits".into(), logits)]).unwrap_err();
        assert!(error.to_string().contains("at least one class, got shape [2, 0]"), "{error}");
    }

    #[test]
    fn records_come_back_in_data_set_order_without_padding() {
        let groups = ProcessGroup::threads(2, Duration::from_secs(20)).unwrap();
        let dealt = [vec![0, 2, 4], vec![1, 3, 0]];
        std::thread::scope(|scope| {
            let ranks = groups.into_iter().zip(dealt).map(|(group, mine)| {
                scope.spawn(move || {
                    let mine = mine.into_iter().map(Value::from).collect();
                    collect_results(&group, &mine, 5).unwrap()
                })
            });
            let ranks: Vec<_> = ranks.collect();
            for rank in ranks {
                assert_eq!(rank.join().unwrap(), [0, 1, 2, 3, 4]);
            }
        });
    }
}
