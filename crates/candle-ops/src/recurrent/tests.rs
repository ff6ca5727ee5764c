//! Both cells, with and without lengths, by differences, and in half precision.

use candle_core::{Result, Tensor};

use super::cell::{Cell, Gru, Lstm};
use super::{Sequences, apply};
use crate::tests::{assert_differentiates, assert_rounds_once, values};

/// Inputs of a cell: products, weight, bias, states.
pub(crate) fn inputs<C: Cell>(batch: usize, times: usize, hidden: usize) -> Vec<Tensor> {
    let gates = C::GATES * hidden;
    let mut all = vec![
        values("x", &[batch, times, gates]),
        values("w", &[gates, hidden]),
        values("b", &[gates]),
        values("h", &[batch, hidden]),
    ];
    if C::HAS_CELL {
        all.push(values("c", &[batch, hidden]));
    }
    all
}

/// Outputs and final states in one tensor.
pub(crate) fn whole<C: Cell>(t: &[Tensor], lengths: &[usize], is_reverse: bool) -> Result<Tensor> {
    let (batch, times, gates) = t[0].dims3()?;
    let hidden = gates / C::GATES;
    let sequences = Sequences { batch, times, hidden, lengths: lengths.to_vec(), is_reverse };
    let (y, states) = apply::<C>(&t[0], &t[1], &t[2], &t[3..], sequences)?;
    let states = states.iter().map(Tensor::flatten_all);
    let all = [y.flatten_all()].into_iter().chain(states).collect::<Result<Vec<_>>>()?;
    Tensor::cat(&all, 0)
}

fn check<C: Cell>() {
    let inputs = inputs::<C>(3, 4, 2);
    for (lengths, is_reverse) in
        [(&[4, 4, 4], false), (&[4, 4, 4], true), (&[2, 3, 1], false), (&[1, 4, 3], true)]
    {
        let what = format!("{}, {lengths:?}, {is_reverse}", C::NAME);
        let op = |t: &[Tensor]| whole::<C>(t, lengths, is_reverse);
        assert_differentiates(&what, &inputs, op);
        assert_rounds_once(&what, &inputs, op);
    }
}

#[test]
fn lstm_differentiates() {
    check::<Lstm>();
}

#[test]
fn gru_differentiates() {
    check::<Gru>();
}
