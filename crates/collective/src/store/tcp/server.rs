//! The store's server: one thread with a poll loop around [`State`].
//!
//! The loop blocks only in `poll`: reads and writes are non-blocking, and names are not resolved.
//! So a client that sends part of a request or does not read its replies does not delay others.
//! When the process may open no more files, the oldest connection that has not validated is closed.
//! Replies are buffered; while a connection's buffer exceeds `HIGH_WATER`, its requests are not
//! read. Unfinished requests and unread replies count towards the store's limit; a connection that
//! exceeds it is closed.
//!
//! Invariant: `conns` and the state have the same connections, and a failed connection is removed
//! from both before another is served.

use std::collections::{HashMap, VecDeque};
use std::io::{self, ErrorKind, IoSlice, Read, Write};
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::Duration;

use mio::net::{TcpListener, TcpStream};
use mio::{Events, Interest, Poll, Token, Waker};
use parking_lot::Mutex;
use rustix::net::sockopt::set_tcp_nodelay;

use super::codec::{self, Progress, ProtocolError};
use super::state::{ConnId, Piece, Presence, State};
use crate::net::sockopt;
use crate::{Error, Result};

/// Serves a store until dropped.
///
/// A fork of its process has no server: dropping it there changes nothing. But the fork keeps the
/// port and the clients' connections open while it runs, even after the server has ended.
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
    waker: Waker,
    thread: Option<JoinHandle<()>>,
    /// Process that has the thread.
    pid: u32,
    disconnected: Arc<Mutex<Vec<String>>>,
}

impl TcpStoreServer {
    /// Listens on `addr` and starts the server's thread. Port 0 selects a free port, which
    /// [`port`](Self::port) returns.
    ///
    /// # Errors
    ///
    /// [`Error::Rendezvous`] if the address cannot be bound: the port is taken, or the address does
    /// not belong to this host.
    pub fn bind(addr: SocketAddr) -> Result<Self> {
        Self::bind_watching(addr, Vec::new())
    }

    /// Same as [`bind`](Self::bind), and watches clients, see [`disconnected`](Self::disconnected).
    ///
    /// # Errors
    ///
    /// Same as [`bind`](Self::bind).
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
        // On failure, the current limit still allows some clients.
        drop(sockopt::allow_open_files(CLIENTS, "serving a store"));
        sockopt::set_backlog(&listener, CLIENTS).map_err(refused)?;
        // Accepted connections inherit these.
        set_tcp_nodelay(&listener, true).map_err(|error| refused(error.into()))?;
        sockopt::detect_dead_peer(&listener).map_err(refused)?;
        let addr = listener.local_addr().map_err(refused)?;
        let (mut server, waker) = Loop::new(listener, State::watching(clients)).map_err(refused)?;
        let disconnected = Arc::clone(&server.disconnected);
        let thread = std::thread::Builder::new()
            .name("tcp-store".to_owned())
            .spawn(move || server.run())
            .map_err(|error| Error::io("starting the store's thread", &error))?;
        Ok(Self { addr, waker, thread: Some(thread), pid: std::process::id(), disconnected })
    }

    /// Same as [`bind_watching`](Self::bind_watching), on the addresses at which the ranks look for
    /// the store: on loopback if all are on this host, otherwise on all addresses, because the name
    /// that other hosts use may resolve to any of them.
    ///
    /// # Errors
    ///
    /// Same as [`bind`](Self::bind).
    pub fn bind_endpoint(endpoint: &Endpoint<'_>, clients: Vec<Presence>) -> Result<Self> {
        let bind = |ip, clients| Self::bind_watching(SocketAddr::new(ip, endpoint.port), clients);
        if let Some(loopback) = endpoint.loopback() {
            return bind(loopback, clients);
        }
        bind(Ipv6Addr::UNSPECIFIED.into(), clients.clone())
            .or_else(|_| bind(Ipv4Addr::UNSPECIFIED.into(), clients))
    }

    /// Returns the keys of the watched clients that disconnected after they set the key and before
    /// they were done. A client that sets its key again is removed from the list. A killed process
    /// is detected at once, an unreachable host after about 25 seconds. Empty in a fork, which has
    /// no server.
    #[must_use]
    pub fn disconnected(&self) -> Vec<String> {
        if self.forked() {
            // The server's thread, which exists only in the parent, may hold the lock.
            return Vec::new();
        }
        self.disconnected.lock().clone()
    }

    /// Returns the address that the server listens on.
    #[must_use]
    pub fn local_addr(&self) -> SocketAddr {
        self.addr
    }

    /// Returns the port that the server listens on.
    #[must_use]
    pub fn port(&self) -> u16 {
        self.addr.port()
    }

    fn forked(&self) -> bool {
        self.pid != std::process::id()
    }
}

impl Drop for TcpStoreServer {
    /// Closes all connections and ends the thread.
    fn drop(&mut self) {
        let Some(thread) = self.thread.take() else { return };
        if self.forked() {
            // The thread exists only in the parent, which shares the waker.
            std::mem::forget(thread);
        } else if self.waker.wake().is_ok() {
            // A panic of the thread has been printed.
            drop(thread.join());
        }
    }
}

/// Address at which the ranks of a job find their store.
#[derive(Clone, Copy, Debug)]
pub struct Endpoint<'a> {
    /// Name or address of the store's host, as the ranks get it.
    pub host: &'a str,
    /// Port; 0 selects a free one.
    pub port: u16,
    /// The addresses of `host`, as this host resolves it.
    pub addrs: &'a [IpAddr],
    /// Whether all ranks are known to be on this host.
    pub one_host: bool,
}

impl Endpoint<'_> {
    /// Returns the loopback address that all ranks can use. A host name that resolves to one here
    /// is not enough: Debian writes `127.0.1.1 <hostname>` to `/etc/hosts`, and other hosts resolve
    /// the name to another address.
    fn loopback(&self) -> Option<IpAddr> {
        let local = self.one_host || is_loopback(self.host);
        self.addrs.iter().copied().find(|ip| local && ip.is_loopback())
    }
}

/// Returns whether `host` means loopback on every host.
pub(crate) fn is_loopback(host: &str) -> bool {
    host == "localhost" || host.parse::<IpAddr>().is_ok_and(|ip| ip.is_loopback())
}

/// Bytes of unsent replies beyond which a connection's requests are not read.
const HIGH_WATER: usize = 1 << 20;
/// Number of clients for which the limit on open files is raised.
const CLIENTS: usize = 16 << 10;
/// Number of bytes read from one connection before others are served.
const READ_BUDGET: usize = 1 << 20;
/// Maximum number of pieces in one `writev`.
const PIECES_AT_ONCE: usize = 16;
/// Bytes of a connection's buffers that do not count towards the store's limit: those of a small
/// request and its reply, so that a full store still serves them.
const UNCOUNTED: usize = 16 << 10;
/// Buffers with a larger capacity that are empty, or almost, are freed.
const KEEP_CAPACITY: usize = 1 << 20;
const LISTENER: Token = Token(0);
const WAKER: Token = Token(1);
const FIRST_CONN: ConnId = 2;

struct Loop {
    poll: Poll,
    listener: TcpListener,
    state: State,
    conns: HashMap<ConnId, Conn>,
    next_id: ConnId,
    /// Connections with unread input, because of the read budget or full output.
    ready: VecDeque<ConnId>,
    /// Connections that got output from one connection's requests, possibly with duplicates. Empty
    /// before the next connection is served.
    dirty: Vec<ConnId>,
    /// Whether the last `accept` failed for lack of descriptors or memory, and must be retried.
    accept_again: bool,
    scratch: Vec<u8>,
    /// A copy of [`State::disconnected`], for other threads.
    disconnected: Arc<Mutex<Vec<String>>>,
}

struct Conn {
    stream: TcpStream,
    input: Vec<u8>,
    /// Minimum length of `input` that the next request needs.
    need: usize,
    /// The parsed part of that request.
    progress: Progress,
    output: Output,
    /// Bytes of `input` and `output` that the state counts.
    counted: usize,
}

/// A connection's unsent replies.
#[derive(Default)]
struct Output {
    /// Long values are shared with the store; the others are ours alone, and are appended to.
    pieces: VecDeque<Arc<Vec<u8>>>,
    /// Bytes of the first piece that have been sent.
    sent: usize,
    /// Bytes that have not been sent.
    left: usize,
}

impl Loop {
    fn new(mut listener: TcpListener, state: State) -> io::Result<(Self, Waker)> {
        let poll = Poll::new()?;
        poll.registry().register(&mut listener, LISTENER, Interest::READABLE)?;
        let waker = Waker::new(poll.registry(), WAKER)?;
        let server = Self {
            poll,
            listener,
            state,
            conns: HashMap::new(),
            next_id: FIRST_CONN,
            ready: VecDeque::new(),
            dirty: Vec::new(),
            accept_again: false,
            scratch: vec![0; 1 << 16],
            disconnected: Arc::default(),
        };
        Ok((server, waker))
    }

    fn run(&mut self) {
        let mut events = Events::with_capacity(1024);
        while self.turn(&mut events, None) {}
    }

    /// Handles what has happened, or waits for it for at most `patience`; returns whether the
    /// server goes on.
    fn turn(&mut self, events: &mut Events, patience: Option<Duration>) -> bool {
        let timeout = match (self.ready.is_empty(), self.accept_again) {
            (false, _) => Some(Duration::ZERO),
            (true, true) => Some(Duration::from_millis(100)),
            (true, false) => patience,
        };
        match self.poll.poll(events, timeout) {
            Err(error) if error.kind() == ErrorKind::Interrupted => return true,
            // Not expected of a valid poll instance; closes all connections.
            Err(_) => return false,
            Ok(()) => {}
        }
        if self.accept_again {
            self.accept();
        }
        for event in &*events {
            match event.token() {
                LISTENER => self.accept(),
                WAKER => return false,
                Token(id) => {
                    if event.is_writable() {
                        self.flush(id);
                        // Cannot fail: only `answer` makes the buffers longer.
                        drop(self.count_buffers(id));
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
        self.publish_disconnected();
        true
    }

    fn publish_disconnected(&self) {
        let mut disconnected = self.disconnected.lock();
        if !self.state.disconnected().eq(disconnected.iter()) {
            *disconnected = self.state.disconnected().map(str::to_owned).collect();
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
                Err(_) => match self.state.oldest_unvalidated() {
                    Some(id) => self.close(id),
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
        let (input, progress, output) = Default::default();
        self.conns.insert(id, Conn { stream, input, need: 1, progress, output, counted: 0 });
        Ok(())
    }

    /// Reads and handles requests of `id`, up to the read budget. Unless `to_the_end`, stops after
    /// a read that does not fill the buffer: later input is a new event, and another read would
    /// cost a system call per request.
    fn serve(&mut self, id: ConnId, to_the_end: bool) {
        let (mut taken, mut drained) = (0, false);
        while taken < READ_BUDGET {
            if self.answer(id).is_err() {
                return self.close(id);
            }
            let Some(conn) = self.conns.get_mut(&id) else { return };
            if conn.is_full() || drained {
                // If it is full, `flush` adds it to `ready` once the client has read its replies.
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

    /// Handles the complete requests in the connection's input while its output is not full, and
    /// sends the replies. After an error the connection must be closed.
    fn answer(&mut self, id: ConnId) -> Result<(), ProtocolError> {
        let Some(conn) = self.conns.get_mut(&id) else { return Ok(()) };
        let input = std::mem::take(&mut conn.input);
        // The requests in it are counted as values and waits.
        self.count_buffers(id)?;
        let mut at = 0;
        let result = self.handle_all(id, &input, &mut at);
        if let Some(conn) = self.conns.get_mut(&id) {
            conn.put_back(input, at);
        }
        let mut dirty = std::mem::take(&mut self.dirty);
        dirty.drain(..).for_each(|id| self.flush(id));
        // Reuses the allocation; `flush` adds nothing to `dirty`.
        self.dirty = dirty;
        result.and_then(|()| self.count_buffers(id))
    }

    fn count_buffers(&mut self, id: ConnId) -> Result<(), ProtocolError> {
        let Some(conn) = self.conns.get_mut(&id) else { return Ok(()) };
        let bytes = (conn.input.len() + conn.output.unshared()).saturating_sub(UNCOUNTED);
        self.state.count_buffer(&mut conn.counted, bytes)
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
            let (request, len) = match codec::resume(&input[*at..], &mut conn.progress) {
                Err(ProtocolError::Incomplete { need }) => {
                    conn.need = need;
                    break;
                }
                decoded => decoded?,
            };
            (conn.need, conn.progress, *at) = (1, Progress::default(), *at + len);
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

    /// Sends output of `id` as far as possible without blocking.
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
            // Cannot fail: it is not more.
            drop(self.state.count_buffer(&mut conn.counted, 0));
            // An error is harmless: closing the descriptor also deregisters it.
            drop(self.poll.registry().deregister(&mut conn.stream));
        }
    }
}

impl Conn {
    fn is_full(&self) -> bool {
        self.output.left > HIGH_WATER
    }

    /// Keeps the input from `at` on for the next call.
    fn put_back(&mut self, mut input: Vec<u8>, at: usize) {
        input.drain(..at);
        if input.capacity() > KEEP_CAPACITY.max(2 * input.len()) {
            input.shrink_to_fit();
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
        match (piece, self.pieces.back_mut().and_then(Arc::get_mut)) {
            (Piece::Value(value), _) => self.pieces.push_back(Arc::clone(value)),
            (Piece::Bytes(bytes), Some(unshared)) => unshared.extend_from_slice(bytes),
            (Piece::Bytes(bytes), None) => self.pieces.push_back(Arc::new(bytes.to_vec())),
        }
    }

    /// Bytes of the pieces that the store does not hold.
    fn unshared(&self) -> usize {
        let unshared = self.pieces.iter().filter(|piece| Arc::strong_count(piece) == 1);
        unshared.map(|piece| piece.len()).sum()
    }

    fn write_to(&self, stream: &mut TcpStream) -> io::Result<usize> {
        if self.pieces.len() == 1
            && let Some(only) = self.pieces.front()
        {
            // Most replies are one piece, for which `write` is faster than `writev`.
            return stream.write(&only[self.sent..]);
        }
        let mut slices = [IoSlice::new(&[]); PIECES_AT_ONCE];
        let mut count = 0;
        for (slice, piece) in slices.iter_mut().zip(&self.pieces) {
            let from = if count == 0 { self.sent } else { 0 };
            *slice = IoSlice::new(&piece[from..]);
            count += 1;
        }
        stream.write_vectored(&slices[..count])
    }

    /// Removes the first `len` bytes, which have been sent. Keeps the last buffer for the next
    /// reply, unless it is large.
    fn take(&mut self, len: usize) {
        self.left -= len;
        self.sent += len;
        while let Some(first) = self.pieces.front()
            && self.sent >= first.len()
        {
            self.sent -= first.len();
            let last = self.pieces.len() == 1;
            match self.pieces.front_mut().and_then(Arc::get_mut) {
                Some(owned) if last && owned.capacity() <= KEEP_CAPACITY => {
                    owned.clear();
                    return;
                }
                _ => drop(self.pieces.pop_front()),
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::codec::{MAGIC, MAX_STORE_BYTES, Request};
    use super::*;
    use std::time::Instant;

    const LONG: Duration = Duration::from_secs(60);

    /// Starts to send requests, all but the last `missing` bytes, on a new connection.
    fn send(
        addr: SocketAddr,
        requests: &[Request<'_>],
        missing: usize,
    ) -> JoinHandle<std::net::TcpStream> {
        let mut bytes = Vec::new();
        Request::Validate { magic: MAGIC }.encode(&mut bytes);
        requests.iter().for_each(|request| request.encode(&mut bytes));
        std::thread::spawn(move || {
            let mut stream = std::net::TcpStream::connect(addr).unwrap();
            stream.set_read_timeout(Some(LONG)).unwrap();
            // Fails if the server closes the connection.
            drop(stream.write_all(&bytes[..bytes.len() - missing]));
            stream
        })
    }

    /// Reads until the server closes the connection; returns the number of bytes.
    fn read_all(stream: JoinHandle<std::net::TcpStream>) -> usize {
        let mut bytes = Vec::new();
        match stream.join().unwrap().read_to_end(&mut bytes) {
            Err(error) if error.kind() != ErrorKind::ConnectionReset => panic!("{error}"),
            _ => bytes.len(),
        }
    }

    /// Serves until `len` connections have come, of which `open` are left with `counted` bytes in
    /// their buffers.
    fn serve_until(server: &mut Loop, [len, open, counted]: [usize; 3]) {
        let (mut events, began) = (Events::with_capacity(16), Instant::now());
        loop {
            let bytes = server.conns.values().map(|conn| conn.counted).sum();
            let now = [server.next_id - FIRST_CONN, server.conns.len(), bytes];
            if now == [len, open, counted] {
                return;
            }
            assert!(began.elapsed() < LONG, "{now:?} for {:?}", [len, open, counted]);
            assert!(server.turn(&mut events, Some(Duration::from_millis(10))), "the server ended");
        }
    }

    #[test]
    fn unfinished_requests_and_unread_replies_count_towards_the_store_limit() {
        let listener = TcpListener::bind(([127, 0, 0, 1], 0).into()).unwrap();
        let (addr, mut state) = (listener.local_addr().unwrap(), State::new());
        state.fill(MAX_STORE_BYTES - (1 << 20));
        let (mut server, _waker) = Loop::new(listener, state).unwrap();
        let server = &mut server;
        let value = vec![7; 600_000];
        let set = Request::Set { key: b"k", value: &value };
        let ping = Request::Ping { nonce: 0 };
        let mut bytes = Vec::new();
        set.encode(&mut bytes);
        let unfinished = bytes.len() - 1 - UNCOUNTED;
        // Two unfinished requests are too much, and the first is counted no longer once it is
        // finished or closed.
        for n in (0..9).step_by(3) {
            let first = send(addr, &[ping.clone(), set.clone()], 1);
            serve_until(server, [n + 1, 1, unfinished]);
            let second = send(addr, std::slice::from_ref(&set), 1);
            serve_until(server, [n + 2, 1, unfinished]);
            assert_eq!(read_all(second), 0);
            let third = send(addr, &[ping.clone(), set.clone()], 1);
            serve_until(server, [n + 3, 1, unfinished]);
            assert_eq!(read_all(third), 4);
            drop(first.join().unwrap());
            serve_until(server, [n + 3, 0, 0]);
        }
        let whole = send(addr, &[ping.clone(), set.clone()], 1);
        serve_until(server, [10, 1, unfinished]);
        let mut whole = whole.join().unwrap();
        whole.write_all(&[7, 13, 0, 0, 0, 0]).unwrap();
        serve_until(server, [10, 1, 0]);
        whole.read_exact(&mut [0; 8]).unwrap();
        drop(whole);
        serve_until(server, [10, 0, 0]);
        // A reply of 40 MB that is not read.
        let [value, key] = [&[7; 2000][..], b"k"];
        let set = Request::Set { key, value };
        let get = Request::MultiGet { keys: vec![key; 20_000] };
        let unread = send(addr, &[set, get], 0);
        serve_until(server, [11, 0, 0]);
        assert!(read_all(unread) < 30_000_000);
        // Small requests are still served.
        let small = send(addr, &[ping, Request::Set { key, value: b"" }], 1);
        let answered = std::thread::spawn(|| small.join().unwrap().read_exact(&mut [0; 4]));
        serve_until(server, [12, 0, 0]);
        answered.join().unwrap().unwrap();
    }

    /// For example a host name under which `/etc/hosts` has 127.0.1.1.
    #[test]
    fn a_host_name_on_loopback_is_served_to_other_hosts() {
        let debian = [IpAddr::from([127, 0, 1, 1])];
        let both = [Ipv6Addr::LOCALHOST.into(), Ipv4Addr::LOCALHOST.into()];
        let remote = [IpAddr::from([10, 0, 0, 1])];
        for (host, addrs, one_host, loopback) in [
            ("node1", &debian[..], false, None),
            ("node1", &debian, true, Some(debian[0])),
            ("127.0.1.1", &debian, false, Some(debian[0])),
            ("::1", &both[..1], false, Some(both[0])),
            ("localhost", &both, false, Some(both[0])),
            ("node1", &remote, true, None),
            ("localhost", &[], false, None),
        ] {
            let endpoint = Endpoint { host, port: 0, addrs, one_host };
            assert_eq!(endpoint.loopback(), loopback, "{endpoint:?}");
        }
        let endpoint = Endpoint { host: "node1", port: 0, addrs: &debian, one_host: false };
        let server = TcpStoreServer::bind_endpoint(&endpoint, Vec::new()).unwrap();
        assert!(server.local_addr().ip().is_unspecified());
    }
}
