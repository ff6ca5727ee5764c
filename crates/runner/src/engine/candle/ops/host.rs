//! Between candle's tensors and the `f32` slices the kernels work on.
//!
//! Every kernel computes in `f32`. A half tensor is widened, exactly, on the way in, and what a
//! kernel returns is rounded once, to nearest even, on the way out. An `f32` tensor is borrowed
//! and moved, never copied.

use std::borrow::Cow;

use candle_core::{CpuStorage, DType, Device, Layout, Result, Shape, Storage, Tensor, bail};
use half::slice::HalfFloatSliceExt;
use half::{bf16, f16};

/// The elements of a contiguous tensor as `f32`.
pub(super) fn floats<'a>(storage: &'a CpuStorage, layout: &Layout) -> Result<Cow<'a, [f32]>> {
    let range = contiguous(layout)?;
    Ok(match storage {
        CpuStorage::F32(v) => Cow::Borrowed(&v[range]),
        CpuStorage::F16(v) => Cow::Owned(v[range].to_f32_vec()),
        CpuStorage::BF16(v) => Cow::Owned(v[range].to_f32_vec()),
        other => bail!("expected f32, f16 or bf16, got {:?}", dtype_of(other)),
    })
}

/// As [`floats`], from the guard that [`Tensor::storage_and_layout`] returns.
pub(super) fn floats_of<'a>(storage: &'a Storage, layout: &Layout) -> Result<Cow<'a, [f32]>> {
    match storage {
        Storage::Cpu(storage) => floats(storage, layout),
        _ => bail!("the engine's operators run on the CPU"),
    }
}

/// The elements of a contiguous tensor of class indices.
pub(super) fn indices<'a>(storage: &'a CpuStorage, layout: &Layout) -> Result<&'a [i64]> {
    match storage {
        CpuStorage::I64(v) => Ok(&v[contiguous(layout)?]),
        other => bail!("expected i64, got {:?}", dtype_of(other)),
    }
}

/// Rounds to `dtype`; `f32` passes through.
pub(super) fn rounded(values: Vec<f32>, dtype: DType) -> Result<CpuStorage> {
    Ok(match dtype {
        DType::F32 => CpuStorage::F32(values),
        DType::F16 => CpuStorage::F16(Vec::<f16>::from_f32_slice(&values)),
        DType::BF16 => CpuStorage::BF16(Vec::<bf16>::from_f32_slice(&values)),
        other => bail!("expected f32, f16 or bf16, got {other:?}"),
    })
}

/// A tensor of `values` rounded to `dtype`, which belongs to no graph.
pub(super) fn tensor(values: Vec<f32>, shape: impl Into<Shape>, dtype: DType) -> Result<Tensor> {
    let shape = shape.into();
    match rounded(values, dtype)? {
        CpuStorage::F32(v) => Tensor::from_vec(v, shape, &Device::Cpu),
        CpuStorage::F16(v) => Tensor::from_vec(v, shape, &Device::Cpu),
        CpuStorage::BF16(v) => Tensor::from_vec(v, shape, &Device::Cpu),
        other => bail!("expected f32, f16 or bf16, got {:?}", dtype_of(&other)),
    }
}

/// The dtype of a float tensor the kernels can work on.
pub(super) fn float_dtype(storage: &CpuStorage) -> Result<DType> {
    match dtype_of(storage) {
        dtype @ (DType::F32 | DType::F16 | DType::BF16) => Ok(dtype),
        other => bail!("expected f32, f16 or bf16, got {other:?}"),
    }
}

fn dtype_of(storage: &CpuStorage) -> DType {
    use candle_core::backend::BackendStorage;
    storage.dtype()
}

fn contiguous(layout: &Layout) -> Result<std::ops::Range<usize>> {
    match layout.contiguous_offsets() {
        Some((start, end)) => Ok(start..end),
        None => bail!("expected a contiguous tensor, got strides {:?}", layout.stride()),
    }
}

/// `Vec` of halves from a slice of `f32`, through `half`'s vectorised conversion.
trait FromF32Slice {
    fn from_f32_slice(values: &[f32]) -> Self;
}

macro_rules! from_f32_slice {
    ($half:ty) => {
        impl FromF32Slice for Vec<$half> {
            fn from_f32_slice(values: &[f32]) -> Self {
                let mut halves = vec![<$half>::ZERO; values.len()];
                halves.convert_from_f32_slice(values);
                halves
            }
        }
    };
}
from_f32_slice!(f16);
from_f32_slice!(bf16);
