//! Operators of stock candle whose gradient is wrong without a word, found in a run's first step.
//!
//! candle does not say which operator made a tensor, but it lists the tensors of a loss
//! ([`Tensor::sorted_nodes`]) in such an order that a tensor's operands can be told, and what made it of those
//! can be found by what it does, to values and to gradients. A gradient is seen where it reaches a parameter,
//! and where it reaches a constant: candle leaves that in the [`GradStore`] of a backward pass. [`check`] looks
//! for tensors that are what a suspect makes of their operands, and believes nothing until gradients have
//! spoken:
//!
//! * `pools.rs`: `max_pool2d`, `avg_pool2d` and `upsample_nearest`;
//! * `conv1d.rs`: `conv1d` of several samples, or by a kernel that is not contiguous in memory;
//! * `matmul.rs`: `matmul` of a transposed batch by a matrix that is broadcast;
//! * `scatter.rs` and, of constants, `constants.rs`: `scatter` and `scatter_add` into a tensor that has a gradient.
//!
//! So a model with none of them, with one of them used rightly, or with a gradient that is not the loss's on
//! purpose (a detached branch, a straight-through estimator), is left alone: nothing is compared with
//! differences of the loss. Neither parameters nor buffers nor random numbers are touched, and no layer runs
//! again. All that look like one suspect share a backward pass, which shows most of them to be right; any other
//! costs the first step a few from there down, so an operator of one's own must stand more than one. And each tensor
//! of the loss is walked from, as candle shows nobody its operands: time with the square of how many there are
//! (`benches/README.md`, "The first step of a candle run").
//!
//! Not seen:
//!
//! * an upsampling whose input is used again only by an operator that takes also what was computed from the
//!   upsampling, and is not a sum, a difference, a product or `cat`: such a use has no gradient to be seen by;
//! * what has a gradient of nothing but rounding;
//! * `conv1d` by a kernel that its input was computed from too (the first use of that kernel is seen); one of or
//!   by a constant to a single place, of as many samples as channels, as kernel and input are then each other's
//!   likeness;
//! * `conv1d` and `matmul` of a constant, or by one, where gradients leave the constant open: its product by
//!   what has a gradient is shown, and its gradient for the parameters behind that, and if these are no more than
//!   the numbers of a row that the product leaves open, any values are those of some constant with this gradient
//!   (by one normalized column, say). Nor where what is open would cost the first step seconds (a backward pass
//!   each), nor, if it does not scale with its parameters, where a row is longer than 1024, nor what is wrong by
//!   less than rounding might be; and what is computed of constants alone, as no graph has it;
//! * a `conv1d` of so few outputs that times the stride they are fewer than its padding, both sides together;
//! * `scatter` and `scatter_add` of constants that could as well have been added, or written: candle shows
//!   the same of `x.scatter(i, c)` and of `x.index_add(i, c - x)`, whose gradient is right;
//! * a `scatter` that leaves nothing of what it writes into, or, of a constant, less than a sixteenth; one of a tensor
//!   that has all the values in it that it leaves, and one of a tensor of the same shape that what is written into
//!   was computed from too; one of constants that are a smooth function of what they overwrite, as an activation's
//!   values are; a `scatter_add` no value of which has a place to itself, or each the place that it has already;
//!   either of so few numbers, in 16 bits above all, that it may be chance, and `scatter_add` in 16 bits of or to
//!   values whose sum along the dimension is small;
//! * what writes into a tensor in place (`slice_set`, `scatter_set`, `scatter_add_set`): no graph has it;
//! * `max` and `min` of equal values, each of which is given the whole gradient: in a softmax, which takes a
//!   maximum first, that is right in the end; nor `max_pool2d` of whole rows or columns of equal values, which has
//!   the same gradient.

mod constants;
mod conv1d;
mod linear;
mod matmul;
mod pools;
#[cfg(test)]
mod puts;
mod scatter;
#[cfg(test)]
mod sequences;
#[cfg(test)]
mod sweep;
#[cfg(test)]
mod tests;

use std::cell::{Cell, OnceCell};
use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::sync::Arc;

use candle_core::backprop::GradStore;
use candle_core::{DType, Result, Tensor, TensorId};
use fused_optim::Slice;
use half::f16;
use parking_lot::Mutex;

use super::params::{Slot, Tensors};
use crate::engine::{GradSink, SharedSink};
use crate::{Error, Result as RunnerResult};

/// Looks for the traps in the graph of `loss`, with `slot` for the gradients of `params`.
///
/// # Errors
///
/// [`Error::Engine`] that names the first parameter whose gradient is wrong, the operator, and what to use
/// in its place.
pub(super) fn check(loss: &Tensor, params: &Tensors, slot: &Slot) -> RunnerResult<()> {
    let graph = Graph::new(loss, params, slot);
    match graph.trap() {
        Ok(None) => Ok(()),
        Ok(Some(trap)) => Err(Error::Engine(graph.tell(&trap))),
        Err(e) => Err(Error::Engine(format!("looking for wrong gradients: {e}"))),
    }
}

/// A wrong gradient.
struct Trap<'a> {
    /// The tensor that has it.
    of: &'a Tensor,
    /// By which operator, and what to use in its place.
    complaint: String,
}

/// What a loss was computed by.
struct Graph<'a> {
    /// The loss first, each tensor before those it was computed from.
    nodes: Vec<&'a Tensor>,
    index: HashMap<TensorId, usize>,
    /// The nodes by their dimensions.
    of_dims: BTreeMap<Vec<usize>, Vec<usize>>,
    /// By node: itself and the nodes it was computed from, a bit each.
    behind: Vec<Vec<u64>>,
    /// By node: how many those are.
    counts: Vec<usize>,
    /// By node: the last of its operands that has a gradient, unless what is behind it is behind another, too.
    last: Vec<Option<&'a Tensor>>,
    /// By node: which, of as many dimensions, may be the first of several operands.
    firsts: Vec<Vec<usize>>,
    /// What shapes the constants have.
    constants: OnceCell<BTreeSet<Vec<usize>>>,
    /// How many backward passes there have been.
    passes: Cell<usize>,
    params: &'a Tensors,
    slot: &'a Slot,
}

impl<'a> Graph<'a> {
    fn new(loss: &'a Tensor, params: &'a Tensors, slot: &'a Slot) -> Self {
        let nodes = loss.sorted_nodes();
        let count = nodes.len();
        let mut graph = Self {
            index: nodes.iter().enumerate().map(|(i, t)| (t.id(), i)).collect(),
            of_dims: BTreeMap::new(),
            behind: vec![vec![0; count.div_ceil(64)]; count],
            counts: vec![0; count],
            last: vec![None; count],
            firsts: vec![Vec::new(); count],
            constants: OnceCell::new(),
            passes: Cell::new(0),
            nodes,
            params,
            slot,
        };
        for (at, y) in graph.nodes.iter().enumerate().rev() {
            let behind = y.sorted_nodes();
            graph.of_dims.entry(y.dims().to_vec()).or_default().push(at);
            graph.counts[at] = behind.len();
            graph.last[at] = behind.get(1).copied();
            for (i, other) in behind.iter().enumerate() {
                let node = graph.index[&other.id()];
                graph.behind[at][node / 64] |= 1 << (node % 64);
                // It is walked first, so all that comes after it in the list is behind it.
                if i > 1 && graph.counts[node] == behind.len() - i && other.rank() == y.rank() {
                    graph.firsts[at].push(node);
                }
            }
        }
        graph
    }

    /// What is wrong, if anything is.
    fn trap(&self) -> Result<Option<Trap<'a>>> {
        let (mut lines, mut puts) = (scatter::Lines::default(), Vec::new());
        let pools = pools::suspects(self)?;
        for (at, y) in self.nodes.iter().enumerate() {
            let Some(last) = self.last[at].filter(|_| y.elem_count() > 0) else { continue };
            let mut found = pools::find(self, at, last, &pools)?;
            if found.is_none() {
                found = conv1d::find(self, at, last)?;
            }
            if found.is_none() {
                found = matmul::find(self, at, last)?;
            }
            if let Some(trap) = found
                && self.has_gradient(trap.of)?
            {
                return Ok(Some(trap));
            }
            puts.extend(scatter::suspects(self, at, last, &mut lines)?);
        }
        let mut found = scatter::find(self, puts)?;
        if found.is_none() {
            found = conv1d::find_of_constants(self)?;
        }
        if found.is_none() {
            found = constants::find(self)?;
        }
        Ok(found)
    }

    /// Those of `suspects` that are not shown to be right, by a loss of each that has no gradient if it is: all of
    /// them are asked together, and halves only where not all are.
    fn not_right<T>(
        &self,
        mut suspects: Vec<T>,
        loss: &impl Fn(&T) -> Result<Tensor>,
    ) -> Result<Vec<T>> {
        let mut losses = suspects.iter().map(loss);
        let Some(first) = losses.next() else { return Ok(suspects) };
        let all = losses.try_fold(first?, |sum, loss| sum + loss?)?;
        // To the bit: what is right takes away what it adds.
        if norm(&self.gradients(&all)?) == 0.0 {
            return Ok(Vec::new());
        }
        if suspects.len() > 1 {
            let half = suspects.split_off(suspects.len() / 2);
            suspects = self.not_right(suspects, loss)?;
            suspects.extend(self.not_right(half, loss)?);
        }
        Ok(suspects)
    }

    /// Whether `t` has a gradient, which is not nothing but rounding, that of a sign for example: then those of
    /// multiples are no multiples, and nothing is wrong about it.
    fn has_gradient(&self, t: &Tensor) -> Result<bool> {
        let r = linear::noise(t.shape(), 7)?.to_device(t.device())?;
        let one = self.gradients(&dot(t, &r)?)?;
        let mut is_any = norm(&one) > 0.0;
        for factor in [1.3, 1.7] {
            let multiple = self.gradients(&dot(t, &(&r * factor)?)?)?;
            let scaled = one.iter().map(|(i, v)| (*i, v.iter().map(|v| v * factor).collect()));
            is_any &= distance(&multiple, &scaled.collect()) <= 0.1 * norm(&multiple);
        }
        Ok(is_any)
    }

    /// Which may be the first of the operands of node `at`.
    fn firsts(&self, at: usize) -> impl Iterator<Item = &'a Tensor> {
        self.firsts[at].iter().map(|node| self.nodes[*node])
    }

    /// Each node that has a last operand, with that.
    fn last_operands(&self) -> impl Iterator<Item = (&'a Tensor, &'a Tensor)> {
        self.nodes.iter().zip(&self.last).filter_map(|(y, last)| Some((*y, (*last)?)))
    }

    /// The shapes of the constants that the loss was computed from. candle leaves the gradient of each.
    fn constants(&self) -> Result<&BTreeSet<Vec<usize>>> {
        if let Some(constants) = self.constants.get() {
            return Ok(constants);
        }
        let (_, store) = self.backward(self.nodes[0])?;
        let shapes = store.get_ids().filter_map(|id| Some(store.get_id(*id)?.dims().to_vec()));
        Ok(self.constants.get_or_init(|| shapes.collect()))
    }

    fn tell(&self, Trap { of, complaint }: &Trap<'_>) -> String {
        let tensors = self.params.tensors.iter().enumerate();
        let behind: Vec<usize> =
            tensors.filter(|(_, param)| self.is_behind(param, of)).map(|(i, _)| i).collect();
        let first = behind.first().map_or("", |i| self.params.specs[*i].name.as_str());
        let others = match behind.len() {
            0 | 1 => String::new(),
            2 => " and of one more parameter".to_owned(),
            n => format!(" and of {} more parameters", n - 1),
        };
        format!("the gradient of `{first}`{others} is wrong: {complaint}")
    }

    /// Whether `y` is `x` or was computed from it.
    fn is_behind(&self, x: &Tensor, y: &Tensor) -> bool {
        let (Some(x), Some(y)) = (self.index.get(&x.id()), self.index.get(&y.id())) else {
            return false;
        };
        self.is_node_behind(*x, *y)
    }

    /// As [`Self::is_behind`], of the nodes in these places.
    fn is_node_behind(&self, x: usize, y: usize) -> bool {
        self.behind[y][x / 64] & (1 << (x % 64)) != 0
    }

    /// How many nodes are behind `y`, itself among them.
    fn count_behind(&self, y: &Tensor) -> usize {
        self.index.get(&y.id()).map_or(0, |i| self.counts[*i])
    }

    /// The gradients of `loss`, by parameter.
    fn gradients(&self, loss: &Tensor) -> Result<Gradients> {
        Ok(self.backward(loss)?.0)
    }

    /// The gradients of [`dot`], by parameter, and those of constants but `r`.
    fn weighed(&self, y: &Tensor, r: &Tensor) -> Result<(Gradients, GradStore)> {
        let (gradients, mut constants) = self.backward(&dot(y, r)?)?;
        constants.remove(r);
        Ok((gradients, constants))
    }

    /// The gradients of `loss`, by parameter, and those of constants.
    fn backward(&self, loss: &Tensor) -> Result<(Gradients, GradStore)> {
        self.passes.set(self.passes.get() + 1);
        let kept = Arc::new(Mutex::new(Kept::default()));
        let sink: SharedSink = kept.clone();
        let rest = self.slot.with(&sink, || loss.backward()).map_err(candle_core::Error::wrap)?;
        let kept = std::mem::take(&mut kept.lock().0);
        Ok((kept, rest))
    }
}

/// The sum of `y` times `r`, which is in `f32`: a loss whose gradient at `y` is `r`.
fn dot(y: &Tensor, r: &Tensor) -> Result<Tensor> {
    (y.to_dtype(DType::F32)? * r)?.sum_all()
}

fn equal(a: &Tensor, b: &Tensor) -> Result<bool> {
    Ok(!a.eq(b)?.flatten_all()?.to_vec1::<u8>()?.contains(&0))
}

/// Whether values are others than they ought to be, by more than rounding.
fn is_apart(t: &Tensor, truth: &Tensor) -> Result<bool> {
    let (values, truth) = (values(t)?, values(truth)?);
    let apart = values.iter().zip(&truth).map(|(v, t)| (v - t).abs()).sum::<f64>();
    Ok(apart > 1e-2 * truth.iter().map(|v| v.abs()).sum::<f64>())
}

/// Whether it is no accident that these are to the bit the numbers that they would be.
fn is_telling(numbers: &[f64], dtype: DType) -> bool {
    let nonzero = numbers.iter().take(1 << 10).filter(|v| **v != 0.0);
    let distinct: BTreeSet<u64> = nonzero.map(|v| v.to_bits()).collect();
    distinct.len() > 1 && distinct.len() as i32 * bits(numbers, dtype) >= 20
}

/// How many bits of the mantissa tell these numbers from others: they may have been in 16 bits before.
fn bits(numbers: &[f64], dtype: DType) -> i32 {
    let all = mantissa(dtype).unwrap_or(0);
    let is_short = numbers.iter().take(1 << 10).all(|v| f16::from_f64(*v).to_f64() == *v);
    if is_short { all.min(10) } else { all }
}

/// Whether candle multiplies and convolves such tensors.
fn is_multiplied(t: &Tensor) -> bool {
    !(t.device().is_cpu() && t.dtype() == DType::BF16)
}

/// Whether a backward pass has left this gradient for a constant, to the bit.
fn leaves(constants: &GradStore, gradient: &Tensor) -> Result<bool> {
    for other in constants.get_ids().filter_map(|id| constants.get_id(*id)) {
        let is_like = other.dims() == gradient.dims() && other.dtype() == gradient.dtype();
        if is_like && equal(other, gradient)? && is_telling(&values(gradient)?, gradient.dtype()) {
            return Ok(true);
        }
    }
    Ok(false)
}

/// The values of `t`.
fn values(t: &Tensor) -> Result<Vec<f64>> {
    t.detach().flatten_all()?.to_dtype(DType::F64)?.to_vec1()
}

/// How many bits a number's mantissa has, its leading one left out.
fn mantissa(dtype: DType) -> Option<i32> {
    match dtype {
        DType::F64 => Some(52),
        DType::F32 => Some(23),
        DType::F16 => Some(10),
        DType::BF16 => Some(7),
        _ => None,
    }
}

type Gradients = BTreeMap<usize, Vec<f64>>;

#[derive(Default)]
struct Kept(Gradients);

impl GradSink for Kept {
    fn ready(&mut self, index: usize, grad: Slice<'_>) -> RunnerResult<()> {
        let values = match grad {
            Slice::F32(v) => v.iter().map(|v| f64::from(*v)).collect(),
            Slice::F16(v) => v.iter().map(|v| v.to_f64()).collect(),
            Slice::Bf16(v) => v.iter().map(|v| v.to_f64()).collect(),
        };
        self.0.insert(index, values);
        Ok(())
    }
}

fn norm(a: &Gradients) -> f64 {
    a.values().flatten().map(|v| v * v).sum::<f64>().sqrt()
}

/// The norm of the difference; without end between gradients of different parameters.
fn distance(a: &Gradients, b: &Gradients) -> f64 {
    if !a.keys().eq(b.keys()) {
        return f64::INFINITY;
    }
    let pairs = a.values().flatten().zip(b.values().flatten());
    pairs.map(|(a, b)| (a - b) * (a - b)).sum::<f64>().sqrt()
}
