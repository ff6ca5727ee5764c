//! Supervision of an attempt: handles events, and stops the ranks in stages.

use std::process::Child;
use std::time::{Duration, Instant};

use rustix::io::Errno;
use rustix::process::{Pid, Signal, getpgid, kill_process, kill_process_group};
use signal_hook::consts::{SIGABRT, SIGINT};
use tracing::{info, warn};

use super::guard::Target;
use super::process::{self, Process, pid_of};
use super::summary::describe_survivor;
use super::{End, Event, Job, POLL, Rank, SAVED};
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
        self.await_signal(announce);
    }

    /// Handles a signal that arrives with the last exits: systemd, for example, sends it to all
    /// processes at once, and the ranks may end before it is received here.
    fn await_signal(&mut self, announce: &dyn Fn(&End)) {
        if !matches!(self.stage, StopStage::Running | StopStage::Reporting(_)) {
            return;
        }
        let killed = self.ranks.iter().any(|rank| rank.killed);
        let due = Instant::now() + if killed { SIGNAL_TIME } else { Duration::ZERO };
        let left = || due.saturating_duration_since(Instant::now());
        while let Ok(event) = self.queue.events.recv_timeout(left()) {
            match event {
                Event::Signal(signal) => {
                    announce(&End::Left { node: self.assignment.node });
                    return self.forward(signal);
                }
                Event::RemoteEnd { attempt, end } if attempt == self.queue.attempt => {
                    self.queue.remote.get_or_insert(end);
                }
                Event::RemoteEnd { .. } | Event::Exited { .. } => {}
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
        self.stopped_at.get_or_insert_with(error_file::now);
        self.signal_ranks(signal);
        if matches!(self.stage, StopStage::Running | StopStage::Reporting(_)) {
            self.stage = StopStage::Stopping(Instant::now() + self.options.grace);
        }
    }

    fn kill(&mut self) {
        self.stopped_at.get_or_insert_with(error_file::now);
        self.signal_ranks(Signal::KILL);
        self.stage = StopStage::Killed(Instant::now() + KILL_TIME);
    }

    /// Sends a signal once to each rank, its process groups, and those of its descendants that are
    /// in other groups of its session and not of an inner job, or with SIGKILL to all descendants.
    fn signal_ranks(&mut self, signal: Signal) {
        let sessions: Vec<_> = self.unreaped().filter_map(|rank| session(&rank.child)).collect();
        let is_kill = signal == Signal::KILL;
        // Looked up first, because they lose their parent if it ends at once.
        let groups = self.groups();
        let mut outside = self.descendants();
        outside.retain(|process| !groups.contains(&process.group));
        outside.retain(|process| {
            is_kill || sessions.contains(&process.session) && !process.is_of_inner_job(&self.id)
        });
        for rank in self.ranks.iter_mut().filter(|rank| rank.status.is_none()) {
            let (pid, groups) = (pid_of(&rank.child), rank.groups());
            for &group in &groups {
                // Fails if the whole group has already ended.
                let _ = kill_process_group(group, signal);
            }
            // SIGKILL also to itself, for the error.
            if is_kill || getpgid(Some(pid)).is_ok_and(|group| !groups.contains(&group)) {
                let sent = kill_process(pid, signal);
                rank.kill_error = sent.err().filter(|_| is_kill);
            }
        }
        for process in outside {
            // An error of SIGKILL is returned by `end_descendants`.
            let _ = process.signal(signal);
        }
    }

    fn unreaped(&self) -> impl Iterator<Item = &Rank> {
        self.ranks.iter().filter(|rank| rank.status.is_none())
    }

    /// Returns the groups of all ranks.
    fn groups(&self) -> Vec<i32> {
        let groups = self.unreaped().flat_map(Rank::groups);
        groups.map(|group| group.as_raw_nonzero().get()).collect()
    }

    /// Returns the running processes of the ranks' groups and all descendants of ranks, without the
    /// ranks.
    fn descendants(&self) -> Vec<Process> {
        let pid = |rank: &Rank| pid_of(&rank.child).as_raw_nonzero().get();
        let ranks: Vec<_> = self.unreaped().map(pid).collect();
        process::descendants(&ranks, &self.groups(), &self.id)
    }

    /// After a signal to end, waits until the descendants of the ranks have ended, too, for the
    /// rest of the grace period: the rank may be a shell, which ends at once, while the program
    /// that it has started saves a checkpoint.
    pub(super) fn await_descendants(&mut self, announce: &dyn Fn(&End)) {
        let sessions: Vec<_> = self.unreaped().filter_map(|rank| session(&rank.child)).collect();
        // A non-interactive shell lets its background processes ignore SIGINT.
        let (is_int, id) = (self.queue.signal == Some(SIGINT), self.id.clone());
        let was_missed = |one: &&Process| {
            let is_out = !sessions.contains(&one.session) || is_int && one.ignores(SIGINT);
            is_out && !one.is_of_inner_job(&id)
        };
        let mut has_signalled = false;
        while let StopStage::Stopping(due) = self.stage {
            let left = self.descendants();
            if left.is_empty() || due <= Instant::now() {
                return;
            }
            if !has_signalled {
                for process in left.iter().filter(was_missed) {
                    let _ = process.signal(Signal::TERM);
                }
            }
            has_signalled = true;
            match self.queue.events.recv_timeout(POLL) {
                Ok(Event::Signal(signal)) => {
                    announce(&End::Left { node: self.assignment.node });
                    self.forward(signal);
                }
                Ok(Event::RemoteEnd { attempt, end }) if attempt == self.queue.attempt => {
                    self.ended_remotely(end);
                }
                _ => {}
            }
        }
    }

    /// Kills the remaining descendants of the ranks, then reaps the ranks.
    pub(super) fn kill_and_reap(&mut self) {
        self.signal_ranks(Signal::KILL);
        let hopeless = matches!(self.stage, StopStage::Killed(due) if due <= Instant::now());
        let due = if hopeless { Instant::now() } else { Instant::now() + KILL_TIME };
        let left = self.end_descendants(due);
        let is_left = |rank: &Rank| hopeless && rank.exited.is_none();
        let kept = self.ranks.iter().filter(|rank| is_left(rank));
        let targets = kept.flat_map(|rank| {
            let groups = rank.groups().into_iter().map(Target::Group);
            groups.chain([Target::Process(pid_of(&rank.child))])
        });
        self.guard.keep(targets.collect());
        for rank in self.ranks.iter_mut().filter(|rank| !is_left(rank)) {
            rank.status = process::reap(&mut rank.child).ok();
            drop(process::reap(&mut rank.leader));
        }
        let ranks = self.ranks.iter().enumerate().filter(|(_, rank)| is_left(rank));
        let ranks = ranks.map(|(local, rank)| {
            let (number, pid) = (self.assignment.first_rank + local, rank.child.id());
            format!("rank {number} (pid {pid}) is {}", describe_survivor(rank.kill_error))
        });
        let others = left.into_iter().map(|(pid, error)| {
            format!("pid {pid}, started by a rank, is {}", describe_survivor(error))
        });
        self.survivors = ranks.chain(others).collect();
    }

    /// Kills the descendants of ranks until none is left. Returns those that cannot be killed, or
    /// still run at `due`.
    fn end_descendants(&self, due: Instant) -> Vec<(i32, Option<Errno>)> {
        loop {
            let kill = |process: Process| (process.pid, process.signal(Signal::KILL).err());
            let left: Vec<_> = self.descendants().into_iter().map(kill).collect();
            let may_end = left.iter().any(|(_, error)| error.is_none());
            if !may_end || due <= Instant::now() {
                // The thread that reaps them may come later, and others take zombies for processes.
                process::reap_orphans(&self.id, self.options.reap_all);
                return left;
            }
            std::thread::sleep(KILL_PAUSE);
        }
    }
}

impl Rank {
    /// Returns the process groups whose ids this rank reserves: that of its leader, and its own if
    /// it has made one.
    fn groups(&self) -> Vec<Pid> {
        let pid = pid_of(&self.child);
        let own = getpgid(Some(pid)).ok().filter(|&group| group == pid);
        [pid_of(&self.leader)].into_iter().chain(own).collect()
    }
}

/// Returns the session of an unreaped child. Not by `getsid`: in a namespace of processes it is 0
/// if the session's leader is outside.
fn session(child: &Child) -> Option<i32> {
    Process::read(pid_of(child).as_raw_nonzero().get()).map(|process| process.session)
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
/// Time for a signal to arrive that has also ended a rank.
const SIGNAL_TIME: Duration = Duration::from_millis(100);
/// Time between two looks for killed processes.
const KILL_PAUSE: Duration = Duration::from_millis(5);
