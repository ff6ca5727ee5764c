//! Large operations on private memory, chunk by chunk: copy into a stage, reduce, copy out.
//!
//! For each chunk a rank copies the data that others need into its stage, waits until they have
//! done the same, reduces its shard over all ranks' stages in rank order, and stores the result at
//! the shard's position in its own stage, from which the others copy it. Each rank has several
//! stages and stages the next chunk before it waits for this one, so it rarely waits for peers that
//! run at the same speed.

use super::call::Call;
use super::segment::{CHUNK_BYTES, Counter};
use crate::memory::{Route, Span};
use crate::{ReduceOp, Result, simd};

/// Bytes reduced at a time if the result is then copied past the caches.
const FOLD_BYTES: usize = 16 << 10;

/// Largest buffer that each of two ranks reduces whole, which takes one wait less. Above that,
/// reducing one half each is faster: a rank then reads its own buffer once instead of twice.
pub(super) const PAIR_BYTES: usize = 64 << 10;

/// The chunks of a call; its chunk `i` is chunk `first + i` of the group.
struct Chunks {
    first: u64,
    count: usize,
    bytes: usize,
}

impl Chunks {
    /// Cuts `len` bytes into chunks of `bytes`.
    fn new(call: &mut Call<'_>, len: usize, bytes: usize) -> Self {
        let (first, count) = (*call.chunk, len.div_ceil(bytes));
        *call.chunk += count as u64;
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

    /// Enters, calls `rest` for each chunk and publishes it as drained. `stage` is called one chunk
    /// ahead.
    fn pipeline(
        &self,
        call: &Call<'_>,
        stage: impl Fn(usize) -> Result<()>,
        rest: impl Fn(usize, u64) -> Result<()>,
    ) -> Result<()> {
        stage(0)?;
        call.enter()?;
        for i in 0..self.count {
            if i + 1 < self.count {
                stage(i + 1)?;
            }
            rest(i, self.number(i))?;
            call.publish(Counter::Drained, self.number(i) + 1);
        }
        Ok(())
    }
}

/// Offset and length of a rank's shard of `len` bytes, aligned to cache lines.
pub(super) fn shard(rank: usize, world: usize, len: usize) -> (usize, usize) {
    let each = len.div_ceil(world).next_multiple_of(64);
    let start = (each * rank).min(len);
    (start, each.min(len - start))
}

/// Three steps per chunk; see [`ProcessGroup::all_reduce`](crate::ProcessGroup::all_reduce).
pub(super) fn all_reduce(call: &mut Call<'_>, buf: Span<'_>) -> Result<()> {
    by_shards(call, buf, true, |own, stage| [own, stage])
}

/// Same as [`all_reduce`], but only the root copies results out and changes its buffer.
pub(super) fn reduce(call: &mut Call<'_>, buf: Span<'_>) -> Result<()> {
    let is_root = call.desc.root == Some(call.rank());
    by_shards(call, buf, is_root, |own, stage| [if is_root { own } else { stage }])
}

/// `outs` chooses, from this rank's shard of the buffer and of the stage, where the result is
/// stored.
fn by_shards<const N: usize>(
    call: &mut Call<'_>,
    buf: Span<'_>,
    copies_out: bool,
    outs: impl for<'a> Fn(Span<'a>, Span<'a>) -> [Span<'a>; N],
) -> Result<()> {
    let chunks = Chunks::new(call, buf.len(), CHUNK_BYTES);
    let (call, segment, rank, world) = (&*call, call.segment(), call.rank(), call.world());
    let op = call.desc.op.expect("the verb reduces, so it has an operator");
    let stage = |i| {
        let (chunk, number) = (chunks.part(i, buf), chunks.number(i));
        let stage = call.claim_stage(number, chunk.len())?;
        call.route_tuner.timed_copy(number, chunk.len() / world * (world - 1), |route| {
            for peer in call.peers() {
                let (start, len) = shard(peer, world, chunk.len());
                stage.part(start, len).copy_by(route, chunk.part(start, len));
            }
        });
        call.publish(Counter::Staged, number + 1);
        Ok(())
    };
    chunks.pipeline(call, stage, |i, number| {
        let chunk = chunks.part(i, buf);
        call.wait_for(0..call.world(), Counter::Staged, number + 1)?;
        let (start, len) = shard(rank, world, chunk.len());
        let own = chunk.part(start, len);
        let stage_of = |rank| segment.stage(rank, number, chunk.len()).part(start, len);
        let source = |from| if from == rank { own } else { stage_of(from) };
        let (outs, route) = (outs(own, stage_of(rank)), call.route_tuner.route());
        call.spans(source, |sources| fold_to(call, op, &outs, sources, route));
        call.publish(Counter::Folded, number + 1);
        for peer in call.peers().filter(|_| copies_out) {
            call.wait_for(peer..peer + 1, Counter::Folded, number + 1)?;
            let (start, len) = shard(peer, world, chunk.len());
            let folded = segment.stage(peer, number, chunk.len()).part(start, len);
            chunk.part(start, len).copy_from(folded);
        }
        Ok(())
    })
}

/// Between two ranks, two steps per chunk: both stage the whole chunk, both reduce the whole chunk.
///
/// The same number of bytes moves between cores as if each reduced one half and copied the other,
/// with one wait less.
pub(super) fn all_reduce_pair(call: &mut Call<'_>, buf: Span<'_>) -> Result<()> {
    let chunks = Chunks::new(call, buf.len(), CHUNK_BYTES);
    let (call, segment, rank) = (&*call, call.segment(), call.rank());
    let op = call.desc.op.expect("an all_reduce has an operator");
    let stage = |i| call.stage(chunks.number(i), chunks.part(i, buf));
    chunks.pipeline(call, stage, |i, number| {
        let chunk = chunks.part(i, buf);
        call.wait_for(0..call.world(), Counter::Staged, number + 1)?;
        let source =
            |from| if from == rank { chunk } else { segment.stage(from, number, chunk.len()) };
        call.spans(source, |sources| simd::fold(call.desc.dtype, op, &[chunk], sources));
        Ok(())
    })
}

/// Two steps per chunk: stage the other ranks' blocks, reduce this rank's.
pub(super) fn reduce_scatter(call: &mut Call<'_>, input: Span<'_>, output: Span<'_>) -> Result<()> {
    // A stage holds one piece of each rank's block, in rank order.
    let piece = CHUNK_BYTES / call.world() / 64 * 64;
    let chunks = Chunks::new(call, output.len(), piece);
    let (call, segment, rank, world) = (&*call, call.segment(), call.rank(), call.world());
    let op = call.desc.op.expect("a reduce_scatter has an operator");
    let block = |of: usize, i| {
        let (start, len) = chunks.range(i, output.len());
        input.part(of * output.len() + start, len)
    };
    let stage = |i| {
        let number = chunks.number(i);
        let stage = call.claim_stage(number, CHUNK_BYTES)?;
        let (_, len) = chunks.range(i, output.len());
        call.route_tuner.timed_copy(number, len * (world - 1), |route| {
            for peer in call.peers() {
                stage.part(peer * piece, len).copy_by(route, block(peer, i));
            }
        });
        call.publish(Counter::Staged, number + 1);
        Ok(())
    };
    chunks.pipeline(call, stage, |i, number| {
        call.wait_for(0..call.world(), Counter::Staged, number + 1)?;
        let out = chunks.part(i, output);
        let stage_of = |from| segment.stage(from, number, CHUNK_BYTES);
        let source = |from| match from == rank {
            true => block(rank, i),
            false => stage_of(from).part(rank * piece, out.len()),
        };
        call.spans(source, |sources| simd::fold(call.desc.dtype, op, &[out], sources));
        Ok(())
    })
}

/// Two steps per chunk: stage this rank's input, copy the others'.
pub(super) fn all_gather(call: &mut Call<'_>, input: Span<'_>, output: Span<'_>) -> Result<()> {
    let chunks = Chunks::new(call, input.len(), CHUNK_BYTES);
    let (call, segment) = (&*call, call.segment());
    let stage = |i| call.stage(chunks.number(i), chunks.part(i, input));
    chunks.pipeline(call, stage, |i, number| {
        let (start, len) = chunks.range(i, input.len());
        let block = |rank: usize| output.part(rank * input.len() + start, len);
        block(call.rank()).copy_from(input.part(start, len));
        for peer in call.peers() {
            call.wait_for(peer..peer + 1, Counter::Staged, number + 1)?;
            block(peer).copy_from(segment.stage(peer, number, len));
        }
        Ok(())
    })
}

/// Two steps per chunk: the root stages, the others copy. The root runs ahead by the number of
/// stages.
pub(super) fn broadcast(call: &mut Call<'_>, buf: Span<'_>) -> Result<()> {
    let chunks = Chunks::new(call, buf.len(), CHUNK_BYTES);
    let root = call.desc.root.expect("a broadcast has a root");
    call.enter()?;
    for i in 0..chunks.count {
        let (number, (start, len)) = (chunks.number(i), chunks.range(i, buf.len()));
        let chunk = buf.part(start, len);
        if call.rank() == root {
            call.stage(number, chunk)?;
        } else {
            call.wait_for(root..root + 1, Counter::Staged, number + 1)?;
            chunk.copy_from(call.segment().stage(root, number, len));
        }
        call.publish(Counter::Drained, number + 1);
    }
    Ok(())
}

/// Reduces into the first of `outs` and copies the result to the others by `route`.
fn fold_to(call: &Call<'_>, op: ReduceOp, outs: &[Span<'_>], sources: &[Span<'_>], route: Route) {
    if route == Route::Cached {
        return simd::fold(call.desc.dtype, op, outs, sources);
    }
    let (out, copies) = outs.split_first().expect("a reduction has an output");
    for start in (0..out.len()).step_by(FOLD_BYTES) {
        let len = FOLD_BYTES.min(out.len() - start);
        let out = out.part(start, len);
        let block = |rank: usize| sources[rank].part(start, len);
        call.spans(block, |blocks| simd::fold(call.desc.dtype, op, &[out], blocks));
        for copy in copies {
            copy.part(start, len).copy_by(route, out);
        }
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::super::segment::STAGES;
    use super::super::threads;
    use super::*;
    use crate::backend::{Backend, RawBufs, Wait, WaitPolicy};
    use crate::{BufferLocation, DType, Error, GroupOptions, OpDesc, Verb};

    #[test]
    fn a_timeout_names_the_rank_that_stopped_reading_and_not_the_root() {
        let hosts = threads::group(3, &GroupOptions::default()).unwrap();
        let count = (STAGES as usize + 2) * CHUNK_BYTES;
        let op = OpDesc { verb: Verb::Broadcast, dtype: DType::U8, op: None, root: Some(0), count };
        let wait = |ms| Wait { policy: WaitPolicy::Spin, timeout: Some(Duration::from_millis(ms)) };
        let run = |rank: usize, ms| {
            let mut buf = vec![0_u8; count];
            let output = buf.as_mut_ptr();
            let bufs = RawBufs { input: output.cast_const(), output };
            // SAFETY: the buffer has the length of the operation and is not borrowed.
            unsafe { hosts[rank].run(&op, bufs, wait(ms)) }.unwrap_err()
        };
        std::thread::scope(|scope| {
            // Enters and reads nothing.
            scope.spawn(|| {
                let state = &mut hosts[1].state.lock();
                hosts[1].call(state, &op, BufferLocation::Private, wait(60_000)).enter().unwrap();
            });
            let root = scope.spawn(|| run(0, 60_000));
            for error in [run(2, 300), root.join().unwrap()] {
                let named = matches!(&error, Error::Timeout { missing, .. } if *missing == [1]);
                assert!(named, "{error}");
            }
        });
    }

    #[test]
    fn shards_partition_the_buffer() {
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
    fn all_reduce_is_correct_by_either_copy_route() {
        const COUNT: usize = 150_001;
        for world in [2, 3] {
            let groups = crate::ProcessGroup::threads(world, Duration::from_secs(60)).unwrap();
            std::thread::scope(|scope| {
                for group in groups {
                    scope.spawn(move || {
                        let mut buf = vec![0.0_f32; COUNT];
                        // Enough chunks for one to take the other route.
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
