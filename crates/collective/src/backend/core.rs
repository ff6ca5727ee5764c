//! What the backends for memory of the host have in common: who a rank is, how it compares calls,
//! waits, and remembers a failure.
//!
//! What is beneath is a [`Carrier`], which moves bytes and tells failures. [`Backend`] is implemented
//! here, once for all of them.
//!
//! The invariant: a rank's first failure is the one that later calls are refused for, and nothing of a
//! group is touched in a fork of the process that made it.

#![expect(unsafe_code, reason = "turns the memory of an operation into spans")]

use std::fmt::Debug;
use std::sync::OnceLock;
use std::time::Duration;

use super::host::ForkGuard;
use super::tcp::frame::{Cause, Failure};
use super::{Backend, RawBufs, RawShared, Transfer, TransferMemory, Wait, WaitPolicy};
use crate::span::Span;
use crate::{
    BufferLocation, DType, Error, Fingerprint, GroupOptions, OpDesc, Rank, Result, Verb, simd,
};

/// The longest reason of an abort that is told.
pub(crate) const REASON_BYTES: usize = 320;
/// How long a caller yields before it sleeps.
const YIELD: Duration = Duration::from_micros(if cfg!(loom) { 0 } else { 300 });
/// How long the communication thread spins before it sleeps.
const SPIN_BACKGROUND: Duration = Duration::from_micros(if cfg!(loom) { 0 } else { 2 });
/// How a backend waits for peers in between, on a caller's thread.
pub(crate) const STANDING: Wait = Wait { policy: WaitPolicy::Spin, timeout: None };

/// A call for which all ranks meet, and which moves nothing.
pub(crate) const BARRIER: OpDesc =
    OpDesc { verb: Verb::Barrier, dtype: DType::U8, op: None, root: None, count: 0 };

/// One rank's view of its group, whatever carries the data.
#[derive(Debug)]
pub(crate) struct GroupCore {
    /// The backend's name.
    pub(crate) backend: &'static str,
    /// Why it is this backend.
    pub(crate) reason: String,
    pub(crate) rank: Rank,
    pub(crate) world: usize,
    /// The group's name.
    pub(crate) name: String,
    pub(crate) timeout: Duration,
    /// Every rank of this machine can have a core to itself, so that spinning takes nothing from a peer.
    pub(crate) has_dedicated_core: bool,
    /// Digest of the configuration that all ranks share.
    config_digest: u8,
    /// This rank's first failure.
    failed: OnceLock<Error>,
    guard: ForkGuard,
}

/// What to do next in a wait.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Rung {
    Spin,
    Yield,
    Sleep,
}

impl GroupCore {
    /// For a rank of `world`, of which `neighbours` share this machine's cores.
    pub(crate) fn new(
        (backend, reason): (&'static str, String),
        (rank, world): (Rank, usize),
        neighbours: usize,
        options: &GroupOptions,
        config_digest: u8,
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
            config_digest,
            failed: OnceLock::new(),
            guard: ForkGuard::new()?,
        })
    }

    /// The other ranks, from the next one round, so that not all go to the same one first.
    pub(crate) fn peers(&self) -> impl Iterator<Item = Rank> + use<> {
        (self.rank + 1..self.world).chain(0..self.rank)
    }

    pub(crate) fn forked(&self) -> bool {
        self.guard.forked()
    }

    fn fork_check(&self) -> Result<()> {
        if self.forked() {
            return Err(Error::InvalidArgument(
                "a process group belongs to the process that made it, not to a fork".into(),
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

    /// Remembers the first failure.
    pub(crate) fn note_failure<T>(&self, result: Result<T>) -> Result<T> {
        if let Err(error) = &result {
            self.failed.get_or_init(|| error.clone());
        }
        result
    }

    /// For example `all_reduce #17 of group default`.
    pub(crate) fn name_of(&self, verb: Verb, seq: u64) -> String {
        format!("{verb} #{seq} of group {}", self.name)
    }

    /// What this rank says when it enters an operation.
    pub(crate) fn fingerprint(
        &self,
        op: &OpDesc,
        seq: u64,
        location: BufferLocation,
    ) -> Fingerprint {
        op.fingerprint(seq, location).with_config(self.config_digest)
    }

    /// Compares this rank's call with those that are known, in rank order.
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

    /// The group's failure, as this rank tells it.
    pub(crate) fn error(&self, failure: &Failure, op: String, waited: Duration) -> Error {
        let by = failure.by;
        match failure.cause.clone() {
            Cause::Died { rank, .. } if rank == self.rank => {
                let reason = format!("rank {by} has lost its connection to this rank");
                Error::Aborted { by, reason }
            }
            Cause::Died { rank, pid, how } => {
                let op = how.map_or_else(|| op.clone(), |how| format!("{op}: {how}"));
                Error::PeerDied { op, rank, pid }
            }
            Cause::Aborted { reason } => Error::Aborted { by, reason },
            // For the rank that came too late, the others have given up.
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

    /// The ladder of all waits: spin while that is likely to help, for `spin` on a caller's thread that
    /// has a core; yield the core; sleep.
    pub(crate) fn rung(&self, policy: WaitPolicy, spin: Duration, waited: Duration) -> Rung {
        let (spin, pause) = match (policy, self.has_dedicated_core) {
            (WaitPolicy::Spin, true) => (spin, YIELD),
            (WaitPolicy::Spin, false) => (Duration::ZERO, YIELD),
            (WaitPolicy::Sleep, _) => (SPIN_BACKGROUND, Duration::ZERO),
        };
        match waited {
            waited if waited < spin => Rung::Spin,
            waited if waited < pause => Rung::Yield,
            _ => Rung::Sleep,
        }
    }
}

/// What moves the bytes of a group.
pub(crate) trait Carrier: Debug + Send + Sync {
    fn core(&self) -> &GroupCore;

    /// As [`Backend::run`], on checked memory, of which `input` is only read unless it is `output`. The
    /// group's core sees to groups of one rank, once they have been entered, and to what fails.
    fn perform(&self, op: &OpDesc, input: Span<'_>, output: Span<'_>, wait: Wait) -> Result<()>;

    /// As [`Backend::exchange`].
    fn trade(&self, op: &OpDesc, blocks: Vec<Block<'_>>, wait: Wait) -> Result<()>;

    /// As [`Backend::alloc`]; notes what fails, but for a caller's mistake.
    fn obtain(&self, op: &OpDesc) -> Result<RawShared>;

    /// Why the group has failed, as far as is known without waiting; `op` is what a rank that left did
    /// not wait for.
    fn failure(&self, op: &str) -> Option<Failure>;

    /// Tells all ranks that this one gives the group up; of no effect after another failure.
    fn give_up(&self, reason: &str);
}

/// One block on its way from this rank or to it.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Block<'a> {
    pub(crate) peer: Rank,
    pub(crate) way: Way,
    pub(crate) dtype: DType,
    pub(crate) count: usize,
    pub(crate) memory: Span<'a>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Way {
    Out,
    In,
}

impl<C: Carrier> Backend for C {
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
        let told = || self.failure(&op).map(|failure| core.error(&failure, op, Duration::ZERO));
        core.failed.get().cloned().or_else(told).map_or(Ok(()), Err)
    }

    unsafe fn run(&self, op: &OpDesc, bufs: RawBufs, wait: Wait) -> Result<()> {
        let core = self.core();
        core.fork_check()?;
        let (size, world) = (op.dtype.size(), core.world);
        // SAFETY: the caller's promise; a carrier only reads the input.
        let input = unsafe { Span::new(bufs.input.cast_mut(), op.input_count(world) * size) };
        // SAFETY: the caller's promise.
        let output = unsafe { Span::new(bufs.output, op.output_count(world) * size) };
        let result = self.perform(op, input, output, wait);
        if op.dtype == DType::Bool {
            make_bools(output);
        }
        core.note_failure(result)
    }

    unsafe fn exchange(&self, op: &OpDesc, transfers: &[Transfer], wait: Wait) -> Result<()> {
        let core = self.core();
        core.fork_check()?;
        let block = |&Transfer { peer, dtype, count, memory }: &Transfer| {
            let (way, ptr) = match memory {
                TransferMemory::Send(from) => (Way::Out, from.cast_mut()),
                TransferMemory::Receive(to) => (Way::In, to),
            };
            // SAFETY: the caller's promise; what goes out is only read.
            let memory = unsafe { Span::new(ptr, count * dtype.size()) };
            Block { peer, way, dtype, count, memory }
        };
        let blocks: Vec<_> = transfers.iter().map(block).collect();
        let received = |block: &&Block<'_>| block.way == Way::In && block.dtype == DType::Bool;
        let bools: Vec<_> = blocks.iter().filter(received).map(|block| block.memory).collect();
        let result = self.trade(op, blocks, wait);
        bools.into_iter().for_each(make_bools);
        core.note_failure(result)
    }

    fn alloc(&self, dtype: DType, count: usize) -> Result<RawShared> {
        self.core().fork_check()?;
        self.obtain(&OpDesc { verb: Verb::Alloc, dtype, op: None, root: None, count })
    }

    fn abort(&self, reason: &str) {
        if !self.core().forked() {
            self.give_up(&reason[..reason.floor_char_boundary(REASON_BYTES)]);
        }
    }
}

/// Makes every byte a `bool`: a peer may have sent any.
fn make_bools(memory: Span<'_>) {
    // SAFETY: the operation is over, so only this rank touches its output, which may be written.
    let bytes = unsafe { std::slice::from_raw_parts_mut(memory.ptr(), memory.len()) };
    bytes.iter_mut().filter(|byte| **byte > 1).for_each(|byte| *byte = 1);
}

/// A group of one: the verbs without the peers.
pub(crate) fn alone(op: &OpDesc, input: Span<'_>, output: Span<'_>) {
    match op.op {
        Some(reduce) => simd::fold(op.dtype, reduce, &[output], &[input]),
        None => output.copy_from(input),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bytes_that_are_no_bools_become_true() {
        let mut bytes = [0, 1, 2, 255, 0];
        make_bools(Span::from_mut(&mut bytes));
        assert_eq!(bytes, [0, 1, 1, 1, 0]);
    }
}
