//! `TrainLog`: the log of a loop of one's own.

use std::fmt::Write;
use std::path::Path;
use std::time::{Duration, Instant};

use crate::format::{bar, clock, scientific};
use crate::{EventFile, FLUSH_INTERVAL, Logger, Result, ScalarFile, create_run_dir, timestamp};

/// Minimum time between updates of the progress bar.
const BAR_INTERVAL: Duration = Duration::from_millis(100);

/// The log of a training loop of one's own: lines in MMEngine's form on standard output and in a
/// file, a progress bar on a terminal, `scalars.json`, and event files for TensorBoard.
///
/// Every rank has one and makes the same calls; that of rank 0 writes. A full disk ends the files
/// with a warning, not the training. Lines less than a tenth of a second apart are written
/// together, so SIGKILL can lose those of the last tenth of a second; [`flush`](Self::flush) before
/// `std::process::exit`. With accumulation, ask for a step when it was taken, not for each batch.
///
/// ```
/// use train_log::TrainLog;
///
/// # let directory = tempfile::tempdir()?;
/// # let work_dir = directory.path();
/// let mut log = TrainLog::create(work_dir, "digits", 0)?.tensorboard()?.total(200);
/// for step in 1..=200 {
///     let loss = 1.0 / step as f64; // a step of the training
///     if log.is_due(step) {
///         log.step(step, &[("lr", 1e-3), ("loss", loss)])?;
///     }
/// }
/// log.evaluation("val", 200, &[("accuracy", 97.5)])?;
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
///
/// writes, besides the files, `Iter(train) [ 10/200]  lr: 1.0000e-03  eta: 0:00:03  time: 0.0181
/// loss: 0.1000` and so on.
#[derive(Debug)]
pub struct TrainLog {
    logger: Logger,
    /// None on other ranks than the first, and after a full disk.
    files: Option<Files>,
    interval: u64,
    total: Option<u64>,
    /// The first step that was asked for, and the last line or evaluation.
    first: Option<(Instant, u64)>,
    last: Option<(Instant, u64)>,
    loss: Option<f64>,
    drawn: Option<Instant>,
    written: Instant,
}

#[derive(Debug)]
struct Files {
    vis_data: std::path::PathBuf,
    scalars: ScalarFile,
    events: Option<EventFile>,
}

impl Files {
    fn write(
        &mut self,
        scalars: &[(&str, f64)],
        counts: &[(&str, usize)],
        step: usize,
    ) -> Result<()> {
        self.scalars.write(scalars, counts, step)?;
        self.events.as_mut().map_or(Ok(()), |events| events.write(scalars, step))
    }

    fn flush(&mut self) -> Result<()> {
        self.scalars.flush()?;
        self.events.as_mut().map_or(Ok(()), EventFile::flush)
    }
}

impl TrainLog {
    /// Creates the log of the program `name` in a new directory `work_dir/TIME`, so that a resumed
    /// run has several, which `runner plot work_dir` joins: `TIME.log`, `vis_data/scalars.json`.
    /// Other ranks than 0 write nothing.
    ///
    /// # Errors
    ///
    /// If a file cannot be created, for any other reason than a full disk.
    pub fn create(work_dir: impl AsRef<Path>, name: &str, rank: usize) -> Result<Self> {
        let mut log = Self {
            logger: Logger::new(name, rank == 0),
            files: None,
            interval: 10,
            total: None,
            first: None,
            last: None,
            loss: None,
            drawn: None,
            written: Instant::now(),
        };
        if rank == 0 {
            let created = log.create_files(work_dir.as_ref());
            log.without_files_if_full(created)?;
        }
        Ok(log)
    }

    fn create_files(&mut self, work_dir: &Path) -> Result<()> {
        let (dir, name) = create_run_dir(work_dir, &timestamp())?;
        let vis_data = dir.join("vis_data");
        self.logger.open_file(&dir.join(format!("{name}.log")))?;
        let scalars = ScalarFile::open(&vis_data.join("scalars.json"))?;
        self.files = Some(Files { vis_data, scalars, events: None });
        Ok(())
    }

    /// Writes event files for TensorBoard, too: `tensorboard --logdir work_dir`.
    ///
    /// # Errors
    ///
    /// If they cannot be created, for any other reason than a full disk.
    pub fn tensorboard(mut self) -> Result<Self> {
        let Some(files) = &mut self.files else { return Ok(self) };
        let created = EventFile::create(&files.vis_data).map(|file| files.events = Some(file));
        self.without_files_if_full(created)?;
        Ok(self)
    }

    /// Sets the number of steps between two lines, 10 by default; 0 counts as 1.
    #[must_use]
    pub fn interval(mut self, steps: u64) -> Self {
        self.interval = steps.max(1);
        self
    }

    /// Sets the number of steps of the run, for the remaining time and the progress bar.
    #[must_use]
    pub fn total(mut self, steps: u64) -> Self {
        self.total = Some(steps);
        self
    }

    /// Returns whether the step, counted from 1, has a line: every [`interval`](Self::interval)
    /// steps, and the last one of [`total`](Self::total). Draws the progress bar. To be called
    /// after each step; all ranks get the same answer.
    pub fn is_due(&mut self, step: u64) -> bool {
        let now = Instant::now();
        self.first.get_or_insert((now, step));
        self.last.get_or_insert((now, step));
        let is_drawn = |drawn: Instant| now - drawn < BAR_INTERVAL;
        if let (true, Some(total)) = (self.logger.wants_bar(), self.total)
            && (step >= total || !self.drawn.is_some_and(is_drawn))
        {
            let loss = self.loss.map_or_else(String::new, |loss| format!("  loss {loss:.4}"));
            let eta =
                self.eta(step).map_or_else(String::new, |eta| format!("  eta {}", clock(eta)));
            self.logger
                .bar(&format!("{} {step}/{total}{loss}{eta}", bar(step as usize, total as usize)));
            self.drawn = Some(now);
        }
        step.is_multiple_of(self.interval) || self.total == Some(step)
    }

    /// Logs the scalars of a training step, counted from 1, and the mean time of a step since the
    /// last line. Learning rates are the scalars `lr` and those whose names end in `/lr`.
    ///
    /// # Errors
    ///
    /// If a file cannot be written, for any other reason than a full disk.
    pub fn step(&mut self, step: u64, scalars: &[(&str, f64)]) -> Result<()> {
        let now = Instant::now();
        let mean = |(since, first): &(Instant, u64)| {
            (step > *first).then(|| (now - *since).as_secs_f64() / (step - first) as f64)
        };
        let time = self.last.as_ref().and_then(mean).map(|time| ("time", time));
        self.last = Some((now, step));
        self.loss = scalars.iter().find(|(name, _)| *name == "loss").map(|(_, loss)| *loss);
        if self.logger.wants_info() {
            let mut line = format!("Iter(train) [{}]", self.count(step));
            let is_rate = |name: &str| name == "lr" || name.ends_with("/lr");
            for (name, rate) in scalars.iter().filter(|(name, _)| is_rate(name)) {
                add(&mut line, format_args!("  {name}: {}", scientific(*rate)));
            }
            if let Some(eta) = self.eta(step) {
                add(&mut line, format_args!("  eta: {}", clock(eta)));
            }
            let others = scalars.iter().filter(|(name, _)| !is_rate(name));
            for (name, value) in time.iter().chain(others) {
                add(&mut line, format_args!("  {name}: {value:.4}"));
            }
            self.logger.progress(&line);
        }
        let all: Vec<_> = scalars.iter().copied().chain(time).collect();
        let step = step as usize;
        self.write(&all, &[("iter", step)], step)?;
        if self.written.elapsed() < FLUSH_INTERVAL { Ok(()) } else { self.flush() }
    }

    /// Logs the metrics of an evaluation after a training step: `split` is its name, `val`.
    ///
    /// # Errors
    ///
    /// If a file cannot be written, for any other reason than a full disk.
    pub fn evaluation(&mut self, split: &str, step: u64, metrics: &[(&str, f64)]) -> Result<()> {
        let mut line = format!("Iter({split}) [{}]", self.count(step));
        for (name, value) in metrics {
            add(&mut line, format_args!("  {name}: {value:.4}"));
        }
        self.logger.info(&line);
        self.last = Some((Instant::now(), step));
        self.write(metrics, &[], step as usize)?;
        self.flush()
    }

    /// Returns what writes the lines, for lines of the program's own.
    pub fn logger(&mut self) -> &mut Logger {
        &mut self.logger
    }

    /// Writes the buffered lines. Dropping the log does so, too.
    ///
    /// # Errors
    ///
    /// If a file cannot be written, for any other reason than a full disk.
    pub fn flush(&mut self) -> Result<()> {
        self.logger.flush();
        self.written = Instant::now();
        let flushed = self.files.as_mut().map_or(Ok(()), Files::flush);
        self.without_files_if_full(flushed)
    }

    fn write(
        &mut self,
        scalars: &[(&str, f64)],
        counts: &[(&str, usize)],
        step: usize,
    ) -> Result<()> {
        let write = |files: &mut Files| files.write(scalars, counts, step);
        let written = self.files.as_mut().map_or(Ok(()), write);
        self.without_files_if_full(written)
    }

    fn without_files_if_full(&mut self, written: Result<()>) -> Result<()> {
        match written {
            Err(error) if error.is_full() => {
                self.files = None;
                let text = format!(
                    "{error}; the training goes on without scalars, and may lose lines of its log"
                );
                self.logger.warning(&text);
                Ok(())
            }
            other => other,
        }
    }

    fn count(&self, step: u64) -> String {
        let Some(total) = self.total else { return step.to_string() };
        let width = total.to_string().len();
        format!("{step:>width$}/{total}")
    }

    /// The remaining time, by the mean time of a step since the first one.
    fn eta(&self, step: u64) -> Option<Duration> {
        let ((since, first), total) = (self.first?, self.total?);
        let done = u32::try_from(step.checked_sub(first)?).ok().filter(|done| *done > 0)?;
        let left = u32::try_from(total.saturating_sub(step)).ok()?;
        (since.elapsed() / done).checked_mul(left)
    }
}

impl Drop for TrainLog {
    fn drop(&mut self) {
        let _ = self.flush();
    }
}

fn add(line: &mut String, text: std::fmt::Arguments<'_>) {
    line.write_fmt(text).expect("memory takes every text");
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The log, `scalars.json` and the number of event files of the only run in `dir`.
    fn written(dir: &Path) -> (String, String, usize) {
        let mut runs = std::fs::read_dir(dir).unwrap().map(|entry| entry.unwrap().path());
        let run = runs.next().unwrap();
        assert!(runs.next().is_none());
        let name = run.file_name().unwrap().to_string_lossy().into_owned();
        let read = |path: &str| std::fs::read_to_string(run.join(path)).unwrap();
        let files = std::fs::read_dir(run.join("vis_data")).unwrap().count();
        (read(&format!("{name}.log")), read("vis_data/scalars.json"), files - 1)
    }

    #[test]
    fn log_has_a_line_for_each_due_step_and_evaluation() {
        let dir = tempfile::tempdir().unwrap();
        let log = TrainLog::create(dir.path(), "digits", 0).unwrap().tensorboard().unwrap();
        let mut log = log.total(25);
        log.logger().set_console(false);
        let due: Vec<_> = (1..=25).filter(|step| log.is_due(*step)).collect();
        assert_eq!(due, [10, 20, 25]);
        log.step(10, &[("loss", 0.5), ("lr", 0.001)]).unwrap();
        log.evaluation("val", 10, &[("accuracy", 97.5)]).unwrap();
        log.logger().info("a line of the program");
        log.step(20, &[("loss", f64::NAN)]).unwrap();
        drop(log);
        let (lines, scalars, event_files) = written(dir.path());
        let lines: Vec<_> = lines.lines().map(|line| &line[19..]).collect();
        assert!(
            lines[0].starts_with(" - digits - INFO - Iter(train) [10/25]  lr: 1.0000e-03  eta: ")
        );
        assert!(lines[0].ends_with("  loss: 0.5000") && lines[0].contains("  time: "));
        assert_eq!(lines[1], " - digits - INFO - Iter(val) [10/25]  accuracy: 97.5000");
        assert_eq!(lines[2], " - digits - INFO - a line of the program");
        assert!(lines[3].starts_with(" - digits - INFO - Iter(train) [20/25]  eta: "));
        assert_eq!((lines.len(), event_files), (4, 1));
        let scalars: Vec<serde_json::Value> =
            scalars.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
        assert_eq!((&scalars[0]["loss"], &scalars[0]["iter"]), (&0.5.into(), &10.into()));
        assert!(scalars[0]["time"].is_number());
        assert_eq!(scalars[1], serde_json::json!({ "accuracy": 97.5, "step": 10 }));
        assert!(scalars[2]["loss"].is_null());
        assert_eq!(scalars.len(), 3);
    }

    #[test]
    fn other_ranks_get_the_same_answers_and_write_nothing() {
        let dir = tempfile::tempdir().unwrap();
        let log = TrainLog::create(dir.path(), "digits", 1).unwrap().tensorboard().unwrap();
        let mut log = log.interval(2);
        assert_eq!((1..=5).filter(|step| log.is_due(*step)).collect::<Vec<_>>(), [2, 4]);
        log.step(2, &[("loss", 0.5)]).unwrap();
        log.evaluation("val", 2, &[("accuracy", 97.5)]).unwrap();
        drop(log);
        assert_eq!(std::fs::read_dir(dir.path()).unwrap().count(), 0);
    }

    #[test]
    fn full_disk_ends_the_scalars_and_not_the_training() {
        let dir = tempfile::tempdir().unwrap();
        let mut log = TrainLog::create(dir.path(), "digits", 0).unwrap();
        log.logger().set_console(false);
        log.files.as_mut().unwrap().scalars = ScalarFile::open(Path::new("/dev/full")).unwrap();
        log.step(1, &[("loss", 0.5)]).unwrap();
        log.flush().unwrap();
        log.step(2, &[("loss", 0.5)]).unwrap();
        drop(log);
        let (lines, scalars, _) = written(dir.path());
        assert!(lines.contains("WARNING - cannot write /dev/full: "), "{lines}");
        assert!(lines.contains("the training goes on without scalars, and may"), "{lines}");
        assert!(lines.contains("Iter(train) [2]") && scalars.is_empty());
    }

    #[test]
    fn runs_of_the_same_second_have_their_own_directories() {
        let dir = tempfile::tempdir().unwrap();
        for name in ["20261130_133040", "20261130_133040_1", "20261130_133040_2"] {
            assert_eq!(create_run_dir(dir.path(), "20261130_133040").unwrap().1, name);
        }
        let file = dir.path().join("file");
        std::fs::write(&file, "").unwrap();
        let said = TrainLog::create(&file, "digits", 0).unwrap_err().to_string();
        assert!(said.starts_with(&format!("cannot create {}", file.display())), "{said}");
    }
}
