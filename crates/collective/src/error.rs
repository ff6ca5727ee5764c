//! Errors of a collective, with the rank that caused them.

use std::time::Duration;

use crate::Rank;

/// A failure of a process group, a store or the rendezvous.
///
/// A caller's own mistake ([`InvalidArgument`](Self::InvalidArgument)) is detected before anything
/// is sent and leaves the group usable. Every other error poisons the group: later operations
/// return [`Poisoned`](Self::Poisoned) on every rank.
///
/// `Debug` prints the same text as `Display`, because a `main` that returns an error prints it with
/// `Debug`.
#[derive(Clone, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// Some ranks did not arrive within the timeout.
    #[error("{op}: timed out after {waited:?}, still missing {}", ranks(missing))]
    Timeout {
        /// The operation, for example `all_reduce #17 of group default`.
        op: String,
        /// How long this rank waited.
        waited: Duration,
        /// The missing ranks. For point-to-point messages, the peer, which may itself be waiting
        /// for another rank.
        missing: Vec<Rank>,
    },
    /// A peer's process ended before the operation completed.
    #[error("{op}: rank {rank} (pid {pid}) died")]
    PeerDied {
        /// The operation on this rank.
        op: String,
        /// The rank that died.
        rank: Rank,
        /// Its process id.
        pid: u32,
    },
    /// Ranks called different operations, or joined with different options; no byte of user data
    /// was changed. On device memory this is detected only at the timeout, unless calls are
    /// compared first, and the output is unspecified then.
    #[error("{op}: ranks disagree on {field}: {}", by_rank_text(by_rank))]
    Mismatch {
        /// The operation that this rank called.
        op: String,
        /// The first field that differs: verb, dtype, op, root, count, tag, or buffer (not the same
        /// part of the same [`SharedBuf`](crate::SharedBuf), or not on every rank). When ranks
        /// join, for example `GroupOptions::determinism`.
        field: &'static str,
        /// Each rank's call; over TCP in groups of more than eight ranks, the calls that one rank
        /// has compared; when ranks join, rank 0's value and the first one that differs from it.
        by_rank: Vec<(Rank, String)>,
    },
    /// A rank called [`abort`](crate::ProcessGroup::abort).
    #[error("the group was aborted by rank {by}: {reason}")]
    Aborted {
        /// The rank that called `abort`.
        by: Rank,
        /// The reason it gave.
        reason: String,
    },
    /// An earlier operation failed; the group is unusable.
    #[error("the group is unusable since an earlier failure: {0}")]
    Poisoned(Box<Self>),
    /// The other ranks rebuilt the group without this one, which missed the grace period.
    #[error(
        "excluded from rebuild of group {group}: missed the grace period (epoch {epoch}, {})",
        ranks(members)
    )]
    LeftBehind {
        /// The group's name.
        group: String,
        /// The epoch of the rebuilt group.
        epoch: u64,
        /// The members of the rebuilt group, as ranks of the group that failed.
        members: Vec<Rank>,
    },
    /// This rank was started twice: another process or thread joins, or has joined, as this rank,
    /// and is not affected.
    #[error(
        "joining group {group}: rank {rank} was started twice: {by} joins as rank {rank}, too; start each rank once"
    )]
    DuplicateRank {
        /// The group's name.
        group: String,
        /// This rank.
        rank: Rank,
        /// The other one, for example `pid 7 on host node1`.
        by: String,
    },
    /// The ranks could not find or connect to each other.
    #[error("rendezvous at {addr}: {reason}")]
    Rendezvous {
        /// The store's address, `host:port`.
        addr: String,
        /// The cause and the remedy.
        reason: String,
    },
    /// Keys of a store that were not set in time.
    #[error(
        "store {store}: waited {waited:?} for {}, which no rank has set; the rank that sets it is late, dead or was never started",
        keys.join(", ")
    )]
    KeyTimeout {
        /// The store: `memory` or `host:port`.
        store: String,
        /// The keys still missing, with the prefixes of a [`PrefixStore`](crate::PrefixStore).
        keys: Vec<String>,
        /// How long this rank waited.
        waited: Duration,
    },
    /// A store is unreachable, violated its protocol, or refused a request.
    #[error("store {store}: {during}: {reason}")]
    Store {
        /// The store: `memory` or `host:port`.
        store: String,
        /// The request, for example `add "joined"`.
        during: String,
        /// The cause and the remedy.
        reason: String,
    },
    /// A record that another rank wrote to the store cannot be parsed.
    #[error(
        "cannot parse {record} at store key {key}; check that all ranks run the same version and that no other job uses the store"
    )]
    MalformedRecord {
        /// The record, for example `rank 3's rendezvous record`.
        record: String,
        /// Its key, without the prefixes of a [`PrefixStore`](crate::PrefixStore).
        key: String,
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
    /// The backend does not support this.
    #[error("backend {backend} does not support {what}")]
    Unsupported {
        /// The backend's name.
        backend: &'static str,
        /// The operation, type or option.
        what: String,
    },
    /// A library that a backend needs is missing or too old.
    #[error("{library}: {reason}; {install}")]
    Library {
        /// The library's usual name.
        library: &'static str,
        /// The system loader's message for each path, or the missing function.
        reason: String,
        /// The paths, in order.
        tried: Vec<String>,
        /// The remedy.
        install: &'static str,
    },
    /// A backend failed, or a library that it uses.
    #[error("{during}: {name} ({code}): {text}")]
    Backend {
        /// The backend's name.
        backend: &'static str,
        /// The function that was called, or the operation in progress.
        during: String,
        /// The name of the status in the library's header.
        name: String,
        /// The status as a number.
        code: i32,
        /// The library's message.
        text: String,
    },
    /// An invalid call, detected on the calling rank before anything was sent.
    #[error("{0}")]
    InvalidArgument(String),
    /// A system call failed.
    #[error("{what}: {text}")]
    Io {
        /// The operation.
        what: String,
        /// The system's message.
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
    /// Returns whether the failure of other ranks, or their absence, caused this error. The rank
    /// that calls [`abort`](crate::ProcessGroup::abort) gets [`Aborted`](Self::Aborted), too.
    pub fn is_caused_by_peer(&self) -> bool {
        match self {
            Self::Poisoned(first) => first.is_caused_by_peer(),
            Self::PeerDied { .. } | Self::Aborted { .. } | Self::Timeout { .. } => true,
            // The store ends with the process that hosts it.
            Self::KeyTimeout { .. } | Self::Store { .. } | Self::Rendezvous { .. } => true,
            _ => false,
        }
    }

    /// Wraps a system error with a description of the operation.
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
