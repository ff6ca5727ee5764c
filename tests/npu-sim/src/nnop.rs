//! Tensors, scalars, lists and executors of operators.

#![expect(non_snake_case, reason = "the names are C's")]

use std::collections::BTreeMap;
use std::ffi::{c_char, c_void};
use std::fmt;
use std::ptr;

use half::{bf16, f16};
use npu_sys::sys::*;

use crate::kernels::Kernel;
use crate::memory::pointer;
use crate::raw;
use crate::world::{World, world};

type Outcome = Result<(), i32>;

pub(crate) const NULL: i32 = 161_001;
pub(crate) const INVALID: i32 = 161_002;
pub(crate) const RUNTIME: i32 = 361_001;

/// A tensor as a kernel sees it: contiguous.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Tensor {
    pub(crate) address: usize,
    pub(crate) dims: Vec<usize>,
    pub(crate) dtype: AclDataType,
}

impl Tensor {
    pub(crate) fn count(&self) -> usize {
        self.dims.iter().product()
    }

    pub(crate) fn bytes(&self) -> usize {
        self.count() * width(self.dtype)
    }
}

/// Bytes of an element; 0 for types that the simulator does not have.
pub(crate) fn width(dtype: AclDataType) -> usize {
    match dtype {
        AclDataType::INT8 | AclDataType::UINT8 | AclDataType::BOOL => 1,
        AclDataType::FLOAT16 | AclDataType::BF16 => 2,
        AclDataType::FLOAT | AclDataType::INT32 => 4,
        AclDataType::INT64 | AclDataType::DOUBLE => 8,
        _ => 0,
    }
}

/// A planned operator.
pub(crate) struct Executor {
    pub(crate) operator: &'static str,
    pub(crate) kernel: Kernel,
    pub(crate) workspace: u64,
    pub(crate) repeatable: bool,
}

impl fmt::Debug for Executor {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Executor({})", self.operator)
    }
}

/// Everything there is, by handle.
#[derive(Debug, Default)]
pub(crate) struct Objects {
    pub(crate) tensors: BTreeMap<usize, Tensor>,
    pub(crate) scalars: BTreeMap<usize, f64>,
    pub(crate) arrays: BTreeMap<usize, Vec<i64>>,
    pub(crate) lists: BTreeMap<usize, Vec<usize>>,
    pub(crate) scalar_lists: BTreeMap<usize, Vec<usize>>,
    pub(crate) executors: BTreeMap<usize, Executor>,
}

impl Objects {
    pub(crate) fn counts(&self) -> [(usize, &'static str); 6] {
        [
            (self.tensors.len(), "tensors"),
            (self.scalars.len(), "scalars"),
            (self.arrays.len(), "arrays"),
            (self.lists.len(), "lists of tensors"),
            (self.scalar_lists.len(), "lists of scalars"),
            (self.executors.len(), "executors"),
        ]
    }
}

pub(crate) fn aclnnInit(_config: *const c_char) -> Outcome {
    world().operators_initialised = true;
    Ok(())
}

pub(crate) fn aclnnFinalize() -> Outcome {
    world().operators_initialised = false;
    Ok(())
}

/// Strides of a tensor without gaps.
fn contiguous(dims: &[usize]) -> Vec<i64> {
    let mut strides = vec![1; dims.len()];
    for at in (1..dims.len()).rev() {
        strides[at - 1] = strides[at] * dims[at] as i64;
    }
    strides
}

pub(crate) fn aclCreateTensor(
    dims: *const i64,
    rank: u64,
    dtype: AclDataType,
    strides: *const i64,
    offset: i64,
    format: AclFormat,
    _storage_dims: *const i64,
    _storage_rank: u64,
    address: *mut c_void,
) -> Result<*mut AclTensor, i32> {
    let sizes = raw::array(dims, rank).ok_or(NULL)?;
    let dims: Option<Vec<_>> = sizes.iter().map(|size| usize::try_from(*size).ok()).collect();
    let dims = dims.ok_or(INVALID)?;
    let mut world = world();
    if !strides.is_null() && raw::array(strides, rank).ok_or(NULL)? != contiguous(&dims) {
        world.violation("a tensor with gaps, which the simulator does not have");
        return Err(INVALID);
    }
    if !address.addr().is_multiple_of(32) {
        world.violation("a tensor's address is not a multiple of 32");
        return Err(INVALID);
    }
    if width(dtype) == 0 || format != AclFormat::ND || offset < 0 {
        return Err(INVALID);
    }
    let address = address.addr() + offset as usize * width(dtype);
    let id = world.handle();
    world.objects.tensors.insert(id, Tensor { address, dims, dtype });
    Ok(pointer(id))
}

pub(crate) fn aclCreateScalar(
    value: *mut c_void,
    dtype: AclDataType,
) -> Result<*mut AclScalar, i32> {
    let value = value.cast_const();
    let read = match dtype {
        AclDataType::FLOAT => raw::get(value.cast::<f32>()).map(f64::from),
        AclDataType::DOUBLE => raw::get(value.cast::<f64>()),
        AclDataType::FLOAT16 => raw::get(value.cast::<u16>()).map(|b| f16::from_bits(b).to_f64()),
        AclDataType::BF16 => raw::get(value.cast::<u16>()).map(|b| bf16::from_bits(b).to_f64()),
        AclDataType::INT32 => raw::get(value.cast::<i32>()).map(f64::from),
        AclDataType::INT64 => raw::get(value.cast::<i64>()).map(|value| value as f64),
        _ => return Err(INVALID),
    };
    let read = read.ok_or(NULL)?;
    let mut world = world();
    let id = world.handle();
    world.objects.scalars.insert(id, read);
    Ok(pointer(id))
}

pub(crate) fn aclCreateIntArray(values: *const i64, count: u64) -> Result<*mut AclIntArray, i32> {
    let values = if count == 0 { Vec::new() } else { raw::array(values, count).ok_or(NULL)? };
    let mut world = world();
    let id = world.handle();
    world.objects.arrays.insert(id, values);
    Ok(pointer(id))
}

pub(crate) fn aclCreateTensorList(
    tensors: *const *const AclTensor,
    count: u64,
) -> Result<*mut AclTensorList, i32> {
    let tensors = raw::array(tensors, count).ok_or(NULL)?;
    let ids: Vec<_> = tensors.iter().map(|tensor| tensor.addr()).collect();
    let mut world = world();
    if ids.iter().any(|id| !world.objects.tensors.contains_key(id)) {
        world.violation("a list of something that is no tensor");
        return Err(INVALID);
    }
    let id = world.handle();
    world.objects.lists.insert(id, ids);
    Ok(pointer(id))
}

pub(crate) fn aclCreateScalarList(
    scalars: *const *const AclScalar,
    count: u64,
) -> Result<*mut AclScalarList, i32> {
    let scalars = raw::array(scalars, count).ok_or(NULL)?;
    let ids: Vec<_> = scalars.iter().map(|scalar| scalar.addr()).collect();
    let mut world = world();
    if ids.iter().any(|id| !world.objects.scalars.contains_key(id)) {
        world.violation("a list of something that is no scalar");
        return Err(INVALID);
    }
    let id = world.handle();
    world.objects.scalar_lists.insert(id, ids);
    Ok(pointer(id))
}

/// Removes an object; what is not there was destroyed before, or never made.
fn destroy<T>(
    objects: impl FnOnce(&mut Objects) -> &mut BTreeMap<usize, T>,
    id: usize,
    what: &str,
) -> Result<T, i32> {
    let mut world = world();
    let found = objects(&mut world.objects).remove(&id);
    found.ok_or_else(|| {
        world.violation(format!("{what} that does not exist is destroyed"));
        INVALID
    })
}

pub(crate) fn aclDestroyTensor(tensor: *const AclTensor) -> Outcome {
    destroy(|objects| &mut objects.tensors, tensor.addr(), "a tensor").map(drop)
}

pub(crate) fn aclDestroyScalar(scalar: *const AclScalar) -> Outcome {
    destroy(|objects| &mut objects.scalars, scalar.addr(), "a scalar").map(drop)
}

pub(crate) fn aclDestroyIntArray(array: *const AclIntArray) -> Outcome {
    destroy(|objects| &mut objects.arrays, array.addr(), "an array").map(drop)
}

/// The list's tensors go with it.
pub(crate) fn aclDestroyTensorList(list: *const AclTensorList) -> Outcome {
    let tensors = destroy(|objects| &mut objects.lists, list.addr(), "a list of tensors")?;
    let each = |id| destroy(|objects| &mut objects.tensors, id, "a list's tensor").map(drop);
    tensors.into_iter().try_for_each(each)
}

/// The list's scalars go with it.
pub(crate) fn aclDestroyScalarList(list: *const AclScalarList) -> Outcome {
    let scalars = destroy(|objects| &mut objects.scalar_lists, list.addr(), "a list of scalars")?;
    let each = |id| destroy(|objects| &mut objects.scalars, id, "a list's scalar").map(drop);
    scalars.into_iter().try_for_each(each)
}

fn executor(world: &mut World, id: usize) -> Result<&mut Executor, i32> {
    if !world.objects.executors.contains_key(&id) {
        world.violation("an executor is used that does not exist, or ran already");
        return Err(INVALID);
    }
    world.objects.executors.get_mut(&id).ok_or(INVALID)
}

pub(crate) fn aclSetAclOpExecutorRepeatable(plan: *mut AclOpExecutor) -> Outcome {
    executor(&mut world(), plan.addr())?.repeatable = true;
    Ok(())
}

pub(crate) fn aclDestroyAclOpExecutor(plan: *mut AclOpExecutor) -> Outcome {
    let mut world = world();
    if !executor(&mut world, plan.addr())?.repeatable {
        world.violation("an executor is destroyed that is not repeatable");
        return Err(INVALID);
    }
    world.objects.executors.remove(&plan.addr());
    Ok(())
}

pub(crate) fn aclSetInputTensorAddr(
    plan: *mut AclOpExecutor,
    index: usize,
    tensor: *mut AclTensor,
    address: *mut c_void,
) -> Outcome {
    let mut world = world();
    let Some(old) = world.objects.tensors.get(&tensor.addr()).cloned() else {
        return Err(if ptr::eq(tensor, ptr::null()) { NULL } else { INVALID });
    };
    if !address.addr().is_multiple_of(32) {
        world.violation("a tensor's address is not a multiple of 32");
        return Err(INVALID);
    }
    let plan = executor(&mut world, plan.addr())?;
    if !plan.repeatable {
        return Err(INVALID);
    }
    let input = plan.kernel.inputs.get_mut(index).ok_or(INVALID)?;
    if *input != old {
        return Err(INVALID);
    }
    input.address = address.addr();
    Ok(())
}
