//! Integration tests of `fused-optim`, one module per subject.

#![expect(clippy::unwrap_used, reason = "a test")]

#[cfg(feature = "candle")]
mod candle;
mod clip;
mod common;
mod elementwise;
mod hyper;
mod large;
mod names;
#[cfg(feature = "npu")]
mod npu;
mod parity;
mod props;
mod torch;
