//! A rule as data: a sequence of operators on f32 registers.

use npu_sys::Result;
use npu_sys::safe::{Operators, View};

/// An operand of an operator: the values of neighbouring tensors.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Reg {
    /// Parameters.
    P,
    /// Gradients, scaled and clipped. Never written by a rule.
    G,
    /// A slot of the rule's state.
    S(usize),
    /// Scratch.
    T,
    /// Scratch.
    D,
    /// The direction; kept until the end of the step for rules that need sums over whole tensors.
    U,
    /// A single zero, which is broadcast.
    Zero,
}

/// One operator, output first. An output that is also an input is updated in place.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) enum Op {
    /// `out ← x·f`.
    Muls(Reg, Reg, f64),
    /// `out ← x + f·y`.
    Add(Reg, Reg, Reg, f64),
    /// `out ← x + f`.
    Adds(Reg, Reg, f64),
    /// `out ← x + f·a·b`.
    Addcmul(Reg, Reg, [Reg; 2], f64),
    /// `x ← x + f·a/b`.
    Addcdiv(Reg, [Reg; 2], f64),
    /// `out ← √x`.
    Sqrt(Reg, Reg),
    /// `x ← x/f`.
    Divs(Reg, f64),
    /// `out ← a/b`.
    Div(Reg, [Reg; 2]),
    /// `out ← a·b`.
    Mul(Reg, [Reg; 2]),
    /// `out ← max(a, b)`.
    Max(Reg, [Reg; 2]),
    /// `out ← x`.
    Copy(Reg, Reg),
}

impl Op {
    /// Launches the operator in the stream; factors are rounded to f32 here.
    pub(super) fn launch(self, on: &Operators, view: impl Fn(Reg) -> Result<View>) -> Result<()> {
        match self {
            Self::Muls(out, x, f) => on.muls(&view(out)?, &view(x)?, f as f32),
            Self::Add(out, x, y, f) => on.add(&view(out)?, &view(x)?, &view(y)?, f as f32),
            Self::Adds(out, x, f) => on.adds(&view(out)?, &view(x)?, f as f32),
            Self::Addcmul(out, x, [a, b], f) => {
                on.addcmul(&view(out)?, &view(x)?, [&view(a)?, &view(b)?], f as f32)
            }
            Self::Addcdiv(x, [a, b], f) => on.addcdiv(&view(x)?, [&view(a)?, &view(b)?], f as f32),
            Self::Sqrt(out, x) => on.sqrt(&view(out)?, &view(x)?),
            Self::Divs(x, f) => on.divs(&view(x)?, f as f32),
            Self::Div(out, [a, b]) => on.div(&view(out)?, &view(a)?, &view(b)?),
            Self::Mul(out, [a, b]) => on.mul(&view(out)?, &view(a)?, &view(b)?),
            Self::Max(out, [a, b]) => on.maximum(&view(out)?, &view(a)?, &view(b)?),
            Self::Copy(out, x) => on.copy(&view(out)?, &view(x)?),
        }
    }
}
