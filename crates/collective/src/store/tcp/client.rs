//! The store's client.
//!
//! A [`TcpStore`] keeps the connections that are not in use. An operation takes one, or opens one
//! if all are busy, so a thread that waits for a key never holds up another thread; a connection
//! on which anything failed is thrown away and the next operation opens a fresh one. Nothing is
//! sent twice: an addition whose reply was lost may have happened, and the caller is told.
//!
//! `set` is followed by a ping in the same write, and waits for the pong: when it returns, the
//! server has stored the value, and any rank told of it finds it.
//!
//! Invariant: a connection goes back on the list only with every reply read to its end.

use std::io::{ErrorKind, Read, Write};
use std::net::{IpAddr, TcpStream, ToSocketAddrs};
use std::os::fd::AsFd;
use std::time::{Duration, Instant};

use parking_lot::Mutex;

use super::codec::{
    CHECK_PRESENT, MAGIC, MAX_KEY_BYTES, MAX_KEYS, MAX_VALUE_BYTES, Request, WAIT_CANCELLED,
    WAIT_OVER,
};
use super::sockopt;
use crate::store::{Store, deadline};
use crate::{Error, Result};

/// A client of a [`TcpStoreServer`](super::server::TcpStoreServer), or of PyTorch's.
///
/// On the wire every key begins with `/`, as PyTorch's client puts it.
#[derive(Debug)]
pub struct TcpStore {
    host: String,
    port: u16,
    timeout: Duration,
    idle: Mutex<Vec<Connection>>,
}

impl TcpStore {
    /// Connects to the store at `host` (a name or an address) and `port`, trying again until
    /// `timeout`: the server may start after its clients. Later operations that do not wait for a
    /// key get the same `timeout`.
    ///
    /// # Errors
    ///
    /// [`Error::Rendezvous`] if nobody answers there as a store in time.
    pub fn connect(host: &str, port: u16, timeout: Duration) -> Result<Self> {
        let store = Self { host: host.to_owned(), port, timeout, idle: Mutex::default() };
        let connection = store.open()?;
        store.idle.lock().push(connection);
        Ok(store)
    }

    /// Where the store is, `host:port`.
    #[must_use]
    pub fn addr(&self) -> String {
        if self.host.contains(':') {
            format!("[{}]:{}", self.host, self.port)
        } else {
            format!("{}:{}", self.host, self.port)
        }
    }

    /// Opens a connection, with growing pauses between attempts.
    fn open(&self) -> Result<Connection> {
        let start = Instant::now();
        let deadline = deadline(self.timeout);
        let mut pause = FIRST_PAUSE;
        let mut why = "nobody there".to_owned();
        loop {
            match Connection::open(&self.host, self.port, deadline) {
                Ok(connection) => return Ok(connection),
                // That the time is over says less than what went wrong before.
                Err(error) if is_timeout(&error) => {}
                Err(error) => why = error.to_string(),
            }
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return Err(Error::Rendezvous {
                    addr: self.addr(),
                    reason: format!(
                        "no store answered within {:.1?} ({why}); is the launcher \
                         or rank 0 running there, and are MASTER_ADDR and MASTER_PORT right?",
                        start.elapsed()
                    ),
                });
            }
            std::thread::sleep(jittered(pause).min(left));
            pause = (pause * 2).min(LONGEST_PAUSE);
        }
    }

    /// Runs `talk` on a connection of its own.
    fn with<R>(
        &self,
        during: impl Fn() -> String,
        talk: impl FnOnce(&mut Connection) -> std::io::Result<R>,
    ) -> Result<R> {
        let idle = self.idle.lock().pop();
        let mut connection = match idle {
            Some(connection) => connection,
            None => self.open()?,
        };
        connection.deadline = deadline(self.timeout);
        match talk(&mut connection) {
            Ok(result) => {
                self.idle.lock().push(connection);
                Ok(result)
            }
            Err(error) => Err(self.failed(
                &during,
                &match error.kind() {
                    ErrorKind::UnexpectedEof
                    | ErrorKind::ConnectionReset
                    | ErrorKind::BrokenPipe => {
                        "the server closed the connection; it has ended, or it \
                                            refused the request"
                            .to_owned()
                    }
                    ErrorKind::TimedOut | ErrorKind::WouldBlock => {
                        format!("no answer within {:?}", self.timeout)
                    }
                    _ => error.to_string(),
                },
            )),
        }
    }

    fn failed(&self, during: &impl Fn() -> String, reason: &str) -> Error {
        Error::Store { store: self.addr(), during: during(), reason: reason.to_owned() }
    }

    /// The keys as they go over the wire, each within its limit.
    fn wire_keys(&self, keys: &[&str], during: &impl Fn() -> String) -> Result<Vec<String>> {
        if keys.len() > MAX_KEYS {
            return Err(self.failed(during, &format!("more than {MAX_KEYS} keys at once")));
        }
        if let Some(key) = keys.iter().find(|key| key.len() >= MAX_KEY_BYTES) {
            let limit = MAX_KEY_BYTES - 1;
            return Err(
                self.failed(during, &format!("a key of {} bytes; the limit is {limit}", key.len()))
            );
        }
        Ok(keys.iter().map(|key| format!("/{key}")).collect())
    }

    fn wire_key(&self, key: &str, during: &impl Fn() -> String) -> Result<String> {
        Ok(self.wire_keys(&[key], during)?.remove(0))
    }

    fn check_values(&self, values: &[&[u8]], during: &impl Fn() -> String) -> Result<()> {
        match values.iter().find(|value| value.len() > MAX_VALUE_BYTES) {
            None => Ok(()),
            Some(value) => Err(self.failed(
                during,
                &format!("a value of {} bytes; the limit is {MAX_VALUE_BYTES}", value.len()),
            )),
        }
    }

    /// Waits for `keys`, then reads something on the same connection.
    fn wait_then<R>(
        &self,
        keys: &[&str],
        timeout: Duration,
        during: impl Fn() -> String,
        read: impl FnOnce(&mut Connection, &[&[u8]]) -> std::io::Result<R>,
    ) -> Result<R> {
        let start = Instant::now();
        let wire = self.wire_keys(keys, &during)?;
        let wire: Vec<_> = wire.iter().map(String::as_bytes).collect();
        let answer = self.with(&during, |connection| {
            if !connection.wait(&wire, timeout, self.timeout)? {
                // Which are missing, for the error: one question for each key.
                let mut missing = Vec::new();
                for (key, name) in wire.iter().zip(keys).take(MOST_KEYS_NAMED) {
                    if !connection.check(&[*key])? {
                        missing.push((*name).to_owned());
                    }
                }
                return Ok(Err(missing));
            }
            connection.deadline = deadline(self.timeout);
            read(connection, &wire).map(Ok)
        })?;
        answer.map_err(|keys| Error::KeyTimeout {
            store: self.addr(),
            keys,
            waited: start.elapsed(),
        })
    }
}

impl Store for TcpStore {
    fn set(&self, key: &str, value: &[u8]) -> Result<()> {
        let during = || format!("set {key:?}");
        let wire = self.wire_key(key, &during)?;
        self.check_values(&[value], &during)?;
        self.with(during, |connection| {
            connection.send(&[Request::Set { key: wire.as_bytes(), value }, PING])?;
            connection.pong()
        })
    }

    fn get(&self, key: &str, timeout: Duration) -> Result<Vec<u8>> {
        let during = || format!("get {key:?}");
        self.wait_then(&[key], timeout, during, |connection, wire| {
            connection.send(&[Request::Get { key: wire[0] }])?;
            connection.blob()
        })
    }

    fn add(&self, key: &str, delta: i64) -> Result<i64> {
        let during = || format!("add {delta} to {key:?}");
        let wire = self.wire_key(key, &during)?;
        self.with(during, |connection| {
            connection.send(&[Request::Add { key: wire.as_bytes(), delta }])?;
            connection.i64()
        })
    }

    fn compare_set(&self, key: &str, expected: &[u8], desired: &[u8]) -> Result<Vec<u8>> {
        let during = || format!("compare_set {key:?}");
        let wire = self.wire_key(key, &during)?;
        self.check_values(&[expected, desired], &during)?;
        self.with(during, |connection| {
            let key = wire.as_bytes();
            connection.send(&[Request::CompareSet { key, expected, desired }])?;
            connection.blob()
        })
    }

    fn wait(&self, keys: &[&str], timeout: Duration) -> Result<()> {
        self.wait_then(keys, timeout, || format!("wait for {keys:?}"), |_, _| Ok(()))
    }

    fn check(&self, keys: &[&str]) -> Result<bool> {
        let during = || format!("check {keys:?}");
        let wire = self.wire_keys(keys, &during)?;
        let wire: Vec<_> = wire.iter().map(String::as_bytes).collect();
        self.with(during, |connection| connection.check(&wire))
    }

    fn delete_key(&self, key: &str) -> Result<bool> {
        let during = || format!("delete {key:?}");
        let wire = self.wire_key(key, &during)?;
        self.with(during, |connection| {
            connection.send(&[Request::DeleteKey { key: wire.as_bytes() }])?;
            Ok(connection.i64()? != 0)
        })
    }

    fn num_keys(&self) -> Result<i64> {
        self.with(
            || "num_keys".to_owned(),
            |connection| {
                connection.send(&[Request::NumKeys])?;
                connection.i64()
            },
        )
    }

    fn local_ip(&self) -> Option<IpAddr> {
        let addr = self.with(|| "local_ip".to_owned(), |connection| connection.stream.local_addr());
        addr.ok().map(|addr| addr.ip().to_canonical())
    }
}

/// One socket, and the moment by which the operation under way must be over.
#[derive(Debug)]
struct Connection {
    stream: TcpStream,
    deadline: Instant,
}

impl Connection {
    /// Connects and shakes hands: the magic number and a ping, in one write.
    fn open(host: &str, port: u16, deadline: Instant) -> std::io::Result<Self> {
        let mut last = std::io::Error::new(ErrorKind::NotFound, "the name has no address");
        for addr in (host, port).to_socket_addrs()? {
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

    /// Waits for `keys` until `timeout`; false if it passed first. A reply that crosses with the
    /// cancel counts: the keys did come.
    fn wait(
        &mut self,
        keys: &[&[u8]],
        timeout: Duration,
        io_timeout: Duration,
    ) -> std::io::Result<bool> {
        self.send(&[Request::Wait { keys: keys.to_vec() }])?;
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

    fn check(&mut self, keys: &[&[u8]]) -> std::io::Result<bool> {
        self.send(&[Request::Check { keys: keys.to_vec() }])?;
        Ok(self.u8()? == CHECK_PRESENT)
    }

    fn pong(&mut self) -> std::io::Result<()> {
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

    fn i64(&mut self) -> std::io::Result<i64> {
        let mut bytes = [0; 8];
        self.read(&mut bytes)?;
        Ok(i64::from_le_bytes(bytes))
    }

    fn blob(&mut self) -> std::io::Result<Vec<u8>> {
        let len = u64::try_from(self.i64()?).unwrap_or(u64::MAX);
        if len > MAX_BLOB_BYTES {
            let text = format!("the server sent a value of {len} bytes");
            return Err(std::io::Error::new(ErrorKind::InvalidData, text));
        }
        let mut blob = vec![0; usize::try_from(len).expect("the limit fits")];
        self.read(&mut blob)?;
        Ok(blob)
    }

    fn send(&mut self, requests: &[Request<'_>]) -> std::io::Result<()> {
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

fn is_timeout(error: &std::io::Error) -> bool {
    matches!(error.kind(), ErrorKind::TimedOut | ErrorKind::WouldBlock)
}

fn unexpected(reply: u8) -> std::io::Error {
    std::io::Error::new(ErrorKind::InvalidData, format!("the server answered a wait with {reply}"))
}

/// Between half and all of `pause`, so that many clients do not come at the same moment.
fn jittered(pause: Duration) -> Duration {
    use std::hash::{BuildHasher, RandomState};
    let random = RandomState::new().hash_one(0_u8) as u32;
    pause / 2 + pause.mul_f64(f64::from(random) / f64::from(u32::MAX)) / 2
}

const NONCE: u32 = 0x7374_6f72;
const PING: Request<'static> = Request::Ping { nonce: NONCE };
const FIRST_PAUSE: Duration = Duration::from_millis(10);
const LONGEST_PAUSE: Duration = Duration::from_secs(1);
const SHORTEST_WAIT: Duration = Duration::from_millis(1);
/// Longest value taken from a server. PyTorch's older server keeps values over its newer one's
/// limit, so this is above [`MAX_VALUE_BYTES`].
const MAX_BLOB_BYTES: u64 = 256 * 1024 * 1024;
/// Of the keys that did not come, how many are looked at to name them.
const MOST_KEYS_NAMED: usize = 1024;
