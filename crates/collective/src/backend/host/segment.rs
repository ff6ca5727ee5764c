//! The control segment of a group: who has entered what, who sleeps, who failed.
//!
//! Layout, in bytes. Every word that one rank writes and others wait for is on that rank's own cache
//! lines.
//!
//! ```text
//! 0          header page: +0 magic, +8 world size, +64 poison, +128 shared file's descriptor
//! 4096       one block of 512 per rank:
//!              +0 staged, +8 folded, +16 drained   chunk counters, only ever growing
//!              +64 bell                            1 while the rank sleeps (futex)
//!              +128 gone                           1 once the rank has left
//!              +136 note length, +144 missing ranks (4 words), +192 note text (320)
//! SLOTS      two slots per rank, used in turn: +0 seq, +8 fingerprint, +48 data of up to 16 bytes,
//!              +64 data of up to 8 KiB
//! STAGES     per rank six of 256 KiB, or three of 512 KiB if there are two ranks, used in turn
//! CHANNELS   a ring per ordered pair of ranks, see [`channel`](super::channel)
//! ```
//!
//! A rank only ever stores into its own block, slots and stages, except for the poison word (first
//! failure wins) and the bells (set by the sleeper, cleared by whoever wakes it).

use std::ffi::CStr;
use std::fs::File;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::sync::atomic::compiler_fence;

use super::cgroup;
use super::channel::Layout;
use super::sys::{self, Mapping};
use crate::op::Fingerprint;
use crate::span::Span;
use crate::sync::atomic::{AtomicU32, AtomicU64, Ordering, fence};
use crate::{Error, Rank, Result};

/// Ranks a group may have.
pub(super) const MAX_RANKS: usize = 256;
/// Largest payload of a slot.
pub(super) const FLAT_BYTES: usize = if cfg!(loom) { 64 } else { 8 << 10 };
/// Bytes of a chunk that fits into a stage of any group.
pub(super) const CHUNK_BYTES: usize = if cfg!(loom) { 64 } else { 256 << 10 };
/// The smallest part of a stage that a chunk takes.
const MIN_PART: usize = if cfg!(loom) { 64 } else { 8 << 10 };

const NAME: &CStr = c"collective";
const MAGIC: u64 = u64::from_le_bytes(*b"collsg01");
const POISON: usize = 64;
const SHARED_FD: usize = 128;
const BLOCKS: usize = 4096;
const BLOCK: usize = 512;
const BELL: usize = 64;
const GONE: usize = 128;
const NOTE_LEN: usize = 136;
const MISSING: usize = 144;
const LIFE: usize = 176;
const NOTE: usize = 192;
const NOTE_BYTES: usize = if cfg!(loom) { 8 } else { BLOCK - NOTE };
const SLOT_LINE: usize = 8 + 8 * Fingerprint::WORDS;
const SLOT_DATA: usize = 64;
const SLOT: usize = SLOT_DATA + FLAT_BYTES;

/// A rank's chunk counters.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Counter {
    /// Its data of the chunk lie in its stage.
    Staged = 0,
    /// Its shard of the chunk is folded.
    Folded = 8,
    /// It reads nothing of the chunk any more.
    Drained = 16,
}

/// Why a group failed, as all ranks can read it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Poison {
    /// The process of a rank ended.
    Died { rank: Rank, pid: u32 },
    /// A rank dropped its group while it was needed.
    Left { rank: Rank },
    /// A rank called `abort`; the reason is its note.
    Aborted { by: Rank },
    /// A rank's wait timed out; who was missing stands in its block, the operation is its note.
    TimedOut { by: Rank },
    /// A rank received from another what it did not expect; its note, JSON, tells what both called.
    Mismatch { by: Rank },
}

impl Poison {
    fn encode(self) -> u64 {
        let (kind, rank, more) = match self {
            Self::Died { rank, pid } => (1, rank, u64::from(pid)),
            Self::Left { rank } => (2, rank, 0),
            Self::Aborted { by } => (3, by, 0),
            Self::TimedOut { by } => (4, by, 0),
            Self::Mismatch { by } => (5, by, 0),
        };
        kind << 56 | (rank as u64) << 32 | more
    }

    fn decode(word: u64, world: usize) -> Option<Self> {
        let (rank, more) = ((word >> 32 & 0xff_ffff) as usize, word as u32);
        if rank >= world {
            return None;
        }
        match word >> 56 {
            1 => Some(Self::Died { rank, pid: more }),
            2 => Some(Self::Left { rank }),
            3 => Some(Self::Aborted { by: rank }),
            4 => Some(Self::TimedOut { by: rank }),
            5 => Some(Self::Mismatch { by: rank }),
            _ => None,
        }
    }
}

/// The segment, mapped.
#[derive(Debug)]
pub(super) struct Segment {
    map: Arc<Mapping>,
    pub(super) world: usize,
    /// Sleepers' heavy fences reach this process.
    fenced_by_sleepers: bool,
}

impl Segment {
    /// Bytes of the segment of a group.
    pub(super) fn bytes(world: usize) -> usize {
        Layout::new(world, channels(world)).end()
    }

    /// A new, empty segment; rank 0's task.
    pub(super) fn create(world: usize) -> Result<OwnedFd> {
        let bytes = Self::bytes(world);
        cgroup::allow(channels(world))?;
        let file = sys::memfd(NAME, bytes, stages(world))?;
        let copy = file.try_clone().map_err(|error| Error::io("sharing the segment", &error))?;
        let map = Arc::new(Mapping::new(copy, bytes)?);
        let segment = Self { map, world, fenced_by_sleepers: false };
        segment.map.word(8).store(world as u64, Ordering::Relaxed);
        // Release: pairs with the Acquire in `attach`.
        segment.map.word(0).store(MAGIC, Ordering::Release);
        Ok(file)
    }

    /// Maps a segment that rank 0 created, after checking that it is one, of this size.
    pub(super) fn attach(fd: OwnedFd, world: usize) -> Result<Self> {
        let bytes = Self::bytes(world);
        let file = File::from(fd);
        let wrong = || Error::InvalidArgument("rank 0's segment is not of this group".into());
        if !sys::is_sealed(&file, bytes) {
            return Err(wrong());
        }
        let map = Mapping::new(file.into(), bytes)?;
        let magic = map.word(0).load(Ordering::Acquire);
        if magic != MAGIC || map.word(8).load(Ordering::Relaxed) != world as u64 {
            return Err(wrong());
        }
        // A kernel without it leaves the fences to the publishers.
        Ok(Self { map: Arc::new(map), world, fenced_by_sleepers: sys::join_heavy_fences() })
    }

    /// Reserves memory for a rank's own stages; that rank's task, so that they are near its processor.
    pub(super) fn reserve(&self, rank: Rank) -> Result<()> {
        let Stages { count, bytes } = Stages::of(self.world);
        let own = count as usize * bytes;
        self.map.reserve(stages(self.world) + rank * own, own)
    }

    /// All ranks' views of a new segment, for a model, in which publishers fence.
    #[cfg(loom)]
    pub(super) fn of_model(world: usize) -> Result<Vec<Self>> {
        let bytes = Self::bytes(world);
        let map = Mapping::new(sys::memfd(NAME, bytes, bytes)?, bytes)?;
        // Words are there before any rank is.
        let slot = |index: usize| slots(world) + index * SLOT;
        let heads = (0..2 * world).map(|index| (slot(index), SLOT_DATA));
        for (start, bytes) in [(POISON, 8), (BLOCKS, world * BLOCK)].into_iter().chain(heads) {
            map.words.make(start, bytes);
        }
        let view = |map| Self { map: Arc::new(map), world, fenced_by_sleepers: false };
        (0..world).map(|_| Ok(view(map.again()?))).collect()
    }

    pub(super) fn counter(&self, rank: Rank, counter: Counter) -> &AtomicU64 {
        self.map.word(self.block(rank) + counter as usize)
    }

    /// The operation number of a rank's latest entry in slots of this parity, plus 1.
    pub(super) fn entry(&self, rank: Rank, seq: u64) -> &AtomicU64 {
        self.map.word(self.slot(rank, seq))
    }

    /// Writes this rank's fingerprint, to be published by a store to [`entry`](Self::entry).
    pub(super) fn set_fingerprint(&self, rank: Rank, fingerprint: &Fingerprint) {
        let words = fingerprint.words();
        let places = self.map.words(self.slot(rank, fingerprint.seq) + 8);
        std::iter::zip::<[_; Fingerprint::WORDS], _>(places, words)
            .for_each(|(place, word)| place.store(word, Ordering::Relaxed));
    }

    /// Whether a rank's fingerprint is this one, of the same `seq`, once its entry has been seen.
    ///
    /// Word by word: what has just been stored singly is slow to load as a whole, since it has to
    /// leave the core first.
    pub(super) fn has_fingerprint(&self, rank: Rank, expected: &Fingerprint) -> bool {
        let words = expected.words();
        let places = self.map.words(self.slot(rank, expected.seq) + 8);
        std::iter::zip::<[_; Fingerprint::WORDS], _>(places, words)
            .fold(0, |bits, (place, word)| bits | (place.load(Ordering::Relaxed) ^ word))
            == 0
    }

    /// A rank's fingerprint, once its entry has been seen.
    pub(super) fn fingerprint(&self, rank: Rank, seq: u64) -> Fingerprint {
        let places = self.map.words(self.slot(rank, seq) + 8);
        Fingerprint::from_words(seq, places.map(|place| place.load(Ordering::Relaxed)))
    }

    /// The `len` bytes of a slot's data: on the line of the entry if they fit.
    pub(super) fn slot_data(&self, rank: Rank, seq: u64, len: usize) -> Span<'_> {
        let offset = if len <= SLOT_DATA - SLOT_LINE { SLOT_LINE } else { SLOT_DATA };
        self.map.data(self.slot(rank, seq) + offset, FLAT_BYTES).part(0, len)
    }

    /// The `len` bytes of a rank's stage that a chunk of this length uses.
    ///
    /// Small chunks take one part of the stage after another, so that all of it is in use whatever
    /// their size: what was staged long ago has left the peers' caches, and storing there is twice
    /// as fast.
    pub(super) fn stage(&self, rank: Rank, chunk: u64, len: usize) -> Span<'_> {
        assert!(rank < self.world, "a rank of the group");
        let Stages { count, bytes } = Stages::of(self.world);
        let index = rank * count as usize + (chunk % count) as usize;
        let part = len.next_power_of_two().clamp(MIN_PART, bytes);
        let turn = (chunk / count % (bytes / part) as u64) as usize;
        self.map.data(stages(self.world) + index * bytes, bytes).part(turn * part, len)
    }

    /// The mapping, and where the channels lie in it.
    pub(super) fn channels(&self) -> (&Arc<Mapping>, Layout) {
        (&self.map, Layout::new(self.world, channels(self.world)))
    }

    pub(super) fn bell(&self, rank: Rank) -> &AtomicU32 {
        self.map.half_word(self.block(rank) + BELL)
    }

    /// Where rank 0 puts the descriptor of a shared buffer's file.
    pub(super) fn shared_fd(&self) -> &AtomicU64 {
        self.map.word(SHARED_FD)
    }

    /// The word that a thread of the rank holds, see [`life`](super::life).
    pub(super) fn life(&self, rank: Rank) -> &AtomicU32 {
        self.map.half_word(self.block(rank) + LIFE)
    }

    pub(super) fn is_gone(&self, rank: Rank) -> bool {
        // Acquire: pairs with `leave`; what the rank did before it left is visible. SeqCst, so that
        // whoever looks after setting its bell sees it, or is woken; see `ring`.
        self.map.word(self.block(rank) + GONE).load(Ordering::SeqCst) != 0
    }

    /// Says that a rank takes part no more.
    pub(super) fn leave(&self, rank: Rank) {
        self.map.word(self.block(rank) + GONE).store(1, Ordering::SeqCst);
        self.ring_all();
    }

    /// The group's failure, if it has failed.
    pub(super) fn poison(&self) -> Option<Poison> {
        // Acquire: pairs with `set_poison`; the note is complete. SeqCst as in `is_gone`.
        Poison::decode(self.map.word(POISON).load(Ordering::SeqCst), self.world)
    }

    /// Fails the group, unless it has failed already, and wakes everyone.
    pub(super) fn set_poison(&self, poison: Poison) {
        let (word, new) = (self.map.word(POISON), poison.encode());
        // The first failure stays: the others follow from it.
        if word.compare_exchange(0, new, Ordering::SeqCst, Ordering::SeqCst).is_ok() {
            self.ring_all();
        }
    }

    /// Leaves a text and a set of ranks in a rank's block, before it sets the poison.
    pub(super) fn write_note(&self, by: Rank, text: &str, missing: &[Rank]) {
        let block = self.block(by);
        for (i, bytes) in text.as_bytes().chunks(8).take(NOTE_BYTES / 8).enumerate() {
            let mut word = [0; 8];
            word[..bytes.len()].copy_from_slice(bytes);
            self.map.word(block + NOTE + 8 * i).store(u64::from_le_bytes(word), Ordering::Relaxed);
        }
        self.map.word(block + NOTE_LEN).store(text.len() as u64, Ordering::Relaxed);
        for (i, ranks) in (0..MAX_RANKS / 64).map(|i| (i, i * 64..(i + 1) * 64)) {
            let bits = missing.iter().filter(|rank| ranks.contains(rank));
            let bits = bits.fold(0, |bits, rank| bits | 1_u64 << (rank % 64));
            self.map.word(block + MISSING + 8 * i).store(bits, Ordering::Relaxed);
        }
    }

    /// What [`write_note`](Self::write_note) left, once the poison has been seen.
    pub(super) fn note(&self, by: Rank) -> (String, Vec<Rank>) {
        let block = self.block(by);
        let word = |offset: usize| self.map.word(block + offset).load(Ordering::Relaxed);
        let len = usize::try_from(word(NOTE_LEN)).unwrap_or(usize::MAX).min(NOTE_BYTES);
        let bytes: Vec<u8> =
            (0..NOTE_BYTES / 8).flat_map(|i| word(NOTE + 8 * i).to_le_bytes()).take(len).collect();
        let is_missing = |rank: &Rank| word(MISSING + rank / 64 * 8) >> (rank % 64) & 1 != 0;
        let missing = (0..self.world).filter(is_missing).collect();
        (String::from_utf8_lossy(&bytes).trim_end_matches('\u{fffd}').to_owned(), missing)
    }

    /// Wakes every rank that sleeps for what this rank has just stored.
    pub(super) fn ring_all(&self) {
        // SeqCst: see `ring`.
        fence(Ordering::SeqCst);
        for rank in 0..self.world {
            self.ring(rank);
        }
    }

    /// Stands between a rank's Release store of what others may sleep for and its [`ring`]s:
    /// whoever's sleep begins now either sees the store, or is seen to sleep.
    ///
    /// [`ring`]: Self::ring
    pub(super) fn fence_publisher(&self) {
        if self.fenced_by_sleepers {
            // The other half is the heavy fence in `set_bell`, which interrupts this thread if
            // it runs. A full fence here would be paid by every operation.
            compiler_fence(Ordering::SeqCst);
        } else {
            fence(Ordering::SeqCst);
        }
    }

    /// Sets the bell, to be followed by a last look before sleeping. Whether publishers are certain
    /// to see it; if not, sleep but little.
    pub(super) fn set_bell(&self, rank: Rank) -> bool {
        self.bell(rank).store(1, Ordering::SeqCst);
        fence(Ordering::SeqCst);
        // For publishers who leave the fence to us; pairs with `fence_publisher`.
        sys::heavy_fence()
    }

    /// Wakes a rank if it sleeps. To come after a store of what it waits for and a SeqCst fence (or
    /// [`fence_publisher`](Self::fence_publisher)): of that fence and the sleeper's, between setting
    /// its bell and its last look, one is the first; so either this sees the bell, or the sleeper
    /// sees the store.
    pub(super) fn ring(&self, rank: Rank) {
        let bell = self.bell(rank);
        if bell.load(Ordering::SeqCst) != 0 && bell.swap(0, Ordering::SeqCst) != 0 {
            sys::futex_wake(bell);
        }
    }

    fn block(&self, rank: Rank) -> usize {
        assert!(rank < self.world, "a rank of the group");
        BLOCKS + rank * BLOCK
    }

    fn slot(&self, rank: Rank, seq: u64) -> usize {
        assert!(rank < self.world, "a rank of the group");
        slots(self.world) + (rank * 2 + (seq % 2) as usize) * SLOT
    }
}

/// The stages of a rank. Together they outgrow the second-level cache, which is faster, see
/// [`Segment::stage`].
pub(super) struct Stages {
    pub(super) count: u64,
    pub(super) bytes: usize,
}

impl Stages {
    /// Between two ranks, one stage is filled while one is folded and one is read, and fewer waits
    /// are better. More ranks than that may lack a core for each, and keep more of a distance.
    pub(super) fn of(world: usize) -> Self {
        match world {
            2 if !cfg!(loom) => Self { count: 3, bytes: 2 * CHUNK_BYTES },
            _ => Self { count: 6, bytes: CHUNK_BYTES },
        }
    }
}

fn slots(world: usize) -> usize {
    (BLOCKS + world * BLOCK).next_multiple_of(4096)
}

fn stages(world: usize) -> usize {
    (slots(world) + world * 2 * SLOT).next_multiple_of(4096)
}

fn channels(world: usize) -> usize {
    let Stages { count, bytes } = Stages::of(world);
    stages(world) + world * count as usize * bytes
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::MetadataExt as _;

    use super::super::channel::{Receiver, Sender};
    use super::*;

    fn segment(world: usize) -> Segment {
        Segment::attach(Segment::create(world).unwrap(), world).unwrap()
    }

    #[test]
    fn the_first_failure_stays() {
        let segment = segment(3);
        assert_eq!(segment.poison(), None);
        segment.set_poison(Poison::Died { rank: 2, pid: u32::MAX });
        segment.set_poison(Poison::Aborted { by: 1 });
        assert_eq!(segment.poison(), Some(Poison::Died { rank: 2, pid: u32::MAX }));
    }

    #[test]
    fn failures_are_read_as_written_and_garbage_is_none() {
        for poison in [
            Poison::Died { rank: 255, pid: 1 },
            Poison::Left { rank: 0 },
            Poison::Aborted { by: 7 },
            Poison::TimedOut { by: 9 },
            Poison::Mismatch { by: 255 },
        ] {
            assert_eq!(Poison::decode(poison.encode(), 256), Some(poison));
        }
        assert_eq!(Poison::decode(u64::MAX, 256), None);
        assert_eq!(Poison::decode(Poison::Left { rank: 5 }.encode(), 5), None);
        assert_eq!(Poison::decode(Poison::Mismatch { by: 5 }.encode(), 5), None);
    }

    #[test]
    fn notes_are_cut_to_length() {
        let segment = segment(2);
        segment.write_note(1, "out of coffee", &[0, 1]);
        assert_eq!(segment.note(1), ("out of coffee".into(), vec![0, 1]));
        segment.write_note(0, &"x".repeat(1000), &[200]);
        assert_eq!(segment.note(0), ("x".repeat(NOTE_BYTES), vec![]));
        // A length that a peer made up.
        segment.map.word(segment.block(0) + NOTE_LEN).store(u64::MAX, Ordering::Relaxed);
        assert_eq!(segment.note(0).0.len(), NOTE_BYTES);
    }

    #[test]
    fn pairs_that_never_talk_cost_nothing() {
        let world = 64;
        let file = File::from(Segment::create(world).unwrap());
        let used = || file.metadata().unwrap().blocks() as usize * 512;
        let before = used();
        assert!(before <= channels(world) + 4096 && Segment::bytes(world) > before + (16 << 20));
        let segment = Segment::attach(file.try_clone().unwrap().into(), world).unwrap();
        let (map, layout) = segment.channels();
        let _sender = Sender::new(map, &layout, 3, 60).unwrap();
        assert!(used() > before && used() <= before + (64 << 10));
        let now = used();
        let _receiver = Receiver::new(map, &layout, 3, 60).unwrap();
        assert_eq!(used(), now);
    }

    /// Memory is of the node of the processor that first asks for it.
    #[test]
    fn each_rank_reserves_its_own_stages() {
        for world in [2, 5] {
            let file = File::from(Segment::create(world).unwrap());
            let used = || file.metadata().unwrap().blocks() as usize * 512;
            let Stages { count, bytes } = Stages::of(world);
            for ranks in 0..=world {
                assert_eq!(used(), stages(world) + ranks * count as usize * bytes);
                if ranks < world {
                    let copy = file.try_clone().unwrap().into();
                    Segment::attach(copy, world).unwrap().reserve(ranks).unwrap();
                }
            }
        }
    }

    #[test]
    fn a_segment_of_another_group_is_refused() {
        assert!(Segment::attach(Segment::create(2).unwrap(), 3).is_err());
        let other = sys::memfd(c"other", Segment::bytes(2), 0).unwrap();
        assert!(Segment::attach(other, 2).is_err());
    }
}
