//! A stream of bytes from one rank to another, through a ring in shared memory.
//!
//! Every ordered pair of ranks has a ring, and two counters of bytes that only ever grow: how many
//! the sender has put in, and how many the receiver has taken out. Each is stored by one side only,
//! on cache lines of its own. Both ends know their own counter by heart and read only the other's,
//! which they do not trust: a value that no honest peer could have stored is an error, and never an
//! offset.
//!
//! The ends wait for nothing: they move what they can and say how much that was. Who waits, and how
//! a sleeper is woken, is their user's affair.
//!
//! The rings lie in memory that is not reserved until an end of theirs is made, so that the pairs
//! who never talk cost nothing, and running out of memory is still an error and not a signal.

use crate::sync::atomic::{AtomicU64, Ordering};
use std::io;
use std::sync::Arc;

use super::sys::Mapping;
use crate::span::Span;
use crate::{Error, Rank, Result};

/// Most bytes of a ring: a few pieces in flight, all of them in the nearer caches.
const RING_MAX: usize = 64 << 10;
/// Fewest bytes of a ring: a page.
const RING_MIN: usize = 4 << 10;
/// Bytes of the rings into which one rank sends, as long as each has a page.
const RINGS_OF_A_RANK: usize = 1 << 20;
/// Bytes of the counters of a pair. Processors fetch lines in pairs, so each has two.
const COUNTERS: usize = 256;
const PUT: usize = 0;
const TAKEN: usize = 128;

/// Where the rings of `world` ranks lie in a mapping: first all counters, then all rings.
#[derive(Clone, Copy, Debug)]
pub(super) struct Layout {
    world: usize,
    base: usize,
    rings: usize,
    ring: usize,
}

impl Layout {
    /// From byte `base` on, the start of a page.
    pub(super) fn new(world: usize, base: usize) -> Self {
        let rings = base + (world * world * COUNTERS).next_multiple_of(RING_MIN);
        let fair = RINGS_OF_A_RANK / world.next_power_of_two();
        Self { world, base, rings, ring: fair.clamp(RING_MIN, RING_MAX) }
    }

    /// The first byte after it.
    pub(super) fn end(&self) -> usize {
        self.rings + self.world * self.world * self.ring
    }

    fn pair(&self, from: Rank, to: Rank) -> usize {
        assert!(from < self.world && to < self.world && from != to, "two ranks of the group");
        from * self.world + to
    }
}

/// What both ends are made of.
#[derive(Debug)]
struct End {
    map: Arc<Mapping>,
    from: Rank,
    to: Rank,
    counters: usize,
    ring: usize,
    bytes: usize,
    /// This end's counter. What is stored for the other to see follows on `publish`.
    own: u64,
    /// As last stored.
    published: u64,
    /// The other end's counter, as last seen.
    seen: u64,
}

impl End {
    fn new(map: &Arc<Mapping>, layout: &Layout, from: Rank, to: Rank) -> Result<Self> {
        let pair = layout.pair(from, to);
        let (counters, ring) = (layout.base + pair * COUNTERS, layout.rings + pair * layout.ring);
        // Both ends do it: whichever comes first has the memory before it touches it.
        map.reserve(counters, COUNTERS)?;
        map.reserve(ring, layout.ring)?;
        let bytes = layout.ring;
        let map = Arc::clone(map);
        Ok(Self { map, from, to, counters, ring, bytes, own: 0, published: 0, seen: 0 })
    }

    fn counter(&self, which: usize) -> &AtomicU64 {
        self.map.word(self.counters + which)
    }

    /// Stores this end's counter, if it has changed; whether it has.
    fn publish(&mut self, which: usize) -> bool {
        let news = self.own != self.published;
        if news {
            self.published = self.own;
            // Release: pairs with the Acquire in `look`; the copies before it are done. SeqCst, so
            // that whoever looks after setting its bell sees it, or is woken.
            self.counter(which).store(self.own, Ordering::SeqCst);
        }
        news
    }

    /// Reads the other end's counter, which must lie in `self.seen..=self.seen + most`.
    fn look(&mut self, which: usize, most: u64) -> Result<()> {
        // Acquire and SeqCst: pairs with `publish`.
        let value = self.counter(which).load(Ordering::SeqCst);
        if value.wrapping_sub(self.seen) > most {
            let text = format!("a counter went from {} to {value}", self.seen);
            let garbled = io::Error::new(io::ErrorKind::InvalidData, text);
            let what = format!("the channel from rank {} to rank {}", self.from, self.to);
            return Err(Error::io(what, &garbled));
        }
        self.seen = value;
        Ok(())
    }

    /// The `len` bytes of the ring that follow this end's counter, in up to two parts.
    fn following(&self, len: usize) -> [Span<'_>; 2] {
        let ring = self.map.data(self.ring, self.bytes);
        let start = (self.own % self.bytes as u64) as usize;
        let first = len.min(self.bytes - start);
        [ring.part(start, first), ring.part(0, len - first)]
    }
}

/// The end that bytes go into.
#[derive(Debug)]
pub(super) struct Sender(End);

impl Sender {
    /// The one sender of this pair there may be.
    pub(super) fn new(map: &Arc<Mapping>, layout: &Layout, from: Rank, to: Rank) -> Result<Self> {
        Ok(Self(End::new(map, layout, from, to)?))
    }

    /// Sends as many of the bytes as there is room for; how many.
    #[cfg_attr(not(test), expect(dead_code, reason = "for a mesh that has other links too"))]
    pub(super) fn try_send(&mut self, bytes: Span<'_>) -> Result<usize> {
        let count = self.room(bytes.len())?.min(bytes.len());
        self.put(bytes.part(0, count));
        self.publish();
        Ok(count)
    }

    /// Bytes there is room for. Looks again only if it knows of less than `wanted`.
    pub(super) fn room(&mut self, wanted: usize) -> Result<usize> {
        let end = &mut self.0;
        if end.bytes - ((end.own - end.seen) as usize) < wanted {
            end.look(TAKEN, end.own - end.seen)?;
        }
        Ok(end.bytes - (end.own - end.seen) as usize)
    }

    /// Copies bytes in, for which there must be [`room`](Self::room). The receiver sees them after
    /// [`publish`](Self::publish).
    pub(super) fn put(&mut self, bytes: Span<'_>) {
        let end = &mut self.0;
        let free = end.bytes - (end.own - end.seen) as usize;
        assert!(bytes.len() <= free, "no more than there is room for");
        let [first, second] = end.following(bytes.len());
        first.copy_from(bytes.part(0, first.len()));
        second.copy_from(bytes.part(first.len(), second.len()));
        end.own += bytes.len() as u64;
    }

    /// Lets the receiver see what was put; whether that was anything.
    pub(super) fn publish(&mut self) -> bool {
        self.0.publish(PUT)
    }
}

/// The end that bytes come out of.
#[derive(Debug)]
pub(super) struct Receiver(End);

impl Receiver {
    /// The one receiver of this pair there may be.
    pub(super) fn new(map: &Arc<Mapping>, layout: &Layout, from: Rank, to: Rank) -> Result<Self> {
        Ok(Self(End::new(map, layout, from, to)?))
    }

    /// Receives as many bytes as have come and fit; how many.
    #[cfg_attr(not(test), expect(dead_code, reason = "for a mesh that has other links too"))]
    pub(super) fn try_recv(&mut self, into: Span<'_>) -> Result<usize> {
        let count = self.ready(into.len())?.min(into.len());
        self.take(into.part(0, count));
        self.publish();
        Ok(count)
    }

    /// Bytes that have come. Looks again only if it knows of less than `wanted`.
    pub(super) fn ready(&mut self, wanted: usize) -> Result<usize> {
        let end = &mut self.0;
        if ((end.seen - end.own) as usize) < wanted {
            end.look(PUT, end.bytes as u64 - (end.seen - end.own))?;
        }
        Ok((end.seen - end.own) as usize)
    }

    /// Copies bytes out, which must be [`ready`](Self::ready). Their room is the sender's again
    /// after [`publish`](Self::publish).
    pub(super) fn take(&mut self, into: Span<'_>) {
        let end = &mut self.0;
        assert!(into.len() as u64 <= end.seen - end.own, "no more than have come");
        let [first, second] = end.following(into.len());
        into.part(0, first.len()).copy_from(first);
        into.part(first.len(), second.len()).copy_from(second);
        end.own += into.len() as u64;
    }

    /// Gives the sender the room of what was taken; whether that was anything.
    pub(super) fn publish(&mut self) -> bool {
        self.0.publish(TAKEN)
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

    #[test]
    fn bytes_come_out_as_they_went_in() {
        let (mut sender, mut receiver, _map) = pair(2);
        let byte = |i: u32| (i.wrapping_mul(2_654_435_761) >> 24) as u8;
        let mut sent: Vec<u8> = (0..1_000_000).map(byte).collect();
        let mut got = vec![0; sent.len()];
        let (len, mut put, mut taken) = (sent.len(), 0, 0);
        for step in 1_usize.. {
            let some = (step * 7919 % 100_000).min(len - put);
            put += sender.try_send(Span::from_mut(&mut sent[put..][..some])).unwrap();
            let some = (step * 104_729 % 90_000).min(len - taken);
            taken += receiver.try_recv(Span::from_mut(&mut got[taken..][..some])).unwrap();
            assert!(put - taken <= RING_MAX);
            if taken == len {
                break;
            }
        }
        assert_eq!(got, sent);
    }

    #[test]
    fn two_threads_stream() {
        let (mut sender, mut receiver, _map) = pair(3);
        const WORDS: u64 = 200_000;
        std::thread::scope(|scope| {
            scope.spawn(move || {
                for word in 0..WORDS {
                    let mut bytes = word.to_le_bytes();
                    let mut put = 0;
                    while put < 8 {
                        put += sender.try_send(Span::from_mut(&mut bytes[put..])).unwrap();
                    }
                }
            });
            for word in 0..WORDS {
                let (mut bytes, mut got) = ([0; 8], 0);
                while got < 8 {
                    got += receiver.try_recv(Span::from_mut(&mut bytes[got..])).unwrap();
                }
                assert_eq!(u64::from_le_bytes(bytes), word);
            }
        });
    }

    #[test]
    fn a_counter_that_no_peer_could_store_is_an_error() {
        let (mut sender, mut receiver, map) = pair(2);
        sender.try_send(Span::from_mut(&mut [1; 100])).unwrap();
        assert_eq!(receiver.try_recv(Span::from_mut(&mut [0; 60])).unwrap(), 60);
        assert_eq!(sender.room(RING_MAX).unwrap(), RING_MAX - 40);
        let counters = receiver.0.counters;
        // Backwards, beyond what was ever sent, beyond the ring.
        for wrong in [59, 101, u64::MAX] {
            map.word(counters + TAKEN).store(wrong, Ordering::SeqCst);
            let error = sender.room(RING_MAX).unwrap_err();
            assert!(matches!(error, Error::Io { .. }), "{error}");
        }
        for wrong in [99, 61 + RING_MAX as u64, 0] {
            map.word(counters + PUT).store(wrong, Ordering::SeqCst);
            let error = receiver.ready(RING_MAX).unwrap_err();
            assert!(error.to_string().contains("from rank 0 to rank 1"), "{error}");
        }
        map.word(counters + PUT).store(60 + RING_MAX as u64, Ordering::SeqCst);
        assert_eq!(receiver.ready(RING_MAX).unwrap(), RING_MAX);
    }

    #[test]
    fn pairs_do_not_overlap_and_the_largest_group_is_no_larger_than_it_should_be() {
        for world in [1, 2, 3, 16, 17, 256] {
            let layout = Layout::new(world, 8192);
            assert!(layout.rings >= 8192 + world * world * COUNTERS);
            assert!(layout.ring.is_power_of_two());
            assert!(layout.end() - layout.rings <= world * RINGS_OF_A_RANK.max(world * RING_MIN));
        }
    }
}
