//! A communicator: a connection to the hub, and whose turn it is on it.

use std::collections::BTreeSet;
use std::io;
use std::net::{Shutdown, TcpStream};
use std::sync::atomic::{AtomicI32, AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};

use super::{INTERNAL, REMOTE, TIMEOUT};
use crate::wire::Frame;

/// A communicator of one rank.
#[derive(Debug)]
pub(crate) struct Comm {
    pub(super) rank: usize,
    pub(super) ranks: usize,
    pub(crate) device: usize,
    pub(super) name: String,
    line: Mutex<TcpStream>,
    /// The same connection, to end what waits on it.
    hang_up: TcpStream,
    turns: Mutex<Turns>,
    moved_on: Condvar,
    pub(super) issued: AtomicU64,
    /// The status that `HcclGetCommAsyncError` returns: 0, or the first failure.
    pub(super) error: AtomicI32,
    pub(super) suspended: AtomicI32,
}

/// Which operation is next, whatever streams they are in.
#[derive(Debug, Default)]
struct Turns {
    next: u64,
    /// Those that ended before it was their turn.
    ended: BTreeSet<u64>,
}

impl Comm {
    /// A communicator over a connection on which the ranks have met.
    pub(super) fn new(
        (rank, ranks): (u32, u32),
        device: usize,
        name: String,
        stream: TcpStream,
    ) -> io::Result<Self> {
        Ok(Self {
            rank: rank as usize,
            ranks: ranks as usize,
            device,
            name,
            hang_up: stream.try_clone()?,
            line: Mutex::new(stream),
            turns: Mutex::default(),
            moved_on: Condvar::new(),
            issued: AtomicU64::new(0),
            error: AtomicI32::new(0),
            suspended: AtomicI32::new(0),
        })
    }

    /// How many operations have ended.
    pub(super) fn ended(&self) -> u64 {
        self.turns().next
    }

    /// Ends the connection; what waits on it fails.
    pub(crate) fn close(&self) {
        // It may have been ended from the other side.
        drop(self.hang_up.shutdown(Shutdown::Both));
    }

    fn turns(&self) -> MutexGuard<'_, Turns> {
        self.turns.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn broken(&self, code: i32) {
        // Relaxed, here and where it is read: the number is all there is. The first failure stays.
        let _ = self.error.compare_exchange(0, code, Ordering::Relaxed, Ordering::Relaxed);
    }
}

/// The turn of one operation, which passes on when it is dropped, done or not.
pub(super) struct Turn {
    pub(super) comm: Arc<Comm>,
    number: u64,
    done: bool,
}

impl Turn {
    /// The turn that comes after those before it.
    pub(super) const fn new(comm: Arc<Comm>, number: u64) -> Self {
        Self { comm, number, done: false }
    }

    /// Asks the hub, in the order in which operations were called.
    pub(super) fn ask(&mut self, request: &Frame) -> Result<Frame, i32> {
        let comm = &self.comm;
        let mut turns = comm.turns();
        while turns.next != self.number {
            turns = comm.moved_on.wait(turns).unwrap_or_else(PoisonError::into_inner);
        }
        drop(turns);
        let mut line = comm.line.lock().unwrap_or_else(PoisonError::into_inner);
        let answer = match comm.error.load(Ordering::Relaxed) {
            0 => exchange(&mut line, request),
            code => Err(code),
        };
        drop(line);
        match answer {
            Ok(_) => self.done = true,
            Err(code) => comm.broken(code),
        }
        answer
    }
}

impl Drop for Turn {
    fn drop(&mut self) {
        if !self.done {
            self.comm.broken(INTERNAL);
        }
        let mut turns = self.comm.turns();
        turns.ended.insert(self.number);
        while {
            let next = turns.next;
            turns.ended.remove(&next)
        } {
            turns.next += 1;
        }
        self.comm.moved_on.notify_all();
    }
}

/// A request and its answer.
pub(super) fn exchange(stream: &mut TcpStream, request: &Frame) -> Result<Frame, i32> {
    let broken = |error: io::Error| match error.kind() {
        io::ErrorKind::WouldBlock | io::ErrorKind::TimedOut => TIMEOUT,
        _ => REMOTE,
    };
    request.write(stream).map_err(broken)?;
    let answer = Frame::read(stream).map_err(broken)?;
    if answer.kind == 0 { Ok(answer) } else { Err(answer.kind as i32) }
}
