//! Shared buffers: memory of [`alloc`](crate::ProcessGroup::alloc), which ranks of one machine map.
//!
//! A buffer is an unnamed file with a part for each rank. One rank creates it, and the others open
//! its descriptor through `/proc`. A rank stores into a peer's part only during an operation that
//! the peer has entered with the same buffer. After a failed operation peers can no longer store
//! into its part.

use std::io;
use std::os::fd::{AsRawFd, OwnedFd};
use std::ptr::NonNull;
use std::sync::{Arc, Weak};

use memmap2::{MmapMut, MmapRaw};
use rustix::param::page_size;

use super::cgroup;
use super::open_fd_of;
use super::sys::{self, Mapping};
use crate::backend::RawShared;
use crate::backend::core::HostBackend;
use crate::backend::failure::Cause;
use crate::memory::Span;
use crate::{BufferLocation, Error, OpDesc, Rank, Result, Verb};

/// The shared buffers of one rank.
#[derive(Debug, Default)]
pub(in crate::backend) struct SharedBuffers {
    /// Number of buffers so far, which is the same on all ranks.
    count: u64,
    buffers: Vec<Shared>,
}

/// A shared buffer, mapped by this rank: the parts of all ranks.
#[derive(Debug)]
struct Shared {
    /// Its number, from 1 on.
    id: u64,
    /// Index of this rank's part.
    own: usize,
    /// Bytes from one rank's part to the next.
    stride: usize,
    /// Dangling once this rank has dropped its buffer.
    map: Weak<Mapping>,
}

/// The shared buffer that the current operation reduces, and the offset in it.
#[derive(Debug)]
pub(in crate::backend) struct InUse {
    pub(in crate::backend) location: BufferLocation,
    map: Arc<Mapping>,
    own: usize,
    stride: usize,
    offset: usize,
}

impl SharedBuffers {
    /// Returns the shared buffer that contains the memory of an all-reduce, if any.
    pub(in crate::backend) fn find(&self, op: &OpDesc, memory: Span<'_>) -> Option<InUse> {
        if op.verb != Verb::AllReduce || memory.len() == 0 {
            return None;
        }
        self.buffers.iter().find_map(|&Shared { id, own, stride, ref map }| {
            let map = map.upgrade()?;
            let part = map.ptr().as_ptr().addr() + own * stride;
            let offset = memory.ptr().addr().checked_sub(part).filter(|&offset| offset < stride)?;
            let location = BufferLocation::Shared { id, offset: offset as u64 };
            Some(InUse { location, map, own, stride, offset })
        })
    }

    /// Adds a buffer and returns this rank's part.
    pub(in crate::backend) fn add(&mut self, map: Mapping, own: usize, stride: usize) -> RawShared {
        let map = Arc::new(map);
        self.count += 1;
        self.buffers.retain(|shared| shared.map.strong_count() > 0);
        self.buffers.push(Shared { id: self.count, own, stride, map: Arc::downgrade(&map) });
        // SAFETY: inside the mapping, which has a stride for each rank.
        let ptr = unsafe { map.ptr().add(own * stride) };
        // SAFETY: fresh zeros aligned to a page, mapped while `map` lives, referred to by nothing
        // else in this process, and accessed by peers only during an operation on it.
        unsafe { RawShared::new(ptr, stride, map) }
    }
}

impl InUse {
    /// `len` bytes of a rank's part, `start` bytes after the operation's first byte.
    pub(in crate::backend) fn part(&self, index: usize, start: usize, len: usize) -> Span<'_> {
        self.map.data(index * self.stride + self.offset + start, len)
    }

    /// Makes this rank's `len` bytes of the operation private, see [`Mapping::detach`].
    pub(in crate::backend) fn detach(&self, len: usize) {
        self.map.detach(self.own * self.stride + self.offset, len);
    }
}

/// Zeroed memory that is not shared, for backends and groups without shared memory.
pub(in crate::backend) fn private(bytes: usize) -> io::Result<RawShared> {
    let map = MmapRaw::from(MmapMut::map_anon(bytes)?);
    let ptr = NonNull::new(map.as_mut_ptr()).expect("mappings are not at null");
    // SAFETY: fresh zeros aligned to a page, mapped while `map` lives, referred to by nothing else.
    Ok(unsafe { RawShared::new(ptr, bytes, Arc::new(map)) })
}

/// Bytes from one rank's part of a shared buffer to the next, in whole pages.
pub(in crate::backend) fn stride(op: &OpDesc, ranks: usize) -> Result<usize> {
    let bytes = op.count.checked_mul(op.dtype.size());
    let stride = bytes.and_then(|bytes| bytes.max(1).checked_next_multiple_of(page_size()));
    stride
        .filter(|stride| stride.checked_mul(ranks).is_some())
        .ok_or_else(|| Error::InvalidArgument(format!("{op}: the size overflows")))
}

/// Makes the file of a shared buffer with `stride` bytes for each of `ranks`, together with them,
/// and maps it; a barrier must follow, after which the first rank may close the file. `own` is this
/// rank's index; `first` is the first rank, and its process. `send` enters the operation and
/// returns the number that the first rank passes.
pub(in crate::backend) fn make(
    backend: &impl HostBackend,
    op: &OpDesc,
    (own, ranks, stride): (usize, usize, usize),
    (first, pid): (Rank, u32),
    send: impl FnOnce(u64) -> Result<u64>,
) -> Result<Mapping> {
    let total = stride * ranks;
    let file = if own == 0 { Some(backend.or_abort(op, create(total))?) } else { None };
    let number = send(file.as_ref().map_or(0, |file| file.as_raw_fd() as u64))?;
    let opened = match file {
        Some(file) => Mapping::new(file, total),
        None => open_fd_of(pid, number).and_then(|file| {
            let cause = Cause::Died { rank: first, pid, how: None };
            let file = file.ok_or_else(|| backend.fail(op, cause))?;
            Mapping::of_peer(file, total, &format!("the shared buffer of rank {first}"))
        }),
    };
    backend.or_abort(op, opened.and_then(|map| reserve(map, own, stride)))
}

/// Creates the file of a shared buffer. Each rank reserves its own part.
fn create(bytes: usize) -> Result<OwnedFd> {
    cgroup::check_limit(bytes)?;
    sys::memfd(c"collective-shared", bytes, 0)
}

/// Reserves the part of the rank with index `own`.
fn reserve(map: Mapping, own: usize, stride: usize) -> Result<Mapping> {
    map.ask_for_huge_pages();
    map.reserve(own * stride, stride)?;
    Ok(map)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::backend::Backend as _;
    use crate::backend::host::threads;
    use crate::{DType, GroupOptions};

    /// The first rank fails after it has sent the number, and closes the file before another rank
    /// opens it.
    #[test]
    fn a_closed_file_reports_the_failure_that_closed_it() {
        let op = OpDesc { verb: Verb::Alloc, dtype: DType::F32, op: None, root: None, count: 1 };
        let open = |failure: &str| {
            let hosts = threads::group(3, &GroupOptions::default()).unwrap();
            let first = (0, std::process::id());
            make(&hosts[1], &op, (1, 3, 4096), first, |_| {
                if !failure.is_empty() {
                    hosts[0].abort(failure);
                }
                Ok(1 << 20)
            })
            .unwrap_err()
        };
        let error = open("no memory");
        assert!(matches!(&error, Error::Aborted { by: 0, reason } if reason == "no memory"));
        let error = open("");
        assert!(matches!(error, Error::Io { .. }), "{error}");
    }
}
