//! Image operators: pooling and upsampling.

mod dispatch;
pub(crate) mod pool;
pub(crate) mod upsample;
