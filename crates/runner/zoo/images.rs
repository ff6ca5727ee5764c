//! Labelled images in memory, and `Split`, the parts of a data set.

use runner::config::Section;
use runner::data::{Array, ArrayData, Batch};
use runner::{Error, Result};

/// Which part of a data set.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Split {
    /// What a model learns from.
    Train,
    /// What is held out to evaluate it.
    Test,
}

impl Split {
    /// The key `split`: `train` unless set, or `test`.
    pub(super) fn read(section: &mut Section) -> Result<Self> {
        section.choice("split", "train", &[("train", Self::Train), ("test", Self::Test)])
    }
}

/// Labelled images of one size and one channel, in memory.
///
/// Invariant: `pixels` holds `height * width` bytes for each of `labels`.
#[derive(Clone, Debug)]
pub(super) struct Images {
    pub(super) pixels: Vec<u8>,
    pub(super) labels: Vec<u8>,
    pub(super) height: usize,
    pub(super) width: usize,
}

impl Images {
    pub(super) fn len(&self) -> usize {
        self.labels.len()
    }

    pub(super) fn image(&self, index: usize) -> &[u8] {
        let size = self.height * self.width;
        &self.pixels[index * size..(index + 1) * size]
    }

    /// `inputs`: bytes `[n, 1, height, width]`; `labels`: `[n]`.
    pub(super) fn batch(&self, name: &str, indices: &[usize]) -> Result<Batch> {
        let mut pixels = Vec::with_capacity(indices.len() * self.height * self.width);
        let mut labels = Vec::with_capacity(indices.len());
        for &index in indices {
            let Some(label) = self.labels.get(index) else {
                let count = self.len();
                return Err(Error::Data(format!("{name} has {count} samples, not a {index}th")));
            };
            pixels.extend_from_slice(self.image(index));
            labels.push(i64::from(*label));
        }
        let shape = [indices.len(), 1, self.height, self.width];
        Ok(Batch::new()
            .with("inputs", Array::new(shape, ArrayData::U8(pixels))?)
            .with("labels", Array::new([indices.len()], ArrayData::I64(labels))?))
    }
}
