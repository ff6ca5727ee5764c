//! Outputs of a run: terminal, log file, `scalars.json`, event files, plots.

mod appender;
mod curves;
mod events;
mod json;
mod log;
mod plot;
mod scalars;

pub(crate) use appender::{Appender, WAIT};
pub(crate) use events::{EventFile, hostname};
pub(crate) use json::JsonLine;
pub use log::Logger;
pub(crate) use log::{Level, TERMINAL_VARIABLE};
pub use plot::plot;
pub use scalars::Scalars;
