//! Attempts to join a group: which of them a rank joins, and that no two join one as the same rank.
//!
//! Rank 0 numbers the attempts and opens one. The other ranks join the open attempt, each at most
//! once. So all ranks use the same attempt, even if some have failed and retried more often than
//! others. A rank claims its place with a `compare_set`: if it was started twice, one process or
//! thread joins, and the other gets [`Error::DuplicateRank`].
//!
//! Keys, after the group's name: `attempts`, how many there were; `open`, rank 0's claim of the
//! open attempt; `tried/R`, rank R's claim of its last one, or of none (0) while it waits for its
//! first; `N/replaced`, set if a rank of attempt N died and was started again.
//!
//! A rank that was started again and sees that the process with its claim of the open attempt has
//! died ends that attempt for all, and all go on to the next one.
//!
//! Invariant: an attempt is claimed at most once for each rank.
//!
//! Limit: a claim of a process on another machine does not say whether that process has ended, and
//! been restarted. So a second rank 0 there opens an attempt of its own, and another rank waits for
//! the next attempt until its timeout.

use std::collections::BTreeSet;
use std::fs;
use std::hash::{BuildHasher as _, RandomState};
use std::time::{Duration, Instant};

use parking_lot::Mutex;
use serde::{Deserialize, Serialize};

use crate::backend::host::{is_running, start_time};
use crate::backend::rendezvous::machine;
use crate::store::{FAILED, Store, deadline, missing, publish_failure};
use crate::{Error, GroupOptions, Rank, Result};

/// Interval at which ranks poll for rank 0's next attempt.
const TICK: Duration = Duration::from_millis(20);

/// Tokens of the claims of this process that are in use.
static JOINING: Mutex<BTreeSet<u64>> = Mutex::new(BTreeSet::new());

/// This rank's attempt to join a group, which ends when this is dropped.
#[derive(Debug)]
pub(crate) struct Attempt {
    /// The group's name.
    group: String,
    rank: Rank,
    claim: Claim,
}

/// The process that joins an attempt as a rank.
#[derive(Debug, Serialize, Deserialize)]
struct Claim {
    attempt: i64,
    /// Random; distinguishes the threads of a process, and its claims.
    token: u64,
    pid: u32,
    /// Distinguishes the process from a later one with its pid.
    start_time: u64,
    machine: String,
    host: String,
}

impl Attempt {
    /// Opens an attempt on rank 0. On another rank blocks until rank 0 has opened one that the rank
    /// has not tried, for at most the options' timeout.
    pub(crate) fn begin(
        store: &dyn Store,
        rank: Rank,
        world_size: usize,
        options: &GroupOptions,
    ) -> Result<Self> {
        let claim = Claim::of_this_thread()?;
        JOINING.lock().insert(claim.token);
        let mut this = Self { group: options.name.clone(), rank, claim };
        match rank {
            0 => this.open(store)?,
            _ => this.find(store, world_size, options.timeout)?,
        }
        Ok(this)
    }

    pub(crate) fn number(&self) -> i64 {
        self.claim.attempt
    }

    /// Closes the attempt on rank 0 after `joined`, so that later ranks wait for the next one. A
    /// rank that has found this attempt but did not join in time gets a timeout, and may retry.
    pub(crate) fn close<T>(&self, store: &dyn Store, joined: Result<T>) -> Result<T> {
        // The store would not answer these requests either.
        if self.rank != 0 || matches!(joined, Err(Error::Store { .. })) {
            return joined;
        }
        let open = self.key("open");
        if matches!(joined, Err(Error::Timeout { .. })) {
            let value = store.read(&[&open]).unwrap_or_default().pop().unwrap_or_default();
            let other = parse(&open, &value).ok().flatten();
            if let Some(other) = other.filter(|other| other.token != self.claim.token) {
                return Err(self.duplicate(&other));
            }
        }
        drop(store.delete_key(&open));
        joined
    }

    /// Returns whether this attempt has ended because a rank of it died and was started again.
    pub(crate) fn is_replaced(&self, store: &dyn Store) -> bool {
        store.check(&[&self.replaced(self.claim.attempt)]).unwrap_or(false)
    }

    /// Ends the attempt of a process that had this rank and died.
    fn replace(&self, store: &dyn Store, dead: &Claim) -> Result<()> {
        store.set(&self.replaced(dead.attempt), b"")?;
        let failed = self.key(&format!("{}/{FAILED}", dead.attempt));
        let reason = format!("{} died while it joined", dead.describe(&self.claim));
        publish_failure(store, &failed, self.rank, reason)
    }

    fn open(&mut self, store: &dyn Store) -> Result<()> {
        let open = self.key("open");
        self.claim.attempt = store.add(&self.key("attempts"), 1)?;
        let (own, mut expected) = (self.claim.to_json(), Vec::new());
        loop {
            let found = store.compare_set(&open, &expected, &own)?;
            if found == own {
                let dead = parse(&open, &expected)?.filter(|dead| dead.has_died(&self.claim));
                return dead.map_or(Ok(()), |dead| self.replace(store, &dead));
            }
            if found == expected {
                // Closed meanwhile.
                expected.clear();
                continue;
            }
            self.check_free(parse(&open, &found)?.as_ref())?;
            expected = found;
        }
    }

    fn find(&mut self, store: &dyn Store, world_size: usize, timeout: Duration) -> Result<()> {
        let (open, tried, deadline) = (self.key("open"), self.tried(self.rank), deadline(timeout));
        let left = || deadline.saturating_duration_since(Instant::now());
        // From now on this rank is not missing.
        let first = store.compare_set(&tried, b"", &self.claim.to_json())?;
        let last = parse(&tried, &first)?.filter(|last| last.token != self.claim.token);
        let before = last.as_ref().map_or(0, |last| last.attempt);
        let mut has_replaced = false;
        if before == 0 {
            // The other one waits for rank 0, too.
            self.check_free(last.as_ref())?;
        }
        loop {
            store.try_wait(&[&open], left())?;
            let opened = store.read(&[&open])?.pop().unwrap_or_default();
            let opened = parse(&open, &opened)?.map_or(0, |claim| claim.attempt);
            if opened > before {
                self.claim.attempt = opened;
                let own = self.claim.to_json();
                let found = store.compare_set(&tried, &first, &own)?;
                let other = parse(&tried, &found)?.filter(|_| found != own);
                return other.map_or(Ok(()), |other| Err(self.duplicate(&other)));
            }
            if opened > 0 {
                // Another one may still be joining it. It also stays open if rank 0 was killed
                // meanwhile.
                self.check_free(last.as_ref())?;
                let dead = last.as_ref().filter(|last| !has_replaced && last.attempt == opened);
                if let Some(dead) = dead.filter(|dead| dead.has_died(&self.claim)) {
                    self.replace(store, dead)?;
                    has_replaced = true;
                }
            }
            if left().is_zero() {
                return Err(self.timeout(store, world_size, timeout, last.as_ref())?);
            }
            std::thread::sleep(TICK.min(left()));
        }
    }

    fn timeout(
        &self,
        store: &dyn Store,
        world_size: usize,
        waited: Duration,
        last: Option<&Claim>,
    ) -> Result<Error> {
        let mut op = format!("joining group {}", self.group);
        if let Some(other) = last.filter(|last| !last.is_of_same_process(&self.claim)) {
            let (by, rank) = (other.describe(&self.claim), self.rank);
            op += &format!(
                " ({by} has joined as rank {rank} before; if it still runs, rank {rank} was started twice)"
            );
        }
        let names: Vec<_> = (1..world_size).map(|rank| self.tried(rank)).collect();
        let names: Vec<_> = names.iter().map(String::as_str).collect();
        let never = missing(&names, &mut |names| store.check(names))?;
        let missing = [0].into_iter().chain(never.iter().map(|at| at + 1)).collect();
        Ok(Error::Timeout { op, waited, missing })
    }

    /// Fails if this rank's last claim, or rank 0's, is known to be in use.
    fn check_free(&self, last: Option<&Claim>) -> Result<()> {
        let in_use = last.filter(|last| last.is_in_use(&self.claim));
        in_use.map_or(Ok(()), |other| Err(self.duplicate(other)))
    }

    fn duplicate(&self, other: &Claim) -> Error {
        let (group, rank) = (self.group.clone(), self.rank);
        Error::DuplicateRank { group, rank, by: other.describe(&self.claim) }
    }

    fn replaced(&self, attempt: i64) -> String {
        self.key(&format!("{attempt}/replaced"))
    }

    fn tried(&self, rank: Rank) -> String {
        self.key(&format!("tried/{rank}"))
    }

    fn key(&self, what: &str) -> String {
        format!("{}/{what}", self.group)
    }
}

impl Drop for Attempt {
    fn drop(&mut self) {
        JOINING.lock().remove(&self.claim.token);
    }
}

impl Claim {
    /// A claim without a number.
    fn of_this_thread() -> Result<Self> {
        let pid = std::process::id();
        let start_time = start_time(pid)
            .map_err(|error| Error::io("reading when this process started", &error))?;
        let host = fs::read("/proc/sys/kernel/hostname")
            .map_err(|error| Error::io("reading this host's name", &error))?;
        let token = RandomState::new().hash_one((pid, Instant::now()));
        let (machine, host) = (machine()?, String::from_utf8_lossy(&host).trim().to_owned());
        Ok(Self { attempt: 0, token, pid, start_time, machine, host })
    }

    fn is_of_same_process(&self, own: &Self) -> bool {
        (&self.machine, self.pid, self.start_time) == (&own.machine, own.pid, own.start_time)
    }

    /// Whether this process or thread is known to be still there: a process of this machine that
    /// runs, or another thread of this process that joins.
    fn is_in_use(&self, own: &Self) -> bool {
        if self.is_of_same_process(own) {
            return JOINING.lock().contains(&self.token);
        }
        self.machine == own.machine && is_running(self.pid, self.start_time)
    }

    /// Whether this is another process of this machine, which has ended.
    fn has_died(&self, own: &Self) -> bool {
        self.machine == own.machine && !self.is_of_same_process(own) && !self.is_in_use(own)
    }

    fn describe(&self, own: &Self) -> String {
        match self.is_of_same_process(own) {
            true => "another thread of this process".to_owned(),
            false => format!("pid {} on host {}", self.pid, self.host),
        }
    }

    fn to_json(&self) -> Vec<u8> {
        serde_json::to_vec(self).expect("plain numbers and strings")
    }
}

/// Parses the claim at `key`; `None` if there is none.
fn parse(key: &str, json: &[u8]) -> Result<Option<Claim>> {
    if json.is_empty() {
        return Ok(None);
    }
    let claim = serde_json::from_slice(json).map(Some);
    claim.map_err(|_| Error::MalformedRecord { record: "a rank's claim".into(), key: key.into() })
}

#[cfg(test)]
mod tests {
    use std::process::Command;
    use std::sync::Arc;

    use super::*;
    use crate::{MemoryStore, ProcessGroup};

    const SHORT: Duration = Duration::from_millis(50);

    fn begin(store: &MemoryStore, rank: Rank) -> Result<Attempt> {
        Attempt::begin(store, rank, 3, &GroupOptions::default().with_timeout(SHORT))
    }

    fn on_another_machine(attempt: i64) -> Claim {
        let (machine, host) = ("other".to_owned(), "node7".to_owned());
        Claim { attempt, token: 1, pid: 7, start_time: 1, machine, host }
    }

    #[test]
    fn a_claim_is_in_use_while_its_process_runs_or_its_thread_joins() {
        let [own, thread] = [(); 2].map(|()| Claim::of_this_thread().unwrap());
        assert!(!thread.is_in_use(&own));
        JOINING.lock().insert(thread.token);
        assert!(thread.is_in_use(&own));
        JOINING.lock().remove(&thread.token);

        let mut child = Command::new("sleep").arg("600").spawn().unwrap();
        let (pid, started) = (child.id(), start_time(child.id()).unwrap());
        let claim = |pid, start_time| Claim { pid, start_time, ..Claim::of_this_thread().unwrap() };
        assert!(claim(pid, started).is_in_use(&own));
        assert!(!claim(pid, started + 1).is_in_use(&own), "a later process with its pid");
        child.kill().unwrap();
        // Before and after it is reaped.
        assert!(!claim(pid, started).is_in_use(&own));
        child.wait().unwrap();
        assert!(!claim(pid, started).is_in_use(&own));
        assert!(!on_another_machine(1).is_in_use(&own));
    }

    #[test]
    fn rank_0_opens_the_next_attempt_after_one_that_was_not_closed() {
        let store = MemoryStore::new();
        for number in 1..4 {
            // As if the store had failed.
            assert_eq!(begin(&store, 0).unwrap().number(), number);
        }
        store.set("default/open", &on_another_machine(9).to_json()).unwrap();
        let attempt = begin(&store, 0).unwrap();
        assert_eq!(attempt.number(), 4);
        assert!(matches!(begin(&store, 0), Err(Error::DuplicateRank { rank: 0, .. })));
        attempt.close(&store, Ok(())).unwrap();
        assert_eq!(begin(&store, 0).unwrap().number(), 6);
        store.set("default/open", b"no claim").unwrap();
        for rank in 0..2 {
            let error = begin(&store, rank).unwrap_err();
            assert!(matches!(error, Error::MalformedRecord { .. }), "{error}");
        }
    }

    /// Returns the claim of a process of this machine that was killed.
    fn of_a_dead_process(attempt: i64) -> Claim {
        let mut child = Command::new("sleep").arg("600").spawn().unwrap();
        let (pid, start_time) = (child.id(), start_time(child.id()).unwrap());
        child.kill().unwrap();
        child.wait().unwrap();
        Claim { attempt, pid, start_time, ..Claim::of_this_thread().unwrap() }
    }

    /// Joins as two ranks, of which the first one is `before` and waits for the other.
    fn join_after(store: &MemoryStore, before: Rank) {
        let join = |rank| {
            let options = GroupOptions::default().with_timeout(Duration::from_secs(20));
            ProcessGroup::from_store(Arc::new(store.clone()), rank, 2, options)
        };
        std::thread::scope(|scope| {
            let first = scope.spawn(move || join(before).map(drop));
            store.wait(&[&format!("default/1/default/place/{before}")], 400 * SHORT).unwrap();
            join(1 - before).unwrap();
            first.join().unwrap().unwrap();
        });
    }

    #[test]
    fn rank_killed_after_its_claim_and_started_again_joins_with_the_others() {
        let store = MemoryStore::new();
        store.set("default/tried/1", &of_a_dead_process(1).to_json()).unwrap();
        join_after(&store, 0);
    }

    #[test]
    fn rank_0_killed_after_its_claim_and_started_again_joins_with_the_others() {
        let store = MemoryStore::new();
        assert_eq!(store.add("default/attempts", 1).unwrap(), 1);
        store.set("default/open", &of_a_dead_process(1).to_json()).unwrap();
        join_after(&store, 1);
    }

    /// Whether that process still runs cannot be known.
    #[test]
    fn a_timeout_names_a_process_on_another_machine_with_this_rank() {
        let store = MemoryStore::new();
        let attempt = begin(&store, 0).unwrap();
        store.set("default/tried/1", &on_another_machine(1).to_json()).unwrap();
        let error = begin(&store, 1).unwrap_err();
        let Error::Timeout { op, missing, .. } = &error else { panic!("{error}") };
        assert!(op.contains("pid 7 on host node7 has joined as rank 1 before"), "{op}");
        assert_eq!(*missing, [0, 2]);

        store.set("default/open", &on_another_machine(2).to_json()).unwrap();
        let joined: Result<()> = attempt.close(&store, Err(error));
        let error = joined.unwrap_err().to_string();
        assert!(error.contains("rank 0 was started twice: pid 7 on host node7"), "{error}");
        assert!(store.check(&["default/open"]).unwrap(), "the other's attempt stays open");
        begin(&store, 1).unwrap();
    }
}
