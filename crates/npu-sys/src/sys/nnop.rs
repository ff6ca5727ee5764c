//! `aclnn/acl_meta.h` and `aclnn/aclnn_base.h`: tensors, scalars, lists and executors of operators.
//!
//! Prototypes as in CANN 8.1.RC1.

use std::ffi::{c_char, c_void};

use super::*;
use crate::table::bind;

/// The libraries of these functions by generation; only the first installed generation is used.
pub const NNOP_LIBRARIES: &[&[&str]] = &[&["libnnopbase.so"]];

/// Passes the rows of this family to the macro `$then`.
#[doc(hidden)]
#[macro_export]
macro_rules! nnop_table {
    ($then:ident) => {
        $then! {
            /// Functions shared by all operators: tensors, scalars, lists, executors.
            Nnop = NNOP_LIBRARIES
            required {
                fn aclnnInit(config: *const c_char) -> AclnnStatus;
                fn aclCreateTensor(
                    dims: *const i64,
                    rank: u64,
                    dtype: AclDataType,
                    strides: *const i64,
                    offset: i64,
                    format: AclFormat,
                    storage_dims: *const i64,
                    storage_rank: u64,
                    address: *mut c_void,
                ) -> *mut AclTensor;
                fn aclCreateScalar(value: *mut c_void, dtype: AclDataType) -> *mut AclScalar;
                fn aclCreateIntArray(values: *const i64, count: u64) -> *mut AclIntArray;
                fn aclCreateTensorList(
                    tensors: *const *const AclTensor,
                    count: u64,
                ) -> *mut AclTensorList;
                fn aclCreateScalarList(
                    scalars: *const *const AclScalar,
                    count: u64,
                ) -> *mut AclScalarList;
                fn aclDestroyTensor(tensor: *const AclTensor) -> AclnnStatus;
                fn aclDestroyScalar(scalar: *const AclScalar) -> AclnnStatus;
                fn aclDestroyIntArray(array: *const AclIntArray) -> AclnnStatus;
                fn aclDestroyTensorList(list: *const AclTensorList) -> AclnnStatus;
                fn aclDestroyScalarList(list: *const AclScalarList) -> AclnnStatus;
            }
            optional {
                fn aclnnFinalize() -> AclnnStatus;
                fn aclSetAclOpExecutorRepeatable(executor: *mut AclOpExecutor) -> AclnnStatus;
                fn aclDestroyAclOpExecutor(executor: *mut AclOpExecutor) -> AclnnStatus;
                fn aclSetInputTensorAddr(
                    executor: *mut AclOpExecutor,
                    index: usize,
                    tensor: *mut AclTensor,
                    address: *mut c_void,
                ) -> AclnnStatus;
            }
        }
    };
}

nnop_table!(bind);
