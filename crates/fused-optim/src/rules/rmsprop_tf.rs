//! TensorFlow's RMSprop, used to train EfficientNet.

use super::rmsprop::{self, Rms, RmsState, variance};
use crate::cpu::{Block, FirstSweep};
use crate::rule::{Hyper, fields, hyper};
use crate::{CpuOptimizer, Result};

hyper! {
    /// Hyper-parameters of [`RmsPropTf`]; the defaults are torch_npu's.
    RmsPropTfHyper {
        /// Learning rate `lr`, 1e-2.
        pub lr: f64 = 1e-2,
        /// Decay rate `α` of the averages, 0.9 (torch_npu's documentation says 0.99, its code
        /// this).
        pub alpha: f64 = 0.9,
        /// `ε`, under the root, 1e-10.
        pub eps: f64 = 1e-10,
        /// Weight decay `λ`, 0.
        pub weight_decay: f64 = 0.0,
        /// Momentum `μ`, 0.
        pub momentum: f64 = 0.0,
        /// Divide by the standard deviation of the gradient instead of its root mean square.
        pub centered: bool = false,
        /// Apply the decay to the weight instead of adding it to the gradient.
        pub decoupled_decay: bool = false,
        /// Multiply the decoupled decay by `lr`, as timm does; torch_npu does not.
        pub decoupled_lr: bool = false,
        /// Multiply by the learning rate inside the momentum, as TensorFlow does.
        pub lr_in_momentum: bool = true,
        /// Maximize instead of minimize.
        pub maximize: bool = false,
    }
}

/// TensorFlow's RMSprop over many tensors.
///
/// With `g` the gradient times `grad_scale` (negated if `maximize`):
///
/// ```text
/// p ← p − λ·p if decoupled_decay, − lr·λ·p if also decoupled_lr;  else g ← g + λ·p
/// s ← s + (1−α)·(g² − s)         square_avg, initially 1
/// a ← a + (1−α)·(g − a)          grad_avg, centered only
/// d = √(s + ε), centered √(max(s − a², 0) + ε)
/// without momentum:              p ← p − lr·g/d
/// with lr_in_momentum:           b ← μ·b + lr·g/d;  p ← p − b        momentum_buffer
/// else:                          b ← μ·b + g/d;     p ← p − lr·b     momentum_buffer
/// ```
///
/// All in f32; the factors are computed in f64 and rounded once. Moves 20 bytes per f32
/// parameter, and 8 more for each of `centered` and momentum.
///
/// Follows: torch_npu 2.x, `optim/npu_fused_rmsprop_tf.py`; `decoupled_lr` gives timm's
/// `RMSpropTF`. Differs: the centered variance is at least 0.
#[doc(alias = "RMSpropTF")]
pub type RmsPropTf = CpuOptimizer<RmsPropTfHyper>;

impl Hyper for RmsPropTfHyper {
    const KIND: &'static str = "rmsprop_tf";
    type Rule = RmsTfRule;

    fn validate(&self) -> Result<()> {
        rmsprop::validate(self.lr, self.alpha, self.eps, self.weight_decay, self.momentum)
    }

    fields!(momentum);

    fn slots(&self) -> &'static [&'static str] {
        rmsprop::slots(self.centered, self.momentum)
    }

    fn initial(&self, slot: &str) -> f32 {
        if slot == "square_avg" { 1.0 } else { 0.0 }
    }

    fn rule(&self, _: u64, _: usize) -> RmsTfRule {
        let decoupled = self.weight_decay * if self.decoupled_lr { self.lr } else { 1.0 };
        let (decay, weight_decay) = match self.decoupled_decay {
            true => (decoupled, 0.0),
            false => (0.0, self.weight_decay),
        };
        let (lr_before, lr_after) = match self.momentum > 0.0 && self.lr_in_momentum {
            true => (self.lr, 1.0),
            false => (1.0, self.lr),
        };
        RmsTfRule {
            decay: decay as f32,
            weight_decay: weight_decay as f32,
            one_minus_alpha: (1.0 - self.alpha) as f32,
            eps: self.eps as f32,
            momentum: self.momentum as f32,
            lr_before: lr_before as f32,
            lr_after: lr_after as f32,
            centered: self.centered,
        }
    }

    fn sweep(rule: &RmsTfRule, _: FirstSweep<'_>, block: Block<'_>) {
        rmsprop::sweep(*rule, rule.centered, rule.momentum > 0.0, block);
    }
}

/// The numbers of one step.
#[derive(Clone, Copy, Debug)]
pub(crate) struct RmsTfRule {
    /// Decoupled decay of the weight, else 0.
    decay: f32,
    /// Decay added to the gradient, else 0.
    weight_decay: f32,
    one_minus_alpha: f32,
    eps: f32,
    momentum: f32,
    /// `lr` if it is inside the momentum, else 1.
    lr_before: f32,
    /// 1 if `lr` is inside the momentum, else `lr`.
    lr_after: f32,
    centered: bool,
}

impl Rms for RmsTfRule {
    #[inline(always)]
    fn update(&self, p: f32, g: f32, old: RmsState) -> (f32, RmsState) {
        let g = g + p * self.weight_decay;
        let p = p - p * self.decay;
        let s = old.square + self.one_minus_alpha * (g * g - old.square);
        let mean = old.mean.map(|a| a + self.one_minus_alpha * (g - a));
        let d = (mean.map_or(s, |a| variance(s, a)) + self.eps).sqrt();
        let u = self.lr_before * (g / d);
        let buffer = old.buffer.map(|b| b * self.momentum + u);
        (p - self.lr_after * buffer.unwrap_or(u), RmsState { square: s, mean, buffer })
    }
}
