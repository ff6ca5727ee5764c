//! Description of a simulated network: link costs, placement of ranks, and faults.

use std::time::Duration;

use crate::algo::{Costs, Layout, Link};
use crate::{Error, Rank, Result};

/// A network, the machines on it, and its faults.
///
/// A message of `n` bytes takes `latency + per_message + n * per_byte` of its [`Link`]. A rank
/// starts one message per `per_message`, and receives one per `per_message`. The ranks of one
/// machine share its network interface, which carries one message at a time in each direction, in
/// the order in which they were started. The switch between machines is never the bottleneck and
/// drops nothing. Folds take time; copies within a rank do not.
#[derive(Clone, Debug, PartialEq)]
#[non_exhaustive]
pub struct Network {
    /// Link between two ranks of one machine; not shared.
    pub within: Link,
    /// Link between machines; shared by the ranks of a machine.
    pub between: Link,
    /// Seconds to fold one byte into others.
    pub fold_per_byte: f64,
    /// The machine of each rank.
    pub placement: Placement,
    /// Simulated faults.
    pub faults: Vec<Fault>,
    /// Virtual time that a rank waits in one round before it reports the missing ranks.
    pub timeout: Duration,
}

/// The machine of each rank.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Placement {
    /// This number of ranks on each machine, in order; the last machine may have fewer.
    Blocks(usize),
    /// For each rank, any number that identifies its machine.
    Machines(Vec<usize>),
}

/// A simulated fault; times count from the creation of the group.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Fault {
    /// A rank dies: from then on it starts no message.
    Death {
        /// The rank.
        rank: Rank,
        /// When.
        at: Duration,
    },
    /// A machine's network interface becomes slower, in both directions.
    Slow {
        /// A rank on the machine.
        rank: Rank,
        /// When.
        at: Duration,
        /// Factor by which it becomes slower.
        times: u32,
    },
    /// A message is lost and not retransmitted. As in any ordered stream, all later messages
    /// between the same ranks are lost with it.
    Loss {
        /// The sender.
        from: Rank,
        /// The receiver.
        to: Rank,
        /// Index of the message among those from `from` to `to` within an operation, from 0.
        message: u64,
    },
}

impl Default for Network {
    /// One rank per machine, 7 us and 3 GB/s between machines, 0.5 us and 10 GB/s within one,
    /// 10 GB/s for folds; no faults, and a timeout of 10 minutes.
    fn default() -> Self {
        let Costs { within, between, fold_per_byte, .. } = Costs::default();
        Self {
            within,
            between,
            fold_per_byte,
            placement: Placement::Blocks(1),
            faults: Vec::new(),
            timeout: Duration::from_secs(600),
        }
    }
}

impl Network {
    /// Sets the machine of each rank.
    pub fn with_placement(mut self, placement: Placement) -> Self {
        self.placement = placement;
        self
    }

    /// Adds a fault.
    pub fn with_fault(mut self, fault: Fault) -> Self {
        self.faults.push(fault);
        self
    }

    /// Sets how long a rank waits in one round.
    pub fn with_timeout(mut self, timeout: Duration) -> Self {
        self.timeout = timeout;
        self
    }

    /// Returns the time of a barrier of `world_size` ranks: `ceil(lg p)` empty messages, to
    /// partners at distances 1, 2, 4, ..., between machines if there are several.
    pub fn meeting(&self, world_size: usize) -> Duration {
        let alone = match &self.placement {
            Placement::Blocks(ranks) => *ranks >= world_size,
            Placement::Machines(machines) => machines.iter().all(|machine| *machine == machines[0]),
        };
        let link = if alone { self.within } else { self.between };
        let steps = world_size.max(1).next_power_of_two().trailing_zeros();
        Duration::from_secs_f64(f64::from(steps) * (link.latency + link.per_message))
    }

    pub(super) fn costs(&self) -> Costs {
        let Self { within, between, fold_per_byte, .. } = *self;
        Costs { within, between, fold_per_byte, ..Costs::default() }
    }

    /// Validates the network for `world` ranks.
    pub(super) fn layout(&self, world: usize) -> Result<Layout> {
        let fail = |text: String| Err(Error::InvalidArgument(text));
        if !(1..=MAX_RANKS).contains(&world) {
            return fail(format!("a simulated group has 1 to {MAX_RANKS} ranks, not {world}"));
        }
        let Self { within, between, fold_per_byte, .. } = self;
        let link = |link: &Link| [link.latency, link.per_message, link.per_byte];
        let figures = [link(within), link(between), [*fold_per_byte, 0.0, 0.0]];
        if !figures.as_flattened().iter().all(|&seconds| (0.0..=1.0).contains(&seconds)) {
            return fail("a network's costs must be from 0 to 1 seconds".into());
        }
        for fault in &self.faults {
            let ranks = match *fault {
                Fault::Death { rank, .. } => [rank, rank],
                Fault::Slow { times: 0, .. } => return fail("`Fault::Slow` with `times` 0".into()),
                Fault::Slow { rank, .. } => [rank, rank],
                Fault::Loss { from, to, .. } => [from, to],
            };
            if let Some(rank) = ranks.into_iter().find(|&rank| rank >= world) {
                return fail(format!("a fault names rank {rank}, the group has {world} ranks"));
            }
        }
        match &self.placement {
            Placement::Blocks(0) => fail("`Placement::Blocks` with 0 ranks".into()),
            Placement::Blocks(ranks) => Ok(Layout::blocks(world, *ranks)),
            Placement::Machines(machines) if machines.len() == world => Ok(Layout::new(machines)),
            Placement::Machines(machines) => {
                fail(format!("`Placement` has {} ranks, the group {world}", machines.len()))
            }
        }
    }
}

/// Largest number of ranks; the engine keeps a counter for every pair.
const MAX_RANKS: usize = 8192;
