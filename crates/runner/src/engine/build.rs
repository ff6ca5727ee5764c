//! Arguments for building a model, and its factory.

use fused_optim::DType;
use serde::{Deserialize, Serialize};

use super::{ComputeDevice, Engine, MatmulPrecision};
use crate::Result;

/// Arguments for building a model.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct ModelContext {
    /// Type of the parameters, except those that layers require to be f32.
    pub dtype: DType,
    /// Seed of the parameters' initial values.
    pub seed: u64,
    /// Device of the computation. A run returns an error for a model on another device.
    pub device: ComputeDevice,
    /// Whether parameters are `f64` instead of `f32`, for checking gradients: such a model is never
    /// trained. An engine without `f64` ignores it.
    pub is_f64: bool,
    /// Precision of `f32` matrix products on a GPU; `None` keeps the process's setting.
    pub matmul_precision: Option<MatmulPrecision>,
    /// Name patterns of frozen parameters (`*` is any text, `?` any character). A pattern without a
    /// match is an error, and so is an engine that does not support freezing.
    pub frozen: Vec<String>,
    /// Low-rank adapters of fully connected layers, if enabled. A target without a match is an
    /// error.
    pub lora: Option<LoraOptions>,
}

impl ModelContext {
    /// A model on the CPU, nothing of it frozen.
    #[must_use]
    pub fn new(dtype: DType, seed: u64) -> Self {
        Self {
            dtype,
            seed,
            device: ComputeDevice::Cpu,
            is_f64: false,
            matmul_precision: None,
            frozen: Vec::new(),
            lora: None,
        }
    }
}

/// Low-rank adapters (LoRA): a layer whose name matches a target computes
/// `W x + b + alpha / rank * B (A (dropout(x)))`, and `W` and `b` are frozen.
///
/// Follows: PEFT, `tuners/lora`, in names and initial values.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct LoraOptions {
    /// Rank of the product of an adapter's matrices.
    pub rank: usize,
    /// Numerator of the scale `alpha / rank` of an adapter's output.
    pub alpha: f64,
    /// Dropout probability of an adapter's input in training.
    pub dropout: f64,
    /// Name patterns of the layers (`*` is any text, `?` any character).
    pub targets: Vec<String>,
}

impl LoraOptions {
    /// Returns the first of `lora`'s values with which these adapters were trained and that this
    /// run has otherwise, as text; with `all` also the dropout, which only training uses. Targets
    /// are compared by the names of the tensors instead.
    pub(crate) fn difference(&self, run: &Self, all: bool) -> Option<String> {
        let values =
            [("rank", self.rank as f64, run.rank as f64), ("alpha", self.alpha, run.alpha)];
        let dropout = all.then_some(("dropout", self.dropout, run.dropout));
        let differs = |(_, was, is): &(&str, f64, f64)| was != is;
        let (name, was, is) = values.into_iter().chain(dropout).find(differs)?;
        Some(format!("lora.{name} = {was}, but this run has {is}"))
    }
}

/// Creates a model when precision and seed are known.
pub type ModelFactory = Box<dyn FnOnce(&ModelContext) -> Result<Box<dyn Engine>> + Send>;
