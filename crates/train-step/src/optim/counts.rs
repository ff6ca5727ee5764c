//! Weighs the batches of a step by the numbers of tokens, or samples, that their losses are means
//! of.
//!
//! The mean over all tokens of a step is the mean of its batches' losses, each weighted by its
//! number of tokens, over batches and ranks. A batch's loss is multiplied by its count divided by a
//! unit before backward, and the averaged gradients are divided by the step's mean count in this
//! unit. The unit is a power of two, so that it changes no bit unless a gradient leaves the range
//! of its type.
//!
//! It holds for the whole run, because a checkpoint may have gradients that wait for a step. A
//! [`Trainer`](crate::Trainer) refuses to save then, so its unit (`trainer/exchange.rs`) is that of
//! each step: the largest count, which makes a step of equal counts exact.

use fused_optim::Slice;
use half::{bf16, f16};

use crate::{DeviceTensor, Error, GradSink, ModelWrapper, Result, SharedSink};

/// Counts of the batches since the last step.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct LossCounts {
    /// Power of two near the first batches' counts, equal on all ranks; `None` before them.
    unit: Option<f64>,
    /// Sum of this rank's counts since the last step.
    pending: f64,
    /// Whether the batches since the last step have counts; `None` if there is none.
    counted: Option<bool>,
    /// Whether the batches of this process have counts; `None` before the first.
    known: Option<bool>,
    /// Divisor of the losses of this step.
    divisor: f64,
}

/// Counts of gradients that await a step, for a checkpoint.
#[derive(Clone, Copy, Debug, PartialEq, serde::Serialize, serde::Deserialize)]
pub struct PendingCounts {
    /// Power of two that counts are divided by.
    pub unit: f64,
    /// Mean over the ranks of the sums of counts; `None` if no batch awaits a step.
    pub mean: Option<f64>,
}

impl LossCounts {
    /// Adds a batch of a step that divides its losses by `divisor`. Returns the factor of its loss
    /// besides. Every rank calls it; the first time ranks exchange their counts.
    pub(super) fn add(
        &mut self,
        count: Option<f64>,
        divisor: f64,
        wrapper: &dyn ModelWrapper,
    ) -> Result<f64> {
        self.divisor = divisor;
        if self.counted.replace(count.is_some()).is_some_and(|was| was != count.is_some()) {
            return Err(Error::MixedCounts { within_step: true });
        }
        // The ranks exchange counts: one whose answer changed alone would leave the others waiting.
        if self.known.replace(count.is_some()).is_some_and(|was| was != count.is_some()) {
            return Err(Error::MixedCounts { within_step: false });
        }
        let Some(count) = count else { return Ok(1.0) };
        if !(count >= 0.0 && count.is_finite()) {
            return Err(Error::InvalidCount { count });
        }
        self.pending += count;
        if self.unit.is_none() {
            let mean = wrapper.mean_over_ranks(count)?;
            self.unit = (mean > 0.0).then(|| mean.log2().round().clamp(-60.0, 60.0).exp2());
        }
        let unit = self.unit.unwrap_or(1.0);
        Ok(if count > 0.0 { count / unit } else { NOTHING })
    }

    /// Returns the factor of the averaged gradients of the step; every rank calls it.
    pub(super) fn step_factor(&self, wrapper: &dyn ModelWrapper) -> Result<f64> {
        if self.counted != Some(true) {
            return Ok(1.0);
        }
        let mean = wrapper.mean_over_ranks(self.pending)?;
        let unit = self.unit.unwrap_or(1.0);
        // Without any token the gradients are zero.
        Ok(if mean > 0.0 { self.divisor * unit / mean } else { 1.0 })
    }

    /// Begins the next step.
    pub(super) fn clear(&mut self) {
        (self.pending, self.counted) = (0.0, None);
    }

    /// Returns the counts for a checkpoint; `None` if no batch has had one. Every rank calls it.
    pub(super) fn save(&self, wrapper: &dyn ModelWrapper) -> Result<Option<PendingCounts>> {
        let Some(unit) = self.unit else { return Ok(None) };
        let is_pending = self.counted == Some(true);
        let mean = is_pending.then(|| wrapper.mean_over_ranks(self.pending)).transpose()?;
        Ok(Some(PendingCounts { unit, mean }))
    }

    /// Restores the counts of a checkpoint, in which gradients await a step if `waits`.
    pub(super) fn load(&mut self, saved: Option<PendingCounts>, waits: bool) {
        let mean = saved.and_then(|saved| saved.mean);
        *self = Self {
            unit: saved.map(|saved| saved.unit),
            pending: mean.unwrap_or(0.0),
            counted: waits.then_some(mean.is_some()),
            known: None,
            divisor: 1.0,
        };
    }
}

/// Factor of the loss of a batch without tokens, which must not count: a loss needs a positive
/// factor.
const NOTHING: f64 = 1.0 / (1_u64 << 60) as f64;

/// Passes on zeros in place of the gradients of a batch without tokens, whose loss may be NaN.
/// Gradients on a device are passed on as they are: those of the loss, multiplied by [`NOTHING`].
pub(super) struct ZeroSink(pub(super) SharedSink);

impl GradSink for ZeroSink {
    fn ready(&mut self, index: usize, grad: Slice<'_>) -> Result<()> {
        let mut inner = self.0.lock();
        match grad {
            Slice::F32(grad) => inner.ready(index, Slice::F32(&vec![0.0; grad.len()])),
            Slice::F16(grad) => inner.ready(index, Slice::F16(&vec![f16::ZERO; grad.len()])),
            Slice::Bf16(grad) => inner.ready(index, Slice::Bf16(&vec![bf16::ZERO; grad.len()])),
        }
    }

    fn ready_on_device(&mut self, index: usize, grad: Box<dyn DeviceTensor>) -> Result<()> {
        self.0.lock().ready_on_device(index, grad)
    }
}
