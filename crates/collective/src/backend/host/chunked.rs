//! Large operations on memory of the ranks' own: copy in, fold, copy out, chunk by chunk.
//!
//! A rank stages what others need of a chunk in its own stage, waits until they have too, folds its
//! shard over all ranks' stages in rank order, and puts the result where the shard would have been
//! in its own stage, for the others to copy out. With three stages per rank the next chunk is staged
//! before this one is waited for, so a rank rarely waits for a peer that keeps up.

use super::segment::{CHUNK_BYTES, Counter};
use super::turn::{Turn, Who};
use crate::span::Span;
use crate::{ReduceOp, Result, simd};

/// Bytes folded at a time: the sources and the result stay in the nearest caches.
pub(super) const FOLD_BYTES: usize = 16 << 10;

/// What every chunked algorithm keeps: chunk `i` of this operation is chunk `first + i` of the
/// group.
struct Chunks {
    first: u64,
    count: usize,
    bytes: usize,
}

impl Chunks {
    /// Cuts `len` bytes into chunks of `bytes`.
    fn new(turn: &mut Turn<'_>, len: usize, bytes: usize) -> Self {
        let (first, count) = (*turn.chunk, len.div_ceil(bytes));
        *turn.chunk += count as u64;
        Self { first, count, bytes }
    }

    fn number(&self, i: usize) -> u64 {
        self.first + i as u64
    }

    /// Offset and length of chunk `i` of `len` bytes.
    fn range(&self, i: usize, len: usize) -> (usize, usize) {
        let start = i * self.bytes;
        (start, self.bytes.min(len - start))
    }
}

/// Offset and length of a rank's shard of `len` bytes, on cache lines.
pub(super) fn shard(rank: usize, world: usize, len: usize) -> (usize, usize) {
    let each = len.div_ceil(world).next_multiple_of(64);
    let start = (each * rank).min(len);
    (start, each.min(len - start))
}

/// Three steps per chunk; see [`ProcessGroup::all_reduce`](crate::ProcessGroup::all_reduce).
pub(super) fn all_reduce(turn: &mut Turn<'_>, buf: Span<'_>) -> Result<()> {
    let chunks = Chunks::new(turn, buf.len(), CHUNK_BYTES);
    let (segment, rank, world) = (turn.segment(), turn.rank(), turn.world());
    let op = turn.op.op.expect("an all_reduce has an operator");
    let chunk = |i| {
        let (start, len) = chunks.range(i, buf.len());
        buf.part(start, len)
    };
    let stage = |i| {
        let (chunk, number) = (chunk(i), chunks.number(i));
        let stage = turn.claim_stage(number)?;
        for peer in turn.peers() {
            let (start, len) = shard(peer, world, chunk.len());
            stage.part(start, len).copy_from(chunk.part(start, len));
        }
        turn.publish(Counter::Staged, number + 1);
        Ok(())
    };
    stage(0)?;
    turn.enter()?;
    for i in 0..chunks.count {
        if i + 1 < chunks.count {
            stage(i + 1)?;
        }
        let (chunk, number) = (chunk(i), chunks.number(i));
        turn.wait_for(Who::All, Counter::Staged, number + 1)?;
        let (start, len) = shard(rank, world, chunk.len());
        let own = chunk.part(start, len);
        let stage_of = |rank| segment.stage(rank, number).part(start, len);
        let source = |from| if from == rank { own } else { stage_of(from) };
        let sources: Vec<_> = (0..world).map(source).collect();
        fold_to(turn, op, own, &sources, &[stage_of(rank)]);
        turn.publish(Counter::Folded, number + 1);
        for peer in turn.peers() {
            turn.wait_for(Who::One(peer), Counter::Folded, number + 1)?;
            let (start, len) = shard(peer, world, chunk.len());
            chunk.part(start, len).copy_from(segment.stage(peer, number).part(start, len));
        }
        turn.publish(Counter::Drained, number + 1);
    }
    Ok(())
}

/// As [`all_reduce`], but only the root copies results out, and only the root's buffer changes.
pub(super) fn reduce(turn: &mut Turn<'_>, buf: Span<'_>) -> Result<()> {
    let chunks = Chunks::new(turn, buf.len(), CHUNK_BYTES);
    let (segment, rank, world) = (turn.segment(), turn.rank(), turn.world());
    let op = turn.op.op.expect("a reduce has an operator");
    let root = turn.op.root.expect("a reduce has a root");
    let chunk = |i| {
        let (start, len) = chunks.range(i, buf.len());
        buf.part(start, len)
    };
    let stage = |i| {
        let (chunk, number) = (chunk(i), chunks.number(i));
        let stage = turn.claim_stage(number)?;
        for peer in turn.peers() {
            let (start, len) = shard(peer, world, chunk.len());
            stage.part(start, len).copy_from(chunk.part(start, len));
        }
        turn.publish(Counter::Staged, number + 1);
        Ok(())
    };
    stage(0)?;
    turn.enter()?;
    for i in 0..chunks.count {
        if i + 1 < chunks.count {
            stage(i + 1)?;
        }
        let (chunk, number) = (chunk(i), chunks.number(i));
        turn.wait_for(Who::All, Counter::Staged, number + 1)?;
        let (start, len) = shard(rank, world, chunk.len());
        let own = chunk.part(start, len);
        let stage_of = |rank| segment.stage(rank, number).part(start, len);
        let source = |from| if from == rank { own } else { stage_of(from) };
        let sources: Vec<_> = (0..world).map(source).collect();
        fold_to(turn, op, if rank == root { own } else { stage_of(rank) }, &sources, &[]);
        turn.publish(Counter::Folded, number + 1);
        for peer in turn.peers().filter(|_| rank == root) {
            turn.wait_for(Who::One(peer), Counter::Folded, number + 1)?;
            let (start, len) = shard(peer, world, chunk.len());
            chunk.part(start, len).copy_from(segment.stage(peer, number).part(start, len));
        }
        turn.publish(Counter::Drained, number + 1);
    }
    Ok(())
}

/// Two steps per chunk: stage the other ranks' blocks, fold the own one.
pub(super) fn reduce_scatter(turn: &mut Turn<'_>, input: Span<'_>, output: Span<'_>) -> Result<()> {
    let (segment, rank, world) = (turn.segment(), turn.rank(), turn.world());
    // A stage holds a piece of the block of each rank, one after another.
    let piece = CHUNK_BYTES / world / 64 * 64;
    let chunks = Chunks::new(turn, output.len(), piece);
    let op = turn.op.op.expect("a reduce_scatter has an operator");
    let block = |of: usize, i| {
        let (start, len) = chunks.range(i, output.len());
        input.part(of * output.len() + start, len)
    };
    let stage = |i| {
        let number = chunks.number(i);
        let stage = turn.claim_stage(number)?;
        for peer in turn.peers() {
            let block = block(peer, i);
            stage.part(peer * piece, block.len()).copy_from(block);
        }
        turn.publish(Counter::Staged, number + 1);
        Ok(())
    };
    stage(0)?;
    turn.enter()?;
    for i in 0..chunks.count {
        if i + 1 < chunks.count {
            stage(i + 1)?;
        }
        let number = chunks.number(i);
        turn.wait_for(Who::All, Counter::Staged, number + 1)?;
        let (start, len) = chunks.range(i, output.len());
        let source = |from| {
            if from == rank {
                block(rank, i)
            } else {
                segment.stage(from, number).part(rank * piece, len)
            }
        };
        let sources: Vec<_> = (0..world).map(source).collect();
        fold_to(turn, op, output.part(start, len), &sources, &[]);
        turn.publish(Counter::Drained, number + 1);
    }
    Ok(())
}

/// Two steps per chunk: stage the own input, copy the others'.
pub(super) fn all_gather(turn: &mut Turn<'_>, input: Span<'_>, output: Span<'_>) -> Result<()> {
    let chunks = Chunks::new(turn, input.len(), CHUNK_BYTES);
    let segment = turn.segment();
    let stage = |i| {
        let (number, (start, len)) = (chunks.number(i), chunks.range(i, input.len()));
        turn.claim_stage(number)?.part(0, len).copy_from(input.part(start, len));
        turn.publish(Counter::Staged, number + 1);
        Ok(())
    };
    stage(0)?;
    turn.enter()?;
    output.part(turn.rank() * input.len(), input.len()).copy_from(input);
    for i in 0..chunks.count {
        if i + 1 < chunks.count {
            stage(i + 1)?;
        }
        let (number, (start, len)) = (chunks.number(i), chunks.range(i, input.len()));
        for peer in turn.peers() {
            turn.wait_for(Who::One(peer), Counter::Staged, number + 1)?;
            let place = output.part(peer * input.len() + start, len);
            place.copy_from(segment.stage(peer, number).part(0, len));
        }
        turn.publish(Counter::Drained, number + 1);
    }
    Ok(())
}

/// Two steps per chunk: the root stages, the others copy; the root runs up to three chunks ahead.
pub(super) fn broadcast(turn: &mut Turn<'_>, buf: Span<'_>) -> Result<()> {
    let chunks = Chunks::new(turn, buf.len(), CHUNK_BYTES);
    let root = turn.op.root.expect("a broadcast has a root");
    turn.enter()?;
    for i in 0..chunks.count {
        let (number, (start, len)) = (chunks.number(i), chunks.range(i, buf.len()));
        let chunk = buf.part(start, len);
        if turn.rank() == root {
            turn.claim_stage(number)?.part(0, len).copy_from(chunk);
            turn.publish(Counter::Staged, number + 1);
        } else {
            turn.wait_for(Who::One(root), Counter::Staged, number + 1)?;
            chunk.copy_from(turn.segment().stage(root, number).part(0, len));
        }
        turn.publish(Counter::Drained, number + 1);
    }
    Ok(())
}

/// Folds block by block into `out`, and copies each block to `copies` while it is in the cache.
pub(super) fn fold_to(
    turn: &Turn<'_>,
    op: ReduceOp,
    out: Span<'_>,
    sources: &[Span<'_>],
    copies: &[Span<'_>],
) {
    let mut blocks = Vec::with_capacity(sources.len());
    for start in (0..out.len()).step_by(FOLD_BYTES) {
        let len = FOLD_BYTES.min(out.len() - start);
        blocks.clear();
        blocks.extend(sources.iter().map(|source| source.part(start, len)));
        let out = out.part(start, len);
        simd::fold(turn.op.dtype, op, out, &blocks);
        for copy in copies {
            copy.part(start, len).copy_from(out);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn shards_cover_everything_once() {
        for world in 1..9 {
            for len in [0, 1, 63, 64, 65, 1000, 8192, 262_144] {
                let mut end = 0;
                for rank in 0..world {
                    let (start, shard) = shard(rank, world, len);
                    assert_eq!(start, end.min(len));
                    end = start + shard;
                }
                assert_eq!(end, len);
            }
        }
    }
}
