//! Types and constants of `acl/acl.h`, `aclnn/acl_meta.h` and `hccl/hccl_types.h`.
//!
//! C's enumerations are transparent integers, since a newer library may return an unknown number.
//! Handles are pointers that Rust never dereferences.

#![expect(unsafe_code, reason = "handles are `Send` and `Sync`: Rust never dereferences them")]

use std::ffi::{c_char, c_void};
use std::mem::offset_of;

/// A type of the C interface and its C++ spelling.
pub trait CType {
    /// The C++ spelling.
    fn c() -> String;
}

macro_rules! spelled {
    ($($rust:ty => $c:literal,)*) => {
        $(impl $crate::types::CType for $rust {
            fn c() -> String {
                $c.into()
            }
        })*
    };
}

spelled! {
    c_void => "void",
    c_char => "char",
    bool => "bool",
    i32 => "int32_t",
    u32 => "uint32_t",
    i64 => "int64_t",
    u64 => "uint64_t",
    usize => "size_t",
    f32 => "float",
    f64 => "double",
}

impl<T: CType> CType for *const T {
    fn c() -> String {
        format!("{} const*", T::c())
    }
}

impl<T: CType> CType for *mut T {
    fn c() -> String {
        format!("{}*", T::c())
    }
}

/// A constant of the headers.
#[derive(Clone, Copy, Debug)]
pub struct Constant {
    /// Its C name.
    pub name: &'static str,
    /// Its value.
    pub value: i64,
}

/// Size and alignment of a C type in the headers.
#[derive(Clone, Copy, Debug)]
pub struct Layout {
    /// Its C name.
    pub name: &'static str,
    /// `sizeof`.
    pub size: usize,
    /// `alignof`.
    pub align: usize,
}

/// Offset and size of a field in a C struct.
#[derive(Clone, Copy, Debug)]
pub struct Field {
    /// The struct's C name.
    pub of: &'static str,
    /// The field's C name.
    pub name: &'static str,
    /// `offsetof`.
    pub offset: usize,
    /// `sizeof`.
    pub size: usize,
}

/// Declares newtypes of an integer with C's constants.
macro_rules! numbers {
    ($list:ident: $($(#[$meta:meta])* $rust:ident($inner:ty) = $c:literal {
        $($(#[$doc:meta])* $name:ident = $value:literal as $constant:literal,)*
    })*) => {
        $(
            $(#[$meta])*
            #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
            #[repr(transparent)]
            pub struct $rust(pub $inner);

            impl $rust {
                $($(#[$doc])* pub const $name: Self = Self($value);)*
            }

            spelled! { $rust => $c, }
        )*

        /// The constants of these types.
        pub const $list: (&[Layout], &[Constant]) = (
            &[$(Layout { name: $c, size: size_of::<$rust>(), align: align_of::<$rust>() },)*],
            &[$($(Constant { name: $constant, value: $value },)*)*],
        );
    };
}

numbers! { ACL_NUMBERS:
    /// `aclError`: 0 is success.
    AclError(i32) = "aclError" {
        /// Success.
        SUCCESS = 0 as "ACL_SUCCESS",
    }
    /// `aclDataType`: of an element.
    AclDataType(i32) = "aclDataType" {
        /// `f32`.
        FLOAT = 0 as "ACL_FLOAT",
        /// `half::f16`.
        FLOAT16 = 1 as "ACL_FLOAT16",
        /// `i8`.
        INT8 = 2 as "ACL_INT8",
        /// `i32`.
        INT32 = 3 as "ACL_INT32",
        /// `u8`.
        UINT8 = 4 as "ACL_UINT8",
        /// `i64`.
        INT64 = 9 as "ACL_INT64",
        /// `f64`.
        DOUBLE = 11 as "ACL_DOUBLE",
        /// One byte, 0 or 1.
        BOOL = 12 as "ACL_BOOL",
        /// `half::bf16`.
        BF16 = 27 as "ACL_BF16",
    }
    /// `aclFormat`: of a tensor.
    AclFormat(i32) = "aclFormat" {
        /// Dimensions in order, without a blocked layout.
        ND = 2 as "ACL_FORMAT_ND",
    }
    /// `aclrtMemcpyKind`.
    AclrtMemcpyKind(i32) = "aclrtMemcpyKind" {
        /// Host to host.
        HOST_TO_HOST = 0 as "ACL_MEMCPY_HOST_TO_HOST",
        /// Host to device.
        HOST_TO_DEVICE = 1 as "ACL_MEMCPY_HOST_TO_DEVICE",
        /// Device to host.
        DEVICE_TO_HOST = 2 as "ACL_MEMCPY_DEVICE_TO_HOST",
        /// Device to device.
        DEVICE_TO_DEVICE = 3 as "ACL_MEMCPY_DEVICE_TO_DEVICE",
    }
    /// `aclrtMemMallocPolicy`.
    AclrtMemMallocPolicy(i32) = "aclrtMemMallocPolicy" {
        /// Huge pages if available, else normal pages.
        HUGE_FIRST = 0 as "ACL_MEM_MALLOC_HUGE_FIRST",
        /// Huge pages only.
        HUGE_ONLY = 1 as "ACL_MEM_MALLOC_HUGE_ONLY",
        /// Normal pages only.
        NORMAL_ONLY = 2 as "ACL_MEM_MALLOC_NORMAL_ONLY",
    }
    /// `aclrtEventRecordedStatus`.
    AclrtEventRecordedStatus(i32) = "aclrtEventRecordedStatus" {
        /// Work before the event has not completed.
        NOT_READY = 0 as "ACL_EVENT_RECORDED_STATUS_NOT_READY",
        /// Work before the event has completed.
        COMPLETE = 1 as "ACL_EVENT_RECORDED_STATUS_COMPLETE",
    }
    /// `aclrtMemAttr`: kind of memory.
    AclrtMemAttr(i32) = "aclrtMemAttr" {
        /// Device memory (HBM).
        HBM = 1 as "ACL_HBM_MEM",
    }
    /// `aclrtFloatOverflowMode`.
    AclrtFloatOverflowMode(i32) = "aclrtFloatOverflowMode" {
        /// Saturates: the largest finite number instead of infinity, 0 instead of NaN.
        SATURATION = 0 as "ACL_RT_OVERFLOW_MODE_SATURATION",
        /// IEEE 754.
        INFNAN = 1 as "ACL_RT_OVERFLOW_MODE_INFNAN",
    }
    /// `aclCannAttr`: capabilities of a CANN.
    AclCannAttr(i32) = "aclCannAttr" {
        /// Supports infinities and NaN.
        INF_NAN = 0 as "ACL_CANN_ATTR_INF_NAN",
    }
    /// `aclrtLastErrLevel`.
    AclrtLastErrLevel(i32) = "aclrtLastErrLevel" {
        /// The last error of this thread.
        THREAD = 0 as "ACL_RT_THREAD_LEVEL",
    }
}

numbers! { NNOP_NUMBERS:
    /// `aclnnStatus`: 0 is success.
    AclnnStatus(i32) = "aclnnStatus" {}
}

numbers! { HCCL_NUMBERS:
    /// `HcclResult`: 0 is success.
    HcclResult(i32) = "HcclResult" {
        /// Success.
        SUCCESS = 0 as "HCCL_SUCCESS",
    }
    /// `HcclDataType`: of an element.
    HcclDataType(i32) = "HcclDataType" {
        /// `i8`.
        INT8 = 0 as "HCCL_DATA_TYPE_INT8",
        /// `i16`.
        INT16 = 1 as "HCCL_DATA_TYPE_INT16",
        /// `i32`.
        INT32 = 2 as "HCCL_DATA_TYPE_INT32",
        /// `half::f16`.
        FP16 = 3 as "HCCL_DATA_TYPE_FP16",
        /// `f32`.
        FP32 = 4 as "HCCL_DATA_TYPE_FP32",
        /// `i64`.
        INT64 = 5 as "HCCL_DATA_TYPE_INT64",
        /// `u64`.
        UINT64 = 6 as "HCCL_DATA_TYPE_UINT64",
        /// `u8`.
        UINT8 = 7 as "HCCL_DATA_TYPE_UINT8",
        /// `u16`.
        UINT16 = 8 as "HCCL_DATA_TYPE_UINT16",
        /// `u32`.
        UINT32 = 9 as "HCCL_DATA_TYPE_UINT32",
        /// `f64`.
        FP64 = 10 as "HCCL_DATA_TYPE_FP64",
        /// `half::bf16`.
        BFP16 = 11 as "HCCL_DATA_TYPE_BFP16",
    }
    /// `HcclReduceOp`. There is no average.
    HcclReduceOp(i32) = "HcclReduceOp" {
        /// Sum.
        SUM = 0 as "HCCL_REDUCE_SUM",
        /// Product.
        PROD = 1 as "HCCL_REDUCE_PROD",
        /// Maximum.
        MAX = 2 as "HCCL_REDUCE_MAX",
        /// Minimum.
        MIN = 3 as "HCCL_REDUCE_MIN",
    }
    /// `HcclSendRecvType`: direction of a [`HcclSendRecvItem`].
    HcclSendRecvType(i32) = "HcclSendRecvType" {
        /// To the peer.
        SEND = 0 as "HCCL_SEND",
        /// From the peer.
        RECV = 1 as "HCCL_RECV",
    }
    /// `HcclConfig`: a setting of the process.
    HcclConfig(i32) = "HcclConfig" {
        /// The same order of additions at every call.
        DETERMINISTIC = 0 as "HCCL_DETERMINISTIC",
    }
    /// `HcclConfigValue`: a union of one `int32_t`, passed by value.
    HcclConfigValue(i32) = "HcclConfigValue" {}
}

/// Flag of `aclrtCreateEventExWithFlag`: other streams may wait for the event.
pub const ACL_EVENT_SYNC: u32 = 1;
/// Flag of `aclrtCreateEventExWithFlag`: the event records its time.
pub const ACL_EVENT_TIME_LINE: u32 = 8;
/// Mode of `aclrtSetStreamFailureMode`: a failure stops the stream.
pub const ACL_STOP_ON_FAILURE: u64 = 1;

/// Constants of AscendCL without an enumeration.
pub const ACL_FLAGS: &[Constant] = &[
    Constant { name: "ACL_EVENT_SYNC", value: ACL_EVENT_SYNC as i64 },
    Constant { name: "ACL_EVENT_TIME_LINE", value: ACL_EVENT_TIME_LINE as i64 },
    Constant { name: "ACL_STOP_ON_FAILURE", value: ACL_STOP_ON_FAILURE as i64 },
];

/// Declares handles: `void*` in C.
macro_rules! handles {
    ($($(#[$meta:meta])* $rust:ident = $c:literal,)*) => {$(
        $(#[$meta])*
        #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
        #[repr(transparent)]
        pub struct $rust(pub *mut c_void);

        impl $rust {
            /// The null handle.
            pub const NULL: Self = Self(std::ptr::null_mut());
        }

        // SAFETY: Rust never dereferences the handle; C's functions define their thread safety.
        unsafe impl Send for $rust {}
        // SAFETY: as above.
        unsafe impl Sync for $rust {}

        spelled! { $rust => $c, }
    )*};
}

handles! {
    /// `aclrtContext`.
    AclrtContext = "aclrtContext",
    /// `aclrtStream`.
    AclrtStream = "aclrtStream",
    /// `aclrtEvent`.
    AclrtEvent = "aclrtEvent",
    /// `HcclComm`.
    HcclComm = "HcclComm",
}

/// Declares C's opaque structs.
macro_rules! opaque {
    ($($(#[$meta:meta])* $rust:ident = $c:literal,)*) => {$(
        $(#[$meta])*
        #[derive(Debug)]
        #[repr(C)]
        pub struct $rust {
            _nothing: [u8; 0],
        }

        spelled! { $rust => $c, }
    )*};
}

opaque! {
    /// `aclTensor`.
    AclTensor = "aclTensor",
    /// `aclScalar`.
    AclScalar = "aclScalar",
    /// `aclIntArray`.
    AclIntArray = "aclIntArray",
    /// `aclTensorList`.
    AclTensorList = "aclTensorList",
    /// `aclScalarList`.
    AclScalarList = "aclScalarList",
    /// `aclOpExecutor`.
    AclOpExecutor = "aclOpExecutor",
}

/// `HcclRootInfo`: the address at which the ranks of a communicator connect.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(C)]
pub struct HcclRootInfo {
    /// Opaque bytes of HCCL.
    pub internal: [u8; 4108],
}

/// `HcclSendRecvItem`: one message of `HcclBatchSendRecv`.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub struct HcclSendRecvItem {
    /// Direction: send or receive.
    pub direction: HcclSendRecvType,
    /// Device address of the message.
    pub buf: *mut c_void,
    /// Number of elements.
    pub count: u64,
    /// Element type.
    pub data_type: HcclDataType,
    /// Rank of the peer.
    pub remote_rank: u32,
}

/// `HcclCommConfig` in version 5, 300 bytes. Later versions of HCCL read it, too: HCCL reads `size`
/// bytes and then uses the fields of the given version.
///
/// The alignment is stricter than C's, which declares the first eight bytes as characters but reads
/// them as a `size_t`; so it has 304 bytes in Rust, of which [`size`](Self::size) counts 300.
#[derive(Clone, Copy, Debug)]
#[repr(C, align(8))]
pub struct HcclCommConfig {
    /// 300.
    pub size: usize,
    /// `0xf0f0f0f0`.
    pub magic: u32,
    /// 5.
    pub version: u32,
    /// 0.
    pub reserved: u64,
    /// Buffer per communicator, in MiB.
    pub buffer_size: u32,
    /// 1: the same order of additions at every call.
    pub deterministic: u32,
    /// A C string: the communicator's name.
    pub name: [c_char; 128],
    /// A C string: shown with errors.
    pub udi: [c_char; 128],
    /// Which unit runs the algorithm.
    pub op_expansion_mode: u32,
    /// Traffic class of RDMA.
    pub rdma_traffic_class: u32,
    /// Service level of RDMA.
    pub rdma_service_level: u32,
}

impl HcclCommConfig {
    /// The bytes that HCCL reads.
    pub const SIZE: usize = offset_of!(Self, rdma_service_level) + size_of::<u32>();
    /// The first number after the size.
    pub const MAGIC: u32 = 0xf0f0_f0f0;
    /// The version, which determines the fields.
    pub const VERSION: u32 = 5;
    /// Marks a field for which the library chooses the value.
    pub const NOT_SET: u32 = u32::MAX;
}

impl Default for HcclCommConfig {
    /// A configuration in which the library chooses every field.
    fn default() -> Self {
        Self {
            size: Self::SIZE,
            magic: Self::MAGIC,
            version: Self::VERSION,
            reserved: 0,
            buffer_size: Self::NOT_SET,
            deterministic: Self::NOT_SET,
            name: [0; 128],
            udi: [0; 128],
            op_expansion_mode: 0,
            rdma_traffic_class: Self::NOT_SET,
            rdma_service_level: Self::NOT_SET,
        }
    }
}

spelled! {
    HcclRootInfo => "HcclRootInfo",
    HcclSendRecvItem => "HcclSendRecvItem",
    HcclCommConfig => "HcclCommConfig",
}

/// HCCL's structs with the same size in every version.
pub const HCCL_LAYOUTS: &[Layout] = &[
    Layout {
        name: "HcclRootInfo",
        size: size_of::<HcclRootInfo>(),
        align: align_of::<HcclRootInfo>(),
    },
    Layout {
        name: "HcclSendRecvItem",
        size: size_of::<HcclSendRecvItem>(),
        align: align_of::<HcclSendRecvItem>(),
    },
];

/// Lists fields: Rust's name, C's name, type.
macro_rules! fields {
    ($rust:ident: $($field:ident = $c:ident: $ty:ty,)*) => {
        &[$(Field {
            of: stringify!($rust),
            name: stringify!($c),
            offset: offset_of!($rust, $field),
            size: size_of::<$ty>(),
        },)*]
    };
}

/// The fields of HCCL's structs.
pub const HCCL_FIELDS: [&[Field]; 3] = [
    fields! { HcclRootInfo: internal = internal: [u8; 4108], },
    fields! { HcclSendRecvItem:
        direction = sendRecvType: HcclSendRecvType,
        buf = buf: *mut c_void,
        count = count: u64,
        data_type = dataType: HcclDataType,
        remote_rank = remoteRank: u32,
    },
    fields! { HcclCommConfig:
        buffer_size = hcclBufferSize: u32,
        deterministic = hcclDeterministic: u32,
        name = hcclCommName: [c_char; 128],
        udi = hcclUdi: [c_char; 128],
        op_expansion_mode = hcclOpExpansionMode: u32,
        rdma_traffic_class = hcclRdmaTrafficClass: u32,
        rdma_service_level = hcclRdmaServiceLevel: u32,
    },
];

/// The second function of every operator: takes workspace, its size, the plan and the stream.
pub type Run =
    unsafe extern "C" fn(*mut c_void, u64, *mut AclOpExecutor, AclrtStream) -> AclnnStatus;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_fifth_version_is_300_bytes() {
        assert_eq!(HcclCommConfig::SIZE, 300);
        assert_eq!(size_of::<HcclCommConfig>(), 304);
        assert_eq!(HcclCommConfig::default().size, 300);
    }
}
