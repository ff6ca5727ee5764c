//! Reductions: gloo moves, we fold in rank order; or, if any order will do, gloo's own ring.
//!
//! In rank order a rank receives its shard of every peer's buffer, folds them, and sends the result
//! on: two steps. Small buffers go whole to everybody, who all fold them: one step. Large ones are
//! taken block by block, so that the memory for what arrives has a bound.

#![expect(unsafe_code, reason = "lends vectors as spans")]

use std::time::{Duration, Instant};

use super::State;
use super::control::Cause;
use super::mesh::{Job, Trouble};
use super::messages::{Move, data, transfer};
use super::turn::Turn;
use crate::span::Span;
use crate::{Error, Rank, ReduceOp, Result, simd};

/// Up to here everybody gets everything.
const FLAT_BYTES: usize = 8 << 10;
/// Bytes of a buffer reduced at a time.
const BLOCK_BYTES: usize = 16 << 20;
/// Bytes folded at a time: the sources and the result stay in the nearest caches.
const FOLD_BYTES: usize = 16 << 10;

/// Two steps per block, or one: see the module.
pub(super) fn all_reduce(turn: &Turn<'_>, state: &mut State, memory: Span<'_>) -> Result<()> {
    for block in blocks(memory) {
        if block.len() <= FLAT_BYTES {
            let all = sends(turn, |_| block);
            fold_from_peers(turn, state, block, block, &all)?;
            continue;
        }
        let shard = |rank| shard(block, rank, turn.world());
        let own = shard(turn.rank());
        let all = sends(turn, shard);
        fold_from_peers(turn, state, own, own, &all)?;
        let receives = turn.peers().map(|peer| Move::receive(shard(peer), peer));
        let moves: Vec<_> = receives.chain(sends(turn, |_| own)).collect();
        transfer(turn, state, &moves)?;
    }
    Ok(())
}

/// As `all_reduce`, but only the root gets the results, and folds where they are small.
pub(super) fn reduce(turn: &Turn<'_>, state: &mut State, memory: Span<'_>) -> Result<()> {
    let root = turn.op.root.expect("a reduce has a root");
    let is_root = turn.rank() == root;
    // The others' buffers stay as they are: their results lie elsewhere.
    let mut result = Vec::new();
    for block in blocks(memory) {
        if block.len() <= FLAT_BYTES {
            if is_root {
                fold_from_peers(turn, state, block, block, &[])?;
            } else {
                transfer(turn, state, &[Move::send(block, root)])?;
            }
            continue;
        }
        let shard = |rank| shard(block, rank, turn.world());
        let own = shard(turn.rank());
        let target = if is_root { own } else { at_least(&mut result, own.len()) };
        let all = sends(turn, shard);
        fold_from_peers(turn, state, own, target, &all)?;
        let moves: Vec<_> = match is_root {
            true => turn.peers().map(|peer| Move::receive(shard(peer), peer)).collect(),
            false => vec![Move::send(target, root)],
        };
        transfer(turn, state, &moves)?;
    }
    Ok(())
}

/// One step per block: every rank sends every other its block.
pub(super) fn reduce_scatter(
    turn: &Turn<'_>,
    state: &mut State,
    input: Span<'_>,
    output: Span<'_>,
) -> Result<()> {
    let len = output.len();
    let step = (BLOCK_BYTES / turn.world()).next_multiple_of(64);
    for start in (0..len).step_by(step) {
        let part = |rank: Rank| input.part(rank * len + start, step.min(len - start));
        let own = part(turn.rank());
        let all = sends(turn, part);
        fold_from_peers(turn, state, own, output.part(start, own.len()), &all)?;
    }
    Ok(())
}

/// Gloo's all-reduce or reduce: a ring, `2 (n - 1)` steps. Any order, and so 16-bit floats are
/// rounded at each step.
pub(super) fn by_gloo(turn: &Turn<'_>, state: &mut State, memory: Span<'_>) -> Result<()> {
    if memory.len() == 0 {
        return Ok(());
    }
    let (dtype, op) = (turn.op.dtype, turn.op.op.expect("a reduction has an operator"));
    let scale =
        |memory: Span<'_>, factor: ReduceOp| simd::fold(dtype, factor, &[memory], &[memory]);
    let mut copy = std::mem::take(&mut state.scratch);
    // Gloo overwrites every rank's buffer, we only the root's.
    let memory = match turn.op.root {
        Some(root) if root != turn.rank() => {
            let copy = at_least(&mut copy, memory.len());
            copy.copy_from(memory);
            copy
        }
        _ => memory,
    };
    let (before, pairwise, after) = match op {
        ReduceOp::PreMulSum(_) => (Some(op), ReduceOp::Sum, None),
        ReduceOp::Avg => {
            (None, ReduceOp::Sum, Some(ReduceOp::pre_mul_sum(1.0 / turn.world() as f64)))
        }
        op => (None, op, None),
    };
    if let Some(factor) = before {
        scale(memory, factor);
    }
    let keep_on = || turn.gloo.control.look().is_none();
    let job = Job::new(dtype, pairwise, &keep_on);
    let tag = turn.seq.unwrap_or_default() as u32;
    let start = Instant::now();
    let result = data(state).reduce(memory, turn.op.root, &job, tag, turn.timeout);
    result.map_err(|trouble| give_up(turn, start.elapsed(), trouble))?;
    if let Some(factor) = after {
        scale(memory, factor);
    }
    state.scratch = copy;
    Ok(())
}

fn give_up(turn: &Turn<'_>, waited: Duration, trouble: Trouble) -> Error {
    match (trouble, turn.gloo.control.look()) {
        (Trouble::Late(peer) | Trouble::Stopped(peer), cause) => {
            turn.end(cause, waited, &|| vec![peer])
        }
        (_, Some(cause)) => turn.end(Some(cause), waited, &Vec::new),
        (Trouble::Io(text), None) => {
            let neighbour = (turn.rank() + 1) % turn.world();
            turn.broken(neighbour, Trouble::Io(text))
        }
        (trouble, None) => {
            let (what, text) = (format!("{}: gloo", turn.name()), trouble.text());
            let error = Error::Io { what, text, kind: std::io::ErrorKind::Other };
            let reason = error.to_string();
            turn.fail_with(Cause::Aborted { by: turn.rank(), reason }, error)
        }
    }
}

/// A send to every peer of what `of` says is its own.
fn sends<'a>(turn: &Turn<'_>, of: impl Fn(Rank) -> Span<'a>) -> Vec<Move<'a>> {
    turn.peers().map(|peer| Move::send(of(peer), peer)).collect()
}

/// Sends, receives as many bytes as `own` has from every peer, and folds all in rank order.
fn fold_from_peers(
    turn: &Turn<'_>,
    state: &mut State,
    own: Span<'_>,
    out: Span<'_>,
    sends: &[Move<'_>],
) -> Result<()> {
    let (rank, world) = (turn.rank(), turn.world());
    let mut scratch = std::mem::take(&mut state.scratch);
    let all = at_least(&mut scratch, own.len() * world);
    let from = |peer: Rank| match peer == rank {
        true => own,
        false => all.part(peer * own.len(), own.len()),
    };
    let receives = turn.peers().map(|peer| Move::receive(from(peer), peer));
    let moves: Vec<_> = receives.chain(sends.iter().copied()).collect();
    transfer(turn, state, &moves)?;
    let sources: Vec<_> = (0..world).map(from).collect();
    let op = turn.op.op.expect("a reduction has an operator");
    for start in (0..out.len()).step_by(FOLD_BYTES) {
        let len = FOLD_BYTES.min(out.len() - start);
        let parts: Vec<_> = sources.iter().map(|source| source.part(start, len)).collect();
        simd::fold(turn.op.dtype, op, &[out.part(start, len)], &parts);
    }
    state.scratch = scratch;
    Ok(())
}

/// The first `len` bytes, which there are from now on.
fn at_least(memory: &mut Vec<u8>, len: usize) -> Span<'_> {
    if memory.len() < len {
        memory.resize(len, 0);
    }
    // SAFETY: the vector is borrowed for as long as the span lives, and holds `len` bytes.
    unsafe { Span::new(memory.as_mut_ptr(), len) }
}

fn blocks(memory: Span<'_>) -> impl Iterator<Item = Span<'_>> {
    let part = move |start| memory.part(start, BLOCK_BYTES.min(memory.len() - start));
    (0..memory.len()).step_by(BLOCK_BYTES).map(part)
}

/// A rank's part of a block: whole cache lines, so whole elements.
fn shard(block: Span<'_>, rank: Rank, world: usize) -> Span<'_> {
    let each = block.len().div_ceil(world).next_multiple_of(64);
    let start = (each * rank).min(block.len());
    block.part(start, each.min(block.len() - start))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn shards_and_blocks_cover_everything_once() {
        let mut memory = Vec::new();
        for len in [0, 1, 64, 8193, BLOCK_BYTES - 1, BLOCK_BYTES + 8, 2 * BLOCK_BYTES] {
            let memory = at_least(&mut memory, len);
            for world in 1..6 {
                let mut end = memory.ptr().addr();
                for part in blocks(memory)
                    .flat_map(|block| (0..world).map(move |rank| shard(block, rank, world)))
                {
                    assert_eq!(part.ptr().addr(), end);
                    end += part.len();
                }
                assert_eq!(end, memory.ptr().addr() + len);
            }
        }
    }
}
