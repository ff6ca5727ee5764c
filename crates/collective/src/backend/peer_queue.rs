//! The queue of an operation's transfers with one peer: in each direction a stream of headers and
//! data, sent and received as far as possible without blocking.

use std::collections::VecDeque;
use std::io;

use super::core::{Direction, SpanTransfer};
use super::failure::Cause;
use super::frame::{Frame, HEADER};
use crate::memory::Span;
use crate::net::stream::DuplexStream;
use crate::op::Fingerprint;
use crate::{DType, OpDesc, Rank, Verb};

/// Queued sends to and receives from one peer.
#[derive(Debug, Default)]
pub(super) struct PeerQueue<'a> {
    out: VecDeque<Outgoing<'a>>,
    into: VecDeque<Incoming<'a>>,
    /// Blocks queued so far in each direction.
    sent: u64,
    received: u64,
    /// The peer's fingerprint, once received.
    pub(super) entered: Option<Fingerprint>,
}

/// One or two headers, and the data that follow.
#[derive(Debug)]
struct Outgoing<'a> {
    head: [u8; 2 * HEADER],
    head_len: usize,
    body: Span<'a>,
    /// Bytes sent, of headers and body.
    done: usize,
}

#[derive(Debug)]
struct Incoming<'a> {
    /// The header that must come first; any [`Frame::Enter`] stands for all.
    expected: Frame,
    head: [u8; HEADER],
    body: Span<'a>,
    /// Bytes received, of header and body.
    done: usize,
}

/// Why a receive failed.
#[derive(Debug)]
pub(super) enum ReceiveError {
    ConnectionLost(io::Error),
    /// A frame other than the expected one arrived; `None` if the header is invalid.
    Unexpected(Box<(Frame, Option<Frame>)>),
}

impl<'a> PeerQueue<'a> {
    /// Returns whether everything queued is sent.
    pub(super) fn all_sent(&self) -> bool {
        self.out.is_empty()
    }

    /// Returns whether everything queued is received.
    pub(super) fn all_received(&self) -> bool {
        self.into.is_empty()
    }

    pub(super) fn enter(&mut self, own: &Fingerprint) {
        self.push(Frame::Enter(*own), Span::EMPTY);
        self.expect(Frame::Enter(*own), Span::EMPTY);
    }

    pub(super) fn send_block(&mut self, seq: u64, body: Span<'a>) {
        let (index, bytes) = (self.sent, body.len() as u64);
        self.sent += 1;
        self.push(Frame::Block { seq, index, bytes }, body);
    }

    pub(super) fn receive_block(&mut self, seq: u64, body: Span<'a>) {
        let (index, bytes) = (self.received, body.len() as u64);
        self.received += 1;
        self.expect(Frame::Block { seq, index, bytes }, body);
    }

    /// Queues a point-to-point message.
    pub(super) fn message(&mut self, verb: Verb, block: &SpanTransfer<'a>) {
        let frame = Frame::Message { verb, dtype: block.dtype, count: block.count as u64 };
        match block.direction {
            Direction::Send => self.push(frame, block.memory),
            Direction::Receive => self.expect(frame, block.memory),
        }
    }

    /// Describes the first queued message, to or from `peer`.
    pub(super) fn waits_for(&self, peer: Rank) -> Option<String> {
        if let Some(Incoming { expected: Frame::Message { dtype, count, .. }, .. }) =
            self.into.front()
        {
            return Some(message(*dtype, *count, "from", peer));
        }
        match Frame::decode(self.out.front()?.head.first_chunk()?) {
            Ok(Frame::Message { dtype, count, .. }) => Some(message(dtype, count, "to", peer)),
            _ => None,
        }
    }

    fn expect(&mut self, expected: Frame, body: Span<'a>) {
        self.into.push_back(Incoming { expected, head: [0; HEADER], body, done: 0 });
    }

    /// Queues a header and the data that follow; appends both to a preceding header without data.
    fn push(&mut self, frame: Frame, body: Span<'a>) {
        let header = frame.encode();
        if let Some(last) = self.out.back_mut()
            && (last.head_len, last.body.len(), last.done) == (HEADER, 0, 0)
        {
            last.head[HEADER..].copy_from_slice(&header);
            (last.head_len, last.body) = (2 * HEADER, body);
            return;
        }
        let mut head = [0; 2 * HEADER];
        head[..HEADER].copy_from_slice(&header);
        self.out.push_back(Outgoing { head, head_len: HEADER, body, done: 0 });
    }

    /// Sends as much as possible without blocking; returns whether any bytes were sent.
    pub(super) fn send(&mut self, stream: &mut (impl DuplexStream + ?Sized)) -> io::Result<bool> {
        let mut moved = false;
        while let Some(out) = self.out.front_mut() {
            let rest = out.rest();
            let head = Span::from_mut(&mut out.head[out.done.min(out.head_len)..out.head_len]);
            let left = head.len() + rest.len();
            let sent = stream.try_send(head, rest)?;
            out.done += sent;
            moved |= sent > 0;
            if sent < left {
                break;
            }
            self.out.pop_front();
        }
        Ok(moved)
    }

    /// Receives as much as possible without blocking; returns whether any bytes were received.
    pub(super) fn receive(
        &mut self,
        stream: &mut (impl DuplexStream + ?Sized),
    ) -> Result<bool, ReceiveError> {
        let mut moved = false;
        while let Some(next) = self.into.front_mut() {
            if next.done < HEADER {
                let rest = Span::from_mut(&mut next.head[next.done..]);
                let received = stream.try_receive_header(rest);
                let received = received.map_err(ReceiveError::ConnectionLost)?;
                next.done += received;
                moved |= received > 0;
                if next.done < HEADER {
                    break;
                }
                let frame = Frame::decode(&next.head).ok();
                let both = (next.expected, frame);
                let matches = matches!(both, (Frame::Enter(_), Some(Frame::Enter(_))));
                if !matches && frame != Some(next.expected) {
                    return Err(ReceiveError::Unexpected(both.into()));
                }
                if let Some(Frame::Enter(print)) = frame {
                    self.entered = Some(print);
                }
            }
            let done = next.done - HEADER;
            let rest = next.body.part(done, next.body.len() - done);
            let received = stream.try_receive(rest).map_err(ReceiveError::ConnectionLost)?;
            next.done += received;
            moved |= received > 0;
            if received < rest.len() {
                // Returns so that sends progress, too.
                break;
            }
            self.into.pop_front();
        }
        Ok(moved)
    }
}

impl<'a> Outgoing<'a> {
    /// Returns the part of the body that is not sent yet.
    fn rest(&self) -> Span<'a> {
        let done = self.done.saturating_sub(self.head_len);
        self.body.part(done, self.body.len() - done)
    }
}

/// Returns why the group fails after an unexpected header: the first field in which two ranks'
/// calls differ, and both calls; or a protocol error.
pub(super) fn unexpected(
    (expected, got): (Frame, Option<Frame>),
    (rank, op): (Rank, &OpDesc),
    peer: Rank,
) -> Cause {
    let (field, called, sent) = match (expected, got) {
        (Frame::Enter(_), Some(Frame::Message { dtype, count, .. })) => {
            ("verb", op.to_string(), message(dtype, count, "to", rank))
        }
        (Frame::Message { dtype, count, .. }, Some(Frame::Enter(print))) => {
            ("verb", message(dtype, count, "from", peer), print.to_string())
        }
        (
            Frame::Message { verb, dtype, count },
            Some(Frame::Message { verb: v, dtype: d, count: c }),
        ) => {
            let [called, sent] = [message(dtype, count, "from", peer), message(d, c, "to", rank)];
            match (verb == v, dtype == d) {
                (false, _) => ("verb", format!("{verb}: {called}"), format!("{v}: {sent}")),
                (true, false) => ("dtype", called, sent),
                (true, true) => ("count", called, sent),
            }
        }
        _ => {
            let reason = format!(
                "protocol error: unexpected frame {got:?} from rank {peer}; check that all ranks run the same \
                 version and the same GroupOptions"
            );
            return Cause::Aborted { reason };
        }
    };
    let mut by_rank = vec![(rank, called), (peer, sent)];
    by_rank.sort_unstable();
    Cause::Mismatch { field: field.into(), by_rank }
}

/// Describes a message for error texts.
fn message(dtype: DType, count: u64, way: &str, other: Rank) -> String {
    format!("a message of {count} {dtype} {way} rank {other}")
}

#[cfg(test)]
mod tests {
    use std::io::Write;
    use std::net::{TcpListener, TcpStream};

    use super::*;
    use crate::BufferLocation;
    use crate::net::stream::Socket;

    const OP: OpDesc =
        OpDesc { verb: Verb::Barrier, dtype: DType::U8, op: None, root: None, count: 0 };

    fn pair() -> (TcpStream, TcpStream) {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let one = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        (one, listener.accept().unwrap().0)
    }

    fn block(direction: Direction, bytes: &mut [u8]) -> SpanTransfer<'_> {
        let (count, memory) = (bytes.len(), Span::from_mut(bytes));
        SpanTransfer { peer: 0, direction, dtype: DType::U8, count, memory }
    }

    /// Receives everything, or up to the first error.
    fn receive(queue: &mut PeerQueue<'_>, stream: &mut Socket) -> Result<(), ReceiveError> {
        while !queue.all_received() {
            queue.receive(stream)?;
        }
        Ok(())
    }

    #[test]
    fn both_directions_progress_concurrently_and_keep_their_order() {
        let (one, two) = pair();
        let streams = [Socket::new(one), Socket::new(two)];
        std::thread::scope(|scope| {
            for (rank, mut stream) in streams.into_iter().enumerate() {
                scope.spawn(move || {
                    let mut queue = PeerQueue::default();
                    let print = OP.fingerprint(5, BufferLocation::Private);
                    let mut sent = vec![rank as u8 + 1; 3_000_000];
                    let mut small = [rank as u8 + 10; 3];
                    let (mut into, mut last) = (vec![0; 3_000_000], [0; 3]);
                    queue.enter(&print);
                    queue.send_block(5, Span::from_mut(&mut sent));
                    queue.message(Verb::Batch, &block(Direction::Send, &mut small));
                    queue.receive_block(5, Span::from_mut(&mut into));
                    queue.message(Verb::Batch, &block(Direction::Receive, &mut last));
                    while !(queue.all_sent() && queue.all_received()) {
                        queue.send(&mut stream).unwrap();
                        queue.receive(&mut stream).unwrap();
                    }
                    assert_eq!(queue.entered, Some(print));
                    drop(queue);
                    let other = 1 - rank as u8;
                    assert!(into.iter().all(|&x| x == other + 1));
                    assert_eq!(last, [other + 10; 3]);
                });
            }
        });
    }

    #[test]
    fn an_unexpected_frame_is_an_error_and_changes_no_byte() {
        let block = |seq, index, bytes| Frame::Block { seq, index, bytes }.encode();
        let wrong =
            [block(4, 0, 8), block(5, 1, 8), block(5, 0, 9), block(5, 0, u64::MAX), [7; 64]];
        for header in wrong {
            let (mut peer, own) = pair();
            peer.write_all(&[&header[..], &[1; 100]].concat()).unwrap();
            let (mut stream, mut into) = (Socket::new(own), [9; 8]);
            let mut queue = PeerQueue::default();
            queue.receive_block(5, Span::from_mut(&mut into));
            let fault = receive(&mut queue, &mut stream).unwrap_err();
            let ReceiveError::Unexpected(frames) = fault else { panic!("{fault:?}") };
            let cause = unexpected(*frames, (0, &OP), 1);
            assert!(matches!(cause, Cause::Aborted { .. }), "{cause:?}");
            drop(queue);
            assert_eq!(into, [9; 8]);
        }
    }

    #[test]
    fn the_end_of_a_connection_within_a_block_is_an_error() {
        let (mut peer, own) = pair();
        let header = Frame::Block { seq: 0, index: 0, bytes: 8 }.encode();
        peer.write_all(&[&header[..], &[1; 7]].concat()).unwrap();
        drop(peer);
        let (mut stream, mut into) = (Socket::new(own), [9; 8]);
        let mut queue = PeerQueue::default();
        queue.receive_block(0, Span::from_mut(&mut into));
        let fault = receive(&mut queue, &mut stream).unwrap_err();
        let ReceiveError::ConnectionLost(error) = fault else { panic!("{fault:?}") };
        assert_eq!(error.kind(), io::ErrorKind::UnexpectedEof);
    }

    #[test]
    fn a_mismatch_lists_both_calls_in_rank_order() {
        let message = |count| Frame::Message { verb: Verb::Batch, dtype: DType::F32, count };
        let mismatch = |expected, got| match unexpected((expected, Some(got)), (2, &OP), 1) {
            Cause::Mismatch { field, by_rank } => (field, by_rank),
            other => panic!("{other:?}"),
        };
        let enter = Frame::Enter(OP.fingerprint(0, BufferLocation::Private));
        let (field, by_rank) = mismatch(enter, message(7));
        assert_eq!(field, "verb");
        assert_eq!(by_rank[0], (1, "a message of 7 f32 to rank 2".into()));
        assert_eq!(by_rank[1], (2, "barrier".into()));
        let expected = message(8);
        assert_eq!(mismatch(expected, message(7)).0, "count");
        assert_eq!(mismatch(expected, enter).0, "verb");
        let other = Frame::Message { verb: Verb::Gather, dtype: DType::F32, count: 8 };
        let (field, by_rank) = mismatch(expected, other);
        assert_eq!((&*field, &*by_rank[0].1), ("verb", "gather: a message of 8 f32 to rank 2"));
    }
}
