//! Starts the ranks of a distributed job, as torchrun does, for any program in any language.
//!
//! The launcher hosts the ranks' rendezvous store (a new one for each attempt, so that no rank
//! reads a key of an earlier attempt), starts each rank in its own process group with torchrun's
//! environment variables, and prefixes each line of a rank's output with `[rank 0] `. When a rank
//! fails, the others get a short time to report what they see (their collectives fail, too, and
//! name the rank), then SIGTERM, then, after a grace period, SIGKILL. If restarts are left, all
//! ranks are restarted. The exit code is that of the likely root cause: a rank killed by a signal,
//! otherwise the earliest failure that no peer has caused, according to the ranks' error files
//! (`rank::error_file`) or exits. If the launcher itself is killed, a guard process (`job::guard`)
//! kills the ranks and their descendants and removes the temporary files.
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
//! # Events
//!
//! A program that calls [`launch`](fn@launch) can watch the ranks with a subscriber of
//! [`tracing`](https://docs.rs/tracing). Nothing is formatted without one. The target is `launch`.
//!
//! * `attempt_started { attempt, restart, node, nodes, world_size }`: the nodes have joined.
//! * `rank_started { rank, local_rank, pid }`: a rank of this node was started.
//! * `rank_replaced { rank, local_rank, pid, attempt, restart }`: the same in a later attempt.
//! * `rank_ended { rank, local_rank, pid }`: it exited with 0.
//! * `rank_saved { rank, local_rank, pid }`: it exited with [`EXIT_SAVED`].
//! * `rank_died { rank, local_rank, pid, code, signal }`, a warning: it failed or was stopped.
//! * `attempt_ended { attempt, code, ranks, failed, saved, starts_again }`: the nodes agree on the
//!   result.
//!
//! # Folders
//!
//! Folders, each importing only from those before it: `rank` is called by the program of a rank,
//! `output` copies the ranks' output, `job` supervises the ranks of this node, `nodes` coordinates
//! with the other nodes, `cli` is the command line.

#[cfg(not(target_os = "linux"))]
compile_error!("`launch` needs Linux: `prctl` kills the ranks with their launcher");

mod address;
mod cli;
mod error;
mod job;
mod nodes;
mod options;
mod output;
mod rank;

use std::io;
use std::ops::ControlFlow;
use std::sync::mpsc::channel;
use std::sync::{Arc, Mutex};

use tracing::info;

pub use self::cli::{LaunchArgs, StoreArgs, nproc_per_node, serve_store};
pub use self::error::{Error, Result};
use self::job::{Job, SignalThread};
use self::nodes::{Coordinator, coordinator};
pub use self::options::{LaunchOptions, Logs, Nodes, RdzvConfig, Streams};
pub use self::output::Sink;
pub use self::rank::{
    EXIT_SAVED, is_elastic, is_signal_ignored, label_lines, record_error, record_failure,
    record_panics, tie_to_parent,
};

/// Tests the examples of the README.
#[cfg(doctest)]
#[doc = include_str!("../README.md")]
struct Readme;

/// Runs the job and returns its exit code: 0 if every rank of every node exited with 0; 1 if a node
/// was lost; otherwise that of the first rank killed by a signal (128 plus the signal number), or
/// of the first rank that failed by itself; [`EXIT_SAVED`] if no rank failed but ranks exited with
/// it after an interrupt.
///
/// Call this from the main thread at the end of the program: ranks may be tied to the thread that
/// started them (see [`tie_to_parent`]), and from then on [signals](LaunchOptions::signals) are
/// forwarded to the ranks instead of ending this process. A second SIGINT sends SIGKILL to the
/// ranks, unless it comes within 50 ms, as from `timeout`. Until it returns, this process is a
/// child subreaper (`prctl(2)`): it adopts the ranks' descendants whose parent has ended, and reaps
/// those that it has seen running, or [all](LaunchOptions::reap_all). Those that still run when it
/// returns stay children of this process.
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
        return Err(Error::options(
            "--nproc-per-node",
            "nproc_per_node is 0, but must be at least 1",
        ));
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
        info!(
            name: "attempt_started", target: "launch",
            attempt = assignment.round, restart = assignment.restart_count, node = assignment.node,
            nodes = assignment.nodes, world_size = assignment.world_size, "an attempt begins",
        );
        job.begin(assignment);
        let watch = coordinator.watch(job)?;
        let ran = job.run(&|end| coordinator.announce(end));
        let agreed = coordinator.agree(job);
        let summary = ran.and(agreed)?;
        drop(watch);
        summary.report(job.queue.attempt);
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
