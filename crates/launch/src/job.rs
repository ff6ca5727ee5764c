//! Runs the ranks of this node, one attempt after another: spawn, supervise, stop, reap.
//!
//! Other threads only send events: one per rank waits for its exit, one for signals, one for other
//! nodes, two per rank copy its output. All decisions are made in the calling thread, in
//! `Job::supervise`.
//!
//! A rank joins an existing process group, whose leader exits at once and is not reaped. The guard
//! knows the group before the rank exists, so a launcher killed at any time leaves no process
//! behind.
//!
//! Invariant: a group id stays reserved (its leader is not reaped) until the group has been killed
//! for the last time, so a signal never reaches an unrelated process; and when `Job::run` returns,
//! no process of any rank's group is left.

use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::TryLockError;
use std::sync::mpsc::{Receiver, Sender};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use rustix::process::{
    Pid, Signal, WaitId, WaitIdOptions, WaitIdStatus, kill_process_group, waitid,
};
use signal_hook::consts::{SIGABRT, SIGINT};

use super::env;
use super::events::{Event, Queue};
use super::guard::Guard;
use super::logs::{OutputTarget, RunDir};
use super::nodes::address::host_name;
use super::nodes::{Assignment, Coordinator, End};
use super::output::Copy;
use super::summary::{self, Failure, Outcome};
use super::{LaunchOptions, Sink, error_file};
use crate::{Error, Result};

/// The ranks of this node over all attempts.
pub(super) struct Job {
    pub(super) options: LaunchOptions,
    pub(super) queue: Queue,
    pub(super) sender: Sender<Event>,
    assignment: Assignment,
    ranks: Vec<Rank>,
    /// Threads that still copy the ranks' output.
    copies: Vec<Copy>,
    /// Thread that prints the launcher's messages; `None` once moved to `copies`.
    messages: Option<Copy>,
    /// Reason for which ranks of this node could not be started.
    problem: Option<String>,
    stage: StopStage,
    /// Whether a rank of this or another node has failed.
    failed: bool,
    /// Whether the ranks received SIGTERM because of a failure: saving a checkpoint then does not
    /// prevent a restart.
    stopped_after_failure: bool,
    guard: Guard,
    run_dir: RunDir,
    sinks: (Sink, Sink),
}

struct Rank {
    child: Child,
    /// Leader of its process group: a process that ended at once and, unreaped, reserves the group
    /// id.
    leader: Child,
    /// Index among all exits, and time in nanoseconds since 1970; `None` while it runs.
    exited: Option<(usize, u64)>,
    /// Whether it was ended by a signal that this launcher did not send.
    killed: bool,
    /// Whether it was interrupted and saved a checkpoint, which is not a failure.
    saved: bool,
    /// Whether another node had already ended the attempt.
    notified: bool,
    error_file: PathBuf,
    status: Option<ExitStatus>,
}

/// Stage of stopping an attempt, with the deadline of the next stage.
enum StopStage {
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
    pub(super) fn new(
        options: LaunchOptions,
        events: Receiver<Event>,
        sender: Sender<Event>,
        sinks: (Sink, Sink),
    ) -> Result<Self> {
        let run_dir = RunDir::new(&options)?;
        // Without a guard, the directory has to be removed here.
        let temporary = run_dir.temporary.then(|| run_dir.path.clone());
        let guard = Guard::start(temporary).inspect_err(|_| {
            drop(std::fs::remove_dir(&run_dir.path));
        })?;
        let messages = Copy::messages(&sinks.1).map_err(Error::io("start a thread"))?;
        let job = Self {
            options,
            queue: Queue::new(events, messages.0),
            sender,
            assignment: Assignment::default(),
            ranks: Vec::new(),
            copies: Vec::new(),
            messages: Some(messages.1),
            problem: None,
            stage: StopStage::Running,
            failed: false,
            stopped_after_failure: false,
            guard,
            run_dir,
            sinks,
        };
        if !job.run_dir.temporary {
            job.queue.print(&format!("launch: logs are in {}\n", job.run_dir.path.display()));
        }
        Ok(job)
    }

    /// Prepares an attempt after all ranks of the previous one have ended.
    pub(super) fn begin(&mut self, assignment: Assignment) {
        self.assignment = assignment;
        self.ranks.clear();
        self.stage = StopStage::Running;
        (self.failed, self.stopped_after_failure) = (false, false);
        self.queue.attempt = self.assignment.round;
        self.queue.remote = None;
    }

    /// Starts the ranks and waits until all have ended. An error here ends the attempt on all
    /// nodes.
    pub(super) fn run(&mut self, coordinator: &dyn Coordinator) -> Result<()> {
        if let Err(error) = self.spawn() {
            let node = self.assignment.node;
            self.problem = Some(format!("node {node} ({}): {error}", host_name()));
            coordinator.announce(&End::Left { node });
            return Err(error);
        }
        self.supervise(coordinator);
        self.kill_and_reap();
        self.wait_for_output(OUTPUT_TIME);
        Ok(())
    }

    fn spawn(&mut self) -> Result<()> {
        let program = match &self.options.program {
            Some(program) => program.clone(),
            None => std::env::current_exe().map_err(Error::io("find this program's own path"))?,
        };
        for local in 0..self.options.nproc_per_node {
            if let Err(error) = self.spawn_one(local, &program) {
                self.kill_and_reap();
                return Err(error);
            }
        }
        Ok(())
    }

    fn spawn_one(&mut self, local: usize, program: &Path) -> Result<()> {
        let rank = self.assignment.first_rank + local;
        let error_file = self.run_dir.error_file(self.assignment.round, local);
        let [out, err] = self.run_dir.targets(self.assignment.round, local)?;
        let prefix = self.options.logs.prefix(&self.options.role, local, rank);
        let envs = env::of_rank(local, &self.assignment, &self.options, &error_file);
        let failed = || Error::io(format!("start rank {rank} ({})", program.display()));
        let (stdout, stderr) = (stdio(&out).map_err(failed())?, stdio(&err).map_err(failed())?);
        let mut leader = leader().map_err(failed())?;
        let group = pid_of(&leader);
        self.guard.watch(group)?;
        let child = Command::new(program)
            .args(&self.options.args)
            .envs(envs)
            .stdin(Stdio::null())
            .stdout(stdout)
            .stderr(stderr)
            .process_group(group.as_raw_nonzero().get())
            .spawn();
        let mut child = child.inspect_err(|_| drop(leader.wait())).map_err(failed())?;
        let stdout = child.stdout.take().map(OwnedFd::from);
        let stderr = child.stderr.take().map(OwnedFd::from);
        let pid = pid_of(&child);
        self.ranks.push(Rank {
            child,
            leader,
            exited: None,
            killed: false,
            saved: false,
            notified: false,
            error_file,
            status: None,
        });
        watch_exit(self.assignment.round, local, pid, self.sender.clone())
            .map_err(Error::io("start a thread"))?;
        for (pipe, file, sink) in
            [(stdout, out.file, &self.sinks.0), (stderr, err.file, &self.sinks.1)]
        {
            let copy =
                pipe.map(|pipe| Copy::start((rank, &prefix), pipe, file, (sink, &self.sinks.1)));
            let copy = copy.transpose();
            self.copies.extend(copy.map_err(Error::io("start a thread"))?);
        }
        Ok(())
    }

    /// Handles events until every rank has exited or has survived SIGKILL.
    fn supervise(&mut self, coordinator: &dyn Coordinator) {
        if self.queue.signal.is_some() {
            self.stop(Signal::TERM);
        }
        let mut exits = 0;
        while exits < self.ranks.len() {
            match self.next_event() {
                Some(Event::Exited { attempt, .. } | Event::RemoteEnd { attempt, .. })
                    if attempt != self.queue.attempt => {}
                Some(Event::Exited { rank, code, signal, .. }) => {
                    self.exited(rank, (code, signal), exits, coordinator);
                    exits += 1;
                }
                Some(Event::RemoteEnd { end, .. }) => self.ended_remotely(end),
                Some(Event::Signal(signal)) => {
                    coordinator.announce(&End::Left { node: self.assignment.node });
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
        coordinator: &dyn Coordinator,
    ) {
        let asked = !matches!(self.stage, StopStage::Running | StopStage::Reporting(_));
        // An end announced by this node is reported back to it.
        let notified = self.queue.remote.as_ref().is_some_and(|end| !self.is_own(end));
        let rank = &mut self.ranks[local];
        rank.exited = Some((order, error_file::now()));
        // SIGABRT comes from the rank itself, perhaps because another rank failed.
        rank.killed = !asked && signal.is_some_and(|signal| signal != SIGABRT);
        rank.notified = notified;
        rank.saved = code == Some(summary::SAVED) && !(asked && self.stopped_after_failure);
        let saved = rank.saved;
        let rank = self.assignment.first_rank + local;
        let (end, time) = match code {
            Some(0) => return,
            _ if saved => (End::Saved { rank }, self.options.grace),
            _ => (End::Failed { rank }, self.options.report_time),
        };
        self.failed |= !saved;
        if matches!(self.stage, StopStage::Running) {
            coordinator.announce(&end);
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
    fn kill_and_reap(&mut self) {
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

    /// Waits up to `time` until the ranks' output is written. Ends early on a signal, or if nothing
    /// was written for `OUTPUT_TIME`: a process that left its group may hold a pipe open.
    fn wait_for_output(&mut self, time: Duration) {
        let (start, mut busy) = (Instant::now(), Instant::now());
        let is_busy = |sink: &Sink| matches!(sink.try_lock(), Err(TryLockError::WouldBlock));
        let before = self.queue.signal.take();
        while self.copies.iter().any(|copy| !copy.is_finished())
            && (start.elapsed() < time && busy.elapsed() < OUTPUT_TIME)
            && !self.queue.drain()
        {
            if is_busy(&self.sinks.0) || is_busy(&self.sinks.1) {
                busy = Instant::now();
            }
            std::thread::sleep(Duration::from_millis(5));
        }
        self.queue.signal = self.queue.signal.or(before);
        self.copies.retain(|copy| !copy.is_finished());
    }

    /// Waits for a slow console after the last attempt and its messages.
    pub(super) fn finish_output(&mut self) {
        self.queue.messages = None;
        self.copies.extend(self.messages.take());
        self.wait_for_output(CONSOLE_TIME);
        self.copies.drain(..).for_each(Copy::finish_file);
    }

    /// Returns the result of the attempt on this node.
    pub(super) fn outcome(&self) -> Outcome {
        let saved = self.ranks.iter().filter(|rank| rank.saved).count();
        let failed =
            |rank: &Rank| !rank.saved && !rank.status.is_some_and(|status| status.success());
        let ranks = self.ranks.iter().enumerate().filter(|(_, rank)| failed(rank));
        let failures = ranks.map(|(local, rank)| {
            let written = error_file::read(&rank.error_file);
            let (order, seen) = rank.exited.unwrap_or((usize::MAX, u64::MAX));
            Failure {
                rank: self.assignment.first_rank + local,
                pid: rank.child.id(),
                how: summary::describe(rank.status),
                code: summary::code(rank.status),
                killed: rank.killed,
                notified: rank.notified,
                // The file was written before the exit, so a later timestamp is wrong. Without one,
                // the failure preceded the detected exit, and other ranks may have reacted to it.
                at: match written.as_ref().and_then(|written| written.at) {
                    Some(at) => at.min(seen),
                    None => seen.saturating_sub(SEEN_LATE),
                },
                message: written.map(|written| written.message),
                order,
            }
        });
        Outcome {
            ranks: self.ranks.len(),
            failures: failures.collect(),
            saved,
            problem: self.problem.clone(),
            stopped: self.queue.signal.is_some(),
            closes: false,
        }
    }
}

/// Starts a process that leads its own process group and exits at once.
fn leader() -> io::Result<Child> {
    Command::new("/bin/sh")
        .args(["-c", "exit"])
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .process_group(0)
        .spawn()
}

/// Returns a standard stream of a rank: a pipe if it goes to the console, otherwise the log file
/// itself.
fn stdio(target: &OutputTarget) -> io::Result<Stdio> {
    match (&target.file, target.console) {
        (_, true) => Ok(Stdio::piped()),
        (Some(log), false) => Ok(Stdio::from(log.file.try_clone()?)),
        (None, false) => Ok(Stdio::null()),
    }
}

/// Starts a thread that waits for the exit of a rank (by its local rank) without reaping it.
fn watch_exit(
    attempt: u32,
    rank: usize,
    pid: Pid,
    events: Sender<Event>,
) -> io::Result<JoinHandle<()>> {
    std::thread::Builder::new().name(format!("launch-wait-{rank}")).spawn(move || {
        let options = WaitIdOptions::EXITED | WaitIdOptions::NOWAIT;
        let status = loop {
            match waitid(WaitId::Pid(pid), options) {
                Err(rustix::io::Errno::INTR) => {}
                status => break status.ok().flatten(),
            }
        };
        let code = status.as_ref().and_then(WaitIdStatus::exit_status);
        let signal = status.as_ref().and_then(WaitIdStatus::terminating_signal);
        // Fails after the end of the job.
        let _ = events.send(Event::Exited { attempt, rank, code, signal });
    })
}

fn pid_of(child: &Child) -> Pid {
    i32::try_from(child.id()).ok().and_then(Pid::from_raw).expect("a process id is a positive i32")
}

/// Time for a process to end after SIGKILL.
const KILL_TIME: Duration = Duration::from_secs(10);
/// Maximum delay between the exit of a rank and its detection, in nanoseconds.
const SEEN_LATE: u64 = 100_000_000;
/// Time to wait for output after the last rank has exited.
const OUTPUT_TIME: Duration = Duration::from_secs(1);
/// Maximum time to wait at the end for a blocked console, for example a pager.
const CONSOLE_TIME: Duration = Duration::from_secs(3600);
