//! `scatter` and `scatter_add`, composed of those operators of candle whose gradients are correct.

use candle_core::shape::Dim;
use candle_core::{Result, Tensor, bail};

use crate::autocast::sum_dtype;
use crate::state::index_range::integers;

/// A copy of `init` with `source` written to the positions `indices` along `dim`.
///
/// Shapes: those of `indices` (integers) and `source` are equal, and equal to that of `init` except
/// for `dim`. If several values have the same position, the last one is written. In the backward
/// pass a written value has the gradient of its position, where `init` has none; candle's own
/// `scatter` gives a gradient to `init` and to every value for a position.
///
/// # Errors
///
/// Mismatched shapes or dtypes; an index out of range or not an integer.
pub fn scatter(init: &Tensor, indices: &Tensor, source: &Tensor, dim: impl Dim) -> Result<Tensor> {
    let dim = dim.to_index(init.shape(), "scatter")?;
    let positions = positions("scatter", [init, indices, source], dim)?;
    let count = init.elem_count() as i64;
    let mut from: Vec<i64> = (0..count).collect();
    for (position, i) in positions.into_iter().zip(count..) {
        from[position as usize] = i;
    }
    let from = Tensor::from_vec(from, init.elem_count(), init.device())?;
    let both = Tensor::cat(&[init.flatten_all()?, source.flatten_all()?], 0)?;
    both.index_select(&from, 0)?.reshape(init.shape())
}

/// `init` with `source` added at the positions `indices` along `dim`.
///
/// Shapes as for [`scatter`]. Values for one position are added in order, half-precision ones in
/// `f32`. In the backward pass `init` has the gradient of the result, and each value of `source`
/// that of its position. candle's own `scatter_add` gives `init` no gradient at these positions,
/// and has no backward pass if `source` has another shape than `init`.
///
/// # Errors
///
/// Mismatched shapes or dtypes; an index out of range or not an integer.
pub fn scatter_add(
    init: &Tensor,
    indices: &Tensor,
    source: &Tensor,
    dim: impl Dim,
) -> Result<Tensor> {
    let dim = dim.to_index(init.shape(), "scatter_add")?;
    let positions = positions("scatter_add", [init, indices, source], dim)?;
    let positions = Tensor::from_vec(positions, source.elem_count(), init.device())?;
    let flat = |x: &Tensor| x.flatten_all()?.to_dtype(sum_dtype(x.dtype()));
    let sum = flat(init)?.index_add(&positions, &flat(source)?, 0)?;
    sum.reshape(init.shape())?.to_dtype(init.dtype())
}

/// The flat position in `init` of each value of `source`.
fn positions(name: &str, [init, indices, source]: [&Tensor; 3], dim: usize) -> Result<Vec<i64>> {
    let (own, dims) = (init.dims(), source.dims());
    let fits = own.len() == dims.len() && (0..own.len()).all(|i| i == dim || own[i] == dims[i]);
    if init.dtype() != source.dtype() {
        bail!("{:?} does not fit into {:?}", source.dtype(), init.dtype());
    }
    if !fits || indices.dims() != dims {
        let indices = indices.shape();
        bail!("{dims:?} by indices {indices:?} does not fit into dimension {dim} of {own:?}");
    }
    let right: usize = own[dim + 1..].iter().product();
    let indices = integers(name, indices)?;
    let position = |(i, index): (usize, &i64)| {
        if !(0..own[dim] as i64).contains(index) {
            bail!("index {index} is out of range for {} positions", own[dim]);
        }
        let (left, right_i) = (i / (right * dims[dim]), i % right);
        Ok(((left * own[dim] + *index as usize) * right + right_i) as i64)
    };
    indices.iter().enumerate().map(position).collect()
}
