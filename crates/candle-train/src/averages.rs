//! Averages gradients over the ranks during the backward pass, for any optimizer.
//!
//! On the CPU a gradient is copied once, into its bucket, and the all-reduce of a full bucket
//! overlaps with the rest of the backward pass; optimizers read the buckets. On a GPU gradients
//! stay in device memory.
//!
//! Invariant: parameters have the same index on every rank, because they are sorted by name.

use std::sync::Arc;

use candle_core::backprop::GradStore;
use candle_core::{Tensor, Var};
use candle_nn::VarMap;
use candle_ops::Tape;
use collective::ProcessGroup;
use collective::reducer::ReducerOptions;
use fused_optim::candle::tensor;
use parking_lot::Mutex;
use train_step::{DistributedDataParallel, EngineState, Gradient, ModelWrapper, StepContext};

use crate::backward::ParamIndex;
use crate::tensors::{ModelTensors, report};
use crate::variables::Variables;
use crate::{Error, Result};

/// Data parallelism for a training loop with any optimizer: every rank has the whole model, and
/// gradients are averaged over the ranks.
///
/// With candle's own `backward`:
///
/// ```
/// use candle_core::{DType, Device, Module, Tensor};
/// use candle_nn::{AdamW, Optimizer, VarBuilder, VarMap};
/// use candle_train::{DataParallel, ReducerOptions};
/// use collective::{GroupOptions, Topology, init_process_group};
///
/// let vars = VarMap::new();
/// let net = candle_nn::linear(4, 1, VarBuilder::from_varmap(&vars, DType::F32, &Device::Cpu))?;
/// let topology = Topology::from_env(|name| std::env::var(name).ok())?;
/// let group = init_process_group(&topology, GroupOptions::default())?;
/// // Broadcasts rank 0's weights.
/// let mut averages = DataParallel::new(&vars, group, ReducerOptions::default())?;
/// let mut adamw = AdamW::new_lr(vars.all_vars(), 1e-3)?; // candle's own
///
/// let loss = net.forward(&Tensor::ones((8, 4), DType::F32, &Device::Cpu)?)?.sqr()?.mean_all()?;
/// let mut gradients = loss.backward()?;
/// averages.average(&mut gradients)?;
/// adamw.step(&gradients)?;
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
///
/// With a [tape](candle_ops::record()), averaging overlaps with the backward pass:
/// [`backward`](Self::backward).
#[derive(Debug)]
#[doc(alias = "DistributedDataParallel")]
pub struct DataParallel {
    names: Vec<String>,
    vars: Vec<Var>,
    index: ParamIndex,
    pub(crate) gradients: DistributedDataParallel,
    /// For each variable, whether it got a gradient in this pass.
    reported: Arc<Mutex<Vec<bool>>>,
    /// Between `prepare` and `finish`: whether gradients are averaged in the pass.
    active: Option<bool>,
    find_unused: bool,
    /// Whether every variable needs a gradient.
    is_strict: bool,
    group: ProcessGroup,
}

impl DataParallel {
    /// Broadcasts the variables of rank 0, and averages the gradients of all floating-point
    /// variables that are in the map now.
    ///
    /// Every rank must call it, with variables of the same names and shapes, and the same options.
    /// Blocks until all ranks have called it.
    ///
    /// # Errors
    ///
    /// The first variable that differs between ranks; a failure of another rank; variables of types
    /// other than `f32`, `f16` and `bf16`.
    pub fn new(vars: &VarMap, group: ProcessGroup, options: ReducerOptions) -> Result<Self> {
        Self::of(&Variables::of(vars, &[])?, group, options)
    }

    pub(crate) fn of(
        variables: &Variables,
        group: ProcessGroup,
        options: ReducerOptions,
    ) -> Result<Self> {
        Self::of_tensors(variables, &mut variables.tensors()?, group, options)
    }

    /// `tensors` are those of the variables.
    pub(crate) fn of_tensors(
        variables: &Variables,
        tensors: &mut ModelTensors,
        group: ProcessGroup,
        options: ReducerOptions,
    ) -> Result<Self> {
        let vars: Vec<Var> = variables.params.iter().map(|(_, var)| var.clone()).collect();
        let find_unused = options.find_unused_parameters;
        let is_strict = !find_unused && !options.static_graph;
        let mut gradients =
            DistributedDataParallel::new(group.clone(), &tensors.params.specs, options)?;
        gradients.place(tensors)?;
        variables.broadcast(&group)?;
        let index = ParamIndex::new(vars.iter().map(|var| var.id()));
        let reported = Arc::new(Mutex::new(vec![false; vars.len()]));
        let names = variables.params.iter().map(|(name, _)| name.clone()).collect();
        let active = None;
        Ok(Self { names, vars, index, gradients, reported, active, find_unused, is_strict, group })
    }

    /// The process group.
    #[must_use]
    pub fn group(&self) -> &ProcessGroup {
        &self.group
    }

    /// Runs the backward pass of a recorded forward pass. `gradient` is that of the loss: 1, or a
    /// loss scale. With `sync` gradients are averaged during the pass; without it (PyTorch's
    /// `no_sync`) they accumulate on this rank until a pass with `sync`. Gradients accumulate over
    /// passes until [`take`](Self::take).
    ///
    /// Every rank must call it, with the same `sync`. Blocks until the averages are complete.
    ///
    /// # Errors
    ///
    /// [`UnusedParameters`](collective::Error::UnusedParameters) with the names of variables
    /// without a gradient since the last [`take`](Self::take), in a pass with `sync`, unless
    /// [`find_unused_parameters`](ReducerOptions::find_unused_parameters) allows it, or with all
    /// names, if the loss depends on no variable; errors of operators; a failure of another rank.
    /// This rank's gradients are dropped then. With several ranks, an error in a pass with `sync`
    /// aborts the group.
    #[doc(alias = "no_sync")]
    pub fn backward(
        &mut self,
        (tape, loss): (Tape, &Tensor),
        gradient: Tensor,
        sync: bool,
    ) -> Result<()> {
        self.prepare(sync)?;
        let ended = self.pass((tape, loss), gradient).and_then(|()| self.finish());
        ended.inspect_err(|error| self.abandon(&error.to_string()))
    }

    /// Begins a pass; with `sync` its gradients are averaged. A pass that was not finished, since
    /// the backward pass panicked, is abandoned.
    pub(crate) fn prepare(&mut self, sync: bool) -> Result<()> {
        self.abandon("its last backward pass was not finished");
        let mut state = EngineState::default();
        let sink = self.gradients.sink();
        let mut cx = StepContext { sync, ..StepContext::new(sink, &mut state) };
        self.gradients.prepare(None, &mut cx)?;
        self.reported.lock().fill(false);
        self.active = Some(sync);
        Ok(())
    }

    /// Whether the last pass was not finished.
    pub(crate) fn is_unfinished(&self) -> bool {
        self.active.is_some()
    }

    /// Takes the gradients of a backward pass; an error if some are missing.
    pub(crate) fn pass(&self, (tape, loss): (Tape, &Tensor), gradient: Tensor) -> Result<()> {
        let (sink, reported) = (self.gradients.sink(), Arc::clone(&self.reported));
        let ready = move |index, gradient: Tensor| {
            report(&sink, index, gradient)?;
            reported.lock()[index] = true;
            Ok(())
        };
        self.index.backward((tape, loss), gradient, ready, Error::Candle)?;
        let reported = self.reported.lock();
        let has_none = !reported.contains(&true);
        let checks = self.active == Some(true) && self.is_strict;
        let is_missing = |index: usize| {
            has_none || (checks && !reported[index] && !self.gradients.has_gradient(index))
        };
        let names = self.names.iter().enumerate();
        let names: Vec<_> =
            names.filter(|(index, _)| is_missing(*index)).map(|(_, name)| name.clone()).collect();
        if names.is_empty() {
            return Ok(());
        }
        Err(collective::Error::UnusedParameters { rank: self.group.rank(), names }.into())
    }

    /// Gives the parameters without a gradient in this pass zeros, if they must have one.
    pub(crate) fn fill(&self) -> Result<()> {
        self.fill_where(|_| true)
    }

    fn fill_where(&self, wanted: impl Fn(usize) -> bool) -> Result<()> {
        if self.find_unused {
            return Ok(());
        }
        let (sink, mut reported) = (self.gradients.sink(), self.reported.lock());
        for (index, var) in self.vars.iter().enumerate() {
            if !reported[index] && self.gradients.needs_gradient(index) && wanted(index) {
                report(&sink, index, var.zeros_like()?)?;
                reported[index] = true;
            }
        }
        Ok(())
    }

    /// Ends a pass.
    pub(crate) fn finish(&mut self) -> Result<()> {
        if self.active == Some(true) {
            // They are used, by an earlier pass.
            self.fill_where(|index| self.gradients.has_gradient(index))?;
        }
        self.active = None;
        Ok(self.gradients.finish()?)
    }

    /// Ends a pass that failed, if there is one, and drops its gradients. Other ranks that wait for
    /// its averages get the reason.
    fn abandon(&mut self, reason: &str) {
        let Some(sync) = self.active else { return };
        if sync && self.group.world_size() > 1 {
            self.active = None;
            self.group.abort(reason);
            return;
        }
        // A failure of the group is the next call's error.
        let _ = self.fill().and_then(|()| self.finish());
        self.active = None;
        self.zero_grad();
    }

    /// Averages the gradients returned by candle's own `backward`, in place.
    ///
    /// Every rank must call it. Blocks until the averages are complete.
    ///
    /// # Errors
    ///
    /// As [`backward`](Self::backward).
    pub fn average(&mut self, store: &mut GradStore) -> Result<()> {
        self.prepare(true)?;
        let ended = self.take_all(store).and_then(|()| self.finish());
        ended.inspect_err(|error| self.abandon(&error.to_string()))?;
        let averages = self.take()?;
        for var in &self.vars {
            match averages.get(var) {
                Some(average) => store.insert(var, average.clone()),
                None => store.remove(var),
            };
        }
        Ok(())
    }

    /// Takes the gradients of a store.
    fn take_all(&self, store: &GradStore) -> Result<()> {
        let sink = self.gradients.sink();
        for (index, var) in self.vars.iter().enumerate() {
            if let Some(gradient) = store.get(var) {
                report(&sink, index, gradient.contiguous()?)?;
                self.reported.lock()[index] = true;
            }
        }
        Ok(())
    }

    /// Returns the gradients accumulated since the last call, as new tensors, and clears them.
    ///
    /// # Errors
    ///
    /// Memory that cannot be allocated.
    pub fn take(&mut self) -> Result<GradStore> {
        let mut store = GradStore::default();
        self.gradients.with_grads(&mut |gradients| {
            for (var, gradient) in self.vars.iter().zip(gradients) {
                if let Some(gradient) = gradient {
                    store.insert(var, copy(gradient, var)?);
                }
            }
            Ok(())
        })?;
        self.zero_grad();
        Ok(store)
    }

    /// Whether the next pass depends on more state than the gradients, as with PowerSGD.
    pub(crate) fn keeps_memory(&self) -> Result<bool> {
        Ok(!self.gradients.state_dict()?.is_empty())
    }

    /// Drops all gradients.
    pub fn zero_grad(&mut self) {
        self.gradients.zero_grad();
    }
}

/// A gradient as a tensor in the variable's shape.
fn copy(gradient: &Gradient<'_>, var: &Var) -> train_step::Result<Tensor> {
    match gradient {
        Gradient::Host(slice) => {
            tensor(*slice, var.shape(), var.device()).map_err(train_step::Error::model)
        }
        #[cfg(feature = "cuda")]
        Gradient::Device(gradient) => crate::gpu::to_tensor(*gradient, var),
        #[cfg(not(feature = "cuda"))]
        Gradient::Device(gradient) => Ok(crate::tensors::own(*gradient)?.tensor()),
    }
}
