//! Between candle's tensors and the `f32` slices the kernels work on.
//!
//! Every kernel computes in `f32`. A half tensor is widened, exactly, on the way in, and what a
//! kernel returns is rounded once, to nearest even, on the way out. An `f32` tensor is borrowed
//! and moved, never copied.

use std::borrow::Cow;

use amp::CastTo;
use candle_core::{CpuStorage, DType, Device, Layout, Result, Shape, Storage, Tensor, bail};

/// The elements of a contiguous tensor as `f32`.
pub(super) fn floats<'a>(storage: &'a CpuStorage, layout: &Layout) -> Result<Cow<'a, [f32]>> {
    let range = contiguous(layout)?;
    Ok(match storage {
        CpuStorage::F32(v) => Cow::Borrowed(&v[range]),
        CpuStorage::F16(v) => Cow::Owned(cast(&v[range])),
        CpuStorage::BF16(v) => Cow::Owned(cast(&v[range])),
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
        DType::F16 => CpuStorage::F16(cast(&values)),
        DType::BF16 => CpuStorage::BF16(cast(&values)),
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

fn cast<S: CastTo<D>, D: Copy + Default>(values: &[S]) -> Vec<D> {
    let mut out = vec![D::default(); values.len()];
    amp::cast(values, &mut out).expect("the output has the input's length");
    out
}
