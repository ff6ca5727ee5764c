//! Models on the candle engine, and their options in `[model]`.
//!
//! Each is a struct of layers with typed options. All but [`Gpt`] read a field `inputs`: images,
//! either bytes `[n, c, h, w]`, which are scaled to 0..1 and normalized by the options, or floats,
//! which are used unchanged. For the loss they also read `labels`, `i64` classes `[n]`. They
//! predict `logits`, `[n, num_classes]`.

mod gpt;
mod mlp;
mod resnet;
mod transformer;

use candle_core::{DType, Tensor};
pub use gpt::{Gpt, GptOptions};
pub use mlp::{Mlp, MlpOptions};
pub use resnet::{ResNet, ResNetOptions};
pub use transformer::{Transformer, TransformerOptions};

use crate::Result;
use crate::config::Section;
use crate::engine::candle::ops::{self, Normalization};
use crate::engine::candle::{CandleEngine, Loss, TensorBatch};
use crate::model::ModelFactory;
use crate::zoo::{MAX_COUNT, count};

/// Maximum number of layers of one kind.
const MAX_LAYERS: usize = 4096;

/// Models by name.
pub(super) const READY: [(&str, Build); 4] =
    [("ResNet", resnet), ("Mlp", mlp), ("Transformer", transformer), ("Gpt", gpt)];

type Build = fn(&mut Section) -> Result<ModelFactory>;

fn resnet(section: &mut Section) -> Result<ModelFactory> {
    let default = ResNetOptions::default();
    let options = ResNetOptions {
        in_channels: count(section, "in_channels", default.in_channels)?,
        num_classes: count(section, "num_classes", default.num_classes)?,
        width: count(section, "width", default.width)?,
        blocks: counts(section, "blocks", default.blocks, MAX_LAYERS)?,
        bottleneck: section.or("bottleneck", default.bottleneck)?,
        stem_kernel: count(section, "stem_kernel", default.stem_kernel)?,
        stem_stride: count(section, "stem_stride", default.stem_stride)?,
        stem_max_pool: section.or("stem_max_pool", default.stem_max_pool)?,
        normalization: normalization(section)?,
    };
    Ok(CandleEngine::factory(move |vb| ResNet::new(&options, vb)))
}

fn mlp(section: &mut Section) -> Result<ModelFactory> {
    let default = MlpOptions::default();
    let options = MlpOptions {
        in_features: count(section, "in_features", default.in_features)?,
        hidden: counts(section, "hidden", default.hidden, MAX_COUNT)?,
        num_classes: count(section, "num_classes", default.num_classes)?,
        normalization: normalization(section)?,
    };
    Ok(CandleEngine::factory(move |vb| Mlp::new(&options, vb)))
}

fn transformer(section: &mut Section) -> Result<ModelFactory> {
    let default = TransformerOptions::default();
    let options = TransformerOptions {
        in_channels: count(section, "in_channels", default.in_channels)?,
        image_size: count(section, "image_size", default.image_size)?,
        patch_size: count(section, "patch_size", default.patch_size)?,
        width: count(section, "width", default.width)?,
        heads: count(section, "heads", default.heads)?,
        layers: depth(section, "layers", default.layers)?,
        feed_forward: count(section, "feed_forward", default.feed_forward)?,
        num_classes: count(section, "num_classes", default.num_classes)?,
        normalization: normalization(section)?,
    };
    Ok(CandleEngine::factory(move |vb| Transformer::new(&options, vb)))
}

fn gpt(section: &mut Section) -> Result<ModelFactory> {
    let default = GptOptions::default();
    let options = GptOptions {
        vocab_size: count(section, "vocab_size", default.vocab_size)?,
        context: count(section, "context", default.context)?,
        width: count(section, "width", default.width)?,
        heads: count(section, "heads", default.heads)?,
        layers: depth(section, "layers", default.layers)?,
    };
    Ok(CandleEngine::factory(move |vb| Gpt::new(&options, vb)))
}

fn counts(
    section: &mut Section,
    key: &'static str,
    default: Vec<usize>,
    most: usize,
) -> Result<Vec<usize>> {
    let place = section.offset_of(key);
    let counts = section.or(key, default)?;
    if !counts.iter().all(|count| (1..=most).contains(count)) {
        let text = format!("`{key}` must each be at least 1 and at most {most}, got {counts:?}");
        section.note(place.error(text))?;
    }
    Ok(counts)
}

/// Reads the number of layers.
fn depth(section: &mut Section, key: &'static str, default: usize) -> Result<usize> {
    section.or_checked(key, default, "at least 1 and at most 4096", |count| {
        (1..=MAX_LAYERS).contains(count)
    })
}

fn normalization(section: &mut Section) -> Result<Normalization> {
    let default = Normalization::default();
    let place = section.offset_of("std");
    let mean = section.or("mean", default.mean)?;
    let std = section.or("std", default.std)?;
    if std.iter().any(|std| !(*std > 0.0 && std.is_finite())) {
        section.note(place.error("`std` must be positive and finite"))?;
    }
    Ok(Normalization { mean, std })
}

/// Returns the field `inputs` in the engine's type.
fn inputs(batch: &TensorBatch, normalization: &Normalization) -> candle_core::Result<Tensor> {
    let inputs = batch.get("inputs")?;
    match inputs.dtype() {
        DType::U8 => ops::normalize(inputs, normalization, batch.dtype()),
        _ => Ok(inputs.clone()),
    }
}

/// Computes the mean cross-entropy of `logits` with the field `labels`.
fn classification_loss(logits: &Tensor, batch: &TensorBatch) -> candle_core::Result<Loss> {
    Ok(Loss::new(ops::cross_entropy(logits, batch.get("labels")?)?))
}
