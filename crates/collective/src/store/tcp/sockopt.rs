//! Socket options and limits that the standard library does not set.
//!
//! Invariant: every pointer passed to the kernel is to a live local value, with its size.
#![expect(unsafe_code, reason = "std has no safe call for socket options, backlogs and limits")]

use std::io;
use std::os::fd::{AsRawFd, BorrowedFd};
use std::sync::OnceLock;

use crate::{Error, Result};

/// Makes the system detect an unreachable peer within about [`DEAD_AFTER_S`] seconds, while this
/// side waits (keepalive probes) or sends (unacknowledged data).
pub(crate) fn detect_dead_peer(socket: BorrowedFd<'_>) -> io::Result<()> {
    set(socket, libc::SOL_SOCKET, libc::SO_KEEPALIVE, 1)?;
    set(socket, libc::IPPROTO_TCP, libc::TCP_KEEPIDLE, 10)?;
    set(socket, libc::IPPROTO_TCP, libc::TCP_KEEPINTVL, 2)?;
    set(socket, libc::IPPROTO_TCP, libc::TCP_KEEPCNT, 7)?;
    set(socket, libc::IPPROTO_TCP, libc::TCP_USER_TIMEOUT, DEAD_AFTER_S * 1000)
}

/// Disables Nagle's algorithm.
pub(crate) fn no_delay(socket: BorrowedFd<'_>) -> io::Result<()> {
    set(socket, libc::IPPROTO_TCP, libc::TCP_NODELAY, 1)
}

/// Sets large socket buffers, so that a connection is fast before the system's autotuning has grown
/// them. An explicit size disables autotuning, so nothing is set if the system's maximum is smaller.
pub(crate) fn set_buffer_sizes(socket: BorrowedFd<'_>) -> io::Result<()> {
    static ALLOWED: OnceLock<bool> = OnceLock::new();
    let limit = |name| {
        let text = std::fs::read_to_string(format!("/proc/sys/net/core/{name}")).ok()?;
        text.trim().parse::<libc::c_int>().ok()
    };
    let allows = |name| limit(name).is_some_and(|limit| limit >= BUFFER_BYTES);
    if *ALLOWED.get_or_init(|| allows("rmem_max") && allows("wmem_max")) {
        set(socket, libc::SOL_SOCKET, libc::SO_RCVBUF, BUFFER_BYTES)?;
        set(socket, libc::SOL_SOCKET, libc::SO_SNDBUF, BUFFER_BYTES)?;
    }
    Ok(())
}

/// Sets the listener's backlog, up to the system's limit. A client that finds it full retries only
/// after a second.
pub(crate) fn set_backlog(listener: BorrowedFd<'_>, count: usize) -> io::Result<()> {
    let count = libc::c_int::try_from(count).unwrap_or(libc::c_int::MAX);
    // SAFETY: the descriptor is open (it is borrowed); a second `listen` only changes the backlog.
    let status = unsafe { libc::listen(listener.as_raw_fd(), count) };
    if status == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
}

/// Raises this process's soft limit, if necessary, so that it can open `more` files in addition to
/// those open now; `during` is for the error.
pub(crate) fn allow_open_files(more: usize, during: &str) -> Result<()> {
    let open = std::fs::read_dir("/proc/self/fd").map_or(0, Iterator::count);
    let needed = (open + more) as libc::rlim_t;
    let mut limit = libc::rlimit { rlim_cur: 0, rlim_max: 0 };
    // SAFETY: the pointer is valid during the call.
    let known = unsafe { libc::getrlimit(libc::RLIMIT_NOFILE, &raw mut limit) } == 0;
    if !known || limit.rlim_cur >= needed {
        return Ok(());
    }
    // Raised to the hard limit, because other ranks of this process need as many files.
    limit.rlim_cur = limit.rlim_max;
    // SAFETY: as above.
    let raised = unsafe { libc::setrlimit(libc::RLIMIT_NOFILE, &raw const limit) } == 0;
    if raised && limit.rlim_max >= needed {
        return Ok(());
    }
    let what = format!(
        "{during} needs {more} open files in addition to {open}, but RLIMIT_NOFILE is {}; \
         raise it to {needed} (`ulimit -n`)",
        limit.rlim_max
    );
    Err(Error::io(what, &io::Error::from_raw_os_error(libc::EMFILE)))
}

fn set(socket: BorrowedFd<'_>, level: i32, name: i32, value: libc::c_int) -> io::Result<()> {
    let len = libc::socklen_t::try_from(size_of_val(&value)).expect("an int has four bytes");
    // SAFETY: the descriptor is open (it is borrowed), `value` lives until after the call, and
    // `len` is its size.
    let status = unsafe {
        libc::setsockopt(socket.as_raw_fd(), level, name, (&raw const value).cast(), len)
    };
    if status == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
}

/// Ten idle seconds, then seven probes two seconds apart: enough that a host is not considered dead
/// if the network loses one packet in ten.
const DEAD_AFTER_S: i32 = 25;

/// Size of each socket buffer in bytes: 100 Gb/s for a third of a millisecond.
const BUFFER_BYTES: libc::c_int = 4 << 20;
