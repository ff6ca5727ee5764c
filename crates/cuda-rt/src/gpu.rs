//! A GPU through cudarc: memory, copies and launches on one stream, kernels from NVRTC or the
//! cache.

#![expect(unsafe_code, reason = "calls the driver with raw handles and addresses")]

use std::collections::HashMap;
use std::ffi::{CString, c_void};
use std::ops::Range;
use std::sync::{Arc, Mutex, OnceLock, PoisonError};

use cudarc::driver::sys::{self, CUdevice_attribute, CUfunction, CUstreamCaptureStatus};
use cudarc::driver::{CudaContext, CudaStream, DriverError, result};

use crate::cache::{self, Entry, Version};
use crate::device::Device;
use crate::driver::{self, failed, loadable};
use crate::error::{CudaError, Result};
use crate::nvrtc::Nvrtc;
use crate::staging::{LateRead, Staging};

/// A device and one of its streams, which runs all operations in order.
#[derive(Clone, Debug)]
pub struct Gpu {
    stream: Arc<CudaStream>,
    modules: Arc<Mutex<HashMap<u64, Module>>>,
    cached: Arc<KernelCache>,
    staging: Arc<Staging>,
    readback: Arc<Staging>,
    /// Whether memory is allocated from the pool of the stream.
    pooled: bool,
    /// For example 90 for compute capability 9.0.
    arch: i32,
    processors: u32,
}

/// Device memory, freed in order of its stream.
#[derive(Debug)]
pub struct Memory {
    address: u64,
    bytes: usize,
    pooled: bool,
    stream: Arc<CudaStream>,
}

/// A kernel, valid as long as a [`Gpu`] of its device exists.
#[derive(Clone, Copy, Debug)]
pub struct Kernel(CUfunction);

// SAFETY: a handle of the driver may be used from any thread.
unsafe impl Send for Kernel {}
// SAFETY: as above; a launch does not change it.
unsafe impl Sync for Kernel {}

/// A linked list of kernels by key, which only grows and so is read without a lock.
#[derive(Debug, Default)]
struct KernelCache(OnceLock<Box<CachedKernel>>);

#[derive(Debug)]
struct CachedKernel {
    key: (&'static str, usize),
    kernel: Kernel,
    next: KernelCache,
}

/// A loaded module. It is never unloaded, since a graph may contain its functions.
#[derive(Clone, Copy, Debug)]
struct Module(sys::CUmodule);

// SAFETY: a handle of the driver may be used from any thread.
unsafe impl Send for Module {}

impl Gpu {
    /// Opens device `ordinal` with its primary context, which PyTorch and candle use, too, and the
    /// default stream.
    ///
    /// # Errors
    ///
    /// [`CudaError::NotFound`] or [`CudaError::MissingSymbol`] without a driver or with an old one,
    /// [`CudaError::Driver`] if there is no such device.
    pub fn new(ordinal: usize) -> Result<Self> {
        Self::on(Self::context(ordinal)?.default_stream())
    }

    /// Uses a stream that the caller owns, for example PyTorch's current one.
    ///
    /// # Errors
    ///
    /// As [`new`](Self::new).
    ///
    /// # Safety
    ///
    /// `stream` must be a `CUstream` of this device's primary context, or null for its default
    /// stream, and outlive this value, its clones and all memory made through them.
    pub unsafe fn with_stream(ordinal: usize, stream: *mut c_void) -> Result<Self> {
        let context = Self::context(ordinal)?;
        // SAFETY: the caller guarantees the stream.
        Self::on(unsafe { context.wrap_borrowed_stream(stream.cast()) })
    }

    /// Uses a stream of cudarc, for example candle's.
    ///
    /// # Errors
    ///
    /// As [`new`](Self::new).
    pub fn on(stream: Arc<CudaStream>) -> Result<Self> {
        driver::load()?;
        let context = stream.context();
        let attribute = |which| context.attribute(which).map_err(failed("read a device attribute"));
        let major = attribute(CUdevice_attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR)?;
        let minor = attribute(CUdevice_attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR)?;
        let processors = attribute(CUdevice_attribute::CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT)?;
        let processors = u32::try_from(processors).unwrap_or(1).max(1);
        let (modules, cached) = Default::default();
        let [staging, readback] = [(); 2].map(|()| Arc::new(Staging::new(stream.clone())));
        let (arch, pooled) = (10 * major + minor, stream.context().has_async_alloc());
        Ok(Self { stream, modules, cached, staging, readback, pooled, arch, processors })
    }

    /// Has the device's memory pool keep freed memory for later allocations, of this process and
    /// this device, instead of returning it to the system at each wait of the host
    /// (`CU_MEMPOOL_ATTR_RELEASE_THRESHOLD`). Does nothing if the device has no pool.
    ///
    /// # Errors
    ///
    /// [`CudaError::Driver`].
    pub fn keep_freed_memory(&self) -> Result<()> {
        if !self.pooled {
            return Ok(());
        }
        self.bind()?;
        let during = failed("set the release threshold of the memory pool");
        let mut pool = std::ptr::null_mut();
        // SAFETY: a device of the driver's, and a place for its pool.
        unsafe { sys::cuDeviceGetDefaultMemPool(&raw mut pool, self.stream.context().cu_device()) }
            .result()
            .map_err(&during)?;
        let mut threshold = u64::MAX;
        let attribute = sys::CUmemPool_attribute::CU_MEMPOOL_ATTR_RELEASE_THRESHOLD;
        // SAFETY: that pool; the attribute is a `cuuint64_t` (cuda.h of CUDA 11.2 and later).
        unsafe { sys::cuMemPoolSetAttribute(pool, attribute, (&raw mut threshold).cast()) }
            .result()
            .map_err(during)
    }

    /// Enqueues a copy of device memory to pinned memory, whose bytes are there once it has run.
    /// The stream must not be capturing.
    ///
    /// # Errors
    ///
    /// [`CudaError::Driver`].
    ///
    /// # Safety
    ///
    /// `address` must be valid for `bytes` bytes until the copy has run in the stream.
    pub unsafe fn read_later(&self, address: u64, bytes: usize) -> Result<LateRead> {
        self.bind()?;
        // SAFETY: guaranteed by the caller.
        unsafe { self.readback.read_later(address, bytes) }.map_err(failed("copy from the device"))
    }

    /// Enqueues a copy of host memory to a device address, by pinned memory: the bytes may change
    /// once this returns.
    ///
    /// # Errors
    ///
    /// [`CudaError::Capturing`]; [`CudaError::Driver`].
    ///
    /// # Safety
    ///
    /// `address` must be valid for as many bytes until the copy has run in the stream.
    pub unsafe fn write_at(&self, address: u64, bytes: &[u8]) -> Result<()> {
        if bytes.is_empty() {
            return Ok(());
        }
        self.bind()?;
        // SAFETY: the stream is alive.
        let capturing = unsafe { result::stream::is_capturing(self.stream.cu_stream()) };
        let status = capturing.map_err(failed("query the capture status of the stream"))?;
        if status != CUstreamCaptureStatus::CU_STREAM_CAPTURE_STATUS_NONE {
            return Err(CudaError::Capturing);
        }
        // SAFETY: guaranteed by the caller.
        unsafe { self.staging.write(address, bytes) }.map_err(failed("copy to the device"))
    }

    fn context(ordinal: usize) -> Result<Arc<CudaContext>> {
        driver::load()?;
        CudaContext::new(ordinal).map_err(failed("open the device"))
    }

    /// Major and minor number of the compute capability.
    #[must_use]
    pub const fn compute_capability(&self) -> (i32, i32) {
        (self.arch / 10, self.arch % 10)
    }

    /// The stream.
    #[must_use]
    pub const fn stream(&self) -> &Arc<CudaStream> {
        &self.stream
    }

    /// Allocates each memory by itself, as `compute-sanitizer` needs it to see accesses past its
    /// end.
    #[cfg(feature = "testing")]
    pub(crate) fn without_pool(self) -> Self {
        Self { pooled: false, ..self }
    }

    fn bind(&self) -> Result<()> {
        self.stream.context().bind_to_thread().map_err(failed("make the context current"))
    }
}

impl Device for Gpu {
    type Memory = Memory;
    type Kernel = Kernel;

    fn alloc(&self, bytes: usize) -> Result<Memory> {
        self.bind()?;
        let (stream, pooled) = (self.stream.clone(), self.pooled);
        if bytes == 0 {
            return Ok(Memory { address: 0, bytes, pooled, stream });
        }
        let during = failed("allocate device memory");
        let address = if pooled {
            // SAFETY: the stream is alive; the memory is set below before it is read.
            unsafe { result::malloc_async(stream.cu_stream(), bytes) }
        } else {
            // SAFETY: as above.
            unsafe { result::malloc_sync(bytes) }
        };
        let memory = Memory { address: address.map_err(during)?, bytes, pooled, stream };
        // SAFETY: the memory was just allocated with this size on this stream.
        unsafe { result::memset_d8_async(memory.address, 0, bytes, self.stream.cu_stream()) }
            .map_err(failed("set device memory"))?;
        Ok(memory)
    }

    fn address(memory: &Memory) -> u64 {
        memory.address
    }

    fn write(&self, memory: &mut Memory, at: usize, bytes: &[u8]) -> Result<()> {
        assert!(at + bytes.len() <= memory.bytes, "write past the end of the memory");
        // SAFETY: within the memory.
        unsafe { self.write_at(memory.address + at as u64, bytes) }
    }

    fn fill(&self, memory: &mut Memory, words: Range<usize>, value: u32) -> Result<()> {
        assert!(4 * words.end <= memory.bytes, "fill past the end of the memory");
        if words.is_empty() {
            return Ok(());
        }
        self.bind()?;
        let (to, stream) = (memory.address + 4 * words.start as u64, self.stream.cu_stream());
        // SAFETY: within the memory, as checked above; its address is a multiple of 256.
        unsafe { sys::cuMemsetD32Async(to, value, words.len(), stream) }
            .result()
            .map_err(failed("set device memory"))
    }

    fn read(&self, memory: &Memory, at: usize, bytes: &mut [u8]) -> Result<()> {
        assert!(at + bytes.len() <= memory.bytes, "read past the end of the memory");
        if bytes.is_empty() {
            return Ok(());
        }
        let (from, stream) = (memory.address + at as u64, self.stream.cu_stream());
        if bytes.len() <= PINNED_BYTES {
            // SAFETY: within the memory, as checked above, which is borrowed until after the wait.
            let read = unsafe { self.read_later(from, bytes.len()) }?;
            bytes.copy_from_slice(read.wait()?);
            return Ok(());
        }
        self.bind()?;
        // SAFETY: within the memory, as checked above; `bytes` is borrowed until after the wait
        // below.
        unsafe { result::memcpy_dtoh_async(bytes, from, stream) }
            .map_err(failed("copy from the device"))?;
        self.stream.synchronize().map_err(failed("wait for the stream"))
    }

    fn name(&self) -> Result<String> {
        let name = self.stream.context().name().map_err(failed("read the device's name"))?;
        Ok(format!("{name}, sm_{}", self.arch))
    }

    fn processors(&self) -> u32 {
        self.processors
    }

    fn kernel(&self, source: &str, macros: &[String], name: &str) -> Result<Kernel> {
        self.bind()?;
        let source = with_headers(source);
        let mut modules = self.modules.lock().unwrap_or_else(PoisonError::into_inner);
        let key = cache::hash(format!("{macros:?}{source}").as_bytes());
        let module = match modules.get(&key) {
            Some(module) => *module,
            None => {
                let module = load(&source, macros, self.arch)?;
                modules.insert(key, module);
                module
            }
        };
        let name = CString::new(name).expect("kernels' names have no NUL");
        // SAFETY: the module was loaded in this context and is never unloaded.
        let found = unsafe { result::module::get_function(module.0, name) };
        found.map(Kernel).map_err(failed("find a kernel"))
    }

    fn cached_kernel(
        &self,
        key: (&'static str, usize),
        look_up: impl FnOnce() -> Result<Kernel>,
    ) -> Result<Kernel> {
        let mut at = &*self.cached;
        while let Some(one) = at.0.get() {
            if one.key == key {
                return Ok(one.kernel);
            }
            at = &one.next;
        }
        let kernel = look_up()?;
        // If another thread set it first, the next call looks it up again.
        let _ = at.0.set(Box::new(CachedKernel { key, kernel, next: KernelCache::default() }));
        Ok(kernel)
    }

    unsafe fn launch(&self, kernel: &Kernel, blocks: u32, argument: &[u64]) -> Result<()> {
        self.bind()?;
        let mut arguments = [argument.as_ptr().cast_mut().cast::<c_void>()];
        let (grid, block, stream) = ((blocks, 1, 1), (THREADS, 1, 1), self.stream.cu_stream());
        // SAFETY: the caller guarantees the argument, which the driver copies.
        unsafe { result::launch_kernel(kernel.0, grid, block, 0, stream, &mut arguments) }
            .map_err(failed("launch a kernel"))
    }
}

impl Drop for Memory {
    fn drop(&mut self) {
        let context = self.stream.context();
        if self.address == 0 || driver::make_current(context).is_err() {
            return;
        }
        let freed = if self.pooled {
            // SAFETY: allocated in order of this stream, and freed once.
            unsafe { result::free_async(self.address, self.stream.cu_stream()) }
        } else {
            // SAFETY: allocated by the same context, and freed once; this waits for the device.
            unsafe { result::free_sync(self.address) }
        };
        // The context's next call returns the error; the memory leaks.
        context.record_err(freed);
    }
}

/// Returns code for an architecture: from the cache, else compiled by NVRTC, if there is one.
/// Machine code, or PTX if NVRTC is older than the architecture.
///
/// # Errors
///
/// Those of [`Nvrtc::global`] and [`Nvrtc::compile`]; [`CudaError::OldGpu`].
pub fn compiled(source: &str, macros: &[String], arch: i32) -> Result<Vec<u8>> {
    let input = Input { source: &with_headers(source), macros, arch };
    input.code(input.versions()?[0])
}

/// Loads code into the current context. If the driver rejects a compiler's code as too new, tries
/// an older compiler.
fn load(source: &str, macros: &[String], arch: i32) -> Result<Module> {
    let input = Input { source, macros, arch };
    let mut rejected = None;
    for version in input.versions()? {
        let code = input.code(version).map_err(|e| rejected.take().unwrap_or(e))?;
        // SAFETY: the image is an ELF file that NVRTC made, or PTX ended by a NUL; the driver
        // copies it.
        match unsafe { result::module::load_data(code.as_ptr().cast()) } {
            Ok(module) => return Ok(Module(module)),
            Err(error) if is_too_new(error) => rejected = Some(failed(NEWER)(error)),
            Err(error) => return Err(failed("load kernels")(error)),
        }
    }
    Err(rejected.expect("`versions` returns at least one, whose code was rejected"))
}

/// Source with headers, macros, and the GPU's architecture.
#[derive(Clone, Copy, Debug)]
struct Input<'a> {
    source: &'a str,
    macros: &'a [String],
    arch: i32,
}

impl Input<'_> {
    /// Compiler versions whose code is cached or can be compiled, the preferred first; at least
    /// one.
    fn versions(self) -> Result<Vec<Version>> {
        let compilers = match Nvrtc::all() {
            Ok(all) => all.iter().map(|one| one.target(self.arch).map(|_| one.version())).collect(),
            Err(missing) => vec![Err(missing)],
        };
        let (able, unable): (Vec<_>, Vec<_>) = compilers.into_iter().partition(Result::is_ok);
        if !able.is_empty() {
            return able.into_iter().collect();
        }
        let options = options(self.macros, self.arch);
        let cached = cache::folder().map(|folder| cache::versions(&folder, self.source, &options));
        let cached = loadable(cached.unwrap_or_default(), |version| *version, driver::version());
        // Without cached code, the reason.
        if cached.is_empty() { unable.into_iter().collect() } else { Ok(cached) }
    }

    /// The code of the compiler of this version, which is one of [`versions`](Self::versions).
    fn code(self, version: Version) -> Result<Vec<u8>> {
        // The key names the GPU's architecture, also of PTX: that of a version is always the same.
        let options = options(self.macros, self.arch);
        let entry =
            cache::folder().map(|folder| Entry::new(folder, self.source, &options, version));
        if let Some(code) = entry.as_ref().and_then(Entry::read) {
            return Ok(code);
        }
        let mut all = Nvrtc::all()?.iter();
        let nvrtc = all.find(|one| one.version() == version).expect("one of `versions`");
        let options = options_for(self.macros, &nvrtc.target(self.arch)?);
        let code = nvrtc.compile(self.source, &options)?.code;
        if let Some(entry) = entry {
            entry.write(&code);
        }
        Ok(code)
    }
}

/// The compiler's input for `source`: after both headers.
pub(crate) fn with_headers(source: &str) -> String {
    [crate::PTX_H, crate::DEVICE_H, source].concat()
}

/// NVRTC's options: no contraction of `a * b + c`, no flushing of subnormals, correctly rounded
/// roots and quotients, so that results have the bits of the CPU.
pub fn options(macros: &[String], arch: i32) -> Vec<String> {
    options_for(macros, &format!("sm_{arch}"))
}

fn options_for(macros: &[String], target: &str) -> Vec<String> {
    let fixed =
        ["--std=c++17", "--fmad=false", "--ftz=false", "--prec-div=true", "--prec-sqrt=true"];
    let fixed = fixed.into_iter().map(String::from);
    fixed.chain([format!("--gpu-architecture={target}")]).chain(macros.iter().cloned()).collect()
}

/// Whether a driver returns this error for code of a newer compiler.
fn is_too_new(error: DriverError) -> bool {
    // CUDA_ERROR_INVALID_IMAGE, ..._NO_BINARY_FOR_GPU, ..._UNSUPPORTED_PTX_VERSION.
    matches!(error.0 as u32, 200 | 209 | 222)
}

const NEWER: &str = "load kernels (is NVRTC newer than the driver? Update the driver, or set \
    NVRTC_LIBRARY to the path of an NVRTC as old as it)";

/// Maximum size of a read through pinned memory, which takes one wait; one to other memory takes
/// two.
const PINNED_BYTES: usize = 4096;

/// Threads of a block.
const THREADS: u32 = 256;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    #[ignore = "needs a machine without NVIDIA's driver"]
    fn opening_a_gpu_without_a_driver_is_an_error() {
        match Gpu::new(0) {
            Err(CudaError::NotFound { library, tried, install }) => {
                assert_eq!(library, "NVIDIA's driver (libcuda)");
                assert_eq!(tried.len(), 2);
                assert!(install.contains("driver"));
            }
            other => panic!("{other:?}"),
        }
    }
}
