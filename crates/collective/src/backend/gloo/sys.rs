//! Declarations of the functions in `shim/gloo.h`, which documents them.

use std::ffi::{c_char, c_int, c_void};

pub(super) const OK: c_int = 0;
pub(super) const PENDING: c_int = 1;
pub(super) const IO: c_int = 2;
pub(super) const STOPPED: c_int = 3;
pub(super) const LATE: c_int = 4;

#[repr(C)]
pub(super) struct Mesh {
    _opaque: [u8; 0],
}

#[repr(C)]
pub(super) struct Buffer {
    _opaque: [u8; 0],
}

pub(super) type Fold = extern "C" fn(*mut c_void, *mut c_void, *const c_void, *const c_void, usize);
pub(super) type Check = extern "C" fn(*mut c_void) -> c_int;

#[repr(C)]
pub(super) struct Reduction {
    pub(super) count: usize,
    pub(super) element_bytes: usize,
    pub(super) tag: u32,
    pub(super) timeout_ms: u32,
    pub(super) fold: Fold,
    pub(super) check: Check,
    pub(super) arg: *mut c_void,
    pub(super) peer: c_int,
}

unsafe extern "C" {
    pub(super) safe fn gloo_shim_error() -> *const c_char;
    pub(super) fn gloo_shim_mesh_new(
        address: *const c_char,
        rank: c_int,
        size: c_int,
        connect_timeout_ms: u32,
        out: *mut *mut Mesh,
    ) -> c_int;
    pub(super) fn gloo_shim_mesh_address(
        mesh: *mut Mesh,
        peer: c_int,
        out: *mut u8,
        capacity: usize,
        len: *mut usize,
    ) -> c_int;
    pub(super) fn gloo_shim_mesh_connect(
        mesh: *mut Mesh,
        peer: c_int,
        address: *const u8,
        len: usize,
    ) -> c_int;
    pub(super) fn gloo_shim_mesh_free(mesh: *mut Mesh);
    pub(super) fn gloo_shim_buffer_new(
        mesh: *mut Mesh,
        memory: *mut c_void,
        len: usize,
        out: *mut *mut Buffer,
    ) -> c_int;
    pub(super) fn gloo_shim_buffer_free(buffer: *mut Buffer);
    pub(super) fn gloo_shim_send(
        buffer: *mut Buffer,
        peer: c_int,
        slot: u64,
        offset: usize,
        len: usize,
    ) -> c_int;
    pub(super) fn gloo_shim_receive(
        buffer: *mut Buffer,
        peer: c_int,
        slot: u64,
        offset: usize,
        len: usize,
    ) -> c_int;
    pub(super) fn gloo_shim_wait(buffer: *mut Buffer, received: c_int, micros: u32) -> c_int;
    pub(super) fn gloo_shim_all_reduce(
        mesh: *mut Mesh,
        memory: *mut c_void,
        reduction: *mut Reduction,
    ) -> c_int;
    pub(super) fn gloo_shim_reduce(
        mesh: *mut Mesh,
        memory: *mut c_void,
        root: c_int,
        reduction: *mut Reduction,
    ) -> c_int;
}
