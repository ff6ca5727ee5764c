//! The loss scale, a state machine without gradients.
//!
//! Each iteration reads the scale and ends with `update(found_inf)`, which halves the scale on
//! overflow and doubles it after many steps without one.
//!
//! Invariant: the same sequence of `found_inf` gives the same scale, bit for bit. So ranks that
//! agree on `found_inf` need not exchange the scale.

use serde::{Deserialize, Serialize};

use crate::{Error, Result, has_non_finite, unscale};

/// Options of a dynamic scale; the defaults are PyTorch's. A missing key deserializes to its
/// default.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct LossScalerOptions {
    /// The initial scale. Default: 65536.
    pub init_scale: f32,
    /// Factor of the scale after [`growth_interval`](Self::growth_interval) steps without overflow;
    /// above
    /// 1. Default: 2.
    pub growth_factor: f64,
    /// Factor of the scale on overflow; below 1. Default: 0.5.
    pub backoff_factor: f64,
    /// Number of steps in a row without overflow before the scale grows. Default: 2000.
    pub growth_interval: u64,
    /// How edge cases are handled. Default: [`Policy::Guarded`] with a floor of 2⁻²⁴.
    pub policy: Policy,
}

impl Default for LossScalerOptions {
    fn default() -> Self {
        Self {
            init_scale: 65536.0,
            growth_factor: 2.0,
            backoff_factor: 0.5,
            growth_interval: 2000,
            policy: Policy::Guarded { min_scale: 1.0 / 16_777_216.0 },
        }
    }
}

/// How a dynamic scale handles the edge cases in which PyTorch's rule fails.
///
/// | | `Guarded` | `Torch` |
/// |---|---|---|
/// | repeated overflow | the scale stops at `min_scale`; one more overflow is [`Error::ScaleAtFloor`] | the scale underflows to 0 without an error |
/// | a finite gradient overflows when divided by a scale below 1 | [`unscale`](LossScaler::unscale) reports it | the optimizer applies an infinite gradient |
/// | a loaded growth count is at or past the interval | grows after the next step without overflow | never grows until an overflow |
/// | invalid factors, scales and intervals | [`Error::Invalid`] | checks only growth above 1 and backoff below 1 |
///
/// In all other cases the two are equal, bit for bit. Serialized as `"torch"` or
/// `{"guarded": {"min_scale": ...}}`.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case", deny_unknown_fields)]
pub enum Policy {
    /// A floor for the scale, and checks.
    Guarded {
        /// The smallest scale: at least the smallest normal `f32`, so that its reciprocal is
        /// finite.
        min_scale: f32,
    },
    /// The rule of `torch.amp.GradScaler`, bit for bit.
    Torch,
}

/// The loss scale and the rule that updates it.
///
/// ```
/// use amp::{LossScaler, LossScalerOptions, ScaleChange};
///
/// let options = LossScalerOptions { growth_interval: 2, ..Default::default() };
/// let mut scaler = LossScaler::new(options)?;
/// assert_eq!(scaler.scale(), 65536.0);
/// assert_eq!(scaler.update(true)?, ScaleChange::BackedOff); // an inf: that step was skipped
/// assert_eq!(scaler.scale(), 32768.0);
/// assert_eq!(scaler.update(false)?, ScaleChange::Kept);
/// assert_eq!(scaler.update(false)?, ScaleChange::Grown);
/// assert_eq!(scaler.scale(), 65536.0);
/// # Ok::<(), amp::Error>(())
/// ```
#[derive(Clone, Debug, PartialEq)]
pub struct LossScaler {
    mode: Mode,
    scale: f32,
    growth_tracker: u64,
}

#[derive(Clone, Copy, Debug, PartialEq)]
enum Mode {
    Dynamic(LossScalerOptions),
    Fixed,
    Disabled,
}

/// How [`LossScaler::update`] changed the scale.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ScaleChange {
    /// The scale is unchanged.
    Kept,
    /// The scale was multiplied by the growth factor.
    Grown,
    /// The scale was multiplied by the backoff factor, since gradients overflowed.
    BackedOff,
}

/// The state dict of a scaler, with PyTorch's keys. A fixed scaler saves growth and backoff factors
/// of 1, which keep PyTorch's scale constant, too.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ScalerState {
    /// The scale.
    pub scale: f32,
    /// As in [`LossScalerOptions`].
    pub growth_factor: f64,
    /// As in [`LossScalerOptions`].
    pub backoff_factor: f64,
    /// As in [`LossScalerOptions`].
    pub growth_interval: u64,
    /// Number of steps without overflow since the scale last changed.
    #[serde(rename = "_growth_tracker")]
    pub growth_tracker: u64,
}

impl LossScaler {
    /// Returns a scaler with a dynamic scale.
    ///
    /// # Errors
    ///
    /// [`Error::Invalid`] if the growth factor is not above 1 or the backoff factor not below 1;
    /// under [`Policy::Guarded`] also for a scale below the floor or infinite, a backoff factor
    /// that is not positive, or an interval of 0.
    pub fn new(options: LossScalerOptions) -> Result<Self> {
        options.validate()?;
        Ok(Self { mode: Mode::Dynamic(options), scale: options.init_scale, growth_tracker: 0 })
    }

    /// Returns a scaler whose scale only [`set_scale`](Self::set_scale) changes. Steps with
    /// overflow are still skipped.
    ///
    /// # Errors
    ///
    /// [`Error::Invalid`] if `scale` or its reciprocal is not positive and finite.
    pub fn fixed(scale: f32) -> Result<Self> {
        let mut scaler = Self { mode: Mode::Fixed, scale, growth_tracker: 0 };
        scaler.set_scale(scale)?;
        Ok(scaler)
    }

    /// Returns a scaler without scaling, for bf16 and f32 training: its scale is always 1.
    #[must_use]
    pub const fn disabled() -> Self {
        Self { mode: Mode::Disabled, scale: 1.0, growth_tracker: 0 }
    }

    /// Whether the loss is scaled: false only for [`disabled`](Self::disabled).
    #[must_use]
    pub const fn is_enabled(&self) -> bool {
        !matches!(self.mode, Mode::Disabled)
    }

    /// The factor of the loss.
    #[must_use]
    pub const fn scale(&self) -> f32 {
        self.scale
    }

    /// The factor that unscales gradients: `1 / scale`, computed in f64 and rounded once.
    #[must_use]
    pub fn inv_scale(&self) -> f32 {
        f64::from(self.scale).recip() as f32
    }

    /// Number of steps without overflow since the scale last changed.
    #[must_use]
    pub const fn growth_tracker(&self) -> u64 {
        self.growth_tracker
    }

    /// Divides f32 gradients by the scale, in place, and returns whether any overflowed.
    ///
    /// One pass of [`unscale`](crate::unscale), which checks the gradients before the division.
    /// With a scale below 1 the quotient can overflow, too: [`Policy::Guarded`] checks that in a
    /// second pass, [`Policy::Torch`] does not. If `1 / scale` is not finite the gradients are not
    /// changed.
    #[must_use = "a step with non-finite gradients must be skipped"]
    pub fn unscale(&self, grads: &mut [f32]) -> bool {
        let inv_scale = self.inv_scale();
        if !inv_scale.is_finite() {
            return has_non_finite(grads);
        }
        unscale(grads, inv_scale) || (self.is_guarded() && inv_scale > 1.0 && has_non_finite(grads))
    }

    /// Whether quotients are checked for overflow, too.
    pub(crate) fn is_guarded(&self) -> bool {
        !matches!(self.mode, Mode::Dynamic(options) if options.policy == Policy::Torch)
    }

    /// Ends an iteration: updates the scale. `found_inf` says whether any gradient of any optimizer
    /// overflowed, and must be the same on all ranks.
    ///
    /// # Errors
    ///
    /// [`Error::ScaleAtFloor`] under [`Policy::Guarded`].
    pub fn update(&mut self, found_inf: bool) -> Result<ScaleChange> {
        let Mode::Dynamic(options) = self.mode else { return Ok(ScaleChange::Kept) };
        if found_inf {
            return self.back_off(&options);
        }
        // Saturating, since a loaded count may be any number.
        self.growth_tracker = self.growth_tracker.saturating_add(1);
        let due = match options.policy {
            Policy::Guarded { .. } => self.growth_tracker >= options.growth_interval,
            Policy::Torch => self.growth_tracker == options.growth_interval,
        };
        if !due {
            return Ok(ScaleChange::Kept);
        }
        self.growth_tracker = 0;
        let grown = product(self.scale, options.growth_factor);
        if !grown.is_finite() {
            return Ok(ScaleChange::Kept);
        }
        self.scale = grown;
        Ok(ScaleChange::Grown)
    }

    fn back_off(&mut self, options: &LossScalerOptions) -> Result<ScaleChange> {
        self.growth_tracker = 0;
        let reduced = product(self.scale, options.backoff_factor);
        match options.policy {
            Policy::Torch => self.scale = reduced,
            Policy::Guarded { min_scale } if self.scale > min_scale => {
                self.scale = reduced.max(min_scale);
            }
            Policy::Guarded { min_scale } => return Err(Error::ScaleAtFloor { min_scale }),
        }
        Ok(ScaleChange::BackedOff)
    }

    /// Sets the scale, instead of [`update`](Self::update); the growth count is unchanged.
    ///
    /// # Errors
    ///
    /// [`Error::Invalid`] if the scale is outside its range, or this scaler is disabled.
    pub fn set_scale(&mut self, scale: f32) -> Result<()> {
        let requirement = match self.mode {
            Mode::Dynamic(options) => {
                return options.validate_scale(scale).map(|()| self.scale = scale);
            }
            Mode::Fixed if is_in_range(scale, f32::MIN_POSITIVE) => {
                self.scale = scale;
                return Ok(());
            }
            Mode::Fixed => "positive and finite",
            Mode::Disabled => "settable: loss scaling is disabled",
        };
        Err(Error::Invalid { name: "scale", value: scale.into(), requirement })
    }

    /// The current options; `None` unless the scale is dynamic.
    #[must_use]
    pub const fn options(&self) -> Option<LossScalerOptions> {
        match self.mode {
            Mode::Dynamic(options) => Some(options),
            Mode::Fixed | Mode::Disabled => None,
        }
    }

    /// Sets the growth factor.
    ///
    /// # Errors
    ///
    /// [`Error::Invalid`] as in [`new`](Self::new), [`Error::NotDynamic`].
    pub fn set_growth_factor(&mut self, growth_factor: f64) -> Result<()> {
        self.set(|options| options.growth_factor = growth_factor)
    }

    /// Sets the backoff factor.
    ///
    /// # Errors
    ///
    /// [`Error::Invalid`] as in [`new`](Self::new), [`Error::NotDynamic`].
    pub fn set_backoff_factor(&mut self, backoff_factor: f64) -> Result<()> {
        self.set(|options| options.backoff_factor = backoff_factor)
    }

    /// Sets the growth interval; the growth count is unchanged.
    ///
    /// # Errors
    ///
    /// [`Error::Invalid`] as in [`new`](Self::new), [`Error::NotDynamic`].
    pub fn set_growth_interval(&mut self, growth_interval: u64) -> Result<()> {
        self.set(|options| options.growth_interval = growth_interval)
    }

    fn set(&mut self, change: impl FnOnce(&mut LossScalerOptions)) -> Result<()> {
        let mut options = self.options().ok_or(Error::NotDynamic)?;
        change(&mut options);
        options.validate()?;
        self.mode = Mode::Dynamic(options);
        Ok(())
    }

    /// The state to save; `None` if scaling is disabled.
    #[must_use]
    pub fn state_dict(&self) -> Option<ScalerState> {
        let options = match self.mode {
            Mode::Dynamic(options) => options,
            Mode::Fixed => FIXED,
            Mode::Disabled => return None,
        };
        Some(ScalerState {
            scale: self.scale,
            growth_factor: options.growth_factor,
            backoff_factor: options.backoff_factor,
            growth_interval: options.growth_interval,
            growth_tracker: self.growth_tracker,
        })
    }

    /// Loads a saved state, including factors and interval; the policy is unchanged. A fixed scaler
    /// loads the scale; without a state (older versions saved none) it keeps its own.
    ///
    /// # Errors
    ///
    /// [`Error::StateMismatch`] if the state is of another kind of scaler (dynamic, fixed,
    /// disabled); [`Error::Invalid`] as in [`new`](Self::new) and [`fixed`](Self::fixed).
    pub fn load_state_dict(&mut self, state: Option<&ScalerState>) -> Result<()> {
        let mismatch = |state, scaler| Err(Error::StateMismatch { state, scaler });
        let kind = match state {
            Some(state) if state.is_fixed() => "a fixed scaler's state",
            Some(_) => "a dynamic scaler's state",
            None => "an absent state",
        };
        let (options, state) = match (self.mode, state) {
            (Mode::Dynamic(options), Some(state)) if !state.is_fixed() => (options, state),
            (Mode::Fixed, Some(state)) if state.is_fixed() => return self.set_scale(state.scale),
            (Mode::Fixed | Mode::Disabled, None) => return Ok(()),
            (Mode::Dynamic(_), _) => return mismatch(kind, "dynamic"),
            (Mode::Fixed, _) => return mismatch(kind, "fixed"),
            (Mode::Disabled, _) => return mismatch(kind, "disabled"),
        };
        let options = LossScalerOptions {
            init_scale: options.init_scale,
            growth_factor: state.growth_factor,
            backoff_factor: state.backoff_factor,
            growth_interval: state.growth_interval,
            policy: options.policy,
        };
        options.validate()?;
        options.validate_scale(state.scale)?;
        *self = Self {
            mode: Mode::Dynamic(options),
            scale: state.scale,
            growth_tracker: state.growth_tracker,
        };
        Ok(())
    }
}

impl ScalerState {
    /// Whether this is a fixed scaler's state: no dynamic scaler has these factors.
    fn is_fixed(&self) -> bool {
        (self.growth_factor, self.backoff_factor) == (FIXED.growth_factor, FIXED.backoff_factor)
    }
}

impl LossScalerOptions {
    fn validate(&self) -> Result<()> {
        let require = |valid: bool, name, value, requirement| {
            if valid { Ok(()) } else { Err(Error::Invalid { name, value, requirement }) }
        };
        let (growth, backoff) = (self.growth_factor, self.backoff_factor);
        require(growth > 1.0, "growth_factor", growth, "above 1")?;
        require(backoff < 1.0, "backoff_factor", backoff, "below 1")?;
        if let Policy::Guarded { min_scale } = self.policy {
            let normal = is_in_range(min_scale, f32::MIN_POSITIVE);
            require(normal, "min_scale", min_scale.into(), "a positive normal number")?;
            require(growth.is_finite(), "growth_factor", growth, "finite")?;
            require(backoff > 0.0, "backoff_factor", backoff, "positive")?;
            require(self.growth_interval > 0, "growth_interval", 0.0, "at least 1")?;
        }
        self.validate_scale(self.init_scale)
    }

    fn validate_scale(&self, scale: f32) -> Result<()> {
        match self.policy {
            Policy::Guarded { min_scale } if !is_in_range(scale, min_scale) => {
                Err(Error::Invalid {
                    name: "scale",
                    value: scale.into(),
                    requirement: "finite and at least min_scale",
                })
            }
            Policy::Guarded { .. } | Policy::Torch => Ok(()),
        }
    }
}

fn is_in_range(scale: f32, min_scale: f32) -> bool {
    scale.is_finite() && scale >= min_scale
}

/// The product, computed in f64 and rounded once.
fn product(scale: f32, factor: f64) -> f32 {
    (f64::from(scale) * factor) as f32
}

/// The options in a fixed scaler's state: its factors keep the scale constant.
const FIXED: LossScalerOptions = LossScalerOptions {
    init_scale: 1.0,
    growth_factor: 1.0,
    backoff_factor: 1.0,
    growth_interval: 2000,
    policy: Policy::Torch,
};

#[cfg(test)]
mod tests {
    use super::*;

    fn invalid(options: LossScalerOptions) -> String {
        LossScaler::new(options).unwrap_err().to_string()
    }

    #[test]
    fn an_invalid_option_is_an_error_that_names_it() {
        let ok = LossScalerOptions::default;
        let growth = invalid(LossScalerOptions { growth_factor: 1.0, ..ok() });
        assert_eq!(growth, "invalid growth_factor: 1 is not above 1");
        let backoff = invalid(LossScalerOptions { backoff_factor: 1.0, ..ok() });
        assert_eq!(backoff, "invalid backoff_factor: 1 is not below 1");
        let backoff = invalid(LossScalerOptions { backoff_factor: 0.0, ..ok() });
        assert_eq!(backoff, "invalid backoff_factor: 0 is not positive");
        let interval = invalid(LossScalerOptions { growth_interval: 0, ..ok() });
        assert_eq!(interval, "invalid growth_interval: 0 is not at least 1");
        for init_scale in [0.0, -1.0, f32::INFINITY, f32::NAN, 1e-9] {
            assert!(invalid(LossScalerOptions { init_scale, ..ok() }).starts_with("invalid scale"));
        }
        for min_scale in [0.0, 1e-40, f32::NAN, f32::INFINITY] {
            let policy = Policy::Guarded { min_scale };
            assert!(invalid(LossScalerOptions { policy, ..ok() }).starts_with("invalid min_scale"));
        }
        for growth_factor in [f64::NAN, 0.5] {
            LossScaler::new(LossScalerOptions { growth_factor, policy: Policy::Torch, ..ok() })
                .unwrap_err();
        }
    }

    #[test]
    fn overflow_at_the_floor_is_an_error_and_keeps_the_scale() {
        let policy = Policy::Guarded { min_scale: 3.0 };
        let options = LossScalerOptions { init_scale: 8.0, policy, ..Default::default() };
        let mut scaler = LossScaler::new(options).unwrap();
        assert_eq!(scaler.update(true), Ok(ScaleChange::BackedOff));
        assert_eq!(scaler.update(true), Ok(ScaleChange::BackedOff));
        assert_eq!(scaler.scale(), 3.0);
        assert_eq!(scaler.update(true), Err(Error::ScaleAtFloor { min_scale: 3.0 }));
        assert_eq!(scaler.update(false), Ok(ScaleChange::Kept));
        assert_eq!((scaler.scale(), scaler.growth_tracker()), (3.0, 1));
    }

    #[test]
    fn growth_never_makes_the_scale_infinite() {
        let options =
            LossScalerOptions { init_scale: 3e38, growth_interval: 1, ..Default::default() };
        let mut scaler = LossScaler::new(options).unwrap();
        assert_eq!(scaler.update(false), Ok(ScaleChange::Kept));
        assert_eq!((scaler.scale(), scaler.growth_tracker()), (3e38, 0));
    }

    #[test]
    fn update_does_not_change_a_fixed_or_disabled_scale() {
        let mut fixed = LossScaler::fixed(128.0).unwrap();
        assert_eq!(fixed.update(true), Ok(ScaleChange::Kept));
        assert_eq!((fixed.scale(), fixed.inv_scale()), (128.0, 1.0 / 128.0));
        fixed.set_scale(64.0).unwrap();
        assert_eq!(fixed.scale(), 64.0);
        for scale in [0.0, -1.0, 1e-40, f32::NAN, f32::INFINITY] {
            assert!(LossScaler::fixed(scale).is_err() && fixed.set_scale(scale).is_err());
        }
        let mut disabled = LossScaler::disabled();
        assert_eq!(disabled.update(true), Ok(ScaleChange::Kept));
        assert!(!disabled.is_enabled() && disabled.scale() == 1.0);
        assert!(disabled.set_scale(2.0).is_err());
        disabled.load_state_dict(None).unwrap();
    }

    #[test]
    fn loading_a_missing_invalid_or_foreign_state_is_an_error() {
        let mut scaler = LossScaler::new(LossScalerOptions::default()).unwrap();
        let state = scaler.state_dict().unwrap();
        let error = scaler.load_state_dict(None).unwrap_err().to_string();
        assert_eq!(error, "cannot load an absent state into a scaler that is dynamic");
        let error = LossScaler::disabled().load_state_dict(Some(&state)).unwrap_err().to_string();
        let expected = "cannot load a dynamic scaler's state into a scaler that is disabled";
        assert_eq!(error, expected);
        assert_eq!(LossScaler::disabled().state_dict(), None);
        let broken = ScalerState { scale: f32::NAN, ..state };
        assert!(scaler.load_state_dict(Some(&broken)).is_err());
        assert_eq!(scaler.state_dict(), Some(state));
    }
}
