//! Blocks from rank to rank over gloo's unbound buffers, and the verbs that only move them.
//!
//! A block travels in pieces of [`PIECE`] bytes, so that a timeout is for a piece and not for all
//! of it. Gloo sends a message once its receive is posted: nothing arrives that was not asked for.

use std::sync::Arc;
use std::time::{Duration, Instant};

use super::State;
use super::control::{Cause, Letter};
use super::mesh::{Buffer, Mesh, Way};
use super::turn::{Turn, entered};
use crate::backend::{Transfer, TransferMemory};
use crate::span::Span;
use crate::{DType, Error, Rank, Result};

/// Bytes of a message at most.
const PIECE: usize = 4 << 20;
/// Longest sleep while waiting for any of several headers.
const SLICE: Duration = Duration::from_millis(1);
/// How long a header may follow a goodbye.
const GRACE: Duration = Duration::from_secs(1);

/// Blocks of operations at which all ranks meet.
const BLOCK_SLOT: u64 = 3 << 56;
/// Headers and blocks of messages between pairs.
const HEADER_SLOT: u64 = 4 << 56;
const MESSAGE_SLOT: u64 = 5 << 56;

/// A block on its way.
#[derive(Clone, Copy, Debug)]
pub(super) struct Move<'a> {
    pub(super) peer: Rank,
    pub(super) way: Way,
    pub(super) memory: Span<'a>,
}

impl<'a> Move<'a> {
    pub(super) fn send(memory: Span<'a>, peer: Rank) -> Self {
        Self { peer, way: Way::Send, memory }
    }

    pub(super) fn receive(memory: Span<'a>, peer: Rank) -> Self {
        Self { peer, way: Way::Receive, memory }
    }
}

/// The transfers' memory.
///
/// # Safety
///
/// It is good for `'a` as [`Backend::exchange`](crate::Backend::exchange) says.
pub(super) unsafe fn moves<'a>(transfers: &[Transfer]) -> Vec<Move<'a>> {
    let to_move = |transfer: &Transfer| {
        let len = transfer.count * transfer.dtype.size();
        let (way, ptr) = match transfer.memory {
            TransferMemory::Send(ptr) => (Way::Send, ptr.cast_mut()),
            TransferMemory::Receive(ptr) => (Way::Receive, ptr),
        };
        // SAFETY: the caller's promise; what is sent is only read.
        Move { peer: transfer.peer, way, memory: unsafe { Span::new(ptr, len) } }
    };
    transfers.iter().map(to_move).collect()
}

/// Moves blocks whose lengths both ends know, all at once; returns when all are done.
pub(super) fn transfer(turn: &Turn<'_>, state: &State, moves: &[Move<'_>]) -> Result<()> {
    let mesh = data(state);
    let start = |&block| Flight::start(turn, mesh, BLOCK_SLOT, block);
    let flights: Vec<_> = moves.iter().map(start).collect::<Result<_>>()?;
    land(turn, &flights)
}

/// A block whose pieces gloo has been told of.
struct Flight<'a> {
    buffer: Buffer<'a>,
    peer: Rank,
    way: Way,
    pieces: usize,
}

impl<'a> Flight<'a> {
    fn start(turn: &Turn<'_>, mesh: &Arc<Mesh>, slot: u64, block: Move<'a>) -> Result<Self> {
        let Move { peer, way, memory } = block;
        let broken = |why| turn.broken(peer, why);
        let buffer = Buffer::new(mesh, memory).map_err(broken)?;
        let starts = (0..memory.len()).step_by(PIECE);
        let pieces = starts.len();
        for start in starts {
            let part = (start, PIECE.min(memory.len() - start));
            buffer.start(way, peer, slot, part).map_err(broken)?;
        }
        Ok(Self { buffer, peer, way, pieces })
    }
}

fn land(turn: &Turn<'_>, flights: &[Flight<'_>]) -> Result<()> {
    // What is received first: a send may be waiting for its receiver.
    for way in [Way::Receive, Way::Send] {
        for flight in flights.iter().filter(|flight| flight.way == way) {
            for _ in 0..flight.pieces {
                turn.wait_one(&flight.buffer, way, flight.peer)?;
            }
        }
    }
    Ok(())
}

pub(super) fn data(state: &State) -> &Arc<Mesh> {
    state.data.as_ref().expect("there until an operation has failed, and then there is no other")
}

/// One step: every rank sends its block to every other.
pub(super) fn all_gather(
    turn: &Turn<'_>,
    state: &State,
    input: Span<'_>,
    output: Span<'_>,
) -> Result<()> {
    let block = |rank: Rank| output.part(rank * input.len(), input.len());
    let receives = turn.peers().map(|peer| Move::receive(block(peer), peer));
    let sends = turn.peers().map(|peer| Move::send(input, peer));
    let moves: Vec<_> = receives.chain(sends).collect();
    transfer(turn, state, &moves)?;
    block(turn.rank()).copy_from(input);
    Ok(())
}

/// A binomial tree: as many steps as the number of ranks has binary digits.
pub(super) fn broadcast(turn: &Turn<'_>, state: &State, memory: Span<'_>) -> Result<()> {
    let (world, root) = (turn.world(), turn.op.root.expect("a broadcast has a root"));
    // Counted from the root: a rank's parent has the lowest one of its binary digits cleared, and
    // its children have a lower one set.
    let place = (turn.rank() + world - root) % world;
    let rank = |place: usize| (place + root) % world;
    let lowest = if place == 0 { usize::MAX } else { place & place.wrapping_neg() };
    if place != 0 {
        transfer(turn, state, &[Move::receive(memory, rank(place - lowest))])?;
    }
    let digits = (0..usize::BITS).map(|digit| 1 << digit);
    let children = digits.take_while(|&digit| digit < lowest && place + digit < world);
    let mut moves: Vec<_> = children.map(|digit| Move::send(memory, rank(place + digit))).collect();
    // The largest subtree first.
    moves.reverse();
    transfer(turn, state, &moves)
}

/// What is said of a message before it: its number from this rank to that, type, and count.
const HEADER_BYTES: usize = 24;

/// A message whose header has not come.
struct Awaited<'a> {
    letter: Arc<Letter>,
    header: [u8; HEADER_BYTES],
    transfer: Transfer,
    block: Move<'a>,
}

/// Messages between pairs. A receiver posts the receive for a block once its header has come and
/// fits, so a byte lands only where it is expected.
///
/// Headers share the connection of fingerprints. Gloo sends a header once its receive is posted, so a
/// peer whose fingerprint is here, but which has sent no header or taken none, calls something else.
pub(super) fn batch(
    turn: &Turn<'_>,
    state: &mut State,
    transfers: &[Transfer],
    moves: &[Move<'_>],
) -> Result<()> {
    if let Some(cause) = turn.gloo.control.look() {
        return Err(turn.failure(cause, Duration::ZERO));
    }
    let mesh = Arc::clone(data(state));
    let (mut flights, mut letters, mut awaited) = (Vec::new(), Vec::new(), Vec::new());
    for (&transfer, &block) in transfers.iter().zip(moves) {
        let broken = |why| turn.broken(block.peer, why);
        let header = header(state, &transfer, block.way);
        let mut letter = Letter::new(&turn.gloo.control.mesh, HEADER_BYTES).map_err(broken)?;
        if block.way == Way::Send {
            letter.write(&header);
        }
        letter.start(block.way, block.peer, HEADER_SLOT).map_err(broken)?;
        let letter = Arc::new(letter);
        state.headers.push(Arc::clone(&letter));
        match block.way {
            Way::Receive => awaited.push(Awaited { letter, header, transfer, block }),
            Way::Send => {
                letters.push((letter, transfer));
                flights.push(Flight::start(turn, &mesh, MESSAGE_SLOT, block)?);
            }
        }
    }
    while !awaited.is_empty() {
        let next = next_header(turn, state, &mut awaited)?;
        check(turn, &next)?;
        flights.push(Flight::start(turn, &mesh, MESSAGE_SLOT, next.block)?);
    }
    for (letter, transfer) in &letters {
        let peer = transfer.peer;
        let instead = || entered(state, peer).is_some();
        if !turn.wait_unless(letter.buffer(), Way::Send, peer, &instead)? {
            return Err(stray(turn, state, transfer, "to"));
        }
    }
    land(turn, &flights)?;
    state.headers.clear();
    Ok(())
}

/// The group's failure because the peer of a message to or from it has entered an operation of all
/// ranks instead.
fn stray(turn: &Turn<'_>, state: &State, transfer: &Transfer, way: &str) -> Error {
    let Transfer { peer, dtype, count, .. } = *transfer;
    let other = entered(state, peer).map(|print| print.to_string()).unwrap_or_default();
    let own = format!("message of {count} {dtype} {way} rank {peer}");
    mismatch(turn, "verb", vec![(turn.rank(), own), (peer, other)])
}

/// Fails the group for what nobody but this rank knows.
fn mismatch(turn: &Turn<'_>, field: &'static str, mut by_rank: Vec<(Rank, String)>) -> Error {
    by_rank.sort_unstable();
    let cause = Cause::Mismatch { field: field.into(), by_rank: by_rank.clone() };
    turn.fail_with(cause, Error::Mismatch { op: turn.name(), field, by_rank })
}

/// The next message between this rank and a peer.
fn header(state: &mut State, transfer: &Transfer, way: Way) -> [u8; HEADER_BYTES] {
    let numbers = match way {
        Way::Send => &mut state.sent,
        Way::Receive => &mut state.received,
    };
    let number = &mut numbers[transfer.peer];
    *number += 1;
    let words = [*number, transfer.dtype as u64, transfer.count as u64];
    let mut bytes = [0; HEADER_BYTES];
    for (bytes, word) in bytes.as_chunks_mut().0.iter_mut().zip(words) {
        *bytes = u64::to_le_bytes(word);
    }
    bytes
}

/// Waits for any of the headers, of which those of one peer come in order.
fn next_header<'a>(
    turn: &Turn<'_>,
    state: &State,
    awaited: &mut Vec<Awaited<'a>>,
) -> Result<Awaited<'a>> {
    let start = Instant::now();
    let mut goodbyes = vec![None; turn.world()];
    loop {
        let first = awaited[0].block.peer;
        let mut looked = vec![false; turn.world()];
        for i in 0..awaited.len() {
            let Awaited { letter, block: Move { peer, .. }, .. } = &awaited[i];
            if std::mem::replace(&mut looked[*peer], true) {
                continue;
            }
            // Sleeps on the first, and looks at the others.
            let others = awaited.iter().any(|other| other.block.peer != first);
            let time = match (i, others) {
                (0, false) => SLICE,
                (0, true) => SLICE / 10,
                _ => Duration::ZERO,
            };
            // Before looking: its headers come before its fingerprint.
            let entered = entered(state, *peer).is_some();
            let came = letter.buffer().take(Way::Receive, time);
            if came.map_err(|why| turn.broken(*peer, why))? {
                return Ok(awaited.remove(i));
            }
            if entered {
                return Err(stray(turn, state, &awaited[i].transfer, "from"));
            }
        }
        let missing = || (0..turn.world()).filter(|&peer| looked[peer]).collect();
        for (peer, goodbye) in goodbyes.iter_mut().enumerate().filter(|&(peer, _)| looked[peer]) {
            if let Some(cause) = turn.look(peer, goodbye, GRACE) {
                return Err(turn.end(Some(&cause), start.elapsed(), &missing));
            }
        }
        if start.elapsed() >= turn.timeout {
            return Err(turn.end(None, start.elapsed(), &missing));
        }
    }
}

/// Compares what has been announced with what is expected.
fn check(turn: &Turn<'_>, awaited: &Awaited<'_>) -> Result<()> {
    let said = awaited.letter.read();
    if said == awaited.header {
        return Ok(());
    }
    let words = |bytes: &[u8]| -> Vec<u64> {
        bytes.as_chunks().0.iter().map(|word| u64::from_le_bytes(*word)).collect()
    };
    let (said, expected) = (words(said), words(&awaited.header));
    let fields = ["seq", "dtype", "count"];
    let field = fields[(0..3).find(|&i| said[i] != expected[i]).unwrap_or(0)];
    let dtype = |code: u64| {
        let dtype = usize::try_from(code).ok().and_then(|code| DType::ALL.get(code));
        dtype.map_or("elements of unknown type", |dtype| dtype.name())
    };
    let call = |words: &[u64], way: &str, other: Rank| {
        format!("message {} of {} {} {way} rank {other}", words[0], words[2], dtype(words[1]))
    };
    let (rank, peer) = (turn.rank(), awaited.transfer.peer);
    let by_rank = vec![(rank, call(&expected, "from", peer)), (peer, call(&said, "to", rank))];
    Err(mismatch(turn, field, by_rank))
}
