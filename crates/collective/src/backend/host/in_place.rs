//! All-reduce of a shared buffer where it lies: no copies in or out.
//!
//! Once all have entered, each rank folds its shard over all ranks' parts and stores the result to
//! every part. The buffer is the caller's again when all have said that they
//! are done: until then a peer may still be storing its shard.

use super::InUse;
use super::chunked::shard;
use super::segment::Counter;
use super::turn::{Turn, Who};
use crate::span::Span;
use crate::{Result, simd};

/// One step; see [`ProcessGroup::all_reduce`](crate::ProcessGroup::all_reduce).
pub(super) fn all_reduce(turn: &mut Turn<'_>, buf: Span<'_>, shared: &InUse) -> Result<()> {
    let number = *turn.chunk;
    *turn.chunk += 1;
    turn.enter()?;
    let (start, len) = shard(turn.rank(), turn.world(), buf.len());
    let own = buf.part(start, len);
    let part_of = |rank: usize| {
        let offset = rank * shared.stride + shared.offset + start;
        // This rank's own part is borrowed by the caller; only the caller's pointer reaches it.
        if rank == turn.rank() { own } else { shared.map.data(offset, len) }
    };
    let op = turn.op.op.expect("an all_reduce has an operator");
    turn.spans(part_of, |parts| simd::fold(turn.op.dtype, op, parts, parts));
    turn.publish(Counter::Folded, number + 1);
    turn.publish(Counter::Drained, number + 1);
    turn.wait_for(Who::All, Counter::Folded, number + 1)
}
