//! The core of backends over a device library: the library moves the memory of devices, the host's
//! backends do the rest.
//!
//! # The design in half a page
//!
//! **What a device buffer is.** An address, a count and a type, and a promise of the caller
//! ([`DeviceBuf::from_raw`](crate::DeviceBuf::from_raw)); likewise a stream. Of a library only
//! [`library`] is asked, which a test can fake.
//!
//! **A group has two sides.** The host's side is a whole backend, `host` or `tcp`, as it would be
//! without devices: verbs on slices and on objects, barriers, `split` and `rebuild` work as ever; and
//! what that backend knows of deaths, departures and aborts is what this one goes by. The device's
//! side is a communicator. A failure of either is one of both.
//!
//! **Who waits for what.** [`enqueue`](DeviceBackend::enqueue) records an event, launches the
//! operations, and records another. Waits look at the second event. Time for an operation begins when its
//! stream has reached the first, so that computing before it costs no time; if somebody waits for an
//! operation that its stream does not reach, it begins there, and this rank is the missing one. A
//! thread looks every millisecond ([`watch`]), another writes to the store how far the streams have
//! come ([`herald`]), which tells who is missing, and who called something else, once time is over.
//!
//! **Who aborts.** The watching thread, once, after it has decided why, and before anybody's wait
//! ends with an error: then the device has let go of the memory. It tells the peers by aborting the
//! host's side, which is known there in milliseconds, and each rank's thread aborts its own
//! communicator.

#![expect(
    unsafe_code,
    reason = "hands the memory of operations to the library, and drops in a fork's parent only"
)]

mod flight;
mod herald;
mod library;
mod meeting;
mod watch;

use std::any::Any;
use std::mem::ManuallyDrop;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use parking_lot::Mutex;

use self::flight::{Flight, Op};
use self::herald::{Herald, List};
pub(crate) use self::library::{Communicator, Device, Doubt, Event};
pub(crate) use self::meeting::{Meeting, device_of, join};
use self::watch::Shared;
use super::{Backend, Patience, RawBufs, RawShared, Seed, Transfer, Wait};
use crate::device::{
    DeviceBackend, DeviceBatch, DeviceBuf, DeviceStep, DeviceStream, DeviceWork, Mark,
};
use crate::{DType, Error, OpDesc, Rank, Result, Verb};

/// Between two looks at a communicator that is in progress.
const TICK: Duration = Duration::from_micros(50);
/// How long leaving may take.
const GOODBYE: Duration = Duration::from_secs(10);

/// How a group over devices is made, beside its members.
#[derive(Clone, Debug)]
pub(crate) struct Manner {
    /// Why it is over this backend.
    pub(crate) reason: String,
    pub(crate) timeout: Duration,
    /// Calls are compared before they are enqueued.
    pub(crate) checks: bool,
    /// Every rank's library splits communicators.
    pub(crate) can_split: bool,
}

/// One rank of a group over devices.
#[derive(Debug)]
pub(crate) struct DeviceGroup<C: Communicator> {
    // Says goodbye when dropped, after the parts.
    host: Arc<dyn Backend>,
    manner: Manner,
    /// In a fork all of it stays where it is: threads and the device are the parent's.
    parts: ManuallyDrop<Parts<C>>,
}

#[derive(Debug)]
struct Parts<C: Communicator> {
    shared: Arc<Shared<C>>,
    device: Arc<C::Device>,
    thread: Option<JoinHandle<()>>,
    /// Held while operations are enqueued.
    history: Mutex<History>,
}

/// What this rank has enqueued so far.
#[derive(Debug, Default)]
struct History {
    /// Lists of all ranks.
    seq: u64,
    /// Lists of nothing but messages.
    batches: u64,
}

impl<C: Communicator> DeviceGroup<C> {
    /// Of ranks that have all made their communicators; waits until they have said so.
    pub(crate) fn begin(
        meeting: &Meeting<'_>,
        device: Arc<C::Device>,
        communicator: C,
        manner: Manner,
    ) -> Result<Self> {
        meeting.barrier()?;
        let (joining, host) = (meeting.joining, Arc::clone(meeting.host));
        let store = Arc::clone(meeting.store);
        let herald = Herald::start(store, meeting.key(""), joining.rank, joining.world())?;
        let (name, communicator) = (joining.options.name.clone(), Arc::new(communicator));
        let shared = Arc::new(Shared::new(Arc::clone(&host), communicator, herald, name));
        let (watched, watch) = (Arc::clone(&shared), Arc::clone(&device));
        let thread = std::thread::Builder::new().name(format!("collective-{}", C::BACKEND));
        let thread = thread.spawn(move || {
            // Not needed by every driver; one that refuses shows it at the next call.
            let _entered = watch.enter();
            watched.run();
        });
        let thread = thread.map_err(|error| {
            Error::io("starting the thread that watches over a device's operations", &error)
        })?;
        let history = Mutex::default();
        let parts = ManuallyDrop::new(Parts { shared, device, thread: Some(thread), history });
        Ok(Self { host, manner, parts })
    }

    /// Compares what all ranks are about to enqueue.
    fn compare(&self, list: &List, op: &OpDesc, seq: u64, timeout: Duration) -> Result<()> {
        let (own, world) = (list.to_words(), self.world_size());
        let mut all = vec![0_u64; own.len() * world];
        let gather = OpDesc {
            verb: Verb::AllGather,
            dtype: DType::U64,
            op: None,
            root: None,
            count: own.len(),
        };
        let bufs = RawBufs { input: own.as_ptr().cast(), output: all.as_mut_ptr().cast() };
        let wait = Wait { patience: Patience::Caller, timeout: Some(timeout) };
        run_on_host(&*self.host, &gather, bufs, wait)?;
        let lists = all.chunks_exact(own.len()).map(|words| List::from_words(seq, words));
        let lists: Vec<List> = lists.collect();
        match lists.iter().find_map(|theirs| list.difference(theirs)) {
            None => Ok(()),
            Some(field) => {
                let op = format!("{} #{seq} of group {}", op.verb, self.parts.shared.name);
                let by_rank = lists.iter().map(List::text).enumerate().collect();
                Err(Error::Mismatch { op, field, by_rank })
            }
        }
    }

    /// Launches a list whose end is watched.
    ///
    /// # Safety
    ///
    /// As [`DeviceBackend::enqueue`].
    unsafe fn launch(&self, batch: &DeviceBatch<'_>, op: &Arc<Op<C>>) -> Result<()> {
        let shared = &self.parts.shared;
        op.begin.record(batch.stream)?;
        shared.watch(op)?;
        let go_on = || self.go_on();
        // SAFETY: the caller's promise.
        let kept = unsafe { shared.communicator.launch(batch.steps, batch.stream, &go_on) };
        let launched = kept.and_then(|kept| {
            // Nobody else sets it.
            drop(op.kept.set(kept));
            op.end.record(batch.stream)
        });
        match &launched {
            // Release, here and below: pairs with the watch, which looks at the event from now on.
            Ok(()) => op.launched.store(true, Ordering::Release),
            Err(_) if op.end.record(batch.stream).is_ok() => {
                op.closed.store(true, Ordering::Release);
            }
            Err(_) => {}
        }
        shared.wake();
        launched
    }

    /// Between two looks at a communicator: a moment, unless the group has failed.
    fn go_on(&self) -> Result<()> {
        let shared = &self.parts.shared;
        if shared.verdict().is_some() {
            return Err(shared.failure());
        }
        std::thread::sleep(TICK);
        Ok(())
    }
}

/// Whether so many bytes are as many as the device's.
fn check_bytes(buf: DeviceBuf, bytes: usize) -> Result<()> {
    if buf.bytes() == bytes {
        return Ok(());
    }
    let text = format!("{bytes} bytes of the host for {} of the device", buf.bytes());
    Err(Error::InvalidArgument(text))
}

/// Runs an operation of this module's own on the host's side.
fn run_on_host(host: &dyn Backend, op: &OpDesc, bufs: RawBufs, wait: Wait) -> Result<()> {
    // SAFETY: callers pass nothing, or arrays of their own with as many elements as `op` says.
    unsafe { host.run(op, bufs, wait) }
}

impl<C: Communicator> Backend for DeviceGroup<C> {
    fn name(&self) -> &'static str {
        C::BACKEND
    }

    fn reason(&self) -> &str {
        &self.manner.reason
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
        // A fork has no more than the host's side.
        if self.host.forked() {
            return self.host.ready();
        }
        self.parts.shared.met()?;
        self.host.ready()
    }

    unsafe fn run(&self, op: &OpDesc, bufs: RawBufs, wait: Wait) -> Result<()> {
        // SAFETY: the caller's promise.
        unsafe { self.host.run(op, bufs, wait) }
    }

    unsafe fn exchange(&self, op: &OpDesc, transfers: &[Transfer], wait: Wait) -> Result<()> {
        // SAFETY: the caller's promise.
        unsafe { self.host.exchange(op, transfers, wait) }
    }

    fn alloc(&self, dtype: DType, count: usize) -> Result<RawShared> {
        self.host.alloc(dtype, count)
    }

    fn health(&self) -> Result<()> {
        match self.parts.shared.verdict() {
            Some(error) => Err(error.clone()),
            None => self.host.health(),
        }
    }

    fn device(&self) -> Option<&dyn DeviceBackend> {
        Some(self)
    }

    fn split_seed(&self, members: Option<&[Rank]>) -> Result<Option<Seed>> {
        if !self.manner.can_split {
            return Ok(None);
        }
        self.ready()?;
        let _history = self.parts.history.lock();
        let shared = &self.parts.shared;
        let place = members.and_then(|members| {
            // Any number that no other new group has.
            let color = *members.iter().min()?;
            let key = members.iter().position(|&rank| rank == self.rank())?;
            Some((color, key))
        });
        let deadline = crate::store::deadline(self.manner.timeout);
        let made = shared.communicator.split(place, deadline, &|| self.go_on());
        Ok(made.map_err(|error| shared.fail(error))?.map(Seed::new))
    }

    fn abort(&self, reason: &str) {
        self.host.abort(reason);
        if !self.forked() {
            self.parts.shared.wake();
        }
    }
}

impl<C: Communicator> DeviceBackend for DeviceGroup<C> {
    fn device_name(&self) -> String {
        self.parts.device.name()
    }

    fn supports(&self, op: &OpDesc) -> Result<()> {
        self.parts.shared.communicator.supports(op)
    }

    fn compares(&self) -> bool {
        self.manner.checks
    }

    unsafe fn enqueue(&self, batch: DeviceBatch<'_>) -> Result<DeviceWork> {
        self.ready()?;
        let Parts { shared, device, history, .. } = &*self.parts;
        let mut history = history.lock();
        self.ready()?;
        if self.host.health().is_err() {
            return Err(shared.failure());
        }
        let _entered = device.enter().map_err(|error| shared.fail(error))?;
        device.check_stream(batch.stream)?;
        let timeout = batch.timeout.unwrap_or(self.manner.timeout);
        let peers = batch.steps.iter().filter_map(|step| match step {
            DeviceStep::Send { peer, .. } | DeviceStep::Receive { peer, .. } => Some(*peer),
            DeviceStep::Run { .. } => None,
        });
        let case = flight::case(history.seq, batch.ops, peers);
        let History { seq, batches } = &mut *history;
        let number = match &case {
            herald::Case::All(list) => {
                if self.manner.checks {
                    let compared = self.compare(list, &batch.ops[0], *seq, timeout);
                    compared.map_err(|error| shared.fail(error))?;
                }
                seq
            }
            herald::Case::Messages(_) => batches,
        };
        let events = device.event().and_then(|begin| Ok([begin, device.event()?]));
        let events = events.map_err(|error| shared.fail(error))?;
        let DeviceBatch { ops, steps, stream, timeout: _, ended } = batch;
        let op = Arc::new(Op::new(ops, (*number, case), timeout, events, ended));
        *number += 1;
        let batch = DeviceBatch { ops, steps, stream, timeout: None, ended: Box::new(|_| {}) };
        // SAFETY: the caller's promise.
        if let Err(error) = unsafe { self.launch(&batch, &op) } {
            // Told by the result.
            drop(op.ended.lock().take());
            return Err(shared.fail(error));
        }
        let shared = Arc::downgrade(shared);
        Ok(DeviceWork::new(Arc::new(Flight { op, shared })))
    }

    unsafe fn register(&self, buf: DeviceBuf) -> Result<Box<dyn Any + Send + Sync>> {
        self.ready()?;
        let _history = self.parts.history.lock();
        // SAFETY: the caller's promise.
        unsafe { self.parts.shared.communicator.register(buf) }
    }

    fn alloc_device(&self, bytes: usize) -> Result<(u64, Box<dyn Any + Send + Sync>)> {
        self.ready()?;
        let _entered = self.parts.device.enter()?;
        self.parts.shared.communicator.alloc(bytes)
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
        let _entered = self.parts.device.enter()?;
        // SAFETY: the caller's promise.
        unsafe { self.parts.device.copy(to, from, stream) }
    }

    unsafe fn upload(&self, to: DeviceBuf, from: &[u8]) -> Result<()> {
        check_bytes(to, from.len())?;
        let _entered = self.parts.device.enter()?;
        // SAFETY: the caller's promise, and the lengths are alike.
        unsafe { self.parts.device.upload(to, from) }
    }

    unsafe fn download(&self, to: &mut [u8], from: DeviceBuf) -> Result<()> {
        check_bytes(from, to.len())?;
        let _entered = self.parts.device.enter()?;
        // SAFETY: the caller's promise, and the lengths are alike.
        unsafe { self.parts.device.download(to, from) }
    }

    unsafe fn clear(&self, buf: DeviceBuf, stream: DeviceStream) -> Result<()> {
        let _entered = self.parts.device.enter()?;
        // SAFETY: the caller's promise.
        unsafe { self.parts.device.clear(buf, stream) }
    }
}

impl<C: Communicator> Drop for DeviceGroup<C> {
    fn drop(&mut self) {
        // In a fork there is neither thread nor device.
        if self.host.forked() {
            return;
        }
        // SAFETY: taken once, here.
        let Parts { shared, device, thread, .. } = unsafe { ManuallyDrop::take(&mut self.parts) };
        shared.drain();
        if shared.verdict().is_some() || shared.host.health().is_err() {
            drop(shared.failure());
        }
        shared.stop();
        // A thread that hangs in an abort keeps what it has.
        if let Some(thread) = thread.filter(|_| shared.verdict().is_none() || shared.is_aborted()) {
            // A panic there has been printed and has no other cure.
            drop(thread.join());
        }
        if shared.verdict().is_none() {
            shared.communicator.finish(Instant::now() + self.manner.timeout.min(GOODBYE));
        }
        drop(device);
    }
}
