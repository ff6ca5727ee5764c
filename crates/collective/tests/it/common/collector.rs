//! A subscriber that lists the spans and events it gets, for the tests of several crates.

use std::cell::RefCell;
use std::collections::HashMap;
use std::fmt::{Debug, Write as _};
use std::sync::{Arc, LazyLock, Mutex};

use tracing::field::{Field, Visit};
use tracing::span::{Attributes, Id, Record};
use tracing::{Dispatch, Event, Metadata, Subscriber};
use tracing_core::span::Current;

/// Lists spans and events of some targets, one a line: `open NAME field=value`, `enter NAME`,
/// `exit NAME`, `close NAME`, and `NAME field=value` for an event. A message is left out beside
/// other fields.
#[derive(Clone, Debug)]
pub(crate) struct Collector {
    targets: &'static [&'static str],
    seen: Arc<Mutex<Seen>>,
}

#[derive(Debug, Default)]
struct Seen {
    lines: Vec<String>,
    next: u64,
    /// Name and number of handles of each open span.
    open: HashMap<u64, (&'static Metadata<'static>, usize)>,
}

thread_local! {
    /// The spans that this thread is in.
    static INSIDE: RefCell<Vec<Id>> = const { RefCell::new(Vec::new()) };
}

/// A second subscriber in the process. While there is only one, tracing disables an event for all
/// threads if the first thread that reaches it has none, as the thread of another test.
static SECOND: LazyLock<Dispatch> = LazyLock::new(|| Dispatch::new(Collector::of(&[])));

impl Collector {
    pub(crate) fn new(targets: &'static [&'static str]) -> Self {
        LazyLock::force(&SECOND);
        Self::of(targets)
    }

    fn of(targets: &'static [&'static str]) -> Self {
        Self { targets, seen: Arc::default() }
    }

    /// Returns what `run` emits on this thread, and what its spans do on others.
    pub(crate) fn during(targets: &'static [&'static str], run: impl FnOnce()) -> Vec<String> {
        let collector = Self::new(targets);
        tracing::subscriber::with_default(collector.clone(), run);
        collector.lines()
    }

    pub(crate) fn lines(&self) -> Vec<String> {
        let seen = self.seen.lock().unwrap();
        assert!(seen.open.is_empty(), "spans are left open: {:?}", seen.open);
        seen.lines.clone()
    }

    fn note(&self, what: &str, id: &Id) {
        let mut seen = self.seen.lock().unwrap();
        let line = format!("{what} {}", seen.open[&id.into_u64()].0.name());
        seen.lines.push(line);
    }
}

/// Formats fields as ` name=value`.
#[derive(Default)]
struct Fields {
    text: String,
    message: String,
}

impl Fields {
    fn text(self) -> String {
        if self.text.is_empty() { self.message } else { self.text }
    }
}

impl Visit for Fields {
    fn record_debug(&mut self, field: &Field, value: &dyn Debug) {
        let is_message = field.name() == "message";
        let to = if is_message { &mut self.message } else { &mut self.text };
        write!(to, " {}={value:?}", field.name()).unwrap();
    }

    fn record_str(&mut self, field: &Field, value: &str) {
        write!(self.text, " {}={value}", field.name()).unwrap();
    }
}

impl Subscriber for Collector {
    fn enabled(&self, metadata: &Metadata<'_>) -> bool {
        self.targets.contains(&metadata.target())
    }

    fn new_span(&self, span: &Attributes<'_>) -> Id {
        let mut fields = Fields::default();
        span.record(&mut fields);
        let metadata = span.metadata();
        let mut seen = self.seen.lock().unwrap();
        seen.next += 1;
        let id = seen.next;
        seen.open.insert(id, (metadata, 1));
        seen.lines.push(format!("open {}{}", metadata.name(), fields.text()));
        Id::from_u64(id)
    }

    fn record(&self, _: &Id, _: &Record<'_>) {}

    fn record_follows_from(&self, _: &Id, _: &Id) {}

    fn event(&self, event: &Event<'_>) {
        let mut fields = Fields::default();
        event.record(&mut fields);
        let line = format!("{}{}", event.metadata().name(), fields.text());
        self.seen.lock().unwrap().lines.push(line);
    }

    fn enter(&self, id: &Id) {
        self.note("enter", id);
        INSIDE.with_borrow_mut(|inside| inside.push(id.clone()));
    }

    fn exit(&self, id: &Id) {
        self.note("exit", id);
        INSIDE.with_borrow_mut(|inside| inside.retain(|other| other != id));
    }

    fn current_span(&self) -> Current {
        let id = INSIDE.with_borrow(|inside| inside.last().cloned());
        let metadata = |id: &Id| Some(self.seen.lock().unwrap().open.get(&id.into_u64())?.0);
        id.and_then(|id| Some(Current::new(id.clone(), metadata(&id)?)))
            .unwrap_or_else(Current::none)
    }

    fn clone_span(&self, id: &Id) -> Id {
        self.seen.lock().unwrap().open.get_mut(&id.into_u64()).unwrap().1 += 1;
        id.clone()
    }

    fn try_close(&self, id: Id) -> bool {
        let mut seen = self.seen.lock().unwrap();
        let (metadata, handles) = seen.open.get_mut(&id.into_u64()).unwrap();
        let name = metadata.name();
        *handles -= 1;
        if *handles > 0 {
            return false;
        }
        seen.open.remove(&id.into_u64());
        seen.lines.push(format!("close {name}"));
        true
    }
}
