//! Tensors as a checkpoint holds them: name, shape, type, little-endian elements.

use fused_optim::{DType, Slice, SliceMut};
use half::{bf16, f16};
use safetensors::tensor::{self, SafeTensors, TensorView};

use crate::engine::{Engine, TensorSpec};
use crate::{Error, Result};

/// A tensor out of the model's hands.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Tensor {
    /// Name, shape and type.
    pub spec: TensorSpec,
    /// Its elements, little-endian.
    pub bytes: Vec<u8>,
}

impl Tensor {
    /// A tensor of f32 under `name`.
    #[must_use]
    pub fn f32(name: String, shape: Vec<usize>, values: &[f32]) -> Self {
        let spec = TensorSpec { name, shape, dtype: DType::F32 };
        Self { spec, bytes: to_bytes(Slice::F32(values)) }
    }

    /// Its elements as f32, exactly.
    #[must_use]
    pub fn to_f32(&self) -> Vec<f32> {
        match self.spec.dtype {
            DType::F32 => floats(&self.bytes),
            DType::F16 => f16s(&self.bytes).into_iter().map(f16::to_f32).collect(),
            DType::Bf16 => bf16s(&self.bytes).into_iter().map(bf16::to_f32).collect(),
        }
    }
}

/// Copies of a model's parameters and, after them, its buffers.
///
/// # Errors
///
/// Those of the engine.
pub fn model_tensors(engine: &mut dyn Engine) -> Result<Vec<Tensor>> {
    let mut tensors = Vec::new();
    let (params, buffers) = (engine.params().to_vec(), engine.buffers().to_vec());
    engine.with_params(&mut |slices| {
        tensors.extend(copies(&params, slices));
        Ok(())
    })?;
    engine.with_buffers(&mut |slices| {
        tensors.extend(copies(&buffers, slices));
        Ok(())
    })?;
    Ok(tensors)
}

/// Copies of what an engine lends.
pub(crate) fn copies(specs: &[TensorSpec], slices: &mut [SliceMut<'_>]) -> Vec<Tensor> {
    let tensor = |(spec, slice): (&TensorSpec, &mut SliceMut<'_>)| Tensor {
        spec: spec.clone(),
        bytes: to_bytes(slice.as_slice()),
    };
    specs.iter().zip(slices).map(tensor).collect()
}

/// As safetensors.
pub(super) fn serialize(what: &str, tensors: &[Tensor]) -> Result<Vec<u8>> {
    let views = tensors.iter().map(|Tensor { spec, bytes }| {
        TensorView::new(dtype(spec.dtype), spec.shape.clone(), bytes).map(|v| (&spec.name, v))
    });
    let views = views.collect::<std::result::Result<Vec<_>, _>>();
    views
        .and_then(|views| safetensors::serialize(views, None))
        .map_err(|e| Error::Checkpoint(format!("{what}: {e}")))
}

/// From safetensors; the text says what is wrong.
pub(super) fn deserialize(bytes: &[u8]) -> Result<Vec<Tensor>, String> {
    let tensors = SafeTensors::deserialize(bytes).map_err(|e| e.to_string())?;
    let read = |(name, view): (String, TensorView<'_>)| {
        let dtype = match view.dtype() {
            tensor::Dtype::F32 => DType::F32,
            tensor::Dtype::F16 => DType::F16,
            tensor::Dtype::BF16 => DType::Bf16,
            other => return Err(format!("`{name}` is {other:?}, which no model has")),
        };
        let spec = TensorSpec { name, shape: view.shape().to_vec(), dtype };
        Ok(Tensor { spec, bytes: view.data().to_vec() })
    };
    tensors.tensors().into_iter().map(read).collect()
}

/// Whether a saved tensor is one of the model's, by shape and type.
pub(super) fn check(saved: &TensorView<'_>, spec: &TensorSpec) -> Result<(), String> {
    let (is, has) = ((saved.dtype(), saved.shape()), (dtype(spec.dtype), &spec.shape[..]));
    if is == has {
        return Ok(());
    }
    Err(format!("`{}` is {:?} {:?}, the model has {:?} {:?}", spec.name, is.0, is.1, has.0, has.1))
}

pub(super) fn dtype(dtype: DType) -> tensor::Dtype {
    match dtype {
        DType::F32 => tensor::Dtype::F32,
        DType::F16 => tensor::Dtype::F16,
        DType::Bf16 => tensor::Dtype::BF16,
    }
}

/// Little-endian elements.
pub(crate) fn to_bytes(slice: Slice<'_>) -> Vec<u8> {
    match slice {
        Slice::F32(v) => v.iter().flat_map(|x| x.to_le_bytes()).collect(),
        Slice::F16(v) => v.iter().flat_map(|x| x.to_le_bytes()).collect(),
        Slice::Bf16(v) => v.iter().flat_map(|x| x.to_le_bytes()).collect(),
    }
}

pub(super) fn floats(bytes: &[u8]) -> Vec<f32> {
    bytes.as_chunks().0.iter().map(|b| f32::from_le_bytes(*b)).collect()
}

pub(super) fn f16s(bytes: &[u8]) -> Vec<f16> {
    bytes.as_chunks().0.iter().map(|b| f16::from_le_bytes(*b)).collect()
}

pub(super) fn bf16s(bytes: &[u8]) -> Vec<bf16> {
    bytes.as_chunks().0.iter().map(|b| bf16::from_le_bytes(*b)).collect()
}

/// Copies little-endian elements; the caller has compared lengths.
pub(crate) fn copy_from_bytes(slice: &mut SliceMut<'_>, bytes: &[u8]) {
    match slice {
        SliceMut::F32(v) => v.copy_from_slice(&floats(bytes)),
        SliceMut::F16(v) => v.copy_from_slice(&f16s(bytes)),
        SliceMut::Bf16(v) => v.copy_from_slice(&bf16s(bytes)),
    }
}
