//! Linux system calls: non-blocking sends and receives of raw memory, `ppoll` and event
//! descriptors.

#![expect(unsafe_code, reason = "system calls on raw memory")]

use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::time::Duration;

use rustix::event::{EventfdFlags, PollFd, PollFlags, eventfd};
use rustix::io::Errno;
use rustix::net::{RecvFlags, SendFlags};
use rustix::time::Timespec;

use crate::memory::Span;

/// Sends as much as fits without blocking; returns the number of bytes.
pub(crate) fn send(socket: BorrowedFd<'_>, bytes: &[u8]) -> io::Result<usize> {
    let flags = SendFlags::DONTWAIT | SendFlags::NOSIGNAL;
    Ok(rustix::net::send(socket, bytes, flags)?)
}

/// Receives what has arrived; returns the number of bytes, 0 if the peer has closed the connection.
pub(crate) fn receive(socket: BorrowedFd<'_>, into: &mut [u8]) -> io::Result<usize> {
    Ok(rustix::net::recv(socket, into, RecvFlags::DONTWAIT)?.0)
}

/// Sends `head`, then `body`, as much as fits without blocking; returns the number of bytes.
pub(crate) fn send_both(
    socket: BorrowedFd<'_>,
    head: Span<'_>,
    body: Span<'_>,
) -> io::Result<usize> {
    let parts = [
        libc::iovec { iov_base: head.ptr().cast(), iov_len: head.len() },
        libc::iovec { iov_base: body.ptr().cast(), iov_len: body.len() },
    ];
    let message = message(&parts);
    // SAFETY: the socket is open; the parts are alive during the call and only read from.
    check(unsafe {
        libc::sendmsg(
            socket.as_raw_fd(),
            &raw const message,
            libc::MSG_DONTWAIT | libc::MSG_NOSIGNAL,
        )
    })
}

/// Receives into `body`, and further bytes into `rest`; returns the number of bytes, 0 if the peer
/// has closed the connection.
pub(crate) fn receive_both(
    socket: BorrowedFd<'_>,
    body: Span<'_>,
    rest: &mut [u8],
) -> io::Result<usize> {
    let parts = [
        libc::iovec { iov_base: body.ptr().cast(), iov_len: body.len() },
        libc::iovec { iov_base: rest.as_mut_ptr().cast(), iov_len: rest.len() },
    ];
    let mut message = message(&parts);
    // SAFETY: the socket is open; the parts are alive during the call, writable (`body` is a
    // writable span, as its creator argues) and disjoint.
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
pub(crate) fn interest(fd: BorrowedFd<'_>, read: bool, write: bool) -> PollFd<'_> {
    let mut events = PollFlags::empty();
    events.set(PollFlags::IN, read);
    events.set(PollFlags::OUT, write);
    PollFd::from_borrowed_fd(fd, events)
}

/// Waits until one of the descriptors is ready, a signal arrives, or the timeout has passed.
pub(crate) fn poll(fds: &mut [PollFd<'_>], timeout: Option<Duration>) -> io::Result<()> {
    match rustix::event::poll(fds, timeout.map(timespec).as_ref()) {
        Ok(_) | Err(Errno::INTR) => Ok(()),
        Err(error) => Err(error.into()),
    }
}

/// Converts a time to the kernel's type; saturates.
pub(crate) fn timespec(time: Duration) -> Timespec {
    time.try_into().unwrap_or(Timespec { tv_sec: i64::MAX, tv_nsec: 0 })
}

/// An eventfd: a flag that [`poll`] can wait for.
#[derive(Debug)]
pub(crate) struct EventFd(OwnedFd);

impl EventFd {
    pub(crate) fn new() -> io::Result<Self> {
        Ok(Self(eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?))
    }

    /// Makes it readable.
    pub(crate) fn signal(&self) {
        // Fails only if it is readable already.
        let _ = rustix::io::write(&self.0, &1_u64.to_ne_bytes());
    }

    /// Makes it not readable.
    pub(crate) fn clear(&self) {
        // Fails only if it is not readable.
        let _ = rustix::io::read(&self.0, &mut [0; 8]);
    }

    pub(crate) fn fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_event_fd_is_readable_from_signal_to_clear() {
        let event = EventFd::new().unwrap();
        let readable = || {
            let mut fds = [interest(event.fd(), true, false)];
            poll(&mut fds, Some(Duration::ZERO)).unwrap();
            !fds[0].revents().is_empty()
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
        assert_eq!(send_both(one.as_fd(), Span::from_mut(&mut [1, 2]), body).unwrap(), 5);
        let into = Span::from_mut(&mut to);
        assert_eq!(receive_both(two.as_fd(), into, &mut rest).unwrap(), 5);
        let again = receive_both(two.as_fd(), into, &mut rest).unwrap_err();
        assert_eq!(again.kind(), io::ErrorKind::WouldBlock);
        assert_eq!((to, rest[0]), ([1, 2, 3, 4], 5));
    }
}
