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
//! | [`AdamW`](crate::AdamW) by `aclnnApplyAdamWV2`, [as a rule](NpuOptimizer::with_kernels), else as Adam | 3, 8 |
//! | [`AdamP`](crate::AdamP) | 9, with tensors of two dimensions 13 and 4 to 5 per tensor; one copy to the host |
//! | [`BertAdam`](crate::BertAdam) without clipping | 8 |
//! | [`Lamb`](crate::Lamb) | 8, and two per 250 and one per 50 tensors; one copy to the host |
//! | [`RmsProp`](crate::RmsProp), with momentum | 5, 7 |
//! | [`RmsPropTf`](crate::RmsPropTf), with momentum | 6, 8 |
//! | [`Sgd`](crate::Sgd), with momentum at first, later | 1, 2, 3 |
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
//! # Kernels that are left out
//!
//! `aclnnFusedSgd` and `aclnnFusedAdamw` came after CANN 8.1, whose headers do not declare them. Of
//! torch_npu's wheels 2.5.1 names neither and 2.14.0 the first, as a string in its library; no header of
//! either declares one. So their prototypes cannot be checked here, and a call by a wrong one is no error
//! but damage: SGD and Adam are always sequences of operators.
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
mod fused;
mod host;
mod look;
mod numbers;
mod rules;
mod sequence;
mod wholes;

pub use npu_sys::safe::{Operators, View};
pub use npu_sys::{Devices, probe};

pub use fused::NpuOptimizer;
pub use host::HostFed;

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
