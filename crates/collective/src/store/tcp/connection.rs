//! One connection of a client: requests out, replies in, each before a deadline.
//!
//! Invariant: no length that a server sends is trusted beyond its limit.

use std::io::{ErrorKind, Read, Write};
use std::net::{TcpStream, ToSocketAddrs};
use std::os::fd::AsFd;
use std::time::{Duration, Instant};

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
        let mut last = std::io::Error::new(NO_SUCH_HOST, "the name has no address");
        let addrs = (host, port).to_socket_addrs();
        for addr in addrs.map_err(|error| std::io::Error::new(NO_SUCH_HOST, error))? {
            let left = deadline.saturating_duration_since(Instant::now());
            match TcpStream::connect_timeout(&addr, left.max(SHORTEST_WAIT)) {
                Err(error) => last = error,
                Ok(stream) => {
                    stream.set_nodelay(true)?;
                    sockopt::detect_dead_peer(stream.as_fd())?;
                    let mut connection = Self { stream, deadline };
                    connection.send(&[Request::Validate { magic: MAGIC }, PING])?;
                    connection.pong()?;
                    return Ok(connection);
                }
            }
        }
        Err(last)
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
const SHORTEST_WAIT: Duration = Duration::from_millis(1);
/// Longest value taken from a server. PyTorch's older server keeps values over its newer one's
/// limit, so this is above what a server of ours takes.
const MAX_BLOB_BYTES: u64 = 256 * 1024 * 1024;
/// Most keys of a list: as many empty ones as an answer of ours has room for.
const MOST_ITEMS: usize = 32 * 1024 * 1024;
