//! The fake NCCL: compiles it once, opens it, and controls it.

#![expect(unsafe_code, reason = "opens a library the test made, and hands it memory")]

use std::ffi::{CString, c_char, c_int, c_void};
use std::fs;
use std::ops::Range;
use std::path::PathBuf;
use std::process::Command;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, OnceLock};

use collective::nccl::{Config, Libraries, connector};
use collective::{
    DType, Element, GroupOptions, MemoryStore, ProcessGroup, ReduceOp, Result,
    device::{DeviceBuf, DeviceStream},
};

/// The effect of a fault.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Fault {
    /// The call returns this.
    Return(c_int),
    /// The communicator reports this from now on.
    Async(c_int),
    /// The operation that the call starts never completes.
    Hang,
    /// The communicator is in progress for this many polls.
    Progress(c_int),
    /// The call does not return before an abort.
    Block,
}

/// One build of the fake.
#[derive(Debug)]
pub(crate) struct Fake {
    pub(crate) path: PathBuf,
    pub(crate) libraries: Libraries,
    handle: usize,
}

impl Fake {
    pub(crate) fn get() -> &'static Self {
        static FAKE: OnceLock<Fake> = OnceLock::new();
        FAKE.get_or_init(|| Self::open("fake", &[]))
    }

    /// NCCL 2.19.3, without the function that NCCL has since 2.23.
    pub(crate) fn old() -> &'static Self {
        static FAKE: OnceLock<Fake> = OnceLock::new();
        FAKE.get_or_init(|| Self::open("2.19", &["ncclCommInitRankScalable"]))
    }

    /// For captures of mode GLOBAL, which calls of other tests would end.
    pub(crate) fn alone() -> &'static Self {
        static FAKE: OnceLock<Fake> = OnceLock::new();
        FAKE.get_or_init(|| Self::open("alone", &[]))
    }

    fn open(name: &str, without: &[&str]) -> Self {
        let path = build(name, without);
        let paths = std::slice::from_ref(&path);
        // SAFETY: the library was made here, with the interface of both.
        let libraries = unsafe { Libraries::open(paths, paths) }.unwrap();
        let name = CString::new(path.to_str().unwrap()).unwrap();
        // SAFETY: a C string; it has been opened already.
        let handle = unsafe { libc::dlopen(name.as_ptr(), libc::RTLD_NOW) };
        assert!(!handle.is_null());
        let fake = Self { path, libraries, handle: handle.expose_provenance() };
        // A failed init leaves files, so not in the system's temporary directory; workers have
        // their own.
        if std::env::var_os("COLLECTIVE_TEST_ROLE").is_none() {
            // SAFETY: that is its prototype.
            let call: unsafe extern "C" fn(*const c_char) =
                unsafe { std::mem::transmute(fake.symbol("fake_folder")) };
            let folder = CString::new(env!("CARGO_TARGET_TMPDIR")).unwrap();
            // SAFETY: a C string.
            unsafe { call(folder.as_ptr()) };
        }
        fake
    }

    fn symbol(&self, name: &str) -> *mut c_void {
        let name = CString::new(name).unwrap();
        let handle = std::ptr::with_exposed_provenance_mut(self.handle);
        // SAFETY: an open library, a C string.
        let address = unsafe { libc::dlsym(handle, name.as_ptr()) };
        assert!(!address.is_null(), "{name:?}");
        address
    }

    /// Injects a fault into the `nth` call from now, counted from 1, of a function for a device.
    pub(crate) fn fault(&self, function: &str, device: u32, nth: c_int, fault: Fault) {
        type Prototype = unsafe extern "C" fn(*const c_char, c_int, c_int, c_int, c_int);
        // SAFETY: that is its prototype.
        let call: Prototype = unsafe { std::mem::transmute(self.symbol("fake_fault")) };
        let (kind, argument) = match fault {
            Fault::Return(code) => (0, code),
            Fault::Async(code) => (1, code),
            Fault::Hang => (2, 0),
            Fault::Progress(polls) => (3, polls),
            Fault::Block => (4, 0),
        };
        let function = CString::new(function).unwrap();
        // SAFETY: a C string and numbers.
        unsafe { call(function.as_ptr(), device as c_int, nth, kind, argument) }
    }

    /// Number of calls of a function for a device.
    pub(crate) fn calls(&self, function: &str, device: u32) -> c_int {
        type Prototype = unsafe extern "C" fn(*const c_char, c_int) -> c_int;
        // SAFETY: that is its prototype.
        let call: Prototype = unsafe { std::mem::transmute(self.symbol("fake_calls")) };
        let function = CString::new(function).unwrap();
        // SAFETY: a C string and a number.
        unsafe { call(function.as_ptr(), device as c_int) }
    }

    /// Number of references to the device's primary context.
    pub(crate) fn retained(&self, device: u32) -> c_int {
        // SAFETY: that is its prototype.
        let call: unsafe extern "C" fn(c_int) -> c_int =
            unsafe { std::mem::transmute(self.symbol("fake_retained")) };
        // SAFETY: a number.
        unsafe { call(device as c_int) }
    }

    /// Begins a capture of mode GLOBAL by this thread, or ends it; returns whether it is valid.
    pub(crate) fn capture(&self, on: bool) -> bool {
        // SAFETY: that is its prototype.
        let call: unsafe extern "C" fn(c_int) -> c_int =
            unsafe { std::mem::transmute(self.symbol("fake_capture")) };
        // SAFETY: a number.
        unsafe { call(on.into()) != 0 }
    }

    /// Starts or stops counting this thread's unordered memory accesses; returns their number since
    /// the last call. When they are not counted, an unordered access ends the process.
    pub(crate) fn races(&self, count: bool) -> c_int {
        // SAFETY: that is its prototype.
        let call: unsafe extern "C" fn(c_int) -> c_int =
            unsafe { std::mem::transmute(self.symbol("fake_races")) };
        // SAFETY: a number.
        unsafe { call(count.into()) }
    }

    /// Checks that accesses to this memory of the test are ordered, until `unwatch`.
    fn watch(&self, at: *mut c_void, bytes: usize) {
        // SAFETY: that is its prototype.
        let call: unsafe extern "C" fn(*mut c_void, usize) =
            unsafe { std::mem::transmute(self.symbol("fake_watch")) };
        // SAFETY: the memory has this many bytes, and the function does not access it.
        unsafe { call(at, bytes) }
    }

    fn unwatch(&self, at: *mut c_void) {
        // SAFETY: that is its prototype.
        let call: unsafe extern "C" fn(*mut c_void) =
            unsafe { std::mem::transmute(self.symbol("fake_unwatch")) };
        // SAFETY: the function does not access the address.
        unsafe { call(at) }
    }

    /// Enqueues a kernel in a stream, with the memory that it reads and that it writes.
    pub(crate) fn run(
        &self,
        stream: DeviceStream,
        reads: &[DeviceBuf],
        writes: &[DeviceBuf],
        kernel: impl FnOnce() + Send + 'static,
    ) {
        type Kernel = Box<dyn FnOnce() + Send>;
        unsafe extern "C" fn play(kernel: *mut c_void) {
            // SAFETY: made below from such a box, and called once.
            let kernel = unsafe { Box::from_raw(kernel.cast::<Kernel>()) };
            kernel();
        }
        type Prototype = unsafe extern "C" fn(
            *mut c_void,
            unsafe extern "C" fn(*mut c_void),
            *mut c_void,
            *const usize,
            c_int,
        );
        // SAFETY: that is its prototype.
        let call: Prototype = unsafe { std::mem::transmute(self.symbol("fake_stream_run")) };
        let kernel: Box<Kernel> = Box::new(Box::new(kernel));
        let range = |buf: &DeviceBuf, writes: usize| {
            let at = buf.address() as usize;
            [at, at + buf.bytes(), writes]
        };
        let ranges: Vec<usize> = (reads.iter().flat_map(|buf| range(buf, 0)))
            .chain(writes.iter().flat_map(|buf| range(buf, 1)))
            .collect();
        let count = (reads.len() + writes.len()) as c_int;
        let kernel = Box::into_raw(kernel).cast();
        // SAFETY: the stream exists, and there are `count` ranges.
        unsafe { call(stream.as_raw(), play, kernel, ranges.as_ptr(), count) }
    }

    pub(crate) fn stream(&'static self) -> Stream {
        // SAFETY: that is its prototype.
        let call: unsafe extern "C" fn() -> *mut c_void =
            unsafe { std::mem::transmute(self.symbol("fake_stream")) };
        // SAFETY: no preconditions.
        Stream { fake: self, raw: unsafe { call() }.expose_provenance() }
    }

    /// Joins one rank per device, each on its own thread of this process.
    pub(crate) fn groups(
        &self,
        devices: Range<u32>,
        options: &GroupOptions,
        config: &Config,
    ) -> Vec<Result<ProcessGroup>> {
        let (store, connect) = (MemoryStore::new(), connector(self.libraries, config.clone()));
        let world = devices.len();
        std::thread::scope(|scope| {
            let join = |(rank, device)| {
                let options = options.clone().with_cuda_device(device);
                let (store, connect) = (Arc::new(store.clone()), Arc::clone(&connect));
                scope.spawn(move || {
                    ProcessGroup::from_store_with(store, rank, world, options, connect)
                })
            };
            let ranks: Vec<_> = devices.enumerate().map(join).collect();
            ranks.into_iter().map(|rank| rank.join().unwrap()).collect()
        })
    }
}

/// Whether NCCL supports the operator for the type.
pub(crate) fn reduces(op: ReduceOp, of: DType) -> bool {
    let by = !matches!(op, ReduceOp::BitAnd | ReduceOp::BitOr | ReduceOp::BitXor);
    by && !matches!(of, DType::I16 | DType::U16)
}

/// Compiles the fake, unless it is up to date.
pub(crate) fn build(name: &str, without: &[&str]) -> PathBuf {
    let source = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("tests/it/nccl/fake.cc");
    let path = PathBuf::from(env!("CARGO_TARGET_TMPDIR")).join(format!("libnccl-{name}.so"));
    let time = |path: &PathBuf| fs::metadata(path).and_then(|data| data.modified()).ok();
    if time(&path) > time(&source) {
        return path;
    }
    let new = path.with_extension(format!("so.{}", std::process::id()));
    let mut compiler = Command::new("g++");
    compiler.args(["-std=c++17", "-O1", "-shared", "-fPIC", "-pthread", "-o"]);
    compiler.arg(&new).arg(&source);
    compiler.args(without.iter().map(|function| format!("-D{function}=not_{function}")));
    if !without.is_empty() {
        compiler.arg("-DVERSION=21903");
    }
    let output = compiler.output().unwrap_or_else(|error| {
        panic!("these tests compile a small C++ library and need `g++` in PATH: {error}")
    });
    assert!(output.status.success(), "g++: {}", String::from_utf8_lossy(&output.stderr));
    fs::rename(new, &path).unwrap();
    path
}

/// Devices that no other test of this process uses.
pub(crate) fn devices(count: u32) -> Range<u32> {
    static NEXT: AtomicU32 = AtomicU32::new(0);
    let first = NEXT.fetch_add(count, Ordering::Relaxed);
    first..first + count
}

/// A stream; destroyed on drop.
#[derive(Debug)]
pub(crate) struct Stream {
    fake: &'static Fake,
    raw: usize,
}

impl Stream {
    pub(crate) fn raw(&self) -> DeviceStream {
        // SAFETY: the stream exists, and tests wait until their work has completed or failed.
        unsafe { DeviceStream::from_raw(std::ptr::with_exposed_provenance_mut(self.raw)) }
    }

    fn call(&self, function: &str) {
        // SAFETY: the functions that are called here have this prototype.
        let call: unsafe extern "C" fn(*mut c_void) =
            unsafe { std::mem::transmute(self.fake.symbol(function)) };
        // SAFETY: the stream exists.
        unsafe { call(std::ptr::with_exposed_provenance_mut(self.raw)) }
    }

    fn call_with(&self, function: &str, number: c_int) {
        // SAFETY: the functions that are called here have this prototype.
        let call: unsafe extern "C" fn(*mut c_void, c_int) =
            unsafe { std::mem::transmute(self.fake.symbol(function)) };
        // SAFETY: the stream exists.
        unsafe { call(std::ptr::with_exposed_provenance_mut(self.raw), number) }
    }

    pub(crate) fn compute(&self, ms: c_int) {
        self.call_with("fake_stream_compute", ms);
    }

    /// Waits until the stream has completed its work.
    pub(crate) fn sync(&self) {
        self.call("fake_stream_sync");
    }

    pub(crate) fn capture(&self, on: bool) {
        self.call_with("fake_stream_capture", on.into());
    }

    /// Blocks later work in the stream until [`unblock`](Self::unblock).
    pub(crate) fn block(&self) {
        self.call("fake_stream_block");
    }

    pub(crate) fn unblock(&self) {
        self.call("fake_stream_unblock");
    }
}

impl Drop for Stream {
    fn drop(&mut self) {
        self.call("fake_stream_unblock");
        self.call("fake_stream_end");
    }
}

/// Memory of the fake's devices.
#[derive(Debug)]
pub(crate) struct Memory<T>(Vec<T>);

impl<T: Element> Memory<T> {
    pub(crate) fn new(numbers: Vec<T>) -> Self {
        Self(numbers)
    }

    /// The buffer on the device; the test reads the memory only when the work has settled.
    pub(crate) fn buf(&mut self) -> DeviceBuf {
        let address = self.0.as_mut_ptr().expose_provenance() as u64;
        // SAFETY: tests keep the memory until their work has settled, and do not access it
        // meanwhile.
        unsafe { DeviceBuf::from_raw(address, self.0.len(), T::DTYPE) }.unwrap()
    }

    /// Checks from now on that accesses are ordered.
    pub(crate) fn watched(mut self) -> Watched<T> {
        Fake::get().watch(self.0.as_mut_ptr().cast(), size_of_val(&self.0[..]));
        Watched(self)
    }

    pub(crate) fn numbers(&self) -> Vec<T> {
        let read = |number: &T| {
            // SAFETY: a valid number; volatile, since the fake's threads have written it.
            unsafe { std::ptr::from_ref(number).read_volatile() }
        };
        self.0.iter().map(read).collect()
    }
}

/// Memory whose accesses must be ordered by streams of [`Fake::get`].
#[derive(Debug)]
pub(crate) struct Watched<T>(pub(crate) Memory<T>);

impl<T> Drop for Watched<T> {
    fn drop(&mut self) {
        Fake::get().unwatch(self.0.0.as_mut_ptr().cast());
    }
}

/// Numbers of a device, read or written by a kernel.
///
/// # Safety
///
/// Nothing else accesses the memory during `'a`.
pub(crate) unsafe fn numbers_mut<'a, T: Element>(buf: DeviceBuf) -> &'a mut [T] {
    assert_eq!(buf.dtype(), T::DTYPE);
    let at = std::ptr::with_exposed_provenance_mut(buf.address() as usize);
    // SAFETY: the buffer has this many elements of the type; the caller guarantees exclusive
    // access.
    unsafe { std::slice::from_raw_parts_mut(at, buf.count()) }
}
