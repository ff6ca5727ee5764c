//! The ranks of this node, attempt by attempt: spawn, watch, stop, reap.
//!
//! Threads only watch: one for each rank waits for its exit, one for signals, one for other nodes, two
//! for each rank's output. All decisions are taken by the calling thread, in `Job::supervise`.
//!
//! A rank joins a process group that was there before it: that of a process which has done nothing
//! and is not reaped. So the guard knows the group before there is a rank, and a launcher that is
//! killed between any two steps leaves nothing behind.
//!
//! Invariant: a group's number stays reserved (its first process is not reaped) until the group
//! has been killed for the last time, so no signal ever meets a stranger; and when `Job::run` returns,
//! no process of any rank's group is left.

use std::ffi::OsString;
use std::io;
use std::os::unix::process::CommandExt;
use std::path::PathBuf;
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::mpsc::{Receiver, Sender};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use rustix::process::{
    Pid, Signal, WaitId, WaitIdOptions, WaitIdStatus, kill_process_group, waitid,
};
use signal_hook::consts::{SIGABRT, SIGINT};

use super::env;
use super::guard::Guard;
use super::logs::{Dest, Folder};
use super::nodes::{End, Place, Team};
use super::signals::{Ear, Event};
use super::summary::{self, Failure, Outcome};
use super::{LaunchOptions, Sink, error_file, output};
use crate::{Error, Result};

/// All attempts on this node.
pub(super) struct Job {
    pub(super) options: LaunchOptions,
    pub(super) ear: Ear,
    pub(super) sender: Sender<Event>,
    place: Place,
    ranks: Vec<Rank>,
    stage: Stage,
    guard: Guard,
    folder: Folder,
    sinks: (Sink, Sink),
}

struct Rank {
    child: Child,
    /// The first of its process group, which ended at once and keeps the group's number.
    holder: Child,
    /// Threads that copy the rank's output.
    output: Vec<JoinHandle<()>>,
    /// Place among all exits, and when, in nanoseconds since 1970; `None` while it runs.
    exited: Option<(usize, u64)>,
    /// Whether a signal ended it that is not known to be this launcher's.
    struck: bool,
    /// Whether another node had ended the attempt before.
    told: bool,
    error_file: PathBuf,
    status: Option<ExitStatus>,
}

/// How far the attempt has come towards its end, and when the next step is due.
enum Stage {
    Running,
    /// A rank has failed, and the others may report; or has saved, and the others may still do so.
    Reporting(Instant),
    /// SIGTERM, or a forwarded signal, was sent.
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
        let folder = Folder::new(&options)?;
        // Nobody else removes it.
        let temporary = folder.temporary.then(|| folder.path.clone());
        let guard = Guard::start(temporary).inspect_err(|_| {
            drop(std::fs::remove_dir(&folder.path));
        })?;
        let job = Self {
            options,
            ear: Ear::new(events, Sink::clone(&sinks.1)),
            sender,
            place: Place::default(),
            ranks: Vec::new(),
            stage: Stage::Running,
            guard,
            folder,
            sinks,
        };
        if !job.folder.temporary {
            job.ear.say(&format!("launch: logs are in {}\n", job.folder.path.display()));
        }
        Ok(job)
    }

    /// Begins an attempt, after all ranks of the last one have ended.
    pub(super) fn begin(&mut self, place: Place) {
        self.place = place;
        self.ranks.clear();
        self.stage = Stage::Running;
        self.ear.attempt = self.place.round;
        self.ear.elsewhere = None;
    }

    /// Starts the ranks and waits until all have ended.
    pub(super) fn run(&mut self, team: &Team) -> Result<()> {
        self.spawn()?;
        self.supervise(team);
        self.kill_and_reap();
        self.wait_for_output();
        Ok(())
    }

    fn spawn(&mut self) -> Result<()> {
        let program = match &self.options.program {
            Some(program) => program.clone(),
            None => std::env::current_exe().map_err(Error::io("find this program's own path"))?,
        };
        for local in 0..self.options.nproc_per_node {
            if let Err(error) = self.spawn_one(local, &program) {
                self.signal_groups(Signal::KILL);
                self.kill_and_reap();
                return Err(error);
            }
        }
        Ok(())
    }

    fn spawn_one(&mut self, local: usize, program: &std::path::Path) -> Result<()> {
        let rank = self.place.first_rank + local;
        let error_file = self.folder.error_file(self.place.round, local);
        let dests = self.folder.dests(self.place.round, local)?;
        let envs = env::of_rank(local, &self.place, &self.options, &error_file);
        let failed = || Error::io(format!("start rank {rank} ({})", program.display()));
        let mut holder = holder().map_err(failed())?;
        let group = pid_of(&holder);
        self.guard.watch(group)?;
        let child = self.start(group, program, envs, &dests).map_err(failed());
        let mut child = child.inspect_err(|_| drop(holder.wait()))?;
        let (stdout, stderr) = (child.stdout.take(), child.stderr.take());
        let pid = pid_of(&child);
        self.ranks.push(Rank {
            child,
            holder,
            output: Vec::new(),
            exited: None,
            struck: false,
            told: false,
            error_file,
            status: None,
        });
        watch_exit(self.place.round, local, pid, self.sender.clone())
            .map_err(Error::io("start a thread"))?;
        let [out, err] = dests;
        let copies = [
            stdout.map(|pipe| output::copy(rank, pipe, out.file, &self.sinks.0)),
            stderr.map(|pipe| output::copy(rank, pipe, err.file, &self.sinks.1)),
        ];
        for copy in copies.into_iter().flatten() {
            self.ranks[local].output.push(copy.map_err(Error::io("start a thread"))?);
        }
        Ok(())
    }

    fn start(
        &self,
        group: Pid,
        program: &std::path::Path,
        envs: Vec<(OsString, OsString)>,
        dests: &[Dest; 2],
    ) -> io::Result<Child> {
        Command::new(program)
            .args(&self.options.args)
            .envs(envs)
            .stdin(Stdio::null())
            .stdout(stdio(&dests[0])?)
            .stderr(stdio(&dests[1])?)
            .process_group(group.as_raw_nonzero().get())
            .spawn()
    }

    /// Waits until every rank has ended, or had its chances.
    fn supervise(&mut self, team: &Team) {
        if self.ear.signal.is_some() {
            self.stop(Signal::TERM);
        }
        let mut exits = 0;
        while exits < self.ranks.len() {
            match self.next_event() {
                Some(Event::Exited { attempt, .. } | Event::Elsewhere { attempt, .. })
                    if attempt != self.ear.attempt => {}
                Some(Event::Exited { rank, code, signal, .. }) => {
                    self.exited(rank, (code, signal), exits, team);
                    exits += 1;
                }
                Some(Event::Elsewhere { end, .. }) => self.ended_elsewhere(end),
                Some(Event::Signal(signal)) => {
                    team.tell(&End::Left { node: self.place.node });
                    self.forward(signal);
                }
                None => match self.stage {
                    Stage::Running => {}
                    Stage::Reporting(_) => self.stop(Signal::TERM),
                    Stage::Stopping(_) => self.kill(),
                    // Killed, and yet not ended: it hangs in the kernel. Nothing more can be done.
                    Stage::Killed(_) => return,
                },
            }
        }
    }

    /// Notes how a rank ended, by its exit code or the signal that ended it.
    fn exited(
        &mut self,
        local: usize,
        (code, signal): (Option<i32>, Option<i32>),
        order: usize,
        team: &Team,
    ) {
        let asked = !matches!(self.stage, Stage::Running | Stage::Reporting(_));
        // What this node has told the others comes back to it as well.
        let told = self.ear.elsewhere.as_ref().is_some_and(|end| !self.is_own(end));
        let rank = &mut self.ranks[local];
        rank.exited = Some((order, error_file::now()));
        // A rank that aborts does so itself, perhaps because another failed.
        rank.struck = !asked && signal.is_some_and(|signal| signal != SIGABRT);
        rank.told = told;
        let rank = self.place.first_rank + local;
        let (end, time) = match code {
            Some(0) => return,
            Some(summary::SAVED) => (End::Saved { rank }, self.options.grace),
            _ => (End::Failed { rank }, self.options.report_time),
        };
        if matches!(self.stage, Stage::Running) {
            team.tell(&end);
        }
        self.report_within(time);
    }

    /// Whether an end of the attempt has its reason here.
    fn is_own(&self, end: &End) -> bool {
        let ranks = self.place.first_rank..self.place.first_rank + self.ranks.len();
        match end {
            End::Failed { rank } | End::Saved { rank } => ranks.contains(rank),
            End::Left { node } => *node == self.place.node,
            End::Joined { .. } | End::Lost { .. } => false,
        }
    }

    /// The ranks may end by themselves for this long.
    fn report_within(&mut self, time: Duration) {
        let due = Instant::now() + time;
        match &mut self.stage {
            Stage::Running => self.stage = Stage::Reporting(due),
            Stage::Reporting(before) => *before = due.min(*before),
            Stage::Stopping(_) | Stage::Killed(_) => {}
        }
    }

    /// Another node ends the attempt: after a failure the ranks may report what they see of it.
    fn ended_elsewhere(&mut self, end: End) {
        let time = match end {
            End::Joined { .. } | End::Left { .. } => None,
            End::Saved { .. } => Some(self.options.grace),
            End::Failed { .. } | End::Lost { .. } => Some(self.options.report_time),
        };
        self.ear.elsewhere.get_or_insert(end);
        match time {
            Some(time) => self.report_within(time),
            None if matches!(self.stage, Stage::Running) => self.stop(Signal::TERM),
            None => {}
        }
    }

    /// The next event, or `None` once the stage's time is over.
    fn next_event(&self) -> Option<Event> {
        let due = match self.stage {
            Stage::Running => return self.ear.events.recv().ok(),
            Stage::Reporting(due) | Stage::Stopping(due) | Stage::Killed(due) => due,
        };
        self.ear.events.recv_timeout(due.saturating_duration_since(Instant::now())).ok()
    }

    fn forward(&mut self, number: i32) {
        self.ear.signal = Some(number);
        let interrupted_again = number == SIGINT && matches!(self.stage, Stage::Stopping(_));
        match Signal::from_named_raw(number) {
            Some(_) if interrupted_again => self.kill(),
            Some(signal) => self.stop(signal),
            None => {}
        }
    }

    /// Sends a signal that asks the ranks to end. The grace runs from the first such signal.
    fn stop(&mut self, signal: Signal) {
        self.signal_groups(signal);
        if matches!(self.stage, Stage::Running | Stage::Reporting(_)) {
            self.stage = Stage::Stopping(Instant::now() + self.options.grace);
        }
    }

    fn kill(&mut self) {
        self.signal_groups(Signal::KILL);
        self.stage = Stage::Killed(Instant::now() + KILL_TIME);
    }

    fn signal_groups(&self, signal: Signal) {
        for rank in self.ranks.iter().filter(|rank| rank.status.is_none()) {
            // It fails when the whole group has ended, which is what is wanted.
            let _ = kill_process_group(pid_of(&rank.holder), signal);
        }
    }

    /// Kills what is left of every group, and only then gives the process ids back.
    fn kill_and_reap(&mut self) {
        self.signal_groups(Signal::KILL);
        let hopeless = matches!(self.stage, Stage::Killed(due) if due <= Instant::now());
        if !hopeless {
            self.guard.forget();
        }
        for rank in self.ranks.iter_mut().filter(|rank| !hopeless || rank.exited.is_some()) {
            rank.status = rank.child.wait().ok();
            drop(rank.holder.wait());
        }
    }

    /// The pipes end with the last process that holds them, and all of a group's have been
    /// killed; a process that left its group may keep one, and is not waited for long.
    fn wait_for_output(&mut self) {
        let deadline = Instant::now() + OUTPUT_TIME;
        for thread in self.ranks.iter_mut().flat_map(|rank| rank.output.drain(..)) {
            while !thread.is_finished() && Instant::now() < deadline {
                std::thread::sleep(Duration::from_millis(5));
            }
            if thread.is_finished() {
                // A panic there has been reported by its hook.
                drop(thread.join());
            }
        }
    }

    /// How long ranks may take to end, once one has failed or saved, on any node.
    pub(super) fn end_time(&self) -> Duration {
        let LaunchOptions { report_time, grace, .. } = self.options;
        grace.max(report_time) + grace + KILL_TIME
    }

    /// How the attempt went here.
    pub(super) fn outcome(&self) -> Outcome {
        let saved = self.ranks.iter().filter(|rank| summary::is_saved(rank.status)).count();
        let ended_well = |status: ExitStatus| status.success() || summary::is_saved(Some(status));
        let failed = |rank: &Rank| !rank.status.is_some_and(ended_well);
        let ranks = self.ranks.iter().enumerate().filter(|(_, rank)| failed(rank));
        let failures = ranks.map(|(local, rank)| {
            let said = error_file::read(&rank.error_file);
            let (order, seen) = rank.exited.unwrap_or((usize::MAX, u64::MAX));
            Failure {
                rank: self.place.first_rank + local,
                pid: rank.child.id(),
                how: summary::describe(rank.status),
                code: summary::code(rank.status),
                struck: rank.struck,
                told: rank.told,
                // A file is written before the exit; a clock that says otherwise is wrong. Without one
                // the failure was some time before the exit was seen, and others may have answered it.
                at: match &said {
                    Some(said) => said.at.min(seen),
                    None => seen.saturating_sub(SEEN_LATE),
                },
                said: said.map(|said| said.message),
                order,
            }
        });
        Outcome {
            ranks: self.ranks.len(),
            failures: failures.collect(),
            saved,
            stopped: self.ear.signal.is_some(),
            closes: false,
        }
    }
}

/// The first process of a group of its own, which ends at once.
fn holder() -> io::Result<Child> {
    Command::new("/bin/sh")
        .args(["-c", "exit"])
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .process_group(0)
        .spawn()
}

/// What a rank gets as a stream: the file alone needs no thread of ours.
fn stdio(dest: &Dest) -> io::Result<Stdio> {
    match (&dest.file, dest.console) {
        (_, true) => Ok(Stdio::piped()),
        (Some(file), false) => Ok(Stdio::from(file.try_clone()?)),
        (None, false) => Ok(Stdio::null()),
    }
}

/// Waits for the exit of a rank, by its local rank, without reaping it.
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
        // The job has ended if nobody listens.
        let _ = events.send(Event::Exited { attempt, rank, code, signal });
    })
}

fn pid_of(child: &Child) -> Pid {
    i32::try_from(child.id()).ok().and_then(Pid::from_raw).expect("a process id is a positive i32")
}

/// How long a killed process may take to end.
const KILL_TIME: Duration = Duration::from_secs(10);
/// How late the end of a rank may be seen, in nanoseconds.
const SEEN_LATE: u64 = 100_000_000;
/// How long output is awaited after the last rank has ended.
const OUTPUT_TIME: Duration = Duration::from_secs(1);
