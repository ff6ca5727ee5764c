//! Operators of stock candle whose gradient is wrong without a word, found in a run's first step.
//!
//! candle does not say which operator made a tensor, but it lists the tensors of a loss
//! ([`Tensor::sorted_nodes`]) in such an order that a tensor's operand can be told, and what made it of that
//! can be found by what it does. [`check`] looks for tensors that are, bit for bit, what a suspect makes of
//! their operand, and believes nothing until gradients have spoken:
//!
//! * `max_pool2d` multiplies its gradient by the share of a window that is largest, and both pools put it
//!   in the wrong place where windows do not cover the image. The tensor is differentiated, and beside it
//!   the suspect and the true operator, both made anew of the same input. It is an error if the tensor's
//!   gradient is the suspect's and not the true one.
//! * `upsample_nearest` overwrites what other uses of its input have added to the gradient before. A loss made
//!   for the purpose, in which it comes last, shows whether it does: nothing of another use is left then. It is
//!   an error if candle comes to another use first in the model's own loss.
//!
//! * `conv1d` of more than one sample reads the gradient as if it were `[c, n, l]`. Its input may have no
//!   gradient and so not be listed, but it is linear in its kernel: for any `r`, the kernel times the gradient
//!   of `y * r` is `y * r`. It is an error if that fails of a tensor made from a parameter, and holds once `r`
//!   is laid out so that it is read rightly.
//!
//! So a model with none of them, with one of them used rightly, or with a gradient that is not the loss's on
//! purpose (a detached branch, a straight-through estimator), is left alone: nothing is compared with
//! differences of the loss. Neither parameters nor buffers nor random numbers are touched, and no layer runs
//! again; each pool (or maximum of a line, which looks like one), upsampling and one-dimensional convolution
//! costs the first step up to six backward passes from there down, so an operator of one's own must stand
//! more than one.
//!
//! Not seen: a `conv1d` whose kernel is computed from parameters; an upsampling of one value, or one whose
//! input is used again only together with what was computed from it; `scatter` and `scatter_add` into a
//! tensor that has a gradient, each of which has the other's; a pool of nothing but equal values.

use std::collections::{BTreeMap, HashSet};
use std::sync::Arc;

use candle_core::{D, DType, Result, Tensor, TensorId};
use fused_optim::Slice;
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
    let graph = Graph { nodes: loss.sorted_nodes(), params, slot };
    match graph.trap() {
        Ok(None) => Ok(()),
        Ok(Some(trap)) => Err(Error::Engine(trap)),
        Err(e) => Err(Error::Engine(format!("looking for wrong gradients: {e}"))),
    }
}

/// A suspect.
#[derive(Clone, Copy, Debug)]
enum Stock {
    /// With the extents of its window.
    MaxPool(usize, usize),
    AvgPool(usize, usize),
    /// With its factors.
    Nearest(usize, usize),
}

impl Stock {
    /// Those that may have made a tensor of `y`'s shape of one of `x`'s, without those that are right.
    fn suspects(x: &Tensor, y: &Tensor) -> Vec<Self> {
        let same = x.rank() == y.rank() && x.dtype() == y.dtype() && x.elem_count() > 0;
        if !same || !matches!(x.rank(), 3 | 4) || x.dims()[..2] != y.dims()[..2] {
            return Vec::new();
        }
        let (h, w) = extents(x);
        let (to_h, to_w) = extents(y);
        if to_h >= h && to_w >= w {
            let factors = (to_h / h, to_w / w);
            let whole = to_h.is_multiple_of(h) && to_w.is_multiple_of(w) && factors != (1, 1);
            // candle itself refuses an image's factors that differ. Of one value it is as good as a broadcast,
            // of which there may be many.
            let whole = whole && (x.rank() == 3 || factors.0 == factors.1) && (h, w) != (1, 1);
            return if whole { vec![Self::Nearest(factors.0, factors.1)] } else { Vec::new() };
        }
        let mut suspects = Vec::new();
        for kh in kernels(h, to_h).filter(|_| x.rank() == 4) {
            for kw in kernels(w, to_w) {
                suspects.push(Self::MaxPool(kh, kw));
                if !h.is_multiple_of(kh) || !w.is_multiple_of(kw) {
                    suspects.push(Self::AvgPool(kh, kw));
                }
            }
        }
        suspects
    }

    fn apply(self, x: &Tensor) -> Result<Tensor> {
        match self {
            Self::MaxPool(kh, kw) => x.max_pool2d((kh, kw)),
            Self::AvgPool(kh, kw) => x.avg_pool2d((kh, kw)),
            Self::Nearest(by_h, by_w) => {
                let (_, _, h, w) = x.dims4()?;
                x.upsample_nearest2d(h * by_h, w * by_w)
            }
        }
    }

    /// The same of operators that are differentiated rightly.
    fn truth(self, x: &Tensor) -> Result<Tensor> {
        let (Self::MaxPool(kh, kw) | Self::AvgPool(kh, kw)) = self else { return self.apply(x) };
        let (n, c, h, w) = x.dims4()?;
        let covered = x.narrow(2, 0, h / kh * kh)?.narrow(3, 0, w / kw * kw)?;
        match self {
            Self::MaxPool(..) => {
                covered.reshape((n, c, h / kh, kh, w / kw, kw))?.max(D::Minus1)?.max(3)
            }
            _ => covered.avg_pool2d((kh, kw)),
        }
    }

    /// Whether this of `x` is `y`, bit for bit.
    fn makes(self, x: &Tensor, y: &Tensor) -> Result<bool> {
        let (x, y) = (images(x)?, images(y)?);
        let (from, to) = match self {
            Self::MaxPool(kh, kw) | Self::AvgPool(kh, kw) => ((kh, kw), (1, 1)),
            Self::Nearest(by_h, by_w) => ((1, 1), (by_h, by_w)),
        };
        // Where they differ, the first corner or the first image nearly always shows it.
        Ok(equal(&self.apply(&corner(&x, from)?)?, &corner(&y, to)?)?
            && equal(&self.apply(&x.narrow(0, 0, 1)?)?, &y.narrow(0, 0, 1)?)?
            && equal(&self.apply(&x)?, &y)?)
    }

    /// What to tell who uses it.
    fn complaint(self) -> String {
        match self {
            Self::MaxPool(kh, kw) => format!(
                "candle's own `max_pool2d` ({kh} x {kw}) scales the gradient that goes through it by the \
                 share of a window that is largest: use runner::engine::candle::ops::max_pool2d"
            ),
            Self::AvgPool(kh, kw) => format!(
                "candle's own `avg_pool2d` ({kh} x {kw}) puts a gradient in the wrong place if its windows \
                 do not cover the image: `narrow` its input to what they cover"
            ),
            Self::Nearest(..) => {
                "candle's own `upsample_nearest` drops the gradient that its input has \
                 from other uses: upsample a copy, `(x * 1.0)?`"
                    .to_owned()
            }
        }
    }
}

/// What to tell who uses `conv1d`.
const CONV1D: &str = "candle's own `conv1d` mixes up the samples of a batch in it: use candle's `conv2d` of \
     `unsqueeze(2)`, with `pad_with_zeros` for padding";

/// The kernels that, each beside the last, fit `to` times in `from`. Wide ones that leave a rest are left
/// out, as there may be many for an output of one pixel.
fn kernels(from: usize, to: usize) -> impl Iterator<Item = usize> {
    (1..=from).filter(move |k| from / k == to && (from.is_multiple_of(*k) || *k <= 16))
}

/// Height and width; that of a sequence is 1.
fn extents(t: &Tensor) -> (usize, usize) {
    match *t.dims() {
        [_, _, h, w] => (h, w),
        _ => (1, t.dims().last().copied().unwrap_or(0)),
    }
}

/// Without a graph, and a sequence as an image of one line.
fn images(t: &Tensor) -> Result<Tensor> {
    let t = t.detach();
    if t.rank() == 3 { t.unsqueeze(2) } else { Ok(t) }
}

fn corner(t: &Tensor, (h, w): (usize, usize)) -> Result<Tensor> {
    t.narrow(0, 0, 1)?.narrow(1, 0, 1)?.narrow(2, 0, h)?.narrow(3, 0, w)
}

fn equal(a: &Tensor, b: &Tensor) -> Result<bool> {
    Ok(!a.eq(b)?.flatten_all()?.to_vec1::<u8>()?.contains(&0))
}

/// What a loss was computed by.
struct Graph<'a> {
    /// The loss first, each tensor before those it was computed from.
    nodes: Vec<&'a Tensor>,
    params: &'a Tensors,
    slot: &'a Slot,
}

impl Graph<'_> {
    /// What is wrong, if anything is.
    fn trap(&self) -> Result<Option<String>> {
        for (at, y) in self.nodes.iter().enumerate().filter(|(_, y)| matches!(y.rank(), 3 | 4)) {
            // After a tensor comes the last thing it was made of: of one operand, that one.
            let behind = y.sorted_nodes();
            let Some(x) = behind.get(1) else { continue };
            for stock in Stock::suspects(x, y) {
                if stock.makes(x, y)? && self.is_wrong(stock, x, at)? {
                    return Ok(Some(self.tell(x, &stock.complaint())));
                }
            }
            // A kernel, or a group, a cast or both of it.
            for kernel in behind.iter().skip(1).take(3).filter(|kernel| may_convolve(kernel, y)) {
                if self.is_conv1d(y, kernel)? {
                    return Ok(Some(self.tell(kernel, CONV1D)));
                }
            }
        }
        Ok(None)
    }

    fn tell(&self, x: &Tensor, complaint: &str) -> String {
        let behind = self.behind(x);
        let first = behind.first().map_or("", |i| self.params.specs[*i].name.as_str());
        let others = match behind.len() {
            0 | 1 => String::new(),
            2 => " and of one more parameter".to_owned(),
            n => format!(" and of {} more parameters", n - 1),
        };
        format!("the gradient of `{first}`{others} is wrong: {complaint}")
    }

    /// The parameters that `x` was computed from.
    fn behind(&self, x: &Tensor) -> Vec<usize> {
        let ids = ids(x);
        let tensors = self.params.tensors.iter().enumerate();
        tensors.filter(|(_, t)| ids.contains(&t.id())).map(|(i, _)| i).collect()
    }

    /// Whether the gradient of `x` is wrong that comes by way of node `at`, which `stock` makes of it.
    fn is_wrong(&self, stock: Stock, x: &Tensor, at: usize) -> Result<bool> {
        let y = self.nodes[at];
        if matches!(stock, Stock::Nearest(..)) {
            return Ok(self.is_used_before(x, at) && self.overwrites(x, y)?);
        }
        let [as_is, suspect, truth] = [y, &stock.apply(x)?, &stock.truth(x)?]
            .map(|y| weighed(y).and_then(|loss| self.gradients(&loss)));
        let (as_is, suspect, truth) = (as_is?, suspect?, truth?);
        let apart = distance(&suspect, &truth);
        // The suspect's own gradient comes again to the bit; another window's may be a percent away.
        Ok(apart > 1e-3 * norm(&truth) && distance(&as_is, &suspect) < 1e-5 * apart)
    }

    /// Whether `y` leaves nothing of the gradient that another use of `x` has added before. candle
    /// differentiates the left operand of a sum last.
    fn overwrites(&self, x: &Tensor, y: &Tensor) -> Result<bool> {
        let nothing = (y * y.zeros_like()?)?.sum_all()?.to_dtype(DType::F32)?;
        let other_use = weighed(x)?;
        let (alone, before) =
            (self.gradients(&other_use)?, self.gradients(&(nothing + other_use)?)?);
        Ok(norm(&alone) > 0.0 && norm(&before) == 0.0)
    }

    /// Whether candle comes to another use of `x` before it comes to node `at`.
    fn is_used_before(&self, x: &Tensor, at: usize) -> bool {
        let is_of_x = |node: &&&Tensor| node.id() != x.id() && ids(node).contains(&x.id());
        let of_x: HashSet<_> = self.nodes.iter().filter(is_of_x).map(|node| node.id()).collect();
        // What has no other of them behind it was computed from `x` itself.
        let is_direct = |node: &&&Tensor| {
            of_x.contains(&node.id()) && ids(node).intersection(&of_x).count() == 1
        };
        self.nodes[..at].iter().any(|node| is_direct(&node))
    }

    /// Whether `y` is candle's `conv1d` by `kernel`, a parameter.
    fn is_conv1d(&self, y: &Tensor, kernel: &Tensor) -> Result<bool> {
        let index = self.params.tensors.iter().position(|param| param.id() == kernel.id());
        let Some(index) = index else { return Ok(false) };
        let kernel = kernel.detach().flatten_all()?.to_dtype(DType::F64)?;
        let (kernel, y) = (kernel.to_vec1::<f64>()?, y.to_dtype(DType::F32)?);
        let scale = 1.0 / (y.elem_count() as f64).sqrt();
        // The kernel times the gradient of `y * r`.
        let by_gradient = |r: &Tensor| -> Result<f64> {
            let gradients = self.gradients(&((&y * r)?.sum_all()? * scale)?)?;
            let gradient = gradients.get(&index).map_or(&[][..], Vec::as_slice);
            Ok(gradient.iter().zip(&kernel).map(|(g, w)| g * w).sum())
        };
        let (mut is_one, mut is_wrong) = (true, false);
        // For `r` that is `y` everywhere, or in every second or third place: a sum of squares.
        for every in 1..=3 {
            let taken = (0..y.elem_count()).map(|i| f32::from(u8::from(i % every == 0)));
            let taken = Tensor::from_iter(taken, y.device())?.reshape(y.shape())?;
            let r = (y.detach() * taken)?;
            let value = (y.detach() * &r)?.sum_all()?.to_scalar::<f32>()?;
            let value = f64::from(value) * scale;
            let rightly_read = r.transpose(0, 1)?.contiguous()?.reshape(y.shape())?;
            let off = |by_gradient: f64| (by_gradient - value).abs() / value;
            // Half precision is a percent off at most. Of nothing this is not a number, and is not seen.
            let (rightly_read, as_is) = (off(by_gradient(&rightly_read)?), off(by_gradient(&r)?));
            is_one &= rightly_read < 0.02;
            is_wrong |= as_is > 0.1;
        }
        Ok(is_one && is_wrong)
    }

    /// The gradients of `loss`, by parameter.
    fn gradients(&self, loss: &Tensor) -> Result<Gradients> {
        let kept = Arc::new(Mutex::new(Kept::default()));
        let sink: SharedSink = kept.clone();
        self.slot.with(&sink, || loss.backward()).map_err(candle_core::Error::wrap)?;
        let kept = std::mem::take(&mut kept.lock().0);
        Ok(kept)
    }
}

/// Whether the shapes are those of a kernel and of a `conv1d` of several samples, to several channels, by it.
fn may_convolve(kernel: &Tensor, y: &Tensor) -> bool {
    let (Ok((out_channels, ..)), Ok((n, c, _))) = (kernel.dims3(), y.dims3()) else { return false };
    n > 1 && c > 1 && out_channels.is_multiple_of(c)
}

fn ids(t: &Tensor) -> HashSet<TensorId> {
    t.sorted_nodes().iter().map(|node| node.id()).collect()
}

/// One number of `y`, with a gradient that is none of its constants, zero where `y` is (where ReLU makes the
/// values of a window equal, nobody knows which is largest), and far from what half precision overflows at.
fn weighed(y: &Tensor) -> Result<Tensor> {
    let scale = 0.5 / (y.elem_count() as f64).sqrt();
    y.to_dtype(DType::F32)?.sqr()?.sum_all()? * scale
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
