//! FFI declarations of `nccl.h` and of the required parts of `cuda.h`.
//!
//! Checked against `nccl.h` of NCCL 2.30.7. Every driver since CUDA 11.4 has the CUDA functions. C
//! enums are transparent integers, because a newer library may return a value that is not declared
//! here.

use std::ffi::{c_char, c_int, c_uchar, c_uint, c_void};

use super::loader::table;
use super::result::lacks;

/// `ncclComm_t`.
pub(super) type Comm = *mut c_void;
/// `CUcontext`.
pub(super) type Context = *mut c_void;
/// `CUstream`.
pub(super) type Stream = *mut c_void;
/// `CUevent`.
pub(super) type Event = *mut c_void;

/// `ncclResult_t`.
#[repr(transparent)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct NcclResult(pub(super) c_int);

impl NcclResult {
    pub(super) const SUCCESS: Self = Self(0);
    pub(super) const IN_PROGRESS: Self = Self(7);

    /// Returns its name in the header.
    pub(super) fn name(self) -> &'static str {
        match self.0 {
            0 => "ncclSuccess",
            1 => "ncclUnhandledCudaError",
            2 => "ncclSystemError",
            3 => "ncclInternalError",
            4 => "ncclInvalidArgument",
            5 => "ncclInvalidUsage",
            6 => "ncclRemoteError",
            7 => "ncclInProgress",
            8 => "ncclTimeout",
            _ => "ncclResult_t",
        }
    }
}

/// `CUresult`.
#[repr(transparent)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct CudaResult(pub(super) c_int);

impl CudaResult {
    pub(super) const SUCCESS: Self = Self(0);
    /// `CUDA_ERROR_NOT_READY`: the event has not been reached.
    pub(super) const NOT_READY: Self = Self(600);
}

/// `ncclDataType_t`.
#[repr(transparent)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct DataType(pub(super) c_int);

/// `ncclRedOp_t`.
#[repr(transparent)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct RedOp(pub(super) c_int);

impl RedOp {
    pub(super) const SUM: Self = Self(0);
    pub(super) const PROD: Self = Self(1);
    pub(super) const MAX: Self = Self(2);
    pub(super) const MIN: Self = Self(3);
    pub(super) const AVG: Self = Self(4);
}

/// `ncclScalarHostImmediate`: the scalar is read before the call returns.
pub(super) const SCALAR_HOST: c_int = 1;
/// `NCCL_SPLIT_NOCOLOR`.
pub(super) const NO_COLOR: c_int = -1;
/// `NCCL_CONFIG_UNDEF_INT`.
const UNDEFINED: c_int = c_int::MIN;
/// `CU_EVENT_DISABLE_TIMING`.
pub(super) const NO_TIMING: c_uint = 2;
/// `CU_STREAM_NON_BLOCKING`: does not wait for the default stream.
pub(super) const NON_BLOCKING: c_uint = 1;
/// `CU_STREAM_CAPTURE_MODE_RELAXED`.
pub(super) const CAPTURE_RELAXED: c_int = 2;

/// `ncclUniqueId`.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub(super) struct UniqueId(pub(super) [u8; 128]);

/// `ncclConfig_t` of NCCL 2.18. Later versions read `size` bytes and use their defaults for the
/// rest.
#[repr(C)]
#[derive(Debug)]
pub(super) struct Config {
    size: usize,
    magic: c_uint,
    version: c_uint,
    blocking: c_int,
    cga_cluster_size: c_int,
    min_ctas: c_int,
    max_ctas: c_int,
    net_name: *const c_char,
    split_share: c_int,
}

impl Config {
    /// `NCCL_CONFIG_INITIALIZER`, but non-blocking.
    pub(super) const NON_BLOCKING: Self = Self {
        size: size_of::<Self>(),
        magic: 0xcafe_beef,
        version: 21801,
        blocking: 0,
        cga_cluster_size: UNDEFINED,
        min_ctas: UNDEFINED,
        max_ctas: UNDEFINED,
        net_name: std::ptr::null(),
        split_share: 0,
    };
}

table! {
    /// Functions of NCCL. Those of 2.19 are required, later ones are optional.
    NcclApi: NcclResult {
        fn ncclGetVersion(version: *mut c_int);
        fn ncclGetUniqueId(id: *mut UniqueId);
        fn ncclCommInitRankConfig(
            comm: *mut Comm, world: c_int, id: UniqueId, rank: c_int, config: *mut Config
        );
        fn ncclCommFinalize(comm: Comm);
        fn ncclCommDestroy(comm: Comm);
        fn ncclCommAbort(comm: Comm);
        fn ncclCommGetAsyncError(comm: Comm, state: *mut NcclResult);
        fn ncclGroupStart();
        fn ncclGroupEnd();
        fn ncclAllReduce(
            from: *const c_void, to: *mut c_void, count: usize, of: DataType, by: RedOp,
            comm: Comm, stream: Stream
        );
        fn ncclReduce(
            from: *const c_void, to: *mut c_void, count: usize, of: DataType, by: RedOp,
            root: c_int, comm: Comm, stream: Stream
        );
        fn ncclBroadcast(
            from: *const c_void, to: *mut c_void, count: usize, of: DataType, root: c_int,
            comm: Comm, stream: Stream
        );
        fn ncclAllGather(
            from: *const c_void, to: *mut c_void, count: usize, of: DataType,
            comm: Comm, stream: Stream
        );
        fn ncclReduceScatter(
            from: *const c_void, to: *mut c_void, count: usize, of: DataType, by: RedOp,
            comm: Comm, stream: Stream
        );
        fn ncclSend(
            from: *const c_void, count: usize, of: DataType, peer: c_int, comm: Comm, stream: Stream
        );
        fn ncclRecv(
            to: *mut c_void, count: usize, of: DataType, peer: c_int, comm: Comm, stream: Stream
        );
        fn ncclRedOpCreatePreMulSum(
            made: *mut RedOp, scalar: *mut c_void, of: DataType, residence: c_int, comm: Comm
        );
        fn ncclRedOpDestroy(op: RedOp, comm: Comm);
        fn ncclCommSplit(
            comm: Comm, color: c_int, key: c_int, made: *mut Comm, config: *mut Config
        );
        fn ncclMemAlloc(memory: *mut *mut c_void, bytes: usize);
        fn ncclMemFree(memory: *mut c_void);
        fn ncclCommRegister(
            comm: Comm, memory: *mut c_void, bytes: usize, handle: *mut *mut c_void
        );
        fn ncclCommDeregister(comm: Comm, handle: *mut c_void);
    } optional {
        fn ncclCommInitRankScalable(
            comm: *mut Comm, world: c_int, rank: c_int, ids: c_int, id: *mut UniqueId,
            config: *mut Config
        ) since "2.23";
    } unchecked {
        fn ncclGetErrorString(NcclResult) -> *const c_char;
        fn ncclGetLastError(Comm) -> *const c_char;
    }
}

table! {
    /// Functions of the CUDA driver.
    CudaApi: CudaResult {
        fn cuInit(flags: c_uint);
        fn cuDeviceGetCount(count: *mut c_int);
        fn cuDeviceGet(device: *mut c_int, ordinal: c_int);
        fn cuDeviceGetUuid_v2(uuid: *mut [u8; 16], device: c_int);
        fn cuDevicePrimaryCtxRetain(context: *mut Context, device: c_int);
        fn cuDevicePrimaryCtxRelease_v2(device: c_int);
        fn cuCtxPushCurrent_v2(context: Context);
        fn cuCtxPopCurrent_v2(context: *mut Context);
        fn cuEventCreate(event: *mut Event, flags: c_uint);
        fn cuEventRecord(event: Event, stream: Stream);
        fn cuEventDestroy_v2(event: Event);
        fn cuStreamWaitEvent(stream: Stream, event: Event, flags: c_uint);
        fn cuStreamIsCapturing(stream: Stream, status: *mut c_int);
        fn cuThreadExchangeStreamCaptureMode(mode: *mut c_int);
        fn cuStreamCreate(stream: *mut Stream, flags: c_uint);
        fn cuStreamDestroy_v2(stream: Stream);
        fn cuStreamSynchronize(stream: Stream);
        fn cuMemcpyHtoD_v2(to: u64, from: *const c_void, bytes: usize);
        fn cuMemcpyDtoH_v2(to: *mut c_void, from: u64, bytes: usize);
        fn cuMemcpyDtoDAsync_v2(to: u64, from: u64, bytes: usize, stream: Stream);
        fn cuMemsetD8Async(at: u64, value: c_uchar, bytes: usize, stream: Stream);
    } optional {
    } unchecked {
        fn cuEventQuery(Event) -> CudaResult;
        fn cuGetErrorName(CudaResult, *mut *const c_char) -> CudaResult;
    }
}
