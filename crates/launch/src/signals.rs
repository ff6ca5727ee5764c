//! Signals of this process and news of other nodes, told to the supervising thread.

use std::sync::mpsc::{Receiver, Sender};
use std::thread::JoinHandle;

use signal_hook::consts::{SIGHUP, SIGINT, SIGQUIT, SIGTERM, SIGUSR1};
use signal_hook::iterator::{Handle, Signals};

use super::nodes::End;
use super::{Sink, lock};
use crate::{Error, Result};

/// What the watching threads tell the supervising one.
pub(super) enum Event {
    /// A rank of this node, by its local rank, has ended with an exit code or by a signal.
    Exited {
        attempt: u32,
        rank: usize,
        code: Option<i32>,
        signal: Option<i32>,
    },
    /// Another node ends the attempt.
    Elsewhere {
        attempt: u32,
        end: End,
    },
    Signal(i32),
}

/// The supervising thread's end of the channel, and what was heard there while it waited for
/// something else; and where it says so if that takes long.
pub(super) struct Ear {
    pub(super) events: Receiver<Event>,
    pub(super) attempt: u32,
    /// A signal asked this process to end: there is no further attempt.
    pub(super) signal: Option<i32>,
    /// Why another node ended this attempt.
    pub(super) elsewhere: Option<End>,
    stderr: Sink,
}

impl Ear {
    pub(super) fn new(events: Receiver<Event>, stderr: Sink) -> Self {
        Self { events, attempt: 0, signal: None, elsewhere: None, stderr }
    }

    /// Says something of this launcher's own on standard error.
    pub(super) fn say(&self, text: &str) {
        if !text.is_empty() {
            // Nobody reads standard error: then nobody wants to know.
            let _ = lock(&self.stderr).write_all(text.as_bytes());
        }
    }

    /// Takes what has come meanwhile; true if this process shall end.
    pub(super) fn listen(&mut self) -> bool {
        while let Ok(event) = self.events.try_recv() {
            match event {
                Event::Signal(signal) => self.signal = Some(signal),
                Event::Elsewhere { attempt, end } if attempt == self.attempt => {
                    self.elsewhere.get_or_insert(end);
                }
                Event::Elsewhere { .. } | Event::Exited { .. } => {}
            }
        }
        self.signal.is_some()
    }
}

/// Tells signals of this process to the supervising thread, until dropped.
pub(super) struct SignalThread {
    handle: Handle,
    thread: Option<JoinHandle<()>>,
}

impl SignalThread {
    pub(super) fn start(events: Sender<Event>) -> Result<Self> {
        // SIGUSR1: what Slurm is usually told to send before the time is over.
        let all = [SIGINT, SIGTERM, SIGHUP, SIGQUIT, SIGUSR1];
        let mut signals = Signals::new(all).map_err(Error::io("handle signals"))?;
        let handle = signals.handle();
        let thread = std::thread::Builder::new()
            .name("launch-signals".to_owned())
            .spawn(move || {
                for signal in &mut signals {
                    // The job has ended if nobody listens.
                    let _ = events.send(Event::Signal(signal));
                }
            })
            .map_err(Error::io("handle signals"))?;
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
