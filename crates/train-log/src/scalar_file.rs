//! `ScalarFile`: `scalars.json`.

use std::path::Path;

use crate::appender::Appender;
use crate::{JsonLine, Result};

/// A file of scalars, one JSON object a line, as MMEngine's `LocalVisBackend` writes it; a
/// non-finite value is `null`. `runner plot` draws it.
///
/// Lines are buffered until [`flush`](Self::flush), or until there are 64 KiB.
#[derive(Debug)]
pub struct ScalarFile(Appender);

impl ScalarFile {
    /// Opens the file for appending, and creates it if necessary.
    ///
    /// # Errors
    ///
    /// If it cannot be created.
    pub fn open(path: &Path) -> Result<Self> {
        Appender::open(path).map(Self)
    }

    /// Appends a line: the scalars, then the counts, such as `epoch` and `iter`, then `step`.
    ///
    /// # Errors
    ///
    /// If the buffer is full and cannot be written.
    pub fn write(
        &mut self,
        scalars: &[(&str, f64)],
        counts: &[(&str, usize)],
        step: usize,
    ) -> Result<()> {
        let mut line = JsonLine::new();
        scalars.iter().for_each(|(name, value)| line.put(name, value));
        counts.iter().for_each(|(name, count)| line.put(name, count));
        line.put("step", step);
        self.0.push(&[&line.end()])
    }

    /// Writes the buffer.
    ///
    /// # Errors
    ///
    /// If it cannot be written; what it had is lost.
    pub fn flush(&mut self) -> Result<()> {
        self.0.flush()
    }
}
