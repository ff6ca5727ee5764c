//! Drivers that lack functions or reject code give errors, never a panic of cudarc.

use std::path::Path;

use amp::cuda::CudaScaler;
use amp::{LossScaler, LossScalerOptions};
use cuda_rt::Device;
use fused_optim::cuda::{Averages, CudaError};
use fused_optim::{HyperParam, RmsPropTfHyper};

use super::fake::{LIBRARY, compilers, narrow};
use super::*;

/// The driver's functions that are looked up before the first call of cudarc.
fn required_symbols() -> Vec<&'static str> {
    let source = include_str!("../../../../crates/cuda-rt/src/driver.rs");
    let (_, list) = source.split_once("const SYMBOLS: &[&str] = &[").unwrap();
    let (list, _) = list.split_once("];").unwrap();
    list.split('"').filter(|word| word.starts_with("cu")).collect()
}

/// Runs a test in a process whose driver has only these functions.
fn with_narrow(test: &str, name: &str, symbols: &[&str], body: impl FnOnce(&'static Fake)) {
    let path = narrow(name, symbols);
    let folder = path.parent().and_then(Path::to_str).unwrap();
    with_fake_and(test, &[("LD_LIBRARY_PATH", folder), (LIBRARY, path.to_str().unwrap())], body);
}

/// cudarc panics if a function is missing, so all functions that it calls must be looked up before.
#[test]
fn every_called_driver_function_is_looked_up_before() {
    let test = "drivers::every_called_driver_function_is_looked_up_before";
    with_narrow(test, "exact", &required_symbols(), |fake| {
        let mut words = [1.0_f32; 3000];
        let mut halves = [half::f16::ZERO; 3000];
        let len = words.len();
        let weight = DeviceSlice { ptr: fake.lend(&mut words), len, dtype: DType::F32 };
        let (half, mut ema) = (fake.lend(&mut halves), [0.0_f32; 3000]);
        // SAFETY: a stream that lives.
        let foreign = || unsafe { Gpu::with_stream(0, fake.stream().as_raw()) }.unwrap();
        for gpu in [Gpu::new(0).unwrap(), foreign()] {
            let groups = [ParamGroup::new(SgdHyper { momentum: 0.9, ..Default::default() }, 0..1)];
            let mut sgd = CudaOptimizer::new(gpu.clone(), groups, HalfWeights::Master).unwrap();
            sgd.set_loss_scale(Some(LossScale::default())).unwrap();
            let mut param = DeviceParam::new(weight, Some(weight));
            param.ema = Some((fake.lend(&mut ema), 0.5));
            let ctl = StepCtl { clip: Some(Clip::norm(1.0)), ..StepCtl::default() };
            // SAFETY: the memory outlives the optimizer; here and below.
            unsafe { sgd.bind(&[param]) }.unwrap();
            // SAFETY: as above.
            unsafe { sgd.take_grad_stats(&[0], &ctl, Some(&gpu)) }.unwrap();
            // SAFETY: as above.
            unsafe { sgd.step(&ctl) }.unwrap();
            sgd.load_state_dict(&sgd.state_dict().unwrap()).unwrap();
            gpu.name().unwrap();
            drop(Averages::new(gpu, &[3000]).unwrap());
        }
        // SAFETY: a stream that lives.
        let gpu = unsafe { Gpu::with_stream(0, fake.stream().as_raw()) }.unwrap();
        let of = |ptr, dtype| DeviceSlice { ptr, len, dtype };
        let wide = of(weight.ptr, DType::F32);
        // SAFETY: as above.
        unsafe { amp::cuda::cast(&gpu, wide, of(half, DType::F16)) }.unwrap();
        let scaler = LossScaler::new(LossScalerOptions::default()).unwrap();
        let mut scaler = CudaScaler::new(gpu, &scaler).unwrap();
        // SAFETY: as above.
        unsafe { scaler.bind(&[wide]) }.unwrap();
        // SAFETY: as above.
        unsafe { scaler.unscale() }.unwrap();
        scaler.update().unwrap();
        scaler.status().unwrap();
    });
}

#[test]
fn a_missing_driver_function_is_an_error_that_names_it() {
    let test = "drivers::a_missing_driver_function_is_an_error_that_names_it";
    let mut symbols = required_symbols();
    symbols.retain(|symbol| *symbol != "cuMemFreeAsync");
    with_narrow(test, "old", &symbols, |_| {
        let error = Gpu::new(0).unwrap_err();
        assert!(
            matches!(&error, CudaError::MissingSymbol { symbol: "cuMemFreeAsync", .. }),
            "{error}"
        );
        let text = error.to_string();
        assert!(text.contains("libcuda.so") && text.contains("driver 525 or later"), "{text}");
        assert_eq!(Gpu::new(0).unwrap_err().to_string(), text);
    });
}

#[test]
fn an_error_for_rejected_code_suggests_an_older_nvrtc() {
    let test = "drivers::an_error_for_rejected_code_suggests_an_older_nvrtc";
    with_fake(test, |fake| {
        // SAFETY: a stream that lives.
        let gpu = unsafe { Gpu::with_stream(0, fake.stream().as_raw()) }.unwrap();
        let scaler = LossScaler::new(LossScalerOptions::default()).unwrap();
        let text = |code| {
            fake.fail("cuModuleLoadData", 0, 1, code);
            CudaScaler::new(gpu.clone(), &scaler).unwrap_err().to_string()
        };
        let refused = text(200);
        assert!(
            refused.starts_with("cannot load kernels (is NVRTC newer than the driver?"),
            "{refused}"
        );
        assert!(refused.contains("NVRTC_LIBRARY") && refused.ends_with("(200)"), "{refused}");
        assert_eq!(text(719), "cannot load kernels: CUDA_ERROR_LAUNCH_FAILED (719)");
        CudaScaler::new(gpu, &scaler).unwrap();
    });
}

/// The compiler versions of the cubins in a folder, in order of the file names.
fn kept_versions(folder: &str) -> Vec<String> {
    let files = std::fs::read_dir(folder).unwrap();
    let names = files.map(|file| file.unwrap().file_name().into_string().unwrap());
    let version = |name: String| Some(name.strip_suffix(".cubin")?.split_once('-')?.1.to_owned());
    let mut versions: Vec<String> = names.filter_map(version).collect();
    versions.sort();
    versions
}

/// With two compilers: the driver of the older one selects the older, the driver of the newer one
/// the newer, unless it rejects its code. The same holds for cached code.
#[test]
fn the_newest_compiler_that_the_driver_can_load_is_used() {
    let test = "drivers::the_newest_compiler_that_the_driver_can_load_is_used";
    let folders = [compilers().parent().unwrap().join("gpu"), compilers()];
    let paths = std::env::join_paths(folders).unwrap().into_string().unwrap();
    let kept = concat!(env!("CARGO_TARGET_TMPDIR"), "/by_version");
    let with = |driver, nvrtc, loads: i32, refused: &[i32], versions: &[&str]| {
        let variables = [
            ("FAKE_GPU_DRIVER", driver),
            ("NVRTC_LIBRARY", nvrtc),
            ("LD_LIBRARY_PATH", &paths[..]),
            ("CUBIN_CACHE", kept),
        ];
        with_fake_and(test, &variables, |fake| {
            for code in refused {
                fake.fail("cuModuleLoadData", 0, 1, *code);
            }
            // SAFETY: a stream that lives.
            let gpu = unsafe { Gpu::with_stream(0, fake.stream().as_raw()) }.unwrap();
            let scaler = LossScaler::new(LossScalerOptions::default()).unwrap();
            CudaScaler::new(gpu, &scaler).unwrap();
            assert_eq!(fake.calls("cuModuleLoadData", 0), loads);
            assert_eq!(kept_versions(kept), versions);
        });
    };
    if std::env::var_os(LIBRARY).is_none() {
        let _ = std::fs::remove_dir_all(kept);
    }
    with("1120", "", 1, &[], &["1.12"]);
    with("1130", "", 2, &[222], &["1.12", "1.13"]);
    with("1120", "/nonexistent/libnvrtc.so", 1, &[], &["1.12", "1.13"]);
    with("1130", "/nonexistent/libnvrtc.so", 2, &[200], &["1.12", "1.13"]);
}

/// The fake's NVRTC compiles for 7.5, 8.0 and 9.0.
#[test]
fn nvrtc_compiles_ptx_for_a_newer_gpu_and_names_a_gpu_that_is_too_old() {
    let test = "drivers::nvrtc_compiles_ptx_for_a_newer_gpu_and_names_a_gpu_that_is_too_old";
    let kept = concat!(env!("CARGO_TARGET_TMPDIR"), "/by_capability");
    for (capability, code) in
        [("75", "cubin"), ("89", "PTX"), ("90", "cubin"), ("120", "PTX"), ("70", "")]
    {
        if std::env::var_os(LIBRARY).is_none() {
            let _ = std::fs::remove_dir_all(kept);
        }
        with_fake_and(
            test,
            &[("FAKE_GPU_CAPABILITY", capability), ("CUBIN_CACHE", kept)],
            |fake| {
                // SAFETY: a stream that lives.
                let gpu = unsafe { Gpu::with_stream(0, fake.stream().as_raw()) }.unwrap();
                let (major, minor) = gpu.compute_capability();
                assert_eq!(format!("{major}{minor}"), capability);
                if code.is_empty() {
                    let scaler = LossScaler::new(LossScalerOptions::default()).unwrap();
                    let error = CudaScaler::new(gpu, &scaler).unwrap_err().to_string();
                    let text = "NVRTC 0.1 compiles for compute capability 7.5 and later, the GPU has 7.0; install an older";
                    assert!(error.starts_with(text), "{error}");
                    return;
                }
                step_with(fake, [&gpu; 3], |_| ());
                let files = std::fs::read_dir(kept).unwrap().map(|file| file.unwrap().path());
                let written: Vec<_> = files.map(|path| std::fs::read(path).unwrap()).collect();
                let is_code = |bytes: &Vec<u8>| {
                    String::from_utf8_lossy(bytes).contains(&format!("fake {code} "))
                };
                assert!(!written.is_empty() && written.iter().all(is_code), "{capability}");
            },
        );
    }
}

/// `drop` cannot return an error.
#[test]
fn an_error_of_a_free_is_returned_by_the_next_call() {
    let test = "drivers::an_error_of_a_free_is_returned_by_the_next_call";
    with_fake(test, |fake| {
        // SAFETY: a stream that lives.
        let gpu = unsafe { Gpu::with_stream(0, fake.stream().as_raw()) }.unwrap();
        let other = Gpu::on(gpu.stream().clone()).unwrap();
        let [first, second] = [(); 2].map(|()| gpu.alloc(64).unwrap());
        fake.fail("cuMemFreeAsync", 0, 1, 719);
        drop(first);
        // Neither takes the error.
        drop(second);
        drop(other);
        assert_eq!(gpu.stream().synchronize().unwrap_err().0 as u32, 719);
        gpu.stream().synchronize().unwrap();
    });
}

/// Runs casts, overflow checks and optimizer steps on the given GPUs.
fn step_with(fake: &Fake, gpus: [&Gpu; 3], mut after: impl FnMut(usize)) {
    let (mut words, mut halves) = ([1.0_f32; 3000], [half::f16::ZERO; 3000]);
    let of = |ptr, dtype| DeviceSlice { ptr, len: 3000, dtype };
    let (wide, half) = (of(fake.lend(&mut words), DType::F32), fake.lend(&mut halves));
    let groups = [ParamGroup::new(SgdHyper::default(), 0..1)];
    let mut sgd = CudaOptimizer::new(gpus[0].clone(), groups, HalfWeights::Master).unwrap();
    // SAFETY: the memory outlives all of it; here and below.
    unsafe { sgd.bind(&[DeviceParam::new(wide, Some(wide))]) }.unwrap();
    let scaler = LossScaler::new(LossScalerOptions::default()).unwrap();
    let mut scaler = CudaScaler::new(gpus[1].clone(), &scaler).unwrap();
    // SAFETY: as above.
    unsafe { scaler.bind(&[wide]) }.unwrap();
    let ctl = StepCtl { clip: Some(Clip::norm(1.0)), ..StepCtl::default() };
    for step in 0..3 {
        // SAFETY: as above.
        unsafe { sgd.take_grad_stats(&[0], &ctl, None) }.unwrap();
        // SAFETY: as above.
        unsafe { sgd.step(&ctl) }.unwrap();
        // SAFETY: as above.
        unsafe { scaler.unscale() }.unwrap();
        scaler.update().unwrap();
        // SAFETY: as above.
        unsafe { amp::cuda::cast(gpus[2], wide, of(half, DType::F16)) }.unwrap();
        after(step);
    }
    sgd.status().unwrap();
    scaler.status().unwrap();
    gpus[2].stream().synchronize().unwrap();
}

#[test]
fn kernels_are_looked_up_only_in_the_first_step() {
    let test = "drivers::kernels_are_looked_up_only_in_the_first_step";
    with_fake(test, |fake| {
        let stream = fake.stream();
        // SAFETY: a stream that lives.
        let gpus = [0; 3].map(|_| unsafe { Gpu::with_stream(0, stream.as_raw()) }.unwrap());
        let mut looked_up = Vec::new();
        step_with(fake, gpus.each_ref(), |_| looked_up.push(fake.calls("cuModuleGetFunction", 0)));
        assert_eq!(looked_up, [looked_up[0]; 3]);
    });
}

/// Kernels of different crates may have the same macros.
#[test]
fn one_gpu_runs_kernels_of_several_crates() {
    let test = "drivers::one_gpu_runs_kernels_of_several_crates";
    with_fake(test, |fake| {
        // SAFETY: a stream that lives.
        let gpu = unsafe { Gpu::with_stream(0, fake.stream().as_raw()) }.unwrap();
        step_with(fake, [&gpu; 3], |_| ());
    });
}

/// State and the masters of half weights are initialized on the device.
#[test]
fn first_bind_uploads_tables_but_no_state() {
    let test = "drivers::first_bind_uploads_tables_but_no_state";
    with_fake(test, |fake| {
        // SAFETY: a stream that lives.
        let gpu = unsafe { Gpu::with_stream(0, fake.stream().as_raw()) }.unwrap();
        let [mut weights, mut grads] = [1.0, 0.5].map(|x| vec![half::f16::from_f32(x); 1 << 18]);
        let (dtype, len) = (DType::F16, weights.len());
        let [weight, grad] = [&mut weights, &mut grads].map(|x| DeviceSlice {
            ptr: fake.lend(&mut x[..]),
            len,
            dtype,
        });
        let hyper = RmsPropTfHyper { lr: 0.0, momentum: 0.9, ..Default::default() };
        let groups = [ParamGroup::new(hyper, 0..1)];
        let mut optim = CudaOptimizer::new(gpu, groups, HalfWeights::Master).unwrap();
        let before = fake.copied();
        // SAFETY: the memory outlives all of it; here and below.
        unsafe { optim.bind(&[DeviceParam::new(weight, Some(grad))]) }.unwrap();
        let after = fake.copied();
        assert!(after[0] - before[0] < 4096 && after[1] == before[1], "{before:?}, {after:?}");
        // SAFETY: as above.
        unsafe { optim.step(&StepCtl::PLAIN) }.unwrap();
        let state = optim.state_dict().unwrap().state.remove(&0).unwrap();
        // RMSpropTF's mean square starts at 1: 0.9 * 1 + 0.1 * 0.5^2.
        assert!(state.tensors["square_avg"].iter().all(|x| (x - 0.925).abs() < 1e-6));
        assert_eq!(state.tensors["master"], vec![1.0; len]);
    });
}

/// An upload copies the bytes before it returns, even if the device reads them later.
#[test]
fn uploaded_memory_may_be_overwritten_after_the_call() {
    let test = "drivers::uploaded_memory_may_be_overwritten_after_the_call";
    with_fake(test, |fake| {
        let stream = fake.stream();
        // SAFETY: a stream that lives.
        let gpu = unsafe { Gpu::with_stream(0, stream.as_raw()) }.unwrap();
        let mut memory = gpu.alloc(40 << 20).unwrap();
        let mut upload = |at: usize, count: usize, value: u8| {
            let mut bytes = vec![value; count];
            gpu.write(&mut memory, at, &bytes).unwrap();
            bytes.fill(0xee);
        };
        fake.block(stream);
        for at in 0..10 {
            upload(at * 5000, 5000 - 100 * at, at as u8);
        }
        fake.unblock(stream);
        // More than can be in flight at once.
        upload(1 << 20, 39 << 20, 77);
        let mut bytes = vec![0; 40 << 20];
        gpu.read(&memory, 0, &mut bytes).unwrap();
        for at in 0..10 {
            let part = &bytes[at * 5000..][..5000 - 100 * at];
            assert!(part.iter().all(|byte| *byte == at as u8), "upload {at}: {:?}", part[0]);
        }
        assert!(bytes[1 << 20..].iter().all(|byte| *byte == 77));
    });
}

/// A step consists of launches only, so a captured one runs at each replay of the graph. Uploads of
/// new values cannot be captured: they are errors and change nothing.
#[test]
fn a_step_can_be_captured_but_an_upload_cannot() {
    let test = "drivers::a_step_can_be_captured_but_an_upload_cannot";
    with_fake(test, |fake| {
        let (mut weight, mut grad) = ([1.0_f32; 3000], [1.0_f32; 3000]);
        let slice = |values: &mut [f32]| DeviceSlice {
            ptr: fake.lend(values),
            len: values.len(),
            dtype: DType::F32,
        };
        let param = DeviceParam::new(slice(&mut weight), Some(slice(&mut grad)));
        let stream = fake.stream();
        // SAFETY: a stream that lives.
        let gpu = unsafe { Gpu::with_stream(0, stream.as_raw()) }.unwrap();
        let groups = [ParamGroup::new(SgdHyper { lr: 0.125, ..Default::default() }, 0..1)];
        let mut sgd = CudaOptimizer::new(gpu, groups, HalfWeights::Master).unwrap();
        sgd.set_loss_scale(Some(LossScale { scale: 2.0, ..Default::default() })).unwrap();
        let ctl = StepCtl { found_inf: FoundInf::Check, ..StepCtl::default() };
        // SAFETY: the memory outlives the optimizer; here and below.
        unsafe { sgd.bind(&[param]) }.unwrap();
        // SAFETY: as above.
        unsafe { sgd.step(&ctl) }.unwrap();
        fake.captured(stream, 3, || {
            // SAFETY: as above.
            unsafe { sgd.step(&ctl) }.unwrap();
            sgd.set_hyper_param(0, HyperParam::Lr, 0.25).unwrap();
            // SAFETY: as above.
            let error = unsafe { sgd.step(&ctl) }.unwrap_err().to_string();
            assert!(error.contains("cannot copy to the device during stream capture"), "{error}");
        });
        fake.sync(stream);
        assert_eq!(weight, [1.0 - 4.0 * 0.125 / 2.0; 3000]);
        assert_eq!(sgd.status().unwrap().growth_tracker, 4);
    });
}
