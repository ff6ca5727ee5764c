//! Tests that compare each kernel, forward and backward, with the operators of the CPU. They need a
//! GPU, or the fake one of `.ci/devices`.

use std::sync::Arc;

use candle_core::{DType, Device, Result, Shape, Tensor, Var};
use proptest::prelude::*;

use super::conv::{Conv, Convolve as _};
use super::cudnn_tests::without_cudnn;
use super::{KERNELS, Kernels};
use crate::graph::device::kernels as of;
use crate::linear::weighted::Kernel;
use crate::sizes::Geometry;
use crate::tests::{distance, distance_within, flat, values};
use crate::{
    AttentionOptions, BatchNormOptions, Context, Error, Normalization, Statistics, Window, add,
    add_relu, autocast, batch_norm, batch_norm_with, conv2d, cross_entropy, embedding, gelu,
    global_avg_pool, layer_norm, linear, max_pool2d, nn, normalize, record, relu, self_attention,
    softmax,
};

/// The kernels on the GPU, or on the fake one.
pub(crate) fn kernels() -> Arc<Kernels> {
    // While another thread of a library captures, the driver refuses to create parts of a context.
    let kernels = || {
        let device = Device::new_cuda_with_stream(0)?;
        Kernels::new(device.as_cuda_device()?)
    };
    let is_capturing = |error: &Error| error.to_string().contains("CUDA_ERROR_STREAM_CAPTURE");
    let mut made = kernels();
    for _ in 0..100 {
        if !made.as_ref().is_err_and(is_capturing) {
            break;
        }
        std::thread::sleep(std::time::Duration::from_millis(50));
        made = kernels();
    }
    Arc::new(made.unwrap())
}

/// Runs `call` with these kernels instead of compositions.
pub(crate) fn with_kernels<R>(kernels: &Arc<Kernels>, call: impl FnOnce() -> R) -> R {
    Context::new(0).with_kernels(kernels.clone()).enter(call)
}

/// Number of launched blocks of a kernel; `None` on a real GPU.
fn launches(kernel: &str) -> Option<i32> {
    type Prototype = unsafe extern "C" fn(*const libc::c_char, libc::c_int) -> libc::c_int;
    let function = of_the_fake(c"fake_calls")?;
    let name = std::ffi::CString::new(kernel).unwrap();
    // SAFETY: that is the prototype of the function of this name.
    let calls: Prototype = unsafe { std::mem::transmute(function) };
    // SAFETY: a C string and a number.
    Some(unsafe { calls(name.as_ptr(), 0) })
}

/// Number of launches of a kernel by this thread; `None` on a real GPU.
pub(super) fn own_launches(kernel: &str) -> Option<u64> {
    type Prototype = unsafe extern "C" fn(*const libc::c_char) -> u64;
    let function = of_the_fake(c"fake_gpu_launches")?;
    let name = std::ffi::CString::new(kernel).unwrap();
    // SAFETY: that is the prototype of the function of this name.
    let launches: Prototype = unsafe { std::mem::transmute(function) };
    // SAFETY: a C string.
    Some(unsafe { launches(name.as_ptr()) })
}

/// Number of operations of the fake GPU started by this thread.
fn launched() -> Option<u64> {
    let function = of_the_fake(c"fake_gpu_launched")?;
    // SAFETY: the function of this name takes nothing and returns the address of two words of this
    // thread.
    let launched: extern "C" fn() -> *const [u64; 2] = unsafe { std::mem::transmute(function) };
    // SAFETY: as above.
    Some(unsafe { *launched() }[0])
}

/// A function of the fake GPU, if this is one.
pub(super) fn of_the_fake(name: &std::ffi::CStr) -> Option<*mut libc::c_void> {
    // SAFETY: a name, looked for in what is loaded.
    let found = unsafe { libc::dlsym(libc::RTLD_DEFAULT, name.as_ptr()) };
    (!found.is_null()).then_some(found)
}

/// Result and gradients for inputs of these types on a device, copied to the CPU.
pub(super) fn run_on(
    device: &Device,
    inputs: &[Tensor],
    op: &dyn Fn(&[Tensor]) -> Result<Tensor>,
) -> Vec<Tensor> {
    let vars: Vec<_> =
        inputs.iter().map(|t| Var::from_tensor(&t.to_device(device).unwrap()).unwrap()).collect();
    let tensors: Vec<_> = vars.iter().map(|v| v.as_tensor().clone()).collect();
    let y = op(&tensors).unwrap();
    let dy = values("dy", y.dims()).to_dtype(y.dtype()).unwrap().to_device(device).unwrap();
    let grads = (&y * dy).unwrap().sum_all().unwrap().backward().unwrap();
    let gradients = vars.iter().filter_map(|v| grads.get(v).cloned());
    let all = std::iter::once(y.detach()).chain(gradients);
    all.map(|t| t.to_device(&Device::Cpu).unwrap()).collect()
}

/// The relative error for a type. For half precision it includes products that are rounded before
/// they are summed to the gradient of an image.
pub(super) const fn error_of(dtype: DType) -> f64 {
    match dtype {
        DType::F16 => 4e-3,
        DType::BF16 => 3e-2,
        _ => 2e-5,
    }
}

pub(super) const TYPES: [DType; 3] = [DType::F32, DType::F16, DType::BF16];

/// Asserts that the results of the kernels equal those of the CPU, in each type.
pub(super) fn assert_alike(
    kernels: &Arc<Kernels>,
    what: &str,
    inputs: &[Tensor],
    op: impl Fn(&[Tensor]) -> Result<Tensor>,
) {
    assert_sums_alike(kernels, what, 0, inputs, op);
}

/// Like [`assert_alike`], where gradients with fewer elements than the largest input are sums of
/// `terms` numbers near 1: such a sum may cancel, and then has the error of its terms.
pub(super) fn assert_sums_alike(
    kernels: &Arc<Kernels>,
    what: &str,
    terms: usize,
    inputs: &[Tensor],
    op: impl Fn(&[Tensor]) -> Result<Tensor>,
) {
    let largest = inputs.iter().map(Tensor::elem_count).max().unwrap();
    for dtype in TYPES {
        let inputs: Vec<_> = inputs.iter().map(|t| t.to_dtype(dtype).unwrap()).collect();
        let cpu = run_on(&Device::Cpu, &inputs, &op);
        let device = Device::Cuda(kernels.device.clone());
        let gpu = with_kernels(kernels, || run_on(&device, &inputs, &op));
        assert_eq!(cpu.len(), gpu.len(), "{what}: gradients");
        for (i, (gpu, cpu)) in gpu.iter().zip(&cpu).enumerate() {
            assert_eq!((gpu.dtype(), gpu.dims()), (cpu.dtype(), cpu.dims()), "{what}: tensor {i}");
            let is_sum = cpu.elem_count() < largest;
            let scale = if is_sum { (terms as f64).sqrt() } else { 0.0 };
            let apart = distance_within(gpu, cpu, scale);
            assert!(apart <= error_of(dtype), "{what} in {dtype:?}: tensor {i} is off by {apart}");
        }
    }
}

/// Asserts that `call` launches each of these kernels.
fn assert_launches(names: &[&str], call: impl FnOnce()) {
    let count = || names.iter().map(|name| launches(name)).collect::<Vec<_>>();
    let before = count();
    call();
    for ((name, before), after) in names.iter().zip(before).zip(count()) {
        assert!(before.is_none() || after > before, "{name} was not launched");
    }
}

/// Asserts NaN where the CPU has NaN, and equality elsewhere.
fn assert_extremes(
    kernels: &Arc<Kernels>,
    inputs: &[Tensor],
    op: impl Fn(&[Tensor]) -> Result<Tensor>,
) {
    let device = Device::Cuda(kernels.device.clone());
    let cpu = run_on(&Device::Cpu, inputs, &op);
    let gpu = with_kernels(kernels, || run_on(&device, inputs, &op));
    for (i, (gpu, cpu)) in gpu.iter().zip(&cpu).enumerate() {
        for (got, wanted) in flat(gpu).into_iter().zip(flat(cpu)) {
            let same = got == wanted
                || got.is_nan() && wanted.is_nan()
                || (got - wanted).abs() <= 1e-5 * wanted.abs().max(1e-6);
            assert!(same, "tensor {i}: {got}, not {wanted}");
        }
    }
}

fn tensor(values: &[f32], shape: impl Into<Shape>) -> Tensor {
    Tensor::from_slice(values, shape, &Device::Cpu).unwrap()
}

const NAN: f32 = f32::NAN;
const INF: f32 = f32::INFINITY;

#[test]
fn elementwise_kernels_are_the_cpus() {
    let kernels = kernels();
    assert_launches(&["relu", "add_relu", "relu_backward"], || {
        for shape in [&[1][..], &[7], &[16, 8], &[3, 5, 67], &[4099]] {
            let (a, b) = (values("a", shape), values("b", shape));
            assert_alike(&kernels, "relu", std::slice::from_ref(&a), |t| relu(&t[0]));
            assert_alike(&kernels, "add_relu", &[a, b], |t| add_relu(&t[0], &t[1]));
        }
    });
    let all = tensor(&[NAN, INF, -INF, 0.0, -0.0, 1.0], 6);
    assert_extremes(&kernels, std::slice::from_ref(&all), |t| relu(&t[0]));
    let others = tensor(&[1.0, -INF, INF, NAN, 0.0, -1.0], 6);
    assert_extremes(&kernels, &[all, others], |t| add_relu(&t[0], &t[1]));
}

#[test]
fn normalized_images_have_the_bits_of_the_cpu() {
    let kernels = kernels();
    let device = Device::Cuda(kernels.device.clone());
    for shape in [[1, 1, 1, 1], [3, 1, 28, 28], [2, 3, 5, 7], [5, 3, 8, 8], [2, 4, 37, 41]] {
        let bytes = (0..shape.iter().product()).map(|i| (i * 37 % 256) as u8).collect();
        let images = Tensor::from_vec(bytes, &shape, &Device::Cpu).unwrap();
        let last = images.narrow(0, shape[0] - 1, 1).unwrap();
        let values = |count: usize| (0..count).map(|c| 0.13 + 0.17 * c as f32).collect();
        for (means, stds) in [(1, 1), (1, shape[1]), (shape[1], 1), (shape[1], shape[1])] {
            let by = Normalization { mean: values(means), std: values(stds) };
            for (dtype, images) in TYPES.iter().flat_map(|t| [(*t, &images), (*t, &last)]) {
                let cpu = normalize(images, &by, dtype).unwrap();
                let on_gpu = images.to_device(&device).unwrap();
                let gpu = with_kernels(&kernels, || normalize(&on_gpu, &by, dtype)).unwrap();
                assert_eq!((gpu.dtype(), gpu.dims()), (dtype, images.dims()));
                let bits = |t: &Tensor| flat(t).into_iter().map(f32::to_bits).collect::<Vec<_>>();
                assert!(
                    bits(&gpu) == bits(&cpu),
                    "{:?} in {dtype:?}, {means} means, {stds} stds",
                    images.dims()
                );
            }
        }
    }
}

#[test]
fn images_are_normalized_by_one_launch() {
    let kernels = kernels();
    let device = Device::Cuda(kernels.device.clone());
    let images = Tensor::ones((2, 3, 8, 8), DType::U8, &device).unwrap();
    let by = Normalization { mean: vec![0.5, 0.25, 0.125], std: vec![0.5] };
    let mut context = Context::new(0).with_kernels(kernels);
    let mut count = |dtype| {
        context.enter(|| {
            let before = launched();
            normalize(&images, &by, dtype).unwrap();
            launched().zip(before).map(|(after, before)| after - before)
        })
    };
    for dtype in TYPES {
        count(dtype);
        assert!(count(dtype).is_none_or(|launches| launches == 1), "{:?}", count(dtype));
    }
    assert!(count(DType::F64).is_none_or(|launches| launches > 1), "no kernel has f64");
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 16, failure_persistence: None, ..Default::default() })]

    #[test]
    fn conv2d_is_the_cpus(
        (images, channels, outputs) in (1_usize..4, 1_usize..5, 1_usize..6),
        (height, width) in (1_usize..12, 1_usize..40),
        (kernel_height, kernel_width) in (1_usize..5, 1_usize..5),
        (stride, padding) in (1_usize..4, 0_usize..3),
        bias: bool,
        group in 1_usize..4,
    ) {
        let kernels = kernels();
        let window = Window { stride, padding };
        let (kernel_height, kernel_width) = (
            kernel_height.min(height + 2 * padding), kernel_width.min(width + 2 * padding),
        );
        let x = values("x", &[images, channels, height, width]);
        let weight = values("weight", &[outputs, channels, kernel_height, kernel_width]);
        let mut inputs = vec![x, weight];
        if bias {
            inputs.push(values("bias", &[outputs]));
        }
        for kernels in [&kernels, &without_cudnn(&kernels)] {
            assert_alike(kernels, "conv2d", &inputs, |t| conv2d(&t[0], &t[1], t.get(2), window));
        }
        in_groups(&kernels, &inputs, window, group);
    }

    #[test]
    fn batch_norm_is_the_cpus(
        (images, channels) in (2_usize..5, 1_usize..6),
        (height, width) in (1_usize..9, 1_usize..40),
        relu: bool,
        given: bool,
    ) {
        let kernels = kernels();
        let options = BatchNormOptions { eps: 1e-3, relu };
        let x = (values("x", &[images, channels, height, width]) * 2.0).unwrap();
        let x = (x + 3.0).unwrap();
        let (gamma, beta) = (values("gamma", &[channels]), values("beta", &[channels]));
        let statistics = |t: &Tensor| {
            let [mean, var] = [values("mean", &[channels]), values("var", &[channels])];
            let var = var.sqr().unwrap().to_device(t.device()).unwrap();
            Statistics { mean: mean.to_device(t.device()).unwrap(), var }
        };
        let terms = images * height * width;
        assert_sums_alike(&kernels, "batch_norm", terms, &[x, gamma, beta], |t| match given {
            true => batch_norm_with(&t[0], &t[1], &t[2], &statistics(&t[0]), options),
            false => Ok(batch_norm(&t[0], &t[1], &t[2], options)?.0),
        });
    }
}

/// Convolution by groups of a few images equals that of all images at once, except for rounding.
fn in_groups(kernels: &Arc<Kernels>, inputs: &[Tensor], window: Window, group: usize) {
    let device = Device::Cuda(kernels.device.clone());
    for dtype in TYPES {
        let inputs: Vec<_> =
            inputs.iter().map(|t| t.to_dtype(dtype).unwrap().to_device(&device).unwrap()).collect();
        let x = Var::from_tensor(&inputs[0]).unwrap();
        let weight = Var::from_tensor(&inputs[1]).unwrap();
        let (x, weight) = (x.as_tensor(), weight.as_tensor());
        let g = Geometry::new(x.shape(), weight.shape(), window.into()).unwrap();
        let by = |columns| {
            let conv = Conv { kernels: kernels.clone(), dtype, g, columns };
            let y = conv.forward(x, weight, inputs.get(2)).unwrap().tensor();
            let [dx, dw] = conv.backward(x, weight, &y).unwrap();
            [y, dx.unwrap(), dw.unwrap()].map(|t| t.to_device(&Device::Cpu).unwrap())
        };
        let (some, all) = (by(group * g.depth() * g.pixels()), by(1 << 20));
        for (i, (some, all)) in some.iter().zip(&all).enumerate() {
            let apart = distance(some, all);
            assert!(apart <= error_of(dtype), "{group} at a time in {dtype:?}: {i}: {apart}");
        }
    }
}

#[test]
fn a_sum_that_cancels_is_the_cpus() {
    let kernels = kernels();
    for channels in 1..6 {
        let x = values("x", &[2, channels, 7, 27]).affine(2.0, 3.0).unwrap();
        let inputs = [x, values("gamma", &[channels]), values("beta", &[channels])];
        let options = BatchNormOptions { eps: 1e-3, relu: true };
        assert_sums_alike(&kernels, "batch_norm", 2 * 7 * 27, &inputs, |t| {
            Ok(batch_norm(&t[0], &t[1], &t[2], options)?.0)
        });
    }
}

#[test]
fn large_images_are_the_cpus() {
    let kernels = without_cudnn(&kernels());
    let window = Window { stride: 2, padding: 3 };
    let inputs = [values("x", &[2, 2, 43, 61]), values("weight", &[3, 2, 7, 7])];
    let all = ["im2col", "col2im", "moments", "normalize", "norm_sums", "norm_backward"];
    assert_launches(&all, || {
        assert_alike(&kernels, "conv2d", &inputs, |t| conv2d(&t[0], &t[1], None, window));
        // Several parts per channel.
        let x = values("x", &[3, 2, 96, 128]);
        let inputs = [x, values("gamma", &[2]), values("beta", &[2])];
        let options = BatchNormOptions { eps: 1e-5, relu: true };
        assert_alike(&kernels, "batch_norm", &inputs, |t| {
            Ok(batch_norm(&t[0], &t[1], &t[2], options)?.0)
        });
    });
}

#[test]
fn batch_statistics_are_the_cpus() {
    let kernels = kernels();
    let device = Device::Cuda(kernels.device.clone());
    // A mean that is large compared with the deviation; half-precision parameters with an f32
    // input, and f32 parameters with a half-precision input.
    let x = (values("x", &[4, 3, 50, 50]) + 1000.0).unwrap();
    let options = BatchNormOptions { eps: 1e-5, relu: false };
    for (of, parameters) in [(DType::F32, DType::F16), (DType::F16, DType::F32)] {
        let x = x.to_dtype(of).unwrap();
        let [gamma, beta] =
            ["gamma", "beta"].map(|n| values(n, &[3]).to_dtype(parameters).unwrap());
        let measure = |device: &Device| {
            let [x, gamma, beta] = [&x, &gamma, &beta].map(|t| t.to_device(device).unwrap());
            let (y, Statistics { mean, var }) = batch_norm(&x, &gamma, &beta, options).unwrap();
            [y, mean, var].map(|t| t.to_device(&Device::Cpu).unwrap())
        };
        let gpu = with_kernels(&kernels, || measure(&device));
        for (i, (gpu, cpu)) in gpu.iter().zip(&measure(&Device::Cpu)).enumerate() {
            assert_eq!(gpu.dtype(), cpu.dtype());
            // Squares are summed in f32.
            let within = if i == 0 { 2e-3 } else { 1e-5 };
            assert!(distance(gpu, cpu) < within, "{i}: {}", distance(gpu, cpu));
        }
    }
}

#[test]
fn nan_in_an_image_is_the_cpus() {
    let kernels = kernels();
    let mut x = flat(&values("x", &[2, 2, 4, 4]));
    x[20] = NAN;
    let x = tensor(&x, (2, 2, 4, 4));
    let weight = values("weight", &[3, 2, 3, 3]);
    let window = Window { stride: 2, padding: 1 };
    assert_extremes(&kernels, &[x.clone(), weight], |t| conv2d(&t[0], &t[1], None, window));
    let options = BatchNormOptions { eps: 1e-5, relu: true };
    let inputs = [x, values("gamma", &[2]), values("beta", &[2])];
    assert_extremes(&kernels, &inputs, |t| Ok(batch_norm(&t[0], &t[1], &t[2], options)?.0));
}

#[test]
fn other_types_devices_and_contexts_have_no_kernels() {
    let kernels = kernels();
    let device = Device::Cuda(kernels.device.clone());
    let x = values("x", &[5]).to_device(&device).unwrap();
    assert!(of(&x).is_none(), "outside of a context");
    with_kernels(&kernels, || {
        assert!(of(&x).is_some());
        for none in [values("x", &[5]), x.to_dtype(DType::F64).unwrap(), x.narrow(0, 0, 0).unwrap()]
        {
            assert!(of(&none).is_none(), "{none:?}");
        }
        // On another stream than that of the kernels.
        let other = Device::new_cuda_with_stream(0).unwrap();
        assert!(of(&x.to_device(&Device::Cpu).unwrap().to_device(&other).unwrap()).is_none());
        Context::new(0).enter(|| assert!(of(&x).is_none()));
    });
    assert!(of(&x).is_none());
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 12, failure_persistence: None, ..Default::default() })]

    #[test]
    fn pooling_is_the_cpus(
        (images, channels) in (1_usize..4, 1_usize..5),
        (height, width) in (1_usize..12, 1_usize..50),
        (kernel, stride, padding) in (1_usize..5, 1_usize..5, 0_usize..3),
    ) {
        let kernels = kernels();
        let x = values("x", &[images, channels, height, width]);
        let padding = padding.min(kernel / 2);
        let kernel = kernel.min(height + 2 * padding).min(width + 2 * padding);
        let window = Window { stride, padding: padding.min(kernel / 2) };
        assert_alike(&kernels, "max_pool2d", std::slice::from_ref(&x), |t| {
            max_pool2d(&t[0], kernel, window)
        });
        assert_alike(&kernels, "global_avg_pool", &[x], |t| global_avg_pool(&t[0]));
    }

    #[test]
    fn row_operators_are_the_cpus(
        (samples, positions) in (1_usize..4, 1_usize..50),
        (inputs, outputs) in (1_usize..70, 1_usize..40),
        bias: bool,
    ) {
        let kernels = kernels();
        let x = values("x", &[samples, positions, inputs]);
        let mut all = vec![x.clone(), values("weight", &[outputs, inputs])];
        if bias {
            all.push(values("bias", &[outputs]));
        }
        assert_alike(&kernels, "linear", &all, |t| linear(&t[0], &t[1], t.get(2)));
        assert_alike(&kernels, "softmax", std::slice::from_ref(&x), |t| softmax(&t[0]));
        assert_alike(&kernels, "gelu", std::slice::from_ref(&x), |t| gelu(&t[0]));
        let all = [x, values("gamma", &[inputs]), values("beta", &[inputs])];
        assert_alike(&kernels, "layer_norm", &all, |t| layer_norm(&t[0], &t[1], &t[2], 1e-2));
    }

    #[test]
    fn cross_entropy_is_the_cpus((count, classes) in (1_usize..90, 1_usize..70)) {
        let kernels = kernels();
        let labels: Vec<i64> = (0..count).map(|i| (i * 7 % classes) as i64).collect();
        let logits = values("logits", &[count, classes]);
        assert_alike(&kernels, "cross_entropy", &[logits], |t| {
            let labels = Tensor::from_slice(&labels, count, t[0].device())?;
            cross_entropy(&t[0], &labels)
        });
    }

    #[test]
    fn self_attention_is_the_cpus(
        (samples, positions) in (1_usize..4, 1_usize..40),
        (heads, depth) in (1_usize..4, 1_usize..9),
        causal: bool,
    ) {
        let kernels = kernels();
        let qkv = values("qkv", &[samples, positions, 3 * heads * depth]);
        let options = AttentionOptions { heads, causal };
        assert_alike(&kernels, "self_attention", &[qkv], |t| self_attention(&t[0], options));
    }
}

#[test]
fn every_kernel_is_launched() {
    let kernels = kernels();
    let all: Vec<_> = KERNELS.to_vec();
    assert_launches(&all, || {
        let image = values("x", &[2, 3, 5, 7]);
        let window = Window { stride: 2, padding: 1 };
        let inputs = [image.clone(), values("weight", &[3, 3, 3, 3]), values("bias", &[3])];
        assert_alike(&kernels, "network", &inputs, |t| {
            let options = BatchNormOptions { eps: 1e-5, relu: true };
            let x = conv2d(&t[0], &t[1], Some(&t[2]), Window { stride: 1, padding: 1 })?;
            let (x, _) = batch_norm(&x, &t[2], &t[2], options)?;
            let x = relu(&add_relu(&x, &t[0])?)?;
            global_avg_pool(&max_pool2d(&x, 3, window)?)
        });
        let device = Device::Cuda(kernels.device.clone());
        let bytes = Tensor::ones((2, 3, 5, 7), DType::U8, &device).unwrap();
        let by = Normalization::default();
        with_kernels(&kernels, || normalize(&bytes, &by, DType::F32)).unwrap();
        let [wide, half] = [DType::F32, DType::F16].map(|t| bytes.to_dtype(t).unwrap());
        with_kernels(&kernels, || add(&add(&half, &wide)?, &wide)).unwrap();
        let matrix = wide.reshape((6, 35)).unwrap();
        with_kernels(&kernels, || add(&matrix, &matrix.get(0)?)).unwrap();
        let policy = amp::Autocast::cuda();
        let product = || autocast(&policy, || softmax(&linear(&matrix, &matrix, None)?));
        with_kernels(&kernels, product).unwrap();
        let [square, row] =
            [&[40, 40][..], &[40]].map(|shape| Var::ones(shape, DType::F32, &device).unwrap());
        let block = || {
            let y = layer_norm(&square, &row, &row, 1e-5)?;
            add(&square, &gelu(&linear(&y, &square, Some(&row))?)?)
        };
        with_kernels(&kernels, || {
            let (y, tape) = record(|| autocast(&policy, block));
            tape.backward(&y.unwrap()).unwrap()
        });
        assert_alike(&kernels, "long loss", &[values("x", &[1, 2048])], |t| {
            cross_entropy(&t[0], &Tensor::new(&[3_i64], t[0].device())?)
        });
        let inputs = [values("x", &[4, 5, 12]), values("weight", &[12, 12]), values("bias", &[12])];
        assert_alike(&kernels, "transformer", &inputs, |t| {
            let x = layer_norm(&linear(&t[0], &t[1], Some(&t[2]))?, &t[2], &t[2], 1e-5)?;
            let x = self_attention(&x, AttentionOptions { heads: 2, causal: true })?;
            let labels = Tensor::new(&[3_i64, 0, 1, 2], t[0].device())?;
            cross_entropy(&softmax(&gelu(&x)?)?.mean(1)?, &labels)
        });
        assert_alike(&kernels, "embedding", &inputs[1..2], |t| {
            embedding(&Tensor::new(&[3_i64, 0, 3], t[0].device())?, &t[0])
        });
        let options = AttentionOptions { heads: 2, causal: true };
        let qkv = [values("qkv", &[1, 3, 48])];
        assert_alike(&kernels, "attention", &qkv, |t| self_attention(&t[0], options));
        super::dropout_tests::launch_each();
        let one = Tensor::ones(3, DType::F32, &device).unwrap();
        let [mean, var, weight, bias] = [&one; 4].map(|t| t.copy().unwrap());
        let layer = nn::BatchNorm::new(3, mean, var, weight, bias, 1e-5).unwrap();
        with_kernels(&kernels, || layer.forward_train(&wide)).unwrap();
    });
}

#[test]
fn nan_and_infinity_in_rows_and_windows_are_the_cpus() {
    let kernels = kernels();
    let window = Window { stride: 1, padding: 1 };
    for values in [[NAN, 1.0, 2.0], [1.0, NAN, 0.0], [1.0, INF, -INF], [NAN, INF, NAN]] {
        let x = tensor(&values, (1, 1, 1, 3));
        assert_extremes(&kernels, std::slice::from_ref(&x), |t| max_pool2d(&t[0], 3, window));
        assert_extremes(&kernels, &[x], |t| global_avg_pool(&t[0]));
    }
    let lines = tensor(
        &[
            1e30, -INF, 0.0, NAN, 0.0, 1.0, INF, 0.0, 0.0, -INF, -INF, -INF, 3.0, 3.0, -INF, 30.0,
            14.0, 0.0,
        ],
        (6, 3),
    );
    assert_extremes(&kernels, std::slice::from_ref(&lines), |t| softmax(&t[0]));
    assert_extremes(&kernels, &[tensor(&[NAN, INF, -INF, 0.0, -40.0, 40.0], 6)], |t| gelu(&t[0]));
    for row in 0..6 {
        let logits = lines.narrow(0, row, 1).unwrap();
        assert_extremes(&kernels, &[logits], |t| {
            cross_entropy(&t[0], &Tensor::new(&[0_i64], t[0].device())?)
        });
    }
    let label = Tensor::new(&[3_i64], &Device::Cpu).unwrap();
    let device = Device::Cuda(kernels.device.clone());
    let on = |t: &Tensor| t.to_device(&device).unwrap();
    with_kernels(&kernels, || {
        let error = cross_entropy(&on(&lines.narrow(0, 0, 1).unwrap()), &on(&label)).unwrap_err();
        assert!(error.to_string().contains("label 3 is none of 3 classes"), "{error}");
        // No kernel supports two types.
        let (x, weight) = (on(&lines), on(&lines).to_dtype(DType::F16).unwrap());
        let error = linear(&x, &weight, None).unwrap_err().to_string();
        assert!(error.contains("linear: F32 beside F16"), "{error}");
    });
}
