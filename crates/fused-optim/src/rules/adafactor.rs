//! Adafactor: stores only row and column means of a matrix's second moments.

use crate::cpu::{self, BLOCK, Block, FirstSweep, GradMap, Rule, SLOTS, Sums, sum_of_squares};
use crate::rule::{FinalUpdate, Hyper, at_least_zero, fields, hyper, require};
use crate::{CpuOptimizer, Result};

hyper! {
    /// Hyper-parameters of [`Adafactor`]; the defaults are PyTorch's.
    AdafactorHyper {
        /// Largest relative step `lr`, 1e-2.
        pub lr: f64 = 1e-2,
        /// The second moments' decay rate is `1 − t^beta2_decay`, -0.8; at most 0.
        pub beta2_decay: f64 = -0.8,
        /// `(ε1, ε2)`, (2⁻²³, 1e-3): smallest root of a second moment, smallest scale of a
        /// parameter.
        pub eps: (f64, f64) = (f32::EPSILON as f64, 1e-3),
        /// Largest root mean square of an update, 1; at least 1.
        pub d: f64 = 1.0,
        /// Weight decay `λ`, 0; multiplied by `lr`.
        pub weight_decay: f64 = 0.0,
        /// Maximize instead of minimize.
        pub maximize: bool = false,
    }
}

/// Adafactor over many tensors; set the [shape](crate::ParamMut::with_shape) of those with two
/// dimensions or more. On the CPU only.
///
/// With `g` the gradient times `grad_scale` (negated if `maximize`), `t` the tensor's step, RMS the
/// root mean square:
///
/// ```text
/// α = max(ε2, RMS(p)) · min(lr, 1/√t)
/// b = t^beta2_decay
/// two dimensions or more, as a matrix of the first by all others:
///     r ← r + b·(row means of g² − r)        row_var, one for each row
///     c ← c + b·(column means of g² − c)     col_var, one for each column
///     v = r·cᵀ / max(mean of r, ε1)
/// else:
///     v ← v + b·(g² − v)                     variance
/// u = g / √max(v, ε1²)
/// p ← p·(1 − lr·λ) − α / max(1, RMS(u)/d) · u
/// ```
///
/// Elements and state in f32; means in f64, in an order fixed by the tensor's shape. Each tensor is
/// computed by one thread, so threads help only with several tensors; they change no bit. A thread
/// holds a copy of its largest tensor.
///
/// Follows: Shazeer & Stern, "Adafactor: Adaptive Learning Rates with Sublinear Memory Cost"
/// (2018), and `torch.optim.Adafactor` of PyTorch 2.15. Differs: a tensor of more than two
/// dimensions is a matrix of the first dimension by all others, while PyTorch factors the last two
/// dimensions only; second moments of finite gradients are at most the largest f32, where PyTorch's
/// become infinite and then NaN.
pub type Adafactor = CpuOptimizer<AdafactorHyper>;

impl Hyper for AdafactorHyper {
    const KIND: &'static str = "adafactor";
    const TWO_SWEEPS: bool = true;
    const BY_TENSOR: bool = true;
    type Rule = AdafactorRule;

    fn validate(&self) -> Result<()> {
        at_least_zero("lr", self.lr)?;
        let beta2_decay = self.beta2_decay;
        require(beta2_decay <= 0.0 && beta2_decay.is_finite(), "beta2_decay", beta2_decay)?;
        at_least_zero("eps", self.eps.0)?;
        at_least_zero("eps", self.eps.1)?;
        require(self.d >= 1.0 && self.d.is_finite(), "d", self.d)?;
        at_least_zero("weight_decay", self.weight_decay)
    }

    fields!();

    fn slots(&self) -> &'static [&'static str] {
        &["row_var", "col_var", "variance"]
    }

    fn slot_len(&self, slot: usize, count: usize, rows: usize) -> usize {
        match (slot, rows) {
            (2, 0) => count,
            (0, _) => rows,
            (1, 1..) => count / rows,
            _ => 0,
        }
    }

    fn rule(&self, step: u64, _: usize) -> AdafactorRule {
        let t = step as f64;
        AdafactorRule {
            share: t.powf(self.beta2_decay) as f32,
            rate: self.lr.min(t.sqrt().recip()),
            eps: self.eps,
            d: self.d,
            last: FinalUpdate { decay: (1.0 - self.lr * self.weight_decay) as f32, step_size: 0.0 },
        }
    }

    fn first_sweep(
        _: &AdafactorRule,
        block: Block<'_>,
        directions: &mut [f32],
        sums: &mut Vec<Sums>,
    ) {
        let squares = |part: &[f32]| sum_of_squares(part, GradMap::IDENTITY);
        let parts = block.param.chunks(block.cols.min(BLOCK)).map(squares);
        sums.extend(parts.map(|pp| Sums { pp, ..Sums::default() }));
        let slots = Default::default();
        cpu::sweep::<_, 0>(&Gradient, Block { param: directions, slots, ..block });
    }

    fn finish_directions(
        rule: &mut AdafactorRule,
        sums: Sums,
        u: &mut [f32],
        [row_var, col_var, variance]: [&mut [f32]; SLOTS],
    ) {
        if u.is_empty() {
            return;
        }
        let (count, eps) = (u.len() as f64, rule.eps.0);
        let lerp = |old: &mut f32, new: f64| {
            // The square of a finite gradient may exceed f32, and an infinity becomes NaN in the
            // next step.
            let new = if new.is_finite() { new.min(f32::MAX.into()) } else { new };
            *old += (new as f32 - *old) * rule.share;
        };
        // At least the smallest normal number, so that 0/0 cannot occur. A NaN stays NaN.
        let least = ((eps * eps) as f32).max(f32::MIN_POSITIVE);
        let divide = |g: &mut f32, v: f32| *g /= if v < least { least } else { v }.sqrt();
        if row_var.is_empty() {
            for (g, v) in u.iter_mut().zip(variance) {
                lerp(v, f64::from(*g) * f64::from(*g));
                divide(g, *v);
            }
        } else {
            let (rows, cols) = (row_var.len() as f64, col_var.len());
            let mut squares = vec![0.0; cols];
            for (row, r) in u.chunks(cols).zip(&mut *row_var) {
                lerp(r, sum_of_squares(row, GradMap::IDENTITY) / cols as f64);
                for (sum, g) in squares.iter_mut().zip(row) {
                    *sum += f64::from(*g) * f64::from(*g);
                }
            }
            col_var.iter_mut().zip(squares).for_each(|(c, sum)| lerp(c, sum / rows));
            let mean = row_var.iter().map(|r| f64::from(*r)).sum::<f64>() / rows;
            let least_mean = eps.max(f64::MIN_POSITIVE);
            let mean = if mean < least_mean { least_mean } else { mean };
            for (row, r) in u.chunks_mut(cols).zip(row_var) {
                let r = (f64::from(*r) / mean) as f32;
                row.iter_mut().zip(&*col_var).for_each(|(g, c)| divide(g, r * c));
            }
        }
        let rms = |squares: f64| (squares / count).sqrt();
        let scale = (rms(sum_of_squares(u, GradMap::IDENTITY)) / rule.d).max(1.0);
        rule.last.step_size = (rms(sums.pp).max(rule.eps.1) * rule.rate / scale) as f32;
    }

    fn sweep(rule: &AdafactorRule, first: FirstSweep<'_>, block: Block<'_>) {
        rule.last.sweep(first, block);
    }
}

/// The numbers of one step.
#[derive(Clone, Copy, Debug)]
pub(crate) struct AdafactorRule {
    /// `b`.
    share: f32,
    /// `min(lr, 1/√t)`.
    rate: f64,
    eps: (f64, f64),
    d: f64,
    last: FinalUpdate,
}

/// Writes the scaled gradient over the parameter.
#[derive(Clone, Copy)]
struct Gradient;

impl Rule<0> for Gradient {
    #[inline(always)]
    fn update(&self, _: f32, g: f32, _: [f32; 0]) -> (f32, [f32; 0]) {
        (g, [])
    }
}
