//! All-reduce of a shared buffer in place, without copies in or out.
//!
//! After all ranks have entered, each rank reduces its shard over all ranks' parts and stores the
//! result into every part. The call returns when all ranks are done, since until then a peer may
//! still store its shard.

use super::call::Call;
use super::chunked::shard;
use super::segment::Counter;
use super::shared::InUse;
use crate::memory::Span;
use crate::{Result, simd};

/// One step; see [`ProcessGroup::all_reduce`](crate::ProcessGroup::all_reduce).
pub(super) fn all_reduce(call: &mut Call<'_>, buf: Span<'_>, shared: &InUse) -> Result<()> {
    let number = *call.chunk;
    *call.chunk += 1;
    call.enter()?;
    let (start, len) = shard(call.rank(), call.world(), buf.len());
    let own = buf.part(start, len);
    let part_of = |rank: usize| {
        // This rank's own part is borrowed by the caller, so it is accessed through the caller's
        // pointer.
        if rank == call.rank() { own } else { shared.part(rank, start, len) }
    };
    let op = call.desc.op.expect("an all_reduce has an operator");
    call.spans(part_of, |parts| simd::fold(call.desc.dtype, op, parts, parts));
    call.publish(Counter::Folded, number + 1);
    call.publish(Counter::Drained, number + 1);
    call.wait_for(0..call.world(), Counter::Folded, number + 1)
}
