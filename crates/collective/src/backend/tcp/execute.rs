//! Carrying a schedule out on sockets.
//!
//! The rules, which [`algo`](crate::algo) counts on:
//!
//! * All sends and receives of a round go on at once; when they are done, its local work is done in
//!   order; then comes the next round.
//! * A send is done when the system has the bytes: they may be overwritten then. The peer may take
//!   them much later, in a round of its own.
//! * The first [`EARLY`] bytes of each send of the first round leave with the fingerprint, unless there are
//!   many ranks, before it is known that all call the same; its receives begin when that is known. So a schedule may
//!   send from the caller's memory at once, no byte of it has changed if the calls differ, and a
//!   fingerprint waits for little else.
//! * Between two ranks blocks of one direction are numbered, and each end knows the length of each;
//!   a block that is another than expected fails the group.

use super::turn::Turn;
use super::{Native, at_least};
use crate::algo::{Memory, Region, Round, Schedule};
use crate::span::Span;
use crate::{DType, OpDesc, ReduceOp, Result, simd};

/// Bytes of a block that may go before all ranks have entered: few enough that ranks that call
/// different things know it soon, enough that small operations are one message each way.
pub(super) const EARLY: usize = 512 << 10;

/// Enters an operation of all ranks and does this rank's part in it.
pub(super) fn run<'a>(
    turn: &mut Turn<'a>,
    schedule: &Schedule,
    dtype: DType,
    memory: Memory<'a>,
) -> Result<()> {
    let mut round = Round::default();
    turn.enter();
    for index in 0..schedule.rounds {
        schedule.round(index, &mut round);
        let early = if index == 0 && turn.tells_all() { EARLY } else { 0 };
        let parts = |region: Region| memory.region(region).split_at(early.min(region.len));
        for &(to, region) in &round.sends {
            turn.send_block(to, parts(region).0);
        }
        if index == 0 {
            turn.meet()?;
        }
        for &(from, region) in &round.recvs {
            turn.receive_block(from, parts(region).0);
        }
        for &(to, region) in &round.sends {
            turn.send_block(to, parts(region).1);
        }
        for &(from, region) in &round.recvs {
            turn.receive_block(from, parts(region).1);
        }
        turn.finish()?;
        memory.work(dtype, &round);
    }
    if schedule.rounds == 0 {
        turn.meet()?;
        turn.finish()?;
    }
    Ok(())
}

/// Carries a reduction out by a library's own algorithm, in any order.
pub(super) fn by_library<'a>(
    turn: &mut Turn<'a>,
    library: &dyn Native,
    memory: Span<'a>,
    scratch: &mut Vec<u8>,
) -> Result<()> {
    turn.enter();
    turn.meet()?;
    turn.finish()?;
    if memory.len() == 0 {
        return Ok(());
    }
    let OpDesc { dtype, op, root, .. } = turn.op;
    let scale =
        |memory: Span<'_>, factor: ReduceOp| simd::fold(dtype, factor, &[memory], &[memory]);
    // The library overwrites every rank's memory, we only the root's.
    let memory = match root {
        Some(root) if root != turn.rank() => {
            let copy = at_least(scratch, memory.len());
            copy.copy_from(memory);
            copy
        }
        _ => memory,
    };
    if let Some(factor @ ReduceOp::PreMulSum(_)) = op {
        scale(memory, factor);
    }
    let neighbours = [turn.world() - 1, 1].map(|step| (turn.rank() + step) % turn.world());
    turn.leave_to(&neighbours, |go_on| library.reduce(turn, memory, go_on))?;
    if op == Some(ReduceOp::Avg) {
        scale(memory, ReduceOp::pre_mul_sum(1.0 / turn.world() as f64));
    }
    Ok(())
}
