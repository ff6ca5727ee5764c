//! Ranks as processes of one machine: how they meet, and how they learn of a death.
//!
//! Each rank says in the store who and where it is; rank 0 also says which of its descriptors is the
//! segment, a memory file without a name, and the others open it through `/proc`. The memory lives
//! exactly as long as a rank has it, so nothing can be left behind, however the processes end.
//!
//! Every rank holds a pidfd of every peer, and one thread that waits for any of them to fire. It
//! then writes the death into the segment and wakes everyone, so survivors need neither time out nor
//! poll.

use std::fs;
use std::io::{self, Write};
use std::os::fd::{AsRawFd, OwnedFd};
use std::sync::Arc;
use std::thread::JoinHandle;

use serde::{Deserialize, Serialize};

use super::segment::{Poison, Segment};
use super::{Host, check_world, open_fd_of, sys};
use crate::backend::meet::{garbled, gather};
use crate::store::{Store, deadline};
use crate::{Error, GroupOptions, Rank, Result};

/// What a rank says of itself in the store.
#[derive(Debug, Serialize, Deserialize)]
struct Member {
    pid: u32,
    /// When the process started, in clock ticks since boot: tells it from a later one of its pid.
    start_time: u64,
    /// Which boot of which machine.
    boot_id: String,
    pid_namespace: String,
    world_size: usize,
    /// Rank 0's descriptor of the segment.
    segment_fd: Option<i32>,
}

/// Joins a group; returns when all ranks have.
pub(crate) fn join(
    store: &dyn Store,
    rank: Rank,
    world_size: usize,
    options: &GroupOptions,
) -> Result<Host> {
    check_world(rank, world_size)?;
    let deadline = deadline(options.timeout);
    let segment_file = if rank == 0 { Some(Segment::create(world_size)?) } else { None };
    let own = Member::of_this_process(world_size, segment_file.as_ref())?;
    // The same name may be used again, by all ranks, after a group is gone.
    let generation = store.add(&format!("{}/joined/{rank}", options.name), 1)?;
    let key = |rank: Rank| format!("{}/{generation}/member/{rank}", options.name);
    let json = serde_json::to_vec(&own).expect("a member is plain numbers and strings");
    store.set(&key(rank), &json)?;
    let members: Vec<Member> = gather(store, &key, world_size, options, deadline)?;
    check_members(&members, rank, world_size)?;

    let deaths = watch(&members, rank, &options.name)?;
    let file = match (segment_file, members[0].segment_fd) {
        (Some(file), _) => file,
        (None, Some(fd)) => {
            let number = u64::try_from(fd).unwrap_or(u64::MAX);
            open_fd_of(members[0].pid, number)?.into()
        }
        (None, None) => return Err(garbled(0)),
    };
    let segment = Arc::new(Segment::attach(file, world_size)?);
    let monitor = Monitor::start(Arc::clone(&segment), deaths)?;
    let host = Host::new(segment, rank, options, members[0].pid, Some(monitor))?;
    host.meet()?;
    Ok(host)
}

impl Member {
    fn of_this_process(world_size: usize, segment: Option<&OwnedFd>) -> Result<Self> {
        let pid = std::process::id();
        let boot_id = fs::read_to_string("/proc/sys/kernel/random/boot_id")
            .map_err(|error| Error::io("reading the machine's boot id", &error))?;
        let namespace = fs::read_link("/proc/self/ns/pid")
            .map_err(|error| Error::io("reading the pid namespace", &error))?;
        Ok(Self {
            pid,
            start_time: start_time(pid)
                .map_err(|error| Error::io("reading when this process started", &error))?,
            boot_id: boot_id.trim().to_owned(),
            pid_namespace: namespace.to_string_lossy().into_owned(),
            world_size,
            segment_fd: segment.map(AsRawFd::as_raw_fd),
        })
    }
}

fn check_members(members: &[Member], rank: Rank, world_size: usize) -> Result<()> {
    let own = &members[rank];
    for (rank, member) in members.iter().enumerate() {
        if member.world_size != world_size {
            return Err(Error::InvalidArgument(format!(
                "rank {rank} joins a group of {}, not of {world_size}",
                member.world_size
            )));
        }
        if member.boot_id != own.boot_id || member.pid_namespace != own.pid_namespace {
            return Err(Error::Unsupported {
                backend: "host",
                what: format!(
                    "several machines or pid namespaces: rank {rank} is on another one than this \
                     rank; shared memory does not reach there, `Transport::Tcp` does"
                ),
            });
        }
    }
    Ok(())
}

/// Field 22 of `/proc/<pid>/stat`. The second field is the program's name in parentheses, in which
/// anything may stand.
fn start_time(pid: u32) -> io::Result<u64> {
    let stat = fs::read_to_string(format!("/proc/{pid}/stat"))?;
    let fields = stat.rsplit(')').next().unwrap_or("");
    let time = fields.split_whitespace().nth(19).and_then(|field| field.parse().ok());
    time.ok_or_else(|| io::Error::new(io::ErrorKind::InvalidData, "no start time"))
}

/// A peer whose end is waited for.
#[derive(Debug)]
pub(super) struct Peer {
    rank: Rank,
    pid: u32,
    pidfd: OwnedFd,
}

/// A pidfd for every peer.
fn watch(members: &[Member], rank: Rank, group: &str) -> Result<Vec<Peer>> {
    let peers = members.iter().enumerate().filter(|&(peer, _)| peer != rank);
    let open = |(rank, member): (Rank, &Member)| {
        let pid = member.pid;
        let died = || Error::PeerDied { op: format!("joining group {group}"), rank, pid };
        let pidfd = sys::pidfd_open(pid).map_err(|error| match error.raw_os_error() {
            Some(libc::ESRCH) => died(),
            _ => Error::io(format!("watching over rank {rank} (pid {pid})"), &error),
        })?;
        // The pidfd is of the process that has the pid now; is it the one that wrote the store?
        if start_time(pid).ok() != Some(member.start_time) {
            return Err(died());
        }
        Ok(Peer { rank, pid, pidfd })
    };
    peers.map(open).collect()
}

/// The thread that learns of deaths; ends when dropped.
#[derive(Debug)]
pub(super) struct Monitor {
    stop: io::PipeWriter,
    thread: Option<JoinHandle<()>>,
    pid: u32,
}

impl Monitor {
    fn start(segment: Arc<Segment>, peers: Vec<Peer>) -> Result<Self> {
        let fail = |error| Error::io("starting the thread that watches over the peers", &error);
        let (stopped, stop) = io::pipe().map_err(fail)?;
        let stopped = OwnedFd::from(stopped);
        let thread = std::thread::Builder::new().name("collective-watch".into());
        let thread = thread.spawn(move || watch_over(&segment, peers, &stopped)).map_err(fail)?;
        Ok(Self { stop, thread: Some(thread), pid: std::process::id() })
    }
}

impl Drop for Monitor {
    fn drop(&mut self) {
        let Some(thread) = self.thread.take() else { return };
        if self.pid != std::process::id() {
            // A fork: the thread stayed behind in the parent, and the pipe is shared with it.
            std::mem::forget(thread);
            return;
        }
        // One byte into an empty pipe neither blocks nor fails while the thread holds the other end.
        let sent = self.stop.write_all(&[1]);
        if sent.is_ok() {
            // It ended, or is about to; a panic there has been printed and has no other cure.
            drop(thread.join());
        }
    }
}

fn watch_over(segment: &Segment, mut peers: Vec<Peer>, stopped: &OwnedFd) {
    loop {
        let mut fds = vec![stopped];
        fds.extend(peers.iter().map(|peer| &peer.pidfd));
        let ready = match sys::poll_readable(&fds) {
            Ok(ready) => ready,
            Err(error) if error.kind() == io::ErrorKind::Interrupted => continue,
            // Not expected of a poll of valid descriptors; timeouts still hold.
            Err(_) => return,
        };
        if ready[0] {
            return;
        }
        let mut ended = ready[1..].iter();
        peers.retain(|peer| {
            let has_ended = *ended.next().expect("one answer per peer");
            // Whoever left its group first may end as it likes.
            if has_ended && !segment.is_gone(peer.rank) {
                segment.set_poison(Poison::Died { rank: peer.rank, pid: peer.pid });
            }
            !has_ended
        });
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_start_time_does_not_change_and_a_dead_pid_has_none() {
        let pid = std::process::id();
        assert_eq!(start_time(pid).unwrap(), start_time(pid).unwrap());
        assert!(start_time(u32::MAX).is_err());
    }

    #[test]
    fn ranks_on_two_machines_are_refused() {
        let mut members: Vec<Member> =
            (0..2).map(|_| Member::of_this_process(2, None).unwrap()).collect();
        assert!(check_members(&members, 0, 2).is_ok());
        members[1].boot_id = "elsewhere".into();
        let error = check_members(&members, 0, 2).unwrap_err();
        assert!(matches!(error, Error::Unsupported { .. }), "{error}");
        members[1].world_size = 3;
        let error = check_members(&members, 0, 2).unwrap_err();
        assert!(matches!(error, Error::InvalidArgument(_)), "{error}");
    }

    #[test]
    fn a_dead_pid_is_a_dead_peer() {
        let mut members: Vec<Member> =
            (0..2).map(|_| Member::of_this_process(2, None).unwrap()).collect();
        members[1].start_time += 1;
        let error = watch(&members, 0, "g").unwrap_err();
        assert!(matches!(error, Error::PeerDied { rank: 1, .. }), "{error}");
    }
}
