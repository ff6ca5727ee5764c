//! [`TrainerBuilder`]: builds a [`Trainer`] from options, the process group, and an optimizer on
//! the variables' device.

use std::cell::Cell;
use std::fmt;
use std::sync::PoisonError;

use amp::{Autocast, DType, LossScaler};
use candle_core::{Device, Var};
use candle_nn::VarMap;
use candle_ops::Context;
use collective::ProcessGroup;
use collective::reducer::ReducerOptions;
use fused_optim::candle::FromVars;
use fused_optim::{Averaged, Clip, CpuOptimizer, HyperParam, Optimizer, ParamGroup, WeightAverage};
#[cfg(doc)]
use train_step::CompileMode;
use train_step::{CompileOptions, Multipliers, Paramwise, RunLength, SchedulerConfig, TensorSpec};

use crate::backward::ParamIndex;
use crate::compile::Compiled;
use crate::device::join;
use crate::inputs::Inputs;
use crate::tensors::{ModelTensors, check_group};
use crate::trainer::Trainer;
use crate::variables::{Statistics, Variables};
use crate::{Error, Result, process};

/// Options of a [`Trainer`].
#[must_use = "nothing is made before `build`"]
pub struct TrainerBuilder {
    vars: VarMap,
    core: train_step::TrainerBuilder,
    group: Option<ProcessGroup>,
    /// The lower precision of autocast.
    half: Option<DType>,
    has_scaler: bool,
    compile: Option<CompileOptions>,
    groups: Paramwise,
    frozen: Vec<String>,
    seed: u64,
    part: Option<String>,
    checks_gradients: bool,
    average: Option<WeightAverage>,
}

impl Trainer {
    /// Options for training the variables that are in the map when [`build`](TrainerBuilder::build)
    /// is called.
    pub fn builder(vars: &VarMap) -> TrainerBuilder {
        TrainerBuilder {
            vars: vars.clone(),
            core: train_step::Trainer::builder().without_broadcast(),
            group: None,
            half: None,
            has_scaler: false,
            compile: None,
            groups: Paramwise::default(),
            frozen: Vec::new(),
            seed: 0,
            part: None,
            checks_gradients: true,
            average: None,
        }
    }
}

impl TrainerBuilder {
    /// Trains in mixed precision with `f16`: operators of `candle-ops` run under autocast, and the
    /// loss is scaled dynamically.
    pub fn f16(mut self) -> Self {
        (self.half, self.core) = (Some(DType::F16), self.core.f16());
        self
    }

    /// Trains in mixed precision with `bf16`: operators of `candle-ops` run under autocast, without
    /// a loss scale.
    pub fn bf16(mut self) -> Self {
        (self.half, self.core) = (Some(DType::Bf16), self.core.bf16());
        self
    }

    /// Scales the loss with this scaler. By default the loss scale is dynamic with `f16`, and
    /// absent otherwise.
    pub fn loss_scaler(mut self, scaler: LossScaler) -> Self {
        self.has_scaler = scaler.is_enabled();
        self.core = self.core.loss_scaler(scaler);
        self
    }

    /// Clips the averaged, unscaled gradients of each step.
    pub fn clip(mut self, clip: Clip) -> Self {
        self.core = self.core.clip(clip);
        self
    }

    /// Number of steps skipped in a row, because gradients are not finite, after which the last one
    /// is an [error](train_step::Error::NonFinite). Default: 100. Steps are skipped in mixed
    /// precision or with a loss scale.
    pub fn max_consecutive_skips(mut self, steps: usize) -> Self {
        self.core = self.core.max_consecutive_skips(steps);
        self
    }

    /// Number of batches per step, 1 by default. The remaining batches at the end of an epoch of
    /// [`batches`](Trainer::batches) are a smaller step. The loss of each batch is divided by this
    /// number, so that a step is the mean of its batches' losses. It is the mean of their samples
    /// or tokens only if each batch, on each rank, has equally many: otherwise a token of a short
    /// batch counts more than one of a long batch, as in PyTorch. Train such batches by
    /// [`step_weighted`](Trainer::step_weighted).
    #[doc(alias = "gradient_accumulation_steps")]
    pub fn accumulate(mut self, batches: usize) -> Self {
        self.core = self.core.accumulate(batches);
        self
    }

    /// Multiplies the optimizer's learning rates by a factor, a function of the number of steps
    /// taken so far.
    pub fn schedule(mut self, factor: impl Fn(u64) -> f64 + Send + 'static) -> Self {
        self.core = self.core.schedule(factor);
        self
    }

    /// Schedules learning rates and momentum by MMEngine's schedulers, chained in this order, over
    /// a run of this length. Steps are their iterations, and `length` is in steps; skipped ones do
    /// not count. Schedulers by epochs must be converted
    /// ([`convert_to_iter_based`](SchedulerConfig::convert_to_iter_based)), but a
    /// [`Plateau`](train_step::Plateau), which [`step_metrics`](Trainer::step_metrics) steps. Their
    /// state is saved; a resumed run goes on with the saved schedulers, and warns by `tracing` if
    /// they were configured differently.
    ///
    /// ```
    /// # use candle_core::{DType, Device};
    /// # use candle_nn::{VarBuilder, VarMap};
    /// # use candle_train::{AdamWHyper, Trainer};
    /// use candle_train::train_step::{Floor, Param, RunLength, SchedulerConfig, Shape};
    /// # let vars = VarMap::new();
    /// # let vb = VarBuilder::from_varmap(&vars, DType::F32, &Device::Cpu);
    /// # let _net = candle_nn::linear(2, 4, vb)?;
    /// let warm_up = Shape::Linear { start_factor: 0.1, end_factor: 1.0 };
    /// let cosine = Shape::CosineAnnealing { t_max: None, floor: Floor::Value(0.0) };
    /// let schedulers = [
    ///     SchedulerConfig { end: Some(100), ..SchedulerConfig::by_iters(Param::Lr, warm_up) },
    ///     SchedulerConfig { begin: 100, ..SchedulerConfig::by_iters(Param::Lr, cosine) },
    /// ];
    /// let builder = Trainer::builder(&vars).schedulers(RunLength::of_iters(10_000), schedulers);
    /// let train = builder.build(AdamWHyper { lr: 0.01, ..AdamWHyper::default() })?;
    /// assert_eq!(train.learning_rate(), 0.001);
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    pub fn schedulers(
        mut self,
        length: RunLength,
        schedulers: impl IntoIterator<Item = SchedulerConfig>,
    ) -> Self {
        self.core = self.core.schedulers(length, schedulers);
        self
    }

    /// Optimizes steps, as `torch.compile` and `runner`'s `compile` do: on the CPU convolutions are
    /// timed at the first use of each shape, and the fastest way is kept; on a GPU, whose kernels
    /// are fused in any case, [`MaxAutotuneNoCudagraphs`](CompileMode::MaxAutotuneNoCudagraphs)
    /// times cuDNN's convolutions and the optimizer's launches, [`ReduceOverhead`] runs steps of
    /// [`step_on`](Trainer::step_on) as CUDA graphs, and [`MaxAutotune`] does both. Results of
    /// tuning may differ in their last bits; a resumed run keeps its choices.
    /// [`Trainer::compile_report`] lists what was done.
    ///
    /// [`ReduceOverhead`]: CompileMode::ReduceOverhead
    /// [`MaxAutotune`]: CompileMode::MaxAutotune
    pub fn compile(mut self, options: CompileOptions) -> Self {
        self.compile = Some(options);
        self
    }

    /// Gives variables their own factors of the learning rate and the weight decay, by name and
    /// kind, each distinct pair of factors a parameter group:
    /// [`Paramwise::no_decay_for_norms_and_biases`], for example.
    pub fn groups(mut self, paramwise: Paramwise) -> Self {
        self.groups = paramwise;
        self
    }

    /// Does not train variables with these names, in which `*` matches any text: they have neither
    /// averages nor optimizer state. A variable with several names is not trained if one of them
    /// fits. Adapters of [`lora`](candle_ops::nn::lora()) are trained anyway, so `["*"]` trains
    /// only the adapters; layers with an adapter are always frozen.
    pub fn frozen<S: Into<String>>(mut self, patterns: impl IntoIterator<Item = S>) -> Self {
        self.frozen.extend(patterns.into_iter().map(Into::into));
        self
    }

    /// Allows steps in which a variable has no gradient on a rank. By default they are errors.
    pub fn find_unused_parameters(mut self) -> Self {
        self.core = self.core.find_unused_parameters();
        self
    }

    /// Options of the averaging: bucket sizes, compression to 16 bits.
    pub fn reducer(mut self, options: ReducerOptions) -> Self {
        self.core = self.core.reducer(options);
        self
    }

    /// Seed of the order of samples, and, with the rank, of dropout and of
    /// [`candle_ops::randn`]. Default: 0. Initial weights are seeded by [`seeded`](crate::seeded).
    pub fn seed(mut self, seed: u64) -> Self {
        (self.seed, self.core) = (seed, self.core.seed(seed));
        self
    }

    /// Whether a run's first step, which is not that of a resumed one, compares the gradients with
    /// differences of the loss: stock candle has operators with a wrong gradient, or none, and
    /// reports no error ([`stock_candle`](candle_ops::stock_candle)). The step then fails with
    /// [`Error::WrongGradients`], before anything has changed. Default: true.
    ///
    /// The closure of the step is called four times more, without autocast, on all ranks, before
    /// the batch itself, and more often only before the error. All that this trainer's step changes
    /// is restored, but not what the closure itself changes, such as the statistics of norm layers
    /// of another trainer's model, or a state that it carries on. Models of more than five million
    /// elements or of half types are not checked, and no loss that differs when it is computed
    /// again, as with candle's own random numbers. Only large errors are found:
    /// [`Trainer::check_gradients`] checks each variable.
    pub fn check_gradients(mut self, checks: bool) -> Self {
        self.checks_gradients = checks;
        self
    }

    /// Averages the weights after each step, for evaluation: within [`Trainer::evaluate`] the
    /// variables have the averages, and so have the variables in a saved file, from which training
    /// resumes to the bit. On the CPU.
    ///
    /// ```
    /// # use candle_core::{DType, Device};
    /// # use candle_nn::{VarBuilder, VarMap};
    /// use candle_train::{AdamWHyper, Trainer, WeightAverage};
    /// # let vars = VarMap::new();
    /// # let vb = VarBuilder::from_varmap(&vars, DType::F32, &Device::Cpu);
    /// # candle_nn::linear(2, 2, vb)?;
    /// let ema = WeightAverage::Ema { decay: 0.999 };
    /// let train = Trainer::builder(&vars).average(ema).build(AdamWHyper::default())?;
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    #[doc(alias("EMA", "SWA", "AveragedModel"))]
    pub const fn average(mut self, rule: WeightAverage) -> Self {
        self.average = Some(rule);
        self
    }

    /// Name of this trainer, one of several that have one checkpoint: see [`Parts`](crate::Parts).
    /// Letters, digits, `-` and `_`. Trainers of other names draw other random numbers.
    pub fn part(mut self, name: impl Into<String>) -> Self {
        self.part = Some(name.into());
        self.core = self.core.part(self.part.clone().unwrap_or_default());
        self
    }

    /// Averages over this process group, instead of the one described by the launcher's
    /// environment.
    pub fn group(mut self, group: ProcessGroup) -> Self {
        self.group = Some(group);
        self
    }

    /// Initializes the process group, broadcasts the current variables of rank 0 (so load
    /// pretrained weights before), and creates the optimizer on the variables' device, with one
    /// parameter group. Variables of `f16` and `bf16` have `f32` master weights.
    ///
    /// Every rank must call it, with the same options. Blocks until all ranks have called it. From
    /// then on glibc's allocator keeps up to 1 GiB of freed memory, and a GPU's memory pool all of
    /// it, for the tensors of the next step.
    ///
    /// # Errors
    ///
    /// On all ranks, the first option or hyper-parameter that differs between them, and an error of
    /// one rank: a [`frozen`](Self::frozen) pattern that matches no variable; hyper-parameters out
    /// of range; variables on several devices or of types other than `f32`, `f16` and `bf16`. Ranks
    /// that did not join, or have other variables.
    pub fn build<H: IntoOptimizer>(self, hyper: H) -> Result<Trainer> {
        let paramwise = self.groups.clone();
        self.build_for(|variables, device| {
            let groups = groups_of(&paramwise, variables)?;
            let vars: Vec<_> = variables.iter().map(|(_, var)| var.clone()).collect();
            let indices: Vec<_> = groups.iter().map(|group| group.params.clone()).collect();
            let mut optimizer = hyper.into_optimizer(&vars, &indices, device)?;
            for (group, ParamGroup { hyper: factors, .. }) in groups.iter().enumerate() {
                multiply(&mut *optimizer, group, *factors)?;
            }
            Ok(optimizer)
        })
    }

    /// Like [`build`](Self::build), with a custom optimizer for these variables, which are sorted
    /// by name, in this order; for example with rates by layer.
    ///
    /// ```
    /// # use candle_core::{DType, Device};
    /// # use candle_ops::nn::{VarBuilder, VarMap, linear};
    /// use candle_train::fused_optim::{AdamW, ParamGroup, candle::FromVars};
    /// use candle_train::{AdamWHyper, Trainer};
    /// # let vars = VarMap::new();
    /// # let vb = VarBuilder::from_varmap(&vars, DType::F32, &Device::Cpu);
    /// # let _net = (linear(2, 2, vb.pp("encoder"))?, linear(2, 2, vb.pp("head"))?);
    ///
    /// let train = Trainer::builder(&vars).build_with(|named, _device| {
    ///     let group = |lr, is_in: fn(&str) -> bool| {
    ///         let params = (0..named.len()).filter(|index| is_in(&named[*index].0));
    ///         ParamGroup::new(AdamWHyper { lr, ..AdamWHyper::default() }, params)
    ///     };
    ///     let groups = [
    ///         group(1e-5, |name| name.starts_with("encoder.")),
    ///         group(1e-3, |name| !name.starts_with("encoder.")),
    ///     ];
    ///     let vars: Vec<_> = named.iter().map(|(_, var)| var.clone()).collect();
    ///     Ok(Box::new(AdamW::from_groups(&vars, groups)?))
    /// })?;
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    ///
    /// # Errors
    ///
    /// The errors of [`build`](Self::build), and those of `make`; variables in no parameter group.
    pub fn build_with(
        self,
        make: impl FnOnce(&[(String, Var)], &Device) -> Result<Box<dyn Optimizer>>,
    ) -> Result<Trainer> {
        let has_groups = self.groups != Paramwise::default();
        self.build_for(|variables, device| {
            if has_groups {
                let text = "`groups` is for `build`: the optimizer of `build_with` has its own";
                return Err(Error::InvalidArgument(text.to_owned()));
            }
            make(variables, device)
        })
    }

    fn build_for(
        self,
        make: impl FnOnce(&[(String, Var)], &Device) -> Result<Box<dyn Optimizer>>,
    ) -> Result<Trainer> {
        process::keep_freed_memory();
        let average = self.average;
        let own = self.prepare(|variables, device| {
            let optimizer = make(variables, device)?;
            Ok(match average {
                Some(rule) => Box::new(Averaged::new(optimizer, rule)?),
                None => optimizer,
            })
        });
        // A rank that has failed joins as well: the others wait for it.
        let group = match (&self.group, &own) {
            (Some(group), _) => Ok(group.clone()),
            (None, Ok((_, tensors, _))) => join(tensors.params.tensors[0].device()),
            (None, Err(_)) => join(&first_device(&self.vars)),
        };
        let (own, group) = match (own, group) {
            (Err(error), Err(_)) => return Err(error),
            (own, group) => (own, group?),
        };
        let own = own.and_then(|own| check_group(&group, &own.1).map(|()| own));
        let core = self.core.group(group);
        let (variables, mut tensors, optimizer) = match own {
            Ok(own) => own,
            Err(error) => return Err(core.refuse(error)),
        };
        let device = tensors.params.tensors[0].device().clone();
        let compile = self.compile.as_ref().map(|options| format!("compile {options:?}"));
        let average = average.map(|rule| format!("average {rule:?}"));
        let unchecked = (!self.checks_gradients).then(|| "check_gradients(false)".to_owned());
        let described = variables.described().chain(compile).chain(average).chain(unchecked);
        let mut core = core.described(described).build(&mut tensors, optimizer)?;
        variables.broadcast(core.group())?;
        let seed = random_seed(self.seed, self.part.as_deref(), core.rank());
        let mut context = context(&device, seed, self.half)?;
        let parts = (&mut context, &mut core);
        let compiled =
            self.compile.map(|options| Compiled::new(options, parts, (&tensors, &variables)));
        Ok(Trainer {
            compiled,
            inputs: Inputs::new(&device, &tensors),
            index: ParamIndex::new(variables.params.iter().map(|(_, var)| var.id())),
            tensors,
            core,
            context,
            is_mixed: self.half.is_some() || self.has_scaler,
            has_lowered: Cell::new(self.half.is_none()),
            map: self.vars,
            variables,
            device,
            statistics: Statistics::default(),
            seed: self.seed,
            checks_gradients: self.checks_gradients,
        })
    }

    /// Finds the variables, and makes the optimizer.
    fn prepare(
        &self,
        make: impl FnOnce(&[(String, Var)], &Device) -> Result<Box<dyn Optimizer>>,
    ) -> Result<(Variables, ModelTensors, Box<dyn Optimizer>)> {
        let variables = Variables::of(&self.vars, &self.frozen)?;
        let mut optimizer = make(&variables.params, variables.params[0].1.device())?;
        let tensors = variables.tensors()?;
        let device = tensors.params.tensors[0].device();
        tensors.params.check_types(self.half)?;
        if let Some(options) = &self.compile {
            Compiled::check(options, device)?;
        }
        if optimizer.as_device().is_some() == device.is_cpu() {
            let (steps, at) = (optimizer.device(), device.location());
            let text = format!("the optimizer steps on {steps}, the variables are on {at:?}");
            return Err(Error::InvalidArgument(text));
        }
        Ok((variables, tensors, optimizer))
    }
}

impl fmt::Debug for TrainerBuilder {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("TrainerBuilder")
            .field("half", &self.half)
            .field("core", &self.core)
            .field("frozen", &self.frozen)
            .field("seed", &self.seed)
            .finish_non_exhaustive()
    }
}

/// Hyper-parameters of an optimizer for the CPU and, with the feature `cuda`, for a GPU. All fused
/// optimizers of [`fused_optim`] implement it.
pub trait IntoOptimizer {
    /// Creates an optimizer of these variables, which are all on `device`. `groups` has the indices
    /// of the variables of each parameter group.
    ///
    /// # Errors
    ///
    /// Hyper-parameters out of range; errors of the device.
    fn into_optimizer(
        self,
        vars: &[Var],
        groups: &[Vec<usize>],
        device: &Device,
    ) -> candle_core::Result<Box<dyn Optimizer>>;
}

#[cfg(not(feature = "cuda"))]
impl<H> IntoOptimizer for H
where
    H: Clone,
    CpuOptimizer<H>: FromVars<Hyper = H> + 'static,
{
    fn into_optimizer(
        self,
        vars: &[Var],
        groups: &[Vec<usize>],
        _: &Device,
    ) -> candle_core::Result<Box<dyn Optimizer>> {
        Ok(Box::new(of_groups::<CpuOptimizer<H>>(self, vars, groups)?))
    }
}

#[cfg(feature = "cuda")]
impl<H> IntoOptimizer for H
where
    H: Clone,
    CpuOptimizer<H>: FromVars<Hyper = H> + 'static,
    fused_optim::cuda::CudaDeviceOptimizer<H>: FromVars<Hyper = H> + 'static,
{
    fn into_optimizer(
        self,
        vars: &[Var],
        groups: &[Vec<usize>],
        device: &Device,
    ) -> candle_core::Result<Box<dyn Optimizer>> {
        if device.is_cuda() {
            type OnGpu<H> = fused_optim::cuda::CudaDeviceOptimizer<H>;
            return Ok(Box::new(of_groups::<OnGpu<H>>(self, vars, groups)?));
        }
        Ok(Box::new(of_groups::<CpuOptimizer<H>>(self, vars, groups)?))
    }
}

fn of_groups<O: FromVars<Hyper: Clone>>(
    hyper: O::Hyper,
    vars: &[Var],
    groups: &[Vec<usize>],
) -> candle_core::Result<O> {
    match groups {
        [_] => O::from_vars(vars, hyper),
        _ => {
            let group = |params: &Vec<usize>| ParamGroup::new(hyper.clone(), params.clone());
            O::from_groups(vars, groups.iter().map(group))
        }
    }
}

/// The parameter groups of variables.
fn groups_of(
    paramwise: &Paramwise,
    variables: &[(String, Var)],
) -> Result<Vec<ParamGroup<Multipliers>>> {
    let spec = |(name, var): &(String, Var)| {
        let dtype = match var.dtype() {
            candle_core::DType::F16 => fused_optim::DType::F16,
            candle_core::DType::BF16 => fused_optim::DType::Bf16,
            // Others are refused when the optimizer is made.
            _ => fused_optim::DType::F32,
        };
        TensorSpec { name: name.clone(), shape: var.dims().to_vec(), dtype }
    };
    let specs: Vec<_> = variables.iter().map(spec).collect();
    match paramwise.unmatched(&specs) {
        Some(text) => Err(Error::InvalidArgument(text)),
        None => Ok(paramwise.groups(&specs)),
    }
}

/// Multiplies the hyper-parameters of a group.
fn multiply(optimizer: &mut dyn Optimizer, group: usize, factors: Multipliers) -> Result<()> {
    let Multipliers { lr, weight_decay } = factors;
    for (param, factor) in [(HyperParam::Lr, lr), (HyperParam::WeightDecay, weight_decay)] {
        if let Some(value) = optimizer.hyper_param(group, param)?.filter(|_| factor != 1.0) {
            optimizer.set_hyper_param(group, param, value * factor)?;
        }
    }
    Ok(())
}

/// Device of a variable of a map in which there may be several, or none.
fn first_device(vars: &VarMap) -> Device {
    let vars = vars.data().lock().unwrap_or_else(PoisonError::into_inner);
    vars.values().next().map_or(Device::Cpu, |var| var.device().clone())
}

/// Seed of a rank's random numbers: FNV-1a of a part's name, from the seed.
fn random_seed(seed: u64, part: Option<&str>, rank: usize) -> u64 {
    let step = |hash: u64, byte: u8| (hash ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3);
    part.unwrap_or_default().bytes().fold(seed, step).wrapping_add(rank as u64)
}

/// The state shared by operators, with kernels on a GPU.
fn context(device: &Device, seed: u64, half: Option<DType>) -> Result<Context> {
    let context = Context::new(seed);
    #[cfg(feature = "cuda")]
    let context = match device {
        Device::Cuda(cuda) => {
            let kernels = candle_ops::cuda::Kernels::new(cuda)
                .map_err(|e| Error::Candle(candle_core::Error::wrap(e)))?;
            context.with_kernels(std::sync::Arc::new(kernels))
        }
        _ => context,
    };
    let lists = || if device.is_cuda() { Autocast::cuda() } else { Autocast::cpu() };
    Ok(match half {
        None => context,
        Some(dtype) => {
            let lists = lists().with_dtype(dtype).map_err(train_step::Error::from)?;
            context.with_autocast(lists)
        }
    })
}
