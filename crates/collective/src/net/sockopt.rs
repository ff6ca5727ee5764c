//! Socket options and limits that the standard library does not set.

use std::io;
use std::os::fd::AsFd;
use std::sync::OnceLock;
use std::time::Duration;

use rustix::io::Errno;
use rustix::net::sockopt;
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};

use crate::{Error, Result};

/// Makes the system detect an unreachable peer within about [`DEAD_AFTER_MS`], while this side
/// waits (keepalive probes) or sends (unacknowledged data).
pub(crate) fn detect_dead_peer(socket: impl AsFd) -> io::Result<()> {
    sockopt::set_socket_keepalive(&socket, true)?;
    sockopt::set_tcp_keepidle(&socket, Duration::from_secs(10))?;
    sockopt::set_tcp_keepintvl(&socket, Duration::from_secs(2))?;
    sockopt::set_tcp_keepcnt(&socket, 7)?;
    Ok(sockopt::set_tcp_user_timeout(&socket, DEAD_AFTER_MS)?)
}

/// Sets large socket buffers, so that a connection is fast before the system's autotuning has grown
/// them. An explicit size disables autotuning, so nothing is set if the system's maximum is
/// smaller.
pub(crate) fn set_buffer_sizes(socket: impl AsFd) -> io::Result<()> {
    static ALLOWED: OnceLock<bool> = OnceLock::new();
    let limit = |name| {
        let text = std::fs::read_to_string(format!("/proc/sys/net/core/{name}")).ok()?;
        text.trim().parse::<usize>().ok()
    };
    let allows = |name| limit(name).is_some_and(|limit| limit >= BUFFER_BYTES);
    if *ALLOWED.get_or_init(|| allows("rmem_max") && allows("wmem_max")) {
        sockopt::set_socket_recv_buffer_size(&socket, BUFFER_BYTES)?;
        sockopt::set_socket_send_buffer_size(&socket, BUFFER_BYTES)?;
    }
    Ok(())
}

/// Sets the listener's backlog, up to the system's limit. A client that finds it full retries only
/// after a second.
pub(crate) fn set_backlog(listener: impl AsFd, count: usize) -> io::Result<()> {
    // A second `listen` only changes the backlog.
    Ok(rustix::net::listen(listener, i32::try_from(count).unwrap_or(i32::MAX))?)
}

/// Raises this process's soft limit, if necessary, so that it can open `more` files in addition to
/// those open now; `during` is for the error.
pub(crate) fn allow_open_files(more: usize, during: &str) -> Result<()> {
    let open = std::fs::read_dir("/proc/self/fd").map_or(0, Iterator::count);
    let needed = (open + more) as u64;
    let Rlimit { current, maximum } = getrlimit(Resource::Nofile);
    let suffices = |limit: Option<u64>| limit.is_none_or(|limit| limit >= needed);
    if suffices(current) {
        return Ok(());
    }
    // Raised to the hard limit, because other ranks of this process need as many files.
    let raised = setrlimit(Resource::Nofile, Rlimit { current: maximum, maximum }).is_ok();
    if raised && suffices(maximum) {
        return Ok(());
    }
    let limit = maximum.map_or_else(|| "unlimited".into(), |limit| limit.to_string());
    let what = format!(
        "{during} needs {more} open files in addition to {open}, but RLIMIT_NOFILE is {limit}; \
         raise it to {needed} (`ulimit -n`)"
    );
    Err(Error::io(what, &Errno::MFILE.into()))
}

/// Ten idle seconds, then seven probes two seconds apart: enough that a host is not considered dead
/// if the network loses one packet in ten.
const DEAD_AFTER_MS: u32 = 25_000;

/// Size of each socket buffer in bytes: 100 Gb/s for a third of a millisecond.
const BUFFER_BYTES: usize = 4 << 20;
