//! Transforms of samples between data set and batch, as in PyTorch's `torchvision.transforms`.
//!
//! Each is a plain function on arrays (`resize`, `flip`, `normalize`, ...), and a struct of the
//! same name that draws its random arguments from the sample's random numbers and implements
//! [`Transform`]. A [`Pipeline`] is a list of transforms, and [`Transformed`] a data set with a
//! pipeline; [`Stream::transform`](crate::Stream::transform) also takes one. [`MixUp`] and
//! [`CutMix`] work on whole batches ([`BatchTransform`]).
//!
//! An image is an array `[channels, height, width]`, of bytes after decoding, of floats after
//! normalization. Images are read from and written to the field `inputs`, unless [`On`] names
//! another. Pixels of one or three channels equal torchvision's with Pillow, bit for bit, after
//! resizing, cropping, flipping, normalization and jitter. Two and four channels are treated alike;
//! Pillow takes the last one for transparency and multiplies the others with it when it resizes.
//! Decoded JPEGs differ by a few levels, as usual between decoders, and PNGs of 16 bits as
//! described at `decode`.
//!
//! A sample's random numbers are a function of seed, pass and index (see [`Draw`]), so that the
//! result of a transform depends neither on workers nor on interruptions of a run.
//!
//! ```
//! use train_data::transforms::{CenterCrop, Normalize, Pipeline, RandomFlip};
//! use train_data::transforms::{Resize, ToTensor, Transform};
//! use train_data::{Array, Draw, Sample};
//!
//! let pipeline = Pipeline::new()
//!     .then(Resize::short_edge(8))
//!     .then(CenterCrop::square(7))
//!     .then(RandomFlip::default())
//!     .then(ToTensor)
//!     .then(Normalize::new([0.485, 0.456, 0.406], [0.229, 0.224, 0.225]));
//! let image = Array::new([3, 10, 16], vec![7_u8; 480])?;
//! let sample = Sample::new().with("inputs", image);
//! let sample = pipeline.apply(sample, &mut Draw::from(0).random())?;
//! assert_eq!(sample.get("inputs")?.shape(), [3, 7, 7]);
//! # Ok::<(), train_data::BoxError>(())
//! ```

mod color;
mod crop;
#[cfg(feature = "image")]
mod decode;
mod flip;
mod mix;
mod normalize;
mod random;
mod resize;
#[cfg(target_arch = "x86_64")]
mod simd_limit;
#[cfg(test)]
mod tests;
mod text;
mod vectors;

pub use color::{ColorJitter, RandomGrayscale};
pub use color::{adjust_brightness, adjust_contrast, adjust_hue, adjust_saturation, grayscale};
pub use crop::{CenterCrop, RandomCrop, RandomResizedCrop, Region, center_crop, crop};
#[cfg(feature = "image")]
pub use decode::{Decode, decode};
pub use flip::{Direction, RandomFlip, flip};
pub use mix::{CutMix, MixUp, cut_mix, mix_up};
pub use normalize::{Normalize, ToTensor, normalize, to_tensor};
pub use resize::{Filter, Resize, ResizeTo, resize};
pub use text::{IGNORED, PadTokens, Tokenize, TruncateTokens, pack};

use crate::dataset::short_name;
use crate::{Array, ArrayData, Batch, BoxError, Dataset, Draw, Error, Result, Sample, SampleRng};

/// Transforms samples.
pub trait Transform: Send + Sync {
    /// Name in errors, by default that of its type.
    fn name(&self) -> &str {
        short_name::<Self>()
    }

    /// Transforms a sample. All randomness must come from `random`.
    ///
    /// # Errors
    ///
    /// Those of the transform: a field that is missing or has another form.
    fn apply(&self, sample: Sample, random: &mut SampleRng) -> Result<Sample, BoxError>;
}

/// Transforms images: a [`Transform`] of the field `inputs`, or of another with [`On`].
pub trait ImageTransform: Send + Sync {
    /// Transforms an image `[channels, height, width]`.
    ///
    /// # Errors
    ///
    /// Those of the transform: an array of another form.
    fn image(&self, image: Array, random: &mut SampleRng) -> Result<Array, BoxError>;
}

impl<T: ImageTransform> Transform for T {
    fn name(&self) -> &str {
        short_name::<Self>()
    }

    fn apply(&self, sample: Sample, random: &mut SampleRng) -> Result<Sample, BoxError> {
        apply_to("inputs", self, sample, random)
    }
}

/// An [`ImageTransform`] of the field with this name.
#[derive(Clone, Debug)]
pub struct On<T>(pub String, pub T);

impl<T: ImageTransform> Transform for On<T> {
    fn name(&self) -> &str {
        short_name::<T>()
    }

    fn apply(&self, sample: Sample, random: &mut SampleRng) -> Result<Sample, BoxError> {
        apply_to(&self.0, &self.1, sample, random)
    }
}

fn apply_to(
    field: &str,
    transform: &impl ImageTransform,
    mut sample: Sample,
    random: &mut SampleRng,
) -> Result<Sample, BoxError> {
    let image = transform.image(sample.take(field)?, random)?;
    sample.set(field, image);
    Ok(sample)
}

/// A [`Transform`] that calls a function.
pub fn from_fn<F>(function: F) -> impl Transform
where
    F: Fn(Sample, &mut SampleRng) -> Result<Sample, BoxError> + Send + Sync,
{
    FromFn(function)
}

struct FromFn<F>(F);

impl<F> Transform for FromFn<F>
where
    F: Fn(Sample, &mut SampleRng) -> Result<Sample, BoxError> + Send + Sync,
{
    fn name(&self) -> &str {
        short_name::<F>()
    }

    fn apply(&self, sample: Sample, random: &mut SampleRng) -> Result<Sample, BoxError> {
        (self.0)(sample, random)
    }
}

/// Transforms applied one after another, with a common source of random numbers.
#[doc(alias = "Compose")]
#[derive(Default)]
pub struct Pipeline {
    steps: Vec<Box<dyn Transform>>,
}

impl Pipeline {
    /// Creates an empty pipeline, which leaves samples unchanged.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// Adds a transform at the end.
    #[must_use]
    pub fn then(mut self, transform: impl Transform + 'static) -> Self {
        self.steps.push(Box::new(transform));
        self
    }
}

impl FromIterator<Box<dyn Transform>> for Pipeline {
    fn from_iter<I: IntoIterator<Item = Box<dyn Transform>>>(steps: I) -> Self {
        Self { steps: steps.into_iter().collect() }
    }
}

impl std::fmt::Debug for Pipeline {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_list().entries(self.steps.iter().map(|step| step.name())).finish()
    }
}

impl Transform for Pipeline {
    fn apply(&self, sample: Sample, random: &mut SampleRng) -> Result<Sample, BoxError> {
        self.steps.iter().enumerate().try_fold(sample, |sample, (step, transform)| {
            transform.apply(sample, random).map_err(|source| {
                Error::Transform { step, name: transform.name().to_owned(), source }.into()
            })
        })
    }
}

/// Transforms batches.
pub trait BatchTransform: Send + Sync {
    /// Transforms a batch. All randomness must come from `random`.
    ///
    /// # Errors
    ///
    /// Those of the transform: a field that is missing or has another form.
    fn apply(&self, batch: Batch, random: &mut SampleRng) -> Result<Batch, BoxError>;
}

impl BatchTransform for Box<dyn BatchTransform> {
    fn apply(&self, batch: Batch, random: &mut SampleRng) -> Result<Batch, BoxError> {
        (**self).apply(batch, random)
    }
}

/// A data set with a pipeline for its samples, and batch transforms.
pub struct Transformed<D> {
    dataset: D,
    pipeline: Pipeline,
    of_batches: Vec<Box<dyn BatchTransform>>,
}

impl<D: Dataset> Transformed<D> {
    /// Applies `pipeline` to `dataset`.
    pub fn new(dataset: D, pipeline: Pipeline) -> Self {
        Self { dataset, pipeline, of_batches: Vec::new() }
    }

    /// Adds a batch transform. Its random numbers are derived from the batch's first sample, but
    /// differ from those of the sample, and of batch transforms of `dataset`.
    #[must_use]
    pub fn with_batch_transform(mut self, transform: impl BatchTransform + 'static) -> Self {
        self.of_batches.push(Box::new(transform));
        self
    }
}

impl<D: Dataset> Dataset for Transformed<D> {
    fn name(&self) -> &str {
        self.dataset.name()
    }

    fn len(&self) -> usize {
        self.dataset.len()
    }

    fn sample(&self, index: usize, random: &mut SampleRng) -> Result<Sample, BoxError> {
        self.pipeline.apply(self.dataset.sample(index, random)?, random)
    }

    fn finish(&self, batch: Batch, draws: &[Draw]) -> Result<Batch, BoxError> {
        let batch = self.dataset.finish(batch, draws)?;
        let (Some(first), false) = (draws.first(), self.of_batches.is_empty()) else {
            return Ok(batch);
        };
        let mut random = first.random();
        random.set_stream(!(first.index as u64));
        // Batch transforms of an inner data set have drawn from the start.
        random.set_word_pos((self.dataset.batch_transforms() as u128) << 40);
        self.of_batches.iter().try_fold(batch, |batch, t| t.apply(batch, &mut random))
    }

    fn batch_transforms(&self) -> usize {
        self.dataset.batch_transforms() + self.of_batches.len()
    }
}

impl<D: std::fmt::Debug> std::fmt::Debug for Transformed<D> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Transformed")
            .field("dataset", &self.dataset)
            .field("pipeline", &self.pipeline)
            .finish_non_exhaustive()
    }
}

/// Draws whether something of this probability happens.
fn happens(probability: f64, random: &mut SampleRng) -> Result<bool> {
    if !(0.0..=1.0).contains(&probability) {
        return Err(unfit(format!("a probability must be from 0 to 1, not {probability}")));
    }
    Ok(random::unit(random) < probability)
}

/// Channels, height and width of an image, none of them 0.
fn image_shape(image: &Array) -> Result<[usize; 3]> {
    match image.shape() {
        [c, h, w] if c * h * w > 0 => Ok([*c, *h, *w]),
        shape => {
            Err(unfit(format!("an image has a shape [channels, height, width], not {shape:?}")))
        }
    }
}

/// Number of values of an array to create. Returns an error for more than 2^28: Pillow's limit for
/// an image of three channels.
fn checked_len(shape: &[usize]) -> Result<usize> {
    const MOST: usize = 1 << 28;
    let len = shape.iter().try_fold(1_usize, |len, extent| len.checked_mul(*extent));
    len.filter(|len| *len <= MOST)
        .ok_or_else(|| unfit(format!("an array of shape {shape:?} has more than {MOST} values")))
}

/// Returns the bytes of an image.
fn bytes(image: &Array) -> Result<&[u8]> {
    match image.data() {
        ArrayData::U8(bytes) => Ok(bytes),
        other => Err(unfit(format!("the image must be of bytes (u8), not {}", other.type_name()))),
    }
}

fn unfit(text: impl Into<String>) -> Error {
    Error::Input(text.into())
}
