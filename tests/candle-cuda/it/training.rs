//! The program runs, and what it trains learns; `VarOptimizer` steps variables on a GPU as on the
//! CPU.

use std::process::Command;

use candle_core::{DType, Device, Result, Tensor, Var};
use candle_nn::Optimizer as _;
use fused_optim::candle::VarOptimizer;
use fused_optim::cuda::CudaDeviceOptimizer;
use fused_optim::{AdamP, AdamPHyper, AdamW, AdamWHyper, Clip, FoundInf, StepCtl};

/// candle's tensors, its gradients, and AdamW with clipping by `fused-optim`'s kernels.
#[test]
fn the_loss_falls() {
    let output = Command::new(env!("CARGO_BIN_EXE_candle-cuda")).output().unwrap();
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    assert!(output.status.success(), "{text}{}", String::from_utf8_lossy(&output.stderr));
    let losses: Vec<f32> =
        text.lines().map(|line| line.split(": ").nth(1).unwrap().parse().unwrap()).collect();
    assert_eq!(losses.len(), 10, "{text}");
    assert!(losses.windows(2).all(|two| two[1] < two[0]), "{losses:?}");
}

fn variables(device: &Device) -> Result<Vec<Var>> {
    let values = |shift: usize| (0..37).map(move |i| ((i * 7 + shift) % 11) as f32 * 0.1 - 0.5);
    let vector = |(shift, dtype): (usize, &DType)| {
        Var::from_tensor(&Tensor::from_iter(values(shift), device)?.to_dtype(*dtype)?)
    };
    let mut vars: Vec<Var> = [DType::F32, DType::F16, DType::BF16]
        .iter()
        .enumerate()
        .map(vector)
        .collect::<Result<_>>()?;
    // AdamP updates a matrix by rows.
    vars.push(Var::from_tensor(&Tensor::from_iter(values(3).take(36), device)?.reshape((4, 9))?)?);
    Ok(vars)
}

/// Weights after some steps, the second of which has an infinite gradient.
fn trained<O, H: Default>(device: &Device) -> Result<Vec<Vec<f32>>>
where
    VarOptimizer<O>: candle_nn::Optimizer<Config = H>,
    O: fused_optim::Optimizer,
{
    let vars = variables(device)?;
    let mut optimizer = VarOptimizer::<O>::new(vars.clone(), H::default())?;
    let ctl =
        StepCtl { found_inf: FoundInf::Check, clip: Some(Clip::norm(0.5)), ..StepCtl::default() };
    for step in 0..4 {
        let factor = if step == 1 { f64::INFINITY } else { 0.25 * f64::from(step + 1) };
        let sum = |var: &Var| var.affine(factor, 0.0)?.sum_all()?.to_dtype(DType::F32);
        let loss = vars.iter().map(sum).reduce(|a, b| a? + b?).unwrap()?;
        let applied = optimizer.step_with(&loss.backward()?, &ctl)?;
        assert_eq!(applied == fused_optim::Applied::SkippedNonFinite, step == 1);
    }
    vars.iter().map(|var| var.to_dtype(DType::F32)?.flatten_all()?.to_vec1()).collect()
}

#[test]
fn variables_on_a_gpu_are_stepped_with_the_bits_of_the_cpu() {
    let cuda = Device::new_cuda(0).unwrap();
    let on_gpu = trained::<CudaDeviceOptimizer<AdamWHyper>, _>(&cuda).unwrap();
    assert_eq!(on_gpu, trained::<AdamW, _>(&Device::Cpu).unwrap());
    let adamp = trained::<CudaDeviceOptimizer<AdamPHyper>, _>(&cuda).unwrap();
    assert_eq!(adamp, trained::<AdamP, _>(&Device::Cpu).unwrap());
    assert_ne!(on_gpu[0][0], -0.5);
}

#[test]
fn variables_that_a_gpu_cannot_step_are_refused() {
    type OnGpu = VarOptimizer<CudaDeviceOptimizer<AdamWHyper>>;
    let cuda = Device::new_cuda(0).unwrap();
    let refused = |vars: Vec<Var>| OnGpu::new(vars, AdamWHyper::default()).unwrap_err().to_string();
    let there = Var::ones(3, DType::F32, &cuda).unwrap();
    let here = Var::ones(3, DType::F32, &Device::Cpu).unwrap();
    let error = refused(vec![there.clone(), here]);
    assert!(error.contains("variable 1") && error.contains("not on a GPU"), "{error}");
    assert!(refused(Vec::new()).contains("no float variables"));

    let mut twice = OnGpu::new(vec![there.clone(), there.clone()], AdamWHyper::default()).unwrap();
    let grads = there.sum_all().unwrap().backward().unwrap();
    assert!(twice.step(&grads).unwrap_err().to_string().contains("variable 1 is listed twice"));
    let mut once = OnGpu::new(vec![there.clone()], AdamWHyper::default()).unwrap();
    std::thread::scope(|scope| {
        let elsewhere = scope.spawn(|| once.step(&grads).unwrap_err().to_string());
        assert!(elsewhere.join().unwrap().contains("another thread"));
    });
}
