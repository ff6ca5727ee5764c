//! The control plane: messages about ranks that leave, failures, and the ranks that a rank waits
//! for.
//!
//! Every pair of ranks has a connection for control messages, and every rank has a thread that
//! reads all of them at all times. So ranks detect deaths at once (the connection ends without a
//! goodbye), and failures (the first rank that detects one notifies all others before its caller
//! gets the error), even while they compute. The thread also reports which ranks its rank waits
//! for, while the caller blocks in an operation.
//!
//! With these reports a timeout names the right rank: if a missing rank itself waits for a third,
//! the third is named. Ranks are asked after half of the timeout.

use std::io::{self, Read};
use std::net::{Shutdown, TcpStream};
use std::os::fd::AsFd;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, OnceLock};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use parking_lot::Mutex;
use rustix::event::PollFlags;

use crate::backend::failure::{Cause, Failure};
use crate::backend::frame::{ControlMessage, Frame, HEADER};
use crate::net::sys::{self, EventFd};
use crate::{Error, Rank, Result};

/// Maximum number of bytes queued for a peer that does not read; further messages to it are
/// dropped.
const OUTBOX_BYTES: usize = 1 << 20;
/// How long to wait for the control message with the reason why a data connection ended.
const FAILURE_GRACE: Duration = Duration::from_secs(2);

/// A peer and its control connection.
#[derive(Debug)]
pub(super) struct ControlPeer {
    pub(super) stream: TcpStream,
    pub(super) pid: u32,
    /// Its address, for error texts.
    pub(super) addr: String,
}

/// This rank's control connections and the thread that reads them, which ends when this is dropped.
#[derive(Debug)]
pub(super) struct ControlPlane {
    shared: Arc<Shared>,
    thread: Option<JoinHandle<()>>,
}

#[derive(Debug)]
struct Shared {
    rank: Rank,
    /// By rank; `None` for this one.
    peers: Vec<Option<PeerConnection>>,
    failure: OnceLock<Failure>,
    /// Held while a failure is broadcast.
    broadcasting: Mutex<()>,
    /// The ranks that this rank waits for.
    waiting: Mutex<Vec<Rank>>,
    /// Signalled when the group fails, for calls that poll.
    failed: EventFd,
    /// Signalled when the thread has something to do.
    work: EventFd,
    stop: AtomicBool,
}

#[derive(Debug)]
struct PeerConnection {
    peer: ControlPeer,
    /// Bytes that could not be sent yet.
    outbox: Mutex<Vec<u8>>,
    left: AtomicBool,
    /// Its latest answer to [`ControlMessage::Ask`], and when it came.
    report: Mutex<Option<(Instant, Vec<Rank>)>>,
}

impl ControlPlane {
    /// Starts the thread. `peers` is indexed by rank.
    pub(super) fn start(rank: Rank, peers: Vec<Option<ControlPeer>>) -> Result<Self> {
        let fail = |error| Error::io("starting the control thread", &error);
        let connection = |peer| {
            let (outbox, report) = Default::default();
            PeerConnection { peer, outbox, left: AtomicBool::new(false), report }
        };
        let shared = Arc::new(Shared {
            rank,
            peers: peers.into_iter().map(|peer| peer.map(connection)).collect(),
            failure: OnceLock::new(),
            broadcasting: Mutex::default(),
            waiting: Mutex::default(),
            failed: EventFd::new().map_err(fail)?,
            work: EventFd::new().map_err(fail)?,
            stop: AtomicBool::new(false),
        });
        let thread = std::thread::Builder::new().name("collective-ctl".into());
        let reader = Arc::clone(&shared);
        let thread = thread.spawn(move || reader.run()).map_err(fail)?;
        Ok(Self { shared, thread: Some(thread) })
    }

    /// Returns the group's failure, if it has failed.
    pub(super) fn failure(&self) -> Option<&Failure> {
        self.shared.failure.get()
    }

    /// Returns the event descriptor that becomes readable when the group fails.
    pub(super) fn failure_event(&self) -> &EventFd {
        &self.shared.failed
    }

    /// Fails the group on all ranks; returns its first failure.
    pub(super) fn fail(&self, cause: Cause) -> &Failure {
        self.shared.fail(Failure { by: self.shared.rank, cause })
    }

    /// Returns whether a rank has left.
    pub(super) fn has_left(&self, rank: Rank) -> bool {
        // Acquire: pairs with the thread's store; data sent before the goodbye can be received.
        self.shared.connection(rank).left.load(Ordering::Acquire)
    }

    /// Sets the ranks that this rank waits for, which it reports to peers that ask.
    pub(super) fn wait_for(&self, ranks: &[Rank]) {
        let mut waiting = self.shared.waiting.lock();
        waiting.clear();
        waiting.extend_from_slice(ranks);
    }

    /// Asks all peers which ranks they wait for.
    pub(super) fn ask_all(&self) {
        self.shared.broadcast(&ControlMessage::Ask);
    }

    /// Returns the ranks that cause the delay of `missing`: those that wait for no other rank,
    /// according to their reports of the last `max_age`.
    pub(super) fn late_ranks(&self, missing: &[Rank], max_age: Duration) -> Vec<Rank> {
        let waits_for = |rank: Rank| {
            let report = self.shared.connection(rank).report.lock();
            let report = report.as_ref().filter(|(when, _)| when.elapsed() <= max_age);
            report.map_or_else(Vec::new, |(_, waiting)| waiting.clone())
        };
        late_ranks(self.shared.rank, missing, waits_for)
    }

    /// Fails the group because a peer's data connection ended. First waits briefly for a failure or
    /// goodbye.
    pub(super) fn diagnose_lost(&self, rank: Rank, error: &io::Error, before: &str) -> &Failure {
        let end = Instant::now() + FAILURE_GRACE;
        while self.failure().is_none() && !self.has_left(rank) && Instant::now() < end {
            std::thread::sleep(Duration::from_millis(1));
        }
        if self.has_left(rank) {
            return self.left(rank, before);
        }
        let ControlPeer { pid, addr, .. } = &self.shared.connection(rank).peer;
        let how = Some(format!("the data connection to {addr} was lost ({error})"));
        self.fail(Cause::Died { rank, pid: *pid, how })
    }

    /// Fails the group because a rank left before operation `before`.
    pub(super) fn left(&self, rank: Rank, before: &str) -> &Failure {
        let reason = format!("it left the group before {before}");
        self.shared.fail(Failure { by: rank, cause: Cause::Aborted { reason } })
    }

    /// After a fork: the thread exists only in the parent, and only the parent sends messages.
    pub(super) fn forget(&mut self) {
        std::mem::forget(self.thread.take());
    }
}

impl Drop for ControlPlane {
    fn drop(&mut self) {
        let Some(thread) = self.thread.take() else { return };
        self.shared.broadcast(&ControlMessage::Goodbye);
        // Release: pairs with the thread's Acquire.
        self.shared.stop.store(true, Ordering::Release);
        self.shared.work.signal();
        // A panic of the thread has been printed.
        drop(thread.join());
    }
}

fn late_ranks(own: Rank, missing: &[Rank], waits_for: impl Fn(Rank) -> Vec<Rank>) -> Vec<Rank> {
    let (mut late, mut seen, mut todo) = (Vec::new(), vec![own], missing.to_vec());
    while let Some(rank) = todo.pop() {
        if seen.contains(&rank) {
            continue;
        }
        seen.push(rank);
        match waits_for(rank) {
            others if others.is_empty() => late.push(rank),
            others => todo.extend(others),
        }
    }
    late.sort_unstable();
    // If all wait for each other, a connection has failed, and only `missing` is known.
    if late.is_empty() { missing.to_vec() } else { late }
}

impl Shared {
    fn connection(&self, rank: Rank) -> &PeerConnection {
        self.peers[rank].as_ref().expect("a peer, not this rank")
    }

    fn connections(&self) -> impl Iterator<Item = (Rank, &PeerConnection)> {
        self.peers
            .iter()
            .enumerate()
            .filter_map(|(rank, connection)| Some((rank, connection.as_ref()?)))
    }

    fn fail(&self, failure: Failure) -> &Failure {
        let _guard = self.broadcasting.lock();
        if let Some(earlier) = self.failure.get() {
            return earlier;
        }
        // Before this rank's caller gets the error: a rank that ends because of it must not be
        // reported as the cause. A peer's failure is forwarded, because that peer may not reach all
        // ranks.
        self.broadcast(&ControlMessage::Failed(failure.clone()));
        let failure = self.failure.get_or_init(|| failure);
        self.failed.signal();
        failure
    }

    fn broadcast(&self, message: &ControlMessage) {
        for (_, connection) in self.connections() {
            self.send(connection, message);
        }
    }

    fn send(&self, connection: &PeerConnection, message: &ControlMessage) {
        let Some(bytes) = message.encode() else { return };
        let mut outbox = connection.outbox.lock();
        if outbox.len() + bytes.len() <= OUTBOX_BYTES {
            outbox.extend(bytes);
        }
        if !connection.flush(&mut outbox) {
            self.work.signal();
        }
    }

    /// Body of the thread.
    fn run(&self) {
        let mut readers: Vec<Option<Vec<u8>>> =
            self.peers.iter().map(|connection| connection.as_ref().map(|_| Vec::new())).collect();
        loop {
            let mut fds = vec![sys::interest(self.work.fd(), true, false)];
            let mut ranks = Vec::new();
            for (rank, connection) in
                self.connections().filter(|&(rank, _)| readers[rank].is_some())
            {
                let write = !connection.outbox.lock().is_empty();
                fds.push(sys::interest(connection.peer.stream.as_fd(), true, write));
                ranks.push(rank);
            }
            if let Err(error) = sys::poll(&mut fds, None) {
                // Without this thread the deaths of peers would not be detected.
                let reason = format!("waiting for messages of peers: {error}");
                self.fail(Failure { by: self.rank, cause: Cause::Aborted { reason } });
                return;
            }
            self.work.clear();
            for (rank, fd) in ranks.into_iter().zip(&fds[1..]) {
                let connection = self.connection(rank);
                if fd.revents().contains(PollFlags::OUT) {
                    connection.flush(&mut connection.outbox.lock());
                }
                if !fd.revents().difference(PollFlags::OUT).is_empty() {
                    self.receive(rank, connection, &mut readers[rank]);
                }
            }
            // Acquire: pairs with `ControlPlane::drop`; the goodbyes have been queued.
            if self.stop.load(Ordering::Acquire) {
                let open = |&(rank, _): &(Rank, &PeerConnection)| readers[rank].is_some();
                return self
                    .connections()
                    .filter(open)
                    .for_each(|(_, connection)| connection.close());
            }
        }
    }

    /// Reads and handles a peer's messages; clears `reader` when the connection ends.
    fn receive(&self, rank: Rank, connection: &PeerConnection, reader: &mut Option<Vec<u8>>) {
        let Some(buffer) = reader else { return };
        let end = read_all(&connection.peer.stream, buffer);
        let malformed = loop {
            match take_message(buffer, self.peers.len()) {
                Ok(Some(message)) => self.handle(connection, message),
                Ok(None) => break false,
                Err(()) => break true,
            }
        };
        if malformed {
            let reason = format!(
                "protocol error: unexpected frame from rank {rank} at {}; check that all ranks run the \
                 same version",
                connection.peer.addr
            );
            self.fail(Failure { by: self.rank, cause: Cause::Aborted { reason } });
        } else if let Some(error) = &end
            && !connection.left.load(Ordering::Relaxed)
        {
            let ended = matches!(
                error.kind(),
                io::ErrorKind::UnexpectedEof | io::ErrorKind::ConnectionReset
            );
            let ControlPeer { pid, ref addr, .. } = connection.peer;
            let how = (!ended).then(|| format!("{addr} is unreachable ({error})"));
            self.fail(Failure { by: self.rank, cause: Cause::Died { rank, pid, how } });
        }
        if malformed || end.is_some() {
            *reader = None;
        }
    }

    fn handle(&self, connection: &PeerConnection, message: ControlMessage) {
        match message {
            ControlMessage::Goodbye => {
                // Release: pairs with `has_left`.
                connection.left.store(true, Ordering::Release);
            }
            ControlMessage::Failed(failure) => {
                self.fail(failure);
            }
            ControlMessage::Ask => {
                let waiting = self.waiting.lock().clone();
                self.send(connection, &ControlMessage::Waiting(waiting));
            }
            ControlMessage::Waiting(waiting) => {
                *connection.report.lock() = Some((Instant::now(), waiting));
            }
        }
    }
}

impl PeerConnection {
    /// Closes the connection so that the peer reads all messages before its end.
    fn close(&self) {
        self.flush(&mut self.outbox.lock());
        // Fails if the peer has ended.
        drop(self.peer.stream.shutdown(Shutdown::Write));
        // Unread input would make the system reset the connection and drop output.
        read_all(&self.peer.stream, &mut Vec::new());
    }

    /// Sends without blocking; returns whether all bytes were sent. Drops messages to a peer that
    /// has ended.
    fn flush(&self, outbox: &mut Vec<u8>) -> bool {
        while !outbox.is_empty() {
            match sys::send(self.peer.stream.as_fd(), outbox) {
                Ok(len) => drop(outbox.drain(..len)),
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => return false,
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(_) => outbox.clear(),
            }
        }
        true
    }
}

/// Appends the bytes that have arrived, up to a limit; returns the error if the stream has ended.
fn read_all(mut stream: &TcpStream, buffer: &mut Vec<u8>) -> Option<io::Error> {
    let mut piece = [0; 4096];
    for _ in 0..64 {
        match stream.read(&mut piece) {
            Ok(0) => return Some(io::ErrorKind::UnexpectedEof.into()),
            Ok(len) => buffer.extend_from_slice(&piece[..len]),
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => return None,
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) => return Some(error),
        }
    }
    None
}

/// Removes and returns the first message if it is complete.
fn take_message(
    buffer: &mut Vec<u8>,
    world: usize,
) -> std::result::Result<Option<ControlMessage>, ()> {
    let Some(header) = buffer.first_chunk::<HEADER>() else { return Ok(None) };
    let Ok(Frame::Control { bytes }) = Frame::decode(header) else { return Err(()) };
    let Some(json) = buffer.get(HEADER..HEADER + bytes) else { return Ok(None) };
    let message = ControlMessage::decode(json, world).map_err(drop)?;
    buffer.drain(..HEADER + bytes);
    Ok(Some(message))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_rank_that_waits_for_another_is_not_late() {
        // Rank 0 waits for 1 and 2; 1 waits for 2 and 3; 2 computes; 3 waits for 0 and 2.
        let waits = |rank| match rank {
            1 => vec![2, 3],
            3 => vec![0, 2],
            _ => vec![],
        };
        assert_eq!(late_ranks(0, &[1, 2], waits), [2]);
        assert_eq!(late_ranks(0, &[1], waits), [2]);
        assert_eq!(late_ranks(0, &[4, 1], waits), [2, 4]);
    }

    #[test]
    fn if_all_wait_for_each_other_the_missing_are_late() {
        let waits = |rank| vec![(rank + 1) % 3];
        assert_eq!(late_ranks(0, &[1], waits), [1]);
        assert_eq!(late_ranks(2, &[0, 1], waits), [0, 1]);
    }
}
