//! `max_pool2d`, `avg_pool2d`, `upsample_nearest`: found by their values, bit for bit.
//!
//! * `max_pool2d` multiplies its gradient by the share of a window that is largest, and both pools put it
//!   in the wrong place where windows do not cover the image. The tensor is differentiated, and beside it
//!   the suspect and the true operator, both made anew of the same input. It is wrong if the tensor's
//!   gradient is the suspect's and not the true one.
//! * `upsample_nearest` overwrites what other uses of its input have added to the gradient before. A loss made
//!   for the purpose, in which it comes last, shows whether it does: nothing of another use is left then. It is
//!   wrong if candle comes to another use first in the model's own loss.

use candle_core::{D, DType, Result, Tensor};

use super::{Graph, Trap, distance, equal, norm};

/// What is wrong about the gradient of `x`, the operand of node `at`.
pub(super) fn find<'a>(graph: &Graph<'a>, at: usize, x: &'a Tensor) -> Result<Option<Trap<'a>>> {
    for stock in Stock::suspects(x, graph.nodes[at]) {
        if stock.makes(x, graph.nodes[at])? && is_wrong(graph, stock, x, at)? {
            return Ok(Some(Trap { of: x, complaint: stock.complaint() }));
        }
    }
    Ok(None)
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
            let whole = to_h.is_multiple_of(h) && to_w.is_multiple_of(w);
            // candle itself refuses an image's factors that differ.
            let whole = whole && (x.rank() == 3 || factors.0 == factors.1);
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
                let windows = covered.reshape((n, c, h / kh, kh, w / kw, kw))?.transpose(3, 4)?;
                let windows = windows.flatten_from(4)?.contiguous()?;
                // Of equal values one: `max` would give each the whole gradient.
                windows.gather(&windows.argmax_keepdim(D::Minus1)?, D::Minus1)?.squeeze(D::Minus1)
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

/// Whether the gradient of `x` is wrong that comes by way of node `at`, which `stock` makes of it.
fn is_wrong(graph: &Graph<'_>, stock: Stock, x: &Tensor, at: usize) -> Result<bool> {
    let y = graph.nodes[at];
    if matches!(stock, Stock::Nearest(..)) {
        return Ok(is_used_before(graph, x, at)? && overwrites(graph, x, y)?);
    }
    let [as_is, suspect, truth] = [y, &stock.apply(x)?, &stock.truth(x)?]
        .map(|y| weighed(y).and_then(|loss| graph.gradients(&loss)));
    let (as_is, suspect, truth) = (as_is?, suspect?, truth?);
    let apart = distance(&suspect, &truth);
    // The suspect's own gradient comes again to the bit; another window's may be a percent away.
    Ok(apart > 1e-3 * norm(&truth) && distance(&as_is, &suspect) < 1e-5 * apart)
}

/// Whether `y` leaves nothing of the gradient that another use of `x` has added before. candle
/// differentiates the left operand of a sum last.
fn overwrites(graph: &Graph<'_>, x: &Tensor, y: &Tensor) -> Result<bool> {
    let nothing = (y * y.zeros_like()?)?.sum_all()?.to_dtype(DType::F32)?;
    let other_use = weighed(x)?;
    let (alone, before) = (graph.gradients(&other_use)?, graph.gradients(&(nothing + other_use)?)?);
    Ok(norm(&alone) > 0.0 && norm(&before) == 0.0)
}

/// Whether candle comes to another use of `x` before it comes to node `at`.
fn is_used_before(graph: &Graph<'_>, x: &Tensor, at: usize) -> Result<bool> {
    let is_of_x = |node: &&Tensor| node.id() != x.id() && graph.is_behind(x, node);
    let of_x: Vec<&Tensor> = graph.nodes.iter().copied().filter(is_of_x).collect();
    for node in graph.nodes[..at].iter().copied().filter(is_of_x) {
        // What has no other of them behind it was computed from `x` itself.
        let is_direct =
            !of_x.iter().any(|other| other.id() != node.id() && graph.is_behind(other, node));
        let from_both = || match node.sorted_nodes().get(1) {
            Some(last) if graph.is_behind(graph.nodes[at], last) => joins(node, last, x),
            _ => Ok(false),
        };
        if is_direct || from_both()? {
            return Ok(true);
        }
    }
    Ok(false)
}

/// Whether `u` is a sum, a difference, a product or `cat` of `s` and `x`.
fn joins(u: &Tensor, s: &Tensor, x: &Tensor) -> Result<bool> {
    let (u, s, x) = (u.detach(), s.detach(), x.detach());
    if s.dtype() != x.dtype() || u.dtype() != x.dtype() || s.rank() != x.rank() {
        return Ok(false);
    }
    if u.shape() == x.shape() && s.shape() == x.shape() {
        let made = [&s + &x, &x - &s, &s - &x, &s * &x];
        // One that is `s` itself says nothing.
        return made.into_iter().try_fold(false, |is, made| {
            let made = made?;
            Ok(is || (equal(&made, &u)? && !equal(&made, &s)?))
        });
    }
    for dim in 0..x.rank() {
        for parts in [[&s, &x], [&x, &s]] {
            let Ok(made) = Tensor::cat(&parts, dim) else { continue };
            if made.shape() == u.shape() && equal(&made, &u)? {
                return Ok(true);
            }
        }
    }
    Ok(false)
}

/// One number of `y`, with a gradient that is none of its constants, nor nothing where `y` is, and far from
/// what half precision overflows at.
fn weighed(y: &Tensor) -> Result<Tensor> {
    let scale = 0.5 / (y.elem_count() as f64).sqrt();
    (y.to_dtype(DType::F32)? + 1.0)?.sqr()?.sum_all()? * scale
}
