//! `Losses` of a training step; a device may still be computing their values.

use std::fmt;
use std::sync::{Arc, OnceLock};

use crate::Result;

/// Named scalars reported by a forward pass over a training batch, for the log, without the loss
/// scale. The first is called `loss`: backward started from it.
///
/// A device may still be computing the values. Reading them waits for the device, once; a step
/// whose losses are not read does not delay the next step. Clones share the values read.
#[derive(Clone, Debug, Default)]
pub struct Losses(Arc<Shared>);

#[derive(Debug, Default)]
struct Shared {
    names: Vec<String>,
    scalars: OnceLock<Vec<(String, f64)>>,
    late: Option<Box<dyn LateValues>>,
}

/// Numbers that a device is computing.
pub trait LateValues: fmt::Debug + Send + Sync {
    /// Returns the numbers if they have been computed. Does not block.
    ///
    /// # Errors
    ///
    /// Those of the device.
    fn poll(&self) -> Result<Option<Vec<f64>>>;

    /// Waits for the device and returns the numbers.
    ///
    /// # Errors
    ///
    /// Those of the device.
    fn wait(&self) -> Result<Vec<f64>>;
}

impl Losses {
    /// Creates losses from known values.
    #[must_use]
    pub fn new(scalars: Vec<(String, f64)>) -> Self {
        let names = scalars.iter().map(|(name, _)| name.clone()).collect();
        Self(Arc::new(Shared { names, scalars: scalars.into(), late: None }))
    }

    /// Creates losses whose values a device is computing, one per name.
    #[must_use]
    pub fn late(names: Vec<String>, values: impl LateValues + 'static) -> Self {
        let late: Option<Box<dyn LateValues>> = Some(Box::new(values));
        Self(Arc::new(Shared { names, scalars: OnceLock::new(), late }))
    }

    /// Returns the names of the scalars. Does not block.
    #[must_use]
    pub fn names(&self) -> &[String] {
        &self.0.names
    }

    /// Waits for the device and returns the scalars.
    ///
    /// # Errors
    ///
    /// Those of the device.
    pub fn scalars(&self) -> Result<&[(String, f64)]> {
        let Shared { scalars, late, .. } = &*self.0;
        match (scalars.get(), late) {
            (Some(known), _) => Ok(known),
            (None, Some(late)) => Ok(self.know(late.wait()?)),
            (None, None) => Ok(&[]),
        }
    }

    /// Returns the scalars if they have been computed. Does not block.
    ///
    /// # Errors
    ///
    /// Those of the device.
    pub fn poll(&self) -> Result<Option<&[(String, f64)]>> {
        let Shared { scalars, late, .. } = &*self.0;
        match (scalars.get(), late) {
            (None, Some(late)) => Ok(late.poll()?.map(|values| self.know(values))),
            _ => self.scalars().map(Some),
        }
    }

    fn know(&self, values: Vec<f64>) -> &[(String, f64)] {
        let named = || self.0.names.iter().cloned().zip(values).collect();
        self.0.scalars.get_or_init(named)
    }

    /// Returns the loss that backward started from if it is infinite or NaN. Waits for the device.
    ///
    /// # Errors
    ///
    /// As [`scalars`](Self::scalars).
    pub fn non_finite(&self) -> Result<Option<f64>> {
        let first = self.scalars()?.first().map(|(_, loss)| *loss);
        Ok(first.filter(|loss| !loss.is_finite()))
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use parking_lot::Mutex;

    use super::*;

    /// A device: whether it is finished, and how often it was waited for.
    #[derive(Clone, Debug, Default)]
    pub(crate) struct Device(pub(crate) Arc<Mutex<(bool, usize)>>);

    /// A number computed by a device.
    #[derive(Debug)]
    struct Late(Device, f64);

    impl LateValues for Late {
        fn poll(&self) -> Result<Option<Vec<f64>>> {
            Ok(self.0.0.lock().0.then(|| vec![self.1]))
        }

        fn wait(&self) -> Result<Vec<f64>> {
            self.0.0.lock().1 += 1;
            Ok(vec![self.1])
        }
    }

    pub(crate) fn late(device: &Device, loss: f64) -> Losses {
        Losses::late(vec!["loss".into()], Late(device.clone(), loss))
    }

    #[test]
    fn device_losses_are_waited_for_once_and_only_when_read() {
        let device = Device::default();
        let losses = late(&device, 2.0);
        let clone = losses.clone();
        assert_eq!(losses.names(), ["loss"]);
        assert_eq!(losses.poll().unwrap(), None);
        assert_eq!(device.0.lock().1, 0);
        for read in [&losses, &clone] {
            assert_eq!(read.scalars().unwrap(), [("loss".to_owned(), 2.0)]);
            assert_eq!(read.non_finite().unwrap(), None);
        }
        assert_eq!(device.0.lock().1, 1);
        let done = late(&device, f64::NAN);
        device.0.lock().0 = true;
        assert!(done.poll().unwrap().is_some());
        assert!(done.non_finite().unwrap().is_some());
        assert_eq!(device.0.lock().1, 1);
    }
}
