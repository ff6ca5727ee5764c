//! A word to the processor of the pages that a sweep comes to next.
//!
//! Weights and gradients are the caller's, mostly in pages of 4 KiB, and the processor's own prefetching
//! ends with a page: at each next one every stream waits for the translation of its address, under a
//! hypervisor of many steps, and then for memory. One line asked for in time, four pages ahead, has both
//! done before the sweep arrives. State lies in large pages ([`pages`](super::pages)) and needs no such
//! word; more lines than one a page gain nothing.

#![cfg_attr(target_arch = "x86_64", expect(unsafe_code, reason = "a hint that takes addresses"))]

/// Elements from the beginning of `values` to the next multiple of `unit` elements in memory.
pub(super) fn before(values: &[f32], unit: usize) -> usize {
    let place = values.as_ptr().addr() / size_of::<f32>();
    place.next_multiple_of(unit) - place
}

/// Has the pages fetched that lie [`DISTANCE`] behind the beginnings of weight and gradient.
#[inline(always)]
pub(super) fn announce(param: &[f32], grad: &[f32]) {
    for values in [param.as_ptr(), grad.as_ptr()] {
        let there = values.wrapping_add(DISTANCE);
        fetch(there.map_addr(|address| address / BYTES * BYTES));
    }
}

/// Has as many pages fetched as `param` has, right before it: a sweep that goes backwards comes to them
/// next.
pub(super) fn announce_before(param: &[f32]) {
    for page in 1..=param.len() / PAGE {
        fetch(param.as_ptr().wrapping_sub(page * PAGE));
    }
}

#[cfg(target_arch = "x86_64")]
#[inline]
fn fetch(page: *const f32) {
    use std::arch::x86_64::{_MM_HINT_T0, _mm_prefetch};
    // SAFETY: a hint: nothing is read, and of addresses that are not mapped nothing comes.
    unsafe { _mm_prefetch::<_MM_HINT_T0>(page.cast()) };
}

/// Such hints are not to be had on other processors yet.
#[cfg(not(target_arch = "x86_64"))]
fn fetch(_: *const f32) {}

/// Elements of a page, 4 KiB, and its bytes.
pub(super) const PAGE: usize = BYTES / size_of::<f32>();
const BYTES: usize = 4096;
const DISTANCE: usize = 4 * PAGE;
