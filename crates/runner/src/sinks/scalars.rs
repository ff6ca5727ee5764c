//! The scalars of a run, smoothed for the log.

use std::collections::VecDeque;
use std::num::NonZero;

/// MMEngine's smoothing window.
const WINDOW: usize = 10;

/// The last few values of each scalar, in the order in which they first appeared.
#[derive(Clone, Debug, Default)]
pub struct Scalars {
    entries: Vec<Entry>,
    window: Option<NonZero<usize>>,
}

#[derive(Clone, Debug)]
struct Entry {
    name: String,
    /// Whether the mean is logged.
    smooth: bool,
    values: VecDeque<f64>,
}

impl Entry {
    fn new(name: &str) -> Self {
        let smooth = name.contains("loss") && name != "loss_scale"
            || name.contains("time")
            || name.contains("grad_norm");
        Self { name: name.to_owned(), smooth, values: VecDeque::new() }
    }

    fn logged(&self) -> f64 {
        match self.smooth {
            true => self.values.iter().sum::<f64>() / self.values.len() as f64,
            false => self.values.back().copied().unwrap_or(f64::NAN),
        }
    }
}

impl Scalars {
    /// Smooths over so many values, instead of MMEngine's ten.
    pub fn set_window(&mut self, window: NonZero<usize>) {
        self.window = Some(window);
    }

    /// Adds a value.
    pub fn push(&mut self, name: &str, value: f64) {
        let window = self.window.map_or(WINDOW, NonZero::get);
        let index = self.entries.iter().position(|e| e.name == name).unwrap_or_else(|| {
            self.entries.push(Entry::new(name));
            self.entries.len() - 1
        });
        let values = &mut self.entries[index].values;
        while values.len() >= window {
            values.pop_front();
        }
        values.push_back(value);
    }

    /// Each scalar as it is logged: losses, times and gradient norms as the mean of their last ten
    /// values, anything else as it is.
    pub fn smoothed(&self) -> impl Iterator<Item = (&str, f64)> + Clone {
        self.entries.iter().map(|entry| (entry.name.as_str(), entry.logged()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn losses_are_averaged_over_ten_and_others_are_not() {
        let mut scalars = Scalars::default();
        for i in 0..20 {
            scalars.push("lr", f64::from(i));
            scalars.push("loss", f64::from(i));
        }
        let all: Vec<_> = scalars.smoothed().collect();
        assert_eq!(all, [("lr", 19.0), ("loss", 14.5)]);
    }
}
