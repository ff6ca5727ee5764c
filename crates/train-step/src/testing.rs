//! Helpers of unit tests: a model without a tensor crate.

use std::time::Duration;

use collective::ProcessGroup;
use fused_optim::{DType, Slice, SliceMut};
use half::f16;

use crate::model::Visit;
use crate::{
    EngineState, Error, Model, ModelWrapper, OptimWrapper, Result, StepContext, TensorSpec, Update,
};

/// Elements of one tensor.
#[derive(Clone, Debug, PartialEq)]
pub(crate) enum Values {
    F32(Vec<f32>),
    F16(Vec<f16>),
}

impl Values {
    fn slice(&mut self) -> SliceMut<'_> {
        match self {
            Self::F32(v) => SliceMut::F32(v),
            Self::F16(v) => SliceMut::F16(v),
        }
    }
}

/// A model whose gradients are all `gradient`.
pub(crate) struct FakeModel {
    pub(crate) specs: [Vec<TensorSpec>; 2],
    pub(crate) params: Vec<Values>,
    pub(crate) buffers: Vec<Values>,
    pub(crate) gradient: f32,
    /// Number of training steps so far.
    pub(crate) steps: usize,
    /// Index of the step that fails after its first gradient.
    pub(crate) fails_at: usize,
}

impl FakeModel {
    /// Creates a model from names and values of vectors: parameters and buffers.
    pub(crate) fn new(params: &[(&str, Values)], buffers: &[(&str, Values)]) -> Self {
        let specs = [params, buffers].map(|tensors| {
            let spec = |(name, values): &(&str, Values)| {
                let mut values = values.clone();
                let (shape, dtype) = (vec![values.slice().len()], values.slice().dtype());
                TensorSpec { name: (*name).to_owned(), shape, dtype }
            };
            tensors.iter().map(spec).collect()
        });
        let values = |tensors: &[(&str, Values)]| tensors.iter().map(|t| t.1.clone()).collect();
        let (params, buffers) = (values(params), values(buffers));
        Self { specs, params, buffers, gradient: 1.0, steps: 0, fails_at: usize::MAX }
    }

    /// Reports a gradient for each parameter.
    pub(crate) fn train_step(&mut self, cx: &mut StepContext<'_>) -> Result<()> {
        let step = self.steps;
        self.steps += 1;
        let gradient = self.gradient * cx.loss_scale;
        for (index, spec) in self.specs[0].iter().enumerate() {
            let (mut sink, count) = (cx.sink.lock(), spec.count());
            let half = f16::from_f32(gradient);
            match spec.dtype {
                DType::F32 => sink.ready(index, Slice::F32(&vec![gradient; count]))?,
                DType::F16 => sink.ready(index, Slice::F16(&vec![half; count]))?,
                DType::Bf16 => unreachable!("`Values` has no bf16"),
            }
            if step == self.fails_at {
                return Err(Error::model("backward failed"));
            }
        }
        Ok(())
    }

    /// Trains on a batch whose loss is the mean of `count` tokens.
    pub(crate) fn update(
        &mut self,
        wrapper: &mut dyn ModelWrapper,
        optim: &mut OptimWrapper,
        count: Option<f64>,
    ) -> Result<Update<()>> {
        let state = &mut EngineState::default();
        optim.update_params((self, wrapper), count, state, Self::train_step)
    }
}

impl Model for FakeModel {
    fn params(&self) -> &[TensorSpec] {
        &self.specs[0]
    }

    fn buffers(&self) -> &[TensorSpec] {
        &self.specs[1]
    }

    fn with_params(&mut self, visit: &mut Visit<'_>) -> Result<()> {
        visit(&mut self.params.iter_mut().map(Values::slice).collect::<Vec<_>>())
    }

    fn with_buffers(&mut self, visit: &mut Visit<'_>) -> Result<()> {
        visit(&mut self.buffers.iter_mut().map(Values::slice).collect::<Vec<_>>())
    }
}

/// A process group of one rank.
pub(crate) fn group() -> ProcessGroup {
    ProcessGroup::threads(1, Duration::from_secs(10)).unwrap().remove(0)
}
