//! Numbers as the host and as CANN have them.

use half::slice::HalfFloatSliceExt;
use npu_sys::sys::AclDataType;

use crate::{DType, Slice};

/// CANN's number of a type.
pub(super) const fn acl(dtype: DType) -> AclDataType {
    match dtype {
        DType::F32 => AclDataType::FLOAT,
        DType::F16 => AclDataType::FLOAT16,
        DType::Bf16 => AclDataType::BF16,
    }
}

/// As the device has them.
pub(super) fn bytes(values: Slice<'_>) -> Vec<u8> {
    let halves = |bits: &[u16]| bits.iter().flat_map(|x| x.to_ne_bytes()).collect();
    match values {
        Slice::F32(values) => values.iter().flat_map(|x| x.to_ne_bytes()).collect(),
        Slice::F16(values) => halves(values.reinterpret_cast()),
        Slice::Bf16(values) => halves(values.reinterpret_cast()),
    }
}

/// What the device had, widened.
pub(super) fn floats(bytes: &[u8], dtype: AclDataType) -> Vec<f32> {
    let halves = bytes.as_chunks().0.iter().map(|half| u16::from_ne_bytes(*half));
    match dtype {
        AclDataType::FLOAT16 => halves.map(|x| half::f16::from_bits(x).to_f32()).collect(),
        AclDataType::BF16 => halves.map(|x| half::bf16::from_bits(x).to_f32()).collect(),
        _ => bytes.as_chunks().0.iter().map(|word| f32::from_ne_bytes(*word)).collect(),
    }
}
