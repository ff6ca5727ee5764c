//! What several tests use.

pub(crate) mod network;
pub(crate) mod process;

/// Whether a process has ended.
pub(crate) fn is_gone(pid: &str) -> bool {
    // It may be a zombie for a while where its parent is not reaping.
    match std::fs::read_to_string(format!("/proc/{pid}/stat")) {
        Err(_) => true,
        Ok(stat) => stat.rsplit(") ").next().is_some_and(|rest| rest.starts_with('Z')),
    }
}
