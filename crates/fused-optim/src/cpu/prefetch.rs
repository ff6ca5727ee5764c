//! Software prefetch in sweeps over memory, for processors where it is faster.
//!
//! On an Intel Xeon, prefetching each stream makes sweeps faster; on an AMD Zen 3, prefetching
//! whole pages made them slower. So each thread of an optimizer measures. No result depends on it.

use std::mem;
use std::time::Instant;

use super::BLOCK;

/// Prefetches a stream's cache line [`AHEAD`] elements after `address`, which may be past its end.
#[inline(always)]
pub(super) fn prefetch(address: *const f32) {
    let address = address.wrapping_add(AHEAD);
    #[cfg(target_arch = "x86_64")]
    super::x86_64::prefetch(address);
    #[cfg(not(target_arch = "x86_64"))]
    let _ = address;
}

/// The choice whether to prefetch. Of each [`PERIOD`] elements, the first [`TRIAL`] are timed
/// without prefetching and the next with it; the others do what was faster more often.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Prefetching {
    /// Elements of this period so far.
    at: usize,
    /// Seconds and elements of this period's trials, without and with prefetching.
    trials: [(f64, f64); 2],
    /// How much more often prefetching was faster, at most [`MOST`] either way.
    wins: i32,
}

impl Prefetching {
    /// Calls `span`, the sweep of some elements, and tells it whether to prefetch.
    pub(crate) fn run(&mut self, elements: usize, span: impl FnOnce(bool)) {
        // Spans of less than a block are too short to be timed. Without x86-64 there is nothing to
        // choose.
        if elements < BLOCK || cfg!(not(target_arch = "x86_64")) {
            return span(self.wins > 0);
        }
        let trial = self.at / TRIAL;
        self.at = (self.at + elements) % PERIOD;
        if trial > 1 {
            return span(self.wins > 0);
        }
        let start = Instant::now();
        span(trial == 1);
        self.trials[trial].0 += start.elapsed().as_secs_f64();
        self.trials[trial].1 += elements as f64;
        if self.at >= 2 * TRIAL {
            self.learn();
        }
    }

    fn learn(&mut self) {
        let [without, with] =
            mem::take(&mut self.trials).map(|(seconds, elements)| seconds / elements);
        let won = if with < without { 1 } else { -1 };
        self.wins = (self.wins + won).clamp(-MOST, MOST);
    }
}

/// 2 KiB.
const AHEAD: usize = 512;
/// About as much as a second-level cache holds, so that lines that the trial before has left there
/// weigh little.
const TRIAL: usize = 1 << 16;
const PERIOD: usize = 16 * TRIAL;
const MOST: i32 = 8;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    #[cfg(target_arch = "x86_64")]
    fn both_ways_are_tried_in_each_period() {
        let (mut choice, mut told) = (Prefetching::default(), Vec::new());
        let spans = PERIOD / BLOCK;
        (0..2 * spans).for_each(|_| choice.run(BLOCK, |prefetch| told.push(prefetch)));
        let trial = TRIAL / BLOCK;
        for period in told.chunks(spans) {
            assert!(period[..trial].iter().all(|prefetch| !prefetch));
            assert!(period[trial..2 * trial].iter().all(|prefetch| *prefetch));
            let chosen = &period[2 * trial..];
            assert!(chosen.iter().all(|prefetch| *prefetch == chosen[0]));
        }
    }

    #[test]
    fn the_majority_of_recent_trials_decides() {
        let mut choice = Prefetching::default();
        for (periods, with, expected) in
            [(1, 1.0, true), (1, 3.0, false), (100, 1.0, true), (7, 3.0, true), (1, 2.0, false)]
        {
            for _ in 0..periods {
                choice.trials = [(200.0, 100.0), (with * 50.0, 50.0)];
                choice.learn();
            }
            assert_eq!(choice.wins > 0, expected, "{periods} {with}");
        }
    }
}
