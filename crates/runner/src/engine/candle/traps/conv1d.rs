//! `conv1d` of several samples to several channels, whose backward reads the gradient as if it were `[c, n, l]`
//! for the kernel, and for the input, without padding, relies on a `conv_transpose1d` that is wrong after the
//! first sample.
//!
//! If its input has a gradient, it is in the list: the convolution is made anew, and what makes the same values
//! is differentiated beside the true operator, as a pool is. If not, the input is known by the gradient that
//! candle leaves for it: that of one output value is the kernel, at the place that the output was computed
//! from; and that the convolution is wrong, by its gradient for the kernel (`linear.rs`).
//!
//! A constant kernel is known by the gradient that candle leaves for it: that of a convolution of the same
//! input, made anew, to the bit. What is wrong is the input's gradient, and only where the kernel reaches the
//! whole input exactly, without padding or dilation: candle multiplies the kernel by a matrix whose rows it
//! takes for adjacent, so that sample `s` is given what belongs to channels `s..s + c` of the first, and what
//! belongs to the last ones of all is given to nobody. Whether nobody has it is asked.
//!
//! A kernel that is not contiguous is read as if it were, of any number of samples, so that the values are wrong
//! already, and not what the gradient says. That is right of such a constant kernel, too: it is known by what
//! candle leaves for it, of one output what it was computed from, and the input's gradient belies the values.

use candle_core::backend::BackendStorage;
use candle_core::{CpuStorage, DType, Layout, Result, Storage, Tensor};

use super::linear::{agrees, is_belied, noise};
use super::{
    Graph, Trap, distance, dot, equal, is_apart, is_multiplied, is_telling, leaves, norm, values,
};

/// What is wrong about the gradient of `kernel`, the last operand of node `at`.
pub(super) fn find<'a>(
    graph: &Graph<'a>,
    at: usize,
    kernel: &'a Tensor,
) -> Result<Option<Trap<'a>>> {
    let y = graph.nodes[at];
    let (Ok((n, c_out, l_out)), Ok((rows, c_in, k))) = (y.dims3(), kernel.dims3()) else {
        return Ok(None);
    };
    let is_like_y = c_out == rows && kernel.dtype() == y.dtype();
    if !is_like_y || !is_multiplied(y) || l_out * k * c_in == 0 {
        return Ok(None);
    }
    let read = as_read(kernel)?;
    let is_misread = !kernel.is_contiguous() && read.as_ref() != Some(&values(kernel)?);
    if !is_misread && (n < 2 || c_out < 2) {
        return Ok(None);
    }
    let is_input = |x: &&Tensor| x.dims()[..2] == [n, c_in] && x.dtype() == y.dtype();
    let mut is_wrong = false;
    for x in graph.firsts(at).filter(is_input) {
        if let Some(geometry) = geometry(graph, y, x, kernel, read.as_deref())? {
            is_wrong |= is_misread || is_wrong_of(graph, y, x, kernel, geometry)?;
        }
    }
    // A constant input leaves no more behind `y` than the kernel does.
    if graph.count_behind(kernel) + 1 == graph.count_behind(y) {
        is_wrong |= is_wrong_of_constant(graph, y, kernel)?;
    }
    let complaint = if is_misread { MISREAD } else { COMPLAINT };
    Ok(is_wrong.then(|| Trap { of: kernel, complaint: complaint.to_owned() }))
}

/// The kernel as candle reads it: as if it were contiguous; as far as its memory goes.
fn as_read(kernel: &Tensor) -> Result<Option<Vec<f64>>> {
    if kernel.is_contiguous() {
        return values(kernel).map(Some);
    }
    let (storage, layout) = kernel.storage_and_layout();
    let Storage::Cpu(storage) = &*storage else { return Ok(None) };
    let start = layout.start_offset();
    let length = match storage {
        CpuStorage::F16(v) => v.len(),
        CpuStorage::BF16(v) => v.len(),
        CpuStorage::F32(v) => v.len(),
        CpuStorage::F64(v) => v.len(),
        _ => 0,
    };
    let count = layout.shape().elem_count().min(length.saturating_sub(start));
    let read = Layout::contiguous_with_offset(count, start);
    let read = storage.to_dtype(&read, DType::F64)?;
    Ok(Some(read.as_slice::<f64>()?.to_vec()))
}

const MISREAD: &str = "candle's own `conv1d` reads a kernel that is not contiguous in memory as if it were: \
     make it `contiguous()` first";

const COMPLAINT: &str = "candle's own `conv1d` mixes up the samples of a batch in it: use candle's `conv2d` of \
     `unsqueeze(2)`, with `pad_with_zeros` for padding";

/// What is wrong about the gradient of a tensor that was convolved by a constant kernel.
pub(super) fn find_of_constants<'a>(graph: &Graph<'a>) -> Result<Option<Trap<'a>>> {
    let fixed = |(y, x): (&'a Tensor, &'a Tensor)| {
        let ((n, _, l_out), (x_n, c_in, _)) = (y.dims3().ok()?, x.dims3().ok()?);
        let is_of_constant = graph.count_behind(x) + 1 == graph.count_behind(y);
        let is_likely = n == x_n && l_out * c_in > 0 && x.dtype() == y.dtype() && is_of_constant;
        (is_likely && is_multiplied(y)).then_some((y, x))
    };
    let fixed: Vec<_> = graph.last_operands().filter_map(fixed).collect();
    if fixed.is_empty() {
        return Ok(None);
    }
    for kernel in graph.constants()? {
        for (y, x) in &fixed {
            let complaint = if drops_last(graph, y, x, kernel)? {
                COMPLAINT
            } else if is_misread(graph, y, x, kernel)? {
                MISREAD
            } else {
                continue;
            };
            if graph.has_gradient(x)? {
                return Ok(Some(Trap { of: x, complaint: complaint.to_owned() }));
            }
        }
    }
    Ok(None)
}

/// Whether `y` is candle's `conv1d` of `x` by a constant kernel of these dimensions, and has wrong values.
fn is_misread(graph: &Graph<'_>, y: &Tensor, x: &Tensor, kernel: &[usize]) -> Result<bool> {
    let ((n, c_out, l_out), (_, c_in, l)) = (y.dims3()?, x.dims3()?);
    let [.., k] = *kernel else { return Ok(false) };
    if *kernel != [c_out, c_in, k] || k == 0 || is_ambiguous(n, c_out, l_out) {
        return Ok(false);
    }
    let (input, left) = (values(&x.narrow(0, 0, 1)?)?, left(graph, y)?);
    let is_it = |g: &Geometry| {
        let is_at = |of: &&Left| of.dims == *kernel && of.is_taken_of(&input, l, *g);
        let found: Option<Vec<_>> = left.iter().map(|one| one.iter().find(is_at)).collect();
        let numbers = |found: Vec<&Left>| found.iter().flat_map(|of| of.first.clone()).collect();
        found.map(numbers).is_some_and(|numbers: Vec<_>| is_telling(&numbers, x.dtype()))
    };
    // About twice as many outputs as a row of the kernel has numbers say all: it is the same for all.
    let (samples, places) = (n.min((2 * c_in * k).div_ceil(l_out)), l_out.min(2 * c_in * k));
    let x = x.narrow(0, 0, samples)?;
    let y = y.narrow(0, 0, samples)?.narrow(2, 0, places)?.transpose(0, 1)?.flatten_from(1)?;
    let mut is_wrong = false;
    for g in Geometry::all(l, k, l_out).filter(is_it) {
        let taken = g.taken(&x, k, places)?;
        if agrees(graph, &y, &taken, &values(&taken)?)? != Some(false) {
            return Ok(false);
        }
        is_wrong = true;
    }
    Ok(is_wrong)
}

/// Whether `y` is candle's `conv1d` of `x` by a constant kernel of these dimensions, and wrong.
fn drops_last(graph: &Graph<'_>, y: &Tensor, x: &Tensor, kernel: &[usize]) -> Result<bool> {
    let ((n, c_out, l_out), (_, c_in, l)) = (y.dims3()?, x.dims3()?);
    let [.., k] = *kernel else { return Ok(false) };
    if n < 2 || c_out < 2 {
        return Ok(false);
    }
    let stride = if l_out == 1 { 1 } else { l.saturating_sub(k) / l_out.saturating_sub(1).max(1) };
    if *kernel != [c_out, c_in, k] || l_out * stride == 0 || (l_out - 1) * stride + k != l {
        return Ok(false);
    }
    let scale = 2f32.powi(-(y.elem_count().ilog2() as i32) / 2);
    let weights = (0..y.elem_count()).map(|i| scale * (1.0 + (i * 5 % 7) as f32));
    let weights: Vec<f32> = weights.collect();
    let r = Tensor::from_slice(&weights, y.shape(), y.device())?;
    let anew = Tensor::zeros(kernel, x.dtype(), x.device())?;
    let (_, of_anew) = graph.backward(&dot(&x.conv1d(&anew, 0, stride, 1, 1)?, &r)?)?;
    let (_, constants) = graph.weighed(y, &r)?;
    let Some(gradient) = of_anew.get(&anew) else { return Ok(false) };
    if !leaves(&constants, gradient)? || values(gradient)?.iter().all(|v| *v == 0.0) {
        return Ok(false);
    }
    // No sample is given what belongs to these.
    let dropped = (n + c_out - 1) * l_out;
    let of_last = weights.iter().enumerate().map(|(i, w)| if i < dropped { 0.0 } else { *w });
    let of_last = Tensor::from_iter(of_last, y.device())?.reshape(y.shape())?;
    let is_zero = values(y)?[dropped..].iter().all(|v| *v == 0.0);
    if is_zero || norm(&graph.gradients(&dot(y, &of_last)?)?) > 0.0 {
        return Ok(false);
    }
    let from = dropped / (c_out * l_out) * c_in * l;
    let of_x = (0..x.elem_count()).map(|i| if i < from { 0.0 } else { 1.0 + (i * 5 % 7) as f32 });
    let of_x = (Tensor::from_iter(of_x, x.device())?.reshape(x.shape())? * f64::from(scale))?;
    Ok(norm(&graph.gradients(&dot(x, &of_x)?)?) > 0.0)
}

/// How a kernel is moved over a sequence.
#[derive(Clone, Copy, Debug)]
struct Geometry {
    padding: usize,
    stride: usize,
    dilation: usize,
}

impl Geometry {
    /// Those that make `l_out` of `l` values with a kernel of `k`. Of more padding candle has no gradient: it counts
    /// below zero.
    fn all(l: usize, k: usize, l_out: usize) -> impl Iterator<Item = Self> {
        let strides = 1..=if l_out == 1 { 1 } else { 32 };
        let dilations = 1..=if k == 1 { 1 } else { l.max(1) };
        let pairs = strides.flat_map(move |stride| dilations.clone().map(move |d| (stride, d)));
        pairs.flat_map(move |(stride, dilation)| {
            let reach = dilation * (k - 1) + 1;
            let least = ((l_out - 1) * stride + reach).saturating_sub(l).div_ceil(2);
            (least..)
                .map(move |padding| Self { padding, stride, dilation })
                .take_while(move |g| {
                    (l + 2 * g.padding).saturating_sub(reach) / stride + 1 == l_out
                })
                .take_while(move |g| 2 * g.padding <= (l_out - 1) * stride)
        })
    }

    /// What each output at the first places takes of `x`, `[c_in * k, n * places]`.
    fn taken(self, x: &Tensor, k: usize, places: usize) -> Result<Tensor> {
        let (n, c_in, _) = x.dims3()?;
        let at = (0..k).flat_map(|j| (0..places).map(move |t| t * self.stride + j * self.dilation));
        let at = Tensor::from_iter(at.map(|at| at as u32), x.device())?;
        let taken =
            x.pad_with_zeros(2, self.padding, self.padding)?.contiguous()?.index_select(&at, 2)?;
        taken.reshape((n, c_in * k, places))?.transpose(0, 1)?.flatten_from(1)
    }

    /// Which input the output at `t` takes with the `j`th of the kernel, if it is none of the padding.
    fn input(self, t: usize, j: usize, l: usize) -> Option<usize> {
        (t * self.stride + j * self.dilation).checked_sub(self.padding).filter(|i| *i < l)
    }
}

/// How the kernel is moved over `x`, if `y` is candle's `conv1d` of them. `read` is the kernel as candle reads it.
fn geometry(
    graph: &Graph<'_>,
    y: &Tensor,
    x: &Tensor,
    kernel: &Tensor,
    read: Option<&[f64]>,
) -> Result<Option<Geometry>> {
    let ((_, c_in, l), (_, _, k), l_out) = (x.dims3()?, kernel.dims3()?, y.dim(2)?);
    let Some(row) = read.and_then(|read| read.get(..c_in * k)) else { return Ok(None) };
    let (first_x, first_y) = (values(&x.narrow(0, 0, 1)?)?, values(&y.narrow(0, 0, 1)?)?);
    // Three of the outputs tell nearly always.
    let is_likely = |g: &Geometry| {
        [0, l_out / 2, l_out - 1].into_iter().all(|t| {
            let (mut sum, mut size) = (0.0, 0.0);
            for (j, c) in (0..k).flat_map(|j| (0..c_in).map(move |c| (j, c))) {
                if let Some(i) = g.input(t, j, l) {
                    let product = first_x[c * l + i] * row[c * k + j];
                    (sum, size) = (sum + product, size + product.abs());
                }
            }
            (sum - first_y[t]).abs() <= 0.02 * size
        })
    };
    let is_whole = read.is_some_and(|read| read.len() == kernel.elem_count());
    for g in Geometry::all(l, k, l_out).filter(is_likely) {
        let is_it = if is_whole {
            let anew = x.detach().conv1d(&kernel.detach(), g.padding, g.stride, g.dilation, 1)?;
            equal(&anew, &y.detach())? && is_telling(&values(y)?, y.dtype())
        } else {
            is_told(graph, y, x, kernel, g)?
        };
        if is_it {
            return Ok(Some(g));
        }
    }
    Ok(None)
}

/// Whether `y` has the gradient of such a convolution, and other values.
fn is_told(
    graph: &Graph<'_>,
    y: &Tensor,
    x: &Tensor,
    kernel: &Tensor,
    g: Geometry,
) -> Result<bool> {
    let conv1d = |kernel: &Tensor| x.conv1d(kernel, g.padding, g.stride, g.dilation, 1);
    // Not contiguous either, so that its gradient goes the same way.
    let other = kernel.permute((2, 1, 0))?.force_contiguous()?.permute((2, 1, 0))?;
    let r = noise(y.shape(), 0)?;
    let [as_is, told] = [y, &conv1d(&other)?].map(|y| graph.gradients(&dot(y, &r)?));
    let (as_is, told) = (as_is?, told?);
    let noticed = if y.dtype().size_in_bytes() < 4 { 1e-2 } else { 1e-4 };
    Ok(distance(&as_is, &told) < noticed * norm(&told)
        && is_apart(y, &conv1d(&kernel.force_contiguous()?)?)?)
}

/// Whether the gradients of `y`, candle's `conv1d` of `x`, are wrong.
fn is_wrong_of(
    graph: &Graph<'_>,
    y: &Tensor,
    x: &Tensor,
    kernel: &Tensor,
    g: Geometry,
) -> Result<bool> {
    let suspect = x.conv1d(kernel, g.padding, g.stride, g.dilation, 1)?;
    let padded = x.pad_with_zeros(2, g.padding, g.padding)?.unsqueeze(2)?;
    let truth = padded.conv2d(&kernel.unsqueeze(2)?, 0, g.stride, g.dilation, 1)?.squeeze(2)?;
    let scale = 1.0 / ((y.dim(1)? * y.dim(2)?) as f64).sqrt();
    let r = (y.detach().to_dtype(DType::F32)? * scale)?;
    let [as_is, suspect, truth] =
        [y, &suspect, &truth].map(|y| dot(y, &r).and_then(|loss| graph.gradients(&loss)));
    let (as_is, suspect, truth) = (as_is?, suspect?, truth?);
    let apart = distance(&suspect, &truth);
    Ok(apart > 1e-2 * norm(&truth) && distance(&as_is, &suspect) < 1e-3 * apart)
}

/// Whether `y` is candle's `conv1d` of a constant, and wrong.
fn is_wrong_of_constant(graph: &Graph<'_>, y: &Tensor, kernel: &Tensor) -> Result<bool> {
    let ((n, c_out, l_out), (_, c_in, k)) = (y.dims3()?, kernel.dims3()?);
    let inputs = graph.constants()?.iter().filter(|dims| dims.len() == 3 && dims[..2] == [n, c_in]);
    let mut lengths = inputs.map(|dims| dims[2]).peekable();
    if is_ambiguous(n, c_out, l_out) || lengths.peek().is_none() {
        return Ok(false);
    }
    let (row, left) = (values(&kernel.narrow(0, 0, 1)?)?, left(graph, y)?);
    let is_conv1d = |l: usize| {
        let is_at = |g: Geometry, of: &Left| of.dims == [n, c_in, l] && of.is_row_at(&row, k, g);
        Geometry::all(l, k, l_out).any(|g| left.iter().all(|one| one.iter().any(|of| is_at(g, of))))
    };
    if !lengths.any(is_conv1d) {
        return Ok(false);
    }
    // A row for each output's place, and a column for each channel.
    let y = y.transpose(1, 2)?.reshape((n * l_out, c_out))?;
    is_belied(graph, &y, &kernel.reshape((c_out, c_in * k))?.t()?)
}

/// Whether the kernel could as well be what is convolved, as candle mixes up what it leaves for a constant.
fn is_ambiguous(n: usize, c_out: usize, l_out: usize) -> bool {
    l_out == 1 && n > 1 && n == c_out
}

/// The gradient that candle leaves for a constant: that of the output at `t` of the first channel in the first
/// sample, which is believed.
struct Left {
    t: usize,
    dims: [usize; 3],
    /// The first part of it, `dims[1..]`.
    first: Vec<f64>,
    /// The sum of its absolute values.
    size: f64,
}

/// Of two outputs, those for each constant of three dimensions.
fn left(graph: &Graph<'_>, y: &Tensor) -> Result<[Vec<Left>; 2]> {
    let l_out = y.dim(2)?;
    let of = |t: usize| -> Result<Vec<Left>> {
        let one = (0..y.elem_count()).map(|i| if i == t { 1f32 } else { 0.0 });
        let r = Tensor::from_iter(one, y.device())?.reshape(y.shape())?;
        let (_, constants) = graph.weighed(y, &r)?;
        let mut left = Vec::new();
        for gradient in constants.get_ids().filter_map(|id| constants.get_id(*id)) {
            let Ok((parts, rows, columns)) = gradient.dims3() else { continue };
            if gradient.elem_count() > 0 {
                let first = values(&gradient.narrow(0, 0, 1)?)?;
                let size = first.iter().map(|v| v.abs()).sum();
                left.push(Left { t, dims: [parts, rows, columns], first, size });
            }
        }
        Ok(left)
    };
    Ok([of((l_out - 1) / 3)?, of(l_out / 2)?])
}

impl Left {
    /// Whether this is the row of a kernel where the output was computed from, and nothing else.
    fn is_row_at(&self, row: &[f64], k: usize, g: Geometry) -> bool {
        let (mut size, [.., l]) = (0.0, self.dims);
        for (i, weight) in row.iter().enumerate() {
            let Some(input) = g.input(self.t, i % k, l) else { continue };
            if (self.first[i / k * l + input] - weight).abs() > 1e-3 * weight.abs() {
                return false;
            }
            size += weight.abs();
        }
        size > 0.0 && (self.size - size).abs() <= 1e-3 * size
    }

    /// Whether this is what the output takes of the first sample of an input, `[dims[1], l]`, and something.
    fn is_taken_of(&self, input: &[f64], l: usize, g: Geometry) -> bool {
        let k = self.dims[2];
        let taken = |i| g.input(self.t, i % k, l).map_or(0.0, |at| input[i / k * l + at]);
        self.size > 0.0 && self.first.iter().enumerate().all(|(i, v)| *v == taken(i))
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use candle_core::Device;
    use candle_nn::Init;
    use parking_lot::Mutex;

    use super::super::tests::{Chain, batch, layer};
    use super::*;
    use crate::engine::candle::{CandleEngine, CandleOptions, TensorBatch};

    /// Of a kernel no more of which is in memory than a row: the rest is in memory here, as nobody says what is
    /// read where it is not.
    #[test]
    fn a_kernel_beyond_its_memory_is_told_by_its_gradient() {
        let geometry_of = |is_contiguous: bool| {
            let kept = Arc::new(Mutex::new(None));
            let keep = kept.clone();
            let engine = CandleEngine::new(CandleOptions::default(), |vb| {
                let uniform = Init::Uniform { lo: -0.5, up: 0.5 };
                let before = vb.get_with_hints((1, 4, 1), "before", uniform)?;
                let weight = vb.get_with_hints((6, 4, 3), "weight", uniform)?;
                let of = move |x: &Tensor| {
                    let x = x.broadcast_mul(&before)?;
                    let kernel = weight.narrow(0, 0, 1)?.broadcast_as((6, 4, 3))?;
                    let kernel = if is_contiguous { kernel.contiguous()? } else { kernel };
                    let y = x.conv1d(&kernel, 1, 2, 1, 1)?;
                    *keep.lock() = Some((y.clone(), x, kernel));
                    Ok(y)
                };
                Ok(Chain(vec![layer(of)]))
            })
            .unwrap();
            let batch = TensorBatch::new(&batch(&[2, 4, 9]), DType::F32, &Device::Cpu).unwrap();
            let loss = engine.forward(&batch).unwrap();
            let graph = Graph::new(loss.value(), &engine.params, &engine.slot);
            let (y, x, kernel) = kept.lock().take().unwrap();
            let row = values(&kernel.narrow(0, 0, 1).unwrap()).unwrap();
            geometry(&graph, &y, &x, &kernel, Some(&row)).unwrap()
        };
        let found = geometry_of(false).unwrap();
        assert_eq!((found.padding, found.stride, found.dilation), (1, 2, 1));
        assert!(geometry_of(true).is_none());
    }
}
