//! The traits that every optimizer of this crate is used through, and the options of one step.

use std::fmt;

#[cfg(not(feature = "cuda"))]
pub use self::without_cuda::{DeviceParam, DeviceParams, GradStats, Launches, Tuned};
#[cfg(feature = "cuda")]
pub use crate::cuda::{DeviceParam, DeviceParams, GradStats, Launches, Tuned};
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
    /// The check for non-finite values and the norm are one pass over the gradients, before the sweep.
    ///
    /// # Errors
    ///
    /// Everything is checked before anything is written: a group's tensor that is not in `params`,
    /// [another number](Error::ParamCount) of tensors than the optimizer was told of, a gradient or
    /// average of another length, a weight whose length or type is not that of earlier steps, an
    /// invalid `grad_scale` or clip; [`Error::NonFiniteNorm`] if the clip asks for it.
    fn step(&mut self, params: &mut [ParamMut<'_>], ctl: &StepCtl) -> Result<Applied>;

    /// This optimizer as one that steps on a device's memory; `None` if it steps on the host's.
    fn as_device(&mut self) -> Option<&mut dyn DeviceOptimizer> {
        None
    }

    /// A copy of everything a later run needs to go on exactly here.
    ///
    /// # Errors
    ///
    /// Those of the device that holds the state; none on the host.
    fn state_dict(&self) -> Result<StateDict>;

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

    /// A group's hyper-parameter; `None` for a rule without it.
    ///
    /// # Errors
    ///
    /// [`Error::NoSuchGroup`].
    fn hyper_param(&self, group: usize, param: HyperParam) -> Result<Option<f64>>;

    /// Sets a group's hyper-parameter, as a scheduler does between steps.
    ///
    /// # Errors
    ///
    /// [`Error::NoSuchGroup`]; [`Error::NoHyperParam`]; [`Error::InvalidHyper`] if it is out of range;
    /// [`Error::MomentumFromZero`] if a buffer would have to be added or removed. Nothing has changed then.
    fn set_hyper_param(&mut self, group: usize, param: HyperParam, value: f64) -> Result<()>;

    /// A group's learning rate.
    ///
    /// # Errors
    ///
    /// As [`set_hyper_param`](Self::set_hyper_param).
    fn lr(&self, group: usize) -> Result<f64> {
        let lr = self.hyper_param(group, HyperParam::Lr)?;
        lr.ok_or(Error::NoHyperParam { kind: self.kind(), param: HyperParam::Lr })
    }

    /// Sets a group's learning rate.
    ///
    /// # Errors
    ///
    /// As [`set_hyper_param`](Self::set_hyper_param).
    fn set_lr(&mut self, group: usize, lr: f64) -> Result<()> {
        self.set_hyper_param(group, HyperParam::Lr, lr)
    }

    /// A group's [momentum](HyperParam::Momentum); `None` for a rule without one.
    ///
    /// # Errors
    ///
    /// [`Error::NoSuchGroup`].
    fn momentum(&self, group: usize) -> Result<Option<f64>> {
        self.hyper_param(group, HyperParam::Momentum)
    }

    /// Sets a group's [momentum](HyperParam::Momentum).
    ///
    /// # Errors
    ///
    /// As [`set_hyper_param`](Self::set_hyper_param).
    fn set_momentum(&mut self, group: usize, momentum: f64) -> Result<()> {
        self.set_hyper_param(group, HyperParam::Momentum, momentum)
    }

    /// A group's weight decay; `None` for a rule without one.
    ///
    /// # Errors
    ///
    /// [`Error::NoSuchGroup`].
    fn weight_decay(&self, group: usize) -> Result<Option<f64>> {
        self.hyper_param(group, HyperParam::WeightDecay)
    }

    /// Sets a group's weight decay.
    ///
    /// # Errors
    ///
    /// As [`set_hyper_param`](Self::set_hyper_param).
    fn set_weight_decay(&mut self, group: usize, weight_decay: f64) -> Result<()> {
        self.set_hyper_param(group, HyperParam::WeightDecay, weight_decay)
    }

    /// Drops the f32 [masters](HalfWeights::Master): a tensor's next step takes its master anew from the weight
    /// it is given. Call it after weights were loaded or changed from outside.
    ///
    /// # Errors
    ///
    /// Those of the device that holds the state; none on the host.
    fn refresh_masters(&mut self) -> Result<()>;

    /// The number of threads a step uses, the caller's among them; 0 counts as 1, the default. The
    /// bits of the result do not depend on it.
    fn set_threads(&mut self, threads: usize);

    /// The norm of all gradients times `grad_scale`, before clipping, of the last step that was
    /// asked to clip by norm.
    fn grad_norm(&self) -> Option<f64>;
}

/// An optimizer whose weights and gradients are in the memory of its [device](Optimizer::device), as its state is.
pub trait DeviceOptimizer: Optimizer {
    /// As [`Optimizer::step`]: puts the step into the stream that `params` are lent in, and returns before it is
    /// done unless it has to check the gradients.
    ///
    /// # Errors
    ///
    /// As [`Optimizer::step`], and the device's; [`Error::Unsupported`] for another stream than the optimizer's.
    fn step_on_device(&mut self, params: DeviceParams<'_>, ctl: &StepCtl) -> Result<Applied>;

    /// Whether a gradient of a grouped tensor, times `grad_scale`, is not finite: the check of
    /// [`FoundInf::Check`] without a step. Waits for the device.
    ///
    /// # Errors
    ///
    /// As [`step_on_device`](Self::step_on_device).
    fn found_inf(&mut self, params: DeviceParams<'_>, ctl: &StepCtl) -> Result<bool>;

    /// Has later steps on tensors like these launched in the way that is fastest, found by a search. No bit
    /// depends on it.
    ///
    /// # Errors
    ///
    /// As [`step_on_device`](Self::step_on_device); nothing has changed then.
    fn tune(&mut self, params: &[DeviceParam]) -> Result<Vec<Tuned>>;

    /// Sends the device what a step with this `ctl` reads there, launches nothing, and returns the launches of the
    /// step. A CUDA graph that holds these launches ([`launch_step`](Self::launch_step) under capture) may be
    /// launched next; a graph that holds others must be captured anew. `None` if a step is more than launches.
    ///
    /// # Errors
    ///
    /// As [`step_on_device`](Self::step_on_device).
    fn prepare_step(
        &mut self,
        params: DeviceParams<'_>,
        ctl: &StepCtl,
    ) -> Result<Option<Launches>> {
        let _ = (params, ctl);
        Ok(None)
    }

    /// Launches a step and waits for nothing. After [`prepare_step`](Self::prepare_step) with the same arguments
    /// it only launches.
    ///
    /// # Errors
    ///
    /// As [`step_on_device`](Self::step_on_device).
    fn launch_step(&mut self, params: DeviceParams<'_>, ctl: &StepCtl) -> Result<()> {
        let _ = (params, ctl);
        Err(Error::Unsupported { what: "a step of several optimizers as launches" })
    }

    /// What the last launched step with this `ctl` did; waits for it if it had to check the gradients.
    ///
    /// # Errors
    ///
    /// As [`step_on_device`](Self::step_on_device).
    fn step_outcome(&mut self, ctl: &StepCtl) -> Result<Applied> {
        let _ = ctl;
        Err(Error::Unsupported { what: "a step of several optimizers as launches" })
    }

    /// Takes statistics of gradients (their norm, whether they are finite) as they become final, before the step
    /// with this `ctl`, which then reads only the other gradients for them, with the same bits. `None` if the step
    /// needs no statistics, or before the first step.
    ///
    /// # Errors
    ///
    /// An invalid `ctl`, and the device's.
    fn grad_stats(&mut self, ctl: &StepCtl) -> Result<Option<GradStats>> {
        let _ = ctl;
        Ok(None)
    }
}

/// Types of a step on a device, of which there are no values without the feature `cuda`.
#[cfg(not(feature = "cuda"))]
#[expect(missing_docs, reason = "see `cuda`")]
mod without_cuda {
    use std::convert::Infallible;
    use std::marker::PhantomData;

    #[derive(Clone, Copy, Debug)]
    pub struct DeviceParams<'a>(Infallible, PhantomData<&'a ()>);

    #[derive(Clone, Copy, Debug)]
    pub enum DeviceParam {}

    #[derive(Clone, Debug)]
    pub enum GradStats {}

    #[derive(Clone, Debug, PartialEq, Eq)]
    pub enum Launches {}

    #[derive(Clone, Debug, PartialEq, Eq)]
    pub enum Tuned {}
}

/// A hyper-parameter that can be read and set between steps.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum HyperParam {
    /// The learning rate.
    Lr,
    /// The momentum, or, of Adam and its kin, the decay rate of the first moment.
    Momentum,
    /// The weight decay.
    WeightDecay,
}

impl fmt::Display for HyperParam {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Lr => "learning rate",
            Self::Momentum => "momentum",
            Self::WeightDecay => "weight decay",
        })
    }
}

/// Options of one step.
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

    /// Checks what cannot be checked by type. A check for non-finite gradients whose norm is known becomes its
    /// result.
    pub(crate) fn validated(mut self) -> Result<Self> {
        if !(self.grad_scale.is_finite() && self.grad_scale >= 0.0) {
            return Err(Error::InvalidGradScale { value: self.grad_scale });
        }
        self.clip.map_or(Ok(()), Clip::validate)?;
        if let (FoundInf::Check, Some(norm)) = (self.found_inf, self.total_norm()) {
            self.found_inf = FoundInf::Known(!norm.is_finite());
        }
        Ok(self)
    }

    /// The norm of all gradients, if the caller knows it.
    pub(crate) const fn total_norm(&self) -> Option<f64> {
        match self.clip {
            Some(Clip::Norm(clip)) => clip.total_norm,
            _ => None,
        }
    }

    /// The bound on every element; infinity if there is none.
    pub(crate) const fn limit(&self) -> f32 {
        match self.clip {
            Some(Clip::Value(limit)) => limit,
            _ => f32::INFINITY,
        }
    }

    /// The bound on the norm of all gradients, of the kind that devices clip by.
    #[cfg(any(feature = "cuda", feature = "npu"))]
    pub(crate) fn max_norm_on_device(&self) -> Result<Option<f64>> {
        let what = match self.clip {
            Some(Clip::Norm(clip)) if clip.norm_type != 2.0 => {
                "clipping by another norm than the 2-norm"
            }
            Some(Clip::Norm(clip)) if clip.error_if_nonfinite => "`error_if_nonfinite`",
            Some(Clip::Norm(clip)) => return Ok(Some(clip.max_norm)),
            _ => return Ok(None),
        };
        Err(Error::Unsupported { what })
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
