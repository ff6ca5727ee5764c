//! Ready models, the ones example configurations name.
//!
//! Each is a struct of layers with typed options. All read a field `inputs`: images, either bytes
//! `[n, c, h, w]`, which are scaled to 0..1 and normalised by the options, or floats, which are
//! taken as they are. For the loss they also read `labels`, `i64` classes `[n]`. They predict
//! `logits`, `[n, num_classes]`.

mod builtin;
mod mlp;
mod resnet;
mod transformer;

pub(crate) use builtin::BUILTIN;
pub use mlp::{Mlp, MlpOptions};
pub use resnet::{ResNet, ResNetOptions};
pub use transformer::{Transformer, TransformerOptions};

use candle_core::{DType, Result, Tensor};

use crate::engine::candle::ops::{self, Normalization};
use crate::engine::candle::{Loss, TensorBatch};

/// The field `inputs` in the engine's dtype.
fn inputs(batch: &TensorBatch, normalization: &Normalization) -> Result<Tensor> {
    let inputs = batch.get("inputs")?;
    match inputs.dtype() {
        DType::U8 => ops::normalize(inputs, normalization, batch.dtype()),
        _ => Ok(inputs.clone()),
    }
}

/// Mean cross-entropy of `logits` with the field `labels`.
fn classification_loss(logits: &Tensor, batch: &TensorBatch) -> Result<Loss> {
    Ok(Loss::new(ops::cross_entropy(logits, batch.get("labels")?)?))
}
