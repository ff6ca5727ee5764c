//! The loss of classification.

use candle_core::{CpuStorage, CustomOp2, DType, Layout, Result, Shape, Tensor, bail};

use super::{cast, host};

/// Mean over the batch of `-log softmax(logits)[label]`, a scalar `f32`.
///
/// Shapes: `logits` is `[n, classes]`, `f32`, `f16` or `bf16`; `labels` is `[n]`, `i64`. Computed
/// in `f32` with the largest logit of a row subtracted first, so large logits do not overflow; the
/// mean is summed in `f64`. A NaN logit, or an infinite largest one, makes the loss NaN.
///
/// Backward: `(softmax - one_hot) / n`, in `f32`, rounded once to the logits' dtype.
///
/// # Errors
///
/// Shapes or dtypes that do not fit, a label that is no class, an empty batch.
pub fn cross_entropy(logits: &Tensor, labels: &Tensor) -> Result<Tensor> {
    let [logits] = cast("cross_entropy_loss", [logits])?;
    logits.contiguous()?.apply_op2(&labels.contiguous()?, CrossEntropy)
}

struct CrossEntropy;

impl CustomOp2 for CrossEntropy {
    fn name(&self) -> &'static str {
        "cross_entropy"
    }

    fn cpu_fwd(
        &self,
        logits: &CpuStorage,
        logits_layout: &Layout,
        labels: &CpuStorage,
        labels_layout: &Layout,
    ) -> Result<(CpuStorage, Shape)> {
        let (count, classes) = logits_layout.shape().dims2()?;
        let (logits, labels) =
            (host::floats(logits, logits_layout)?, host::indices(labels, labels_layout)?);
        if labels.len() != count || count == 0 {
            bail!("cross_entropy: {} labels for {count} rows of logits", labels.len());
        }
        let mut total = 0.0;
        for (row, label) in logits.chunks_exact(classes).zip(labels) {
            let Some(logit) = usize::try_from(*label).ok().and_then(|label| row.get(label)) else {
                bail!("cross_entropy: label {label} is none of {classes} classes");
            };
            let largest = largest(row);
            let sum: f32 = row.iter().map(|v| (v - largest).exp()).sum();
            total += f64::from(sum.ln() + largest - logit);
        }
        Ok((CpuStorage::F32(vec![(total / count as f64) as f32]), Shape::from(())))
    }

    fn bwd(
        &self,
        logits: &Tensor,
        labels: &Tensor,
        _loss: &Tensor,
        gradient: &Tensor,
    ) -> Result<(Option<Tensor>, Option<Tensor>)> {
        let (count, classes) = logits.dims2()?;
        let scale = gradient.to_dtype(DType::F32)?.to_scalar::<f32>()? / count as f32;
        let labels = labels.to_vec1::<i64>()?;
        let (storage, layout) = logits.storage_and_layout();
        let mut gradient = host::floats_of(&storage, layout)?.into_owned();
        for (row, label) in gradient.chunks_exact_mut(classes).zip(labels) {
            let largest = largest(row);
            row.iter_mut().for_each(|v| *v = (*v - largest).exp());
            let factor = scale / row.iter().sum::<f32>();
            row.iter_mut().for_each(|v| *v *= factor);
            row[usize::try_from(label).expect("forward has checked the labels")] -= scale;
        }
        Ok((Some(host::tensor(gradient, logits.shape(), logits.dtype())?), None))
    }
}

/// The largest of a row; a NaN is passed over, and shows in the sum instead.
fn largest(row: &[f32]) -> f32 {
    row.iter().copied().fold(f32::NEG_INFINITY, f32::max)
}
