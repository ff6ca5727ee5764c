//! Rotary position embeddings: pairs of elements are rotated by an angle that depends on the
//! position.

use candle_core::{Result, Shape, Tensor, bail};

use super::{Order, dispatch};
use crate::cast;
use crate::cpu::real::Real;
use crate::cpu::simd::{self, Kernel};
use crate::graph::device;
use crate::graph::operator::{Input, Operator, apply3};

/// Rotary embedding of halves: element `i` of a head is paired with element `i + d / 2`, as in the
/// Llama of transformers.
///
/// Shapes: `x` is `[b, heads, t, d]`; `cos` and `sin` are `[positions, d / 2]`, or
/// `[b, positions, d / 2]` with angles for each sample; the first `t` positions are used. The
/// result has the type of `x`; `cos` and `sin` may be `f32` with a half-precision `x`. Unlike
/// candle-nn's `rope`, which silently detaches the graph, it has a backward pass for all three
/// inputs.
///
/// # Errors
///
/// Mismatched shapes or dtypes.
pub fn rope(x: &Tensor, cos: &Tensor, sin: &Tensor) -> Result<Tensor> {
    apply([x, cos, sin], Pairs::Halves, Order::HeadsFirst)
}

/// Rotary embedding of neighbours: element `2 i` of a head is paired with element `2 i + 1`, as in
/// the paper and in GPT-J.
///
/// Otherwise like [`rope`].
///
/// # Errors
///
/// Mismatched shapes or dtypes.
pub fn rope_i(x: &Tensor, cos: &Tensor, sin: &Tensor) -> Result<Tensor> {
    apply([x, cos, sin], Pairs::Neighbours, Order::HeadsFirst)
}

/// [`rope`] for `x` of shape `[b, t, heads, d]`, before heads and positions are transposed.
///
/// # Errors
///
/// Mismatched shapes or dtypes.
pub fn rope_thd(x: &Tensor, cos: &Tensor, sin: &Tensor) -> Result<Tensor> {
    apply([x, cos, sin], Pairs::Halves, Order::PositionsFirst)
}

/// The pairing of elements of a head.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Pairs {
    Halves,
    Neighbours,
}

fn apply(inputs: [&Tensor; 3], pairs: Pairs, order: Order) -> Result<Tensor> {
    let [x, cos, sin] = cast("rope", inputs)?;
    let of = Rope::new([x.shape(), cos.shape(), sin.shape()], pairs, order)?;
    if !device::dispatches(&x) {
        return apply3(of, [x, cos, sin]);
    }
    match order {
        Order::HeadsFirst => dispatch::rope(&x, &cos, &sin, pairs),
        Order::PositionsFirst => {
            dispatch::rope(&x.transpose(1, 2)?, &cos, &sin, pairs)?.transpose(1, 2)
        }
    }
}

/// The sizes of one call, checked for consistency.
#[derive(Clone, Copy, Debug)]
struct Rope {
    pairs: Pairs,
    /// Number of rows of `x` with the angles of one sample.
    sample: usize,
    /// Number of successive rows with the same position.
    repeats: usize,
    /// Number of positions of `x`.
    positions: usize,
    /// Number of angles per row.
    half: usize,
    /// Number of angles per sample; 0 if all samples share them.
    angles: usize,
}

impl Rope {
    fn new([x, cos, sin]: [&Shape; 3], pairs: Pairs, order: Order) -> Result<Self> {
        let (samples, first, second, depth) = x.dims4()?;
        let (heads, positions) = match order {
            Order::HeadsFirst => (first, second),
            Order::PositionsFirst => (second, first),
        };
        let half = depth / 2;
        let (own, known) = match *cos.dims() {
            [known, width] if width == half => (0, known),
            [count, known, width] if width == half && count == samples => (known * half, known),
            _ => (0, 0),
        };
        if half == 0 || depth % 2 != 0 || cos != sin || known < positions {
            bail!("rope: an input of shape {x:?} does not fit cos {cos:?} and sin {sin:?}");
        }
        let repeats = if order == Order::HeadsFirst { 1 } else { heads };
        Ok(Self { pairs, sample: heads * positions, repeats, positions, half, angles: own })
    }

    /// Offset of the angles of a row.
    #[inline(always)]
    fn at(&self, row: usize) -> usize {
        let (sample, row) = (row / self.sample, row % self.sample);
        sample * self.angles + row / self.repeats % self.positions * self.half
    }
}

impl Operator<3> for Rope {
    const NAME: &'static str = "rope";

    fn forward<T: Real>(&self, [x, cos, sin]: [Input<'_>; 3]) -> Result<(Vec<T>, Shape)> {
        let mut y = x.values::<T>()?.into_owned();
        let (cos, sin) = (&*cos.values()?, &*sin.values()?);
        simd::run(Turned { of: *self, rows: &mut y, cos, sin, is_back: false });
        Ok((y, x.shape().clone()))
    }

    fn backward<T: Real>(
        &self,
        [x, cos, sin]: [Input<'_>; 3],
        _y: Input<'_>,
        dy: Input<'_>,
    ) -> Result<[Option<Vec<T>>; 3]> {
        let (dy, wants_angles) = (dy.values::<T>()?, cos.is_tracked || sin.is_tracked);
        let (cos, sin) = (&*cos.values()?, &*sin.values()?);
        let [mut dcos, mut dsin] = [None, None];
        if wants_angles {
            let (mut c, mut s) = (vec![T::ZERO; cos.len()], vec![T::ZERO; sin.len()]);
            let x = &*x.values()?;
            self.differentiate_angles(x, &dy, &mut c, &mut s);
            (dcos, dsin) = (Some(c), Some(s));
        }
        let mut dx = dy.into_owned();
        simd::run(Turned { of: *self, rows: &mut dx, cos, sin, is_back: true });
        Ok([Some(dx), dcos, dsin])
    }
}

impl Rope {
    /// Positions in a row of the two elements of a pair.
    #[inline(always)]
    fn pair(&self, i: usize) -> (usize, usize) {
        match self.pairs {
            Pairs::Halves => (i, i + self.half),
            Pairs::Neighbours => (2 * i, 2 * i + 1),
        }
    }

    fn differentiate_angles<T: Real>(&self, x: &[T], dy: &[T], dcos: &mut [T], dsin: &mut [T]) {
        let rows = x.chunks_exact(2 * self.half).zip(dy.chunks_exact(2 * self.half));
        for (row, (x, dy)) in rows.enumerate() {
            let at = self.at(row);
            for i in 0..self.half {
                let (a, b) = self.pair(i);
                dcos[at + i] += dy[a] * x[a] + dy[b] * x[b];
                dsin[at + i] += dy[b] * x[a] - dy[a] * x[b];
            }
        }
    }
}

/// Rotates each row in place.
struct Turned<'a, T> {
    of: Rope,
    rows: &'a mut [T],
    cos: &'a [T],
    sin: &'a [T],
    /// Whether to rotate by the opposite angle, as the gradient does.
    is_back: bool,
}

impl<T: Real> Kernel for Turned<'_, T> {
    #[inline(always)]
    fn run(self) {
        let half = self.of.half;
        let sign = if self.is_back { T::ZERO - T::ONE } else { T::ONE };
        for (row, x) in self.rows.chunks_exact_mut(2 * half).enumerate() {
            let at = self.of.at(row);
            let angles = self.cos[at..at + half].iter().zip(&self.sin[at..at + half]);
            match self.of.pairs {
                Pairs::Halves => {
                    let (left, right) = x.split_at_mut(half);
                    for ((a, b), (cos, sin)) in left.iter_mut().zip(right).zip(angles) {
                        turn(a, b, *cos, sign * *sin);
                    }
                }
                Pairs::Neighbours => {
                    let (pairs, _) = x.as_chunks_mut::<2>();
                    for ([a, b], (cos, sin)) in pairs.iter_mut().zip(angles) {
                        turn(a, b, *cos, sign * *sin);
                    }
                }
            }
        }
    }
}

#[inline(always)]
fn turn<T: Real>(a: &mut T, b: &mut T, cos: T, sin: T) {
    (*a, *b) = (*a * cos - *b * sin, *a * sin + *b * cos);
}
