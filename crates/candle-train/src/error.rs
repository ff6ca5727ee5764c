//! The error type of this crate, and what it advises.

use std::fmt;
use std::path::PathBuf;

/// The result of this crate's fallible functions.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// A step, a checkpoint or a collective failed; or a call was invalid.
///
/// `Debug` prints the same text as `Display`, because a `main` that returns an error prints it with `Debug`.
#[derive(thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// A forward or backward pass, or an optimizer's step on candle's variables.
    #[error(transparent)]
    Candle(#[from] candle_core::Error),
    /// The ranks could not join, or a collective failed.
    #[error(transparent)]
    Collective(#[from] collective::Error),
    /// The optimizer refused its hyper-parameters or a saved state.
    #[error(transparent)]
    Optimizer(#[from] fused_optim::Error),
    /// The loss scale has fallen to its floor, or a saved one is invalid.
    #[error(transparent)]
    LossScale(#[from] amp::Error),
    /// A checkpoint cannot be written, or is not this program's.
    #[error("checkpoint {}: {reason}", path.display())]
    Checkpoint {
        /// The file.
        path: PathBuf,
        /// What is wrong, and what to do.
        reason: String,
    },
    /// A method of [`Trainer`](crate::Trainer) failed, and there is something to do about it.
    #[error("`Trainer::{call}` on rank {rank}: {}", advised(error, advice))]
    Call {
        /// The method.
        call: &'static str,
        /// This rank.
        rank: usize,
        /// What happened.
        #[source]
        error: Box<Self>,
        /// What to do.
        advice: &'static str,
    },
    /// A call with arguments that do not fit.
    #[error("{0}")]
    InvalidArgument(String),
}

impl fmt::Debug for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

/// The error's text with advice behind its first line: what follows is a backtrace, or the cause.
fn advised(error: &Error, advice: &str) -> String {
    let text = error.to_string();
    match text.split_once('\n') {
        Some((first, rest)) => format!("{first}; {advice}\n{rest}"),
        None => format!("{text}; {advice}"),
    }
}

impl Error {
    /// This error of a trainer's method, with what to do about it. `params` is the number of trained variables.
    pub(crate) fn of_call(self, call: &'static str, rank: usize, params: usize) -> Self {
        use collective::Error as E;
        let advice = match &self {
            Self::Collective(E::UnusedParameters { names, .. }) if names.len() == params => {
                "the loss depends on no trained variable: run the whole forward pass within the closure, without `detach`"
            }
            Self::Collective(E::UnusedParameters { .. }) => {
                "if a variable is never used, give its name to `Builder::frozen`; if only in some steps, call \
                 `Builder::find_unused_parameters`"
            }
            Self::Collective(E::Timeout { .. } | E::Mismatch { .. }) => SAME_CALLS,
            Self::Collective(E::PeerDied { .. }) => {
                "its own error is the cause, or it ended early: every rank has to call `step`, `mean`, `sum`, `save` and \
                 `resume` equally often, in the same order"
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

pub(crate) const SAME_CALLS: &str = "every rank has to call `step`, `mean`, `sum`, `save` and `resume` equally often, in the same order";
