//! Kills the ranks when the launcher ends, even if it was killed with SIGKILL.
//!
//! Two mechanisms cover each other's gaps. [`tie_to_parent`](crate::tie_to_parent) makes the kernel
//! kill a rank at once, but not the rank's children, and the rank has to call it. A [`Guard`] is a
//! separate process that reads the ranks' process groups from a pipe; at end of file the launcher
//! has ended, and the guard kills the groups, whichever programs run in them. Only a process that
//! left its group escapes.

use std::fmt::Display;
use std::io::{self, Write};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdin, Command, Stdio};

use rustix::process::Pid;

use crate::{Error, Result};

/// A process that kills the ranks' process groups when this process ends in any way, and removes
/// the temporary directory. Dropping the guard ends it. A guard that was killed is replaced when
/// the next group is added.
pub(super) struct Guard {
    run_dir: Option<PathBuf>,
    shell: Child,
    /// `None` only during drop.
    pipe: Option<ChildStdin>,
    groups: Vec<Pid>,
}

impl Guard {
    /// Starts a guard that removes `run_dir` at its end.
    pub(super) fn start(run_dir: Option<PathBuf>) -> Result<Self> {
        let (shell, pipe) = spawn(run_dir.as_deref())?;
        Ok(Self { run_dir, shell, pipe, groups: Vec::new() })
    }

    /// Adds a process group, before the rank joins it.
    pub(super) fn watch(&mut self, group: Pid) -> Result<()> {
        self.groups.push(group);
        if self.write_line(group.as_raw_nonzero()).is_ok() {
            return Ok(());
        }
        (self.shell, self.pipe) = spawn(self.run_dir.as_deref())?;
        let notified =
            self.groups.iter().try_for_each(|group| self.write_line(group.as_raw_nonzero()));
        notified.map_err(Error::io("write to the guard process"))
    }

    /// Removes all groups: they have ended, and their ids may be reused.
    pub(super) fn forget(&mut self) {
        self.groups.clear();
        // A guard that was killed has no groups to remove.
        drop(self.write_line("none"));
    }

    fn write_line(&self, line: impl Display) -> io::Result<()> {
        self.pipe.as_ref().map_or(Ok(()), |mut pipe| writeln!(pipe, "{line}"))
    }
}

/// Starts the guard's process.
fn spawn(run_dir: Option<&Path>) -> Result<(Child, Option<ChildStdin>)> {
    let mut shell = Command::new("/bin/sh")
        .args(["-c", SCRIPT, "runner-launch-guard"])
        .args(run_dir)
        .stdin(Stdio::piped())
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        // In its own group, so that signals to the launcher's group, for example by a terminal, do
        // not end the guard first.
        .process_group(0)
        .spawn()
        .map_err(Error::io("start the guard process"))?;
    let pipe = shell.stdin.take();
    Ok((shell, pipe))
}

impl Drop for Guard {
    /// Ends the guard by closing its pipe; it kills the groups it still has. The directory is
    /// removed even if the guard was killed.
    fn drop(&mut self) {
        self.pipe = None;
        drop(self.shell.wait());
        if let Some(run_dir) = &self.run_dir {
            drop(std::fs::remove_dir_all(run_dir));
        }
    }
}

/// Reads one group per line, or `none` to remove all. At end of file, kills the groups and removes
/// the directory.
const SCRIPT: &str = r#"
trap '' TERM INT HUP QUIT USR1 USR2
groups=
while read -r line; do
  case $line in none) groups= ;; *) groups="$groups -$line" ;; esac
done
[ -z "$groups" ] || kill -s KILL -- $groups
[ -z "$1" ] || rm -rf -- "$1"
"#;
