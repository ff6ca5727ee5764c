//! The program `launch`: arguments, exit codes and errors.

use std::process::{Command, Output, Stdio};

fn launch(words: &[&str]) -> Output {
    let mut command = Command::new(env!("CARGO_BIN_EXE_launch"));
    command.args(words).stdin(Stdio::null()).output().unwrap()
}

#[test]
fn program_is_looked_up_in_path() {
    let output = launch(&["--nproc-per-node=2", "sh", "-c", "echo $RANK of $WORLD_SIZE"]);
    let text = String::from_utf8(output.stdout).unwrap();
    let mut lines: Vec<_> = text.lines().collect();
    lines.sort_unstable();
    assert_eq!(lines, ["[rank 0] 0 of 2", "[rank 1] 1 of 2"]);
    assert_eq!((output.status.code(), output.stderr.len()), (Some(0), 0));
}

#[test]
fn exit_code_is_the_ranks_or_that_of_a_command_line_error() {
    assert_eq!(launch(&["sh", "-c", "exit 5"]).status.code(), Some(5));
    let missing = launch(&["no-such-program"]);
    let text = String::from_utf8(missing.stderr).unwrap();
    assert!(text.starts_with("error: start rank 0 (no-such-program): "), "{text}");
    assert_eq!(missing.status.code(), Some(1));
    assert_eq!(launch(&["--no-such-flag", "true"]).status.code(), Some(2));
    let contradiction = launch(&["--nnodes", "2", "true"]);
    assert_eq!(contradiction.status.code(), Some(1));
    assert!(contradiction.stderr.starts_with(b"error: --nnodes 2 needs --node-rank"));
}

#[test]
fn torchruns_single_node_flags_are_accepted() {
    let words = ["--nnodes=1", "--rdzv-backend=c10d", "--rdzv-endpoint=localhost:0", "sh", "-c"];
    let output = launch(&[&words[..], &["echo $WORLD_SIZE"]].concat());
    assert_eq!(String::from_utf8_lossy(&output.stdout), "[rank 0] 1\n", "{output:?}");
    // Variables that cluster operators set to their defaults.
    for (name, value) in [("PET_STANDALONE", "0"), ("PET_RDZV_ENDPOINT", "")] {
        let mut command = Command::new(env!("CARGO_BIN_EXE_launch"));
        command.args(["--nnodes=1", "--node-rank=0", "true"]).env(name, value);
        let output = command.stdin(Stdio::null()).output().unwrap();
        assert!(output.status.success(), "{name}={value}: {output:?}");
    }
}
