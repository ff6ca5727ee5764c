//! [`Lent`]: a burn module for `train_step::Trainer`. Copy this file into your program.
//!
//! Trained are the float tensors that require gradients. The others, running statistics (by their
//! fields' names, as in burn's `BatchNorm`) and frozen weights, are saved and resumed with them.
//! Names are burn's module paths.

use std::collections::HashMap;

use burn::module::{Module, ModuleMapper, ModuleVisitor, Param, ParamId};
use burn::tensor::{DType, Gradients, Tensor, TensorData};
use train_step::fused_optim::{self, SliceMut};
use train_step::{Error, Model, Result, StepContext, TensorSpec, Visit};

/// A module, and its tensors by kind, which it lends as copies in host memory. Kinds: trained 0,
/// running statistics 1, frozen 2.
pub struct Lent<M>(pub M, [Vec<TensorSpec>; 3]);

impl<M: Module> Lent<M> {
    pub fn new(module: M) -> Result<Self> {
        let mut specs = [const { Vec::new() }; 3];
        for (kind, specs) in specs.iter_mut().enumerate() {
            for (_, name, _, mut data) in read(&module, kind, None) {
                let shape = data.shape().as_slice().to_vec();
                specs.push(TensorSpec { name, shape, dtype: slice(&mut data)?.dtype() });
            }
        }
        Ok(Self(module, specs))
    }

    /// Computes a loss and its gradients, under `.f16()` and `.bf16()` with weights [`cast`] to it.
    /// Returns the loss.
    pub fn pass(&self, cx: &StepContext<'_>, loss: impl FnOnce(&M) -> Tensor<1>) -> Result<f64> {
        let loss = match cx.autocast {
            Some(fused_optim::DType::F16) => loss(&cast(&self.0, DType::F16)),
            Some(fused_optim::DType::Bf16) => loss(&cast(&self.0, DType::BF16)),
            _ => loss(&self.0),
        };
        let grads = loss.clone().mul_scalar(cx.loss_scale).backward();
        for (index, _, _, mut grad) in read(&self.0, 0, Some(grads)) {
            cx.report(index, slice(&mut grad)?.as_slice())?;
        }
        Ok(loss.into_scalar::<f64>())
    }

    fn lend(&mut self, kind: usize, visit: &mut Visit<'_>) -> Result<()> {
        // Running statistics take in their last update.
        drop(self.0.valid());
        let mut tensors = read(&self.0, kind, None);
        let slices = tensors.iter_mut().map(|(_, _, _, data)| slice(data));
        visit(&mut slices.collect::<Result<Vec<_>>>()?)?;
        let tensors = tensors.into_iter().map(|(_, _, id, data)| (id, data));
        self.0 = self.0.clone().map(&mut Map::Set(tensors.collect()));
        Ok(())
    }
}

impl<M: Module> Model for Lent<M> {
    fn params(&self) -> &[TensorSpec] {
        &self.1[0]
    }

    fn buffers(&self) -> &[TensorSpec] {
        &self.1[1]
    }

    fn frozen(&self) -> &[TensorSpec] {
        &self.1[2]
    }

    fn with_params(&mut self, visit: &mut Visit<'_>) -> Result<()> {
        self.lend(0, visit)
    }

    fn with_buffers(&mut self, visit: &mut Visit<'_>) -> Result<()> {
        self.lend(1, visit)
    }

    fn with_frozen(&mut self, visit: &mut Visit<'_>) -> Result<()> {
        self.lend(2, visit)
    }
}

/// Casts a module's trained tensors. Gradients flow back through the casts.
pub fn cast<M: Module>(module: &M, dtype: DType) -> M {
    module.clone().map(&mut Map::Cast(dtype))
}

fn slice(data: &mut TensorData) -> Result<SliceMut<'_>> {
    match data.dtype() {
        DType::F16 => data.as_mut_slice().map(SliceMut::F16),
        DType::BF16 => data.as_mut_slice().map(SliceMut::Bf16),
        _ => data.as_mut_slice().map(SliceMut::F32),
    }
    .map_err(Error::model)
}

/// Tensors of a kind, or gradients, with the tensor's index, name and burn's id.
type Tensors = Vec<(usize, String, ParamId, TensorData)>;

fn read<M: Module>(module: &M, kind: usize, grads: Option<Gradients>) -> Tensors {
    let mut read = Read { kind, grads, ..Default::default() };
    module.visit(&mut read);
    read.tensors
}

#[derive(Default)]
struct Read {
    kind: usize,
    grads: Option<Gradients>,
    path: Vec<String>,
    count: usize,
    tensors: Tensors,
}

impl ModuleVisitor for Read {
    fn enter_module(&mut self, name: &str, _: &str) {
        self.path.push(name.to_owned());
    }

    fn exit_module(&mut self, _: &str, _: &str) {
        self.path.pop();
    }

    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
        let tensor = param.val();
        let is_statistic = self.path.last().is_some_and(|field| field.starts_with("running_"));
        let kind = if tensor.is_require_grad() { 0 } else { 2 - usize::from(is_statistic) };
        if kind == self.kind {
            let values = match &mut self.grads {
                Some(grads) => tensor.grad_remove(grads),
                None => Some(tensor),
            };
            let (index, name) = (self.count, self.path.join("."));
            self.tensors.extend(values.map(|values| (index, name, param.id, values.into_data())));
            self.count += 1;
        }
    }
}

enum Map {
    Cast(DType),
    Set(HashMap<ParamId, TensorData>),
}

impl ModuleMapper for Map {
    fn map_float<const D: usize>(&mut self, param: Param<Tensor<D>>) -> Param<Tensor<D>> {
        let (id, is_trained) = (param.id, param.is_require_grad());
        param.map(|old| match self {
            Self::Cast(dtype) if is_trained => old.cast(*dtype),
            Self::Cast(_) => old,
            Self::Set(tensors) => match tensors.remove(&id) {
                Some(data) => {
                    let options = (&old.device(), data.dtype());
                    Tensor::from_data(data, options).set_require_grad(is_trained)
                }
                None => old,
            },
        })
    }
}
