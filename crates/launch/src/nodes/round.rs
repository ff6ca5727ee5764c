//! One attempt of several nodes: what their launchers tell one another while it runs and at its end.
//!
//! Keys of the control store, under a prefix for each attempt:
//!
//! | key | value |
//! |---|---|
//! | `end` | the first [`End`]: every node waits for it |
//! | `beat/<node>` | a counter, moved at every heartbeat |
//! | `outcome/<node>` | how the attempt went there |
//! | `verdict` | what the first node makes of all outcomes, so that all nodes do the same |
//! | `read` | how many have read the verdict |
//!
//! Each node watches the next one's counter, in a ring, by its own clock; who hosts the store is
//! watched by everybody, since it no longer answers.

use std::fmt::{self, Display, Formatter};
use std::sync::mpsc::Sender;
use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};

use collective::{Store, TcpStore, TcpStoreServer};
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};

use super::heartbeat::Heartbeats;
use super::{End, Patience, SLICE, from_json, to_json};
use crate::signals::{Ear, Event};
use crate::summary::{Outcome, Verdict};
use crate::{Error, Result};

/// A node of an attempt, as it is named to people.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Member {
    pub(super) host: String,
    /// As the store sees it.
    pub(super) addr: String,
    pub(super) first_rank: usize,
    pub(super) ranks: usize,
    /// It hosts the control store.
    pub(super) hosts: bool,
    /// Its launcher is one of ours; torchrun's agents know nothing of the keys here.
    pub(super) ours: bool,
}

impl Display for Member {
    fn fmt(&self, f: &mut Formatter<'_>) -> fmt::Result {
        let Self { host, addr, first_rank, ranks, ours, .. } = self;
        match ours {
            true => write!(f, "host {host}, {addr}, ")?,
            false => f.write_str("an agent of torchrun, ")?,
        }
        match ranks {
            1 => write!(f, "rank {first_rank}"),
            _ => write!(f, "ranks {first_rank} to {}", first_rank + ranks - 1),
        }
    }
}

/// One attempt, seen from one node.
#[derive(Debug)]
pub(super) struct Round {
    pub(super) store: Arc<TcpStore>,
    /// Before every key of this attempt.
    pub(super) prefix: String,
    /// Which of `members` this is.
    pub(super) node: usize,
    pub(super) members: Vec<Member>,
    /// The control store, where it looks after torchrun's agents.
    pub(super) control: Option<Arc<TcpStoreServer>>,
    pub(super) patience: Patience,
}

/// What decides about a further attempt, besides what has happened.
pub(super) struct Rules {
    /// Restarts are left.
    pub(super) restarts_left: bool,
    /// Nodes may come and go.
    pub(super) elastic: bool,
    /// After a failure, how long a node may take to end its ranks.
    pub(super) end_time: Duration,
}

impl Round {
    fn key(&self, name: impl Display) -> String {
        format!("{}/{name}", self.prefix)
    }

    /// A node in words.
    fn name(&self, node: usize) -> String {
        match self.members.get(node) {
            Some(member) => format!("node {node} ({member})"),
            None => format!("node {node}"),
        }
    }

    /// An agent of torchrun whose connection has ended before its ranks were through, in words.
    pub(super) fn gone_agent(&self) -> Option<String> {
        let gone = self.control.as_ref()?.gone();
        let node = |key: &String| key.rsplit('/').next()?.parse::<usize>().ok();
        let theirs = |node: &usize| self.members.get(*node).is_some_and(|member| !member.ours);
        gone.iter().filter_map(node).find(theirs).map(|node| self.name(node))
    }

    /// Ends the attempt on all nodes; the first reason stays.
    pub(super) fn tell(&self, end: &End) -> Result<()> {
        self.store.compare_set(&self.key("end"), b"", &to_json(end))?;
        Ok(())
    }

    /// [`tell`](Self::tell), while the caller goes on.
    pub(super) fn tell_apart(self: &Arc<Self>, end: &End) {
        let (round, end) = (Arc::clone(self), end.clone());
        let tell = move || {
            // Who cannot be told notices that this node no longer beats.
            drop(round.tell(&end));
        };
        drop(std::thread::Builder::new().name("launch-tell".to_owned()).spawn(tell));
    }

    /// Reads a value of this attempt; `None` if it is not there within `time`.
    fn read<T: DeserializeOwned>(&self, name: &str, time: Duration) -> Result<Option<T>> {
        match self.store.get(&self.key(name), time) {
            Ok(text) => from_json(name, &text).map(Some),
            Err(collective::Error::KeyTimeout { .. }) => Ok(None),
            Err(error) => Err(error.into()),
        }
    }

    /// The longest single wait for another node, between which its heartbeat is checked.
    fn slice(&self) -> Duration {
        SLICE.min(self.patience.heartbeat)
    }

    fn beat(&self) -> Result<()> {
        self.store.add(&self.beat_key(self.node), 1)?;
        Ok(())
    }

    fn beat_key(&self, node: usize) -> String {
        self.key(format_args!("beat/{node}"))
    }

    fn heartbeats(&self, nodes: impl IntoIterator<Item = usize>) -> Heartbeats {
        Heartbeats::new(nodes.into_iter().map(|node| self.beat_key(node)))
    }

    /// Whether `node` has not beaten for too long. Asks the store once for each heartbeat.
    fn is_lost(&self, heartbeats: &mut Heartbeats, node: usize) -> bool {
        heartbeats.poll(&self.store, &self.patience);
        heartbeats.is_lost(&self.beat_key(node), &self.patience)
    }

    /// Agrees with the other nodes on how the attempt went, after it has ended here.
    pub(super) fn settle(&self, own: Outcome, ear: &mut Ear, rules: &Rules) -> Verdict {
        let agreed = if self.node == 0 {
            self.judge(&own, ear, rules)
        } else {
            self.await_verdict(&own, ear, rules)
        };
        let mut verdict = agreed.unwrap_or_else(|error| {
            let store_is_lost = matches!(error, Error::Collective(_));
            let remark = match store_is_lost {
                true => self.about_store(&format!("is out of reach: {error}"), rules.elastic),
                false => format!("{}: {error}", self.name(0)),
            };
            let mut verdict = Verdict::of(vec![own], vec![remark]);
            rules.apply(&mut verdict, None);
            // Nodes that come and go have nowhere to meet.
            verdict.again &= !(rules.elastic && store_is_lost);
            verdict
        });
        verdict.again &= ear.signal.is_none();
        verdict
    }

    /// What has happened to the control store, whose it is, and what to do about it.
    fn about_store(&self, what: &str, elastic: bool) -> String {
        let keeper = self.members.iter().position(|member| member.hosts);
        let whose = keeper.map_or_else(String::new, |node| format!(", on {},", self.name(node)));
        let advice = if elastic { super::advice(keeper.is_some()) } else { "" };
        format!("the control store at {}{whose} {what}{advice}", self.store.addr())
    }

    /// On the first node: collects all outcomes, and publishes the verdict.
    fn judge(&self, own: &Outcome, ear: &mut Ear, rules: &Rules) -> Result<Verdict> {
        let nodes = self.members.len();
        let mut outcomes = vec![None; nodes];
        outcomes[0] = Some(own.clone());
        let mut heartbeats = self.heartbeats(1..nodes);
        let mut remarks = Vec::new();
        let mut deadline = None;
        while let Some(node) = outcomes.iter().position(Option::is_none) {
            outcomes[node] = self.read(&format!("outcome/{node}"), self.slice())?;
            let ended = outcomes.iter().flatten().any(Outcome::ends_others);
            if ended || self.is_ending(ear) {
                deadline.get_or_insert_with(|| Instant::now() + rules.end_time);
            }
            for (node, outcome) in outcomes.iter_mut().enumerate() {
                let name = self.name(node);
                let known =
                    matches!(&ear.elsewhere, Some(End::Lost { node: lost }) if *lost == name);
                let lost = known || is_over(deadline) || self.is_lost(&mut heartbeats, node);
                if outcome.is_none() && lost {
                    remarks.push(format!("{name} no longer answers"));
                    *outcome =
                        Some(Outcome { ranks: self.members[node].ranks, ..Outcome::default() });
                }
            }
        }
        let mut verdict = Verdict::of(outcomes.into_iter().flatten().collect(), remarks);
        let end: Option<End> = self.read("end", Duration::from_millis(1))?;
        rules.apply(&mut verdict, end.as_ref());
        self.store.set(&self.key("verdict"), &to_json(&verdict))?;
        Ok(verdict)
    }

    /// Whether another node, or a signal to this one, has ended the attempt. The others are told of a
    /// signal: their ranks may still run.
    fn is_ending(&self, ear: &mut Ear) -> bool {
        if ear.listen() {
            drop(self.tell(&End::Left { node: self.node }));
        }
        ear.signal.is_some() || ear.elsewhere.is_some()
    }

    /// On the other nodes: publishes the own outcome and waits for the verdict.
    fn await_verdict(&self, own: &Outcome, ear: &mut Ear, rules: &Rules) -> Result<Verdict> {
        let key = self.key(format_args!("outcome/{}", self.node));
        let start = Instant::now();
        while let Err(error) = self.store.set(&key, &to_json(own)) {
            // The network may be back before the others give up.
            if start.elapsed() > self.patience.lost_after() {
                return Err(error.into());
            }
            std::thread::sleep(SLICE);
        }
        let mut heartbeats = self.heartbeats([0]);
        let mut deadline = None;
        loop {
            if let Some(verdict) = self.read("verdict", self.slice())? {
                self.store.add(&self.key("read"), 1)?;
                return Ok(verdict);
            }
            if own.ends_others() || self.is_ending(ear) {
                // The first node waits as long for the others.
                let time = rules.end_time + self.patience.lost_after();
                deadline.get_or_insert_with(|| Instant::now() + time);
            }
            if self.is_lost(&mut heartbeats, 0) || is_over(deadline) {
                return Err(Error::Rendezvous("it no longer answers".to_owned()));
            }
        }
    }

    /// Waits, for a while, until every node has read the verdict: the store may go then.
    pub(super) fn linger(&self, verdict: &Verdict) {
        if !self.members[self.node].hosts {
            return;
        }
        let readers = self.members.len() - 1 - verdict.remarks.len().min(self.members.len() - 1);
        let start = Instant::now();
        while start.elapsed() < self.patience.heartbeat {
            let read = self.store.add(&self.key("read"), 0);
            if !read.is_ok_and(|read| usize::try_from(read).is_ok_and(|read| read < readers)) {
                return;
            }
            std::thread::sleep(Duration::from_millis(2));
        }
    }
}

impl Rules {
    /// Decides whether there is a further attempt, and whether it counts as a restart.
    fn apply(&self, verdict: &mut Verdict, end: Option<&End>) {
        let by_itself = verdict.failures.iter().any(|failure| !failure.told);
        let came = matches!(end, Some(End::Joined { .. } | End::Left { .. }));
        let nodes_changed = !verdict.closes && (verdict.stopped || came && !by_itself);
        let changed = self.elastic && verdict.remarks.is_empty() && nodes_changed;
        verdict.counted = !changed;
        verdict.again =
            changed && (verdict.code != 0 || came) || verdict.may_restart() && self.restarts_left;
    }
}

fn is_over(deadline: Option<Instant>) -> bool {
    deadline.is_some_and(|due| due <= Instant::now())
}

/// A thread that beats, and listens to the other nodes, until this is dropped.
#[derive(Debug)]
pub(crate) struct Watch {
    _alive: Arc<()>,
}

impl Watch {
    pub(super) fn start(round: &Arc<Round>, attempt: u32, events: Sender<Event>) -> Result<Self> {
        let alive = Arc::new(());
        let (round, until) = (Arc::clone(round), Arc::downgrade(&alive));
        std::thread::Builder::new()
            .name("launch-nodes".to_owned())
            .spawn(move || {
                if let Some(end) = listen(&round, &until) {
                    // The job has ended if nobody listens.
                    let _ = events.send(Event::Elsewhere { attempt, end });
                    // The others still count on this node's heartbeat.
                    while until.strong_count() > 0 {
                        drop(round.beat());
                        std::thread::sleep(round.patience.heartbeat);
                    }
                }
            })
            .map_err(Error::io("start a thread"))?;
        Ok(Self { _alive: alive })
    }
}

/// Beats until the attempt ends: `None` if nobody wants to know any more.
fn listen(round: &Round, until: &Weak<()>) -> Option<End> {
    let nodes = round.members.len();
    let mut others = (1..nodes).map(|step| (round.node + step) % nodes);
    let next = others.find(|&node| round.members[node].ours);
    let mut heartbeats = round.heartbeats(next);
    let mut answered = Instant::now();
    while until.strong_count() > 0 {
        match round.beat().and_then(|()| round.read("end", round.patience.heartbeat)) {
            Ok(Some(end)) => return Some(end),
            Ok(None) => answered = Instant::now(),
            Err(why) if answered.elapsed() > round.patience.lost_after() => {
                let node = format!("the control store at {} ({why})", round.store.addr());
                return Some(End::Lost { node });
            }
            Err(_) => std::thread::sleep(round.slice()),
        }
        let lost =
            next.filter(|&next| round.is_lost(&mut heartbeats, next)).map(|next| round.name(next));
        if let Some(node) = lost.or_else(|| round.gone_agent()) {
            let end = End::Lost { node };
            drop(round.tell(&end));
            return Some(end);
        }
    }
    None
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_node_that_leaves_changes_the_nodes_unless_the_store_goes_with_it() {
        let rules = Rules { restarts_left: true, elastic: true, end_time: Duration::from_secs(1) };
        for closes in [false, true] {
            let left = Outcome { ranks: 1, saved: 1, stopped: true, closes, ..Outcome::default() };
            let other = Outcome { ranks: 1, saved: 1, ..Outcome::default() };
            // The outcome may be there before the word that ends the attempt, or after it.
            for end in [None, Some(End::Left { node: 0 })] {
                let mut verdict = Verdict::of(vec![left.clone(), other.clone()], Vec::new());
                rules.apply(&mut verdict, end.as_ref());
                assert_eq!(verdict.again, !closes, "{end:?}");
            }
        }
    }
}
