//! Outputs of a run: console, log file, `scalars.json`, event files, traces, plots; those that a
//! loop of one's own has, too, are of [`train_log`].
//!
//! # Log lines
//!
//! Rank 0 writes them to the console and to a file, which
//! [`RunnerBuilder::console`](crate::RunnerBuilder::console) and
//! [`RunnerBuilder::log_file`](crate::RunnerBuilder::log_file) switch off. A
//! [`tracing`](https://docs.rs/tracing) subscriber of the program gets every line as an event `log`
//! of the target `train_log`.
//!
//! # Spans
//!
//! The subscriber also gets spans of the target `runner`. Without a subscriber nothing is
//! formatted, and each span costs an atomic load.
//!
//! * `train { rank, world_size }` (info): a call of [`Runner::train`](crate::Runner::train).
//! * `data` (debug): waiting for the next batch.
//! * `step { epoch, iter }` (debug): one iteration with its hooks.
//! * `train_step` (debug): the engine's part of a step; in it, by the candle engine, `forward` and
//!   `backward`.
//! * `optimizer` (debug): the optimizer's step; on a GPU, its launch.
//! * `save { name }` (info): writing a checkpoint.
//! * `evaluate { split, iter }` (info): a validation or test.
//!
//! Those of gradient buckets are [`collective`]'s, and events of ranks are
//! [`launch`](mod@launch)'s, in the launcher's process.
//!
//! # Traces
//!
//! `trace = "trace.json"` in a configuration, or
//! [`RunnerBuilder::trace`](crate::RunnerBuilder::trace), writes these spans in Chrome's format,
//! one file for each rank. <https://ui.perfetto.dev> shows it: below `backward` of a rank, the
//! buckets that overlap with it. `jq -s add trace*.json` merges the files of the ranks of a
//! machine.
//!
//! # Scalars
//!
//! Each [`VisBackend`] gets the scalars of a run. [`VIS_BACKENDS`] maps the names in a
//! configuration to them, and a program registers its own. `examples/trackers/follow.py` sends
//! `scalars.json` to W&B or MLflow.

mod curves;
mod plot;
mod scalars;
mod vis_backend;

pub use plot::plot;
pub use scalars::Scalars;
pub use train_log::{ChromeTrace, Logger};
pub(crate) use vis_backend::{LocalVisBackend, TensorboardVisBackend};
pub use vis_backend::{RunInfo, ScalarRecord, VIS_BACKENDS, VisBackend};
