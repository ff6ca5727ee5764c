//! Conversion of types and values between the host and CANN.

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
pub(super) fn bytes(values: Slice<'_>) -> Vec<u8> {
    match values {
        Slice::F32(values) => values.iter().flat_map(|x| x.to_ne_bytes()).collect(),
        Slice::F16(values) => values.iter().flat_map(|x| x.to_ne_bytes()).collect(),
        Slice::Bf16(values) => values.iter().flat_map(|x| x.to_ne_bytes()).collect(),
    }
}

/// Values from the device, converted to f32.
pub(super) fn floats(bytes: &[u8], dtype: AclDataType) -> Vec<f32> {
    match dtype {
        AclDataType::FLOAT16 => numbers(bytes, |x| f16::from_ne_bytes(x).to_f32()).collect(),
        AclDataType::BF16 => numbers(bytes, |x| bf16::from_ne_bytes(x).to_f32()).collect(),
        _ => numbers(bytes, f32::from_ne_bytes).collect(),
    }
}

/// Copies values of the slice's type from the device to the slice.
pub(super) fn put(to: &mut SliceMut<'_>, bytes: &[u8]) {
    match to {
        SliceMut::F32(to) => copy(to, numbers(bytes, f32::from_ne_bytes)),
        SliceMut::F16(to) => copy(to, numbers(bytes, f16::from_ne_bytes)),
        SliceMut::Bf16(to) => copy(to, numbers(bytes, bf16::from_ne_bytes)),
    }
}

fn numbers<T, const N: usize>(
    bytes: &[u8],
    read: impl Fn([u8; N]) -> T,
) -> impl Iterator<Item = T> {
    bytes.as_chunks().0.iter().map(move |chunk| read(*chunk))
}

fn copy<T>(to: &mut [T], from: impl Iterator<Item = T>) {
    to.iter_mut().zip(from).for_each(|(to, from)| *to = from);
}
