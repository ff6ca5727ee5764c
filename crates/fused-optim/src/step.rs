//! Options and outcome of a step.

use crate::{Clip, Error, Result, TotalNorm};

/// Options of one step.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct StepCtl {
    /// Factor of the gradients: `1 / S` unscales gradients of a loss with scale `S`. Finite and not
    /// negative.
    pub grad_scale: f32,
    /// Whether a gradient is infinite or NaN, or that the step checks this.
    pub found_inf: FoundInf,
    /// Clipping of the gradients times `grad_scale`.
    pub clip: Option<Clip>,
}

impl StepCtl {
    /// No scaling, no clipping and no check of the gradients, as in plain f32 training.
    pub const PLAIN: Self = Self { grad_scale: 1.0, found_inf: FoundInf::Known(false), clip: None };

    /// Checks the values. [`FoundInf::Check`] with a `total_norm` on the host becomes
    /// [`FoundInf::Known`]; with one in device memory it stays, and the kernels check that norm.
    pub(crate) fn validated(mut self) -> Result<Self> {
        if !(self.grad_scale.is_finite() && self.grad_scale >= 0.0) {
            return Err(Error::InvalidGradScale { value: self.grad_scale });
        }
        self.clip.map_or(Ok(()), Clip::validate)?;
        if let (FoundInf::Check, Some(TotalNorm::Value(norm))) = (self.found_inf, self.total_norm())
        {
            self.found_inf = FoundInf::Known(!norm.is_finite());
        }
        Ok(self)
    }

    /// The norm of all gradients, if the caller has computed it.
    pub(crate) const fn total_norm(&self) -> Option<TotalNorm> {
        match self.clip {
            Some(Clip::Norm(clip)) => clip.total_norm,
            _ => None,
        }
    }

    /// The value of [`total_norm`](Self::total_norm), for an optimizer that cannot read CUDA
    /// memory.
    pub(crate) fn host_total_norm(&self) -> Result<Option<f64>> {
        self.total_norm().map(TotalNorm::on_host).transpose()
    }

    /// Largest magnitude of an element; infinity without clipping by value.
    pub(crate) const fn limit(&self) -> f32 {
        match self.clip {
            Some(Clip::Value(limit)) => limit,
            _ => f32::INFINITY,
        }
    }

    /// `max_norm`, if the step clips by norm; an error for clipping that devices do not support.
    #[cfg(any(feature = "cuda", feature = "npu"))]
    pub(crate) fn max_norm_on_device(&self) -> Result<Option<f64>> {
        let what = match self.clip {
            Some(Clip::Norm(clip)) if clip.norm_type != 2.0 => {
                "clipping by another norm than the 2-norm"
            }
            Some(Clip::Norm(clip)) if clip.error_if_nonfinite => "`error_if_nonfinite`",
            Some(Clip::Norm(clip)) => return Ok(Some(clip.max_norm)),
            _ => return Ok(None),
        };
        Err(Error::Unsupported { what })
    }
}

impl Default for StepCtl {
    /// [`PLAIN`](Self::PLAIN).
    fn default() -> Self {
        Self::PLAIN
    }
}

/// Whether any gradient is infinite or NaN.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FoundInf {
    /// The caller has checked the gradients; `true` skips the step. All ranks must pass the same
    /// value.
    Known(bool),
    /// The step checks all gradients times `grad_scale` before it updates, in the pass that
    /// computes the norm for clipping. With several ranks, only for gradients that are reduced
    /// already and complete on each rank.
    Check,
}

/// How 16-bit weights are updated. They lose small updates by themselves: `1 + 0.001` is `1` in
/// bf16.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub enum HalfWeights {
    /// The state has an f32 master, copied from the weight in the first step; the weight is the
    /// master rounded to nearest even.
    #[default]
    Master,
    /// No master: the weight is converted to f32, updated, and rounded to nearest even. Saves four
    /// bytes per parameter and loses updates below half a unit in the last place.
    Nearest,
    /// No master, and stochastic rounding: the expected value is exact, so small updates are not
    /// lost. The random bits depend on seed, tensor index, step and element only: not on threads,
    /// and a resumed optimizer with the same seed and order of tensors continues with the same
    /// bits.
    Stochastic {
        /// Seed of the random bits.
        seed: u64,
    },
}

/// Outcome of a step.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[must_use = "a learning-rate scheduler should not advance on a skipped step"]
pub enum Applied {
    /// The tensors with gradients were updated.
    Applied,
    /// A gradient was infinite or NaN; nothing was changed.
    SkippedNonFinite,
}
