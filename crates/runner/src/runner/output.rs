//! `Output`: a run's log, scalars and copy of its configuration.

use std::io::IsTerminal;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use collective::{Topology, init::Launcher};
use launch::label_lines;
use tracing::{Dispatch, dispatcher};
use train_log::{ChromeTrace, FLUSH_INTERVAL, JsonLine, Logger, create_run_dir};

use super::builder::LogConfig;
use super::log_lines::format_bar;
use super::stream::TrainStream;
use super::{EvalSplit, Runner};
use crate::checkpoint::is_full;
use crate::placement::Placement;
use crate::sinks::{
    LocalVisBackend, RunInfo, ScalarRecord, Scalars, TensorboardVisBackend, VisBackend,
};
use crate::{Error, Result};

/// Set by the launcher for its ranks when its own output is a terminal: they write into pipes.
pub(crate) const TERMINAL_VARIABLE: &str = "RUNNER_TERMINAL";

/// Minimum time between updates of the progress bar.
const BAR_INTERVAL: Duration = Duration::from_millis(100);

/// A run's outputs on this rank.
pub(super) struct Output {
    rank: usize,
    work_dir: PathBuf,
    timestamp: String,
    log_config: LogConfig,
    logger: Logger,
    /// Receivers of the scalars; on other ranks than the first never opened.
    backends: Vec<Box<dyn VisBackend>>,
    is_open: bool,
    /// Gets this rank's spans.
    trace: Option<Dispatch>,
    pub(super) scalars: Scalars,
    pub(super) eta: Duration,
    drawn: Option<Instant>,
    /// Whether lines are buffered, and the time of the last write.
    waits: bool,
    written: Option<Instant>,
}

impl Output {
    /// An output that writes to the terminal only, and only on the first rank.
    pub(super) fn new(
        work_dir: PathBuf,
        rank: usize,
        log_config: LogConfig,
        timestamp: String,
    ) -> Self {
        let mut scalars = Scalars::default();
        if let Some(window) = log_config.window_size {
            scalars.set_window(window);
        }
        let mut logger = Logger::new("runner", rank == 0);
        logger.set_terminal(is_users_terminal());
        logger.set_label(label_lines);
        logger.set_least(log_config.log_level);
        logger.set_console(!log_config.no_console);
        let mut backends: Vec<Box<dyn VisBackend>> = vec![Box::new(LocalVisBackend::default())];
        if log_config.tensorboard {
            backends.push(Box::new(TensorboardVisBackend::default()));
        }
        Self {
            rank,
            work_dir,
            timestamp,
            log_config,
            logger,
            backends,
            is_open: false,
            trace: None,
            scalars,
            eta: Duration::ZERO,
            drawn: None,
            waits: false,
            written: None,
        }
    }

    /// Adds receivers of the scalars.
    pub(super) fn with_backends(mut self, backends: Vec<Box<dyn VisBackend>>) -> Self {
        self.backends.extend(backends);
        self
    }

    /// Creates this rank's trace, if one is wanted. On a full disk there is none.
    pub(super) fn open_trace(&mut self) -> Result<()> {
        let Some(path) = &self.log_config.trace else { return Ok(()) };
        let path = match self.rank {
            0 => path.clone(),
            rank => path.with_extension(match path.extension() {
                Some(extension) => format!("rank{rank}.{}", extension.to_string_lossy()),
                None => format!("rank{rank}"),
            }),
        };
        // A link is replaced, not written through: it may be one to a checkpoint's file.
        if path.is_file() {
            let _ = std::fs::remove_file(&path);
        }
        match ChromeTrace::create(&path, self.rank) {
            Ok(trace) => self.trace = Some(Dispatch::new(trace)),
            Err(error) => self.goes_on_without("a trace", error.into())?,
        }
        Ok(())
    }

    /// Creates the work directory and, in a folder named after the time, log and scalars, in the
    /// same places as MMEngine. On a full disk there is no log. A run that trains saves a copy of
    /// its configuration in the work directory, and replaces the copy of an earlier run.
    pub(super) fn open(&mut self, trains: bool) -> Result<()> {
        let created = self.create(trains);
        self.or_without("a log", created)
    }

    /// On a full disk the run continues without the log, with a warning.
    fn or_without(&mut self, log: &str, written: Result<()>) -> Result<()> {
        let Err(error) = written else { return Ok(()) };
        self.goes_on_without(log, error)?;
        self.is_open = false;
        Ok(())
    }

    /// Warns of a full disk; returns any other error.
    fn goes_on_without(&mut self, log: &str, error: Error) -> Result<()> {
        match error {
            Error::Io { what, source } if is_full(&source) => {
                let text = format!("{what}: {source}; the run continues without {log}");
                self.logger.warning_of_rank(&text);
                Ok(())
            }
            other => Err(other),
        }
    }

    fn create(&mut self, trains: bool) -> Result<()> {
        let (dir, timestamp) = create_run_dir(&self.work_dir, &self.timestamp)?;
        self.timestamp = timestamp;
        let vis = dir.join("vis_data");
        if let Some((name, text)) = &self.log_config.config {
            let extension = Path::new(name).extension().unwrap_or_default().to_string_lossy();
            let copy = vis.join(format!("config.{extension}"));
            let write = |copy: &Path| write_whole(copy, text.as_bytes(), "create");
            let in_work_dir = self.work_dir.join(name);
            if !in_work_dir.is_file() || trains && self.is_copy(&in_work_dir, &extension) {
                write(&in_work_dir)?;
            }
            write(&copy)?;
        }
        if !self.log_config.no_file {
            self.logger.open_file(&dir.join(format!("{}.log", self.timestamp)))?;
        }
        let name = self.experiment_name();
        let config = self.log_config.config.as_ref().map(|(_, text)| &**text);
        let run = RunInfo { dir: &vis, name: &name, timestamp: &self.timestamp, config };
        self.backends.iter_mut().try_for_each(|backend| backend.open(&run))?;
        self.is_open = true;
        Ok(())
    }

    /// Whether a configuration in the work directory is the copy of an earlier run, which has
    /// another copy beside its log, and is not the source of this run's configuration.
    fn is_copy(&self, path: &Path, extension: &str) -> bool {
        let [own, path] =
            [&self.log_config.source, path].map(|path| std::fs::canonicalize(path).ok());
        let Some(path) = path.filter(|path| own.as_ref() != Some(path)) else { return false };
        let runs = std::fs::read_dir(&self.work_dir).into_iter().flatten().flatten();
        let copies =
            runs.map(|run| run.path().join("vis_data").join(format!("config.{extension}")));
        let Ok(text) = std::fs::read(path) else { return false };
        copies.filter_map(|copy| std::fs::read(copy).ok()).any(|copy| copy == text)
    }

    /// The configuration as text; empty if the run has none.
    pub(super) fn config_text(&self) -> String {
        self.log_config.config.as_ref().map_or_else(String::new, |(_, text)| text.clone())
    }

    pub(super) fn work_dir(&self) -> &Path {
        &self.work_dir
    }

    pub(super) fn logger(&mut self) -> &mut Logger {
        &mut self.logger
    }

    /// Passes the scalars of one step to the receivers.
    fn append<'a>(
        &mut self,
        scalars: impl Iterator<Item = (&'a str, f64)>,
        counts: &[(&'a str, usize)],
        step: usize,
    ) -> Result<()> {
        if !self.is_open {
            return Ok(());
        }
        self.waits = true;
        let scalars: Vec<_> = scalars.collect();
        let record = ScalarRecord { scalars: &scalars, counts, step };
        self.backends.iter_mut().try_for_each(|backend| backend.add_scalars(&record))
    }

    /// Writes the buffered lines.
    fn flush(&mut self) -> Result<()> {
        self.waits = false;
        self.written = Some(Instant::now());
        self.logger.flush();
        if !self.is_open {
            return Ok(());
        }
        let flushed = self.backends.iter_mut().try_for_each(|backend| backend.flush());
        self.or_without("scalars", flushed)
    }

    /// The run's name, as log lines have it.
    fn experiment_name(&self) -> String {
        let Self { log_config, timestamp, .. } = self;
        let stem = |(name, _): &(String, String)| {
            Path::new(name).file_stem().map(|stem| stem.to_string_lossy().into_owned())
        };
        let stem = || log_config.config.as_ref().and_then(stem);
        match log_config.experiment_name.clone().or_else(stem) {
            Some(name) => format!("{name}_{timestamp}"),
            None => timestamp.clone(),
        }
    }
}

impl Drop for Output {
    /// Writes the buffered lines, however the run has ended: also while a panic unwinds, perhaps
    /// that of a receiver, whose second one would end the process.
    fn drop(&mut self) {
        self.logger.flush();
        if self.is_open {
            for backend in &mut self.backends {
                let _ = catch_unwind(AssertUnwindSafe(|| backend.flush()));
            }
        }
    }
}

impl Runner {
    /// Runs `run` with this rank's trace as subscriber, if there is one. Warns if the trace cannot
    /// be written.
    pub(super) fn traced<T>(&mut self, run: impl FnOnce(&mut Self) -> T) -> T {
        let Some(trace) = self.output.trace.clone() else { return run(self) };
        let done = dispatcher::with_default(&trace, || run(self));
        let written = trace.downcast_ref::<ChromeTrace>().map_or(Ok(()), ChromeTrace::flush);
        if let Err(error) = written {
            self.output.logger.warning_of_rank(&format!("{error}; the trace ends there"));
        }
        done
    }

    /// Begins the log: ranks, seed, the results of `auto_scale_lr` (`scaled`) and `compile`, the
    /// hooks.
    pub(super) fn open_output(
        &mut self,
        placement: &Placement,
        scaled: Option<String>,
    ) -> Result<()> {
        self.output.open(self.train_data.loader.is_some())?;
        let (group, version) = (&self.group, env!("CARGO_PKG_VERSION"));
        let ranks = match group.world_size() {
            1 => "one rank".to_owned(),
            n => format!("{n} ranks over {} ({})", group.backend_name(), group.backend_reason()),
        };
        let mut lines = vec![format!("runner {version}: {ranks}, seed {}", self.seed.of_run)];
        let (line, mut warnings) = placement.describe(&self.group);
        lines.extend(line);
        lines.extend(scaled);
        if self.train_data.loader.is_some() {
            let (length, iters) = (self.train.length, self.max_iters());
            warnings.extend(self.hooks.iter().filter_map(|(_, hook)| hook.warning(length, iters)));
            let differ = group.world_size() > 1 && !self.engine.buffers().is_empty();
            let evaluates = self.evaluations.iter().any(Option::is_some);
            if differ && evaluates && !self.has_hook("SyncBuffersHook") {
                warnings.push(
                    "without SyncBuffersHook each rank validates with its own buffers (batch-norm statistics): add it"
                        .to_owned(),
                );
            }
        }
        warnings.extend(self.train_data.stream.as_ref().and_then(TrainStream::warning));
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
    pub(crate) fn draw_progress(&mut self, done: usize) -> Result<()> {
        if !self.output.logger.wants_bar() {
            return Ok(());
        }
        let due = self.output.drawn.is_none_or(|drawn| drawn.elapsed() >= BAR_INTERVAL);
        if due || done == self.batches_per_epoch() || done == self.max_iters() {
            let bar = format_bar(self, done)?;
            self.output.logger.bar(&bar);
            self.output.drawn = Some(Instant::now());
        }
        Ok(())
    }

    /// Logs a line that the progress bar replaces on a terminal, and that may be buffered.
    pub(crate) fn log_progress(&mut self, line: &str) {
        self.output.waits = true;
        self.output.logger.progress(line);
    }

    /// Writes the buffered lines, unless the last write was less than [`FLUSH_INTERVAL`] ago.
    pub(crate) fn flush_if_due(&mut self) -> Result<()> {
        let output = &mut self.output;
        let due = || output.written.is_none_or(|written| written.elapsed() >= FLUSH_INTERVAL);
        if output.waits && due() { output.flush() } else { Ok(()) }
    }

    /// Writes the buffered lines.
    pub(crate) fn flush(&mut self) -> Result<()> {
        self.output.flush()
    }

    /// The run's name, as log lines have it.
    pub(crate) fn experiment_name(&self) -> String {
        self.output.experiment_name()
    }

    /// Whether log lines count epochs.
    pub(crate) fn logs_by_epoch(&self) -> bool {
        self.output.log_config.by_epoch.unwrap_or_else(|| self.is_by_epoch())
    }

    /// Appends the smoothed scalars to `scalars.json`.
    pub(crate) fn write_train_scalars(&mut self) -> Result<()> {
        // The configuration's, so that the axis goes on where the number of ranks changes.
        let iter = self.position().begun.scale.to_configured(self.position().iter + 1);
        let counts = [("epoch", self.position().epoch + 1), ("iter", iter)];
        let counts = if self.logs_by_epoch() { &counts[..] } else { &counts[1..] };
        let rates = self.rates();
        let rates = rates.iter().map(|(name, rate)| (name.as_str(), *rate));
        // Taken out while they are written.
        let scalars = std::mem::take(&mut self.output.scalars);
        let all = scalars.smoothed();
        let written = all.map(|all| self.output.append(rates.chain(all), counts, iter));
        self.output.scalars = scalars;
        self.output.or_without("scalars", written?)
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
        let written = self.output.append(eval_scalars(metrics, times), &[], step);
        self.output.or_without("scalars", written)?;
        self.flush()
    }

    /// Writes a test's metrics to a file of their own. On a full disk there is none.
    pub(crate) fn write_test_scalars(&mut self, metrics: &[(String, f64)]) -> Result<()> {
        if !self.output.is_open {
            return Ok(());
        }
        let mut line = JsonLine::new();
        let scalars = eval_scalars(metrics, self.eval_times(EvalSplit::Test));
        scalars.for_each(|(name, value)| line.put(name, value));
        let Output { work_dir, timestamp, .. } = &self.output;
        let path = work_dir.join(timestamp).join(format!("{timestamp}.json"));
        let written = write_whole(&path, &line.end(), "write");
        self.output.or_without("this file", written)
    }
}

/// Whether standard output is the user's terminal. mpirun gives its ranks one of its own.
fn is_users_terminal() -> bool {
    let by_mpi = || {
        let topology = Topology::from_env(|name| std::env::var(name).ok());
        topology.is_ok_and(|topology| topology.launcher == Launcher::Mpi)
    };
    std::env::var_os(TERMINAL_VARIABLE).is_some() || std::io::stdout().is_terminal() && !by_mpi()
}

/// Writes a file; if that fails, as on a full disk, removes the part that was written.
fn write_whole(path: &Path, bytes: &[u8], what: &str) -> Result<()> {
    std::fs::write(path, bytes).map_err(|source| {
        let _ = std::fs::remove_file(path);
        Error::Io { what: format!("cannot {what} {}", path.display()), source }
    })
}

fn eval_scalars(
    metrics: &[(String, f64)],
    (data_time, time): (f64, f64),
) -> impl Iterator<Item = (&str, f64)> {
    let metrics = metrics.iter().map(|(name, value)| (name.as_str(), *value));
    metrics.chain([("data_time", data_time), ("time", time)])
}

#[cfg(test)]
mod tests {
    use std::panic::{AssertUnwindSafe, catch_unwind};
    use std::path::Path;

    use crate::Result;
    use crate::config::Config;
    use crate::hooks::{CheckpointHook, LoggerHook};
    use crate::runner::{Hook, Runner, RunnerBuilder, TrainConfig};
    use crate::sinks::{RunInfo, ScalarRecord, VisBackend};
    use crate::testing::{Metrics, blank, builder, group, register};

    #[test]
    fn configuration_in_the_work_directory_is_not_overwritten() {
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

    #[test]
    fn base_configuration_is_not_overwritten_by_the_copy() {
        register();
        let dir = tempfile::tempdir().unwrap();
        let base = "# Mine.\nmodel.type = 'Fake'\ntrain_cfg.max_epochs = 1\n\
                    train_dataloader = { batch_size = 1, dataset.type = 'Blank' }\n";
        std::fs::write(dir.path().join("run.toml"), base).unwrap();
        let path = dir.path().join("run.json");
        let text = "{ \"_base_\": \"run.toml\", \"optim_wrapper\": { \"optimizer\": { \"type\": \"SGD\", \"lr\": 0.1 } } }";
        std::fs::write(&path, text).unwrap();
        let run = || {
            let config = Config::from_file(&path).unwrap();
            let run = RunnerBuilder::from_config(config).unwrap().work_dir(dir.path());
            run.process_group(group()).build().unwrap();
            std::fs::read_to_string(dir.path().join("run.toml")).unwrap()
        };
        assert_eq!(run(), base);
        assert_eq!(std::fs::read_to_string(&path).unwrap(), text);
        // The copy of an earlier run is replaced.
        std::fs::remove_file(dir.path().join("run.toml")).unwrap();
        std::fs::write(&path, text.replace("\"run.toml\"", "\"base.toml\"")).unwrap();
        std::fs::write(dir.path().join("base.toml"), base).unwrap();
        assert!(run().contains("max_epochs = 1"));
        std::fs::write(dir.path().join("base.toml"), base.replace("= 1\n", "= 2\n")).unwrap();
        assert!(run().contains("max_epochs = 2"));
    }

    #[test]
    fn runs_of_the_same_second_have_separate_logs() {
        let dir = tempfile::tempdir().unwrap();
        let runs = [(); 3].map(|()| builder(dir.path(), 1).build().unwrap());
        let logs = std::fs::read_dir(dir.path()).unwrap().map(|e| e.unwrap().file_name());
        let logs: Vec<_> = logs.filter(|name| name.to_string_lossy().starts_with("20")).collect();
        assert_eq!(logs.len(), runs.len(), "{logs:?}");
    }

    /// Receiver that panics when it is to write.
    struct Panics;

    impl VisBackend for Panics {
        fn open(&mut self, _: &RunInfo<'_>) -> Result<()> {
            Ok(())
        }
        fn add_scalars(&mut self, _: &ScalarRecord<'_>) -> Result<()> {
            Ok(())
        }
        fn flush(&mut self) -> Result<()> {
            panic!("a receiver's")
        }
    }

    #[test]
    fn panic_of_a_receiver_unwinds() {
        let dir = tempfile::tempdir().unwrap();
        let run = builder(dir.path(), 2).hook(Box::new(LoggerHook::new(1)));
        let mut run = run.vis_backend(Box::new(Panics)).build().unwrap();
        let caught = catch_unwind(AssertUnwindSafe(move || run.train().map(drop)));
        assert_eq!(*caught.unwrap_err().downcast::<&str>().unwrap(), "a receiver's");
        // The other receivers have written.
        let scalars = walk(dir.path()).into_iter().find(|path| path.ends_with("scalars.json"));
        assert!(std::fs::read_to_string(scalars.unwrap()).unwrap().contains("\"iter\": 1"));
    }

    #[test]
    fn full_disk_does_not_end_a_run_that_traces_or_tests() {
        let dir = tempfile::tempdir().unwrap();
        let run = builder(dir.path(), 2).trace("/dev/full");
        let run = run.test(blank(1), Metrics::new([[("acc", 1.0)]]));
        let mut run = run.hook(Box::new(LoggerHook::new(1))).build().unwrap();
        run.train().unwrap();
        // The file of the test's metrics.
        let work_dir = run.output.work_dir.join(&run.output.timestamp);
        let file = work_dir.join(format!("{}.json", run.output.timestamp));
        std::os::unix::fs::symlink("/dev/full", &file).unwrap();
        run.test().unwrap();
        assert!(!file.is_symlink(), "half a file stays");
    }

    /// The error of a run that must not write to its work directory.
    fn refused(run: RunnerBuilder) -> String {
        run.build().and_then(|mut run| run.train()).unwrap_err().to_string()
    }

    fn saves() -> Box<CheckpointHook> {
        Box::new(CheckpointHook::new(1))
    }

    #[test]
    fn another_run_must_not_write_to_a_used_work_directory() {
        let (dir, other) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
        let run = |dir: &Path| builder(dir, 1).hook(saves());
        run(dir.path()).build().unwrap().train().unwrap();
        run(other.path()).build().unwrap().train().unwrap();
        let text = || std::fs::read_to_string(dir.path().join("epoch_1/state.json")).unwrap();
        let before = text();
        let of_another = run(dir.path()).load_from(other.path().join("epoch_1")).resume(true);
        for run in [run(dir.path()), of_another] {
            let said = refused(run);
            assert!(said.contains("epoch_1") && said.contains("another run"), "{said}");
            assert!(said.contains("resume") && said.contains("work_dir"), "{said}");
        }
        assert_eq!(text(), before);
        // The same runner may continue, and so may a run that resumes.
        let run = run(dir.path()).train_cfg(TrainConfig::new(2)).resume(true);
        let mut run = run.build().unwrap();
        run.train().unwrap();
        run.train().unwrap();
    }

    #[test]
    fn concurrent_runs_in_a_work_directory_are_errors() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().to_owned();
        let first = builder(dir.path(), 1).hook(saves()).hook(Box::new(Within(move || {
            // A checkpoint that the first run is writing.
            let fresh = path.join(".epoch_1.tmp");
            std::fs::create_dir(&fresh).unwrap();
            let said = refused(builder(&path, 1).resume(true).hook(saves()));
            assert!(said.contains("is in use by process"), "{said}");
            assert!(said.contains(&std::process::id().to_string()), "{said}");
            // A run that only evaluates is allowed.
            let run = builder(&path, 1).validation(blank(1), Metrics::new([[("acc", 1.0)]]));
            run.build().unwrap().validate().unwrap();
            assert!(fresh.exists());
        })));
        let mut first = first.build().unwrap();
        first.train().unwrap();
        // The first run has ended, although it is not dropped.
        builder(dir.path(), 1).resume(true).build().unwrap().train().unwrap();
        drop(first);
    }

    /// Calls a function before the first batch.
    struct Within<F>(F);

    impl<F: FnMut() + Send> Hook for Within<F> {
        fn name(&self) -> &'static str {
            "Within"
        }
        fn before_train_epoch(&mut self, _: &mut Runner) -> Result<()> {
            self.0();
            Ok(())
        }
    }

    #[test]
    fn foreign_files_are_not_removed_with_checkpoints() {
        let dir = tempfile::tempdir().unwrap();
        let run = |epochs| {
            let mut hook = saves();
            hook.max_keep_ckpts = 1;
            let run = builder(dir.path(), 1).train_cfg(TrainConfig::new(epochs)).resume(true);
            run.hook(hook).build().unwrap().train().unwrap();
        };
        run(1);
        // Names that a checkpoint has while it is replaced, of a backup, and of a folder that is
        // not a checkpoint.
        let mine = ["epoch_1/notes.txt", "epoch_2.old/model.safetensors", "epoch_3/notes.txt"];
        for path in mine.map(|path| dir.path().join(path)) {
            std::fs::create_dir_all(path.parent().unwrap()).unwrap();
            std::fs::write(path, "mine").unwrap();
        }
        run(3);
        let all = walk(dir.path());
        let of = |name: &str| all.iter().filter(|path| path.ends_with(name)).count();
        assert_eq!([of("notes.txt"), of("epoch_2.old/model.safetensors")], [2, 1], "{all:?}");
        crate::checkpoint::load(&dir.path().join("epoch_3")).unwrap();
    }

    /// All files in `dir`.
    fn walk(dir: &Path) -> Vec<std::path::PathBuf> {
        let entries = std::fs::read_dir(dir).unwrap().map(|entry| entry.unwrap().path());
        let (dirs, files): (Vec<_>, Vec<_>) = entries.partition(|path| path.is_dir());
        files.into_iter().chain(dirs.iter().flat_map(|dir| walk(dir))).collect()
    }
}
