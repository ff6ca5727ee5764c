//! `ChromeTrace`: a `tracing` subscriber that writes Chrome's trace format, for
//! <https://ui.perfetto.dev> and `chrome://tracing`.
//!
//! The process of an event is the rank. A span is a slice of each thread that enters it. A span
//! that is entered several times or closed on another thread, such as a gradient bucket, is also
//! an asynchronous slice, from when it was opened until it was closed. Times are microseconds
//! since 1970, so that the files of several ranks can be merged.
//!
//! Invariant: the file and `]` are valid JSON whenever the process ends, also after a write to a
//! full disk has failed.

use std::collections::HashMap;
use std::fmt::{self, Debug};
use std::fs::File;
use std::io::Read;
use std::path::Path;
use std::sync::atomic::{AtomicU64, Ordering};
use std::thread::{self, ThreadId};
use std::time::{Instant, SystemTime, UNIX_EPOCH};

use parking_lot::Mutex;
use serde_json::{Map, Value};
use tracing::field::{Field, Visit};
use tracing::span::{Attributes, Id, Record};
use tracing::{Event, Level, Metadata, Subscriber};
use tracing_core::span::Current;

use crate::appender::Appender;
use crate::{JsonLine, Result};

/// Number of events that are written, which bounds the file: about 150 MB.
const MAX_EVENTS: usize = 1 << 20;

/// Writes the spans and events of one rank to a file.
///
/// A program installs one for the process or a scope, with
/// `tracing::subscriber::set_global_default` or `with_default`; `runner` does so for `trace =
/// PATH`. The file is complete when it is dropped. `jq -s add trace*.json` merges the files of the
/// ranks of a machine.
///
/// It writes all spans and events of level `DEBUG` and above, and the calls of `collective`.
pub struct ChromeTrace {
    rank: usize,
    next_id: AtomicU64,
    /// A moment, and its time in microseconds since 1970.
    start: (Instant, f64),
    state: Mutex<State>,
}

struct State {
    file: Appender,
    /// Number of events that may still be written.
    left: usize,
    failed: Result<()>,
    open: HashMap<u64, OpenSpan>,
    threads: HashMap<ThreadId, Thread>,
}

struct OpenSpan {
    metadata: &'static Metadata<'static>,
    args: Map<String, Value>,
    handles: usize,
    opened: f64,
    /// Thread that opened it.
    thread: usize,
    /// How often it was entered.
    entered: usize,
}

/// Beginning of a trace.
const START: &[u8] = b"[\n{\"ph\": \"M\"";

/// A thread, by its number in the trace.
struct Thread {
    number: usize,
    /// The spans that it is in, and when it entered them.
    inside: Vec<(u64, f64)>,
}

impl ChromeTrace {
    /// Returns the reason why a trace cannot be at this path: the directory is missing, or another
    /// file is there, which it would replace.
    #[must_use]
    pub fn refusal(path: &Path) -> Option<String> {
        let text = path.display();
        let dir = path.parent().filter(|dir| !dir.as_os_str().is_empty());
        if dir.is_some_and(|dir| !dir.is_dir()) {
            return Some(format!("{text}: there is no such directory"));
        }
        if !path.is_file() {
            return None;
        }
        let mut start = Vec::new();
        let read =
            File::open(path).and_then(|f| f.take(START.len() as u64).read_to_end(&mut start));
        let is_trace = read.is_ok() && (start.is_empty() || start == START);
        (!is_trace).then(|| format!("{text}: exists and is no trace: choose another path"))
    }

    /// Creates the file, in place of an earlier one.
    ///
    /// # Errors
    ///
    /// If it cannot be created.
    pub fn create(path: &Path, rank: usize) -> Result<Self> {
        let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
        let mut state = State {
            file: Appender::create(path)?,
            left: MAX_EVENTS,
            failed: Ok(()),
            open: HashMap::new(),
            threads: HashMap::new(),
        };
        let mut line = JsonLine::new();
        line.put("ph", "M");
        line.put("name", "process_name");
        line.put("pid", rank);
        line.put("args", Value::from_iter([("name", format!("rank {rank}"))]));
        state.file.push(&[b"[\n", &line.end()])?;
        state.file.flush()?;
        Ok(Self {
            rank,
            next_id: AtomicU64::new(1),
            start: (Instant::now(), now.as_secs_f64() * 1e6),
            state: Mutex::new(state),
        })
    }

    /// Writes the events that wait in memory.
    ///
    /// # Errors
    ///
    /// Once, if any could not be written; no more are written then.
    pub fn flush(&self) -> Result<()> {
        let mut state = self.state.lock();
        let flushed = state.file.flush();
        if flushed.is_err() {
            state.left = 0;
        }
        std::mem::replace(&mut state.failed, Ok(())).and(flushed)
    }

    fn now(&self) -> f64 {
        self.start.1 + self.start.0.elapsed().as_secs_f64() * 1e6
    }

    /// An event without its times: its phase, name, target and thread.
    fn line(&self, phase: &str, metadata: &Metadata<'_>, thread: usize) -> JsonLine {
        let mut line = JsonLine::new();
        line.put("ph", phase);
        line.put("name", metadata.name());
        line.put("cat", metadata.target());
        line.put("pid", self.rank);
        line.put("tid", thread);
        line
    }

    /// Writes a span that is not, or not only, a slice of one thread.
    fn write_async(&self, state: &mut State, id: u64, span: &OpenSpan, end: f64) {
        for (phase, at) in [("b", span.opened), ("e", end)] {
            let mut line = self.line(phase, span.metadata, span.thread);
            line.put("id", id);
            line.put("ts", at);
            line.put("args", &span.args);
            state.write(line);
        }
    }
}

impl State {
    fn write(&mut self, line: JsonLine) {
        if self.left == 0 || self.failed.is_err() {
            return;
        }
        self.left -= 1;
        if let Err(error) = self.file.push(&[b",", &line.end()]) {
            (self.failed, self.left) = (Err(error), 0);
        }
    }

    /// This thread. The first time, its name is written.
    fn thread(&mut self, rank: usize) -> &mut Thread {
        let current = thread::current();
        let number = self.threads.len();
        if !self.threads.contains_key(&current.id()) {
            let name = current.name().map_or_else(|| format!("thread {number}"), str::to_owned);
            let mut line = JsonLine::new();
            line.put("ph", "M");
            line.put("name", "thread_name");
            line.put("pid", rank);
            line.put("tid", number);
            line.put("args", Value::from_iter([("name", name)]));
            self.write(line);
        }
        let new = || Thread { number, inside: Vec::new() };
        self.threads.entry(current.id()).or_insert_with(new)
    }
}

impl Subscriber for ChromeTrace {
    fn enabled(&self, metadata: &Metadata<'_>) -> bool {
        *metadata.level() <= Level::DEBUG || metadata.target() == "collective"
    }

    fn new_span(&self, attributes: &Attributes<'_>) -> Id {
        let id = self.next_id.fetch_add(1, Ordering::Relaxed);
        let mut args = Args::default();
        attributes.record(&mut args);
        let mut state = self.state.lock();
        let span = OpenSpan {
            metadata: attributes.metadata(),
            args: args.0,
            handles: 1,
            opened: self.now(),
            thread: state.thread(self.rank).number,
            entered: 0,
        };
        state.open.insert(id, span);
        Id::from_u64(id)
    }

    fn record(&self, id: &Id, values: &Record<'_>) {
        let mut args = Args::default();
        values.record(&mut args);
        if let Some(span) = self.state.lock().open.get_mut(&id.into_u64()) {
            span.args.extend(args.0);
        }
    }

    fn record_follows_from(&self, _: &Id, _: &Id) {}

    fn event(&self, event: &Event<'_>) {
        let mut args = Args::default();
        event.record(&mut args);
        let mut state = self.state.lock();
        let thread = state.thread(self.rank).number;
        let mut line = self.line("i", event.metadata(), thread);
        line.put("s", "t");
        line.put("ts", self.now());
        line.put("args", &args.0);
        state.write(line);
    }

    fn enter(&self, id: &Id) {
        let mut state = self.state.lock();
        if let Some(span) = state.open.get_mut(&id.into_u64()) {
            span.entered += 1;
        }
        let now = self.now();
        state.thread(self.rank).inside.push((id.into_u64(), now));
    }

    fn exit(&self, id: &Id) {
        let now = self.now();
        let mut state = self.state.lock();
        let thread = state.thread(self.rank);
        let Some(at) = thread.inside.iter().rposition(|(inside, _)| *inside == id.into_u64())
        else {
            return;
        };
        let (number, (_, entered)) = (thread.number, thread.inside.remove(at));
        let Some(span) = state.open.get(&id.into_u64()) else { return };
        let mut line = self.line("X", span.metadata, number);
        line.put("ts", entered);
        line.put("dur", now - entered);
        line.put("args", &span.args);
        state.write(line);
    }

    fn clone_span(&self, id: &Id) -> Id {
        if let Some(span) = self.state.lock().open.get_mut(&id.into_u64()) {
            span.handles += 1;
        }
        id.clone()
    }

    fn try_close(&self, id: Id) -> bool {
        let now = self.now();
        let id = id.into_u64();
        let mut state = self.state.lock();
        let Some(span) = state.open.get_mut(&id) else { return false };
        span.handles -= 1;
        if span.handles > 0 {
            return false;
        }
        let Some(span) = state.open.remove(&id) else { return false };
        if span.entered != 1 || state.thread(self.rank).number != span.thread {
            self.write_async(&mut state, id, &span, now);
        }
        true
    }

    fn current_span(&self) -> Current {
        let mut state = self.state.lock();
        let inside = state.thread(self.rank).inside.last().map(|(id, _)| *id);
        let span = inside.and_then(|id| Some((id, state.open.get(&id)?)));
        span.map_or_else(Current::none, |(id, span)| Current::new(Id::from_u64(id), span.metadata))
    }
}

impl Drop for ChromeTrace {
    /// Completes the file.
    fn drop(&mut self) {
        let file = &mut self.state.get_mut().file;
        let _ = file.push(&[b"]\n"]).and_then(|()| file.flush());
    }
}

impl Debug for ChromeTrace {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ChromeTrace").field("rank", &self.rank).finish_non_exhaustive()
    }
}

/// Fields as JSON.
#[derive(Default)]
struct Args(Map<String, Value>);

impl Args {
    fn put(&mut self, field: &Field, value: impl Into<Value>) {
        self.0.insert(field.name().to_owned(), value.into());
    }
}

impl Visit for Args {
    fn record_f64(&mut self, field: &Field, value: f64) {
        self.put(field, value);
    }

    fn record_i64(&mut self, field: &Field, value: i64) {
        self.put(field, value);
    }

    fn record_u64(&mut self, field: &Field, value: u64) {
        self.put(field, value);
    }

    fn record_bool(&mut self, field: &Field, value: bool) {
        self.put(field, value);
    }

    fn record_str(&mut self, field: &Field, value: &str) {
        self.put(field, value);
    }

    fn record_debug(&mut self, field: &Field, value: &dyn Debug) {
        self.put(field, format!("{value:?}"));
    }
}

#[cfg(test)]
mod tests {
    use tracing::{Dispatch, debug_span, dispatcher, info, subscriber, trace_span};

    use super::*;

    /// The events of a trace: phase, name and thread, without metadata.
    fn events(text: &str) -> Vec<(String, String, i64)> {
        let all: Vec<Value> = serde_json::from_str(text).unwrap();
        let text = |event: &Value, key: &str| event[key].as_str().unwrap().to_owned();
        let all = all.iter().filter(|event| event["ph"] != "M");
        all.map(|e| (text(e, "ph"), text(e, "name"), e["tid"].as_i64().unwrap())).collect()
    }

    #[test]
    fn span_that_ends_on_another_thread_is_an_asynchronous_slice() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("trace.json");
        let trace = ChromeTrace::create(&path, 3).unwrap();
        subscriber::with_default(trace, || {
            let _step = debug_span!("step", iter = 7, name = "a \"b\"").entered();
            let bucket = debug_span!("bucket", bytes = 4);
            let copy = bucket.clone();
            thread::spawn(move || copy.in_scope(|| drop(bucket))).join().unwrap();
            trace_span!("unseen").in_scope(|| ());
            info!(name: "saved", "a text");
            // As after SIGKILL.
            let partial = std::fs::read_to_string(&path).unwrap();
            assert!(events(&format!("{partial}]")).is_empty());
        });
        let text = std::fs::read_to_string(&path).unwrap();
        let expected = [
            ("X", "bucket", 1),
            ("b", "bucket", 0),
            ("e", "bucket", 0),
            ("i", "saved", 0),
            ("X", "step", 0),
        ];
        let expected = expected.map(|(phase, name, thread)| (phase.into(), name.into(), thread));
        assert_eq!(events(&text), expected);
        let all: Vec<Value> = serde_json::from_str(&text).unwrap();
        assert!(all.iter().all(|event| event["pid"] == 3));
        let step = all.last().unwrap();
        assert_eq!(step["args"], serde_json::json!({ "iter": 7, "name": "a \"b\"" }));
        let bucket = all.iter().find(|event| event["ph"] == "b").unwrap();
        let end = all.iter().find(|event| event["ph"] == "e").unwrap();
        assert!(bucket["ts"].as_f64() <= end["ts"].as_f64() && bucket["id"] == end["id"]);
        let [from, to] = ["ts", "dur"].map(|key| step[key].as_f64().unwrap());
        assert!(from <= bucket["ts"].as_f64().unwrap() && end["ts"].as_f64().unwrap() <= from + to);
    }

    #[test]
    fn number_of_events_is_bounded() {
        let trace = ChromeTrace::create(Path::new("/dev/null"), 0).unwrap();
        trace.state.lock().left = 1;
        let trace = Dispatch::new(trace);
        let left = || trace.downcast_ref::<ChromeTrace>().unwrap().state.lock().left;
        dispatcher::with_default(&trace, || (0..3).for_each(|_| info!("event")));
        assert_eq!(left(), 0);
    }

    #[test]
    fn trace_is_valid_after_a_failed_write() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("trace.json");
        let trace = Dispatch::new(ChromeTrace::create(&path, 0).unwrap());
        let own = || trace.downcast_ref::<ChromeTrace>().unwrap();
        dispatcher::with_default(&trace, || info!("one"));
        own().flush().unwrap();
        dispatcher::with_default(&trace, || info!("two"));
        own().state.lock().file.fails_after = Some(9);
        assert!(own().flush().is_err());
        // Nothing is written after a gap.
        dispatcher::with_default(&trace, || info!("three"));
        own().flush().unwrap();
        let partial = std::fs::read_to_string(&path).unwrap();
        assert_eq!(events(&format!("{partial}]")).len(), 1);
        drop(trace);
        assert_eq!(events(&std::fs::read_to_string(&path).unwrap()).len(), 1);
    }
}
