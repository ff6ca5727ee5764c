//! The error type of this crate.

/// An error of this crate. The failed call changed nothing, unless the variant says so.
///
/// `Debug` prints the same text as `Display`, because a `main` that returns an error prints it with
/// `Debug`.
#[derive(Clone, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// An option, a scale or an entry of a saved state is outside its range.
    #[error("invalid {name}: {value} is not {requirement}")]
    Invalid {
        /// PyTorch's name of the option or entry.
        name: &'static str,
        /// The given value.
        value: f64,
        /// The requirement that the value breaks.
        requirement: &'static str,
    },
    /// Gradients overflow although the loss scale is already at its floor: training diverges, or
    /// the loss itself is not finite. The scale stays at the floor, and the growth count is 0.
    #[error(
        "gradients overflow at the smallest loss scale, {min_scale}: check that the loss is finite"
    )]
    ScaleAtFloor {
        /// The floor.
        min_scale: f32,
    },
    /// A method of [`GradScaler`](crate::GradScaler) was called before the first `scale`.
    #[error("`{call}` called before `scale`")]
    NotScaled {
        /// The method.
        call: &'static str,
    },
    /// The optimizer's gradients are already unscaled.
    #[error("`unscale` called twice for optimizer {optimizer} since the last `update`")]
    UnscaledTwice {
        /// The caller's number of the optimizer.
        optimizer: usize,
    },
    /// The optimizer has already stepped: unscaling now would be too late.
    #[error("`unscale` called after `step` for optimizer {optimizer}")]
    UnscaledAfterStep {
        /// The caller's number of the optimizer.
        optimizer: usize,
    },
    /// The optimizer has already stepped since the last update.
    #[error("`step` called twice for optimizer {optimizer} since the last `update`")]
    SteppedTwice {
        /// The caller's number of the optimizer.
        optimizer: usize,
    },
    /// There was no gradient to check for overflow.
    #[error("no gradient {} was checked", .optimizer.map_or_else(|| "of any optimizer".to_owned(), |i| format!("of optimizer {i}")))]
    NothingChecked {
        /// The optimizer that was to step; `None` in `update`.
        optimizer: Option<usize>,
    },
    /// A factor or the interval of a fixed or disabled scaler was set.
    #[error("cannot set factors or interval: the loss scale is not dynamic")]
    NotDynamic,
    /// Autocast rejects the operator: it is unsafe in half precision.
    #[error("operator {op} is unsafe in half precision")]
    Banned {
        /// The operator's name.
        op: String,
    },
    /// The type is not lower than f32, so autocast cannot lower operators to it.
    #[error(
        "autocast cannot lower operators to {dtype}: use f16 or bf16, or disable autocast by `with_enabled(false)`"
    )]
    LowerPrecision {
        /// The type asked for.
        dtype: crate::DType,
    },
    /// Input and output differ in length.
    #[error("the output has {got} elements, the input {expected}")]
    LengthMismatch {
        /// The input's element count.
        expected: usize,
        /// The output's element count.
        got: usize,
    },
    /// An operation that the NPU does not support. There is no slower fallback.
    #[cfg(feature = "npu")]
    #[error("{what} is not supported on a device")]
    Unsupported {
        /// The operation.
        what: &'static str,
    },
    /// CANN failed or is missing.
    #[cfg(feature = "npu")]
    #[error(transparent)]
    Npu(#[from] npu_sys::Error),
    /// The state is of another kind of scaler.
    #[error("cannot load {state} into a scaler that is {scaler}")]
    StateMismatch {
        /// `a dynamic scaler's state`, `a fixed scaler's state` or `an absent state`.
        state: &'static str,
        /// The kind of the scaler that loads it: `dynamic`, `fixed` or `disabled`.
        scaler: &'static str,
    },
}

impl std::fmt::Debug for Error {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        std::fmt::Display::fmt(self, f)
    }
}

/// The result of this crate's fallible functions.
pub type Result<T, E = Error> = std::result::Result<T, E>;
