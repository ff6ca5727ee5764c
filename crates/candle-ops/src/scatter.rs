//! Writing and adding to places by index, made of those of candle's operators that are differentiated rightly.

use candle_core::shape::Dim;
use candle_core::{DType, Result, Tensor, bail};

/// A copy of `init` in which `source` is written to the places along `dim` that `indices` gives.
///
/// Shapes: `indices`, integers, and `source` are alike, and like `init` but for `dim`. Of values for one place
/// the last is written. Backward: what was written has the gradient of its place, and `init` has none there;
/// candle's own `scatter` leaves `init` one, and gives one to every value that was meant for a place.
///
/// # Errors
///
/// Shapes or dtypes that do not fit, an index that is no place.
pub fn scatter(init: &Tensor, indices: &Tensor, source: &Tensor, dim: impl Dim) -> Result<Tensor> {
    let dim = dim.to_index(init.shape(), "scatter")?;
    let places = places(init, indices, source, dim)?;
    let count = init.elem_count() as i64;
    let mut from: Vec<i64> = (0..count).collect();
    for (place, i) in places.into_iter().zip(count..) {
        from[place as usize] = i;
    }
    let from = Tensor::from_vec(from, init.elem_count(), init.device())?;
    let both = Tensor::cat(&[init.flatten_all()?, source.flatten_all()?], 0)?;
    both.index_select(&from, 0)?.reshape(init.shape())
}

/// `init` with `source` added to the places along `dim` that `indices` gives.
///
/// Shapes as [`scatter`]'s; what is added to one place is added in order. Backward: `init` has the gradient of
/// the result, and each value of `source` that of its place. candle's own `scatter_add` leaves `init` none in
/// the places added to, and has no backward where `source` is of another shape than `init`.
///
/// # Errors
///
/// Shapes or dtypes that do not fit, an index that is no place.
pub fn scatter_add(
    init: &Tensor,
    indices: &Tensor,
    source: &Tensor,
    dim: impl Dim,
) -> Result<Tensor> {
    let dim = dim.to_index(init.shape(), "scatter_add")?;
    let places = places(init, indices, source, dim)?;
    let places = Tensor::from_vec(places, source.elem_count(), init.device())?;
    init.flatten_all()?.index_add(&places, &source.flatten_all()?, 0)?.reshape(init.shape())
}

/// The place in `init`, counted through, of each value of `source`.
fn places(init: &Tensor, indices: &Tensor, source: &Tensor, dim: usize) -> Result<Vec<i64>> {
    let (own, dims) = (init.dims(), source.dims());
    let fits = own.len() == dims.len() && (0..own.len()).all(|i| i == dim || own[i] == dims[i]);
    if !fits || indices.dims() != dims {
        let indices = indices.shape();
        bail!("{dims:?} by indices {indices:?} does not fit into dimension {dim} of {own:?}");
    }
    let right: usize = own[dim + 1..].iter().product();
    let indices = indices.flatten_all()?.to_dtype(DType::I64)?.to_vec1::<i64>()?;
    let place = |(i, index): (usize, &i64)| {
        if !(0..own[dim] as i64).contains(index) {
            bail!("index {index} is none of {} places", own[dim]);
        }
        let (left, right_i) = (i / (right * dims[dim]), i % right);
        Ok(((left * own[dim] + *index as usize) * right + right_i) as i64)
    };
    indices.iter().enumerate().map(place).collect()
}
