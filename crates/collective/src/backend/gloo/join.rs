//! How the ranks meet: each says in the store where its sockets listen, and connects to the others.
//!
//! Gloo's own rendezvous asks for the host's name and for a store without deadlines. So gloo only
//! makes the sockets here, and the store is ours: missing ranks are named. The sockets are bound to
//! the address that this machine has on its way to the store.

use std::net::{IpAddr, Ipv4Addr};
use std::sync::Arc;
use std::time::Instant;

use serde::{Deserialize, Serialize};

use super::control::Control;
use super::mesh::{Device, Mesh, Trouble};
use super::turn::{Turn, letters};
use super::{Gloo, State};
use crate::backend::meet::{Joining, tell_each};
use crate::{DType, Error, OpDesc, Rank, Result, Verb};

/// There are two connections to each.
const MAX_RANKS: usize = 1024;

/// What a rank says to another in the store: where that is to connect to its mesh for control, and to
/// that for data. Nothing to itself.
#[derive(Debug, Serialize, Deserialize)]
struct Member([Vec<u8>; 2]);

/// Joins a group; returns when all ranks have.
pub(crate) fn join(joining: &Joining<'_>, reason: String) -> Result<Gloo> {
    let (rank, world) = (joining.rank, joining.world());
    if world > MAX_RANKS {
        let text = format!("a group over gloo has 1 to {MAX_RANKS} ranks, not {world}");
        return Err(Error::InvalidArgument(text));
    }
    let ips: Vec<_> = joining.places.iter().map(|place| ip(place.ip)).collect();
    check_reach(&ips)?;
    let refused = |why| refused(joining, why);
    let device = Device::new(ips[rank]).map_err(refused)?;
    let mesh = || Mesh::new(&device, rank, world, joining.options.timeout).map_err(refused);
    let meshes = [mesh()?, mesh()?];
    let for_peer = |peer: Rank| {
        let address = |mesh: &Mesh| match peer == rank {
            true => Ok(Vec::new()),
            false => mesh.address(peer).map_err(refused),
        };
        Ok(Member([address(&meshes[0])?, address(&meshes[1])?]))
    };
    let own: Vec<Member> = (0..world).map(for_peer).collect::<Result<_>>()?;
    let members: Vec<Member> = tell_each(joining, "gloo", &own)?;
    for (index, mesh) in meshes.iter().enumerate() {
        for (peer, Member(theirs)) in members.iter().enumerate().filter(|&(peer, _)| peer != rank) {
            connect(joining, mesh, peer, &theirs[index])?;
        }
    }
    let [control, data] = meshes;
    let pids = joining.places.iter().map(|place| place.pid).collect();
    let control = Control::new(Arc::new(control), rank, pids).map_err(refused)?;
    finish(joining, reason, control, Arc::new(data))
}

/// Where a rank listens; ranks that meet in a store without an address are on one machine.
fn ip(towards_the_store: Option<IpAddr>) -> IpAddr {
    towards_the_store.unwrap_or(IpAddr::V4(Ipv4Addr::LOCALHOST))
}

/// A machine that has a loopback address for its own name is reached by nobody else.
fn check_reach(ips: &[IpAddr]) -> Result<()> {
    let alone = ips.iter().position(IpAddr::is_loopback);
    let among = ips.iter().position(|ip| !ip.is_loopback());
    let (Some(alone), Some(among)) = (alone, among) else { return Ok(()) };
    Err(Error::InvalidArgument(format!(
        "rank {alone} reaches the store by a loopback address and rank {among} does not: give the \
         store's address, or a name that means the same address on every machine"
    )))
}

fn connect(joining: &Joining<'_>, mesh: &Mesh, peer: Rank, address: &[u8]) -> Result<()> {
    let start = Instant::now();
    mesh.connect(peer, address).map_err(|why| match why {
        // Gloo waits a little less than it was told.
        Trouble::Io(_) if start.elapsed() >= joining.options.timeout / 2 => {
            joining.timeout("connecting", vec![peer])
        }
        Trouble::Io(_) => joining.died(peer),
        why => refused(joining, why),
    })
}

fn refused(joining: &Joining<'_>, why: Trouble) -> Error {
    let error = std::io::Error::other(why.text());
    Error::io(format!("joining {}: gloo", joining.group()), &error)
}

/// A first barrier, over connections that are there.
fn finish(
    joining: &Joining<'_>,
    reason: String,
    control: Control,
    data: Arc<Mesh>,
) -> Result<Gloo> {
    let (rank, world) = (joining.rank, joining.world());
    let none = || (0..world).map(|_| None).collect();
    let mut state = State {
        seq: 0,
        own: None,
        prints: [none(), none()],
        sent: vec![0; world],
        received: vec![0; world],
        headers: Vec::new(),
        closing: None,
        data: Some(data),
        scratch: Vec::new(),
    };
    letters(&control, rank, world, &mut state).map_err(|why| refused(joining, why))?;
    let gloo = Gloo::new(joining, reason, control, state)?;
    let op = OpDesc { verb: Verb::Barrier, dtype: DType::U8, op: None, root: None, count: 0 };
    let timeout = joining.deadline.saturating_duration_since(Instant::now());
    Turn::new(&gloo, &op, timeout).enter(&mut gloo.state.lock())?;
    Ok(gloo)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranks_that_cannot_reach_one_another_are_told() {
        let [loopback, other] = ["127.0.0.1", "10.0.0.1"].map(|ip| ip.parse().unwrap());
        assert!(check_reach(&[loopback, loopback]).is_ok());
        assert!(check_reach(&[other, other]).is_ok());
        let error = check_reach(&[other, loopback]).unwrap_err().to_string();
        assert!(
            error.starts_with("rank 1 reaches") && error.contains("rank 0 does not"),
            "{error}"
        );
    }
}
