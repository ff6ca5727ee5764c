//! Access to the memory behind a caller's pointers: only this module dereferences pointers from C.
//!
//! By the contract of C a pointer is null or valid for as many bytes as the function's documents
//! say. The only error that is checked for is a device address in place of a host address.

#![expect(unsafe_code, reason = "follows pointers of C")]

use std::ptr;

use crate::memory::is_of_device;

fn followable<T>(pointer: *const T) -> bool {
    !pointer.is_null() && !is_of_device(pointer.addr())
}

/// Writes through an out-parameter; `None` if it cannot be.
pub(crate) fn put<T>(to: *mut T, value: T) -> Option<()> {
    if !followable(to) {
        return None;
    }
    // SAFETY: not null and of the host, so by the contract of C a place for one `T`.
    unsafe { to.write(value) };
    Some(())
}

/// Reads one value.
pub(crate) fn get<T: Copy>(from: *const T) -> Option<T> {
    if !followable(from) {
        return None;
    }
    // SAFETY: not null and of the host, so by the contract of C one `T`; it may lie anywhere.
    Some(unsafe { from.read_unaligned() })
}

/// Reads an array.
pub(crate) fn array<T: Copy>(from: *const T, count: u64) -> Option<Vec<T>> {
    let count = usize::try_from(count).ok()?;
    (0..count).map(|at| get(from.wrapping_add(at))).collect()
}

/// Reads bytes of the host.
pub(crate) fn read(from: *const u8, bytes: usize) -> Vec<u8> {
    let mut out = vec![0; bytes];
    // SAFETY: by the contract of C, or of the block that it is of, `bytes` bytes; `out` is its own
    // memory.
    unsafe { ptr::copy_nonoverlapping(from, out.as_mut_ptr(), bytes) };
    out
}

/// Writes bytes of the host.
pub(crate) fn write(to: *mut u8, from: &[u8]) {
    // SAFETY: by the contract of C, or of the block that it is of, a place for as many bytes;
    // `from` is borrowed, so it is other memory.
    unsafe { ptr::copy_nonoverlapping(from.as_ptr(), to, from.len()) };
}
