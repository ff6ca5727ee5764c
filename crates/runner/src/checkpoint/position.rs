//! `Position`: the progress of a run, across changes of its [`Layout`] (number of ranks, batch size, data set).
//!
//! Iterations are of the present layout. A configuration's iterations (the length of a run, its intervals,
//! its schedulers) are of the layout that the run began with: [`IterScale`] converts
//! them.

use std::ops::RangeInclusive;

use serde::{Deserialize, Serialize};

use crate::data::{IterScale, Layout};

/// Gradients that wait for an optimizer step.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Waiting {
    /// Samples, over all ranks, that they are of.
    pub samples: usize,
    /// Samples of the whole step.
    pub step: usize,
}

/// Where a run is.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Position {
    /// Epochs completed.
    pub epoch: usize,
    /// Batches trained on, over all epochs.
    pub iter: usize,
    /// Batches trained on in the current epoch.
    pub batch: usize,
    /// How many were trained on before the last validation.
    #[serde(default)]
    pub validated: Option<usize>,
    /// Where the present layout began.
    #[serde(default)]
    pub begun: Begun,
}

impl Position {
    /// Iterations of the configuration completed: [`iter`](Self::iter), unless the layout has changed.
    #[must_use]
    pub fn configured_iter(&self) -> usize {
        self.begun.scale.to_configured(self.iter)
    }

    /// The iterations of the configuration that the last iteration has completed: itself, unless the layout has
    /// changed.
    #[must_use]
    pub fn completed(&self) -> RangeInclusive<usize> {
        let before = self.begun.scale.to_configured(self.iter.saturating_sub(1));
        before + 1..=self.configured_iter()
    }
}

/// Progress of the run when its layout, or the number of batches of a step, last changed.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Begun {
    /// Batches trained on by then.
    pub iter: usize,
    /// Samples taken by then, over all passes.
    pub place: usize,
    /// Samples of all ranks whose gradients waited for an optimizer step then.
    pub waiting: usize,
    /// How many present batches of each rank they count as.
    pub pending: usize,
    /// The layout that the run began with; none if it has always been the same.
    pub first: Option<Layout>,
    /// Number of ranks that `accumulative_counts` is for; none if it is that of the first layout.
    pub counts_for: Option<usize>,
    /// Ratio of present iterations to iterations of the configuration.
    pub scale: IterScale,
}

impl Begun {
    /// How many batches [`Accumulation`](crate::optim_wrapper::Accumulation) has seen when `iter` have been trained
    /// on.
    pub(crate) fn accumulated(&self, iter: usize) -> usize {
        iter.saturating_sub(self.iter) + self.pending
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_iteration_of_the_configuration_is_completed_once() {
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
