//! Chooses the address at which peers reach this rank.
//!
//! It is the address of the interface over which this rank reaches the store, because the peers
//! reach the store, too. The hostname is not used, because on many machines it resolves to a
//! loopback address. The environment variable `COLLECTIVE_IFNAME` overrides the choice: `eth0`
//! selects this interface, `^lo` any other than `lo`.

use std::net::{IpAddr, SocketAddr, UdpSocket};

use if_addrs::Interface;

use crate::{Error, Result};

/// The variable that names the interface.
const IFNAME: &str = "COLLECTIVE_IFNAME";

/// Returns the address to publish. `to_store` is the local address of this rank's connection to the
/// store; if it is a loopback address, the local address towards `remote`, a peer on another
/// machine, is used.
pub(crate) fn own(to_store: IpAddr, remote: Option<IpAddr>) -> Result<IpAddr> {
    let route = match remote {
        Some(peer) if to_store.is_loopback() => local_address_towards(peer)?,
        _ => to_store,
    };
    match std::env::var(IFNAME) {
        Err(_) => Ok(route),
        Ok(name) => choose(&name, route, &interfaces()?),
    }
}

/// Returns this machine's address towards `peer`, from the routing table; sends nothing.
fn local_address_towards(peer: IpAddr) -> Result<IpAddr> {
    let local_addr = || {
        let any: IpAddr = if peer.is_ipv4() { [0; 4].into() } else { [0_u8; 16].into() };
        let socket = UdpSocket::bind(SocketAddr::new(any, 0))?;
        socket.connect(SocketAddr::new(peer, 9))?;
        socket.local_addr()
    };
    let fail = |error| Error::io(format!("finding a route to {peer}"), &error);
    Ok(local_addr().map_err(fail)?.ip())
}

/// Returns name and address of the interfaces that are up, one entry per address.
fn interfaces() -> Result<Vec<(String, IpAddr)>> {
    let all = if_addrs::get_if_addrs().map_err(|error| Error::io("listing interfaces", &error))?;
    let up = all.into_iter().filter(Interface::is_oper_up);
    Ok(up.map(|interface| (interface.name.clone(), interface.ip())).collect())
}

fn choose(name: &str, route: IpAddr, all: &[(String, IpAddr)]) -> Result<IpAddr> {
    let wanted = |candidate: &str| match name.strip_prefix('^') {
        Some(other) => candidate != other,
        None => candidate == name,
    };
    let mut matching: Vec<_> =
        all.iter().filter(|(name, _)| wanted(name)).map(|&(_, ip)| ip).collect();
    // Prefers `route` itself, then its address family; link-local addresses come last.
    matching.sort_by_key(|ip| {
        let link_local = matches!(ip, IpAddr::V6(ip) if ip.is_unicast_link_local());
        (*ip != route, link_local, ip.is_loopback(), ip.is_ipv4() != route.is_ipv4())
    });
    matching.first().copied().ok_or_else(|| {
        let mut names: Vec<_> = all.iter().map(|(name, _)| name.as_str()).collect();
        names.dedup();
        let names = names.join(", ");
        Error::InvalidArgument(format!("{IFNAME}={name}: no such interface is up; found {names}"))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ifname_selects_or_excludes_an_interface() {
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
    fn the_loopback_interface_is_found() {
        let all = interfaces().unwrap();
        assert!(all.iter().any(|(name, ip)| name == "lo" && ip.is_loopback()), "{all:?}");
    }

    #[test]
    fn the_local_address_towards_loopback_is_loopback() {
        assert!(local_address_towards([127, 0, 0, 1].into()).unwrap().is_loopback());
    }
}
