//! Runs the ranks of this node, one attempt after another: spawn, supervise, stop, reap.
//!
//! Other threads only send events: one per rank waits for its exit, one for signals, one for other
//! nodes, two per rank copy its output. All decisions are made in the calling thread, in
//! `supervise`.
//!
//! A rank joins an existing process group, whose leader exits at once and is not reaped. The guard
//! knows the group before the rank exists, so a launcher killed at any time leaves no process
//! behind. A rank may leave the group, as GNU `timeout`, `setsid` and shells with job control do.
//! So it also gets each signal by its pid, and its descendants are known ([`process`]).
//!
//! Invariant: a group id stays reserved (its leader is not reaped), and so does a rank's pid, until
//! it has been killed for the last time, so a signal never reaches an unrelated process; and when
//! `Job::run` returns, no rank and no descendant of one is left apart from daemons
//! ([`process::descendants`]), or [`Outcome::survivors`] names it, and no further attempt begins.

mod attempt;
mod env;
mod events;
mod guard;
mod process;
mod summary;
mod supervise;

use std::os::fd::OwnedFd;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::TryLockError;
use std::sync::mpsc::{Receiver, Sender};
use std::time::{Duration, Instant};

use rustix::io::Errno;
use tracing::info;

pub(crate) use self::attempt::{Assignment, End};
pub(crate) use self::events::{Event, Queue, SignalThread};
use self::guard::{Guard, Target};
use self::process::{Reaper, leader, pid_of, watch_exit};
pub(crate) use self::summary::{Failure, Outcome, SAVED, Summary};
use self::supervise::StopStage;
use crate::address::{host_name, random_number};
use crate::options::LaunchOptions;
use crate::output::{CopyThread, RunDir, Sink, line_prefix};
use crate::rank::{JOBS, error_file};
use crate::{Error, Result};

/// The ranks of this node over all attempts.
pub(crate) struct Job {
    pub(crate) options: LaunchOptions,
    pub(crate) queue: Queue,
    pub(crate) sender: Sender<Event>,
    /// Random id in the environment of the ranks, after those of jobs that this one runs in.
    id: String,
    assignment: Assignment,
    ranks: Vec<Rank>,
    /// Threads that still copy the ranks' output.
    copies: Vec<CopyThread>,
    /// Thread that prints the launcher's messages; `None` once moved to `copies`.
    messages: Option<CopyThread>,
    /// Reason for which ranks of this node could not be started.
    problem: Option<String>,
    stage: StopStage,
    /// Whether a rank of this or another node has failed.
    failed: bool,
    /// Whether the ranks received SIGTERM because of a failure: saving a checkpoint then does not
    /// prevent a restart.
    stopped_after_failure: bool,
    /// When the launcher began to stop the ranks, in nanoseconds since 1970; `None` before.
    stopped_at: Option<u64>,
    /// Processes that could not be ended, and why.
    survivors: Vec<String>,
    guard: Guard,
    run_dir: RunDir,
    sinks: (Sink, Sink),
    _reaper: Reaper,
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
    /// Set once it is reaped.
    status: Option<ExitStatus>,
    /// Reason for which SIGKILL could not be sent.
    kill_error: Option<Errno>,
}

impl Job {
    pub(crate) fn new(
        options: LaunchOptions,
        events: Receiver<Event>,
        sender: Sender<Event>,
        sinks: (Sink, Sink),
    ) -> Result<Self> {
        let id = format!("{:016x}", random_number());
        let id = std::env::var(JOBS).map_or_else(|_| id.clone(), |outer| format!("{outer}/{id}"));
        let reaper = Reaper::start(id.clone(), options.reap_all)?;
        let run_dir = RunDir::new(&options)?;
        // Without a guard, the directory has to be removed here.
        let temporary = run_dir.temporary.then(|| run_dir.path.clone());
        let guard = Guard::start(id.clone(), temporary).inspect_err(|_| {
            drop(std::fs::remove_dir(&run_dir.path));
        })?;
        let messages = CopyThread::messages(&sinks.1).map_err(Error::io("start a thread"))?;
        let job = Self {
            options,
            queue: Queue::new(events, messages.0),
            sender,
            id,
            assignment: Assignment::default(),
            ranks: Vec::new(),
            copies: Vec::new(),
            messages: Some(messages.1),
            problem: None,
            stage: StopStage::Running,
            failed: false,
            stopped_after_failure: false,
            stopped_at: None,
            survivors: Vec::new(),
            guard,
            run_dir,
            sinks,
            _reaper: reaper,
        };
        if !job.run_dir.temporary {
            job.queue.print(&format!("launch: logs are in {}\n", job.run_dir.path.display()));
        }
        Ok(job)
    }

    /// Prepares an attempt after all ranks of the previous one have ended.
    pub(crate) fn begin(&mut self, assignment: Assignment) {
        self.assignment = assignment;
        self.ranks.clear();
        self.stage = StopStage::Running;
        (self.failed, self.stopped_after_failure) = (false, false);
        self.stopped_at = None;
        self.survivors.clear();
        self.queue.attempt = self.assignment.round;
        self.queue.remote = None;
    }

    /// Starts the ranks and waits until all have ended. An error here ends the attempt on all
    /// nodes.
    pub(crate) fn run(&mut self, announce: &dyn Fn(&End)) -> Result<()> {
        if let Err(error) = self.spawn() {
            let node = self.assignment.node;
            self.problem = Some(format!("node {node} ({}): {error}", host_name()));
            announce(&End::Left { node });
            return Err(error);
        }
        self.supervise(announce);
        self.await_descendants(announce);
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
        let prefix = line_prefix(&self.options.logs, &self.options.role, local, rank);
        let envs = env::of_rank(local, &self.assignment, &self.options, (&self.id, &error_file));
        let failed = || Error::io(format!("start rank {rank} ({})", program.display()));
        let (stdout, stderr) = (out.stdio().map_err(failed())?, err.stdio().map_err(failed())?);
        let mut leader = leader().map_err(failed())?;
        let group = pid_of(&leader);
        if let Err(error) = self.guard.watch(Target::Group(group)) {
            drop(process::reap(&mut leader));
            return Err(error);
        }
        let mut command = Command::new(program);
        command
            .args(&self.options.args)
            .envs(envs)
            .stdin(Stdio::null())
            .stdout(stdout)
            .stderr(stderr)
            .process_group(group.as_raw_nonzero().get());
        let child = process::spawn(&mut command);
        let mut child = child.inspect_err(|_| drop(process::reap(&mut leader))).map_err(failed())?;
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
            kill_error: None,
        });
        self.report_start(local);
        self.guard.watch(Target::Process(pid))?;
        watch_exit(self.assignment.round, local, pid, self.sender.clone())
            .map_err(Error::io("start a thread"))?;
        for (pipe, file, sink) in
            [(stdout, out.file, &self.sinks.0), (stderr, err.file, &self.sinks.1)]
        {
            let copy = pipe
                .map(|pipe| CopyThread::start((rank, &prefix), pipe, file, (sink, &self.sinks.1)));
            let copy = copy.transpose();
            self.copies.extend(copy.map_err(Error::io("start a thread"))?);
        }
        Ok(())
    }

    /// Emits the event of the last rank of `ranks`.
    fn report_start(&self, local_rank: usize) {
        let Assignment { round, restart_count, first_rank, .. } = self.assignment;
        let (rank, pid) = (first_rank + local_rank, self.ranks[local_rank].child.id());
        if round == 0 {
            info!(
                name: "rank_started", target: "launch",
                rank, local_rank, pid, "started a rank"
            );
        } else {
            info!(
                name: "rank_replaced", target: "launch",
                rank, local_rank, pid, attempt = round, restart = restart_count,
                "started a rank again",
            );
        }
    }

    /// Waits up to `time` until the ranks' output is written. Ends early on a signal, or if nothing
    /// was written for `OUTPUT_TIME`: a process that is not of the job may hold a pipe open.
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
    pub(crate) fn finish_output(&mut self) {
        self.queue.messages = None;
        self.copies.extend(self.messages.take());
        self.wait_for_output(CONSOLE_TIME);
        self.copies.drain(..).for_each(CopyThread::finish_file);
    }

    /// Returns the result of the attempt on this node.
    pub(crate) fn outcome(&self) -> Outcome {
        let saved = self.ranks.iter().filter(|rank| rank.saved).count();
        let failed =
            |rank: &Rank| !rank.saved && !rank.status.is_some_and(|status| status.success());
        let ranks = self.ranks.iter().enumerate().filter(|(_, rank)| failed(rank));
        let failures = ranks.map(|(local, rank)| {
            let written = error_file::read(&rank.error_file);
            let (order, seen) = rank.exited.unwrap_or((usize::MAX, u64::MAX));
            // The file was written before the exit, so a later timestamp is wrong.
            let at = written.as_ref().and_then(|written| written.at).map(|at| at.min(seen));
            let stopped = self.stopped_at.is_some_and(|stop| at.unwrap_or(seen) >= stop);
            Failure {
                rank: self.assignment.first_rank + local,
                pid: rank.child.id(),
                how: summary::describe(rank.status, rank.kill_error),
                code: summary::code(rank.status),
                killed: rank.killed,
                notified: rank.notified,
                follows: stopped || written.as_ref().is_some_and(|written| written.by_peer),
                // Without a file, the failure preceded the detected exit, and other ranks may have
                // reacted to it.
                at: at.unwrap_or_else(|| seen.saturating_sub(DETECTION_DELAY_NS)),
                message: written.map(|written| written.message),
                order,
            }
        });
        Outcome {
            ranks: self.ranks.len(),
            failures: failures.collect(),
            saved,
            problem: self.problem.clone(),
            survivors: self.survivors.clone(),
            stopped: self.queue.signal.is_some(),
            closes: false,
        }
    }
}

/// Interval at which processes are looked for that are not children of this process.
const POLL: Duration = Duration::from_millis(50);
/// Maximum delay between the exit of a rank and its detection, in nanoseconds.
const DETECTION_DELAY_NS: u64 = 100_000_000;
/// Time to wait for output after the last rank has exited.
const OUTPUT_TIME: Duration = Duration::from_secs(1);
/// Maximum time to wait at the end for a blocked console, for example a pager.
const CONSOLE_TIME: Duration = Duration::from_secs(3600);
