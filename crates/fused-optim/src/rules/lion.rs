//! Lion: updates by the sign of the momentum.

use crate::CpuOptimizer;
use crate::rule::{at_least_zero, below_one, fields, hyper};
use crate::{ElementwiseRule, Result};

hyper! {
    /// Hyper-parameters of [`Lion`]; the defaults are the authors'.
    LionHyper {
        /// Learning rate `lr`, 1e-4.
        pub lr: f64 = 1e-4,
        /// Decay rates `(β1, β2)`: of the update and of the momentum, (0.9, 0.99); below 1.
        pub betas: (f64, f64) = (0.9, 0.99),
        /// Weight decay `λ`, 0; multiplied by `lr`.
        pub weight_decay: f64 = 0.0,
        /// Maximize instead of minimize.
        pub maximize: bool = false,
    }
}

/// Lion over many tensors. On the CPU only.
///
/// With `g` the gradient times `grad_scale` (negated if `maximize`):
///
/// ```text
/// p ← p · (1 − lr·λ)
/// u = β1·m + (1−β1)·g
/// p ← p − lr·sign(u)             sign(0) = 0
/// m ← β2·m + (1−β2)·g            exp_avg
/// ```
///
/// All in f32; the factors are computed in f64 and rounded once. A NaN stays NaN. Moves 20 bytes
/// per f32 parameter.
///
/// Follows: Chen et al., "Symbolic Discovery of Optimization Algorithms" (2023), algorithm 2; the
/// decay comes before the update, as in the authors' PyTorch code and timm's `Lion`.
pub type Lion = CpuOptimizer<LionHyper>;

impl ElementwiseRule for LionHyper {
    const KIND: &'static str = "lion";
    const SLOTS: &'static [&'static str] = &["exp_avg"];
    type State = [f32; 1];
    type Numbers = LionNumbers;

    fn validate(&self) -> Result<()> {
        at_least_zero("lr", self.lr)?;
        below_one("betas[0]", self.betas.0)?;
        below_one("betas[1]", self.betas.1)?;
        at_least_zero("weight_decay", self.weight_decay)
    }

    fields!(betas.0);

    fn numbers(&self, _: u64) -> LionNumbers {
        let (b1, b2) = self.betas;
        LionNumbers {
            decay: (1.0 - self.lr * self.weight_decay) as f32,
            lr: self.lr as f32,
            update: [b1 as f32, (1.0 - b1) as f32],
            momentum: [b2 as f32, (1.0 - b2) as f32],
        }
    }

    #[inline(always)]
    fn update(n: &LionNumbers, p: f32, g: f32, [m]: [f32; 1]) -> (f32, [f32; 1]) {
        let u = m * n.update[0] + g * n.update[1];
        // Not `signum`: the sign of 0 is 0, and a NaN must stay NaN.
        let sign = if u > 0.0 { 1.0 } else { u };
        let sign = if u < 0.0 { -1.0 } else { sign };
        (p * n.decay - n.lr * sign, [m * n.momentum[0] + g * n.momentum[1]])
    }
}

/// The numbers of one step.
#[derive(Clone, Copy, Debug)]
#[expect(unnameable_types, reason = "only the trait's methods name it")]
pub struct LionNumbers {
    decay: f32,
    lr: f32,
    /// `β1`, `1 − β1`.
    update: [f32; 2],
    /// `β2`, `1 − β2`.
    momentum: [f32; 2],
}
