//! Starts the ranks of a distributed job, as torchrun does, for any program in any language.
//!
//! The launcher hosts the ranks' rendezvous store (a new one for each attempt, so that no rank
//! reads a key of an earlier attempt), starts each rank in its own process group with torchrun's
//! environment variables, and prefixes each line of a rank's output with `[rank 0] `. When a rank
//! fails, the others get a short time to report what they see (their collectives fail, too, and
//! name the rank), then SIGTERM, then, after a grace period, SIGKILL. If restarts are left, all
//! ranks are restarted. The exit code is that of the likely root cause: a rank killed by a signal,
//! otherwise the earliest failure according to the ranks' error files (`error_file`) or exits. If
//! the launcher itself is killed, a guard process (`guard`) kills the ranks and their children and
//! removes the temporary files.
//!
//! A rank that exits with [`EXIT_SAVED`] was interrupted by a signal or reached its time limit, and
//! saved a checkpoint. This does not count as a failure and causes no restart, unless the rank
//! saved because this launcher stopped it after a failure. The other ranks have the grace period to
//! save, too, and receive no signal meanwhile: a second signal would end them before they have
//! saved.
//!
//! On several nodes, each node runs a launcher, and the launchers meet at a control store
//! ([`Nodes`]): a fixed number of nodes with given ranks (`nodes::fixed`, compatible with
//! torchrun's agents), or an elastic number of nodes (`nodes::elastic`). A failure on one node ends
//! the attempt on all nodes, and all launchers return its exit code.
//!
//! Modules: `flags` is the command line, `job` supervises the ranks of this node, `nodes`
//! coordinates with the other nodes, `summary` reports failures.

#[cfg(not(target_os = "linux"))]
compile_error!("`launch` needs Linux: `prctl` kills the ranks with their launcher");

mod env;
mod error;
mod error_file;
mod events;
mod flags;
mod guard;
mod job;
mod logs;
mod nodes;
mod nproc;
mod output;
mod refused;
mod store;
mod summary;

use std::ffi::OsString;
use std::hash::{BuildHasher, RandomState};
use std::io::{self, Write};
use std::ops::ControlFlow;
use std::path::PathBuf;
use std::sync::mpsc::channel;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use signal_hook::consts::{SIGHUP, SIGINT, SIGQUIT, SIGTERM, SIGUSR1, SIGUSR2};

pub use self::env::{is_elastic, label_lines};
pub use self::error::{Error, Result};
pub use self::error_file::{record_error, record_failure, record_panics};
use self::events::SignalThread;
pub use self::flags::LaunchArgs;
pub use self::guard::tie_to_parent;
use self::job::Job;
pub use self::logs::{Logs, Streams};
use self::nodes::{Coordinator, coordinator};
pub use self::nodes::{Nodes, RdzvConfig};
pub use self::nproc::nproc_per_node;
pub use self::store::{StoreArgs, serve_store};

/// Exit code of a rank that was interrupted and saved a checkpoint to resume from: `EX_TEMPFAIL` of
/// `sysexits.h`, "try again later".
pub const EXIT_SAVED: u8 = 75;

/// A job to launch: the ranks of this node, and the other nodes.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct LaunchOptions {
    /// Number of ranks on this node.
    pub nproc_per_node: usize,
    /// Arguments of the program.
    pub args: Vec<OsString>,
    /// Program that each rank runs. Default: the current executable.
    pub program: Option<PathBuf>,
    /// Environment variables for the ranks, in addition to inherited ones and torchrun's.
    pub envs: Vec<(OsString, OsString)>,
    /// `TORCHELASTIC_RUN_ID`. Default: `none`, as in torchrun.
    pub run_id: String,
    /// Maximum number of restarts of all ranks after failures. Default: 0.
    pub max_restarts: u32,
    /// `ROLE_NAME`. Default: `default`, as in torchrun.
    pub role: String,
    /// Nodes of the job. Default: only this one.
    pub nodes: Nodes,
    /// Timeouts of the rendezvous with the other nodes.
    pub rdzv: RdzvConfig,
    /// Log files and console output of the ranks.
    pub logs: Logs,
    /// Time after the first failure for the other ranks to report errors. Default: 2 s.
    pub report_time: Duration,
    /// Time between SIGTERM and SIGKILL. Default: 30 s, as in torchrun.
    pub grace: Duration,
    /// Signals that are forwarded to the ranks and end the job. Default: SIGINT, SIGTERM, SIGHUP,
    /// SIGQUIT, and SIGUSR1 and SIGUSR2, which Slurm is usually configured to send before the time
    /// limit.
    pub signals: Vec<i32>,
    /// Name or address at which the other nodes of an elastic job reach the ranks of this node.
    /// Default: the local address of the connection to the control store.
    pub local_addr: Option<String>,
}

impl LaunchOptions {
    /// Returns options that run `nproc_per_node` copies of this program with `args`.
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
            nodes: Nodes::default(),
            rdzv: RdzvConfig::default(),
            logs: Logs::default(),
            report_time: Duration::from_secs(2),
            grace: Duration::from_secs(30),
            signals: vec![SIGINT, SIGTERM, SIGHUP, SIGQUIT, SIGUSR1, SIGUSR2],
            local_addr: None,
        }
    }
}

/// Destination of the ranks' output, written one line at a time.
pub type Sink = Arc<Mutex<dyn Write + Send>>;

/// Locks the sink. A poisoned lock is ignored: the panic can at worst have truncated a line.
fn lock(sink: &Sink) -> MutexGuard<'_, dyn Write + Send + 'static> {
    sink.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Returns a random number that identifies this launcher.
fn random_number() -> u64 {
    RandomState::new().hash_one(std::process::id())
}

/// Runs the job and returns its exit code: 0 if every rank of every node exited with 0; 1 if a node
/// was lost; otherwise that of the first rank killed by a signal (128 plus the signal number), or
/// of the first rank that failed; [`EXIT_SAVED`] if no rank failed but ranks exited with it after
/// an interrupt.
///
/// Call this from the main thread at the end of the program: ranks may be tied to the thread that
/// started them (see [`tie_to_parent`]), and from then on [signals](LaunchOptions::signals) are
/// forwarded to the ranks instead of ending this process. A second SIGINT sends SIGKILL to the
/// ranks.
///
/// # Errors
///
/// [`Error::Options`] if the options are invalid, or contradict those of another node;
/// [`Error::Rendezvous`] if nodes do not join in time, with their names; [`Error::Collective`] if
/// the store cannot be hosted or reached; [`Error::Io`] if a rank cannot be started. No rank is
/// left running after an error.
pub fn launch(options: LaunchOptions) -> Result<i32> {
    launch_to(options, Arc::new(Mutex::new(io::stdout())), Arc::new(Mutex::new(io::stderr())))
}

/// Runs [`launch`] with the ranks' output and the summary of a failure sent to other sinks.
///
/// # Errors
///
/// As [`launch`].
pub fn launch_to(options: LaunchOptions, stdout: Sink, stderr: Sink) -> Result<i32> {
    if options.nproc_per_node == 0 {
        return Err(Error::Options("nproc_per_node is 0, but must be at least 1".to_owned()));
    }
    let (sender, events) = channel();
    let _signals = SignalThread::start(sender.clone(), &options.signals)?;
    let mut coordinator = coordinator(&options)?;
    let mut job = Job::new(options, events, sender, (stdout, stderr))?;
    let code = run(&mut *coordinator, &mut job);
    job.finish_output();
    code
}

/// Runs attempts until the job has ended, and returns its exit code.
fn run(coordinator: &mut dyn Coordinator, job: &mut Job) -> Result<i32> {
    loop {
        let assignment = match coordinator.next(&mut job.queue)? {
            ControlFlow::Continue(assignment) => assignment,
            // A signal arrived, or the job ended, before this node took part.
            ControlFlow::Break(code) => {
                return Ok(job.queue.signal.map_or(code, |signal| 128 + signal));
            }
        };
        job.begin(assignment);
        let watch = coordinator.watch(job)?;
        let ran = job.run(coordinator);
        let agreed = coordinator.agree(job);
        let summary = ran.and(agreed)?;
        drop(watch);
        job.queue.print(&summary.to_string());
        if !summary.starts_again {
            return Ok(summary.code);
        }
        job.queue.print(&match summary.is_restart {
            true => {
                let (restarts, max) = (coordinator.restarts(), job.options.max_restarts);
                format!("launch: restarting all ranks (restart {restarts} of {max})\n")
            }
            false => "launch: restarting all ranks because nodes joined or left\n".to_owned(),
        });
    }
}
