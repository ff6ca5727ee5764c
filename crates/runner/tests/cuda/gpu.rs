//! Lock of the GPU of a process: capture of a CUDA graph needs exclusive use.

use parking_lot::{RwLock, RwLockReadGuard, RwLockWriteGuard};

static GPU: RwLock<()> = RwLock::new(());

/// Locks the GPU for a test that captures nothing.
pub(crate) fn shared() -> RwLockReadGuard<'static, ()> {
    GPU.read()
}

/// Locks the GPU exclusively.
pub(crate) fn alone() -> RwLockWriteGuard<'static, ()> {
    GPU.write()
}
