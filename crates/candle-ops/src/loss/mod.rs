//! Cross entropy, the loss of classification; and that of sequences.

pub(crate) mod ctc;
mod dispatch;

use candle_core::{DType, Result, Shape, Tensor, bail};

use crate::autocast::{cast, cast_unless_to_f32};
use crate::cpu::real::Real;
use crate::cpu::simd::{self, Kernel};
use crate::cpu::sums::{largest, sum, sum_by};
use crate::graph::device;
use crate::graph::operator::{Input, Operator, apply1};
use crate::state::index_range::{IndexRange, to_host};

/// Options of [`cross_entropy_with`]; none by default. Follows:
/// `torch.nn.functional.cross_entropy`.
#[derive(Clone, Copy, Debug, Default)]
pub struct CrossEntropyOptions<'a> {
    /// Weight of each class, `[classes]`, a constant.
    pub weight: Option<&'a Tensor>,
    /// A label whose rows are ignored. PyTorch's default is -100; here, without it, every label
    /// must be a class.
    pub ignore_index: Option<i64>,
    /// Label smoothing: the part of the target that is distributed equally over all classes, from 0
    /// to 1.
    pub label_smoothing: f32,
}

/// Mean over the batch of `-log softmax(logits)[label]`, a scalar of `f32` (`f64` for `f64`
/// logits).
///
/// Shapes: `logits` is `[n, classes]`; `labels` is `[n]`, `i64` or `u32`. The largest logit of a
/// row is subtracted first, so large logits do not overflow; the mean is summed in `f64`. A NaN
/// logit, or an infinite largest one, makes the loss NaN.
///
/// The gradient is `(softmax - one_hot) / n`.
///
/// # Errors
///
/// Mismatched shapes or dtypes; a label that is not a class; an empty batch.
pub fn cross_entropy(logits: &Tensor, labels: &Tensor) -> Result<Tensor> {
    cross_entropy_with(logits, labels, CrossEntropyOptions::default())
}

/// [`cross_entropy`] with PyTorch's options.
///
/// The loss of a row with label `y` is `(1 - s) * w[y] * l[y] + s / classes * sum(w * l)`, with
/// weights `w`, smoothing `s` and `l = -log softmax(logits)`. The mean is the sum over the rows
/// that are not ignored, divided by the sum of their `w[y]`. If all are ignored, the loss is NaN
/// and gradients are 0.
///
/// # Errors
///
/// The errors of [`cross_entropy`]; weights of another shape; a smoothing that is not from 0 to 1.
pub fn cross_entropy_with(
    logits: &Tensor,
    labels: &Tensor,
    options: CrossEntropyOptions<'_>,
) -> Result<Tensor> {
    let (count, classes) = logits.dims2()?;
    if labels.dims1()? != count || count == 0 {
        bail!("cross_entropy: {} labels for {count} rows of logits", labels.elem_count());
    }
    let mut of = CrossEntropy::new(options, classes)?;
    let logits = of.cast(logits)?;
    IndexRange::Classes(classes, of.ignore_index).check_all(labels)?;
    if device::dispatches(&logits) {
        return dispatch::cross_entropy(&logits, labels, &of);
    }
    of.load(labels)?;
    apply1(of, [logits])
}

/// One call: the checked options, and the data read by the loops.
pub(crate) struct CrossEntropy {
    pub(crate) weight: Option<Tensor>,
    pub(crate) ignore_index: Option<i64>,
    pub(crate) smoothing: f64,
    labels: Vec<i64>,
    weights: Option<Vec<f64>>,
}

impl CrossEntropy {
    fn new(options: CrossEntropyOptions<'_>, classes: usize) -> Result<Self> {
        let CrossEntropyOptions { weight, ignore_index, label_smoothing } = options;
        if !(0.0..=1.0).contains(&label_smoothing) {
            bail!("cross_entropy: label_smoothing is {label_smoothing}, not from 0 to 1");
        }
        if let Some(weight) = weight.filter(|weight| weight.dims() != [classes]) {
            bail!("cross_entropy: weights of shape {:?} for {classes} classes", weight.shape());
        }
        let (weight, smoothing) = (weight.map(Tensor::detach), label_smoothing.into());
        Ok(Self { weight, ignore_index, smoothing, labels: Vec::new(), weights: None })
    }

    /// Casts the logits by the current policy. The kernel widens half-precision logits while
    /// reading them, so that they are not copied.
    fn cast(&self, logits: &Tensor) -> Result<Tensor> {
        const NAME: &str = "cross_entropy_loss";
        if self.is_plain() && device::kernels(logits).is_some() {
            return cast_unless_to_f32(NAME, logits);
        }
        let [logits] = cast(NAME, [logits])?;
        Ok(logits)
    }

    /// Copies labels and weights to the host.
    fn load(&mut self, labels: &Tensor) -> Result<()> {
        self.labels = to_host(labels)?;
        if let Some(weight) = &self.weight {
            self.weights = Some(weight.to_dtype(DType::F64)?.to_vec1()?);
        }
        Ok(())
    }

    /// Whether there are no options.
    pub(crate) fn is_plain(&self) -> bool {
        self.weight.is_none() && self.ignore_index.is_none() && self.smoothing == 0.0
    }

    /// The class of a row, unless it is ignored.
    fn class(&self, label: i64) -> Option<usize> {
        let is_kept = self.ignore_index != Some(label);
        is_kept.then(|| usize::try_from(label).expect("labels were checked"))
    }

    fn weight(&self, class: usize) -> f64 {
        self.weights.as_ref().map_or(1.0, |weights| weights[class])
    }

    /// The divisor of the sum of the rows' losses.
    fn total_weight(&self) -> f64 {
        self.labels.iter().filter_map(|label| Some(self.weight(self.class(*label)?))).sum()
    }

    /// Factor of the losses of all classes.
    fn spread(&self, classes: usize) -> f64 {
        self.smoothing / classes as f64
    }
}

/// The largest value of a row, and the sum of `e^(v - largest)`.
struct ExpSum<'a, T> {
    row: &'a [T],
    largest: &'a mut T,
    sum: &'a mut T,
}

impl<T: Real> Kernel for ExpSum<'_, T> {
    #[inline(always)]
    fn run(self) {
        let largest = largest(self.row);
        *self.largest = largest;
        *self.sum = sum_by(self.row, |v| (v - largest).quick_exp());
    }
}

/// Replaces a row with its softmax, multiplied by `of`.
struct Shares<'a, T> {
    row: &'a mut [T],
    of: T,
}

impl<T: Real> Kernel for Shares<'_, T> {
    #[inline(always)]
    fn run(self) {
        let largest = largest(self.row);
        for v in &mut *self.row {
            *v = (*v - largest).quick_exp();
        }
        let factor = self.of / sum(self.row);
        for v in self.row {
            *v *= factor;
        }
    }
}

impl Operator<1> for CrossEntropy {
    const NAME: &'static str = "cross_entropy";

    fn output(&self, dtype: DType) -> DType {
        if dtype == DType::F64 { dtype } else { DType::F32 }
    }

    fn forward<T: Real>(&self, [logits]: [Input<'_>; 1]) -> Result<(Vec<T>, Shape)> {
        let (_, classes) = logits.shape().dims2()?;
        let mut total = 0.0;
        for (row, label) in logits.values::<T>()?.chunks_exact(classes).zip(&self.labels) {
            let Some(class) = self.class(*label) else { continue };
            let (mut largest, mut sum) = (T::ZERO, T::ZERO);
            simd::run(ExpSum { row, largest: &mut largest, sum: &mut sum });
            let log = sum.ln();
            // `largest` may be so large that the logarithm would be lost in the sum.
            let loss = |class: usize| (log - (row[class] - largest)).to_f64();
            total += (1.0 - self.smoothing) * self.weight(class) * loss(class);
            if self.smoothing > 0.0 {
                let all: f64 = (0..classes).map(|class| self.weight(class) * loss(class)).sum();
                total += self.spread(classes) * all;
            }
        }
        Ok((vec![T::of(total / self.total_weight())], Shape::from(())))
    }

    fn backward<T: Real>(
        &self,
        [logits]: [Input<'_>; 1],
        _loss: Input<'_>,
        gradient: Input<'_>,
    ) -> Result<[Option<Vec<T>>; 1]> {
        let (_, classes) = logits.shape().dims2()?;
        let scale = gradient.values::<T>()?[0] / T::of(self.total_weight());
        let mut gradient = logits.values::<T>()?.into_owned();
        let sum: f64 = (0..classes).map(|class| self.weight(class)).sum();
        let spread = self.spread(classes);
        for (row, label) in gradient.chunks_exact_mut(classes).zip(&self.labels) {
            let Some(class) = self.class(*label) else {
                row.fill(T::ZERO);
                continue;
            };
            let own = (1.0 - self.smoothing) * self.weight(class);
            simd::run(Shares { row, of: scale * T::of(own + spread * sum) });
            row[class] -= scale * T::of(own);
            if spread > 0.0 {
                for (class, v) in row.iter_mut().enumerate() {
                    *v -= scale * T::of(spread * self.weight(class));
                }
            }
        }
        Ok([Some(gradient)])
    }
}

#[cfg(test)]
mod tests;
