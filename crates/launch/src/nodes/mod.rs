//! The nodes of a job: how their launchers meet, and how they agree on the result of an attempt.
//!
//! One node alone has a store of its own for each attempt. Several meet at one store, the control store:
//! those of a fixed job have ranks that they were given (`fixed`), those of an elastic one get them as
//! they come (`elastic`, decided by `state`). During an attempt they speak by [`Round`](round::Round).
//!
//! Invariant: every wait for another node has a deadline or watches its heartbeat, and an error names
//! the address, the port and the nodes that are missing.

pub(super) mod address;
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
use super::LaunchOptions;
use super::events::Queue;
use super::job::Job;
use super::summary::Summary;
use crate::{Error, Result};

/// The nodes of a job.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub enum Nodes {
    /// This node alone.
    #[default]
    One,
    /// A fixed number of nodes, each with its own rank, at a store that node 0 hosts. Some of them may be
    /// torchrun's agents (`--nnodes N --node-rank I --master-addr A --master-port P`).
    Fixed {
        /// Number of nodes.
        count: usize,
        /// Rank of this node.
        rank: usize,
        /// Name or address of node 0, as the others reach it.
        master_addr: String,
        /// The port that node 0 listens on.
        master_port: u16,
    },
    /// As many nodes as come, from `min` to `max`. The ranks start again when nodes are lost or join, so they have to
    /// resume from a checkpoint with another number of ranks. torchrun's agents cannot take part.
    Elastic {
        /// Smallest number of nodes of an attempt.
        min: usize,
        /// Largest number of nodes of an attempt.
        max: usize,
        /// Name or address of the node that hosts the control store, the same on all nodes.
        host: String,
        /// The port there.
        port: u16,
    },
}

/// Timeouts of the rendezvous, torchrun's `--rdzv-conf`; the defaults are torchrun's.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct RdzvConfig {
    /// Time for all nodes, or the smallest number of an elastic job, to join. Default: 600 s.
    pub join: Duration,
    /// Time for further nodes of an elastic job, once there are enough. Default: 30 s.
    pub last_call: Duration,
    /// Time between two heartbeats. Default: 5 s.
    pub heartbeat: Duration,
    /// Number of missed heartbeats after which a node is lost. Default: 3.
    pub missed_heartbeats: u32,
}

impl Default for RdzvConfig {
    fn default() -> Self {
        Self {
            join: Duration::from_secs(600),
            last_call: Duration::from_secs(30),
            heartbeat: Duration::from_secs(5),
            missed_heartbeats: 3,
        }
    }
}

impl RdzvConfig {
    /// Time without a heartbeat after which a node is lost.
    fn lost_after(&self) -> Duration {
        self.heartbeat * self.missed_heartbeats
    }
}

/// The ranks of this node in one attempt, and the address of their store.
#[derive(Clone, Debug, Default)]
pub(super) struct Assignment {
    /// Number of the attempt, including those that ended because nodes joined or left.
    pub(super) round: u32,
    /// Number of restarts after failures.
    pub(super) restart_count: u32,
    pub(super) node: usize,
    pub(super) nodes: usize,
    pub(super) first_rank: usize,
    pub(super) world_size: usize,
    pub(super) first_role_rank: usize,
    pub(super) role_world_size: usize,
    /// Address of the ranks' store.
    pub(super) master_addr: String,
    pub(super) master_port: u16,
}

/// Why a node ends an attempt on all nodes.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) enum End {
    /// This rank has failed.
    Failed { rank: usize },
    /// This rank was interrupted by a signal and has saved; so will the others.
    Saved { rank: usize },
    /// This node wants to join.
    Joined { node: String },
    /// This node's launcher received a signal.
    Left { node: usize },
    /// This node no longer answers.
    Lost { node: String },
}

/// Coordinates this node with the others.
pub(super) trait Coordinator {
    /// Waits for the other nodes and returns this node's assignment for the next attempt; or the exit code, if a
    /// signal or the end of the job came first.
    fn next(&mut self, queue: &mut Queue) -> Result<ControlFlow<i32, Assignment>>;

    /// The current attempt, if other nodes take part in it or may join.
    fn round(&self) -> Option<&Arc<Round>>;

    /// Agrees with all nodes on the summary of the attempt that has ended here.
    fn agree(&mut self, job: &mut Job) -> Result<Summary>;

    /// Number of restarts after failures.
    fn restarts(&self) -> u32;

    /// Sends this node's heartbeats, and ends announced by other nodes to `job`, until dropped.
    fn watch(&self, job: &Job) -> Result<Option<HeartbeatThread>> {
        let watch = |round: &Arc<Round>| {
            HeartbeatThread::start(round, job.queue.attempt, job.sender.clone())
        };
        self.round().map(watch).transpose()
    }

    /// Ends the attempt on all other nodes, without waiting for them.
    fn announce(&self, end: &End) {
        if let Some(round) = self.round() {
            round.announce_apart(end);
        }
    }
}

/// Checks the options, and hosts the control store if it is this node's task.
pub(super) fn coordinator(options: &LaunchOptions) -> Result<Box<dyn Coordinator>> {
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

/// Returns first rank, world size, first rank in its role and world size of its role of a node, as torchrun's agents
/// write them. `nodes` are role and number of ranks of each node.
fn assign(nodes: &[(&str, usize)], node: usize) -> [usize; 4] {
    let size = |nodes: &[(&str, usize)], role: Option<&str>| -> usize {
        let same = nodes.iter().filter(|node| role.is_none_or(|role| role == node.0));
        same.map(|node| node.1).sum()
    };
    let (before, role) = (&nodes[..node], Some(nodes[node].0));
    [size(before, None), size(nodes, None), size(before, role), size(nodes, role)]
}

/// Hosts a store for the ranks of an attempt, at a free port of this host.
fn host_fresh(flag: &str, host: &str, one_host: bool) -> Result<TcpStoreServer> {
    let addrs = &address::resolve(flag, host, 0)?[..];
    let endpoint = Endpoint { host, port: 0, addrs, one_host };
    Ok(TcpStoreServer::bind_endpoint(&endpoint, Vec::new())?)
}

/// Connects to the control store, unless a signal comes first (`None`).
fn connect(
    (host, port): (&str, u16),
    rdzv: &RdzvConfig,
    queue: &mut Queue,
    who: &str,
) -> Result<Option<TcpStore>> {
    let (start, mut slice) = (Instant::now(), SLICE);
    let mut notice = WaitNotice::new();
    loop {
        // Short, so that a signal is heard, but in the end long enough for a slow name server.
        match TcpStore::connect(host, port, slice) {
            Ok(_) => return Ok(Some(TcpStore::connect(host, port, rdzv.heartbeat)?)),
            Err(error) => {
                let waited = start.elapsed();
                if waited >= rdzv.join {
                    let why = format!("{who}: nobody to meet after {waited:.1?}: {error}");
                    return Err(Error::Rendezvous(why));
                }
                let most = rdzv.join;
                notice.once(queue, || format!("{who}: waiting for up to {most:?}: {error}"));
            }
        }
        if queue.drain() {
            return Ok(None);
        }
        slice = (slice + SLICE).min(rdzv.heartbeat.max(SLICE));
    }
}

/// Waits for `keys`; false if a signal or the deadline came first.
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

/// A message about a long wait, printed once, since the cause may be a mistake.
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

/// Advice after the loss of an elastic job's control store; `within` if one of its nodes hosted it.
fn advice(within: bool) -> &'static str {
    if within {
        "; without it the job cannot go on, so let --rdzv-endpoint name a host outside of the job, and \
         start `launch store` or `runner store` there: then no node's loss ends it"
    } else {
        "; without it the job cannot go on"
    }
}

fn to_json<T: Serialize>(value: &T) -> Vec<u8> {
    serde_json::to_vec(value).expect("text, numbers and lists of them have a form in JSON")
}

fn from_json<'a, T: Deserialize<'a>>(what: &str, text: &'a [u8]) -> Result<T> {
    serde_json::from_slice(text).map_err(|error| {
        Error::Rendezvous(format!("{what}: another launcher says something else ({error})"))
    })
}

/// A wait longer than this is reported.
const LONG_WAIT: Duration = Duration::from_secs(10);
/// Longest single wait, between which signals are handled.
const SLICE: Duration = Duration::from_millis(500);
