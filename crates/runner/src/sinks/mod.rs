//! Where a run's words and numbers go: terminal, log file, `scalars.json`.

mod format;
mod json;
mod log;
mod scalars;

pub(crate) use format::{format_bar, format_train_line, format_val_line};
pub(crate) use json::ScalarsFile;
pub use log::Logger;
pub(crate) use log::TERMINAL_VARIABLE;
pub use scalars::Scalars;
