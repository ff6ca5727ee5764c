//! The trait every optimizer of this crate is used through, and what one step is told.

use std::fmt;

use crate::{Error, ParamMut, Result, StateDict};

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
    /// weight, no state and no step count changes, and
    /// [`SkippedNonFinite`](Applied::SkippedNonFinite) is returned.
    ///
    /// # Errors
    ///
    /// Everything is checked before anything is written: a group's tensor that is not in `params`,
    /// a gradient of another length, a weight whose length or type is not that of earlier steps, a
    /// `grad_scale` that is negative or not finite.
    fn step(&mut self, params: &mut [ParamMut<'_>], ctl: &StepCtl) -> Result<Applied>;

    /// A copy of everything a later run needs to go on exactly here.
    fn state_dict(&self) -> StateDict;

    /// Takes over a saved state, hyper-parameters and learning rates included.
    ///
    /// The groups must be those of the saved optimizer: as many, over the same tensors. Going on
    /// after a load gives the same bits as never having stopped.
    ///
    /// # Errors
    ///
    /// [`Error::WrongKind`] and [`Error::State`], which names the entry; this optimizer is then
    /// unchanged.
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
}

/// What one step is told besides weights and gradients.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct StepCtl {
    /// Gradients are multiplied by this in the same sweep: `1 / S` undoes a loss scale `S`, and a
    /// clipping factor goes in here too. Finite and not negative.
    pub grad_scale: f32,
    /// Whether the gradients are finite, or who finds out.
    pub found_inf: FoundInf,
}

impl StepCtl {
    /// Checks what cannot be checked by type.
    pub(crate) fn validate(&self) -> Result<()> {
        if self.grad_scale.is_finite() && self.grad_scale >= 0.0 {
            Ok(())
        } else {
            Err(Error::InvalidGradScale { value: self.grad_scale })
        }
    }
}

impl Default for StepCtl {
    /// No scaling and no look at the gradients, as in plain f32 training.
    fn default() -> Self {
        Self { grad_scale: 1.0, found_inf: FoundInf::Known(false) }
    }
}

/// Whether any gradient is infinite or not a number.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FoundInf {
    /// The caller has looked; `true` skips the step. Across ranks this must be the same on all.
    Known(bool),
    /// The step looks first: one read-only pass over every gradient times `grad_scale`. Only for a
    /// rank that sees the whole, already reduced gradient.
    Check,
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
