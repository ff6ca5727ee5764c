//! Average pooling over windows.

use std::ops::Range;

use candle_core::{Result, Shape, Tensor, bail};

use super::dispatch;
use crate::cast;
use crate::conv::positions;
use crate::cpu::real::Real;
use crate::graph::device;
use crate::graph::operator::{Input, Operator, apply1};
use crate::sizes::Window;

/// The mean of each window, which may overlap. Padding counts as zeros, as by default in PyTorch.
///
/// Shapes: `[n, c, h, w]` to `[n, c, (h + 2 * padding - kernel) / stride + 1, ...]`. NaN and
/// infinities propagate, on a GPU to their whole row and column. candle's own `avg_pool2d` has a
/// wrong gradient if windows do not cover the image, and none if they overlap.
///
/// # Errors
///
/// An unsupported shape or dtype; a padding of more than half the kernel.
pub fn avg_pool2d(x: &Tensor, kernel: usize, window: Window) -> Result<Tensor> {
    let [x] = cast("avg_pool2d", [x])?;
    if window.padding > kernel / 2 {
        bail!("avg_pool2d: {window:?} pads more than half a kernel of {kernel}");
    }
    let axis = |extent: usize| -> Result<Axis> {
        let of = |i: usize| {
            let start = (i * window.stride) as isize - window.padding as isize;
            let inside = |at: isize| at.clamp(0, extent as isize) as usize;
            inside(start)..inside(start + kernel as isize)
        };
        let ranges = (0..positions(extent, kernel, window)?).map(of).collect();
        Ok(Axis { ranges, extent, count: Some(kernel) })
    };
    let (_, _, height, width) = x.dims4()?;
    pool(&x, [axis(height)?, axis(width)?])
}

/// Average pooling to a height and width: pixel `i` of `h` is the mean of those from
/// `floor(i * H / h)` to `ceil((i + 1) * H / h)`, as in PyTorch.
///
/// Shapes: `[n, c, H, W]` to `[n, c, height, width]`. NaN and infinities propagate, on a GPU to
/// their whole row and column.
///
/// # Errors
///
/// An unsupported shape or dtype; a size of 0.
pub fn adaptive_avg_pool2d(x: &Tensor, height: usize, width: usize) -> Result<Tensor> {
    const NAME: &str = "adaptive_avg_pool2d";
    let [x] = cast(NAME, [x])?;
    let [rows, columns] = adaptive_windows(NAME, &x, [height, width])?;
    let (_, _, from_height, from_width) = x.dims4()?;
    let axis = |ranges, extent| Axis { ranges, extent, count: None };
    pool(&x, [axis(rows, from_height), axis(columns, from_width)])
}

/// The rows and the columns of each window of an adaptive pool.
pub(super) fn adaptive_windows(
    name: &str,
    x: &Tensor,
    to: [usize; 2],
) -> Result<[Vec<Range<usize>>; 2]> {
    let (_, _, height, width) = x.dims4()?;
    if [height, width, to[0], to[1]].contains(&0) {
        bail!("{name}: from {height} x {width} to {} x {}", to[0], to[1]);
    }
    let of = |extent: usize, to: usize| {
        (0..to).map(|i| i * extent / to..((i + 1) * extent).div_ceil(to)).collect()
    };
    Ok([of(height, to[0]), of(width, to[1])])
}

fn pool(x: &Tensor, [rows, columns]: [Axis; 2]) -> Result<Tensor> {
    if device::dispatches(x) {
        return dispatch::by_axes(
            x,
            [&rows, &columns].map(|axis| (axis.ranges.len(), axis.matrix())),
        );
    }
    apply1(AvgPool { rows, columns }, [x.clone()])
}

/// The windows along one axis.
struct Axis {
    ranges: Vec<Range<usize>>,
    extent: usize,
    /// The number that a sum is divided by; without it, the length of the window.
    count: Option<usize>,
}

impl Axis {
    fn share<T: Real>(&self, window: &Range<usize>) -> T {
        T::ONE / T::of(self.count.unwrap_or_else(|| window.len()) as f64)
    }

    /// The weights as a matrix with one row per window.
    fn matrix(&self) -> Vec<f64> {
        let row = |window: &Range<usize>| {
            let (share, window) = (self.share::<f64>(window), window.clone());
            (0..self.extent).map(move |at| if window.contains(&at) { share } else { 0.0 })
        };
        self.ranges.iter().flat_map(row).collect()
    }
}

struct AvgPool {
    rows: Axis,
    columns: Axis,
}

impl Operator<1> for AvgPool {
    const NAME: &'static str = "avg_pool2d";

    fn forward<T: Real>(&self, [x]: [Input<'_>; 1]) -> Result<(Vec<T>, Shape)> {
        let (n, c, height, width) = x.shape().dims4()?;
        let Self { rows, columns } = self;
        let mut y = Vec::with_capacity(n * c * rows.ranges.len() * columns.ranges.len());
        let mut line = vec![T::ZERO; width];
        for plane in x.values::<T>()?.chunks_exact(height * width) {
            for window in &rows.ranges {
                let share = rows.share(window);
                line.fill(T::ZERO);
                for row in plane[window.start * width..window.end * width].chunks_exact(width) {
                    line.iter_mut().zip(row).for_each(|(sum, v)| *sum += *v);
                }
                y.extend(columns.ranges.iter().map(|window| {
                    let sum: T = line[window.clone()].iter().copied().sum();
                    sum * columns.share(window) * share
                }));
            }
        }
        Ok((y, (n, c, rows.ranges.len(), columns.ranges.len()).into()))
    }

    fn backward<T: Real>(
        &self,
        [x]: [Input<'_>; 1],
        _y: Input<'_>,
        dy: Input<'_>,
    ) -> Result<[Option<Vec<T>>; 1]> {
        let (n, c, height, width) = x.shape().dims4()?;
        let Self { rows, columns } = self;
        let mut dx = vec![T::ZERO; n * c * height * width];
        let mut line = vec![T::ZERO; width];
        let mut dy = &*dy.values::<T>()?;
        for plane in dx.chunks_exact_mut(height * width) {
            for window in &rows.ranges {
                let share = rows.share::<T>(window);
                line.fill(T::ZERO);
                let (own, rest) = dy.split_at(columns.ranges.len());
                dy = rest;
                for (window, dy) in columns.ranges.iter().zip(own) {
                    let dy = *dy * columns.share(window) * share;
                    line[window.clone()].iter_mut().for_each(|sum| *sum += dy);
                }
                for row in plane[window.start * width..window.end * width].chunks_exact_mut(width) {
                    row.iter_mut().zip(&line).for_each(|(sum, v)| *sum += *v);
                }
            }
        }
        Ok([Some(dx)])
    }
}
