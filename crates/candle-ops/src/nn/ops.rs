//! candle-nn's functions of tensors, with correct gradients. Functions with `slow` in their name
//! are those that have a gradient in candle-nn; here all functions have one.

use candle_core::shape::Dim;
use candle_core::{D, ModuleT, Result, Tensor, bail};
pub use candle_nn::ops::{Identity, hard_sigmoid, selu};

use crate::SdpaOptions;
use crate::context::{self, Mode};
pub use crate::{
    layer_norm, layer_norm as layer_norm_slow, leaky_relu, mish, pixel_shuffle, pixel_unshuffle,
    rms_norm, rms_norm as rms_norm_slow, sigmoid, silu,
};

/// [`softmax`](crate::softmax) over a dimension.
///
/// # Errors
///
/// The errors of [`softmax`](crate::softmax); a dimension that the tensor does not have.
pub fn softmax<D: Dim>(xs: &Tensor, dim: D) -> Result<Tensor> {
    along(xs, dim, crate::softmax)
}

/// [`log_softmax`](crate::log_softmax) over a dimension.
///
/// # Errors
///
/// The errors of [`log_softmax`](crate::log_softmax); a dimension that the tensor does not have.
pub fn log_softmax<D: Dim>(xs: &Tensor, dim: D) -> Result<Tensor> {
    along(xs, dim, crate::log_softmax)
}

/// Applies an operator of the last dimension to another one.
fn along<D: Dim>(xs: &Tensor, dim: D, op: fn(&Tensor) -> Result<Tensor>) -> Result<Tensor> {
    let dim = dim.to_index(xs.shape(), "softmax")?;
    if dim + 1 == xs.rank() {
        return op(xs);
    }
    let last = xs.rank() - 1;
    op(&xs.transpose(dim, last)?)?.transpose(dim, last)?.contiguous()
}

/// [`pad`](crate::pad) of height and width by their first and last elements.
///
/// # Errors
///
/// The errors of [`pad`](crate::pad).
pub fn replication_pad2d(xs: &Tensor, pad: usize) -> Result<Tensor> {
    crate::pad(xs, &[(pad, pad), (pad, pad)], crate::PadMode::Replicate)
}

/// [`softmax`](crate::softmax) over the last dimension.
///
/// # Errors
///
/// The errors of [`softmax`](crate::softmax).
pub fn softmax_last_dim(xs: &Tensor) -> Result<Tensor> {
    crate::softmax(xs)
}

/// `silu` of the first half of the last dimension multiplied by the second half.
///
/// # Errors
///
/// The errors of [`swiglu`](crate::swiglu); an odd last dimension.
pub fn swiglu(xs: &Tensor) -> Result<Tensor> {
    let [gate, up] = &xs.chunk(2, D::Minus1)?[..] else {
        bail!("swiglu: an input of shape {:?} has no two halves", xs.shape());
    };
    crate::swiglu(gate, up)
}

/// [`scaled_dot_product_attention`](crate::scaled_dot_product_attention) with candle-nn's
/// arguments.
///
/// As in candle-nn, `do_causal` aligns the ends of queries and keys (query `i` of `t` attends to
/// keys up to `i + keys - t`, as with a key cache), and has no effect if there is a mask. The mask
/// may have any type and shape supported by [`SdpaOptions::mask`](SdpaOptions).
///
/// # Errors
///
/// The errors of [`scaled_dot_product_attention`](crate::scaled_dot_product_attention); a
/// `softcapping` other than 1, which means none.
pub fn sdpa(
    q: &Tensor,
    k: &Tensor,
    v: &Tensor,
    mask: Option<&Tensor>,
    do_causal: bool,
    scale: f32,
    softcapping: f32,
) -> Result<Tensor> {
    if softcapping != 1.0 {
        bail!("sdpa: softcapping {softcapping} is not supported; 1.0 is none");
    }
    let (queries, keys) = (q.dim(D::Minus2)?, k.dim(D::Minus2)?);
    let causal = do_causal && mask.is_none();
    let last_aligned = (causal && queries != keys).then(|| {
        let seen = (0..queries).flat_map(|i| (0..keys).map(move |key| key + queries <= i + keys));
        Tensor::from_iter(seen.map(u8::from), q.device())?.reshape((queries, keys))
    });
    let last_aligned = last_aligned.transpose()?;
    let options = SdpaOptions {
        mask: mask.or(last_aligned.as_ref()),
        causal: causal && queries == keys,
        scale: Some(scale.into()),
        dropout: 0.0,
    };
    crate::scaled_dot_product_attention(q, k, v, options)
}

/// [`dropout`](crate::dropout), in training.
///
/// # Errors
///
/// The errors of [`dropout`](crate::dropout); no context is entered.
pub fn dropout(xs: &Tensor, drop_p: f32) -> Result<Tensor> {
    if context::with(|context| context.mode) == Mode::Outside {
        bail!(
            "dropout: no context is entered: train within `Context::enter`, whose seed masks come from"
        );
    }
    crate::dropout(xs, drop_p)
}

/// Dropout in training, with the random numbers of the entered [`Context`](crate::Context).
#[derive(Clone, Debug)]
pub struct Dropout {
    drop_p: f32,
}

impl Dropout {
    /// A layer that drops elements with probability `drop_p`.
    pub const fn new(drop_p: f32) -> Self {
        Self { drop_p }
    }

    /// [`dropout`] if `train`, else `xs`. Within [`Context::evaluate`](crate::Context::evaluate)
    /// always `xs`.
    ///
    /// # Errors
    ///
    /// The errors of [`dropout`].
    pub fn forward(&self, xs: &Tensor, train: bool) -> Result<Tensor> {
        if train { dropout(xs, self.drop_p) } else { Ok(xs.clone()) }
    }
}

impl ModuleT for Dropout {
    fn forward_t(&self, xs: &Tensor, train: bool) -> Result<Tensor> {
        self.forward(xs, train)
    }
}
