//! Events in the order of their times; at one time, in the order in which they were put.
//!
//! Ranks that do the same act at the same instants, thousands at a time. So a time is kept once,
//! with all its events, and an event costs little more than its place in a list.

use std::cmp::Reverse;
use std::collections::{BinaryHeap, HashMap};

/// Picoseconds since the simulation began: so fine that rounding does not add up.
pub(super) type Time = u64;

/// See the module.
#[derive(Debug)]
pub(super) struct Queue<E> {
    /// Each time that has events, once.
    times: BinaryHeap<Reverse<Time>>,
    events: HashMap<Time, Vec<E>>,
    /// Empty lists, for further times.
    spare: Vec<Vec<E>>,
}

impl<E> Queue<E> {
    pub(super) fn new() -> Self {
        Self { times: BinaryHeap::new(), events: HashMap::new(), spare: Vec::new() }
    }

    pub(super) fn put(&mut self, time: Time, event: E) {
        let Self { times, events, spare } = self;
        let list = events.entry(time).or_insert_with(|| {
            times.push(Reverse(time));
            spare.pop().unwrap_or_default()
        });
        list.push(event);
    }

    /// The next time, with all the events put at it so far.
    pub(super) fn take(&mut self) -> Option<(Time, Vec<E>)> {
        let Reverse(time) = self.times.pop()?;
        let events = self.events.remove(&time).expect("a time is kept with its events");
        Some((time, events))
    }

    /// Gives an emptied list back.
    pub(super) fn recycle(&mut self, mut list: Vec<E>) {
        list.clear();
        self.spare.push(list);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn comes_out_in_order() {
        let mut queue = Queue::new();
        for (time, event) in [(5, 'a'), (3, 'b'), (5, 'c'), (9, 'd'), (3, 'e')] {
            queue.put(time, event);
        }
        assert_eq!(queue.take(), Some((3, vec!['b', 'e'])));
        queue.put(3, 'f');
        queue.recycle(vec!['x']);
        assert_eq!(queue.take(), Some((3, vec!['f'])));
        assert_eq!(queue.take(), Some((5, vec!['a', 'c'])));
        assert_eq!(queue.take(), Some((9, vec!['d'])));
        assert_eq!(queue.take(), None);
    }
}
