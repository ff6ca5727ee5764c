//! Environment variables of a rank, with torchrun's names and meaning.

use std::ffi::{OsStr, OsString};
use std::path::Path;

use super::attempt::Assignment;
use crate::options::{LaunchOptions, Nodes};
use crate::rank::error_file::ERROR_FILE;
use crate::rank::{ELASTIC, JOBS, LAUNCHER_PID};

/// Returns the variables of a local rank of the job `id`, in addition to inherited ones. A failing
/// rank writes its error to `error_file`.
pub(super) fn of_rank(
    local: usize,
    assignment: &Assignment,
    options: &LaunchOptions,
    (id, error_file): (&str, &Path),
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
        (JOBS, id.to_owned()),
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
    // Python buffers 8 KiB for a pipe, which come late, and are lost if the rank is killed.
    if std::env::var_os("PYTHONUNBUFFERED").is_none() {
        envs.push(("PYTHONUNBUFFERED", "1".to_owned()));
    }
    let os = |(name, value): (&str, String)| (OsStr::new(name).to_owned(), value.into());
    let error_file = (OsString::from(ERROR_FILE), error_file.into());
    envs.into_iter().map(os).chain([error_file]).chain(options.envs.iter().cloned()).collect()
}
