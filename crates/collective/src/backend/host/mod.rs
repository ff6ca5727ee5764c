//! The embedded backend: ranks of one machine over one shared segment.
//!
//! Ranks that are threads ([`threads`]) and ranks that are processes ([`shm`]) differ only in how
//! they get at the segment and how they learn of a death. Everything else is one layer: every rank
//! has its own mapping of the same memory, enters each operation with its fingerprint ([`turn`]),
//! and follows one of three algorithms ([`flat`], [`chunked`], [`in_place`]), or exchanges messages
//! with single peers ([`exchange`]) through a channel per pair ([`channel`]).
//!
//! The invariant behind all of them: data areas of the segment are read and written through raw
//! pointers only, and a rank stores into its own areas only, after it has seen that nobody reads
//! them any more, and announces data with a counter that readers wait for. The one exception is the
//! in-place algorithm, where a rank stores into its shard of every rank's shared buffer between the
//! time all have entered and the time it says so.

#![expect(unsafe_code, reason = "gives out memory that the ranks share")]

mod cgroup;
pub(super) mod channel;
mod chunked;
mod exchange;
mod flat;
mod in_place;
mod life;
#[cfg(loom)]
mod model;
mod pace;
#[cfg(test)]
#[path = "../../../tests/it/common/refuse.rs"]
pub(crate) mod refuse;
mod segment;
pub(crate) mod shm;
pub(super) mod sys;
pub(crate) mod threads;
mod turn;

use crate::sync::atomic::Ordering;
use std::fs::OpenOptions;
use std::os::fd::{AsRawFd, OwnedFd};
use std::path::Path;
use std::sync::{Arc, Weak};
use std::time::Duration;

use parking_lot::Mutex;

use self::exchange::Channels;
use self::pace::Pace;
use self::segment::{FLAT_BYTES, MAX_RANKS, Poison, Segment};
pub(super) use self::sys::ForkGuard;
use self::sys::Mapping;
use self::turn::Turn;
use super::core::{BARRIER, DEFAULT_WAIT, GroupCore, HostBackend, SpanTransfer, run_single_rank};
use super::shared_config::SharedConfig;
use super::tcp::frame::{Cause, Failure};
use super::{Backend, RawShared, Wait};
use crate::span::Span;
use crate::{BufferLocation, Error, GroupOptions, OpDesc, Rank, Result, Verb};

/// One rank of a group on one machine.
#[derive(Debug)]
pub(crate) struct Host {
    // Stops before the segment goes.
    _monitor: Option<shm::Monitor>,
    core: GroupCore,
    segment: Arc<Segment>,
    /// The process whose descriptors rank 0 shares.
    root_pid: u32,
    state: Mutex<State>,
    /// To be locked after `state`.
    channels: Mutex<Channels>,
}

/// Where this rank is in the group's history; but for what is said to be its own, the same on all
/// ranks between operations.
#[derive(Debug, Default)]
struct State {
    /// Entries so far.
    seq: u64,
    /// Chunks so far.
    chunk: u64,
    /// This rank's own.
    pace: Pace,
    /// Exchanges that not all ranks entered, so far; each rank's own number.
    batches: u64,
    shared: Vec<Shared>,
}

/// A shared buffer: where all ranks' parts lie in this rank's address space.
#[derive(Clone, Debug)]
struct Shared {
    id: u64,
    /// Bytes from one rank's part to the next.
    stride: usize,
    /// Dead once this rank has dropped its buffer.
    map: Weak<Mapping>,
}

/// A shared buffer in use by the current operation.
#[derive(Debug)]
struct InUse {
    map: Arc<Mapping>,
    stride: usize,
    offset: usize,
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
        let digest = SharedConfig::new(world, options).digest();
        let core = GroupCore::new(what, (rank, world), world, options, digest)?;
        let (state, channels) = Default::default();
        Ok(Self { _monitor: monitor, core, segment, root_pid, state, channels })
    }

    fn world(&self) -> usize {
        self.core.world
    }

    fn turn<'a>(
        &'a self,
        state: &'a mut State,
        op: &'a OpDesc,
        location: BufferLocation,
        wait: Wait,
    ) -> Turn<'a> {
        let next = state.seq;
        // What not all ranks take part in is no step of the group's history.
        let count = if op.verb == Verb::Batch { &mut state.batches } else { &mut state.seq };
        let seq = *count;
        *count += 1;
        let Wait { policy, timeout } = wait;
        let timeout = timeout.unwrap_or(self.core.timeout);
        let State { chunk, pace, .. } = state;
        Turn { host: self, op, location, seq, next, policy, timeout, chunk, pace }
    }

    /// A first barrier: everyone is here and has the segment.
    fn meet(&self) -> Result<()> {
        self.turn(&mut self.state.lock(), &BARRIER, BufferLocation::Private, DEFAULT_WAIT).enter()
    }

    /// The shared buffer that the memory lies in, if any.
    fn find_shared(&self, state: &State, op: &OpDesc, memory: Span<'_>) -> Option<(u64, InUse)> {
        if op.verb != Verb::AllReduce || memory.len() == 0 || self.world() == 1 {
            return None;
        }
        state.shared.iter().find_map(|shared| {
            let map = shared.map.upgrade()?;
            let part = map.ptr().as_ptr().addr() + self.core.rank * shared.stride;
            let offset = memory.ptr().addr().checked_sub(part)?;
            (offset < shared.stride)
                .then_some((shared.id, InUse { map, stride: shared.stride, offset }))
        })
    }

    fn run_algorithm(
        &self,
        turn: &mut Turn<'_>,
        input: Span<'_>,
        output: Span<'_>,
        shared: Option<&InUse>,
    ) -> Result<()> {
        if self.world() == 1 {
            turn.enter()?;
            run_single_rank(turn.op, input, output);
            return Ok(());
        }
        if input.len() <= FLAT_BYTES {
            return flat::run(turn, input, output);
        }
        match (turn.op.verb, shared) {
            (Verb::AllReduce, Some(shared)) => in_place::all_reduce(turn, output, shared),
            (Verb::AllReduce, None) if self.world() == 2 => chunked::all_reduce_pair(turn, output),
            (Verb::AllReduce, None) => chunked::all_reduce(turn, output),
            (Verb::Reduce, _) => chunked::reduce(turn, output),
            (Verb::Broadcast, _) => chunked::broadcast(turn, output),
            (Verb::AllGather | Verb::Counts, _) => chunked::all_gather(turn, input, output),
            (Verb::ReduceScatter, _) => chunked::reduce_scatter(turn, input, output),
            (Verb::Barrier | Verb::Alloc, _) => turn.enter(),
            (verb, _) => Err(Error::Unsupported { backend: "host", what: verb.to_string() }),
        }
    }

    /// Meets the peers to obtain `stride` bytes for every rank.
    fn share(&self, state: &mut State, op: &OpDesc, stride: usize) -> Result<RawShared> {
        let total = stride * self.world();
        // Three meetings: all want the same; the file is there; all have it, and rank 0 may drop it.
        let agreed = self.turn(state, op, BufferLocation::Private, DEFAULT_WAIT);
        let id = agreed.seq + 1;
        agreed.enter()?;
        let own = if self.core.rank == 0 { Some(self.or_abort(self.offer(total))?) } else { None };
        let there = self.turn(state, op, BufferLocation::Private, DEFAULT_WAIT);
        there.enter()?;
        let map = match own {
            Some(file) => Mapping::new(file, total),
            None => self.take_offer(&there, total),
        };
        let reserved = map.and_then(|map| {
            map.ask_for_huge_pages();
            map.reserve(self.core.rank * stride, stride).map(|()| map)
        });
        let map = Arc::new(self.or_abort(reserved)?);
        self.turn(state, op, BufferLocation::Private, DEFAULT_WAIT).enter()?;
        state.shared.retain(|shared| shared.map.strong_count() > 0);
        state.shared.push(Shared { id, stride, map: Arc::downgrade(&map) });
        // SAFETY: inside the mapping, which has `world` strides.
        let ptr = unsafe { map.ptr().add(self.core.rank * stride) };
        // SAFETY: fresh zeros aligned to a page, mapped while `map` lives, referred to by nobody
        // else in this process, and touched by peers only in the in-place algorithm.
        Ok(unsafe { RawShared::new(ptr, stride, map) })
    }

    /// Makes the file of a shared buffer and says where it is.
    fn offer(&self, bytes: usize) -> Result<OwnedFd> {
        cgroup::allow(bytes)?;
        // Each rank reserves its own part.
        let file = sys::memfd(c"collective-shared", bytes, 0)?;
        let number = u64::try_from(file.as_raw_fd()).expect("descriptors are not negative");
        // Release: pairs with `take_offer`, though the entries between order them already.
        self.segment.shared_fd().store(number, Ordering::Release);
        Ok(file)
    }

    fn take_offer(&self, turn: &Turn<'_>, bytes: usize) -> Result<Mapping> {
        let number = self.segment.shared_fd().load(Ordering::Acquire);
        let file = match open_fd_of(self.root_pid, number) {
            Ok(Some(file)) => file,
            gone => {
                let died = Poison::Died { rank: 0, pid: self.root_pid };
                if gone.is_ok() {
                    self.segment.set_poison(died);
                }
                // What came before counts. A rank 0 that lives takes its offer back if the group has failed.
                return Err(match (self.segment.poison(), gone) {
                    (None, Err(error)) => error,
                    (poison, _) => turn.failure(poison.unwrap_or(died), Duration::ZERO),
                });
            }
        };
        if !sys::is_sealed(&file, bytes) {
            let text = "the file of rank 0's shared buffer is not what was agreed";
            return Err(Error::InvalidArgument(text.into()));
        }
        Mapping::new(file.into(), bytes)
    }

    /// What is known of a failure, which ended `op`.
    fn read(&self, poison: Poison, op: &str) -> Failure {
        let (by, cause) = match poison {
            Poison::Died { rank, pid } => (rank, Cause::Died { rank, pid, how: None }),
            Poison::Left { rank } => {
                (rank, Cause::Aborted { reason: format!("it left the group before {op}") })
            }
            Poison::Aborted { by } => (by, Cause::Aborted { reason: self.segment.note(by).0 }),
            Poison::TimedOut { by } => {
                let (text, missing) = self.segment.note(by);
                (by, Cause::TimedOut { missing, text })
            }
            Poison::Mismatch { by } => {
                let calls = serde_json::from_str(&self.segment.note(by).0);
                let (field, by_rank) = calls.unwrap_or_default();
                (by, Cause::Mismatch { field, by_rank })
            }
        };
        Failure { by, cause }
    }

    fn error(&self, poison: Poison, op: String, waited: Duration) -> Error {
        self.core.error(&self.read(poison, &op), op, waited)
    }

    /// A failure of this rank alone fails the group, since the peers wait for it.
    fn or_abort<T>(&self, result: Result<T>) -> Result<T> {
        if let Err(error) = &result {
            self.abort(&error.to_string());
        }
        result
    }
}

impl HostBackend for Host {
    fn core(&self) -> &GroupCore {
        &self.core
    }

    fn run_spans(&self, op: &OpDesc, input: Span<'_>, output: Span<'_>, wait: Wait) -> Result<()> {
        let mut state = self.state.lock();
        self.core.ready()?;
        let (location, shared) = match self.find_shared(&state, op, output) {
            Some((id, shared)) => {
                (BufferLocation::Shared { id, offset: shared.offset as u64 }, Some(shared))
            }
            None => (BufferLocation::Private, None),
        };
        let mut turn = self.turn(&mut state, op, location, wait);
        let result = self.run_algorithm(&mut turn, input, output, shared.as_ref());
        if let (Err(error), Some(shared)) = (&result, &shared)
            && !matches!(error, Error::Mismatch { .. })
        {
            // A peer that saw all ranks enter may still be storing into this rank's part.
            shared.map.detach(self.core.rank * shared.stride + shared.offset, output.len());
        }
        result
    }

    fn exchange_spans(&self, op: &OpDesc, blocks: Vec<SpanTransfer<'_>>, wait: Wait) -> Result<()> {
        let mut state = self.state.lock();
        self.core.ready()?;
        let turn = self.turn(&mut state, op, BufferLocation::Private, wait);
        if turn.op.verb != Verb::Batch {
            turn.enter()?;
        } else if let Some(poison) = self.segment.poison() {
            return Err(turn.failure(poison, Duration::ZERO));
        }
        let result = exchange::run(&turn, &mut self.channels.lock(), &blocks);
        if let Err(Error::Io { .. }) = &result {
            return self.or_abort(result);
        }
        result
    }

    fn alloc_shared(&self, op: &OpDesc) -> Result<RawShared> {
        let mut state = self.state.lock();
        self.core.ready()?;
        // The caller's mistake, seen before anything is sent.
        let stride = stride(op, self.world())?;
        self.core.note_failure(self.share(&mut state, op, stride))
    }

    fn failure(&self, op: &str) -> Option<Failure> {
        self.segment.poison().map(|poison| self.read(poison, op))
    }

    fn abort_group(&self, reason: &str) {
        if self.segment.poison().is_none() {
            self.segment.write_note(self.core.rank, reason, &[]);
            self.segment.set_poison(Poison::Aborted { by: self.core.rank });
        }
    }
}

impl Drop for Host {
    fn drop(&mut self) {
        // A fork's copy must not say goodbye for the parent.
        if !self.core.forked() {
            self.segment.leave(self.core.rank);
        }
    }
}

/// Bytes from one rank's part of a shared buffer to the next: whole pages.
fn stride(op: &OpDesc, world: usize) -> Result<usize> {
    let bytes = op.count.checked_mul(op.dtype.size());
    let stride = bytes.and_then(|bytes| bytes.max(1).checked_next_multiple_of(sys::page_size()));
    stride
        .filter(|stride| stride.checked_mul(world).is_some())
        .ok_or_else(|| Error::InvalidArgument(format!("{op}: more than memory can hold")))
}

fn check_world(rank: Rank, world_size: usize) -> Result<()> {
    if !(1..=MAX_RANKS).contains(&world_size) {
        let text = format!("a group on one machine has 1 to {MAX_RANKS} ranks, not {world_size}");
        return Err(Error::InvalidArgument(text));
    }
    super::rendezvous::check_rank(rank, world_size)
}

/// Opens what another process has open; `None` if the process has ended, or is about to.
pub(super) fn open_fd_of(pid: u32, number: u64) -> Result<Option<std::fs::File>> {
    let path = format!("/proc/{pid}/fd/{number}");
    match OpenOptions::new().read(true).write(true).open(&path) {
        Ok(file) => Ok(Some(file)),
        Err(_) if ends(pid) => Ok(None),
        Err(error) => {
            let what =
                format!("opening a peer's shared memory, {path} (`Transport::Tcp` shares none)");
            Err(Error::io(what, &error))
        }
    }
}

/// Whether a process whose files are gone has gone too, or goes now.
fn ends(pid: u32) -> bool {
    match sys::pidfd_open(pid) {
        Ok(pidfd) => {
            let ended = sys::poll_readable(&[&pidfd], Some(Duration::from_millis(200)));
            ended.is_ok_and(|ended| ended[0])
        }
        Err(_) => !Path::new(&format!("/proc/{pid}")).exists(),
    }
}

#[cfg(test)]
mod tests {
    use std::process::Command;

    use super::*;
    use crate::DType;

    #[test]
    fn the_files_of_a_process_that_ended_are_no_error() {
        let mut child = Command::new("true").spawn().unwrap();
        let pid = child.id();
        // Whether it runs yet, has ended, or has been waited for.
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

    /// Rank 0 has met the failure in the third meeting of `alloc`, before another was at the second's end.
    #[test]
    fn an_offer_that_was_taken_back_is_the_failure_for_which_it_was() {
        let hosts = threads::group(3, &GroupOptions::default()).unwrap();
        let host = &hosts[1];
        host.segment.shared_fd().store(1 << 20, Ordering::Release);
        let op = OpDesc { verb: Verb::Alloc, dtype: DType::F32, op: None, root: None, count: 1 };
        let mut state = host.state.lock();
        let turn = host.turn(&mut state, &op, BufferLocation::Private, DEFAULT_WAIT);
        let error = host.take_offer(&turn, 4096).unwrap_err();
        assert!(matches!(error, Error::Io { .. }), "{error}");
        host.segment.set_poison(Poison::Died { rank: 2, pid: 1 });
        let error = host.take_offer(&turn, 4096).unwrap_err();
        assert!(matches!(error, Error::PeerDied { rank: 2, .. }), "{error}");
    }
}
