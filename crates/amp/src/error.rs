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
    /// A [`GradScaler`](crate::GradScaler) was asked to `call` before it had ever scaled a loss.
    #[error("{call} before the loss was ever scaled")]
    NotScaled {
        /// What was called.
        call: &'static str,
    },
    /// The optimizer's gradients are already unscaled.
    #[error("the gradients of optimizer {optimizer} are already unscaled since the last update")]
    UnscaledTwice {
        /// The caller's number for it.
        optimizer: usize,
    },
    /// The optimizer has already stepped: unscaling now would be too late.
    #[error("unscale of optimizer {optimizer} after its step")]
    UnscaledAfterStep {
        /// The caller's number for it.
        optimizer: usize,
    },
    /// The optimizer has already stepped since the last update.
    #[error("optimizer {optimizer} has already stepped since the last update")]
    SteppedTwice {
        /// The caller's number for it.
        optimizer: usize,
    },
    /// There was no gradient to look at, so whether one overflowed is not known.
    #[error("no gradient {} was checked", .optimizer.map_or_else(|| "of any optimizer".to_owned(), |i| format!("of optimizer {i}")))]
    NothingChecked {
        /// The one that was to step; `None` if an update found nothing checked.
        optimizer: Option<usize>,
    },
    /// A scaler that is fixed or disabled has no factors to set.
    #[error("the loss scale is not dynamic")]
    NotDynamic,
    /// Autocast refuses the operator: it is unsafe in half precision.
    #[error("{op} is unsafe in half precision")]
    Banned {
        /// Its name.
        op: String,
    },
    /// Input and output differ in length.
    #[error("the output has {got} elements, the input {expected}")]
    LengthMismatch {
        /// The input's element count.
        expected: usize,
        /// The output's.
        got: usize,
    },
    /// What a device does not do. Nothing slower is done in its place.
    #[cfg(feature = "npu")]
    #[error("{what} is not supported on a device")]
    Unsupported {
        /// What was asked for.
        what: &'static str,
    },
    /// CANN failed, or is missing.
    #[cfg(feature = "npu")]
    #[error(transparent)]
    Npu(#[from] npu_sys::Error),
    /// A state is loaded by a scaler of its own kind: dynamic or fixed. A disabled one has none.
    #[error("cannot load {state} into a scaler that is {scaler}")]
    StateMismatch {
        /// Whose state it is: `a dynamic scaler's state`, `a fixed scaler's state` or `an absent state`.
        state: &'static str,
        /// What the scaler loaded into is: `dynamic`, `fixed` or `disabled`.
        scaler: &'static str,
    },
}

/// The result of this crate's fallible functions.
pub type Result<T, E = Error> = std::result::Result<T, E>;
