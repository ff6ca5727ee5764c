//! The order of calls around a [`LossScaler`]: one scale, any number of optimizers.
//!
//! Invariant: a factor that undoes the scale is handed out once per optimizer and iteration, and
//! only after all ranks agreed that its gradients are finite.

use std::collections::BTreeMap;

use crate::{Error, InValues, LossScaler, OverflowSource, Result, ScaleChange};

/// A [`LossScaler`] shared by any number of optimizers, and the order of calls around it.
///
/// An iteration runs `scale` and backward, then for each optimizer `step`, with `unscale` before it
/// if the gradients must be seen unscaled, to clip them say; then one `update`. Optimizers are told
/// apart by a number of the caller's choice. The scaler never runs one: it says whether to, and
/// with which factor. What each may do next is its stage:
///
/// | | ready | unscaled | stepped |
/// |---|---|---|---|
/// | `unscale` | divides, looks → unscaled | [`UnscaledTwice`](Error::UnscaledTwice) | [`UnscaledAfterStep`](Error::UnscaledAfterStep) |
/// | `step` | looks → stepped | → stepped | [`SteppedTwice`](Error::SteppedTwice) |
/// | `update` | | → ready | → ready |
///
/// Each optimizer is skipped by the verdict on its own gradients; the scale backs off once if any
/// was. Before the first `scale` everything else is [`NotScaled`](Error::NotScaled). A `step` of an
/// optimizer without gradients is [`NothingChecked`](Error::NothingChecked), and so is an `update`
/// when none had any. Over a [disabled](LossScaler::disabled) scaler all calls pass: nothing is
/// divided or looked at, every step is permitted.
///
/// Follows: `torch.amp.GradScaler` of PyTorch 2.15, call by call. Where it differs: half gradients
/// cannot be unscaled in place, by type (PyTorch raises); and while the scale is so far out that
/// its reciprocal is not finite, which [`Policy::Torch`](crate::Policy::Torch) allows, no step is
/// permitted (PyTorch steps into infinity).
///
/// ```
/// use amp::{GradScaler, InValues, LossScaler, has_non_finite};
///
/// let mut scaler = GradScaler::new(LossScaler::fixed(8.0)?, InValues);
/// let scale = scaler.scale()?;
/// let mut generator = [0.5 * scale]; // its gradient, after backward from loss * scale
/// let critic = [f32::INFINITY];
///
/// scaler.unscale(0, [&mut generator])?; // in place, to clip or to look
/// assert_eq!(generator, [0.5]);
/// assert_eq!(scaler.step(0, || unreachable!("it has been looked at"))?, Some(1.0));
///
/// // A fused optimizer looks, and multiplies by what it gets here, in its own passes.
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
    /// By optimizer; one that is ready is absent.
    stages: BTreeMap<usize, Stage>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Phase {
    /// Never scaled.
    Unused,
    /// Nothing scaled since the last update.
    Between,
    /// Scaled, and not yet updated.
    Scaled,
}

/// What an optimizer has done since the last update, and the verdict on its gradients if it had
/// any.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Stage {
    Unscaled(Option<bool>),
    Stepped(bool),
}

impl<S: OverflowSource> GradScaler<S> {
    /// Starts with `scaler`; `source` says whether gradients overflowed.
    pub const fn new(scaler: LossScaler, source: S) -> Self {
        Self { scaler, source, phase: Phase::Unused, stages: BTreeMap::new() }
    }

    /// What to multiply the loss by. The first call of an iteration clears the overflow source; an
    /// iteration that accumulates calls it for each of its backward passes.
    ///
    /// # Errors
    ///
    /// The source's.
    pub fn scale(&mut self) -> Result<f32, S::Error> {
        if self.scaler.is_enabled() && self.phase != Phase::Scaled {
            self.source.clear()?;
            self.phase = Phase::Scaled;
        }
        Ok(self.scaler.scale())
    }

    /// Divides all gradients of `optimizer` by the scale, in place; whether any overflowed.
    ///
    /// f32 only: small half gradients would vanish. Hand those to [`step`](Self::step) as they are.
    /// How one slice is looked at: [`LossScaler::unscale`]. Disabled, this does nothing.
    ///
    /// # Errors
    ///
    /// By the stage. The source's; the gradients are divided by then, and the optimizer
    /// is unscaled without a verdict: no step until the next update.
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
        let seen = grads.into_iter().map(|mut grads| self.scaler.unscale(grads.as_mut())).max();
        self.stages.insert(optimizer, Stage::Unscaled(None));
        let found_inf = self.source.overflowed(seen)?;
        self.stages.insert(optimizer, Stage::Unscaled(found_inf));
        Ok(found_inf == Some(true))
    }

    /// Whether `optimizer` may now update its parameters: with gradients times the factor in
    /// `Some`, or, `None`, not at all.
    ///
    /// If the gradients were not [unscaled](Self::unscale), `look` says whether any is infinite or
    /// NaN, `None` if there are none. For a fused optimizer `look` is the pass that finds out, and
    /// the factor is for the pass that updates; all ranks agree between the two. Disabled, this is
    /// always `Some(1.0)`, without a look.
    ///
    /// # Errors
    ///
    /// By the stage. The source's; the optimizer's stage is then as before.
    pub fn step(
        &mut self,
        optimizer: usize,
        look: impl FnOnce() -> Option<bool>,
    ) -> Result<Option<f32>, S::Error> {
        if !self.scaler.is_enabled() {
            return Ok(Some(1.0));
        }
        self.require_scaled("step")?;
        let inv_scale = self.scaler.inv_scale();
        let (found_inf, grad_scale) = match self.stages.get(&optimizer) {
            None => (self.source.overflowed(look())?, inv_scale),
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

    /// Ends the iteration: moves the scale, down if any optimizer's gradients overflowed.
    ///
    /// # Errors
    ///
    /// By the stage; [`Error::ScaleAtFloor`], with which the iteration ends all the same.
    pub fn update(&mut self) -> Result<ScaleChange> {
        if !self.scaler.is_enabled() {
            return Ok(ScaleChange::Kept);
        }
        self.require_scaled("update")?;
        let verdicts = self.stages.values().map(|stage| match *stage {
            Stage::Unscaled(found_inf) => found_inf,
            Stage::Stepped(found_inf) => Some(found_inf),
        });
        let found_inf =
            verdicts.max().flatten().ok_or(Error::NothingChecked { optimizer: None })?;
        self.end();
        self.scaler.update(found_inf)
    }

    /// Ends the iteration with a scale set by hand; the growth count stays. Disabled, this does
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

    /// The scale and its rule: to read, and to save between iterations.
    pub const fn loss_scaler(&self) -> &LossScaler {
        &self.scaler
    }

    /// The scale and its rule: to load a state, or to change a factor.
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
