//! Copies of elements to other places: `gather`, `pad`, and the frames of `conv3d`.

use candle_core::shape::Dim;
use candle_core::{Result, Shape, Tensor, bail};

use crate::cast;
use crate::cpu::real::Real;
use crate::graph::device::{self, scalar, widened};
use crate::graph::operator::{Input, Operator, apply1};
use crate::state::index_range::integers;

/// The element of `x` at `indices` along `dim`: PyTorch's `gather`.
///
/// Shapes: `indices` (integers) has as many dimensions as `x`, and all but `dim` are at most those
/// of `x`; the result has the shape of `indices`, and is exact. The gradients of an element that is
/// taken several times are summed in order, those of half precision in `f32`; candle's own `gather`
/// sums them in half precision, and has no backward pass for a part of a dimension.
///
/// # Errors
///
/// Mismatched shapes; an index out of range or not an integer; an unsupported dtype.
pub fn gather(x: &Tensor, indices: &Tensor, dim: impl Dim) -> Result<Tensor> {
    let [x] = cast("gather", [x])?;
    let dim = dim.to_index(x.shape(), "gather")?;
    let (dims, taken) = (x.dims(), indices.dims());
    let fits = |i: usize| i == dim || taken[i] <= dims[i];
    if indices.rank() != x.rank() || !(0..x.rank()).all(fits) {
        bail!("gather: indices of shape {taken:?} along dimension {dim} of {dims:?}");
    }
    let values = integers("gather", indices)?;
    let position = |(i, index): (usize, &i64)| {
        if !(0..dims[dim] as i64).contains(index) {
            bail!("gather: index {index} is out of range for {} positions", dims[dim]);
        }
        let (mut rest, mut stride, mut at) = (i, 1, 0);
        for axis in (0..taken.len()).rev() {
            at += stride * if axis == dim { *index as usize } else { rest % taken[axis] };
            rest /= taken[axis];
            stride *= dims[axis];
        }
        Ok(at)
    };
    let from = values.iter().enumerate().map(position).collect::<Result<_>>()?;
    let block = x.elem_count();
    Take { from, block, run: 1, fill: 0.0 }.apply(&x, indices.shape().clone())
}

/// Values of [`pad`] outside of a tensor. Follows: `torch.nn.functional.pad`.
#[derive(Clone, Copy, Debug, PartialEq)]
#[non_exhaustive]
pub enum PadMode {
    /// A constant.
    Constant(f64),
    /// Mirrored at the first and last element, which are not repeated.
    Reflect,
    /// The first and the last element.
    Replicate,
}

/// Adds elements before and after the last dimensions of `x`. `padding` has the numbers of both
/// for each of them, in the order of dimensions (PyTorch's begins with the last one).
///
/// Exact. The gradient of an element is the sum of those of its copies, of half precision in `f32`.
///
/// ```
/// use candle_core::{Device, Tensor};
/// use candle_ops::{PadMode, pad};
///
/// let x = Tensor::new(&[[1f32, 2., 3.], [4., 5., 6.]], &Device::Cpu)?;
/// let y = pad(&x, &[(0, 1), (2, 0)], PadMode::Reflect)?;
/// let first = [3f32, 2., 1., 2., 3.];
/// assert_eq!(y.to_vec2::<f32>()?, [first, [6., 5., 4., 5., 6.], first]);
/// # Ok::<(), candle_core::Error>(())
/// ```
///
/// # Errors
///
/// More dimensions than `x` has; a reflected padding that is not less than its dimension; nothing
/// to replicate; an unsupported dtype.
pub fn pad(x: &Tensor, padding: &[(usize, usize)], mode: PadMode) -> Result<Tensor> {
    let [x] = cast("pad", [x])?;
    let Some(leading) = x.rank().checked_sub(padding.len()) else {
        bail!("pad: {} paddings of a tensor of shape {:?}", padding.len(), x.shape());
    };
    // Dimensions after the last padded one are copied in runs.
    let padded =
        padding.iter().rposition(|both| *both != (0, 0)).map_or(leading, |i| leading + i + 1);
    let (dims, mut shape) = (x.dims(), x.dims().to_vec());
    let run = dims[padded..].iter().product::<usize>();
    let mut from = vec![0];
    for (dim, &(before, after)) in (leading..padded).zip(padding) {
        let len = dims[dim];
        let padded = before.checked_add(len).and_then(|sum| sum.checked_add(after));
        let Some(padded) = padded.filter(|sum| *sum <= isize::MAX as usize) else {
            bail!("pad: a padding of {before} and {after} of a dimension of {len} overflows");
        };
        shape[dim] = padded;
        let at = (0..shape[dim]).map(|i| source(i, before, len, mode));
        let at = at.collect::<Result<Vec<_>>>()?;
        let within = |outer: usize| {
            at.iter().map(move |at| {
                if outer == OUTSIDE || *at == OUTSIDE { OUTSIDE } else { outer * len + at }
            })
        };
        from = from.into_iter().flat_map(within).collect();
    }
    let block = dims[leading..].iter().product();
    let fill = if let PadMode::Constant(value) = mode { value } else { 0.0 };
    Take { from, block, run, fill }.apply(&x, shape.into())
}

/// Index of the element at `i`, which is `before` more.
fn source(i: usize, before: usize, len: usize, mode: PadMode) -> Result<usize> {
    let i = i as isize - before as isize;
    let last = len as isize - 1;
    let at = match mode {
        PadMode::Constant(_) if i < 0 || i > last => return Ok(OUTSIDE),
        PadMode::Constant(_) => i,
        PadMode::Replicate => i.min(last).max(0),
        PadMode::Reflect if i < 0 => -i,
        PadMode::Reflect if i > last => 2 * last - i,
        PadMode::Reflect => i,
    };
    if at < 0 || at > last {
        bail!(
            "pad: {mode:?} by {} does not fit a dimension of {len}",
            if i < 0 { -i } else { i - last }
        );
    }
    Ok(at as usize)
}

/// Copies runs of elements from places within blocks.
pub(crate) struct Take {
    /// Index in its block of each run of the result, in runs; or [`OUTSIDE`].
    pub(crate) from: Vec<usize>,
    /// Number of elements of a block of the input.
    pub(crate) block: usize,
    /// Number of elements of a run.
    pub(crate) run: usize,
    /// Value of what is from outside.
    pub(crate) fill: f64,
}

/// An index of no element.
pub(crate) const OUTSIDE: usize = usize::MAX;

impl Take {
    /// The result, whose blocks together have this shape.
    pub(crate) fn apply(self, x: &Tensor, shape: Shape) -> Result<Tensor> {
        if device::dispatches(x) {
            return self.composed(x, shape);
        }
        apply1(Shaped(self, shape), [x.clone()])
    }

    /// On a GPU.
    fn composed(&self, x: &Tensor, shape: Shape) -> Result<Tensor> {
        if shape.elem_count() == 0 {
            return Tensor::zeros(shape, x.dtype(), x.device());
        }
        let [wide] = widened([x])?;
        let runs = self.block / self.run;
        let blocks = x.elem_count().checked_div(self.block).unwrap_or(1);
        let wide = wide.reshape((blocks, runs, self.run))?;
        let fill = scalar(self.fill, &wide)?.broadcast_as((blocks, 1, self.run))?;
        let wide = Tensor::cat(&[&wide, &fill.contiguous()?], 1)?;
        // Tensors have fewer than 2^32 elements.
        let from = self.from.iter().map(|at| (*at).min(runs) as u32).collect::<Vec<_>>();
        let from = Tensor::from_vec(from, self.from.len(), x.device())?;
        wide.index_select(&from, 1)?.reshape(shape)?.to_dtype(x.dtype())
    }
}

/// With the shape of the result.
struct Shaped(Take, Shape);

impl Operator<1> for Shaped {
    const NAME: &'static str = "take";

    fn forward<T: Real>(&self, [x]: [Input<'_>; 1]) -> Result<(Vec<T>, Shape)> {
        let (Take { from, block, run, fill }, shape) = (&self.0, &self.1);
        let x = x.values::<T>()?;
        let mut y = vec![T::of(*fill); shape.elem_count()];
        let out = (from.len() * run).max(1);
        for (i, y) in y.chunks_exact_mut(out).enumerate() {
            let x = &x[i * block..][..*block];
            for (y, at) in y.chunks_exact_mut(*run).zip(from).filter(|(_, at)| **at != OUTSIDE) {
                y.copy_from_slice(&x[at * run..][..*run]);
            }
        }
        Ok((y, shape.clone()))
    }

    fn backward<T: Real>(
        &self,
        [x]: [Input<'_>; 1],
        _y: Input<'_>,
        dy: Input<'_>,
    ) -> Result<[Option<Vec<T>>; 1]> {
        let Take { from, block, run, .. } = &self.0;
        let mut dx = vec![T::ZERO; x.shape().elem_count()];
        let out = (from.len() * run).max(1);
        for (i, dy) in dy.values::<T>()?.chunks_exact(out).enumerate() {
            let dx = &mut dx[i * block..][..*block];
            for (dy, at) in dy.chunks_exact(*run).zip(from).filter(|(_, at)| **at != OUTSIDE) {
                dx[at * run..][..*run].iter_mut().zip(dy).for_each(|(sum, dy)| *sum += *dy);
            }
        }
        Ok([Some(dx)])
    }
}
