//! Process groups: move numbers between the ranks of a training job.

mod error;
pub mod store;

pub use error::{Error, Result};
pub use store::{MemoryStore, PrefixStore, Store, TcpStore, TcpStoreServer};

/// A process's index within a group, `0..world_size`.
pub type Rank = usize;
