//! What the standard library does not set of a socket, nor of how many there may be.
//!
//! Invariant: every pointer handed to the kernel is to a live value on this stack, with its size.
#![expect(unsafe_code, reason = "setsockopt, a backlog and limits have no safe form in std")]

use std::io;
use std::os::fd::{AsRawFd, BorrowedFd};
use std::sync::OnceLock;

use crate::{Error, Result};

/// Notices a peer whose host vanished within about [`DEAD_AFTER_S`] seconds, whether this side
/// waits (keepalive probes) or sends (unacknowledged data).
pub(crate) fn detect_dead_peer(socket: BorrowedFd<'_>) -> io::Result<()> {
    set(socket, libc::SOL_SOCKET, libc::SO_KEEPALIVE, 1)?;
    set(socket, libc::IPPROTO_TCP, libc::TCP_KEEPIDLE, 10)?;
    set(socket, libc::IPPROTO_TCP, libc::TCP_KEEPINTVL, 2)?;
    set(socket, libc::IPPROTO_TCP, libc::TCP_KEEPCNT, 7)?;
    set(socket, libc::IPPROTO_TCP, libc::TCP_USER_TIMEOUT, DEAD_AFTER_S * 1000)
}

/// Sends every write at once.
pub(crate) fn no_delay(socket: BorrowedFd<'_>) -> io::Result<()> {
    set(socket, libc::IPPROTO_TCP, libc::TCP_NODELAY, 1)
}

/// Room for much that is under way, from the first byte on and not only once the system has learned
/// that a connection needs it. Where the system allows less than that, it goes on learning: a size
/// that is given is final.
pub(crate) fn give_room(socket: BorrowedFd<'_>) -> io::Result<()> {
    static ALLOWED: OnceLock<bool> = OnceLock::new();
    let limit = |name| {
        let text = std::fs::read_to_string(format!("/proc/sys/net/core/{name}")).ok()?;
        text.trim().parse::<libc::c_int>().ok()
    };
    let allows = |name| limit(name).is_some_and(|limit| limit >= ROOM);
    if *ALLOWED.get_or_init(|| allows("rmem_max") && allows("wmem_max")) {
        set(socket, libc::SOL_SOCKET, libc::SO_RCVBUF, ROOM)?;
        set(socket, libc::SOL_SOCKET, libc::SO_SNDBUF, ROOM)?;
    }
    Ok(())
}

/// Lets `count` connections wait to be accepted, or as many as the system allows. One that finds no
/// room tries again only after a second.
pub(crate) fn set_backlog(listener: BorrowedFd<'_>, count: usize) -> io::Result<()> {
    let count = libc::c_int::try_from(count).unwrap_or(libc::c_int::MAX);
    // SAFETY: the descriptor is open (it is borrowed); a second `listen` only changes the backlog.
    let status = unsafe { libc::listen(listener.as_raw_fd(), count) };
    if status == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
}

/// Lets this process have `more` open files than now, by raising its soft limit if that is too low;
/// `during` is for the error.
pub(crate) fn allow_open_files(more: usize, during: &str) -> Result<()> {
    let open = std::fs::read_dir("/proc/self/fd").map_or(0, Iterator::count);
    let needed = (open + more) as libc::rlim_t;
    let mut limit = libc::rlimit { rlim_cur: 0, rlim_max: 0 };
    // SAFETY: the pointer is good for the call.
    let known = unsafe { libc::getrlimit(libc::RLIMIT_NOFILE, &raw mut limit) } == 0;
    if !known || limit.rlim_cur >= needed {
        return Ok(());
    }
    // All there may be: other ranks of this process need as many.
    limit.rlim_cur = limit.rlim_max;
    // SAFETY: as above.
    let raised = unsafe { libc::setrlimit(libc::RLIMIT_NOFILE, &raw const limit) } == 0;
    if raised && limit.rlim_max >= needed {
        return Ok(());
    }
    let what = format!(
        "{during} takes {more} open files more than the {open} there are, and RLIMIT_NOFILE is {}; \
         raise it to {needed} (`ulimit -n`)",
        limit.rlim_max
    );
    Err(Error::io(what, &io::Error::from_raw_os_error(libc::EMFILE)))
}

fn set(socket: BorrowedFd<'_>, level: i32, name: i32, value: libc::c_int) -> io::Result<()> {
    let len = libc::socklen_t::try_from(size_of_val(&value)).expect("four fits");
    // SAFETY: the descriptor is open (it is borrowed), `value` lives until after the call, and
    // `len` is its size.
    let status = unsafe {
        libc::setsockopt(socket.as_raw_fd(), level, name, (&raw const value).cast(), len)
    };
    if status == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
}

/// Ten idle seconds, then seven probes two seconds apart: enough of them that a network which loses
/// one packet in ten is not taken for a dead host.
const DEAD_AFTER_S: i32 = 25;

/// What is under way at most, in bytes: 100 Gb/s for a third of a millisecond.
const ROOM: libc::c_int = 4 << 20;
