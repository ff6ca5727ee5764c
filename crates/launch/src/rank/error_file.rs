//! The error file of a rank, in torchrun's JSON format: the rank writes it and the launcher reads
//! it.
//!
//! The launcher passes its path in `TORCHELASTIC_ERROR_FILE`, so this works under torchrun, too,
//! and torchrun's summary shows the error. Only the first failure of a process is written. Of
//! several ranks' failures the earliest is the root cause.

use std::fs::{File, OpenOptions};
use std::io::{self, Read, Write};
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;
use std::time::{SystemTime, UNIX_EPOCH};

use rustix::fs::OFlags;
use serde_json::{Value, json};

use super::label_lines;

/// Environment variable with the path of the file.
pub(crate) const ERROR_FILE: &str = "TORCHELASTIC_ERROR_FILE";
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
}

/// Installs a panic hook that also writes panics to this process's error file, and prints them with
/// the prefix of the rank.
pub fn record_panics() {
    let before = std::panic::take_hook();
    std::panic::set_hook(Box::new(move |panic| {
        let place = panic.location().map(ToString::to_string).unwrap_or_default();
        let text = panic.payload_as_str().unwrap_or("a panic without a message");
        let text = format!("panicked at {place}: {text}");
        record(&text, 0);
        let labelled = label_lines(&text);
        if labelled != text {
            let _ = writeln!(io::stderr(), "{labelled}");
        }
        before(panic);
    }));
}

/// Writes `message` to this process's error file, unless there is none or an earlier failure was
/// written.
pub fn record_failure(message: &str) {
    record(message, 0);
}

/// [`record_failure`] of a failed collective. If another rank's failure caused this one, the
/// timestamp is set later: torchrun takes the failure with the earliest second as the root cause,
/// and for a killed rank uses the second in which it detects the exit.
pub fn record_error(error: &collective::Error) {
    record(&error.to_string(), if is_consequence(error) { FOLLOWS_AFTER } else { 0 });
}

/// Returns whether the failure of other ranks, or their absence, caused this error.
fn is_consequence(error: &collective::Error) -> bool {
    use collective::Error as E;
    match error {
        E::Poisoned(first) => is_consequence(first),
        E::PeerDied { .. } | E::Aborted { .. } | E::Timeout { .. } => true,
        // The store ends with the process that hosts it.
        E::KeyTimeout { .. } | E::Store { .. } | E::Rendezvous { .. } => true,
        _ => false,
    }
}

fn record(message: &str, later: u64) {
    if let Some(path) = std::env::var_os(ERROR_FILE) {
        // If the file cannot be written, the error is still printed.
        let _ = write(Path::new(&path), message, now().saturating_add(later));
    }
}

fn write(path: &Path, message: &str, at: u64) -> io::Result<()> {
    let extra = json!({
        // Shown in torchrun's summary.
        "py_callstack": message,
        "timestamp": (at / SECOND).to_string(),
        // torchrun's timestamps are whole seconds; consequences often follow within the second.
        "nanos": at % SECOND,
    });
    let file = json!({ "message": { "message": message, "extraInfo": extra } });
    File::create_new(path)?.write_all(file.to_string().as_bytes())
}

/// Reads an error file; `None` if there is none. A file that is not in torchrun's format, for
/// example truncated by a full disk, is quoted.
pub(crate) fn read(path: &Path) -> Option<RankError> {
    let mut text = Vec::new();
    // The rank may have made a FIFO of that name, for which opening or reading would wait.
    let file = OpenOptions::new().read(true).custom_flags(NONBLOCK).open(path).ok()?;
    if !file.metadata().ok()?.is_file() {
        let message = "cannot read error file: it is not a regular file".to_owned();
        return Some(RankError { message, at: None });
    }
    file.take(MAX_FILE).read_to_end(&mut text).ok()?;
    Some(parse(&text).unwrap_or_else(|| {
        text.truncate(MAX_SHOWN);
        let message = format!("cannot parse error file: `{}`", String::from_utf8_lossy(&text));
        RankError { message, at: None }
    }))
}

fn parse(text: &[u8]) -> Option<RankError> {
    let file: Value = serde_json::from_slice(text).ok()?;
    let text = |path| Some(file.pointer(path)?.as_str()?.to_owned());
    let seconds: u64 = text("/message/extraInfo/timestamp")?.trim().parse().ok()?;
    // Without nanoseconds, a failure sorts after those in the same second that have them.
    let nanos = file.pointer("/message/extraInfo/nanos").map_or(Some(SECOND - 1), Value::as_u64)?;
    let at = seconds.checked_mul(SECOND)?.checked_add(nanos)?;
    Some(RankError { message: text("/message/message")?, at: Some(at) })
}

/// Current time in nanoseconds since 1970.
pub(crate) fn now() -> u64 {
    let since = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    u64::try_from(since.as_nanos()).unwrap_or(u64::MAX)
}

/// A second in nanoseconds.
const SECOND: u64 = 1_000_000_000;
/// Delay added to the timestamp of a consequence, in nanoseconds: longer than torchrun's
/// `--monitor-interval`, by default at most 5 s.
const FOLLOWS_AFTER: u64 = 10 * SECOND;

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;

    #[test]
    fn first_failure_is_kept_in_torchruns_format() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("error.json");
        write(&path, "the \"cause\"", now()).unwrap();
        assert!(write(&path, "a consequence", now()).is_err());
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
    fn lost_peer_is_a_consequence_and_an_invalid_argument_is_not() {
        let died = collective::Error::PeerDied { op: "all_reduce #1".into(), rank: 1, pid: 7 };
        let own = collective::Error::InvalidArgument("root 2 of 2 ranks".into());
        for (error, follows) in [(died, true), (own, false)] {
            assert_eq!(is_consequence(&error), follows, "{error}");
            assert_eq!(is_consequence(&collective::Error::Poisoned(Box::new(error))), follows);
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
        assert_eq!(read(&path), Some(RankError { message: "ValueError: no".into(), at }));
        for text in ["", "{}", "{\"message\": \"only text\"}", "[1]", "{\"message\": {\"me"] {
            fs::write(&path, text).unwrap();
            let message = format!("cannot parse error file: `{text}`");
            assert_eq!(read(&path), Some(RankError { message, at: None }));
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
            assert_eq!(read(path), Some(RankError { message, at: None }));
        }
    }
}
