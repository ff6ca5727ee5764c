//! An optimizer on a GPU as a [`DeviceOptimizer`], for tensors in the GPU's memory.
//!
//! The unsafe methods of [`CudaOptimizer`] are safe here: [`DeviceParams::new`] is unsafe instead,
//! and names the stream in whose order the memory is used. A step on tensors of another stream is
//! an error.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use super::device::Program;
use super::rules::DeviceHyper;
use super::{
    CudaOptimizer, DeviceParam, DeviceParams, Gpu, GradStats, Launches, Tuned, grad_stats,
};
use crate::rule::group_methods;
use crate::{
    Applied, Clip, DeviceOptimizer, Error, FoundInf, HalfWeights, Optimizer, ParamGroup, ParamMut,
    Result, StateDict, StateLayout, StepCtl, VisitState,
};

/// An [`Optimizer`] whose weights, gradients and state are on a GPU; `H` is the rule's
/// hyper-parameters.
///
/// [`step_on_device`](DeviceOptimizer::step_on_device) has the bits of the CPU's optimizer;
/// [`step`](Optimizer::step) on host memory is an error. A step launches kernels and returns. It
/// waits for the device only in the first step, if other tensors have a gradient than in the last
/// step, and with [`FoundInf::Check`], to read whether it was skipped.
/// [`grad_norm`](Optimizer::grad_norm) and [`state_dict`](Optimizer::state_dict) read device
/// memory. It supports what [`CudaOptimizer`] supports.
#[derive(Debug)]
pub struct CudaDeviceOptimizer<H> {
    /// Shared with [`GradStats`].
    cuda: Arc<Mutex<CudaOptimizer<H>>>,
    /// Whether a step has clipped by norm.
    has_norm: bool,
    /// Norm of the last step's gradients, if it was read with the step's outcome.
    norm: Option<f64>,
}

#[expect(private_bounds, reason = "sealed: the nine rules only")]
impl<H: DeviceHyper> CudaDeviceOptimizer<H> {
    /// An optimizer over these groups, in the stream of `gpu`. Compiles the kernels that all rules
    /// share, so a missing NVRTC is an error here.
    ///
    /// # Errors
    ///
    /// As [`CudaOptimizer::new`], and [`Error::Cuda`].
    pub fn new(
        gpu: Gpu,
        groups: impl IntoIterator<Item = ParamGroup<H>>,
        half_weights: HalfWeights,
    ) -> Result<Self> {
        Program::SHARED.kernel(&gpu, "finish_grad_stats")?;
        let cuda = CudaOptimizer::new(gpu, groups, half_weights)?;
        Ok(Self { cuda: Arc::new(Mutex::new(cuda)), has_norm: false, norm: None })
    }

    fn cuda(&self) -> MutexGuard<'_, CudaOptimizer<H>> {
        self.cuda.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Binds these tensors and returns the optimizer.
    fn bind(&self, params: DeviceParams<'_>) -> Result<MutexGuard<'_, CudaOptimizer<H>>> {
        let mut cuda = self.cuda();
        let (own, lent) = (cuda.device.stream(), params.on.stream());
        if own != lent {
            return Err(Error::DifferentStream);
        }
        // SAFETY: guaranteed by `DeviceParams::new`, in the order of this stream. Only these use
        // what is bound: steps and `found_inf`, which bind their tensors first, and
        // `GradStats::take`, whose caller guarantees its gradients.
        #[expect(unsafe_code, reason = "an address is only a number")]
        unsafe { cuda.bind(params.params) }?;
        Ok(cuda)
    }
}

impl<H: DeviceHyper + std::fmt::Debug> Optimizer for CudaDeviceOptimizer<H> {
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
        format!("cuda:{}", self.cuda().device.stream().context().ordinal())
    }

    fn load_state_dict(&mut self, dict: &StateDict) -> Result<()> {
        self.cuda().load_state_dict(dict)
    }

    fn state_layout(&self) -> Result<StateLayout> {
        self.cuda().state_layout()
    }

    fn visit_state(&self, visit: &mut VisitState<'_>) -> Result<()> {
        self.cuda().visit_state(visit)
    }

    fn check_state(&mut self, saved: &StateLayout) -> Result<()> {
        self.cuda().check_state(saved)
    }

    group_methods!(cuda().core);

    fn refresh_masters(&mut self) -> Result<()> {
        self.cuda().refresh_masters()
    }

    /// Has no effect on a device.
    fn set_threads(&mut self, _: usize) {}

    /// Waits for the device, unless the last step had [`FoundInf::Check`]; `None` if reading from
    /// it fails.
    fn grad_norm(&self) -> Option<f64> {
        if !self.has_norm {
            return None;
        }
        self.norm.or_else(|| Some(self.cuda().status().ok()?.grad_norm))
    }
}

impl<H: DeviceHyper + std::fmt::Debug> DeviceOptimizer for CudaDeviceOptimizer<H> {
    fn step_on_device(&mut self, params: DeviceParams<'_>, ctl: &StepCtl) -> Result<Applied> {
        let ctl = &ctl.validated()?;
        if ctl.found_inf == FoundInf::Known(true) {
            self.cuda().forget_stats()?;
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
        self.bind(params)?.prepare(ctl).map(Some)
    }

    fn launch_step(&mut self, params: DeviceParams<'_>, ctl: &StepCtl) -> Result<()> {
        let ctl = &ctl.validated()?;
        self.norm = None;
        let mut cuda = self.bind(params)?;
        // SAFETY: `params` were just bound.
        #[expect(unsafe_code, reason = "kernels write the bound tensors")]
        unsafe {
            cuda.step(ctl)
        }
    }

    fn step_outcome(&mut self, ctl: &StepCtl) -> Result<Applied> {
        self.norm = None;
        if ctl.found_inf == FoundInf::Check {
            let status = self.cuda().status()?;
            self.norm = Some(status.grad_norm);
            if status.last_skipped {
                return Ok(Applied::SkippedNonFinite);
            }
        }
        self.has_norm |= matches!(ctl.clip, Some(Clip::Norm(_)));
        Ok(Applied::Applied)
    }

    fn found_inf(&mut self, params: DeviceParams<'_>, ctl: &StepCtl) -> Result<bool> {
        let ctl = &ctl.validated()?;
        let mut cuda = self.bind(params)?;
        // SAFETY: `params` were just bound.
        #[expect(unsafe_code, reason = "kernels read the bound tensors")]
        unsafe {
            cuda.found_inf(ctl)
        }
    }

    fn grad_stats(&mut self, ctl: &StepCtl) -> Result<Option<GradStats>> {
        grad_stats::grad_stats(&self.cuda, ctl)
    }

    fn tune(&mut self, params: &[DeviceParam]) -> Result<Vec<Tuned>> {
        self.cuda().tune(params)
    }
}
