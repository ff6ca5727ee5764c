//! Max pooling over windows, average pooling over images.

use std::ops::Range;
use std::sync::OnceLock;

use candle_core::{Result, Shape, Tensor, bail};

use super::avg_pool::adaptive_windows;
use super::dispatch;
use crate::cast;
use crate::conv::{inside, positions};
use crate::cpu::real::Real;
use crate::cpu::sums::sum;
use crate::graph::device;
use crate::graph::operator::{Input, Operator, apply1};
use crate::sizes::{Window, Windows};

/// Max pooling with any kernel, stride and padding, including the overlapping 3 x 3 / stride 2 of
/// ResNet's stem, which stock candle cannot differentiate.
///
/// Shapes: `[n, c, h, w]` to `[n, c, (h + 2 * padding - kernel) / stride + 1, ...]`. Exact. Padding
/// is never the maximum. NaN takes precedence over all values. The backward pass assigns the
/// gradient of a window to its largest value, to the first if there are several, or to the last
/// NaN.
///
/// # Errors
///
/// An unsupported shape or dtype; a padding of more than half the kernel.
pub fn max_pool2d(x: &Tensor, kernel: usize, window: Window) -> Result<Tensor> {
    let [x] = cast("max_pool2d", [x])?;
    let extents = Windows::new(x.shape(), kernel, window)?;
    if device::dispatches(&x) {
        return dispatch::max_pool2d(&x, extents);
    }
    apply1(MaxPool { extents, taken: OnceLock::new() }, [x])
}

impl Windows {
    fn new(x: &Shape, kernel: usize, window: Window) -> Result<Self> {
        if window.padding > kernel / 2 {
            bail!("max_pool2d: {window:?} pads more than half a kernel of {kernel}");
        }
        let (images, channels, height, width) = x.dims4()?;
        check_plane("max_pool2d", height, width)?;
        let (out_height, out_width) =
            (positions(height, kernel, window)?, positions(width, kernel, window)?);
        Ok(Self { images, channels, height, width, out_height, out_width, kernel, window })
    }
}

/// A selected pixel is an index in its plane, below [`NONE`].
fn check_plane(name: &str, height: usize, width: usize) -> Result<()> {
    if height.checked_mul(width).is_none_or(|pixels| pixels >= NONE as usize) {
        bail!("{name}: an image of {height} x {width} is too large");
    }
    Ok(())
}

/// Max pooling to a height and width, with the windows of
/// [`adaptive_avg_pool2d`](crate::adaptive_avg_pool2d), which may overlap. Follows:
/// `torch.nn.functional.adaptive_max_pool2d`.
///
/// Shapes: `[n, c, H, W]` to `[n, c, height, width]`. Exact. NaN takes precedence over all values.
/// The backward pass assigns gradients as that of [`max_pool2d`].
///
/// # Errors
///
/// An unsupported shape or dtype; a size of 0.
pub fn adaptive_max_pool2d(x: &Tensor, height: usize, width: usize) -> Result<Tensor> {
    const NAME: &str = "adaptive_max_pool2d";
    let [x] = cast(NAME, [x])?;
    let windows = adaptive_windows(NAME, &x, [height, width])?;
    let (_, _, from_height, from_width) = x.dims4()?;
    check_plane(NAME, from_height, from_width)?;
    if device::dispatches(&x) {
        return dispatch::adaptive_max_pool2d(&x, &windows);
    }
    let [rows, columns] = windows;
    apply1(AdaptiveMaxPool { rows, columns, taken: OnceLock::new() }, [x])
}

/// The mean of each channel of each image: `[n, c, h, w]` to `[n, c]`. NaN and infinities
/// propagate.
///
/// # Errors
///
/// An unsupported shape or dtype.
pub fn global_avg_pool(x: &Tensor) -> Result<Tensor> {
    let [x] = cast("adaptive_avg_pool2d", [x])?;
    let (_, _, height, width) = x.dims4()?;
    if height * width == 0 {
        bail!("global_avg_pool: an image of {height} x {width} has no mean");
    }
    if device::dispatches(&x) { dispatch::global_avg_pool(&x) } else { apply1(GlobalAvgPool, [x]) }
}

struct MaxPool {
    extents: Windows,
    /// For each output, the index in its plane of the selected input. Set by the forward pass.
    taken: OnceLock<Vec<u32>>,
}

impl Operator<1> for MaxPool {
    const NAME: &'static str = "max_pool2d";

    fn forward<T: Real>(&self, [x]: [Input<'_>; 1]) -> Result<(Vec<T>, Shape)> {
        let Windows { images, channels, height, width, .. } = self.extents;
        let x = x.values::<T>()?;
        let plane = self.extents.out_height * self.extents.out_width;
        let mut y = vec![T::NEG_INFINITY; images * channels * plane];
        let mut taken = vec![NONE; y.len()];
        let planes = x.chunks_exact(height * width);
        let outputs = y.chunks_exact_mut(plane).zip(taken.chunks_exact_mut(plane));
        for (x, (y, taken)) in planes.zip(outputs) {
            self.plane(x, y, taken);
        }
        let _ = self.taken.set(taken);
        Ok((y, self.extents.output_shape()))
    }

    fn backward<T: Real>(
        &self,
        [x]: [Input<'_>; 1],
        _y: Input<'_>,
        dy: Input<'_>,
    ) -> Result<[Option<Vec<T>>; 1]> {
        Ok([Some(to_taken(x.shape(), &self.taken, dy)?)])
    }
}

/// The gradient of a pool: those of the outputs, at the inputs that were selected.
fn to_taken<T: Real>(x: &Shape, taken: &OnceLock<Vec<u32>>, dy: Input<'_>) -> Result<Vec<T>> {
    let ((_, _, height, width), (_, _, out_height, out_width)) = (x.dims4()?, dy.shape().dims4()?);
    let dy = dy.values::<T>()?;
    let taken = taken.get().expect("forward came first");
    let mut dx = vec![T::ZERO; x.elem_count()];
    let plane = out_height * out_width;
    let sources = dy.chunks_exact(plane).zip(taken.chunks_exact(plane));
    for (dx, (dy, taken)) in dx.chunks_exact_mut(height * width).zip(sources) {
        dy.iter().zip(taken).for_each(|(dy, at)| dx[*at as usize] += *dy);
    }
    Ok(dx)
}

impl MaxPool {
    /// Pools one plane, tap by tap, so that the inner loop runs along a line.
    fn plane<T: Real>(&self, x: &[T], y: &mut [T], taken: &mut [u32]) {
        let Windows { height, width, out_height, out_width, kernel, window, .. } = self.extents;
        let stride = window.stride;
        for tap_y in 0..kernel {
            let (ys, y0) = inside(tap_y, height, out_height, window);
            for tap_x in 0..kernel {
                let (xs, x0) = inside(tap_x, width, out_width, window);
                for (line, out_y) in ys.clone().enumerate() {
                    let from = (y0 + line * stride) * width + x0;
                    let to = out_y * out_width;
                    let best = &mut y[to + xs.start..to + xs.end];
                    let taken = &mut taken[to + xs.start..to + xs.end];
                    let candidates = (from..).step_by(stride);
                    for ((best, taken), at) in best.iter_mut().zip(taken).zip(candidates) {
                        if x[at] > *best || x[at].is_nan() || *taken == NONE {
                            *best = x[at];
                            *taken = at as u32;
                        }
                    }
                }
            }
        }
    }
}

struct AdaptiveMaxPool {
    rows: Vec<Range<usize>>,
    columns: Vec<Range<usize>>,
    /// As in [`MaxPool`].
    taken: OnceLock<Vec<u32>>,
}

impl Operator<1> for AdaptiveMaxPool {
    const NAME: &'static str = "adaptive_max_pool2d";

    fn forward<T: Real>(&self, [x]: [Input<'_>; 1]) -> Result<(Vec<T>, Shape)> {
        let (images, channels, height, width) = x.shape().dims4()?;
        let Self { rows, columns, .. } = self;
        let count = images * channels * rows.len() * columns.len();
        let (mut y, mut taken) = (Vec::with_capacity(count), Vec::with_capacity(count));
        for plane in x.values::<T>()?.chunks_exact(height * width) {
            for (rows, columns) in rows.iter().flat_map(|row| columns.iter().map(move |c| (row, c)))
            {
                let mut best = rows.start * width + columns.start;
                for row in rows.clone() {
                    for at in row * width + columns.start..row * width + columns.end {
                        if plane[at] > plane[best] || plane[at].is_nan() {
                            best = at;
                        }
                    }
                }
                y.push(plane[best]);
                taken.push(best as u32);
            }
        }
        let _ = self.taken.set(taken);
        Ok((y, (images, channels, rows.len(), columns.len()).into()))
    }

    fn backward<T: Real>(
        &self,
        [x]: [Input<'_>; 1],
        _y: Input<'_>,
        dy: Input<'_>,
    ) -> Result<[Option<Vec<T>>; 1]> {
        Ok([Some(to_taken(x.shape(), &self.taken, dy)?)])
    }
}

struct GlobalAvgPool;

impl Operator<1> for GlobalAvgPool {
    const NAME: &'static str = "global_avg_pool";

    fn forward<T: Real>(&self, [x]: [Input<'_>; 1]) -> Result<(Vec<T>, Shape)> {
        let (images, channels, height, width) = x.shape().dims4()?;
        let pixels = height * width;
        let count = T::of(pixels as f64);
        let planes = x.values::<T>()?;
        let y = planes.chunks_exact(pixels).map(|plane| sum(plane) / count).collect();
        Ok((y, (images, channels).into()))
    }

    fn backward<T: Real>(
        &self,
        [x]: [Input<'_>; 1],
        _y: Input<'_>,
        dy: Input<'_>,
    ) -> Result<[Option<Vec<T>>; 1]> {
        let (_, _, height, width) = x.shape().dims4()?;
        let pixels = height * width;
        let count = T::of(pixels as f64);
        let mut dx = Vec::with_capacity(x.shape().elem_count());
        for dy in &*dy.values::<T>()? {
            dx.resize(dx.len() + pixels, *dy / count);
        }
        Ok([Some(dx)])
    }
}

/// An output without a selected input yet: not a valid index, since a plane has fewer elements.
const NONE: u32 = u32::MAX;
