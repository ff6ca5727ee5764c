//! Table lookup by index.

use candle_core::{Result, Shape, Tensor, bail};

use super::dispatch;
use crate::cast;
use crate::cpu::real::Real;
use crate::graph::device;
use crate::graph::operator::{Input, Operator, apply1};
use crate::state::index_range::{IndexRange, to_host};

/// Row `ids[i]` of `weight` for each `i`.
///
/// Shapes: `ids` is `[...]`, `i64` or `u32`; `weight` is `[rows, width]`; the result is
/// `[..., width]`, exact. The backward pass sums the gradients of each row in the order of `ids`;
/// the gradient of an unused row is 0.
///
/// # Errors
///
/// Mismatched shapes or dtypes; an index out of range.
pub fn embedding(ids: &Tensor, weight: &Tensor) -> Result<Tensor> {
    lookup(ids, weight, None)
}

/// [`embedding`] with a padding row, whose gradient is 0, so that training does not change it.
/// PyTorch's `padding_idx`.
///
/// # Errors
///
/// The errors of [`embedding`]; a padding index out of range.
pub fn embedding_with_padding(ids: &Tensor, weight: &Tensor, padding: usize) -> Result<Tensor> {
    let (rows, _) = weight.dims2()?;
    if padding >= rows {
        bail!("embedding: padding {padding} is none of {rows} rows");
    }
    lookup(ids, weight, Some(padding))
}

fn lookup(ids: &Tensor, weight: &Tensor, padding: Option<usize>) -> Result<Tensor> {
    let [weight] = cast("embedding", [weight])?;
    let (rows, _) = weight.dims2()?;
    IndexRange::Rows(rows).check_all(ids)?;
    if device::dispatches(&weight) {
        return dispatch::embedding(ids, &weight, padding);
    }
    let (shape, ids) = (ids.dims().to_vec(), to_host(ids)?);
    apply1(Embedding { ids, shape, padding }, [weight])
}

struct Embedding {
    ids: Vec<i64>,
    shape: Vec<usize>,
    /// Index of the row without a gradient.
    padding: Option<usize>,
}

/// `id` as an index.
fn row(id: i64) -> usize {
    usize::try_from(id).expect("indices were checked")
}

impl Operator<1> for Embedding {
    const NAME: &'static str = "embedding";

    fn forward<T: Real>(&self, [weight]: [Input<'_>; 1]) -> Result<(Vec<T>, Shape)> {
        let (_, width) = weight.shape().dims2()?;
        let weight = weight.values::<T>()?;
        let mut y = Vec::with_capacity(self.ids.len() * width);
        for id in &self.ids {
            y.extend_from_slice(&weight[row(*id) * width..][..width]);
        }
        let mut shape = self.shape.clone();
        shape.push(width);
        Ok((y, shape.into()))
    }

    fn backward<T: Real>(
        &self,
        [weight]: [Input<'_>; 1],
        _y: Input<'_>,
        dy: Input<'_>,
    ) -> Result<[Option<Vec<T>>; 1]> {
        let (rows, width) = weight.shape().dims2()?;
        let mut dw = vec![T::ZERO; rows * width];
        for (id, dy) in self.ids.iter().zip(dy.values::<T>()?.chunks_exact(width.max(1))) {
            if self.padding == Some(row(*id)) {
                continue;
            }
            let own = &mut dw[row(*id) * width..][..width];
            own.iter_mut().zip(dy).for_each(|(sum, dy)| *sum += *dy);
        }
        Ok([Some(dw)])
    }
}
