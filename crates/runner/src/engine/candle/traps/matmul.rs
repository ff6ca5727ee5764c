//! `matmul` of a transposed batch by a matrix that is broadcast over it, as candle-nn's `Linear` does: candle
//! takes the rows of the whole batch for adjacent in memory, and all but the first sample are others' numbers.
//! Already the values are wrong, and the gradients are those of the right ones.
//!
//! How tensors lie in memory shows which may have it, and the same product made anew that one has.

use candle_core::{Result, Tensor};

use super::{Graph, Trap, equal, values};

/// What is wrong about `y`, the first of `behind`, if it is such a product.
pub(super) fn find<'a>(graph: &Graph<'a>, behind: &[&'a Tensor]) -> Result<Option<Trap<'a>>> {
    let [y, matrix, rest @ ..] = behind else { return Ok(None) };
    // The left operand is walked first, so whatever comes after it in the list is behind it.
    let is_left =
        |(i, x): &(usize, &&Tensor)| mixes_up(x, matrix) && graph.count_behind(x) == rest.len() - i;
    for (_, x) in rest.iter().enumerate().filter(is_left) {
        let (x, matrix) = (x.detach(), matrix.detach());
        let anew = x.matmul(&matrix)?;
        if anew.shape() != y.shape() || !equal(&anew, &y.detach())? {
            continue;
        }
        let (anew, truth) = (values(&anew)?, values(&x.contiguous()?.matmul(&matrix)?)?);
        let apart = anew.iter().zip(&truth).map(|(a, t)| (a - t).abs()).sum::<f64>();
        if apart > 1e-2 * truth.iter().map(|v| v.abs()).sum::<f64>() {
            return Ok(Some(Trap { of: y, complaint: COMPLAINT.to_owned() }));
        }
    }
    Ok(None)
}

const COMPLAINT: &str = "candle's own `matmul` by a matrix that is broadcast, as in candle-nn's `Linear`, \
     mixes up the samples of a transposed batch: make that `contiguous()` first";

/// Whether candle takes the rows of all samples of `x` for adjacent when it multiplies them by `matrix`, and
/// they are not.
fn mixes_up(x: &Tensor, matrix: &Tensor) -> bool {
    let rank = x.rank();
    if rank < 3 || matrix.rank() != rank || !x.device().is_cpu() || x.dtype() != matrix.dtype() {
        return false;
    }
    let (dims, strides) = (x.dims(), x.stride());
    let (m, k) = (dims[rank - 2], dims[rank - 1]);
    dims[..rank - 2].iter().product::<usize>() > 1
        && dims[..rank - 2] == matrix.dims()[..rank - 2]
        && k == matrix.dims()[rank - 2]
        && matrix.stride()[..rank - 2].iter().all(|stride| *stride == 0)
        && strides[rank - 3] == m * k
        && strides[rank - 2] != k
}
