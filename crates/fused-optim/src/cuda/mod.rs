//! Optimizers on an NVIDIA GPU (feature `cuda`).
//!
//! Nine rules as multi-tensor kernels: `rules.h` has their arithmetic, `optim.cu` the kernels. A
//! step is two kernel launches for any number of tensors: the first takes statistics of the
//! gradients (their norm, whether they are finite) if the step needs them, and decides whether the
//! step is skipped; the second updates all tensors of the same rule variant and types. Rules of two
//! sweeps have two more launches. All inputs of a step, including step counts and loss scale, are
//! in device memory: the host does not wait, and a step can be captured in a CUDA graph after one
//! step with the same tensors.
//!
//! # Reproducibility
//!
//! Weights, state and norms have the bits of the CPU, except the payloads of NaNs: the kernels use
//! the order of sums and the f32 arithmetic without contraction that the
//! [crate](crate#reproducibility) specifies. The tests compile the kernels for the CPU and compare.
//!
//! # Requirements
//!
//! Building needs no CUDA. The driver (`libcuda.so.1`) and NVRTC are loaded at run time; if one is
//! missing or too old, the error says where it was searched for and what to install.
//! `$NVRTC_LIBRARY` is the path of NVRTC. Compiled kernels are cached in `$CUBIN_CACHE` (empty: no
//! cache), by default `cuda-rt/cubin` in the user's cache folder. If the cache has all kernels
//! ([`compile_for`](CudaOptimizer::compile_for)), NVRTC is not needed.
//!
//! ```no_run
//! use fused_optim::cuda::{CudaOptimizer, DType, DeviceParam, DeviceSlice, Gpu};
//! use fused_optim::{AdamWHyper, HalfWeights, ParamGroup, StepCtl};
//!
//! # let (weight, grad) = (0, 0);
//! let gpu = Gpu::new(0)?;
//! let groups = [ParamGroup::new(AdamWHyper::default(), 0..1)];
//! let mut adamw = CudaOptimizer::new(gpu, groups, HalfWeights::Master)?;
//! let slice = |ptr| DeviceSlice { ptr, len: 1 << 20, dtype: DType::F16 };
//! let param = DeviceParam::new(slice(weight), Some(slice(grad)));
//! // SAFETY: both have `len` elements, and stay valid until the next `bind`.
//! unsafe { adamw.bind(&[param]) }?;
//! // SAFETY: no other stream uses them meanwhile.
//! unsafe { adamw.step(&StepCtl::default()) }?;
//! # Ok::<(), fused_optim::Error>(())
//! ```
//!
//! A [`DeviceSlice`] can also be made from a slice of cudarc, and, with the feature `candle`, from
//! a tensor of candle by `DeviceSlice::try_from(&tensor)?`, with `Gpu::try_from(tensor.device())?`.
//! For a tensor on a GPU the feature `cuda` of `cuda-rt` has to build candle for CUDA.
//!
//! [`CudaOptimizer`] is unsafe to step, since an address is only a number. [`CudaDeviceOptimizer`]
//! is the same as a [`DeviceOptimizer`](crate::DeviceOptimizer), whose only unsafe call is
//! [`DeviceParams::new`].

mod averages;
mod device;
mod device_optimizer;
mod device_state;
mod fused;
mod grad_stats;
#[cfg(test)]
mod machine_code_tests;
mod requests;
mod rules;
#[cfg(test)]
mod step_tests;
mod table;
mod taken_stats;
#[cfg(test)]
mod tests;
mod tune;

use std::collections::BTreeMap;

use bytemuck::bytes_of;
use cuda_rt::Device;
pub use cuda_rt::{Attempt, Cubin, CudaError, DType, DeviceSlice, Gpu, LateRead, Nvrtc};

use crate::core::{Core, check_len, check_rows};
pub use crate::device::{DeviceParam, DeviceParams, GradStats, LaunchShape, Launches, Tuned};
use crate::error::{check_aligned, format};
use crate::rule::require;
use crate::state::TensorState;
use crate::state_dict::MASTER;
use crate::{
    HalfWeights, HyperParam, ParamGroup, ParamLayout, ParamSpec, Result, StateDict, StateLayout,
    StepCtl, VisitState,
};
pub use averages::Averages;
use device::Program;
pub use device_optimizer::CudaDeviceOptimizer;
use device_state::DeviceState;
pub use fused::CudaOptimizer;
use fused::read_status;
pub(crate) use rules::DeviceHyper;
use table::DeviceStatus;
use tune::Search;

#[expect(private_bounds, reason = "sealed: the nine rules only")]
impl<H: DeviceHyper, D: Device> CudaOptimizer<H, D> {
    /// An optimizer over these groups.
    ///
    /// # Errors
    ///
    /// As [`AdamW::new`](crate::AdamW::new), and
    /// [`Error::Unsupported`](crate::Error::Unsupported).
    pub fn new(
        gpu: D,
        groups: impl IntoIterator<Item = ParamGroup<H>>,
        half_weights: HalfWeights,
    ) -> Result<Self> {
        Ok(Self {
            device: gpu,
            core: Core::on_device(groups, half_weights)?,
            states: BTreeMap::new(),
            bound: None,
            loss_scale: None,
            status: DeviceStatus::default(),
            launch_shapes: BTreeMap::new(),
        })
    }

    /// Updates all bound tensors. Launches the step in the optimizer's stream and returns before it
    /// is done.
    ///
    /// [`status`](Self::status) reads from the device whether the step was skipped.
    ///
    /// # Errors
    ///
    /// An invalid `ctl`; [`Error::CalledBefore`](crate::Error::CalledBefore) [`bind`](Self::bind);
    /// [`Error::Cuda`](crate::Error::Cuda).
    ///
    /// # Safety
    ///
    /// The bound tensors must still be valid, and no other code may use them until the step is done
    /// in the stream.
    #[expect(unsafe_code, reason = "kernels write the bound tensors")]
    pub unsafe fn step(&mut self, ctl: &StepCtl) -> Result<()> {
        // SAFETY: guaranteed by the caller.
        unsafe { self.step_unless(ctl, 0) }
    }

    /// Searches for the fastest launch parameters for tensors of these lengths and types, and uses
    /// them from now on. They change no bit. A missing gradient is taken to have the weight's type.
    ///
    /// Takes the time of some hundred steps and of compiling six programs, and device memory for
    /// the weights, gradients and state of at most 32 Mi elements (more if one tensor is larger).
    /// The result is cached on disk beside compiled kernels, by number of tensors and of elements,
    /// each rounded down to a power of two. Waits for the device.
    ///
    /// # Errors
    ///
    /// As [`bind`](Self::bind); the optimizer is unchanged then.
    pub fn tune(&mut self, params: &[DeviceParam]) -> Result<Vec<Tuned>> {
        self.tune_with(params, &Search::new())
    }

    /// Keeps the loss scale on the device: each step multiplies the gradients by its inverse
    /// (instead of [`StepCtl::grad_scale`]) and updates it. `None`: without a loss scale.
    ///
    /// A skipped step counts as an overflow, any other as none. So each step needs
    /// [`FoundInf::Check`](crate::FoundInf::Check), the caller's own check as
    /// [`FoundInf::Known`](crate::FoundInf::Known), or [`step_unless`](Self::step_unless): without
    /// a check the scale only grows.
    ///
    /// # Errors
    ///
    /// [`Error::InvalidHyper`](crate::Error::InvalidHyper) for a scale that is not finite, not
    /// positive or below `min_scale`, a growth factor of 1 or less, a backoff factor outside `0..1`
    /// or an interval of 0: nothing is changed then. [`Error::Cuda`](crate::Error::Cuda).
    pub fn set_loss_scale(&mut self, loss_scale: Option<LossScale>) -> Result<()> {
        loss_scale.map_or(Ok(()), LossScale::validate)?;
        self.loss_scale = loss_scale;
        self.forget_stats()?;
        let Some(scale) = loss_scale else { return Ok(()) };
        (self.status.tracker, self.status.loss_scale) = (scale.growth_tracker, scale.scale);
        let Some(bound) = &mut self.bound else { return Ok(()) };
        let ctl = &mut bound.ctl;
        self.device.write(ctl, DeviceStatus::TRACKER, bytes_of(&scale.growth_tracker))?;
        Ok(self.device.write(ctl, DeviceStatus::LOSS_SCALE, bytes_of(&scale.scale))?)
    }

    /// Status of the last step. Waits for the device.
    ///
    /// # Errors
    ///
    /// [`Error::Cuda`](crate::Error::Cuda).
    pub fn status(&self) -> Result<Status> {
        let bound = self.bound.as_ref().map(|bound| read_status(&self.device, bound));
        let status = bound.transpose()?.unwrap_or(self.status);
        Ok(Status {
            grad_norm: status.norm,
            last_skipped: status.skip != 0,
            skipped: status.skipped,
            loss_scale: self.loss_scale.map(|_| status.loss_scale),
            growth_tracker: status.tracker,
            at_floor: status.at_floor != 0,
        })
    }

    /// As [`Optimizer::state_dict`](crate::Optimizer::state_dict), with the same contents after the
    /// same steps. Waits for the device.
    ///
    /// # Errors
    ///
    /// [`Error::Cuda`](crate::Error::Cuda).
    pub fn state_dict(&self) -> Result<StateDict> {
        let mut states = Vec::new();
        for (index, group, step) in self.stepped()? {
            states.push((index, self.read_state(index, group, step)?));
        }
        Ok(self.core.state_dict_with(states))
    }

    /// As [`Optimizer::state_layout`](crate::Optimizer::state_layout). Waits for the device.
    ///
    /// # Errors
    ///
    /// [`Error::Cuda`](crate::Error::Cuda).
    pub fn state_layout(&self) -> Result<StateLayout> {
        let mut layout = self.core.state_layout();
        for (index, group, step) in self.stepped()? {
            let (own, hyper) = (&self.states[&index], &self.core.groups()[group].hyper);
            let master = own.master.then_some(MASTER);
            let names = hyper.slots().iter().copied().chain(master);
            let count = own.count.unwrap_or(0);
            let tensors = names.map(|name| (name.to_owned(), count)).collect();
            layout.state.insert(index, ParamLayout { step, tensors });
        }
        Ok(layout)
    }

    /// As [`Optimizer::visit_state`](crate::Optimizer::visit_state), with a copy of one tensor's
    /// state at a time. Waits for the device.
    ///
    /// # Errors
    ///
    /// [`Error::Cuda`](crate::Error::Cuda); [`Error::Format`](crate::Error::Format) with the first
    /// error of `visit`.
    pub fn visit_state(&self, visit: &mut VisitState<'_>) -> Result<()> {
        for (index, group, step) in self.stepped()? {
            let state = self.read_state(index, group, step)?;
            for (name, vector) in state.vectors_of(&self.core.groups()[group].hyper) {
                visit(index, name, &vector.values()).map_err(format("write the state"))?;
            }
        }
        Ok(())
    }

    /// Index, group and step count of each tensor that has taken a step.
    fn stepped(&self) -> Result<Vec<(usize, usize, u64)>> {
        let steps = self.steps()?;
        let stepped = self.core.members().filter_map(|(index, group)| {
            let own = self.states.get(&index)?;
            let step = steps.get(&index).copied().unwrap_or(own.step);
            (step > 0).then_some((index, group, step))
        });
        Ok(stepped.collect())
    }

    fn read_state(&self, index: usize, group: usize, step: u64) -> Result<TensorState> {
        let (own, hyper) = (&self.states[&index], &self.core.groups()[group].hyper);
        let state = own.read(&self.device, hyper, own.count.unwrap_or(0))?;
        Ok(TensorState { step, ..state })
    }

    /// As [`Optimizer::check_state`](crate::Optimizer::check_state).
    ///
    /// # Errors
    ///
    /// As there.
    pub fn check_state(&self, saved: &StateLayout) -> Result<()> {
        let known = |index| self.states.get(&index)?.count;
        self.core.checked(saved, known).map(drop)
    }

    /// As [`Optimizer::set_param_names`](crate::Optimizer::set_param_names), in the order of
    /// [`bind`](Self::bind).
    ///
    /// # Errors
    ///
    /// As there.
    pub fn set_param_names(&mut self, params: &[ParamSpec]) -> Result<()> {
        self.core.set_param_names(params)
    }

    /// As [`Optimizer::load_state_dict`](crate::Optimizer::load_state_dict). Call
    /// [`bind`](Self::bind) before the next step.
    ///
    /// # Errors
    ///
    /// As there; [`Error::Cuda`](crate::Error::Cuda). The optimizer is unchanged then.
    pub fn load_state_dict(&mut self, dict: &StateDict) -> Result<()> {
        let known = |index| self.states.get(&index)?.count;
        let (core, states) = self.core.load_for_device(dict, known)?;
        let mut uploaded = BTreeMap::new();
        for (index, state) in states {
            let count = state.lengths().next().or_else(|| known(index));
            uploaded.insert(index, DeviceState::upload(&self.device, &state, count, false)?);
        }
        self.unbind()?;
        (self.core, self.states) = (core, uploaded);
        Ok(())
    }

    /// The groups.
    #[must_use]
    pub fn groups(&self) -> &[ParamGroup<H>] {
        self.core.groups()
    }

    /// Adds a group, at any time. Waits for the device. Call [`bind`](Self::bind) before the next
    /// step.
    ///
    /// # Errors
    ///
    /// As [`AdamW::add_param_group`](crate::AdamW::add_param_group);
    /// [`Error::Cuda`](crate::Error::Cuda). The optimizer is unchanged then.
    pub fn add_param_group(&mut self, group: ParamGroup<H>) -> Result<()> {
        let mut core = self.core.clone();
        core.add_param_group(group)?;
        self.unbind()?;
        self.core = core;
        Ok(())
    }

    /// As [`Optimizer::set_hyper_param`](crate::Optimizer::set_hyper_param).
    ///
    /// # Errors
    ///
    /// As there.
    pub fn set_hyper_param(&mut self, group: usize, param: HyperParam, value: f64) -> Result<()> {
        self.core.set_hyper_param(group, param, value)
    }

    /// As [`Optimizer::refresh_masters`](crate::Optimizer::refresh_masters). Waits for the device.
    /// Call [`bind`](Self::bind) before the next step.
    ///
    /// # Errors
    ///
    /// [`Error::Cuda`](crate::Error::Cuda).
    pub fn refresh_masters(&mut self) -> Result<()> {
        self.unbind()?;
        self.states.values_mut().for_each(|state| state.master = false);
        Ok(())
    }
}

#[expect(private_bounds, reason = "sealed: the nine rules only")]
impl<H: DeviceHyper> CudaOptimizer<H> {
    /// Compiles the kernels of an optimizer over these groups for an architecture (90 is compute
    /// capability 9.0) and these types of weight and gradient, into the cache of compiled kernels:
    /// a machine with a copy of that folder needs no NVRTC. Needs no GPU and no driver.
    ///
    /// # Errors
    ///
    /// [`Error::Cuda`](crate::Error::Cuda) of NVRTC.
    pub fn compile_for(
        arch: i32,
        groups: &[ParamGroup<H>],
        half_weights: HalfWeights,
        types: &[(DType, DType)],
    ) -> Result<()> {
        let mut programs = vec![Program::SHARED];
        for group in groups {
            for &(weight, grad) in types {
                let master = weight != DType::F32 && half_weights == HalfWeights::Master;
                let types = table::Types { grad: grad.number(), weight: weight.number(), master };
                let rule = Some((group.hyper.rule_type(), H::TWO_SWEEPS));
                programs.push(Program { rule, types, shape: LaunchShape::DEFAULT });
            }
        }
        for program in programs {
            cuda_rt::compiled(Program::SOURCE, &program.macros(), arch)?;
        }
        Ok(())
    }
}

macro_rules! same_types {
    ($from:ty, $to:ty) => {
        impl From<$from> for $to {
            fn from(dtype: $from) -> Self {
                match dtype {
                    <$from>::F32 => Self::F32,
                    <$from>::F16 => Self::F16,
                    <$from>::Bf16 => Self::Bf16,
                }
            }
        }
    };
}
same_types!(crate::DType, DType);
same_types!(DType, crate::DType);

/// Checks a tensor alone.
fn validate(param: &DeviceParam, index: usize) -> Result<()> {
    let Some(grad) = param.grad else { return Ok(()) };
    check_len(index, "gradient", param.weight.len, grad.len)?;
    check_rows(index, param.weight.len, param.rows)?;
    if let Some((ptr, decay)) = param.ema {
        require((0.0..=1.0).contains(&decay), "ema decay", decay.into())?;
        check_aligned(ptr, crate::DType::F32)?;
    }
    let aligned = |slice: &DeviceSlice| check_aligned(slice.ptr, slice.dtype.into());
    [param.weight, grad].iter().try_for_each(aligned)
}

/// A tensor's lengths and types.
fn without_addresses(param: &DeviceParam) -> DeviceParam {
    let slice = |slice: DeviceSlice| DeviceSlice { ptr: 0, ..slice };
    let ema = param.ema.map(|(_, decay)| (0, decay));
    DeviceParam { weight: slice(param.weight), grad: param.grad.map(slice), ema, ..*param }
}

/// A dynamic loss scale on the device, with the rule of `amp`.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct LossScale {
    /// The scale.
    pub scale: f32,
    /// Number of steps since the scale last changed, none of which was skipped.
    pub growth_tracker: u64,
    /// Factor of the scale after `growth_interval` steps without an overflow.
    pub growth_factor: f64,
    /// Factor of the scale after an overflow.
    pub backoff_factor: f64,
    /// Number of consecutive steps without an overflow before the scale grows.
    pub growth_interval: u64,
    /// Smallest scale; `None` is PyTorch's policy, without one.
    pub min_scale: Option<f32>,
}

impl LossScale {
    fn validate(self) -> Result<()> {
        let Self { scale, growth_factor, backoff_factor, .. } = self;
        let in_range = scale > 0.0 && scale >= self.min_scale.unwrap_or(0.0) && scale.is_finite();
        require(in_range, "loss scale", scale.into())?;
        require(growth_factor > 1.0, "growth factor of the loss scale", growth_factor)?;
        let backs_off = backoff_factor > 0.0 && backoff_factor < 1.0;
        require(backs_off, "backoff factor of the loss scale", backoff_factor)?;
        require(self.growth_interval > 0, "growth interval of the loss scale", 0.0)
    }
}

impl Default for LossScale {
    /// The defaults of `amp`.
    fn default() -> Self {
        Self {
            scale: 65536.0,
            growth_tracker: 0,
            growth_factor: 2.0,
            backoff_factor: 0.5,
            growth_interval: 2000,
            min_scale: Some(1.0 / 16_777_216.0),
        }
    }
}

/// Status of the last step.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Status {
    /// Norm of all gradients, unscaled, before clipping, of the last step that clipped by norm.
    pub grad_norm: f64,
    /// Whether the last step was skipped.
    pub last_skipped: bool,
    /// Number of steps skipped.
    pub skipped: u64,
    /// The loss scale of the next step, if there is one.
    pub loss_scale: Option<f32>,
    /// As [`LossScale::growth_tracker`].
    pub growth_tracker: u64,
    /// Whether gradients overflowed at the smallest scale.
    pub at_floor: bool,
}
