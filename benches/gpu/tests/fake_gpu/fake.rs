//! Compiles and controls the fake GPU.

#![expect(unsafe_code, reason = "opens a library that the test compiled, and passes it memory")]

use std::ffi::{CString, OsString, c_char, c_int, c_void};
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::OnceLock;
use std::{env, fs};

use collective::device::DeviceStream;

/// The library in a process that runs with it.
#[derive(Debug)]
pub(crate) struct Fake(usize);

/// Runs a test, by its name, in a new process in which the fake replaces the driver, NVRTC and
/// NCCL.
pub(crate) fn with_fake(test: &str, body: impl FnOnce(&'static Fake)) {
    with_fake_and(test, &[], body);
}

/// As [`with_fake`], with environment variables; a test may call this several times with different
/// ones.
pub(crate) fn with_fake_and(
    test: &str,
    variables: &[(&str, &str)],
    body: impl FnOnce(&'static Fake),
) {
    let own = format!("{variables:?}");
    if let Some(library) = env::var_os(LIBRARY) {
        if env::var(VARIABLES).is_ok_and(|given| given != own) {
            return;
        }
        #[expect(clippy::print_stdout, reason = "the parent reads it")]
        {
            println!("{RAN}");
        }
        return body(Box::leak(Box::new(Fake::open(Path::new(&library)))));
    }
    static BUILT: OnceLock<PathBuf> = OnceLock::new();
    let library = BUILT.get_or_init(build);
    let folder = library.parent().unwrap();
    let mut paths = vec![OsString::from(folder)];
    paths.extend(env::var_os("LD_LIBRARY_PATH"));
    let output = Command::new(env::current_exe().unwrap())
        .args([test, "--exact", "--nocapture", "--include-ignored"])
        .env(LIBRARY, library)
        .env("LD_LIBRARY_PATH", paths.join(std::ffi::OsStr::new(":")))
        .env("NVRTC_LIBRARY", library)
        .env("COLLECTIVE_NCCL_LIB", library)
        .env("COLLECTIVE_CUDA_LIB", library)
        .env("CUBIN_CACHE", "")
        .env(VARIABLES, own)
        .envs(variables.iter().copied())
        .env("TMPDIR", env!("CARGO_TARGET_TMPDIR"))
        .output()
        .unwrap();
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
    let all = text(&output.stdout) + &text(&output.stderr);
    assert!(output.status.success(), "{}: {all}", output.status);
    assert!(all.contains("1 passed") && all.contains(RAN), "nothing was tested: {all}");
}

/// Environment variable: the path of the fake, in a child.
pub(crate) const LIBRARY: &str = "GPU_BENCH_FAKE";
/// Printed by a child that ran its test.
const RAN: &str = "on the fake GPU";
/// Environment variable: the number of the child among those of a test.
const VARIABLES: &str = "GPU_BENCH_VARIABLES";

/// Compiles the fake, unless that was done since its last change, into a folder, under every
/// library name that is searched.
fn build() -> PathBuf {
    compile("gpu", &[])
}

/// A driver with only these functions and the fake's controls, without NVRTC and NCCL.
pub(crate) fn narrow(name: &str, symbols: &[&str]) -> PathBuf {
    let target = Path::new(env!("CARGO_TARGET_TMPDIR"));
    let map = target.join(format!("{name}.map"));
    let text = format!("{{ global: fake_*; {}; local: *; }};", symbols.join("; "));
    if fs::read_to_string(&map).ok().as_ref() != Some(&text) {
        let _ = fs::remove_dir_all(target.join(name));
        fs::write(&map, text).unwrap();
    }
    compile(name, &[format!("-Wl,--version-script={}", map.display())])
}

/// A folder with copies of the fake as NVRTC 1.12 and 1.13.
pub(crate) fn compilers() -> PathBuf {
    let fake = build();
    let folder = Path::new(env!("CARGO_TARGET_TMPDIR")).join("compilers");
    fs::create_dir_all(&folder).unwrap();
    let time = |path: &Path| fs::metadata(path).and_then(|data| data.modified()).ok();
    for path in ["libnvrtc.so.12", "libnvrtc.so.13"].map(|name| folder.join(name)) {
        if time(&path) < time(&fake) {
            let new = path.with_extension(format!("new.{}", std::process::id()));
            fs::copy(&fake, &new).unwrap();
            fs::rename(new, path).unwrap();
        }
    }
    folder
}

fn compile(name: &str, flags: &[String]) -> PathBuf {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..").canonicalize().unwrap();
    let sources = [
        "benches/gpu/tests/fake_gpu/fake.cc",
        "benches/gpu/tests/fake_gpu/graph.cc",
        "crates/collective/tests/it/nccl/fake.cc",
    ];
    let sources = sources.map(|source| root.join(source));
    let target = Path::new(env!("CARGO_TARGET_TMPDIR"));
    let folder = target.join(name);
    let path = folder.join("libcuda.so.1");
    let time = |path: &Path| fs::metadata(path).and_then(|data| data.modified()).ok();
    if sources.iter().all(|source| time(&path) > time(source)) {
        return path;
    }
    fs::create_dir_all(&folder).unwrap();
    let new = folder.join(format!("new.{}", std::process::id()));
    let mut compiler = Command::new("g++");
    compiler.args(["-std=c++17", "-O1", "-shared", "-fPIC", "-pthread"]).args(flags);
    let kernels = root.join("crates/cuda-rt/src");
    compiler.arg(format!("-DKERNELS=\"{}\"", kernels.display()));
    compiler.arg(format!("-DFOLDER=\"{}\"", target.display()));
    let output = compiler.arg("-o").arg(&new).arg(&sources[0]).output().unwrap_or_else(|error| {
        panic!("cannot run g++, which these tests need to compile a small library: {error}")
    });
    assert!(output.status.success(), "g++: {}", String::from_utf8_lossy(&output.stderr));
    fs::rename(new, &path).unwrap();
    // The name that cudarc tries first; it may exist from an older build.
    let _ = symlink("libcuda.so.1", folder.join("libcuda.so"));
    path
}

impl Fake {
    fn open(path: &Path) -> Self {
        let name = CString::new(path.to_str().unwrap()).unwrap();
        // SAFETY: a library made for this, a C string.
        let handle = unsafe { libc::dlopen(name.as_ptr(), libc::RTLD_NOW) };
        assert!(!handle.is_null());
        Self(handle.expose_provenance())
    }

    fn symbol(&self, name: &str) -> *mut c_void {
        let name = CString::new(name).unwrap();
        // SAFETY: an open library, a C string.
        let address =
            unsafe { libc::dlsym(std::ptr::with_exposed_provenance_mut(self.0), name.as_ptr()) };
        assert!(!address.is_null(), "{name:?}");
        address
    }

    /// Number of calls of a function, or launches of a kernel, for a device.
    pub(crate) fn calls(&self, function: &str, device: u32) -> c_int {
        type Prototype = unsafe extern "C" fn(*const c_char, c_int) -> c_int;
        // SAFETY: that is its prototype.
        let call: Prototype = unsafe { std::mem::transmute(self.symbol("fake_calls")) };
        let function = CString::new(function).unwrap();
        // SAFETY: a C string and a number.
        unsafe { call(function.as_ptr(), device as c_int) }
    }

    /// Bytes that this thread copied to and from devices.
    pub(crate) fn copied(&self) -> [u64; 2] {
        // SAFETY: that is its prototype.
        let call: extern "C" fn() -> *const [u64; 2] =
            unsafe { std::mem::transmute(self.symbol("fake_gpu_copied")) };
        // SAFETY: two numbers of this thread.
        unsafe { *call() }
    }

    /// Makes the `nth` call of a function for a device return `code`.
    pub(crate) fn fail(&self, function: &str, device: u32, nth: c_int, code: c_int) {
        type Prototype = unsafe extern "C" fn(*const c_char, c_int, c_int, c_int, c_int);
        // SAFETY: that is its prototype.
        let call: Prototype = unsafe { std::mem::transmute(self.symbol("fake_fault")) };
        let function = CString::new(function).unwrap();
        // SAFETY: a C string and numbers.
        unsafe { call(function.as_ptr(), device as c_int, nth, 0, code) }
    }

    /// Allows kernels to access the test's memory until [`take_back`](Self::take_back); returns its
    /// address.
    pub(crate) fn lend<T>(&self, values: &mut [T]) -> u64 {
        // SAFETY: that is its prototype.
        let call: unsafe extern "C" fn(*mut c_void, usize) =
            unsafe { std::mem::transmute(self.symbol("fake_watch")) };
        // SAFETY: memory of so many bytes, which it does not touch.
        unsafe { call(values.as_mut_ptr().cast(), size_of_val(values)) }
        values.as_mut_ptr().expose_provenance() as u64
    }

    /// Revokes [`lend`](Self::lend) of memory that no stream uses any more.
    pub(crate) fn take_back<T>(&self, values: &mut [T]) {
        // SAFETY: that is its prototype.
        let call: unsafe extern "C" fn(*mut c_void) =
            unsafe { std::mem::transmute(self.symbol("fake_unwatch")) };
        // SAFETY: an address, which it does not touch.
        unsafe { call(values.as_mut_ptr().cast()) }
    }

    pub(crate) fn stream(&self) -> DeviceStream {
        // SAFETY: that is its prototype.
        let call: unsafe extern "C" fn() -> *mut c_void =
            unsafe { std::mem::transmute(self.symbol("fake_stream")) };
        // SAFETY: no preconditions.
        let raw = unsafe { call() };
        // SAFETY: a stream that is never ended.
        unsafe { DeviceStream::from_raw(raw) }
    }

    /// Captures the work that `body` enqueues on the stream into a graph, replays it `times` times,
    /// and returns the result of `body`.
    pub(crate) fn captured<T>(
        &self,
        stream: DeviceStream,
        times: usize,
        body: impl FnOnce() -> T,
    ) -> T {
        type Call<A> = unsafe extern "C" fn(*mut c_void, A) -> c_int;
        type Instantiate = unsafe extern "C" fn(*mut *mut c_void, *mut c_void, u64) -> c_int;
        // SAFETY: those are their prototypes, here and below.
        let begin: Call<c_int> =
            unsafe { std::mem::transmute(self.symbol("cuStreamBeginCapture_v2")) };
        // SAFETY: as above.
        let end: Call<*mut *mut c_void> =
            unsafe { std::mem::transmute(self.symbol("cuStreamEndCapture")) };
        // SAFETY: as above.
        let instantiate: Instantiate =
            unsafe { std::mem::transmute(self.symbol("cuGraphInstantiateWithFlags")) };
        // SAFETY: as above.
        let launch: Call<*mut c_void> =
            unsafe { std::mem::transmute(self.symbol("cuGraphLaunch")) };
        let (mut graph, mut exec) = (std::ptr::null_mut(), std::ptr::null_mut());
        // SAFETY: a stream of the fake; 1 is a capture of this thread's.
        assert_eq!(unsafe { begin(stream.as_raw(), 1) }, 0);
        let made = body();
        // SAFETY: as above; writes a handle.
        assert_eq!(unsafe { end(stream.as_raw(), &raw mut graph) }, 0);
        // SAFETY: the graph that was just made; writes a handle.
        assert_eq!(unsafe { instantiate(&raw mut exec, graph, 0) }, 0);
        for _ in 0..times {
            // SAFETY: as above.
            assert_eq!(unsafe { launch(exec, stream.as_raw()) }, 0);
        }
        made
    }

    fn on(&self, function: &str, stream: DeviceStream) {
        // SAFETY: that is the prototype of those that are called so.
        let call: unsafe extern "C" fn(*mut c_void) =
            unsafe { std::mem::transmute(self.symbol(function)) };
        // SAFETY: a stream of the fake, none of which is ended here.
        unsafe { call(stream.as_raw()) }
    }

    /// Blocks until the stream is done.
    pub(crate) fn sync(&self, stream: DeviceStream) {
        self.on("fake_stream_sync", stream);
    }

    /// Blocks later work on the stream until [`unblock`](Self::unblock).
    pub(crate) fn block(&self, stream: DeviceStream) {
        self.on("fake_stream_block", stream);
    }

    pub(crate) fn unblock(&self, stream: DeviceStream) {
        self.on("fake_stream_unblock", stream);
    }
}
