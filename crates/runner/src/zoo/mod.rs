//! Models and data sets for the example configurations.
//!
//! A configuration can name them after a call of [`register`], with which the program `runner`
//! begins. Examples, tests and benchmarks use them as types. The models compute on the candle
//! engine.

mod digits;
mod fashion_mnist;
mod idx;
mod images;
mod models;
mod synthetic;

use std::path::PathBuf;
use std::sync::{Arc, Once};

use crate::Result;
use crate::config::Section;
use crate::data::{DATASETS, DatasetFactory};
use crate::model::MODELS;

pub use digits::Digits;
pub use fashion_mnist::FashionMnist;
pub use images::Split;
pub use models::{
    Gpt, GptOptions, Mlp, MlpOptions, ResNet, ResNetOptions, Transformer, TransformerOptions,
};
pub use synthetic::{SyntheticImages, SyntheticTokens};

/// Adds the models and data sets to [`MODELS`] and [`DATASETS`]. A second call does nothing.
///
/// # Panics
///
/// If the program has registered other components under one of the names.
pub fn register() {
    static ONCE: Once = Once::new();
    ONCE.call_once(|| {
        let models = models::READY.iter();
        let done = models.copied().try_for_each(|(name, build)| MODELS.register(name, build));
        let datasets: [(&str, DatasetBuild); 4] = [
            ("Digits", digits),
            ("FashionMnist", fashion_mnist),
            ("SyntheticImages", synthetic_images),
            ("SyntheticTokens", synthetic_tokens),
        ];
        let mut datasets = datasets.into_iter();
        done.and_then(|()| datasets.try_for_each(|(name, build)| DATASETS.register(name, build)))
            .expect("the program has not registered these names");
    });
}

type DatasetBuild = fn(&mut Section) -> Result<DatasetFactory>;

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

/// Maximum of each number in a configuration of the zoo: products of two fit into 64 bits.
const MAX_COUNT: usize = 1 << 31;

/// Reads a number of at least 1 and at most [`MAX_COUNT`].
fn count(section: &mut Section, key: &'static str, default: usize) -> Result<usize> {
    section.or_checked(key, default, "at least 1 and at most 2147483648", |count| {
        (1..=MAX_COUNT).contains(count)
    })
}

fn synthetic_images(section: &mut Section) -> Result<DatasetFactory> {
    let len = count(section, "len", 1024)?;
    let (channels, size) = (count(section, "channels", 3)?, count(section, "image_size", 224)?);
    let num_classes = count(section, "num_classes", 1000)?;
    let seed = section.or("seed", 0)?;
    let shape = [channels, size, size];
    Ok(Box::new(move || Ok(Arc::new(SyntheticImages::new(len, shape, num_classes, seed)?))))
}

fn synthetic_tokens(section: &mut Section) -> Result<DatasetFactory> {
    let len = count(section, "len", 1024)?;
    let length = count(section, "length", 1024)?;
    let vocab_size = count(section, "vocab_size", 50257)?;
    let seed = section.or("seed", 0)?;
    Ok(Box::new(move || Ok(Arc::new(SyntheticTokens::new(len, length, vocab_size, seed)?))))
}
