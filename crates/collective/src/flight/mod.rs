//! The flight recorder: this rank's last calls, and how far each got.
//!
//! Every verb passes through it on the way to its backend. It keeps the last `CALLS` steps, is
//! always on, and takes a lock and reads a clock twice per step. At the group's first failure it
//! writes the record to a file, if a directory is set, and tells the launcher if a peer caused it.

mod clock;
#[doc(hidden)]
pub mod error_file;

use std::fmt;
use std::fs::{self, OpenOptions};
use std::hash::{DefaultHasher, Hash as _, Hasher as _};
use std::io::Write as _;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use parking_lot::Mutex;
use rustix::thread::gettid;
use serde::Serialize;
use tracing::{Span, error, trace_span};

use self::clock::Clock;
use crate::backend::{Backend, Transfer, TransferMemory, WaitPolicy};
use crate::{Error, GroupOptions, OpDesc, Rank, Result, Verb};

/// Number of steps kept.
const CALLS: usize = 64;
/// Maximum length of a group's name in a file's name, which may have 255 bytes in all.
const MAX_NAME: usize = 180;
/// Directory of the records, unless the group's options name one.
const DIR: &str = "COLLECTIVE_FLIGHT_DIR";

/// The last calls of one rank of a group, from
/// [`ProcessGroup::flight_record`](crate::ProcessGroup::flight_record).
///
/// `Display` prints one line per call; serialized as JSON it is the file described by
/// [`GroupOptions::with_flight_dir`].
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[non_exhaustive]
pub struct FlightRecord {
    /// The group's name.
    pub group: String,
    /// This rank.
    pub rank: Rank,
    /// Number of ranks.
    pub world_size: usize,
    /// The backend's name.
    pub backend: &'static str,
    /// This process's id.
    pub pid: u32,
    /// When this rank created the group, in microseconds since 1970, to align the records of
    /// several ranks.
    pub birth_us: u64,
    /// The last 64 calls, oldest first.
    pub calls: Vec<FlightCall>,
}

/// A call in a [`FlightRecord`]: one step of a verb. Verbs with blocks of different lengths have
/// several steps, the first called `counts`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[non_exhaustive]
pub struct FlightCall {
    /// Position among this rank's calls, from 0. Equal on all ranks that exchange no point-to-point
    /// messages.
    pub seq: u64,
    /// The call, as in error texts.
    pub call: String,
    /// Whether it ran on the communication thread or in a device stream.
    pub asynchronous: bool,
    /// The system's id of its thread.
    pub thread: u32,
    /// When it began to run (not when it was queued), in nanoseconds since the group was made.
    pub start_ns: u64,
    /// When it ended.
    pub end_ns: Option<u64>,
    /// How it ended.
    pub outcome: FlightOutcome,
}

/// How a [`FlightCall`] ended.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
#[non_exhaustive]
pub enum FlightOutcome {
    /// In progress.
    UnderWay,
    /// Succeeded.
    Done,
    /// Failed with this error.
    Failed(String),
}

impl fmt::Display for FlightRecord {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { group, rank, world_size, backend, pid, .. } = self;
        write!(f, "group {group}, rank {rank} of {world_size}, backend {backend}, pid {pid}")?;
        self.calls.iter().try_for_each(|call| write!(f, "\n{call}"))
    }
}

impl fmt::Display for FlightCall {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let start = Duration::from_nanos(self.start_ns);
        write!(f, "#{} +{start:?} thread {}", self.seq, self.thread)?;
        write!(f, "{}: {}: ", if self.asynchronous { " async" } else { "" }, self.call)?;
        match &self.outcome {
            FlightOutcome::UnderWay => return write!(f, "under way"),
            FlightOutcome::Done => write!(f, "done")?,
            FlightOutcome::Failed(error) => write!(f, "failed: {error}")?,
        }
        let took = self.end_ns.unwrap_or(self.start_ns).saturating_sub(self.start_ns);
        write!(f, " after {:?}", Duration::from_nanos(took))
    }
}

/// Records the calls of one rank of a group.
#[derive(Debug)]
pub(crate) struct Recorder {
    /// The record without its calls.
    record: FlightRecord,
    dir: Option<PathBuf>,
    clock: Clock,
    ring: Mutex<Ring>,
    /// When each call in the ring ended.
    ends: [End; CALLS],
    dumped: AtomicBool,
}

/// When call `seq` ended, in ticks; 0 if it has not. Written without the ring's lock: if 64 later
/// calls start at that moment, the time is attributed to one of them. The record is for reading
/// only, so this is acceptable.
#[derive(Debug, Default)]
struct End {
    seq: AtomicU64,
    ticks: AtomicU64,
}

#[derive(Debug)]
struct Ring {
    /// Sequence number of the next call.
    next: u64,
    /// Call `seq` is at index `seq % CALLS`.
    calls: Vec<RecordedCall>,
}

/// Summary of a call's messages.
#[derive(Clone, Copy, Debug)]
struct Messages {
    sends: usize,
    receives: usize,
    first: Rank,
}

/// A recorded call; recording formats and allocates nothing.
#[derive(Clone, Debug)]
struct RecordedCall {
    seq: u64,
    op: OpDesc,
    messages: Option<Messages>,
    /// Number of further calls that began together with it.
    more: usize,
    policy: WaitPolicy,
    thread: u32,
    /// In ticks.
    start: u64,
    error: Option<Box<Error>>,
}

impl Recorder {
    pub(crate) fn new(backend: &dyn Backend, options: &GroupOptions) -> Self {
        let birth = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
        let record = FlightRecord {
            group: options.name.clone(),
            rank: backend.rank(),
            world_size: backend.world_size(),
            backend: backend.name(),
            pid: std::process::id(),
            birth_us: u64::try_from(birth.as_micros()).unwrap_or(u64::MAX),
            calls: Vec::new(),
        };
        Self {
            record,
            dir: options.flight_dir.clone(),
            clock: Clock::new(),
            ring: Mutex::new(Ring { next: 0, calls: Vec::with_capacity(CALLS) }),
            ends: std::array::from_fn(|_| End::default()),
            dumped: AtomicBool::new(false),
        }
    }

    /// Runs one step of a verb and records its outcome.
    pub(crate) fn record<T>(
        &self,
        op: &OpDesc,
        transfers: &[Transfer],
        policy: WaitPolicy,
        run: impl FnOnce() -> Result<T>,
    ) -> Result<T> {
        let seq = self.begin(op, Messages::of(transfers), 0, policy);
        let result = self.span(op).in_scope(run);
        self.end(seq, result.as_ref().err());
        result
    }

    /// Makes the span of a call.
    pub(crate) fn span(&self, op: &OpDesc) -> Span {
        let FlightRecord { group, rank, .. } = &self.record;
        trace_span!(target: "collective", "call", group = group.as_str(), rank, op = %op)
    }

    /// Records `calls` device operations that begin together as one call, described by the first;
    /// returns the sequence number to pass to [`end`](Self::end).
    pub(crate) fn begin_device(&self, op: &OpDesc, calls: usize) -> u64 {
        self.begin(op, None, calls - 1, WaitPolicy::Sleep)
    }

    /// Records the end of a call, and its error if it failed.
    pub(crate) fn end(&self, seq: u64, error: Option<&Error>) {
        // A call followed by 64 others is no longer in the ring.
        let end = &self.ends[index(seq)];
        if end.seq.load(Ordering::Relaxed) == seq {
            end.ticks.store(self.clock.ticks(), Ordering::Relaxed);
        }
        if let Some(error) = error {
            let mut ring = self.ring.lock();
            if let Some(call) = ring.calls.get_mut(index(seq)).filter(|call| call.seq == seq) {
                call.error = Some(Box::new(error.clone()));
            }
            drop(ring);
            self.failed(error);
        }
    }

    fn begin(
        &self,
        op: &OpDesc,
        messages: Option<Messages>,
        more: usize,
        policy: WaitPolicy,
    ) -> u64 {
        let (op, thread) = (*op, THREAD.with(|id| *id));
        let mut ring = self.ring.lock();
        let seq = ring.next;
        ring.next += 1;
        let start = self.clock.ticks();
        self.ends[index(seq)].ticks.store(0, Ordering::Relaxed);
        self.ends[index(seq)].seq.store(seq, Ordering::Relaxed);
        let call = RecordedCall { seq, op, messages, more, policy, thread, start, error: None };
        match ring.calls.get_mut(index(seq)) {
            Some(old) => *old = call,
            None => ring.calls.push(call),
        }
        seq
    }

    /// Writes the record, if this is the group's first failure.
    pub(crate) fn failed(&self, error: &Error) {
        let is_refused = matches!(error, Error::InvalidArgument(_) | Error::Unsupported { .. });
        if is_refused || self.dumped.swap(true, Ordering::Relaxed) {
            return;
        }
        let FlightRecord { group, rank, .. } = &self.record;
        error!(
            name: "group_failed", target: "collective",
            group = group.as_str(), rank, %error, "the group has failed",
        );
        // A rank that has aborted the group itself fails by its own error.
        let is_own = matches!(error, Error::Aborted { by, .. } if by == rank);
        if error.is_caused_by_peer() && !is_own {
            error_file::record(&error.to_string(), error_file::Cause::Peer);
        }
        let dir = self.dir.clone().or_else(|| Some(std::env::var_os(DIR)?.into()));
        if let Some(dir) = dir.filter(|dir| !dir.as_os_str().is_empty()) {
            // A failed write must not hide the group's failure.
            drop(write(&dir, &self.read()));
        }
    }

    pub(crate) fn read(&self) -> FlightRecord {
        let ring = self.ring.lock();
        let mut kept = ring.calls.clone();
        drop(ring);
        kept.sort_by_key(|call| call.seq);
        let since_birth = self.clock.since_birth();
        let public = |call: &RecordedCall| {
            let end = self.ends[index(call.seq)].ticks.load(Ordering::Relaxed);
            call.public(end, |at| u64::try_from(since_birth(at).as_nanos()).unwrap_or(u64::MAX))
        };
        let calls = kept.iter().map(public).collect();
        // A fork has its own id.
        FlightRecord { pid: std::process::id(), calls, ..self.record.clone() }
    }
}

impl Messages {
    fn of(transfers: &[Transfer]) -> Option<Self> {
        let first = transfers.first()?.peer;
        let is_send = |transfer: &&Transfer| matches!(transfer.memory, TransferMemory::Send(_));
        let sends = transfers.iter().filter(is_send).count();
        Some(Self { sends, receives: transfers.len() - sends, first })
    }
}

impl RecordedCall {
    /// Converts to the public form; `end` is 0 or in ticks.
    fn public(&self, end: u64, nanoseconds: impl Fn(u64) -> u64) -> FlightCall {
        let end = (end != 0).then_some(end);
        let outcome = match (&self.error, end) {
            (Some(error), _) => FlightOutcome::Failed(error.to_string()),
            (None, Some(_)) => FlightOutcome::Done,
            (None, None) => FlightOutcome::UnderWay,
        };
        FlightCall {
            seq: self.seq,
            call: self.text(),
            asynchronous: self.policy == WaitPolicy::Sleep,
            thread: self.thread,
            start_ns: nanoseconds(self.start),
            end_ns: end.map(nanoseconds),
            outcome,
        }
    }

    fn text(&self) -> String {
        // Each message of a batch has its own count; the descriptor has none.
        let text = match self.op.verb {
            Verb::Batch => Verb::Batch.to_string(),
            _ => self.op.to_string(),
        };
        if self.more > 0 {
            return format!("{text}, and {} more calls", self.more);
        }
        match self.messages {
            Some(Messages { sends, receives, first }) => {
                format!("{text}, {sends} sends and {receives} receives, first with rank {first}")
            }
            None => text,
        }
    }
}

/// Index of call `seq` in the ring.
fn index(seq: u64) -> usize {
    (seq % CALLS as u64) as usize
}

thread_local! {
    /// The system's id of this thread, the last component of `<pid>/task/<tid>`.
    static THREAD: u32 = gettid().as_raw_nonzero().get().cast_unsigned();
}

/// Writes a record atomically: a reader never finds a partial file.
fn write(dir: &Path, record: &FlightRecord) -> std::io::Result<()> {
    let group = file_name(&record.group);
    let path = dir.join(format!("{group}-rank{}-{}.json", record.rank, record.pid));
    fs::create_dir_all(dir)?;
    let new = path.with_extension("new");
    // Others may write to the directory, and the name is predictable. A file or link of that name
    // is removed, never written through.
    drop(fs::remove_file(&new));
    let mut file = OpenOptions::new().write(true).create_new(true).open(&new)?;
    file.write_all(&serde_json::to_vec_pretty(record)?)?;
    fs::rename(new, path)
}

/// Converts a group's name to a part of a file's name, different for every group: other characters
/// are percent-encoded, and a long name ends with its hash.
fn file_name(group: &str) -> String {
    let mut name = String::new();
    for byte in group.bytes() {
        match byte {
            b'-' | b'_' | b'.' => name.push(byte.into()),
            _ if byte.is_ascii_alphanumeric() => name.push(byte.into()),
            _ => name += &format!("%{byte:02X}"),
        }
    }
    if name.len() > MAX_NAME {
        let mut hasher = DefaultHasher::new();
        group.hash(&mut hasher);
        name.truncate(MAX_NAME);
        name += &format!("%{:016x}", hasher.finish());
    }
    name
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use super::*;
    use crate::{GroupOptions, ProcessGroup, ReduceOp};

    fn single(options: &GroupOptions) -> ProcessGroup {
        let options = options.clone().with_timeout(Duration::from_secs(10));
        let mut hosts = crate::backend::host::threads::group(1, &options).unwrap();
        ProcessGroup::from_backend_with(Arc::new(hosts.remove(0)), &options)
    }

    #[test]
    fn the_last_calls_are_kept_in_order() {
        let group = single(&GroupOptions::default());
        assert_eq!(group.flight_record().calls, []);
        for count in 0..CALLS + 3 {
            group.all_reduce(&mut vec![1_i32; count], ReduceOp::Sum).unwrap();
        }
        let work = group.all_reduce_async(vec![1_u8; 9], ReduceOp::Max).unwrap();
        work.wait().unwrap();
        let record = group.flight_record();
        assert_eq!(record.calls.len(), CALLS);
        for (i, call) in record.calls[..CALLS - 1].iter().enumerate() {
            let seq = i + 4;
            assert_eq!(call.seq, seq as u64);
            assert_eq!(call.call, format!("all_reduce of {seq} i32, sum"));
            assert_eq!(call.outcome, FlightOutcome::Done);
            assert!(call.end_ns.unwrap() >= call.start_ns && !call.asynchronous);
            assert_eq!(call.thread, record.calls[0].thread);
        }
        let last = record.calls.last().unwrap();
        assert_eq!(last.call, "all_reduce of 9 u8, max");
        assert!(last.asynchronous && last.thread != record.calls[0].thread);
        let text = record.to_string();
        assert!(text.starts_with("group default, rank 0 of 1, backend host"), "{text}");
        assert!(text.contains(" async: all_reduce of 9 u8, max: done after "), "{text}");
    }

    #[test]
    fn a_call_in_progress_is_visible_from_another_thread() {
        let mut groups = ProcessGroup::threads(2, Duration::from_secs(10)).unwrap();
        let (one, two) = (groups.pop().unwrap(), groups.pop().unwrap());
        std::thread::scope(|scope| {
            scope.spawn(|| one.barrier().unwrap());
            let call = loop {
                if let Some(call) = one.flight_record().calls.pop() {
                    break call;
                }
                std::thread::yield_now();
            };
            assert_eq!((&*call.call, call.end_ns), ("barrier", None));
            assert_eq!(call.outcome, FlightOutcome::UnderWay);
            two.barrier().unwrap();
        });
        assert_eq!(one.flight_record().calls[0].outcome, FlightOutcome::Done);
    }

    #[test]
    fn the_first_failure_is_written_and_no_other() {
        let dir = std::env::temp_dir().join(format!("collective-flight-{}", std::process::id()));
        let name = "a/b ü";
        let options = GroupOptions::default().with_name(name).with_flight_dir(&dir);
        let group = single(&options);
        let other = crate::backend::host::threads::group(1, &options).unwrap().remove(0);
        let recorder = Recorder::new(&other, &options);
        group.barrier().unwrap();
        group.broadcast(&mut [0_u8], 7).unwrap_err();
        let unsupported = Error::Unsupported { backend: "nccl", what: "captured streams".into() };
        recorder.failed(&unsupported);
        assert!(!dir.exists(), "a caller's mistake does not fail the group");
        group.abort("enough");
        group.barrier().unwrap_err();
        let path = dir.join(format!("a%2Fb%20%C3%BC-rank0-{}.json", std::process::id()));
        let json: serde_json::Value = serde_json::from_slice(&fs::read(&path).unwrap()).unwrap();
        assert_eq!(json["group"], name);
        assert_eq!(json["calls"][0]["outcome"], "done");
        assert_eq!(json["calls"][1]["call"], "barrier");
        let error = json["calls"][1]["outcome"]["failed"].as_str().unwrap();
        assert_eq!(error, "the group was aborted by rank 0: enough");
        fs::remove_dir_all(&dir).unwrap();
        group.barrier().unwrap_err();
        assert!(!dir.exists());
    }

    /// In a directory that others may write to, such as `/tmp`.
    #[test]
    fn a_record_does_not_follow_a_link() {
        let dir = std::env::temp_dir().join(format!("collective-link-{}", std::process::id()));
        fs::create_dir_all(&dir).unwrap();
        let name = |end: &str| dir.join(format!("default-rank0-{}{end}", std::process::id()));
        let theirs = dir.join("theirs");
        fs::write(&theirs, "precious").unwrap();
        for end in [".new", ".json", ".json.new"] {
            std::os::unix::fs::symlink(&theirs, name(end)).unwrap();
        }
        let group = single(&GroupOptions::default().with_flight_dir(&dir));
        group.abort("enough");
        group.barrier().unwrap_err();
        assert_eq!(fs::read_to_string(&theirs).unwrap(), "precious");
        assert!(fs::symlink_metadata(name(".json")).unwrap().is_file());
        assert!(fs::read_to_string(name(".json")).unwrap().contains("enough"));
        fs::remove_dir_all(&dir).unwrap();
    }

    #[test]
    fn groups_with_similar_names_write_different_files() {
        let dir = std::env::temp_dir().join(format!("collective-names-{}", std::process::id()));
        let names = ["a/b", "a_b", "a%2Fb", "a b", &"long/".repeat(100), &"long_".repeat(100)];
        for name in names {
            let group = single(&GroupOptions::default().with_name(name).with_flight_dir(&dir));
            group.abort("enough");
            group.barrier().unwrap_err();
        }
        let read = |file: std::io::Result<fs::DirEntry>| {
            let json = fs::read(file.unwrap().path()).unwrap();
            let record: serde_json::Value = serde_json::from_slice(&json).unwrap();
            record["group"].as_str().unwrap().to_owned()
        };
        let mut found: Vec<_> = fs::read_dir(&dir).unwrap().map(read).collect();
        found.sort_unstable();
        let mut wanted = names.map(str::to_owned);
        wanted.sort_unstable();
        assert_eq!(found, wanted);
        fs::remove_dir_all(&dir).unwrap();
    }

    /// The directory is below a regular file, so the write fails; the group's error is still
    /// returned.
    #[test]
    fn a_failed_write_does_not_hide_the_failure() {
        let file =
            std::env::temp_dir().join(format!("collective-test-file-{}", std::process::id()));
        fs::write(&file, "").unwrap();
        let group = single(&GroupOptions::default().with_flight_dir(file.join("dir")));
        group.abort("enough");
        let error = group.barrier().unwrap_err();
        fs::remove_file(&file).unwrap();
        assert!(matches!(error, Error::Aborted { by: 0, .. }), "{error}");
    }
}
