//! Pooling: largest of a window, mean of an image.

use std::sync::OnceLock;

use candle_core::{CpuStorage, CustomOp1, Layout, Result, Shape, Tensor, bail};

use super::conv::{Window, inside, positions};
use super::{cast, host};

/// The largest value of each window, any kernel, stride and padding; so also the overlapping
/// 3 x 3 / stride 2 of ResNet's stem, which stock candle cannot differentiate.
///
/// Shapes: `[n, c, h, w]` to `[n, c, (h + 2 * padding - kernel) / stride + 1, ...]`. `f32`, `f16`
/// or `bf16`; exact. Padding never wins. NaN wins over everything. Backward gives a window's
/// gradient to its largest value, to the first of several, or to the last NaN; it adds up in
/// `f32` and rounds once.
///
/// # Errors
///
/// A shape or dtype that does not fit, a padding of more than half the kernel.
pub fn max_pool2d(x: &Tensor, kernel: usize, window: Window) -> Result<Tensor> {
    if window.padding > kernel / 2 {
        bail!("max_pool2d: {window:?} pads more than half a kernel of {kernel}");
    }
    let [x] = cast("max_pool2d", [x])?;
    x.contiguous()?.apply_op1(MaxPool { kernel, window, taken: OnceLock::new() })
}

/// The mean of each channel of each image: `[n, c, h, w]` to `[n, c]`. `f32`, `f16` or `bf16`,
/// summed in `f32` and rounded once; NaN and infinities propagate.
///
/// # Errors
///
/// A shape or dtype that does not fit.
pub fn global_avg_pool(x: &Tensor) -> Result<Tensor> {
    let [x] = cast("adaptive_avg_pool2d", [x])?;
    x.contiguous()?.apply_op1(GlobalAvgPool)
}

struct MaxPool {
    kernel: usize,
    window: Window,
    /// For each output, the index within its plane of the input it took. Set by forward.
    taken: OnceLock<Vec<u32>>,
}

impl CustomOp1 for MaxPool {
    fn name(&self) -> &'static str {
        "max_pool2d"
    }

    fn cpu_fwd(&self, x: &CpuStorage, layout: &Layout) -> Result<(CpuStorage, Shape)> {
        let (images, channels, height, width) = layout.shape().dims4()?;
        let out_height = positions(height, self.kernel, self.window)?;
        let out_width = positions(width, self.kernel, self.window)?;
        if height * width >= NONE as usize {
            bail!("max_pool2d: an image of {height} x {width} is too large");
        }
        let dtype = host::float_dtype(x)?;
        let x = host::floats(x, layout)?;
        let plane = out_height * out_width;
        let mut y = vec![f32::NEG_INFINITY; images * channels * plane];
        let mut taken = vec![NONE; y.len()];
        let planes = x.chunks_exact(height * width);
        let outputs = y.chunks_exact_mut(plane).zip(taken.chunks_exact_mut(plane));
        for (x, (y, taken)) in planes.zip(outputs) {
            self.plane(x, (height, width), y, taken, (out_height, out_width));
        }
        let _ = self.taken.set(taken);
        Ok((host::rounded(y, dtype)?, (images, channels, out_height, out_width).into()))
    }

    fn bwd(&self, x: &Tensor, y: &Tensor, dy: &Tensor) -> Result<Option<Tensor>> {
        let (_, _, height, width) = x.dims4()?;
        let (_, _, out_height, out_width) = y.dims4()?;
        let dy = dy.contiguous()?;
        let (storage, layout) = dy.storage_and_layout();
        let dy = host::floats_of(&storage, layout)?;
        let taken = self.taken.get().expect("forward came first");
        let mut dx = vec![0.0; x.elem_count()];
        let plane = out_height * out_width;
        let sources = dy.chunks_exact(plane).zip(taken.chunks_exact(plane));
        for (dx, (dy, taken)) in dx.chunks_exact_mut(height * width).zip(sources) {
            dy.iter().zip(taken).for_each(|(dy, at)| dx[*at as usize] += dy);
        }
        host::tensor(dx, x.shape(), x.dtype()).map(Some)
    }
}

impl MaxPool {
    /// Pools one plane, tap by tap, so that the inner loop runs along a line.
    fn plane(
        &self,
        x: &[f32],
        (height, width): (usize, usize),
        y: &mut [f32],
        taken: &mut [u32],
        (out_height, out_width): (usize, usize),
    ) {
        let stride = self.window.stride;
        for tap_y in 0..self.kernel {
            let (ys, y0) = inside(tap_y, height, out_height, self.window);
            for tap_x in 0..self.kernel {
                let (xs, x0) = inside(tap_x, width, out_width, self.window);
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

struct GlobalAvgPool;

impl CustomOp1 for GlobalAvgPool {
    fn name(&self) -> &'static str {
        "global_avg_pool"
    }

    fn cpu_fwd(&self, x: &CpuStorage, layout: &Layout) -> Result<(CpuStorage, Shape)> {
        let (images, channels, height, width) = layout.shape().dims4()?;
        let pixels = height * width;
        if pixels == 0 {
            bail!("global_avg_pool: an image of {height} x {width} has no mean");
        }
        let dtype = host::float_dtype(x)?;
        let x = host::floats(x, layout)?;
        let y = x.chunks_exact(pixels).map(|plane| super::sum(plane) / pixels as f32).collect();
        Ok((host::rounded(y, dtype)?, (images, channels).into()))
    }

    fn bwd(&self, x: &Tensor, _y: &Tensor, dy: &Tensor) -> Result<Option<Tensor>> {
        let (_, _, height, width) = x.dims4()?;
        let pixels = height * width;
        let dy = dy.contiguous()?;
        let (storage, layout) = dy.storage_and_layout();
        let mut dx = Vec::with_capacity(x.elem_count());
        for dy in &*host::floats_of(&storage, layout)? {
            dx.resize(dx.len() + pixels, dy / pixels as f32);
        }
        host::tensor(dx, x.shape(), x.dtype()).map(Some)
    }
}

/// An output that has taken nothing yet: no index, since a plane has fewer elements.
const NONE: u32 = u32::MAX;
