//! Numbers as the host and as CANN have them.

use half::slice::HalfFloatSliceExt;
use npu_sys::sys::AclDataType;

use crate::{DType, Slice, SliceMut};

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

/// What the device had, of the slice's type, into the slice.
pub(super) fn put(to: &mut SliceMut<'_>, bytes: &[u8]) {
    let halves = |to: &mut [u16]| {
        let words = bytes.as_chunks().0.iter().map(|half| u16::from_ne_bytes(*half));
        to.iter_mut().zip(words).for_each(|(to, half)| *to = half);
    };
    match to {
        SliceMut::F32(to) => {
            let words = bytes.as_chunks().0.iter().map(|word| f32::from_ne_bytes(*word));
            to.iter_mut().zip(words).for_each(|(to, word)| *to = word);
        }
        SliceMut::F16(to) => halves(to.reinterpret_cast_mut()),
        SliceMut::Bf16(to) => halves(to.reinterpret_cast_mut()),
    }
}
