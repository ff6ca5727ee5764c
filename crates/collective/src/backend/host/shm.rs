//! Ranks as processes of one machine: how they meet, and how they learn of a death.
//!
//! Each rank says in the store who and where it is; rank 0 also says which of its descriptors is the
//! segment, a memory file without a name, and the others open it through `/proc`. The memory lives
//! exactly as long as a rank has it, so nothing can be left behind, however the processes end.
//!
//! Every rank has one thread that waits for any peer to die. It then writes the death into the
//! segment and wakes everyone, so survivors need neither time out nor poll. It learns of a death from
//! the peer's word in the segment ([`life`]), and from a pidfd, later: where the kernel
//! cannot wait for many words, and should a word fail. Where there are neither pidfds nor such waits, it
//! looks at the words every second.

use std::fs;
use std::io::{self, Write};
use std::os::fd::{AsRawFd, OwnedFd};
use std::sync::{Arc, mpsc};
use std::thread::JoinHandle;
use std::time::Duration;

use serde::{Deserialize, Serialize};

use super::life::{self, Held};
use super::segment::{Poison, Segment};
use super::{Host, check_world, open_fd_of, sys};
use crate::backend::rendezvous::{Joining, all_gather_records, malformed_record};
use crate::store::tcp::sockopt;
use crate::sync::atomic::{AtomicU32, Ordering};
use crate::{Error, Rank, Result};

/// How long the thread sleeps before it looks at all words and pidfds.
const TICK: Duration = Duration::from_secs(1);

/// Its turns on a core: a death may not wait for those of ranks that compute.
const SLICE: Duration = Duration::from_micros(100);

/// What a rank says of itself in the store.
#[derive(Debug, Serialize, Deserialize)]
struct Member {
    /// When the process started, in clock ticks since boot: tells it from a later one of its pid.
    start_time: u64,
    /// Rank 0's descriptor of the segment.
    segment_fd: Option<i32>,
}

/// Joins a group; returns when all ranks have, which must be on one machine.
pub(crate) fn join(joining: &Joining<'_>, reason: String) -> Result<Host> {
    let (rank, world) = (joining.rank, joining.world());
    check_world(rank, world)?;
    // A pidfd for each peer, the segment, and a pipe.
    sockopt::allow_open_files(world + 8, &format!("joining {}", joining.group()))?;
    let file = if rank == 0 { Some(Segment::create(world)?) } else { None };
    let start_time = start_time(std::process::id())
        .map_err(|error| Error::io("reading when this process started", &error))?;
    let own = Member { start_time, segment_fd: file.as_ref().map(AsRawFd::as_raw_fd) };
    let members: Vec<Member> = all_gather_records(joining, "host", &own)?;

    let deaths = watch(joining, &members)?;
    let maker = joining.locations[0].pid;
    let file = match (file, members[0].segment_fd.map(u64::try_from)) {
        (Some(file), _) => file,
        (None, Some(Ok(fd))) => open_fd_of(maker, fd)?.ok_or_else(|| joining.died(0))?.into(),
        _ => return Err(malformed_record(0, format!("{}/host/0", joining.options.name))),
    };
    let segment = Arc::new(Segment::attach(file, world)?);
    let monitor = Monitor::start(Arc::clone(&segment), rank, deaths)?;
    let mut host = Host::new(segment, rank, joining.options, maker, Some(monitor))?;
    host.core.reason = reason;
    host.meet()?;
    Ok(host)
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
    /// `None` before Linux 5.3, and where a filter of system calls refuses it.
    pidfd: Option<OwnedFd>,
}

/// A pidfd for every peer, where the kernel has them.
fn watch(joining: &Joining<'_>, members: &[Member]) -> Result<Vec<Peer>> {
    let open = |(rank, member): (Rank, &Member)| {
        let pid = joining.locations[rank].pid;
        let died = || joining.died(rank);
        let opened = sys::pidfd_open(pid).map(Some);
        let pidfd = opened.or_else(|error| match error.raw_os_error() {
            Some(libc::ESRCH) => Err(died()),
            Some(libc::ENOSYS | libc::EPERM) => Ok(None),
            _ => Err(Error::io(format!("watching over rank {rank} (pid {pid})"), &error)),
        })?;
        // The pidfd is of the process that has the pid now; is it the one that wrote the store?
        if start_time(pid).ok() != Some(member.start_time) {
            return Err(died());
        }
        Ok(Peer { rank, pid, pidfd })
    };
    members.iter().enumerate().filter(|&(peer, _)| peer != joining.rank).map(open).collect()
}

/// The thread that learns of deaths; ends when dropped.
#[derive(Debug)]
pub(super) struct Monitor {
    stop: Arc<AtomicU32>,
    /// Ends a wait for pidfds.
    pipe: io::PipeWriter,
    thread: Option<JoinHandle<()>>,
    pid: u32,
}

impl Monitor {
    fn start(segment: Arc<Segment>, rank: Rank, peers: Vec<Peer>) -> Result<Self> {
        let fail = |error| Error::io("starting the thread that watches over the peers", &error);
        let (stopped, pipe) = io::pipe().map_err(fail)?;
        let (stopped, stop) = (OwnedFd::from(stopped), Arc::new(AtomicU32::new(0)));
        let watch = Watch { segment, rank, peers, stop: Arc::clone(&stop), stopped };
        let (holding, held) = mpsc::channel();
        let thread = std::thread::Builder::new().name("collective-watch".into());
        let thread = thread.spawn(move || watch.run(&holding)).map_err(fail)?;
        // From here on a death of this process is known at once.
        held.recv().map_err(|_| fail(io::Error::other("it ended at once")))?;
        Ok(Self { stop, pipe, thread: Some(thread), pid: std::process::id() })
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
        let sent = self.pipe.write_all(&[1]);
        self.stop.store(1, Ordering::SeqCst);
        sys::futex_wake(&self.stop);
        if sent.is_ok() {
            // It ended, or is about to; a panic there has been printed and has no other cure.
            drop(thread.join());
        }
    }
}

/// What that thread has.
struct Watch {
    segment: Arc<Segment>,
    rank: Rank,
    /// Those that have not ended, from the next rank on.
    peers: Vec<Peer>,
    stop: Arc<AtomicU32>,
    stopped: OwnedFd,
}

impl Watch {
    fn run(mut self, holding: &mpsc::Sender<()>) {
        let segment = Arc::clone(&self.segment);
        let _held = Held::new(segment.life(self.rank));
        sys::prefer_short_slices(SLICE);
        if holding.send(()).is_err() {
            return;
        }
        // Of many peers on one machine each rank watches the next ones.
        let next = self.peers.partition_point(|peer| peer.rank < self.rank);
        self.peers.rotate_left(next);
        loop {
            // Where the kernel cannot wait for words, wait for pidfds; where it has none, for a tick.
            let timeout = match self.wait_for_words() {
                Ok(()) => Some(Duration::ZERO),
                Err(_) if self.peers.iter().all(|peer| peer.pidfd.is_some()) => None,
                Err(_) => Some(TICK),
            };
            self.peers.retain(|peer| {
                let died = life::died(segment.life(peer.rank).load(Ordering::SeqCst));
                if died {
                    Self::tell(&segment, peer);
                }
                !died
            });
            let mut fds = vec![&self.stopped];
            fds.extend(self.peers.iter().filter_map(|peer| peer.pidfd.as_ref()));
            // A failure is not expected of a poll of valid descriptors; timeouts still hold.
            let Ok(ready) = sys::poll_readable(&fds, timeout) else { return };
            if ready[0] {
                return;
            }
            let mut ended = ready[1..].iter();
            self.peers.retain(|peer| {
                let has_ended =
                    peer.pidfd.is_some() && *ended.next().expect("one answer per pidfd");
                if has_ended {
                    Self::tell(&segment, peer);
                }
                !has_ended
            });
        }
    }

    /// Sleeps until a word changes, or for a tick.
    fn wait_for_words(&self) -> io::Result<()> {
        let peers = self.peers.iter().map(|peer| self.segment.life(peer.rank));
        let words = std::iter::once(&*self.stop).chain(peers).take(life::MOST_WORDS);
        let words: Vec<_> = words.map(|word| (word, word.load(Ordering::SeqCst))).collect();
        // What has happened already wakes nobody.
        if words[0].1 != 0 || words[1..].iter().any(|&(_, value)| life::died(value)) {
            return Ok(());
        }
        life::wait_any(&words, TICK)
    }

    /// Fails the group, unless the peer left it first: then it may end as it likes.
    fn tell(segment: &Segment, peer: &Peer) {
        if !segment.is_gone(peer.rank) {
            segment.set_poison(Poison::Died { rank: peer.rank, pid: peer.pid });
        }
    }
}

#[cfg(test)]
mod tests {
    use std::time::Instant;

    use super::*;
    use crate::backend::rendezvous::tests::locations;
    use crate::backend::shared_config::SharedConfig;
    use crate::{GroupOptions, MemoryStore};

    #[test]
    fn a_start_time_does_not_change_and_a_dead_pid_has_none() {
        let pid = std::process::id();
        assert_eq!(start_time(pid).unwrap(), start_time(pid).unwrap());
        assert!(start_time(u32::MAX).is_err());
    }

    #[test]
    fn a_dead_pid_is_a_dead_peer() {
        let (store, options) = (MemoryStore::new(), GroupOptions::default());
        let joining = Joining {
            store: &store,
            rank: 0,
            options: &options,
            deadline: Instant::now(),
            shared: SharedConfig::new(2, &options),
            locations: locations(2),
            own_keys: parking_lot::Mutex::default(),
        };
        let start_time = start_time(std::process::id()).unwrap();
        let members =
            |late| [0, late].map(|late| Member { start_time: start_time + late, segment_fd: None });
        assert_eq!(watch(&joining, &members(0)).unwrap().len(), 1);
        let error = watch(&joining, &members(1)).unwrap_err();
        assert!(matches!(error, Error::PeerDied { rank: 1, .. }), "{error}");
    }
}
