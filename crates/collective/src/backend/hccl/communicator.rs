//! `HcclComm` behind a safe interface: which calls are allowed when, and what ends it.
//!
//! A list's collectives come in its order, the same on all ranks, and its messages behind them in
//! waves: the first to and from each peer, then the second, and so on. So two messages of one direction
//! are never in one `HcclBatchSendRecv`, and both ends of a pair are in the same wave. What a rank
//! sends itself is a copy. Nothing is called for no elements.
//!
//! The invariant: calls on one communicator come one at a time (`calls`), but for
//! `HcclGetCommAsyncError`, which is made to be asked beside them; and it is ended at most once, when
//! no call is under way and nothing of it is in a stream. One that cannot be ended so is leaked.

#![expect(unsafe_code, reason = "calls C")]

use std::any::Any;
use std::collections::HashMap;
use std::ffi::c_char;
use std::sync::Arc;
use std::time::{Duration, Instant};

use npu_sys::Status;
use npu_sys::sys::{
    AclrtStream, HcclComm, HcclCommConfig, HcclDataType, HcclReduceOp, HcclResult, HcclRootInfo,
    HcclSendRecvItem, HcclSendRecvType,
};
use parking_lot::{Mutex, MutexGuard, RwLock};

use super::npu::{Device, Memory};
use super::result::{TIMEOUT, hccl_code};
use super::{Config, mean};
use crate::backend::device::{self, Device as _, PossibleCause, pointer, unsupported};
use crate::device::{DeviceStep, DeviceStream};
use crate::{DType, Error, OpDesc, Rank, ReduceOp, Result, Verb};

/// How long an abort waits for another thread's call.
const CALL: Duration = Duration::from_secs(1);
/// How long an abort waits for the operations in the streams.
const DRAIN: Duration = Duration::from_secs(5);
/// Time between two polls.
const TICK: Duration = Duration::from_millis(1);

/// One rank's end of a communicator.
#[derive(Debug)]
pub(crate) struct Communicator {
    device: Arc<Device>,
    raw: HcclComm,
    rank: Rank,
    world: usize,
    device_abort: bool,
    /// Held in every call but those of `HcclGetCommAsyncError`.
    calls: Mutex<()>,
    /// Nothing is called on it any more; read-locked while its error is asked for.
    ended: RwLock<bool>,
}

impl Communicator {
    /// Joins; blocks until all ranks have, or HCCL gives up.
    pub(super) fn join(
        device: Arc<Device>,
        (rank, world): (Rank, usize),
        root: &HcclRootInfo,
        name: &str,
        config: &Config,
    ) -> Result<Self> {
        let (hccl, ranks, at) = (&device.tables.hccl, narrow(world)?, narrow(rank)?);
        let told = comm_config(name, config);
        let mut raw = HcclComm::NULL;
        let entered = device.enter()?;
        // SAFETY: hccl.h, `HcclCommInitRootInfoConfig`: reads an info of rank 0's and a configuration
        // of the size that it says; writes one handle; the device is current.
        let made = unsafe {
            hccl.HcclCommInitRootInfoConfig(ranks, root, at, &raw const told, &raw mut raw)
        };
        drop(entered);
        made.map_err(|error| device.tables.error(error))?;
        if raw == HcclComm::NULL {
            let function = "HcclCommInitRootInfoConfig";
            return Err(device.tables.error(npu_sys::Error::Null { function }));
        }
        let ((calls, ended), device_abort) = (Default::default(), config.device_abort);
        Ok(Self { device, raw, rank, world, device_abort, calls, ended })
    }

    /// Locks the communicator for a call; an error if it has been ended.
    fn call(&self) -> Result<MutexGuard<'_, ()>> {
        let guard = self.calls.lock();
        if *self.ended.read() {
            return Err(unsupported::<Self>("calls on a communicator that has been ended"));
        }
        Ok(guard)
    }

    fn check<T>(&self, result: npu_sys::Result<T>) -> Result<T> {
        result.map_err(|error| self.device.tables.error(error))
    }

    /// Puts the steps into the stream, with the lock held. What they need until they have ended is added to `kept`.
    ///
    /// # Safety
    ///
    /// As [`DeviceBackend::enqueue`](crate::device::DeviceBackend::enqueue).
    unsafe fn issue(
        &self,
        steps: &[DeviceStep],
        stream: DeviceStream,
        kept: &mut Vec<Memory>,
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
                    // SAFETY: the operation's output, behind it in the stream; `supports` knows the
                    // type.
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
            // SAFETY: hccl.h, `HcclBatchSendRecv`: reads so many items; not ended, no other call is
            // under way; the memory and the stream are as promised.
            self.check(unsafe { hccl.HcclBatchSendRecv(items, count, self.raw, stream) })?;
        }
        Ok(())
    }

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
                // SAFETY: hccl.h: not ended, no other call is under way; memory and stream are as promised,
                // of so many elements. Input and output may be one, here and below.
                unsafe { hccl.HcclAllReduce(from, to, count, of, by, comm, stream) }
            }
            Verb::Reduce => {
                // SAFETY: likewise.
                unsafe { hccl.HcclReduce(from, to, count, of, by, root, comm, stream) }
            }
            Verb::Broadcast => {
                // SAFETY: likewise.
                unsafe { hccl.HcclBroadcast(to, count, of, root, comm, stream) }
            }
            Verb::AllGather => {
                // SAFETY: likewise.
                unsafe { hccl.HcclAllGather(from, to, count, of, comm, stream) }
            }
            Verb::ReduceScatter => {
                // SAFETY: likewise.
                unsafe { hccl.HcclReduceScatter(from, to, count, of, by, comm, stream) }
            }
            verb => unreachable!("{verb} is made of other steps"),
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
            // SAFETY: the caller's promise; both ends of a message are of one length, as the verbs
            // check for those to oneself.
            unsafe { self.device.copy(to, from, stream) }?;
        }
        Ok(())
    }

    /// Returns HCCL's asynchronous error, if there is one.
    fn async_error(&self) -> Result<()> {
        let ended = self.ended.read();
        if *ended {
            return Ok(());
        }
        let mut found = HcclResult::SUCCESS;
        let tables = &self.device.tables;
        // SAFETY: hccl.h, `HcclGetCommAsyncError`: not ended, nor will it be while the lock is held;
        // writes one number.
        self.check(unsafe { tables.hccl.HcclGetCommAsyncError(self.raw, &raw mut found) })?;
        match found {
            HcclResult::SUCCESS => Ok(()),
            found => Err(tables.status("HcclGetCommAsyncError", Status::Hccl(found))),
        }
    }

    /// Marks it as ended; false if it was before.
    fn end(&self) -> bool {
        !std::mem::replace(&mut *self.ended.write(), true)
    }

    /// Frees it. Only after [`end`](Self::end), while no call and no operation is under way.
    fn destroy(&self) {
        let _entered = self.device.enter();
        // SAFETY: hccl.h, `HcclCommDestroy`: once, as `end` says; the callers see to the rest. Errors are ignored.
        drop(unsafe { self.device.tables.hccl.HcclCommDestroy(self.raw) });
    }
}

impl device::Communicator for Communicator {
    const BACKEND: &'static str = "hccl";
    const ABORT: &'static str = "HcclCommDestroy";
    const HELD: &'static str = ", until HCCL gives up: HCCL_EXEC_TIMEOUT says how long that takes";

    type Device = Device;
    type KeepAlive = Vec<Memory>;

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
        _go_on: &dyn Fn() -> Result<()>,
    ) -> Result<Vec<Memory>> {
        let _guard = self.call()?;
        let _entered = self.device.enter()?;
        let mut kept = Vec::new();
        // SAFETY: the caller's promise.
        match unsafe { self.issue(steps, stream, &mut kept) } {
            Ok(()) => Ok(kept),
            Err(error) => {
                // The first of the steps are in the stream, and may use it.
                std::mem::forget(kept);
                Err(error)
            }
        }
    }

    fn healthy(&self) -> Result<()> {
        self.async_error()
    }

    fn ended(&self, end: &super::npu::Event) -> Result<bool> {
        use crate::device::Mark as _;
        // A stream goes on behind an operation that has failed, of which HCCL knows before.
        Ok(end.reached()? && self.async_error().map(|()| true)?)
    }

    fn abort(&self, under_way: &dyn Fn() -> bool) -> Result<bool> {
        if !self.end() {
            return Ok(true);
        }
        // HCCL has nothing that ends a call from beside it. Once there is none, there will be none.
        let Some(guard) = self.calls.try_lock_for(CALL) else { return Ok(false) };
        drop(guard);
        let deadline = Instant::now() + DRAIN;
        if self.device_abort && under_way() {
            let (acl, timeout_ms) = (&self.device.tables.acl, DRAIN.as_millis() as u32);
            let entered = self.device.enter();
            // SAFETY: acl_rt.h, `aclrtDeviceTaskAbort`: a device of this process. What fails here, or
            // is not there, leaves the streams to themselves.
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
        // A call that takes longer keeps the communicator.
        let Some(_guard) = self.calls.try_lock_until(deadline) else { return };
        if self.end() {
            self.destroy();
        }
    }

    fn alloc(&self, bytes: usize) -> Result<(u64, Box<dyn Any + Send + Sync>)> {
        let memory = self.device.alloc(bytes)?;
        Ok((memory.address().expose_provenance() as u64, Box::new(memory)))
    }

    fn is_remote(error: &Error) -> bool {
        // HCCL_E_INTERNAL, _TCP_CONNECT, _ROCE_CONNECT, _TCP_TRANSFER, _ROCE_TRANSFER, _NETWORK,
        // _REMOTE, and a timeout, for which a rank that has died is to blame.
        matches!(hccl_code(error), Some(4 | TIMEOUT | 11..=14 | 19 | 21))
    }

    fn possible_cause(error: &Error) -> PossibleCause {
        match hccl_code(error) {
            Some(TIMEOUT) => PossibleCause::MismatchOrMissing(
                "(HCCL gave up; HCCL_EXEC_TIMEOUT says how long it waits in an operation, and \
                 HCCL_CONNECT_TIMEOUT before the first)",
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
        if self.end() {
            self.destroy();
        }
    }
}

/// Messages with others, by waves, as `HcclBatchSendRecv` has them.
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
            // Ranks of a group have passed `narrow` when it was joined.
            remote_rank: peer as u32,
        });
        *before += 1;
    }
    waves
}

/// The chips that reduce no bf16, by AscendCL's names; their successors have a number behind the letter.
const WITHOUT_BF16: [&str; 5] =
    ["Ascend910A", "Ascend910B", "Ascend910ProA", "Ascend910ProB", "Ascend910PremiumA"];

/// The operator as HCCL has it, for types that it reduces; of an average the sum.
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

/// The type as HCCL has it; those of one byte that it lacks are moved as bytes.
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

/// HCCL's options, with the group's name for its error texts.
fn comm_config(name: &str, config: &Config) -> HcclCommConfig {
    let mut told = HcclCommConfig {
        buffer_size: config.buffer_mib.unwrap_or(HcclCommConfig::NOT_SET),
        deterministic: config.deterministic.map_or(HcclCommConfig::NOT_SET, u32::from),
        ..HcclCommConfig::default()
    };
    let room = told.udi.len() - 1;
    let bytes = name.bytes().filter(|byte| byte.is_ascii_graphic()).take(room);
    for (place, byte) in told.udi.iter_mut().zip(bytes) {
        *place = byte as c_char;
    }
    told
}

/// A rank or a number of ranks as C has it.
fn narrow(number: usize) -> Result<u32> {
    let too_many = |_| Error::InvalidArgument(format!("{number} is more than HCCL can count"));
    u32::try_from(number).map_err(too_many)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::device::DeviceBuf;

    fn buf(address: u64, count: usize) -> DeviceBuf {
        // SAFETY: nothing is done with it.
        unsafe { DeviceBuf::from_raw(address, count, DType::I32) }.expect("there is room")
    }

    /// Both ends of the n-th message of a pair are in the n-th wave, whatever else is in the lists.
    #[test]
    fn a_pairs_messages_meet_in_their_waves() {
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
        let told = comm_config(&"n\0ä".repeat(300), &Config::default());
        assert_eq!((told.size, told.version), (300, 5));
        assert_eq!(
            (told.udi[0], told.udi[126], told.udi[127]),
            (b'n' as c_char, b'n' as c_char, 0)
        );
    }
}
