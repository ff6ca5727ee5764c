//! Tests of CUDA kernels (feature `testing`), on a GPU or without one, and checks of NVRTC's
//! machine code.
//!
//! A test that compares kernels with the CPU runs on a [`TestDevice`]. With `$CUDA_TEST_DEVICE`,
//! the number of a GPU, that is this GPU. Otherwise it is the shim: the kernels are compiled with
//! the system's C++ compiler, their threads are fibers that run in a random order, and what would
//! fault on a GPU is a panic. A [`TestBuffer`] is an allocation of its own that ends at the last
//! element: the shim and `compute-sanitizer` see an access past it. [`machine_code_problems`] and
//! [`fill_cache`] need NVRTC and no GPU.

#![expect(unsafe_code, reason = "calls compiled kernels, which access raw addresses")]
#![expect(clippy::missing_panics_doc, clippy::unwrap_used, reason = "a test fails by panicking")]

mod machine_code;
mod shim;

use std::cell::OnceCell;
use std::mem::ManuallyDrop;
use std::ops::Range;
use std::sync::{Arc, Mutex};
use std::{env, slice};

use half::{bf16, f16};

pub use machine_code::{Limits, Program, fill_cache, machine_code_problems};
pub use shim::Shim;

use crate::{DType, Device, DeviceSlice, Gpu, Kernel, Memory, Result};
use shim::{Host, HostKernel, HostMemory};

/// The device that a test runs on: a GPU or the shim.
#[derive(Clone, Debug)]
pub struct TestDevice {
    on: On<Host, Gpu>,
    /// All launches so far.
    pub launched: Arc<Mutex<Vec<Launched>>>,
}

/// Memory of a [`TestDevice`].
#[derive(Debug)]
pub struct TestMemory(On<HostMemory, Memory>);

/// A kernel of a [`TestDevice`].
#[derive(Clone, Debug)]
pub struct TestKernel(On<HostKernel, Kernel>);

/// Kernel, blocks and argument.
pub type Launched = (TestKernel, u32, Vec<u64>);

#[derive(Clone, Debug)]
enum On<S, G> {
    Shim(S),
    Gpu(G),
}

impl TestDevice {
    /// The GPU that `$CUDA_TEST_DEVICE` names; without it the shim, whose blocks and threads run in
    /// an order drawn from `seed`.
    pub fn new(shim: Shim, seed: u64) -> Self {
        let Some(ordinal) = env::var_os("CUDA_TEST_DEVICE") else {
            return Self::on_the_shim(shim, seed, None);
        };
        // One for all cases of a test, since modules are never unloaded. It is never dropped, since
        // that needs the driver's own thread-local data.
        thread_local!(static GPU: OnceCell<ManuallyDrop<Gpu>> = const { OnceCell::new() });
        let open = || {
            let ordinal = ordinal.to_str().and_then(|text| text.parse().ok());
            let ordinal = ordinal.expect("CUDA_TEST_DEVICE is the number of a GPU");
            let gpu = Gpu::new(ordinal);
            let gpu = gpu.unwrap_or_else(|error| panic!("CUDA_TEST_DEVICE={ordinal}: {error}"));
            ManuallyDrop::new(gpu.without_pool())
        };
        let gpu = GPU.with(|gpu| Gpu::clone(gpu.get_or_init(open)));
        Self { on: On::Gpu(gpu), launched: Arc::default() }
    }

    /// The shim, with an optional replacement in the kernels' source, `from` and `to`.
    pub fn on_the_shim(
        shim: Shim,
        seed: u64,
        planted: Option<(&'static str, &'static str)>,
    ) -> Self {
        Self { on: On::Shim(Host::new(shim, seed, planted)), launched: Arc::default() }
    }

    /// Copies values to an allocation of their own.
    pub fn upload<T: Element>(&self, values: &[T]) -> TestBuffer {
        self.upload_at(0, values)
    }

    /// As [`upload`](Self::upload), `skip` elements after the begin of the allocation, which is
    /// aligned to 256 bytes. Kernels must not access these elements: the shim detects any access, a
    /// GPU only a write.
    pub fn upload_at<T: Element>(&self, skip: usize, values: &[T]) -> TestBuffer {
        let before = vec![GUARD; skip * size_of::<T>()];
        let mut memory = self.alloc(before.len() + size_of_val(values)).unwrap();
        if let (On::Shim(host), On::Shim(memory)) = (&self.on, &memory.0) {
            host.forbid(memory, before.len());
        }
        self.write(&mut memory, 0, &before).unwrap();
        let (device, skip, len) = (self.clone(), before.len(), values.len());
        let mut buffer = TestBuffer { device, memory, skip, len, dtype: T::DTYPE };
        buffer.set(values);
        buffer
    }
}

impl Device for TestDevice {
    type Memory = TestMemory;
    type Kernel = TestKernel;

    fn alloc(&self, bytes: usize) -> Result<TestMemory> {
        match &self.on {
            On::Shim(host) => host.alloc(bytes).map(|made| TestMemory(On::Shim(made))),
            On::Gpu(gpu) => gpu.alloc(bytes).map(|made| TestMemory(On::Gpu(made))),
        }
    }

    fn address(memory: &TestMemory) -> u64 {
        match &memory.0 {
            On::Shim(memory) => Host::address(memory),
            On::Gpu(memory) => Gpu::address(memory),
        }
    }

    fn write(&self, memory: &mut TestMemory, at: usize, bytes: &[u8]) -> Result<()> {
        match (&self.on, &mut memory.0) {
            (On::Shim(host), On::Shim(memory)) => host.write(memory, at, bytes),
            (On::Gpu(gpu), On::Gpu(memory)) => gpu.write(memory, at, bytes),
            _ => unreachable!("memory of another device"),
        }
    }

    fn fill(&self, memory: &mut TestMemory, words: Range<usize>, value: u32) -> Result<()> {
        match (&self.on, &mut memory.0) {
            (On::Shim(host), On::Shim(memory)) => host.fill(memory, words, value),
            (On::Gpu(gpu), On::Gpu(memory)) => gpu.fill(memory, words, value),
            _ => unreachable!("memory of another device"),
        }
    }

    fn read(&self, memory: &TestMemory, at: usize, bytes: &mut [u8]) -> Result<()> {
        match (&self.on, &memory.0) {
            (On::Shim(host), On::Shim(memory)) => host.read(memory, at, bytes),
            (On::Gpu(gpu), On::Gpu(memory)) => gpu.read(memory, at, bytes),
            _ => unreachable!("memory of another device"),
        }
    }

    fn name(&self) -> Result<String> {
        match &self.on {
            On::Shim(host) => host.name(),
            On::Gpu(gpu) => gpu.name(),
        }
    }

    fn processors(&self) -> u32 {
        match &self.on {
            On::Shim(host) => host.processors(),
            On::Gpu(gpu) => gpu.processors(),
        }
    }

    fn kernel(&self, source: &str, macros: &[String], name: &str) -> Result<TestKernel> {
        match &self.on {
            On::Shim(host) => {
                host.kernel(source, macros, name).map(|made| TestKernel(On::Shim(made)))
            }
            On::Gpu(gpu) => gpu.kernel(source, macros, name).map(|made| TestKernel(On::Gpu(made))),
        }
    }

    fn cached_kernel(
        &self,
        _: (&'static str, usize),
        look_up: impl FnOnce() -> Result<TestKernel>,
    ) -> Result<TestKernel> {
        look_up()
    }

    unsafe fn launch(&self, kernel: &TestKernel, blocks: u32, argument: &[u64]) -> Result<()> {
        self.launched.lock().unwrap().push((kernel.clone(), blocks, argument.into()));
        match (&self.on, &kernel.0) {
            // SAFETY: the caller guarantees the argument; here and below.
            (On::Shim(host), On::Shim(kernel)) => unsafe { host.launch(kernel, blocks, argument) },
            // SAFETY: as above.
            (On::Gpu(gpu), On::Gpu(kernel)) => unsafe { gpu.launch(kernel, blocks, argument) },
            _ => unreachable!("kernel of another device"),
        }
    }
}

/// Elements in an allocation of their own on a [`TestDevice`].
#[derive(Debug)]
pub struct TestBuffer {
    device: TestDevice,
    memory: TestMemory,
    /// Bytes before the first element.
    skip: usize,
    len: usize,
    dtype: DType,
}

impl TestBuffer {
    /// The elements as a slice of device memory.
    #[must_use]
    pub fn slice(&self) -> DeviceSlice {
        let ptr = TestDevice::address(&self.memory) + self.skip as u64;
        DeviceSlice { ptr, len: self.len, dtype: self.dtype }
    }

    /// Copies values to the elements.
    pub fn set<T: Element>(&mut self, values: &[T]) {
        assert_eq!((T::DTYPE, values.len()), (self.dtype, self.len));
        // SAFETY: an element has no padding.
        let bytes =
            unsafe { slice::from_raw_parts(values.as_ptr().cast::<u8>(), size_of_val(values)) };
        self.device.write(&mut self.memory, self.skip, bytes).unwrap();
    }

    /// Copies the elements to the host. Blocks until the stream has reached this call.
    #[must_use]
    pub fn get<T: Element>(&self) -> Vec<T> {
        assert_eq!(T::DTYPE, self.dtype);
        let mut before = vec![0; self.skip];
        self.device.read(&self.memory, 0, &mut before).unwrap();
        assert!(before.iter().all(|byte| *byte == GUARD), "a write before the first element");
        let mut values = vec![T::ZERO; self.len];
        // SAFETY: any bytes are an element; the vector is not used meanwhile.
        let bytes = unsafe {
            slice::from_raw_parts_mut(values.as_mut_ptr().cast::<u8>(), self.len * size_of::<T>())
        };
        self.device.read(&self.memory, self.skip, bytes).unwrap();
        values
    }
}

/// A byte of the elements before a buffer: as f32, f16 or bf16 they are NaN.
const GUARD: u8 = 0xff;

/// An element of a [`TestBuffer`].
///
/// # Safety
///
/// The type has no padding, and any bytes are a value of it.
pub unsafe trait Element: Copy {
    /// Its type.
    const DTYPE: DType;
    /// Zero.
    const ZERO: Self;
}

// SAFETY: a number of four bytes.
unsafe impl Element for f32 {
    const DTYPE: DType = DType::F32;
    const ZERO: Self = 0.0;
}

// SAFETY: a `u16`, any of which is a number.
unsafe impl Element for f16 {
    const DTYPE: DType = DType::F16;
    const ZERO: Self = Self::ZERO;
}

// SAFETY: as `f16`.
unsafe impl Element for bf16 {
    const DTYPE: DType = DType::Bf16;
    const ZERO: Self = Self::ZERO;
}
