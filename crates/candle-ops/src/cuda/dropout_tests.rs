//! Tests that compare dropout, and attention with hidden keys and dropped weights, with the CPU.

use candle_core::{DType, Device, Tensor};

use super::tests::{TYPES, error_of, kernels, own_launches, run_on};
use crate::tests::{distance, flat, values};
use crate::{Context, SdpaOptions, dropout, scaled_dot_product_attention};

/// Result and gradients on the CPU and on the GPU, with the same random numbers from `position` on,
/// and the positions after them.
fn on_both(
    inputs: &[Tensor],
    position: u64,
    op: impl Fn(&[Tensor]) -> candle_core::Result<Tensor>,
) -> [(Vec<Tensor>, u64); 2] {
    let kernels = kernels();
    let gpu = Device::Cuda(kernels.device.clone());
    let contexts = [Context::new(7), Context::new(7).with_kernels(kernels)];
    let run = |(mut context, device): (Context, &Device)| {
        context.set_random_position(position);
        let all = context.enter(|| run_on(device, inputs, &op));
        (all, context.random_position())
    };
    let [cpu, own] = contexts;
    [run((cpu, &Device::Cpu)), run((own, &gpu))]
}

/// Launches the kernels of dropout, and of attention with bits.
pub(super) fn launch_each() {
    let inputs = [values("qkv", &[1, 2, 3, 8]).to_dtype(DType::F16).unwrap()];
    on_both(&inputs, 0, |t| {
        let mask = mask(&[3, 3]).to_device(t[0].device())?;
        let options = SdpaOptions { mask: Some(&mask), dropout: 0.5, ..Default::default() };
        dropout(&scaled_dot_product_attention(&t[0], &t[0], &t[0], options)?, 0.5)
    });
}

/// At the edges of ChaCha8's blocks of 16 words, of its counter's 32 bits, and of vectors.
#[test]
fn dropout_draws_the_words_of_the_cpu() {
    for (index, position) in [0, 5, 16, 31, (1 << 36) - 20, (1 << 40) + 3].into_iter().enumerate() {
        let count = [1, 15, 16, 17, 260, 4099][index];
        for dtype in TYPES {
            let x = values("x", &[count + 1]).to_dtype(dtype).unwrap();
            for first in [0, 1] {
                let op = |t: &[Tensor]| dropout(&t[0].narrow(0, first, count)?, 0.3);
                let [(cpu, end), (gpu, own_end)] = on_both(std::slice::from_ref(&x), position, op);
                assert_eq!((end, own_end), (position + count as u64, end));
                for (cpu, gpu) in cpu.iter().zip(&gpu) {
                    let bits = |x: &Tensor| flat(x).iter().map(|x| x.to_bits()).collect::<Vec<_>>();
                    assert_eq!(bits(cpu), bits(gpu), "{count} of {dtype:?} from {position}");
                }
            }
        }
    }
}

/// A mask of zeros and ones; the first row is all zeros.
fn mask(shape: &[usize]) -> Tensor {
    let count: usize = shape.iter().product();
    let keys = *shape.last().unwrap();
    let seen = (0..count).map(|i| u8::from(i >= keys && i * 7919 % 13 < 9));
    Tensor::from_iter(seen, &Device::Cpu).unwrap().reshape(shape).unwrap()
}

#[test]
fn attention_with_hidden_keys_and_dropped_weights_is_fused_and_the_cpus() {
    let names = ["attention_masked", "attention_backward_masked", "attention_backward_keys_masked"];
    let count = || names.map(|name| own_launches(name).unwrap_or(0));
    for (heads, kv_heads, queries, keys) in [(4, 2, 20, 33), (2, 2, 65, 130), (3, 1, 5, 7)] {
        let masks = [
            None,
            Some(mask(&[2, 1, 1, keys])),
            Some(mask(&[heads, queries, keys])),
            Some(mask(&[2, 1, queries, keys])),
            Some(mask(&[queries, 1])),
        ];
        for (mask, (dropped, causal)) in masks
            .iter()
            .flat_map(|mask| [(0.0, true), (0.3, false), (0.3, true)].map(|of| (mask, of)))
        {
            if mask.is_none() && dropped == 0.0 {
                continue;
            }
            let inputs = [
                values("q", &[2, heads, queries, 16]),
                values("k", &[2, kv_heads, keys, 16]),
                values("v", &[2, kv_heads, keys, 8]),
            ];
            let op = |t: &[Tensor]| {
                let mask = mask.as_ref().map(|mask| mask.to_device(t[0].device())).transpose()?;
                let (mask, dropout) = (mask.as_ref(), dropped);
                let options = SdpaOptions { mask, causal, dropout, ..Default::default() };
                scaled_dot_product_attention(&t[0], &t[1], &t[2], options)
            };
            let shape = mask.as_ref().map(|mask| mask.dims().to_vec());
            let what =
                format!("{heads}/{kv_heads} heads, {queries} x {keys}, {shape:?}, {dropped}");
            for dtype in [DType::F16, DType::BF16] {
                let inputs = inputs.clone().map(|t| t.to_dtype(dtype).unwrap());
                let before = count();
                let [(cpu, end), (gpu, own_end)] = on_both(&inputs, 11, op);
                let is_fake = before.iter().zip(count()).all(|(before, after)| after == before + 1);
                assert!(is_fake || own_launches("attention").is_none(), "{what}");
                assert_eq!(end, own_end, "{what}");
                for (i, (cpu, gpu)) in cpu.iter().zip(&gpu).enumerate() {
                    let apart = distance(gpu, cpu);
                    assert!(apart <= error_of(dtype), "{what}, {dtype:?}: tensor {i}: {apart}");
                }
            }
        }
    }
}
