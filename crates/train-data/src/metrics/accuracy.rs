//! `Accuracy`: share of samples whose label is among the `k` largest logits.

use super::fields::ClassDim;
use super::{Fields, Metric, per_cent};
use crate::{Array, Batch, BoxError};

/// Share of samples, in per cent, whose label is among the `k` largest logits.
///
/// `100 * right / samples`, for each `k`. Reported as `accuracy` if the only `k` is 1, else as
/// `accuracy/top1`, `accuracy/top5` and so on.
///
/// Follows: torchmetrics 1.9.0, `MulticlassAccuracy(average="micro", top_k=k)`; names as
/// MMPretrain's `Accuracy`. Among equal logits the one with the lowest index comes first here. In
/// torchmetrics `torch.topk` decides, which promises no order, so that values may differ if the
/// label's logit equals others at place `k`.
#[derive(Clone, Debug)]
pub struct Accuracy {
    topk: Vec<usize>,
    fields: Fields,
    /// Number of samples, and of correct ones by `topk`.
    state: Vec<f64>,
}

impl Default for Accuracy {
    fn default() -> Self {
        Self::new([1])
    }
}

impl Accuracy {
    /// Top-k accuracy for each of these `k`.
    ///
    /// # Panics
    ///
    /// Without any `k`, or with a `k` of 0.
    #[must_use]
    pub fn new(topk: impl Into<Vec<usize>>) -> Self {
        let topk = topk.into();
        assert!(!topk.is_empty() && !topk.contains(&0), "each `topk` must be at least 1");
        let state = vec![0.0; topk.len() + 1];
        Self { topk, fields: Fields::default(), state }
    }

    /// Sets the fields to read.
    #[must_use]
    pub fn with_fields(self, fields: Fields) -> Self {
        Self { fields, ..self }
    }

    fn name_of(&self, k: usize) -> String {
        if self.topk == [1] { "accuracy".to_owned() } else { format!("accuracy/top{k}") }
    }
}

impl Metric for Accuracy {
    fn names(&self) -> Option<Vec<String>> {
        Some(self.topk.iter().map(|k| self.name_of(*k)).collect())
    }

    fn update(&mut self, batch: &Batch, outputs: &[(String, Array)]) -> Result<(), BoxError> {
        let rows = self.fields.rows(batch, outputs, ClassDim::Second)?;
        if let Some(k) = self.topk.iter().find(|k| **k > rows.classes) {
            let classes = rows.classes;
            let text = format!(
                "`topk` is {k}, and the output has {classes} classes: set a smaller `topk`"
            );
            return Err(text.into());
        }
        let (topk, state) = (&self.topk, &mut self.state);
        rows.for_each(|label, row| {
            state[0] += 1.0;
            let rank = rank(row, label);
            for (right, k) in state[1..].iter_mut().zip(topk) {
                *right += f64::from(u8::from(rank < *k));
            }
        })
    }

    fn state(&mut self) -> &mut [f64] {
        &mut self.state
    }

    fn compute(&self) -> Result<Vec<(String, f64)>, BoxError> {
        let samples = self.state[0];
        if samples == 0.0 {
            return Err("there are no labels".into());
        }
        let shares = self.topk.iter().zip(&self.state[1..]);
        Ok(shares.map(|(k, right)| (self.name_of(*k), per_cent(*right, samples))).collect())
    }

    fn reset(&mut self) {
        self.state.fill(0.0);
    }
}

/// Number of logits before the label's; `usize::MAX` if any is NaN.
fn rank(row: &[f32], label: usize) -> usize {
    if row.iter().any(|value| value.is_nan()) {
        return usize::MAX;
    }
    let before = row[..label].iter().filter(|value| **value >= row[label]).count();
    before + row[label + 1..].iter().filter(|value| **value > row[label]).count()
}
