//! Average as a sum and a division: HCCL has no average, so CANN's operator `aclnnInplaceDivs`
//! divides the sum in the same stream.
//!
//! CANN's operators require tensors aligned to 32 bytes. A buffer may not be, so the tensor begins
//! at the previous multiple of 32 and its elements at an offset. Device allocations are aligned to
//! 64 bytes, so the bytes before the buffer belong to the same allocation. They are not accessed.

#![expect(unsafe_code, reason = "calls C")]

use std::ptr;

use npu_sys::safe::{Buffer, Number, Tensor};
use npu_sys::sys::{AclDataType, AclnnStatus, AclrtStream, Nnop, Ops};
use npu_sys::{LoadError, Status};

use super::npu::Device;
use super::result::Tables;
use crate::backend::device::pointer;
use crate::backend::device_memory::DeviceStream;
use crate::{DType, Error, Result};

/// Alignment in bytes that CANN requires of a tensor.
const ALIGN: u64 = 32;

/// Returns the tables of the operator. Fails if `aclnnInplaceDivs` is missing.
pub(super) fn available(tables: &Tables) -> Result<(&Nnop, &Ops)> {
    let lacks = |why: String| {
        let what = format!("an average, which needs the operator aclnnInplaceDivs: {why}");
        Error::Unsupported { backend: "hccl", what }
    };
    let failed = |error: &LoadError| lacks(error.to_string());
    let nnop = tables.nnop.as_ref().map_err(failed)?;
    let ops = tables.ops.as_ref().map_err(failed)?;
    match ops.has("aclnnInplaceDivs") {
        true => Ok((nnop, ops)),
        false => Err(lacks("this CANN lacks it; install CANN 8.1".into())),
    }
}

/// Divides `count` elements at `at` by `by`, in stream order. The device must be current. Returns
/// the operator's workspace, which must be kept until the stream has completed the division.
///
/// # Safety
///
/// The elements are device memory that nothing else uses until the stream has completed the
/// division, of a type that [`dtype`] supports. The stream is alive.
pub(super) unsafe fn divide(
    device: &Device,
    (at, count, of): (u64, usize, DType),
    by: usize,
    stream: DeviceStream,
) -> Result<Option<Buffer>> {
    let tables = &device.tables;
    let (nnop, ops) = available(tables)?;
    let check = |error| tables.error(error);
    // Addresses of elements are multiples of their size, which divides the alignment.
    let (base, offset) = (pointer(at - at % ALIGN), (at % ALIGN) as usize / of.size());
    // SAFETY: the elements by the caller's promise.
    let tensor = unsafe { Tensor::strided(nnop, base, offset, count, dtype(of)) }.map_err(check)?;
    let divisor = Number::new(nnop, by as f32).map_err(check)?;
    // SAFETY: aclnn_div.h, `aclnnInplaceDivsGetWorkspaceSize`: a tensor and a scalar that exist.
    let plan = unsafe { ops.aclnnInplaceDivs(tensor.raw(), divisor.raw()) }.map_err(check)?;
    let bytes = usize::try_from(plan.workspace_bytes());
    let bytes = bytes.map_err(|_| {
        let status = Status::Aclnn(AclnnStatus(0));
        tables.status("aclnnInplaceDivs, whose workspace exceeds the address space", status)
    })?;
    let workspace = if bytes > 0 { Some(device.alloc(bytes)?) } else { None };
    let room = workspace.as_ref().map_or(ptr::null_mut(), Buffer::address);
    // SAFETY: the workspace has the size of the plan, and the caller keeps it until the stream has
    // completed the division; the elements by the caller's promise.
    let run = unsafe { plan.run(room, AclrtStream(stream.as_raw())) };
    run.map(|()| workspace).map_err(check)
}

/// Returns the `AclDataType` of a type that HCCL averages.
fn dtype(of: DType) -> AclDataType {
    match of {
        DType::F16 => AclDataType::FLOAT16,
        DType::Bf16 => AclDataType::BF16,
        DType::F32 => AclDataType::FLOAT,
        _ => unreachable!("HCCL does not average {of}"),
    }
}
