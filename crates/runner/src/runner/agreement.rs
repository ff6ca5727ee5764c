//! `Agreement`: decides before which iterations the ranks exchange signals, exhausted time budgets,
//! and a digest of the learning rates, which must not differ.
//!
//! The exchange is a collective, in which every rank waits for the slowest. So it happens about
//! every 20 ms instead of before every iteration; because clocks differ, each exchange also agrees
//! on the number of iterations until the next one: the minimum that any rank wants.

use std::time::{Duration, Instant};

use collective::object::all_gather_object;
use collective::{ProcessGroup, ReduceOp};

use crate::{Error, Result, signals};

/// Reason for which a run ends early.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Interrupt {
    /// The time budget is exhausted.
    Budget,
    /// A signal with this number was received.
    Signal(u8),
}

/// Result of an exchange, equal on all ranks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Agreed {
    pub(super) interrupt: Option<Interrupt>,
    /// Whether the ranks have one digest; true without an exchange.
    pub(super) is_same: bool,
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

    /// Returns whether the run ends now because of the time budget or a signal on any rank, and
    /// whether all ranks have the same `digest`. All ranks get the same answer. A single rank
    /// checks before every iteration; several exchange about every [`Agreement::INTERVAL`].
    pub(super) fn interrupt(
        &mut self,
        group: &ProcessGroup,
        digest: impl FnOnce() -> u64,
    ) -> Result<Agreed> {
        let several = group.world_size() > 1;
        if several && !self.agreement.is_due() {
            return Ok(Agreed { interrupt: None, is_same: true });
        }
        let spent = self.first_step.is_some() && self.left() == Some(Duration::ZERO);
        let own = [u8::from(spent), signals::pending()];
        let ([spent, signal], is_same) = match several {
            true => self.agreement.exchange(group, own, digest())?,
            false => (own, true),
        };
        let interrupt = match (spent, signal) {
            (_, 1..) => Some(Interrupt::Signal(signal)),
            (1.., 0) => Some(Interrupt::Budget),
            (0, 0) => None,
        };
        Ok(Agreed { interrupt, is_same })
    }
}

/// Compares named values of the ranks. Every rank calls it.
///
/// # Errors
///
/// [`Error::Config`] on every rank, naming the first value that differs, and its rank.
pub(super) fn compare(group: &ProcessGroup, what: &str, own: &[(String, String)]) -> Result<()> {
    if group.world_size() == 1 {
        return Ok(());
    }
    let all = all_gather_object(group, &own.to_vec())?;
    let differs = all.iter().enumerate().find_map(|(rank, theirs)| {
        let at = all[0].iter().zip(theirs).position(|(first, theirs)| first != theirs);
        let ((name, first), (_, theirs)) = at.map(|at| (&all[0][at], &theirs[at]))?;
        Some(format!("{name} is {first} on rank 0 and {theirs} on rank {rank}"))
    });
    match differs {
        Some(text) => Err(Error::config(format!("{what} differ between ranks: {text}"))),
        None if all.iter().any(|theirs| theirs.len() != all[0].len()) => {
            Err(Error::config(format!("{what} differ in number between ranks")))
        }
        None => Ok(()),
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

    /// Returns the element-wise MAX of the ranks' values, and whether their digests are equal.
    /// Every rank calls it when it [is due](Self::is_due).
    fn exchange(
        &mut self,
        group: &ProcessGroup,
        own: [u8; 2],
        digest: u64,
    ) -> Result<([u8; 2], bool)> {
        let took = self.last.map(|last| last.elapsed());
        let mut all = [0; 19];
        // MAX over (MOST - wanted) yields the smallest wanted value. In the same way the largest
        // and the smallest byte of the digests are known.
        all[..3].copy_from_slice(&[own[0], own[1], Self::MOST - wanted(took, self.every)]);
        all[3..11].copy_from_slice(&digest.to_le_bytes());
        all[11..].copy_from_slice(&(!digest).to_le_bytes());
        group.all_reduce(&mut all, ReduceOp::Max)?;
        self.every = Self::MOST - all[2];
        self.left = self.every - 1;
        self.last = Some(Instant::now());
        let is_same = all[3..11].iter().zip(&all[11..]).all(|(most, least)| *most == !least);
        Ok(([all[0], all[1]], is_same))
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
                    let digest = 7 + u64::from(batch);
                    let (all, is_same) =
                        agreement.exchange(&group, [0, told * 15], digest).unwrap();
                    assert!(is_same);
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
