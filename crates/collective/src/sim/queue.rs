//! The event queue: message events in time order; events at the same time in insertion order.
//!
//! Thousands of ranks often act at the same time, so each time is stored once, with all of its
//! events. A rank that sends to all others starts messages that differ only in receiver and time,
//! both by a constant step. Such a [`Run`] is stored as one entry, which moves to the next time
//! when its first message is taken. So 4,096 ranks that send 16 million messages to each other need
//! only a few thousand runs.

use std::cmp::Reverse;
use std::collections::BTreeMap;

/// Picoseconds since the simulation began, up to 213 days; small enough that rounding errors do not
/// matter.
pub(super) type Time = u64;

/// A message in transit.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Message {
    pub(super) at: MessageEvent,
    pub(super) from: u32,
    pub(super) to: u32,
    pub(super) bytes: usize,
}

/// An event of a message.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum MessageEvent {
    /// It reaches the interface of its sender's machine.
    Start,
    /// Its first byte reaches the receiver's machine.
    Arrive,
}

/// Messages put one after another, to consecutive receivers, at equal intervals.
#[derive(Clone, Copy, Debug)]
struct Run {
    first: Message,
    /// Number of messages after the first.
    more: u32,
    /// Sequence number of the first message, from 0.
    number: u64,
    /// Interval between messages; not 0 if there are several.
    every: Time,
}

/// The event queue; see the module.
#[derive(Debug)]
pub(super) struct Queue {
    /// Number of ranks; the receiver after the last rank is rank 0.
    world: u32,
    /// Number of messages put so far.
    count: u64,
    /// The latest run, which the next message may extend, with the times of its first and last
    /// message.
    growing: Option<(Run, Time, Time)>,
    /// Runs by the time of their first message.
    times: BTreeMap<Time, Vec<Run>>,
    /// Runs that are still to be taken at `now`, in reverse order.
    current: Vec<Run>,
    now: Time,
}

impl Queue {
    /// Creates a queue for messages among `world` ranks.
    pub(super) fn new(world: usize) -> Self {
        Self {
            world: world as u32,
            count: 0,
            growing: None,
            times: BTreeMap::new(),
            current: Vec::new(),
            now: 0,
        }
    }

    /// Inserts a message event at `time`, which is not before the time of the last event taken.
    pub(super) fn put(&mut self, time: Time, message: Message) {
        let number = self.count;
        self.count += 1;
        if let Some((run, start, last)) = &mut self.growing {
            let next = Message { to: after(run.first.to, run.more + 1, self.world), ..run.first };
            let every = time.wrapping_sub(*last);
            if message == next && time > *last && (run.more == 0 || run.every == every) {
                (run.more, run.every, *last) = (run.more + 1, every, time);
                return;
            }
            let (run, start) = (*run, *start);
            self.file(start, run);
        }
        self.growing = Some((Run { first: message, more: 0, number, every: 0 }, time, time));
    }

    /// Removes and returns the next message event, with its time.
    pub(super) fn take(&mut self) -> Option<(Time, Message)> {
        if self.current.is_empty() {
            if let Some((run, start, _)) = self.growing.take() {
                self.file(start, run);
            }
            (self.now, self.current) = self.times.pop_first()?;
            self.current.sort_unstable_by_key(|run| Reverse(run.number));
        }
        let run = self.current.pop()?;
        if run.more > 0 {
            let first = Message { to: after(run.first.to, 1, self.world), ..run.first };
            let rest = Run { first, more: run.more - 1, number: run.number + 1, ..run };
            self.file(self.now + run.every, rest);
        }
        Some((self.now, run.first))
    }

    fn file(&mut self, time: Time, run: Run) {
        self.times.entry(time).or_default().push(run);
    }
}

/// Returns the rank `steps` after `rank`, modulo `world`; `steps` is at most `world`.
fn after(rank: u32, steps: u32, world: u32) -> u32 {
    let rank = rank + steps;
    if rank < world { rank } else { rank - world }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn message(from: u32, to: u32, bytes: usize) -> Message {
        Message { at: MessageEvent::Arrive, from, to, bytes }
    }

    /// Compares the queue with a list sorted by time and insertion order.
    fn check_against_sorted_list(world: u32, steps: &[Step]) -> Result<(), TestCaseError> {
        let (mut queue, mut list) = (Queue::new(world as usize), Vec::new());
        let (mut now, mut count) = (0, 0);
        let mut take = |queue: &mut Queue, list: &mut Vec<(Time, u32, Message)>| {
            let first = (0..list.len()).min_by_key(|&index| (list[index].0, list[index].1));
            let expected = first.map(|index| list.remove(index)).map(|(at, _, what)| (at, what));
            prop_assert_eq!(queue.take(), expected);
            now = expected.map_or(now, |(at, _)| at);
            Ok(now)
        };
        let mut time = 0;
        for step in steps {
            for _ in 0..step.takes {
                time = take(&mut queue, &mut list)?;
            }
            for index in 0..step.messages {
                let to = (step.to + index) % world;
                let message = message(step.from, to, step.bytes);
                let at = time + step.delay + Time::from(index) * step.every;
                queue.put(at, message);
                list.push((at, count, message));
                count += 1;
            }
        }
        while !list.is_empty() {
            take(&mut queue, &mut list)?;
        }
        prop_assert_eq!(queue.take(), None);
        Ok(())
    }

    /// Takes messages, then puts messages that may form a run.
    #[derive(Clone, Debug)]
    struct Step {
        takes: usize,
        from: u32,
        to: u32,
        messages: u32,
        bytes: usize,
        delay: Time,
        every: Time,
    }

    fn step(world: u32) -> impl Strategy<Value = Step> {
        let ranks = (0..world, 0..world, 0..2 * world);
        (0..8_usize, ranks, 1..3_usize, 0..6_u64, 0..4_u64).prop_map(
            |(takes, (from, to, messages), bytes, delay, every)| Step {
                takes,
                from,
                to,
                messages,
                bytes,
                delay,
                every,
            },
        )
    }

    proptest! {
        #[test]
        fn takes_events_in_order(
            (world, steps) in (1..6_u32).prop_flat_map(|world| {
                (Just(world), prop::collection::vec(step(world), 0..20))
            })
        ) {
            check_against_sorted_list(world, &steps)?;
        }
    }

    #[test]
    fn messages_at_equal_intervals_are_one_run() {
        let mut queue = Queue::new(1000);
        for rank in 0..1000 {
            for (step, to) in (rank + 1..1000).chain(0..rank).enumerate() {
                queue.put(step as Time * 7, message(rank, to, 4));
            }
        }
        let mut kept = 0;
        for count in 0..999_000 {
            let (time, message) = queue.take().unwrap();
            assert_eq!((time / 7, message.from), (count / 1000, (count % 1000) as u32));
            assert_eq!(message.to, (message.from + count as u32 / 1000 + 1) % 1000);
            kept = kept.max(queue.times.values().map(Vec::len).sum());
        }
        assert_eq!(queue.take(), None);
        assert!(kept <= 1000, "{kept}");
    }
}
