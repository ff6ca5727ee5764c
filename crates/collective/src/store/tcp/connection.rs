//! One client connection: sends requests and reads replies, each before a deadline.
//!
//! Invariant: every length sent by a server is checked against a limit.

use std::io::{ErrorKind, Read, Write};
use std::net::{SocketAddr, TcpStream, ToSocketAddrs};
use std::os::fd::OwnedFd;
use std::time::{Duration, Instant};

use mio::{Events, Interest, Token};
use rustix::io::Errno;
use rustix::net::RecvFlags;

use super::codec::{self, CHECK_PRESENT, MAGIC, Request, WAIT_CANCELLED, WAIT_OVER};
use crate::net::sockopt;

/// One socket, and the deadline of the operation in progress.
#[derive(Debug)]
pub(super) struct Connection {
    pub(super) stream: TcpStream,
    pub(super) deadline: Instant,
}

impl Connection {
    /// Connects and sends the handshake: the magic number and a ping, in one write.
    pub(super) fn open(host: &str, port: u16, deadline: Instant) -> std::io::Result<Self> {
        let addrs = (host, port).to_socket_addrs();
        let addrs = addrs.map_err(|error| std::io::Error::new(NO_SUCH_HOST, error))?;
        let stream = connect_any(&addrs.collect::<Vec<_>>(), deadline)?;
        stream.set_nodelay(true)?;
        sockopt::detect_dead_peer(&stream)?;
        let mut connection = Self { stream, deadline };
        connection.send(&[Request::Validate { magic: MAGIC }, PING])?;
        connection.pong()?;
        Ok(connection)
    }

    /// Returns whether the server has closed this idle connection, on which it has nothing to send.
    pub(super) fn is_stale(&self) -> bool {
        let flags = RecvFlags::PEEK | RecvFlags::DONTWAIT;
        rustix::net::recv(&self.stream, &mut [0_u8], flags).err() != Some(Errno::AGAIN)
    }

    /// Sends a request that waits, for keys or at a barrier, until `until`; returns false on
    /// timeout, which the server must confirm before the deadline. A reply that the server sent
    /// before it read the cancel request counts as success.
    pub(super) fn wait(&mut self, request: Request<'_>, until: Instant) -> std::io::Result<bool> {
        let deadline = self.deadline;
        self.send(&[request])?;
        self.deadline = until;
        match self.u8() {
            Ok(WAIT_OVER) => return Ok(true),
            Ok(other) => return Err(unexpected(other)),
            Err(error) if is_timeout(&error) => {}
            Err(error) => return Err(error),
        }
        self.deadline = deadline;
        self.send(&[Request::CancelWait])?;
        match self.u8()? {
            WAIT_CANCELLED => Ok(false),
            WAIT_OVER => match self.u8()? {
                WAIT_CANCELLED => Ok(true),
                other => Err(unexpected(other)),
            },
            other => Err(unexpected(other)),
        }
    }

    pub(super) fn check(&mut self, keys: &[&[u8]]) -> std::io::Result<bool> {
        self.send(&[Request::Check { keys: keys.to_vec() }])?;
        Ok(self.u8()? == CHECK_PRESENT)
    }

    pub(super) fn pong(&mut self) -> std::io::Result<()> {
        let mut nonce = [0; 4];
        self.read(&mut nonce)?;
        if nonce == NONCE.to_le_bytes() {
            Ok(())
        } else {
            Err(std::io::Error::new(ErrorKind::InvalidData, "the peer is not a store"))
        }
    }

    fn u8(&mut self) -> std::io::Result<u8> {
        let mut byte = [0];
        self.read(&mut byte)?;
        Ok(byte[0])
    }

    /// Reads the number of items that follow, each at least eight bytes long.
    pub(super) fn count(&mut self) -> std::io::Result<usize> {
        let count = self.i64()?;
        usize::try_from(count).ok().filter(|&count| count <= MAX_ITEMS).ok_or_else(|| {
            let text = format!("the server sent a list of {count} items; limit {MAX_ITEMS}");
            std::io::Error::new(ErrorKind::InvalidData, text)
        })
    }

    pub(super) fn i64(&mut self) -> std::io::Result<i64> {
        let mut bytes = [0; 8];
        self.read(&mut bytes)?;
        Ok(i64::from_le_bytes(bytes))
    }

    pub(super) fn blob(&mut self) -> std::io::Result<Vec<u8>> {
        let len = u64::try_from(self.i64()?).unwrap_or(u64::MAX);
        if len > MAX_BLOB_BYTES {
            let text = format!("the server sent a value of {len} bytes; limit {MAX_BLOB_BYTES}");
            return Err(std::io::Error::new(ErrorKind::InvalidData, text));
        }
        let mut blob = vec![0; usize::try_from(len).expect("the limit fits in a usize")];
        self.read(&mut blob)?;
        Ok(blob)
    }

    /// Sends requests. One that the server would refuse is an error of the kind `InvalidInput`,
    /// which names the length that exceeds its limit, and nothing is sent.
    pub(super) fn send(&mut self, requests: &[Request<'_>]) -> std::io::Result<()> {
        let mut bytes = Vec::new();
        for request in requests {
            let start = bytes.len();
            request.encode(&mut bytes);
            let refused = |error| std::io::Error::new(ErrorKind::InvalidInput, error);
            codec::decode(&bytes[start..]).map_err(refused)?;
        }
        let mut rest = &bytes[..];
        while !rest.is_empty() {
            self.stream.set_write_timeout(Some(self.left()?))?;
            match self.stream.write(rest) {
                Ok(0) => return Err(ErrorKind::WriteZero.into()),
                Ok(len) => rest = &rest[len..],
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                Err(error) => return Err(error),
            }
        }
        Ok(())
    }

    /// Fills `buffer` before the deadline. A timeout leaves the connection usable only if nothing
    /// was read. `wait` relies on this: it reads one byte.
    fn read(&mut self, mut buffer: &mut [u8]) -> std::io::Result<()> {
        while !buffer.is_empty() {
            self.stream.set_read_timeout(Some(self.left()?))?;
            match self.stream.read(buffer) {
                Ok(0) => return Err(ErrorKind::UnexpectedEof.into()),
                Ok(len) => buffer = &mut buffer[len..],
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                // The timeout may expire slightly early: `left` checks the deadline.
                Err(error) if is_timeout(&error) => {}
                Err(error) => return Err(error),
            }
        }
        Ok(())
    }

    /// Returns the time left, never zero: a zero socket timeout would mean no timeout.
    fn left(&self) -> std::io::Result<Duration> {
        let left = self.deadline.saturating_duration_since(Instant::now());
        if left.is_zero() { Err(ErrorKind::TimedOut.into()) } else { Ok(left.max(SHORTEST_WAIT)) }
    }
}

/// Connects to all addresses at once, and returns the first connection. If one address refuses, the
/// others get only a short time, because the caller retries: the server may start later.
fn connect_any(addrs: &[SocketAddr], deadline: Instant) -> std::io::Result<TcpStream> {
    let mut refused = None;
    let mut poll = mio::Poll::new()?;
    let mut trying: Vec<Option<mio::net::TcpStream>> = Vec::new();
    for (index, addr) in addrs.iter().enumerate() {
        let begun = mio::net::TcpStream::connect(*addr).and_then(|mut stream| {
            poll.registry().register(&mut stream, Token(index), Interest::WRITABLE)?;
            Ok(stream)
        });
        trying.push(begun.map_err(|error| refused = Some(error)).ok());
    }
    let mut events = Events::with_capacity(addrs.len().max(1));
    let mut end = deadline.max(Instant::now() + SHORTEST_WAIT);
    while trying.iter().any(Option::is_some) {
        if refused.is_some() {
            end = end.min(Instant::now() + TIME_AFTER_REFUSAL);
        }
        let left = end.saturating_duration_since(Instant::now());
        if left.is_zero() {
            return Err(refused.unwrap_or_else(|| ErrorKind::TimedOut.into()));
        }
        match poll.poll(&mut events, Some(left)) {
            Err(error) if error.kind() == ErrorKind::Interrupted => continue,
            other => other?,
        }
        for event in &events {
            let Some(stream) = trying[event.token().0].take() else { continue };
            match stream.take_error()? {
                None => {
                    let stream = TcpStream::from(OwnedFd::from(stream));
                    return stream.set_nonblocking(false).map(|()| stream);
                }
                error => refused = error,
            }
        }
    }
    let no_address = || std::io::Error::new(NO_SUCH_HOST, "the name has no address");
    Err(refused.unwrap_or_else(no_address))
}

pub(super) fn is_timeout(error: &std::io::Error) -> bool {
    matches!(error.kind(), ErrorKind::TimedOut | ErrorKind::WouldBlock)
}

fn unexpected(reply: u8) -> std::io::Error {
    std::io::Error::new(ErrorKind::InvalidData, format!("unexpected reply {reply} to a wait"))
}

/// Error kind of a name without an address.
pub(super) const NO_SUCH_HOST: ErrorKind = ErrorKind::NotFound;
const NONCE: u32 = 0x7374_6f72;
/// Sent after requests without a reply, to learn that the server has processed them.
pub(super) const PING: Request<'static> = Request::Ping { nonce: NONCE };
/// Time left for the other addresses once one has refused.
const TIME_AFTER_REFUSAL: Duration = Duration::from_secs(1);
const SHORTEST_WAIT: Duration = Duration::from_millis(1);
/// Maximum length of a value accepted from a server. It exceeds our server's limit, because
/// PyTorch's older server stores larger values than its newer one.
const MAX_BLOB_BYTES: u64 = 256 * 1024 * 1024;
/// Maximum number of keys in a list: so many empty keys fit in a reply of our server.
const MAX_ITEMS: usize = 32 * 1024 * 1024;

#[cfg(test)]
mod tests {
    use std::net::TcpListener;

    use super::*;

    /// A listener with a full backlog: further connections are dropped, as if the host did not
    /// exist.
    fn dead() -> (TcpListener, Vec<mio::net::TcpStream>) {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        sockopt::set_backlog(&listener, 0).unwrap();
        let addr = listener.local_addr().unwrap();
        let waiting = (0..4).map(|_| mio::net::TcpStream::connect(addr).unwrap()).collect();
        (listener, waiting)
    }

    #[test]
    fn an_unresponsive_address_does_not_delay_another() {
        let (dead, _waiting) = dead();
        for live in ["127.0.0.1:0", "[::1]:0"] {
            let Ok(live) = TcpListener::bind(live) else { continue };
            let [dead, live] = [&dead, &live].map(|listener| listener.local_addr().unwrap());
            let deadline = Instant::now() + Duration::from_secs(3);
            let stream = connect_any(&[dead, live], deadline).unwrap();
            assert_eq!(stream.peer_addr().unwrap(), live);
            assert!(Instant::now() < deadline, "it took the whole timeout");
        }
    }

    #[test]
    fn unreachable_addresses_are_a_timeout_or_a_refusal() {
        let (dead, _waiting) = dead();
        let dead = dead.local_addr().unwrap();
        let refused = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap();
        let deadline = || Instant::now() + Duration::from_millis(50);
        let error = connect_any(&[dead], deadline()).unwrap_err();
        assert!(is_timeout(&error), "{error}");
        let error = connect_any(&[refused], deadline()).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::ConnectionRefused);
        // A listener may start at the refusing address later; the dead one never answers.
        let deadline_far = Instant::now() + Duration::from_secs(30);
        let error = connect_any(&[dead, refused], deadline_far).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::ConnectionRefused);
        assert!(Instant::now() < deadline_far);
        assert_eq!(connect_any(&[], deadline()).unwrap_err().kind(), NO_SUCH_HOST);
    }
}
