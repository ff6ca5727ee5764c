//! Conversion of types and values between the host and CANN.

use bytemuck::{AnyBitPattern, cast_slice, cast_slice_mut, pod_read_unaligned};
use half::{bf16, f16};
use npu_sys::sys::AclDataType;

use crate::{DType, Slice, SliceMut};

/// CANN's type.
pub(super) const fn acl(dtype: DType) -> AclDataType {
    match dtype {
        DType::F32 => AclDataType::FLOAT,
        DType::F16 => AclDataType::FLOAT16,
        DType::Bf16 => AclDataType::BF16,
    }
}

/// The bytes of values for the device.
pub(super) fn bytes(values: Slice<'_>) -> &[u8] {
    match values {
        Slice::F32(values) => cast_slice(values),
        Slice::F16(values) => cast_slice(values),
        Slice::Bf16(values) => cast_slice(values),
    }
}

/// Values from the device, converted to f32.
pub(super) fn floats(bytes: &[u8], dtype: AclDataType) -> Vec<f32> {
    match dtype {
        AclDataType::FLOAT16 => read(bytes, |x: f16| x.to_f32()),
        AclDataType::BF16 => read(bytes, |x: bf16| x.to_f32()),
        _ => read(bytes, |x| x),
    }
}

/// Copies values of the slice's type from the device to the slice.
pub(super) fn put(to: &mut SliceMut<'_>, bytes: &[u8]) {
    let to = match to {
        SliceMut::F32(to) => cast_slice_mut(to),
        SliceMut::F16(to) => cast_slice_mut(to),
        SliceMut::Bf16(to) => cast_slice_mut(to),
    };
    to.copy_from_slice(bytes);
}

fn read<T: AnyBitPattern>(bytes: &[u8], widen: impl Fn(T) -> f32) -> Vec<f32> {
    bytes.chunks_exact(size_of::<T>()).map(|x| widen(pod_read_unaligned(x))).collect()
}
