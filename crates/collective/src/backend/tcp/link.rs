//! What carries data to and from one peer: bytes go and come as far as they can without waiting.
//!
//! Between machines that is a [`Socket`], within one a [`Ring`](super::ring::Ring). What is received
//! by a socket for memory goes straight there; what comes beyond it, which is the next header
//! and often a small message whole, goes to a small buffer, so that a small operation costs one
//! system call each way.

use std::fmt::Debug;
use std::io;
use std::net::TcpStream;
use std::os::fd::AsFd;

use super::frame::HEADER;
use super::sys;
use crate::span::Span;

/// Bytes received ahead at most.
const AHEAD: usize = 8 << 10;
/// Bytes up to which head and body are sent as one piece: the kernel takes longer to read a list of two
/// than it takes to copy them.
const TOGETHER: usize = 2 << 10;
/// Bytes that are sent before looking at what has come: so a fingerprint that differs is seen before
/// all that a socket takes has been copied into it.
const AT_ONCE: usize = 512 << 10;

/// Two streams of bytes, one to a peer and one from it.
pub(in crate::backend) trait Stream {
    /// Sends what there is room for of `head` and then `body`; how many bytes.
    fn try_send(&mut self, head: &[u8], body: Span<'_>) -> io::Result<usize>;

    /// Receives what is there, up to the length of `into`; how many bytes. The end of the stream
    /// is an error.
    fn try_receive(&mut self, into: Span<'_>) -> io::Result<usize>;

    /// The next header, if all of it is there.
    fn try_header(&mut self) -> io::Result<Option<[u8; HEADER]>>;
}

/// Streams that a rank can wait for.
///
/// A link may use the memory that it was given to send or to receive into until it has counted all
/// of those bytes, or until [`let_go`](Self::let_go).
pub(in crate::backend) trait Link: Stream + Debug + Send {
    /// What to poll until it can receive, or send; `None` if it can now.
    fn sleep(&mut self, receive: bool, send: bool) -> io::Result<Option<libc::pollfd>>;

    /// The poll after a [`sleep`](Self::sleep) is over.
    fn wake(&mut self) {}

    /// The operation is over, and with it the loan of its memory.
    fn let_go(&mut self) {}
}

/// A connection.
#[derive(Debug)]
pub(super) struct Socket {
    stream: TcpStream,
    ahead: Box<[u8]>,
    /// What of `ahead` is filled and not taken yet.
    start: usize,
    end: usize,
}

impl Socket {
    pub(super) fn new(stream: TcpStream) -> Self {
        Self { stream, ahead: vec![0; AHEAD].into(), start: 0, end: 0 }
    }

    /// Receives into `into`, and what is more into the buffer; how many bytes for `into`.
    fn fill(&mut self, into: Span<'_>) -> io::Result<usize> {
        if self.start == self.end {
            (self.start, self.end) = (0, 0);
        }
        let (socket, ahead) = (self.stream.as_fd(), &mut self.ahead[self.end..]);
        let received = match into.len() {
            0 => sys::receive(socket, ahead),
            _ => sys::receive_both(socket, into, ahead),
        };
        if matches!(received, Ok(0)) {
            return Err(io::ErrorKind::UnexpectedEof.into());
        }
        let received = or_nothing(received)?;
        let len = received.min(into.len());
        self.end += received - len;
        Ok(len)
    }
}

impl Stream for Socket {
    fn try_send(&mut self, head: &[u8], body: Span<'_>) -> io::Result<usize> {
        let body = body.part(0, body.len().min(AT_ONCE));
        let (socket, len) = (self.stream.as_fd(), head.len() + body.len());
        let mut whole = [0; TOGETHER];
        or_nothing(match whole.get_mut(..len) {
            Some(whole) => {
                whole[..head.len()].copy_from_slice(head);
                Span::from_mut(&mut whole[head.len()..]).copy_from(body);
                sys::send(socket, whole)
            }
            None => sys::send_both(socket, head, body),
        })
    }

    fn try_receive(&mut self, into: Span<'_>) -> io::Result<usize> {
        if into.len() == 0 {
            return Ok(0);
        }
        if self.start == self.end {
            return self.fill(into);
        }
        let len = into.len().min(self.end - self.start);
        into.part(0, len).copy_from_slice(&self.ahead[self.start..][..len]);
        self.start += len;
        Ok(len)
    }

    fn try_header(&mut self) -> io::Result<Option<[u8; HEADER]>> {
        if self.end - self.start < HEADER {
            self.ahead.copy_within(self.start..self.end, 0);
            (self.start, self.end) = (0, self.end - self.start);
            self.fill(Span::EMPTY)?;
        }
        let header = self.ahead[self.start..self.end].first_chunk().copied();
        if header.is_some() {
            self.start += HEADER;
        }
        Ok(header)
    }
}

impl Link for Socket {
    fn sleep(&mut self, receive: bool, send: bool) -> io::Result<Option<libc::pollfd>> {
        Ok(Some(sys::interest(self.stream.as_fd(), receive, send)))
    }
}

/// Having to wait is no error: nothing went.
fn or_nothing(result: io::Result<usize>) -> io::Result<usize> {
    match result {
        Err(error) if is_nothing(&error) => Ok(0),
        other => other,
    }
}

pub(super) fn is_nothing(error: &io::Error) -> bool {
    matches!(error.kind(), io::ErrorKind::WouldBlock | io::ErrorKind::Interrupted)
}

#[cfg(test)]
mod tests {
    use std::io::Write;
    use std::net::TcpListener;

    use super::*;
    use crate::backend::tcp::frame::Frame;

    fn pair() -> (TcpStream, Socket) {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let one = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        (one, Socket::new(listener.accept().unwrap().0))
    }

    /// Until there is an answer.
    fn wait<T>(mut ask: impl FnMut() -> Option<T>) -> T {
        loop {
            if let Some(answer) = ask() {
                return answer;
            }
            std::thread::yield_now();
        }
    }

    #[test]
    fn headers_and_blocks_in_pieces_of_any_size_come_as_sent() {
        let block: Vec<u8> = (0..20_000_u32).map(|i| i as u8).collect();
        for piece in [1, 63, 64, 65, 1000, 8191, 8193, 100_000] {
            let (mut peer, mut link) = pair();
            let header = Frame::Control { bytes: piece }.encode();
            let stream = [&header[..], &block, &header, &header].concat();
            let sender = std::thread::spawn(move || {
                for part in stream.chunks(piece) {
                    peer.write_all(part).unwrap();
                }
            });
            assert_eq!(wait(|| link.try_header().unwrap()), header);
            let (mut got, mut done) = (vec![0_u8; block.len()], 0);
            let into = Span::from_mut(&mut got);
            while done < into.len() {
                done += link.try_receive(into.part(done, into.len() - done)).unwrap();
            }
            assert_eq!(got, block);
            assert_eq!(wait(|| link.try_header().unwrap()), header);
            assert_eq!(wait(|| link.try_header().unwrap()), header);
            sender.join().unwrap();
            let end = wait(|| link.try_header().err());
            assert_eq!(end.kind(), io::ErrorKind::UnexpectedEof);
        }
    }
}
