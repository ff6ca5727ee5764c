//! The error file of a rank, in torchrun's JSON format, at the path in `TORCHELASTIC_ERROR_FILE`,
//! which torchrun and `launch` set. Not part of the API: `launch` has the functions for programs.
//!
//! When a group fails because of a peer, this rank's file says so without a call of the program:
//! then the launcher takes another rank's failure for the root cause, whichever process ends first.
//! Only the first failure of a process is kept. A new group removes a failure by a peer, since the
//! process has recovered from it.

use std::fs::{self, File};
use std::io::{Result, Write as _};
use std::path::Path;
use std::time::{SystemTime, UNIX_EPOCH};

use parking_lot::Mutex;
use serde_json::json;

/// Environment variable with the path of the file.
pub const ERROR_FILE: &str = "TORCHELASTIC_ERROR_FILE";
/// A second in nanoseconds.
pub const SECOND: u64 = 1_000_000_000;
/// Delay added to the timestamp of a failure by a peer, in nanoseconds: longer than torchrun's
/// `--monitor-interval`, by default at most 5 s. torchrun takes the failure with the earliest
/// second as the root cause, and for a killed rank uses the second in which it detects the exit.
const PEER_DELAY: u64 = 10 * SECOND;

/// Whether the file has a failure of this process by a peer.
static BY_PEER: Mutex<bool> = Mutex::new(false);

/// The cause of a failure.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Cause {
    /// This rank.
    Own,
    /// The failure of other ranks, or their absence.
    Peer,
}

/// Writes a failure of this process, unless it has no launcher or an earlier failure was written.
pub fn record(message: &str, cause: Cause) {
    if let Some(path) = std::env::var_os(ERROR_FILE) {
        let mut by_peer = BY_PEER.lock();
        // If the file cannot be written, the error is still printed.
        if write(Path::new(&path), message, cause).is_ok() {
            *by_peer = cause == Cause::Peer;
        }
    }
}

/// Removes the failure of this process by a peer.
pub(crate) fn withdraw() {
    let mut by_peer = BY_PEER.lock();
    if std::mem::take(&mut *by_peer)
        && let Some(path) = std::env::var_os(ERROR_FILE)
    {
        drop(fs::remove_file(path));
    }
}

/// Writes a new file at `path`.
///
/// # Errors
///
/// The file exists or cannot be written.
pub fn write(path: &Path, message: &str, cause: Cause) -> Result<()> {
    let by_peer = cause == Cause::Peer;
    let at = now().saturating_add(if by_peer { PEER_DELAY } else { 0 });
    let extra = json!({
        // Shown in torchrun's summary.
        "py_callstack": message,
        "timestamp": (at / SECOND).to_string(),
        // torchrun's timestamps are whole seconds; failures by a peer often follow within one.
        "nanos": at % SECOND,
        "by_peer": by_peer,
    });
    let file = json!({ "message": { "message": message, "extraInfo": extra } });
    File::create_new(path)?.write_all(file.to_string().as_bytes())
}

/// Current time in nanoseconds since 1970.
pub fn now() -> u64 {
    let since = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    u64::try_from(since.as_nanos()).unwrap_or(u64::MAX)
}
