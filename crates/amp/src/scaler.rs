//! The loss scale: a pure state machine.
//!
//! It keeps no gradient. Each iteration it is asked for the scale, and at the end told whether the
//! gradients overflowed; it halves on overflow and doubles after a long quiet stretch.
//!
//! Invariant: the same sequence of verdicts gives the same scale, bit for bit, on every rank. So
//! ranks that agree on the verdict need not agree on the scale.

use serde::{Deserialize, Serialize};

use crate::{Error, Result, has_non_finite, unscale};

/// How a dynamic scale moves; the defaults are PyTorch's. Keys that a saved form lacks have them, too.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct LossScalerOptions {
    /// The scale to begin with, 65536.
    pub init_scale: f32,
    /// The scale is multiplied by this after [`growth_interval`](Self::growth_interval) good
    /// steps in a row, 2; above 1.
    pub growth_factor: f64,
    /// The scale is multiplied by this on overflow, 0.5; below 1.
    pub backoff_factor: f64,
    /// Good steps in a row before the scale grows, 2000.
    pub growth_interval: u64,
    /// What happens at the edges, [`Policy::Guarded`] with a floor of 2⁻²⁴.
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

/// What happens at the edges, where PyTorch's rule goes wrong.
///
/// | | `Guarded` | `Torch` |
/// |---|---|---|
/// | overflow after overflow | the scale stops at `min_scale`; one more is [`Error::ScaleAtFloor`] | the scale sinks to 0, and nobody notices |
/// | a finite gradient divided by a scale below 1 overflows | [`unscale`](LossScaler::unscale) sees it | the optimizer steps into infinity |
/// | a loaded growth count is at or past the interval | grows at the next good step | never grows until an overflow |
/// | factors, scales and intervals that cannot work | [`Error::Invalid`] | growth above 1, backoff below 1; else any |
///
/// Anywhere else the two are one, bit for bit. Saved as `"torch"` or `{"guarded": {"min_scale": ...}}`.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case", deny_unknown_fields)]
pub enum Policy {
    /// With a floor and checks; the default.
    Guarded {
        /// The floor: at least the smallest normal `f32`, so that its reciprocal is finite.
        min_scale: f32,
    },
    /// `torch.amp.GradScaler`, bit for bit.
    Torch,
}

/// The loss scale and its rule.
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
    /// Good steps since the scale last moved.
    growth_tracker: u64,
}

#[derive(Clone, Copy, Debug, PartialEq)]
enum Mode {
    Dynamic(LossScalerOptions),
    Fixed,
    Disabled,
}

/// What [`LossScaler::update`] did to the scale.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ScaleChange {
    /// Nothing.
    Kept,
    /// It grew.
    Grown,
    /// It fell, since gradients overflowed.
    BackedOff,
}

/// What a scaler saves, under PyTorch's names. A fixed one has growth and backoff factors of 1, with which
/// PyTorch's scale stays where it is, too.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ScalerState {
    /// The scale of the next iteration.
    pub scale: f32,
    /// As in [`LossScalerOptions`].
    pub growth_factor: f64,
    /// As in [`LossScalerOptions`].
    pub backoff_factor: f64,
    /// As in [`LossScalerOptions`].
    pub growth_interval: u64,
    /// Good steps since the scale last moved.
    #[serde(rename = "_growth_tracker")]
    pub growth_tracker: u64,
}

impl LossScaler {
    /// A scale that follows the gradients.
    ///
    /// # Errors
    ///
    /// [`Error::Invalid`]: the growth factor is not above 1, the backoff factor not below; under
    /// [`Policy::Guarded`] also a scale below the floor or infinite, a backoff factor that is not
    /// positive, an interval of 0.
    pub fn new(options: LossScalerOptions) -> Result<Self> {
        options.validate()?;
        Ok(Self { mode: Mode::Dynamic(options), scale: options.init_scale, growth_tracker: 0 })
    }

    /// A scale that only [`set_scale`](Self::set_scale) moves. Overflow still skips steps.
    ///
    /// # Errors
    ///
    /// [`Error::Invalid`] if `scale` or its reciprocal is not positive and finite.
    pub fn fixed(scale: f32) -> Result<Self> {
        let mut scaler = Self { mode: Mode::Fixed, scale, growth_tracker: 0 };
        scaler.set_scale(scale)?;
        Ok(scaler)
    }

    /// No scaling: the scale is 1 and stays 1, as bf16 and f32 training want it.
    #[must_use]
    pub const fn disabled() -> Self {
        Self { mode: Mode::Disabled, scale: 1.0, growth_tracker: 0 }
    }

    /// Whether the loss is scaled at all.
    #[must_use]
    pub const fn is_enabled(&self) -> bool {
        !matches!(self.mode, Mode::Disabled)
    }

    /// What the loss is multiplied by.
    #[must_use]
    pub const fn scale(&self) -> f32 {
        self.scale
    }

    /// What gradients are multiplied by to undo it: `1 / scale`, computed in f64, rounded once.
    #[must_use]
    pub fn inv_scale(&self) -> f32 {
        f64::from(self.scale).recip() as f32
    }

    /// Good steps since the scale last moved.
    #[must_use]
    pub const fn growth_tracker(&self) -> u64 {
        self.growth_tracker
    }

    /// Divides f32 gradients by the scale, in place, and says whether any overflowed.
    ///
    /// One pass of [`unscale`](crate::unscale), which judges the gradients as they come in. With a
    /// scale below 1 the quotient can overflow too: under [`Policy::Guarded`] a second pass looks
    /// for that, under [`Policy::Torch`] nobody does. Where `1 / scale` is not finite the gradients
    /// stay as they are.
    #[must_use = "a step with non-finite gradients must be skipped"]
    pub fn unscale(&self, grads: &mut [f32]) -> bool {
        let inv_scale = self.inv_scale();
        if !inv_scale.is_finite() {
            return has_non_finite(grads);
        }
        unscale(grads, inv_scale) || (self.is_guarded() && inv_scale > 1.0 && has_non_finite(grads))
    }

    /// Whether quotients are looked at, too.
    pub(crate) fn is_guarded(&self) -> bool {
        !matches!(self.mode, Mode::Dynamic(options) if options.policy == Policy::Torch)
    }

    /// Ends an iteration: moves the scale by the verdict on its gradients.
    ///
    /// With several optimizers the verdict is that any of them saw an overflow. With several ranks
    /// it must be the same on all.
    ///
    /// # Errors
    ///
    /// [`Error::ScaleAtFloor`] under [`Policy::Guarded`].
    pub fn update(&mut self, found_inf: bool) -> Result<ScaleChange> {
        let Mode::Dynamic(options) = self.mode else { return Ok(ScaleChange::Kept) };
        if found_inf {
            return self.back_off(&options);
        }
        // A loaded count may be any number.
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

    /// Sets the scale by hand, in place of [`update`](Self::update); the growth count stays.
    ///
    /// # Errors
    ///
    /// [`Error::Invalid`] if the scale is outside its range, or this scaler is disabled.
    pub fn set_scale(&mut self, scale: f32) -> Result<()> {
        let requirement = match self.mode {
            Mode::Dynamic(options) => {
                return options.validate_scale(scale).map(|()| self.scale = scale);
            }
            Mode::Fixed if guarded(scale, f32::MIN_POSITIVE) => {
                self.scale = scale;
                return Ok(());
            }
            Mode::Fixed => "positive and finite",
            Mode::Disabled => "settable: loss scaling is disabled",
        };
        Err(Error::Invalid { name: "scale", value: scale.into(), requirement })
    }

    /// The options in force; `None` unless the scale is dynamic.
    #[must_use]
    pub const fn options(&self) -> Option<LossScalerOptions> {
        match self.mode {
            Mode::Dynamic(options) => Some(options),
            Mode::Fixed | Mode::Disabled => None,
        }
    }

    /// Sets what the scale grows by.
    ///
    /// # Errors
    ///
    /// [`Error::Invalid`] as in [`new`](Self::new), [`Error::NotDynamic`].
    pub fn set_growth_factor(&mut self, growth_factor: f64) -> Result<()> {
        self.set(|options| options.growth_factor = growth_factor)
    }

    /// Sets what the scale falls by.
    ///
    /// # Errors
    ///
    /// [`Error::Invalid`] as in [`new`](Self::new), [`Error::NotDynamic`].
    pub fn set_backoff_factor(&mut self, backoff_factor: f64) -> Result<()> {
        self.set(|options| options.backoff_factor = backoff_factor)
    }

    /// Sets how many good steps let the scale grow; those already counted stay counted.
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

    /// What to save; `None` if scaling is disabled.
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

    /// Takes over a saved state, factors and interval included; the policy stays. A fixed scaler
    /// takes the saved scale; without a saved state (older versions saved none) it keeps its own.
    ///
    /// # Errors
    ///
    /// [`Error::StateMismatch`] if the state is not of such a scaler; [`Error::Invalid`] as in
    /// [`new`](Self::new) and [`fixed`](Self::fixed).
    pub fn load_state_dict(&mut self, state: Option<&ScalerState>) -> Result<()> {
        let mismatch = |state, scaler| Err(Error::StateMismatch { state, scaler });
        let whose = match state {
            Some(state) if state.is_fixed() => "a fixed scaler's state",
            Some(_) => "a dynamic scaler's state",
            None => "an absent state",
        };
        let (options, state) = match (self.mode, state) {
            (Mode::Dynamic(options), Some(state)) if !state.is_fixed() => (options, state),
            (Mode::Fixed, Some(state)) if state.is_fixed() => return self.set_scale(state.scale),
            (Mode::Fixed | Mode::Disabled, None) => return Ok(()),
            (Mode::Dynamic(_), _) => return mismatch(whose, "dynamic"),
            (Mode::Fixed, _) => return mismatch(whose, "fixed"),
            (Mode::Disabled, _) => return mismatch(whose, "disabled"),
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
    /// Whether it is of a fixed scaler: no dynamic one has such factors.
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
            let normal = guarded(min_scale, f32::MIN_POSITIVE);
            require(normal, "min_scale", min_scale.into(), "a positive normal number")?;
            require(growth.is_finite(), "growth_factor", growth, "finite")?;
            require(backoff > 0.0, "backoff_factor", backoff, "positive")?;
            require(self.growth_interval > 0, "growth_interval", 0.0, "at least 1")?;
        }
        self.validate_scale(self.init_scale)
    }

    fn validate_scale(&self, scale: f32) -> Result<()> {
        match self.policy {
            Policy::Guarded { min_scale } if !guarded(scale, min_scale) => Err(Error::Invalid {
                name: "scale",
                value: scale.into(),
                requirement: "finite and at least min_scale",
            }),
            Policy::Guarded { .. } | Policy::Torch => Ok(()),
        }
    }
}

fn guarded(scale: f32, min_scale: f32) -> bool {
    scale.is_finite() && scale >= min_scale
}

/// The product in f64, rounded once to the f32 the scale is kept in.
fn product(scale: f32, factor: f64) -> f32 {
    (f64::from(scale) * factor) as f32
}

/// What a fixed scaler's state says beside the scale: factors that leave it where it is.
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
    fn options_outside_their_range_are_named() {
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
    fn the_floor_holds_and_says_so() {
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
    fn growth_stops_before_infinity() {
        let options =
            LossScalerOptions { init_scale: 3e38, growth_interval: 1, ..Default::default() };
        let mut scaler = LossScaler::new(options).unwrap();
        assert_eq!(scaler.update(false), Ok(ScaleChange::Kept));
        assert_eq!((scaler.scale(), scaler.growth_tracker()), (3e38, 0));
    }

    #[test]
    fn fixed_and_disabled_stay() {
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
    fn state_goes_where_it_belongs() {
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
