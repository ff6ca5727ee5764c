//! `runner launch`: N ranks on this host, as torchrun starts them.
//!
//! The launcher hosts the store (a new one, at another port, for every attempt: nothing that an earlier
//! attempt has stored can be met), starts the ranks with torchrun's environment, each in a process
//! group of its own, puts `[rank 0] ` before each line they print, and waits. When one fails, the
//! others get a moment to report what they see (their collectives fail too and name the rank),
//! then SIGTERM, then, after a grace, SIGKILL; and if restarts are left, all ranks start again. The
//! exit code is that of the likely cause: a rank that a signal ended, or else the failure that was the first
//! by the ranks' own error files (`error_file`), or to be seen; torchrun's is always 1. If the launcher itself is killed, a guard
//! (`guard`) kills the ranks and what they have started, and tidies up.
//!
//! Threads only watch: one for each rank waits for its exit, one for signals, two for each rank's
//! output. All decisions are taken by the calling thread, in `Job::supervise`.
//!
//! Invariant: a rank's process id stays reserved (its exit is seen without reaping it) until its
//! process group has been killed for the last time, so no signal ever meets a stranger; and when
//! `launch` returns, no process of any rank's group is left.

mod env;
mod error_file;
mod guard;
mod nproc;
mod output;

use std::ffi::OsString;
use std::fs::DirBuilder;
use std::io::{self, Write};
use std::os::unix::fs::DirBuilderExt;
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStderr, ChildStdout, Command, ExitStatus, Stdio};
use std::sync::Arc;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use collective::TcpStoreServer;
use parking_lot::Mutex;
use rustix::process::{Pid, Signal, WaitId, WaitIdOptions, kill_process_group, waitid};
use signal_hook::consts::{SIGABRT, SIGHUP, SIGINT, SIGQUIT, SIGTERM};
use signal_hook::iterator::{Handle, Signals};

use self::env::Attempt;
pub use self::error_file::{record_failure, record_panics};
use self::guard::Guard;
pub use self::guard::tie_to_parent;
pub use self::nproc::nproc_per_node;
use crate::{Error, Result};

/// What to launch, and how patiently.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct LaunchOptions {
    /// Number of ranks.
    pub nproc_per_node: usize,
    /// Arguments of each rank's program.
    pub args: Vec<OsString>,
    /// The program; this one unless set.
    pub program: Option<PathBuf>,
    /// Variables for the ranks besides the launcher's own and torchrun's.
    pub envs: Vec<(OsString, OsString)>,
    /// `TORCHELASTIC_RUN_ID`; `none` unless set, as torchrun has it.
    pub run_id: String,
    /// How often all ranks are started again after a failure; 0 unless set.
    pub max_restarts: u32,
    /// `ROLE_NAME`; `default` unless set, as torchrun has it.
    pub role: String,
    /// After the first failure, how long the others may report on their own: 2 s unless set.
    pub report_time: Duration,
    /// Between SIGTERM and SIGKILL: 30 s unless set, as torchrun has it.
    pub grace: Duration,
}

impl LaunchOptions {
    /// `nproc_per_node` copies of this program with `args`.
    #[must_use]
    pub fn new(nproc_per_node: usize, args: impl IntoIterator<Item = impl Into<OsString>>) -> Self {
        Self {
            nproc_per_node,
            args: args.into_iter().map(Into::into).collect(),
            program: None,
            envs: Vec::new(),
            run_id: "none".to_owned(),
            max_restarts: 0,
            role: "default".to_owned(),
            report_time: Duration::from_secs(2),
            grace: Duration::from_secs(30),
        }
    }
}

/// Where the ranks' output goes, line by line.
pub type Sink = Arc<Mutex<dyn Write + Send>>;

/// Launches, waits, and returns the exit code: 0 if every rank exited with 0; else that of the
/// first rank that a signal ended, 128 and the signal's number, or of the first that failed.
///
/// Call it from the main thread, as the last thing a program does: the ranks may be tied to the
/// thread that started them (see [`tie_to_parent`]), and SIGINT, SIGTERM, SIGHUP and SIGQUIT are
/// forwarded to the ranks from then on instead of ending this process. A second SIGINT kills.
///
/// # Errors
///
/// [`Error::Config`] without ranks, [`Error::Collective`] if the store cannot be hosted,
/// [`Error::Io`] if a rank cannot be started. None is left running then.
pub fn launch(options: LaunchOptions) -> Result<i32> {
    launch_to(options, Arc::new(Mutex::new(io::stdout())), Arc::new(Mutex::new(io::stderr())))
}

/// [`launch`], with the ranks' output, and the summary of a failure on `stderr`, sent elsewhere.
///
/// # Errors
///
/// As [`launch`].
pub fn launch_to(options: LaunchOptions, stdout: Sink, stderr: Sink) -> Result<i32> {
    if options.nproc_per_node == 0 {
        return Err(Error::Config("nproc_per_node is 0: there is nothing to launch".to_owned()));
    }
    let (sender, events) = channel();
    let signals = SignalThread::start(sender.clone())?;
    let folder = Folder::new()?;
    // Nobody else removes it.
    let guard = Guard::start(&folder.0).inspect_err(|_| drop(std::fs::remove_dir(&folder.0)))?;
    let mut job = Job {
        options,
        attempt: 0,
        ranks: Vec::new(),
        events,
        stage: Stage::Running,
        told_to_stop: false,
        guard,
    };
    let mut store = new_store()?;
    loop {
        job.spawn(store.port(), &folder, &sender, (&stdout, &stderr))?;
        job.supervise();
        job.kill_and_reap()?;
        job.wait_for_output();
        job.report(&stderr);
        if job.exit_code() == 0 || job.told_to_stop || job.attempt == job.options.max_restarts {
            break;
        }
        // The new one is there before the old one goes, so its port is another.
        store = new_store()?;
        job.next_attempt(&stderr);
    }
    drop(signals);
    Ok(job.exit_code())
}

fn new_store() -> Result<TcpStoreServer> {
    Ok(TcpStoreServer::bind(([127, 0, 0, 1], 0).into())?)
}

/// A folder for error files, which others cannot write. The guard removes it.
struct Folder(PathBuf);

impl Folder {
    fn new() -> Result<Self> {
        let name = format!("runner-launch-{}-{:08x}", std::process::id(), rand::random::<u32>());
        let path = std::env::temp_dir().join(name);
        let made = DirBuilder::new().mode(0o700).create(&path);
        made.map_err(|source| Error::Io { what: format!("make {}", path.display()), source })?;
        Ok(Self(path))
    }

    fn error_file(&self, attempt: u32, rank: usize) -> PathBuf {
        self.0.join(format!("attempt_{attempt}/{rank}/error.json"))
    }
}

/// What the watching threads tell the supervising one.
enum Event {
    Exited { attempt: u32, rank: usize },
    Signal(i32),
}

struct Job {
    options: LaunchOptions,
    attempt: u32,
    ranks: Vec<Rank>,
    events: Receiver<Event>,
    stage: Stage,
    /// A signal asked this process to end: there is no further attempt.
    told_to_stop: bool,
    guard: Guard,
}

/// How a rank ended, as far as the cause of a failure is concerned.
enum End {
    Success,
    Failure,
    /// By a signal.
    Struck,
}

struct Rank {
    child: Child,
    /// Threads that copy the rank's output.
    output: Vec<JoinHandle<()>>,
    /// Place among all exits, and when, in seconds since 1970; `None` while it runs.
    exited: Option<(usize, u64)>,
    /// Whether a signal ended it that is not known to be this launcher's.
    struck: bool,
    error_file: PathBuf,
    status: Option<ExitStatus>,
}

/// How far the job has come towards its end, and when the next step is due.
enum Stage {
    Running,
    /// A rank has failed; the others may report.
    Reporting(Instant),
    /// SIGTERM, or a forwarded signal, was sent.
    Stopping(Instant),
    /// SIGKILL was sent.
    Killed(Instant),
}

impl Job {
    fn spawn(
        &mut self,
        store_port: u16,
        folder: &Folder,
        events: &Sender<Event>,
        sinks: (&Sink, &Sink),
    ) -> Result<()> {
        let io_error = |what: String| move |source| Error::Io { what, source };
        let program = match &self.options.program {
            Some(program) => program.clone(),
            None => std::env::current_exe()
                .map_err(io_error("find this program's own path".to_owned()))?,
        };
        for rank in 0..self.options.nproc_per_node {
            let error_file = folder.error_file(self.attempt, rank);
            let attempt = Attempt { number: self.attempt, store_port, error_file: &error_file };
            let started = Command::new(&program)
                .args(&self.options.args)
                .envs(env::of_rank(rank, &attempt, &self.options))
                .stdin(Stdio::null())
                .stdout(Stdio::piped())
                .stderr(Stdio::piped())
                .process_group(0)
                .spawn()
                .map_err(io_error(format!("start rank {rank} ({})", program.display())));
            let watched =
                started.and_then(|child| self.watch(rank, child, &error_file, events, sinks));
            if let Err(error) = watched {
                self.signal_groups(Signal::KILL);
                self.kill_and_reap()?;
                return Err(error);
            }
        }
        Ok(())
    }

    /// Takes a rank that has just been started: the guard knows it before anybody waits for it.
    fn watch(
        &mut self,
        rank: usize,
        mut child: Child,
        error_file: &Path,
        events: &Sender<Event>,
        sinks: (&Sink, &Sink),
    ) -> Result<()> {
        let pipes = (child.stdout.take(), child.stderr.take());
        let pid = pid_of(&child);
        let error_file = error_file.to_owned();
        let output = Vec::new();
        self.ranks.push(Rank {
            child,
            output,
            exited: None,
            struck: false,
            error_file,
            status: None,
        });
        self.guard.watch(pid)?;
        let exited = Event::Exited { attempt: self.attempt, rank };
        self.ranks[rank].output = watch(exited, rank, pid, pipes, events, sinks)
            .map_err(|source| Error::Io { what: "start a thread".to_owned(), source })?;
        Ok(())
    }

    /// Begins anew, after all ranks of the last attempt have ended.
    fn next_attempt(&mut self, stderr: &Sink) {
        self.attempt += 1;
        self.ranks.clear();
        self.stage = Stage::Running;
        let (attempt, most) = (self.attempt, self.options.max_restarts);
        let text = format!("launch: all ranks start again (restart {attempt} of {most})\n");
        // Nobody reads standard error: then nobody wants to know.
        let _ = stderr.lock().write_all(text.as_bytes());
    }

    /// Waits until every rank has ended, or had its chances.
    fn supervise(&mut self) {
        let mut exits = 0;
        while exits < self.ranks.len() {
            match self.next_event() {
                Some(Event::Exited { attempt, .. }) if attempt != self.attempt => {}
                Some(Event::Exited { rank, .. }) => {
                    self.ranks[rank].exited = Some((exits, error_file::now()));
                    exits += 1;
                    let end = self.look(rank);
                    let asked = !matches!(self.stage, Stage::Running | Stage::Reporting(_));
                    self.ranks[rank].struck = !asked && matches!(end, End::Struck);
                    if matches!(self.stage, Stage::Running) && !matches!(end, End::Success) {
                        self.stage = Stage::Reporting(Instant::now() + self.options.report_time);
                    }
                }
                Some(Event::Signal(signal)) => self.forward(signal),
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

    /// The next event, or `None` once the stage's time is over.
    fn next_event(&self) -> Option<Event> {
        let due = match self.stage {
            Stage::Running => return self.events.recv().ok(),
            Stage::Reporting(due) | Stage::Stopping(due) | Stage::Killed(due) => due,
        };
        self.events.recv_timeout(due.saturating_duration_since(Instant::now())).ok()
    }

    /// How `rank`, which has exited, did so. Looks without reaping.
    fn look(&self, rank: usize) -> End {
        let pid = pid_of(&self.ranks[rank].child);
        let look = WaitIdOptions::EXITED | WaitIdOptions::NOWAIT | WaitIdOptions::NOHANG;
        let Ok(Some(status)) = waitid(WaitId::Pid(pid), look) else { return End::Failure };
        match (status.exit_status(), status.terminating_signal()) {
            (Some(0), _) => End::Success,
            // Who aborts does so itself, perhaps because another failed.
            (_, Some(signal)) if signal != SIGABRT => End::Struck,
            _ => End::Failure,
        }
    }

    fn forward(&mut self, number: i32) {
        self.told_to_stop = true;
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
            let _ = kill_process_group(pid_of(&rank.child), signal);
        }
    }

    /// Kills what is left of every group, and only then gives the process ids back.
    fn kill_and_reap(&mut self) -> Result<()> {
        self.signal_groups(Signal::KILL);
        let hopeless = matches!(self.stage, Stage::Killed(due) if due <= Instant::now());
        if !hopeless {
            self.guard.forget()?;
        }
        for rank in self.ranks.iter_mut().filter(|rank| !hopeless || rank.exited.is_some()) {
            rank.status = rank.child.wait().ok();
        }
        Ok(())
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

    /// The ranks that failed, with what they say of it, the likely cause first: one that a signal ended,
    /// since that answers nobody else's failure, and its peers may know of its death before the
    /// kernel is done with it; then the first, by their own clock or else by ours.
    fn failures(&self) -> Vec<(usize, &Rank, Option<String>)> {
        let failed = |rank: &Rank| rank.status.is_none_or(|status| !status.success());
        let ranks = self.ranks.iter().enumerate().filter(|(_, rank)| failed(rank));
        let mut failures: Vec<_> = ranks
            .map(|(index, rank)| {
                let said = error_file::read(&rank.error_file);
                let (order, seen) = rank.exited.unwrap_or((usize::MAX, u64::MAX));
                // A file is written before the exit; a clock that says otherwise is wrong.
                let at = said.as_ref().map_or(seen, |said| said.at.min(seen));
                ((!rank.struck, at, order), (index, rank, said.map(|said| said.message)))
            })
            .collect();
        failures.sort_by_key(|(first, _)| *first);
        failures.into_iter().map(|(_, failure)| failure).collect()
    }

    fn report(&self, stderr: &Sink) {
        let failures = self.failures();
        if failures.is_empty() {
            return;
        }
        let (failed, all) = (failures.len(), self.ranks.len());
        let mut text = format!("launch: {failed} of {all} ranks failed\n");
        for (at, (index, rank, said)) in failures.into_iter().enumerate() {
            let label = if at == 0 { "root cause: " } else { "" };
            let how = match rank.status {
                Some(status) => describe(status),
                None => "still running after SIGKILL".to_owned(),
            };
            let said = said.map_or_else(String::new, |said| format!(": {said}"));
            text += &format!("  {label}rank {index} (pid {}): {how}{said}\n", rank.child.id());
        }
        // Nobody reads standard error: then nobody wants to know.
        let _ = stderr.lock().write_all(text.as_bytes());
    }

    fn exit_code(&self) -> i32 {
        match self.failures().first() {
            None => 0,
            Some((_, Rank { status: None, .. }, _)) => 1,
            Some((_, Rank { status: Some(status), .. }, _)) => {
                match (status.code(), status.signal()) {
                    (Some(code), _) => code,
                    (None, signal) => 128 + signal.unwrap_or(0),
                }
            }
        }
    }
}

/// Tells signals of this process to the supervising thread, until dropped.
struct SignalThread {
    handle: Handle,
    thread: Option<JoinHandle<()>>,
}

impl SignalThread {
    fn start(events: Sender<Event>) -> Result<Self> {
        let io_error = |source| Error::Io { what: "handle signals".to_owned(), source };
        let mut signals = Signals::new([SIGINT, SIGTERM, SIGHUP, SIGQUIT]).map_err(io_error)?;
        let handle = signals.handle();
        let thread = std::thread::Builder::new()
            .name("launch-signals".to_owned())
            .spawn(move || {
                for signal in &mut signals {
                    // The job has ended if nobody listens.
                    let _ = events.send(Event::Signal(signal));
                }
            })
            .map_err(io_error)?;
        Ok(Self { handle, thread: Some(thread) })
    }
}

impl Drop for SignalThread {
    fn drop(&mut self) {
        self.handle.close();
        if let Some(thread) = self.thread.take() {
            drop(thread.join());
        }
    }
}

/// Starts the threads of one rank and returns those that copy its output.
fn watch(
    exited: Event,
    rank: usize,
    pid: Pid,
    pipes: (Option<ChildStdout>, Option<ChildStderr>),
    events: &Sender<Event>,
    sinks: (&Sink, &Sink),
) -> io::Result<Vec<JoinHandle<()>>> {
    watch_exit(exited, rank, pid, events.clone())?;
    let stdout = pipes.0.map(|pipe| output::copy(rank, pipe, sinks.0)).transpose()?;
    let stderr = pipes.1.map(|pipe| output::copy(rank, pipe, sinks.1)).transpose()?;
    Ok(stdout.into_iter().chain(stderr).collect())
}

/// Waits for the exit of a rank without reaping it.
fn watch_exit(
    exited: Event,
    rank: usize,
    pid: Pid,
    events: Sender<Event>,
) -> io::Result<JoinHandle<()>> {
    std::thread::Builder::new().name(format!("launch-wait-{rank}")).spawn(move || {
        let look = WaitIdOptions::EXITED | WaitIdOptions::NOWAIT;
        while let Err(rustix::io::Errno::INTR) = waitid(WaitId::Pid(pid), look) {}
        // The job has ended if nobody listens.
        let _ = events.send(exited);
    })
}

fn pid_of(child: &Child) -> Pid {
    i32::try_from(child.id()).ok().and_then(Pid::from_raw).expect("a process id is a positive i32")
}

fn describe(status: ExitStatus) -> String {
    match (status.code(), status.signal()) {
        (Some(code), _) => format!("exit code {code}"),
        (None, Some(number)) => match signal_hook::low_level::signal_name(number) {
            Some(name) => format!("killed by {name}"),
            None => format!("killed by signal {number}"),
        },
        (None, None) => status.to_string(),
    }
}

/// How long a killed process may take to end.
const KILL_TIME: Duration = Duration::from_secs(10);
/// How long output is awaited after the last rank has ended.
const OUTPUT_TIME: Duration = Duration::from_secs(1);
