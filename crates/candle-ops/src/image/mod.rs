//! Image operators: pooling and upsampling.

pub(crate) mod avg_pool;
mod dispatch;
pub(crate) mod pool;
pub(crate) mod upsample;
