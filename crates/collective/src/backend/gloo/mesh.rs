//! A safe interface to gloo's connections and buffers, with [`io::Error`]s.
//!
//! Invariant: a [`Buffer`] is freed before its memory and before its [`Mesh`]; after that gloo no
//! longer accesses the memory. A `Buffer` is never leaked, because it never leaves this backend.

use std::ffi::{CStr, CString, c_int};
use std::io::{self, Result};
use std::marker::PhantomData;
use std::net::IpAddr;
use std::ptr::{NonNull, null_mut};
use std::sync::Arc;
use std::time::Duration;

use super::sys;
use crate::Rank;
use crate::backend::core::Direction;
use crate::memory::Span;

/// Kind of an error of a connection; other errors of gloo are [`io::ErrorKind::Other`].
pub(super) const CONNECTION_FAILED: io::ErrorKind = io::ErrorKind::BrokenPipe;

/// Connections to all peers, and the gloo thread that serves them.
#[derive(Debug)]
pub(super) struct Mesh(NonNull<sys::Mesh>);

// SAFETY: gloo locks its contexts and pairs, which are designed for use concurrently with the
// device's thread.
unsafe impl Send for Mesh {}
// SAFETY: as for `Send`.
unsafe impl Sync for Mesh {}

impl Mesh {
    /// Creates a mesh that listens for every peer at an address of this machine. Connecting to a
    /// peer times out after `timeout`.
    pub(super) fn new(
        address: IpAddr,
        rank: Rank,
        world: usize,
        timeout: Duration,
    ) -> Result<Self> {
        let address = CString::new(address.to_string()).expect("an address has no NUL byte");
        let mut out = null_mut();
        let (rank, world, millis) = (narrow(rank), narrow(world), millis(timeout));
        // SAFETY: a NUL-terminated string, and a valid out pointer.
        check(unsafe {
            sys::gloo_shim_mesh_new(address.as_ptr(), rank, world, millis, &raw mut out)
        })?;
        Ok(Self(made(out)))
    }

    /// Returns the address to which a peer must connect.
    pub(super) fn address(&self, peer: Rank) -> Result<Vec<u8>> {
        // Gloo's `Address::kMaxByteSize`, transport/address.h.
        let (mut bytes, mut len) = (vec![0; 192], 0);
        let (out, capacity) = (bytes.as_mut_ptr(), bytes.len());
        // SAFETY: `capacity` writable bytes, and a valid pointer for their number.
        let code = unsafe {
            sys::gloo_shim_mesh_address(self.0.as_ptr(), narrow(peer), out, capacity, &raw mut len)
        };
        check(code)?;
        bytes.truncate(len);
        Ok(bytes)
    }

    /// Connects to the peer at `address`; blocks until the peer has connected, too.
    pub(super) fn connect(&self, peer: Rank, address: &[u8]) -> Result<()> {
        let raw = self.0.as_ptr();
        // SAFETY: `address` is readable for its length. Gloo rejects an invalid address.
        check(unsafe {
            sys::gloo_shim_mesh_connect(raw, narrow(peer), address.as_ptr(), address.len())
        })
    }
}

impl Drop for Mesh {
    fn drop(&mut self) {
        // SAFETY: made by `new`, and every buffer of it holds an `Arc` of it.
        unsafe { sys::gloo_shim_mesh_free(self.0.as_ptr()) };
    }
}

/// Memory from which messages are sent or into which they are received.
#[derive(Debug)]
pub(super) struct Buffer<'a> {
    raw: NonNull<sys::Buffer>,
    _mesh: Arc<Mesh>,
    memory: PhantomData<&'a mut [u8]>,
}

// SAFETY: gloo locks its buffers, which its device's thread also uses.
unsafe impl Send for Buffer<'_> {}
// SAFETY: as for `Send`.
unsafe impl Sync for Buffer<'_> {}

impl<'a> Buffer<'a> {
    pub(super) fn new(mesh: &Arc<Mesh>, memory: Span<'a>) -> Result<Self> {
        let mut out = null_mut();
        let (raw, ptr) = (mesh.0.as_ptr(), memory.ptr().cast());
        // SAFETY: the span's memory lives for 'a, and this buffer does not outlive 'a.
        check(unsafe { sys::gloo_shim_buffer_new(raw, ptr, memory.len(), &raw mut out) })?;
        Ok(Self { raw: made(out), _mesh: Arc::clone(mesh), memory: PhantomData })
    }

    /// Starts to send or receive a part of the memory.
    pub(super) fn start(
        &self,
        direction: Direction,
        peer: Rank,
        slot: u64,
        (offset, len): (usize, usize),
    ) -> Result<()> {
        let (raw, peer) = (self.raw.as_ptr(), narrow(peer));
        check(match direction {
            // SAFETY: gloo checks the part against the buffer.
            Direction::Send => unsafe { sys::gloo_shim_send(raw, peer, slot, offset, len) },
            // SAFETY: as above.
            Direction::Receive => unsafe { sys::gloo_shim_receive(raw, peer, slot, offset, len) },
        })
    }

    /// Waits at most `time` until one message is complete; returns whether one is.
    pub(super) fn take(&self, direction: Direction, time: Duration) -> Result<bool> {
        let micros = u32::try_from(time.as_micros()).unwrap_or(u32::MAX);
        let received = c_int::from(direction == Direction::Receive);
        // SAFETY: `raw` is valid while `self` lives.
        match unsafe { sys::gloo_shim_wait(self.raw.as_ptr(), received, micros) } {
            sys::PENDING => Ok(false),
            code => check(code).map(|()| true),
        }
    }
}

impl Drop for Buffer<'_> {
    fn drop(&mut self) {
        // SAFETY: made by `new`. Waits until gloo's thread no longer uses the memory.
        unsafe { sys::gloo_shim_buffer_free(self.raw.as_ptr()) };
    }
}

fn made<T>(raw: *mut T) -> NonNull<T> {
    NonNull::new(raw).expect("the shim returns a pointer on success")
}

fn check(code: c_int) -> Result<()> {
    if code == sys::OK {
        return Ok(());
    }
    // SAFETY: a NUL-terminated string that stays valid until this thread's next failure.
    let text = unsafe { CStr::from_ptr(sys::gloo_shim_error()) };
    let text = text.to_string_lossy().into_owned();
    let kind = if code == sys::IO { CONNECTION_FAILED } else { io::ErrorKind::Other };
    Err(io::Error::new(kind, text))
}

fn narrow(rank: Rank) -> c_int {
    c_int::try_from(rank).expect("a group has at most MAX_RANKS ranks")
}

/// Converts a timeout to milliseconds, at most a week, so that gloo's conversions do not overflow.
fn millis(timeout: Duration) -> u32 {
    u32::try_from(timeout.as_millis()).unwrap_or(u32::MAX).min(7 * 24 * 3600 * 1000)
}
