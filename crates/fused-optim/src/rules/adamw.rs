//! AdamW: Adam with decoupled weight decay.

use super::adam::{AdamRule, adam};
use crate::cpu::{Block, FirstSweep};
use crate::rule::{Hyper, Moments, bias_corrections, fields, hyper, validate_adam};
use crate::{CpuOptimizer, Result};

hyper! {
    /// Hyper-parameters of [`AdamW`]; the defaults are PyTorch's.
    AdamWHyper {
        /// Learning rate `lr`, 1e-3.
        pub lr: f64 = 1e-3,
        /// Decay rates `(β1, β2)` of the two moments, (0.9, 0.999); below 1.
        pub betas: (f64, f64) = (0.9, 0.999),
        /// `ε`, added to the denominator, 1e-8.
        pub eps: f64 = 1e-8,
        /// Weight decay `λ`, 1e-2; multiplied by `lr`, and not added to the gradient.
        pub weight_decay: f64 = 1e-2,
        /// Divide by the largest second moment so far instead of the current one.
        pub amsgrad: bool = false,
        /// Maximize instead of minimize.
        pub maximize: bool = false,
    }
}

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
pub type AdamW = CpuOptimizer<AdamWHyper>;

adam!(AdamW, AdamWHyper, "adamw", decoupled: true);

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
