//! The backend over libgloo: gloo moves the bytes, over TCP; what they mean is ours.
//!
//! Gloo's sharp edges (Debian's version of 2022 and PyTorch's alike) decide the shape:
//!
//! * A message of another length than its receiver expects ends the process, from a thread of
//!   gloo's where nothing can be caught, and one of another type is garbage. So ranks exchange
//!   fingerprints of fixed length before each operation ([`Turn::enter`]), and messages between
//!   pairs are announced by a header of fixed length ([`messages`]): gloo only ever sees lengths
//!   that both ends have agreed on.
//! * Gloo cannot abort, a wait that times out closes every connection, and nobody is named. So
//!   waits are ours, in slices of a millisecond between which a rank looks at what its peers say
//!   on connections of their own ([`control`]).
//! * Gloo folds around a ring, so the result depends on the offset. With
//!   [`Determinism::RankOrder`] it only moves blocks between pairs and we fold ([`fold`]). With
//!   [`Determinism::Fast`] `all_reduce` and `reduce` are gloo's own, with our fold of two.
//!
//! When time is over on one rank, each says whom it waits for, so that [`Error::Timeout`] names who
//! is waited for and does not wait.
//!
//! A rank has two connections to each peer, one for control and one for data, and one thread of
//! gloo's. Data on the wire are not encrypted, and whoever can connect to a rank's ports while the
//! group is made can disturb it: trusted networks only. Gloo writes to sockets that may be closed:
//! the process must ignore `SIGPIPE`, as Rust programs do.
//!
//! Memory of [`alloc`](Backend::alloc) is ordinary memory: over TCP there is nothing to save.

#![expect(unsafe_code, reason = "turns the memory of an operation into spans, and calls C")]

mod control;
mod fold;
mod join;
mod mesh;
mod messages;
mod sys;
mod turn;

use std::mem::ManuallyDrop;
use std::sync::{Arc, OnceLock};
use std::thread::JoinHandle;
use std::time::Duration;

use parking_lot::Mutex;

use self::control::{Cause, Control, Letter};
pub(crate) use self::join::join;
use self::mesh::Mesh;
use self::turn::Turn;
use super::block::Block;
use super::host::ForkGuard;
use super::meet::Joining;
use super::{Backend, RawBufs, RawShared, Transfer, Wait};
use crate::span::Span;
use crate::{DType, Determinism, Error, OpDesc, Rank, Result, Verb, simd};

/// One rank of a group over gloo.
#[derive(Debug)]
pub(crate) struct Gloo {
    rank: Rank,
    world: usize,
    name: String,
    timeout: Duration,
    determinism: Determinism,
    /// Digest of the configuration that all ranks share.
    config_digest: u8,
    /// Why the group is over gloo.
    reason: String,
    /// In a fork all of gloo stays where it is: its thread is in the parent only.
    control: ManuallyDrop<Control>,
    state: ManuallyDrop<Mutex<State>>,
    /// This rank's first failure.
    failed: OnceLock<Error>,
    guard: ForkGuard,
}

/// Where this rank is in the group's history.
#[derive(Debug)]
struct State {
    /// Operations so far in which all ranks meet.
    seq: u64,
    /// This rank's fingerprint.
    own: Option<Letter>,
    /// Every peer's fingerprints of even and odd operations: the receives are posted ahead.
    prints: [Vec<Option<Letter>>; 2],
    /// Messages so far to and from each rank.
    sent: Vec<u64>,
    received: Vec<u64>,
    /// Headers of messages under way. Those of a failed operation stay: gloo reads nothing more from
    /// a connection on which a message comes for a buffer that is gone.
    headers: Vec<Arc<Letter>>,
    /// Gone once an operation has failed, and with it what gloo had begun.
    data: Option<Arc<Mesh>>,
    /// Closes the connections for data after a failure.
    closing: Option<JoinHandle<()>>,
    /// What peers send to be folded.
    scratch: Vec<u8>,
}

impl Gloo {
    fn new(joining: &Joining<'_>, reason: String, control: Control, state: State) -> Result<Self> {
        let options = joining.options;
        Ok(Self {
            rank: joining.rank,
            world: joining.world(),
            name: options.name.clone(),
            timeout: options.timeout,
            determinism: options.determinism,
            config_digest: joining.shared.digest(),
            reason,
            control: ManuallyDrop::new(control),
            state: ManuallyDrop::new(Mutex::new(state)),
            failed: OnceLock::new(),
            guard: ForkGuard::new()?,
        })
    }

    fn fork_check(&self) -> Result<()> {
        if self.guard.forked() {
            return Err(Error::InvalidArgument(
                "a process group belongs to the process that made it, not to a fork".into(),
            ));
        }
        Ok(())
    }

    fn turn<'a>(&'a self, op: &'a OpDesc, timeout: Option<Duration>) -> Turn<'a> {
        Turn::new(self, op, timeout.unwrap_or(self.timeout))
    }

    /// Remembers the first failure and tells the peers of it.
    fn tell<T>(&self, result: Result<T>) -> Result<T> {
        if let Err(error) = &result {
            self.failed.get_or_init(|| error.clone());
            // All ranks see a mismatch of fingerprints themselves; one of messages has been told.
            if !matches!(error, Error::Mismatch { .. }) {
                self.control.fail(Cause::Aborted { by: self.rank, reason: error.to_string() });
            }
        }
        result
    }

    /// The same after a failure of what all have entered, or of messages between pairs: ends what
    /// gloo had begun. To close a connection waits for a round of gloo's thread, 10 ms long, which the
    /// caller need not: gloo has let go of the memory.
    fn settle<T>(&self, state: &mut State, result: Result<T>) -> Result<T> {
        let result = self.tell(result);
        if result.is_err()
            && let Some(data) = state.data.take()
        {
            let close = std::thread::Builder::new().name("gloo-close".into());
            // Without a thread it is closed here.
            state.closing = close.spawn(move || drop(data)).ok();
        }
        result
    }

    fn perform(
        &self,
        turn: &Turn<'_>,
        state: &mut State,
        input: Span<'_>,
        output: Span<'_>,
    ) -> Result<()> {
        let fast = self.determinism == Determinism::Fast;
        match turn.op.verb {
            Verb::AllReduce | Verb::Reduce if fast => fold::by_gloo(turn, state, output),
            Verb::AllReduce => fold::all_reduce(turn, state, output),
            Verb::Reduce => fold::reduce(turn, state, output),
            Verb::ReduceScatter => fold::reduce_scatter(turn, state, input, output),
            Verb::Broadcast => messages::broadcast(turn, state, output),
            Verb::AllGather | Verb::Counts => messages::all_gather(turn, state, input, output),
            Verb::Barrier => Ok(()),
            verb => Err(Error::Unsupported { backend: "gloo", what: verb.to_string() }),
        }
    }
}

impl Backend for Gloo {
    fn name(&self) -> &'static str {
        "gloo"
    }

    fn reason(&self) -> &str {
        &self.reason
    }

    fn rank(&self) -> Rank {
        self.rank
    }

    fn world_size(&self) -> usize {
        self.world
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

    unsafe fn run(&self, op: &OpDesc, bufs: RawBufs, wait: Wait) -> Result<()> {
        self.fork_check()?;
        let mut state = self.state.lock();
        self.ready()?;
        let size = op.dtype.size();
        let (input_len, output_len) =
            (op.input_count(self.world) * size, op.output_count(self.world) * size);
        // SAFETY: the caller's promise; it is only copied from, unless it is the output.
        let input = unsafe { Span::new(bufs.input.cast_mut(), input_len) };
        // SAFETY: the caller's promise.
        let output = unsafe { Span::new(bufs.output, output_len) };
        let mut turn = self.turn(op, wait.timeout);
        self.tell(turn.enter(&mut state))?;
        let result = match self.world {
            1 => {
                alone(op, input, output);
                Ok(())
            }
            _ => self.perform(&turn, &mut state, input, output),
        };
        self.settle(&mut state, result)
    }

    unsafe fn exchange(&self, op: &OpDesc, transfers: &[Transfer], wait: Wait) -> Result<()> {
        self.fork_check()?;
        let mut state = self.state.lock();
        self.ready()?;
        let mut turn = self.turn(op, wait.timeout);
        // SAFETY: the caller's promise.
        let moves = unsafe { messages::moves(transfers) };
        let result = match op.verb {
            Verb::Batch => messages::batch(&turn, &mut state, transfers, &moves),
            _ => {
                self.tell(turn.enter(&mut state))?;
                messages::transfer(&turn, &state, &moves)
            }
        };
        self.settle(&mut state, result)
    }

    fn alloc(&self, dtype: DType, count: usize) -> Result<RawShared> {
        self.fork_check()?;
        let mut state = self.state.lock();
        self.ready()?;
        let op = OpDesc { verb: Verb::Alloc, dtype, op: None, root: None, count };
        let layout = Block::layout(&op)?;
        let mut turn = self.turn(&op, None);
        // A rank without memory says so instead of coming.
        let none = || {
            let error = std::io::Error::from(std::io::ErrorKind::OutOfMemory);
            Error::io(format!("obtaining {} bytes", layout.size()), &error)
        };
        let result = Block::new(layout).ok_or_else(none);
        let result = result.and_then(|block| turn.enter(&mut state).map(|()| block));
        self.tell(result).map(Block::share)
    }

    fn abort(&self, reason: &str) {
        if !self.guard.forked() {
            let reason = reason[..reason.floor_char_boundary(320)].to_owned();
            self.control.fail(Cause::Aborted { by: self.rank, reason });
        }
    }
}

impl Drop for Gloo {
    fn drop(&mut self) {
        // A fork's copy says no goodbye for the parent, and cannot wait for a thread it lacks.
        if self.guard.forked() {
            return;
        }
        self.control.leave();
        if let Some(closing) = self.state.get_mut().closing.take() {
            // It does nothing that panics.
            let _ = closing.join();
        }
        // SAFETY: dropped once, here.
        unsafe { ManuallyDrop::drop(&mut self.state) };
        // SAFETY: likewise.
        unsafe { ManuallyDrop::drop(&mut self.control) };
    }
}

/// A group of one: the verbs without the peers.
fn alone(op: &OpDesc, input: Span<'_>, output: Span<'_>) {
    match op.op {
        Some(reduce) => simd::fold(op.dtype, reduce, &[output], &[input]),
        None => output.copy_from(input),
    }
}
