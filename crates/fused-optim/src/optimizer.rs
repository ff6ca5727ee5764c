//! The trait every optimizer of this crate is used through, and what one step is told.

use std::fmt;

#[cfg(feature = "cuda")]
use crate::cuda::{DeviceParam, DeviceParams, Launches, LookAhead, Tuned};
use crate::{Clip, Error, ParamMut, ParamSpec, Result, StateDict};

/// A fused optimizer: one call updates every tensor, in one sweep over memory.
///
/// Object safe, so that a training loop can hold a `Box<dyn Optimizer>` without knowing the rule.
pub trait Optimizer: Send + fmt::Debug {
    /// The rule's name, as written into state dicts, for example `adamw`.
    fn kind(&self) -> &'static str;

    /// Updates every grouped tensor that has a gradient.
    ///
    /// The place of a tensor in `params` is its identity and must be the same at every step. If the
    /// gradients are known or [found](FoundInf::Check) to be non-finite the step is skipped: no
    /// weight, no state, no gradient and no step count changes, and
    /// [`SkippedNonFinite`](Applied::SkippedNonFinite) is returned.
    ///
    /// Gradients are multiplied by `grad_scale`, then clipped, then used; they are not written back.
    /// A look for non-finite values and a norm are one pass over the gradients, before the sweep.
    ///
    /// # Errors
    ///
    /// Everything is checked before anything is written: a group's tensor that is not in `params`,
    /// [another number](Error::ParamCount) of tensors than the optimizer was told of, a gradient or
    /// average of another length, a weight whose length or type is not that of earlier steps, an
    /// invalid `grad_scale` or clip; [`Error::NonFiniteNorm`] if the clip asks for it.
    fn step(&mut self, params: &mut [ParamMut<'_>], ctl: &StepCtl) -> Result<Applied>;

    /// As [`step`](Self::step), for tensors in the memory of the optimizer's [device](Self::device): puts the
    /// step into the stream that they are lent in, and returns before it is done unless it is to look at the
    /// gradients.
    ///
    /// # Errors
    ///
    /// As [`step`](Self::step), and the device's; [`Error::Unsupported`] of an optimizer on the host, and for
    /// another stream than the optimizer's.
    #[cfg(feature = "cuda")]
    fn step_on_device(&mut self, params: DeviceParams<'_>, ctl: &StepCtl) -> Result<Applied> {
        let _ = (params, ctl);
        Err(Error::Unsupported { what: "a step of the host's optimizer on a device's memory" })
    }

    /// Sends the device what a step with this `ctl` reads there, and launches nothing: for whoever has captured
    /// such a step's launches ([`launch_on_device`](Self::launch_on_device)) in a CUDA graph and launches that
    /// next, which is right as long as this says the same as before the capture; or is about to capture them. None
    /// of an optimizer whose steps take more than launches.
    ///
    /// # Errors
    ///
    /// As [`step_on_device`](Self::step_on_device).
    #[cfg(feature = "cuda")]
    fn ready_on_device(
        &mut self,
        params: DeviceParams<'_>,
        ctl: &StepCtl,
    ) -> Result<Option<Launches>> {
        let _ = (params, ctl);
        Ok(None)
    }

    /// As [`step_on_device`](Self::step_on_device), and waits for nothing: what became of the step
    /// [`outcome_on_device`](Self::outcome_on_device) says. Does nothing but launch after
    /// [`ready_on_device`](Self::ready_on_device) of the same.
    ///
    /// # Errors
    ///
    /// As [`step_on_device`](Self::step_on_device).
    #[cfg(feature = "cuda")]
    fn launch_on_device(&mut self, params: DeviceParams<'_>, ctl: &StepCtl) -> Result<()> {
        let _ = (params, ctl);
        Err(Error::Unsupported { what: "a step of the host's optimizer on a device's memory" })
    }

    /// What became of the last step with this `ctl` that was launched, by whomever; waits for it if it was to look
    /// at the gradients.
    ///
    /// # Errors
    ///
    /// As [`step_on_device`](Self::step_on_device).
    #[cfg(feature = "cuda")]
    fn outcome_on_device(&mut self, ctl: &StepCtl) -> Result<Applied> {
        let _ = ctl;
        Err(Error::Unsupported { what: "the outcome of a step that the host launched nowhere" })
    }

    /// Whether a gradient of a grouped tensor, times `grad_scale`, is not finite: what
    /// [`FoundInf::Check`] asks, without a step. Waits for the device.
    ///
    /// # Errors
    ///
    /// As [`step_on_device`](Self::step_on_device).
    #[cfg(feature = "cuda")]
    fn found_inf_on_device(&mut self, params: DeviceParams<'_>, ctl: &StepCtl) -> Result<bool> {
        let _ = (params, ctl);
        Err(Error::Unsupported { what: "a look of the host's optimizer at a device's memory" })
    }

    /// Something that looks at gradients in a device's memory as they become final, ahead of the step with this
    /// `ctl`, which then looks at the others alone, with the same bits. None of an optimizer that does not do
    /// so, or would not have to look, or has not stepped.
    ///
    /// # Errors
    ///
    /// An invalid `ctl`, and the device's.
    #[cfg(feature = "cuda")]
    fn look_ahead(&mut self, ctl: &StepCtl) -> Result<Option<LookAhead>> {
        let _ = ctl;
        Ok(None)
    }

    /// Has later steps on tensors like these launched in the way that is fastest, which is
    /// [searched for](crate::cuda::CudaOptimizer::tune). No bit depends on it.
    ///
    /// # Errors
    ///
    /// As [`step_on_device`](Self::step_on_device); nothing has changed then.
    #[cfg(feature = "cuda")]
    fn tune_on_device(&mut self, params: &[DeviceParam]) -> Result<Vec<Tuned>> {
        let _ = params;
        Err(Error::Unsupported { what: "a search for the launches of the host's optimizer" })
    }

    /// A copy of everything a later run needs to go on exactly here.
    ///
    /// # Panics
    ///
    /// If the state is on a device that does not give it; [`try_state_dict`](Self::try_state_dict)
    /// says why.
    fn state_dict(&self) -> StateDict;

    /// As [`state_dict`](Self::state_dict), for state that may be on a device.
    ///
    /// # Errors
    ///
    /// The device's.
    fn try_state_dict(&self) -> Result<StateDict> {
        Ok(self.state_dict())
    }

    /// Where the state is and steps are computed: `cpu`, or a device such as `npu:0`.
    fn device(&self) -> String {
        "cpu".to_owned()
    }

    /// Names all tensors, those without a group too, in the order in which steps are given them. Names
    /// are saved, and a saved state that has names is loaded by them. From now on steps must be given
    /// as many tensors, of these shapes. After a group is added for further tensors, all are to be named
    /// anew.
    ///
    /// # Errors
    ///
    /// [`Error::ParamCount`] if there are fewer than the groups need, or not as many as the optimizer was
    /// made for; [`Error::DuplicateName`]. Nothing has changed then.
    fn set_param_names(&mut self, params: &[ParamSpec]) -> Result<()>;

    /// Takes over a saved state, hyper-parameters and learning rates included.
    ///
    /// The groups must be those of the saved optimizer: as many, over the same tensors. If this
    /// optimizer and the state both know [names](Self::set_param_names), tensors are matched by name,
    /// whatever their order: both must have the same names, of equal shapes, in each group. If
    /// either knows none (a file of an older version, say) tensors are matched by their index, and
    /// nothing but lengths can be checked. Going on after a load gives the same bits as never having
    /// stopped.
    ///
    /// # Errors
    ///
    /// [`Error::WrongKind`] and [`Error::State`], which names the entry or the tensor; this optimizer is
    /// then unchanged.
    fn load_state_dict(&mut self, dict: &StateDict) -> Result<()>;

    /// Number of parameter groups.
    fn group_count(&self) -> usize;

    /// A group's learning rate.
    ///
    /// # Errors
    ///
    /// [`Error::NoSuchGroup`].
    fn lr(&self, group: usize) -> Result<f64>;

    /// Sets a group's learning rate, as a scheduler does between steps.
    ///
    /// # Errors
    ///
    /// [`Error::NoSuchGroup`], or [`Error::InvalidHyper`] if it is negative or not finite.
    fn set_lr(&mut self, group: usize, lr: f64) -> Result<()>;

    /// A group's momentum, or, of Adam and its kin, the decay rate of the first moment; none for a rule
    /// with neither.
    ///
    /// # Errors
    ///
    /// [`Error::NoSuchGroup`].
    fn momentum(&self, group: usize) -> Result<Option<f64>>;

    /// Sets it, as a scheduler does between steps.
    ///
    /// # Errors
    ///
    /// [`Error::NoSuchGroup`]; [`Error::NoMomentum`]; [`Error::InvalidHyper`] if it is out of range;
    /// [`Error::MomentumFromZero`] if a buffer would have to come or go. Nothing has changed then.
    fn set_momentum(&mut self, group: usize, momentum: f64) -> Result<()>;

    /// The number of threads a step uses, the caller's among them; 0 counts as 1, the default. The
    /// bits of the result do not depend on it.
    fn set_threads(&mut self, threads: usize);

    /// The norm of all gradients times `grad_scale`, before clipping, of the last step that was
    /// asked to clip by norm.
    fn grad_norm(&self) -> Option<f64>;
}

/// What one step is told besides weights and gradients.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct StepCtl {
    /// Gradients are multiplied by this in the same sweep: `1 / S` undoes a loss scale `S`. Finite
    /// and not negative.
    pub grad_scale: f32,
    /// Whether the gradients are finite, or who finds out.
    pub found_inf: FoundInf,
    /// A bound on the gradients times `grad_scale`.
    pub clip: Option<Clip>,
}

impl StepCtl {
    /// No scaling, no clipping and no look at the gradients, as in plain f32 training.
    pub const PLAIN: Self = Self { grad_scale: 1.0, found_inf: FoundInf::Known(false), clip: None };

    /// Checks what cannot be checked by type.
    pub(crate) fn validate(&self) -> Result<()> {
        if !(self.grad_scale.is_finite() && self.grad_scale >= 0.0) {
            return Err(Error::InvalidGradScale { value: self.grad_scale });
        }
        self.clip.map_or(Ok(()), Clip::validate)
    }
}

impl Default for StepCtl {
    /// [`PLAIN`](Self::PLAIN).
    fn default() -> Self {
        Self::PLAIN
    }
}

/// Whether any gradient is infinite or not a number.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FoundInf {
    /// The caller has looked; `true` skips the step. Across ranks this must be the same on all.
    Known(bool),
    /// The step looks first: one read-only pass over every gradient times `grad_scale`, the same
    /// that takes the norm if one is asked for. Only for a rank that sees the whole, already
    /// reduced gradient.
    Check,
}

/// What becomes of weights of 16 bits, which cannot take small updates by themselves: `1 + 0.001` is
/// `1` in bf16.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub enum HalfWeights {
    /// The state keeps an f32 master, taken from the weight at its first step; the weight is the
    /// master rounded to nearest even.
    #[default]
    Master,
    /// No master: the weight is widened, updated, and rounded to nearest even. Saves four bytes per
    /// parameter and loses updates below half a unit.
    Nearest,
    /// No master: rounded up or down at random, so that the mean is right and small updates are not
    /// lost. The random bits are a function of seed, tensor (its place), step and element: threads do
    /// not change them, and a loaded optimizer with the same seed and order goes on with the same.
    Stochastic {
        /// The seed.
        seed: u64,
    },
}

/// What a step did.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[must_use = "a learning-rate scheduler should not advance on a skipped step"]
pub enum Applied {
    /// The tensors with gradients were updated.
    Applied,
    /// A gradient was not finite; not a byte has changed.
    SkippedNonFinite,
}
