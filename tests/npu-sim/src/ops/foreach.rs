//! Operators on lists of tensors.

use std::sync::Arc;

use npu_sys::sys::*;

use super::{NO_KERNEL, Planned, computes, larger, scalar, tensor, tensors};
use crate::kernels::{Kernel, Numbers};
use crate::memory::pointer;
use crate::nnop::{INVALID, NULL, Tensor};
use crate::world::{World, world};

pub(super) const TILING: i32 = 561_002;
/// Most tensors of a list.
const LIST: usize = 50;
/// Most tensors of a list of norms.
const NORMS: usize = 256;

/// The tensors of a list.
pub(super) fn list(world: &mut World, handle: *const AclTensorList) -> Result<Vec<Tensor>, i32> {
    if handle.is_null() {
        return Err(NULL);
    }
    let Some(ids) = world.objects.lists.get(&handle.addr()).cloned() else {
        world.violation("a list of tensors is used that does not exist");
        return Err(INVALID);
    };
    ids.into_iter().map(|id| tensor(world, pointer(id))).collect()
}

/// The tensors of lists, each list as long as the first and at most `most` long.
fn lists<const N: usize>(
    handles: [*const AclTensorList; N],
    most: usize,
) -> Result<Vec<Vec<Tensor>>, i32> {
    let mut world = world();
    if !world.config.soc.has_foreach() {
        return Err(NO_KERNEL);
    }
    let found = handles.into_iter().map(|handle| list(&mut world, handle));
    let found = found.collect::<Result<Vec<_>, _>>()?;
    if found.iter().any(|list| list.len() != found[0].len()) {
        return Err(INVALID);
    }
    if found[0].len() > most { Err(TILING) } else { Ok(found) }
}

/// An operator on lists, element by element; `f` also gets the tensor's place in the list.
fn foreach<const N: usize>(
    handles: [*const AclTensorList; N],
    f: impl Fn(usize, &[f32]) -> f32 + Send + Sync + 'static,
) -> Planned {
    let mut inputs = lists(handles, LIST)?;
    let outputs = inputs.pop().ok_or(INVALID)?;
    for (at, output) in outputs.iter().enumerate() {
        if inputs.iter().any(|list| list[at].dims != output.dims) {
            return Err(INVALID);
        }
    }
    let all: Vec<_> = inputs.iter().flatten().chain(&outputs).cloned().collect();
    computes(&all)?;
    let (count, operands) = (outputs.len(), inputs.len());
    let compute = Arc::new(move |numbers: &[Numbers]| {
        let one = |at: usize| {
            let list: Vec<_> =
                (0..operands).map(|operand| &numbers[operand * count + at]).collect();
            let element = |i: usize| {
                let x: Vec<f32> = list.iter().map(|numbers| numbers[i] as f32).collect();
                f64::from(f(at, &x))
            };
            (0..list[0].len()).map(element).collect()
        };
        (0..count).map(one).collect()
    });
    Ok(Kernel { inputs: inputs.concat(), outputs, compute })
}

pub(crate) fn aclnnForeachMulScalarV2(
    a: *const AclTensorList,
    factor: *const AclScalar,
    out: *mut AclTensorList,
) -> Planned {
    let factor = scalar(factor)?;
    foreach([a, out], move |_, x| x[0] * factor)
}

pub(crate) fn aclnnForeachAddScalarV2(
    a: *const AclTensorList,
    b: *const AclScalar,
    out: *mut AclTensorList,
) -> Planned {
    let b = scalar(b)?;
    foreach([a, out], move |_, x| x[0] + b)
}

pub(crate) fn aclnnForeachAddListV2(
    a: *const AclTensorList,
    b: *const AclTensorList,
    alpha: *const AclScalar,
    out: *mut AclTensorList,
) -> Planned {
    let alpha = scalar(alpha)?;
    foreach([a, b, out], move |_, x| x[0] + alpha * x[1])
}

pub(crate) fn aclnnForeachAddcmulScalarV2(
    a: *const AclTensorList,
    b: *const AclTensorList,
    c: *const AclTensorList,
    value: *const AclScalar,
    out: *mut AclTensorList,
) -> Planned {
    let value = scalar(value)?;
    foreach([a, b, c, out], move |_, x| x[0] + value * x[1] * x[2])
}

pub(crate) fn aclnnForeachAddcdivScalarV2(
    a: *const AclTensorList,
    b: *const AclTensorList,
    c: *const AclTensorList,
    value: *const AclScalar,
    out: *mut AclTensorList,
) -> Planned {
    let value = scalar(value)?;
    foreach([a, b, c, out], move |_, x| x[0] + value * (x[1] / x[2]))
}

pub(crate) fn aclnnForeachSqrt(a: *const AclTensorList, out: *const AclTensorList) -> Planned {
    foreach([a, out], |_, x| x[0].sqrt())
}

/// Norms of order 1, 2 or infinity, one number each.
pub(crate) fn aclnnForeachNorm(
    a: *const AclTensorList,
    order: *const AclScalar,
    out: *const AclTensorList,
) -> Planned {
    let order = scalar(order)?;
    let mut all = lists([a, out], NORMS)?;
    let (outputs, inputs) = (all.pop().ok_or(INVALID)?, all.pop().ok_or(INVALID)?);
    let each: Vec<_> = inputs.iter().chain(&outputs).cloned().collect();
    computes(&each)?;
    if outputs.iter().any(|output| output.count() != 1) {
        return Err(INVALID);
    }
    let norm: fn(&Numbers) -> f32 = match order {
        1.0 => |x| x.iter().map(|x| (*x as f32).abs()).sum(),
        2.0 => |x| x.iter().map(|x| (*x as f32) * (*x as f32)).sum::<f32>().sqrt(),
        f32::INFINITY => |x| x.iter().fold(0.0, |most, x| larger((*x as f32).abs(), most)),
        _ => return Err(INVALID),
    };
    let compute =
        Arc::new(move |x: &[Numbers]| x.iter().map(|x| vec![f64::from(norm(x))]).collect());
    Ok(Kernel { inputs, outputs, compute })
}

pub(crate) fn aclnnForeachDivList(
    a: *const AclTensorList,
    b: *const AclTensorList,
    out: *const AclTensorList,
) -> Planned {
    foreach([a, b, out], |_, x| x[0] / x[1])
}

pub(crate) fn aclnnForeachMulList(
    a: *const AclTensorList,
    b: *const AclTensorList,
    out: *const AclTensorList,
) -> Planned {
    foreach([a, b, out], |_, x| x[0] * x[1])
}

pub(crate) fn aclnnForeachMulScalarList(
    a: *const AclTensorList,
    factors: *const AclScalarList,
    out: *const AclTensorList,
) -> Planned {
    let ids = {
        let mut world = world();
        let Some(ids) = world.objects.scalar_lists.get(&factors.addr()).cloned() else {
            world.violation("a list of scalars is used that does not exist");
            return Err(INVALID);
        };
        ids
    };
    let factors: Result<Vec<f32>, i32> = ids.into_iter().map(|id| scalar(pointer(id))).collect();
    let factors = factors?;
    if lists([a], LIST)?[0].len() != factors.len() {
        return Err(INVALID);
    }
    foreach([a, out], move |at, x| x[0] * factors[at])
}

pub(crate) fn aclnnForeachMaximumList(
    a: *const AclTensorList,
    b: *const AclTensorList,
    out: *const AclTensorList,
) -> Planned {
    foreach([a, b, out], |_, x| larger(x[0], x[1]))
}

pub(crate) fn aclnnForeachLerpScalar(
    a: *const AclTensorList,
    b: *const AclTensorList,
    weight: *const AclScalar,
    out: *const AclTensorList,
) -> Planned {
    let weight = scalar(weight)?;
    foreach([a, b, out], move |_, x| x[0] + weight * (x[1] - x[0]))
}

pub(crate) fn aclnnForeachCopy(a: *const AclTensorList, out: *const AclTensorList) -> Planned {
    foreach([a, out], |_, x| x[0])
}

/// Judged on what comes in; the verdict is only ever set.
pub(crate) fn aclnnForeachNonFiniteCheckAndUnscale(
    a: *const AclTensorList,
    found_inf: *const AclTensor,
    inv_scale: *const AclTensor,
) -> Planned {
    let list = lists([a], NORMS)?.remove(0);
    computes(&list)?;
    let ends = tensors([found_inf, inv_scale])?;
    if ends.iter().any(|end| end.count() != 1 || end.dtype != AclDataType::FLOAT) {
        return Err(INVALID);
    }
    let (mut inputs, mut outputs) = (list.clone(), list);
    inputs.extend(ends.clone());
    outputs.push(ends[0].clone());
    let compute = Arc::new(|x: &[Numbers]| {
        let (ends, list) = (&x[x.len() - 2..], &x[..x.len() - 2]);
        let scale = ends[1][0] as f32;
        let unscaled = |x: &Numbers| x.iter().map(|x| f64::from(*x as f32 * scale)).collect();
        let found = list.iter().flatten().any(|x| !x.is_finite()) || ends[0][0] != 0.0;
        let mut out: Vec<Numbers> = list.iter().map(unscaled).collect();
        out.push(vec![f64::from(u8::from(found))]);
        out
    });
    Ok(Kernel { inputs, outputs, compute })
}

pub(crate) fn aclnnForeachZeroInplace(a: *const AclTensorList) -> Planned {
    foreach([a, a], |_, _| 0.0)
}
