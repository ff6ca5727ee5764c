//! A device that runs kernels on the CPU: the shim.
//!
//! It compiles the kernels with the system's C++ compiler, and panics where a GPU would fault.

use std::cell::Cell;
use std::collections::BTreeMap;
use std::ffi::{CStr, CString, c_char, c_void};
use std::hash::{DefaultHasher, Hash, Hasher};
use std::mem::ManuallyDrop;
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::{Arc, Mutex, PoisonError};
use std::{env, fs, process, ptr};

use libloading::os::unix::Library;

use crate::{DEVICE_H, Device, Result};

type Launch = unsafe extern "C" fn(
    *const c_char,
    u32,
    *const c_void,
    u32,
    u64,
    *const u64,
    u32,
) -> *const c_char;

/// How to launch a crate's kernels on the host.
#[derive(Clone, Copy, Debug)]
pub struct Shim {
    /// C++ code after the kernels that defines this function, which returns the fault or null:
    ///
    /// ```text
    /// extern "C" const char* shim_launch(const char* kernel, u32 types, const void* job,
    ///     u32 blocks, u64 seed, const u64* ranges, u32 range_count)
    /// ```
    pub launch: &'static str,
    /// Returns the types in the macros, for `shim_launch`. Unless the second argument is true, it
    /// changes the macros so that one library has the kernels of many types.
    pub types: fn(&mut Vec<String>, bool) -> u32,
}

/// A device that runs kernels on the CPU.
#[derive(Clone, Debug)]
pub(super) struct Host {
    shim: Shim,
    /// Seed of the order of blocks and threads; changes with each launch.
    seed: Cell<u64>,
    lent: Lent,
    planted: Planted,
}

/// Memory that kernels may access: begin and end of each range.
type Lent = Arc<Mutex<BTreeMap<u64, u64>>>;

/// A replacement in the kernels' source, `from` and `to`, that tests must detect, or that must
/// change no bit.
pub(super) type Planted = Option<(&'static str, &'static str)>;

/// Host memory in place of device memory.
#[derive(Debug)]
pub(super) struct HostMemory {
    words: Vec<u64>,
    lent: Lent,
}

/// A kernel compiled for the host.
#[derive(Clone, Debug)]
pub(super) struct HostKernel {
    library: usize,
    types: u32,
    name: CString,
    macros: Vec<String>,
}

impl Host {
    /// A device whose blocks and threads run in an order drawn from `seed`.
    pub(super) fn new(shim: Shim, seed: u64, planted: Planted) -> Self {
        Self { shim, seed: Cell::new(seed), lent: Lent::default(), planted }
    }

    /// Forbids kernels the first bytes of the memory.
    pub(super) fn forbid(&self, memory: &HostMemory, bytes: usize) {
        let mut lent = self.lent.lock().unwrap();
        if let Some(end) = lent.remove(&Self::address(memory)) {
            lent.insert(Self::address(memory) + bytes as u64, end);
        }
    }
}

impl HostMemory {
    /// The index of byte `at` in the vector; panics unless `count` bytes follow.
    fn index(&self, at: usize, count: usize) -> usize {
        let at = Host::address(self) as usize - self.words.as_ptr().addr() + at;
        assert!(at + count <= 8 * self.words.len(), "past the end of the memory");
        at
    }
}

impl Drop for HostMemory {
    fn drop(&mut self) {
        let vector = self.words.as_ptr_range();
        let vector = vector.start.addr() as u64..vector.end.addr() as u64;
        self.lent.lock().unwrap().retain(|from, _| !vector.contains(from));
    }
}

/// Extra words, so that the address can be a multiple of 256.
const PAD: usize = 32;

impl Device for Host {
    type Memory = HostMemory;
    type Kernel = HostKernel;

    fn alloc(&self, bytes: usize) -> Result<HostMemory> {
        let words = vec![0; bytes.div_ceil(8) + PAD];
        let memory = HostMemory { words, lent: self.lent.clone() };
        if bytes > 0 {
            let at = Self::address(&memory);
            self.lent.lock().unwrap().insert(at, at + bytes as u64);
        }
        Ok(memory)
    }

    fn address(memory: &HostMemory) -> u64 {
        (memory.words.as_ptr().addr() as u64).next_multiple_of(256)
    }

    fn write(&self, memory: &mut HostMemory, at: usize, bytes: &[u8]) -> Result<()> {
        let at = memory.index(at, bytes.len());
        let to = memory.words.as_mut_ptr().cast::<u8>().wrapping_add(at);
        // SAFETY: within the vector, as `index` checks; the vector is borrowed mutably, so nothing
        // overlaps.
        unsafe { to.copy_from_nonoverlapping(bytes.as_ptr(), bytes.len()) };
        Ok(())
    }

    fn fill(&self, memory: &mut HostMemory, words: Range<usize>, value: u32) -> Result<()> {
        self.write(memory, 4 * words.start, &value.to_ne_bytes().repeat(words.len()))
    }

    fn read(&self, memory: &HostMemory, at: usize, bytes: &mut [u8]) -> Result<()> {
        let at = memory.index(at, bytes.len());
        let from = memory.words.as_ptr().cast::<u8>().wrapping_add(at);
        // SAFETY: within the vector, as `index` checks; `bytes` is borrowed mutably, so nothing
        // overlaps.
        unsafe { from.copy_to_nonoverlapping(bytes.as_mut_ptr(), bytes.len()) };
        Ok(())
    }

    fn name(&self) -> Result<String> {
        Ok("the host".into())
    }

    fn processors(&self) -> u32 {
        // Few, so that each warp has several chunks.
        1
    }

    fn kernel(&self, source: &str, macros: &[String], name: &str) -> Result<HostKernel> {
        let mut all = macros.to_vec();
        let types = (self.shim.types)(&mut all, self.planted.is_some());
        let library = library(self.shim.launch, source, &all, self.planted);
        Ok(HostKernel { library, types, name: CString::new(name).unwrap(), macros: macros.into() })
    }

    fn cached_kernel(
        &self,
        _: (&'static str, usize),
        look_up: impl FnOnce() -> Result<HostKernel>,
    ) -> Result<HostKernel> {
        look_up()
    }

    unsafe fn launch(&self, kernel: &HostKernel, blocks: u32, argument: &[u64]) -> Result<()> {
        self.seed.set(self.seed.get().wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1));
        let lent: Vec<u64> =
            self.lent.lock().unwrap().iter().flat_map(|(from, to)| [*from, *to]).collect();
        let library = ptr::with_exposed_provenance::<c_void>(kernel.library);
        // SAFETY: the address of a function with this prototype in a library that is never closed.
        let launch = unsafe { std::mem::transmute::<*const c_void, Launch>(library) };
        // SAFETY: the function has this prototype; the caller guarantees the argument, and the shim
        // checks that kernels access only `lent`.
        let fault = unsafe {
            launch(
                kernel.name.as_ptr(),
                kernel.types,
                argument.as_ptr().cast(),
                blocks,
                self.seed.get(),
                lent.as_ptr(),
                lent.len() as u32,
            )
        };
        if !fault.is_null() {
            // SAFETY: not null, so a C string, valid until this thread's next launch.
            let fault = unsafe { CStr::from_ptr(fault) };
            panic!("{:?} {:?}: {}", kernel.name, kernel.macros, fault.to_string_lossy());
        }
        Ok(())
    }
}

/// Compiles and loads kernels once; returns the address of `shim_launch`.
fn library(launch: &str, source: &str, macros: &[String], planted: Planted) -> usize {
    static LIBRARIES: Mutex<BTreeMap<String, usize>> = Mutex::new(BTreeMap::new());
    let mut kernels = [DEVICE_H, source].concat();
    if let Some((from, to)) = planted {
        assert!(kernels.contains(from), "the source has no `{from}`");
        kernels = kernels.replace(from, to);
    }
    let source = [SHIM_H, &kernels, launch].concat();
    let key = format!("{macros:?}{source}");
    let mut libraries = LIBRARIES.lock().unwrap_or_else(PoisonError::into_inner);
    *libraries.entry(key).or_insert_with_key(|key| {
        let mut hasher = DefaultHasher::new();
        key.hash(&mut hasher);
        load(&compile(&source, macros, planted.is_some(), hasher.finish()))
    })
}

/// Compiles to a library next to the test's executable, unless it exists.
fn compile(source: &str, macros: &[String], quickly: bool, hash: u64) -> PathBuf {
    let folder = env::current_exe().unwrap().with_file_name("shim");
    fs::create_dir_all(&folder).unwrap();
    let library = folder.join(format!("{hash:016x}.so"));
    if library.exists() {
        return library;
    }
    let own = format!("{hash:016x}.{}", process::id());
    let (file, made) = (folder.join(format!("{own}.cc")), folder.join(format!("{own}.so")));
    fs::write(&file, source).unwrap();
    let compiler = env::var_os("CXX").unwrap_or_else(|| "c++".into());
    let mut command = Command::new(&compiler);
    let level = if quickly { "-O0" } else { "-O1" };
    command.args(["-std=c++17", level, "-ffp-contract=off", "-shared", "-fPIC"]);
    if !quickly {
        command.args(["-Wall", "-Wextra", "-Werror", "-Wno-unknown-pragmas", "-Wno-unused"]);
    }
    command.args(["-U_FORTIFY_SOURCE", "-o"]).arg(&made).args(macros).arg(&file);
    let output = command.output().unwrap_or_else(|error| {
        panic!(
            "cannot run the C++ compiler {}: {error}; install one or set CXX",
            compiler.display()
        )
    });
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    fs::remove_file(&file).unwrap();
    fs::rename(&made, &library).unwrap();
    library
}

/// Loads a library, which stays open; returns the address of `shim_launch`.
fn load(path: &Path) -> usize {
    // SAFETY: the library was compiled above and has no initializers.
    let library = ManuallyDrop::new(unsafe { Library::new(path) }.unwrap());
    // SAFETY: only the address is used.
    let address = unsafe { library.get::<*mut c_void>("shim_launch") }.unwrap();
    address.as_raw_ptr().expose_provenance()
}

/// Replaces [`PTX_H`](crate::PTX_H) for a C++ compiler: CUDA's names, with threads as fibers.
/// Reports memory accesses outside of the test's memory, misaligned ones, and barriers that not all
/// threads reach.
const SHIM_H: &str = include_str!("../shim.h");
