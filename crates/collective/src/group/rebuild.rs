//! Rebuilds a group from its surviving ranks after a failure.
//!
//! The survivors agree through the store, which all of them can still reach. Each epoch has a roll
//! call: every survivor writes its answer, with the ranks it knows to be dead. Once every other
//! rank has answered or is known dead, or the grace period is over, the first rank that detects
//! this writes the roster (the list of members) with a `compare_set`; the first roster is valid for
//! all. The ranks on it join a group of the next epoch; all others are excluded permanently.
//!
//! Invariant: all ranks that read the roster of an epoch read the same one, and a rank takes part
//! in the roll call of an epoch only if it was on every earlier roster. So at most one group
//! continues the job, even if ranks disagree on which ranks are dead.
//!
//! Ranks in this file are those of the group at epoch 0, which do not change.

use std::collections::{BTreeMap, BTreeSet};
use std::time::{Duration, Instant};

use serde::de::DeserializeOwned;

use super::membership::Membership;
use crate::store::{Store, deadline};
use crate::{Error, ProcessGroup, Rank, Result};

/// Poll interval for answers while waiting for a roster.
const TICK: Duration = Duration::from_millis(20);
/// Timeout for reading a key that exists.
const PRESENT: Duration = Duration::from_secs(10);

/// This rank's knowledge of a group and those rebuilt from it.
#[derive(Debug)]
pub(crate) struct Lineage {
    /// Name of the group at epoch 0.
    name: String,
    /// Epoch of the last decided roll call.
    epoch: u64,
    /// Epoch of the last group that was joined.
    current: u64,
    /// The last roster.
    members: Vec<Rank>,
    dead: BTreeSet<Rank>,
}

impl Lineage {
    pub(crate) fn new(name: &str, members: Vec<Rank>) -> Self {
        Self { name: name.into(), epoch: 0, current: 0, members, dead: BTreeSet::new() }
    }
}

impl ProcessGroup {
    /// Makes a new group of the surviving ranks, after any failure.
    ///
    /// Every survivor must call it on the failed group, whether or not it has seen the failure
    /// itself. It first aborts this group on all ranks, as [`abort`](Self::abort) does, so that
    /// ranks that still use it get an error and can call it too; called on a healthy group by all
    /// ranks it makes a fresh one. This group stays unusable.
    ///
    /// Blocks until all ranks that are not known to have died ([`Error::PeerDied`], as seen by any
    /// survivor) have called it, or until `grace` has passed since the first call, and then until
    /// the new group is complete, each step of which has the group's timeout. Ranks that come later
    /// are excluded, so `grace` should exceed the group's timeout: until then a rank may still be
    /// waiting for a dead one. The new group has this one's options, the next [`epoch`], the epoch
    /// in its name, and the ranks in their old order, renumbered from 0; see
    /// [`parent_ranks`](Self::parent_ranks). It may have any size down to 1: a job that needs more
    /// ranks must check [`world_size`](Self::world_size). Subgroups must be rebuilt separately or
    /// split again.
    ///
    /// If it fails, because another rank died meanwhile or the store did not answer, call it again;
    /// the death is known then, and the epoch counts attempts.
    ///
    /// [`epoch`]: Self::epoch
    ///
    /// # Errors
    ///
    /// [`Error::LeftBehind`] if the other ranks rebuilt the group without this one.
    /// [`Error::Rendezvous`], with the store's address, if the store does not answer: a store in a
    /// rank's process ends with it, one in the launcher does not; with a peer's address if
    /// connecting to the peer fails. [`Error::PeerDied`], [`Error::Timeout`] or [`Error::Aborted`],
    /// with ranks of the new group, if a rank called this and then did not join.
    /// [`Error::MalformedRecord`] if a rank's record cannot be parsed. [`Error::Unsupported`] for a
    /// group of [`from_backend`](Self::from_backend); [`Error::InvalidArgument`] if this group has
    /// been rebuilt already, or in a fork.
    ///
    /// # Examples
    ///
    /// ```
    /// # use std::time::Duration;
    /// use collective::{ProcessGroup, ReduceOp, Result};
    ///
    /// fn train(group: &ProcessGroup) -> Result<()> {
    ///     let mut x = [1.0_f32];
    ///     group.all_reduce(&mut x, ReduceOp::Sum)?;
    ///     assert_eq!(x, [group.world_size() as f32]);
    ///     Ok(())
    /// }
    /// # let groups = ProcessGroup::threads(3, Duration::from_secs(10))?;
    /// # std::thread::scope(|scope| {
    /// #     for mut group in groups.into_iter().skip(1) {
    /// #         scope.spawn(move || -> Result<()> {
    /// while let Err(error) = train(&group) {
    ///     eprintln!("{error}");
    ///     group = group.rebuild(Duration::from_millis(200))?;
    /// }
    /// #             assert_eq!((group.epoch(), group.parent_ranks()), (1, &[1, 2][..]));
    /// #             Ok(())
    /// #         });
    /// #     }
    /// # });
    /// # Ok::<(), collective::Error>(())
    /// ```
    #[doc(alias = "shrink_group")]
    #[doc(alias = "MPI_Comm_shrink")]
    #[doc(alias = "ncclCommShrink")]
    pub fn rebuild(&self, grace: Duration) -> Result<Self> {
        let origin = self.origin("rebuild")?;
        let Membership { first_ranks, epoch, lineage, .. } = &*self.membership;
        let mut lineage = lineage.lock();
        if *epoch != lineage.current {
            let text = format!("{} is at epoch {} already", lineage.name, lineage.current);
            return Err(Error::InvalidArgument(format!("rebuild of epoch {epoch}: {text}")));
        }
        self.backend.abort(&format!("rank {} rebuilds the group", self.rank()));
        // The group has failed by now; the barrier returns its first failure.
        match self.barrier() {
            Err(error @ Error::InvalidArgument(_)) => return Err(error),
            Err(error) => lineage.dead.extend(dead_rank(&error).map(|rank| first_ranks[rank])),
            Ok(()) => {}
        }

        let own = first_ranks[self.rank()];
        if lineage.members.contains(&own) {
            let next = lineage.epoch + 1;
            let prefix = format!("{}/epoch{next}", lineage.name);
            let Lineage { members, dead, .. } = &*lineage;
            let roll = RollCall { store: &*origin.store, prefix, candidates: members, own };
            let roster = roll.decide(dead, deadline(grace)).map_err(store_gone)?;
            lineage.epoch = next;
            lineage.members = roster;
        }
        let old_rank = |first: &Rank| first_ranks.iter().position(|rank| rank == first);
        // Each roster is a subset of the one before, and the first is this group.
        let ranks: Vec<Rank> = lineage.members.iter().filter_map(old_rank).collect();
        let Some(rank) = ranks.iter().position(|&rank| rank == self.rank()) else {
            let Lineage { name, epoch, .. } = &*lineage;
            return Err(Error::LeftBehind { group: name.clone(), epoch: *epoch, members: ranks });
        };
        let name = format!("{}/epoch{}", lineage.name, lineage.epoch);
        let options = self.membership.options.clone().with_name(name);
        let backend = origin.join(rank, ranks.len(), &options, Ok(None)).map_err(|error| {
            let dead = dead_rank(&error).and_then(|rank| lineage.members.get(rank).copied());
            lineage.dead.extend(dead);
            match error {
                // The address is a peer's, not the store's.
                Error::Rendezvous { .. } => error,
                error => store_gone(error),
            }
        })?;
        lineage.current = lineage.epoch;
        Ok(Self::new(backend, self.membership.next(options, lineage.epoch, ranks)))
    }
}

/// The roll call of one epoch.
#[derive(Debug)]
struct RollCall<'a> {
    store: &'a dyn Store,
    prefix: String,
    /// Ranks that may be on the roster, in order.
    candidates: &'a [Rank],
    own: Rank,
}

impl RollCall<'_> {
    /// Writes this rank's answer, and blocks until there is a roster.
    fn decide(&self, dead: &BTreeSet<Rank>, deadline: Instant) -> Result<Vec<Rank>> {
        let roster = format!("{}/roll/roster", self.prefix);
        self.store.set(&self.answer(self.own), &to_json(dead))?;
        let mut here: BTreeMap<Rank, BTreeSet<Rank>> = BTreeMap::new();
        loop {
            // The time is read first, so that an answer written before the deadline counts.
            let left = deadline.saturating_duration_since(Instant::now());
            if self.store.check(&[&roster])? {
                return self.check(self.read(&roster)?);
            }
            for &rank in self.candidates {
                let answer = self.answer(rank);
                if !here.contains_key(&rank) && self.store.check(&[&answer])? {
                    here.insert(rank, self.read(&answer)?);
                }
            }
            let dead: BTreeSet<Rank> = here.values().flatten().copied().collect();
            let settled = |rank: &Rank| here.contains_key(rank) || dead.contains(rank);
            if left.is_zero() || self.candidates.iter().all(settled) {
                let own: Vec<Rank> = here.into_keys().collect();
                let first = self.store.compare_set(&roster, b"", &to_json(&own))?;
                return self.check(from_json(&roster, &first)?);
            }
            match self.store.wait(&[&roster], left.min(TICK)) {
                Ok(()) | Err(Error::KeyTimeout { .. }) => {}
                Err(error) => return Err(error),
            }
        }
    }

    fn answer(&self, rank: Rank) -> String {
        format!("{}/roll/{rank}", self.prefix)
    }

    fn read<T: DeserializeOwned>(&self, key: &str) -> Result<T> {
        from_json(key, &self.store.get(key, PRESENT)?)
    }

    /// Checks that a roster is a non-empty, strictly ascending subset of the candidates.
    fn check(&self, roster: Vec<Rank>) -> Result<Vec<Rank>> {
        let known = roster.iter().all(|rank| self.candidates.contains(rank));
        if roster.is_empty() || !known || !roster.is_sorted_by(|a, b| a < b) {
            return Err(unreadable(&self.prefix));
        }
        Ok(roster)
    }
}

/// Returns the dead rank that caused the error, as a rank of the failed group.
fn dead_rank(error: &Error) -> Option<Rank> {
    match error {
        Error::PeerDied { rank, .. } => Some(*rank),
        Error::Poisoned(cause) => dead_rank(cause),
        _ => None,
    }
}

/// Converts a store's error to one that says how to keep the store alive.
fn store_gone(error: Error) -> Error {
    let (addr, reason) = match error {
        Error::Store { store, reason, during } => (store, format!("{during}: {reason}")),
        Error::Rendezvous { addr, reason } => (addr, reason),
        other => return other,
    };
    let reason = format!(
        "the store that survivors meet at does not answer ({reason}); if it ran in a rank that \
         died, restart the job; a store in the launcher (TORCHELASTIC_USE_AGENT_STORE=True) \
         outlives the ranks"
    );
    Error::Rendezvous { addr, reason }
}

fn to_json<T: serde::Serialize>(value: &T) -> Vec<u8> {
    serde_json::to_vec(value).expect("ranks are plain numbers")
}

fn from_json<T: DeserializeOwned>(key: &str, json: &[u8]) -> Result<T> {
    serde_json::from_slice(json).map_err(|_| unreadable(key))
}

fn unreadable(key: &str) -> Error {
    Error::MalformedRecord { record: "a rebuild record".into(), key: key.into() }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use super::*;
    use crate::backend::transport;
    use crate::store::tests::LateStore;
    use crate::{GroupOptions, MemoryStore};

    #[test]
    fn a_peer_that_does_not_answer_is_not_reported_as_the_store() {
        let connect = |store: &_, rank, world_size, options: &GroupOptions| {
            if options.name.contains("epoch") {
                let [addr, reason] = ["peer:1", "refused"].map(String::from);
                return Err(Error::Rendezvous { addr, reason });
            }
            transport::join(store, rank, world_size, options)
        };
        let store = Arc::new(MemoryStore::new());
        let options = GroupOptions::default();
        let group = ProcessGroup::from_store_with(store, 0, 1, options, Arc::new(connect)).unwrap();
        let error = group.rebuild(Duration::ZERO).unwrap_err();
        assert_eq!(error.to_string(), "rendezvous at peer:1: refused");
    }

    fn roll<'a>(store: &'a dyn Store, candidates: &'a [Rank], own: Rank) -> RollCall<'a> {
        RollCall { store, prefix: "g/epoch1".into(), candidates, own }
    }

    #[test]
    fn all_ranks_get_the_same_roster_if_some_are_late() {
        for seed in 0..300_u64 {
            let (store, candidates) = (Arc::new(MemoryStore::new()), [0, 2, 3, 7]);
            let ranks: Vec<_> = candidates
                .into_iter()
                .map(|own| {
                    let store = Arc::clone(&store);
                    let random = (seed + 1).wrapping_mul(own as u64 + 1).wrapping_mul(0x9e37_79b9);
                    let pause = move |part: u64| Duration::from_micros(random / part % 400);
                    std::thread::spawn(move || {
                        std::thread::sleep(pause(7));
                        let (roll, deadline) = (roll(&*store, &candidates, own), pause(11));
                        roll.decide(&BTreeSet::new(), Instant::now() + deadline).unwrap()
                    })
                })
                .collect();
            let rosters: Vec<_> = ranks.into_iter().map(|rank| rank.join().unwrap()).collect();
            assert!(rosters.iter().all(|roster| *roster == rosters[0]), "{seed}: {rosters:?}");
        }
    }

    #[test]
    fn the_first_roster_is_valid_for_all_and_a_malformed_one_is_an_error() {
        let decide = |roster| {
            let store = LateStore(MemoryStore::new(), roster);
            roll(&store, &[0, 1, 2], 1).decide(&BTreeSet::new(), Instant::now())
        };
        assert_eq!(decide("[0,2]").unwrap(), [0, 2]);
        for roster in ["[]", "[2,0]", "[1,1]", "[0,7]", "[-1]", "no list"] {
            let error = decide(roster).unwrap_err();
            assert!(matches!(error, Error::MalformedRecord { .. }), "{roster}: {error}");
        }
    }

    #[test]
    fn ranks_known_dead_by_any_rank_are_not_waited_for() {
        let (store, candidates) = (Arc::new(MemoryStore::new()), [0, 1, 2, 3]);
        let ranks: Vec<_> = [(0, 1), (2, 3)]
            .into_iter()
            .map(|(own, dead)| {
                let store = Arc::clone(&store);
                std::thread::spawn(move || {
                    let never = deadline(Duration::from_secs(3600));
                    roll(&*store, &candidates, own).decide(&BTreeSet::from([dead]), never).unwrap()
                })
            })
            .collect();
        assert!(ranks.into_iter().all(|rank| rank.join().unwrap() == [0, 2]));
    }
}
