//! `Error`, the error type of this crate.

use std::path::PathBuf;

/// An error of any kind, of the program that lends its tensors.
pub type BoxError = Box<dyn std::error::Error + Send + Sync>;

/// An error of a step or of a schedule.
///
/// `Debug` prints the same text as `Display`, because a `main` that returns an error prints it with
/// `Debug`.
#[derive(thiserror::Error)]
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
    /// The optimizer refused a value, its parameters or its state.
    #[error(transparent)]
    Optimizer(#[from] fused_optim::Error),
    /// A collective failed: a peer died, timed out, or made a different call.
    #[error(transparent)]
    Collective(#[from] collective::Error),
    /// The loss scale cannot be changed further.
    #[error(transparent)]
    LossScale(#[from] amp::Error),
    /// The model failed, or the device that it is on.
    #[error(transparent)]
    Model(BoxError),
    /// No parameter has a gradient.
    #[error("no parameter has a gradient: the loss does not depend on the model (is it detached?)")]
    NoGradients,
    /// The number of samples, or of tokens, that a loss is the mean of is known for some batches
    /// only.
    #[error("{}", mixed_counts(*within_step))]
    MixedCounts {
        /// Whether for some batches of one step.
        within_step: bool,
    },
    /// The number of samples, or of tokens, that a loss is the mean of is negative or not finite.
    #[error("invalid `loss_count` {count}: it must be finite and not negative")]
    InvalidCount {
        /// The number.
        count: f64,
    },
    /// A gradient was reported for a parameter that does not exist.
    #[error("a gradient was reported for parameter {index}; there are {count} parameters")]
    NoParameter {
        /// The index.
        index: usize,
        /// Number of parameters.
        count: usize,
    },
    /// A model lends other tensors than it names.
    #[error("{reason}")]
    WrongTensors {
        /// The tensor, and how it differs.
        reason: String,
    },
    /// A wrapper does not exchange the counts of ranks.
    #[error(
        "this model wrapper does not support a model with `loss_count`: implement `mean_over_ranks`"
    )]
    NoCounts,
    /// An option of the averages is not supported on the device.
    #[error(
        "averaging gradients by NCCL does not support `{option}`: remove it, or average on the host"
    )]
    NotOnDevice {
        /// The option.
        option: &'static str,
    },
    /// A parameter belongs to no part, or to two.
    #[error(
        "parameter `{parameter}` must be under one of the parts in [optim_wrapper]: {}", .parts.join(", ")
    )]
    NoPart {
        /// Name of the parameter.
        parameter: String,
        /// Names of the parts.
        parts: Vec<String>,
    },
    /// A part has no parameters.
    #[error("the model has no parameters under `{part}.`")]
    EmptyPart {
        /// Name of the part.
        part: String,
    },
    /// The process group was split into no group for this rank.
    #[error("splitting the process group returned no group for this rank")]
    NoGroup,
    /// The saved state of a wrapper is damaged, or of another wrapper.
    #[error("the model wrapper's state: {reason}")]
    WrapperState {
        /// The cause.
        reason: String,
    },
    /// A wrapper without state was given one.
    #[error("this model wrapper does not support restoring a state")]
    NoWrapperState,
    /// A saved loss scaler is of no use without mixed precision.
    #[error(
        "the checkpoint contains a loss scaler: it was saved with AmpOptimWrapper, but this run uses OptimWrapper"
    )]
    SavedScaler,
    /// A saved loss scaler does not fit.
    #[error("`loss_scaler`: {source}{}", scaler_hint(*is_missing))]
    OtherScaler {
        /// Whether none was saved.
        is_missing: bool,
        /// The cause.
        source: amp::Error,
    },
    /// Too many steps in a row were skipped because gradients were not finite, or the loss scale
    /// has fallen to its minimum.
    #[error("{}", non_finite(parameter.as_deref(), *skips, *scale, floor.as_ref()))]
    NonFinite {
        /// The first parameter, by name, whose averaged gradient is infinite or NaN; `None` if the
        /// device reports an overflow.
        parameter: Option<String>,
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
    /// A call has invalid arguments.
    #[error("{0}")]
    InvalidArgument(String),
    /// The object cannot be used after an earlier error.
    #[error(
        "this optimizer wrapper is spent after an error, gradients of the failed batch may be left; build \
         the run anew, which resumes from its checkpoint; the error was: {cause}"
    )]
    Spent {
        /// Text of that error.
        cause: String,
    },
}

impl std::fmt::Debug for Error {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        std::fmt::Display::fmt(self, f)
    }
}

impl Error {
    /// An error of the model, or of its device.
    pub fn model(error: impl Into<BoxError>) -> Self {
        Self::Model(error.into())
    }
}

const fn mixed_counts(within_step: bool) -> &'static str {
    match within_step {
        true => {
            "`loss_count` is known for some batches of a step only: return it for all or for none; after a \
             change of the model resume from a checkpoint between two steps"
        }
        // The ranks exchange counts: one whose answer changed alone would leave the others waiting.
        false => {
            "`loss_count` is known for some batches only: return it for all batches of a run, or for none"
        }
    }
}

const fn scaler_hint(is_missing: bool) -> &'static str {
    match is_missing {
        true => {
            ": this run scales its loss, but the run that saved the checkpoint did not (OptimWrapper, or \
             AmpOptimWrapper without a loss scale): take the model alone with `load_from`"
        }
        false => "",
    }
}

fn non_finite(
    parameter: Option<&str>,
    skips: usize,
    scale: f32,
    floor: Option<&amp::Error>,
) -> String {
    let what = match parameter {
        Some(name) => format!("the gradient of `{name}` is not finite"),
        None => "the device reports an overflow".to_owned(),
    };
    let limit = match floor {
        Some(floor) => format!("; {floor}"),
        None => "; check that the loss is finite, or see `TrainerBuilder::max_consecutive_skips`"
            .to_owned(),
    };
    format!("skipped {skips} steps in a row: {what}, at a loss scale of {scale}{limit}")
}

/// Result type of this crate.
pub type Result<T, E = Error> = std::result::Result<T, E>;
