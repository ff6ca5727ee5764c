//! Tolerance for outages of the control store that are shorter than the time after which nodes
//! count as lost.

use std::time::{Duration, Instant};

use super::SLICE;
use crate::options::RdzvConfig;
use crate::{Error, Result};

/// A node's contact with the control store, since the store's last answer.
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
