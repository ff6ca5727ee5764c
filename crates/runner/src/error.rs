//! `Error`, the error type of this crate.

use std::fmt;

/// An error of the runner or of a crate below it.
///
/// `Debug` prints the message, too, for a `main` that returns this error.
#[derive(thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// The configuration is wrong; the text names file, line, column and the nearest valid name.
    #[error("{0}")]
    Config(String),
    /// Data cannot be read or does not have the expected form.
    #[error("{0}")]
    Data(String),
    /// The tensor engine failed. Display omits a backtrace that its library appended to the text.
    #[error("{}", without_backtrace(.0))]
    Engine(String),
    /// A checkpoint is missing, damaged, or of another model.
    #[error("{0}")]
    Checkpoint(String),
    /// Gradients or weights are no longer finite.
    #[error("{0}")]
    Diverged(String),
    /// The object cannot be used after an earlier error, which the text repeats.
    #[error("{0}")]
    Spent(String),
    /// The run ended because one of the ranks received a signal.
    #[error("ended by signal {signal}{}", is_saved(*.saved))]
    Interrupted {
        /// Signal number.
        signal: i32,
        /// Whether a checkpoint of the current position was saved.
        saved: bool,
    },
    /// A collective failed: a peer died, timed out, or made a different call.
    #[error(transparent)]
    Collective(#[from] collective::Error),
    /// The launcher failed, or the launcher of this rank has ended.
    #[error(transparent)]
    Launch(#[from] launch::Error),
    /// A data set failed, or a batch has no such field or another shape.
    #[error(transparent)]
    TrainData(#[from] train_data::Error),
    /// An optimizer rejected its parameters or its state.
    #[error(transparent)]
    Optim(#[from] fused_optim::Error),
    /// The loss scale cannot be changed further.
    #[error(transparent)]
    Amp(#[from] amp::Error),
    /// A system call failed.
    #[error("{what}: {source}")]
    Io {
        /// The operation and the path.
        what: String,
        /// The error of the operating system.
        source: std::io::Error,
    },
}

impl From<train_step::Error> for Error {
    fn from(error: train_step::Error) -> Self {
        use train_step::Error as E;
        match error {
            E::Optimizer(error) => Self::Optim(error),
            E::Collective(error) => Self::Collective(error),
            E::LossScale(error) => Self::Amp(error),
            E::Model(error) => match error.downcast::<Self>() {
                Ok(error) => *error,
                Err(error) => Self::Engine(error.to_string()),
            },
            E::NoGradients | E::MixedCounts { .. } | E::InvalidCount { .. } => {
                Self::Engine(error.to_string())
            }
            E::OtherGroups { .. }
            | E::WrapperState { .. }
            | E::NoWrapperState
            | E::SavedScaler
            | E::OtherScaler { .. } => Self::Checkpoint(error.to_string()),
            E::NonFinite { floor: Some(floor), .. } => Self::Amp(floor),
            E::NonFinite { parameter, skips, scale, floor: None } => {
                Self::Diverged(skipped(skips, scale, parameter.as_deref()))
            }
            E::Spent { .. } => Self::Spent(error.to_string()),
            E::NotOnDevice { .. } => Self::Config(format!(
                "device = \"cuda\": {error} with env_cfg.dist_cfg.backend = \"host\""
            )),
            _ => Self::Config(error.to_string()),
        }
    }
}

/// For an error within a visit of a model's tensors: [`Error::from`] returns it unchanged.
impl From<Error> for train_step::Error {
    fn from(error: Error) -> Self {
        Self::Model(Box::new(error))
    }
}

impl fmt::Debug for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

/// Returns the text before std's backtrace, which candle appends to its errors if `RUST_BACKTRACE`
/// is set. A text that goes on after candle's needs it.
pub(crate) fn without_backtrace(text: &str) -> &str {
    text.split_once("\n   0: ").map_or(text, |(message, _)| message)
}

fn skipped(steps: usize, scale: f32, parameter: Option<&str>) -> String {
    let first = parameter.map_or_else(
        || "the device reports an overflow".to_owned(),
        |name| format!("the first is that of `{name}`"),
    );
    format!(
        "{steps} optimizer steps in a row were skipped, because gradients are not finite ({first}; loss scale \
         {scale}): the weights no longer change; lower the learning rate, clip gradients, or look for the data \
         that cause it; `max_consecutive_skips` of AmpOptimWrapper sets this number"
    )
}

/// Second half of the message of [`Error::Interrupted`].
const fn is_saved(saved: bool) -> &'static str {
    match saved {
        true => ", after saving a checkpoint: resume to continue",
        false => "; no checkpoint was saved: resume from an earlier one, if there is one",
    }
}

/// Result type of this crate.
pub type Result<T, E = Error> = std::result::Result<T, E>;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn skipped_steps_are_told_with_parameter_and_key() {
        let (parameter, floor) = (Some("w".to_owned()), None);
        let error = train_step::Error::NonFinite { parameter, skips: 3, scale: 8.0, floor };
        let error = Error::from(error);
        assert!(matches!(error, Error::Diverged(_)));
        let text = error.to_string();
        assert!(
            text.starts_with(
                "3 optimizer steps in a row were skipped, because gradients are not finite (the first is that of \
                 `w`; loss scale 8)"
            ),
            "{text}"
        );
    }

    #[test]
    fn debug_prints_the_message_without_backtrace() {
        let text = "forward: no such row\n   0: candle_core::error::Error::bt\n   1: main";
        let error = Error::Engine(text.to_owned());
        assert_eq!(format!("{error:?}"), "forward: no such row");
        let died = collective::Error::PeerDied { op: "barrier #1".to_owned(), rank: 1, pid: 7 };
        let text = died.to_string();
        assert_eq!(format!("{died:?}"), text);
        assert_eq!(format!("{:?}", Error::from(died)), text);
    }
}
