//! Declarations of the functions in `shim/gloo.cc`.
//!
//! Each returns a code. None blocks, except as documented. Pointers must not be null.

use std::ffi::{c_char, c_int, c_void};

pub(super) const OK: c_int = 0;
/// Not complete yet; only of [`gloo_shim_wait`].
pub(super) const PENDING: c_int = 1;
/// A connection failed. Other codes are other errors.
pub(super) const IO: c_int = 2;

/// A connection to each peer, and a thread that serves them.
#[repr(C)]
pub(super) struct Mesh {
    _opaque: [u8; 0],
}

/// Memory from which messages are sent or into which they are received.
#[repr(C)]
pub(super) struct Buffer {
    _opaque: [u8; 0],
}

unsafe extern "C" {
    /// The text of this thread's last error, valid until its next one.
    pub(super) safe fn gloo_shim_error() -> *const c_char;
    /// Opens a listening socket for each peer, bound to an address of this machine.
    pub(super) fn gloo_shim_mesh_new(
        address: *const c_char,
        rank: c_int,
        size: c_int,
        connect_timeout_ms: u32,
        out: *mut *mut Mesh,
    ) -> c_int;
    /// Writes the address to which `peer` must connect: `*len` bytes, at most `capacity`.
    pub(super) fn gloo_shim_mesh_address(
        mesh: *mut Mesh,
        peer: c_int,
        out: *mut u8,
        capacity: usize,
        len: *mut usize,
    ) -> c_int;
    /// Connects to the peer at the address; blocks until the peer has connected, too, or for the
    /// timeout.
    pub(super) fn gloo_shim_mesh_connect(
        mesh: *mut Mesh,
        peer: c_int,
        address: *const u8,
        len: usize,
    ) -> c_int;
    /// Closes the connections, and waits for the end of the thread. All buffers must be freed.
    pub(super) fn gloo_shim_mesh_free(mesh: *mut Mesh);
    pub(super) fn gloo_shim_buffer_new(
        mesh: *mut Mesh,
        memory: *mut c_void,
        len: usize,
        out: *mut *mut Buffer,
    ) -> c_int;
    /// Waits until gloo no longer accesses the memory.
    pub(super) fn gloo_shim_buffer_free(buffer: *mut Buffer);
    /// Sends a part of the memory. Messages of one slot match in order.
    pub(super) fn gloo_shim_send(
        buffer: *mut Buffer,
        peer: c_int,
        slot: u64,
        offset: usize,
        len: usize,
    ) -> c_int;
    /// Receives into a part of the memory.
    pub(super) fn gloo_shim_receive(
        buffer: *mut Buffer,
        peer: c_int,
        slot: u64,
        offset: usize,
        len: usize,
    ) -> c_int;
    /// Takes the completion of one message; waits at most `micros` for it. If there is none,
    /// nothing changes, unlike with gloo's own waits.
    pub(super) fn gloo_shim_wait(buffer: *mut Buffer, received: c_int, micros: u32) -> c_int;
}
