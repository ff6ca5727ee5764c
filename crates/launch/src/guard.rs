//! Ranks that end with their launcher, even if it is killed with SIGKILL.
//!
//! Two ways, since each has a gap. The kernel kills a rank that has asked for it ([`tie_to_parent`])
//! at once, but not what the rank has started. A [`Guard`] is a process of its own that reads the
//! ranks' process groups from a pipe; when the pipe ends, the launcher has, and it kills the groups,
//! whatever program they are and whatever they have started. Only what left its group escapes.

use std::fmt::Display;
use std::io::{self, Write};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdin, Command, Stdio};

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
    let tied = set_parent_process_death_signal(Some(Signal::KILL)).and_then(|()| {
        // The launcher may have ended before that call, which then is tied to another process.
        if getppid() == Some(launcher) { Ok(()) } else { test_kill_process(launcher) }
    });
    let what = || format!("tie this rank to its launcher (pid {launcher:?})");
    tied.map_err(|errno| Error::io(what())(errno.into()))
}

/// Kills the groups it was told when this process ends in any way, and removes the temporary folder; gone on
/// drop. A guard that was itself killed is replaced when the next group comes, and missed by nobody else.
pub(super) struct Guard {
    folder: Option<PathBuf>,
    shell: Child,
    /// `None` only while it is dropped.
    pipe: Option<ChildStdin>,
    groups: Vec<Pid>,
}

impl Guard {
    /// With the folder that goes with this process, if there is one.
    pub(super) fn start(folder: Option<PathBuf>) -> Result<Self> {
        let (shell, pipe) = spawn(folder.as_deref())?;
        Ok(Self { folder, shell, pipe, groups: Vec::new() })
    }

    /// Adds the group of a rank, before the rank is in it.
    pub(super) fn watch(&mut self, group: Pid) -> Result<()> {
        self.groups.push(group);
        if self.tell(group.as_raw_nonzero()).is_ok() {
            return Ok(());
        }
        (self.shell, self.pipe) = spawn(self.folder.as_deref())?;
        let told = self.groups.iter().try_for_each(|group| self.tell(group.as_raw_nonzero()));
        told.map_err(Error::io("speak to the ranks' guard"))
    }

    /// Forgets all groups: they are gone, and their numbers may become others'.
    pub(super) fn forget(&mut self) {
        self.groups.clear();
        // A guard that was killed kills nobody.
        drop(self.tell("none"));
    }

    fn tell(&self, line: impl Display) -> io::Result<()> {
        self.pipe.as_ref().map_or(Ok(()), |mut pipe| writeln!(pipe, "{line}"))
    }
}

/// Starts the guard's process.
fn spawn(folder: Option<&Path>) -> Result<(Child, Option<ChildStdin>)> {
    let mut shell = Command::new("/bin/sh")
        .args(["-c", SCRIPT, "runner-launch-guard"])
        .args(folder)
        .stdin(Stdio::piped())
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        // What a terminal or a job's end sends to our group must not take it first.
        .process_group(0)
        .spawn()
        .map_err(Error::io("start the ranks' guard"))?;
    let pipe = shell.stdin.take();
    Ok((shell, pipe))
}

impl Drop for Guard {
    /// Ends the guard by closing its pipe: groups that were not forgotten are killed. The folder goes even
    /// if the guard was killed.
    fn drop(&mut self) {
        self.pipe = None;
        drop(self.shell.wait());
        if let Some(folder) = &self.folder {
            drop(std::fs::remove_dir_all(folder));
        }
    }
}

/// One group a line, or `none`. At the end, kills those it has, and removes the folder if it was given one.
const SCRIPT: &str = r#"
trap '' TERM INT HUP QUIT USR1 USR2
groups=
while read -r line; do
  case $line in none) groups= ;; *) groups="$groups -$line" ;; esac
done
[ -z "$groups" ] || kill -s KILL -- $groups
[ -z "$1" ] || rm -rf -- "$1"
"#;
