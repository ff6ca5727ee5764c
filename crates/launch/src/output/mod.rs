//! The ranks' output: console lines with the rank as a prefix, log files, and the launcher's own
//! messages.

mod copy;
mod lines;
mod log_file;
mod run_dir;

use std::io::Write;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

pub(crate) use self::copy::CopyThread;
pub(crate) use self::run_dir::{RunDir, line_prefix};

/// Destination of the ranks' output, written one line at a time.
pub type Sink = Arc<Mutex<dyn Write + Send>>;

/// Locks the sink. A poisoned lock is ignored: the panic can at worst have truncated a line.
fn lock(sink: &Sink) -> MutexGuard<'_, dyn Write + Send + 'static> {
    sink.lock().unwrap_or_else(PoisonError::into_inner)
}
