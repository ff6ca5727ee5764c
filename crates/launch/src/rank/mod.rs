//! Functions that the program of a rank calls, and the environment variables they read.

pub(crate) mod error_file;

use std::borrow::Cow;
use std::sync::OnceLock;

use collective::Topology;
use rustix::process::{Pid, Signal, getppid, set_parent_process_death_signal, test_kill_process};

pub use self::error_file::{record_error, record_failure, record_panics};
use crate::{Error, Result};

/// Exit code of a rank that was interrupted and saved a checkpoint to resume from: `EX_TEMPFAIL` of
/// `sysexits.h`, "try again later".
pub const EXIT_SAVED: u8 = 75;

/// Environment variable of each rank with the launcher's process id.
pub(crate) const LAUNCHER_PID: &str = "LAUNCH_PID";

/// Environment variable of each rank with the random id of its job, after those of the jobs whose
/// ranks run the launcher, with `/` between them.
pub(crate) const JOBS: &str = "LAUNCH_ID";

/// Environment variable that is set for ranks of an elastic job, whose world size may change at a
/// restart.
pub(crate) const ELASTIC: &str = "LAUNCH_ELASTIC";

/// Makes the kernel kill this process when its launcher ends. A rank calls this first; without a
/// launcher of this crate it does nothing.
///
/// Child processes of the rank are not covered. If a wrapper script runs between launcher and rank,
/// the rank is tied to the script.
///
/// # Errors
///
/// [`Error::Io`] if the launcher has already ended; the rank should exit then.
pub fn tie_to_parent() -> Result<()> {
    let launcher = std::env::var(LAUNCHER_PID).ok();
    let Some(launcher) = launcher.and_then(|pid| Pid::from_raw(pid.parse().ok()?)) else {
        return Ok(());
    };
    let tied = set_parent_process_death_signal(Some(Signal::KILL)).and_then(|()| {
        // If the launcher ended before that call, this process is tied to another parent.
        if getppid() == Some(launcher) { Ok(()) } else { test_kill_process(launcher) }
    });
    let what = || format!("tie this rank to its launcher (pid {})", launcher.as_raw_nonzero());
    tied.map_err(|errno| Error::io(what())(errno.into()))
}

/// Returns whether this process is a rank of an elastic job.
pub fn is_elastic() -> bool {
    std::env::var_os(ELASTIC).is_some()
}

/// Returns `text` with the prefix `[rank 1] ` on each line if this process is one of several ranks.
/// Under a launcher of this crate, which adds the prefix itself, `text` is unchanged.
pub fn label_lines(text: &str) -> Cow<'_, str> {
    static RANK: OnceLock<Option<usize>> = OnceLock::new();
    let rank = RANK.get_or_init(|| rank_to_label(|name| std::env::var(name).ok()));
    rank.map_or(Cow::Borrowed(text), |rank| {
        text.split_inclusive('\n').map(|line| format!("[rank {rank}] {line}")).collect()
    })
}

/// Returns whether this process ignores a signal, such as SIGHUP if it was started by `nohup`. A
/// program that handles signals leaves such a one ignored.
pub fn is_signal_ignored(signal: i32) -> bool {
    is_ignored("self", signal)
}

/// Returns whether a process, a pid or `self`, ignores a signal.
pub(crate) fn is_ignored(process: &str, signal: i32) -> bool {
    // The name of the program in it may be cut within a character.
    let status = std::fs::read(format!("/proc/{process}/status")).unwrap_or_default();
    let status = String::from_utf8_lossy(&status);
    let mask = status.lines().find_map(|line| line.strip_prefix("SigIgn:"));
    let mask = mask.and_then(|mask| u64::from_str_radix(mask.trim(), 16).ok());
    mask.is_some_and(|mask| mask >> (signal - 1) & 1 == 1)
}

fn rank_to_label(lookup: impl Fn(&str) -> Option<String>) -> Option<usize> {
    let by_launcher = lookup(LAUNCHER_PID).is_some();
    let topology = Topology::from_env(lookup).ok()?;
    (topology.world_size > 1 && !by_launcher).then_some(topology.rank)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_are_labelled_only_with_several_ranks() {
        let rank = |text: &str| {
            let find = |name: &str| {
                let mut envs = text.split(' ').filter_map(|env| env.split_once('='));
                envs.find(|env| env.0 == name).map(|env| env.1.to_owned())
            };
            rank_to_label(find)
        };
        let mpi = "OMPI_COMM_WORLD_RANK=3 OMPI_COMM_WORLD_SIZE=4 OMPI_COMM_WORLD_LOCAL_RANK=1 \
                   OMPI_COMM_WORLD_LOCAL_SIZE=2 MASTER_ADDR=127.0.0.1 MASTER_PORT=29500";
        let torchrun = "RANK=1 WORLD_SIZE=2 LOCAL_RANK=1 LOCAL_WORLD_SIZE=2 \
                        MASTER_ADDR=127.0.0.1 MASTER_PORT=29500";
        assert_eq!((rank(mpi), rank(torchrun)), (Some(3), Some(1)));
        let alone = mpi.replace("RANK=3", "RANK=0").replace("WORLD_SIZE=4", "WORLD_SIZE=1");
        assert_eq!((rank(&alone), rank("")), (None, None));
        assert_eq!(rank(&format!("{torchrun} {LAUNCHER_PID}=7")), None);
    }

    #[test]
    fn ignored_signals_are_known_if_the_programs_name_is_cut_within_a_letter() {
        let name = std::fs::read("/proc/self/comm").unwrap();
        std::fs::write("/proc/self/comm", b"1234567890\xd0\xbe\xd0").unwrap();
        // The standard library ignores SIGPIPE.
        let ignored = is_signal_ignored(signal_hook::consts::SIGPIPE);
        std::fs::write("/proc/self/comm", name).unwrap();
        assert!(ignored);
    }
}
