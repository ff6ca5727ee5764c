//! Messages between pairs of ranks, all at once.
//!
//! A message is a header (its verb, type and count), which the receiver compares with what it expects
//! before it takes a byte, and its data: a [`Lane`] as over TCP, whose link is a pair of
//! [channels](super::channel). One loop moves all lanes of this rank a piece at a time, so that no
//! order among the transfers can lock the ranks up.
//!
//! A lane that cannot move waits for its peer, by the ladder of [`turn`](super::turn). Waits end
//! when the group has failed, when a peer has left, or when a peer has not moved its lane for the
//! timeout; but first whatever has come is received.

use crate::sync::atomic::Ordering;
use std::io;
use std::sync::Arc;
use std::time::{Duration, Instant};

use super::channel::{Bell, Pair};
use super::segment::{Poison, Segment};
use super::sys;
use super::turn::{LOOKS, SPIN, TICK, Turn};
use crate::backend::core::{SpanTransfer, WaitStep};
use crate::backend::tcp::lane::{Fault, Lane};
use crate::{Error, Rank, Result, Verb};

/// This rank's channels, as far as it has used them, by peer.
pub(super) type Channels = Vec<Option<Pair<OfSegment>>>;

/// The word of the segment that a peer sleeps on.
#[derive(Debug)]
pub(super) struct OfSegment(Arc<Segment>, Rank);

impl Bell for OfSegment {
    fn ring(&self) {
        self.0.ring(self.1);
    }
}

/// What is left to be moved to a peer and from it.
#[derive(Debug)]
struct Trade<'a> {
    peer: Rank,
    lane: Lane<'a>,
    /// When it was first seen not to move.
    since: Option<Instant>,
}

impl Trade<'_> {
    fn is_done(&self) -> bool {
        self.lane.all_sent() && self.lane.all_received()
    }

    /// Moves what can be moved now; whether that was anything.
    fn advance(&mut self, turn: &Turn<'_>, channels: &mut Channels) -> Result<bool> {
        let (lane, peer) = (&mut self.lane, self.peer);
        let failed = |way: &str, error: &io::Error| {
            Error::io(format!("the channel {way} rank {peer}"), error)
        };
        let channel = channel(channels, peer);
        let sent = lane.send(channel).map_err(|error| failed("to", &error))?;
        let received = match lane.receive(channel) {
            Ok(received) => received,
            Err(Fault::Lost(error)) => return Err(failed("from", &error)),
            Err(Fault::Unexpected(expected, got)) => {
                let calls = expected.mismatch(got, (turn.rank(), turn.op), peer);
                let (field, by_rank) = calls.ok_or_else(|| {
                    failed("from", &io::Error::new(io::ErrorKind::InvalidData, "no message"))
                })?;
                return Err(mismatch(turn, field, by_rank));
            }
        };
        if sent || received {
            self.since = None;
        }
        Ok(sent || received)
    }
}

/// Moves all blocks. The turn has been entered, if its verb is one that all ranks enter.
pub(super) fn run(
    turn: &Turn<'_>,
    channels: &mut Channels,
    blocks: &[SpanTransfer<'_>],
) -> Result<()> {
    let mut trades = open(turn, channels, blocks)?;
    let mut pause = Pause::default();
    loop {
        let mut moved = false;
        for trade in &mut trades {
            moved |= trade.advance(turn, channels)?;
        }
        trades.retain(|trade| !trade.is_done());
        if trades.is_empty() {
            return Ok(());
        }
        if moved {
            pause = Pause::default();
        } else {
            pause.step(turn, channels, &mut trades)?;
        }
    }
}

/// Queues the blocks, in the order of peers and then their own.
fn open<'a>(
    turn: &Turn<'_>,
    channels: &mut Channels,
    blocks: &[SpanTransfer<'a>],
) -> Result<Vec<Trade<'a>>> {
    let (map, layout) = turn.segment().channels();
    channels.resize_with(turn.world(), || None);
    let mut trades: Vec<Trade<'a>> = Vec::new();
    for block in blocks {
        let peer = block.peer;
        if channels[peer].is_none() {
            let bell = OfSegment(Arc::clone(&turn.host.segment), peer);
            channels[peer] = Some(Pair::new(map, &layout, [turn.rank(), peer], bell)?);
        }
        let at = trades.binary_search_by_key(&peer, |trade| trade.peer).unwrap_or_else(|at| {
            trades.insert(at, Trade { peer, lane: Lane::default(), since: None });
            at
        });
        trades[at].lane.message(turn.op.verb, block);
    }
    Ok(trades)
}

fn channel(channels: &mut Channels, peer: Rank) -> &mut Pair<OfSegment> {
    channels[peer].as_mut().expect("opened with its lane")
}

/// Fails the group because two ranks called different things; the first failure is the one that
/// counts.
fn mismatch(turn: &Turn<'_>, field: &'static str, by_rank: Vec<(Rank, String)>) -> Error {
    if turn.segment().poison().is_none() {
        let calls = serde_json::to_string(&(field, &by_rank)).expect("plain numbers and strings");
        turn.segment().write_note(turn.rank(), &calls, &[]);
        turn.segment().set_poison(Poison::Mismatch { by: turn.rank() });
    }
    Error::Mismatch { op: turn.name(), field, by_rank }
}

/// A wait of all lanes so far.
#[derive(Debug, Default)]
struct Pause {
    looks: u32,
    since: Option<Instant>,
    /// Why the wait ends, once all that has come is received.
    failure: Option<Failure>,
    late: bool,
}

/// Why no more is to be expected.
#[derive(Clone, Copy, Debug)]
enum Failure {
    Poison(Poison),
    /// The peer of a message has entered an operation of all ranks instead.
    Stray(Rank),
}

impl Pause {
    /// Waits a little, after a look at all lanes has found none that moves.
    fn step(
        &mut self,
        turn: &Turn<'_>,
        channels: &mut Channels,
        trades: &mut [Trade<'_>],
    ) -> Result<()> {
        self.looks += 1;
        if self.looks < LOOKS {
            std::hint::spin_loop();
            return Ok(());
        }
        self.climb(turn, channels, trades)
    }

    #[cold]
    fn climb(
        &mut self,
        turn: &Turn<'_>,
        channels: &mut Channels,
        trades: &mut [Trade<'_>],
    ) -> Result<()> {
        let now = Instant::now();
        let waited = now - *self.since.get_or_insert(now);
        let owing = |trade: &mut Trade<'_>| now - *trade.since.get_or_insert(now);
        let longest = trades.iter_mut().map(owing).max().unwrap_or_default();
        match self.failure {
            Some(Failure::Poison(poison)) => {
                turn.segment().set_poison(poison);
                return Err(turn.failure(poison, longest));
            }
            Some(Failure::Stray(peer)) => return Err(stray(turn, trades, peer)),
            None if self.late => return Err(timed_out(turn, trades, now)),
            None => {}
        }
        self.failure = failure(turn, trades);
        self.late = longest >= turn.timeout;
        if self.failure.is_some() || self.late {
            return Ok(());
        }
        match turn.host.core.wait_step(turn.policy, SPIN, waited) {
            WaitStep::Spin => std::hint::spin_loop(),
            WaitStep::Yield => std::thread::yield_now(),
            WaitStep::Sleep => sleep(turn, channels, trades, TICK.min(turn.timeout - longest)),
        }
        Ok(())
    }
}

fn failure(turn: &Turn<'_>, trades: &[Trade<'_>]) -> Option<Failure> {
    let left = || trades.iter().find_map(|trade| turn.left(trade.peer));
    let poison = turn.segment().poison().or_else(left).map(Failure::Poison);
    let entered = |peer: &Rank| {
        let entry = turn.segment().entry(*peer, turn.next);
        // Acquire: pairs with the entry's Release; the fingerprint can be read.
        turn.op.verb == Verb::Batch && entry.load(Ordering::Acquire) > turn.next
    };
    poison.or_else(|| trades.iter().map(|trade| trade.peer).find(entered).map(Failure::Stray))
}

/// Fails the group because the peer of a message has called something else.
fn stray(turn: &Turn<'_>, trades: &[Trade<'_>], peer: Rank) -> Error {
    let trade = trades.iter().find(|trade| trade.peer == peer);
    let waits = trade.and_then(|trade| trade.lane.waits_for(peer)).unwrap_or_default();
    let called = turn.segment().fingerprint(peer, turn.next).to_string();
    let mut by_rank = vec![(turn.rank(), waits), (peer, called)];
    by_rank.sort_unstable();
    mismatch(turn, "verb", by_rank)
}

/// Sleeps on this rank's bell, unless there is a reason not to.
fn sleep(turn: &Turn<'_>, channels: &mut Channels, trades: &[Trade<'_>], tick: Duration) {
    let bell = Segment::bell(turn.segment(), turn.rank());
    // SeqCst: either the looks below see what a peer published, or the peer, who looks at the bell
    // after publishing, sees it set.
    bell.store(1, Ordering::SeqCst);
    let can_move = |Trade { peer, lane, .. }: &Trade<'_>| {
        // What is wrong with a channel is found by moving it.
        channel(channels, *peer).can_move(!lane.all_received(), !lane.all_sent()).unwrap_or(true)
    };
    let awake = failure(turn, trades).is_some() || trades.iter().any(can_move);
    if !awake {
        sys::futex_wait(bell, 1, tick);
    }
    bell.store(0, Ordering::SeqCst);
}

/// Fails the group, because of the peers who have not moved their lanes for the timeout.
fn timed_out(turn: &Turn<'_>, trades: &[Trade<'_>], now: Instant) -> Error {
    let waited = |trade: &Trade<'_>| trade.since.map_or(Duration::ZERO, |since| now - since);
    let owing = trades.iter().filter(|&trade| waited(trade) >= turn.timeout);
    let missing: Vec<Rank> = owing.map(|trade| trade.peer).collect();
    let longest = trades.iter().map(waited).max().unwrap_or_default();
    let error = Error::Timeout { op: turn.name(), waited: longest, missing: missing.clone() };
    turn.segment().write_note(turn.rank(), &error.to_string(), &missing);
    turn.segment().set_poison(Poison::TimedOut { by: turn.rank() });
    error
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::GroupOptions;
    use crate::backend::Backend as _;
    use crate::backend::host::threads;

    #[test]
    fn a_noted_mismatch_is_told_as_the_receiver_tells_it() {
        let hosts = threads::group(3, &GroupOptions::default()).unwrap();
        let op = crate::backend::core::BARRIER;
        let mut state = hosts[0].state.lock();
        let turn = hosts[0].turn(
            &mut state,
            &op,
            crate::BufferLocation::Private,
            super::super::DEFAULT_WAIT,
        );
        let calls = vec![(0, "a message of 8 f16 from rank 2".to_owned()), (2, "barrier".into())];
        let own = mismatch(&turn, "count", calls.clone());
        assert!(matches!(own, Error::Mismatch { .. }));
        let told = hosts[1].health().unwrap_err();
        let Error::Mismatch { field: "count", by_rank, .. } = told else { panic!("{told}") };
        assert_eq!(by_rank, calls);
    }
}
