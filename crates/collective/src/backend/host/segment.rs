//! The shared segment of a group: entries, sleep flags, failures, staging areas and channels.
//!
//! Layout, in bytes. Every word that one rank writes and others wait for is on that rank's own
//! cache lines.
//!
//! ```text
//! 0          header page: +0 magic, +8 world size, +64 poison, +128 shared file's descriptor
//! 4096       an area of 4096 per rank:
//!              +0 staged, +8 folded, +16 drained   chunk counters, which only grow
//!              +64 sleep flag                      1 while the rank sleeps (futex)
//!              +128 left                           1 once the rank has left
//!              +136 note length                    of the failure that the rank reports
//!              +144 liveness                       see [`robust_futex`](super::robust_futex)
//!              +192 note                           the failure, as JSON
//! slots      two per rank, used alternately: +0 seq, +8 fingerprint, +48 data of up to 16 bytes,
//!              +64 data of up to 8 KiB
//! stages     six of 256 KiB per rank, used in rotation
//! channels   a ring per ordered pair of ranks, see [`channel`](super::channel)
//! ```
//!
//! A rank stores only into its own area, slots and stages, except the poison word (1 + the first
//! rank that reports a failure) and the sleep flags (set by the sleeper, cleared by the rank that
//! wakes it).

use std::ffi::CStr;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::sync::atomic::compiler_fence;

use parking_lot::Mutex;

use super::cgroup;
use super::channel::Layout;
use super::sys::{self, Mapping};
use crate::backend::failure::{Cause, Failure};
use crate::backend::frame::ControlMessage;
use crate::memory::Span;
use crate::op::Fingerprint;
use crate::sync::atomic::{AtomicU32, AtomicU64, Ordering, fence};
use crate::{Error, Rank, Result};

/// Largest group.
pub(super) const MAX_RANKS: usize = 256;
/// Largest payload of a slot.
pub(super) const FLAT_BYTES: usize = if cfg!(loom) { 64 } else { 8 << 10 };
/// Bytes of a stage, which holds one chunk. `small_stages` is for measurements, see
/// `benches/README.md`.
pub(super) const CHUNK_BYTES: usize = if cfg!(loom) {
    64
} else if cfg!(small_stages) {
    64 << 10
} else {
    256 << 10
};
/// Stages of a rank: enough to run ahead of ranks that share a core.
pub(super) const STAGES: u64 = 6;
const STAGES_BYTES: usize = STAGES as usize * CHUNK_BYTES;
/// Smallest part of a stage that a chunk uses.
const MIN_PART: usize = if cfg!(loom) { 64 } else { 8 << 10 };

const NAME: &CStr = c"collective";
const MAGIC: u64 = u64::from_le_bytes(*b"collsg01");
const POISON: usize = 64;
const SHARED_FD: usize = 128;
const RANK_AREAS: usize = 4096;
const RANK_AREA: usize = if cfg!(loom) { 512 } else { 4096 };
const SLEEP_FLAG: usize = 64;
const LEFT: usize = 128;
const NOTE_LEN: usize = 136;
const LIVENESS: usize = 144;
const NOTE: usize = 192;
const NOTE_BYTES: usize = RANK_AREA - NOTE;
const SLOT_LINE: usize = 8 + 8 * Fingerprint::WORDS;
const SLOT_DATA: usize = 64;
const SLOT: usize = SLOT_DATA + FLAT_BYTES;

/// A rank's chunk counters.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Counter {
    /// Its data of the chunk are in its stage.
    Staged = 0,
    /// Its shard of the chunk is reduced.
    Folded = 8,
    /// It has finished reading the chunk.
    Drained = 16,
}

/// The mapped segment.
#[derive(Debug)]
pub(super) struct Segment {
    map: Arc<Mapping>,
    pub(super) world: usize,
    /// Whether waiters' barriers (`membarrier`) reach this process, so that publishers need none.
    waiters_issue_barrier: bool,
    /// Held while this rank fails the group, which several of its threads may do at once.
    failing: Mutex<()>,
}

impl Segment {
    /// Size of the segment, in bytes.
    pub(super) fn bytes(world: usize) -> usize {
        Layout::new(world, channels(world)).end()
    }

    /// Creates an empty segment; called by rank 0.
    pub(super) fn create(world: usize) -> Result<OwnedFd> {
        let bytes = Self::bytes(world);
        cgroup::check_limit(channels(world))?;
        let file = sys::memfd(NAME, bytes, stages(world))?;
        let copy = file.try_clone().map_err(|error| Error::io("sharing the segment", &error))?;
        let map = Arc::new(Mapping::new(copy, bytes)?);
        let segment = Self { map, world, waiters_issue_barrier: false, failing: Mutex::default() };
        segment.map.word(8).store(world as u64, Ordering::Relaxed);
        // Release: pairs with the Acquire in `attach`.
        segment.map.word(0).store(MAGIC, Ordering::Release);
        Ok(file)
    }

    /// Maps the segment that rank 0 created, and checks it.
    pub(super) fn attach(fd: OwnedFd, world: usize) -> Result<Self> {
        let bytes = Self::bytes(world);
        let what = "rank 0's segment";
        let map = Mapping::of_peer(fd.into(), bytes, what)?;
        let magic = map.word(0).load(Ordering::Acquire);
        if magic != MAGIC || map.word(8).load(Ordering::Relaxed) != world as u64 {
            return Err(sys::wrong_file(what));
        }
        // Without it publishers issue the barriers.
        Ok(Self {
            map: Arc::new(map),
            world,
            waiters_issue_barrier: sys::register_for_membarrier(),
            failing: Mutex::default(),
        })
    }

    /// Reserves memory for a rank's stages; called by that rank, so that they are on its NUMA node.
    pub(super) fn reserve(&self, rank: Rank) -> Result<()> {
        self.map.reserve(stages(self.world) + rank * STAGES_BYTES, STAGES_BYTES)
    }

    /// Creates all ranks' views of a new segment, for loom models, in which publishers issue the
    /// barriers.
    #[cfg(loom)]
    pub(super) fn for_model(world: usize) -> Result<Vec<Self>> {
        let bytes = Self::bytes(world);
        let map = Mapping::new(sys::memfd(NAME, bytes, bytes)?, bytes)?;
        // Words must exist before any rank does.
        let slot = |index: usize| slots(world) + index * SLOT;
        let heads = (0..2 * world).map(|index| (slot(index), SLOT_DATA));
        for (start, bytes) in
            [(POISON, 8), (RANK_AREAS, world * RANK_AREA)].into_iter().chain(heads)
        {
            map.words.make(start, bytes);
        }
        let view = |map| Self {
            map: Arc::new(map),
            world,
            waiters_issue_barrier: false,
            failing: Mutex::default(),
        };
        (0..world).map(|_| Ok(view(map.again()?))).collect()
    }

    pub(super) fn counter(&self, rank: Rank, counter: Counter) -> &AtomicU64 {
        self.map.word(self.rank_area(rank) + counter as usize)
    }

    /// Sequence number, plus 1, of the latest operation that the rank entered with this slot.
    pub(super) fn entry(&self, rank: Rank, seq: u64) -> &AtomicU64 {
        self.map.word(self.slot(rank, seq))
    }

    /// Writes this rank's fingerprint, to be published by a store to [`entry`](Self::entry).
    pub(super) fn set_fingerprint(&self, rank: Rank, fingerprint: &Fingerprint) {
        let words = fingerprint.words();
        let slot = self.map.words(self.slot(rank, fingerprint.seq) + 8);
        std::iter::zip::<[_; Fingerprint::WORDS], _>(slot, words)
            .for_each(|(atomic, word)| atomic.store(word, Ordering::Relaxed));
    }

    /// Whether a rank's fingerprint equals `expected`; valid once the rank's entry has been seen.
    ///
    /// Compares word by word: a wide load of words that were just stored separately stalls until
    /// the stores have left the core.
    pub(super) fn has_fingerprint(&self, rank: Rank, expected: &Fingerprint) -> bool {
        let words = expected.words();
        let slot = self.map.words(self.slot(rank, expected.seq) + 8);
        std::iter::zip::<[_; Fingerprint::WORDS], _>(slot, words)
            .fold(0, |bits, (atomic, word)| bits | (atomic.load(Ordering::Relaxed) ^ word))
            == 0
    }

    /// A rank's fingerprint; valid once the rank's entry has been seen.
    pub(super) fn fingerprint(&self, rank: Rank, seq: u64) -> Fingerprint {
        let slot = self.map.words(self.slot(rank, seq) + 8);
        Fingerprint::from_words(seq, slot.map(|atomic| atomic.load(Ordering::Relaxed)))
    }

    /// `len` bytes of a slot's data, on the cache line of the entry if they fit.
    pub(super) fn slot_data(&self, rank: Rank, seq: u64, len: usize) -> Span<'_> {
        let offset = if len <= SLOT_DATA - SLOT_LINE { SLOT_LINE } else { SLOT_DATA };
        self.map.data(self.slot(rank, seq) + offset, FLAT_BYTES).part(0, len)
    }

    /// The `len` bytes of a rank's stage that a chunk of this length uses.
    ///
    /// Small chunks use the parts of a stage in rotation, so that the whole stage is used whatever
    /// their size: bytes that were staged long ago have left the peers' caches, and storing there
    /// is twice as fast.
    pub(super) fn stage(&self, rank: Rank, chunk: u64, len: usize) -> Span<'_> {
        assert!(rank < self.world, "a rank of the group");
        let offset = rank * STAGES_BYTES + (chunk % STAGES) as usize * CHUNK_BYTES;
        let part = len.next_power_of_two().clamp(MIN_PART, CHUNK_BYTES);
        let call = (chunk / STAGES % (CHUNK_BYTES / part) as u64) as usize;
        self.map.data(stages(self.world) + offset, CHUNK_BYTES).part(call * part, len)
    }

    /// The mapping, and the layout of the channels in it.
    pub(super) fn channels(&self) -> (&Arc<Mapping>, Layout) {
        (&self.map, Layout::new(self.world, channels(self.world)))
    }

    pub(super) fn sleep_flag(&self, rank: Rank) -> &AtomicU32 {
        self.map.half_word(self.rank_area(rank) + SLEEP_FLAG)
    }

    /// Holds rank 0's descriptor of the file of a shared buffer.
    pub(super) fn shared_fd(&self) -> &AtomicU64 {
        self.map.word(SHARED_FD)
    }

    /// The word that a thread of the rank holds, see [`robust_futex`](super::robust_futex).
    pub(super) fn liveness(&self, rank: Rank) -> &AtomicU32 {
        self.map.half_word(self.rank_area(rank) + LIVENESS)
    }

    pub(super) fn has_left(&self, rank: Rank) -> bool {
        // Acquire: pairs with `leave`; what the rank did before it left is visible. SeqCst, so that
        // a rank that checks after setting its sleep flag sees it, or is woken; see `wake`.
        self.map.word(self.rank_area(rank) + LEFT).load(Ordering::SeqCst) != 0
    }

    /// Publishes that a rank has left the group.
    pub(super) fn leave(&self, rank: Rank) {
        self.map.word(self.rank_area(rank) + LEFT).store(1, Ordering::SeqCst);
        self.wake_all();
    }

    pub(super) fn has_failed(&self) -> bool {
        // SeqCst as in `has_left`.
        self.map.word(POISON).load(Ordering::SeqCst) != 0
    }

    /// The group's failure, if it has failed.
    pub(super) fn failure(&self) -> Option<Failure> {
        // Acquire: pairs with `fail`; the note is complete.
        let word = self.map.word(POISON).load(Ordering::SeqCst);
        let by = usize::try_from(word).ok()?.checked_sub(1)?.min(self.world - 1);
        let word = |at| self.map.word(self.rank_area(by) + at).load(Ordering::Relaxed);
        let len = usize::try_from(word(NOTE_LEN)).map_or(NOTE_BYTES, |len| len.min(NOTE_BYTES));
        let mut note: Vec<u8> =
            (0..len.div_ceil(8)).flat_map(|i| word(NOTE + 8 * i).to_le_bytes()).collect();
        note.truncate(len);
        Some(match ControlMessage::decode(&note, self.world) {
            Ok(ControlMessage::Failed(failure)) => failure,
            _ => Failure { by, cause: Cause::Aborted { reason: "its report is malformed".into() } },
        })
    }

    /// Fails the group, unless it has failed already, and wakes all ranks. `own` is this rank.
    pub(super) fn fail(&self, own: Rank, failure: &Failure) {
        let _guard = self.failing.lock();
        if self.has_failed() {
            return;
        }
        let note = ControlMessage::Failed(failure.clone());
        let note = serde_json::to_vec(&note).expect("plain numbers and strings");
        let area = self.rank_area(own);
        for (i, bytes) in note.chunks(8).take(NOTE_BYTES / 8).enumerate() {
            let mut word = [0; 8];
            word[..bytes.len()].copy_from_slice(bytes);
            self.map.word(area + NOTE + 8 * i).store(u64::from_le_bytes(word), Ordering::Relaxed);
        }
        self.map.word(area + NOTE_LEN).store(note.len() as u64, Ordering::Relaxed);
        // The first failure wins; later ones follow from it.
        let (word, new) = (self.map.word(POISON), own as u64 + 1);
        if word.compare_exchange(0, new, Ordering::SeqCst, Ordering::SeqCst).is_ok() {
            self.wake_all();
        }
    }

    /// Wakes all sleeping ranks after a store that they may wait for.
    pub(super) fn wake_all(&self) {
        // SeqCst: see `wake`.
        fence(Ordering::SeqCst);
        for rank in 0..self.world {
            self.wake(rank);
        }
    }

    /// Barrier between a rank's Release store that others may wait for and its calls of
    /// [`wake`](Self::wake): a rank that is about to sleep sees the store, or its sleep flag is
    /// seen.
    pub(super) fn fence_publisher(&self) {
        if self.waiters_issue_barrier {
            // Pairs with the `membarrier` in `set_sleep_flag`, which interrupts this thread if it
            // runs. A full fence here would cost every operation.
            compiler_fence(Ordering::SeqCst);
        } else {
            fence(Ordering::SeqCst);
        }
    }

    /// Sets this rank's sleep flag; the caller must check its condition once more before it sleeps.
    /// Returns whether publishers are certain to see the flag; if not, the sleep must be short.
    pub(super) fn set_sleep_flag(&self, rank: Rank) -> bool {
        self.sleep_flag(rank).store(1, Ordering::SeqCst);
        fence(Ordering::SeqCst);
        // For publishers that issue no barrier; pairs with `fence_publisher`.
        sys::global_membarrier()
    }

    /// Wakes a rank if it sleeps. Called after a store that the rank may wait for and a SeqCst
    /// fence (or [`fence_publisher`](Self::fence_publisher)). The sleeper has a fence between
    /// setting its flag and its last check. One of the two fences is first: either this sees the
    /// flag, or the sleeper sees the store.
    pub(super) fn wake(&self, rank: Rank) {
        let flag = self.sleep_flag(rank);
        if flag.load(Ordering::SeqCst) != 0 && flag.swap(0, Ordering::SeqCst) != 0 {
            sys::futex_wake(flag);
        }
    }

    fn rank_area(&self, rank: Rank) -> usize {
        assert!(rank < self.world, "a rank of the group");
        RANK_AREAS + rank * RANK_AREA
    }

    fn slot(&self, rank: Rank, seq: u64) -> usize {
        assert!(rank < self.world, "a rank of the group");
        slots(self.world) + (rank * 2 + (seq % 2) as usize) * SLOT
    }
}

fn slots(world: usize) -> usize {
    (RANK_AREAS + world * RANK_AREA).next_multiple_of(4096)
}

fn stages(world: usize) -> usize {
    (slots(world) + world * 2 * SLOT).next_multiple_of(4096)
}

fn channels(world: usize) -> usize {
    stages(world) + world * STAGES_BYTES
}

#[cfg(test)]
mod tests {
    use std::fs::File;
    use std::os::unix::fs::MetadataExt as _;

    use super::super::channel::End;
    use super::*;

    fn segment(world: usize) -> Segment {
        Segment::attach(Segment::create(world).unwrap(), world).unwrap()
    }

    fn aborted(by: Rank, reason: &str) -> Failure {
        Failure { by, cause: Cause::Aborted { reason: reason.into() } }
    }

    #[test]
    fn the_first_failure_wins() {
        let segment = segment(3);
        assert_eq!(segment.failure(), None);
        let died = Failure { by: 1, cause: Cause::Died { rank: 2, pid: u32::MAX, how: None } };
        segment.fail(1, &died);
        segment.fail(1, &aborted(1, "later"));
        segment.fail(0, &aborted(0, "later"));
        assert_eq!(segment.failure(), Some(died));
    }

    #[test]
    fn the_largest_failure_fits() {
        let segment = segment(MAX_RANKS);
        let text = "\0".repeat(crate::backend::core::REASON_BYTES);
        let missing = (0..MAX_RANKS).collect();
        let failure = Failure { by: 255, cause: Cause::TimedOut { missing, text } };
        segment.fail(255, &failure);
        assert_eq!(segment.failure(), Some(failure));
    }

    #[test]
    fn a_malformed_failure_is_one_of_the_rank_that_reports_it() {
        for (word, note, by) in [(2, "[[[[", 1), (2, "\"Ask\"", 1), (u64::MAX, "", 2)] {
            let segment = segment(3);
            segment.fail(1, &aborted(1, "enough"));
            segment.map.word(POISON).store(word, Ordering::Relaxed);
            let area = segment.rank_area(1);
            for len in [note.len() as u64, u64::MAX] {
                segment.map.word(area + NOTE_LEN).store(len, Ordering::Relaxed);
                segment
                    .map
                    .data(area + NOTE, note.len())
                    .copy_from(Span::from_mut(&mut note.as_bytes().to_vec()));
                assert_eq!(segment.failure(), Some(aborted(by, "its report is malformed")));
            }
        }
    }

    #[test]
    fn pairs_that_never_communicate_use_no_memory() {
        let world = 64;
        let file = File::from(Segment::create(world).unwrap());
        let used = || file.metadata().unwrap().blocks() as usize * 512;
        let before = used();
        assert!(before <= channels(world) + 4096 && Segment::bytes(world) > before + (16 << 20));
        let segment = Segment::attach(file.try_clone().unwrap().into(), world).unwrap();
        let (map, layout) = segment.channels();
        let _sender = End::sender(map, &layout, [3, 60]).unwrap();
        assert!(used() > before && used() <= before + (64 << 10));
        let now = used();
        let _receiver = End::receiver(map, &layout, [3, 60]).unwrap();
        assert_eq!(used(), now);
    }

    /// Memory is on the NUMA node of the processor that first reserves it.
    #[test]
    fn each_rank_reserves_its_own_stages() {
        for world in [2, 5] {
            let file = File::from(Segment::create(world).unwrap());
            let used = || file.metadata().unwrap().blocks() as usize * 512;
            for ranks in 0..=world {
                assert_eq!(used(), stages(world) + ranks * STAGES_BYTES);
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
