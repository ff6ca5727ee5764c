//! `Evaluator`: several metrics of one evaluation.

use std::collections::HashSet;

use serde_json::Value;

use super::Metric;
use crate::{Array, Batch, BoxError, Error, Result};

/// Several metrics, updated and computed together; ranks sum the states of all of them at once.
///
/// ```
/// use train_data::metrics::{Accuracy, CrossEntropy, Evaluator};
/// use train_data::{Array, Batch};
///
/// let mut evaluator = Evaluator::new().with(Accuracy::default()).with(CrossEntropy::new());
/// let batch = Batch::new().with("labels", Array::new([2], vec![0_i64, 1])?);
/// let logits = Array::new([2, 2], vec![2.0_f32, 2.0, 0.0, 0.0])?;
/// evaluator.update(&batch, &[("logits".to_owned(), logits)])?;
/// // With several ranks: `group.all_reduce(state, ReduceOp::Sum)`, or `trainer.sum(state)`.
/// evaluator.reduce(|_state| Ok::<(), train_data::Error>(()))?;
/// let metrics = evaluator.compute()?;
/// assert_eq!(metrics[0], ("accuracy".to_owned(), 50.0));
/// assert_eq!(metrics[1].0, "loss");
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Default)]
pub struct Evaluator {
    parts: Vec<Part>,
}

struct Part {
    metric: Box<dyn Metric>,
    prefix: Option<String>,
}

impl Evaluator {
    /// Creates an evaluator without metrics.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// Adds a metric.
    #[must_use]
    pub fn with(mut self, metric: impl Metric + 'static) -> Self {
        self.parts.push(Part { metric: Box::new(metric), prefix: None });
        self
    }

    /// Adds a metric whose names get a prefix, which replaces their own: `accuracy/top1` becomes
    /// `prefix/top1` and `accuracy` becomes `prefix/accuracy`, as in MMEngine.
    #[must_use]
    pub fn with_prefix(mut self, prefix: impl Into<String>, metric: impl Metric + 'static) -> Self {
        self.parts.push(Part { metric: Box::new(metric), prefix: Some(prefix.into()) });
        self
    }

    /// Adds the metrics of `other`.
    #[must_use]
    pub fn and(mut self, other: Self) -> Self {
        self.parts.extend(other.parts);
        self
    }

    /// Names of all values, if known in advance.
    #[must_use]
    pub fn names(&self) -> Option<Vec<String>> {
        let names = self.parts.iter().map(|part| {
            Some(part.metric.names()?.into_iter().map(|name| part.rename(name)).collect::<Vec<_>>())
        });
        Some(names.collect::<Option<Vec<_>>>()?.concat())
    }

    /// Adds a batch to all metrics. After an error some may have counted a part of it: call
    /// [`reset`](Self::reset).
    ///
    /// # Errors
    ///
    /// [`Error::Metric`], if a metric fails or does not keep one record for each sample.
    pub fn update(&mut self, batch: &Batch, outputs: &[(String, Array)]) -> Result<()> {
        for Part { metric, .. } in &mut self.parts {
            let before = metric.records().map_or(0, |records| records.len());
            metric.update(batch, outputs).map_err(|source| failed(&**metric, source))?;
            let Some(after) = metric.records().map(|records| records.len()) else { continue };
            if after != before + batch.len() {
                let text = format!(
                    "{} records of a batch of {} samples: `update` must add one record for each sample, from which \
                     `compute` makes the sums and means",
                    after as i128 - before as i128,
                    batch.len()
                );
                return Err(failed(&**metric, text.into()));
            }
        }
        Ok(())
    }

    /// Calls `sum` once with the states of all metrics; `sum` must replace each number with its sum
    /// over the ranks. Every rank must call this. If no metric has a state, `sum` is not called.
    ///
    /// # Errors
    ///
    /// Those of `sum`.
    pub fn reduce<E>(&mut self, sum: impl FnOnce(&mut [f64]) -> Result<(), E>) -> Result<(), E> {
        let mut states: Vec<f64> = Vec::new();
        for part in &mut self.parts {
            states.extend_from_slice(part.metric.state());
        }
        if states.is_empty() {
            return Ok(());
        }
        sum(&mut states)?;
        let mut rest = &states[..];
        for part in &mut self.parts {
            let state = part.metric.state();
            let (own, others) = rest.split_at(state.len());
            state.copy_from_slice(own);
            rest = others;
        }
        Ok(())
    }

    /// Returns the records of each metric that has any. The caller replaces them with those of all
    /// ranks.
    pub fn records(&mut self) -> impl Iterator<Item = &mut Vec<Value>> {
        self.parts.iter_mut().filter_map(|part| part.metric.records())
    }

    /// Returns the named values of all metrics, in order.
    ///
    /// # Errors
    ///
    /// [`Error::Metric`], if a metric fails or two values have the same name.
    pub fn compute(&self) -> Result<Vec<(String, f64)>> {
        let mut all: Vec<(String, f64)> = Vec::new();
        let mut known = HashSet::new();
        for part in &self.parts {
            let metric = &*part.metric;
            for (name, value) in metric.compute().map_err(|source| failed(metric, source))? {
                let name = part.rename(name);
                if !known.insert(name.clone()) {
                    let text = format!("another metric is called `{name}`, too: give one a prefix");
                    return Err(failed(metric, text.into()));
                }
                all.push((name, value));
            }
        }
        Ok(all)
    }

    /// Removes all batches.
    pub fn reset(&mut self) {
        self.parts.iter_mut().for_each(|part| part.metric.reset());
    }
}

impl<M: Metric + 'static> From<M> for Evaluator {
    fn from(metric: M) -> Self {
        Self::new().with(metric)
    }
}

impl std::fmt::Debug for Evaluator {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_list().entries(self.parts.iter().map(|part| part.metric.name())).finish()
    }
}

impl Part {
    fn rename(&self, name: String) -> String {
        let Some(prefix) = &self.prefix else { return name };
        let own = name.split_once('/').map_or(&*name, |(_, own)| own);
        format!("{prefix}/{own}")
    }
}

fn failed(metric: &dyn Metric, source: BoxError) -> Error {
    Error::Metric { metric: metric.name().to_owned(), source }
}
