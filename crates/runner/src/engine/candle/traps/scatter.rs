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

use std::cell::OnceCell;
use std::collections::{HashMap, HashSet};
use std::rc::Rc;

use candle_core::{D, DType, Result, Tensor, TensorId};

use super::linear::noise;
use super::{Graph, Trap, bits, distance, dot, equal, mantissa, norm, values};

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

/// What may have made `y`, the first of `behind`, of two others.
pub(super) fn suspects<'a>(
    graph: &Graph<'a>,
    behind: &[&'a Tensor],
    lines: &mut Lines,
) -> Result<Vec<Suspect<'a>>> {
    let mut suspects = Vec::new();
    let [y, last, ..] = *behind else { return Ok(suspects) };
    let is_like_y = |t: &Tensor| t.shape() == y.shape() && t.dtype() == y.dtype();
    let pair = |(i, other): (usize, &&'a Tensor)| {
        // `x` is walked first, so all that comes after it in the list is behind it; unless `z` was there
        // already, which is not looked for among tensors of the same shape: there are too many.
        if is_like_y(other) && graph.count_behind(other) == behind.len() - i {
            Some((*other, last))
        } else {
            (is_like_y(last) && !is_like_y(other)).then_some((last, *other))
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
            let Some(did) = by_values(of_x, &of_y, of_z, y.dtype()) else { continue };
            // Zeros are in many tensors.
            if is_last || !of_x.iter().zip(&*of_y).all(|(x, y)| y.is_zeroed(x)) {
                suspects.push(Suspect { did, x, y, z, dim });
            }
        }
    }
    Ok(suspects)
}

/// What is wrong about the gradient of a tensor that another was put into.
pub(super) fn find<'a>(graph: &Graph<'a>, suspects: Vec<Suspect<'a>>) -> Result<Option<Trap<'a>>> {
    for suspect in graph.not_right(suspects, &|suspect| suspect.off())? {
        if suspect.is_wrong(graph)? && graph.has_gradient(suspect.x)? {
            return Ok(Some(suspect.did.trap(suspect.x)));
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

/// Some lines of tensors along a dimension, each read once.
#[derive(Default)]
pub(super) struct Lines {
    read: HashMap<(TensorId, usize), Rc<[Line]>>,
}

impl Lines {
    fn of(&mut self, t: &Tensor, dim: usize) -> Result<Rc<[Line]>> {
        if let Some(lines) = self.read.get(&(t.id(), dim)) {
            return Ok(Rc::clone(lines));
        }
        // In 16 bits more of them are so by chance.
        let all: f64 = if t.dtype().size_in_bytes() < 4 { 64.0 } else { 16.0 };
        let count = all.powf(1.0 / t.rank().saturating_sub(1).max(1) as f64).ceil() as usize;
        let mut few = t.detach();
        for other in (0..t.rank()).filter(|other| *other != dim) {
            few = few.narrow(other, 0, few.dim(other)?.min(count))?;
        }
        let few = values(&few.transpose(dim, D::Minus1)?)?;
        let lines: Rc<[Line]> = few.chunks(t.dim(dim)?.max(1)).map(Line::new).collect();
        self.read.insert((t.id(), dim), Rc::clone(&lines));
        Ok(lines)
    }
}

struct Line {
    values: Vec<f64>,
    sorted: OnceCell<Vec<f64>>,
    sum: f64,
    /// The sum of absolute values.
    size: f64,
}

impl Line {
    fn new(values: &[f64]) -> Self {
        let size = values.iter().map(|v| v.abs()).sum();
        let sorted = OnceCell::new();
        Self { values: values.to_vec(), sorted, sum: values.iter().sum(), size }
    }

    fn sorted(&self) -> &[f64] {
        self.sorted.get_or_init(|| {
            let mut sorted: Vec<f64> =
                self.values.iter().copied().filter(|v| !v.is_nan()).collect();
            sorted.sort_unstable_by(f64::total_cmp);
            sorted
        })
    }

    /// Whether a value is as near to this.
    fn has(&self, value: f64, within: f64) -> bool {
        let sorted = self.sorted();
        let from = sorted.partition_point(|v| *v < value - within);
        sorted.get(from).is_some_and(|v| *v <= value + within)
    }

    /// Whether this is `x`, or zero where it is not.
    fn is_zeroed(&self, x: &Self) -> bool {
        self.values.iter().zip(&x.values).all(|(y, x)| y == x || *y == 0.0)
    }
}

/// What `z` did to `x` if `y` is what came of it, by their lines; nothing if it may be both, or be chance.
fn by_values(x: &[Line], y: &[Line], z: &[Line], dtype: DType) -> Option<Did> {
    let rounding = 2f64.powi(-mantissa(dtype)?);
    // What may be of `z` as well says nothing of what was kept.
    let is_kept = |x: &Line, y: &Line, z: &Line, p: usize| {
        y.values[p] == x.values[p] && !z.has(y.values[p], 0.0)
    };
    let keeps =
        |((x, y), z): ((&Line, &Line), &Line)| (0..y.values.len()).any(|p| is_kept(x, y, z, p));
    let mut written = x.iter().zip(y).zip(z).any(keeps);
    let (mut added, mut straight) = (true, true);
    // Numbers that are as they would be: each once, as zeros and ones are everywhere.
    let [mut kept, mut put, mut sums] = [(); 3].map(|()| HashSet::new());
    let (mut others, mut astray) = (0, 0);
    for ((of_x, of_y), of_z) in x.iter().zip(y).zip(z) {
        let most = 2.0 * rounding * (of_x.size + of_y.size + of_z.size);
        added &= (of_y.sum - of_x.sum - of_z.sum).abs() <= most;
        if of_x.sum.abs().min(of_z.sum.abs()) > 4.0 * most {
            sums.insert(of_z.sum.to_bits());
        }
        let (x, y, z) = (&of_x.values, &of_y.values, &of_z.values);
        written = written && y.iter().zip(x).all(|(y, x)| y == x || of_z.has(*y, 0.0));
        if !written && !added {
            return None;
        }
        let changed = (0..y.len()).filter(|p| y[*p] != x[*p]);
        if changed.clone().count() > z.len() {
            return None;
        }
        straight &= z.len() == y.len() && changed.clone().all(|p| y[p] == z[p]);
        // A line that was not written to says nothing.
        if changed.clone().next().is_some() {
            let is_kept = |p: &usize| is_kept(of_x, of_y, of_z, *p);
            kept.extend((0..y.len()).filter(is_kept).map(|p| y[p].to_bits()));
        }
        put.extend(changed.clone().map(|p| y[p].to_bits()));
        // A value added to a place that is not its own: more than a sum of two tensors.
        let is_sum = |p: usize, z: &f64| (y[p] - x[p] - z).abs() <= rounding * y[p].abs();
        let is_own = |p: usize| z.get(p).is_some_and(|z| is_sum(p, z));
        for p in changed.filter(|p| !is_own(*p)) {
            others += 1;
            astray += usize::from(of_z.has(y[p] - x[p], rounding * y[p].abs()));
        }
    }
    // How many bits chance would have to have got right.
    let count = |lines: &[Line]| lines.first().map_or(1, |line| line.values.len()).max(1) as f64;
    let (len, many) = (count(y), count(z));
    let all: Vec<f64> = y.iter().flat_map(|line| line.values.iter().copied()).collect();
    let of_each = f64::from(bits(&all, dtype));
    let by_place = (of_each - 1.0 - many.log2()).max(0.5);
    let by_sum = (of_each - 3.0 - 0.5 * len.log2()).max(0.0);
    let by_one_of_all = (of_each - 1.0 - (len * many * y.len() as f64).log2()).max(0.0);
    let bits = match (written, added) {
        // What chooses between two tensors, a leaky ReLU for example, is of the same shape.
        (true, false) if !straight => {
            f64::min(put.len() as f64 * by_place, kept.len() as f64 * of_each)
        }
        (false, true) if astray > 0 && 4 * astray >= others => {
            sums.len() as f64 * by_sum + by_one_of_all
        }
        _ => return None,
    };
    (bits >= 20.0).then_some(if written { Did::Write } else { Did::Add })
}

/// What `z` seems to have done to `x` along a dimension, which made `y` of it.
pub(super) struct Suspect<'a> {
    did: Did,
    x: &'a Tensor,
    y: &'a Tensor,
    z: &'a Tensor,
    dim: usize,
}

impl Suspect<'_> {
    /// A loss without a gradient, if that of `y` is as it ought to be.
    fn off(&self) -> Result<Tensor> {
        let weights = self.weights(0)?;
        if self.did == Did::Add {
            return self.as_is(&weights)? - self.added(&weights)?;
        }
        // In which lines it is open what was kept, as is common in 16 bits: of those nothing is asked, but of all
        // if all are such.
        let kept = self.kept()?;
        let is_sure = kept.eq(&self.kept_for_sure()?)?.min_keepdim(self.dim)?;
        let is_any = values(&is_sure)?.contains(&1.0);
        let weights = if is_any { (weights * is_sure.to_dtype(DType::F32)?)? } else { weights };
        self.as_is(&weights)? - self.written(&weights, &kept)?
    }

    /// Whether the gradient of `x` is that of the other.
    fn is_wrong(&self, graph: &Graph<'_>) -> Result<bool> {
        let (kept, for_sure) = (self.kept()?, self.kept_for_sure()?);
        match self.is_wrong_but(graph, &kept)? {
            None if equal(&kept, &for_sure)? => Ok(false),
            None => Ok(self.is_wrong_but(graph, &for_sure)? == Some(true)),
            Some(is_wrong) => Ok(is_wrong),
        }
    }

    /// 1 where `y` is `x`.
    fn kept(&self) -> Result<Tensor> {
        self.y.detach().eq(&self.x.detach())?.to_dtype(DType::F32)
    }

    /// 1 where `y` is `x` because nothing was put there, and not because that makes no difference: where all lines
    /// are written to alike, next to nothing added to one of them hides nothing.
    fn kept_for_sure(&self) -> Result<Tensor> {
        let lines = |t: &Tensor| values(&t.transpose(self.dim, D::Minus1)?);
        let (of_x, of_y, of_z) = (lines(self.x)?, lines(self.y)?, lines(self.z)?);
        let (len, many) = (self.y.dim(self.dim)?, self.z.dim(self.dim)?);
        let of_z: Vec<Line> = of_z.chunks(many.max(1)).map(Line::new).collect();
        let mut is_hit = vec![false; len];
        for (at, (x, y)) in of_x.iter().zip(&of_y).enumerate() {
            is_hit[at % len] |= x != y;
        }
        let rounding = 2f64.powi(-mantissa(self.y.dtype()).unwrap_or(0));
        let is_unseen = |x: f64, z: &Line| match self.did {
            Did::Write => z.has(x, 0.0),
            Did::Add => z.has(0.0, rounding * x.abs()),
        };
        let kept = of_x.iter().zip(&of_y).enumerate().map(|(at, (x, y))| {
            let hides = || of_z.get(at / len).is_some_and(|z| is_unseen(*x, z));
            f32::from(u8::from(x == y && !(is_hit[at % len] && hides())))
        });
        let shape = self.y.transpose(self.dim, D::Minus1)?.shape().clone();
        let kept = Tensor::from_iter(kept, self.y.device())?.reshape(shape)?;
        kept.transpose(self.dim, D::Minus1)?.contiguous()
    }

    /// Whether the gradient of `x` is that of the other, if nothing was put where `kept` is 1; none if it is neither.
    fn is_wrong_but(&self, graph: &Graph<'_>, kept: &Tensor) -> Result<Option<bool>> {
        // What is wrong once may be by chance, but hardly three times.
        for seed in 0..3 {
            let weights = self.weights(seed)?;
            let [as_is, added, written] =
                [self.as_is(&weights), self.added(&weights), self.written(&weights, kept)]
                    .map(|loss| graph.gradients(&loss?));
            let (as_is, added, written) = (as_is?, added?, written?);
            let (seen, truth) = match self.did {
                Did::Write => (&added, &written),
                Did::Add => (&written, &added),
            };
            let apart = distance(seen, truth);
            let [wrong, right] = [seen, truth].map(|other| distance(&as_is, other) < 0.02 * apart);
            if !apart.is_finite() || apart <= 1e-3 * norm(truth) || !(wrong || right) {
                return Ok(None);
            }
            if right {
                return Ok(Some(false));
            }
        }
        Ok(Some(true))
    }

    /// A number for each line of `y`.
    fn weights(&self, seed: u64) -> Result<Tensor> {
        let mut one = self.y.dims().to_vec();
        one[self.dim] = 1;
        // Whole numbers times a power of two, and small: exact in every type.
        let scale = 2f32.powi(-(self.y.elem_count().ilog2() as i32) / 2);
        let weights = ((noise(&one.into(), seed)? * 8.0)?.round()? * f64::from(scale))?;
        weights.to_device(self.y.device())
    }

    fn as_is(&self, weights: &Tensor) -> Result<Tensor> {
        dot(self.y, &along(self.y, weights)?)
    }

    /// A loss with the gradient that `y` has if `z` was added.
    fn added(&self, weights: &Tensor) -> Result<Tensor> {
        dot(self.x, &along(self.x, weights)?)? + dot(self.z, &along(self.z, weights)?)?
    }

    /// A loss with the gradient that `y` has if `z` was written, but where `kept` is 1.
    fn written(&self, weights: &Tensor, kept: &Tensor) -> Result<Tensor> {
        let of_x = (along(self.x, weights)? * kept)?;
        dot(self.x, &of_x)? + dot(self.z, &along(self.z, weights)?)?
    }
}

/// The number of each line for all its values.
fn along(t: &Tensor, weights: &Tensor) -> Result<Tensor> {
    weights.broadcast_as(t.shape())?.contiguous()
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

/// What is wrong about the gradient of a tensor that constants were put into.
pub(super) fn find_of_constants<'a>(graph: &Graph<'a>) -> Result<Option<Trap<'a>>> {
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
