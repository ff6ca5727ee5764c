//! Events for the supervising thread: signals, exits of ranks, and ends of the attempt announced by
//! other nodes.

use std::sync::Arc;
use std::sync::mpsc::{Receiver, Sender};
use std::thread::JoinHandle;

use signal_hook::consts::{FORBIDDEN, SIGCHLD, SIGXFSZ};
use signal_hook::flag;
use signal_hook::iterator::{Handle, Signals};

use super::attempt::End;
use crate::{Error, Result};

/// An event that another thread sends to the supervising thread.
pub(crate) enum Event {
    /// The rank of this node with this local rank has exited.
    Exited {
        attempt: u32,
        rank: usize,
        code: Option<i32>,
        signal: Option<i32>,
    },
    /// Another node has ended the attempt.
    RemoteEnd {
        attempt: u32,
        end: End,
    },
    Signal(i32),
}

/// The receiver of the events, events that arrived while the supervising thread waited for
/// something else, and the sender of the launcher's messages.
pub(crate) struct Queue {
    pub(crate) events: Receiver<Event>,
    pub(crate) attempt: u32,
    /// Signal that this process received; no further attempt follows.
    pub(crate) signal: Option<i32>,
    /// Reason for which another node ended this attempt.
    pub(crate) remote: Option<End>,
    /// Sender of messages for standard error; `None` after the last one.
    pub(crate) messages: Option<Sender<String>>,
}

impl Queue {
    pub(crate) fn new(events: Receiver<Event>, messages: Sender<String>) -> Self {
        Self { events, attempt: 0, signal: None, remote: None, messages: Some(messages) }
    }

    /// Queues a message of the launcher for standard error, without blocking.
    pub(crate) fn print(&self, text: &str) {
        if let Some(messages) = &self.messages {
            let _ = messages.send(text.to_owned());
        }
    }

    /// Handles the events that have arrived; returns whether a signal was received.
    pub(crate) fn drain(&mut self) -> bool {
        while let Ok(event) = self.events.try_recv() {
            match event {
                Event::Signal(signal) => self.signal = Some(signal),
                Event::RemoteEnd { attempt, end } if attempt == self.attempt => {
                    self.remote.get_or_insert(end);
                }
                Event::RemoteEnd { .. } | Event::Exited { .. } => {}
            }
        }
        self.signal.is_some()
    }
}

/// A thread that sends the signals of this process to the supervising thread, until dropped.
pub(crate) struct SignalThread {
    handle: Handle,
    thread: Option<JoinHandle<()>>,
}

impl SignalThread {
    pub(crate) fn start(events: Sender<Event>, signals: &[i32]) -> Result<Self> {
        let no_stop = |signal: &i32| FORBIDDEN.contains(signal) || *signal == SIGCHLD;
        if let Some(signal) = signals.iter().find(|&signal| no_stop(signal)) {
            let text = format!(
                "signal {signal} cannot be caught and forwarded; remove it from the list of signals"
            );
            return Err(Error::Options(text));
        }
        let ignored = ignored("self");
        let is_ignored = |signal: i32| ignored >> (signal - 1) & 1 == 1;
        // If SIGCHLD is ignored, the kernel reaps the ranks; with the default action of SIGXFSZ, a
        // log file at the size limit ends the launcher. An empty handler prevents both, and ranks
        // do not inherit it.
        let quiet =
            [SIGCHLD, SIGXFSZ].into_iter().filter(|&one| is_ignored(one) == (one == SIGCHLD));
        let handle_signals = || Error::io("handle signals");
        for signal in quiet {
            flag::register(signal, Arc::default()).map_err(handle_signals())?;
        }
        // Ignored signals stay ignored, for example SIGHUP under `nohup`.
        let all = signals.iter().filter(|&&signal| !is_ignored(signal));
        let mut signals = Signals::new(all).map_err(handle_signals())?;
        let handle = signals.handle();
        let thread = std::thread::Builder::new()
            .name("launch-signals".to_owned())
            .spawn(move || {
                for signal in &mut signals {
                    // Fails after the end of the job.
                    let _ = events.send(Event::Signal(signal));
                }
            })
            .map_err(handle_signals())?;
        Ok(Self { handle, thread: Some(thread) })
    }
}

/// Mask of the signals that a process, a pid or `self`, ignores: bit `s - 1` is signal `s`.
pub(super) fn ignored(process: &str) -> u64 {
    // The name of the program in it may be cut within a character.
    let status = std::fs::read(format!("/proc/{process}/status")).unwrap_or_default();
    let status = String::from_utf8_lossy(&status);
    let mask = status.lines().find_map(|line| line.strip_prefix("SigIgn:"));
    mask.and_then(|mask| u64::from_str_radix(mask.trim(), 16).ok()).unwrap_or(0)
}

impl Drop for SignalThread {
    fn drop(&mut self) {
        self.handle.close();
        if let Some(thread) = self.thread.take() {
            drop(thread.join());
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ignored_signals_are_known_if_the_programs_name_is_cut_within_a_letter() {
        let name = std::fs::read("/proc/self/comm").unwrap();
        std::fs::write("/proc/self/comm", b"1234567890\xd0\xbe\xd0").unwrap();
        let mask = ignored("self");
        std::fs::write("/proc/self/comm", name).unwrap();
        // The standard library ignores SIGPIPE.
        assert_eq!(mask >> (signal_hook::consts::SIGPIPE - 1) & 1, 1);
    }
}
