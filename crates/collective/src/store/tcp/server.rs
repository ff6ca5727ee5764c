//! The store's server: one thread, one poll loop around [`State`].
//!
//! Nothing in the loop waits for anything but `poll`: no name is looked up, reads and writes are
//! non-blocking, and a client that sends half a request or does not read its replies holds up
//! nobody else. When the process may open no more files, the oldest connection that
//! has not validated is closed. Replies are buffered; while a connection's buffer is over `HIGH_WATER`, no more
//! of its requests are taken, so a client that only sends makes itself wait.
//!
//! Invariant: `conns` and the state know the same connections, and a connection that failed is
//! removed from both before the next is served.

use std::collections::VecDeque;
use std::io::{self, ErrorKind, IoSlice, Read, Write};
use std::net::SocketAddr;
use std::os::fd::AsFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;
use std::time::Duration;

use mio::net::{TcpListener, TcpStream};
use mio::{Events, Interest, Poll, Token, Waker};
use parking_lot::Mutex;

use super::codec::{self, Decoded, ProtocolError};
use super::sockopt;
use super::state::{ConnId, ConnMap, Piece, Presence, State};
use crate::{Error, Result};

/// Serves a store until dropped.
///
/// # Examples
///
/// ```
/// use std::time::Duration;
/// use collective::{Store, TcpStore, store::TcpStoreServer};
///
/// let server = TcpStoreServer::bind("127.0.0.1:0".parse().unwrap())?;
/// let store = TcpStore::connect("127.0.0.1", server.port(), Duration::from_secs(5))?;
/// assert_eq!(store.add("joined", 1)?, 1);
/// # Ok::<(), collective::Error>(())
/// ```
#[derive(Debug)]
pub struct TcpStoreServer {
    addr: SocketAddr,
    stop: Arc<AtomicBool>,
    waker: Waker,
    thread: Option<JoinHandle<()>>,
    gone: Arc<Mutex<Vec<String>>>,
}

impl TcpStoreServer {
    /// Listens on `addr` and starts the server's thread. Port 0 takes a free port, which
    /// [`port`](Self::port) tells.
    ///
    /// # Errors
    ///
    /// [`Error::Rendezvous`] if the address cannot be bound: the port is taken, or the address is
    /// not one of this host.
    pub fn bind(addr: SocketAddr) -> Result<Self> {
        Self::bind_watching(addr, Vec::new())
    }

    /// As [`bind`](Self::bind), and looks after some clients, see [`gone`](Self::gone).
    ///
    /// # Errors
    ///
    /// As [`bind`](Self::bind).
    pub fn bind_watching(addr: SocketAddr, clients: Vec<Presence>) -> Result<Self> {
        let refused = |error: io::Error| Error::Rendezvous {
            addr: addr.to_string(),
            reason: match error.kind() {
                ErrorKind::AddrInUse => "the port is taken, perhaps by another job on this host; \
                                         choose another MASTER_PORT"
                    .to_owned(),
                ErrorKind::AddrNotAvailable => "not an address of this host; rank 0 must run on \
                                                the host that MASTER_ADDR names"
                    .to_owned(),
                _ => format!("cannot listen: {error}"),
            },
        };
        let listener = TcpListener::bind(addr).map_err(refused)?;
        // For many clients. If there may be no more, that is enough for few.
        drop(sockopt::allow_open_files(CLIENTS, "serving a store"));
        sockopt::set_backlog(listener.as_fd(), CLIENTS).map_err(refused)?;
        // Accepted connections inherit these, at no system call each.
        sockopt::no_delay(listener.as_fd()).map_err(refused)?;
        sockopt::detect_dead_peer(listener.as_fd()).map_err(refused)?;
        let addr = listener.local_addr().map_err(refused)?;
        let (mut server, waker) = Loop::new(listener, State::watching(clients)).map_err(refused)?;
        let (stop, gone) = (Arc::clone(&server.stop), Arc::clone(&server.gone));
        let thread = std::thread::Builder::new()
            .name("tcp-store".to_owned())
            .spawn(move || server.run())
            .map_err(|error| Error::io("start the store's thread", &error))?;
        Ok(Self { addr, stop, waker, thread: Some(thread), gone })
    }

    /// The keys of those clients looked after whose connection has ended, if they had set it and were
    /// not through; one that comes back and sets it again is no longer among them. A process that is
    /// killed is known at once, a host that vanished after some 25 seconds.
    #[must_use]
    pub fn gone(&self) -> Vec<String> {
        self.gone.lock().clone()
    }

    /// The address listened on.
    #[must_use]
    pub fn local_addr(&self) -> SocketAddr {
        self.addr
    }

    /// The port listened on.
    #[must_use]
    pub fn port(&self) -> u16 {
        self.addr.port()
    }
}

impl Drop for TcpStoreServer {
    /// Closes every connection and ends the thread, which never blocks but in `poll`.
    fn drop(&mut self) {
        // Release: the thread that sees the wake-up sees the flag (Acquire in `run`).
        self.stop.store(true, Ordering::Release);
        if self.waker.wake().is_ok()
            && let Some(thread) = self.thread.take()
        {
            // A panic of that thread has been reported by its hook.
            drop(thread.join());
        }
    }
}

/// Replies a connection may have waiting before its requests are left in the socket, in bytes.
const HIGH_WATER: usize = 1 << 20;
/// Clients for which the limit on open files is raised, if it may be.
const CLIENTS: usize = 16 << 10;
/// Bytes taken from one connection before the others have their turn.
const TURN: usize = 1 << 20;
/// Pieces of a reply handed to the system in one call.
const PIECES_AT_ONCE: usize = 16;
/// Buffers larger than this are given back once they are empty.
const KEEP_CAPACITY: usize = 1 << 20;
const LISTENER: Token = Token(0);
const WAKER: Token = Token(1);
const FIRST_CONN: ConnId = 2;

struct Loop {
    poll: Poll,
    listener: TcpListener,
    stop: Arc<AtomicBool>,
    state: State,
    conns: ConnMap<Conn>,
    next_id: ConnId,
    /// Connections with something to read that their turn, or their full output, left there.
    ready: VecDeque<ConnId>,
    /// Whom to send to after a connection's requests: itself, and waiters that they have woken, perhaps
    /// more than once. Empty between two connections.
    dirty: Vec<ConnId>,
    /// The last `accept` failed for want of descriptors or memory: try again soon.
    accept_again: bool,
    scratch: Vec<u8>,
    /// What the state says of clients, for others to read.
    gone: Arc<Mutex<Vec<String>>>,
}

struct Conn {
    stream: TcpStream,
    input: Vec<u8>,
    /// The input is not worth decoding before it is this long.
    need: usize,
    output: Output,
}

/// What a connection has waiting: bytes of its own, and values that it shares with the store.
#[derive(Default)]
struct Output {
    pieces: VecDeque<Waiting>,
    /// How much of the first piece has been sent.
    sent: usize,
    /// Bytes that have not been sent.
    left: usize,
}

enum Waiting {
    Own(Vec<u8>),
    Shared(Arc<Vec<u8>>),
}

impl Loop {
    fn new(mut listener: TcpListener, state: State) -> io::Result<(Self, Waker)> {
        let poll = Poll::new()?;
        poll.registry().register(&mut listener, LISTENER, Interest::READABLE)?;
        let waker = Waker::new(poll.registry(), WAKER)?;
        let server = Self {
            poll,
            listener,
            stop: Arc::default(),
            state,
            conns: ConnMap::default(),
            next_id: FIRST_CONN,
            ready: VecDeque::new(),
            dirty: Vec::new(),
            accept_again: false,
            scratch: vec![0; 1 << 16],
            gone: Arc::default(),
        };
        Ok((server, waker))
    }

    fn run(&mut self) {
        let mut events = Events::with_capacity(1024);
        // Acquire: pairs with the Release in `drop`.
        while !self.stop.load(Ordering::Acquire) {
            let timeout = match (self.ready.is_empty(), self.accept_again) {
                (false, _) => Some(Duration::ZERO),
                (true, true) => Some(Duration::from_millis(100)),
                (true, false) => None,
            };
            match self.poll.poll(&mut events, timeout) {
                Err(error) if error.kind() == ErrorKind::Interrupted => continue,
                // Only a broken descriptor table gets here; clients see their connections close.
                Err(_) => return,
                Ok(()) => {}
            }
            if self.accept_again {
                self.accept();
            }
            for event in &events {
                match event.token() {
                    LISTENER => self.accept(),
                    WAKER => {}
                    Token(id) => {
                        if event.is_writable() {
                            self.flush(id);
                        }
                        let ended = event.is_read_closed() || event.is_error();
                        if event.is_readable() || ended {
                            self.serve(id, ended);
                        }
                    }
                }
            }
            for _ in 0..self.ready.len() {
                if let Some(id) = self.ready.pop_front() {
                    self.serve(id, true);
                }
            }
            self.tell_gone();
        }
    }

    fn tell_gone(&self) {
        let mut gone = self.gone.lock();
        if !self.state.gone().eq(gone.iter()) {
            *gone = self.state.gone().map(str::to_owned).collect();
        }
    }

    fn accept(&mut self) {
        self.accept_again = false;
        loop {
            match self.listener.accept() {
                Ok((stream, _)) => {
                    // A connection that cannot be set up is closed by its drop; the client retries.
                    drop(self.add(stream));
                }
                Err(error) if error.kind() == ErrorKind::WouldBlock => return,
                Err(error) if error.kind() == ErrorKind::ConnectionAborted => {}
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                Err(_) => match self.state.silent() {
                    Some(silent) => self.close(silent),
                    None => {
                        self.accept_again = true;
                        return;
                    }
                },
            }
        }
    }

    fn add(&mut self, mut stream: TcpStream) -> io::Result<()> {
        let id = self.next_id;
        let both = Interest::READABLE | Interest::WRITABLE;
        self.poll.registry().register(&mut stream, Token(id), both)?;
        self.next_id += 1;
        self.state.connect(id);
        let conn = Conn { stream, input: Vec::new(), need: 1, output: Output::default() };
        self.conns.insert(id, conn);
        Ok(())
    }

    /// Reads and answers what `id` has sent, up to one turn. Unless `to_the_end`, a read that does
    /// not fill its buffer has taken all there was: what comes later is a new event, and asking
    /// whether there is more would be a system call for each request.
    fn serve(&mut self, id: ConnId, to_the_end: bool) {
        let (mut taken, mut drained) = (0, false);
        while taken < TURN {
            if self.answer(id).is_err() {
                return self.close(id);
            }
            let Some(conn) = self.conns.get_mut(&id) else { return };
            if conn.is_full() || drained {
                // Full: `flush` puts it back on the list once the client has read its replies.
                return;
            }
            match conn.stream.read(&mut self.scratch) {
                Ok(0) => return self.close(id),
                Ok(len) => {
                    taken += len;
                    drained = !to_the_end && len < self.scratch.len();
                    conn.input.extend_from_slice(&self.scratch[..len]);
                }
                Err(error) if error.kind() == ErrorKind::WouldBlock => return,
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                Err(_) => return self.close(id),
            }
        }
        self.ready.push_back(id);
    }

    /// Handles the whole requests in the connection's input, as long as its output is not full,
    /// and sends the replies. An error is for the connection to be closed.
    fn answer(&mut self, id: ConnId) -> Result<(), ProtocolError> {
        let Some(conn) = self.conns.get_mut(&id) else { return Ok(()) };
        let input = std::mem::take(&mut conn.input);
        let mut at = 0;
        let result = self.handle_all(id, &input, &mut at);
        if let Some(conn) = self.conns.get_mut(&id) {
            conn.put_back(input, at);
        }
        let mut dirty = std::mem::take(&mut self.dirty);
        dirty.drain(..).for_each(|id| self.flush(id));
        // Kept for its memory: `flush` adds nothing to it.
        self.dirty = dirty;
        result
    }

    fn handle_all(
        &mut self,
        id: ConnId,
        input: &[u8],
        at: &mut usize,
    ) -> Result<(), ProtocolError> {
        while let Some(conn) = self.conns.get_mut(&id)
            && input.len() - *at >= conn.need
            && !conn.is_full()
        {
            if !self.state.admits(id, input[*at]) {
                return Err(ProtocolError::NotValidated);
            }
            let request = match codec::decode(&input[*at..])? {
                Decoded::Request { request, len } => {
                    *at += len;
                    conn.need = 1;
                    request
                }
                Decoded::Incomplete { need } => {
                    conn.need = need;
                    break;
                }
            };
            let (conns, dirty) = (&mut self.conns, &mut self.dirty);
            self.state.handle(id, &request, &mut |to, piece| {
                if let Some(conn) = conns.get_mut(&to) {
                    conn.output.push(piece);
                    dirty.push(to);
                }
            })?;
        }
        Ok(())
    }

    /// Sends what `id` has waiting, as far as its socket takes it.
    fn flush(&mut self, id: ConnId) {
        let Some(conn) = self.conns.get_mut(&id) else { return };
        let was_full = conn.is_full();
        match conn.send() {
            Ok(()) if was_full && !conn.is_full() => self.ready.push_back(id),
            Ok(()) => {}
            Err(_) => self.close(id),
        }
    }

    fn close(&mut self, id: ConnId) {
        self.state.disconnect(id);
        if let Some(mut conn) = self.conns.remove(&id) {
            // Closing the descriptor deregisters it as well; nothing is lost if this fails.
            drop(self.poll.registry().deregister(&mut conn.stream));
        }
    }
}

impl Conn {
    fn is_full(&self) -> bool {
        self.output.left > HIGH_WATER
    }

    /// Keeps the rest of `input` from `at` on.
    fn put_back(&mut self, mut input: Vec<u8>, at: usize) {
        input.drain(..at);
        if input.is_empty() && input.capacity() > KEEP_CAPACITY {
            input = Vec::new();
        }
        self.input = input;
    }

    fn send(&mut self) -> io::Result<()> {
        while self.output.left > 0 {
            match self.output.write_to(&mut self.stream) {
                Ok(0) => return Err(ErrorKind::WriteZero.into()),
                Ok(len) => self.output.take(len),
                Err(error) if error.kind() == ErrorKind::WouldBlock => return Ok(()),
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                Err(error) => return Err(error),
            }
        }
        Ok(())
    }
}

impl Output {
    fn push(&mut self, piece: Piece<'_>) {
        self.left += piece.bytes().len();
        match (piece, self.pieces.back_mut()) {
            (Piece::Value(value), _) => self.pieces.push_back(Waiting::Shared(Arc::clone(value))),
            (Piece::Bytes(bytes), Some(Waiting::Own(own))) => own.extend_from_slice(bytes),
            (Piece::Bytes(bytes), _) => self.pieces.push_back(Waiting::Own(bytes.to_vec())),
        }
    }

    fn write_to(&self, stream: &mut TcpStream) -> io::Result<usize> {
        if self.pieces.len() == 1
            && let Some(only) = self.pieces.front()
        {
            // Most replies are one piece, and a list of one costs the kernel more.
            return stream.write(&only.bytes()[self.sent..]);
        }
        let mut slices = [IoSlice::new(&[]); PIECES_AT_ONCE];
        let mut count = 0;
        for (slice, piece) in slices.iter_mut().zip(&self.pieces) {
            let from = if count == 0 { self.sent } else { 0 };
            *slice = IoSlice::new(&piece.bytes()[from..]);
            count += 1;
        }
        stream.write_vectored(&slices[..count])
    }

    /// Forgets the first `len` bytes, which have been sent. The last buffer is kept, unless it is
    /// large: a connection's next reply will be as short as this one.
    fn take(&mut self, len: usize) {
        self.left -= len;
        self.sent += len;
        while let Some(first) = self.pieces.front()
            && self.sent >= first.bytes().len()
        {
            self.sent -= first.bytes().len();
            let last = self.pieces.len() == 1;
            match self.pieces.front_mut() {
                Some(Waiting::Own(own)) if last && own.capacity() <= KEEP_CAPACITY => {
                    own.clear();
                    return;
                }
                _ => drop(self.pieces.pop_front()),
            }
        }
    }
}

impl Waiting {
    fn bytes(&self) -> &[u8] {
        match self {
            Self::Own(bytes) => bytes,
            Self::Shared(value) => value,
        }
    }
}
