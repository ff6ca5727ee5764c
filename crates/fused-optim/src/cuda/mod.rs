//! Optimizers on an NVIDIA GPU (feature `cuda`).
//!
//! The same nine rules as kernels: `rules.h` has them line by line, `optim.cu` takes them through many
//! tensors at once. A step is two launches, whatever the number of tensors: one looks at the
//! gradients, where a verdict or a norm is asked for, and decides; one moves all tensors of one form
//! and types. Rules of two sweeps have two launches more. What a step depends on lies on the device,
//! the step counts and the loss scale, too: the host never waits, and a step can be captured in a CUDA
//! graph, once one like it has been taken.
//!
//! # What is promised about bits
//!
//! Weights, state and norms are those of the CPU, bit for bit, NaNs' payloads aside: kernels keep to
//! the order of sums, and to f32 without contraction, that the [crate](crate#reproducibility)
//! promises. The tests compile the kernels for the CPU and compare.
//!
//! # What is needed
//!
//! Building needs nothing of CUDA. At run time the driver (`libcuda.so.1`) and NVRTC are opened; if one
//! is missing or too old the error says where it was looked for and what to install. `$NVRTC_LIBRARY`
//! is the path of an NVRTC elsewhere. Compiled kernels are kept in `$CUBIN_CACHE` (empty: nowhere), or
//! under `cuda-rt/cubin` in the user's cache; where that folder has them
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
//! // SAFETY: both are of so many elements, and stay where they are until the next `bind`.
//! unsafe { adamw.bind(&[param]) }?;
//! // SAFETY: nobody else uses them on another stream meanwhile.
//! unsafe { adamw.step(&StepCtl::default()) }?;
//! # Ok::<(), fused_optim::Error>(())
//! ```
//!
//! A [`DeviceSlice`] comes of a slice of cudarc's, too, and, with the feature `candle-cuda`, of a tensor of
//! candle's: `DeviceSlice::try_from(&tensor)?`, with a [`Gpu`] [on](Gpu::on) the stream of its device.

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

pub use cuda_rt::{Attempt, Cubin, CudaError, DType, DeviceSlice, Gpu, Nvrtc};

use crate::error::check_aligned;
use crate::{HalfWeights, HyperParam, ParamGroup, ParamSpec, Result, StateDict, StepCtl};
pub use averages::Averages;
use device::Program;
pub use device_optimizer::{DeviceFed, DeviceParams};
use fused::Fused;
pub use grad_stats::GradStats;
pub(crate) use rules::DeviceHyper;
use tune::Search;
pub use tune::{LaunchShape, Tuned};

/// An optimizer whose weights, gradients and state are on a GPU; `H` is the rule's hyper-parameters,
/// for example [`AdamWHyper`](crate::AdamWHyper).
///
/// Rounding at random, state in eight bits and norms other than the 2-norm are
/// [`Error::Unsupported`](crate::Error::Unsupported).
#[derive(Debug)]
pub struct CudaOptimizer<H>(Fused<H, Gpu>);

#[expect(private_bounds, reason = "sealed: the nine rules, and nobody else's")]
impl<H: DeviceHyper> CudaOptimizer<H> {
    /// An optimizer over these groups.
    ///
    /// # Errors
    ///
    /// As [`AdamW::new`](crate::AdamW::new), and
    /// [`Error::Unsupported`](crate::Error::Unsupported).
    pub fn new(
        gpu: Gpu,
        groups: impl IntoIterator<Item = ParamGroup<H>>,
        half_weights: HalfWeights,
    ) -> Result<Self> {
        Ok(Self(Fused::new(gpu, groups, half_weights)?))
    }

    /// Compiles what an optimizer over these groups needs on devices of an architecture (90 is compute
    /// capability 9.0), for tensors of these types of weight and gradient, and keeps it where compiled
    /// kernels are kept: a machine that is given that folder needs no NVRTC. Needs no GPU and no driver.
    ///
    /// # Errors
    ///
    /// [`Error::Cuda`](crate::Error::Cuda): NVRTC's.
    pub fn compile_for(
        arch: i32,
        groups: &[ParamGroup<H>],
        half_weights: HalfWeights,
        types: &[(DType, DType)],
    ) -> Result<()> {
        let mut programs = vec![Program::LOOK];
        for group in groups {
            for &(weight, grad) in types {
                let master = weight != DType::F32 && half_weights == HalfWeights::Master;
                let types = table::Types { grad: grad.number(), weight: weight.number(), master };
                let rule = Some((group.hyper.form(), H::TWO_SWEEPS));
                programs.push(Program { rule, types, shape: LaunchShape::DEFAULT });
            }
        }
        for program in programs {
            cuda_rt::compiled(Program::SOURCE, &program.macros(), arch)?;
        }
        Ok(())
    }

    /// Says where the tensors are; at any time again, for example when others have a gradient.
    ///
    /// Makes state for tensors that are new, the f32 masters of half weights among it, builds the
    /// tables and compiles the kernels. Waits for the device. Where tensors differ from those that were bound
    /// before in nothing but addresses, it sends those, in order of the stream, and waits for nothing; where
    /// even those are the same it does nothing.
    ///
    /// # Errors
    ///
    /// As [`Optimizer::step`](crate::Optimizer::step), and [`Error::Cuda`](crate::Error::Cuda).
    ///
    /// # Safety
    ///
    /// What `params` say must be so until the next `bind`: as many elements of that type at each
    /// address, on this device, and none of them in two places, except that gradients which are not to be
    /// cleared may be one another's. What
    /// [`look_part`](Self::look_part) has put into another stream must be done, or come before what the
    /// optimizer's stream does next: it reads tables that go. The same holds for dropping this.
    #[expect(unsafe_code, reason = "an address is only a number")]
    pub unsafe fn bind(&mut self, params: &[DeviceParam]) -> Result<()> {
        // SAFETY: the caller vouches for the tensors.
        unsafe { self.0.bind(params) }
    }

    /// Updates every tensor that is bound, in order of the stream; returns before that is done.
    ///
    /// Whether the step was skipped is known to the device alone, until [`status`](Self::status) asks.
    ///
    /// # Errors
    ///
    /// An invalid `ctl`, and [`Error::Cuda`](crate::Error::Cuda).
    ///
    /// # Safety
    ///
    /// The tensors that are bound must be where `bind` was told, and nobody else may use them until the
    /// stream has come this far.
    #[expect(unsafe_code, reason = "kernels write where `bind` was told")]
    pub unsafe fn step(&mut self, ctl: &StepCtl) -> Result<()> {
        // SAFETY: the caller vouches for the tensors.
        unsafe { self.0.step(ctl, 0) }
    }

    /// As [`step`](Self::step), and skipped also if the `u32` at a device address is not 0 by then:
    /// another kernel's verdict, or that of all ranks.
    ///
    /// # Errors
    ///
    /// As [`step`](Self::step).
    ///
    /// # Safety
    ///
    /// As [`step`](Self::step); `found_inf` must be the address of a `u32`.
    #[expect(unsafe_code, reason = "kernels write where `bind` was told")]
    pub unsafe fn step_unless(&mut self, ctl: &StepCtl, found_inf: u64) -> Result<()> {
        // SAFETY: the caller vouches for the tensors and the address.
        unsafe { self.0.step(ctl, found_inf) }
    }

    /// Looks at the gradients of some tensors before the step, for example at those of a bucket behind
    /// its all-reduce, while it is in the device's cache: `on` is a `Gpu` of the same device on the
    /// stream where that is known, or none for the optimizer's own.
    ///
    /// The next step, if it is given the same `ctl`, looks only at what is left; where nothing is, it
    /// decides, clips and moves without reading gradients twice. Its bits are those of a step that looked
    /// at all. Which parts there are, and in which order, is the same to it; to look at a tensor again
    /// replaces its norm, but what was not finite once skips the step.
    ///
    /// # Errors
    ///
    /// [`Error::MissingParam`](crate::Error::MissingParam) for a tensor that is not bound or has no
    /// gradient; an invalid `ctl`; [`Error::Cuda`](crate::Error::Cuda).
    ///
    /// # Safety
    ///
    /// These gradients must be where `bind` was told, and be as the step will find them. If `on` is
    /// another stream, the last step must come before this in it, and the optimizer's stream must wait
    /// for this before the step.
    #[expect(unsafe_code, reason = "kernels read where `bind` was told")]
    pub unsafe fn look_part(
        &mut self,
        indices: &[usize],
        ctl: &StepCtl,
        on: Option<&Gpu>,
    ) -> Result<()> {
        // SAFETY: the caller vouches for the gradients and the streams.
        unsafe { self.0.look_part(indices, ctl, on) }
    }

    /// Searches for the launch that is fastest on tensors like these, of which only lengths and types matter;
    /// a missing gradient counts as of the weight's type. Later steps are launched so, with the same bits.
    ///
    /// Takes the time of some hundred steps and of compiling six programs, and device memory for 32 Mi elements,
    /// gradients and state among it, at most (more, if one tensor is larger); none of it if the answer has been
    /// kept beside compiled kernels by an earlier search, for as many tensors of as many elements, up to a power
    /// of two. Waits for the device.
    ///
    /// # Errors
    ///
    /// As [`bind`](Self::bind); nothing has changed then.
    pub fn tune(&mut self, params: &[DeviceParam]) -> Result<Vec<Tuned>> {
        self.0.tune(params, &Search::new())
    }

    /// Keeps the loss scale on the device: from now on a step multiplies gradients by its inverse (in
    /// place of [`StepCtl::grad_scale`]) and moves it by whether the step was skipped. `None`: no more.
    ///
    /// # Errors
    ///
    /// [`Error::Cuda`](crate::Error::Cuda).
    pub fn set_loss_scale(&mut self, loss_scale: Option<LossScale>) -> Result<()> {
        self.0.set_loss_scale(loss_scale)
    }

    /// Where the loss scale is on the device, an `f32`, for whoever multiplies the loss by it; 0 if
    /// nothing is bound. Good until the next `bind`.
    #[must_use]
    pub fn loss_scale_address(&self) -> u64 {
        self.0.loss_scale_address()
    }

    /// What the device knows of its steps. Waits for it.
    ///
    /// # Errors
    ///
    /// [`Error::Cuda`](crate::Error::Cuda).
    pub fn status(&self) -> Result<Status> {
        self.0.status()
    }

    /// As [`Optimizer::state_dict`](crate::Optimizer::state_dict), which it equals after equal steps.
    /// Waits for the device.
    ///
    /// # Errors
    ///
    /// [`Error::Cuda`](crate::Error::Cuda).
    pub fn state_dict(&self) -> Result<StateDict> {
        self.0.state_dict()
    }

    /// As [`Optimizer::set_param_names`](crate::Optimizer::set_param_names), in the order in which tensors
    /// are bound.
    ///
    /// # Errors
    ///
    /// As there.
    pub fn set_param_names(&mut self, params: &[ParamSpec]) -> Result<()> {
        self.0.core.set_param_names(params)
    }

    /// As [`Optimizer::load_state_dict`](crate::Optimizer::load_state_dict); tensors must be bound
    /// again afterwards.
    ///
    /// # Errors
    ///
    /// As there, and [`Error::Cuda`](crate::Error::Cuda); this optimizer is then unchanged.
    pub fn load_state_dict(&mut self, dict: &StateDict) -> Result<()> {
        self.0.load_state_dict(dict)
    }

    /// The groups.
    #[must_use]
    pub fn groups(&self) -> &[ParamGroup<H>] {
        self.0.core.groups()
    }

    /// Adds a group, at any time; tensors must be bound again afterwards. Waits for the device.
    ///
    /// # Errors
    ///
    /// As [`AdamW::add_param_group`](crate::AdamW::add_param_group), and
    /// [`Error::Cuda`](crate::Error::Cuda); nothing is added then.
    pub fn add_param_group(&mut self, group: ParamGroup<H>) -> Result<()> {
        self.0.add_param_group(group)
    }

    /// As [`Optimizer::set_hyper_param`](crate::Optimizer::set_hyper_param).
    ///
    /// # Errors
    ///
    /// As there.
    pub fn set_hyper_param(&mut self, group: usize, param: HyperParam, value: f64) -> Result<()> {
        self.0.core.set_hyper_param(group, param, value)
    }

    /// As [`Optimizer::refresh_masters`](crate::Optimizer::refresh_masters); tensors must be bound again
    /// afterwards. Waits for the device.
    ///
    /// # Errors
    ///
    /// [`Error::Cuda`](crate::Error::Cuda).
    pub fn refresh_masters(&mut self) -> Result<()> {
        self.0.refresh_masters()
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

/// A tensor and its gradient in a device's memory.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct DeviceParam {
    /// The weight, updated in place.
    pub weight: DeviceSlice,
    /// The gradient, as long as the weight. A tensor without is left alone.
    pub grad: Option<DeviceSlice>,
    /// As [`ParamMut::rows`](crate::ParamMut::rows).
    pub rows: usize,
    /// Whether the gradient is to be zero after a step.
    pub clear: bool,
    /// A moving average of the weight, f32, and how much of it stays at a step, `0 ..= 1`.
    pub ema: Option<(u64, f32)>,
}

impl DeviceParam {
    /// A tensor with or without a gradient.
    #[must_use]
    pub const fn new(weight: DeviceSlice, grad: Option<DeviceSlice>) -> Self {
        Self { weight, grad, rows: 0, clear: false, ema: None }
    }

    /// Checks what can be seen of it alone.
    fn validate(&self, index: usize) -> Result<()> {
        let Some(grad) = self.grad else { return Ok(()) };
        self.same_length(index, "gradient", grad.len)?;
        let (count, rows) = (self.weight.len, self.rows);
        if rows != 0 && !count.is_multiple_of(rows) {
            return Err(crate::Error::UnevenRows { index, count, rows });
        }
        if let Some((_, decay)) = self.ema
            && !(0.0..=1.0).contains(&decay)
        {
            return Err(crate::Error::InvalidHyper { name: "ema decay", value: decay.into() });
        }
        let aligned = |slice: &DeviceSlice| check_aligned(slice.ptr, slice.dtype.into());
        [self.weight, grad].iter().try_for_each(aligned)
    }

    fn same_length(&self, index: usize, what: &'static str, got: usize) -> Result<()> {
        let expected = self.weight.len;
        let mismatch = crate::Error::LengthMismatch { index, what, expected, got };
        if got == expected { Ok(()) } else { Err(mismatch) }
    }

    /// All but the addresses.
    fn form(&self) -> Self {
        let form = |slice: DeviceSlice| DeviceSlice { ptr: 0, ..slice };
        let ema = self.ema.map(|(_, decay)| (0, decay));
        Self { weight: form(self.weight), grad: self.grad.map(form), ema, ..*self }
    }
}

/// Which launches a step is made of. Where two are equal, the launches are the same, to the last argument: what
/// differs from step to step is read on the device.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Launches {
    bound: u64,
    takes_stats: bool,
}

/// A dynamic loss scale, kept on the device: `amp`'s rule.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct LossScale {
    /// The scale.
    pub scale: f32,
    /// Good steps since it last moved.
    pub growth_tracker: u64,
    /// It is multiplied by this after so many good steps in a row.
    pub growth_factor: f64,
    /// It is multiplied by this on overflow.
    pub backoff_factor: f64,
    /// Good steps in a row before it grows.
    pub growth_interval: u64,
    /// It does not fall below; `None` is PyTorch's policy, without a floor.
    pub min_scale: Option<f32>,
}

impl Default for LossScale {
    /// `amp`'s defaults.
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

/// What the device knows of its steps.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Status {
    /// The norm of all gradients, unscaled, before clipping, of the last step clipped by norm.
    pub grad_norm: f64,
    /// Whether the last step was skipped.
    pub last_skipped: bool,
    /// Steps skipped since tensors were bound.
    pub skipped: u64,
    /// The loss scale of the next step, if there is one.
    pub loss_scale: Option<f32>,
    /// Good steps since it last moved.
    pub growth_tracker: u64,
    /// Whether gradients overflowed at the lowest scale.
    pub at_floor: bool,
}
