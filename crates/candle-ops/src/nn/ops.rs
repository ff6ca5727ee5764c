//! candle-nn's functions of tensors, with right gradients. Its `slow` ones are those that have a gradient there; here all
//! do.

use candle_core::shape::Dim;
use candle_core::{D, ModuleT, Result, Tensor, bail};
pub use candle_nn::ops::{
    Identity, hard_sigmoid, leaky_relu, log_softmax, mish, pixel_shuffle, pixel_unshuffle,
    replication_pad2d, selu, sigmoid,
};

use crate::context::{self, Mode};
pub use crate::{
    layer_norm, layer_norm as layer_norm_slow, rms_norm, rms_norm as rms_norm_slow, silu,
};

/// [`softmax`](crate::softmax) over a dimension.
///
/// # Errors
///
/// As [`softmax`](crate::softmax); a dimension that the tensor does not have.
pub fn softmax<D: Dim>(xs: &Tensor, dim: D) -> Result<Tensor> {
    let dim = dim.to_index(xs.shape(), "softmax")?;
    if dim + 1 == xs.rank() {
        return crate::softmax(xs);
    }
    let last = xs.rank() - 1;
    crate::softmax(&xs.transpose(dim, last)?)?.transpose(dim, last)?.contiguous()
}

/// [`softmax`](crate::softmax) over the last dimension.
///
/// # Errors
///
/// As [`softmax`](crate::softmax).
pub fn softmax_last_dim(xs: &Tensor) -> Result<Tensor> {
    crate::softmax(xs)
}

/// `silu` of the first half of the last dimension times the second half.
///
/// # Errors
///
/// As [`swiglu`](crate::swiglu); an odd last dimension.
pub fn swiglu(xs: &Tensor) -> Result<Tensor> {
    let [gate, up] = &xs.chunk(2, D::Minus1)?[..] else {
        bail!("swiglu: an input of shape {:?} has no two halves", xs.shape());
    };
    crate::swiglu(gate, up)
}

/// [`dropout`](crate::dropout), in training.
///
/// # Errors
///
/// As [`dropout`](crate::dropout); no context is entered.
pub fn dropout(xs: &Tensor, drop_p: f32) -> Result<Tensor> {
    if context::with(|context| context.mode) == Mode::Outside {
        bail!(
            "dropout: no context is entered: train within `Context::enter`, whose seed masks come from"
        );
    }
    crate::dropout(xs, drop_p)
}

/// Dropout in training. It draws from the entered [`Context`](crate::Context).
#[derive(Clone, Debug)]
pub struct Dropout {
    drop_p: f32,
}

impl Dropout {
    /// A layer that drops elements with probability `drop_p`.
    pub const fn new(drop_p: f32) -> Self {
        Self { drop_p }
    }

    /// [`dropout`] if `train`, else `xs`. Within [`Context::evaluate`](crate::Context::evaluate) it is `xs` either way.
    ///
    /// # Errors
    ///
    /// As [`dropout`].
    pub fn forward(&self, xs: &Tensor, train: bool) -> Result<Tensor> {
        if train { dropout(xs, self.drop_p) } else { Ok(xs.clone()) }
    }
}

impl ModuleT for Dropout {
    fn forward_t(&self, xs: &Tensor, train: bool) -> Result<Tensor> {
        self.forward(xs, train)
    }
}
