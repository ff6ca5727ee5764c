//! What the fake GPU has not, and what a GPU would silently do wrong, ends the process with a word.

use std::env;
use std::process::Command;

use candle_core::{DType, Device, Error, Result, Tensor};

/// What a process says that does only this, and whether it came to its end.
fn alone(test: &str, body: impl FnOnce() -> Result<()>) -> Option<(bool, String)> {
    if env::var_os("ALONE").is_some() {
        body().unwrap();
        return None;
    }
    let mut command = Command::new(env::current_exe().unwrap());
    let output = command.args([test, "--exact", "--nocapture"]).env("ALONE", "1").output().unwrap();
    let text = [output.stdout, output.stderr].concat();
    Some((output.status.success(), String::from_utf8_lossy(&text).into_owned()))
}

#[test]
fn a_kernel_that_is_not_there_is_named() {
    let outcome = alone("a_kernel_that_is_not_there_is_named", || {
        let error = Tensor::ones(3, DType::I64, &Device::new_cuda(0)?)?.exp().unwrap_err();
        assert!(error.to_string().contains("NOT_FOUND"), "{error}");
        Ok(())
    });
    let Some((ended, text)) = outcome else { return };
    assert!(ended && text.contains("fake GPU: no kernel uexp_i64 in "), "{text}");
}

#[test]
fn a_function_that_is_not_there_is_named() {
    let outcome = alone("a_function_that_is_not_there_is_named", || {
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
    let outcome = alone("a_tensor_used_by_two_threads_without_order_is_noticed", || {
        let tensor = Tensor::ones(3, DType::F32, &Device::new_cuda(0)?)?.exp()?;
        std::thread::scope(|scope| scope.spawn(|| tensor.sqr().map(drop)).join().unwrap())
    });
    let Some((ended, text)) = outcome else { return };
    assert!(
        !ended && text.contains("uses memory that another stream's kernel may be using"),
        "{text}"
    );
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
    let outcome = alone("a_product_of_types_it_has_not_is_refused", || {
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
