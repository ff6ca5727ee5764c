//! Activations: GELU, SiLU, SwiGLU, softmax, and simple functions of one number.

pub(crate) mod dispatch;
pub(crate) mod gelu;
mod pointwise;
pub(crate) mod scalar;
pub(crate) mod silu;
pub(crate) mod softmax;
