//! Rings in shared memory, which carry data between two ranks of one machine.
//!
//! A rank sets a word in shared memory before it sleeps. The peer reads that word whenever it has
//! moved something and, if it is set, sends a byte over the data connection, which carries nothing
//! else. So a rank waits as for sockets, with one poll for all peers, and detects a death in the
//! same way: the connection ends. Data that the peer put into its ring before that are received
//! first.
//!
//! The lowest rank of a machine creates the memory, an unnamed file, and writes its descriptor to
//! the store; the others open it through `/proc`.

use std::io;
use std::net::TcpStream;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::Ordering;

use rustix::event::PollFd;

use crate::backend::host::channel::{ChannelPair, Layout, PeerWaker};
use crate::backend::host::sys::{Mapping, memfd};
use crate::net::stream::{PeerStream, would_block};
use crate::net::sys;
use crate::{Rank, Result};

/// The shared memory of the ranks of one machine.
#[derive(Debug)]
pub(super) struct Rings {
    map: Arc<Mapping>,
    layout: Layout,
    /// The machine's ranks, in order.
    ranks: Vec<Rank>,
}

impl Rings {
    fn layout(ranks: usize) -> Layout {
        Layout::new(ranks, 0)
    }

    /// Creates memory for `ranks` ranks.
    pub(super) fn create(ranks: usize) -> Result<OwnedFd> {
        memfd(c"collective-rings", Self::layout(ranks).end(), 0)
    }

    /// Maps the memory that the first of `ranks` created.
    pub(super) fn attach(memory: OwnedFd, ranks: &[Rank]) -> Result<Self> {
        let layout = Self::layout(ranks.len());
        let what = format!("rank {}'s shared memory", ranks[0]);
        let map = Arc::new(Mapping::of_peer(memory.into(), layout.end(), &what)?);
        Ok(Self { map, layout, ranks: ranks.to_vec() })
    }

    /// The ranks that share the memory.
    pub(super) fn ranks(&self) -> &[Rank] {
        &self.ranks
    }

    /// This rank's ring to and from `peer`.
    pub(super) fn ring(&self, own: Rank, peer: Rank, stream: TcpStream) -> Result<Ring> {
        let index = |rank| self.ranks.binary_search(&rank).expect("a rank of this machine");
        let (own, peer) = (index(own), index(peer));
        let socket = SocketWaker {
            map: Arc::clone(&self.map),
            asleep: self.layout.asleep(own, peer),
            peer_asleep: self.layout.asleep(peer, own),
            sleeping: false,
            stream,
            ended: false,
        };
        ChannelPair::new(&self.map, &self.layout, [own, peer], socket)
    }
}

/// The rings to and from one peer.
pub(super) type Ring = ChannelPair<SocketWaker>;

/// Wakes the peer with a byte over the data connection.
#[derive(Debug)]
pub(super) struct SocketWaker {
    map: Arc<Mapping>,
    /// Offset of the word that this rank sets before it sleeps, and of the peer's.
    asleep: usize,
    peer_asleep: usize,
    /// True between `poll_interest` and `after_poll`.
    sleeping: bool,
    stream: TcpStream,
    /// Whether the connection has ended, so that the peer puts nothing more into its ring.
    ended: bool,
}

impl PeerWaker for SocketWaker {
    fn wake(&self) {
        let word = self.map.word(self.peer_asleep);
        // SeqCst, like the store that published the data before: see `poll_interest`.
        if word.load(Ordering::SeqCst) != 0 && word.swap(0, Ordering::SeqCst) != 0 {
            // Fails if the socket's buffer is full, so that the peer has bytes to read, or if the
            // connection has ended, which `after_poll` detects.
            drop(sys::send(self.stream.as_fd(), &[1]));
        }
    }

    fn check_open(&self) -> io::Result<()> {
        if self.ended { Err(io::ErrorKind::UnexpectedEof.into()) } else { Ok(()) }
    }
}

impl PeerStream for Ring {
    fn poll_interest(&mut self, receive: bool, send: bool) -> io::Result<Option<PollFd<'_>>> {
        self.waker.sleeping = true;
        // SeqCst: either the checks below see what the peer published, or the peer, which reads the
        // word after publishing, sees it set.
        self.waker.map.word(self.waker.asleep).store(1, Ordering::SeqCst);
        let can_move = self.waker.ended || self.can_move(receive, send)?;
        Ok((!can_move).then(|| sys::interest(self.waker.stream.as_fd(), true, false)))
    }

    fn after_poll(&mut self) {
        let waker = &mut self.waker;
        if !std::mem::take(&mut waker.sleeping) {
            return;
        }
        waker.map.word(waker.asleep).store(0, Ordering::SeqCst);
        // A byte that arrives later only ends the next sleep early.
        waker.ended = match sys::receive(waker.stream.as_fd(), &mut [0; 64]) {
            Ok(bytes) => bytes == 0,
            Err(error) => !would_block(&error),
        };
    }
}

#[cfg(test)]
mod tests {
    use std::net::TcpListener;
    use std::time::Duration;

    use super::*;
    use crate::backend::frame::HEADER;
    use crate::backend::host::channel::BUDGET;
    use crate::memory::Span;
    use crate::net::stream::DuplexStream;

    fn pair() -> [Ring; 2] {
        let memory = Rings::create(2).unwrap();
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let one = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        let two = listener.accept().unwrap().0;
        let ring = |memory, own, stream| {
            Rings::attach(memory, &[3, 7]).unwrap().ring(own, 10 - own, stream).unwrap()
        };
        [ring(memory.try_clone().unwrap(), 3, one), ring(memory, 7, two)]
    }

    /// Sleeps as a call does.
    fn sleep(ring: &mut Ring, receive: bool, send: bool) {
        if let Some(fd) = ring.poll_interest(receive, send).unwrap() {
            sys::poll(&mut [fd], Some(Duration::from_secs(60))).unwrap();
        }
        ring.after_poll();
    }

    fn send(ring: &mut Ring, head: &mut [u8], body: &mut [u8]) {
        let (head, body) = (Span::from_mut(head), Span::from_mut(body));
        let mut done = 0;
        while done < head.len() + body.len() {
            let in_body = done.saturating_sub(head.len());
            let rest = body.part(in_body, body.len() - in_body);
            match ring
                .try_send(head.part(done.min(head.len()), head.len().saturating_sub(done)), rest)
                .unwrap()
            {
                0 => sleep(ring, false, true),
                some => done += some,
            }
        }
    }

    fn receive(ring: &mut Ring, into: &mut [u8]) {
        let mut done = 0;
        while done < into.len() {
            match ring.try_receive(Span::from_mut(&mut into[done..])).unwrap() {
                0 => sleep(ring, true, false),
                some => done += some,
            }
        }
    }

    /// A lost wake-up would make this test wait for at least a minute.
    #[test]
    fn a_sleeping_receiver_is_woken_and_gets_what_was_sent() {
        let mut ends = pair();
        std::thread::scope(|scope| {
            for (rank, ring) in ends.iter_mut().enumerate() {
                scope.spawn(move || {
                    let mut body = vec![0; 300_000];
                    for round in 0..2_000 {
                        let len = if round % 100 == 0 { body.len() } else { round * 37 % 5_000 };
                        let mut head = [round as u8; HEADER];
                        if round % 2 == rank {
                            body[..len].fill(round as u8);
                            send(ring, &mut head, &mut body[..len]);
                            continue;
                        }
                        let mut got = [0; HEADER];
                        receive(ring, &mut got);
                        assert_eq!(got, head);
                        receive(ring, &mut body[..len]);
                        assert!(body[..len].iter().all(|&x| x == round as u8));
                    }
                });
            }
        });
    }

    #[test]
    fn data_sent_before_the_connection_ends_are_received() {
        let [mut one, mut two] = pair();
        send(&mut one, &mut [1; HEADER], &mut [2; 100]);
        drop(one);
        sleep(&mut two, true, false);
        let (mut head, mut body) = ([0; HEADER], [0; 101]);
        receive(&mut two, &mut head);
        assert_eq!(head, [1; HEADER]);
        assert_eq!(two.try_receive(Span::from_mut(&mut body)).unwrap(), 100);
        sleep(&mut two, true, false);
        let end = two.try_receive(Span::from_mut(&mut body)).unwrap_err();
        assert_eq!(end.kind(), io::ErrorKind::UnexpectedEof);
        // This fills the ring, and no peer frees it.
        let mut much = vec![0; BUDGET];
        assert_eq!(two.try_send(Span::EMPTY, Span::from_mut(&mut much)).unwrap(), BUDGET);
        two.try_send(Span::EMPTY, Span::from_mut(&mut much)).unwrap_err();
    }

    #[test]
    fn memory_of_another_size_is_refused() {
        let error = Rings::attach(Rings::create(3).unwrap(), &[0, 1]).unwrap_err();
        assert!(error.to_string().contains("rank 0"), "{error}");
    }
}
