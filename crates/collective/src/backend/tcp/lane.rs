//! What is to be moved between two ranks in an operation, in each direction one stream of headers
//! and bytes, moved as far as the socket allows.

use std::collections::VecDeque;
use std::io;

use super::frame::{Frame, HEADER};
use super::link::Stream;
use crate::backend::core::{Direction, SpanTransfer};
use crate::op::Fingerprint;
use crate::span::Span;
use crate::{DType, OpDesc, Rank, Verb};

/// What is still to be sent to and received from one peer.
#[derive(Debug, Default)]
pub(in crate::backend) struct Lane<'a> {
    out: VecDeque<Outgoing<'a>>,
    into: VecDeque<Incoming<'a>>,
    /// Blocks queued so far, each way.
    sent: u64,
    received: u64,
    /// What the peer has entered with.
    pub(super) entered: Option<Fingerprint>,
}

/// One or two headers, and what follows them.
#[derive(Debug)]
struct Outgoing<'a> {
    head: [u8; 2 * HEADER],
    head_len: usize,
    body: Span<'a>,
    /// Bytes that have gone, of both.
    done: usize,
}

#[derive(Debug)]
struct Incoming<'a> {
    expected: Expected,
    body: Span<'a>,
    /// Bytes of the body that have come; none before the header has.
    done: Option<usize>,
}

/// What a rank expects to come next.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::backend) enum Expected {
    /// A fingerprint.
    Enter,
    /// This block.
    Block { seq: u64, index: u64, bytes: u64 },
    /// A message.
    Message { verb: Verb, dtype: DType, count: u64 },
}

/// Why nothing more can be received.
#[derive(Debug)]
pub(in crate::backend) enum Fault {
    /// The connection has ended.
    Lost(io::Error),
    /// Something else has come; `None` if it is no header at all.
    Unexpected(Expected, Option<Frame>),
}

impl<'a> Lane<'a> {
    /// Nothing is left to send.
    pub(in crate::backend) fn all_sent(&self) -> bool {
        self.out.is_empty()
    }

    /// Nothing is left to receive.
    pub(in crate::backend) fn all_received(&self) -> bool {
        self.into.is_empty()
    }

    pub(super) fn enter(&mut self, own: &Fingerprint) {
        self.push(Frame::Enter(*own), Span::EMPTY);
        self.expect(Expected::Enter, Span::EMPTY);
    }

    pub(super) fn send_block(&mut self, seq: u64, body: Span<'a>) {
        let (index, bytes) = (self.sent, body.len() as u64);
        self.sent += 1;
        self.push(Frame::Block { seq, index, bytes }, body);
    }

    pub(super) fn receive_block(&mut self, seq: u64, body: Span<'a>) {
        let (index, bytes) = (self.received, body.len() as u64);
        self.received += 1;
        self.expect(Expected::Block { seq, index, bytes }, body);
    }

    /// Queues a message between a pair of ranks, one way or the other.
    pub(in crate::backend) fn message(&mut self, verb: Verb, block: &SpanTransfer<'a>) {
        let (dtype, count) = (block.dtype, block.count as u64);
        match block.direction {
            Direction::Send => self.push(Frame::Message { verb, dtype, count }, block.memory),
            Direction::Receive => {
                self.expect(Expected::Message { verb, dtype, count }, block.memory)
            }
        }
    }

    /// The message between this rank and `peer` that waits the longest.
    pub(in crate::backend) fn waits_for(&self, peer: Rank) -> Option<String> {
        if let Some(Incoming { expected: Expected::Message { dtype, count, .. }, .. }) =
            self.into.front()
        {
            return Some(message(*dtype, *count, "from", peer));
        }
        match Frame::decode(self.out.front()?.head.first_chunk()?) {
            Ok(Frame::Message { dtype, count, .. }) => Some(message(dtype, count, "to", peer)),
            _ => None,
        }
    }

    fn expect(&mut self, expected: Expected, body: Span<'a>) {
        self.into.push_back(Incoming { expected, body, done: None });
    }

    /// Queues a header and what follows it; both join a header that stands alone before them.
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

    /// Sends what there is room for, or some of it; whether that was anything.
    pub(in crate::backend) fn send(
        &mut self,
        link: &mut (impl Stream + ?Sized),
    ) -> io::Result<bool> {
        let mut moved = false;
        while let Some(out) = self.out.front_mut() {
            let (head, rest) = (&out.head[out.done.min(out.head_len)..out.head_len], out.rest());
            let left = head.len() + rest.len();
            let sent = link.try_send(head, rest)?;
            out.done += sent;
            moved |= sent > 0;
            if sent < left {
                break;
            }
            self.out.pop_front();
        }
        Ok(moved)
    }

    /// Receives what has come, or some of it; whether that was anything.
    pub(in crate::backend) fn receive(
        &mut self,
        link: &mut (impl Stream + ?Sized),
    ) -> Result<bool, Fault> {
        let mut moved = false;
        while let Some(next) = self.into.front_mut() {
            let done = match next.done {
                Some(done) => done,
                None => {
                    let Some(header) = link.try_header().map_err(Fault::Lost)? else { break };
                    let frame = Frame::decode(&header).ok();
                    if !next.expected.is(frame) {
                        return Err(Fault::Unexpected(next.expected, frame));
                    }
                    if let Some(Frame::Enter(print)) = frame {
                        self.entered = Some(print);
                    }
                    moved = true;
                    0
                }
            };
            let rest = next.body.part(done, next.body.len() - done);
            let came = link.try_receive(rest).map_err(Fault::Lost)?;
            next.done = Some(done + came);
            moved |= came > 0;
            if came < rest.len() {
                // Sending should not wait until the peer has no more to send.
                break;
            }
            self.into.pop_front();
        }
        Ok(moved)
    }
}

impl<'a> Outgoing<'a> {
    /// What of the body has not gone yet.
    fn rest(&self) -> Span<'a> {
        let done = self.done.saturating_sub(self.head_len);
        self.body.part(done, self.body.len() - done)
    }
}

impl Expected {
    fn is(self, frame: Option<Frame>) -> bool {
        match (self, frame) {
            (Self::Enter, Some(Frame::Enter(_))) => true,
            (Self::Block { seq, index, bytes }, frame) => {
                frame == Some(Frame::Block { seq, index, bytes })
            }
            (Self::Message { verb, dtype, count }, frame) => {
                frame == Some(Frame::Message { verb, dtype, count })
            }
            _ => false,
        }
    }

    /// If two ranks called different things, and it is not that one of them sends what nobody
    /// does: the first field that differs, and what each called.
    pub(in crate::backend) fn mismatch(
        self,
        got: Option<Frame>,
        own: (Rank, &OpDesc),
        peer: Rank,
    ) -> Option<(&'static str, Vec<(Rank, String)>)> {
        let (rank, op) = own;
        let (field, called, sent) = match (self, got?) {
            (Self::Enter, Frame::Message { dtype, count, .. }) => {
                ("verb", op.to_string(), message(dtype, count, "to", rank))
            }
            (Self::Message { dtype, count, .. }, Frame::Enter(print)) => {
                ("verb", message(dtype, count, "from", peer), print.to_string())
            }
            (
                Self::Message { verb, dtype, count },
                Frame::Message { verb: v, dtype: d, count: c },
            ) => {
                let [called, sent] =
                    [message(dtype, count, "from", peer), message(d, c, "to", rank)];
                match (verb == v, dtype == d) {
                    (false, _) => ("verb", format!("{verb}: {called}"), format!("{v}: {sent}")),
                    (true, false) => ("dtype", called, sent),
                    (true, true) => ("count", called, sent),
                }
            }
            _ => return None,
        };
        let mut by_rank = vec![(rank, called), (peer, sent)];
        by_rank.sort_unstable();
        Some((field, by_rank))
    }
}

/// As error texts have it.
fn message(dtype: DType, count: u64, way: &str, other: Rank) -> String {
    format!("a message of {count} {dtype} {way} rank {other}")
}

#[cfg(test)]
mod tests {
    use std::io::Write;
    use std::net::{TcpListener, TcpStream};

    use super::*;
    use crate::BufferLocation;
    use crate::backend::tcp::link::Socket;

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

    /// Receives until all is there or something is wrong.
    fn receive(lane: &mut Lane<'_>, link: &mut Socket) -> Result<(), Fault> {
        while !lane.all_received() {
            lane.receive(link)?;
        }
        Ok(())
    }

    #[test]
    fn both_directions_move_and_keep_their_order() {
        let (one, two) = pair();
        let links = [Socket::new(one), Socket::new(two)];
        std::thread::scope(|scope| {
            for (rank, mut link) in links.into_iter().enumerate() {
                scope.spawn(move || {
                    let mut lane = Lane::default();
                    let print = OP.fingerprint(5, BufferLocation::Private);
                    let mut sent = vec![rank as u8 + 1; 3_000_000];
                    let mut small = [rank as u8 + 10; 3];
                    let (mut into, mut last) = (vec![0; 3_000_000], [0; 3]);
                    lane.enter(&print);
                    lane.send_block(5, Span::from_mut(&mut sent));
                    lane.message(Verb::Batch, &block(Direction::Send, &mut small));
                    lane.receive_block(5, Span::from_mut(&mut into));
                    lane.message(Verb::Batch, &block(Direction::Receive, &mut last));
                    while !(lane.all_sent() && lane.all_received()) {
                        lane.send(&mut link).unwrap();
                        lane.receive(&mut link).unwrap();
                    }
                    assert_eq!(lane.entered, Some(print));
                    drop(lane);
                    let other = 1 - rank as u8;
                    assert!(into.iter().all(|&x| x == other + 1));
                    assert_eq!(last, [other + 10; 3]);
                });
            }
        });
    }

    #[test]
    fn what_was_not_expected_changes_no_byte() {
        let block = |seq, index, bytes| Frame::Block { seq, index, bytes }.encode();
        let wrong =
            [block(4, 0, 8), block(5, 1, 8), block(5, 0, 9), block(5, 0, u64::MAX), [7; 64]];
        for header in wrong {
            let (mut peer, own) = pair();
            peer.write_all(&[&header[..], &[1; 100]].concat()).unwrap();
            let (mut link, mut into) = (Socket::new(own), [9; 8]);
            let mut lane = Lane::default();
            lane.receive_block(5, Span::from_mut(&mut into));
            let fault = receive(&mut lane, &mut link).unwrap_err();
            let Fault::Unexpected(expected, got) = fault else { panic!("{fault:?}") };
            assert!(expected.mismatch(got, (0, &OP), 1).is_none());
            drop(lane);
            assert_eq!(into, [9; 8]);
        }
    }

    #[test]
    fn the_end_of_a_connection_within_a_block_is_told() {
        let (mut peer, own) = pair();
        let header = Frame::Block { seq: 0, index: 0, bytes: 8 }.encode();
        peer.write_all(&[&header[..], &[1; 7]].concat()).unwrap();
        drop(peer);
        let (mut link, mut into) = (Socket::new(own), [9; 8]);
        let mut lane = Lane::default();
        lane.receive_block(0, Span::from_mut(&mut into));
        let fault = receive(&mut lane, &mut link).unwrap_err();
        let Fault::Lost(error) = fault else { panic!("{fault:?}") };
        assert_eq!(error.kind(), io::ErrorKind::UnexpectedEof);
    }

    #[test]
    fn what_two_ranks_call_is_told_in_the_order_of_ranks() {
        let message = |count| Frame::Message { verb: Verb::Batch, dtype: DType::F32, count };
        let told = |expected: Expected, got| expected.mismatch(Some(got), (2, &OP), 1).unwrap();
        let (field, by_rank) = told(Expected::Enter, message(7));
        assert_eq!(field, "verb");
        assert_eq!(by_rank[0], (1, "a message of 7 f32 to rank 2".into()));
        assert_eq!(by_rank[1], (2, "barrier".into()));
        let expected = Expected::Message { verb: Verb::Batch, dtype: DType::F32, count: 8 };
        assert_eq!(told(expected, message(7)).0, "count");
        assert_eq!(
            told(expected, Frame::Enter(OP.fingerprint(0, BufferLocation::Private))).0,
            "verb"
        );
        let other = Frame::Message { verb: Verb::Gather, dtype: DType::F32, count: 8 };
        let (field, by_rank) = told(expected, other);
        assert_eq!((field, &*by_rank[0].1), ("verb", "gather: a message of 8 f32 to rank 2"));
    }
}
