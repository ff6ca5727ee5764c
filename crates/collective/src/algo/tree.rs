//! Binomial trees: `lg p` steps of the whole buffer.
//!
//! Positions are counted from the root along [`Layout::order`], so that subtrees stay within a
//! machine where possible.

use super::{Buf, Layout, RankCall, Schedule, Slots};
use crate::{Rank, Verb};

/// Broadcasts from the root, or reduces to it.
pub(super) fn binomial(call: RankCall, layout: &Layout) -> Schedule {
    match call.verb {
        Verb::Broadcast => broadcast(call, layout),
        Verb::Reduce => reduce(call, layout),
        verb => unreachable!("{verb} has no binomial tree"),
    }
}

/// A rank's position in the tree; the root is at 0.
#[derive(Debug)]
struct Node {
    layout: Layout,
    root: usize,
    /// This rank's position.
    at: usize,
}

impl Node {
    fn new(call: RankCall, layout: &Layout) -> Self {
        let root = layout.position(call.root);
        let at = (layout.position(call.rank) + call.world - root) % call.world;
        Self { layout: layout.clone(), root, at }
    }

    fn rank(&self, position: usize) -> Rank {
        let order = self.layout.order();
        order[(self.root + position) % order.len()]
    }

    /// Returns the distance to the parent; for the root, the smallest power of two that is at least
    /// the world size.
    fn reach(&self) -> usize {
        let world = self.layout.world();
        if self.at == 0 { world.next_power_of_two() } else { 1 << self.at.trailing_zeros() }
    }

    fn parent(&self) -> Rank {
        self.rank(self.at - self.reach())
    }

    /// Number of this rank's children; child `e` is at distance 2 to the power of `e`.
    fn children(&self) -> usize {
        let reach = self.reach().trailing_zeros() as usize;
        (0..reach).filter(|exponent| self.at + (1 << exponent) < self.layout.world()).count()
    }

    fn child(&self, exponent: usize) -> Rank {
        self.rank(self.at + (1 << exponent))
    }
}

fn broadcast(call: RankCall, layout: &Layout) -> Schedule {
    let node = Node::new(call, layout);
    let whole = call.whole(Buf::Output);
    let (children, arrival) = (node.children(), usize::from(node.at != 0));
    Schedule::new(0, children + arrival, move |index, round| {
        if index < arrival {
            round.recv(node.parent(), whole);
        } else {
            // The largest subtree first.
            round.send(node.child(children - 1 - (index - arrival)), whole);
        }
    })
}

fn reduce(call: RankCall, layout: &Layout) -> Schedule {
    let node = Node::new(call, layout);
    let whole = call.whole(Buf::Output);
    let is_root = node.at == 0;
    let (children, departure) = (node.children(), usize::from(!is_root));
    let slots = Slots::new(0, whole.len);
    let slot_count = if children == 0 { 0 } else { 1 + departure };
    Schedule::new(slots.end(slot_count), children + departure, move |index, round| {
        let (arrived, sum) = (slots.slot(0, whole.len), slots.slot(1, whole.len));
        // A rank other than the root leaves its buffer unchanged.
        let so_far = if is_root || index == 0 { whole } else { sum };
        if index < children {
            round.recv(node.child(index), arrived);
            let to = if is_root { whole } else { sum };
            round.fold(call.reduce_op(), to, [so_far, arrived]);
        } else {
            round.send(node.parent(), so_far);
        }
    })
}
