//! [`ForkGuard`]: detects that this process is a fork of the one that made it.

#![expect(unsafe_code, reason = "a page that the kernel wipes in a forked child")]

use std::io;
use std::sync::atomic::{AtomicU32, Ordering};

use memmap2::{MmapMut, MmapRaw};
use rustix::mm::{Advice, madvise};
use rustix::param::page_size;

use crate::{Error, Result};

/// Detects forks by reading a byte of a page that the kernel wipes in a child process.
#[derive(Debug)]
pub(crate) struct ForkGuard {
    page: MmapRaw,
}

impl ForkGuard {
    pub(crate) fn new() -> Result<Self> {
        let fail = |error: &io::Error| Error::io("mapping a page that is wiped in a fork", error);
        let page = MmapRaw::from(MmapMut::map_anon(page_size()).map_err(|error| fail(&error))?);
        // SAFETY: advice on the page just mapped, whose contents it does not change in this
        // process.
        unsafe { madvise(page.as_mut_ptr().cast(), page.len(), Advice::LinuxWipeOnFork) }
            .map_err(|error| fail(&error.into()))?;
        let guard = Self { page };
        // Relaxed: one thread creates the guard, and a fork does not race with it.
        guard.mark().store(1, Ordering::Relaxed);
        Ok(guard)
    }

    /// Whether this process is a fork of the one that made the guard.
    #[inline]
    pub(crate) fn forked(&self) -> bool {
        self.mark().load(Ordering::Relaxed) == 0
    }

    #[inline]
    fn mark(&self) -> &AtomicU32 {
        // SAFETY: mapped while `self` lives, aligned to a page, and only used as an atomic.
        unsafe { AtomicU32::from_ptr(self.page.as_mut_ptr().cast()) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_fork_is_detected() {
        let guard = ForkGuard::new().unwrap();
        assert!(!guard.forked());
        // SAFETY: the child only reads a byte and exits.
        let child = unsafe { libc::fork() };
        if child == 0 {
            let code = if guard.forked() { 0 } else { 1 };
            // SAFETY: ends the child without running the parent's destructors.
            unsafe { libc::_exit(code) };
        }
        let mut status = 0;
        // SAFETY: waits for our own child.
        unsafe { libc::waitpid(child, &raw mut status, 0) };
        assert_eq!(status, 0);
    }
}
