//! How the end of a rank's process is known before its memory is taken apart.
//!
//! For a pidfd or a socket a killed process has ended when the kernel has unmapped its memory, which
//! takes the longer the more of it there is. But before that the kernel goes through the
//! robust futexes that the process's threads hold: it writes into each that the owner has died, and
//! wakes a waiter (linux/Documentation/locking/robust-futexes.rst). So every rank has a word in the
//! segment which a thread of it holds that way, and the same thread sleeps on those of the others.
//!
//! Only one of all waiters is woken, and tells the other ranks. Should it be killed at that moment,
//! its own word wakes another one, which then sees both.

#![expect(unsafe_code, reason = "system calls")]

use std::io;
use std::time::Duration;

use crate::sync::atomic::{AtomicU32, Ordering};

/// Words that a thread can sleep on at once; linux/futex.h, `FUTEX_WAITV_MAX`.
pub(super) const MOST_WORDS: usize = 128;
/// linux/futex.h, since Linux 5.16. Without the flag for private ones: other processes wake it.
const FUTEX2_SIZE_U32: u32 = 2;
/// The owner holds the word no more.
const LEFT: u32 = 0;

/// Whether a word says that its owner has died.
pub(super) fn died(word: u32) -> bool {
    word & libc::FUTEX_OWNER_DIED != 0
}

/// Where the kernel finds a word.
fn address(word: &AtomicU32) -> usize {
    std::ptr::from_ref(word).addr()
}

/// A word that the calling thread holds. Should the thread be killed, the word says so.
#[derive(Debug)]
pub(super) struct Held<'a> {
    word: &'a AtomicU32,
    /// The kernel reads it when the thread ends. The raw pointers keep this on its thread.
    list: *mut RobustList,
}

/// linux/futex.h, `struct robust_list_head`, and its only entry.
#[derive(Debug)]
#[repr(C)]
struct RobustList {
    /// The entry.
    first: *const Entry,
    /// From the entry to its word.
    offset: libc::c_long,
    pending: *const Entry,
    entry: Entry,
}

/// linux/futex.h, `struct robust_list`: the next entry, after the last one the head.
#[derive(Debug)]
#[repr(C)]
struct Entry(*const RobustList);

impl<'a> Held<'a> {
    /// Begins to hold a word. The thread must hold no other robust futex.
    pub(super) fn new(word: &'a AtomicU32) -> Self {
        let none = std::ptr::null();
        let list = RobustList { first: none, offset: 0, pending: none, entry: Entry(none.cast()) };
        let list = Box::into_raw(Box::new(list));
        // SAFETY: just allocated, and nobody else's.
        let head = unsafe { &mut *list };
        head.first = &raw const head.entry;
        head.entry.0 = list;
        let distance = address(word).wrapping_sub(head.first.addr());
        head.offset = distance.cast_signed() as libc::c_long;
        // SAFETY: a system call without arguments.
        let thread = unsafe { libc::syscall(libc::SYS_gettid) } as u32;
        // Marked as waited for, so that the kernel wakes whoever there is.
        word.store(libc::FUTEX_WAITERS | thread, Ordering::SeqCst);
        set_robust_list(list);
        Self { word, list }
    }
}

impl Drop for Held<'_> {
    fn drop(&mut self) {
        self.word.store(LEFT, Ordering::SeqCst);
        set_robust_list(std::ptr::null());
        // SAFETY: made by `Box::into_raw`, and the kernel has just forgotten it.
        drop(unsafe { Box::from_raw(self.list) });
    }
}

fn set_robust_list(head: *const RobustList) {
    // The size is that of the C struct, without the entry.
    let size = std::mem::offset_of!(RobustList, entry);
    // SAFETY: the list lives until another takes its place. It cannot fail with this size.
    unsafe { libc::syscall(libc::SYS_set_robust_list, head, size) };
}

/// linux/futex.h, `struct futex_waitv`.
#[derive(Debug)]
#[repr(C)]
struct FutexWaitv {
    val: u64,
    uaddr: u64,
    flags: u32,
    reserved: u32,
}

/// Sleeps until one of at most [`MOST_WORDS`] words is woken, `tick` has passed or a signal comes;
/// not at all if one has another value than given. Fails before Linux 5.16, and where a filter of
/// system calls refuses it.
pub(super) fn wait_any(words: &[(&AtomicU32, u32)], tick: Duration) -> io::Result<()> {
    let waiter = |&(word, value): &(&AtomicU32, u32)| FutexWaitv {
        val: value.into(),
        uaddr: address(word) as u64,
        flags: FUTEX2_SIZE_U32,
        reserved: 0,
    };
    let waiters: Vec<_> = words.iter().map(waiter).collect();
    let mut end = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    // SAFETY: the pointer is good for the call.
    unsafe { libc::clock_gettime(libc::CLOCK_MONOTONIC, &raw mut end) };
    let nanos = end.tv_nsec + libc::c_long::from(tick.subsec_nanos().cast_signed());
    end.tv_nsec = nanos % 1_000_000_000;
    end.tv_sec += tick.as_secs().cast_signed() + nanos / 1_000_000_000;
    let (waiters, count) = (waiters.as_ptr(), waiters.len());
    // SAFETY: the array is as long as said, and the words behind it and `end` live during the call.
    let woken = unsafe {
        libc::syscall(
            libc::SYS_futex_waitv,
            waiters,
            count,
            0,
            &raw const end,
            libc::CLOCK_MONOTONIC,
        )
    };
    if woken >= 0 {
        return Ok(());
    }
    let error = io::Error::last_os_error();
    match error.raw_os_error() {
        Some(libc::EAGAIN | libc::ETIMEDOUT | libc::EINTR) => Ok(()),
        _ => Err(error),
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
    fn a_thread_that_ends_in_order_has_not_died() {
        let word = AtomicU32::new(0);
        std::thread::scope(|scope| {
            scope.spawn(|| {
                let held = Held::new(&word);
                let value = word.load(Ordering::SeqCst);
                assert!(value & libc::FUTEX_TID_MASK != 0 && !died(value));
                drop(held);
            });
        });
        assert_eq!(word.load(Ordering::SeqCst), LEFT);
    }

    /// As some containers' filters do: it is no wake-up, or the thread that waits would spin.
    #[test]
    fn a_wait_that_the_system_refuses_is_an_error() {
        let refused = std::thread::spawn(|| {
            refuse(&[libc::SYS_futex_waitv], libc::EPERM);
            wait_any(&[(&AtomicU32::new(7), 7)], LONG).map_err(|error| error.raw_os_error())
        });
        assert_eq!(refused.join().unwrap(), Err(Some(libc::EPERM)));
        for (value, tick) in [(8, LONG), (7, Duration::from_millis(1))] {
            wait_any(&[(&AtomicU32::new(7), value)], tick).unwrap();
        }
    }

    /// What the kernel does when a process is killed, it also does when a thread ends.
    #[test]
    fn whoever_sleeps_is_woken_by_the_death_of_an_owner() {
        let [other, word] = [AtomicU32::new(7), AtomicU32::new(0)];
        let list = AtomicPtr::new(std::ptr::null_mut());
        std::thread::scope(|scope| {
            scope.spawn(|| {
                let held = ManuallyDrop::new(Held::new(&word));
                list.store(held.list, Ordering::Relaxed);
                std::thread::sleep(Duration::from_millis(20));
            });
            loop {
                let value = word.load(Ordering::SeqCst);
                if died(value) {
                    break;
                }
                if wait_any(&[(&other, 7), (&word, value)], LONG).is_err() {
                    std::thread::yield_now();
                }
            }
        });
        // SAFETY: made by `Box::into_raw`; the thread that the kernel knew it of has ended.
        drop(unsafe { Box::from_raw(list.into_inner()) });
    }
}
