//! Tests of operators that move, multiply or add up elements: products, sums, concatenation,
//! gather, padding, average pooling, convolution in three dimensions.

use candle_core::{D, DType, Device, Result, Tensor};

use crate::tests::{assert_differentiates, assert_rounds_once, assert_same, flat, run, values};
use crate::*;

#[test]
fn products_are_candles_and_round_once() {
    // So many terms that a half-precision sum saturates.
    for (a, b) in [(&[3, 5][..], &[3, 5][..]), (&[5000, 3], &[1, 3]), (&[3], &[5000, 1])] {
        let inputs = [values("a", a), (values("b", b) + 1.0).unwrap()];
        let ours = |t: &[Tensor]| mul(&t[0], &t[1]);
        assert_same("mul", &inputs, ours, |t| t[0].broadcast_mul(&t[1]));
        assert_rounds_once("mul", &inputs, ours);
    }
    let inputs = [values("a", &[2, 3]), values("b", &[3])];
    assert_differentiates("mul", &inputs, |t| mul(&t[0], &t[1]));
    assert_differentiates("mul", &inputs[..1], |t| mul(&t[0], &t[0]));
    // As for `add`, two types are cast to the wider one.
    let half = inputs[1].to_dtype(DType::F16).unwrap();
    assert_eq!(mul(&inputs[0], &half).unwrap().dtype(), DType::F32);
    assert!(mul(&inputs[0], &values("c", &[4])).is_err());
}

#[test]
fn sums_and_means_round_once() {
    type Op = fn(&Tensor) -> Result<Tensor>;
    let all: [(&str, Op, Op); 5] = [
        ("sum", |x| sum(x, 0), |x| x.sum(0)),
        ("sum of several", |x| sum(x, (0, 2)), |x| x.sum((0, 2))),
        ("sum_keepdim", |x| sum_keepdim(x, D::Minus2), |x| x.sum_keepdim(D::Minus2)),
        ("mean", |x| mean(x, 0), |x| x.mean(0)),
        ("mean_keepdim", |x| mean_keepdim(x, (1, 0)), |x| x.mean_keepdim((1, 0))),
    ];
    let inputs = [(values("x", &[3000, 2, 2]) + 1.0).unwrap()];
    let small = [values("x", &[3, 2, 4])];
    for (what, ours, stock) in all {
        assert_same(what, &inputs, |t| ours(&t[0]), |t| stock(&t[0]));
        assert_rounds_once(what, &inputs, |t| ours(&t[0]));
        assert_differentiates(what, &small, |t| ours(&t[0]));
    }
    let ones = Tensor::ones(5000, DType::BF16, &Device::Cpu).unwrap();
    assert_eq!(flat(&mean(&ones, 0).unwrap()), [1.0]);
    assert_eq!(flat(&sum(&ones, 0).unwrap()), [4992.0]);
}

#[test]
fn concatenation_is_candles_and_widens() {
    let inputs = [values("a", &[2, 3]), values("b", &[2, 1])];
    let ours = |t: &[Tensor]| cat(&[&t[0], &t[1], &t[0]], 1);
    assert_same("cat", &inputs, ours, |t| Tensor::cat(&[&t[0], &t[1], &t[0]], 1));
    assert_rounds_once("cat", &inputs, ours);
    assert_differentiates("cat", &inputs, ours);
    let half = |dtype| inputs[1].to_dtype(dtype).unwrap();
    for (other, whole) in [(DType::F16, DType::F32), (DType::F64, DType::F64)] {
        assert_eq!(cat(&[inputs[0].clone(), half(other)], 1).unwrap().dtype(), whole);
    }
    let halves = [half(DType::F16), half(DType::BF16)];
    assert_eq!(cat(&halves, 1).unwrap().dtype(), DType::F32);
    assert!(cat::<Tensor>(&[], 0).unwrap_err().to_string().contains("no tensors"));
    assert!(cat(&inputs, 0).is_err());
}

#[test]
fn gather_takes_parts_and_rounds_once() {
    let ids =
        |values: &[i64], shape: &[usize]| Tensor::from_slice(values, shape, &Device::Cpu).unwrap();
    let inputs = [values("x", &[3, 4])];
    let whole = ids(&[0, 0, 2, 3, 1, 1, 3, 2, 0], &[3, 3]);
    assert_same("gather", &inputs, |t| gather(&t[0], &whole, 1), |t| t[0].gather(&whole, 1));
    assert_differentiates("gather", &inputs, |t| gather(&t[0], &whole, 1));
    let part = ids(&[0, 2, 1, 2], &[2, 2]);
    assert_differentiates("gather of a part", &inputs, |t| gather(&t[0], &part, 0));
    let y = gather(&inputs[0], &part, 0).unwrap();
    let x = inputs[0].to_vec2::<f32>().unwrap();
    assert_eq!(y.to_vec2::<f32>().unwrap(), [[x[0][0], x[2][1]], [x[1][0], x[2][1]]]);
    // So often that a half-precision sum saturates.
    let often = ids(&[1; 6000], &[3, 2000]);
    assert_rounds_once("gather", &inputs, |t| gather(&t[0], &often, 1));
    for (indices, text) in [
        (ids(&[4], &[1, 1]), "index 4 is out of range for 4"),
        (ids(&[-1], &[1, 1]), "index -1"),
        (ids(&[0; 4], &[4, 1]), "indices of shape [4, 1]"),
        (ids(&[0], &[1]), "indices of shape [1]"),
    ] {
        let error = gather(&inputs[0], &indices, 1).unwrap_err().to_string();
        assert!(error.contains(text), "{error}");
    }
}

#[test]
fn padding_differentiates_and_rounds_once() {
    let inputs = [values("x", &[2, 3, 4])];
    for mode in [PadMode::Constant(1.5), PadMode::Reflect, PadMode::Replicate] {
        for by in
            [&[(1, 2)][..], &[(2, 0), (0, 3)], &[(1, 1), (0, 0)], &[(1, 0), (0, 1), (2, 2)], &[]]
        {
            let (what, op) = (format!("{mode:?} {by:?}"), |t: &[Tensor]| pad(&t[0], by, mode));
            assert_differentiates(&what, &inputs, op);
            assert_rounds_once(&what, &inputs, op);
        }
    }
    let x = Tensor::new(&[[1f32, 2., 3.]], &Device::Cpu).unwrap();
    let of = |by, mode| pad(&x, by, mode).map(|y| y.to_vec2::<f32>().unwrap());
    let row = of(&[(0, 1), (2, 1)], PadMode::Constant(7.0)).unwrap();
    assert_eq!(row, [[7., 7., 1., 2., 3., 7.], [7.; 6]]);
    assert_eq!(of(&[(2, 1)], PadMode::Reflect).unwrap(), [[3., 2., 1., 2., 3., 2.]]);
    assert_eq!(of(&[(2, 1)], PadMode::Replicate).unwrap(), [[1., 1., 1., 2., 3., 3.]]);
    let error = |x: &Tensor, by: &[_], mode| pad(x, by, mode).unwrap_err().to_string();
    let text = error(&x, &[(3, 0)], PadMode::Reflect);
    assert!(text.contains("Reflect by 3 does not fit a dimension of 3"), "{text}");
    assert!(error(&x, &[(0, 3)], PadMode::Reflect).contains("by 3"));
    assert!(error(&x, &[(0, 0); 3], PadMode::Reflect).contains("3 paddings"));
    let empty = values("x", &[2, 0]);
    assert!(error(&empty, &[(1, 0)], PadMode::Replicate).contains("a dimension of 0"));
    assert_eq!(pad(&empty, &[(0, 1)], PadMode::Constant(0.0)).unwrap().dims(), [2, 1]);
}

#[test]
#[expect(clippy::disallowed_methods, reason = "beside candle's own")]
fn average_pools_are_candles_and_round_once() {
    let inputs = [values("x", &[2, 3, 6, 8])];
    let two = Window { stride: 2, padding: 0 };
    let ours = |t: &[Tensor]| avg_pool2d(&t[0], 2, two);
    assert_same("avg_pool2d", &inputs, ours, |t| t[0].avg_pool2d(2));
    let adaptive = |t: &[Tensor]| adaptive_avg_pool2d(&t[0], 3, 2);
    assert_same("adaptive", &inputs, adaptive, |t| t[0].avg_pool2d((2, 4)));
    let whole = |t: &[Tensor]| adaptive_avg_pool2d(&t[0], 1, 1)?.flatten_from(1);
    assert_same("global", &inputs, whole, |t| global_avg_pool(&t[0]));
    let inputs = [values("x", &[2, 2, 5, 4])];
    for (kernel, stride, padding) in [(2, 2, 0), (3, 2, 1), (3, 1, 1), (2, 3, 1)] {
        let window = Window { stride, padding };
        let op = |t: &[Tensor]| avg_pool2d(&t[0], kernel, window);
        assert_differentiates(&format!("{kernel}, {window:?}"), &inputs, op);
        assert_rounds_once(&format!("{kernel}, {window:?}"), &inputs, op);
    }
    for (height, width) in [(3, 3), (7, 1), (5, 4)] {
        let op = |t: &[Tensor]| adaptive_avg_pool2d(&t[0], height, width);
        assert_differentiates(&format!("{height} x {width}"), &inputs, op);
        assert_rounds_once(&format!("{height} x {width}"), &inputs, op);
    }
    assert!(avg_pool2d(&inputs[0], 2, Window { stride: 1, padding: 2 }).is_err());
    assert!(avg_pool2d(&inputs[0], 6, two).is_err());
    assert!(adaptive_avg_pool2d(&inputs[0], 0, 1).is_err());
}

/// Windows of several sizes, which overlap.
#[test]
fn adaptive_max_pools_take_the_largest_pixels() {
    let inputs = [values("x", &[2, 2, 6, 4])];
    let two = Window { stride: 2, padding: 0 };
    let half = |t: &[Tensor]| adaptive_max_pool2d(&t[0], 3, 2);
    assert_same("halves", &inputs, half, |t| max_pool2d(&t[0], 2, two));
    let inputs = [values("x", &[2, 2, 5, 4])];
    let loops = |x: &Tensor, to: [usize; 2]| -> Result<Tensor> {
        let part = |x: &Tensor, dim: usize, i: usize, to: usize| {
            let from = x.dim(dim)?;
            let (start, end) = (i * from / to, ((i + 1) * from).div_ceil(to));
            x.narrow(dim, start, end - start)
        };
        let mut y = Vec::new();
        for (i, j) in (0..to[0]).flat_map(|i| (0..to[1]).map(move |j| (i, j))) {
            y.push(part(&part(x, 2, i, to[0])?, 3, j, to[1])?.flatten_from(2)?.max(2)?);
        }
        Tensor::stack(&y, 2)?.reshape((2, 2, to[0], to[1]))
    };
    for to in [[3, 3], [7, 1], [5, 4], [1, 1], [4, 9]] {
        let (what, op) =
            (format!("{to:?}"), |t: &[Tensor]| adaptive_max_pool2d(&t[0], to[0], to[1]));
        assert_same(&what, &inputs, op, |t| loops(&t[0], to));
        assert_differentiates(&what, &inputs, op);
        assert_rounds_once(&what, &inputs, op);
    }
    assert!(adaptive_max_pool2d(&inputs[0], 0, 1).is_err());
    let error = adaptive_max_pool2d(&values("x", &[1, 1, 0, 2]), 1, 1).unwrap_err().to_string();
    assert!(error.contains("adaptive_max_pool2d: from 0 x 2 to 1 x 1"), "{error}");
}

#[test]
fn adaptive_max_pools_keep_nan_and_negative_infinity() {
    let pool = |pixels: [f32; 4]| {
        let x = Tensor::new(&pixels, &Device::Cpu).unwrap().reshape((1, 1, 1, 4)).unwrap();
        let all = run(&[x], |t| adaptive_max_pool2d(&t[0], 1, 1)).unwrap();
        let dy = flat(&values("dy", &[1, 1, 1, 1]))[0];
        (flat(&all[0])[0], flat(&all[1]).iter().map(|g| *g == dy).collect::<Vec<_>>())
    };
    let (least, nan) = (f32::NEG_INFINITY, f32::NAN);
    let check = || {
        assert_eq!(pool([least; 4]), (least, vec![true, false, false, false]));
        assert_eq!(pool([1.0, 3.0, 3.0, 2.0]), (3.0, vec![false, true, false, false]));
        assert!(pool([1.0, nan, 3.0, 2.0]).0.is_nan());
    };
    check();
    composed(check);
    assert_eq!(pool([nan, 1.0, nan, 2.0]).1, [false, false, true, false]);
}

/// The middle frame by a kernel of one frame is `conv2d`; all else by differences, and by PyTorch's
/// values in `tests/vectors`.
#[test]
fn conv3d_differentiates() {
    let frames = |t: &[Tensor]| {
        let one = (t[0].narrow(2, 1, 1)?.squeeze(2)?, t[1].squeeze(2)?);
        conv2d(&one.0, &one.1, None, Window { stride: 1, padding: 0 })
    };
    let inputs = [values("x", &[2, 2, 3, 4, 5]), values("w", &[3, 2, 1, 2, 3])];
    let ours = |t: &[Tensor]| conv3d(&t[0], &t[1], None, ConvOptions::default())?.get_on_dim(2, 1);
    assert_same("one frame", &inputs, ours, frames);
    let inputs = [values("x", &[2, 2, 3, 3, 4]), values("w", &[2, 2, 2, 2, 3]), values("b", &[2])];
    for (stride, padding, dilation) in [(1, 0, 1), (2, 1, 1), (1, 2, 2)] {
        let options = ConvOptions { stride, padding, dilation, groups: 1 };
        let op = |t: &[Tensor]| conv3d(&t[0], &t[1], Some(&t[2]), options);
        assert_differentiates(&format!("{options:?}"), &inputs, op);
        // The gradient of the input is rounded for each tap in depth; `x` is exact in all types.
        let x = inputs[0].to_dtype(DType::BF16).unwrap();
        assert_rounds_once(&format!("{options:?}"), &inputs[1..2], |t| {
            conv3d(&x.to_dtype(t[0].dtype())?, &t[0], None, options)
        });
    }
    let inputs = [values("x", &[1, 4, 2, 3, 3]), values("w", &[4, 2, 2, 2, 2])];
    let options = ConvOptions { groups: 2, ..ConvOptions::default() };
    assert_differentiates("groups", &inputs, |t| conv3d(&t[0], &t[1], None, options));
    assert!(conv3d(&inputs[0], &inputs[1], None, ConvOptions::default()).is_err());
    assert!(conv3d(&inputs[0], &values("w", &[4, 4, 3, 2, 2]), None, Window::default()).is_err());
}

#[test]
fn instance_norm_is_a_group_norm() {
    let inputs = [values("x", &[2, 3, 4, 2]), values("gamma", &[3]), values("beta", &[3])];
    let ours = |t: &[Tensor]| instance_norm(&t[0], Some((&t[1], &t[2])), 1e-5);
    assert_differentiates("instance_norm", &inputs, ours);
    assert_rounds_once("instance_norm", &inputs, ours);
    let plain = |t: &[Tensor]| instance_norm(&t[0], None, 1e-5);
    assert_differentiates("instance_norm", &inputs[..1], plain);
    assert_same("instance_norm", &inputs[..1], plain, |t| {
        let centred = t[0].broadcast_sub(&t[0].mean_keepdim((2, 3))?)?;
        let deviation = (centred.sqr()?.mean_keepdim((2, 3))? + 1e-5)?.sqrt()?;
        centred.broadcast_div(&deviation)
    });
}

#[test]
fn log_softmax_is_candles_and_rounds_once() {
    let inputs = [(values("x", &[3, 20]) * 5.0).unwrap()];
    let ours = |t: &[Tensor]| log_softmax(&t[0]);
    assert_same("log_softmax", &inputs, ours, |t| candle_nn::ops::log_softmax(&t[0], 1));
    assert_rounds_once("log_softmax", &inputs, ours);
    assert_differentiates("log_softmax", &inputs, ours);
    assert_same(
        "first",
        &inputs,
        |t| nn::ops::log_softmax(&t[0], 0),
        |t| candle_nn::ops::log_softmax(&t[0], 0),
    );
    let of = |row: [f32; 2]| flat(&log_softmax(&Tensor::new(&row, &Device::Cpu).unwrap()).unwrap());
    assert_eq!(of([1e30, -1e30]), [0.0, -2e30]);
    assert_eq!(of([3.0, f32::NEG_INFINITY]), [0.0, f32::NEG_INFINITY]);
    assert!(of([f32::NAN, 0.0]).iter().all(|v| v.is_nan()));
    assert!(log_softmax(&values("x", &[2, 0])).is_err());
}
