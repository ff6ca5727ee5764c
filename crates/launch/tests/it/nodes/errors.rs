//! Errors of the rendezvous and of options: their texts and fields.

use std::error::Error as _;

use super::*;

/// Returns whether an error is of the rendezvous at this port.
pub(super) fn is_rendezvous(error: &Error, port: u16) -> bool {
    matches!(error, Error::Rendezvous { address: Some(at), .. } if *at == format!("127.0.0.1:{port}"))
}

#[test]
fn missing_nodes_are_named_in_the_error() {
    let port = free_port();
    let mut alone = options(2, "exit 0", fixed(3, 0, port));
    alone.rdzv.join = Duration::from_millis(700);
    let error = run(alone).code.unwrap_err();
    assert!(is_rendezvous(&error, port) && error.source().is_none(), "{error:?}");
    let error = error.to_string();
    for part in ["still missing: 1, 2 ", "ranks 2, 3, 4, 5 ", &format!("127.0.0.1:{port}")] {
        assert!(error.contains(part), "{part}: {error}");
    }
    let mut other = options(2, "exit 0", fixed(2, 1, port));
    other.rdzv.join = Duration::from_millis(700);
    let error = run(other).code.unwrap_err();
    let cause = error.source().is_some_and(|cause| cause.is::<collective::Error>());
    assert!(is_rendezvous(&error, port) && cause, "{error:?}");
    let error = error.to_string();
    for part in ["node 1 of 2", "--master-addr", &format!("127.0.0.1:{port}")] {
        assert!(error.contains(part), "{part}: {error}");
    }
}

#[test]
fn invalid_options_are_errors_at_once_that_name_the_flags() {
    let start = Instant::now();
    let refused = |nodes: Nodes, parts: &[&str]| {
        let error = run(options(1, "exit 0", nodes)).code.unwrap_err();
        if let Error::Options { option, .. } = &error {
            assert!(parts[0].starts_with(option), "{error:?}");
        }
        let error = error.to_string();
        for part in parts {
            assert!(error.contains(part), "{part}: {error}");
        }
    };
    // Reserved for documentation (RFC 5737, RFC 3849).
    for addr in ["192.0.2.1", "2001:db8::1"] {
        let at =
            if addr.contains(':') { format!("[{addr}]:29876") } else { format!("{addr}:29876") };
        refused(node(2, 0, addr, 29876), &["--master-addr", "not an address", &at, "other nodes"]);
    }
    let name = "no-such-host.invalid";
    refused(node(2, 0, name, 29876), &["--master-addr", name, "29876"]);
    refused(node(2, 1, name, 29876), &["--master-addr", name, "29876"]);
    refused(node(2, 2, "127.0.0.1", 29876), &["--node-rank 2", "--nnodes 2"]);
    let taken = TcpListener::bind("127.0.0.1:0").unwrap();
    let port = taken.local_addr().unwrap().port();
    refused(fixed(2, 0, port), &["taken", &format!("127.0.0.1:{port}")]);
    assert!(start.elapsed() < SOON);
}

#[test]
fn contradicting_options_of_nodes_are_errors() {
    let port = free_port();
    let twice = [0, 1, 1].map(|rank| options(1, "exit 0", fixed(3, rank, port)));
    let mut twice = twice.to_vec();
    twice.iter_mut().for_each(|options| options.rdzv.join = Duration::from_secs(3));
    let ran = run_all(twice);
    let errors: Vec<_> = ran.iter().map(|ran| ran.code.as_ref().unwrap_err()).collect();
    let is_rank = |error: &&&Error| matches!(error, Error::Options { option: "--node-rank", .. });
    assert_eq!(errors.iter().filter(is_rank).count(), 1, "{errors:?}");
    let errors: Vec<_> = errors.iter().map(ToString::to_string).collect();
    let both = errors.iter().filter(|error| error.contains("have --node-rank 1")).count();
    assert_eq!(both, 1, "{errors:?}");

    let port = free_port();
    let mut nodes = [0, 1].map(|rank| options(1, "exit 0", fixed(2, rank, port)));
    nodes[1].max_restarts = 3;
    for ran in run_all(nodes.to_vec()) {
        let error = ran.code.unwrap_err();
        assert!(matches!(error, Error::Options { option: "--max-restarts", .. }), "{error:?}");
        let error = error.to_string();
        assert!(error.contains("--max-restarts") && error.contains("node 1"), "{error}");
    }
}
