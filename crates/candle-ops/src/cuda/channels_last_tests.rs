//! Tests that compare operators on channels-last images with the CPU.

use std::sync::Arc;

use candle_core::{DType, Device, Result, Tensor, Var};
use proptest::prelude::*;

use super::Kernels;
use super::channels_last::Order;
use super::tests::{
    assert_alike, assert_sums_alike, error_of, kernels, own_launches, with_kernels,
};
use crate::sizes::Running;
use crate::tests::{distance, flat, values};
use crate::{
    BatchNormOptions, ConvOptions, Statistics, Window, add, add_relu, batch_norm, conv2d,
    cross_entropy, global_avg_pool, linear, max_pool2d, nn, record, relu, upsample_bilinear2d,
    upsample_nearest2d,
};

/// The same images, channels-last, in the graph.
fn last(x: &Tensor) -> Result<Tensor> {
    x.permute((0, 2, 3, 1))?.contiguous()?.permute((0, 3, 1, 2))
}

/// Whether the tensor is channels-last, on a GPU.
fn lies_last(x: &Tensor) -> bool {
    x.device().is_cpu() || Order::of(x) == Order::Last
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 12, failure_persistence: None, ..Default::default() })]

    #[test]
    fn operators_are_the_cpus(
        (images, packs, more) in (2_usize..4, 0_usize..3, 0_usize..4),
        (height, width) in (1_usize..9, 2_usize..20),
        (kernel, stride, padding) in (1_usize..4, 1_usize..4, 0_usize..2),
        fuses_relu: bool,
    ) {
        let kernels = kernels();
        // Vectors of eight halves, of four floats, and other sizes.
        let channels = (8 * packs + more).max(2);
        let x = values("x", &[images, channels, height, width]);
        let other = values("other", &[images, channels, height, width]);
        let one = std::slice::from_ref(&x);
        assert_alike(&kernels, "relu", one, |t| {
            let y = relu(&last(&t[0])?)?;
            assert!(lies_last(&y));
            Ok(y)
        });
        for (a, b) in [(true, true), (true, false), (false, true)] {
            let of = |x: &Tensor, is: bool| if is { last(x) } else { Ok(x.clone()) };
            assert_alike(&kernels, "add_relu", &[x.clone(), other.clone()], |t| {
                let y = add_relu(&of(&t[0], a)?, &of(&t[1], b)?)?;
                assert!(lies_last(&y));
                Ok(y)
            });
        }
        assert_alike(&kernels, "add", &[x.clone(), other.clone()], |t| {
            let y = add(&last(&t[0])?, &last(&t[1])?)?;
            assert!(lies_last(&y));
            Ok(y)
        });
        let kernel = kernel.min(height).min(width);
        let window = Window { stride, padding: padding.min(kernel / 2) };
        assert_alike(&kernels, "max_pool2d", one, |t| max_pool2d(&last(&t[0])?, kernel, window));
        assert_alike(&kernels, "global_avg_pool", one, |t| global_avg_pool(&last(&t[0])?));
        assert_alike(&kernels, "upsample_nearest2d", one, |t| {
            relu(&last(&upsample_nearest2d(&last(&t[0])?, 2 * height, 5)?)?)
        });
        assert_alike(&kernels, "upsample_bilinear2d", one, |t| {
            upsample_bilinear2d(&last(&t[0])?, 2 * height, 5, false)
        });
        let inputs =
            [(x * 2.0).unwrap(), values("gamma", &[channels]), values("beta", &[channels])];
        let options = BatchNormOptions { eps: 1e-3, relu: fuses_relu };
        assert_sums_alike(&kernels, "batch_norm", images * height * width, &inputs, |t| {
            let (y, _) = batch_norm(&last(&t[0])?, &t[1], &t[2], options)?;
            assert!(lies_last(&y));
            Ok(y)
        });
    }
}

#[test]
fn statistics_far_from_zero_of_many_channels_are_the_cpus() {
    let kernels = kernels();
    let device = Device::Cuda(kernels.device.clone());
    // More vectors than threads, parts with few rows; and one channel more than a multiple of a
    // vector.
    for (shape, mean) in [([2, 2056, 3, 2], 1000.0), ([3, 5, 90, 90], -300.0)] {
        let x = values("x", &shape).affine(1.0, mean).unwrap();
        let ones = Tensor::ones(shape[1], DType::F32, &Device::Cpu).unwrap();
        let options = BatchNormOptions { eps: 1e-5, relu: false };
        let measure = |device: &Device| {
            let [x, ones] = [&x, &ones].map(|t| t.to_device(device).unwrap());
            let (y, of) = batch_norm(&last(&x).unwrap(), &ones, &ones, options).unwrap();
            [y, of.mean, of.var].map(|t| t.to_device(&Device::Cpu).unwrap())
        };
        let gpu = with_kernels(&kernels, || measure(&device));
        for (i, (gpu, cpu)) in gpu.iter().zip(&measure(&Device::Cpu)).enumerate() {
            let apart = distance(gpu, cpu);
            assert!(apart < if i == 0 { 2e-3 } else { 1e-5 }, "{shape:?}, {i}: {apart}");
        }
    }
}

/// A stem and two residual blocks, as in `ResNet`: the second one downsamples.
fn network(t: &[Tensor], bias: bool) -> Result<Tensor> {
    let options = BatchNormOptions { eps: 1e-5, relu: true };
    let plain = BatchNormOptions { relu: false, ..options };
    let same = ConvOptions { padding: 1, ..ConvOptions::default() };
    let half = ConvOptions { stride: 2, ..same };
    let bias = bias.then_some(&t[5]);
    let norm =
        |x: &Tensor, options| Ok::<_, candle_core::Error>(batch_norm(x, &t[5], &t[5], options)?.0);
    let x = norm(&conv2d(&t[0], &t[1], bias, same)?, options)?;
    let x = max_pool2d(&x, 3, Window { stride: 1, padding: 1 })?;
    let y = norm(&conv2d(&x, &t[2], bias, same)?, plain)?;
    let x = add_relu(&y, &x)?;
    let y = norm(&conv2d(&x, &t[3], bias, half)?, plain)?;
    let shortcut =
        norm(&conv2d(&x, &t[4], bias, ConvOptions { stride: 2, ..Default::default() })?, plain)?;
    // Includes candle's operators.
    let x = add_relu(&y, &shortcut)?;
    let parts = x.sqr()?.flatten_from(1)?.narrow(1, 3, 8)?;
    linear(&(global_avg_pool(&x)? + parts)?, &t[6], None)
}

fn network_inputs(dtype: DType) -> Vec<Tensor> {
    let shapes: [&[usize]; 7] =
        [&[3, 3, 8, 8], &[8, 3, 3, 3], &[8, 8, 3, 3], &[8, 8, 3, 3], &[8, 8, 1, 1], &[8], &[4, 8]];
    let inputs = shapes.iter().enumerate().map(|(i, shape)| values(&format!("x{i}"), shape));
    inputs.map(|t| t.to_dtype(dtype).unwrap()).collect()
}

/// The loss and the gradients by a tape, copied to the CPU.
fn by_tape(device: &Device, inputs: &[Tensor], bias: bool) -> Vec<Tensor> {
    // Images need no gradient.
    let images = inputs[0].to_device(device).unwrap();
    let vars: Vec<_> = inputs[1..]
        .iter()
        .map(|t| Var::from_tensor(&t.to_device(device).unwrap()).unwrap())
        .collect();
    let all: Vec<_> =
        std::iter::once(images).chain(vars.iter().map(|v| v.as_tensor().clone())).collect();
    let labels = Tensor::new(&[1_i64, 0, 3], device).unwrap();
    let (loss, tape) = record(|| cross_entropy(&network(&all, bias)?, &labels));
    let loss = loss.unwrap();
    let gradients = tape.backward(&loss).unwrap();
    let gradients = vars.iter().map(|var| gradients.get(var).unwrap().clone());
    let all = std::iter::once(loss.detach()).chain(gradients);
    all.map(|t| t.to_device(&Device::Cpu).unwrap()).collect()
}

fn assert_near(gpu: &[Tensor], cpu: &[Tensor], within: f64, what: &str) {
    for (i, (gpu, cpu)) in gpu.iter().zip(cpu).enumerate() {
        assert_eq!((gpu.dtype(), gpu.dims()), (cpu.dtype(), cpu.dims()), "{what}: tensor {i}");
        assert!(gpu.is_contiguous(), "{what}: tensor {i}");
        assert!(distance(gpu, cpu) <= within, "{what}: tensor {i}: {}", distance(gpu, cpu));
    }
}

#[test]
fn a_network_is_the_cpus_on_a_tape_and_in_candles_graph() {
    let kernels = kernels();
    let device = Device::Cuda(kernels.device.clone());
    for (dtype, bias) in [(DType::F16, false), (DType::F16, true), (DType::BF16, false)] {
        let inputs = network_inputs(dtype);
        // Compared with f32: half-precision results differ by rounding.
        let wide: Vec<_> = inputs.iter().map(|t| t.to_dtype(DType::F32).unwrap()).collect();
        let cpu: Vec<_> = by_tape(&Device::Cpu, &wide, bias);
        let cpu: Vec<_> = cpu
            .iter()
            .enumerate()
            .map(|(i, t)| if i == 0 { t.clone() } else { t.to_dtype(dtype).unwrap() })
            .collect();
        let gpu = with_kernels(&kernels, || by_tape(&device, &inputs, bias));
        assert_near(&gpu, &cpu, 12.0 * error_of(dtype), &format!("{dtype:?}, bias {bias}"));
        assert_alike_in_graph(&kernels, &inputs, bias, &gpu);
    }
}

/// Asserts bitwise the same results in candle's graph as on the tape, except where candle adds
/// gradients.
fn assert_alike_in_graph(kernels: &Arc<Kernels>, inputs: &[Tensor], bias: bool, tape: &[Tensor]) {
    let device = Device::Cuda(kernels.device.clone());
    let labels = Tensor::new(&[1_i64, 0, 3], &device).unwrap();
    let vars: Vec<_> =
        inputs.iter().map(|t| Var::from_tensor(&t.to_device(&device).unwrap()).unwrap()).collect();
    let all: Vec<_> = vars.iter().map(|v| v.as_tensor().clone()).collect();
    let gradients =
        with_kernels(kernels, || cross_entropy(&network(&all, bias)?, &labels)?.backward())
            .unwrap();
    let found: Vec<_> = vars[1..]
        .iter()
        .map(|var| gradients.get(var).unwrap().to_device(&Device::Cpu).unwrap())
        .collect();
    assert_near(&found, &tape[1..], error_of(inputs[0].dtype()), "in candle's graph");
}

#[test]
fn moving_statistics_have_the_bits_of_the_cpu() {
    let kernels = kernels();
    let device = Device::Cuda(kernels.device.clone());
    for channels in [1, 64, 300] {
        let run = |device: &Device| {
            let on = |name: &str| values(name, &[channels]).to_device(device).unwrap();
            let running = Statistics { mean: on("mean"), var: on("var") };
            let batch = Statistics { mean: on("batch mean"), var: on("batch var") };
            Running { of: &running, momentum: 0.3, factor: 1.25 }.track(&batch).unwrap();
            [running.mean, running.var].map(|t| flat(&t))
        };
        let before = own_launches("track");
        assert_eq!(with_kernels(&kernels, || run(&device)), run(&Device::Cpu), "{channels}");
        assert!(own_launches("track") == before.map(|n| n + 1));
    }
}

#[test]
fn norms_update_moving_statistics_where_they_fold_the_batchs() {
    let kernels = kernels();
    let device = Device::Cuda(kernels.device.clone());
    for channels in [8, 24, 301] {
        let on = |name: &str, shape: &[usize]| values(name, shape).to_device(&device).unwrap();
        let x = last(&on("x", &[3, channels, 9, 20])).unwrap();
        let [gamma, beta] = ["gamma", "beta"].map(|name| on(name, &[channels]));
        let started = || [on("mean", &[channels]), on("var", &[channels])];
        with_kernels(&kernels, || {
            let [mean, var] = started();
            let (m, v) = (mean.clone(), var.clone());
            let (weight, bias) = (gamma.clone(), beta.clone());
            let layer = nn::BatchNorm::new_with_momentum(channels, m, v, weight, bias, 1e-5, 0.3);
            let before = own_launches("track");
            layer.unwrap().forward_train(&x).unwrap();
            assert_eq!(own_launches("track"), before);

            let [old_mean, old_var] = started();
            let running = Statistics { mean: old_mean, var: old_var };
            let options = BatchNormOptions { eps: 1e-5, relu: false };
            let (_, batch) = batch_norm(&x, &gamma, &beta, options).unwrap();
            let factor = 540.0 / 539.0;
            Running { of: &running, momentum: 0.3, factor }.track(&batch).unwrap();
            assert_eq!(flat(&mean), flat(&running.mean), "{channels}");
            assert_eq!(flat(&var), flat(&running.var), "{channels}");
        });
    }
}

/// Several turns of each thread's loop, and an end that is none.
#[test]
fn norms_of_many_rows_are_the_cpus() {
    let kernels = kernels();
    let inputs = [values("x", &[4, 64, 96, 131]), values("gamma", &[64]), values("beta", &[64])];
    for relu in [false, true] {
        let options = BatchNormOptions { eps: 1e-3, relu };
        assert_sums_alike(&kernels, "batch_norm", 4 * 96 * 131, &inputs, |t| {
            Ok(batch_norm(&last(&t[0])?, &t[1], &t[2], options)?.0)
        });
    }
}
