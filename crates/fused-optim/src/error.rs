//! What can go wrong in a step or a state dict; nothing has changed when one of these comes back.

use crate::{DType, HyperParam};

/// A failure of an optimizer. Weights, state and step counts are as they were before the call.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// A hyper-parameter is outside its range.
    #[error("invalid {name}: {value}")]
    InvalidHyper {
        /// Which one, in PyTorch's words, for example `beta parameter at index 0`.
        name: &'static str,
        /// What was given.
        value: f64,
    },
    /// Nesterov was asked for without momentum or with dampening.
    #[error("nesterov momentum requires a momentum and zero dampening")]
    Nesterov,
    /// A hyper-parameter was to be read or set that the rule does not have.
    #[error("{kind} has no {param}")]
    NoHyperParam {
        /// The optimizer.
        kind: &'static str,
        /// The hyper-parameter.
        param: HyperParam,
    },
    /// A momentum was to change between zero and another value, without and with a buffer.
    #[error("momentum cannot change between zero and non-zero (got {value})")]
    MomentumFromZero {
        /// What it was to be.
        value: f64,
    },
    /// A tensor is named twice, in one group or in two.
    #[error("parameter {index} is in more than one place of the groups")]
    DuplicateParam {
        /// The tensor.
        index: usize,
    },
    /// There is no such group.
    #[error("no parameter group {group}: there are {count}")]
    NoSuchGroup {
        /// What was asked for.
        group: usize,
        /// How many there are.
        count: usize,
    },
    /// A group names a tensor that was not passed to the step.
    #[error("a group names parameter {index}, but the step was given {count}")]
    MissingParam {
        /// The tensor.
        index: usize,
        /// Number of parameters that were given.
        count: usize,
    },
    /// A step, or the names, had another number of parameters than the optimizer was told of.
    #[error(
        "expected {expected} parameters, got {got}: pass all, in one order, to each step and as names"
    )]
    ParamCount {
        /// Number of parameters that the optimizer was made for.
        expected: usize,
        /// Number of parameters that were given.
        got: usize,
    },
    /// Two parameters have one name.
    #[error("two parameters are named {name:?}; names must be unique")]
    DuplicateName {
        /// The name.
        name: String,
    },
    /// A gradient, or the state of an earlier step, is not as long as the weight.
    #[error("parameter {index}: the weight has {expected} elements, its {what} {got}")]
    LengthMismatch {
        /// The tensor.
        index: usize,
        /// `gradient`, `state`, `shape`, `average` or `moving average`.
        what: &'static str,
        /// The weight's element count.
        expected: usize,
        /// The other count.
        got: usize,
    },
    /// The state of an earlier step, or one that was loaded without shapes, is that of a tensor of another shape.
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
    /// The norm of the gradients is infinite or NaN, and the clip wants this refused.
    #[error("the norm of the gradients is {norm}")]
    NonFiniteNorm {
        /// The norm.
        norm: f64,
    },
    /// The state has an f32 master, but the weight is f32 itself, or 16-bit weights are to have
    /// none ([`HalfWeights`](crate::HalfWeights)).
    #[error("parameter {index}: the weight is {weight}, but its state has a master")]
    UnwantedMaster {
        /// The tensor.
        index: usize,
        /// The weight's type.
        weight: DType,
    },
    /// The factor for the gradients is negative, infinite or not a number.
    #[error("invalid grad_scale: {value}")]
    InvalidGradScale {
        /// What was given.
        value: f32,
    },
    /// A state dict is of another optimizer.
    #[error("the state dict is of {got:?}, this optimizer is {expected:?}")]
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
        /// What is wrong with it.
        problem: StateProblem,
    },
    /// What a device does not do. Nothing slower is done in its place.
    #[error("{what} is not supported on a device")]
    Unsupported {
        /// What was asked for.
        what: &'static str,
    },
    /// CUDA, or what it needs, failed.
    #[cfg(feature = "cuda")]
    #[error(transparent)]
    Cuda(#[from] crate::cuda::CudaError),
    /// CANN failed, or is missing.
    #[cfg(feature = "npu")]
    #[error(transparent)]
    Npu(#[from] npu_sys::Error),
    /// Bytes that are not a state dict.
    #[error("cannot {action}")]
    Format {
        /// What failed, for example `read the safetensors header`.
        action: &'static str,
        /// Why.
        source: Box<dyn std::error::Error + Send + Sync>,
    },
}

/// What is wrong with one entry of a state dict.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum StateProblem {
    /// It should be there.
    #[error("missing")]
    Missing,
    /// It should not be there.
    #[error("unknown")]
    Unknown,
    /// Its element type is not the one state has.
    #[error("expected {expected}, got {got}")]
    Dtype {
        /// What state is made of.
        expected: &'static str,
        /// What came.
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
    /// Its value makes no sense here; the text says why.
    #[error("{0}")]
    Invalid(String),
}

/// The result of this crate's fallible functions.
pub type Result<T> = std::result::Result<T, Error>;
