//! [`GroupCore`]: code that the backends for host memory share: rank, comparison of calls, waiting,
//! and the group's failure.
//!
//! Each of them implements [`HostBackend`], which moves bytes and reports failures; [`Backend`] is
//! implemented here for all of them.
//!
//! Invariant: after its first failure a rank refuses later calls with that failure, and a fork of
//! the process that made a group does not access the group.

#![expect(unsafe_code, reason = "turns the memory of an operation into spans")]

use std::fmt::Debug;
use std::sync::OnceLock;
use std::time::Duration;

use super::failure::{Cause, Failure};
use super::{Backend, RawBufs, RawShared, Transfer, TransferMemory, Wait, WaitPolicy};
use crate::memory::{ForkGuard, Span};
use crate::{DType, Error, Fingerprint, GroupOptions, OpDesc, Rank, Result, Verb, simd};

/// Maximum length of a text that is sent to peers.
pub(crate) const REASON_BYTES: usize = 320;
/// How long a blocking call yields its core before it sleeps.
const YIELD: Duration = Duration::from_micros(if cfg!(loom) { 0 } else { 300 });
/// How long the communication thread spins before it sleeps.
const SPIN_BACKGROUND: Duration = Duration::from_micros(if cfg!(loom) { 0 } else { 2 });
/// Default wait of a backend's internal operations on the caller's thread.
pub(crate) const DEFAULT_WAIT: Wait = Wait { policy: WaitPolicy::Spin, timeout: None };

/// A barrier.
pub(crate) const BARRIER: OpDesc =
    OpDesc { verb: Verb::Barrier, dtype: DType::U8, op: None, root: None, count: 0 };

/// One rank's view of its group, independent of the transport.
#[derive(Debug)]
pub(crate) struct GroupCore {
    /// The backend's name.
    pub(crate) backend: &'static str,
    /// Why this backend was chosen.
    pub(crate) reason: String,
    pub(crate) rank: Rank,
    pub(crate) world: usize,
    /// The group's name.
    pub(crate) name: String,
    pub(crate) timeout: Duration,
    /// Whether every rank of this machine can have its own core, so that spinning delays no peer.
    pub(crate) has_dedicated_core: bool,
    /// This rank's first failure.
    failed: OnceLock<Error>,
    guard: ForkGuard,
}

/// The next action in a wait.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum WaitStep {
    Spin,
    Yield,
    Sleep,
}

impl GroupCore {
    /// Makes the core of a group, of which `neighbours` ranks, including this one, share this
    /// machine's cores.
    pub(crate) fn new(
        (backend, reason): (&'static str, String),
        (rank, world): (Rank, usize),
        neighbours: usize,
        options: &GroupOptions,
    ) -> Result<Self> {
        let cores = std::thread::available_parallelism().map_or(1, usize::from);
        Ok(Self {
            backend,
            reason,
            rank,
            world,
            name: options.name.clone(),
            timeout: options.timeout,
            has_dedicated_core: neighbours <= cores,
            failed: OnceLock::new(),
            guard: ForkGuard::new()?,
        })
    }

    /// The other ranks, starting with the next one, so that ranks do not all begin with the same
    /// peer.
    pub(crate) fn peers(&self) -> impl Iterator<Item = Rank> + use<> {
        (self.rank + 1..self.world).chain(0..self.rank)
    }

    pub(crate) fn forked(&self) -> bool {
        self.guard.forked()
    }

    fn fork_check(&self) -> Result<()> {
        if self.forked() {
            return Err(Error::InvalidArgument(
                "a process group cannot be used in a fork of the process that made it".into(),
            ));
        }
        Ok(())
    }

    pub(crate) fn ready(&self) -> Result<()> {
        self.fork_check()?;
        match self.failed.get() {
            Some(error) => Err(Error::Poisoned(Box::new(error.clone()))),
            None => Ok(()),
        }
    }

    /// Records the error if it is this rank's first, and returns `result`.
    pub(crate) fn note_failure<T>(&self, result: Result<T>) -> Result<T> {
        if let Err(error) = &result {
            self.failed.get_or_init(|| error.clone());
        }
        result
    }

    /// Returns the name for error texts, for example `all_reduce #17 of group default`.
    pub(crate) fn name_of(&self, verb: Verb, seq: u64) -> String {
        format!("{verb} #{seq} of group {}", self.name)
    }

    /// Compares this rank's call with `calls`, which are in rank order.
    pub(crate) fn compare(
        &self,
        own: &Fingerprint,
        calls: impl Iterator<Item = (Rank, Fingerprint)> + Clone,
        op: String,
    ) -> Result<()> {
        let differs = calls.clone().find_map(|(_, call)| own.difference(&call));
        let Some(field) = differs else { return Ok(()) };
        let by_rank = calls.map(|(rank, call)| (rank, call.to_string())).collect();
        Err(Error::Mismatch { op, field, by_rank })
    }

    /// Converts the group's failure to this rank's error.
    pub(crate) fn error(&self, failure: &Failure, op: String, waited: Duration) -> Error {
        let by = failure.by;
        match failure.cause.clone() {
            Cause::Died { rank, .. } if rank == self.rank => {
                let reason = format!("rank {by} lost its connection to this rank");
                Error::Aborted { by, reason }
            }
            Cause::Died { rank, pid, how } => {
                let op = how.map_or_else(|| op.clone(), |how| format!("{op}: {how}"));
                Error::PeerDied { op, rank, pid }
            }
            Cause::Aborted { reason } => Error::Aborted { by, reason },
            // This rank was late, so the others have failed the group.
            Cause::TimedOut { missing, text } if missing.contains(&self.rank) => {
                Error::Aborted { by, reason: text }
            }
            Cause::TimedOut { missing, .. } => Error::Timeout { op, waited, missing },
            Cause::Mismatch { field, by_rank } => {
                let known = Fingerprint::FIELDS.into_iter().find(|known| *known == field);
                Error::Mismatch { op, field: known.unwrap_or("verb"), by_rank }
            }
        }
    }

    /// Returns the next step of a wait that has lasted for `waited`: spin, for `spin` if the policy
    /// is to spin and this rank has its own core; then yield the core; then sleep.
    pub(crate) fn wait_step(
        &self,
        policy: WaitPolicy,
        spin: Duration,
        waited: Duration,
    ) -> WaitStep {
        let (spin, pause) = match (policy, self.has_dedicated_core) {
            (WaitPolicy::Spin, true) => (spin, YIELD),
            (WaitPolicy::Spin, false) => (Duration::ZERO, YIELD),
            (WaitPolicy::Sleep, _) => (SPIN_BACKGROUND, Duration::ZERO),
        };
        match waited {
            waited if waited < spin => WaitStep::Spin,
            waited if waited < pause => WaitStep::Yield,
            _ => WaitStep::Sleep,
        }
    }
}

/// A backend for host memory: moves bytes and reports failures.
pub(crate) trait HostBackend: Debug + Send + Sync {
    fn core(&self) -> &GroupCore;

    /// As [`Backend::run`], on spans. `input` is only read, unless it is `output`.
    fn run_spans(&self, op: &OpDesc, input: Span<'_>, output: Span<'_>, wait: Wait) -> Result<()>;

    /// As [`Backend::exchange`].
    fn exchange_spans(&self, op: &OpDesc, blocks: Vec<SpanTransfer<'_>>, wait: Wait) -> Result<()>;

    /// As [`Backend::alloc`]. Records its failures in the core, except a caller's mistake.
    fn alloc_shared(&self, op: &OpDesc) -> Result<RawShared>;

    /// Returns the group's failure, if it is known without waiting.
    fn failure(&self) -> Option<Failure>;

    /// Fails the group on all ranks. Has no effect after another failure.
    fn fail_group(&self, cause: Cause);

    /// Fails the group, unless it has failed already; returns its failure as this rank's error in
    /// `op`.
    fn fail(&self, op: &OpDesc, cause: Cause) -> Error {
        self.fail_group(cause);
        let failure = self.failure().expect("it has failed now");
        self.core().error(&failure, op.to_string(), Duration::ZERO)
    }

    /// Fails the group on an error of this rank alone, because the peers wait for it. Returns an
    /// earlier failure of another rank, which may have caused the error.
    fn or_abort<T>(&self, op: &OpDesc, result: Result<T>) -> Result<T> {
        result.map_err(|error| {
            let reason = shortened(&error.to_string()).to_owned();
            match self.fail(op, Cause::Aborted { reason }) {
                Error::Aborted { by, .. } if by == self.core().rank => error,
                earlier => earlier,
            }
        })
    }
}

/// A [`Transfer`] with its memory as a span.
#[derive(Clone, Copy, Debug)]
pub(crate) struct SpanTransfer<'a> {
    pub(crate) peer: Rank,
    pub(crate) direction: Direction,
    pub(crate) dtype: DType,
    pub(crate) count: usize,
    pub(crate) memory: Span<'a>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Direction {
    Send,
    Receive,
}

impl<C: HostBackend> Backend for C {
    fn name(&self) -> &'static str {
        self.core().backend
    }

    fn reason(&self) -> &str {
        &self.core().reason
    }

    fn rank(&self) -> Rank {
        self.core().rank
    }

    fn world_size(&self) -> usize {
        self.core().world
    }

    fn forked(&self) -> bool {
        self.core().forked()
    }

    fn ready(&self) -> Result<()> {
        self.core().ready()
    }

    fn health(&self) -> Result<()> {
        let core = self.core();
        core.fork_check()?;
        let op = format!("group {}", core.name);
        let failure = || self.failure().map(|failure| core.error(&failure, op, Duration::ZERO));
        core.failed.get().cloned().or_else(failure).map_or(Ok(()), Err)
    }

    unsafe fn run(&self, op: &OpDesc, bufs: RawBufs, wait: Wait) -> Result<()> {
        let core = self.core();
        core.fork_check()?;
        let (size, world) = (op.dtype.size(), core.world);
        // SAFETY: the caller's promise; `run_spans` only reads the input.
        let input = unsafe { Span::new(bufs.input.cast_mut(), op.input_count(world) * size) };
        // SAFETY: the caller's promise.
        let output = unsafe { Span::new(bufs.output, op.output_count(world) * size) };
        let result = self.run_spans(op, input, output, wait);
        if op.dtype == DType::Bool {
            make_bools(output);
        }
        core.note_failure(result)
    }

    unsafe fn exchange(&self, op: &OpDesc, transfers: &[Transfer], wait: Wait) -> Result<()> {
        let core = self.core();
        core.fork_check()?;
        let block = |&Transfer { peer, dtype, count, memory }: &Transfer| {
            let (direction, ptr) = match memory {
                TransferMemory::Send(from) => (Direction::Send, from.cast_mut()),
                TransferMemory::Receive(to) => (Direction::Receive, to),
            };
            // SAFETY: the caller's promise; memory to send is only read.
            let memory = unsafe { Span::new(ptr, count * dtype.size()) };
            SpanTransfer { peer, direction, dtype, count, memory }
        };
        let blocks: Vec<_> = transfers.iter().map(block).collect();
        let received = |block: &&SpanTransfer<'_>| {
            block.direction == Direction::Receive && block.dtype == DType::Bool
        };
        let bools: Vec<_> = blocks.iter().filter(received).map(|block| block.memory).collect();
        let result = self.exchange_spans(op, blocks, wait);
        bools.into_iter().for_each(make_bools);
        core.note_failure(result)
    }

    fn alloc(&self, dtype: DType, count: usize) -> Result<RawShared> {
        self.core().fork_check()?;
        self.alloc_shared(&OpDesc { verb: Verb::Alloc, dtype, op: None, root: None, count })
    }

    fn abort(&self, reason: &str) {
        if !self.core().forked() {
            self.fail_group(Cause::Aborted { reason: shortened(reason).to_owned() });
        }
    }
}

/// Cuts a text that is sent to peers.
pub(crate) fn shortened(text: &str) -> &str {
    &text[..text.floor_char_boundary(REASON_BYTES)]
}

/// Makes every byte a valid `bool`, because a peer may have sent any byte.
fn make_bools(memory: Span<'_>) {
    // SAFETY: the operation is over, so only this rank accesses its output, which may be written.
    let bytes = unsafe { std::slice::from_raw_parts_mut(memory.ptr(), memory.len()) };
    bytes.iter_mut().filter(|byte| **byte > 1).for_each(|byte| *byte = 1);
}

/// Runs an operation of a group of one rank.
pub(crate) fn run_single_rank(op: &OpDesc, input: Span<'_>, output: Span<'_>) {
    match op.op {
        Some(reduce) => simd::fold(op.dtype, reduce, &[output], &[input]),
        None => output.copy_from(input),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn invalid_bools_become_true() {
        let mut bytes = [0, 1, 2, 255, 0];
        make_bools(Span::from_mut(&mut bytes));
        assert_eq!(bytes, [0, 1, 1, 1, 0]);
    }
}
