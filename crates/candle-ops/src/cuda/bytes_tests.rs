//! Tests of the bytes that kernels read and write, by the counts of the fake GPU; and that kernels
//! which save bytes have the bits of those that they replace.

use std::sync::Arc;

use amp::Autocast;
use candle_core::{DType, Device, Result, Tensor, Var};

use super::Kernels;
use super::tests::{TYPES, assert_alike, kernels, of_the_fake, run_on, with_kernels};
use crate::tests::{flat, values};
use crate::{
    BatchNormOptions, Statistics, add, autocast, batch_norm, batch_norm_with, cross_entropy, gelu,
    layer_norm, linear, record, relu,
};

/// Bytes that a kernel, launched by this thread, has read and written, each once per launch; `None`
/// on a real GPU. Waits for the launches.
pub(super) fn own_bytes(kernels: &Kernels, kernel: &str) -> Option<[u64; 2]> {
    type Prototype = unsafe extern "C" fn(*const libc::c_char, libc::c_int) -> u64;
    let function = of_the_fake(c"fake_gpu_moved")?;
    kernels.device.cuda_stream().synchronize().unwrap();
    let name = std::ffi::CString::new(kernel).unwrap();
    // SAFETY: that is the prototype of the function of this name.
    let moved: Prototype = unsafe { std::mem::transmute(function) };
    // SAFETY: a C string and a number.
    Some([0, 1].map(|written| unsafe { moved(name.as_ptr(), written) }))
}

/// Asserts the bytes that each of these kernels reads and writes in `call`.
pub(super) fn assert_bytes<R>(
    kernels: &Kernels,
    wanted: &[(&str, [usize; 2])],
    call: impl FnOnce() -> R,
) -> R {
    let count = || wanted.iter().map(|(name, _)| own_bytes(kernels, name)).collect::<Vec<_>>();
    let before = count();
    let result = call();
    for (i, after) in count().into_iter().enumerate() {
        let Some((after, before)) = after.zip(before[i]) else { break };
        let (name, wanted) = wanted[i];
        let moved = [0, 1].map(|i| after[i] - before[i]);
        assert_eq!(moved, wanted.map(|bytes| bytes as u64), "{name}");
    }
    result
}

/// The bits of all tensors; those of NaN in any form are equal.
pub(super) fn bits(tensors: &[Tensor]) -> Vec<Vec<u32>> {
    let of = |x: f32| if x.is_nan() { f32::NAN.to_bits() } else { x.to_bits() };
    tensors.iter().map(|t| flat(t).into_iter().map(of).collect()).collect()
}

#[test]
fn elementwise_kernels_move_each_tensor_once() {
    let kernels = kernels();
    let device = Device::Cuda(kernels.device.clone());
    for (dtype, size) in [(DType::F32, 4), (DType::F16, 2)] {
        let n = 4099;
        let inputs = [values("a", &[n]), values("b", &[n])].map(|t| t.to_dtype(dtype).unwrap());
        let wanted = [
            ("add", [2 * n * size, n * size]),
            ("relu", [n * size; 2]),
            ("relu_backward", [2 * n * size, n * size]),
        ];
        assert_bytes(&kernels, &wanted, || {
            let op = |t: &[Tensor]| relu(&add(&t[0], &t[1])?);
            with_kernels(&kernels, || run_on(&device, &inputs, &op))
        });
    }
}

/// The results of `op` and its gradients on a tape, by f32 variables and a gradient of ones.
fn on_tape(
    kernels: &Arc<Kernels>,
    inputs: &[Tensor],
    op: impl Fn(&[Tensor]) -> Result<Tensor>,
) -> Vec<Tensor> {
    let device = Device::Cuda(kernels.device.clone());
    let vars: Vec<_> =
        inputs.iter().map(|t| Var::from_tensor(&t.to_device(&device).unwrap()).unwrap()).collect();
    let tensors: Vec<_> = vars.iter().map(|var| var.as_tensor().clone()).collect();
    with_kernels(kernels, || {
        let (y, tape) = record(|| op(&tensors));
        let y = y.unwrap();
        let gradients = tape.backward(&y).unwrap();
        let gradients = vars.iter().map(|var| gradients.get(var).unwrap().clone());
        std::iter::once(y.detach()).chain(gradients).collect()
    })
}

/// Layer norm with what autocast casts for the next product: as one kernel, and as a norm in f32
/// and casts. Rows that 1, 2, 4 and 8 warps hold, and longer ones; the result used once, by two
/// products, by a sum in f32, and by operators of candle's.
#[test]
fn layer_norms_under_autocast_write_halves_and_have_the_bits_of_casts() {
    let kernels = kernels();
    let sizes = [(19, 196), (9, 259), (7, 512), (5, 777), (4, 2048), (3, 2051)];
    for (i, (rows, width)) in sizes.into_iter().enumerate() {
        let policy = Autocast::cuda();
        let policy = if i % 2 == 0 { policy.with_f16() } else { policy.with_bf16() };
        let mut x = flat(&values("x", &[rows, width]));
        if rows == 9 {
            // Rows of NaN.
            (x[0], x[width]) = (f32::NAN, f32::INFINITY);
        }
        let x = Tensor::from_vec(x, (rows, width), &Device::Cpu).unwrap();
        let weight = values("weight", &[width, width]);
        let inputs = [x, values("gamma", &[width]), values("beta", &[width]), weight];
        for uses in 0..4 {
            let run = |is_fused: bool| {
                on_tape(&kernels, &inputs, |t| {
                    let norm = || layer_norm(&t[0], &t[1], &t[2], 1e-5);
                    let y = if is_fused { autocast(&policy, norm)? } else { norm()? };
                    let product = || autocast(&policy, || linear(&y, &t[3], None));
                    match uses {
                        0 => product(),
                        1 => add(&product()?, &gelu(&product()?)?),
                        2 => add(&product()?, &y),
                        _ => add(&product()?, &(y.t()? * 2.0)?.t()?),
                    }
                })
            };
            assert_eq!(bits(&run(true)), bits(&run(false)), "{rows} x {width}, {uses}");
        }
    }
}

#[test]
fn layer_norms_under_autocast_move_no_bytes_for_casts() {
    let kernels = kernels();
    let (rows, width) = (70, 256);
    let n = rows * width;
    let inputs = [&[rows, width][..], &[width], &[width], &[width, width]];
    let inputs: Vec<_> = inputs.iter().map(|shape| values("x", shape)).collect();
    let parameters = [4 * width, 8 * rows];
    let wanted = [
        // With the weight alone cast.
        ("cast_from_f32", [4 * width * width, 2 * width * width]),
        ("cast_to_f32", [0, 0]),
        ("layer_norm_wide", [4 * n + 2 * parameters[0], 6 * n + parameters[1]]),
        ("layer_norm_wide_backward", [6 * n + parameters[0] + parameters[1], 4 * n]),
    ];
    assert_bytes(&kernels, &wanted, || {
        on_tape(&kernels, &inputs, |t| {
            autocast(&Autocast::cuda(), || {
                linear(&layer_norm(&t[0], &t[1], &t[2], 1e-5)?, &t[3], None)
            })
        })
    });
}

/// The same images, channels-last, in the graph.
fn last(x: &Tensor) -> Result<Tensor> {
    x.permute((0, 2, 3, 1))?.contiguous()?.permute((0, 3, 1, 2))
}

/// A norm of channels-last images and its ReLU, which keeps a bit of each element, beside a ReLU of
/// its own, which reads its result: channels in packs of each type, and others.
#[test]
fn norms_with_a_relu_have_the_bits_of_norms_and_relus() {
    let kernels = kernels();
    let device = Device::Cuda(kernels.device.clone());
    for (i, channels) in [8, 24, 72, 12, 13].into_iter().enumerate() {
        let mut x = flat(&values("x", &[3, channels, 5, 7]));
        // The first image's channels begin with what a ReLU may get; the smallest number of f16
        // becomes 0 by a weight below 1/2.
        let special = [0.0, -0.0, 6e-8, -6e-8, f32::INFINITY, f32::NEG_INFINITY, f32::NAN];
        if i % 2 == 0 {
            x.iter_mut().zip(special).for_each(|(x, special)| *x = special);
        }
        let x = Tensor::from_vec(x, (3, channels, 5, 7), &Device::Cpu).unwrap();
        let parameters = [(values("gamma", &[channels]) * 0.1).unwrap(), values("b", &[channels])];
        for dtype in TYPES {
            let inputs = [x.clone(), parameters[0].clone(), (&parameters[1] * 0.0).unwrap()];
            let inputs = inputs.map(|t| t.to_dtype(dtype).unwrap());
            for given in [false, true] {
                let run = |is_fused: bool| {
                    let options = BatchNormOptions { eps: 1e-5, relu: is_fused };
                    let op = |t: &[Tensor]| {
                        let zeros = Tensor::zeros(channels, DType::F32, &device)?;
                        let of = Statistics { mean: zeros.clone(), var: (zeros + 1.0)? };
                        let x = last(&t[0])?;
                        let y = match given {
                            true => batch_norm_with(&x, &t[1], &t[2], &of, options)?,
                            false => batch_norm(&x, &t[1], &t[2], options)?.0,
                        };
                        if is_fused { Ok(y) } else { relu(&y) }
                    };
                    with_kernels(&kernels, || run_on(&device, &inputs, &op))
                };
                assert_eq!(bits(&run(true)), bits(&run(false)), "{channels} in {dtype:?}");
            }
        }
    }
}

#[test]
fn norms_read_a_bit_of_each_relu_backward() {
    let kernels = kernels();
    let device = Device::Cuda(kernels.device.clone());
    let (images, channels, side) = (2, 64, 16);
    let n = images * channels * side * side;
    let inputs = [&[images, channels, side, side][..], &[channels], &[channels]];
    let inputs = inputs.map(|shape| values("x", shape));
    // In f32 a byte is that of four elements.
    for (dtype, size, packs) in [(DType::F16, 2, n / 8), (DType::F32, 4, n / 4)] {
        let inputs = inputs.clone().map(|t| t.to_dtype(dtype).unwrap());
        let wanted = [
            // Besides parameters and statistics of each channel.
            ("normalize_last", [n * size + 4 * 4 * channels, n * size + packs]),
            ("norm_sums_last", [2 * n * size + packs + 4 * channels, 0]),
            ("norm_backward_last", [2 * n * size + packs + 5 * 4 * channels, n * size]),
        ];
        let options = BatchNormOptions { eps: 1e-5, relu: true };
        assert_bytes(&kernels, &wanted, || {
            let op = |t: &[Tensor]| Ok(batch_norm(&last(&t[0])?, &t[1], &t[2], options)?.0);
            with_kernels(&kernels, || run_on(&device, &inputs, &op))
        });
    }
}

/// Two blocks of a transformer: gradients of biases by sums that the backward passes of GELU and of
/// the residual sums leave, and, where a reshape lies between, by reading the gradients again. With
/// one part of the rows and several, one tile of columns and several, and rows not in packs.
#[test]
fn sums_left_for_biases_have_the_bits_of_sums_of_columns() {
    let kernels = kernels();
    for (rows, width, hidden) in [(5, 8, 24), (700, 16, 264), (150, 264, 40), (70, 8, 301)] {
        let shapes = [&[rows, width][..], &[hidden, width], &[hidden], &[width, hidden], &[width]];
        let mut inputs: Vec<_> = shapes.iter().map(|shape| values("x", shape)).collect();
        inputs[0] = (&inputs[0] * 3.0).unwrap();
        for policy in [Autocast::cuda().with_f16(), Autocast::cuda().with_bf16()] {
            let run = |is_left: bool| {
                let through = |t: Tensor| if is_left { Ok(t) } else { t.unsqueeze(0)?.squeeze(0) };
                let block = |x: &Tensor, t: &[Tensor]| {
                    let y = gelu(&through(linear(x, &t[1], Some(&t[2]))?)?)?;
                    add(x, &through(linear(&y, &t[3], Some(&t[4]))?)?)
                };
                on_tape(&kernels, &inputs, |t| autocast(&policy, || block(&block(&t[0], t)?, t)))
            };
            // The last sum's gradient of a width of packs, and that of GELU.
            let reads = if hidden % 8 == 0 { 0 } else { 2 * 2 * rows * hidden };
            let left = assert_bytes(&kernels, &[("column_sums", [reads, 0])], || run(true));
            let reads = 2 * 2 * rows * (hidden + width);
            let read = assert_bytes(&kernels, &[("column_sums", [reads, 0])], || run(false));
            assert_eq!(bits(&left), bits(&read), "{rows} x {width}, {hidden}, {policy:?}");
        }
    }
}

/// The gradient of long rows: written backward off a tape, and on a tape if the gradient of the
/// loss has changed; else written forward, with the same bits.
#[test]
fn gradients_of_losses_are_written_forward_if_they_are_guessed() {
    for (rows, classes) in [(7, 2048), (300, 2056), (3, 20_000)] {
        let labels: Vec<_> = (0..rows).map(|i| (i * 31 % classes) as i64).collect();
        let logits = (values("logits", &[rows, classes]) * 4.0).unwrap();
        let loss =
            |t: &[Tensor]| cross_entropy(&t[0], &Tensor::from_slice(&labels, rows, t[0].device())?);
        assert_alike(&kernels(), "cross_entropy", std::slice::from_ref(&logits), loss);
        let kernels = kernels();
        for (dtype, size) in [(DType::F32, 4), (DType::BF16, 2)] {
            let logits = [logits.to_dtype(dtype).unwrap()];
            let n = rows * classes * size;
            let computed = [n + 12 * rows + 8, n + 4];
            // Each changes the next one's guess.
            for (factor, backward) in
                [(1.0, [8, 0]), (3.0, computed), (3.0, [8, 0]), (1.0, computed)]
            {
                let wanted = [
                    ("cross_entropy_wide", [n + 4 * rows + 4, n + 8 * rows + 8]),
                    ("cross_entropy_wide_backward", backward),
                ];
                let op = |t: &[Tensor]| loss(t)? * factor;
                let found = assert_bytes(&kernels, &wanted, || on_tape(&kernels, &logits, op));
                let device = Device::Cuda(kernels.device.clone());
                let x = Var::from_tensor(&logits[0].to_device(&device).unwrap()).unwrap();
                let gradient = with_kernels(&kernels, || {
                    let gradients = op(&[x.as_tensor().clone()]).unwrap().backward().unwrap();
                    gradients.get(&x).unwrap().clone()
                });
                // Off the tape a gradient is written backward, and becomes the guess.
                assert_eq!(bits(&found[1..]), bits(&[gradient]), "{rows} x {classes}, {dtype:?}");
            }
        }
    }
}
