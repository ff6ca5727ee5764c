//! Normalization: `ToTensor` and `Normalize`.

use super::{ImageTransform, image_shape, unfit};
use crate::{Array, ArrayData, BoxError, Result, SampleRng};

/// Converts bytes from 0 to 255 to floats from 0 to 1; floats are unchanged. Equals torchvision's
/// `to_tensor`.
///
/// # Errors
///
/// [`Error::Input`](crate::Error::Input) if the image is not `[channels, height, width]` of bytes
/// or `f32`.
pub fn to_tensor(image: Array) -> Result<Array> {
    let shape = image_shape(&image)?;
    match image.data() {
        ArrayData::U8(bytes) => {
            let table: [f32; 256] = std::array::from_fn(|byte| byte as f32 / 255.0);
            let floats: Vec<_> = bytes.iter().map(|byte| table[usize::from(*byte)]).collect();
            Array::new(shape, floats)
        }
        ArrayData::F32(_) => Ok(image),
        other => Err(other_type(other)),
    }
}

/// Converts bytes from 0 to 255 to floats from 0 to 1; floats are unchanged.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ToTensor;

impl ImageTransform for ToTensor {
    fn image(&self, image: Array, _: &mut SampleRng) -> Result<Array, BoxError> {
        Ok(to_tensor(image)?)
    }
}

/// Computes `(x - mean) / std` for each channel, in `f32`. Mean and standard deviation are in the
/// unit of the image: from 0 to 255 for an image of bytes (MMCV's values, such as 123.675), from 0
/// to 1 after [`ToTensor`] (torchvision's, such as 0.485).
///
/// A single mean and standard deviation apply to all channels.
///
/// # Errors
///
/// [`Error::Input`](crate::Error::Input) if the image is not `[channels, height, width]` of bytes
/// or `f32`, or has another number of channels; if a mean is not finite, or a standard deviation
/// not finite and above 0; if the image is of bytes and a standard deviation is below 1, as for
/// pixels from 0 to 1.
pub fn normalize(image: Array, mean: &[f32], std: &[f32]) -> Result<Array> {
    let shape = image_shape(&image)?;
    let [channels, height, width] = shape;
    let fits = |values: &[f32]| values.len() == 1 || values.len() == channels;
    if !fits(mean) || !fits(std) {
        let (mean, std) = (mean.len(), std.len());
        let text = format!("{mean} means and {std} deviations do not fit {channels} channels");
        return Err(unfit(text));
    }
    if let Some(text) = out_of_range(mean, std) {
        return Err(unfit(text));
    }
    let of = |channel: usize| (mean[channel % mean.len()], std[channel % std.len()]);
    let floats = match image.into_data() {
        ArrayData::U8(bytes) => {
            if let Some(std) = std.iter().find(|std| **std < 1.0) {
                let text = format!(
                    "a deviation of {std} is one of pixels from 0 to 1, but the image is of bytes; \
                     put ToTensor before Normalize, or multiply mean and std by 255"
                );
                return Err(unfit(text));
            }
            let mut out = Vec::with_capacity(bytes.len());
            for (channel, plane) in bytes.chunks_exact(height * width).enumerate() {
                let (mean, std) = of(channel);
                // One division per possible byte instead of one per pixel.
                let table: [f32; 256] = std::array::from_fn(|byte| (byte as f32 - mean) / std);
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
        other => return Err(other_type(&other)),
    };
    Array::new(shape, floats)
}

/// Describes a mean or a standard deviation that would make pixels NaN or infinite.
fn out_of_range(mean: &[f32], std: &[f32]) -> Option<String> {
    let is_fine = |std: &f32| std.is_finite() && *std > 0.0;
    if let Some(mean) = mean.iter().find(|mean| !mean.is_finite()) {
        return Some(format!("a mean must be finite, got {mean}"));
    }
    let std = std.iter().find(|std| !is_fine(std))?;
    Some(format!("a standard deviation must be finite and above 0, got {std}"))
}

fn other_type(data: &ArrayData) -> crate::Error {
    unfit(format!("the image must be of bytes (u8) or f32, not {}", data.type_name()))
}

/// Normalizes each channel to floats by `(x - mean) / std`, in the unit of the image: see
/// [`normalize`].
#[derive(Clone, Debug, PartialEq)]
pub struct Normalize {
    mean: Vec<f32>,
    std: Vec<f32>,
}

impl Normalize {
    /// Sets mean and standard deviation of each channel: for pixels from 0 to 255 for images of
    /// bytes, from 0 to 1 after [`ToTensor`].
    ///
    /// # Panics
    ///
    /// If there are none, a mean is not finite, or a standard deviation is not finite and positive.
    #[must_use]
    pub fn new(mean: impl Into<Vec<f32>>, std: impl Into<Vec<f32>>) -> Self {
        let (mean, std) = (mean.into(), std.into());
        assert!(!mean.is_empty() && !std.is_empty(), "a mean and a deviation are needed");
        if let Some(text) = out_of_range(&mean, &std) {
            panic!("{text}");
        }
        Self { mean, std }
    }
}

impl ImageTransform for Normalize {
    fn image(&self, image: Array, _: &mut SampleRng) -> Result<Array, BoxError> {
        Ok(normalize(image, &self.mean, &self.std)?)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn deviations_and_means_that_make_no_numbers_are_refused() {
        let images = [
            Array::new([1, 1, 2], vec![1.0_f32, 2.0]).unwrap(),
            Array::new([1, 1, 2], vec![1_u8, 2]).unwrap(),
        ];
        for image in images {
            for std in [0.0, -1.0, f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
                let error = normalize(image.clone(), &[0.0], &[std]).unwrap_err().to_string();
                let expected = format!("standard deviation must be finite and above 0, got {std}");
                assert!(error.contains(&expected), "{error}");
                let made = std::panic::catch_unwind(|| Normalize::new([0.0], [1.0, std]));
                assert!(made.is_err(), "{std}");
            }
            for mean in [f32::NAN, f32::INFINITY] {
                let error = normalize(image.clone(), &[mean], &[1.0]).unwrap_err().to_string();
                assert!(error.contains("mean must be finite"), "{error}");
                assert!(std::panic::catch_unwind(|| Normalize::new([mean], [1.0])).is_err());
            }
        }
    }
}
