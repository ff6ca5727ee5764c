//! Events for the supervising thread: signals, exits of ranks, and ends of the attempt announced by
//! other nodes.

use std::sync::Arc;
use std::sync::mpsc::{Receiver, Sender};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use signal_hook::consts::{FORBIDDEN, SIGCHLD, SIGXFSZ};
use signal_hook::flag;
use signal_hook::iterator::{Handle, Signals};

use super::attempt::End;
use crate::rank::is_ignored;
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

/// Time in which a second signal is a copy of the first: programs such as `timeout` signal a
/// process and then its group.
const COPY_TIME: Duration = Duration::from_millis(50);

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
            return Err(Error::options("--signals-to-handle", text));
        }
        // If SIGCHLD is ignored, the kernel reaps the ranks; with the default action of SIGXFSZ, a
        // log file at the size limit ends the launcher. An empty handler prevents both, and ranks
        // do not inherit it.
        let quiet = [SIGCHLD, SIGXFSZ]
            .into_iter()
            .filter(|&one| is_ignored("self", one) == (one == SIGCHLD));
        let handle_signals = || Error::io("handle signals");
        for signal in quiet {
            flag::register(signal, Arc::default()).map_err(handle_signals())?;
        }
        // Ignored signals stay ignored, for example SIGHUP under `nohup`.
        let all = signals.iter().filter(|&&signal| !is_ignored("self", signal));
        let mut signals = Signals::new(all).map_err(handle_signals())?;
        let handle = signals.handle();
        let thread = std::thread::Builder::new()
            .name("launch-signals".to_owned())
            .spawn(move || {
                let mut last: Option<(i32, Instant)> = None;
                for signal in &mut signals {
                    let same = last.filter(|(other, _)| *other == signal);
                    if same.is_some_and(|(_, at)| at.elapsed() < COPY_TIME) {
                        continue;
                    }
                    last = Some((signal, Instant::now()));
                    // Fails after the end of the job.
                    let _ = events.send(Event::Signal(signal));
                }
            })
            .map_err(handle_signals())?;
        Ok(Self { handle, thread: Some(thread) })
    }
}

impl Drop for SignalThread {
    fn drop(&mut self) {
        self.handle.close();
        if let Some(thread) = self.thread.take() {
            drop(thread.join());
        }
    }
}
