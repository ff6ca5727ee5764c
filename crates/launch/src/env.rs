//! Environment variables of a rank, with torchrun's names and meaning.

use std::borrow::Cow;
use std::ffi::{OsStr, OsString};
use std::path::Path;
use std::sync::OnceLock;

use collective::Topology;

use super::error_file::ERROR_FILE;
use super::guard::LAUNCHER_PID;
use super::nodes::Assignment;
use super::{LaunchOptions, Nodes};

/// Set for ranks of an elastic job, whose world size may change at a restart.
const ELASTIC: &str = "RUNNER_ELASTIC";

/// Returns whether this process is a rank of an elastic job.
pub fn is_elastic() -> bool {
    std::env::var_os(ELASTIC).is_some()
}

/// Returns `text` with the prefix `[rank 1] ` on each line if this process is one of several ranks.
/// Under a launcher of this crate, which adds the prefix itself, `text` is unchanged.
pub fn label_lines(text: &str) -> Cow<'_, str> {
    static RANK: OnceLock<Option<usize>> = OnceLock::new();
    let rank = RANK.get_or_init(|| rank_to_label(|name| std::env::var(name).ok()));
    rank.map_or(Cow::Borrowed(text), |rank| {
        text.split_inclusive('\n').map(|line| format!("[rank {rank}] {line}")).collect()
    })
}

fn rank_to_label(lookup: impl Fn(&str) -> Option<String>) -> Option<usize> {
    let by_launcher = lookup(LAUNCHER_PID).is_some();
    let topology = Topology::from_env(lookup).ok()?;
    (topology.world_size > 1 && !by_launcher).then_some(topology.rank)
}

/// Returns the variables of a local rank, in addition to inherited ones. A failing rank writes its
/// error to `error_file`.
pub(super) fn of_rank(
    local: usize,
    assignment: &Assignment,
    options: &LaunchOptions,
    error_file: &Path,
) -> Vec<(OsString, OsString)> {
    let mut envs: Vec<(&str, String)> = vec![
        ("RANK", (assignment.first_rank + local).to_string()),
        ("LOCAL_RANK", local.to_string()),
        ("WORLD_SIZE", assignment.world_size.to_string()),
        ("LOCAL_WORLD_SIZE", options.nproc_per_node.to_string()),
        ("GROUP_RANK", assignment.node.to_string()),
        ("GROUP_WORLD_SIZE", assignment.nodes.to_string()),
        ("ROLE_NAME", options.role.clone()),
        ("ROLE_RANK", (assignment.first_role_rank + local).to_string()),
        ("ROLE_WORLD_SIZE", assignment.role_world_size.to_string()),
        ("MASTER_ADDR", assignment.master_addr.clone()),
        ("MASTER_PORT", assignment.master_port.to_string()),
        ("TORCHELASTIC_RUN_ID", options.run_id.clone()),
        ("TORCHELASTIC_RESTART_COUNT", assignment.restart_count.to_string()),
        ("TORCHELASTIC_MAX_RESTARTS", options.max_restarts.to_string()),
        // Python compares with exactly `True`.
        ("TORCHELASTIC_USE_AGENT_STORE", "True".to_owned()),
        (LAUNCHER_PID, std::process::id().to_string()),
    ];
    if matches!(options.nodes, Nodes::Elastic { .. }) {
        envs.push((ELASTIC, "1".to_owned()));
    }
    // With one thread per core in each of several ranks, cores would be oversubscribed.
    for threads in ["OMP_NUM_THREADS", "RAYON_NUM_THREADS"] {
        if options.nproc_per_node > 1 && std::env::var_os(threads).is_none() {
            envs.push((threads, "1".to_owned()));
        }
    }
    let os = |(name, value): (&str, String)| (OsStr::new(name).to_owned(), value.into());
    let error_file = (OsString::from(ERROR_FILE), error_file.into());
    envs.into_iter().map(os).chain([error_file]).chain(options.envs.iter().cloned()).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_are_labelled_only_with_several_ranks() {
        let rank = |text: &str| {
            let find = |name: &str| {
                let mut envs = text.split(' ').filter_map(|env| env.split_once('='));
                envs.find(|env| env.0 == name).map(|env| env.1.to_owned())
            };
            rank_to_label(find)
        };
        let mpi = "OMPI_COMM_WORLD_RANK=3 OMPI_COMM_WORLD_SIZE=4 OMPI_COMM_WORLD_LOCAL_RANK=1 \
                   OMPI_COMM_WORLD_LOCAL_SIZE=2 MASTER_ADDR=127.0.0.1 MASTER_PORT=29500";
        let torchrun = "RANK=1 WORLD_SIZE=2 LOCAL_RANK=1 LOCAL_WORLD_SIZE=2 \
                        MASTER_ADDR=127.0.0.1 MASTER_PORT=29500";
        assert_eq!((rank(mpi), rank(torchrun)), (Some(3), Some(1)));
        let alone = mpi.replace("RANK=3", "RANK=0").replace("WORLD_SIZE=4", "WORLD_SIZE=1");
        assert_eq!((rank(&alone), rank("")), (None, None));
        assert_eq!(rank(&format!("{torchrun} {LAUNCHER_PID}=7")), None);
    }
}
