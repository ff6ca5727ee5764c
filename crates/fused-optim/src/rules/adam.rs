//! Adam, and the code that it shares with AdamW.

use crate::cpu::{self, Block, FirstSweep, Rule};
use crate::rule::{Hyper, Moments, bias_corrections, fields, hyper, validate_adam};
use crate::{CpuOptimizer, Result};

hyper! {
    /// Hyper-parameters of [`Adam`]; the defaults are PyTorch's.
    AdamHyper {
        /// Learning rate `lr`, 1e-3.
        pub lr: f64 = 1e-3,
        /// Decay rates `(β1, β2)` of the two moments, (0.9, 0.999); below 1.
        pub betas: (f64, f64) = (0.9, 0.999),
        /// `ε`, added to the denominator, 1e-8.
        pub eps: f64 = 1e-8,
        /// Weight decay `λ`, 0; added to the gradient as `λ·p`.
        pub weight_decay: f64 = 0.0,
        /// Divide by the largest second moment so far instead of the current one.
        pub amsgrad: bool = false,
        /// Maximize instead of minimize.
        pub maximize: bool = false,
    }
}

/// Adam over many tensors.
///
/// With `g` the gradient times `grad_scale` (negated if `maximize`) and `t` the tensor's step:
///
/// ```text
/// g ← g + λ·p
/// m ← β1·m + (1−β1)·g            exp_avg
/// v ← β2·v + (1−β2)·g²           exp_avg_sq
/// x ← max(x, v)                  max_exp_avg_sq, amsgrad only (else x = v)
/// p ← p − lr/(1−β1ᵗ) · m / (√x / √(1−β2ᵗ) + ε)
/// ```
///
/// All in f32; the factors are computed in f64 and rounded once. `√x` is multiplied by the
/// rounded reciprocal of `√(1−β2ᵗ)`. Moves 28 bytes per f32 parameter (36 with `amsgrad`).
///
/// Follows: `torch.optim.Adam` and torch_npu 2.x, `optim/npu_fused_adam.py`, but counts steps
/// per tensor, so a tensor without a gradient is not corrected for steps it has not taken.
///
/// [`AdamW`](crate::AdamW) differs only in the weight decay.
pub type Adam = CpuOptimizer<AdamHyper>;

/// Implements `Adam` or `AdamW`; `decoupled` is whether weight decay is decoupled from the
/// gradient.
macro_rules! adam {
    ($name:ident, $hyper:ident, $kind:literal, decoupled: $decoupled:literal) => {
        impl $name {
            /// Stores state in eight bits per value instead of 32: 2 bytes per parameter, and one
            /// per 256 values, instead of 8. Call this before the first step or load; loading f32
            /// state quantizes it.
            ///
            /// The relative error of a stored first moment is below 1/8, of a second one below
            /// 1/16; rounding is stochastic and unbiased. This does not hold for values below 2⁻¹⁴
            /// of the largest of their group of 256; such second moments are raised to about that,
            /// so that no step grows. State dicts hold f32 and restore the same bits.
            #[must_use]
            pub fn with_8bit_state(mut self) -> Self {
                self.core.eight_bits = true;
                self
            }
        }

        impl Hyper for $hyper {
            const KIND: &'static str = $kind;
            type Rule = AdamRule;

            fn validate(&self) -> Result<()> {
                validate_adam(self.lr, self.betas, self.eps, self.weight_decay)
            }

            fields!(betas.0);

            fn slots(&self) -> &'static [&'static str] {
                match self.amsgrad {
                    true => &["exp_avg", "exp_avg_sq", "max_exp_avg_sq"],
                    false => &["exp_avg", "exp_avg_sq"],
                }
            }

            fn rule(&self, step: u64, _: usize) -> AdamRule {
                let (correction, root_correction) = bias_corrections(self.betas, step);
                let decay = (1.0 - self.lr * self.weight_decay) as f32;
                AdamRule {
                    decay: if $decoupled { decay } else { 1.0 },
                    weight_decay: if $decoupled { 0.0 } else { self.weight_decay as f32 },
                    moments: Moments::new(self.betas.0, self.betas.1),
                    root_factor: root_correction as f32,
                    eps: self.eps as f32,
                    step_size: (self.lr * correction) as f32,
                    amsgrad: self.amsgrad,
                }
            }

            fn sweep(rule: &AdamRule, _: FirstSweep<'_>, block: Block<'_>) {
                rule.sweep(block);
            }
        }
    };
}
pub(super) use adam;

adam!(Adam, AdamHyper, "adam", decoupled: false);

/// The numbers of one step. `decay` is 1 for Adam and `weight_decay` 0 for AdamW, which change no
/// bit of a finite number.
#[derive(Clone, Copy, Debug)]
pub(crate) struct AdamRule {
    /// AdamW's `1 − lr·λ`.
    pub(super) decay: f32,
    /// Adam's `λ`.
    pub(super) weight_decay: f32,
    pub(super) moments: Moments,
    /// `1 / √(1−β2ᵗ)`.
    pub(super) root_factor: f32,
    pub(super) eps: f32,
    /// `lr / (1−β1ᵗ)`.
    pub(super) step_size: f32,
    pub(super) amsgrad: bool,
}

impl AdamRule {
    pub(super) fn sweep(&self, block: Block<'_>) {
        if self.amsgrad {
            cpu::sweep::<_, 3>(self, block);
        } else {
            cpu::sweep::<_, 2>(self, block);
        }
    }

    #[inline(always)]
    fn new_param(&self, p: f32, m: f32, v: f32) -> f32 {
        p * self.decay - self.step_size * (m / (v.sqrt() * self.root_factor + self.eps))
    }
}

impl Rule<2> for AdamRule {
    #[inline(always)]
    fn update(&self, p: f32, g: f32, state: [f32; 2]) -> (f32, [f32; 2]) {
        let [m, v] = self.moments.update(g + p * self.weight_decay, state);
        (self.new_param(p, m, v), [m, v])
    }
}

impl Rule<3> for AdamRule {
    #[inline(always)]
    fn update(&self, p: f32, g: f32, [m, v, max]: [f32; 3]) -> (f32, [f32; 3]) {
        let [m, v] = self.moments.update(g + p * self.weight_decay, [m, v]);
        // Not `f32::max`: a NaN in `v` must stay NaN.
        let max = if max > v { max } else { v };
        (self.new_param(p, m, max), [m, v, max])
    }
}
