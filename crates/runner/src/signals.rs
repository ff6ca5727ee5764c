//! Signals on which a run saves a checkpoint and ends: SIGINT, SIGTERM, SIGHUP, SIGUSR1, SIGUSR2,
//! SIGXCPU.
//!
//! Terminals and schedulers send these before they kill: SIGTERM; SIGUSR1 or SIGUSR2, if Slurm,
//! Grid Engine, LSF or submitit is configured so; SIGXCPU at a limit of processor time; SIGHUP when
//! a terminal or connection closes (not under `nohup`).
//!
//! The handler records the signal; between two batches the ranks agree on it, save a checkpoint,
//! and exit with [`EXIT_CODE`], or with 128 + the signal's number if no checkpoint was saved. A
//! second SIGINT or SIGTERM ends this process at once with 128 + the signal's number; the other
//! signals do not, because schedulers repeat them. Under a launcher the second signal must arrive
//! at least a second after the first: a scheduler signals every process of a job, and the launcher
//! among them forwards the signal again.

use std::sync::Arc;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::Duration;

use collective::{Topology, init::Launcher};
use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM, SIGUSR1, SIGUSR2, SIGXCPU};
use signal_hook::flag;
use signal_hook::iterator::Signals;

use crate::{Error, Result};

/// Exit code of a run that ended by a signal, or by its time budget, after saving a checkpoint:
/// sysexits' `EX_TEMPFAIL` (try again). Without a checkpoint it is 128 + the signal's number, or
/// [`EXIT_TIMEOUT`].
pub const EXIT_CODE: u8 = launch::EXIT_SAVED;

/// Exit code of a run that ended by its time budget without a checkpoint: that of `timeout`.
pub const EXIT_TIMEOUT: u8 = 124;

/// Number of the signal received; unset until [`catch`] is called.
static NOTED: OnceLock<Arc<AtomicUsize>> = OnceLock::new();

/// Installs the signal handlers: from now on signals are recorded instead of ending this process,
/// and [`Runner`](crate::Runner) checks for them. Either every rank of a run calls it or none,
/// because ranks agree on the signals received.
///
/// # Errors
///
/// [`Error::Io`] if a handler cannot be installed.
pub fn catch() -> Result<()> {
    if are_caught() {
        return Ok(());
    }
    let noted: Arc<AtomicUsize> = Arc::default();
    let fail = |source| Error::Io { what: "cannot catch signals".into(), source };
    let ends = Arc::new(AtomicBool::new(false));
    for signal in ENDS {
        flag::register_conditional_shutdown(signal, 128 + signal, Arc::clone(&ends))
            .map_err(fail)?;
    }
    // Under `nohup` a run continues when its terminal closes.
    let hangup = (!launch::is_signal_ignored(SIGHUP)).then_some(SIGHUP);
    for signal in ENDS.into_iter().chain([SIGUSR1, SIGUSR2, SIGXCPU]).chain(hangup) {
        let number = usize::try_from(signal).unwrap_or(0);
        flag::register_usize(signal, Arc::clone(&noted), number).map_err(fail)?;
    }
    let mut first = Signals::new(ENDS).map_err(fail)?;
    let once = once();
    // On a thread of its own, because the other threads may be waiting for ranks that no longer
    // answer.
    let arm = move || {
        if first.forever().next().is_some() {
            std::thread::sleep(once);
            // Relaxed: nothing else is published with it.
            ends.store(true, Ordering::Relaxed);
        }
    };
    std::thread::Builder::new().name("signals".into()).spawn(arm).map_err(fail)?;
    let _ = NOTED.set(noted);
    Ok(())
}

/// Signals that end the process at once when repeated.
const ENDS: [i32; 2] = [SIGINT, SIGTERM];

/// Returns whether [`catch`] was called.
pub(crate) fn are_caught() -> bool {
    NOTED.get().is_some()
}

/// Returns the number of the signal received, 0 for none.
pub(crate) fn pending() -> u8 {
    // Relaxed: nothing else is published with it.
    let which = NOTED.get().map_or(0, |noted| noted.load(Ordering::Relaxed));
    u8::try_from(which).unwrap_or(0)
}

/// Time after the first signal in which another one may be a copy: sent by a launcher, or without
/// one, by a program like `timeout`, which signals a process and then its group.
fn once() -> Duration {
    let topology = Topology::from_env(|name| std::env::var(name).ok());
    let alone = topology.is_ok_and(|topology| topology.launcher == Launcher::None);
    Duration::from_millis(if alone { 50 } else { 1000 })
}
