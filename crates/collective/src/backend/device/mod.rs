//! Core of the backends over a device library (NCCL, HCCL): the library handles device memory, a
//! host backend the rest.
//!
//! # The design
//!
//! **Memory.** A device buffer is an address, a count and a type. The caller guarantees that they
//! are valid ([`DeviceBuf::from_raw`](crate::DeviceBuf::from_raw)), and likewise for streams. The
//! traits in [`library`] declare all that is used of a library, so tests can replace it by a fake.
//!
//! **A group has two sides.** The host side is a complete backend, `host` or `tcp`: it runs verbs
//! on slices and objects, barriers, `split` and `rebuild`, and detects deaths, departures and
//! aborts for both sides. The device side is a communicator. A failure of one side fails both.
//!
//! **Timeouts.** [`enqueue`](DeviceBackend::enqueue) records an event, launches the operations, and
//! records a second event, which waits poll. An operation's timeout starts when its stream has
//! reached the first event, so that earlier computation does not count. It also starts when a
//! caller waits for an operation that its stream does not reach; then this rank is the missing one.
//! The [`watchdog`] thread polls every millisecond. After a timeout all ranks write the progress of
//! their streams to the store, which shows which ranks are missing and which called a different
//! operation ([`progress`]).
//!
//! **Aborts.** The watchdog aborts the communicator once, after it has decided why the group failed
//! and before any wait returns that error, so the device has released the memory by then. It also
//! aborts the host side, which the peers detect within milliseconds; each rank's watchdog aborts
//! its own communicator.

#![expect(
    unsafe_code,
    reason = "passes the memory of operations to the library, and skips the drop in a fork"
)]

mod library;
mod pending;
mod progress;
mod rendezvous;
mod watchdog;

use std::any::Any;
use std::mem::ManuallyDrop;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, OnceLock};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use parking_lot::Mutex;

#[cfg(feature = "npu")]
pub(crate) use self::library::PossibleCause;
pub(crate) use self::library::{Communicator, Device, Event, pointer, unsupported};
use self::pending::{DeviceOp, Pending};
use self::progress::{DIAGNOSING, List, Participants, Records};
pub(crate) use self::rendezvous::{Rendezvous, device_of, join};
use self::watchdog::Watchdog;
use super::core::BARRIER;
use super::{Backend, RawBufs, RawShared, Seed, Transfer, Wait, WaitPolicy};
use crate::backend::device_memory::{
    DeviceBackend, DeviceBatch, DeviceBuf, DeviceStep, DeviceStream, DeviceWork, Mark,
};
use crate::op::blocks::describe;
use crate::{DType, Error, OpDesc, Rank, Result, Verb};

/// Time between two polls of a communicator that is in progress.
const TICK: Duration = Duration::from_micros(50);
/// How long dropping a group may wait for its peers.
const FINISH_TIMEOUT: Duration = Duration::from_secs(10);

/// Configuration of a device group.
#[derive(Clone, Debug)]
pub(crate) struct GroupConfig {
    /// Why this backend was chosen.
    pub(crate) reason: String,
    pub(crate) timeout: Duration,
    /// Whether calls are compared before they are enqueued.
    pub(crate) checks: bool,
    /// Whether every rank's library can split communicators.
    pub(crate) can_split: bool,
}

/// One rank of a device group.
#[derive(Debug)]
pub(crate) struct DeviceGroup<C: Communicator> {
    // Dropped after the parts.
    host: Arc<dyn Backend>,
    config: GroupConfig,
    /// Leaked in a fork, because the threads and the device belong to the parent.
    parts: ManuallyDrop<Parts<C>>,
}

#[derive(Debug)]
struct Parts<C: Communicator> {
    watchdog: Arc<Watchdog<C>>,
    device: Arc<C::Device>,
    thread: Option<JoinHandle<()>>,
    /// Held while operations are enqueued.
    history: Mutex<History>,
}

/// Number of lists that this rank has enqueued.
#[derive(Debug, Default)]
struct History {
    /// Lists in which all ranks take part.
    seq: u64,
    /// Lists of point-to-point messages only.
    batches: u64,
}

impl<C: Communicator> DeviceGroup<C> {
    /// Blocks until all ranks have created their communicators, then starts the threads.
    pub(crate) fn begin(
        rendezvous: &Rendezvous<'_>,
        device: Arc<C::Device>,
        communicator: C,
        config: GroupConfig,
    ) -> Result<Self> {
        rendezvous.barrier()?;
        let (joining, host) = (rendezvous.joining, Arc::clone(rendezvous.host));
        let store = Arc::clone(rendezvous.store);
        let (name, communicator) = (joining.options.name.clone(), Arc::new(communicator));
        let prefix = format!("{name}/{}", C::BACKEND);
        let records = Records { store, prefix, rank: joining.rank, world: joining.world() };
        let watchdog = Arc::new(Watchdog::new(Arc::clone(&host), communicator, records, name));
        let (run, on) = (Arc::clone(&watchdog), Arc::clone(&device));
        let thread = std::thread::Builder::new().name(format!("collective-{}", C::BACKEND));
        let thread = thread.spawn(move || {
            // Not every driver needs this. If it fails, the next call fails, too.
            let _entered = on.enter();
            // Else a poll would end a capture of mode GLOBAL, as NVIDIA's libraries make. If this
            // fails, so do the polls during one.
            drop(on.relax_captures());
            run.run();
        });
        let thread =
            thread.map_err(|error| Error::io("starting the device group's watchdog", &error))?;
        let history = Mutex::default();
        let parts = Parts { watchdog, device, thread: Some(thread), history };
        Ok(Self { host, config, parts: ManuallyDrop::new(parts) })
    }

    /// Compares the lists that all ranks are about to enqueue.
    fn compare(&self, list: &List, op: &OpDesc, seq: u64, timeout: Duration) -> Result<()> {
        let mut all = vec![0_u64; List::WORDS * self.world_size()];
        let gather = describe(Verb::AllGather, DType::U64, None, None, List::WORDS);
        let bufs = RawBufs { input: list.words.as_ptr().cast(), output: all.as_mut_ptr().cast() };
        let wait = Wait { policy: WaitPolicy::Spin, timeout: Some(timeout) };
        run_on_host(&*self.host, &gather, bufs, wait)?;
        let (all, _) = all.as_chunks();
        let lists: Vec<List> = all.iter().map(|&words| List { seq, words }).collect();
        match lists.iter().find_map(|theirs| list.difference(theirs)) {
            None => Ok(()),
            Some(field) => {
                let op = format!("{} #{seq} of group {}", op.verb, self.parts.watchdog.name);
                let by_rank = lists.iter().map(List::text).enumerate().collect();
                Err(Error::Mismatch { op, field, by_rank })
            }
        }
    }

    /// Adds a list to the watchdog and launches it.
    ///
    /// # Safety
    ///
    /// As [`DeviceBackend::enqueue`].
    unsafe fn launch(
        &self,
        steps: &[DeviceStep],
        stream: DeviceStream,
        op: &Arc<Pending<C>>,
    ) -> Result<()> {
        let watchdog = &self.parts.watchdog;
        op.begin.record(stream)?;
        watchdog.add(op)?;
        // SAFETY: the caller's promise.
        let kept = unsafe { watchdog.communicator.launch(steps, stream, &|| self.check_health()) };
        let launched = kept.and_then(|kept| {
            // Set here only.
            drop(op.kept.set(kept));
            op.end.record(stream)
        });
        match &launched {
            // Release, here and below: pairs with the watchdog, which polls the event from now on.
            Ok(()) => op.launched.store(true, Ordering::Release),
            Err(_) if op.end.record(stream).is_ok() => op.closed.store(true, Ordering::Release),
            Err(_) => {}
        }
        watchdog.wake();
        launched
    }

    /// Makes the device current. Returns `None` without doing so if the buffer is empty.
    fn enter_for(&self, buf: DeviceBuf) -> Result<Option<<C::Device as Device>::Entered<'_>>> {
        (buf.bytes() > 0).then(|| self.parts.device.enter()).transpose()
    }

    /// Replaces the host side's error by the group's if a rank has aborted the host side for a
    /// diagnosis.
    fn diagnosed<T>(&self, result: Result<T>) -> Result<T> {
        result.map_err(|error| match error {
            Error::Aborted { ref reason, .. } if reason == DIAGNOSING => {
                self.parts.watchdog.wait_for_decision().unwrap_or(error)
            }
            error => error,
        })
    }

    /// Fails if the group has failed, else sleeps for a [`TICK`]. Called between two polls of a
    /// communicator.
    fn check_health(&self) -> Result<()> {
        let watchdog = &self.parts.watchdog;
        if watchdog.failure().is_some() {
            return Err(watchdog.wait_for_failure());
        }
        std::thread::sleep(TICK);
        Ok(())
    }
}

/// Runs an internal operation of this module on the host side.
fn run_on_host(host: &dyn Backend, op: &OpDesc, bufs: RawBufs, wait: Wait) -> Result<()> {
    // SAFETY: callers pass `RawBufs::NONE`, or their own arrays with the number of elements of
    // `op`.
    unsafe { host.run(op, bufs, wait) }
}

impl<C: Communicator> Backend for DeviceGroup<C> {
    fn name(&self) -> &'static str {
        C::BACKEND
    }

    fn reason(&self) -> &str {
        &self.config.reason
    }

    fn rank(&self) -> Rank {
        self.host.rank()
    }

    fn world_size(&self) -> usize {
        self.host.world_size()
    }

    fn forked(&self) -> bool {
        self.host.forked()
    }

    fn ready(&self) -> Result<()> {
        // In a fork, only the host side may be called; it returns the error.
        if self.host.forked() {
            return self.host.ready();
        }
        self.parts.watchdog.ready()?;
        self.diagnosed(self.host.ready())
    }

    unsafe fn run(&self, op: &OpDesc, bufs: RawBufs, wait: Wait) -> Result<()> {
        // SAFETY: the caller's promise.
        self.diagnosed(unsafe { self.host.run(op, bufs, wait) })
    }

    unsafe fn exchange(&self, op: &OpDesc, transfers: &[Transfer], wait: Wait) -> Result<()> {
        // SAFETY: the caller's promise.
        self.diagnosed(unsafe { self.host.exchange(op, transfers, wait) })
    }

    fn alloc(&self, dtype: DType, count: usize) -> Result<RawShared> {
        self.diagnosed(self.host.alloc(dtype, count))
    }

    fn health(&self) -> Result<()> {
        match self.parts.watchdog.failure() {
            Some(error) => Err(error.clone()),
            None => self.host.health(),
        }
    }

    fn device(&self) -> Option<&dyn DeviceBackend> {
        Some(self)
    }

    fn split_seed(&self, members: Option<&[Rank]>) -> Result<Option<Seed>> {
        if !self.config.can_split {
            return Ok(None);
        }
        self.ready()?;
        let _history = self.parts.history.lock();
        let watchdog = &self.parts.watchdog;
        let color_and_key = members.and_then(|members| {
            // Any number that is unique among the new groups.
            let color = *members.iter().min()?;
            let key = members.iter().position(|&rank| rank == self.rank())?;
            Some((color, key))
        });
        let deadline = crate::store::deadline(self.config.timeout);
        let made = watchdog.communicator.split(color_and_key, deadline, &|| self.check_health());
        let seed = made.map_err(|error| watchdog.fail(error))?.map(Seed::new);
        // No rank returns, and may abort this group, while another still splits. A failure of this
        // group does not concern the ranks that are done.
        let wait = Wait { policy: WaitPolicy::Spin, timeout: Some(self.config.timeout) };
        drop(run_on_host(&*self.host, &BARRIER, RawBufs::NONE, wait));
        Ok(seed)
    }

    fn abort(&self, reason: &str) {
        self.host.abort(reason);
        if !self.forked() {
            self.parts.watchdog.wake();
        }
    }
}

impl<C: Communicator> DeviceBackend for DeviceGroup<C> {
    fn device_name(&self) -> String {
        self.parts.device.name()
    }

    fn supports(&self, op: &OpDesc) -> Result<()> {
        self.parts.watchdog.communicator.supports(op)
    }

    fn compares(&self) -> bool {
        self.config.checks
    }

    unsafe fn enqueue(&self, batch: DeviceBatch<'_>) -> Result<DeviceWork> {
        self.ready()?;
        let Parts { watchdog, device, history, .. } = &*self.parts;
        let mut history = history.lock();
        self.ready()?;
        if self.host.health().is_err() {
            return Err(watchdog.wait_for_failure());
        }
        let _entered = device.enter().map_err(|error| watchdog.fail(error))?;
        let DeviceBatch { ops, steps, stream, timeout, ended } = batch;
        device.check_stream(stream)?;
        let timeout = timeout.unwrap_or(self.config.timeout);
        let participants = Participants::new(history.seq, ops, steps);
        let History { seq, batches } = &mut *history;
        let number = match &participants {
            Participants::All(list) => {
                if self.config.checks {
                    let compared = self.compare(list, &ops[0], *seq, timeout);
                    compared.map_err(|error| watchdog.fail(error))?;
                }
                seq
            }
            Participants::Peers(_) => batches,
        };
        let event = || device.event().map_err(|error| watchdog.fail(error));
        let op = Arc::new(Pending {
            first: ops[0],
            participants,
            seq: *number,
            timeout,
            begin: event()?,
            end: event()?,
            kept: OnceLock::new(),
            launched: AtomicBool::new(false),
            closed: AtomicBool::new(false),
            enqueued: Instant::now(),
            begun: OnceLock::new(),
            waited: OnceLock::new(),
            ended: Mutex::new(Some(ended)),
            outcome: OnceLock::new(),
        });
        *number += 1;
        // SAFETY: the caller's promise.
        if let Err(error) = unsafe { self.launch(steps, stream, &op) } {
            // The caller gets the error as this call's result.
            drop(op.ended.lock().take());
            return Err(watchdog.fail(error));
        }
        let watchdog = Arc::downgrade(watchdog);
        Ok(DeviceWork::new(Arc::new(DeviceOp { op, watchdog })))
    }

    unsafe fn register(&self, buf: DeviceBuf) -> Result<Box<dyn Any + Send + Sync>> {
        self.ready()?;
        let _history = self.parts.history.lock();
        // SAFETY: the caller's promise.
        unsafe { self.parts.watchdog.communicator.register(buf) }
    }

    fn alloc_device(&self, bytes: usize) -> Result<(u64, Box<dyn Any + Send + Sync>)> {
        self.ready()?;
        let _entered = self.parts.device.enter()?;
        self.parts.watchdog.communicator.alloc(bytes)
    }

    fn stream(&self) -> Result<(DeviceStream, Box<dyn Any + Send + Sync>)> {
        let device = &self.parts.device;
        let _entered = device.enter()?;
        device.stream()
    }

    unsafe fn mark(&self, stream: DeviceStream) -> Result<Box<dyn Mark>> {
        let device = &self.parts.device;
        let _entered = device.enter()?;
        device.check_stream(stream)?;
        let event = device.event()?;
        event.record(stream)?;
        Ok(Box::new(event))
    }

    unsafe fn copy(&self, to: DeviceBuf, from: DeviceBuf, stream: DeviceStream) -> Result<()> {
        let Some(_entered) = self.enter_for(to)? else { return Ok(()) };
        // SAFETY: the caller's promise.
        unsafe { self.parts.device.copy(to, from, stream) }
    }

    unsafe fn upload(&self, to: DeviceBuf, from: &[u8]) -> Result<()> {
        let Some(_entered) = self.enter_for(to)? else { return Ok(()) };
        // SAFETY: the caller's promise.
        unsafe { self.parts.device.upload(to, from) }
    }

    unsafe fn download(&self, to: &mut [u8], from: DeviceBuf) -> Result<()> {
        let Some(_entered) = self.enter_for(from)? else { return Ok(()) };
        // SAFETY: the caller's promise.
        unsafe { self.parts.device.download(to, from) }
    }

    unsafe fn clear(&self, buf: DeviceBuf, stream: DeviceStream) -> Result<()> {
        let Some(_entered) = self.enter_for(buf)? else { return Ok(()) };
        // SAFETY: the caller's promise.
        unsafe { self.parts.device.clear(buf, stream) }
    }
}

impl<C: Communicator> Drop for DeviceGroup<C> {
    fn drop(&mut self) {
        // A fork has neither the thread nor the device.
        if self.host.forked() {
            return;
        }
        // SAFETY: taken once, here.
        let Parts { watchdog, device, thread, .. } = unsafe { ManuallyDrop::take(&mut self.parts) };
        watchdog.drain();
        if watchdog.failure().is_some() || watchdog.host.health().is_err() {
            drop(watchdog.wait_for_failure());
        }
        watchdog.stop();
        // A thread that hangs in an abort is left running.
        let hangs = watchdog.failure().is_some() && !watchdog.is_aborted();
        if let Some(thread) = thread.filter(|_| !hangs) {
            // A panic there has been printed already.
            drop(thread.join());
        }
        if watchdog.failure().is_none() {
            watchdog.communicator.finish(Instant::now() + self.config.timeout.min(FINISH_TIMEOUT));
        }
        drop(device);
    }
}
