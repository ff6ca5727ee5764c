//! The error file of a rank, in torchrun's format: JSON that the rank writes and the launcher reads.
//!
//! The launcher names the file in `TORCHELASTIC_ERROR_FILE`, so this works under torchrun too, and
//! torchrun's summary shows what a rank of ours says. The first failure of a process is written,
//! later ones are not. Of several ranks the earliest is the root cause.

use std::fs::File;
use std::io::{self, Read, Write};
use std::path::Path;
use std::time::{SystemTime, UNIX_EPOCH};

use serde_json::{Value, json};

use super::label_lines;

/// Names the file, in each rank's environment.
pub(super) const ERROR_FILE: &str = "TORCHELASTIC_ERROR_FILE";
/// Bytes of such a file that are read.
const MAX_FILE: u64 = 1 << 26;
/// Bytes that are shown of a file that is not in torchrun's format.
const MAX_SHOWN: usize = 1 << 10;

/// A failure read from an error file.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Failure {
    pub(super) message: String,
    /// Nanoseconds since 1970; `None` if the file is not in torchrun's format.
    pub(super) at: Option<u64>,
}

/// From now on, a panic of this process is written to its error file, besides what is printed, and the line
/// that tells of it names the rank.
pub fn record_panics() {
    let before = std::panic::take_hook();
    std::panic::set_hook(Box::new(move |panic| {
        let place = panic.location().map(ToString::to_string).unwrap_or_default();
        let text = panic.payload_as_str().unwrap_or("a panic without text");
        let text = format!("panicked at {place}: {text}");
        record(&text, 0);
        let labelled = label_lines(&text);
        if labelled != text {
            let _ = writeln!(io::stderr(), "{labelled}");
        }
        before(panic);
    }));
}

/// Writes `message` to this process's error file, if it has one and it was not written before.
pub fn record_failure(message: &str) {
    record(message, 0);
}

/// [`record_failure`] of a failed collective. What only follows from another rank's failure is dated later than that
/// may be, because torchrun takes the failure with the earliest second for the root cause, and the second in
/// which it looks for that of a rank that was killed.
pub fn record_error(error: &collective::Error) {
    record(&error.to_string(), if is_consequence(error) { FOLLOWS_AFTER } else { 0 });
}

/// Whether a collective failed since other ranks did, or did not come.
fn is_consequence(error: &collective::Error) -> bool {
    use collective::Error as E;
    match error {
        E::Poisoned(first) => is_consequence(first),
        E::PeerDied { .. } | E::Aborted { .. } | E::Timeout { .. } => true,
        // The store is lost with the rank that hosts it.
        E::KeyTimeout { .. } | E::Store { .. } | E::Rendezvous { .. } => true,
        _ => false,
    }
}

fn record(message: &str, later: u64) {
    if let Some(path) = std::env::var_os(ERROR_FILE) {
        // Nowhere to write it: it has been, or will be, printed.
        let _ = write(Path::new(&path), message, now().saturating_add(later));
    }
}

fn write(path: &Path, message: &str, at: u64) -> io::Result<()> {
    let extra = json!({
        // What torchrun's summary shows.
        "py_callstack": message,
        "timestamp": (at / SECOND).to_string(),
        // torchrun's form has whole seconds; what follows from a failure often does so within the second.
        "nanos": at % SECOND,
    });
    let file = json!({ "message": { "message": message, "extraInfo": extra } });
    File::create_new(path)?.write_all(file.to_string().as_bytes())
}

/// Reads what a rank has written; `None` if it wrote no file. A file that is not in torchrun's format, for example
/// because the disk is full, is shown as it is.
pub(super) fn read(path: &Path) -> Option<Failure> {
    let mut text = Vec::new();
    File::open(path).ok()?.take(MAX_FILE).read_to_end(&mut text).ok()?;
    Some(parse(&text).unwrap_or_else(|| {
        text.truncate(MAX_SHOWN);
        let message = format!("unreadable error file: `{}`", String::from_utf8_lossy(&text));
        Failure { message, at: None }
    }))
}

fn parse(text: &[u8]) -> Option<Failure> {
    let file: Value = serde_json::from_slice(text).ok()?;
    let text = |path| Some(file.pointer(path)?.as_str()?.to_owned());
    let seconds: u64 = text("/message/extraInfo/timestamp")?.trim().parse().ok()?;
    // A file without nanoseconds is no cause of one in the same second that has them.
    let nanos = file.pointer("/message/extraInfo/nanos").map_or(Some(SECOND - 1), Value::as_u64)?;
    let at = seconds.checked_mul(SECOND)?.checked_add(nanos)?;
    Some(Failure { message: text("/message/message")?, at: Some(at) })
}

/// Nanoseconds since 1970.
pub(super) fn now() -> u64 {
    let since = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    u64::try_from(since.as_nanos()).unwrap_or(u64::MAX)
}

/// In nanoseconds.
const SECOND: u64 = 1_000_000_000;
/// How much later than now a consequence is dated: than torchrun's `--monitor-interval`, whose default was 5 s.
const FOLLOWS_AFTER: u64 = 10 * SECOND;

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;

    #[test]
    fn the_first_failure_is_kept_in_torchruns_form() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("error.json");
        write(&path, "the \"cause\"", now()).unwrap();
        assert!(write(&path, "what came of it", now()).is_err());
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
    fn a_lost_peer_is_a_consequence_and_a_mistake_of_ones_own_is_not() {
        let died = collective::Error::PeerDied { op: "all_reduce #1".into(), rank: 1, pid: 7 };
        let own = collective::Error::InvalidArgument("root 2 of 2 ranks".into());
        for (error, follows) in [(died, true), (own, false)] {
            assert_eq!(is_consequence(&error), follows, "{error}");
            assert_eq!(is_consequence(&collective::Error::Poisoned(Box::new(error))), follows);
        }
    }

    #[test]
    fn files_of_python_are_read_and_invalid_ones_are_shown_as_they_are() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("error.json");
        let python = r#"{"message": {"message": "ValueError: no", "extraInfo":
            {"py_callstack": "Traceback", "timestamp": "1763750000"}}}"#;
        fs::write(&path, python).unwrap();
        let at = Some(1_763_750_000_999_999_999);
        assert_eq!(read(&path), Some(Failure { message: "ValueError: no".into(), at }));
        for text in ["", "{}", "{\"message\": \"only text\"}", "[1]", "{\"message\": {\"me"] {
            fs::write(&path, text).unwrap();
            let message = format!("unreadable error file: `{text}`");
            assert_eq!(read(&path), Some(Failure { message, at: None }));
        }
        assert_eq!(read(&dir.path().join("none")), None);
    }
}
