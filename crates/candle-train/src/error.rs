//! The error type of this crate, with advice.

use std::fmt;

use train_step::Error as StepError;

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
    /// The step failed, or a collective, an optimizer, a schedule or a checkpoint.
    #[error(transparent)]
    Step(train_step::Error),
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
    /// Gradients do not match the loss.
    #[error(
        "{}; candle's own operators with a wrong gradient, or none, and their replacements are listed in \
         `candle_ops::stock_candle`; if a gradient differs from the loss's on purpose (`detach`, a straight-through \
         estimator), build the trainer with `check_gradients(false)`", .0.iter().map(ToString::to_string).collect::<Vec<_>>().join("; ")
    )]
    WrongGradients(Vec<train_step::WrongGradient>),
    /// A call has invalid arguments.
    #[error("{0}")]
    InvalidArgument(String),
}

impl From<train_step::Error> for Error {
    fn from(error: train_step::Error) -> Self {
        match error {
            StepError::Model(error) => match error.downcast() {
                Ok(error) => Self::Candle(*error),
                Err(error) => Self::Step(StepError::Model(error)),
            },
            error => Self::Step(error),
        }
    }
}

impl From<collective::Error> for Error {
    fn from(error: collective::Error) -> Self {
        Self::Step(error.into())
    }
}

impl From<fused_optim::Error> for Error {
    fn from(error: fused_optim::Error) -> Self {
        Self::Step(error.into())
    }
}

impl fmt::Debug for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
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
            Self::Step(StepError::Collective(E::UnusedParameters { names, .. }))
                if names.len() == params =>
            {
                "the loss depends on no trained variable: run the whole forward pass within the closure, without `detach`"
            }
            Self::Step(StepError::Collective(E::UnusedParameters { .. })) => {
                "if a variable is never used, give its name to `TrainerBuilder::frozen`; if only in some steps, call \
                 `TrainerBuilder::find_unused_parameters`"
            }
            Self::Step(StepError::Collective(E::Timeout { .. } | E::Mismatch { .. })) => SAME_CALLS,
            Self::Step(StepError::Collective(E::PeerDied { .. })) => {
                "its own error is the cause, or it ended early: every rank has to call the trainer's methods equally \
                 often, in the same order"
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

pub(crate) const SAME_CALLS: &str = "every rank has to call `step`, `step_weighted` (also as `step_on`, `step_on_weighted`), `mean`, `sum` (also by `keep_best`), `save_with`, `resume_with`, `resume_with_all`, `batches`, `batches_of`, `zero_grad`, `save` and `resume` equally often, in the same order";
