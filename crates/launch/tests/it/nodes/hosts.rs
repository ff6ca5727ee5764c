//! Jobs on simulated hosts whose network fails.

use super::{start, this};
use crate::common::network::{Hosts, addr, addr6};
use crate::common::process::Launcher;

const PORT: u16 = 29500;

/// Starts a launcher with two ranks on a host.
fn launch(hosts: &Hosts, host: usize, nodes: &str, role: &str, restarts: u32) -> Launcher {
    let command = hosts.command(host, &this().get_program().to_string_lossy());
    start(command, nodes, 2, &format!("role {role}"), restarts)
}

/// Starts a launcher on every host.
fn launch_all(hosts: &Hosts, addr: &str, role: &str, restarts: u32) -> Vec<Launcher> {
    let nodes = |host| format!("{} {host} {addr} {PORT}", hosts.count);
    (0..hosts.count).map(|host| launch(hosts, host, &nodes(host), role, restarts)).collect()
}

fn all_done(launchers: &mut [Launcher], ranks: usize, attempt: u32) {
    let codes: Vec<_> = launchers.iter_mut().map(Launcher::wait).collect();
    let texts: Vec<_> = launchers.iter().map(|launcher| launcher.reader.text()).collect();
    let text = texts.join("\n");
    assert!(codes.iter().all(|&code| code == 0), "{codes:?}\n{text}");
    for rank in 0..ranks {
        let done = format!("done {rank} of {ranks} attempt {attempt}");
        assert!(text.contains(&done), "{done}\n{text}");
    }
}

#[test]
#[ignore = "needs root and iproute2: network namespaces"]
fn jobs_on_two_and_three_hosts_succeed() {
    for (count, master) in [(2, addr(0)), (3, addr(0)), (2, addr6(0))] {
        let hosts = Hosts::up(count);
        let mut launchers = launch_all(&hosts, &master, "20 20 30", 0);
        all_done(&mut launchers, 2 * count, 0);
    }
}

#[test]
#[ignore = "needs root and iproute2: network namespaces"]
fn network_loss_ends_every_rank_and_names_the_host() {
    for victim in [0, 1] {
        let hosts = Hosts::up(2);
        let mut launchers = launch_all(&hosts, &addr(0), "1000000 0 3", 0);
        launchers.iter().for_each(|launcher| launcher.reader.await_lines("of 4 attempt 0", 2));
        hosts.cut(victim, true);
        for launcher in &mut launchers {
            assert_ne!(launcher.wait(), 0);
        }
        let text = launchers[1 - victim].reader.text();
        let (first, last) = (2 * victim, 2 * victim + 1);
        let whose = format!("{}, ranks {first} to {last})", addr(victim));
        assert!(text.contains(&whose), "{whose}\n{text}");
    }
}

#[test]
#[ignore = "needs root and iproute2: network namespaces"]
fn restart_after_the_network_recovers_finishes_the_job() {
    let hosts = Hosts::up(3);
    let mut launchers = launch_all(&hosts, &addr(0), "1000000 5 3", 1);
    launchers.iter().for_each(|launcher| launcher.reader.await_lines("of 6 attempt 0", 2));
    hosts.cut(1, true);
    for host in [0, 2] {
        launchers[host].reader.await_lines("restart 1 of 1", 1);
    }
    hosts.cut(1, false);
    all_done(&mut launchers, 6, 1);
}

#[test]
#[ignore = "needs root and iproute2: network namespaces"]
fn elastic_job_continues_without_an_unreachable_host() {
    let hosts = Hosts::up(3);
    let nodes = format!("elastic 2 3 {} {PORT}", addr(0));
    let mut launchers: Vec<_> =
        (0..3).map(|host| launch(&hosts, host, &nodes, "1000000 5 3", 1)).collect();
    launchers.iter().for_each(|launcher| launcher.reader.await_lines("of 6 attempt 0", 2));
    hosts.cut(2, true);
    let mut cut_off = launchers.pop().unwrap();
    all_done(&mut launchers, 4, 1);
    assert_ne!(cut_off.wait(), 0);
}
