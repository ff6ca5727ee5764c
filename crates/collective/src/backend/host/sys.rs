//! Linux system calls: unnamed shared memory, futexes, memory barriers, pidfds, and a page that is wiped
//! in a forked child.

#![expect(unsafe_code, reason = "system calls and memory mappings")]

use std::ffi::CStr;
use std::fs::File;
use std::io;
use std::os::fd::OwnedFd;
use std::ptr::{NonNull, null_mut};
use std::sync::atomic::AtomicU32 as Mark;
use std::time::Duration;

use rustix::event::{PollFd, PollFlags};
use rustix::fs::{FallocateFlags, MemfdFlags, SealFlags, fcntl_add_seals, fcntl_get_seals};
use rustix::io::Errno;
use rustix::mm::{Advice, MapFlags, ProtFlags, madvise, mmap, mmap_anonymous, munmap};
use rustix::param::page_size;
use rustix::process::{DumpableBehavior, Pid, PidfdFlags};
#[cfg(not(loom))]
use rustix::thread::futex;
use rustix::thread::{MembarrierCommand, membarrier};

#[cfg(loom)]
use super::model::Words;
use crate::backend::tcp::sys::poll;
#[cfg(not(loom))]
use crate::backend::tcp::sys::timespec;
use crate::span::Span;
#[cfg(not(loom))]
use crate::sync::atomic::AtomicU64;
use crate::sync::atomic::{AtomicU32, Ordering};
use crate::{Error, Result};

/// Seals that prevent truncation of a mapped file, which would cause a SIGBUS.
const SEALS: SealFlags = SealFlags::SHRINK.union(SealFlags::GROW).union(SealFlags::SEAL);

/// Access to all mappings.
const ACCESS: ProtFlags = ProtFlags::READ.union(ProtFlags::WRITE);

/// Creates an unnamed memory file of `bytes` zeros with a fixed size.
///
/// Reserves memory for the first `reserved` bytes now, so that running out of memory is an error here and
/// not a signal later; [`Mapping::reserve`] reserves the others before they are used. Beyond the limit of
/// a control group the kernel kills the process nevertheless: see [`cgroup`](super::cgroup).
pub(in crate::backend) fn memfd(name: &CStr, bytes: usize, reserved: usize) -> Result<OwnedFd> {
    let create = || -> io::Result<OwnedFd> {
        let file = rustix::fs::memfd_create(name, MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING)?;
        rustix::fs::ftruncate(&file, bytes as u64)?;
        allocate(&file, 0, reserved)?;
        fcntl_add_seals(&file, SEALS)?;
        Ok(file)
    };
    create()
        .map_err(|error| Error::io(format!("allocating {bytes} bytes of shared memory"), &error))
}

/// Reserves memory for a range of a file, which keeps its contents.
fn allocate(file: &OwnedFd, offset: usize, len: usize) -> io::Result<()> {
    if len > 0 {
        let (offset, len) = (offset as u64, len as u64);
        rustix::io::retry_on_intr(|| {
            rustix::fs::fallocate(file, FallocateFlags::empty(), offset, len)
        })?;
    }
    Ok(())
}

/// Whether a peer's file has exactly this size and cannot shrink.
fn is_sealed(file: &File, bytes: usize) -> bool {
    let keeps = fcntl_get_seals(file).is_ok_and(|seals| seals.contains(SealFlags::SHRINK));
    keeps && file.metadata().is_ok_and(|meta| meta.len() == bytes as u64)
}

/// Error for a peer's file that is not what this rank expects.
pub(super) fn wrong_file(what: &str) -> Error {
    let text =
        "it has another size or layout, or is not sealed; all ranks must run the same version";
    Error::io(format!("mapping {what}"), &io::Error::new(io::ErrorKind::InvalidData, text))
}

/// A shared mapping of a whole file, unmapped on drop.
#[derive(Debug)]
pub(in crate::backend) struct Mapping {
    base: NonNull<u8>,
    len: usize,
    file: OwnedFd,
    /// Used by loom models instead of the words in memory.
    #[cfg(loom)]
    pub(super) words: std::sync::Arc<Words>,
}

// SAFETY: a mapping is plain memory of the process. It returns atomics, which may be shared, and
// `Span`s, whose creators justify each use.
unsafe impl Send for Mapping {}
// SAFETY: as for `Send`.
unsafe impl Sync for Mapping {}

impl Mapping {
    /// Maps a file that a peer created, which must have exactly `len` bytes and keep them. `what` names
    /// it in the error.
    pub(in crate::backend) fn of_peer(file: File, len: usize, what: &str) -> Result<Self> {
        if !is_sealed(&file, len) {
            return Err(wrong_file(what));
        }
        Self::new(file.into(), len)
    }

    /// Maps the first `len` bytes, which the file must have and keep ([`is_sealed`]).
    pub(in crate::backend) fn new(file: OwnedFd, len: usize) -> Result<Self> {
        // SAFETY: requests a new mapping at an address of the kernel's choice.
        let base = unsafe { mmap(null_mut(), len, ACCESS, MapFlags::SHARED, &file, 0) };
        let base = base.map_err(|error| {
            Error::io(format!("mapping {len} bytes of shared memory"), &error.into())
        })?;
        Ok(Self {
            base: NonNull::new(base.cast()).expect("mappings are not at null"),
            len,
            file,
            #[cfg(loom)]
            words: Words::new(len),
        })
    }

    /// Another mapping of the same file, with the same words.
    #[cfg(loom)]
    pub(super) fn again(&self) -> Result<Self> {
        let file = self.file.try_clone().map_err(|error| Error::io("sharing a file", &error))?;
        let mut again = Self::new(file, self.len)?;
        again.words = std::sync::Arc::clone(&self.words);
        Ok(again)
    }

    pub(super) fn ptr(&self) -> NonNull<u8> {
        self.base
    }

    /// Reserves memory for a range, on this processor's NUMA node unless it is reserved already. Keeps its
    /// contents.
    pub(in crate::backend) fn reserve(&self, offset: usize, len: usize) -> Result<()> {
        assert!(offset + len <= self.len, "bytes of the mapping");
        let page = page_size();
        let first = offset / page * page;
        let at = self.base.as_ptr().wrapping_add(first).cast();
        // SAFETY: pages of our own mapping, whose contents do not change.
        let populated = unsafe { madvise(at, offset + len - first, Advice::LinuxPopulateWrite) };
        if populated.is_ok() {
            return Ok(());
        }
        // Needed before Linux 5.14; on later kernels it returns a more precise error.
        allocate(&self.file, offset, len)
            .map_err(|error| Error::io(format!("allocating {len} bytes of shared memory"), &error))
    }

    /// Advises the kernel to use huge pages, if they are enabled for shared memory (`shmem_enabled`).
    pub(super) fn ask_for_huge_pages(&self) {
        // SAFETY: advice on our own mapping. A failure changes nothing.
        let _ = unsafe { madvise(self.base.as_ptr().cast(), self.len, Advice::LinuxHugepage) };
    }

    /// The word at a byte offset.
    #[cfg(not(loom))]
    pub(in crate::backend) fn word(&self, offset: usize) -> &AtomicU64 {
        assert!(offset.is_multiple_of(8) && offset + 8 <= self.len, "a word of the segment");
        // SAFETY: in bounds by the assertion above.
        let ptr = unsafe { self.base.add(offset) };
        // SAFETY: mapped while `self` lives, aligned (the mapping starts at a page), and only used
        // as an atomic: the layout keeps words and data apart.
        unsafe { ptr.cast::<AtomicU64>().as_ref() }
    }

    /// `N` consecutive words from a byte offset on.
    #[cfg(not(loom))]
    pub(super) fn words<const N: usize>(&self, offset: usize) -> [&AtomicU64; N] {
        assert!(offset.is_multiple_of(8) && offset + 8 * N <= self.len, "words of the segment");
        std::array::from_fn(|i| {
            // SAFETY: in bounds by the assertion above.
            let ptr = unsafe { self.base.add(offset + 8 * i) };
            // SAFETY: as in `word`.
            unsafe { ptr.cast::<AtomicU64>().as_ref() }
        })
    }

    /// The 32-bit word at a byte offset, for a futex.
    #[cfg(not(loom))]
    pub(super) fn half_word(&self, offset: usize) -> &AtomicU32 {
        assert!(offset.is_multiple_of(4) && offset + 4 <= self.len, "a half word of the segment");
        // SAFETY: in bounds by the assertion above.
        let ptr = unsafe { self.base.add(offset) };
        // SAFETY: as in `word`.
        unsafe { ptr.cast::<AtomicU32>().as_ref() }
    }

    /// The `len` bytes at a byte offset, which must lie in one of the layout's data areas.
    pub(super) fn data(&self, offset: usize, len: usize) -> Span<'_> {
        // SAFETY: the mapping lives as long as the borrow of `self`. No reference to its data areas is
        // ever created, except to a shared buffer's own part, which the buffer's user lends to the
        // operation. The algorithms' protocol orders accesses of different ranks.
        let whole = unsafe { Span::new(self.base.as_ptr(), self.len) };
        whole.part(offset, len)
    }

    /// Replaces the pages of the `len` bytes at `offset` by private copies, so that later writes of peers
    /// are not seen here.
    pub(super) fn detach(&self, offset: usize, len: usize) {
        let bytes = self.data(offset, len);
        if len == 0 {
            return;
        }
        let (page, end) = (page_size(), offset + len);
        let first = offset / page * page;
        let at = self.base.as_ptr().wrapping_add(first).cast();
        let kind = MapFlags::PRIVATE | MapFlags::FIXED;
        // SAFETY: replaces pages of our own mapping, which `data` has checked, by private ones with the
        // same contents.
        let new = unsafe { mmap(at, end - first, ACCESS, kind, &self.file, first as u64) };
        if new.is_err() {
            // Continuing would return a `&mut` to memory that other processes write to.
            std::process::abort();
        }
        // A private page shows the file's contents until it is first written.
        for start in (first..end).step_by(page) {
            let byte = bytes.part(start.max(offset) - offset, 1);
            // SAFETY: inside the mapping; the operation that calls this owns these bytes.
            let kept = unsafe { byte.ptr().read_volatile() };
            // SAFETY: as above. Volatile, because the write matters, not the value.
            unsafe { byte.ptr().write_volatile(kept) };
        }
    }
}

impl Drop for Mapping {
    fn drop(&mut self) {
        // SAFETY: our own mapping, and no borrow of it is left. It fails only for an invalid range.
        let _ = unsafe { munmap(self.base.as_ptr().cast(), self.len) };
    }
}

#[cfg(loom)]
pub(super) use super::model::{futex_wait, futex_wake};

/// Sleeps until the word is woken, `tick` has passed or a signal arrives; returns at once if the word is
/// not `value`.
#[cfg(not(loom))]
pub(super) fn futex_wait(word: &AtomicU32, value: u32, tick: Duration) {
    let tick = timespec(tick);
    // Not `PRIVATE`: other processes wake it. The caller checks the word, whatever ended the wait.
    let _ = futex::wait(word, futex::Flags::empty(), value, Some(&tick));
}

/// Wakes all threads that sleep on the word.
#[cfg(not(loom))]
pub(super) fn futex_wake(word: &AtomicU32) {
    // Fails only for an invalid address.
    let _ = futex::wake(word, futex::Flags::empty(), i32::MAX.cast_unsigned());
}

/// Registers this process for other processes' [`global_membarrier`]; returns whether the kernel has it.
pub(super) fn register_for_membarrier() -> bool {
    membarrier(MembarrierCommand::RegisterGlobalExpedited).is_ok()
}

/// Issues a memory barrier on this thread and on every running thread of every registered process;
/// returns whether the kernel has it.
pub(super) fn global_membarrier() -> bool {
    membarrier(MembarrierCommand::GlobalExpedited).is_ok()
}

/// Sets the calling thread's scheduler slice. With a short one it runs soon after it wakes, and yields to
/// threads with longer slices afterwards. Has no effect before Linux 6.12.
pub(super) fn prefer_short_slices(slice: Duration) {
    // linux/sched/types.h, `struct sched_attr`: size and policy, flags, nice and priority, runtime,
    // deadline, period.
    let mut attr = [0_u64; 6];
    let size = size_of_val(&attr);
    // SAFETY: `attr` has `size` bytes. If this call fails, so does the next one.
    unsafe { libc::syscall(libc::SYS_sched_getattr, 0, attr.as_mut_ptr(), size, 0) };
    attr[3] = u64::try_from(slice.as_nanos()).unwrap_or(u64::MAX);
    // SAFETY: `attr` has the size in its first field, and is only read. A failure changes nothing.
    unsafe { libc::syscall(libc::SYS_sched_setattr, 0, attr.as_ptr(), 0) };
}

/// Opens a descriptor that becomes readable when the process ends.
pub(super) fn pidfd_open(pid: u32) -> rustix::io::Result<OwnedFd> {
    let pid = Pid::from_raw(pid.cast_signed()).ok_or(Errno::SRCH)?;
    rustix::process::pidfd_open(pid, PidfdFlags::empty())
}

/// Waits until one of `fds` is readable or `timeout` has passed, and returns which are. `None` waits
/// forever; one of `fds` must then be able to end the wait.
pub(super) fn poll_readable(fds: &[&OwnedFd], timeout: Option<Duration>) -> io::Result<Vec<bool>> {
    let mut polls: Vec<_> = fds.iter().map(|fd| PollFd::new(fd, PollFlags::IN)).collect();
    poll(&mut polls, timeout)?;
    Ok(polls.iter().map(|poll| !poll.revents().is_empty()).collect())
}

/// Whether other processes of the same user may open this process's memory.
pub(crate) fn is_dumpable() -> bool {
    rustix::process::dumpable_behavior() == Ok(DumpableBehavior::Dumpable)
}

/// Detects forks by reading a byte of a page that the kernel wipes in a child process.
#[derive(Debug)]
pub(in crate::backend) struct ForkGuard {
    page: Page,
}

#[derive(Debug)]
struct Page(NonNull<Mark>);

// SAFETY: the page holds one atomic, which may be shared.
unsafe impl Send for Page {}
// SAFETY: as for `Send`.
unsafe impl Sync for Page {}

const PAGE: usize = 4096;

impl ForkGuard {
    pub(in crate::backend) fn new() -> Result<Self> {
        let fail =
            |error: Errno| Error::io("mapping a page that is wiped in a fork", &error.into());
        // SAFETY: requests a new mapping at an address of the kernel's choice.
        let base = unsafe { mmap_anonymous(null_mut(), PAGE, ACCESS, MapFlags::PRIVATE) };
        let base = base.map_err(fail)?;
        let page = Page(NonNull::new(base.cast()).expect("mappings are not at null"));
        // SAFETY: advice on the page just mapped.
        unsafe { madvise(base, PAGE, Advice::LinuxWipeOnFork) }.map_err(fail)?;
        let guard = Self { page };
        // Relaxed: one thread creates the guard, and a fork does not race with it.
        guard.mark().store(1, Ordering::Relaxed);
        Ok(guard)
    }

    /// Whether this process is a fork of the one that made the guard.
    pub(in crate::backend) fn forked(&self) -> bool {
        self.mark().load(Ordering::Relaxed) == 0
    }

    fn mark(&self) -> &Mark {
        // SAFETY: mapped while `self` lives, aligned to a page, zeroed or one.
        unsafe { self.page.0.as_ref() }
    }
}

impl Drop for Page {
    fn drop(&mut self) {
        // SAFETY: our own mapping, and no borrow of it is left.
        let _ = unsafe { munmap(self.0.as_ptr().cast(), PAGE) };
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn detached_bytes_no_longer_see_writes_of_another_mapping() {
        let page = page_size();
        let file = memfd(c"test", 4 * page, 4 * page).unwrap();
        let map = |file| Mapping::new(file, 4 * page).unwrap();
        let (one, two) = (map(file.try_clone().unwrap()), map(file));
        // From the last word of the first page to the first of the third.
        let (before, from, to) = (page - 16, page - 8, 2 * page + 8);
        let words = [before, from, page, 2 * page, to, 3 * page];
        let set = |value| words.iter().for_each(|&at| one.word(at).store(value, Ordering::SeqCst));
        let get = |at| two.word(at).load(Ordering::SeqCst);
        set(7);
        assert_eq!(words.map(get), [7; 6]);
        two.detach(from, to - from);
        set(8);
        assert_eq!(words.map(get), [7, 7, 7, 7, 7, 8]);
    }

    #[test]
    fn a_memory_file_cannot_shrink() {
        let file = File::from(memfd(c"test", PAGE, 0).unwrap());
        assert!(is_sealed(&file, PAGE));
        assert!(!is_sealed(&file, 2 * PAGE));
        assert!(file.set_len(0).is_err());
    }

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

    #[test]
    fn a_futex_wait_for_another_value_returns_at_once() {
        let word = AtomicU32::new(1);
        futex_wait(&word, 0, Duration::from_secs(60));
        futex_wake(&word);
    }
}
