//! Transposed convolutions, and one-dimensional convolutions.

use candle_core::{Result, Shape, Tensor, bail};

use super::dispatch;
use super::{ConvOptions, conv2d, positions, spread};
use crate::cpu::real::Real;
use crate::cpu::sums::sum;
use crate::linear::weighted::{self, Gradients, Kernel};
use crate::sizes::{Geometry, Grouped, Window};

/// Options of [`conv_transpose2d`] and [`conv_transpose1d`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ConvTransposeOptions {
    /// Distance between neighbouring windows of the result, at least 1. Defaults to 1.
    pub stride: usize,
    /// Rows and columns removed from the result on each side. Defaults to 0.
    pub padding: usize,
    /// Rows and columns added at the end of the result; less than stride or dilation. Defaults to
    /// 0.
    pub output_padding: usize,
    /// Distance between neighbouring taps of a window, at least 1. Defaults to 1.
    pub dilation: usize,
    /// Number of groups of channels. Defaults to 1.
    pub groups: usize,
}

impl Default for ConvTransposeOptions {
    fn default() -> Self {
        Self { stride: 1, padding: 0, output_padding: 0, dilation: 1, groups: 1 }
    }
}

/// Transposed convolution: the gradient of [`conv2d`] with the same options, plus a bias per output
/// channel.
///
/// Shapes: `x` is `[n, c, h, w]`, `weight` `[c, o / groups, kh, kw]`, `bias` `[o]`, the result
/// `[n, o, (h - 1) * stride - 2 * padding + dilation * (kh - 1) + output_padding + 1, ...]`; all
/// arguments have the same dtype.
///
/// The backward pass computes all three gradients; that of `x` only if it is needed.
///
/// # Errors
///
/// Mismatched shapes or dtypes; a stride or dilation of 0; an empty result; an output padding that
/// is not less than stride or dilation; groups that do not divide the channels.
pub fn conv_transpose2d(
    x: &Tensor,
    weight: &Tensor,
    bias: Option<&Tensor>,
    options: ConvTransposeOptions,
) -> Result<Tensor> {
    weighted::apply::<Transposed>(x, weight, bias, options)
}

/// [`conv_transpose2d`] in one dimension: `x` is `[n, c, l]`, `weight` `[c, o / groups, k]`.
///
/// # Errors
///
/// The errors of [`conv_transpose2d`].
pub fn conv_transpose1d(
    x: &Tensor,
    weight: &Tensor,
    bias: Option<&Tensor>,
    options: ConvTransposeOptions,
) -> Result<Tensor> {
    let (x, weight) = (x.unsqueeze(2)?, weight.unsqueeze(2)?);
    let whole = ConvTransposeOptions { padding: 0, ..options };
    let y = conv_transpose2d(&x, &weight, bias, whole)?;
    let cut = options.padding;
    match cut.checked_mul(2).and_then(|both| y.dims()[3].checked_sub(both)) {
        Some(length) if length > 0 => {
            y.narrow(2, 0, 1)?.narrow(3, cut, length)?.squeeze(2)?.contiguous()
        }
        _ => bail!("conv_transpose1d: {options:?} leave nothing of an input of shape {x:?}"),
    }
}

/// [`conv2d`] in one dimension: `x` is `[n, c, l]`, `weight` `[o, c / groups, k]`. Under autocast
/// it follows the rule of `conv2d`.
///
/// # Errors
///
/// The errors of [`conv2d`].
pub fn conv1d(
    x: &Tensor,
    weight: &Tensor,
    bias: Option<&Tensor>,
    options: impl Into<ConvOptions>,
) -> Result<Tensor> {
    let options = options.into();
    let ConvOptions { stride, padding, dilation, .. } = options;
    let (_, _, length) = x.dims3()?;
    positions(length, spread(weight.dim(2)?, dilation)?, Window { stride, padding })?;
    let x = match padding {
        0 => x.clone(),
        padding => x.pad_with_zeros(2, padding, padding)?,
    };
    let inner = ConvOptions { padding: 0, ..options };
    conv2d(&x.unsqueeze(2)?, &weight.unsqueeze(2)?, bias, inner)?.squeeze(2)
}

/// The convolution from the result to the input.
#[derive(Clone, Copy, Debug)]
struct Transposed {
    of: Grouped,
    output_padding: usize,
}

impl Kernel for Transposed {
    type Options = ConvTransposeOptions;
    const NAME: &'static str = "conv_transpose2d";

    fn new(x: &Shape, weight: &Shape, options: ConvTransposeOptions) -> Result<Self> {
        let ConvTransposeOptions { stride, padding, output_padding, dilation, groups } = options;
        let (images, channels, height, width) = x.dims4()?;
        let (weight_channels, outputs, kernel_height, kernel_width) = weight.dims4()?;
        let empty = images * channels * height * width == 0
            || weight.elem_count() == 0
            || stride * dilation * groups == 0;
        if empty || channels != weight_channels || channels % groups != 0 {
            bail!(
                "conv_transpose2d: an input of shape {x:?} does not fit a weight of shape {weight:?} and {options:?}"
            );
        }
        if output_padding >= stride.max(dilation) {
            bail!("conv_transpose2d: {options:?} add more than a stride or dilation to the result");
        }
        let extent = |input: usize, kernel: usize| {
            let whole = (input - 1) * stride + dilation * (kernel - 1) + output_padding + 1;
            match padding.checked_mul(2).and_then(|both| whole.checked_sub(both)) {
                Some(extent) if extent > 0 => Ok(extent),
                _ => {
                    bail!("conv_transpose2d: {options:?} leave nothing of an input of shape {x:?}")
                }
            }
        };
        let one = Geometry {
            images,
            channels: outputs,
            height: extent(height, kernel_height)?,
            width: extent(width, kernel_width)?,
            out_channels: channels / groups,
            kernel_height,
            kernel_width,
            out_height: height,
            out_width: width,
            window: Window { stride, padding },
            dilation,
        };
        Ok(Self { of: Grouped { one, groups }, output_padding })
    }

    fn outputs(&self) -> usize {
        self.of.groups * self.of.one.channels
    }

    fn output_shape(&self, _x: &Shape) -> Shape {
        let one = &self.of.one;
        (one.images, self.outputs(), one.height, one.width).into()
    }

    fn forward<T: Real>(&self, x: &[T], weight: &[T], bias: Option<&[T]>) -> Vec<T> {
        let mut y = self.of.input_gradient(weight, x);
        let planes = y.chunks_exact_mut(self.of.one.height * self.of.one.width);
        if let Some(bias) = bias {
            for (plane, bias) in planes.zip(bias.iter().cycle()) {
                plane.iter_mut().for_each(|y| *y += *bias);
            }
        }
        y
    }

    fn on_device(&self, x: &Tensor, weight: &Tensor, bias: Option<&Tensor>) -> Result<Tensor> {
        dispatch::in_groups(self.of.groups, [(x, 1), (weight, 0)], bias, |x, weight, bias| {
            dispatch::conv_transpose2d(x, weight, bias, self.of.one, self.output_padding)
        })
    }

    fn backward<T: Real>(&self, x: &[T], weight: &[T], dy: &[T], wants_x: bool) -> Gradients<T> {
        let mut db = vec![T::ZERO; self.outputs()];
        let planes = dy.chunks_exact(self.of.one.height * self.of.one.width);
        for (at, plane) in planes.enumerate() {
            db[at % self.outputs()] += sum(plane);
        }
        Gradients {
            x: wants_x.then(|| self.of.forward(dy, weight, None)),
            weight: self.of.backward(dy, weight, x, false).weight,
            bias: db,
        }
    }
}
