//! The operators as CUDA kernels, for tensors on a GPU: faster than compositions of candle's
//! operators.
//!
//! `ops.cu`, `dropout.cu`, `images.cu`, `channels_last.cu`, `rows.cu` and `attention.cu` contain
//! the kernels; the modules of this folder launch them, with the structs of `jobs.rs`, and
//! `operators.rs` is the crate's trait over them. Memory belongs to candle, which frees it in
//! stream order; all launches are in that stream, with their arguments by value, so nothing is
//! copied from the host, and the host never waits. Matrix products use cuBLAS, through candle's
//! handle; those in half precision with a bias use cuBLASLt (`biased.rs`); convolutions use cuDNN
//! if it can be loaded (`cudnn.rs`).
//!
//! A result is computed first, then added to candle's graph with its backward pass (`node.rs`).
//!
//! ```no_run
//! use std::sync::Arc;
//!
//! use candle_core::Device;
//! use candle_ops::{Context, cuda::Kernels};
//!
//! // One stream for all threads.
//! let device = Device::new_cuda_with_stream(0)?;
//! let kernels = Arc::new(Kernels::new(device.as_cuda_device()?)?);
//! let mut context = Context::new(0).with_kernels(kernels);
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```
//!
//! Invariant: an address belongs to a tensor that is alive when the launch is put into the stream.

#![expect(unsafe_code, reason = "launches kernels over tensors' addresses")]

mod attention;
mod biased;
mod channels_last;
mod conv;
mod cudnn;
mod dropout;
mod elementwise;
mod embedding;
mod fused_attention;
mod jobs;
mod linear;
mod matmul;
mod node;
mod norm;
mod operators;
mod pool;
mod rows;

use std::any::Any;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use candle_core::backend::{BackendDevice, BackendStorage};
use candle_core::cuda_backend::cudarc::cublaslt::CudaBlasLT;
use candle_core::cuda_backend::cudarc::driver::DevicePtr;
use candle_core::cuda_backend::{CudaDType, CudaStorage};
use candle_core::op::BackpropOp;
use candle_core::{CudaDevice, DType, Device, Result, Shape, Storage, Tensor, bail};
use half::{bf16, f16};

use self::cudnn::Cudnn;
use self::jobs::Job;
use crate::Context;
use crate::error::{self, Error};
use crate::kernels::DeviceKernels;

pub use cuda_rt::CudaError;

/// The operators that have kernels, for a report.
pub const NAMES: &str = "conv2d, linear, batch_norm, relu, add, add_relu, \
     max_pool2d, global_avg_pool, layer_norm, softmax, gelu, self_attention, scaled_dot_product_attention, \
     cross_entropy, embedding, normalize";

/// The kernels, compiled for a device, with its stream. Used by a [`Context`].
#[derive(Debug)]
pub struct Kernels {
    /// cuDNN for convolutions, or the reason why it is not used.
    cudnn: error::Result<Cudnn>,
    pub(super) device: CudaDevice,
    /// The programs for `f32`, `f16`, `bf16`.
    programs: [cuda_rt::Kernels; 3],
    /// Counter of finished blocks: zero between launches, which run one after another.
    arrived: Tensor,
    /// The last gradient of a loss.
    loss_gradient: Tensor,
    /// `None` if it cannot be used.
    lt: Option<CudaBlasLT>,
    /// Whether the device has tensor cores for half precision as used by the kernels, and `bf16`:
    /// from compute capability 8.0 on.
    tensor_cores: bool,
    /// Number of elements of the largest tensor that was too large for the kernels; 0: none.
    too_large: AtomicUsize,
}

/// Returns an error unless a device has `bf16`.
pub(crate) fn check_bf16(device: &CudaDevice) -> Result<()> {
    match compute_capability(device)? {
        (8.., _) => Ok(()),
        (major, minor) => bail!(
            "bf16 needs a GPU of compute capability 8.0 or later, this one has {major}.{minor}: use f16"
        ),
    }
}

fn compute_capability(device: &CudaDevice) -> Result<(i32, i32)> {
    device.cuda_stream().context().compute_capability().map_err(candle_core::Error::wrap)
}

/// Index of the program for a type.
const fn program(dtype: DType) -> Option<usize> {
    match dtype {
        DType::F32 => Some(0),
        DType::F16 => Some(1),
        DType::BF16 => Some(2),
        _ => None,
    }
}

/// The macros of the three programs.
fn macros() -> [Vec<String>; 3] {
    ["F32", "F16", "Bf16"].map(|name| vec![format!("-DTYPE={name}")])
}

const SOURCE: &str = concat!(
    include_str!("ops.cu"),
    include_str!("dropout.cu"),
    include_str!("images.cu"),
    include_str!("channels_last.cu"),
    include_str!("rows.cu"),
    include_str!("attention.cu"),
);

macro_rules! kernels {
    ($($name:ident)*) => {
        /// The kernels of each program, by index.
        #[derive(Clone, Copy, Debug)]
        #[expect(non_camel_case_types, reason = "their names in the source")]
        enum Kernel {
            $($name,)*
        }

        /// The names of the kernels.
        const KERNELS: &[&str] = &[$(stringify!($name)),*];
    };
}
kernels! {
    relu
    add
    add_relu
    add_to_f32
    add_rows
    cast_from_f32
    cast_to_f32
    relu_backward
    gelu
    gelu_backward
    scale_bytes
    im2col
    col2im
    add_bias
    moments
    normalize
    norm_sums
    norm_backward
    max_pool
    max_pool_backward
    mean_pool
    mean_pool_backward
    transpose
    moments_last
    normalize_last
    fold_parts_last
    norm_sums_last
    norm_backward_last
    track
    max_pool_last
    max_pool_last_backward
    mean_pool_last
    mean_pool_last_backward
    softmax
    softmax_backward
    layer_norm
    layer_norm_backward
    layer_norm_wide
    layer_norm_wide_backward
    column_sums
    gelu_backward_sums
    cast_from_f32_sums
    fold_columns
    cross_entropy
    cross_entropy_backward
    cross_entropy_wide
    cross_entropy_wide_backward
    embedding
    ends_of_ids
    embedding_backward
    dropout
    attention_dropped
    attention_hidden
    attention
    attention_masked
    attention_backward
    attention_backward_masked
    attention_backward_keys
    attention_backward_keys_masked
}

impl Context {
    /// Runs operators on a GPU by these kernels where available, instead of by compositions of
    /// candle's operators.
    #[must_use]
    pub fn with_kernels(mut self, kernels: Arc<Kernels>) -> Self {
        self.set_kernels(Some(kernels));
        self
    }

    /// Sets the kernels from now on, or uses compositions.
    pub fn set_kernels(&mut self, kernels: Option<Arc<Kernels>>) {
        let dynamic = |kernels: Arc<Kernels>| -> Arc<dyn DeviceKernels> { kernels };
        self.kernels = kernels.map(dynamic);
    }

    /// The kernels in use.
    pub fn kernels(&self) -> Option<&Kernels> {
        let kernels: &dyn Any = &**self.kernels.as_ref()?;
        kernels.downcast_ref()
    }
}

impl Kernels {
    /// Compiles the kernels for a device, or loads them from the cubin cache; and loads cuDNN, if
    /// available, for convolutions ([`cudnn`](Self::cudnn)).
    ///
    /// # Errors
    ///
    /// [`Error::Cuda`]: NVRTC or the driver cannot be loaded or fails; [`Error::Candle`].
    pub fn new(device: &CudaDevice) -> error::Result<Self> {
        Self::with_cudnn(device, Cudnn::open(device))
    }

    /// Version and path of the cuDNN used for convolutions in `f16`, `bf16` and TF32; or the reason
    /// why none is used, in which case convolutions use im2col and a product. `$CUDNN_LIBRARY` is
    /// the path to load; `off`, or a path that does not exist, disables cuDNN.
    ///
    /// # Errors
    ///
    /// [`Error::Cuda`]: cuDNN cannot be loaded; [`Error::Cudnn`]: it fails; [`Error::Candle`].
    pub fn cudnn(&self) -> std::result::Result<&str, &Error> {
        self.cudnn.as_ref().map(Cudnn::name)
    }

    fn with_cudnn(device: &CudaDevice, cudnn: error::Result<Cudnn>) -> error::Result<Self> {
        let build = |macros: Vec<String>| {
            cuda_rt::Kernels::new(device.cuda_stream(), SOURCE, &macros, KERNELS)
        };
        let [f32, f16, bf16] = macros().map(build);
        let programs = [f32?, f16?, bf16?];
        let arrived = Tensor::zeros(1, DType::U32, &Device::Cuda(device.clone()))?;
        let loss_gradient = Tensor::ones(1, DType::F32, &Device::Cuda(device.clone()))?;
        let lt = biased::library(&device.cuda_stream());
        let tensor_cores = compute_capability(device)?.0 >= 8;
        let (device, too_large) = (device.clone(), AtomicUsize::new(0));
        Ok(Self { cudnn, device, programs, arrived, loss_gradient, lt, tensor_cores, too_large })
    }

    /// Number of elements of the largest tensor so far that was too large for the kernels, whose
    /// indices are 32 bits wide: its operator was a composition of candle's, which is slower and
    /// needs more memory. `None` if there was none.
    pub fn too_large(&self) -> Option<usize> {
        // Relaxed: a number for a report, which orders nothing.
        Some(self.too_large.load(Ordering::Relaxed)).filter(|elements| *elements > 0)
    }

    /// Whether the kernels' indices, of 32 bits, suffice for a tensor.
    fn fits(&self, elements: usize) -> bool {
        let fits = elements < 1 << 31;
        if !fits {
            // Relaxed: as in `too_large`.
            self.too_large.fetch_max(elements, Ordering::Relaxed);
        }
        fits
    }

    /// Launches a kernel for elements of `dtype` in the stream.
    ///
    /// # Safety
    ///
    /// `job` must be of the kernel's type; its addresses those of contiguous tensors, of the types
    /// and extents that the kernel expects, that are alive until this returns.
    unsafe fn launch(
        &self,
        dtype: DType,
        kernel: Kernel,
        blocks: usize,
        job: &impl Job,
    ) -> Result<()> {
        let Some(program) = program(dtype) else { bail!("{kernel:?}: no kernel for {dtype:?}") };
        if dtype == DType::BF16 && !self.tensor_cores {
            check_bf16(&self.device)?;
        }
        let blocks = u32::try_from(blocks.max(1)).map_err(candle_core::Error::wrap)?;
        // SAFETY: the caller vouches for the job; candle frees its tensors in order of the stream.
        unsafe { self.programs[program].launch(kernel as usize, blocks, job.words()) }
            .map_err(candle_core::Error::wrap)
    }

    /// Makes the device's context current, for libraries that work in the current one.
    fn bind(&self) -> Result<()> {
        let stream = self.device.cuda_stream();
        stream.context().bind_to_thread().map_err(candle_core::Error::wrap)
    }

    /// Uninitialized memory for a tensor.
    fn empty(&self, shape: impl Into<Shape>, dtype: DType) -> Result<Output> {
        let shape = shape.into();
        // SAFETY: each caller's kernel writes all of it before it is read.
        let storage = unsafe { self.device.alloc_uninit(&shape, dtype) }?;
        let at = start(&storage)?;
        Ok(Output { storage, shape, at })
    }

    /// Address of the first element of a contiguous tensor on the kernels' device.
    fn address(&self, tensor: &Tensor) -> Result<u64> {
        let (storage, layout) = tensor.storage_and_layout();
        let (Storage::Cuda(storage), Some((first, _))) = (&*storage, layout.contiguous_offsets())
        else {
            bail!("expected a contiguous tensor on a GPU, got {tensor:?}")
        };
        if storage.device().id() != self.device.id() {
            bail!("expected a tensor on {:?}, got one on another device or stream", self.device)
        }
        Ok(start(storage)? + (first * tensor.dtype().size_in_bytes()) as u64)
    }
}

/// Checks that all tensors have the type of `x`.
fn one_type<const N: usize>(name: &str, x: &Tensor, others: [Option<&Tensor>; N]) -> Result<()> {
    match others.into_iter().flatten().find(|other| other.dtype() != x.dtype()) {
        Some(other) => bail!("{name}: {:?} beside {:?}", x.dtype(), other.dtype()),
        None => Ok(()),
    }
}

/// Memory that a kernel writes, and its address.
#[derive(Debug)]
struct Output {
    storage: CudaStorage,
    shape: Shape,
    at: u64,
}

impl Output {
    /// The memory as a tensor outside of any graph.
    fn tensor(self) -> Tensor {
        Tensor::from_storage(Storage::Cuda(self.storage), self.shape, BackpropOp::none(), false)
    }
}

fn start(storage: &CudaStorage) -> Result<u64> {
    fn of<T: CudaDType>(storage: &CudaStorage) -> Result<u64> {
        let slice = storage.as_cuda_slice::<T>()?;
        Ok(slice.device_ptr(slice.stream()).0)
    }
    match storage.dtype() {
        DType::F32 => of::<f32>(storage),
        DType::F16 => of::<f16>(storage),
        DType::BF16 => of::<bf16>(storage),
        DType::F64 => of::<f64>(storage),
        DType::U8 => of::<u8>(storage),
        DType::U32 => of::<u32>(storage),
        DType::I64 => of::<i64>(storage),
        other => bail!("no kernel for {other:?}"),
    }
}

/// Number of blocks for this many parts, with one warp per part.
fn blocks_of_warps(parts: usize) -> usize {
    parts.div_ceil(THREADS / 32).min(1 << 16)
}

/// Number of blocks for these elements, of which each thread processes a few adjacent ones at a
/// time.
fn blocks_of_threads(elements: usize) -> usize {
    elements.div_ceil(8 * THREADS).min(1 << 12)
}

/// Number of chunks of rows of this length.
fn chunks_of(rows: usize, length: usize) -> usize {
    rows * length.div_ceil(CHUNK)
}

/// The same as in `device.h` and `ops.cu`; and the columns of a block that sums parts, as in
/// `channels_last.cu`.
const THREADS: usize = 256;
const CHUNK: usize = 1024;
const FOLDED: usize = 8;

#[cfg(test)]
mod bytes_tests;
#[cfg(test)]
mod channels_last_tests;
#[cfg(test)]
mod composed_tests;
#[cfg(test)]
mod cudnn_tests;
#[cfg(test)]
mod dropout_tests;
#[cfg(test)]
mod fused_attention_tests;
#[cfg(test)]
mod limits_tests;
#[cfg(test)]
mod machine_code_tests;
#[cfg(test)]
pub(super) mod tests;
#[cfg(test)]
mod transformer_tests;
