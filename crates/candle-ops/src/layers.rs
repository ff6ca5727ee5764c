//! Layers over [the operators](crate), with PyTorch's parameter names and initial values.
//!
//! They are built from a [`VarBuilder`] like candle-nn's and mix with them. `weight` and `bias` have the builder's dtype,
//! except in norm layers, which request `f32` so that half precision keeps its statistics.

use candle_core::{DType, Module, ModuleT, Result, Tensor};
use candle_nn::{Init, VarBuilder};

use crate::{self as ops, BatchNormOptions, Statistics, Window};

/// Options of [`Conv2d`]. Follows: `torch.nn.Conv2d`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Conv2dOptions {
    /// Distance between neighbouring windows. Defaults to 1.
    pub stride: usize,
    /// Rows and columns of zeros on each side. Defaults to 0.
    pub padding: usize,
    /// Whether there is a `bias`. Defaults to true.
    pub bias: bool,
}

impl Default for Conv2dOptions {
    fn default() -> Self {
        Self { stride: 1, padding: 0, bias: true }
    }
}

/// Two-dimensional convolution: [`conv2d`](crate::conv2d) with a `weight` and an optional `bias`.
#[derive(Clone, Debug)]
pub struct Conv2d {
    weight: Tensor,
    bias: Option<Tensor>,
    window: Window,
}

impl Conv2d {
    /// A layer with a square kernel. Both tensors start uniform within `1 / sqrt(fan_in)`.
    ///
    /// # Errors
    ///
    /// Those of the builder.
    pub fn new(
        in_channels: usize,
        out_channels: usize,
        kernel: usize,
        options: Conv2dOptions,
        vb: VarBuilder<'_>,
    ) -> Result<Self> {
        let init = within_fan_in(in_channels * kernel * kernel);
        let shape = (out_channels, in_channels, kernel, kernel);
        let weight = vb.get_with_hints(shape, "weight", init)?;
        let bias =
            if options.bias { Some(vb.get_with_hints(out_channels, "bias", init)?) } else { None };
        let window = Window { stride: options.stride, padding: options.padding };
        Ok(Self { weight, bias, window })
    }
}

impl Module for Conv2d {
    fn forward(&self, x: &Tensor) -> Result<Tensor> {
        ops::conv2d(x, &self.weight, self.bias.as_ref(), self.window)
    }
}

/// A fully connected layer: [`linear`](crate::linear) with a `weight` and a `bias`.
#[derive(Clone, Debug)]
pub struct Linear {
    weight: Tensor,
    bias: Tensor,
}

impl Linear {
    /// A layer whose tensors start uniform within `1 / sqrt(in_features)`.
    ///
    /// # Errors
    ///
    /// Those of the builder.
    pub fn new(in_features: usize, out_features: usize, vb: VarBuilder<'_>) -> Result<Self> {
        let init = within_fan_in(in_features);
        Ok(Self {
            weight: vb.get_with_hints((out_features, in_features), "weight", init)?,
            bias: vb.get_with_hints(out_features, "bias", init)?,
        })
    }
}

impl Module for Linear {
    fn forward(&self, x: &Tensor) -> Result<Tensor> {
        ops::linear(x, &self.weight, Some(&self.bias))
    }
}

/// Layer normalisation over the last dimension: [`layer_norm`](crate::layer_norm) with a `weight` and a `bias`,
/// both `f32`.
#[derive(Clone, Debug)]
pub struct LayerNorm {
    weight: Tensor,
    bias: Tensor,
    eps: f32,
}

impl LayerNorm {
    /// A layer that starts with a weight of 1 and a bias of 0.
    ///
    /// # Errors
    ///
    /// Those of the builder.
    pub fn new(width: usize, eps: f32, vb: VarBuilder<'_>) -> Result<Self> {
        let get =
            |name, value| vb.get_with_hints_dtype(width, name, Init::Const(value), DType::F32);
        Ok(Self { weight: get("weight", 1.0)?, bias: get("bias", 0.0)?, eps })
    }
}

impl Module for LayerNorm {
    fn forward(&self, x: &Tensor) -> Result<Tensor> {
        ops::layer_norm(x, &self.weight, &self.bias, self.eps)
    }
}

/// A table of vectors: [`embedding`](crate::embedding) with a `weight`.
#[derive(Clone, Debug)]
pub struct Embedding {
    weight: Tensor,
}

impl Embedding {
    /// A table that starts standard normal.
    ///
    /// # Errors
    ///
    /// Those of the builder.
    pub fn new(rows: usize, width: usize, vb: VarBuilder<'_>) -> Result<Self> {
        let init = Init::Randn { mean: 0.0, stdev: 1.0 };
        Ok(Self { weight: vb.get_with_hints((rows, width), "weight", init)? })
    }
}

impl Module for Embedding {
    fn forward(&self, ids: &Tensor) -> Result<Tensor> {
        ops::embedding(ids, &self.weight)
    }
}

/// Options of [`BatchNorm2d`]. Follows: `torch.nn.BatchNorm2d`.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct BatchNorm2dOptions {
    /// Added to the variance. Defaults to 1e-5.
    pub eps: f32,
    /// Weight of the newest batch in the running statistics. Defaults to 0.1.
    pub momentum: f32,
    /// Whether a ReLU follows, in the same pass. Defaults to false.
    pub relu: bool,
}

impl Default for BatchNorm2dOptions {
    fn default() -> Self {
        Self { eps: 1e-5, momentum: 0.1, relu: false }
    }
}

/// Batch normalisation: `weight`, `bias`, and buffers `running_mean`, `running_var`, all `f32`.
///
/// In training it normalises with the statistics of the batch and moves the running ones towards
/// those, `running += momentum * (batch - running)`, the variance unbiased; in evaluation it uses
/// the running ones. There is no `num_batches_tracked`: the momentum is constant.
#[derive(Clone, Debug)]
pub struct BatchNorm2d {
    weight: Tensor,
    bias: Tensor,
    running_mean: Tensor,
    running_var: Tensor,
    options: BatchNorm2dOptions,
}

impl BatchNorm2d {
    /// A layer that starts as the identity on standard normal input.
    ///
    /// # Errors
    ///
    /// Those of the builder.
    pub fn new(channels: usize, options: BatchNorm2dOptions, vb: VarBuilder<'_>) -> Result<Self> {
        let get =
            |name, value| vb.get_with_hints_dtype(channels, name, Init::Const(value), DType::F32);
        Ok(Self {
            weight: get("weight", 1.0)?,
            bias: get("bias", 0.0)?,
            running_mean: get("running_mean", 0.0)?,
            running_var: get("running_var", 1.0)?,
            options,
        })
    }

    fn train(&self, x: &Tensor, options: BatchNormOptions) -> Result<Tensor> {
        let (y, batch) = ops::batch_norm(x, &self.weight, &self.bias, options)?;
        let (images, _, height, width) = x.dims4()?;
        let count = (images * height * width) as f32;
        let unbiased = (batch.var * f64::from(count / (count - 1.0)))?;
        self.track(&self.running_mean, &batch.mean)?;
        self.track(&self.running_var, &unbiased)?;
        Ok(y)
    }

    /// `running += momentum * (batch - running)`, in place.
    fn track(&self, running: &Tensor, batch: &Tensor) -> Result<()> {
        let old = running.detach();
        let step = ((batch - &old)? * f64::from(self.options.momentum))?;
        running.slice_set(&(old + step)?, 0, 0)
    }
}

impl ModuleT for BatchNorm2d {
    fn forward_t(&self, x: &Tensor, train: bool) -> Result<Tensor> {
        let options = BatchNormOptions { eps: self.options.eps, relu: self.options.relu };
        if train {
            return self.train(x, options);
        }
        let running = Statistics { mean: self.running_mean.clone(), var: self.running_var.clone() };
        ops::batch_norm_with(x, &self.weight, &self.bias, &running, options)
    }
}

/// PyTorch's default for weights and biases: `kaiming_uniform` with `a = sqrt(5)`.
fn within_fan_in(fan_in: usize) -> Init {
    let bound = 1.0 / (fan_in as f64).sqrt();
    Init::Uniform { lo: -bound, up: bound }
}

#[cfg(test)]
mod tests {
    use candle_core::Device;
    use candle_nn::VarMap;

    use super::*;

    #[test]
    fn batch_norm_tracks_as_pytorch_does() {
        let vars = VarMap::new();
        let vb = VarBuilder::from_varmap(&vars, DType::F32, &Device::Cpu);
        let norm = BatchNorm2d::new(1, BatchNorm2dOptions::default(), vb).unwrap();
        let x = Tensor::new(&[[[[1f32, 2.0], [3.0, 6.0]]]], &Device::Cpu).unwrap();
        let y = norm.forward_t(&x, true).unwrap();
        // Mean 3, squared deviations 4 + 1 + 0 + 9 = 14: biased 3.5, unbiased 14 / 3.
        let mean = norm.running_mean.to_vec1::<f32>().unwrap()[0];
        let var = norm.running_var.to_vec1::<f32>().unwrap()[0];
        assert!((mean - 0.3).abs() < 1e-6, "{mean}");
        assert!((var - (0.9 + 0.1 * 14.0 / 3.0)).abs() < 1e-6, "{var}");
        let y = y.flatten_all().unwrap().to_vec1::<f32>().unwrap();
        assert!((y[3] - 3.0 / 3.5f32.sqrt()).abs() < 1e-5, "{y:?}");
        let y = norm.forward_t(&x, false).unwrap().flatten_all().unwrap().to_vec1::<f32>().unwrap();
        assert!((y[3] - (6.0 - mean) / (var + 1e-5).sqrt()).abs() < 1e-5, "{y:?}");
    }

    #[test]
    fn names_are_pytorchs() {
        let vars = VarMap::new();
        let vb = VarBuilder::from_varmap(&vars, DType::F32, &Device::Cpu);
        Conv2d::new(2, 3, 3, Conv2dOptions { bias: false, ..Default::default() }, vb.pp("conv"))
            .unwrap();
        Linear::new(4, 5, vb.pp("fc")).unwrap();
        BatchNorm2d::new(3, BatchNorm2dOptions::default(), vb.pp("bn")).unwrap();
        LayerNorm::new(3, 1e-5, vb.pp("ln")).unwrap();
        Embedding::new(3, 2, vb.pp("tokens")).unwrap();
        let mut names: Vec<_> = vars.data().lock().unwrap().keys().cloned().collect();
        names.sort();
        assert_eq!(
            names,
            [
                "bn.bias",
                "bn.running_mean",
                "bn.running_var",
                "bn.weight",
                "conv.weight",
                "fc.bias",
                "fc.weight",
                "ln.bias",
                "ln.weight",
                "tokens.weight"
            ]
        );
    }
}
