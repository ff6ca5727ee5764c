//! Collects the errors in a configuration, to report all at once.

use std::sync::Arc;

use parking_lot::Mutex;

use crate::{Error, Mistake, Result};

/// List of the errors found so far. Clones share it.
#[derive(Clone, Debug, Default)]
pub(crate) struct Mistakes(Arc<Mutex<Vec<Error>>>);

impl Mistakes {
    /// Adds an error, unless it is [`listed`](Self::listed).
    pub(crate) fn add(&self, error: Error) {
        if !Self::is_listed(&error) {
            self.0.lock().push(error);
        }
    }

    /// Adds the error of `result`, if it is one.
    pub(crate) fn add_of(&self, result: Result<()>) {
        result.unwrap_or_else(|error| self.add(error));
    }

    /// Number of errors.
    pub(crate) fn len(&self) -> usize {
        self.0.lock().len()
    }

    /// Error for a missing value whose own error is already on the list.
    pub(crate) const fn listed() -> Error {
        Error::Config { mistakes: Vec::new() }
    }

    /// Returns whether this is an error made by [`listed`](Self::listed).
    pub(crate) fn is_listed(error: &Error) -> bool {
        matches!(error, Error::Config { mistakes } if mistakes.is_empty())
    }

    /// Returns all errors as one error; a single one as it is.
    ///
    /// # Errors
    ///
    /// The collected errors, if there are any.
    pub(crate) fn check(&self) -> Result<()> {
        let mut all = std::mem::take(&mut *self.0.lock());
        if all.len() > 1 {
            let mistakes = all.into_iter().flat_map(|error| match error {
                Error::Config { mistakes } => mistakes,
                error => vec![Mistake { place: None, reason: error.to_string() }],
            });
            return Err(Error::Config { mistakes: mistakes.collect() });
        }
        all.pop().map_or(Ok(()), Err)
    }
}
