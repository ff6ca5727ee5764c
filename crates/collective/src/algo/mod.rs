//! Algorithms between ranks that exchange messages, as data: what one rank sends, receives and
//! folds, round by round.
//!
//! An algorithm is a pure function from an operation, a rank and a topology to a [`Schedule`]. The
//! TCP backend carries schedules out on sockets; the simulator carries out those of all ranks in
//! virtual time. So what is simulated is what runs. (Within one machine the host backend has
//! algorithms of its own, which fold where the data lie.)
//!
//! A schedule is iterated lazily: a ring of 4,096 ranks has 8,190 rounds per rank, none of them
//! worth storing.

use crate::{Rank, ReduceOp};

/// One of the buffers a schedule works on.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum Buf {
    /// The caller's input; for verbs that work in place, the same memory as the output.
    Input,
    /// The caller's output.
    Output,
    /// [`Schedule::scratch`] bytes of this rank's own.
    Scratch,
}

/// Some bytes of a buffer.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct Region {
    pub(crate) buf: Buf,
    /// In bytes.
    pub(crate) offset: usize,
    /// In bytes.
    pub(crate) len: usize,
}

/// Work on this rank's own memory.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Local {
    Copy {
        to: Region,
        from: Region,
    },
    /// `to = from[0] . from[1] . ...` in this order. `to` may be one of the sources. `Avg` divides
    /// by the number of sources, so it is only used where they are all ranks'.
    Fold {
        op: ReduceOp,
        to: Region,
        from: Vec<Region>,
    },
}

/// What happens at once, then what follows on this rank.
///
/// All sends and receives of a round go on together, in any order; when they are done, the local
/// work is done in order, and the next round may begin. Ranks are in no way in step: a rank begins
/// its next round when its own is over. Between two ranks, messages of one direction arrive in the
/// order of the rounds, and within a round in the order of the lists.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Round {
    pub(crate) sends: Vec<(Rank, Region)>,
    pub(crate) recvs: Vec<(Rank, Region)>,
    pub(crate) local: Vec<Local>,
}

/// One rank's part in an operation.
pub(crate) struct Schedule {
    /// Bytes of scratch memory.
    pub(crate) scratch: usize,
    pub(crate) rounds: Box<dyn Iterator<Item = Round> + Send>,
}
