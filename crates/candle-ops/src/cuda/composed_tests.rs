//! Tests that compare compositions on a GPU with the loops of the CPU. They need a GPU, or the fake
//! one of `.ci/devices`.

use candle_core::{DType, Device, Result, Tensor};

use super::tests::{error_of, kernels, run_on, with_kernels};
use crate::tests::{distance, values};
use crate::{
    CrossEntropyOptions, SdpaOptions, cross_entropy, cross_entropy_with, embedding_with_padding,
    rms_norm, rope, rope_i, scaled_dot_product_attention, silu, swiglu,
};

type Op = fn(&[Tensor]) -> Result<Tensor>;

fn labels(t: &Tensor) -> Result<Tensor> {
    Tensor::new(&[3_u32, 0, 2], t.device())
}

fn attend(t: &[Tensor], causal: bool) -> Result<Tensor> {
    let seen = (0..15).map(|i| u8::from(i % 5 == 0 || i % 3 > 0));
    let mask = Tensor::from_iter(seen, &Device::Cpu)?.reshape((3, 5))?.to_device(t[0].device())?;
    let mask = (!causal).then_some(&mask);
    let options = SdpaOptions { mask, causal, ..Default::default() };
    scaled_dot_product_attention(&t[0], &t[1], &t[2], options)
}

const TABLE: [&[usize]; 3] = [&[2, 2, 4, 6], &[5, 3], &[5, 3]];
const HEADS: [&[usize]; 3] = [&[2, 4, 3, 8], &[2, 2, 5, 8], &[2, 2, 5, 4]];

/// Each operator, and the shapes of its inputs.
const CASES: &[(&str, &[&[usize]], Op)] = &[
    ("rms_norm", &[&[4, 6], &[6]], |t| rms_norm(&t[0], &t[1], 1e-5)),
    ("silu", &[&[3, 7]], |t| silu(&t[0])),
    ("swiglu", &[&[3, 7], &[3, 7]], |t| swiglu(&t[0], &t[1])),
    ("rope", &TABLE, |t| rope(&t[0], &t[1], &t[2])),
    ("rope_i", &TABLE, |t| rope_i(&t[0], &t[1], &t[2])),
    ("attention, causal", &HEADS, |t| attend(t, true)),
    ("attention with a mask", &HEADS, |t| attend(t, false)),
    ("cross_entropy of u32 labels", &[&[3, 4]], |t| cross_entropy(&t[0], &labels(&t[0])?)),
    ("cross_entropy_with", &[&[3, 4]], |t| {
        let weight = Tensor::new(&[0.5_f32, 1.0, 2.0, 1.0], t[0].device())?;
        let options = CrossEntropyOptions {
            weight: Some(&weight),
            ignore_index: Some(0),
            label_smoothing: 0.1,
        };
        cross_entropy_with(&t[0], &labels(&t[0])?, options)
    }),
    ("embedding of a transposed table", &[&[3, 5]], |t| {
        embedding_with_padding(&labels(&t[0])?, &t[0].t()?, 2)
    }),
    ("embedding_with_padding", &[&[5, 3]], |t| embedding_with_padding(&labels(&t[0])?, &t[0], 2)),
];

#[test]
fn compositions_are_the_cpus() {
    let kernels = kernels();
    let device = Device::Cuda(kernels.device.clone());
    for (what, shapes, op) in CASES {
        for dtype in [DType::F32, DType::BF16] {
            let input = |(i, shape): (usize, &&[usize])| values(&format!("x{i}"), shape);
            let inputs: Vec<_> = shapes.iter().enumerate().map(input).collect();
            let inputs: Vec<_> = inputs.iter().map(|t| t.to_dtype(dtype).unwrap()).collect();
            let cpu = run_on(&Device::Cpu, &inputs, op);
            let without = run_on(&device, &inputs, op);
            let with = with_kernels(&kernels, || run_on(&device, &inputs, op));
            for gpu in [without, with] {
                assert_eq!(cpu.len(), gpu.len(), "{what}: gradients");
                for (i, (gpu, cpu)) in gpu.iter().zip(&cpu).enumerate() {
                    assert_eq!(gpu.dtype(), cpu.dtype(), "{what}: tensor {i}");
                    let apart = distance(gpu, cpu);
                    assert!(apart <= error_of(dtype), "{what}, {dtype:?}: tensor {i}: {apart}");
                }
            }
        }
    }
}
