//! Large operations on memory of the ranks' own: copy in, fold, copy out, chunk by chunk.
//!
//! A rank stages what others need of a chunk in its own stage, waits until they have too, folds its
//! shard over all ranks' stages in rank order, and puts the result where the shard would have been
//! in its own stage, for the others to copy out. With several stages per rank the next chunk is
//! staged before this one is waited for, so a rank rarely waits for a peer that keeps up.

use super::segment::{CHUNK_BYTES, Counter, Stages};
use super::turn::{Turn, Who};
use crate::span::{Route, Span};
use crate::{ReduceOp, Result, simd};

/// Bytes folded at a time where the result goes past the caches afterwards.
const FOLD_BYTES: usize = 16 << 10;

/// Bytes of a chunk between two ranks, which both fold all of it: in a short row of chunks there are
/// better few, in a long one a small chunk is in the second-level cache.
fn pair_bytes(len: usize) -> usize {
    let stage = Stages::of(2).bytes;
    if len <= 8 * stage { stage } else { stage / 4 }
}

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

    fn part<'a>(&self, i: usize, buf: Span<'a>) -> Span<'a> {
        let (start, len) = self.range(i, buf.len());
        buf.part(start, len)
    }

    /// Enters, and does `rest` for each chunk, which it then says to be drained; `stage` is one chunk
    /// ahead.
    fn pipeline(
        &self,
        turn: &Turn<'_>,
        stage: impl Fn(usize) -> Result<()>,
        rest: impl Fn(usize, u64) -> Result<()>,
    ) -> Result<()> {
        stage(0)?;
        turn.enter()?;
        for i in 0..self.count {
            if i + 1 < self.count {
                stage(i + 1)?;
            }
            rest(i, self.number(i))?;
            turn.publish(Counter::Drained, self.number(i) + 1);
        }
        Ok(())
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
    by_shards(turn, buf, true, |own, stage| [own, stage])
}

/// As [`all_reduce`], but only the root copies results out, and only the root's buffer changes.
pub(super) fn reduce(turn: &mut Turn<'_>, buf: Span<'_>) -> Result<()> {
    let is_root = turn.op.root == Some(turn.rank());
    by_shards(turn, buf, is_root, |own, stage| [if is_root { own } else { stage }])
}

/// `outs` says where this rank's shard of the result goes: its part of the buffer and of the stage.
fn by_shards<const N: usize>(
    turn: &mut Turn<'_>,
    buf: Span<'_>,
    copies_out: bool,
    outs: impl for<'a> Fn(Span<'a>, Span<'a>) -> [Span<'a>; N],
) -> Result<()> {
    let chunks = Chunks::new(turn, buf.len(), CHUNK_BYTES);
    let (turn, segment, rank, world) = (&*turn, turn.segment(), turn.rank(), turn.world());
    let op = turn.op.op.expect("the verb reduces, so it has an operator");
    let stage = |i| {
        let (chunk, number) = (chunks.part(i, buf), chunks.number(i));
        let stage = turn.claim_stage(number, chunk.len())?;
        turn.pace.stage(number, chunk.len() / world * (world - 1), |route| {
            for peer in turn.peers() {
                let (start, len) = shard(peer, world, chunk.len());
                stage.part(start, len).copy_by(route, chunk.part(start, len));
            }
        });
        turn.publish(Counter::Staged, number + 1);
        Ok(())
    };
    chunks.pipeline(turn, stage, |i, number| {
        let chunk = chunks.part(i, buf);
        turn.wait_for(Who::All, Counter::Staged, number + 1)?;
        let (start, len) = shard(rank, world, chunk.len());
        let own = chunk.part(start, len);
        let stage_of = |rank| segment.stage(rank, number, chunk.len()).part(start, len);
        let source = |from| if from == rank { own } else { stage_of(from) };
        let (outs, route) = (outs(own, stage_of(rank)), turn.pace.route());
        turn.spans(source, |sources| fold_to(turn, op, &outs, sources, route));
        turn.publish(Counter::Folded, number + 1);
        for peer in turn.peers().filter(|_| copies_out) {
            turn.wait_for(Who::One(peer), Counter::Folded, number + 1)?;
            let (start, len) = shard(peer, world, chunk.len());
            let folded = segment.stage(peer, number, chunk.len()).part(start, len);
            chunk.part(start, len).copy_from(folded);
        }
        Ok(())
    })
}

/// Between two ranks, two steps per chunk: both stage all of it, both fold all of it.
///
/// No more bytes pass between the ranks than if each folded one half and fetched the other, and
/// there is one wait less.
pub(super) fn all_reduce_pair(turn: &mut Turn<'_>, buf: Span<'_>) -> Result<()> {
    let chunks = Chunks::new(turn, buf.len(), pair_bytes(buf.len()));
    let (turn, segment, rank) = (&*turn, turn.segment(), turn.rank());
    let op = turn.op.op.expect("an all_reduce has an operator");
    let stage = |i| turn.stage(chunks.number(i), chunks.part(i, buf));
    chunks.pipeline(turn, stage, |i, number| {
        let chunk = chunks.part(i, buf);
        turn.wait_for(Who::All, Counter::Staged, number + 1)?;
        let source =
            |from| if from == rank { chunk } else { segment.stage(from, number, chunk.len()) };
        turn.spans(source, |sources| simd::fold(turn.op.dtype, op, &[chunk], sources));
        Ok(())
    })
}

/// Two steps per chunk: stage the other ranks' blocks, fold the own one.
pub(super) fn reduce_scatter(turn: &mut Turn<'_>, input: Span<'_>, output: Span<'_>) -> Result<()> {
    // A stage holds a piece of the block of each rank, one after another.
    let piece = CHUNK_BYTES / turn.world() / 64 * 64;
    let chunks = Chunks::new(turn, output.len(), piece);
    let (turn, segment, rank, world) = (&*turn, turn.segment(), turn.rank(), turn.world());
    let op = turn.op.op.expect("a reduce_scatter has an operator");
    let block = |of: usize, i| {
        let (start, len) = chunks.range(i, output.len());
        input.part(of * output.len() + start, len)
    };
    let stage = |i| {
        let number = chunks.number(i);
        let stage = turn.claim_stage(number, CHUNK_BYTES)?;
        let (_, len) = chunks.range(i, output.len());
        turn.pace.stage(number, len * (world - 1), |route| {
            for peer in turn.peers() {
                stage.part(peer * piece, len).copy_by(route, block(peer, i));
            }
        });
        turn.publish(Counter::Staged, number + 1);
        Ok(())
    };
    chunks.pipeline(turn, stage, |i, number| {
        turn.wait_for(Who::All, Counter::Staged, number + 1)?;
        let out = chunks.part(i, output);
        let stage_of = |from| segment.stage(from, number, CHUNK_BYTES);
        let source = |from| match from == rank {
            true => block(rank, i),
            false => stage_of(from).part(rank * piece, out.len()),
        };
        turn.spans(source, |sources| simd::fold(turn.op.dtype, op, &[out], sources));
        Ok(())
    })
}

/// Two steps per chunk: stage the own input, copy the others'.
pub(super) fn all_gather(turn: &mut Turn<'_>, input: Span<'_>, output: Span<'_>) -> Result<()> {
    let chunks = Chunks::new(turn, input.len(), CHUNK_BYTES);
    let (turn, segment) = (&*turn, turn.segment());
    let stage = |i| turn.stage(chunks.number(i), chunks.part(i, input));
    chunks.pipeline(turn, stage, |i, number| {
        let (start, len) = chunks.range(i, input.len());
        let place = |rank: usize| output.part(rank * input.len() + start, len);
        place(turn.rank()).copy_from(input.part(start, len));
        for peer in turn.peers() {
            turn.wait_for(Who::One(peer), Counter::Staged, number + 1)?;
            place(peer).copy_from(segment.stage(peer, number, len));
        }
        Ok(())
    })
}

/// Two steps per chunk: the root stages, the others copy; the root runs ahead by all its stages.
pub(super) fn broadcast(turn: &mut Turn<'_>, buf: Span<'_>) -> Result<()> {
    let chunks = Chunks::new(turn, buf.len(), CHUNK_BYTES);
    let root = turn.op.root.expect("a broadcast has a root");
    turn.enter()?;
    for i in 0..chunks.count {
        let (number, (start, len)) = (chunks.number(i), chunks.range(i, buf.len()));
        let chunk = buf.part(start, len);
        if turn.rank() == root {
            turn.stage(number, chunk)?;
        } else {
            turn.wait_for(Who::One(root), Counter::Staged, number + 1)?;
            chunk.copy_from(turn.segment().stage(root, number, len));
        }
        turn.publish(Counter::Drained, number + 1);
    }
    Ok(())
}

/// Folds into the first of `outs` and stores the same to the others by a route.
fn fold_to(turn: &Turn<'_>, op: ReduceOp, outs: &[Span<'_>], sources: &[Span<'_>], route: Route) {
    if route == Route::Cached {
        return simd::fold(turn.op.dtype, op, outs, sources);
    }
    let (out, copies) = outs.split_first().expect("a fold goes somewhere");
    for start in (0..out.len()).step_by(FOLD_BYTES) {
        let len = FOLD_BYTES.min(out.len() - start);
        let out = out.part(start, len);
        let block = |rank: usize| sources[rank].part(start, len);
        turn.spans(block, |blocks| simd::fold(turn.op.dtype, op, &[out], blocks));
        for copy in copies {
            copy.part(start, len).copy_by(route, out);
        }
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::super::threads;
    use super::*;
    use crate::backend::{Backend, RawBufs, Wait, WaitPolicy};
    use crate::{BufferLocation, DType, Error, GroupOptions, OpDesc, Verb};

    #[test]
    fn who_stops_reading_is_blamed_and_not_the_root_it_holds_up() {
        let hosts = threads::group(3, &GroupOptions::default()).unwrap();
        let count = (Stages::of(3).count as usize + 2) * CHUNK_BYTES;
        let op = OpDesc { verb: Verb::Broadcast, dtype: DType::U8, op: None, root: Some(0), count };
        let wait = |ms| Wait { policy: WaitPolicy::Spin, timeout: Some(Duration::from_millis(ms)) };
        let run = |rank: usize, ms| {
            let mut buf = vec![0_u8; count];
            let output = buf.as_mut_ptr();
            let bufs = RawBufs { input: output.cast_const(), output };
            // SAFETY: the buffer is as long as the operation says and borrowed by nobody.
            unsafe { hosts[rank].run(&op, bufs, wait(ms)) }.unwrap_err()
        };
        std::thread::scope(|scope| {
            // Enters, and then reads nothing.
            scope.spawn(|| {
                let state = &mut hosts[1].state.lock();
                hosts[1].turn(state, &op, BufferLocation::Private, wait(60_000)).enter().unwrap();
            });
            let root = scope.spawn(|| run(0, 60_000));
            for error in [run(2, 300), root.join().unwrap()] {
                let blamed = matches!(&error, Error::Timeout { missing, .. } if *missing == [1]);
                assert!(blamed, "{error}");
            }
        });
    }

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

    #[test]
    fn long_runs_stay_right_whatever_way_the_chunks_are_staged() {
        const COUNT: usize = 150_001;
        for world in [2, 3] {
            let groups = crate::ProcessGroup::threads(world, Duration::from_secs(60)).unwrap();
            std::thread::scope(|scope| {
                for group in groups {
                    scope.spawn(move || {
                        let mut buf = vec![0.0_f32; COUNT];
                        // Enough for a chunk that explores, which is staged past the caches.
                        for round in 0..40 {
                            let part = |i: usize| ((i + round) % 1000) as f32;
                            let fill =
                                |(i, x): (usize, &mut f32)| *x = part(i) + group.rank() as f32;
                            buf.iter_mut().enumerate().for_each(fill);
                            group.all_reduce(&mut buf, ReduceOp::Sum).unwrap();
                            let sum = |i| part(i) * world as f32 + (world * (world - 1) / 2) as f32;
                            assert!((0..COUNT).all(|i| buf[i] == sum(i)), "round {round}");
                        }
                    });
                }
            });
        }
    }
}
