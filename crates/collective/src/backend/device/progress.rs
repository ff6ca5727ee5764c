//! Records that the ranks of a device group exchange through the store: how far their streams are, and why a rank has
//! failed the group.
//!
//! Each rank has one record in the store, a [`Progress`], written when it has changed and at most once every
//! [`interval`]. When an operation times out, [`diagnose_timeout`](Worker::diagnose_timeout) waits until every rank has
//! had time to write its record, reads all records, and finds the ranks whose streams have not reached the operation
//! and those that called a different one. A separate thread uses the store, because a store that does not respond must
//! not delay the watchdog.

use std::collections::VecDeque;
use std::sync::{Arc, mpsc};
use std::time::Duration;

use parking_lot::Mutex;
use serde::{Deserialize, Serialize};

use crate::device::DeviceStep;
use crate::op::Fingerprint;
use crate::store::Store;
use crate::{BufferLocation, Error, OpDesc, Rank, Result, Verb};

/// Number of calls of a list that are reported; a difference in a later call is not detected.
const REPORTED: usize = 4;
/// Maximum number of lists in a record.
const KEPT: usize = 16;
/// Capacity of the thread's request queue.
const REQUESTS: usize = 8;
/// Timeout for reading a key that exists.
const READ_TIMEOUT: Duration = Duration::from_secs(1);
/// How long [`ProgressReporter::delete_record`] waits for the store.
const DELETE_TIMEOUT: Duration = Duration::from_secs(1);

/// Interval at which a rank writes its record; longer in large groups, because all ranks use one store.
pub(super) fn interval(world: usize) -> Duration {
    Duration::from_millis(250.max(world as u64))
}

/// How long [`ProgressReporter::diagnose_timeout`] takes.
pub(super) fn diagnosis_time(world: usize) -> Duration {
    2 * interval(world)
}

/// How far a rank's streams are, and why it has failed the group.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Progress {
    /// Number of lists of all ranks that a stream has reached.
    begun: u64,
    /// The last of these lists.
    lists: VecDeque<List>,
    /// Peers of the pending lists that consist of messages.
    pub(super) messages: Vec<Rank>,
    failure: Option<FailureReason>,
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
        self.begun = self.begun.max(list.seq + 1);
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

type Request = Box<dyn FnOnce(&mut Worker) + Send>;

/// Handle of the thread that uses the store; dropping it ends the thread, after a request that the thread is executing.
#[derive(Debug)]
pub(super) struct ProgressReporter {
    pub(super) progress: Arc<Mutex<Progress>>,
    requests: mpsc::SyncSender<Request>,
}

/// The state of that thread.
#[derive(Debug)]
struct Worker {
    store: Arc<dyn Store>,
    prefix: String,
    rank: Rank,
    world: usize,
    progress: Arc<Mutex<Progress>>,
    written: Option<Progress>,
}

impl ProgressReporter {
    /// Writes this rank's first record and starts the thread. So a rank without a record has never started.
    pub(super) fn start(
        store: Arc<dyn Store>,
        prefix: String,
        rank: Rank,
        world: usize,
    ) -> Result<Self> {
        let progress = Arc::<Mutex<Progress>>::default();
        let shared = Arc::clone(&progress);
        let mut worker = Worker { store, prefix, rank, world, progress: shared, written: None };
        worker.publish()?;
        let (requests, received) = mpsc::sync_channel(REQUESTS);
        let thread = std::thread::Builder::new().name("collective-progress".into());
        let spawned = thread.spawn(move || worker.run(&received));
        spawned.map_err(|error| Error::io("starting the thread that reports progress", &error))?;
        Ok(Self { progress, requests })
    }

    /// Runs `call` on the thread. If the queue is full, drops `call`, which disconnects the receiver.
    fn request<R: Send + 'static>(
        &self,
        call: impl FnOnce(&mut Worker) -> R + Send + 'static,
    ) -> mpsc::Receiver<R> {
        let (reply, answer) = mpsc::channel();
        // The receiver may be gone when the answer comes.
        let request = move |worker: &mut Worker| drop(reply.send(call(worker)));
        drop(self.requests.try_send(Box::new(request)));
        answer
    }

    /// Starts the diagnosis of an operation that has not completed.
    pub(super) fn diagnose_timeout(
        &self,
        participants: Participants,
    ) -> mpsc::Receiver<FailureReason> {
        self.request(move |worker| worker.diagnose_timeout(&participants))
    }

    /// Writes why this rank fails the group. Blocks for at most `timeout`.
    pub(super) fn publish_failure(&self, reason: FailureReason, timeout: Duration) {
        self.progress.lock().failure = Some(reason);
        let _ = self.request(Worker::publish).recv_timeout(timeout);
    }

    /// Returns why `rank` has failed the group, if it has written a reason. Blocks for at most `timeout`.
    pub(super) fn failure_of(&self, rank: Rank, timeout: Duration) -> Option<FailureReason> {
        let record = self.request(move |worker| worker.read(rank));
        record.recv_timeout(timeout).ok()?.ok()?.failure
    }

    /// Deletes this rank's record, at the end of a group that has not failed: after a failure, peers may still read it.
    pub(super) fn delete_record(&self) {
        let deleted =
            self.request(|worker| drop(worker.store.delete_key(&worker.key(worker.rank))));
        let _ = deleted.recv_timeout(DELETE_TIMEOUT);
    }
}

impl Worker {
    fn run(mut self, requests: &mpsc::Receiver<Request>) {
        let interval = interval(self.world);
        loop {
            match requests.recv_timeout(interval) {
                Err(mpsc::RecvTimeoutError::Disconnected) => return,
                // The next diagnosis reports a failed write.
                Err(mpsc::RecvTimeoutError::Timeout) => drop(self.publish()),
                Ok(request) => request(&mut self),
            }
        }
    }

    fn key(&self, rank: Rank) -> String {
        format!("{}/progress/{rank}", self.prefix)
    }

    /// Writes this rank's record if it has changed.
    fn publish(&mut self) -> Result<()> {
        let progress = self.progress.lock().clone();
        if self.written.as_ref() != Some(&progress) {
            let json = serde_json::to_vec(&progress).expect("plain numbers and strings");
            self.store.set(&self.key(self.rank), &json)?;
            self.written = Some(progress);
        }
        Ok(())
    }

    /// Returns a rank's record; an empty one if there is none, or none of this format.
    fn read(&self, rank: Rank) -> Result<Progress> {
        let key = self.key(rank);
        if !self.store.check(&[&key])? {
            return Ok(Progress::default());
        }
        Ok(serde_json::from_slice(&self.store.get(&key, READ_TIMEOUT)?).unwrap_or_default())
    }

    fn diagnose_timeout(&mut self, participants: &Participants) -> FailureReason {
        let mut read_all = || {
            self.publish()?;
            std::thread::sleep(diagnosis_time(self.world));
            let peers = (0..self.world).filter(|&peer| peer != self.rank);
            peers.map(|peer| Ok((peer, self.read(peer)?))).collect::<Result<Vec<_>>>()
        };
        match read_all() {
            Ok(progress) => compare(self.rank, participants, &progress),
            Err(error) => FailureReason::Unknown(error.to_string()),
        }
    }
}

/// Compares a list of rank `own` with its peers' records.
fn compare(own: Rank, participants: &Participants, peers: &[(Rank, Progress)]) -> FailureReason {
    let is_missing = |rank: Rank, progress: &Progress| match participants {
        Participants::All(list) => progress.begun <= list.seq,
        Participants::Peers(ranks) => ranks.contains(&rank) && !progress.messages.contains(&own),
    };
    if let Participants::All(list) = participants {
        let mut by_rank = vec![(own, list.text())];
        let mut field = None;
        for (rank, progress) in peers {
            if let Some(theirs) = progress.lists.iter().find(|other| other.seq == list.seq) {
                field = field.or_else(|| list.difference(theirs));
                by_rank.push((*rank, theirs.text()));
            }
        }
        if let Some(field) = field {
            by_rank.sort_unstable();
            return FailureReason::Mismatch(field.into(), by_rank);
        }
    }
    let missing = peers.iter().filter(|(rank, progress)| is_missing(*rank, progress));
    let missing: Vec<Rank> = missing.map(|&(rank, _)| rank).collect();
    match missing.is_empty() {
        true => FailureReason::NoneMissing,
        false => FailureReason::Missing(missing),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{DType, MemoryStore, ReduceOp};

    fn list(seq: u64, count: usize, calls: usize) -> List {
        let op = Some(ReduceOp::Sum);
        let op = OpDesc { verb: Verb::AllReduce, dtype: DType::F32, op, root: None, count };
        List::new(seq, &vec![op; calls])
    }

    fn after(lists: &[List]) -> Progress {
        let mut progress = Progress::default();
        lists.iter().for_each(|list| progress.begin(list));
        progress
    }

    #[test]
    fn missing_ranks_and_different_calls_are_named() {
        let participants = Participants::All(list(5, 10, 1));
        let there = after(&[list(5, 10, 1)]);
        let behind = after(&[list(4, 10, 1)]);
        let ahead = after(&(6..40).map(|seq| list(seq, 1, 1)).collect::<Vec<_>>());
        let compare = |all: &[(Rank, &Progress)]| {
            let all: Vec<_> = all.iter().map(|&(rank, p)| (rank, p.clone())).collect();
            compare(1, &participants, &all)
        };
        assert_eq!(compare(&[(0, &there), (2, &behind)]), FailureReason::Missing(vec![2]));
        assert_eq!(compare(&[(0, &there), (2, &ahead)]), FailureReason::NoneMissing);
        for (other, field) in [(list(5, 11, 1), "count"), (list(5, 10, 2), "calls")] {
            let found = compare(&[(0, &after(&[other])), (2, &behind)]);
            let FailureReason::Mismatch(differs, by_rank) = found else { panic!("{found:?}") };
            assert_eq!((&differs[..], by_rank.len()), (field, 2));
            assert_eq!(by_rank[1], (1, "all_reduce of 10 f32, sum".into()));
        }
    }

    #[test]
    fn a_peer_that_has_no_messages_with_this_rank_is_missing() {
        let with_me = Progress { messages: vec![1], ..Progress::default() };
        let all = [(0, with_me.clone()), (2, Progress::default()), (3, Progress::default())];
        let participants = Participants::Peers(vec![0, 2]);
        assert_eq!(compare(1, &participants, &all), FailureReason::Missing(vec![2]));
    }

    #[test]
    fn a_record_is_read_as_it_was_written() {
        for calls in [1, 4, 7] {
            let mut progress = after(&[list(9, 3, calls)]);
            progress.failure = Some(FailureReason::Missing(vec![3]));
            let json = serde_json::to_vec(&progress).unwrap();
            assert_eq!(serde_json::from_slice::<Progress>(&json).unwrap(), progress);
            assert_eq!(list(9, 3, calls).difference(&list(9, 3, calls)), None);
        }
        assert!(list(9, 3, 6).text().ends_with("and 2 more calls"));
    }

    #[test]
    fn failures_and_missing_ranks_are_read_from_the_store() {
        let store: Arc<dyn Store> = Arc::new(MemoryStore::new());
        let start =
            |rank| ProgressReporter::start(Arc::clone(&store), "p".into(), rank, 3).unwrap();
        let (one, two) = (start(0), start(1));
        let timeout = Duration::from_secs(10);
        assert_eq!(two.failure_of(0, timeout), None);
        one.publish_failure(FailureReason::Missing(vec![2]), timeout);
        two.publish_failure(FailureReason::Missing(vec![0]), timeout);
        assert_eq!(two.failure_of(0, timeout), Some(FailureReason::Missing(vec![2])));

        one.progress.lock().begin(&list(0, 3, 1));
        let answer = one.diagnose_timeout(Participants::All(list(0, 3, 1)));
        two.progress.lock().begin(&list(0, 3, 1));
        assert_eq!(answer.recv_timeout(timeout).unwrap(), FailureReason::Missing(vec![2]));
    }
}
