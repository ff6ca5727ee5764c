//! Labelled images in memory, and `Split`, the parts of a data set.

use crate::Result;
use crate::config::Section;
use crate::data::{Array, BoxError, Sample};

/// Part of a data set.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Split {
    /// Training samples.
    Train,
    /// Samples held out for evaluation.
    Test,
}

impl Split {
    /// Reads the key `split`: `train`, the default, or `test`.
    pub(super) fn read(section: &mut Section) -> Result<Self> {
        section.choice("split", "train", &[("train", Self::Train), ("test", Self::Test)])
    }
}

/// Labelled images of one size and one channel, in memory.
///
/// Invariant: `pixels` contains `height * width` bytes for each of `labels`.
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

    /// Returns a sample: `inputs`, bytes `[1, height, width]`, and `labels`, a number.
    pub(super) fn sample(&self, index: usize) -> Result<Sample, BoxError> {
        let Some(label) = self.labels.get(index) else {
            return Err(format!("there are {} samples", self.len()).into());
        };
        let image = Array::new([1, self.height, self.width], self.image(index).to_vec())?;
        let label = Array::scalar(i64::from(*label));
        Ok(Sample::new().with("inputs", image).with("labels", label))
    }
}
