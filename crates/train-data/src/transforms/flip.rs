//! Flipping.

use super::{ImageTransform, happens, image_shape};
use crate::array::with_elements;
use crate::{Array, ArrayData, BoxError, Result, SampleRng};

/// Direction of a flip: MMCV's `direction`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Direction {
    /// Left and right.
    #[default]
    Horizontal,
    /// Up and down.
    Vertical,
    /// Both.
    Diagonal,
}

/// Flips an image of any element type.
///
/// # Errors
///
/// [`Error::Input`](crate::Error::Input) if it is not `[channels, height, width]`.
pub fn flip(image: Array, direction: Direction) -> Result<Array> {
    let [channels, height, width] = image_shape(&image)?;
    let shape = [channels, height, width];
    let data = with_elements!(image.into_data(), pixels => {
        let mut pixels = pixels;
        if direction != Direction::Vertical {
            pixels.chunks_exact_mut(width).for_each(<[_]>::reverse);
        }
        if direction != Direction::Horizontal {
            for plane in pixels.chunks_exact_mut(height * width) {
                // The rows from the top, and those from the bottom.
                let (top, bottom) = plane.split_at_mut(height / 2 * width);
                let rows = top.chunks_exact_mut(width).zip(bottom.rchunks_exact_mut(width));
                rows.for_each(|(row, other)| row.swap_with_slice(other));
            }
        }
        ArrayData::from(pixels)
    });
    Array::new(shape, data)
}

/// Flips an image with this probability.
#[doc(alias = "RandomHorizontalFlip")]
#[doc(alias = "RandomVerticalFlip")]
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct RandomFlip {
    /// Probability.
    pub prob: f64,
    /// Direction.
    pub direction: Direction,
}

impl Default for RandomFlip {
    /// Flips horizontally with probability 0.5.
    fn default() -> Self {
        Self { prob: 0.5, direction: Direction::Horizontal }
    }
}

impl ImageTransform for RandomFlip {
    fn image(&self, image: Array, random: &mut SampleRng) -> Result<Array, BoxError> {
        if happens(self.prob, random)? {
            return Ok(flip(image, self.direction)?);
        }
        image_shape(&image)?;
        Ok(image)
    }
}
