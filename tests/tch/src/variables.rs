//! `Variables`: the variables of a [`VarStore`], lent to a step of `train-step`.

use tch::Tensor;
use tch::nn::VarStore;
#[cfg(doc)]
use train_step::Error;
use train_step::fused_optim::{DType, SliceMut};
use train_step::{Model, Result, StepContext, TensorSpec, Visit};

use crate::shim::{self, Autocast, Variable, failed};

/// The variables of a [`VarStore`], as a [`Model`]: parameters are those that it trains, in the
/// order of their making; [`frozen`](VarStore::freeze) ones are those that need no gradient;
/// buffers are the others, by name.
pub struct Variables {
    params: List,
    frozen: List,
    buffers: List,
}

#[derive(Default)]
struct List {
    specs: Vec<TensorSpec>,
    variables: Vec<Variable>,
}

impl Variables {
    /// Takes handles of the variables that are in `store` now: build the model before.
    ///
    /// # Errors
    ///
    /// [`Error::Model`], naming a variable that is not contiguous f32 on the CPU, or is empty.
    ///
    /// # Safety
    ///
    /// No two variables share memory, and nobody else reads or writes it while it is lent: no
    /// tensor that shares it is used in a visit of a [`Model`], and none by another thread while a
    /// trainer is called or [`backward`](Self::backward) runs. (`forward` may use all of them.)
    #[expect(unsafe_code, reason = "what libtorch shares freely is lent as exclusive slices")]
    pub unsafe fn new(store: &VarStore) -> Result<Self> {
        let order: Vec<_> = store.trainable_variables().iter().map(Tensor::data_ptr).collect();
        let place = |tensor: &Tensor| order.iter().position(|data| *data == tensor.data_ptr());
        let mut found: Vec<_> = store.variables().into_iter().collect();
        found.sort_by_cached_key(|(name, tensor)| (place(tensor), name.clone()));
        let [mut params, mut frozen, mut buffers] = <[List; 3]>::default();
        for (name, tensor) in found {
            let list = match place(&tensor) {
                Some(_) if tensor.requires_grad() => &mut params,
                Some(_) => &mut frozen,
                None => &mut buffers,
            };
            // SAFETY: the caller promises it of all variables.
            let variable = unsafe { Variable::new(&name, tensor) }?;
            list.specs.push(TensorSpec { name, shape: variable.shape(), dtype: DType::F32 });
            list.variables.push(variable);
        }
        Ok(Self { params, frozen, buffers })
    }

    /// Runs `forward` under the step's [autocast](autocast()), and [backward](Self::backward) from
    /// the loss that it returns. Returns the loss.
    ///
    /// # Errors
    ///
    /// Those of [`backward`](Self::backward).
    pub fn pass(
        &mut self,
        cx: &StepContext<'_>,
        forward: impl FnOnce() -> Tensor,
    ) -> Result<Tensor> {
        let loss = autocast(cx, forward);
        self.backward(cx, &loss)?;
        Ok(loss.detach())
    }

    /// Runs backward from a loss, multiplied by the step's loss scale, and reports each gradient
    /// while it runs.
    ///
    /// # Errors
    ///
    /// Those of the receiver of gradients, unchanged; [`Error::Model`] with libtorch's.
    pub fn backward(&mut self, cx: &StepContext<'_>, loss: &Tensor) -> Result<()> {
        let scaled = loss.f_mul_scalar(f64::from(cx.loss_scale));
        let scaled = scaled.map_err(|e| failed("scaling the loss", &e))?;
        shim::backward(&scaled, &mut self.params.variables, &cx.sink)
    }
}

/// Runs `forward` under the autocast that the step asks for, on this thread.
pub fn autocast<R>(cx: &StepContext<'_>, forward: impl FnOnce() -> R) -> R {
    let _on = cx.autocast.filter(|dtype| *dtype != DType::F32).map(Autocast::on);
    forward()
}

impl List {
    fn lend(&mut self, visit: &mut Visit<'_>) -> Result<()> {
        let slices = self.variables.iter_mut().map(|v| v.lend().map(SliceMut::F32));
        visit(&mut slices.collect::<Result<Vec<_>>>()?)
    }
}

impl Model for Variables {
    fn params(&self) -> &[TensorSpec] {
        &self.params.specs
    }

    fn buffers(&self) -> &[TensorSpec] {
        &self.buffers.specs
    }

    fn frozen(&self) -> &[TensorSpec] {
        &self.frozen.specs
    }

    fn with_params(&mut self, visit: &mut Visit<'_>) -> Result<()> {
        self.params.lend(visit)
    }

    fn with_buffers(&mut self, visit: &mut Visit<'_>) -> Result<()> {
        self.buffers.lend(visit)
    }

    fn with_frozen(&mut self, visit: &mut Visit<'_>) -> Result<()> {
        self.frozen.lend(visit)
    }
}
