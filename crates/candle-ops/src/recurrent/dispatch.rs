//! On a GPU: a composition, step by step; see `graph/device.rs`.

use candle_core::{Result, Tensor};

use super::Sequences;
use super::cell::Cell;
use crate::graph::device::widened;
use crate::{sigmoid, tanh};

pub(crate) fn recurrent<C: Cell>(
    x: &Tensor,
    weight: &Tensor,
    small: &Tensor,
    sequences: &Sequences,
) -> Result<(Tensor, Vec<Tensor>)> {
    let Sequences { batch, times, hidden, .. } = *sequences;
    let (dtype, device) = (x.dtype(), x.device());
    let [x, weight, small] = widened([x, weight, small])?;
    let states = if C::HAS_CELL { 2 } else { 1 };
    let bias = small.narrow(0, states * batch, C::GATES)?.reshape((1, C::GATES * hidden))?;
    let mut state =
        (0..states).map(|i| small.narrow(0, i * batch, batch)).collect::<Result<Vec<_>>>()?;
    // The place of each output among those of all steps; the last one is 0.
    let mut rows = vec![(sequences.steps() * batch) as u32; batch * times];
    let mut outputs = Vec::with_capacity(sequences.steps() + 1);
    let (x, weight) = (x.reshape((batch * times, C::GATES * hidden))?, weight.t()?);
    for step in 0..sequences.steps() {
        let at = |sample| sequences.time(sample, step).map(|time| sample * times + time);
        for (sample, at) in (0..batch).filter_map(|sample| Some((sample, at(sample)?))) {
            rows[at] = (step * batch + sample) as u32;
        }
        // A sample that has ended reads any row; its state is not replaced.
        let from: Vec<_> = (0..batch).map(|sample| at(sample).unwrap_or(0) as u32).collect();
        let from = Tensor::from_vec(from, batch, device)?;
        let product = state[0].matmul(&weight)?.broadcast_add(&bias)?;
        let next = next::<C>(&x.index_select(&from, 0)?, &product, &state, hidden)?;
        let is_on: Vec<_> = (0..batch).map(|sample| u8::from(at(sample).is_some())).collect();
        let is_on = Tensor::from_vec(is_on, (batch, 1), device)?.broadcast_as((batch, hidden))?;
        let next = next.iter().zip(&state).map(|(next, old)| is_on.where_cond(next, old));
        state = next.collect::<Result<_>>()?;
        outputs.push(state[0].clone());
    }
    outputs.push(Tensor::zeros((1, hidden), x.dtype(), device)?);
    let y = Tensor::cat(&outputs, 0)?
        .index_select(&Tensor::from_vec(rows, batch * times, device)?, 0)?;
    let states = state.iter().map(|state| state.to_dtype(dtype)).collect::<Result<_>>()?;
    Ok((y.reshape((batch, times, hidden))?.to_dtype(dtype)?, states))
}

/// The state after a step.
fn next<C: Cell>(
    x: &Tensor,
    product: &Tensor,
    state: &[Tensor],
    hidden: usize,
) -> Result<Vec<Tensor>> {
    let gate = |of: &Tensor, i: usize| of.narrow(1, i * hidden, hidden);
    if let [_, c] = state {
        let sum = (x + product)?;
        let [i, f, o] = [0, 1, 3].map(|i| sigmoid(&gate(&sum, i)?));
        let c = ((f? * c)? + (i? * tanh(&gate(&sum, 2)?)?)?)?;
        return Ok(vec![(o? * tanh(&c)?)?, c]);
    }
    let [r, z] = [0, 1].map(|i| sigmoid(&(gate(x, i)? + gate(product, i)?)?));
    let n = tanh(&(gate(x, 2)? + (r? * gate(product, 2)?)?)?)?;
    // (1 - z) n + z h.
    Ok(vec![(&n + (z? * (&state[0] - &n)?)?)?])
}
