//! Scalars of a run, smoothed for the log.
//!
//! Losses that a device is still computing are stored unread, and read when the log is written.

use std::collections::VecDeque;
use std::num::NonZero;

use crate::Result;
use crate::losses::Losses;

/// MMEngine's smoothing window.
const WINDOW: usize = 10;

/// The last few values of each scalar, in the order of first appearance.
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
    values: VecDeque<Value>,
}

#[derive(Clone, Debug)]
enum Value {
    Known(f64),
    /// The scalar with this index.
    Of(Losses, usize),
}

impl Value {
    fn get(&self) -> Result<f64> {
        match self {
            Self::Known(value) => Ok(*value),
            Self::Of(losses, index) => Ok(losses.scalars()?[*index].1),
        }
    }
}

impl Entry {
    fn new(name: &str) -> Self {
        let smooth = name.contains("loss") && name != "loss_scale"
            || name.contains("time")
            || name.contains("grad_norm");
        Self { name: name.to_owned(), smooth, values: VecDeque::new() }
    }

    fn logged(&self) -> Result<f64> {
        if !self.smooth {
            return self.values.back().map_or(Ok(f64::NAN), Value::get);
        }
        let sum = self.values.iter().map(Value::get).sum::<Result<f64>>()?;
        Ok(sum / self.values.len() as f64)
    }
}

impl Scalars {
    /// Sets the number of values to smooth over, instead of MMEngine's ten.
    pub fn set_window(&mut self, window: NonZero<usize>) {
        self.window = Some(window);
    }

    /// Adds a value.
    pub fn push(&mut self, name: &str, value: f64) {
        self.add(name, Value::Known(value));
    }

    /// Adds the scalars of a step. Does not wait for the device that computes them.
    pub fn push_losses(&mut self, losses: &Losses) {
        for (index, name) in losses.names().iter().enumerate() {
            self.add(name, Value::Of(losses.clone(), index));
        }
    }

    fn add(&mut self, name: &str, value: Value) {
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

    /// Returns the logged value of each scalar: for losses, times and gradient norms the mean of
    /// their last ten values, for others the last value. Waits for a device that computes one of
    /// them.
    ///
    /// # Errors
    ///
    /// Those of the device.
    pub fn smoothed(&self) -> Result<Vec<(&str, f64)>> {
        self.entries.iter().map(|entry| Ok((entry.name.as_str(), entry.logged()?))).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::losses::tests::{Device, late};

    #[test]
    fn device_losses_are_read_when_logged() {
        let (device, mut scalars) = (Device::default(), Scalars::default());
        for i in 0..20 {
            scalars.push_losses(&late(&device, f64::from(i)));
        }
        assert_eq!(device.0.lock().1, 0);
        assert_eq!(scalars.smoothed().unwrap(), [("loss", 14.5)]);
        assert_eq!(scalars.smoothed().unwrap(), [("loss", 14.5)]);
        assert_eq!(device.0.lock().1, 10);
    }

    #[test]
    fn losses_are_averaged_over_ten_values_and_others_are_not() {
        let mut scalars = Scalars::default();
        for i in 0..20 {
            scalars.push("lr", f64::from(i));
            scalars.push("loss", f64::from(i));
        }
        assert_eq!(scalars.smoothed().unwrap(), [("lr", 19.0), ("loss", 14.5)]);
    }
}
