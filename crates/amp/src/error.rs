//! What can go wrong in loss scaling and casting.

/// A failure of this crate. Nothing has changed when one comes back, unless the variant says so.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// An option, a scale or an entry of a saved state is outside its range.
    #[error("invalid {name}: {value} is not {requirement}")]
    Invalid {
        /// Which one, by the name it has in PyTorch.
        name: &'static str,
        /// What was given.
        value: f64,
        /// What it must be.
        requirement: &'static str,
    },
    /// Gradients overflow although the loss scale is already at its floor: training diverges, or
    /// the loss itself is not finite. The scale stays at the floor, growth starts over.
    #[error("gradients overflow at the smallest loss scale, {min_scale}")]
    ScaleAtFloor {
        /// The floor.
        min_scale: f32,
    },
    /// Input and output differ in length.
    #[error("the output has {got} elements, the input {expected}")]
    LengthMismatch {
        /// The input's element count.
        expected: usize,
        /// The output's.
        got: usize,
    },
    /// Only a dynamic scaler has a state to save and load, and it needs one.
    #[error("cannot load {} into a scaler that is {}", if *.dynamic { "an absent state" } else { "a state" }, if *.dynamic { "dynamic" } else { "fixed or disabled" })]
    StateMismatch {
        /// Whether the scaler loaded into is dynamic.
        dynamic: bool,
    },
}

/// The result of this crate's fallible functions.
pub type Result<T> = std::result::Result<T, Error>;
