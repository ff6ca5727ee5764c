//! Tests of CUDA kernels without a GPU (feature `testing`): runs them on the CPU, and checks NVRTC's machine code.
//!
//! [`Host`] is a [`Device`] in the process's memory: it compiles the kernels with the system's C++ compiler and panics
//! where a GPU would fault. [`machine_code_problems`] needs NVRTC and no GPU.

#![expect(unsafe_code, reason = "calls compiled kernels, which access raw addresses")]
#![expect(clippy::missing_panics_doc, clippy::unwrap_used, reason = "a test fails by panicking")]

use std::cell::Cell;
use std::collections::BTreeMap;
use std::ffi::{CStr, CString, c_char, c_void};
use std::hash::{DefaultHasher, Hash, Hasher};
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::{Arc, Mutex, PoisonError};
use std::{env, fs, process, ptr, thread};

use crate::{DEVICE_H, Device, Kernels, Nvrtc, Result, options};

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
    /// C++ code after the kernels that defines `extern "C" const char* shim_launch(const char* kernel, u32 types,
    /// const void* job, u32 blocks, u64 seed, const u64* ranges, u32 range_count)`, which returns the fault or null.
    pub launch: &'static str,
    /// Returns the types in the macros, for `shim_launch`. Unless the second argument is true, it changes the macros so
    /// that one library has the kernels of many types.
    pub types: fn(&mut Vec<String>, bool) -> u32,
}

/// A device that runs kernels on the CPU.
#[derive(Clone, Debug)]
pub struct Host {
    shim: Shim,
    /// Seed of the order of blocks and threads; changes with each launch.
    seed: Cell<u64>,
    lent: Lent,
    /// A replacement in the kernels' source, `from` and `to`, that tests must detect, or that must change no bit.
    pub planted: Option<(&'static str, &'static str)>,
    /// All launches so far.
    pub launched: Arc<Mutex<Vec<Launched>>>,
}

/// Memory that kernels may access: begin and end of each range.
type Lent = Arc<Mutex<BTreeMap<u64, u64>>>;

/// Kernel, blocks and argument.
pub type Launched = (HostKernel, u32, Vec<u64>);

/// Host memory in place of device memory.
#[derive(Debug)]
pub struct HostMemory {
    words: Vec<u64>,
    lent: Lent,
}

/// A kernel compiled for the host.
#[derive(Clone, Debug)]
pub struct HostKernel {
    library: usize,
    types: u32,
    name: CString,
    macros: Vec<String>,
}

impl Host {
    /// A device whose blocks and threads run in an order drawn from `seed`.
    pub fn new(shim: Shim, seed: u64) -> Self {
        let (lent, launched) = Default::default();
        Self { shim, seed: Cell::new(seed), lent, planted: None, launched }
    }

    /// Allows kernels to access the slice; returns its address.
    pub fn lend<T>(&self, slice: &mut [T]) -> u64 {
        let address = slice.as_mut_ptr().addr() as u64;
        if !slice.is_empty() {
            let end = address + size_of_val(slice) as u64;
            let mut lent = self.lent.lock().unwrap();
            // Ranges that were freed since may overlap this one.
            lent.retain(|from, to| *to <= address || *from >= end);
            lent.insert(address, end);
        }
        address
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
        let _ = self.lent.lock().unwrap().remove(&Host::address(self));
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
        // SAFETY: within the vector, as `index` checks; the vector is borrowed mutably, so nothing overlaps.
        unsafe { to.copy_from_nonoverlapping(bytes.as_ptr(), bytes.len()) };
        Ok(())
    }

    fn fill(&self, memory: &mut HostMemory, words: Range<usize>, value: u32) -> Result<()> {
        self.write(memory, 4 * words.start, &value.to_ne_bytes().repeat(words.len()))
    }

    fn read(&self, memory: &HostMemory, at: usize, bytes: &mut [u8]) -> Result<()> {
        let at = memory.index(at, bytes.len());
        let from = memory.words.as_ptr().cast::<u8>().wrapping_add(at);
        // SAFETY: within the vector, as `index` checks; `bytes` is borrowed mutably, so nothing overlaps.
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
        self.launched.lock().unwrap().push((kernel.clone(), blocks, argument.into()));
        self.seed.set(self.seed.get().wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1));
        let lent: Vec<u64> =
            self.lent.lock().unwrap().iter().flat_map(|(from, to)| [*from, *to]).collect();
        let library = ptr::with_exposed_provenance::<c_void>(kernel.library);
        // SAFETY: the address of a function with this prototype in a library that is never closed.
        let launch = unsafe { std::mem::transmute::<*const c_void, Launch>(library) };
        // SAFETY: the function has this prototype; the caller guarantees the argument, and the shim checks that
        // kernels access only `lent`.
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
fn library(
    launch: &str,
    source: &str,
    macros: &[String],
    planted: Option<(&'static str, &'static str)>,
) -> usize {
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

/// Loads a library; returns the address of `shim_launch`.
fn load(path: &Path) -> usize {
    let path = CString::new(path.to_str().unwrap()).unwrap();
    // SAFETY: the library was compiled above and has no initializers.
    let handle = unsafe { libc::dlopen(path.as_ptr(), libc::RTLD_NOW | libc::RTLD_LOCAL) };
    assert!(!handle.is_null());
    // SAFETY: the handle is open.
    let address = unsafe { libc::dlsym(handle, c"shim_launch".as_ptr()) };
    assert!(!address.is_null());
    address.expose_provenance()
}

/// Replaces [`PTX_H`](crate::PTX_H) for a C++ compiler: CUDA's names, with threads as fibers. Reports memory accesses
/// outside of the test's memory, misaligned ones, and barriers that not all threads reach.
const SHIM_H: &str = include_str!("shim.h");

/// Limits for the machine code of a kernel. No kernel may spill registers or use generic memory accesses.
#[derive(Clone, Copy, Debug)]
pub struct Limits {
    /// The kernel's name.
    pub kernel: &'static str,
    /// Maximum number of registers of a thread.
    pub registers: u32,
    /// Whether it must load 16 bytes at a time.
    pub wide_loads: bool,
    /// Whether it must store 16 bytes at a time.
    pub wide_stores: bool,
}

/// A program whose machine code is checked.
#[derive(Clone, Debug)]
pub struct Program {
    /// CUDA C++ without [`PTX_H`](crate::PTX_H) and [`DEVICE_H`].
    pub source: &'static str,
    /// Macros (`-DNAME=VALUE`).
    pub macros: Vec<String>,
    /// Limits for each of its kernels.
    pub kernels: Vec<Limits>,
}

/// Compiles `programs(arch)` with NVRTC for every architecture that NVRTC and this crate support, and checks the machine
/// code with nvdisasm at `$NVDISASM`. Returns a line for each program that breaks a limit.
///
/// # Panics
///
/// Without NVRTC or nvdisasm.
pub fn machine_code_problems(programs: impl Fn(i32) -> Vec<Program> + Sync) -> Vec<String> {
    let nvrtc = Nvrtc::global().expect("NVRTC is installed");
    assert!(nvrtc.version().0 > 0, "NVRTC_LIBRARY is a fake; set it to NVIDIA's");
    let nvdisasm = env::var_os("NVDISASM").expect("NVDISASM is the path of nvdisasm");
    // NVRTC 13 does not support sm_70, 12.1 nothing after sm_90.
    let all: &[i32] = if nvrtc.version().0 >= 13 { &[80, 90, 100, 120] } else { &[70, 80, 90] };
    let work = all.iter().flat_map(|arch| programs(*arch).into_iter().map(|p| (p, *arch)));
    let (work, problems) = (Mutex::new(work), Mutex::new(Vec::new()));
    thread::scope(|scope| {
        for _ in 0..2 {
            scope.spawn(|| {
                loop {
                    let next = work.lock().unwrap_or_else(PoisonError::into_inner).next();
                    let Some((program, arch)) = next else { break };
                    if let Err(text) = check(nvrtc, &program, arch, nvdisasm.as_ref()) {
                        let text = format!("sm_{arch}, {:?}: {text}", program.macros);
                        problems.lock().unwrap_or_else(PoisonError::into_inner).push(text);
                    }
                }
            });
        }
    });
    problems.into_inner().unwrap_or_else(PoisonError::into_inner)
}

fn check(nvrtc: &Nvrtc, program: &Program, arch: i32, nvdisasm: &Path) -> Result<(), String> {
    let mut options = options(&program.macros, arch);
    options.push("--ptxas-options=-v".into());
    let cubin = nvrtc.compile(&Kernels::source(program.source), &options);
    let cubin = cubin.map_err(|error| error.to_string())?;
    let mut seen = 0;
    for entry in cubin.log.split("Compiling entry function '").skip(1) {
        seen += 1;
        let name = entry.split('\'').next().unwrap_or_default();
        let limits = program.kernels.iter().find(|limits| limits.kernel == name);
        let limits = limits.ok_or_else(|| format!("{name} has no limits"))?;
        if !entry.contains("0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads") {
            return Err(format!("{name} spills: {entry}"));
        }
        let used = entry.split("Used ").nth(1).and_then(|text| text.split(' ').next());
        let used: u32 = used.and_then(|text| text.parse().ok()).ok_or("no registers in the log")?;
        if used > limits.registers {
            return Err(format!("{name} has {used} registers"));
        }
    }
    if seen != program.kernels.len() {
        return Err(format!("{seen} kernels in the log: {}", cubin.log));
    }
    // nvdisasm does not support architectures before sm_75.
    if arch < 75 {
        return Ok(());
    }
    let text = disassemble(nvdisasm, &cubin.code)?;
    program.kernels.iter().try_for_each(|limits| check_accesses(limits, &text))
}

fn disassemble(nvdisasm: &Path, code: &[u8]) -> Result<String, String> {
    let id = format!("{:?}", thread::current().id()).replace(['(', ')'], "-");
    let file = env::temp_dir().join(format!("machine-code-{}-{id}.cubin", process::id()));
    fs::write(&file, code).map_err(|e| e.to_string())?;
    let output = Command::new(nvdisasm).arg("-c").arg(&file).output().map_err(|e| e.to_string());
    fs::remove_file(&file).map_err(|e| e.to_string())?;
    let output = output?;
    match output.status.success() {
        true => Ok(String::from_utf8_lossy(&output.stdout).into_owned()),
        false => Err(String::from_utf8_lossy(&output.stderr).into_owned()),
    }
}

fn check_accesses(limits: &Limits, text: &str) -> Result<(), String> {
    let kernel = limits.kernel;
    let body = text.split(&format!("\n.text.{kernel}:")).nth(1);
    let body = body.ok_or_else(|| format!("no section of {kernel}"))?;
    let body = body.split("\n.text.").next().unwrap_or_default();
    let words = || body.split_whitespace();
    let generic = ["LD.", "ST.", "LDL", "STL"];
    if let Some(word) = words().find(|word| generic.iter().any(|kind| word.starts_with(kind))) {
        return Err(format!("{kernel} has a generic or local access: {word}"));
    }
    let wide = |kind: &str| words().any(|word| word.starts_with(kind) && word.contains(".128"));
    if (limits.wide_loads && !wide("LDG.")) || (limits.wide_stores && !wide("STG.")) {
        return Err(format!("{kernel} does not move 16 bytes at a time"));
    }
    Ok(())
}
