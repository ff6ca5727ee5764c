//! Processes with only the four variables of PyTorch's `env://`: joining, ranks counted through the
//! store, and errors if the processes disagree.

use std::fs;
use std::net::TcpListener;
use std::process::{Child, Command};
use std::time::Duration;

use crate::common::{Dir, spawn, wait_for};
use collective::{
    Determinism, GroupOptions, ReduceOp, Result, Topology, init::Accelerator, init_process_group,
};

const TIMEOUT: Duration = Duration::from_secs(20);

/// Runs `scenario` in two processes with RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT and no other
/// variable of a launcher; returns their reports.
fn reports(scenario: &str, addr: &str) -> [String; 2] {
    let port = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port();
    let dir = Dir::new();
    let start = |rank: usize| -> Child {
        let mut command = Command::new(std::env::current_exe().unwrap());
        for (name, _) in std::env::vars_os() {
            if ["LOCAL_", "TORCHELASTIC_", "GROUP_", "SLURM_", "OMPI_", "PMI_", "CUDA_VISIBLE"]
                .iter()
                .any(|prefix| name.to_string_lossy().starts_with(prefix))
            {
                command.env_remove(name);
            }
        }
        command.env("RANK", rank.to_string()).env("WORLD_SIZE", "2");
        command.env("MASTER_ADDR", addr).env("MASTER_PORT", port.to_string());
        let path = dir.0.join(rank.to_string());
        spawn(command, &format!("init::{scenario} {rank} {}", path.display()))
    };
    let mut children = [start(0), start(1)];
    for child in &mut children {
        wait_for(|| child.try_wait().unwrap(), "a rank to end");
    }
    [0, 1].map(|rank| fs::read_to_string(dir.0.join(rank.to_string())).unwrap_or_default())
}

#[test]
fn ranks_join_with_only_pytorchs_four_variables() {
    // The second is an address of this host, too, but does not imply that all ranks are on this
    // host.
    for addr in ["127.0.0.1", "0.0.0.0"] {
        assert_eq!(reports("sum", addr), ["sum 3", "sum 3"], "{addr}");
    }
}

#[test]
fn local_ranks_are_counted_by_the_store() {
    for addr in ["127.0.0.1", "0.0.0.0"] {
        let told = |rank| format!("local rank {rank} of 2, device {rank}, sum 3");
        assert_eq!(reports("locate", addr), [told(0), told(1)], "{addr}");
    }
}

/// Rank 0 hosts the store, and its process ends with its error.
#[test]
fn both_processes_report_a_mismatch() {
    let told = "joining group default: ranks disagree on GroupOptions::determinism: \
                rank 0: RankOrder; rank 1: Fast";
    assert_eq!(reports("differ", "127.0.0.1"), [told, told]);
}

/// Runs a process rank.
pub(crate) fn worker() {
    let Ok(role) = std::env::var("COLLECTIVE_TEST_ROLE") else { return };
    let (_, role) = role.split_once("::").unwrap();
    let [scenario, rank, path] = role.split(' ').collect::<Vec<_>>()[..] else { panic!("{role}") };
    let report = rank_of(scenario, rank == "1").unwrap_or_else(|error| error.to_string());
    fs::write(path, report).unwrap();
}

fn rank_of(scenario: &str, is_last: bool) -> Result<String> {
    let mut options = GroupOptions::default().with_timeout(TIMEOUT);
    let mut topology = Topology::from_env(|name| std::env::var(name).ok())?;
    let mut located = String::new();
    if scenario == "locate" {
        topology.locate(TIMEOUT)?;
        let [rank, size] = [topology.local_rank, topology.local_world_size].map(Option::unwrap);
        let device = topology.device(Accelerator::Cuda)?;
        located = format!("local rank {rank} of {size}, device {device}, ");
    }
    if scenario == "differ" && is_last {
        options = options.with_determinism(Determinism::Fast);
    }
    let group = init_process_group(&topology, options)?;
    let mut x = [group.rank() as f32 + 1.0];
    group.all_reduce(&mut x, ReduceOp::Sum)?;
    Ok(format!("{located}sum {}", x[0]))
}
