//! Jobs whose nodes join and leave: the loop around `state`.
//!
//! The control store runs outside of the job ([`launch store`](crate::serve_store)), or on one of
//! its nodes: the one whose address is the endpoint's, or the first of several launchers on that
//! host. In the latter case, losing that node ends the job. Each attempt has keys under its own
//! prefix, and a new store for its ranks, hosted by its first node.

use std::ops::ControlFlow::{self, Break, Continue};
use std::sync::Arc;
use std::time::{Duration, Instant};

use collective::store::{Endpoint, TcpStoreServer};
use collective::{Store, TcpStore};

use super::contact::{Contact, outlast};
use super::heartbeat::Heartbeats;
use super::round::{Member, RestartPolicy, Round};
use super::state::{self, Action, Node, Phase, State, View};
use super::{Coordinator, WaitNotice, assign, connect, from_json, host_fresh, to_json};
use crate::address::{self, random_number};
use crate::job::{Assignment, End, Job, Queue, SAVED, Summary};
use crate::options::LaunchOptions;
use crate::{Error, Result};

/// An elastic job, as seen by one of its nodes.
pub(crate) struct Elastic {
    options: LaunchOptions,
    limits: (usize, usize),
    host: String,
    port: u16,
    me: Node,
    /// Start of messages about connecting: the flag, and the reason if this node failed to host the
    /// control store.
    endpoint_text: String,
    /// The control store, if this node hosts it.
    control: Option<TcpStoreServer>,
    /// The ranks' store, if this node hosts it.
    fresh: Option<TcpStoreServer>,
    store: Option<Arc<TcpStore>>,
    state: State,
    /// The state as text, as it was read; empty if there was none.
    text: Vec<u8>,
    round: Option<Arc<Round>>,
}

impl Elastic {
    pub(super) fn new(
        options: &LaunchOptions,
        limits: (usize, usize),
        host: String,
        port: u16,
    ) -> Result<Self> {
        if limits.0 == 0 || limits.0 > limits.1 {
            let (min, max) = limits;
            let text = format!("--nnodes {min}:{max} is not MIN:MAX with 1 <= MIN <= MAX");
            return Err(Error::options("--nnodes", text));
        }
        let host = address::bare(&host).to_owned();
        let local_addr = options.local_addr.as_deref().map(address::bare);
        if let Some(addr) = local_addr
            && !address::is_local(&address::resolve("--local-addr", addr, 0)?)
        {
            let text = format!("--local-addr {addr} is not an address of this host");
            return Err(Error::options("--local-addr", text));
        }
        let found = address::resolve("--rdzv-endpoint", &host, port)?;
        let endpoint = Endpoint { host: &host, port, addrs: &found, one_host: limits.1 == 1 };
        let mut endpoint_text = "--rdzv-endpoint".to_owned();
        let mut control = None;
        if address::is_local(&found) {
            match TcpStoreServer::bind_endpoint(&endpoint, Vec::new()) {
                Ok(server) => control = Some(server),
                Err(error) if address::refuses_connections(&host, port) => return Err(error.into()),
                // Another launcher on this host bound it first, or another program uses the port.
                Err(error) => endpoint_text += &format!(" (not hosted by this node: {error})"),
            }
        }
        let me = Node {
            host: address::host_name(),
            pid: std::process::id(),
            id: random_number(),
            addr: local_addr.unwrap_or_default().to_owned(),
            ranks: options.nproc_per_node,
            role: options.role.clone(),
            hosts: control.is_some(),
        };
        Ok(Self {
            options: options.clone(),
            limits,
            host,
            port: control.as_ref().map_or(port, TcpStoreServer::port),
            me,
            endpoint_text,
            control,
            fresh: None,
            store: None,
            state: State::default(),
            text: Vec::new(),
            round: None,
        })
    }

    fn prefix(&self) -> String {
        format!("launch/elastic/{}", self.options.run_id)
    }

    /// Returns the address at which the other nodes reach this one.
    fn own_addr(&self, store: &TcpStore) -> String {
        match store.local_ip() {
            Some(ip) if !ip.is_loopback() => ip.to_string(),
            // The node that hosts the control store connects through loopback; other nodes connect
            // to this name.
            _ => self.host.clone(),
        }
    }

    /// Joins an attempt. Returns this node's index in it, or the exit code after a signal or the
    /// end of the job.
    fn gather(
        &mut self,
        store: &Arc<TcpStore>,
        queue: &mut Queue,
    ) -> Result<ControlFlow<i32, usize>> {
        let (mut start, mut notice) = (Instant::now(), WaitNotice::new());
        // The attempt that has enough nodes, and the time since which it has.
        let mut call: Option<(u32, Instant)> = None;
        let (mut heartbeats, mut contact) =
            (Heartbeats::default(), Contact::new(&self.options.rdzv));
        let mut has_joined = self.round.is_some();
        loop {
            let read = self.read(store).and_then(|()| self.lost(store, &mut heartbeats));
            let lost = match contact.tolerate(read)? {
                Some(lost) => lost,
                None if queue.drain() => return Ok(Break(0)),
                None => continue,
            };
            if self.state.phase == Phase::Running {
                // Waiting for a running attempt to end does not count towards the join timeout.
                start = Instant::now();
            }
            let State { round, phase, nodes, .. } = &self.state;
            let enough = *phase == Phase::Gathering && nodes.len() >= self.limits.0;
            call = call.filter(|(of, _)| enough && of == round);
            call = call.or_else(|| enough.then(|| (*round, Instant::now())));
            let last_call = self.options.rdzv.last_call;
            let view = View {
                me: &self.me,
                min: self.limits.0,
                max: self.limits.1,
                last_call_over: call.is_some_and(|(_, since)| since.elapsed() >= last_call),
                join_over: start.elapsed() > self.options.rdzv.join || queue.drain(),
                lost: &lost,
            };
            match state::step(&self.state, &view) {
                Action::Run(node) => return Ok(Continue(node)),
                Action::Closed { .. } if !has_joined => {
                    let text = "the job has already ended; start a new one with another --rdzv-id";
                    return Err(self.error(text));
                }
                Action::Closed { code: code @ (0 | SAVED) } => return Ok(Break(code)),
                Action::Closed { .. } => {
                    return Err(self.error("the job has ended with a failure"));
                }
                Action::TooFew if queue.signal.is_some() => return Ok(Break(0)),
                Action::TooFew => {
                    return Err(Error::rendezvous(self.endpoint(), self.too_few(start.elapsed())));
                }
                Action::Wait => {
                    notice.once(queue, || self.progress(start.elapsed()));
                    std::thread::sleep(PAUSE.min(self.options.rdzv.heartbeat));
                }
                Action::Write(next) => {
                    self.write(store, next)?;
                    has_joined = true;
                }
            }
        }
    }

    /// Returns the ids of lost nodes. Gathering and waiting nodes have their own counters; nodes of
    /// a running attempt use the counters of the attempt.
    fn lost(&self, store: &TcpStore, heartbeats: &mut Heartbeats) -> Result<Vec<u64>> {
        let prefix = self.prefix();
        let alive = |id: u64| format!("{prefix}/alive/{id}");
        let State { round, phase, nodes, waiting, .. } = &self.state;
        let of_attempt = nodes.iter().enumerate().map(|(at, node)| match phase {
            Phase::Running => (node.id, format!("{prefix}/{round}/beat/{at}")),
            _ => (node.id, alive(node.id)),
        });
        let all = of_attempt.chain(waiting.iter().map(|node| (node.id, alive(node.id))));
        let others: Vec<_> = all.filter(|(id, _)| *id != self.me.id).collect();
        if heartbeats.is_due(&self.options.rdzv) {
            store.add(&alive(self.me.id), 1)?;
            heartbeats.watch(others.iter().map(|(_, key)| key.clone()).collect());
            heartbeats.poll(store, &self.options.rdzv);
        }
        let lost =
            others.into_iter().filter(|(_, key)| heartbeats.is_lost(key, &self.options.rdzv));
        Ok(lost.map(|(id, _)| id).collect())
    }

    /// Adds advice to a control-store error.
    fn explain(&self, error: Error) -> Error {
        let Error::Collective(error) = error else { return error };
        let mut nodes = self.state.nodes.iter().chain(&self.state.waiting);
        let advice = super::advice(nodes.any(|node| node.hosts));
        self.error(&format!("the control store is unreachable: {error}{advice}")).caused_by(error)
    }

    /// Returns the address of the control store.
    fn endpoint(&self) -> String {
        address::join(&self.host, self.port)
    }

    fn error(&self, what: &str) -> Error {
        Error::rendezvous(self.endpoint(), self.about(what))
    }

    fn about(&self, what: &str) -> String {
        format!("run {} at --rdzv-endpoint {}: {what}", self.options.run_id, self.endpoint())
    }

    /// Returns a message about the progress of the rendezvous.
    fn progress(&self, waited: Duration) -> String {
        let State { phase, nodes, .. } = &self.state;
        match phase {
            Phase::Running => self.about(&format!(
                "the job is running on {} nodes; this node waits for its next attempt",
                nodes.len()
            )),
            _ if nodes.len() >= self.limits.0 => self.about(&format!(
                "{} nodes have joined, which is enough; waiting {:?} (last_call_timeout) for more",
                nodes.len(),
                self.options.rdzv.last_call
            )),
            _ => {
                format!("waiting for up to {:?}: {}", self.options.rdzv.join, self.too_few(waited))
            }
        }
    }

    fn too_few(&self, waited: Duration) -> String {
        let (min, max) = self.limits;
        let others = self.state.nodes.iter().filter(|node| node.id != self.me.id);
        let others: Vec<_> = others.map(|node| format!("{} ({})", node.host, node.addr)).collect();
        let others = if others.is_empty() { "none".to_owned() } else { others.join(", ") };
        self.about(&format!(
            "fewer than {min} nodes (--nnodes {min}:{max}) after {waited:.1?}; other nodes: {others}"
        ))
    }

    fn read(&mut self, store: &TcpStore) -> Result<()> {
        // For a missing key, compare_set returns the expected value and stores nothing.
        let text =
            store.compare_set(&format!("{}/state", self.prefix()), PLACEHOLDER, PLACEHOLDER)?;
        if text == PLACEHOLDER {
            (self.state, self.text) = (State::default(), Vec::new());
        } else {
            (self.state, self.text) = (from_json("the job's state", &text)?, text);
        }
        Ok(())
    }

    /// Replaces the state that was read, unless another node has changed it. Ends a running attempt
    /// if this node joins and `max` allows.
    fn write(&self, store: &TcpStore, next: State) -> Result<()> {
        let new = to_json(&next);
        let (key, rdzv) = (format!("{}/state", self.prefix()), &self.options.rdzv);
        // A repetition whose first answer was lost finds the new state, too.
        let won = outlast(rdzv, || Ok(store.compare_set(&key, &self.text, &new)?))? == new;
        let room = next.nodes.len() < self.limits.1;
        let joins = next.waiting.len() > self.state.waiting.len();
        if won && room && joins && next.phase == Phase::Running {
            let node = format!("{} ({})", self.me.host, self.me.addr);
            let key = format!("{}/{}/end", self.prefix(), next.round);
            let end = to_json(&End::Joined { node });
            outlast(rdzv, || Ok(store.compare_set(&key, b"", &end)?))?;
        }
        Ok(())
    }

    /// Returns this node's assignment; `None` after a signal, or if the first node, which hosts the
    /// ranks' store, is lost.
    fn assignment(&mut self, round: &Round, queue: &mut Queue) -> Result<Option<Assignment>> {
        if round.node == 0 {
            let one_host = self.state.nodes.len() == 1;
            let fresh = host_fresh("--rdzv-endpoint", &self.me.addr, one_host)?;
            let fresh = self.fresh.insert(fresh);
            round.set("master", &(&self.me.addr, fresh.port()))?;
        }
        let mut deadline = Instant::now() + self.options.rdzv.lost_after();
        let mut contact = Contact::new(&self.options.rdzv);
        let (master_addr, master_port) = loop {
            let asked = Instant::now();
            match contact.tolerate(round.read("master", round.slice()))? {
                Some(Some(found)) => break found,
                Some(None) => {}
                // The first node could not write it meanwhile, either.
                None => deadline += asked.elapsed(),
            }
            // Nodes that wait for the next attempt monitor the nodes of this one.
            drop(round.beat());
            if queue.drain() || Instant::now() > deadline {
                return Ok(None);
            }
        };
        let nodes: Vec<_> =
            self.state.nodes.iter().map(|node| (&node.role[..], node.ranks)).collect();
        let [first_rank, world_size, first_role_rank, role_world_size] = assign(&nodes, round.node);
        Ok(Some(Assignment {
            round: self.state.round,
            restart_count: self.state.restarts,
            node: round.node,
            nodes: nodes.len(),
            first_rank,
            world_size,
            first_role_rank,
            role_world_size,
            master_addr,
            master_port,
        }))
    }

    /// Changes the state by compare-and-set; repeats until it succeeds or `to` returns `None`.
    fn change(&mut self, store: &TcpStore, to: impl Fn(&State) -> Option<State>) -> Result<()> {
        loop {
            self.read(store)?;
            match to(&self.state) {
                None => return Ok(()),
                Some(next) => self.write(store, next)?,
            }
        }
    }
}

impl Coordinator for Elastic {
    fn next(&mut self, queue: &mut Queue) -> Result<ControlFlow<i32, Assignment>> {
        let store = match &self.store {
            Some(store) => Arc::clone(store),
            None => {
                let (at, who) = ((&self.host[..], self.port), &self.endpoint_text);
                let Some(store) = connect(at, &self.options.rdzv, queue, who)? else {
                    return Ok(Break(0));
                };
                // torchrun's agents store their state under this key, as pickled Python objects.
                if store.check(&[&format!("torch.rendezvous.{}", self.options.run_id)])? {
                    let text = "torchrun agents use this store, and an elastic job cannot include \
                                them; start all its nodes with the same launcher";
                    return Err(self.error(text));
                }
                if self.me.addr.is_empty() {
                    self.me.addr = self.own_addr(&store);
                }
                Arc::clone(self.store.insert(Arc::new(store)))
            }
        };
        let gathered = self.gather(&store, queue).map_err(|error| self.explain(error));
        let node = match gathered? {
            Continue(node) => node,
            Break(code) => return Ok(Break(code)),
        };
        let mut first = 0;
        let member = |node: &Node| {
            let first_rank = first;
            first += node.ranks;
            let Node { host, addr, ranks, hosts, .. } = node.clone();
            Member { host, addr, first_rank, ranks, hosts, ours: true }
        };
        let members: Vec<_> = self.state.nodes.iter().map(member).collect();
        let round = Round {
            store: Arc::clone(&store),
            prefix: format!("{}/{}", self.prefix(), self.state.round),
            node,
            members,
            control: None,
            rdzv: self.options.rdzv,
        };
        let round = Arc::clone(self.round.insert(Arc::new(round)));
        let assignment = self.assignment(&round, queue).map_err(|error| self.explain(error))?;
        if assignment.is_some() || queue.signal.is_some() {
            return Ok(assignment.map_or(Break(0), Continue));
        }
        let (first, number) = (&self.state.nodes[0], self.state.round);
        let text = format!("the first node, {} ({}), did not start", first.host, first.addr);
        queue.print(&format!("launch: {}; continuing without it\n", self.about(&text)));
        let rdzv = self.options.rdzv;
        let end = |state: &State| state::end(state, number, false);
        let changed = outlast(&rdzv, || self.change(&store, end));
        changed.map_err(|error| self.explain(error))?;
        self.next(queue)
    }

    fn round(&self) -> Option<&Arc<Round>> {
        self.round.as_ref()
    }

    fn agree(&mut self, job: &mut Job) -> Result<Summary> {
        let policy = RestartPolicy {
            restarts_left: self.state.restarts < self.options.max_restarts,
            elastic: true,
        };
        let round = Arc::clone(self.round.as_ref().expect("an attempt is under way"));
        let mut own = job.outcome();
        own.closes = own.stopped && self.control.is_some() && self.state.nodes.len() > 1;
        let summary = round.agree(own, &mut job.queue, &policy);
        let number = self.state.round;
        let store = Arc::clone(&round.store);
        // Every node writes this, because the first may be lost before it does.
        let (signalled, keeps_store) = (job.queue.signal.is_some(), self.control.is_some());
        let members = self.state.nodes.len();
        let to = |state: &State| {
            let others = members > 1 || !state.waiting.is_empty();
            let left = signalled && others && !keeps_store;
            match summary.starts_again || left {
                true => state::end(state, number, summary.is_restart),
                false => state::close(state, summary.code),
            }
        };
        let rdzv = self.options.rdzv;
        let changed = match summary.starts_again {
            true => outlast(&rdzv, || self.change(&store, to)),
            // The store may have ended with the node that hosts it.
            false => self.change(&store, to),
        };
        round.wait_for_readers(&summary);
        if summary.starts_again {
            changed.map_err(|error| self.explain(error))?;
        } else if self.control.is_some() && !self.state.waiting.is_empty() {
            // Waiting nodes read the state once per `PAUSE`.
            std::thread::sleep(3 * PAUSE);
        }
        Ok(summary)
    }

    fn restarts(&self) -> u32 {
        self.state.restarts
    }
}

/// Time between two reads of the state.
const PAUSE: Duration = Duration::from_millis(200);
/// A value that is never a state.
const PLACEHOLDER: &[u8] = b"?";

#[cfg(test)]
mod tests {
    use super::*;

    /// Times: nodes count as lost after 6 s, the store is away for 4 s, and the first node writes
    /// 8 s after the beginning.
    #[test]
    fn outage_of_the_store_extends_the_wait_for_the_first_node() {
        let mut options = LaunchOptions::new(1, ["x"]);
        options.rdzv.heartbeat = Duration::from_millis(500);
        options.rdzv.missed_heartbeats = 12;
        let mut elastic = Elastic::new(&options, (2, 2), "127.0.0.1".to_owned(), 0).unwrap();
        elastic.state.nodes = vec![elastic.me.clone(); 2];
        let (host, port) = (elastic.host.clone(), elastic.port);
        let connect = || TcpStore::connect(&host, port, options.rdzv.heartbeat).unwrap();
        let round = |node| Round {
            store: Arc::new(connect()),
            prefix: "job".to_owned(),
            node,
            members: Vec::new(),
            control: None,
            rdzv: options.rdzv,
        };
        let second = round(1);
        drop(elastic.control.take());
        let assigned = std::thread::scope(|scope| {
            scope.spawn(|| {
                std::thread::sleep(Duration::from_secs(4));
                let addr = ([127, 0, 0, 1], port).into();
                let server = TcpStoreServer::bind(addr).unwrap();
                let first = round(0);
                std::thread::sleep(Duration::from_secs(4));
                first.set("master", &("h", 7)).unwrap();
                std::thread::sleep(Duration::from_secs(4));
                drop(server);
            });
            let (_sender, events) = std::sync::mpsc::channel();
            let mut queue = Queue::new(events, std::sync::mpsc::channel().0);
            elastic.assignment(&second, &mut queue).unwrap()
        });
        assert_eq!(assigned.expect("the first node has written").master_port, 7);
    }
}
