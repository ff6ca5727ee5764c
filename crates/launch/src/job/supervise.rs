//! Supervision of an attempt: handles events, and stops the ranks in stages.

use std::time::{Duration, Instant};

use rustix::process::{Signal, kill_process_group};
use signal_hook::consts::{SIGABRT, SIGINT};
use tracing::{info, warn};

use super::process::pid_of;
use super::{End, Event, Job, SAVED};
use crate::rank::error_file;

/// Stage of stopping an attempt, with the deadline of the next stage.
pub(super) enum StopStage {
    Running,
    /// A rank failed and the others may report errors, or a rank saved and the others may save,
    /// too.
    Reporting(Instant),
    /// SIGTERM or a forwarded signal was sent.
    Stopping(Instant),
    /// SIGKILL was sent.
    Killed(Instant),
}

impl Job {
    /// Handles events until every rank has exited or has survived SIGKILL.
    pub(super) fn supervise(&mut self, announce: &dyn Fn(&End)) {
        if self.queue.signal.is_some() {
            self.stop(Signal::TERM);
        }
        let mut exits = 0;
        while exits < self.ranks.len() {
            match self.next_event() {
                Some(Event::Exited { attempt, .. } | Event::RemoteEnd { attempt, .. })
                    if attempt != self.queue.attempt => {}
                Some(Event::Exited { rank, code, signal, .. }) => {
                    self.exited(rank, (code, signal), exits, announce);
                    exits += 1;
                }
                Some(Event::RemoteEnd { end, .. }) => self.ended_remotely(end),
                Some(Event::Signal(signal)) => {
                    announce(&End::Left { node: self.assignment.node });
                    self.forward(signal);
                }
                None => match self.stage {
                    StopStage::Running => {}
                    StopStage::Reporting(_) => {
                        self.stopped_after_failure = self.failed;
                        self.stop(Signal::TERM);
                    }
                    StopStage::Stopping(_) => self.kill(),
                    // A rank that survives SIGKILL hangs in the kernel; nothing more can be done.
                    StopStage::Killed(_) => return,
                },
            }
        }
    }

    /// Records the exit of a rank with its exit code or signal, and starts to stop the others if it
    /// failed.
    fn exited(
        &mut self,
        local: usize,
        (code, signal): (Option<i32>, Option<i32>),
        order: usize,
        announce: &dyn Fn(&End),
    ) {
        let asked = !matches!(self.stage, StopStage::Running | StopStage::Reporting(_));
        // An end announced by this node is reported back to it.
        let notified = self.queue.remote.as_ref().is_some_and(|end| !self.is_own(end));
        let rank = &mut self.ranks[local];
        rank.exited = Some((order, error_file::now()));
        // SIGABRT comes from the rank itself, perhaps because another rank failed.
        rank.killed = !asked && signal.is_some_and(|signal| signal != SIGABRT);
        rank.notified = notified;
        rank.saved = code == Some(SAVED) && !(asked && self.stopped_after_failure);
        let (saved, pid) = (rank.saved, rank.child.id());
        let rank = self.assignment.first_rank + local;
        report_exit((rank, local, pid), (code, signal), saved);
        let (end, time) = match code {
            Some(0) => return,
            _ if saved => (End::Saved { rank }, self.options.grace),
            _ => (End::Failed { rank }, self.options.report_time),
        };
        self.failed |= !saved;
        if matches!(self.stage, StopStage::Running) {
            announce(&end);
        }
        self.allow_reports(time);
    }

    /// Returns whether this node is the reason for the end of the attempt.
    fn is_own(&self, end: &End) -> bool {
        let ranks = self.assignment.first_rank..self.assignment.first_rank + self.ranks.len();
        match end {
            End::Failed { rank } | End::Saved { rank } => ranks.contains(rank),
            End::Left { node } => *node == self.assignment.node,
            End::Joined { .. } | End::Lost { .. } => false,
        }
    }

    /// Gives the ranks `time` to end by themselves.
    fn allow_reports(&mut self, time: Duration) {
        let due = Instant::now() + time;
        match &mut self.stage {
            StopStage::Running => self.stage = StopStage::Reporting(due),
            StopStage::Reporting(before) => *before = due.min(*before),
            StopStage::Stopping(_) | StopStage::Killed(_) => {}
        }
    }

    /// Handles an end of the attempt announced by another node: after a failure the ranks may
    /// report errors first.
    fn ended_remotely(&mut self, end: End) {
        let time = match end {
            End::Joined { .. } | End::Left { .. } => None,
            End::Saved { .. } => Some(self.options.grace),
            End::Failed { .. } | End::Lost { .. } => Some(self.options.report_time),
        };
        self.failed |= matches!(end, End::Failed { .. } | End::Lost { .. });
        self.queue.remote.get_or_insert(end);
        match time {
            Some(time) => self.allow_reports(time),
            None if matches!(self.stage, StopStage::Running) => self.stop(Signal::TERM),
            None => {}
        }
    }

    /// Returns the next event, or `None` at the deadline of the stage.
    fn next_event(&self) -> Option<Event> {
        let due = match self.stage {
            StopStage::Running => return self.queue.events.recv().ok(),
            StopStage::Reporting(due) | StopStage::Stopping(due) | StopStage::Killed(due) => due,
        };
        self.queue.events.recv_timeout(due.saturating_duration_since(Instant::now())).ok()
    }

    fn forward(&mut self, number: i32) {
        self.queue.signal = Some(number);
        self.stopped_after_failure = false;
        let interrupted_again = number == SIGINT && matches!(self.stage, StopStage::Stopping(_));
        match Signal::from_named_raw(number) {
            Some(_) if interrupted_again => self.kill(),
            Some(signal) => self.stop(signal),
            None => {}
        }
    }

    /// Sends the ranks a signal to end. The grace period starts at the first such signal.
    fn stop(&mut self, signal: Signal) {
        self.signal_groups(signal);
        if matches!(self.stage, StopStage::Running | StopStage::Reporting(_)) {
            self.stage = StopStage::Stopping(Instant::now() + self.options.grace);
        }
    }

    fn kill(&mut self) {
        self.signal_groups(Signal::KILL);
        self.stage = StopStage::Killed(Instant::now() + KILL_TIME);
    }

    fn signal_groups(&self, signal: Signal) {
        for rank in self.ranks.iter().filter(|rank| rank.status.is_none()) {
            // Fails if the whole group has already ended.
            let _ = kill_process_group(pid_of(&rank.leader), signal);
        }
    }

    /// Kills the remaining processes of every group, then reaps the ranks.
    pub(super) fn kill_and_reap(&mut self) {
        self.signal_groups(Signal::KILL);
        let hopeless = matches!(self.stage, StopStage::Killed(due) if due <= Instant::now());
        if !hopeless {
            self.guard.forget();
        }
        for rank in self.ranks.iter_mut().filter(|rank| !hopeless || rank.exited.is_some()) {
            rank.status = rank.child.wait().ok();
            drop(rank.leader.wait());
        }
    }
}

/// Emits the event of a rank's exit.
fn report_exit(
    (rank, local_rank, pid): (usize, usize, u32),
    (code, signal): (Option<i32>, Option<i32>),
    saved: bool,
) {
    match code {
        Some(0) => info!(
            name: "rank_ended", target: "launch", rank, local_rank, pid, "a rank has ended"
        ),
        _ if saved => info!(
            name: "rank_saved", target: "launch",
            rank, local_rank, pid, "a rank has saved a checkpoint and ended",
        ),
        _ => warn!(
            name: "rank_died", target: "launch",
            rank, local_rank, pid, code, signal, "a rank has died",
        ),
    }
}

/// Time for a process to end after SIGKILL.
const KILL_TIME: Duration = Duration::from_secs(10);
