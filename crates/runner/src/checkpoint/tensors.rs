//! `Tensor`: a tensor of a checkpoint: name, shape, type, little-endian elements.

use std::cmp::Reverse;
use std::fs::File;

use fused_optim::{DType, Optimizer, Slice, SliceMut};
use half::vec::HalfFloatVecExt;
use half::{bf16, f16};
use safetensors::tensor::{self, SafeTensors, TensorView};
use train_step::BoxError;
use train_step::checkpoint::{Entry, Writer, Written};

use super::files::Sum;
use crate::Result;
use crate::engine::{Engine, HostTensor, TensorSpec, round_into};

/// A copy of a tensor.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Tensor {
    /// Name, shape and type.
    pub spec: TensorSpec,
    /// Elements in little-endian order.
    pub bytes: Vec<u8>,
}

impl Tensor {
    /// Copies a tensor that an engine lends.
    pub(crate) fn copy(spec: &TensorSpec, slice: &SliceMut<'_>) -> Self {
        Self { spec: spec.clone(), bytes: to_bytes(slice.as_slice()) }
    }

    /// Creates a tensor of `f32` called `name`.
    #[must_use]
    pub fn f32(name: String, shape: Vec<usize>, values: &[f32]) -> Self {
        let spec = TensorSpec { name, shape, dtype: DType::F32 };
        Self { spec, bytes: to_bytes(Slice::F32(values)) }
    }

    /// Replaces the values; rounds to nearest even if the type is narrower.
    pub(crate) fn round_from(&mut self, values: &[f32]) {
        self.bytes = to_bytes(rounded(self.spec.dtype, values.to_vec()).as_slice());
    }

    /// Returns the elements as `f32`, exactly.
    #[must_use]
    pub fn to_f32(&self) -> Vec<f32> {
        widened(self.spec.dtype, &self.bytes)
    }
}

fn widened(dtype: DType, bytes: &[u8]) -> Vec<f32> {
    match dtype {
        DType::F32 => elements(bytes, f32::from_le_bytes),
        DType::F16 => elements(bytes, |b| f16::from_le_bytes(b).to_f32()),
        DType::Bf16 => elements(bytes, |b| bf16::from_le_bytes(b).to_f32()),
    }
}

/// Visits the trained state of a model: its parameters, then its buffers, each with its index, spec
/// and elements.
///
/// # Errors
///
/// Those of `visit` and of the engine.
pub(crate) fn visit_model(
    engine: &mut dyn Engine,
    visit: &mut dyn FnMut(usize, &TensorSpec, &mut SliceMut<'_>) -> Result<()>,
) -> Result<()> {
    let (params, first_buffer) = (engine.params().to_vec(), engine.params().len());
    engine.with_params(&mut |slices| {
        let mut all = slices.iter_mut().zip(&params).enumerate();
        all.try_for_each(|(index, (slice, spec))| Ok(visit(index, spec, slice)?))
    })?;
    visit_buffers(engine, &mut |index, spec, slice| visit(first_buffer + index, spec, slice))
}

/// Visits all tensors of a model: as [`visit_model`], then the frozen parameters.
///
/// # Errors
///
/// Those of `visit` and of the engine.
pub(crate) fn visit_whole_model(
    engine: &mut dyn Engine,
    visit: &mut dyn FnMut(usize, &TensorSpec, &mut SliceMut<'_>) -> Result<()>,
) -> Result<()> {
    visit_model(engine, visit)?;
    let frozen = engine.frozen().to_vec();
    if frozen.is_empty() {
        return Ok(());
    }
    let first = engine.params().len() + engine.buffers().len();
    Ok(engine.with_frozen(&mut |slices| {
        let mut all = slices.iter_mut().zip(&frozen).enumerate();
        all.try_for_each(|(index, (slice, spec))| Ok(visit(first + index, spec, slice)?))
    })?)
}

/// Specs of all tensors in the order of [`visit_whole_model`].
pub(crate) fn specs(engine: &dyn Engine) -> Vec<TensorSpec> {
    [engine.params(), engine.buffers(), engine.frozen()].concat()
}

/// As [`visit_model`], for buffers only.
///
/// # Errors
///
/// Those of `visit` and of the engine.
pub(crate) fn visit_buffers(
    engine: &mut dyn Engine,
    visit: &mut dyn FnMut(usize, &TensorSpec, &mut SliceMut<'_>) -> Result<()>,
) -> Result<()> {
    let buffers = engine.buffers().to_vec();
    Ok(engine.with_buffers(&mut |slices| {
        let mut all = slices.iter_mut().zip(&buffers).enumerate();
        all.try_for_each(|(index, (slice, spec))| Ok(visit(index, spec, slice)?))
    })?)
}

/// Copies a model's parameters, buffers and frozen parameters, in this order.
///
/// # Errors
///
/// Those of the engine.
pub fn model_tensors(engine: &mut dyn Engine) -> Result<Vec<Tensor>> {
    let mut tensors = Vec::new();
    visit_whole_model(engine, &mut |_, spec, slice| {
        tensors.push(Tensor::copy(spec, slice));
        Ok(())
    })?;
    Ok(tensors)
}

/// Encodes tensors as safetensors.
pub(super) fn serialize(what: &str, tensors: &[Tensor]) -> Result<Vec<u8>> {
    let views = tensors.iter().map(|Tensor { spec, bytes }| {
        TensorView::new(dtype(spec.dtype), spec.shape.clone(), bytes).map(|v| (&spec.name, v))
    });
    let views = views.collect::<std::result::Result<Vec<_>, _>>();
    views.and_then(|views| safetensors::serialize(views, None)).map_err(|e| super::failed(what, e))
}

/// Writes tensors as safetensors with this metadata, in the order of [`serialize`].
pub(super) fn write_tensors(
    file: &File,
    metadata: &[(&str, &str)],
    tensors: &[Tensor],
) -> Result<Sum, BoxError> {
    let mut all: Vec<_> = tensors.iter().collect();
    // The widest types first, so that all data are aligned.
    let key = |tensor: &Tensor| (Reverse(dtype(tensor.spec.dtype)), tensor.spec.name.clone());
    all.sort_by_cached_key(|tensor| key(tensor));
    let entry =
        |Tensor { spec, .. }: &&Tensor| (spec.name.clone(), dtype(spec.dtype), spec.shape.clone());
    let mut writer = Writer::new(file, metadata, all.iter().map(entry).collect())?;
    all.iter().try_for_each(|tensor| writer.bytes(&tensor.bytes))?;
    finish(writer)
}

/// Writes an optimizer's state as `StateDict::to_safetensors` encodes it, without a copy of it.
pub(super) fn write_optimizer(file: &File, optimizer: &dyn Optimizer) -> Result<Sum, BoxError> {
    let layout = optimizer.state_layout()?;
    let (key, text) = layout.metadata()?;
    let step = |index| (format!("state.{index}.step"), tensor::Dtype::I64, Vec::new());
    let mut entries: Vec<Entry> = layout.state.keys().map(step).collect();
    for (index, state) in &layout.state {
        let vector = |(name, len): (&String, &usize)| {
            (format!("state.{index}.{name}"), tensor::Dtype::F32, vec![*len])
        };
        entries.extend(state.tensors.iter().map(vector));
    }
    let mut writer = Writer::new(file, &[(key, &text)], entries)?;
    for state in layout.state.values() {
        writer.values(&[i64::try_from(state.step)?])?;
    }
    let written = optimizer.visit_state(&mut |_, _, values| writer.values(values));
    written.map_err(|error| match error {
        // The file's own error.
        fused_optim::Error::Format { source, .. } => source,
        error => error.into(),
    })?;
    finish(writer)
}

fn finish(writer: Writer<'_>) -> Result<Sum, BoxError> {
    let Written { len, crc32, .. } = writer.finish()?;
    Ok(Sum { bytes: len, crc32 })
}

/// Decodes safetensors; the error text is the reason.
pub(super) fn deserialize(bytes: &[u8]) -> Result<Vec<Tensor>, String> {
    let tensors = SafeTensors::deserialize(bytes).map_err(|e| e.to_string())?;
    let read = |(name, view): (String, TensorView<'_>)| {
        let dtype = known(&name, view.dtype())?;
        let spec = TensorSpec { name, shape: view.shape().to_vec(), dtype };
        Ok(Tensor { spec, bytes: view.data().to_vec() })
    };
    tensors.tensors().into_iter().map(read).collect()
}

/// Checks that a saved tensor has shape and type of the model's.
pub(super) fn check(saved: &TensorView<'_>, spec: &TensorSpec) -> Result<(), String> {
    let (is, has) = ((saved.dtype(), saved.shape()), (dtype(spec.dtype), &spec.shape[..]));
    if is == has {
        return Ok(());
    }
    Err(format!("`{}` is {:?} {:?}, the model has {:?} {:?}", spec.name, is.0, is.1, has.0, has.1))
}

/// Checks that a saved tensor has the shape of the model's and that its values are in range of the
/// model's type. Returns the saved type.
pub(super) fn check_convertible(
    saved: &TensorView<'_>,
    spec: &TensorSpec,
) -> Result<DType, String> {
    let from = known(&spec.name, saved.dtype())?;
    check(saved, &TensorSpec { dtype: from, ..spec.clone() })?;
    let largest = match spec.dtype {
        DType::F16 => f16::MAX.to_f32(),
        DType::Bf16 => bf16::MAX.to_f32(),
        DType::F32 => f32::MAX,
    };
    let too_large = |v: &f32| v.is_finite() && v.abs() > largest;
    match widened(from, saved.data()).into_iter().find(too_large) {
        Some(value) => {
            let (name, to) = (&spec.name, spec.dtype);
            Err(format!("`{name}` contains {value}, which is out of range of the model's {to:?}"))
        }
        None => Ok(from),
    }
}

fn known(name: &str, dtype: tensor::Dtype) -> Result<DType, String> {
    match dtype {
        tensor::Dtype::F32 => Ok(DType::F32),
        tensor::Dtype::F16 => Ok(DType::F16),
        tensor::Dtype::BF16 => Ok(DType::Bf16),
        other => Err(format!("`{name}` has the type {other:?}, which models cannot have")),
    }
}

pub(super) fn dtype(dtype: DType) -> tensor::Dtype {
    match dtype {
        DType::F32 => tensor::Dtype::F32,
        DType::F16 => tensor::Dtype::F16,
        DType::Bf16 => tensor::Dtype::BF16,
    }
}

/// Multiplies little-endian elements by `share`; each product is rounded to their type.
pub(super) fn scaled(dtype: DType, bytes: &[u8], share: f32) -> HostTensor {
    rounded(dtype, widened(dtype, bytes).into_iter().map(|x| x * share).collect())
}

/// Rounds values to nearest even if `dtype` is narrower.
fn rounded(dtype: DType, values: Vec<f32>) -> HostTensor {
    match dtype {
        DType::F32 => HostTensor::F32(values),
        DType::F16 => HostTensor::F16(Vec::from_f32_slice(&values)),
        DType::Bf16 => HostTensor::Bf16(Vec::from_f32_slice(&values)),
    }
}

/// Returns the elements in little-endian order.
pub(crate) fn to_bytes(slice: Slice<'_>) -> Vec<u8> {
    match slice {
        Slice::F32(v) => v.iter().flat_map(|x| x.to_le_bytes()).collect(),
        Slice::F16(v) => v.iter().flat_map(|x| x.to_le_bytes()).collect(),
        Slice::Bf16(v) => v.iter().flat_map(|x| x.to_le_bytes()).collect(),
    }
}

fn elements<T, const N: usize>(bytes: &[u8], element: fn([u8; N]) -> T) -> Vec<T> {
    bytes.as_chunks().0.iter().map(|b| element(*b)).collect()
}

/// Copies little-endian elements; the caller has compared lengths.
pub(crate) fn copy_from_bytes(slice: &mut SliceMut<'_>, bytes: &[u8]) {
    match slice {
        SliceMut::F32(v) => v.copy_from_slice(&elements(bytes, f32::from_le_bytes)),
        SliceMut::F16(v) => v.copy_from_slice(&elements(bytes, f16::from_le_bytes)),
        SliceMut::Bf16(v) => v.copy_from_slice(&elements(bytes, bf16::from_le_bytes)),
    }
}

/// Copies a saved tensor that [`check_convertible`] accepted, bit for bit if the types are equal.
pub(crate) fn load_into(slice: &mut SliceMut<'_>, saved: &TensorView<'_>) -> Result<(), String> {
    let from = known("a tensor", saved.dtype())?;
    if from == slice.as_slice().dtype() {
        copy_from_bytes(slice, saved.data());
        return Ok(());
    }
    round_into(slice, &widened(from, saved.data()));
    Ok(())
}
