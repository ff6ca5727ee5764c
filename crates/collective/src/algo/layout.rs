//! Maps ranks to machines.

use std::sync::Arc;

use crate::Rank;

/// The machine of each rank. Cheap to clone.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Layout(Arc<Inner>);

#[derive(Debug, PartialEq, Eq)]
struct Inner {
    /// By rank.
    machine: Vec<usize>,
    /// By machine, in rank order.
    members: Vec<Vec<Rank>>,
    /// All members, machine by machine.
    order: Vec<Rank>,
    /// Largest number of ranks on one machine.
    widest: usize,
    in_order: bool,
}

impl Layout {
    /// `machines[rank]` identifies the machine of a rank.
    pub(crate) fn new<M: PartialEq>(machines: &[M]) -> Self {
        let mut machine = Vec::with_capacity(machines.len());
        let mut members: Vec<Vec<Rank>> = Vec::new();
        for (rank, name) in machines.iter().enumerate() {
            // Ranks of one machine are mostly neighbours, so the search starts at the last machine.
            let known = members.iter().rposition(|members| machines[members[0]] == *name);
            let index = known.unwrap_or(members.len());
            if known.is_none() {
                members.push(Vec::new());
            }
            members[index].push(rank);
            machine.push(index);
        }
        Self::with_members(machine, members)
    }

    fn with_members(machine: Vec<usize>, members: Vec<Vec<Rank>>) -> Self {
        let (order, widest) = (members.concat(), members.iter().map(Vec::len).max().unwrap_or(0));
        let in_order = order.is_sorted();
        Self(Arc::new(Inner { machine, members, order, widest, in_order }))
    }

    /// `world` ranks on machines of `per_machine` ranks each, in order; the last may have fewer.
    pub(crate) fn blocks(world: usize, per_machine: usize) -> Self {
        let per_machine = per_machine.max(1);
        let machine = (0..world).map(|rank| rank / per_machine).collect();
        let ranks: Vec<Rank> = (0..world).collect();
        let members = ranks.chunks(per_machine).map(<[_]>::to_vec).collect();
        Self::with_members(machine, members)
    }

    /// Number of ranks.
    pub(crate) fn world(&self) -> usize {
        self.0.machine.len()
    }

    /// Number of machines.
    pub(crate) fn machines(&self) -> usize {
        self.0.members.len()
    }

    /// The machine of a rank, `0..machines()`.
    pub(crate) fn machine(&self, rank: Rank) -> usize {
        self.0.machine[rank]
    }

    /// The ranks of a machine, in order; at least one.
    pub(crate) fn members(&self, machine: usize) -> &[Rank] {
        &self.0.members[machine]
    }

    /// All ranks, machine by machine.
    pub(crate) fn order(&self) -> &[Rank] {
        &self.0.order
    }

    /// Whether the ranks of each machine, and the machines, are in order.
    pub(crate) fn in_order(&self) -> bool {
        self.0.in_order
    }

    /// The index of a rank in [`order`](Self::order).
    pub(crate) fn position(&self, rank: Rank) -> usize {
        self.order().iter().position(|&other| other == rank).expect("it has all ranks")
    }

    /// Largest number of ranks on one machine.
    pub(crate) fn widest(&self) -> usize {
        self.0.widest
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn groups_ranks_by_machine() {
        let layout = Layout::new(&["a", "b", "a", "c", "b"]);
        assert_eq!((layout.world(), layout.machines(), layout.widest()), (5, 3, 2));
        assert_eq!(layout.members(0), [0, 2]);
        assert_eq!(layout.members(1), [1, 4]);
        assert_eq!(layout.machine(3), 2);
        assert_eq!(layout.order(), [0, 2, 1, 4, 3]);
        assert_eq!(layout.position(4), 3);
        assert_eq!(Layout::blocks(5, 2), Layout::new(&[0, 0, 1, 1, 2]));
    }
}
