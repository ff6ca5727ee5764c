//! [`Step`]: what a batch returns.

/// Result of a batch.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct Step<L> {
    /// Result of forward and backward: the loss of this rank's batch.
    pub loss: L,
    /// Whether the batch ended in a step, and whether that was taken. The same on all ranks.
    pub outcome: Outcome,
}

impl<L> Step<L> {
    /// Converts the loss.
    pub fn map<R>(self, convert: impl FnOnce(L) -> R) -> Step<R> {
        Step { loss: convert(self.loss), outcome: self.outcome }
    }
}

/// State of the step that a batch belongs to.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Outcome {
    /// The batch was accumulated; a later one ends in the step.
    Accumulated,
    /// The parameters were updated.
    Updated,
    /// Gradients were not finite, so no parameter has changed.
    Skipped {
        /// The loss scale from now on.
        loss_scale: f32,
    },
}
