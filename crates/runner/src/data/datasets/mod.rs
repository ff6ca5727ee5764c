//! Data sets: where batches come from.
//!
//! A [`Dataset`] is a number of samples and a way to make a batch of any of them; which samples,
//! in which order and on which rank, is a sampler's business. The two here hold images and labels
//! in memory.

mod digits;
mod fashion_mnist;
mod idx;

pub use digits::Digits;
pub use fashion_mnist::FashionMnist;

use super::{Array, ArrayData, Batch};
use crate::{Error, Result};

/// A finite, indexed set of samples.
pub trait Dataset: Send + Sync {
    /// What it is called, for logs; its type's name unless it has another.
    fn name(&self) -> &str {
        std::any::type_name::<Self>()
    }

    /// Number of samples.
    fn len(&self) -> usize;

    /// Makes a batch of the samples `indices`, in this order.
    ///
    /// # Errors
    ///
    /// [`Error::Data`] if an index is not below [`len`](Self::len), or a sample cannot be read.
    fn batch(&self, indices: &[usize]) -> Result<Batch>;

    /// True if there is no sample.
    fn is_empty(&self) -> bool {
        self.len() == 0
    }
}

/// Which part of a data set.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Split {
    /// What a model learns from.
    Train,
    /// What is held out to judge it.
    Test,
}

/// Labelled images of one size and one channel, in memory.
///
/// Invariant: `pixels` holds `height * width` bytes for each of `labels`.
#[derive(Clone, Debug)]
struct Images {
    pixels: Vec<u8>,
    labels: Vec<u8>,
    height: usize,
    width: usize,
}

impl Images {
    fn len(&self) -> usize {
        self.labels.len()
    }

    fn image(&self, index: usize) -> &[u8] {
        let size = self.height * self.width;
        &self.pixels[index * size..(index + 1) * size]
    }

    /// `inputs`: bytes `[n, 1, height, width]`; `labels`: `[n]`.
    fn batch(&self, name: &str, indices: &[usize]) -> Result<Batch> {
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
