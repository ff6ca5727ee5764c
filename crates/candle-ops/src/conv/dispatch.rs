//! For tensors on a GPU: kernels if there are, else compositions; see `graph/device.rs`.

use candle_core::{Result, Tensor};

use crate::elementwise::broadcast_add;
use crate::graph::device;
use crate::sizes::{Geometry, Grouped, Window};

pub(crate) fn conv2d(
    x: &Tensor,
    weight: &Tensor,
    bias: Option<&Tensor>,
    extents: Geometry,
) -> Result<Tensor> {
    if let Some(kernels) = device::kernels_for(x, extents.largest())
        && let Some(y) = kernels.conv2d(x, weight, bias, Grouped { one: extents, groups: 1 })?
    {
        return Ok(y);
    }
    let Geometry { height, width, out_height, out_width, dilation, .. } = extents;
    let Window { stride, padding } = extents.window;
    // Rows and columns of the padded image that are covered by windows.
    let rows = (out_height - 1) * stride + (extents.kernel_height - 1) * dilation + 1;
    let columns = (out_width - 1) * stride + (extents.kernel_width - 1) * dilation + 1;
    let y = if height + 2 * padding - rows == width + 2 * padding - columns {
        x.conv2d(weight, padding, stride, dilation, 1)?
    } else {
        // candle's backward pass uses the number of remaining columns for the rows as well.
        x.pad_with_zeros(2, padding, padding)?
            .pad_with_zeros(3, padding, padding)?
            .narrow(2, 0, rows)?
            .narrow(3, 0, columns)?
            .conv2d(weight, 0, stride, dilation, 1)?
    };
    match bias {
        Some(bias) => broadcast_add(&y, &bias.reshape((1, extents.out_channels, 1, 1))?),
        None => Ok(y),
    }
}

pub(crate) fn conv2d_grouped(
    x: &Tensor,
    weight: &Tensor,
    bias: Option<&Tensor>,
    of: &Grouped,
) -> Result<Tensor> {
    if let Some(kernels) = device::kernels_for(x, of.groups * of.one.largest())
        && let Some(y) = kernels.conv2d(x, weight, bias, *of)?
    {
        return Ok(y);
    }
    in_groups(of.groups, [(x, 1), (weight, 0)], bias, |x, weight, bias| {
        conv2d(x, weight, bias, of.one)
    })
}

/// Applies `call` to each group. `[x, weight]` come with the dimensions along which they are split,
/// and the bias.
pub(crate) fn in_groups(
    groups: usize,
    inputs: [(&Tensor, usize); 2],
    bias: Option<&Tensor>,
    call: impl Fn(&Tensor, &Tensor, Option<&Tensor>) -> Result<Tensor>,
) -> Result<Tensor> {
    let part = |t: &Tensor, dim: usize, group: usize| {
        let length = t.dim(dim)? / groups;
        t.narrow(dim, group * length, length)?.contiguous()
    };
    let [(x, x_dim), (weight, weight_dim)] = inputs;
    let each = |group| {
        let bias = bias.map(|bias| part(bias, 0, group)).transpose()?;
        call(&part(x, x_dim, group)?, &part(weight, weight_dim, group)?, bias.as_ref())
    };
    Tensor::cat(&(0..groups).map(each).collect::<Result<Vec<_>>>()?, 1)
}

pub(crate) fn conv_transpose2d(
    x: &Tensor,
    weight: &Tensor,
    bias: Option<&Tensor>,
    extents: Geometry,
    output_padding: usize,
) -> Result<Tensor> {
    let Geometry { window: Window { stride, padding }, dilation, .. } = extents;
    let y = if output_padding == 0 {
        x.conv_transpose2d(weight, padding, 0, stride, dilation)?
    } else {
        // candle's backward pass fails if the output padding is at least the stride.
        x.conv_transpose2d(weight, 0, 0, stride, dilation)?
            .pad_with_zeros(2, 0, output_padding)?
            .pad_with_zeros(3, 0, output_padding)?
            .narrow(2, padding, extents.height)?
            .narrow(3, padding, extents.width)?
    };
    match bias {
        Some(bias) => broadcast_add(&y, &bias.reshape((1, extents.channels, 1, 1))?),
        None => Ok(y),
    }
}
