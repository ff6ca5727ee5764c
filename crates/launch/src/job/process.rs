//! This process's children, the orphans it adopts, and the descendants of ranks.
//!
//! The launcher is a child subreaper (`prctl(2)`): the kernel gives it each descendant whose parent
//! has ended, also one that has left the process group or session of its rank. So the descendants
//! of a rank are those below it in the tree of processes, and the orphans with the job's id in
//! their environment ([`JOBS`]). An orphan without it is left alone: as process 1 of a container,
//! the launcher adopts other processes, too. So a daemon can outlive the ranks.
//!
//! Invariant: a signal reaches only children of this process, their process groups, and descendants
//! that a pidfd or their start time identifies.

use std::collections::{BTreeMap, BTreeSet};
use std::io;
use std::os::unix::process::CommandExt;
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::mpsc::Sender;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;

use rustix::io::Errno;
use rustix::process::{
    Pid, PidfdFlags, Signal, WaitId, WaitIdOptions, WaitIdStatus, child_subreaper, getpid,
    kill_process, pidfd_open, pidfd_send_signal, set_child_subreaper, waitid,
};
use signal_hook::consts::SIGCHLD;
use signal_hook::iterator::{Handle, Signals};

use super::events::Event;
use crate::rank::JOBS;
use crate::{Error, Result};

/// Children that this crate has started and not yet reaped.
static CHILDREN: Mutex<Children> =
    Mutex::new(Children { pids: BTreeSet::new(), jobs: 0, was_subreaper: false });

struct Children {
    pids: BTreeSet<i32>,
    /// Number of jobs of this process.
    jobs: usize,
    /// Whether this process was a subreaper before the first job.
    was_subreaper: bool,
}

fn children() -> MutexGuard<'static, Children> {
    CHILDREN.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Starts a child. The thread that reaps orphans does not see it before its pid is known.
pub(super) fn spawn(command: &mut Command) -> io::Result<Child> {
    let mut children = children();
    let child = command.spawn()?;
    children.pids.insert(pid_of(&child).as_raw_nonzero().get());
    Ok(child)
}

/// Waits until a child of [`spawn`] has ended.
pub(super) fn reap(child: &mut Child) -> io::Result<ExitStatus> {
    let status = child.wait();
    children().pids.remove(&pid_of(child).as_raw_nonzero().get());
    status
}

/// Starts a process that leads its own process group and exits at once.
pub(super) fn leader() -> io::Result<Child> {
    let mut command = Command::new("/bin/sh");
    command.args(["-c", "exit"]).stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
    spawn(command.process_group(0))
}

/// Starts a thread that waits for the exit of a rank (by its local rank) without reaping it.
pub(super) fn watch_exit(
    attempt: u32,
    rank: usize,
    pid: Pid,
    events: Sender<Event>,
) -> io::Result<JoinHandle<()>> {
    std::thread::Builder::new().name(format!("launch-wait-{rank}")).spawn(move || {
        let options = WaitIdOptions::EXITED | WaitIdOptions::NOWAIT;
        let status = loop {
            match waitid(WaitId::Pid(pid), options) {
                Err(Errno::INTR) => {}
                status => break status.ok().flatten(),
            }
        };
        let code = status.as_ref().and_then(WaitIdStatus::exit_status);
        let signal = status.as_ref().and_then(WaitIdStatus::terminating_signal);
        // Fails after the end of the job.
        let _ = events.send(Event::Exited { attempt, rank, code, signal });
    })
}

/// Returns the id of a child process.
pub(super) fn pid_of(child: &Child) -> Pid {
    i32::try_from(child.id()).ok().and_then(Pid::from_raw).expect("a process id is a positive i32")
}

/// Makes this process adopt orphans, and reaps them on a thread, until dropped.
///
/// A child that another part of this program has started is left alone if it is in this process's
/// own group, where [`Command`] puts it by default.
pub(crate) struct Reaper {
    handle: Handle,
    thread: Option<JoinHandle<()>>,
}

impl Reaper {
    pub(crate) fn start() -> Result<Self> {
        let failed = || Error::io("handle signals");
        let mut signals = Signals::new([SIGCHLD]).map_err(failed())?;
        let handle = signals.handle();
        let thread = std::thread::Builder::new().name("launch-reap".to_owned());
        let thread = thread.spawn(move || {
            for _ in signals.forever() {
                reap_orphans();
                // One pass for all that end meanwhile.
                std::thread::sleep(super::POLL);
            }
        });
        let thread = Some(thread.map_err(Error::io("start a thread"))?);
        let mut children = children();
        if children.jobs == 0 {
            children.was_subreaper = child_subreaper().is_ok_and(|set| set.is_some());
            // Without it, orphans go to another process, and only their group is known.
            let _ = set_child_subreaper(Some(getpid()));
        }
        children.jobs += 1;
        drop(children);
        Ok(Self { handle, thread })
    }
}

impl Drop for Reaper {
    fn drop(&mut self) {
        let mut children = children();
        children.jobs -= 1;
        if children.jobs == 0 && !children.was_subreaper {
            let _ = set_child_subreaper(None);
        }
        drop(children);
        self.handle.close();
        if let Some(thread) = self.thread.take() {
            drop(thread.join());
        }
    }
}

/// Reaps the adopted processes that have ended.
pub(super) fn reap_orphans() {
    // Held while reaping, so that no child with one of these pids is started.
    let children = children();
    // Not by `getpgrp`: in a namespace of processes it is 0 if the group's leader is outside.
    let Some(own) = Process::read(getpid().as_raw_nonzero().get()) else { return };
    for process in own_children() {
        let is_orphan = process.group != own.group && !children.pids.contains(&process.pid);
        if let Some(pid) = Pid::from_raw(process.pid).filter(|_| is_orphan && process.has_ended) {
            // Fails if it is already reaped.
            let _ = waitid(WaitId::Pid(pid), WaitIdOptions::EXITED | WaitIdOptions::NOHANG);
        }
    }
}

/// Returns this process's children, at least those that it has adopted.
fn own_children() -> Vec<Process> {
    let own = getpid().as_raw_nonzero().get();
    // The kernel gives orphans to the main thread. Not every kernel has this file.
    if let Ok(pids) = std::fs::read_to_string(format!("/proc/self/task/{own}/children")) {
        let pids = pids.split_whitespace().filter_map(|pid| pid.parse().ok());
        return pids.filter_map(Process::read).collect();
    }
    processes().into_iter().filter(|process| process.parent == own).collect()
}

/// A process, as `/proc/PID/stat` shows it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Process {
    pub(super) pid: i32,
    parent: i32,
    pub(super) group: i32,
    pub(super) session: i32,
    /// Whether it is a zombie.
    pub(super) has_ended: bool,
    start_time: u64,
}

impl Process {
    pub(super) fn read(pid: i32) -> Option<Self> {
        Self::parse(pid, &std::fs::read(format!("/proc/{pid}/stat")).ok()?)
    }

    /// The second field is the program's name in parentheses, which may contain any byte.
    fn parse(pid: i32, stat: &[u8]) -> Option<Self> {
        let end = stat.iter().rposition(|&byte| byte == b')')?;
        let fields = std::str::from_utf8(stat.get(end + 1..)?).ok()?;
        let fields: Vec<_> = fields.split_whitespace().collect();
        let number = |index: usize| fields.get(index)?.parse::<i32>().ok();
        Some(Self {
            pid,
            parent: number(1)?,
            group: number(2)?,
            session: number(3)?,
            has_ended: matches!(*fields.first()?, "Z" | "X" | "x"),
            start_time: fields.get(19)?.parse().ok()?,
        })
    }

    /// Returns its pid and session.
    fn ids(&self) -> (i32, i32) {
        (self.pid, self.session)
    }

    /// Sends a signal, unless the process has ended.
    pub(super) fn signal(&self, signal: Signal) -> Result<(), Errno> {
        let pid = Pid::from_raw(self.pid).ok_or(Errno::SRCH)?;
        let pidfd = match pidfd_open(pid, PidfdFlags::empty()) {
            Ok(pidfd) => Some(pidfd),
            Err(Errno::SRCH) => return Ok(()),
            // Before Linux 5.3, and where a seccomp filter refuses it.
            Err(_) => None,
        };
        if Self::read(self.pid).is_none_or(|now| now.start_time != self.start_time) {
            return Ok(());
        }
        let sent = match pidfd {
            Some(pidfd) => pidfd_send_signal(pidfd, signal),
            None => kill_process(pid, signal),
        };
        if sent == Err(Errno::SRCH) { Ok(()) } else { sent }
    }

    /// Returns whether the environment that it was started with names the job, if it can be read.
    fn is_of_job(&self, id: &str) -> Option<bool> {
        let envs = std::fs::read(format!("/proc/{}/environ", self.pid)).ok()?;
        let text = String::from_utf8_lossy(&envs);
        let jobs = text.split('\0').find_map(|env| env.strip_prefix(JOBS)?.strip_prefix('='));
        Some(jobs.is_some_and(|jobs| jobs.split('/').any(|job| job == id)))
    }
}

/// Returns all processes that `/proc` shows.
fn processes() -> Vec<Process> {
    let entries = std::fs::read_dir("/proc").into_iter().flatten().flatten();
    let pids = entries.filter_map(|entry| entry.file_name().to_str()?.parse().ok());
    pids.filter_map(Process::read).collect()
}

/// Returns the running processes that belong to `groups`, or descend from the children `ranks` or
/// from an orphan of the job; without `ranks` themselves, and without daemons, which have a session
/// of their own and an environment without the job's id.
pub(super) fn descendants(ranks: &[i32], groups: &[i32], job: &str) -> Vec<Process> {
    let (own, all) = (getpid().as_raw_nonzero().get(), processes());
    let children = children().pids.clone();
    let is_orphan = |process: &&Process| {
        process.parent == own
            && !children.contains(&process.pid)
            && process.is_of_job(job) == Some(true)
    };
    let mut found: BTreeMap<i32, i32> = all.iter().filter(is_orphan).map(Process::ids).collect();
    found.extend(all.iter().filter(|one| ranks.contains(&one.pid)).map(Process::ids));
    let mut before = 0;
    while found.len() > before {
        before = found.len();
        let is_below = |one: &&Process| {
            let session = found.get(&one.parent);
            let is_in = session.is_some_and(|&session| session == one.session);
            is_in || session.is_some() && one.is_of_job(job) != Some(false)
        };
        let below: Vec<_> = all.iter().filter(is_below).map(Process::ids).collect();
        found.extend(below);
    }
    let belongs = |one: &Process| found.contains_key(&one.pid) || groups.contains(&one.group);
    let running = |one: &Process| !one.has_ended && !ranks.contains(&one.pid) && belongs(one);
    all.into_iter().filter(running).collect()
}

#[cfg(test)]
mod tests {
    use std::time::{Duration, Instant};

    use super::*;

    #[test]
    fn names_of_programs_may_contain_any_byte() {
        let mut stat = b"7 (\xd0\xbe) Z 1 (\xd0".to_vec();
        stat.extend(b") S 3 4 5 0 -1 0 0 0 0 0 0 0 0 0 20 0 1 0 99 0 0");
        let want =
            Process { pid: 7, parent: 3, group: 4, session: 5, has_ended: false, start_time: 99 };
        assert_eq!(Process::parse(7, &stat), Some(want));
        for cut in [b"7 (sh".as_slice(), b"7 (sh)", b"7 (sh) S 1 2"] {
            assert_eq!(Process::parse(7, cut), None);
        }
    }

    #[test]
    fn a_later_process_with_the_same_pid_gets_no_signal() {
        let mut child = spawn(Command::new("sleep").arg("600")).unwrap();
        let process = Process::read(pid_of(&child).as_raw_nonzero().get()).unwrap();
        let later = Process { start_time: process.start_time + 1, ..process.clone() };
        assert_eq!(later.signal(Signal::KILL), Ok(()));
        assert!(child.try_wait().unwrap().is_none());
        process.signal(Signal::KILL).unwrap();
        assert!(!reap(&mut child).unwrap().success());
        assert_eq!(process.signal(Signal::KILL), Ok(()), "it has ended");
    }

    #[test]
    fn orphans_are_adopted_and_reaped_but_children_are_not() {
        let reaper = Reaper::start().unwrap();
        let mut own = spawn(Command::new("sh").args(["-c", "exit 3"]).process_group(0)).unwrap();
        let mut other = Command::new("sh").args(["-c", "exit 4"]).spawn().unwrap();
        let script = "sleep 0.2 & echo $!";
        let mut command = Command::new("sh");
        command.args(["-c", script]).process_group(0).stdout(Stdio::piped());
        let mut parent = spawn(&mut command).unwrap();
        let text = io::read_to_string(parent.stdout.take().unwrap()).unwrap();
        let deadline = Instant::now() + Duration::from_secs(60);
        while Process::read(text.trim().parse().unwrap()).is_some() {
            assert!(Instant::now() < deadline, "a zombie: {text}");
            std::thread::sleep(Duration::from_millis(5));
        }
        assert!(reap(&mut parent).unwrap().success());
        assert_eq!(reap(&mut own).unwrap().code(), Some(3));
        assert_eq!(other.wait().unwrap().code(), Some(4));
        drop(reaper);
    }
}
