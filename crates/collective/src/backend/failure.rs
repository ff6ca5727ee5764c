//! [`Failure`]: why a group failed, as its ranks tell each other.

use serde::{Deserialize, Serialize};

use crate::Rank;

/// Why a group failed; the same on all ranks.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Failure {
    /// The rank that detected it.
    pub by: Rank,
    /// The cause.
    pub cause: Cause,
}

/// See [`Failure`].
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Cause {
    /// A rank's process ended, or its host is unreachable.
    Died {
        /// The rank.
        rank: Rank,
        /// Its process id.
        pid: u32,
        /// Details, if the process is not known to have ended.
        how: Option<String>,
    },
    /// `by` aborted the group.
    Aborted {
        /// The reason it gave.
        reason: String,
    },
    /// Ranks were late.
    TimedOut {
        /// The late ranks.
        missing: Vec<Rank>,
        /// The error text, for the late ranks.
        text: String,
    },
    /// A rank received a message of another call than its own.
    Mismatch {
        /// `verb`, `dtype` or `count`.
        field: String,
        /// The calls of both ranks.
        by_rank: Vec<(Rank, String)>,
    },
}
