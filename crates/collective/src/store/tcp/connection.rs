//! One connection of a client: requests out, replies in, each before a deadline.
//!
//! Invariant: no length that a server sends is trusted beyond its limit.

use std::io::{ErrorKind, Read, Write};
use std::net::{SocketAddr, TcpStream, ToSocketAddrs};
use std::os::fd::{AsFd, OwnedFd};
use std::time::{Duration, Instant};

use mio::{Events, Interest, Token};

use super::codec::{CHECK_PRESENT, MAGIC, Request, WAIT_CANCELLED, WAIT_OVER};
use super::sockopt;
use crate::store::deadline;

/// One socket, and the moment by which the operation under way must be over.
#[derive(Debug)]
pub(super) struct Connection {
    pub(super) stream: TcpStream,
    pub(super) deadline: Instant,
}

impl Connection {
    /// Connects and shakes hands: the magic number and a ping, in one write.
    pub(super) fn open(host: &str, port: u16, deadline: Instant) -> std::io::Result<Self> {
        let addrs = (host, port).to_socket_addrs();
        let addrs = addrs.map_err(|error| std::io::Error::new(NO_SUCH_HOST, error))?;
        let stream = connect_any(&addrs.collect::<Vec<_>>(), deadline)?;
        stream.set_nodelay(true)?;
        sockopt::detect_dead_peer(stream.as_fd())?;
        let mut connection = Self { stream, deadline };
        connection.send(&[Request::Validate { magic: MAGIC }, PING])?;
        connection.pong()?;
        Ok(connection)
    }

    /// Sends a request that waits, for keys or at a barrier, until `timeout`; false if it passed
    /// first. A reply that crosses with the cancel counts: what was awaited did come.
    pub(super) fn wait(
        &mut self,
        request: Request<'_>,
        timeout: Duration,
        io_timeout: Duration,
    ) -> std::io::Result<bool> {
        self.send(&[request])?;
        self.deadline = deadline(timeout);
        match self.u8() {
            Ok(WAIT_OVER) => return Ok(true),
            Ok(other) => return Err(unexpected(other)),
            Err(error) if is_timeout(&error) => {}
            Err(error) => return Err(error),
        }
        self.deadline = deadline(io_timeout);
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
            Err(std::io::Error::new(ErrorKind::InvalidData, "what answers there is not a store"))
        }
    }

    fn u8(&mut self) -> std::io::Result<u8> {
        let mut byte = [0];
        self.read(&mut byte)?;
        Ok(byte[0])
    }

    /// How many items follow, of eight bytes at least: no more than an answer can have.
    pub(super) fn count(&mut self) -> std::io::Result<usize> {
        let count = self.i64()?;
        usize::try_from(count).ok().filter(|&count| count <= MOST_ITEMS).ok_or_else(|| {
            let text = format!("the server sent a list of {count} items");
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
            let text = format!("the server sent a value of {len} bytes");
            return Err(std::io::Error::new(ErrorKind::InvalidData, text));
        }
        let mut blob = vec![0; usize::try_from(len).expect("the limit fits")];
        self.read(&mut blob)?;
        Ok(blob)
    }

    pub(super) fn send(&mut self, requests: &[Request<'_>]) -> std::io::Result<()> {
        let mut bytes = Vec::new();
        requests.iter().for_each(|request| request.encode(&mut bytes));
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

    /// Fills `buffer` before the deadline. Only a read that got nothing at all may time out and
    /// leave the connection usable, which is how `wait` uses it: it reads one byte.
    fn read(&mut self, mut buffer: &mut [u8]) -> std::io::Result<()> {
        while !buffer.is_empty() {
            self.stream.set_read_timeout(Some(self.left()?))?;
            match self.stream.read(buffer) {
                Ok(0) => return Err(ErrorKind::UnexpectedEof.into()),
                Ok(len) => buffer = &mut buffer[len..],
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                // Woken a little early: `left` decides whether the time is over.
                Err(error) if is_timeout(&error) => {}
                Err(error) => return Err(error),
            }
        }
        Ok(())
    }

    /// Time left, never zero: the system takes a timeout of zero for none.
    fn left(&self) -> std::io::Result<Duration> {
        let left = self.deadline.saturating_duration_since(Instant::now());
        if left.is_zero() { Err(ErrorKind::TimedOut.into()) } else { Ok(left.max(SHORTEST_WAIT)) }
    }
}

/// Connects to all of the addresses at once, and returns the first that answers. If one refuses, whoever
/// listens may come later, so the others then have but a moment.
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
            end = end.min(Instant::now() + OTHERS);
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
    let nowhere = || std::io::Error::new(NO_SUCH_HOST, "the name has no address");
    Err(refused.unwrap_or_else(nowhere))
}

pub(super) fn is_timeout(error: &std::io::Error) -> bool {
    matches!(error.kind(), ErrorKind::TimedOut | ErrorKind::WouldBlock)
}

fn unexpected(reply: u8) -> std::io::Error {
    std::io::Error::new(ErrorKind::InvalidData, format!("the server answered a wait with {reply}"))
}

/// What a name without an address is.
pub(super) const NO_SUCH_HOST: ErrorKind = ErrorKind::NotFound;
const NONCE: u32 = 0x7374_6f72;
/// What is sent after requests without an answer, to know that they were taken.
pub(super) const PING: Request<'static> = Request::Ping { nonce: NONCE };
/// How long an address may take when another has refused.
const OTHERS: Duration = Duration::from_secs(1);
const SHORTEST_WAIT: Duration = Duration::from_millis(1);
/// Longest value taken from a server. PyTorch's older server keeps values over its newer one's
/// limit, so this is above what a server of ours takes.
const MAX_BLOB_BYTES: u64 = 256 * 1024 * 1024;
/// Most keys of a list: as many empty ones as an answer of ours has room for.
const MOST_ITEMS: usize = 32 * 1024 * 1024;

#[cfg(test)]
mod tests {
    use std::net::TcpListener;

    use super::*;

    /// A listener with no room for another connection: what comes is dropped, as on the way to a host
    /// that is not there.
    fn dead() -> (TcpListener, Vec<mio::net::TcpStream>) {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        sockopt::set_backlog(listener.as_fd(), 0).unwrap();
        let addr = listener.local_addr().unwrap();
        let waiting = (0..4).map(|_| mio::net::TcpStream::connect(addr).unwrap()).collect();
        (listener, waiting)
    }

    #[test]
    fn an_address_that_does_not_answer_holds_up_no_other() {
        let (dead, _waiting) = dead();
        for live in ["127.0.0.1:0", "[::1]:0"] {
            let Ok(live) = TcpListener::bind(live) else { continue };
            let [dead, live] = [&dead, &live].map(|listener| listener.local_addr().unwrap());
            let deadline = Instant::now() + Duration::from_secs(3);
            let stream = connect_any(&[dead, live], deadline).unwrap();
            assert_eq!(stream.peer_addr().unwrap(), live);
            assert!(Instant::now() < deadline, "it took all the time there was");
        }
    }

    #[test]
    fn addresses_of_which_none_answers_are_a_timeout_or_a_refusal() {
        let (dead, _waiting) = dead();
        let dead = dead.local_addr().unwrap();
        let refused = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap();
        let deadline = || Instant::now() + Duration::from_millis(50);
        let error = connect_any(&[dead], deadline()).unwrap_err();
        assert!(is_timeout(&error), "{error}");
        let error = connect_any(&[refused], deadline()).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::ConnectionRefused);
        // Whoever listens may come there, while nobody ever answers here.
        let deadline_far = Instant::now() + Duration::from_secs(30);
        let error = connect_any(&[dead, refused], deadline_far).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::ConnectionRefused);
        assert!(Instant::now() < deadline_far);
        assert_eq!(connect_any(&[], deadline()).unwrap_err().kind(), NO_SUCH_HOST);
    }
}
