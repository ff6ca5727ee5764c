//! Tolerance for outages of the control store that are shorter than the time after which nodes
//! count as lost.

use std::time::{Duration, Instant};

use super::SLICE;
use crate::options::RdzvConfig;
use crate::{Error, Result};

/// Knows when the control store last answered this node, and for how long it may be silent.
pub(super) struct Contact {
    answered: Instant,
    lost_after: Duration,
    pause: Duration,
}

impl Contact {
    pub(super) fn new(rdzv: &RdzvConfig) -> Self {
        let pause = SLICE.min(rdzv.heartbeat);
        Self { answered: Instant::now(), lost_after: rdzv.lost_after(), pause }
    }

    /// Returns `None`, after a pause, for an error of a store that may still answer; then the
    /// caller asks again.
    pub(super) fn tolerate<T>(&mut self, answer: Result<T>) -> Result<Option<T>> {
        match answer {
            Err(Error::Collective(_)) if self.answered.elapsed() <= self.lost_after => {
                std::thread::sleep(self.pause);
                Ok(None)
            }
            Err(error) => Err(error),
            Ok(found) => {
                self.answered = Instant::now();
                Ok(Some(found))
            }
        }
    }
}

/// Repeats `ask`, whose repetition must be harmless, until the store answers or is lost.
pub(super) fn outlast<T>(rdzv: &RdzvConfig, mut ask: impl FnMut() -> Result<T>) -> Result<T> {
    let mut contact = Contact::new(rdzv);
    loop {
        if let Some(found) = contact.tolerate(ask())? {
            return Ok(found);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn errors_of_the_store_are_tolerated_until_it_counts_as_lost() {
        let silent = || -> Result<u8> {
            let (store, keys) = ("h:1".to_owned(), Vec::new());
            Err(collective::Error::KeyTimeout { store, keys, waited: Duration::ZERO }.into())
        };
        let rdzv = |heartbeat| RdzvConfig { heartbeat, ..RdzvConfig::default() };
        let patient = rdzv(Duration::from_secs(600));
        let mut contact = Contact::new(&patient);
        assert_eq!(contact.tolerate(silent()).unwrap(), None);
        assert_eq!(contact.tolerate(Ok(1)).unwrap(), Some(1));
        // Other errors do not go away.
        assert!(contact.tolerate::<u8>(Err(Error::options("--x", ""))).is_err());
        let mut answers = [silent(), Ok(2)].into_iter();
        assert_eq!(outlast(&patient, || answers.next().unwrap()).unwrap(), 2);

        let hasty = rdzv(Duration::from_millis(1));
        let mut contact = Contact::new(&hasty);
        std::thread::sleep(2 * hasty.lost_after());
        assert!(contact.tolerate(silent()).is_err());
        assert!(outlast(&hasty, silent).is_err());
    }
}
