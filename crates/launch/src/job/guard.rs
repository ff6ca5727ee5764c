//! Kills the ranks when the launcher ends, even if it was killed with SIGKILL.
//!
//! Two mechanisms cover each other's gaps. [`tie_to_parent`](crate::tie_to_parent) makes the kernel
//! kill a rank at once, but not the rank's children, and the rank has to call it. A [`Guard`] is a
//! separate process that reads the ranks' process groups and pids from a pipe; at end of file the
//! launcher has ended, and the guard kills them, whichever programs run in them, and then each
//! process with the job's id in its environment, in whichever group or session.

use std::fmt::{self, Display, Formatter};
use std::io::{self, Write};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdin, Command, Stdio};

use rustix::process::Pid;

use super::process;
use crate::rank::JOBS;
use crate::{Error, Result};

/// A process that kills the ranks and their descendants when this process ends in any way, and
/// removes the temporary directory. Dropping the guard ends it. A guard that was killed is replaced
/// when the next target is added.
pub(super) struct Guard {
    job: String,
    run_dir: Option<PathBuf>,
    shell: Child,
    /// `None` only during drop.
    pipe: Option<ChildStdin>,
    targets: Vec<Target>,
}

/// A process group, or a process, which may have made a group of its own.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Target {
    Group(Pid),
    Process(Pid),
}

impl Display for Target {
    /// Writes the operands of `kill`.
    fn fmt(&self, f: &mut Formatter<'_>) -> fmt::Result {
        match self {
            Self::Group(group) => write!(f, "-{}", group.as_raw_nonzero()),
            Self::Process(pid) => write!(f, "{0} -{0}", pid.as_raw_nonzero()),
        }
    }
}

impl Guard {
    /// Starts a guard of the job with this id that removes `run_dir` at its end.
    pub(super) fn start(job: String, run_dir: Option<PathBuf>) -> Result<Self> {
        let (shell, pipe) = spawn(&job, run_dir.as_deref())?;
        Ok(Self { job, run_dir, shell, pipe, targets: Vec::new() })
    }

    /// Adds a process group, before the rank joins it, or a rank.
    pub(super) fn watch(&mut self, target: Target) -> Result<()> {
        self.targets.push(target);
        if self.write_line(target).is_ok() {
            return Ok(());
        }
        drop(process::reap(&mut self.shell));
        (self.shell, self.pipe) = spawn(&self.job, self.run_dir.as_deref())?;
        let notified = self.targets.iter().try_for_each(|target| self.write_line(target));
        notified.map_err(Error::io("write to the guard process"))
    }

    /// Removes all targets but `kept`: the others have ended, and their ids may be reused.
    pub(super) fn keep(&mut self, kept: Vec<Target>) {
        self.targets = kept;
        // A guard that was killed has no targets to remove.
        let lines = self.write_line("none");
        drop(lines.and_then(|()| self.targets.iter().try_for_each(|one| self.write_line(one))));
    }

    fn write_line(&self, line: impl Display) -> io::Result<()> {
        self.pipe.as_ref().map_or(Ok(()), |mut pipe| writeln!(pipe, "{line}"))
    }
}

/// Starts the guard's process.
fn spawn(job: &str, run_dir: Option<&Path>) -> Result<(Child, Option<ChildStdin>)> {
    let mut shell = Command::new("/bin/sh");
    shell
        .args(["-c", SCRIPT, "launch-guard", &format!("{JOBS}={job}")])
        .args(run_dir)
        .stdin(Stdio::piped())
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        // In its own group, so that signals to the launcher's group, for example by a terminal, do
        // not end the guard first.
        .process_group(0);
    let mut shell = process::spawn(&mut shell).map_err(Error::io("start the guard process"))?;
    let pipe = shell.stdin.take();
    Ok((shell, pipe))
}

impl Drop for Guard {
    /// Ends the guard by closing its pipe; it kills the targets it still has. The directory is
    /// removed even if the guard was killed.
    fn drop(&mut self) {
        self.pipe = None;
        drop(process::reap(&mut self.shell));
        if let Some(run_dir) = &self.run_dir {
            drop(std::fs::remove_dir_all(run_dir));
        }
    }
}

/// Reads one target per line, or `none` to remove all. At end of file, kills the targets and then
/// the processes with the job's id in their environment, until there are none, and removes the
/// directory. Uses only the shell's own commands, apart from `rm`. `read` drops the NULs between
/// the variables, so `$1` is the variable's name and its value, or the start of it in an inner job.
const SCRIPT: &str = r#"
trap '' TERM INT HUP QUIT USR1 USR2
targets=
while read -r line; do
  case $line in none) targets= ;; *) targets="$targets $line" ;; esac
done
if [ -n "$targets" ]; then
  kill -s KILL -- $targets
  for round in 1 2 3 4 5; do
    found=
    for process in /proc/[0-9]*; do
      while read -r line || [ -n "$line" ]; do
        case $line in *"$1"*) found=1; kill -s KILL -- "${process#/proc/}"; break ;; esac
      done <"$process/environ"
    done
    [ -n "$found" ] || break
  done
fi
[ -z "$2" ] || rm -rf -- "$2"
"#;

#[cfg(test)]
mod tests {
    use std::os::unix::process::ExitStatusExt;

    use super::*;

    #[test]
    fn processes_with_the_jobs_id_are_killed_but_not_those_with_a_copy_of_it() {
        let sleep = |name: &str, jobs: &str| {
            process::spawn(Command::new("sleep").arg("600").env_remove(JOBS).env(name, jobs))
        };
        let mut guard = Guard::start("outer/job".into(), None).unwrap();
        let [mut rank, mut inner, mut copy] =
            [("A", ""), (JOBS, "outer/job/inner"), ("ID", "outer/job")]
                .map(|(name, jobs)| sleep(name, jobs).unwrap());
        guard.watch(Target::Process(process::pid_of(&rank))).unwrap();
        drop(guard);
        for child in [&mut rank, &mut inner] {
            assert_eq!(process::reap(child).unwrap().signal(), Some(9));
        }
        assert!(copy.try_wait().unwrap().is_none());
        copy.kill().unwrap();
        process::reap(&mut copy).unwrap();
    }
}
