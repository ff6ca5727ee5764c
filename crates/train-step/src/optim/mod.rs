//! The path from a batch to updated parameters: accumulation, precision, the optimizer step.
//!
//! [`OptimWrapper::update_params`] runs forward and backward by the program's own function and,
//! when enough batches have been accumulated, steps the optimizer.

mod buffers;
mod counts;
mod dict;
mod overflow;
mod run;
mod wrapper;

use amp::ScalerState;
use fused_optim::{Applied, StateDict};

pub(crate) use buffers::BuffersBefore;
pub use counts::PendingCounts;
pub use dict::{Member, OptimizerDict, assign};
pub use overflow::Overflows;
pub use wrapper::{MAX_CONSECUTIVE_SKIPS, OptimWrapper};

/// State of a wrapper that a run resumes from.
#[derive(Clone, Debug)]
pub struct OptimWrapperState {
    /// Moments, master weights and hyper-parameters of the optimizer.
    pub optimizer: StateDict,
    /// State of the loss scaler, if there is one.
    pub loss_scaler: Option<ScalerState>,
    /// Number of steps skipped in a row.
    pub skipped: usize,
}

/// Result of one batch.
#[derive(Clone, Debug)]
pub struct Update<L> {
    /// Losses reported by the model: the result of forward and backward.
    pub losses: L,
    /// Result of the optimizer step; `None` if the batch was only accumulated.
    pub applied: Option<Applied>,
    /// Message for the log.
    pub note: Option<String>,
    /// Warning for the log.
    pub warning: Option<String>,
}
