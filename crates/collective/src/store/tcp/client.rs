//! The store's client.
//!
//! A [`TcpStore`] keeps its idle connections. An operation takes one, or opens one if all are busy,
//! so a thread that waits for a key never blocks another thread; a connection on which anything
//! failed is closed, and the next operation opens a new one, also in place of an idle one that a
//! restarted server has closed. Requests are never retried: an `add`
//! whose reply was lost returns an error, and may have taken effect.
//!
//! `set` is followed by a ping in the same write, and waits for the pong: when it returns, the
//! server has stored the value, and any rank notified afterwards finds it.
//!
//! Invariant: a connection is idle only when every reply on it has been read completely, and it
//! belongs to this process: a forked child closes its copies of its parent's connections, on which
//! it would read the parent's replies, and opens its own.

use std::io::ErrorKind;
use std::net::IpAddr;
use std::time::{Duration, Instant};

use parking_lot::{Mutex, MutexGuard};

use super::codec::{MAX_STORE_BYTES, Request};
use super::connection::{Connection, NO_SUCH_HOST, PING, is_timeout};
use crate::store::values::leading_number;
use crate::store::{Store, deadline};
use crate::{Error, Result};

/// A client of a [`TcpStoreServer`](super::server::TcpStoreServer), or of PyTorch's.
///
/// On the wire every key has the prefix `/`, as with PyTorch's client. A fork of the process may
/// use it, too: it opens connections of its own.
#[derive(Debug)]
pub struct TcpStore {
    host: String,
    port: u16,
    timeout: Duration,
    /// Process that made it.
    pid: u32,
    idle: Mutex<Idle>,
}

/// The idle connections of a process.
#[derive(Debug)]
struct Idle {
    pid: u32,
    connections: Vec<Connection>,
}

impl TcpStore {
    /// Connects to the store at `host` (a name or an address) and `port`, retrying until `timeout`:
    /// the server may start after its clients. Later operations that do not wait for a key have the
    /// same `timeout`; those that do, and get no answer, end then, or two seconds after their own
    /// if that is later.
    ///
    /// # Errors
    ///
    /// [`Error::Rendezvous`] if no store answers there in time; if `host` is a name without an
    /// address, after three seconds, because retrying seldom helps.
    pub fn connect(host: &str, port: u16, timeout: Duration) -> Result<Self> {
        let pid = std::process::id();
        let idle = Mutex::new(Idle { pid, connections: Vec::new() });
        let store = Self { host: host.to_owned(), port, timeout, pid, idle };
        let connection = store.open(deadline(timeout))?;
        store.keep(connection);
        Ok(store)
    }

    /// Returns the store's address, `host:port`.
    #[must_use]
    pub fn addr(&self) -> String {
        if self.host.contains(':') {
            format!("[{}]:{}", self.host, self.port)
        } else {
            format!("{}:{}", self.host, self.port)
        }
    }

    /// Registers this client among the `world_size` that a PyTorch server waits for before it
    /// serves (`wait_for_workers`), and returns how many have registered.
    ///
    /// # Errors
    ///
    /// Same as [`Store::set`].
    pub fn join(&self) -> Result<i64> {
        // PyTorch's internal key, without the prefix `/` of other keys.
        self.request_i64(|| "join".to_owned(), &Request::Add { key: b"init/", delta: 1 })
    }

    /// Appends `value` to the value of `key`; a missing key starts empty.
    ///
    /// # Errors
    ///
    /// Same as [`Store::set`].
    pub fn append(&self, key: &str, value: &[u8]) -> Result<()> {
        let wire = wire(key);
        let request = Request::Append { key: wire.as_bytes(), value };
        self.send_and_ping(|| format!("append to {key:?}"), &request)
    }

    /// Lists the keys of the whole store that a client of ours or PyTorch's has set, in any order.
    /// Bytes that are not UTF-8 become U+FFFD.
    ///
    /// # Errors
    ///
    /// Same as [`Store::set`]; also with a server before PyTorch 2.11.
    pub fn list_keys(&self) -> Result<Vec<String>> {
        self.with(
            || "list_keys".to_owned(),
            |connection| {
                connection.send(&[Request::ListKeys])?;
                let mut keys = Vec::new();
                for _ in 0..connection.count()? {
                    let key = connection.blob()?;
                    // Keys without the prefix are internal to PyTorch.
                    if let Some(key) = key.strip_prefix(b"/") {
                        keys.push(String::from_utf8_lossy(key).into_owned());
                    }
                }
                Ok(keys)
            },
        )
    }

    /// Appends `value` to the queue `key`, and wakes one waiter. A queue is not a key: only
    /// [`Store::check`] and waits see it, while it is not empty.
    ///
    /// # Errors
    ///
    /// Same as [`Store::set`]; also with PyTorch's server without libuv, which has no queues.
    pub fn queue_push(&self, key: &str, value: &[u8]) -> Result<()> {
        let wire = wire(key);
        let request = Request::QueuePush { key: wire.as_bytes(), value };
        self.send_and_ping(|| format!("push to queue {key:?}"), &request)
    }

    /// Removes and returns the first value of the queue `key`; blocks until there is one.
    ///
    /// # Errors
    ///
    /// Same as [`Store::get`] and [`queue_push`](Self::queue_push).
    pub fn queue_pop(&self, key: &str, timeout: Duration) -> Result<Vec<u8>> {
        let end = deadline(timeout);
        loop {
            self.wait(&[key], end.saturating_duration_since(Instant::now()))?;
            let during = || format!("pop from queue {key:?}");
            let value = self.with(during, |connection| {
                connection.send(&[Request::QueuePop { key: wire(key).as_bytes() }])?;
                if connection.i64()? > 0 { connection.blob().map(Some) } else { Ok(None) }
            })?;
            // `None`: another client took the value.
            if let Some(value) = value {
                return Ok(value);
            }
        }
    }

    /// Returns the number of values in the queue `key`.
    ///
    /// # Errors
    ///
    /// Same as [`queue_push`](Self::queue_push).
    pub fn queue_len(&self, key: &str) -> Result<i64> {
        let during = || format!("length of queue {key:?}");
        self.request_i64(during, &Request::QueueLen { key: wire(key).as_bytes() })
    }

    /// Blocks until `world_size` clients have called this with `key`. The key cannot be reused: a
    /// further call returns at once.
    ///
    /// # Errors
    ///
    /// [`Error::KeyTimeout`] with `key` if the other clients did not call it within `timeout`; this
    /// client's call still counts. Same as [`Store::set`]; also with a server before PyTorch 2.15.
    pub fn barrier(&self, key: &str, world_size: usize, timeout: Duration) -> Result<()> {
        let start = Instant::now();
        let during = || format!("barrier {key:?} of {world_size}");
        let wire = wire(key);
        let world_size = i64::try_from(world_size).unwrap_or(i64::MAX);
        let barrier = Request::Barrier { key: wire.as_bytes(), world_size };
        let arrived = self.wait_for(during, barrier, timeout);
        let arrived = arrived.map_err(|error| self.explain_add(key, error))?;
        if arrived {
            return Ok(());
        }
        let (store, keys) = (self.addr(), vec![key.to_owned()]);
        Err(Error::KeyTimeout { store, keys, waited: start.elapsed() })
    }

    /// Sends a request without a reply, and blocks until the server has processed it.
    fn send_and_ping(&self, during: impl Fn() -> String, request: &Request<'_>) -> Result<()> {
        self.with(during, |connection| {
            connection.send(&[request.clone(), PING])?;
            connection.pong()
        })
    }

    /// Sends a request whose reply is a number.
    fn request_i64(&self, during: impl Fn() -> String, request: &Request<'_>) -> Result<i64> {
        self.with(during, |connection| {
            connection.send(std::slice::from_ref(request))?;
            connection.i64()
        })
    }

    /// Sends a request that waits until `timeout`; returns false on timeout.
    fn wait_for(
        &self,
        during: impl Fn() -> String,
        request: Request<'_>,
        timeout: Duration,
    ) -> Result<bool> {
        let until = deadline(timeout);
        // A server that is stalled for a moment does not end a short wait, nor a stopped one
        // prolong a long one.
        let with_answer = timeout.saturating_add(ANSWER_TIMEOUT);
        self.within(self.timeout.max(with_answer), during, |connection| {
            connection.wait(request, until)
        })
    }

    /// Replaces the error of a request that adds to `key` if its value is not a number: like
    /// PyTorch's, the server closes the connection then. Asks for the value once, because the
    /// server may have ended.
    fn explain_add(&self, key: &str, error: Error) -> Error {
        let Error::Store { store, during, .. } = &error else { return error };
        let wire = wire(key);
        let text = || {
            let until = deadline(ANSWER_TIMEOUT.min(self.timeout));
            let mut connection = Connection::open(&self.host, self.port, until)?;
            let there = connection.check(&[wire.as_bytes()])?;
            connection.send(&[Request::Get { key: wire.as_bytes() }])?;
            connection.blob().map(|value| there && leading_number(&value).is_none())
        };
        if text().unwrap_or(false) {
            let reason = format!("the value of {key:?} is not a number");
            return Error::Store { store: store.clone(), during: during.clone(), reason };
        }
        error
    }

    /// Opens a connection, with exponential backoff between attempts.
    fn open(&self, deadline: Instant) -> Result<Connection> {
        let start = Instant::now();
        let mut pause = FIRST_PAUSE;
        let mut why = "no connection".to_owned();
        loop {
            match Connection::open(&self.host, self.port, deadline) {
                Ok(connection) => return Ok(connection),
                Err(error) if error.kind() == NO_SUCH_HOST && start.elapsed() >= NAME_TIMEOUT => {
                    let reason = format!("{error}; check MASTER_ADDR");
                    return Err(Error::Rendezvous { addr: self.addr(), reason });
                }
                // Reports the last error before a timeout: it is more informative.
                Err(error) if is_timeout(&error) => {}
                Err(error) => why = error.to_string(),
            }
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return Err(Error::Rendezvous {
                    addr: self.addr(),
                    reason: format!(
                        "no store answered within {:.1?} ({why}); check that the launcher \
                         or rank 0 runs there, and MASTER_ADDR and MASTER_PORT",
                        start.elapsed()
                    ),
                });
            }
            std::thread::sleep(jittered(pause).min(left));
            pause = (pause * 2).min(LONGEST_PAUSE);
        }
    }

    /// Opens a connection in place of one that the server has closed: it may have been restarted.
    /// If it has ended, the caller learns it without retries.
    fn replace(&self, end: Instant, during: impl Fn() -> String) -> Result<Connection> {
        let opened = Connection::open(&self.host, self.port, end.min(deadline(ANSWER_TIMEOUT)));
        opened.map_err(|error| {
            let reason = format!("the server closed the connection, and a new one failed: {error}");
            Error::Store { store: self.addr(), during: during(), reason }
        })
    }

    /// Locks this process's idle connections. May return `None` in a fork, where a thread that
    /// exists only in the parent may hold the lock.
    fn idle(&self) -> Option<MutexGuard<'_, Idle>> {
        let pid = std::process::id();
        let forked = pid != self.pid;
        let mut idle = if forked { self.idle.try_lock()? } else { self.idle.lock() };
        if idle.pid != pid {
            *idle = Idle { pid, connections: Vec::new() };
        }
        Some(idle)
    }

    fn keep(&self, connection: Connection) {
        if let Some(mut idle) = self.idle() {
            idle.connections.push(connection);
        }
    }

    /// Runs `operation` on an idle or new connection.
    fn with<R>(
        &self,
        during: impl Fn() -> String,
        operation: impl FnOnce(&mut Connection) -> std::io::Result<R>,
    ) -> Result<R> {
        self.within(self.timeout, during, operation)
    }

    /// Same as [`with`](Self::with), with another timeout.
    fn within<R>(
        &self,
        timeout: Duration,
        during: impl Fn() -> String,
        operation: impl FnOnce(&mut Connection) -> std::io::Result<R>,
    ) -> Result<R> {
        let (start, deadline) = (Instant::now(), deadline(timeout));
        let idle = self.idle().and_then(|mut idle| idle.connections.pop());
        let mut connection = match idle {
            Some(connection) if connection.is_stale() => self.replace(deadline, &during)?,
            Some(connection) => connection,
            None => self.open(deadline)?,
        };
        connection.deadline = deadline;
        match operation(&mut connection) {
            Ok(result) => {
                self.keep(connection);
                Ok(result)
            }
            Err(error) => {
                let reason = match error.kind() {
                    ErrorKind::UnexpectedEof
                    | ErrorKind::ConnectionReset
                    | ErrorKind::BrokenPipe => format!(
                        "the server closed the connection; it has ended, or it refused the request: \
                         its limit is {} MiB",
                        MAX_STORE_BYTES >> 20
                    ),
                    _ if is_timeout(&error) => format!("no answer within {:.1?}", start.elapsed()),
                    _ => error.to_string(),
                };
                if error.kind() == ErrorKind::InvalidInput {
                    // Nothing was sent, so the connection can still be used.
                    self.keep(connection);
                }
                Err(Error::Store { store: self.addr(), during: during(), reason })
            }
        }
    }
}

impl Store for TcpStore {
    fn set(&self, key: &str, value: &[u8]) -> Result<()> {
        let wire = wire(key);
        let request = Request::Set { key: wire.as_bytes(), value };
        self.send_and_ping(|| format!("set {key:?}"), &request)
    }

    fn read(&self, keys: &[&str]) -> Result<Vec<Vec<u8>>> {
        let wire = wire_keys(keys);
        let request = Request::MultiGet { keys: wire.iter().map(String::as_bytes).collect() };
        self.with(
            || format!("read {keys:?}"),
            |connection| {
                connection.send(&[request])?;
                keys.iter().map(|_| connection.blob()).collect()
            },
        )
    }

    fn add(&self, key: &str, delta: i64) -> Result<i64> {
        let during = || format!("add {delta} to {key:?}");
        let sum = self.request_i64(during, &Request::Add { key: wire(key).as_bytes(), delta });
        sum.map_err(|error| self.explain_add(key, error))
    }

    fn compare_set(&self, key: &str, expected: &[u8], desired: &[u8]) -> Result<Vec<u8>> {
        let wire = wire(key);
        let during = || format!("compare_set {key:?}");
        self.with(during, |connection| {
            let key = wire.as_bytes();
            connection.send(&[Request::CompareSet { key, expected, desired }])?;
            connection.blob()
        })
    }

    fn try_wait(&self, keys: &[&str], timeout: Duration) -> Result<bool> {
        let during = || format!("wait for {keys:?}");
        let wire = wire_keys(keys);
        let keys = wire.iter().map(String::as_bytes).collect();
        self.wait_for(during, Request::Wait { keys }, timeout)
    }

    fn check(&self, keys: &[&str]) -> Result<bool> {
        let during = || format!("check {keys:?}");
        let wire = wire_keys(keys);
        let wire: Vec<_> = wire.iter().map(String::as_bytes).collect();
        self.with(during, |connection| connection.check(&wire))
    }

    fn delete_key(&self, key: &str) -> Result<bool> {
        let during = || format!("delete {key:?}");
        Ok(self.request_i64(during, &Request::DeleteKey { key: wire(key).as_bytes() })? != 0)
    }

    fn num_keys(&self) -> Result<i64> {
        self.request_i64(|| "num_keys".to_owned(), &Request::NumKeys)
    }

    fn multi_set(&self, pairs: &[(&str, &[u8])]) -> Result<()> {
        let during = || format!("set {} keys", pairs.len());
        let keys: Vec<_> = pairs.iter().map(|(key, _)| wire(key)).collect();
        let values = pairs.iter().map(|pair| pair.1);
        let pairs = keys.iter().map(String::as_bytes).zip(values).collect();
        self.send_and_ping(during, &Request::MultiSet { pairs })
    }

    fn name(&self) -> String {
        self.addr()
    }

    fn local_ip(&self) -> Option<IpAddr> {
        let addr = self.with(|| "local_ip".to_owned(), |connection| connection.stream.local_addr());
        addr.ok().map(|addr| addr.ip().to_canonical())
    }
}

/// A key as PyTorch's clients write it.
fn wire(key: &str) -> String {
    format!("/{key}")
}

fn wire_keys(keys: &[&str]) -> Vec<String> {
    keys.iter().map(|key| wire(key)).collect()
}

/// A random duration between half of `pause` and `pause`, so that clients do not retry in lockstep.
fn jittered(pause: Duration) -> Duration {
    use std::hash::{BuildHasher, RandomState};
    let random = RandomState::new().hash_one(0_u8) as u32;
    pause / 2 + pause.mul_f64(f64::from(random) / f64::from(u32::MAX)) / 2
}

/// How long a failed name lookup is retried: the host may be starting, or the name server busy.
const NAME_TIMEOUT: Duration = Duration::from_secs(3);
/// Time for the server's answer to the end of a wait, unless that is before the store's timeout.
const ANSWER_TIMEOUT: Duration = Duration::from_secs(2);
const FIRST_PAUSE: Duration = Duration::from_millis(10);
const LONGEST_PAUSE: Duration = Duration::from_secs(1);

#[cfg(test)]
mod tests {
    use super::*;
    use crate::store::tcp::server::TcpStoreServer;

    #[test]
    #[expect(unsafe_code, reason = "forks")]
    fn a_lock_held_at_a_fork_does_not_block_the_child() {
        let server = TcpStoreServer::bind(([127, 0, 0, 1], 0).into()).unwrap();
        let store = TcpStore::connect("127.0.0.1", server.port(), Duration::from_secs(60)).unwrap();
        let held = store.idle.lock();
        // SAFETY: the child allocates little, which libc allows after a fork, and exits.
        let child = unsafe { libc::fork() };
        if child == 0 {
            let added = store.add("children", 1);
            // SAFETY: ends the child without running the parent's destructors.
            unsafe { libc::_exit(i32::from(!matches!(added, Ok(1)))) };
        }
        let mut status = 0;
        // SAFETY: waits for our own child.
        unsafe { libc::waitpid(child, &raw mut status, 0) };
        drop(held);
        assert_eq!((status, store.add("children", 1).unwrap()), (0, 2));
    }
}
