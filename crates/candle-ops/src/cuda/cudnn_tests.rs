//! Tests that compare convolutions by cuDNN, or by its replacement on the fake GPU of
//! `.ci/devices`, with the CPU.

use std::ffi::{CString, c_char};
use std::sync::Arc;

use candle_core::{DType, Device, Tensor, Var};
use proptest::prelude::*;

use super::Kernels;
use super::cudnn::{Convolution, PLANS};
use super::tests::{assert_alike, error_of, kernels, of_the_fake, run_on, with_kernels};
use crate::linear::weighted::Kernel as _;
use crate::sizes::{Geometry, Grouped};
use crate::tests::{distance, flat, values};
use crate::{Context, ConvOptions, Error, conv2d};

/// The same kernels without cuDNN.
pub(super) fn without_cudnn(kernels: &Arc<Kernels>) -> Arc<Kernels> {
    let off = Error::Cudnn { call: "loading", reason: "off".to_owned() };
    Arc::new(Kernels::with_cudnn(&kernels.device, Err(off)).unwrap())
}

/// Numbers of calls of these functions of the fake GPU's cuDNN by this thread; `None` on a real
/// GPU.
fn calls<const N: usize>(names: [&str; N]) -> [Option<u64>; N] {
    names.map(|name| {
        let function = of_the_fake(c"fake_gpu_blocks")?;
        let name = CString::new(name).unwrap();
        // SAFETY: that is the prototype of the function of this name.
        let calls: unsafe extern "C" fn(*const c_char) -> u64 =
            unsafe { std::mem::transmute(function) };
        // SAFETY: a C string.
        Some(unsafe { calls(name.as_ptr()) })
    })
}

const PASSES: [&str; 3] =
    ["cudnnConvolutionForward", "cudnnConvolutionBackwardData", "cudnnConvolutionBackwardFilter"];
const NOTHING: &str = "allocations of 0 bytes";
const ASKED: &str = "algorithms asked for";
const TIMED: &str = "algorithms timed";

/// Numbers of calls since `before`, on the fake GPU.
fn more<const N: usize>(names: [&str; N], before: [Option<u64>; N]) -> Option<[u64; N]> {
    let mut more = [0; N];
    for (to, (after, before)) in more.iter_mut().zip(calls(names).into_iter().zip(before)) {
        *to = after? - before?;
    }
    Some(more)
}

fn inputs(extents: [usize; 4], weight: [usize; 4], dtype: DType) -> Vec<Tensor> {
    let all = [values("x", &extents), values("weight", &weight), values("bias", &weight[..1])];
    all.map(|t| t.to_dtype(dtype).unwrap()).into()
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 16, failure_persistence: None, ..Default::default() })]

    #[test]
    fn grouped_and_dilated_convolutions_are_the_cpus(
        (images, channels, outputs, groups) in (1_usize..4, 1_usize..4, 1_usize..4, 1_usize..4),
        (height, width) in (3_usize..12, 3_usize..40),
        (kernel_height, kernel_width) in (1_usize..4, 1_usize..4),
        (stride, padding, dilation) in (1_usize..4, 0_usize..3, 1_usize..4),
        bias: bool,
    ) {
        let kernels = kernels();
        let fits = |extent: usize, kernel: usize| {
            if extent + 2 * padding > (kernel - 1) * dilation { kernel } else { 1 }
        };
        let (kernel_height, kernel_width) = (fits(height, kernel_height), fits(width, kernel_width));
        let mut inputs = inputs(
            [images, channels * groups, height, width],
            [outputs * groups, channels, kernel_height, kernel_width],
            DType::F32,
        );
        inputs.truncate(2 + usize::from(bias));
        let options = ConvOptions { stride, padding, dilation, groups };
        for kernels in [&kernels, &without_cudnn(&kernels)] {
            assert_alike(kernels, "conv2d", &inputs, |t| conv2d(&t[0], &t[1], t.get(2), options));
        }
    }
}

#[test]
fn halves_are_convolved_by_cudnn_and_full_precision_is_not() {
    let kernels = kernels();
    let device = Device::Cuda(kernels.device.clone());
    let options = ConvOptions { padding: 1, ..ConvOptions::default() };
    let op = |t: &[Tensor]| conv2d(&t[0], &t[1], Some(&t[2]), options);
    for (dtype, by_cudnn) in [(DType::F16, 1), (DType::BF16, 1), (DType::F32, 0)] {
        let inputs = inputs([2, 5, 7, 6], [4, 5, 3, 3], dtype);
        let (before, nothing) = (calls(PASSES), calls([NOTHING]));
        with_kernels(&kernels, || run_on(&device, &inputs, &op));
        assert!(more(PASSES, before).is_none_or(|more| more == [by_cudnn; 3]), "{dtype:?}");
        // The replacement needs no workspace here.
        assert!(more([NOTHING], nothing).is_none_or(|more| more == [0]), "{dtype:?}");
        let before = calls(PASSES);
        let kernels = without_cudnn(&kernels);
        with_kernels(&kernels, || run_on(&device, &inputs, &op));
        assert!(more(PASSES, before).is_none_or(|more| more == [0; 3]), "{dtype:?}");
        assert_eq!(kernels.cudnn().unwrap_err().to_string(), "cuDNN: loading: off");
    }
}

#[test]
fn what_cudnn_refuses_or_has_nothing_deterministic_for_is_convolved_by_columns() {
    let kernels = kernels();
    let device = Device::Cuda(kernels.device.clone());
    let options = ConvOptions { padding: 2, ..ConvOptions::default() };
    let op = |t: &[Tensor]| conv2d(&t[0], &t[1], Some(&t[2]), options);
    // Cases of the replacement, selected by size; cuDNN has such cases.
    for side in [5, 6] {
        let inputs = inputs([2, 3, 7, 8], [4, 3, side, side], DType::F16);
        assert_alike(&kernels, "conv2d", &inputs, op);
        let names = ["cudnnConvolutionForward", "im2col"];
        let before = calls(names);
        with_kernels(&kernels, || run_on(&device, &inputs, &op));
        let found = more(names, before);
        assert!(found.is_none_or(|[cudnn, blocks]| cudnn == 0 && blocks > 0), "{side}: {found:?}");
        // Between two that cuDNN computes.
        let between = [&inputs[..], &[values("last", &[3, 4, 3, 3]).to_dtype(DType::F16).unwrap()]];
        assert_alike(&kernels, "conv2d between cuDNN's", &between.concat(), |t| {
            let x = conv2d(&t[0], &t[3].narrow(1, 0, 3)?, None, options)?;
            conv2d(&conv2d(&x, &t[1], Some(&t[2]), options)?, &t[3], None, options)
        });
    }
}

#[test]
fn an_algorithm_that_cudnn_refuses_is_run_no_more_and_one_without_memory_is_tried_again() {
    let kernels = kernels();
    let device = Device::Cuda(kernels.device.clone());
    let options = ConvOptions { padding: 2, ..ConvOptions::default() };
    let op = |t: &[Tensor]| conv2d(&t[0], &t[1], None, options);
    // Cases of the replacement, selected by size: an algorithm with a GiB, one that is rejected,
    // and one that runs.
    let all = inputs([2, 3, 7, 8], [4, 3, 5, 6], DType::F16);
    let cpu = run_on(&Device::Cpu, &all[..2], &op);
    let names = [PASSES[0], PASSES[1], PASSES[2], "allocations refused"];
    for wanted in [[2, 2, 2, 3], [1, 1, 1, 3]] {
        let before = calls(names);
        let gpu = with_kernels(&kernels, || run_on(&device, &all[..2], &op));
        for (gpu, cpu) in gpu.iter().zip(&cpu) {
            assert!(distance(gpu, cpu) <= error_of(DType::F16));
        }
        let found = more(names, before);
        assert!(found.is_none_or(|found| found == wanted), "{found:?}");
    }
    // A convolution on which cuDNN fails is not silently computed by columns.
    let zeros = |shape: &[usize]| Tensor::zeros(shape, DType::F16, &device).unwrap();
    let (x, weight) = (zeros(&[2, 3, 7, 8]), zeros(&[4, 3, 6, 5]));
    let result = with_kernels(&kernels, || conv2d(&x, &weight, None, options));
    if of_the_fake(c"fake_gpu_blocks").is_some() {
        let error = result.unwrap_err().to_string();
        assert!(error.contains("cuDNN: its algorithms: CUDNN_STATUS_INTERNAL_ERROR"), "{error}");
    }
}

#[test]
fn any_thread_plans_and_ends() {
    let kernels = kernels();
    let device = Device::Cuda(kernels.device.clone());
    let all = inputs([2, 3, 7, 8], [4, 3, 3, 3], DType::F16);
    let [x, weight] = [&all[0], &all[1]].map(|t| t.to_device(&device).unwrap());
    let convolves = std::thread::spawn(move || {
        with_kernels(&kernels, || conv2d(&x, &weight, None, ConvOptions::default())).unwrap();
        kernels
    });
    let kernels = convolves.join().unwrap();
    std::thread::spawn(move || drop(kernels)).join().unwrap();
}

#[test]
fn what_needs_no_gradient_gets_none() {
    let kernels = kernels();
    let device = Device::Cuda(kernels.device.clone());
    let all = inputs([2, 3, 7, 6], [4, 3, 3, 3], DType::F16);
    let on = |t: &Tensor| t.to_device(&device).unwrap();
    let before = calls(PASSES);
    with_kernels(&kernels, || {
        let weight = Var::from_tensor(&on(&all[1])).unwrap();
        let y = conv2d(&on(&all[0]), &weight, None, ConvOptions::default()).unwrap();
        assert!(y.sum_all().unwrap().backward().unwrap().get(&weight).is_some());
    });
    assert!(more(PASSES, before).is_none_or(|more| more == [1, 0, 1]));
    // A frozen layer.
    let names = [PASSES[0], PASSES[1], PASSES[2], "im2col", "norm_sums", "norm_sums_last"];
    for (kernels, wanted) in [(kernels.clone(), [1, 1, 0]), (without_cudnn(&kernels), [0; 3])] {
        let of = |is_trained: bool| {
            let before = calls(names);
            with_kernels(&kernels, || {
                let x = Var::from_tensor(&on(&all[0])).unwrap();
                let (weight, bias) = (on(&all[1]), on(&all[2]));
                let y = conv2d(&x, &weight, Some(&bias), ConvOptions::default()).unwrap();
                if is_trained {
                    assert!(y.sum_all().unwrap().backward().unwrap().get(&x).is_some());
                }
            });
            more(names, before)
        };
        let (Some(forward), Some(both)) = (of(false), of(true)) else { continue };
        assert_eq!(both[..3], wanted);
        assert_eq!(both[3..], forward[3..], "columns and sums of a gradient that nothing needs");
    }
}

#[test]
fn algorithms_are_asked_for_once_a_shape_and_timed_once_if_the_context_autotunes() {
    let kernels = kernels();
    let device = Device::Cuda(kernels.device.clone());
    let run = |context: &mut Context, side: usize, trains: bool| {
        let inputs = inputs([2, 3, side, 9], [4, 3, 3, 3], DType::F16);
        let op = |t: &[Tensor]| conv2d(&t[0], &t[1], None, ConvOptions::default());
        let before = calls([ASKED, TIMED]);
        let call = || run_on(&device, &inputs[..2], &op);
        let found = if trains { context.enter(call) } else { context.evaluate(call) };
        let cpu = run_on(&Device::Cpu, &inputs[..2], &op);
        for (gpu, cpu) in found.iter().zip(&cpu) {
            assert!(distance(gpu, cpu) <= error_of(DType::F16));
        }
        more([ASKED, TIMED], before)
    };
    let is = |found: Option<[u64; 2]>, wanted| found.is_none_or(|found| found == wanted);
    let mut context = Context::new(0).with_kernels(kernels.clone());
    assert!(is(run(&mut context, 6, true), [3, 0]));
    assert!(is(run(&mut context, 6, true), [0; 2]));
    assert!(is(run(&mut context, 7, true), [3, 0]));
    context.set_autotune(Some(1));
    assert!(is(run(&mut context, 6, false), [0; 2]), "nothing is timed in evaluation");
    assert!(is(run(&mut context, 6, true), [3, 3]));
    assert!(is(run(&mut context, 6, true), [0; 2]));
    // A real cuDNN may have only one algorithm.
    let timed = context.autotune_summary().unwrap().timed;
    assert!(if of_the_fake(c"fake_calls").is_some() { timed == 3 } else { timed <= 3 }, "{timed}");
    // A run resumed from a checkpoint.
    let cache = context.autotune_cache();
    let fresh = Arc::new(Kernels::new(&kernels.device).unwrap());
    let mut context = Context::new(0).with_kernels(fresh).with_autotune(1);
    context.load_autotune_cache(&cache).unwrap();
    assert!(is(run(&mut context, 6, true), [3, 0]));
}

#[test]
fn a_missing_library_is_the_reason_for_columns() {
    let device = kernels().device.clone();
    let error = super::cudnn::Cudnn::load(&device, &["/nonexistent/libcudnn.so.9".into()]);
    let error = error.unwrap_err().to_string();
    assert!(error.starts_with("cannot load libcudnn: /nonexistent/libcudnn.so.9: "), "{error}");
    assert!(error.ends_with("or set CUDNN_LIBRARY to its path"), "{error}");
    // Another library.
    let error = super::cudnn::Cudnn::load(&device, &["libc.so.6".into()]);
    let error = error.unwrap_err().to_string();
    assert!(error.starts_with("libc.so.6 has no function cudnn"), "{error}");
}

#[test]
fn images_of_ever_other_sizes_do_not_fill_the_memory() {
    let kernels = kernels();
    let device = Device::Cuda(kernels.device.clone());
    let Ok(cudnn) = &kernels.cudnn else { return };
    let inputs = inputs([2, 3, 7, 8], [4, 3, 3, 3], DType::F16);
    let of = Grouped::new(inputs[0].shape(), inputs[1].shape(), ConvOptions::default()).unwrap();
    let gradients = |between: &dyn Fn()| {
        let var = |t: &Tensor| Var::from_tensor(&t.to_device(&device).unwrap()).unwrap();
        let vars: Vec<_> = inputs.iter().map(var).collect();
        let y = with_kernels(&kernels, || {
            conv2d(&vars[0], &vars[1], Some(&vars[2]), ConvOptions::default()).unwrap()
        });
        between();
        let gradients = with_kernels(&kernels, || y.sqr()?.sum_all()?.backward()).unwrap();
        let of = |var: &Var| flat(&gradients.get(var).unwrap().to_device(&Device::Cpu).unwrap());
        vars.iter().map(of).collect::<Vec<_>>()
    };
    let expected = gradients(&|| ());
    // Also between forward and backward pass: an operator keeps its plan.
    let found = gradients(&|| {
        for images in 10..20 + PLANS {
            let one = Geometry { images, ..of.one };
            let of = Grouped { one, ..of };
            cudnn.plan(&Convolution { of, dtype: DType::F16 }, true).unwrap();
            assert!(cudnn.plans() <= PLANS);
        }
    });
    assert_eq!(found, expected);
}
