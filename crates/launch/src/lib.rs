//! Starts the ranks of a distributed job, as torchrun does, for any program in any language.
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
//! A rank that exits with [`EXIT_SAVED`] was interrupted by a signal
//! and has saved. That is no failure, so there is no restart; and the others, which do the same, have as
//! long for it as between SIGTERM and SIGKILL, and hear no signal meanwhile: a second one would make
//! them drop what they are saving.
//!
//! On several nodes each has a launcher, and the launchers meet at a store ([`Nodes`]): with ranks that
//! are given (`nodes::fixed`, which torchrun's agents can join) or with as many nodes as come
//! (`nodes::elastic`). A failure on one node ends the attempt on all, and all give its code.
//!
//! Where to look: `flags` is the command line, `job` the ranks of this node, `nodes` the other nodes,
//! `summary` what is said of failures.

mod env;
mod error;
mod error_file;
mod flags;
mod guard;
mod job;
mod logs;
mod nodes;
mod nproc;
mod output;
mod signals;
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

pub use self::env::{is_elastic, label};
pub use self::error::{Error, Result};
pub use self::error_file::{record_error, record_failure, record_panics};
pub use self::flags::LaunchArgs;
pub use self::guard::tie_to_parent;
use self::job::Job;
pub use self::logs::{Logs, Streams};
use self::nodes::Team;
pub use self::nodes::{Nodes, Patience};
pub use self::nproc::nproc_per_node;
use self::signals::SignalThread;
pub use self::store::{StoreArgs, serve};

/// Exit code of a rank that a signal interrupted after it saved a checkpoint to resume from: sysexits'
/// `EX_TEMPFAIL`, try again.
pub const EXIT_SAVED: u8 = 75;

/// What to launch, and how patiently.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct LaunchOptions {
    /// Number of ranks on this node.
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
    /// The nodes of the job; this one only unless set.
    pub nodes: Nodes,
    /// How long other nodes are waited for.
    pub patience: Patience,
    /// Where the ranks' output goes besides, or instead of, the sinks.
    pub logs: Logs,
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
            nodes: Nodes::default(),
            patience: Patience::default(),
            logs: Logs::default(),
            report_time: Duration::from_secs(2),
            grace: Duration::from_secs(30),
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

/// Launches, waits, and returns the exit code: 0 if every rank of every node exited with 0; else that
/// of the first rank that a signal ended, 128 and the signal's number, or of the first that failed;
/// [`EXIT_SAVED`] if none failed, but ranks ended with it, since a
/// signal interrupted them and they have saved.
///
/// Call it from the main thread, as the last thing a program does: the ranks may be tied to the
/// thread that started them (see [`tie_to_parent`]), and SIGINT, SIGTERM, SIGHUP, SIGQUIT and SIGUSR1
/// are forwarded to the ranks from then on instead of ending this process. A second SIGINT kills.
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
    let signals = SignalThread::start(sender.clone())?;
    let mut team = Team::new(&options)?;
    let mut job = Job::new(options, events, sender, (stdout, stderr))?;
    let code = loop {
        let place = match team.next(&mut job.ear)? {
            ControlFlow::Continue(place) => place,
            // Told to stop, or the job ended, before this node had a part in it.
            ControlFlow::Break(code) => break job.ear.signal.map_or(code, |signal| 128 + signal),
        };
        job.begin(place);
        let watch = team.watch(&job)?;
        job.run(&team).inspect_err(|_| team.give_up())?;
        let verdict = team.settle(&mut job)?;
        drop(watch);
        job.ear.say(&verdict.to_string());
        if !verdict.again {
            break verdict.code;
        }
        job.ear.say(&match verdict.counted {
            true => {
                let (restarts, max) = (team.restarts(), job.options.max_restarts);
                format!("launch: all ranks start again (restart {restarts} of {max})\n")
            }
            false => "launch: all ranks start again with the nodes that there are\n".to_owned(),
        });
    };
    drop(signals);
    Ok(code)
}
