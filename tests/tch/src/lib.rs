//! `runner`'s engine for models of the `tch` crate: libtorch's operators and automatic
//! differentiation under our optimizers, data parallelism, checkpoints and hooks. To be copied into
//! a program of one's own.
//!
//! Parameters are lent as slices of libtorch's own memory, nothing is copied, and each gradient is
//! reported while backward still runs, by hooks that tch does not know of (`shim.cpp`). Parameters
//! are f32 on the CPU; for half precision there is autocast. libtorch's random numbers (dropout)
//! are not part of a checkpoint.
//!
//! `tests/it/numerics.rs` trains networks here and in candle and compares every number.
//!
//! ```
//! use runner::data::Batch;
//! use tch::{Tensor, nn, nn::Module};
//! use tch_engine::{TchEngine, TchModel, field};
//!
//! struct Net(nn::Linear);
//!
//! impl TchModel for Net {
//!     fn loss(&self, batch: &Batch) -> runner::Result<Tensor> {
//!         let logits = self.0.forward(&field(batch, "inputs")?);
//!         Ok(logits.cross_entropy_for_logits(&field(batch, "labels")?))
//!     }
//!
//!     fn predict(&self, batch: &Batch) -> runner::Result<Vec<(String, Tensor)>> {
//!         Ok(vec![("logits".to_owned(), self.0.forward(&field(batch, "inputs")?))])
//!     }
//! }
//!
//! fn factory() -> runner::model::ModelFactory {
//!     Box::new(|cx| {
//!         let net = |vs: &nn::Path<'_>| Net(nn::linear(vs / "fc", 64, 10, Default::default()));
//!         // SAFETY: `Net` keeps its layer to itself.
//!         Ok(Box::new(unsafe { TchEngine::new(cx, net) }?))
//!     })
//! }
//!
//! // In `main`, before `runner::cli::main()`; configurations then say `model.type = "Net"`.
//! runner::model::MODELS.register("Net", |_| Ok(factory()))?;
//! # Ok::<(), runner::Error>(())
//! ```

mod shim;

use std::ops::Range;
use std::sync::{Mutex, PoisonError};

use fused_optim::{DType, SliceMut};
use runner::data::{Array, ArrayData, Batch};
use runner::engine::{Engine, Losses, Model, StepContext, TensorSpec, Visit};
use runner::model::ModelContext;
use runner::{Error, Result, train_step};
use tch::nn::{Path, VarStore};
use tch::{Device, Kind, TchError, Tensor};

use shim::{Autocast, Variable, failed};

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
    params: Variables,
    buffers: Variables,
    tags: Range<usize>,
}

struct Variables {
    specs: Vec<TensorSpec>,
    variables: Vec<Variable>,
}

impl<M: TchModel> TchEngine<M> {
    /// Builds a model on the CPU, whose initial values libtorch draws from `cx`' seed. Parameters
    /// are numbered as `build` makes them; variables that need no gradient are buffers, in order of
    /// their names.
    ///
    /// # Errors
    ///
    /// [`Error::Engine`] if `cx` asks for half parameters; naming a variable that is not contiguous
    /// f32, or is empty.
    ///
    /// # Safety
    ///
    /// The variables' memory is the model's alone: no two variables share any, and no tensor that
    /// `build` left elsewhere is used, on any thread, while the engine lends parameters or buffers.
    #[expect(unsafe_code, reason = "what libtorch shares freely is lent as exclusive slices")]
    pub unsafe fn new(cx: &ModelContext, build: impl FnOnce(&Path<'_>) -> M) -> Result<Self> {
        if cx.dtype != DType::F32 {
            return Err(Error::Engine("parameters stay in f32 here: use autocast".to_owned()));
        }
        let store = VarStore::new(Device::Cpu);
        let model = {
            // All threads draw from one generator, and ranks may be threads.
            static DRAWING: Mutex<()> = Mutex::new(());
            let _alone = DRAWING.lock().unwrap_or_else(PoisonError::into_inner);
            tch::manual_seed(cx.seed.cast_signed());
            build(&store.root())
        };
        let order: Vec<_> = store.trainable_variables().iter().map(Tensor::data_ptr).collect();
        let place = |tensor: &Tensor| {
            let place = order.iter().position(|data| *data == tensor.data_ptr());
            place.filter(|_| tensor.requires_grad())
        };
        let mut found: Vec<_> = store.variables().into_iter().collect();
        // `None`, a buffer, comes first.
        found.sort_by_cached_key(|(name, tensor)| (place(tensor), name.clone()));
        let [mut params, mut buffers] = [const { Variables::new() }; 2];
        for (name, tensor) in found {
            let list = if place(&tensor).is_some() { &mut params } else { &mut buffers };
            // SAFETY: the caller promises it of all the model's variables.
            let variable = unsafe { Variable::new(&name, tensor) }?;
            list.specs.push(TensorSpec { name, shape: variable.shape(), dtype: DType::F32 });
            list.variables.push(variable);
        }
        let tags = shim::report(&params.variables)?;
        Ok(Self { model, params, buffers, tags })
    }
}

impl Variables {
    const fn new() -> Self {
        Self { specs: Vec::new(), variables: Vec::new() }
    }

    fn lend(&mut self, visit: &mut Visit<'_>) -> train_step::Result<()> {
        let slices = self.variables.iter_mut().map(|v| v.lend().map(SliceMut::F32));
        visit(&mut slices.collect::<Result<Vec<_>>>()?)
    }
}

impl<M: TchModel> Model for TchEngine<M> {
    fn params(&self) -> &[TensorSpec] {
        &self.params.specs
    }

    fn buffers(&self) -> &[TensorSpec] {
        &self.buffers.specs
    }

    fn with_params(
        &mut self,
        visit: &mut Visit<'_>,
    ) -> train_step::Result<()> {
        self.params.lend(visit)
    }

    fn with_buffers(
        &mut self,
        visit: &mut Visit<'_>,
    ) -> train_step::Result<()> {
        self.buffers.lend(visit)
    }
}

impl<M: TchModel> Engine for TchEngine<M> {
    fn train_step(&mut self, batch: &Batch, cx: &mut StepContext<'_>) -> Result<Losses> {
        if cx.autocast == Some(DType::F32) {
            return Err(Error::Engine("autocast must be f16 or bf16, not f32".to_owned()));
        }
        let loss = {
            let _on = cx.autocast.map(Autocast::on);
            self.model.loss(batch)?
        };
        let value = loss.f_double_value(&[]).map_err(|e| failed("the loss", &e))?;
        let scaled =
            loss.f_mul_scalar(f64::from(cx.loss_scale)).map_err(|e| failed("scaling", &e))?;
        self.params.variables.iter_mut().for_each(Variable::zero_grad);
        shim::backward(&scaled, &self.tags, &cx.sink)?;
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
/// [`Error::Data`] if the batch has no such field.
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
        other => return Err(Error::Engine(format!("no tensors of {}", other.type_name()))),
    };
    let shape: Vec<_> = array.shape().iter().map(|&extent| extent as i64).collect();
    flat.and_then(|flat| flat.f_reshape(shape)).map_err(|e| failed(name, &e))
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
    Array::new(shape, read().map_err(|e| failed("outputs", &e))?)
}
