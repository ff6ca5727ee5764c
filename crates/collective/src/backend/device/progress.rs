//! Diagnosis of an operation that does not complete: which ranks' streams have not reached it, and
//! which ranks called a different one.
//!
//! Nothing is written to the store while a group works. A rank whose operation has timed out aborts
//! the host side with the text [`DIAGNOSING`]. Every rank then writes its [`Progress`] to the
//! store. The rank that aborted reads all of them and writes a [`RankFailure`], which the others
//! read. So all ranks together make a number of requests that is linear in the number of ranks. A
//! rank that does not write its progress in time counts as one that has enqueued nothing.

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::Duration;

use serde::{Deserialize, Serialize};

use crate::backend::device_memory::DeviceStep;
use crate::op::Fingerprint;
use crate::store::Store;
use crate::{BufferLocation, Error, OpDesc, Rank, Result, Verb};

/// Number of calls of a list that are reported; a difference in a later call is not detected.
const REPORTED: usize = 4;
/// Maximum number of lists in a record.
const KEPT: usize = 16;
/// Why the host side is aborted before a diagnosis.
pub(super) const DIAGNOSING: &str =
    "an operation on device memory has not completed; the errors of device operations say why";

/// How long a diagnosis waits for the progress of all ranks; longer in large groups, because all
/// ranks use one store.
pub(super) fn diagnosis_time(world: usize) -> Duration {
    2 * Duration::from_millis(1000.max(world as u64))
}

/// How far a rank's streams are.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Progress {
    /// Number of lists of all ranks that this rank has enqueued.
    pub(super) enqueued: u64,
    /// Those that their streams have not reached, by sequence number.
    pub(super) waiting: Vec<u64>,
    /// The last of those that their streams have reached.
    lists: VecDeque<List>,
    /// Peers of the pending lists that consist of messages and that their streams have reached.
    pub(super) messages: Vec<Rank>,
}

/// Why a rank has failed the group.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct RankFailure {
    pub(super) reason: FailureReason,
    /// Text of that rank's error.
    pub(super) text: String,
}

/// Calls that a rank has enqueued together.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct List {
    pub(super) seq: u64,
    /// The number of calls, then the fingerprints of the first ones.
    pub(super) words: [u64; Self::WORDS],
}

impl List {
    pub(super) const WORDS: usize = 1 + REPORTED * Fingerprint::WORDS;

    pub(super) fn new(seq: u64, ops: &[OpDesc]) -> Self {
        let mut words = [0; Self::WORDS];
        words[0] = ops.len() as u64;
        let (chunks, _) = words[1..].as_chunks_mut();
        for (chunk, op) in chunks.iter_mut().zip(ops) {
            *chunk = op.fingerprint(seq, BufferLocation::Private).words();
        }
        Self { seq, words }
    }

    /// Returns the first field in which they differ.
    pub(super) fn difference(&self, other: &Self) -> Option<&'static str> {
        let mut pairs = self.fingerprints().zip(other.fingerprints());
        let differs = pairs.find_map(|(mine, theirs)| mine.difference(&theirs));
        differs.or_else(|| (self.words[0] != other.words[0]).then_some("calls"))
    }

    fn fingerprints(&self) -> impl Iterator<Item = Fingerprint> {
        let (chunks, _) = self.words[1..].as_chunks();
        let count = usize::try_from(self.words[0]).unwrap_or(usize::MAX);
        chunks.iter().take(count).map(|&words| Fingerprint::from_words(self.seq, words))
    }

    /// Formats the calls for error texts.
    pub(super) fn text(&self) -> String {
        let calls: Vec<String> = self.fingerprints().map(|call| call.to_string()).collect();
        let more = self.words[0].saturating_sub(calls.len() as u64);
        let calls = calls.join(" and ");
        if more > 0 { format!("{calls} and {more} more calls") } else { calls }
    }
}

impl Progress {
    /// Records that a stream has reached a list.
    pub(super) fn begin(&mut self, list: &List) {
        if self.lists.len() == KEPT {
            self.lists.pop_front();
        }
        self.lists.push_back(list.clone());
    }
}

/// Which ranks take part in a list.
#[derive(Clone, Debug)]
pub(super) enum Participants {
    /// All ranks; they compare the list.
    All(List),
    /// This rank and these peers, which exchange messages.
    Peers(Vec<Rank>),
}

impl Participants {
    /// Returns the participants of list number `seq`.
    pub(super) fn new(seq: u64, ops: &[OpDesc], steps: &[DeviceStep]) -> Self {
        if ops.iter().any(|op| op.verb != Verb::Batch) {
            return Self::All(List::new(seq, ops));
        }
        let peers = steps.iter().filter_map(|step| match step {
            DeviceStep::Send { peer, .. } | DeviceStep::Receive { peer, .. } => Some(*peer),
            DeviceStep::Run { .. } => None,
        });
        let mut peers: Vec<Rank> = peers.collect();
        peers.sort_unstable();
        peers.dedup();
        Self::Peers(peers)
    }
}

/// Why an operation timed out or failed.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) enum FailureReason {
    /// These ranks' streams have not reached the operation.
    Missing(Vec<Rank>),
    /// Ranks called different operations: the field that differs, and the calls by rank.
    Mismatch(String, Vec<(Rank, String)>),
    /// The streams of all ranks have reached it.
    NoneMissing,
    /// The store does not respond, for this reason.
    Unknown(String),
}

impl FailureReason {
    /// Returns whether it names ranks, but does not report that `rank` is missing.
    pub(super) fn is_about_others(&self, rank: Rank) -> bool {
        match self {
            Self::Missing(missing) => !missing.contains(&rank),
            Self::Mismatch(..) => true,
            Self::NoneMissing | Self::Unknown(_) => false,
        }
    }

    /// Returns the error for operation `op`, which has lasted for `waited`.
    pub(super) fn into_error(self, backend: &'static str, op: String, waited: Duration) -> Error {
        let text = match self {
            Self::Missing(missing) => return Error::Timeout { op, waited, missing },
            Self::Mismatch(field, by_rank) => {
                let known = ["verb", "dtype", "op", "root", "count", "calls"];
                let field = known.into_iter().find(|known| *known == field).unwrap_or("verb");
                return Error::Mismatch { op, field, by_rank };
            }
            Self::NoneMissing => {
                "the streams of all ranks have reached it, so the ranks cannot reach one another; \
                 check the network between the devices"
                    .into()
            }
            Self::Unknown(reason) => format!("cannot tell which ranks are missing: {reason}"),
        };
        let text = format!("not completed after {waited:?}; {text}");
        Error::Backend { backend, during: op, name: "timed out".into(), code: 0, text }
    }
}

/// The records of a group's ranks in the store.
#[derive(Debug)]
pub(super) struct Records {
    pub(super) store: Arc<dyn Store>,
    pub(super) prefix: String,
    pub(super) rank: Rank,
    pub(super) world: usize,
}

impl Records {
    fn key(&self, what: &str, rank: Rank) -> String {
        format!("{}/{what}/{rank}", self.prefix)
    }

    fn set(&self, what: &str, record: &impl Serialize) -> Result<()> {
        let json = serde_json::to_vec(record).expect("plain numbers and strings");
        self.store.set(&self.key(what, self.rank), &json)
    }

    /// Writes this rank's progress, waits for that of the others, and compares it with a list of
    /// this rank that has not completed.
    pub(super) fn diagnose(&self, own: &Progress, participants: &Participants) -> FailureReason {
        let read_all = || {
            self.set("progress", own)?;
            let keys: Vec<_> = (0..self.world).map(|rank| self.key("progress", rank)).collect();
            let keys: Vec<_> = keys.iter().map(String::as_str).collect();
            self.store.try_wait(&keys, diagnosis_time(self.world))?;
            self.store.read(&keys)
        };
        let parse = |record: &Vec<u8>| serde_json::from_slice(record).unwrap_or_default();
        match read_all() {
            Ok(all) => compare(self.rank, participants, &all.iter().map(parse).collect::<Vec<_>>()),
            Err(error) => FailureReason::Unknown(error.to_string()),
        }
    }

    /// Writes why this rank fails the group.
    pub(super) fn publish_failure(&self, failure: &RankFailure) -> Result<()> {
        self.set("failure", failure)
    }

    /// Writes this rank's progress, and waits until rank `by` has written why it fails the group.
    pub(super) fn failure_of(&self, by: Rank, own: &Progress) -> Option<RankFailure> {
        self.set("progress", own).ok()?;
        let record = self.store.get(&self.key("failure", by), 2 * diagnosis_time(self.world));
        serde_json::from_slice(&record.ok()?).ok()
    }
}

/// Compares a list of rank `own` with the progress of all ranks.
fn compare(own: Rank, participants: &Participants, all: &[Progress]) -> FailureReason {
    if let Participants::All(list) = participants {
        let call = |(rank, progress): (Rank, &Progress)| {
            let theirs = progress.lists.iter().find(|other| other.seq == list.seq).cloned();
            Some((rank, if rank == own { list.clone() } else { theirs? }))
        };
        let calls: Vec<_> = all.iter().enumerate().filter_map(call).collect();
        if let Some(field) = calls.iter().find_map(|(_, theirs)| list.difference(theirs)) {
            let by_rank = calls.iter().map(|(rank, list)| (*rank, list.text())).collect();
            return FailureReason::Mismatch(field.into(), by_rank);
        }
    }
    let is_missing = |&(rank, progress): &(Rank, &Progress)| match participants {
        _ if rank == own => false,
        Participants::All(list) => {
            progress.enqueued <= list.seq || progress.waiting.contains(&list.seq)
        }
        Participants::Peers(ranks) => ranks.contains(&rank) && !progress.messages.contains(&own),
    };
    let missing = all.iter().enumerate().filter(is_missing);
    let missing: Vec<Rank> = missing.map(|(rank, _)| rank).collect();
    match missing.is_empty() {
        true => FailureReason::NoneMissing,
        false => FailureReason::Missing(missing),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::store::tests::CountingStore;
    use crate::{DType, MemoryStore, ReduceOp};

    fn list(seq: u64, count: usize, calls: usize) -> List {
        let op = Some(ReduceOp::Sum);
        let op = OpDesc { verb: Verb::AllReduce, dtype: DType::F32, op, root: None, count };
        List::new(seq, &vec![op; calls])
    }

    fn after(lists: &[List]) -> Progress {
        let mut progress = Progress::default();
        lists.iter().for_each(|list| progress.begin(list));
        progress.enqueued = lists.last().map_or(0, |list| list.seq + 1);
        progress
    }

    #[test]
    fn missing_ranks_and_different_calls_are_named() {
        let participants = Participants::All(list(5, 10, 1));
        let there = after(&[list(5, 10, 1)]);
        let behind = after(&[list(4, 10, 1)]);
        let ahead = after(&(6..40).map(|seq| list(seq, 1, 1)).collect::<Vec<_>>());
        let compare = |all: [&Progress; 3]| compare(1, &participants, &all.map(Clone::clone));
        assert_eq!(compare([&there, &there, &behind]), FailureReason::Missing(vec![2]));
        assert_eq!(compare([&there, &there, &ahead]), FailureReason::NoneMissing);
        // Another stream has reached later lists.
        let blocked = Progress { waiting: vec![5], ..ahead };
        assert_eq!(compare([&there, &there, &blocked]), FailureReason::Missing(vec![2]));
        for (other, field) in [(list(5, 11, 1), "count"), (list(5, 10, 2), "calls")] {
            let found = compare([&after(&[other]), &there, &behind]);
            let FailureReason::Mismatch(differs, by_rank) = found else { panic!("{found:?}") };
            assert_eq!((&differs[..], by_rank.len()), (field, 2));
            assert_eq!(by_rank[1], (1, "all_reduce of 10 f32, sum".into()));
        }
    }

    #[test]
    fn a_peer_that_has_no_messages_with_this_rank_is_missing() {
        let with_me = Progress { messages: vec![1], ..Progress::default() };
        let none = Progress::default();
        let all = [with_me.clone(), with_me, none.clone(), none];
        let participants = Participants::Peers(vec![0, 2]);
        assert_eq!(compare(1, &participants, &all), FailureReason::Missing(vec![2]));
    }

    #[test]
    fn a_record_is_read_as_it_was_written() {
        for calls in [1, 4, 7] {
            let progress = after(&[list(9, 3, calls)]);
            let json = serde_json::to_vec(&progress).unwrap();
            assert_eq!(serde_json::from_slice::<Progress>(&json).unwrap(), progress);
            assert_eq!(list(9, 3, calls).difference(&list(9, 3, calls)), None);
        }
        assert!(list(9, 3, 6).text().ends_with("and 2 more calls"));
    }

    #[test]
    fn failures_and_missing_ranks_are_read_from_the_store() {
        let store: Arc<dyn Store> = Arc::new(MemoryStore::new());
        let records =
            |rank| Records { store: Arc::clone(&store), prefix: "p".into(), rank, world: 3 };
        let failure = RankFailure { reason: FailureReason::Missing(vec![2]), text: "late".into() };
        let there = after(&[list(0, 3, 1)]);
        std::thread::scope(|scope| {
            scope.spawn(|| assert_eq!(records(1).failure_of(0, &there), Some(failure.clone())));
            let found = records(0).diagnose(&there, &Participants::All(list(0, 3, 1)));
            assert_eq!(found, failure.reason);
            records(0).publish_failure(&failure).unwrap();
        });
    }

    /// Even if every rank diagnoses, as happens if their operations time out at once.
    #[test]
    fn store_requests_are_linear_in_the_number_of_ranks() {
        let requests = |world: usize| {
            let store = Arc::new(CountingStore::default());
            std::thread::scope(|scope| {
                for rank in 0..world {
                    let (store, prefix): (Arc<dyn Store>, _) = (store.clone(), "p".into());
                    let records = Records { store, prefix, rank, world };
                    scope.spawn(move || {
                        let there = after(&[list(0, 3, 1)]);
                        let found = records.diagnose(&there, &Participants::All(list(0, 3, 1)));
                        assert_eq!(found, FailureReason::NoneMissing);
                    });
                }
            });
            store.requests()
        };
        assert_eq!((requests(2), requests(20)), (4, 40));
    }
}
