//! What is linear in a tensor, beside its gradient.
//!
//! Let `y` be the product of a constant, which nobody shows, and of `w`. The gradient of the sum of `r y` says
//! what the constant is, as far as the parameters behind `w` can, and so what the values of `y` ought to be.
//!
//! If `w` is homogeneous in its parameters `p`, that is, scales with them, so is `y`, and the sum of `r y` is, for
//! any `r`, that of `p` times its gradient, as Euler says.
//!
//! If not, let `r` be a column of numbers times a row of numbers. Then of the constant only the sum of its rows by
//! that column counts. This sum times `w` is the same sum of the rows of `y`, and these equations leave nothing of
//! it open but what `w` makes nothing of. So the gradient is that of what solves them, and more only of rows that
//! `w` makes nothing of; `w` has all these gradients. If not so, `y` is not that product.

use candle_core::{DType, Device, Result, Shape, Tensor};

use super::{Gradients, Graph, dot, mantissa, norm, values};

/// Whether `y`, `[m, n]`, which is a constant of `[m, k]` times `w`, `[k, n]`, has other values than its gradient
/// says.
pub(super) fn is_belied(graph: &Graph<'_>, y: &Tensor, w: &Tensor) -> Result<bool> {
    // What `w` is off by may be more of `y`.
    let noticed = if is_short(y) { 5e-2 } else { 1e-3 };
    if scales(graph, w, 0.1 * noticed)? {
        return Ok(!scales(graph, y, noticed)?);
    }
    Ok(agrees(graph, y, w, &values(w)?)? == Some(false))
}

/// Whether `y`, `[m, n]`, may be a constant of `[m, k]` times these values, `[k, n]`, and have its gradient, that
/// of such a product by `w`. None where it would cost the first step seconds to tell.
pub(super) fn agrees(
    graph: &Graph<'_>,
    y: &Tensor,
    w: &Tensor,
    of_w: &[f64],
) -> Result<Option<bool>> {
    // Three sums, as what is wrong may add up to nearly nothing by chance.
    let ((m, n), (k, _)) = (y.dims2()?, w.dims2()?);
    let (down, along) = (noise(&(3, m).into(), 4)?, noise(&(1, n).into(), 5)?);
    let nodes: usize = w.sorted_nodes().iter().map(|node| node.elem_count()).sum();
    let Some(solved) = solve(y, k, of_w, &down)? else { return Ok(None) };
    if !solved.others_follow {
        return Ok(Some(false));
    }
    if solved.open() * nodes.max(k * k) > 1 << 27 {
        return Ok(None);
    }
    let gradient = |t: &Tensor, down: &[f64]| {
        let down: Vec<f32> = down.iter().map(|v| *v as f32).collect();
        let r = Tensor::new(down, &Device::Cpu)?.unsqueeze(1)?.matmul(&along)?;
        graph.gradients(&dot(t, &r.to_device(t.device())?)?)
    };
    let count = 2 * solved.open() + 16;
    let of_open = solved.nothing().into_iter().map(|row| Ok(few(&gradient(w, &row)?, count)));
    let least = if is_short(y) { 5e-3 } else { 1e-6 };
    let of_open = base(of_open.collect::<Result<_>>()?, count, least).vectors;
    for (i, down) in values(&down)?.chunks(m).enumerate() {
        let (row, whole) = solved.row(i);
        let (told, of_row) = (gradient(y, down)?, gradient(w, &row)?);
        let mut rest = few(&told, count);
        add(&mut rest, -1.0, &few(&of_row, count));
        reduce(&mut rest, &of_open, count);
        // Where they are nearly nothing, what they are the differences of was rounded.
        let behind = told.keys().map(|index| values(&graph.params.tensors[*index]));
        let behind = behind.collect::<Result<Vec<_>>>()?.concat();
        let whole = whole * size_of(&values(&along)?) * mean(of_w) / mean(&behind);
        let is_more = size_of(&rest) > solved.rounding * (norm(&told) + norm(&of_row) + whole);
        // And gradients may round by more: so that those of a multiple are not the multiples.
        let mut rounded = 0f64;
        for factor in [1.1, 1.2, 1.3, 1.4, 1.5, 1.6, 1.7, 1.8].into_iter().filter(|_| is_more) {
            let multiple: Vec<f64> = row.iter().map(|v| factor * v).collect();
            let mut off = few(&gradient(w, &multiple)?, count);
            add(&mut off, -factor, &few(&of_row, count));
            rounded = rounded.max(size_of(&off));
        }
        if is_more && size_of(&rest) > 10.0 * rounded {
            return Ok(Some(false));
        }
    }
    Ok(Some(true))
}

/// The rows `x` for which `x w` is a sum of the rows of `y`.
struct Solved {
    k: usize,
    /// Of length 1 and at right angles, each with what its products by those rows are.
    base: Vec<Vec<f64>>,
    /// By sum: how many times as large its numbers were if what they are sums of did not cancel.
    shares: Vec<f64>,
    /// What may be rounding, as a share.
    rounding: f64,
    /// Whether the equations that were not needed hold, too.
    others_follow: bool,
}

/// Solves for the sums of the rows of `y` by these weights. None if there is too much to solve, or `y` is too small.
fn solve(y: &Tensor, k: usize, of_w: &[f64], weights: &Tensor) -> Result<Option<Solved>> {
    let ((_, n), size) = (y.dims2()?, size_of(&values(y)?));
    // Numbers that small are rounded by more than their share.
    let is_tiny = y.dtype() == DType::F16 && size < 1e-3 * (y.elem_count() as f64).sqrt();
    if k > 1024 || is_tiny {
        return Ok(None);
    }
    let y_in_f64 = y.detach().to_device(&Device::Cpu)?.to_dtype(DType::F64)?;
    let sums = values(&weights.to_dtype(DType::F64)?.matmul(&y_in_f64)?)?;
    // More equations than that say nothing new.
    let taken = n.min(k + 16);
    let equation = |i| of_w[i * n / taken..].iter().chain(&sums).step_by(n).copied().collect();
    let least = if is_short(y) { 0.1 } else { 1e-2 };
    let Base { vectors: base, others, spread } = base((0..taken).map(equation).collect(), k, least);
    let eps = 2f64.powi(-mantissa(y.dtype()).unwrap_or(7));
    let rounding = (8.0 * eps).max(1e-5) * (1.0 + spread);
    let most = 4.0 * rounding * size / (n as f64).sqrt();
    let mut rests = others.iter().flat_map(|other| &other[k..]);
    let others_follow = base.len() < k || rests.all(|rest| rest.abs() <= most);
    let shares = sums.chunks(n).map(|sum| (size / size_of(sum)).max(1.0)).collect();
    Ok(Some(Solved { k, base, shares, rounding, others_follow }))
}

impl Solved {
    /// How many numbers of a row are open.
    fn open(&self) -> usize {
        self.k - self.base.len()
    }

    /// The least row of a sum, and half its length if nothing cancelled.
    fn row(&self, i: usize) -> (Vec<f64>, f64) {
        let mut row = vec![0.0; self.k];
        self.base.iter().for_each(|b| add(&mut row, b[self.k + i], b));
        let length = size_of(&row);
        (row, 0.5 * self.shares[i] * length)
    }

    /// Of length 1 and at right angles, the rows that make no difference.
    fn nothing(&self) -> Vec<Vec<f64>> {
        let one = |at| {
            let mut one = vec![0.0; self.k];
            one[at] = 1.0;
            reduce(&mut one, &self.base, self.k);
            one
        };
        let mut nothing = base((0..self.k).map(one).collect(), self.k, 1e-9).vectors;
        nothing.truncate(self.open());
        nothing
    }
}

fn is_short(t: &Tensor) -> bool {
    t.dtype().size_in_bytes() < 4
}

struct Base {
    /// Their first `len` numbers are of length 1 and at right angles.
    vectors: Vec<Vec<f64>>,
    /// What those leave of the vectors that are not worth one.
    others: Vec<Vec<f64>>,
    /// How many times as long the longest was as the shortest that was.
    spread: f64,
}

/// Of which the first `len` numbers of these are sums, but for this share of the longest.
fn base(mut others: Vec<Vec<f64>>, len: usize, least: f64) -> Base {
    let (mut vectors, mut longest, mut spread): (Vec<Vec<f64>>, f64, f64) = (Vec::new(), 0.0, 1.0);
    while vectors.len() < len {
        let sizes = others.iter().map(|vector| size_of(&vector[..len])).enumerate();
        let Some((at, size)) = sizes.max_by(|a, b| a.1.total_cmp(&b.1)) else { break };
        longest = longest.max(size);
        if size.is_nan() || size <= least * longest {
            break;
        }
        spread = longest / size;
        let mut next = others.swap_remove(at);
        next.iter_mut().for_each(|v| *v /= size);
        others.iter_mut().for_each(|v| reduce(v, std::slice::from_ref(&next), len));
        vectors.push(next);
    }
    Base { vectors, others, spread }
}

/// Takes away what lies along these.
fn reduce(vector: &mut [f64], base: &[Vec<f64>], len: usize) {
    for b in base {
        let share = product(&vector[..len], &b[..len]);
        add(vector, -share, b);
    }
}

/// A few sums of the numbers of `gradients` by chance, which are equal if these are.
fn few(gradients: &Gradients, count: usize) -> Vec<f64> {
    let mut sums = vec![0.0; count];
    for (i, v) in gradients.values().flatten().enumerate() {
        sums[i % count] += f64::from(number(i, 6)) * v;
    }
    sums
}

fn size_of(vector: &[f64]) -> f64 {
    product(vector, vector).sqrt()
}

/// The root of the mean square.
fn mean(numbers: &[f64]) -> f64 {
    size_of(numbers) / (numbers.len() as f64).sqrt()
}

fn product(a: &[f64], b: &[f64]) -> f64 {
    a.iter().zip(b).map(|(a, b)| a * b).sum()
}

fn add(to: &mut [f64], factor: f64, vector: &[f64]) {
    to.iter_mut().zip(vector).for_each(|(to, v)| *to += factor * v);
}

/// Whether `t` is homogeneous in its parameters, as far as its gradient says.
fn scales(graph: &Graph<'_>, t: &Tensor, noticed: f64) -> Result<bool> {
    // What does not may seem to by chance, but hardly three times.
    for seed in 0..3 {
        let r = noise(t.shape(), seed)?.to_device(t.device())?;
        let told = along(graph, &graph.gradients(&dot(t, &r)?)?)?;
        let (is, size) = weighed(&values(t)?, &values(&r)?);
        if (told - is).abs() > noticed * size {
            return Ok(false);
        }
    }
    Ok(true)
}

/// The sum of the parameters times `gradients`.
fn along(graph: &Graph<'_>, gradients: &Gradients) -> Result<f64> {
    let mut sum = 0.0;
    for (index, gradient) in gradients {
        sum += weighed(&values(&graph.params.tensors[*index])?, gradient).0;
    }
    Ok(sum)
}

/// The sum of `r v`, and what it would be about if signs were by chance.
fn weighed(v: &[f64], r: &[f64]) -> (f64, f64) {
    let products = v.iter().zip(r).map(|(v, r)| v * r);
    (products.clone().sum(), products.map(|p| p * p).sum::<f64>().sqrt())
}

/// Numbers between 0.5 and 1.5 of either sign.
pub(super) fn noise(shape: &Shape, seed: u64) -> Result<Tensor> {
    let numbers: Vec<f32> = (0..shape.elem_count()).map(|i| number(i, seed)).collect();
    Tensor::from_vec(numbers, shape, &Device::Cpu)
}

fn number(i: usize, seed: u64) -> f32 {
    let bits = (i as u64 + 1 + (seed << 40)).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    let bits = (bits ^ (bits >> 29)).wrapping_mul(0xbf58_476d_1ce4_e5b9) >> 32;
    let size = 0.5 + (bits >> 1) as f32 / (1u64 << 31) as f32;
    if bits & 1 == 0 { size } else { -size }
}
