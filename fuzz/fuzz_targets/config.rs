//! Arbitrary text as a configuration.
//!
//! Checked: it is read, or refused with an error that begins with the file's name and a place.

#![no_main]

use libfuzzer_sys::fuzz_target;
use runner::RunnerBuilder;
use runner::config::Config;

fuzz_target!(|text: &str| {
    let read = Config::from_text("fuzz.toml", text).and_then(RunnerBuilder::from_config);
    if let Err(error) = read {
        let error = error.to_string();
        let place = error.strip_prefix("fuzz.toml:").expect("the error names the file");
        let line = place.split(':').next().expect("a split has a first part");
        assert!(line.parse::<usize>().is_ok_and(|line| line >= 1), "no line: {error}");
    }
});
