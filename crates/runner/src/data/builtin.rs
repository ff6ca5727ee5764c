//! How `dataset = { type = ... }` is written.

use std::path::PathBuf;
use std::sync::Arc;

use super::datasets::{Dataset, Digits, FashionMnist, Split};
use crate::Result;
use crate::config::Section;
use crate::registry::Builtin;

/// Makes a data set; reading files is left until the whole configuration is known to be right.
pub type DatasetFactory = Box<dyn FnOnce() -> Result<Arc<dyn Dataset>> + Send>;

/// The data sets a configuration can name.
pub(crate) const BUILTIN: Builtin<DatasetFactory> =
    &[("Digits", digits), ("FashionMnist", fashion_mnist)];

fn split(section: &mut Section) -> Result<Split> {
    section.choice("split", "train", &[("train", Split::Train), ("test", Split::Test)])
}

fn digits(section: &mut Section) -> Result<DatasetFactory> {
    let split = split(section)?;
    let split_seed = section.or("split_seed", 0)?;
    Ok(Box::new(move || Ok(Arc::new(Digits::new(split, split_seed)?))))
}

fn fashion_mnist(section: &mut Section) -> Result<DatasetFactory> {
    let split = split(section)?;
    let root = section.optional::<String>("root")?.map(PathBuf::from);
    Ok(Box::new(move || Ok(Arc::new(FashionMnist::new(split, root.as_deref())?))))
}
