//! `Error`, the error type of this crate.

/// An error of a schedule.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// A number of a schedule is invalid, or its metric is missing; the text names its key.
    #[error("{0}")]
    Schedule(String),
    /// A schedule changes the groups of a part that the optimizer does not have.
    #[error("the optimizer has no part `{part}`; known: {}", .known.join(", "))]
    UnknownPart {
        /// Name of the part.
        part: String,
        /// Names of the optimizer's parts.
        known: Vec<String>,
    },
    /// A saved scheduler belongs to an optimizer with another number of groups.
    #[error("the checkpoint's scheduler has {was} parameter groups, the run's has {is}")]
    OtherGroups {
        /// Number of groups of the saved one.
        was: usize,
        /// Number of groups now.
        is: usize,
    },
    /// A schedule changes the momentum of an optimizer without one.
    #[error("{optimizer} has no momentum for a scheduler to change")]
    NoMomentum {
        /// Kind of the optimizer.
        optimizer: &'static str,
    },
    /// The optimizer refused a value.
    #[error(transparent)]
    Optimizer(#[from] fused_optim::Error),
}

/// Result type of this crate.
pub type Result<T, E = Error> = std::result::Result<T, E>;
