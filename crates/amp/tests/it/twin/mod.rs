//! A reference scaler, written from the documentation of `torch.amp.GradScaler`, and a comparison
//! of ours with it. The fuzz target of the scaler includes this file, too.

use std::collections::HashMap;

use amp::{Error, GradScaler, InValues, LossScaler, LossScalerOptions, Policy, ScalerState};

/// A call, or a change between calls. Each optimizer `i` has one parameter.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Op {
    Scale,
    /// Backward sets the optimizer's scaled gradient, or none.
    Gradient(usize, Option<f32>),
    Unscale(usize),
    Step(usize),
    Update,
    UpdateTo(f32),
    /// Saves the state and loads it with this growth count.
    Load(u64),
    SetGrowthInterval(u64),
}

#[derive(Clone, Copy, PartialEq)]
enum Stage {
    Ready,
    Unscaled,
    Stepped,
}

struct PerOptimizer {
    stage: Stage,
    found_inf: Vec<bool>,
}

/// An SGD with learning rate 1 and one parameter.
#[derive(Clone, Copy, Default)]
pub(crate) struct Sgd {
    pub(crate) param: f32,
    pub(crate) grad: Option<f32>,
}

/// The reference scaler. With `enabled` false every call succeeds without effect.
struct Torch {
    enabled: bool,
    used: bool,
    scale: f32,
    tracker: u64,
    options: LossScalerOptions,
    per_optimizer: HashMap<usize, PerOptimizer>,
    optimizers: Vec<Sgd>,
}

impl Torch {
    fn state(&mut self, i: usize) -> &mut PerOptimizer {
        let fresh = || PerOptimizer { stage: Stage::Ready, found_inf: Vec::new() };
        self.per_optimizer.entry(i).or_insert_with(fresh)
    }

    fn min_scale(&self) -> Option<f32> {
        match self.options.policy {
            Policy::Guarded { min_scale } => Some(min_scale),
            Policy::Torch => None,
        }
    }

    fn check_scale(&self, call: &'static str) -> Result<(), Error> {
        if self.used { Ok(()) } else { Err(Error::NotScaled { call }) }
    }

    fn inv_scale(&self) -> f32 {
        (1.0 / f64::from(self.scale)) as f32
    }

    fn unscale(&mut self, i: usize) -> Result<(), Error> {
        if !self.enabled {
            return Ok(());
        }
        self.check_scale("unscale")?;
        match self.state(i).stage {
            Stage::Unscaled => return Err(Error::UnscaledTwice { optimizer: i }),
            Stage::Stepped => return Err(Error::UnscaledAfterStep { optimizer: i }),
            Stage::Ready => {}
        }
        if let Some(scaled) = self.optimizers[i].grad {
            let inv_scale = self.inv_scale();
            // PyTorch multiplies by a factor that is not finite, too.
            let grad = if inv_scale.is_finite() { scaled * inv_scale } else { scaled };
            self.optimizers[i].grad = Some(grad);
            let overflow = !scaled.is_finite() || (self.min_scale().is_some() && !grad.is_finite());
            self.state(i).found_inf.push(overflow);
        }
        self.state(i).stage = Stage::Unscaled;
        Ok(())
    }

    fn step(&mut self, i: usize) -> Result<(), Error> {
        if self.enabled {
            self.check_scale("step")?;
            match self.state(i).stage {
                Stage::Stepped => return Err(Error::SteppedTwice { optimizer: i }),
                Stage::Ready => self.unscale(i)?,
                Stage::Unscaled => {}
            }
            if self.state(i).found_inf.is_empty() {
                return Err(Error::NothingChecked { optimizer: Some(i) });
            }
            self.state(i).stage = Stage::Stepped;
            // PyTorch steps with a non-finite factor, too; we do not.
            if self.state(i).found_inf.contains(&true) || !self.inv_scale().is_finite() {
                return Ok(());
            }
        }
        let Sgd { param, grad } = &mut self.optimizers[i];
        *param -= grad.unwrap_or(0.0);
        Ok(())
    }

    fn update(&mut self, new_scale: Option<f32>) -> Result<(), Error> {
        if !self.enabled {
            return Ok(());
        }
        self.check_scale("update")?;
        let mut result = Ok(());
        if let Some(new_scale) = new_scale {
            if self.min_scale().is_some_and(|min| !(min..=f32::MAX).contains(&new_scale)) {
                let requirement = "finite and at least min_scale";
                return Err(Error::Invalid { name: "scale", value: new_scale.into(), requirement });
            }
            self.scale = new_scale;
        } else {
            let found: Vec<bool> =
                self.per_optimizer.values().flat_map(|state| state.found_inf.clone()).collect();
            if found.is_empty() {
                return Err(Error::NothingChecked { optimizer: None });
            }
            result = self.move_scale(found.contains(&true));
        }
        self.per_optimizer.clear();
        result
    }

    fn set_growth_interval(&mut self, interval: u64) -> Result<(), Error> {
        if !self.enabled {
            return Err(Error::NotDynamic);
        }
        if self.min_scale().is_some() && interval == 0 {
            let (name, value, requirement) = ("growth_interval", 0.0, "at least 1");
            return Err(Error::Invalid { name, value, requirement });
        }
        self.options.growth_interval = interval;
        Ok(())
    }

    fn move_scale(&mut self, found_inf: bool) -> Result<(), Error> {
        let times = |factor: f64| (f64::from(self.scale) * factor) as f32;
        if found_inf {
            self.tracker = 0;
            if let Some(min_scale) = self.min_scale() {
                if self.scale == min_scale {
                    return Err(Error::ScaleAtFloor { min_scale });
                }
                self.scale = times(self.options.backoff_factor).max(min_scale);
            } else {
                self.scale = times(self.options.backoff_factor);
            }
            return Ok(());
        }
        self.tracker = self.tracker.saturating_add(1);
        let interval = self.options.growth_interval;
        let stale = self.min_scale().is_some() && self.tracker > interval;
        if self.tracker == interval || stale {
            let grown = times(self.options.growth_factor);
            self.scale = if grown.is_finite() { grown } else { self.scale };
            self.tracker = 0;
        }
        Ok(())
    }
}

/// Our scaler, with optimizers that multiply their gradient by the factor of `step`.
pub(crate) struct Real {
    pub(crate) scaler: GradScaler,
    pub(crate) optimizers: Vec<Sgd>,
}

impl Real {
    pub(crate) fn unscale(&mut self, i: usize) -> Result<(), Error> {
        let grad = self.optimizers[i].grad.as_mut().map(std::slice::from_mut);
        self.scaler.unscale(i, grad).map(drop)
    }

    pub(crate) fn step(&mut self, i: usize) -> Result<(), Error> {
        let inv_scale = self.scaler.loss_scaler().inv_scale();
        let guarded = (self.scaler.loss_scaler().options())
            .is_some_and(|options| options.policy != Policy::Torch);
        let Sgd { param, grad } = &mut self.optimizers[i];
        let mut scaled = false;
        let check = || {
            scaled = true;
            // A fused step checks the scaled and the unscaled gradient.
            grad.map(|grad| !grad.is_finite() || (guarded && !(grad * inv_scale).is_finite()))
        };
        let permit = self.scaler.step(i, check);
        if let Ok(Some(factor)) = permit {
            *param -= grad.unwrap_or(0.0) * factor;
        }
        // PyTorch leaves the gradient unscaled.
        if scaled && inv_scale.is_finite() {
            *grad = grad.map(|grad| grad * inv_scale);
        }
        permit.map(drop)
    }
}

/// Runs both scalers; panics at the first difference.
pub(crate) fn compare(options: LossScalerOptions, enabled: bool, optimizers: usize, ops: &[Op]) {
    let scaler = match enabled {
        true => LossScaler::new(options).expect("the test's options are valid"),
        false => LossScaler::disabled(),
    };
    let optimizers = vec![Sgd::default(); optimizers];
    let mut real =
        Real { scaler: GradScaler::new(scaler, InValues), optimizers: optimizers.clone() };
    let scale = if enabled { options.init_scale } else { 1.0 };
    let (used, tracker, per_optimizer) = (false, 0, HashMap::new());
    let mut twin = Torch { enabled, used, scale, tracker, options, per_optimizer, optimizers };
    for (at, op) in ops.iter().enumerate() {
        let (ours, twins) = match *op {
            Op::Scale => {
                twin.used = true;
                (real.scaler.scale().map(drop), Ok(()))
            }
            Op::Gradient(i, grad) => {
                real.optimizers[i].grad = grad;
                twin.optimizers[i].grad = grad;
                (Ok(()), Ok(()))
            }
            Op::Unscale(i) => (real.unscale(i), twin.unscale(i)),
            Op::Step(i) => (real.step(i), twin.step(i)),
            Op::Update => (real.scaler.update().map(drop), twin.update(None)),
            Op::UpdateTo(scale) => (real.scaler.update_to(scale), twin.update(Some(scale))),
            Op::Load(growth_tracker) => {
                let scaler = real.scaler.loss_scaler_mut();
                let state =
                    scaler.state_dict().map(|state| ScalerState { growth_tracker, ..state });
                twin.tracker = if enabled { growth_tracker } else { 0 };
                (scaler.load_state_dict(state.as_ref()), Ok(()))
            }
            Op::SetGrowthInterval(interval) => {
                let set = real.scaler.loss_scaler_mut().set_growth_interval(interval);
                (set, twin.set_growth_interval(interval))
            }
        };
        // Compared as text, since an error with a NaN does not equal itself.
        assert_eq!(format!("{ours:?}"), format!("{twins:?}"), "call {at}, {op:?}");
        let bits = |x: f32| if x.is_nan() { f32::NAN.to_bits() } else { x.to_bits() };
        let scaler = real.scaler.loss_scaler();
        assert_eq!(bits(scaler.scale()), bits(twin.scale), "call {at}, {op:?}");
        assert_eq!(scaler.growth_tracker(), twin.tracker, "call {at}, {op:?}");
        for (ours, twins) in real.optimizers.iter().zip(&twin.optimizers) {
            assert_eq!(bits(ours.param), bits(twins.param), "call {at}, {op:?}");
            assert_eq!(ours.grad.map(bits), twins.grad.map(bits), "call {at}, {op:?}");
        }
    }
}
