//! `scatter` and `scatter_add` into a tensor that has a gradient, each of which has the other's backward:
//! what `scatter` overwrites is given a gradient, and what `scatter_add` adds to is given none.
//!
//! Where they write is in integers, which no list has. But a gradient that is constant along the dimension
//! they work on is, wherever they write, as constant for what they write. So `y`, `x` and `z` are told by two
//! questions, each with an answer of its own: do the values say that `z` was written into `x`, or added to it
//! (its sums along the dimension), and is the gradient that of writing, or that of adding? It is wrong if
//! the values say one and the gradient the other.
//!
//! A constant `z` is not in the list either. There the gradient of `x` is asked for where `y` differs from it,
//! and candle leaves that of the constant, which tells where it went. That it was written is believed where
//! `y` is no floating-point sum of `x` and anything, or the same number everywhere; that it was added, where
//! all are such sums and it is no accident.

use std::collections::HashMap;
use std::rc::Rc;

use candle_core::{D, DType, Result, Tensor, TensorId};

use super::{Graph, Trap, distance, dot, mantissa, norm, values};

/// What was done to a tensor.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Did {
    Write,
    Add,
}

impl Did {
    fn trap(self, of: &Tensor) -> Trap<'_> {
        let complaint = match self {
            Self::Write => {
                "candle's own `scatter` gives what it overwrites a gradient too: use \
                 runner::engine::candle::ops::scatter"
            }
            Self::Add => {
                "candle's own `scatter_add` gives what it adds to no gradient: use \
                 runner::engine::candle::ops::scatter_add"
            }
        };
        Trap { of, complaint: complaint.to_owned() }
    }
}

/// What is wrong about the gradient of a tensor that `y`, the first of `behind`, was made of by putting another
/// into it.
pub(super) fn find<'a>(
    graph: &Graph<'a>,
    behind: &[&'a Tensor],
    lines: &mut Lines,
) -> Result<Option<Trap<'a>>> {
    let [y, last, ..] = behind else { return Ok(None) };
    let Some(mantissa) = mantissa(y.dtype()) else { return Ok(None) };
    let is_like_y = |t: &Tensor| t.shape() == y.shape() && t.dtype() == y.dtype();
    let pair = |(i, other): (usize, &&'a Tensor)| {
        // `x` is walked first, so all that comes after it in the list is behind it; unless `z` was there
        // already, which is not looked for among tensors of the same shape: there are too many.
        if is_like_y(other) && graph.count_behind(other) == behind.len() - i {
            Some((*other, *last))
        } else {
            (is_like_y(last) && !is_like_y(other)).then_some((*last, *other))
        }
    };
    let pairs: Vec<_> = behind.iter().enumerate().skip(2).filter_map(pair).collect();
    for dim in 0..y.rank() {
        let mut pairs = pairs.iter().filter(|(_, z)| fits(y, z, dim)).peekable();
        if pairs.peek().is_none() {
            continue;
        }
        let (of_y, of_last) = (lines.of(y, dim)?, lines.of(last, dim)?);
        for (x, z) in pairs {
            let is_last = z.id() == last.id();
            let of_other = lines.of(if is_last { x } else { z }, dim)?;
            let (of_x, of_z) = if is_last { (&of_other, &of_last) } else { (&of_last, &of_other) };
            let Some(did) = by_values(of_x, &of_y, of_z, mantissa) else { continue };
            // Zeros are in many tensors.
            let is_zeros = !is_last && of_x.iter().zip(&*of_y).all(|(x, y)| y.is_zeroed(x));
            if !is_zeros && is_wrong(graph, did, [x, y, z], dim)? {
                return Ok(Some(did.trap(x)));
            }
        }
    }
    Ok(None)
}

/// Whether `z` can be put into `y` along `dim`.
fn fits(y: &Tensor, z: &Tensor, dim: usize) -> bool {
    let dims = y.dims().iter().zip(z.dims()).enumerate();
    y.rank() == z.rank()
        && y.dtype() == z.dtype()
        && dims.into_iter().all(|(i, (y, z))| i == dim || y == z)
}

/// A few lines of tensors along a dimension, each read once.
#[derive(Default)]
pub(super) struct Lines(HashMap<(TensorId, usize), Rc<[Line]>>);

impl Lines {
    fn of(&mut self, t: &Tensor, dim: usize) -> Result<Rc<[Line]>> {
        if let Some(lines) = self.0.get(&(t.id(), dim)) {
            return Ok(Rc::clone(lines));
        }
        let mut few = t.detach();
        for other in (0..t.rank()).filter(|other| *other != dim) {
            few = few.narrow(other, 0, few.dim(other)?.min(2))?;
        }
        let few = values(&few.transpose(dim, D::Minus1)?)?;
        let lines: Rc<[Line]> = few.chunks(t.dim(dim)?.max(1)).map(Line::new).collect();
        self.0.insert((t.id(), dim), Rc::clone(&lines));
        Ok(lines)
    }
}

struct Line {
    values: Vec<f64>,
    sum: f64,
    /// The sum of absolute values.
    size: f64,
}

impl Line {
    fn new(values: &[f64]) -> Self {
        let size = values.iter().map(|v| v.abs()).sum();
        Self { values: values.to_vec(), sum: values.iter().sum(), size }
    }

    /// Whether this is `x`, or zero where it is not.
    fn is_zeroed(&self, x: &Self) -> bool {
        self.values.iter().zip(&x.values).all(|(y, x)| y == x || *y == 0.0)
    }
}

/// What `z` did to `x` if `y` is what came of it, by their lines; nothing if it may be both.
fn by_values(x: &[Line], y: &[Line], z: &[Line], mantissa: i32) -> Option<Did> {
    let rounding = 8.0 * 2f64.powi(-mantissa);
    let (mut written, mut added) = (true, true);
    let (mut changed, mut kept, mut sure, mut astray) = (false, false, false, false);
    for ((of_x, of_y), of_z) in x.iter().zip(y).zip(z) {
        let size = of_x.size + of_y.size + of_z.size;
        added &= (of_y.sum - of_x.sum - of_z.sum).abs() <= rounding * size;
        sure |= of_z.sum.abs() > 4.0 * rounding * size;
        let (x, y, z) = (&of_x.values, &of_y.values, &of_z.values);
        written &= y.iter().zip(x).all(|(y, x)| y == x || z.contains(y));
        if !written && !added {
            return None;
        }
        changed |= x != y;
        kept |= y.iter().zip(x).any(|(y, x)| y == x);
        // A value added to a place that is not its own: more than a sum of two tensors.
        let is_sum = |p: usize, z: &f64| (y[p] - x[p] - z).abs() <= rounding / 8.0 * y[p].abs();
        let is_astray =
            |p: usize| !z.get(p).is_some_and(|z| is_sum(p, z)) && z.iter().any(|z| is_sum(p, z));
        astray |= (0..y.len()).any(|p| y[p] != x[p] && is_astray(p));
    }
    match (written, added) {
        (true, false) if changed && kept => Some(Did::Write),
        (false, true) if sure && astray => Some(Did::Add),
        _ => None,
    }
}

/// Whether the gradient of `x` is that of the other.
fn is_wrong(graph: &Graph<'_>, did: Did, [x, y, z]: [&Tensor; 3], dim: usize) -> Result<bool> {
    let mut one = y.dims().to_vec();
    one[dim] = 1;
    // Powers of two, and small: exact in every type.
    let scale = 2f32.powi(-(y.elem_count().ilog2() as i32) / 2);
    let weights = (0..one.iter().product()).map(|i: usize| scale * (1.0 + (i * 5 % 7) as f32));
    let weights = Tensor::from_iter(weights, y.device())?.reshape(one)?;
    let r = weights.broadcast_as(y.shape())?.contiguous()?;
    let to_z = dot(z, &weights.broadcast_as(z.shape())?.contiguous()?)?;
    let as_is = graph.gradients(&dot(y, &r)?)?;
    let added = graph.gradients(&(dot(x, &r)? + &to_z)?)?;
    let kept = y.detach().eq(&x.detach())?.to_dtype(DType::F32)?;
    // Where all lines are written to alike, a zero added to one of them hides nothing.
    let others = (0..y.rank()).filter(|other| *other != dim);
    let alike = others.into_iter().try_fold(kept.clone(), |kept, other| kept.min_keepdim(other))?;
    for kept in [kept.clone(), alike.broadcast_as(y.shape())?] {
        let written = graph.gradients(&(dot(x, &(&r * kept)?)? + &to_z)?)?;
        let (seen, truth) = match did {
            Did::Write => (&added, &written),
            Did::Add => (&written, &added),
        };
        let apart = distance(seen, truth);
        if apart <= 1e-3 * norm(truth) {
            continue;
        }
        let [wrong, right] = [seen, truth].map(|other| distance(&as_is, other) < 0.02 * apart);
        if wrong || right {
            return Ok(wrong);
        }
    }
    Ok(false)
}

/// What is wrong about the gradient of a tensor that constants were put into.
pub(super) fn find_of_constants<'a>(graph: &Graph<'a>) -> Result<Option<Trap<'a>>> {
    let mut puts = Vec::new();
    for (y, x) in graph.last_operands() {
        if x.shape() == y.shape() && x.dtype() == y.dtype() {
            puts.extend(Put::new(x, y)?);
        }
    }
    if !puts.is_empty() {
        let constants = graph.constants()?;
        puts.retain(|put| constants.iter().any(|dims| is_like(dims, put.y.dims())));
    }
    for put in with_gradient(graph, puts)? {
        if let Some(did) = put.is_wrong(graph)? {
            return Ok(Some(did.trap(put.x)));
        }
    }
    Ok(None)
}

/// Those that have a gradient where they changed something. Most of what looks like one (ReLU) has none, and is
/// known as such all at once.
fn with_gradient<'a>(graph: &Graph<'_>, mut puts: Vec<Put<'a>>) -> Result<Vec<Put<'a>>> {
    let codes: Vec<Tensor> = puts.iter().map(Put::codes).collect::<Result<_>>()?;
    let mut losses = puts.iter().zip(&codes).map(|(put, codes)| dot(put.y, codes));
    let Some(first) = losses.next() else { return Ok(puts) };
    let loss = losses.try_fold(first?, |sum, loss| sum + loss?)?;
    let (gradients, constants) = graph.backward(&loss)?;
    let mut silent = norm(&gradients) == 0.0;
    for id in constants.get_ids().filter(|id| codes.iter().all(|codes| codes.id() != **id)) {
        if let Some(gradient) = constants.get_id(*id) {
            silent &= values(gradient)?.iter().all(|v| *v == 0.0);
        }
    }
    if silent {
        return Ok(Vec::new());
    }
    if puts.len() > 1 {
        let half = puts.split_off(puts.len() / 2);
        puts = with_gradient(graph, puts)?;
        puts.extend(with_gradient(graph, half)?);
    }
    Ok(puts)
}

/// A constant put into `x`, which made `y` of it, as far as values tell.
struct Put<'a> {
    x: &'a Tensor,
    y: &'a Tensor,
    mantissa: i32,
    /// The first places where they differ.
    changes: Vec<Change>,
}

#[derive(Clone, Copy)]
struct Change {
    place: usize,
    x: f64,
    y: f64,
}

impl<'a> Put<'a> {
    fn new(x: &'a Tensor, y: &'a Tensor) -> Result<Option<Self>> {
        let Some(mantissa) = mantissa(y.dtype()) else { return Ok(None) };
        let (of_x, of_y) = (values(x)?, values(y)?);
        let pairs = of_x.iter().zip(&of_y).enumerate();
        let changes = pairs.map(|(place, (x, y))| Change { place, x: *x, y: *y });
        let changes = changes.filter(|Change { x, y, .. }| x != y);
        let changes: Vec<_> = changes.take(1 << code_bits(mantissa)).collect();
        // Of a tensor that was overwritten whole, nothing is known.
        let any_kept = of_x.iter().zip(&of_y).any(|(x, y)| x == y);
        let did = by_numbers(&changes, mantissa).filter(|did| any_kept || *did == Did::Add);
        Ok(did.map(|_| Self { x, y, mantissa, changes }))
    }

    /// A number of its own for each place where something changed, exact in the tensor's type.
    fn codes(&self) -> Result<Tensor> {
        let mut codes = vec![0f32; self.y.elem_count()];
        for (i, change) in self.changes.iter().enumerate() {
            codes[change.place] = (i + 1) as f32 * self.code_unit();
        }
        Tensor::from_vec(codes, self.y.shape(), self.y.device())
    }

    fn code_unit(&self) -> f32 {
        2f32.powi(-(code_bits(self.mantissa) as i32))
    }

    /// What was done, if the gradient of `x` is that of the other.
    fn is_wrong(&self, graph: &Graph<'_>) -> Result<Option<Did>> {
        let codes = self.codes()?;
        let (as_is, constants) = graph.weighed(self.y, &codes)?;
        let (through, of_x) = graph.weighed(self.x, &codes)?;
        let suspect = if norm(&as_is) == 0.0 { Did::Add } else { Did::Write };
        let is_all = distance(&as_is, &through) < 0.02 * norm(&through);
        if norm(&through) == 0.0 || (suspect == Did::Write && !is_all) {
            return Ok(None);
        }
        // What `y` was made by gave to others than `x`.
        let mut given = Vec::new();
        for (id, gradient) in
            constants.get_ids().filter_map(|id| Some((*id, constants.get_id(*id)?)))
        {
            let gradient = match of_x.get_id(id) {
                Some(by_x) if suspect == Did::Write => (gradient - by_x)?,
                _ => gradient.clone(),
            };
            let numbers = values(&gradient)?;
            if numbers.iter().any(|v| *v != 0.0) {
                given.push((gradient.dims().to_vec(), numbers));
            }
        }
        let [(dims, numbers)] = given.as_slice() else { return Ok(None) };
        let single = (0..dims.len()).find_map(|dim| self.single(dims, numbers, dim));
        let did = single.and_then(|single| by_numbers(&single, self.mantissa));
        Ok(did.filter(|did| *did == suspect))
    }

    /// Where a constant of these dimensions and this gradient went along `dim`: those changes that one number of
    /// it made. None if it did not go along `dim`, or went straight to its own place, as an operand that is no
    /// index's does.
    fn single(&self, dims: &[usize], gradient: &[f64], dim: usize) -> Option<Vec<Change>> {
        let own = self.y.dims();
        if own.len() != dims.len() || (0..own.len()).any(|i| i != dim && own[i] != dims[i]) {
            return None;
        }
        let right: usize = own[dim + 1..].iter().product();
        let line = |place: usize, len: usize| (place / (right * len), place % right);
        let mut counts = vec![0; self.changes.len()];
        let mut straight = own == dims;
        for (at, v) in gradient.iter().enumerate().filter(|(_, v)| **v != 0.0) {
            let code = v / f64::from(self.code_unit());
            let index = (code.fract() == 0.0 && code >= 1.0).then(|| code as usize - 1)?;
            let place = self.changes.get(index)?.place;
            if line(at, dims[dim]) != line(place, own[dim]) {
                return None;
            }
            straight &= at == place;
            counts[index] += 1;
        }
        let once = self.changes.iter().zip(counts).filter(|(_, count)| *count == 1);
        (!straight).then(|| once.map(|(change, _)| *change).collect())
    }
}

/// Whether these dimensions differ in one at most.
fn is_like(a: &[usize], b: &[usize]) -> bool {
    a.len() == b.len() && a.iter().zip(b).filter(|(a, b)| a != b).count() <= 1
}

/// What was done in these places, each of which one number was put into.
fn by_numbers(changes: &[Change], mantissa: i32) -> Option<Did> {
    let (mut sums, mut odd, mut others) = (0, 0, 0);
    for Change { x, y, .. } in changes {
        if *x == 0.0 || !x.is_finite() || y.is_nan() || y.abs() > x.abs() / 4.0 {
            continue;
        }
        // What takes most of `x` away is half as large at least, and both are multiples of this.
        let unit = 2f64.powi(x.abs().log2().floor() as i32 - mantissa - 1);
        match y / unit {
            steps if steps.fract() != 0.0 => others += 1,
            steps => {
                sums += 1;
                odd += usize::from(steps % 8.0 != 0.0);
            }
        }
    }
    if others > 0 || is_filled(changes, mantissa) {
        Some(Did::Write)
    } else {
        // Random numbers are all such sums once in 2^16; numbers like 0 and 0.5 hardly ever are odd ones.
        (sums >= 16 && odd * 2 >= sums).then_some(Did::Add)
    }
}

/// Whether `y` is the same number in these places, and what would have to be added is not.
fn is_filled(changes: &[Change], mantissa: i32) -> bool {
    let Some((first, rest)) = changes.split_first() else { return false };
    let difference = |change: &Change| change.y - change.x;
    let bound = difference(first).abs() * 4.0 * 2f64.powi(-mantissa);
    rest.iter().all(|change| change.y == first.y)
        && rest.iter().any(|change| (difference(change) - difference(first)).abs() > bound)
}

/// How many bits the numbers of places take.
fn code_bits(mantissa: i32) -> u32 {
    (mantissa + 1).min(16).unsigned_abs()
}
