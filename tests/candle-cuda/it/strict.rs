//! Features that the fake GPU lacks, and errors that a GPU would not report, are reported with a
//! message; most of them abort the process.

use std::path::Path;
use std::process::Command;
use std::{env, fs};

use candle_core::cuda_backend::cudarc::driver::{DevicePtr, LaunchConfig, PushKernelArg};
use candle_core::{DType, Device, Error, Result, Tensor};
use fused_optim::cuda::{CudaDeviceOptimizer, DeviceParam, DeviceParams, DeviceSlice, Gpu};
use fused_optim::{Applied, Clip, DeviceOptimizer, HalfWeights, ParamGroup, SgdHyper, StepCtl};

use crate::alone;

#[test]
fn a_kernel_that_is_not_there_is_named() {
    let outcome = alone("strict::a_kernel_that_is_not_there_is_named", || {
        let error = Tensor::ones(3, DType::I64, &Device::new_cuda(0)?)?.exp().unwrap_err();
        assert!(error.to_string().contains("NOT_FOUND"), "{error}");
        Ok(())
    });
    let Some((ended, text)) = outcome else { return };
    assert!(ended && text.contains("fake GPU: no kernel uexp_i64 in "), "{text}");
}

#[test]
fn a_function_that_is_not_there_is_named() {
    let outcome = alone("strict::a_function_that_is_not_there_is_named", || {
        let device = Device::new_cuda(0)?;
        device.as_cuda_device()?.cuda_stream().context().set_cache_config(
            candle_core::cuda_backend::cudarc::driver::sys::CUfunc_cache::CU_FUNC_CACHE_PREFER_L1,
        ).map_err(Error::wrap)
    });
    let Some((ended, text)) = outcome else { return };
    assert!(!ended && text.contains("fake GPU: no function cuCtxSetCacheConfig"), "{text}");
}

/// candle's stream is another one to each thread, and cudarc orders only streams that it made.
#[test]
fn a_tensor_used_by_two_threads_without_order_is_noticed() {
    let outcome = alone("strict::a_tensor_used_by_two_threads_without_order_is_noticed", || {
        let tensor = Tensor::ones(3, DType::F32, &Device::new_cuda(0)?)?.exp()?;
        std::thread::scope(|scope| scope.spawn(|| tensor.sqr().map(drop)).join().unwrap())
    });
    let Some((ended, text)) = outcome else { return };
    assert!(
        !ended && text.contains("uses memory that another stream's kernel may be using"),
        "{text}"
    );
}

/// Statistics of gradients taken in a stream that does not wait for the tables it reads.
#[test]
fn grad_stats_without_order_are_noticed() {
    let outcome = alone("strict::grad_stats_without_order_are_noticed", || {
        let device = Device::new_cuda_with_stream(0)?;
        let stream = device.as_cuda_device()?.cuda_stream();
        let slice = |tensor: &Tensor| DeviceSlice::try_from(tensor).map_err(Error::wrap);
        let tensor = || Tensor::ones(9, DType::F32, &device);
        let tensors = [tensor()?, tensor()?];
        let (weight, grad) = (slice(&tensors[0])?, slice(&tensors[1])?);
        let other =
            Gpu::on(stream.context().new_stream().map_err(Error::wrap)?).map_err(Error::wrap)?;
        let gpu = Gpu::on(stream).map_err(Error::wrap)?;
        let groups = [ParamGroup::new(SgdHyper::default(), 0..1)];
        let sgd = CudaDeviceOptimizer::new(gpu.clone(), groups, HalfWeights::Master);
        let mut sgd = sgd.map_err(Error::wrap)?;
        let ctl = StepCtl { clip: Some(Clip::norm(1.0)), ..StepCtl::PLAIN };
        let params = [DeviceParam::new(weight, Some(grad))];
        // SAFETY: tensors of candle's stream, which is the optimizer's.
        let lent = unsafe { DeviceParams::new(&gpu, &params) };
        let applied = sgd.step_on_device(lent, &ctl).map_err(Error::wrap)?;
        assert_eq!(applied, Applied::Applied);
        let stats = sgd.grad_stats(&ctl).map_err(Error::wrap)?.expect("a step clips by norm");
        // SAFETY: none: the other stream does not come behind the optimizer's.
        unsafe { stats.take(&[(0, grad)], &other) }.map_err(Error::wrap)
    });
    let Some((ended, text)) = outcome else { return };
    let noticed =
        "kernel of a job uses memory that another stream's copy to the device may be using";
    assert!(!ended && text.contains(noticed), "{text}");
}

#[test]
fn with_a_stream_of_its_own_threads_may_share_a_tensor() -> Result<()> {
    let tensor = Tensor::ones(3, DType::F32, &Device::new_cuda_with_stream(0)?)?.exp()?;
    let twice = std::thread::scope(|scope| scope.spawn(|| tensor.sqr()).join().unwrap())?;
    drop(tensor);
    assert_eq!(twice.to_vec1::<f32>()?, [1_f32.exp().powi(2); 3]);
    Ok(())
}

#[test]
fn threads_that_wait_for_the_device_may_share_a_tensor() -> Result<()> {
    let device = Device::new_cuda(0)?;
    let context = device.as_cuda_device()?.cuda_stream().context().clone();
    let wait = || context.synchronize().map_err(Error::wrap);
    let tensor = Tensor::ones(3, DType::F32, &device)?.exp()?;
    let use_it = || {
        wait()?;
        tensor.sqr()?.to_vec1::<f32>()
    };
    let twice = std::thread::scope(|scope| scope.spawn(use_it).join().unwrap())?;
    assert_eq!(twice, [1_f32.exp().powi(2); 3]);
    // Before this thread's stream frees it.
    wait()
}

#[test]
fn a_product_of_types_it_has_not_is_refused() {
    let outcome = alone("strict::a_product_of_types_it_has_not_is_refused", || {
        candle_core::cuda_backend::set_gemm_reduced_precision_f16(true);
        let matrix = Tensor::ones((3, 3), DType::F16, &Device::new_cuda(0)?)?;
        matrix.matmul(&matrix).map(drop)
    });
    let Some((ended, text)) = outcome else { return };
    assert!(
        !ended && text.contains("cublasGemmStridedBatchedEx of types that the fake has not"),
        "{text}"
    );
}

/// Launches `kernel` of a source, compiled as candle's are, on one block, and gives what it left of
/// 0 to 63.
fn launch(source: &str, block_dim: (u32, u32, u32), shift: u64) -> Result<Vec<f32>> {
    let folder = Path::new(env!("CARGO_TARGET_TMPDIR")).join(std::process::id().to_string());
    fs::create_dir_all(&folder)?;
    fs::write(folder.join("kernel.cu"), format!("#include \"cuda_fp16.h\"\n{source}"))?;
    let mut nvcc = Command::new(env::var_os("NVCC").unwrap());
    nvcc.arg("--ptx").arg("--output-directory").arg(&folder).arg(folder.join("kernel.cu"));
    assert!(nvcc.status()?.success());
    let ptx = fs::read_to_string(folder.join("kernel.ptx"))?;

    let device = Device::new_cuda_with_stream(0)?;
    let device = device.as_cuda_device()?;
    let memory = device.clone_htod(&(0..64).map(|x| x as f32).collect::<Vec<_>>())?;
    let function = device.get_or_load_custom_func("kernel", "of a test", &ptx)?;
    let address = memory.device_ptr(&device.cuda_stream()).0 + shift;
    let mut builder = function.builder();
    builder.arg(&address);
    let config = LaunchConfig { grid_dim: (1, 1, 1), block_dim, shared_mem_bytes: 256 };
    // SAFETY: the kernels below touch 64 numbers at most, or end the process before they do.
    unsafe { builder.launch(config) }.map_err(Error::wrap)?;
    let left = device.clone_dtoh(&memory);
    fs::remove_dir_all(folder)?;
    left
}

const REVERSE: &str = r#"extern "C" __global__ void kernel(float *x) {
  extern __shared__ float all[];
  int i = (threadIdx.z * blockDim.y + threadIdx.y) * blockDim.x + threadIdx.x;
  all[i] = x[i];
  __syncthreads();
  x[i] = all[63 - i];
}"#;
const BARRIER: &str = r#"extern "C" __global__ void kernel(float *x) {
  if (threadIdx.x == 0) __syncthreads();
  else *x = __shfl_xor_sync(0xffffffff, *x, 1);
}"#;

#[test]
fn threads_of_a_block_wait_for_one_another() -> Result<()> {
    let reversed: Vec<f32> = (0..64).rev().map(|x| x as f32).collect();
    assert_eq!(launch(REVERSE, (64, 1, 1), 0)?, reversed);
    assert_eq!(launch(REVERSE, (4, 8, 2), 0)?, reversed);
    Ok(())
}

#[test]
fn a_barrier_that_a_thread_never_reaches_is_a_fault() {
    let outcome = alone("strict::a_barrier_that_a_thread_never_reaches_is_a_fault", || {
        launch(BARRIER, (32, 1, 1), 0).map(drop)
    });
    let Some((ended, text)) = outcome else { return };
    assert!(!ended && text.contains("kernel: a barrier that not all threads reach"), "{text}");
}

#[test]
fn an_address_that_is_no_memory_is_a_fault() {
    let outcome = alone("strict::an_address_that_is_no_memory_is_a_fault", || {
        launch(REVERSE, (64, 1, 1), 1 << 20).map(drop)
    });
    let Some((ended, text)) = outcome else { return };
    assert!(!ended && text.contains("kernel is given an address that is no memory"), "{text}");
}
