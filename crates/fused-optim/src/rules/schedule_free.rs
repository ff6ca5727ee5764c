//! Schedule-free AdamW: AdamW with averaged weights instead of a learning rate schedule.

use crate::CpuOptimizer;
use crate::rule::{bias_corrections, fields, hyper, require, validate_adam};
use crate::{ElementwiseRule, Result};

hyper! {
    /// Hyper-parameters of [`ScheduleFreeAdamW`]; the defaults are the authors'.
    ScheduleFreeAdamWHyper {
        /// Learning rate `lr`, 2.5e-3.
        pub lr: f64 = 2.5e-3,
        /// `β1`, the weight of the average in `y`, above 0, and the decay rate `β2` of the second
        /// moment, (0.9, 0.999); below 1.
        pub betas: (f64, f64) = (0.9, 0.999),
        /// `ε`, added to the denominator, 1e-8.
        pub eps: f64 = 1e-8,
        /// Weight decay `λ`, 0; multiplied by `lr`.
        pub weight_decay: f64 = 0.0,
        /// Number of warmup steps of the learning rate, 0.
        pub warmup_steps: u64 = 0,
        /// Maximize instead of minimize.
        pub maximize: bool = false,
    }
}

/// Schedule-free AdamW over many tensors. On the CPU only.
///
/// The weights are `y`, where gradients are computed. Evaluate and publish the average
/// `x = (y − (1−β1)·z) / β1`, which [`eval_weights`](crate::Optimizer::eval_weights) computes:
/// before a tensor's first step the weight itself, and for a 16-bit weight with a master from the
/// master. With `g` the gradient at `y` times `grad_scale`
/// (negated if `maximize`), `t` the tensor's step and `z` initially `y`:
///
/// ```text
/// s = min(t / warmup_steps, 1),  γ = lr·s,  c = s² / (sum of s² up to t)
/// v ← β2·v + (1−β2)·g²                       exp_avg_sq
/// u = g / (√v / √(1−β2ᵗ) + ε) + λ·y
/// y ← y + c·(z − y) − γ·(1 − β1·(1−c))·u     so that y = (1−β1)·z + β1·x
/// z ← z − γ·u                                z
/// ```
///
/// All in f32; the factors are computed in f64 and rounded once. Moves 28 bytes per f32 parameter.
/// After loading weights without the state `z`, create a new optimizer: the old `z` would pull the
/// weights back.
///
/// Follows: Defazio et al., "The Road Less Scheduled" (2024), algorithm 1, with the weights and `z`
/// as state as in the authors' code. Differs: steps are counted per tensor, and `c` depends on the
/// warmup alone, not on a learning rate that was set between steps; the authors' exponents are 2
/// for the learning rate and 0 for `t`, as here.
pub type ScheduleFreeAdamW = CpuOptimizer<ScheduleFreeAdamWHyper>;

impl ElementwiseRule for ScheduleFreeAdamWHyper {
    const KIND: &'static str = "schedule_free_adamw";
    const SLOTS: &'static [&'static str] = &["z", "exp_avg_sq"];
    const HAS_EVAL_WEIGHTS: bool = true;
    type State = [f32; 2];
    type Numbers = ScheduleFreeNumbers;

    fn validate(&self) -> Result<()> {
        validate_adam(self.lr, self.betas, self.eps, self.weight_decay)?;
        // With `β1 = 0` the weights do not determine `x`.
        let b1 = self.betas.0;
        require(b1.recip().is_finite(), "betas[0]", b1)
    }

    // Not the momentum: `y` is an average with the `β1` of all steps so far.
    fields!();

    fn numbers(&self, step: u64) -> ScheduleFreeNumbers {
        let (b1, b2) = self.betas;
        let (share, c) = warmup(step, self.warmup_steps);
        let lr = self.lr * share;
        ScheduleFreeNumbers {
            is_first: step == 1,
            square: [b2 as f32, (1.0 - b2) as f32],
            root_factor: bias_corrections(self.betas, step).1 as f32,
            eps: self.eps as f32,
            weight_decay: self.weight_decay as f32,
            c: c as f32,
            lr: lr as f32,
            lr_of_weight: (lr * (1.0 - b1 * (1.0 - c))) as f32,
        }
    }

    #[inline(always)]
    fn update(n: &ScheduleFreeNumbers, y: f32, g: f32, [z, v]: [f32; 2]) -> (f32, [f32; 2]) {
        let z = if n.is_first { y } else { z };
        let v = v * n.square[0] + g * g * n.square[1];
        let u = g / (v.sqrt() * n.root_factor + n.eps) + y * n.weight_decay;
        (y + n.c * (z - y) - n.lr_of_weight * u, [z - n.lr * u, v])
    }

    fn eval_weight(&self, y: f32, [z, _]: [f32; 2]) -> f32 {
        let b1 = self.betas.0;
        ((f64::from(y) - (1.0 - b1) * f64::from(z)) / b1) as f32
    }
}

/// The warmup factor `s` of a step, and its weight `c` in the average.
fn warmup(step: u64, steps: u64) -> (f64, f64) {
    let (t, w) = (step as f64, steps.max(1) as f64);
    let share = (t / w).min(1.0);
    // The sum of squares up to the end of the warmup in closed form, and 1 for each step after it.
    let k = t.min(w);
    let sum = k * (k + 1.0) * (2.0 * k + 1.0) / 6.0 / (w * w) + (t - k);
    (share, share * share / sum)
}

/// The numbers of one step.
#[derive(Clone, Copy, Debug)]
#[expect(unnameable_types, reason = "only the trait's methods name it")]
pub struct ScheduleFreeNumbers {
    is_first: bool,
    /// `β2`, `1 − β2`.
    square: [f32; 2],
    /// `1 / √(1−β2ᵗ)`.
    root_factor: f32,
    eps: f32,
    weight_decay: f32,
    c: f32,
    lr: f32,
    /// `γ·(1 − β1·(1−c))`.
    lr_of_weight: f32,
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Error, Optimizer, ParamMut, Slice, StepCtl};

    #[test]
    fn average_weights_are_squared_warmup_factors() {
        for steps in [0, 1, 2, 7] {
            let mut sum = 0.0;
            for step in 1..20 {
                let share = if steps == 0 { 1.0 } else { (step as f64 / steps as f64).min(1.0) };
                sum += share * share;
                let (got, c) = warmup(step, steps);
                assert!((got - share).abs() < 1e-15 && (c - share * share / sum).abs() < 1e-14);
            }
        }
    }

    #[test]
    fn eval_weights_are_the_average_of_z() {
        let hyper = ScheduleFreeAdamWHyper { lr: 0.5, betas: (0.75, 0.9), ..Default::default() };
        let mut optimizer = ScheduleFreeAdamW::with_one_group(hyper, 1).unwrap();
        let mut weight = [1.0_f32, -2.0];
        let mut x = [0.0; 2];
        optimizer.eval_weights(0, Slice::F32(&weight), &mut x).unwrap();
        assert_eq!(x, weight);
        let mut sum = [0.0; 2];
        for step in 1..=4 {
            let param = ParamMut::new(&mut weight[..], Some(Slice::F32(&[0.5, -0.25])));
            let _ = optimizer.step(&mut [param], &StepCtl::PLAIN).unwrap();
            let z = optimizer.state_dict().unwrap().state[&0].tensors["z"].clone();
            sum.iter_mut().zip(&z).for_each(|(sum, z)| *sum += z);
            optimizer.eval_weights(0, Slice::F32(&weight), &mut x).unwrap();
            for (x, sum) in x.iter().zip(sum) {
                assert!((x - sum / step as f32).abs() < 1e-6, "{x} {sum} {step}");
            }
        }
        let short = optimizer.eval_weights(0, Slice::F32(&weight[..1]), &mut x[..1]);
        assert!(matches!(short, Err(Error::LengthMismatch { what: "state", .. })));
        let missing = optimizer.eval_weights(1, Slice::F32(&weight), &mut x);
        assert!(matches!(missing, Err(Error::MissingParam { index: 1, .. })));
        let none = ScheduleFreeAdamWHyper { betas: (0.0, 0.9), ..hyper };
        let refused = ScheduleFreeAdamW::with_one_group(none, 1).unwrap_err().to_string();
        assert_eq!(refused, "invalid beta parameter at index 0: 0");
    }
}
