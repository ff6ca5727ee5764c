//! The state machine by which nodes join the attempts of an elastic job, without sockets and
//! clocks.
//!
//! All nodes share one [`State`], stored as JSON in the control store and changed only by
//! compare-and-set. [`step`] returns a node's next action for the state that it read; the loop
//! around it (`elastic`) supplies the timeouts: whether the last call is over, whether this node's
//! join timeout is over, and which nodes are lost. Each node measures them with its own clock, so
//! clocks need not agree.
//!
//! An attempt gathers nodes until it has the maximum number, or, after the last call, at least the
//! minimum; then it runs with these, sorted by name. Nodes that join meanwhile wait. When it has
//! ended, all nodes gather for the next attempt.
//!
//! Invariant: the nodes of a running attempt do not change; an attempt never has more than `max`
//! nodes, and never runs with fewer than `min`; no node is listed twice.

use serde::{Deserialize, Serialize};

/// A node's entry in the shared state. Ordered by host, then process id.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub(super) struct Node {
    pub(super) host: String,
    pub(super) pid: u32,
    /// Random, because host names and process ids may be equal.
    pub(super) id: u64,
    /// Local address of its connection to the control store.
    pub(super) addr: String,
    pub(super) ranks: usize,
    pub(super) role: String,
    /// Whether it hosts the control store.
    pub(super) hosts: bool,
}

/// Phase of an elastic job.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(super) enum Phase {
    #[default]
    Gathering,
    Running,
    /// The job has ended, with this exit code.
    Closed {
        code: i32,
    },
}

/// The shared state.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct State {
    /// Number of the attempt.
    pub(super) round: u32,
    /// Number of restarts after failures.
    pub(super) restarts: u32,
    pub(super) phase: Phase,
    /// Nodes of this attempt; sorted while it runs.
    pub(super) nodes: Vec<Node>,
    /// Nodes waiting for the next attempt.
    pub(super) waiting: Vec<Node>,
}

/// Local knowledge of a node, in addition to the state.
pub(super) struct View<'a> {
    pub(super) me: &'a Node,
    pub(super) min: usize,
    pub(super) max: usize,
    /// Whether the last call is over: at least `min` nodes have been present for its duration.
    pub(super) last_call_over: bool,
    /// Whether this node's join timeout is over.
    pub(super) join_over: bool,
    /// Ids of lost nodes.
    pub(super) lost: &'a [u64],
}

/// Next action of a node.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Action {
    /// Replace the state by this one, then read it again.
    Write(State),
    /// Read the state again later.
    Wait,
    /// Run the attempt as the node with this index.
    Run(usize),
    /// The job has ended.
    Closed { code: i32 },
    /// Not enough nodes joined in time.
    TooFew,
}

/// Returns the next action of `view.me`.
pub(super) fn step(state: &State, view: &View<'_>) -> Action {
    let same = |node: &Node| node.id == view.me.id;
    let taking_part = state.nodes.iter().position(same);
    match (state.phase, taking_part) {
        (Phase::Closed { code }, _) => return Action::Closed { code },
        (Phase::Running, Some(place)) => return Action::Run(place),
        _ => {}
    }
    let dead = |node: &Node| view.lost.contains(&node.id);
    if state.phase == Phase::Running && state.nodes.iter().all(dead) {
        // No node of the attempt is left to end it.
        return end(state, state.round, true).map_or(Action::Wait, Action::Write);
    }
    let mut next = state.clone();
    let lost = |node: &Node| node.id != view.me.id && dead(node);
    next.waiting.retain(|node| !lost(node));
    if state.phase == Phase::Gathering {
        next.nodes.retain(|node| !lost(node));
    }
    if view.join_over {
        next.nodes.retain(|node| state.phase == Phase::Running || !same(node));
        next.waiting.retain(|node| !same(node));
        return if next == *state { Action::TooFew } else { Action::Write(next) };
    }
    let waits = next.waiting.iter().any(same);
    if state.phase == Phase::Running || (taking_part.is_none() && next.nodes.len() >= view.max) {
        if !waits {
            next.waiting.push(view.me.clone());
        }
    } else {
        next.waiting.retain(|node| !same(node));
        if taking_part.is_none() {
            next.nodes.push(view.me.clone());
        }
        let enough = next.nodes.len() >= view.min && view.last_call_over;
        if next.nodes.len() >= view.max || enough {
            next.nodes.sort();
            next.phase = Phase::Running;
        }
    }
    if next == *state { Action::Wait } else { Action::Write(next) }
}

/// Returns the state after the end of attempt `round`; `None` if another node has written it
/// already.
pub(super) fn end(state: &State, round: u32, failed: bool) -> Option<State> {
    let current = state.round == round && state.phase == Phase::Running;
    current.then(|| State {
        round: round + 1,
        restarts: state.restarts + u32::from(failed),
        phase: Phase::Gathering,
        nodes: Vec::new(),
        waiting: state.waiting.clone(),
    })
}

/// Returns the state of a job that has ended; `None` if it has been written already.
pub(super) fn close(state: &State, code: i32) -> Option<State> {
    let open = !matches!(state.phase, Phase::Closed { .. });
    open.then(|| State { phase: Phase::Closed { code }, ..state.clone() })
}

#[cfg(test)]
mod tests {
    use std::collections::{BTreeMap, BTreeSet};

    use proptest::prelude::*;

    use super::*;

    fn node(id: u64) -> Node {
        // Two nodes per host, so that the order differs from that of ids.
        let host = format!("h{}", (7 - id) / 2);
        Node { host, pid: 1, id, addr: String::new(), ranks: 1, role: String::new(), hosts: false }
    }

    fn view<'a>(me: &'a Node, (min, max): (usize, usize), lost: &'a [u64]) -> View<'a> {
        View { me, min, max, last_call_over: false, join_over: false, lost }
    }

    fn written(action: Action) -> State {
        let Action::Write(state) = action else { panic!("{action:?}") };
        state
    }

    #[test]
    fn max_nodes_start_at_once_and_min_nodes_after_the_last_call() {
        let (a, b) = (node(0), node(1));
        let one = written(step(&State::default(), &view(&a, (1, 2), &[])));
        assert_eq!(step(&one, &view(&a, (1, 2), &[])), Action::Wait);
        let both = written(step(&one, &view(&b, (1, 2), &[])));
        assert_eq!(both.phase, Phase::Running);
        let over = View { last_call_over: true, ..view(&a, (1, 2), &[]) };
        let alone = written(step(&one, &over));
        assert_eq!(step(&alone, &over), Action::Run(0));
        let late = written(step(&alone, &view(&b, (1, 2), &[])));
        assert_eq!(late.waiting, std::slice::from_ref(&b));
        assert_eq!(step(&late, &view(&b, (1, 2), &[])), Action::Wait);
    }

    #[test]
    fn node_that_timed_out_leaves_the_state() {
        let me = node(0);
        let here = written(step(&State::default(), &view(&me, (2, 2), &[])));
        let over = View { join_over: true, ..view(&me, (2, 2), &[]) };
        let gone = written(step(&here, &over));
        assert_eq!(gone, State::default());
        assert_eq!(step(&gone, &over), Action::TooFew);
    }

    #[test]
    fn an_attempt_ends_once() {
        let running = State { phase: Phase::Running, nodes: vec![node(0)], ..State::default() };
        let next = end(&running, 0, true).unwrap();
        assert_eq!((next.round, next.restarts, next.phase), (1, 1, Phase::Gathering));
        assert_eq!(end(&next, 0, true), None);
        assert_eq!(end(&State { phase: Phase::Running, ..next }, 0, true), None);
    }

    /// An action of one of the nodes.
    #[derive(Clone, Copy, Debug)]
    enum Move {
        Read,
        /// Acts on the state it read, which others may have replaced since.
        Write {
            last_call_over: bool,
        },
        /// Its attempt has ended.
        End {
            failed: bool,
        },
        /// It dies, and the others detect it.
        Die,
    }

    fn moves() -> impl Strategy<Value = Vec<(u64, Move)>> {
        let one = prop_oneof![
            6 => Just(Move::Read),
            6 => any::<bool>().prop_map(|last_call_over| Move::Write { last_call_over }),
            2 => any::<bool>().prop_map(|failed| Move::End { failed }),
            1 => Just(Move::Die),
        ];
        prop::collection::vec((0..5_u64, one), 0..120)
    }

    /// The shared state and each node's view of it, changed by moves in any order.
    struct World {
        limits: (usize, usize),
        state: State,
        seen: BTreeMap<u64, State>,
        runs: BTreeMap<u64, u32>,
        dead: Vec<u64>,
        /// The nodes of each attempt.
        attempts: BTreeMap<u32, Vec<Node>>,
    }

    impl World {
        fn compare_set(&mut self, id: u64, next: State) {
            if self.seen[&id] == self.state {
                self.check(&next);
                self.state = next;
            }
            self.seen.insert(id, self.state.clone());
        }

        fn check(&mut self, next: &State) {
            let (min, max) = self.limits;
            let all: BTreeSet<_> = next.nodes.iter().chain(&next.waiting).map(|n| n.id).collect();
            assert_eq!(all.len(), next.nodes.len() + next.waiting.len(), "a node is listed twice");
            assert!(next.nodes.len() <= max);
            assert!(next.round >= self.state.round && next.restarts >= self.state.restarts);
            assert!(next.restarts <= next.round);
            if next.phase == Phase::Running {
                assert!(next.nodes.len() >= min && next.nodes.is_sorted());
                let known = self.attempts.entry(next.round).or_insert_with(|| next.nodes.clone());
                assert_eq!(*known, next.nodes, "the nodes of a running attempt changed");
            }
        }

        fn make(&mut self, id: u64, which: Move) {
            if self.dead.contains(&id) {
                return;
            }
            match which {
                Move::Read => drop(self.seen.insert(id, self.state.clone())),
                Move::Write { last_call_over } => {
                    let Some(seen) = self.seen.get(&id).cloned() else { return };
                    // A node does not read the state while its ranks run.
                    if self.runs.contains_key(&id) {
                        return;
                    }
                    let (me, dead) = (node(id), self.dead.clone());
                    let view = View { last_call_over, ..view(&me, self.limits, &dead) };
                    match step(&seen, &view) {
                        Action::Write(next) => self.compare_set(id, next),
                        Action::Run(place) => {
                            assert_eq!(self.attempts[&seen.round][place].id, id);
                            self.runs.insert(id, seen.round);
                        }
                        Action::Wait => {}
                        other => panic!("{other:?}"),
                    }
                }
                Move::End { failed } => {
                    if let Some(round) = self.runs.remove(&id) {
                        self.seen.insert(id, self.state.clone());
                        if let Some(next) = end(&self.state, round, failed) {
                            self.compare_set(id, next);
                        }
                    }
                }
                Move::Die => {
                    self.runs.remove(&id);
                    self.dead.push(id);
                }
            }
        }

        /// Lets all live nodes act in turn and every attempt end; then checks that all of them run,
        /// or wait because of `max`.
        fn check_progress(&mut self) {
            let alive: Vec<_> = (0..5).filter(|id| !self.dead.contains(id)).collect();
            // A live node detects one that died while its attempt ran.
            for _ in 0..3 {
                for &id in &alive {
                    self.make(id, Move::End { failed: false });
                }
                for _ in 0..8 {
                    for &id in &alive {
                        self.make(id, Move::Read);
                        self.make(id, Move::Write { last_call_over: true });
                    }
                }
            }
            let (min, max) = self.limits;
            if alive.len() >= min {
                assert_eq!(self.state.phase, Phase::Running, "{:?}", self.state);
                assert!(self.state.nodes.len() <= max);
                assert!(self.state.nodes.iter().all(|node| !self.dead.contains(&node.id)));
            }
        }
    }

    proptest! {
        #[test]
        fn invariants_hold_in_any_order(moves in moves(), min in 1..4_usize, more in 0..3_usize) {
            let mut world = World {
                limits: (min, min + more),
                state: State::default(),
                seen: BTreeMap::new(),
                runs: BTreeMap::new(),
                dead: Vec::new(),
                attempts: BTreeMap::new(),
            };
            for (id, which) in moves {
                world.make(id, which);
            }
            world.check_progress();
        }
    }
}
