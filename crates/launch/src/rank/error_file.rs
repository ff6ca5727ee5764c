//! The error file of a rank, in torchrun's JSON format: the rank writes it, by these functions or
//! by `collective`, and the launcher reads it.
//!
//! The launcher passes its path in `TORCHELASTIC_ERROR_FILE`, so this works under torchrun, too,
//! and torchrun's summary shows the error. Only the first failure of a process is written. Of
//! several ranks' failures the root cause is the earliest that no peer has caused.

use std::fs::OpenOptions;
use std::io::{self, Read, Write};
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;

use collective::flight::error_file::{Cause, SECOND, record};
pub(crate) use collective::flight::error_file::{ERROR_FILE, now};
use rustix::fs::OFlags;
use serde_json::Value;

use super::label_lines;

/// Maximum number of bytes read from an error file.
const MAX_FILE: u64 = 1 << 26;
/// Maximum number of bytes quoted from a file that is not in torchrun's format.
const MAX_SHOWN: usize = 1 << 10;

/// `O_NONBLOCK`.
const NONBLOCK: i32 = OFlags::NONBLOCK.bits().cast_signed();

/// A failure, as read from an error file.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct RankError {
    pub(crate) message: String,
    /// Nanoseconds since 1970; `None` if the file is not in torchrun's format.
    pub(crate) at: Option<u64>,
    /// Whether the failure or absence of other ranks caused it.
    pub(crate) by_peer: bool,
}

/// Installs a panic hook that also writes panics to this process's error file, and prints them with
/// the prefix of the rank.
pub fn record_panics() {
    let before = std::panic::take_hook();
    std::panic::set_hook(Box::new(move |panic| {
        let place = panic.location().map(ToString::to_string).unwrap_or_default();
        let text = panic.payload_as_str().unwrap_or("a panic without a message");
        let text = format!("panicked at {place}: {text}");
        record(&text, Cause::Own);
        let labelled = label_lines(&text);
        if labelled != text {
            let _ = writeln!(io::stderr(), "{labelled}");
        }
        before(panic);
    }));
}

/// Writes `message` to this process's error file, unless there is none or an earlier failure was
/// written: by this function, a panic, or a group of `collective` that a peer has failed.
pub fn record_failure(message: &str) {
    record(message, Cause::Own);
}

/// [`record_failure`] of a failed collective, which another rank may have caused: then that rank's
/// failure is reported as the root cause. A group does this by itself when it fails; an error of
/// joining a group, or of a store, needs the call.
pub fn record_error(error: &collective::Error) {
    let cause = if error.is_caused_by_peer() { Cause::Peer } else { Cause::Own };
    record(&error.to_string(), cause);
}

/// Reads an error file; `None` if there is none. A file that is not in torchrun's format, for
/// example truncated by a full disk, is quoted.
pub(crate) fn read(path: &Path) -> Option<RankError> {
    let mut text = Vec::new();
    // The rank may have made a FIFO of that name, for which opening or reading would wait.
    let file = OpenOptions::new().read(true).custom_flags(NONBLOCK).open(path).ok()?;
    if !file.metadata().ok()?.is_file() {
        let message = "cannot read error file: it is not a regular file".to_owned();
        return Some(RankError { message, at: None, by_peer: false });
    }
    file.take(MAX_FILE).read_to_end(&mut text).ok()?;
    Some(parse(&text).unwrap_or_else(|| {
        text.truncate(MAX_SHOWN);
        let message = format!("cannot parse error file: `{}`", String::from_utf8_lossy(&text));
        RankError { message, at: None, by_peer: false }
    }))
}

fn parse(text: &[u8]) -> Option<RankError> {
    let file: Value = serde_json::from_slice(text).ok()?;
    let text = |path| Some(file.pointer(path)?.as_str()?.to_owned());
    let seconds: u64 = text("/message/extraInfo/timestamp")?.trim().parse().ok()?;
    // Without nanoseconds, a failure sorts after those in the same second that have them.
    let nanos = file.pointer("/message/extraInfo/nanos").map_or(Some(SECOND - 1), Value::as_u64)?;
    let at = seconds.checked_mul(SECOND)?.checked_add(nanos)?;
    let by_peer = file.pointer("/message/extraInfo/by_peer").is_some_and(|by| *by == true);
    Some(RankError { message: text("/message/message")?, at: Some(at), by_peer })
}

#[cfg(test)]
mod tests {
    use std::fs;

    use collective::flight::error_file::write;

    use super::*;

    #[test]
    fn first_failure_is_kept_in_torchruns_format() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("error.json");
        write(&path, "the \"cause\"", Cause::Own).unwrap();
        assert!(write(&path, "a consequence", Cause::Peer).is_err());
        let failure = read(&path).unwrap();
        assert_eq!(failure.message, "the \"cause\"");
        let at = failure.at.unwrap();
        assert!(now() - at < 60 * SECOND);
        let text = fs::read_to_string(&path).unwrap();
        let value: Value = serde_json::from_str(&text).unwrap();
        assert_eq!(value["message"]["extraInfo"]["py_callstack"], "the \"cause\"");
        let seconds: u64 =
            value["message"]["extraInfo"]["timestamp"].as_str().unwrap().parse().unwrap();
        assert_eq!(at / SECOND, seconds, "torchrun reads whole seconds");
    }

    #[test]
    fn lost_peer_is_a_failure_by_a_peer_and_an_invalid_argument_is_not() {
        let died = collective::Error::PeerDied { op: "all_reduce #1".into(), rank: 1, pid: 7 };
        let own = collective::Error::InvalidArgument("root 2 of 2 ranks".into());
        let dir = tempfile::tempdir().unwrap();
        for (error, cause) in [(died, Cause::Peer), (own, Cause::Own)] {
            let by_peer = cause == Cause::Peer;
            assert_eq!(error.is_caused_by_peer(), by_peer, "{error}");
            let path = dir.path().join(by_peer.to_string());
            write(&path, &error.to_string(), cause).unwrap();
            let failure = read(&path).unwrap();
            assert_eq!((failure.by_peer, failure.at > Some(now())), (by_peer, by_peer), "{error}");
            assert_eq!(collective::Error::Poisoned(Box::new(error)).is_caused_by_peer(), by_peer);
        }
    }

    #[test]
    fn pythons_error_files_are_parsed_and_invalid_ones_are_quoted() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("error.json");
        let python = r#"{"message": {"message": "ValueError: no", "extraInfo":
            {"py_callstack": "Traceback", "timestamp": "1763750000"}}}"#;
        fs::write(&path, python).unwrap();
        let at = Some(1_763_750_000_999_999_999);
        let message = "ValueError: no".into();
        assert_eq!(read(&path), Some(RankError { message, at, by_peer: false }));
        for text in ["", "{}", "{\"message\": \"only text\"}", "[1]", "{\"message\": {\"me"] {
            fs::write(&path, text).unwrap();
            let message = format!("cannot parse error file: `{text}`");
            assert_eq!(read(&path), Some(RankError { message, at: None, by_peer: false }));
        }
        assert_eq!(read(&dir.path().join("none")), None);
    }

    #[test]
    fn error_file_that_is_not_a_regular_file_is_named_and_not_read() {
        let dir = tempfile::tempdir().unwrap();
        let (fifo, zero) = (dir.path().join("fifo"), dir.path().join("zero"));
        assert!(std::process::Command::new("mkfifo").arg(&fifo).status().unwrap().success());
        std::os::unix::fs::symlink("/dev/zero", &zero).unwrap();
        for path in [&*fifo, &*zero, dir.path()] {
            let message = "cannot read error file: it is not a regular file".to_owned();
            assert_eq!(read(path), Some(RankError { message, at: None, by_peer: false }));
        }
    }
}
