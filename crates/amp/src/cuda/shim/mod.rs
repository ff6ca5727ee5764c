//! The kernels on the CPU: the same source, compiled by the system's C++ compiler behind `shim.h`.
//!
//! [`Host`] is a [`Device`] whose memory is the process's. What a GPU would trap is a panic here.

#![expect(unsafe_code, reason = "calls the compiled kernels, which work on raw addresses")]

use std::cell::Cell;
use std::collections::BTreeMap;
use std::ffi::{CStr, CString, c_char, c_void};
use std::hash::{DefaultHasher, Hash, Hasher};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::{Arc, Mutex};
use std::{env, fs};

use cuda_rt::DEVICE_H;
use cuda_rt::testing::SHIM_H;

use super::{CudaError, Device, Program};

type Result<T> = std::result::Result<T, CudaError>;

type Launch =
    unsafe extern "C" fn(*const c_char, *const c_void, u32, u64, *const u64, u32) -> *const c_char;

/// Stands in for a device.
#[derive(Debug)]
pub(super) struct Host {
    /// What differs from one launch to the next: order of blocks and threads.
    seed: Cell<u64>,
    /// Memory that kernels may touch: begin and end of each stretch.
    lent: Arc<Mutex<BTreeMap<u64, u64>>>,
    /// A change made to the source, `from` and `to`: tests notice it, or it changes no bit.
    pub(super) planted: Option<(&'static str, &'static str)>,
}

/// The host's memory, between two stretches that no kernel may touch.
#[derive(Debug)]
pub(super) struct Memory {
    words: Vec<u64>,
    lent: Arc<Mutex<BTreeMap<u64, u64>>>,
}

impl Host {
    pub(super) fn new(seed: u64) -> Self {
        Self { seed: Cell::new(seed), lent: Arc::default(), planted: None }
    }

    /// Lends memory of the test to kernels.
    pub(super) fn lend<T>(&self, slice: &mut [T]) -> u64 {
        let address = slice.as_mut_ptr().addr() as u64;
        if !slice.is_empty() {
            let end = address + size_of_val(slice) as u64;
            let mut lent = self.lent.lock().unwrap();
            // What was lent before and freed since may lie where this does.
            lent.retain(|from, to| *to <= address || *from >= end);
            lent.insert(address, end);
        }
        address
    }
}

impl Drop for Memory {
    fn drop(&mut self) {
        let _ = self.lent.lock().unwrap().remove(&Host::address(self));
    }
}

/// Words left alone before the first of a stretch, so that its address can be a multiple of 256.
const PAD: usize = 32;

impl Device for Host {
    type Memory = Memory;
    type Kernel = (Program, &'static str);

    fn alloc(&self, bytes: usize) -> Result<Memory> {
        let memory = Memory { words: vec![0; bytes.div_ceil(8) + PAD], lent: self.lent.clone() };
        if bytes > 0 {
            let at = Self::address(&memory);
            self.lent.lock().unwrap().insert(at, at + bytes as u64);
        }
        Ok(memory)
    }

    fn address(memory: &Memory) -> u64 {
        (memory.words.as_ptr().addr() as u64).next_multiple_of(256)
    }

    fn write(&self, memory: &mut Memory, offset: usize, bytes: &[u8]) -> Result<()> {
        let at = Self::address(memory) as usize - memory.words.as_ptr().addr() + offset;
        assert!(at + bytes.len() <= 8 * memory.words.len());
        // SAFETY: within the vector, as was just checked.
        let to = unsafe { memory.words.as_mut_ptr().cast::<u8>().add(at) };
        // SAFETY: as above; the vector is borrowed mutably, so the slices are apart.
        unsafe { to.copy_from_nonoverlapping(bytes.as_ptr(), bytes.len()) };
        Ok(())
    }

    fn read(&self, memory: &Memory, offset: usize, bytes: &mut [u8]) -> Result<()> {
        let at = Self::address(memory) as usize - memory.words.as_ptr().addr() + offset;
        assert!(at + bytes.len() <= 8 * memory.words.len());
        // SAFETY: within the vector, as was just checked.
        let from = unsafe { memory.words.as_ptr().cast::<u8>().add(at) };
        // SAFETY: as above; `bytes` is borrowed mutably, so the slices are apart.
        unsafe { from.copy_to_nonoverlapping(bytes.as_mut_ptr(), bytes.len()) };
        Ok(())
    }

    fn processors(&self) -> u32 {
        // So few that warps have several chunks each.
        1
    }

    fn kernel(&self, program: Program, name: &'static str) -> Result<Self::Kernel> {
        library(program, self.planted);
        Ok((program, name))
    }

    unsafe fn launch(
        &self,
        (program, kernel): Self::Kernel,
        blocks: u32,
        job: &[u64],
    ) -> Result<()> {
        let launch = library(program, self.planted);
        let name = CString::new(kernel).unwrap();
        self.seed.set(self.seed.get().wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1));
        let lent: Vec<u64> =
            self.lent.lock().unwrap().iter().flat_map(|(from, to)| [*from, *to]).collect();
        // SAFETY: the function has this prototype; the caller vouches for the job, and kernels stay
        // within what is lent.
        let fault = unsafe {
            launch(
                name.as_ptr(),
                job.as_ptr().cast(),
                blocks,
                self.seed.get(),
                lent.as_ptr(),
                lent.len() as u32,
            )
        };
        if !fault.is_null() {
            // SAFETY: not null, so a C string, good until this thread's next launch.
            let fault = unsafe { CStr::from_ptr(fault) };
            panic!("{program:?}, {kernel}: {}", fault.to_string_lossy());
        }
        Ok(())
    }
}

/// The launcher of some kernels, compiled and loaded once.
fn library(program: Program, planted: Option<(&'static str, &'static str)>) -> Launch {
    static LIBRARIES: Mutex<BTreeMap<String, usize>> = Mutex::new(BTreeMap::new());
    let macros = program.macros();
    let mut common = source();
    if let Some((from, to)) = planted {
        common = common.replace(from, to);
    }
    let source = [SHIM_H, &common, include_str!("launch.h")].concat();
    let key = format!("{macros:?}{source}");
    let mut libraries = LIBRARIES.lock().unwrap_or_else(|error| error.into_inner());
    let address = *libraries.entry(key).or_insert_with_key(|key| {
        let mut hasher = DefaultHasher::new();
        key.hash(&mut hasher);
        load(&compile(&source, &macros, planted.is_some(), hasher.finish()))
    });
    // SAFETY: an address of a function of this prototype, of a library that stays open.
    unsafe {
        std::mem::transmute::<*const c_void, Launch>(std::ptr::with_exposed_provenance(address))
    }
}

/// The part of the kernels' source that is the same for every compiler.
pub(super) fn source() -> String {
    [DEVICE_H, Program::SOURCE].concat()
}

/// Compiles, unless an earlier run has; beside the test's executable.
fn compile(source: &str, macros: &[String], quickly: bool, hash: u64) -> PathBuf {
    let folder = env::current_exe().unwrap().with_file_name("shim");
    fs::create_dir_all(&folder).unwrap();
    let library = folder.join(format!("{hash:016x}.so"));
    if library.exists() {
        return library;
    }
    let own = format!("{hash:016x}.{}", std::process::id());
    let (file, made) = (folder.join(format!("{own}.cc")), folder.join(format!("{own}.so")));
    fs::write(&file, source).unwrap();
    let compiler = env::var_os("CXX").unwrap_or_else(|| "c++".into());
    let mut command = Command::new(&compiler);
    command.args([
        "-std=c++17",
        if quickly { "-O0" } else { "-O1" },
        "-ffp-contract=off",
        "-shared",
        "-fPIC",
    ]);
    if !quickly {
        command.args(["-Wall", "-Wextra", "-Werror", "-Wno-unknown-pragmas", "-Wno-unused"]);
    }
    command.args(["-U_FORTIFY_SOURCE", "-o"]).arg(&made).args(macros).arg(&file);
    let output = command.output().unwrap_or_else(|error| {
        panic!("these tests compile the kernels for the CPU and need a C++ compiler: {error}")
    });
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    fs::remove_file(&file).unwrap();
    fs::rename(&made, &library).unwrap();
    library
}

/// The address of a library's launcher.
fn load(path: &Path) -> usize {
    let path = CString::new(path.to_str().unwrap()).unwrap();
    // SAFETY: a library made above, without initialisers of its own.
    let handle = unsafe { libc::dlopen(path.as_ptr(), libc::RTLD_NOW | libc::RTLD_LOCAL) };
    assert!(!handle.is_null());
    // SAFETY: the handle was just opened; it is never closed.
    let address = unsafe { libc::dlsym(handle, c"shim_launch".as_ptr()) };
    assert!(!address.is_null());
    address.expose_provenance()
}
