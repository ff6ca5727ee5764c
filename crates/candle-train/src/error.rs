//! The error type of this crate, with advice.

use std::fmt;
use std::path::PathBuf;

/// The result of this crate's fallible functions.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// A failed step, checkpoint or collective, or an invalid call.
///
/// `Debug` prints the same text as `Display`, because a `main` that returns an error prints it with
/// `Debug`.
#[derive(thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// A forward or backward pass failed, or an optimizer step on candle's variables.
    #[error(transparent)]
    Candle(#[from] candle_core::Error),
    /// The process group could not be initialized, or a collective failed.
    #[error(transparent)]
    Collective(#[from] collective::Error),
    /// The optimizer rejected its hyper-parameters or a saved state.
    #[error(transparent)]
    Optimizer(#[from] fused_optim::Error),
    /// A scheduler has invalid numbers, or cannot take its step.
    #[error(transparent)]
    Schedule(train_step::Error),
    /// Options of the loss scale, or a saved one, are invalid.
    #[error(transparent)]
    LossScale(#[from] amp::Error),
    /// Too many steps in a row were skipped because gradients were not finite, or the loss scale
    /// has fallen to its minimum.
    #[error("{}", non_finite(parameter, *skips, *scale, floor.as_ref()))]
    NonFinite {
        /// The first parameter, by name, whose averaged gradient is infinite or NaN.
        parameter: String,
        /// Number of steps skipped in a row.
        skips: usize,
        /// The loss scale of the last one.
        scale: f32,
        /// The error of the loss scale, if it has fallen to its minimum.
        #[source]
        floor: Option<amp::Error>,
    },
    /// A batch failed on a rank, and its step was dropped on all ranks.
    #[error("rank {rank} failed: {reason}; the step was dropped on all ranks")]
    RankFailed {
        /// The rank.
        rank: usize,
        /// Its error.
        reason: String,
    },
    /// A checkpoint cannot be written, or belongs to another program.
    #[error("checkpoint {}: {reason}", path.display())]
    Checkpoint {
        /// The file.
        path: PathBuf,
        /// The cause, and the remedy.
        reason: String,
    },
    /// A method of [`Trainer`](crate::Trainer) failed, and there is a remedy.
    #[error("`Trainer::{call}` on rank {rank}: {}", advised(error, advice))]
    Call {
        /// The method.
        call: &'static str,
        /// This rank.
        rank: usize,
        /// The cause.
        #[source]
        error: Box<Self>,
        /// The remedy.
        advice: &'static str,
    },
    /// A call has invalid arguments.
    #[error("{0}")]
    InvalidArgument(String),
}

impl From<train_step::Error> for Error {
    fn from(error: train_step::Error) -> Self {
        use train_step::Error as E;
        match error {
            E::Optimizer(error) => Self::Optimizer(error),
            E::Collective(error) => Self::Collective(error),
            E::LossScale(error) => Self::LossScale(error),
            E::NonFinite { parameter, skips, scale, floor } => {
                Self::NonFinite { parameter, skips, scale, floor }
            }
            E::RankFailed { rank, reason } => Self::RankFailed { rank, reason },
            E::Checkpoint { path, reason } => Self::Checkpoint { path, reason },
            E::InvalidArgument(text) => Self::InvalidArgument(text),
            E::Model(error) => match error.downcast() {
                Ok(error) => Self::Candle(*error),
                Err(error) => Self::InvalidArgument(error.to_string()),
            },
            other => Self::Schedule(other),
        }
    }
}

impl fmt::Debug for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

fn non_finite(parameter: &str, skips: usize, scale: f32, floor: Option<&amp::Error>) -> String {
    let limit = match floor {
        Some(floor) => format!("; {floor}"),
        None => "; check that the loss is finite, or see `TrainerBuilder::max_consecutive_skips`"
            .to_owned(),
    };
    format!(
        "skipped {skips} steps in a row: the gradient of `{parameter}` is not finite, at a loss scale of {scale}{limit}"
    )
}

/// The error's text with advice after its first line; the other lines are a backtrace, or the
/// cause.
fn advised(error: &Error, advice: &str) -> String {
    let text = error.to_string();
    match text.split_once('\n') {
        Some((first, rest)) => format!("{first}; {advice}\n{rest}"),
        None => format!("{text}; {advice}"),
    }
}

impl Error {
    /// This error of a trainer's method, with advice. `params` is the number of trained variables.
    pub(crate) fn of_call(self, call: &'static str, rank: usize, params: usize) -> Self {
        use collective::Error as E;
        let advice = match &self {
            Self::Collective(E::UnusedParameters { names, .. }) if names.len() == params => {
                "the loss depends on no trained variable: run the whole forward pass within the closure, without `detach`"
            }
            Self::Collective(E::UnusedParameters { .. }) => {
                "if a variable is never used, give its name to `TrainerBuilder::frozen`; if only in some steps, call \
                 `TrainerBuilder::find_unused_parameters`"
            }
            Self::Collective(E::Timeout { .. } | E::Mismatch { .. }) => SAME_CALLS,
            Self::Collective(E::PeerDied { .. }) => {
                "its own error is the cause, or it ended early: every rank has to call `step`, `step_weighted`, `mean`, \
                 `sum`, `save_with`, `resume_with`, `resume_with_all`, `save` and `resume` equally often, in the same order"
            }
            Self::Candle(error) => match candle_ops::mixed_types_advice(error) {
                Some(advice) => advice,
                None => return self,
            },
            _ => return self,
        };
        Self::Call { call, rank, error: Box::new(self), advice }
    }
}

pub(crate) const SAME_CALLS: &str = "every rank has to call `step`, `step_weighted`, `mean`, `sum`, `save_with`, `resume_with`, `resume_with_all`, `save` and `resume` equally often, in the same order";
