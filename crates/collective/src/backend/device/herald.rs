//! What ranks tell one another through the store, off every operation's way: how far their streams
//! have come, and why the group has failed.
//!
//! A thread of its own talks to the store, because a store that does not answer must not hold up
//! whoever watches over operations. It writes this rank's [`Progress`] whenever that has changed, but
//! no more often than every [`interval`]; so once time is over for an operation, an *inquest* waits
//! as long as others may need to write theirs, reads what all have written, and knows whose streams
//! have not reached the operation, and who called something else.

use std::collections::VecDeque;
use std::sync::{Arc, mpsc};
use std::time::Duration;

use parking_lot::Mutex;
use serde::{Deserialize, Serialize};

use crate::op::Fingerprint;
use crate::store::Store;
use crate::{Error, OpDesc, Place, Rank, Result};

/// Calls of a list that are told; a difference in a later one is not found.
const TOLD: usize = 4;
/// Lists that are remembered.
const KEPT: usize = 16;
/// Requests that may wait for the thread.
const JOBS: usize = 8;
/// For reading a key that is there.
const PRESENT: Duration = Duration::from_secs(1);
/// How long the thread may take to end before it is left to itself.
const END: Duration = Duration::from_secs(1);

/// How often a rank writes its progress; less often among many, who share one store.
pub(super) fn interval(world: usize) -> Duration {
    Duration::from_millis(250.max(world as u64))
}

/// How long an inquest takes.
pub(super) fn inquest_time(world: usize) -> Duration {
    2 * interval(world)
}

/// How far a rank's streams have come.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Progress {
    /// Lists of all ranks that a stream has reached.
    begun: u64,
    /// The last of them.
    lists: VecDeque<List>,
    /// With whom messages of lists of messages alone are under way.
    messages: Vec<Rank>,
}

/// What a rank called, as far as it is told.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct List {
    seq: u64,
    calls: usize,
    /// Fingerprints of the first calls.
    words: Vec<[u64; Fingerprint::WORDS]>,
}

impl List {
    pub(super) fn new(seq: u64, ops: &[OpDesc]) -> Self {
        let told = ops.iter().take(TOLD);
        let words = told.map(|op| op.fingerprint(seq, Place::Own).words()).collect();
        Self { seq, calls: ops.len(), words }
    }

    /// As so many words, to be compared at once.
    pub(super) fn to_words(&self) -> [u64; 1 + TOLD * Fingerprint::WORDS] {
        let mut all = [0; 1 + TOLD * Fingerprint::WORDS];
        all[0] = self.calls as u64;
        for (place, word) in all[1..].iter_mut().zip(self.words.iter().flatten()) {
            *place = *word;
        }
        all
    }

    pub(super) fn from_words(seq: u64, all: &[u64]) -> Self {
        let calls = usize::try_from(all[0]).unwrap_or(usize::MAX);
        let (chunks, _) = all[1..].as_chunks();
        Self { seq, calls, words: chunks[..calls.min(TOLD)].to_vec() }
    }

    /// The first field in which they differ.
    pub(super) fn difference(&self, other: &Self) -> Option<&'static str> {
        let (mine, theirs) = (self.fingerprints(), other.fingerprints());
        let differs = mine.iter().zip(&theirs).find_map(|(a, b)| a.difference(b));
        differs.or_else(|| (self.calls != other.calls).then_some("calls"))
    }

    fn fingerprints(&self) -> Vec<Fingerprint> {
        self.words.iter().map(|&words| Fingerprint::from_words(self.seq, words)).collect()
    }

    /// As error texts have it.
    pub(super) fn text(&self) -> String {
        let told: Vec<String> = self.fingerprints().iter().map(ToString::to_string).collect();
        let more = self.calls.saturating_sub(told.len());
        let told = told.join(" and ");
        if more > 0 { format!("{told} and {more} more calls") } else { told }
    }
}

impl Progress {
    /// A stream has reached a list.
    pub(super) fn begin(&mut self, list: &List) {
        self.begun = self.begun.max(list.seq + 1);
        if self.lists.len() == KEPT {
            self.lists.pop_front();
        }
        self.lists.push_back(list.clone());
    }

    pub(super) fn set_messages(&mut self, peers: &[Rank]) {
        if self.messages != peers {
            self.messages = peers.to_vec();
        }
    }
}

/// What an inquest is about.
#[derive(Clone, Debug)]
pub(super) enum Case {
    /// A list of all ranks.
    All(List),
    /// Messages with these.
    Messages(Vec<Rank>),
}

/// What came out.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Finding {
    /// These ranks' streams have not reached the operation.
    Missing(Vec<Rank>),
    /// Ranks called different things.
    Differ(&'static str, Vec<(Rank, String)>),
    /// All are there.
    AllHere,
    /// The store does not answer.
    Unknown(String),
}

/// Why a group failed, as whoever saw it first tells it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) enum Verdict {
    /// Time was over, and these were missing.
    TimedOut(Vec<Rank>),
    /// Ranks called different things, by this field.
    Mismatch(String, Vec<(Rank, String)>),
}

#[derive(Debug)]
enum Job {
    Inquest(Case, mpsc::Sender<Finding>),
    Tell(Verdict, mpsc::Sender<()>),
    Ask(mpsc::Sender<Option<Verdict>>),
}

/// The thread that talks to the store; ends when dropped.
#[derive(Debug)]
pub(super) struct Herald {
    pub(super) progress: Arc<Mutex<Progress>>,
    jobs: Option<mpsc::SyncSender<Job>>,
    ended: Mutex<mpsc::Receiver<()>>,
}

/// What that thread has.
#[derive(Debug)]
struct Booth {
    store: Arc<dyn Store>,
    prefix: String,
    rank: Rank,
    world: usize,
    progress: Arc<Mutex<Progress>>,
    written: Option<Progress>,
}

impl Herald {
    /// Begins; writes this rank's first progress, so that a rank without is one that never came.
    pub(super) fn start(
        store: Arc<dyn Store>,
        prefix: String,
        rank: Rank,
        world: usize,
    ) -> Result<Self> {
        let progress = Arc::default();
        let keep = Arc::clone(&progress);
        let mut booth = Booth { store, prefix, rank, world, progress, written: None };
        booth.publish()?;
        let (jobs, todo) = mpsc::sync_channel(JOBS);
        let (over, ended) = mpsc::channel();
        let thread = std::thread::Builder::new().name("collective-tell".into());
        let spawned = thread.spawn(move || {
            booth.run(&todo);
            // Nobody listens any more if the end came too late.
            let _ = over.send(());
        });
        spawned
            .map_err(|error| Error::io("starting the thread that talks to the store", &error))?;
        Ok(Self { progress: keep, jobs: Some(jobs), ended: Mutex::new(ended) })
    }

    fn submit<R>(&self, job: impl FnOnce(mpsc::Sender<R>) -> Job) -> mpsc::Receiver<R> {
        let (reply, answer) = mpsc::channel();
        if let Some(jobs) = &self.jobs {
            // A thread that has too much to do answers nothing, as the receiver will see.
            drop(jobs.try_send(job(reply)));
        }
        answer
    }

    /// Begins an inquest.
    pub(super) fn inquire(&self, case: Case) -> mpsc::Receiver<Finding> {
        self.submit(|reply| Job::Inquest(case, reply))
    }

    /// Tells the peers why the group has failed, unless somebody has; waits a moment at most.
    pub(super) fn tell(&self, verdict: Verdict, patience: Duration) {
        let _ = self.submit(|reply| Job::Tell(verdict, reply)).recv_timeout(patience);
    }

    /// What somebody has told of the failure; waits a moment at most.
    pub(super) fn ask(&self, patience: Duration) -> Option<Verdict> {
        self.submit(Job::Ask).recv_timeout(patience).ok().flatten()
    }
}

impl Drop for Herald {
    fn drop(&mut self) {
        self.jobs = None;
        // A thread that waits for a store which does not answer ends when that gives up.
        let _ = self.ended.get_mut().recv_timeout(END);
    }
}

impl Booth {
    fn run(mut self, todo: &mpsc::Receiver<Job>) {
        let interval = interval(self.world);
        loop {
            // Who asked may be gone, here and below.
            match todo.recv_timeout(interval) {
                Err(mpsc::RecvTimeoutError::Disconnected) => return,
                // Whoever misses it finds out at an inquest.
                Err(mpsc::RecvTimeoutError::Timeout) => drop(self.publish()),
                Ok(Job::Inquest(case, reply)) => drop(reply.send(self.inquest(&case))),
                Ok(Job::Tell(verdict, reply)) => {
                    let json = serde_json::to_vec(&verdict).expect("plain numbers and strings");
                    drop(self.store.compare_set(&self.verdict(), b"", &json));
                    let _ = reply.send(());
                }
                Ok(Job::Ask(reply)) => drop(reply.send(self.told())),
            }
        }
    }

    fn key(&self, rank: Rank) -> String {
        format!("{}/progress/{rank}", self.prefix)
    }

    fn verdict(&self) -> String {
        format!("{}/verdict", self.prefix)
    }

    fn told(&self) -> Option<Verdict> {
        let key = self.verdict();
        let there = self.store.check(&[&key]).ok()?;
        let json = if there { self.store.get(&key, PRESENT).ok()? } else { return None };
        serde_json::from_slice(&json).ok()
    }

    fn publish(&mut self) -> Result<()> {
        let progress = self.progress.lock().clone();
        if self.written.as_ref() != Some(&progress) {
            let json = serde_json::to_vec(&progress).expect("plain numbers");
            self.store.set(&self.key(self.rank), &json)?;
            self.written = Some(progress);
        }
        Ok(())
    }

    fn inquest(&mut self, case: &Case) -> Finding {
        let read = |booth: &mut Self| {
            booth.publish()?;
            std::thread::sleep(inquest_time(booth.world));
            let peers = (0..booth.world).filter(|&peer| peer != booth.rank);
            peers.map(|peer| Ok((peer, booth.read(peer)?))).collect::<Result<Vec<_>>>()
        };
        match read(self) {
            Ok(progress) => judge(self.rank, case, &progress),
            Err(error) => Finding::Unknown(error.to_string()),
        }
    }

    /// A rank's progress; one that has written nothing, or something else, has made none.
    fn read(&self, rank: Rank) -> Result<Progress> {
        let key = self.key(rank);
        if !self.store.check(&[&key])? {
            return Ok(Progress::default());
        }
        Ok(serde_json::from_slice(&self.store.get(&key, PRESENT)?).unwrap_or_default())
    }
}

/// What the peers' progress says.
fn judge(own: Rank, case: &Case, progress: &[(Rank, Progress)]) -> Finding {
    let missing: Vec<Rank> = match case {
        Case::All(list) => {
            let mut by_rank = vec![(own, list.text())];
            let mut field = None;
            for (rank, progress) in progress {
                if let Some(theirs) = progress.lists.iter().find(|other| other.seq == list.seq) {
                    field = field.or_else(|| list.difference(theirs));
                    by_rank.push((*rank, theirs.text()));
                }
            }
            if let Some(field) = field {
                by_rank.sort_unstable();
                return Finding::Differ(field, by_rank);
            }
            let absent = progress.iter().filter(|(_, progress)| progress.begun <= list.seq);
            absent.map(|&(rank, _)| rank).collect()
        }
        Case::Messages(peers) => {
            let absent = progress.iter().filter(|(rank, progress)| {
                peers.contains(rank) && !progress.messages.contains(&own)
            });
            absent.map(|&(rank, _)| rank).collect()
        }
    };
    if missing.is_empty() { Finding::AllHere } else { Finding::Missing(missing) }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{DType, MemoryStore, ReduceOp, Verb};

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
    fn who_is_behind_is_missing_and_who_called_something_else_is_told() {
        let case = Case::All(list(5, 10, 1));
        let there = after(&[list(5, 10, 1)]);
        let behind = after(&[list(4, 10, 1)]);
        let ahead = after(&(6..40).map(|seq| list(seq, 1, 1)).collect::<Vec<_>>());
        let judge = |all: &[(Rank, &Progress)]| {
            let all: Vec<_> = all.iter().map(|&(rank, p)| (rank, p.clone())).collect();
            judge(1, &case, &all)
        };
        assert_eq!(judge(&[(0, &there), (2, &behind)]), Finding::Missing(vec![2]));
        assert_eq!(judge(&[(0, &there), (2, &ahead)]), Finding::AllHere);
        for (other, field) in [(list(5, 11, 1), "count"), (list(5, 10, 2), "calls")] {
            let told = judge(&[(0, &after(&[other])), (2, &behind)]);
            let Finding::Differ(found, by_rank) = told else { panic!("{told:?}") };
            assert_eq!((found, by_rank.len()), (field, 2));
            assert_eq!(by_rank[1], (1, "all_reduce of 10 f32, sum".into()));
        }
    }

    #[test]
    fn a_peer_that_has_no_messages_with_this_rank_is_missing() {
        let mut with_me = Progress::default();
        with_me.set_messages(&[1]);
        let all = [(0, with_me.clone()), (2, Progress::default()), (3, Progress::default())];
        let case = Case::Messages(vec![0, 2]);
        assert_eq!(judge(1, &case, &all), Finding::Missing(vec![2]));
    }

    #[test]
    fn words_come_back_as_they_were() {
        for calls in [1, 4, 7] {
            let list = list(9, 3, calls);
            assert_eq!(List::from_words(9, &list.to_words()), list);
            assert!(list.difference(&List::from_words(9, &list.to_words())).is_none());
        }
        assert!(list(9, 3, 6).text().ends_with("and 2 more calls"));
    }

    #[test]
    fn the_first_verdict_counts_and_an_inquest_reads_what_all_have_written() {
        let store: Arc<dyn Store> = Arc::new(MemoryStore::new());
        let start = |rank| Herald::start(Arc::clone(&store), "p".into(), rank, 3).unwrap();
        let (one, two) = (start(0), start(1));
        let patience = Duration::from_secs(10);
        assert_eq!(one.ask(patience), None);
        one.tell(Verdict::TimedOut(vec![2]), patience);
        two.tell(Verdict::TimedOut(vec![0]), patience);
        assert_eq!(two.ask(patience), Some(Verdict::TimedOut(vec![2])));

        one.progress.lock().begin(&list(0, 3, 1));
        let answer = one.inquire(Case::All(list(0, 3, 1)));
        two.progress.lock().begin(&list(0, 3, 1));
        assert_eq!(answer.recv_timeout(patience).unwrap(), Finding::Missing(vec![2]));
    }
}
