//! `matmul` of a transposed batch by a matrix that is broadcast over it, as candle-nn's `Linear` does: candle
//! takes the rows of the whole batch for adjacent in memory, and all but the first sample are others' numbers.
//! Already the values are wrong, and the gradients are those of the right ones.
//!
//! If both have a gradient, how they lie in memory shows which may have it, and the same product made anew that
//! one has.
//!
//! A constant batch is known by the gradient that candle leaves for it, which is that of a product by the
//! matrix; and that the product is wrong, by its gradient for the matrix (`linear.rs`).
//!
//! By a constant matrix, the columns of the product are sums of the batch's columns. Of more rows than a row is
//! long, they are sums of the right ones or of those that candle reads, and hardly of both.

use candle_core::{DType, Result, Shape, Tensor};

use super::linear::{is_belied, noise};
use super::{Graph, Trap, equal, leaves, values};

/// What is wrong about `y`, the first of `behind`, if it is such a product.
pub(super) fn find<'a>(graph: &Graph<'a>, behind: &[&'a Tensor]) -> Result<Option<Trap<'a>>> {
    let [y, last, rest @ ..] = behind else { return Ok(None) };
    // The left operand is walked first, so whatever comes after it in the list is behind it.
    let is_left = |(i, x): &(usize, &&Tensor)| {
        x.rank() == last.rank()
            && is_broadcast(last)
            && x.dtype() == last.dtype()
            && is_mixed_up(x)
            && shape_of(x, last).is_some_and(|shape| shape == *y.shape())
            && graph.count_behind(x) == rest.len() - i
    };
    let mut is_wrong = false;
    for (_, x) in rest.iter().enumerate().filter(is_left) {
        is_wrong |= is_wrong_of(y, x, last)?;
    }
    let has_constant = graph.count_behind(last) + 1 == behind.len();
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
    if !equal(&anew, &y.detach())? {
        return Ok(false);
    }
    let (anew, truth) = (values(&anew)?, values(&x.force_contiguous()?.matmul(&matrix)?)?);
    let apart = anew.iter().zip(&truth).map(|(a, t)| (a - t).abs()).sum::<f64>();
    Ok(apart > 1e-2 * truth.iter().map(|v| v.abs()).sum::<f64>())
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
        && is_wrong_by_constant(y, operand)?)
}

/// Whether `y` is the product of a constant by `matrix`, and wrong.
fn is_wrong_of_constant(graph: &Graph<'_>, y: &Tensor, matrix: &Tensor) -> Result<bool> {
    let r = noise(y.shape(), 0)?;
    let (_, constants) = graph.weighed(y, &r)?;
    let of_x = r.to_dtype(y.dtype())?.matmul(&matrix.detach().t()?)?;
    Ok(leaves(&constants, &of_x)? && is_belied(graph, y, matrix)?)
}

/// Whether the columns of `y` are sums of those that candle reads of `x`, and not of its own.
fn is_wrong_by_constant(y: &Tensor, x: &Tensor) -> Result<bool> {
    let (n, k) = (y.dims()[y.rank() - 1], x.dims()[x.rank() - 1]);
    let rows = y.elem_count() / n.max(1);
    // Beyond, a wrong product would cost the first step seconds.
    if rows <= k || k > 1024 {
        return Ok(false);
    }
    let x = x.detach();
    let one = Tensor::eye(k, x.dtype(), x.device())?;
    let read = x.matmul(&one.broadcast_left(&x.dims()[..x.rank() - 2])?)?;
    // A few sums of them stand for all columns.
    let weights = noise(&(n, 4).into(), 0)?;
    let sums = y.detach().to_dtype(DType::F32)?.reshape((rows, n))?.matmul(&weights)?;
    let taken = rows.min(k + 16);
    let lines = |t: &Tensor| -> Result<Vec<Vec<f64>>> {
        let values = values(t)?;
        let columns = values.len() / rows;
        let at = |line: usize| line * rows / taken * columns;
        let column = |c| (0..taken).map(|line| values[at(line) + c]).collect();
        Ok((0..columns).map(column).collect())
    };
    let sums = lines(&sums)?;
    let (of_read, of_own) = (beyond(lines(&read)?, &sums), beyond(lines(&x)?, &sums));
    let noticed = if y.dtype().size_in_bytes() < 4 { 2e-2 } else { 1e-3 };
    Ok(of_own > noticed && of_read < 0.1 * of_own)
}

/// How much of `sums` no sums of `columns` are, as a share of their length.
fn beyond(columns: Vec<Vec<f64>>, sums: &[Vec<f64>]) -> f64 {
    let square = |v: &[f64]| v.iter().map(|v| v * v).sum::<f64>();
    let mut base: Vec<Vec<f64>> = Vec::new();
    // Twice, as the first time rounds.
    let reduce = |v: &mut [f64], base: &[Vec<f64>]| {
        for b in base.iter().chain(base) {
            let share: f64 = v.iter().zip(b).map(|(v, b)| v * b).sum();
            v.iter_mut().zip(b).for_each(|(v, b)| *v -= share * b);
        }
    };
    for mut column in columns {
        let before = square(&column).sqrt();
        reduce(&mut column, &base);
        let after = square(&column).sqrt();
        if after > 1e-6 * before {
            column.iter_mut().for_each(|c| *c /= after);
            base.push(column);
        }
    }
    let whole: f64 = sums.iter().map(|sum| square(sum)).sum();
    let rest = sums.iter().map(|sum| {
        let mut rest = sum.clone();
        reduce(&mut rest, &base);
        square(&rest)
    });
    (rest.sum::<f64>() / whole).sqrt()
}
