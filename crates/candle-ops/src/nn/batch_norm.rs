//! Batch normalization.

use candle_core::{DType, ModuleT, Result, Tensor, bail};
pub use candle_nn::batch_norm::BatchNormConfig;
use candle_nn::{Init, VarBuilder};

use super::norm_parameter;
use super::parameter::parameter_of;
use crate::norm::batch_norm::batch_norm_tracking;
use crate::sizes::Running;
use crate::{self as ops, BatchNormOptions, Statistics};

/// Batch normalization of `[n, c, ...]`: `weight`, `bias`, and buffers `running_mean`,
/// `running_var`.
///
/// In training it normalizes with the statistics of the batch and updates the running ones by
/// `running += momentum * (batch - running)`, with the unbiased variance; in evaluation it uses the
/// running ones. There is no `num_batches_tracked`: the momentum is constant.
#[derive(Clone, Debug)]
pub struct BatchNorm {
    weight_and_bias: Option<(Tensor, Tensor)>,
    running: Statistics,
    eps: f64,
    momentum: f64,
    relu: bool,
}

impl BatchNorm {
    /// A layer with running statistics, a weight and a bias, and a momentum of 0.1. The statistics
    /// are updated in place.
    ///
    /// # Errors
    ///
    /// Tensors of another shape than `[num_features]`; a negative `eps`.
    pub fn new(
        num_features: usize,
        running_mean: Tensor,
        running_var: Tensor,
        weight: Tensor,
        bias: Tensor,
        eps: f64,
    ) -> Result<Self> {
        let affine = Some((weight, bias));
        Self::checked(num_features, [running_mean, running_var], affine, eps, 0.1)
    }

    /// Like [`new`](Self::new), without a weight and a bias.
    ///
    /// # Errors
    ///
    /// The errors of [`new`](Self::new).
    pub fn new_no_bias(
        num_features: usize,
        running_mean: Tensor,
        running_var: Tensor,
        eps: f64,
    ) -> Result<Self> {
        Self::checked(num_features, [running_mean, running_var], None, eps, 0.1)
    }

    /// Like [`new`](Self::new), with another momentum.
    ///
    /// # Errors
    ///
    /// The errors of [`new`](Self::new); a momentum outside of 0 to 1.
    pub fn new_with_momentum(
        num_features: usize,
        running_mean: Tensor,
        running_var: Tensor,
        weight: Tensor,
        bias: Tensor,
        eps: f64,
        momentum: f64,
    ) -> Result<Self> {
        let affine = Some((weight, bias));
        Self::checked(num_features, [running_mean, running_var], affine, eps, momentum)
    }

    /// Like [`new_no_bias`](Self::new_no_bias), with another momentum.
    ///
    /// # Errors
    ///
    /// The errors of [`new_with_momentum`](Self::new_with_momentum).
    pub fn new_no_bias_with_momentum(
        num_features: usize,
        running_mean: Tensor,
        running_var: Tensor,
        eps: f64,
        momentum: f64,
    ) -> Result<Self> {
        Self::checked(num_features, [running_mean, running_var], None, eps, momentum)
    }

    /// Adds a ReLU, in the same pass.
    #[must_use]
    pub const fn with_relu(mut self) -> Self {
        self.relu = true;
        self
    }

    /// The running mean.
    pub const fn running_mean(&self) -> &Tensor {
        &self.running.mean
    }

    /// The running variance.
    pub const fn running_var(&self) -> &Tensor {
        &self.running.var
    }

    /// The number added to the variance, as `f32`.
    pub const fn eps(&self) -> f64 {
        self.eps
    }

    /// Weight of the current batch in the running statistics.
    pub const fn momentum(&self) -> f64 {
        self.momentum
    }

    /// The weight and the bias.
    pub fn weight_and_bias(&self) -> Option<(&Tensor, &Tensor)> {
        self.weight_and_bias.as_ref().map(|(weight, bias)| (weight, bias))
    }

    /// Normalizes with the statistics of the batch, and updates the running ones.
    ///
    /// # Errors
    ///
    /// The errors of the operator, [`batch_norm`](ops::batch_norm).
    pub fn forward_train(&self, x: &Tensor) -> Result<Tensor> {
        let (weight, bias) = self.affine()?;
        let planes = planes(x)?;
        let (images, _, height, width) = planes.dims4()?;
        let count = (images * height * width) as f32;
        // The unbiased variance.
        let factor = count / (count - 1.0);
        let running = Running { of: &self.running, momentum: self.momentum, factor };
        let inputs = [&planes, &weight, &bias];
        let (y, _) = batch_norm_tracking(inputs, self.options(), Some(running))?;
        as_was(y, x)
    }

    fn forward_eval(&self, x: &Tensor) -> Result<Tensor> {
        let (weight, bias) = self.affine()?;
        let y = ops::batch_norm_with(&planes(x)?, &weight, &bias, &self.running, self.options())?;
        as_was(y, x)
    }

    fn checked(
        num_features: usize,
        [mean, var]: [Tensor; 2],
        weight_and_bias: Option<(Tensor, Tensor)>,
        eps: f64,
        momentum: f64,
    ) -> Result<Self> {
        if eps < 0.0 || !(0.0..=1.0).contains(&momentum) {
            bail!("batch_norm: eps {eps} is negative or momentum {momentum} is not within 0 and 1");
        }
        let affine = weight_and_bias.iter().flat_map(|(weight, bias)| [weight, bias]);
        if let Some(odd) =
            [&mean, &var].into_iter().chain(affine).find(|t| t.dims() != [num_features])
        {
            bail!("batch_norm: a parameter of shape {:?} for {num_features} channels", odd.shape());
        }
        let running =
            Statistics { mean: mean.to_dtype(DType::F32)?, var: var.to_dtype(DType::F32)? };
        Ok(Self { weight_and_bias, running, eps, momentum, relu: false })
    }

    fn options(&self) -> BatchNormOptions {
        BatchNormOptions { eps: self.eps as f32, relu: self.relu }
    }

    fn affine(&self) -> Result<(Tensor, Tensor)> {
        match &self.weight_and_bias {
            Some(affine) => Ok(affine.clone()),
            None => Ok((self.running.mean.ones_like()?, self.running.mean.zeros_like()?)),
        }
    }
}

impl ModuleT for BatchNorm {
    fn forward_t(&self, x: &Tensor, train: bool) -> Result<Tensor> {
        if train { self.forward_train(x) } else { self.forward_eval(x) }
    }
}

/// `[n, c, ...]` as `[n, c, h, w]`.
fn planes(x: &Tensor) -> Result<Tensor> {
    match *x.dims() {
        [_, _, _, _] => Ok(x.clone()),
        [n, c, ref rest @ ..] => x.reshape((n, c, rest.iter().product::<usize>(), 1)),
        _ => bail!("batch_norm: an input of shape {:?} has no channels", x.shape()),
    }
}

/// `y` in the shape of `x`.
fn as_was(y: Tensor, x: &Tensor) -> Result<Tensor> {
    if y.dims() == x.dims() { Ok(y) } else { y.reshape(x.shape()) }
}

/// A layer that is initialized as the identity on standard normal input.
///
/// # Errors
///
/// Errors of the builder; a parameter larger than the memory; a configuration that keeps the mean;
/// an `eps` or a momentum out of range.
pub fn batch_norm<C: Into<BatchNormConfig>>(
    num_features: usize,
    config: C,
    vb: VarBuilder<'_>,
) -> Result<BatchNorm> {
    let config = config.into();
    if !config.remove_mean {
        bail!("batch_norm: remove_mean = false is not supported");
    }
    let affine = |name, value| norm_parameter(num_features, name, value, &vb);
    let weight_and_bias = match config.affine {
        true => Some((affine("weight", 1.0)?, affine("bias", 0.0)?)),
        false => None,
    };
    let running =
        |name, value| parameter_of(DType::F32, num_features, name, Init::Const(value), &vb);
    let statistics = [running("running_mean", 0.0)?, running("running_var", 1.0)?];
    BatchNorm::checked(num_features, statistics, weight_and_bias, config.eps, config.momentum)
}
