//! The traps in what is made of sequences: `conv1d` and `matmul` of several samples.

use std::sync::Arc;

use candle_core::{D, DType, Module, Result, Tensor};
use candle_nn::Init;
use parking_lot::Mutex;
use proptest::prelude::*;

use super::super::{CandleEngine, CandleOptions};
use super::tests::{Chain, Keep, batch, layer, noise};
use crate::engine::SharedSink;

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
    crate::testing::train_step(&mut engine, &batch(shape), 1.0, &sink).map(drop)
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
        // By one whose numbers are each computed from all parameters.
        for dtype in [F32, F16] {
            says(sizes, dtype, |x, w| {
                x.conv1d(
                    &w.broadcast_div(&w.sqr()?.sum_all()?.sqrt()?.reshape((1, 1, 1))?)?,
                    1,
                    2,
                    1,
                    1,
                )
            });
        }
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

#[test]
fn a_conv1d_by_a_kernel_that_is_not_contiguous_is_named() {
    use fused_optim::DType::{F16, F32};
    for is_first in [true, false] {
        let says = |sizes, dtype, op| {
            let said = of_sequences(sizes, dtype, is_first, op);
            let case = (sizes, dtype, is_first);
            let error = said.map_or_else(|e| e.to_string(), |()| format!("nothing: {case:?}"));
            assert!(
                error.contains("`conv.weight` is wrong: candle's own `conv1d` reads"),
                "{error}"
            );
        };
        for dtype in [F32, F16] {
            says((&[3, 4, 9], &[4, 6, 3]), dtype, |x, w| x.conv1d(&w.transpose(0, 1)?, 1, 2, 1, 1));
            says((&[1, 4, 9], &[6, 3, 4]), dtype, |x, w| x.conv1d(&w.transpose(1, 2)?, 0, 1, 2, 1));
        }
        says((&[1, 4, 9], &[3, 4, 1]), F32, |x, w| x.conv1d(&w.permute((2, 1, 0))?, 0, 1, 1, 1));
        says((&[2, 4, 9], &[6, 3, 2]), F32, |x, w| x.conv1d(&w.t()?, 1, 1, 1, 2));
        let fine = |sizes, op| of_sequences(sizes, F32, is_first, op).unwrap();
        fine((&[1, 4, 9], &[4, 6, 3]), |x, w| {
            x.conv1d(&w.transpose(0, 1)?.contiguous()?, 1, 2, 1, 1)
        });
        // One that does not scale with its parameters, one that is everywhere of both, and one beyond whose
        // memory candle reads.
        for dtype in [F32, F16] {
            says((&[1, 4, 9], &[4, 6, 3]), dtype, |x, w| {
                x.conv1d(&(w + 0.5)?.transpose(0, 1)?, 1, 2, 1, 1)
            });
            says((&[2, 4, 9], &[4, 16, 3]), dtype, |x, w| {
                x.conv1d(&normal(w)?.transpose(0, 1)?, 1, 1, 1, 1)
            });
            says((&[2, 4, 9], &[6, 4, 3]), dtype, |x, w| {
                x.conv1d(&w.narrow(0, 0, 1)?.broadcast_as((6, 4, 3))?, 1, 1, 2, 1)
            });
        }
        // What lies another way and is the same.
        fine((&[2, 4, 9], &[1, 4, 3]), |x, w| {
            let w = w.broadcast_as((6, 4, 3))?.contiguous()?;
            x.unsqueeze(2)?.conv2d(&w.unsqueeze(2)?, 0, 1, 1, 1)?.squeeze(2)
        });
        fine((&[1, 4, 9], &[4, 1, 1]), |x, w| x.conv1d(&w.transpose(0, 1)?, 0, 1, 1, 1));
        fine((&[1, 4, 9], &[3, 4, 6]), |x, w| {
            x.conv1d(&(w.ones_like()? + w * 0.0)?.permute((2, 1, 0))?, 0, 1, 1, 1)
        });
        // Others that lie so.
        fine((&[4, 4, 4], &[4, 4, 4]), |x, w| x.matmul(&w.t()?)? + w.t()?.matmul(x)?);
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
    crate::testing::train_step(&mut engine, &batch(shape), 1.0, &sink)
        .map(drop)
        .map_err(|e| e.to_string())
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
        assert!(
            error.contains("of `before` is wrong: candle's own `conv1d` mixes"),
            "{shape:?} {error}"
        );
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
fn a_conv1d_by_a_constant_that_is_not_contiguous_is_named() {
    use fused_optim::DType::{F16, F32};
    for dtype in [F32, F16] {
        let says = |shape: &[usize], op: fn(&Tensor) -> Result<Tensor>| {
            let error = by_constant(shape, dtype, op).expect_err(&format!("{shape:?} {dtype:?}"));
            assert!(error.contains("of `before` is wrong: candle's own `conv1d` reads"), "{error}");
        };
        says(&[1, 4, 9], |x| x.conv1d(&fixed(x, &[4, 6, 3])?.transpose(0, 1)?, 0, 1, 1, 1));
        says(&[3, 4, 9], |x| x.conv1d(&fixed(x, &[6, 3, 4])?.transpose(1, 2)?, 1, 2, 1, 1));
        says(&[3, 4, 9], |x| x.conv1d(&fixed(x, &[1, 4, 3])?.transpose(0, 2)?, 0, 1, 1, 1));
        says(&[2, 4, 9], |x| {
            x.tanh()?.conv1d(&fixed(x, &[3, 4, 6])?.permute((2, 1, 0))?, 2, 1, 2, 1)?.exp()
        });
        says(&[2, 4, 30], |x| (x + 1.0)?.conv1d(&fixed(x, &[6, 3, 2])?.t()?, 0, 3, 2, 2)?.tanh());
        says(&[2, 4, 9], |x| {
            let kernel = fixed(x, &[6, 4, 3])?.narrow(0, 0, 1)?.broadcast_as((6, 4, 3))?;
            x.conv1d(&kernel, 1, 1, 1, 1)
        });
    }
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
    fine(&[3, 4, 9], |x| {
        let kernel = fixed(x, &[6, 3, 4])?.transpose(1, 2)?.contiguous()?;
        x.tanh()?.conv1d(&kernel, 2, 1, 1, 1)
    });
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
        let step = crate::testing::train_step(&mut engine, &batch(dims), 1.0, &sink);
        step.map(drop).map_err(|e| e.to_string())
    };
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

/// What the first step says of an operator of constants, the batch, by a parameter, `fc.weight`.
fn of_constants(
    (dims, weight): (&[usize], &[usize]),
    dtype: fused_optim::DType,
    op: fn(&Tensor, &Tensor) -> Result<Tensor>,
) -> std::result::Result<(), String> {
    let mut engine = CandleEngine::new(CandleOptions { dtype, ..Default::default() }, |vb| {
        let uniform = Init::Uniform { lo: -0.5, up: 0.5 };
        let weight = vb.get_with_hints(weight, "fc.weight", uniform)?;
        let bias = vb.get_with_hints(1, "fc.bias", uniform)?;
        let last = layer(move |x| x.broadcast_add(&bias)?.tanh());
        Ok(Chain(vec![layer(move |x| op(x, &weight)), last]))
    })
    .unwrap();
    let sink: SharedSink = Arc::new(Mutex::new(Keep::default()));
    crate::testing::train_step(&mut engine, &batch(dims), 1.0, &sink)
        .map(drop)
        .map_err(|e| e.to_string())
}

fn linear(x: &Tensor, weight: &Tensor) -> Result<Tensor> {
    candle_nn::Linear::new(weight.clone(), None).forward(x)
}

#[test]
fn a_product_of_constants_that_mixes_up_samples_is_named() {
    use fused_optim::DType::{F16, F32};
    for dtype in [F32, F16] {
        let says = |dims: &[usize], weight: &[usize], op| {
            let said = of_constants((dims, weight), dtype, op);
            let error = said.expect_err(&format!("nothing of {dims:?} {weight:?} {dtype:?}"));
            assert!(error.contains("`fc.weight` is wrong: candle's own `matmul`"), "{error}");
        };
        says(&[3, 5, 4], &[6, 5], |x, w| linear(&x.transpose(1, 2)?, w));
        says(&[8, 49, 32], &[64, 49], |x, w| linear(&x.transpose(1, 2)?, w)?.relu());
        says(&[2, 3, 5, 4], &[6, 5], |x, w| linear(&x.transpose(2, 3)?, w));
        says(&[2, 5, 4], &[5, 1], |x, w| x.transpose(1, 2)?.matmul(&w.broadcast_left(2)?));
        // By matrices that are computed of parameters.
        says(&[3, 5, 4], &[6, 6], |x, w| {
            let (w, gain) = (w.narrow(1, 0, 5)?, w.narrow(1, 5, 1)?);
            let w = w.broadcast_div(&w.sqr()?.sum_keepdim(1)?.sqrt()?)?;
            linear(&x.transpose(1, 2)?, &w.broadcast_mul(&gain)?)
        });
        says(&[3, 5, 4], &[6, 10], |x, w| {
            linear(&x.transpose(1, 2)?, &(w.narrow(1, 0, 5)? - w.narrow(1, 5, 5)?.relu()?)?)
        });
        // By those that do not scale with them, of fewer columns than rows, too.
        for weight in [[6, 5], [3, 5], [1, 5]] {
            says(&[3, 5, 4], &weight, |x, w| linear(&x.transpose(1, 2)?, &(w + 0.3)?));
            says(&[3, 5, 4], &weight, |x, w| linear(&x.transpose(1, 2)?, &(w * 3.0)?.tanh()?));
        }
        for weight in [[6, 5], [3, 5]] {
            says(&[3, 5, 4], &weight, |x, w| {
                let w = w.broadcast_div(&w.sqr()?.sum_keepdim(1)?.sqrt()?)?;
                linear(&x.transpose(1, 2)?, &w)
            });
        }
        says(&[4, 49, 8], &[12, 49], |x, w| {
            linear(&x.transpose(1, 2)?, &(fixed(x, &[12, 49])? + w)?)
        });
        says(&[3, 8, 4], &[10, 2], |x, w| {
            let (a, b) = (w.narrow(0, 0, 6)?, w.narrow(0, 2, 8)?.t()?);
            linear(&x.transpose(1, 2)?, &(a.matmul(&b)? + fixed(x, &[6, 8])?)?)
        });
        let fine = |dims: &[usize], weight: &[usize], op| {
            of_constants((dims, weight), dtype, op).unwrap();
        };
        fine(&[3, 5, 49], &[6, 49], |x, w| linear(x, &(w + 0.3)?));
        fine(&[3, 5, 49], &[6, 49], |x, w| linear(x, &(w * 9.0)?.tanh()?));
        fine(&[3, 5, 49], &[60, 49], |x, w| linear(&(x + 9.0)?, &(w * 0.01)?.exp()?));
        fine(&[3, 5, 4], &[6, 5], |x, w| linear(&x.transpose(1, 2)?.contiguous()?, w));
        fine(&[3, 5, 4], &[6, 4], linear);
        fine(&[8, 49, 32], &[64, 32], linear);
        fine(&[3, 5, 4], &[6, 5], |x, w| x.transpose(1, 2)?.broadcast_matmul(&w.t()?));
        fine(&[3, 5, 5], &[5, 5], |x, w| w.broadcast_left(3)?.matmul(x)? * 2.0);
        fine(&[3, 5, 5], &[5, 5], |x, w| w.broadcast_left(3)? + x.t()?);
        fine(&[3, 5, 4], &[6, 4], |x, w| linear(x, &w.tanh()?)? + 1.0);
        fine(&[3, 5, 4], &[6, 4], |x, w| linear(x, &w.round()?.add(&(w - w.detach())?)?));
        fine(&[1, 5, 4], &[6, 5], |x, w| linear(&x.transpose(1, 2)?, w));
    }
}

#[test]
fn a_product_by_a_constant_that_mixes_up_samples_is_named() {
    use fused_optim::DType::{F16, F32};
    for dtype in [F32, F16] {
        let says = |dims: &[usize], op: fn(&Tensor) -> Result<Tensor>| {
            let said = by_constant(dims, dtype, op);
            let error = said.expect_err(&format!("nothing of {dims:?} {dtype:?}"));
            assert!(error.contains("`before` is wrong: candle's own `matmul`"), "{error}");
        };
        says(&[3, 5, 4], |x| linear(&x.transpose(1, 2)?, &fixed(x, &[6, 5])?));
        says(&[8, 49, 32], |x| linear(&x.transpose(1, 2)?, &fixed(x, &[64, 49])?)?.tanh());
        says(&[4, 5, 4], |x| {
            linear(&x.relu()?.transpose(1, 2)?, &fixed(x, &[2, 5])?)?.transpose(1, 2)?.exp()
        });
        // Of no more rows than a row is long.
        says(&[2, 40, 4], |x| linear(&x.transpose(1, 2)?, &fixed(x, &[6, 40])?));
        says(&[2, 40, 4], |x| {
            linear(&x.transpose(1, 2)?.tanh()?.t()?.contiguous()?.t()?, &fixed(x, &[6, 40])?)
        });
        says(&[2, 40, 4], |x| linear(&(x + 0.5)?.transpose(1, 2)?, &fixed(x, &[6, 40])?));
        says(&[2, 1100, 4], |x| linear(&x.transpose(1, 2)?, &fixed(x, &[6, 1100])?));
        says(&[3, 5, 4], |x| {
            let x = linear(&x.transpose(1, 2)?, &fixed(x, &[5, 5])?)?;
            linear(&x, &fixed(&x, &[1, 5])?)
        });
        let fine = |dims: &[usize], op: fn(&Tensor) -> Result<Tensor>| {
            by_constant(dims, dtype, op).unwrap();
        };
        fine(&[3, 5, 4], |x| linear(&x.transpose(1, 2)?.contiguous()?, &fixed(x, &[6, 5])?));
        fine(&[3, 5, 4], |x| linear(x, &fixed(x, &[6, 4])?));
        fine(&[3, 5, 4], |x| x.transpose(1, 2)?.broadcast_matmul(&fixed(x, &[5, 6])?));
        fine(&[3, 5, 4], |x| x.transpose(1, 2)?.matmul(&fixed(x, &[3, 5, 6])?));
        fine(&[3, 40, 4], |x| x.transpose(1, 2)?.matmul(&fixed(x, &[3, 40, 6])?));
        fine(&[3, 5, 5], |x| x.transpose(1, 2)? * fixed(x, &[3, 5, 5])?);
        fine(&[3, 5, 5], |x| fixed(x, &[5, 5])?.broadcast_left(3)?.matmul(&x.transpose(1, 2)?));
        fine(&[3, 5, 4], |x| linear(&x.transpose(1, 2)?, &fixed(x, &[6, 5])?.zeros_like()?)? + 1.0);
    }
}

/// What is computed of parameters: some that scales with them, and some that does not.
pub(super) fn formed(t: &Tensor, form: usize) -> Result<Tensor> {
    match form {
        0 => Ok(t.clone()),
        1 => t + 0.4,
        2 => (t * 2.0)?.tanh(),
        _ => t.broadcast_div(&t.sqr()?.sum_keepdim(D::Minus1)?.sqrt()?),
    }
}

/// How far apart these are, as a share.
fn apart(y: &Tensor, truth: &Tensor) -> Result<f64> {
    let size = |t: Tensor| t.to_dtype(DType::F32)?.abs()?.sum_all()?.to_scalar::<f32>();
    Ok(f64::from(size((y - truth)?)? / size(truth.clone())?))
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(96))]

    /// Of any shapes, with a gradient of both or of one, computed of parameters in several ways: what candle
    /// multiplies wrongly is named, what it multiplies rightly is not.
    #[test]
    fn a_random_product_is_judged_rightly(
        seed in any::<u64>(), samples in 1usize..5, (m, k, n) in (1usize..7, 1usize..9, 1usize..6),
        trained in 0..3, form in 0usize..4, is_moved in any::<bool>(), in_half in any::<bool>(),
    ) {
        let dtype = if in_half { fused_optim::DType::F16 } else { fused_optim::DType::F32 };
        let dims = if is_moved { [samples, k, m] } else { [samples, m, k] };
        let off = Arc::new(Mutex::new(f64::NAN));
        let mut engine = CandleEngine::new(CandleOptions { dtype, seed, ..Default::default() }, |vb| {
            let uniform = Init::Uniform { lo: -1.0, up: 1.0 };
            let before = vb.get_with_hints((1, dims[1], dims[2]), "before", uniform)?;
            let weight = vb.get_with_hints((n, k), "weight", uniform)?;
            let after = vb.get_with_hints(1, "after", uniform)?;
            let off = off.clone();
            let product = move |x: &Tensor| {
                let x = match trained {
                    0 => x.clone(),
                    _ => formed(&x.broadcast_mul(&before)?, form)?,
                };
                let x = if is_moved { x.transpose(1, 2)? } else { x };
                let weight = formed(&weight, form)?;
                let weight = if trained == 1 { weight.detach() } else { weight };
                let matrix = weight.broadcast_left(samples)?.t()?;
                let y = x.matmul(&matrix)?;
                *off.lock() = apart(&y, &x.force_contiguous()?.matmul(&matrix)?)?;
                y.broadcast_mul(&after)
            };
            Ok(Chain(vec![layer(product)]))
        }).unwrap();
        let sink: SharedSink = Arc::new(Mutex::new(Keep::default()));
        let step = crate::testing::train_step(&mut engine, &batch(&dims), 1.0, &sink);
        let (apart, noticed) = (*off.lock(), if in_half { 0.4 } else { 0.1 });
        // Nobody sees what a gradient at right angles to the only column of a matrix says of it; and of few
        // columns, or rows hardly more than they have numbers, little is seen in 16 bits.
        let is_sign = form == 3 && dims[2].min(k) < 3;
        let is_shown = !is_sign && match trained {
            0 => form == 0 || !in_half && (form < 3 || n > 1),
            1 => !in_half || form == 0 && samples * m >= 2 * k,
            _ => true,
        };
        // One sample is not mixed up with others, however rounding makes it differ.
        if apart == 0.0 || samples == 1 {
            prop_assert!(step.is_ok(), "{step:?}");
        } else if apart > noticed && is_shown {
            let error = step.map_or_else(|e| e.to_string(), |_| format!("nothing, {apart} apart"));
            prop_assert!(error.contains("candle's own `matmul`"), "{error}");
        }
    }

    /// One sample, for which the gradients are right, and a kernel that lies in any way: what is read wrongly is
    /// named, and neither what is read rightly nor another use of such a tensor.
    #[test]
    fn a_random_kernel_is_judged_rightly(
        seed in any::<u64>(), (c_in, c_out, k, more) in (1usize..4, 1usize..4, 1usize..4, 0usize..12),
        order in Just([0usize, 1, 2]).prop_shuffle(), padded in any::<bool>(), trained in 0..3,
        form in 0usize..4, in_half in any::<bool>(), use_of in 0..4,
    ) {
        let dtype = if in_half { fused_optim::DType::F16 } else { fused_optim::DType::F32 };
        let (padding, mut dims) = (if padded { k - 1 } else { 0 }, [0; 3]);
        order.iter().zip([c_out, c_in, k]).for_each(|(at, extent)| dims[*at] = extent);
        let off = Arc::new(Mutex::new(f64::NAN));
        let mut engine = CandleEngine::new(CandleOptions { dtype, seed, ..Default::default() }, |vb| {
            let uniform = Init::Uniform { lo: -1.0, up: 1.0 };
            let before = vb.get_with_hints((1, c_in, k + more), "before", uniform)?;
            let weight = vb.get_with_hints(&dims, "weight", uniform)?;
            let after = vb.get_with_hints(1, "after", uniform)?;
            let off = off.clone();
            let of = move |x: &Tensor| {
                let x = match trained {
                    0 => x.clone(),
                    _ => formed(&x.broadcast_mul(&before)?, form)?,
                };
                let w = formed(&weight, form)?;
                let w = if trained == 1 { w.detach() } else { w };
                let w = w.permute((order[0], order[1], order[2]))?;
                let (y, truth) = match use_of {
                    0 | 1 => {
                        let truth = x.conv1d(&w.force_contiguous()?, padding, 1, 1, 1)?;
                        (x.conv1d(&w, padding, 1, 1, 1)?, truth)
                    }
                    2 => (x.narrow(2, 0, k)?.broadcast_mul(&w)?, x.zeros_like()?),
                    _ => (x.narrow(2, 0, k)?.broadcast_matmul(&w.t()?)?, x.zeros_like()?),
                };
                *off.lock() = if use_of < 2 { apart(&y, &truth)? } else { 0.0 };
                y.broadcast_mul(&after)
            };
            Ok(Chain(vec![layer(of)]))
        }).unwrap();
        let sink: SharedSink = Arc::new(Mutex::new(Keep::default()));
        let step = crate::testing::train_step(&mut engine, &batch(&[1, c_in, k + more]), 1.0, &sink);
        let (apart, noticed) = (*off.lock(), if in_half { 0.4 } else { 0.1 });
        // Nor of few places, of a kernel that has many numbers, nor of a single number.
        let is_sign = form == 3 && dims[2].min(k + more) < 3;
        let is_one = !padded && c_out + more == 1;
        let is_shown = !is_sign && !is_one && match trained {
            0 => form == 0 || !in_half && form < 3,
            1 => !in_half && form < 3 && more + 1 > c_in * k,
            _ => true,
        };
        if apart == 0.0 {
            prop_assert!(step.is_ok(), "{step:?}");
        } else if apart > noticed && is_shown {
            let error = step.map_or_else(|e| e.to_string(), |_| format!("nothing, {apart} apart"));
            prop_assert!(error.contains("candle's own `conv1d` reads"), "{error}");
        }
    }
}
