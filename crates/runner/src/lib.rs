//! The training loop: config, registries, hooks, mixed precision, data parallelism, launcher,
//! resume.

pub mod data;
pub mod engine;
mod error;
#[cfg(feature = "candle")]
pub mod zoo;

pub use error::{Error, Result};
