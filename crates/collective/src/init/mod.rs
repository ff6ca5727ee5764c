//! Rendezvous: makes a process group from the launcher's environment.
//!
//! [`Topology::from_env`] reads rank, world size and addresses from the environment, without side
//! effects, and records the source of each value; [`init_process_group`] joins the ranks at the
//! store named by the topology.
//!
//! The launcher hosts the store if it sets `TORCHELASTIC_USE_AGENT_STORE=True`; otherwise rank 0
//! does, until its process ends. The keys of one group have the prefix `/<run>/<attempt>/<group>/`,
//! so they never collide with another group's or an earlier attempt's.
//!
//! Invariant: a `Topology` is consistent: `rank < world_size` and `local_rank < local_world_size <=
//! world_size` where they are known; a violation is an error that names the variable.

mod device;
mod mpi;
mod nodelist;
mod pytorch;
mod reader;
mod slurm;
mod topology;

use std::collections::HashMap;
use std::net::ToSocketAddrs;
use std::sync::Arc;
use std::time::Duration;

use parking_lot::Mutex;

pub use self::device::Accelerator;
pub use self::topology::{Fact, Launcher, Topology};
use crate::backend::rendezvous::machine;
use crate::store::tcp::server::Endpoint;
use crate::store::{Store, exchange};
use crate::{
    Error, GroupOptions, MemoryStore, PrefixStore, ProcessGroup, Rank, Result, TcpStore,
    TcpStoreServer,
};

/// Joins the ranks that the launcher started, with the default options; without a launcher, returns
/// a group of this process alone. Short for [`Topology::from_env`] with [`std::env::var`], then
/// [`init_process_group`].
///
/// Every rank must call it; blocks until all have.
///
/// # Errors
///
/// Those of [`Topology::from_env`] and of [`init_process_group`].
///
/// # Examples
///
/// ```
/// use collective::ReduceOp;
///
/// let group = collective::init()?;
/// let mut x = [1.0_f32];
/// group.all_reduce(&mut x, ReduceOp::Sum)?;
/// assert_eq!(x, [group.world_size() as f32]);
/// # Ok::<(), collective::Error>(())
/// ```
pub fn init() -> Result<ProcessGroup> {
    init_with(GroupOptions::default())
}

/// As [`init`](fn@init), with these options.
///
/// # Errors
///
/// As [`init`](fn@init).
pub fn init_with(options: GroupOptions) -> Result<ProcessGroup> {
    let topology = Topology::from_env(|name| std::env::var(name).ok())?;
    init_process_group(&topology, options)
}

/// Joins the ranks of `topology` and returns this rank's group. [`Topology::from_env`] lists the
/// variables for scripts that start ranks themselves.
///
/// Every rank must call it, with the same `options`; blocks until all have. A rank that forms
/// several groups gives each its own [name](GroupOptions::name). A single process needs no store
/// and does not block.
///
/// # Errors
///
/// [`Error::Rendezvous`], with address and port, if the store is unreachable, or with the ranks
/// that did not join within the timeout; the errors of [`ProcessGroup::from_store`].
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
    let store = store(topology, &options.name, options.timeout)?;
    // When this returns, every rank has read everything it needs: rank 0 may end, and the store
    // with it. Only splits and rebuilds use the store again.
    ProcessGroup::from_store(Arc::new(store), rank, world_size, options).map_err(
        |error| match error {
            Error::Timeout { op, missing, waited } => Error::Rendezvous {
                addr: topology.master(),
                reason: format!("{op}: {}", missing_ranks(&missing, world_size, waited)),
            },
            other => other,
        },
    )
}

impl Topology {
    /// Determines [`local_rank`](Self::local_rank) and [`local_world_size`](Self::local_world_size)
    /// if the launcher does not set both: the ranks exchange their hosts through the store, and
    /// each host's ranks are numbered in rank order. Ranks in different PID namespaces count as
    /// being on different hosts. Values set by the launcher are kept.
    ///
    /// Every rank must call it, before or after [`init_process_group`]. Blocks until all have, for
    /// at most `timeout`. A rank that already knows both values returns at once.
    ///
    /// # Errors
    ///
    /// The errors of [`TcpStore::connect`](crate::TcpStore::connect) and
    /// [`store::exchange`](fn@crate::store::exchange);
    /// [`Error::InvalidArgument`] if the result contradicts the launcher's values.
    pub fn locate(&mut self, timeout: Duration) -> Result<()> {
        if self.local_rank.is_some() && self.local_world_size.is_some() {
            return Ok(());
        }
        let store = store(self, "locate", timeout)?;
        // A counter in the key, because a process may call this more than once.
        let time = store.add(&format!("times/{}", self.rank), 1)?;
        let (key, own) = (time.to_string(), machine()?);
        let all = exchange(&store, &key, self.rank, self.world_size, own.as_bytes(), timeout)?;
        let here = |ranks: &[Vec<u8>]| ranks.iter().filter(|at| **at == own.as_bytes()).count();
        let mut note = |name, value: usize| {
            let origin = "counted through the store";
            self.facts.push(Fact { name, value: value.to_string(), origin });
            value
        };
        let local_rank =
            self.local_rank.unwrap_or_else(|| note("local_rank", here(&all[..self.rank])));
        let local_size =
            self.local_world_size.unwrap_or_else(|| note("local_world_size", here(&all)));
        reader::check_below(("LOCAL_RANK", local_rank), ("LOCAL_WORLD_SIZE", local_size))?;
        (self.local_rank, self.local_world_size) = (Some(local_rank), Some(local_size));
        self.devices.note(self.local_rank, &mut self.facts);
        Ok(())
    }
}

/// Connects to the job's store, with the prefix `name`; rank 0 also serves it, unless the launcher
/// does.
fn store(topology: &Topology, name: &str, timeout: Duration) -> Result<PrefixStore> {
    if topology.rank == 0 && !topology.agent_store {
        host(topology)?;
    }
    let store = TcpStore::connect(&topology.master_addr, topology.master_port, timeout)?;
    let prefix = format!("{}/{}/{name}", topology.run_id, topology.restart_count);
    Ok(PrefixStore::new(prefix, Arc::new(store)))
}

fn missing_ranks(missing: &[Rank], world_size: usize, waited: Duration) -> String {
    let list: Vec<_> = missing.iter().map(ToString::to_string).collect();
    format!(
        "after {waited:.1?} still missing of {world_size} ranks: {}; see their own output for \
         the reason, and check that each process has its own RANK",
        list.join(", ")
    )
}

/// Hosts the store at the master's port until the process ends; once per port.
fn host(topology: &Topology) -> Result<()> {
    static HOSTED: Mutex<Option<HashMap<u16, TcpStoreServer>>> = Mutex::new(None);
    let mut hosted = HOSTED.lock();
    let hosted = hosted.get_or_insert_default();
    if hosted.contains_key(&topology.master_port) {
        return Ok(());
    }
    let server = bind(topology)?;
    hosted.insert(topology.master_port, server);
    Ok(())
}

/// Listens where the ranks look for the store.
fn bind(topology: &Topology) -> Result<TcpStoreServer> {
    let (host, port) = (&topology.master_addr[..], topology.master_port);
    let addrs = (host, port).to_socket_addrs().into_iter().flatten();
    let addrs = &addrs.map(|addr| addr.ip()).collect::<Vec<_>>()[..];
    let one_host = topology.local_world_size == Some(topology.world_size);
    TcpStoreServer::bind_endpoint(&Endpoint { host, port, addrs, one_host }, Vec::new())
}

#[cfg(test)]
mod tests {
    use super::*;

    pub(super) const STATIC: &str =
        include_str!("../../tests/vectors/launch-env/torchrun-2.11-static-rank1.txt");
    pub(super) const STANDALONE: &str =
        include_str!("../../tests/vectors/launch-env/torchrun-2.11-standalone-rank1.txt");
    pub(super) const SLURM: &str =
        include_str!("../../tests/vectors/launch-env/slurm-22.05-procid3.txt");
    pub(super) const OPEN_MPI: &str =
        include_str!("../../tests/vectors/launch-env/openmpi-4.1.4-rank3.txt");
    pub(super) const MPICH: &str =
        include_str!("../../tests/vectors/launch-env/mpich-4.0.2-rank3.txt");

    /// Reads a topology from the variables in `text`, one per line. Later lines override earlier
    /// ones, and `NAME` alone removes a variable.
    pub(super) fn from(text: &str) -> Result<Topology> {
        Topology::from_env(lookup(text))
    }

    pub(super) fn from_launcher(launcher: Launcher, text: &str) -> Result<Topology> {
        Topology::from_launcher(launcher, lookup(text))
    }

    #[test]
    fn a_store_for_several_hosts_is_reached_over_ipv4_and_ipv6() {
        let mut topology = topology(0, 1, false);
        topology.master_port = 0;
        topology.master_addr = "no-such-host.invalid".into();
        let server = bind(&topology).unwrap();
        let timeout = Duration::from_secs(20);
        for host in ["127.0.0.1", "::1"] {
            if std::net::TcpListener::bind((host, 0)).is_ok() {
                TcpStore::connect(host, server.port(), timeout).unwrap();
            }
        }
    }

    fn lookup(text: &str) -> impl Fn(&str) -> Option<String> {
        let mut variables = HashMap::new();
        for line in text.lines() {
            match line.split_once('=') {
                Some((name, value)) => variables.insert(name.to_owned(), value.to_owned()),
                None => variables.remove(line),
            };
        }
        move |name| variables.get(name).cloned()
    }

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

    /// Runs two ranks as threads; the shared-memory backend supports that.
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
        assert!(Store::num_keys(&store).unwrap() > 0);
    }

    #[test]
    fn the_error_names_a_rank_that_does_not_join() {
        let server = TcpStoreServer::bind(([127, 0, 0, 1], 0).into()).unwrap();
        let options = options().with_timeout(Duration::from_millis(200));
        let topology = topology(0, server.port(), true);
        let error = init_process_group(&topology, options).unwrap_err();
        assert!(matches!(error, Error::Rendezvous { .. }));
        let text = error.to_string();
        assert!(text.contains(&topology.master()) && text.contains("of 2 ranks: 1;"), "{text}");
    }

    #[test]
    fn the_error_names_an_unreachable_store() {
        let topology = topology(1, free_port(), true);
        let options = options().with_timeout(Duration::from_millis(200));
        let error = init_process_group(&topology, options).unwrap_err().to_string();
        assert!(error.contains(&topology.master()), "{error}");
    }

    #[test]
    fn a_single_process_forms_a_group_of_one() {
        let topology = Topology::from_env(|_| None).unwrap();
        let group = init_process_group(&topology, GroupOptions::default()).unwrap();
        assert_eq!((group.rank(), group.world_size()), (0, 1));
    }
}
