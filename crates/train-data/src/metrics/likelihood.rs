//! `Perplexity` and `CrossEntropy`: the mean negative log-likelihood of the labels.

use super::fields::ClassDim;
use super::{ExactSum, Fields, Metric};
use crate::{Array, Batch, BoxError};

/// Sum of `-ln softmax(logits)[label]`, and the number of labels.
#[derive(Clone, Debug)]
struct Likelihood {
    fields: Fields,
    state: [f64; STATE],
}

const STATE: usize = ExactSum::PARTS + 1;

impl Default for Likelihood {
    fn default() -> Self {
        Self { fields: Fields::default(), state: [0.0; STATE] }
    }
}

impl Likelihood {
    fn update(&mut self, batch: &Batch, outputs: &[(String, Array)]) -> Result<(), BoxError> {
        let rows = self.fields.rows(batch, outputs, ClassDim::Last)?;
        let (mut sum, mut count) = (ExactSum::default(), 0.0);
        rows.for_each(|label, row| {
            sum.add(negative_log_likelihood(row, label));
            count += 1.0;
        })?;
        let [parts @ .., all] = &mut self.state;
        *all += count;
        let mut total = ExactSum::from_parts(*parts);
        total.merge(sum);
        *parts = total.parts();
        Ok(())
    }

    fn mean(&self) -> Result<f64, BoxError> {
        let [parts @ .., count] = self.state;
        if count == 0.0 {
            return Err("there are no labels".into());
        }
        Ok(ExactSum::from_parts(parts).value() / count)
    }
}

/// Defines a metric of the mean negative log-likelihood.
macro_rules! of_likelihood {
    ($(#[$doc:meta])* $metric:ident, $name:literal, $number:expr) => {
        $(#[$doc])*
        #[derive(Clone, Debug, Default)]
        pub struct $metric(Likelihood);

        impl $metric {
            /// Reads the fields `logits` and `labels`, without `ignore_index`.
            #[must_use]
            pub fn new() -> Self {
                Self::default()
            }

            /// Sets the fields to read.
            #[must_use]
            pub fn with_fields(self, fields: Fields) -> Self {
                Self(Likelihood { fields, ..self.0 })
            }
        }

        impl Metric for $metric {
            fn names(&self) -> Option<Vec<String>> {
                Some(vec![$name.to_owned()])
            }

            fn update(&mut self, batch: &Batch, outputs: &[(String, Array)]) -> Result<(), BoxError> {
                self.0.update(batch, outputs)
            }

            fn state(&mut self) -> &mut [f64] {
                &mut self.0.state
            }

            fn compute(&self) -> Result<Vec<(String, f64)>, BoxError> {
                let number: fn(f64) -> f64 = $number;
                Ok(vec![($name.to_owned(), number(self.0.mean()?))])
            }

            fn reset(&mut self) {
                self.0.state = [0.0; STATE];
            }
        }
    };
}

of_likelihood! {
    /// `exp` of the mean of `-ln softmax(logits)[label]` over all labels, reported as `perplexity`.
    /// Logits have shape `[batch, ..., classes]`, for a language model
    /// `[batch, sequence, vocabulary]`, and labels the same without the last dimension.
    ///
    /// The logits of a large vocabulary are slow to copy from a GPU and to sum here: a model that
    /// returns its losses as an output, for [`MeanLoss`](super::MeanLoss), avoids both.
    ///
    /// Follows: torchmetrics 1.9.0, `text.Perplexity`.
    Perplexity, "perplexity", f64::exp
}

of_likelihood! {
    /// The mean of `-ln softmax(logits)[label]` over all labels, reported as `loss`; shapes as
    /// [`Perplexity`]'s.
    ///
    /// Follows: PyTorch 2.15, `CrossEntropyLoss(reduction="mean")`, except that the classes are the
    /// last dimension.
    CrossEntropy, "loss", |mean| mean
}

/// `-ln softmax(row)[label]`; NaN if any logit is NaN or the largest is infinite. The exponentials
/// are of `f32`, their sum and its logarithm of `f64`.
fn negative_log_likelihood(row: &[f32], label: usize) -> f64 {
    let largest = row.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    let exponentials = row.iter().map(|logit| f64::from((logit - largest).exp()));
    exponentials.sum::<f64>().ln() + f64::from(largest) - f64::from(row[label])
}
