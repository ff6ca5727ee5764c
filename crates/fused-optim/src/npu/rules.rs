//! The nine rules as sequences of f32 operators, as in torch_npu's optimizers of the same names.
//!
//! Factors are computed in f64 and rounded once. [`NpuHyper::sequence`] depends on the step, as
//! torch_npu initializes momentum in the first step.

use npu_sys::safe::{AdamWNumbers, SgdNumbers};

use super::sequence::Op::{
    self, Add, Addcdiv, Addcmul, Adds, Copy, Div, Divs, Max, Mul, Muls, Sqrt,
};
use super::sequence::Reg::{self, D, G, P, S, T, U, Zero};
use crate::cpu::Sums;
use crate::cpu::plan::Layout;
use crate::rule::{Hyper, bias_corrections};
use crate::rules::{
    AdadeltaHyper, AdamHyper, AdamPHyper, AdamWHyper, BertAdamHyper, LambHyper, RmsPropHyper,
    RmsPropTfHyper, SgdHyper,
};

/// A rule as a sequence of operators.
pub(crate) trait NpuHyper: Hyper {
    /// Appends the operators of a tensor's `step`-th step, from 1. For rules that need sums over
    /// whole tensors, these end with the direction.
    fn sequence(&self, step: u64, ops: &mut Vec<Op>);

    /// The step for a fused kernel of CANN, if one supports the rule and its hyper-parameters.
    fn native(&self, _step: u64) -> Option<Native> {
        None
    }

    /// Products that are summed over a tensor, or its rows, after [`sequence`](Self::sequence);
    /// none for element-wise rules. A rule by rows does not sum tensors without rows.
    fn products(&self) -> &'static [[Reg; 2]] {
        &[]
    }

    /// The factors of a tensor, from its sums in f64: one per row, or none if it is not summed.
    fn finish_sums(&self, _step: u64, _rows: &mut [Sums], _layout: Layout) -> Finish {
        Finish::default()
    }

    /// The last operators of the step, for a rule with [`products`](Self::products).
    fn last(&self, _step: u64) -> Vec<Op> {
        Vec::new()
    }
}

/// A step that CANN has fused kernels for.
#[derive(Clone, Debug)]
pub(crate) enum Native {
    /// With the operators that correct the moments after the kernel.
    AdamW(AdamWNumbers, Vec<Op>),
    Sgd(SgdNumbers),
}

/// Changes to a tensor before the last operators.
#[derive(Clone, Debug, Default, PartialEq)]
pub(crate) struct Finish {
    /// Factor of each row of `P` that is subtracted from `U`; empty for no change.
    pub(crate) projection: Vec<f32>,
    /// Factor of `U`.
    pub(crate) direction: Option<f32>,
    /// Factor of `P`.
    pub(crate) decay: Option<f32>,
}

/// `T ← G + λ·P`, unless `λ` is 0. Returns the register of the gradient.
fn decayed(ops: &mut Vec<Op>, weight_decay: f64) -> Reg {
    if weight_decay == 0.0 {
        return G;
    }
    ops.push(Add(T, G, P, weight_decay));
    T
}

/// `x ← β·x + (1−β)·y`.
fn average(x: Reg, y: Reg, beta: f64) -> [Op; 2] {
    [Muls(x, x, beta), Add(x, x, y, 1.0 - beta)]
}

/// `x ← β·x + (1−β)·y²`.
fn average_square(x: Reg, y: Reg, beta: f64) -> [Op; 2] {
    [Muls(x, x, beta), Addcmul(x, x, [y, y], 1.0 - beta)]
}

/// Error of `1 − β` in a kernel that takes `β` in f32, unless it is within eight roundings of f32.
/// For 0.999 the relative error is 1.3e-5.
fn one_minus_beta_error(beta: f64) -> Option<f64> {
    let error = f64::from(beta as f32) - beta;
    (error.abs() > (1.0 - beta) * 2.0_f64.powi(-21)).then_some(error)
}

/// `D ← √v/√(1−β2ᵗ) + ε`.
fn denominator(v: Reg, betas: (f64, f64), eps: f64, step: u64) -> [Op; 3] {
    let (_, root_correction) = bias_corrections(betas, step);
    [Sqrt(D, v), Divs(D, root_correction.recip()), Adds(D, D, eps)]
}

/// Adam after the weight decay, with the gradient in `g`.
fn adam(ops: &mut Vec<Op>, g: Reg, lr: f64, betas: (f64, f64), eps: f64, amsgrad: bool, step: u64) {
    ops.extend(average(S(0), g, betas.0));
    ops.extend(average_square(S(1), g, betas.1));
    let mut v = S(1);
    if amsgrad {
        v = S(2);
        ops.push(Max(S(2), [S(2), S(1)]));
    }
    ops.extend(denominator(v, betas, eps, step));
    let (correction, _) = bias_corrections(betas, step);
    ops.push(Addcdiv(P, [S(0), D], -lr * correction));
}

/// `U ← m/(√v + ε) + λ·P`, for the rules without bias correction.
fn direction(ops: &mut Vec<Op>, betas: (f64, f64), eps: f64, weight_decay: f64) {
    ops.extend(average(S(0), G, betas.0));
    ops.extend(average_square(S(1), G, betas.1));
    ops.extend([Sqrt(D, S(1)), Adds(D, D, eps), Div(U, [S(0), D])]);
    if weight_decay != 0.0 {
        ops.push(Add(U, U, P, weight_decay));
    }
}

impl NpuHyper for SgdHyper {
    fn sequence(&self, step: u64, ops: &mut Vec<Op>) {
        let mut u = decayed(ops, self.weight_decay);
        if self.momentum > 0.0 {
            match step {
                1 => ops.push(Copy(S(0), u)),
                _ => ops.extend([
                    Muls(S(0), S(0), self.momentum),
                    Add(S(0), S(0), u, 1.0 - self.dampening),
                ]),
            }
            if self.nesterov {
                ops.push(Add(T, u, S(0), self.momentum));
            }
            u = if self.nesterov { T } else { S(0) };
        }
        ops.push(Add(P, P, u, -self.lr));
    }

    fn native(&self, step: u64) -> Option<Native> {
        // A step of a single operator is not faster fused. The kernel treats smaller momentum as 0,
        // and rejects negative dampening.
        let is_faster = self.momentum > 0.0 || self.weight_decay > 0.0;
        let is_supported = (self.momentum == 0.0 || self.momentum >= 1e-5) && self.dampening >= 0.0;
        let numbers = SgdNumbers {
            weight_decay: self.weight_decay as f32,
            momentum: self.momentum as f32,
            lr: self.lr as f32,
            dampening: self.dampening as f32,
            nesterov: self.nesterov,
            is_first_step: step == 1,
        };
        (is_faster && is_supported).then_some(Native::Sgd(numbers))
    }
}

impl NpuHyper for AdamHyper {
    fn sequence(&self, step: u64, ops: &mut Vec<Op>) {
        let g = decayed(ops, self.weight_decay);
        adam(ops, g, self.lr, self.betas, self.eps, self.amsgrad, step);
    }
}

impl NpuHyper for AdamWHyper {
    fn sequence(&self, step: u64, ops: &mut Vec<Op>) {
        if self.weight_decay != 0.0 {
            ops.push(Muls(P, P, 1.0 - self.lr * self.weight_decay));
        }
        adam(ops, G, self.lr, self.betas, self.eps, self.amsgrad, step);
    }

    fn native(&self, _: u64) -> Option<Native> {
        let mut corrections = Vec::new();
        if let Some(error) = one_minus_beta_error(self.betas.0) {
            corrections.push(Add(S(0), S(0), G, error));
        }
        if let Some(error) = one_minus_beta_error(self.betas.1) {
            corrections.push(Addcmul(S(1), S(1), [G, G], error));
        }
        // The kernel computes the maxima from moments that are not corrected yet.
        let is_supported = !self.amsgrad || corrections.is_empty();
        let numbers = AdamWNumbers {
            lr: self.lr as f32,
            betas: (self.betas.0 as f32, self.betas.1 as f32),
            weight_decay: self.weight_decay as f32,
            eps: self.eps as f32,
        };
        is_supported.then_some(Native::AdamW(numbers, corrections))
    }
}

impl NpuHyper for AdadeltaHyper {
    fn sequence(&self, _: u64, ops: &mut Vec<Op>) {
        let (s, a) = (S(0), S(1));
        let g = decayed(ops, self.weight_decay);
        ops.extend(average_square(s, g, self.rho));
        ops.extend([Adds(U, s, self.eps), Sqrt(U, U), Adds(D, a, self.eps), Sqrt(D, D)]);
        ops.extend([Div(D, [D, U]), Mul(D, [D, g]), Add(P, P, D, -self.lr)]);
        ops.extend(average_square(a, D, self.rho));
    }
}

/// `b ← μ·b + before·g/D` and `P ← P − after·b`; for a rule without momentum
/// `P ← P − before·after·g/D`.
fn update_by_quotient(
    ops: &mut Vec<Op>,
    slots: &[&str],
    g: Reg,
    momentum: f64,
    (before, after): (f64, f64),
) {
    match slots.iter().position(|slot| *slot == "momentum_buffer").map(S) {
        Some(b) => {
            ops.extend([Muls(b, b, momentum), Addcdiv(b, [g, D], before), Add(P, P, b, -after)]);
        }
        None => ops.push(Addcdiv(P, [g, D], -before * after)),
    }
}

/// `D ← max(s − a², 0)`: with a constant gradient rounding can make it negative, and its square
/// root NaN.
fn variance(s: Reg, a: Reg) -> [Op; 2] {
    [Addcmul(D, s, [a, a], -1.0), Max(D, [D, Zero])]
}

impl NpuHyper for RmsPropHyper {
    fn sequence(&self, _: u64, ops: &mut Vec<Op>) {
        let g = decayed(ops, self.weight_decay);
        ops.extend(average_square(S(0), g, self.alpha));
        if self.centered {
            ops.extend(average(S(1), g, self.alpha));
            ops.extend(variance(S(0), S(1)));
            ops.push(Sqrt(D, D));
        } else {
            ops.push(Sqrt(D, S(0)));
        }
        ops.push(Adds(D, D, self.eps));
        update_by_quotient(ops, self.slots(), g, self.momentum, (1.0, self.lr));
    }
}

impl NpuHyper for RmsPropTfHyper {
    fn sequence(&self, _: u64, ops: &mut Vec<Op>) {
        let mut g = G;
        if self.decoupled_decay {
            let decay = self.weight_decay * if self.decoupled_lr { self.lr } else { 1.0 };
            if decay != 0.0 {
                ops.push(Muls(P, P, 1.0 - decay));
            }
        } else {
            g = decayed(ops, self.weight_decay);
        }
        let rest = 1.0 - self.alpha;
        ops.extend([Mul(U, [g, g]), Add(U, U, S(0), -1.0), Add(S(0), S(0), U, rest)]);
        if self.centered {
            ops.extend([Add(U, g, S(1), -1.0), Add(S(1), S(1), U, rest)]);
            ops.extend(variance(S(0), S(1)));
            ops.push(Adds(D, D, self.eps));
        } else {
            ops.push(Adds(D, S(0), self.eps));
        }
        ops.push(Sqrt(D, D));
        let factors = if self.lr_in_momentum { (self.lr, 1.0) } else { (1.0, self.lr) };
        update_by_quotient(ops, self.slots(), g, self.momentum, factors);
    }
}

impl NpuHyper for BertAdamHyper {
    fn sequence(&self, step: u64, ops: &mut Vec<Op>) {
        direction(ops, (self.b1, self.b2), self.e, self.weight_decay);
        ops.push(Add(P, P, U, -self.lr * self.scheduled(step)));
    }
}

impl NpuHyper for LambHyper {
    fn sequence(&self, _: u64, ops: &mut Vec<Op>) {
        direction(ops, self.betas, self.eps, self.weight_decay);
    }

    fn products(&self) -> &'static [[Reg; 2]] {
        if self.adam { &[] } else { &[[P, P], [U, U]] }
    }

    fn finish_sums(&self, step: u64, rows: &mut [Sums], layout: Layout) -> Finish {
        let factors = Self::row_factors(&mut self.rule(step, 0), rows, layout);
        Finish { direction: factors.first().copied(), ..Finish::default() }
    }

    fn last(&self, _: u64) -> Vec<Op> {
        vec![Add(P, P, U, -1.0)]
    }
}

impl NpuHyper for AdamPHyper {
    fn sequence(&self, step: u64, ops: &mut Vec<Op>) {
        ops.extend(average(S(0), G, self.betas.0));
        ops.extend(average_square(S(1), G, self.betas.1));
        ops.extend(denominator(S(1), self.betas, self.eps, step));
        if self.nesterov {
            ops.extend([Muls(U, S(0), self.betas.0), Add(U, U, G, 1.0 - self.betas.0)]);
            ops.push(Div(U, [U, D]));
        } else {
            ops.push(Div(U, [S(0), D]));
        }
    }

    fn products(&self) -> &'static [[Reg; 2]] {
        &[[P, P], [G, G], [G, P], [P, U]]
    }

    fn finish_sums(&self, step: u64, rows: &mut [Sums], layout: Layout) -> Finish {
        let mut rule = self.rule(step, rows.len());
        let mut projection = Self::row_factors(&mut rule, rows, layout);
        if projection.iter().all(|factor| *factor == 0.0) {
            projection.clear();
        }
        Finish { projection, decay: Some(rule.decay), direction: None }
    }

    fn last(&self, step: u64) -> Vec<Op> {
        let (correction, _) = bias_corrections(self.betas, step);
        vec![Add(P, P, U, -self.lr * correction)]
    }
}
