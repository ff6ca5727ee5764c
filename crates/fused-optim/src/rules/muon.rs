//! Muon: updates matrices by their orthogonalized momentum, and other tensors by AdamW.

use serde::{Deserialize, Serialize};

use super::adam::AdamRule;
use super::newton_schulz::orthogonalize;
use crate::cpu::{self, Block, FirstSweep, Rule, SLOTS, Sums};
use crate::rule::{FinalUpdate, Hyper, at_least_zero, below_one, fields, hyper, require};
use crate::{AdamWHyper, CpuOptimizer, Result};

hyper! {
    /// Hyper-parameters of [`Muon`]; the defaults are PyTorch's, those of AdamW the authors'.
    MuonHyper {
        /// Learning rate `lr` of matrices and of other tensors, 1e-3.
        pub lr: f64 = 1e-3,
        /// Momentum `μ` of matrices, 0.95; below 1.
        pub momentum: f64 = 0.95,
        /// Use Nesterov momentum; true.
        pub nesterov: bool = true,
        /// Weight decay `λ`, 0.1; multiplied by `lr`.
        pub weight_decay: f64 = 0.1,
        /// Smallest norm that a matrix is divided by, 1e-7.
        pub eps: f64 = 1e-7,
        /// Steps of the Newton-Schulz iteration, 5; below 100.
        pub ns_steps: u32 = 5,
        /// Adjustment of the learning rate to a matrix's shape.
        pub adjust_lr_fn: AdjustLr = AdjustLr::Original,
        /// Update matrices by Muon; false for a group that AdamW updates, such as embeddings.
        pub use_muon: bool = true,
        /// Decay rates `(β1, β2)` of AdamW, (0.9, 0.95); below 1.
        pub betas: (f64, f64) = (0.9, 0.95),
        /// `ε` of AdamW, 1e-10.
        pub adamw_eps: f64 = 1e-10,
        /// Maximize instead of minimize.
        pub maximize: bool = false,
    }
}

/// Factor of the learning rate of a matrix with `A` rows and `B` columns.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
#[non_exhaustive]
pub enum AdjustLr {
    /// `√max(1, A/B)`, as in the authors' code.
    #[default]
    Original,
    /// `0.2·√max(A, B)`: updates are as large as AdamW's, so one learning rate suits both.
    #[serde(rename = "match_rms_adamw")]
    MatchRmsAdamW,
    /// `√(A/B)`.
    SpectralUnclamped,
}

/// Muon over many tensors, with their [shapes](crate::ParamMut::with_shape) set. On the CPU only,
/// with the feature `muon`.
///
/// A tensor of two dimensions or more is a matrix: its first dimension by all others. With `g` the
/// gradient times `grad_scale` (negated if `maximize`):
///
/// ```text
/// m ← μ·m + (1−μ)·g              momentum_buffer
/// X = m, with nesterov μ·m + (1−μ)·g; transposed if it has more rows than columns
/// X ← X / max(‖X‖, ε)
/// ns_steps times:  A = X·Xᵀ;  X ← 3.4445·X + (−4.775·A + 2.0315·A²)·X
/// p ← p·(1 − lr·λ) − lr·adjust·X
/// ```
///
/// Tensors of fewer dimensions, and all of a group without `use_muon`, are updated as by
/// [`AdamW`](crate::AdamW) with `lr`, `λ`, `betas` and `adamw_eps`: `exp_avg`, `exp_avg_sq`. Use
/// this for embeddings and the last layer. To use one learning rate for both, set
/// [`AdjustLr::MatchRmsAdamW`]; otherwise use separate groups.
///
/// All in f32. Each matrix is computed by one thread, so threads help only with several matrices;
/// they change no bit. The products are the `gemm` crate's, whose bits may differ between
/// processors. A thread holds a copy of its largest matrix, and during the step of an `r` by `c`
/// matrix another copy and `2·min(r, c)²` values.
///
/// Follows: Jordan et al., "Muon: An optimizer for hidden layers in neural networks" (2024), the
/// authors' `MuonWithAuxAdam`, and `torch.optim.Muon` of PyTorch 2.15. Differs: the iteration is in
/// f32, theirs in bf16; tensors of more than two dimensions, which PyTorch rejects, are matrices,
/// as the authors treat convolutions.
pub type Muon = CpuOptimizer<MuonHyper>;

impl Hyper for MuonHyper {
    const KIND: &'static str = "muon";
    const TWO_SWEEPS: bool = true;
    const BY_TENSOR: bool = true;
    type Rule = MuonRule;

    fn validate(&self) -> Result<()> {
        at_least_zero("lr", self.lr)?;
        at_least_zero("adamw_eps", self.adamw_eps)?;
        below_one("betas[0]", self.betas.0)?;
        below_one("betas[1]", self.betas.1)?;
        at_least_zero("weight_decay", self.weight_decay)?;
        at_least_zero("eps", self.eps)?;
        below_one("momentum", self.momentum)?;
        require(self.ns_steps < 100, "ns_steps", self.ns_steps.into())
    }

    fields!(momentum);

    fn slots(&self) -> &'static [&'static str] {
        &["exp_avg", "exp_avg_sq", "momentum_buffer"]
    }

    fn slot_len(&self, slot: usize, count: usize, rows: usize) -> usize {
        let is_matrix = self.use_muon && rows > 0;
        if is_matrix == (slot == 2) { count } else { 0 }
    }

    fn rule(&self, step: u64, rows: usize) -> MuonRule {
        let Self { lr, weight_decay, betas, adamw_eps: eps, .. } = *self;
        let adamw = AdamWHyper { lr, weight_decay, betas, eps, ..Default::default() };
        let adamw = adamw.rule(step, rows);
        MuonRule {
            hyper: *self,
            rows: if self.use_muon { rows } else { 0 },
            momentum: [self.momentum as f32, (1.0 - self.momentum) as f32],
            last: FinalUpdate { decay: adamw.decay, step_size: 0.0 },
            adamw,
        }
    }

    fn one_sweep(rule: &MuonRule) -> bool {
        rule.rows == 0
    }

    fn first_sweep(rule: &MuonRule, block: Block<'_>, directions: &mut [f32], _: &mut Vec<Sums>) {
        let [_, _, m] = block.slots;
        let slots = [m, &mut [], &mut []];
        cpu::sweep::<_, 1>(rule, Block { param: directions, slots, ..block });
    }

    fn finish_directions(
        rule: &mut MuonRule,
        _: Sums,
        directions: &mut [f32],
        _: [&mut [f32]; SLOTS],
    ) {
        let Self { lr, eps, ns_steps, adjust_lr_fn, .. } = rule.hyper;
        orthogonalize(directions, rule.rows, eps, ns_steps);
        let (rows, cols) = (rule.rows as f64, (directions.len() / rule.rows) as f64);
        let factor = match adjust_lr_fn {
            AdjustLr::Original => (rows / cols).max(1.0).sqrt(),
            AdjustLr::MatchRmsAdamW => 0.2 * rows.max(cols).sqrt(),
            AdjustLr::SpectralUnclamped => (rows / cols).sqrt(),
        };
        rule.last.step_size = (lr * factor) as f32;
    }

    fn sweep(rule: &MuonRule, first: FirstSweep<'_>, block: Block<'_>) {
        match Self::one_sweep(rule) {
            true => rule.adamw.sweep(block),
            false => rule.last.sweep(first, block),
        }
    }
}

/// The numbers of one step.
#[derive(Clone, Copy, Debug)]
pub(crate) struct MuonRule {
    hyper: MuonHyper,
    /// 0 for a tensor that AdamW updates.
    rows: usize,
    adamw: AdamRule,
    /// `μ`, `1 − μ`.
    momentum: [f32; 2],
    last: FinalUpdate,
}

/// Updates the momentum, and writes the matrix to orthogonalize over the parameter.
impl Rule<1> for MuonRule {
    #[inline(always)]
    fn update(&self, _: f32, g: f32, [m]: [f32; 1]) -> (f32, [f32; 1]) {
        let [beta, rest] = self.momentum;
        let m = m * beta + g * rest;
        (if self.hyper.nesterov { m * beta + g * rest } else { m }, [m])
    }
}
