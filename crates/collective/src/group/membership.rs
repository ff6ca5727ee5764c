//! A group's origin, its ranks in other groups, and its subgroups.
//!
//! A group keeps its *origin*: the store its ranks met at, and a function that connects a backend
//! of the same kind. So [`split`](ProcessGroup::split) works over every backend: the ranks exchange
//! colours and keys over the existing group, and each new group is joined through the store, under
//! its own name. It shares nothing with the parent: a subgroup has its own history, failures and
//! communication thread.
//!
//! Invariant: names within one origin are never used twice. They nest: `default/split0/3` is colour
//! 3 of the first split of `default`, and `default/epoch1` is its first
//! [`rebuild`](ProcessGroup::rebuild).

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use parking_lot::Mutex;

use super::attempt::Attempt;
use super::object::all_gather_object;
use super::rebuild::Lineage;
use crate::backend::rendezvous::check_rank;
use crate::backend::{Connect, Seed};
use crate::store::{PrefixStore, Store};
use crate::{Backend, Error, GroupOptions, ProcessGroup, Rank, Result};

/// Sent instead of a colour: this rank joins none of the new groups.
const NO_COLOR: u64 = u64::MAX;

/// Makes further groups of the same kind.
#[derive(Clone)]
pub(crate) struct Origin {
    /// The part of the store that belongs to this group and the groups made from it.
    pub(crate) store: Arc<dyn Store>,
    pub(crate) connect: Arc<Connect>,
}

impl Origin {
    /// Connects this rank's backend for a group whose name is unused. If that fails on one rank, or
    /// if `seed` is an error, the ranks that still wait get an error at once.
    pub(crate) fn join(
        &self,
        rank: Rank,
        world_size: usize,
        options: &GroupOptions,
        seed: Result<Option<Seed>>,
    ) -> Result<Arc<dyn Backend>> {
        let watched = PrefixStore::watched(&options.name, Arc::clone(&self.store), world_size);
        let store: Arc<dyn Store> = Arc::new(watched.clone());
        let backend = seed.and_then(|seed| {
            let options = GroupOptions { seed, ..options.clone() };
            (self.connect)(&store, rank, world_size, &options)
        });
        backend.inspect_err(|error| watched.abort(rank, error))
    }
}

/// How a group was made.
pub(crate) struct Membership {
    /// Options, with the group's own name.
    pub(crate) options: GroupOptions,
    /// `None` for a group made with `from_backend`.
    pub(crate) origin: Option<Origin>,
    parent_ranks: Vec<Rank>,
    pub(crate) global_ranks: Vec<Rank>,
    /// Number of splits so far, the same on all ranks.
    splits: AtomicU64,
    pub(crate) epoch: u64,
    /// This group's ranks, as ranks of the group at epoch 0.
    pub(crate) first_ranks: Vec<Rank>,
    pub(crate) lineage: Arc<Mutex<Lineage>>,
}

impl Membership {
    /// Membership in a group that is not made from another.
    pub(crate) fn first(world_size: usize, options: GroupOptions, origin: Option<Origin>) -> Self {
        let ranks: Vec<Rank> = (0..world_size).collect();
        Self::subgroup(options, origin, ranks.clone(), ranks)
    }

    fn subgroup(
        options: GroupOptions,
        origin: Option<Origin>,
        parent_ranks: Vec<Rank>,
        global_ranks: Vec<Rank>,
    ) -> Self {
        let first_ranks: Vec<Rank> = (0..parent_ranks.len()).collect();
        let lineage = Arc::new(Mutex::new(Lineage::new(&options.name, first_ranks.clone())));
        let splits = AtomicU64::new(0);
        Self { options, origin, parent_ranks, global_ranks, splits, epoch: 0, first_ranks, lineage }
    }

    /// Membership in the next epoch's group, made of the given ranks of this one.
    pub(crate) fn next(&self, options: GroupOptions, epoch: u64, ranks: Vec<Rank>) -> Self {
        Self {
            options,
            origin: self.origin.clone(),
            global_ranks: ranks.iter().map(|&rank| self.global_ranks[rank]).collect(),
            first_ranks: ranks.iter().map(|&rank| self.first_ranks[rank]).collect(),
            parent_ranks: ranks,
            splits: AtomicU64::new(0),
            epoch,
            lineage: Arc::clone(&self.lineage),
        }
    }
}

impl ProcessGroup {
    /// Makes a group over the backend that `connect` returns; [`split`](Self::split) and
    /// [`rebuild`](Self::rebuild) call `connect` again for the groups they make.
    ///
    /// Every rank must call it, as [`from_store`](Self::from_store). Blocks for rank 0 for at most
    /// the options' timeout, and then until `connect` returns; both anew if a rank on this machine
    /// dies meanwhile and is started again. After that only rank 0 uses the store, so rank 0 may
    /// end, and the store with it.
    ///
    /// # Errors
    ///
    /// The errors of `connect` and of the store; [`Error::Timeout`] if rank 0 does not join;
    /// [`Error::Aborted`] with the rank and its error if `connect` fails on another rank;
    /// [`Error::DuplicateRank`] if another process or thread joins as this rank. After an error the
    /// ranks may call it again.
    pub fn from_store_with(
        store: Arc<dyn Store>,
        rank: Rank,
        world_size: usize,
        options: GroupOptions,
        connect: Arc<Connect>,
    ) -> Result<Self> {
        check_rank(rank, world_size)?;
        // A prefix per attempt: this group and those made from it share no keys with an earlier
        // attempt.
        let (prefix, backend) = loop {
            let attempt = Attempt::begin(&*store, rank, world_size, &options)?;
            let prefix = format!("{}/{}", options.name, attempt.number());
            let watched = PrefixStore::watched(&prefix, Arc::clone(&store), world_size);
            let view: Arc<dyn Store> = Arc::new(watched.clone());
            let backend = connect(&view, rank, world_size, &options);
            let backend = backend.map_err(|error| watched.failed(rank, error));
            match attempt.close(&*store, backend) {
                // Once for each process that is started again.
                Err(Error::Aborted { .. }) if attempt.is_replaced(&*store) => {}
                joined => break (prefix, joined?),
            }
        };
        let own = PrefixStore::new(prefix, Arc::clone(&store));
        let origin = Some(Origin { store: Arc::new(own), connect });
        Ok(Self::new(backend, Membership::first(world_size, options, origin)))
    }

    /// Makes subgroups: the ranks that give the same colour form one, ordered by key, and by rank
    /// in this group where keys are equal. A rank without a colour joins none and gets `None`.
    ///
    /// Every rank must call it. Blocks until this rank's subgroup is complete. One
    /// [`all_gather`](Self::all_gather) of 16 bytes, then the new group is joined through the store
    /// that this one was made with, which must still exist. The subgroup has this group's timeout
    /// and options, its own ranks from 0 (see [`parent_ranks`](Self::parent_ranks)), and shares
    /// nothing with this group: either can fail without the other, and operations on both may be in
    /// flight at once. Over NCCL, its communicator is split from this group's by `ncclCommSplit`.
    ///
    /// # Errors
    ///
    /// [`Error::Unsupported`] for a group of [`from_backend`](Self::from_backend). An error of the
    /// exchange poisons this group, as in any verb. An error while joining affects the new group
    /// only, and names its ranks: [`Error::Timeout`], [`Error::PeerDied`], the store's, or
    /// [`Error::Aborted`] if joining failed on another rank. A failed `ncclCommSplit` also fails
    /// this group, on all ranks, because it is a collective of this group's communicator.
    ///
    /// # Examples
    ///
    /// ```
    /// # use std::time::Duration;
    /// use collective::{ProcessGroup, ReduceOp};
    ///
    /// let groups = ProcessGroup::threads(4, Duration::from_secs(10))?;
    /// std::thread::scope(|scope| {
    ///     for group in groups {
    ///         scope.spawn(move || {
    ///             let half = group.split(Some(group.rank() as u32 / 2), 0).expect("all are here");
    ///             let half = half.expect("it gave a colour");
    ///             let mut x = [group.rank() as f32];
    ///             half.all_reduce(&mut x, ReduceOp::Sum).expect("both are here");
    ///             assert_eq!(x, [if group.rank() < 2 { 1.0 } else { 5.0 }]);
    ///         });
    ///     }
    /// });
    /// # Ok::<(), collective::Error>(())
    /// ```
    #[doc(alias = "MPI_Comm_split")]
    #[doc(alias = "ncclCommSplit")]
    pub fn split(&self, color: Option<u32>, key: i64) -> Result<Option<Self>> {
        let origin = self.origin("split")?;
        let own = [color.map_or(NO_COLOR, u64::from), key.cast_unsigned()];
        let mut all = vec![0; own.len() * self.world_size()];
        self.all_gather(&mut all, &own)?;
        // Relaxed: the caller orders its calls.
        let number = self.membership.splits.fetch_add(1, Ordering::Relaxed);
        let rows = all.chunks_exact(own.len()).enumerate();
        let mut members: Vec<(i64, Rank)> = rows
            .filter(|(_, row)| row[0] == own[0])
            .map(|(rank, row)| (row[1].cast_signed(), rank))
            .collect();
        members.sort_unstable();
        let parent_ranks: Vec<Rank> = members.into_iter().map(|(_, rank)| rank).collect();
        let rank = parent_ranks.iter().position(|&rank| rank == self.rank());
        let seed = self.backend.split_seed(color.map(|_| &*parent_ranks));
        let (Some(color), Some(rank)) = (color, rank) else { return seed.map(|_| None) };

        let Membership { options, global_ranks, .. } = &*self.membership;
        let name = format!("{}/split{number}/{color}", options.name);
        let options = options.clone().with_name(name);
        let backend = origin.join(rank, parent_ranks.len(), &options, seed)?;
        let global_ranks = parent_ranks.iter().map(|&rank| global_ranks[rank]).collect();
        let origin = Some(origin.clone());
        let membership = Membership::subgroup(options, origin, parent_ranks, global_ranks);
        Ok(Some(Self::new(backend, membership)))
    }

    /// Makes one subgroup from a list: `ranks[i]` becomes rank `i` of the new group; ranks not in
    /// the list get `None`.
    ///
    /// Every rank of this group must call it with the same list, which is compared first with two
    /// more collectives.
    ///
    /// # Errors
    ///
    /// [`Error::InvalidArgument`] on every rank, with this group still usable, if the lists differ,
    /// are empty, or contain a duplicate or a rank that is not in the group; else as
    /// [`split`](Self::split).
    #[doc(alias = "new_group")]
    pub fn subgroup(&self, ranks: &[Rank]) -> Result<Option<Self>> {
        self.origin("subgroup")?;
        let lists: Vec<Vec<Rank>> = all_gather_object(self, &ranks.to_vec())?;
        check_lists(&lists)?;
        match (0..).zip(ranks).find(|&(_, &rank)| rank == self.rank()) {
            Some((at, _)) => self.split(Some(0), at),
            None => self.split(None, 0),
        }
    }

    /// For each rank of this group, its rank in the group that this one was made from, by
    /// [`split`](Self::split) or [`rebuild`](Self::rebuild); its own rank if it was made from none.
    #[doc(alias = "previous_ranks")]
    pub fn parent_ranks(&self) -> &[Rank] {
        &self.membership.parent_ranks
    }

    /// For each rank of this group, its rank in the first ancestor, the group that was made from no
    /// other.
    #[doc(alias = "get_process_group_ranks")]
    pub fn global_ranks(&self) -> &[Rank] {
        &self.membership.global_ranks
    }

    /// Number of times this group was [rebuilt](Self::rebuild).
    pub fn epoch(&self) -> u64 {
        self.membership.epoch
    }

    /// Returns the name of the backend that carries the data, for example `host`.
    #[doc(alias = "get_backend")]
    pub fn backend_name(&self) -> &'static str {
        self.backend.name()
    }

    /// Returns the reason why this backend was chosen, for a log.
    pub fn backend_reason(&self) -> &str {
        self.backend.reason()
    }

    /// Returns the origin, or [`Error::Unsupported`] if there is none.
    pub(crate) fn origin(&self, what: &str) -> Result<&Origin> {
        self.membership.origin.as_ref().ok_or_else(|| Error::Unsupported {
            backend: self.backend.name(),
            what: format!(
                "{what} of a group made with from_backend, which has no store to meet at; \
                 make it with ProcessGroup::from_store_with"
            ),
        })
    }
}

/// Checks the member lists of all ranks; the result is the same on every rank.
fn check_lists(lists: &[Vec<Rank>]) -> Result<()> {
    let refuse = |text: String| Err(Error::InvalidArgument(format!("subgroup: {text}")));
    let list = &lists[0];
    if let Some(rank) = lists.iter().position(|other| other != list) {
        let other = &lists[rank];
        return refuse(format!("rank 0 gives the members {list:?}, rank {rank} gives {other:?}"));
    }
    if list.is_empty() {
        return refuse("the member list is empty; to join no group, call split(None, 0)".into());
    }
    if let Some(rank) = list.iter().find(|&&rank| rank >= lists.len()) {
        return refuse(format!("rank {rank} is not below world size {}", lists.len()));
    }
    let twice = list.iter().enumerate().find(|&(at, rank)| list[..at].contains(rank));
    twice.map_or(Ok(()), |(_, rank)| refuse(format!("rank {rank} is listed twice")))
}
