//! The tensors for optimizer benchmarks, and a step on them.

use fused_optim::{Applied, Optimizer, ParamMut, Slice, SliceMut, StepCtl};

/// Element counts of ResNet-50's weights in order: 53 convolutions, each with a batch norm's scale
/// and shift, and the classifier's weight and bias. 161 tensors, 25.6 M elements.
#[must_use]
pub fn resnet50() -> Vec<usize> {
    let mut counts = Vec::new();
    let mut conv = |inputs: usize, outputs: usize, kernel: usize| {
        counts.extend([inputs * outputs * kernel * kernel, outputs, outputs]);
    };
    conv(3, 64, 7);
    let mut inputs = 64;
    for (blocks, width) in [(3, 64), (4, 128), (6, 256), (3, 512)] {
        for block in 0..blocks {
            conv(inputs, width, 1);
            conv(width, width, 3);
            conv(width, 4 * width, 1);
            if block == 0 {
                conv(inputs, 4 * width, 1);
            }
            inputs = 4 * width;
        }
    }
    counts.extend([2048 * 1000, 1000]);
    counts
}

/// Element counts of a transformer's weights: 12 layers of width 768, a vocabulary of 30,522 and
/// 512 positions. 148 tensors, 109 M elements.
#[must_use]
pub fn transformer() -> Vec<usize> {
    const WIDTH: usize = 768;
    let mut counts = vec![30_522 * WIDTH, 512 * WIDTH];
    for _ in 0..12 {
        // Layer norm, QKV, output projection, layer norm, and the two layers of the MLP.
        counts.extend([WIDTH, WIDTH]);
        counts.extend([WIDTH * 3 * WIDTH, 3 * WIDTH, WIDTH * WIDTH, WIDTH]);
        counts.extend([WIDTH, WIDTH]);
        counts.extend([WIDTH * 4 * WIDTH, 4 * WIDTH, 4 * WIDTH * WIDTH, WIDTH]);
    }
    counts.extend([WIDTH, WIDTH]);
    counts
}

/// Tensors with arbitrary values, none of them zero or subnormal.
#[must_use]
pub fn tensors(counts: &[usize]) -> Vec<Vec<f32>> {
    let value = |i: usize| ((i * 7919) % 1000) as f32 / 1000.0 - 0.4995;
    counts.iter().map(|&count| (0..count).map(value).collect()).collect()
}

/// Runs one step on f32 weights and gradients, as matrices.
///
/// # Panics
///
/// If the step fails or is skipped.
pub fn step(
    optimizer: &mut dyn Optimizer,
    weights: &mut [Vec<f32>],
    grads: &[Vec<f32>],
    ctl: &StepCtl,
) {
    let mut params: Vec<_> = (weights.iter_mut().zip(grads))
        .map(|(w, g)| {
            // AdamP's channels have 512 elements, or the whole tensor.
            let rows = if w.len() % 512 == 0 { w.len() / 512 } else { 1 };
            let shape = [rows, w.len() / rows];
            ParamMut::new(SliceMut::F32(w), Some(Slice::F32(g))).with_shape(&shape)
        })
        .collect();
    let applied = optimizer.step(&mut params, ctl).expect("valid tensors");
    assert_eq!(applied, Applied::Applied);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn models_have_the_documented_sizes() {
        let size = |counts: &[usize]| (counts.len(), counts.iter().sum::<usize>());
        assert_eq!(size(&resnet50()), (161, 25_557_032));
        assert_eq!(size(&transformer()), (148, 108_890_112));
    }
}
