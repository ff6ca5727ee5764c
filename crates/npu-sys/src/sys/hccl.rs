//! `hccl/hccl.h`: communicators, collectives, messages.
//!
//! Prototypes as in CANN 8.1.RC1.

use std::ffi::{c_char, c_void};

use super::*;
use crate::table::bind;

/// The libraries of these functions by generation; only the first installed generation is used.
///
/// The open-source HCCL has the communicators in a second library, so both are searched.
pub const HCCL_LIBRARIES: &[&[&str]] = &[&["libhccl.so", "libhcomm.so"]];

/// Passes the rows of this family to the macro `$then`.
#[doc(hidden)]
#[macro_export]
macro_rules! hccl_table {
    ($then:ident) => {
        $then! {
            /// HCCL: communicators, collectives, messages.
            Hccl = HCCL_LIBRARIES
            required {
                fn HcclGetRootInfo(info: *mut HcclRootInfo) -> HcclResult;
                fn HcclCommInitRootInfo(
                    ranks: u32,
                    info: *const HcclRootInfo,
                    rank: u32,
                    comm: *mut HcclComm,
                ) -> HcclResult;
                fn HcclCommDestroy(comm: HcclComm) -> HcclResult;
                fn HcclAllReduce(
                    from: *mut c_void,
                    to: *mut c_void,
                    count: u64,
                    dtype: HcclDataType,
                    op: HcclReduceOp,
                    comm: HcclComm,
                    stream: AclrtStream,
                ) -> HcclResult;
                fn HcclBroadcast(
                    buffer: *mut c_void,
                    count: u64,
                    dtype: HcclDataType,
                    root: u32,
                    comm: HcclComm,
                    stream: AclrtStream,
                ) -> HcclResult;
                fn HcclReduceScatter(
                    from: *mut c_void,
                    to: *mut c_void,
                    count: u64,
                    dtype: HcclDataType,
                    op: HcclReduceOp,
                    comm: HcclComm,
                    stream: AclrtStream,
                ) -> HcclResult;
                fn HcclAllGather(
                    from: *mut c_void,
                    to: *mut c_void,
                    count: u64,
                    dtype: HcclDataType,
                    comm: HcclComm,
                    stream: AclrtStream,
                ) -> HcclResult;
                fn HcclSend(
                    from: *mut c_void,
                    count: u64,
                    dtype: HcclDataType,
                    peer: u32,
                    comm: HcclComm,
                    stream: AclrtStream,
                ) -> HcclResult;
                fn HcclRecv(
                    to: *mut c_void,
                    count: u64,
                    dtype: HcclDataType,
                    peer: u32,
                    comm: HcclComm,
                    stream: AclrtStream,
                ) -> HcclResult;
                fn HcclGetCommAsyncError(comm: HcclComm, error: *mut HcclResult) -> HcclResult;
            }
            optional {
                fn HcclCommInitRootInfoConfig(
                    ranks: u32,
                    info: *const HcclRootInfo,
                    rank: u32,
                    config: *const HcclCommConfig,
                    comm: *mut HcclComm,
                ) -> HcclResult;
                fn HcclCommInitAll(
                    ranks: u32,
                    devices: *mut i32,
                    comms: *mut HcclComm,
                ) -> HcclResult;
                fn HcclGetRankSize(comm: HcclComm, ranks: *mut u32) -> HcclResult;
                fn HcclGetRankId(comm: HcclComm, rank: *mut u32) -> HcclResult;
                fn HcclReduce(
                    from: *mut c_void,
                    to: *mut c_void,
                    count: u64,
                    dtype: HcclDataType,
                    op: HcclReduceOp,
                    root: u32,
                    comm: HcclComm,
                    stream: AclrtStream,
                ) -> HcclResult;
                fn HcclScatter(
                    from: *mut c_void,
                    to: *mut c_void,
                    count: u64,
                    dtype: HcclDataType,
                    root: u32,
                    comm: HcclComm,
                    stream: AclrtStream,
                ) -> HcclResult;
                fn HcclBarrier(comm: HcclComm, stream: AclrtStream) -> HcclResult;
                fn HcclAlltoAll(
                    from: *const c_void,
                    send_count: u64,
                    send_dtype: HcclDataType,
                    to: *const c_void,
                    recv_count: u64,
                    recv_dtype: HcclDataType,
                    comm: HcclComm,
                    stream: AclrtStream,
                ) -> HcclResult;
                fn HcclAlltoAllV(
                    from: *const c_void,
                    send_counts: *const c_void,
                    send_offsets: *const c_void,
                    send_dtype: HcclDataType,
                    to: *const c_void,
                    recv_counts: *const c_void,
                    recv_offsets: *const c_void,
                    recv_dtype: HcclDataType,
                    comm: HcclComm,
                    stream: AclrtStream,
                ) -> HcclResult;
                fn HcclBatchSendRecv(
                    items: *mut HcclSendRecvItem,
                    count: u32,
                    comm: HcclComm,
                    stream: AclrtStream,
                ) -> HcclResult;
                fn HcclGetErrorString(error: HcclResult) -> *const c_char;
                fn HcclGetCommConfigCapability() -> u32;
                fn HcclGetCommName(comm: HcclComm, name: *mut c_char) -> HcclResult;
                fn HcclCommSuspend(comm: HcclComm) -> HcclResult;
                fn HcclCommResume(comm: HcclComm) -> HcclResult;
                fn HcclSetConfig(which: HcclConfig, value: HcclConfigValue) -> HcclResult;
            }
        }
    };
}

hccl_table!(bind);
