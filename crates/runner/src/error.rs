//! `Error`, the error type of this crate.

use std::borrow::Cow;
use std::fmt;
use std::path::{Path, PathBuf};

use train_step::BoxError;

/// An error of the runner or of a crate below it.
///
/// Display omits the backtraces that candle appends to its texts if `RUST_BACKTRACE` is set.
///
/// `Debug` prints the message, too, for a `main` that returns this error.
#[derive(thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// The configuration is wrong, or a call contradicts it. Display has one mistake per line.
    #[error("{}", lines(mistakes))]
    Config {
        /// All that were found at once.
        mistakes: Vec<Mistake>,
    },
    /// Data cannot be read or does not have the expected form.
    #[error("{}{}", prefix(what.as_deref()), without_backtrace(reason))]
    Data {
        /// The data set, file or part of one, if known.
        what: Option<String>,
        /// Why it cannot be used, with the text of the cause.
        reason: String,
        /// The cause, if another library found it.
        source: Option<BoxError>,
    },
    /// The tensor engine failed.
    #[error("{}", without_backtrace(message))]
    Engine {
        /// The text, with that of the cause.
        message: String,
        /// The cause, such as a `candle_core::Error`; `None` if the engine itself refuses.
        source: Option<BoxError>,
    },
    /// A checkpoint is missing, damaged, in use, or of another model or run.
    #[error("{message}")]
    Checkpoint {
        /// The checkpoint, its file, or the work directory; `None` if only the message says.
        path: Option<PathBuf>,
        /// The text, with the path and the cause.
        message: String,
        /// The cause, if another library found it.
        source: Option<BoxError>,
    },
    /// Optimizer steps were skipped `max_consecutive_skips` times in a row, because gradients are
    /// not finite.
    #[error("{}", skipped(*skips, *scale, parameter.as_deref()))]
    StepsSkipped {
        /// The first parameter with such a gradient; `None` if the device reports an overflow.
        parameter: Option<String>,
        /// Number of steps skipped in a row.
        skips: usize,
        /// The loss scale of the last one.
        scale: f32,
    },
    /// `CheckInvalidLossHook` found a loss that is infinite or NaN.
    #[error(
        "the loss is {loss} at iteration {iter} on rank {rank}; lower the learning rate, or clip gradients"
    )]
    InvalidLoss {
        /// The loss.
        loss: f64,
        /// The iteration, counted from 1.
        iter: usize,
        /// The rank.
        rank: usize,
    },
    /// Weights or gradients are not finite at the end of training.
    #[error(
        "training has diverged: {what} not finite at the end, iteration {iter}{}; {}; lower the learning rate, \
         or clip gradients",
        not_finite_since(*.since), last_good(good.as_deref())
    )]
    Diverged {
        /// The first tensor that is not finite, as a subject: "`fc.weight` of rank 1 is".
        what: String,
        /// Number of iterations trained.
        iter: usize,
        /// Since when it is known.
        since: Option<NotFiniteSince>,
        /// The last checkpoint that is finite.
        good: Option<PathBuf>,
    },
    /// The object cannot be used after an earlier error.
    #[error("{}; the error was: {cause}", spent(*.object))]
    Spent {
        /// The object.
        object: SpentObject,
        /// Text of that error.
        cause: String,
    },
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
    #[error("{}", plain(.0))]
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

impl From<train_log::Error> for Error {
    fn from(error: train_log::Error) -> Self {
        Self::Io { what: error.what, source: error.source }
    }
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
                Err(error) => Self::Engine { message: error.to_string(), source: Some(error) },
            },
            E::NoGradients | E::MixedCounts { .. } | E::InvalidCount { .. } => {
                Self::Engine { message: error.to_string(), source: Some(error.into()) }
            }
            E::OtherGroups { .. }
            | E::WrapperState { .. }
            | E::NoWrapperState
            | E::SavedScaler
            | E::OtherScaler { .. } => Self::Checkpoint {
                path: None,
                message: error.to_string(),
                source: Some(error.into()),
            },
            E::NonFinite { floor: Some(floor), .. } => Self::Amp(floor),
            E::NonFinite { parameter, skips, scale, floor: None } => {
                Self::StepsSkipped { parameter, skips, scale }
            }
            E::Spent { cause } => Self::Spent { object: SpentObject::OptimWrapper, cause },
            E::NotOnDevice { .. } => Self::config(format!(
                "device = \"cuda\": {error} with env_cfg.dist_cfg.backend = \"host\""
            )),
            _ => Self::config(error.to_string()),
        }
    }
}

impl Error {
    /// One mistake in the configuration, without its place.
    pub fn config(reason: impl Into<String>) -> Self {
        Self::Config { mistakes: vec![Mistake { place: None, reason: reason.into() }] }
    }

    /// Wrong data of no named file or data set.
    pub fn data(reason: impl Into<String>) -> Self {
        Self::Data { what: None, reason: reason.into(), source: None }
    }

    pub(crate) fn data_of(what: impl fmt::Display, reason: impl fmt::Display) -> Self {
        Self::Data { what: Some(what.to_string()), reason: reason.to_string(), source: None }
    }

    pub(crate) fn data_failed(what: Option<String>, source: impl Into<BoxError>) -> Self {
        let source = source.into();
        Self::Data { what, reason: source.to_string(), source: Some(source) }
    }

    /// The engine refuses a call; nothing below it has failed.
    pub fn engine(message: impl Into<String>) -> Self {
        Self::Engine { message: message.into(), source: None }
    }

    /// A library of the engine failed during an operation, such as `forward`.
    pub fn engine_during(during: impl fmt::Display, source: impl Into<BoxError>) -> Self {
        let source = source.into();
        Self::Engine { message: format!("{during}: {source}"), source: Some(source) }
    }

    pub(crate) fn checkpoint(path: Option<&Path>, message: impl Into<String>) -> Self {
        let path = path.map(Path::to_owned);
        Self::Checkpoint { path, message: message.into(), source: None }
    }
}

/// One mistake in a configuration.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Mistake {
    /// The key or value, if known.
    pub place: Option<ConfigPlace>,
    /// The mistake, with the nearest valid name; without the place.
    pub reason: String,
}

/// Place of a key or value in a configuration.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ConfigPlace {
    /// Name of the file, or `--cfg-options` and the option.
    pub source: String,
    /// Line and column in the file, both counted from 1, columns in characters; `None` in an
    /// option.
    pub line_and_column: Option<(usize, usize)>,
}

/// `place: reason`.
impl fmt::Display for Mistake {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.place {
            Some(place) => write!(f, "{place}: {}", self.reason),
            None => f.write_str(&self.reason),
        }
    }
}

/// `file:line:column`, or the option.
impl fmt::Display for ConfigPlace {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match (&self.source, self.line_and_column) {
            (name, Some((line, column))) => write!(f, "{name}:{line}:{column}"),
            (option, None) => f.write_str(option),
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

fn lines(mistakes: &[Mistake]) -> String {
    mistakes.iter().map(Mistake::to_string).collect::<Vec<_>>().join("\n")
}

fn prefix(what: Option<&str>) -> String {
    what.map_or_else(String::new, |what| format!("{what}: "))
}

/// Returns the text without std's backtrace, which candle appends to its errors if `RUST_BACKTRACE`
/// is set; text that was appended to candle's stays.
pub(crate) fn without_backtrace(text: &str) -> Cow<'_, str> {
    let Some((message, frames)) = text.split_once("\n   0: ") else { return text.into() };
    // A function inlined into another has no number.
    let is_frame = |line: &&str| line.is_empty() || line.starts_with(' ');
    let rest: Vec<_> = frames.lines().skip(1).skip_while(is_frame).collect();
    format!("{message}{}", rest.join("\n")).into()
}

fn plain(error: &train_data::Error) -> String {
    without_backtrace(&error.to_string()).into_owned()
}

/// Since when a run of [`Error::Diverged`] is known to have diverged.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum NotFiniteSince {
    /// The loss has not been finite since this iteration.
    Loss(usize),
    /// A checkpoint at this iteration was not saved, because weights or gradients were not finite.
    Checkpoint(usize),
}

/// The object of [`Error::Spent`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum SpentObject {
    /// A run: build a new one.
    Run,
    /// An optimizer wrapper: gradients of the failed batch may be left in it.
    OptimWrapper,
}

fn not_finite_since(since: Option<NotFiniteSince>) -> String {
    match since {
        None => String::new(),
        Some(NotFiniteSince::Checkpoint(iter)) => format!(", at the latest since iteration {iter}"),
        Some(NotFiniteSince::Loss(iter)) => {
            format!(", the loss has not been finite since iteration {iter}")
        }
    }
}

fn last_good(path: Option<&Path>) -> String {
    match path {
        Some(path) => format!("the last good checkpoint is {}", path.display()),
        None => "this run has no good checkpoint".to_owned(),
    }
}

const fn spent(object: SpentObject) -> &'static str {
    match object {
        SpentObject::Run => {
            "this run has ended with an error: build a new one, which resumes from the last checkpoint"
        }
        SpentObject::OptimWrapper => {
            "this optimizer wrapper is spent after an error, gradients of the failed batch may be left; build \
             the run anew, which resumes from its checkpoint"
        }
    }
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
        assert!(
            matches!(&error, Error::StepsSkipped { parameter: Some(name), skips: 3, scale: 8.0 } if name == "w")
        );
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
    fn errors_of_a_step_keep_their_cause() {
        let std_error = |error: &Error| std::error::Error::source(error).map(ToString::to_string);
        let error = Error::from(train_step::Error::model("no memory"));
        assert!(matches!(&error, Error::Engine { message, .. } if message == "no memory"));
        assert_eq!(std_error(&error).as_deref(), Some("no memory"));
        let error = Error::from(train_step::Error::NoGradients);
        assert!(matches!(&error, Error::Engine { source: Some(source), .. }
            if matches!(source.downcast_ref(), Some(train_step::Error::NoGradients))));
        let error = Error::from(train_step::Error::OtherGroups { was: 1, is: 2 });
        assert!(matches!(&error, Error::Checkpoint { path: None, source: Some(source), .. }
            if matches!(source.downcast_ref(), Some(train_step::Error::OtherGroups { was: 1, .. }))));
        assert_eq!(std_error(&error), Some(error.to_string()));
        let error = Error::engine("this engine cannot compile: remove `compile`");
        assert_eq!(std_error(&error), None);
    }

    #[test]
    fn spent_wrapper_has_the_text_of_train_step() {
        let spent = || train_step::Error::Spent { cause: "no memory".to_owned() };
        let error = Error::from(spent());
        let Error::Spent { object: SpentObject::OptimWrapper, cause } = &error else {
            panic!("{error}")
        };
        assert_eq!((cause.as_str(), error.to_string()), ("no memory", spent().to_string()));
    }

    #[test]
    fn data_errors_have_data_set_and_cause() {
        let cause = std::io::Error::from(std::io::ErrorKind::UnexpectedEof);
        let error = Error::data_failed(Some("digits".to_owned()), cause);
        assert_eq!(error.to_string(), "digits: unexpected end of file");
        let cause = std::error::Error::source(&error).unwrap();
        assert!(cause.is::<std::io::Error>(), "{cause}");
        assert!(matches!(error, Error::Data { what: Some(what), .. } if what == "digits"));
    }

    #[test]
    fn text_after_a_backtrace_stays() {
        let backtrace = std::backtrace::Backtrace::force_capture();
        let failed = format!("no such row\n{backtrace}");
        let nested = format!("{failed}\n{backtrace}");
        for (text, wanted) in [
            ("no such row".to_owned(), "no such row"),
            (failed.clone(), "no such row"),
            (format!("{failed}: perhaps 12: 3"), "no such row: perhaps 12: 3"),
            (format!("{nested}; add one\nand go on"), "no such row; add one\nand go on"),
        ] {
            assert_eq!(without_backtrace(&text), wanted, "{text}");
        }
        let (dataset, index) = ("rows".to_owned(), 3);
        let error = train_data::Error::Sample { dataset, index, source: failed.clone().into() };
        assert_eq!(Error::from(error).to_string(), "data set `rows`, sample 3: no such row");
        let error = Error::data_failed(Some("val_evaluator".to_owned()), failed);
        assert_eq!(error.to_string(), "val_evaluator: no such row");
    }

    #[test]
    fn debug_prints_the_message_without_backtrace() {
        let text = "forward: no such row\n   0: candle_core::error::Error::bt\n   1: main";
        let error = Error::engine(text);
        assert_eq!(format!("{error:?}"), "forward: no such row");
        let died = collective::Error::PeerDied { op: "barrier #1".to_owned(), rank: 1, pid: 7 };
        let text = died.to_string();
        assert_eq!(format!("{died:?}"), text);
        assert_eq!(format!("{:?}", Error::from(died)), text);
    }
}
