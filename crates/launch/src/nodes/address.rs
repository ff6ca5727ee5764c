//! Names and addresses: of the node that hosts the control store, and of this host.

use std::io::{self, ErrorKind};
use std::net::{IpAddr, SocketAddr, TcpListener, TcpStream, ToSocketAddrs};
use std::time::{Duration, Instant};

use super::SLICE;
use crate::{Error, Result};

/// `host` without the brackets that an IPv6 address may have.
pub(crate) fn bare(host: &str) -> &str {
    host.strip_prefix('[').and_then(|rest| rest.strip_suffix(']')).unwrap_or(host)
}

/// Splits `HOST:PORT`, `[IPV6]:PORT`, or a host alone.
pub(crate) fn split_host_port(text: &str) -> Option<(&str, Option<u16>)> {
    let (host, port) = match text.rsplit_once(':') {
        // Not within an IPv6 address.
        Some((host, port)) if !host.contains(':') || host.ends_with(']') => {
            (host, Some(port.parse().ok()?))
        }
        _ => (text, None),
    };
    (!host.is_empty()).then_some((host, port))
}

/// `HOST:PORT`, with brackets around an IPv6 address.
pub(super) fn join(host: &str, port: u16) -> String {
    if host.contains(':') { format!("[{host}]:{port}") } else { format!("{host}:{port}") }
}

/// Returns the addresses of `host`. A name without an address is an error at once, but in a pod of Kubernetes, whose
/// name, like that of others, may become known after it has started, only after a minute.
///
/// # Errors
///
/// [`Error::Options`] with `flag`, name, port and the reason.
pub(crate) fn resolve(flag: &str, host: &str, port: u16) -> Result<Vec<IpAddr>> {
    let patience = match std::env::var_os("KUBERNETES_SERVICE_HOST") {
        Some(_) => POD_PATIENCE,
        None => Duration::ZERO,
    };
    let look_up = || Ok((host, port).to_socket_addrs()?.map(|addr| addr.ip()).collect());
    repeat(patience, look_up).map_err(|why| {
        let at = join(host, port);
        Error::Options(format!(
            "{flag} {host} (for {at}): {why}; give a name that all nodes know, or an address"
        ))
    })
}

/// Repeats `look_up` until it finds an address or `patience` is over.
fn repeat(
    patience: Duration,
    look_up: impl Fn() -> io::Result<Vec<IpAddr>>,
) -> Result<Vec<IpAddr>, String> {
    let start = Instant::now();
    loop {
        let why = match look_up() {
            Ok(found) if found.is_empty() => "the name has no address".to_owned(),
            Ok(found) => return Ok(found),
            Err(error) => error.to_string(),
        };
        if start.elapsed() >= patience {
            return Err(why);
        }
        std::thread::sleep(SLICE);
    }
}

/// Whether one of `addrs` is an address of this host.
pub(super) fn is_local(addrs: &[IpAddr]) -> bool {
    addrs.iter().any(|&ip| {
        let bound = TcpListener::bind(SocketAddr::new(ip, 0));
        // Whatever else goes wrong has nothing to do with whose address it is.
        !bound.is_err_and(|error| error.kind() == ErrorKind::AddrNotAvailable)
    })
}

/// Whether no address of the host accepts a connection, and one answers that the port is closed.
pub(super) fn refuses_connections(host: &str, port: u16) -> bool {
    let connect = |addr| TcpStream::connect_timeout(&addr, Duration::from_secs(1));
    let addrs = (host, port).to_socket_addrs().into_iter().flatten();
    let errors: Option<Vec<_>> = addrs.map(|addr| Some(connect(addr).err()?.kind())).collect();
    errors.is_some_and(|errors| errors.contains(&ErrorKind::ConnectionRefused))
}

/// The name of this host.
pub(crate) fn host_name() -> String {
    let name = std::fs::read_to_string("/proc/sys/kernel/hostname").unwrap_or_default();
    let name = name.trim();
    if name.is_empty() { "?".to_owned() } else { name.to_owned() }
}

/// Numbers as a list, `1, 2, 4`.
pub(super) fn list(numbers: impl IntoIterator<Item = usize>) -> String {
    numbers.into_iter().map(|number| number.to_string()).collect::<Vec<_>>().join(", ")
}

/// Time within which the name of a pod becomes known.
const POD_PATIENCE: Duration = Duration::from_secs(60);

#[cfg(test)]
mod tests {
    use std::cell::Cell;
    use std::net::Ipv4Addr;

    use super::*;

    #[test]
    fn ipv6_addresses_have_brackets_only_with_a_port() {
        assert_eq!((bare("[::1]"), bare("::1"), bare("host")), ("::1", "::1", "host"));
        assert_eq!((join("::1", 5), join("host", 5)), ("[::1]:5".to_owned(), "host:5".to_owned()));
    }

    #[test]
    fn unknown_name_is_refused_at_once() {
        let error =
            resolve("--master-addr", "no-such-host.invalid", 29500).unwrap_err().to_string();
        assert!(error.contains("--master-addr no-such-host.invalid"), "{error}");
        assert!(error.contains("29500"), "{error}");
    }

    #[test]
    fn name_that_becomes_known_is_found() {
        let (calls, own) = (Cell::new(0), IpAddr::from(Ipv4Addr::LOCALHOST));
        let look_up = || {
            calls.set(calls.get() + 1);
            match calls.get() {
                1 => Err(ErrorKind::NotFound.into()),
                2 => Ok(Vec::new()),
                _ => Ok(vec![own]),
            }
        };
        assert_eq!(repeat(POD_PATIENCE, look_up), Ok(vec![own]));
        calls.set(0);
        assert!(repeat(Duration::ZERO, look_up).is_err());
        assert_eq!(calls.get(), 1);
    }

    #[test]
    fn is_local_knows_the_addresses_of_this_host() {
        assert!(is_local(&[Ipv4Addr::LOCALHOST.into()]));
        // For documentation (RFC 5737): nobody's.
        assert!(!is_local(&[Ipv4Addr::new(192, 0, 2, 1).into()]));
    }
}
