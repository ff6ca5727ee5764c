//! BertAdam: Adam without bias correction, with BERT's learning rate schedule and clipping.

use serde::{Deserialize, Serialize};

use crate::cpu::{self, Block, FirstSweep, Rule};
use crate::rule::{
    Hyper, Moments, OwnClip, at_least_zero, below_one, cos_pi, fields, hyper, require,
};
use crate::{CpuOptimizer, Result};

hyper! {
    /// Hyper-parameters of [`BertAdam`]; the defaults are torch_npu's, which has none for `lr`.
    BertAdamHyper {
        /// Peak learning rate `lr`, 1e-3.
        pub lr: f64 = 1e-3,
        /// Fraction of `t_total` used for warmup, `0 .. 1`; or -1, the default, for no warmup.
        /// [`Schedule::Linear`] with -1 starts at half the rate.
        pub warmup: f64 = -1.0,
        /// Steps of the schedule, or -1, the default, for a constant rate.
        pub t_total: i64 = -1,
        /// Learning rate schedule.
        pub schedule: Schedule = Schedule::Linear,
        /// Decay rate of the first moment, 0.9.
        pub b1: f64 = 0.9,
        /// Decay rate of the second moment, 0.999.
        pub b2: f64 = 0.999,
        /// `ε`, added to the denominator, 1e-6.
        pub e: f64 = 1e-6,
        /// Weight decay `λ`, 0.01; added to the direction as `λ·p`.
        pub weight_decay: f64 = 0.01,
        /// Largest norm of the gradients, 1; no clipping if it is 0 or negative.
        pub max_grad_norm: f64 = 1.0,
        /// Tensors whose gradients are clipped by a common norm.
        pub clip: ClipScope = ClipScope::Group,
        /// Maximize instead of minimize.
        pub maximize: bool = false,
    }
}

/// Learning rate schedule: a factor as a function of `x = (t−1) / t_total`. While `x` is below
/// `warmup` the factor is `x/warmup`, so that of the first step is 0.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[non_exhaustive]
pub enum Schedule {
    /// `max((x−1) / (warmup−1), 0)`.
    #[default]
    #[serde(rename = "warmup_linear")]
    Linear,
    /// `(1 + cos(π·x)) / 2`.
    #[serde(rename = "warmup_cosine")]
    Cosine,
    /// 1.
    #[serde(rename = "warmup_constant")]
    Constant,
    /// `√(1−x)`, and 0 past the end.
    #[serde(rename = "warmup_poly")]
    Poly,
}

/// Tensors whose norm is bounded by [`BertAdamHyper::max_grad_norm`].
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum ClipScope {
    /// All tensors of the group that have a gradient, of all types together (torch_npu clips each
    /// type separately).
    #[default]
    Group,
    /// Each tensor separately, as in the original.
    Tensor,
}

/// BertAdam over many tensors.
///
/// With `g` the gradient times `grad_scale` (negated if `maximize`) and `t` the tensor's step:
///
/// ```text
/// g ← g · min(1, max_grad_norm / (‖g‖ + 1e-6))
/// m ← b1·m + (1−b1)·g            exp_avg
/// v ← b2·v + (1−b2)·g²           exp_avg_sq
/// u = m / (√v + e) + λ·p
/// p ← p − lr · schedule((t−1) / t_total) · u
/// ```
///
/// All in f32; the factors are computed in f64 and rounded once. Reads the gradients once for
/// the norm, then moves 28 bytes per f32 parameter.
///
/// Follows: torch_npu 2.x, `optim/npu_fused_bert_adam.py`, and the original of
/// `pytorch-pretrained-bert` ([`ClipScope::Tensor`]). Differs from torch_npu, where step counts are
/// 0 in saved state, the cosine schedule fails with a `TypeError` and the polynomial one is complex
/// past its end.
pub type BertAdam = CpuOptimizer<BertAdamHyper>;

impl Hyper for BertAdamHyper {
    const KIND: &'static str = "bert_adam";
    type Rule = BertAdamRule;

    fn validate(&self) -> Result<()> {
        at_least_zero("lr", self.lr)?;
        at_least_zero("e", self.e)?;
        below_one("b1", self.b1)?;
        below_one("b2", self.b2)?;
        at_least_zero("weight_decay", self.weight_decay)?;
        let warmup = self.warmup;
        require(warmup == -1.0 || (0.0..1.0).contains(&warmup), "warmup", warmup)?;
        require(self.t_total == -1 || self.t_total > 0, "t_total", self.t_total as f64)?;
        require(self.max_grad_norm.is_finite(), "max_grad_norm", self.max_grad_norm)
    }

    fields!(b1);

    fn slots(&self) -> &'static [&'static str] {
        &["exp_avg", "exp_avg_sq"]
    }

    fn own_clip(&self) -> OwnClip {
        match self.clip {
            _ if self.max_grad_norm <= 0.0 => OwnClip::None,
            ClipScope::Group => OwnClip::Group(self.max_grad_norm),
            ClipScope::Tensor => OwnClip::Tensor(self.max_grad_norm),
        }
    }

    fn rule(&self, step: u64, _: usize) -> BertAdamRule {
        let scheduled = self.scheduled(step);
        BertAdamRule {
            moments: Moments::new(self.b1, self.b2),
            eps: self.e as f32,
            weight_decay: self.weight_decay as f32,
            lr: (self.lr * scheduled) as f32,
        }
    }

    fn sweep(rule: &BertAdamRule, _: FirstSweep<'_>, block: Block<'_>) {
        cpu::sweep(rule, block);
    }
}

impl BertAdamHyper {
    /// The schedule's factor at a tensor's `step`-th step.
    pub(crate) fn scheduled(&self, step: u64) -> f64 {
        match self.t_total {
            -1 => 1.0,
            total => self.schedule.factor((step - 1) as f64 / total as f64, self.warmup),
        }
    }
}

impl Schedule {
    /// The factor at `x`, which is 0 at the first step and 1 after `t_total` of them.
    #[must_use]
    pub fn factor(self, x: f64, warmup: f64) -> f64 {
        match self {
            _ if x < warmup => x / warmup,
            Self::Linear => ((x - 1.0) / (warmup - 1.0)).max(0.0),
            Self::Cosine => 0.5 * (1.0 + cos_pi(x)),
            Self::Constant => 1.0,
            Self::Poly => (1.0 - x).max(0.0).sqrt(),
        }
    }
}

/// The numbers of one step.
#[derive(Clone, Copy, Debug)]
pub(crate) struct BertAdamRule {
    moments: Moments,
    eps: f32,
    weight_decay: f32,
    /// Times the schedule's factor.
    lr: f32,
}

impl Rule<2> for BertAdamRule {
    #[inline(always)]
    fn update(&self, p: f32, g: f32, state: [f32; 2]) -> (f32, [f32; 2]) {
        let [m, v] = self.moments.update(g, state);
        let u = m / (v.sqrt() + self.eps) + p * self.weight_decay;
        (p - self.lr * u, [m, v])
    }
}
