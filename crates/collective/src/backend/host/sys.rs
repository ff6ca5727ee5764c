//! Linux system calls: unnamed shared memory, futexes, memory barriers and pidfds.

#![expect(unsafe_code, reason = "system calls and memory mappings")]

use std::ffi::CStr;
use std::fs::File;
use std::io;
use std::os::fd::OwnedFd;
use std::ptr::NonNull;
use std::time::Duration;

use memmap2::{Advice, MmapOptions, MmapRaw};
use rustix::event::{PollFd, PollFlags};
use rustix::fs::{FallocateFlags, MemfdFlags, SealFlags, fcntl_add_seals, fcntl_get_seals};
use rustix::io::Errno;
use rustix::mm::{MapFlags, ProtFlags, mmap};
use rustix::param::page_size;
use rustix::process::{Pid, PidfdFlags, Resource, getrlimit};
#[cfg(not(loom))]
use rustix::thread::futex;
use rustix::thread::{MembarrierCommand, membarrier};

#[cfg(loom)]
use super::model::Words;
use crate::memory::Span;
use crate::net::sys::poll;
#[cfg(not(loom))]
use crate::net::sys::timespec;
use crate::sync::atomic::{AtomicU32, AtomicU64};
use crate::{Error, Result};

/// Seals that prevent truncation of a mapped file, which would cause a SIGBUS.
const SEALS: SealFlags = SealFlags::SHRINK.union(SealFlags::GROW).union(SealFlags::SEAL);

/// Creates an unnamed memory file of `bytes` zeros with a fixed size.
///
/// Reserves memory for the first `reserved` bytes now, so that running out of memory is an error
/// here and not a signal later; [`Mapping::reserve`] reserves the others before they are used.
/// Beyond the limit of a control group the kernel kills the process nevertheless: see
/// [`cgroup`](super::cgroup).
pub(in crate::backend) fn memfd(name: &CStr, bytes: usize, reserved: usize) -> Result<OwnedFd> {
    let create = || -> io::Result<OwnedFd> {
        check_size_limit(bytes as u64)?;
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
        check_size_limit(offset + len)?;
        rustix::io::retry_on_intr(|| {
            rustix::fs::fallocate(file, FallocateFlags::empty(), offset, len)
        })?;
    }
    Ok(())
}

/// Fails if this process's files may not have `bytes` bytes. The kernel would send SIGXFSZ, which
/// kills the process.
fn check_size_limit(bytes: u64) -> io::Result<()> {
    match getrlimit(Resource::Fsize).current {
        Some(limit) if limit < bytes => {
            let text = format!(
                "RLIMIT_FSIZE is {limit} bytes, which also limits shared memory; raise it (`ulimit -f`)"
            );
            Err(io::Error::new(io::ErrorKind::FileTooLarge, text))
        }
        _ => Ok(()),
    }
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

/// A shared mapping of a whole file.
#[derive(Debug)]
pub(in crate::backend) struct Mapping {
    map: MmapRaw,
    file: OwnedFd,
    /// Used by loom models instead of the words in memory.
    #[cfg(loom)]
    pub(super) words: std::sync::Arc<Words>,
}

impl Mapping {
    /// Maps a file that a peer created, which must have exactly `len` bytes and keep them. `what`
    /// names it in the error.
    pub(in crate::backend) fn of_peer(file: File, len: usize, what: &str) -> Result<Self> {
        if !is_sealed(&file, len) {
            return Err(wrong_file(what));
        }
        Self::new(file.into(), len)
    }

    /// Maps the first `len` bytes, which the file must have and keep ([`is_sealed`]).
    pub(in crate::backend) fn new(file: OwnedFd, len: usize) -> Result<Self> {
        let map = MmapOptions::new()
            .len(len)
            .map_raw(&file)
            .map_err(|error| Error::io(format!("mapping {len} bytes of shared memory"), &error))?;
        Ok(Self {
            map,
            file,
            #[cfg(loom)]
            words: Words::new(len),
        })
    }

    /// Another mapping of the same file, with the same words.
    #[cfg(loom)]
    pub(super) fn again(&self) -> Result<Self> {
        let file = self.file.try_clone().map_err(|error| Error::io("sharing a file", &error))?;
        let mut again = Self::new(file, self.map.len())?;
        again.words = std::sync::Arc::clone(&self.words);
        Ok(again)
    }

    pub(super) fn ptr(&self) -> NonNull<u8> {
        NonNull::new(self.map.as_mut_ptr()).expect("mappings are not at null")
    }

    /// Reserves memory for a range, on this processor's NUMA node unless it is reserved already.
    /// Keeps its contents.
    pub(in crate::backend) fn reserve(&self, offset: usize, len: usize) -> Result<()> {
        assert!(offset + len <= self.map.len(), "bytes of the mapping");
        if self.map.advise_range(Advice::PopulateWrite, offset, len).is_ok() {
            return Ok(());
        }
        // Needed before Linux 5.14; on later kernels it returns a more precise error.
        allocate(&self.file, offset, len)
            .map_err(|error| Error::io(format!("allocating {len} bytes of shared memory"), &error))
    }

    /// Advises the kernel to use huge pages, if they are enabled for shared memory
    /// (`shmem_enabled`).
    pub(super) fn ask_for_huge_pages(&self) {
        // A failure changes nothing.
        drop(self.map.advise(Advice::HugePage));
    }

    /// The word at a byte offset.
    #[cfg(not(loom))]
    pub(in crate::backend) fn word(&self, offset: usize) -> &AtomicU64 {
        let word = self.at(offset, 8).cast();
        // SAFETY: mapped while `self` lives, aligned (the mapping starts at a page), and only used
        // as an atomic: the layout keeps words and data apart.
        unsafe { AtomicU64::from_ptr(word) }
    }

    /// `N` consecutive words from a byte offset on.
    pub(super) fn words<const N: usize>(&self, offset: usize) -> [&AtomicU64; N] {
        std::array::from_fn(|i| self.word(offset + 8 * i))
    }

    /// The 32-bit word at a byte offset, for a futex.
    #[cfg(not(loom))]
    pub(super) fn half_word(&self, offset: usize) -> &AtomicU32 {
        let word = self.at(offset, 4).cast();
        // SAFETY: as in `word`.
        unsafe { AtomicU32::from_ptr(word) }
    }

    /// The address of a word of `size` bytes.
    #[cfg(not(loom))]
    fn at(&self, offset: usize, size: usize) -> *mut u8 {
        let inside = offset.is_multiple_of(size) && offset + size <= self.map.len();
        assert!(inside, "a word of the segment");
        self.map.as_mut_ptr().wrapping_add(offset)
    }

    /// The `len` bytes at a byte offset, which must lie in one of the layout's data areas.
    pub(super) fn data(&self, offset: usize, len: usize) -> Span<'_> {
        // SAFETY: the mapping lives as long as the borrow of `self`. No reference to its data areas
        // is ever created, except to a shared buffer's own part, which the buffer's user lends to
        // the operation. The algorithms' protocol orders accesses of different ranks.
        let whole = unsafe { Span::new(self.map.as_mut_ptr(), self.map.len()) };
        whole.part(offset, len)
    }

    /// Replaces the pages of the `len` bytes at `offset` by private copies, so that later writes of
    /// peers are not seen here.
    pub(super) fn detach(&self, offset: usize, len: usize) {
        let bytes = self.data(offset, len);
        if len == 0 {
            return;
        }
        let (page, end) = (page_size(), offset + len);
        let first = offset / page * page;
        let at = self.map.as_mut_ptr().wrapping_add(first).cast();
        let kind = MapFlags::PRIVATE | MapFlags::FIXED;
        let access = ProtFlags::READ | ProtFlags::WRITE;
        // SAFETY: replaces pages of our own mapping, which `data` has checked, by private ones with
        // the same contents.
        let new = unsafe { mmap(at, end - first, access, kind, &self.file, first as u64) };
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

#[cfg(loom)]
pub(super) use super::model::{futex_wait, futex_wake};

/// Sleeps until the word is woken, `tick` has passed or a signal arrives; returns at once if the
/// word is not `value`.
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

/// Registers this process for other processes' [`global_membarrier`]; returns whether the kernel
/// has it.
pub(super) fn register_for_membarrier() -> bool {
    membarrier(MembarrierCommand::RegisterGlobalExpedited).is_ok()
}

/// Issues a memory barrier on this thread and on every running thread of every registered process;
/// returns whether the kernel has it.
pub(super) fn global_membarrier() -> bool {
    membarrier(MembarrierCommand::GlobalExpedited).is_ok()
}

/// Sets the calling thread's scheduler slice. With a short one it runs soon after it wakes, and
/// yields to threads with longer slices afterwards. Has no effect before Linux 6.12.
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
    let pid = i32::try_from(pid).ok().and_then(Pid::from_raw).ok_or(Errno::SRCH)?;
    rustix::process::pidfd_open(pid, PidfdFlags::empty())
}

/// Whether a process has this pid; also one that has ended and that its parent has not waited for.
pub(super) fn has_process(pid: u32) -> bool {
    let pid = i32::try_from(pid).ok().and_then(Pid::from_raw);
    pid.is_some_and(|pid| rustix::process::test_kill_process(pid) != Err(Errno::SRCH))
}

/// Waits until one of `fds` is readable or `timeout` has passed, and returns which are. `None`
/// waits forever; one of `fds` must then be able to end the wait.
pub(super) fn poll_readable(fds: &[&OwnedFd], timeout: Option<Duration>) -> io::Result<Vec<bool>> {
    let mut polls: Vec<_> = fds.iter().map(|fd| PollFd::new(fd, PollFlags::IN)).collect();
    poll(&mut polls, timeout)?;
    Ok(polls.iter().map(|poll| !poll.revents().is_empty()).collect())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::sync::atomic::Ordering;

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
        let file = File::from(memfd(c"test", page_size(), 0).unwrap());
        assert!(is_sealed(&file, page_size()));
        assert!(!is_sealed(&file, 2 * page_size()));
        assert!(file.set_len(0).is_err());
    }

    /// A malformed record may contain one.
    #[test]
    fn a_pid_that_the_kernel_never_assigns_is_of_no_process() {
        for pid in [0, 1 << 31, u32::MAX] {
            assert_eq!(pidfd_open(pid).unwrap_err(), Errno::SRCH);
        }
    }

    #[test]
    fn a_futex_wait_for_another_value_returns_at_once() {
        let word = AtomicU32::new(1);
        futex_wait(&word, 0, Duration::from_secs(60));
        futex_wake(&word);
    }
}
