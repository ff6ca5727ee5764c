//! The default backend: ranks of one machine over one shared segment.
//!
//! Ranks that are threads ([`threads`]) and ranks that are processes ([`shm`]) differ only in how
//! they map the segment and detect deaths. Every rank has its own mapping of the same memory and
//! enters each operation with its fingerprint ([`call`]). Then it runs one of three algorithms
//! ([`flat`], [`chunked`], [`in_place`]), or exchanges messages with single peers ([`exchange`])
//! through a channel per pair ([`channel`]).
//!
//! The invariant of all of them: data areas of the segment are accessed through raw pointers only.
//! A rank stores only into its own areas, after all readers have finished with the earlier
//! contents, and publishes data with a counter that readers wait for. The one exception is the
//! in-place algorithm: a rank stores into its shard of every rank's shared buffer, after all ranks
//! have entered and before it publishes that it is done.

#![expect(unsafe_code, reason = "returns memory that the ranks share")]

mod call;
mod cgroup;
pub(super) mod channel;
mod chunked;
mod exchange;
mod flat;
mod in_place;
#[cfg(loom)]
mod model;
#[cfg(test)]
#[path = "../../../tests/it/common/refuse.rs"]
pub(crate) mod refuse;
mod robust_futex;
mod route_tuner;
mod segment;
pub(super) mod shared;
pub(crate) mod shm;
pub(super) mod sys;
pub(crate) mod threads;

use crate::sync::atomic::Ordering;
use std::fs::OpenOptions;
use std::sync::Arc;
use std::time::Duration;

use parking_lot::Mutex;

use self::call::Call;
use self::chunked::PAIR_BYTES;
use self::exchange::Channels;
use self::route_tuner::RouteTuner;
use self::segment::{MAX_RANKS, Segment};
use self::shared::{InUse, SharedBuffers};
pub(crate) use self::shm::start_time;
use super::core::{BARRIER, DEFAULT_WAIT, GroupCore, HostBackend, SpanTransfer, run_single_rank};
use super::failure::{Cause, Failure};
use super::{RawShared, Wait};
use crate::memory::Span;
use crate::{BufferLocation, Error, GroupOptions, OpDesc, Rank, Result, Verb};

/// One rank of a group on one machine.
#[derive(Debug)]
pub(crate) struct Host {
    // Declared first, so that its thread stops before the segment is unmapped.
    _monitor: Option<shm::Monitor>,
    core: GroupCore,
    segment: Arc<Segment>,
    /// The process whose descriptors rank 0 shares.
    root_pid: u32,
    state: Mutex<HostState>,
    /// Locked after `state`.
    channels: Mutex<Channels>,
}

/// Sequence numbers and shared buffers; between operations equal on all ranks, except fields
/// documented as per-rank.
#[derive(Debug, Default)]
struct HostState {
    /// Sequence number of the next operation of all ranks.
    seq: u64,
    /// Number of the next chunk.
    chunk: u64,
    /// Per rank.
    route_tuner: RouteTuner,
    /// Number of point-to-point batches so far; per rank.
    batches: u64,
    shared: SharedBuffers,
}

impl Host {
    fn new(
        segment: Arc<Segment>,
        rank: Rank,
        options: &GroupOptions,
        root_pid: u32,
        monitor: Option<shm::Monitor>,
    ) -> Result<Self> {
        segment.reserve(rank)?;
        let world = segment.world;
        let what = ("host", "the ranks are threads of one process".into());
        let core = GroupCore::new(what, (rank, world), world, options)?;
        let (state, channels) = Default::default();
        Ok(Self { _monitor: monitor, core, segment, root_pid, state, channels })
    }

    fn world(&self) -> usize {
        self.core.world
    }

    fn call<'a>(
        &'a self,
        state: &'a mut HostState,
        op: &'a OpDesc,
        location: BufferLocation,
        wait: Wait,
    ) -> Call<'a> {
        let next = state.seq;
        // Batches involve only some ranks, so they have their own numbers.
        let count = if op.verb == Verb::Batch { &mut state.batches } else { &mut state.seq };
        let seq = *count;
        *count += 1;
        let Wait { policy, timeout } = wait;
        let timeout = timeout.unwrap_or(self.core.timeout);
        let HostState { chunk, route_tuner, .. } = state;
        Call { host: self, desc: op, location, seq, next, policy, timeout, chunk, route_tuner }
    }

    /// The first barrier: all ranks have mapped the segment.
    fn barrier(&self) -> Result<()> {
        self.call(&mut self.state.lock(), &BARRIER, BufferLocation::Private, DEFAULT_WAIT).enter()
    }

    fn run_algorithm(
        &self,
        call: &mut Call<'_>,
        input: Span<'_>,
        output: Span<'_>,
        shared: Option<&InUse>,
    ) -> Result<()> {
        if self.world() == 1 {
            call.enter()?;
            run_single_rank(call.desc, input, output);
            return Ok(());
        }
        if input.len() <= flat::limit(call.desc.verb, self.world()) {
            return flat::run(call, input, output);
        }
        match (call.desc.verb, shared) {
            (Verb::AllReduce, Some(shared)) => in_place::all_reduce(call, output, shared),
            (Verb::AllReduce, None) if self.world() == 2 && output.len() <= PAIR_BYTES => {
                chunked::all_reduce_pair(call, output)
            }
            (Verb::AllReduce, None) => chunked::all_reduce(call, output),
            (Verb::Reduce, _) => chunked::reduce(call, output),
            (Verb::Broadcast, _) => chunked::broadcast(call, output),
            (Verb::AllGather | Verb::Counts, _) => chunked::all_gather(call, input, output),
            (Verb::ReduceScatter, _) => chunked::reduce_scatter(call, input, output),
            (Verb::Barrier | Verb::Alloc, _) => call.enter(),
            (verb, _) => Err(Error::Unsupported { backend: "host", what: verb.to_string() }),
        }
    }

    /// Allocates a shared buffer of `stride` bytes per rank, together with the peers.
    fn alloc_shared_buffer(
        &self,
        state: &mut HostState,
        op: &OpDesc,
        stride: usize,
    ) -> Result<RawShared> {
        let (own, number) = (self.core.rank, self.segment.shared_fd());
        let mut enter = || self.call(state, op, BufferLocation::Private, DEFAULT_WAIT).enter();
        let first = (0, self.root_pid);
        let map = shared::make(self, op, (own, self.world(), stride), first, |fd| {
            if own == 0 {
                // Release: pairs with the Acquire below, though the barrier between them orders
                // them already.
                number.store(fd, Ordering::Release);
            }
            enter()?;
            Ok(number.load(Ordering::Acquire))
        })?;
        enter()?;
        Ok(state.shared.add(map, own, stride))
    }
}

impl HostBackend for Host {
    fn core(&self) -> &GroupCore {
        &self.core
    }

    fn run_spans(&self, op: &OpDesc, input: Span<'_>, output: Span<'_>, wait: Wait) -> Result<()> {
        let mut state = self.state.lock();
        self.core.ready()?;
        let shared = state.shared.find(op, output).filter(|_| self.world() > 1);
        let location = shared.as_ref().map_or(BufferLocation::Private, |shared| shared.location);
        let mut call = self.call(&mut state, op, location, wait);
        let result = self.run_algorithm(&mut call, input, output, shared.as_ref());
        if let (Err(error), Some(shared)) = (&result, &shared)
            && !matches!(error, Error::Mismatch { .. })
        {
            // A peer that saw all ranks enter may still store into this rank's part.
            shared.detach(output.len());
        }
        result
    }

    fn exchange_spans(&self, op: &OpDesc, blocks: Vec<SpanTransfer<'_>>, wait: Wait) -> Result<()> {
        let mut state = self.state.lock();
        self.core.ready()?;
        let call = self.call(&mut state, op, BufferLocation::Private, wait);
        if call.desc.verb != Verb::Batch {
            call.enter()?;
        } else {
            call.check_failure(Duration::ZERO)?;
        }
        let result = exchange::run(&call, &mut self.channels.lock(), &blocks);
        match result {
            Err(Error::Io { .. }) => self.or_abort(op, result),
            _ => result,
        }
    }

    fn alloc_shared(&self, op: &OpDesc) -> Result<RawShared> {
        let mut state = self.state.lock();
        self.core.ready()?;
        // An invalid argument is detected before anything is sent.
        let stride = shared::stride(op, self.world())?;
        self.core.note_failure(self.alloc_shared_buffer(&mut state, op, stride))
    }

    fn failure(&self) -> Option<Failure> {
        self.segment.failure()
    }

    fn fail_group(&self, cause: Cause) {
        self.segment.fail(self.core.rank, &Failure { by: self.core.rank, cause });
    }
}

impl Drop for Host {
    fn drop(&mut self) {
        // A forked child must not mark its parent's rank as having left.
        if !self.core.forked() {
            self.segment.leave(self.core.rank);
        }
    }
}

fn check_world(rank: Rank, world_size: usize) -> Result<()> {
    if !(1..=MAX_RANKS).contains(&world_size) {
        let text = format!("a group on one machine has 1 to {MAX_RANKS} ranks, not {world_size}");
        return Err(Error::InvalidArgument(text));
    }
    super::rendezvous::check_rank(rank, world_size)
}

/// Opens a file that another process has open; `None` if that process has ended or is about to.
pub(super) fn open_fd_of(pid: u32, number: u64) -> Result<Option<std::fs::File>> {
    let path = format!("/proc/{pid}/fd/{number}");
    match OpenOptions::new().read(true).write(true).open(&path) {
        Ok(file) => Ok(Some(file)),
        Err(_) if is_ending(pid) => Ok(None),
        Err(error) => {
            let what =
                format!("opening a peer's shared memory, {path} (`Transport::Tcp` shares none)");
            Err(Error::io(what, &error))
        }
    }
}

/// Whether a process that started at this time is known to run. Takes a while if it does, because
/// it may be about to end.
pub(crate) fn is_running(pid: u32, started: u64) -> bool {
    start_time(pid).is_ok_and(|time| time == started) && !is_ending(pid)
}

/// Whether a process whose files are closed has ended or is about to.
fn is_ending(pid: u32) -> bool {
    match sys::pidfd_open(pid) {
        Ok(pidfd) => {
            let ended = sys::poll_readable(&[&pidfd], Some(Duration::from_millis(200)));
            ended.is_ok_and(|ended| ended[0])
        }
        Err(_) => !sys::has_process(pid),
    }
}

#[cfg(test)]
mod tests {
    use std::path::Path;
    use std::process::Command;

    use super::*;
    use crate::DType;
    use crate::backend::Backend as _;

    #[test]
    fn open_fd_of_an_ended_process_is_none() {
        let mut child = Command::new("true").spawn().unwrap();
        let pid = child.id();
        // Before and after it is reaped.
        assert!(matches!(open_fd_of(pid, 1 << 20), Ok(None)));
        child.wait().unwrap();
        assert!(matches!(open_fd_of(pid, 1 << 20), Ok(None)));
        let error = open_fd_of(std::process::id(), 1 << 20).unwrap_err();
        assert!(matches!(error, Error::Io { .. }), "{error}");
    }

    #[test]
    fn a_large_shared_buffer_asks_for_huge_pages() {
        if !Path::new("/sys/kernel/mm/transparent_hugepage/enabled").exists() {
            return;
        }
        let hosts = threads::group(1, &GroupOptions::default()).unwrap();
        let shared = hosts[0].alloc(DType::U8, 8 << 20).unwrap();
        let smaps = std::fs::read_to_string("/proc/self/smaps").unwrap();
        let mut of_it = smaps.lines().skip_while(|line| {
            let range = line.split_once('-').zip(line.split(['-', ' ']).nth(1));
            let number = |text| usize::from_str_radix(text, 16).unwrap_or(0);
            let at = shared.ptr.addr().get();
            range.is_none_or(|((from, _), to)| !(number(from)..number(to)).contains(&at))
        });
        let flags = of_it.find(|line| line.starts_with("VmFlags")).unwrap();
        assert!(flags.contains(" hg"), "{flags}");
    }
}
