//! Lamb: Adam's direction, scaled by the ratio of the norms of weight and update.

use crate::cpu::plan::Layout;
use crate::cpu::{self, Block, FirstSweep, Sums, TwoSweeps};
use crate::rule::{Hyper, Moments, OwnClip, fields, hyper, validate_adam};
use crate::{CpuOptimizer, Result};

hyper! {
    /// Hyper-parameters of [`Lamb`]; the defaults are torch_npu's.
    LambHyper {
        /// Learning rate `lr`, 1e-3.
        pub lr: f64 = 1e-3,
        /// Decay rates `(β1, β2)` of the two moments, (0.9, 0.999); below 1.
        pub betas: (f64, f64) = (0.9, 0.999),
        /// `ε`, added to the denominator, 1e-6 (torch_npu's documentation says 1e-8, its code
        /// this).
        pub eps: f64 = 1e-6,
        /// Weight decay `λ`, 0; added to the direction as `λ·p`.
        pub weight_decay: f64 = 0.0,
        /// Do not scale by the ratio of norms.
        pub adam: bool = false,
        /// Divide all gradients by the norm over all of them, if that is above 1. If one group sets
        /// it, it applies to all groups.
        pub use_global_grad_norm: bool = false,
        /// Maximize instead of minimize.
        pub maximize: bool = false,
    }
}

/// Lamb over many tensors.
///
/// With `g` the gradient times `grad_scale` (negated if `maximize`):
///
/// ```text
/// g ← g / ‖g of all tensors‖     if use_global_grad_norm, and that is above 1
/// m ← β1·m + (1−β1)·g            exp_avg
/// v ← β2·v + (1−β2)·g²           exp_avg_sq
/// u = m / (√v + ε) + λ·p
/// r = min(‖p‖, 10) / ‖u‖, or 1 if either norm is 0, or if `adam`
/// p ← p − lr·r·u
/// ```
///
/// Elements in f32; the norms are summed in f64, in an order that depends on the tensor's length
/// only. Two sweeps, 24 and 16 bytes per f32 parameter. The second runs backwards, reads from a
/// cache if the tensor fits one, and reuses the last 2^22 directions of the first, which take 16
/// MiB per thread, instead of computing them again.
///
/// Follows: torch_npu 2.x, `optim/npu_fused_lamb.py`, whose `use_global_grad_norm` fails with an
/// `AttributeError`; here it works. apex's FusedLAMB differs: bias correction, decay
/// 0.01, clipping, and no limit of 10.
pub type Lamb = CpuOptimizer<LambHyper>;

impl Hyper for LambHyper {
    const KIND: &'static str = "lamb";
    const TWO_SWEEPS: bool = true;
    type Rule = LambRule;

    fn validate(&self) -> Result<()> {
        validate_adam(self.lr, self.betas, self.eps, self.weight_decay)
    }

    fields!(betas.0);

    fn slots(&self) -> &'static [&'static str] {
        &["exp_avg", "exp_avg_sq"]
    }

    fn own_clip(&self) -> OwnClip {
        if self.use_global_grad_norm { OwnClip::Unit } else { OwnClip::None }
    }

    fn rule(&self, _: u64, _: usize) -> LambRule {
        LambRule {
            moments: Moments::new(self.betas.0, self.betas.1),
            eps: self.eps as f32,
            weight_decay: self.weight_decay as f32,
            lr: self.lr,
            adam: self.adam,
        }
    }

    fn first_sweep(
        rule: &LambRule,
        block: Block<'_>,
        directions: &mut [f32],
        sums: &mut Vec<Sums>,
    ) {
        cpu::first_sweep(rule, block, directions, sums);
    }

    fn row_factors(rule: &mut LambRule, rows: &mut [Sums], _: Layout) -> Vec<f32> {
        let norms = Sums::fold(rows);
        let (weight, direction) = (norms.pp.sqrt().min(MAX_WEIGHT_NORM), norms.uu.sqrt());
        let one = rule.adam || weight == 0.0 || direction == 0.0;
        vec![(rule.lr * if one { 1.0 } else { weight / direction }) as f32]
    }

    fn sweep(rule: &LambRule, first: FirstSweep<'_>, block: Block<'_>) {
        cpu::second_sweep(rule, first, block);
    }
}

const MAX_WEIGHT_NORM: f64 = 10.0;

/// The numbers of one step.
#[derive(Clone, Copy, Debug)]
pub(crate) struct LambRule {
    moments: Moments,
    eps: f32,
    weight_decay: f32,
    lr: f64,
    adam: bool,
}

impl TwoSweeps for LambRule {
    const COSINE: bool = false;

    #[inline(always)]
    fn state(&self, g: f32, state: [f32; 2]) -> [f32; 2] {
        self.moments.update(g, state)
    }

    #[inline(always)]
    fn direction(&self, p: f32, _: f32, [m, v]: [f32; 2]) -> f32 {
        m / (v.sqrt() + self.eps) + p * self.weight_decay
    }

    /// `factor` is `lr·r`.
    #[inline(always)]
    fn new_param(&self, factor: f32, p: f32, u: f32) -> f32 {
        p - factor * u
    }
}
