//! How `[model]` and `[model_wrapper_cfg]` are written.

use collective::ReducerOptions;

use super::{DistributedDataParallel, ModelFactory, WrapperFactory};
use crate::Result;
use crate::config::Section;
use crate::registry::Builtin;

/// The models a configuration can name.
pub(crate) const BUILTIN: Builtin<ModelFactory> = &[
    #[cfg(feature = "candle")]
    ("ResNet", zoo::resnet),
    #[cfg(feature = "candle")]
    ("Mlp", zoo::mlp),
];

/// The wrappers a configuration can name; MMEngine's own spelling is one of them.
pub(crate) const BUILTIN_WRAPPERS: Builtin<WrapperFactory> =
    &[("DistributedDataParallel", ddp), ("MMDistributedDataParallel", ddp)];

#[cfg(feature = "candle")]
mod zoo {
    //! The models of the zoo, on the candle engine.

    use candle_nn::VarBuilder;

    use super::{ModelFactory, Result, Section};
    use crate::engine::candle::ops::Normalization;
    use crate::engine::candle::{CandleEngine, CandleModel, CandleOptions};
    use crate::zoo::{Mlp, MlpOptions, ResNet, ResNetOptions};

    pub(super) fn resnet(section: &mut Section) -> Result<ModelFactory> {
        let default = ResNetOptions::default();
        let options = ResNetOptions {
            in_channels: section.or("in_channels", default.in_channels)?,
            num_classes: section.or("num_classes", default.num_classes)?,
            width: section.or("width", default.width)?,
            blocks: section.or("blocks", default.blocks)?,
            stem_kernel: section.or("stem_kernel", default.stem_kernel)?,
            stem_stride: section.or("stem_stride", default.stem_stride)?,
            stem_max_pool: section.or("stem_max_pool", default.stem_max_pool)?,
            normalization: normalization(section)?,
        };
        Ok(candle(move |vb| ResNet::new(&options, vb)))
    }

    pub(super) fn mlp(section: &mut Section) -> Result<ModelFactory> {
        let default = MlpOptions::default();
        let options = MlpOptions {
            in_features: section.or("in_features", default.in_features)?,
            hidden: section.or("hidden", default.hidden)?,
            num_classes: section.or("num_classes", default.num_classes)?,
            normalization: normalization(section)?,
        };
        Ok(candle(move |vb| Mlp::new(&options, vb)))
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

    fn candle<M: CandleModel + 'static>(
        build: impl FnOnce(VarBuilder<'static>) -> candle_core::Result<M> + Send + 'static,
    ) -> ModelFactory {
        Box::new(|cx| {
            let options = CandleOptions { dtype: cx.dtype, seed: cx.seed };
            Ok(Box::new(CandleEngine::new(options, build)?))
        })
    }
}

const MIB: usize = 1 << 20;

fn ddp(section: &mut Section) -> Result<WrapperFactory> {
    let mut options = ReducerOptions::default();
    options.find_unused_parameters =
        section.or("find_unused_parameters", options.find_unused_parameters)?;
    // As in PyTorch, a cap of one's own is also the first bucket's.
    let default = (options.bucket_bytes / MIB) as f64;
    if section.has("bucket_cap_mb") {
        let mib = section.or_checked("bucket_cap_mb", default, "positive", |mib| *mib > 0.0)?;
        let bytes = ((mib * MIB as f64) as usize).max(1);
        (options.first_bucket_bytes, options.bucket_bytes) = (bytes, bytes);
    }
    Ok(Box::new(move |group, params| {
        Ok(Box::new(DistributedDataParallel::new(group, params, options)?))
    }))
}
