//! Optimizers on an Ascend NPU (feature `npu`).
//!
//! The same nine rules by operators of CANN, as torch_npu's fused optimizers have them: parameters,
//! gradients and state of one type and group lie in one flat buffer, so a step is a few launches
//! whatever the number of tensors. [`NpuOptimizer::combine`] makes the buffers and
//! [`weight`](NpuOptimizer::weight) and [`grad`](NpuOptimizer::grad) say where each tensor is in them.
//! [`HostFed`] is the same as an [`Optimizer`](crate::Optimizer), for models that compute on the host.
//!
//! | optimizer | launches of a plain step of f32 without decay |
//! |---|---|
//! | [`Adadelta`](crate::Adadelta) | 11 |
//! | [`Adam`](crate::Adam), with amsgrad | 8, 9 |
//! | [`AdamW`](crate::AdamW) by a kernel of CANN's own, else as Adam | 3, 8 |
//! | [`AdamP`](crate::AdamP) | 9, with tensors of two dimensions 13 and 4 to 5 per tensor; one copy to the host |
//! | [`BertAdam`](crate::BertAdam) without clipping | 8 |
//! | [`Lamb`](crate::Lamb) | 8, and two per 250 and one per 50 tensors; one copy to the host |
//! | [`RmsProp`](crate::RmsProp), with momentum | 5, 7 |
//! | [`RmsPropTf`](crate::RmsPropTf), with momentum | 6, 8 |
//! | [`Sgd`](crate::Sgd) | 1 |
//! | with momentum by a kernel of CANN's own, else at first, later | 1, 2, 3 |
//!
//! Tensors whose gradient comes or goes, or whose step counts differ, split a buffer into spans, each with
//! launches of its own. A half weight adds two casts, or three if it has no master; a look at the
//! gradients ([`FoundInf::Check`](crate::FoundInf::Check)) two launches and one copy to the host, which
//! Lamb and AdamP join with their own.
//!
//! # Where this differs from torch_npu
//!
//! bf16 is accepted. State is f32 and half weights have f32 masters, as on the CPU, so that a checkpoint
//! moves between devices. A tensor whose gradient appears later takes its first step then, one whose
//! gradient disappears is left alone. Lamb and AdamP copy to the host once per step, not once per tensor.
//!
//! # Kernels of CANN's own
//!
//! They are used where CANN has the symbol, the chip is of the second generation and the rule's numbers are
//! such as they take, unless [declined](NpuOptimizer::with_kernels). State is f32, and so are all their
//! tensors.
//!
//! | kernel | since CANN | used for | not for |
//! |---|---|---|---|
//! | `aclnnFusedSgd` | 9.1 | SGD with momentum or decay: one launch | momentum below 1e-5, dampening below 0 |
//! | `aclnnFusedAdamw` | 9.2 | AdamW from a tensor's second step on | the first: its counter must be above 0 |
//! | `aclnnApplyAdamWV2` | 8.1 | AdamW where the newer one is not used | |
//!
//! Both of AdamW compute with `β` in f32 and make `1 − β` of it, which for 0.999 is off by 1.3e-5 of itself,
//! and so would the moments be. Where it is off by more than 2⁻²¹ an operator behind the kernel adds what a
//! moment lacks: one more launch for each `β` of that kind, of which 0.999 is one and 0.9 is not. With
//! amsgrad that is not possible, and such `β` take the operators of Adam. Both read a tensor with the number
//! of steps before this one; the newer one's document has that number itself in its formula, but its
//! source, which is public, adds one.
//!
//! What the newer two ask for is known from the public headers, documents and sources of ops-nn 9.1.0 and
//! 9.2.0-beta.2. The scale of gradients that they take is not used: `aclnnFusedSgd` would overwrite the
//! gradients with the scaled ones.
//!
//! # What is promised
//!
//! The formulas of the CPU's rules in f32, operator by operator; not the same bits, since how a kernel
//! rounds and adds is CANN's affair. A failure of CANN in the middle of a step leaves weights and state
//! half changed: load a checkpoint then. **Nothing here has been run on Ascend hardware**: the tests
//! use a simulator that enforces the rules CANN's documents state, and the protocol, not the numbers of
//! real kernels, is what that shows.
//!
//! ```no_run
//! use fused_optim::npu::{NpuOptimizer, NpuParam, Operators};
//! use fused_optim::{AdamWHyper, DType, HalfWeights, ParamGroup, Slice, StepCtl};
//!
//! let groups = [ParamGroup::new(AdamWHyper::default(), 0..1)];
//! let mut adamw = NpuOptimizer::new(Operators::open(0)?, groups, HalfWeights::Master)?;
//! adamw.combine(&[NpuParam::new(1024, DType::F32)])?;
//! adamw.write_weight(0, Slice::F32(&[1.0; 1024]))?;
//! adamw.write_grad(0, Slice::F32(&[0.5; 1024]))?;
//! let _ = adamw.step(&[true], &StepCtl::default())?;
//! # Ok::<(), fused_optim::Error>(())
//! ```

mod flat;
mod full_tensor;
mod fused;
mod grad_scales;
mod host_optimizer;
mod native;
mod numbers;
mod rules;
mod sequence;

pub use npu_sys::safe::{Operators, View};
pub use npu_sys::{Devices, probe};

pub use fused::NpuOptimizer;
pub use host_optimizer::HostFed;

use crate::DType;

/// A tensor as [`NpuOptimizer::combine`] needs it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct NpuParam {
    /// Elements.
    pub count: usize,
    /// As [`ParamMut::rows`](crate::ParamMut::rows).
    pub rows: usize,
    /// The weight's type.
    pub weight: DType,
    /// The gradient's.
    pub grad: DType,
}

impl NpuParam {
    /// A vector whose weight and gradient are of one type.
    #[must_use]
    pub const fn new(count: usize, dtype: DType) -> Self {
        Self { count, rows: 0, weight: dtype, grad: dtype }
    }

    /// With its shape, of which [`count`](Self::count) and [`rows`](Self::rows) are taken.
    #[must_use]
    pub fn with_shape(mut self, shape: &[usize]) -> Self {
        self.count = shape.iter().product();
        self.rows = if shape.len() > 1 { shape[0] } else { 0 };
        self
    }
}
