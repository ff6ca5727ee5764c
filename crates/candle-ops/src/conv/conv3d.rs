//! Convolution in three dimensions, by those in two.

use candle_core::{Result, Tensor, bail};

use super::{ConvOptions, conv2d, positions, spread};
use crate::autocast::without;
use crate::cast;
use crate::index::take::{OUTSIDE, Take};
use crate::sizes::Window;

/// [`conv2d`] in three dimensions: `x` is `[n, c, d, h, w]`, `weight`
/// `[o, c / groups, kd, kh, kw]`.
///
/// The frames under the taps of a kernel's depth become channels, so the frames are copied once for
/// each tap. In half precision the gradient of a frame is rounded for each tap and summed in `f32`.
///
/// # Errors
///
/// The errors of [`conv2d`].
pub fn conv3d(
    x: &Tensor,
    weight: &Tensor,
    bias: Option<&Tensor>,
    options: impl Into<ConvOptions>,
) -> Result<Tensor> {
    let options = options.into();
    let ([x, weight], bias) = match bias {
        Some(bias) => {
            let [x, weight, bias] = cast("conv3d", [x, weight, bias])?;
            ([x, weight], Some(bias))
        }
        None => (cast("conv3d", [x, weight])?, None),
    };
    let (n, c, depth, height, width) = x.dims5()?;
    let (o, weight_c, taps, kernel_height, kernel_width) = weight.dims5()?;
    let ConvOptions { stride, padding, dilation, .. } = options;
    if c == 0 || taps == 0 || height * width == 0 {
        bail!(
            "conv3d: an input of shape {:?} or a weight {:?} is empty",
            x.shape(),
            weight.shape()
        );
    }
    let frames = positions(depth, spread(taps, dilation)?, Window { stride, padding })?;
    let mut from = Vec::with_capacity(frames * c * taps);
    for frame in 0..frames {
        for channel in 0..c {
            from.extend((0..taps).map(|tap| {
                let at = (frame * stride + tap * dilation).checked_sub(padding);
                at.filter(|at| *at < depth).map_or(OUTSIDE, |at| channel * depth + at)
            }));
        }
    }
    let run = height * width;
    let take = Take { from, block: c * depth * run, run, fill: 0.0 };
    let images = take.apply(&x, (n * frames, c * taps, height, width).into())?;
    let weight = weight.reshape((o, weight_c * taps, kernel_height, kernel_width))?;
    let y = without(|| conv2d(&images, &weight, bias.as_ref(), options))?;
    let (_, _, out_height, out_width) = y.dims4()?;
    y.reshape((n, frames, o, out_height, out_width))?.transpose(1, 2)?.contiguous()
}
