//! `TrainConfig`: length of a run, and intervals of its validations.

/// Length of a run.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Length {
    /// Number of passes over the data set: `EpochBasedTrainLoop`.
    Epochs(usize),
    /// Number of iterations, over as many passes as necessary: `IterBasedTrainLoop`.
    Iters(usize),
}

impl Length {
    /// Number of iterations, if an epoch has `epoch_length`.
    pub(crate) const fn iters(self, epoch_length: usize) -> usize {
        match self {
            Self::Epochs(epochs) => epochs.saturating_mul(epoch_length),
            Self::Iters(iters) => iters,
        }
    }
}

/// Length of a run, and intervals of its validations: numbers count epochs or iterations, as
/// `length` does.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TrainConfig {
    /// Length of the run.
    pub length: Length,
    /// First epoch or iteration with a validation, counted from 1.
    pub val_begin: usize,
    /// Interval of validations; one also follows the last epoch or iteration.
    pub val_interval: usize,
    /// Later intervals: where each begins, counted from 1, and its length.
    pub dynamic_intervals: Vec<(usize, usize)>,
}

impl TrainConfig {
    /// Trains `max_epochs` epochs with a validation after each.
    #[must_use]
    pub const fn new(max_epochs: usize) -> Self {
        let length = Length::Epochs(max_epochs);
        Self { length, val_begin: 1, val_interval: 1, dynamic_intervals: Vec::new() }
    }

    /// Trains `max_iters` iterations with a validation after each thousand.
    #[must_use]
    pub const fn by_iters(max_iters: usize) -> Self {
        let length = Length::Iters(max_iters);
        Self { length, val_begin: 1, val_interval: 1000, dynamic_intervals: Vec::new() }
    }

    /// Returns whether a validation follows after `count` epochs or iterations.
    pub(crate) fn is_val_due(&self, count: usize) -> bool {
        let (Length::Epochs(max) | Length::Iters(max)) = self.length;
        // As in MMEngine, an interval begins one earlier.
        let begun = self.dynamic_intervals.iter().rev().find(|(begin, _)| *begin <= count + 1);
        let interval = begun.map_or(self.val_interval, |(_, interval)| *interval);
        count >= self.val_begin && (count.is_multiple_of(interval) || count == max)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn validations_are_due_as_in_mmengine() {
        let due = |config: &TrainConfig| -> Vec<usize> {
            (1..=10).filter(|count| config.is_val_due(*count)).collect()
        };
        let config = TrainConfig { val_interval: 3, ..TrainConfig::new(10) };
        assert_eq!(due(&config), [3, 6, 9, 10]);
        let config = TrainConfig { val_begin: 5, ..config };
        assert_eq!(due(&config), [6, 9, 10]);
        let dynamic_intervals = vec![(4, 2), (9, 1)];
        let config = TrainConfig { dynamic_intervals, val_begin: 1, ..config };
        // Every second from 3 on, which is one before the fourth; each from 8 on.
        assert_eq!(due(&config), [4, 6, 8, 9, 10]);
        let config = TrainConfig { length: Length::Iters(7), ..TrainConfig::by_iters(7) };
        assert_eq!(due(&config), [7]);
    }
}
