//! Adadelta: the step size of each element follows the size of its recent updates.

use crate::cpu::{self, Block, FirstSweep, Rule};
use crate::rule::{Hyper, at_least_zero, fields, hyper, require};
use crate::{CpuOptimizer, Result};

hyper! {
    /// Hyper-parameters of [`Adadelta`]; the defaults are PyTorch's.
    AdadeltaHyper {
        /// Learning rate `lr`, 1: a factor on the adaptive step size.
        pub lr: f64 = 1.0,
        /// Decay rate `ρ` of both averages, 0.9; `0 ..= 1`.
        pub rho: f64 = 0.9,
        /// `ε`, under both roots, 1e-6.
        pub eps: f64 = 1e-6,
        /// Weight decay `λ`, 0; added to the gradient as `λ·p`.
        pub weight_decay: f64 = 0.0,
        /// Maximize instead of minimize.
        pub maximize: bool = false,
    }
}

/// Adadelta over many tensors.
///
/// With `g` the gradient times `grad_scale` (negated if `maximize`):
///
/// ```text
/// g ← g + λ·p
/// s ← ρ·s + (1−ρ)·g²             square_avg
/// d = √(a + ε) / √(s + ε) · g
/// p ← p − lr·d
/// a ← ρ·a + (1−ρ)·d²             acc_delta
/// ```
///
/// All in f32; the factors are computed in f64 and rounded once. Moves 28 bytes per f32
/// parameter.
///
/// Follows: `torch.optim.Adadelta` and torch_npu 2.x, `optim/npu_fused_adadelta.py`.
pub type Adadelta = CpuOptimizer<AdadeltaHyper>;

impl Hyper for AdadeltaHyper {
    const KIND: &'static str = "adadelta";
    type Rule = AdadeltaRule;

    fn validate(&self) -> Result<()> {
        at_least_zero("lr", self.lr)?;
        require((0.0..=1.0).contains(&self.rho), "rho", self.rho)?;
        at_least_zero("eps", self.eps)?;
        at_least_zero("weight_decay", self.weight_decay)
    }

    fields!();

    fn slots(&self) -> &'static [&'static str] {
        &["square_avg", "acc_delta"]
    }

    fn rule(&self, _: u64, _: usize) -> AdadeltaRule {
        AdadeltaRule {
            weight_decay: self.weight_decay as f32,
            rho: self.rho as f32,
            one_minus_rho: (1.0 - self.rho) as f32,
            eps: self.eps as f32,
            lr: self.lr as f32,
        }
    }

    fn sweep(rule: &AdadeltaRule, _: FirstSweep<'_>, block: Block<'_>) {
        cpu::sweep(rule, block);
    }
}

/// The numbers of one step.
#[derive(Clone, Copy, Debug)]
pub(crate) struct AdadeltaRule {
    weight_decay: f32,
    rho: f32,
    one_minus_rho: f32,
    eps: f32,
    lr: f32,
}

impl Rule<2> for AdadeltaRule {
    #[inline(always)]
    fn update(&self, p: f32, g: f32, [s, a]: [f32; 2]) -> (f32, [f32; 2]) {
        let g = g + p * self.weight_decay;
        let s = s * self.rho + g * g * self.one_minus_rho;
        let d = (a + self.eps).sqrt() / (s + self.eps).sqrt() * g;
        let a = a * self.rho + d * d * self.one_minus_rho;
        (p - self.lr * d, [s, a])
    }
}
