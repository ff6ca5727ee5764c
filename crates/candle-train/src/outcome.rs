//! [`Step`]: what a batch returns.

use candle_core::Tensor;

/// Result of a batch.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct Step {
    /// Loss of this rank's batch, detached, in device memory.
    pub loss: Tensor,
    /// Whether the batch ended in a step, and whether that was taken. The same on all ranks.
    pub outcome: Outcome,
}

/// State of the step that a batch belongs to.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Outcome {
    /// The batch was accumulated; a later one ends in the step.
    Accumulated,
    /// The variables were updated.
    Updated,
    /// Gradients were not finite, so no variable has changed.
    Skipped {
        /// The loss scale from now on.
        loss_scale: f32,
    },
}
