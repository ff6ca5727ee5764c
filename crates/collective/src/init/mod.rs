//! Rendezvous: from what the launcher said to a process group.
//!
//! [`Topology::from_env`] reads who this process is, purely, and remembers where each fact came
//! from; [`init_process_group`] brings the ranks together at the store the topology names.
//!
//! Who hosts the store: the launcher, if it says `TORCHELASTIC_USE_AGENT_STORE=True`; otherwise
//! rank 0 does, for the life of its process. The keys of one group lie under
//! `/<run>/<attempt>/<group>/`, so neither another group nor an earlier attempt at the same store
//! is met.
//!
//! Invariant: a `Topology` is consistent: `rank < world_size`, `local_rank < local_world_size <=
//! world_size`; whatever is not was refused by name.

mod pytorch;

use std::collections::HashMap;
use std::fmt;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, ToSocketAddrs};
use std::sync::Arc;
use std::time::Duration;

use parking_lot::Mutex;

use crate::{
    Error, GroupOptions, MemoryStore, PrefixStore, ProcessGroup, Rank, Result, TcpStore,
    TcpStoreServer,
};

/// Who this process is among the ranks of a job, and where they meet.
///
/// Displays as one line that also says where each fact came from.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Topology {
    /// This process among all, `0..world_size`.
    pub rank: Rank,
    /// Number of processes.
    pub world_size: usize,
    /// This process among those of its host; which device is its own.
    pub local_rank: usize,
    /// Number of processes of this host.
    pub local_world_size: usize,
    /// The host of the store, a name or an address.
    pub master_addr: String,
    /// The store's port; 0 for a single process, which needs no store.
    pub master_port: u16,
    /// Whether the launcher hosts the store; if not, rank 0 does.
    pub agent_store: bool,
    /// The run's name.
    pub run_id: String,
    /// How often the launcher has restarted the ranks.
    pub restart_count: u64,
    /// Each of these with where it came from.
    pub facts: Vec<Fact>,
}

/// One fact of a [`Topology`] and where it came from.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Fact {
    /// The field's name.
    pub name: &'static str,
    /// Its value.
    pub value: String,
    /// Where it came from.
    pub origin: Origin,
}

/// Where a fact came from.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Origin {
    /// The environment variable of this name.
    Variable(&'static str),
    /// No variable; the reason why this value was taken.
    Default(&'static str),
}

impl Topology {
    /// Reads the environment that `torchrun`, `runner launch` and most cluster operators set.
    /// `lookup` is asked for each variable; `|name| std::env::var(name).ok()` reads the real ones.
    /// Without any of the variables, this is a single process.
    ///
    /// # Errors
    ///
    /// [`Error::InvalidArgument`] naming the variable that is missing, cannot be read, or
    /// contradicts another; [`Error::Unsupported`] if the process was started as one of several by
    /// Slurm or MPI without these variables.
    ///
    /// # Examples
    ///
    /// ```
    /// use collective::Topology;
    ///
    /// let alone = Topology::from_env(|_| None)?;
    /// assert_eq!((alone.rank, alone.world_size), (0, 1));
    /// # Ok::<(), collective::Error>(())
    /// ```
    pub fn from_env(lookup: impl Fn(&str) -> Option<String>) -> Result<Self> {
        pytorch::read(&lookup)
    }

    /// Where the store is, `host:port`.
    #[must_use]
    pub fn master(&self) -> String {
        match self.master_addr.contains(':') {
            true => format!("[{}]:{}", self.master_addr, self.master_port),
            false => format!("{}:{}", self.master_addr, self.master_port),
        }
    }
}

impl fmt::Display for Topology {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (at, Fact { name, value, origin }) in self.facts.iter().enumerate() {
            let comma = if at == 0 { "" } else { ", " };
            write!(f, "{comma}{name} {value} ({origin})")?;
        }
        Ok(())
    }
}

impl fmt::Display for Origin {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Variable(name) => f.write_str(name),
            Self::Default(reason) => f.write_str(reason),
        }
    }
}

/// Brings the ranks of `topology` together and returns this rank's place in their group.
///
/// Every rank must call it, with the same `options`; it blocks until all have. A rank that
/// forms several groups gives each its own [name](GroupOptions::name). A single process needs no store and waits
/// for nobody.
///
/// # Errors
///
/// [`Error::Rendezvous`], naming address and port, if the store is not reached, or the ranks that
/// did not come within the timeout; those of [`ProcessGroup::from_store`].
///
/// # Examples
///
/// ```
/// use collective::{GroupOptions, ReduceOp, Topology, init_process_group};
///
/// let topology = Topology::from_env(|name| std::env::var(name).ok())?;
/// let group = init_process_group(&topology, GroupOptions::default())?;
/// let mut x = [1.0_f32];
/// group.all_reduce(&mut x, ReduceOp::Sum)?;
/// assert_eq!(x, [group.world_size() as f32]);
/// # Ok::<(), collective::Error>(())
/// ```
#[doc(alias = "init_dist")]
pub fn init_process_group(topology: &Topology, options: GroupOptions) -> Result<ProcessGroup> {
    let Topology { rank, world_size, .. } = *topology;
    if world_size == 1 {
        return ProcessGroup::from_store(Arc::new(MemoryStore::new()), rank, 1, options);
    }
    if rank == 0 && !topology.agent_store {
        host(topology)?;
    }
    let timeout = options.timeout;
    let store = TcpStore::connect(&topology.master_addr, topology.master_port, timeout)?;
    let prefix = format!("{}/{}/{}", topology.run_id, topology.restart_count, options.name);
    let store = PrefixStore::new(prefix, Arc::new(store));
    // When this returns, every rank has read all it needs: rank 0 may end, and the store with it.
    // Only splits and rebuilds ask the store again.
    ProcessGroup::from_store(Arc::new(store), rank, world_size, options).map_err(
        |error| match error {
            Error::Timeout { missing, waited, .. } => Error::Rendezvous {
                addr: topology.master(),
                reason: missing_ranks(&missing, world_size, waited),
            },
            other => other,
        },
    )
}

fn missing_ranks(missing: &[Rank], world_size: usize, waited: Duration) -> String {
    let list: Vec<_> = missing.iter().map(ToString::to_string).collect();
    format!(
        "after {waited:.1?} still missing of {world_size} ranks: {}; see their own output for why \
         they did not come, and check that each process has its own RANK",
        list.join(", ")
    )
}

/// Hosts the store at the master's port, once for each port, until the process ends.
fn host(topology: &Topology) -> Result<()> {
    static HOSTED: Mutex<Option<HashMap<u16, TcpStoreServer>>> = Mutex::new(None);
    let mut hosted = HOSTED.lock();
    let hosted = hosted.get_or_insert_default();
    if hosted.contains_key(&topology.master_port) {
        return Ok(());
    }
    let server = bind(&topology.master_addr, topology.master_port)?;
    hosted.insert(topology.master_port, server);
    Ok(())
}

/// A job of one host is served on its loopback address only; otherwise on all addresses, because
/// the name others know this host by may lead to any of them.
fn bind(addr: &str, port: u16) -> Result<TcpStoreServer> {
    let loopback = (addr, port).to_socket_addrs().ok().and_then(|mut all| all.find(is_loopback));
    if let Some(loopback) = loopback {
        return TcpStoreServer::bind(loopback);
    }
    let any = |ip: IpAddr| TcpStoreServer::bind(SocketAddr::new(ip, port));
    any(Ipv6Addr::UNSPECIFIED.into()).or_else(|_| any(Ipv4Addr::UNSPECIFIED.into()))
}

fn is_loopback(addr: &SocketAddr) -> bool {
    addr.ip().is_loopback()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn topology(rank: usize, port: u16, agent_store: bool) -> Topology {
        Topology::from_env(|name| {
            let value = match name {
                "RANK" | "LOCAL_RANK" => rank.to_string(),
                "WORLD_SIZE" => "2".to_owned(),
                "MASTER_ADDR" => "127.0.0.1".to_owned(),
                "MASTER_PORT" => port.to_string(),
                "TORCHELASTIC_USE_AGENT_STORE" if agent_store => "True".to_owned(),
                _ => return None,
            };
            Some(value)
        })
        .unwrap()
    }

    fn free_port() -> u16 {
        std::net::TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port()
    }

    fn options() -> GroupOptions {
        GroupOptions::default().with_timeout(Duration::from_secs(20))
    }

    /// Two ranks as threads; the shared-memory group does not mind.
    fn both(port: u16, agent_store: bool, options: &GroupOptions) {
        std::thread::scope(|scope| {
            for rank in 0..2 {
                scope.spawn(move || {
                    let topology = topology(rank, port, agent_store);
                    let group = init_process_group(&topology, options.clone()).unwrap();
                    let mut x = [rank as f32];
                    group.all_reduce(&mut x, crate::ReduceOp::Sum).unwrap();
                    assert_eq!(x, [1.0]);
                });
            }
        });
    }

    #[test]
    fn rank_0_hosts_the_store_for_several_groups() {
        let port = free_port();
        both(port, false, &options());
        both(port, false, &options().with_name("second"));
        both(port, false, &options());
    }

    #[test]
    fn the_launcher_hosts_the_store() {
        let server = TcpStoreServer::bind(([127, 0, 0, 1], 0).into()).unwrap();
        both(server.port(), true, &options());
        let store = TcpStore::connect("127.0.0.1", server.port(), Duration::from_secs(5)).unwrap();
        assert!(crate::Store::num_keys(&store).unwrap() > 0);
    }

    #[test]
    fn a_rank_that_does_not_come_is_named() {
        let server = TcpStoreServer::bind(([127, 0, 0, 1], 0).into()).unwrap();
        let options = options().with_timeout(Duration::from_millis(200));
        let topology = topology(0, server.port(), true);
        let error = init_process_group(&topology, options).unwrap_err();
        assert!(matches!(error, Error::Rendezvous { .. }));
        let text = error.to_string();
        assert!(text.contains(&topology.master()) && text.contains("of 2 ranks: 1;"), "{text}");
    }

    #[test]
    fn a_store_that_is_not_there_is_named() {
        let topology = topology(1, free_port(), true);
        let options = options().with_timeout(Duration::from_millis(200));
        let error = init_process_group(&topology, options).unwrap_err().to_string();
        assert!(error.contains(&topology.master()), "{error}");
    }

    #[test]
    fn a_single_process_is_a_group_of_one() {
        let topology = Topology::from_env(|_| None).unwrap();
        let group = init_process_group(&topology, GroupOptions::default()).unwrap();
        assert_eq!((group.rank(), group.world_size()), (0, 1));
    }
}
