//! Convolution by cuDNN, or by im2col and a matrix product, for a group of images at a time.

use std::sync::Arc;

use candle_core::{DType, Result, Tensor, bail};

use super::channels_last::Order;
use super::cudnn::{Convolution, Pass, Plan};
use super::jobs::{BiasJob, ColumnsJob, u32_of};
use super::matmul::{Matrices, ONE};
use super::node::node_of;
use super::norm::sums_of_channels;
use super::{Kernel, Kernels, Output, blocks_of_warps, chunks_of, one_type};
use crate::graph::custom_op::{apply2, apply3};
use crate::sizes::{Geometry, Grouped};

/// `None` if there is neither cuDNN nor a kernel for it.
pub(super) fn conv2d(
    kernels: &Arc<Kernels>,
    x: &Tensor,
    weight: &Tensor,
    bias: Option<&Tensor>,
    of: Grouped,
) -> Result<Option<Tensor>> {
    one_type("conv2d", x, [Some(weight), bias])?;
    let by_cudnn = ByCudnn::new(kernels, Convolution { of, dtype: x.dtype() }, x.track_op())?;
    if by_cudnn.is_none() && (of.groups, of.one.dilation) != (1, 1) {
        return Ok(None);
    }
    let bias = bias.map(Tensor::contiguous).transpose()?;
    match by_cudnn {
        Some(conv) => apply(conv, x, weight, bias.as_ref()),
        None => {
            let (kernels, dtype) = (kernels.clone(), x.dtype());
            apply(Conv { kernels, dtype, g: of.one, columns: COLUMNS }, x, weight, bias.as_ref())
        }
    }
    .map(Some)
}

/// An implementation of convolution.
pub(super) trait Convolve: Send + Sync + 'static {
    /// Memory layout of results.
    const ORDER: Order;

    fn forward(&self, x: &Tensor, weight: &Tensor, bias: Option<&Tensor>) -> Result<Output>;

    /// The gradients of the images and of the weight, if they are tracked.
    fn backward(&self, x: &Tensor, weight: &Tensor, dy: &Tensor) -> Result<[Option<Tensor>; 2]>;

    /// The gradient of the bias, `f32`.
    fn bias_gradient(&self, dy: &Tensor) -> Result<Tensor>;
}

fn apply<C: Convolve>(of: C, x: &Tensor, weight: &Tensor, bias: Option<&Tensor>) -> Result<Tensor> {
    let y = of.forward(x, weight, bias)?;
    match bias {
        None => {
            let backward = move |[x, weight]: [&Tensor; 2], _: &Tensor, dy: &Tensor| {
                of.backward(x, weight, dy)
            };
            apply2(node_of("conv2d", y, C::ORDER, backward), [x, weight])
        }
        Some(bias) => {
            let backward = move |[x, weight, bias]: [&Tensor; 3], _: &Tensor, dy: &Tensor| {
                let [dx, dw] = of.backward(x, weight, dy)?;
                let sums = || of.bias_gradient(dy)?.to_dtype(bias.dtype());
                Ok([dx, dw, bias.track_op().then(sums).transpose()?])
            };
            apply3(node_of("conv2d", y, C::ORDER, backward), [x, weight, bias])
        }
    }
}

/// Convolution by cuDNN.
struct ByCudnn {
    kernels: Arc<Kernels>,
    of: Convolution,
    plan: Arc<Plan>,
}

impl ByCudnn {
    /// `None` without cuDNN, or without an algorithm.
    fn new(kernels: &Arc<Kernels>, of: Convolution, are_tracked: bool) -> Result<Option<Self>> {
        let Ok(cudnn) = &kernels.cudnn else { return Ok(None) };
        let plan = cudnn.plan(&of, are_tracked)?;
        Ok(plan.map(|plan| Self { kernels: kernels.clone(), of, plan }))
    }

    /// # Safety
    ///
    /// The tensors must be channels-last, and a pass's operands and result.
    unsafe fn run(&self, pass: Pass, [a, b]: [&Tensor; 2], to: &Output) -> Result<()> {
        let Ok(cudnn) = &self.kernels.cudnn else { bail!("a convolution by cuDNN without it") };
        let addresses = [self.kernels.address(a)?, self.kernels.address(b)?, to.at];
        // SAFETY: the caller vouches for the tensors, which are alive.
        unsafe { cudnn.run(&self.kernels, &self.plan, pass, addresses) }
    }
}

impl Convolve for ByCudnn {
    const ORDER: Order = Order::Last;

    fn forward(&self, x: &Tensor, weight: &Tensor, bias: Option<&Tensor>) -> Result<Output> {
        let (kernels, Grouped { one: g, groups }) = (&self.kernels, self.of.of);
        let (x, weight) = (kernels.channels_last(x)?, kernels.channels_last(weight)?);
        let outputs = g.out_channels * groups;
        let y = kernels.empty((g.images, g.out_height, g.out_width, outputs), self.of.dtype)?;
        // SAFETY: images, weight, and memory for the result.
        unsafe { self.run(Pass::Forward, [&x, &weight], &y) }?;
        if let Some(bias) = bias {
            let rows = g.images * g.pixels();
            let job = BiasJob {
                y: y.at,
                bias: kernels.address(bias)?,
                rows: u32_of(rows),
                count: u32_of(outputs),
                ..Default::default()
            };
            let blocks = blocks_of_warps(chunks_of(rows, outputs));
            // SAFETY: a `BiasJob` of the result's rows, and a row of biases.
            unsafe { kernels.launch(self.of.dtype, Kernel::add_bias, blocks, &job) }?;
        }
        Ok(y)
    }

    fn backward(&self, x: &Tensor, weight: &Tensor, dy: &Tensor) -> Result<[Option<Tensor>; 2]> {
        let (kernels, dtype) = (&self.kernels, self.of.dtype);
        let dy = &kernels.channels_last(dy)?;
        let of_weight = || {
            let (o, c, height, width) = weight.dims4()?;
            let dw = kernels.empty((o, height, width, c), dtype)?;
            // SAFETY: images, the result's gradient, and memory for the weight's.
            unsafe { self.run(Pass::Weight, [&kernels.channels_last(x)?, dy], &dw) }?;
            kernels.channels_first(dw.tensor())
        };
        let of_images = || {
            let (n, c, height, width) = x.dims4()?;
            let dx = kernels.empty((n, height, width, c), dtype)?;
            // SAFETY: the weight, the result's gradient, and memory for that of the images.
            unsafe { self.run(Pass::Images, [&kernels.channels_last(weight)?, dy], &dx) }?;
            dx.seen(Order::Last)
        };
        let dw = weight.track_op().then(of_weight).transpose()?;
        Ok([x.track_op().then(of_images).transpose()?, dw])
    }

    fn bias_gradient(&self, dy: &Tensor) -> Result<Tensor> {
        let rows = self.kernels.channels_last(dy)?;
        self.kernels.column_sums(&rows, dy.dim(1)?)
    }
}

/// Convolution by im2col and products.
pub(super) struct Conv {
    pub(super) kernels: Arc<Kernels>,
    pub(super) dtype: DType,
    pub(super) g: Geometry,
    /// Maximum number of elements in columns at a time, unless one image has more.
    pub(super) columns: usize,
}

impl Convolve for Conv {
    const ORDER: Order = Order::First;

    fn forward(&self, x: &Tensor, weight: &Tensor, bias: Option<&Tensor>) -> Result<Output> {
        let (kernels, g, dtype) = (&self.kernels, self.g, x.dtype());
        let shape = (g.images, g.out_channels, g.out_height, g.out_width);
        let y = kernels.empty(shape, dtype)?;
        let (pixels, depth, outputs) = (g.pixels(), g.depth(), g.out_channels);
        let element = dtype.size_in_bytes();
        let (x, weight) = (kernels.laid(x, Order::First)?, kernels.laid(weight, Order::First)?);
        let (at, w) = (kernels.address(&x)?, Matrices::new(kernels.address(&weight)?, dtype, 0));
        let group = if self.is_product() { g.images } else { self.group() };
        let columns = self.columns_for(group, dtype)?;
        for first in (0..g.images).step_by(group) {
            let count = group.min(g.images - first);
            let mut from = at + (first * g.image() * element) as u64;
            if let Some(columns) = &columns {
                // SAFETY: `count` images of `x`, and memory for their columns.
                unsafe {
                    self.unroll(Kernel::im2col, count, from, columns.at, [depth * pixels, pixels])
                }?;
                from = columns.at;
            }
            let to = y.at + (first * outputs * pixels * element) as u64;
            let [from, to] = [(from, depth * pixels), (to, outputs * pixels)]
                .map(|(at, step)| Matrices::new(at, dtype, step));
            // SAFETY: columns of `count` images, or images whose pixels are their columns; as many
            // of the result.
            unsafe { kernels.multiply(count, [outputs, depth, pixels], [w, from, to], ONE) }?;
        }
        if let Some(bias) = bias {
            let rows = g.images * outputs;
            let job = BiasJob {
                y: y.at,
                bias: kernels.address(bias)?,
                rows: u32_of(rows),
                count: u32_of(pixels),
                channels: u32_of(outputs),
                unused: 0,
            };
            let blocks = blocks_of_warps(chunks_of(rows, pixels));
            // SAFETY: a `BiasJob` of the result's planes, and a bias for each channel.
            unsafe { kernels.launch(dtype, Kernel::add_bias, blocks, &job) }?;
        }
        Ok(y)
    }

    fn backward(&self, x: &Tensor, weight: &Tensor, dy: &Tensor) -> Result<[Option<Tensor>; 2]> {
        let (kernels, g, dtype, group) = (&self.kernels, self.g, x.dtype(), self.group());
        let (pixels, depth, outputs) = (g.pixels(), g.depth(), g.out_channels);
        // The gradients of groups are summed in f32.
        let wide = if group < g.images { DType::F32 } else { dtype };
        let dw = weight.track_op().then(|| kernels.empty(weight.shape(), wide)).transpose()?;
        let dx = x.track_op().then(|| kernels.empty(x.shape(), dtype)).transpose()?;
        let [x, dy, weight] = [x, dy, weight].map(|t| kernels.laid(t, Order::First));
        let (x, dy, weight) = (x?, dy?, weight?);
        let (at, dy_at, w) =
            (kernels.address(&x)?, kernels.address(&dy)?, kernels.address(&weight)?);
        let columns = kernels.empty(group * depth * pixels, dtype)?;
        let rows = kernels.empty(group * outputs * pixels, dtype)?;
        let bytes = |elements: usize| (elements * dtype.size_in_bytes()) as u64;
        let matrices = |at, step| Matrices::new(at, dtype, step);
        for first in (0..g.images).step_by(group) {
            let count = group.min(g.images - first);
            let dy = dy_at + bytes(first * outputs * pixels);
            let (from, line) = (at + bytes(first * g.image()), count * pixels);
            if let Some(dw) = &dw {
                // SAFETY: `count` images of `x`, and memory for their columns, side by side.
                unsafe { self.unroll(Kernel::im2col, count, from, columns.at, [pixels, line]) }?;
                let result = self.of_result();
                // SAFETY: as many images of `dy`, whose pixels are put side by side, too.
                unsafe { result.unroll(Kernel::im2col, count, dy, rows.at, [pixels, line]) }?;
                let [a, b] = [matrices(rows.at, 0), matrices(columns.at, 0).t()];
                let c = Matrices::new(dw.at, wide, 0);
                let adds = if first > 0 { 1.0 } else { 0.0 };
                // SAFETY: what was just written, and all of the weight's gradient.
                unsafe { kernels.multiply(1, [outputs, line, depth], [a, b, c], [1.0, adds]) }?;
            }
            let Some(dx) = &dx else { continue };
            let to = dx.at + bytes(first * g.image());
            let into = if self.is_product() { to } else { columns.at };
            let a = matrices(w, 0).t();
            let b = matrices(dy, outputs * pixels);
            let c = matrices(into, depth * pixels);
            // SAFETY: the weight, `count` images of `dy`, and memory for as many images' columns.
            unsafe { kernels.multiply(count, [depth, outputs, pixels], [a, b, c], ONE) }?;
            if !self.is_product() {
                // SAFETY: these columns, and as many images of `dx`.
                unsafe {
                    self.unroll(Kernel::col2im, count, to, columns.at, [depth * pixels, pixels])
                }?;
            }
        }
        let dw = dw.map(|dw| dw.tensor().to_dtype(dtype)).transpose()?;
        Ok([dx.map(Output::tensor), dw])
    }

    fn bias_gradient(&self, dy: &Tensor) -> Result<Tensor> {
        sums_of_channels(&self.kernels, dy)
    }
}

impl Conv {
    /// Whether the images are already their columns.
    fn is_product(&self) -> bool {
        let g = &self.g;
        (g.kernel_height, g.kernel_width, g.window.stride, g.window.padding) == (1, 1, 1, 0)
    }

    /// Number of images at a time.
    fn group(&self) -> usize {
        (self.columns / (self.g.depth() * self.g.pixels())).clamp(1, self.g.images)
    }

    fn columns_for(&self, group: usize, dtype: DType) -> Result<Option<Output>> {
        let count = group * self.g.depth() * self.g.pixels();
        (!self.is_product()).then(|| self.kernels.empty(count, dtype)).transpose()
    }

    /// The transposition of the result's images.
    fn of_result(&self) -> Self {
        let g = self.g;
        let g = Geometry {
            channels: g.out_channels,
            height: g.out_height,
            width: g.out_width,
            kernel_height: 1,
            kernel_width: 1,
            window: Default::default(),
            ..g
        };
        Self { kernels: self.kernels.clone(), g, ..*self }
    }

    /// Launches `im2col` or `col2im`.
    ///
    /// # Safety
    ///
    /// `images` must be the address of `count` images, `columns` that of their columns in these
    /// strides.
    unsafe fn unroll(
        &self,
        kernel: Kernel,
        count: usize,
        images: u64,
        columns: u64,
        [per_image, per_tap]: [usize; 2],
    ) -> Result<()> {
        let (g, dtype) = (&self.g, self.dtype);
        let job = ColumnsJob {
            x: images,
            columns,
            per_image: per_image as u64,
            per_tap: per_tap as u64,
            images: u32_of(count),
            channels: u32_of(g.channels),
            height: u32_of(g.height),
            width: u32_of(g.width),
            out_height: u32_of(g.out_height),
            out_width: u32_of(g.out_width),
            kernel_height: u32_of(g.kernel_height),
            kernel_width: u32_of(g.kernel_width),
            stride: u32_of(g.window.stride),
            padding: u32_of(g.window.padding),
        };
        let parts = match kernel {
            Kernel::im2col => chunks_of(count * g.depth(), g.pixels()),
            _ => chunks_of(count * g.channels, g.height * g.width),
        };
        // SAFETY: a `ColumnsJob`; the caller vouches for the addresses.
        unsafe { self.kernels.launch(dtype, kernel, blocks_of_warps(parts), &job) }
    }
}

/// Maximum number of elements in columns at a time: 64 Mi.
const COLUMNS: usize = 1 << 26;
