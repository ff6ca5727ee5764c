//! Operations of up to 8 KiB in one step: each rank writes its slot and reads all slots.
//!
//! The entry that publishes the fingerprint also publishes the slot, so there is one wait. A rank
//! writes its input once and reads the `n` inputs.

use super::call::Call;
use super::segment::FLAT_BYTES;
use crate::memory::Span;
use crate::memory::copy;
use crate::{Result, Verb, simd};

/// Most bytes that a rank reads in a reduction of one step. Above that each rank reduces its shard,
/// which needs two more waits, but reads the bytes of two inputs instead of all.
const READ_BYTES: usize = 32 << 10;

/// Returns the largest input, in bytes, for which one step is used.
pub(super) fn limit(verb: Verb, world: usize) -> usize {
    match verb {
        Verb::AllReduce | Verb::Reduce => FLAT_BYTES.min(READ_BYTES / world),
        _ => FLAT_BYTES,
    }
}

/// Runs any verb whose input fits a slot.
pub(super) fn run(call: &Call<'_>, input: Span<'_>, output: Span<'_>) -> Result<()> {
    let (op, segment, rank) = (call.desc, call.segment(), call.rank());
    let slot = |rank| segment.slot_data(rank, call.seq, input.len());
    if op.verb != Verb::Broadcast || op.root == Some(rank) {
        slot(rank).copy_from(input);
    }
    call.enter()?;
    // This rank's input is nearer than its slot, which may not have left the core yet.
    let source = |from| if from == rank { input } else { slot(from) };
    match (op.verb, op.op, op.root) {
        (Verb::Reduce, _, Some(root)) if root != rank => {}
        (Verb::AllReduce | Verb::Reduce, Some(reduce), _) => {
            call.spans(source, |sources| simd::fold(op.dtype, reduce, &[output], sources));
        }
        (Verb::ReduceScatter, Some(reduce), _) => {
            let block = |from| source(from).part(rank * output.len(), output.len());
            call.spans(block, |blocks| simd::fold(op.dtype, reduce, &[output], blocks));
        }
        (Verb::Broadcast, _, Some(root)) if root != rank => output.copy_from(slot(root)),
        (Verb::AllGather | Verb::Counts, ..) => {
            for from in 0..call.world() {
                output.part(from * input.len(), input.len()).copy_from(source(from));
            }
        }
        _ => {}
    }
    // Peers read this slot in the call before, so its lines are in their caches.
    copy::prefetch_for_write(segment.slot_data(rank, call.seq + 1, input.len()));
    Ok(())
}
