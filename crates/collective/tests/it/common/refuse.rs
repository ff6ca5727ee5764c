//! Makes system calls fail as under a container's seccomp filter, for unit and integration tests.

#![expect(unsafe_code, reason = "installs a seccomp filter")]

/// Makes these system calls fail with `errno` on the calling thread and on threads that it starts.
pub(crate) fn refuse(calls: &[libc::c_long], errno: i32) {
    let step = |code: u32, jt, k: u32| libc::sock_filter { code: code as u16, jt, jf: 0, k };
    // Offset 0 of `struct seccomp_data` is the call's number.
    let mut filter = vec![step(libc::BPF_LD | libc::BPF_W | libc::BPF_ABS, 0, 0)];
    for (at, &call) in calls.iter().enumerate() {
        let to_the_end = u8::try_from(calls.len() - at).unwrap();
        filter.push(step(libc::BPF_JMP | libc::BPF_JEQ | libc::BPF_K, to_the_end, call as u32));
    }
    filter.push(step(libc::BPF_RET | libc::BPF_K, 0, libc::SECCOMP_RET_ALLOW));
    filter.push(step(libc::BPF_RET | libc::BPF_K, 0, libc::SECCOMP_RET_ERRNO | errno as u32));
    let program = libc::sock_fprog { len: filter.len() as u16, filter: filter.as_mut_ptr() };
    // SAFETY: plain numbers.
    assert_eq!(unsafe { libc::prctl(libc::PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) }, 0);
    let mode = libc::SECCOMP_MODE_FILTER;
    // SAFETY: the program and its steps live during the call, which copies them.
    assert_eq!(unsafe { libc::prctl(libc::PR_SET_SECCOMP, mode, &raw const program) }, 0);
}
