//! A stream to one peer whose headers go over a socket and whose blocks go through gloo.
//!
//! A block is sent in pieces of [`PIECE`] bytes, so that a timeout applies to a piece. Gloo sends a
//! message only after its receive has been posted, so a connection never carries a message that the
//! receiver does not wait for.

#![expect(unsafe_code, reason = "lends memory to gloo until the call ends")]

use std::io;
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::Duration;

use parking_lot::Mutex;
use rustix::event::PollFd;

use super::mesh::{Buffer, Mesh};
use crate::Rank;
use crate::backend::core::Direction;
use crate::memory::Span;
use crate::net::stream::{DuplexStream, PeerStream};

/// Largest message, in bytes.
const PIECE: usize = 4 << 20;
/// How long a wait sleeps in gloo between two polls.
const SLICE: Duration = Duration::from_millis(1);
/// Gloo's tag for blocks; its own collectives use others.
const SLOT: u64 = 3 << 56;

/// Gloo's connections, until an operation has failed.
#[derive(Debug)]
pub(super) struct Connections {
    mesh: Mutex<Option<Arc<Mesh>>>,
    closing: Mutex<Option<JoinHandle<()>>>,
}

impl Connections {
    pub(super) fn new(mesh: Mesh) -> Self {
        Self { mesh: Mutex::new(Some(Arc::new(mesh))), closing: Mutex::default() }
    }

    pub(super) fn mesh(&self) -> io::Result<Arc<Mesh>> {
        self.mesh.lock().clone().ok_or_else(|| io::ErrorKind::NotConnected.into())
    }

    /// Closes the connections after a failure, because gloo's thread spins on a connection that
    /// receives a message for a freed buffer. Closing waits 10 ms for gloo's thread, so it runs on
    /// a separate thread.
    pub(super) fn close(&self) {
        if let Some(mesh) = self.mesh.lock().take() {
            let close = std::thread::Builder::new().name("gloo-close".into());
            // If no thread can be started, they are closed here.
            *self.closing.lock() = close.spawn(move || drop(mesh)).ok();
        }
    }
}

impl Drop for Connections {
    fn drop(&mut self) {
        if let Some(closing) = self.closing.get_mut().take() {
            // The thread does not panic.
            let _ = closing.join();
        }
    }
}

/// The stream to and from one peer.
#[derive(Debug)]
pub(super) struct GlooStream {
    socket: Box<dyn PeerStream>,
    connections: Arc<Connections>,
    peer: Rank,
    /// Indexed by [`Direction`].
    transfers: [Option<BlockTransfer>; 2],
}

/// The transfer of a block that gloo is sending or receiving.
#[derive(Debug)]
struct BlockTransfer {
    buffer: Buffer<'static>,
    direction: Direction,
    /// Bytes not transferred yet.
    left: usize,
    /// Bytes transferred since `progress` last returned.
    landed: usize,
}

impl BlockTransfer {
    /// Counts completed pieces; waits at most `time` for the first.
    fn poll(&mut self, time: Duration) -> io::Result<()> {
        let mut time = time;
        while self.left > 0 && self.buffer.take(self.direction, time)? {
            let piece = self.left.min(PIECE);
            self.left -= piece;
            self.landed += piece;
            time = Duration::ZERO;
        }
        Ok(())
    }
}

impl GlooStream {
    pub(super) fn new(
        socket: Box<dyn PeerStream>,
        connections: Arc<Connections>,
        peer: Rank,
    ) -> Self {
        Self { socket, connections, peer, transfers: [None, None] }
    }

    /// Starts the transfer of a block, or continues the current one; returns the number of bytes
    /// newly transferred.
    fn progress(&mut self, direction: Direction, body: Span<'_>) -> io::Result<usize> {
        if body.len() == 0 {
            return Ok(0);
        }
        let place = &mut self.transfers[direction as usize];
        let transfer = match place {
            Some(transfer) => transfer,
            None => {
                // SAFETY: the memory is borrowed until all of it is counted or the call ends. Only
                // the transfer's buffer uses it, and the transfer is dropped in both cases.
                let memory = unsafe { Span::new(body.ptr(), body.len()) };
                let buffer = Buffer::new(&self.connections.mesh()?, memory)?;
                for start in (0..body.len()).step_by(PIECE) {
                    let part = (start, PIECE.min(body.len() - start));
                    buffer.start(direction, self.peer, SLOT, part)?;
                }
                place.insert(BlockTransfer { buffer, direction, left: body.len(), landed: 0 })
            }
        };
        transfer.poll(Duration::ZERO)?;
        let landed = std::mem::take(&mut transfer.landed);
        if transfer.left == 0 {
            *place = None;
        }
        Ok(landed)
    }
}

impl DuplexStream for GlooStream {
    fn try_send(&mut self, head: Span<'_>, body: Span<'_>) -> io::Result<usize> {
        let sent = match head.len() {
            0 => 0,
            _ => self.socket.try_send(head, Span::EMPTY)?,
        };
        if sent < head.len() {
            return Ok(sent);
        }
        Ok(sent + self.progress(Direction::Send, body)?)
    }

    fn try_receive(&mut self, into: Span<'_>) -> io::Result<usize> {
        self.progress(Direction::Receive, into)
    }

    fn try_receive_header(&mut self, into: Span<'_>) -> io::Result<usize> {
        self.socket.try_receive(into)
    }
}

impl PeerStream for GlooStream {
    fn poll_interest(&mut self, receive: bool, send: bool) -> io::Result<Option<PollFd<'_>>> {
        let [out, into] = &mut self.transfers;
        let wanted = into.as_mut().filter(|_| receive).or_else(|| out.as_mut().filter(|_| send));
        let Some(transfer) = wanted else { return self.socket.poll_interest(receive, send) };
        // A failure is reported by the next transfer.
        drop(transfer.poll(SLICE));
        Ok(None)
    }

    fn after_poll(&mut self) {
        self.socket.after_poll();
    }

    fn end_call(&mut self) {
        if self.transfers.iter().any(Option::is_some) {
            self.transfers = [None, None];
            self.connections.close();
        }
    }
}
