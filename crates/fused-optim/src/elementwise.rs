//! `ElementwiseRule`: the trait for user-defined update rules.
//!
//! An [`ElementwiseRule`] is the arithmetic of one element; [`CpuOptimizer`](crate::CpuOptimizer)
//! does the rest, as it does for this crate's own rules. The loop over a block is generic: it is
//! compiled in the user's crate, for each instruction set.

use std::fmt;

use serde::Serialize;
use serde::de::DeserializeOwned;

use crate::cpu::{self, Block, FirstSweep, Rule};
use crate::rule::Hyper;
use crate::{HyperParam, Result};

/// An update rule that updates each element independently, implemented for the struct of its
/// hyper-parameters.
///
/// `CpuOptimizer<MyHyper>` then has all features of this crate's optimizers: threads, f32 masters
/// and 16-bit weights, unscaling, clipping, skipping of non-finite gradients, moving averages,
/// parameter groups, state dicts. As [`update`](Self::update) sees one element at a time, the
/// number of threads, alignment and instruction set change no bit of the result. Devices run this
/// crate's rules only.
///
/// Lion (Chen et al., "Symbolic Discovery of Optimization Algorithms", 2023, algorithm 2):
///
/// ```
/// use fused_optim::{CpuOptimizer, ElementwiseRule, HyperParam};
/// use fused_optim::{Optimizer, ParamMut, Slice, StepCtl};
/// use serde::{Deserialize, Serialize};
///
/// #[derive(Clone, Debug, Serialize, Deserialize)]
/// struct LionHyper { lr: f64, betas: (f64, f64), weight_decay: f64 }
///
/// impl ElementwiseRule for LionHyper {
///     const KIND: &'static str = "my_lion";
///     const SLOTS: &'static [&'static str] = &["exp_avg"];
///     type State = [f32; 1];
///     /// `lr`, `1 − lr·λ`, `β1`, `β2`.
///     type Numbers = [f32; 4];
///
///     fn param_mut(&mut self, param: HyperParam) -> Option<&mut f64> {
///         match param {
///             HyperParam::Lr => Some(&mut self.lr),
///             HyperParam::Momentum => Some(&mut self.betas.0),
///             HyperParam::WeightDecay => Some(&mut self.weight_decay),
///             _ => None,
///         }
///     }
///
///     fn numbers(&self, _step: u64) -> [f32; 4] {
///         let decay = 1.0 - self.lr * self.weight_decay;
///         [self.lr, decay, self.betas.0, self.betas.1].map(|x| x as f32)
///     }
///
///     #[inline(always)]
///     fn update(numbers: &[f32; 4], p: f32, g: f32, [m]: [f32; 1]) -> (f32, [f32; 1]) {
///         let [lr, decay, b1, b2] = numbers;
///         let u = m * b1 + g * (1.0 - b1);
///         let sign = if u > 0.0 { 1.0 } else if u < 0.0 { -1.0 } else { u };
///         (p * decay - lr * sign, [m * b2 + g * (1.0 - b2)])
///     }
/// }
///
/// let hyper = LionHyper { lr: 0.5, betas: (0.9, 0.99), weight_decay: 0.0 };
/// let mut lion = CpuOptimizer::with_one_group(hyper, 1)?.with_threads(2);
/// let mut weight = [1.0_f32, 1.0, 1.0];
/// let param = ParamMut::new(&mut weight[..], Some(Slice::F32(&[0.1, -8.0, 0.0])));
/// let _applied = lion.step(&mut [param], &StepCtl::default())?;
/// assert_eq!(weight, [0.5, 1.5, 1.0]);
/// # Ok::<(), fused_optim::Error>(())
/// ```
pub trait ElementwiseRule:
    Clone + fmt::Debug + Send + Sync + Serialize + DeserializeOwned + 'static
{
    /// The rule's name in state dicts.
    const KIND: &'static str;
    /// Names of an element's state values; their number is the length of `State`. Each must be
    /// unique, and neither `master` nor `step`, which state dicts use; nor may a hyper-parameter be
    /// named `params`.
    const SLOTS: &'static [&'static str];
    /// The state of an element: `[f32; N]`, with `N` of 0 to 3.
    type State: State;
    /// Whether evaluation uses other weights than training, those of
    /// [`eval_weight`](Self::eval_weight).
    const HAS_EVAL_WEIGHTS: bool = false;
    /// Numbers computed once per tensor and step: factors, bias corrections.
    type Numbers: Copy + Send + Sync;

    /// Returns an error for values out of range, for example
    /// [`Error::InvalidHyper`](crate::Error::InvalidHyper).
    ///
    /// # Errors
    ///
    /// The rule's own.
    fn validate(&self) -> Result<()> {
        Ok(())
    }

    /// A hyper-parameter that schedulers read and set; `None` if the rule does not have it.
    fn param_mut(&mut self, param: HyperParam) -> Option<&mut f64>;

    /// Whether to maximize: gradients are then negated before [`update`](Self::update).
    fn maximize(&self) -> bool {
        false
    }

    /// Initial value of a slot.
    fn initial(&self, _slot: &str) -> f32 {
        0.0
    }

    /// The numbers of a tensor's `step`-th step, counted from 1.
    fn numbers(&self, step: u64) -> Self::Numbers;

    /// Returns the new parameter and state of one element. Mark it `#[inline(always)]`, so that the
    /// loop over the elements is vectorized.
    fn update(
        numbers: &Self::Numbers,
        param: f32,
        grad: f32,
        state: Self::State,
    ) -> (f32, Self::State);

    /// Returns the value of one element for evaluation, of its value in training and its state, if
    /// [`HAS_EVAL_WEIGHTS`](Self::HAS_EVAL_WEIGHTS); see
    /// [`Optimizer::eval_weights`](crate::Optimizer::eval_weights).
    fn eval_weight(&self, param: f32, _state: Self::State) -> f32 {
        param
    }
}

/// An element's state: an array of up to three values.
#[expect(private_bounds, reason = "sealed: the arrays below")]
pub trait State: Sweep {}

/// The update loop for this state.
pub(crate) trait Sweep: Copy {
    fn from_fn(value: impl FnMut(usize) -> f32) -> Self;

    fn sweep<R: ElementwiseRule<State = Self>>(numbers: &R::Numbers, block: Block<'_>);
}

macro_rules! states {
    ($($count:literal)*) => {$(
        impl State for [f32; $count] {}

        impl Sweep for [f32; $count] {
            fn from_fn(value: impl FnMut(usize) -> f32) -> Self {
                std::array::from_fn(value)
            }

            fn sweep<R: ElementwiseRule<State = Self>>(numbers: &R::Numbers, block: Block<'_>) {
                const { assert!(R::SLOTS.len() == $count, "a name for each state value") };
                cpu::sweep(&Elementwise::<R>(*numbers), block);
            }
        }

        impl<R: ElementwiseRule<State = [f32; $count]>> Rule<$count> for Elementwise<R> {
            #[inline(always)]
            fn update(&self, p: f32, g: f32, state: [f32; $count]) -> (f32, [f32; $count]) {
                R::update(&self.0, p, g, state)
            }
        }
    )*};
}
states!(0 1 2 3);

/// A rule with the numbers of one step.
struct Elementwise<R: ElementwiseRule>(R::Numbers);

impl<R: ElementwiseRule> Clone for Elementwise<R> {
    fn clone(&self) -> Self {
        *self
    }
}

impl<R: ElementwiseRule> Copy for Elementwise<R> {}

impl<R: ElementwiseRule> Hyper for R {
    const KIND: &'static str = R::KIND;
    const HAS_EVAL_WEIGHTS: bool = R::HAS_EVAL_WEIGHTS;
    type Rule = R::Numbers;

    fn validate(&self) -> Result<()> {
        ElementwiseRule::validate(self)
    }

    fn param_mut(&mut self, param: HyperParam) -> Option<&mut f64> {
        ElementwiseRule::param_mut(self, param)
    }

    fn maximize(&self) -> bool {
        ElementwiseRule::maximize(self)
    }

    fn slots(&self) -> &'static [&'static str] {
        R::SLOTS
    }

    fn initial(&self, slot: &str) -> f32 {
        ElementwiseRule::initial(self, slot)
    }

    fn rule(&self, step: u64, _: usize) -> R::Numbers {
        self.numbers(step)
    }

    fn to_eval_weights(&self, weights: &mut [f32], slots: &[&[f32]]) {
        for (at, weight) in weights.iter_mut().enumerate() {
            *weight = self.eval_weight(*weight, R::State::from_fn(|slot| slots[slot][at]));
        }
    }

    fn sweep(numbers: &R::Numbers, _: FirstSweep<'_>, block: Block<'_>) {
        R::State::sweep::<R>(numbers, block);
    }
}
