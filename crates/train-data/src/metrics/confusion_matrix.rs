//! `ConfusionMatrix`: number of samples by label and predicted class.

use super::{Fields, Metric, zeros};
use crate::{Array, Batch, BoxError};

/// Number of samples by label and predicted class, reported as `confusion_matrix_0_0`,
/// `confusion_matrix_0_1` (labelled 0, predicted 1) and so on. A sample whose logits have a NaN is
/// in no cell.
///
/// Follows: torchmetrics 1.9.0, `MulticlassConfusionMatrix`.
#[derive(Clone, Debug)]
pub struct ConfusionMatrix {
    classes: usize,
    fields: Fields,
    state: Vec<f64>,
}

impl ConfusionMatrix {
    /// The matrix of `classes` classes.
    ///
    /// # Panics
    ///
    /// With more than 2^28 counts, the square of the classes.
    #[must_use]
    pub fn new(classes: usize) -> Self {
        Self { classes, fields: Fields::default(), state: zeros(classes, classes) }
    }

    /// Sets the fields to read.
    #[must_use]
    pub fn with_fields(self, fields: Fields) -> Self {
        Self { fields, ..self }
    }

    /// The counts, a row for each label.
    pub fn rows(&self) -> impl Iterator<Item = &[f64]> {
        self.state.chunks_exact(self.classes.max(1))
    }
}

impl Metric for ConfusionMatrix {
    fn names(&self) -> Option<Vec<String>> {
        let cells = (0..self.classes).flat_map(|l| (0..self.classes).map(move |p| (l, p)));
        Some(cells.map(|(label, class)| format!("confusion_matrix_{label}_{class}")).collect())
    }

    fn update(&mut self, batch: &Batch, outputs: &[(String, Array)]) -> Result<(), BoxError> {
        let (classes, state) = (self.classes, &mut self.state);
        self.fields.for_each_class(batch, outputs, classes, |label, predicted| {
            if let Some(predicted) = predicted {
                state[label * classes + predicted] += 1.0;
            }
        })
    }

    fn state(&mut self) -> &mut [f64] {
        &mut self.state
    }

    fn compute(&self) -> Result<Vec<(String, f64)>, BoxError> {
        if self.state.iter().all(|count| *count == 0.0) {
            return Err("there are no samples, or the logits of each have a NaN".into());
        }
        Ok(self.names().unwrap_or_default().into_iter().zip(self.state.iter().copied()).collect())
    }

    fn reset(&mut self) {
        self.state.fill(0.0);
    }
}
