//! How the ranks meet: each says in the store where its sockets listen, and connects to the others.
//!
//! Gloo's own rendezvous asks for the host's name and for a store without deadlines. So gloo only
//! makes the sockets here, and the store is ours: missing ranks are named. The sockets are bound to
//! the address that this machine has on its way to the store.

use std::net::{IpAddr, Ipv4Addr};
use std::sync::Arc;
use std::time::{Duration, Instant};

use super::control::Control;
use super::mesh::{Device, Mesh, Trouble};
use super::turn::{Turn, letters};
use super::{Gloo, State};
use crate::store::{Store, deadline};
use crate::{DType, Error, GroupOptions, OpDesc, Rank, Result, Verb};

/// There are two connections to each.
const MAX_RANKS: usize = 1024;

/// Joins a group; returns when all ranks have.
pub(crate) fn join(
    store: &dyn Store,
    rank: Rank,
    world: usize,
    options: &GroupOptions,
) -> Result<Gloo> {
    check_world(rank, world)?;
    let joining = Joining { rank, world, options, deadline: deadline(options.timeout) };
    let address = store.local_ip().unwrap_or(IpAddr::V4(Ipv4Addr::LOCALHOST));
    let device = Device::new(address).map_err(|why| joining.refused(why))?;
    let mesh = || {
        let mesh = Mesh::new(&device, rank, world, options.timeout);
        mesh.map_err(|why| joining.refused(why))
    };
    let (control, data) = (mesh()?, mesh()?);
    let members = joining.meet(store, address, &[&control, &data])?;
    for (mesh, addresses) in [(&control, 0), (&data, 1)] {
        for (peer, member) in members.iter().enumerate().filter(|&(peer, _)| peer != rank) {
            joining.connect(mesh, peer, member, member.address(addresses, rank, world, peer))?;
        }
    }
    let pids = members.iter().map(|member| member.pid).collect();
    let control = Control::new(Arc::new(control), rank, pids);
    joining.finish(control.map_err(|why| joining.refused(why))?, Arc::new(data))
}

/// A rank about to join.
struct Joining<'a> {
    rank: Rank,
    world: usize,
    options: &'a GroupOptions,
    deadline: Instant,
}

impl Joining<'_> {
    fn name(&self) -> String {
        format!("joining group {}", self.options.name)
    }

    fn left(&self) -> Duration {
        self.deadline.saturating_duration_since(Instant::now())
    }

    /// Says where this rank listens, and reads where the others do.
    fn meet(&self, store: &dyn Store, ip: IpAddr, meshes: &[&Mesh]) -> Result<Vec<Member>> {
        let name = &self.options.name;
        // The same name may be used again, by all ranks, after a group is gone.
        let generation = store.add(&format!("{name}/gloo/joined/{}", self.rank), 1)?;
        let key = |rank: Rank| format!("{name}/gloo/{generation}/member/{rank}");
        store.set(&key(self.rank), &self.describe(ip, meshes)?)?;
        let keys: Vec<String> = (0..self.world).map(key).collect();
        let names: Vec<&str> = keys.iter().map(String::as_str).collect();
        if let Err(error) = store.wait(&names, self.left()) {
            return Err(self.absent(store, &names, error));
        }
        let read = |(rank, key): (Rank, &&str)| {
            let bytes = store.get(key, Duration::from_secs(1))?;
            Member::read(&bytes, rank, self.world)
        };
        let members: Vec<Member> = names.iter().enumerate().map(read).collect::<Result<_>>()?;
        check_reach(&members)?;
        Ok(members)
    }

    /// Process id, number of ranks, whether only this machine reaches it, then for each mesh and
    /// each peer where it is to connect.
    fn describe(&self, ip: IpAddr, meshes: &[&Mesh]) -> Result<Vec<u8>> {
        let world = u32::try_from(self.world).expect("at most MAX_RANKS");
        let words = [std::process::id(), world, u32::from(ip.is_loopback())];
        let mut bytes = words.map(u32::to_le_bytes).concat();
        for mesh in meshes {
            for peer in (0..self.world).filter(|&peer| peer != self.rank) {
                bytes.extend(mesh.address(peer).map_err(|why| self.refused(why))?);
            }
        }
        Ok(bytes)
    }

    /// Who has not said anything, or why the store cannot tell.
    fn absent(&self, store: &dyn Store, names: &[&str], error: Error) -> Error {
        // A store that does not answer is not asked which rank is missing.
        if !matches!(error, Error::KeyTimeout { .. }) {
            return error;
        }
        let mut missing = Vec::new();
        for (rank, name) in names.iter().enumerate() {
            match store.check(&[name]) {
                Ok(true) => {}
                Ok(false) => missing.push(rank),
                Err(error) => return error,
            }
        }
        if missing.is_empty() { error } else { self.timed_out(missing) }
    }

    fn timed_out(&self, missing: Vec<Rank>) -> Error {
        Error::Timeout { op: self.name(), waited: self.options.timeout, missing }
    }

    fn connect(&self, mesh: &Mesh, peer: Rank, member: &Member, address: &[u8]) -> Result<()> {
        let start = Instant::now();
        mesh.connect(peer, address).map_err(|why| match why {
            // Gloo waits a little less than it was told.
            Trouble::Io(_) if start.elapsed() >= self.options.timeout / 2 => {
                self.timed_out(vec![peer])
            }
            Trouble::Io(_) => Error::PeerDied { op: self.name(), rank: peer, pid: member.pid },
            why => self.refused(why),
        })
    }

    fn refused(&self, why: Trouble) -> Error {
        let error = std::io::Error::other(why.text());
        Error::io(format!("{}: gloo", self.name()), &error)
    }

    /// A first barrier, over connections that are there.
    fn finish(&self, control: Control, data: Arc<Mesh>) -> Result<Gloo> {
        let none = || (0..self.world).map(|_| None).collect();
        let mut state = State {
            seq: 0,
            own: None,
            prints: [none(), none()],
            sent: vec![0; self.world],
            received: vec![0; self.world],
            data: Some(data),
            scratch: Vec::new(),
        };
        letters(&control, self.rank, self.world, &mut state).map_err(|why| self.refused(why))?;
        let gloo = Gloo::new(self.rank, self.world, self.options, control, state)?;
        let op = OpDesc { verb: Verb::Barrier, dtype: DType::U8, op: None, root: None, count: 0 };
        Turn { gloo: &gloo, op: &op, seq: None, timeout: self.left() }
            .enter(&mut gloo.state.lock())?;
        Ok(gloo)
    }
}

/// What a rank says of itself in the store.
struct Member {
    pid: u32,
    /// Whether only its own machine reaches it.
    loopback: bool,
    /// For the first mesh and then for the second, one for every peer of it, of one length.
    addresses: Vec<u8>,
}

impl Member {
    fn read(bytes: &[u8], rank: Rank, world: usize) -> Result<Self> {
        let garbled = || {
            let text = format!("what rank {rank} says of itself in the store is garbled");
            Error::InvalidArgument(text)
        };
        let (pid, rest) = bytes.split_first_chunk().ok_or_else(garbled)?;
        let (said, rest) = rest.split_first_chunk().ok_or_else(garbled)?;
        let (loopback, addresses) = rest.split_first_chunk().ok_or_else(garbled)?;
        let said = u32::from_le_bytes(*said) as usize;
        if said != world {
            let text = format!("rank {rank} joins a group of {said}, not of {world}");
            return Err(Error::InvalidArgument(text));
        }
        let count = 2 * (world - 1);
        if count > 0 && (addresses.is_empty() || addresses.len() % count != 0) {
            return Err(garbled());
        }
        let loopback = u32::from_le_bytes(*loopback) != 0;
        Ok(Self { pid: u32::from_le_bytes(*pid), loopback, addresses: addresses.to_vec() })
    }

    /// Where `rank` is to connect to this member, in one of its meshes.
    fn address(&self, mesh: usize, rank: Rank, world: usize, own: Rank) -> &[u8] {
        let len = self.addresses.len() / (2 * (world - 1));
        // A member has no address for itself.
        let place = if rank < own { rank } else { rank - 1 };
        &self.addresses[(mesh * (world - 1) + place) * len..][..len]
    }
}

/// A machine that has a loopback address for its own name is reached by nobody else.
fn check_reach(members: &[Member]) -> Result<()> {
    let alone = members.iter().position(|member| member.loopback);
    let among = members.iter().position(|member| !member.loopback);
    let (Some(alone), Some(among)) = (alone, among) else { return Ok(()) };
    Err(Error::InvalidArgument(format!(
        "rank {alone} reaches the store by a loopback address and rank {among} does not: give the \
         store's address, or a name that means the same address on every machine"
    )))
}

fn check_world(rank: Rank, world: usize) -> Result<()> {
    if !(1..=MAX_RANKS).contains(&world) {
        let text = format!("a group over gloo has 1 to {MAX_RANKS} ranks, not {world}");
        return Err(Error::InvalidArgument(text));
    }
    if rank >= world {
        let text = format!("there is no rank {rank} among {world} ranks");
        return Err(Error::InvalidArgument(text));
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_member_is_read_back_or_refused() {
        let mut bytes = [7_u32, 3, 1].map(u32::to_le_bytes).concat();
        bytes.extend([[10; 5], [11; 5], [20; 5], [21; 5]].concat());
        let member = Member::read(&bytes, 1, 3).unwrap();
        assert_eq!((member.pid, member.loopback), (7, true));
        let address = |mesh, rank| member.address(mesh, rank, 3, 1)[0];
        assert_eq!([address(0, 0), address(0, 2), address(1, 0), address(1, 2)], [10, 11, 20, 21]);
        for cut in 0..bytes.len() {
            let whole = cut > 12 && (cut - 12) % 4 == 0;
            assert_eq!(Member::read(&bytes[..cut], 1, 3).is_ok(), whole, "{cut}");
        }
        assert!(Member::read(&bytes, 1, 4).is_err());
    }

    #[test]
    fn ranks_that_cannot_reach_one_another_are_told() {
        let member = |loopback| Member { pid: 1, loopback, addresses: Vec::new() };
        assert!(check_reach(&[member(true), member(true)]).is_ok());
        assert!(check_reach(&[member(false), member(false)]).is_ok());
        let error = check_reach(&[member(false), member(true)]).unwrap_err().to_string();
        assert!(
            error.starts_with("rank 1 reaches") && error.contains("rank 0 does not"),
            "{error}"
        );
    }

    #[test]
    fn only_ranks_that_can_be_join() {
        assert!(check_world(0, 0).is_err());
        assert!(check_world(2, 2).is_err());
        assert!(check_world(0, MAX_RANKS + 1).is_err());
        assert!(check_world(1023, MAX_RANKS).is_ok());
    }
}
