//! Cross entropy, the loss of classification.

use candle_core::{DType, Result, Shape, Tensor, bail};

use super::index_range::IndexRange;
use super::operator::{Input, Operator, apply1};
use super::real::Real;
use super::sums::largest;
use super::{cast, composed};

/// Mean over the batch of `-log softmax(logits)[label]`, a scalar `f32` (of `f64` logits, `f64`).
///
/// Shapes: `logits` is `[n, classes]`; `labels` is `[n]`, `i64`. Computed with the largest logit of a row
/// subtracted first, so large logits do not overflow; the mean is summed in `f64`. A NaN logit, or an
/// infinite largest one, makes the loss NaN.
///
/// Backward: `(softmax - one_hot) / n`.
///
/// # Errors
///
/// Shapes or dtypes that do not fit, a label that is no class, an empty batch.
pub fn cross_entropy(logits: &Tensor, labels: &Tensor) -> Result<Tensor> {
    let [logits] = cast("cross_entropy_loss", [logits])?;
    let (count, classes) = logits.dims2()?;
    if labels.dims1()? != count || count == 0 {
        bail!("cross_entropy: {} labels for {count} rows of logits", labels.elem_count());
    }
    IndexRange::Classes(classes).check_all(labels)?;
    if composed::is_for(&logits) {
        return composed::cross_entropy(&logits, labels);
    }
    let labels = labels.to_vec1()?;
    apply1(CrossEntropy { labels }, [logits])
}

struct CrossEntropy {
    labels: Vec<i64>,
}

impl Operator<1> for CrossEntropy {
    const NAME: &'static str = "cross_entropy";

    fn output(&self, dtype: DType) -> DType {
        if dtype == DType::F64 { dtype } else { DType::F32 }
    }

    fn forward<T: Real>(&self, [logits]: [Input<'_>; 1]) -> Result<(Vec<T>, Shape)> {
        let (count, classes) = logits.shape().dims2()?;
        let mut total = 0.0;
        for (row, label) in logits.values::<T>()?.chunks_exact(classes).zip(&self.labels) {
            let logit = &row[class(*label)];
            let largest = largest(row);
            let sum: T = row.iter().map(|v| (*v - largest).exp()).sum();
            // `largest` may be so large that it would hide the logarithm.
            total += (sum.ln() - (*logit - largest)).to_f64();
        }
        Ok((vec![T::of(total / count as f64)], Shape::from(())))
    }

    fn backward<T: Real>(
        &self,
        [logits]: [Input<'_>; 1],
        _loss: Input<'_>,
        gradient: Input<'_>,
    ) -> Result<[Option<Vec<T>>; 1]> {
        let (count, classes) = logits.shape().dims2()?;
        let scale = gradient.values::<T>()?[0] / T::of(count as f64);
        let mut gradient = logits.values::<T>()?.into_owned();
        for (row, label) in gradient.chunks_exact_mut(classes).zip(&self.labels) {
            let largest = largest(row);
            row.iter_mut().for_each(|v| *v = (*v - largest).exp());
            let factor = scale / row.iter().copied().sum::<T>();
            row.iter_mut().for_each(|v| *v *= factor);
            row[class(*label)] -= scale;
        }
        Ok([Some(gradient)])
    }
}

fn class(label: i64) -> usize {
    usize::try_from(label).expect("labels were checked")
}
