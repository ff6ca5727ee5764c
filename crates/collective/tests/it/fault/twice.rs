//! Ranks that are started twice: one joins, and the other gets an error that says so.

use std::fs;
use std::sync::{Arc, mpsc};
use std::time::{Duration, Instant};

use collective::{Error, MemoryStore, ProcessGroup, Rank, Result, SharedBuf, Store};

use super::joining::summed;
use super::transports::transports;
use super::{SOON, TIMEOUT};
use crate::common::{Role, Workers, options, wait_for};

/// Text of the error for a rank that is started twice.
fn twice(rank: Rank) -> String {
    format!("joining group default: rank {rank} was started twice: ")
}

/// The other ranks wait for rank 2 meanwhile.
#[test]
fn a_rank_started_again_while_it_joins_is_refused_and_the_first_joins() {
    for transport in transports() {
        for (again, key) in [(0, "default/open"), (1, "default/tried/1")] {
            let store = MemoryStore::new();
            let join = |rank| {
                let (store, options) = (store.clone(), options(transport.name, rank, TIMEOUT));
                ProcessGroup::from_store(Arc::new(store), rank, 3, options).map(summed)
            };
            std::thread::scope(|scope| {
                let first = [0, 1].map(|rank| scope.spawn(move || join(rank)));
                wait_for(|| store.check(&[key]).unwrap().then_some(()), key);
                let (start, error) = (Instant::now(), join(again).unwrap_err().to_string());
                assert!(error.starts_with(&twice(again)), "{error}");
                assert!(error.contains("another thread of this process"), "{error}");
                assert!(start.elapsed() < SOON);
                let last = scope.spawn(move || join(2));
                for rank in first.into_iter().chain([last]) {
                    let sum = rank.join().unwrap().unwrap();
                    assert!(sum.starts_with("Ok(()): 0 of "), "{sum}");
                }
            });
        }
    }
}

#[test]
fn one_of_two_threads_with_the_same_rank_joins() {
    for again in [0, 1] {
        for _ in 0..20 {
            let (store, (refused, error)) = (MemoryStore::new(), mpsc::channel());
            let join = |rank| {
                let options = options("host", rank, TIMEOUT);
                let joined = ProcessGroup::from_store(Arc::new(store.clone()), rank, 3, options);
                joined.map(summed).map_err(|error| drop(refused.send(error.to_string())))
            };
            std::thread::scope(|scope| {
                let spawn = |rank| scope.spawn(move || join(rank));
                let first = [0, 1, again].map(spawn);
                let error = error.recv().unwrap();
                assert!(error.starts_with(&twice(again)), "{error}");
                let joined = first.into_iter().chain([spawn(2)]);
                let joined: Vec<_> = joined.filter_map(|rank| rank.join().unwrap().ok()).collect();
                let right = joined.iter().filter(|sum| sum.starts_with("Ok(()): 0 of "));
                assert_eq!(right.count(), 3, "{joined:?}");
            });
        }
    }
}

#[test]
fn one_of_two_processes_with_the_same_rank_joins() {
    for transport in transports() {
        for again in [0, 1] {
            let ranks = [0, 1, again, 2];
            let scenario = "fault::started-twice";
            let workers = Workers::start_over(transport.name, scenario, 3, &ranks, TIMEOUT);
            let pids: Vec<_> = workers.children.iter().map(std::process::Child::id).collect();
            let both = [pids[again], pids[2]];
            let report = |rank, pid| format!("report-{rank}-{pid}");
            let text = |pid: &u32| fs::read_to_string(workers.dir.0.join(report(again, *pid))).ok();
            let error = wait_for(|| both.iter().find_map(text), "a refusal");
            assert!(error.starts_with(&twice(again)), "{error}");
            let named = |pid: &u32| error.contains(&format!(": pid {pid} on host "));
            assert!(both.iter().any(named), "{error}");
            fs::write(workers.dir.0.join("go"), "").unwrap();
            let reports =
                ranks.iter().zip(&pids).map(|(&rank, &pid)| workers.file(&report(rank, pid)));
            let right = reports.filter(|report| report.starts_with("Ok(()): 0 of "));
            assert_eq!(right.count(), 3);
            workers.finish();
        }
    }
}

/// Runs a rank of which there may be two processes. Rank 2 waits for a signal.
pub(super) fn play(role: &Role) {
    if role.rank == 2 {
        wait_for(|| fs::read(role.dir.join("go")).ok(), "the signal to join");
    }
    let report = role.join().map_or_else(|error| error.to_string(), summed);
    role.write(&format!("report-{}-{}", role.rank, std::process::id()), &report);
}

/// A store whose `compare_set` is not atomic, and which keeps deleted keys, so that a late rank
/// finds them.
#[derive(Debug)]
struct Careless(MemoryStore);

impl Store for Careless {
    fn set(&self, key: &str, value: &[u8]) -> Result<()> {
        self.0.set(key, value)
    }
    fn read(&self, keys: &[&str]) -> Result<Vec<Vec<u8>>> {
        self.0.read(keys)
    }
    fn name(&self) -> String {
        self.0.name()
    }
    fn add(&self, key: &str, delta: i64) -> Result<i64> {
        self.0.add(key, delta)
    }
    fn compare_set(&self, key: &str, _: &[u8], desired: &[u8]) -> Result<Vec<u8>> {
        self.0.set(key, desired)?;
        Ok(desired.to_vec())
    }
    fn try_wait(&self, keys: &[&str], timeout: Duration) -> Result<bool> {
        self.0.try_wait(keys, timeout)
    }
    fn check(&self, keys: &[&str]) -> Result<bool> {
        self.0.check(keys)
    }
    fn delete_key(&self, _: &str) -> Result<bool> {
        Ok(true)
    }
    fn num_keys(&self) -> Result<i64> {
        self.0.num_keys()
    }
}

/// If they did, safe code would have two `&mut` of the same memory.
#[test]
fn two_threads_with_the_same_rank_never_share_a_buffer() {
    let store = MemoryStore::new();
    let alloc = |rank| {
        let store = Arc::new(Careless(store.clone()));
        let group = ProcessGroup::from_store(store, rank, 2, options("host", rank, TIMEOUT))?;
        let mut buf: SharedBuf<u64> = group.alloc(4)?;
        buf.fill(rank as u64);
        group.barrier()?;
        assert_eq!(buf[..], [rank as u64; 4]);
        Ok(group)
    };
    // The groups stay until all threads have ended.
    let results: Vec<Result<ProcessGroup>> = std::thread::scope(|scope| {
        let ranks = [0, 1, 1].map(|rank| scope.spawn(move || alloc(rank)));
        ranks.into_iter().map(|rank| rank.join().unwrap()).collect()
    });
    let errors: Vec<_> = results.iter().filter_map(|result| result.as_ref().err()).collect();
    assert!(matches!(&errors[..], [Error::DuplicateRank { rank: 1, .. }]), "{errors:?}");
}
