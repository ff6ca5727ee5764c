//! The backend over NCCL: NCCL moves the memory of CUDA devices, the host's backends do the rest.
//!
//! # The design in half a page
//!
//! **What a device buffer is.** An address, a count and a type, and a promise of the caller
//! ([`DeviceBuf::from_raw`](crate::DeviceBuf::from_raw)); likewise a stream. Nothing here launches
//! kernels of its own, so of the driver a context, events, a stream and copies are needed,
//! through a table of eighteen functions ([`sys`]) that a test can fake as well as NCCL's.
//!
//! **A group has two sides.** The host's side is a whole backend, `host` or `tcp`, as it would be
//! without NCCL: verbs on slices and on objects, barriers, `split` and `rebuild` work as ever; and
//! what that backend knows of deaths, departures and aborts is what this one goes by. The device's
//! side is a communicator. A failure of either is one of both.
//!
//! **Who waits for what.** [`enqueue`](DeviceBackend::enqueue) records an event, launches NCCL's
//! group, and records another. Waits look at the second event. Time for an operation begins when its
//! stream has reached the first, so that computing before it costs no time; if somebody waits for an
//! operation that its stream does not reach, it begins there, and this rank is the missing one. A
//! thread looks every millisecond ([`watch`]), another writes to the store how far the streams have
//! come ([`herald`]), which tells who is missing, and who called something else, once time is over.
//!
//! **Who aborts.** The watching thread, once, after it has decided why, and before anybody's wait
//! ends with an error: then the device has let go of the memory. It tells the peers by aborting the
//! host's side, which is known there in milliseconds, and each rank's thread aborts its own
//! communicator.
//!
//! # NCCL's sharp edges, which decide the shape
//!
//! * A call may block for as long as a peer does. So communicators are non-blocking, and every call
//!   is polled. An event must not be recorded before the call is over: it would be reached before
//!   the operation has begun.
//! * A communicator is not safe for two threads, but `ncclCommAbort` must come from another thread
//!   if a call hangs ([`communicator`]). Aborting twice, or using what was aborted, is undefined.
//! * NCCL has no deadline, does not notice a killed peer of the same machine, and names no rank.
//! * Counts or types that differ are a hang or garbage. Nothing is compared before data move, which
//!   would cost a meeting on the host for each operation, unless [`Config::with_checks`] asks for
//!   that; a hang is explained afterwards.
//! * Its enumerations grow, so here they are integers. What its adding rounds to, and in which order,
//!   depends on version, size and topology.
//! * `ncclGetLastError` is the process's, not the communicator's: with several groups in a process an
//!   error may carry another's words.

#![expect(
    unsafe_code,
    reason = "hands the memory of operations to NCCL, and drops in a fork's parent only"
)]

mod communicator;
mod cuda;
mod herald;
mod join;
mod loader;
mod result;
mod sys;
mod watch;

use std::any::Any;
use std::ffi::{CString, c_int};
use std::mem::ManuallyDrop;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use parking_lot::Mutex;

use self::communicator::Communicator;
use self::cuda::{Device, Event, OwnStream};
use self::herald::List;
pub(crate) use self::join::join;
pub use self::result::Libraries;
use self::watch::{Flight, Op, Shared};
use super::meet;
use super::{Backend, Patience, RawBufs, RawShared, Seed, Transfer, Wait};
use crate::device::{
    DeviceBackend, DeviceBatch, DeviceBuf, DeviceStep, DeviceStream, DeviceWork, Mark,
};
use crate::membership::Connect;
use crate::{DType, Error, OpDesc, Rank, Result, Transport, Verb};

/// Between two looks at a communicator that is in progress.
const TICK: Duration = Duration::from_micros(50);
/// How long leaving may take.
const GOODBYE: Duration = Duration::from_secs(10);

/// What NCCL is told of a group, and how ranks meet.
#[derive(Clone, Debug)]
pub struct Config {
    min_ctas: Option<u16>,
    max_ctas: Option<u16>,
    cga_cluster_size: Option<u16>,
    net_name: Option<CString>,
    ranks_per_id: usize,
    checks: bool,
}

impl Default for Config {
    fn default() -> Self {
        Self {
            min_ctas: None,
            max_ctas: None,
            cga_cluster_size: None,
            net_name: None,
            ranks_per_id: 128,
            checks: false,
        }
    }
}

impl Config {
    /// Sets how many blocks NCCL's kernels have at least and at most; NCCL's choice unless set.
    pub fn with_ctas(mut self, min: u16, max: u16) -> Self {
        (self.min_ctas, self.max_ctas) = (Some(min), Some(max));
        self
    }

    /// Sets how many blocks make a cluster, 0 to 8; NCCL's choice unless set.
    pub fn with_cga_cluster_size(mut self, size: u16) -> Self {
        self.cga_cluster_size = Some(size);
        self
    }

    /// Sets the network, for example `IB` or `Socket`; NCCL's choice unless set.
    ///
    /// # Errors
    ///
    /// [`Error::InvalidArgument`] for a name with a NUL.
    pub fn with_net_name(mut self, name: &str) -> Result<Self> {
        let name = CString::new(name)
            .map_err(|_| Error::InvalidArgument("a network's name has no NUL".into()))?;
        self.net_name = Some(name);
        Ok(self)
    }

    /// Sets for how many ranks NCCL makes one id, if it can have several; 128 unless set.
    pub fn with_ranks_per_id(mut self, ranks: usize) -> Self {
        self.ranks_per_id = ranks;
        self
    }

    /// Has the ranks compare what they call before they enqueue it: a difference is
    /// [`Error::Mismatch`] on all of them, and no byte has changed. Each list of calls then meets
    /// the peers on the host, which costs what an [`all_gather`](crate::ProcessGroup::all_gather) of
    /// 168 bytes does. Messages between pairs and the lengths of verbs with blocks of different
    /// lengths are not compared. The same on all ranks.
    pub fn with_checks(mut self, checks: bool) -> Self {
        self.checks = checks;
        self
    }

    /// As C has it, good while the name lives.
    fn to_sys(&self) -> (sys::Config, Option<CString>) {
        let name = self.net_name.clone();
        let number = |value: Option<u16>| value.map_or(sys::UNDEFINED, c_int::from);
        let config = sys::Config {
            cga_cluster_size: number(self.cga_cluster_size),
            min_ctas: number(self.min_ctas),
            max_ctas: number(self.max_ctas),
            net_name: name.as_ref().map_or(std::ptr::null(), |name| name.as_ptr()),
            ..sys::Config::new()
        };
        (config, name)
    }
}

/// Makes groups over NCCL with these libraries and this configuration, for
/// [`ProcessGroup::from_store_with`](crate::ProcessGroup::from_store_with). The options' transport
/// does not count; their [CUDA device](crate::GroupOptions::with_cuda_device) does.
pub fn connector(libraries: Libraries, config: Config) -> Arc<Connect> {
    Arc::new(move |store, rank, world, options| {
        let options = options.clone().with_transport(Transport::Nccl);
        let version = Ok(libraries.version());
        let joining = meet::gather(&**store, rank, world, &options, version)?;
        let reason = "it was asked for".into();
        Ok(Arc::new(join(store, &joining, reason, Ok(libraries), &config)?))
    })
}

/// What this machine's NCCL is, as ranks tell one another.
pub(super) fn here() -> std::result::Result<i32, String> {
    Libraries::global().map(|libraries| libraries.version()).map_err(|error| error.to_string())
}

/// One rank of a group over NCCL.
#[derive(Debug)]
pub(crate) struct Nccl {
    // Says goodbye when dropped, after the parts.
    host: Arc<dyn Backend>,
    reason: String,
    config: Config,
    timeout: Duration,
    /// Every rank's NCCL can.
    can_split: bool,
    /// In a fork all of it stays where it is: threads and the device are the parent's.
    parts: ManuallyDrop<Parts>,
}

#[derive(Debug)]
struct Parts {
    shared: Arc<Shared>,
    device: Arc<Device>,
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

impl Nccl {
    fn new(
        device: Arc<Device>,
        shared: Shared,
        reason: String,
        config: Config,
        timeout: Duration,
        can_split: bool,
    ) -> Result<Self> {
        let (shared, host) = {
            let host = Arc::clone(&shared.host);
            (Arc::new(shared), host)
        };
        let watched = Arc::clone(&shared);
        let watch = device.clone();
        let thread = std::thread::Builder::new().name("collective-nccl".into());
        let thread = thread.spawn(move || {
            // Not needed by every driver; one that refuses shows it at the next call.
            let _entered = watch.enter();
            watched.run();
        });
        let thread = thread
            .map_err(|error| Error::io("starting the thread that watches over NCCL", &error))?;
        let history = Mutex::default();
        let parts = ManuallyDrop::new(Parts { shared, device, thread: Some(thread), history });
        Ok(Self { host, reason, config, timeout, can_split, parts })
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
    unsafe fn launch(&self, batch: &DeviceBatch<'_>, op: &Arc<Op>) -> Result<()> {
        let shared = &self.parts.shared;
        op.begin.record(batch.stream)?;
        shared.watch(op)?;
        // SAFETY: the caller's promise.
        let operators = unsafe { shared.communicator.launch(batch.steps, batch.stream) }?;
        while !shared.communicator.ready()? {
            if shared.verdict().is_some() {
                return Err(shared.failure());
            }
            std::thread::sleep(TICK);
        }
        shared.communicator.give_back(operators)?;
        op.end.record(batch.stream)?;
        // Release: pairs with the watch, which looks at the event from now on.
        op.launched.store(true, Ordering::Release);
        shared.wake();
        Ok(())
    }

    /// Waits until both ends of a split are ready.
    fn split_over(&self, made: Option<&Communicator>) -> Result<()> {
        let shared = &self.parts.shared;
        let deadline = crate::store::deadline(self.timeout);
        while !(shared.communicator.ready()? && made.map_or(Ok(true), Communicator::ready)?) {
            if shared.verdict().is_some() {
                return Err(shared.failure());
            }
            if Instant::now() >= deadline {
                let (name, text) = ("ncclInProgress".into(), "ranks did not come in time".into());
                let during = "ncclCommSplit".into();
                return Err(Error::Backend { backend: "nccl", during, name, code: 7, text });
            }
            std::thread::sleep(TICK);
        }
        Ok(())
    }
}

/// Runs an operation of this module's own on the host's side.
fn run_on_host(host: &dyn Backend, op: &OpDesc, bufs: RawBufs, wait: Wait) -> Result<()> {
    // SAFETY: callers pass nothing, or arrays of their own with as many elements as `op` says.
    unsafe { host.run(op, bufs, wait) }
}

impl Backend for Nccl {
    fn name(&self) -> &'static str {
        "nccl"
    }

    fn reason(&self) -> &str {
        &self.reason
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
        if !self.can_split {
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
        let (mut config, _name) = self.config.to_sys();
        let made = shared.communicator.split(place, &mut config);
        let made = made.and_then(|made| self.split_over(made.as_ref()).map(|()| made));
        Ok(made.map_err(|error| shared.fail(error))?.map(Seed::new))
    }

    fn abort(&self, reason: &str) {
        self.host.abort(reason);
        if !self.forked() {
            self.parts.shared.wake();
        }
    }
}

impl DeviceBackend for Nccl {
    fn device_name(&self) -> String {
        format!("cuda:{}", self.parts.device.ordinal)
    }

    fn supports(&self, op: &OpDesc) -> Result<()> {
        communicator::supports(op)
    }

    fn compares(&self) -> bool {
        self.config.checks
    }

    unsafe fn enqueue(&self, batch: DeviceBatch<'_>) -> Result<DeviceWork> {
        self.ready()?;
        let Parts { shared, device, history, .. } = &*self.parts;
        let mut history = history.lock();
        self.ready()?;
        if self.host.health().is_err() {
            return Err(shared.failure());
        }
        let _entered = device.enter()?;
        check_capture(device, batch.stream)?;
        let timeout = batch.timeout.unwrap_or(self.timeout);
        let peers = batch.steps.iter().filter_map(|step| match step {
            DeviceStep::Send { peer, .. } | DeviceStep::Receive { peer, .. } => Some(*peer),
            DeviceStep::Run { .. } => None,
        });
        let case = watch::case(history.seq, batch.ops, peers);
        let History { seq, batches } = &mut *history;
        let number = match &case {
            herald::Case::All(list) => {
                if self.config.checks {
                    let compared = self.compare(list, &batch.ops[0], *seq, timeout);
                    compared.map_err(|error| shared.fail(error))?;
                }
                seq
            }
            herald::Case::Messages(_) => batches,
        };
        let events = [Event::new(device)?, Event::new(device)?];
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
        let registered = unsafe { self.parts.shared.communicator.register(buf) }?;
        Ok(Box::new(registered))
    }

    fn alloc_device(&self, bytes: usize) -> Result<(u64, Box<dyn Any + Send + Sync>)> {
        self.ready()?;
        let device = Arc::clone(&self.parts.device);
        let entered = device.enter()?;
        let api = self.parts.shared.communicator.api();
        let memory = api.mem_alloc(bytes)?;
        drop(entered);
        let address = memory.expose_provenance() as u64;
        Ok((address, Box::new(Memory { api, device, address })))
    }

    fn stream(&self) -> Result<(DeviceStream, Box<dyn Any + Send + Sync>)> {
        let device = &self.parts.device;
        let _entered = device.enter()?;
        let made = OwnStream::new(device)?;
        Ok((made.stream(), Box::new(made)))
    }

    unsafe fn mark(&self, stream: DeviceStream) -> Result<Box<dyn Mark>> {
        let device = &self.parts.device;
        let _entered = device.enter()?;
        check_capture(device, stream)?;
        let event = Event::new(device)?;
        event.record(stream)?;
        Ok(Box::new(event))
    }

    unsafe fn copy(&self, to: DeviceBuf, from: DeviceBuf, stream: DeviceStream) -> Result<()> {
        let _entered = self.parts.device.enter()?;
        // SAFETY: the caller's promise.
        unsafe { self.parts.device.copy(to, from, stream) }
    }

    unsafe fn clear(&self, buf: DeviceBuf, stream: DeviceStream) -> Result<()> {
        let _entered = self.parts.device.enter()?;
        // SAFETY: the caller's promise.
        unsafe { self.parts.device.clear(buf, stream) }
    }
}

impl Mark for Event {
    fn reached(&self) -> Result<bool> {
        Self::reached(self)
    }

    unsafe fn order(&self, stream: DeviceStream) -> Result<()> {
        Self::order(self, stream)
    }
}

fn check_capture(device: &Device, stream: DeviceStream) -> Result<()> {
    if device.is_capturing(stream)? {
        let what = "a stream that is being captured into a graph".into();
        return Err(Error::Unsupported { backend: "nccl", what });
    }
    Ok(())
}

impl Drop for Nccl {
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
            shared.communicator.finish(Instant::now() + self.timeout.min(GOODBYE));
        }
        drop(device);
    }
}

/// Memory of `ncclMemAlloc`.
#[derive(Debug)]
struct Memory {
    api: sys::NcclApi,
    device: Arc<Device>,
    address: u64,
}

impl Drop for Memory {
    fn drop(&mut self) {
        let _entered = self.device.enter();
        let memory = std::ptr::with_exposed_provenance_mut(self.address as usize);
        // SAFETY: allocated by the same library, freed once; whoever got a view of it promised not
        // to drop this while that is in use.
        unsafe { self.api.mem_free(memory) };
    }
}
