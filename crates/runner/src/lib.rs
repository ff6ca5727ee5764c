//! The training loop: config, registries, hooks, mixed precision, data parallelism, launcher,
//! resume.

pub mod data;
pub mod engine;
mod error;
pub mod launch;
#[cfg(feature = "candle")]
pub mod zoo;

pub use error::{Error, Result};
