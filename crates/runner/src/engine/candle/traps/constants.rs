//! `scatter` and `scatter_add` of a constant into a tensor that has a gradient.
//!
//! The constant is not in the list of tensors. So the gradient of `x` is asked for where `y` differs from it,
//! and candle leaves that of the constant, which tells where it went. That it was written is believed where
//! `y` is no floating-point sum of `x` and anything, or the same number everywhere; that it was added, where
//! all are such sums and it is no accident.

use candle_core::{Result, Tensor};

use super::scatter::Did;
use super::{Graph, Trap, distance, dot, mantissa, norm, values};

/// What is wrong about the gradient of a tensor that constants were put into.
pub(super) fn find<'a>(graph: &Graph<'a>) -> Result<Option<Trap<'a>>> {
    let mut puts = Vec::new();
    for (y, x) in graph.last_operands() {
        let is_alone = graph.count_behind(y) == graph.count_behind(x) + 1;
        if is_alone && x.shape() == y.shape() && x.dtype() == y.dtype() {
            puts.extend(Put::new(x, y)?);
        }
    }
    if puts.is_empty() {
        return Ok(None);
    }
    let constants = graph.constants()?;
    puts.retain(|put| constants.iter().any(|dims| is_like(dims, put.y.dims())));
    for put in graph.not_right(puts, &|put| put.off())? {
        if let Some(did) = put.is_wrong(graph)?
            && graph.has_gradient(put.x)?
        {
            return Ok(Some(did.trap(put.x)));
        }
    }
    Ok(None)
}

/// A constant put into `x`, which made `y` of it, as far as values tell.
struct Put<'a> {
    x: &'a Tensor,
    y: &'a Tensor,
    mantissa: i32,
    /// The first places where they differ.
    changes: Vec<Change>,
    told: Told,
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
        let kept = of_x.iter().zip(&of_y).filter(|(x, y)| x == y && **x != 0.0).count();
        let is_kept = kept * 16 >= of_x.len();
        // Nor of what is no more, or no less, than a number.
        let is_of_two = |of: fn(f64, f64) -> f64| {
            let first = changes.first().map_or(0.0, |change| change.y);
            of_x.iter().zip(&of_y).all(|(x, y)| *y == of(*x, first))
        };
        let is_clamped = is_of_two(f64::max) || is_of_two(f64::min);
        let told = Told::new(&changes, mantissa);
        let is_put = match told.did() {
            None => false,
            Some(Did::Write) => is_kept && !is_clamped && !is_smooth(&changes),
            Some(Did::Add) => !is_sum(y, &changes)?,
        };
        Ok(is_put.then_some(Self { x, y, mantissa, changes, told }))
    }

    /// A loss without a gradient, if that of `x` is as it ought to be.
    fn off(&self) -> Result<Tensor> {
        let codes = self.codes()?;
        let [of_x, of_y] = [self.x, self.y].map(|t| dot(t, &codes));
        match self.told {
            Told { written: true, added: true } => of_x,
            Told { written: true, .. } => of_y,
            _ => of_y? - of_x?,
        }
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
        let did = single.and_then(|single| Told::new(&single, self.mantissa).did());
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

/// Whether `y` is the sum or the difference of `x` and another tensor that is behind it, as far as these places say.
fn is_sum(y: &Tensor, changes: &[Change]) -> Result<bool> {
    let few = &changes[..changes.len().min(64)];
    let rounding = 2f64.powi(-mantissa(y.dtype()).unwrap_or(0));
    for other in y.sorted_nodes().into_iter().skip(1).filter(|other| other.shape() == y.shape()) {
        let other = other.detach().flatten_all()?;
        let places = few.iter().map(|change| change.place as u32);
        let of_other = values(&other.index_select(&Tensor::from_iter(places, y.device())?, 0)?)?;
        let is_sum = few.iter().zip(of_other).all(|(Change { x, y, .. }, other)| {
            let is_near = |sum: f64| (sum - y).abs() <= rounding * y.abs();
            is_near(x + other) || is_near(x - other) || is_near(other - x)
        });
        if is_sum {
            return Ok(true);
        }
    }
    Ok(false)
}

/// Whether these dimensions differ in one at most.
fn is_like(a: &[usize], b: &[usize]) -> bool {
    a.len() == b.len() && a.iter().zip(b).filter(|(a, b)| a != b).count() <= 1
}

/// What may have been done in places, as far as their numbers tell.
#[derive(Clone, Copy)]
struct Told {
    written: bool,
    added: bool,
}

impl Told {
    fn new(changes: &[Change], mantissa: i32) -> Self {
        let (mut sums, mut odd, mut others) = (0, 0, 0);
        // Random numbers may all be multiples of one, and of others only by chance.
        let all = changes.iter().map(|change| finest(change.y)).min().unwrap_or(0);
        for Change { x, y, .. } in changes {
            if *x == 0.0 || !x.is_finite() || y.is_nan() || y.abs() > x.abs() / 4.0 {
                continue;
            }
            // What takes most of `x` away is half as large at least, and both are multiples of this.
            let unit = x.abs().log2().floor() as i32 - mantissa - 1;
            if unit <= all + 1 {
                continue;
            }
            match y / 2f64.powi(unit) {
                steps if steps.fract() != 0.0 => others += 1,
                steps => {
                    sums += 1;
                    odd += usize::from(steps % 8.0 != 0.0);
                }
            }
        }
        // Random numbers are all such sums once in 2^16; numbers like 0 and 0.5 hardly ever are odd ones.
        let added = sums >= 16 && odd * 2 >= sums;
        Self { written: others > 0 || is_filled(changes, mantissa), added }
    }

    /// What was done, if one number was put into each.
    fn did(self) -> Option<Did> {
        match self {
            Self { written: true, .. } => Some(Did::Write),
            Self { added: true, .. } => Some(Did::Add),
            _ => None,
        }
    }
}

/// Whether `y` is a smooth function of `x` in these places, as an activation's values are.
fn is_smooth(changes: &[Change]) -> bool {
    let few = changes.iter().step_by(changes.len().div_ceil(256).max(1));
    let mut few: Vec<&Change> = few.collect();
    few.sort_unstable_by(|a, b| a.x.total_cmp(&b.x));
    let way: f64 = few.windows(2).map(|two| (two[1].y - two[0].y).abs()).sum();
    let of = |of: fn(f64, f64) -> f64| few.iter().map(|change| change.y).fold(f64::NAN, of);
    let range = of(f64::max) - of(f64::min);
    // Random numbers go a third of their range at each step.
    few.len() >= 32 && range > 0.0 && way <= 3.0 * range
}

/// The exponent of the least power of two that is in a number.
fn finest(v: f64) -> i32 {
    let (exponent, mantissa) = ((v.to_bits() >> 52 & 0x7ff) as i32, v.to_bits() | 1 << 52);
    if v == 0.0 { i32::MAX - 1 } else { exponent - 1023 - 52 + mantissa.trailing_zeros() as i32 }
}

/// Whether `y` is the same number in these places, and what would have to be added is not.
fn is_filled(changes: &[Change], mantissa: i32) -> bool {
    let Some((first, rest)) = changes.split_first() else { return false };
    let difference = |change: &Change| change.y - change.x;
    let bound = difference(first).abs() * 4.0 * 2f64.powi(-mantissa);
    // In two places it may be by chance in 16 bits.
    rest.len() as i32 * mantissa >= 20
        && rest.iter().all(|change| change.y == first.y)
        && rest.iter().any(|change| (difference(change) - difference(first)).abs() > bound)
}

/// How many bits the numbers of places take.
fn code_bits(mantissa: i32) -> u32 {
    (mantissa + 1).min(16).unsigned_abs()
}
