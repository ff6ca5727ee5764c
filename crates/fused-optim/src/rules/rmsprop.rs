//! RMSprop: divides the gradient by a moving average of its magnitude.

use crate::cpu::{self, Block, FirstSweep, Rule};
use crate::rule::{Hyper, at_least_zero, fields, hyper};
use crate::{CpuOptimizer, Result};

hyper! {
    /// Hyper-parameters of [`RmsProp`]; the defaults are PyTorch's.
    RmsPropHyper {
        /// Learning rate `lr`, 1e-2.
        pub lr: f64 = 1e-2,
        /// Decay rate `α` of the averages, 0.99.
        pub alpha: f64 = 0.99,
        /// `ε`, added to the root, 1e-8.
        pub eps: f64 = 1e-8,
        /// Weight decay `λ`, 0; added to the gradient as `λ·p`.
        pub weight_decay: f64 = 0.0,
        /// Momentum `μ`, 0.
        pub momentum: f64 = 0.0,
        /// Divide by the standard deviation of the gradient instead of its root mean square.
        pub centered: bool = false,
        /// Maximize instead of minimize.
        pub maximize: bool = false,
    }
}

/// RMSprop over many tensors.
///
/// With `g` the gradient times `grad_scale` (negated if `maximize`):
///
/// ```text
/// g ← g + λ·p
/// s ← α·s + (1−α)·g²             square_avg
/// a ← α·a + (1−α)·g              grad_avg, centered only
/// d = √s + ε, centered √max(s − a², 0) + ε
/// b ← μ·b + g/d                  momentum_buffer, if μ > 0, else b = g/d
/// p ← p − lr·b
/// ```
///
/// All in f32; the factors are computed in f64 and rounded once. Moves 20 bytes per f32
/// parameter, and 8 more for each of `centered` and momentum.
///
/// Follows: `torch.optim.RMSprop` and torch_npu 2.x, `optim/npu_fused_rmsprop.py`. Differs: the
/// centered variance is at least 0. With a constant gradient, rounding can make it negative, and
/// PyTorch's square root then makes the parameter NaN.
#[doc(alias = "RMSprop")]
pub type RmsProp = CpuOptimizer<RmsPropHyper>;

impl Hyper for RmsPropHyper {
    const KIND: &'static str = "rmsprop";
    type Rule = RmsRule;

    fn validate(&self) -> Result<()> {
        validate(self.lr, self.alpha, self.eps, self.weight_decay, self.momentum)
    }

    fields!(momentum);

    fn slots(&self) -> &'static [&'static str] {
        slots(self.centered, self.momentum)
    }

    fn rule(&self, _: u64, _: usize) -> RmsRule {
        RmsRule {
            weight_decay: self.weight_decay as f32,
            alpha: self.alpha as f32,
            one_minus_alpha: (1.0 - self.alpha) as f32,
            eps: self.eps as f32,
            momentum: self.momentum as f32,
            lr: self.lr as f32,
            centered: self.centered,
        }
    }

    fn sweep(rule: &RmsRule, _: FirstSweep<'_>, block: Block<'_>) {
        sweep(*rule, rule.centered, rule.momentum > 0.0, block);
    }
}

/// The numbers of one step.
#[derive(Clone, Copy, Debug)]
pub(crate) struct RmsRule {
    weight_decay: f32,
    alpha: f32,
    one_minus_alpha: f32,
    eps: f32,
    momentum: f32,
    lr: f32,
    centered: bool,
}

impl Rms for RmsRule {
    #[inline(always)]
    fn update(&self, p: f32, g: f32, old: RmsState) -> (f32, RmsState) {
        let g = g + p * self.weight_decay;
        let s = old.square * self.alpha + g * g * self.one_minus_alpha;
        let mean = old.mean.map(|a| a * self.alpha + g * self.one_minus_alpha);
        let d = mean.map_or(s, |a| variance(s, a)).sqrt() + self.eps;
        let buffer = old.buffer.map(|b| b * self.momentum + g / d);
        (p - self.lr * buffer.unwrap_or(g / d), RmsState { square: s, mean, buffer })
    }
}

/// `s − a²`, at least 0; a NaN stays NaN.
#[inline(always)]
pub(super) fn variance(s: f32, a: f32) -> f32 {
    let variance = s - a * a;
    if variance < 0.0 { 0.0 } else { variance }
}

/// An element's state; `None` for slots that a form of the rule does not have, a constant for the
/// compiler.
#[derive(Clone, Copy, Debug)]
pub(super) struct RmsState {
    pub(super) square: f32,
    pub(super) mean: Option<f32>,
    pub(super) buffer: Option<f32>,
}

/// A rule in four forms: centered or not, with momentum or not.
pub(super) trait Rms: Copy {
    /// New parameter and state. Must be `#[inline(always)]`.
    fn update(&self, p: f32, g: f32, old: RmsState) -> (f32, RmsState);
}

pub(super) fn validate(
    lr: f64,
    alpha: f64,
    eps: f64,
    weight_decay: f64,
    momentum: f64,
) -> Result<()> {
    at_least_zero("lr", lr)?;
    at_least_zero("eps", eps)?;
    at_least_zero("momentum", momentum)?;
    at_least_zero("weight_decay", weight_decay)?;
    at_least_zero("alpha", alpha)
}

pub(super) const fn slots(centered: bool, momentum: f64) -> &'static [&'static str] {
    match (centered, momentum > 0.0) {
        (false, false) => &["square_avg"],
        (true, false) => &["square_avg", "grad_avg"],
        (false, true) => &["square_avg", "momentum_buffer"],
        (true, true) => &["square_avg", "grad_avg", "momentum_buffer"],
    }
}

pub(super) fn sweep<R: Rms>(rule: R, centered: bool, momentum: bool, block: Block<'_>) {
    match (centered, momentum) {
        (false, false) => cpu::sweep::<_, 1>(&Form::<_, false, false>(rule), block),
        (true, false) => cpu::sweep::<_, 2>(&Form::<_, true, false>(rule), block),
        (false, true) => cpu::sweep::<_, 2>(&Form::<_, false, true>(rule), block),
        (true, true) => cpu::sweep::<_, 3>(&Form::<_, true, true>(rule), block),
    }
}

/// A form of the rule, with its slots.
#[derive(Clone, Copy)]
struct Form<R, const CENTERED: bool, const MOMENTUM: bool>(R);

impl<R: Rms, const CENTERED: bool, const MOMENTUM: bool, const N: usize> Rule<N>
    for Form<R, CENTERED, MOMENTUM>
{
    #[inline(always)]
    fn update(&self, p: f32, g: f32, mut state: [f32; N]) -> (f32, [f32; N]) {
        let mean = if CENTERED { Some(state[1]) } else { None };
        let buffer = if MOMENTUM { Some(state[N - 1]) } else { None };
        let (p, new) = self.0.update(p, g, RmsState { square: state[0], mean, buffer });
        state[0] = new.square;
        if let Some(mean) = new.mean {
            state[1] = mean;
        }
        if let Some(buffer) = new.buffer {
            state[N - 1] = buffer;
        }
        (p, state)
    }
}
