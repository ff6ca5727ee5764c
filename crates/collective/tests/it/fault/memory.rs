//! Ranks that may not open one another's memory.

use std::time::Duration;

use crate::common::{Role, Workers};
use collective::ReduceOp;

#[test]
fn ranks_that_are_not_dumpable_take_tcp_and_say_why() {
    let timeout = Duration::from_secs(20);
    let workers = Workers::start_over("auto", "fault::not-dumpable", 2, &[0, 1], timeout);
    for rank in 0..2 {
        let report = workers.file(&format!("report-{rank}"));
        assert_eq!(
            report,
            "tcp: rank 0 may not open the memory of rank 1, which runs as another user or is not dumpable"
        );
    }
    workers.finish();
}

/// What a rank of such a world does: it keeps others out, and itself out of others as a user without
/// capabilities.
pub(crate) fn play(role: &Role) {
    // The header's version is _LINUX_CAPABILITY_VERSION_3, its process this one; the data are three sets, in halves.
    let (header, none) = ([0x2008_0522_u32, 0], [0_u32; 6]);
    // SAFETY: the pointers are good for the call, to what the kernel reads.
    assert_eq!(unsafe { libc::syscall(libc::SYS_capset, header.as_ptr(), none.as_ptr()) }, 0);
    // SAFETY: plain numbers.
    assert_eq!(unsafe { libc::prctl(libc::PR_SET_DUMPABLE, 0, 0, 0, 0) }, 0);
    let group = role.join().unwrap();
    let mut x = [1.0_f32; 3];
    group.all_reduce(&mut x, ReduceOp::Sum).unwrap();
    assert_eq!(x, [2.0; 3]);
    role.report(&format!("{}: {}", group.backend_name(), group.backend_reason()));
}
