//! A multi-layer perceptron.

use candle_core::{Module, Result, Tensor};

use super::{classification_loss, inputs};
use crate::engine::candle::nn::{Linear, VarBuilder, linear};
use crate::engine::candle::ops::{self, Normalization};
use crate::engine::candle::{CandleModel, Loss, Outputs, TensorBatch};

/// Options of an [`Mlp`].
#[derive(Clone, Debug, PartialEq)]
pub struct MlpOptions {
    /// Values per sample: `channels * height * width`. Defaults to 784.
    pub in_features: usize,
    /// Width of each hidden layer. Defaults to `[512, 512]`.
    pub hidden: Vec<usize>,
    /// Number of classes. Defaults to 10.
    pub num_classes: usize,
    /// Normalization of bytes. Defaults to the range 0..1.
    pub normalization: Normalization,
}

impl Default for MlpOptions {
    fn default() -> Self {
        Self {
            in_features: 784,
            hidden: vec![512, 512],
            num_classes: 10,
            normalization: Normalization::default(),
        }
    }
}

/// Fully connected layers with ReLU between them: `layers.0.weight`, `layers.0.bias`, ...
#[derive(Debug)]
pub struct Mlp {
    layers: Vec<Linear>,
    normalization: Normalization,
}

impl Mlp {
    /// Builds the layers.
    ///
    /// # Errors
    ///
    /// Those of the builder.
    pub fn new(options: &MlpOptions, vb: VarBuilder<'_>) -> Result<Self> {
        let mut width = options.in_features;
        let mut layers = Vec::new();
        for (i, next) in options.hidden.iter().chain([&options.num_classes]).enumerate() {
            layers.push(linear(width, *next, vb.pp("layers").pp(i))?);
            width = *next;
        }
        Ok(Self { layers, normalization: options.normalization.clone() })
    }

    fn logits(&self, batch: &TensorBatch) -> Result<Tensor> {
        let mut x = inputs(batch, &self.normalization)?.flatten_from(1)?;
        for (i, layer) in self.layers.iter().enumerate() {
            if i > 0 {
                x = ops::relu(&x)?;
            }
            x = layer.forward(&x)?;
        }
        Ok(x)
    }
}

impl CandleModel for Mlp {
    fn loss(&self, batch: &TensorBatch) -> Result<Loss> {
        classification_loss(&self.logits(batch)?, batch)
    }

    fn predict(&self, batch: &TensorBatch) -> Result<Outputs> {
        Ok(Outputs::new().with("logits", self.logits(batch)?))
    }
}
