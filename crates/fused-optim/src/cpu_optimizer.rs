//! `CpuOptimizer`: the optimizer of any rule on the CPU.

use crate::core::Core;
use crate::rule::{Hyper, group_methods};
use crate::{
    Applied, HalfWeights, Optimizer, ParamGroup, ParamMut, ReadState, Result, Slice, StateDict,
    StateLayout, StepCtl, VisitState,
};

/// An optimizer on the CPU. `H` is the rule's hyper-parameters, for example
/// [`AdamWHyper`](crate::AdamWHyper), or those of a [user-defined rule](crate::ElementwiseRule).
#[derive(Clone, Debug)]
pub struct CpuOptimizer<H> {
    pub(crate) core: Core<H>,
}

#[expect(private_bounds, reason = "sealed: this crate's rules, and each `ElementwiseRule`")]
impl<H: Hyper> CpuOptimizer<H> {
    /// An optimizer over these groups, of which there may be none yet.
    ///
    /// # Errors
    ///
    /// [`Error::InvalidHyper`](crate::Error::InvalidHyper) or another error for invalid
    /// hyper-parameters; [`Error::DuplicateParam`](crate::Error::DuplicateParam).
    pub fn new(groups: impl IntoIterator<Item = ParamGroup<H>>) -> Result<Self> {
        Ok(Self { core: Core::new(groups)? })
    }

    /// An optimizer with one group of tensors `0..count`. A step with more or fewer tensors is an
    /// error.
    ///
    /// # Errors
    ///
    /// As [`new`](Self::new).
    pub fn with_one_group(hyper: H, count: usize) -> Result<Self> {
        Ok(Self { core: Core::with_one_group(hyper, count)? })
    }

    /// Sets the [number of threads](Optimizer::set_threads).
    #[must_use]
    pub fn with_threads(mut self, threads: usize) -> Self {
        self.set_threads(threads);
        self
    }

    /// Sets how 16-bit weights are updated. Call this before the first step.
    #[must_use]
    pub fn with_half_weights(mut self, how: HalfWeights) -> Self {
        self.core.half_weights = how;
        self
    }

    /// Adds a group, at any time.
    ///
    /// # Errors
    ///
    /// As [`new`](Self::new); the group is not added then.
    pub fn add_param_group(&mut self, group: ParamGroup<H>) -> Result<()> {
        self.core.add_param_group(group)
    }

    /// The groups.
    #[must_use]
    pub fn groups(&self) -> &[ParamGroup<H>] {
        self.core.groups()
    }
}

impl<H: Hyper> Optimizer for CpuOptimizer<H> {
    fn kind(&self) -> &'static str {
        H::KIND
    }

    fn step(&mut self, params: &mut [ParamMut<'_>], ctl: &StepCtl) -> Result<Applied> {
        self.core.step(params, ctl)
    }

    fn state_dict(&self) -> Result<StateDict> {
        Ok(self.core.state_dict())
    }

    fn load_state_dict(&mut self, dict: &StateDict) -> Result<()> {
        self.core.load_state_dict(dict)
    }

    fn state_layout(&self) -> Result<StateLayout> {
        Ok(self.core.state_layout())
    }

    fn visit_state(&self, visit: &mut VisitState<'_>) -> Result<()> {
        self.core.visit_state(visit)
    }

    fn check_state(&mut self, saved: &StateLayout) -> Result<()> {
        self.core.check_state(saved)
    }

    fn load_state(&mut self, saved: &StateLayout, read: &mut ReadState<'_>) -> Result<()> {
        self.core.load_state(saved, read)
    }

    group_methods!(core);

    fn has_eval_weights(&self) -> bool {
        H::HAS_EVAL_WEIGHTS
    }

    fn eval_weights(&self, index: usize, weight: Slice<'_>, output: &mut [f32]) -> Result<()> {
        self.core.eval_weights(index, weight, output)
    }

    fn refresh_masters(&mut self) -> Result<()> {
        self.core.refresh_masters();
        Ok(())
    }

    fn set_threads(&mut self, threads: usize) {
        self.core.threads = threads.max(1);
    }

    fn grad_norm(&self) -> Option<f64> {
        self.core.grad_norm()
    }
}
