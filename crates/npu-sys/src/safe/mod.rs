//! Safe handles for CANN: contexts, memory, streams, events, operators.
//!
//! AscendCL has a current context per thread, and handles must be used in their own context. Every
//! handle here makes its context current during a call, also when it is dropped, and restores the
//! previous one, so it may be used from any thread.
//!
//! Work on a stream is asynchronous. The stream keeps the memory that the work uses alive until it
//! has been synchronized. Device memory is accessed only by copies, never by Rust references, so a
//! race between two streams can give wrong numbers, but no undefined behavior in Rust.

mod context;
mod event;
mod memory;
mod objects;
mod operators;
mod steps;
mod stream;
mod view;

pub use context::{Context, Entered};
pub use event::Event;
pub use memory::Buffer;
pub use objects::{Number, Tensor};
pub use operators::Operators;
pub use steps::{AdamWNumbers, AdamWTensors, SgdNumbers};
pub use stream::{KeepAlive, Stream};
pub use view::View;

use crate::{Error, Result};

/// Ignores an error in `drop`, which cannot return it.
fn dropped(result: Result<()>) {
    drop(result);
}

fn argument<T>(what: impl Into<String>) -> Result<T> {
    Err(Error::Argument { what: what.into() })
}
