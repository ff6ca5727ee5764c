//! `max_pool2d`, `avg_pool2d`, `upsample_nearest`: found by their values, bit for bit.
//!
//! * `max_pool2d` multiplies its gradient by the share of a window that is largest, and both pools put it
//!   in the wrong place where windows do not cover the image. The tensor is differentiated, and beside it
//!   the suspect and the true operator, both made anew of the same input. It is wrong if the tensor's
//!   gradient is the suspect's and not the true one.
//! * `upsample_nearest` overwrites what other uses of its input have added to the gradient before. A loss made
//!   for the purpose, in which it comes last, shows whether it does: nothing of another use is left then. It is
//!   wrong if candle comes to another use first in the model's own loss.

use candle_core::{D, DType, Result, Tensor, TensorId};

use super::{Gradients, Graph, Trap, distance, equal, norm};

/// What looks like a pool, and does not have the gradient of the true operator: next to nothing, though much looks
/// like one (the maximum in a softmax).
pub(super) fn suspects(graph: &Graph<'_>) -> Result<Vec<(TensorId, Stock)>> {
    let mut alike = Vec::new();
    for (y, x) in graph.last_operands() {
        for stock in Stock::suspects(x, y) {
            if !matches!(stock, Stock::Nearest(..)) && stock.makes(x, y)? {
                alike.push((stock, x, y));
            }
        }
    }
    let off = |(stock, x, y): &(Stock, &Tensor, &Tensor)| {
        // Of equal values it may be a maximum's as well, such as a softmax takes.
        let truth = match stock.line(y) {
            Some(dim) => x.max_keepdim(dim),
            None => stock.truth(x),
        };
        weighed(y)? - weighed(&truth?)?
    };
    let off = graph.not_right(alike, &off)?;
    Ok(off.into_iter().map(|(stock, _, y)| (y.id(), stock)).collect())
}

/// What is wrong about the gradient of `x`, the operand of node `at`.
pub(super) fn find<'a>(
    graph: &Graph<'a>,
    at: usize,
    x: &'a Tensor,
    suspects: &[(TensorId, Stock)],
) -> Result<Option<Trap<'a>>> {
    let y = graph.nodes[at];
    for stock in Stock::suspects(x, y) {
        let is_wrong = match stock {
            Stock::Nearest(..) => {
                stock.makes(x, y)? && is_used_before(graph, x, at)? && overwrites(graph, x, y)?
            }
            _ => suspects.contains(&(y.id(), stock)) && is_wrong(graph, stock, x, y)?,
        };
        if is_wrong {
            return Ok(Some(Trap { of: x, complaint: stock.complaint() }));
        }
    }
    Ok(None)
}

/// A suspect.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Stock {
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

    /// Of which dimension this is the maximum, if `y` is what it made.
    fn line(self, y: &Tensor) -> Option<usize> {
        match (self, extents(y)) {
            (Self::MaxPool(1, _), (_, 1)) => Some(3),
            (Self::MaxPool(_, 1), (1, _)) => Some(2),
            _ => None,
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

/// Whether the gradient of `x` is wrong that comes by way of `y`, which this pool makes of it.
fn is_wrong(graph: &Graph<'_>, stock: Stock, x: &Tensor, y: &Tensor) -> Result<bool> {
    let [as_is, suspect, truth] = [y, &stock.apply(x)?, &stock.truth(x)?]
        .map(|y| weighed(y).and_then(|loss| graph.gradients(&loss)));
    let (as_is, suspect, truth) = (as_is?, suspect?, truth?);
    let apart = distance(&suspect, &truth);
    // The suspect's own gradient comes again to the bit; another window's may be a percent away.
    let is_like = |other: &Gradients| distance(&as_is, other) < 1e-5 * apart;
    if apart <= 1e-3 * norm(&truth) || !is_like(&suspect) {
        return Ok(false);
    }
    let Some(dim) = stock.line(y) else { return Ok(true) };
    Ok(!is_like(&graph.gradients(&weighed(&x.max_keepdim(dim)?)?)?))
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
    let of_x = |(_, node): &(usize, &&Tensor)| node.id() != x.id() && graph.is_behind(x, node);
    let of_x: Vec<usize> = graph.nodes.iter().enumerate().filter(of_x).map(|(i, _)| i).collect();
    for i in of_x.iter().copied().take_while(|i| *i < at) {
        // What has no other of them behind it was computed from `x` itself.
        if !of_x.iter().any(|other| *other != i && graph.is_node_behind(*other, i)) {
            return Ok(true);
        }
        let last = graph.last[i].filter(|last| graph.is_behind(graph.nodes[at], last));
        if last.map_or(Ok(false), |last| joins(graph.nodes[i], last, x))? {
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
        for op in [Tensor::add, |s: &Tensor, x: &Tensor| x - s, Tensor::sub, Tensor::mul] {
            // Where it is another, a few numbers nearly always show it. One that is `s` itself says nothing.
            let made = op(&few(&s)?, &few(&x)?)?;
            if equal(&made, &few(&u)?)? {
                let made = op(&s, &x)?;
                if equal(&made, &u)? && !equal(&made, &s)? {
                    return Ok(true);
                }
            }
        }
        return Ok(false);
    }
    for dim in 0..x.rank() {
        let fits = |(i, to): (usize, &usize)| {
            let (s, x) = (s.dims()[i], x.dims()[i]);
            if i == dim { *to == s + x } else { *to == s && s == x }
        };
        if u.rank() != x.rank() || !u.dims().iter().enumerate().all(fits) {
            continue;
        }
        for parts in [[&s, &x], [&x, &s]] {
            if equal(&Tensor::cat(&parts, dim)?, &u)? {
                return Ok(true);
            }
        }
    }
    Ok(false)
}

/// Two of each dimension.
fn few(t: &Tensor) -> Result<Tensor> {
    (0..t.rank()).try_fold(t.clone(), |t, dim| t.narrow(dim, 0, t.dim(dim)?.min(2)))
}

/// One number of `y`, with a gradient that is none of its constants, nor nothing where `y` is, and far from
/// what half precision overflows at.
fn weighed(y: &Tensor) -> Result<Tensor> {
    let scale = 0.5 / (y.elem_count() as f64).sqrt();
    (y.to_dtype(DType::F32)? + 1.0)?.sqr()?.sum_all()? * scale
}
