//! Why a rank failed, in torchrun's own form: a JSON file that the rank writes and the launcher reads.
//!
//! The launcher names the file in `TORCHELASTIC_ERROR_FILE`, so this works under torchrun too, and
//! torchrun's summary shows what a rank of ours says. The first failure of a process is written,
//! later ones are not. Of several ranks the earliest is the root cause.

use std::fs::{self, File};
use std::io::{self, Read, Write};
use std::path::Path;
use std::time::{SystemTime, UNIX_EPOCH};

use serde::{Deserialize, Serialize};

/// Names the file, in each rank's environment.
pub(super) const ERROR_FILE: &str = "TORCHELASTIC_ERROR_FILE";
/// Bytes of such a file that are read.
const MAX_FILE: u64 = 1 << 20;

#[derive(Serialize, Deserialize)]
struct ErrorFile {
    message: Message,
}

#[derive(Serialize, Deserialize)]
struct Message {
    message: String,
    #[serde(rename = "extraInfo")]
    extra: Extra,
}

#[derive(Serialize, Deserialize)]
struct Extra {
    /// Where it happened; torchrun's name for it.
    #[serde(default)]
    py_callstack: String,
    /// Whole seconds since 1970, as text.
    timestamp: String,
}

/// What a rank says of its failure.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Failure {
    pub(super) message: String,
    /// Seconds since 1970.
    pub(super) at: u64,
}

/// From now on, a panic of this process is written to its error file, besides what is printed.
pub fn record_panics() {
    if std::env::var_os(ERROR_FILE).is_none() {
        return;
    }
    let before = std::panic::take_hook();
    std::panic::set_hook(Box::new(move |panic| {
        let place = panic.location().map(ToString::to_string).unwrap_or_default();
        let text = panic.payload_as_str().unwrap_or("a panic without text");
        record(&format!("panicked at {place}: {text}"), &place);
        before(panic);
    }));
}

/// Writes `message` to this process's error file, if it has one and it was not written before.
pub fn record_failure(message: &str) {
    record(message, "");
}

fn record(message: &str, place: &str) {
    if let Some(path) = std::env::var_os(ERROR_FILE) {
        // Nowhere to write it: it has been, or will be, printed.
        let _ = write(Path::new(&path), message, place);
    }
}

fn write(path: &Path, message: &str, place: &str) -> io::Result<()> {
    let timestamp = now().to_string();
    let extra = Extra { py_callstack: place.to_owned(), timestamp };
    let file = ErrorFile { message: Message { message: message.to_owned(), extra } };
    if let Some(folder) = path.parent() {
        fs::create_dir_all(folder)?;
    }
    let text = serde_json::to_vec(&file)?;
    File::create_new(path)?.write_all(&text)
}

/// Reads what a rank has written; `None` if it wrote nothing, or nothing that can be read.
pub(super) fn read(path: &Path) -> Option<Failure> {
    let mut text = Vec::new();
    File::open(path).ok()?.take(MAX_FILE).read_to_end(&mut text).ok()?;
    let ErrorFile { message: Message { message, extra } } = serde_json::from_slice(&text).ok()?;
    Some(Failure { message, at: extra.timestamp.trim().parse().ok()? })
}

/// Seconds since 1970.
pub(super) fn now() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_secs())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_first_failure_is_kept_in_torchruns_form() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("attempt_0/1/error.json");
        write(&path, "the \"cause\"", "src/x.rs:1:2").unwrap();
        assert!(write(&path, "what came of it", "").is_err());
        let failure = read(&path).unwrap();
        assert_eq!(failure.message, "the \"cause\"");
        assert!(now() - failure.at < 60);
        let text = fs::read_to_string(&path).unwrap();
        let value: serde_json::Value = serde_json::from_str(&text).unwrap();
        assert_eq!(value["message"]["extraInfo"]["py_callstack"], "src/x.rs:1:2");
        assert!(value["message"]["extraInfo"]["timestamp"].is_string());
    }

    #[test]
    fn what_python_writes_is_read_and_nonsense_is_not() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("error.json");
        let python = r#"{"message": {"message": "ValueError: no", "extraInfo":
            {"py_callstack": "Traceback", "timestamp": "1763750000"}}}"#;
        fs::write(&path, python).unwrap();
        let want = Failure { message: "ValueError: no".into(), at: 1_763_750_000 };
        assert_eq!(read(&path), Some(want));
        for text in ["", "{}", "{\"message\": \"only text\"}", "[1]"] {
            fs::write(&path, text).unwrap();
            assert_eq!(read(&path), None, "{text}");
        }
        assert_eq!(read(&dir.path().join("none")), None);
    }
}
