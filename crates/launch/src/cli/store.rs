//! `launch store`: hosts the control store of an elastic job on a host that is not one of its
//! nodes, so that the job survives the loss of any node.

use std::io::Write;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};

use clap::Args;
use collective::store::TcpStoreServer;
use signal_hook::consts::{SIGINT, SIGTERM};
use signal_hook::iterator::Signals;

use crate::{Error, Result, address};

/// Arguments of `launch store`.
#[derive(Debug, Args)]
pub struct StoreArgs {
    /// PORT (on all addresses of this host), HOST:PORT or [ADDRESS]:PORT; port 0 chooses a free
    /// port.
    #[arg(long, default_value = "29400", value_parser = listen)]
    listen: (Option<String>, u16),
}

/// Serves a store until SIGINT or SIGTERM. Prints its address to standard output once it is
/// listening.
///
/// # Errors
///
/// Returns an error if the host name does not resolve, the address is not one of this host, or the
/// port is in use.
pub fn serve_store(args: &StoreArgs) -> Result<()> {
    let signals = Signals::new([SIGINT, SIGTERM]);
    let mut signals = signals.map_err(Error::io("handle signals"))?;
    let server = bind(&args.listen)?;
    let mut out = std::io::stdout().lock();
    // Standard output may be closed: the store serves anyway.
    let _ = writeln!(out, "listening on {}", server.local_addr()).and_then(|()| out.flush());
    signals.forever().next();
    Ok(())
}

fn bind((host, port): &(Option<String>, u16)) -> Result<TcpStoreServer> {
    let at = |ip: IpAddr| TcpStoreServer::bind(SocketAddr::new(ip, *port));
    Ok(match host {
        // IPv6 and IPv4, or IPv4 alone where IPv6 is disabled.
        None => at(Ipv6Addr::UNSPECIFIED.into()).or_else(|_| at(Ipv4Addr::UNSPECIFIED.into()))?,
        Some(host) => at(address::resolve("--listen", address::bare(host), *port)?[0])?,
    })
}

fn listen(text: &str) -> Result<(Option<String>, u16), String> {
    match (text.parse(), address::split_host_port(text)) {
        (Ok(port), _) => Ok((None, port)),
        (_, Some((host, Some(port)))) => Ok((Some(host.to_owned()), port)),
        _ => Err(format!("`{text}` is not PORT, HOST:PORT or [ADDRESS]:PORT")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn listen_takes_port_or_host_and_port() {
        assert_eq!(listen("7"), Ok((None, 7)));
        assert_eq!(listen("h:0"), Ok((Some("h".to_owned()), 0)));
        assert_eq!(listen("[::1]:7"), Ok((Some("[::1]".to_owned()), 7)));
        for wrong in ["", "h", "h:", ":7", "::1:7", "h:70000"] {
            assert!(listen(wrong).unwrap_err().contains("HOST:PORT"), "{wrong}");
        }
    }
}
