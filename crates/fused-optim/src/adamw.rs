//! AdamW: Adam with the weight decay taken out of the gradient.

use std::ops::Range;

use serde::{Deserialize, Serialize};

use crate::Result;
use crate::core::{Hyper, at_least_zero, below_one, optimizer};
use crate::cpu::{self, Rule};

/// Hyper-parameters of [`AdamW`]; the defaults are PyTorch's.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct AdamWHyper {
    /// Learning rate `lr`, 1e-3.
    pub lr: f64,
    /// Decay rates `(β1, β2)` of the two moments, (0.9, 0.999); below 1.
    pub betas: (f64, f64),
    /// `ε`, added to the denominator, 1e-8.
    pub eps: f64,
    /// Weight decay `λ`, 1e-2; multiplied by `lr`, not by the gradient's statistics.
    pub weight_decay: f64,
    /// Divide by the largest second moment so far instead of the present one.
    pub amsgrad: bool,
    /// Go up the gradient instead of down.
    pub maximize: bool,
}

impl Default for AdamWHyper {
    fn default() -> Self {
        Self {
            lr: 1e-3,
            betas: (0.9, 0.999),
            eps: 1e-8,
            weight_decay: 1e-2,
            amsgrad: false,
            maximize: false,
        }
    }
}

optimizer! {
    /// AdamW over many tensors.
    ///
    /// With `g` the gradient times `grad_scale` (negated if `maximize`) and `t` the tensor's step:
    ///
    /// ```text
    /// p ← p · (1 − lr·λ)
    /// m ← β1·m + (1−β1)·g            exp_avg
    /// v ← β2·v + (1−β2)·g²           exp_avg_sq
    /// x ← max(x, v)                  max_exp_avg_sq, amsgrad only (else x = v)
    /// p ← p − lr/(1−β1ᵗ) · m / (√x / √(1−β2ᵗ) + ε)
    /// ```
    ///
    /// All in f32; the factors are computed in f64 and rounded once. `√x` is multiplied by the
    /// rounded reciprocal of `√(1−β2ᵗ)`. Moves 28 bytes per f32 parameter (36 with `amsgrad`).
    ///
    /// Follows: `torch.optim.AdamW` and torch_npu 2.x, `optim/npu_fused_adamw.py`, but counts steps
    /// per tensor, so a tensor without a gradient is not corrected for steps it has not taken.
    AdamW, AdamWHyper
}

impl Hyper for AdamWHyper {
    const KIND: &'static str = "adamw";
    type Rule = AdamWRule;

    fn validate(&self) -> Result<()> {
        at_least_zero("learning rate", self.lr)?;
        at_least_zero("epsilon value", self.eps)?;
        below_one("beta parameter at index 0", self.betas.0)?;
        below_one("beta parameter at index 1", self.betas.1)?;
        at_least_zero("weight_decay value", self.weight_decay)
    }

    fn lr(&self) -> f64 {
        self.lr
    }

    fn lr_mut(&mut self) -> &mut f64 {
        &mut self.lr
    }

    fn slots(&self) -> &'static [&'static str] {
        if self.amsgrad {
            &["exp_avg", "exp_avg_sq", "max_exp_avg_sq"]
        } else {
            &["exp_avg", "exp_avg_sq"]
        }
    }

    fn rule(&self, step: u64, grad_scale: f32) -> AdamWRule {
        let (beta1, beta2) = self.betas;
        let correction1 = 1.0 - beta1.powf(step as f64);
        let correction2 = 1.0 - beta2.powf(step as f64);
        AdamWRule {
            grad_scale: if self.maximize { -grad_scale } else { grad_scale },
            decay: (1.0 - self.lr * self.weight_decay) as f32,
            beta1: beta1 as f32,
            one_minus_beta1: (1.0 - beta1) as f32,
            beta2: beta2 as f32,
            one_minus_beta2: (1.0 - beta2) as f32,
            root_factor: correction2.sqrt().recip() as f32,
            eps: self.eps as f32,
            step_size: (self.lr / correction1) as f32,
        }
    }

    fn sweep(
        rule: &AdamWRule,
        param: &mut [f32],
        grad: &[f32],
        state: &mut [Vec<f32>],
        range: Range<usize>,
    ) {
        match state {
            [m, v] => {
                cpu::sweep(rule, param, grad, [&mut m[range.clone()], &mut v[range]]);
            }
            [m, v, max] => {
                let state = [&mut m[range.clone()], &mut v[range.clone()], &mut max[range]];
                cpu::sweep(rule, param, grad, state);
            }
            _ => unreachable!("`slots` names two or three"),
        }
    }
}

/// The numbers of one step.
#[derive(Clone, Copy, Debug)]
pub(crate) struct AdamWRule {
    /// Negative if the rule maximizes.
    grad_scale: f32,
    /// `1 − lr·λ`.
    decay: f32,
    beta1: f32,
    one_minus_beta1: f32,
    beta2: f32,
    one_minus_beta2: f32,
    /// `1 / √(1−β2ᵗ)`.
    root_factor: f32,
    eps: f32,
    /// `lr / (1−β1ᵗ)`.
    step_size: f32,
}

impl AdamWRule {
    #[inline(always)]
    fn moments(&self, grad: f32, m: f32, v: f32) -> (f32, f32) {
        let g = grad * self.grad_scale;
        let m = m * self.beta1 + g * self.one_minus_beta1;
        let v = v * self.beta2 + g * g * self.one_minus_beta2;
        (m, v)
    }

    #[inline(always)]
    fn param(&self, param: f32, m: f32, v: f32) -> f32 {
        let denominator = v.sqrt() * self.root_factor + self.eps;
        param * self.decay - self.step_size * (m / denominator)
    }
}

impl Rule<2> for AdamWRule {
    #[inline(always)]
    fn update(&self, param: f32, grad: f32, [m, v]: [f32; 2]) -> (f32, [f32; 2]) {
        let (m, v) = self.moments(grad, m, v);
        (self.param(param, m, v), [m, v])
    }
}

impl Rule<3> for AdamWRule {
    #[inline(always)]
    fn update(&self, param: f32, grad: f32, [m, v, max]: [f32; 3]) -> (f32, [f32; 3]) {
        let (m, v) = self.moments(grad, m, v);
        // Written so that a NaN in `v` wins.
        let max = if max > v { max } else { v };
        (self.param(param, m, max), [m, v, max])
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Error, Optimizer, ParamMut, Slice, StepCtl};

    #[test]
    fn first_step_moves_by_lr_along_the_sign() {
        // At t = 1 the bias corrections cancel: m/(1-β1) = g and √(v/(1-β2)) = |g|.
        let hyper = AdamWHyper { weight_decay: 0.0, ..Default::default() };
        let mut adamw = AdamW::with_one_group(hyper, 1).unwrap();
        let mut weight = [1.0_f32, 1.0];
        let params = &mut [ParamMut::new(&mut weight[..], Some(Slice::F32(&[0.5, -20.0])))];
        let _ = adamw.step(params, &StepCtl::default()).unwrap();
        assert!((weight[0] - 0.999).abs() < 1e-6 && (weight[1] - 1.001).abs() < 1e-6);
    }

    #[test]
    fn invalid_values_are_named_as_in_pytorch() {
        let text = |hyper| AdamW::with_one_group(hyper, 1).unwrap_err().to_string();
        let ok = AdamWHyper::default;
        assert_eq!(text(AdamWHyper { lr: -1.0, ..ok() }), "invalid learning rate: -1");
        assert_eq!(text(AdamWHyper { eps: -1.0, ..ok() }), "invalid epsilon value: -1");
        let betas = AdamWHyper { betas: (1.0, 0.9), ..ok() };
        assert_eq!(text(betas), "invalid beta parameter at index 0: 1");
        let betas = AdamWHyper { betas: (0.9, f64::NAN), ..ok() };
        assert_eq!(text(betas), "invalid beta parameter at index 1: NaN");
        assert_eq!(
            text(AdamWHyper { weight_decay: -0.1, ..ok() }),
            "invalid weight_decay value: -0.1"
        );
        let mut adamw = AdamW::with_one_group(ok(), 1).unwrap();
        assert!(matches!(adamw.set_lr(0, f64::NAN), Err(Error::InvalidHyper { .. })));
        assert!(matches!(adamw.set_lr(1, 0.1), Err(Error::NoSuchGroup { group: 1, count: 1 })));
        assert_eq!(adamw.lr(0).unwrap(), 1e-3);
    }
}
