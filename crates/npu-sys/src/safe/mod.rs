//! CANN in safe Rust: contexts, memory, streams, events.
//!
//! AscendCL has a current context per thread, and what belongs to another context is refused or worse.
//! Every handle here remembers its context, makes it current for as long as a call lasts, also when it
//! is dropped, and puts back what was current before; threads need not know.
//!
//! Work in a stream is done later. What it uses is held by the stream until the stream has been
//! synchronised, so nothing can be freed under it. Memory of devices is only reached through copies: no
//! reference into it exists, hence two streams that race spoil numbers, never Rust.

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
pub use operators::Operators;
pub use steps::{AdamWNumbers, AdamWTensors, SgdNumbers};
pub use stream::{Kept, Stream};
pub use view::View;

use crate::{Error, Result};

/// Logs nothing and unwinds nothing: what fails while a handle is dropped cannot be told to anybody.
fn dropped(result: Result<()>) {
    drop(result);
}

fn argument<T>(what: impl Into<String>) -> Result<T> {
    Err(Error::Argument { what: what.into() })
}
