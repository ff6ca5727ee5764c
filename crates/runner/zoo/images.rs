//! Labelled images in memory, and `Split`, the parts of a data set.

use runner::Result;
use runner::config::Section;
use runner::data::{Array, BoxError, Sample};

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

    /// `inputs`: bytes `[1, height, width]`; `labels`: a number.
    pub(super) fn sample(&self, index: usize) -> Result<Sample, BoxError> {
        let Some(label) = self.labels.get(index) else {
            return Err(format!("there are {} samples", self.len()).into());
        };
        let image = Array::new([1, self.height, self.width], self.image(index).to_vec())?;
        let label = Array::scalar(i64::from(*label));
        Ok(Sample::new().with("inputs", image).with("labels", label))
    }
}
