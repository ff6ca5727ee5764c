//! Host names and addresses, and the id of this launcher.

use std::hash::{BuildHasher, RandomState};
use std::io::{self, ErrorKind};
use std::net::{IpAddr, SocketAddr, TcpListener, TcpStream, ToSocketAddrs};
use std::time::{Duration, Instant};

use crate::{Error, Result};

/// Returns `host` without the brackets of an IPv6 address.
pub(crate) fn bare(host: &str) -> &str {
    host.strip_prefix('[').and_then(|rest| rest.strip_suffix(']')).unwrap_or(host)
}

/// Splits `HOST:PORT`, `[IPV6]:PORT`, or a host without a port.
pub(crate) fn split_host_port(text: &str) -> Option<(&str, Option<u16>)> {
    let (host, port) = match text.rsplit_once(':') {
        // A colon within an IPv6 address does not separate a port.
        Some((host, port)) if !host.contains(':') || host.ends_with(']') => {
            (host, Some(port.parse().ok()?))
        }
        _ => (text, None),
    };
    (!host.is_empty()).then_some((host, port))
}

/// Formats `HOST:PORT`, with brackets around an IPv6 address.
pub(crate) fn join(host: &str, port: u16) -> String {
    if host.contains(':') { format!("[{host}]:{port}") } else { format!("{host}:{port}") }
}

/// Resolves `host`. A name that does not resolve is an error at once; in a Kubernetes pod, where
/// names may become known after pods have started, only after a minute.
///
/// # Errors
///
/// [`Error::Options`] with the flag, name, port and reason.
pub(crate) fn resolve(flag: &'static str, host: &str, port: u16) -> Result<Vec<IpAddr>> {
    let timeout = match std::env::var_os("KUBERNETES_SERVICE_HOST") {
        Some(_) => POD_RESOLVE_TIMEOUT,
        None => Duration::ZERO,
    };
    let look_up = || Ok((host, port).to_socket_addrs()?.map(|addr| addr.ip()).collect());
    repeat(timeout, look_up).map_err(|why| {
        let at = join(host, port);
        let text = format!(
            "{flag} {host} (for {at}): {why}; use an address, or a name that resolves on all nodes"
        );
        Error::options(flag, text).caused_by(why)
    })
}

/// Repeats `look_up` until it finds an address or `timeout` has passed.
fn repeat(
    timeout: Duration,
    look_up: impl Fn() -> io::Result<Vec<IpAddr>>,
) -> io::Result<Vec<IpAddr>> {
    let start = Instant::now();
    loop {
        let why = match look_up() {
            Ok(found) if found.is_empty() => io::Error::other("the name has no address"),
            Ok(found) => return Ok(found),
            Err(error) => error,
        };
        if start.elapsed() >= timeout {
            return Err(why);
        }
        std::thread::sleep(RETRY_INTERVAL);
    }
}

/// Returns whether one of `addrs` is an address of this host.
pub(crate) fn is_local(addrs: &[IpAddr]) -> bool {
    addrs.iter().any(|&ip| {
        let bound = TcpListener::bind(SocketAddr::new(ip, 0));
        // Other errors do not mean that the address is not local.
        !bound.is_err_and(|error| error.kind() == ErrorKind::AddrNotAvailable)
    })
}

/// Returns whether no address of the host accepts a connection, and at least one refuses it.
pub(crate) fn refuses_connections(host: &str, port: u16) -> bool {
    let connect = |addr| TcpStream::connect_timeout(&addr, Duration::from_secs(1));
    let addrs = (host, port).to_socket_addrs().into_iter().flatten();
    let errors: Option<Vec<_>> = addrs.map(|addr| Some(connect(addr).err()?.kind())).collect();
    errors.is_some_and(|errors| errors.contains(&ErrorKind::ConnectionRefused))
}

/// Returns the name of this host.
pub(crate) fn host_name() -> String {
    let name = std::fs::read("/proc/sys/kernel/hostname").unwrap_or_default();
    let name = String::from_utf8_lossy(&name);
    let name = name.trim();
    if name.is_empty() { "?".to_owned() } else { name.to_owned() }
}

/// Returns a random number that identifies this launcher.
pub(crate) fn random_number() -> u64 {
    RandomState::new().hash_one(std::process::id())
}

/// Formats numbers as a list, `1, 2, 4`.
pub(crate) fn list(numbers: impl IntoIterator<Item = usize>) -> String {
    numbers.into_iter().map(|number| number.to_string()).collect::<Vec<_>>().join(", ")
}

/// Time between two lookups of a name.
const RETRY_INTERVAL: Duration = Duration::from_millis(500);
/// Time for the name of a Kubernetes pod to become known.
const POD_RESOLVE_TIMEOUT: Duration = Duration::from_secs(60);

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
    fn unknown_name_is_an_error_at_once() {
        let error = resolve("--master-addr", "no-such-host.invalid", 29500).unwrap_err();
        let Error::Options { option, source: Some(cause), .. } = &error else { panic!("{error}") };
        assert_eq!(*option, "--master-addr");
        assert!(cause.is::<io::Error>(), "{cause}");
        let error = error.to_string();
        assert!(error.contains("--master-addr no-such-host.invalid"), "{error}");
        assert!(error.contains("29500"), "{error}");
    }

    #[test]
    fn name_lookup_is_repeated_until_it_succeeds() {
        let (calls, own) = (Cell::new(0), IpAddr::from(Ipv4Addr::LOCALHOST));
        let look_up = || {
            calls.set(calls.get() + 1);
            match calls.get() {
                1 => Err(ErrorKind::NotFound.into()),
                2 => Ok(Vec::new()),
                _ => Ok(vec![own]),
            }
        };
        assert_eq!(repeat(POD_RESOLVE_TIMEOUT, look_up).unwrap(), [own]);
        calls.set(0);
        assert!(repeat(Duration::ZERO, look_up).is_err());
        assert_eq!(calls.get(), 1);
    }

    #[test]
    fn is_local_accepts_only_addresses_of_this_host() {
        assert!(is_local(&[Ipv4Addr::LOCALHOST.into()]));
        // Reserved for documentation (RFC 5737).
        assert!(!is_local(&[Ipv4Addr::new(192, 0, 2, 1).into()]));
    }
}
