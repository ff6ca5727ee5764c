//! `Averages`: the gradients of backward passes, complete on every rank.

use std::sync::Arc;

use collective::ProcessGroup;
use collective::reducer::{CommHook, ReducerOptions};
use fused_optim::{DType, Slice};
use half::{bf16, f16};
use parking_lot::Mutex;

use super::{DistributedDataParallel, ModelWrapper};
use crate::{
    DeviceTensor, EngineState, GradSink, Model, Result, SharedSink, StepContext, TensorSpec,
};

/// Averages of gradients over ranks, pass by pass. A pass that fails on this rank alone is
/// completed with zeros, because the other ranks wait for its gradients.
#[derive(Debug)]
pub struct Averages {
    specs: Vec<TensorSpec>,
    gradients: DistributedDataParallel,
    /// For each parameter, whether it got a gradient in this pass.
    reported: Arc<Mutex<Vec<bool>>>,
    /// Between `prepare` and `finish`: whether gradients are averaged in the pass.
    active: Option<bool>,
    find_unused: bool,
    /// Whether every parameter needs a gradient.
    is_strict: bool,
    group: ProcessGroup,
}

impl Averages {
    /// Joins the group. Every rank must call it, with parameters of the same names and shapes, and
    /// the same options.
    ///
    /// # Errors
    ///
    /// The first parameter that differs between ranks; a failure of another rank; an option that
    /// the model's device does not support.
    pub fn new(
        model: &mut dyn Model,
        group: ProcessGroup,
        mut options: ReducerOptions,
    ) -> Result<Self> {
        if group.world_size() == 1 && model.on_device().is_some() {
            use CommHook::{AllReduce, Bf16Compress, Fp16Compress};
            // Nothing is sent, so gradients stay as they are, on their device.
            if matches!(options.comm_hook, Bf16Compress | Fp16Compress) {
                options.comm_hook = AllReduce;
            }
        }
        let find_unused = options.find_unused_parameters;
        let is_strict = !find_unused && !options.static_graph;
        let specs = model.params().to_vec();
        let mut gradients = DistributedDataParallel::new(group.clone(), &specs, options)?;
        gradients.place(model)?;
        let reported = Arc::new(Mutex::new(vec![false; specs.len()]));
        Ok(Self { specs, gradients, reported, active: None, find_unused, is_strict, group })
    }

    /// The process group.
    #[must_use]
    pub const fn group(&self) -> &ProcessGroup {
        &self.group
    }

    /// The gradients.
    #[must_use]
    pub const fn gradients(&self) -> &DistributedDataParallel {
        &self.gradients
    }

    /// The gradients.
    pub const fn gradients_mut(&mut self) -> &mut DistributedDataParallel {
        &mut self.gradients
    }

    /// The receiver of a pass's gradients.
    #[must_use]
    pub fn sink(&self) -> SharedSink {
        let (inner, reported) = (self.gradients.sink(), Arc::clone(&self.reported));
        Arc::new(Mutex::new(Reported { inner, reported }))
    }

    /// Begins a pass; with `sync` its gradients are averaged, without it (PyTorch's `no_sync`) they
    /// accumulate on this rank. A pass that was not finished, since it panicked, is abandoned.
    ///
    /// # Errors
    ///
    /// Those of the group.
    pub fn prepare(&mut self, model: &mut dyn Model, sync: bool) -> Result<()> {
        self.abandon(model, "its last backward pass was not finished");
        let mut state = EngineState::default();
        let sink = self.gradients.sink();
        let mut cx = StepContext { sync, ..StepContext::new(sink, &mut state) };
        self.gradients.prepare(None, &mut cx)?;
        self.reported.lock().fill(false);
        self.active = Some(sync);
        Ok(())
    }

    /// Whether the last pass was not finished.
    #[must_use]
    pub const fn is_unfinished(&self) -> bool {
        self.active.is_some()
    }

    /// Returns an error if gradients are missing after backward.
    ///
    /// # Errors
    ///
    /// [`UnusedParameters`](collective::Error::UnusedParameters) with the names of parameters
    /// without a gradient in this and earlier passes of a step, or of all, if there is no gradient
    /// in this pass.
    pub fn check(&self) -> Result<()> {
        let reported = self.reported.lock();
        let has_none = !reported.contains(&true);
        let checks = self.active == Some(true) && self.is_strict;
        let is_missing = |index: usize| {
            has_none || (checks && !reported[index] && !self.gradients.has_gradient(index))
        };
        let specs = self.specs.iter().enumerate();
        let names = specs.filter(|(index, _)| is_missing(*index));
        let names: Vec<_> = names.map(|(_, spec)| spec.name.clone()).collect();
        if names.is_empty() {
            return Ok(());
        }
        Err(collective::Error::UnusedParameters { rank: self.group.rank(), names }.into())
    }

    /// Gives the parameters without a gradient in this pass zeros, if they must have one.
    ///
    /// # Errors
    ///
    /// Those of the group.
    pub fn fill(&self, model: &mut dyn Model) -> Result<()> {
        self.fill_where(model, |_| true)
    }

    fn fill_where(&self, model: &mut dyn Model, wanted: impl Fn(usize) -> bool) -> Result<()> {
        if self.find_unused {
            return Ok(());
        }
        let (sink, mut reported) = (self.gradients.sink(), self.reported.lock());
        for (index, spec) in self.specs.iter().enumerate() {
            if reported[index] || !self.gradients.needs_gradient(index) || !wanted(index) {
                continue;
            }
            let count = spec.count();
            match (model.on_device(), spec.dtype) {
                (Some(device), _) => {
                    let zeros = device.zero_gradient(index)?;
                    sink.lock().ready_on_device(index, zeros)?;
                }
                (None, DType::F32) => sink.lock().ready(index, Slice::F32(&vec![0.0; count]))?,
                (None, DType::F16) => {
                    sink.lock().ready(index, Slice::F16(&vec![f16::ZERO; count]))?;
                }
                (None, DType::Bf16) => {
                    sink.lock().ready(index, Slice::Bf16(&vec![bf16::ZERO; count]))?;
                }
            }
            reported[index] = true;
        }
        Ok(())
    }

    /// Ends a pass: waits for the averages.
    ///
    /// # Errors
    ///
    /// A failure of another rank.
    pub fn finish(&mut self, model: &mut dyn Model) -> Result<()> {
        if self.active == Some(true) {
            // They are used, by an earlier pass.
            self.fill_where(model, |index| self.gradients.has_gradient(index))?;
        }
        self.active = None;
        self.gradients.finish()
    }

    /// Ends a pass that failed, if there is one, and drops its gradients. Other ranks that wait for
    /// its averages get the reason.
    pub fn abandon(&mut self, model: &mut dyn Model, reason: &str) {
        let Some(sync) = self.active else { return };
        if sync && self.group.world_size() > 1 {
            self.active = None;
            self.group.abort(reason);
            return;
        }
        // A failure of the group is the next call's error.
        let _ = self.fill(model).and_then(|()| self.finish(model));
        self.active = None;
        self.zero_grad();
    }

    /// Drops all gradients.
    pub fn zero_grad(&mut self) {
        self.gradients.zero_grad();
    }
}

/// Notes the parameters that have got a gradient.
struct Reported {
    inner: SharedSink,
    reported: Arc<Mutex<Vec<bool>>>,
}

impl GradSink for Reported {
    fn ready(&mut self, index: usize, grad: Slice<'_>) -> Result<()> {
        self.inner.lock().ready(index, grad)?;
        self.reported.lock()[index] = true;
        Ok(())
    }

    fn ready_on_device(&mut self, index: usize, grad: Box<dyn DeviceTensor>) -> Result<()> {
        self.inner.lock().ready_on_device(index, grad)?;
        self.reported.lock()[index] = true;
        Ok(())
    }
}
