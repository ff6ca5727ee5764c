//! Ready models and data sets: those that example configurations name.
//!
//! The program `runner` has them, the library does not: [`register`] adds them to its registries. Examples, tests and
//! benchmarks use this crate; the program, which a crate that depends on `runner` cannot be a dependency of, has the
//! same files as a module. The models compute on the candle engine.

mod digits;
mod fashion_mnist;
mod idx;
mod images;
mod models;

use std::path::PathBuf;
use std::sync::{Arc, Once};

use runner::Result;
use runner::config::Section;
use runner::data::{DATASETS, DatasetFactory};
use runner::model::MODELS;

pub use digits::Digits;
pub use fashion_mnist::FashionMnist;
pub use images::Split;
pub use models::{Mlp, MlpOptions, ResNet, ResNetOptions, Transformer, TransformerOptions};

/// Adds the models and data sets to [`MODELS`] and [`DATASETS`]. A second call does nothing.
///
/// # Panics
///
/// If the program has registered something else under one of the names.
pub fn register() {
    static ONCE: Once = Once::new();
    ONCE.call_once(|| {
        let done = models::READY.iter().try_for_each(|(name, build)| MODELS.register(name, build));
        let done = done.and_then(|()| DATASETS.register("Digits", digits));
        done.and_then(|()| DATASETS.register("FashionMnist", fashion_mnist))
            .expect("the program has not registered these names");
    });
}

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
