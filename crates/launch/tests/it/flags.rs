//! torchrun's flags and `PET_*` variables.

use std::process::{Command, Output, Stdio};

use crate::common::process::Launcher;

const LAUNCH: &str = env!("CARGO_BIN_EXE_launch");

/// The flags of torchrun of PyTorch 2.15.0, each with a valid value; `""` for a flag without a
/// value.
const TORCHRUN: &[(&str, &str)] = &[
    ("--nnodes", "1:1"),
    ("--nproc-per-node", "1"),
    ("--rdzv-backend", "static"),
    ("--rdzv-endpoint", "localhost:0"),
    ("--rdzv-id", "job"),
    ("--rdzv-conf", "timeout=600"),
    ("--standalone", ""),
    ("--max-restarts", "0"),
    ("--monitor-interval", "0.1"),
    ("--start-method", "spawn"),
    ("--event-log-handler", "null"),
    ("--role", "default"),
    ("-m", ""),
    ("--module", ""),
    ("--no-python", ""),
    ("--run-path", ""),
    ("--log-dir", "DIR"),
    ("-r", "0"),
    ("--redirects", "0"),
    ("-t", "0"),
    ("--tee", "0"),
    ("--log-line-prefix-template", "${role_name}"),
    ("--local-ranks-filter", "0"),
    ("--duplicate-stdout-filters", "apple"),
    ("--duplicate-stderr-filters", "apple"),
    ("--node-rank", "0"),
    ("--master-addr", "127.0.0.1"),
    ("--master-port", "0"),
    ("--local-addr", "127.0.0.1"),
    ("--logs-specs", "mine"),
    ("--numa-binding", "node"),
    ("--signals-to-handle", "SIGTERM,SIGUSR1"),
    ("--shutdown-timeout", "30"),
    ("--virtual-local-rank", ""),
    ("--print-completion", "bash"),
];

fn launch(words: &[&str], envs: &[(&str, &str)]) -> Output {
    let mut command = Command::new(LAUNCH);
    command.args(words).envs(envs.iter().copied()).stdin(Stdio::null()).output().unwrap()
}

fn text(output: &Output) -> String {
    [&output.stdout[..], &output.stderr].map(String::from_utf8_lossy).concat()
}

/// Returns the row of the README's table whose first cell has this flag.
fn row(flag: &str) -> &'static str {
    let flag = format!("`{flag}`");
    let mut rows = include_str!("../../README.md").lines().filter(|line| line.starts_with("| `-"));
    let row = rows.find(|row| row.split('|').nth(1).unwrap().contains(&flag));
    row.unwrap_or_else(|| panic!("{flag} is not in the README's table"))
}

#[test]
fn every_torchrun_flag_is_accepted_or_refused_by_name() {
    let dir = tempfile::tempdir().unwrap();
    for (flag, value) in TORCHRUN {
        let value = value.replace("DIR", dir.path().to_str().unwrap());
        let words = match (&value[..], flag.starts_with("--")) {
            ("", _) => vec![flag.to_string()],
            (value, true) => vec![format!("{flag}={value}")],
            (value, false) => vec![flag.to_string(), value.to_owned()],
        };
        let words: Vec<_> = words.iter().map(String::as_str).chain(["true"]).collect();
        let output = launch(&words, &[]);
        let (said, row) = (text(&output), row(flag));
        match output.status.code() {
            Some(0) => assert!(!row.contains("| refused: "), "{row}"),
            Some(2) => {
                assert!(row.contains("| refused: "), "{row}: {said}");
                assert!(said.starts_with("error: ") && said.contains(flag), "{flag}: {said}");
                assert!(!said.contains("unexpected argument"), "{flag}: {said}");
            }
            code => panic!("{flag}: {code:?}: {said}"),
        }
    }
}

#[test]
#[ignore = "needs PyTorch: TORCH_PYTHON, or python3, imports torch"]
fn torchrun_flag_list_is_complete() {
    let python = std::env::var("TORCH_PYTHON").unwrap_or_else(|_| "python3".into());
    let program = "from torch.distributed.run import get_args_parser as get\n\
                   for action in get()._actions: print(*action.option_strings)";
    let output = Command::new(python).args(["-c", program]).output().unwrap();
    let flags = text(&output);
    assert!(output.status.success(), "{flags}");
    for flag in flags.split_whitespace().filter(|flag| !["-h", "--help"].contains(flag)) {
        let hyphens = flag.replace('_', "-");
        assert!(TORCHRUN.iter().any(|(known, _)| *known == hyphens), "{flag}");
    }
}

#[test]
fn refused_variables_are_named_unless_they_are_off() {
    for (name, value) in [("PET_MODULE", "1"), ("PET_DUPLICATE_STDOUT_FILTERS", "apple")] {
        let output = launch(&["true"], &[(name, value)]);
        assert_eq!(output.status.code(), Some(2), "{name}");
        assert!(text(&output).contains(name), "{}", text(&output));
    }
    let output = launch(&["true"], &[("PET_MODULE", "0"), ("PET_VIRTUAL_LOCAL_RANK", "0")]);
    assert_eq!(text(&output), "");
}

#[test]
fn empty_variables_count_as_unset() {
    for (flag, value) in TORCHRUN.iter().filter(|(flag, _)| flag.starts_with("--")) {
        let name = flag.replace("--", "PET_").replace('-', "_").to_uppercase();
        let output = launch(&["true"], &[(&name, "")]);
        assert!(output.status.success(), "{name} {value}: {}", text(&output));
    }
}

#[test]
fn local_addr_becomes_master_addr() {
    let at = format!("--rdzv-endpoint=127.0.0.1:{}", super::nodes::free_port());
    let words = [&at, "--local-addr=127.0.0.2", "sh", "-c", "echo $MASTER_ADDR"];
    assert_eq!(text(&launch(&words, &[])), "[rank 0] 127.0.0.2\n");
    // Reserved for documentation (RFC 5737).
    let output = launch(&[&at, "--local-addr=192.0.2.1", "true"], &[]);
    assert_eq!(output.status.code(), Some(1));
    assert!(text(&output).starts_with("error: --local-addr 192.0.2.1"), "{}", text(&output));
}

#[test]
fn only_signals_to_handle_are_forwarded() {
    let script = "trap 'exit 4' USR2; trap 'exit 5' WINCH; echo up; while :; do sleep 0.05; done";
    for (flag, signal, code) in [
        ("--nnodes=1", "-USR2", 4),
        ("--signals-to-handle=SIGWINCH", "-WINCH", 5),
        ("--signals-to-handle=SIGWINCH", "-USR2", -1),
    ] {
        let mut launcher = Launcher::start(Command::new(LAUNCH).args([flag, "sh", "-c", script]));
        launcher.reader.await_lines("up", 1);
        super::nodes::signal(&launcher, signal);
        assert_eq!(launcher.wait(), code, "{flag} {signal}: {}", launcher.reader.text());
    }
    for name in ["SIGKILL", "SIGCHLD", "SIGWHAT"] {
        let output = launch(&[&format!("--signals-to-handle={name}"), "true"], &[]);
        assert!(!output.status.success() && text(&output).starts_with("error: "), "{name}");
    }
}

#[test]
fn torchruns_other_variables_are_read() {
    let prefix = ("TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE", "${role_name}${local_rank}:");
    let output = launch(&["echo", "x"], &[prefix, ("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", "7")]);
    assert_eq!(text(&output), "default0:x\n");
    let output = launch(&["echo", "x"], &[("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", "long")]);
    assert!(text(&output).contains("TORCH_ELASTIC_SHUTDOWN_TIMEOUT"), "{}", text(&output));
}

/// An endpoint with a node rank selects `static` at the endpoint.
#[test]
#[ignore = "needs PyTorch: TORCH_PYTHON, or python3, imports torch"]
fn variables_mean_the_same_as_in_torchrun() {
    let python = std::env::var("TORCH_PYTHON").unwrap_or_else(|_| "python3".into());
    let endpoint = format!("127.0.0.1:{}", super::nodes::free_port());
    let mut nodes = [(0, LAUNCH, &[][..]), (1, &python, &["-m", "torch.distributed.run"])].map(
        |(rank, program, args): (u32, &str, &[&str])| {
            let mut command = Command::new(program);
            command.args(args).args([
                "sh",
                "-c",
                "echo $RANK of $WORLD_SIZE at $MASTER_ADDR:$MASTER_PORT",
            ]);
            command.env("PET_NODE_RANK", rank.to_string()).envs([
                ("PET_NNODES", "2"),
                ("PET_RDZV_ENDPOINT", &endpoint),
                ("PET_MASTER_ADDR", "192.0.2.1"),
                ("PET_MASTER_PORT", "23456"),
                ("PET_NO_PYTHON", "1"),
            ]);
            Launcher::start(&mut command)
        },
    );
    for (rank, node) in nodes.iter_mut().enumerate() {
        assert_eq!(node.wait(), 0, "{}", node.reader.text());
        node.reader.await_lines(&format!("{rank} of 2 at {endpoint}"), 1);
    }
}

/// Kubeflow's training operator sets all of these variables for a job with a master and an elastic
/// policy.
#[test]
fn kubeflows_variables_start_an_elastic_job() {
    let port = super::nodes::free_port().to_string();
    let endpoint = format!("127.0.0.1:{port}");
    let nodes = [0, 1].map(|rank: u32| {
        let rank = rank.to_string();
        let mut command = Command::new(LAUNCH);
        command.args(["sh", "-c", "echo $RANK of $WORLD_SIZE"]);
        let envs = [
            ("RANK", &rank[..]),
            ("WORLD_SIZE", "2"),
            ("MASTER_ADDR", "192.0.2.1"),
            ("MASTER_PORT", "23456"),
            ("PET_NNODES", "2"),
            ("PET_NPROC_PER_NODE", "1"),
            ("PET_NODE_RANK", &rank),
            ("PET_MASTER_ADDR", "192.0.2.1"),
            ("PET_MASTER_PORT", "23456"),
            ("PET_RDZV_BACKEND", "c10d"),
            ("PET_RDZV_ENDPOINT", &endpoint),
            ("PET_RDZV_ID", "job"),
            ("PET_RDZV_CONF", "last_call_timeout=1"),
            ("PET_MAX_RESTARTS", "3"),
            ("PET_STANDALONE", ""),
        ];
        Launcher::start(command.envs(envs))
    });
    let mut all = String::new();
    for mut node in nodes {
        assert_eq!(node.wait(), 0, "{}", node.reader.text());
        all += &node.reader.text();
    }
    assert!(all.contains("] 0 of 2") && all.contains("] 1 of 2"), "{all}");
}
