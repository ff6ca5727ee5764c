//! Errors of steps and state dicts. A call that returns one has changed nothing.

use crate::{DType, HyperParam};

/// Error of an optimizer. Weights, state and step counts are unchanged, unless a device failed in
/// the middle of a step.
///
/// `Debug` prints the same text as `Display`, because a `main` that returns an error prints it with
/// `Debug`.
#[derive(thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// A hyper-parameter is outside its range.
    #[error("invalid {}: {value}", pytorch_name(name))]
    InvalidHyper {
        /// Its field, for example `lr` or `betas[0]`; the message has PyTorch's name for it.
        name: &'static str,
        /// The rejected value.
        value: f64,
    },
    /// `nesterov` is set without momentum, or with dampening.
    #[error("nesterov momentum requires a momentum and zero dampening")]
    Nesterov,
    /// The rule has no such hyper-parameter.
    #[error("{kind} has no {param}")]
    NoHyperParam {
        /// The optimizer.
        kind: &'static str,
        /// The hyper-parameter.
        param: HyperParam,
    },
    /// Momentum cannot change between zero and non-zero: a momentum buffer would have to be added
    /// or removed.
    #[error("momentum cannot change between zero and non-zero (got {value})")]
    MomentumFromZero {
        /// The rejected momentum.
        value: f64,
    },
    /// A tensor is listed twice, in one group or in two.
    #[error("parameter {index} is listed more than once in the parameter groups")]
    DuplicateParam {
        /// The tensor.
        index: usize,
    },
    /// There is no such group.
    #[error("no parameter group {group}; the optimizer has {count}")]
    NoSuchGroup {
        /// Index of the group that was requested.
        group: usize,
        /// Number of groups.
        count: usize,
    },
    /// A group contains a tensor that was not passed to the step.
    #[error("a parameter group contains parameter {index}, but the step was given {count}")]
    MissingParam {
        /// The tensor.
        index: usize,
        /// Number of parameters passed to the step.
        count: usize,
    },
    /// The number of parameters passed to a step, or of names, differs from the optimizer's.
    #[error(
        "expected {expected} parameters, got {got}; pass all, in the same order, to each step and as names"
    )]
    ParamCount {
        /// Number of parameters of the optimizer.
        expected: usize,
        /// Number of parameters passed.
        got: usize,
    },
    /// Two parameters have the same name.
    #[error("two parameters are named {name:?}; names must be unique")]
    DuplicateName {
        /// The name.
        name: String,
    },
    /// A gradient, state or average has another number of elements than the weight.
    #[error("parameter {index}: the weight has {expected} elements, its {what} {got}")]
    LengthMismatch {
        /// The tensor.
        index: usize,
        /// `gradient`, `state`, `shape`, `average` or `moving average`.
        what: &'static str,
        /// The weight's element count.
        expected: usize,
        /// The other tensor's element count.
        got: usize,
    },
    /// The state of an earlier step, or state loaded without shapes, belongs to a tensor of another
    /// shape.
    #[error("parameter {index}: its state is for another shape; pass the shape of earlier steps")]
    StateShape {
        /// The tensor.
        index: usize,
    },
    /// A tensor's element count is not a multiple of its number of rows.
    #[error("parameter {index}: {count} elements are not {rows} rows of equal length")]
    UnevenRows {
        /// The tensor.
        index: usize,
        /// Its element count.
        count: usize,
        /// Its rows.
        rows: usize,
    },
    /// The norm of the gradients is infinite or NaN, and
    /// [`error_if_nonfinite`](crate::ClipNorm::error_if_nonfinite) is set.
    #[error("the norm of the gradients is {norm}")]
    NonFiniteNorm {
        /// The norm.
        norm: f64,
    },
    /// The state has an f32 master, but the weight is f32, or the optimizer keeps no masters
    /// ([`HalfWeights`](crate::HalfWeights)).
    #[error("parameter {index}: the weight is {weight}, but its state has a master")]
    UnwantedMaster {
        /// The tensor.
        index: usize,
        /// The weight's type.
        weight: DType,
    },
    /// `grad_scale` is negative, infinite or NaN.
    #[error("invalid grad_scale: {value}")]
    InvalidGradScale {
        /// The rejected value.
        value: f32,
    },
    /// The state dict was saved by another kind of optimizer.
    #[error("cannot load a state dict of {got:?} into {expected:?}")]
    WrongKind {
        /// This optimizer's name.
        expected: &'static str,
        /// The state dict's.
        got: String,
    },
    /// A state dict does not fit this optimizer.
    #[error("state dict, {key}: {problem}")]
    State {
        /// The entry, for example `state.3.exp_avg`.
        key: String,
        /// The problem.
        problem: StateProblem,
    },
    /// The device does not support this; there is no slower fallback.
    #[error("{what} is not supported on this device")]
    Unsupported {
        /// The unsupported feature.
        what: &'static str,
    },
    /// A method was called before the one that prepares it.
    #[error("`{call}` called before `{needed}`")]
    CalledBefore {
        /// The method that was called.
        call: &'static str,
        /// The method to call first.
        needed: &'static str,
    },
    /// A pointer to device memory is not a multiple of the element size.
    #[error("device pointer {ptr:#x} is not aligned to {dtype}")]
    MisalignedPointer {
        /// The pointer.
        ptr: u64,
        /// The element type.
        dtype: DType,
    },
    /// The tensors' stream is not the optimizer's.
    #[error("tensors belong to a different CUDA stream; pass a `Gpu` on the optimizer's stream")]
    DifferentStream,
    /// CUDA or NVRTC failed, or is missing.
    #[cfg(feature = "cuda")]
    #[error(transparent)]
    Cuda(#[from] cuda_rt::CudaError),
    /// CANN failed, or is missing.
    #[cfg(feature = "npu")]
    #[error(transparent)]
    Npu(#[from] npu_sys::Error),
    /// The bytes are not a state dict.
    #[error("cannot {action}")]
    Format {
        /// The failed action, for example `read the safetensors header`.
        action: &'static str,
        /// The cause.
        source: Box<dyn std::error::Error + Send + Sync>,
    },
}

impl std::fmt::Debug for Error {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        std::fmt::Display::fmt(self, f)
    }
}

/// PyTorch's name for a hyper-parameter in messages.
fn pytorch_name(field: &str) -> String {
    match field {
        "lr" => "learning rate".to_owned(),
        "eps" | "e" | "adamw_eps" => "epsilon value".to_owned(),
        "betas[0]" | "b1" => "beta parameter at index 0".to_owned(),
        "betas[1]" | "b2" => "beta parameter at index 1".to_owned(),
        "alpha" | "beta2_decay" | "d" | "dampening" | "delta" | "momentum" | "ns_steps" | "rho"
        | "wd_ratio" | "weight_decay" => format!("{field} value"),
        other => other.to_owned(),
    }
}

/// Problem with one entry of a state dict.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum StateProblem {
    /// The entry is missing.
    #[error("missing")]
    Missing,
    /// The optimizer has no such entry.
    #[error("unknown")]
    Unknown,
    /// Its element type is wrong.
    #[error("expected {expected}, got {got}")]
    Dtype {
        /// The expected type.
        expected: &'static str,
        /// The entry's type.
        got: String,
    },
    /// Its element count differs from the tensor's.
    #[error("expected {expected} elements, got {got}")]
    Length {
        /// The tensor's count.
        expected: usize,
        /// The entry's count.
        got: usize,
    },
    /// Its value is invalid, for the reason in the text.
    #[error("{0}")]
    Invalid(String),
}

/// Returns an error unless a device pointer is a multiple of the element size.
pub(crate) const fn check_aligned(ptr: u64, dtype: DType) -> Result<()> {
    match ptr.is_multiple_of(dtype.size() as u64) {
        true => Ok(()),
        false => Err(Error::MisalignedPointer { ptr, dtype }),
    }
}

/// An error for an entry of a state dict.
pub(crate) fn problem(key: impl Into<String>, problem: StateProblem) -> Error {
    Error::State { key: key.into(), problem }
}

/// An error for an entry with an invalid value.
pub(crate) fn invalid(key: impl Into<String>, reason: impl Into<String>) -> Error {
    problem(key, StateProblem::Invalid(reason.into()))
}

/// Turns the cause of a failed action into an error.
pub(crate) fn format<E: Into<Box<dyn std::error::Error + Send + Sync>>>(
    action: &'static str,
) -> impl FnOnce(E) -> Error {
    move |source| Error::Format { action, source: source.into() }
}

/// The result of this crate's fallible functions.
pub type Result<T> = std::result::Result<T, Error>;
