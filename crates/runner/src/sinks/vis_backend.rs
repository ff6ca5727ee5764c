//! `VisBackend`: receives the scalars of a run; and the registry of those in a configuration.

use std::path::Path;

use train_log::{EventFile, ScalarFile};

use crate::Result;
use crate::registry::{Builtin, Registry};

/// The entries of `vis_backends` in a configuration. `LocalVisBackend` is part of every run.
pub static VIS_BACKENDS: Registry<Box<dyn VisBackend>> =
    Registry::with("visualization backend", BUILTIN);

/// Receives the scalars of a run on rank 0: losses, learning rates and times of every logged
/// iteration, and the metrics of every validation.
///
/// An error ends the run, except for a full disk, which ends the log. A backend that may fail, such
/// as one over a network, should handle its own errors.
///
/// # Examples
///
/// A backend of a program's own, which a configuration enables with
/// `vis_backends = [{ type = "CsvVisBackend" }]`:
///
/// ```
/// use std::fs::File;
/// use std::io::Write;
///
/// use runner::Result;
/// use runner::sinks::{ScalarRecord, RunInfo, VIS_BACKENDS, VisBackend};
///
/// #[derive(Default)]
/// struct Csv(Option<File>);
///
/// impl VisBackend for Csv {
///     fn open(&mut self, run: &RunInfo<'_>) -> Result<()> {
///         self.0 = File::create(run.dir.join("scalars.csv")).ok();
///         Ok(())
///     }
///
///     fn add_scalars(&mut self, record: &ScalarRecord<'_>) -> Result<()> {
///         for (name, value) in record.scalars {
///             let line = format!("{},{name},{value}\n", record.step);
///             let _ = self.0.as_mut().map(|file| file.write_all(line.as_bytes()));
///         }
///         Ok(())
///     }
/// }
///
/// VIS_BACKENDS.register("CsvVisBackend", |_section| Ok(Box::new(Csv::default())))?;
/// # Ok::<(), runner::Error>(())
/// ```
#[doc(alias = "BaseVisBackend")]
pub trait VisBackend: Send {
    /// Begins a run. Called once, before the first scalars.
    ///
    /// # Errors
    ///
    /// If it cannot be written to.
    fn open(&mut self, run: &RunInfo<'_>) -> Result<()>;

    /// Takes the scalars of one step; they may wait in memory.
    ///
    /// # Errors
    ///
    /// If they cannot be written.
    fn add_scalars(&mut self, record: &ScalarRecord<'_>) -> Result<()>;

    /// Writes the scalars that wait. Called about ten times a second while there are new ones, and
    /// at the end.
    ///
    /// # Errors
    ///
    /// If they cannot be written.
    fn flush(&mut self) -> Result<()> {
        Ok(())
    }
}

/// The run that a [`VisBackend`] receives the scalars of.
#[derive(Clone, Copy, Debug)]
#[non_exhaustive]
pub struct RunInfo<'a> {
    /// Directory of its visualization data: `WORK_DIR/TIMESTAMP/vis_data`.
    pub dir: &'a Path,
    /// Its name in log lines: `experiment_name` or the configuration's file name, and the time of
    /// its start.
    pub name: &'a str,
    /// Time of its start, as in the name of its log.
    pub timestamp: &'a str,
    /// Its configuration with all overrides, if it was made from one.
    pub config: Option<&'a str>,
}

/// The scalars of one step.
#[derive(Clone, Copy, Debug)]
#[non_exhaustive]
pub struct ScalarRecord<'a> {
    /// Names and values. Losses and times are means over the last iterations.
    pub scalars: &'a [(&'a str, f64)],
    /// `epoch` and `iter` of a training step, counted from 1; empty for a validation.
    pub counts: &'a [(&'a str, usize)],
    /// The iteration of a training step; the epoch or the iteration of a validation.
    pub step: usize,
}

const BUILTIN: Builtin<Box<dyn VisBackend>> = &[
    ("LocalVisBackend", |_| Ok(Box::new(LocalVisBackend::default()))),
    ("TensorboardVisBackend", |_| Ok(Box::new(TensorboardVisBackend::default()))),
];

/// Writes `scalars.json` and a copy named after the time, as MMEngine does.
#[derive(Debug, Default)]
pub(crate) struct LocalVisBackend(Vec<ScalarFile>);

impl VisBackend for LocalVisBackend {
    fn open(&mut self, run: &RunInfo<'_>) -> Result<()> {
        let names = ["scalars", run.timestamp].map(|name| run.dir.join(format!("{name}.json")));
        self.0 = names.iter().map(|path| ScalarFile::open(path)).collect::<Result<_, _>>()?;
        Ok(())
    }

    fn add_scalars(&mut self, record: &ScalarRecord<'_>) -> Result<()> {
        let ScalarRecord { scalars, counts, step } = *record;
        Ok(self.0.iter_mut().try_for_each(|file| file.write(scalars, counts, step))?)
    }

    fn flush(&mut self) -> Result<()> {
        Ok(self.0.iter_mut().try_for_each(ScalarFile::flush)?)
    }
}

/// Writes event files for TensorBoard.
#[derive(Debug, Default)]
pub(crate) struct TensorboardVisBackend(Option<EventFile>);

impl VisBackend for TensorboardVisBackend {
    fn open(&mut self, run: &RunInfo<'_>) -> Result<()> {
        self.0 = Some(EventFile::create(run.dir)?);
        Ok(())
    }

    fn add_scalars(&mut self, record: &ScalarRecord<'_>) -> Result<()> {
        let Some(events) = &mut self.0 else { return Ok(()) };
        let counts = record.counts.iter().map(|(name, count)| (*name, *count as f64));
        let values: Vec<_> = record.scalars.iter().copied().chain(counts).collect();
        Ok(events.write(&values, record.step)?)
    }

    fn flush(&mut self) -> Result<()> {
        Ok(self.0.as_mut().map_or(Ok(()), EventFile::flush)?)
    }
}
