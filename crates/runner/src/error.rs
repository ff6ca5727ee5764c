//! `Error`: a failure of a run.

use std::fmt;

/// A failure of the runner or of a crate under it.
///
/// `Debug` is the message, too: it is what a `main` that returns one prints.
#[derive(thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// The configuration is wrong; the text names file, line, column and the nearest valid name.
    #[error("{0}")]
    Config(String),
    /// Data that cannot be read or does not have the expected form.
    #[error("{0}")]
    Data(String),
    /// The tensor engine failed. A backtrace that its library has put behind the text is not shown.
    #[error("{}", without_backtrace(.0))]
    Engine(String),
    /// A checkpoint that is missing, damaged, or of another model.
    #[error("{0}")]
    Checkpoint(String),
    /// A signal to one of the ranks ended the run.
    #[error("ended by signal {signal}{}", is_saved(*.saved))]
    Interrupted {
        /// The signal's number.
        signal: i32,
        /// Whether the run can be resumed from where it was.
        saved: bool,
    },
    /// A collective failed: a peer died, timed out, or called something else.
    #[error(transparent)]
    Collective(#[from] collective::Error),
    /// The launcher gave up, or a rank's launcher has ended.
    #[error(transparent)]
    Launch(#[from] launch::Error),
    /// A data set failed, or a batch lacks what was expected of it.
    #[error(transparent)]
    TrainData(#[from] train_data::Error),
    /// An optimizer refused its parameters or its state.
    #[error(transparent)]
    Optim(#[from] fused_optim::Error),
    /// The loss scale has nowhere to go.
    #[error(transparent)]
    Amp(#[from] amp::Error),
    /// The operating system refused.
    #[error("{what}: {source}")]
    Io {
        /// What was being done, to which path.
        what: String,
        /// The system's answer.
        source: std::io::Error,
    },
}

impl fmt::Debug for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

/// The text before std's backtrace, which candle's errors go on with where `RUST_BACKTRACE` is set.
fn without_backtrace(text: &str) -> &str {
    text.split_once("\n   0: ").map_or(text, |(message, _)| message)
}

/// Whether an interrupted run can be resumed.
const fn is_saved(saved: bool) -> &'static str {
    match saved {
        true => ", after a checkpoint: resume to go on",
        false => " and no checkpoint to resume from was written: an earlier one may be there",
    }
}

/// Result of a runner operation.
pub type Result<T, E = Error> = std::result::Result<T, E>;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn debug_is_the_message_and_no_backtrace_is_shown() {
        let text = "forward: no such row\n   0: candle_core::error::Error::bt\n   1: main";
        let error = Error::Engine(text.to_owned());
        assert_eq!(format!("{error:?}"), "forward: no such row");
        let died = collective::Error::PeerDied { op: "barrier #1".to_owned(), rank: 1, pid: 7 };
        let text = died.to_string();
        assert_eq!(format!("{died:?}"), text);
        assert_eq!(format!("{:?}", Error::from(died)), text);
    }
}
