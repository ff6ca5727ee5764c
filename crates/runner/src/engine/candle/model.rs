//! The interface of a candle model: `CandleModel`, with named tensors as input and output.

use candle_core::{DType, Result, Tensor};
use candle_train::Fields;

use crate::data::{Array, Batch};
use crate::engine::Losses;
use crate::{Error, Result as RunnerResult};

/// A trainable model: layers built from a [`VarBuilder`](candle_nn::VarBuilder), with a loss and a
/// prediction.
///
/// A model requests its parameters when it is built and computes everything else from them in
/// `loss` and `predict`: a tensor computed from a parameter in a constructor keeps its first value
/// while the parameter is trained.
pub trait CandleModel: Send {
    /// Runs forward in training mode; returns the loss that backward starts from.
    ///
    /// In a run's first step this is called three times, the last two times with other parameters
    /// ([`CandleOptions::check_gradients`](super::CandleOptions::check_gradients)).
    ///
    /// If `compile` captures steps as graphs, this is called only in the first steps, sometimes
    /// more than once per step. Values not computed from batch, parameters and buffers then stay as
    /// captured, and a tensor that the model keeps between steps must keep its address.
    ///
    /// # Errors
    ///
    /// A missing field, or wrong shapes.
    fn loss(&self, batch: &TensorBatch) -> Result<Loss>;

    /// Returns the number of tokens, or of samples, that the [loss](Self::loss) of this batch is
    /// the mean of; by default it is not known. If it is, a step is the mean over all of its
    /// tokens: batches of `accumulative_counts`, and the ranks' batches, are weighted by their
    /// counts. Otherwise they have equal weight, as in PyTorch's DDP and MMEngine, although their
    /// numbers of tokens differ. Return it for all batches of a run and on all ranks, or for none;
    /// otherwise the run ends with an error.
    ///
    /// A batch with count 0 does not count. On the CPU its gradients are replaced by zeros, so its
    /// loss may be NaN, as a mean over nothing is. Gradients on a GPU are only multiplied by 2^-60:
    /// there they must be finite, as those of candle-ops' cross entropy are. NaN gradients become
    /// those of the step, which only `AmpOptimWrapper` with `skip_non_finite` skips.
    ///
    /// # Errors
    ///
    /// A missing field.
    fn loss_count(&self, batch: &Batch) -> Result<Option<f64>> {
        let _ = batch;
        Ok(None)
    }

    /// Runs forward in evaluation mode; returns named outputs, whose first dimension is the batch.
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

    fn loss_count(&self, batch: &Batch) -> Result<Option<f64>> {
        (**self).loss_count(batch)
    }

    fn predict(&self, batch: &TensorBatch) -> Result<Outputs> {
        (**self).predict(batch)
    }
}

/// A batch as tensors on the engine's device. Float fields have the engine's type; integers are
/// unchanged, masks are `u8`.
#[derive(Debug)]
pub struct TensorBatch {
    fields: Fields,
    dtype: DType,
}

impl TensorBatch {
    /// Creates a batch from tensors on the device.
    pub(super) fn of(sent: &Fields, dtype: DType) -> RunnerResult<Self> {
        let cast = |tensor: &Tensor| match tensor.dtype().is_float() {
            true => tensor.to_dtype(dtype),
            false => Ok(tensor.clone()),
        };
        Ok(Self { fields: sent.map(cast).map_err(sending)?, dtype })
    }

    /// Returns the field called `name`, if there is one.
    #[must_use]
    pub fn find(&self, name: &str) -> Option<&Tensor> {
        self.fields.find(name)
    }

    /// Returns the field called `name`.
    ///
    /// # Errors
    ///
    /// No such field; the error lists the fields.
    pub fn get(&self, name: &str) -> Result<&Tensor> {
        self.fields.get(name)
    }

    /// Returns the engine's type.
    #[must_use]
    pub fn dtype(&self) -> DType {
        self.dtype
    }
}

/// An error of a batch's copy to the device.
pub(super) fn sending(error: candle_core::Error) -> Error {
    Error::engine_during("batch", error)
}

/// Result of a forward pass in training mode.
#[derive(Debug)]
pub struct Loss {
    pub(super) value: Tensor,
    scalars: Vec<(String, Tensor)>,
}

impl Loss {
    /// Creates a result from the loss: one `f32` that depends on the parameters.
    #[must_use]
    pub fn new(value: Tensor) -> Self {
        Self { value, scalars: Vec::new() }
    }

    /// Adds a one-element tensor for the log, such as a part of the loss or an accuracy.
    #[must_use]
    pub fn with(mut self, name: impl Into<String>, scalar: Tensor) -> Self {
        self.scalars.push((name.into(), scalar));
        self
    }

    /// Checks the loss; returns names and values of it and the other scalars, a tensor of `f64`.
    pub(super) fn scalars(&self) -> RunnerResult<(Vec<String>, Tensor)> {
        let Self { value, .. } = self;
        let (shape, dtype) = (value.shape(), value.dtype());
        if value.elem_count() != 1 || dtype != DType::F32 {
            return Err(Error::engine(format!(
                "the loss must be one f32, got {shape:?} of {dtype:?}"
            )));
        }
        if !value.track_op() {
            return Err(Error::engine(
                "the loss depends on no trained parameter: all are frozen, or it is detached",
            ));
        }
        let one = |(name, scalar): &(String, Tensor)| match scalar_of(scalar)
            .and_then(|scalar| scalar.detach().reshape(1))
        {
            Ok(scalar) => Ok((name.clone(), scalar)),
            Err(e) => Err(Error::engine_during(format!("scalar `{name}`"), e)),
        };
        let loss = ("loss".to_owned(), value.clone());
        let scalars = std::iter::once(&loss).chain(&self.scalars).map(one);
        let (names, values): (_, Vec<_>) =
            scalars.collect::<RunnerResult<Vec<_>>>()?.into_iter().unzip();
        let values = Tensor::cat(&values, 0).map_err(|e| Error::engine_during("scalars", e))?;
        Ok((names, values))
    }
}

/// Copies scalars for the log to the host.
pub(super) fn read_losses(names: &[String], values: &Tensor) -> RunnerResult<Losses> {
    let values = values.to_vec1::<f64>();
    let values = values.map_err(|e| Error::engine_during("reading the losses", e))?;
    Ok(Losses::new(names.iter().cloned().zip(values).collect()))
}

/// Named results of a forward pass in evaluation mode.
#[derive(Debug, Default)]
pub struct Outputs {
    fields: Vec<(String, Tensor)>,
}

impl Outputs {
    /// Creates empty outputs.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// Adds an output of any type.
    #[must_use]
    pub fn with(mut self, name: impl Into<String>, tensor: Tensor) -> Self {
        self.fields.push((name.into(), tensor));
        self
    }

    /// Copies all outputs to the host and checks the batch dimension.
    pub(super) fn into_arrays(self, count: usize) -> RunnerResult<Vec<(String, Array)>> {
        self.fields
            .into_iter()
            .map(|(name, tensor)| {
                let array = candle_train::array(&tensor)
                    .map_err(|e| Error::engine_during(format!("output `{name}`"), e))?;
                if array.shape().first() != Some(&count) {
                    let shape = array.shape();
                    return Err(Error::engine(format!(
                        "output `{name}` has shape {shape:?}, but the batch has {count} samples"
                    )));
                }
                Ok((name, array))
            })
            .collect()
    }
}

/// Converts a tensor of one element to a scalar of `f64`.
fn scalar_of(tensor: &Tensor) -> Result<Tensor> {
    tensor.flatten_all()?.squeeze(0)?.to_dtype(DType::F64)
}
