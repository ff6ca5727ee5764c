//! All state of the simulated CANN of this process, behind one lock.

use std::cell::Cell;
use std::collections::BTreeMap;
use std::env;
use std::fs::File;
use std::io::Write;
use std::path::Path;
use std::sync::{Condvar, LazyLock, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use npu_sys::sys::AclrtFloatOverflowMode;

use crate::hccl::Comm;
use crate::memory::Memory;
use crate::nnop::Objects;
use crate::soc::Soc;
use crate::stream::{self, Stream};

/// The simulated system.
#[derive(Clone, Debug)]
pub struct Config {
    /// The chip.
    pub soc: Soc,
    /// How many devices there are, before `ASCEND_RT_VISIBLE_DEVICES` hides some.
    pub devices: usize,
    /// The value of `ASCEND_RT_VISIBLE_DEVICES`; `None` takes it from the environment.
    pub visible: Option<String>,
    /// Whether streams begin work at once. Otherwise they wait until somebody needs the outcome.
    pub eager: bool,
    /// Timeout for ranks to join a communicator; HCCL's is two minutes.
    pub connect_timeout: Duration,
    /// Timeout for ranks in an operation; HCCL's is half an hour.
    pub execute_timeout: Duration,
    /// Bytes of a device's memory.
    pub memory: usize,
}

impl Default for Config {
    fn default() -> Self {
        Self {
            soc: Soc::default(),
            devices: 8,
            visible: None,
            eager: false,
            connect_timeout: Duration::from_secs(30),
            execute_timeout: Duration::from_secs(60),
            memory: 1 << 30,
        }
    }
}

impl Config {
    /// The configuration of a simulator that was opened as a library.
    fn of_environment() -> Self {
        let mut config = Self { eager: env::var_os("NPU_SIM_EAGER").is_some(), ..Self::default() };
        let soc = env::var("NPU_SIM_SOC").ok();
        if let Some(soc) = soc.as_deref().and_then(Soc::named) {
            config.soc = soc;
        }
        let devices = env::var("NPU_SIM_DEVICES").ok();
        if let Some(devices) = devices.and_then(|text| text.parse().ok()) {
            config.devices = devices;
        }
        config
    }

    /// The physical devices this process sees: ascending numbers, up to the first token that is
    /// none.
    fn visible_devices(&self) -> Vec<usize> {
        let of_environment = || env::var("ASCEND_RT_VISIBLE_DEVICES").ok();
        let Some(text) = self.visible.clone().or_else(of_environment) else {
            return (0..self.devices).collect();
        };
        let mut seen = Vec::new();
        for token in text.split(',') {
            match token.trim().parse() {
                Ok(device) if device < self.devices && seen.last().is_none_or(|l| *l < device) => {
                    seen.push(device);
                }
                _ => break,
            }
        }
        seen
    }
}

/// A call that is to fail.
#[derive(Debug)]
pub(crate) struct Fault {
    pub(crate) function: String,
    /// How many calls of it pass before.
    pub(crate) after: usize,
    pub(crate) code: i32,
}

#[derive(Debug)]
pub(crate) struct Context {
    pub(crate) device: usize,
    /// Of `aclrtSetDevice`: it cannot be destroyed.
    pub(crate) is_default: bool,
}

#[derive(Debug)]
pub(crate) struct Event {
    pub(crate) context: usize,
    pub(crate) waitable: bool,
    pub(crate) timed: bool,
    /// Stream, and how much of it must be done.
    pub(crate) recorded: Option<(usize, u64)>,
    pub(crate) reached_at: Option<std::time::Instant>,
}

#[derive(Debug)]
pub(crate) struct World {
    pub(crate) config: Config,
    /// Physical devices by index.
    pub(crate) visible: Vec<usize>,
    pub(crate) generation: usize,
    pub(crate) initialised: bool,
    pub(crate) operators_initialised: bool,
    next: usize,
    pub(crate) contexts: BTreeMap<usize, Context>,
    pub(crate) streams: BTreeMap<usize, Stream>,
    pub(crate) default_streams: BTreeMap<usize, usize>,
    pub(crate) events: BTreeMap<usize, Event>,
    pub(crate) memory: Memory,
    pub(crate) objects: Objects,
    pub(crate) comms: BTreeMap<usize, std::sync::Arc<Comm>>,
    /// Whether something overflowed since the flag was last reset.
    pub(crate) overflow: bool,
    pub(crate) overflow_mode: AclrtFloatOverflowMode,
    pub(crate) calls: BTreeMap<&'static str, usize>,
    faults: Vec<Fault>,
    violations: Vec<String>,
}

impl World {
    fn new(config: Config, generation: usize) -> Self {
        let visible = config.visible_devices();
        let overflow_mode = if config.soc.saturates() {
            AclrtFloatOverflowMode::SATURATION
        } else {
            AclrtFloatOverflowMode::INFNAN
        };
        Self {
            config,
            visible,
            generation,
            initialised: false,
            operators_initialised: false,
            next: 0x4_0000,
            contexts: BTreeMap::new(),
            streams: BTreeMap::new(),
            default_streams: BTreeMap::new(),
            events: BTreeMap::new(),
            memory: Memory::default(),
            objects: Objects::default(),
            comms: BTreeMap::new(),
            overflow: false,
            overflow_mode,
            calls: BTreeMap::new(),
            faults: Vec::new(),
            violations: Vec::new(),
        }
    }

    /// A number no handle has had yet, nor had in an earlier session.
    pub(crate) fn handle(&mut self) -> usize {
        self.next += 0x10;
        (self.generation << 24) + self.next
    }

    /// Notes a breach whose outcome CANN's documents leave undefined.
    pub(crate) fn violation(&mut self, what: impl Into<String>) {
        if self.violations.len() < 100 {
            let what = what.into();
            if let Some(path) = env::var_os("NPU_SIM_REPORT") {
                report(path.as_ref(), &what);
            }
            self.violations.push(what);
        }
    }

    /// This thread's current context and its device.
    pub(crate) fn current(&self) -> Result<(usize, usize), i32> {
        let context = current_context();
        let device = self.contexts.get(&context).map(|found| found.device);
        device.map(|device| (context, device)).ok_or(NO_CONTEXT)
    }

    /// Counts a call; the code of the fault that was planned for it.
    fn called(&mut self, function: &'static str) -> Option<i32> {
        *self.calls.entry(function).or_default() += 1;
        let at = self.faults.iter().position(|fault| fault.function == function)?;
        match self.faults[at].after.checked_sub(1) {
            Some(after) => {
                self.faults[at].after = after;
                None
            }
            None => Some(self.faults.remove(at).code),
        }
    }

    fn leaks(&self) -> Vec<String> {
        let (device, pinned) = self.memory.count();
        let contexts = self.contexts.values().filter(|context| !context.is_default).count();
        let streams = self.streams.len() - self.default_streams.len();
        let mut counts = vec![
            (device, "allocations on devices"),
            (pinned, "pinned allocations"),
            (contexts, "contexts"),
            (streams, "streams"),
            (self.events.len(), "events"),
            (self.comms.len(), "communicators"),
        ];
        counts.extend(self.objects.counts());
        let left = counts.into_iter().filter(|(count, _)| *count > 0);
        left.map(|(count, what)| format!("{count} {what} are left")).collect()
    }
}

pub(crate) const NO_CONTEXT: i32 = 107_002;

static WORLD: LazyLock<Mutex<World>> = LazyLock::new(|| {
    let mut world = World::new(Config::of_environment(), 0);
    let fault = env::var("NPU_SIM_FAULT").ok();
    let parts: Vec<_> = fault.iter().flat_map(|fault| fault.split(':')).collect();
    if let [function, nth, code] = parts[..]
        && let (Ok(nth), Ok(code)) = (nth.parse::<usize>(), code.parse())
    {
        let after = nth.saturating_sub(1);
        world.faults.push(Fault { function: function.into(), after, code });
    }
    Mutex::new(world)
});

/// Something a stream or a waiter may be waiting for has changed.
pub(crate) static CHANGED: Condvar = Condvar::new();

static ONE_SESSION: Mutex<()> = Mutex::new(());

thread_local! {
    static CURRENT: Cell<usize> = const { Cell::new(0) };
}

pub(crate) fn current_context() -> usize {
    CURRENT.get()
}

pub(crate) fn set_current_context(context: usize) {
    CURRENT.set(context);
}

pub(crate) fn world() -> MutexGuard<'static, World> {
    WORLD.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Counts a call of a C function; returns the status with which it must fail, if any.
pub(crate) fn called(function: &'static str) -> Option<i32> {
    world().called(function)
}

/// Appends a line to the file that the environment names.
fn report(path: &Path, what: &str) {
    let file = File::options().create(true).append(true).open(path);
    let written = file.and_then(|mut file| writeln!(file, "{what}"));
    written.expect("a place for reports that can be written");
}

/// A fresh simulated CANN, until [`Session::finish`]. Sessions of one process take turns.
pub fn start(config: Config) -> Session {
    let turn = ONE_SESSION.lock().unwrap_or_else(PoisonError::into_inner);
    let mut world = world();
    let generation = world.generation + 1;
    *world = World::new(config, generation);
    CHANGED.notify_all();
    Session { _turn: turn }
}

/// A simulated CANN, and what a test may ask of it.
#[derive(Debug)]
#[must_use = "call finish, which says what rules were broken"]
pub struct Session {
    _turn: MutexGuard<'static, ()>,
}

impl Session {
    /// Makes a call fail with `code`: the `nth` from now of the C function of this name, 1 the
    /// next.
    pub fn fail(&self, function: &str, nth: usize, code: i32) {
        let after = nth.saturating_sub(1);
        world().faults.push(Fault { function: function.into(), after, code });
    }

    /// How often a C function was called.
    pub fn calls(&self, function: &str) -> usize {
        world().calls.get(function).copied().unwrap_or_default()
    }

    /// How often any function was called whose name this accepts.
    pub fn calls_of(&self, accept: impl Fn(&str) -> bool) -> usize {
        world().calls.iter().filter(|(name, _)| accept(name)).map(|(_, count)| count).sum()
    }

    /// The breaches so far; they are forgotten by asking.
    pub fn violations(&self) -> Vec<String> {
        std::mem::take(&mut world().violations)
    }

    /// Ends it. The breaches, and what was not given back.
    #[must_use]
    pub fn finish(self) -> Vec<String> {
        let mut world = world();
        let mut report = std::mem::take(&mut world.violations);
        report.extend(world.leaks());
        world.comms.values().for_each(|comm| comm.close());
        let generation = world.generation + 1;
        *world = World::new(Config::of_environment(), generation);
        CHANGED.notify_all();
        drop(world);
        stream::join_all();
        report
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn visible_devices_end_at_the_first_bad_token() {
        let visible = |text: &str| {
            Config { visible: Some(text.into()), devices: 4, ..Config::default() }.visible_devices()
        };
        assert_eq!(visible("0,2,3"), [0, 2, 3]);
        assert_eq!(visible("1,x,2"), [1]);
        assert_eq!(visible("2,1"), [2]);
        assert_eq!(visible("1,4,2"), [1]);
        assert_eq!(visible(""), [0; 0]);
    }
}
