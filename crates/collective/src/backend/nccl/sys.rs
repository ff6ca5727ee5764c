//! Declarations of `nccl.h` and of those parts of `cuda.h` that are needed, nothing else.
//!
//! Compared with `nccl.h` of NCCL 2.30.7; CUDA's are those of every driver since CUDA 11. Enumerations
//! of C are transparent integers, because a newer library may give a number that this file does not
//! know.

use std::ffi::{c_char, c_int, c_uchar, c_uint, c_void};

use super::loader::table;

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

    /// Its name in the header.
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
    /// An event that has not been reached.
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
pub(super) const UNDEFINED: c_int = c_int::MIN;
/// `CU_EVENT_DISABLE_TIMING`.
pub(super) const NO_TIMING: c_uint = 2;
/// `CU_STREAM_NON_BLOCKING`: does not wait for the default stream.
pub(super) const NON_BLOCKING: c_uint = 1;

/// `ncclUniqueId`.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub(super) struct UniqueId(pub(super) [u8; 128]);

/// `ncclConfig_t` as far as NCCL 2.18 had it: later versions read as many bytes as `size` says and
/// take their defaults for the rest.
#[repr(C)]
#[derive(Debug)]
pub(super) struct Config {
    pub(super) size: usize,
    pub(super) magic: c_uint,
    pub(super) version: c_uint,
    pub(super) blocking: c_int,
    pub(super) cga_cluster_size: c_int,
    pub(super) min_ctas: c_int,
    pub(super) max_ctas: c_int,
    pub(super) net_name: *const c_char,
    pub(super) split_share: c_int,
}

impl Config {
    /// `NCCL_CONFIG_INITIALIZER`, but that no call blocks.
    pub(super) const fn new() -> Self {
        Self {
            size: size_of::<Self>(),
            magic: 0xcafe_beef,
            version: 21801,
            blocking: 0,
            cga_cluster_size: UNDEFINED,
            min_ctas: UNDEFINED,
            max_ctas: UNDEFINED,
            net_name: std::ptr::null(),
            split_share: 0,
        }
    }
}

type Moved =
    unsafe extern "C" fn(*const c_void, *mut c_void, usize, DataType, Comm, Stream) -> NcclResult;
type Reduced = unsafe extern "C" fn(
    *const c_void,
    *mut c_void,
    usize,
    DataType,
    RedOp,
    Comm,
    Stream,
) -> NcclResult;
type Rooted = unsafe extern "C" fn(
    *const c_void,
    *mut c_void,
    usize,
    DataType,
    RedOp,
    c_int,
    Comm,
    Stream,
) -> NcclResult;
type Broadcast = unsafe extern "C" fn(
    *const c_void,
    *mut c_void,
    usize,
    DataType,
    c_int,
    Comm,
    Stream,
) -> NcclResult;
type Sent = unsafe extern "C" fn(*const c_void, usize, DataType, c_int, Comm, Stream) -> NcclResult;
type Received =
    unsafe extern "C" fn(*mut c_void, usize, DataType, c_int, Comm, Stream) -> NcclResult;
type InitRank = unsafe extern "C" fn(*mut Comm, c_int, UniqueId, c_int, *mut Config) -> NcclResult;
type InitScalable =
    unsafe extern "C" fn(*mut Comm, c_int, c_int, c_int, *mut UniqueId, *mut Config) -> NcclResult;
type Split = unsafe extern "C" fn(Comm, c_int, c_int, *mut Comm, *mut Config) -> NcclResult;
type PreMulSum = unsafe extern "C" fn(*mut RedOp, *mut c_void, DataType, c_int, Comm) -> NcclResult;
type OnComm = unsafe extern "C" fn(Comm) -> NcclResult;
type Plain = unsafe extern "C" fn() -> NcclResult;

table! {
    /// The functions of NCCL: required since 2.14, optional what came later.
    NcclApi {
        version = "ncclGetVersion": unsafe extern "C" fn(*mut c_int) -> NcclResult,
        unique_id = "ncclGetUniqueId": unsafe extern "C" fn(*mut UniqueId) -> NcclResult,
        init_rank = "ncclCommInitRankConfig": InitRank,
        finalize = "ncclCommFinalize": OnComm,
        destroy = "ncclCommDestroy": OnComm,
        abort = "ncclCommAbort": OnComm,
        async_error = "ncclCommGetAsyncError":
            unsafe extern "C" fn(Comm, *mut NcclResult) -> NcclResult,
        error_string = "ncclGetErrorString": unsafe extern "C" fn(NcclResult) -> *const c_char,
        last_error = "ncclGetLastError": unsafe extern "C" fn(Comm) -> *const c_char,
        group_start = "ncclGroupStart": Plain,
        group_end = "ncclGroupEnd": Plain,
        all_reduce = "ncclAllReduce": Reduced,
        reduce = "ncclReduce": Rooted,
        broadcast = "ncclBroadcast": Broadcast,
        all_gather = "ncclAllGather": Moved,
        reduce_scatter = "ncclReduceScatter": Reduced,
        send = "ncclSend": Sent,
        recv = "ncclRecv": Received,
        pre_mul_sum = "ncclRedOpCreatePreMulSum": PreMulSum,
        red_op_destroy = "ncclRedOpDestroy": unsafe extern "C" fn(RedOp, Comm) -> NcclResult,
    } optional {
        split = "ncclCommSplit": Split,
        init_scalable = "ncclCommInitRankScalable": InitScalable,
        register = "ncclCommRegister":
            unsafe extern "C" fn(Comm, *mut c_void, usize, *mut *mut c_void) -> NcclResult,
        deregister = "ncclCommDeregister": unsafe extern "C" fn(Comm, *mut c_void) -> NcclResult,
        mem_alloc = "ncclMemAlloc": unsafe extern "C" fn(*mut *mut c_void, usize) -> NcclResult,
        mem_free = "ncclMemFree": unsafe extern "C" fn(*mut c_void) -> NcclResult,
    }
}

table! {
    /// The functions of CUDA's driver.
    CudaApi {
        init = "cuInit": unsafe extern "C" fn(c_uint) -> CudaResult,
        device_count = "cuDeviceGetCount": unsafe extern "C" fn(*mut c_int) -> CudaResult,
        device = "cuDeviceGet": unsafe extern "C" fn(*mut c_int, c_int) -> CudaResult,
        retain = "cuDevicePrimaryCtxRetain":
            unsafe extern "C" fn(*mut Context, c_int) -> CudaResult,
        release = "cuDevicePrimaryCtxRelease_v2": unsafe extern "C" fn(c_int) -> CudaResult,
        push = "cuCtxPushCurrent_v2": unsafe extern "C" fn(Context) -> CudaResult,
        pop = "cuCtxPopCurrent_v2": unsafe extern "C" fn(*mut Context) -> CudaResult,
        event_create = "cuEventCreate": unsafe extern "C" fn(*mut Event, c_uint) -> CudaResult,
        event_record = "cuEventRecord": unsafe extern "C" fn(Event, Stream) -> CudaResult,
        event_query = "cuEventQuery": unsafe extern "C" fn(Event) -> CudaResult,
        event_destroy = "cuEventDestroy_v2": unsafe extern "C" fn(Event) -> CudaResult,
        stream_wait = "cuStreamWaitEvent":
            unsafe extern "C" fn(Stream, Event, c_uint) -> CudaResult,
        stream_capturing = "cuStreamIsCapturing":
            unsafe extern "C" fn(Stream, *mut c_int) -> CudaResult,
        stream_create = "cuStreamCreate": unsafe extern "C" fn(*mut Stream, c_uint) -> CudaResult,
        stream_destroy = "cuStreamDestroy_v2": unsafe extern "C" fn(Stream) -> CudaResult,
        copy = "cuMemcpyDtoDAsync_v2":
            unsafe extern "C" fn(u64, u64, usize, Stream) -> CudaResult,
        set = "cuMemsetD8Async":
            unsafe extern "C" fn(u64, c_uchar, usize, Stream) -> CudaResult,
        error_name = "cuGetErrorName":
            unsafe extern "C" fn(CudaResult, *mut *const c_char) -> CudaResult,
    } optional {}
}
