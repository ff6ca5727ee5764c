//! `Output`: a run's log, scalars and copy of its configuration.

use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use super::builder::LogConfig;
use super::log_lines::format_bar;
use super::{EvalSplit, Runner};
use crate::checkpoint::{is_full, remove_leftovers};
use crate::placement::Placement;
use crate::sinks::{Appender, EventFile, JsonLine, Logger, Scalars, WAIT};
use crate::{Error, Result};

/// Redraw the bar at most this often.
const BAR_INTERVAL: Duration = Duration::from_millis(100);

/// A run's outputs on this rank.
#[derive(Debug)]
pub(super) struct Output {
    work_dir: PathBuf,
    timestamp: String,
    log_config: LogConfig,
    logger: Logger,
    /// Files of scalars, all with the same lines; none on other ranks than the first.
    files: Vec<Appender>,
    events: Option<EventFile>,
    pub(super) scalars: Scalars,
    pub(super) eta: Duration,
    drawn: Option<Instant>,
    /// Whether something waits to be written, and when something was.
    waits: bool,
    written: Option<Instant>,
}

impl Output {
    /// An output that writes to the terminal only, and only on the first rank.
    pub(super) fn new(
        work_dir: PathBuf,
        enabled: bool,
        log_config: LogConfig,
        timestamp: String,
    ) -> Self {
        let mut scalars = Scalars::default();
        if let Some(window) = log_config.window_size {
            scalars.set_window(window);
        }
        let mut logger = Logger::new(enabled);
        logger.set_least(log_config.log_level);
        Self {
            work_dir,
            timestamp,
            log_config,
            logger,
            files: Vec::new(),
            events: None,
            scalars,
            eta: Duration::ZERO,
            drawn: None,
            waits: false,
            written: None,
        }
    }

    /// Creates the work directory and, in one named after the time, log and scalars, in MMEngine's
    /// places. This is the first thing a run creates on disk; without room for it there is no log.
    pub(super) fn open(&mut self) -> Result<()> {
        let created = self.create();
        self.or_without("a log", created)
    }

    /// On a full disk the run continues without the log, with a warning.
    fn or_without(&mut self, log: &str, written: Result<()>) -> Result<()> {
        match written {
            Err(Error::Io { what, source }) if is_full(&source) => {
                (self.files, self.events) = (Vec::new(), None);
                let text = format!("{what}: {source}; the run goes on without {log}");
                self.logger.warning(&text);
                Ok(())
            }
            other => other,
        }
    }

    fn create(&mut self) -> Result<()> {
        let dir = self.work_dir.join(&self.timestamp);
        let vis = dir.join("vis_data");
        let io = |what: &Path, source| Error::Io {
            what: format!("cannot create {}", what.display()),
            source,
        };
        std::fs::create_dir_all(&vis).map_err(|e| io(&vis, e))?;
        if let Some((name, text)) = &self.log_config.config {
            let extension = Path::new(name).extension().unwrap_or_default().to_string_lossy();
            let copy = vis.join(format!("config.{extension}"));
            // A configuration in the work directory is not replaced by what was made of it.
            let own = std::fs::canonicalize(&self.log_config.source).ok();
            let is_other = |copy: &PathBuf| {
                std::fs::canonicalize(copy).ok().is_none_or(|copy| Some(copy) != own)
            };
            for copy in [self.work_dir.join(name), copy].into_iter().filter(is_other) {
                std::fs::write(&copy, text).map_err(|e| io(&copy, e))?;
            }
        }
        self.logger.open_file(&dir.join(format!("{}.log", self.timestamp)))?;
        let names = ["scalars", &self.timestamp].map(|name| vis.join(format!("{name}.json")));
        self.files = names.iter().map(|path| Appender::open(path)).collect::<Result<_>>()?;
        if self.log_config.tensorboard {
            self.events = Some(EventFile::create(&vis)?);
        }
        Ok(())
    }

    /// The configuration as a text; empty if the run has none.
    pub(super) fn config_text(&self) -> String {
        self.log_config.config.as_ref().map_or_else(String::new, |(_, text)| text.clone())
    }

    pub(super) fn work_dir(&self) -> &Path {
        &self.work_dir
    }

    pub(super) fn logger(&mut self) -> &mut Logger {
        &mut self.logger
    }

    /// Appends one line of numbers: `scalars`, then `counts`, the last of which is the step.
    fn append<'a>(
        &mut self,
        scalars: impl Iterator<Item = (&'a str, f64)> + Clone,
        counts: &[(&'a str, usize)],
    ) -> Result<()> {
        if let Some(events) = &mut self.events {
            let (step, counts) = counts.split_last().map_or((0, counts), |(last, c)| (last.1, c));
            let counts = counts.iter().map(|(name, count)| (*name, *count as f64));
            events.write(&scalars.clone().chain(counts).collect::<Vec<_>>(), step)?;
        }
        if self.files.is_empty() {
            return Ok(());
        }
        self.waits = true;
        let mut line = JsonLine::new();
        scalars.for_each(|(name, value)| line.put(name, value));
        counts.iter().for_each(|(name, count)| line.put(name, count));
        let line = line.end();
        self.files.iter_mut().try_for_each(|file| file.push(&[&line]))
    }

    /// Writes what waits.
    fn flush(&mut self) -> Result<()> {
        self.waits = false;
        self.written = Some(Instant::now());
        self.logger.flush();
        let events = self.events.as_mut().map_or(Ok(()), EventFile::flush);
        let flushed = events.and_then(|()| self.files.iter_mut().try_for_each(Appender::flush));
        self.or_without("scalars", flushed)
    }
}

impl Drop for Output {
    /// Writes what waits, whatever ended the run.
    fn drop(&mut self) {
        let _ = self.flush();
    }
}

impl Runner {
    /// Begins the log: ranks, seed, the results of `auto_scale_lr` (`scaled`) and `compile`, the hooks.
    pub(super) fn open_output(
        &mut self,
        placement: &Placement,
        scaled: Option<String>,
    ) -> Result<()> {
        if self.train_loader.is_some() {
            // Before anything is written, because they may fill the disk.
            remove_leftovers(self.output.work_dir())?;
        }
        self.output.open()?;
        let (group, version) = (&self.group, env!("CARGO_PKG_VERSION"));
        let ranks = match group.world_size() {
            1 => "one rank".to_owned(),
            n => format!("{n} ranks over {} ({})", group.backend_name(), group.backend_reason()),
        };
        let mut lines = vec![format!("runner {version}: {ranks}, seed {}", self.seed)];
        let (line, mut warnings) = placement.describe(&self.group);
        lines.extend(line);
        lines.extend(scaled);
        if self.train_loader.is_some() {
            let (length, iters) = (self.train.length, self.max_iters());
            warnings.extend(self.hooks.iter().filter_map(|(_, hook)| hook.warning(length, iters)));
        }
        lines.extend(self.engine.compile_report().map(|report| report.to_string()));
        // MMEngine's text.
        let mut hooks = "Hooks will be executed in the following order:".to_owned();
        for (priority, hook) in &self.hooks {
            hooks += &format!("\n({:<12}) {}", priority.to_string(), hook.name());
        }
        lines.push(hooks);
        lines.iter().for_each(|line| self.output.logger.info(line));
        warnings.iter().for_each(|warning| self.output.logger.warning(warning));
        Ok(())
    }

    /// Draws the progress bar if the output is a terminal.
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

    /// Logs a line that a terminal's progress bar replaces, and that may wait.
    pub(crate) fn log_progress(&mut self, line: &str) {
        self.output.waits = true;
        self.output.logger.progress(line);
    }

    /// Writes what waits, unless something was written a moment ago.
    pub(crate) fn flush_if_due(&mut self) -> Result<()> {
        let output = &mut self.output;
        let due = || output.written.is_none_or(|written| written.elapsed() >= WAIT);
        if output.waits && due() { output.flush() } else { Ok(()) }
    }

    /// Writes what waits.
    pub(crate) fn flush(&mut self) -> Result<()> {
        self.output.flush()
    }

    /// The run's name, as log lines have it.
    pub(crate) fn experiment_name(&self) -> String {
        let Output { log_config, timestamp, .. } = &self.output;
        let stem = |(name, _): &(String, String)| {
            Path::new(name).file_stem().map(|stem| stem.to_string_lossy().into_owned())
        };
        match log_config
            .experiment_name
            .clone()
            .or_else(|| log_config.config.as_ref().and_then(stem))
        {
            Some(name) => format!("{name}_{timestamp}"),
            None => timestamp.clone(),
        }
    }

    /// Whether log lines count epochs.
    pub(crate) fn logs_by_epoch(&self) -> bool {
        self.output.log_config.by_epoch.unwrap_or_else(|| self.is_by_epoch())
    }

    /// Appends the smoothed scalars to `scalars.json`.
    pub(crate) fn write_train_scalars(&mut self) -> Result<()> {
        // The configuration's, so that the axis goes on where the number of ranks changes.
        let iter = self.position().begun.scale.to_configured(self.position().iter + 1);
        let counts = [("epoch", self.position().epoch + 1), ("iter", iter), ("step", iter)];
        let counts = if self.logs_by_epoch() { &counts[..] } else { &counts[1..] };
        let rates = self.rates();
        let rates = rates.iter().map(|(name, rate)| (name.as_str(), *rate));
        // Taken out while they are written.
        let scalars = std::mem::take(&mut self.output.scalars);
        let written = self.output.append(rates.chain(scalars.smoothed()), counts);
        self.output.scalars = scalars;
        self.output.or_without("scalars", written)
    }

    /// Appends a validation's metrics to `scalars.json`, under the epoch if there are epochs and
    /// `by_epoch`, else under the iteration.
    pub(crate) fn write_val_scalars(
        &mut self,
        metrics: &[(String, f64)],
        by_epoch: bool,
    ) -> Result<()> {
        let by_epoch = by_epoch && self.is_by_epoch();
        let step = if by_epoch { self.val_epoch() } else { self.position().configured_iter() };
        let times = self.eval_times(EvalSplit::Val);
        let written = self.output.append(eval_scalars(metrics, times), &[("step", step)]);
        self.output.or_without("scalars", written)?;
        self.flush()
    }

    /// Writes a test's metrics to a file of their own.
    pub(crate) fn write_test_scalars(&self, metrics: &[(String, f64)]) -> Result<()> {
        if self.output.files.is_empty() {
            return Ok(());
        }
        let mut line = JsonLine::new();
        let scalars = eval_scalars(metrics, self.eval_times(EvalSplit::Test));
        scalars.for_each(|(name, value)| line.put(name, value));
        let Output { work_dir, timestamp, .. } = &self.output;
        let path = work_dir.join(timestamp).join(format!("{timestamp}.json"));
        std::fs::write(&path, line.end()).map_err(|source| Error::Io {
            what: format!("cannot write {}", path.display()),
            source,
        })
    }
}

fn eval_scalars(
    metrics: &[(String, f64)],
    (data_time, time): (f64, f64),
) -> impl Iterator<Item = (&str, f64)> + Clone {
    let metrics = metrics.iter().map(|(name, value)| (name.as_str(), *value));
    metrics.chain([("data_time", data_time), ("time", time)])
}

#[cfg(test)]
mod tests {
    use crate::config::Config;
    use crate::runner::RunnerBuilder;
    use crate::testing::{group, register};

    #[test]
    fn a_configuration_in_the_work_directory_is_not_overwritten() {
        register();
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("c.toml");
        let text = "# Mine.\nmodel.type = 'Fake'\ntrain_cfg.max_epochs = 1\n\
                    train_dataloader = { batch_size = 1, dataset.type = 'Blank' }\n\
                    optim_wrapper.optimizer = { type = 'SGD', lr = 0.1 }\n";
        std::fs::write(&path, text).unwrap();
        for (work_dir, copied) in [(dir.path().join("."), false), (dir.path().join("run"), true)] {
            let mut config = Config::from_file(&path).unwrap();
            config.override_with(["train_cfg.max_epochs=2"]).unwrap();
            let run = RunnerBuilder::from_config(config).unwrap().work_dir(&work_dir);
            run.process_group(group()).build().unwrap();
            assert_eq!(std::fs::read_to_string(&path).unwrap(), text);
            let copy = std::fs::read_to_string(work_dir.join("c.toml")).unwrap();
            assert_eq!(copy.contains("max_epochs = 2"), copied);
        }
    }
}
