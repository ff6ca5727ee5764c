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

#![expect(unsafe_code, reason = "turns the memory of an operation into spans")]

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
use std::sync::{Arc, OnceLock, Weak};
use std::time::Duration;

use parking_lot::Mutex;

use self::exchange::{Block, Mesh, Way};
use self::pace::Pace;
use self::segment::{FLAT_BYTES, MAX_RANKS, Poison, Segment};
pub(super) use self::sys::ForkGuard;
use self::sys::Mapping;
use self::turn::Turn;
use super::shared_config::SharedConfig;
use super::{Backend, Patience, RawBufs, RawShared, Transfer, TransferMemory, Wait};
use crate::span::Span;
use crate::{DType, Error, GroupOptions, OpDesc, Place, Rank, Result, Verb, simd};

/// How this backend waits for peers in between, on a caller's thread.
const STANDING: Wait = Wait { patience: Patience::Caller, timeout: None };

/// One rank of a group on one machine.
#[derive(Debug)]
pub(crate) struct Host {
    // Stops before the segment goes.
    _monitor: Option<shm::Monitor>,
    rank: Rank,
    /// Why it is this backend.
    reason: String,
    name: String,
    /// Digest of the configuration that all ranks share.
    config_digest: u8,
    timeout: Duration,
    /// Every rank can have a core to itself, so that spinning takes nothing from a peer.
    alert: bool,
    segment: Arc<Segment>,
    /// The process whose descriptors rank 0 shares.
    root_pid: u32,
    state: Mutex<State>,
    /// To be locked after `state`.
    mesh: Mutex<Mesh>,
    /// This rank's first failure.
    failed: OnceLock<Error>,
    guard: ForkGuard,
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
        let cores = std::thread::available_parallelism().map_or(1, usize::from);
        Ok(Self {
            _monitor: monitor,
            rank,
            reason: "the ranks are threads of one process".into(),
            name: options.name.clone(),
            config_digest: SharedConfig::new(segment.world, options).digest(),
            timeout: options.timeout,
            alert: segment.world <= cores,
            segment,
            root_pid,
            state: Mutex::default(),
            mesh: Mutex::default(),
            failed: OnceLock::new(),
            guard: ForkGuard::new()?,
        })
    }

    fn world(&self) -> usize {
        self.segment.world
    }

    fn fork_check(&self) -> Result<()> {
        if self.guard.forked() {
            return Err(Error::InvalidArgument(
                "a process group belongs to the process that made it, not to a fork".into(),
            ));
        }
        Ok(())
    }

    /// Remembers the first failure.
    fn note_failure<T>(&self, result: Result<T>) -> Result<T> {
        if let Err(error) = &result {
            self.failed.get_or_init(|| error.clone());
        }
        result
    }

    fn turn<'a>(
        &'a self,
        state: &'a mut State,
        op: &'a OpDesc,
        place: Place,
        wait: Wait,
    ) -> Turn<'a> {
        let next = state.seq;
        // What not all ranks take part in is no step of the group's history.
        let count = if op.verb == Verb::Batch { &mut state.batches } else { &mut state.seq };
        let seq = *count;
        *count += 1;
        let Wait { patience, timeout } = wait;
        let timeout = timeout.unwrap_or(self.timeout);
        let State { chunk, pace, .. } = state;
        Turn { host: self, op, place, seq, next, patience, timeout, chunk, pace }
    }

    /// A first barrier: everyone is here and has the segment.
    fn meet(&self) -> Result<()> {
        let op = OpDesc { verb: Verb::Barrier, dtype: DType::U8, op: None, root: None, count: 0 };
        self.turn(&mut self.state.lock(), &op, Place::Own, STANDING).enter()
    }

    /// The shared buffer that the memory lies in, if any.
    fn find_shared(&self, state: &State, op: &OpDesc, memory: Span<'_>) -> Option<(u64, InUse)> {
        if op.verb != Verb::AllReduce || memory.len() == 0 || self.world() == 1 {
            return None;
        }
        state.shared.iter().find_map(|shared| {
            let map = shared.map.upgrade()?;
            let part = map.ptr().as_ptr().addr() + self.rank * shared.stride;
            let offset = memory.ptr().addr().checked_sub(part)?;
            (offset < shared.stride)
                .then_some((shared.id, InUse { map, stride: shared.stride, offset }))
        })
    }

    fn perform(
        &self,
        turn: &mut Turn<'_>,
        input: Span<'_>,
        output: Span<'_>,
        shared: Option<&InUse>,
    ) -> Result<()> {
        if self.world() == 1 {
            turn.enter()?;
            alone(turn.op, input, output);
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

    fn trade(&self, turn: &Turn<'_>, blocks: Vec<Block<'_>>) -> Result<()> {
        if turn.op.verb != Verb::Batch {
            turn.enter()?;
        } else if let Some(poison) = self.segment.poison() {
            return Err(turn.failure(poison, Duration::ZERO));
        }
        let result = exchange::run(turn, &mut self.mesh.lock(), blocks);
        if let Err(Error::Io { .. }) = &result {
            return self.or_abort(result);
        }
        result
    }

    /// Meets the peers to obtain `stride` bytes for every rank.
    fn obtain(&self, state: &mut State, op: &OpDesc, stride: usize) -> Result<RawShared> {
        let total = stride * self.world();
        // Three meetings: all want the same; the file is there; all have it, and rank 0 may drop it.
        let agreed = self.turn(state, op, Place::Own, STANDING);
        let id = agreed.seq + 1;
        agreed.enter()?;
        let own = if self.rank == 0 { Some(self.or_abort(self.offer(total))?) } else { None };
        let there = self.turn(state, op, Place::Own, STANDING);
        there.enter()?;
        let map = match own {
            Some(file) => Mapping::new(file, total),
            None => self.take_offer(&there, total),
        };
        let reserved = map.and_then(|map| {
            map.ask_for_huge_pages();
            map.reserve(self.rank * stride, stride).map(|()| map)
        });
        let map = Arc::new(self.or_abort(reserved)?);
        self.turn(state, op, Place::Own, STANDING).enter()?;
        state.shared.retain(|shared| shared.map.strong_count() > 0);
        state.shared.push(Shared { id, stride, map: Arc::downgrade(&map) });
        // SAFETY: inside the mapping, which has `world` strides.
        let ptr = unsafe { map.ptr().add(self.rank * stride) };
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

    /// The group's failure, as this rank tells it of `op`.
    fn failure(&self, poison: Poison, op: String, waited: Duration) -> Error {
        match poison {
            Poison::Died { rank, pid } => Error::PeerDied { op, rank, pid },
            Poison::Left { rank } => {
                Error::Aborted { by: rank, reason: format!("it left the group before {op}") }
            }
            Poison::Aborted { by } => Error::Aborted { by, reason: self.segment.note(by).0 },
            Poison::TimedOut { by } => {
                let (reason, missing) = self.segment.note(by);
                // For the rank that came too late, the others have given up.
                if missing.contains(&self.rank) {
                    Error::Aborted { by, reason }
                } else {
                    Error::Timeout { op, waited, missing }
                }
            }
            Poison::Mismatch { by, from } => exchange::noted(op, by, from, &self.segment),
        }
    }

    /// A failure of this rank alone fails the group, since the peers wait for it.
    fn or_abort<T>(&self, result: Result<T>) -> Result<T> {
        if let Err(error) = &result {
            self.abort(&error.to_string());
        }
        result
    }
}

impl Backend for Host {
    fn name(&self) -> &'static str {
        "host"
    }

    fn reason(&self) -> &str {
        &self.reason
    }

    fn rank(&self) -> Rank {
        self.rank
    }

    fn world_size(&self) -> usize {
        self.world()
    }

    fn forked(&self) -> bool {
        self.guard.forked()
    }

    fn ready(&self) -> Result<()> {
        self.fork_check()?;
        match self.failed.get() {
            Some(error) => Err(Error::Poisoned(Box::new(error.clone()))),
            None => Ok(()),
        }
    }

    fn health(&self) -> Result<()> {
        self.fork_check()?;
        if let Some(error) = self.failed.get() {
            return Err(error.clone());
        }
        match self.segment.poison() {
            Some(poison) => {
                let op = format!("group {}", self.name);
                Err(self.failure(poison, op, Duration::ZERO))
            }
            None => Ok(()),
        }
    }

    unsafe fn run(&self, op: &OpDesc, bufs: RawBufs, wait: Wait) -> Result<()> {
        self.fork_check()?;
        let mut state = self.state.lock();
        self.ready()?;
        let size = op.dtype.size();
        let (input_len, output_len) =
            (op.input_count(self.world()) * size, op.output_count(self.world()) * size);
        // SAFETY: the caller's promise; the algorithms only copy from the input, unless it is the
        // output.
        let input = unsafe { Span::new(bufs.input.cast_mut(), input_len) };
        // SAFETY: the caller's promise.
        let output = unsafe { Span::new(bufs.output, output_len) };
        let (place, shared) = match self.find_shared(&state, op, output) {
            Some((id, shared)) => {
                (Place::Shared { id, offset: shared.offset as u64 }, Some(shared))
            }
            None => (Place::Own, None),
        };
        let mut turn = self.turn(&mut state, op, place, wait);
        let result = self.perform(&mut turn, input, output, shared.as_ref());
        if let (Err(error), Some(shared)) = (&result, &shared)
            && !matches!(error, Error::Mismatch { .. })
        {
            // A peer that saw all ranks enter may still be storing into this rank's part.
            shared.map.detach(self.rank * shared.stride + shared.offset, output.len());
        }
        self.note_failure(result)
    }

    unsafe fn exchange(&self, op: &OpDesc, transfers: &[Transfer], wait: Wait) -> Result<()> {
        self.fork_check()?;
        let mut state = self.state.lock();
        self.ready()?;
        let block = |transfer: &Transfer| {
            let &Transfer { peer, dtype, count, memory } = transfer;
            let (way, ptr) = match memory {
                TransferMemory::Send(ptr) => (Way::Out, ptr.cast_mut()),
                TransferMemory::Receive(ptr) => (Way::In, ptr),
            };
            // SAFETY: the caller's promise; what goes out is only copied from.
            let memory = unsafe { Span::new(ptr, count * dtype.size()) };
            Block { peer, way, dtype, count, memory }
        };
        let blocks = transfers.iter().map(block).collect();
        let turn = self.turn(&mut state, op, Place::Own, wait);
        self.note_failure(self.trade(&turn, blocks))
    }

    fn alloc(&self, dtype: DType, count: usize) -> Result<RawShared> {
        self.fork_check()?;
        let mut state = self.state.lock();
        self.ready()?;
        let op = OpDesc { verb: Verb::Alloc, dtype, op: None, root: None, count };
        // The caller's mistake, seen before anything is sent.
        let stride = stride(&op, self.world())?;
        let result = self.obtain(&mut state, &op, stride);
        self.note_failure(result)
    }

    fn abort(&self, reason: &str) {
        if self.guard.forked() || self.segment.poison().is_some() {
            return;
        }
        self.segment.write_note(self.rank, reason, &[]);
        self.segment.set_poison(Poison::Aborted { by: self.rank });
    }
}

impl Drop for Host {
    fn drop(&mut self) {
        // A fork's copy must not say goodbye for the parent.
        if !self.guard.forked() {
            self.segment.leave(self.rank);
        }
    }
}

/// A group of one: the verbs without the peers.
fn alone(op: &OpDesc, input: Span<'_>, output: Span<'_>) {
    match op.op {
        Some(reduce) => simd::fold(op.dtype, reduce, &[output], &[input]),
        None => output.copy_from(input),
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
    super::meet::check_rank(rank, world_size)
}

/// Opens what another process has open; `None` if the process has ended, or is about to.
pub(super) fn open_fd_of(pid: u32, number: u64) -> Result<Option<std::fs::File>> {
    let path = format!("/proc/{pid}/fd/{number}");
    match OpenOptions::new().read(true).write(true).open(&path) {
        Ok(file) => Ok(Some(file)),
        Err(_) if ends(pid) => Ok(None),
        Err(error) => Err(Error::io(format!("opening a peer's shared memory, {path}"), &error)),
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
        let turn = host.turn(&mut state, &op, Place::Own, STANDING);
        let error = host.take_offer(&turn, 4096).unwrap_err();
        assert!(matches!(error, Error::Io { .. }), "{error}");
        host.segment.set_poison(Poison::Died { rank: 2, pid: 1 });
        let error = host.take_offer(&turn, 4096).unwrap_err();
        assert!(matches!(error, Error::PeerDied { rank: 2, .. }), "{error}");
    }
}
