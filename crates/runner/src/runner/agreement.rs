//! `Agreement`: decides before which iterations the ranks exchange signals and exhausted time
//! budgets.
//!
//! The exchange is a collective, in which every rank waits for the slowest. So it happens about
//! every 20 ms instead of before every iteration; because clocks differ, each exchange also agrees
//! on the number of iterations until the next one: the minimum that any rank wants.

use std::time::{Duration, Instant};

use collective::{ProcessGroup, ReduceOp};

use crate::{Result, signals};

/// Reason for which a run ends early.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Interrupt {
    /// The time budget is exhausted.
    Budget,
    /// A signal with this number was received.
    Signal(u8),
}

/// Time budget of a run, and the ranks' agreement on an early end.
#[derive(Debug, Default)]
pub(super) struct Budget {
    time: Option<Duration>,
    /// Time at which this process finished its first iteration: the time budget counts from here,
    /// not from the start, because the first step may compile kernels for minutes.
    first_step: Option<Instant>,
    agreement: Agreement,
}

impl Budget {
    pub(super) fn new(time: Option<Duration>) -> Self {
        Self { time, ..Self::default() }
    }

    /// Remaining time, or `None` without a limit: the whole budget until the first step is done.
    pub(super) fn left(&self) -> Option<Duration> {
        let budget = self.time?;
        let spent = self.first_step.map_or(Duration::ZERO, |first| first.elapsed());
        Some(budget.saturating_sub(spent))
    }

    /// Starts the budget after the first step.
    pub(super) fn stepped(&mut self) {
        self.first_step.get_or_insert_with(Instant::now);
    }

    /// Makes the ranks exchange before the next iteration.
    pub(super) fn exchange_next(&mut self) {
        self.agreement = Agreement::default();
    }

    /// Returns whether the run ends now because of the time budget or a signal on any rank. All
    /// ranks get the same answer. A single rank checks before every iteration; several exchange
    /// about every [`Agreement::INTERVAL`].
    pub(super) fn interrupt(&mut self, group: &ProcessGroup) -> Result<Option<Interrupt>> {
        let several = group.world_size() > 1;
        let can_end = self.time.is_some() || signals::are_caught();
        if several && !(can_end && self.agreement.is_due()) {
            return Ok(None);
        }
        let spent = self.first_step.is_some() && self.left() == Some(Duration::ZERO);
        let own = [u8::from(spent), signals::pending()];
        let [spent, signal] = if several { self.agreement.exchange(group, own)? } else { own };
        Ok(match (spent, signal) {
            (_, 1..) => Some(Interrupt::Signal(signal)),
            (1.., 0) => Some(Interrupt::Budget),
            (0, 0) => None,
        })
    }
}

/// Counts iterations until the next exchange. Equal on all ranks.
#[derive(Debug, Default)]
struct Agreement {
    /// Iterations left until the next exchange.
    left: u8,
    /// Iterations between the last two exchanges.
    every: u8,
    /// Time of the last exchange on this rank.
    last: Option<Instant>,
}

impl Agreement {
    /// Target time between exchanges.
    const INTERVAL: Duration = Duration::from_millis(20);

    /// Maximum number of iterations between exchanges, in case they suddenly take longer.
    const MOST: u8 = 64;

    /// Returns whether an exchange is due before this iteration. Every rank calls it before each
    /// iteration.
    fn is_due(&mut self) -> bool {
        let due = self.left == 0;
        self.left = self.left.saturating_sub(1);
        due
    }

    /// Returns the element-wise MAX of the ranks' values. Every rank calls it when it [is
    /// due](Self::is_due).
    fn exchange(&mut self, group: &ProcessGroup, own: [u8; 2]) -> Result<[u8; 2]> {
        let took = self.last.map(|last| last.elapsed());
        // MAX over (MOST - wanted) yields the smallest wanted value.
        let mut all = [own[0], own[1], Self::MOST - wanted(took, self.every)];
        group.all_reduce(&mut all, ReduceOp::Max)?;
        self.every = Self::MOST - all[2];
        self.left = self.every - 1;
        self.last = Some(Instant::now());
        Ok([all[0], all[1]])
    }
}

/// Number of iterations that fit into the interval, if `every` of them took this long: 1 to `MOST`.
fn wanted(took: Option<Duration>, every: u8) -> u8 {
    let Some(took) = took else { return 1 };
    let fit = Agreement::INTERVAL.as_secs_f64() / took.as_secs_f64() * f64::from(every);
    // The cast saturates; the quotient is infinite if the clock shows no elapsed time.
    (fit as u8).clamp(1, Agreement::MOST)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn exchanges_are_an_interval_apart() {
        let after = |ms, every| wanted(Some(Duration::from_millis(ms)), every);
        assert_eq!(wanted(None, 0), 1);
        assert_eq!([after(0, 1), after(1, 1), after(1, 64)], [64, 20, 64]);
        assert_eq!([after(20, 1), after(40, 20), after(5000, 64)], [1, 10, 1]);
    }

    /// Ranks with different clocks exchange before the same iterations, and one rank's signal
    /// reaches all.
    #[test]
    fn ranks_exchange_before_the_same_iterations() {
        let groups = ProcessGroup::threads(3, Duration::from_secs(60)).unwrap();
        let rank = |group: ProcessGroup| {
            let mut agreement = Agreement::default();
            let mut asked = Vec::new();
            for batch in 0..1000_u32 {
                if agreement.is_due() {
                    // A signal between two exchanges waits for the next.
                    let told = u8::from(group.rank() == 1 && batch >= 700);
                    let all = agreement.exchange(&group, [0, told * 15]).unwrap();
                    asked.push(batch);
                    if all != [0, 0] {
                        assert_eq!(all, [0, 15]);
                        break;
                    }
                }
                if group.rank() == 2 && batch.is_multiple_of(100) {
                    std::thread::sleep(Duration::from_millis(3));
                }
            }
            asked
        };
        let asked: Vec<Vec<u32>> = std::thread::scope(|scope| {
            let ranks: Vec<_> = groups.into_iter().map(|g| scope.spawn(|| rank(g))).collect();
            ranks.into_iter().map(|rank| rank.join().unwrap()).collect()
        });
        assert!(asked.iter().all(|a| *a == asked[0]), "{asked:?}");
        let last = *asked[0].last().unwrap();
        assert!((700..700 + u32::from(Agreement::MOST)).contains(&last), "{last}");
    }
}
