//! Operators over rows: layer normalization, softmax, cross entropy; sums of columns.

use std::sync::Arc;

use candle_core::{DType, Result, Tensor};
use parking_lot::Mutex;

use super::jobs::{ColumnSumsJob, FoldJob, LayerNormJob, LossJob, SoftmaxJob, SummedJob, u32_of};
use super::node::{node, node_taking};
use super::{FOLDED, Kernel, Kernels, Output, THREADS, blocks_of_warps};
use crate::context::half_of_products;
use crate::graph::custom_op::{apply1, apply3};
use crate::graph::tape::{beside, casts};

/// Number of warps that keep a row in registers together; 0 for a longer row, which a warp reads
/// again.
#[derive(Clone, Copy, Debug)]
struct Team(usize);

impl Team {
    fn of(width: usize) -> Self {
        let holds = |warps: &usize| width <= warps * 32 * HELD;
        Self([1, 2, 4, THREADS / 32].into_iter().find(holds).unwrap_or(0))
    }

    /// Number of blocks with one team per row.
    fn blocks(self, rows: usize) -> usize {
        let warps = rows * self.0.max(1);
        blocks_of_warps(warps)
    }
}

/// The same as in `rows.cu`.
const HELD: usize = 8;

/// Number of blocks of a kernel that sums over the rows: each returns partial sums.
const PARTS: usize = 256;

/// Under autocast an `f32` result is also written in half precision, for the product that takes it
/// next, and a gradient of that type is read: without casts, and with their bits.
pub(super) fn layer_norm(
    kernels: &Arc<Kernels>,
    x: &Tensor,
    gamma: &Tensor,
    beta: &Tensor,
    eps: f32,
) -> Result<Tensor> {
    let x = &x.contiguous()?;
    // A cast to the same type has no effect.
    let [gamma, beta] = [gamma.to_dtype(DType::F32)?, beta.to_dtype(DType::F32)?];
    let (gamma, beta) = (&gamma.contiguous()?, &beta.contiguous()?);
    let (count, dtype) = (gamma.elem_count(), x.dtype());
    let rows = x.elem_count() / count;
    let team = Team::of(count);
    let sizes = LayerNormJob {
        rows: u32_of(rows),
        count: u32_of(count),
        eps,
        team: u32_of(team.0),
        ..Default::default()
    };
    let has_half = dtype == DType::F32 && team.0 > 0 && casts::is_recording();
    let half = has_half.then(half_of_products).flatten();
    let y = kernels.empty(x.shape(), dtype)?;
    let copy = half.map(|half| kernels.empty(x.shape(), half)).transpose()?;
    let lines = kernels.empty((rows, 2), DType::F32)?;
    let job = LayerNormJob {
        x: kernels.address(x)?,
        y: y.at,
        half: copy.as_ref().map_or(0, |copy| copy.at),
        gamma: kernels.address(gamma)?,
        beta: kernels.address(beta)?,
        lines: lines.at,
        ..sizes
    };
    let kernel = if half.is_some() { Kernel::layer_norm_wide } else { Kernel::layer_norm };
    // SAFETY: a `LayerNormJob` of the forward pass.
    unsafe { kernels.launch(half.unwrap_or(dtype), kernel, team.blocks(rows), &job) }?;
    let (kernels, lines) = (kernels.clone(), lines.tensor());
    let backward = move |[x, gamma, _]: [&Tensor; 3], _: &Tensor, dy: &Tensor| {
        layer_norm_backward(&kernels, [x, gamma, &lines], dy, sizes)
    };
    let y = apply3(node_taking("layer_norm", y, half, backward), [x, gamma, beta])?;
    if let Some(copy) = copy {
        let backward = |_: [&Tensor; 1], _: &Tensor, dy: &Tensor| Ok([Some(dy.clone())]);
        casts::prepare(&y, || apply1(node("to_dtype", copy, backward), [&y]))?;
    }
    Ok(y)
}

/// `lines` are the rows' statistics; `dy` has the type of `x`, or is in half precision.
fn layer_norm_backward(
    kernels: &Kernels,
    [x, gamma, lines]: [&Tensor; 3],
    dy: &Tensor,
    sizes: LayerNormJob,
) -> Result<[Option<Tensor>; 3]> {
    let (rows, count, team) = (sizes.rows as usize, sizes.count as usize, sizes.team as usize);
    let dx = kernels.empty(x.shape(), x.dtype())?;
    let is_held = team > 0;
    let blocks = if is_held { Team(team).blocks(rows).min(PARTS) } else { blocks_of_warps(rows) };
    let part = kernels.empty(if is_held { 2 * blocks * count } else { 1 }, DType::F64)?;
    let job = LayerNormJob {
        x: kernels.address(x)?,
        dy: kernels.address(dy)?,
        dx: dx.at,
        gamma: kernels.address(gamma)?,
        lines: kernels.address(lines)?,
        part: part.at,
        ..sizes
    };
    let is_wide = x.dtype() != dy.dtype();
    let kernel =
        if is_wide { Kernel::layer_norm_wide_backward } else { Kernel::layer_norm_backward };
    // SAFETY: a `LayerNormJob` of the backward pass; `part` has sums for each block.
    unsafe { kernels.launch(dy.dtype(), kernel, blocks, &job) }?;
    let [dbeta, dgamma] = match is_held {
        true => kernels.fold(part.at, blocks, count, true)?,
        false => kernels.sums(dy, count, Some((x, lines)))?,
    };
    Ok([Some(dx.tensor()), dgamma, dbeta])
}

pub(super) fn softmax(kernels: &Arc<Kernels>, x: &Tensor) -> Result<Tensor> {
    let x = &x.contiguous()?;
    let of = Softmax { width: x.dims().last().copied().unwrap_or(1), seen: 0 };
    let y = kernels.empty(x.shape(), x.dtype())?;
    // SAFETY: rows, and memory for as many.
    unsafe {
        of.launch(
            kernels,
            Kernel::softmax,
            x.dtype(),
            x.elem_count(),
            [kernels.address(x)?, y.at, 0],
        )
    }?;
    let kernels = kernels.clone();
    let backward = move |[x]: [&Tensor; 1], y: &Tensor, dy: &Tensor| {
        let dx = kernels.empty(x.shape(), x.dtype())?;
        let (job, count) = ([dx.at, kernels.address(y)?, kernels.address(dy)?], x.elem_count());
        // SAFETY: as above.
        unsafe { of.launch(&kernels, Kernel::softmax_backward, x.dtype(), count, job) }?;
        Ok([Some(dx.tensor())])
    };
    apply1(node("softmax", y, backward), [x])
}

/// Softmax over rows.
#[derive(Clone, Copy, Debug)]
pub(super) struct Softmax {
    /// Number of values per row.
    pub(super) width: usize,
    /// If not 0: row `i` has only its first `i % seen + 1` values.
    pub(super) seen: usize,
}

impl Softmax {
    /// # Safety
    ///
    /// The addresses must be those of contiguous tensors of `elements` elements of this type: `x`,
    /// or its gradient backward; `y`; and backward `dy`.
    pub(super) unsafe fn launch(
        self,
        kernels: &Kernels,
        kernel: Kernel,
        dtype: DType,
        elements: usize,
        [x, y, dy]: [u64; 3],
    ) -> Result<()> {
        let (rows, team) = (elements / self.width, Team::of(self.width));
        let job = SoftmaxJob {
            x,
            y,
            dy,
            rows: u32_of(rows),
            count: u32_of(self.width),
            seen: u32_of(self.seen),
            team: u32_of(team.0),
        };
        // SAFETY: a `SoftmaxJob`; the caller vouches for the addresses.
        unsafe { kernels.launch(dtype, kernel, team.blocks(rows), &job) }
    }
}

/// The caller has checked the labels.
///
/// On a tape, forward writes the gradient of long rows already, while they are in the cache, for
/// the gradient of the loss that was the last: 1, or a loss scale. Backward computes it only if
/// that has changed.
pub(super) fn cross_entropy(
    kernels: &Arc<Kernels>,
    logits: &Tensor,
    labels: &Tensor,
) -> Result<Tensor> {
    let x = &logits.contiguous()?;
    let (rows, count) = x.dims2()?;
    let labels = labels.to_dtype(DType::I64)?.contiguous()?;
    let loss = kernels.empty((), DType::F32)?;
    let (part, lines) = (kernels.empty(rows, DType::F64)?, kernels.empty((rows, 2), DType::F32)?);
    let at = kernels.address(x)?;
    let is_wide = count >= 8 * THREADS && count.is_multiple_of(8) && at.is_multiple_of(16);
    let guessed = match is_wide && x.track_op() && casts::is_recording() {
        true => Some((kernels.empty(x.shape(), x.dtype())?, kernels.empty(1, DType::F32)?)),
        false => None,
    };
    let [dx, of] = guessed.as_ref().map_or([0; 2], |(dx, of)| [dx.at, of.at]);
    let sizes = LossJob {
        guess: kernels.address(&kernels.loss_gradient)?,
        arrived: kernels.address(&kernels.arrived)?,
        rows: u32_of(rows),
        count: u32_of(count),
        ..Default::default()
    };
    let job = LossJob {
        x: at,
        labels: kernels.address(&labels)?,
        y: loss.at,
        lines: lines.at,
        part: part.at,
        dx,
        guessed: of,
        ..sizes
    };
    let (kernel, blocks) = match is_wide {
        // As many rows as the cache has room for.
        true => (Kernel::cross_entropy_wide, rows.min(PARTS)),
        false => (Kernel::cross_entropy, blocks_of_warps(rows)),
    };
    // SAFETY: a `LossJob` of the forward pass; `part` has a number for each row.
    unsafe { kernels.launch(x.dtype(), kernel, blocks, &job) }?;
    let (kernels, lines) = (kernels.clone(), lines.tensor());
    let guessed = Mutex::new(guessed.map(|(dx, of)| (dx, of.tensor())));
    let backward = move |[x]: [&Tensor; 1], _: &Tensor, dy: &Tensor| {
        // A second backward pass has memory of its own.
        let (dx, of) = match guessed.lock().take() {
            Some((dx, of)) => (dx, Some(of)),
            None => (kernels.empty(x.shape(), x.dtype())?, None),
        };
        let job = LossJob {
            x: kernels.address(x)?,
            labels: kernels.address(&labels)?,
            lines: kernels.address(&lines)?,
            dy: kernels.address(dy)?,
            dx: dx.at,
            guessed: of.as_ref().map_or(Ok(0), |of| kernels.address(of))?,
            ..sizes
        };
        let (kernel, blocks) = match is_wide {
            true => (Kernel::cross_entropy_wide_backward, rows.min(1 << 16)),
            false => (Kernel::cross_entropy_backward, blocks_of_warps(rows)),
        };
        // SAFETY: a `LossJob` of the backward pass.
        unsafe { kernels.launch(x.dtype(), kernel, blocks, &job) }?;
        Ok([Some(dx.tensor())])
    };
    apply1(node("cross_entropy", loss, backward), [x])
}

impl Kernels {
    /// Sums of the `count` columns of `dy`, `f32`: those that the operator has left that computed
    /// `dy` last, with the same bits, or by reading `dy`.
    pub(super) fn column_sums(&self, dy: &Tensor, count: usize) -> Result<Tensor> {
        let left = beside::take(dy).and_then(|part| Some((part.dims2().ok()?.0, part)));
        let [sum, _] = match left.filter(|(_, part)| part.dims()[1] == count) {
            Some((parts, part)) => self.fold(self.address(&part)?, parts, count, false)?,
            None => self.sums(dy, count, None)?,
        };
        Ok(sum.expect("there is always a sum"))
    }

    /// A gradient that `kernel`, which takes a `SummedJob`, computes from one tensor or two. Leaves
    /// the sums of its columns for the next operator of a tape's backward pass: the gradient of its
    /// bias. `None` without such a pass, or if the rows are not in packs.
    pub(super) fn summed(
        &self,
        kernel: Kernel,
        [a, b]: [&Tensor; 2],
        dtype: DType,
    ) -> Result<Option<Tensor>> {
        let (count, pack) = (a.dims().last().copied().unwrap_or(1), 16 / dtype.size_in_bytes());
        if !beside::is_taken() || !count.is_multiple_of(pack) {
            return Ok(None);
        }
        let (a_at, b_at) = (self.address(a)?, self.address(b)?);
        let y = self.empty(a.shape(), dtype)?;
        if !(a_at | b_at | y.at).is_multiple_of(16) {
            return Ok(None);
        }
        let rows = a.elem_count() / count;
        let (tiles, parts) = tiles_and_parts(rows, count, dtype);
        let part = self.empty((parts, count), DType::F64)?;
        let job = SummedJob {
            a: a_at,
            b: b_at,
            y: y.at,
            part: part.at,
            rows: u32_of(rows),
            count: u32_of(count),
            parts: u32_of(parts),
            unused: 0,
        };
        // SAFETY: a `SummedJob` of rows in packs; `part` has numbers for each part of the rows.
        unsafe { self.launch(dtype, kernel, tiles * parts, &job) }?;
        let y = y.tensor();
        beside::leave(&y, part.tensor());
        Ok(Some(y))
    }

    /// Sums of the columns of `dy`; and of `dy` times the normalized `x`, from the statistics that
    /// `layer_norm` wrote for each row.
    fn sums(
        &self,
        dy: &Tensor,
        count: usize,
        normal: Option<(&Tensor, &Tensor)>,
    ) -> Result<[Option<Tensor>; 2]> {
        let rows = dy.elem_count() / count;
        let (tiles, parts) = tiles_and_parts(rows, count, dy.dtype());
        let all = if normal.is_some() { 2 * count } else { count };
        let part = self.empty((parts, all), DType::F64)?;
        let (x, lines) = match normal {
            Some((x, lines)) => (self.address(x)?, self.address(lines)?),
            None => (0, 0),
        };
        let job = ColumnSumsJob {
            x,
            dy: self.address(dy)?,
            lines,
            part: part.at,
            rows: u32_of(rows),
            count: u32_of(count),
            parts: u32_of(parts),
            unused: 0,
        };
        // SAFETY: a `ColumnSumsJob`; `part` has numbers for each part of the rows.
        unsafe { self.launch(dy.dtype(), Kernel::column_sums, tiles * parts, &job) }?;
        self.fold(part.at, parts, count, normal.is_some())
    }

    /// Sums `parts` times `count` partial sums, and a second set of them, if given.
    fn fold(
        &self,
        part: u64,
        parts: usize,
        count: usize,
        two: bool,
    ) -> Result<[Option<Tensor>; 2]> {
        let sum = self.empty(count, DType::F32)?;
        let dot = two.then(|| self.empty(count, DType::F32)).transpose()?;
        let job = FoldJob {
            part,
            sum: sum.at,
            dot: dot.as_ref().map_or(0, |dot| dot.at),
            count: u32_of(count),
            parts: u32_of(parts),
        };
        let columns = if two { 2 * count } else { count };
        // SAFETY: a `FoldJob`; the caller's kernel wrote the parts.
        unsafe { self.launch(DType::F32, Kernel::fold_columns, columns.div_ceil(FOLDED), &job) }?;
        Ok([Some(sum.tensor()), dot.map(Output::tensor)])
    }
}

/// Numbers of tiles of columns, and of parts of the rows, for sums of columns.
fn tiles_and_parts(rows: usize, count: usize, dtype: DType) -> (usize, usize) {
    let tiles = count.div_ceil(32 * 16 / dtype.size_in_bytes());
    (tiles, (2 * PARTS / tiles).min(rows / 64).max(1))
}
