//! Averages gradients over the ranks during the backward pass, for any optimizer.
//!
//! On the CPU a gradient is copied once, into its bucket, and the all-reduce of a full bucket
//! overlaps with the rest of the backward pass; optimizers read the buckets. On a GPU gradients
//! stay in device memory.
//!
//! Invariant: parameters have the same index on every rank, because they are sorted by name.

use std::sync::Arc;

use candle_core::backprop::GradStore;
use candle_core::{DType, Tensor, Var};
use candle_nn::VarMap;
use candle_ops::Tape;
use collective::ProcessGroup;
use collective::reducer::{ParamInfo, Reducer, ReducerOptions};
use fused_optim::Slice;
use fused_optim::candle::{slice, tensor};
use parking_lot::Mutex;

use crate::backward::ParamIndex;
#[cfg(feature = "cuda")]
use crate::gpu::OnGpu;
use crate::variables::{Variables, is_finite};
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
    gradients: Arc<Mutex<Gradients>>,
    /// For each variable, whether it got a gradient in this pass.
    reported: Arc<Mutex<Vec<bool>>>,
    /// Between `prepare` and `finish`: whether gradients are averaged in the pass.
    active: Option<bool>,
    find_unused: bool,
    /// Whether every variable needs a gradient.
    is_strict: bool,
    group: ProcessGroup,
}

/// Storage of the gradients.
#[derive(Debug)]
enum Gradients {
    /// In buckets on the host.
    Host { reducer: Box<Reducer>, dtypes: Vec<fused_optim::DType> },
    #[cfg(feature = "cuda")]
    Device(Box<OnGpu>),
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
        let param = |(name, var): &(String, Var)| {
            let dtype = match var.dtype() {
                DType::F32 => collective::DType::F32,
                DType::F16 => collective::DType::F16,
                DType::BF16 => collective::DType::Bf16,
                other => {
                    let text = format!("`{name}` is of {other:?}; expected f32, f16 or bf16");
                    return Err(Error::InvalidArgument(text));
                }
            };
            Ok(ParamInfo::new(name, var.elem_count(), dtype))
        };
        let params = variables.params.iter().map(param).collect::<Result<Vec<_>>>()?;
        let vars: Vec<Var> = variables.params.iter().map(|(_, var)| var.clone()).collect();
        let find_unused = options.find_unused_parameters;
        let is_strict = !find_unused && !options.static_graph;
        let gradients = if vars.iter().all(|var| var.device().is_cpu()) {
            let reducer = Box::new(Reducer::new(group.clone(), params, options)?);
            let dtypes = vars.iter().map(|var| var.dtype().try_into());
            Gradients::Host { reducer, dtypes: dtypes.collect::<candle_core::Result<_>>()? }
        } else {
            on_device(&vars[0], params, &group, options)?
        };
        variables.broadcast(&group)?;
        let index = ParamIndex::new(vars.iter().map(|var| var.id()));
        let reported = Arc::new(Mutex::new(vec![false; vars.len()]));
        let gradients = Arc::new(Mutex::new(gradients));
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
        self.gradients.lock().prepare(sync)?;
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
        let (gradients, reported) = (Arc::clone(&self.gradients), Arc::clone(&self.reported));
        let ready = move |index, gradient: Tensor| {
            gradients.lock().ready(index, &gradient)?;
            reported.lock()[index] = true;
            Ok(())
        };
        self.index.backward((tape, loss), gradient, ready, Error::Candle)?;
        let (gradients, reported) = (self.gradients.lock(), self.reported.lock());
        let has_none = !reported.contains(&true);
        let checks = self.active == Some(true) && self.is_strict;
        let is_missing =
            |index: usize| has_none || (checks && !reported[index] && gradients.lacks(index));
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
        self.fill_where(|_, _| true)
    }

    fn fill_where(&self, wanted: impl Fn(&Gradients, usize) -> bool) -> Result<()> {
        if self.find_unused {
            return Ok(());
        }
        let (mut gradients, mut reported) = (self.gradients.lock(), self.reported.lock());
        for (index, var) in self.vars.iter().enumerate() {
            if !reported[index] && gradients.needs(index) && wanted(&gradients, index) {
                gradients.ready(index, &var.zeros_like()?)?;
                reported[index] = true;
            }
        }
        Ok(())
    }

    /// Ends a pass.
    pub(crate) fn finish(&mut self) -> Result<()> {
        if self.active == Some(true) {
            // They are used, by an earlier pass.
            let has_gradient = |gradients: &Gradients, index| gradients.slice(index).is_some();
            self.fill_where(has_gradient)?;
        }
        self.active = None;
        self.gradients.lock().finish()
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
        let mut gradients = self.gradients.lock();
        for (index, var) in self.vars.iter().enumerate() {
            if let Some(gradient) = store.get(var) {
                gradients.ready(index, &gradient.contiguous()?)?;
                self.reported.lock()[index] = true;
            }
        }
        Ok(())
    }

    /// The name of the first variable with an average that is not finite.
    pub(crate) fn first_non_finite(&self, grad_scale: f32) -> Result<String> {
        let gradients = self.gradients.lock();
        for (index, (name, var)) in self.names.iter().zip(&self.vars).enumerate() {
            if let Some(gradient) = gradients.tensor(index, var)? {
                // Unscaled, as the step checks it: that can overflow, too.
                let unscaled = gradient.to_dtype(DType::F32)?.affine(grad_scale.into(), 0.0)?;
                if !is_finite(&unscaled)? {
                    return Ok(name.clone());
                }
            }
        }
        Ok("?".to_owned())
    }

    /// Returns the gradients accumulated since the last call, as new tensors, and clears them.
    ///
    /// # Errors
    ///
    /// Memory that cannot be allocated.
    pub fn take(&mut self) -> Result<GradStore> {
        let mut store = GradStore::default();
        let gradients = self.gradients.lock();
        for (index, var) in self.vars.iter().enumerate() {
            if let Some(gradient) = gradients.tensor(index, var)? {
                store.insert(var, gradient);
            }
        }
        drop(gradients);
        self.zero_grad();
        Ok(store)
    }

    /// The gradients, one per variable, sorted by the variables' names.
    pub(crate) fn with<R>(&self, call: impl FnOnce(View<'_>) -> Result<R>) -> Result<R> {
        let gradients = self.gradients.lock();
        match &*gradients {
            Gradients::Host { dtypes, .. } => {
                let slices = (0..dtypes.len()).map(|index| gradients.slice(index));
                call(View::Host(&slices.collect::<Vec<_>>()))
            }
            #[cfg(feature = "cuda")]
            Gradients::Device(gradients) => call(View::Device(gradients)),
        }
    }

    /// Whether the next pass depends on more state than the gradients, as with PowerSGD.
    pub(crate) fn keeps_memory(&self) -> bool {
        match &*self.gradients.lock() {
            Gradients::Host { reducer, .. } => reducer.state_dict().is_some(),
            #[cfg(feature = "cuda")]
            Gradients::Device(_) => false,
        }
    }

    /// Drops all gradients.
    pub fn zero_grad(&mut self) {
        match &mut *self.gradients.lock() {
            Gradients::Host { reducer, .. } => reducer.zero_grad(),
            #[cfg(feature = "cuda")]
            Gradients::Device(gradients) => gradients.zero_grad(),
        }
    }
}

/// Gradients of variables on a GPU.
#[cfg(feature = "cuda")]
fn on_device(
    first: &Var,
    params: Vec<ParamInfo>,
    group: &ProcessGroup,
    options: ReducerOptions,
) -> Result<Gradients> {
    OnGpu::new(first, params, group, options).map(|own| Gradients::Device(Box::new(own)))
}

#[cfg(not(feature = "cuda"))]
fn on_device(
    first: &Var,
    _: Vec<ParamInfo>,
    _: &ProcessGroup,
    _: ReducerOptions,
) -> Result<Gradients> {
    let at = first.device().location();
    Err(Error::InvalidArgument(format!("variables on {at:?}: only the CPU is supported")))
}

/// Gradients in their storage.
pub(crate) enum View<'a> {
    Host(&'a [Option<Slice<'a>>]),
    #[cfg(feature = "cuda")]
    Device(&'a OnGpu),
}

impl Gradients {
    fn prepare(&mut self, sync: bool) -> Result<()> {
        match self {
            Self::Host { reducer, .. } => Ok(reducer.prepare(sync)?),
            #[cfg(feature = "cuda")]
            Self::Device(gradients) => gradients.prepare(sync),
        }
    }

    /// Adds a gradient, which must be contiguous.
    fn ready(&mut self, index: usize, gradient: &Tensor) -> Result<()> {
        let reducer = match self {
            Self::Host { reducer, .. } => reducer,
            #[cfg(feature = "cuda")]
            Self::Device(gradients) => return gradients.ready(index, gradient),
        };
        let (storage, layout) = gradient.storage_and_layout();
        match slice(&storage, layout) {
            Some(Slice::F32(v)) => reducer.ready(index, v)?,
            Some(Slice::F16(v)) => reducer.ready(index, v)?,
            Some(Slice::Bf16(v)) => reducer.ready(index, v)?,
            None => {
                let text = format!("gradient {index} is not of f32, f16 or bf16 on the CPU");
                return Err(Error::InvalidArgument(text));
            }
        }
        Ok(())
    }

    /// Whether a parameter that has no gradient in this pass has none of an earlier pass, either; a
    /// GPU's `finish` checks it.
    fn lacks(&self, index: usize) -> bool {
        match self {
            Self::Host { .. } => self.slice(index).is_none(),
            #[cfg(feature = "cuda")]
            Self::Device(_) => false,
        }
    }

    /// Whether a parameter without a gradient in this pass may get one: the static graph uses it.
    fn needs(&self, index: usize) -> bool {
        match self {
            Self::Host { reducer, .. } => reducer.needs_gradient(index),
            #[cfg(feature = "cuda")]
            Self::Device(gradients) => gradients.needs(index),
        }
    }

    fn finish(&mut self) -> Result<()> {
        match self {
            Self::Host { reducer, .. } => Ok(reducer.finish()?),
            #[cfg(feature = "cuda")]
            Self::Device(gradients) => gradients.finish(),
        }
    }

    /// A gradient on the host.
    fn slice(&self, index: usize) -> Option<Slice<'_>> {
        match self {
            Self::Host { reducer, dtypes } => match dtypes[index] {
                fused_optim::DType::F32 => reducer.grad(index).map(Slice::F32),
                fused_optim::DType::F16 => reducer.grad(index).map(Slice::F16),
                fused_optim::DType::Bf16 => reducer.grad(index).map(Slice::Bf16),
            },
            #[cfg(feature = "cuda")]
            Self::Device(_) => None,
        }
    }

    /// A copy of a gradient, in the variable's shape.
    fn tensor(&self, index: usize, var: &Var) -> Result<Option<Tensor>> {
        #[cfg(feature = "cuda")]
        if let Self::Device(gradients) = self {
            return gradients.tensor(index, var);
        }
        let copy = |slice| Ok(tensor(slice, var.shape(), var.device())?);
        self.slice(index).map(copy).transpose()
    }
}
