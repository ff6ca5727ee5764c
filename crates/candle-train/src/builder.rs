//! How a [`Trainer`] is made: options, the ranks' group, the optimizer of the variables' device.

use std::fmt;
use std::sync::atomic::{AtomicUsize, Ordering};

use amp::{Autocast, DType, LossScaler, LossScalerOptions};
use candle_core::Device;
use candle_nn::VarMap;
use candle_ops::Context;
use collective::init::Accelerator;
use collective::object::all_gather_object;
use collective::reducer::ReducerOptions;
use collective::{GroupOptions, ProcessGroup, Topology, init_process_group};
use fused_optim::candle::{FromVars, VarOptimizer};
use fused_optim::{Clip, CpuOptimizer, Optimizer};
use train_data::Accumulation;

use crate::averages::DataParallel;
use crate::trainer::{Schedule, Trainer};
use crate::variables::Variables;
use crate::{Error, Result, process};

/// Options of a [`Trainer`].
#[must_use = "nothing is made before `build`"]
pub struct Builder {
    vars: VarMap,
    group: Option<ProcessGroup>,
    reducer: ReducerOptions,
    /// The lower precision of autocast.
    half: Option<DType>,
    scaler: Option<LossScaler>,
    clip: Option<Clip>,
    accumulate: usize,
    schedule: Option<Schedule>,
    frozen: Vec<String>,
    seed: u64,
}

impl Trainer {
    /// Options for training the variables that are in the map when [`build`](Builder::build) is called.
    pub fn builder(vars: &VarMap) -> Builder {
        Builder {
            vars: vars.clone(),
            group: None,
            reducer: ReducerOptions::default(),
            half: None,
            scaler: None,
            clip: None,
            accumulate: 1,
            schedule: None,
            frozen: Vec::new(),
            seed: 0,
        }
    }
}

impl Builder {
    /// Mixed precision in `f16`: operators of `candle-ops` run under autocast, and the loss is scaled dynamically.
    pub fn f16(mut self) -> Self {
        self.half = Some(DType::F16);
        self
    }

    /// Mixed precision in `bf16`: operators of `candle-ops` run under autocast, without a loss scale.
    pub fn bf16(mut self) -> Self {
        self.half = Some(DType::Bf16);
        self
    }

    /// Scales the loss with this in place of the default, which is dynamic in `f16` and none otherwise.
    pub fn loss_scaler(mut self, scaler: LossScaler) -> Self {
        self.scaler = Some(scaler);
        self
    }

    /// Clips each step's averaged, unscaled gradients.
    pub fn clip(mut self, clip: Clip) -> Self {
        self.clip = Some(clip);
        self
    }

    /// Number of batches in a step, 1 by default; what is left at the end of an epoch of
    /// [`batches`](Trainer::batches) is a smaller step. The loss of each batch is divided by it.
    #[doc(alias = "gradient_accumulation_steps")]
    pub fn accumulate(mut self, batches: usize) -> Self {
        self.accumulate = batches;
        self
    }

    /// Learning rates as factors of the optimizer's own, by the number of steps taken so far.
    pub fn schedule(mut self, factor: impl Fn(u64) -> f64 + Send + 'static) -> Self {
        self.schedule = Some(Box::new(factor));
        self
    }

    /// Does not train variables of these names, in which `*` is any text: no averages and no optimizer state. Adapters
    /// of [`lora`](candle_ops::nn::lora()) are trained still, so `["*"]` trains them alone; the layers that have one
    /// are frozen anyway.
    pub fn frozen<S: Into<String>>(mut self, patterns: impl IntoIterator<Item = S>) -> Self {
        self.frozen.extend(patterns.into_iter().map(Into::into));
        self
    }

    /// Allows steps in which a variable gets no gradient on a rank, which are errors otherwise.
    pub fn find_unused_parameters(mut self) -> Self {
        self.reducer.find_unused_parameters = true;
        self
    }

    /// Options of the averages: sizes of buckets, compression to 16 bits.
    pub fn reducer(mut self, options: ReducerOptions) -> Self {
        let find_unused = self.reducer.find_unused_parameters;
        self.reducer = options;
        self.reducer.find_unused_parameters |= find_unused;
        self
    }

    /// Seed of the order of samples, and with the rank of dropout. Default: 0.
    pub fn seed(mut self, seed: u64) -> Self {
        self.seed = seed;
        self
    }

    /// Averages over this group, in place of the one that the launcher's environment describes.
    pub fn group(mut self, group: ProcessGroup) -> Self {
        self.group = Some(group);
        self
    }

    /// Joins the ranks, gives each rank 0's variables as they are now (load pretrained ones before), and makes the
    /// optimizer on the variables' device, with one parameter group. `f16` and `bf16` variables get `f32` masters.
    ///
    /// Every rank must call it, with the same options. Blocks until all have. From then on glibc's allocator keeps up to
    /// 1 GiB of freed memory, and a GPU's memory pool all of it, for the next step's tensors.
    ///
    /// # Errors
    ///
    /// The first option or hyper-parameter that differs between ranks; a [`frozen`](Self::frozen) pattern without a variable; hyper-parameters out of range; variables of several
    /// devices or of other types than `f32`, `f16` and `bf16`; ranks that did not join, or with other variables.
    pub fn build<H: Rule>(self, hyper: H) -> Result<Trainer> {
        self.build_with(|variables, device| hyper.optimizer(variables, device))
    }

    /// As [`build`](Self::build), with an optimizer of the caller's for these variables, in this order: several
    /// parameter groups, for example.
    ///
    /// # Errors
    ///
    /// As there, and those of `make`.
    pub fn build_with(
        self,
        make: impl FnOnce(&[candle_core::Var], &Device) -> candle_core::Result<Box<dyn Optimizer>>,
    ) -> Result<Trainer> {
        process::keep_freed_memory();
        let variables = Variables::of(&self.vars, &self.frozen)?;
        let device = variables.params[0].1.device().clone();
        let vars: Vec<_> = variables.params.iter().map(|(_, var)| var.clone()).collect();
        let optimizer = make(&vars, &device)?;
        if self.accumulate == 0 {
            let text = "accumulate(0): a step has at least one batch";
            return Err(Error::InvalidArgument(text.to_owned()));
        }
        let groups = 0..optimizer.group_count();
        let base_lrs = groups.map(|group| optimizer.lr(group)).collect::<Result<_, _>>()?;
        let scaler = match (self.scaler, self.half) {
            (Some(scaler), _) => scaler,
            (None, Some(DType::F16)) => LossScaler::new(LossScalerOptions::default())?,
            (None, _) => LossScaler::disabled(),
        };
        let group = self.group.map_or_else(|| join(&device), Ok)?;
        let (half, clip, every) = (self.half, self.clip, self.accumulate);
        let hyper = optimizer.state_dict()?.param_groups;
        let kind = optimizer.kind();
        let options = [
            format!("precision {half:?}, clip {clip:?}, accumulate {every}, seed {}", self.seed),
            format!("loss scale {:?}", scaler.state_dict()),
            format!("optimizer {kind} {hyper}"),
        ];
        check_alike(&group, &options)?;
        let averages = DataParallel::of(&variables, group, self.reducer)?;
        if averages.keeps_memory() {
            let text = "PowerSGD is not supported: its memory would be neither rescaled nor saved";
            return Err(Error::InvalidArgument(text.to_owned()));
        }
        let seed = self.seed.wrapping_add(averages.group().rank() as u64);
        Ok(Trainer {
            averages,
            optimizer: VarOptimizer::with_names(variables.params.clone(), optimizer)?,
            context: context(&device, seed, self.half)?,
            is_mixed: self.half.is_some() || scaler.is_enabled(),
            has_lowered: self.half.is_none(),
            map: self.vars,
            variables,
            device,
            scaler,
            clip: self.clip,
            accumulation: Accumulation::new(self.accumulate),
            pending: 0,
            epoch: None,
            schedule: self.schedule,
            base_lrs,
            steps: 0,
            seed: self.seed,
        })
    }
}

impl fmt::Debug for Builder {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Builder")
            .field("half", &self.half)
            .field("clip", &self.clip)
            .field("accumulate", &self.accumulate)
            .field("frozen", &self.frozen)
            .field("seed", &self.seed)
            .finish_non_exhaustive()
    }
}

/// Hyper-parameters of an optimizer that can be made on the CPU and, with the feature `cuda`, on a GPU: all of
/// [`fused_optim`] that are fused there.
pub trait Rule {
    /// An optimizer for these variables, which are all on `device`.
    ///
    /// # Errors
    ///
    /// Hyper-parameters out of range; those of the device.
    fn optimizer(
        self,
        vars: &[candle_core::Var],
        device: &Device,
    ) -> candle_core::Result<Box<dyn Optimizer>>;
}

#[cfg(not(feature = "cuda"))]
impl<H> Rule for H
where
    CpuOptimizer<H>: FromVars<Hyper = H> + 'static,
{
    fn optimizer(
        self,
        vars: &[candle_core::Var],
        _: &Device,
    ) -> candle_core::Result<Box<dyn Optimizer>> {
        Ok(Box::new(CpuOptimizer::from_vars(vars, self)?))
    }
}

#[cfg(feature = "cuda")]
impl<H> Rule for H
where
    CpuOptimizer<H>: FromVars<Hyper = H> + 'static,
    fused_optim::cuda::CudaDeviceOptimizer<H>: FromVars<Hyper = H> + 'static,
{
    fn optimizer(
        self,
        vars: &[candle_core::Var],
        device: &Device,
    ) -> candle_core::Result<Box<dyn Optimizer>> {
        if device.is_cuda() {
            let optimizer = fused_optim::cuda::CudaDeviceOptimizer::from_vars(vars, self)?;
            return Ok(Box::new(optimizer));
        }
        Ok(Box::new(CpuOptimizer::from_vars(vars, self)?))
    }
}

/// This rank's device: with the feature `cuda` the GPU of its local rank; otherwise the CPU. Call it before the first
/// tensor is made: of ranks that share a machine it gives candle's own operators one thread each
/// (`RAYON_NUM_THREADS`, unless that is set).
///
/// # Errors
///
/// An environment that a launcher cannot have made, with the variable; a GPU that is not there.
pub fn device() -> Result<Device> {
    process::limit_threads();
    let topology = topology()?;
    if !cfg!(feature = "cuda") {
        return Ok(Device::Cpu);
    }
    // One stream, whichever thread calls: with `new_cuda` each has another, and nothing orders them.
    Ok(Device::new_cuda_with_stream(topology.device(Accelerator::Cuda)?)?)
}

fn topology() -> Result<Topology> {
    Ok(Topology::from_env(|name| std::env::var(name).ok())?)
}

/// Joins the ranks of the launcher's environment.
fn join(device: &Device) -> Result<ProcessGroup> {
    // Each trainer of a program has a group of its own.
    static COUNT: AtomicUsize = AtomicUsize::new(0);
    // Relaxed: a count alone.
    let name = format!("candle-train-{}", COUNT.fetch_add(1, Ordering::Relaxed));
    let topology = topology()?;
    let options = GroupOptions::default().with_name(name);
    if cfg!(feature = "cuda") && device.is_cuda() && topology.world_size > 1 {
        let index = topology.device(Accelerator::Cuda)?;
        let index = u32::try_from(index)
            .map_err(|_| Error::InvalidArgument(format!("CUDA device {index}")))?;
        let options = options.with_transport(collective::Transport::Nccl).with_cuda_device(index);
        return Ok(init_process_group(&topology, options)?);
    }
    Ok(init_process_group(&topology, options)?)
}

/// Compares the ranks' options.
fn check_alike(group: &ProcessGroup, own: &[String; 3]) -> Result<()> {
    let all = all_gather_object(group, own)?;
    for (rank, other) in all.iter().enumerate() {
        if let Some((first, other)) = all[0].iter().zip(other).find(|(first, other)| first != other)
        {
            let text =
                format!("ranks differ in their options: rank 0 has {first}; rank {rank} {other}");
            return Err(Error::InvalidArgument(text));
        }
    }
    Ok(())
}

/// What operators share, with kernels on a GPU.
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
        Some(dtype) => context.with_autocast(lists().with_dtype(dtype)?),
    })
}
