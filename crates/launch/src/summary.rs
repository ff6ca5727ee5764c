//! What is said of an attempt: which ranks failed, on which node, and which is the likely cause.

use std::fmt::{self, Display, Formatter};
use std::os::unix::process::ExitStatusExt;
use std::process::ExitStatus;

use serde::{Deserialize, Serialize};

/// A rank that failed, as its node tells the others.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Failure {
    pub(super) rank: usize,
    pub(super) pid: u32,
    /// How it ended, in words.
    pub(super) how: String,
    /// What it said of it.
    pub(super) said: Option<String>,
    /// The exit code, or 128 and the signal's number.
    pub(super) code: i32,
    /// A signal ended it that is not known to be a launcher's.
    pub(super) struck: bool,
    /// Its node had been told of a failure elsewhere before.
    pub(super) told: bool,
    /// When, in nanoseconds since 1970: by its own clock or else by its node's.
    pub(super) at: u64,
    /// Place among all exits of its node.
    pub(super) order: usize,
}

impl Failure {
    /// Orders failures, the likely cause first: one that a signal ended, since that answers nobody
    /// else's failure, and its peers may know of its death before the kernel is done with it; then
    /// one of a node that nobody had told to stop; then the first.
    fn key(&self) -> (bool, bool, u64, usize, usize) {
        (!self.struck, self.told, self.at, self.order, self.rank)
    }
}

/// How an attempt went on one node.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Outcome {
    /// Ranks of this node.
    pub(super) ranks: usize,
    pub(super) failures: Vec<Failure>,
    /// Ranks that were interrupted and have saved, see [`is_saved`].
    pub(super) saved: usize,
    /// A signal asked the launcher to end.
    pub(super) stopped: bool,
    /// And nobody can go on without this node.
    pub(super) closes: bool,
}

impl Outcome {
    /// Whether the ranks of the other nodes end, too.
    pub(super) fn ends_others(&self) -> bool {
        self.stopped || self.saved > 0 || !self.failures.is_empty()
    }
}

/// How an attempt went on all nodes, and what comes next. The same on every node.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Verdict {
    pub(super) ranks: usize,
    pub(super) failed: usize,
    /// Ranks that were interrupted and have saved.
    pub(super) saved: usize,
    /// The likely cause first; no more than `MOST_TOLD`.
    pub(super) failures: Vec<Failure>,
    /// Nodes that no longer answer, and other reasons that are not a rank's, in words.
    pub(super) remarks: Vec<String>,
    pub(super) stopped: bool,
    /// One that nobody can go on without.
    pub(super) closes: bool,
    /// All ranks start again.
    pub(super) again: bool,
    /// That is a restart, and not because nodes came or went.
    pub(super) counted: bool,
    /// The exit code.
    pub(super) code: i32,
}

impl Verdict {
    /// Of the nodes' outcomes, and `remarks` on those that there are none of.
    pub(super) fn of(outcomes: Vec<Outcome>, remarks: Vec<String>) -> Self {
        let ranks = outcomes.iter().map(|outcome| outcome.ranks).sum();
        let saved = outcomes.iter().map(|outcome| outcome.saved).sum();
        let stopped = outcomes.iter().any(|outcome| outcome.stopped);
        let closes = outcomes.iter().any(|outcome| outcome.closes);
        let mut failures: Vec<_> =
            outcomes.into_iter().flat_map(|outcome| outcome.failures).collect();
        failures.sort_by_key(Failure::key);
        let failed = failures.len();
        failures.truncate(MOST_TOLD);
        for failure in &mut failures {
            if let Some(said) = &mut failure.said {
                said.truncate(said.floor_char_boundary(MOST_SAID));
            }
        }
        let code = match (failures.first(), &remarks[..], saved) {
            (Some(cause), ..) => cause.code,
            (None, [_, ..], _) => 1,
            (None, [], 0) => 0,
            (None, [], _) => SAVED,
        };
        let (again, counted) = (false, true);
        Self { ranks, failed, saved, failures, remarks, stopped, closes, again, counted, code }
    }

    /// Whether all ranks start again after a failure, if restarts are left: not if a signal asked this
    /// launcher, or the ranks themselves, to end.
    pub(super) fn may_restart(&self) -> bool {
        self.is_failure() && !self.stopped && self.saved == 0
    }

    /// Whether something went wrong.
    pub(super) fn is_failure(&self) -> bool {
        self.failed > 0 || !self.remarks.is_empty()
    }
}

impl Display for Verdict {
    /// Empty if nothing failed.
    fn fmt(&self, f: &mut Formatter<'_>) -> fmt::Result {
        for remark in &self.remarks {
            writeln!(f, "launch: {remark}")?;
        }
        if self.closes {
            writeln!(
                f,
                "launch: the node that hosts the control store was told to end: so does the job"
            )?;
        }
        if self.saved > 0 {
            let Self { saved, ranks, .. } = self;
            writeln!(f, "launch: interrupted after a checkpoint: {saved} of {ranks} ranks")?;
        }
        if self.failed == 0 {
            return Ok(());
        }
        writeln!(f, "launch: {} of {} ranks failed", self.failed, self.ranks)?;
        for (at, failure) in self.failures.iter().enumerate() {
            let label = if at == 0 { "root cause: " } else { "" };
            let Failure { rank, pid, how, said, .. } = failure;
            let said = said.as_ref().map_or_else(String::new, |said| format!(": {said}"));
            writeln!(f, "  {label}rank {rank} (pid {pid}): {how}{said}")?;
        }
        let more = self.failed - self.failures.len();
        if more > 0 { writeln!(f, "  and {more} more") } else { Ok(()) }
    }
}

/// The exit code that a status stands for: 128 and the number of a signal, 1 if there is none yet.
pub(super) fn code(status: Option<ExitStatus>) -> i32 {
    let of = |status: ExitStatus| match (status.code(), status.signal()) {
        (Some(code), _) => code,
        (None, signal) => 128 + signal.unwrap_or(0),
    };
    status.map_or(1, of)
}

/// Whether a rank ended as one that was interrupted by a signal and has saved what it did. It is no
/// failure, and others may still be saving.
pub(super) fn is_saved(status: Option<ExitStatus>) -> bool {
    status.and_then(|status| status.code()) == Some(SAVED)
}

/// A status in words.
pub(super) fn describe(status: Option<ExitStatus>) -> String {
    let Some(status) = status else { return "still running after SIGKILL".to_owned() };
    match (status.code(), status.signal()) {
        (Some(code), _) => format!("exit code {code}"),
        (None, Some(number)) => match signal_hook::low_level::signal_name(number) {
            Some(name) => format!("killed by {name}"),
            None => format!("killed by signal {number}"),
        },
        (None, None) => status.to_string(),
    }
}

/// Exit code of a rank that has saved after a signal, and of the launcher if nothing else has happened.
pub(super) const SAVED: i32 = crate::EXIT_SAVED as i32;
/// Failures that are told one by one.
const MOST_TOLD: usize = 32;
/// Bytes of what one rank said that are passed on.
const MOST_SAID: usize = 4096;

#[cfg(test)]
mod tests {
    use super::*;

    fn failure(rank: usize, struck: bool, told: bool, at: u64) -> Failure {
        let how = "exit code 3".to_owned();
        Failure { rank, pid: 7, how, said: None, code: 3, struck, told, at, order: 0 }
    }

    fn outcome(failures: Vec<Failure>) -> Outcome {
        Outcome { ranks: 2, failures, ..Outcome::default() }
    }

    #[test]
    fn the_cause_is_found_across_nodes() {
        let told = outcome(vec![failure(0, false, true, 5), failure(1, false, true, 6)]);
        let first = outcome(vec![failure(3, false, false, 9)]);
        let verdict = Verdict::of(vec![told.clone(), first], Vec::new());
        assert_eq!((verdict.failures[0].rank, verdict.failed, verdict.ranks), (3, 3, 4));
        let killed = outcome(vec![failure(2, true, true, 9)]);
        let verdict = Verdict::of(vec![told, killed], Vec::new());
        assert_eq!(verdict.failures[0].rank, 2, "what a signal ended answers nobody's failure");
    }

    #[test]
    fn who_has_saved_is_no_failure_and_is_not_started_again() {
        let saved = Outcome { ranks: 2, saved: 2, ..Outcome::default() };
        let verdict = Verdict::of(vec![saved.clone(), saved.clone()], Vec::new());
        let text = "launch: interrupted after a checkpoint: 4 of 4 ranks\n";
        assert_eq!((verdict.to_string(), verdict.code), (text.to_owned(), 75));
        assert!(!verdict.is_failure() && !verdict.may_restart());
        let verdict =
            Verdict::of(vec![saved.clone(), outcome(vec![failure(3, false, false, 9)])], vec![]);
        assert_eq!((verdict.code, verdict.is_failure(), verdict.may_restart()), (3, true, false));
        assert!(verdict.to_string().contains("root cause: rank 3"), "{verdict}");
        let lost = Verdict::of(vec![saved], vec!["node 1 is gone".to_owned()]);
        assert_eq!((lost.code, lost.may_restart()), (1, false));
    }

    #[test]
    fn nothing_is_said_of_a_success_and_much_is_cut() {
        let fine = Verdict::of(vec![outcome(Vec::new())], Vec::new());
        assert_eq!((fine.to_string(), fine.code, fine.is_failure()), (String::new(), 0, false));
        let many = (0..40).map(|rank| {
            let said = Some("ä".repeat(MOST_SAID));
            Failure { said, ..failure(rank, false, false, 0) }
        });
        let verdict = Verdict::of(vec![outcome(many.collect())], Vec::new());
        assert!(verdict.to_string().ends_with("and 8 more\n"));
        assert!(verdict.failures.iter().all(|one| one.said.as_ref().unwrap().len() <= MOST_SAID));
        let lost = Verdict::of(vec![outcome(Vec::new())], vec!["node 1 is gone".to_owned()]);
        assert_eq!((lost.to_string(), lost.code), ("launch: node 1 is gone\n".to_owned(), 1));
    }
}
