//! Gradient clipping by norm and by value, in a step or as separate functions.
//!
//! A step ([`StepCtl::clip`](crate::StepCtl::clip)) only reads the gradients and multiplies by the
//! clipping factor while it updates. [`clip_grad_norm`] and [`clip_grad_value`] write the clipped
//! gradients.
//!
//! Follows: `torch.nn.utils.clip_grad_norm_` and `clip_grad_value_`. Norms are summed in f64 over
//! all tensors together (PyTorch: in the gradient's type, a norm per tensor and a norm of these),
//! so gradients of 1e30 have a finite norm.

use crate::cpu::{self, GradMap, Reduction};
use crate::error::check_aligned;
use crate::rule::{at_least_zero, require};
use crate::{DType, Error, Result, Slice, SliceMut};

/// Clipping of a step's gradients.
#[derive(Clone, Copy, Debug, PartialEq)]
#[non_exhaustive]
pub enum Clip {
    /// All gradients are multiplied by `min(1, max_norm / (norm + 1e-6))`.
    Norm(ClipNorm),
    /// Every element is clamped to `-value ..= value`; a NaN stays NaN.
    Value(f32),
}

/// Clipping by the norm of all gradients together.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct ClipNorm {
    /// Largest norm; finite, not negative.
    pub max_norm: f64,
    /// The `p` of the p-norm, above 0. The 2-norm and the infinity norm run at memory speed, others
    /// call `pow`.
    pub norm_type: f64,
    /// Return an error if the norm is infinite or NaN. Otherwise the gradients are multiplied as in
    /// PyTorch: an infinite norm makes them 0 or NaN, a NaN norm makes them NaN.
    pub error_if_nonfinite: bool,
    /// The norm of the gradients times [`grad_scale`](crate::StepCtl::grad_scale), if the caller
    /// has computed it: in sharded training each rank has a part of the gradients, and all must
    /// clip by the norm over all ranks. A step then does not read the gradients to compute it, and
    /// [`FoundInf::Check`](crate::FoundInf::Check) checks this norm instead of them. `None`: the
    /// step computes the norm of the gradients passed to it.
    #[doc(alias = "clip_grads_with_norm_")]
    pub total_norm: Option<TotalNorm>,
}

/// Norm of all gradients, computed by the caller.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum TotalNorm {
    /// Its value; not negative.
    Value(f64),
    /// An `f32` in the memory of a CUDA device. Created by [`ClipNorm::with_total_norm_at`].
    #[non_exhaustive]
    At {
        /// Device address.
        address: u64,
    },
}

impl TotalNorm {
    /// Its value, for an optimizer that cannot read CUDA memory.
    pub(crate) const fn on_host(self) -> Result<f64> {
        match self {
            Self::Value(norm) => Ok(norm),
            Self::At { .. } => {
                Err(Error::Unsupported { what: "a `total_norm` at a CUDA device address" })
            }
        }
    }
}

impl ClipNorm {
    /// Clips by the Euclidean norm; a norm that is not finite is not an error.
    #[must_use]
    pub const fn new(max_norm: f64) -> Self {
        Self { max_norm, norm_type: 2.0, error_if_nonfinite: false, total_norm: None }
    }

    /// Sets the norm that the caller has computed.
    #[must_use]
    pub const fn with_total_norm(self, norm: f64) -> Self {
        Self { total_norm: Some(TotalNorm::Value(norm)), ..self }
    }

    /// Sets the device address of the norm that the caller has computed, for an optimizer on a GPU:
    /// an `f32`, not negative. The kernels read it when the step runs, so the host does not wait
    /// for it, and each launch of a captured CUDA graph reads the current value. A value that is
    /// not finite has the effect of such a value on the host; with
    /// [`FoundInf::Check`](crate::FoundInf::Check)
    /// [`step_on_device`](crate::DeviceOptimizer::step_on_device) waits to return whether it
    /// skipped the step, and [`launch_step`](crate::DeviceOptimizer::launch_step) does not.
    ///
    /// The step returns [`Error::MisalignedPointer`] if the address is not a multiple of 4, and
    /// [`Error::Unsupported`] on the CPU and on an NPU.
    ///
    /// # Safety
    ///
    /// In each step with this `ClipNorm`, the address is that of an `f32` in the memory of the
    /// optimizer's device. In the optimizer's stream, its last write comes before the step, and the
    /// next write after it.
    #[must_use]
    #[expect(unsafe_code, reason = "an address is only a number")]
    pub const unsafe fn with_total_norm_at(self, address: u64) -> Self {
        Self { total_norm: Some(TotalNorm::At { address }), ..self }
    }

    pub(crate) const fn reduction(&self) -> Reduction {
        if self.norm_type == 2.0 {
            Reduction::Squares
        } else if self.norm_type == f64::INFINITY {
            Reduction::MaxAbs
        } else {
            Reduction::Powers(self.norm_type)
        }
    }

    /// Factor that the gradients are multiplied by.
    ///
    /// # Errors
    ///
    /// [`Error::NonFiniteNorm`] with `error_if_nonfinite`.
    pub(crate) fn coefficient(&self, norm: f64) -> Result<f64> {
        if self.error_if_nonfinite && !norm.is_finite() {
            return Err(Error::NonFiniteNorm { norm });
        }
        let coefficient = self.max_norm / (norm + 1e-6);
        // Not `min`: a NaN must stay NaN.
        Ok(if coefficient > 1.0 { 1.0 } else { coefficient })
    }
}

impl Clip {
    /// Clips by the Euclidean norm.
    #[must_use]
    pub const fn norm(max_norm: f64) -> Self {
        Self::Norm(ClipNorm::new(max_norm))
    }

    /// Checks the numbers, as each step does.
    ///
    /// # Errors
    ///
    /// [`Error::InvalidHyper`] with the name of the one out of range.
    pub fn validate(self) -> Result<()> {
        match self {
            Self::Norm(ClipNorm { max_norm, norm_type, total_norm, .. }) => {
                at_least_zero("max_norm", max_norm)?;
                require(norm_type > 0.0, "norm_type", norm_type)?;
                match total_norm {
                    Some(TotalNorm::Value(norm)) => {
                        require(norm >= 0.0 || norm.is_nan(), "total_norm", norm)
                    }
                    Some(TotalNorm::At { address }) => {
                        require(address != 0, "address of total_norm", 0.0)?;
                        check_aligned(address, DType::F32)
                    }
                    None => Ok(()),
                }
            }
            Self::Value(value) => require(value >= 0.0, "clip_value", value.into()),
        }
    }
}

/// Multiplies all gradients by `min(1, max_norm / (norm + 1e-6))` and returns the norm before
/// clipping.
///
/// 16-bit gradients are multiplied in f32 and rounded to nearest even. Runs on the calling thread.
///
/// # Errors
///
/// [`Error::InvalidHyper`] for a maximum or norm type out of range; [`Error::NonFiniteNorm`] with
/// `error_if_nonfinite`; [`Error::Unsupported`] for a total norm at a device address. The gradients
/// are unchanged then.
#[doc(alias = "clip_grad_norm_")]
pub fn clip_grad_norm(grads: &mut [SliceMut<'_>], clip: ClipNorm) -> Result<f64> {
    Clip::Norm(clip).validate()?;
    let read: Vec<Slice<'_>> = grads.iter().map(SliceMut::as_slice).collect();
    let norm = clip.total_norm.map(TotalNorm::on_host).transpose()?.unwrap_or_else(|| {
        let mut sums = cpu::reduce(&read, clip.reduction(), GradMap::IDENTITY, 1);
        clip.reduction().norm(clip.reduction().fold(&mut sums))
    });
    let coefficient = clip.coefficient(norm)?;
    if coefficient != 1.0 {
        let map = GradMap { scale: coefficient as f32, ..GradMap::IDENTITY };
        grads.iter_mut().for_each(|grad| cpu::map(grad.reborrow(), map));
    }
    Ok(norm)
}

/// Clamps every element to `-value ..= value`; a NaN stays NaN. Runs on the calling thread.
///
/// # Errors
///
/// [`Error::InvalidHyper`] if `value` is negative or NaN; the gradients are unchanged then.
#[doc(alias = "clip_grad_value_")]
pub fn clip_grad_value(grads: &mut [SliceMut<'_>], value: f32) -> Result<()> {
    Clip::Value(value).validate()?;
    let map = GradMap { limit: value, ..GradMap::IDENTITY };
    grads.iter_mut().for_each(|grad| cpu::map(grad.reborrow(), map));
    Ok(())
}
