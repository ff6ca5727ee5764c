//! Products of half-precision matrices with a bias, by cuBLASLt in candle's stream: the bias is
//! added before the product is rounded, without a separate pass.
//!
//! cuBLASLt's GELU is an approximation by tanh, whose error compared with [`gelu`](crate::gelu) is
//! larger than a half-precision type's rounding, so this crate has its own GELU kernel. cuBLASLt
//! selects the algorithm only by the sizes, so that a captured step gives bitwise the same results.

use std::sync::Arc;

use candle_core::cuda_backend::cudarc::cublaslt::result::CublasError;
use candle_core::cuda_backend::cudarc::cublaslt::{
    CudaBlasLT, Matmul, MatmulConfig, MatmulShared, sys,
};
use candle_core::cuda_backend::cudarc::driver::sys::CUdeviceptr;
use candle_core::cuda_backend::cudarc::driver::{
    CudaStream, DevicePtr, DevicePtrMut, DeviceSlice, SyncOnDrop,
};
use candle_core::{DType, Result};
use half::{bf16, f16};

use super::Kernels;
use crate::sizes::LinearSizes;

/// cuBLASLt and its workspace; `None` if either fails.
pub(super) fn library(stream: &Arc<CudaStream>) -> Option<CudaBlasLT> {
    // SAFETY: it is not read. cudarc panics if there is no memory for its workspace, of at most
    // this size.
    drop(unsafe { stream.alloc::<u8>(32 << 20) }.ok()?);
    CudaBlasLT::new(Arc::clone(stream)).ok()
}

/// Memory in candle's stream.
struct Elements<'a> {
    at: u64,
    count: usize,
    stream: &'a Arc<CudaStream>,
}

impl<T> DeviceSlice<T> for Elements<'_> {
    fn len(&self) -> usize {
        self.count
    }

    fn stream(&self) -> &Arc<CudaStream> {
        self.stream
    }
}

impl<T> DevicePtr<T> for Elements<'_> {
    fn device_ptr<'a>(&'a self, _: &'a CudaStream) -> (CUdeviceptr, SyncOnDrop<'a>) {
        (self.at, SyncOnDrop::Sync(None))
    }
}

impl<T> DevicePtrMut<T> for Elements<'_> {
    fn device_ptr_mut<'a>(&'a mut self, _: &'a CudaStream) -> (CUdeviceptr, SyncOnDrop<'a>) {
        (self.at, SyncOnDrop::Sync(None))
    }
}

impl Kernels {
    /// Computes `y = x * weight^T + bias` for half-precision matrices, summed in `f32` and rounded
    /// once. Returns false, without a launch, if cuBLASLt does not support it.
    ///
    /// # Safety
    ///
    /// The addresses must be those of contiguous tensors of these extents, which are dropped after
    /// this returns, and the result apart from the others.
    pub(super) unsafe fn multiply_biased(
        &self,
        dtype: DType,
        sizes: LinearSizes,
        addresses: [u64; 4],
    ) -> Result<bool> {
        let Some(lt) = &self.lt else { return Ok(false) };
        // Requirements of cuBLASLt.
        if addresses.iter().any(|at| at % 256 != 0) {
            return Ok(false);
        }
        self.bind()?;
        let done = match dtype {
            // SAFETY: the caller's.
            DType::F16 => unsafe { multiply::<f16>(lt, sizes, addresses) },
            // SAFETY: the caller's.
            DType::BF16 => unsafe { multiply::<bf16>(lt, sizes, addresses) },
            _ => return Ok(false),
        };
        match done {
            Ok(()) => Ok(true),
            Err(CublasError(sys::cublasStatus_t::CUBLAS_STATUS_NOT_SUPPORTED)) => Ok(false),
            Err(e) => Err(candle_core::Error::wrap(e)),
        }
    }
}

/// # Safety
///
/// As [`Kernels::multiply_biased`], for elements of type `T`.
unsafe fn multiply<T>(
    lt: &CudaBlasLT,
    LinearSizes { rows, inputs, outputs }: LinearSizes,
    [x, weight, bias, y]: [u64; 4],
) -> std::result::Result<(), CublasError>
where
    CudaBlasLT: Matmul<T>,
{
    let stream = MatmulShared::stream(lt);
    let of = |at: u64, count: usize| Elements { at, count, stream };
    // cuBLASLt's matrices are column-major: it sees the transposes, also of the product, whose rows
    // have the biases.
    let config = MatmulConfig {
        transa: true,
        transb: false,
        transc: false,
        m: outputs as u64,
        n: rows as u64,
        k: inputs as u64,
        alpha: 1.0,
        lda: inputs as i64,
        ldb: inputs as i64,
        beta: 0.0,
        ldc: outputs as i64,
        stride_a: None,
        stride_b: None,
        stride_c: None,
        stride_bias: None,
        batch_size: None,
    };
    let (a, b) = (of(weight, outputs * inputs), of(x, rows * inputs));
    let (mut y, bias) = (of(y, rows * outputs), of(bias, outputs));
    // SAFETY: the caller vouches for the addresses; the factors are on the host and read before it
    // returns.
    unsafe { lt.matmul(config, &a, &b, &mut y, Some(&bias), None) }
}
