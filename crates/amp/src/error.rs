//! What can go wrong in loss scaling and casting.

/// A failure of this crate. Nothing has changed when one comes back, unless the variant says so.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// An option, a scale or an entry of a saved state is outside its range.
    #[error("invalid {name}: {value} ({requirement})")]
    Invalid {
        /// Which one, by the name it has in PyTorch.
        name: &'static str,
        /// What was given.
        value: f64,
        /// What it must be.
        requirement: &'static str,
    },
    /// Gradients overflow although the loss scale is already at its floor: training diverges, or
    /// the loss itself is not finite. The scale stays at the floor.
    #[error("gradients overflow at the smallest loss scale {min_scale}")]
    ScaleAtFloor {
        /// The floor.
        min_scale: f32,
    },
    /// Input and output differ in length.
    #[error("expected {expected} elements, got {got}")]
    LengthMismatch {
        /// The input's element count.
        expected: usize,
        /// The output's.
        got: usize,
    },
    /// A saved state was loaded into a disabled scaler, or the other way round.
    #[error("loss scaling is {}, the saved state is of a scaler that was {}", on(*.enabled), on(!*.enabled))]
    EnabledMismatch {
        /// Whether this scaler is enabled.
        enabled: bool,
    },
}

const fn on(enabled: bool) -> &'static str {
    if enabled { "enabled" } else { "disabled" }
}

/// The result of this crate's fallible functions.
pub type Result<T> = std::result::Result<T, Error>;
