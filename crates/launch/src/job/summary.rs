//! Summary of an attempt: the failed ranks of all nodes and the likely root cause.

use std::fmt::{self, Display, Formatter};
use std::os::unix::process::ExitStatusExt;
use std::process::ExitStatus;

use rustix::io::Errno;
use serde::{Deserialize, Serialize};
use tracing::info;

use crate::rank::EXIT_SAVED;

/// A failed rank, as its node reports it to the others.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Failure {
    pub(crate) rank: usize,
    pub(crate) pid: u32,
    /// Description of its exit status.
    pub(crate) how: String,
    /// Message of its error file.
    pub(crate) message: Option<String>,
    /// Exit code, or 128 plus the signal number.
    pub(crate) code: i32,
    /// Whether it was ended by a signal that this launcher did not send.
    pub(crate) killed: bool,
    /// Whether another rank's failure or absence caused it, according to its error file, or the
    /// launcher had begun to stop the ranks.
    #[serde(default)]
    pub(crate) follows: bool,
    /// Whether its node already knew that another node had ended the attempt.
    pub(crate) notified: bool,
    /// Time of the failure in nanoseconds since 1970: from its error file, otherwise by its node's
    /// clock.
    pub(crate) at: u64,
    /// Index among the exits of its node.
    pub(crate) order: usize,
}

impl Failure {
    /// Sort key, likely root cause first: a rank killed by a signal, since another rank's failure
    /// never causes that, and its peers may report it before the kernel has ended it; then a rank
    /// whose failure no other has caused: those that it causes may end before it, for example while
    /// it prints a backtrace; then a rank of a node that did not yet know of a failure elsewhere;
    /// then the earliest.
    fn key(&self) -> (bool, bool, bool, u64, usize, usize) {
        (!self.killed, self.follows, self.notified, self.at, self.order, self.rank)
    }
}

/// Result of an attempt on one node.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Outcome {
    /// Number of ranks of this node.
    pub(crate) ranks: usize,
    pub(crate) failures: Vec<Failure>,
    /// Number of ranks that were interrupted after saving.
    pub(crate) saved: usize,
    /// Reason for which its ranks could not be started.
    pub(crate) problem: Option<String>,
    /// Its processes that could not be ended, and why.
    #[serde(default)]
    pub(crate) survivors: Vec<String>,
    /// Whether its launcher received a signal.
    pub(crate) stopped: bool,
    /// Whether it is leaving and hosts the control store, which ends the job.
    pub(crate) closes: bool,
}

/// Result of an attempt on all nodes, and the decision about another one. Equal on all nodes.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Summary {
    pub(crate) ranks: usize,
    pub(crate) failed: usize,
    /// Number of ranks that were interrupted after saving.
    pub(crate) saved: usize,
    /// Likely root cause first; at most `MAX_FAILURES`.
    pub(crate) failures: Vec<Failure>,
    /// Lost nodes, and other failures that are not a rank's: the root cause of the ranks' failures.
    pub(crate) problems: Vec<String>,
    /// Processes that could not be ended, and why; at most `MAX_FAILURES`.
    #[serde(default)]
    pub(crate) survivors: Vec<String>,
    /// Number of nodes without an outcome.
    pub(crate) lost: usize,
    /// Whether a launcher received a signal or cannot start its ranks.
    pub(crate) stopped: bool,
    /// Whether a leaving node hosts the control store.
    pub(crate) closes: bool,
    /// Whether all ranks are restarted.
    pub(crate) starts_again: bool,
    /// Whether that counts as a restart: after a failure, not because nodes joined or left.
    pub(crate) is_restart: bool,
    /// The exit code.
    pub(crate) code: i32,
}

impl Summary {
    /// Combines the outcomes of all nodes. `problems` describes the nodes without one.
    pub(crate) fn of(outcomes: Vec<Outcome>, problems: Vec<String>) -> Self {
        let lost = problems.len();
        let mut summary = Self { problems, lost, is_restart: true, ..Self::default() };
        for outcome in outcomes {
            summary.ranks += outcome.ranks;
            summary.saved += outcome.saved;
            summary.stopped |= outcome.stopped || outcome.problem.is_some();
            summary.problems.extend(outcome.problem);
            summary.survivors.extend(outcome.survivors);
            summary.closes |= outcome.closes;
            summary.failures.extend(outcome.failures);
        }
        summary.failures.sort_by_key(Failure::key);
        summary.failed = summary.failures.len();
        summary.failures.truncate(MAX_FAILURES);
        summary.survivors.truncate(MAX_FAILURES);
        for message in summary.failures.iter_mut().filter_map(|failure| failure.message.as_mut()) {
            message.truncate(message.floor_char_boundary(MAX_MESSAGE));
        }
        summary.code = match (&summary.problems[..], summary.failures.first(), summary.saved) {
            ([_, ..], ..) => 1,
            ([], Some(cause), _) => cause.code,
            ([], None, 0) => 0,
            ([], None, _) => SAVED,
        };
        summary
    }

    /// Emits the event of the attempt's end.
    pub(crate) fn report(&self, attempt: u32) {
        let Self { code, ranks, failed, saved, starts_again, .. } = self;
        info!(
            name: "attempt_ended", target: "launch",
            attempt, code, ranks, failed, saved, starts_again, "an attempt has ended",
        );
    }

    /// Returns whether a restart is allowed if any are left: after a failure, unless a signal asked
    /// a launcher or the ranks to end.
    pub(crate) fn may_restart(&self) -> bool {
        self.is_failure() && !self.stopped && self.saved == 0 && self.survivors.is_empty()
    }

    /// Returns whether there was any failure.
    pub(crate) fn is_failure(&self) -> bool {
        self.failed > 0 || !self.problems.is_empty()
    }
}

impl Display for Summary {
    /// Writes nothing if nothing failed.
    fn fmt(&self, f: &mut Formatter<'_>) -> fmt::Result {
        let mut prefix = "root cause: ";
        for problem in &self.problems {
            writeln!(f, "launch: {}{problem}", std::mem::take(&mut prefix))?;
        }
        if self.closes {
            writeln!(
                f,
                "launch: the job ends: the node that hosts its control store received a signal"
            )?;
        }
        for survivor in &self.survivors {
            writeln!(f, "launch: {survivor}; end it before the job is started again")?;
        }
        if self.saved > 0 {
            let Self { saved, ranks, .. } = self;
            writeln!(f, "launch: interrupted after a checkpoint: {saved} of {ranks} ranks")?;
        }
        if self.failed == 0 {
            return Ok(());
        }
        writeln!(f, "launch: {} of {} ranks failed", self.failed, self.ranks)?;
        for failure in &self.failures {
            let prefix = std::mem::take(&mut prefix);
            let Failure { rank, pid, how, message, .. } = failure;
            let message: String = message.iter().map(|message| format!(": {message}")).collect();
            writeln!(f, "  {prefix}rank {rank} (pid {pid}): {how}{message}")?;
        }
        let more = self.failed - self.failures.len();
        if more > 0 { writeln!(f, "  and {more} more") } else { Ok(()) }
    }
}

/// Returns the exit code of a failed rank: 128 plus the signal number after a signal; 1 without a
/// status, or if it saved after it was stopped because of a failure, since [`SAVED`] means that
/// nothing failed.
pub(crate) fn code(status: Option<ExitStatus>) -> i32 {
    let of_signal = |status: ExitStatus| 128 + status.signal().unwrap_or(0);
    let code = status.map_or(1, |status| status.code().unwrap_or_else(|| of_signal(status)));
    if code == SAVED { 1 } else { code }
}

/// Describes an exit status, or why there is none.
pub(crate) fn describe(status: Option<ExitStatus>, kill_error: Option<Errno>) -> String {
    let Some(status) = status else { return describe_survivor(kill_error) };
    match (status.code(), status.signal().and_then(signal_hook::low_level::signal_name)) {
        (Some(code), _) => format!("exit code {code}"),
        (None, Some(name)) => format!("killed by {name}"),
        (None, None) => status.to_string(),
    }
}

/// Describes a process that still runs, with the error of sending SIGKILL if it was not sent.
pub(super) fn describe_survivor(kill_error: Option<Errno>) -> String {
    match kill_error {
        None => "still running after SIGKILL".to_owned(),
        Some(error) => format!("still running, because SIGKILL could not be sent: {error}"),
    }
}

/// [`EXIT_SAVED`] as an `i32`.
pub(crate) const SAVED: i32 = EXIT_SAVED as i32;
/// Maximum number of failures listed.
const MAX_FAILURES: usize = 32;
/// Maximum length of a rank's message in bytes.
const MAX_MESSAGE: usize = 4096;

#[cfg(test)]
mod tests {
    use super::*;

    fn failure(rank: usize, killed: bool, notified: bool, at: u64) -> Failure {
        let how = "exit code 3".to_owned();
        Failure {
            rank,
            pid: 7,
            how,
            message: None,
            code: 3,
            killed,
            notified,
            at,
            ..Failure::default()
        }
    }

    fn outcome(failures: Vec<Failure>) -> Outcome {
        Outcome { ranks: 2, failures, ..Outcome::default() }
    }

    #[test]
    fn root_cause_is_found_across_nodes() {
        let notified = outcome(vec![failure(0, false, true, 5), failure(1, false, true, 6)]);
        let first = outcome(vec![failure(3, false, false, 9)]);
        let summary = Summary::of(vec![notified.clone(), first], Vec::new());
        assert_eq!((summary.failures[0].rank, summary.failed, summary.ranks), (3, 3, 4));
        let follows = Failure { follows: true, ..failure(4, false, false, 4) };
        let summary = Summary::of(vec![notified.clone(), outcome(vec![follows])], Vec::new());
        assert_eq!(summary.failures[0].rank, 0, "rank 4 failed because of another rank");
        let killed = outcome(vec![failure(2, true, true, 9)]);
        let summary = Summary::of(vec![notified, killed], Vec::new());
        assert_eq!(summary.failures[0].rank, 2, "a rank killed by a signal is the root cause");
    }

    #[test]
    fn ranks_that_saved_are_not_failures_and_do_not_restart() {
        let saved = Outcome { ranks: 2, saved: 2, ..Outcome::default() };
        let summary = Summary::of(vec![saved.clone(), saved.clone()], Vec::new());
        let text = "launch: interrupted after a checkpoint: 4 of 4 ranks\n";
        assert_eq!((summary.to_string(), summary.code), (text.to_owned(), 75));
        assert!(!summary.is_failure() && !summary.may_restart());
        let summary =
            Summary::of(vec![saved.clone(), outcome(vec![failure(3, false, false, 9)])], vec![]);
        assert_eq!((summary.code, summary.is_failure(), summary.may_restart()), (3, true, false));
        assert!(summary.to_string().contains("root cause: rank 3"), "{summary}");
        let lost = Summary::of(vec![saved], vec!["node 1 is lost".to_owned()]);
        assert_eq!((lost.code, lost.may_restart()), (1, false));
    }

    #[test]
    fn lost_node_is_the_root_cause_of_failures_on_other_nodes() {
        let stopped = Failure { code: 143, ..failure(0, false, true, 9) };
        let summary = Summary::of(vec![outcome(vec![stopped])], vec!["node 1 is lost".to_owned()]);
        let text = summary.to_string();
        assert!(text.starts_with("launch: root cause: node 1 is lost\n"), "{text}");
        assert!(text.contains("\n  rank 0 (pid 7)") && summary.code == 1, "{summary:?}");
    }

    #[test]
    fn node_that_cannot_start_its_ranks_is_the_root_cause_but_not_lost() {
        let problem = Some("node 1 (h): start rank 1 (x): not found".to_owned());
        let summary = Summary::of(vec![Outcome { problem, ..Outcome::default() }], Vec::new());
        assert_eq!((summary.lost, summary.code, summary.may_restart()), (0, 1, false));
        assert!(summary.to_string().starts_with("launch: root cause: node 1 (h): start rank 1"));
    }

    #[test]
    fn nothing_is_restarted_while_a_process_of_the_attempt_runs() {
        let failed = outcome(vec![failure(0, false, false, 9)]);
        let survivors = vec!["pid 7, started by a rank, is still running after SIGKILL".to_owned()];
        let left = Outcome { survivors, ..outcome(Vec::new()) };
        let summary = Summary::of(vec![failed, left], Vec::new());
        assert_eq!((summary.may_restart(), summary.code), (false, 3));
        let text = summary.to_string();
        assert!(text.starts_with("launch: pid 7, started by a rank, is still running"), "{text}");
    }

    #[test]
    fn summary_of_success_is_empty_and_long_ones_are_truncated() {
        let fine = Summary::of(vec![outcome(Vec::new())], Vec::new());
        assert_eq!((fine.to_string(), fine.code, fine.is_failure()), (String::new(), 0, false));
        let many = (0..40).map(|rank| {
            let message = Some("ä".repeat(MAX_MESSAGE));
            Failure { message, ..failure(rank, false, false, 0) }
        });
        let summary = Summary::of(vec![outcome(many.collect())], Vec::new());
        assert!(summary.to_string().ends_with("and 8 more\n"));
        assert!(
            summary.failures.iter().all(|one| one.message.as_ref().unwrap().len() <= MAX_MESSAGE)
        );
        let lost = Summary::of(vec![outcome(Vec::new())], vec!["node 1 is lost".to_owned()]);
        assert_eq!(
            (lost.to_string(), lost.code),
            ("launch: root cause: node 1 is lost\n".to_owned(), 1)
        );
    }
}
