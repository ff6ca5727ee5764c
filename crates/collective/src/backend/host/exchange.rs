//! Point-to-point messages, moved concurrently.
//!
//! A message is a header with verb, type and count, which the receiver compares with the message that it
//! expects before it takes a byte, and the data. It goes through a [`PeerQueue`] as over TCP, over a pair
//! of [channels](super::channel). One loop moves a piece of every queue at a time, so that no order of
//! the transfers can deadlock.
//!
//! If nothing moves, the rank waits by the steps of [`call`](super::call). A wait ends when the group has
//! failed, when a peer has left, or when a peer has moved nothing for the timeout; data that arrived
//! before are received first.

use crate::sync::atomic::Ordering;
use std::io;
use std::sync::Arc;
use std::time::{Duration, Instant};

use super::call::{Call, MAX_SLEEP, POLLS, SPIN};
use super::channel::{ChannelPair, PeerWaker};
use super::segment::{Poison, Segment};
use super::sys;
use crate::backend::core::{SpanTransfer, WaitStep};
use crate::backend::tcp::peer_queue::{PeerQueue, ReceiveError};
use crate::{Error, Rank, Result, Verb};

/// This rank's channels by peer; `None` if not used yet.
pub(super) type Channels = Vec<Option<ChannelPair<SegmentWaker>>>;

/// Wakes a rank that sleeps on its futex in the segment.
#[derive(Debug)]
pub(super) struct SegmentWaker(Arc<Segment>, Rank);

impl PeerWaker for SegmentWaker {
    fn wake(&self) {
        self.0.wake(self.1);
    }
}

/// The transfers to and from one peer that are not complete.
#[derive(Debug)]
struct PeerExchange<'a> {
    peer: Rank,
    queue: PeerQueue<'a>,
    /// When it stopped moving.
    since: Option<Instant>,
}

impl PeerExchange<'_> {
    fn is_done(&self) -> bool {
        self.queue.all_sent() && self.queue.all_received()
    }

    /// Moves the data that can be moved now; returns whether there were any.
    fn progress(&mut self, call: &Call<'_>, channels: &mut Channels) -> Result<bool> {
        let (queue, peer) = (&mut self.queue, self.peer);
        let failed = |way: &str, error: &io::Error| {
            Error::io(format!("the channel {way} rank {peer}"), error)
        };
        let channel = channel(channels, peer);
        let sent = queue.send(channel).map_err(|error| failed("to", &error))?;
        let received = match queue.receive(channel) {
            Ok(received) => received,
            Err(ReceiveError::ConnectionLost(error)) => return Err(failed("from", &error)),
            Err(ReceiveError::Unexpected(expected, got)) => {
                let calls = expected.mismatch(got, (call.rank(), call.desc), peer);
                let (field, by_rank) = calls.ok_or_else(|| {
                    failed("from", &io::Error::new(io::ErrorKind::InvalidData, "invalid header"))
                })?;
                return Err(mismatch(call, field, by_rank));
            }
        };
        if sent || received {
            self.since = None;
        }
        Ok(sent || received)
    }
}

/// Moves all blocks. The call has been entered, unless it is a batch.
pub(super) fn run(
    call: &Call<'_>,
    channels: &mut Channels,
    blocks: &[SpanTransfer<'_>],
) -> Result<()> {
    let mut exchanges = open(call, channels, blocks)?;
    let mut wait = WaitState::default();
    loop {
        let mut moved = false;
        for exchange in &mut exchanges {
            moved |= exchange.progress(call, channels)?;
        }
        exchanges.retain(|exchange| !exchange.is_done());
        if exchanges.is_empty() {
            return Ok(());
        }
        if moved {
            wait = WaitState::default();
        } else {
            wait.step(call, channels, &mut exchanges)?;
        }
    }
}

/// Queues the blocks by peer, in order.
fn open<'a>(
    call: &Call<'_>,
    channels: &mut Channels,
    blocks: &[SpanTransfer<'a>],
) -> Result<Vec<PeerExchange<'a>>> {
    let (map, layout) = call.segment().channels();
    channels.resize_with(call.world(), || None);
    let mut exchanges: Vec<PeerExchange<'a>> = Vec::new();
    for block in blocks {
        let peer = block.peer;
        if channels[peer].is_none() {
            let waker = SegmentWaker(Arc::clone(&call.host.segment), peer);
            channels[peer] = Some(ChannelPair::new(map, &layout, [call.rank(), peer], waker)?);
        }
        let at =
            exchanges.binary_search_by_key(&peer, |exchange| exchange.peer).unwrap_or_else(|at| {
                exchanges
                    .insert(at, PeerExchange { peer, queue: PeerQueue::default(), since: None });
                at
            });
        exchanges[at].queue.message(call.desc.verb, block);
    }
    Ok(exchanges)
}

fn channel(channels: &mut Channels, peer: Rank) -> &mut ChannelPair<SegmentWaker> {
    channels[peer].as_mut().expect("opened with its queue")
}

/// Fails the group because two ranks called different operations. Only the first failure counts.
fn mismatch(call: &Call<'_>, field: &'static str, by_rank: Vec<(Rank, String)>) -> Error {
    if call.segment().poison().is_none() {
        let calls = serde_json::to_string(&(field, &by_rank)).expect("plain numbers and strings");
        call.segment().write_note(call.rank(), &calls, &[]);
        call.segment().set_poison(Poison::Mismatch { by: call.rank() });
    }
    Error::Mismatch { op: call.name(), field, by_rank }
}

/// State of a wait while no queue moves.
#[derive(Debug, Default)]
struct WaitState {
    polls: u32,
    since: Option<Instant>,
    /// Why the wait ends, once the data that have arrived are received.
    failure: Option<Failure>,
    timed_out: bool,
}

/// Why no more data will arrive.
#[derive(Clone, Copy, Debug)]
enum Failure {
    Poison(Poison),
    /// The peer of a message has entered an operation of all ranks instead.
    EnteredCollective(Rank),
}

impl WaitState {
    /// Waits briefly, after no queue could move.
    fn step(
        &mut self,
        call: &Call<'_>,
        channels: &mut Channels,
        exchanges: &mut [PeerExchange<'_>],
    ) -> Result<()> {
        self.polls += 1;
        if self.polls < POLLS {
            std::hint::spin_loop();
            return Ok(());
        }
        self.step_slowly(call, channels, exchanges)
    }

    #[cold]
    fn step_slowly(
        &mut self,
        call: &Call<'_>,
        channels: &mut Channels,
        exchanges: &mut [PeerExchange<'_>],
    ) -> Result<()> {
        let now = Instant::now();
        let waited = now - *self.since.get_or_insert(now);
        let idle = |exchange: &mut PeerExchange<'_>| now - *exchange.since.get_or_insert(now);
        let longest = exchanges.iter_mut().map(idle).max().unwrap_or_default();
        match self.failure {
            Some(Failure::Poison(poison)) => {
                call.segment().set_poison(poison);
                return Err(call.failure(poison, longest));
            }
            Some(Failure::EnteredCollective(peer)) => {
                return Err(entered_collective(call, exchanges, peer));
            }
            None if self.timed_out => return Err(timed_out(call, exchanges, now)),
            None => {}
        }
        self.failure = failure(call, exchanges);
        self.timed_out = longest >= call.timeout;
        if self.failure.is_some() || self.timed_out {
            return Ok(());
        }
        match call.host.core.wait_step(call.policy, SPIN, waited) {
            WaitStep::Spin => std::hint::spin_loop(),
            WaitStep::Yield => std::thread::yield_now(),
            WaitStep::Sleep => {
                sleep(call, channels, exchanges, MAX_SLEEP.min(call.timeout - longest));
            }
        }
        Ok(())
    }
}

fn failure(call: &Call<'_>, exchanges: &[PeerExchange<'_>]) -> Option<Failure> {
    let left = || exchanges.iter().find_map(|exchange| call.left(exchange.peer));
    let poison = call.segment().poison().or_else(left).map(Failure::Poison);
    let entered = |peer: &Rank| {
        let entry = call.segment().entry(*peer, call.next);
        // Acquire: pairs with the entry's Release; the fingerprint can be read.
        call.desc.verb == Verb::Batch && entry.load(Ordering::Acquire) > call.next
    };
    poison.or_else(|| {
        let mut peers = exchanges.iter().map(|exchange| exchange.peer);
        peers.find(entered).map(Failure::EnteredCollective)
    })
}

/// Fails the group because the peer of a message has entered an operation of all ranks instead.
fn entered_collective(call: &Call<'_>, exchanges: &[PeerExchange<'_>], peer: Rank) -> Error {
    let exchange = exchanges.iter().find(|exchange| exchange.peer == peer);
    let waits = exchange.and_then(|exchange| exchange.queue.waits_for(peer)).unwrap_or_default();
    let called = call.segment().fingerprint(peer, call.next).to_string();
    let mut by_rank = vec![(call.rank(), waits), (peer, called)];
    by_rank.sort_unstable();
    mismatch(call, "verb", by_rank)
}

/// Sleeps on this rank's futex, unless the wait is already over.
fn sleep(call: &Call<'_>, channels: &mut Channels, exchanges: &[PeerExchange<'_>], tick: Duration) {
    let flag = Segment::sleep_flag(call.segment(), call.rank());
    // SeqCst: either the checks below see what a peer published, or the peer, which reads the flag after
    // publishing, sees it set.
    flag.store(1, Ordering::SeqCst);
    let can_move = |PeerExchange { peer, queue, .. }: &PeerExchange<'_>| {
        // An invalid channel counts as ready: moving it reports the error.
        channel(channels, *peer).can_move(!queue.all_received(), !queue.all_sent()).unwrap_or(true)
    };
    let awake = failure(call, exchanges).is_some() || exchanges.iter().any(can_move);
    if !awake {
        sys::futex_wait(flag, 1, tick);
    }
    flag.store(0, Ordering::SeqCst);
}

/// Fails the group because of the peers that have moved nothing for the timeout.
fn timed_out(call: &Call<'_>, exchanges: &[PeerExchange<'_>], now: Instant) -> Error {
    let waited =
        |exchange: &PeerExchange<'_>| exchange.since.map_or(Duration::ZERO, |since| now - since);
    let late = exchanges.iter().filter(|&exchange| waited(exchange) >= call.timeout);
    let missing: Vec<Rank> = late.map(|exchange| exchange.peer).collect();
    let longest = exchanges.iter().map(waited).max().unwrap_or_default();
    let error = Error::Timeout { op: call.name(), waited: longest, missing: missing.clone() };
    call.segment().write_note(call.rank(), &error.to_string(), &missing);
    call.segment().set_poison(Poison::TimedOut { by: call.rank() });
    error
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::GroupOptions;
    use crate::backend::Backend as _;
    use crate::backend::host::threads;

    #[test]
    fn peers_report_the_same_mismatch_as_the_receiver() {
        let hosts = threads::group(3, &GroupOptions::default()).unwrap();
        let op = crate::backend::core::BARRIER;
        let mut state = hosts[0].state.lock();
        let call = hosts[0].call(
            &mut state,
            &op,
            crate::BufferLocation::Private,
            super::super::DEFAULT_WAIT,
        );
        let calls = vec![(0, "a message of 8 f16 from rank 2".to_owned()), (2, "barrier".into())];
        let own = mismatch(&call, "count", calls.clone());
        assert!(matches!(own, Error::Mismatch { .. }));
        let peer = hosts[1].health().unwrap_err();
        let Error::Mismatch { field: "count", by_rank, .. } = peer else { panic!("{peer}") };
        assert_eq!(by_rank, calls);
    }
}
