//! The nine rules as sequences of operators, each that of torch_npu's optimizer of the name, on f32.
//!
//! Factors are computed in f64 and rounded once. Where torch_npu starts momentum at its first step the
//! sequence does; [`NpuHyper::sequence`] is told which step it is.

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

/// A rule that is a sequence of operators.
pub(crate) trait NpuHyper: Hyper {
    /// Adds the operators of a tensor's `step`-th step, from 1; for rules that look at whole tensors as
    /// far as the direction.
    fn sequence(&self, step: u64, ops: &mut Vec<Op>);

    /// The step as a kernel of CANN's own, of a rule and numbers that one covers.
    fn native(&self, _step: u64) -> Option<Native> {
        None
    }

    /// What of a tensor of so many rows is summed once the direction is known; nothing if the rule
    /// takes every number for itself. All tensors of a rule by rows that have no rows are left out.
    fn products(&self) -> &'static [[Reg; 2]] {
        &[]
    }

    /// What those sums make of a tensor; one per row, in f64; none of a tensor of which none are taken.
    fn conclude_sums(&self, _step: u64, _rows: &mut [Sums], _layout: Layout) -> Finish {
        Finish::default()
    }

    /// The operators that end the step of a rule with [`products`](Self::products).
    fn last(&self, _step: u64) -> Vec<Op> {
        Vec::new()
    }
}

/// A step of which CANN has kernels.
#[derive(Clone, Debug)]
pub(crate) enum Native {
    /// With what mends the moments behind the kernel.
    AdamW(AdamWNumbers, Vec<Op>),
    Sgd(SgdNumbers),
}

/// What is done to a tensor before the last operators.
#[derive(Clone, Debug, Default, PartialEq)]
pub(crate) struct Finish {
    /// What of `P` is taken from each row of `U`; nothing if empty.
    pub(crate) along: Vec<f32>,
    /// `U` is multiplied by it.
    pub(crate) direction: Option<f32>,
    /// `P` is multiplied by it.
    pub(crate) decay: Option<f32>,
}

/// `T ← G + λ·P`, if there is a decay; where the gradient is then.
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

/// What `1 − β` lacks in a kernel that is given `β` in f32, unless that is within eight roundings of f32:
/// of 0.999 it is 1.3e-5 of it.
fn rest_of(beta: f64) -> Option<f64> {
    let rest = f64::from(beta as f32) - beta;
    (rest.abs() > (1.0 - beta) * 2.0_f64.powi(-21)).then_some(rest)
}

/// `D ← √v/√(1−β2ᵗ) + ε`.
fn denominator(v: Reg, betas: (f64, f64), eps: f64, step: u64) -> [Op; 3] {
    let (_, root_correction) = bias_corrections(betas, step);
    [Sqrt(D, v), Divs(D, root_correction.recip()), Adds(D, D, eps)]
}

/// Adam from a gradient in `g` on.
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

/// `U ← m/(√v + ε) + λ·P`, of the rules without bias correction.
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
        // A step of one operator gains nothing. The kernel takes less momentum than this for none, and
        // refuses dampening below zero.
        let gains = self.momentum > 0.0 || self.weight_decay > 0.0;
        let takes = (self.momentum == 0.0 || self.momentum >= 1e-5) && self.dampening >= 0.0;
        let numbers = SgdNumbers {
            weight_decay: self.weight_decay as f32,
            momentum: self.momentum as f32,
            lr: self.lr as f32,
            dampening: self.dampening as f32,
            nesterov: self.nesterov,
            is_first_step: step == 1,
        };
        (gains && takes).then_some(Native::Sgd(numbers))
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
        let mut mend = Vec::new();
        if let Some(rest) = rest_of(self.betas.0) {
            mend.push(Add(S(0), S(0), G, rest));
        }
        if let Some(rest) = rest_of(self.betas.1) {
            mend.push(Addcmul(S(1), S(1), [G, G], rest));
        }
        // The maxima are taken inside the kernel, before anything can be mended.
        let can = !self.amsgrad || mend.is_empty();
        let numbers = AdamWNumbers {
            lr: self.lr as f32,
            betas: (self.betas.0 as f32, self.betas.1 as f32),
            weight_decay: self.weight_decay as f32,
            eps: self.eps as f32,
        };
        can.then_some(Native::AdamW(numbers, mend))
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

/// `b ← μ·b + before·g/D` and `P ← P − after·b`; of a rule without momentum `P ← P − before·after·g/D`.
fn move_by_quotient(
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

/// `D ← max(s − a², 0)`: rounding takes it below under a steady gradient, and its root is then NaN.
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
        move_by_quotient(ops, self.slots(), g, self.momentum, (1.0, self.lr));
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
        move_by_quotient(ops, self.slots(), g, self.momentum, factors);
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

    fn conclude_sums(&self, step: u64, rows: &mut [Sums], layout: Layout) -> Finish {
        let factors = Self::conclude(&mut self.rule(step, 0), rows, layout);
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

    fn conclude_sums(&self, step: u64, rows: &mut [Sums], layout: Layout) -> Finish {
        let mut rule = self.rule(step, rows.len());
        let along = Self::conclude(&mut rule, rows, layout);
        let projected = along.iter().any(|factor| *factor != 0.0);
        Finish {
            along: if projected { along } else { Vec::new() },
            decay: Some(rule.decay),
            direction: None,
        }
    }

    fn last(&self, step: u64) -> Vec<Op> {
        let (correction, _) = bias_corrections(self.betas, step);
        vec![Add(P, P, U, -self.lr * correction)]
    }
}
