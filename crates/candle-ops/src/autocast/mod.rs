//! Autocast: each operator runs in a suitable precision, by `amp`'s lists.
//!
//! A policy is set by the entered [`Context`](crate::Context) or by a region within it
//! ([`autocast`]). With a policy, an operator looks up its own PyTorch name ([`cast`]) and casts
//! its inputs: convolutions and matrix products to the lower precision, losses to `f32`; operators
//! in no list run in the type of their inputs. The casts are differentiable, so an `f32` parameter
//! has an `f32` gradient in any case. The backward pass runs each operator in the precision of its
//! forward pass, with or without a policy.
//!
//! On a CPU half precision saves memory rather than time; the README has the cost of each operator.
//!
//! candle has no dispatcher: its own operators, and therefore candle-nn's layers, do not support
//! autocast.

use amp::{Autocast, Cast};
use candle_core::backend::BackendStorage;
use candle_core::op::BackpropOp;
use candle_core::{
    CpuStorage, CudaStorage, DType, Device, Error, Layout, Result, Shape, Storage, Tensor, bail,
};

use crate::context::{self, Region};
use crate::graph::custom_op::{Differentiable, apply1};
use crate::graph::device::{self, each};
use crate::graph::operator::converted;
use crate::graph::tape::casts::cast_once;

/// Runs `call` with `policy` on this thread, instead of the current policy. A policy that is
/// [disabled](Autocast::with_enabled) casts nothing.
///
/// ```
/// use amp::Autocast;
/// use candle_core::{DType, Device, Tensor};
/// use candle_ops::{autocast, linear};
///
/// let x = Tensor::ones((2, 3), DType::F32, &Device::Cpu)?;
/// let y = autocast(&Autocast::cpu(), || linear(&x, &x, None))?;
/// assert_eq!((y.dtype(), linear(&x, &x, None)?.dtype()), (DType::BF16, DType::F32));
/// # Ok::<(), candle_core::Error>(())
/// ```
pub fn autocast<R>(policy: &Autocast, call: impl FnOnce() -> R) -> R {
    let region = Some(Region::new(policy.clone()));
    let (result, inner) = context::replacing(|context| &mut context.autocast, region, call);
    let lowered = inner.map_or(0, |region| region.lowered);
    context::with(|context| {
        context.autocast.iter_mut().for_each(|region| region.lowered += lowered);
    });
    result
}

/// Runs a call without a policy: an operator that is composed of another one, whose inputs are cast
/// by its own rule.
pub(crate) fn without<R>(call: impl FnOnce() -> R) -> R {
    context::replacing(|context| &mut context.autocast, None, call).0
}

/// Number of operators that have run in the lower precision under the current policy, including
/// inner regions.
pub fn lowered_operators() -> usize {
    context::with(|context| context.autocast.as_ref().map_or(0, |region| region.lowered))
}

/// Advice for an error of a forward pass under autocast: candle's own operators reject operands of
/// two types, such as a half type and `f32`. `None` for other errors.
pub fn mixed_types_advice(error: &Error) -> Option<&'static str> {
    match error {
        Error::DTypeMismatchBinaryOp { lhs, rhs, .. } => {
            let is_half = |dtype: &DType| matches!(dtype, DType::F16 | DType::BF16);
            (is_half(lhs) || is_half(rhs)).then_some(
                "under autocast results are of a half type, and candle's own operators want operands of one type: \
                 add with `candle_ops::add`, or cast one operand by `to_dtype`",
            )
        }
        Error::WithBacktrace { inner, .. } | Error::Context { inner, .. } => {
            mixed_types_advice(inner)
        }
        _ => None,
    }
}

/// Returns an error unless `device` computes in `dtype`: a GPU below compute capability 8.0 has no
/// `bf16`, neither in candle's kernels nor on its tensor cores.
///
/// # Errors
///
/// One that names the type and the GPU's compute capability.
pub fn check_dtype(device: &Device, dtype: DType) -> Result<()> {
    #[cfg(feature = "cuda")]
    if let (Device::Cuda(device), DType::BF16) = (device, dtype) {
        crate::cuda::check_bf16(device)?;
    }
    let _ = (device, dtype);
    Ok(())
}

/// Casts the floating-point inputs of an operator by the current policy's rule for `op`, its
/// PyTorch name. Without a policy the inputs are returned unchanged. Custom operators can call it,
/// too.
///
/// If the rule is to compute and return `f32`, the inputs are cast to `f32`. Tensors of other types
/// (indices, bytes) are unchanged.
///
/// # Errors
///
/// An operator that the policy [bans](amp::CastRule::Banned).
pub fn cast<const N: usize>(op: &str, inputs: [&Tensor; N]) -> Result<[Tensor; N]> {
    let Some(to) = rule(op, inputs)? else { return Ok(inputs.map(Clone::clone)) };
    each(inputs, |input| cast_by(to, input))
}

/// Like [`cast`] for one tensor, for an operator that widens it to `f32` itself, with the same
/// result but without a copy.
pub(crate) fn cast_unless_to_f32(op: &str, x: &Tensor) -> Result<Tensor> {
    match rule(op, [x])? {
        None | Some(Cast::Inputs(amp::DType::F32)) => Ok(x.clone()),
        Some(to) => cast_by(to, x),
    }
}

/// Casts a tensor of a floating-point type; other tensors are unchanged.
fn cast_by(to: Cast, x: &Tensor) -> Result<Tensor> {
    match amp_dtype(x.dtype()) {
        Some(dtype) => to_dtype(x, candle_dtype(to.input(dtype))),
        None => Ok(x.clone()),
    }
}

/// The current policy's cast for these inputs; `None` if they are unchanged.
fn rule<const N: usize>(op: &str, inputs: [&Tensor; N]) -> Result<Option<Cast>> {
    let mut types = [amp::DType::F32; N];
    let mut floats = 0;
    for dtype in inputs.iter().filter_map(|input| amp_dtype(input.dtype())) {
        types[floats] = dtype;
        floats += 1;
    }
    let cast = context::with(|context| {
        let Some(region) = &mut context.autocast else { return Ok(Cast::Keep) };
        let cast = region.policy.cast(op, &types[..floats])?;
        let lower = Cast::Inputs(region.policy.dtype());
        region.lowered += usize::from(cast == lower);
        Ok::<_, amp::Error>(cast)
    });
    match cast {
        Ok(Cast::Keep) => Ok(None),
        Ok(Cast::Inputs(dtype) | Cast::Output(dtype)) => Ok(Some(Cast::Inputs(dtype))),
        Err(e) => bail!("{e}"),
    }
}

/// Casts both to the narrowest type that represents the values of both: `f32` for `f16` with
/// `bf16`.
pub(crate) fn promote([a, b]: [Tensor; 2]) -> Result<[Tensor; 2]> {
    if a.dtype() == b.dtype() {
        return Ok([a, b]);
    }
    let wide = if [a.dtype(), b.dtype()].contains(&DType::F64) { DType::F64 } else { DType::F32 };
    Ok([to_dtype(&a, wide)?, to_dtype(&b, wide)?])
}

/// candle's `to_dtype` as an operator of this crate, which is several times as fast for halves on
/// the CPU. On a tape a weight is cast once, even if it is used several times.
pub(crate) fn to_dtype(x: &Tensor, dtype: DType) -> Result<Tensor> {
    if x.dtype() == dtype {
        return Ok(x.clone());
    }
    cast_once(x, dtype, || match device::cast(x, dtype)? {
        Some(y) => Ok(y),
        None => apply1(ToDtype(dtype), [x]),
    })
}

struct ToDtype(DType);

impl Differentiable<1> for ToDtype {
    fn name(&self) -> &'static str {
        "to_dtype"
    }

    fn forward(&self, [(x, layout)]: [(&CpuStorage, &Layout); 1]) -> Result<(CpuStorage, Shape)> {
        Ok((converted(x, layout, self.0)?, layout.shape().clone()))
    }

    fn cuda_forward(
        &self,
        [(x, layout)]: [(&CudaStorage, &Layout); 1],
    ) -> Result<(CudaStorage, Shape)> {
        Ok((x.to_dtype(layout, self.0)?, layout.shape().clone()))
    }

    fn backward(&self, [x]: [&Tensor; 1], _y: &Tensor, dy: &Tensor) -> Result<[Option<Tensor>; 1]> {
        let (storage, layout) = dy.storage_and_layout();
        let dx = match &*storage {
            Storage::Cpu(values) => {
                let values = Storage::Cpu(converted(values, layout, x.dtype())?);
                Tensor::from_storage(values, layout.shape(), BackpropOp::none(), false)
            }
            _ => dy.to_dtype(x.dtype())?,
        };
        Ok([Some(dx)])
    }
}

/// The type in which tensors of `dtype` are summed.
pub(crate) const fn sum_dtype(dtype: DType) -> DType {
    match dtype {
        DType::F16 | DType::BF16 => DType::F32,
        other => other,
    }
}

const fn amp_dtype(dtype: DType) -> Option<amp::DType> {
    match dtype {
        DType::F16 => Some(amp::DType::F16),
        DType::BF16 => Some(amp::DType::Bf16),
        DType::F32 => Some(amp::DType::F32),
        DType::F64 => Some(amp::DType::F64),
        _ => None,
    }
}

const fn candle_dtype(dtype: amp::DType) -> DType {
    match dtype {
        amp::DType::F16 => DType::F16,
        amp::DType::Bf16 => DType::BF16,
        amp::DType::F32 => DType::F32,
        amp::DType::F64 => DType::F64,
    }
}

#[cfg(test)]
mod tests;
