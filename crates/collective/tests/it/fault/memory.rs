//! Ranks that may not open each other's memory, or have a memory limit.

use std::fs;
use std::path::{Path, PathBuf};
use std::time::Duration;

use crate::common::{Role, Workers, wait_for};
use collective::ReduceOp;

#[test]
fn ranks_that_are_not_dumpable_use_tcp_and_report_why() {
    let timeout = Duration::from_secs(20);
    let workers = Workers::start_over("auto", "fault::not-dumpable", 2, &[0, 1], timeout);
    for rank in 0..2 {
        let report = workers.file(&format!("report-{rank}"));
        assert_eq!(
            report,
            "tcp: rank 0 may not open the memory of rank 1, which runs as another user or group, or is not dumpable"
        );
    }
    workers.finish();
}

/// Keeps others from opening this process's memory, and this process, without capabilities, from
/// opening theirs.
pub(crate) fn keep_private() {
    // The header's version is _LINUX_CAPABILITY_VERSION_3, its process this one; the data are three
    // sets, in halves.
    let (header, none) = ([0x2008_0522_u32, 0], [0_u32; 6]);
    // SAFETY: the pointers are valid during the call and have the layout that the kernel reads.
    assert_eq!(unsafe { libc::syscall(libc::SYS_capset, header.as_ptr(), none.as_ptr()) }, 0);
    // SAFETY: plain numbers.
    assert_eq!(unsafe { libc::prctl(libc::PR_SET_DUMPABLE, 0, 0, 0, 0) }, 0);
}

pub(crate) fn play(role: &Role) {
    keep_private();
    let group = role.join().unwrap();
    let mut x = [1.0_f32; 3];
    group.all_reduce(&mut x, ReduceOp::Sum).unwrap();
    assert_eq!(x, [2.0; 3]);
    role.report(&format!("{}: {}", group.backend_name(), group.backend_reason()));
}

/// A control group for one test; removed on drop, when its processes have ended.
struct ControlGroup(PathBuf);

impl ControlGroup {
    fn limited_to(bytes: u64, name: &str) -> Self {
        let v1 = Path::new("/sys/fs/cgroup/memory");
        let (top, limit) = if v1.is_dir() {
            (v1, "memory.limit_in_bytes")
        } else {
            (Path::new("/sys/fs/cgroup"), "memory.max")
        };
        let group = Self(top.join(name));
        fs::create_dir(&group.0).unwrap();
        fs::write(group.0.join(limit), bytes.to_string()).unwrap();
        group
    }
}

impl Drop for ControlGroup {
    fn drop(&mut self) {
        // Fails only if a process is left, so after a failed test.
        let _ = fs::remove_dir(&self.0);
    }
}

#[test]
#[ignore = "needs root: a control group of its own"]
fn alloc_above_the_control_group_limit_is_an_error() {
    let name = format!("collective-test-{}", std::process::id());
    let group = ControlGroup::limited_to(256 << 20, &name);
    let timeout = Duration::from_secs(20);
    let workers = Workers::start("fault::limited-memory", 2, &[0, 1], timeout);
    for rank in 0..2 {
        let pid = workers.children[rank].id().to_string();
        fs::write(group.0.join("cgroup.procs"), pid).unwrap();
        fs::write(workers.dir.0.join(format!("limited-{rank}")), "").unwrap();
    }
    for rank in 0..2 {
        let report = workers.file(&format!("report-{rank}"));
        assert!(report.contains(&name) && report.contains("raise the limit"), "{report}");
    }
    workers.finish();
}

/// Runs a rank that allocates more memory than the limit.
pub(crate) fn take(role: &Role) {
    let limited = role.dir.join(format!("limited-{}", role.rank));
    wait_for(|| limited.exists().then_some(()), "the limit");
    let group = role.join().unwrap();
    let error = group.alloc::<u8>(512 << 20).unwrap_err();
    role.report(&error.to_string());
}
