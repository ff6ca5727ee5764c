//! The traps in what is made of sequences: `conv1d` and `matmul` of several samples.

use std::sync::Arc;

use candle_core::{Module, Result, Tensor};
use candle_nn::Init;
use parking_lot::Mutex;

use super::super::{CandleEngine, CandleOptions};
use super::tests::{Chain, Keep, batch, layer, noise};
use crate::engine::{Engine, SharedSink};

/// What the first step says of a convolution of sequences by a kernel of this shape, with another parameter
/// behind it or not.
fn of_sequences(
    (shape, kernel): (&[usize], &[usize]),
    dtype: fused_optim::DType,
    is_first: bool,
    op: fn(&Tensor, &Tensor) -> Result<Tensor>,
) -> crate::Result<()> {
    let uniform = Init::Uniform { lo: -0.5, up: 0.5 };
    let mut engine = CandleEngine::new(CandleOptions { dtype, ..Default::default() }, |vb| {
        let before = vb.get_with_hints((1, shape[1], 1), "before", uniform)?;
        let weight = vb.get_with_hints(kernel, "conv.weight", uniform)?;
        let bias = vb.get_with_hints((1, 1, 1), "conv.bias", uniform)?;
        Ok(Chain(vec![
            layer(move |x| if is_first { Ok(x.clone()) } else { x.broadcast_mul(&before) }),
            layer(move |x| op(x, &weight)),
            layer(move |x| x.broadcast_add(&bias)?.tanh()),
        ]))
    })
    .unwrap();
    let sink: SharedSink = Arc::new(Mutex::new(Keep::default()));
    engine.forward_backward(&batch(shape), 1.0, &sink).map(drop)
}

/// A kernel of rows of length 1, as weight normalisation has it.
fn normal(w: &Tensor) -> Result<Tensor> {
    w.broadcast_div(&w.sqr()?.sum_keepdim((1, 2))?.sqrt()?)
}

#[test]
fn a_conv1d_that_mixes_up_samples_is_named() {
    use fused_optim::DType::{F16, F32};
    let sizes: (&[usize], &[usize]) = (&[3, 4, 9], &[6, 4, 3]);
    for is_first in [true, false] {
        let says = |sizes, dtype, op| {
            let said = of_sequences(sizes, dtype, is_first, op);
            let case = (sizes, dtype, is_first);
            let error = said.map_or_else(|e| e.to_string(), |()| format!("nothing: {case:?}"));
            assert!(error.contains("of `conv.weight` is wrong: candle's own `conv1d`"), "{error}");
        };
        for dtype in [F32, F16] {
            says(sizes, dtype, |x, w| x.conv1d(w, 0, 1, 1, 1));
            says(sizes, dtype, |x, w| x.conv1d(w, 1, 2, 1, 1));
        }
        says(sizes, F32, |x, w| x.conv1d(w, 2, 1, 2, 1));
        says((&[3, 4, 9], &[6, 2, 3]), F32, |x, w| x.conv1d(w, 1, 1, 1, 2));
        // By a kernel that is computed from parameters.
        for dtype in [F32, F16] {
            says(sizes, dtype, |x, w| x.conv1d(&normal(w)?, 1, 2, 1, 1));
            says(sizes, dtype, |x, w| x.conv1d(&(w * 2.0)?.tanh()?, 2, 1, 2, 1));
        }
        says(sizes, F32, |x, w| {
            let causal = Tensor::new(&[1f32, 1.0, 0.0], x.device())?;
            x.conv1d(&w.broadcast_mul(&causal)?, 1, 1, 1, 1)
        });
        says((&[3, 4, 9], &[6, 2, 3]), F32, |x, w| x.conv1d(&normal(w)?, 0, 1, 1, 2));
        says((&[2, 4, 9], &[4, 4, 3]), F32, |x, w| {
            let w = normal(w)?;
            x.conv1d(&w, 1, 1, 1, 1)?.tanh()?.conv1d(&w, 1, 1, 1, 1)
        });
        let fine = |sizes, op| of_sequences(sizes, F32, is_first, op).unwrap();
        fine((&[1, 4, 9], &[6, 4, 3]), |x, w| x.conv1d(w, 1, 1, 1, 1));
        fine((&[3, 4, 9], &[4, 1, 3]), |x, w| x.conv1d(w, 1, 1, 1, 4));
        // As the error says; and other uses of such a parameter.
        fine(sizes, |x, w| {
            let x = x.pad_with_zeros(2, 1, 1)?.unsqueeze(2)?;
            x.conv2d(&w.unsqueeze(2)?, 0, 1, 1, 1)?.squeeze(2)
        });
        fine(sizes, |x, w| {
            let x = x.pad_with_zeros(2, 1, 1)?.unsqueeze(2)?;
            x.conv2d(&w.tanh()?.unsqueeze(2)?, 0, 1, 1, 1)?.squeeze(2)
        });
        fine((&[3, 4, 9], &[3, 4, 4]), |x, w| w.matmul(x));
        fine((&[4, 4, 9], &[4, 4, 9]), |x, w| x * w);
        fine((&[4, 4, 9], &[4, 4, 9]), |x, w| x + w.exp()?);
    }
}

/// What the first step says of a convolution by a constant of what a parameter, `before`, is behind.
fn by_constant(
    shape: &[usize],
    dtype: fused_optim::DType,
    op: impl Fn(&Tensor) -> Result<Tensor> + Send + 'static,
) -> std::result::Result<(), String> {
    let channels = shape[1];
    let mut engine = CandleEngine::new(CandleOptions { dtype, ..Default::default() }, |vb| {
        let uniform = Init::Uniform { lo: 0.5, up: 1.5 };
        let before = vb.get_with_hints((1, channels, 1), "before", uniform)?;
        let after = vb.get_with_hints((1, 1, 1), "after", uniform)?;
        Ok(Chain(vec![
            layer(move |x| x.broadcast_mul(&before)),
            layer(op),
            layer(move |x| x.broadcast_mul(&after)?.tanh()),
        ]))
    })
    .unwrap();
    let sink: SharedSink = Arc::new(Mutex::new(Keep::default()));
    engine.forward_backward(&batch(shape), 1.0, &sink).map(drop).map_err(|e| e.to_string())
}

/// A constant kernel.
fn fixed(like: &Tensor, dims: &[usize]) -> Result<Tensor> {
    noise(dims)?.to_dtype(like.dtype())
}

#[test]
fn a_conv1d_by_a_constant_that_mixes_up_samples_is_named() {
    use fused_optim::DType::{F16, F32};
    let says = |shape: &[usize], dtype, op: fn(&Tensor) -> Result<Tensor>| {
        let said = by_constant(shape, dtype, op);
        let error = said.expect_err(&format!("nothing of {shape:?} {dtype:?}"));
        assert!(error.contains("of `before` is wrong: candle's own `conv1d`"), "{error}");
    };
    for dtype in [F32, F16] {
        says(&[3, 4, 9], dtype, |x| x.conv1d(&fixed(x, &[6, 4, 3])?, 0, 1, 1, 1));
        says(&[2, 4, 9], dtype, |x| x.conv1d(&fixed(x, &[2, 4, 3])?, 0, 3, 1, 1));
        says(&[2, 4, 9], dtype, |x| x.tanh()?.conv1d(&fixed(x, &[6, 2, 5])?, 0, 2, 1, 2)?.exp());
    }
    // A pointwise one, one of a single output, and one the other way round in memory.
    says(&[3, 4, 9], F32, |x| x.conv1d(&fixed(x, &[3, 4, 1])?, 0, 1, 1, 1));
    says(&[3, 4, 5], F32, |x| x.conv1d(&fixed(x, &[6, 4, 5])?, 0, 1, 1, 1));
    says(&[3, 6, 6], F32, |x| x.transpose(1, 2)?.conv1d(&fixed(x, &[3, 6, 2])?, 0, 2, 1, 1));
    // One of several, padded by hand, and of a tensor that is used again.
    says(&[3, 4, 9], F32, |x| {
        let x = x.conv1d(&fixed(x, &[4, 4, 3])?, 1, 1, 1, 1)?.relu()?;
        x.pad_with_zeros(2, 1, 1)?.conv1d(&fixed(&x, &[4, 4, 3])?, 0, 1, 1, 1)? + &x
    });
}

#[test]
fn a_conv1d_by_a_constant_that_is_right_is_left_alone() {
    use fused_optim::DType::{F16, F32};
    let fine = |shape: &[usize], op: fn(&Tensor) -> Result<Tensor>| {
        by_constant(shape, F32, op).unwrap();
        by_constant(shape, F16, op).unwrap();
    };
    fine(&[3, 4, 9], |x| x.conv1d(&fixed(x, &[6, 4, 3])?, 1, 1, 1, 1));
    fine(&[3, 4, 9], |x| x.conv1d(&fixed(x, &[6, 4, 3])?, 0, 1, 2, 1));
    fine(&[3, 4, 10], |x| x.conv1d(&fixed(x, &[6, 4, 3])?, 0, 2, 1, 1));
    fine(&[1, 4, 9], |x| x.conv1d(&fixed(x, &[6, 4, 3])?, 0, 1, 1, 1));
    fine(&[3, 4, 9], |x| x.conv1d(&fixed(x, &[1, 4, 3])?, 0, 1, 1, 1));
    fine(&[3, 4, 9], |x| x.conv1d(&fixed(x, &[4, 1, 3])?, 0, 1, 1, 4));
    // Nothing is lost of nothing.
    fine(&[3, 4, 9], |x| x.conv1d(&fixed(x, &[6, 4, 3])?.zeros_like()?, 0, 1, 1, 1)? + 1.0);
    fine(&[3, 4, 9], |x| x.detach().conv1d(&fixed(x, &[4, 4, 1])?, 0, 1, 1, 1)? + x);
    // As the error says.
    by_constant(&[3, 4, 9], F32, |x| {
        x.unsqueeze(2)?.conv2d(&fixed(x, &[6, 4, 3])?.unsqueeze(2)?, 0, 1, 1, 1)?.squeeze(2)
    })
    .unwrap();
    // Other constants of three dimensions.
    fine(&[4, 4, 4], |x| x * fixed(x, &[4, 4, 4])?);
    fine(&[4, 4, 4], |x| fixed(x, &[4, 4, 4])?.matmul(x)? + x.matmul(&fixed(x, &[4, 4, 4])?)?);
}

#[test]
fn a_product_that_mixes_up_samples_is_named() {
    let step = |dims: &[usize], op: fn(&Tensor, &Tensor) -> Result<Tensor>| {
        let mut engine = CandleEngine::new(CandleOptions::default(), |vb| {
            let uniform = Init::Uniform { lo: -0.5, up: 0.5 };
            let before = vb.get_with_hints((1, 5, 4), "before", uniform)?;
            let weight = vb.get_with_hints((6, 5), "fc.weight", uniform)?;
            let first = layer(move |x| x.broadcast_mul(&before));
            Ok(Chain(vec![first, layer(move |x| op(x, &weight)), layer(|x| x.tanh())]))
        })
        .unwrap();
        let sink: SharedSink = Arc::new(Mutex::new(Keep::default()));
        let step = engine.forward_backward(&batch(dims), 1.0, &sink);
        step.map(drop).map_err(|e| e.to_string())
    };
    fn linear(x: &Tensor, weight: &Tensor) -> Result<Tensor> {
        candle_nn::Linear::new(weight.clone(), None).forward(x)
    }
    let says = |dims: &[usize], op: fn(&Tensor, &Tensor) -> Result<Tensor>| {
        let error = step(dims, op).unwrap_err();
        assert!(error.contains("of `before` and of one more parameter is wrong"), "{error}");
        assert!(error.contains("candle's own `matmul`"), "{error}");
    };
    says(&[3, 5, 4], |x, w| linear(&x.transpose(1, 2)?, w));
    says(&[2, 3, 5, 4], |x, w| linear(&x.transpose(2, 3)?, w)?.tanh());
    says(&[1, 3, 5, 4], |x, w| linear(&x.transpose(2, 3)?, w));
    says(&[3, 5, 4], |x, w| x.transpose(1, 2)?.matmul(&w.t()?.broadcast_left(3)?)?.exp());
    let fine = |dims: &[usize], op: fn(&Tensor, &Tensor) -> Result<Tensor>| {
        step(dims, op).unwrap();
    };
    fine(&[3, 5, 4], |x, w| linear(&x.transpose(1, 2)?.contiguous()?, w));
    fine(&[3, 5, 4], |x, w| x.transpose(1, 2)?.broadcast_matmul(&w.t()?));
    fine(&[3, 5, 4], |x, w| x.transpose(1, 2)?.matmul(&w.t()?.broadcast_left(3)?.contiguous()?));
    fine(&[3, 5, 4], |x, w| w.broadcast_left(3)?.matmul(x));
    fine(&[3, 5, 4], |x, w| linear(&x.narrow(2, 1, 1)?.transpose(1, 2)?, w));
    fine(&[1, 5, 4], |x, w| linear(&x.transpose(1, 2)?, w));
}
