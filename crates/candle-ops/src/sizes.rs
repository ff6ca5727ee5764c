//! The sizes of each operator's call, and the options and statistics that kernels read: plain
//! values below the operators and the kernels of a device.

use candle_core::{Result, Shape, Tensor, bail};

/// Stride and padding of a window, the same in both dimensions.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Window {
    /// Distance between neighbouring windows, at least 1.
    pub stride: usize,
    /// Rows and columns added on each side.
    pub padding: usize,
}

impl Default for Window {
    fn default() -> Self {
        Self { stride: 1, padding: 0 }
    }
}

/// The random words of dropout as a kernel draws them: of the stream of ChaCha8 with this key, one
/// for each element from `position` on.
#[derive(Clone, Debug)]
#[cfg_attr(not(feature = "cuda"), expect(dead_code, reason = "read by kernels"))]
pub(crate) struct Words {
    pub(crate) key: [u64; 4],
    /// A number of `i64` on the device that is added to `position`.
    pub(crate) base: Option<Tensor>,
    pub(crate) position: u64,
    /// Words below this number drop an element.
    pub(crate) end: u32,
    /// The factor of the other elements.
    pub(crate) keep: f32,
}

/// The sizes of one convolution, checked for consistency.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct Geometry {
    pub(crate) images: usize,
    pub(crate) channels: usize,
    pub(crate) height: usize,
    pub(crate) width: usize,
    pub(crate) out_channels: usize,
    pub(crate) kernel_height: usize,
    pub(crate) kernel_width: usize,
    pub(crate) out_height: usize,
    pub(crate) out_width: usize,
    pub(crate) window: Window,
    /// Distance between neighbouring taps.
    pub(crate) dilation: usize,
}

impl Geometry {
    /// Number of elements in one input image.
    pub(crate) fn image(&self) -> usize {
        self.channels * self.height * self.width
    }

    /// Number of output pixels in one image and channel.
    pub(crate) fn pixels(&self) -> usize {
        self.out_height * self.out_width
    }

    /// Number of weights per output channel: the inner dimension of the product.
    pub(crate) fn depth(&self) -> usize {
        self.channels * self.kernel_height * self.kernel_width
    }

    /// Number of elements of the largest tensor besides the input: the result, or the columns of
    /// one image.
    pub(crate) fn largest(&self) -> usize {
        self.pixels() * self.depth().max(self.images * self.out_channels)
    }
}

/// The convolution of one group, and the number of groups.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct Grouped {
    pub(crate) one: Geometry,
    pub(crate) groups: usize,
}

/// The sizes of images and of the windows over them, checked for consistency.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Windows {
    pub(crate) images: usize,
    pub(crate) channels: usize,
    pub(crate) height: usize,
    pub(crate) width: usize,
    pub(crate) out_height: usize,
    pub(crate) out_width: usize,
    pub(crate) kernel: usize,
    pub(crate) window: Window,
}

impl Windows {
    /// Shape of the result.
    pub(crate) fn output_shape(&self) -> Shape {
        (self.images, self.channels, self.out_height, self.out_width).into()
    }
}

/// The sizes of a fully connected layer's product, checked for consistency.
#[derive(Clone, Copy, Debug)]
pub(crate) struct LinearSizes {
    pub(crate) rows: usize,
    pub(crate) inputs: usize,
    pub(crate) outputs: usize,
}

impl LinearSizes {
    /// Shape of the result for an input of shape `x`.
    pub(crate) fn output_shape(&self, x: &Shape) -> Shape {
        let mut dims = x.dims().to_vec();
        *dims.last_mut().expect("an input has a last dimension") = self.outputs;
        dims.into()
    }
}

/// Mean and variance per channel.
#[derive(Clone, Debug)]
pub struct Statistics {
    /// Mean: `[c]`, `f32`.
    pub mean: Tensor,
    /// Variance: `[c]`, `f32`. For a batch it is biased, that is, divided by the number of values.
    pub var: Tensor,
}

/// Running statistics, updated in place by those of a batch: `running += momentum * (batch -
/// running)`, with the batch's variances multiplied by `factor`.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Running<'a> {
    pub(crate) of: &'a Statistics,
    pub(crate) momentum: f64,
    pub(crate) factor: f32,
}

/// Statistics by which images are normalized.
#[derive(Clone, Copy, Debug)]
pub(crate) enum NormBy<'a> {
    Given(&'a Statistics),
    /// Those of the batch, which may update running ones.
    Batch(Option<Running<'a>>),
}

/// Options of [`batch_norm`](crate::batch_norm()).
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct BatchNormOptions {
    /// Added to the variance.
    pub eps: f32,
    /// Whether a ReLU follows.
    pub relu: bool,
}

/// The sizes of a tensor of images, seen as planes of one channel each.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Planes {
    pub(crate) images: usize,
    pub(crate) channels: usize,
    pub(crate) pixels: usize,
}

impl Planes {
    pub(crate) fn new(shape: &Shape) -> Result<Self> {
        let (images, channels, height, width) = shape.dims4()?;
        if channels * height * width == 0 {
            bail!("batch_norm: nothing to normalise in shape {shape:?}");
        }
        Ok(Self { channels, pixels: height * width, images })
    }
}

/// The sizes of one call of attention, checked for consistency.
#[derive(Clone, Copy, Debug)]
pub(crate) struct AttentionSizes {
    pub(crate) samples: usize,
    pub(crate) heads: usize,
    pub(crate) kv_heads: usize,
    pub(crate) queries: usize,
    pub(crate) keys: usize,
    /// Width of one head's queries and keys.
    pub(crate) depth: usize,
    /// Width of one head's values.
    pub(crate) value_depth: usize,
    pub(crate) causal: bool,
    /// Factor of the scores.
    pub(crate) scale: f64,
}

impl AttentionSizes {
    /// Shape of the scores and attention weights.
    pub(crate) fn scores_shape(&self) -> Shape {
        (self.samples, self.heads, self.queries, self.keys).into()
    }

    /// Factor of the scores of heads of this width, unless another one is given.
    pub(crate) fn default_scale(depth: usize) -> f64 {
        (depth as f64).sqrt().recip()
    }
}

/// The sizes of one call of [`self_attention`](crate::self_attention), checked for consistency.
#[derive(Clone, Copy, Debug)]
pub(crate) struct PackedSizes {
    pub(crate) samples: usize,
    pub(crate) positions: usize,
    pub(crate) heads: usize,
    /// Width of one head.
    pub(crate) depth: usize,
    pub(crate) causal: bool,
}

impl PackedSizes {
    /// Width of the result.
    pub(crate) fn width(&self) -> usize {
        self.heads * self.depth
    }

    /// Shape of the result.
    pub(crate) fn output_shape(&self) -> Shape {
        (self.samples, self.positions, self.width()).into()
    }

    /// The same call with three tensors.
    pub(crate) fn separate(&self) -> AttentionSizes {
        let Self { samples, positions, heads, depth, causal } = *self;
        AttentionSizes {
            samples,
            heads,
            kv_heads: heads,
            queries: positions,
            keys: positions,
            depth,
            value_depth: depth,
            causal,
            scale: AttentionSizes::default_scale(depth),
        }
    }
}
