//! One attempt on several nodes: messages between their launchers during and after it.
//!
//! Keys of the control store, under a prefix for each attempt:
//!
//! | key | value |
//! |---|---|
//! | `end` | the first [`End`]; every node watches it |
//! | `beat/<node>` | a counter, incremented by each heartbeat |
//! | `outcome/<node>` | [`Outcome`] of the attempt on that node |
//! | `summary` | [`Summary`] of all outcomes by the first node, equal on all nodes |
//! | `read` | number of nodes that have read the summary |
//!
//! Each node monitors the counter of the next one, in a ring, by its own clock. All nodes detect
//! the loss of the node that hosts the store, since the store stops answering.

use std::fmt::{self, Display, Formatter};
use std::sync::mpsc::Sender;
use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};

use collective::{Store, TcpStore, store::TcpStoreServer};
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};

use super::contact::{Contact, outlast};
use super::heartbeat::Heartbeats;
use super::{SLICE, from_json, to_json};
use crate::job::{End, Event, Outcome, Queue, Summary};
use crate::options::RdzvConfig;
use crate::{Error, Result};

/// A node of an attempt, as shown in messages.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Member {
    pub(super) host: String,
    /// Its address as seen by the store.
    pub(super) addr: String,
    pub(super) first_rank: usize,
    pub(super) ranks: usize,
    /// Whether it hosts the control store.
    pub(super) hosts: bool,
    /// Whether its launcher is of this crate; torchrun's agents do not use the keys listed above.
    pub(super) ours: bool,
}

impl Display for Member {
    fn fmt(&self, f: &mut Formatter<'_>) -> fmt::Result {
        let Self { host, addr, first_rank, ranks, ours, .. } = self;
        match ours {
            true => write!(f, "host {host}, {addr}, ")?,
            false => f.write_str("torchrun agent, ")?,
        }
        match ranks {
            1 => write!(f, "rank {first_rank}"),
            _ => write!(f, "ranks {first_rank} to {}", first_rank + ranks - 1),
        }
    }
}

/// One attempt, as seen by one node.
#[derive(Debug)]
pub(crate) struct Round {
    pub(super) store: Arc<TcpStore>,
    /// Prefix of every key of this attempt.
    pub(super) prefix: String,
    /// Index of this node in `members`.
    pub(super) node: usize,
    pub(super) members: Vec<Member>,
    /// The control store of a fixed job, if this node hosts it; it monitors the nodes' connections.
    pub(super) control: Option<Arc<TcpStoreServer>>,
    pub(super) rdzv: RdzvConfig,
}

/// Decides about another attempt.
pub(super) struct RestartPolicy {
    /// Whether restarts are left.
    pub(super) restarts_left: bool,
    /// Whether nodes may join and leave.
    pub(super) elastic: bool,
}

impl Round {
    fn key(&self, name: impl Display) -> String {
        format!("{}/{name}", self.prefix)
    }

    /// Name of a node in messages.
    fn name(&self, node: usize) -> String {
        match self.members.get(node) {
            Some(member) => format!("node {node} ({member})"),
            None => format!("node {node}"),
        }
    }

    /// Returns the nodes whose connection closed before their ranks had finished, if this node
    /// hosts a fixed job's store.
    fn disconnected(&self) -> Vec<usize> {
        let keys = self.control.iter().flat_map(|control| control.disconnected());
        keys.filter_map(|key| key.rsplit('/').next()?.parse().ok()).collect()
    }

    /// Returns the name of a torchrun agent whose connection closed before its ranks had finished.
    pub(super) fn lost_agent(&self) -> Option<String> {
        let theirs = |node: &usize| self.members.get(*node).is_some_and(|member| !member.ours);
        self.disconnected().into_iter().find(theirs).map(|node| self.name(node))
    }

    /// Ends the attempt on all nodes. Only the first reason is stored.
    pub(super) fn announce(&self, end: &End) -> Result<()> {
        self.store.compare_set(&self.key("end"), b"", &to_json(end))?;
        Ok(())
    }

    /// [`announce`](Self::announce) without blocking the caller, after a short outage of the store,
    /// too.
    pub(super) fn announce_apart(self: &Arc<Self>, end: &End) {
        let (round, end) = (Arc::clone(self), end.clone());
        let announce = move || {
            // Nodes that cannot be reached detect the missing heartbeats.
            drop(outlast(&round.rdzv, || round.announce(&end)));
        };
        drop(std::thread::Builder::new().name("launch-announce".to_owned()).spawn(announce));
    }

    /// Reads a value of this attempt; `None` if it is not set within `time`.
    pub(super) fn read<T: DeserializeOwned>(
        &self,
        name: &str,
        time: Duration,
    ) -> Result<Option<T>> {
        match self.store.get(&self.key(name), time) {
            Ok(text) => from_json(name, &text).map(Some),
            Err(collective::Error::KeyTimeout { .. }) => Ok(None),
            Err(error) => Err(error.into()),
        }
    }

    /// [`read`](Self::read) for one slice of time. Tolerates a short outage of the store.
    pub(super) fn read_slice<T: DeserializeOwned>(
        &self,
        name: &str,
        contact: &mut Contact,
    ) -> Result<Option<T>> {
        Ok(contact.tolerate(self.read(name, self.slice()))?.flatten())
    }

    /// Sets a value of this attempt. Tolerates a short outage of the store.
    pub(super) fn set(&self, name: &str, value: &impl Serialize) -> Result<()> {
        let (key, text) = (self.key(name), to_json(value));
        outlast(&self.rdzv, || Ok(self.store.set(&key, &text)?))
    }

    /// Maximum time of a single wait for another node; its heartbeat is checked between waits.
    pub(super) fn slice(&self) -> Duration {
        SLICE.min(self.rdzv.heartbeat)
    }

    pub(super) fn beat(&self) -> Result<()> {
        self.store.add(&self.beat_key(self.node), 1)?;
        Ok(())
    }

    fn beat_key(&self, node: usize) -> String {
        self.key(format_args!("beat/{node}"))
    }

    fn heartbeats(&self, nodes: impl IntoIterator<Item = usize>) -> Heartbeats {
        let mut heartbeats = Heartbeats::default();
        heartbeats.watch(nodes.into_iter().map(|node| self.beat_key(node)).collect());
        heartbeats
    }

    /// Returns whether `node` has missed too many heartbeats. Polls the store once per heartbeat
    /// interval.
    fn is_lost(&self, heartbeats: &mut Heartbeats, node: usize) -> bool {
        heartbeats.poll(&self.store, &self.rdzv);
        heartbeats.is_lost(&self.beat_key(node), &self.rdzv)
    }

    /// Agrees with the other nodes on the summary of the attempt, after it has ended on this node.
    pub(super) fn agree(&self, own: Outcome, queue: &mut Queue, policy: &RestartPolicy) -> Summary {
        let agreed = if self.node == 0 {
            self.collect(&own, queue, policy)
        } else {
            self.await_summary(&own, queue)
        };
        let mut summary = agreed.unwrap_or_else(|error| {
            let store_is_lost = matches!(error, Error::Collective(_));
            let notice = match store_is_lost {
                true => self.about_store(&format!("is unreachable: {error}"), policy.elastic),
                false => format!("{}: {error}", self.name(0)),
            };
            let mut summary = Summary::of(vec![own], vec![notice]);
            policy.apply(&mut summary, None);
            // Without the store, nodes of an elastic job cannot meet again.
            summary.starts_again &= !(policy.elastic && store_is_lost);
            summary
        });
        summary.starts_again &= queue.signal.is_none();
        summary
    }

    /// Returns a message about the control store: what happened, which node hosts it, and what to
    /// do.
    fn about_store(&self, what: &str, elastic: bool) -> String {
        let host = self.members.iter().position(|member| member.hosts);
        let whose = host.map_or_else(String::new, |node| format!(", on {},", self.name(node)));
        let advice = if elastic { super::advice(host.is_some()) } else { "" };
        format!("the control store at {}{whose} {what}{advice}", self.store.addr())
    }

    /// On the first node: collects all outcomes and publishes the summary.
    fn collect(&self, own: &Outcome, queue: &mut Queue, policy: &RestartPolicy) -> Result<Summary> {
        let nodes = self.members.len();
        let mut outcomes = vec![None; nodes];
        outcomes[0] = Some(own.clone());
        let mut heartbeats = self.heartbeats(1..nodes);
        let (mut problems, mut may_return) = (Vec::new(), true);
        let mut contact = Contact::new(&self.rdzv);
        while let Some(node) = outcomes.iter().position(Option::is_none) {
            outcomes[node] = self.read_slice(&format!("outcome/{node}"), &mut contact)?;
            self.forward_signal(queue);
            // The node may have been unable to announce the end itself.
            if let Some(end) =
                outcomes.iter().enumerate().find_map(|(at, own)| self.end_by(at, own.as_ref()?))
            {
                drop(self.announce(&end));
            }
            for (node, outcome) in outcomes.iter_mut().enumerate() {
                let name = self.name(node);
                let known =
                    matches!(&queue.remote, Some(End::Lost { node: lost }) if *lost == name);
                let lost = known || self.is_lost(&mut heartbeats, node);
                if outcome.is_none() && lost {
                    // A host cut off from the network closes no connection, and may return.
                    let ended = self.disconnected().contains(&node);
                    may_return &= !ended;
                    let how = if ended { "; its launcher has ended" } else { "" };
                    problems.push(format!("{name} no longer sends heartbeats{how}"));
                    *outcome =
                        Some(Outcome { ranks: self.members[node].ranks, ..Outcome::default() });
                }
            }
        }
        let mut summary = Summary::of(outcomes.into_iter().flatten().collect(), problems);
        let end: Option<End> = outlast(&self.rdzv, || self.read("end", Duration::from_millis(1)))?;
        policy.apply(&mut summary, end.as_ref());
        summary.starts_again &= may_return;
        self.set("summary", &summary)?;
        Ok(summary)
    }

    /// Returns the reason for which a node with this outcome ends the attempt on the others, if it
    /// does.
    fn end_by(&self, node: usize, outcome: &Outcome) -> Option<End> {
        match (outcome.stopped || outcome.problem.is_some(), outcome.failures.first()) {
            (true, _) => Some(End::Left { node }),
            (false, Some(failure)) => Some(End::Failed { rank: failure.rank }),
            (false, None) if outcome.saved == 0 => None,
            (false, None) => Some(End::Saved { rank: self.members[node].first_rank }),
        }
    }

    /// Ends the attempt on the other nodes after a signal to this one: their ranks may still be
    /// running.
    fn forward_signal(&self, queue: &mut Queue) {
        if queue.drain() {
            drop(self.announce(&End::Left { node: self.node }));
        }
    }

    /// On the other nodes: publishes this node's outcome and waits for the summary.
    fn await_summary(&self, own: &Outcome, queue: &mut Queue) -> Result<Summary> {
        self.set(&format!("outcome/{}", self.node), own)?;
        let mut heartbeats = self.heartbeats([0]);
        let mut contact = Contact::new(&self.rdzv);
        loop {
            if let Some(summary) = self.read_slice("summary", &mut contact)? {
                // The outcome is known, even if the store ends now.
                drop(self.store.add(&self.key("read"), 1));
                return Ok(summary);
            }
            self.forward_signal(queue);
            if self.is_lost(&mut heartbeats, 0) {
                return Err(Error::rendezvous(self.store.addr(), "it no longer sends heartbeats"));
            }
        }
    }

    /// Waits until every node has read the summary; then the store may end. Does not wait for lost
    /// nodes, nor longer than it takes until a node counts as lost.
    pub(super) fn wait_for_readers(&self, summary: &Summary) {
        if !self.members[self.node].hosts {
            return;
        }
        let readers = (self.members.len() - 1).saturating_sub(summary.lost);
        let limit = match self.store.check(&[&self.key("summary")]) {
            // The first node was lost before it could publish one.
            Ok(false) => self.rdzv.heartbeat,
            _ => self.rdzv.lost_after(),
        };
        let start = Instant::now();
        while start.elapsed() < limit {
            let read = self.store.add(&self.key("read"), 0);
            if read.is_ok_and(|read| usize::try_from(read).is_ok_and(|read| read >= readers)) {
                return;
            }
            std::thread::sleep(Duration::from_millis(2));
        }
    }
}

impl RestartPolicy {
    /// Decides whether there is another attempt, and whether it counts as a restart.
    fn apply(&self, summary: &mut Summary, end: Option<&End>) {
        let by_itself = summary.failures.iter().any(|failure| !failure.notified);
        let joined_or_left = matches!(end, Some(End::Joined { .. } | End::Left { .. }));
        let nodes_changed = !summary.closes && (summary.stopped || joined_or_left && !by_itself);
        let changed = self.elastic && summary.problems.is_empty() && nodes_changed;
        summary.is_restart = !changed;
        summary.starts_again = changed && (summary.code != 0 || joined_or_left)
            || summary.may_restart() && self.restarts_left;
        // Two attempts never run at once.
        summary.starts_again &= summary.survivors.is_empty();
    }
}

/// A thread that sends heartbeats and monitors the other nodes, until this is dropped.
#[derive(Debug)]
pub(crate) struct HeartbeatThread {
    _alive: Arc<()>,
}

impl HeartbeatThread {
    pub(super) fn start(round: &Arc<Round>, attempt: u32, events: Sender<Event>) -> Result<Self> {
        let alive = Arc::new(());
        let (round, until) = (Arc::clone(round), Arc::downgrade(&alive));
        std::thread::Builder::new()
            .name("launch-nodes".to_owned())
            .spawn(move || {
                if let Some(end) = listen(&round, &until) {
                    // Fails after the end of the job.
                    let _ = events.send(Event::RemoteEnd { attempt, end });
                    // The other nodes still expect this node's heartbeats.
                    while until.strong_count() > 0 {
                        drop(round.beat());
                        std::thread::sleep(round.rdzv.heartbeat);
                    }
                }
            })
            .map_err(Error::io("start a thread"))?;
        Ok(Self { _alive: alive })
    }
}

/// Sends heartbeats until another node ends the attempt; returns `None` if `until` was dropped.
fn listen(round: &Round, until: &Weak<()>) -> Option<End> {
    let nodes = round.members.len();
    let mut others = (1..nodes).map(|step| (round.node + step) % nodes);
    let next = others.find(|&node| round.members[node].ours);
    let mut heartbeats = round.heartbeats(next);
    let mut contact = Contact::new(&round.rdzv);
    while until.strong_count() > 0 {
        let polled = round.beat().and_then(|()| round.read("end", round.rdzv.heartbeat));
        match contact.tolerate(polled) {
            Ok(None | Some(None)) => {}
            Ok(Some(Some(end))) => return Some(end),
            Err(why) => {
                let node = format!("the control store at {} ({why})", round.store.addr());
                return Some(End::Lost { node });
            }
        }
        let lost =
            next.filter(|&next| round.is_lost(&mut heartbeats, next)).map(|next| round.name(next));
        if let Some(node) = lost.or_else(|| round.lost_agent()) {
            let end = End::Lost { node };
            drop(round.announce(&end));
            return Some(end);
        }
    }
    None
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::job::Failure;

    #[test]
    fn leaving_node_starts_a_new_attempt_unless_it_hosts_the_control_store() {
        let policy = RestartPolicy { restarts_left: true, elastic: true };
        for closes in [false, true] {
            let left = Outcome { ranks: 1, saved: 1, stopped: true, closes, ..Outcome::default() };
            let other = Outcome { ranks: 1, saved: 1, ..Outcome::default() };
            // The outcome may arrive before or after the announcement of the end.
            for end in [None, Some(End::Left { node: 0 })] {
                let mut summary = Summary::of(vec![left.clone(), other.clone()], Vec::new());
                policy.apply(&mut summary, end.as_ref());
                assert_eq!(summary.starts_again, !closes, "{end:?}");
            }
        }
    }

    /// One of two nodes at the test's store.
    fn round(port: u16, node: usize) -> Round {
        let member = |first_rank| Member {
            host: "h".to_owned(),
            addr: "127.0.0.1".to_owned(),
            first_rank,
            ranks: 1,
            hosts: first_rank == 0,
            ours: true,
        };
        let rdzv = RdzvConfig { heartbeat: Duration::from_millis(50), ..RdzvConfig::default() };
        let rdzv = RdzvConfig { missed_heartbeats: 100, ..rdzv };
        let store = TcpStore::connect("127.0.0.1", port, Duration::from_secs(60)).unwrap();
        let (store, prefix) = (Arc::new(store), "job".to_owned());
        Round { store, prefix, node, members: vec![member(0), member(1)], control: None, rdzv }
    }

    #[test]
    fn slow_node_is_waited_for_while_it_sends_heartbeats() {
        let server = TcpStoreServer::bind("127.0.0.1:0".parse().unwrap()).unwrap();
        let [first, second] = [0, 1].map(|node| round(server.port(), node));
        let failure = Failure { code: 7, how: "exit code 7".to_owned(), ..Failure::default() };
        let failed = Outcome { ranks: 1, failures: vec![failure], ..Outcome::default() };
        let policy = RestartPolicy { restarts_left: false, elastic: false };
        let summaries = std::thread::scope(|scope| {
            let agree = |round: &Round, own| {
                let (sender, events) = std::sync::mpsc::channel();
                let summary = round.agree(
                    own,
                    &mut Queue::new(events, std::sync::mpsc::channel().0),
                    &policy,
                );
                drop(sender);
                summary
            };
            let agreed = scope.spawn(move || agree(&first, failed));
            // Its ranks end because of the other node's failure; it sends heartbeats meanwhile.
            let end: Option<End> = second.read("end", Duration::from_secs(60)).unwrap();
            assert_eq!(end, Some(End::Failed { rank: 0 }));
            for _ in 0..20 {
                second.beat().unwrap();
                std::thread::sleep(second.rdzv.heartbeat);
            }
            [agree(&second, Outcome { ranks: 1, ..Outcome::default() }), agreed.join().unwrap()]
        });
        for summary in summaries {
            assert_eq!((summary.code, &summary.problems[..], summary.ranks), (7, &[][..], 2));
        }
    }
}
