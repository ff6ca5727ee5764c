//! Ready models and data sets: those that example configurations name.
//!
//! [`MODELS`] and [`DATASETS`] are the registries of what a configuration can name, a program's own parts included.
//! Everything else here is an example: the library itself uses none of it. The models compute on the candle engine
//! (feature `candle`).

mod digits;
mod fashion_mnist;
mod idx;
mod images;
#[cfg(feature = "candle")]
mod models;

use std::path::PathBuf;
use std::sync::Arc;

pub use digits::Digits;
pub use fashion_mnist::FashionMnist;
pub use images::Split;
#[cfg(feature = "candle")]
pub use models::{Mlp, MlpOptions, ResNet, ResNetOptions, Transformer, TransformerOptions};

use crate::Result;
use crate::config::Section;
use crate::data::DatasetFactory;
use crate::model::ModelFactory;
use crate::registry::{Builtin, Registry};

/// The models a configuration can name: `[model]`.
pub static MODELS: Registry<ModelFactory> = Registry::with("model", READY_MODELS);

#[cfg(feature = "candle")]
const READY_MODELS: Builtin<ModelFactory> = models::READY;
#[cfg(not(feature = "candle"))]
const READY_MODELS: Builtin<ModelFactory> = &[];

/// The data sets a configuration can name: `[train_dataloader.dataset]`.
pub static DATASETS: Registry<DatasetFactory> =
    Registry::with("data set", &[("Digits", digits), ("FashionMnist", fashion_mnist)]);

fn digits(section: &mut Section) -> Result<DatasetFactory> {
    let split = Split::read(section)?;
    let split_seed = section.or("split_seed", 0)?;
    Ok(Box::new(move || Ok(Arc::new(Digits::new(split, split_seed)?))))
}

fn fashion_mnist(section: &mut Section) -> Result<DatasetFactory> {
    let split = Split::read(section)?;
    let root = section.optional::<String>("root")?.map(PathBuf::from);
    Ok(Box::new(move || Ok(Arc::new(FashionMnist::new(split, root.as_deref())?))))
}
