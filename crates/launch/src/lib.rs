//! Starts the ranks of a distributed job, as torchrun does, for any program in any language.
//!
//! The launcher hosts the store at which the ranks meet (a new one for every attempt, so that no rank reads a
//! key of an earlier attempt), starts each rank in a process group of its own with torchrun's environment, and
//! writes `[rank 0] ` before each line that a rank prints. When a rank fails, the others get a short time to
//! report what they see (their collectives fail, too, and name the rank), then SIGTERM, then, after a grace
//! period, SIGKILL. If restarts are left, all ranks start again. The exit code is that of the likely cause: a
//! rank ended by a signal, or else the earliest failure by the ranks' error files (`error_file`) or exits. If the
//! launcher itself is killed, a guard process (`guard`) kills the ranks and their children and removes the
//! temporary files.
//!
//! A rank that exits with [`EXIT_SAVED`] was interrupted, by a signal or because its time was over, and saved a
//! checkpoint. This is no failure, so there is no restart, unless it saved because this launcher stopped it after a
//! failure. The other ranks have the grace period to save, too, and get no signal meanwhile: a second signal would end
//! them before they have saved.
//!
//! On several nodes each node has a launcher, and the launchers meet at a control store ([`Nodes`]): a fixed
//! number of nodes with given ranks (`nodes::fixed`, which torchrun's agents can join), or as many nodes as come
//! (`nodes::elastic`). A failure on one node ends the attempt on all nodes, and all return its exit code.
//!
//! Where to look next: `flags` is the command line, `job` the ranks of this node, `nodes` the other nodes,
//! `summary` the report of failures.

#[cfg(not(target_os = "linux"))]
compile_error!("`launch` needs Linux: ranks end with their parent by `prctl`");

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

/// Exit code of a rank that a signal interrupted after it saved a checkpoint to resume from: sysexits'
/// `EX_TEMPFAIL`, try again.
pub const EXIT_SAVED: u8 = 75;

/// A job to launch, as this node sees it.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct LaunchOptions {
    /// Number of ranks on this node.
    pub nproc_per_node: usize,
    /// Arguments of each rank's program.
    pub args: Vec<OsString>,
    /// Program of each rank. Default: this program.
    pub program: Option<PathBuf>,
    /// Environment variables of the ranks in addition to inherited ones and torchrun's.
    pub envs: Vec<(OsString, OsString)>,
    /// `TORCHELASTIC_RUN_ID`. Default: `none`, as in torchrun.
    pub run_id: String,
    /// Number of times that all ranks are restarted after a failure. Default: 0.
    pub max_restarts: u32,
    /// `ROLE_NAME`. Default: `default`, as in torchrun.
    pub role: String,
    /// Nodes of the job. Default: this one alone.
    pub nodes: Nodes,
    /// Timeouts for the other nodes.
    pub rdzv: RdzvConfig,
    /// Log files that the ranks' output goes to.
    pub logs: Logs,
    /// After the first failure, time for the other ranks to report what they see. Default: 2 s.
    pub report_time: Duration,
    /// Time between SIGTERM and SIGKILL. Default: 30 s, as in torchrun.
    pub grace: Duration,
    /// Signals that are forwarded to the ranks to end them. Default: SIGINT, SIGTERM, SIGHUP, SIGQUIT, and SIGUSR1 and
    /// SIGUSR2, which Slurm is usually told to send before the time is over.
    pub signals: Vec<i32>,
    /// Name or address of this node by which the other nodes of an elastic job reach its ranks. Default: its address on
    /// the route to the control store.
    pub local_addr: Option<String>,
}

impl LaunchOptions {
    /// Returns the options of `nproc_per_node` copies of this program with `args`.
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

/// Where the ranks' output goes, line by line.
pub type Sink = Arc<Mutex<dyn Write + Send>>;

/// A panic of another thread while it wrote leaves a line cut short, nothing worse.
fn lock(sink: &Sink) -> MutexGuard<'_, dyn Write + Send + 'static> {
    sink.lock().unwrap_or_else(PoisonError::into_inner)
}

/// A random number, for names that no other launcher has.
fn random_number() -> u64 {
    RandomState::new().hash_one(std::process::id())
}

/// Launches, waits, and returns the exit code: 0 if every rank of every node exited with 0; else 1 if a node was
/// lost; else that of the first rank that a signal ended, 128 and the signal's number, or of the first that failed;
/// [`EXIT_SAVED`] if none failed, but ranks ended with it, since a signal interrupted them and they have saved.
///
/// Call it from the main thread, as the last thing a program does: the ranks may be tied to the
/// thread that started them (see [`tie_to_parent`]), and [signals](LaunchOptions::signals) are forwarded to the
/// ranks from then on instead of ending this process. A second SIGINT kills.
///
/// # Errors
///
/// [`Error::Options`] without ranks, or if the nodes contradict one another; [`Error::Rendezvous`] if a
/// node does not come in time, which names it; [`Error::Collective`] if the store cannot be hosted or reached;
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
        return Err(Error::Options("nproc_per_node is 0: there is nothing to launch".to_owned()));
    }
    let (sender, events) = channel();
    let _signals = SignalThread::start(sender.clone(), &options.signals)?;
    let mut coordinator = coordinator(&options)?;
    let mut job = Job::new(options, events, sender, (stdout, stderr))?;
    let code = run(&mut *coordinator, &mut job);
    job.finish_output();
    code
}

/// Runs attempts until one ends the job, and returns its exit code.
fn run(coordinator: &mut dyn Coordinator, job: &mut Job) -> Result<i32> {
    loop {
        let assignment = match coordinator.next(&mut job.queue)? {
            ControlFlow::Continue(assignment) => assignment,
            // Told to stop, or the job ended, before this node had a part in it.
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
                format!("launch: all ranks start again (restart {restarts} of {max})\n")
            }
            false => "launch: all ranks start again with the nodes that there are\n".to_owned(),
        });
    }
}
