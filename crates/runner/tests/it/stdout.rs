//! Results on a standard output that cannot be written to.

use std::fs::OpenOptions;
use std::process::{Command, Stdio};

#[test]
fn full_disk_behind_standard_output_is_an_error() {
    let dir = tempfile::tempdir().unwrap();
    std::fs::write(dir.path().join("c.toml"), "model.type = 'Mlp'\n").unwrap();
    let line = "{\"loss\": 1.0, \"iter\": 10, \"step\": 10}\n";
    std::fs::write(dir.path().join("scalars.json"), line).unwrap();
    for args in [&["config", "c.toml"][..], &["plot", "scalars.json"], &["--help"], &["--version"]]
    {
        let run = |out: Stdio| {
            let mut command = Command::new(env!("CARGO_BIN_EXE_runner"));
            command.args(args).current_dir(dir.path()).stdout(out).output().unwrap()
        };
        let full = OpenOptions::new().write(true).open("/dev/full").unwrap();
        let output = run(full.into());
        let said = String::from_utf8(output.stderr).unwrap();
        assert_eq!(output.status.code(), Some(1), "{args:?}: {said}");
        assert!(said.contains("cannot write to standard output: No space left"), "{said}");
        // A reader that has gone, as `head` does.
        let (reader, writer) = std::io::pipe().unwrap();
        drop(reader);
        let output = run(writer.into());
        assert!(output.status.success(), "{args:?}: {output:?}");
    }
}
