//! Messages in the order of the times at which something happens to them; at one time, in the order
//! in which they were put.
//!
//! Ranks that do the same act at the same instants, thousands at a time. So a time is kept once,
//! with all that happens then. And a rank that has something for all others starts messages that
//! differ in nothing but receiver and time, both by the same step: such a [`Run`] is kept as one,
//! and wanders from time to time, so that 4,096 ranks with 16 million messages for one another keep
//! a few thousand runs, close together in memory.

use std::cmp::Reverse;
use std::collections::BTreeMap;

/// Picoseconds since the simulation began: so fine that rounding does not add up.
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

/// Messages put one after the other, to receivers that follow one another, in equal intervals.
#[derive(Clone, Copy, Debug)]
struct Run {
    first: Message,
    /// How many come after the first.
    more: u32,
    /// How many messages were put before the first.
    number: u64,
    /// From one to the next, more than 0 if there are several.
    every: Time,
}

/// See the module.
#[derive(Debug)]
pub(super) struct Queue {
    /// Number of ranks: after the last as a receiver comes rank 0.
    world: u32,
    /// How many messages were put.
    count: u64,
    /// The run last put, which may go on, and its times: of its first message and its last.
    growing: Option<(Run, Time, Time)>,
    /// What happens at each time to come.
    times: BTreeMap<Time, Vec<Run>>,
    /// What is left of what happens now, the last first.
    current: Vec<Run>,
    now: Time,
}

impl Queue {
    /// For messages among `world` ranks.
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

    /// Puts a message, for now or later.
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

    /// The next message and its time.
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

/// The rank `steps` after one, no more than once round.
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

    /// Compares with a list of everything, sorted by time and order.
    fn as_a_sorted_list(world: u32, steps: &[Step]) -> Result<(), TestCaseError> {
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

    /// Takes, then puts messages that may be a run.
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
        fn comes_out_in_order(
            (world, steps) in (1..6_u32).prop_flat_map(|world| {
                (Just(world), prop::collection::vec(step(world), 0..20))
            })
        ) {
            as_a_sorted_list(world, &steps)?;
        }
    }

    #[test]
    fn what_follows_in_equal_steps_is_kept_as_one() {
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
