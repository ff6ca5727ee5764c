//! What a run leaves behind besides checkpoints: log, scalars, the configuration as it was.

use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use serde_json::{Map, Value};

use super::builder::Looks;
use super::{Judged, Runner};
use crate::sinks::{EventFile, Logger, Scalars, ScalarsFile, format_bar};
use crate::{Error, Result};

/// Redraw the bar at most this often.
const BAR_INTERVAL: Duration = Duration::from_millis(100);

/// A run's outputs on this rank.
#[derive(Debug)]
pub(super) struct Output {
    work_dir: PathBuf,
    timestamp: String,
    looks: Looks,
    logger: Logger,
    file: Option<ScalarsFile>,
    events: Option<EventFile>,
    pub(super) scalars: Scalars,
    pub(super) eta: Duration,
    drawn: Option<Instant>,
}

impl Output {
    /// An output that writes to the terminal only, and only on the first rank.
    pub(super) fn new(work_dir: PathBuf, speaks: bool, looks: Looks, timestamp: String) -> Self {
        let mut scalars = Scalars::default();
        if let Some(window) = looks.window_size {
            scalars.set_window(window);
        }
        let mut logger = Logger::new(speaks);
        logger.set_least(looks.log_level);
        Self {
            work_dir,
            timestamp,
            looks,
            logger,
            file: None,
            events: None,
            scalars,
            eta: Duration::ZERO,
            drawn: None,
        }
    }

    /// Creates the work directory and, in one named after the time, log and scalars, in MMEngine's
    /// places. This is the first thing a run creates on disk.
    pub(super) fn open(&mut self) -> Result<()> {
        let dir = self.work_dir.join(&self.timestamp);
        let vis = dir.join("vis_data");
        let io = |what: &Path, source| Error::Io {
            what: format!("cannot create {}", what.display()),
            source,
        };
        std::fs::create_dir_all(&vis).map_err(|e| io(&vis, e))?;
        if let Some((name, text)) = &self.looks.config {
            let extension = Path::new(name).extension().unwrap_or_default().to_string_lossy();
            let copy = vis.join(format!("config.{extension}"));
            for copy in [self.work_dir.join(name), copy] {
                std::fs::write(&copy, text).map_err(|e| io(&copy, e))?;
            }
        }
        self.logger.open_file(&dir.join(format!("{}.log", self.timestamp)))?;
        let names = ["scalars", &self.timestamp].map(|name| vis.join(format!("{name}.json")));
        self.file = Some(ScalarsFile::create(&names)?);
        if self.looks.tensorboard {
            self.events = Some(EventFile::create(&vis)?);
        }
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
        if !self.output.logger.wants_bar() {
            return;
        }
        let due = self.output.drawn.is_none_or(|drawn| drawn.elapsed() >= BAR_INTERVAL);
        if due || done == self.batches_per_epoch() || done == self.max_iters() {
            let bar = format_bar(self, done);
            self.output.logger.bar(&bar);
            self.output.drawn = Some(Instant::now());
        }
    }

    /// Logs a line that the progress bar makes superfluous on a terminal.
    pub(crate) fn log_progress(&mut self, line: &str) {
        self.output.logger.progress(line);
    }

    /// The run's name, as log lines have it.
    pub(crate) fn experiment_name(&self) -> String {
        let Output { looks, timestamp, .. } = &self.output;
        let stem = |(name, _): &(String, String)| {
            Path::new(name).file_stem().map(|stem| stem.to_string_lossy().into_owned())
        };
        match looks.experiment_name.clone().or_else(|| looks.config.as_ref().and_then(stem)) {
            Some(name) => format!("{name}_{timestamp}"),
            None => timestamp.clone(),
        }
    }

    /// Whether log lines count epochs.
    pub(crate) fn logs_by_epoch(&self) -> bool {
        self.output.looks.by_epoch.unwrap_or_else(|| self.is_by_epoch())
    }

    /// Appends the smoothed scalars to `scalars.json`.
    pub(crate) fn write_train_scalars(&mut self) -> Result<()> {
        let mut line = Map::new();
        line.insert("lr".into(), self.lr().into());
        line.extend(self.scalars().smoothed().map(|(name, value)| (name.to_owned(), value.into())));
        let iter = self.position().iter + 1;
        if self.logs_by_epoch() {
            line.insert("epoch".into(), (self.position().epoch + 1).into());
        }
        line.insert("iter".into(), iter.into());
        line.insert("step".into(), iter.into());
        self.write_scalars(line, iter)
    }

    /// Appends a validation's figures to `scalars.json`, under the epoch or the iteration.
    pub(crate) fn write_val_scalars(
        &mut self,
        metrics: &[(String, f64)],
        by_epoch: bool,
    ) -> Result<()> {
        let mut line = self.judged_line(Judged::Val, metrics);
        let step = if by_epoch { self.val_epoch() } else { self.position().iter };
        line.insert("step".into(), step.into());
        self.write_scalars(line, step)
    }

    /// Writes a test's figures to a file of their own.
    pub(crate) fn write_test_scalars(&self, metrics: &[(String, f64)]) -> Result<()> {
        let line = self.judged_line(Judged::Test, metrics);
        if self.output.file.is_none() {
            return Ok(());
        }
        let Output { work_dir, timestamp, .. } = &self.output;
        let path = work_dir.join(timestamp).join(format!("{timestamp}.json"));
        std::fs::write(&path, Value::Object(line).to_string()).map_err(|source| Error::Io {
            what: format!("cannot write {}", path.display()),
            source,
        })
    }

    fn judged_line(&self, judged: Judged, metrics: &[(String, f64)]) -> Map<String, Value> {
        let mut line: Map<String, Value> =
            metrics.iter().map(|(name, value)| (name.clone(), (*value).into())).collect();
        let (data_time, time) = self.judged_times(judged);
        line.insert("data_time".into(), data_time.into());
        line.insert("time".into(), time.into());
        line
    }

    fn write_scalars(&mut self, line: Map<String, Value>, step: usize) -> Result<()> {
        if let Some(events) = &mut self.output.events {
            let values = line.iter().filter(|(name, _)| *name != "step");
            let values: Vec<_> =
                values.filter_map(|(name, v)| Some((name.as_str(), v.as_f64()?))).collect();
            events.write(&values, step)?;
        }
        self.output.file.as_mut().map_or(Ok(()), |file| file.write(line))
    }
}
