//! Work on several threads, including the calling one.
//!
//! The threads live for one call. A share takes far longer than starting a thread (see
//! [`ChunkPlan::new`](super::plan::ChunkPlan::new)), so there is no thread pool to consider when a
//! process forks or pins its threads.

use std::thread;

/// Calls `work` for every share, each on its own thread.
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
