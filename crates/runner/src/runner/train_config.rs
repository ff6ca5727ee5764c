//! `TrainConfig`: the length of a run, and when it is validated.

/// Length of a run.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Length {
    /// Passes over the data set: `EpochBasedTrainLoop`.
    Epochs(usize),
    /// Batches, over as many passes as that takes: `IterBasedTrainLoop`.
    Iters(usize),
}

impl Length {
    /// Number of batches, if an epoch has `epoch_length`.
    pub(crate) const fn iters(self, epoch_length: usize) -> usize {
        match self {
            Self::Epochs(epochs) => epochs.saturating_mul(epoch_length),
            Self::Iters(iters) => iters,
        }
    }
}

/// Length of a run, and when it is validated: counts are of epochs or of iterations as `length` says.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TrainConfig {
    /// How long it is.
    pub length: Length,
    /// Validate from here on, counted from 1.
    pub val_begin: usize,
    /// Validate every so many, and after the last.
    pub val_interval: usize,
    /// Other intervals from later on: where each begins, counted from 1, and the interval.
    pub dynamic_intervals: Vec<(usize, usize)>,
}

impl TrainConfig {
    /// `max_epochs` epochs with a validation after each.
    #[must_use]
    pub const fn new(max_epochs: usize) -> Self {
        let length = Length::Epochs(max_epochs);
        Self { length, val_begin: 1, val_interval: 1, dynamic_intervals: Vec::new() }
    }

    /// `max_iters` iterations with a validation after each thousand.
    #[must_use]
    pub const fn by_iters(max_iters: usize) -> Self {
        let length = Length::Iters(max_iters);
        Self { length, val_begin: 1, val_interval: 1000, dynamic_intervals: Vec::new() }
    }

    /// Whether a validation follows when `count` epochs or iterations are done.
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
    fn validations_come_when_mmengine_has_them() {
        let due = |config: &TrainConfig| -> Vec<usize> {
            (1..=10).filter(|count| config.is_val_due(*count)).collect()
        };
        let config = TrainConfig { val_interval: 3, ..TrainConfig::new(10) };
        assert_eq!(due(&config), [3, 6, 9, 10]);
        let config = TrainConfig { val_begin: 5, ..config };
        assert_eq!(due(&config), [6, 9, 10]);
        let dynamic_intervals = vec![(4, 2), (9, 1)];
        let config = TrainConfig { dynamic_intervals, val_begin: 1, ..config };
        // From 3 on, which is one before the fourth, every second; from 8 on each.
        assert_eq!(due(&config), [4, 6, 8, 9, 10]);
        let config = TrainConfig { length: Length::Iters(7), ..TrainConfig::by_iters(7) };
        assert_eq!(due(&config), [7]);
    }
}
