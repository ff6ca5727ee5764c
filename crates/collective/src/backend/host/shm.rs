//! Ranks as processes of one machine: rendezvous and detection of deaths.
//!
//! Each rank writes its process id and start time to the store. Rank 0 also writes its descriptor
//! of the segment, an unnamed memory file, which the others open through `/proc`. The kernel frees
//! the memory when no rank has it open, however the processes end.
//!
//! One thread of every rank monitors the peers. When one dies, it writes the death into the segment
//! and wakes all ranks, so survivors neither time out nor poll. It detects a death by the peer's
//! word in the segment ([`robust_futex`]). A pidfd reports it later; it is needed where the kernel
//! cannot wait for many words, or if a word fails. Without both, the thread polls the words every
//! second.

use std::fs;
use std::io::{self, Write};
use std::os::fd::{AsRawFd, OwnedFd};
use std::sync::{Arc, mpsc};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use rustix::io::Errno;
use serde::{Deserialize, Serialize};

use super::robust_futex::{self, RobustFutex};
use super::segment::Segment;
use super::{Host, check_world, is_ending, open_fd_of, sys};
use crate::backend::core::shortened;
use crate::backend::failure::{Cause, Failure};
use crate::backend::rendezvous::{Joining, all_gather_records, malformed_record};
use crate::net::sockopt;
use crate::sync::atomic::{AtomicU32, Ordering};
use crate::{Error, Rank, Result};

/// Longest sleep of the monitor thread before it checks all words and pidfds.
const TICK: Duration = Duration::from_secs(1);

/// Scheduler slice of the monitor thread: short, so that it runs before ranks that compute.
const SLICE: Duration = Duration::from_micros(100);

/// A rank's record in the store.
#[derive(Debug, Serialize, Deserialize)]
struct HostRecord {
    /// When the process started, in clock ticks since boot; distinguishes it from a later process
    /// with its pid.
    start_time: u64,
    /// Rank 0's descriptor of the segment.
    segment_fd: Option<i32>,
}

/// Joins a group whose ranks are on one machine; returns when all have joined.
pub(crate) fn join(joining: &Joining<'_>, reason: String) -> Result<Host> {
    let (rank, world) = (joining.rank, joining.world());
    check_world(rank, world)?;
    // A pidfd for each peer, the segment, and a pipe.
    sockopt::allow_open_files(world + 8, &format!("joining {}", joining.group()))?;
    let file = if rank == 0 { Some(Segment::create(world)?) } else { None };
    let start_time = start_time(std::process::id())
        .map_err(|error| Error::io("reading when this process started", &error))?;
    let own = HostRecord { start_time, segment_fd: file.as_ref().map(AsRawFd::as_raw_fd) };
    let members: Vec<HostRecord> = all_gather_records(joining, "host", &own)?;

    let peers = open_pidfds(joining, &members)?;
    let maker = joining.locations[0].pid;
    let file = match (file, members[0].segment_fd.map(u64::try_from)) {
        (Some(file), _) => file,
        (None, Some(Ok(fd))) => open_fd_of(maker, fd)?.ok_or_else(|| joining.died(0))?.into(),
        _ => return Err(malformed_record(0, format!("{}/host/0", joining.options.name))),
    };
    let segment = Segment::attach(file, world).map_err(|error| joining.reason_or(error))?;
    let segment = Arc::new(segment);
    let begin = || {
        let monitor = Monitor::start(Arc::clone(&segment), rank, peers)?;
        let monitor = Some(monitor.ok_or_else(|| joining.duplicate())?);
        let mut host = Host::new(Arc::clone(&segment), rank, joining.options, maker, monitor)?;
        host.core.reason = reason;
        wait_for_monitors(joining, &segment)?;
        host.barrier()?;
        Ok(host)
    };
    begin().inspect_err(|error| {
        let (by, reason) = match error {
            // All ranks name the late ones themselves. The group has another rank in a duplicate's
            // place.
            Error::Timeout { .. } | Error::DuplicateRank { .. } => return,
            Error::Aborted { by, reason } => (*by, reason.clone()),
            own => (rank, own.to_string()),
        };
        let reason = shortened(&reason).to_owned();
        segment.fail(rank, &Failure { by, cause: Cause::Aborted { reason } });
    })
}

/// Blocks until every rank has its monitor, as its word in the segment shows, or the group has
/// failed. A rank that fails before it has mapped the segment can publish the reason only through
/// the store, which nobody looks at in the barrier that follows.
fn wait_for_monitors(joining: &Joining<'_>, segment: &Segment) -> Result<()> {
    let (interval, mut pause) = (joining.watch_interval(), Duration::from_micros(50));
    let is_missing = |rank: &Rank| segment.liveness(*rank).load(Ordering::SeqCst) == 0;
    while (0..segment.world).any(|rank| is_missing(&rank)) && !segment.has_failed() {
        if joining.deadline <= Instant::now() {
            let missing = (0..segment.world).filter(is_missing).collect();
            return Err(joining.timeout("waiting for monitors", missing));
        }
        std::thread::sleep(pause);
        if pause == interval {
            joining.check_failed()?;
        }
        pause = (2 * pause).min(interval);
    }
    Ok(())
}

/// Field 22 of `/proc/<pid>/stat`. The second field is the program's name in parentheses, which may
/// contain any byte: the kernel cuts it after 15, perhaps within a character.
pub(crate) fn start_time(pid: u32) -> io::Result<u64> {
    let stat = fs::read(format!("/proc/{pid}/stat"))?;
    let stat = String::from_utf8_lossy(&stat);
    let fields = stat.rsplit(')').next().unwrap_or("");
    let time = fields.split_whitespace().nth(19).and_then(|field| field.parse().ok());
    time.ok_or_else(|| io::Error::new(io::ErrorKind::InvalidData, "no start time"))
}

/// A monitored peer.
#[derive(Debug)]
pub(super) struct Peer {
    rank: Rank,
    pid: u32,
    /// `None` before Linux 5.3, and where a seccomp filter refuses it.
    pidfd: Option<OwnedFd>,
}

/// Opens a pidfd for every peer, if the kernel has them.
fn open_pidfds(joining: &Joining<'_>, members: &[HostRecord]) -> Result<Vec<Peer>> {
    let open = |(rank, member): (Rank, &HostRecord)| {
        let pid = joining.locations[rank].pid;
        let died = || joining.died(rank);
        let failed =
            |error: &io::Error| Error::io(format!("monitoring rank {rank} (pid {pid})"), error);
        let opened = sys::pidfd_open(pid).map(Some);
        let pidfd = opened.or_else(|error| match error {
            Errno::SRCH => Err(died()),
            Errno::NOSYS | Errno::PERM => Ok(None),
            _ => Err(failed(&error.into())),
        })?;
        // The pidfd refers to the process that has the pid now, perhaps not the one that wrote the
        // record.
        match start_time(pid) {
            Ok(time) if time == member.start_time => Ok(Peer { rank, pid, pidfd }),
            Ok(_) => Err(died()),
            Err(_) if is_ending(pid) => Err(died()),
            Err(error) => Err(failed(&error)),
        }
    };
    members.iter().enumerate().filter(|&(peer, _)| peer != joining.rank).map(open).collect()
}

/// Handle of the thread that monitors the peers; stops it when dropped.
#[derive(Debug)]
pub(super) struct Monitor {
    stop: Arc<AtomicU32>,
    /// Ends a wait for pidfds.
    pipe: io::PipeWriter,
    thread: Option<JoinHandle<()>>,
    pid: u32,
}

impl Monitor {
    /// Returns `None` if another thread has the rank's word.
    fn start(segment: Arc<Segment>, rank: Rank, peers: Vec<Peer>) -> Result<Option<Self>> {
        let fail = |error| Error::io("starting the thread that monitors the peers", &error);
        let (stopped, pipe) = io::pipe().map_err(fail)?;
        let (stopped, stop) = (OwnedFd::from(stopped), Arc::new(AtomicU32::new(0)));
        let monitor = MonitorThread { segment, rank, peers, stop: Arc::clone(&stop), stopped };
        let (ready, is_ready) = mpsc::channel();
        let thread = std::thread::Builder::new().name("collective-watch".into());
        let thread = thread.spawn(move || monitor.run(&ready)).map_err(fail)?;
        // From here on peers detect the death of this process.
        let is_first = is_ready.recv().map_err(|_| fail(io::Error::other("it ended at once")))?;
        let monitor = Self { stop, pipe, thread: Some(thread), pid: std::process::id() };
        Ok(is_first.then_some(monitor))
    }
}

impl Drop for Monitor {
    fn drop(&mut self) {
        let Some(thread) = self.thread.take() else { return };
        if self.pid != std::process::id() {
            // In a forked child: the thread exists only in the parent, which shares the pipe.
            std::mem::forget(thread);
            return;
        }
        // One byte into an empty pipe neither blocks nor fails while the thread holds the other
        // end.
        let sent = self.pipe.write_all(&[1]);
        self.stop.store(1, Ordering::SeqCst);
        sys::futex_wake(&self.stop);
        if sent.is_ok() {
            // A panic of the thread has been printed.
            drop(thread.join());
        }
    }
}

/// State of the monitor thread.
struct MonitorThread {
    segment: Arc<Segment>,
    rank: Rank,
    /// Peers that have not ended, starting with the next rank.
    peers: Vec<Peer>,
    stop: Arc<AtomicU32>,
    stopped: OwnedFd,
}

impl MonitorThread {
    fn run(mut self, ready: &mpsc::Sender<bool>) {
        let (segment, own) = (Arc::clone(&self.segment), self.rank);
        let liveness = RobustFutex::new(segment.liveness(self.rank));
        sys::prefer_short_slices(SLICE);
        if ready.send(liveness.is_some()).is_err() || liveness.is_none() {
            return;
        }
        // A thread can wait for a limited number of words, so each rank waits for those of the next
        // ranks.
        let next = self.peers.partition_point(|peer| peer.rank < self.rank);
        self.peers.rotate_left(next);
        loop {
            // If the kernel cannot wait for words, wait for pidfds; without those, sleep for a
            // tick.
            let timeout = match self.wait_for_words() {
                Ok(()) => Some(Duration::ZERO),
                Err(_) if self.peers.iter().all(|peer| peer.pidfd.is_some()) => None,
                Err(_) => Some(TICK),
            };
            self.peers.retain(|peer| {
                let died =
                    robust_futex::owner_died(segment.liveness(peer.rank).load(Ordering::SeqCst));
                if died {
                    Self::report_death(&segment, own, peer);
                }
                !died
            });
            let mut fds = vec![&self.stopped];
            fds.extend(self.peers.iter().filter_map(|peer| peer.pidfd.as_ref()));
            let ready = match sys::poll_readable(&fds, timeout) {
                Ok(ready) => ready,
                // Without this thread the deaths of peers would not be detected.
                Err(error) => {
                    let reason = format!("monitoring the peers: {error}");
                    segment.fail(own, &Failure { by: own, cause: Cause::Aborted { reason } });
                    return;
                }
            };
            if ready[0] {
                return;
            }
            let mut ended = ready[1..].iter();
            self.peers.retain(|peer| {
                let has_ended =
                    peer.pidfd.is_some() && *ended.next().expect("one answer per pidfd");
                if has_ended {
                    Self::report_death(&segment, own, peer);
                }
                !has_ended
            });
        }
    }

    /// Sleeps until a word changes, or for a tick.
    fn wait_for_words(&self) -> io::Result<()> {
        let peers = self.peers.iter().map(|peer| self.segment.liveness(peer.rank));
        let words = std::iter::once(&*self.stop).chain(peers).take(robust_futex::MAX_WORDS);
        let words: Vec<_> = words.map(|word| (word, word.load(Ordering::SeqCst))).collect();
        // Words that have changed already wake no waiter.
        if words[0].1 != 0 || words[1..].iter().any(|&(_, value)| robust_futex::owner_died(value)) {
            return Ok(());
        }
        robust_futex::wait_any(&words, TICK)
    }

    /// Fails the group, unless the peer left it before it ended.
    fn report_death(segment: &Segment, own: Rank, peer: &Peer) {
        if !segment.has_left(peer.rank) {
            let &Peer { rank, pid, .. } = peer;
            let cause = Cause::Died { rank, pid, how: None };
            segment.fail(own, &Failure { by: own, cause });
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::refuse::refuse;
    use super::*;
    use crate::backend::rendezvous::tests::locations;
    use crate::backend::shared_config::SharedConfig;
    use crate::{GroupOptions, MemoryStore};

    /// Rank 0 of two in this process.
    fn joining<'a>(store: &'a MemoryStore, options: &'a GroupOptions) -> Joining<'a> {
        Joining {
            store,
            rank: 0,
            options,
            deadline: Instant::now(),
            shared: SharedConfig::new(2, options),
            locations: locations(2),
            own_keys: parking_lot::Mutex::default(),
        }
    }

    #[test]
    fn a_start_time_does_not_change_and_a_dead_pid_has_none() {
        let pid = std::process::id();
        assert_eq!(start_time(pid).unwrap(), start_time(pid).unwrap());
        assert!(start_time(u32::MAX).is_err());
    }

    #[test]
    fn a_start_time_is_read_if_the_programs_name_is_cut_within_a_letter() {
        let name = fs::read("/proc/self/comm").unwrap();
        fs::write("/proc/self/comm", b"1234567890\xd0\xbe\xd0").unwrap();
        let time = start_time(std::process::id());
        fs::write("/proc/self/comm", name).unwrap();
        time.unwrap();
    }

    #[test]
    fn a_reused_pid_is_reported_as_a_dead_peer() {
        let (store, options) = (MemoryStore::new(), GroupOptions::default());
        let joining = joining(&store, &options);
        let start_time = start_time(std::process::id()).unwrap();
        let members = |late| {
            [0, late].map(|late| HostRecord { start_time: start_time + late, segment_fd: None })
        };
        assert_eq!(open_pidfds(&joining, &members(0)).unwrap().len(), 1);
        let error = open_pidfds(&joining, &members(1)).unwrap_err();
        assert!(matches!(error, Error::PeerDied { rank: 1, .. }), "{error}");
    }

    /// For example too many open files, or a `/proc` that hides other users' processes.
    #[test]
    fn a_peer_whose_start_time_cannot_be_read_is_not_dead() {
        let read = |errno| {
            let members = [0, 0].map(|_| HostRecord {
                start_time: start_time(std::process::id()).unwrap(),
                segment_fd: None,
            });
            let refused = std::thread::spawn(move || {
                let (store, options) = (MemoryStore::new(), GroupOptions::default());
                let joining = joining(&store, &options);
                refuse(&[libc::SYS_openat], errno);
                open_pidfds(&joining, &members).map(drop).unwrap_err()
            });
            refused.join().unwrap()
        };
        for errno in [libc::EMFILE, libc::EACCES, libc::ENOENT] {
            let error = read(errno);
            assert!(matches!(error, Error::Io { .. }), "{error}");
            assert!(error.to_string().contains("rank 1 (pid "), "{error}");
        }
    }
}
