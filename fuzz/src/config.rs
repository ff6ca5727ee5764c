//! Parses arbitrary text as a configuration.
//!
//! Checks: the text is accepted, or rejected with an error that begins with the file's name and a
//! line.

use runner::RunnerBuilder;
use runner::config::Config;

/// Checks one input.
pub fn check(data: &[u8]) {
    let Ok(text) = std::str::from_utf8(data) else { return };
    let read = Config::from_text("fuzz.toml", text).and_then(RunnerBuilder::from_config);
    if let Err(error) = read {
        let error = error.to_string();
        let place = error.strip_prefix("fuzz.toml:").expect("the error names the file");
        let line = place.split(':').next().expect("a split has a first part");
        assert!(line.parse::<usize>().is_ok_and(|line| line >= 1), "no line: {error}");
    }
}
