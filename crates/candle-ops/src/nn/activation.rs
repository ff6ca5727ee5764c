//! Activation functions by name, for configurations of models.

use candle_core::{Module, Result, Tensor};
pub use candle_nn::activation::{PReLU, prelu};
use serde::{Deserialize, Serialize};

use super::ops;

/// An activation function, with candle-nn's names and spellings in configurations.
#[derive(Clone, Copy, Debug, Default, PartialEq, Deserialize, Serialize)]
#[serde(rename_all = "lowercase")]
#[expect(missing_docs, reason = "the names are the field's")]
#[non_exhaustive]
pub enum Activation {
    #[default]
    Gelu,
    #[serde(alias = "gelu_new")]
    NewGelu,
    Relu,
    Relu2,
    Relu6,
    Silu,
    Sigmoid,
    HardSigmoid,
    Swiglu,
    Swish,
    Mish,
    HardSwish,
    Elu(f64),
    LeakyRelu(f64),
    #[serde(alias = "gelu_pytorch_tanh")]
    GeluPytorchTanh,
}

impl Module for Activation {
    fn forward(&self, xs: &Tensor) -> Result<Tensor> {
        match *self {
            Self::Gelu => crate::gelu(xs),
            Self::NewGelu | Self::GeluPytorchTanh => crate::gelu_tanh(xs),
            Self::Relu => crate::relu(xs),
            Self::Relu2 => crate::relu(xs)?.sqr(),
            Self::Relu6 => crate::relu6(xs),
            Self::Silu | Self::Swish => ops::silu(xs),
            Self::Sigmoid => ops::sigmoid(xs),
            Self::HardSigmoid => ops::hard_sigmoid(xs),
            Self::Swiglu => ops::swiglu(xs),
            Self::HardSwish => crate::hard_swish(xs),
            Self::Mish => ops::mish(xs),
            Self::Elu(alpha) => crate::elu(xs, alpha),
            Self::LeakyRelu(negative_slope) => ops::leaky_relu(xs, negative_slope),
        }
    }
}
