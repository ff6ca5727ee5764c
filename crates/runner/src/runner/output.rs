//! What a run leaves behind besides checkpoints: log, scalars, the configuration as it was.

use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use serde_json::{Map, Value};

use super::Runner;
use crate::sinks::{Logger, Scalars, ScalarsFile, format_bar};
use crate::{Error, Result};

/// Redraw the bar at most this often.
const BAR_INTERVAL: Duration = Duration::from_millis(100);

/// A run's outputs on this rank.
#[derive(Debug)]
pub(super) struct Output {
    work_dir: PathBuf,
    logger: Logger,
    file: Option<ScalarsFile>,
    pub(super) scalars: Scalars,
    pub(super) eta: Duration,
    drawn: Option<Instant>,
}

impl Output {
    /// An output that writes to the terminal only, and only on the first rank.
    pub(super) fn new(work_dir: PathBuf, speaks: bool) -> Self {
        Self {
            work_dir,
            logger: Logger::new(speaks),
            file: None,
            scalars: Scalars::default(),
            eta: Duration::ZERO,
            drawn: None,
        }
    }

    /// Creates the work directory and, in one named after `timestamp`, log and scalars. This is
    /// the first thing a run creates on disk.
    pub(super) fn open(&mut self, timestamp: &str, config: &str) -> Result<()> {
        let dir = self.work_dir.join(timestamp);
        let io = |what: &Path, source| Error::Io {
            what: format!("cannot create {}", what.display()),
            source,
        };
        std::fs::create_dir_all(&dir).map_err(|e| io(&dir, e))?;
        if !config.is_empty() {
            let copy = dir.join("config.toml");
            std::fs::write(&copy, config).map_err(|e| io(&copy, e))?;
        }
        self.logger.open_file(&dir.join(format!("{timestamp}.log")))?;
        self.file = Some(ScalarsFile::create(&dir.join("vis_data"))?);
        Ok(())
    }

    pub(super) fn work_dir(&self) -> &Path {
        &self.work_dir
    }

    pub(super) fn logger(&mut self) -> &mut Logger {
        &mut self.logger
    }
}

impl Runner {
    /// Draws the progress bar if somebody watches.
    pub(crate) fn draw_progress(&mut self, done: usize) {
        let due = self.output.drawn.is_none_or(|drawn| drawn.elapsed() >= BAR_INTERVAL);
        if self.output.logger.wants_bar() && (due || done == self.batches_per_epoch()) {
            let bar = format_bar(self, done);
            self.output.logger.bar(&bar);
            self.output.drawn = Some(Instant::now());
        }
    }

    /// Logs a line that the progress bar makes superfluous on a terminal.
    pub(crate) fn log_progress(&mut self, line: &str) {
        self.output.logger.progress(line);
    }

    /// Appends the smoothed scalars to `scalars.json`.
    pub(crate) fn write_train_scalars(&mut self) -> Result<()> {
        let mut line = Map::new();
        line.insert("lr".into(), self.lr().into());
        line.extend(self.scalars().smoothed().map(|(name, value)| (name.to_owned(), value.into())));
        let iter = self.position().iter + 1;
        line.insert("epoch".into(), (self.position().epoch + 1).into());
        line.insert("iter".into(), iter.into());
        line.insert("step".into(), iter.into());
        self.write_scalars(line)
    }

    /// Appends a validation's figures to `scalars.json`.
    pub(crate) fn write_val_scalars(&mut self, metrics: &[(String, f64)]) -> Result<()> {
        let mut line: Map<String, Value> =
            metrics.iter().map(|(name, value)| (name.clone(), (*value).into())).collect();
        let (data_time, time) = self.val_times();
        line.insert("data_time".into(), data_time.into());
        line.insert("time".into(), time.into());
        line.insert("step".into(), self.val_epoch().into());
        self.write_scalars(line)
    }

    fn write_scalars(&mut self, line: Map<String, Value>) -> Result<()> {
        self.output.file.as_mut().map_or(Ok(()), |file| file.write(line))
    }
}
