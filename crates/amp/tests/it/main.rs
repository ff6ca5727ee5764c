//! Integration tests of `amp`, one module for each subject.

#![expect(clippy::unwrap_used, reason = "a test")]

mod autocast;
mod casts;
mod common;
mod grad_scaler;
#[cfg(feature = "npu")]
mod npu;
mod scaler;
mod twin;
