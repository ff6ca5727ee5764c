//! `TchEngine`: a network of tch under `runner`.

use std::sync::{Mutex, PoisonError};

use runner::data::{Array, ArrayData, Batch};
use runner::engine::{Engine, Losses, Model, StepContext, TensorSpec, Visit};
use runner::model::ModelContext;
use runner::{Error, Result, train_step};
use tch::nn::{Path, VarStore};
use tch::{Device, Kind, TchError, Tensor};
use train_step::fused_optim::DType;

use crate::shim::failed;
use crate::{Variables, autocast};

/// A network with a loss and a prediction, made of variables of a [`VarStore`].
pub trait TchModel {
    /// The loss to minimize, a scalar, in training mode.
    ///
    /// # Errors
    ///
    /// A field missing in the batch. A shape that does not fit is a panic in tch's layers, and may
    /// be one here.
    fn loss(&self, batch: &Batch) -> Result<Tensor>;

    /// Named outputs in evaluation mode, the first dimension of each being the batch.
    ///
    /// # Errors
    ///
    /// As [`loss`](Self::loss).
    fn predict(&self, batch: &Batch) -> Result<Vec<(String, Tensor)>>;
}

/// A model of the `tch` crate and its variables.
pub struct TchEngine<M> {
    model: M,
    variables: Variables,
}

impl<M: TchModel> TchEngine<M> {
    /// Builds a model on the CPU, whose initial values libtorch draws from `cx`' seed.
    ///
    /// # Errors
    ///
    /// [`Error::Engine`] if `cx` asks for half parameters; those of [`Variables::new`].
    ///
    /// # Safety
    ///
    /// As of [`Variables::new`], for tensors that `build` left elsewhere.
    #[expect(unsafe_code, reason = "the constructor of `Variables`")]
    pub unsafe fn new(cx: &ModelContext, build: impl FnOnce(&Path<'_>) -> M) -> Result<Self> {
        if cx.dtype != DType::F32 {
            return Err(Error::engine("parameters stay in f32 here: use autocast"));
        }
        let store = VarStore::new(Device::Cpu);
        let model = {
            // All threads draw from one generator, and ranks may be threads.
            static DRAWING: Mutex<()> = Mutex::new(());
            let _alone = DRAWING.lock().unwrap_or_else(PoisonError::into_inner);
            tch::manual_seed(cx.seed.cast_signed());
            build(&store.root())
        };
        // SAFETY: the caller promises it.
        let variables = unsafe { Variables::new(&store) }?;
        Ok(Self { model, variables })
    }
}

impl<M: TchModel> Model for TchEngine<M> {
    fn params(&self) -> &[TensorSpec] {
        self.variables.params()
    }

    fn buffers(&self) -> &[TensorSpec] {
        self.variables.buffers()
    }

    fn frozen(&self) -> &[TensorSpec] {
        self.variables.frozen()
    }

    fn with_params(&mut self, visit: &mut Visit<'_>) -> train_step::Result<()> {
        self.variables.with_params(visit)
    }

    fn with_buffers(&mut self, visit: &mut Visit<'_>) -> train_step::Result<()> {
        self.variables.with_buffers(visit)
    }

    fn with_frozen(&mut self, visit: &mut Visit<'_>) -> train_step::Result<()> {
        self.variables.with_frozen(visit)
    }
}

impl<M: TchModel> Engine for TchEngine<M> {
    fn train_step(&mut self, batch: &Batch, cx: &mut StepContext<'_>) -> Result<Losses> {
        let loss = autocast(cx, || self.model.loss(batch))?;
        let value = loss.f_double_value(&[]).map_err(|e| failed("the loss", &e))?;
        self.variables.backward(cx, &loss)?;
        Ok(Losses::new(vec![("loss".to_owned(), value)]))
    }

    fn eval(&mut self, batch: &Batch) -> Result<Vec<(String, Array)>> {
        let outputs = tch::no_grad(|| self.model.predict(batch))?;
        outputs.into_iter().map(|(name, tensor)| Ok((name, array(&tensor)?))).collect()
    }

    fn supports_autocast(&self, dtype: DType) -> bool {
        dtype != DType::F32
    }
}

/// A field of a batch as a tensor of its own: floats as they are, bytes and indices too.
///
/// # Errors
///
/// [`Error::TrainData`] if the batch has no such field.
pub fn field(batch: &Batch, name: &str) -> Result<Tensor> {
    let array = batch.get(name)?;
    let flat = match array.data() {
        ArrayData::F32(values) => Tensor::f_from_slice(values),
        ArrayData::F16(values) => Tensor::f_from_slice(values),
        ArrayData::BF16(values) => Tensor::f_from_slice(values),
        ArrayData::U8(values) => Tensor::f_from_slice(values),
        ArrayData::I32(values) => Tensor::f_from_slice(values),
        ArrayData::I64(values) => Tensor::f_from_slice(values),
        ArrayData::Bool(values) => Tensor::f_from_slice(values),
        other => return Err(Error::engine(format!("no tensors of {}", other.type_name()))),
    };
    let shape: Vec<_> = array.shape().iter().map(|&extent| extent as i64).collect();
    Ok(flat.and_then(|flat| flat.f_reshape(shape)).map_err(|e| failed(name, &e))?)
}

/// A tensor's numbers in host memory: floats as f32, the rest as i64.
fn array(tensor: &Tensor) -> Result<Array> {
    let read = || -> Result<ArrayData, TchError> {
        let flat = tensor.f_reshape(-1)?;
        Ok(if tensor.is_floating_point() {
            Vec::<f32>::try_from(flat.f_to_kind(Kind::Float)?)?.into()
        } else {
            Vec::<i64>::try_from(flat.f_to_kind(Kind::Int64)?)?.into()
        })
    };
    let shape: Vec<_> = tensor.size().iter().map(|&extent| extent as usize).collect();
    Ok(Array::new(shape, read().map_err(|e| failed("outputs", &e))?)?)
}
