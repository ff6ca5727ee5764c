//! Makes two connections between every pair of ranks, and maps the shared memory of the ranks of a
//! machine.
//!
//! Each rank listens on a port chosen by the system and writes its address to the store. It
//! connects to all lower ranks, in order, and accepts connections of the higher ones. Both sides
//! begin with a [`Hello`] that contains the group's random nonce, so that connections of other
//! programs, or to an earlier listener at the same port, are dropped.
//!
//! Since ranks connect in rank order, all of them wait for the same missing rank, and name it.

use std::io::{self, Read, Write};
use std::net::{IpAddr, Ipv4Addr, SocketAddr, TcpListener, TcpStream};
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::time::{Duration, Instant};

use serde::{Deserialize, Serialize};

use super::control::ControlPeer;
use super::ring::Rings;
use crate::backend::frame::{Channel, Frame, HEADER, Hello};
use crate::backend::host::open_fd_of;
use crate::backend::rendezvous::{self, Joining};
use crate::net::stream::{PeerStream, Socket};
use crate::net::{address, sockopt, sys};
use crate::store::{FAILED, FAILURE_GRACE};
use crate::{Error, Rank, Result};

/// Address of ranks whose store has no address; they are on one machine.
const LOOPBACK: IpAddr = IpAddr::V4(Ipv4Addr::LOCALHOST);

/// How long an accepted connection may wait for its `Hello`, which a rank sends at once, before it
/// may be evicted.
const HELLO_TIMEOUT: Duration = Duration::from_secs(10);
/// Maximum number of unidentified connections, in addition to those of ranks.
const MAX_UNIDENTIFIED: usize = 64;

/// Number of open files of a rank besides its connections: listener, memory, event descriptors.
const OWN_FILES: usize = 16;

/// A rank's record in the store.
#[derive(Debug, Serialize, Deserialize)]
struct TcpRecord {
    addr: SocketAddr,
    /// Random; the group uses rank 0's.
    nonce: [u64; 2],
    /// Descriptor of the machine's shared memory, if this rank created it.
    memory: Option<i32>,
}

/// A rank's connections by peer; `None` for itself.
#[derive(Debug)]
pub(in crate::backend) struct Connections {
    pub(in crate::backend) data: Vec<Option<Box<dyn PeerStream>>>,
    pub(super) control: Vec<Option<ControlPeer>>,
}

/// The connections made so far.
#[derive(Debug)]
struct FullMesh<'a> {
    joining: &'a Joining<'a>,
    members: Vec<TcpRecord>,
    /// By rank, then channel.
    streams: Vec<[Option<TcpStream>; 2]>,
}

/// Connects this rank to all others; blocks until it has all its connections. `sharing` are the
/// ranks that share memory with this one, including itself, in order.
pub(in crate::backend) fn connect(joining: &Joining<'_>, sharing: &[Rank]) -> Result<Connections> {
    let files = 2 * joining.world() + OWN_FILES;
    sockopt::allow_open_files(files, &format!("joining {}", joining.group()))?;
    let own = &joining.locations[joining.rank];
    let remote = joining.locations.iter().filter(|place| !place.same_network(own));
    let remote = remote.filter_map(|place| place.ip).find(|ip| !ip.is_loopback());
    let ip = address::own(own.ip.unwrap_or(LOOPBACK), remote)?;
    let fail = |error| Error::io(format!("listening for peers at {ip}"), &error);
    let listener = TcpListener::bind((ip, 0)).map_err(fail)?;
    let backlog = MAX_UNIDENTIFIED + 2 * joining.world();
    sockopt::set_backlog(&listener, backlog).map_err(fail)?;
    listener.set_nonblocking(true).map_err(fail)?;
    let addr = listener.local_addr().map_err(fail)?;
    let creates_memory = sharing.len() > 1 && sharing[0] == joining.rank;
    let memory = creates_memory.then(|| Rings::create(sharing.len())).transpose()?;
    let raw = memory.as_ref().map(AsRawFd::as_raw_fd);
    let member = TcpRecord { addr, nonce: nonce(), memory: raw };
    let members = rendezvous::all_gather_records(joining, "tcp", &member)?;

    let streams = std::iter::repeat_with(Default::default).take(joining.world()).collect();
    let mut mesh = FullMesh { joining, members, streams };
    for rank in 0..joining.rank {
        for channel in [Channel::Data, Channel::Control] {
            let stream = mesh.connect_to(rank, channel)?;
            mesh.streams[rank][channel as usize] = Some(stream);
        }
    }
    mesh.accept(&listener)?;
    let rings = mesh.rings(memory, sharing)?;
    mesh.finish(rings.as_ref())
}

impl FullMesh<'_> {
    fn hello(&self, to: Rank, channel: Channel) -> Hello {
        let [low, high] = self.members[0].nonce;
        Hello {
            nonce: u128::from(high) << 64 | u128::from(low),
            world: self.joining.world() as u64,
            from: self.joining.rank as u64,
            to: to as u64,
            channel,
        }
    }

    fn left(&self) -> Duration {
        self.joining.deadline.saturating_duration_since(Instant::now())
    }

    /// Connects to a rank and checks its answer.
    fn connect_to(&self, rank: Rank, channel: Channel) -> Result<TcpStream> {
        let addr = self.members[rank].addr;
        // Never zero: a zero socket timeout would mean no timeout.
        let left = || self.left().max(Duration::from_millis(1));
        let connect = || {
            let mut stream = TcpStream::connect_timeout(&addr, left())?;
            stream.set_write_timeout(Some(left()))?;
            stream.write_all(&Frame::Hello(self.hello(rank, channel)).encode())?;
            let mut answer = [0; HEADER];
            stream.set_read_timeout(Some(left()))?;
            stream.read_exact(&mut answer)?;
            Ok((stream, answer))
        };
        let (stream, answer) = connect().map_err(|error: io::Error| self.failed(rank, &error))?;
        let expected =
            Hello { from: rank as u64, to: self.joining.rank as u64, ..self.hello(rank, channel) };
        if Frame::decode(&answer) == Ok(Frame::Hello(expected)) {
            return Ok(stream);
        }
        let group = self.joining.group();
        let reason = format!(
            "the listener at this address is not rank {rank} of {group}; check its address and port"
        );
        Err(Error::Rendezvous { addr: addr.to_string(), reason })
    }

    fn failed(&self, rank: Rank, error: &io::Error) -> Error {
        let addr = self.members[rank].addr;
        if matches!(error.kind(), io::ErrorKind::TimedOut | io::ErrorKind::WouldBlock) {
            let what = format!("connecting to rank {rank} at {addr}");
            return self.joining.timeout(&what, vec![rank]);
        }
        // A rank that fails closes its listener before it publishes why, and others then get that
        // reason.
        drop(self.joining.store.try_wait(&[FAILED], FAILURE_GRACE.min(self.left())));
        let reason = format!(
            "connecting to rank {rank} of {} failed: {error}; the rank has ended, or its address is not \
             reachable from here (set COLLECTIVE_IFNAME on rank {rank} to choose another interface)",
            self.joining.group()
        );
        Error::Rendezvous { addr: addr.to_string(), reason }
    }

    /// Accepts the connections of all higher ranks.
    fn accept(&mut self, listener: &TcpListener) -> Result<()> {
        let fail = |error| Error::io("accepting connections of peers", &error);
        // Silent connections do not block accept. At the limit, those that have been silent for
        // longer than `HELLO_TIMEOUT` are evicted.
        let limit = MAX_UNIDENTIFIED + 2 * self.joining.world();
        let mut pending: Vec<PendingConnection> = Vec::new();
        loop {
            let missing = self.missing();
            if missing.is_empty() {
                return Ok(());
            }
            let left = self.left();
            if left.is_zero() {
                let addr = listener.local_addr().map_err(fail)?;
                let what = format!("waiting at {addr} for connections");
                return Err(self.joining.timeout(&what, missing));
            }
            if pending.len() == limit {
                pending.retain(|connection| connection.since.elapsed() < HELLO_TIMEOUT);
            }
            let full = pending.len() == limit;
            let left = left.min(self.joining.watch_interval());
            let mut fds = vec![sys::interest(listener.as_fd(), !full, false)];
            fds.extend(
                pending
                    .iter()
                    .map(|connection| sys::interest(connection.stream.as_fd(), true, false)),
            );
            sys::poll(&mut fds, Some(left)).map_err(fail)?;
            if fds.iter().all(|fd| fd.revents().is_empty()) {
                // A missing rank may have failed.
                self.joining.check_failed()?;
            }
            pending.retain_mut(|connection| match connection.read() {
                Ok(Some(hello)) => {
                    self.answer(&connection.stream, hello);
                    false
                }
                Ok(None) => true,
                Err(_) => false,
            });
            while pending.len() < limit {
                let stream = match listener.accept() {
                    Ok((stream, _)) => stream,
                    Err(error) if error.kind() == io::ErrorKind::WouldBlock => break,
                    // Affects only that connection.
                    Err(error) if error.kind() == io::ErrorKind::ConnectionAborted => continue,
                    Err(error) if error.kind() == io::ErrorKind::Interrupted => continue,
                    Err(error) => return Err(fail(error)),
                };
                stream.set_nonblocking(true).map_err(fail)?;
                let since = Instant::now();
                pending.push(PendingConnection { stream, since, header: [0; HEADER], filled: 0 });
            }
        }
    }

    /// Returns the higher ranks that have not made both connections.
    fn missing(&self) -> Vec<Rank> {
        let above = self.joining.rank + 1..self.joining.world();
        above.filter(|&rank| self.streams[rank].iter().any(Option::is_none)).collect()
    }

    /// Answers a `Hello` and keeps its connection, if it is valid.
    fn answer(&mut self, stream: &TcpStream, hello: Hello) {
        let Ok(from) = usize::try_from(hello.from) else { return };
        let own = self.joining.rank;
        if from <= own || from >= self.joining.world() {
            return;
        }
        let answer = self.hello(from, hello.channel);
        let slot = &mut self.streams[from][hello.channel as usize];
        let expected = Hello { from: from as u64, to: own as u64, ..answer };
        if hello != expected || slot.is_some() {
            return;
        }
        // A header fits in a new connection's buffer. If it is closed already, the rank stays
        // missing.
        let answered = (&mut &*stream).write(&Frame::Hello(answer).encode());
        if matches!(answered, Ok(HEADER))
            && let Ok(stream) = stream.try_clone()
        {
            *slot = Some(stream);
        }
    }

    /// Maps the machine's shared memory, `own` or that of the first rank of `sharing`.
    fn rings(&self, own: Option<OwnedFd>, sharing: &[Rank]) -> Result<Option<Rings>> {
        let memory = match (own, sharing) {
            (Some(own), _) => own,
            (None, &[first, _, ..]) => {
                let raw = self.members[first].memory.and_then(|raw| u64::try_from(raw).ok());
                let key = || format!("{}/tcp/{first}", self.joining.options.name);
                let raw = raw.ok_or_else(|| rendezvous::malformed_record(first, key()))?;
                let file = open_fd_of(self.joining.locations[first].pid, raw)?;
                file.ok_or_else(|| self.joining.died(first))?.into()
            }
            _ => return Ok(None),
        };
        Rings::attach(memory, sharing).map(Some).map_err(|error| self.joining.reason_or(error))
    }

    /// Sets the socket options of all connections and wraps them.
    fn finish(self, rings: Option<&Rings>) -> Result<Connections> {
        let (mut data, mut control) = (Vec::new(), Vec::new());
        for (rank, streams) in self.streams.into_iter().enumerate() {
            let [Some(socket), Some(stream)] = streams else {
                data.push(None);
                control.push(None);
                continue;
            };
            let addr = self.members[rank].addr.to_string();
            let fail = |error| Error::io(format!("setting up the connections to {addr}"), &error);
            set_up(&socket).map_err(fail)?;
            set_up(&stream).map_err(fail)?;
            sockopt::detect_dead_peer(&stream).map_err(fail)?;
            let peer: Box<dyn PeerStream> =
                match rings.filter(|rings| rings.ranks().contains(&rank)) {
                    Some(rings) => Box::new(rings.ring(self.joining.rank, rank, socket)?),
                    None => Box::new(Socket::new(socket)),
                };
            data.push(Some(peer));
            control.push(Some(ControlPeer { stream, pid: self.joining.locations[rank].pid, addr }));
        }
        Ok(Connections { data, control })
    }
}

/// An accepted connection that has not sent its `Hello`.
#[derive(Debug)]
struct PendingConnection {
    stream: TcpStream,
    since: Instant,
    header: [u8; HEADER],
    filled: usize,
}

impl PendingConnection {
    /// Reads the `Hello`; `None` if it is incomplete, an error if it is invalid.
    fn read(&mut self) -> io::Result<Option<Hello>> {
        match self.stream.read(&mut self.header[self.filled..]) {
            Ok(0) => return Err(io::ErrorKind::UnexpectedEof.into()),
            Ok(len) => self.filled += len,
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => return Ok(None),
            Err(error) => return Err(error),
        }
        if self.filled < HEADER {
            return Ok(None);
        }
        match Frame::decode(&self.header) {
            Ok(Frame::Hello(hello)) => Ok(Some(hello)),
            _ => Err(io::ErrorKind::InvalidData.into()),
        }
    }
}

/// Sets the options that all connections need. Only the control connection also detects a host that
/// vanished: on the data connection a peer that computes and does not read would look dead.
fn set_up(stream: &TcpStream) -> io::Result<()> {
    stream.set_read_timeout(None)?;
    stream.set_write_timeout(None)?;
    stream.set_nonblocking(true)?;
    sockopt::set_buffer_sizes(stream)?;
    stream.set_nodelay(true)
}

/// Returns random words. Each `RandomState` has its own keys, initially from the system's random
/// source.
fn nonce() -> [u64; 2] {
    use std::hash::{BuildHasher, RandomState};
    let pid = std::process::id();
    std::array::from_fn(|i| RandomState::new().hash_one((i, pid, Instant::now())))
}
