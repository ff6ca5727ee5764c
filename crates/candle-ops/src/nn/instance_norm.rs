//! Instance normalization.

use candle_core::{Module, Result, Tensor, bail};
use candle_nn::VarBuilder;

use super::norm_parameter;

/// Options of [`InstanceNorm`]. Follows: `torch.nn.InstanceNorm2d`, without running statistics.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct InstanceNormConfig {
    /// Added to the variance, as `f32`. Defaults to 1e-5.
    pub eps: f64,
    /// Whether there are a weight and a bias. Defaults to false.
    pub affine: bool,
}

impl Default for InstanceNormConfig {
    fn default() -> Self {
        Self { eps: 1e-5, affine: false }
    }
}

/// Instance normalization of `[n, c, ...]`: [`instance_norm`](crate::instance_norm) with an
/// optional `weight` and `bias`. It has no running statistics: training and evaluation are the
/// same.
///
/// ```
/// use candle_core::{DType, Device, Tensor};
/// use candle_ops::nn::{InstanceNormConfig, Module, VarBuilder, VarMap, instance_norm};
///
/// let vars = VarMap::new();
/// let vb = VarBuilder::from_varmap(&vars, DType::F32, &Device::Cpu);
/// let config = InstanceNormConfig { affine: true, ..InstanceNormConfig::default() };
/// let norm = instance_norm(3, config, vb.pp("norm"))?;
/// let images = Tensor::randn(0f32, 1.0, (2, 3, 8, 8), &Device::Cpu)?;
/// assert_eq!(norm.forward(&images)?.dims(), [2, 3, 8, 8]);
/// assert_eq!(vars.all_vars().len(), 2);
/// # Ok::<(), candle_core::Error>(())
/// ```
#[derive(Clone, Debug)]
pub struct InstanceNorm {
    num_features: usize,
    weight_and_bias: Option<(Tensor, Tensor)>,
    eps: f64,
}

impl InstanceNorm {
    /// A layer of `num_features` channels with a weight and a bias, both `[num_features]`.
    ///
    /// # Errors
    ///
    /// Tensors of another shape.
    pub fn new(num_features: usize, weight: Tensor, bias: Tensor, eps: f64) -> Result<Self> {
        if [&weight, &bias].iter().any(|tensor| tensor.dims() != [num_features]) {
            bail!(
                "instance_norm: the weight has shape {:?} and the bias {:?}, but both must be [{num_features}]",
                weight.shape(),
                bias.shape()
            );
        }
        Ok(Self { num_features, weight_and_bias: Some((weight, bias)), eps })
    }

    /// A layer without a weight and a bias.
    pub const fn new_no_bias(num_features: usize, eps: f64) -> Self {
        Self { num_features, weight_and_bias: None, eps }
    }

    /// The weight and the bias.
    pub fn weight_and_bias(&self) -> Option<(&Tensor, &Tensor)> {
        self.weight_and_bias.as_ref().map(|(weight, bias)| (weight, bias))
    }
}

impl Module for InstanceNorm {
    fn forward(&self, x: &Tensor) -> Result<Tensor> {
        if x.dims().get(1) != Some(&self.num_features) {
            bail!(
                "instance_norm: an input of shape {:?} for {} channels, which are its second dimension",
                x.shape(),
                self.num_features
            );
        }
        crate::instance_norm(x, self.weight_and_bias(), self.eps as f32)
    }
}

/// A layer whose weight is initialized with 1 and bias with 0, if it has them.
///
/// # Errors
///
/// Errors of the builder; a parameter larger than the memory.
pub fn instance_norm(
    num_features: usize,
    config: InstanceNormConfig,
    vb: VarBuilder<'_>,
) -> Result<InstanceNorm> {
    let InstanceNormConfig { eps, affine } = config;
    if !affine {
        return Ok(InstanceNorm::new_no_bias(num_features, eps));
    }
    let weight = norm_parameter(num_features, "weight", 1.0, &vb)?;
    let bias = norm_parameter(num_features, "bias", 0.0, &vb)?;
    InstanceNorm::new(num_features, weight, bias, eps)
}
