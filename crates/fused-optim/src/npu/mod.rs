//! Optimizers on an Ascend NPU (feature `npu`).
//!
//! Nine of the CPU's rules with CANN operators, as in torch_npu's fused optimizers: parameters,
//! gradients and state of one type and group are in one flat buffer, so a step is a few launches
//! for any number of tensors. [`NpuOptimizer::combine`] creates the buffers;
//! [`weight`](NpuOptimizer::weight) and [`grad`](NpuOptimizer::grad) return each tensor's view of
//! them. [`HostOptimizer`] is the same as an [`Optimizer`](crate::Optimizer), for models that
//! compute on the host.
//!
//! | optimizer | launches of a plain step of f32 without decay |
//! |---|---|
//! | [`Adadelta`](crate::Adadelta) | 11 |
//! | [`Adam`](crate::Adam), with amsgrad | 8, 9 |
//! | [`AdamW`](crate::AdamW) by a fused kernel of CANN, else as Adam | 3, 8 |
//! | [`AdamP`](crate::AdamP) | 9, with tensors of two dimensions 13 and 4 to 5 per tensor; one copy to the host |
//! | [`BertAdam`](crate::BertAdam) without clipping | 8 |
//! | [`Lamb`](crate::Lamb) | 8, and two per 250 and one per 50 tensors; one copy to the host |
//! | [`RmsProp`](crate::RmsProp), with momentum | 5, 7 |
//! | [`RmsPropTf`](crate::RmsPropTf), with momentum | 6, 8 |
//! | [`Sgd`](crate::Sgd) | 1 |
//! | with momentum by a fused kernel of CANN, else first step, later steps | 1, 2, 3 |
//!
//! Missing gradients and differing step counts split a buffer into spans, each with its own
//! launches. A half weight adds two casts, or three if it has no master; the check of the gradients
//! ([`FoundInf::Check`](crate::FoundInf::Check)) adds two launches and one copy to the host, which
//! Lamb and AdamP combine with their own.
//!
//! # Differences from torch_npu
//!
//! bf16 is supported. State is f32 and half weights have f32 masters, as on the CPU, so that
//! checkpoints move between devices. A tensor whose gradient appears later takes its first step
//! then; a tensor whose gradient is missing is not updated. Lamb and AdamP copy to the host once
//! per step, not once per tensor.
//!
//! # Fused kernels of CANN
//!
//! They are used if CANN has the symbol, the chip is of the second generation and the kernel
//! supports the hyper-parameters, unless [disabled](NpuOptimizer::with_kernels). All their tensors
//! are f32.
//!
//! | kernel | since CANN | used for | not for |
//! |---|---|---|---|
//! | `aclnnFusedSgd` | 9.1 | SGD with momentum or decay: one launch | momentum below 1e-5, dampening below 0 |
//! | `aclnnFusedAdamw` | 9.2 | AdamW from a tensor's second step on | the first: its counter must be above 0 |
//! | `aclnnApplyAdamWV2` | 8.1 | AdamW if the newer kernel is not used | |
//!
//! Both AdamW kernels take `β` in f32 and compute `1 − β` from it. For 0.999 that has a relative
//! error of 1.3e-5, and so would the moments. If the error is above 2⁻²¹, an operator after the
//! kernel corrects the moment: one more launch for each such `β`; 0.999 is one and 0.9 is not. With
//! amsgrad this is not possible, and such `β` use Adam's operators. Both kernels read the number of
//! previous steps from a tensor; the formula in the newer kernel's documentation uses that number
//! as it is, but its public source adds one.
//!
//! The requirements of the newer two are taken from the public headers, documents and sources of
//! ops-nn 9.1.0 and 9.2.0-beta.2. Their gradient scale is not used: `aclnnFusedSgd` would overwrite
//! the gradients with the scaled ones.
//!
//! # Accuracy and limits
//!
//! The formulas of the CPU's rules in f32, operator by operator, but not the same bits: CANN's
//! kernels round and add in their own order. Norms are summed in f32, as on torch_npu, and not in
//! f64 as on the CPU: above 1.8e19 they are infinite, and clipping by them makes the gradients 0. A
//! failure of CANN in the middle of a step leaves weights and state half updated: load a checkpoint
//! then. **This has not been run on Ascend hardware**: the tests use a simulator that enforces the
//! rules of CANN's documents, which tests the calls, not the results of real kernels.
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
pub use host_optimizer::HostOptimizer;

use crate::DType;
use crate::param::rows;

/// Shape and types of a tensor for [`NpuOptimizer::combine`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct NpuParam {
    /// Number of elements.
    pub count: usize,
    /// As [`ParamMut::rows`](crate::ParamMut::rows).
    pub rows: usize,
    /// The weight's type.
    pub weight: DType,
    /// The gradient's type.
    pub grad: DType,
}

impl NpuParam {
    /// A vector whose weight and gradient have the same type.
    #[must_use]
    pub const fn new(count: usize, dtype: DType) -> Self {
        Self { count, rows: 0, weight: dtype, grad: dtype }
    }

    /// Sets [`count`](Self::count) and [`rows`](Self::rows) from the tensor's shape.
    #[must_use]
    pub fn with_shape(self, shape: &[usize]) -> Self {
        Self { count: shape.iter().product(), rows: rows(shape), ..self }
    }
}
