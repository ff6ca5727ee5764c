//! `matmul` of a transposed batch by a matrix that is broadcast over it, as candle-nn's `Linear` does: candle
//! takes the rows of the whole batch for adjacent in memory, and all but the first sample are others' numbers.
//! Already the values are wrong, and the gradients are those of the right ones.
//!
//! If both have a gradient, how they lie in memory shows which may have it, and the same product made anew that
//! one has.
//!
//! A constant, be it the batch or the matrix, is known by the gradient that candle leaves for it, which is that of
//! a product by the other; and that the product is wrong, by its gradient for the other (`linear.rs`). By a constant
//! matrix, this gradient is to be that of what candle reads, too.

use candle_core::{D, Result, Shape, Tensor};

use super::linear::{agrees, is_belied, noise};
use super::{Graph, Trap, equal, is_apart, is_multiplied, is_telling, leaves, values};

/// What is wrong about node `at`, if it is such a product of `last`.
pub(super) fn find<'a>(graph: &Graph<'a>, at: usize, last: &Tensor) -> Result<Option<Trap<'a>>> {
    let y = graph.nodes[at];
    if !is_multiplied(y) {
        return Ok(None);
    }
    let is_left = |x: &&Tensor| {
        x.rank() == last.rank()
            && is_broadcast(last)
            && x.dtype() == last.dtype()
            && is_mixed_up(x)
            && shape_of(x, last).is_some_and(|shape| shape == *y.shape())
    };
    let mut is_wrong = false;
    for x in graph.firsts(at).filter(is_left) {
        is_wrong |= is_wrong_of(y, x, last)?;
    }
    let has_constant = graph.count_behind(last) + 1 == graph.count_behind(y);
    if is_wrong || (has_constant && is_wrong_with_constant(graph, y, last)?) {
        return Ok(Some(Trap { of: y, complaint: COMPLAINT.to_owned() }));
    }
    Ok(None)
}

const COMPLAINT: &str = "candle's own `matmul` by a matrix that is broadcast, as in candle-nn's `Linear`, \
     mixes up the samples of a transposed batch: make that `force_contiguous()` first";

/// Whether `matrix` is the same one for each of several samples.
fn is_broadcast(matrix: &Tensor) -> bool {
    let batch = matrix.rank().saturating_sub(2);
    matrix.dims()[..batch].iter().product::<usize>() > 1
        && matrix.stride()[..batch].iter().all(|stride| *stride == 0)
}

/// Whether candle takes the rows of all samples of `x` for adjacent when it multiplies them by a matrix that is
/// broadcast, and they are not.
fn is_mixed_up(x: &Tensor) -> bool {
    let ([batch @ .., m, k], [.., skip, row, _]) = (x.dims(), x.stride()) else { return false };
    x.device().is_cpu() && batch.iter().product::<usize>() > 1 && *skip == m * k && row != k
}

/// The shape of the product.
fn shape_of(x: &Tensor, matrix: &Tensor) -> Option<Shape> {
    let ([batch @ .., m, k], [over @ .., rows, n]) = (x.dims(), matrix.dims()) else { return None };
    (batch == over && k == rows).then(|| [batch, &[*m, *n]].concat().into())
}

/// Whether `y` is the product of these, and wrong.
fn is_wrong_of(y: &Tensor, x: &Tensor, matrix: &Tensor) -> Result<bool> {
    let (x, matrix) = (x.detach(), matrix.detach());
    let anew = x.matmul(&matrix)?;
    if !equal(&anew, &y.detach())? || !is_telling(&values(y)?, y.dtype()) {
        return Ok(false);
    }
    is_apart(&anew, &x.force_contiguous()?.matmul(&matrix)?)
}

/// Whether `y` is the product of a constant and `operand`, in whichever order, and wrong.
fn is_wrong_with_constant(graph: &Graph<'_>, y: &Tensor, operand: &Tensor) -> Result<bool> {
    let ([over @ .., m, n], [batch @ .., rows, columns]) = (y.dims(), operand.dims()) else {
        return Ok(false);
    };
    if over != batch || y.dtype() != operand.dtype() || !y.device().is_cpu() {
        return Ok(false);
    }
    if n == columns && is_broadcast(operand) && is_wrong_of_constant(graph, y, operand)? {
        return Ok(true);
    }
    let matrix = [batch, &[*columns, *n]].concat();
    Ok(m == rows
        && is_mixed_up(operand)
        && graph.constants()?.contains(&matrix)
        && is_wrong_by_constant(graph, y, operand)?)
}

/// Whether `y` is the product of a constant by `matrix`, and wrong.
fn is_wrong_of_constant(graph: &Graph<'_>, y: &Tensor, matrix: &Tensor) -> Result<bool> {
    let r = noise(y.shape(), 0)?;
    let (_, constants) = graph.weighed(y, &r)?;
    let of_x = r.to_dtype(y.dtype())?.matmul(&matrix.detach().t()?)?;
    if !leaves(&constants, &of_x)? {
        return Ok(false);
    }
    let one = (2..matrix.rank()).try_fold(matrix.clone(), |matrix, _| matrix.get(0))?;
    is_belied(graph, &rows(y)?, &one)
}

/// Whether `y` is the product of `x` by a constant that is broadcast, and wrong.
fn is_wrong_by_constant(graph: &Graph<'_>, y: &Tensor, x: &Tensor) -> Result<bool> {
    let r = noise(y.shape(), 0)?;
    let (_, constants) = graph.weighed(y, &r)?;
    let of_matrix = x.detach().t()?.matmul(&r.to_dtype(y.dtype())?)?;
    if !leaves(&constants, &of_matrix)? {
        return Ok(false);
    }
    let one = Tensor::eye(x.dim(D::Minus1)?, x.dtype(), x.device())?;
    let read = x.detach().matmul(&one.broadcast_left(&x.dims()[..x.rank() - 2])?)?;
    let (y, x, read) = (rows(y)?.t()?, rows(x)?.t()?, rows(&read)?.t()?);
    Ok(is_belied(graph, &y, &x)? && agrees(graph, &y, &x, &values(&read)?)? != Some(false))
}

/// The rows of all samples, one below the other.
fn rows(t: &Tensor) -> Result<Tensor> {
    t.flatten_to(D::Minus2)
}
