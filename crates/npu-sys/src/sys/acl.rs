//! `acl/acl.h` and `acl/acl_rt.h`: initialization, devices, contexts, streams, events, memory.
//!
//! Prototypes as in CANN 8.1.RC1.

use std::ffi::{c_char, c_void};

use super::*;
use crate::table::bind;

/// The libraries of these functions by generation; only the first installed generation is used.
pub const ACL_LIBRARIES: &[&[&str]] = &[&["libascendcl.so"]];

/// Passes the rows of this family to the macro `$then`.
#[doc(hidden)]
#[macro_export]
macro_rules! acl_table {
    ($then:ident) => {
        $then! {
            /// AscendCL: devices, contexts, streams, events, memory.
            Acl = ACL_LIBRARIES
            required {
                fn aclInit(config: *const c_char) -> AclError;
                fn aclFinalize() -> AclError;
                fn aclrtSetDevice(device: i32) -> AclError;
                fn aclrtResetDevice(device: i32) -> AclError;
                fn aclrtGetDevice(device: *mut i32) -> AclError;
                fn aclrtGetDeviceCount(count: *mut u32) -> AclError;
                fn aclrtGetSocName() -> *const c_char;
                fn aclrtGetVersion(major: *mut i32, minor: *mut i32, patch: *mut i32) -> AclError;
                fn aclrtCreateContext(context: *mut AclrtContext, device: i32) -> AclError;
                fn aclrtDestroyContext(context: AclrtContext) -> AclError;
                fn aclrtSetCurrentContext(context: AclrtContext) -> AclError;
                fn aclrtGetCurrentContext(context: *mut AclrtContext) -> AclError;
                fn aclrtCreateStream(stream: *mut AclrtStream) -> AclError;
                fn aclrtDestroyStream(stream: AclrtStream) -> AclError;
                fn aclrtSynchronizeStream(stream: AclrtStream) -> AclError;
                fn aclrtSynchronizeDevice() -> AclError;
                fn aclrtStreamWaitEvent(stream: AclrtStream, event: AclrtEvent) -> AclError;
                fn aclrtCreateEvent(event: *mut AclrtEvent) -> AclError;
                fn aclrtCreateEventExWithFlag(event: *mut AclrtEvent, flags: u32) -> AclError;
                fn aclrtDestroyEvent(event: AclrtEvent) -> AclError;
                fn aclrtRecordEvent(event: AclrtEvent, stream: AclrtStream) -> AclError;
                fn aclrtQueryEventStatus(
                    event: AclrtEvent,
                    status: *mut AclrtEventRecordedStatus,
                ) -> AclError;
                fn aclrtSynchronizeEvent(event: AclrtEvent) -> AclError;
                fn aclrtEventElapsedTime(
                    ms: *mut f32,
                    start: AclrtEvent,
                    end: AclrtEvent,
                ) -> AclError;
                fn aclrtMalloc(
                    address: *mut *mut c_void,
                    bytes: usize,
                    policy: AclrtMemMallocPolicy,
                ) -> AclError;
                fn aclrtFree(address: *mut c_void) -> AclError;
                fn aclrtMallocHost(address: *mut *mut c_void, bytes: usize) -> AclError;
                fn aclrtFreeHost(address: *mut c_void) -> AclError;
                fn aclrtMemcpy(
                    to: *mut c_void,
                    room: usize,
                    from: *const c_void,
                    bytes: usize,
                    kind: AclrtMemcpyKind,
                ) -> AclError;
                fn aclrtMemcpyAsync(
                    to: *mut c_void,
                    room: usize,
                    from: *const c_void,
                    bytes: usize,
                    kind: AclrtMemcpyKind,
                    stream: AclrtStream,
                ) -> AclError;
                fn aclrtMemset(
                    address: *mut c_void,
                    room: usize,
                    value: i32,
                    bytes: usize,
                ) -> AclError;
                fn aclrtMemsetAsync(
                    address: *mut c_void,
                    room: usize,
                    value: i32,
                    bytes: usize,
                    stream: AclrtStream,
                ) -> AclError;
                fn aclrtGetMemInfo(
                    which: AclrtMemAttr,
                    free: *mut usize,
                    total: *mut usize,
                ) -> AclError;
            }
            optional {
                fn aclrtCreateStreamWithConfig(
                    stream: *mut AclrtStream,
                    priority: u32,
                    flags: u32,
                ) -> AclError;
                fn aclrtDestroyStreamForce(stream: AclrtStream) -> AclError;
                fn aclrtSynchronizeStreamWithTimeout(
                    stream: AclrtStream,
                    timeout_ms: i32,
                ) -> AclError;
                fn aclrtSetStreamFailureMode(stream: AclrtStream, mode: u64) -> AclError;
                fn aclrtMallocAlign32(
                    address: *mut *mut c_void,
                    bytes: usize,
                    policy: AclrtMemMallocPolicy,
                ) -> AclError;
                fn aclrtGetOverflowStatus(
                    status: *mut c_void,
                    bytes: usize,
                    stream: AclrtStream,
                ) -> AclError;
                fn aclrtResetOverflowStatus(stream: AclrtStream) -> AclError;
                fn aclrtSetDeviceSatMode(mode: AclrtFloatOverflowMode) -> AclError;
                fn aclrtGetDeviceSatMode(mode: *mut AclrtFloatOverflowMode) -> AclError;
                fn aclGetRecentErrMsg() -> *const c_char;
                fn aclGetCannAttribute(which: AclCannAttr, value: *mut i32) -> AclError;
                fn aclrtPeekAtLastError(level: AclrtLastErrLevel) -> AclError;
                fn aclrtGetLastError(level: AclrtLastErrLevel) -> AclError;
                fn aclrtDeviceTaskAbort(device: i32, timeout: u32) -> AclError;
                fn aclrtSetOpWaitTimeout(seconds: u32) -> AclError;
                fn aclrtSetOpExecuteTimeOut(seconds: u32) -> AclError;
            }
        }
    };
}

acl_table!(bind);
