//! When ranks ask one another whether to go on.
//!
//! To ask is a collective call, and each waits there for the slowest. So it is not done before every
//! batch but as often as the clock suggests, and since clocks differ, each time the ranks also agree on
//! how many batches go by until the next: as few as the most careful of them wants.

use std::time::{Duration, Instant};

use collective::{ProcessGroup, ReduceOp};

use crate::Result;

/// Counts batches until the ranks of a run ask one another again. Equal on all ranks.
#[derive(Debug, Default)]
pub(super) struct Agreement {
    /// Batches that still go by.
    left: u8,
    /// Batches that went by between the last two times.
    every: u8,
    /// This rank's time of the last one.
    last: Option<Instant>,
}

impl Agreement {
    /// How long the ranks go on without asking, if batches take as long as they did.
    pub(super) const INTERVAL: Duration = Duration::from_millis(20);

    /// As many batches as go by at most, should they suddenly take longer.
    const MOST: u8 = 64;

    /// Whether the ranks ask before this batch. Every rank calls it before each.
    pub(super) fn is_due(&mut self) -> bool {
        let due = self.left == 0;
        self.left = self.left.saturating_sub(1);
        due
    }

    /// The greatest of what the ranks say, place by place. Every rank calls it when it
    /// [is due](Self::is_due).
    pub(super) fn reach(&mut self, group: &ProcessGroup, says: [u8; 2]) -> Result<[u8; 2]> {
        let took = self.last.map(|last| last.elapsed());
        // The greatest of what is left to the most is the least.
        let mut all = [says[0], says[1], Self::MOST - wanted(took, self.every)];
        group.all_reduce(&mut all, ReduceOp::Max)?;
        self.every = Self::MOST - all[2];
        self.left = self.every - 1;
        self.last = Some(Instant::now());
        Ok([all[0], all[1]])
    }
}

/// How many batches fit the interval, if `every` of them took that long: 1 to `MOST`.
fn wanted(took: Option<Duration>, every: u8) -> u8 {
    let Some(took) = took else { return 1 };
    let fit = Agreement::INTERVAL.as_secs_f64() / took.as_secs_f64() * f64::from(every);
    // Saturates; infinite for no time at all, which a clock may say.
    (fit as u8).clamp(1, Agreement::MOST)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn as_many_batches_go_by_as_fit_the_interval() {
        let after = |ms, every| wanted(Some(Duration::from_millis(ms)), every);
        assert_eq!(wanted(None, 0), 1);
        assert_eq!([after(0, 1), after(1, 1), after(1, 64)], [64, 20, 64]);
        assert_eq!([after(20, 1), after(40, 20), after(5000, 64)], [1, 10, 1]);
    }

    /// Ranks whose clocks differ ask at the same batches, and one that is asked to end is heard.
    #[test]
    fn all_ranks_ask_before_the_same_batches() {
        let groups = ProcessGroup::threads(3, Duration::from_secs(60)).unwrap();
        let rank = |group: ProcessGroup| {
            let mut agreement = Agreement::default();
            let mut asked = Vec::new();
            for batch in 0..1000_u32 {
                if agreement.is_due() {
                    // What one rank is told between two times waits for the next.
                    let told = u8::from(group.rank() == 1 && batch >= 700);
                    let all = agreement.reach(&group, [0, told * 15]).unwrap();
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
