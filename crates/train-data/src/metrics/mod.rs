//! Metrics: named values of a model's outputs on a data set, computed from sums that ranks add up.
//!
//! A [`Metric`] adds each batch to its state, a slice of sums. After the last batch the states of
//! all ranks are summed, once for all metrics ([`Evaluator::reduce`]), and every rank computes the
//! same numbers from them. Ranks may have different numbers of batches, or none, as long as each
//! sample is on one of them.
//!
//! The metrics, with the class of torchmetrics 1.9.0 that each equals, and the state:
//!
//! * [`Accuracy`]: `MulticlassAccuracy(average="micro", top_k=k)`. The number of samples, and of
//!   correct ones for each `k`.
//! * [`ClassScore`]: `MulticlassPrecision`, `MulticlassRecall`, `MulticlassF1Score` and
//!   `MulticlassJaccardIndex` (IoU). For each class the number of correct, predicted and labelled
//!   samples.
//! * [`ConfusionMatrix`]: `MulticlassConfusionMatrix`. The matrix.
//! * [`AveragePrecision`]: `MulticlassAveragePrecision(thresholds=n)`. For each class and threshold
//!   the number of samples and of correct ones.
//! * [`Perplexity`]: `Perplexity`; [`CrossEntropy`]: PyTorch's `torch.nn.CrossEntropyLoss`. An
//!   [`ExactSum`] of losses, and their number.
//! * [`MeanLoss`]: the mean of losses that the model returns. The same for each loss.
//!
//! Ratios are in percent, as MMPretrain and MMSegmentation report them.
//!
//! # Guarantees
//!
//! * Values do not depend, to the last bit, on the distribution of samples over ranks and batches:
//!   counts are exact up to 2^53, losses are summed exactly over the whole range of `f64`. A
//!   [`MeanLoss`] of one value per batch depends on the batches.
//! * A loss that is NaN or infinite makes the mean NaN or infinite; the perplexity of a mean above
//!   709 is infinite.
//! * Outputs may be `f32`, `f16` or `bf16`, and are widened without rounding; labels may be `i64`,
//!   `i32` or `u8`.
//! * A sample whose logits have a NaN has no predicted class: it counts as wrong, and makes losses
//!   and perplexity NaN. Among equal logits the one with the lowest index comes first.
//! * A label out of range is an error, unless it is [`Fields::ignore_index`]. Computing values
//!   without labels is an error, too.
//!
//! # Not supported
//!
//! COCO's mean average precision of detections: it sorts the boxes of the whole data set by score,
//! after matching the boxes of each image with its objects, which sums cannot express. Implement it
//! with [`Metric::records`], one record for each image.

use serde_json::Value;

use crate::{Array, Batch, BoxError};

mod accuracy;
mod average_precision;
mod class_score;
mod confusion_matrix;
mod evaluator;
mod exact_sum;
mod fields;
mod likelihood;
mod mean_loss;

pub use accuracy::Accuracy;
pub use average_precision::AveragePrecision;
pub use class_score::{Average, ClassScore, Score};
pub use confusion_matrix::ConfusionMatrix;
pub use evaluator::Evaluator;
pub use exact_sum::ExactSum;
pub use fields::Fields;
pub use likelihood::{CrossEntropy, Perplexity};
pub use mean_loss::MeanLoss;

/// Computes named values from a model's outputs on a data set.
///
/// ```
/// use train_data::metrics::Metric;
/// use train_data::{Array, ArrayData, Batch, BoxError};
///
/// /// Mean of the absolute errors of the output `value`.
/// #[derive(Default)]
/// struct MeanError([f64; 2]);
///
/// impl Metric for MeanError {
///     fn update(&mut self, batch: &Batch, outputs: &[(String, Array)]) -> Result<(), BoxError> {
///         let (ArrayData::F32(values), ArrayData::F32(targets)) =
///             (outputs[0].1.data(), batch.get("targets")?.data())
///         else {
///             return Err("MeanError needs f32 values and targets".into());
///         };
///         let pairs = values.iter().zip(targets);
///         self.0[0] += pairs.map(|(v, t)| f64::from(v - t).abs()).sum::<f64>();
///         self.0[1] += values.len() as f64;
///         Ok(())
///     }
///     fn state(&mut self) -> &mut [f64] {
///         &mut self.0
///     }
///     fn compute(&self) -> Result<Vec<(String, f64)>, BoxError> {
///         Ok(vec![("mean_error".into(), self.0[0] / self.0[1])])
///     }
///     fn reset(&mut self) {
///         self.0 = [0.0; 2];
///     }
/// }
/// ```
///
/// A metric that cannot be computed from sums keeps one record per sample instead:
///
/// ```
/// use serde_json::Value;
/// use train_data::metrics::Metric;
/// use train_data::{Array, ArrayData, Batch, BoxError};
///
/// /// Median of the output `value`.
/// #[derive(Default)]
/// struct Median(Vec<Value>);
///
/// impl Metric for Median {
///     fn update(&mut self, _: &Batch, outputs: &[(String, Array)]) -> Result<(), BoxError> {
///         let ArrayData::F32(values) = outputs[0].1.data() else {
///             return Err("values must be f32".into());
///         };
///         self.0.extend(values.iter().map(|value| Value::from(*value)));
///         Ok(())
///     }
///     fn records(&mut self) -> Option<&mut Vec<Value>> {
///         Some(&mut self.0)
///     }
///     fn compute(&self) -> Result<Vec<(String, f64)>, BoxError> {
///         let mut values: Vec<_> = self.0.iter().filter_map(Value::as_f64).collect();
///         values.sort_by(f64::total_cmp);
///         let median = values.get(values.len() / 2).ok_or("Median of no samples")?;
///         Ok(vec![("median".into(), *median)])
///     }
///     fn reset(&mut self) {
///         self.0.clear();
///     }
/// }
/// ```
pub trait Metric: Send {
    /// Name in errors, by default that of its type.
    fn name(&self) -> &str {
        crate::dataset::short_name::<Self>()
    }

    /// Names of the values, if known in advance; hooks that need another name are then an error.
    fn names(&self) -> Option<Vec<String>> {
        None
    }

    /// Adds a batch.
    ///
    /// # Errors
    ///
    /// If the outputs or the batch lack the fields that the metric reads. The evaluation ends.
    fn update(&mut self, batch: &Batch, outputs: &[(String, Array)]) -> Result<(), BoxError>;

    /// Returns the sums so far, which ranks add up. Their number is equal on every rank and never
    /// changes.
    fn state(&mut self) -> &mut [f64] {
        &mut []
    }

    /// Returns the records so far, one per sample, of a metric that cannot be computed from sums.
    /// The caller replaces them with those of all ranks: in the order of a data set; for a stream
    /// in an order that depends on the number of ranks. Every rank then has all of them.
    fn records(&mut self) -> Option<&mut Vec<Value>> {
        None
    }

    /// Computes the named values from state and records of all ranks.
    ///
    /// # Errors
    ///
    /// If there are no samples, for example.
    fn compute(&self) -> Result<Vec<(String, f64)>, BoxError>;

    /// Removes all batches.
    fn reset(&mut self);
}

impl<M: Metric + ?Sized> Metric for Box<M> {
    fn name(&self) -> &str {
        (**self).name()
    }
    fn names(&self) -> Option<Vec<String>> {
        (**self).names()
    }
    fn update(&mut self, batch: &Batch, outputs: &[(String, Array)]) -> Result<(), BoxError> {
        (**self).update(batch, outputs)
    }
    fn state(&mut self) -> &mut [f64] {
        (**self).state()
    }
    fn records(&mut self) -> Option<&mut Vec<Value>> {
        (**self).records()
    }
    fn compute(&self) -> Result<Vec<(String, f64)>, BoxError> {
        (**self).compute()
    }
    fn reset(&mut self) {
        (**self).reset();
    }
}

/// Returns a state of `parts` counts for each of `classes` classes, all 0.
///
/// # Panics
///
/// If these are more than 2^28.
fn zeros(classes: usize, parts: usize) -> Vec<f64> {
    let count = classes.checked_mul(parts).filter(|count| *count <= 1 << 28);
    let count = count.unwrap_or_else(|| {
        panic!("{parts} counts for each of {classes} classes are more than 268435456")
    });
    vec![0.0; count]
}

/// Returns a fraction in per cent; 0 if `whole` is 0.
fn per_cent(part: f64, whole: f64) -> f64 {
    if whole == 0.0 { 0.0 } else { 100.0 * part / whole }
}
