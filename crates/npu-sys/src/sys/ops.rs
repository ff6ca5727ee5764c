//! `aclnnop/*.h`: the operators. Each has two functions: one plans, the other runs the plan.
//!
//! Prototypes as in CANN 8.1.RC1, or as in the public headers of the later version that a row
//! names. All operators are optional, since they depend on version and chip: calling a missing one
//! is an error.

use std::ffi::c_void;

use super::*;
use crate::table::bind_ops;

/// The libraries of these functions by generation; only the first installed generation is used.
///
/// CANN's documentation warns against loading `libopapi.so` and its successors side by side.
pub const OPS_LIBRARIES: &[&[&str]] = &[
    &["libopapi.so"],
    &["libopapi_math.so", "libopapi_nn.so"],
    &["libaclnn_math.so", "libaclnn_ops_infer.so", "libaclnn_ops_train.so"],
];

/// The headers of the operators that CANN 8.1 declares.
pub const OP_HEADERS: &[&str] = &[
    "add",
    "addcdiv",
    "addcmul",
    "apply_adam_w_v2",
    "cast",
    "copy",
    "div",
    "fill_scalar",
    "foreach_add_list_v2",
    "foreach_add_scalar_v2",
    "foreach_addcdiv_scalar_v2",
    "foreach_addcmul_scalar_v2",
    "foreach_copy",
    "foreach_div_list",
    "foreach_lerp_scalar",
    "foreach_maximum_list",
    "foreach_mul_list",
    "foreach_mul_scalar_list",
    "foreach_mul_scalar_v2",
    "foreach_norm",
    "foreach_sqrt",
    "foreach_zero_inplace",
    "isfinite",
    "maximum",
    "mul",
    "reduce_sum",
    "sqrt",
    "zero",
];

/// The headers of newer operators, included if the installed CANN has them.
pub const NEWER_OP_HEADERS: &[&str] =
    &["amp_update_scale", "foreach_non_finite_check_and_unscale", "fused_adamw", "fused_sgd"];

/// An operator's two functions.
#[derive(Clone, Copy, Debug)]
pub struct Phases<P> {
    /// Checks the arguments and returns the size of the workspace.
    pub plan: P,
    /// Runs a plan.
    pub run: Run,
}

/// Passes the operators to the macro `$then`. Rows omit the last two parameters of all plans: the
/// workspace size and the executor. `in` is the first version of CANN that has the operator, if 8.1
/// does not.
#[doc(hidden)]
#[macro_export]
macro_rules! ops_table {
    ($then:ident) => {
        $then! {
            /// CANN's operators.
            Ops = OPS_LIBRARIES {
                fn aclnnInplaceMuls, aclnnInplaceMulsGetWorkspaceSize(
                    a: *mut AclTensor,
                    factor: *const AclScalar,
                );
                fn aclnnMuls, aclnnMulsGetWorkspaceSize(
                    a: *const AclTensor,
                    factor: *const AclScalar,
                    out: *mut AclTensor,
                );
                fn aclnnInplaceAdd, aclnnInplaceAddGetWorkspaceSize(
                    a: *const AclTensor,
                    b: *const AclTensor,
                    alpha: *const AclScalar,
                );
                fn aclnnAdd, aclnnAddGetWorkspaceSize(
                    a: *const AclTensor,
                    b: *const AclTensor,
                    alpha: *const AclScalar,
                    out: *mut AclTensor,
                );
                fn aclnnAdds, aclnnAddsGetWorkspaceSize(
                    a: *const AclTensor,
                    b: *const AclScalar,
                    alpha: *const AclScalar,
                    out: *mut AclTensor,
                );
                fn aclnnInplaceAdds, aclnnInplaceAddsGetWorkspaceSize(
                    a: *const AclTensor,
                    b: *const AclScalar,
                    alpha: *const AclScalar,
                );
                fn aclnnInplaceAddcmul, aclnnInplaceAddcmulGetWorkspaceSize(
                    a: *const AclTensor,
                    b: *const AclTensor,
                    c: *const AclTensor,
                    value: *const AclScalar,
                );
                fn aclnnAddcmul, aclnnAddcmulGetWorkspaceSize(
                    a: *const AclTensor,
                    b: *const AclTensor,
                    c: *const AclTensor,
                    value: *const AclScalar,
                    out: *mut AclTensor,
                );
                fn aclnnInplaceAddcdiv, aclnnInplaceAddcdivGetWorkspaceSize(
                    a: *const AclTensor,
                    b: *const AclTensor,
                    c: *const AclTensor,
                    value: *const AclScalar,
                );
                fn aclnnSqrt, aclnnSqrtGetWorkspaceSize(
                    a: *const AclTensor,
                    out: *mut AclTensor,
                );
                fn aclnnInplaceSqrt, aclnnInplaceSqrtGetWorkspaceSize(
                    a: *mut AclTensor,
                );
                fn aclnnDiv, aclnnDivGetWorkspaceSize(
                    a: *const AclTensor,
                    b: *const AclTensor,
                    out: *mut AclTensor,
                );
                fn aclnnInplaceDiv, aclnnInplaceDivGetWorkspaceSize(
                    a: *mut AclTensor,
                    b: *const AclTensor,
                );
                fn aclnnInplaceDivs, aclnnInplaceDivsGetWorkspaceSize(
                    a: *mut AclTensor,
                    divisor: *const AclScalar,
                );
                fn aclnnMul, aclnnMulGetWorkspaceSize(
                    a: *const AclTensor,
                    b: *const AclTensor,
                    out: *mut AclTensor,
                );
                fn aclnnInplaceMul, aclnnInplaceMulGetWorkspaceSize(
                    a: *mut AclTensor,
                    b: *const AclTensor,
                );
                fn aclnnMaximum, aclnnMaximumGetWorkspaceSize(
                    a: *const AclTensor,
                    b: *const AclTensor,
                    out: *mut AclTensor,
                );
                fn aclnnReduceSum, aclnnReduceSumGetWorkspaceSize(
                    a: *const AclTensor,
                    dims: *const AclIntArray,
                    keep_dims: bool,
                    dtype: AclDataType,
                    out: *mut AclTensor,
                );
                fn aclnnCast, aclnnCastGetWorkspaceSize(
                    a: *const AclTensor,
                    dtype: AclDataType,
                    out: *mut AclTensor,
                );
                fn aclnnInplaceCopy, aclnnInplaceCopyGetWorkspaceSize(
                    a: *mut AclTensor,
                    from: *const AclTensor,
                );
                fn aclnnInplaceZero, aclnnInplaceZeroGetWorkspaceSize(
                    a: *mut AclTensor,
                );
                fn aclnnInplaceFillScalar, aclnnInplaceFillScalarGetWorkspaceSize(
                    a: *mut AclTensor,
                    value: *const AclScalar,
                );
                fn aclnnIsFinite, aclnnIsFiniteGetWorkspaceSize(
                    a: *const AclTensor,
                    out: *mut AclTensor,
                );
                fn aclnnApplyAdamWV2, aclnnApplyAdamWV2GetWorkspaceSize(
                    p: *mut AclTensor,
                    m: *mut AclTensor,
                    v: *mut AclTensor,
                    max_v: *mut AclTensor,
                    g: *const AclTensor,
                    step: *const AclTensor,
                    lr: f32,
                    beta1: f32,
                    beta2: f32,
                    weight_decay: f32,
                    eps: f32,
                    amsgrad: bool,
                    maximize: bool,
                );
                fn aclnnForeachMulScalarV2, aclnnForeachMulScalarV2GetWorkspaceSize(
                    a: *const AclTensorList,
                    factor: *const AclScalar,
                    out: *mut AclTensorList,
                );
                fn aclnnForeachAddScalarV2, aclnnForeachAddScalarV2GetWorkspaceSize(
                    a: *const AclTensorList,
                    b: *const AclScalar,
                    out: *mut AclTensorList,
                );
                fn aclnnForeachAddListV2, aclnnForeachAddListV2GetWorkspaceSize(
                    a: *const AclTensorList,
                    b: *const AclTensorList,
                    alpha: *const AclScalar,
                    out: *mut AclTensorList,
                );
                fn aclnnForeachAddcmulScalarV2, aclnnForeachAddcmulScalarV2GetWorkspaceSize(
                    a: *const AclTensorList,
                    b: *const AclTensorList,
                    c: *const AclTensorList,
                    value: *const AclScalar,
                    out: *mut AclTensorList,
                );
                fn aclnnForeachAddcdivScalarV2, aclnnForeachAddcdivScalarV2GetWorkspaceSize(
                    a: *const AclTensorList,
                    b: *const AclTensorList,
                    c: *const AclTensorList,
                    value: *const AclScalar,
                    out: *mut AclTensorList,
                );
                fn aclnnForeachSqrt, aclnnForeachSqrtGetWorkspaceSize(
                    a: *const AclTensorList,
                    out: *const AclTensorList,
                );
                fn aclnnForeachNorm, aclnnForeachNormGetWorkspaceSize(
                    a: *const AclTensorList,
                    order: *const AclScalar,
                    out: *const AclTensorList,
                );
                fn aclnnForeachDivList, aclnnForeachDivListGetWorkspaceSize(
                    a: *const AclTensorList,
                    b: *const AclTensorList,
                    out: *const AclTensorList,
                );
                fn aclnnForeachMulList, aclnnForeachMulListGetWorkspaceSize(
                    a: *const AclTensorList,
                    b: *const AclTensorList,
                    out: *const AclTensorList,
                );
                fn aclnnForeachMulScalarList, aclnnForeachMulScalarListGetWorkspaceSize(
                    a: *const AclTensorList,
                    factors: *const AclScalarList,
                    out: *const AclTensorList,
                );
                fn aclnnForeachMaximumList, aclnnForeachMaximumListGetWorkspaceSize(
                    a: *const AclTensorList,
                    b: *const AclTensorList,
                    out: *const AclTensorList,
                );
                fn aclnnForeachLerpScalar, aclnnForeachLerpScalarGetWorkspaceSize(
                    a: *const AclTensorList,
                    b: *const AclTensorList,
                    weight: *const AclScalar,
                    out: *const AclTensorList,
                );
                fn aclnnForeachCopy, aclnnForeachCopyGetWorkspaceSize(
                    a: *const AclTensorList,
                    out: *const AclTensorList,
                );
                fn aclnnForeachZeroInplace, aclnnForeachZeroInplaceGetWorkspaceSize(
                    a: *const AclTensorList,
                );
                fn aclnnForeachNonFiniteCheckAndUnscale, aclnnForeachNonFiniteCheckAndUnscaleGetWorkspaceSize(
                    a: *const AclTensorList,
                    found_inf: *const AclTensor,
                    inv_scale: *const AclTensor,
                ) in "8.5";
                fn aclnnAmpUpdateScale, aclnnAmpUpdateScaleGetWorkspaceSize(
                    scale: *const AclTensor,
                    growth_tracker: *const AclTensor,
                    found_inf: *const AclTensor,
                    growth_factor: f64,
                    backoff_factor: f64,
                    growth_interval: i64,
                    new_scale: *const AclTensor,
                    new_growth_tracker: *const AclTensor,
                ) in "9.1";
                fn aclnnFusedSgd, aclnnFusedSgdGetWorkspaceSize(
                    p: *const AclTensorList,
                    g: *const AclTensorList,
                    buffer: *const AclTensorList,
                    grad_scale: *const AclTensor,
                    weight_decay: f32,
                    momentum: f32,
                    lr: f32,
                    dampening: f32,
                    nesterov: bool,
                    maximize: bool,
                    is_first_step: bool,
                ) in "9.1";
                fn aclnnFusedAdamw, aclnnFusedAdamwGetWorkspaceSize(
                    p: *const AclTensorList,
                    g: *const AclTensorList,
                    m: *const AclTensorList,
                    v: *const AclTensorList,
                    max_v: *const AclTensorList,
                    steps: *const AclTensorList,
                    grad_scale: *const AclTensor,
                    found_inf: *const AclTensor,
                    lr: f64,
                    beta1: f64,
                    beta2: f64,
                    weight_decay: f64,
                    eps: f64,
                    amsgrad: bool,
                    maximize: bool,
                ) in "9.2";
            }
        }
    };
}

ops_table!(bind_ops);
