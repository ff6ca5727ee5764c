//! A byte stream from one rank to another, through a ring buffer in shared memory.
//!
//! Every ordered pair of ranks has a ring and two byte counters, which only grow: bytes put in by
//! the sender, and bytes taken out by the receiver. Each counter is stored by one side only, on its
//! own cache lines. Each end keeps a private copy of its counter and reads only the other's, which
//! is not trusted: a value that no correct peer could have stored is an error, and is never used as
//! an offset.
//!
//! The ends never wait: they move as much data as they can and return the amount. Their user
//! implements waiting and waking.
//!
//! The memory of a ring is not reserved until one of its ends is created. So pairs that never
//! communicate use no memory, and running out of memory is an error and not a signal.
//!
//! Used by the host backend's [`exchange`](super::exchange) and by the TCP backend within a
//! machine.

use crate::sync::atomic::Ordering;
use std::io;
use std::sync::Arc;

use super::sys::Mapping;
use crate::memory::{Route, Span};
use crate::net::stream::DuplexStream;
use crate::{Rank, Result};

/// Largest ring, in bytes: a few pieces in flight, all of them in the nearer caches.
const RING_MAX: usize = 64 << 10;
/// Smallest ring, in bytes: a page.
const RING_MIN: usize = 4 << 10;
/// Bytes moved before the counter is published.
const PUBLISH_BYTES: usize = 16 << 10;
/// Most bytes moved by one call, so that other peers get their turn.
pub(in crate::backend) const BUDGET: usize = 64 << 10;
/// Total size of the rings into which one rank sends, unless a ring would be smaller than a page.
const RING_BYTES_PER_RANK: usize = 1 << 20;
/// Bytes of a pair's counters. Processors fetch cache lines in pairs, so each counter has two.
const COUNTERS: usize = 256;
const PUT: usize = 0;
const TAKEN: usize = 128;
/// Offset of the word by which the receiver of a pair asks the sender to wake it, on a rarely
/// written cache line next to the sender's counter.
const ASLEEP: usize = 64;

/// Layout of the rings of `world` ranks in a mapping: all counters, then all rings.
#[derive(Clone, Copy, Debug)]
pub(in crate::backend) struct Layout {
    world: usize,
    base: usize,
    rings: usize,
    ring: usize,
}

impl Layout {
    /// Starts at byte `base`, which is the start of a page.
    pub(in crate::backend) fn new(world: usize, base: usize) -> Self {
        let rings = base + (world * world * COUNTERS).next_multiple_of(RING_MIN);
        let fair = RING_BYTES_PER_RANK / world.next_power_of_two();
        Self { world, base, rings, ring: fair.clamp(RING_MIN, RING_MAX) }
    }

    /// Offset of the first byte behind the layout.
    pub(in crate::backend) fn end(&self) -> usize {
        self.rings + self.world * self.world * self.ring
    }

    /// Offset of the word, initially 0, by which `sleeper` asks `waker` to wake it. Valid once an
    /// end of the channel between them exists.
    pub(in crate::backend) fn asleep(&self, sleeper: Rank, waker: Rank) -> usize {
        self.base + self.pair(waker, sleeper) * COUNTERS + ASLEEP
    }

    fn pair(&self, from: Rank, to: Rank) -> usize {
        assert!(from < self.world && to < self.world && from != to, "two ranks of the group");
        from * self.world + to
    }
}

/// One end of a channel: the sender, which copies into the ring, or the receiver, which copies out
/// of it.
#[derive(Debug)]
pub(in crate::backend) struct End {
    map: Arc<Mapping>,
    /// Offsets of this end's counter and of the other's.
    counters: [usize; 2],
    ring: usize,
    bytes: usize,
    /// By how much this end may be ahead of the other: the size of the ring for the sender, 0 for
    /// the receiver.
    ahead: u64,
    /// This end's counter; `publish` stores it for the other end.
    own: u64,
    /// The other end's counter as last read.
    seen: u64,
}

impl End {
    /// Creates the pair's only sender.
    pub(in crate::backend) fn sender(
        map: &Arc<Mapping>,
        layout: &Layout,
        [from, to]: [Rank; 2],
    ) -> Result<Self> {
        Self::new(map, layout, [from, to], [PUT, TAKEN], layout.ring as u64)
    }

    /// Creates the pair's only receiver.
    pub(in crate::backend) fn receiver(
        map: &Arc<Mapping>,
        layout: &Layout,
        [from, to]: [Rank; 2],
    ) -> Result<Self> {
        Self::new(map, layout, [from, to], [TAKEN, PUT], 0)
    }

    fn new(
        map: &Arc<Mapping>,
        layout: &Layout,
        [from, to]: [Rank; 2],
        counters: [usize; 2],
        ahead: u64,
    ) -> Result<Self> {
        let (pair, bytes) = (layout.pair(from, to), layout.ring);
        let (base, ring) = (layout.base + pair * COUNTERS, layout.rings + pair * bytes);
        // Both ends reserve it, because either may be the first to access it.
        map.reserve(base, COUNTERS)?;
        map.reserve(ring, bytes)?;
        let counters = counters.map(|counter| base + counter);
        Ok(Self { map: Arc::clone(map), counters, ring, bytes, ahead, own: 0, seen: 0 })
    }

    fn known(&self) -> usize {
        (self.seen + self.ahead - self.own) as usize
    }

    /// Bytes that this end can move. Reads the other's counter only if fewer than `wanted` are
    /// known.
    pub(in crate::backend) fn available(&mut self, wanted: usize) -> io::Result<usize> {
        if self.known() < wanted {
            // Acquire and SeqCst: pairs with `publish`.
            let value = self.map.word(self.counters[1]).load(Ordering::SeqCst);
            if value.wrapping_sub(self.seen) > (self.bytes - self.known()) as u64 {
                let text =
                    format!("invalid counter in shared memory: from {} to {value}", self.seen);
                return Err(io::Error::new(io::ErrorKind::InvalidData, text));
            }
            self.seen = value;
        }
        Ok(self.known())
    }

    /// Copies bytes, which must be [`available`](Self::available), into the ring or out of it.
    pub(in crate::backend) fn copy(&mut self, bytes: Span<'_>) {
        assert!(bytes.len() <= self.known(), "the bytes are available");
        let ring = self.map.data(self.ring, self.bytes);
        let start = (self.own % self.bytes as u64) as usize;
        let (first, second) = bytes.split_at(bytes.len().min(self.bytes - start));
        for (at, bytes) in [(start, first), (0, second)] {
            let part = ring.part(at, bytes.len());
            if self.ahead > 0 {
                part.copy_by(Route::Cached, bytes);
            } else {
                bytes.copy_from(part);
            }
        }
        self.own += bytes.len() as u64;
    }

    /// Makes copied bytes, or the space that they have left, available to the other end.
    pub(in crate::backend) fn publish(&self) {
        // Release: pairs with the Acquire in `available`; the copies before it are done. SeqCst, so
        // that a peer that reads it after setting its sleep flag sees it, or is woken.
        self.map.word(self.counters[0]).store(self.own, Ordering::SeqCst);
    }
}

/// Wakes the peer of a [`ChannelPair`] after data have moved.
pub(in crate::backend) trait PeerWaker {
    fn wake(&self);

    /// Returns an error if the peer has closed its end.
    fn check_open(&self) -> io::Result<()> {
        Ok(())
    }
}

/// The channels between this rank and a peer, one in each direction.
#[derive(Debug)]
pub(in crate::backend) struct ChannelPair<B> {
    pub(in crate::backend) waker: B,
    out: End,
    into: End,
}

impl<B: PeerWaker> ChannelPair<B> {
    /// Creates the only pair between this rank, `own`, and `peer`.
    pub(in crate::backend) fn new(
        map: &Arc<Mapping>,
        layout: &Layout,
        [own, peer]: [Rank; 2],
        waker: B,
    ) -> Result<Self> {
        let out = End::sender(map, layout, [own, peer])?;
        let into = End::receiver(map, layout, [peer, own])?;
        Ok(Self { waker, out, into })
    }

    /// Whether something can be received (if `receive`) or sent (if `send`).
    pub(in crate::backend) fn can_move(&mut self, receive: bool, send: bool) -> io::Result<bool> {
        Ok((receive && self.into.available(1)? > 0) || (send && self.out.available(1)? > 0))
    }
}

impl<B: PeerWaker> DuplexStream for ChannelPair<B> {
    fn try_send(&mut self, head: Span<'_>, body: Span<'_>) -> io::Result<usize> {
        let wanted = (head.len() + body.len()).min(BUDGET);
        let mut sent = 0;
        while sent < wanted {
            let most = (wanted - sent).min(PUBLISH_BYTES);
            let end = sent + self.out.available(most)?.min(most);
            if end == sent {
                break;
            }
            let (in_head, until) = (sent.min(head.len()), end.min(head.len()));
            self.out.copy(head.part(in_head, until - in_head));
            let (in_body, until) = (sent.max(head.len()), end.max(head.len()));
            self.out.copy(body.part(in_body - head.len(), until - in_body));
            self.out.publish();
            self.waker.wake();
            sent = end;
        }
        if sent < wanted {
            self.waker.check_open()?;
        }
        Ok(sent)
    }

    fn try_receive(&mut self, into: Span<'_>) -> io::Result<usize> {
        let wanted = into.len().min(BUDGET);
        let mut received = 0;
        while received < wanted {
            let most = (wanted - received).min(PUBLISH_BYTES);
            let some = self.into.available(most)?.min(most);
            if some == 0 {
                break;
            }
            self.into.copy(into.part(received, some));
            self.into.publish();
            self.waker.wake();
            received += some;
        }
        if received == 0 && wanted > 0 {
            self.waker.check_open()?;
        }
        Ok(received)
    }
}

#[cfg(test)]
mod tests {
    use super::super::sys;
    use super::*;

    fn pair(world: usize) -> (End, End, Arc<Mapping>) {
        let layout = Layout::new(world, 4096);
        let file = sys::memfd(c"test", layout.end(), 0).unwrap();
        let map = |file| Arc::new(Mapping::new(file, layout.end()).unwrap());
        let (one, two) = (map(file.try_clone().unwrap()), map(file));
        let sender = End::sender(&one, &layout, [0, 1]).unwrap();
        (sender, End::receiver(&two, &layout, [0, 1]).unwrap(), two)
    }

    /// Sends or receives as many bytes as are available.
    fn copy(end: &mut End, bytes: &mut [u8]) -> usize {
        let count = end.available(bytes.len()).unwrap().min(bytes.len());
        end.copy(Span::from_mut(&mut bytes[..count]));
        end.publish();
        count
    }

    #[test]
    fn bytes_are_received_as_sent() {
        let (mut sender, mut receiver, _map) = pair(2);
        let byte = |i: u32| (i.wrapping_mul(2_654_435_761) >> 24) as u8;
        let mut sent: Vec<u8> = (0..1_000_000).map(byte).collect();
        let mut got = vec![0; sent.len()];
        let (len, mut put, mut taken) = (sent.len(), 0, 0);
        for step in 1_usize.. {
            let some = (step * 7919 % 100_000).min(len - put);
            put += copy(&mut sender, &mut sent[put..][..some]);
            let some = (step * 104_729 % 90_000).min(len - taken);
            taken += copy(&mut receiver, &mut got[taken..][..some]);
            assert!(put - taken <= RING_MAX);
            if taken == len {
                break;
            }
        }
        assert_eq!(got, sent);
    }

    #[test]
    fn two_threads_stream_concurrently() {
        let (mut sender, mut receiver, _map) = pair(3);
        const WORDS: u64 = 200_000;
        std::thread::scope(|scope| {
            scope.spawn(move || {
                for word in 0..WORDS {
                    let mut bytes = word.to_le_bytes();
                    let mut put = 0;
                    while put < 8 {
                        put += copy(&mut sender, &mut bytes[put..]);
                    }
                }
            });
            for word in 0..WORDS {
                let (mut bytes, mut got) = ([0; 8], 0);
                while got < 8 {
                    got += copy(&mut receiver, &mut bytes[got..]);
                }
                assert_eq!(u64::from_le_bytes(bytes), word);
            }
        });
    }

    #[test]
    fn an_invalid_counter_of_the_peer_is_an_error() {
        let (mut sender, mut receiver, map) = pair(2);
        copy(&mut sender, &mut [1; 100]);
        assert_eq!(copy(&mut receiver, &mut [0; 60]), 60);
        assert_eq!(sender.available(RING_MAX).unwrap(), RING_MAX - 40);
        let [taken, put] = receiver.counters;
        // Backwards, beyond what was ever sent, beyond the ring.
        for wrong in [59, 101, u64::MAX] {
            map.word(taken).store(wrong, Ordering::SeqCst);
            let error = sender.available(RING_MAX).unwrap_err();
            assert_eq!(error.kind(), io::ErrorKind::InvalidData);
        }
        for wrong in [99, 61 + RING_MAX as u64, 0] {
            map.word(put).store(wrong, Ordering::SeqCst);
            let error = receiver.available(RING_MAX).unwrap_err();
            assert!(error.to_string().contains(&format!("to {wrong}")), "{error}");
        }
        map.word(put).store(60 + RING_MAX as u64, Ordering::SeqCst);
        assert_eq!(receiver.available(RING_MAX).unwrap(), RING_MAX);
    }

    #[test]
    fn rings_do_not_overlap_and_total_size_is_bounded() {
        for world in [1, 2, 3, 16, 17, 256] {
            let layout = Layout::new(world, 8192);
            assert!(layout.rings >= 8192 + world * world * COUNTERS);
            assert!(layout.ring.is_power_of_two());
            assert!(
                layout.end() - layout.rings <= world * RING_BYTES_PER_RANK.max(world * RING_MIN)
            );
        }
    }
}
