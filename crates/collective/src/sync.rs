//! Locks, atomics and threads: std's, or loom's with `--cfg loom`.
//!
//! Code that synchronises ranks or threads without a channel uses these primitives, so that loom
//! models test the released code. `--cfg loom` works only for the tests named `loom`.

#[cfg(not(loom))]
pub(crate) use std::sync::{Condvar, Mutex, MutexGuard, atomic, mpsc};
#[cfg(not(loom))]
pub(crate) use std::thread;

#[cfg(loom)]
pub(crate) use loom::sync::{Condvar, Mutex, MutexGuard, atomic, mpsc};
#[cfg(loom)]
pub(crate) use loom::thread;

/// Locks a mutex. No user code runs under these locks, so none is ever poisoned.
pub(crate) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().expect("no code panics under this lock")
}

/// Sleeps until notified; may wake spuriously.
pub(crate) fn wait<'a, T>(condvar: &Condvar, guard: MutexGuard<'a, T>) -> MutexGuard<'a, T> {
    condvar.wait(guard).expect("no code panics under this lock")
}
