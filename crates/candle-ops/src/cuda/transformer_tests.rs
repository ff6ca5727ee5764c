//! Tests that count a GPU's operations in a step of a transformer, on the fake GPU, and compare
//! values of its operators.

use std::sync::Arc;

use amp::Autocast;
use candle_core::{DType, Device, Result, Tensor, Var};
use proptest::prelude::*;

use super::Kernels;
use super::attention::{Masked, packed, separate};
use super::tests::{
    TYPES, assert_alike, assert_sums_alike, kernels, own_launches, run_on, with_kernels,
};
use crate::attention::Problem;
use crate::sizes::PackedSizes;
use crate::tests::{distance, flat, values};
use crate::{
    AttentionOptions, Context, SdpaOptions, add, autocast, cross_entropy, embedding,
    embedding_with_padding, gelu, layer_norm, linear, record, scaled_dot_product_attention,
    self_attention, softmax,
};

const WIDTH: usize = 16;
const LAYERS: usize = 2;

/// The variables of a layer, in the order used by [`forward`].
const LAYER: [&[usize]; 12] = [
    &[WIDTH],
    &[WIDTH],
    &[3 * WIDTH, WIDTH],
    &[3 * WIDTH],
    &[WIDTH, WIDTH],
    &[WIDTH],
    &[WIDTH],
    &[WIDTH],
    &[4 * WIDTH, WIDTH],
    &[4 * WIDTH],
    &[WIDTH, 4 * WIDTH],
    &[WIDTH],
];

/// The variables of a model: those of each layer, and of the head.
fn variables(device: &Device) -> Vec<Var> {
    let layers = (0..LAYERS).flat_map(|_| LAYER);
    let head: [&[usize]; 2] = [&[10, WIDTH], &[10]];
    let all = layers.chain(head).enumerate();
    let var = |(i, shape): (usize, &[usize])| {
        let values = values(&format!("w{i}"), shape).to_device(device).unwrap();
        Var::from_tensor(&values).unwrap()
    };
    all.map(var).collect()
}

/// A transformer like GPT and ViT: normalized inputs, and a residual stream.
fn forward(x: &Tensor, vars: &[Var]) -> Result<Tensor> {
    let (layers, head) = vars.split_at(LAYERS * LAYER.len());
    let mut x = x.clone();
    for v in layers.chunks_exact(LAYER.len()) {
        let y = linear(&layer_norm(&x, &v[0], &v[1], 1e-5)?, &v[2], Some(&v[3]))?;
        let y = self_attention(&y, AttentionOptions { heads: 2, causal: true })?;
        x = add(&x, &linear(&y, &v[4], Some(&v[5]))?)?;
        let y = gelu(&linear(&layer_norm(&x, &v[6], &v[7], 1e-5)?, &v[8], Some(&v[9]))?)?;
        x = add(&x, &linear(&y, &v[10], Some(&v[11]))?)?;
    }
    let logits = linear(&x.flatten_to(1)?, &head[0], Some(&head[1]))?;
    let labels = Tensor::new(&[3_i64, 0, 1, 2, 7, 9], x.device())?;
    cross_entropy(&logits, &labels)
}

/// The loss and all gradients, under autocast in f16, copied to the CPU.
fn step(device: &Device, kernels: Option<&Arc<Kernels>>) -> Vec<Tensor> {
    let vars = variables(device);
    let x = values("x", &[2, 3, WIDTH]).to_device(device).unwrap();
    let mut context = Context::new(0).with_autocast(Autocast::cuda());
    context.set_kernels(kernels.cloned());
    let (loss, gradients) = context.enter(|| {
        let (loss, tape) = record(|| forward(&x, &vars));
        let loss = loss.unwrap();
        let gradients = tape.backward(&loss).unwrap();
        (loss, gradients)
    });
    let gradients = vars.iter().map(|var| gradients.get(var).unwrap().clone());
    let all = std::iter::once(loss).chain(gradients);
    all.map(|t| t.to_device(&Device::Cpu).unwrap()).collect()
}

#[test]
fn a_step_under_autocast_is_the_cpus_with_few_casts() {
    let kernels = kernels();
    let device = Device::Cuda(kernels.device.clone());
    let names = ["cast_from_f32", "cast_from_f32_sums", "cast_to_f32", "badd_f32", "badd_f16"];
    let count = || names.map(own_launches);
    let before = count();
    let gpu = step(&device, Some(&kernels));
    let casts = count().into_iter().zip(before).map(|(after, before)| Some(after? - before?));
    let casts: Option<Vec<_>> = casts.collect();
    let layers = LAYERS as u64;
    // To f16: weights and biases, the head's input; gradients of the sums, with sums for biases. To
    // f32: the gradient of the head's input. PyTorch also casts results of the norms and their
    // gradients, and gradients of weights and biases. candle adds nothing: it would add the
    // gradient of a reshape to zeros.
    let wanted = [8 * layers + 2 + 1, 2 * layers, 1, 0, 0];
    assert!(casts.as_ref().is_none_or(|casts| *casts == wanted), "{casts:?}, not {wanted:?}");
    for (i, (gpu, cpu)) in gpu.iter().zip(step(&Device::Cpu, None)).enumerate() {
        assert_eq!((gpu.dtype(), gpu.dims()), (cpu.dtype(), cpu.dims()), "tensor {i}");
        let apart = distance(gpu, &cpu);
        // Sums of gradients cancel.
        assert!(apart <= 8e-2, "tensor {i} is off by {apart}");
    }
}

/// Rows in the registers of 1, 2, 4 and 8 warps, and longer ones; with and without a vector's
/// alignment.
#[test]
fn rows_of_all_lengths_are_the_cpus() {
    let kernels = kernels();
    for (rows, width) in [(19, 196), (9, 259), (7, 512), (5, 777), (4, 2048), (3, 2051)] {
        let x = values("x", &[rows, width]);
        assert_alike(&kernels, "softmax", std::slice::from_ref(&x), |t| softmax(&t[0]));
        let inputs = [x, values("gamma", &[width]), values("beta", &[width])];
        assert_sums_alike(&kernels, "layer_norm", rows, &inputs, |t| {
            layer_norm(&t[0], &t[1], &t[2], 1e-2)
        });
    }
}

#[test]
fn gradients_of_biases_over_many_rows_and_columns_are_the_cpus() {
    let kernels = kernels();
    // Many parts of the rows, several tiles of columns, with and without a vector's alignment.
    for (rows, outputs) in [(1500, 16), (700, 264), (300, 301), (65, 1)] {
        let inputs =
            [values("x", &[rows, 3]), values("weight", &[outputs, 3]), values("bias", &[outputs])];
        assert_sums_alike(&kernels, "linear", rows, &inputs, |t| linear(&t[0], &t[1], Some(&t[2])));
    }
}

/// With and without a vector's alignment; more and fewer samples than the parts of a column's sum.
#[test]
fn the_sum_of_samples_and_positions_is_the_cpus_in_one_pass() {
    let kernels = kernels();
    for (samples, positions, width) in [(3, 5, 16), (2, 9, 259), (200, 4, 9), (7, 1, 33)] {
        let whole = values("x", &[samples, positions, width]);
        for row in [&[positions, width][..], &[1, positions, width]] {
            let inputs = [whole.clone(), values("positions", row)];
            let names = ["add_rows", "column_sums"];
            for order in [[0, 1], [1, 0]] {
                let before = names.map(own_launches);
                assert_sums_alike(&kernels, "add", samples, &inputs, |t| {
                    add(&t[order[0]], &t[order[1]])
                });
                // Once per type.
                for (i, before) in before.into_iter().enumerate() {
                    let more = own_launches(names[i]).map(|after| after - before.unwrap());
                    assert!(more.is_none_or(|more| more == 3), "{}: {more:?}", names[i]);
                }
            }
        }
    }
}

/// Compares rows of a table, and their gradients, with the CPU, and asserts that this crate's
/// kernels computed them.
fn assert_rows_alike(
    ids: &Tensor,
    [rows, width]: [usize; 2],
    padding: Option<usize>,
    dtype: DType,
) {
    let kernels = kernels();
    let op = |t: &[Tensor]| {
        let ids = ids.to_device(t[0].device())?;
        match padding {
            None => embedding(&ids, &t[0]),
            Some(padding) => embedding_with_padding(&ids, &t[0], padding),
        }
    };
    let table = [values("table", &[rows, width]).to_dtype(dtype).unwrap()];
    let cpu = run_on(&Device::Cpu, &table, &op);
    let names = ["embedding", "ends_of_ids", "embedding_backward", "ia_i64_f32"];
    let before = names.map(own_launches);
    let device = Device::Cuda(kernels.device.clone());
    let gpu = with_kernels(&kernels, || run_on(&device, &table, &op));
    for (i, before) in before.into_iter().enumerate() {
        let more = own_launches(names[i]).map(|after| after - before.unwrap());
        assert!(more.is_none_or(|more| more == u64::from(i < 3)), "{}", names[i]);
    }
    for (gpu, cpu) in gpu.iter().zip(&cpu) {
        assert_eq!(flat(gpu), flat(cpu), "{rows} x {width}, {:?} of {dtype:?}", ids.shape());
    }
}

/// Rows with and without a vector's alignment; indices that occur once, twice and often, adjacent
/// and far apart; a table of positions, and one of types, whose rows are sums of thousands.
#[test]
fn rows_of_a_table_and_their_gradients_have_the_bits_of_the_cpu() {
    let cases =
        [(5, 7, 1), (40, 16, 700), (900, 264, 600), (3, 1, 301), (512, 8, 2304), (1, 300, 1100)];
    for (rows, width, count) in cases {
        let id = |i: i64| if rows == 512 { i % 512 } else { i * i % 7919 % rows as i64 };
        let ids = Tensor::from_iter((0..count).map(id), &Device::Cpu).unwrap();
        for dtype in [DType::F32, DType::F16, DType::BF16] {
            assert_rows_alike(&ids, [rows, width], None, dtype);
            let ids = ids.to_dtype(DType::U32).unwrap();
            assert_rows_alike(&ids, [rows, width], Some(rows / 2), dtype);
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 12, failure_persistence: None, ..Default::default() })]

    #[test]
    fn gradients_of_rows_that_come_often_have_the_bits_of_the_cpu(
        ids in prop::collection::vec(0_i64..30, 1..2500),
        rows in 1..=30_i64,
        width in 1..300_usize,
        padding in prop::option::of(0..30_usize),
        dtype in 0..3_usize,
    ) {
        let ids = Tensor::from_iter(ids.iter().map(|id| id % rows), &Device::Cpu).unwrap();
        let rows = rows as usize;
        let padding = padding.map(|row| row % rows);
        assert_rows_alike(&ids, [rows, width], padding, TYPES[dtype]);
    }
}

#[test]
fn the_sum_of_two_types_has_the_bits_of_the_cpu_and_casts_its_gradient_alone() {
    let kernels = kernels();
    let device = Device::Cuda(kernels.device.clone());
    for dtype in [DType::F16, DType::BF16] {
        for shape in [&[3, 7][..], &[4, 256]] {
            let (a, b) = (values("a", shape), values("b", shape).to_dtype(dtype).unwrap());
            let op = |t: &[Tensor]| add(&t[0], &t[1]);
            for inputs in [[a.clone(), b.clone()], [b, a]] {
                let cpu = run_on(&Device::Cpu, &inputs, &op);
                let count = || [own_launches("cast_from_f32"), own_launches("cast_to_f32")];
                let before = count();
                let gpu = with_kernels(&kernels, || run_on(&device, &inputs, &op));
                assert!(before[0].is_none() || count() == [before[0].map(|n| n + 1), before[1]]);
                for (gpu, cpu) in gpu.iter().zip(&cpu) {
                    assert_eq!((gpu.dtype(), flat(gpu)), (cpu.dtype(), flat(cpu)));
                }
            }
        }
    }
}

#[test]
fn half_logits_are_not_copied_to_f32_and_have_the_same_bits() {
    let kernels = kernels();
    let device = Device::Cuda(kernels.device.clone());
    for classes in [5, 257, 5000, 5003] {
        let logits =
            (values("logits", &[7, classes]) * 8.0).unwrap().to_dtype(DType::BF16).unwrap();
        let labels: Vec<_> = (0..7).map(|i| (i * 31 % classes) as u32).collect();
        let run = |cast: bool| {
            let op = |t: &[Tensor]| {
                let logits = if cast { t[0].to_dtype(DType::F32)? } else { t[0].clone() };
                let labels = Tensor::from_slice(&labels, 7, t[0].device())?;
                autocast(&Autocast::cuda(), || cross_entropy(&logits, &labels))
            };
            let names = ["cast_from_f32", "cast_to_f32", "cast_bf16_f32", "cast_f32_bf16"];
            let count = || names.map(own_launches);
            let before = count();
            let all =
                with_kernels(&kernels, || run_on(&device, std::slice::from_ref(&logits), &op));
            let is_cast = before[0].is_some() && count() != before;
            assert!(!is_cast || cast, "logits or their gradient were cast");
            all.iter().map(flat).collect::<Vec<_>>()
        };
        assert_eq!(run(false), run(true), "{classes} classes");
    }
}

/// Some heads, or some samples of one head, at a time; the backward pass recomputes the weights.
#[test]
fn attention_in_blocks_has_the_bits_of_all_at_once() {
    let kernels = kernels();
    let device = Device::Cuda(kernels.device.clone());
    let options = AttentionOptions { heads: 4, causal: true };
    let qkv = values("qkv", &[3, 7, 3 * 4 * 5]).to_dtype(DType::F16).unwrap();
    let sizes = PackedSizes::new(qkv.shape(), options).unwrap();
    // Bytes of a matrix of scores.
    let matrix = 7 * 7 * 2;
    let run = |budget: usize| {
        let before = own_launches("softmax");
        let op = |t: &[Tensor]| packed(&kernels, &t[0], sizes, Some(budget));
        let all = with_kernels(&kernels, || run_on(&device, std::slice::from_ref(&qkv), &op));
        let softmaxes = own_launches("softmax").zip(before).map(|(after, before)| after - before);
        (all.iter().map(flat).collect::<Vec<_>>(), softmaxes)
    };
    let (whole, once) = run(1 << 20);
    assert!(once.is_none_or(|n| n == 1), "{once:?}");
    for (fit, blocks) in [(1, 12), (2, 8), (3, 4), (7, 2), (11, 2), (12, 1)] {
        let (parts, softmaxes) = run(fit * matrix);
        assert_eq!(parts, whole, "{fit} matrices at a time");
        let wanted = if blocks == 1 { 1 } else { 2 * blocks };
        assert!(softmaxes.is_none_or(|n| n == wanted), "{softmaxes:?}, not {wanted}");
    }
}

#[test]
fn attention_of_separate_tensors_is_the_cpus() {
    let kernels = kernels();
    for (heads, kv_heads, queries, keys) in [(4, 4, 5, 5), (4, 2, 3, 6), (3, 1, 6, 4)] {
        for causal in [false, true] {
            let inputs = [
                values("q", &[2, heads, queries, 8]),
                values("k", &[2, kv_heads, keys, 8]),
                values("v", &[2, kv_heads, keys, 5]),
            ];
            let options = SdpaOptions { causal, ..Default::default() };
            let what = format!("{heads} heads, {kv_heads} of keys, causal: {causal}");
            assert_alike(&kernels, &what, &inputs, |t| {
                scaled_dot_product_attention(&t[0], &t[1], &t[2], options)
            });
            let f16: Vec<_> = inputs.iter().map(|t| t.to_dtype(DType::F16).unwrap()).collect();
            let device = Device::Cuda(kernels.device.clone());
            let run = |budget: usize| {
                let op = |t: &[Tensor]| {
                    let sizes = Problem::new([&t[0], &t[1], &t[2]], options)?.sizes;
                    let qkv = [&t[0], &t[1], &t[2]];
                    let y = separate(&kernels, qkv, &sizes, Masked::default(), Some(budget))?;
                    Ok(y.expect("nothing is masked"))
                };
                let all = with_kernels(&kernels, || run_on(&device, &f16, &op));
                all.iter().map(flat).collect::<Vec<_>>()
            };
            assert_eq!(run(1), run(1 << 20), "{what}");
        }
    }
}

#[test]
fn a_half_bias_is_added_before_the_product_is_rounded_by_no_kernel_of_its_own() {
    let kernels = kernels();
    let device = Device::Cuda(kernels.device.clone());
    // Near 2048 f16 has only even numbers, near 256 bf16.
    for (dtype, sum, rounded) in [(DType::F16, 2049.0, 2050.0), (DType::BF16, 257.0, 258.0)] {
        let on = |values: &[f32], shape: (usize, usize)| {
            let t = Tensor::from_slice(values, shape, &device).unwrap();
            t.to_dtype(dtype).unwrap()
        };
        let (x, weight) = (on(&[sum - 1.0, 1.0], (1, 2)), on(&[1.0; 6], (3, 2)));
        let bias = on(&[0.75, 0.0, -1.0], (1, 3)).flatten_all().unwrap();
        let count = || own_launches("add_bias");
        let before = count();
        let y = with_kernels(&kernels, || linear(&x, &weight, Some(&bias))).unwrap();
        assert_eq!(flat(&y), [rounded, sum - 1.0, sum - 1.0], "{dtype:?}");
        assert_eq!(count(), before);
    }
}

#[test]
fn casts_and_sums_have_the_bits_of_the_cpu() {
    let kernels = kernels();
    let device = Device::Cuda(kernels.device.clone());
    // Sizes around a vector and several vectors per thread, and an end that is not a whole vector.
    for count in [1, 5, 4096, 4099, 20_003] {
        let x = (values("x", &[count]) * 300.0).unwrap();
        for dtype in [DType::F16, DType::BF16] {
            let half = x.to_dtype(dtype).unwrap();
            for (x, to) in [(&x, dtype), (&half, DType::F32)] {
                let gpu = with_kernels(&kernels, || {
                    super::elementwise::cast(&kernels, &x.to_device(&device).unwrap(), to).unwrap()
                });
                assert_eq!(flat(&gpu), flat(&x.to_dtype(to).unwrap()), "{count} to {to:?}");
            }
            let op = |t: &[Tensor]| add(&t[0], &t[1]);
            let inputs = [half.clone(), half];
            let gpu = with_kernels(&kernels, || run_on(&device, &inputs, &op));
            let cpu = run_on(&Device::Cpu, &inputs, &op);
            assert!(gpu.iter().zip(&cpu).all(|(gpu, cpu)| flat(gpu) == flat(cpu)), "{count}");
        }
    }
}

/// More elements than all threads of a launch have packs: two packs at a time, one, and an end
/// that is none.
#[test]
fn sums_and_gelu_of_many_elements_are_the_cpus() {
    let kernels = kernels();
    let device = Device::Cuda(kernels.device.clone());
    let x = values("x", &[(1 << 23) + (1 << 22) + 7]).to_dtype(DType::F16).unwrap();
    type Op = fn(&[Tensor]) -> Result<Tensor>;
    let ops: [(&str, Op); 2] = [("add", |t| add(&t[0], &t[0])), ("gelu", |t| gelu(&t[0]))];
    for (what, op) in ops {
        let gpu = with_kernels(&kernels, || run_on(&device, std::slice::from_ref(&x), &op));
        for (i, (gpu, cpu)) in
            gpu.iter().zip(&run_on(&Device::Cpu, std::slice::from_ref(&x), &op)).enumerate()
        {
            let apart = distance(gpu, cpu);
            assert!(apart <= 2e-3, "{what}: tensor {i} is off by {apart}");
        }
    }
}
