//! Batches for the model: re-exports of [`train_data`], and registries of data sets and collate
//! functions.

mod streams;
mod transforms;

use std::sync::Arc;

pub use streams::{STREAMS, StreamFactory};
pub use train_data::{
    Array, ArrayData, Batch, BoxError, Collate, DataLoader, Dataset, DefaultSampler, Draw,
    IterScale, Layout, PadCollate, Sample, SampleRng, Stream, StreamLoader, StreamOptions,
    StreamPosition, Workers,
};

use train_data::transforms::pack;
pub(crate) use transforms::Steps;
pub use transforms::{BATCH_TRANSFORMS, TRANSFORMS, TransformFactory};

use crate::Result;
use crate::config::Section;
use crate::registry::Registry;

/// Data sets that a configuration can name in `[train_dataloader.dataset]`: `ImageFolder`, and
/// those that the program registers.
pub static DATASETS: Registry<DatasetFactory> =
    Registry::with("data set", &[("ImageFolder", transforms::with_image::image_folder)]);

/// Creates a data set. The call may read files; it is made only after the whole configuration was
/// checked.
pub type DatasetFactory = Box<dyn FnOnce() -> Result<Arc<dyn Dataset>> + Send>;

/// Functions that a configuration can name in `collate_fn`; `None` uses the data set's own
/// [`Dataset::batch`].
pub static COLLATE_FUNCTIONS: Registry<Option<Collate>> = Registry::with(
    "collate function",
    &[
        ("default_collate", |_| Ok(None)),
        ("pack", |section| read_pack(section).map(Some)),
        ("pad_collate", |section| read_pad(section).map(Some)),
    ],
);

/// Reads `pad_collate`: `padding_value`, and `padding_values` by field.
fn read_pad(section: &mut Section) -> Result<Collate> {
    let mut pad = PadCollate::new(section.or("padding_value", 0.0)?);
    if let Some(mut fields) = section.optional_section("padding_values")? {
        for (name, value) in fields.named_values::<f64>()? {
            pad = pad.field(name, value);
        }
    }
    Ok(Arc::new(move |samples| Ok(pad.collate(samples)?)))
}

/// Reads `pack`: rows of `length` tokens, each text followed by the token `end`.
fn read_pack(section: &mut Section) -> Result<Collate> {
    let length = section.count("length", 1024)?;
    let end = section.required("end")?;
    Ok(Arc::new(move |samples| Ok(pack(samples, length, end)?)))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::Config;

    fn build(text: &str) -> Result<Option<Collate>> {
        COLLATE_FUNCTIONS.build(Config::from_text("c.toml", text).unwrap().into_section())
    }

    #[test]
    fn pad_collate_pads_each_field_with_its_value() {
        assert!(build("type = 'default_collate'").unwrap().is_none());
        let text = "type = 'pad_collate'\npadding_value = 1\npadding_values = { labels = -100 }";
        let collate = build(text).unwrap().unwrap();
        let sample = |ids: &[i64]| {
            let ids = Array::new([ids.len()], ids.to_vec()).unwrap();
            Sample::new().with("ids", ids.clone()).with("labels", ids)
        };
        let batch = collate(vec![sample(&[5]), sample(&[6, 7])]).unwrap();
        let expected = |pad| Array::new([2, 2], vec![5_i64, pad, 6, 7]).unwrap();
        assert_eq!(*batch.get("ids").unwrap(), expected(1));
        assert_eq!(*batch.get("labels").unwrap(), expected(-100));
        let error = build("type = 'pad_collate'\npadding_values = { labels = 'a' }").err().unwrap();
        assert!(error.to_string().contains("`labels` must be"), "{error}");
    }
}
