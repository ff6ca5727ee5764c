//! The backend over libgloo: gloo moves blocks over TCP; this crate implements the protocol.
//!
//! It is the [`tcp`](super::tcp) backend with other [streams](stream): fingerprints, headers and
//! failures use the TCP backend's sockets, and blocks use gloo. Three limits of gloo (in Debian's
//! version of 2022 and in PyTorch's) require this:
//!
//! * A message whose length differs from what its receiver expects ends the process, from a gloo
//!   thread where the exception cannot be caught; a message of another type is misread. So gloo
//!   only gets lengths that both ends have agreed on: a receive is posted after a header that
//!   matches.
//! * Gloo cannot abort, a wait that times out closes every connection, and the error names no rank.
//!   So this crate implements the waits, and finds the missing ranks through the control
//!   connections.
//! * Gloo folds around a ring, so the result depends on the offset. So gloo only moves blocks
//!   between pairs, and this crate's algorithms fold.
//!
//! A rank has three connections to each peer and one gloo thread. Data are not encrypted, and any
//! process that can connect to a rank's ports while the group is made can disturb it, so use it
//! only in trusted networks. Gloo writes to sockets that may be closed: the process must ignore
//! `SIGPIPE`, as Rust programs do.
//!
//! Gloo's own rendezvous needs the host's name and a store without deadlines. So gloo only creates
//! the sockets, and this crate exchanges their addresses through its store, which names missing
//! ranks. The sockets are bound to the address by which this machine reaches the store.

mod mesh;
mod stream;
mod sys;

use std::net::{IpAddr, Ipv4Addr};
use std::sync::Arc;
use std::time::Instant;

use self::mesh::{CONNECTION_FAILED, Mesh};
use self::stream::Connections;
use super::rendezvous::{Joining, all_to_all_records};
use super::tcp::connect::connect;
use super::tcp::{Tcp, check_world};
use crate::net::sockopt::allow_open_files;
use crate::{Error, Rank, Result};

/// Joins a group; returns when all ranks have.
pub(crate) fn join(joining: &Joining<'_>, reason: String) -> Result<Tcp> {
    check_world("gloo", joining.world())?;
    allow_open_files(joining.world(), &format!("joining {}", joining.group()))?;
    let gloo = Arc::new(Connections::new(mesh(joining)?));
    let mut connections = connect(joining, &[])?;
    for (peer, place) in connections.data.iter_mut().enumerate() {
        if let Some(socket) = place.take() {
            *place = Some(Box::new(stream::GlooStream::new(socket, Arc::clone(&gloo), peer)));
        }
    }
    Tcp::new(joining, ("gloo", reason), connections, false)
}

/// Connects gloo to all peers.
fn mesh(joining: &Joining<'_>) -> Result<Mesh> {
    let (rank, world) = (joining.rank, joining.world());
    let ips: Vec<_> = joining.locations.iter().map(|place| ip(place.ip)).collect();
    check_reach(&ips)?;
    let refused = |why| Error::io(format!("joining {}: gloo", joining.group()), &why);
    let mesh = Mesh::new(ips[rank], rank, world, joining.options.timeout).map_err(refused)?;
    let for_peer = |peer: Rank| match peer == rank {
        true => Ok(Vec::new()),
        false => mesh.address(peer).map_err(refused),
    };
    // This rank's records in the store: for each peer, the address to connect to.
    let own: Vec<Vec<u8>> = (0..world).map(for_peer).collect::<Result<_>>()?;
    let theirs = all_to_all_records(joining, "gloo", &own)?;
    for (peer, address) in theirs.iter().enumerate().filter(|&(peer, _)| peer != rank) {
        let start = Instant::now();
        mesh.connect(peer, address).map_err(|why| match why.kind() {
            // Gloo may return a little before its timeout.
            CONNECTION_FAILED if start.elapsed() >= joining.options.timeout / 2 => {
                joining.timeout("connecting", vec![peer])
            }
            CONNECTION_FAILED => joining.died(peer),
            _ => refused(why),
        })?;
    }
    Ok(mesh)
}

/// Returns the address on which a rank listens. Ranks of a store without an address are on one
/// machine.
fn ip(towards_the_store: Option<IpAddr>) -> IpAddr {
    towards_the_store.unwrap_or(IpAddr::V4(Ipv4Addr::LOCALHOST))
}

/// Returns an error if only some ranks listen on a loopback address, which other machines cannot
/// reach.
fn check_reach(ips: &[IpAddr]) -> Result<()> {
    let local = ips.iter().position(IpAddr::is_loopback);
    let other = ips.iter().position(|ip| !ip.is_loopback());
    let (Some(local), Some(other)) = (local, other) else { return Ok(()) };
    Err(Error::InvalidArgument(format!(
        "rank {local} reaches the store by a loopback address and rank {other} does not: use the \
         store's IP address, or a name that resolves to the same address on every machine"
    )))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranks_that_cannot_reach_each_other_are_an_error() {
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
