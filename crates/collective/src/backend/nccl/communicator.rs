//! Safe wrapper of `ncclComm_t`.
//!
//! Every communicator is non-blocking: a call returns at once and may leave the communicator *in
//! progress*. It accepts no other call until [`ready`](Communicator::ready) returns true.
//!
//! Invariant: calls on one communicator are made one at a time (`calls`). It is aborted or
//! destroyed exactly once, after which nothing is called on it. The one exception is
//! `ncclCommAbort`, which NCCL allows while another call hangs.

#![expect(unsafe_code, reason = "calls C")]

use std::any::Any;
use std::ffi::{c_int, c_void};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use half::{bf16, f16};
use parking_lot::{Mutex, MutexGuard};

use super::cuda::Device;
use super::sys::{
    Comm, Config, DataType, NO_COLOR, NcclApi, NcclResult, RedOp, SCALAR_HOST, UniqueId,
};
use crate::backend::device::{self, Device as _, pointer, unsupported};
use crate::backend::device_memory::{DeviceBuf, DeviceStep, DeviceStream, OnDrop};
use crate::{DType, Error, OpDesc, Rank, ReduceOp, Result, Verb};

/// Time that an abort waits for another thread's call to return; non-blocking calls are short.
const CALL_TIMEOUT: Duration = Duration::from_secs(1);
/// How long a launch polls without a sleep. NCCL's own thread takes some tens of microseconds for
/// it, so the first poll is never ready, and a sleep would take longer than the rest.
const SPIN: Duration = Duration::from_micros(200);
/// Time between two polls of a communicator in progress.
const TICK: Duration = Duration::from_micros(200);

/// This rank's handle to an NCCL communicator.
#[derive(Debug)]
pub(crate) struct Communicator {
    api: NcclApi,
    raw: Comm,
    device: Arc<Device>,
    /// Held during every call; an abort may proceed without it.
    calls: Mutex<()>,
    /// Aborted or destroyed, or about to be.
    ended: AtomicBool,
}

// SAFETY: NCCL does not bind communicators to threads, and `calls` admits one thread at a time.
unsafe impl Send for Communicator {}
// SAFETY: as above.
unsafe impl Sync for Communicator {}

impl Communicator {
    /// Starts the init of a communicator: `ncclCommInitRankConfig` for one id,
    /// `ncclCommInitRankScalable` for several. The communicator is in progress afterwards.
    pub(super) fn join(
        api: NcclApi,
        device: Arc<Device>,
        (rank, world): (Rank, usize),
        ids: &mut [UniqueId],
    ) -> Result<Self> {
        let mut config = Config::NON_BLOCKING;
        let config: *mut Config = &raw mut config;
        let entered = device.enter()?;
        let (rank, world, count) = (narrow(rank)?, narrow(world)?, narrow(ids.len())?);
        let mut raw = std::ptr::null_mut();
        let (called, during) = match ids {
            [id] => {
                // SAFETY: writes one handle; `config` is a valid `ncclConfig_t`, and the device is
                // current.
                let called =
                    unsafe { api.ncclCommInitRankConfig(&raw mut raw, world, *id, rank, config) };
                (called, "ncclCommInitRankConfig")
            }
            ids => {
                let (made, ids) = (&raw mut raw, ids.as_mut_ptr());
                // SAFETY: as above; reads `count` ids.
                let called =
                    unsafe { api.ncclCommInitRankScalable(made, world, rank, count, ids, config) };
                (called, "ncclCommInitRankScalable")
            }
        };
        drop(entered);
        if raw.is_null() {
            called?;
            return Err(null_communicator(during));
        }
        let made = Self::new(api, raw, device);
        called.map(|()| made)
    }

    fn new(api: NcclApi, raw: Comm, device: Arc<Device>) -> Self {
        let (calls, ended) = (Mutex::default(), AtomicBool::new(false));
        Self { api, raw, device, calls, ended }
    }

    /// Locks the communicator for a call. Fails if it has been aborted or destroyed.
    fn call(&self) -> Result<MutexGuard<'_, ()>> {
        let guard = self.calls.lock();
        self.not_ended().map(|()| guard)
    }

    fn not_ended(&self) -> Result<()> {
        // Acquire: pairs with the swap in `mark_ended`.
        if self.ended.load(Ordering::Acquire) {
            return Err(unsupported::<Self>("calls on an aborted or destroyed communicator"));
        }
        Ok(())
    }

    /// Returns whether the last call has completed. Fails if it failed, or if the communicator has
    /// failed since.
    pub(super) fn ready(&self) -> Result<bool> {
        let _guard = self.call()?;
        self.state()
    }

    /// [`ready`](Self::ready), for callers that hold the lock.
    fn state(&self) -> Result<bool> {
        let mut state = NcclResult::SUCCESS;
        // SAFETY: not ended, and no concurrent call; writes one status.
        unsafe { self.api.ncclCommGetAsyncError(self.raw, &raw mut state) }?;
        self.api.check(state, "ncclCommGetAsyncError")?;
        Ok(state == NcclResult::SUCCESS)
    }

    /// Enqueues the steps as one NCCL group. The communicator must be ready, and is in progress
    /// afterwards. Returns the operators created for the group; [destroy](Self::destroy_operators)
    /// them once it is ready again.
    ///
    /// # Safety
    ///
    /// As [`DeviceBackend::enqueue`](crate::device::DeviceBackend::enqueue).
    unsafe fn start(&self, steps: &[DeviceStep], stream: DeviceStream) -> Result<Operators> {
        let _guard = self.call()?;
        let _entered = self.device.enter()?;
        let mut operators = Operators(Vec::new());
        let made = steps.iter().try_for_each(|step| match step {
            DeviceStep::Run { op, .. } => self.prepare(op, &mut operators),
            _ => Ok(()),
        });
        // SAFETY: starts a group on this thread, which `ncclGroupEnd` ends below.
        let opened = made.and_then(|()| unsafe { self.api.ncclGroupStart() });
        if let Err(error) = opened {
            self.destroy_operators(operators);
            return Err(error);
        }
        let issued = steps.iter().try_for_each(|step| {
            // SAFETY: the caller's promise.
            unsafe { self.issue(step, stream, &operators) }
        });
        // SAFETY: ends the group started above, even after a failure.
        let closed = unsafe { self.api.ncclGroupEnd() };
        issued.and(closed).map(|()| operators)
    }

    /// Creates the `PreMulSum` operator that an operation needs, unless it needs none or the
    /// operator exists.
    fn prepare(&self, op: &OpDesc, operators: &mut Operators) -> Result<()> {
        let Some(reduce @ ReduceOp::PreMulSum(factor)) = op.op else { return Ok(()) };
        if operators.find(op.dtype, reduce).is_some() {
            return Ok(());
        }
        let mut scalar = scalar(op.dtype, factor.get());
        let mut made = RedOp::SUM;
        let data_type = data_type(op.dtype);
        let from = scalar.as_mut_ptr().cast::<c_void>();
        // SAFETY: not ended, and no concurrent call; reads one value of the type from the first
        // bytes of `scalar` before it returns, and writes one operator.
        unsafe {
            self.api.ncclRedOpCreatePreMulSum(&raw mut made, from, data_type, SCALAR_HOST, self.raw)
        }?;
        operators.0.push((op.dtype, reduce, made));
        Ok(())
    }

    /// Issues one step of the group.
    ///
    /// # Safety
    ///
    /// As [`start`](Self::start), which calls it.
    unsafe fn issue(
        &self,
        step: &DeviceStep,
        stream: DeviceStream,
        operators: &Operators,
    ) -> Result<()> {
        let (comm, stream, api) = (self.raw, stream.as_raw(), &self.api);
        match *step {
            DeviceStep::Send { peer, buf } => {
                let (from, of, to) =
                    (pointer(buf.address()), data_type(buf.dtype()), narrow(peer)?);
                // SAFETY: not ended, and no concurrent call; memory and stream are as promised.
                unsafe { api.ncclSend(from, buf.count(), of, to, comm, stream) }
            }
            DeviceStep::Receive { peer, buf } => {
                let (to, of, from) =
                    (pointer(buf.address()), data_type(buf.dtype()), narrow(peer)?);
                // SAFETY: as above.
                unsafe { api.ncclRecv(to, buf.count(), of, from, comm, stream) }
            }
            DeviceStep::Run { op, input, output } => {
                let (from, to) = (pointer(input).cast_const(), pointer(output));
                let (count, of) = (op.count, data_type(op.dtype));
                let by = op.op.map(|reduce| red_op(op.dtype, reduce, operators)).transpose()?;
                let by = by.unwrap_or(RedOp::SUM);
                let root = narrow(op.root.unwrap_or(0))?;
                match op.verb {
                    Verb::AllReduce => {
                        // SAFETY: as above; equal pointers mean in place, here and below.
                        unsafe { api.ncclAllReduce(from, to, count, of, by, comm, stream) }
                    }
                    Verb::Reduce => {
                        // SAFETY: as above.
                        unsafe { api.ncclReduce(from, to, count, of, by, root, comm, stream) }
                    }
                    Verb::Broadcast => {
                        // SAFETY: as above.
                        unsafe { api.ncclBroadcast(from, to, count, of, root, comm, stream) }
                    }
                    Verb::AllGather => {
                        // SAFETY: as above.
                        unsafe { api.ncclAllGather(from, to, count, of, comm, stream) }
                    }
                    Verb::ReduceScatter => {
                        // SAFETY: as above.
                        unsafe { api.ncclReduceScatter(from, to, count, of, by, comm, stream) }
                    }
                    verb => unreachable!("{verb} is translated to other steps"),
                }
            }
        }
    }

    /// Destroys the operators of a completed launch. The caller holds the lock.
    fn destroy_operators(&self, operators: Operators) {
        for (_, _, made) in operators.0 {
            // SAFETY: not ended, and no concurrent call; created for this communicator, destroyed
            // once. After a failure NCCL leaks a few bytes.
            let _ = unsafe { self.api.ncclRedOpDestroy(made, self.raw) };
        }
    }

    /// Calls `ncclCommSplit` with `(color, key)`, or without a color. Both communicators are in
    /// progress afterwards.
    fn begin_split(&self, color_and_key: Option<(Rank, Rank)>) -> Result<Option<Self>> {
        let (color, key) = match color_and_key {
            Some((color, key)) => (narrow(color)?, narrow(key)?),
            None => (NO_COLOR, 0),
        };
        let mut config = Config::NON_BLOCKING;
        let _guard = self.call()?;
        let _entered = self.device.enter()?;
        let mut raw = std::ptr::null_mut();
        // SAFETY: not ended, and no concurrent call; writes one handle; `config` is a valid
        // `ncclConfig_t`.
        let called =
            unsafe { self.api.ncclCommSplit(self.raw, color, key, &raw mut raw, &raw mut config) };
        let made = (!raw.is_null()).then(|| Self::new(self.api, raw, Arc::clone(&self.device)));
        called?;
        match color_and_key {
            Some(_) if made.is_none() => Err(null_communicator("ncclCommSplit")),
            _ => Ok(made),
        }
    }

    /// Aborts the communicator. Returns `None` if it was aborted or destroyed before.
    fn abort_once(&self) -> Option<Result<()>> {
        if !self.mark_ended() {
            return None;
        }
        // If another call hangs, proceed without the lock: the abort ends that call.
        let _guard = self.calls.try_lock_for(CALL_TIMEOUT);
        let _entered = self.device.enter();
        // SAFETY: `mark_ended` succeeds once, so this is the only abort. Either no call is running,
        // or one hangs, during which NCCL allows an abort.
        Some(unsafe { self.api.ncclCommAbort(self.raw) })
    }

    /// Sets `ended`. Returns false if it was set before.
    fn mark_ended(&self) -> bool {
        // AcqRel: pairs with the load in `not_ended`, which precedes every call.
        !self.ended.swap(true, Ordering::AcqRel)
    }
}

impl device::Communicator for Communicator {
    const BACKEND: &'static str = "nccl";
    const ABORT: &'static str = "ncclCommAbort";
    const IN_USE_UNTIL: &'static str = "";

    type Device = Device;
    type KeepAlive = ();

    fn supports(&self, op: &OpDesc) -> Result<()> {
        use ReduceOp::{BitAnd, BitOr, BitXor};
        let Some(by) = op.op else { return Ok(()) };
        let moved_only = matches!(op.dtype, DType::I16 | DType::U16);
        if moved_only || matches!(by, BitAnd | BitOr | BitXor) {
            return Err(unsupported::<Self>(format!("{by} of {} on device memory", op.dtype)));
        }
        Ok(())
    }

    unsafe fn launch(
        &self,
        steps: &[DeviceStep],
        stream: DeviceStream,
        check_health: &dyn Fn() -> Result<()>,
    ) -> Result<()> {
        // SAFETY: the caller's promise.
        let operators = unsafe { self.start(steps, stream) }?;
        let started = Instant::now();
        while !self.ready()? {
            if started.elapsed() < SPIN {
                std::hint::spin_loop();
            } else {
                check_health()?;
            }
        }
        if !operators.0.is_empty() {
            let _guard = self.call()?;
            self.destroy_operators(operators);
        }
        Ok(())
    }

    fn healthy(&self) -> Result<()> {
        // A call is running and may hang: treat the communicator as healthy.
        let Some(_guard) = self.calls.try_lock() else { return Ok(()) };
        self.not_ended()?;
        self.state().map(drop)
    }

    fn split(
        &self,
        color_and_key: Option<(Rank, Rank)>,
        deadline: Instant,
        check_health: &dyn Fn() -> Result<()>,
    ) -> Result<Option<Self>> {
        let made = self.begin_split(color_and_key)?;
        while !(self.ready()? && made.as_ref().map_or(Ok(true), Self::ready)?) {
            check_health()?;
            if Instant::now() >= deadline {
                let (name, text) = ("ncclInProgress".into(), "ranks did not join in time".into());
                let during = "ncclCommSplit".into();
                return Err(Error::Backend { backend: "nccl", during, name, code: 7, text });
            }
        }
        Ok(made)
    }

    fn abort(&self, _under_way: &dyn Fn() -> bool) -> Result<bool> {
        self.abort_once().unwrap_or(Ok(())).map(|()| true)
    }

    fn finish(&self, deadline: Instant) {
        let finalize = || {
            let _guard = self.call()?;
            let _entered = self.device.enter()?;
            // SAFETY: not ended, and no concurrent call.
            unsafe { self.api.ncclCommFinalize(self.raw) }
        };
        let mut over = finalize().and_then(|()| self.ready());
        while matches!(over, Ok(false)) && Instant::now() < deadline {
            std::thread::sleep(TICK);
            over = self.ready();
        }
        if !matches!(over, Ok(true)) {
            drop(self.abort_once());
            return;
        }
        let _guard = self.calls.lock();
        if !self.mark_ended() {
            return;
        }
        let _entered = self.device.enter();
        // SAFETY: `mark_ended` succeeds once, and no concurrent call; finalised above, so this does
        // not block. Errors are ignored.
        let _ = unsafe { self.api.ncclCommDestroy(self.raw) };
    }

    unsafe fn register(self: &Arc<Self>, buf: DeviceBuf) -> Result<Box<dyn Any + Send + Sync>> {
        let _guard = self.call()?;
        let _entered = self.device.enter()?;
        let mut handle = std::ptr::null_mut();
        // SAFETY: not ended, and no concurrent call; the memory is as promised; writes one handle.
        unsafe {
            let memory = pointer(buf.address());
            self.api.ncclCommRegister(self.raw, memory, buf.bytes(), &raw mut handle)
        }?;
        let (communicator, handle) = (Arc::clone(self), handle.expose_provenance() as u64);
        Ok(Box::new(OnDrop(move || {
            // An abort or a destroy has ended the registration already.
            let Ok(_guard) = communicator.call() else { return };
            let _entered = communicator.device.enter();
            let (api, raw) = (&communicator.api, communicator.raw);
            // SAFETY: not ended, and no concurrent call; registered above, deregistered once.
            // Errors are ignored.
            let _ = unsafe { api.ncclCommDeregister(raw, pointer(handle)) };
        })))
    }

    fn alloc(&self, bytes: usize) -> Result<(u64, Box<dyn Any + Send + Sync>)> {
        let mut memory = std::ptr::null_mut();
        // SAFETY: writes one pointer; the device is current.
        unsafe { self.api.ncclMemAlloc(&raw mut memory, bytes) }?;
        let address = memory.expose_provenance() as u64;
        let (api, device) = (self.api, Arc::clone(&self.device));
        let free = OnDrop(move || {
            let _entered = device.enter();
            // SAFETY: allocated by the same library, freed once; `DeviceMemory::as_buf` requires
            // that this is not dropped while a view is in use. Errors are ignored.
            let _ = unsafe { api.ncclMemFree(pointer(address)) };
        });
        Ok((address, Box::new(free)))
    }

    fn is_remote(error: &Error) -> bool {
        // ncclSystemError, ncclInternalError, ncclRemoteError.
        matches!(error, Error::Backend { code: 2 | 3 | 6, backend: "nccl", .. })
    }
}

impl Drop for Communicator {
    fn drop(&mut self) {
        drop(self.abort_once());
    }
}

/// `PreMulSum` operators created for one launch.
#[derive(Debug)]
struct Operators(Vec<(DType, ReduceOp, RedOp)>);

impl Operators {
    fn find(&self, dtype: DType, reduce: ReduceOp) -> Option<RedOp> {
        let found = self.0.iter().find(|(of, by, _)| (*of, *by) == (dtype, reduce));
        found.map(|&(_, _, made)| made)
    }
}

fn red_op(dtype: DType, reduce: ReduceOp, operators: &Operators) -> Result<RedOp> {
    Ok(match reduce {
        ReduceOp::Sum => RedOp::SUM,
        ReduceOp::Avg => RedOp::AVG,
        ReduceOp::Product => RedOp::PROD,
        ReduceOp::Min => RedOp::MIN,
        ReduceOp::Max => RedOp::MAX,
        ReduceOp::PreMulSum(_) => operators.find(dtype, reduce).expect("created before the group"),
        _ => return Err(Error::Unsupported { backend: "nccl", what: reduce.to_string() }),
    })
}

/// Returns the `ncclDataType_t`. A type that NCCL or its older versions lack is sent as another of
/// the same size.
fn data_type(dtype: DType) -> DataType {
    DataType(match dtype {
        DType::I8 => 0,
        DType::U8 | DType::Bool | DType::F8E4M3 | DType::F8E5M2 => 1,
        DType::I32 => 2,
        DType::U32 => 3,
        DType::I64 => 4,
        DType::U64 => 5,
        DType::F16 | DType::I16 | DType::U16 => 6,
        DType::F32 => 7,
        DType::F64 => 8,
        DType::Bf16 => 9,
    })
}

/// Returns the factor as a value of the type, in the first bytes.
fn scalar(dtype: DType, factor: f64) -> [u64; 1] {
    [match dtype {
        DType::F16 => f16::from_f32(factor as f32).to_bits().into(),
        DType::Bf16 => bf16::from_f32(factor as f32).to_bits().into(),
        DType::F32 => (factor as f32).to_bits().into(),
        _ => factor.to_bits(),
    }
    .to_le()]
}

/// Converts a rank or a number of ranks to a C `int`.
fn narrow(number: usize) -> Result<c_int> {
    let too_many = |_| Error::InvalidArgument(format!("{number} does not fit in a C `int`"));
    c_int::try_from(number).map_err(too_many)
}

/// Returns the error for a call that reported success but returned no communicator.
fn null_communicator(during: &str) -> Error {
    let (name, text) = ("ncclSuccess".into(), "NCCL returned a null communicator".into());
    Error::Backend { backend: "nccl", during: during.into(), name, code: 0, text }
}
