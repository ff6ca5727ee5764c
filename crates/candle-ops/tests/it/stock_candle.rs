//! Tests of all operators of candle that have a backward pass: compared with central differences in
//! `f64`, and operators with sums also in half precision with `f64`.
//!
//! The tables of `src/stock_candle.md` have a row for each case below that is wrong or has no
//! backward pass, and no other rows.

#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]
#![expect(clippy::disallowed_methods, reason = "the wrong operators are what is tested")]

use std::collections::BTreeSet;

use candle_core::{D, DType, Device, Module, Result, Tensor, Var};

/// Normally distributed numbers, seeded by a name.
fn values(name: &str, shape: &[usize]) -> Vec<f32> {
    let mut state = name.bytes().fold(0xcbf2_9ce4_8422_2325_u64, |hash, byte| {
        (hash ^ u64::from(byte)).wrapping_mul(0x0000_0100_0000_01b3)
    });
    // SplitMix64; the sum of twelve uniform numbers (Irwin-Hall).
    let mut unit = || {
        state = state.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let z = (state ^ (state >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        ((z ^ (z >> 31)) >> 11) as f64 / (1u64 << 53) as f64
    };
    let count = shape.iter().product();
    (0..count).map(|_| ((0..12).map(|_| unit()).sum::<f64>() - 6.0) as f32).collect()
}

fn indices(values: &[u32], shape: &[usize]) -> Result<Tensor> {
    Tensor::from_slice(values, shape, &Device::Cpu)
}

/// The distance of candle's gradients of `op` from central differences in `f64`, relative to the
/// largest.
fn off(shapes: &[&[usize]], op: fn(&[Tensor]) -> Result<Tensor>) -> Result<f64> {
    let var = |(i, shape): (usize, &&[usize])| {
        let values = Tensor::from_vec(values(&format!("x{i}"), shape), *shape, &Device::Cpu)?;
        Var::from_tensor(&values.to_dtype(DType::F64)?)
    };
    let vars: Vec<Var> = shapes.iter().enumerate().map(var).collect::<Result<_>>()?;
    let objective = |inputs: &[Tensor]| {
        let y = op(inputs)?;
        let weights = Tensor::from_vec(values("dy", y.dims()), y.dims(), &Device::Cpu)?;
        (y * weights.to_dtype(DType::F64)?)?.sum_all()
    };
    let inputs: Vec<Tensor> = vars.iter().map(|v| v.as_tensor().clone()).collect();
    let gradients = objective(&inputs)?.backward()?;
    let (mut apart, mut largest) = (0f64, 1e-3f64);
    for (i, input) in inputs.iter().enumerate() {
        // Tensors without a gradient must not need one.
        let none = input.zeros_like()?;
        let gradient = gradients.get(input).unwrap_or(&none).flatten_all()?.to_vec1::<f64>()?;
        for (e, gradient) in gradient.iter().enumerate() {
            let at = |step: f64| -> Result<f64> {
                let mut moved = input.flatten_all()?.to_vec1::<f64>()?;
                moved[e] += step;
                let mut inputs = inputs.clone();
                inputs[i] = Tensor::from_vec(moved, input.dims(), &Device::Cpu)?;
                objective(&inputs)?.to_scalar()
            };
            let slope = (at(1e-6)? - at(-1e-6)?) / 2e-6;
            apart = apart.max((slope - gradient).abs());
            largest = largest.max(slope.abs());
        }
    }
    Ok(apart / largest)
}

/// A row of a table, optionally with a colon and a case; shapes of the inputs; the operator.
type Case = (&'static str, &'static [&'static [usize]], fn(&[Tensor]) -> Result<Tensor>);

/// A constant.
fn fixed(shape: &[usize]) -> Result<Tensor> {
    Tensor::from_vec(values("fixed", shape), shape, &Device::Cpu)?.to_dtype(DType::F64)
}

const SMALL: &[&[usize]] = &[&[1, 2, 4, 4]];

/// Operators with a wrong value or gradient.
const WRONG_ONES: &[Case] = &[
    ("conv1d of several samples", &[&[2, 2, 7], &[3, 2, 3]], |t| t[0].conv1d(&t[1], 1, 2, 1, 1)),
    ("conv1d of several samples: by a constant", &[&[2, 2, 7]], |t| {
        t[0].conv1d(&fixed(&[3, 2, 3])?, 0, 2, 1, 1)
    }),
    ("conv1d of several samples: by a constant, pointwise", &[&[2, 2, 3]], |t| {
        t[0].conv1d(&fixed(&[2, 2, 1])?, 0, 1, 1, 1)
    }),
    ("conv1d of several samples: by a constant, groups", &[&[2, 4, 5]], |t| {
        t[0].conv1d(&fixed(&[4, 2, 5])?, 0, 1, 1, 2)
    }),
    ("conv1d by a kernel that is not contiguous", &[&[1, 2, 7], &[2, 3, 3]], |t| {
        t[0].conv1d(&t[1].transpose(0, 1)?, 1, 1, 1, 1)
    }),
    ("matmul of a transposed batch by a broadcast matrix", &[&[3, 4, 5], &[4, 2]], |t| {
        t[0].transpose(1, 2)?.matmul(&t[1].broadcast_left(3)?)
    }),
    (
        "matmul of a transposed batch by a broadcast matrix: candle-nn's Linear",
        &[&[3, 4, 5], &[2, 4]],
        |t| candle_nn::Linear::new(t[1].clone(), None).forward(&t[0].transpose(1, 2)?),
    ),
    ("max_pool2d", SMALL, |t| t[0].max_pool2d(2)),
    ("max_pool2d: a rest", SMALL, |t| t[0].max_pool2d(3)),
    ("avg_pool2d with a rest", &[&[1, 2, 5, 5]], |t| t[0].avg_pool2d(2)),
    ("upsample_nearest2d of a tensor that is used elsewhere", SMALL, |t| {
        t[0].upsample_nearest2d(8, 8)? + t[0].sum_all()?.broadcast_as((1, 2, 8, 8))?
    }),
    ("upsample_nearest1d of a tensor that is used elsewhere", &[&[1, 2, 4]], |t| {
        t[0].upsample_nearest1d(8)? + t[0].sum_all()?.broadcast_as((1, 2, 8))?
    }),
    ("upsample_nearest2d of a tensor that is used elsewhere: to the same size", SMALL, |t| {
        t[0].upsample_nearest2d(4, 4)? + t[0].sum_all()?.broadcast_as((1, 2, 4, 4))?
    }),
    ("scatter", &[&[2, 3], &[2, 2]], |t| t[0].scatter(&indices(&[0, 2, 1, 0], &[2, 2])?, &t[1], 1)),
    ("scatter_add", &[&[2, 3], &[2, 3]], |t| {
        t[0].scatter_add(&indices(&[0, 2, 2, 1, 1, 0], &[2, 3])?, &t[1], 1)
    }),
    ("scatter: twice to one place, into a constant", &[&[2, 3]], |t| {
        t[0].zeros_like()?.scatter(&indices(&[0, 2, 2, 1, 1, 0], &[2, 3])?, &t[0], 1)
    }),
    ("slice_set", &[&[4, 2], &[2, 2]], |t| {
        let y = t[0].affine(1.0, 0.0)?;
        y.slice_set(&(&t[1] * 1.0)?, 0, 1)?;
        Ok(y)
    }),
    ("max of equal values", &[&[2]], |t| {
        let twice = t[0].broadcast_as((3, 2))?.contiguous()?;
        (twice.max(0)? * 2.0)? + twice.min(0)?
    }),
    ("abs at 0", &[&[3]], |t| {
        let start = Tensor::from_vec(values("x0", &[3]), 3, &Device::Cpu)?;
        (&t[0] - start.to_dtype(DType::F64)?)?.abs()
    }),
];

const RIGHT_ONES: &[Case] = &[
    ("conv1d, one sample", &[&[1, 2, 7], &[3, 2, 3]], |t| t[0].conv1d(&t[1], 0, 1, 1, 1)),
    ("conv1d, depthwise, not padded", &[&[2, 3, 7], &[3, 1, 3]], |t| {
        t[0].conv1d(&t[1], 0, 1, 1, 3)
    }),
    ("conv1d, to one channel", &[&[2, 3, 7], &[1, 3, 3]], |t| t[0].conv1d(&t[1], 0, 1, 1, 1)),
    ("conv1d, depthwise", &[&[2, 3, 7], &[3, 1, 3]], |t| t[0].conv1d(&t[1], 1, 2, 1, 3)),
    ("conv1d by a constant, padded", &[&[2, 2, 7]], |t| {
        t[0].conv1d(&fixed(&[3, 2, 3])?, 1, 2, 1, 1)
    }),
    ("conv1d by a constant, dilated", &[&[2, 2, 7]], |t| {
        t[0].conv1d(&fixed(&[3, 2, 3])?, 0, 1, 2, 1)
    }),
    ("conv1d by a constant, a rest", &[&[2, 2, 8]], |t| {
        t[0].conv1d(&fixed(&[3, 2, 3])?, 0, 2, 1, 1)
    }),
    ("conv1d by a constant, to one channel", &[&[2, 2, 7]], |t| {
        t[0].conv1d(&fixed(&[1, 2, 3])?, 0, 1, 1, 1)
    }),
    ("conv1d by a constant, depthwise", &[&[2, 2, 7]], |t| {
        t[0].conv1d(&fixed(&[2, 1, 3])?, 0, 1, 1, 2)
    }),
    ("conv1d by a constant, one sample", &[&[1, 2, 7]], |t| {
        t[0].conv1d(&fixed(&[3, 2, 3])?, 0, 1, 1, 1)
    }),
    ("conv2d", &[&[2, 2, 5, 5], &[3, 2, 3, 3]], |t| t[0].conv2d(&t[1], 1, 2, 1, 1)),
    ("conv2d, dilated", &[&[1, 2, 6, 6], &[2, 2, 2, 2]], |t| t[0].conv2d(&t[1], 1, 1, 2, 1)),
    ("conv2d, groups", &[&[1, 4, 4, 4], &[4, 2, 3, 3]], |t| t[0].conv2d(&t[1], 1, 1, 1, 2)),
    ("conv_transpose2d", &[&[1, 2, 3, 3], &[2, 3, 3, 3]], |t| {
        t[0].conv_transpose2d(&t[1], 1, 1, 2, 1)
    }),
    ("conv2d, sizes that leave a rest", &[&[2, 3, 8, 8], &[4, 3, 3, 3]], |t| {
        t[0].conv2d(&t[1], 0, 2, 1, 1)
    }),
    ("conv2d, more than a tile", &[&[2, 3, 26, 26], &[2, 3, 3, 3]], |t| {
        t[0].conv2d(&t[1], 1, 1, 1, 1)
    }),
    ("conv2d, 1 x 1", &[&[2, 3, 4, 4], &[2, 3, 1, 1]], |t| t[0].conv2d(&t[1], 0, 1, 1, 1)),
    ("conv2d, 1 x 1, strided", &[&[2, 3, 5, 5], &[2, 3, 1, 1]], |t| t[0].conv2d(&t[1], 0, 2, 1, 1)),
    ("conv2d, not square", &[&[2, 2, 6, 4], &[3, 2, 3, 2]], |t| t[0].conv2d(&t[1], 1, 1, 1, 1)),
    ("conv2d, transposed", &[&[2, 2, 5, 4], &[2, 3, 3, 3]], |t| {
        t[0].transpose(2, 3)?.conv2d(&t[1].transpose(0, 1)?, 1, 1, 1, 1)
    }),
    ("conv1d, one sample, padded, strided, dilated", &[&[1, 2, 9], &[3, 2, 3]], |t| {
        t[0].conv1d(&t[1], 2, 2, 2, 1)
    }),
    ("conv_transpose2d, several", &[&[2, 2, 3, 4], &[2, 3, 3, 3]], |t| {
        t[0].conv_transpose2d(&t[1], 1, 1, 2, 1)
    }),
    ("conv_transpose2d, plain", &[&[2, 2, 3, 3], &[2, 3, 2, 2]], |t| {
        t[0].conv_transpose2d(&t[1], 0, 0, 2, 1)
    }),
    ("conv_transpose2d, dilated", &[&[2, 2, 3, 3], &[2, 3, 2, 2]], |t| {
        t[0].conv_transpose2d(&t[1], 1, 0, 1, 2)
    }),
    ("avg_pool2d", SMALL, |t| t[0].avg_pool2d(2)),
    ("avg_pool2d, not square", SMALL, |t| t[0].avg_pool2d((2, 4))),
    ("upsample_nearest2d", SMALL, |t| t[0].upsample_nearest2d(8, 8)),
    ("upsample_nearest1d", &[&[1, 2, 4]], |t| t[0].upsample_nearest1d(8)),
    ("matmul", &[&[2, 3, 4], &[2, 4, 2]], |t| t[0].matmul(&t[1])),
    ("broadcast", &[&[3, 1, 2], &[4, 1]], |t| {
        t[0].broadcast_mul(&t[1])?.broadcast_div(&t[1])?.broadcast_sub(&t[1])
    }),
    ("gather", &[&[2, 3]], |t| t[0].gather(&indices(&[0, 0, 2, 1], &[2, 2])?, 1)),
    ("gather, index_select, of no index", &[&[2, 3]], |t| {
        let of = t[0].gather(&indices(&[0, u32::MAX, 2, 1], &[2, 2])?, 1)?;
        of + t[0].index_select(&indices(&[1, u32::MAX], &[2])?, 1)?
    }),
    ("index_select", &[&[4, 2]], |t| t[0].index_select(&indices(&[1, 1, 3], &[3])?, 0)),
    ("index_add", &[&[4, 2], &[3, 2]], |t| t[0].index_add(&indices(&[1, 1, 3], &[3])?, &t[1], 0)),
    ("index_add, inner dimension", &[&[2, 4, 2], &[2, 3, 2]], |t| {
        t[0].index_add(&indices(&[1, 1, 3], &[3])?, &t[1], 1)
    }),
    ("scatter, scatter_add, into a constant", &[&[2, 3, 2]], |t| {
        let i = indices(&[0, 1, 2, 0, 1, 2, 1, 2, 0, 1, 2, 0], &[2, 3, 2])?;
        let zeros = t[0].zeros_like()?;
        zeros.scatter(&i, &t[0], 1)? + zeros.scatter_add(&i, &t[0], 1)?
    }),
    ("slice_scatter, inner dimension", &[&[2, 4], &[2, 2]], |t| t[0].slice_scatter(&t[1], 1, 1)),
    ("slice_scatter", &[&[4, 2], &[2, 2]], |t| t[0].slice_scatter(&t[1], 0, 1)),
    ("slice_assign", &[&[4, 3], &[2, 1]], |t| t[0].slice_assign(&[1..3, 0..1], &t[1])),
    ("cat, narrow, permute", &[&[2, 3], &[2, 1]], |t| {
        Tensor::cat(&[&t[0], &t[1]], 1)?.narrow(1, 1, 3)?.permute((1, 0))
    }),
    ("flip, roll", &[&[2, 5]], |t| t[0].flip(&[1])?.roll(2, 1)),
    ("cumsum", &[&[2, 5]], |t| t[0].cumsum(1)),
    ("where_cond", &[&[5], &[5]], |t| t[0].gt(&t[1])?.where_cond(&t[0], &t[1])),
    ("maximum, minimum", &[&[5], &[5]], |t| t[0].maximum(&t[1])? * t[0].minimum(&t[1])?),
    ("max, min", &[&[3, 5]], |t| t[0].max(1)? * t[0].min(1)?),
    ("mean, var", &[&[3, 5]], |t| t[0].mean(1)? * t[0].var(1)?),
    ("log_sum_exp", &[&[3, 5]], |t| t[0].log_sum_exp(1)),
    ("exp, sin, cos, tanh, erf", &[&[7]], |t| t[0].exp()?.sin()?.cos()?.tanh()?.erf()),
    ("sqrt, log, recip, powf", &[&[7]], |t| (t[0].sqr()? + 1.0)?.sqrt()?.log()?.recip()?.powf(1.5)),
    ("pow", &[&[7], &[7]], |t| (t[0].sqr()? + 1.0)?.pow(&t[1])),
    ("abs, relu, elu, silu", &[&[7]], |t| {
        ((t[0].abs()? * t[0].relu()?)? + t[0].elu(0.7)?)? + t[0].silu()?
    }),
    ("gelu", &[&[7]], |t| t[0].gelu()? + t[0].gelu_erf()?),
    ("sigmoid", &[&[7]], |t| candle_nn::ops::sigmoid(&t[0])),
    ("leaky_relu, mish", &[&[7]], |t| {
        candle_nn::ops::leaky_relu(&t[0], 0.1)? * candle_nn::ops::mish(&t[0])?
    }),
    ("swiglu, clamp", &[&[2, 6]], |t| {
        candle_nn::ops::swiglu(&t[0])? * t[0].narrow(1, 1, 3)?.clamp(-0.5, 0.5)?
    }),
    ("pixel_shuffle, replication_pad2d", &[&[1, 4, 2, 2]], |t| {
        candle_nn::ops::replication_pad2d(&candle_nn::ops::pixel_shuffle(&t[0], 2)?, 1)
    }),
    ("pixel_unshuffle", SMALL, |t| candle_nn::ops::pixel_unshuffle(&t[0], 2)),
    ("cross_entropy, nll", &[&[3, 4]], |t| {
        candle_nn::loss::cross_entropy(&t[0], &indices(&[1, 3, 1], &[3])?)
    }),
    ("mse, huber", &[&[6], &[6]], |t| {
        candle_nn::loss::mse(&t[0], &t[1])? + candle_nn::loss::huber(&t[0], &t[1], 0.7)?
    }),
    ("binary_cross_entropy_with_logit", &[&[6], &[6]], |t| {
        candle_nn::loss::binary_cross_entropy_with_logit(&t[0], &t[1])
    }),
    ("rope_slow", &[&[1, 1, 3, 4], &[3, 2], &[3, 2]], |t| {
        candle_nn::rotary_emb::rope_slow(&t[0], &t[1], &t[2])
    }),
    ("sort_last_dim", &[&[2, 5]], |t| Ok(t[0].sort_last_dim(true)?.0)),
    ("repeat, stack, unsqueeze, flatten", &[&[2, 3]], |t| {
        Tensor::stack(&[t[0].repeat((2, 1))?, t[0].repeat((2, 1))?.unsqueeze(0)?.squeeze(0)?], 1)?
            .flatten_from(1)
    }),
    ("reductions over several dimensions", &[&[2, 3, 4]], |t| {
        t[0].sum((0, 2))?.broadcast_mul(&t[0].mean_keepdim((0, 2))?)?.sum_keepdim(1)
    }),
    ("broadcast matmul", &[&[2, 1, 2, 3], &[3, 3, 2]], |t| t[0].broadcast_matmul(&t[1])),
    ("broadcast matmul, transposed", &[&[3, 4, 5], &[4, 2]], |t| {
        t[0].transpose(1, 2)?.broadcast_matmul(&t[1])
    }),
    ("matmul of a broadcast", &[&[3, 4], &[2, 4, 5]], |t| t[0].broadcast_left(2)?.matmul(&t[1])),
    ("matmul, transposed", &[&[2, 4, 3], &[2, 2, 4]], |t| t[0].transpose(1, 2)?.matmul(&t[1].t()?)),
    ("to_dtype", &[&[3]], |t| (&t[0] * 2.0)?.to_dtype(DType::F64)),
    ("powf of whole numbers, pow, abs, neg", &[&[5]], |t| {
        t[0].powf(3.0)? + (t[0].powf(2.0)? * t[0].neg()?.abs()?)?
    }),
    ("floor, round, ceil, sign", &[&[5]], |t| {
        let steps = ((t[0].floor()? + t[0].round()?)? + (t[0].ceil()? + t[0].sign()?)?)?;
        steps + &t[0]
    }),
    ("softmax, log_softmax", &[&[2, 4]], |t| {
        candle_nn::ops::softmax(&t[0], 1)? + candle_nn::ops::log_softmax(&t[0], 1)?
    }),
];

/// This test shows if candle fixes or breaks an operator.
#[test]
fn these_of_candles_operators_are_wrong_and_no_others() {
    // candle's constants of GELU have six digits.
    let measure = |(what, shapes, op): &Case| {
        (*what, off(shapes, *op).unwrap_or_else(|e| panic!("{what}: {e}")))
    };
    let odd: Vec<_> = (WRONG_ONES.iter().map(measure).filter(|(_, off)| *off < 0.1))
        .chain(RIGHT_ONES.iter().map(measure).filter(|(_, off)| *off > 1e-5))
        .collect();
    assert!(odd.is_empty(), "not as it was in candle 0.11.1: {odd:?}");
}

/// The distance of result and gradients in this half-precision type from those of the same values
/// in `f64`, relative to the largest value of each tensor. Inputs are near 1, so that long sums
/// exceed the range in which a half-precision type can count.
fn off_in_half(dtype: DType, (_, shapes, op): &Case) -> Result<f64> {
    let near_one = |(i, shape): (usize, &&[usize])| {
        let values = values(&format!("x{i}"), shape).into_iter().map(|v| 1.0 + 0.1 * v).collect();
        Tensor::from_vec::<_, f32>(values, *shape, &Device::Cpu)?.to_dtype(dtype)
    };
    let inputs: Vec<Tensor> = shapes.iter().enumerate().map(near_one).collect::<Result<_>>()?;
    let run = |dtype| -> Result<Vec<Tensor>> {
        let vars = inputs.iter().map(|x| Var::from_tensor(&x.to_dtype(dtype)?));
        let vars: Vec<Var> = vars.collect::<Result<_>>()?;
        let tensors: Vec<_> = vars.iter().map(|v| v.as_tensor().clone()).collect();
        let y = op(&tensors)?.to_dtype(DType::F64)?;
        let gradients = y.sum_all()?.backward()?;
        let gradients = vars.iter().filter_map(|v| gradients.get(v).cloned());
        let all = std::iter::once(y.detach()).chain(gradients);
        all.map(|t| t.flatten_all()?.to_dtype(DType::F64)).collect()
    };
    let mut off = 0f64;
    for (half, wide) in run(dtype)?.iter().zip(run(DType::F64)?) {
        let largest = wide.abs()?.max(0)?.to_scalar::<f64>()?;
        off = off.max((half - wide)?.abs()?.max(0)?.to_scalar::<f64>()? / largest);
    }
    Ok(off)
}

const LONG: &[&[usize]] = &[&[6000, 2]];
const LONG_AND_SHORT: &[&[usize]] = &[&[6000, 2], &[2]];
const SHORT: &[&[usize]] = &[&[3, 2]];

/// Operators that are wrong in `bf16` or `f16`, by more than a tenth.
const WRONG_IN_HALF: &[Case] = &[
    ("sum of half tensors", LONG, |t| t[0].sum(0)),
    ("sum of half tensors: last dimension", &[&[2, 6000]], |t| t[0].sum(1)),
    ("sum_all of half tensors", LONG, |t| t[0].sum_all()),
    ("mean of half tensors", LONG, |t| t[0].mean(0)),
    ("mean_all of half tensors", LONG, |t| t[0].mean_all()),
    ("var of half tensors", LONG, |t| t[0].var(0)),
    ("norm of half tensors", LONG, |t| t[0].norm()),
    ("log_sum_exp of half tensors", LONG, |t| t[0].log_sum_exp(0)),
    ("avg_pool2d of half tensors", &[&[1, 1, 80, 80]], |t| t[0].avg_pool2d(80)),
    ("broadcast_as of half tensors", &[&[2]], |t| t[0].broadcast_as((6000, 2))),
    ("broadcast_add of half tensors", LONG_AND_SHORT, |t| t[0].broadcast_add(&t[1])),
    ("broadcast_sub of half tensors", LONG_AND_SHORT, |t| t[0].broadcast_sub(&t[1])),
    ("broadcast_mul of half tensors", LONG_AND_SHORT, |t| t[0].broadcast_mul(&t[1])),
    ("broadcast_div of half tensors", LONG_AND_SHORT, |t| t[0].broadcast_div(&t[1])),
    ("index_add of half tensors", &[&[2, 2], &[6000, 2]], |t| {
        t[0].index_add(&indices(&[1; 6000], &[6000])?, &t[1], 0)
    }),
    ("scatter_add of half tensors", &[&[6000, 2], &[6000, 2]], |t| {
        t[0].scatter_add(&indices(&[1; 12_000], &[6000, 2])?, &t[1], 0)
    }),
    ("index_select of half tensors", SHORT, |t| {
        t[0].index_select(&indices(&[1; 6000], &[6000])?, 0)
    }),
    ("gather of half tensors", SHORT, |t| t[0].gather(&indices(&[1; 12_000], &[6000, 2])?, 0)),
];

/// Products are summed in `f32`, by the gemm crate's kernels for x86-64.
const RIGHT_IN_HALF: &[Case] = &[
    ("matmul", &[&[2, 6000], &[6000, 2]], |t| t[0].matmul(&t[1])),
    ("matmul, transposed", &[&[6000, 60], &[60, 6000]], |t| t[0].t()?.matmul(&t[1].t()?)),
    ("conv2d", &[&[6, 2, 32, 32], &[2, 2, 3, 3]], |t| t[0].conv2d(&t[1], 0, 1, 1, 1)),
];

#[test]
fn these_of_candles_operators_sum_in_half_types() {
    let measure = |case: &Case| {
        let off = [DType::BF16, DType::F16].map(|dtype| match off_in_half(dtype, case) {
            Err(e) if e.to_string().contains("unsupported dtype") => None,
            off => Some(off.unwrap_or_else(|e| panic!("{}: {e}", case.0))),
        });
        (case.0, off.into_iter().flatten().reduce(f64::max).unwrap())
    };
    let odd: Vec<_> = (WRONG_IN_HALF.iter().map(measure).filter(|(_, off)| *off < 0.1))
        .chain(RIGHT_IN_HALF.iter().map(measure).filter(|(_, off)| *off > 0.01))
        .collect();
    assert!(odd.is_empty(), "not as it was in candle 0.11.1: {odd:?}");
}

/// Operators without a backward pass: candle returns an error, or detaches the graph, so that a
/// parameter has no gradient.
const WITHOUT: &[Case] = &[
    ("conv_transpose1d", &[&[2, 2, 5], &[2, 3, 3]], |t| {
        t[0].conv_transpose1d(&t[1], 0, 0, 1, 1, 1)
    }),
    ("upsample_bilinear2d", SMALL, |t| t[0].upsample_bilinear2d(8, 8, false)),
    ("upsample_nearest2d to other than one whole factor", SMALL, |t| t[0].upsample_nearest2d(8, 4)),
    ("upsample_nearest2d to other than one whole factor: a rest", SMALL, |t| {
        t[0].upsample_nearest2d(6, 6)
    }),
    ("upsample_nearest1d to other than one whole factor", &[&[1, 2, 4]], |t| {
        t[0].upsample_nearest1d(6)
    }),
    ("max_pool2d_with_stride, overlapping", SMALL, |t| t[0].max_pool2d_with_stride(2, 1)),
    ("avg_pool2d_with_stride, overlapping", SMALL, |t| t[0].avg_pool2d_with_stride(2, 1)),
    ("conv2d that leaves different rests", &[&[1, 2, 7, 8], &[2, 2, 3, 3]], |t| {
        t[0].conv2d(&t[1], 0, 2, 1, 1)
    }),
    ("scatter_add of another shape", &[&[2, 3], &[2, 2]], |t| {
        t[0].scatter_add(&indices(&[0, 2, 1, 0], &[2, 2])?, &t[1], 1)
    }),
    ("gather of a part", &[&[3, 3]], |t| t[0].gather(&indices(&[0, 2], &[1, 2])?, 1)),
    ("argmax", &[&[2, 4]], |t| t[0].argmax(D::Minus1)?.to_dtype(DType::F64)),
    ("softmax_last_dim", &[&[2, 4]], |t| candle_nn::ops::softmax_last_dim(&t[0])),
    ("rms_norm", &[&[2, 4], &[4]], |t| candle_nn::ops::rms_norm(&t[0], &t[1], 1e-5)),
    ("layer_norm", &[&[2, 4], &[4], &[4]], |t| {
        candle_nn::ops::layer_norm(&t[0], &t[1], &t[2], 1e-5)
    }),
    ("rope", &[&[1, 1, 3, 4], &[3, 2], &[3, 2]], |t| {
        candle_nn::rotary_emb::rope(&t[0], &t[1], &t[2])
    }),
    ("rope_i", &[&[1, 1, 3, 4], &[3, 2], &[3, 2]], |t| {
        candle_nn::rotary_emb::rope_i(&t[0], &t[1], &t[2])
    }),
    ("rope_thd", &[&[1, 3, 1, 4], &[3, 2], &[3, 2]], |t| {
        candle_nn::rotary_emb::rope_thd(&t[0], &t[1], &t[2])
    }),
];

#[test]
fn these_of_candles_operators_have_no_backward() {
    for (what, shapes, op) in WITHOUT {
        let var = |shape: &&[usize]| {
            Var::from_tensor(&Tensor::from_vec(values("x", shape), *shape, &Device::Cpu)?)
        };
        let vars: Vec<Var> = shapes.iter().map(var).collect::<Result<_>>().unwrap();
        let inputs: Vec<Tensor> = vars.iter().map(|v| v.as_tensor().clone()).collect();
        let y = op(&inputs).unwrap();
        if let Ok(gradients) = y.backward() {
            assert!(inputs.iter().all(|x| gradients.get(x).is_none()), "{what} has one");
        }
    }
}

/// The distance of the result of two samples from the results of each sample alone, relative to the
/// largest.
fn off_alone((_, shapes, op): &Case) -> Result<f64> {
    let tensor = |(i, shape): (usize, &&[usize])| {
        Tensor::from_vec(values(&format!("x{i}"), shape), *shape, &Device::Cpu)
    };
    let inputs: Vec<Tensor> = shapes.iter().enumerate().map(tensor).collect::<Result<_>>()?;
    let alone = |at| {
        let mut inputs = inputs.clone();
        inputs[0] = inputs[0].narrow(0, at, 1)?;
        op(&inputs)
    };
    let alone = Tensor::cat(&[alone(0)?, alone(1)?], 0)?;
    let most = |t: Tensor| t.abs()?.flatten_all()?.max(0)?.to_scalar::<f32>();
    Ok((most((op(&inputs)? - &alone)?)? / most(alone)?).into())
}

/// The wrong value in the row of `conv_transpose1d`, and convolutions with correct values.
#[test]
fn conv_transpose1d_alone_mixes_up_samples_in_its_value() {
    const LINE: &[&[usize]] = &[&[2, 4, 7], &[4, 4, 3]];
    const IMAGE: &[&[usize]] = &[&[2, 4, 7, 6], &[4, 4, 3, 3]];
    let wrong: &[Case] = &[
        ("conv_transpose1d", LINE, |t| t[0].conv_transpose1d(&t[1], 0, 0, 1, 1, 1)),
        ("strided", LINE, |t| t[0].conv_transpose1d(&t[1], 0, 0, 2, 1, 1)),
    ];
    let right: &[Case] = &[
        ("groups", LINE, |t| t[0].conv_transpose1d(&t[1], 0, 0, 1, 1, 2)),
        ("padded", LINE, |t| t[0].conv_transpose1d(&t[1], 1, 0, 1, 1, 1)),
        ("padded output", LINE, |t| t[0].conv_transpose1d(&t[1], 0, 1, 2, 1, 1)),
        ("dilated", LINE, |t| t[0].conv_transpose1d(&t[1], 0, 0, 1, 2, 1)),
        ("conv1d", LINE, |t| t[0].conv1d(&t[1], 0, 1, 1, 1)),
        ("conv2d", IMAGE, |t| t[0].conv2d(&t[1], 0, 1, 1, 1)),
        ("conv_transpose2d", IMAGE, |t| t[0].conv_transpose2d(&t[1], 0, 0, 1, 1)),
    ];
    let measure = |case: &Case| (case.0, off_alone(case).unwrap());
    let odd: Vec<_> = (wrong.iter().map(measure).filter(|(_, off)| *off < 0.1))
        .chain(right.iter().map(measure).filter(|(_, off)| *off > 1e-5))
        .collect();
    assert!(odd.is_empty(), "not as it was in candle 0.11.1: {odd:?}");
}

/// The operators of a table's rows, each with the rest of its row.
fn rows(page: &str) -> BTreeSet<String> {
    let mut rows = BTreeSet::new();
    let lines = page.lines().filter(|line| line.starts_with("| `"));
    for row in lines.map(|line| line.split('|').nth(1).unwrap().trim()) {
        let (row, _) = row.split_once(", as in").unwrap_or((row, ""));
        let of = row.rfind('`').unwrap() + 1;
        let names = row[..of].split('`').skip(1).step_by(2);
        let rest = row[of..].trim_end_matches(", too");
        rows.extend(names.map(|name| format!("{}{rest}", name.rsplit("::").next().unwrap())));
    }
    rows
}

#[test]
fn the_page_has_a_row_for_each_of_them_and_no_other() {
    let page = include_str!("../../src/stock_candle.md");
    // Random numbers have no gradient to compare.
    let (page, _) = page.split_once("## Random numbers").unwrap();
    let cases = WRONG_ONES.iter().chain(WRONG_IN_HALF).chain(WITHOUT);
    let row = |(what, ..): &Case| what.split(": ").next().unwrap().to_owned();
    let mut cases: BTreeSet<String> = cases.map(row).collect();
    // Tested with the other one.
    cases.insert("min of equal values".to_owned());
    assert_eq!(rows(page), cases);
}
