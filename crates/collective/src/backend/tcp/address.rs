//! Under which address peers reach this rank.
//!
//! That of the interface over which this rank reaches the store, since the peers reach that too: no
//! hostname is ever asked for, which on many machines leads to the loopback. The environment
//! variable `COLLECTIVE_IFNAME` overrides it: `eth0` is this interface, `^lo` any but this one.

use std::net::{IpAddr, SocketAddr, UdpSocket};

use super::sys;
use crate::{Error, Result};

/// The variable that names the interface.
const IFNAME: &str = "COLLECTIVE_IFNAME";

/// The address that the peers are told. `towards` is this machine's address on the way to the store;
/// `elsewhere` is an address of a peer on another machine, should that be the loopback.
pub(super) fn own(towards: IpAddr, elsewhere: Option<IpAddr>) -> Result<IpAddr> {
    let route = match elsewhere {
        Some(peer) if towards.is_loopback() => on_the_way_to(peer)?,
        _ => towards,
    };
    match std::env::var(IFNAME) {
        Err(_) => Ok(route),
        Ok(name) => {
            let all = sys::interfaces();
            choose(&name, route, &all.map_err(|error| Error::io("listing interfaces", &error))?)
        }
    }
}

/// This machine's address towards another; asks the routing table and sends nothing.
fn on_the_way_to(peer: IpAddr) -> Result<IpAddr> {
    let ask = || {
        let any: IpAddr = if peer.is_ipv4() { [0; 4].into() } else { [0_u8; 16].into() };
        let socket = UdpSocket::bind(SocketAddr::new(any, 0))?;
        socket.connect(SocketAddr::new(peer, 9))?;
        socket.local_addr()
    };
    let route = ask().map_err(|error| Error::io(format!("finding a route to {peer}"), &error))?;
    Ok(route.ip())
}

fn choose(name: &str, route: IpAddr, all: &[(String, IpAddr)]) -> Result<IpAddr> {
    let wanted = |candidate: &str| match name.strip_prefix('^') {
        Some(other) => candidate != other,
        None => candidate == name,
    };
    let mut fitting: Vec<_> =
        all.iter().filter(|(name, _)| wanted(name)).map(|&(_, ip)| ip).collect();
    // The route's own address if it may be; then its family; addresses of one link only, last.
    fitting.sort_by_key(|ip| {
        let link_local = matches!(ip, IpAddr::V6(ip) if ip.is_unicast_link_local());
        (*ip != route, link_local, ip.is_loopback(), ip.is_ipv4() != route.is_ipv4())
    });
    fitting.first().copied().ok_or_else(|| {
        let mut names: Vec<_> = all.iter().map(|(name, _)| name.as_str()).collect();
        names.dedup();
        let names = names.join(", ");
        Error::InvalidArgument(format!("{IFNAME}={name}: no such interface is up, of {names}"))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_interface_is_named_or_excluded() {
        let ip = |text: &str| text.parse::<IpAddr>().unwrap();
        let all: Vec<(String, IpAddr)> = [
            ("lo", "127.0.0.1"),
            ("eth0", "fe80::1"),
            ("eth0", "10.0.0.1"),
            ("ib0", "fe80::2"),
            ("ib0", "2001:db8::2"),
        ]
        .map(|(name, addr)| (name.to_owned(), ip(addr)))
        .into();
        let choose = |name, route| choose(name, ip(route), &all);
        assert_eq!(choose("eth0", "127.0.0.1").unwrap(), ip("10.0.0.1"));
        assert_eq!(choose("ib0", "10.0.0.1").unwrap(), ip("2001:db8::2"));
        assert_eq!(choose("^lo", "127.0.0.1").unwrap(), ip("10.0.0.1"));
        assert_eq!(choose("^eth0", "10.0.0.1").unwrap(), ip("2001:db8::2"));
        assert_eq!(choose("^ib0", "10.0.0.1").unwrap(), ip("10.0.0.1"));
        let error = choose("eth1", "10.0.0.1").unwrap_err().to_string();
        assert!(error.contains("eth1") && error.contains("lo, eth0, ib0"), "{error}");
    }

    #[test]
    fn the_route_to_this_machine_is_the_loopback() {
        assert!(on_the_way_to([127, 0, 0, 1].into()).unwrap().is_loopback());
    }
}
