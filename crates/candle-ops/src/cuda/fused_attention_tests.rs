//! Tests that compare attention by the fused kernels with the CPU, at the edges of their tiles.

use candle_core::{DType, Device, Tensor};
use proptest::prelude::*;

use super::tests::{assert_sums_alike, kernels, own_launches, run_on, with_kernels};
use crate::tests::{distance, flat, values};
use crate::{AttentionOptions, SdpaOptions, scaled_dot_product_attention, self_attention};

const NAMES: [&str; 4] = ["attention", "attention_backward", "attention_backward_keys", "softmax"];

/// Launches of the fused kernels and of the softmax that they replace; `None` on a real GPU.
fn count() -> Option<[u64; 4]> {
    let all = NAMES.map(|name| own_launches(name).unwrap_or(u64::MAX));
    (all[0] != u64::MAX).then_some(all)
}

/// Compares self-attention with the CPU in each type, and asserts that half precision used the
/// fused kernels, once each.
fn assert_fused([samples, positions, heads, depth]: [usize; 4], causal: bool) {
    let before = count();
    let qkv = values("qkv", &[samples, positions, 3 * heads * depth]);
    let what = format!("{samples} x {positions}, {heads} heads of {depth}, causal: {causal}");
    let options = AttentionOptions { heads, causal };
    assert_sums_alike(&kernels(), &what, 0, &[qkv], |t| self_attention(&t[0], options));
    if let (Some(before), Some(after)) = (before, count()) {
        let more: Vec<_> = after.iter().zip(before).map(|(after, before)| after - before).collect();
        // Softmax of f32, once, if everything fits.
        assert_eq!(more[..3], [2, 2, 2], "{what}");
        assert_eq!(more[3], 1, "{what}");
    }
}

/// One row, part of a band of 16, whole tiles of 64 and blocks of 128, one more and one less.
#[test]
fn fused_attention_is_the_cpus_at_the_edges_of_tiles() {
    for positions in [1, 15, 17, 63, 65, 128, 130] {
        for causal in [false, true] {
            assert_fused([1, positions, 2, 8], causal);
        }
    }
    assert_fused([2, 49, 1, 64], false);
    assert_fused([2, 70, 3, 40], true);
    assert_fused([1, 200, 1, 16], true);
}

/// Heads with the same keys are rows of one product, in which a causal mask restarts.
#[test]
fn fused_attention_of_shared_heads_is_the_cpus() {
    for (heads, kv_heads, queries, keys) in [(4, 2, 20, 33), (6, 1, 31, 7), (2, 2, 65, 130)] {
        for causal in [false, true] {
            let inputs = [
                values("q", &[2, heads, queries, 16]),
                values("k", &[2, kv_heads, keys, 16]),
                values("v", &[2, kv_heads, keys, 8]),
            ];
            let what = format!("{heads} and {kv_heads} heads, {queries} x {keys}, {causal}");
            for scale in [None, Some(-0.7)] {
                let options = SdpaOptions { causal, scale, ..Default::default() };
                assert_sums_alike(&kernels(), &what, 0, &inputs, |t| {
                    scaled_dot_product_attention(&t[0], &t[1], &t[2], options)
                });
            }
        }
    }
}

/// Run twice, on all multiprocessors: a race would change the bits.
#[test]
fn fused_attention_has_the_same_bits_again() {
    let kernels = kernels();
    let device = Device::Cuda(kernels.device.clone());
    // A GPU runs many blocks at a time; the fake one runs one, and is slow.
    let (samples, positions) = if count().is_some() { (1, 70) } else { (64, 500) };
    for dtype in [DType::F16, DType::BF16] {
        let qkv = values("qkv", &[samples, positions, 3 * 4 * 64]).to_dtype(dtype).unwrap();
        let run = || {
            let options = AttentionOptions { heads: 4, causal: true };
            let op = |t: &[Tensor]| self_attention(&t[0], options);
            let all = with_kernels(&kernels, || run_on(&device, std::slice::from_ref(&qkv), &op));
            all.iter().map(flat).collect::<Vec<_>>()
        };
        assert!(run() == run(), "{dtype:?}");
    }
}

/// Scores of several hundred, for which `exp` overflows.
#[test]
fn fused_attention_of_large_scores_is_finite_and_the_cpus() {
    let kernels = kernels();
    let device = Device::Cuda(kernels.device.clone());
    let qkv = (values("qkv", &[1, 80, 3 * 16]) * 30.0).unwrap().to_dtype(DType::F16).unwrap();
    let op = |t: &[Tensor]| self_attention(&t[0], AttentionOptions { heads: 1, causal: true });
    let gpu = with_kernels(&kernels, || run_on(&device, std::slice::from_ref(&qkv), &op));
    let cpu = run_on(&Device::Cpu, std::slice::from_ref(&qkv), &op);
    for (gpu, cpu) in gpu.iter().zip(&cpu) {
        let apart = distance(gpu, cpu);
        assert!(apart <= 4e-2, "{apart}");
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 8, failure_persistence: None, ..Default::default() })]

    #[test]
    fn fused_attention_is_the_cpus(
        samples in 1..3_usize,
        positions in 1..150_usize,
        heads in 1..3_usize,
        eighths in 1..=8_usize,
        causal in any::<bool>(),
    ) {
        assert_fused([samples, positions, heads, 8 * eighths], causal);
    }
}
