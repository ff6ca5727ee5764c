//! The division that makes an average of a sum: HCCL has none, so it is CANN's operator
//! `aclnnInplaceDivs`, in the same stream behind the sum.
//!
//! Operators want tensors that begin at a multiple of 32 bytes. A buffer need not, so the tensor begins
//! where the multiple before it is, and its elements at an offset; allocations of devices begin at
//! multiples of 64, so what is before the buffer is of the same allocation, and is not touched.

#![expect(unsafe_code, reason = "calls C")]

use std::ptr;
use std::sync::Arc;

use npu_sys::sys::{
    AclDataType, AclFormat, AclScalar, AclTensor, AclnnStatus, AclrtStream, Nnop, Ops,
};
use npu_sys::{LoadError, Status};

use super::npu::{Device, Memory};
use super::result::Tables;
use crate::backend::device::pointer;
use crate::device::DeviceStream;
use crate::{DType, Error, Result};

/// What CANN wants a tensor's address to be a multiple of.
const ALIGN: u64 = 32;

/// Whether there are the operators.
pub(super) fn available(tables: &Tables) -> Result<(&Nnop, &Ops)> {
    let lacks = |why: String| {
        let what = format!("an average, which is a sum and then aclnnInplaceDivs: {why}");
        Error::Unsupported { backend: "hccl", what }
    };
    let failed = |error: &LoadError| lacks(error.to_string());
    let nnop = tables.nnop.as_ref().map_err(failed)?;
    let ops = tables.ops.as_ref().map_err(failed)?;
    match ops.has("aclnnInplaceDivs") {
        true => Ok((nnop, ops)),
        false => Err(lacks("the CANN here lacks it; CANN 8.1 has it".into())),
    }
}

/// Divides `count` elements at `at` by `by`, in order of the stream; the device is current. The result
/// is the operator's workspace, which it needs until the stream has come past.
///
/// # Safety
///
/// They are memory of the device that nobody else uses until the stream has come this far, of a type
/// that [`dtype`] knows; the stream lives.
pub(super) unsafe fn divide(
    device: &Arc<Device>,
    (at, count, of): (u64, usize, DType),
    by: usize,
    stream: DeviceStream,
) -> Result<Option<Memory>> {
    let tables = &device.tables;
    let (nnop, ops) = available(tables)?;
    let check = |error| tables.error(error);
    let tensor = tensor(nnop, (at, count), of).map_err(check)?;
    let divisor = scalar(nnop, by as f32).map_err(check)?;
    // SAFETY: aclnn_div.h, `aclnnInplaceDivsGetWorkspaceSize`: a tensor and a scalar that exist.
    let plan = unsafe { ops.aclnnInplaceDivs(tensor.raw, divisor.raw) }.map_err(check)?;
    let bytes = usize::try_from(plan.workspace_bytes());
    let bytes = bytes.map_err(|_| {
        let status = Status::Aclnn(AclnnStatus(0));
        tables.status("aclnnInplaceDivs, which wants more workspace than there is memory", status)
    })?;
    let workspace = if bytes > 0 { Some(device.alloc(bytes)?) } else { None };
    let room = workspace.as_ref().map_or(ptr::null_mut(), Memory::address);
    // SAFETY: the workspace is as large as the plan wants, and lives until the stream has come past,
    // as whoever is given it keeps it; the elements by the caller's promise.
    let run = unsafe { plan.run(room, AclrtStream(stream.as_raw())) };
    run.map(|()| workspace).map_err(check)
}

/// A type as operators know it.
fn dtype(of: DType) -> AclDataType {
    match of {
        DType::F16 => AclDataType::FLOAT16,
        DType::Bf16 => AclDataType::BF16,
        DType::F32 => AclDataType::FLOAT,
        _ => unreachable!("HCCL averages no {of}"),
    }
}

/// An object of CANN's, destroyed when dropped.
struct Object<'a, T> {
    nnop: &'a Nnop,
    raw: *mut T,
    destroy: unsafe fn(&Nnop, *const T) -> npu_sys::Result<()>,
}

impl<T> Drop for Object<'_, T> {
    fn drop(&mut self) {
        // SAFETY: acl_meta.h, `aclDestroyTensor` and `aclDestroyScalar`: an object of the type, once; the operator
        // that has it has been put into its stream, or is not. A failure is ignored.
        drop(unsafe { (self.destroy)(self.nnop, self.raw) });
    }
}

/// An `aclTensor` of one dimension.
fn tensor(
    nnop: &Nnop,
    (at, count): (u64, usize),
    of: DType,
) -> npu_sys::Result<Object<'_, AclTensor>> {
    let base = at - at % ALIGN;
    // Elements lie at multiples of their size, which divides the alignment.
    let offset = ((at - base) as usize / of.size()) as i64;
    let (dims, storage, stride) = ([count as i64], [offset + count as i64], [1_i64]);
    // SAFETY: acl_meta.h, `aclCreateTensor`: one dimension, one stride, one of the storage.
    let raw = unsafe {
        nnop.aclCreateTensor(
            dims.as_ptr(),
            1,
            dtype(of),
            stride.as_ptr(),
            offset,
            AclFormat::ND,
            storage.as_ptr(),
            1,
            pointer(base),
        )
    }?;
    Ok(Object { nnop, raw, destroy: Nnop::aclDestroyTensor })
}

/// An `aclScalar`.
fn scalar(nnop: &Nnop, mut value: f32) -> npu_sys::Result<Object<'_, AclScalar>> {
    // SAFETY: acl_meta.h, `aclCreateScalar`: reads a number of the type before it returns.
    let raw = unsafe { nnop.aclCreateScalar((&raw mut value).cast(), AclDataType::FLOAT) }?;
    Ok(Object { nnop, raw, destroy: Nnop::aclDestroyScalar })
}
