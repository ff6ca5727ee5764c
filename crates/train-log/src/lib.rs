//! The log of a training loop, for any tensor crate: lines, a progress bar, `scalars.json`,
//! TensorBoard, traces.
//!
//! [`TrainLog`] is all of it but traces, in a call for each step. Its parts can be used alone:
//! [`Logger`] writes lines and draws a bar, [`ScalarFile`] writes `scalars.json`, [`EventFile`]
//! event files for TensorBoard. [`ChromeTrace`] is a [`tracing`] subscriber that writes the spans
//! of `collective`, `candle-train`, `runner` or a program's own for <https://ui.perfetto.dev>.
//! There is no training loop here, and no tensor.

// docs.rs notes at each item the feature that it needs.
#![cfg_attr(docsrs, feature(doc_cfg))]

mod appender;
mod chrome_trace;
mod error;
mod event_file;
pub mod format;
mod json;
mod logger;
mod run_dir;
mod scalar_file;
mod train_log;

pub use appender::FLUSH_INTERVAL;
pub use chrome_trace::ChromeTrace;
pub use error::{Error, Result};
pub use event_file::{EventFile, hostname};
pub use json::JsonLine;
pub use logger::{Level, Logger};
pub use run_dir::{create_run_dir, timestamp};
pub use scalar_file::ScalarFile;
pub use train_log::TrainLog;

/// The examples of the README.
#[cfg(doctest)]
#[doc = include_str!("../README.md")]
pub struct Readme;
