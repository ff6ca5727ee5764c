//! The training loop: config, registries, hooks, mixed precision, data parallelism, launcher,
//! resume.

pub mod data;
pub mod engine;
mod error;
pub mod launch;

pub use error::{Error, Result};
