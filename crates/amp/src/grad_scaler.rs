//! A [`LossScaler`] for several optimizers, with checks of the order of calls.
//!
//! Invariant: `step` returns an unscale factor once per optimizer and iteration, and only after all
//! ranks agreed that the optimizer's gradients are finite.

use std::collections::BTreeMap;

use crate::{Error, InValues, LossScaler, OverflowSource, Result, ScaleChange};

/// A [`LossScaler`] for several optimizers that checks the order of calls, as
/// `torch.amp.GradScaler`.
///
/// An iteration calls `scale` and runs backward, then calls `step` for each optimizer, with
/// `unscale` before it if the gradients are needed unscaled (for example to clip them), then
/// `update` once. The caller numbers its optimizers. The scaler does not run them: `step` returns
/// whether to update the parameters and by which factor to multiply the gradients. Each optimizer
/// has a stage:
///
/// | | ready | unscaled | stepped |
/// |---|---|---|---|
/// | `unscale` | divides and checks → unscaled | [`UnscaledTwice`](Error::UnscaledTwice) | [`UnscaledAfterStep`](Error::UnscaledAfterStep) |
/// | `step` | checks → stepped | → stepped | [`SteppedTwice`](Error::SteppedTwice) |
/// | `update` | | → ready | → ready |
///
/// An optimizer's step is skipped if one of its own gradients overflowed; the scale backs off once
/// if any optimizer's did. Before the first `scale` all other calls are
/// [`NotScaled`](Error::NotScaled). A `step` of an optimizer without gradients is
/// [`NothingChecked`](Error::NothingChecked), and so is an `update` if no optimizer had any. With a
/// [disabled](LossScaler::disabled) scaler all calls succeed without dividing or checking, and
/// every step is permitted.
///
/// Follows: `torch.amp.GradScaler` of PyTorch 2.15, call by call. Differences: `unscale` takes no
/// half gradients, by its type (PyTorch raises); and while the reciprocal of the scale is not
/// finite, which [`Policy::Torch`](crate::Policy::Torch) allows, no step is permitted (PyTorch
/// applies infinite gradients).
///
/// ```
/// use amp::{GradScaler, InValues, LossScaler, has_non_finite};
///
/// let mut scaler = GradScaler::new(LossScaler::fixed(8.0)?, InValues);
/// let scale = scaler.scale()?;
/// let mut generator = [0.5 * scale]; // the gradient after backward from loss * scale
/// let critic = [f32::INFINITY];
///
/// scaler.unscale(0, [&mut generator])?; // in place, for example to clip
/// assert_eq!(generator, [0.5]);
/// assert_eq!(scaler.step(0, || unreachable!("`unscale` has checked it"))?, Some(1.0));
///
/// // A fused optimizer checks its gradients and multiplies them by the factor in its own passes.
/// assert_eq!(scaler.step(1, || Some(has_non_finite(&critic)))?, None); // skip
/// scaler.update()?;
/// # Ok::<(), amp::Error>(())
/// ```
#[doc(alias = "torch.amp.GradScaler")]
#[derive(Clone, Debug, PartialEq)]
pub struct GradScaler<S = InValues> {
    scaler: LossScaler,
    source: S,
    phase: Phase,
    /// By optimizer; an absent one is ready.
    stages: BTreeMap<usize, Stage>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Phase {
    /// `scale` was never called.
    Unused,
    /// `scale` was not called since the last `update`.
    Between,
    /// `scale` was called since the last `update`.
    Scaled,
}

/// The last call for an optimizer since the last `update`, with `found_inf` of its gradients;
/// `None` if it had none.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Stage {
    Unscaled(Option<bool>),
    Stepped(bool),
}

impl<S: OverflowSource> GradScaler<S> {
    /// Wraps `scaler`; `source` decides whether gradients overflowed.
    pub const fn new(scaler: LossScaler, source: S) -> Self {
        Self { scaler, source, phase: Phase::Unused, stages: BTreeMap::new() }
    }

    /// Returns the factor of the loss. The first call of an iteration clears the overflow source;
    /// with gradient accumulation, call it for each backward pass.
    ///
    /// # Errors
    ///
    /// Those of the source.
    pub fn scale(&mut self) -> Result<f32, S::Error> {
        if self.scaler.is_enabled() && self.phase != Phase::Scaled {
            self.source.clear()?;
            self.phase = Phase::Scaled;
        }
        Ok(self.scaler.scale())
    }

    /// Divides all gradients of `optimizer` by the scale, in place, and returns whether any
    /// overflowed.
    ///
    /// Takes only f32, since small half gradients would underflow: pass those to
    /// [`step`](Self::step) scaled. Each slice is checked as in [`LossScaler::unscale`]. A disabled
    /// scaler does nothing.
    ///
    /// # Errors
    ///
    /// Those of the stage, see the type. Those of the source: the gradients are divided then, and
    /// the optimizer cannot step until the next `update`.
    pub fn unscale(
        &mut self,
        optimizer: usize,
        grads: impl IntoIterator<Item: AsMut<[f32]>>,
    ) -> Result<bool, S::Error> {
        if !self.scaler.is_enabled() {
            return Ok(false);
        }
        self.require_scaled("unscale")?;
        match self.stages.get(&optimizer) {
            None => {}
            Some(Stage::Unscaled(_)) => return Err(Error::UnscaledTwice { optimizer }.into()),
            Some(Stage::Stepped(_)) => return Err(Error::UnscaledAfterStep { optimizer }.into()),
        }
        let local = grads.into_iter().map(|mut grads| self.scaler.unscale(grads.as_mut())).max();
        self.stages.insert(optimizer, Stage::Unscaled(None));
        let found_inf = self.source.overflowed(local)?;
        self.stages.insert(optimizer, Stage::Unscaled(found_inf));
        Ok(found_inf == Some(true))
    }

    /// Returns the factor of the gradients with which `optimizer` is to update its parameters;
    /// `None` if it must skip the step.
    ///
    /// If the gradients were not [unscaled](Self::unscale), `check` returns whether any is infinite
    /// or NaN, `None` if there are none. In a fused optimizer, `check` is its first pass and the
    /// factor is for its second; all ranks agree between the two. A disabled scaler returns
    /// `Some(1.0)` without calling `check`.
    ///
    /// # Errors
    ///
    /// Those of the stage, see the type. Those of the source: the optimizer's stage is unchanged
    /// then.
    pub fn step(
        &mut self,
        optimizer: usize,
        check: impl FnOnce() -> Option<bool>,
    ) -> Result<Option<f32>, S::Error> {
        if !self.scaler.is_enabled() {
            return Ok(Some(1.0));
        }
        self.require_scaled("step")?;
        let inv_scale = self.scaler.inv_scale();
        let (found_inf, grad_scale) = match self.stages.get(&optimizer) {
            None => (self.source.overflowed(check())?, inv_scale),
            Some(Stage::Unscaled(found_inf)) => (*found_inf, 1.0),
            Some(Stage::Stepped(_)) => return Err(Error::SteppedTwice { optimizer }.into()),
        };
        let Some(found_inf) = found_inf else {
            // PyTorch unscales before it finds that there was nothing to unscale.
            self.stages.insert(optimizer, Stage::Unscaled(None));
            return Err(Error::NothingChecked { optimizer: Some(optimizer) }.into());
        };
        self.stages.insert(optimizer, Stage::Stepped(found_inf));
        Ok((!found_inf && inv_scale.is_finite()).then_some(grad_scale))
    }

    /// Ends the iteration: updates the scale, which backs off if any optimizer's gradients
    /// overflowed.
    ///
    /// # Errors
    ///
    /// [`Error::NotScaled`]; [`Error::NothingChecked`]; [`Error::ScaleAtFloor`], after which the
    /// iteration has ended, too.
    pub fn update(&mut self) -> Result<ScaleChange> {
        if !self.scaler.is_enabled() {
            return Ok(ScaleChange::Kept);
        }
        self.require_scaled("update")?;
        let each = self.stages.values().map(|stage| match *stage {
            Stage::Unscaled(found_inf) => found_inf,
            Stage::Stepped(found_inf) => Some(found_inf),
        });
        let found_inf = each.max().flatten().ok_or(Error::NothingChecked { optimizer: None })?;
        self.end();
        self.scaler.update(found_inf)
    }

    /// Ends the iteration and sets the scale; the growth count is unchanged. A disabled scaler does
    /// nothing.
    ///
    /// # Errors
    ///
    /// [`Error::NotScaled`]; [`Error::Invalid`] as [`LossScaler::set_scale`].
    #[doc(alias = "update")]
    pub fn update_to(&mut self, scale: f32) -> Result<()> {
        if !self.scaler.is_enabled() {
            return Ok(());
        }
        self.require_scaled("update")?;
        self.scaler.set_scale(scale)?;
        self.end();
        Ok(())
    }

    /// The loss scaler: to read it, or to save its state between iterations.
    pub const fn loss_scaler(&self) -> &LossScaler {
        &self.scaler
    }

    /// The loss scaler: to load a state, or to change a factor.
    pub const fn loss_scaler_mut(&mut self) -> &mut LossScaler {
        &mut self.scaler
    }

    fn require_scaled(&self, call: &'static str) -> Result<()> {
        if self.phase == Phase::Unused { Err(Error::NotScaled { call }) } else { Ok(()) }
    }

    fn end(&mut self) {
        self.stages.clear();
        self.phase = Phase::Between;
    }
}
