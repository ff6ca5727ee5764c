//! For tensors on a GPU: kernels if there are, else compositions; see `graph/device.rs`.

use std::ops::Range;

use candle_core::{Result, Shape, Tensor};

use super::upsample::Axis;
use crate::graph::device::{self, widened};
use crate::sizes::Windows;
use crate::state::constants::constant;

/// Gathers the pixels of every window into a row, and takes the largest value of each row.
pub(crate) fn max_pool2d(x: &Tensor, extents: Windows) -> Result<Tensor> {
    if let Some(kernels) = device::kernels(x) {
        return kernels.max_pool2d(x, extents);
    }
    let Windows { images, channels, height, width, kernel, window, .. } = extents;
    // The gradients of a pixel in several windows are summed.
    let (dtype, [x]) = (x.dtype(), &widened([x])?);
    let mut planes = x.reshape((images, channels, height * width))?;
    if window.padding > 0 {
        let padding = Tensor::new(f32::NEG_INFINITY, x.device())?.to_dtype(x.dtype())?;
        let padding = padding.broadcast_as((images, channels, 1))?.contiguous()?;
        planes = Tensor::cat(&[&planes, &padding], 2)?;
    }
    let shapes = [height, width, kernel, window.stride, window.padding];
    let at = constant("max_pool2d", &shapes, x.device(), || {
        let pixels = pixels(extents);
        let count = pixels.len();
        Tensor::from_vec(pixels, count, x.device())
    })?;
    largest(&planes, &at, extents.output_shape())?.to_dtype(dtype)
}

/// The pixels beyond a window that is smaller than others are its last row and column again.
pub(crate) fn adaptive_max_pool2d(
    x: &Tensor,
    [rows, columns]: &[Vec<Range<usize>>; 2],
) -> Result<Tensor> {
    let (images, channels, height, width) = x.dims4()?;
    let (dtype, [x]) = (x.dtype(), &widened([x])?);
    let shapes = [height, width, rows.len(), columns.len()];
    let at = constant("adaptive_max_pool2d", &shapes, x.device(), || {
        let most = |windows: &[Range<usize>]| windows.iter().map(Range::len).max().unwrap_or(0);
        let (row_taps, column_taps) = (most(rows), most(columns));
        let mut pixels = Vec::new();
        for (rows, columns) in rows.iter().flat_map(|row| columns.iter().map(move |c| (row, c))) {
            for (row, column) in (0..row_taps).flat_map(|y| (0..column_taps).map(move |x| (y, x))) {
                let row = (rows.start + row).min(rows.end - 1);
                let column = (columns.start + column).min(columns.end - 1);
                // Planes are smaller than `u32::MAX`.
                pixels.push((row * width + column) as u32);
            }
        }
        let count = pixels.len();
        Tensor::from_vec(pixels, count, x.device())
    })?;
    let planes = x.reshape((images, channels, height * width))?;
    let shape = (images, channels, rows.len(), columns.len()).into();
    largest(&planes, &at, shape)?.to_dtype(dtype)
}

/// The largest of the pixels of each window, whose indices `at` in a plane follow each other.
fn largest(planes: &Tensor, at: &Tensor, shape: Shape) -> Result<Tensor> {
    let (images, channels, height, width) = shape.dims4()?;
    let (count, x) = (height * width, planes);
    let taps = at.elem_count() / count;
    let rows = planes.index_select(at, 2)?.reshape((images, channels, count, taps))?;
    // argmax skips NaN, so NaN is replaced with infinity.
    let seen = rows.detach();
    let infinity = Tensor::new(f32::INFINITY, x.device())?.to_dtype(x.dtype())?;
    let infinity = infinity.broadcast_as(seen.shape())?;
    let taken = seen.ne(&seen)?.where_cond(&infinity, &seen)?.argmax_keepdim(3)?;
    rows.gather(&taken, 3)?.reshape(shape)
}

/// Index in its plane of each pixel of each window. The index of padding is one past the plane.
fn pixels(extents: Windows) -> Vec<u32> {
    let Windows { height, width, out_height, out_width, kernel, window, .. } = extents;
    // Along one axis.
    let inside = |output: usize, tap: usize, extent: usize| {
        let at = (output * window.stride + tap).checked_sub(window.padding);
        at.filter(|at| *at < extent)
    };
    let mut pixels = Vec::with_capacity(out_height * out_width * kernel * kernel);
    for (y, x) in (0..out_height).flat_map(|y| (0..out_width).map(move |x| (y, x))) {
        for (tap_y, tap_x) in (0..kernel).flat_map(|y| (0..kernel).map(move |x| (y, x))) {
            let at = inside(y, tap_y, height).zip(inside(x, tap_x, width));
            // Planes are smaller than `u32::MAX`.
            pixels.push(at.map_or(height * width, |(row, column)| row * width + column) as u32);
        }
    }
    pixels
}

pub(crate) fn global_avg_pool(x: &Tensor) -> Result<Tensor> {
    if let Some(kernels) = device::kernels(x) {
        return kernels.global_avg_pool(x);
    }
    let [wide] = widened([x])?;
    wide.flatten_from(2)?.mean(2)?.to_dtype(x.dtype())
}

/// By products with the weights of each axis; nearest pixels are selected.
pub(crate) fn upsample(x: &Tensor, [rows, columns]: [&Axis; 2]) -> Result<Tensor> {
    let (.., height, width) = x.dims4()?;
    let [wide] = widened([x])?;
    if let (Some(rows), Some(columns)) = (rows.nearest(), columns.nearest()) {
        let select = |x: Tensor, dim, at: Vec<u32>| {
            let count = at.len();
            // candle's operator needs contiguous input on a GPU, where images may be channels-last.
            x.contiguous()?.index_select(&Tensor::from_vec(at, count, x.device())?, dim)
        };
        return select(select(wide, 2, rows)?, 3, columns)?.to_dtype(x.dtype());
    }
    by_axes(x, [(rows.len(), rows.matrix(height)), (columns.len(), columns.matrix(width))])
}

/// Products with a matrix for rows and one for columns, each with its number of rows.
pub(crate) fn by_axes(x: &Tensor, [rows, columns]: [(usize, Vec<f64>); 2]) -> Result<Tensor> {
    let (n, c, height, width) = x.dims4()?;
    let [wide] = widened([x])?;
    let weights = |weights: Vec<f64>, shape: (usize, usize)| {
        Tensor::from_vec(weights, shape, x.device())?.to_dtype(wide.dtype())?.t()
    };
    let ((out_height, rows), (out_width, columns)) = (rows, columns);
    let (rows, columns) =
        (weights(rows, (out_height, height))?, weights(columns, (out_width, width))?);
    // The last dimension, twice.
    let of_width = wide.reshape((n * c * height, width))?.matmul(&columns)?;
    let turned = of_width.reshape((n * c, height, out_width))?.transpose(1, 2)?.contiguous()?;
    let of_height = turned.reshape((n * c * out_width, height))?.matmul(&rows)?;
    of_height
        .reshape((n, c, out_width, out_height))?
        .transpose(2, 3)?
        .contiguous()?
        .to_dtype(x.dtype())
}
