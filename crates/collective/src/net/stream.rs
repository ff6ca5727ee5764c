//! Non-blocking byte streams to and from one peer.
//!
//! Between machines a stream is a [`Socket`], within one a ring in shared memory. A socket receives
//! large messages directly into the destination. Further bytes, which are often the next header and
//! a whole small message, go to a small read-ahead buffer, so that a small operation costs one
//! system call each way.

use std::fmt::Debug;
use std::io;
use std::net::TcpStream;
use std::os::fd::AsFd;

use rustix::event::PollFd;

use super::sys;
use crate::memory::Span;

/// Size of the read-ahead buffer, in bytes.
const READ_AHEAD: usize = 8 << 10;
/// Maximum length of head and body that are copied together and sent with one `send`, and of what
/// is received with one `recv` and copied, which is faster than a `sendmsg` or `recvmsg` of two
/// parts.
const COALESCE_BYTES: usize = 2 << 10;
/// Maximum number of bytes sent before receives are tried, so that a different fingerprint is
/// detected before the socket's buffer is full.
const MAX_SEND_BYTES: usize = 512 << 10;

/// A byte stream to a peer, and one from it.
pub(crate) trait DuplexStream {
    /// Sends as much of `head` and then `body` as fits without blocking; returns the number of
    /// bytes.
    fn try_send(&mut self, head: Span<'_>, body: Span<'_>) -> io::Result<usize>;

    /// Receives what has arrived, up to the length of `into`; returns the number of bytes. The end
    /// of the stream is an error.
    fn try_receive(&mut self, into: Span<'_>) -> io::Result<usize>;

    /// Same as [`try_receive`](Self::try_receive), for a header.
    fn try_receive_header(&mut self, into: Span<'_>) -> io::Result<usize> {
        self.try_receive(into)
    }
}

/// A duplex stream that a rank can poll.
///
/// It may access the memory of a send or receive until it has returned the count of all its bytes,
/// or until [`end_call`](Self::end_call).
pub(crate) trait PeerStream: DuplexStream + Debug + Send {
    /// Returns the descriptor to poll until it can receive or send; `None` if it can now.
    fn poll_interest(&mut self, receive: bool, send: bool) -> io::Result<Option<PollFd<'_>>>;

    /// Called when the poll after [`poll_interest`](Self::poll_interest) has returned.
    fn after_poll(&mut self) {}

    /// Called when the operation is over, and its memory must not be used any more.
    fn end_call(&mut self) {}
}

/// A TCP connection.
#[derive(Debug)]
pub(crate) struct Socket {
    stream: TcpStream,
    ahead: Box<[u8]>,
    /// The range of `ahead` that is filled and not taken yet.
    start: usize,
    end: usize,
}

impl Socket {
    pub(crate) fn new(stream: TcpStream) -> Self {
        Self { stream, ahead: vec![0; READ_AHEAD].into(), start: 0, end: 0 }
    }
}

impl DuplexStream for Socket {
    fn try_send(&mut self, head: Span<'_>, body: Span<'_>) -> io::Result<usize> {
        let body = body.part(0, body.len().min(MAX_SEND_BYTES));
        let (socket, len) = (self.stream.as_fd(), head.len() + body.len());
        let mut whole = [0; COALESCE_BYTES];
        zero_if_blocked(match whole.get_mut(..len) {
            Some(whole) => {
                let (first, second) = Span::from_mut(whole).split_at(head.len());
                first.copy_from(head);
                second.copy_from(body);
                sys::send(socket, whole)
            }
            None => sys::send_both(socket, head, body),
        })
    }

    fn try_receive(&mut self, into: Span<'_>) -> io::Result<usize> {
        if into.len() == 0 {
            return Ok(0);
        }
        let mut len = 0;
        if self.start == self.end {
            let (socket, ahead) = (self.stream.as_fd(), &mut self.ahead);
            let is_small = into.len() <= COALESCE_BYTES;
            let received = match is_small {
                true => sys::receive(socket, ahead),
                false => sys::receive_both(socket, into, ahead),
            };
            if matches!(received, Ok(0)) {
                return Err(io::ErrorKind::UnexpectedEof.into());
            }
            let received = zero_if_blocked(received)?;
            len = if is_small { 0 } else { received.min(into.len()) };
            (self.start, self.end) = (0, received - len);
        }
        if len == 0 {
            len = into.len().min(self.end - self.start);
            into.part(0, len).copy_from(Span::from_mut(&mut self.ahead[self.start..][..len]));
            self.start += len;
        }
        Ok(len)
    }
}

impl PeerStream for Socket {
    fn poll_interest(&mut self, receive: bool, send: bool) -> io::Result<Option<PollFd<'_>>> {
        Ok(Some(sys::interest(self.stream.as_fd(), receive, send)))
    }
}

/// Maps an error that means "would block" to 0 bytes.
fn zero_if_blocked(result: io::Result<usize>) -> io::Result<usize> {
    match result {
        Err(error) if would_block(&error) => Ok(0),
        other => other,
    }
}

pub(crate) fn would_block(error: &io::Error) -> bool {
    matches!(error.kind(), io::ErrorKind::WouldBlock | io::ErrorKind::Interrupted)
}

#[cfg(test)]
mod tests {
    use std::io::Write;
    use std::net::TcpListener;

    use super::*;
    use crate::backend::frame::{Frame, HEADER};

    fn pair() -> (TcpStream, Socket) {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let one = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        (one, Socket::new(listener.accept().unwrap().0))
    }

    /// Receives `len` bytes.
    fn receive(socket: &mut Socket, len: usize) -> io::Result<Vec<u8>> {
        let (mut got, mut done) = (vec![0; len], 0);
        while done < len {
            done += socket.try_receive(Span::from_mut(&mut got[done..]))?;
            std::thread::yield_now();
        }
        Ok(got)
    }

    #[test]
    fn headers_and_blocks_are_received_as_sent_in_pieces_of_any_size() {
        let block: Vec<u8> = (0..20_000_u32).map(|i| i as u8).collect();
        for piece in [1, 63, 64, 65, 1000, 8191, 8193, 100_000] {
            let (mut peer, mut socket) = pair();
            let header = Frame::Control { bytes: piece }.encode();
            let stream = [&header[..], &block, &header, &header].concat();
            let sender = std::thread::spawn(move || {
                for part in stream.chunks(piece) {
                    peer.write_all(part).unwrap();
                }
            });
            assert_eq!(receive(&mut socket, HEADER).unwrap(), header);
            assert_eq!(receive(&mut socket, block.len()).unwrap(), block);
            assert_eq!(receive(&mut socket, HEADER).unwrap(), header);
            assert_eq!(receive(&mut socket, HEADER).unwrap(), header);
            sender.join().unwrap();
            let end = receive(&mut socket, HEADER).unwrap_err();
            assert_eq!(end.kind(), io::ErrorKind::UnexpectedEof);
        }
    }
}
