//! This process's children, the orphans it adopts, and the descendants of ranks.
//!
//! The launcher is a child subreaper (`prctl(2)`): the kernel gives it each descendant whose parent
//! has ended, also one that has left the process group or session of its rank. So the descendants
//! of a rank are those below it in the tree of processes, and the orphans with the job's id in
//! their environment ([`JOBS`]). An orphan without it gets no signal: as process 1 of a container,
//! the launcher adopts other processes, too. So a daemon can outlive the ranks.
//!
//! The kernel does not tell orphans from children that another part of the program has started, and
//! a process that has ended has no environment any more. So only those are reaped that were seen
//! with the id while they ran, unless the program starts no other children.
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
use crate::rank::{JOBS, is_ignored};
use crate::{Error, Result};

/// Children that this crate has started and not yet reaped.
static CHILDREN: Mutex<Children> = Mutex::new(Children {
    pids: BTreeSet::new(),
    seen: BTreeSet::new(),
    jobs: 0,
    was_subreaper: false,
});

struct Children {
    pids: BTreeSet<i32>,
    /// Pids and start times of descendants of ranks that were seen running.
    seen: BTreeSet<(i32, u64)>,
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
    let pid = pid_of(child);
    // The pid can be reused once it is reaped, so the lock is held then, but not while it runs.
    let _ = await_exit(pid);
    let mut children = children();
    children.pids.remove(&pid.as_raw_nonzero().get());
    child.wait()
}

/// Starts a process that leads its own process group and exits at once.
pub(super) fn leader() -> io::Result<Child> {
    let mut command = Command::new("/bin/sh");
    command.args(["-c", "exit"]).stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
    spawn(command.process_group(0))
}

/// Waits for the exit of a child without reaping it. `None` if it is already reaped.
fn await_exit(pid: Pid) -> Option<WaitIdStatus> {
    loop {
        match waitid(WaitId::Pid(pid), WaitIdOptions::EXITED | WaitIdOptions::NOWAIT) {
            Err(Errno::INTR) => {}
            status => return status.ok().flatten(),
        }
    }
}

/// Starts a thread that waits for the exit of a rank (by its local rank) without reaping it.
pub(super) fn watch_exit(
    attempt: u32,
    rank: usize,
    pid: Pid,
    events: Sender<Event>,
) -> io::Result<JoinHandle<()>> {
    std::thread::Builder::new().name(format!("launch-wait-{rank}")).spawn(move || {
        let status = await_exit(pid);
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
/// Adopted processes that still run then stay children of this process, which has to reap them if
/// it goes on for long.
pub(crate) struct Reaper {
    handle: Handle,
    thread: Option<JoinHandle<()>>,
}

impl Reaper {
    /// Reaps the orphans of this job, or with `all` each child that this crate has not started.
    pub(super) fn start(job: String, all: bool) -> Result<Self> {
        let failed = || Error::io("handle signals");
        let mut signals = Signals::new([SIGCHLD]).map_err(failed())?;
        let handle = signals.handle();
        let thread = std::thread::Builder::new().name("launch-reap".to_owned());
        let thread = thread.spawn(move || {
            for _ in signals.forever() {
                reap_orphans(&job, all);
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
        if children.jobs == 0 {
            children.seen.clear();
            if !children.was_subreaper {
                let _ = set_child_subreaper(None);
            }
        }
        drop(children);
        self.handle.close();
        if let Some(thread) = self.thread.take() {
            drop(thread.join());
        }
    }
}

/// Reaps the adopted processes that have ended, and remembers those of the job that run.
pub(super) fn reap_orphans(job: &str, all: bool) {
    // Held while reaping, so that no child with one of these pids is started.
    let mut children = children();
    for process in own_children() {
        if children.pids.contains(&process.pid) {
            continue;
        }
        if !process.has_ended {
            if process.is_of_job(job) == Some(true) {
                children.seen.insert(process.key());
            }
        } else if let Some(pid) = Pid::from_raw(process.pid)
            && (children.seen.remove(&process.key()) || all)
        {
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

    /// Returns its pid and start time, which no other process has.
    fn key(&self) -> (i32, u64) {
        (self.pid, self.start_time)
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

    /// Returns whether the environment that it was started with names the job or one within the
    /// job, if it can be read.
    fn is_of_job(&self, id: &str) -> Option<bool> {
        self.has_jobs(|jobs| jobs == id || is_within(jobs, id))
    }

    /// Returns whether it is of a job whose launcher is a process of this job, and forwards signals
    /// to it.
    pub(super) fn is_of_inner_job(&self, id: &str) -> bool {
        self.has_jobs(|jobs| is_within(jobs, id)).unwrap_or(false)
    }

    fn has_jobs(&self, is_one: impl Fn(&str) -> bool) -> Option<bool> {
        let envs = std::fs::read(format!("/proc/{}/environ", self.pid)).ok()?;
        let text = String::from_utf8_lossy(&envs);
        let jobs = text.split('\0').find_map(|env| env.strip_prefix(JOBS)?.strip_prefix('='));
        Some(jobs.is_some_and(is_one))
    }

    pub(super) fn ignores(&self, signal: i32) -> bool {
        is_ignored(&self.pid.to_string(), signal)
    }
}

fn is_within(jobs: &str, id: &str) -> bool {
    jobs.strip_prefix(id).is_some_and(|inner| inner.starts_with('/'))
}

/// Returns all processes that `/proc` shows.
fn processes() -> Vec<Process> {
    let entries = std::fs::read_dir("/proc").into_iter().flatten().flatten();
    let pids = entries.filter_map(|entry| entry.file_name().to_str()?.parse().ok());
    pids.filter_map(Process::read).collect()
}

/// Returns the running processes that belong to `groups`, or descend from the children `ranks` or
/// from an orphan of the job; without `ranks` themselves, and without daemons: orphans with an
/// environment without the job's id outside of `groups`, and processes with such an environment
/// and a session of their own.
pub(super) fn descendants(ranks: &[i32], groups: &[i32], job: &str) -> Vec<Process> {
    let (own, all) = (getpid().as_raw_nonzero().get(), processes());
    let started = children().pids.clone();
    let is_orphan = |process: &&Process| {
        process.parent == own
            && !started.contains(&process.pid)
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
    let running: Vec<_> = all.into_iter().filter(running).collect();
    children().seen.extend(running.iter().map(Process::key));
    running
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
    fn orphans_of_the_job_are_reaped_but_children_of_others_are_not() {
        let reaper = Reaper::start("outer/job".into(), false).unwrap();
        let mut own = spawn(Command::new("sh").args(["-c", "exit 3"]).process_group(0)).unwrap();
        // The kernel gives children of a thread that has ended to the main thread, like orphans.
        let other = || Command::new("sh").args(["-c", "exit 4"]).process_group(0).spawn();
        let mut other = std::thread::spawn(other).join().unwrap().unwrap();
        let orphan = |jobs: &str| {
            let mut command = Command::new("sh");
            command.args(["-c", "sleep 600 >/dev/null & echo $!"]).env(JOBS, jobs).process_group(0);
            let mut parent = spawn(command.stdout(Stdio::piped())).unwrap();
            let text = io::read_to_string(parent.stdout.take().unwrap()).unwrap();
            assert!(reap(&mut parent).unwrap().success());
            Process::read(text.trim().parse().unwrap()).unwrap()
        };
        let orphans = ["outer/job", "outer/job/inner", "outer/job2"].map(orphan);
        reap_orphans("outer/job", false);
        let inner = orphans.each_ref().map(|orphan| orphan.is_of_inner_job("outer/job"));
        assert_eq!(inner, [false, true, false]);
        for orphan in &orphans {
            orphan.signal(Signal::KILL).unwrap();
        }
        let state = |orphan: &Process| Process::read(orphan.pid).map(|now| now.has_ended);
        let deadline = Instant::now() + Duration::from_secs(60);
        while orphans.each_ref().map(state) != [None, None, Some(true)] {
            assert!(Instant::now() < deadline, "{:?}", orphans.each_ref().map(state));
            std::thread::sleep(Duration::from_millis(5));
        }
        await_exit(pid_of(&other)).unwrap();
        reap_orphans("outer/job", false);
        assert_eq!(reap(&mut own).unwrap().code(), Some(3));
        assert_eq!(other.wait().unwrap().code(), Some(4));
        waitid(WaitId::Pid(Pid::from_raw(orphans[2].pid).unwrap()), WaitIdOptions::EXITED).unwrap();
        drop(reaper);
    }
}
