//! How the ranks of a group come to have two connections with each other, and with nobody else; and
//! those of a machine its shared memory.
//!
//! Each rank listens at a port of the system's choice and says where in the store. It connects to
//! all ranks below it, in order, and is connected to by those above. Both sides begin with a
//! [`Hello`] that holds the group's random nonce, so that strangers, and connections that were meant
//! for an earlier listener at the same port, are dropped without further ado.
//!
//! No rank waits for one that itself waits for a lower one that is not there: who connects does so
//! in rank order, so all get stuck at the same rank, and name it.

use std::io::{self, Read, Write};
use std::net::{IpAddr, Ipv4Addr, SocketAddr, TcpListener, TcpStream};
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::time::{Duration, Instant};

use serde::{Deserialize, Serialize};

use super::control::Peer;
use super::frame::{Channel, Frame, HEADER, Hello};
use super::link::{Link, Socket};
use super::ring::Rings;
use super::{address, sys};
use crate::backend::host::open_fd_of;
use crate::backend::rendezvous::{self, Joining};
use crate::store::tcp::sockopt;
use crate::{Error, Rank, Result};

/// Where ranks are that meet in a store without an address.
const LOOPBACK: IpAddr = IpAddr::V4(Ipv4Addr::LOCALHOST);

/// How long a connection may say nothing before it makes room for another: a rank says who it is at once.
const SILENCE: Duration = Duration::from_secs(10);
/// Connections of others beside those of ranks that may be silent at once.
const STRANGERS: usize = 64;

/// Open files of a rank beside its connections: listener, memory, what wakes its threads.
const OWN_FILES: usize = 16;

/// What a rank says of itself in the store.
#[derive(Debug, Serialize, Deserialize)]
struct Member {
    addr: SocketAddr,
    /// That of rank 0 is the group's.
    nonce: [u64; 2],
    /// Its descriptor of its machine's shared memory, if it made that.
    memory: Option<i32>,
}

/// A rank's connections, by rank; none for itself.
#[derive(Debug)]
pub(in crate::backend) struct Connections {
    pub(in crate::backend) links: Vec<Option<Box<dyn Link>>>,
    pub(super) control: Vec<Option<Peer>>,
}

/// This rank among those that join, and whom it has found.
#[derive(Debug)]
struct Mesh<'a> {
    joining: &'a Joining<'a>,
    members: Vec<Member>,
    /// By rank, then channel.
    streams: Vec<[Option<TcpStream>; 2]>,
}

/// Connects all ranks; returns when this one has all its connections. `sharing`: the ranks, in
/// order, that share memory with this one, itself among them.
pub(in crate::backend) fn connect(joining: &Joining<'_>, sharing: &[Rank]) -> Result<Connections> {
    let files = 2 * joining.world() + OWN_FILES;
    sockopt::allow_open_files(files, &format!("joining {}", joining.group()))?;
    let own = &joining.locations[joining.rank];
    let elsewhere = joining.locations.iter().filter(|place| !place.same_network(own));
    let elsewhere = elsewhere.filter_map(|place| place.ip).find(|ip| !ip.is_loopback());
    let ip = address::own(own.ip.unwrap_or(LOOPBACK), elsewhere)?;
    let fail = |error| Error::io(format!("listening for peers at {ip}"), &error);
    let listener = TcpListener::bind((ip, 0)).map_err(fail)?;
    let backlog = STRANGERS + 2 * joining.world();
    sockopt::set_backlog(listener.as_fd(), backlog).map_err(fail)?;
    listener.set_nonblocking(true).map_err(fail)?;
    let addr = listener.local_addr().map_err(fail)?;
    let makes_memory = sharing.len() > 1 && sharing[0] == joining.rank;
    let memory = makes_memory.then(|| Rings::create(sharing.len())).transpose()?;
    let raw = memory.as_ref().map(AsRawFd::as_raw_fd);
    let member = Member { addr, nonce: nonce(), memory: raw };
    let members = rendezvous::all_gather_records(joining, "tcp", &member)?;

    let streams = std::iter::repeat_with(Default::default).take(joining.world()).collect();
    let mut mesh = Mesh { joining, members, streams };
    for rank in 0..joining.rank {
        for channel in [Channel::Data, Channel::Control] {
            let stream = mesh.call(rank, channel)?;
            mesh.streams[rank][channel as usize] = Some(stream);
        }
    }
    mesh.accept(&listener)?;
    let rings = mesh.rings(memory, sharing)?;
    mesh.finish(rings.as_ref())
}

impl Mesh<'_> {
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

    /// Connects to a rank and has its answer.
    fn call(&self, rank: Rank, channel: Channel) -> Result<TcpStream> {
        let addr = self.members[rank].addr;
        // The system takes a timeout of zero for none.
        let left = || self.left().max(Duration::from_millis(1));
        let talk = || {
            let mut stream = TcpStream::connect_timeout(&addr, left())?;
            stream.set_write_timeout(Some(left()))?;
            stream.write_all(&Frame::Hello(self.hello(rank, channel)).encode())?;
            let mut answer = [0; HEADER];
            stream.set_read_timeout(Some(left()))?;
            stream.read_exact(&mut answer)?;
            Ok((stream, answer))
        };
        let (stream, answer) = talk().map_err(|error: io::Error| self.failed(rank, &error))?;
        let expected =
            Hello { from: rank as u64, to: self.joining.rank as u64, ..self.hello(rank, channel) };
        if Frame::decode(&answer) == Ok(Frame::Hello(expected)) {
            return Ok(stream);
        }
        let reason = format!("what answers there is not rank {rank} of {}", self.joining.group());
        Err(Error::Rendezvous { addr: addr.to_string(), reason })
    }

    fn failed(&self, rank: Rank, error: &io::Error) -> Error {
        let addr = self.members[rank].addr;
        if matches!(error.kind(), io::ErrorKind::TimedOut | io::ErrorKind::WouldBlock) {
            let what = format!("connecting to rank {rank} at {addr}");
            return self.joining.timeout(&what, vec![rank]);
        }
        let reason = format!(
            "rank {rank} of {} listens there, but connecting to it failed: {error}; it has ended, \
             or the address leads elsewhere from here (COLLECTIVE_IFNAME on rank {rank} chooses \
             another interface)",
            self.joining.group()
        );
        Error::Rendezvous { addr: addr.to_string(), reason }
    }

    /// Is connected to by all ranks above.
    fn accept(&mut self, listener: &TcpListener) -> Result<()> {
        let fail = |error| Error::io("accepting connections of peers", &error);
        // Silent connections hold nobody up. While there are too many of them, others wait until these have
        // been silent for longer than a rank is.
        let most = STRANGERS + 2 * self.joining.world();
        let mut callers: Vec<Caller> = Vec::new();
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
            if callers.len() == most {
                callers.retain(|caller| caller.since.elapsed() < SILENCE);
            }
            let full = callers.len() == most;
            let left = if full { left.min(SILENCE) } else { left };
            let mut fds = vec![sys::interest(listener.as_fd(), !full, false)];
            fds.extend(
                callers.iter().map(|caller| sys::interest(caller.stream.as_fd(), true, false)),
            );
            sys::poll(&mut fds, Some(left)).map_err(fail)?;
            callers.retain_mut(|caller| match caller.read() {
                Ok(Some(hello)) => {
                    self.welcome(&caller.stream, hello);
                    false
                }
                Ok(None) => true,
                Err(_) => false,
            });
            while callers.len() < most {
                let stream = match listener.accept() {
                    Ok((stream, _)) => stream,
                    Err(error) if error.kind() == io::ErrorKind::WouldBlock => break,
                    // Of that connection alone.
                    Err(error) if error.kind() == io::ErrorKind::ConnectionAborted => continue,
                    Err(error) if error.kind() == io::ErrorKind::Interrupted => continue,
                    Err(error) => return Err(fail(error)),
                };
                stream.set_nonblocking(true).map_err(fail)?;
                let since = Instant::now();
                callers.push(Caller { stream, since, header: [0; HEADER], filled: 0 });
            }
        }
    }

    /// Ranks above that have not connected twice.
    fn missing(&self) -> Vec<Rank> {
        let above = self.joining.rank + 1..self.joining.world();
        above.filter(|&rank| self.streams[rank].iter().any(Option::is_none)).collect()
    }

    /// Answers a caller who is the rank it should be.
    fn welcome(&mut self, stream: &TcpStream, hello: Hello) {
        let Ok(from) = usize::try_from(hello.from) else { return };
        let own = self.joining.rank;
        if from <= own || from >= self.joining.world() {
            return;
        }
        let answer = self.hello(from, hello.channel);
        let place = &mut self.streams[from][hello.channel as usize];
        let expected = Hello { from: from as u64, to: own as u64, ..answer };
        if hello != expected || place.is_some() {
            return;
        }
        // A fresh connection has room for a header; if it is gone already, the rank is missing.
        let answered = (&mut &*stream).write(&Frame::Hello(answer).encode());
        if matches!(answered, Ok(HEADER))
            && let Ok(stream) = stream.try_clone()
        {
            *place = Some(stream);
        }
    }

    /// The memory of this machine, which this rank has made or another of `sharing`.
    fn rings(&self, made: Option<OwnedFd>, sharing: &[Rank]) -> Result<Option<Rings>> {
        let memory = match (made, sharing) {
            (Some(made), _) => made,
            (None, [maker, _, ..]) => {
                let raw = self.members[*maker].memory.and_then(|raw| u64::try_from(raw).ok());
                let key = || format!("{}/tcp/{maker}", self.joining.options.name);
                let raw = raw.ok_or_else(|| rendezvous::malformed_record(*maker, key()))?;
                let file = open_fd_of(self.joining.locations[*maker].pid, raw)?;
                file.ok_or_else(|| self.joining.died(*maker))?.into()
            }
            _ => return Ok(None),
        };
        Rings::attach(memory, sharing).map(Some)
    }

    /// Sets the options of all connections, and makes links of them.
    fn finish(self, rings: Option<&Rings>) -> Result<Connections> {
        let (mut links, mut control) = (Vec::new(), Vec::new());
        for (rank, streams) in self.streams.into_iter().enumerate() {
            let [Some(carrier), Some(stream)] = streams else {
                links.push(None);
                control.push(None);
                continue;
            };
            let addr = self.members[rank].addr.to_string();
            let fail = |error| Error::io(format!("setting up the connections to {addr}"), &error);
            set_up(&carrier).map_err(fail)?;
            set_up(&stream).map_err(fail)?;
            sockopt::detect_dead_peer(stream.as_fd()).map_err(fail)?;
            let link: Box<dyn Link> = match rings.filter(|rings| rings.ranks().contains(&rank)) {
                Some(rings) => Box::new(rings.link(self.joining.rank, rank, carrier)?),
                None => Box::new(Socket::new(carrier)),
            };
            links.push(Some(link));
            control.push(Some(Peer { stream, pid: self.joining.locations[rank].pid, addr }));
        }
        Ok(Connections { links, control })
    }
}

/// A connection that has not said yet whose it is.
#[derive(Debug)]
struct Caller {
    stream: TcpStream,
    since: Instant,
    header: [u8; HEADER],
    filled: usize,
}

impl Caller {
    /// What it says, when it has said all; an error if it is no rank of any group.
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

/// What all connections need. Only the one for control also notices a host that vanished: on the
/// other, a peer that computes and does not read would look like one.
fn set_up(stream: &TcpStream) -> io::Result<()> {
    stream.set_read_timeout(None)?;
    stream.set_write_timeout(None)?;
    stream.set_nonblocking(true)?;
    sockopt::give_room(stream.as_fd())?;
    stream.set_nodelay(true)
}

/// Random words. Each `RandomState` has keys of its own, from the system's randomness at first.
fn nonce() -> [u64; 2] {
    use std::hash::{BuildHasher, RandomState};
    let pid = std::process::id();
    std::array::from_fn(|i| RandomState::new().hash_one((i, pid, Instant::now())))
}
