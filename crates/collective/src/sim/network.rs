//! A network that is not there: what its links carry, who is where, and what goes wrong.

use std::time::Duration;

use crate::algo::{Costs, Layout, Link};
use crate::{Error, Rank, Result};

/// A network, the machines on it, and its faults.
///
/// A message of `n` bytes takes `latency + per_message + n * per_byte` of its [`Link`]. A rank
/// starts one message every `per_message`, and takes one in every `per_message`. The ranks of one
/// machine share its network interface, which carries one message at a time in each direction, in
/// the order in which they were started. The switch between machines is never the bottleneck and
/// drops nothing. Folding takes time, copying within a rank none.
#[derive(Clone, Debug, PartialEq)]
#[non_exhaustive]
pub struct Network {
    /// Between ranks of one machine; shared by nobody.
    pub within: Link,
    /// Between machines; shared by the ranks of a machine.
    pub between: Link,
    /// Seconds to fold one byte into others.
    pub fold_per_byte: f64,
    /// Which machine each rank is on.
    pub placement: Placement,
    /// What goes wrong.
    pub faults: Vec<Fault>,
    /// How long a rank waits in one round until it reports who is missing, in virtual time.
    pub timeout: Duration,
}

/// Which machine each rank is on.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Placement {
    /// So many ranks on each machine, in order; the last may have fewer.
    Blocks(usize),
    /// The machine of each rank, named by any numbers.
    Machines(Vec<usize>),
}

/// Something that goes wrong, at a time since the group was made.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Fault {
    /// A rank ends: from then on it starts no message.
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
        /// How many times slower.
        times: u32,
    },
    /// A message is lost and not sent again, and with it, as in any ordered stream, all that follow
    /// it from the one rank to the other.
    Loss {
        /// Its sender.
        from: Rank,
        /// Its receiver.
        to: Rank,
        /// Which of the messages from the one to the other within an operation, from 0.
        message: u64,
    },
}

impl Default for Network {
    /// One rank on a machine, 7 us and 3 GB/s between machines, 0.5 us and 10 GB/s within one,
    /// 10 GB/s to fold; no faults, and a timeout of 10 minutes.
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
    /// Places ranks on machines.
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

    /// How long `world_size` ranks take to find that all have come: `ceil(lg p)` messages of no
    /// bytes, to partners at distances 1, 2, 4, ... and between machines if there are several.
    pub fn meeting(&self, world_size: usize) -> Duration {
        let alone = matches!(self.placement, Placement::Blocks(ranks) if ranks >= world_size);
        let link = if alone { self.within } else { self.between };
        let steps = world_size.max(1).next_power_of_two().trailing_zeros();
        Duration::from_secs_f64(f64::from(steps) * (link.latency + link.per_message))
    }

    pub(super) fn costs(&self) -> Costs {
        let Self { within, between, fold_per_byte, .. } = *self;
        Costs { within, between, fold_per_byte, ..Costs::default() }
    }

    /// Checks the figures against a number of ranks.
    pub(super) fn layout(&self, world: usize) -> Result<Layout> {
        let fail = |text: String| Err(Error::InvalidArgument(text));
        if !(1..=MAX_RANKS).contains(&world) {
            return fail(format!("a simulated group has 1 to {MAX_RANKS} ranks, not {world}"));
        }
        let Self { within, between, fold_per_byte, .. } = self;
        let link = |link: &Link| [link.latency, link.per_message, link.per_byte];
        let figures = [link(within), link(between), [*fold_per_byte, 0.0, 0.0]];
        if !figures.as_flattened().iter().all(|&seconds| (0.0..=1.0).contains(&seconds)) {
            return fail("the figures of a network are seconds from 0 to 1".into());
        }
        for fault in &self.faults {
            let ranks = match *fault {
                Fault::Death { rank, .. } => [rank, rank],
                Fault::Slow { times: 0, .. } => return fail("an interface 0 times slower".into()),
                Fault::Slow { rank, .. } => [rank, rank],
                Fault::Loss { from, to, .. } => [from, to],
            };
            if let Some(rank) = ranks.into_iter().find(|&rank| rank >= world) {
                return fail(format!("a fault of rank {rank} among {world} ranks"));
            }
        }
        match &self.placement {
            Placement::Blocks(0) => fail("machines of 0 ranks".into()),
            Placement::Blocks(ranks) => Ok(Layout::blocks(world, *ranks)),
            Placement::Machines(machines) if machines.len() == world => Ok(Layout::new(machines)),
            Placement::Machines(machines) => {
                fail(format!("machines are given for {} of {world} ranks", machines.len()))
            }
        }
    }
}

/// The most ranks; the engine keeps a number for every pair of them.
const MAX_RANKS: usize = 8192;
