//! The backend over libgloo: gloo moves the bytes, over TCP; what they mean is ours.
//!
//! It is the group over [`tcp`](super::tcp) with other [streams](stream): fingerprints, headers and
//! failures travel as there, and blocks travel by gloo. Gloo's sharp edges (Debian's version of 2022
//! and PyTorch's alike) decide which:
//!
//! * A message of another length than its receiver expects ends the process, from a thread of
//!   gloo's where nothing can be caught, and one of another type is garbage. So gloo only sees
//!   lengths that both ends have agreed on: a receive begins behind a header that fits.
//! * Gloo cannot abort, a wait that times out closes every connection, and no rank is named. So
//!   waits are ours, and who is missing is known from the connections for control.
//! * Gloo folds around a ring, so the result depends on the offset. With [`Determinism::RankOrder`]
//!   it only moves blocks between pairs and we fold. With [`Determinism::Fast`] `all_reduce` and
//!   `reduce` are gloo's own, with our fold of two.
//!
//! A rank has three connections to each peer and one thread of gloo's. Data on the wire are not
//! encrypted, and whoever can connect to a rank's ports while the group is made can disturb it:
//! trusted networks only. Gloo writes to sockets that may be closed: the process must ignore
//! `SIGPIPE`, as Rust programs do.
//!
//! Gloo's own rendezvous asks for the host's name and for a store without deadlines. So gloo only
//! makes the sockets, and the store is ours: missing ranks are named. The sockets are bound to the
//! address that this machine has on its way to the store.
//!
//! [`Determinism::RankOrder`]: crate::Determinism::RankOrder
//! [`Determinism::Fast`]: crate::Determinism::Fast

mod mesh;
mod stream;
mod sys;

use std::io;
use std::net::{IpAddr, Ipv4Addr};
use std::sync::Arc;
use std::time::Instant;

use self::mesh::{GlooError, Job, Mesh};
use self::stream::Connections;
use super::rendezvous::{Joining, all_to_all_records};
use super::tcp::call::{Call, CallError};
use super::tcp::connect::connect;
use super::tcp::frame::Cause;
use super::tcp::{LibraryReductions, Tcp, check_world};
use crate::span::Span;
use crate::store::tcp::sockopt::allow_open_files;
use crate::{Error, Rank, ReduceOp, Result};

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
    let own = Reductions(gloo);
    Tcp::new(joining, ("gloo", reason), connections, false, Some(Box::new(own)))
}

/// Gloo's connections to all peers.
fn mesh(joining: &Joining<'_>) -> Result<Mesh> {
    let (rank, world) = (joining.rank, joining.world());
    let ips: Vec<_> = joining.locations.iter().map(|place| ip(place.ip)).collect();
    check_reach(&ips)?;
    let refused = |why| refused(joining, why);
    let mesh = Mesh::new(ips[rank], rank, world, joining.options.timeout).map_err(refused)?;
    let for_peer = |peer: Rank| match peer == rank {
        true => Ok(Vec::new()),
        false => mesh.address(peer).map_err(refused),
    };
    // What this rank says to each other in the store: where that is to connect to.
    let own: Vec<Vec<u8>> = (0..world).map(for_peer).collect::<Result<_>>()?;
    let theirs = all_to_all_records(joining, "gloo", &own)?;
    for (peer, address) in theirs.iter().enumerate().filter(|&(peer, _)| peer != rank) {
        let start = Instant::now();
        mesh.connect(peer, address).map_err(|why| match why {
            // Gloo waits a little less than it was told.
            GlooError::Io(_) if start.elapsed() >= joining.options.timeout / 2 => {
                joining.timeout("connecting", vec![peer])
            }
            GlooError::Io(_) => joining.died(peer),
            why => refused(why),
        })?;
    }
    Ok(mesh)
}

/// Where a rank listens; ranks that meet in a store without an address are on one machine.
fn ip(towards_the_store: Option<IpAddr>) -> IpAddr {
    towards_the_store.unwrap_or(IpAddr::V4(Ipv4Addr::LOCALHOST))
}

/// A machine that has a loopback address for its own name cannot be reached by others.
fn check_reach(ips: &[IpAddr]) -> Result<()> {
    let alone = ips.iter().position(IpAddr::is_loopback);
    let among = ips.iter().position(|ip| !ip.is_loopback());
    let (Some(alone), Some(among)) = (alone, among) else { return Ok(()) };
    Err(Error::InvalidArgument(format!(
        "rank {alone} reaches the store by a loopback address and rank {among} does not: give the \
         store's address, or a name that means the same address on every machine"
    )))
}

fn refused(joining: &Joining<'_>, why: GlooError) -> Error {
    Error::io(format!("joining {}: gloo", joining.group()), &io::Error::from(why))
}

/// Gloo's own all-reduce and reduce.
#[derive(Debug)]
struct Reductions(Arc<Connections>);

impl LibraryReductions for Reductions {
    fn reduce(
        &self,
        call: &Call<'_>,
        memory: Span<'_>,
        should_continue: &dyn Fn() -> bool,
    ) -> std::result::Result<(), CallError> {
        let op = call.desc;
        let pairwise = match op.op.expect("a reduction has an operator") {
            ReduceOp::PreMulSum(_) | ReduceOp::Avg => ReduceOp::Sum,
            op => op,
        };
        let job = Job::new(op.dtype, pairwise, should_continue);
        let next = (call.rank() + 1) % call.world();
        let mesh = self.0.mesh().map_err(|error| CallError::ConnectionLost(next, error))?;
        // Of the number in the group's history, as much as a tag holds.
        let tag = call.seq as u32;
        let result = mesh.reduce(memory, op.root, &job, tag, call.timeout);
        drop(mesh);
        result.map_err(|error| {
            self.0.close();
            match error {
                GlooError::Late(peer) => CallError::TimedOut(vec![peer]),
                GlooError::Io(text) => CallError::ConnectionLost(next, io::Error::other(text)),
                GlooError::Refused(text) => {
                    CallError::Failed(Cause::Aborted { reason: format!("gloo: {text}") })
                }
            }
        })
    }
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
