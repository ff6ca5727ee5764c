//! Resizes images, by nearest pixels or by interpolation.

use candle_core::{Result, Shape, Tensor, bail};

use super::dispatch;
use crate::cast;
use crate::cpu::real::Real;
use crate::graph::device;
use crate::graph::operator::{Input, Operator, apply1};

/// PyTorch's `pixel_shuffle`: `[n, c * factor^2, h, w]` to `[n, c, h * factor, w * factor]`.
///
/// # Errors
///
/// An unsupported shape; a factor of 0.
pub fn pixel_shuffle(x: &Tensor, factor: usize) -> Result<Tensor> {
    if factor == 0 {
        bail!("pixel_shuffle: a factor of 0");
    }
    candle_nn::ops::pixel_shuffle(x, factor)
}

/// The inverse of [`pixel_shuffle`].
///
/// # Errors
///
/// An unsupported shape; a factor of 0.
pub fn pixel_unshuffle(x: &Tensor, factor: usize) -> Result<Tensor> {
    if factor == 0 {
        bail!("pixel_unshuffle: a factor of 0");
    }
    candle_nn::ops::pixel_unshuffle(x, factor)
}

/// Resizes `x` to another height and width by nearest pixels: pixel `i` is `floor(i * (in / out))`,
/// PyTorch's `nearest`.
///
/// Shapes: `x` is `[n, c, h, w]`, the result `[n, c, height, width]`, exact. As in PyTorch, the
/// product is computed in `f32`, which may select the pixel before the exact one; this holds for
/// `f64` tensors as well, for which PyTorch computes in `f64` on the CPU.
///
/// # Errors
///
/// An unsupported shape or dtype; a size of 0.
pub fn upsample_nearest2d(x: &Tensor, height: usize, width: usize) -> Result<Tensor> {
    apply("upsample_nearest2d", x, [height, width], Axis::nearest_of)
}

/// Resizes `x` to another height and width by interpolation between the two nearest pixels of each
/// axis.
///
/// Shapes: `x` is `[n, c, h, w]`, the result `[n, c, height, width]`. With `align_corners` the
/// centres of the corner pixels are aligned, else the edges, as in PyTorch. NaN and infinities
/// propagate to the pixels interpolated from them, on a GPU to their whole row and column.
///
/// # Errors
///
/// An unsupported shape or dtype; a size of 0.
pub fn upsample_bilinear2d(
    x: &Tensor,
    height: usize,
    width: usize,
    align_corners: bool,
) -> Result<Tensor> {
    apply("upsample_bilinear2d", x, [height, width], |from, to| {
        Axis::linear_of(from, to, align_corners)
    })
}

fn apply(
    name: &str,
    x: &Tensor,
    [height, width]: [usize; 2],
    axis: impl Fn(usize, usize) -> Axis,
) -> Result<Tensor> {
    let [x] = cast(name, [x])?;
    let (_, _, from_height, from_width) = x.dims4()?;
    if x.elem_count() * height * width == 0 {
        bail!("{name}: nothing in an input of shape {:?} or in {height} x {width}", x.shape());
    }
    let (rows, columns) = (axis(from_height, height), axis(from_width, width));
    if device::dispatches(&x) {
        return dispatch::upsample(&x, [&rows, &columns]);
    }
    apply1(Upsample { rows, columns }, [x])
}

/// The composition of each pixel along one axis: two pixels, and the weight of the second.
#[derive(Debug)]
pub(crate) struct Axis(Vec<(usize, usize, f64)>);

impl Axis {
    fn nearest_of(from: usize, to: usize) -> Self {
        let scale = from as f32 / to as f32;
        let at = |i: usize| ((i as f32 * scale) as usize).min(from - 1);
        Self((0..to).map(|i| (at(i), at(i), 0.0)).collect())
    }

    fn linear_of(from: usize, to: usize, align_corners: bool) -> Self {
        let at = |i: usize| {
            let place = match align_corners {
                true if to == 1 => 0.0,
                true => i as f64 * (from - 1) as f64 / (to - 1) as f64,
                false => ((i as f64 + 0.5) * from as f64 / to as f64 - 0.5).max(0.0),
            };
            let first = (place as usize).min(from - 1);
            let second = (first + 1).min(from - 1);
            (first, second, if second == first { 0.0 } else { place - first as f64 })
        };
        Self((0..to).map(at).collect())
    }

    pub(crate) const fn len(&self) -> usize {
        self.0.len()
    }

    /// The pixels, if each is copied from one.
    pub(crate) fn nearest(&self) -> Option<Vec<u32>> {
        // Images are smaller than `u32::MAX`.
        self.0.iter().map(|(first, _, share)| (*share == 0.0).then_some(*first as u32)).collect()
    }

    /// The weights as a matrix with one row per pixel.
    pub(crate) fn matrix(&self, from: usize) -> Vec<f64> {
        let mut matrix = vec![0.0; self.len() * from];
        for ((first, second, share), row) in self.0.iter().zip(matrix.chunks_exact_mut(from)) {
            row[*first] += 1.0 - share;
            row[*second] += share;
        }
        matrix
    }

    fn shares<T: Real>(&self) -> Vec<(usize, usize, T)> {
        self.0.iter().map(|(first, second, share)| (*first, *second, T::of(*share))).collect()
    }
}

struct Upsample {
    rows: Axis,
    columns: Axis,
}

impl Operator<1> for Upsample {
    const NAME: &'static str = "upsample";

    fn forward<T: Real>(&self, [x]: [Input<'_>; 1]) -> Result<(Vec<T>, Shape)> {
        let (n, c, height, width) = x.shape().dims4()?;
        let (rows, columns) = (self.rows.shares::<T>(), self.columns.shares::<T>());
        let mut y = Vec::with_capacity(n * c * rows.len() * columns.len());
        let mut line = vec![T::ZERO; width];
        for plane in x.values::<T>()?.chunks_exact(height * width) {
            for (first, second, share) in &rows {
                let [first, second] = [first, second].map(|row| &plane[row * width..][..width]);
                for (to, (first, second)) in line.iter_mut().zip(first.iter().zip(second)) {
                    *to = between(*first, *second, *share);
                }
                y.extend(columns.iter().map(|(a, b, share)| between(line[*a], line[*b], *share)));
            }
        }
        Ok((y, (n, c, rows.len(), columns.len()).into()))
    }

    fn backward<T: Real>(
        &self,
        [x]: [Input<'_>; 1],
        _y: Input<'_>,
        dy: Input<'_>,
    ) -> Result<[Option<Vec<T>>; 1]> {
        let (n, c, height, width) = x.shape().dims4()?;
        let (rows, columns) = (self.rows.shares::<T>(), self.columns.shares::<T>());
        let mut dx = vec![T::ZERO; n * c * height * width];
        let mut line = vec![T::ZERO; width];
        let dy = dy.values::<T>()?;
        let planes = dx.chunks_exact_mut(height * width);
        for (dx, dy) in planes.zip(dy.chunks_exact(rows.len() * columns.len())) {
            for ((first, second, share), dy) in rows.iter().zip(dy.chunks_exact(columns.len())) {
                line.fill(T::ZERO);
                for ((a, b, share), dy) in columns.iter().zip(dy) {
                    line[*a] += (T::ONE - *share) * *dy;
                    line[*b] += *share * *dy;
                }
                for (row, share) in [(first, T::ONE - *share), (second, *share)] {
                    let dx = &mut dx[row * width..][..width];
                    dx.iter_mut().zip(&line).for_each(|(dx, v)| *dx += share * *v);
                }
            }
        }
        Ok([Some(dx)])
    }
}

/// With a weight of 0 a neighbour that is not finite has no effect.
#[inline(always)]
fn between<T: Real>(first: T, second: T, share: T) -> T {
    if share == T::ZERO { first } else { first * (T::ONE - share) + second * share }
}
