//! Linux system calls: unnamed shared memory, futexes, memory barriers, pidfds, and a page that is wiped
//! in a forked child.

#![expect(unsafe_code, reason = "system calls and memory mappings")]

use std::ffi::CStr;
use std::fs::File;
use std::io;
use std::os::fd::{AsFd, AsRawFd, FromRawFd, OwnedFd};
use std::ptr::NonNull;
use std::sync::atomic::AtomicU32 as Mark;
use std::time::Duration;

#[cfg(loom)]
use super::model::Words;
use crate::backend::tcp::sys::{interest, poll};
use crate::span::Span;
#[cfg(not(loom))]
use crate::sync::atomic::AtomicU64;
use crate::sync::atomic::{AtomicU32, Ordering};
use crate::{Error, Result};

/// Seals that prevent truncation of a mapped file, which would cause a SIGBUS.
const SEALS: libc::c_int = libc::F_SEAL_SHRINK | libc::F_SEAL_GROW | libc::F_SEAL_SEAL;

// linux/membarrier.h, since Linux 4.16.
const MEMBARRIER_GLOBAL_EXPEDITED: libc::c_int = 1 << 1;
const MEMBARRIER_REGISTER_GLOBAL_EXPEDITED: libc::c_int = 1 << 2;

/// Creates an unnamed memory file of `bytes` zeros with a fixed size.
///
/// Reserves memory for the first `reserved` bytes now, so that running out of memory is an error here and
/// not a signal later; [`Mapping::reserve`] reserves the others before they are used. Beyond the limit of
/// a control group the kernel kills the process nevertheless: see [`cgroup`](super::cgroup).
pub(in crate::backend) fn memfd(name: &CStr, bytes: usize, reserved: usize) -> Result<OwnedFd> {
    let fail = || Error::io(format!("allocating {bytes} bytes of shared memory"), &last_error());
    // SAFETY: `name` is a C string, and the flags are valid for this call.
    let raw =
        unsafe { libc::memfd_create(name.as_ptr(), libc::MFD_CLOEXEC | libc::MFD_ALLOW_SEALING) };
    if raw < 0 {
        return Err(fail());
    }
    // SAFETY: `memfd_create` just created it, and nothing else owns it.
    let fd = unsafe { OwnedFd::from_raw_fd(raw) };
    let len = libc::off_t::try_from(bytes).map_err(|_| fail())?;
    // SAFETY: a system call on a descriptor we own.
    if unsafe { libc::ftruncate(raw, len) } != 0 {
        return Err(fail());
    }
    allocate(&fd, 0, reserved).map_err(|_| fail())?;
    // SAFETY: a system call on a descriptor we own.
    if unsafe { libc::fcntl(raw, libc::F_ADD_SEALS, SEALS) } != 0 {
        return Err(fail());
    }
    Ok(fd)
}

/// Reserves memory for a range of a file, which keeps its contents.
fn allocate(file: &OwnedFd, offset: usize, len: usize) -> io::Result<()> {
    if len == 0 {
        return Ok(());
    }
    let too_much = || io::Error::from(io::ErrorKind::FileTooLarge);
    let offset = libc::off_t::try_from(offset).map_err(|_| too_much())?;
    let len = libc::off_t::try_from(len).map_err(|_| too_much())?;
    // SAFETY: a system call on a descriptor that `file` owns.
    while unsafe { libc::fallocate(file.as_raw_fd(), 0, offset, len) } != 0 {
        let error = last_error();
        if error.kind() != io::ErrorKind::Interrupted {
            return Err(error);
        }
    }
    Ok(())
}

/// Whether a peer's file has exactly this size and cannot shrink.
fn is_sealed(file: &File, bytes: usize) -> bool {
    // SAFETY: a system call on a descriptor that `file` owns.
    let seals = unsafe { libc::fcntl(file.as_raw_fd(), libc::F_GET_SEALS) };
    let keeps = seals >= 0 && seals & libc::F_SEAL_SHRINK != 0;
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
        let (access, raw) = (libc::PROT_READ | libc::PROT_WRITE, file.as_raw_fd());
        // SAFETY: requests a new mapping at an address of the kernel's choice.
        let base =
            unsafe { libc::mmap(std::ptr::null_mut(), len, access, libc::MAP_SHARED, raw, 0) };
        let base = NonNull::new(base).filter(|base| base.as_ptr() != libc::MAP_FAILED);
        let base = base.ok_or_else(|| {
            Error::io(format!("mapping {len} bytes of shared memory"), &last_error())
        })?;
        Ok(Self {
            base: base.cast(),
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
        if unsafe { libc::madvise(at, offset + len - first, libc::MADV_POPULATE_WRITE) } == 0 {
            return Ok(());
        }
        // Needed before Linux 5.14; on later kernels it returns a more precise error.
        allocate(&self.file, offset, len)
            .map_err(|error| Error::io(format!("allocating {len} bytes of shared memory"), &error))
    }

    /// Advises the kernel to use huge pages, if they are enabled for shared memory (`shmem_enabled`).
    pub(super) fn ask_for_huge_pages(&self) {
        // SAFETY: advice on our own mapping.
        unsafe { libc::madvise(self.base.as_ptr().cast(), self.len, libc::MADV_HUGEPAGE) };
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
        let access = libc::PROT_READ | libc::PROT_WRITE;
        let kind = libc::MAP_PRIVATE | libc::MAP_FIXED;
        let raw = self.file.as_raw_fd();
        let new = libc::off_t::try_from(first).map_or(libc::MAP_FAILED, |from| {
            // SAFETY: replaces pages of our own mapping, which `data` has checked, by private ones
            // with the same contents.
            unsafe { libc::mmap(at, end - first, access, kind, raw, from) }
        });
        if new == libc::MAP_FAILED {
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
        unsafe { libc::munmap(self.base.as_ptr().cast(), self.len) };
    }
}

#[cfg(loom)]
pub(super) use super::model::{futex_wait, futex_wake};

/// Sleeps until the word is woken, `tick` has passed or a signal arrives; returns at once if the word is
/// not `value`.
#[cfg(not(loom))]
pub(super) fn futex_wait(word: &AtomicU32, value: u32, tick: Duration) {
    let timeout = libc::timespec {
        tv_sec: tick.as_secs().try_into().unwrap_or(libc::time_t::MAX),
        tv_nsec: tick.subsec_nanos().into(),
    };
    let timeout: *const libc::timespec = &raw const timeout;
    // SAFETY: both pointers are valid during the call. Not FUTEX_PRIVATE: other processes wake it.
    unsafe { libc::syscall(libc::SYS_futex, word.as_ptr(), libc::FUTEX_WAIT, value, timeout) };
}

/// Wakes all threads that sleep on the word.
#[cfg(not(loom))]
pub(super) fn futex_wake(word: &AtomicU32) {
    // SAFETY: the pointer is valid during the call.
    unsafe { libc::syscall(libc::SYS_futex, word.as_ptr(), libc::FUTEX_WAKE, libc::c_int::MAX) };
}

/// Registers this process for other processes' [`global_membarrier`]; returns whether the kernel has it.
pub(super) fn register_for_membarrier() -> bool {
    membarrier(MEMBARRIER_REGISTER_GLOBAL_EXPEDITED)
}

/// Issues a memory barrier on this thread and on every running thread of every registered process;
/// returns whether the kernel has it.
pub(super) fn global_membarrier() -> bool {
    membarrier(MEMBARRIER_GLOBAL_EXPEDITED)
}

fn membarrier(command: libc::c_int) -> bool {
    // SAFETY: a system call with plain numbers.
    unsafe { libc::syscall(libc::SYS_membarrier, command, 0, 0) == 0 }
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
pub(super) fn pidfd_open(pid: u32) -> io::Result<OwnedFd> {
    // SAFETY: a system call with plain numbers. The kernel sets close-on-exec on pidfds.
    let raw = unsafe { libc::syscall(libc::SYS_pidfd_open, libc::c_long::from(pid), 0) };
    let raw = libc::c_int::try_from(raw).expect("descriptors are ints");
    if raw < 0 {
        return Err(last_error());
    }
    // SAFETY: the kernel just created it, and nothing else owns it.
    Ok(unsafe { OwnedFd::from_raw_fd(raw) })
}

/// Waits until one of `fds` is readable or `timeout` has passed, and returns which are. `None` waits
/// forever; one of `fds` must then be able to end the wait.
pub(super) fn poll_readable(fds: &[&OwnedFd], timeout: Option<Duration>) -> io::Result<Vec<bool>> {
    let mut polls: Vec<_> = fds.iter().map(|fd| interest(fd.as_fd(), true, false)).collect();
    poll(&mut polls, timeout)?;
    Ok(polls.iter().map(|poll| poll.revents != 0).collect())
}

/// Page size in bytes.
pub(super) fn page_size() -> usize {
    // SAFETY: reads a number.
    let bytes = unsafe { libc::sysconf(libc::_SC_PAGESIZE) };
    usize::try_from(bytes).expect("a page has a size")
}

/// Whether other processes of the same user may open this process's memory.
pub(crate) fn is_dumpable() -> bool {
    // SAFETY: reads a number.
    unsafe { libc::prctl(libc::PR_GET_DUMPABLE, 0, 0, 0, 0) == 1 }
}

fn last_error() -> io::Error {
    io::Error::last_os_error()
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
        let fail = || Error::io("mapping a page that is wiped in a fork", &last_error());
        let access = libc::PROT_READ | libc::PROT_WRITE;
        let kind = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS;
        // SAFETY: requests a new mapping at an address of the kernel's choice.
        let base = unsafe { libc::mmap(std::ptr::null_mut(), PAGE, access, kind, -1, 0) };
        let mapped = NonNull::new(base).filter(|base| base.as_ptr() != libc::MAP_FAILED);
        let page = Page(mapped.ok_or_else(fail)?.cast());
        // SAFETY: advice on the page just mapped.
        if unsafe { libc::madvise(base, PAGE, libc::MADV_WIPEONFORK) } != 0 {
            return Err(fail());
        }
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
        unsafe { libc::munmap(self.0.as_ptr().cast(), PAGE) };
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
