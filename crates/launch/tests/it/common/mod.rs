//! Helpers of several tests.

#[path = "../../../../collective/tests/it/common/collector.rs"]
pub(crate) mod collector;
pub(crate) mod network;
pub(crate) mod process;

/// Returns whether a process has ended.
pub(crate) fn is_gone(pid: &str) -> bool {
    // It may stay a zombie until its parent reaps it.
    match std::fs::read_to_string(format!("/proc/{pid}/stat")) {
        Err(_) => true,
        Ok(stat) => stat.rsplit(") ").next().is_some_and(|rest| rest.starts_with('Z')),
    }
}
