//! `Logger`: lines on the terminal and in a file, and a progress bar.

use std::borrow::Cow;
use std::io::{IsTerminal, Write};
use std::path::Path;
use std::time::{SystemTime, UNIX_EPOCH};

use jiff::Zoned;
use tracing::{Level as TracingLevel, enabled, info, warn};

use crate::Result;
use crate::appender::{Appender, MOST};

/// Target of the events.
const TARGET: &str = "train_log";

/// Clears from the cursor to the end of the line: what a longer bar left there. At the end of the
/// text, so that a prefix before it stays.
const CLEAR_REST: &str = "\x1b[K";

/// Severity of a line.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub enum Level {
    /// Information.
    #[default]
    Info,
    /// A warning.
    Warning,
    /// An error, of which none is logged.
    Error,
}

/// Writes log lines: `MM/DD HH:MM:SS - NAME - INFO - text` to standard output, the same with the
/// year to a file; and a progress bar on a terminal.
///
/// Lines of [`progress`](Self::progress) may be buffered; every other line is written immediately,
/// after the buffered ones. Each line is also a [`tracing`] event `log` of the target `train_log`.
/// Standard output and file can be switched off separately, so that a subscriber of the program can
/// replace them. A full disk or a closed pipe loses lines, and is no error.
#[derive(Debug)]
pub struct Logger {
    name: String,
    label: fn(&str) -> Cow<'_, str>,
    file: Option<Appender>,
    /// Bytes buffered for the terminal.
    waiting: Vec<u8>,
    enabled: bool,
    /// Whether lines go to standard output.
    console: bool,
    terminal: bool,
    bar_shown: bool,
    least: Level,
    stamp: Stamp,
}

/// The formatted time of a line, updated once per second.
#[derive(Debug, Default)]
struct Stamp {
    second: u64,
    terminal: String,
    file: String,
}

impl Stamp {
    fn renew(&mut self) {
        let now = SystemTime::now();
        let second = now.duration_since(UNIX_EPOCH).map_or(0, |time| time.as_secs());
        if second == self.second {
            return;
        }
        let now = Zoned::try_from(now).unwrap_or_else(|_| Zoned::now());
        self.second = second;
        self.terminal = now.strftime("%m/%d %H:%M:%S").to_string();
        self.file = now.strftime("%Y/%m/%d %H:%M:%S").to_string();
    }
}

impl Logger {
    /// A logger of the program `name` that writes to standard output only; `enabled` is false on
    /// all ranks but the first.
    #[must_use]
    pub fn new(name: impl Into<String>, enabled: bool) -> Self {
        Self {
            name: name.into(),
            label: |text| text.into(),
            file: None,
            waiting: Vec::new(),
            enabled,
            console: true,
            terminal: std::io::stdout().is_terminal(),
            bar_shown: false,
            least: Level::Info,
            stamp: Stamp::default(),
        }
    }

    /// Sets whether standard output is a person's terminal, which gets the progress bar in place of
    /// lines of progress. The default is whether it is a terminal.
    pub fn set_terminal(&mut self, is_terminal: bool) {
        self.terminal = is_terminal;
    }

    /// Sets what changes each text for standard output, such as a prefix with the rank.
    pub fn set_label(&mut self, label: fn(&str) -> Cow<'_, str>) {
        self.label = label;
    }

    /// Sets the least severe level that is logged.
    pub fn set_least(&mut self, least: Level) {
        self.least = least;
    }

    /// Sets whether lines and the progress bar go to standard output, which is the default.
    pub fn set_console(&mut self, wanted: bool) {
        self.console = wanted;
    }

    /// Appends to the file `path` as well from now on.
    ///
    /// # Errors
    ///
    /// If it cannot be created.
    pub fn open_file(&mut self, path: &Path) -> Result<()> {
        self.file = Some(Appender::open(path)?);
        Ok(())
    }

    /// Whether anybody gets a line of information: there is no need to format one otherwise.
    #[must_use]
    pub fn wants_info(&self) -> bool {
        let is_written = self.least <= Level::Info && (self.console || self.file.is_some());
        self.enabled && (is_written || enabled!(target: TARGET, TracingLevel::INFO))
    }

    /// Logs a line.
    pub fn info(&mut self, text: &str) {
        self.line(Level::Info, text, true);
        self.flush();
    }

    /// Logs a warning.
    pub fn warning(&mut self, text: &str) {
        self.line(Level::Warning, text, true);
        self.flush();
    }

    /// Logs a warning, also on a rank whose log is disabled.
    pub fn warning_of_rank(&mut self, text: &str) {
        let enabled = std::mem::replace(&mut self.enabled, true);
        self.warning(text);
        self.enabled = enabled;
    }

    /// Logs a line that the progress bar replaces on a terminal, and that may be buffered.
    pub fn progress(&mut self, text: &str) {
        self.line(Level::Info, text, !self.terminal);
        if self.waiting.len() >= MOST {
            self.flush();
        }
    }

    /// Writes the buffered lines.
    pub fn flush(&mut self) {
        if !self.waiting.is_empty() {
            write_out(&self.waiting);
            self.waiting.clear();
        }
        // A full disk must not end the run because of its log.
        let _ = self.file.as_mut().map(Appender::flush);
    }

    /// Whether to draw a progress bar.
    #[must_use]
    pub fn wants_bar(&self) -> bool {
        self.enabled && self.console && self.terminal
    }

    /// Draws the bar over the previous one.
    pub fn bar(&mut self, text: &str) {
        self.bar_shown = true;
        write_out((self.label)(&format!("{text}{CLEAR_REST}\r")).as_bytes());
    }

    fn line(&mut self, level: Level, text: &str, on_terminal: bool) {
        if !self.enabled {
            return;
        }
        match level {
            Level::Info => info!(name: "log", target: TARGET, "{text}"),
            Level::Warning | Level::Error => warn!(name: "log", target: TARGET, "{text}"),
        }
        if level < self.least {
            return;
        }
        let level = if level == Level::Warning { " - WARNING - " } else { " - INFO - " };
        self.stamp.renew();
        if on_terminal && self.console {
            let clear = if std::mem::take(&mut self.bar_shown) { CLEAR_REST } else { "" };
            let line = format!("{} - {}{level}{text}{clear}\n", self.stamp.terminal, self.name);
            self.waiting.extend_from_slice((self.label)(&line).as_bytes());
        }
        if let Some(file) = &mut self.file {
            let pieces = [&self.stamp.file, " - ", &self.name, level, text, "\n"];
            let pieces = pieces.map(str::as_bytes);
            let _ = file.push(&pieces);
        }
    }
}

/// Writes to standard output; ignores a closed pipe.
fn write_out(text: &[u8]) {
    let mut out = std::io::stdout().lock();
    let _ = out.write_all(text).and_then(|()| out.flush());
}
