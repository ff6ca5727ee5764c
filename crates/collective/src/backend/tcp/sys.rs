//! Linux system calls: non-blocking sends and receives of raw memory, `ppoll`, event descriptors, and the
//! addresses of interfaces.

#![expect(unsafe_code, reason = "system calls on raw memory")]

use std::ffi::CStr;
use std::io;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};
use std::os::fd::{AsRawFd, BorrowedFd, FromRawFd, OwnedFd};
use std::time::Duration;

use crate::span::Span;

/// Flags of all sends.
const FLAGS: libc::c_int = libc::MSG_DONTWAIT | libc::MSG_NOSIGNAL;

/// Sends as much as fits without blocking; returns the number of bytes.
pub(super) fn send(socket: BorrowedFd<'_>, bytes: &[u8]) -> io::Result<usize> {
    // SAFETY: the socket is open; the bytes are only read.
    check(unsafe { libc::send(socket.as_raw_fd(), bytes.as_ptr().cast(), bytes.len(), FLAGS) })
}

/// Receives what has arrived; returns the number of bytes, 0 if the peer has closed the connection.
pub(super) fn receive(socket: BorrowedFd<'_>, into: &mut [u8]) -> io::Result<usize> {
    let (start, len) = (into.as_mut_ptr().cast(), into.len());
    // SAFETY: the socket is open; no more than `len` bytes are written.
    check(unsafe { libc::recv(socket.as_raw_fd(), start, len, libc::MSG_DONTWAIT) })
}

/// Sends `head`, then `body`, as much as fits without blocking; returns the number of bytes.
pub(super) fn send_both(socket: BorrowedFd<'_>, head: &[u8], body: Span<'_>) -> io::Result<usize> {
    let parts = [
        libc::iovec { iov_base: head.as_ptr().cast_mut().cast(), iov_len: head.len() },
        libc::iovec { iov_base: body.ptr().cast(), iov_len: body.len() },
    ];
    let message = message(&parts);
    // SAFETY: the socket is open; the parts are alive during the call and only read from.
    check(unsafe { libc::sendmsg(socket.as_raw_fd(), &raw const message, FLAGS) })
}

/// Receives into `body`, and further bytes into `rest`; returns the number of bytes, 0 if the peer has
/// closed the connection.
pub(super) fn receive_both(
    socket: BorrowedFd<'_>,
    body: Span<'_>,
    rest: &mut [u8],
) -> io::Result<usize> {
    let parts = [
        libc::iovec { iov_base: body.ptr().cast(), iov_len: body.len() },
        libc::iovec { iov_base: rest.as_mut_ptr().cast(), iov_len: rest.len() },
    ];
    let mut message = message(&parts);
    // SAFETY: the socket is open; the parts are alive during the call, writable (`body` is a writable
    // span, as its creator argues) and disjoint.
    check(unsafe { libc::recvmsg(socket.as_raw_fd(), &raw mut message, libc::MSG_DONTWAIT) })
}

fn message(parts: &[libc::iovec]) -> libc::msghdr {
    // SAFETY: a plain C struct, for which zeros are valid.
    let mut message: libc::msghdr = unsafe { std::mem::zeroed() };
    message.msg_iov = parts.as_ptr().cast_mut();
    message.msg_iovlen = parts.len();
    message
}

fn check(count: libc::ssize_t) -> io::Result<usize> {
    usize::try_from(count).map_err(|_| io::Error::last_os_error())
}

/// Returns an entry for [`poll`].
pub(in crate::backend) fn interest(fd: BorrowedFd<'_>, read: bool, write: bool) -> libc::pollfd {
    let bit = |wanted, bit| if wanted { bit } else { 0 };
    let events = bit(read, libc::POLLIN) | bit(write, libc::POLLOUT);
    libc::pollfd { fd: fd.as_raw_fd(), events, revents: 0 }
}

/// Waits until one of the descriptors is ready, a signal arrives, or the timeout has passed.
pub(in crate::backend) fn poll(
    fds: &mut [libc::pollfd],
    timeout: Option<Duration>,
) -> io::Result<()> {
    let count = libc::nfds_t::try_from(fds.len()).expect("a rank has few thousand descriptors");
    let timeout = timeout.map(|timeout| libc::timespec {
        tv_sec: timeout.as_secs().try_into().unwrap_or(libc::time_t::MAX),
        tv_nsec: timeout.subsec_nanos().into(),
    });
    let timeout = timeout.as_ref().map_or(std::ptr::null(), |timeout| &raw const *timeout);
    // SAFETY: the array has `count` entries, and all pointers are valid during the call.
    let ready = unsafe { libc::ppoll(fds.as_mut_ptr(), count, timeout, std::ptr::null()) };
    match ready {
        0.. => Ok(()),
        _ => match io::Error::last_os_error() {
            error if error.kind() == io::ErrorKind::Interrupted => Ok(()),
            error => Err(error),
        },
    }
}

/// An eventfd: a flag that [`poll`] can wait for.
#[derive(Debug)]
pub(super) struct EventFd(OwnedFd);

impl EventFd {
    pub(super) fn new() -> io::Result<Self> {
        // SAFETY: the arguments are plain numbers.
        let raw = unsafe { libc::eventfd(0, libc::EFD_CLOEXEC | libc::EFD_NONBLOCK) };
        if raw < 0 {
            return Err(io::Error::last_os_error());
        }
        // SAFETY: the kernel just created it, and nothing else owns it.
        Ok(Self(unsafe { OwnedFd::from_raw_fd(raw) }))
    }

    /// Makes it readable.
    pub(super) fn signal(&self) {
        let one = 1_u64.to_ne_bytes();
        // SAFETY: eight bytes that live during the call. It fails only if it is readable already.
        unsafe { libc::write(self.0.as_raw_fd(), one.as_ptr().cast(), one.len()) };
    }

    /// Makes it not readable.
    pub(super) fn clear(&self) {
        let mut count = [0_u8; 8];
        // SAFETY: eight bytes that live during the call. It fails only if it is not readable.
        unsafe { libc::read(self.0.as_raw_fd(), count.as_mut_ptr().cast(), count.len()) };
    }

    pub(super) fn fd(&self) -> BorrowedFd<'_> {
        std::os::fd::AsFd::as_fd(&self.0)
    }
}

/// Returns name and address of the interfaces that are up, one entry per address.
pub(super) fn interfaces() -> io::Result<Vec<(String, IpAddr)>> {
    let mut list = std::ptr::null_mut();
    // SAFETY: the pointer is valid during the call, which sets it to a list or fails.
    if unsafe { libc::getifaddrs(&raw mut list) } != 0 {
        return Err(io::Error::last_os_error());
    }
    let mut found = Vec::new();
    let mut next = list;
    // SAFETY: null, or an entry of the list, which is freed below.
    while let Some(entry) = unsafe { next.as_ref() } {
        next = entry.ifa_next;
        let is_up = entry.ifa_flags & libc::IFF_UP.cast_unsigned() != 0;
        if let (true, Some(ip)) = (is_up, ip_of(entry.ifa_addr)) {
            // SAFETY: every entry has a name, a C string that lives as long as the list.
            let name = unsafe { CStr::from_ptr(entry.ifa_name) };
            found.push((name.to_string_lossy().into_owned(), ip));
        }
    }
    // SAFETY: the list of `getifaddrs`, to which no reference is left.
    unsafe { libc::freeifaddrs(list) };
    Ok(found)
}

/// Returns the IP address in an entry of `getifaddrs`, if it has one.
fn ip_of(addr: *const libc::sockaddr) -> Option<IpAddr> {
    // SAFETY: null, or an address of the list, of which this reads the family.
    let family = i32::from(unsafe { addr.as_ref() }?.sa_family);
    match family {
        libc::AF_INET => {
            // SAFETY: the family determines the type; its alignment is not guaranteed.
            let addr = unsafe { addr.cast::<libc::sockaddr_in>().read_unaligned() };
            Some(Ipv4Addr::from(u32::from_be(addr.sin_addr.s_addr)).into())
        }
        libc::AF_INET6 => {
            // SAFETY: as above.
            let addr = unsafe { addr.cast::<libc::sockaddr_in6>().read_unaligned() };
            Some(Ipv6Addr::from(addr.sin6_addr.s6_addr).into())
        }
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use std::os::fd::AsFd;

    use super::*;

    #[test]
    fn an_event_fd_is_readable_from_signal_to_clear() {
        let event = EventFd::new().unwrap();
        let readable = || {
            let mut fds = [interest(event.fd(), true, false)];
            poll(&mut fds, Some(Duration::ZERO)).unwrap();
            fds[0].revents != 0
        };
        assert!(!readable());
        event.signal();
        event.signal();
        assert!(readable());
        event.clear();
        assert!(!readable());
    }

    #[test]
    fn two_parts_are_sent_and_received_with_one_call() {
        let (one, two) = std::os::unix::net::UnixStream::pair().unwrap();
        let (mut from, mut to, mut rest) = ([3_u8, 4, 5], [0_u8; 4], [0_u8; 8]);
        let body = Span::from_mut(&mut from);
        assert_eq!(send_both(one.as_fd(), &[1, 2], body).unwrap(), 5);
        let into = Span::from_mut(&mut to);
        assert_eq!(receive_both(two.as_fd(), into, &mut rest).unwrap(), 5);
        let again = receive_both(two.as_fd(), into, &mut rest).unwrap_err();
        assert_eq!(again.kind(), io::ErrorKind::WouldBlock);
        assert_eq!((to, rest[0]), ([1, 2, 3, 4], 5));
    }

    #[test]
    fn the_loopback_interface_is_found() {
        let all = interfaces().unwrap();
        assert!(all.iter().any(|(name, ip)| name == "lo" && ip.is_loopback()), "{all:?}");
    }
}
