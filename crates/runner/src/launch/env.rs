//! What a rank finds in its environment: torchrun's variables, with torchrun's meaning.

use std::ffi::{OsStr, OsString};
use std::path::Path;

use super::LaunchOptions;
use super::error_file::ERROR_FILE;
use super::guard::LAUNCHER_PID;

/// What differs from attempt to attempt.
pub(super) struct Attempt<'a> {
    pub(super) number: u32,
    pub(super) store_port: u16,
    /// Where the rank writes why it failed.
    pub(super) error_file: &'a Path,
}

/// The variables of one rank, besides those it inherits.
pub(super) fn of_rank(
    rank: usize,
    attempt: &Attempt<'_>,
    options: &LaunchOptions,
) -> Vec<(OsString, OsString)> {
    let size = options.nproc_per_node.to_string();
    let index = rank.to_string();
    let port = attempt.store_port.to_string();
    let (number, most) = (attempt.number.to_string(), options.max_restarts.to_string());
    let launcher = std::process::id().to_string();
    let mut envs = vec![
        ("RANK", index.as_str()),
        ("LOCAL_RANK", &index),
        ("WORLD_SIZE", &size),
        ("LOCAL_WORLD_SIZE", &size),
        ("GROUP_RANK", "0"),
        ("GROUP_WORLD_SIZE", "1"),
        ("ROLE_NAME", &options.role),
        ("ROLE_RANK", &index),
        ("ROLE_WORLD_SIZE", &size),
        ("MASTER_ADDR", "127.0.0.1"),
        ("MASTER_PORT", &port),
        ("TORCHELASTIC_RUN_ID", &options.run_id),
        ("TORCHELASTIC_RESTART_COUNT", &number),
        ("TORCHELASTIC_MAX_RESTARTS", &most),
        // Exactly `True`: it is what Python compares with.
        ("TORCHELASTIC_USE_AGENT_STORE", "True"),
        (LAUNCHER_PID, &launcher),
    ];
    // Several ranks that each start a thread for every core would be slower than one.
    for threads in ["OMP_NUM_THREADS", "RAYON_NUM_THREADS"] {
        if options.nproc_per_node > 1 && std::env::var_os(threads).is_none() {
            envs.push((threads, "1"));
        }
    }
    let os = |(name, value): (&str, &str)| (OsString::from(name), OsStr::new(value).to_owned());
    let error_file = (OsString::from(ERROR_FILE), attempt.error_file.into());
    envs.into_iter().map(os).chain([error_file]).chain(options.envs.iter().cloned()).collect()
}
