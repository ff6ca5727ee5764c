//! Nodes with given ranks, whose control store is on node 0: torchrun's static rendezvous.
//!
//! The first attempt uses torchrun's keys, and its ranks use the control store, so that any node
//! can run torchrun's agent: every launcher writes its number of ranks
//! (`torchelastic/role_info/<node>`), node 0 assigns the ranks
//! (`torchelastic/assigned_ranks/<node>`), and launchers that succeed wait for the others
//! (`torchelastic/agent/terminal_state`). A launcher of this crate also writes
//! `launch/agent/<node>`. If all launchers are of this crate, they monitor each other
//! ([`Round`](super::round::Round)), and each further attempt has a new store. With a torchrun
//! agent, each node decides for itself, as torchrun does; the node with the store detects the end
//! of an agent by its closed connection.

use std::net::IpAddr;
use std::ops::ControlFlow::{self, Break, Continue};
use std::sync::Arc;
use std::time::{Duration, Instant};

use collective::store::tcp::state::Presence;
use collective::store::{Endpoint, PrefixStore, TcpStoreServer};
use collective::{Store, TcpStore};
use serde::{Deserialize, Serialize};

use super::contact::{Contact, outlast};
use super::round::{Member, RestartPolicy, Round};
use super::{Coordinator, WaitNotice, assign, connect, from_json, host_fresh, to_json, wait};
use crate::address::{self, random_number};
use crate::job::{Assignment, End, Job, Queue, Summary};
use crate::options::{LaunchOptions, RdzvConfig};
use crate::{Error, Result};

/// A job of a fixed number of nodes, as seen by one of them.
pub(crate) struct Fixed {
    options: LaunchOptions,
    node: usize,
    /// Random id of this launcher.
    id: String,
    count: usize,
    addr: String,
    port: u16,
    attempt: u32,
    /// On node 0: the control store.
    control: Option<Arc<TcpStoreServer>>,
    /// On node 0: the ranks' store of a later attempt.
    fresh: Option<TcpStoreServer>,
    store: Option<Arc<TcpStore>>,
    assignment: Assignment,
    members: Vec<Member>,
    has_torchrun_agent: bool,
    round: Option<Arc<Round>>,
}

/// A node's entry in torchrun's protocol.
#[derive(Serialize, Deserialize)]
struct RoleInfo {
    role: String,
    rank: usize,
    local_world_size: usize,
}

/// Additional entry of launchers of this crate.
#[derive(Serialize, Deserialize)]
struct Agent {
    host: String,
    addr: String,
    nodes: usize,
    max_restarts: u32,
}

impl Fixed {
    pub(super) fn new(
        options: &LaunchOptions,
        (node, count): (usize, usize),
        addr: String,
        port: u16,
    ) -> Result<Self> {
        if node >= count {
            let text = format!("--node-rank {node} is not below --nnodes {count}");
            return Err(Error::options("--node-rank", text));
        }
        let addr = address::bare(&addr).to_owned();
        let found = address::resolve("--master-addr", &addr, port)?;
        let run_id = &options.run_id[..];
        let control = match node {
            0 => Some(Arc::new(host(run_id, &found, (&addr, port), count)?)),
            _ => None,
        };
        // With port 0, the port that the system has chosen.
        let port = control.as_ref().map_or(port, |control| control.port());
        Ok(Self {
            options: options.clone(),
            node,
            id: random_number().to_string(),
            count,
            addr,
            port,
            attempt: 0,
            control,
            fresh: None,
            store: None,
            assignment: Assignment::default(),
            members: Vec::new(),
            has_torchrun_agent: false,
            round: None,
        })
    }

    /// Returns the address of the control store.
    fn store_addr(&self) -> String {
        address::join(&self.addr, self.port)
    }

    /// Returns the keys that are shared with torchrun's agents.
    fn shared(&self, store: &Arc<TcpStore>) -> PrefixStore {
        PrefixStore::new(self.options.run_id.clone(), store.clone())
    }

    fn prefix(&self) -> String {
        format!("{}/launch/{}", self.options.run_id, self.attempt)
    }

    /// First rendezvous, by torchrun's protocol; false after a signal.
    fn join(&mut self, queue: &mut Queue) -> Result<bool> {
        let who = format!(
            "node {} of {}: node 0 at {} (--master-addr and --master-port)",
            self.node,
            self.count,
            self.store_addr()
        );
        let Some(store) = connect((&self.addr, self.port), &self.options.rdzv, queue, &who)? else {
            return Ok(false);
        };
        store.join()?;
        let store = Arc::new(store);
        let shared = self.shared(&store);
        self.register(&shared)?;
        if self.node == 0 {
            if !self.await_all(&shared, &self.info_keys(), queue)? {
                return Ok(false);
            }
            self.assign_ranks(&shared)?;
        }
        let assigned = format!("torchelastic/assigned_ranks/{}", self.node);
        if !self.await_all(&shared, std::slice::from_ref(&assigned), queue)? {
            return Ok(false);
        }
        if shared.add(&format!("launch/begun/{}", self.node), 1)? > 1 {
            return Err(self.duplicate_rank());
        }
        let read = self.read_assignment(&shared, &assigned);
        let wrote = shared.set(&format!("launch/read/{}", self.node), b"1");
        if read.is_err() && self.node == 0 {
            drop(self.await_readers(&shared, queue));
        }
        read?;
        wrote?;
        self.store = Some(store);
        Ok(true)
    }

    /// Registers this node. Replaces an earlier launcher with the same rank, which may have ended.
    fn register(&self, shared: &PrefixStore) -> Result<()> {
        let node = self.node;
        shared.set(&self.owner_key(), self.id.as_bytes())?;
        let addr = shared.local_ip().map_or_else(|| "?".to_owned(), |ip| ip.to_string());
        let agent = Agent {
            host: address::host_name(),
            addr,
            nodes: self.count,
            max_restarts: self.options.max_restarts,
        };
        shared.set(&format!("launch/agent/{node}"), &to_json(&agent))?;
        let info = RoleInfo {
            role: self.options.role.clone(),
            rank: node,
            local_world_size: self.options.nproc_per_node,
        };
        shared.set(&format!("torchelastic/role_info/{node}"), &to_json(&info))?;
        Ok(())
    }

    /// Returns the key that stores the id of the latest launcher with this rank.
    fn owner_key(&self) -> String {
        format!("launch/taken/{}", self.node)
    }

    fn duplicate_rank(&self) -> Error {
        let (at, node) = (self.store_addr(), self.node);
        let text = format!(
            "two launchers at {at} have --node-rank {node}; give each node its own rank, and use another \
             --master-port if another job already runs there"
        );
        Error::options("--node-rank", text)
    }

    /// Waits for `keys`; false if a signal comes first. Another launcher with this node's rank is
    /// an error.
    fn await_all(&self, shared: &PrefixStore, keys: &[String], queue: &mut Queue) -> Result<bool> {
        let (start, mut notice) = (Instant::now(), WaitNotice::new());
        let names: Vec<_> = keys.iter().map(String::as_str).collect();
        let RdzvConfig { join, heartbeat, .. } = self.options.rdzv;
        let mut contact = Contact::new(&self.options.rdzv);
        loop {
            let until = (start + join).min(Instant::now() + heartbeat);
            let complete = contact.tolerate(wait(shared, &names, until, queue))?;
            if complete == Some(true) || queue.drain() {
                return Ok(complete == Some(true));
            }
            let owner = shared.get(&self.owner_key(), heartbeat).map_err(Error::from);
            if contact.tolerate(owner)?.is_some_and(|owner| owner != self.id.as_bytes()) {
                return Err(self.duplicate_rank());
            }
            if start.elapsed() >= join {
                return Err(Error::rendezvous(self.store_addr(), self.missing(shared, start)));
            }
            let missing = || format!("waiting for up to {join:?}: {}", self.missing(shared, start));
            notice.once(queue, missing);
        }
    }

    /// Returns the nodes that have not set `KEY/NODE`.
    fn without(&self, store: &PrefixStore, key: &str) -> Result<Vec<usize>> {
        let nodes =
            (0..self.count).map(|node| Ok((node, store.check(&[&format!("{key}/{node}")])?)));
        let nodes: Vec<_> = nodes.collect::<Result<_>>()?;
        Ok(nodes.into_iter().filter(|node| !node.1).map(|node| node.0).collect())
    }

    /// Returns a message that names the nodes that have not registered.
    fn missing(&self, shared: &PrefixStore, start: Instant) -> String {
        let missing = self.without(shared, "torchelastic/role_info").unwrap_or_default();
        let (at, waited) = (self.store_addr(), start.elapsed());
        let each = self.options.nproc_per_node;
        let ranks = missing.iter().flat_map(|node| node * each..(node + 1) * each);
        format!(
            "after {waited:.1?} at {at}, nodes still missing: {} of {} (ranks {} if each node has {each}); \
             check that the launcher runs there with this --master-addr and --master-port",
            address::list(missing.iter().copied()),
            self.count,
            address::list(ranks),
        )
    }

    /// On node 0: assigns each node its ranks, as torchrun does.
    fn assign_ranks(&self, shared: &PrefixStore) -> Result<()> {
        let infos = self.infos(shared)?;
        let nodes: Vec<_> =
            infos.iter().map(|info| (&info.role[..], info.local_world_size)).collect();
        for node in 0..nodes.len() {
            let assigned = to_json(&assign(&nodes, node));
            shared.set(&format!("torchelastic/assigned_ranks/{node}"), &assigned)?;
        }
        Ok(())
    }

    fn info_keys(&self) -> Vec<String> {
        (0..self.count).map(|node| format!("torchelastic/role_info/{node}")).collect()
    }

    fn infos(&self, shared: &PrefixStore) -> Result<Vec<RoleInfo>> {
        let keys = self.info_keys();
        let keys: Vec<_> = keys.iter().map(String::as_str).collect();
        let texts = shared.multi_get(&keys, self.options.rdzv.heartbeat)?;
        texts.iter().map(|text| from_json("a node's role_info", text)).collect()
    }

    /// Reads this node's assignment and the entries of all nodes.
    fn read_assignment(&mut self, shared: &PrefixStore, assigned: &str) -> Result<()> {
        let text = shared.get(assigned, self.options.rdzv.heartbeat)?;
        let [first_rank, world_size, first_role_rank, role_world_size] =
            from_json("assigned_ranks", &text)?;
        let mut first = 0;
        for (node, info) in self.infos(shared)?.into_iter().enumerate() {
            let key = format!("launch/agent/{node}");
            // A launcher of this crate writes it before it registers.
            let ours = shared.check(&[&key])?;
            let (host, addr) = if ours {
                let text = shared.get(&key, self.options.rdzv.heartbeat)?;
                let agent: Agent = from_json("a launcher's record", &text)?;
                self.check_options(node, &agent)?;
                (agent.host, agent.addr)
            } else {
                self.has_torchrun_agent = true;
                ("?".to_owned(), "?".to_owned())
            };
            let ranks = info.local_world_size;
            let hosts = node == 0;
            self.members.push(Member { host, addr, first_rank: first, ranks, hosts, ours });
            first += ranks;
        }
        self.assignment = Assignment {
            node: self.node,
            nodes: self.count,
            first_rank,
            world_size,
            first_role_rank,
            role_world_size,
            master_addr: self.addr.clone(),
            master_port: self.port,
            ..Assignment::default()
        };
        Ok(())
    }

    /// On node 0, before its store ends: waits until the other launchers of this crate have read
    /// all entries, so that each reports the same contradiction.
    fn await_readers(&self, shared: &PrefixStore, queue: &mut Queue) -> Result<()> {
        let deadline = Instant::now() + self.options.rdzv.lost_after();
        for node in 1..self.count {
            if shared.check(&[&format!("launch/agent/{node}")])? {
                wait(shared, &[&format!("launch/read/{node}")], deadline, queue)?;
            }
        }
        Ok(())
    }

    /// Checks that options that must be equal on all nodes are.
    fn check_options(&self, node: usize, agent: &Agent) -> Result<()> {
        for (flag, theirs, ours) in [
            ("--nnodes", agent.nodes, self.count),
            ("--max-restarts", agent.max_restarts as usize, self.options.max_restarts as usize),
        ] {
            if theirs != ours {
                let (host, me) = (&agent.host, self.node);
                let text =
                    format!("{flag} is {ours} on node {me}, but {theirs} on node {node} ({host})");
                return Err(Error::options(flag, text));
            }
        }
        Ok(())
    }

    /// Rendezvous of a further attempt, with a new store for the ranks unless a torchrun agent
    /// takes part.
    fn rejoin(&mut self, queue: &mut Queue) -> Result<bool> {
        if self.has_torchrun_agent {
            return Ok(true);
        }
        let store = Arc::clone(self.store.as_ref().expect("the first rendezvous has connected it"));
        let attempt = PrefixStore::new(self.prefix(), store);
        let start = Instant::now();
        let deadline = start + self.options.rdzv.join;
        let port_key = "port";
        let ready = format!("ready/{}", self.node);
        if !self.retry(deadline, queue, |_| attempt.set(&ready, b"1").map(|()| true))? {
            return Ok(false);
        }
        if self.node == 0 {
            let ready: Vec<_> = (0..self.count).map(|node| format!("ready/{node}")).collect();
            let names: Vec<_> = ready.iter().map(String::as_str).collect();
            if !wait(&attempt, &names, deadline, queue)? {
                return self.report_missing(&attempt, start, queue);
            }
            let fresh = host_fresh("--master-addr", &self.addr, self.count == 1)?;
            let fresh = self.fresh.insert(fresh);
            attempt.set(port_key, fresh.port().to_string().as_bytes())?;
        }
        if !self.retry(deadline, queue, |queue| wait(&attempt, &[port_key], deadline, queue))? {
            return self.report_missing(&attempt, start, queue);
        }
        let rdzv = &self.options.rdzv;
        let port = outlast(rdzv, || Ok(attempt.get(port_key, rdzv.heartbeat)?))?;
        self.assignment.master_port = from_json("the port of the ranks' store", &port)?;
        Ok(true)
    }

    /// Repeats `what` while the store does not answer, until the deadline; false after a signal.
    fn retry<E: Into<Error>>(
        &self,
        deadline: Instant,
        queue: &mut Queue,
        what: impl Fn(&mut Queue) -> Result<bool, E>,
    ) -> Result<bool> {
        loop {
            let ended = || address::refuses_connections(&self.addr, self.port);
            match what(queue) {
                Ok(done) => return Ok(done),
                Err(_) if queue.drain() => return Ok(false),
                // A restarted control store would have lost its keys.
                Err(error) if Instant::now() >= deadline || ended() => return Err(error.into()),
                Err(_) => std::thread::sleep(super::SLICE),
            }
        }
    }

    /// Returns an error that names the nodes missing in a further attempt; false after a signal.
    fn report_missing(&self, attempt: &PrefixStore, start: Instant, queue: &Queue) -> Result<bool> {
        if queue.signal.is_some() {
            return Ok(false);
        }
        let name = |node| format!("node {node} ({})", self.members[node]);
        let missing: Vec<_> = self.without(attempt, "ready")?.into_iter().map(name).collect();
        let (at, waited, missing) = (self.store_addr(), start.elapsed(), missing.join(", "));
        let text =
            format!("after {waited:.1?} at {at}, nodes missing after the restart: {missing}");
        Err(Error::rendezvous(at, text))
    }

    /// Waits for torchrun's agents, whose ranks may still need the store. Returns the name of an
    /// agent that ended without arriving here.
    fn exit_barrier(&self, round: &Round, queue: &mut Queue) -> Option<String> {
        let store = self.store.as_ref().expect("the first rendezvous has connected it");
        let shared = self.shared(store);
        let [members, last] = ["num_members", "last_member"]
            .map(|key| format!("torchelastic/agent/terminal_state/{key}"));
        let arrived = shared.add(&members, 1);
        if arrived.is_ok_and(|arrived| usize::try_from(arrived) == Ok(self.count)) {
            // An error means that the other nodes have ended.
            drop(shared.set(&last, b"<val_ignored>"));
        }
        let end = Instant::now() + EXIT_BARRIER;
        let mut lost = None;
        while Instant::now() < end && lost.is_none() && queue.signal.is_none() {
            // Nobody waits at a store that has ended.
            if wait(&shared, &[&last], end.min(Instant::now() + LAST_READ), queue).unwrap_or(true) {
                break;
            }
            lost = round.lost_agent();
        }
        if self.node == 0 {
            // Gives the agents time to read the answer.
            std::thread::sleep(LAST_READ);
        }
        lost
    }
}

impl Coordinator for Fixed {
    fn next(&mut self, queue: &mut Queue) -> Result<ControlFlow<i32, Assignment>> {
        let joined = if self.store.is_none() { self.join(queue)? } else { self.rejoin(queue)? };
        if !joined {
            return Ok(Break(0));
        }
        let store = self.store.as_ref().expect("the first rendezvous has connected it");
        self.assignment.round = self.attempt;
        self.assignment.restart_count = self.attempt;
        self.round = Some(Arc::new(Round {
            store: Arc::clone(store),
            prefix: self.prefix(),
            node: self.node,
            members: self.members.clone(),
            control: self.control.clone(),
            rdzv: self.options.rdzv,
        }));
        Ok(Continue(self.assignment.clone()))
    }

    fn round(&self) -> Option<&Arc<Round>> {
        self.round.as_ref().filter(|round| round.members.len() > 1)
    }

    fn agree(&mut self, job: &mut Job) -> Result<Summary> {
        let restarts_left = self.attempt < self.options.max_restarts;
        let policy = RestartPolicy { restarts_left, elastic: false };
        let round = Arc::clone(self.round.as_ref().expect("an attempt is under way"));
        let own = job.outcome();
        let summary = if self.has_torchrun_agent {
            let mut lost = match &job.queue.remote {
                Some(End::Lost { node }) => Some(node.clone()),
                _ => None,
            };
            if lost.is_none() && Summary::of(vec![own.clone()], Vec::new()).code == 0 {
                lost = self.exit_barrier(&round, &mut job.queue);
            }
            // A lost agent does not join another attempt.
            let all_here = lost.is_none();
            let notice =
                |node| format!("{node} ended before its ranks finished, or is unreachable");
            let notice = lost.map(notice);
            // An agent also ends because of failures on this node.
            let is_cause = own.failures.iter().all(|failure| failure.notified);
            if let Some(text) = notice.as_ref().filter(|_| !is_cause) {
                job.queue.print(&format!("launch: {text}\n"));
            }
            let causes = notice.filter(|_| is_cause).into_iter().collect();
            let mut summary = Summary::of(vec![own], causes);
            summary.starts_again = all_here && summary.may_restart() && restarts_left;
            summary
        } else {
            let summary = round.agree(own, &mut job.queue, &policy);
            round.wait_for_readers(&summary);
            summary
        };
        self.attempt += u32::from(summary.starts_again);
        Ok(summary)
    }

    fn restarts(&self) -> u32 {
        self.attempt
    }
}

/// Hosts the control store, on node 0.
fn host(
    run_id: &str,
    found: &[IpAddr],
    (addr, port): (&str, u16),
    count: usize,
) -> Result<TcpStoreServer> {
    if address::is_local(found) {
        let agent = |node| Presence {
            key: format!("{run_id}/torchelastic/role_info/{node}"),
            done: format!("{run_id}/torchelastic/agent/terminal_state/num_members"),
        };
        let endpoint = Endpoint { host: addr, port, addrs: found, one_host: count == 1 };
        return Ok(TcpStoreServer::bind_endpoint(&endpoint, (1..count).map(agent).collect())?);
    }
    let at = address::join(addr, port);
    let list = found.iter().map(IpAddr::to_string).collect::<Vec<_>>().join(", ");
    let text = format!(
        "--master-addr {addr} ({list}) is not an address of this host, but --node-rank is 0; start \
         node 0 on that host, where the other nodes connect to {at}"
    );
    Err(Error::options("--master-addr", text))
}

/// Timeout of torchrun's exit barrier.
const EXIT_BARRIER: Duration = Duration::from_secs(300);
/// Time for the store's last answers to be read before it ends.
const LAST_READ: Duration = Duration::from_millis(500);
