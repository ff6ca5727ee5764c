//! Robust futexes, which report the death of a process before the kernel unmaps its memory.
//!
//! A pidfd or a socket reports a killed process only after the kernel has unmapped its memory,
//! which takes longer the more of it there is. Before that the kernel marks the robust futexes that
//! the process's threads hold with `FUTEX_OWNER_DIED` and wakes a waiter of each
//! (linux/Documentation/locking/robust-futexes.rst). So a thread of every rank holds one word in
//! the segment as a robust futex, and sleeps on those of the other ranks.
//!
//! The kernel wakes only one waiter, which reports the death to the other ranks. If that rank is
//! killed at this moment, its own word wakes another rank, which then sees both deaths.

#![expect(unsafe_code, reason = "system calls")]

use std::ffi::c_void;
use std::time::Duration;
use std::{io, ptr};

use rustix::io::Errno;
use rustix::thread::futex::{self, WaitFlags, WaitvFlags};
use rustix::thread::gettid;
use rustix::time::{ClockId, clock_gettime};

use crate::net::sys::timespec;
use crate::sync::atomic::{AtomicU32, Ordering};

/// Most words that a thread can wait for at once; linux/futex.h, `FUTEX_WAITV_MAX`.
pub(super) const MAX_WORDS: usize = 128;
/// Value of a word whose owner has released it.
const RELEASED: u32 = 0;

/// Whether the word's owner has died.
pub(super) fn owner_died(word: u32) -> bool {
    word & futex::OWNER_DIED != 0
}

/// A word that the calling thread holds. If the thread is killed, the kernel marks the word.
#[derive(Debug)]
pub(super) struct RobustFutex<'a> {
    word: &'a AtomicU32,
    /// Read by the kernel when the thread ends. The raw pointer makes this type `!Send`.
    list: *mut RobustList,
}

/// linux/futex.h, `struct robust_list_head`, with its only entry.
#[derive(Debug)]
#[repr(C)]
struct RobustList {
    /// The entry.
    first: *const Entry,
    /// Distance from the entry to its word.
    offset: libc::c_long,
    pending: *const Entry,
    entry: Entry,
}

/// linux/futex.h, `struct robust_list`: the next entry; the last one points to the head.
#[derive(Debug)]
#[repr(C)]
struct Entry(*const RobustList);

impl<'a> RobustFutex<'a> {
    /// Acquires the word; returns `None` if another thread holds it or has died with it. The thread
    /// must hold no other robust futex.
    pub(super) fn new(word: &'a AtomicU32) -> Option<Self> {
        let thread = gettid().as_raw_nonzero().get().cast_unsigned();
        // `FUTEX_WAITERS`, so that the kernel wakes a waiter.
        let held = futex::WAITERS | thread;
        word.compare_exchange(RELEASED, held, Ordering::SeqCst, Ordering::SeqCst).ok()?;
        let none = ptr::null();
        let list = RobustList { first: none, offset: 0, pending: none, entry: Entry(none.cast()) };
        let list = Box::into_raw(Box::new(list));
        // SAFETY: just allocated, and not shared yet.
        let head = unsafe { &mut *list };
        head.first = &raw const head.entry;
        head.entry.0 = list;
        let distance = ptr::from_ref(word).addr().wrapping_sub(head.first.addr());
        head.offset = distance.cast_signed() as libc::c_long;
        set_robust_list(list);
        Some(Self { word, list })
    }
}

impl Drop for RobustFutex<'_> {
    fn drop(&mut self) {
        self.word.store(RELEASED, Ordering::SeqCst);
        set_robust_list(ptr::null());
        // SAFETY: made by `Box::into_raw`, and the kernel no longer refers to it.
        drop(unsafe { Box::from_raw(self.list) });
    }
}

fn set_robust_list(head: *const RobustList) {
    // Size of the C struct, which does not include the entry.
    let size = std::mem::offset_of!(RobustList, entry);
    // SAFETY: the list lives until another replaces it. It cannot fail with this size.
    unsafe { libc::syscall(libc::SYS_set_robust_list, head, size) };
}

/// Sleeps until one of at most [`MAX_WORDS`] words is woken, `tick` has passed or a signal arrives;
/// returns at once if a word does not have the given value. Fails before Linux 5.16, and where a
/// seccomp filter refuses it.
pub(super) fn wait_any(words: &[(&AtomicU32, u32)], tick: Duration) -> io::Result<()> {
    let waiter = |&(word, value): &(&AtomicU32, u32)| {
        let mut waiter = futex::Wait::new();
        waiter.val = value.into();
        waiter.uaddr = ptr::from_ref(word).cast_mut().cast::<c_void>().into();
        // Not `PRIVATE`: other processes wake it.
        waiter.flags = WaitFlags::SIZE_U32;
        waiter
    };
    let waiters: Vec<_> = words.iter().map(waiter).collect();
    let end = clock_gettime(ClockId::Monotonic) + timespec(tick);
    match futex::waitv(&waiters, WaitvFlags::empty(), Some(&end), ClockId::Monotonic) {
        Ok(_) | Err(Errno::AGAIN | Errno::TIMEDOUT | Errno::INTR) => Ok(()),
        Err(error) => Err(error.into()),
    }
}

#[cfg(test)]
mod tests {
    use std::mem::ManuallyDrop;
    use std::sync::atomic::AtomicPtr;

    use super::*;
    use crate::backend::host::refuse::refuse;

    const LONG: Duration = Duration::from_secs(60);

    #[test]
    fn a_released_word_does_not_report_a_death() {
        let word = AtomicU32::new(0);
        std::thread::scope(|scope| {
            scope.spawn(|| {
                let held = RobustFutex::new(&word).unwrap();
                let value = word.load(Ordering::SeqCst);
                assert!(value & libc::FUTEX_TID_MASK != 0 && !owner_died(value));
                drop(held);
            });
        });
        assert_eq!(word.load(Ordering::SeqCst), RELEASED);
    }

    #[test]
    fn a_word_has_one_holder() {
        let word = AtomicU32::new(0);
        let held = RobustFutex::new(&word);
        assert!(held.is_some());
        std::thread::scope(|scope| {
            let other = scope.spawn(|| RobustFutex::new(&word).is_some());
            assert!(!other.join().unwrap());
        });
        drop(held);
        word.store(futex::OWNER_DIED, Ordering::SeqCst);
        assert!(RobustFutex::new(&word).is_none());
    }

    /// Some containers filter the system call. If that counted as a wake-up, the monitor would
    /// spin.
    #[test]
    fn a_wait_refused_by_seccomp_is_an_error() {
        let refused = std::thread::spawn(|| {
            refuse(&[libc::SYS_futex_waitv], libc::EPERM);
            wait_any(&[(&AtomicU32::new(7), 7)], LONG).map_err(|error| error.raw_os_error())
        });
        assert_eq!(refused.join().unwrap(), Err(Some(libc::EPERM)));
        for (value, tick) in [(8, LONG), (7, Duration::from_millis(1))] {
            wait_any(&[(&AtomicU32::new(7), value)], tick).unwrap();
        }
    }

    /// The kernel does the same when a thread ends as when a process is killed.
    #[test]
    fn the_death_of_an_owner_wakes_a_waiter() {
        let [other, word] = [AtomicU32::new(7), AtomicU32::new(0)];
        let list = AtomicPtr::new(ptr::null_mut());
        std::thread::scope(|scope| {
            scope.spawn(|| {
                let held = ManuallyDrop::new(RobustFutex::new(&word).unwrap());
                list.store(held.list, Ordering::Relaxed);
                std::thread::sleep(Duration::from_millis(20));
            });
            loop {
                let value = word.load(Ordering::SeqCst);
                if owner_died(value) {
                    break;
                }
                if wait_any(&[(&other, 7), (&word, value)], LONG).is_err() {
                    std::thread::yield_now();
                }
            }
        });
        // SAFETY: made by `Box::into_raw`; the thread that registered it has ended.
        drop(unsafe { Box::from_raw(list.into_inner()) });
    }
}
