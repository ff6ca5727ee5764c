//! How `[model]` is written for the models of the zoo, on the candle engine.

use super::{Mlp, MlpOptions, ResNet, ResNetOptions, Transformer, TransformerOptions};
use crate::Result;
use crate::config::Section;
use crate::engine::candle::CandleEngine;
use crate::engine::candle::ops::Normalization;
use crate::model::ModelFactory;
use crate::registry::Builtin;

/// The models a configuration can name.
pub(crate) const BUILTIN: Builtin<ModelFactory> =
    &[("ResNet", resnet), ("Mlp", mlp), ("Transformer", transformer)];

fn resnet(section: &mut Section) -> Result<ModelFactory> {
    let default = ResNetOptions::default();
    let options = ResNetOptions {
        in_channels: count(section, "in_channels", default.in_channels)?,
        num_classes: count(section, "num_classes", default.num_classes)?,
        width: count(section, "width", default.width)?,
        blocks: counts(section, "blocks", default.blocks)?,
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
        hidden: counts(section, "hidden", default.hidden)?,
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
        layers: count(section, "layers", default.layers)?,
        feed_forward: count(section, "feed_forward", default.feed_forward)?,
        num_classes: count(section, "num_classes", default.num_classes)?,
        normalization: normalization(section)?,
    };
    Ok(CandleEngine::factory(move |vb| Transformer::new(&options, vb)))
}

fn count(section: &mut Section, key: &'static str, default: usize) -> Result<usize> {
    section.or_checked(key, default, "at least 1", |n| *n >= 1)
}

fn counts(section: &mut Section, key: &'static str, default: Vec<usize>) -> Result<Vec<usize>> {
    let place = section.offset_of(key);
    let counts = section.or(key, default)?;
    if counts.contains(&0) {
        return Err(section.error_at(place, format!("`{key}` must each be at least 1")));
    }
    Ok(counts)
}

fn normalization(section: &mut Section) -> Result<Normalization> {
    let default = Normalization::default();
    let offset = section.offset_of("std");
    let mean = section.or("mean", default.mean)?;
    let std = section.or("std", default.std)?;
    if std.iter().any(|std| !(*std > 0.0 && std.is_finite())) {
        return Err(section.error_at(offset, "`std` must be positive and finite"));
    }
    Ok(Normalization { mean, std })
}
