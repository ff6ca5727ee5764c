//! What a forward pass reports, which a device may still be computing.

use std::fmt;
use std::sync::{Arc, OnceLock};

use crate::Result;

/// What one forward pass over a training batch reports: named scalars for the log, unscaled, in their order. The loss that
/// backward started from is the first and is called `loss`.
///
/// A device may still be computing them: to read them waits for it, once, so that a step whose losses nobody reads does
/// not hold up the next one. Clones share what was read.
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
    /// The numbers, if they are there. Does not wait.
    ///
    /// # Errors
    ///
    /// Those of the device.
    fn poll(&self) -> Result<Option<Vec<f64>>>;

    /// The numbers. Waits for the device.
    ///
    /// # Errors
    ///
    /// Those of the device.
    fn wait(&self) -> Result<Vec<f64>>;
}

impl Losses {
    /// Numbers that are there.
    #[must_use]
    pub fn new(scalars: Vec<(String, f64)>) -> Self {
        let names = scalars.iter().map(|(name, _)| name.clone()).collect();
        Self(Arc::new(Shared { names, scalars: scalars.into(), late: None }))
    }

    /// Numbers that a device is computing, as many as names.
    #[must_use]
    pub fn late(names: Vec<String>, values: impl LateValues + 'static) -> Self {
        let late: Option<Box<dyn LateValues>> = Some(Box::new(values));
        Self(Arc::new(Shared { names, scalars: OnceLock::new(), late }))
    }

    /// Names of the scalars. Does not wait.
    #[must_use]
    pub fn names(&self) -> &[String] {
        &self.0.names
    }

    /// The scalars. Waits for the device that computes them.
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

    /// The scalars, if they are there. Does not wait.
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

    /// The loss that backward started from, if it is infinite or NaN. Waits for the device.
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

    /// A device that is done once this is set, and how often it was waited for.
    #[derive(Clone, Debug, Default)]
    pub(crate) struct Device(pub(crate) Arc<Mutex<(bool, usize)>>);

    /// The number that a device computes.
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
    fn losses_of_a_device_are_waited_for_once_and_only_when_they_are_read() {
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
