//! Stochastic gradient descent with momentum.

use crate::cpu::{self, Block, FirstSweep, Rule};
use crate::rule::{Hyper, at_least_zero, fields, hyper, require};
use crate::{CpuOptimizer, Error, Result};

hyper! {
    /// Hyper-parameters of [`Sgd`]; the defaults are PyTorch's.
    SgdHyper {
        /// Learning rate `lr`, 1e-3.
        pub lr: f64 = 1e-3,
        /// Momentum `μ`, 0; without it there is no state.
        pub momentum: f64 = 0.0,
        /// Dampening `τ`, 0: the momentum adds the gradient times `1 − τ`, except in the first
        /// step.
        pub dampening: f64 = 0.0,
        /// Weight decay `λ`, 0; added to the gradient as `λ·p`.
        pub weight_decay: f64 = 0.0,
        /// Use Nesterov momentum. Requires momentum and no dampening.
        pub nesterov: bool = false,
        /// Maximize instead of minimize.
        pub maximize: bool = false,
    }
}

/// SGD over many tensors.
///
/// With `g` the gradient times `grad_scale` (negated if `maximize`):
///
/// ```text
/// g ← g + λ·p
/// b ← g  at the tensor's first step, else  μ·b + (1−τ)·g      momentum_buffer, if μ > 0
/// u ← g + μ·b if nesterov, b if μ > 0, else g
/// p ← p − lr·u
/// ```
///
/// All in f32; the factors are computed in f64 and rounded once. Moves 20 bytes per f32
/// parameter with momentum, 12 without.
///
/// Follows: `torch.optim.SGD` and torch_npu 2.x, `optim/npu_fused_sgd.py`. Differs from torch_npu,
/// which never updates a tensor whose gradient first appears after step 1; here it takes its first
/// step then.
pub type Sgd = CpuOptimizer<SgdHyper>;

impl Hyper for SgdHyper {
    const KIND: &'static str = "sgd";
    type Rule = SgdRule;

    fn validate(&self) -> Result<()> {
        at_least_zero("lr", self.lr)?;
        at_least_zero("momentum", self.momentum)?;
        at_least_zero("weight_decay", self.weight_decay)?;
        require(self.dampening.is_finite(), "dampening", self.dampening)?;
        if self.nesterov && (self.momentum == 0.0 || self.dampening != 0.0) {
            return Err(Error::Nesterov);
        }
        Ok(())
    }

    fields!(momentum);

    fn slots(&self) -> &'static [&'static str] {
        if self.momentum > 0.0 { &["momentum_buffer"] } else { &[] }
    }

    fn rule(&self, step: u64, _: usize) -> SgdRule {
        // The buffer starts at zero, so the first step's `b ← g` is the general rule without
        // dampening.
        let damp = if step == 1 { 1.0 } else { 1.0 - self.dampening };
        SgdRule {
            weight_decay: self.weight_decay as f32,
            momentum: self.momentum as f32,
            damp: damp as f32,
            lr: self.lr as f32,
            nesterov: self.nesterov,
        }
    }

    fn sweep(rule: &SgdRule, _: FirstSweep<'_>, block: Block<'_>) {
        if rule.nesterov {
            cpu::sweep(&Nesterov(*rule), block);
        } else if rule.momentum > 0.0 {
            cpu::sweep::<_, 1>(rule, block);
        } else {
            cpu::sweep::<_, 0>(rule, block);
        }
    }
}

/// The numbers of one step.
#[derive(Clone, Copy, Debug)]
pub(crate) struct SgdRule {
    weight_decay: f32,
    momentum: f32,
    /// `1 − τ`, or 1 at the first step.
    damp: f32,
    lr: f32,
    nesterov: bool,
}

/// [`SgdRule`] with Nesterov momentum.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Nesterov(pub(crate) SgdRule);

impl Rule<0> for SgdRule {
    #[inline(always)]
    fn update(&self, p: f32, g: f32, []: [f32; 0]) -> (f32, [f32; 0]) {
        let g = g + p * self.weight_decay;
        (p - self.lr * g, [])
    }
}

impl Rule<1> for SgdRule {
    #[inline(always)]
    fn update(&self, p: f32, g: f32, [b]: [f32; 1]) -> (f32, [f32; 1]) {
        let g = g + p * self.weight_decay;
        let b = b * self.momentum + g * self.damp;
        (p - self.lr * b, [b])
    }
}

impl Rule<1> for Nesterov {
    #[inline(always)]
    fn update(&self, p: f32, g: f32, [b]: [f32; 1]) -> (f32, [f32; 1]) {
        let g = g + p * self.0.weight_decay;
        let b = b * self.0.momentum + g * self.0.damp;
        (p - self.0.lr * (g + b * self.0.momentum), [b])
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Optimizer, ParamMut, Slice, StepCtl};

    #[test]
    fn momentum_agrees_with_hand_computed_steps() {
        let hyper = SgdHyper { lr: 0.5, momentum: 0.5, dampening: 0.5, ..Default::default() };
        let mut sgd = Sgd::with_one_group(hyper, 1).unwrap();
        let mut weight = [4.0_f32];
        for expected in [3.0, 2.0, 1.25] {
            // b = 2, then 0.5·2 + 0.5·2 = 2, then 0.5·2 + 0.5·1 = 1.5
            let grad = if expected == 1.25 { [1.0] } else { [2.0] };
            let params = &mut [ParamMut::new(&mut weight[..], Some(Slice::F32(&grad)))];
            let _ = sgd.step(params, &StepCtl::default()).unwrap();
            assert_eq!(weight, [expected]);
        }
    }

    #[test]
    fn invalid_values_are_named_as_in_pytorch() {
        let text = |hyper| Sgd::with_one_group(hyper, 1).unwrap_err().to_string();
        let ok = SgdHyper::default;
        assert_eq!(text(SgdHyper { momentum: -0.5, ..ok() }), "invalid momentum value: -0.5");
        assert_eq!(text(SgdHyper { dampening: f64::NAN, ..ok() }), "invalid dampening value: NaN");
        let nesterov = "nesterov momentum requires a momentum and zero dampening";
        assert_eq!(text(SgdHyper { nesterov: true, ..ok() }), nesterov);
        let dampened = SgdHyper { nesterov: true, momentum: 0.9, dampening: 0.1, ..ok() };
        assert_eq!(text(dampened), nesterov);
    }
}
