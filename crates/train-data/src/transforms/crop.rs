//! Crops.
//!
//! Follows: torchvision 0.29, `transforms/functional.py` and `transforms.py`.

use super::resize::{Plane, resize_planes};
use super::{Filter, ImageTransform, bytes, checked_len, image_shape, random, unfit};
use crate::array::with_elements;
use crate::{Array, ArrayData, BoxError, Result, SampleRng};

/// A rectangle in an image, which may extend beyond it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Region {
    /// First row.
    pub top: isize,
    /// First column.
    pub left: isize,
    /// Number of rows.
    pub height: usize,
    /// Number of columns.
    pub width: usize,
}

/// Crops a region of an image of any element type; pixels outside of the image are zeros.
///
/// # Errors
///
/// [`Error::Input`](crate::Error::Input) if it is not `[channels, height, width]`, or the region is
/// empty or has more than 2^28 values.
pub fn crop(image: &Array, region: Region) -> Result<Array> {
    let [channels, height, width] = image_shape(image)?;
    if region.height == 0 || region.width == 0 {
        return Err(unfit("a crop must be at least 1 x 1"));
    }
    let len = checked_len(&[channels, region.height, region.width])?;
    let rows = Overlap::new(region.top, region.height, height);
    let columns = Overlap::new(region.left, region.width, width);
    let data = with_elements!(image.data(), pixels => {
        let mut out = vec![Default::default(); len];
        let planes = pixels.chunks_exact(height * width);
        for (plane, out) in planes.zip(out.chunks_exact_mut(region.height * region.width)) {
            let from = plane.chunks_exact(width).skip(rows.from).take(rows.count);
            let to = out.chunks_exact_mut(region.width).skip(rows.to);
            for (row, out) in from.zip(to) {
                out[columns.to..][..columns.count]
                    .copy_from_slice(&row[columns.from..][..columns.count]);
            }
        }
        ArrayData::from(out)
    });
    Array::new([channels, region.height, region.width], data)
}

/// Range of `count` positions from `first` on within `len`.
struct Overlap {
    from: usize,
    to: usize,
    count: usize,
}

impl Overlap {
    fn new(first: isize, count: usize, len: usize) -> Self {
        let from = first.max(0) as usize;
        let to = first.min(0).unsigned_abs();
        match count.saturating_sub(to).min(len.saturating_sub(from)) {
            // Positions outside are beyond its end, too.
            0 => Self { from: 0, to: 0, count: 0 },
            count => Self { from, to, count },
        }
    }
}

/// Crops the center `[height, width]`; missing pixels are zeros.
///
/// # Errors
///
/// As [`crop`].
pub fn center_crop(image: &Array, [height, width]: [usize; 2]) -> Result<Array> {
    let [_, rows, columns] = image_shape(image)?;
    let first = |has: usize, wants: usize| match has.checked_sub(wants) {
        // Halves are rounded to even, as in Python.
        Some(spare) => (spare as f64 / 2.0).round_ties_even() as isize,
        None => -(((wants - has) / 2) as isize),
    };
    crop(image, Region { top: first(rows, height), left: first(columns, width), height, width })
}

/// Crops the center `[height, width]`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CenterCrop(pub [usize; 2]);

impl CenterCrop {
    /// Crops as many rows as columns.
    #[must_use]
    pub const fn square(size: usize) -> Self {
        Self([size; 2])
    }
}

impl ImageTransform for CenterCrop {
    fn image(&self, image: Array, _: &mut SampleRng) -> Result<Array, BoxError> {
        Ok(center_crop(&image, self.0)?)
    }
}

/// Crops `size` at a random position, after padding with zeros on all sides.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RandomCrop {
    /// Height and width.
    pub size: [usize; 2],
    /// Rows and columns of zeros on each side.
    pub padding: usize,
    /// Whether to pad an image smaller than the crop with more zeros; otherwise it is an error.
    pub pad_if_needed: bool,
}

impl RandomCrop {
    /// Crops as many rows as columns, without padding.
    #[must_use]
    pub const fn square(size: usize) -> Self {
        Self { size: [size; 2], padding: 0, pad_if_needed: false }
    }
}

impl ImageTransform for RandomCrop {
    fn image(&self, image: Array, random: &mut SampleRng) -> Result<Array, BoxError> {
        let [channels, rows, columns] = image_shape(&image)?;
        let [height, width] = self.size;
        let padded = |extent: usize| extent.saturating_add(self.padding.saturating_mul(2));
        checked_len(&[channels, padded(rows), padded(columns)])?;
        checked_len(&[channels, height, width])?;
        let mut first = |has: usize, wants: usize| {
            let mut padding = self.padding;
            if self.pad_if_needed {
                padding += wants.saturating_sub(has + 2 * padding);
            }
            let spare = (has + 2 * padding).checked_sub(wants)?;
            Some(random::below(random, spare + 1) as isize - padding as isize)
        };
        let (Some(top), Some(left)) = (first(rows, height), first(columns, width)) else {
            let text = format!(
                "an image of {rows} x {columns} is smaller than the crop of {height} x {width}; set \
                 `pad_if_needed`, or resize it before"
            );
            return Err(unfit(text).into());
        };
        Ok(crop(&image, Region { top, left, height, width })?)
    }
}

/// Resizes a random region of an image: `scale` of its area, with an aspect ratio (width to height)
/// within `ratio`.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct RandomResizedCrop {
    /// Height and width of the result.
    pub size: [usize; 2],
    /// Minimum and maximum fraction of the area. Defaults to 0.08 and 1.
    pub scale: [f64; 2],
    /// Minimum and maximum aspect ratio. Defaults to 3/4 and 4/3.
    pub ratio: [f64; 2],
    /// Interpolation filter.
    pub filter: Filter,
}

impl RandomResizedCrop {
    /// Resizes to as many rows as columns, with torchvision's defaults.
    #[must_use]
    pub const fn square(size: usize) -> Self {
        let ratio = [3.0 / 4.0, 4.0 / 3.0];
        Self { size: [size; 2], scale: [0.08, 1.0], ratio, filter: Filter::Bilinear }
    }

    /// Returns the region in an image of `height` and `width`; `unit` yields random numbers from 0
    /// to 1.
    pub(super) fn region(
        &self,
        [height, width]: [usize; 2],
        mut unit: impl FnMut() -> f64,
    ) -> Region {
        let area = (height * width) as f64;
        for _ in 0..10 {
            let target = area * random::between(self.scale, unit());
            let ratio = random::between(self.ratio.map(f64::ln), unit()).exp();
            let w = (target * ratio).sqrt().round_ties_even() as usize;
            let h = (target / ratio).sqrt().round_ties_even() as usize;
            if (1..=width).contains(&w) && (1..=height).contains(&h) {
                let mut first = |spare: usize| (unit() * (spare + 1) as f64) as isize;
                let top = first(height - h);
                return Region { top, left: first(width - w), height: h, width: w };
            }
        }
        // Central crop, as large as the ratio allows.
        let ratio = (width as f64 / height as f64).clamp(self.ratio[0], self.ratio[1]);
        let w = ((height as f64 * ratio).round_ties_even() as usize).clamp(1, width);
        let h = ((width as f64 / ratio).round_ties_even() as usize).clamp(1, height);
        let (top, left) = ((height - h) / 2, (width - w) / 2);
        Region { top: top as isize, left: left as isize, height: h, width: w }
    }
}

impl ImageTransform for RandomResizedCrop {
    fn image(&self, image: Array, random: &mut SampleRng) -> Result<Array, BoxError> {
        let [channels, height, width] = image_shape(&image)?;
        for (name, [low, high]) in [("scale", self.scale), ("ratio", self.ratio)] {
            if !(0.0 < low && low <= high && high.is_finite()) {
                let text = format!(
                    "`{name}` must be two numbers above 0, the smaller one first, not {low} and {high}"
                );
                return Err(unfit(text).into());
            }
        }
        let region = self.region([height, width], || random::unit(random));
        let pixels = bytes(&image)?;
        let first = region.top as usize * width + region.left as usize;
        let plane = |channel: usize| Plane {
            pixels: &pixels[channel * height * width + first..],
            stride: width,
            height: region.height,
            width: region.width,
        };
        let [out_height, out_width] = self.size;
        let planes: Vec<_> = (0..channels).map(plane).collect();
        let pixels = resize_planes(&planes, self.size, self.filter)?;
        Ok(Array::new([channels, out_height, out_width], pixels)?)
    }
}
