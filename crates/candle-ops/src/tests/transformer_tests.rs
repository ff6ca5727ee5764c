//! Tests of the operators of transformers, with the checks of `tests/mod.rs`.

use candle_core::{D, DType, Device, IndexOp, Result, Tensor, Var};
use proptest::prelude::*;

use crate::tests::{
    assert_differentiates, assert_rounds_once, assert_same, distance, flat, run, values,
};
use crate::*;

#[test]
fn softmax_is_candles() {
    let inputs = [(values("x", &[3, 5, 21]) * 4.0).unwrap()];
    let ours = |t: &[Tensor]| softmax(&t[0]);
    assert_same("softmax", &inputs, ours, |t| candle_nn::ops::softmax(&t[0], D::Minus1));
    assert_differentiates("softmax", &[values("x", &[2, 7])], ours);
    let x = Tensor::new(&[[1e30_f32, f32::NEG_INFINITY], [f32::NAN, 0.0]], &Device::Cpu).unwrap();
    let y = flat(&softmax(&x).unwrap());
    assert_eq!(y[..2], [1.0, 0.0]);
    assert!(y[2].is_nan() && y[3].is_nan());
    assert!(softmax(&Tensor::new(1.0_f32, &Device::Cpu).unwrap()).is_err());
}

/// Layer normalization composed of candle's operators, each of which has a backward pass.
fn layer_norm_of_stock_ops(t: &[Tensor]) -> Result<Tensor> {
    let centred = t[0].broadcast_sub(&t[0].mean_keepdim(D::Minus1)?)?;
    let var = centred.sqr()?.mean_keepdim(D::Minus1)?;
    let normal = centred.broadcast_div(&(var + 1e-5)?.sqrt()?)?;
    normal.broadcast_mul(&t[1])?.broadcast_add(&t[2])
}

#[test]
fn layer_norm_is_candles() {
    let x = ((values("x", &[4, 3, 37]) * 2.0).unwrap() + 5.0).unwrap();
    let inputs = [x, values("gamma", &[37]), values("beta", &[37])];
    let ours = |t: &[Tensor]| layer_norm(&t[0], &t[1], &t[2], 1e-5);
    assert_same("layer_norm", &inputs, ours, layer_norm_of_stock_ops);
    assert_rounds_once("layer_norm", &inputs, ours);
    let inputs = [values("x", &[3, 6]), values("gamma", &[6]), values("beta", &[6])];
    assert_differentiates("layer_norm", &inputs, ours);
    assert!(layer_norm(&values("x", &[3, 5]), &inputs[1], &inputs[2], 1e-5).is_err());
}

#[test]
fn gelu_is_candles() {
    let inputs = [(values("x", &[3, 50]) * 3.0).unwrap()];
    let ours = |t: &[Tensor]| gelu(&t[0]);
    assert_same("gelu", &inputs, ours, |t| t[0].gelu_erf());
    assert_rounds_once("gelu", &inputs, ours);
    assert_differentiates("gelu", &inputs, ours);
    let x: Vec<f32> = (-1200..=1200).map(|i| i as f32 * 0.01).collect();
    let x = Tensor::from_vec(x, 2401, &Device::Cpu).unwrap();
    let exact = x.to_dtype(DType::F64).unwrap().gelu_erf().unwrap().to_vec1::<f64>().unwrap();
    for ((x, y), exact) in flat(&x).iter().zip(flat(&gelu(&x).unwrap())).zip(exact) {
        // The product rounds too.
        let bound = f64::from(x.abs()) * 3e-7 + exact.abs() * 6e-8;
        assert!((f64::from(y) - exact).abs() <= bound, "{x}: {y} is not {exact}");
    }
}

#[test]
fn rms_norm_is_candles() {
    let x = ((values("x", &[4, 3, 37]) * 2.0).unwrap() + 1.0).unwrap();
    let inputs = [x, values("gamma", &[37])];
    let ours = |t: &[Tensor]| rms_norm(&t[0], &t[1], 1e-5);
    let slow = |t: &[Tensor]| candle_nn::ops::rms_norm_slow(&t[0], &t[1], 1e-5);
    assert_same("rms_norm", &inputs, ours, slow);
    assert_rounds_once("rms_norm", &inputs, ours);
    assert_differentiates("rms_norm", &[values("x", &[3, 6]), values("gamma", &[6])], ours);
    let wide = rms_norm(&inputs[0].to_dtype(DType::BF16).unwrap(), &inputs[1], 1e-5).unwrap();
    assert_eq!(wide.dtype(), DType::BF16);
    assert!(rms_norm(&values("x", &[3, 5]), &inputs[1], 1e-5).is_err());
    assert!(rms_norm(&values("x", &[3, 0]), &values("gamma", &[0]), 1e-5).is_err());
}

#[test]
fn silu_is_candles() {
    let inputs = [(values("x", &[3, 50]) * 5.0).unwrap()];
    let ours = |t: &[Tensor]| silu(&t[0]);
    assert_same("silu", &inputs, ours, |t| t[0].silu());
    assert_rounds_once("silu", &inputs, ours);
    assert_differentiates("silu", &inputs, ours);
}

#[test]
fn simple_activations_are_candles() {
    type Op = fn(&Tensor) -> Result<Tensor>;
    let all: [(&str, Op, Op); 8] = [
        ("tanh", tanh, Tensor::tanh),
        ("sigmoid", sigmoid, candle_nn::ops::sigmoid),
        ("gelu_tanh", gelu_tanh, Tensor::gelu),
        ("leaky_relu", |x| leaky_relu(x, 0.2), |x| candle_nn::ops::leaky_relu(x, 0.2)),
        ("elu", |x| elu(x, 0.7), |x| x.elu(0.7)),
        ("mish", mish, candle_nn::ops::mish),
        ("hard_swish", hard_swish, |x| x * candle_nn::ops::hard_sigmoid(x)?),
        ("relu6", relu6, |x| x.clamp(0f64, 6f64)),
    ];
    let inputs = [(values("x", &[3, 50]) * 5.0).unwrap()];
    for (what, ours, stock) in all {
        let ours = |t: &[Tensor]| ours(&t[0]);
        assert_same(what, &inputs, ours, |t| stock(&t[0]));
        assert_rounds_once(what, &inputs, ours);
        assert_differentiates(what, &inputs, ours);
    }
}

/// Values and derivatives of PyTorch 2.15; limits where it has NaN.
#[test]
fn simple_activations_of_extremes() {
    type Op = fn(&Tensor) -> Result<Tensor>;
    let (inf, x) = (f32::INFINITY, [f32::NAN, f32::INFINITY, 1e30, f32::NEG_INFINITY, -1e30, 0.0]);
    let cases: [(&str, Op, [f32; 5], [f32; 5]); 8] = [
        ("tanh", tanh, [1.0, 1.0, -1.0, -1.0, 0.0], [0.0, 0.0, 0.0, 0.0, 1.0]),
        ("sigmoid", sigmoid, [1.0, 1.0, 0.0, 0.0, 0.5], [0.0, 0.0, 0.0, 0.0, 0.25]),
        ("gelu_tanh", gelu_tanh, [inf, 1e30, 0.0, 0.0, 0.0], [1.0, 1.0, 0.0, 0.0, 0.5]),
        (
            "leaky_relu",
            |x| leaky_relu(x, 0.25),
            [inf, 1e30, -inf, -2.5e29, 0.0],
            [1.0, 1.0, 0.25, 0.25, 0.25],
        ),
        ("elu", |x| elu(x, 0.5), [inf, 1e30, -0.5, -0.5, 0.0], [1.0, 1.0, 0.0, 0.0, 0.5]),
        ("mish", mish, [inf, 1e30, 0.0, 0.0, 0.0], [1.0, 1.0, 0.0, 0.0, 0.6]),
        ("hard_swish", hard_swish, [inf, 1e30, 0.0, 0.0, 0.0], [1.0, 1.0, 0.0, 0.0, 0.5]),
        ("relu6", relu6, [6.0, 6.0, 0.0, 0.0, 0.0], [0.0; 5]),
    ];
    for (what, op, y_wanted, dx_wanted) in cases {
        let run = || {
            let x = Var::new(&x, &Device::Cpu).unwrap();
            let y = op(&x).unwrap();
            let dx = y.sum_all().unwrap().backward().unwrap();
            (flat(&y), flat(dx.get(&x).unwrap()))
        };
        for (y, dx) in [run(), composed(run)] {
            let near = |(a, b): (&f32, &f32)| a == b || (a - b).abs() < 1e-6 * b.abs().max(1.0);
            assert!(y[0].is_nan() && y[1..].iter().zip(&y_wanted).all(near), "{what}: {y:?}");
            assert!(dx[1..].iter().zip(&dx_wanted).all(near), "{what}: {dx:?}");
        }
    }
}

#[test]
fn swiglu_is_a_gate_times_the_other() {
    let inputs = [(values("gate", &[3, 50]) * 5.0).unwrap(), values("up", &[3, 50])];
    let ours = |t: &[Tensor]| swiglu(&t[0], &t[1]);
    assert_same("swiglu", &inputs, ours, |t| t[0].silu()? * &t[1]);
    assert_rounds_once("swiglu", &inputs, ours);
    assert_differentiates("swiglu", &inputs, ours);
    let half = inputs[1].to_dtype(DType::F16).unwrap();
    assert_eq!(swiglu(&inputs[0], &half).unwrap().dtype(), DType::F32);
    let error = swiglu(&inputs[0], &values("up", &[50])).unwrap_err().to_string();
    assert!(error.contains("swiglu: shapes [3, 50] and [50] differ"), "{error}");
}

#[test]
fn activations_of_extremes() {
    type Op = fn(&Tensor) -> Result<Tensor>;
    let ones: Op = |x| swiglu(x, &x.ones_like()?);
    let all: [(&str, Op); 3] = [("gelu", gelu), ("silu", silu), ("swiglu", ones)];
    for (what, op) in all {
        extremes_are_limits(what, op);
    }
}

fn extremes_are_limits(what: &str, op: fn(&Tensor) -> Result<Tensor>) {
    let x = [f32::NAN, f32::INFINITY, 1e30, f32::NEG_INFINITY, -1e30, -95.0];
    let extremes = |dtype| {
        let x = Var::new(&x, &Device::Cpu).unwrap().to_dtype(dtype).unwrap();
        let x = Var::from_tensor(&x).unwrap();
        let y = op(&x).unwrap();
        let dx = y.sum_all().unwrap().backward().unwrap();
        (flat(&y), flat(dx.get(&x).unwrap()))
    };
    for dtype in [DType::F32, DType::F64] {
        for (y, dx) in [extremes(dtype), composed(|| extremes(dtype))] {
            let is_near = |values: &[f32], to: f32| values.iter().all(|v| (v - to).abs() < 1e-30);
            assert!(y[0].is_nan() && y[1..3] == x[1..3] && is_near(&y[3..], 0.0), "{what}: {y:?}");
            assert!(dx[0].is_nan() && is_near(&dx[1..3], 1.0), "{what}: {dx:?}");
            assert!(is_near(&dx[3..], 0.0), "{what}: {dx:?}");
        }
    }
}

#[test]
fn rotary_embeddings_are_candles() {
    use candle_nn::rotary_emb as stock;
    let inputs = [values("x", &[2, 3, 4, 10]), values("cos", &[7, 5]), values("sin", &[7, 5])];
    let small = [values("x", &[2, 2, 2, 4]), values("cos", &[3, 2]), values("sin", &[3, 2])];
    let own = [values("x", &[2, 2, 3, 4]), values("cos", &[2, 4, 2]), values("sin", &[2, 4, 2])];
    type Op = fn(&Tensor, &Tensor, &Tensor) -> Result<Tensor>;
    let thd: Op = |x, cos, sin| {
        stock::rope_slow(&x.transpose(1, 2)?.contiguous()?, cos, sin)?.transpose(1, 2)
    };
    let halves: Op = |x, cos, sin| stock::rope_slow(x, cos, sin);
    let neighbours: Op = |x, cos, sin| stock::rope_i_slow(x, cos, sin);
    let all: [(&str, Op, Op); 3] =
        [("rope", rope, halves), ("rope_i", rope_i, neighbours), ("rope_thd", rope_thd, thd)];
    for (what, ours, slow) in all {
        let ours = |t: &[Tensor]| ours(&t[0], &t[1], &t[2]);
        let slow = |t: &[Tensor]| slow(&t[0], &t[1], &t[2]);
        assert_same(what, &inputs, ours, slow);
        assert_rounds_once(what, &inputs, ours);
        assert_differentiates(what, &small, ours);
        assert_differentiates(&format!("{what} with angles of each sample"), &own, ours);
        // The angles differ by sample.
        let whole = ours(&own).unwrap();
        for i in 0..2 {
            let part = own.each_ref().map(|t| t.narrow(0, i, 1).unwrap());
            assert_eq!(flat(&whole.narrow(0, i, 1).unwrap()), flat(&ours(&part).unwrap()));
        }
    }
    let x = &inputs[0];
    for (cos, sin) in [([3, 5], [3, 5]), ([7, 4], [7, 4]), ([7, 5], [8, 5])] {
        let error = rope(x, &values("c", &cos), &values("s", &sin)).unwrap_err().to_string();
        assert!(error.contains("does not fit cos"), "{error}");
    }
    assert!(
        rope(&values("x", &[1, 1, 2, 3]), &values("c", &[2, 1]), &values("s", &[2, 1])).is_err()
    );
}

#[test]
fn embedding_is_candles() {
    let ids = Tensor::new(&[[2_i64, 0, 2], [1, 1, 2]], &Device::Cpu).unwrap();
    let inputs = [values("w", &[5, 7])];
    let ours = |t: &[Tensor]| embedding(&ids, &t[0]);
    let stock = |t: &[Tensor]| t[0].index_select(&ids.flatten_all()?, 0)?.reshape((2, 3, 7));
    assert_same("embedding", &inputs, ours, stock);
    assert_rounds_once("embedding", &inputs, ours);
    assert_differentiates("embedding", &inputs, ours);
    for id in [5_i64, -1] {
        let ids = Tensor::new(&[id], &Device::Cpu).unwrap();
        let error = embedding(&ids, &inputs[0]).unwrap_err().to_string();
        assert!(error.contains(&format!("index {id} is none of 5 rows")), "{error}");
    }
}

/// Attention composed of candle's operators, head by head.
fn attention_of_stock_ops(qkv: &Tensor, options: AttentionOptions) -> Result<Tensor> {
    let (_, positions, packed) = qkv.dims3()?;
    let depth = packed / 3 / options.heads;
    let mut outputs = Vec::new();
    for head in 0..options.heads {
        let part = |part: usize| {
            let at = part * packed / 3 + head * depth;
            qkv.i((.., .., at..at + depth))?.contiguous()
        };
        let scores = (part(0)?.matmul(&part(1)?.t()?.contiguous()?)? / (depth as f64).sqrt())?;
        let scores = if options.causal {
            let unseen =
                |at: usize| if at % positions > at / positions { f32::NEG_INFINITY } else { 0.0 };
            let mask: Vec<f32> = (0..positions * positions).map(unseen).collect();
            scores.broadcast_add(&Tensor::from_vec(mask, (positions, positions), &Device::Cpu)?)?
        } else {
            scores
        };
        outputs.push(candle_nn::ops::softmax(&scores, D::Minus1)?.matmul(&part(2)?)?);
    }
    Tensor::cat(&outputs, D::Minus1)
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(24))]

    #[test]
    fn self_attention_is_candles(
        n in 1usize..3, positions in 1usize..9, heads in 1usize..4, depth in 1usize..6, causal: bool,
    ) {
        let options = AttentionOptions { heads, causal };
        let inputs = [values("qkv", &[n, positions, 3 * heads * depth])];
        let ours = run(&inputs, |t| self_attention(&t[0], options)).unwrap();
        let stock = run(&inputs, |t| attention_of_stock_ops(&t[0], options)).unwrap();
        for (ours, stock) in ours.iter().zip(&stock) {
            prop_assert!(distance(ours, stock) < 1e-4);
        }
    }
}

#[test]
fn self_attention_differentiates_and_rounds_once() {
    for causal in [false, true] {
        let options = AttentionOptions { heads: 2, causal };
        let inputs = [values("qkv", &[2, 4, 12])];
        assert_differentiates("attention", &inputs, |t| self_attention(&t[0], options));
        assert_rounds_once("attention", &inputs, |t| self_attention(&t[0], options));
    }
    for (shape, heads) in [([1, 2, 7], 1), ([1, 2, 12], 3), ([1, 2, 12], 0), ([1, 0, 12], 2)] {
        let options = AttentionOptions { heads, causal: false };
        assert!(self_attention(&values("x", &shape), options).is_err(), "{shape:?} {heads}");
    }
}
