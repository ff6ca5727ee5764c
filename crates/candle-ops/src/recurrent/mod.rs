//! LSTM and GRU over whole sequences, each as one operator.
//!
//! The product of the input with its weights is a [`linear`](crate::linear) of all steps. The
//! operator has only the rest: per step a product of the state with the recurrent weights, and one
//! pass over the gates, which are saved for the backward pass. The backward pass goes through time
//! the other way, and then computes the gradient of the recurrent weights as one product of all
//! steps.
//!
//! A sample has its own length: later steps leave its state as it is, and have an output of 0. In
//! reverse it begins at its own end. So step `s` of a sample is at time `s` or, in reverse, at
//! `length - 1 - s`; what is saved is in the order of steps, inputs and outputs in that of time.

pub(crate) mod cell;
mod dispatch;

use std::any::Any;
use std::marker::PhantomData;
use std::sync::OnceLock;

use candle_core::{Result, Shape, Tensor, bail};

use self::cell::{Backward, Cell, Forward};
use crate::cast;
use crate::cpu::gemm::{Mat, gemm};
use crate::cpu::real::Real;
use crate::cpu::simd::{self, Kernel};
use crate::graph::device;
use crate::graph::operator::{Input, Operator, apply3};

/// The sizes of one call.
#[derive(Clone, Debug)]
pub(crate) struct Sequences {
    pub(crate) batch: usize,
    /// Number of time steps of the tensors.
    pub(crate) times: usize,
    pub(crate) hidden: usize,
    /// Number of steps of each sample, at most `times`.
    pub(crate) lengths: Vec<usize>,
    pub(crate) is_reverse: bool,
}

impl Sequences {
    /// The largest length.
    pub(crate) fn steps(&self) -> usize {
        self.lengths.iter().copied().max().unwrap_or(0)
    }

    /// The time of a sample's step, if the sample is that long.
    pub(crate) fn time(&self, sample: usize, step: usize) -> Option<usize> {
        let length = self.lengths[sample];
        let time = if self.is_reverse { length.wrapping_sub(1 + step) } else { step };
        (step < length).then_some(time)
    }
}

/// Applies a cell to `x`, `[batch, times, gates * hidden]`, the product of the input with its
/// weights. `weight` is `[gates * hidden, hidden]`, `bias` `[gates * hidden]` of the same type, and
/// `state` the initial states, `[batch, hidden]` each. Returns `[batch, times, hidden]` and the
/// final states, in the type of `x`.
pub(crate) fn apply<C: Cell>(
    x: &Tensor,
    weight: &Tensor,
    bias: &Tensor,
    state: &[Tensor],
    sequences: Sequences,
) -> Result<(Tensor, Vec<Tensor>)> {
    let Sequences { batch, times, hidden, .. } = sequences;
    let name = if C::HAS_CELL { "lstm_cell" } else { "gru_cell" };
    // Operators have up to three inputs; states and bias, which are small, are one.
    let rows = state.iter().cloned().chain([bias.reshape((C::GATES, hidden))?]).collect::<Vec<_>>();
    let small = Tensor::cat(&rows, 0)?;
    let [x, weight] = cast(name, [x, weight])?;
    if device::dispatches(&x) {
        return dispatch::recurrent::<C>(&x, &weight, &small, &sequences);
    }
    let op = Recurrent::<C> { sequences, saved: OnceLock::new(), cell: PhantomData };
    let y = apply3(op, [x, weight, small])?;
    let (count, size) = (batch * times * hidden, batch * hidden);
    let last = |i| y.narrow(0, count + i * size, size)?.reshape((batch, hidden));
    let states = (0..state.len()).map(last).collect::<Result<_>>()?;
    Ok((y.narrow(0, 0, count)?.reshape((batch, times, hidden))?, states))
}

/// The result has one dimension: the outputs, then the final states.
struct Recurrent<C> {
    sequences: Sequences,
    /// A [`Saved`] in the compute type. Set by the forward pass.
    saved: OnceLock<Box<dyn Any + Send + Sync>>,
    cell: PhantomData<C>,
}

/// Of each step, for all samples.
struct Saved<T> {
    gates: Vec<T>,
    /// The state before each step, and the final one.
    h: Vec<T>,
    c: Vec<T>,
}

impl<C: Cell> Recurrent<C> {
    /// Number of elements of a hidden state and of a cell state of all samples.
    const fn sizes(&self) -> (usize, usize) {
        let size = self.sequences.batch * self.sequences.hidden;
        (size, if C::HAS_CELL { size } else { 0 })
    }

    fn check(&self, x: &Shape, weight: &Shape, small: &Shape) -> Result<()> {
        let Sequences { batch, times, hidden, .. } = self.sequences;
        let gates = C::GATES * hidden;
        let states = if C::HAS_CELL { 2 } else { 1 };
        if x.dims() != [batch, times, gates]
            || weight.dims() != [gates, hidden]
            || small.dims() != [states * batch + C::GATES, hidden]
            || hidden == 0
        {
            bail!("{}: an input of shape {x:?} does not fit a weight of shape {weight:?}", C::NAME);
        }
        Ok(())
    }
}

impl<C: Cell> Operator<3> for Recurrent<C> {
    const NAME: &'static str = C::NAME;

    fn forward<T: Real>(&self, [x, weight, small]: [Input<'_>; 3]) -> Result<(Vec<T>, Shape)> {
        self.check(x.shape(), weight.shape(), small.shape())?;
        let Sequences { batch, times, hidden, .. } = self.sequences;
        let (steps, gates, (size, cells)) =
            (self.sequences.steps(), C::GATES * hidden, self.sizes());
        let (x, weight, small) = (x.values::<T>()?, weight.values::<T>()?, small.values::<T>()?);
        let (state, bias) = small.split_at(size + cells);
        let weight = transposed(&weight, gates, hidden);
        let mut saved = Saved {
            gates: vec![T::ZERO; steps * 4 * size],
            h: vec![T::ZERO; (steps + 1) * size],
            c: vec![T::ZERO; (steps + 1) * cells],
        };
        saved.h[..size].copy_from_slice(&state[..size]);
        saved.c[..cells].copy_from_slice(&state[size..]);
        let count = batch * times * hidden;
        let mut y = vec![T::ZERO; count + size + cells];
        let mut product = vec![T::ZERO; batch * gates];
        for step in 0..steps {
            let (h, next_h) = saved.h[step * size..][..2 * size].split_at_mut(size);
            let (c, next_c) = saved.c[step * cells..][..2 * cells].split_at_mut(cells);
            gemm(&mut product, false, Mat::new(h, batch, hidden), Mat::new(&weight, hidden, gates));
            simd::run(Step::<C, T> {
                sequences: &self.sequences,
                step,
                x: &x,
                product: &product,
                bias,
                before: (h, c),
                after: (next_h, next_c),
                saved: &mut saved.gates[step * 4 * size..][..4 * size],
                y: &mut y,
                cell: PhantomData,
            });
        }
        y[count..count + size].copy_from_slice(&saved.h[steps * size..]);
        y[count + size..].copy_from_slice(&saved.c[steps * cells..]);
        let _ = self.saved.set(Box::new(saved));
        let len = y.len();
        Ok((y, len.into()))
    }

    fn backward<T: Real>(
        &self,
        [x, weight, small]: [Input<'_>; 3],
        _y: Input<'_>,
        dy: Input<'_>,
    ) -> Result<[Option<Vec<T>>; 3]> {
        let Sequences { batch, times, hidden, .. } = self.sequences;
        let (steps, gates, (size, cells)) =
            (self.sequences.steps(), C::GATES * hidden, self.sizes());
        let saved = self.saved.get().and_then(|saved| saved.downcast_ref::<Saved<T>>());
        let saved = saved.expect("forward came first, in the same type");
        let (values, dy) = (weight.values::<T>()?, dy.values::<T>()?);
        let (dy, last) = dy.split_at(batch * times * hidden);
        let mut dsmall = vec![T::ZERO; small.shape().elem_count()];
        dsmall[..size + cells].copy_from_slice(last);
        let (state, db) = dsmall.split_at_mut(size + cells);
        let (dh, dc) = state.split_at_mut(size);
        let mut dx = vec![T::ZERO; x.shape().elem_count()];
        let mut dproduct = vec![T::ZERO; steps * batch * gates];
        for step in (0..steps).rev() {
            let dproduct = &mut dproduct[step * batch * gates..][..batch * gates];
            simd::run(StepBackward::<C, T> {
                sequences: &self.sequences,
                step,
                saved: &saved.gates[step * 4 * size..][..4 * size],
                before: (&saved.h[step * size..][..size], &saved.c[step * cells..][..cells]),
                next_c: &saved.c[(step + 1) * cells..][..cells],
                dy,
                dh,
                dc,
                dx: &mut dx,
                dproduct,
                cell: PhantomData,
            });
            let dproduct = Mat::new(dproduct, batch, gates);
            gemm(dh, true, dproduct, Mat::new(&values, gates, hidden));
        }
        for row in dproduct.chunks_exact(gates) {
            db.iter_mut().zip(row).for_each(|(sum, v)| *sum += *v);
        }
        let dw = weight.is_tracked.then(|| {
            let mut dw = vec![T::ZERO; gates * hidden];
            let rows = Mat::new(&saved.h[..steps * size], steps * batch, hidden);
            gemm(&mut dw, false, Mat::new(&dproduct, steps * batch, gates).t(), rows);
            dw
        });
        Ok([Some(dx), dw, Some(dsmall)])
    }
}

/// The transpose in memory: a product by it at each step need not reorder it again.
fn transposed<T: Real>(values: &[T], rows: usize, columns: usize) -> Vec<T> {
    let mut to = vec![T::ZERO; values.len()];
    for (at, row) in values.chunks_exact(columns).enumerate() {
        for (to, v) in to[at..].iter_mut().step_by(rows).zip(row) {
            *to = *v;
        }
    }
    to
}

/// A step of all samples.
struct Step<'a, C, T> {
    sequences: &'a Sequences,
    step: usize,
    x: &'a [T],
    product: &'a [T],
    bias: &'a [T],
    before: (&'a [T], &'a [T]),
    after: (&'a mut [T], &'a mut [T]),
    saved: &'a mut [T],
    y: &'a mut [T],
    cell: PhantomData<C>,
}

impl<C: Cell, T: Real> Kernel for Step<'_, C, T> {
    #[inline(always)]
    fn run(self) {
        let Sequences { batch, times, hidden, .. } = *self.sequences;
        let (gates, cells) = (C::GATES * hidden, if C::HAS_CELL { hidden } else { 0 });
        let ((h, c), (next_h, next_c)) = (self.before, self.after);
        for sample in 0..batch {
            let next_h = &mut next_h[sample * hidden..][..hidden];
            let next_c = &mut next_c[sample * cells..][..cells];
            let (h, c) = (&h[sample * hidden..][..hidden], &c[sample * cells..][..cells]);
            let Some(time) = self.sequences.time(sample, self.step) else {
                next_h.copy_from_slice(h);
                next_c.copy_from_slice(c);
                continue;
            };
            let at = sample * times + time;
            C::forward(Forward {
                x: &self.x[at * gates..][..gates],
                product: &self.product[sample * gates..][..gates],
                bias: self.bias,
                h,
                c,
                next_h,
                next_c,
                saved: &mut self.saved[sample * 4 * hidden..][..4 * hidden],
            });
            self.y[at * hidden..][..hidden].copy_from_slice(next_h);
        }
    }
}

/// The gradients of a step of all samples.
struct StepBackward<'a, C, T> {
    sequences: &'a Sequences,
    step: usize,
    saved: &'a [T],
    before: (&'a [T], &'a [T]),
    next_c: &'a [T],
    dy: &'a [T],
    dh: &'a mut [T],
    dc: &'a mut [T],
    dx: &'a mut [T],
    dproduct: &'a mut [T],
    cell: PhantomData<C>,
}

impl<C: Cell, T: Real> Kernel for StepBackward<'_, C, T> {
    #[inline(always)]
    fn run(self) {
        let Sequences { batch, times, hidden, .. } = *self.sequences;
        let (gates, cells) = (C::GATES * hidden, if C::HAS_CELL { hidden } else { 0 });
        let (h, c) = self.before;
        for sample in 0..batch {
            let Some(time) = self.sequences.time(sample, self.step) else { continue };
            let at = sample * times + time;
            let dh = &mut self.dh[sample * hidden..][..hidden];
            for (dh, dy) in dh.iter_mut().zip(&self.dy[at * hidden..][..hidden]) {
                *dh += *dy;
            }
            C::backward(Backward {
                saved: &self.saved[sample * 4 * hidden..][..4 * hidden],
                h: &h[sample * hidden..][..hidden],
                c: &c[sample * cells..][..cells],
                next_c: &self.next_c[sample * cells..][..cells],
                dh,
                dc: &mut self.dc[sample * cells..][..cells],
                dx: &mut self.dx[at * gates..][..gates],
                dproduct: &mut self.dproduct[sample * gates..][..gates],
            });
        }
    }
}

#[cfg(test)]
pub(crate) mod tests;
