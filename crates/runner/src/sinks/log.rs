//! The run's log: `MM/DD HH:MM:SS - runner - INFO - text` on the terminal, the same with the year
//! in the log file. Rank 0 writes; the others keep quiet.

use std::fs::File;
use std::io::{IsTerminal, Write};
use std::path::Path;

use jiff::Zoned;

use crate::{Error, Result};

/// Set by the launcher for its ranks when its own output is a terminal: they write into pipes.
pub(crate) const TERMINAL_VARIABLE: &str = "RUNNER_TERMINAL";

/// Clears from the cursor to the end of the line: what a longer bar left there. At the end of the
/// text, so that the launcher's prefix before it stays.
const CLEAR_REST: &str = "\x1b[K";

/// How important a line is.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Level {
    /// What happens.
    #[default]
    Info,
    /// What asks for attention.
    Warning,
    /// Nothing that is logged.
    Error,
}

/// Writes log lines, and a progress bar where somebody watches.
#[derive(Debug)]
pub struct Logger {
    file: Option<File>,
    speaks: bool,
    terminal: bool,
    bar_shown: bool,
    least: Level,
}

impl Logger {
    /// A logger that writes to the terminal only; `speaks` is false on all ranks but the first.
    #[must_use]
    pub fn new(speaks: bool) -> Self {
        let terminal =
            std::io::stdout().is_terminal() || std::env::var_os(TERMINAL_VARIABLE).is_some();
        Self { file: None, speaks, terminal, bar_shown: false, least: Level::Info }
    }

    /// Leaves out what is less important.
    pub(crate) fn set_least(&mut self, least: Level) {
        self.least = least;
    }

    /// Writes to `path` as well from now on.
    ///
    /// # Errors
    ///
    /// [`Error::Io`] if it cannot be created.
    pub fn open_file(&mut self, path: &Path) -> Result<()> {
        let file = File::options().create(true).append(true).open(path).map_err(|source| {
            Error::Io { what: format!("cannot create {}", path.display()), source }
        })?;
        self.file = Some(file);
        Ok(())
    }

    /// Logs a line.
    pub fn info(&mut self, text: &str) {
        self.line(Level::Info, text, true);
    }

    /// Logs a line that asks for attention.
    pub fn warning(&mut self, text: &str) {
        self.line(Level::Warning, text, true);
    }

    /// Logs a line that a progress bar makes superfluous on a terminal.
    pub(crate) fn progress(&mut self, text: &str) {
        self.line(Level::Info, text, !self.terminal);
    }

    /// Whether a progress bar is wanted.
    pub(crate) fn wants_bar(&self) -> bool {
        self.speaks && self.terminal
    }

    /// Draws the bar over the one before.
    pub(crate) fn bar(&mut self, text: &str) {
        self.bar_shown = true;
        write_out(&format!("{text}{CLEAR_REST}\r"));
    }

    fn line(&mut self, level: Level, text: &str, on_terminal: bool) {
        if !self.speaks || level < self.least {
            return;
        }
        let level = if level == Level::Warning { "WARNING" } else { "INFO" };
        let now = Zoned::now();
        if on_terminal {
            let clear = if std::mem::take(&mut self.bar_shown) { CLEAR_REST } else { "" };
            let time = now.strftime("%m/%d %H:%M:%S");
            write_out(&format!("{time} - runner - {level} - {text}{clear}\n"));
        }
        if let Some(file) = &mut self.file {
            // A full disk must not end the run for the sake of its log.
            let time = now.strftime("%Y/%m/%d %H:%M:%S");
            let line = format!("{time} - runner - {level} - {text}\n");
            let _ = file.write_all(line.as_bytes());
        }
    }
}

/// Writes to standard output and does not mind if nobody reads.
fn write_out(text: &str) {
    let mut out = std::io::stdout().lock();
    let _ = out.write_all(text.as_bytes()).and_then(|()| out.flush());
}
