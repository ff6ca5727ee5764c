//! Processes of ranks and of their process groups.

use std::io;
use std::os::unix::process::CommandExt;
use std::process::{Child, Command, Stdio};
use std::sync::mpsc::Sender;
use std::thread::JoinHandle;

use rustix::process::{Pid, WaitId, WaitIdOptions, WaitIdStatus, waitid};

use super::events::Event;

/// Starts a process that leads its own process group and exits at once.
pub(super) fn leader() -> io::Result<Child> {
    Command::new("/bin/sh")
        .args(["-c", "exit"])
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .process_group(0)
        .spawn()
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
                Err(rustix::io::Errno::INTR) => {}
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
