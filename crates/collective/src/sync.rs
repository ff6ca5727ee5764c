//! Locks, atomics and threads: std's, or with `--cfg loom` those of its models.
//!
//! Whatever ranks or threads agree on without a channel takes its primitives from here, so that a
//! model runs the very code that ships. `--cfg loom` is for the tests named `loom` alone; nothing
//! else works with it.

#[cfg(not(loom))]
pub(crate) use std::sync::{Condvar, Mutex, MutexGuard, atomic};
#[cfg(not(loom))]
pub(crate) use std::thread;

#[cfg(loom)]
pub(crate) use loom::sync::{Condvar, Mutex, MutexGuard, atomic};
#[cfg(loom)]
pub(crate) use loom::thread;

/// Locks what no panic can leave half changed: users' code never runs under these locks.
pub(crate) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().expect("nobody panics under this lock")
}

/// Sleeps until notified; may wake without.
pub(crate) fn wait<'a, T>(condvar: &Condvar, guard: MutexGuard<'a, T>) -> MutexGuard<'a, T> {
    condvar.wait(guard).expect("nobody panics under this lock")
}
