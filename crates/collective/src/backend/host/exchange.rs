//! Point-to-point messages, moved concurrently.
//!
//! A message is a header with verb, type and count, which the receiver compares with the message
//! that it expects before it takes a byte, and the data. It goes through a [`PeerQueue`] as over
//! TCP, over a pair of [channels](super::channel). One loop moves a piece of every queue at a time,
//! so that no order of the transfers can deadlock.
//!
//! If nothing moves, the rank waits by the steps of [`call`](super::call). A wait ends when the
//! group has failed, when a peer has left, or when a peer has moved nothing for the timeout; data
//! that arrived before are received first.

use crate::sync::atomic::Ordering;
use std::io;
use std::sync::Arc;
use std::time::{Duration, Instant};

use super::call::{Call, MAX_SLEEP, POLLS, SPIN};
use super::channel::{ChannelPair, PeerWaker};
use super::segment::Segment;
use crate::backend::core::{SpanTransfer, WaitStep};
use crate::backend::failure::{Cause, Failure};
use crate::backend::peer_queue::{PeerQueue, ReceiveError, unexpected};
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
            Err(ReceiveError::Unexpected(frames)) => {
                let cause = unexpected(*frames, (call.rank(), call.desc), peer);
                return Err(call.fail(cause, Duration::ZERO));
            }
        };
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
            wait.step(call, channels, &exchanges)?;
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
                exchanges.insert(at, PeerExchange { peer, queue: PeerQueue::default() });
                at
            });
        exchanges[at].queue.message(call.desc.verb, block);
    }
    Ok(exchanges)
}

fn channel(channels: &mut Channels, peer: Rank) -> &mut ChannelPair<SegmentWaker> {
    channels[peer].as_mut().expect("opened with its queue")
}

/// State of a wait while no queue moves.
#[derive(Debug, Default)]
struct WaitState {
    polls: u32,
    since: Option<Instant>,
    /// Why the wait ends, once the data that have arrived are received.
    failure: Option<Failure>,
}

impl WaitState {
    /// Waits briefly, after no queue could move.
    fn step(
        &mut self,
        call: &Call<'_>,
        channels: &mut Channels,
        exchanges: &[PeerExchange<'_>],
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
        exchanges: &[PeerExchange<'_>],
    ) -> Result<()> {
        let waited = self.since.get_or_insert_with(Instant::now).elapsed();
        if let Some(failure) = &self.failure {
            return Err(call.fail_by(failure, waited));
        }
        self.failure = failure(call, exchanges, waited);
        if self.failure.is_some() {
            return Ok(());
        }
        match call.host.core.wait_step(call.policy, SPIN, waited) {
            WaitStep::Spin => std::hint::spin_loop(),
            WaitStep::Yield => std::thread::yield_now(),
            WaitStep::Sleep => call.sleep(MAX_SLEEP.min(call.timeout - waited), || {
                // An invalid channel counts as ready: moving it reports the error.
                let mut can_move = |PeerExchange { peer, queue }: &PeerExchange<'_>| {
                    let channel = channel(channels, *peer);
                    channel.can_move(!queue.all_received(), !queue.all_sent()).unwrap_or(true)
                };
                failure(call, exchanges, waited).is_some() || exchanges.iter().any(&mut can_move)
            }),
        }
        Ok(())
    }
}

/// Why no more data will arrive.
fn failure(call: &Call<'_>, exchanges: &[PeerExchange<'_>], waited: Duration) -> Option<Failure> {
    let (segment, by) = (call.segment(), call.rank());
    if segment.has_failed() {
        return segment.failure();
    }
    if let Some(left) = exchanges.iter().find(|exchange| segment.has_left(exchange.peer)) {
        return Some(call.left(left.peer));
    }
    // The peer of a message has entered an operation of all ranks instead. Acquire: pairs with the
    // entry's Release; the fingerprint can be read.
    let entered = |exchange: &&PeerExchange<'_>| {
        let entry = segment.entry(exchange.peer, call.next);
        call.desc.verb == Verb::Batch && entry.load(Ordering::Acquire) > call.next
    };
    let cause = if let Some(PeerExchange { peer, queue }) = exchanges.iter().find(entered) {
        let called = segment.fingerprint(*peer, call.next).to_string();
        let mut by_rank = vec![(by, queue.waits_for(*peer).unwrap_or_default()), (*peer, called)];
        by_rank.sort_unstable();
        Cause::Mismatch { field: "verb".into(), by_rank }
    } else if waited >= call.timeout {
        let missing = exchanges.iter().map(|exchange| exchange.peer).collect();
        call.timeout_cause(missing, waited)
    } else {
        return None;
    };
    Some(Failure { by, cause })
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
        let cause = Cause::Mismatch { field: "count".into(), by_rank: calls.clone() };
        let own = call.fail(cause, Duration::ZERO);
        assert!(matches!(own, Error::Mismatch { .. }));
        let peer = hosts[1].health().unwrap_err();
        let Error::Mismatch { field: "count", by_rank, .. } = peer else { panic!("{peer}") };
        assert_eq!(by_rank, calls);
    }
}
