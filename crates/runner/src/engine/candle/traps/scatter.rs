//! `scatter` and `scatter_add` into a tensor that has a gradient, each of which has the other's backward:
//! what `scatter` overwrites is given a gradient, and what `scatter_add` adds to is given none.
//!
//! Where they write is in integers, which no list has. But a gradient that is constant along the dimension
//! they work on is, wherever they write, as constant for what they write. So `y`, `x` and `z` are told by two
//! questions, each with an answer of its own: do the values say that `z` was written into `x`, or added to it
//! (its sums along the dimension), and is the gradient that of writing, or that of adding? It is wrong if
//! the values say one and the gradient the other.
//!
//! A constant `z` is not in the list either: `constants.rs`.

use std::cell::OnceCell;
use std::collections::{HashMap, HashSet};
use std::rc::Rc;

use candle_core::{D, DType, Result, Tensor, TensorId};

use super::linear::noise;
use super::{Graph, Trap, bits, distance, dot, equal, mantissa, norm, values};

/// What was done to a tensor.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Did {
    Write,
    Add,
}

impl Did {
    pub(super) fn trap(self, of: &Tensor) -> Trap<'_> {
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

/// What may have made node `at` of two others, if its last operand is `last`.
pub(super) fn suspects<'a>(
    graph: &Graph<'a>,
    at: usize,
    last: &'a Tensor,
    lines: &mut Lines,
) -> Result<Vec<Suspect<'a>>> {
    let (mut suspects, y) = (Vec::new(), graph.nodes[at]);
    let is_like_y = |t: &Tensor| t.shape() == y.shape() && t.dtype() == y.dtype();
    for dim in (0..y.rank()).filter(|dim| fits(y, last.dims(), *dim)) {
        for x in graph.firsts(at).filter(|x| is_like_y(x) && last.dtype() == y.dtype()) {
            let (of_x, of_y, of_z) = (lines.of(x, dim)?, lines.of(y, dim)?, lines.of(last, dim)?);
            let did = by_values(&of_x, &of_y, &of_z, y.dtype());
            suspects.extend(did.map(|did| Suspect { did, x, y, z: last, dim }));
        }
    }
    // What was put there may have been behind `last` already; it is not looked for among tensors of the same shape:
    // there are too many.
    for dim in (0..y.rank()).filter(|_| is_like_y(last)) {
        let (of_x, of_y) = (lines.of(last, dim)?, lines.of(y, dim)?);
        // Zeros are in many tensors.
        if of_x.iter().zip(&*of_y).all(|(x, y)| y.is_zeroed(x)) {
            continue;
        }
        let shapes = graph.of_dims.iter().filter(|(dims, _)| *dims != y.dims());
        let nodes = shapes.filter(|(dims, _)| fits(y, dims, dim)).flat_map(|(_, nodes)| nodes);
        let behind = nodes.filter(|node| graph.is_node_behind(**node, at));
        for z in behind.map(|node| graph.nodes[*node]).filter(|z| z.dtype() == y.dtype()) {
            let did = by_values(&of_x, &of_y, &lines.of(z, dim)?, y.dtype());
            suspects.extend(did.map(|did| Suspect { did, x: last, y, z, dim }));
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

/// Whether something of these dimensions can be put into `y` along `dim`.
fn fits(y: &Tensor, dims: &[usize], dim: usize) -> bool {
    let mut pairs = y.dims().iter().zip(dims).enumerate();
    y.rank() == dims.len() && pairs.all(|(i, (y, z))| i == dim || y == z)
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

    /// The logarithm of how many values there are.
    fn log2(&self) -> f64 {
        (self.values.len().max(1) as f64).log2()
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
    let all = || x.iter().zip(y).zip(z).map(|((x, y), z)| Lined { x, y, z, rounding });
    // Most are not, and a few places show it.
    let written = all().all(|of| of.is_written(4))
        && all().any(|of| of.kept().next().is_some())
        && all().all(|of| of.is_written(usize::MAX));
    let did = match (written, all().all(|of| of.is_added())) {
        (true, false) => Did::Write,
        (false, true) => Did::Add,
        _ => return None,
    };
    let all: Vec<_> = all().collect();
    // How many bits chance would have to have got right.
    let of_y: Vec<f64> = y.iter().flat_map(|line| line.values.iter().copied()).collect();
    let of_each = f64::from(bits(&of_y, dtype));
    let bits =
        if did == Did::Write { bits_written(&all, of_each) } else { bits_added(&all, of_each) };
    (bits >= 20.0).then_some(did)
}

/// Of three tensors the same line.
struct Lined<'a> {
    x: &'a Line,
    y: &'a Line,
    z: &'a Line,
    /// Half of what rounding makes of 1.
    rounding: f64,
}

impl Lined<'_> {
    /// Whether each of the first places has what `x` has there, or something of `z`.
    fn is_written(&self, places: usize) -> bool {
        let (x, y) = (&self.x.values, &self.y.values);
        let is_of_either = |p: usize| y[p] == x[p] || self.z.has(y[p], 0.0);
        (0..y.len().min(places)).all(is_of_either)
            && self.changed().take(places).count() <= self.z.values.len()
    }

    /// Whether the sum is that of `x` and `z`.
    fn is_added(&self) -> bool {
        (self.y.sum - self.x.sum - self.z.sum).abs() <= self.noticed()
            && self.changed().count() <= self.z.values.len()
    }

    /// Sums are as near to each other by rounding.
    fn noticed(&self) -> f64 {
        2.0 * self.rounding * (self.x.size + self.y.size + self.z.size)
    }

    /// The places where `y` is not `x`.
    fn changed(&self) -> impl Iterator<Item = usize> {
        let (x, y) = (&self.x.values, &self.y.values);
        (0..y.len()).filter(|p| y[*p] != x[*p])
    }

    /// What `y` has of `x`, but what it may have of `z`, which says nothing.
    fn kept(&self) -> impl Iterator<Item = f64> {
        let pairs = self.y.values.iter().zip(&self.x.values);
        pairs.filter(|(y, x)| y == x && !self.z.has(**y, 0.0)).map(|(y, _)| *y)
    }
}

/// How many bits chance would have to have got right for it to look as if something had been written.
fn bits_written(all: &[Lined<'_>], of_each: f64) -> f64 {
    // Each number once, as zeros and ones are everywhere. A line that was not written to says nothing.
    let changed = all.iter().filter(|of| of.changed().next().is_some());
    let kept: HashSet<_> =
        changed.flat_map(|of| of.kept().take(1 << 10)).map(f64::to_bits).collect();
    let put =
        all.iter().flat_map(|of| of.changed().take(1 << 10).map(|p| of.y.values[p].to_bits()));
    let put: HashSet<_> = put.collect();
    // What chooses between two tensors, a leaky ReLU for example, is of the same shape.
    let is_own = |of: &Lined<'_>| {
        let (y, z) = (&of.y.values, &of.z.values);
        y.len() == z.len() && of.changed().all(|p| y[p] == z[p])
    };
    if all.iter().all(is_own) {
        return 0.0;
    }
    let by_place = (of_each - 1.0 - all.first().map_or(0.0, |of| of.z.log2())).max(0.5);
    f64::min(put.len() as f64 * by_place, kept.len() as f64 * of_each)
}

/// How many bits chance would have to have got right for it to look as if something had been added.
fn bits_added(all: &[Lined<'_>], of_each: f64) -> f64 {
    let shown = all.iter().filter(|of| of.x.sum.abs().min(of.z.sum.abs()) > 4.0 * of.noticed());
    let sums: HashSet<_> = shown.map(|of| of.z.sum.to_bits()).collect();
    // A value added to a place that is not its own: more than a sum of two tensors.
    let (mut others, mut astray) = (0, 0);
    for of in all {
        let (x, y, z) = (&of.x.values, &of.y.values, &of.z.values);
        let is_sum = |p: usize, z: &f64| (y[p] - x[p] - z).abs() <= of.rounding * y[p].abs();
        for p in of.changed().filter(|p| !z.get(*p).is_some_and(|z| is_sum(*p, z))) {
            others += 1;
            astray += usize::from(of.z.has(y[p] - x[p], of.rounding * y[p].abs()));
        }
    }
    if astray == 0 || 4 * astray < others {
        return 0.0;
    }
    let of_first = |log2: fn(&Lined<'_>) -> f64| all.first().map_or(0.0, log2);
    let (len, many) = (of_first(|of| of.y.log2()), of_first(|of| of.z.log2()));
    let by_sum = (of_each - 3.0 - 0.5 * len).max(0.0);
    let by_one_of_all = (of_each - 1.0 - len - many - (all.len() as f64).log2()).max(0.0);
    sums.len() as f64 * by_sum + by_one_of_all
}

/// What `z` seems to have done to `x` along a dimension, which made `y` of it.
pub(super) struct Suspect<'a> {
    did: Did,
    x: &'a Tensor,
    y: &'a Tensor,
    z: &'a Tensor,
    dim: usize,
}

/// Of which of its values a suspect is asked for the gradient, 1 or 0 for each.
struct Asked {
    y: Tensor,
    z: Tensor,
    /// Where `y` has what `x` had.
    kept: Tensor,
}

impl Suspect<'_> {
    /// A loss without a gradient, if that of `y` is as it ought to be.
    fn off(&self) -> Result<Tensor> {
        let (asked, weights) = (self.asked()?, self.weights(0)?);
        let as_is = self.as_is(&weights, &asked)?;
        as_is
            - match self.did {
                Did::Write => self.written(&weights, &asked)?,
                Did::Add => self.added(&weights, &asked)?,
            }
    }

    /// Whether the gradient of `x` is that of the other.
    fn is_wrong(&self, graph: &Graph<'_>) -> Result<bool> {
        let mut asked = self.asked()?;
        let is_wrong = self.is_wrong_of(graph, &asked)?;
        if is_wrong.is_none() && self.did == Did::Add {
            let for_sure = self.kept_for_sure()?;
            if !equal(&asked.kept, &for_sure)? {
                asked.kept = for_sure;
                return Ok(self.is_wrong_of(graph, &asked)? == Some(true));
            }
        }
        Ok(is_wrong == Some(true))
    }

    /// All, but numbers that may have been kept as well as written, as is common in 16 bits, if others were written.
    fn asked(&self) -> Result<Asked> {
        let kept = self.y.detach().eq(&self.x.detach())?.to_dtype(DType::F32)?;
        let (mut of_y, mut of_z, mut is_any) = (Vec::new(), Vec::new(), false);
        for (x, (y, z)) in
            self.lines(self.x)?.iter().zip(self.lines(self.y)?.iter().zip(&self.lines(self.z)?))
        {
            let pairs = || y.values.iter().zip(&x.values);
            let either = pairs().filter(|(y, x)| y == x && z.has(**y, 0.0)).map(|(y, _)| *y);
            let either = Line::new(&either.collect::<Vec<_>>());
            let is_told = |v: &f64| self.did == Did::Add || !either.has(*v, 0.0);
            is_any |= pairs().any(|(y, x)| y != x && is_told(y));
            of_y.extend(y.values.iter().map(is_told));
            of_z.extend(z.values.iter().map(is_told));
        }
        let mask = |t: &Tensor, of: Vec<bool>| {
            self.like(t, of.into_iter().map(|is_told| f32::from(u8::from(is_told || !is_any))))
        };
        Ok(Asked { y: mask(self.y, of_y)?, z: mask(self.z, of_z)?, kept })
    }

    /// 1 where `y` is `x` because nothing was added there, and not because next to nothing was: that hides nothing
    /// where all lines are added to alike.
    fn kept_for_sure(&self) -> Result<Tensor> {
        let (of_x, of_y, of_z) = (self.lines(self.x)?, self.lines(self.y)?, self.lines(self.z)?);
        let mut is_hit = vec![false; self.y.dim(self.dim)?];
        for (x, y) in of_x.iter().zip(&of_y) {
            let pairs = x.values.iter().zip(&y.values);
            is_hit.iter_mut().zip(pairs).for_each(|(is_hit, (x, y))| *is_hit |= x != y);
        }
        let rounding = 2f64.powi(-mantissa(self.y.dtype()).unwrap_or(0));
        let mut kept = Vec::new();
        for ((x, y), z) in of_x.iter().zip(&of_y).zip(&of_z) {
            for ((x, y), is_hit) in x.values.iter().zip(&y.values).zip(&is_hit) {
                let is_hidden = *is_hit && z.has(0.0, rounding * x.abs());
                kept.push(f32::from(u8::from(x == y && !is_hidden)));
            }
        }
        self.like(self.y, kept)
    }

    fn lines(&self, t: &Tensor) -> Result<Vec<Line>> {
        let of_t = values(&t.transpose(self.dim, D::Minus1)?)?;
        Ok(of_t.chunks(t.dim(self.dim)?.max(1)).map(Line::new).collect())
    }

    /// A tensor like `t`, line by line.
    fn like(&self, t: &Tensor, of_lines: impl IntoIterator<Item = f32>) -> Result<Tensor> {
        let shape = t.transpose(self.dim, D::Minus1)?.shape().clone();
        let t = Tensor::from_iter(of_lines, t.device())?.reshape(shape)?;
        t.transpose(self.dim, D::Minus1)?.contiguous()
    }

    /// Whether the gradient of `x` is that of the other; none if it is neither.
    fn is_wrong_of(&self, graph: &Graph<'_>, asked: &Asked) -> Result<Option<bool>> {
        // What is wrong once may be by chance, but hardly three times.
        for seed in 0..3 {
            let weights = self.weights(seed)?;
            let [as_is, added, written] = [Self::as_is, Self::added, Self::written]
                .map(|loss| graph.gradients(&loss(self, &weights, asked)?));
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

    fn as_is(&self, weights: &Tensor, asked: &Asked) -> Result<Tensor> {
        dot(self.y, &asked.y.broadcast_mul(weights)?)
    }

    /// A loss with the gradient that `y` has if `z` was added.
    fn added(&self, weights: &Tensor, asked: &Asked) -> Result<Tensor> {
        let of_z = asked.z.broadcast_mul(weights)?;
        dot(self.x, &asked.y.broadcast_mul(weights)?)? + dot(self.z, &of_z)?
    }

    /// A loss with the gradient that `y` has if `z` was written.
    fn written(&self, weights: &Tensor, asked: &Asked) -> Result<Tensor> {
        let (of_x, of_z) = ((&asked.y * &asked.kept)?, asked.z.broadcast_mul(weights)?);
        dot(self.x, &of_x.broadcast_mul(weights)?)? + dot(self.z, &of_z)?
    }
}
