//! Activations: GELU, SiLU, SwiGLU, softmax, and simple functions of one number.

pub(crate) mod dispatch;
pub(crate) mod gelu;
pub(crate) mod log_softmax;
mod pointwise;
pub(crate) mod scalar;
pub(crate) mod silu;
pub(crate) mod softmax;
