//! The nodes of a job: rendezvous of their launchers, and agreement on the result of an attempt.
//!
//! A single node has its own store for each attempt. Several nodes meet at the control store: nodes
//! of a fixed job have given ranks (`fixed`), nodes of an elastic job get them as they join
//! (`elastic`, with the rules in `state`). During an attempt they communicate through
//! [`Round`](round::Round).
//!
//! Invariant: every wait for another node has a deadline or monitors its heartbeat, and an error
//! names the address, the port and the missing nodes.

mod contact;
mod elastic;
mod fixed;
mod heartbeat;
mod round;
mod state;

use std::ops::ControlFlow;
use std::sync::Arc;
use std::time::{Duration, Instant};

use collective::store::{Endpoint, TcpStoreServer};
use collective::{Store, TcpStore};
use serde::{Deserialize, Serialize};

use self::elastic::Elastic;
use self::fixed::Fixed;
use self::round::{HeartbeatThread, Round};
use crate::address;
use crate::job::{Assignment, End, Job, Queue, Summary};
use crate::options::{LaunchOptions, Nodes, RdzvConfig};
use crate::{Error, Result};

/// Coordination of this node with the others.
pub(crate) trait Coordinator {
    /// Waits for the other nodes and returns this node's assignment for the next attempt, or the
    /// exit code if a signal or the end of the job came first.
    fn next(&mut self, queue: &mut Queue) -> Result<ControlFlow<i32, Assignment>>;

    /// Returns the current attempt, unless this node is alone and no other can join.
    fn round(&self) -> Option<&Arc<Round>>;

    /// Agrees with the other nodes on the summary of the attempt that has ended on this node.
    fn agree(&mut self, job: &mut Job) -> Result<Summary>;

    /// Number of restarts after failures.
    fn restarts(&self) -> u32;

    /// Starts a thread that sends this node's heartbeats, and reports ends announced by other nodes
    /// to `job`, until dropped.
    fn watch(&self, job: &Job) -> Result<Option<HeartbeatThread>> {
        let watch = |round: &Arc<Round>| {
            HeartbeatThread::start(round, job.queue.attempt, job.sender.clone())
        };
        self.round().map(watch).transpose()
    }

    /// Ends the attempt on all other nodes, without blocking.
    fn announce(&self, end: &End) {
        if let Some(round) = self.round() {
            round.announce_apart(end);
        }
    }
}

/// Checks the options, and hosts the control store if this node has to.
pub(crate) fn coordinator(options: &LaunchOptions) -> Result<Box<dyn Coordinator>> {
    Ok(match options.nodes.clone() {
        Nodes::One => Box::new(Fixed::new(options, (0, 1), "127.0.0.1".to_owned(), 0)?),
        Nodes::Fixed { count, rank, master_addr, master_port } => {
            Box::new(Fixed::new(options, (rank, count), master_addr, master_port)?)
        }
        Nodes::Elastic { min, max, host, port } => {
            Box::new(Elastic::new(options, (min, max), host, port)?)
        }
    })
}

/// Returns the first rank, world size, first role rank and role world size of a node, in the order
/// of torchrun's protocol. `nodes` are the role and number of ranks of each node.
fn assign(nodes: &[(&str, usize)], node: usize) -> [usize; 4] {
    let size = |nodes: &[(&str, usize)], role: Option<&str>| -> usize {
        let same = nodes.iter().filter(|node| role.is_none_or(|role| role == node.0));
        same.map(|node| node.1).sum()
    };
    let (before, role) = (&nodes[..node], Some(nodes[node].0));
    [size(before, None), size(nodes, None), size(before, role), size(nodes, role)]
}

/// Hosts the ranks' store of an attempt at a free port of this host.
fn host_fresh(flag: &'static str, host: &str, one_host: bool) -> Result<TcpStoreServer> {
    let addrs = &address::resolve(flag, host, 0)?[..];
    let endpoint = Endpoint { host, port: 0, addrs, one_host };
    Ok(TcpStoreServer::bind_endpoint(&endpoint, Vec::new())?)
}

/// Connects to the control store; `None` if a signal arrives first.
fn connect(
    (host, port): (&str, u16),
    rdzv: &RdzvConfig,
    queue: &mut Queue,
    who: &str,
) -> Result<Option<TcpStore>> {
    let (start, mut slice) = (Instant::now(), SLICE);
    let mut notice = WaitNotice::new();
    loop {
        // Short at first, so that signals are handled; later long enough for a slow name server.
        match TcpStore::connect(host, port, slice) {
            Ok(_) => return Ok(Some(TcpStore::connect(host, port, rdzv.heartbeat)?)),
            Err(error) => {
                let waited = start.elapsed();
                if waited >= rdzv.join {
                    let why = format!("{who}: cannot connect after {waited:.1?}: {error}");
                    return Err(Error::rendezvous(address::join(host, port), why).caused_by(error));
                }
                let most = rdzv.join;
                notice.once(queue, || {
                    format!("{who}: cannot connect yet, retrying for up to {most:?}: {error}")
                });
            }
        }
        if queue.drain() {
            return Ok(None);
        }
        slice = (slice + SLICE).min(rdzv.heartbeat.max(SLICE));
    }
}

/// Waits for `keys`; false if a signal or the deadline comes first.
fn wait(store: &dyn Store, keys: &[&str], deadline: Instant, queue: &mut Queue) -> Result<bool> {
    loop {
        let left = deadline.saturating_duration_since(Instant::now());
        match store.wait(keys, left.min(SLICE)) {
            Ok(()) => return Ok(true),
            Err(collective::Error::KeyTimeout { .. }) if queue.drain() || left.is_zero() => {
                return Ok(false);
            }
            Err(collective::Error::KeyTimeout { .. }) => {}
            Err(error) => return Err(error.into()),
        }
    }
}

/// Prints a message about a long wait once, because the cause may be a mistake.
struct WaitNotice(Option<Instant>);

impl WaitNotice {
    fn new() -> Self {
        Self(Some(Instant::now() + LONG_WAIT))
    }

    fn once(&mut self, queue: &Queue, text: impl FnOnce() -> String) {
        if self.0.take_if(|due| *due <= Instant::now()).is_some() {
            queue.print(&format!("launch: {}\n", text()));
        }
    }
}

/// Advice after the loss of an elastic job's control store; `within` if a node of the job hosted
/// it.
fn advice(within: bool) -> &'static str {
    if within {
        "; the job cannot continue without it; to survive the loss of any node, run `launch store` on \
         a host outside the job and pass its address as --rdzv-endpoint"
    } else {
        "; the job cannot continue without it"
    }
}

fn to_json<T: Serialize>(value: &T) -> Vec<u8> {
    serde_json::to_vec(value).expect("text, numbers and lists can be serialized as JSON")
}

fn from_json<'a, T: Deserialize<'a>>(what: &str, text: &'a [u8]) -> Result<T> {
    serde_json::from_slice(text).map_err(|error| {
        let message = format!(
            "cannot parse {what} in the control store: {error}; check that all nodes run the same version"
        );
        Error::Rendezvous { address: None, message, source: Some(error.into()) }
    })
}

/// Time after which a wait is reported.
const LONG_WAIT: Duration = Duration::from_secs(10);
/// Maximum time of a single wait; signals are handled between them.
const SLICE: Duration = Duration::from_millis(500);
