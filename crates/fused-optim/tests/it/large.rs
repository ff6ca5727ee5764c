//! More than 2^31 elements, in one tensor and in total: indices that do not fit 31 bits.

use fused_optim::{HalfWeights, Optimizer, ParamMut, Sgd, SgdHyper, Slice, StepCtl};
use half::f16;

/// Period of the values: a prime, so that values at a distance of a power of two differ.
const PERIOD: usize = 997;

fn repeated(count: usize, values: &[f16]) -> Vec<f16> {
    let mut all = vec![f16::ZERO; count];
    for part in all.chunks_mut(PERIOD) {
        part.copy_from_slice(&values[..part.len()]);
    }
    all
}

#[test]
#[ignore = "needs 10 GB; cargo test --release -p gradstack-fused-optim --test it -- --ignored nightly"]
fn nightly_more_than_2_to_the_31_elements() {
    let counts = [12_345, (1 << 31) + 5000, 70_001];
    let value = |i: usize| f16::from_f32((i * 7919 % 1999) as f32 / 1000.0 - 0.9995);
    let (mut weight, grad): (Vec<f16>, Vec<f16>) =
        (0..PERIOD).map(|i| (value(i), value(i + 1234))).unzip();
    let mut weights = counts.map(|count| repeated(count, &weight));
    let grads = counts.map(|count| repeated(count, &grad));
    let hyper = SgdHyper { lr: 0.125, weight_decay: 0.25, ..Default::default() };
    let sgd = Sgd::with_one_group(hyper, counts.len()).unwrap();
    let mut sgd = sgd.with_half_weights(HalfWeights::Nearest);
    for threads in [1, 2] {
        sgd.set_threads(threads);
        let mut params: Vec<ParamMut<'_>> = (weights.iter_mut().zip(&grads))
            .map(|(weight, grad)| ParamMut::new(&mut weight[..], Some(Slice::F16(grad))))
            .collect();
        let _ = sgd.step(&mut params, &StepCtl::PLAIN).unwrap();
        for (w, g) in weight.iter_mut().zip(&grad) {
            let p = w.to_f32();
            *w = f16::from_f32(p - 0.125 * (g.to_f32() + p * 0.25));
        }
        for (tensor, all) in weights.iter().enumerate() {
            for (part, values) in all.chunks(PERIOD).enumerate() {
                let same = *values == weight[..values.len()];
                assert!(same, "tensor {tensor}, from element {}", part * PERIOD);
            }
        }
    }
}
