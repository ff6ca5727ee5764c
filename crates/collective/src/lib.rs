//! Process groups: move numbers between the ranks of a training job.

mod error;

pub use error::{Error, Result};

/// A process's index within a group, `0..world_size`.
pub type Rank = usize;
