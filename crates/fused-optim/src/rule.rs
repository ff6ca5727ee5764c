//! The trait of update rules, and arithmetic and macros that rules share.

use std::f64::consts::PI;
use std::fmt;

use serde::Serialize;
use serde::de::DeserializeOwned;

use crate::cpu::plan::Layout;
use crate::cpu::{self, Block, FirstSweep, GradMap, Rule, SLOTS, Sums};
use crate::{Error, HyperParam, Result};

/// A rule's hyper-parameters, and the rule.
///
/// Most rules update a parameter in one sweep over memory, with [`sweep`](Self::sweep) alone. A
/// rule with [`TWO_SWEEPS`](Self::TWO_SWEEPS) needs sums over the tensor first:
/// [`first_sweep`](Self::first_sweep) updates the state and sums a block,
/// [`row_factors`](Self::row_factors) turns the sums of a tensor's rows into one factor per row, an
/// argument of `sweep`. A rule [by tensor](Self::BY_TENSOR) has
/// [`finish_directions`](Self::finish_directions) instead of `row_factors`.
pub(crate) trait Hyper:
    Clone + fmt::Debug + Send + Sync + Serialize + DeserializeOwned
{
    /// The rule's name in state dicts.
    const KIND: &'static str;
    /// Whether the rule needs sums over the tensor, and so two sweeps.
    const TWO_SWEEPS: bool = false;
    /// Whether sums are taken per row of a tensor.
    const BY_ROWS: bool = false;
    /// Whether one thread computes the directions of a whole tensor between the two sweeps.
    const BY_TENSOR: bool = false;
    /// Whether evaluation uses other weights than training, see `to_eval_weights`.
    const HAS_EVAL_WEIGHTS: bool = false;
    /// Numbers computed once per tensor and step.
    type Rule: Copy + Send + Sync;

    /// Returns an error for values out of range.
    fn validate(&self) -> Result<()>;
    /// A hyper-parameter, to read or set; the caller validates.
    fn param_mut(&mut self, param: HyperParam) -> Option<&mut f64>;
    /// Whether to maximize.
    fn maximize(&self) -> bool;
    /// Names of an element's state values, at most [`SLOTS`].
    fn slots(&self) -> &'static [&'static str];
    /// Number of values of a slot: `count`, unless the rule is by tensor.
    fn slot_len(&self, _slot: usize, count: usize, _rows: usize) -> usize {
        count
    }
    /// Initial value of a slot.
    fn initial(&self, _slot: &str) -> f32 {
        0.0
    }
    /// Replaces a tensor's weights with those for evaluation; `slots` are its state values.
    fn to_eval_weights(&self, _weights: &mut [f32], _slots: &[&[f32]]) {}
    /// The clipping that the rule itself does.
    fn own_clip(&self) -> OwnClip {
        OwnClip::None
    }
    /// The numbers for a tensor's `step`-th step, counted from 1; `rows` is 0 for a vector.
    fn rule(&self, step: u64, rows: usize) -> Self::Rule;
    /// Whether this tensor is updated in one sweep.
    fn one_sweep(_: &Self::Rule) -> bool {
        !Self::TWO_SWEEPS
    }
    /// Updates parameters; `first` is empty if there is one sweep.
    fn sweep(rule: &Self::Rule, first: FirstSweep<'_>, block: Block<'_>);
    /// The first of two sweeps: writes directions, and pushes the sums of each block.
    fn first_sweep(_: &Self::Rule, _: Block<'_>, _directions: &mut [f32], _: &mut Vec<Sums>) {}
    /// The factor of each row, from the rows' sums, which are overwritten.
    fn row_factors(_: &mut Self::Rule, _: &mut [Sums], _: Layout) -> Vec<f32> {
        Vec::new()
    }
    /// Computes a whole tensor's directions in place from those that `first_sweep` wrote.
    fn finish_directions(_: &mut Self::Rule, _: Sums, _: &mut [f32], _: [&mut [f32]; SLOTS]) {}
}

/// The last sweep of a rule by tensor: `p ← p·decay − step_size·u`.
#[derive(Clone, Copy, Debug)]
pub(crate) struct FinalUpdate {
    pub(crate) decay: f32,
    pub(crate) step_size: f32,
}

impl FinalUpdate {
    pub(crate) fn sweep(&self, first: FirstSweep<'_>, block: Block<'_>) {
        let grad = first.directions.expect("those of whole tensors are kept");
        let map = GradMap::IDENTITY;
        cpu::sweep::<_, 0>(self, Block { map, grad, slots: Default::default(), ..block });
    }
}

impl Rule<0> for FinalUpdate {
    #[inline(always)]
    fn update(&self, p: f32, u: f32, _: [f32; 0]) -> (f32, [f32; 0]) {
        (p * self.decay - self.step_size * u, [])
    }
}

/// The clipping that a rule itself does, after any [`Clip`](crate::Clip).
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) enum OwnClip {
    /// No clipping.
    None,
    /// Multiplies by `min(1, max / (norm + 1e-6))`, with the norm over all tensors of the group.
    Group(f64),
    /// The same, with the norm of each tensor.
    Tensor(f64),
    /// Divides all of the optimizer's gradients by the norm over all of them, if that is above 1.
    /// If one group asks for it, it applies to all groups.
    Unit,
}

/// Decay rates of the two moments of Adam-like rules.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Moments {
    beta1: f32,
    one_minus_beta1: f32,
    beta2: f32,
    one_minus_beta2: f32,
}

impl Moments {
    pub(crate) const fn new(beta1: f64, beta2: f64) -> Self {
        Self {
            beta1: beta1 as f32,
            one_minus_beta1: (1.0 - beta1) as f32,
            beta2: beta2 as f32,
            one_minus_beta2: (1.0 - beta2) as f32,
        }
    }

    /// `m ← β1·m + (1−β1)·g` and `v ← β2·v + (1−β2)·g²`.
    #[inline(always)]
    pub(crate) fn update(&self, g: f32, [m, v]: [f32; 2]) -> [f32; 2] {
        let m = m * self.beta1 + g * self.one_minus_beta1;
        let v = v * self.beta2 + g * g * self.one_minus_beta2;
        [m, v]
    }

    /// `β1·m + (1−β1)·g`: Nesterov's first moment.
    #[inline(always)]
    pub(crate) fn nesterov(&self, g: f32, m: f32) -> f32 {
        m * self.beta1 + g * self.one_minus_beta1
    }
}

/// `1 / (1 − β1ᵗ)` and `1 / √(1 − β2ᵗ)`: corrections for moments that start at zero.
pub(crate) fn bias_corrections((beta1, beta2): (f64, f64), step: u64) -> (f64, f64) {
    let bias = |beta| 1.0 - power(beta, step);
    (bias(beta1).recip(), bias(beta2).sqrt().recip())
}

/// `base` to the power of `exponent` by repeated squaring: multiplications only, so that every
/// device computes the same bits. Off by less than `exponent` units in the last place, which for a
/// `base` below 1 is at most a few hundred of those of `1 − β1ᵗ`, when `βᵗ` is not yet negligible.
pub(crate) fn power(mut base: f64, mut exponent: u64) -> f64 {
    let mut result = 1.0;
    while exponent != 0 {
        if exponent & 1 == 1 {
            result *= base;
        }
        base *= base;
        exponent >>= 1;
    }
    result
}

/// `cos(πx)` for `x >= 0`, to 1e-15, by basic arithmetic, so that every device computes the same
/// bits: the Taylor series up to a quarter of the period, mirrored.
pub(crate) fn cos_pi(x: f64) -> f64 {
    let x = x - 2.0 * (x / 2.0).floor();
    let x = if x > 1.0 { 2.0 - x } else { x };
    let s = if x > 0.5 { 1.0 - x } else { x };
    let square = (s * PI) * (s * PI);
    let mut cosine = 1.0;
    for n in (2..=22).rev().step_by(2) {
        cosine = 1.0 - square / f64::from(n * (n - 1)) * cosine;
    }
    if x > 0.5 { -cosine } else { cosine }
}

/// Returns an error unless a hyper-parameter is valid.
pub(crate) const fn require(valid: bool, name: &'static str, value: f64) -> Result<()> {
    if valid { Ok(()) } else { Err(Error::InvalidHyper { name, value }) }
}

/// Returns an error for a negative, infinite or NaN hyper-parameter.
pub(crate) fn at_least_zero(name: &'static str, value: f64) -> Result<()> {
    require(value >= 0.0 && value.is_finite(), name, value)
}

/// Returns an error for a decay rate outside `0 <= value < 1`.
pub(crate) fn below_one(name: &'static str, value: f64) -> Result<()> {
    require((0.0..1.0).contains(&value), name, value)
}

/// Checks the hyper-parameters that Adam-like rules share.
pub(crate) fn validate_adam(lr: f64, betas: (f64, f64), eps: f64, weight_decay: f64) -> Result<()> {
    at_least_zero("lr", lr)?;
    at_least_zero("eps", eps)?;
    below_one("betas[0]", betas.0)?;
    below_one("betas[1]", betas.1)?;
    at_least_zero("weight_decay", weight_decay)
}

/// Implements the methods of [`Optimizer`](crate::Optimizer) for names and groups by the
/// [`Core`](crate::core::Core) in the given field of `self`.
macro_rules! group_methods {
    ($($core:tt)+) => {
        fn set_param_names(&mut self, params: &[$crate::ParamSpec]) -> $crate::Result<()> {
            self.$($core)+.set_param_names(params)
        }

        fn group_count(&self) -> usize {
            self.$($core)+.groups().len()
        }

        fn hyper_param(&self, group: usize, param: $crate::HyperParam) -> $crate::Result<Option<f64>> {
            self.$($core)+.hyper_param(group, param)
        }

        fn set_hyper_param(
            &mut self,
            group: usize,
            param: $crate::HyperParam,
            value: f64,
        ) -> $crate::Result<()> {
            self.$($core)+.set_hyper_param(group, param, value)
        }
    };
}
pub(crate) use group_methods;

/// Declares the struct of a rule's hyper-parameters with their defaults.
macro_rules! hyper {
    ($(#[$meta:meta])* $name:ident {
        $($(#[$doc:meta])* pub $field:ident: $type:ty = $default:expr,)*
    }) => {
        $(#[$meta])*
        #[derive(Clone, Copy, Debug, PartialEq, serde::Serialize, serde::Deserialize)]
        #[serde(default, deny_unknown_fields)]
        pub struct $name {
            $($(#[$doc])* pub $field: $type,)*
        }

        impl Default for $name {
            fn default() -> Self {
                Self { $($field: $default,)* }
            }
        }
    };
}
pub(crate) use hyper;

/// Implements `param_mut` and `maximize` of [`Hyper`] for a struct with the fields `lr`,
/// `weight_decay`, `maximize` and, if given, the field of the momentum.
macro_rules! fields {
    ($($momentum:ident $(.$part:tt)?)?) => {
        fn param_mut(&mut self, param: $crate::HyperParam) -> Option<&mut f64> {
            $(if param == $crate::HyperParam::Momentum {
                return Some(&mut self.$momentum $(.$part)?);
            })?
            match param {
                $crate::HyperParam::Lr => Some(&mut self.lr),
                $crate::HyperParam::WeightDecay => Some(&mut self.weight_decay),
                $crate::HyperParam::Momentum => None,
            }
        }

        fn maximize(&self) -> bool {
            self.maximize
        }
    };
}
pub(crate) use fields;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn powers_and_cosines_agree_with_std() {
        for beta in [0.0, 0.5, 0.9, 0.99, 0.999, 0.999_999] {
            for step in [0, 1, 2, 3, 10, 999, 1000, 12_345, 1 << 20, u64::MAX] {
                let (ours, theirs) = (power(beta, step), beta.powf(step as f64));
                assert!((ours - theirs).abs() < 1e-12, "{beta} {step}: {ours} {theirs}");
            }
        }
        for i in 0..100_000 {
            let x = f64::from(i) / 9973.0;
            assert!((cos_pi(x) - (PI * x).cos()).abs() < 1e-14, "{x}");
        }
        assert_eq!(
            [0.0, 0.5, 1.0, 2.0].map(cos_pi).map(|x| x.abs() < 1e-16),
            [false, true, false, false]
        );
    }
}
