//! candle's tensors on a GPU, stepped by `fused-optim` and cast by `amp`: a small training.
//!
//! candle and our crates share one cudarc, so a tensor's memory is a `CudaSlice` to both, and
//! candle's stream is the optimizer's: nothing is copied and nobody waits. `.ci/devices` checks
//! that all of it builds together.

#![expect(clippy::print_stdout, reason = "what it trains is read by a test")]
#![expect(unsafe_code, reason = "tensors are lent by their addresses")]

use std::sync::Arc;

use candle_core::cuda_backend::cudarc::driver::CudaStream;
use candle_core::{DType, Device, Error, Result, Tensor, Var};
use candle_nn::Optimizer as _;
use fused_optim::candle::VarOptimizer;
use fused_optim::cuda::{CudaDeviceOptimizer, Gpu};
use fused_optim::{AdamWHyper, Clip, FoundInf, StepCtl};

fn main() -> Result<()> {
    let device = Device::new_cuda(0)?;
    let stream = device.as_cuda_device()?.cuda_stream();
    let weight = Var::randn(0_f32, 0.1, (8, 64), &device)?;
    let bias = Var::zeros(8, DType::F32, &device)?;
    let (inputs, wanted) = (
        Tensor::randn(0_f32, 1.0, (256, 64), &device)?,
        Tensor::randn(0_f32, 1.0, (256, 8), &device)?,
    );
    let vars = vec![weight.clone(), bias.clone()];
    let mut adamw =
        VarOptimizer::<CudaDeviceOptimizer<AdamWHyper>>::new(vars, AdamWHyper::default())?;
    let ctl =
        StepCtl { found_inf: FoundInf::Check, clip: Some(Clip::norm(1.0)), ..StepCtl::default() };
    for step in 0..100 {
        let got = inputs.matmul(&weight.t()?)?.broadcast_add(&bias)?;
        let loss = (got - &wanted)?.sqr()?.mean_all()?;
        let _applied = adamw.step_with(&loss.backward()?, &ctl)?;
        if step % 10 == 0 {
            println!("{step}: {}", loss.to_scalar::<f32>()?);
        }
    }
    halve(&stream, weight.as_tensor())?;
    Ok(())
}

/// The weight in f16, by `amp`'s cast, on the same stream.
fn halve(stream: &Arc<CudaStream>, weight: &Tensor) -> Result<Tensor> {
    let half = weight.zeros_like()?.to_dtype(DType::F16)?;
    let gpu = Gpu::on(stream.clone()).map_err(Error::wrap)?;
    // SAFETY: two tensors of these types, apart, which outlive the cast in order of their stream.
    unsafe { amp::cuda::cast(&gpu, weight.try_into()?, (&half).try_into()?) }
        .map_err(Error::wrap)?;
    Ok(half)
}
