//! What a user writes: a model that has a loss and makes predictions, from named tensors.

use candle_core::{DType, Device, Result, Tensor};

use super::to_array;
use crate::data::{Array, ArrayData, Batch};
use crate::engine::Losses;
use crate::{Error, Result as RunnerResult};

/// A trainable model: layers built from a [`VarBuilder`](candle_nn::VarBuilder), and what they
/// compute.
///
/// A model asks for its parameters when it is built and derives everything else from them in
/// `loss` and `predict`: a tensor computed from a parameter in a constructor keeps its first value
/// while the parameter is trained.
pub trait CandleModel: Send {
    /// Forward in training mode: the loss that backward starts from.
    ///
    /// In a run's first step this is called three times, and the last two times with other parameters
    /// ([`CandleOptions::check_gradients`](super::CandleOptions::check_gradients)).
    ///
    /// Where `compile` has steps as one launch, this is called in the first steps alone, now and then more than once
    /// for a step, and what it has computed from anything but batch, parameters and buffers stays as it was; a
    /// tensor that the model keeps between steps stays where it is.
    ///
    /// # Errors
    ///
    /// A field the batch lacks, shapes that do not fit.
    fn loss(&self, batch: &TensorBatch) -> Result<Loss>;

    /// Forward in evaluation mode: named outputs, the first dimension of each being the batch.
    ///
    /// # Errors
    ///
    /// As [`loss`](Self::loss).
    fn predict(&self, batch: &TensorBatch) -> Result<Outputs>;
}

impl CandleModel for Box<dyn CandleModel> {
    fn loss(&self, batch: &TensorBatch) -> Result<Loss> {
        (**self).loss(batch)
    }

    fn predict(&self, batch: &TensorBatch) -> Result<Outputs> {
        (**self).predict(batch)
    }
}

/// A batch as tensors on the engine's device. Float fields have the engine's dtype; bytes and indices (`u8`, `i64`) come
/// as they are.
#[derive(Debug)]
pub struct TensorBatch {
    fields: Vec<(String, Tensor)>,
    dtype: DType,
}

impl TensorBatch {
    pub(super) fn new(batch: &Batch, dtype: DType, device: &Device) -> RunnerResult<Self> {
        Self::of(&send(batch, device)?, dtype)
    }

    /// Of what was sent.
    pub(super) fn of(sent: &[(String, Tensor)], dtype: DType) -> RunnerResult<Self> {
        let cast = |tensor: &Tensor| match tensor.dtype().is_float() {
            true => tensor.to_dtype(dtype),
            false => Ok(tensor.clone()),
        };
        let fields = sent.iter().map(|(name, tensor)| Ok((name.clone(), cast(tensor)?)));
        let fields =
            fields.collect::<Result<_>>().map_err(|e| Error::Engine(format!("batch: {e}")))?;
        Ok(Self { fields, dtype })
    }

    /// The field called `name`.
    ///
    /// # Errors
    ///
    /// There is none; the fields there are, are listed.
    pub fn get(&self, name: &str) -> Result<&Tensor> {
        self.fields.iter().find(|(n, _)| n == name).map(|(_, t)| t).ok_or_else(|| {
            let have: Vec<_> = self.fields.iter().map(|(n, _)| n.as_str()).collect();
            candle_core::Error::msg(format!("the batch has no field `{name}`; it has {have:?}"))
        })
    }

    /// What the engine computes in.
    #[must_use]
    pub fn dtype(&self) -> DType {
        self.dtype
    }
}

/// The fields of a batch on a device, in the types that they have.
pub(super) fn send(batch: &Batch, device: &Device) -> RunnerResult<Vec<(String, Tensor)>> {
    let tensor = |array: &Array| match array.data() {
        ArrayData::F32(v) => Tensor::from_slice(v, array.shape(), device),
        ArrayData::U8(v) => Tensor::from_slice(v, array.shape(), device),
        ArrayData::I64(v) => Tensor::from_slice(v, array.shape(), device),
    };
    let fields = batch.iter().map(|(name, array)| Ok((name.to_owned(), tensor(array)?)));
    fields.collect::<Result<_>>().map_err(|e| Error::Engine(format!("batch: {e}")))
}

/// What a forward pass in training mode found.
#[derive(Debug)]
pub struct Loss {
    value: Tensor,
    scalars: Vec<(String, Tensor)>,
}

impl Loss {
    /// The loss: one `f32`, depending on the parameters.
    #[must_use]
    pub fn new(value: Tensor) -> Self {
        Self { value, scalars: Vec::new() }
    }

    /// Adds a one-element tensor for the log: a part of the loss, an accuracy.
    #[must_use]
    pub fn with(mut self, name: impl Into<String>, scalar: Tensor) -> Self {
        self.scalars.push((name.into(), scalar));
        self
    }

    pub(super) fn value(&self) -> &Tensor {
        &self.value
    }

    /// Whether it has the digits of `f64`.
    pub(super) fn is_f64(&self) -> bool {
        self.value.dtype() == DType::F64
    }

    /// The loss as a number.
    pub(super) fn number(&self) -> Result<f64> {
        scalar_of(&self.value)?.to_scalar()
    }

    /// Checks the loss and reads all scalars.
    pub(super) fn read(&self) -> RunnerResult<Losses> {
        let read = |(name, scalar): (&str, &Tensor)| match scalar_of(scalar)
            .and_then(|scalar| scalar.to_scalar())
        {
            Ok(scalar) => Ok((name.to_owned(), scalar)),
            Err(e) => Err(Error::Engine(format!("scalar `{name}`: {e}"))),
        };
        let scalars = self.checked()?.map(read).collect::<RunnerResult<_>>()?;
        Ok(Losses { scalars })
    }

    /// The checked loss, and the other scalars, by name.
    pub(super) fn checked(&self) -> RunnerResult<impl Iterator<Item = (&str, &Tensor)>> {
        let Self { value, .. } = self;
        if value.elem_count() != 1 || value.dtype() != DType::F32 || !value.track_op() {
            return Err(Error::Engine(format!(
                "the loss must be one f32 that depends on the parameters; it is {:?} of {:?}",
                value.shape(),
                value.dtype()
            )));
        }
        let named = self.scalars.iter().map(|(name, scalar)| (name.as_str(), scalar));
        Ok(std::iter::once(("loss", value)).chain(named))
    }
}

/// Named results of a forward pass in evaluation mode.
#[derive(Debug, Default)]
pub struct Outputs {
    fields: Vec<(String, Tensor)>,
}

impl Outputs {
    /// No outputs.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// Adds an output, of any dtype.
    #[must_use]
    pub fn with(mut self, name: impl Into<String>, tensor: Tensor) -> Self {
        self.fields.push((name.into(), tensor));
        self
    }

    /// Copies everything to the host and checks the batch dimension.
    pub(super) fn into_arrays(self, count: usize) -> RunnerResult<Vec<(String, Array)>> {
        self.fields
            .into_iter()
            .map(|(name, tensor)| {
                let array = to_array(&tensor)
                    .map_err(|e| Error::Engine(format!("output `{name}`: {e}")))?;
                if array.shape().first() != Some(&count) {
                    let shape = array.shape();
                    return Err(Error::Engine(format!(
                        "output `{name}` has shape {shape:?} for a batch of {count}"
                    )));
                }
                Ok((name, array))
            })
            .collect()
    }
}

/// An `f64` scalar of a tensor of one element.
pub(super) fn scalar_of(tensor: &Tensor) -> Result<Tensor> {
    tensor.flatten_all()?.squeeze(0)?.to_dtype(DType::F64)
}
