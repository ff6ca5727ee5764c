//! Runs a schedule on sockets.
//!
//! [`algo`](crate::algo) relies on these rules:
//!
//! * All sends and receives of a round progress concurrently. When they are done, its local work is
//!   done in order; then the next round begins.
//! * A send is done when the system has copied the bytes; they may be overwritten then. The peer
//!   may receive them much later, in one of its own rounds.
//! * The first [`EARLY`] bytes of each send of the first round follow the fingerprint, before the
//!   calls are compared, unless there are many ranks. Its receives begin after the comparison. So a
//!   schedule may send from the caller's memory at once, no byte of it has changed if the calls
//!   differ, and few bytes delay a fingerprint.
//! * Blocks are cut after [`EARLY`] bytes in every round, because a peer may receive a block in its
//!   first round that was not sent in one, or the reverse.
//! * The blocks from one rank to another are numbered, and both know the length of each. An
//!   unexpected block fails the group.

use super::call::Call;
use crate::algo::{Memory, Region, Round, Schedule};
use crate::{DType, Result};

/// Bytes of a block that may be sent before all ranks have entered: few enough that a mismatch is
/// detected soon, enough that small operations are one message each way.
pub(super) const EARLY: usize = 512 << 10;

/// Enters an operation of all ranks and runs this rank's part of the schedule.
pub(super) fn run<'a>(
    call: &mut Call<'a>,
    schedule: &Schedule,
    dtype: DType,
    memory: Memory<'a>,
) -> Result<()> {
    let mut round = Round::default();
    call.enter();
    for index in 0..schedule.rounds {
        schedule.round(index, &mut round);
        let early = if call.compares_directly() { EARLY } else { 0 };
        let parts = |region: Region| memory.region(region).split_at(early.min(region.len));
        for &(to, region) in &round.sends {
            call.send_block(to, parts(region).0);
        }
        if index == 0 {
            call.wait_entered()?;
        }
        for &(from, region) in &round.recvs {
            call.receive_block(from, parts(region).0);
        }
        for &(to, region) in &round.sends {
            call.send_block(to, parts(region).1);
        }
        for &(from, region) in &round.recvs {
            call.receive_block(from, parts(region).1);
        }
        call.finish()?;
        memory.work(dtype, &round);
    }
    if schedule.rounds == 0 {
        call.wait_entered()?;
        call.finish()?;
    }
    Ok(())
}
