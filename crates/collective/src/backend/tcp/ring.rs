//! What carries data between two ranks of one machine: a ring in shared memory each way.
//!
//! A rank that sleeps until its peer does something says so in a word of the shared memory; the peer
//! looks there whenever it has moved something, and if need be sends a byte over the data
//! connection, which carries nothing else. So waiting is the same as for sockets, one poll for all
//! links of a rank, and so is a death: the connection ends. What the peer had put into its ring
//! before is received first.
//!
//! The lowest rank of a machine makes the memory, which has no name, and says in the store which of
//! its descriptors it is; the others open it through `/proc`.

use std::fs::File;
use std::io;
use std::net::TcpStream;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::Ordering;

use super::link::{Link, is_nothing};
use super::sys;
use crate::backend::host::channel::{Bell, Layout, Pair};
use crate::backend::host::sys::{Mapping, is_sealed, memfd};
use crate::{Error, Rank, Result};

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

    /// New memory for so many ranks.
    pub(super) fn create(ranks: usize) -> Result<OwnedFd> {
        memfd(c"collective-rings", Self::layout(ranks).end(), 0)
    }

    /// The memory that one of `ranks` made.
    pub(super) fn attach(memory: OwnedFd, ranks: &[Rank]) -> Result<Self> {
        let layout = Self::layout(ranks.len());
        let file = File::from(memory);
        if !is_sealed(&file, layout.end()) {
            let text = format!("the shared memory of rank {} is not of this group", ranks[0]);
            return Err(Error::InvalidArgument(text));
        }
        let map = Arc::new(Mapping::new(file.into(), layout.end())?);
        Ok(Self { map, layout, ranks: ranks.to_vec() })
    }

    /// The ranks that share it.
    pub(super) fn ranks(&self) -> &[Rank] {
        &self.ranks
    }

    /// The link between two ranks of the machine, of which `own` is this one.
    pub(super) fn link(&self, own: Rank, peer: Rank, bell: TcpStream) -> Result<Ring> {
        let index = |rank| self.ranks.binary_search(&rank).expect("a rank of this machine");
        let (own, peer) = (index(own), index(peer));
        let socket = Socket {
            map: Arc::clone(&self.map),
            asleep: self.layout.asleep(own, peer),
            peer_asleep: self.layout.asleep(peer, own),
            sleeping: false,
            stream: bell,
            ended: false,
        };
        Pair::new(&self.map, &self.layout, [own, peer], socket)
    }
}

/// The link to one peer.
pub(super) type Ring = Pair<Socket>;

/// The data connection, as a bell.
#[derive(Debug)]
pub(super) struct Socket {
    map: Arc<Mapping>,
    /// The words by which this rank asks to be woken, and the peer.
    asleep: usize,
    peer_asleep: usize,
    /// Between `sleep` and `wake`.
    sleeping: bool,
    stream: TcpStream,
    /// It has been seen to have ended: nothing more is put into the ring.
    ended: bool,
}

impl Bell for Socket {
    fn ring(&self) {
        let word = self.map.word(self.peer_asleep);
        // SeqCst, after what was published with it: see `sleep`.
        if word.load(Ordering::SeqCst) != 0 && word.swap(0, Ordering::SeqCst) != 0 {
            // It can fail only if there is no room, and then there is something to read, or if the
            // connection has ended, which the next sleep finds out.
            drop(sys::send(self.stream.as_fd(), &[1]));
        }
    }

    fn still_there(&self) -> io::Result<()> {
        if self.ended { Err(io::ErrorKind::UnexpectedEof.into()) } else { Ok(()) }
    }
}

impl Link for Ring {
    fn sleep(&mut self, receive: bool, send: bool) -> io::Result<Option<libc::pollfd>> {
        self.bell.sleeping = true;
        // SeqCst: either the looks below see what the peer published, or the peer, who looks at the
        // word after publishing, sees it set.
        self.bell.map.word(self.bell.asleep).store(1, Ordering::SeqCst);
        let can_move = self.bell.ended || self.can_move(receive, send)?;
        Ok((!can_move).then(|| sys::interest(self.bell.stream.as_fd(), true, false)))
    }

    fn wake(&mut self) {
        let bell = &mut self.bell;
        if !std::mem::take(&mut bell.sleeping) {
            return;
        }
        bell.map.word(bell.asleep).store(0, Ordering::SeqCst);
        // A byte that comes later, for this sleep, ends the next one too soon, and that is all.
        bell.ended = match sys::receive(bell.stream.as_fd(), &mut [0; 64]) {
            Ok(bytes) => bytes == 0,
            Err(error) => !is_nothing(&error),
        };
    }
}

#[cfg(test)]
mod tests {
    use std::net::TcpListener;
    use std::time::Duration;

    use super::*;
    use crate::backend::host::channel::BUDGET;
    use crate::backend::tcp::frame::HEADER;
    use crate::backend::tcp::link::Stream;
    use crate::span::Span;

    fn pair() -> [Ring; 2] {
        let memory = Rings::create(2).unwrap();
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let one = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        let two = listener.accept().unwrap().0;
        let link = |memory, own, stream| {
            Rings::attach(memory, &[3, 7]).unwrap().link(own, 10 - own, stream).unwrap()
        };
        [link(memory.try_clone().unwrap(), 3, one), link(memory, 7, two)]
    }

    /// As a turn does it.
    fn sleep(ring: &mut Ring, receive: bool, send: bool) {
        if let Some(fd) = ring.sleep(receive, send).unwrap() {
            sys::poll(&mut [fd], Some(Duration::from_secs(60))).unwrap();
        }
        ring.wake();
    }

    fn send(ring: &mut Ring, head: &[u8], body: &mut [u8]) {
        let body = Span::from_mut(body);
        let mut done = 0;
        while done < head.len() + body.len() {
            let in_body = done.saturating_sub(head.len());
            let rest = body.part(in_body, body.len() - in_body);
            match ring.try_send(&head[done.min(head.len())..], rest).unwrap() {
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

    /// A wake-up that is lost would make this test wait for a minute and more.
    #[test]
    fn whoever_sleeps_is_woken_and_gets_what_was_sent() {
        let mut ends = pair();
        std::thread::scope(|scope| {
            for (rank, ring) in ends.iter_mut().enumerate() {
                scope.spawn(move || {
                    let mut body = vec![0; 300_000];
                    for round in 0..2_000 {
                        let len = if round % 100 == 0 { body.len() } else { round * 37 % 5_000 };
                        let head = [round as u8; HEADER];
                        if round % 2 == rank {
                            body[..len].fill(round as u8);
                            send(ring, &head, &mut body[..len]);
                            continue;
                        }
                        let got = loop {
                            match ring.try_header().unwrap() {
                                Some(got) => break got,
                                None => sleep(ring, true, false),
                            }
                        };
                        assert_eq!(got, head);
                        receive(ring, &mut body[..len]);
                        assert!(body[..len].iter().all(|&x| x == round as u8));
                    }
                });
            }
        });
    }

    #[test]
    fn what_was_sent_before_the_end_comes_and_then_the_end() {
        let [mut one, mut two] = pair();
        send(&mut one, &[1; HEADER], &mut [2; 100]);
        drop(one);
        sleep(&mut two, true, false);
        assert_eq!(two.try_header().unwrap(), Some([1; HEADER]));
        let mut body = [0; 101];
        assert_eq!(two.try_receive(Span::from_mut(&mut body)).unwrap(), 100);
        sleep(&mut two, true, false);
        let end = two.try_receive(Span::from_mut(&mut body)).unwrap_err();
        assert_eq!(end.kind(), io::ErrorKind::UnexpectedEof);
        // There is room, but nobody who would make more of it.
        let mut much = vec![0; BUDGET];
        assert_eq!(two.try_send(&[], Span::from_mut(&mut much)).unwrap(), BUDGET);
        two.try_send(&[], Span::from_mut(&mut much)).unwrap_err();
    }

    #[test]
    fn memory_of_another_group_is_refused() {
        let error = Rings::attach(Rings::create(3).unwrap(), &[0, 1]).unwrap_err();
        assert!(error.to_string().contains("rank 0"), "{error}");
    }
}
