//! Messages between pairs of ranks, all at once.
//!
//! A message is a short header (its number, verb, type and count), which the receiver compares with
//! what it expects before it takes a byte, and its data. Messages of one direction between two ranks
//! form a lane and go in order through their [`channel`](super::channel); one loop moves all lanes
//! of this rank a piece at a time, so that no order among the transfers can lock the ranks up.
//!
//! A lane that cannot move waits for its peer, by the ladder of [`turn`](super::turn). Waits end
//! when the group has failed, when a peer has left, or when a peer has not moved its lane for the
//! timeout; but first whatever has come is received.

use crate::sync::atomic::Ordering;
use std::io;
use std::ops::Range;
use std::time::{Duration, Instant};

use super::channel::{Receiver, Sender};
use super::segment::{NOTE_WORDS, Poison, Segment};
use super::sys;
use super::turn::{LOOKS, SPIN, SPIN_BACKGROUND, TICK, Turn, YIELD};
use crate::span::Span;
use crate::{DType, Error, Patience, Rank, Result, Verb};

/// Bytes moved before the other side is told and the other lanes have their turn.
const PIECE: usize = 16 << 10;
const HEADER_WORDS: usize = 3;
const HEADER: usize = 8 * HEADER_WORDS;
/// In a note: not a message but a collective, and the number of that stands before.
const ENTERED: u64 = u64::MAX;

/// This rank's ends of the channels it has used.
#[derive(Debug, Default)]
pub(super) struct Mesh {
    outgoing: Vec<Option<Link<Sender>>>,
    incoming: Vec<Option<Link<Receiver>>>,
}

/// An end of a channel, and how many messages have gone through it.
#[derive(Debug)]
struct Link<End> {
    end: End,
    messages: u64,
}

/// One message of this rank.
#[derive(Debug)]
pub(super) struct Block<'a> {
    pub(super) peer: Rank,
    pub(super) way: Way,
    pub(super) dtype: DType,
    pub(super) count: usize,
    /// The elements.
    pub(super) memory: Span<'a>,
}

impl Block<'_> {
    fn failed(&self, error: &io::Error) -> Error {
        let way = if self.way == Way::Out { "to" } else { "from" };
        Error::io(format!("the channel {way} rank {}", self.peer), error)
    }
}

/// Which way a message goes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Way {
    Out,
    In,
}

/// Moves all blocks. The turn has been entered, if its verb is one that all ranks enter.
pub(super) fn run(turn: &Turn<'_>, mesh: &mut Mesh, mut blocks: Vec<Block<'_>>) -> Result<()> {
    // Stable: blocks of one lane keep their order.
    blocks.sort_by_key(|block| (block.peer, block.way));
    let mut lanes = mesh.lanes(turn, &blocks)?;
    let mut pause = Pause::default();
    loop {
        if advance(turn, mesh, &blocks, &mut lanes)? {
            // Whoever has moved a lane may well have left it since, in order.
            pause = Pause::default();
        } else if !lanes.is_empty() {
            pause.step(turn, mesh, &blocks, &mut lanes)?;
        }
        if lanes.is_empty() {
            return Ok(());
        }
    }
}

/// Moves every lane as far as it goes at once, and drops those that are done; whether any moved.
fn advance(
    turn: &Turn<'_>,
    mesh: &mut Mesh,
    blocks: &[Block<'_>],
    lanes: &mut Vec<Lane>,
) -> Result<bool> {
    let mut any = false;
    for lane in lanes.iter_mut() {
        let moved = match lane.way {
            Way::Out => mesh.out(lane.peer).send(lane, blocks, turn.op.verb)?,
            Way::In => mesh.into(lane.peer).receive(lane, blocks, turn)?,
        };
        if moved {
            turn.segment().ring(lane.peer);
            lane.since = None;
            any = true;
        }
    }
    if any {
        lanes.retain(|lane| !lane.left.is_empty());
    }
    Ok(any)
}

/// The messages of one direction between this rank and a peer.
#[derive(Debug)]
struct Lane {
    peer: Rank,
    way: Way,
    /// The blocks still to be moved, the first of them perhaps in part.
    left: Range<usize>,
    /// Bytes of the first block that have moved; `None` before its header has.
    moved: Option<usize>,
    /// Since when it has been seen not to move.
    since: Option<Instant>,
}

impl Lane {
    /// Bytes without which it cannot move.
    fn wanted(&self) -> usize {
        if self.moved.is_none() { HEADER } else { 1 }
    }
}

impl Mesh {
    fn lanes(&mut self, turn: &Turn<'_>, blocks: &[Block<'_>]) -> Result<Vec<Lane>> {
        let mut lanes = Vec::new();
        let mut start = 0;
        let same_lane = |a: &Block<'_>, b: &Block<'_>| (a.peer, a.way) == (b.peer, b.way);
        for group in blocks.chunk_by(same_lane) {
            let (peer, way, left) = (group[0].peer, group[0].way, start..start + group.len());
            start = left.end;
            self.open(turn, peer, way)?;
            lanes.push(Lane { peer, way, left, moved: None, since: None });
        }
        Ok(lanes)
    }

    /// Makes this rank's end of a channel, if it has none yet.
    fn open(&mut self, turn: &Turn<'_>, peer: Rank, way: Way) -> Result<()> {
        let (rank, world) = (turn.rank(), turn.world());
        let (map, layout) = turn.segment().channels();
        self.outgoing.resize_with(world, || None);
        self.incoming.resize_with(world, || None);
        match way {
            Way::Out if self.outgoing[peer].is_none() => {
                let end = Sender::new(map, &layout, rank, peer)?;
                self.outgoing[peer] = Some(Link { end, messages: 0 });
            }
            Way::In if self.incoming[peer].is_none() => {
                let end = Receiver::new(map, &layout, peer, rank)?;
                self.incoming[peer] = Some(Link { end, messages: 0 });
            }
            _ => {}
        }
        Ok(())
    }

    fn out(&mut self, peer: Rank) -> &mut Link<Sender> {
        self.outgoing[peer].as_mut().expect("opened with its lane")
    }

    fn into(&mut self, peer: Rank) -> &mut Link<Receiver> {
        self.incoming[peer].as_mut().expect("opened with its lane")
    }

    /// Whether a lane could move now. What is garbled is left for the lane to tell.
    fn can_move(&mut self, lane: &Lane) -> bool {
        let wanted = lane.wanted();
        let free = match lane.way {
            Way::Out => self.out(lane.peer).end.room(wanted),
            Way::In => self.into(lane.peer).end.ready(wanted),
        };
        free.map_or(true, |free| free >= wanted)
    }
}

impl Link<Sender> {
    fn room(&mut self, wanted: usize, block: &Block<'_>) -> Result<usize> {
        self.end.room(wanted).map_err(|error| block.failed(&error))
    }

    /// Sends up to a piece of a lane; whether anything went.
    fn send(&mut self, lane: &mut Lane, blocks: &[Block<'_>], verb: Verb) -> Result<bool> {
        let mut budget = PIECE;
        while budget > 0
            && let Some(block) = blocks[lane.left.clone()].first()
        {
            let moved = match lane.moved {
                Some(moved) => moved,
                None if self.room(HEADER, block)? < HEADER => break,
                None => {
                    let header = Header::new(self.messages, verb, block.dtype, block.count);
                    self.end.put(Span::from_mut(&mut header.to_bytes()));
                    self.messages += 1;
                    budget = budget.saturating_sub(HEADER);
                    0
                }
            };
            let rest = block.memory.len() - moved;
            let some = self.room(rest.min(PIECE), block)?.min(rest).min(budget);
            self.end.put(block.memory.part(moved, some));
            budget -= some;
            if some < rest {
                lane.moved = Some(moved + some);
                break;
            }
            lane.moved = None;
            lane.left.start += 1;
        }
        Ok(self.end.publish())
    }
}

impl Link<Receiver> {
    fn ready(&mut self, wanted: usize, block: &Block<'_>) -> Result<usize> {
        self.end.ready(wanted).map_err(|error| block.failed(&error))
    }

    /// Receives up to a piece of a lane; whether anything came.
    fn receive(&mut self, lane: &mut Lane, blocks: &[Block<'_>], turn: &Turn<'_>) -> Result<bool> {
        let mut budget = PIECE;
        while budget > 0
            && let Some(block) = blocks[lane.left.clone()].first()
        {
            let moved = match lane.moved {
                Some(moved) => moved,
                None if self.ready(HEADER, block)? < HEADER => break,
                None => {
                    let mut bytes = [0; HEADER];
                    self.end.take(Span::from_mut(&mut bytes));
                    self.compare(Header::from_bytes(bytes), block, turn)?;
                    self.messages += 1;
                    budget = budget.saturating_sub(HEADER);
                    0
                }
            };
            let rest = block.memory.len() - moved;
            let some = self.ready(rest.min(PIECE), block)?.min(rest).min(budget);
            self.end.take(block.memory.part(moved, some));
            budget -= some;
            if some < rest {
                lane.moved = Some(moved + some);
                break;
            }
            lane.moved = None;
            lane.left.start += 1;
        }
        Ok(self.end.publish())
    }

    /// Compares what is sent with what is to be received.
    fn compare(&self, sent: Header, block: &Block<'_>, turn: &Turn<'_>) -> Result<()> {
        let expected = Header::new(self.messages, turn.op.verb, block.dtype, block.count);
        if sent == expected {
            return Ok(());
        }
        let (by, from, segment) = (turn.rank(), block.peer, turn.segment());
        // The first failure is the one that counts.
        if segment.poison().is_none() {
            segment.write_note_words(by, &note(sent, expected));
            segment.set_poison(Poison::Mismatch { by, from });
        }
        Err(mismatch(turn.name(), (by, expected), (from, sent)))
    }
}

/// Both messages of a mismatch, as its receiver notes them.
fn note(sent: Header, expected: Header) -> [u64; NOTE_WORDS] {
    let ([a, b, c], [d, e, f]) = (sent.0, expected.0);
    [a, b, c, d, e, f]
}

/// The note that this rank waits for `lane` while its peer has entered an operation of all ranks.
fn stray_note(turn: &Turn<'_>, block: &Block<'_>) -> [u64; NOTE_WORDS] {
    let Header([_, what, count]) = Header::new(0, turn.op.verb, block.dtype, block.count);
    [turn.next, ENTERED, block.way as u64, 0, what, count]
}

/// The mismatch that rank `by` has noted of what rank `from` sent it, or has entered instead.
pub(super) fn noted(op: String, by: Rank, from: Rank, segment: &Segment) -> Error {
    let [a, b, c, d, e, f] = segment.note_words(by);
    if b != ENTERED {
        return mismatch(op, (by, Header([d, e, f])), (from, Header([a, b, c])));
    }
    let way = if c == Way::Out as u64 { "to" } else { "from" };
    let waits = format!("message of {f} {} {way} rank {from}", dtype_name(e));
    let mut by_rank = vec![(by, waits), (from, segment.fingerprint(from, a).to_string())];
    by_rank.sort_unstable();
    Error::Mismatch { op, field: "verb", by_rank }
}

/// What the receiver expected is not what the sender sent.
fn mismatch(op: String, receiver: (Rank, Header), sender: (Rank, Header)) -> Error {
    let ((by, expected), (from, sent)) = (receiver, sender);
    let field = sent.difference(&expected).unwrap_or("message");
    let mut by_rank =
        vec![(from, format!("{sent} to rank {by}")), (by, format!("{expected} from rank {from}"))];
    by_rank.sort_unstable();
    Error::Mismatch { op, field, by_rank }
}

/// What stands before the data of a message.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Header([u64; HEADER_WORDS]);

impl Header {
    /// The `number`th message of its channel.
    fn new(number: u64, verb: Verb, dtype: DType, count: usize) -> Self {
        Self([number, verb as u64 | (dtype as u64) << 8, count as u64])
    }

    fn to_bytes(self) -> [u8; HEADER] {
        let mut bytes = [0; HEADER];
        for (to, word) in bytes.as_chunks_mut().0.iter_mut().zip(self.0) {
            *to = word.to_le_bytes();
        }
        bytes
    }

    fn from_bytes(bytes: [u8; HEADER]) -> Self {
        let words = bytes.as_chunks().0;
        Self(std::array::from_fn(|i| u64::from_le_bytes(words[i])))
    }

    /// The first field in which two messages differ.
    fn difference(&self, other: &Self) -> Option<&'static str> {
        let [number, what, count] = std::array::from_fn(|i| self.0[i] ^ other.0[i]);
        let fields =
            [("message", number), ("verb", what & 0xff), ("dtype", what >> 8), ("count", count)];
        fields.into_iter().find(|&(_, bits)| bits != 0).map(|(name, _)| name)
    }
}

impl std::fmt::Display for Header {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let [number, what, count] = self.0;
        let verb = Verb::ALL.get(usize::from(what as u8)).map_or("unknown", |verb| verb.name());
        write!(f, "{verb}: message {number} of {count} {}", dtype_name(what))
    }
}

fn dtype_name(what: u64) -> &'static str {
    let dtype = usize::try_from(what >> 8).ok().and_then(|code| DType::ALL.get(code));
    dtype.map_or("unknown", |dtype| dtype.name())
}

/// Where on the ladder a rank stands that waits.
#[derive(Debug, Default)]
struct Pause {
    looks: u32,
    since: Option<Instant>,
    /// A failure that has been seen; it counts if nothing more has come after that.
    failure: Option<Poison>,
    /// Somebody's time is up; the same.
    late: bool,
}

impl Pause {
    /// Waits a little, after a look at all lanes has found none that moves.
    fn step(
        &mut self,
        turn: &Turn<'_>,
        mesh: &mut Mesh,
        blocks: &[Block<'_>],
        lanes: &mut [Lane],
    ) -> Result<()> {
        self.looks += 1;
        if self.looks < LOOKS {
            std::hint::spin_loop();
            return Ok(());
        }
        self.climb(turn, mesh, blocks, lanes)
    }

    #[cold]
    fn climb(
        &mut self,
        turn: &Turn<'_>,
        mesh: &mut Mesh,
        blocks: &[Block<'_>],
        lanes: &mut [Lane],
    ) -> Result<()> {
        let now = Instant::now();
        let waited = now - *self.since.get_or_insert(now);
        let owing = |lane: &mut Lane| now - *lane.since.get_or_insert(now);
        let longest = lanes.iter_mut().map(owing).max().unwrap_or_default();
        if let Some(failure) = self.failure {
            let stray = |lane: &&Lane| stray(turn, lane) == Some(failure);
            if let Some(lane) = lanes.iter().find(stray)
                && turn.segment().poison().is_none()
            {
                let note = stray_note(turn, &blocks[lane.left.start]);
                turn.segment().write_note_words(turn.rank(), &note);
            }
            turn.segment().set_poison(failure);
            return Err(turn.failure(failure, longest));
        }
        if self.late {
            return Err(timed_out(turn, lanes, now));
        }
        self.failure = failure(turn, lanes);
        self.late = longest >= turn.timeout;
        if self.failure.is_some() || self.late {
            return Ok(());
        }
        let (spin, pause) = match (turn.patience, turn.host.alert) {
            (Patience::Caller, true) => (SPIN, YIELD),
            (Patience::Caller, false) => (Duration::ZERO, YIELD),
            (Patience::Background, _) => (SPIN_BACKGROUND, Duration::ZERO),
        };
        if waited < spin {
            std::hint::spin_loop();
        } else if waited < pause {
            std::thread::yield_now();
        } else {
            sleep(turn, mesh, lanes, TICK.min(turn.timeout - longest));
        }
        Ok(())
    }
}

/// Why no more is to be expected, if so.
fn failure(turn: &Turn<'_>, lanes: &[Lane]) -> Option<Poison> {
    let left = || lanes.iter().find_map(|lane| turn.left(lane.peer));
    let stray = || lanes.iter().find_map(|lane| stray(turn, lane));
    turn.segment().poison().or_else(left).or_else(stray)
}

/// The peer of a message has entered an operation of all ranks instead.
fn stray(turn: &Turn<'_>, lane: &Lane) -> Option<Poison> {
    let entry = turn.segment().entry(lane.peer, turn.next);
    let entered = turn.op.verb == Verb::Batch && entry.load(Ordering::Acquire) > turn.next;
    entered.then_some(Poison::Mismatch { by: turn.rank(), from: lane.peer })
}

/// Sleeps on this rank's bell, unless there is a reason not to.
fn sleep(turn: &Turn<'_>, mesh: &mut Mesh, lanes: &[Lane], tick: Duration) {
    let bell = Segment::bell(turn.segment(), turn.rank());
    // SeqCst: either the looks below see what a peer published, or the peer, who looks at the bell
    // after publishing, sees it set.
    bell.store(1, Ordering::SeqCst);
    let awake = failure(turn, lanes).is_some() || lanes.iter().any(|lane| mesh.can_move(lane));
    if !awake {
        sys::futex_wait(bell, 1, tick);
    }
    bell.store(0, Ordering::SeqCst);
}

/// Fails the group, because of the peers who have not moved their lanes for the timeout.
fn timed_out(turn: &Turn<'_>, lanes: &[Lane], now: Instant) -> Error {
    let waited = |lane: &Lane| lane.since.map_or(Duration::ZERO, |since| now - since);
    let owing = lanes.iter().filter(|&lane| waited(lane) >= turn.timeout);
    let mut missing: Vec<Rank> = owing.map(|lane| lane.peer).collect();
    // Already in the order of ranks.
    missing.dedup();
    let longest = lanes.iter().map(waited).max().unwrap_or_default();
    let error = Error::Timeout { op: turn.name(), waited: longest, missing: missing.clone() };
    turn.segment().write_note(turn.rank(), &error.to_string(), &missing);
    turn.segment().set_poison(Poison::TimedOut { by: turn.rank() });
    error
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn headers_are_read_as_written_and_name_what_differs() {
        let header = Header::new(7, Verb::Batch, DType::Bf16, usize::MAX);
        assert_eq!(Header::from_bytes(header.to_bytes()), header);
        let differs = |other| header.difference(&other);
        assert_eq!(differs(header), None);
        assert_eq!(differs(Header::new(8, Verb::Batch, DType::Bf16, 1)), Some("message"));
        assert_eq!(differs(Header::new(7, Verb::Gather, DType::F16, 1)), Some("verb"));
        assert_eq!(differs(Header::new(7, Verb::Batch, DType::F16, 1)), Some("dtype"));
        assert_eq!(differs(Header::new(7, Verb::Batch, DType::Bf16, 1)), Some("count"));
        assert!(Header([u64::MAX; 3]).to_string().contains("unknown"));
    }

    #[test]
    fn a_noted_mismatch_is_told_as_the_receiver_tells_it() {
        let sent = Header::new(7, Verb::Batch, DType::F16, 9);
        let expected = Header::new(7, Verb::Batch, DType::F16, 8);
        let own = mismatch("recv".into(), (0, expected), (2, sent));
        let segment = Segment::attach(Segment::create(3).unwrap(), 3).unwrap();
        segment.write_note_words(0, &note(sent, expected));
        let told = noted("recv".into(), 0, 2, &segment);
        assert_eq!(own.to_string(), told.to_string());
        let Error::Mismatch { field: "count", by_rank, .. } = told else { panic!("{told}") };
        let text = "batch_isend_irecv: message 7 of 8 f16 from rank 2";
        assert_eq!(by_rank[0], (0, text.into()));
        assert!(by_rank[1].0 == 2 && by_rank[1].1.ends_with("9 f16 to rank 0"));
    }
}
