//! Matrix products, by cuBLAS in candle's stream.

use candle_core::cuda_backend::cudarc::cublas::{result, sys};
use candle_core::{DType, Result, bail};

use super::Kernels;
use crate::allows_tf32;

/// A batch of row-major matrices.
#[derive(Clone, Copy, Debug)]
pub(super) struct Matrices {
    /// Address of the first matrix.
    pub(super) at: u64,
    pub(super) dtype: DType,
    /// Stride between matrices, in elements; 0 if all are the same.
    pub(super) step: usize,
    /// Stride between rows, in elements, if they are not adjacent.
    pub(super) line: Option<usize>,
    /// Whether each matrix is to be transposed.
    pub(super) transposed: bool,
}

impl Matrices {
    /// Matrices that are `step` elements apart.
    pub(super) const fn new(at: u64, dtype: DType, step: usize) -> Self {
        Self { at, dtype, step, line: None, transposed: false }
    }

    pub(super) const fn t(self) -> Self {
        Self { transposed: true, ..self }
    }

    fn operation(self) -> sys::cublasOperation_t {
        match self.transposed {
            true => sys::cublasOperation_t::CUBLAS_OP_T,
            false => sys::cublasOperation_t::CUBLAS_OP_N,
        }
    }
}

/// Factors for the product itself.
pub(super) const ONE: [f32; 2] = [1.0, 0.0];

impl Kernels {
    /// Computes `c = alpha * a * b + beta * c` for `count` matrices: `a` is `[m, k]`, `b` `[k, n]`,
    /// `c` `[m, n]`. Sums are in `f32`, rounded to the type of `c`; `f32` factors are rounded to
    /// TF32 first if that is enabled.
    ///
    /// # Safety
    ///
    /// The addresses must be those of contiguous tensors with all these matrices, which are dropped
    /// after this returns, and `c` apart from the others.
    pub(super) unsafe fn multiply(
        &self,
        count: usize,
        [m, k, n]: [usize; 3],
        [a, b, c]: [Matrices; 3],
        [alpha, beta]: [f32; 2],
    ) -> Result<()> {
        let narrow = |extent: usize| i32::try_from(extent).map_err(candle_core::Error::wrap);
        // cuBLAS' matrices are column-major: it sees the transposes, also of the product.
        let leading = |of: Matrices, columns, rows| {
            narrow(of.line.unwrap_or(if of.transposed { rows } else { columns }))
        };
        let [of_a, of_b, of_c] = [leading(a, k, m)?, leading(b, n, k)?, leading(c, n, m)?];
        let [rows, depth, columns, count] = [narrow(m)?, narrow(k)?, narrow(n)?, narrow(count)?];
        self.bind()?;
        let blas = self.device.cublas_handle();
        let compute = match (a.dtype, b.dtype) {
            (DType::F32, DType::F32) if allows_tf32() => {
                sys::cublasComputeType_t::CUBLAS_COMPUTE_32F_FAST_TF32
            }
            _ => sys::cublasComputeType_t::CUBLAS_COMPUTE_32F,
        };
        // SAFETY: the caller vouches for the addresses; factors are on the host, where cuBLAS looks
        // for them by default, and read before it returns; the handle works in candle's stream,
        // whose context is current.
        let done = unsafe {
            result::gemm_strided_batched_ex(
                *blas.handle(),
                b.operation(),
                a.operation(),
                columns,
                rows,
                depth,
                (&raw const alpha).cast(),
                b.at as *const _,
                type_of(b.dtype)?,
                of_b,
                b.step as i64,
                a.at as *const _,
                type_of(a.dtype)?,
                of_a,
                a.step as i64,
                (&raw const beta).cast(),
                c.at as *mut _,
                type_of(c.dtype)?,
                of_c,
                c.step as i64,
                count,
                compute,
                sys::cublasGemmAlgo_t::CUBLAS_GEMM_DEFAULT,
            )
        };
        done.map_err(candle_core::Error::wrap)
    }
}

fn type_of(dtype: DType) -> Result<sys::cudaDataType> {
    Ok(match dtype {
        DType::F32 => sys::cudaDataType::CUDA_R_32F,
        DType::F16 => sys::cudaDataType::CUDA_R_16F,
        DType::BF16 => sys::cudaDataType::CUDA_R_16BF,
        other => bail!("cuBLAS: no product of {other:?}"),
    })
}
