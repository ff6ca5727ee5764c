//! A process group over NCCL for a test.

use std::sync::Arc;
use std::time::Duration;

use collective::{GroupOptions, MemoryStore, ProcessGroup, Store, Transport};
use runner::Result;

/// Joins two ranks on one GPU over NCCL. Returns an error if the version of NCCL or the GPU does
/// not support that.
pub(crate) fn ranks() -> Result<Vec<ProcessGroup>> {
    let store: Arc<dyn Store> = Arc::new(MemoryStore::new());
    let join = |rank| {
        let options = GroupOptions::default().with_timeout(Duration::from_secs(60));
        let options = options.with_transport(Transport::Nccl).with_cuda_device(0);
        ProcessGroup::from_store(store.clone(), rank, 2, options)
    };
    std::thread::scope(|scope| {
        let ranks = [0, 1].map(|rank| scope.spawn(move || join(rank)));
        ranks.into_iter().map(|rank| Ok(rank.join().unwrap()?)).collect()
    })
}
