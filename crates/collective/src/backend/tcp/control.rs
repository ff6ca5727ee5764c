//! What ranks tell one another beside the data: that one leaves, that the group has failed, and for
//! whom they wait.
//!
//! Every pair of ranks has a connection for this alone, and every rank a thread that reads all of
//! them at all times. So a death (the connection ends without a goodbye) and a failure (told to all
//! by whoever notices it first, before its caller hears of it) are known at once, also to a rank
//! that computes; and a rank can be asked for whom it waits while its caller stands in an operation.
//!
//! That question is what keeps a timeout from blaming the wrong rank: one that waits for a third
//! says so, and the third is blamed. Nobody is asked before half of the timeout is over.

use std::io::{self, Read};
use std::net::{Shutdown, TcpStream};
use std::os::fd::AsFd;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, OnceLock};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use parking_lot::{Condvar, Mutex};

use super::frame::{Cause, Control as Message, Failure, Frame, HEADER};
use super::sys::{self, Bell};
use crate::{Error, Rank, Result};

/// Messages that may wait for a peer who does not read; no more are told it then.
const OUTBOX_BYTES: usize = 1 << 20;
/// How long the reason for the end of a data connection may take to arrive.
const VERDICT: Duration = Duration::from_secs(2);

/// A peer, as far as control goes.
#[derive(Debug)]
pub(super) struct Peer {
    pub(super) stream: TcpStream,
    pub(super) pid: u32,
    /// Its address, for error texts.
    pub(super) addr: String,
}

/// This rank's end of all control connections, and the thread that reads them; ends when dropped.
#[derive(Debug)]
pub(super) struct Control {
    shared: Arc<Shared>,
    thread: Option<JoinHandle<()>>,
}

#[derive(Debug)]
struct Shared {
    rank: Rank,
    /// By rank; none for this one.
    peers: Vec<Option<Line>>,
    failure: OnceLock<Failure>,
    /// Held while a failure is told.
    telling: Mutex<()>,
    /// For whom this rank waits.
    waiting: Mutex<Vec<Rank>>,
    /// With `changed`: woken by a failure and by a goodbye.
    verdict: Mutex<()>,
    changed: Condvar,
    /// WaitStep when the group fails, for whoever polls in an operation.
    failed: Bell,
    /// WaitStep when the thread has something to do.
    work: Bell,
    stop: AtomicBool,
}

#[derive(Debug)]
struct Line {
    peer: Peer,
    /// What could not be sent yet.
    outbox: Mutex<Vec<u8>>,
    left: AtomicBool,
    heard: Mutex<Option<Heard>>,
}

/// A peer's last answer.
#[derive(Debug)]
struct Heard {
    when: Instant,
    waiting: Vec<Rank>,
}

impl Control {
    /// Begins to listen to the peers, by rank.
    pub(super) fn start(rank: Rank, peers: Vec<Option<Peer>>) -> Result<Self> {
        let fail = |error| Error::io("starting the thread that listens to the peers", &error);
        let line = |peer| {
            let (outbox, heard) = Default::default();
            Line { peer, outbox, left: AtomicBool::new(false), heard }
        };
        let shared = Arc::new(Shared {
            rank,
            peers: peers.into_iter().map(|peer| peer.map(line)).collect(),
            failure: OnceLock::new(),
            telling: Mutex::default(),
            waiting: Mutex::default(),
            verdict: Mutex::default(),
            changed: Condvar::new(),
            failed: Bell::new().map_err(fail)?,
            work: Bell::new().map_err(fail)?,
            stop: AtomicBool::new(false),
        });
        let thread = std::thread::Builder::new().name("collective-ctl".into());
        let reader = Arc::clone(&shared);
        let thread = thread.spawn(move || reader.listen()).map_err(fail)?;
        Ok(Self { shared, thread: Some(thread) })
    }

    /// Why the group has failed, if it has.
    pub(super) fn failure(&self) -> Option<&Failure> {
        self.shared.failure.get()
    }

    /// Becomes readable when the group fails.
    pub(super) fn bell(&self) -> &Bell {
        &self.shared.failed
    }

    /// Fails the group on all ranks; the failure that came first is the one that counts.
    pub(super) fn fail(&self, cause: Cause) -> &Failure {
        self.shared.fail(Failure { by: self.shared.rank, cause })
    }

    /// Whether a rank has left.
    pub(super) fn has_left(&self, rank: Rank) -> bool {
        // Acquire: pairs with the thread's store; what was sent before the goodbye can be read.
        self.shared.line(rank).left.load(Ordering::Acquire)
    }

    /// Says for whom this rank waits, should anyone ask.
    pub(super) fn wait_for(&self, ranks: &[Rank]) {
        let mut waiting = self.shared.waiting.lock();
        waiting.clear();
        waiting.extend_from_slice(ranks);
    }

    /// Asks all peers for whom they wait.
    pub(super) fn ask(&self) {
        self.shared.tell_all(&Message::Ask);
    }

    /// Who is to blame that `missing` did not come: not those who wait for others themselves, as
    /// far as they said so in the time `lately`.
    pub(super) fn blame(&self, missing: &[Rank], lately: Duration) -> Vec<Rank> {
        let waits_for = |rank: Rank| {
            let heard = self.shared.line(rank).heard.lock();
            let heard = heard.as_ref().filter(|heard| heard.when.elapsed() <= lately);
            heard.map_or_else(Vec::new, |heard| heard.waiting.clone())
        };
        blame(self.shared.rank, missing, waits_for)
    }

    /// Why a peer's data connection ended, which its control connection says.
    pub(super) fn verdict(&self, rank: Rank, error: &io::Error, before: &str) -> &Failure {
        let end = Instant::now() + VERDICT;
        let mut guard = self.shared.verdict.lock();
        while self.failure().is_none() && !self.has_left(rank) {
            if self.shared.changed.wait_until(&mut guard, end).timed_out() {
                break;
            }
        }
        drop(guard);
        if self.has_left(rank) {
            return self.left(rank, before);
        }
        let Peer { pid, addr, .. } = &self.shared.line(rank).peer;
        let how = Some(format!("the data connection to {addr} is lost ({error})"));
        self.fail(Cause::Died { rank, pid: *pid, how })
    }

    /// Fails the group because a rank left before its work was done.
    pub(super) fn left(&self, rank: Rank, before: &str) -> &Failure {
        let reason = format!("it left the group before {before}");
        self.shared.fail(Failure { by: rank, cause: Cause::Aborted { reason } })
    }

    /// After a fork: the thread stayed behind in the parent, which alone may speak.
    pub(super) fn forget(&mut self) {
        std::mem::forget(self.thread.take());
    }
}

impl Drop for Control {
    fn drop(&mut self) {
        let Some(thread) = self.thread.take() else { return };
        self.shared.tell_all(&Message::Goodbye);
        // Release: pairs with the thread's Acquire.
        self.shared.stop.store(true, Ordering::Release);
        self.shared.work.ring();
        // A panic there has been printed and has no other cure.
        drop(thread.join());
    }
}

fn blame(own: Rank, missing: &[Rank], waits_for: impl Fn(Rank) -> Vec<Rank>) -> Vec<Rank> {
    let (mut guilty, mut seen, mut todo) = (Vec::new(), vec![own], missing.to_vec());
    while let Some(rank) = todo.pop() {
        if seen.contains(&rank) {
            continue;
        }
        seen.push(rank);
        match waits_for(rank) {
            others if others.is_empty() => guilty.push(rank),
            others => todo.extend(others),
        }
    }
    guilty.sort_unstable();
    // All wait for one another: then it is the connections that fail, and only this is certain.
    if guilty.is_empty() { missing.to_vec() } else { guilty }
}

impl Shared {
    fn line(&self, rank: Rank) -> &Line {
        self.peers[rank].as_ref().expect("a peer, not this rank")
    }

    fn lines(&self) -> impl Iterator<Item = (Rank, &Line)> {
        self.peers.iter().enumerate().filter_map(|(rank, line)| Some((rank, line.as_ref()?)))
    }

    fn fail(&self, failure: Failure) -> &Failure {
        let _guard = self.telling.lock();
        if let Some(earlier) = self.failure.get() {
            return earlier;
        }
        // Before anybody hears of it here: a rank that ends because of it must not look like the
        // cause. Also what a peer told is told on, should that peer reach some ranks only.
        self.tell_all(&Message::Failed(failure.clone()));
        let failure = self.failure.get_or_init(|| failure);
        self.failed.ring();
        self.wake();
        failure
    }

    /// Wakes who waits for a verdict.
    fn wake(&self) {
        drop(self.verdict.lock());
        self.changed.notify_all();
    }

    fn tell_all(&self, message: &Message) {
        for (_, line) in self.lines() {
            self.tell(line, message);
        }
    }

    fn tell(&self, line: &Line, message: &Message) {
        let Some(bytes) = message.encode() else { return };
        let mut outbox = line.outbox.lock();
        if outbox.len() + bytes.len() <= OUTBOX_BYTES {
            outbox.extend(bytes);
        }
        if !line.flush(&mut outbox) {
            self.work.ring();
        }
    }

    /// The thread.
    fn listen(&self) {
        let mut readers: Vec<Option<Vec<u8>>> =
            self.peers.iter().map(|line| line.as_ref().map(|_| Vec::new())).collect();
        loop {
            let mut fds = vec![sys::interest(self.work.fd(), true, false)];
            let mut ranks = Vec::new();
            for (rank, line) in self.lines().filter(|&(rank, _)| readers[rank].is_some()) {
                let write = !line.outbox.lock().is_empty();
                fds.push(sys::interest(line.peer.stream.as_fd(), true, write));
                ranks.push(rank);
            }
            if sys::poll(&mut fds, None).is_err() {
                // Not expected of a poll of valid descriptors; timeouts still hold.
                return;
            }
            self.work.quiet();
            for (rank, fd) in ranks.into_iter().zip(&fds[1..]) {
                let line = self.line(rank);
                if fd.revents & libc::POLLOUT != 0 {
                    line.flush(&mut line.outbox.lock());
                }
                if fd.revents & !libc::POLLOUT != 0 {
                    self.hear(rank, line, &mut readers[rank]);
                }
            }
            // Acquire: pairs with `Control::drop`; the goodbyes have been said.
            if self.stop.load(Ordering::Acquire) {
                let open = |&(rank, _): &(Rank, &Line)| readers[rank].is_some();
                return self.lines().filter(open).for_each(|(_, line)| line.close());
            }
        }
    }

    /// Reads what a peer has sent and acts on it; the reader is gone with the connection.
    fn hear(&self, rank: Rank, line: &Line, reader: &mut Option<Vec<u8>>) {
        let Some(buffer) = reader else { return };
        let end = read_all(&line.peer.stream, buffer);
        let garbled = loop {
            match take_message(buffer, self.peers.len()) {
                Ok(Some(message)) => self.act(line, message),
                Ok(None) => break false,
                Err(()) => break true,
            }
        };
        if garbled {
            let reason = format!("rank {rank} at {} sent what no rank sends", line.peer.addr);
            self.fail(Failure { by: self.rank, cause: Cause::Aborted { reason } });
        } else if let Some(error) = &end
            && !line.left.load(Ordering::Relaxed)
        {
            let ended = matches!(
                error.kind(),
                io::ErrorKind::UnexpectedEof | io::ErrorKind::ConnectionReset
            );
            let Peer { pid, ref addr, .. } = line.peer;
            let how = (!ended).then(|| format!("{addr} is out of reach ({error})"));
            self.fail(Failure { by: self.rank, cause: Cause::Died { rank, pid, how } });
        }
        if garbled || end.is_some() {
            *reader = None;
        }
    }

    fn act(&self, line: &Line, message: Message) {
        match message {
            Message::Goodbye => {
                // Release: pairs with `has_left`.
                line.left.store(true, Ordering::Release);
                self.wake();
            }
            Message::Failed(failure) => {
                self.fail(failure);
            }
            Message::Ask => {
                let waiting = self.waiting.lock().clone();
                self.tell(line, &Message::Waiting(waiting));
            }
            Message::Waiting(waiting) => {
                *line.heard.lock() = Some(Heard { when: Instant::now(), waiting });
            }
        }
    }
}

impl Line {
    /// Ends the connection, for an end that the peer reads in order.
    fn close(&self) {
        self.flush(&mut self.outbox.lock());
        // Fails if the peer is gone, who reads nothing then.
        drop(self.peer.stream.shutdown(Shutdown::Write));
        // What is left unread makes the system reset what is still on its way.
        read_all(&self.peer.stream, &mut Vec::new());
    }

    /// Sends what can be sent now; whether that was all. What a peer that is gone does not get is
    /// forgotten: the end of its connection says enough.
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

/// Appends all that can be read now, but no more than a few messages; what ended the stream, if it
/// has ended.
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

/// Takes the first message if all of it is there.
fn take_message(buffer: &mut Vec<u8>, world: usize) -> std::result::Result<Option<Message>, ()> {
    let Some(header) = buffer.first_chunk::<HEADER>() else { return Ok(None) };
    let Ok(Frame::Control { bytes }) = Frame::decode(header) else { return Err(()) };
    let Some(json) = buffer.get(HEADER..HEADER + bytes) else { return Ok(None) };
    let message = Message::decode(json, world).map_err(drop)?;
    buffer.drain(..HEADER + bytes);
    Ok(Some(message))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn whoever_waits_for_another_is_not_blamed() {
        // Rank 0 waits for 1 and 2; 1 waits for 2 and 3; 2 computes; 3 waits for 0 and 2.
        let waits = |rank| match rank {
            1 => vec![2, 3],
            3 => vec![0, 2],
            _ => vec![],
        };
        assert_eq!(blame(0, &[1, 2], waits), [2]);
        assert_eq!(blame(0, &[1], waits), [2]);
        assert_eq!(blame(0, &[4, 1], waits), [2, 4]);
    }

    #[test]
    fn when_all_wait_for_one_another_the_missing_are_named() {
        let waits = |rank| vec![(rank + 1) % 3];
        assert_eq!(blame(0, &[1], waits), [1]);
        assert_eq!(blame(2, &[0, 1], waits), [0, 1]);
    }
}
