//! Activations: GELU, SiLU, SwiGLU, softmax.

pub(crate) mod dispatch;
pub(crate) mod gelu;
mod pointwise;
pub(crate) mod silu;
pub(crate) mod softmax;
