//! Work on several threads: one share each, the caller's thread among them.
//!
//! The threads live for one call. A share is worth far more than a thread's start (see
//! [`ChunkPlan::new`](super::plan::ChunkPlan::new)), and so no thread is kept that a process would
//! have to know of when it forks or pins its threads.

use std::thread;

/// Calls `work` for every share, each on a thread of its own.
///
/// # Panics
///
/// If `work` does.
pub(crate) fn for_each<T: Send>(shares: &mut [T], work: impl Fn(&mut T) + Sync) {
    let Some((own, others)) = shares.split_first_mut() else { return };
    thread::scope(|scope| {
        for share in others {
            scope.spawn(|| work(share));
        }
        work(own);
    });
}
