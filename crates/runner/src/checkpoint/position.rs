//! `Position`: progress of a run, which survives changes of its [`Layout`] (number of ranks, batch
//! size, data set).
//!
//! Iterations are counted in the current layout. Iterations of a configuration (length of the run,
//! intervals, schedulers) are counted in the layout that the run began with; [`IterScale`] converts
//! between them.

use std::ops::RangeInclusive;

use serde::{Deserialize, Serialize};

use crate::data::{IterScale, Layout};

/// Gradients that await an optimizer step.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Waiting {
    /// Number of samples accumulated, over all ranks.
    pub samples: usize,
    /// Number of samples in the whole step.
    pub step: usize,
}

/// Progress of a run.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Position {
    /// Epochs completed.
    pub epoch: usize,
    /// Iterations completed, over all epochs.
    pub iter: usize,
    /// Iterations completed in the current epoch.
    pub batch: usize,
    /// Value of `iter` at the last validation.
    #[serde(default)]
    pub validated: Option<usize>,
    /// Progress at which the current layout began.
    #[serde(default)]
    pub begun: Begun,
}

impl Position {
    /// Completed iterations of the configuration; equals [`iter`](Self::iter) unless the layout has
    /// changed.
    #[must_use]
    pub fn configured_iter(&self) -> usize {
        self.begun.scale.to_configured(self.iter)
    }

    /// Iterations of the configuration that the last iteration completed: just that iteration,
    /// unless the layout has changed.
    #[must_use]
    pub fn completed(&self) -> RangeInclusive<usize> {
        let before = self.begun.scale.to_configured(self.iter.saturating_sub(1));
        before + 1..=self.configured_iter()
    }
}

/// Progress of the run when its layout, or the number of batches per step, last changed.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Begun {
    /// Iterations completed by then.
    pub iter: usize,
    /// Samples taken by then, over all passes.
    pub place: usize,
    /// Samples, over all ranks, with gradients that awaited an optimizer step then.
    pub waiting: usize,
    /// Number of batches per rank, in the current layout, that these samples count as.
    pub pending: usize,
    /// Layout that the run began with; `None` if it has not changed.
    pub first: Option<Layout>,
    /// Number of ranks that `accumulative_counts` applies to; `None` if it is that of the first
    /// layout.
    pub counts_for: Option<usize>,
    /// Ratio of current iterations to iterations of the configuration.
    pub scale: IterScale,
}

impl Begun {
    /// Number of batches that [`Accumulation`](crate::optim_wrapper::Accumulation) has counted
    /// after `iter` iterations.
    pub(crate) fn accumulated(&self, iter: usize) -> usize {
        iter.saturating_sub(self.iter) + self.pending
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_configured_iteration_is_completed_once() {
        for (now, configured) in [(1, 1), (1, 2), (2, 1), (23, 12), (3, 5), (40, 7)] {
            let scale = IterScale { now, configured };
            let begun = Begun { scale, ..Begun::default() };
            for max in 1..60 {
                let last = scale.to_present(max);
                let completed = (1..=last).flat_map(|iter| {
                    Position { iter, begun, ..Position::default() }.completed().collect::<Vec<_>>()
                });
                let completed: Vec<_> = completed.collect();
                assert!(completed.len() >= max, "{scale:?} {max}");
                assert!(completed.iter().copied().eq(1..=completed.len()), "{scale:?} {max}");
                assert!(scale.to_configured(last - 1) < max, "{scale:?} {max}");
            }
        }
        assert_eq!(IterScale { now: 2, configured: 1 }.to_present(usize::MAX), usize::MAX);
    }
}
