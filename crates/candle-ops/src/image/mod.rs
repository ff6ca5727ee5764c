//! Image operators: pooling and upsampling.

mod composed;
pub(crate) mod pool;
pub(crate) mod upsample;
