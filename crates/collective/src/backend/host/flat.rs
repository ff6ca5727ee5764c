//! Small operations in one step: everyone writes its slot, everyone reads all slots.
//!
//! The entry that carries the fingerprint also says that the slot is full, so there is one wait. A
//! rank writes its input once and reads the `n` inputs. For payloads up to 8 KiB.

use super::turn::Turn;
use crate::span::Span;
use crate::{Result, Verb, simd};

/// Runs any verb whose input fits a slot.
pub(super) fn run(turn: &Turn<'_>, input: Span<'_>, output: Span<'_>) -> Result<()> {
    let (op, segment, rank) = (turn.op, turn.segment(), turn.rank());
    let slot = |rank| segment.slot_data(rank, turn.seq, input.len());
    if op.verb != Verb::Broadcast || op.root == Some(rank) {
        slot(rank).copy_from(input);
    }
    turn.enter()?;
    // The own input is nearer than its copy, which may still be on its way out of the core.
    let source = |from| if from == rank { input } else { slot(from) };
    match (op.verb, op.op, op.root) {
        (Verb::Reduce, _, Some(root)) if root != rank => {}
        (Verb::AllReduce | Verb::Reduce, Some(reduce), _) => {
            turn.spans(source, |sources| simd::fold(op.dtype, reduce, &[output], sources));
        }
        (Verb::ReduceScatter, Some(reduce), _) => {
            let block = |from| source(from).part(rank * output.len(), output.len());
            turn.spans(block, |blocks| simd::fold(op.dtype, reduce, &[output], blocks));
        }
        (Verb::Broadcast, _, Some(root)) if root != rank => output.copy_from(slot(root)),
        (Verb::AllGather | Verb::Counts, ..) => {
            for from in 0..turn.world() {
                output.part(from * input.len(), input.len()).copy_from(source(from));
            }
        }
        _ => {}
    }
    Ok(())
}
