//! AdamP: Adam without the component of the update that only grows the norm of scale-invariant
//! weights.

use serde::{Deserialize, Serialize};

use crate::cpu::plan::Layout;
use crate::cpu::{self, Block, FirstSweep, Sums, TwoSweeps};
use crate::rule::{Hyper, Moments, at_least_zero, bias_corrections, fields, hyper, validate_adam};
use crate::{CpuOptimizer, Result};

hyper! {
    /// Hyper-parameters of [`AdamP`]; the defaults are torch_npu's.
    AdamPHyper {
        /// Learning rate `lr`, 1e-3.
        pub lr: f64 = 1e-3,
        /// Decay rates `(β1, β2)` of the two moments, (0.9, 0.999); below 1.
        pub betas: (f64, f64) = (0.9, 0.999),
        /// `ε`, added to denominators and norms, 1e-8.
        pub eps: f64 = 1e-8,
        /// Weight decay `λ`, 0; multiplied by `lr`, and by `wd_ratio` where the update is
        /// projected.
        pub weight_decay: f64 = 0.0,
        /// `δ`, 0.1: weights are treated as scale-invariant if the cosine of weight and gradient is
        /// below `δ` divided by the square root of the dimension.
        pub delta: f64 = 0.1,
        /// Factor of the weight decay of scale-invariant weights, 0.1.
        pub wd_ratio: f64 = 0.1,
        /// Use Nesterov momentum.
        pub nesterov: bool = false,
        /// Position of `ε` in the cosine.
        pub cos_eps: CosineEps = CosineEps::Add,
        /// Maximize instead of minimize.
        pub maximize: bool = false,
    }
}

/// Position of `ε` in the cosine of gradient and weight.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub enum CosineEps {
    /// `|g·p| / (‖g‖ + ε) / (‖p‖ + ε)`, as in torch_npu and in the authors' code.
    #[default]
    #[serde(rename = "add")]
    Add,
    /// `|g·p| / max(‖g‖, ε) / max(‖p‖, ε)`, PyTorch's `cosine_similarity`, as in timm.
    #[serde(rename = "torch")]
    Max,
}

/// AdamP over many tensors; set the [shape](crate::ParamMut::with_shape) of those with two
/// dimensions or more.
///
/// With `g` the gradient times `grad_scale` (negated if `maximize`) and `t` the tensor's step:
///
/// ```text
/// m ← β1·m + (1−β1)·g            exp_avg
/// v ← β2·v + (1−β2)·g²           exp_avg_sq
/// u = m / (√v / √(1−β2ᵗ) + ε), with nesterov β1·m + (1−β1)·g instead of m
/// ρ = 1
/// two dimensions or more, for each view of (rows, the whole as one row):
///     c = max over rows of |g·p| / (‖g‖ + ε) / (‖p‖ + ε)
///     if c < δ/√(elements per row):
///         n = p / (‖p‖ + ε);  u ← u − n·(n·u), per row;  ρ = wd_ratio;  no further view
/// p ← p·(1 − lr·λ·ρ) − lr/(1−β1ᵗ)·u
/// ```
///
/// Elements in f32; sums in f64, in an order that depends on the tensor's shape only. Two sweeps,
/// 24 and 16 bytes per f32 parameter (20 with nesterov). The second runs backwards, reads from a
/// cache if the tensor fits one, and reuses the last 2^22 directions of the first, which take 16
/// MiB per thread, instead of computing them again.
///
/// Follows: torch_npu 2.x, `optim/npu_fused_adamp.py`, and the authors' code. Differs: values are
/// validated, steps counted per tensor; [`CosineEps::Max`] gives timm's cosine.
pub type AdamP = CpuOptimizer<AdamPHyper>;

impl Hyper for AdamPHyper {
    const KIND: &'static str = "adamp";
    const TWO_SWEEPS: bool = true;
    const BY_ROWS: bool = true;
    type Rule = AdamPRule;

    fn validate(&self) -> Result<()> {
        validate_adam(self.lr, self.betas, self.eps, self.weight_decay)?;
        at_least_zero("delta", self.delta)?;
        at_least_zero("wd_ratio", self.wd_ratio)
    }

    fields!(betas.0);

    fn slots(&self) -> &'static [&'static str] {
        &["exp_avg", "exp_avg_sq"]
    }

    fn rule(&self, step: u64, rows: usize) -> AdamPRule {
        let (correction, root_correction) = bias_corrections(self.betas, step);
        AdamPRule {
            moments: Moments::new(self.betas.0, self.betas.1),
            root_factor: root_correction as f32,
            eps: self.eps as f32,
            decay: (1.0 - self.lr * self.weight_decay) as f32,
            step_size: (self.lr * correction) as f32,
            hyper: *self,
            project: rows > 0,
        }
    }

    fn first_sweep(
        rule: &AdamPRule,
        block: Block<'_>,
        directions: &mut [f32],
        sums: &mut Vec<Sums>,
    ) {
        cpu::first_sweep(rule, block, directions, sums);
    }

    fn row_factors(rule: &mut AdamPRule, rows: &mut [Sums], layout: Layout) -> Vec<f32> {
        let count = rows.len();
        let hyper = rule.hyper;
        let scale_invariant = |rows: &[Sums], cols: usize| {
            let threshold = hyper.delta / (cols as f64).sqrt();
            rows.iter().all(|row| hyper.cosine(row) < threshold)
        };
        let projected = if !rule.project || count == 0 {
            None
        } else if scale_invariant(rows, layout.cols()) {
            Some(rows.iter().map(|row| hyper.projection(row)).collect())
        } else {
            let whole = Sums::fold(rows);
            scale_invariant(&[whole], layout.count()).then(|| vec![hyper.projection(&whole); count])
        };
        if projected.is_some() {
            rule.decay = (1.0 - hyper.lr * hyper.weight_decay * hyper.wd_ratio) as f32;
        }
        projected.unwrap_or_else(|| vec![0.0; count])
    }

    fn sweep(rule: &AdamPRule, first: FirstSweep<'_>, block: Block<'_>) {
        cpu::second_sweep(rule, first, block);
    }
}

impl AdamPHyper {
    fn cosine(&self, row: &Sums) -> f64 {
        let (g, p) = (row.gg.sqrt(), row.pp.sqrt());
        match self.cos_eps {
            CosineEps::Add => row.gp.abs() / (g + self.eps) / (p + self.eps),
            CosineEps::Max => row.gp.abs() / g.max(self.eps) / p.max(self.eps),
        }
    }

    /// `(n·u) / (‖p‖ + ε)`: this times `p` is the component of `u` along `p`. 0 for a row of zeros.
    fn projection(&self, row: &Sums) -> f32 {
        let norm = row.pp.sqrt() + self.eps;
        if row.pu == 0.0 { 0.0 } else { (row.pu / (norm * norm)) as f32 }
    }
}

/// The numbers of one step.
#[derive(Clone, Copy, Debug)]
pub(crate) struct AdamPRule {
    moments: Moments,
    root_factor: f32,
    eps: f32,
    /// `1 − lr·λ·ρ`.
    pub(crate) decay: f32,
    step_size: f32,
    hyper: AdamPHyper,
    /// Whether the tensor has two dimensions or more.
    project: bool,
}

impl TwoSweeps for AdamPRule {
    const COSINE: bool = true;

    #[inline(always)]
    fn state(&self, g: f32, state: [f32; 2]) -> [f32; 2] {
        self.moments.update(g, state)
    }

    #[inline(always)]
    fn direction(&self, _: f32, g: f32, [m, v]: [f32; 2]) -> f32 {
        let m = if self.hyper.nesterov { self.moments.nesterov(g, m) } else { m };
        m / (v.sqrt() * self.root_factor + self.eps)
    }

    /// `factor` is the row's projection.
    #[inline(always)]
    fn new_param(&self, factor: f32, p: f32, u: f32) -> f32 {
        p * self.decay - self.step_size * (u - p * factor)
    }
}
