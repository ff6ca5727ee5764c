//! Tests of sums of half-precision tensors, of gradients of mixed types, and of empty batches.

use candle_core::{DType, Device, Tensor, Var};

use crate::tests::{assert_rounds_once, flat, run, values};
use crate::*;

/// So many values for one position that a half-precision sum saturates.
#[test]
fn scatters_round_once() {
    let places: Vec<u32> = (0..6000).map(|i| i % 2).collect();
    let places = Tensor::from_vec(places, (3000, 2), &Device::Cpu).unwrap();
    let inputs = [values("x", &[2, 2]), (values("y", &[3000, 2]) + 1.0).unwrap()];
    assert_rounds_once("scatter_add", &inputs, |t| scatter_add(&t[0], &places, &t[1], 0));
    assert_rounds_once("scatter", &inputs, |t| scatter(&t[0], &places, &t[1], 0));
    let half = inputs[1].to_dtype(DType::F16).unwrap();
    assert!(scatter_add(&inputs[0], &places, &half, 0).is_err());
}

/// Each half-precision number, with several others; and candle's products. candle's own sums of
/// `bf16` have zeros for subnormal numbers on processors with AVX512_BF16.
#[test]
fn sums_of_halves_round_once_and_products_are_candles() {
    use half::{bf16, f16};
    for shift in [0_u16, 1, 77, 0x3c00, 0x8000, 0xbfff] {
        let bits = || 0..=u16::MAX;
        let f16s = |by: u16| bits().map(move |v| f16::from_bits(v.wrapping_mul(3) ^ by));
        let bf16s = |by: u16| bits().map(move |v| bf16::from_bits(v.wrapping_mul(3) ^ by));
        let all = [0, shift].map(|by| Tensor::from_iter(f16s(by), &Device::Cpu).unwrap());
        let wide = [0, shift].map(|by| Tensor::from_iter(bf16s(by), &Device::Cpu).unwrap());
        for [a, b] in [all, wide] {
            let rounded = |sum: f32| match a.dtype() {
                DType::F16 => f16::from_f32_const(sum).to_f32(),
                _ => bf16::from_f32_const(sum).to_f32(),
            };
            let sums = flat(&a).into_iter().zip(flat(&b)).map(|(a, b)| rounded(a + b));
            for (got, wanted) in flat(&add(&a, &b).unwrap()).into_iter().zip(sums) {
                let is_same = got.to_bits() == wanted.to_bits();
                assert!(is_same || got.is_nan() && wanted.is_nan(), "{got}, not {wanted}");
            }
        }
    }
    // Values and gradients by the same mask, with a factor that is rounded.
    for dtype in [DType::F16, DType::BF16] {
        let x = Var::from_tensor(&values("x", &[300]).to_dtype(dtype).unwrap()).unwrap();
        let dropped = Context::new(1).enter(|| dropout(&x, 0.3)).unwrap();
        let ones = x.ones_like().unwrap();
        let factors = Context::new(1).enter(|| dropout(&ones, 0.3)).unwrap();
        assert_eq!(flat(&dropped), flat(&(x.as_tensor() * &factors).unwrap()));
        let dy = values("dy", &[300]).to_dtype(dtype).unwrap();
        let gradients = (dropped * &dy).unwrap().sum_all().unwrap().backward().unwrap();
        assert_eq!(flat(gradients.get(&x).unwrap()), flat(&(dy * factors).unwrap()));
    }
}

/// The gradient of a half-precision tensor is rounded from `f64`.
#[test]
fn f64_beside_half_types_differentiates() {
    let (x, gamma, beta) = (values("x", &[5, 7]), values("gamma", &[7]), values("beta", &[7]));
    for dtype in [DType::F32, DType::F16, DType::BF16] {
        let half = |t: &Tensor| t.to_dtype(dtype).unwrap();
        let wide = |t: &Tensor| t.to_dtype(DType::F64).unwrap();
        let inputs = [wide(&x), half(&gamma), half(&beta)];
        let op = |t: &[Tensor]| layer_norm(&t[0], &t[1], &t[2], 1e-5);
        let exact = run(&inputs.each_ref().map(wide), op).unwrap();
        for (i, (got, exact)) in run(&inputs, op).unwrap().iter().zip(exact).enumerate() {
            let to = if i < 2 { DType::F64 } else { dtype };
            assert_eq!(got.dtype(), to);
            assert_eq!(flat(got), flat(&exact.to_dtype(to).unwrap()), "tensor {i} in {dtype:?}");
        }
    }
}

#[test]
fn empty_batches_are_empty() {
    let x = |shape: &[usize]| Var::from_tensor(&values("x", shape)).unwrap().into_inner();
    let (w, ids) = (x(&[3]), Tensor::zeros(0, DType::I64, &Device::Cpu).unwrap());
    let one = Window::default();
    let options = BatchNormOptions { eps: 1e-5, relu: true };
    let given = Statistics { mean: w.clone(), var: w.sqr().unwrap() };
    let heads = AttentionOptions { heads: 1, causal: true };
    let places = ids.reshape((0, 3)).unwrap();
    let image = x(&[0, 3, 4, 4]);
    let images = image.to_dtype(DType::U8).unwrap();
    for (what, y, rank) in [
        ("conv2d", conv2d(&image, &x(&[2, 3, 3, 3]), None, one), 4),
        ("conv2d by tiles", conv2d(&x(&[0, 16, 4, 4]), &x(&[16, 16, 3, 3]), None, one), 4),
        ("linear", linear(&x(&[0, 3]), &x(&[2, 3]), Some(&x(&[2]))), 2),
        ("batch_norm_with", batch_norm_with(&image, &w, &w, &given, options), 4),
        ("max_pool2d", max_pool2d(&image, 2, one), 4),
        ("global_avg_pool", global_avg_pool(&image), 2),
        ("layer_norm", layer_norm(&x(&[0, 3]), &w, &w, 1e-5), 2),
        ("softmax", softmax(&x(&[0, 3])), 2),
        ("self_attention", self_attention(&x(&[0, 2, 3]), heads), 3),
        ("gelu", gelu(&x(&[0, 3])), 2),
        ("silu", silu(&x(&[0, 3])), 2),
        ("swiglu", swiglu(&x(&[0, 3]), &x(&[0, 3])), 2),
        ("rms_norm", rms_norm(&x(&[0, 3]), &w, 1e-5), 2),
        ("rope", rope(&x(&[0, 1, 2, 4]), &x(&[2, 2]), &x(&[2, 2])), 4),
        ("relu", relu(&x(&[0, 3])), 2),
        ("add", add(&x(&[0, 3]), &w), 2),
        ("add_relu", add_relu(&x(&[0, 3]), &x(&[0, 3])), 2),
        ("embedding", embedding(&ids, &x(&[2, 3])), 2),
        ("normalize", normalize(&images, &Normalization::default(), DType::F32), 4),
        ("scatter_add", scatter_add(&x(&[0, 3]), &places, &x(&[0, 3]), 0), 2),
        ("scatter", scatter(&x(&[0, 3]), &places, &x(&[0, 3]), 0), 2),
        ("mul", mul(&x(&[0, 3]), &w), 2),
        ("cat", cat(&[x(&[0, 3]), x(&[0, 1])], 1), 2),
        ("gather", gather(&x(&[0, 3]), &places, 1), 2),
        ("pad", pad(&x(&[0, 3]), &[(1, 1)], PadMode::Reflect), 2),
        ("log_softmax", log_softmax(&x(&[0, 3])), 2),
        ("avg_pool2d", avg_pool2d(&image, 2, one), 4),
        ("adaptive_avg_pool2d", adaptive_avg_pool2d(&image, 3, 2), 4),
        ("adaptive_max_pool2d", adaptive_max_pool2d(&image, 3, 2), 4),
        ("conv3d", conv3d(&x(&[0, 2, 3, 4, 4]), &x(&[2, 2, 2, 3, 3]), None, one), 5),
        ("dropout", Context::new(0).enter(|| dropout(&x(&[0, 3]), 0.5)), 2),
    ] {
        let y = y.unwrap_or_else(|e| panic!("{what}: {e}"));
        assert_eq!((y.elem_count(), y.rank()), (0, rank), "{what}");
        y.sum_all().unwrap().backward().unwrap_or_else(|e| panic!("{what}: {e}"));
    }
}
