//! Ranks that end with their launcher, even if it is killed with SIGKILL.

use std::io;

use rustix::process::{Pid, Signal, getppid, set_parent_process_death_signal, test_kill_process};

use crate::{Error, Result};

/// The launcher's process id, in each rank's environment.
pub(super) const LAUNCHER_PID: &str = "RUNNER_LAUNCHER_PID";

/// Makes the kernel kill this process when its parent ends. A rank calls it first thing; outside
/// of `runner launch` it does nothing.
///
/// It does not reach processes that this one starts. Where a wrapper script stands between
/// launcher and rank, the rank is tied to the script.
///
/// # Errors
///
/// [`Error::Io`] if the launcher has already ended: the rank should exit.
pub fn tie_to_parent() -> Result<()> {
    let launcher = std::env::var(LAUNCHER_PID).ok();
    let Some(launcher) = launcher.and_then(|pid| Pid::from_raw(pid.parse().ok()?)) else {
        return Ok(());
    };
    let failed = |source: io::Error| {
        let what = format!("tie this rank to its launcher (pid {launcher:?})");
        Error::Io { what, source }
    };
    set_parent_process_death_signal(Some(Signal::KILL)).map_err(|errno| failed(errno.into()))?;
    // The launcher may have ended before the call above, which then is tied to somebody else.
    if getppid() != Some(launcher) {
        test_kill_process(launcher).map_err(|errno| failed(errno.into()))?;
    }
    Ok(())
}
