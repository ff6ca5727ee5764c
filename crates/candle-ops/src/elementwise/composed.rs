//! Products, sums, means and concatenation: candle's operators where their gradients are right,
//! with sums of half-precision tensors in `f32`.

use candle_core::shape::{Dim, Dims};
use candle_core::{DType, Result, Shape, Tensor, bail};

use crate::autocast::{promote, sum_dtype, to_dtype};
use crate::cast;
use crate::cpu::real::Real;
use crate::graph::device;
use crate::graph::operator::{Input, Operator, apply2};

/// `a * b`, broadcast and cast like the operands of [`add`](crate::add). The gradient of a
/// broadcast half-precision tensor is computed in `f32`, and rounded once.
///
/// # Errors
///
/// Shapes that do not broadcast; an unsupported dtype.
pub fn mul(a: &Tensor, b: &Tensor) -> Result<Tensor> {
    let [a, b] = promote(cast("mul", [a, b])?)?;
    if device::dispatches(&a) || a.shape() != b.shape() {
        let wide = |x: &Tensor| to_dtype(x, sum_dtype(x.dtype()));
        return to_dtype(&wide(&a)?.broadcast_mul(&wide(&b)?)?, a.dtype());
    }
    apply2(Mul, [a, b])
}

struct Mul;

impl Operator<2> for Mul {
    const NAME: &'static str = "mul";

    fn forward<T: Real>(&self, [a, b]: [Input<'_>; 2]) -> Result<(Vec<T>, Shape)> {
        let (shape, a, b) = (a.shape().clone(), a.values::<T>()?, b.values::<T>()?);
        Ok((a.iter().zip(&*b).map(|(a, b)| *a * *b).collect(), shape))
    }

    fn backward<T: Real>(
        &self,
        [a, b]: [Input<'_>; 2],
        _y: Input<'_>,
        dy: Input<'_>,
    ) -> Result<[Option<Vec<T>>; 2]> {
        let dy = dy.values::<T>()?;
        let times = |other: Input<'_>| {
            let other = other.values::<T>()?;
            Ok::<_, candle_core::Error>(dy.iter().zip(&*other).map(|(dy, v)| *dy * *v).collect())
        };
        let da = a.is_tracked.then(|| times(b)).transpose()?;
        Ok([da, b.is_tracked.then(|| times(a)).transpose()?])
    }
}

/// The sum over one or several dimensions, which are removed. Half-precision tensors are summed in
/// `f32`, and the sum is rounded once; candle's own `sum` adds them up in half precision. Under
/// autocast the result is `f32` where PyTorch's is. Integers are summed in `i64`, the type of the
/// result.
///
/// # Errors
///
/// A dimension that the tensor does not have.
pub fn sum(x: &Tensor, dims: impl Dims) -> Result<Tensor> {
    let [x] = cast("sum", [x])?;
    if x.dtype().is_int() {
        return x.to_dtype(DType::I64)?.sum(dims);
    }
    x.to_dtype(sum_dtype(x.dtype()))?.sum(dims)?.to_dtype(x.dtype())
}

/// Like [`sum`]; the dimensions stay, with a length of 1.
///
/// # Errors
///
/// A dimension that the tensor does not have.
pub fn sum_keepdim(x: &Tensor, dims: impl Dims) -> Result<Tensor> {
    let [x] = cast("sum", [x])?;
    if x.dtype().is_int() {
        return x.to_dtype(DType::I64)?.sum_keepdim(dims);
    }
    x.to_dtype(sum_dtype(x.dtype()))?.sum_keepdim(dims)?.to_dtype(x.dtype())
}

/// The mean over one or several dimensions, which are removed, see [`sum`]. The mean of no elements
/// is NaN.
///
/// # Errors
///
/// A dimension that the tensor does not have; integers.
pub fn mean(x: &Tensor, dims: impl Dims) -> Result<Tensor> {
    let [x] = cast("mean", [x])?;
    refuse_integers(&x)?;
    x.to_dtype(sum_dtype(x.dtype()))?.mean(dims)?.to_dtype(x.dtype())
}

/// Like [`mean`]; the dimensions stay, with a length of 1.
///
/// # Errors
///
/// A dimension that the tensor does not have; integers.
pub fn mean_keepdim(x: &Tensor, dims: impl Dims) -> Result<Tensor> {
    let [x] = cast("mean", [x])?;
    refuse_integers(&x)?;
    x.to_dtype(sum_dtype(x.dtype()))?.mean_keepdim(dims)?.to_dtype(x.dtype())
}

fn refuse_integers(x: &Tensor) -> Result<()> {
    if x.dtype().is_int() {
        bail!("mean: the mean of integers, {:?}, is no integer: cast them first", x.dtype());
    }
    Ok(())
}

/// The tensors one after another along a dimension. Tensors of several floating-point types are
/// cast to the widest one first, as in PyTorch, also under autocast.
///
/// # Errors
///
/// No tensors; shapes that differ in another dimension.
pub fn cat<T: AsRef<Tensor>>(tensors: &[T], dim: impl Dim) -> Result<Tensor> {
    let Some((first, rest)) = tensors.split_first() else { bail!("cat: no tensors") };
    let mut widest = first.as_ref().clone();
    for next in rest {
        [widest, _] = promote([widest, next.as_ref().clone()])?;
    }
    let own = |tensor: &T| promote([tensor.as_ref().clone(), widest.clone()]).map(|[own, _]| own);
    let all = tensors.iter().map(own).collect::<Result<Vec<_>>>()?;
    Tensor::cat(&all, dim)
}
