//! Tests that all versions of a loop (`simd.rs`) give bitwise the same results, on every processor.

use candle_core::{DType, Device, Result, Tensor};

use crate::cpu::simd::tests::on_each_width;
use crate::tests::{run, values};
use crate::*;

/// Output and gradients as bits, with one value for all NaNs: a NaN's payload may depend on the
/// order of operands.
fn bits(tensors: &[Tensor]) -> Vec<u64> {
    let flat =
        |t: &Tensor| t.to_dtype(DType::F64).unwrap().flatten_all().unwrap().to_vec1().unwrap();
    let bits = |v: f64| if v.is_nan() { f64::NAN.to_bits() } else { v.to_bits() };
    tensors.iter().flat_map(flat).map(bits).collect()
}

fn assert_same_bits(what: &str, inputs: &[Tensor], op: impl Fn(&[Tensor]) -> Result<Tensor>) {
    for dtype in [DType::F32, DType::F64, DType::BF16] {
        let inputs: Vec<_> = inputs.iter().map(|t| t.to_dtype(dtype).unwrap()).collect();
        let all = on_each_width(|| bits(&run(&inputs, &op).unwrap()));
        for (width, bits) in &all[1..] {
            assert_eq!(*bits, all[0].1, "{what}, {dtype:?}, {width:?}");
        }
    }
}

#[test]
fn every_instruction_set_gives_the_same_bits() {
    // Lengths near those of vectors, and special floating-point values.
    for width in [1, 2, 7, 8, 15, 16, 17, 31, 33, 64, 100] {
        let x = (values("x", &[3, width]) * 4.0).unwrap();
        let special = [f32::NAN, f32::INFINITY, f32::NEG_INFINITY, -0.0, 1e-40, 1e30, -90.0];
        let special = special.iter().cycle().take(width).copied().collect();
        let special = Tensor::from_vec(special, (1, width), &Device::Cpu).unwrap();
        let x = Tensor::cat(&[&x, &special], 0).unwrap();
        let row = |name| values(name, &[width]);
        let one = std::slice::from_ref(&x);
        assert_same_bits("gelu", one, |t| gelu(&t[0]));
        assert_same_bits("silu", one, |t| silu(&t[0]));
        assert_same_bits("tanh", one, |t| tanh(&t[0]));
        assert_same_bits("gelu_tanh", one, |t| gelu_tanh(&t[0]));
        assert_same_bits("elu", one, |t| elu(&t[0], 1.0));
        assert_same_bits("mish", one, |t| mish(&t[0]));
        assert_same_bits("softmax", one, |t| softmax(&t[0]));
        assert_same_bits("log_softmax", one, |t| log_softmax(&t[0]));
        let labels =
            Tensor::from_vec(vec![0_i64, width as i64 - 1, 0, 0], 4, &Device::Cpu).unwrap();
        assert_same_bits("cross_entropy", one, |t| cross_entropy(&t[0], &labels));
        let finite = [x.narrow(0, 0, 3).unwrap()];
        let labels = labels.narrow(0, 0, 3).unwrap();
        assert_same_bits("cross_entropy", &finite, |t| cross_entropy(&t[0], &labels));
        let gated = [x.clone(), values("up", &[4, width])];
        assert_same_bits("swiglu", &gated, |t| swiglu(&t[0], &t[1]));
        let (angles, wide) = ([4, width], x.reshape((1, 1, 4, width)).unwrap());
        let turned = [
            Tensor::cat(&[&wide, &wide], 3).unwrap(),
            values("cos", &angles),
            values("sin", &angles),
        ];
        assert_same_bits("rope", &turned, |t| rope(&t[0], &t[1], &t[2]));
        assert_same_bits("rope_i", &turned, |t| rope_i(&t[0], &t[1], &t[2]));
        assert_same_bits("rms_norm", &[x.clone(), row("gamma")], |t| rms_norm(&t[0], &t[1], 1e-5));
        let normed = [x.clone(), row("gamma"), row("beta")];
        assert_same_bits("layer_norm", &normed, |t| layer_norm(&t[0], &t[1], &t[2], 1e-5));
    }
    for causal in [false, true] {
        let options = AttentionOptions { heads: 2, causal };
        let qkv = [values("qkv", &[2, 19, 3 * 10])];
        assert_same_bits("self_attention", &qkv, |t| self_attention(&t[0], options));
    }
    let apart =
        [values("q", &[1, 4, 19, 5]), values("k", &[1, 2, 23, 5]), values("v", &[1, 2, 23, 3])];
    let bias = values("bias", &[19, 23]);
    let options = SdpaOptions { mask: Some(&bias), causal: true, ..Default::default() };
    assert_same_bits("attention", &apart, |t| {
        scaled_dot_product_attention(&t[0], &t[1], &t[2], options)
    });
    let tiled = [values("x", &[2, 16, 5, 7]), values("w", &[16, 16, 3, 3])];
    let window = Window { stride: 1, padding: 1 };
    assert_same_bits("conv2d", &tiled, |t| conv2d(&t[0], &t[1], None, window));
}

/// Values with known bits, so that those of the results are known.
fn known(shape: &[usize]) -> Tensor {
    let value = |i: usize| ((i * 7919) % 1999) as f32 / 128.0 - 7.8;
    Tensor::from_vec((0..shape.iter().product()).map(value).collect(), shape, &Device::Cpu).unwrap()
}

/// A hash of output and gradients for a gradient with known bits.
fn fingerprint(inputs: &[Tensor], op: impl Fn(&[Tensor]) -> Result<Tensor>) -> u64 {
    let vars: Vec<_> = inputs.iter().map(|t| candle_core::Var::from_tensor(t).unwrap()).collect();
    let tensors: Vec<_> = vars.iter().map(|v| v.as_tensor().clone()).collect();
    let y = op(&tensors).unwrap();
    let gradients = (&y * known(y.dims())).unwrap().sum_all().unwrap().backward().unwrap();
    let mut all = vec![y.detach()];
    all.extend(vars.iter().map(|v| gradients.get(v).unwrap().clone()));
    let mix = |hash: u64, bits: u64| (hash ^ bits).wrapping_mul(0x0000_0100_0000_01b3);
    bits(&all).into_iter().fold(0xcbf2_9ce4_8422_2325, mix)
}

#[test]
fn results_are_the_recorded_bits() {
    let x = known(&[37, 53]);
    let normed = [x.clone(), known(&[53]), known(&[53])];
    let found = [
        fingerprint(std::slice::from_ref(&x), |t| gelu(&t[0])),
        fingerprint(std::slice::from_ref(&x), |t| softmax(&t[0])),
        fingerprint(&normed, |t| layer_norm(&t[0], &t[1], &t[2], 1e-5)),
    ];
    let recorded = [0xe916_af25_545d_1c2d, 0x9990_428e_945d_1c2d, 0x0edc_74f2_fa88_c255];
    assert_eq!(found, recorded, "{found:#x?}");
}

#[test]
fn recurrent_layers_give_the_same_bits() {
    use crate::recurrent::cell::{Gru, Lstm};
    use crate::recurrent::tests::{inputs, whole};
    for hidden in [1, 7, 16, 33] {
        let lengths = [3, 2];
        assert_same_bits("lstm", &inputs::<Lstm>(2, 3, hidden), |t| {
            whole::<Lstm>(t, &lengths, true)
        });
        assert_same_bits("gru", &inputs::<Gru>(2, 3, hidden), |t| whole::<Gru>(t, &lengths, true));
    }
}
