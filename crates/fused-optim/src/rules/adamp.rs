//! AdamP: Adam without the part of the update that only makes scale-invariant weights longer.

use serde::{Deserialize, Serialize};

use crate::Result;
use crate::cpu::plan::Layout;
use crate::cpu::{self, Block, CpuOptimizer, Found, Sums, TwoSweeps};
use crate::rule::{Hyper, Moments, at_least_zero, bias_corrections, fields, hyper, validate_adam};

hyper! {
    /// Hyper-parameters of [`AdamP`]; the defaults are torch_npu's.
    AdamPHyper {
        /// Learning rate `lr`, 1e-3.
        pub lr: f64 = 1e-3,
        /// Decay rates `(β1, β2)` of the two moments, (0.9, 0.999); below 1.
        pub betas: (f64, f64) = (0.9, 0.999),
        /// `ε`, added to denominators and norms, 1e-8.
        pub eps: f64 = 1e-8,
        /// Weight decay `λ`, 0; multiplied by `lr`, and by `wd_ratio` where the update is projected.
        pub weight_decay: f64 = 0.0,
        /// `δ`, 0.1: weights whose gradients have a smaller cosine with them than this, over the root of
        /// the dimension, count as scale-invariant.
        pub delta: f64 = 0.1,
        /// What is left of the weight decay of scale-invariant weights, 0.1.
        pub wd_ratio: f64 = 0.1,
        /// Take the first moment one step ahead.
        pub nesterov: bool = false,
        /// Where `ε` is in the cosine.
        pub cos_eps: CosineEps = CosineEps::Add,
        /// Maximize instead of minimize.
        pub maximize: bool = false,
    }
}

/// Where `ε` is in the cosine of gradient and weight.
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

/// AdamP over many tensors; tensors of two dimensions or more come
/// [with their shape](crate::ParamMut::with_shape).
///
/// With `g` the gradient times `grad_scale` (negated if `maximize`) and `t` the tensor's step:
///
/// ```text
/// m ← β1·m + (1−β1)·g            exp_avg
/// v ← β2·v + (1−β2)·g²           exp_avg_sq
/// u = m / (√v / √(1−β2ᵗ) + ε), with nesterov of β1·m + (1−β1)·g instead of m
/// ρ = 1
/// of two dimensions or more, for each view of (rows, the whole as one row):
///     c = max over rows of |g·p| / (‖g‖ + ε) / (‖p‖ + ε)
///     if c < δ/√(elements per row):
///         n = p / (‖p‖ + ε);  u ← u − n·(n·u), per row;  ρ = wd_ratio;  no further view
/// p ← p·(1 − lr·λ·ρ) − lr/(1−β1ᵗ)·u
/// ```
///
/// Elements in f32; sums in f64, in an order that depends on the tensor's shape alone. Two
/// sweeps, 24 and 16 bytes per f32 parameter (20 with nesterov); the second is from a cache if
/// the tensor fits one, goes backwards, and has the last 2^22 directions of the first, 16 MiB a
/// thread that the optimizer holds, instead of computing them again.
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
        at_least_zero("delta value", self.delta)?;
        at_least_zero("wd_ratio value", self.wd_ratio)
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

    fn observe(rule: &AdamPRule, block: Block<'_>, directions: &mut [f32], sums: &mut Vec<Sums>) {
        cpu::observe_cosine(rule, block, directions, sums);
    }

    fn conclude(rule: &mut AdamPRule, rows: &mut [Sums], layout: Layout) -> Vec<f32> {
        let count = rows.len();
        let hyper = rule.hyper;
        let scale_invariant = |rows: &[Sums], cols: usize| {
            let threshold = hyper.delta / (cols as f64).sqrt();
            rows.iter().all(|row| hyper.cosine(row) < threshold)
        };
        let projected = if !rule.project || count == 0 {
            None
        } else if scale_invariant(rows, layout.cols()) {
            Some(rows.iter().map(|row| hyper.along(row)).collect())
        } else {
            let whole = Sums::fold(rows);
            scale_invariant(&[whole], layout.count()).then(|| vec![hyper.along(&whole); count])
        };
        if projected.is_some() {
            rule.decay = (1.0 - hyper.lr * hyper.weight_decay * hyper.wd_ratio) as f32;
        }
        projected.unwrap_or_else(|| vec![0.0; count])
    }

    fn sweep(rule: &AdamPRule, found: Found<'_>, block: Block<'_>) {
        cpu::move_on(rule, found, block);
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

    /// What of `p` is to be taken from `u`: `(n·u) / (‖p‖ + ε)`. A row of zeros has no direction.
    fn along(&self, row: &Sums) -> f32 {
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
    #[inline(always)]
    fn state(&self, g: f32, state: [f32; 2]) -> [f32; 2] {
        self.moments.update(g, state)
    }

    #[inline(always)]
    fn direction(&self, _: f32, g: f32, [m, v]: [f32; 2]) -> f32 {
        let m = if self.hyper.nesterov { self.moments.ahead(g, m) } else { m };
        m / (v.sqrt() * self.root_factor + self.eps)
    }

    /// `factor` is what of `p` is to be taken from `u`.
    #[inline(always)]
    fn moved(&self, factor: f32, p: f32, u: f32) -> f32 {
        p * self.decay - self.step_size * (u - p * factor)
    }
}
