//! Resizing that equals Pillow's: each filter is widened by the scale (antialiasing), along rows
//! and along columns, with rounding to bytes after each.
//!
//! Follows: Pillow 13.0, `src/libImaging/Resample.c` and, for [`Filter::Nearest`], `Geometry.c`.
//! Equal to it, and so to torchvision's `resize` of a PIL image, bit for bit, for one and three
//! channels; Pillow multiplies those of two and four by the last one, transparency, and here they
//! are resized each alone. torchvision's `resize` of a tensor of bytes uses 16-bit weights and
//! differs by at most 1.

use std::f64::consts::PI;

use super::vectors::{Kernel, vectorized};
use super::{ImageTransform, bytes, checked_len, image_shape, unfit};
use crate::{Array, BoxError, Result, SampleRng};

/// Resizes an image of bytes to `[height, width]`.
///
/// # Errors
///
/// [`Error::Input`](crate::Error::Input) if it is not `[channels, height, width]` of bytes, an
/// extent is 0, an edge is longer than 2^20 pixels before or after, or the result has more than
/// 2^28 values.
pub fn resize(image: &Array, [height, width]: [usize; 2], filter: Filter) -> Result<Array> {
    let [channels, rows, columns] = image_shape(image)?;
    let planes = bytes(image)?.chunks_exact(rows * columns);
    let plane = |pixels| Plane { pixels, stride: columns, height: rows, width: columns };
    let planes: Vec<_> = planes.map(plane).collect();
    let pixels = resize_planes(&planes, [height, width], filter)?;
    Array::new([channels, height, width], pixels)
}

/// Resizes an image of bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Resize {
    /// Size after resizing.
    pub to: ResizeTo,
    /// Interpolation filter.
    pub filter: Filter,
}

/// Size of a resized image.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum ResizeTo {
    /// Height and width, with any aspect ratio.
    Exact([usize; 2]),
    /// Length of the shorter edge; keeps the aspect ratio. torchvision's `Resize` with one number.
    ShortEdge(usize),
    /// Maximum size within this height and width; keeps the aspect ratio. MMCV's `Resize` with
    /// `keep_ratio`.
    Within([usize; 2]),
}

impl ResizeTo {
    /// Returns the new size of an image of `height` and `width`.
    fn of(self, [height, width]: [usize; 2]) -> [usize; 2] {
        match self {
            Self::Exact(size) => size,
            Self::ShortEdge(short) if height <= width => {
                [short, short.saturating_mul(width) / height]
            }
            Self::ShortEdge(short) => [short.saturating_mul(height) / width, short],
            // Refused by `resize`.
            Self::Within([0, _] | [_, 0]) => [0, 0],
            Self::Within([rows, columns]) => {
                let [long, short] = [rows.max(columns), rows.min(columns)];
                let (image_long, image_short) = (height.max(width), height.min(width));
                let scale =
                    (long as f64 / image_long as f64).min(short as f64 / image_short as f64);
                [height, width].map(|extent| ((extent as f64 * scale + 0.5) as usize).max(1))
            }
        }
    }
}

impl Resize {
    /// Resizes the shorter edge to a length; keeps the aspect ratio.
    #[must_use]
    pub const fn short_edge(length: usize) -> Self {
        Self { to: ResizeTo::ShortEdge(length), filter: Filter::Bilinear }
    }

    /// Resizes to height and width, with any aspect ratio.
    #[must_use]
    pub const fn exact(size: [usize; 2]) -> Self {
        Self { to: ResizeTo::Exact(size), filter: Filter::Bilinear }
    }
}

impl ImageTransform for Resize {
    fn image(&self, image: Array, _: &mut SampleRng) -> Result<Array, BoxError> {
        let [_, height, width] = image_shape(&image)?;
        let size = self.to.of([height, width]);
        if size == [height, width] {
            return Ok(image);
        }
        Ok(resize(&image, size, self.filter)?)
    }
}

/// Interpolation filters: PyTorch's `InterpolationMode`, Pillow's `Resampling`.
#[doc(alias = "InterpolationMode")]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub enum Filter {
    /// The nearest pixel: for masks.
    Nearest,
    /// Mean of the pixels that are covered.
    Box,
    /// Linear between pixels, over two of them.
    #[default]
    Bilinear,
    /// Of the same width as `Bilinear`, but sharper.
    Hamming,
    /// Cubic (a = -0.5), over four pixels.
    Bicubic,
    /// Truncated sinc, over six pixels.
    Lanczos,
}

impl Filter {
    /// Half the width of the filter, in pixels of the smaller grid.
    fn support(self) -> f64 {
        match self {
            Self::Nearest | Self::Box => 0.5,
            Self::Bilinear | Self::Hamming => 1.0,
            Self::Bicubic => 2.0,
            Self::Lanczos => 3.0,
        }
    }

    /// Weight of a pixel at distance `x`.
    fn weight(self, x: f64) -> f64 {
        let sinc = |x: f64| if x == 0.0 { 1.0 } else { (x * PI).sin() / (x * PI) };
        let distance = x.abs();
        match self {
            Self::Nearest | Self::Box => f64::from(x > -0.5 && x <= 0.5),
            Self::Bilinear => (1.0 - distance).max(0.0),
            Self::Hamming if distance >= 1.0 => 0.0,
            Self::Hamming => {
                sinc(distance) * (f64::from(0.54_f32) + f64::from(0.46_f32) * (distance * PI).cos())
            }
            Self::Bicubic if distance < 1.0 => {
                ((A + 2.0) * distance - (A + 3.0)) * distance * distance + 1.0
            }
            Self::Bicubic if distance < 2.0 => {
                (((distance - 5.0) * distance + 8.0) * distance - 4.0) * A
            }
            Self::Bicubic => 0.0,
            Self::Lanczos if (-3.0..3.0).contains(&x) => sinc(x) * sinc(x / 3.0),
            Self::Lanczos => 0.0,
        }
    }
}

/// Slope of the cubic filter.
const A: f64 = -0.5;

/// Fractional bits of a weight: 32 minus 8 for the pixel and 2 for overflow.
const PRECISION: u32 = 32 - 8 - 2;

/// Part of a channel: its first pixel, and the distance between rows.
#[derive(Clone, Copy, Debug)]
pub(super) struct Plane<'a> {
    pub(super) pixels: &'a [u8],
    pub(super) stride: usize,
    pub(super) height: usize,
    pub(super) width: usize,
}

impl<'a> Plane<'a> {
    fn row(&self, y: usize) -> &'a [u8] {
        &self.pixels[y * self.stride..][..self.width]
    }
}

/// Length of the longest edge, in pixels.
const LONGEST_EDGE: usize = 1 << 20;

/// Resizes planes of one shape, none of them empty, to `height` and `width`.
pub(super) fn resize_planes(
    planes: &[Plane<'_>],
    [height, width]: [usize; 2],
    filter: Filter,
) -> Result<Vec<u8>> {
    let [rows, columns] = planes.first().map_or([0; 2], |plane| [plane.height, plane.width]);
    let longest = [rows, columns, height, width].into_iter().max();
    let len = match height.min(width) {
        0 => Err(unfit("it must be at least 1 x 1")),
        _ => checked_len(&[planes.len(), height, width]),
    };
    // The weights of a longer edge take gigabytes, and the time for them.
    let len = len.and_then(|len| match longest > Some(LONGEST_EDGE) {
        true => Err(unfit(format!("an edge must not be longer than {LONGEST_EDGE} pixels"))),
        false => Ok(len),
    });
    let len = len.map_err(|why| {
        let text = format!("cannot resize an image from {rows} x {columns} to {height} x {width}");
        unfit(format!("{text}: {why}"))
    })?;
    let mut out = vec![0; len];
    let mut weights = None;
    let mut between = Vec::new();
    for (plane, out) in planes.iter().zip(out.chunks_exact_mut(height * width)) {
        if filter == Filter::Nearest {
            nearest(plane, out, width);
            continue;
        }
        let (columns, rows) = weights.get_or_insert_with(|| {
            let columns = Weights::new(plane.width, width, filter);
            (columns, Weights::new(plane.height, height, filter))
        });
        vectorized(ResizePlane { plane, columns, rows, between: &mut between, out });
    }
    Ok(out)
}

struct ResizePlane<'a> {
    plane: &'a Plane<'a>,
    columns: &'a Weights,
    rows: &'a Weights,
    /// Buffer of the image resized in one direction.
    between: &'a mut Vec<u8>,
    out: &'a mut [u8],
}

impl Kernel for ResizePlane<'_> {
    type Output = ();

    #[inline(always)]
    fn run(self) {
        let Self { plane, columns, rows, between, out } = self;
        let [height, width] = [rows.spans.len(), columns.spans.len()];
        match (plane.width == width, plane.height == height) {
            (true, true) => copy(plane, out),
            (true, false) => resize_rows(plane, rows, out),
            (false, true) => resize_columns(plane, columns, out),
            // Pillow 13 begins with rows if they lose more than twice as much as columns.
            (false, false)
                if height < plane.height && 2 * plane.width + height < 2 * width + plane.height =>
            {
                between.resize(height * plane.width, 0);
                resize_rows(plane, rows, between);
                let between = Plane { pixels: between, stride: plane.width, height, ..*plane };
                resize_columns(&between, columns, out);
            }
            (false, false) => {
                between.resize(plane.height * width, 0);
                resize_columns(plane, columns, between);
                let between = Plane { pixels: between, stride: width, width, ..*plane };
                resize_rows(&between, rows, out);
            }
        }
    }
}

fn copy(plane: &Plane<'_>, out: &mut [u8]) {
    for (y, out) in out.chunks_exact_mut(plane.width).enumerate() {
        out.copy_from_slice(plane.row(y));
    }
}

fn nearest(plane: &Plane<'_>, out: &mut [u8], width: usize) {
    let columns = nearest_pixels(plane.width, width);
    let rows = nearest_pixels(plane.height, out.len() / width);
    for (out, y) in out.chunks_exact_mut(width).zip(rows) {
        let row = plane.row(y);
        out.iter_mut().zip(&columns).for_each(|(out, x)| *out = row[*x]);
    }
}

/// For each of `to` pixels the nearest of `from`; positions are accumulated, as in Pillow.
fn nearest_pixels(from: usize, to: usize) -> Vec<usize> {
    let scale = from as f64 / to as f64;
    let positions = std::iter::successors(Some(scale * 0.5), |position| Some(position + scale));
    positions.take(to).map(|position| (position as usize).min(from - 1)).collect()
}

/// Weighted sums that compute a line of `to` pixels from one of `from`.
struct Weights {
    /// For each output pixel: the first input pixel, and the number of them.
    spans: Vec<(usize, usize)>,
    /// Weights, in units of 2^-`PRECISION`, `most` per output pixel.
    values: Vec<i32>,
    most: usize,
}

impl Weights {
    fn new(from: usize, to: usize, filter: Filter) -> Self {
        let scale = from as f64 / to as f64;
        let filter_scale = scale.max(1.0);
        let support = filter.support() * filter_scale;
        let most = support.ceil() as usize * 2 + 1;
        let mut spans = Vec::with_capacity(to);
        let mut values = vec![0; to * most];
        let mut weights = Vec::with_capacity(most);
        for (pixel, values) in values.chunks_exact_mut(most).enumerate() {
            let center = (pixel as f64 + 0.5) * scale;
            // A cast of a negative number is 0.
            let first = (center - support + 0.5) as usize;
            let end = ((center + support + 0.5) as usize).min(from);
            let distance = |x: usize| (x as f64 - center + 0.5) * (1.0 / filter_scale);
            weights.clear();
            weights.extend((first..end).map(|x| filter.weight(distance(x))));
            let sum: f64 = weights.iter().sum();
            let unit = f64::from(1 << PRECISION);
            for (value, weight) in values.iter_mut().zip(&weights) {
                let weight = if sum == 0.0 { *weight } else { weight / sum };
                *value = (weight * unit + 0.5_f64.copysign(weight)) as i32;
            }
            spans.push((first, weights.len()));
        }
        Self { spans, values, most }
    }

    /// Returns the first input pixel and the weights of each output pixel.
    fn iter(&self) -> impl Iterator<Item = (usize, &[i32])> {
        let spans = self.spans.iter().zip(self.values.chunks_exact(self.most));
        spans.map(|((first, count), weights)| (*first, &weights[..*count]))
    }
}

/// Rounds a weighted sum that began with [`HALF`].
fn clip(sum: i32) -> u8 {
    (sum >> PRECISION).clamp(0, 255) as u8
}

/// Added to a sum so that it rounds to nearest.
const HALF: i32 = 1 << (PRECISION - 1);

/// Resizes each row of `plane` to another length. Sixteen rows are processed together, interleaved,
/// so that sums are vectorized.
#[inline(always)]
fn resize_columns(plane: &Plane<'_>, weights: &Weights, out: &mut [u8]) {
    const ROWS: usize = 16;
    let width = weights.spans.len();
    let mut columns = vec![[0; ROWS]; plane.width];
    let mut made = vec![[0; ROWS]; width];
    for (block, out) in out.chunks_mut(ROWS * width).enumerate() {
        for (r, y) in (block * ROWS..plane.height).take(ROWS).enumerate() {
            let pixels = columns.iter_mut().zip(plane.row(y));
            pixels.for_each(|(column, pixel)| column[r] = *pixel);
        }
        for (made, (first, weights)) in made.iter_mut().zip(weights.iter()) {
            let mut sums = [HALF; ROWS];
            for (column, weight) in columns[first..].iter().zip(weights) {
                let pixels = sums.iter_mut().zip(column);
                pixels.for_each(|(sum, pixel)| *sum += i32::from(*pixel) * weight);
            }
            *made = sums.map(clip);
        }
        for (r, out) in out.chunks_exact_mut(width).enumerate() {
            out.iter_mut().zip(&made).for_each(|(out, made)| *out = made[r]);
        }
    }
}

/// Resizes each column of `plane` to another length.
#[inline(always)]
fn resize_rows(plane: &Plane<'_>, weights: &Weights, out: &mut [u8]) {
    let mut sums = vec![0_i32; plane.width];
    for (out, (first, weights)) in out.chunks_exact_mut(plane.width).zip(weights.iter()) {
        sums.fill(HALF);
        for (y, weight) in (first..).zip(weights) {
            let pixels = sums.iter_mut().zip(plane.row(y));
            pixels.for_each(|(sum, pixel)| *sum += i32::from(*pixel) * weight);
        }
        out.iter_mut().zip(&sums).for_each(|(out, sum)| *out = clip(*sum));
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Draw;
    use crate::transforms::random;

    #[test]
    fn edges_too_long_for_their_weights_are_refused_at_once() {
        let image = |height: usize, width: usize| {
            Array::new([1, height, width], vec![7_u8; height * width]).unwrap()
        };
        let most = 1 << 20;
        for filter in [Filter::Nearest, Filter::Bilinear, Filter::Lanczos] {
            for size in [[1, 1 << 28], [1 << 28, 1], [1, most + 1], [1 << 27, 2]] {
                let error = resize(&image(1, 1), size, filter).unwrap_err().to_string();
                assert!(error.contains("an edge must not be longer than 1048576"), "{error}");
            }
            let error = resize(&image(1, most + 1), [1, 1], filter).unwrap_err().to_string();
            assert!(error.contains("from 1 x 1048577 to 1 x 1: an edge"), "{error}");
        }
        for to in [ResizeTo::Within([0, 5]), ResizeTo::Within([5, 0]), ResizeTo::ShortEdge(0)] {
            let none = Resize { to, filter: Filter::Box };
            let error = none.image(image(3, 4), &mut Draw::from(0).random()).unwrap_err();
            assert!(error.to_string().contains("at least 1 x 1"), "{error}");
        }
        assert_eq!(resize(&image(1, 1), [1, most], Filter::Box).unwrap().shape(), [1, 1, most]);
        assert_eq!(resize(&image(most, 1), [1, 1], Filter::Box).unwrap().shape(), [1, 1, 1]);
    }

    /// The vectors of `transforms.json` say that the bits are right.
    #[test]
    fn vectors_have_the_bits_of_the_plain_loop() {
        let mut random = Draw::from(2).random();
        for _ in 0..60 {
            let [height, width, to_height, to_width] =
                [(); 4].map(|()| 1 + random::below(&mut random, 70));
            let pixels: Vec<_> =
                (0..height * width).map(|_| random::below(&mut random, 256) as u8).collect();
            let plane = Plane { pixels: &pixels, stride: width, height, width };
            let [columns, rows] = [(width, to_width), (height, to_height)]
                .map(|(from, to)| Weights::new(from, to, Filter::Bicubic));
            let mut made = [vec![0; to_height * to_width], vec![1; to_height * to_width]];
            let [a, b] = &mut made;
            let (mut between, mut other) = (Vec::new(), Vec::new());
            let (plane, columns, rows) = (&plane, &columns, &rows);
            ResizePlane { plane, columns, rows, between: &mut between, out: a }.run();
            vectorized(ResizePlane { plane, columns, rows, between: &mut other, out: b });
            assert_eq!(a, b, "{height} x {width} to {to_height} x {to_width}");
        }
    }
}
