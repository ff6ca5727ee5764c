//! Checks the memory limits of this process's control groups, because the kernel kills a process
//! that exceeds them instead of refusing it memory.

use std::fs;
use std::path::Path;

use crate::{Error, Result};

/// Files of a control group: limit, usage, and the rows of `memory.stat` that the kernel can
/// reclaim.
type Names = ([&'static str; 2], [&'static str; 2]);

const V1: Names = (
    ["memory.limit_in_bytes", "memory.usage_in_bytes"],
    ["total_inactive_file", "total_active_file"],
);
const V2: Names = (["memory.max", "memory.current"], ["inactive_file", "active_file"]);

/// Returns an error if `bytes` more of shared memory would exceed a limit.
pub(in crate::backend) fn check_limit(bytes: usize) -> Result<()> {
    let groups = fs::read("/proc/self/cgroup").unwrap_or_default();
    let groups = String::from_utf8_lossy(&groups);
    check_groups(Path::new("/sys/fs/cgroup"), &groups, bytes as u64)
}

/// `groups` is the contents of `/proc/self/cgroup`.
fn check_groups(root: &Path, groups: &str, bytes: u64) -> Result<()> {
    for line in groups.lines() {
        let mut fields = line.splitn(3, ':').skip(1);
        let (Some(controllers), Some(path)) = (fields.next(), fields.next()) else { continue };
        let (top, names) = match controllers {
            "" => (root.to_owned(), V2),
            list if list.split(',').any(|name| name == "memory") => (root.join("memory"), V1),
            _ => continue,
        };
        // The limits of the enclosing groups hold as well. In a container, whose own group is the
        // root, the groups below it may not be visible.
        for group in Path::new(path.trim_start_matches('/')).ancestors() {
            let group = top.join(group);
            if let Some(left) = available(&group, names).filter(|&left| left < bytes) {
                let what = format!(
                    "allocating {bytes} bytes of shared memory: {} allows {left} more; raise the limit of \
                     the container or job, or use smaller shared buffers",
                    group.join(names.0[0]).display()
                );
                return Err(Error::io(what, &std::io::ErrorKind::OutOfMemory.into()));
            }
        }
    }
    Ok(())
}

/// Bytes that a group may still allocate; `None` if it has no limit.
fn available(group: &Path, ([limit, used], reclaimable): Names) -> Option<u64> {
    let number = |name| fs::read_to_string(group.join(name)).ok()?.trim().parse::<u64>().ok();
    let (limit, used) = (number(limit)?, number(used)?);
    let stat = fs::read_to_string(group.join("memory.stat")).unwrap_or_default();
    let rows = stat.lines().filter_map(|row| row.split_once(' '));
    let rows = rows.filter(|(name, _)| reclaimable.contains(name));
    let cache: u64 = rows.filter_map(|(_, bytes)| bytes.trim().parse::<u64>().ok()).sum();
    Some(limit.saturating_sub(used.saturating_sub(cache)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn memory_above_a_control_groups_limit_is_an_error_that_names_it() {
        let root =
            std::env::temp_dir().join(format!("collective-test-cgroup-{}", std::process::id()));
        let write = |path: &str, text: &str| {
            let path = root.join(path);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, text).unwrap();
        };
        // A job limited to 1000 bytes uses 700, of which 100 are page cache; its step has no limit.
        write("job/memory.max", "1000\n");
        write("job/memory.current", "700\n");
        write("job/memory.stat", "anon 600\ninactive_file 60\nactive_file 40\n");
        write("job/step/memory.max", "max\n");
        write("job/step/memory.current", "700\n");
        write("memory/memory.limit_in_bytes", "500\n");
        write("memory/memory.usage_in_bytes", "100\n");
        let refused =
            |groups: &str, bytes| check_groups(&root, groups, bytes).map_err(|e| e.to_string());
        let v2 = "0::/job/step\n";
        assert_eq!(refused(v2, 400), Ok(()));
        let error = refused(v2, 401).unwrap_err();
        assert!(error.contains("job/memory.max allows 400 more"), "{error}");
        // A container sees its own group as the root, whatever its path is.
        let v1 = "5:cpu,cpuacct:/\n4:memory:/docker/0123\n0::/\n";
        assert_eq!(refused(v1, 400), Ok(()));
        let error = refused(v1, 401).unwrap_err();
        assert!(error.contains("memory/memory.limit_in_bytes allows 400 more"), "{error}");
        assert_eq!(refused("garbage\n", 1 << 40), Ok(()));
        fs::remove_dir_all(root).unwrap();
    }
}
