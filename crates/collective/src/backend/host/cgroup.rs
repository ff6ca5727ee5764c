//! How much more memory the control groups of this process allow. Over their limit the kernel ends a
//! process instead of refusing it memory.

use std::fs;
use std::path::Path;

use crate::{Error, Result};

/// Files of a group: its limit, its use, and the rows of `memory.stat` that the kernel can take back.
type Names = ([&'static str; 2], [&'static str; 2]);

const V1: Names = (
    ["memory.limit_in_bytes", "memory.usage_in_bytes"],
    ["total_inactive_file", "total_active_file"],
);
const V2: Names = (["memory.max", "memory.current"], ["inactive_file", "active_file"]);

/// Refuses to take so much shared memory that the kernel would end a process for it.
pub(in crate::backend) fn allow(bytes: usize) -> Result<()> {
    let groups = fs::read_to_string("/proc/self/cgroup").unwrap_or_default();
    check(Path::new("/sys/fs/cgroup"), &groups, bytes as u64)
}

/// `groups` is what `/proc/self/cgroup` says.
fn check(root: &Path, groups: &str, bytes: u64) -> Result<()> {
    for line in groups.lines() {
        let mut fields = line.splitn(3, ':').skip(1);
        let (Some(controllers), Some(path)) = (fields.next(), fields.next()) else { continue };
        let (top, names) = match controllers {
            "" => (root.to_owned(), V2),
            list if list.split(',').any(|name| name == "memory") => (root.join("memory"), V1),
            _ => continue,
        };
        // The limits of the groups around it hold as well. In a container, whose root the topmost is,
        // those below may not be there.
        for group in Path::new(path.trim_start_matches('/')).ancestors() {
            let group = top.join(group);
            if let Some(left) = left(&group, names).filter(|&left| left < bytes) {
                let what = format!(
                    "obtaining {bytes} bytes of shared memory: {} allows {left} more; raise the limit of \
                     the container or job, or share less",
                    group.join(names.0[0]).display()
                );
                return Err(Error::io(what, &std::io::ErrorKind::OutOfMemory.into()));
            }
        }
    }
    Ok(())
}

/// What a group may still take; `None` if nothing limits it.
fn left(group: &Path, ([limit, used], reclaimable): Names) -> Option<u64> {
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
    fn memory_over_the_limit_of_a_control_group_is_refused_with_its_name() {
        let root =
            std::env::temp_dir().join(format!("collective-test-cgroup-{}", std::process::id()));
        let write = |path: &str, text: &str| {
            let path = root.join(path);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, text).unwrap();
        };
        // A job of 1000 bytes has taken 700, of which 100 are a cache; its step has no limit.
        write("job/memory.max", "1000\n");
        write("job/memory.current", "700\n");
        write("job/memory.stat", "anon 600\ninactive_file 60\nactive_file 40\n");
        write("job/step/memory.max", "max\n");
        write("job/step/memory.current", "700\n");
        write("memory/memory.limit_in_bytes", "500\n");
        write("memory/memory.usage_in_bytes", "100\n");
        let refused = |groups: &str, bytes| check(&root, groups, bytes).map_err(|e| e.to_string());
        let v2 = "0::/job/step\n";
        assert_eq!(refused(v2, 400), Ok(()));
        let error = refused(v2, 401).unwrap_err();
        assert!(error.contains("job/memory.max allows 400 more"), "{error}");
        // A container sees its own group at the top, by whatever path.
        let v1 = "5:cpu,cpuacct:/\n4:memory:/docker/0123\n0::/\n";
        assert_eq!(refused(v1, 400), Ok(()));
        let error = refused(v1, 401).unwrap_err();
        assert!(error.contains("memory/memory.limit_in_bytes allows 400 more"), "{error}");
        assert_eq!(refused("garbage\n", 1 << 40), Ok(()));
        fs::remove_dir_all(root).unwrap();
    }
}
