//! Memory that ranks share: spans, copies between them, and buffers of a group; and a guard that
//! detects forks.

pub(crate) mod copy;
mod fork_guard;
mod shared_buf;
#[cfg(target_arch = "x86_64")]
pub(crate) mod simd_limit;
mod span;

pub(crate) use self::fork_guard::ForkGuard;
pub use self::shared_buf::{RawShared, SharedBuf};
pub(crate) use self::span::{Route, Span};
