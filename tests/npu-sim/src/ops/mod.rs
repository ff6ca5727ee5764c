//! Operators: what they ask of their arguments, and what they compute.

#![expect(non_snake_case, reason = "the names are C's")]

mod foreach;
mod fused;

use std::ffi::c_void;
use std::sync::Arc;

use npu_sys::sys::*;

use crate::kernels::{Kernel, Numbers, broadcasts, element_wise, sum};
use crate::memory::pointer;
use crate::nnop::{Executor, INVALID, NULL, RUNTIME, Tensor};
use crate::raw;
use crate::world::{World, world};

pub(crate) use foreach::*;
pub(crate) use fused::*;

type Planned = Result<Kernel, i32>;

const NO_KERNEL: i32 = 561_003;
/// Workspace of operators that want some, in bytes.
const WORKSPACE: u64 = 4096;
/// The byte that fills the workspace before an operator runs.
const SCRATCH: u8 = 0x5a;

fn needs_workspace(operator: &str) -> bool {
    let some = ["aclnnForeach", "aclnnReduceSum", "aclnnApplyAdamWV2", "aclnnFused", "aclnnCast"];
    some.iter().any(|prefix| operator.starts_with(prefix))
}

/// Ends every first phase.
pub(crate) fn planned(
    operator: &'static str,
    kernel: Kernel,
    workspace_bytes: *mut u64,
    executor: *mut *mut AclOpExecutor,
) -> Result<(), i32> {
    let workspace = if needs_workspace(operator) { WORKSPACE } else { 0 };
    let mut world = world();
    let id = world.handle();
    raw::put(workspace_bytes, workspace).ok_or(NULL)?;
    raw::put(executor, pointer(id)).ok_or(NULL)?;
    let plan = Executor { operator, kernel, workspace, repeatable: false };
    world.objects.executors.insert(id, plan);
    Ok(())
}

/// Every second phase.
pub(crate) fn run(
    operator: &'static str,
    workspace: *mut c_void,
    bytes: u64,
    executor: *mut AclOpExecutor,
    stream: AclrtStream,
) -> Result<(), i32> {
    let mut world = world();
    let stream = world.stream_of(stream.0.addr()).map_err(|_| RUNTIME)?;
    let (_, device) = world.current().map_err(|_| RUNTIME)?;
    let id = executor.addr();
    let Some(plan) = world.objects.executors.get(&id) else {
        world.violation(format!("{operator}: the executor does not exist, or ran already"));
        return Err(INVALID);
    };
    if plan.operator != operator {
        let other = plan.operator;
        world.violation(format!("{operator} is given an executor of {other}"));
        return Err(INVALID);
    }
    let (kernel, wanted, repeatable) = (plan.kernel.clone(), plan.workspace, plan.repeatable);
    if !repeatable {
        world.objects.executors.remove(&id);
    }
    if bytes < wanted || (wanted > 0 && workspace.is_null()) {
        world.violation(format!("{operator} wants {wanted} bytes of workspace and gets {bytes}"));
        return Err(INVALID);
    }
    let (workspace, bytes) = (workspace.addr(), wanted as usize);
    let job = Box::new(move || {
        let mut world = crate::world::world();
        if bytes > 0 {
            let found = world.memory.on_device(workspace, bytes, device);
            let at = found.map_err(|what| {
                world.violation(format!("{operator}'s workspace: {what}"));
                RUNTIME
            })?;
            raw::write(at, &vec![SCRATCH; bytes]);
        }
        kernel.run(&mut world, device)
    });
    world.submit(stream, job).map(drop).map_err(|_| RUNTIME)
}

fn tensor(world: &mut World, handle: *const AclTensor) -> Result<Tensor, i32> {
    if handle.is_null() {
        return Err(NULL);
    }
    let found = world.objects.tensors.get(&handle.addr()).cloned();
    found.ok_or_else(|| {
        world.violation("a tensor is used that does not exist");
        INVALID
    })
}

fn scalar(handle: *const AclScalar) -> Result<f32, i32> {
    if handle.is_null() {
        return Err(NULL);
    }
    let mut world = world();
    let found = world.objects.scalars.get(&handle.addr()).copied();
    found.map(|value| value as f32).ok_or_else(|| {
        world.violation("a scalar is used that does not exist");
        INVALID
    })
}

fn tensors<const N: usize>(handles: [*const AclTensor; N]) -> Result<Vec<Tensor>, i32> {
    let mut world = world();
    handles.into_iter().map(|handle| tensor(&mut world, handle)).collect()
}

/// Whether the chip computes with these, all of one type.
fn computes(all: &[Tensor]) -> Result<(), i32> {
    let dtype = all.first().ok_or(INVALID)?.dtype;
    let one_type = all.iter().all(|tensor| tensor.dtype == dtype);
    if one_type && world().config.soc.computes(dtype) { Ok(()) } else { Err(INVALID) }
}

/// An operator element by element; the last handle is the output.
fn elements<const N: usize>(
    handles: [*const AclTensor; N],
    f: impl Fn(&[f32]) -> f32 + Send + Sync + 'static,
) -> Planned {
    let mut inputs = tensors(handles)?;
    computes(&inputs)?;
    let output = inputs.pop().ok_or(INVALID)?;
    if !inputs.iter().all(|input| broadcasts(&input.dims, &output.dims)) {
        return Err(INVALID);
    }
    let dims = inputs.iter().map(|input| input.dims.clone()).collect();
    let compute = element_wise(dims, output.dims.clone(), f);
    Ok(Kernel { inputs, outputs: vec![output], compute })
}

pub(crate) fn aclnnInplaceMuls(a: *mut AclTensor, factor: *const AclScalar) -> Planned {
    aclnnMuls(a, factor, a)
}

pub(crate) fn aclnnMuls(
    a: *const AclTensor,
    factor: *const AclScalar,
    out: *mut AclTensor,
) -> Planned {
    let factor = scalar(factor)?;
    elements([a, out], move |x| x[0] * factor)
}

pub(crate) fn aclnnInplaceAdd(
    a: *const AclTensor,
    b: *const AclTensor,
    alpha: *const AclScalar,
) -> Planned {
    aclnnAdd(a, b, alpha, a.cast_mut())
}

pub(crate) fn aclnnAdd(
    a: *const AclTensor,
    b: *const AclTensor,
    alpha: *const AclScalar,
    out: *mut AclTensor,
) -> Planned {
    let alpha = scalar(alpha)?;
    elements([a, b, out], move |x| x[0] + alpha * x[1])
}

pub(crate) fn aclnnAdds(
    a: *const AclTensor,
    b: *const AclScalar,
    alpha: *const AclScalar,
    out: *mut AclTensor,
) -> Planned {
    let (b, alpha) = (scalar(b)?, scalar(alpha)?);
    elements([a, out], move |x| x[0] + alpha * b)
}

pub(crate) fn aclnnInplaceAdds(
    a: *const AclTensor,
    b: *const AclScalar,
    alpha: *const AclScalar,
) -> Planned {
    aclnnAdds(a, b, alpha, a.cast_mut())
}

pub(crate) fn aclnnInplaceAddcmul(
    a: *const AclTensor,
    b: *const AclTensor,
    c: *const AclTensor,
    value: *const AclScalar,
) -> Planned {
    aclnnAddcmul(a, b, c, value, a.cast_mut())
}

pub(crate) fn aclnnAddcmul(
    a: *const AclTensor,
    b: *const AclTensor,
    c: *const AclTensor,
    value: *const AclScalar,
    out: *mut AclTensor,
) -> Planned {
    let value = scalar(value)?;
    elements([a, b, c, out], move |x| x[0] + value * x[1] * x[2])
}

pub(crate) fn aclnnInplaceAddcdiv(
    a: *const AclTensor,
    b: *const AclTensor,
    c: *const AclTensor,
    value: *const AclScalar,
) -> Planned {
    let value = scalar(value)?;
    elements([a, b, c, a], move |x| x[0] + value * (x[1] / x[2]))
}

pub(crate) fn aclnnSqrt(a: *const AclTensor, out: *mut AclTensor) -> Planned {
    elements([a, out], |x| x[0].sqrt())
}

pub(crate) fn aclnnInplaceSqrt(a: *mut AclTensor) -> Planned {
    aclnnSqrt(a, a)
}

pub(crate) fn aclnnDiv(a: *const AclTensor, b: *const AclTensor, out: *mut AclTensor) -> Planned {
    elements([a, b, out], |x| x[0] / x[1])
}

pub(crate) fn aclnnInplaceDiv(a: *mut AclTensor, b: *const AclTensor) -> Planned {
    aclnnDiv(a, b, a)
}

pub(crate) fn aclnnInplaceDivs(a: *mut AclTensor, divisor: *const AclScalar) -> Planned {
    let divisor = scalar(divisor)?;
    elements([a, a], move |x| x[0] / divisor)
}

pub(crate) fn aclnnMul(a: *const AclTensor, b: *const AclTensor, out: *mut AclTensor) -> Planned {
    elements([a, b, out], |x| x[0] * x[1])
}

pub(crate) fn aclnnInplaceMul(a: *mut AclTensor, b: *const AclTensor) -> Planned {
    aclnnMul(a, b, a)
}

pub(crate) fn aclnnMaximum(
    a: *const AclTensor,
    b: *const AclTensor,
    out: *mut AclTensor,
) -> Planned {
    elements([a, b, out], |x| larger(x[0], x[1]))
}

/// The larger; NaN if one is.
fn larger(a: f32, b: f32) -> f32 {
    if a > b || a.is_nan() { a } else { b }
}

pub(crate) fn aclnnReduceSum(
    a: *const AclTensor,
    dims: *const AclIntArray,
    keep_dims: bool,
    dtype: AclDataType,
    out: *mut AclTensor,
) -> Planned {
    let all = tensors([a, out])?;
    computes(&all)?;
    let (input, output) = (all[0].clone(), all[1].clone());
    let rank = input.dims.len() as i64;
    let over = {
        let mut world = world();
        let Some(over) = world.objects.arrays.get(&dims.addr()).cloned() else {
            world.violation("an array is used that does not exist");
            return Err(INVALID);
        };
        over
    };
    if dtype != output.dtype || over.iter().any(|dim| !(-rank..rank).contains(dim)) {
        return Err(INVALID);
    }
    let over: Vec<usize> = over.iter().map(|dim| dim.rem_euclid(rank) as usize).collect();
    let left = |dim: usize| {
        if over.contains(&dim) { keep_dims.then_some(1) } else { Some(input.dims[dim]) }
    };
    if output.dims != (0..input.dims.len()).filter_map(left).collect::<Vec<_>>() {
        return Err(INVALID);
    }
    let shape = input.dims.clone();
    let compute = Arc::new(move |numbers: &[Numbers]| vec![sum(&numbers[0], &shape, &over)]);
    Ok(Kernel { inputs: vec![input], outputs: vec![output], compute })
}

/// Numbers pass as they are, into a type of the output's.
fn moved(from: *const AclTensor, out: *const AclTensor) -> Planned {
    let all = tensors([from, out])?;
    let (input, output) = (all[0].clone(), all[1].clone());
    if input.dims != output.dims {
        return Err(INVALID);
    }
    let bf16 = [&input, &output].iter().any(|tensor| tensor.dtype == AclDataType::BF16);
    if bf16 && !world().config.soc.computes(AclDataType::BF16) {
        return Err(INVALID);
    }
    let compute = Arc::new(|numbers: &[Numbers]| numbers.to_vec());
    Ok(Kernel { inputs: vec![input], outputs: vec![output], compute })
}

pub(crate) fn aclnnCast(a: *const AclTensor, dtype: AclDataType, out: *mut AclTensor) -> Planned {
    let kernel = moved(a, out)?;
    if kernel.outputs[0].dtype == dtype { Ok(kernel) } else { Err(INVALID) }
}

pub(crate) fn aclnnInplaceCopy(a: *mut AclTensor, from: *const AclTensor) -> Planned {
    moved(from, a)
}

fn filled(a: *mut AclTensor, value: f32) -> Planned {
    let outputs = tensors([a.cast_const()])?;
    let count = outputs[0].count();
    let compute = Arc::new(move |_: &[Numbers]| vec![vec![f64::from(value); count]]);
    Ok(Kernel { inputs: Vec::new(), outputs, compute })
}

pub(crate) fn aclnnInplaceZero(a: *mut AclTensor) -> Planned {
    filled(a, 0.0)
}

pub(crate) fn aclnnInplaceFillScalar(a: *mut AclTensor, value: *const AclScalar) -> Planned {
    filled(a, scalar(value)?)
}

pub(crate) fn aclnnIsFinite(a: *const AclTensor, out: *mut AclTensor) -> Planned {
    let all = tensors([a, out])?;
    let (input, output) = (all[0].clone(), all[1].clone());
    computes(std::slice::from_ref(&input))?;
    if output.dtype != AclDataType::BOOL || output.dims != input.dims {
        return Err(INVALID);
    }
    let dims = input.dims.clone();
    let finite = |x: &[f32]| f32::from(u8::from(x[0].is_finite()));
    let compute = element_wise(vec![dims.clone()], dims, finite);
    Ok(Kernel { inputs: vec![input], outputs: vec![output], compute })
}
