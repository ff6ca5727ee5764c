//! What can go wrong in a collective, and who caused it.

use std::time::Duration;

use crate::Rank;

/// A failure of a process group, a store or the rendezvous.
///
/// A caller's own mistake ([`InvalidArgument`](Self::InvalidArgument)) is seen before anything is
/// sent and leaves the group usable. Every other error poisons the group: later operations return
/// [`Poisoned`](Self::Poisoned) on every rank.
///
/// `Debug` is the message, too: it is what a `main` that returns one prints.
#[derive(Clone, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// Not all ranks came in time.
    #[error("{op}: timed out after {waited:?}, still missing {}", ranks(missing))]
    Timeout {
        /// What was waited for, for example `all_reduce #17 of group default`.
        op: String,
        /// How long this rank waited.
        waited: Duration,
        /// The ranks that did not come. Of messages between pairs of ranks, the peer, who may itself
        /// be waiting for another.
        missing: Vec<Rank>,
    },
    /// A peer's process ended while it was needed.
    #[error("{op}: rank {rank} (pid {pid}) died")]
    PeerDied {
        /// What was under way on this rank.
        op: String,
        /// The rank that died.
        rank: Rank,
        /// Its process id.
        pid: u32,
    },
    /// Ranks called different operations, or joined with different options; no byte of user data was
    /// changed. On device memory it is found when time is over, unless calls are compared first, and
    /// what was to be written is unspecified then.
    #[error("{op}: ranks disagree on {field}: {}", by_rank_text(by_rank))]
    Mismatch {
        /// What this rank called.
        op: String,
        /// The first field that differs: verb, dtype, op, root, count, or buffer: not the same
        /// part of the same [`SharedBuf`](crate::SharedBuf), or not on every rank. Of ranks that
        /// join, for example `GroupOptions::determinism`.
        field: &'static str,
        /// What each rank called; of ranks that join, what rank 0 has and the first that differs.
        by_rank: Vec<(Rank, String)>,
    },
    /// A rank gave the group up.
    #[error("the group was aborted by rank {by}: {reason}")]
    Aborted {
        /// The rank that called `abort`.
        by: Rank,
        /// Its words.
        reason: String,
    },
    /// An earlier operation failed; the group can do no more.
    #[error("the group is unusable since an earlier failure: {0}")]
    Poisoned(Box<Self>),
    /// The other ranks have rebuilt the group without this one, which came after the grace period.
    #[error(
        "group {group} went on at epoch {epoch} with {} alone; this rank came too late",
        ranks(members)
    )]
    LeftBehind {
        /// The group's name.
        group: String,
        /// The epoch of the group that this rank is not in.
        epoch: u64,
        /// Who is, as ranks of the group that was rebuilt.
        members: Vec<Rank>,
    },
    /// The ranks could not be brought together.
    #[error("rendezvous at {addr}: {reason}")]
    Rendezvous {
        /// Where the store was looked for, `host:port`.
        addr: String,
        /// What happened, and what to do.
        reason: String,
    },
    /// Keys of a store that nobody set in time.
    #[error(
        "store {store}: waited {waited:?} for {}, which nobody has set; the rank that sets it is late, dead or was never started",
        keys.join(", ")
    )]
    KeyTimeout {
        /// The store: `memory` or `host:port`.
        store: String,
        /// The keys still missing, with the prefixes of a [`PrefixStore`](crate::PrefixStore).
        keys: Vec<String>,
        /// How long was waited.
        waited: Duration,
    },
    /// A store that cannot be reached, broke its protocol, or refused a request.
    #[error("store {store}: {during}: {reason}")]
    Store {
        /// The store: `memory` or `host:port`.
        store: String,
        /// The request, for example `add "joined"`.
        during: String,
        /// What happened, and what to do.
        reason: String,
    },
    /// A parameter got no gradient in this backward pass on this rank.
    #[error(
        "rank {rank}: no gradient in this backward pass for {}; if that is intended, set find_unused_parameters",
        names.join(", ")
    )]
    UnusedParameters {
        /// This rank.
        rank: Rank,
        /// The parameters, by name.
        names: Vec<String>,
    },
    /// The backend does not do this.
    #[error("backend {backend} does not support {what}")]
    Unsupported {
        /// The backend's name.
        backend: &'static str,
        /// The operation, type or option.
        what: String,
    },
    /// A library that a backend needs is missing, or too old.
    #[error("{library}: {reason}; {install}")]
    Library {
        /// The library's usual name.
        library: &'static str,
        /// What the system's loader said of each path, or which function is missing.
        reason: String,
        /// The paths, in order.
        tried: Vec<String>,
        /// What to do.
        install: &'static str,
    },
    /// A library beneath a backend failed.
    #[error("{during}: {name} ({code}): {text}")]
    Backend {
        /// The backend's name.
        backend: &'static str,
        /// The function that was called, or what was under way.
        during: String,
        /// The status as the library's header calls it.
        name: String,
        /// The status as a number.
        code: i32,
        /// The library's own words.
        text: String,
    },
    /// A wrong call, seen on the calling rank before anything was sent.
    #[error("{0}")]
    InvalidArgument(String),
    /// The operating system refused.
    #[error("{what}: {text}")]
    Io {
        /// What was being done.
        what: String,
        /// The system's answer.
        text: String,
        /// Its kind, to match on.
        kind: std::io::ErrorKind,
    },
}

impl std::fmt::Debug for Error {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        std::fmt::Display::fmt(self, f)
    }
}

impl Error {
    /// Wraps a system error with what was being done.
    pub(crate) fn io(what: impl Into<String>, error: &std::io::Error) -> Self {
        Self::Io { what: what.into(), text: error.to_string(), kind: error.kind() }
    }
}

/// Result of a collective operation.
pub type Result<T, E = Error> = std::result::Result<T, E>;

fn ranks(ranks: &[Rank]) -> String {
    let list: Vec<_> = ranks.iter().map(ToString::to_string).collect();
    format!("{} {}", if ranks.len() == 1 { "rank" } else { "ranks" }, list.join(", "))
}

fn by_rank_text(by_rank: &[(Rank, String)]) -> String {
    let list: Vec<_> = by_rank.iter().map(|(rank, what)| format!("rank {rank}: {what}")).collect();
    list.join("; ")
}
