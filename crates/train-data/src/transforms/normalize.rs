//! Normalizing.

use super::{ImageTransform, image_shape, unfit};
use crate::{Array, ArrayData, BoxError, Result, SampleRng};

/// `(x - mean) / std` for each channel, in `f32`; bytes are divided by 255 first, as torchvision's `ToTensor` does.
///
/// One mean and one deviation do for all channels.
///
/// # Errors
///
/// [`Error::Input`](crate::Error::Input) if the image is not `[channels, height, width]` of bytes or `f32`, or has
/// another number of channels.
pub fn normalize(image: Array, mean: &[f32], std: &[f32]) -> Result<Array> {
    let shape = image_shape(&image)?;
    let [channels, height, width] = shape;
    let fits = |values: &[f32]| values.len() == 1 || values.len() == channels;
    if !fits(mean) || !fits(std) {
        let (mean, std) = (mean.len(), std.len());
        let text = format!("{mean} means and {std} deviations do not fit {channels} channels");
        return Err(unfit(text));
    }
    let of = |channel: usize| (mean[channel % mean.len()], std[channel % std.len()]);
    let floats = match image.into_data() {
        ArrayData::U8(bytes) => {
            let mut out = Vec::with_capacity(bytes.len());
            for (channel, plane) in bytes.chunks_exact(height * width).enumerate() {
                let (mean, std) = of(channel);
                // A division for each byte that there is instead of for each pixel.
                let table: [f32; 256] =
                    std::array::from_fn(|byte| (byte as f32 / 255.0 - mean) / std);
                out.extend(plane.iter().map(|byte| table[usize::from(*byte)]));
            }
            out
        }
        ArrayData::F32(mut floats) => {
            for (channel, plane) in floats.chunks_exact_mut(height * width).enumerate() {
                let (mean, std) = of(channel);
                plane.iter_mut().for_each(|x| *x = (*x - mean) / std);
            }
            floats
        }
        other => {
            let name = other.type_name();
            return Err(unfit(format!("the image must be of bytes (u8) or f32, not {name}")));
        }
    };
    Array::new(shape, floats)
}

/// `(x - mean) / std` for each channel, as floats; bytes are divided by 255 first.
#[doc(alias = "ToTensor")]
#[derive(Clone, Debug, PartialEq)]
pub struct Normalize {
    mean: Vec<f32>,
    std: Vec<f32>,
}

impl Normalize {
    /// Mean and deviation of each channel, of pixels from 0 to 1.
    ///
    /// # Panics
    ///
    /// If there is none, or a deviation is not positive.
    #[must_use]
    pub fn new(mean: impl Into<Vec<f32>>, std: impl Into<Vec<f32>>) -> Self {
        let (mean, std) = (mean.into(), std.into());
        assert!(!mean.is_empty() && !std.is_empty(), "a mean and a deviation are needed");
        assert!(std.iter().all(|std| *std > 0.0), "deviations must be positive: {std:?}");
        Self { mean, std }
    }
}

impl ImageTransform for Normalize {
    fn image(&self, image: Array, _: &mut SampleRng) -> Result<Array, BoxError> {
        Ok(normalize(image, &self.mean, &self.std)?)
    }
}
