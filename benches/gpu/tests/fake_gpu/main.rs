//! The whole path on a fake GPU: the calls of cudarc, NVRTC and NCCL, the cubin cache, arguments,
//! streams and the kernels. Needs no GPU.
//!
//! The tests call the C interface as `times.py` does, and the reducer of `collective` with the
//! optimizers of `fused-optim`.

#![cfg(feature = "cuda")]
#![expect(clippy::unwrap_used, reason = "a test")]
#![expect(unsafe_code, reason = "a C interface with addresses")]

mod drivers;
mod fake;

use std::ffi::{CStr, CString, c_int};
use std::path::Path;
use std::process::Command;
use std::ptr;
use std::sync::Arc;
use std::time::Duration;

use collective::device::DeviceBuf;
use collective::reducer::ReducerOptions;
use collective::{GroupOptions, MemoryStore, ProcessGroup, Transport};
use fused_optim::cuda::{CudaOptimizer, DType, DeviceParam, DeviceSlice, Gpu, LossScale};
use fused_optim::{
    Applied, Clip, FoundInf, HalfWeights, ParamGroup, ParamMut, SgdHyper, Slice, SliceMut, StepCtl,
};
use gpu_bench::reduce::{
    gpu_all_reduce, gpu_group, gpu_group_end, gpu_join, gpu_joined_average, gpu_joined_step,
    gpu_reduce, gpu_reducer,
};
use gpu_bench::reducer_step::ReducerStep;
use gpu_bench::rules::{NAMES, on_cpu};
use gpu_bench::{
    gpu_cast, gpu_error, gpu_loss_scale, gpu_open, gpu_optimizer, gpu_reference, gpu_step,
};

use fake::{Fake, with_fake, with_fake_and};

/// Pseudorandom numbers.
fn numbers(count: usize, seed: u64) -> Vec<f32> {
    let mut state = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
    let mut next = || {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        (state >> 40) as f32 / (1 << 23) as f32 - 1.0
    };
    (0..count).map(|_| next()).collect()
}

fn check(status: c_int) {
    // SAFETY: a C string of this thread's last call.
    let text = unsafe { CStr::from_ptr(gpu_error()) };
    assert_eq!(status, 0, "{}", text.to_string_lossy());
}

/// The bytes of tensors as f32 or, rounded, as f16 or bf16.
fn rounded(wide: &[f32], number: c_int) -> Vec<u8> {
    match number {
        0 => wide.iter().flat_map(|x| x.to_ne_bytes()).collect(),
        1 => wide.iter().flat_map(|x| half::f16::from_f32(*x).to_ne_bytes()).collect(),
        _ => wide.iter().flat_map(|x| half::bf16::from_f32(*x).to_ne_bytes()).collect(),
    }
}

/// Tensors with a device's alignment, and the offset of each.
fn tensors(sizes: &[usize], number: c_int, seed: u64) -> (Vec<Vec<u64>>, Vec<u64>) {
    let mut all: Vec<Vec<u64>> = Vec::new();
    for (at, size) in sizes.iter().enumerate() {
        let mut bytes = rounded(&numbers(*size, seed + at as u64), number);
        bytes.resize(bytes.len().next_multiple_of(8), 0);
        let (words, _) = bytes.as_chunks::<8>();
        all.push(words.iter().map(|word| u64::from_ne_bytes(*word)).collect());
    }
    let places = all.iter().map(|one| one.as_ptr().expose_provenance() as u64).collect();
    (all, places)
}

#[test]
fn every_optimizer_equals_the_cpu_bit_for_bit() {
    with_fake("every_optimizer_equals_the_cpu_bit_for_bit", |fake| {
        let stream = fake.stream();
        let mut session = ptr::null_mut();
        // SAFETY: a stream that lives, a place for a pointer.
        check(unsafe { gpu_open(stream.as_raw(), &raw mut session) });
        let sizes = [1, 7, 0, 1025, 20_001];
        let lens = sizes.map(|size| size as u64);
        for (at, name) in NAMES.iter().enumerate() {
            let (weight, grad) = [(0, 0), (1, 1), (2, 2), (0, 2)][at % 4];
            let (clipped, scaled) = (at % 2 == 0, at % 3 == 0);
            let max_norm = if clipped { 0.5 } else { -1.0 };
            let rule = CString::new(*name).unwrap();
            let ((mut weights, w), (mut grads, g)) =
                (tensors(&sizes, weight, 1), tensors(&sizes, grad, 77));
            let (twins, t) = tensors(&sizes, weight, 1);
            for one in weights.iter_mut().chain(&mut grads) {
                fake.lend(one);
            }
            let (count, lens) = (sizes.len(), lens.as_ptr());
            // SAFETY: as many tensors of these lengths and types, which stay where they are.
            check(unsafe {
                gpu_optimizer(
                    session,
                    rule.as_ptr(),
                    count,
                    w.as_ptr(),
                    g.as_ptr(),
                    lens,
                    weight,
                    grad,
                )
            });
            if scaled {
                // SAFETY: the session's.
                check(unsafe { gpu_loss_scale(session, 1.0) });
            }
            for _ in 0..3 {
                // SAFETY: as above.
                check(unsafe { gpu_step(session, 1.0, 1, max_norm) });
            }
            fake.sync(stream);
            // SAFETY: as above, of the host.
            check(unsafe {
                gpu_reference(
                    rule.as_ptr(),
                    3,
                    count,
                    t.as_ptr(),
                    g.as_ptr(),
                    lens,
                    weight,
                    grad,
                    1.0,
                    1,
                    max_norm,
                )
            });
            assert_eq!(weights, twins, "{name}");
            let (fresh, _) = tensors(&sizes, weight, 1);
            assert_ne!(weights, fresh, "{name} moved nothing");
            for one in weights.iter_mut().chain(&mut grads) {
                fake.take_back(one);
            }
        }
    });
}

/// A machine without NVRTC can use kernels that were compiled elsewhere.
#[test]
fn cached_cubins_need_no_nvrtc() {
    let test = "cached_cubins_need_no_nvrtc";
    let folder = concat!(env!("CARGO_TARGET_TMPDIR"), "/carried");
    let kept = ("CUBIN_CACHE", folder);
    let groups = [ParamGroup::new(SgdHyper::default(), 0..1)];
    with_fake_and(test, &[kept], |_| {
        let _ = std::fs::remove_dir_all(folder);
        let types = [(DType::F32, DType::F32)];
        CudaOptimizer::compile_for(90, &groups, HalfWeights::Master, &types).unwrap();
    });
    let without = ("NVRTC_LIBRARY", "/nonexistent/libnvrtc.so");
    with_fake_and(test, &[kept, without], |fake| {
        let step = |dtype, words: &mut [u32]| {
            let slice = DeviceSlice { ptr: fake.lend(words), len: words.len(), dtype };
            // SAFETY: a stream that lives.
            let gpu = unsafe { Gpu::with_stream(0, fake.stream().as_raw()) }.unwrap();
            let mut sgd = CudaOptimizer::new(gpu, groups.clone(), HalfWeights::Master)?;
            let grad = DeviceSlice { ptr: slice.ptr, ..slice };
            // SAFETY: the memory outlives the optimizer.
            unsafe { sgd.bind(&[DeviceParam::new(slice, Some(grad))]) }?;
            // SAFETY: as above.
            unsafe { sgd.step(&StepCtl::default()) }?;
            sgd.status().map(|_| ())
        };
        step(DType::F32, &mut [0; 8]).unwrap();
        let error = step(DType::F16, &mut [0; 8]).unwrap_err().to_string();
        assert!(error.contains("cannot load NVRTC"), "what was not compiled: {error}");
    });
}

#[test]
fn casts_equal_the_cpu() {
    with_fake("casts_equal_the_cpu", |fake| {
        let stream = fake.stream();
        let mut session = ptr::null_mut();
        // SAFETY: a stream that lives, a place for a pointer.
        check(unsafe { gpu_open(stream.as_raw(), &raw mut session) });
        let mut wide = numbers(70_001, 3);
        let mut half = vec![half::f16::NAN; wide.len()];
        let (from, to) = (fake.lend(&mut wide), fake.lend(&mut half));
        // SAFETY: so many elements of these types.
        check(unsafe { gpu_cast(session, from, 0, to, 1, wide.len()) });
        fake.sync(stream);
        let same = |(x, h): (&f32, &half::f16)| half::f16::from_f32(*x) == *h;
        assert!(wide.iter().zip(&half).all(same));
        // Errors of the driver have the operation and the driver's name of the error.
        fake.fail("cast", 0, 1, 719);
        // SAFETY: as above.
        assert_eq!(unsafe { gpu_cast(session, from, 0, to, 1, wide.len()) }, -1);
        // SAFETY: a C string of the last call.
        let text = unsafe { CStr::from_ptr(gpu_error()) }.to_string_lossy();
        assert_eq!(text, "cannot launch a kernel: CUDA_ERROR_LAUNCH_FAILED (719)");
    });
}

/// Every line of the scripts that are run on a GPU; with few small tensors, PyTorch's on the CPU.
#[test]
#[ignore = "needs PyTorch: TORCH_PYTHON, or python3, imports torch"]
fn scripts_run_without_a_gpu() {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR"));
    with_fake_and("scripts_run_without_a_gpu", &[("FAKE_GPU_TRUSTS", "1")], |_| {
        let library = std::env::current_exe().unwrap().with_file_name("libgpu_bench.so");
        let python = std::env::var("TORCH_PYTHON").unwrap_or_else(|_| "python3".into());
        for script in [&["times"][..], &["times", "--step"], &["nccl"]] {
            let mut command = Command::new(&python);
            command.arg(folder.join("tests/fake_gpu/dry.py")).args(&script[1..]);
            command.env("SCRIPT", script[0]);
            command.arg("--library").arg(&library).arg("--out").arg(std::env::temp_dir());
            assert!(command.status().unwrap().success(), "{script:?}");
        }
    });
}

#[test]
fn the_benchmarks_group_of_one_rank_averages_and_steps() {
    with_fake("the_benchmarks_group_of_one_rank_averages_and_steps", |fake| {
        let (stream, mut group) = (fake.stream(), ptr::null_mut());
        // SAFETY: a stream that lives, a place for a pointer.
        check(unsafe { gpu_group(stream.as_raw(), 0, 0, 1, 0, &raw mut group) });
        let sizes = [300, 5, 4096];
        let lens = sizes.map(|size| size as u64);
        let ((mut weights, w), (mut grads, g)) = (tensors(&sizes, 0, 1), tensors(&sizes, 0, 9));
        let (twins, t) = tensors(&sizes, 0, 1);
        for one in weights.iter_mut().chain(&mut grads) {
            fake.lend(one);
        }
        // SAFETY: memory of so many elements.
        check(unsafe { gpu_all_reduce(group, g[2], 4096, 0) });
        // SAFETY: as many numbers.
        check(unsafe { gpu_reducer(group, 3, lens.as_ptr(), 0) });
        let mut places = [0_u64; 3];
        for _ in 0..2 {
            // SAFETY: as many gradients, and as much room.
            check(unsafe { gpu_reduce(group, g.as_ptr(), places.as_mut_ptr()) });
        }
        fake.sync(stream);
        for (place, grad) in places.iter().zip(&grads) {
            let words = grad.len() - 1;
            // SAFETY: a slot of as many elements, which the fake has in the host's memory.
            let slot = unsafe {
                std::slice::from_raw_parts(
                    ptr::with_exposed_provenance::<u32>(*place as usize),
                    2 * words,
                )
            };
            let of = |word: &u64| [*word as u32, (*word >> 32) as u32];
            assert!(grad[..words].iter().flat_map(of).eq(slot.iter().copied()));
        }
        let rule = c"adamw".as_ptr();
        // SAFETY: as many tensors of these lengths.
        check(unsafe { gpu_join(group, rule, 3, w.as_ptr(), lens.as_ptr(), 0, 0.5, 1.0) });
        for _ in 0..3 {
            // SAFETY: as many gradients.
            check(unsafe { gpu_joined_average(group, g.as_ptr()) });
            // SAFETY: the group's.
            check(unsafe { gpu_joined_step(group) });
        }
        fake.sync(stream);
        // SAFETY: as above, of the host.
        check(unsafe {
            gpu_reference(rule, 3, 3, t.as_ptr(), g.as_ptr(), lens.as_ptr(), 0, 0, 1.0, 1, 0.5)
        });
        assert_eq!(weights, twins);
        // SAFETY: used no more.
        unsafe { gpu_group_end(group) };
    });
}

/// A rank of the next test.
struct Rank {
    weights: Vec<Vec<f32>>,
    grads: Vec<Vec<f32>>,
    joined: ReducerStep,
}

const SIZES: [usize; 5] = [3000, 1, 20_000, 777, 5];

impl Rank {
    fn new(fake: &Fake, group: ProcessGroup, stream: collective::device::DeviceStream) -> Self {
        let device = group.rank();
        let mut weights: Vec<_> = SIZES.iter().map(|n| numbers(*n, *n as u64)).collect();
        let mut grads: Vec<_> = SIZES.iter().map(|n| vec![0.0; *n]).collect();
        for grad in &mut grads {
            fake.lend(grad);
        }
        let slice = |weight: &mut Vec<f32>| DeviceSlice {
            ptr: fake.lend(weight),
            len: weight.len(),
            dtype: DType::F32,
        };
        let slices = weights.iter_mut().map(slice).collect();
        let mut options = ReducerOptions::default();
        (options.first_bucket_bytes, options.bucket_bytes) = (4000, 12_000);
        let ctl = StepCtl {
            found_inf: FoundInf::Check,
            clip: Some(Clip::norm(1.0)),
            ..StepCtl::default()
        };
        // SAFETY: the weights live as long as this, and do not move.
        let joined =
            unsafe { ReducerStep::new(group, (device, stream), "adamw", slices, (options, ctl)) };
        let mut joined = joined.unwrap();
        joined.set_loss_scale(LossScale { scale: 8.0, ..Default::default() }).unwrap();
        Self { weights, grads, joined }
    }

    fn average(&mut self) {
        let buf = |grad: &mut Vec<f32>| {
            let at = grad.as_mut_ptr().expose_provenance() as u64;
            // SAFETY: it stays where it is; the test writes it only when streams are done.
            unsafe { DeviceBuf::from_raw(at, grad.len(), collective::DType::F32) }.unwrap()
        };
        let grads: Vec<_> = self.grads.iter_mut().map(buf).collect();
        // SAFETY: as above.
        unsafe { self.joined.average(&grads) }.unwrap();
    }

    fn step(&mut self) {
        // SAFETY: the test reads weights only when the stream is done.
        unsafe { self.joined.step() }.unwrap();
    }
}

/// A rank's gradients in a pass; one rank's overflow in the third.
fn gradient(pass: u64, rank: usize, tensor: usize) -> Vec<f32> {
    let mut values = numbers(SIZES[tensor], 1000 * pass + 10 * rank as u64 + tensor as u64);
    if (pass, rank, tensor) == (2, 1, 3) {
        values[400] = f32::INFINITY;
    }
    values
}

/// Two ranks check their buckets after the all-reduce: weights, `found_inf` and norm equal those of
/// the CPU with the averages, and the step does not check a gradient again.
#[test]
fn gradients_are_checked_once_after_their_all_reduce() {
    with_fake("gradients_are_checked_once_after_their_all_reduce", |fake| {
        let store = MemoryStore::new();
        let play = |rank: usize| {
            let options = GroupOptions::default().with_timeout(Duration::from_secs(60));
            let options = options.with_transport(Transport::Nccl).with_cuda_device(rank as u32);
            let store = Arc::new(store.clone());
            let group = ProcessGroup::from_store(store, rank, 2, options).unwrap();
            let stream = fake.stream();
            let mut side = Rank::new(fake, group.clone(), stream);
            let mut twin = on_cpu("adamw", SIZES.len()).unwrap();
            let mut weights = side.weights.clone();
            let (mut scale, mut before) = (8.0_f32, 0);
            for pass in 0..5 {
                let averages: Vec<Vec<f32>> = (0..SIZES.len())
                    .map(|tensor| {
                        side.grads[tensor].copy_from_slice(&gradient(pass, rank, tensor));
                        let (a, b) = (gradient(pass, 0, tensor), gradient(pass, 1, tensor));
                        a.iter().zip(&b).map(|(a, b)| (a + b) * 0.5).collect()
                    })
                    .collect();
                let buckets = side.joined.reducer().plan().buckets().len();
                side.average();
                let launched = fake.calls("grad_stats", rank as u32) - before;
                assert_eq!(launched as usize, buckets, "a launch for each bucket of pass {pass}");
                before += launched;
                if pass == 4 {
                    // Overwritten before the step, which has the results of the check.
                    fake.sync(stream);
                    for tensor in 0..SIZES.len() {
                        clear(side.joined.reducer().slot(tensor));
                    }
                }
                side.step();
                fake.sync(stream);
                let ctl = StepCtl {
                    grad_scale: 1.0 / scale,
                    found_inf: FoundInf::Check,
                    clip: Some(Clip::norm(1.0)),
                };
                let mut params: Vec<ParamMut<'_>> = (weights.iter_mut().zip(&averages))
                    .map(|(weight, grad)| {
                        ParamMut::new(SliceMut::F32(weight), Some(Slice::F32(grad)))
                    })
                    .collect();
                let applied = twin.step(&mut params, &ctl).unwrap();
                let status = side.joined.status().unwrap();
                assert_eq!(status.last_skipped, applied == Applied::SkippedNonFinite, "{pass}");
                assert_eq!(status.last_skipped, pass == 2);
                scale *= if status.last_skipped { 0.5 } else { 1.0 };
                assert_eq!(status.loss_scale, Some(scale));
                if pass != 2 {
                    assert_eq!(Some(status.grad_norm), twin.grad_norm(), "pass {pass}");
                }
                assert!(pass == 4 || side.weights == weights, "pass {pass}");
            }
            // Before the drop of either's memory.
            group.barrier().unwrap();
        };
        std::thread::scope(|scope| {
            let ranks = [0, 1].map(|rank| scope.spawn(move || play(rank)));
            ranks.into_iter().for_each(|rank| rank.join().unwrap());
        });
    });
}

fn clear(buf: DeviceBuf) {
    let at = ptr::with_exposed_provenance_mut::<f32>(buf.address() as usize);
    // SAFETY: a slot of so many elements; all streams are done.
    unsafe { std::slice::from_raw_parts_mut(at, buf.count()) }.fill(0.0);
}

/// A step runs only after the checks on the buckets' stream.
#[test]
fn a_step_waits_for_the_checks_without_blocking_the_host() {
    with_fake("a_step_waits_for_the_checks_without_blocking_the_host", |fake| {
        let options = GroupOptions::default().with_transport(Transport::Nccl).with_cuda_device(0);
        let store = Arc::new(MemoryStore::new());
        let group = ProcessGroup::from_store(store, 0, 1, options).unwrap();
        let stream = fake.stream();
        let mut side = Rank::new(fake, group, stream);
        for pass in 0..2 {
            for (tensor, grad) in side.grads.iter_mut().enumerate() {
                grad.copy_from_slice(&gradient(pass, 0, tensor));
            }
            let before = side.weights.clone();
            let buckets = side.joined.reducer().stream();
            if pass == 1 {
                // The first pass ends with a synchronization, since the bucket layout changes.
                fake.block(buckets);
            }
            side.average();
            side.step();
            if pass == 1 {
                std::thread::sleep(Duration::from_millis(50));
                assert_eq!(side.weights, before);
                fake.unblock(buckets);
            }
            fake.sync(stream);
            assert_ne!(side.weights, before);
        }
    });
}

/// An error of a launch in the epilogue becomes the reducer's error, with the driver's name of the
/// error.
#[test]
fn a_failed_epilogue_is_an_error_of_the_average() {
    with_fake("a_failed_epilogue_is_an_error_of_the_average", |fake| {
        let options = GroupOptions::default().with_transport(Transport::Nccl).with_cuda_device(0);
        let store = Arc::new(MemoryStore::new());
        let group = ProcessGroup::from_store(store, 0, 1, options).unwrap();
        let mut side = Rank::new(fake, group, fake.stream());
        fake.fail("grad_stats", 0, 1, 719);
        let buf = |grad: &mut Vec<f32>| {
            let at = grad.as_mut_ptr().expose_provenance() as u64;
            // SAFETY: it stays where it is.
            unsafe { DeviceBuf::from_raw(at, grad.len(), collective::DType::F32) }.unwrap()
        };
        let grads: Vec<_> = side.grads.iter_mut().map(buf).collect();
        // SAFETY: as above.
        let error = unsafe { side.joined.average(&grads) }.unwrap_err().to_string();
        assert!(
            error.contains("take statistics of a bucket") && error.contains("LAUNCH_FAILED"),
            "{error}"
        );
    });
}
