//! Safe wrapper of `HcclComm`.
//!
//! The collectives of a list are enqueued in list order, which is the same on all ranks. Its
//! point-to-point messages follow in waves: the first to and from each peer, then the second, and
//! so on. So one `HcclBatchSendRecv` never contains two messages to, or two from, the same peer,
//! and both ranks put a message in the same wave. A message of a rank to itself is a copy. Empty
//! operations are skipped.
//!
//! Invariant: calls on one communicator are made one at a time (`calls`), except
//! `HcclGetCommAsyncError`, which may run concurrently. It is destroyed at most once, when no call
//! is running and none of its operations is in a stream. If that cannot be ensured, it is leaked.

#![expect(unsafe_code, reason = "calls C")]

use std::any::Any;
use std::collections::HashMap;
use std::ffi::c_char;
use std::sync::Arc;
use std::time::{Duration, Instant};

use npu_sys::Status;
use npu_sys::safe::Buffer;
use npu_sys::sys::{
    AclrtStream, HcclComm, HcclCommConfig, HcclDataType, HcclReduceOp, HcclResult, HcclRootInfo,
    HcclSendRecvItem, HcclSendRecvType,
};
use parking_lot::{Mutex, MutexGuard, RwLock};

use super::mean;
use super::npu::Device;
use super::result::{TIMEOUT, hccl_code};
use crate::backend::device::{self, Device as _, PossibleCause, pointer, unsupported};
use crate::backend::device_memory::{DeviceStep, DeviceStream};
use crate::{DType, Error, OpDesc, Rank, ReduceOp, Result, Verb};

/// Time that an abort waits for another thread's call to return.
const CALL_TIMEOUT: Duration = Duration::from_secs(1);
/// Time that an abort waits for the operations in the streams to complete.
const DRAIN_TIMEOUT: Duration = Duration::from_secs(5);
/// Time between two polls.
const TICK: Duration = Duration::from_millis(1);

/// This rank's handle to an HCCL communicator.
#[derive(Debug)]
pub(crate) struct Communicator {
    device: Arc<Device>,
    raw: HcclComm,
    rank: Rank,
    world: usize,
    device_abort: bool,
    /// Held during every call except `HcclGetCommAsyncError`.
    calls: Mutex<()>,
    /// Whether later calls are refused; read-locked during `HcclGetCommAsyncError`.
    ended: RwLock<bool>,
}

impl Communicator {
    /// Joins a communicator. Blocks until all ranks have joined or HCCL times out.
    pub(super) fn join(
        device: Arc<Device>,
        (rank, world): (Rank, usize),
        root: &HcclRootInfo,
        name: &str,
        device_abort: bool,
    ) -> Result<Self> {
        let (hccl, ranks, at) = (&device.tables.hccl, narrow(world)?, narrow(rank)?);
        let hccl_config = comm_config(name);
        let mut raw = HcclComm::NULL;
        let entered = device.enter()?;
        // SAFETY: hccl.h, `HcclCommInitRootInfoConfig`: reads rank 0's root info and a
        // configuration whose `size` field is correct; writes one handle; the device is current.
        let made = unsafe {
            hccl.HcclCommInitRootInfoConfig(ranks, root, at, &raw const hccl_config, &raw mut raw)
        };
        drop(entered);
        made.map_err(|error| device.tables.error(error))?;
        if raw == HcclComm::NULL {
            let function = "HcclCommInitRootInfoConfig";
            return Err(device.tables.error(npu_sys::Error::Null { function }));
        }
        let (calls, ended) = Default::default();
        Ok(Self { device, raw, rank, world, device_abort, calls, ended })
    }

    /// Locks the communicator for a call. Fails if it has been aborted or destroyed.
    fn call(&self) -> Result<MutexGuard<'_, ()>> {
        let guard = self.calls.lock();
        if *self.ended.read() {
            return Err(unsupported::<Self>("calls on an aborted or destroyed communicator"));
        }
        Ok(guard)
    }

    fn check<T>(&self, result: npu_sys::Result<T>) -> Result<T> {
        result.map_err(|error| self.device.tables.error(error))
    }

    /// Enqueues the steps in the stream. The caller holds the lock. Adds memory that the steps need
    /// until they have completed to `kept`.
    ///
    /// # Safety
    ///
    /// As [`DeviceBackend::enqueue`](crate::device::DeviceBackend::enqueue).
    unsafe fn issue(
        &self,
        steps: &[DeviceStep],
        stream: DeviceStream,
        kept: &mut Vec<Buffer>,
    ) -> Result<()> {
        for step in steps {
            if let DeviceStep::Run { op, input, output } = *step
                && op.count > 0
            {
                // SAFETY: the caller's promise.
                unsafe { self.run(&op, (input, output), stream) }?;
                let mine = op.root.is_none_or(|root| root == self.rank);
                if op.op == Some(ReduceOp::Avg) && self.world > 1 && mine {
                    let sums = (output, op.output_count(self.world), op.dtype);
                    // SAFETY: the operation's output, after it in the stream; `supports` has
                    // checked the type.
                    kept.extend(unsafe { mean::divide(&self.device, sums, self.world, stream) }?);
                }
            }
        }
        // SAFETY: the caller's promise.
        unsafe { self.copy_own(steps, stream) }?;
        let mut waves = waves(self.rank, steps);
        for wave in &mut waves {
            let (items, count) = (wave.as_mut_ptr(), narrow(wave.len())?);
            let (hccl, stream) = (&self.device.tables.hccl, AclrtStream(stream.as_raw()));
            // SAFETY: hccl.h, `HcclBatchSendRecv`: reads `count` items; not ended, and no
            // concurrent call; memory and stream are as promised.
            self.check(unsafe { hccl.HcclBatchSendRecv(items, count, self.raw, stream) })?;
        }
        Ok(())
    }

    /// Enqueues one collective.
    ///
    /// # Safety
    ///
    /// As [`issue`](Self::issue), which calls it.
    unsafe fn run(
        &self,
        op: &OpDesc,
        (input, output): (u64, u64),
        stream: DeviceStream,
    ) -> Result<()> {
        let (hccl, comm, stream) =
            (&self.device.tables.hccl, self.raw, AclrtStream(stream.as_raw()));
        let (from, to, of) = (pointer(input), pointer(output), data_type(op.dtype));
        let (count, root) = (op.count as u64, narrow(op.root.unwrap_or(0))?);
        let by = op.op.map_or(Ok(HcclReduceOp::SUM), |by| reduce_op(op.dtype, by))?;
        self.check(match op.verb {
            Verb::AllReduce => {
                // SAFETY: hccl.h: not ended, and no concurrent call; memory, its length and the
                // stream are as promised. Input and output may be the same, here and below.
                unsafe { hccl.HcclAllReduce(from, to, count, of, by, comm, stream) }
            }
            Verb::Reduce => {
                // SAFETY: as above.
                unsafe { hccl.HcclReduce(from, to, count, of, by, root, comm, stream) }
            }
            Verb::Broadcast => {
                // SAFETY: as above.
                unsafe { hccl.HcclBroadcast(to, count, of, root, comm, stream) }
            }
            Verb::AllGather => {
                // SAFETY: as above.
                unsafe { hccl.HcclAllGather(from, to, count, of, comm, stream) }
            }
            Verb::ReduceScatter => {
                // SAFETY: as above.
                unsafe { hccl.HcclReduceScatter(from, to, count, of, by, comm, stream) }
            }
            verb => unreachable!("{verb} is translated to other steps"),
        })
    }

    /// Copies this rank's messages to itself, in order.
    ///
    /// # Safety
    ///
    /// As [`issue`](Self::issue), which calls it.
    unsafe fn copy_own(&self, steps: &[DeviceStep], stream: DeviceStream) -> Result<()> {
        let to = steps.iter().filter_map(|step| match *step {
            DeviceStep::Receive { peer, buf } if peer == self.rank && buf.count() > 0 => Some(buf),
            _ => None,
        });
        let from = steps.iter().filter_map(|step| match *step {
            DeviceStep::Send { peer, buf } if peer == self.rank && buf.count() > 0 => Some(buf),
            _ => None,
        });
        for (to, from) in to.zip(from) {
            // SAFETY: the caller's promise; the verbs check that a message of a rank to itself has
            // the same length at both ends.
            unsafe { self.device.copy(to, from, stream) }?;
        }
        Ok(())
    }

    /// Fails if HCCL reports an asynchronous error.
    fn async_error(&self) -> Result<()> {
        let ended = self.ended.read();
        if *ended {
            return Ok(());
        }
        let mut found = HcclResult::SUCCESS;
        let tables = &self.device.tables;
        // SAFETY: hccl.h, `HcclGetCommAsyncError`: not ended, and cannot be while the lock is held;
        // writes one value.
        self.check(unsafe { tables.hccl.HcclGetCommAsyncError(self.raw, &raw mut found) })?;
        match found {
            HcclResult::SUCCESS => Ok(()),
            found => Err(tables.status("HcclGetCommAsyncError", Status::Hccl(found))),
        }
    }

    /// Sets `ended`. Returns false if it was set before.
    fn mark_ended(&self) -> bool {
        !std::mem::replace(&mut *self.ended.write(), true)
    }

    /// Destroys the communicator. Only after [`mark_ended`](Self::mark_ended) has returned true,
    /// while no call is running and no operation is in a stream.
    fn destroy(&self) {
        let _entered = self.device.enter();
        // SAFETY: hccl.h, `HcclCommDestroy`: once, because `mark_ended` returns true once; the
        // callers ensure that no call is running and no operation is in a stream. Errors are
        // ignored.
        drop(unsafe { self.device.tables.hccl.HcclCommDestroy(self.raw) });
    }
}

impl device::Communicator for Communicator {
    const BACKEND: &'static str = "hccl";
    const ABORT: &'static str = "HcclCommDestroy";
    const IN_USE_UNTIL: &'static str = ", until HCCL times out after HCCL_EXEC_TIMEOUT";

    type Device = Device;
    type KeepAlive = Vec<Buffer>;

    fn supports(&self, op: &OpDesc) -> Result<()> {
        let Some(by) = op.op else { return Ok(()) };
        reduce_op(op.dtype, by)?;
        let soc = self.device.soc.as_deref();
        if op.dtype == DType::Bf16 && soc.is_some_and(|soc| WITHOUT_BF16.contains(&soc)) {
            return Err(unsupported::<Self>(format!(
                "{by} of bf16 on {}",
                soc.unwrap_or_default()
            )));
        }
        if by == ReduceOp::Avg && self.world > 1 {
            mean::available(&self.device.tables)?;
        }
        Ok(())
    }

    unsafe fn launch(
        &self,
        steps: &[DeviceStep],
        stream: DeviceStream,
        _check_health: &dyn Fn() -> Result<()>,
    ) -> Result<Vec<Buffer>> {
        let _guard = self.call()?;
        let _entered = self.device.enter()?;
        let mut kept = Vec::new();
        // SAFETY: the caller's promise.
        match unsafe { self.issue(steps, stream, &mut kept) } {
            Ok(()) => Ok(kept),
            Err(error) => {
                // The first steps are in the stream and may use the memory, so it is leaked.
                std::mem::forget(kept);
                Err(error)
            }
        }
    }

    fn healthy(&self) -> Result<()> {
        self.async_error()
    }

    fn ended(&self, end: &super::npu::Event) -> Result<bool> {
        use crate::backend::device_memory::Mark as _;
        // A stream continues after a failed operation, but HCCL reports the failure first.
        Ok(end.reached()? && self.async_error().map(|()| true)?)
    }

    fn abort(&self, under_way: &dyn Fn() -> bool) -> Result<bool> {
        if !self.mark_ended() {
            return Ok(true);
        }
        // HCCL cannot abort a running call. `ended` refuses new ones, so none is running once the
        // lock is free.
        let Some(guard) = self.calls.try_lock_for(CALL_TIMEOUT) else { return Ok(false) };
        drop(guard);
        let deadline = Instant::now() + DRAIN_TIMEOUT;
        if self.device_abort && under_way() {
            let (acl, timeout_ms) = (&self.device.tables.acl, DRAIN_TIMEOUT.as_millis() as u32);
            let entered = self.device.enter();
            // SAFETY: acl_rt.h, `aclrtDeviceTaskAbort`: a device of this process. If the function
            // fails or is missing, the streams complete or time out by themselves.
            drop(unsafe { acl.aclrtDeviceTaskAbort(self.device.index, timeout_ms) });
            drop(entered);
        }
        while under_way() {
            if Instant::now() >= deadline {
                return Ok(false);
            }
            std::thread::sleep(TICK);
        }
        self.destroy();
        Ok(true)
    }

    fn finish(&self, deadline: Instant) {
        // If another call is still running at the deadline, the communicator is leaked.
        let Some(_guard) = self.calls.try_lock_until(deadline) else { return };
        if self.mark_ended() {
            self.destroy();
        }
    }

    fn alloc(&self, bytes: usize) -> Result<(u64, Box<dyn Any + Send + Sync>)> {
        let memory = self.device.alloc(bytes)?;
        Ok((memory.address().expose_provenance() as u64, Box::new(memory)))
    }

    fn is_remote(error: &Error) -> bool {
        // HCCL_E_INTERNAL, _TCP_CONNECT, _ROCE_CONNECT, _TCP_TRANSFER, _ROCE_TRANSFER, _NETWORK,
        // _REMOTE, and a timeout, which a dead rank may have caused.
        matches!(hccl_code(error), Some(4 | TIMEOUT | 11..=14 | 19 | 21))
    }

    fn possible_cause(error: &Error) -> PossibleCause {
        match hccl_code(error) {
            Some(TIMEOUT) => PossibleCause::MismatchOrMissing(
                "(HCCL timed out; HCCL_EXEC_TIMEOUT limits the wait in an operation, and \
                 HCCL_CONNECT_TIMEOUT the wait before the first)",
            ),
            // HCCL_E_PARA, HCCL_E_REMOTE.
            Some(1 | 21) => PossibleCause::Mismatch,
            _ => PossibleCause::AsReported,
        }
    }
}

impl Drop for Communicator {
    fn drop(&mut self) {
        // Neither aborted nor finished: the group was never made, so nothing is in a stream.
        if self.mark_ended() {
            self.destroy();
        }
    }
}

/// Returns the messages with other ranks by wave, each for one `HcclBatchSendRecv`.
fn waves(rank: Rank, steps: &[DeviceStep]) -> Vec<Vec<HcclSendRecvItem>> {
    let mut waves: Vec<Vec<HcclSendRecvItem>> = Vec::new();
    let mut counts: HashMap<(bool, Rank), usize> = HashMap::new();
    for step in steps {
        let (sends, peer, buf) = match *step {
            DeviceStep::Send { peer, buf } => (true, peer, buf),
            DeviceStep::Receive { peer, buf } => (false, peer, buf),
            DeviceStep::Run { .. } => continue,
        };
        if peer == rank || buf.count() == 0 {
            continue;
        }
        let before = counts.entry((sends, peer)).or_default();
        if waves.len() == *before {
            waves.push(Vec::new());
        }
        waves[*before].push(HcclSendRecvItem {
            direction: if sends { HcclSendRecvType::SEND } else { HcclSendRecvType::RECV },
            buf: pointer(buf.address()),
            count: buf.count() as u64,
            data_type: data_type(buf.dtype()),
            // Fits: `narrow` has checked the world size.
            remote_rank: peer as u32,
        });
        *before += 1;
    }
    waves
}

/// Chips that cannot reduce bf16, by their AscendCL names. The names of their successors have a
/// digit after the letter.
const WITHOUT_BF16: [&str; 5] =
    ["Ascend910A", "Ascend910B", "Ascend910ProA", "Ascend910ProB", "Ascend910PremiumA"];

/// Returns the `HcclReduceOp`; for an average, that of a sum. Fails for types that HCCL does not
/// reduce.
fn reduce_op(of: DType, by: ReduceOp) -> Result<HcclReduceOp> {
    let known =
        matches!(of, DType::I8 | DType::I32 | DType::I64 | DType::F16 | DType::Bf16 | DType::F32);
    let found = match by {
        ReduceOp::Sum | ReduceOp::Avg => Some(HcclReduceOp::SUM),
        ReduceOp::Product if of != DType::Bf16 => Some(HcclReduceOp::PROD),
        ReduceOp::Min => Some(HcclReduceOp::MIN),
        ReduceOp::Max => Some(HcclReduceOp::MAX),
        _ => None,
    };
    found.filter(|_| known).ok_or_else(|| {
        let what = format!("{by} of {of} on device memory");
        Error::Unsupported { backend: "hccl", what }
    })
}

/// Returns the `HcclDataType`. One-byte types that HCCL lacks are sent as `UINT8`.
fn data_type(of: DType) -> HcclDataType {
    match of {
        DType::I8 => HcclDataType::INT8,
        DType::U8 | DType::Bool | DType::F8E4M3 | DType::F8E5M2 => HcclDataType::UINT8,
        DType::I16 => HcclDataType::INT16,
        DType::U16 => HcclDataType::UINT16,
        DType::U32 => HcclDataType::UINT32,
        DType::I32 => HcclDataType::INT32,
        DType::I64 => HcclDataType::INT64,
        DType::U64 => HcclDataType::UINT64,
        DType::F16 => HcclDataType::FP16,
        DType::F32 => HcclDataType::FP32,
        DType::F64 => HcclDataType::FP64,
        DType::Bf16 => HcclDataType::BFP16,
    }
}

/// Returns HCCL's configuration, with the group's name for its error texts.
fn comm_config(name: &str) -> HcclCommConfig {
    let mut hccl_config = HcclCommConfig::default();
    let room = hccl_config.udi.len() - 1;
    let bytes = name.bytes().filter(|byte| byte.is_ascii_graphic()).take(room);
    for (slot, byte) in hccl_config.udi.iter_mut().zip(bytes) {
        *slot = byte as c_char;
    }
    hccl_config
}

/// Converts a rank or a number of ranks to a `u32`.
fn narrow(number: usize) -> Result<u32> {
    let too_many = |_| Error::InvalidArgument(format!("{number} does not fit in 32 bits"));
    u32::try_from(number).map_err(too_many)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::backend::device_memory::DeviceBuf;

    fn buf(address: u64, count: usize) -> DeviceBuf {
        // SAFETY: the memory is never accessed.
        unsafe { DeviceBuf::from_raw(address, count, DType::I32) }.expect("there is room")
    }

    /// Holds on both ranks, regardless of the other steps in their lists.
    #[test]
    fn nth_message_of_a_pair_is_in_the_nth_wave() {
        let send = |peer, at| DeviceStep::Send { peer, buf: buf(at, 2) };
        let receive = |peer, at| DeviceStep::Receive { peer, buf: buf(at, 2) };
        let empty = DeviceStep::Send { peer: 1, buf: buf(0, 0) };
        let zero = [send(1, 8), receive(2, 16), send(0, 24), empty, send(1, 32)];
        let one = [receive(0, 40), receive(0, 48)];
        let addresses = |rank, steps: &[DeviceStep]| -> Vec<Vec<usize>> {
            let of = |wave: &Vec<HcclSendRecvItem>| wave.iter().map(|m| m.buf.addr()).collect();
            waves(rank, steps).iter().map(of).collect()
        };
        assert_eq!(addresses(0, &zero), [vec![8, 16], vec![32]]);
        assert_eq!(addresses(1, &one), [[40], [48]]);
        assert!(waves(0, &[send(0, 8)]).is_empty());
    }

    #[test]
    fn a_groups_name_fits_and_is_a_c_string() {
        let config = comm_config(&"n\0ä".repeat(300));
        assert_eq!((config.size, config.version), (300, 5));
        assert_eq!(
            (config.udi[0], config.udi[126], config.udi[127]),
            (b'n' as c_char, b'n' as c_char, 0)
        );
    }
}
