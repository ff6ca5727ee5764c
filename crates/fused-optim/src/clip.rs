//! Bounds on gradients: by norm and by value, inside a step or by themselves.
//!
//! Inside a step ([`StepCtl::clip`](crate::StepCtl::clip)) the gradients are only read: the factor
//! goes into the sweep. [`clip_grad_norm`] and [`clip_grad_value`] write the gradients, for those
//! who want to see them clipped.
//!
//! Follows: `torch.nn.utils.clip_grad_norm_` and `clip_grad_value_`. Norms are summed in f64 over
//! all tensors together (PyTorch: in the gradient's type, a norm per tensor and a norm of these), so
//! gradients of 1e30 have a finite norm.

use crate::cpu::{self, GradMap, Measure};
use crate::{Error, Result, Slice, SliceMut};

/// A bound on a step's gradients.
#[derive(Clone, Copy, Debug, PartialEq)]
#[non_exhaustive]
pub enum Clip {
    /// All gradients are multiplied by `min(1, max_norm / (norm + 1e-6))`.
    Norm(ClipNorm),
    /// Every element is brought into `-value ..= value`; a NaN stays one.
    Value(f32),
}

/// A bound on the norm of all gradients together.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct ClipNorm {
    /// The bound; finite, not negative.
    pub max_norm: f64,
    /// The `p` of the p-norm, above 0: 2 and infinity run at memory's speed, others through `pow`.
    pub norm_type: f64,
    /// Refuse gradients with an infinite or NaN norm. Otherwise PyTorch's arithmetic takes its
    /// course: an infinite norm makes everything 0 or NaN, a NaN makes everything NaN.
    pub error_if_nonfinite: bool,
    /// The norm, of gradients that are already multiplied by [`grad_scale`](crate::StepCtl::grad_scale), where the
    /// caller knows it: in sharded training each rank has a part of the gradients, and all must clip by the norm
    /// over all ranks. The gradients are not read for it, nor for [`FoundInf::Check`](crate::FoundInf::Check),
    /// which then checks this norm. `None`: the gradients given are all there are.
    #[doc(alias = "clip_grads_with_norm_")]
    pub total_norm: Option<f64>,
}

impl ClipNorm {
    /// A bound on the Euclidean norm; no error if it is not finite.
    #[must_use]
    pub const fn new(max_norm: f64) -> Self {
        Self { max_norm, norm_type: 2.0, error_if_nonfinite: false, total_norm: None }
    }

    /// With the norm as the caller knows it.
    #[must_use]
    pub const fn with_total_norm(self, norm: f64) -> Self {
        Self { total_norm: Some(norm), ..self }
    }

    pub(crate) const fn measure(&self) -> Measure {
        if self.norm_type == 2.0 {
            Measure::Squares
        } else if self.norm_type == f64::INFINITY {
            Measure::Largest
        } else {
            Measure::Powers(self.norm_type)
        }
    }

    /// The factor for gradients of this norm.
    ///
    /// # Errors
    ///
    /// [`Error::NonFiniteNorm`] if asked for.
    pub(crate) fn coefficient(&self, norm: f64) -> Result<f64> {
        if self.error_if_nonfinite && !norm.is_finite() {
            return Err(Error::NonFiniteNorm { norm });
        }
        let coefficient = self.max_norm / (norm + 1e-6);
        // Written so that a NaN stays one.
        Ok(if coefficient > 1.0 { 1.0 } else { coefficient })
    }
}

impl Clip {
    /// By the Euclidean norm.
    #[must_use]
    pub const fn norm(max_norm: f64) -> Self {
        Self::Norm(ClipNorm::new(max_norm))
    }

    pub(crate) fn validate(self) -> Result<()> {
        let refuse = |name, value| Err(Error::InvalidHyper { name, value });
        match self {
            Self::Norm(clip) if !(clip.max_norm >= 0.0 && clip.max_norm.is_finite()) => {
                refuse("max_norm", clip.max_norm)
            }
            Self::Norm(clip) if clip.norm_type.is_nan() || clip.norm_type <= 0.0 => {
                refuse("norm_type", clip.norm_type)
            }
            Self::Norm(ClipNorm { total_norm: Some(norm), .. }) if norm < 0.0 => {
                refuse("total_norm", norm)
            }
            Self::Value(value) if value.is_nan() || value < 0.0 => {
                refuse("clip_value", value.into())
            }
            _ => Ok(()),
        }
    }
}

/// Multiplies all gradients by `min(1, max_norm / (norm + 1e-6))`; returns the norm before.
///
/// 16-bit gradients are multiplied in f32 and rounded to nearest even. Runs on the calling thread.
///
/// # Errors
///
/// [`Error::InvalidHyper`] for a bound or norm type out of range; [`Error::NonFiniteNorm`] if `clip`
/// asks for it. Nothing has changed then.
#[doc(alias = "clip_grad_norm_")]
pub fn clip_grad_norm(grads: &mut [SliceMut<'_>], clip: ClipNorm) -> Result<f64> {
    Clip::Norm(clip).validate()?;
    let read: Vec<Slice<'_>> = grads.iter().map(SliceMut::as_slice).collect();
    let norm = clip.total_norm.unwrap_or_else(|| {
        let mut sums = cpu::measure(&read, clip.measure(), GradMap::IDENTITY, 1);
        clip.measure().norm(clip.measure().fold(&mut sums))
    });
    let coefficient = clip.coefficient(norm)?;
    if coefficient != 1.0 {
        let map = GradMap { scale: coefficient as f32, ..GradMap::IDENTITY };
        grads.iter_mut().for_each(|grad| cpu::map(grad.reborrow(), map));
    }
    Ok(norm)
}

/// Brings every element into `-value ..= value`; a NaN stays one. Runs on the calling thread.
///
/// # Errors
///
/// [`Error::InvalidHyper`] if `value` is negative or NaN; nothing has changed then.
#[doc(alias = "clip_grad_value_")]
pub fn clip_grad_value(grads: &mut [SliceMut<'_>], value: f32) -> Result<()> {
    Clip::Value(value).validate()?;
    let map = GradMap { limit: value, ..GradMap::IDENTITY };
    grads.iter_mut().for_each(|grad| cpu::map(grad.reborrow(), map));
    Ok(())
}
