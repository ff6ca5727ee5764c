//! The GPU of a process: a capture of a CUDA graph must have it alone.

use parking_lot::{RwLock, RwLockReadGuard, RwLockWriteGuard};

static GPU: RwLock<()> = RwLock::new(());

/// The GPU, for a test that captures nothing.
pub(crate) fn shared() -> RwLockReadGuard<'static, ()> {
    GPU.read()
}

/// The GPU, for one test alone.
pub(crate) fn alone() -> RwLockWriteGuard<'static, ()> {
    GPU.write()
}
