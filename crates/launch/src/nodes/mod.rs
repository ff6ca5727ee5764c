//! The nodes of a job: who they are, how their launchers meet, and what they tell one another.
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

use collective::{Store, TcpStore};
use serde::{Deserialize, Serialize};

use self::elastic::Elastic;
use self::fixed::Fixed;
use self::round::{Round, Watch};
use super::LaunchOptions;
use super::job::Job;
use super::signals::Ear;
use super::summary::Verdict;
use crate::{Error, Result};

/// The nodes of a job.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub enum Nodes {
    /// This one.
    #[default]
    One,
    /// As many as are said, each with its own rank, at a store that node 0 hosts. One of them may be
    /// torchrun's agent (`--nnodes N --node-rank I --master-addr A --master-port P`).
    Fixed {
        /// How many.
        count: usize,
        /// Which of them this one is.
        rank: usize,
        /// Name or address of node 0, as the others reach it.
        master_addr: String,
        /// The port that node 0 listens on.
        master_port: u16,
    },
    /// As many as come, from `min` to `max`; the job starts again with fewer or more, and `runner train
    /// --resume` then goes on from its last checkpoint with as many ranks as there are. Python's agents
    /// cannot take part.
    Elastic {
        /// Fewest nodes of an attempt.
        min: usize,
        /// Most nodes of an attempt.
        max: usize,
        /// Name or address of the node that hosts the control store, the same on all nodes.
        host: String,
        /// The port there.
        port: u16,
    },
}

/// How long other nodes are waited for; the defaults are torchrun's.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Patience {
    /// For all nodes, or the fewest of an elastic job, to come: 600 s unless set.
    pub join: Duration,
    /// For more nodes of an elastic job, once there are enough: 30 s unless set.
    pub last_call: Duration,
    /// Between two signs of life: 5 s unless set.
    pub heartbeat: Duration,
    /// So many missed signs of life mean death: 3 unless set.
    pub beats: u32,
}

impl Default for Patience {
    fn default() -> Self {
        Self {
            join: Duration::from_secs(600),
            last_call: Duration::from_secs(30),
            heartbeat: Duration::from_secs(5),
            beats: 3,
        }
    }
}

impl Patience {
    /// Without a sign of life for this long a node is lost.
    fn lost_after(&self) -> Duration {
        self.heartbeat * self.beats
    }
}

/// Who the ranks of this node are in one attempt.
#[derive(Clone, Debug, Default)]
pub(super) struct Place {
    /// Number of the attempt, counting those that ended because nodes came or went.
    pub(super) round: u32,
    /// Restarts after failures.
    pub(super) restart_count: u32,
    pub(super) node: usize,
    pub(super) nodes: usize,
    pub(super) first_rank: usize,
    pub(super) world_size: usize,
    pub(super) first_role_rank: usize,
    pub(super) role_world_size: usize,
    /// Where the ranks' store is.
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
    /// This node wants to take part.
    Joined { node: String },
    /// This node's launcher was told to end.
    Left { node: usize },
    /// This node no longer answers.
    Lost { node: String },
}

/// All nodes, seen from this one.
pub(super) enum Team {
    Fixed(Box<Fixed>),
    Elastic(Box<Elastic>),
}

impl Team {
    /// Hosts the control store, if it is for this node to do so.
    pub(super) fn new(options: &LaunchOptions) -> Result<Self> {
        let fixed = |place, addr, port| -> Result<Self> {
            Ok(Self::Fixed(Box::new(Fixed::new(options, place, addr, port)?)))
        };
        match options.nodes.clone() {
            Nodes::One => fixed((0, 1), "127.0.0.1".to_owned(), 0),
            Nodes::Fixed { count, rank, master_addr, master_port } => {
                fixed((rank, count), master_addr, master_port)
            }
            Nodes::Elastic { min, max, host, port } => {
                Ok(Self::Elastic(Box::new(Elastic::new(options, (min, max), host, port)?)))
            }
        }
    }

    /// The place of this node in the next attempt, once all nodes are there; or the exit code, if a signal or the
    /// end of the job came first.
    pub(super) fn next(&mut self, ear: &mut Ear) -> Result<ControlFlow<i32, Place>> {
        match self {
            Self::Fixed(fixed) => fixed.next(ear),
            Self::Elastic(elastic) => elastic.next(ear),
        }
    }

    /// The attempt, if other nodes take part in it or may join.
    fn round(&self) -> Option<&Arc<Round>> {
        match self {
            Self::Fixed(fixed) => fixed.round.as_ref().filter(|round| round.members.len() > 1),
            Self::Elastic(elastic) => elastic.round.as_ref(),
        }
    }

    /// Tells `job` what the other nodes say, and them that this one lives, until dropped.
    pub(super) fn watch(&self, job: &Job) -> Result<Option<Watch>> {
        let watch = |round: &Arc<Round>| Watch::start(round, job.ear.attempt, job.sender.clone());
        self.round().map(watch).transpose()
    }

    /// Ends the attempt on all other nodes, without waiting for them.
    pub(super) fn tell(&self, end: &End) {
        if let Some(round) = self.round() {
            round.tell_apart(end);
        }
    }

    /// Tells the other nodes that this one cannot go on.
    pub(super) fn give_up(&self) {
        if let Some(round) = self.round() {
            // Who cannot be told notices that this node no longer beats.
            drop(round.tell(&End::Left { node: round.node }));
        }
    }

    /// What all nodes make of the attempt that has ended here.
    pub(super) fn settle(&mut self, job: &mut Job) -> Result<Verdict> {
        match self {
            Self::Fixed(fixed) => Ok(fixed.settle(job)),
            Self::Elastic(elastic) => elastic.settle(job),
        }
    }

    /// Number of restarts after failures.
    pub(super) fn restarts(&self) -> u32 {
        match self {
            Self::Fixed(fixed) => fixed.attempt,
            Self::Elastic(elastic) => elastic.restarts(),
        }
    }
}

/// The ranks of a node with role and number of ranks of each: its first rank, the world's size, and the same of
/// its role. As torchrun's agents write it.
fn assign(nodes: &[(&str, usize)], node: usize) -> [usize; 4] {
    let size = |nodes: &[(&str, usize)], role: Option<&str>| -> usize {
        let same = nodes.iter().filter(|node| role.is_none_or(|role| role == node.0));
        same.map(|node| node.1).sum()
    };
    let (before, role) = (&nodes[..node], Some(nodes[node].0));
    [size(before, None), size(nodes, None), size(before, role), size(nodes, role)]
}

/// Connects to the control store, unless a signal comes first (`None`).
fn connect(
    (host, port): (&str, u16),
    patience: &Patience,
    ear: &mut Ear,
    who: &str,
) -> Result<Option<TcpStore>> {
    let start = Instant::now();
    let mut remark = Remark::new();
    loop {
        // Short, so that a signal is heard.
        match TcpStore::connect(host, port, SLICE) {
            Ok(_) => return Ok(Some(TcpStore::connect(host, port, patience.heartbeat)?)),
            Err(error) => {
                let waited = start.elapsed();
                if waited >= patience.join {
                    let why = format!("{who}: nobody to meet after {waited:.1?}: {error}");
                    return Err(Error::Rendezvous(why));
                }
                let most = patience.join;
                remark.say_once(ear, || format!("{who}: waiting for up to {most:?}: {error}"));
            }
        }
        if ear.listen() {
            return Ok(None);
        }
    }
}

/// Waits for `keys`; false if a signal or the deadline came first.
fn wait(store: &dyn Store, keys: &[&str], deadline: Instant, ear: &mut Ear) -> Result<bool> {
    loop {
        let left = deadline.saturating_duration_since(Instant::now());
        match store.wait(keys, left.min(SLICE)) {
            Ok(()) => return Ok(true),
            Err(collective::Error::KeyTimeout { .. }) if ear.listen() || left.is_zero() => {
                return Ok(false);
            }
            Err(collective::Error::KeyTimeout { .. }) => {}
            Err(error) => return Err(error.into()),
        }
    }
}

/// What is said of a wait that takes long, once: a mistake may be behind it.
struct Remark(Option<Instant>);

impl Remark {
    fn new() -> Self {
        Self(Some(Instant::now() + LONG_WAIT))
    }

    fn say_once(&mut self, ear: &Ear, text: impl FnOnce() -> String) {
        if self.0.take_if(|due| *due <= Instant::now()).is_some() {
            ear.say(&format!("launch: {}\n", text()));
        }
    }
}

/// What the loss of an elastic job's control store means; `within` if a node hosts it.
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

/// A wait that people hear of.
const LONG_WAIT: Duration = Duration::from_secs(10);
/// The longest single wait, between which signals are heard.
const SLICE: Duration = Duration::from_millis(500);
