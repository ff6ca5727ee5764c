//! Signals that ask a run to save and end: SIGINT, SIGTERM, SIGHUP, SIGUSR1, SIGUSR2, SIGXCPU.
//!
//! These are what terminals and schedulers send before they kill: SIGTERM; SIGUSR1 or SIGUSR2, if Slurm, Grid Engine,
//! LSF or submitit is told to; SIGXCPU at a limit of processor time; SIGHUP when a terminal or connection closes (not
//! under `nohup`).
//!
//! One is noted; the ranks agree on it between two batches, save, and end with
//! [`EXIT_CODE`], or with 128 and the signal's number if nothing was saved that a run can be resumed
//! from. A second SIGINT or SIGTERM ends this process at once, with 128 and the signal's number; the others do not,
//! since schedulers repeat them. Under a
//! launcher it must come a second after the first, for a scheduler signals every process of a job, and the
//! launcher among them forwards what it gets.

use std::sync::Arc;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::Duration;

use collective::{Topology, init::Launcher};
use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM, SIGUSR1, SIGUSR2, SIGXCPU};
use signal_hook::flag;
use signal_hook::iterator::Signals;

use crate::{Error, Result};

/// Exit code of a run that a signal, or its time budget, ended after a checkpoint that it can be resumed from:
/// sysexits' `EX_TEMPFAIL`, try again. Without such a checkpoint it is 128 and the signal's number, or
/// [`EXIT_TIMEOUT`].
pub const EXIT_CODE: u8 = launch::EXIT_SAVED;

/// Exit code of a run that its time budget ended without a checkpoint that it can be resumed from: that of `timeout`.
pub const EXIT_TIMEOUT: u8 = 124;

/// Number of the signal noted, once they are caught.
static NOTED: OnceLock<Arc<AtomicUsize>> = OnceLock::new();

/// From now on the signals are noted, instead of ending this process, and the [`Runner`](crate::Runner)
/// looks for them. Every rank of a run does it, or none: the ranks agree on what they have noted.
///
/// # Errors
///
/// [`Error::Io`] if the system refuses.
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
    // Under `nohup` the run goes on when its terminal closes.
    let hangup = (!is_ignored(SIGHUP)).then_some(SIGHUP);
    for signal in ENDS.into_iter().chain([SIGUSR1, SIGUSR2, SIGXCPU]).chain(hangup) {
        let number = usize::try_from(signal).unwrap_or(0);
        flag::register_usize(signal, Arc::clone(&noted), number).map_err(fail)?;
    }
    let mut first = Signals::new(ENDS).map_err(fail)?;
    let once = once();
    // A thread, because the others may wait for ranks that no longer answer.
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

/// Those that end the process at once when they come again.
const ENDS: [i32; 2] = [SIGINT, SIGTERM];

/// Whether this process was started with a signal ignored.
fn is_ignored(signal: i32) -> bool {
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    let mask = status.lines().find_map(|line| line.strip_prefix("SigIgn:"));
    let mask = mask.and_then(|mask| u64::from_str_radix(mask.trim(), 16).ok());
    mask.is_some_and(|mask| mask >> (signal - 1) & 1 == 1)
}

/// Whether [`catch`] was called.
pub(crate) fn are_caught() -> bool {
    NOTED.get().is_some()
}

/// Number of the signal noted, 0 for none.
pub(crate) fn pending() -> u8 {
    // Relaxed: nothing else is published with it.
    let which = NOTED.get().map_or(0, |noted| noted.load(Ordering::Relaxed));
    u8::try_from(which).unwrap_or(0)
}

/// So long after the first signal a further one may be the same once more: a launcher's, or, without one,
/// that of a program like `timeout`, which signals a process and then its group.
fn once() -> Duration {
    let topology = Topology::from_env(|name| std::env::var(name).ok());
    let alone = topology.is_ok_and(|topology| topology.launcher == Launcher::None);
    Duration::from_millis(if alone { 50 } else { 1000 })
}
