//! An optimizer on a GPU as a [`DeviceOptimizer`], for tensors in the GPU's memory.
//!
//! What of [`CudaOptimizer`] is unsafe, for an address is only a number, is here promised once, by whoever makes
//! the [`DeviceParams`]: that names the stream in whose order the memory is used, and a step on another is
//! refused.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use super::device::Program;
use super::grad_stats::{self, GradStats};
use super::rules::DeviceHyper;
use super::{CudaOptimizer, DeviceParam, Gpu, Launches, Tuned};
use crate::rule::group_methods;
use crate::{
    Applied, Clip, DeviceOptimizer, Error, FoundInf, HalfWeights, Optimizer, ParamGroup, ParamMut,
    Result, StateDict, StepCtl,
};

/// Tensors in a device's memory, lent for a step.
#[derive(Clone, Copy, Debug)]
pub struct DeviceParams<'a> {
    on: &'a Gpu,
    params: &'a [DeviceParam],
}

impl<'a> DeviceParams<'a> {
    /// Lends `params` to whoever works on them in the stream of `on`.
    ///
    /// # Safety
    ///
    /// As many elements of that type must be at each address, on the device of `on`, until its stream has come
    /// past all that is put into it while this is lent; whatever else writes or frees them, or reads the
    /// weights, is ordered before or behind that. No weight is in two places or shares memory with a gradient;
    /// gradients that are not to be cleared may be one another's.
    #[must_use]
    #[expect(unsafe_code, reason = "an address is only a number")]
    pub const unsafe fn new(on: &'a Gpu, params: &'a [DeviceParam]) -> Self {
        Self { on, params }
    }
}

/// An [`Optimizer`] whose weights, gradients and state are on a GPU; `H` is the rule's hyper-parameters.
///
/// It steps by [`step_on_device`](DeviceOptimizer::step_on_device), with the bits that the CPU's rule has on the same
/// gradients, and refuses tensors of the host. A step only launches, and waits for the device where it is to
/// [look](FoundInf::Check) whether gradients are finite: for that one word. It waits also at the first step, and
/// where other tensors have a gradient than before. [`grad_norm`](Optimizer::grad_norm) and
/// [`state_dict`](Optimizer::state_dict) ask the device. What [`CudaOptimizer`] refuses it refuses.
#[derive(Debug)]
pub struct DeviceFed<H> {
    /// Shared with the statistics that are taken before a step.
    cuda: Arc<Mutex<CudaOptimizer<H>>>,
    /// A step that was asked to clip by norm has been made.
    has_norm: bool,
}

#[expect(private_bounds, reason = "sealed: the nine rules, and nobody else's")]
impl<H: DeviceHyper> DeviceFed<H> {
    /// An optimizer over these groups, whose work goes into the stream of `gpu`. Compiles the kernels that look at
    /// gradients, so that a missing NVRTC shows now.
    ///
    /// # Errors
    ///
    /// As [`CudaOptimizer::new`], and [`Error::Cuda`].
    pub fn new(
        gpu: Gpu,
        groups: impl IntoIterator<Item = ParamGroup<H>>,
        half_weights: HalfWeights,
    ) -> Result<Self> {
        Program::LOOK.kernel(&gpu, "look")?;
        let cuda = CudaOptimizer::new(gpu, groups, half_weights)?;
        Ok(Self { cuda: Arc::new(Mutex::new(cuda)), has_norm: false })
    }

    fn cuda(&self) -> MutexGuard<'_, CudaOptimizer<H>> {
        self.cuda.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The optimizer, with these tensors bound.
    fn bound_to(&self, params: DeviceParams<'_>) -> Result<MutexGuard<'_, CudaOptimizer<H>>> {
        let mut cuda = self.cuda();
        let (own, lent) = (cuda.0.device.stream(), params.on.stream());
        if own != lent {
            return Err(Error::DifferentStream);
        }
        // SAFETY: what `DeviceParams` promises, in order of this very stream. Only `step` and `found_inf` use
        // what is bound, which bind what they are lent first, and statistics, whose gradients are vouched for anew.
        #[expect(unsafe_code, reason = "an address is only a number")]
        unsafe { cuda.bind(params.params) }?;
        Ok(cuda)
    }
}

impl<H: DeviceHyper + std::fmt::Debug> Optimizer for DeviceFed<H> {
    fn kind(&self) -> &'static str {
        H::KIND
    }

    fn step(&mut self, _: &mut [ParamMut<'_>], _: &StepCtl) -> Result<Applied> {
        Err(Error::Unsupported { what: "a step on host memory" })
    }

    fn as_device(&mut self) -> Option<&mut dyn DeviceOptimizer> {
        Some(self)
    }

    fn state_dict(&self) -> Result<StateDict> {
        self.cuda().state_dict()
    }

    fn device(&self) -> String {
        format!("cuda:{}", self.cuda().0.device.stream().context().ordinal())
    }

    fn load_state_dict(&mut self, dict: &StateDict) -> Result<()> {
        self.cuda().load_state_dict(dict)
    }

    group_methods!(cuda().0.core);

    fn refresh_masters(&mut self) -> Result<()> {
        self.cuda().0.refresh_masters()
    }

    /// The device does not ask.
    fn set_threads(&mut self, _: usize) {}

    /// Waits for the device; none if it does not answer.
    fn grad_norm(&self) -> Option<f64> {
        let status = self.has_norm.then(|| self.cuda().status());
        status.and_then(Result::ok).map(|status| status.grad_norm)
    }
}

impl<H: DeviceHyper + std::fmt::Debug> DeviceOptimizer for DeviceFed<H> {
    fn step_on_device(&mut self, params: DeviceParams<'_>, ctl: &StepCtl) -> Result<Applied> {
        let ctl = &ctl.validated()?;
        if ctl.found_inf == FoundInf::Known(true) {
            self.cuda().0.forget_stats()?;
            return Ok(Applied::SkippedNonFinite);
        }
        self.launch_step(params, ctl)?;
        self.step_outcome(ctl)
    }

    fn prepare_step(
        &mut self,
        params: DeviceParams<'_>,
        ctl: &StepCtl,
    ) -> Result<Option<Launches>> {
        let ctl = &ctl.validated()?;
        self.bound_to(params)?.0.ready(ctl).map(Some)
    }

    fn launch_step(&mut self, params: DeviceParams<'_>, ctl: &StepCtl) -> Result<()> {
        let ctl = &ctl.validated()?;
        let mut cuda = self.bound_to(params)?;
        // SAFETY: bound a moment ago.
        #[expect(unsafe_code, reason = "kernels write where `bind` was told")]
        unsafe {
            cuda.step(ctl)
        }
    }

    fn step_outcome(&mut self, ctl: &StepCtl) -> Result<Applied> {
        if ctl.found_inf == FoundInf::Check && self.cuda().status()?.last_skipped {
            return Ok(Applied::SkippedNonFinite);
        }
        self.has_norm |= matches!(ctl.clip, Some(Clip::Norm(_)));
        Ok(Applied::Applied)
    }

    fn found_inf(&mut self, params: DeviceParams<'_>, ctl: &StepCtl) -> Result<bool> {
        let ctl = &ctl.validated()?;
        let mut cuda = self.bound_to(params)?;
        // SAFETY: bound a moment ago.
        #[expect(unsafe_code, reason = "kernels read where `bind` was told")]
        unsafe {
            cuda.0.found_inf(ctl)
        }
    }

    fn grad_stats(&mut self, ctl: &StepCtl) -> Result<Option<GradStats>> {
        grad_stats::grad_stats(&self.cuda, ctl)
    }

    fn tune(&mut self, params: &[DeviceParam]) -> Result<Vec<Tuned>> {
        self.cuda().tune(params)
    }
}
