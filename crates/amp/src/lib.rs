//! Automatic mixed precision.

mod error;

pub use error::{Error, Result};
