//! A byte stream from one rank to another, through a ring buffer in shared memory.
//!
//! Every ordered pair of ranks has a ring and two byte counters, which only grow: bytes put in by the
//! sender, and bytes taken out by the receiver. Each counter is stored by one side only, on its own cache
//! lines. Each end keeps a private copy of its counter and reads only the other's, which is not trusted:
//! a value that no correct peer could have stored is an error, and is never used as an offset.
//!
//! The ends never wait: they move as much data as they can and return the amount. Their user implements
//! waiting and waking.
//!
//! The memory of a ring is not reserved until one of its ends is created. So pairs that never communicate
//! use no memory, and running out of memory is an error and not a signal.
//!
//! Used by the host backend's [`exchange`](super::exchange) and by the TCP backend within a machine.

use crate::sync::atomic::{AtomicU64, Ordering};
use std::io;
use std::sync::Arc;

use super::sys::Mapping;
use crate::backend::tcp::frame::HEADER;
use crate::backend::tcp::stream::DuplexStream;
use crate::span::Span;
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
/// Offset of the word by which the receiver of a pair asks the sender to wake it, on a rarely written
/// cache line next to the sender's counter.
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

    /// Offset of the word, initially 0, by which `sleeper` asks `waker` to wake it. Valid once an end of
    /// the channel between them exists.
    pub(in crate::backend) fn asleep(&self, sleeper: Rank, waker: Rank) -> usize {
        self.base + self.pair(waker, sleeper) * COUNTERS + ASLEEP
    }

    fn pair(&self, from: Rank, to: Rank) -> usize {
        assert!(from < self.world && to < self.world && from != to, "two ranks of the group");
        from * self.world + to
    }
}

/// The part that sender and receiver share.
#[derive(Debug)]
struct End {
    map: Arc<Mapping>,
    counters: usize,
    ring: usize,
    bytes: usize,
    /// This end's counter; `publish` stores it for the other end.
    own: u64,
    /// This end's counter as last stored.
    published: u64,
    /// The other end's counter as last read.
    seen: u64,
}

impl End {
    fn new(map: &Arc<Mapping>, layout: &Layout, from: Rank, to: Rank) -> Result<Self> {
        let pair = layout.pair(from, to);
        let (counters, ring) = (layout.base + pair * COUNTERS, layout.rings + pair * layout.ring);
        // Both ends reserve it, because either may be the first to access it.
        map.reserve(counters, COUNTERS)?;
        map.reserve(ring, layout.ring)?;
        let bytes = layout.ring;
        let map = Arc::clone(map);
        Ok(Self { map, counters, ring, bytes, own: 0, published: 0, seen: 0 })
    }

    fn counter(&self, which: usize) -> &AtomicU64 {
        self.map.word(self.counters + which)
    }

    /// Stores this end's counter if it has changed; returns whether it has.
    fn publish(&mut self, which: usize) -> bool {
        let news = self.own != self.published;
        if news {
            self.published = self.own;
            // Release: pairs with the Acquire in `poll`; the copies before it are done. SeqCst, so that a
            // peer that reads it after setting its sleep flag sees it, or is woken.
            self.counter(which).store(self.own, Ordering::SeqCst);
        }
        news
    }

    /// Reads the other end's counter, which must be in `self.seen..=self.seen + most`.
    fn poll(&mut self, which: usize, most: u64) -> io::Result<()> {
        // Acquire and SeqCst: pairs with `publish`.
        let value = self.counter(which).load(Ordering::SeqCst);
        if value.wrapping_sub(self.seen) > most {
            let text = format!("invalid counter in shared memory: from {} to {value}", self.seen);
            return Err(io::Error::new(io::ErrorKind::InvalidData, text));
        }
        self.seen = value;
        Ok(())
    }

    /// The `len` bytes of the ring from this end's counter on, in up to two parts.
    fn following(&self, len: usize) -> [Span<'_>; 2] {
        let ring = self.map.data(self.ring, self.bytes);
        let start = (self.own % self.bytes as u64) as usize;
        let first = len.min(self.bytes - start);
        [ring.part(start, first), ring.part(0, len - first)]
    }
}

/// The sending end.
#[derive(Debug)]
pub(in crate::backend) struct Sender(End);

impl Sender {
    /// Creates the pair's only sender.
    pub(in crate::backend) fn new(
        map: &Arc<Mapping>,
        layout: &Layout,
        from: Rank,
        to: Rank,
    ) -> Result<Self> {
        Ok(Self(End::new(map, layout, from, to)?))
    }

    /// Free bytes in the ring. Reads the receiver's counter only if fewer than `wanted` are known to be
    /// free.
    pub(in crate::backend) fn room(&mut self, wanted: usize) -> io::Result<usize> {
        let end = &mut self.0;
        if end.bytes - ((end.own - end.seen) as usize) < wanted {
            end.poll(TAKEN, end.own - end.seen)?;
        }
        Ok(end.bytes - (end.own - end.seen) as usize)
    }

    /// Copies `bytes` in, for which there must be [`room`](Self::room). The receiver sees them after
    /// [`publish`](Self::publish).
    pub(in crate::backend) fn put(&mut self, bytes: Span<'_>) {
        let [first, second] = self.next(bytes.len());
        first.copy_from(bytes.part(0, first.len()));
        second.copy_from(bytes.part(first.len(), second.len()));
        self.0.own += bytes.len() as u64;
    }

    /// Same as [`put`](Self::put).
    pub(in crate::backend) fn put_slice(&mut self, bytes: &[u8]) {
        let [first, second] = self.next(bytes.len());
        let (head, tail) = bytes.split_at(first.len());
        first.copy_from_slice(head);
        second.copy_from_slice(tail);
        self.0.own += bytes.len() as u64;
    }

    fn next(&self, len: usize) -> [Span<'_>; 2] {
        let free = self.0.bytes - (self.0.own - self.0.seen) as usize;
        assert!(len <= free, "the bytes fit into the ring");
        self.0.following(len)
    }

    /// Makes the bytes that were put visible to the receiver; returns whether there were any.
    pub(in crate::backend) fn publish(&mut self) -> bool {
        self.0.publish(PUT)
    }
}

/// The receiving end.
#[derive(Debug)]
pub(in crate::backend) struct Receiver(End);

impl Receiver {
    /// Creates the pair's only receiver.
    pub(in crate::backend) fn new(
        map: &Arc<Mapping>,
        layout: &Layout,
        from: Rank,
        to: Rank,
    ) -> Result<Self> {
        Ok(Self(End::new(map, layout, from, to)?))
    }

    /// Bytes that can be taken. Reads the sender's counter only if fewer than `wanted` are known.
    pub(in crate::backend) fn ready(&mut self, wanted: usize) -> io::Result<usize> {
        let end = &mut self.0;
        if ((end.seen - end.own) as usize) < wanted {
            end.poll(PUT, end.bytes as u64 - (end.seen - end.own))?;
        }
        Ok((end.seen - end.own) as usize)
    }

    /// Copies bytes out, which must be [`ready`](Self::ready). The sender may reuse their space after
    /// [`publish`](Self::publish).
    pub(in crate::backend) fn take(&mut self, into: Span<'_>) {
        let end = &mut self.0;
        assert!(into.len() as u64 <= end.seen - end.own, "the bytes are ready");
        let [first, second] = end.following(into.len());
        into.part(0, first.len()).copy_from(first);
        into.part(first.len(), second.len()).copy_from(second);
        end.own += into.len() as u64;
    }

    /// Frees the space of the bytes that were taken; returns whether there were any.
    pub(in crate::backend) fn publish(&mut self) -> bool {
        self.0.publish(TAKEN)
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
    out: Sender,
    into: Receiver,
    /// The part of a header that has been received.
    header: [u8; HEADER],
    filled: usize,
}

impl<B: PeerWaker> ChannelPair<B> {
    /// Creates the only pair between this rank, `own`, and `peer`.
    pub(in crate::backend) fn new(
        map: &Arc<Mapping>,
        layout: &Layout,
        [own, peer]: [Rank; 2],
        waker: B,
    ) -> Result<Self> {
        let out = Sender::new(map, layout, own, peer)?;
        let into = Receiver::new(map, layout, peer, own)?;
        Ok(Self { waker, out, into, header: [0; HEADER], filled: 0 })
    }

    /// Whether something can be received (if `receive`) or sent (if `send`).
    pub(in crate::backend) fn can_move(&mut self, receive: bool, send: bool) -> io::Result<bool> {
        Ok((receive && self.into.ready(1)? > 0) || (send && self.out.room(1)? > 0))
    }
}

impl<B: PeerWaker> DuplexStream for ChannelPair<B> {
    fn try_send(&mut self, head: &[u8], body: Span<'_>) -> io::Result<usize> {
        let wanted = (head.len() + body.len()).min(BUDGET);
        let mut sent = 0;
        while sent < wanted {
            let most = (wanted - sent).min(PUBLISH_BYTES);
            let end = sent + self.out.room(most)?.min(most);
            if end == sent {
                break;
            }
            let (in_head, until) = (sent.min(head.len()), end.min(head.len()));
            self.out.put_slice(&head[in_head..until]);
            let (in_body, until) = (sent.max(head.len()), end.max(head.len()));
            self.out.put(body.part(in_body - head.len(), until - in_body));
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
            let some = self.into.ready(most)?.min(most);
            if some == 0 {
                break;
            }
            self.into.take(into.part(received, some));
            self.into.publish();
            self.waker.wake();
            received += some;
        }
        if received == 0 && wanted > 0 {
            self.waker.check_open()?;
        }
        Ok(received)
    }

    fn try_header(&mut self) -> io::Result<Option<[u8; HEADER]>> {
        let mut header = self.header;
        self.filled += self.try_receive(Span::from_mut(&mut header[self.filled..]))?;
        self.header = header;
        if self.filled < HEADER {
            return Ok(None);
        }
        self.filled = 0;
        Ok(Some(header))
    }
}

#[cfg(test)]
mod tests {
    use super::super::sys;
    use super::*;

    fn pair(world: usize) -> (Sender, Receiver, Arc<Mapping>) {
        let layout = Layout::new(world, 4096);
        let file = sys::memfd(c"test", layout.end(), 0).unwrap();
        let map = |file| Arc::new(Mapping::new(file, layout.end()).unwrap());
        let (one, two) = (map(file.try_clone().unwrap()), map(file));
        let sender = Sender::new(&one, &layout, 0, 1).unwrap();
        (sender, Receiver::new(&two, &layout, 0, 1).unwrap(), two)
    }

    /// Sends as many bytes as there is room for.
    fn send(sender: &mut Sender, bytes: &mut [u8]) -> usize {
        let count = sender.room(bytes.len()).unwrap().min(bytes.len());
        sender.put(Span::from_mut(&mut bytes[..count]));
        sender.publish();
        count
    }

    /// Receives as many bytes as are ready.
    fn receive(receiver: &mut Receiver, into: &mut [u8]) -> usize {
        let count = receiver.ready(into.len()).unwrap().min(into.len());
        receiver.take(Span::from_mut(&mut into[..count]));
        receiver.publish();
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
            put += send(&mut sender, &mut sent[put..][..some]);
            let some = (step * 104_729 % 90_000).min(len - taken);
            taken += receive(&mut receiver, &mut got[taken..][..some]);
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
                        put += send(&mut sender, &mut bytes[put..]);
                    }
                }
            });
            for word in 0..WORDS {
                let (mut bytes, mut got) = ([0; 8], 0);
                while got < 8 {
                    got += receive(&mut receiver, &mut bytes[got..]);
                }
                assert_eq!(u64::from_le_bytes(bytes), word);
            }
        });
    }

    #[test]
    fn an_invalid_counter_of_the_peer_is_an_error() {
        let (mut sender, mut receiver, map) = pair(2);
        send(&mut sender, &mut [1; 100]);
        assert_eq!(receive(&mut receiver, &mut [0; 60]), 60);
        assert_eq!(sender.room(RING_MAX).unwrap(), RING_MAX - 40);
        let counters = receiver.0.counters;
        // Backwards, beyond what was ever sent, beyond the ring.
        for wrong in [59, 101, u64::MAX] {
            map.word(counters + TAKEN).store(wrong, Ordering::SeqCst);
            let error = sender.room(RING_MAX).unwrap_err();
            assert_eq!(error.kind(), io::ErrorKind::InvalidData);
        }
        for wrong in [99, 61 + RING_MAX as u64, 0] {
            map.word(counters + PUT).store(wrong, Ordering::SeqCst);
            let error = receiver.ready(RING_MAX).unwrap_err();
            assert!(error.to_string().contains(&format!("to {wrong}")), "{error}");
        }
        map.word(counters + PUT).store(60 + RING_MAX as u64, Ordering::SeqCst);
        assert_eq!(receiver.ready(RING_MAX).unwrap(), RING_MAX);
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
