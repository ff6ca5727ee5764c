//! Two-dimensional convolution by im2col and a matrix product, with its backward pass.
//!
//! Several images are unrolled into columns at once, with one row per weight and one column per
//! output pixel, so that one product covers them: late layers have few pixels, and a product per
//! image would spend its time on packing the same weights. The backward pass unrolls again instead
//! of keeping the columns, which have nine times the size of the input for a 3 x 3 kernel. For 3 x
//! 3 kernels with stride 1 and enough channels, Winograd's algorithm (`winograd.rs`) is faster.

pub(crate) mod conv3d;
mod dispatch;
pub(crate) mod grouped;
pub(crate) mod transpose;
mod winograd;

use std::ops::Range;

use candle_core::{Result, Shape, Tensor, bail};

use self::winograd::Winograd;
use crate::cpu::gemm::{Mat, gemm};
use crate::cpu::real::Real;
use crate::cpu::sums::sum;
use crate::linear::weighted::{self, Gradients, Kernel};
use crate::sizes::{Geometry, Grouped, Window};
use crate::state::autotune;

/// Options of [`conv2d`] and [`conv1d`](crate::conv1d). A [`Window`] converts to options without
/// dilation and with one group.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ConvOptions {
    /// Distance between neighbouring windows, at least 1. Defaults to 1.
    pub stride: usize,
    /// Zeros added on each side. Defaults to 0.
    pub padding: usize,
    /// Distance between neighbouring taps of a window, at least 1. Defaults to 1.
    pub dilation: usize,
    /// Number of groups of input and output channels; each output channel depends on the input
    /// channels of its group. A depthwise convolution has as many groups as channels. Defaults to
    /// 1.
    pub groups: usize,
}

impl Default for ConvOptions {
    fn default() -> Self {
        Window::default().into()
    }
}

impl From<Window> for ConvOptions {
    fn from(Window { stride, padding }: Window) -> Self {
        Self { stride, padding, dilation: 1, groups: 1 }
    }
}

/// Convolution as in deep learning: cross-correlation of images with kernels, plus a bias per
/// output channel.
///
/// Shapes: `x` is `[n, c, h, w]`, `weight` `[o, c / groups, kh, kw]`, `bias` `[o]`, the result
/// `[n, o, (h + 2 * padding - dilation * (kh - 1) - 1) / stride + 1, ...]`; all arguments have the
/// same dtype. Padding is with zeros. NaN and infinities propagate to every output whose window
/// covers them, and, for 3 x 3 kernels, possibly to the neighbouring output. Single-threaded.
///
/// The backward pass computes all three gradients; that of `x` only if it is needed.
///
/// On a GPU the result may be channels-last: the shape is the same, but it is not contiguous.
/// candle's `index_select`, `gather`, `scatter` and `index_add`, and candle-nn's fused operators,
/// need `contiguous()` before them.
///
/// # Errors
///
/// Mismatched shapes or dtypes; a stride or dilation of 0; a kernel larger than the padded image;
/// no channels; groups that do not divide the channels.
pub fn conv2d(
    x: &Tensor,
    weight: &Tensor,
    bias: Option<&Tensor>,
    options: impl Into<ConvOptions>,
) -> Result<Tensor> {
    let options = options.into();
    if options.groups == 1 {
        weighted::apply::<Geometry>(x, weight, bias, options)
    } else {
        weighted::apply::<Grouped>(x, weight, bias, options)
    }
}

impl Kernel for Geometry {
    /// Sizes of one group.
    type Options = ConvOptions;
    const NAME: &'static str = "conv2d";

    fn new(x: &Shape, weight: &Shape, options: ConvOptions) -> Result<Self> {
        let ConvOptions { stride, padding, dilation, .. } = options;
        let window = Window { stride, padding };
        let (images, channels, height, width) = x.dims4()?;
        let (out_channels, weight_channels, kernel_height, kernel_width) = weight.dims4()?;
        if channels * out_channels == 0 {
            bail!("conv2d: an input of shape {x:?} or a weight {weight:?} has no channels");
        }
        if channels != weight_channels {
            bail!(
                "conv2d: an input of shape {x:?} does not have the channels of a weight {weight:?}"
            );
        }
        Ok(Self {
            images,
            channels,
            height,
            width,
            out_channels,
            kernel_height,
            kernel_width,
            out_height: positions(height, spread(kernel_height, dilation)?, window)?,
            out_width: positions(width, spread(kernel_width, dilation)?, window)?,
            window,
            dilation,
        })
    }

    fn outputs(&self) -> usize {
        self.out_channels
    }

    fn output_shape(&self, _x: &Shape) -> Shape {
        (self.images, self.out_channels, self.out_height, self.out_width).into()
    }

    fn forward<T: Real>(&self, x: &[T], weight: &[T], bias: Option<&[T]>) -> Vec<T> {
        let by = |algorithm: usize| match ALGORITHMS[algorithm] {
            Algorithm::Columns(columns) => self.forward_by(columns, x, weight, bias),
            Algorithm::Winograd(tiles) => self.winograd(tiles).forward(x, weight, bias),
        };
        let key = || self.key("forward");
        autotune::run(key, self.default_algorithm(), || self.algorithms(), by)
    }

    fn on_device(&self, x: &Tensor, weight: &Tensor, bias: Option<&Tensor>) -> Result<Tensor> {
        dispatch::conv2d(x, weight, bias, *self)
    }

    fn backward<T: Real>(&self, x: &[T], weight: &[T], dy: &[T], wants_x: bool) -> Gradients<T> {
        let by = |algorithm: usize| match ALGORITHMS[algorithm] {
            Algorithm::Columns(columns) => self.backward_by(columns, x, weight, dy, wants_x),
            Algorithm::Winograd(tiles) => self.winograd(tiles).backward(x, weight, dy, wants_x),
        };
        let key = || self.key(&format!("backward {wants_x}"));
        autotune::run(key, self.default_algorithm(), || self.algorithms(), by)
    }
}

impl Geometry {
    /// Key of a call in an autotune cache. A dilation of 1 is omitted.
    fn key(&self, direction: &str) -> String {
        format!("{direction} {self:?}").replace(", dilation: 1 }", " }")
    }

    /// The gradient of the input, given that of the result.
    pub(crate) fn input_gradient<T: Real>(&self, weight: &[T], dy: &[T]) -> Vec<T> {
        let (pixels, depth, group) = (self.pixels(), self.depth(), self.group(COLUMNS));
        let mut dx = vec![T::ZERO; self.images * self.image()];
        let mut columns = vec![T::ZERO; depth * group * pixels];
        let mut rows = vec![T::ZERO; self.out_channels * group * pixels];
        let weight = Mat::new(weight, self.out_channels, depth);
        let all = dx.chunks_mut(group * self.image());
        for (dx, dy) in all.zip(dy.chunks(group * self.out_channels * pixels)) {
            let count = dx.len() / self.image();
            let width = count * pixels;
            let columns = &mut columns[..depth * width];
            let rows = &mut rows[..self.out_channels * width];
            to_rows(dy, rows, count, self.out_channels, pixels);
            gemm(columns, false, weight.t(), Mat::new(rows, self.out_channels, width));
            for (i, dx) in dx.chunks_exact_mut(self.image()).enumerate() {
                col2im(self, columns, width, i * pixels, dx);
            }
        }
        dx
    }

    /// The result, by groups of about `columns` columns.
    fn forward_by<T: Real>(
        &self,
        columns: usize,
        x: &[T],
        weight: &[T],
        bias: Option<&[T]>,
    ) -> Vec<T> {
        let (pixels, depth, group) = (self.pixels(), self.depth(), self.group(columns));
        let mut y = Vec::with_capacity(self.images * self.out_channels * pixels);
        let mut columns = vec![T::ZERO; depth * group * pixels];
        let mut product = vec![T::ZERO; self.out_channels * group * pixels];
        let weight = Mat::new(weight, self.out_channels, depth);
        for x in x.chunks(group * self.image()) {
            let count = x.len() / self.image();
            let width = count * pixels;
            let columns = &mut columns[..depth * width];
            for (i, image) in x.chunks_exact(self.image()).enumerate() {
                im2col(self, image, columns, width, i * pixels);
            }
            let product = &mut product[..self.out_channels * width];
            if let Some(bias) = bias {
                product.chunks_exact_mut(width).zip(bias).for_each(|(row, b)| row.fill(*b));
            }
            gemm(product, bias.is_some(), weight, Mat::new(columns, depth, width));
            from_rows(product, &mut y, count, self.out_channels, pixels);
        }
        y
    }

    /// The gradients, by groups of about `columns` columns.
    fn backward_by<T: Real>(
        &self,
        columns: usize,
        x: &[T],
        weight: &[T],
        dy: &[T],
        wants_x: bool,
    ) -> Gradients<T> {
        let (pixels, depth, group) = (self.pixels(), self.depth(), self.group(columns));
        let mut dw = vec![T::ZERO; weight.len()];
        let mut db = vec![T::ZERO; self.out_channels];
        let mut dx = wants_x.then(|| vec![T::ZERO; x.len()]);
        let mut columns = vec![T::ZERO; depth * group * pixels];
        let mut rows = vec![T::ZERO; self.out_channels * group * pixels];
        let weight = Mat::new(weight, self.out_channels, depth);
        let image = self.image();
        for (first, dy) in (0..).step_by(group).zip(dy.chunks(group * self.out_channels * pixels)) {
            let count = dy.len() / (self.out_channels * pixels);
            let width = count * pixels;
            let columns = &mut columns[..depth * width];
            let x = &x[first * image..(first + count) * image];
            for (i, image) in x.chunks_exact(image).enumerate() {
                im2col(self, image, columns, width, i * pixels);
            }
            let rows = &mut rows[..self.out_channels * width];
            to_rows(dy, rows, count, self.out_channels, pixels);
            for (db, row) in db.iter_mut().zip(rows.chunks_exact(width)) {
                *db += sum(row);
            }
            let dy = Mat::new(rows, self.out_channels, width);
            gemm(&mut dw, true, dy, Mat::new(columns, depth, width).t());
            if let Some(dx) = &mut dx {
                gemm(columns, false, weight.t(), dy);
                let dx = &mut dx[first * image..(first + count) * image];
                for (i, dx) in dx.chunks_exact_mut(image).enumerate() {
                    col2im(self, columns, width, i * pixels, dx);
                }
            }
        }
        Gradients { x: dx, weight: dw, bias: db }
    }

    /// Number of images unrolled at once.
    fn group(&self, columns: usize) -> usize {
        (columns / self.pixels()).clamp(1, self.images.max(1))
    }

    /// The same convolution by Winograd's algorithm, by groups of about `tiles` tiles.
    fn winograd(&self, tiles: usize) -> Winograd {
        let of_image = self.out_height.div_ceil(2) * self.out_width.div_ceil(2);
        Winograd {
            channels: self.channels,
            height: self.height,
            width: self.width,
            out_channels: self.out_channels,
            out_height: self.out_height,
            out_width: self.out_width,
            padding: self.window.padding,
            group: (tiles / of_image).clamp(1, self.images.max(1)),
        }
    }

    fn can_tile(&self) -> bool {
        (self.kernel_height, self.kernel_width) == (3, 3)
            && (self.window.stride, self.dilation) == (1, 1)
    }

    /// The algorithm used without autotuning.
    fn default_algorithm(&self) -> usize {
        let wide = self.channels.min(self.out_channels) >= WINOGRAD_CHANNELS;
        if self.can_tile() && wide { BY_TILES } else { BY_COLUMNS }
    }

    /// The algorithms that differ for these sizes, as indices into [`ALGORITHMS`].
    fn algorithms(&self) -> Vec<usize> {
        let mut indices: Vec<usize> = (0..ALGORITHMS.len()).collect();
        indices.retain(|i| self.can_tile() || matches!(ALGORITHMS[*i], Algorithm::Columns(_)));
        indices.dedup_by_key(|i| match ALGORITHMS[*i] {
            Algorithm::Columns(columns) => (false, self.group(columns)),
            Algorithm::Winograd(tiles) => (true, self.winograd(tiles).group),
        });
        indices
    }
}

/// An algorithm, with the size of a group of images.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Algorithm {
    /// im2col and a matrix product with about this many columns.
    Columns(usize),
    /// Winograd's F(2 x 2, 3 x 3) with about this many tiles.
    Winograd(usize),
}

/// All algorithms, in the numbering of autotune caches. Groups of a few hundred columns are large
/// enough to hide the packing of the weights, and small enough that the columns of a 3 x 3 kernel
/// over 16 channels stay in the L2 cache.
pub(crate) const ALGORITHMS: [Algorithm; autotune::ALGORITHMS] = [
    Algorithm::Columns(64),
    Algorithm::Columns(128),
    Algorithm::Columns(256),
    Algorithm::Columns(512),
    Algorithm::Columns(1024),
    Algorithm::Columns(2048),
    Algorithm::Columns(4096),
    Algorithm::Winograd(64),
    Algorithm::Winograd(256),
    Algorithm::Winograd(512),
    Algorithm::Winograd(1024),
];
const BY_COLUMNS: usize = 3;
/// Number of columns in a group if there is only one algorithm.
const COLUMNS: usize = 512;
const BY_TILES: usize = 8;

/// Minimum number of channels on both sides for which tiles are faster.
const WINOGRAD_CHANNELS: usize = 16;

/// Size of a kernel whose taps are `dilation` apart.
pub(crate) fn spread(kernel: usize, dilation: usize) -> Result<usize> {
    match kernel {
        _ if dilation == 0 => bail!("conv2d: a dilation of 0"),
        0 => Ok(0),
        _ => match (kernel - 1).checked_mul(dilation).and_then(|size| size.checked_add(1)) {
            Some(size) => Ok(size),
            None => bail!("conv2d: a kernel of {kernel} with a dilation of {dilation} overflows"),
        },
    }
}

/// Number of window positions along an axis.
pub(crate) fn positions(extent: usize, kernel: usize, window: Window) -> Result<usize> {
    let padded = window.padding.checked_mul(2).and_then(|both| both.checked_add(extent));
    let rest = padded.and_then(|padded| padded.checked_sub(kernel));
    match rest {
        Some(rest) if window.stride != 0 && kernel != 0 && extent != 0 => {
            Ok(rest / window.stride + 1)
        }
        _ => bail!("a window of {kernel} with {window:?} does not fit an extent of {extent}"),
    }
}

/// The range of output positions for which tap `tap` of a window is inside the image, along one
/// axis, and the input position of the first.
pub(crate) fn inside(
    tap: usize,
    extent: usize,
    positions: usize,
    window: Window,
) -> (Range<usize>, usize) {
    let Window { stride, padding } = window;
    let first = padding.saturating_sub(tap).div_ceil(stride);
    let last = (extent + padding).saturating_sub(tap).div_ceil(stride).min(positions);
    if first >= last { (0..0, 0) } else { (first..last, first * stride + tap - padding) }
}

/// Unrolls one image into columns `at..at + pixels` of `columns`, whose rows have `width` elements.
fn im2col<T: Real>(g: &Geometry, image: &[T], columns: &mut [T], width: usize, at: usize) {
    let mut rows = columns.chunks_exact_mut(width);
    for plane in image.chunks_exact(g.height * g.width) {
        for tap_y in 0..g.kernel_height {
            let (ys, y0) = inside(tap_y * g.dilation, g.height, g.out_height, g.window);
            for tap_x in 0..g.kernel_width {
                let (xs, x0) = inside(tap_x * g.dilation, g.width, g.out_width, g.window);
                let row = rows.next().expect("one row per weight");
                let row = &mut row[at..at + g.pixels()];
                row[..ys.start * g.out_width].fill(T::ZERO);
                row[ys.end * g.out_width..].fill(T::ZERO);
                let lines =
                    row[ys.start * g.out_width..ys.end * g.out_width].chunks_exact_mut(g.out_width);
                let sources = plane[y0 * g.width..].chunks(g.width).step_by(g.window.stride);
                for (line, source) in lines.zip(sources) {
                    line[..xs.start].fill(T::ZERO);
                    line[xs.end..].fill(T::ZERO);
                    let line = &mut line[xs.clone()];
                    let source = &source[x0..];
                    if g.window.stride == 1 {
                        line.copy_from_slice(&source[..line.len()]);
                    } else {
                        let source = source.iter().step_by(g.window.stride);
                        line.iter_mut().zip(source).for_each(|(d, s)| *d = *s);
                    }
                }
            }
        }
    }
}

/// Adds columns `at..at + pixels` to the positions from which [`im2col`] took them.
fn col2im<T: Real>(g: &Geometry, columns: &[T], width: usize, at: usize, image: &mut [T]) {
    let mut rows = columns.chunks_exact(width);
    for plane in image.chunks_exact_mut(g.height * g.width) {
        for tap_y in 0..g.kernel_height {
            let (ys, y0) = inside(tap_y * g.dilation, g.height, g.out_height, g.window);
            for tap_x in 0..g.kernel_width {
                let (xs, x0) = inside(tap_x * g.dilation, g.width, g.out_width, g.window);
                let row = rows.next().expect("one row per weight");
                let row = &row[at..at + g.pixels()];
                let lines =
                    row[ys.start * g.out_width..ys.end * g.out_width].chunks_exact(g.out_width);
                let targets = plane[y0 * g.width..].chunks_mut(g.width).step_by(g.window.stride);
                for (line, target) in lines.zip(targets) {
                    let line = &line[xs.clone()];
                    let target = &mut target[x0..];
                    if g.window.stride == 1 {
                        target.iter_mut().zip(line).for_each(|(d, s)| *d += *s);
                    } else {
                        let target = target.iter_mut().step_by(g.window.stride);
                        target.zip(line).for_each(|(d, s)| *d += *s);
                    }
                }
            }
        }
    }
}

/// Transposes `[image][channel][pixel]` to `[channel][image][pixel]`.
fn to_rows<T: Real>(images: &[T], rows: &mut [T], count: usize, channels: usize, pixels: usize) {
    for (i, image) in images.chunks_exact(channels * pixels).enumerate() {
        for (c, plane) in image.chunks_exact(pixels).enumerate() {
            rows[(c * count + i) * pixels..][..pixels].copy_from_slice(plane);
        }
    }
}

/// Transposes `[channel][image][pixel]` to `[image][channel][pixel]`, appended.
fn from_rows<T: Real>(
    rows: &[T],
    images: &mut Vec<T>,
    count: usize,
    channels: usize,
    pixels: usize,
) {
    for image in 0..count {
        for channel in 0..channels {
            images.extend_from_slice(&rows[(channel * count + image) * pixels..][..pixels]);
        }
    }
}

/// Forward pass and all gradients by every algorithm, each with the result of im2col on single
/// images.
#[cfg(test)]
pub(crate) fn by_every_algorithm(
    x: &Tensor,
    weight: &Tensor,
    bias: Option<&[f32]>,
    window: Window,
) -> Vec<(Vec<f32>, Vec<f32>)> {
    use crate::tests::{flat, values};
    let g = Geometry::new(x.shape(), weight.shape(), window.into()).unwrap();
    let dy = flat(&values("dy", g.output_shape(x.shape()).dims()));
    let (x, weight) = (flat(x), flat(weight));
    let first = g.backward_by(1, &x, &weight, &dy, true);
    let y = g.forward_by(1, &x, &weight, bias);
    let mut pairs = Vec::new();
    for algorithm in g.algorithms() {
        let (got, after) = match ALGORITHMS[algorithm] {
            Algorithm::Columns(by) => {
                (g.forward_by(by, &x, &weight, bias), g.backward_by(by, &x, &weight, &dy, true))
            }
            Algorithm::Winograd(by) => {
                let by = g.winograd(by);
                let only_weight = by.backward(&x, &weight, &dy, false);
                assert!(only_weight.x.is_none());
                pairs.push((only_weight.weight, first.weight.clone()));
                (by.forward(&x, &weight, bias), by.backward(&x, &weight, &dy, true))
            }
        };
        pairs.push((got, y.clone()));
        pairs.push((after.x.unwrap(), first.x.clone().unwrap()));
        pairs.push((after.weight, first.weight.clone()));
        pairs.push((after.bias, first.bias.clone()));
    }
    pairs
}
