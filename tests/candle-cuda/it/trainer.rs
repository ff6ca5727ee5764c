//! `candle_train::Trainer` on a GPU follows the CPU's, and resumes to the bit.

use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use candle_core::{DType, Device, Module, Result, Tensor, Var};
use candle_nn::{VarBuilder, VarMap};
use candle_ops::cuda::Kernels;
use candle_ops::nn::{Linear, linear};
use candle_ops::{Context, cross_entropy};
use candle_train::train_data::Array;
use candle_train::{AdamWHyper, Clip, CompileMode, CompileOptions, Trainer, TrainerBuilder};
use collective::{GroupOptions, MemoryStore, ProcessGroup, Store, Transport};

use crate::of_the_fake;

use super::alone_with;

fn model(device: &Device) -> Result<(VarMap, [Linear; 2])> {
    let vars = VarMap::new();
    let vb = VarBuilder::from_varmap(&vars, DType::F32, device);
    let net = [linear(8, 16, vb.pp("b"))?, linear(16, 4, vb.pp("a"))?];
    for (name, var) in vars.data().lock().unwrap().iter() {
        let value = |i: usize| ((i * 7 + name.len()) as f32 * 0.37).sin() * 0.3;
        let values: Vec<f32> = (0..var.elem_count()).map(value).collect();
        var.set(&Tensor::from_vec(values, var.shape(), device)?)?;
    }
    Ok((vars, net))
}

/// Losses of the epochs that are left to train.
fn run(
    device: &Device,
    path: &Path,
    epochs: usize,
    with: impl Fn(TrainerBuilder) -> TrainerBuilder,
) -> Vec<f32> {
    let (vars, net) = model(device).unwrap();
    let builder = with(Trainer::builder(&vars)).clip(Clip::norm(0.5)).accumulate(2);
    let mut train = builder.build(AdamWHyper { lr: 1e-2, ..AdamWHyper::default() }).unwrap();
    let mut losses = Vec::new();
    for epoch in train.resume(path).unwrap()..epochs {
        for rows in train.batches(24, 8, epoch).unwrap() {
            let x =
                rows.iter().flat_map(|row| (row * 8..row * 8 + 8).map(|i| (i as f32 * 0.7).sin()));
            let x = Tensor::from_iter(x, device).unwrap();
            let x = x.reshape((rows.len(), 8)).unwrap();
            let y = Tensor::from_iter(rows.iter().map(|row| i64::from(row % 4)), device).unwrap();
            let forward = || {
                let hidden = candle_ops::dropout(&net[0].forward(&x)?, 0.1)?;
                cross_entropy(&net[1].forward(&candle_ops::relu(&hidden)?)?, &y)
            };
            let loss = train.step(forward).unwrap().loss.to_dtype(DType::F32).unwrap();
            losses.push(loss.to_scalar::<f32>().unwrap());
        }
        train.save(path, epoch + 1).unwrap();
    }
    losses
}

#[test]
fn a_trainer_says_whether_cudnn_convolves() {
    let build = |device: &Device| {
        let (vars, _) = model(device).unwrap();
        Trainer::builder(&vars).build(AdamWHyper::default()).unwrap()
    };
    assert!(build(&Device::Cpu).cudnn().is_none());
    let device = Device::new_cuda_with_stream(0).unwrap();
    match build(&device).cudnn() {
        Some(Ok(name)) => assert!(name.starts_with("cuDNN "), "{name}"),
        Some(Err(why)) => assert!(why.to_string().contains("CUDNN_LIBRARY"), "{why}"),
        None => panic!("nothing is said"),
    }
}

/// f16 trains on any GPU.
#[test]
fn bf16_on_a_gpu_without_it_is_an_error_that_names_the_compute_capability() {
    let test = "trainer::bf16_on_a_gpu_without_it_is_an_error_that_names_the_compute_capability";
    let variables = [("FAKE_GPU_CAPABILITY", "75")];
    let outcome = alone_with(&variables, test, || {
        let device = Device::new_cuda_with_stream(0)?;
        let path = std::env::temp_dir().join(format!("half-{}", std::process::id()));
        assert_eq!(run(&device, &path, 1, TrainerBuilder::f16).len(), 3);
        std::fs::remove_file(path)?;
        let text = "bf16 needs a GPU of compute capability 8.0 or later, this one has 7.5: use f16";
        let build = |vars: &VarMap, with: fn(TrainerBuilder) -> TrainerBuilder| {
            let built = with(Trainer::builder(vars)).build(AdamWHyper::default());
            let error = built.unwrap_err().to_string();
            assert!(error.contains(text), "{error}");
        };
        let (vars, _) = model(&device)?;
        build(&vars, TrainerBuilder::bf16);
        // Weights of that type.
        let vars = VarMap::new();
        let zeros = Tensor::zeros(4, DType::BF16, &Device::Cpu)?.to_device(&device)?;
        vars.data().lock().unwrap().insert("weight".into(), Var::from_tensor(&zeros)?);
        build(&vars, |builder| builder);
        // Operators without a trainer.
        let x = zeros.reshape((2, 2))?;
        let kernels =
            Arc::new(Kernels::new(device.as_cuda_device()?).map_err(candle_core::Error::wrap)?);
        let mut context = Context::new(0).with_kernels(kernels);
        let error = context.enter(|| candle_ops::relu(&x)).unwrap_err().to_string();
        assert!(error.contains(text), "{error}");
        Ok(())
    });
    let Some((ended, text)) = outcome else { return };
    assert!(ended && text.contains("1 passed"), "{text}");
}

/// Two ranks as threads, on the CPU or on one GPU.
fn two_ranks(
    name: &str,
    transport: Transport,
    device: impl Fn() -> Device + Sync,
) -> Vec<Vec<f32>> {
    let store: Arc<dyn Store> = Arc::new(MemoryStore::new());
    let path = std::env::temp_dir().join(format!("ranks-{}-{name}", std::process::id()));
    let rank = |rank| {
        let options = GroupOptions::default().with_timeout(Duration::from_secs(60));
        let options = options.with_transport(transport).with_cuda_device(0);
        let group = ProcessGroup::from_store(store.clone(), rank, 2, options).unwrap();
        run(&device(), &path, 3, |builder| builder.group(group.clone()))
    };
    let losses = std::thread::scope(|scope| {
        let rank = &rank;
        let ranks = [0, 1].map(|index| scope.spawn(move || rank(index)));
        ranks.into_iter().map(|rank| rank.join().unwrap()).collect()
    });
    std::fs::remove_file(path).unwrap();
    losses
}

#[test]
fn averages_of_two_ranks_on_a_gpu_follow_the_cpu() {
    let here = two_ranks("cpu", Transport::Host, || Device::Cpu);
    let cuda = || Device::new_cuda_with_stream(0).unwrap();
    let there = two_ranks("cuda", Transport::Nccl, cuda);
    assert_ne!(here[0], here[1]);
    for (here, there) in here.iter().flatten().zip(there.iter().flatten()) {
        assert!((here - there).abs() < 1e-5, "{here} {there}");
    }
}

#[test]
fn a_trainer_on_a_gpu_follows_the_cpu() {
    let directory = std::env::temp_dir().join(format!("trainer-{}", std::process::id()));
    let cuda = Device::new_cuda_with_stream(0).unwrap();
    let at = |name: &str| directory.join(name);
    let here = run(&Device::Cpu, &at("cpu"), 3, |builder| builder);
    let there = run(&cuda, &at("cuda"), 3, |builder| builder);
    for (here, there) in here.iter().zip(&there) {
        assert!((here - there).abs() < 1e-5, "{here} {there}");
    }
    let half = run(&cuda, &at("half"), 3, TrainerBuilder::f16);
    for (here, half) in here.iter().zip(&half) {
        assert!((here - half).abs() < 0.01, "{here} {half}");
    }
    let mut parts = run(&cuda, &at("parts"), 1, TrainerBuilder::f16);
    parts.extend(run(&cuda, &at("parts"), 3, TrainerBuilder::f16));
    assert_eq!(parts, half);
    std::fs::remove_dir_all(directory).unwrap();
}

#[test]
fn arrays_are_sent_as_they_are_and_tuned_trainers_say_so() {
    let gpu = Device::new_cuda_with_stream(0).unwrap();
    let (vars, _net) = model(&gpu).unwrap();
    let mode = CompileMode::MaxAutotuneNoCudagraphs;
    let builder = Trainer::builder(&vars).compile(CompileOptions { mode, ..Default::default() });
    let train = builder.build(AdamWHyper::default()).unwrap();
    // Small ones, and one that is copied in a stream of its own.
    for count in [3, 1 << 19] {
        let values: Vec<f32> = (0..count).map(|i| i as f32).collect();
        let tensor = train.tensor(&Array::new([count], values.clone()).unwrap()).unwrap();
        assert_eq!(tensor.to_vec1::<f32>().unwrap(), values);
    }
    let mask = train.tensor(&Array::new([2], vec![true, false]).unwrap()).unwrap();
    assert_eq!(mask.to_vec1::<u8>().unwrap(), [1, 0]);
    let report = train.compile_report().unwrap().to_string();
    assert!(report.contains("autotuning of the optimizer: "), "{report}");
    assert!(report.contains("autotuning of convolutions"), "{report}");
}

/// Masters in `f32` take steps that are too small for `bf16`, and no weight is cast.
#[test]
#[ignore = "needs the fake GPU, which counts launches"]
fn variables_of_bf16_follow_those_of_f32_without_a_cast() {
    type Launches = unsafe extern "C" fn(*const std::ffi::c_char) -> u64;
    // SAFETY: that is the type of the function of this name.
    let launches = unsafe { of_the_fake::<Launches>("fake_gpu_launches") };
    // SAFETY: it reads a name.
    let launches = |kernel: &std::ffi::CStr| unsafe { launches(kernel.as_ptr()) };
    let casts = || [c"cast_from_f32", c"cast_to_f32"].map(launches);
    let device = Device::new_cuda_with_stream(0).unwrap();
    let run = |dtype: DType| {
        let vars = VarMap::new();
        let vb = candle_train::seeded(&vars, 3, dtype, &device);
        let net = [linear(8, 16, vb.pp("b")).unwrap(), linear(16, 4, vb.pp("a")).unwrap()];
        let x = Tensor::arange(0_f32, 64.0, &device).unwrap().sin().unwrap();
        let x = x.reshape((8, 8)).unwrap().to_dtype(dtype).unwrap();
        let y = Tensor::new(&[0_i64, 1, 2, 3, 0, 1, 2, 3], &device).unwrap();
        // A thousandth of a weight is below its last bit.
        let hyper = AdamWHyper { lr: 5e-4, ..AdamWHyper::default() };
        let mut train = Trainer::builder(&vars).check_gradients(false).build(hyper).unwrap();
        let before = casts();
        let mut losses = Vec::new();
        for _ in 0..100 {
            let hidden = || candle_ops::gelu(&net[0].forward(&x)?);
            let step = train.step(|| cross_entropy(&net[1].forward(&hidden()?)?, &y)).unwrap();
            losses.push(step.loss.to_dtype(DType::F32).unwrap().to_scalar::<f32>().unwrap());
        }
        (losses, casts() == before)
    };
    let ((wide, _), (half, has_no_casts)) = (run(DType::F32), run(DType::BF16));
    assert!(has_no_casts);
    let fallen = wide[0] - wide[99];
    assert!(fallen > 0.01, "{wide:?}");
    for (half, wide) in half.iter().zip(&wide) {
        assert!((half - wide).abs() < 0.02 * wide, "{half}, not {wide}");
    }
    assert!(((half[0] - half[99]) / fallen - 1.0).abs() < 0.3, "{half:?}, not {wide:?}");
}
