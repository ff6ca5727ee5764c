//! Machine code that NVRTC makes of kernels: checks of it, and a cache of it for tests on a GPU.

use std::path::Path;
use std::process::Command;
use std::sync::{Mutex, PoisonError};
use std::{env, fs, process, thread};

use crate::{Kernels, Nvrtc, compiled, options};

/// Limits for the machine code of a kernel. No kernel may spill registers or use generic memory
/// accesses.
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
    /// Number of loads of at least 8 bytes that it must have before some store, so that they are in
    /// flight together.
    pub loads_at_once: usize,
    /// Number of products of tensor cores that it must have somewhere without a branch between.
    pub products_at_once: usize,
}

/// A program whose machine code is checked.
#[derive(Clone, Debug)]
pub struct Program {
    /// CUDA C++ without [`PTX_H`](crate::PTX_H) and [`DEVICE_H`](crate::DEVICE_H).
    pub source: &'static str,
    /// Macros (`-DNAME=VALUE`).
    pub macros: Vec<String>,
    /// Limits for each of its kernels.
    pub kernels: Vec<Limits>,
}

/// Compiles `programs(arch)` with NVRTC for every architecture that NVRTC and this crate support,
/// and checks the machine code with nvdisasm at `$NVDISASM`. Returns a line for each program that
/// breaks a limit.
///
/// # Panics
///
/// Without NVRTC or nvdisasm.
pub fn machine_code_problems(programs: impl Fn(i32) -> Vec<Program> + Sync) -> Vec<String> {
    let nvrtc = Nvrtc::global().expect("NVRTC is installed");
    assert!(nvrtc.version().0 > 0, "NVRTC_LIBRARY is a fake; set it to NVIDIA's");
    let nvdisasm = env::var_os("NVDISASM").expect("NVDISASM is the path of nvdisasm");
    // NVRTC 13 does not support sm_70, 12.1 nothing after sm_90.
    let all: &[i32] = if nvrtc.version().0 >= 13 { &[80, 90, 100, 120] } else { &[70, 75, 80, 90] };
    let work = all.iter().flat_map(|arch| programs(*arch).into_iter().map(|p| (p, *arch)));
    let problems = Mutex::new(Vec::new());
    in_parallel(work, |(program, arch)| {
        if let Err(text) = check(nvrtc, &program, arch, nvdisasm.as_ref()) {
            let text = format!("sm_{arch}, {:?}: {text}", program.macros);
            problems.lock().unwrap_or_else(PoisonError::into_inner).push(text);
        }
    });
    problems.into_inner().unwrap_or_else(PoisonError::into_inner)
}

/// Compiles programs, given by source and macros, for the architectures in `$ARCHS` (by default
/// `90`) into the cache of compiled kernels. Tests on a GPU with a copy of that folder need no
/// NVRTC.
///
/// # Panics
///
/// Without NVRTC.
pub fn fill_cache(programs: impl Iterator<Item = (&'static str, Vec<String>)> + Send) {
    let archs = env::var("ARCHS").unwrap_or_else(|_| "90".into());
    let arch = |text: &str| text.parse().expect("ARCHS are numbers, for example `80 90`");
    let archs: Vec<i32> = archs.split_whitespace().map(arch).collect();
    in_parallel(programs, |(source, macros)| {
        for arch in &archs {
            compiled(source, &macros, *arch).expect("NVRTC compiles the kernels");
        }
    });
}

fn in_parallel<T>(work: impl Iterator<Item = T> + Send, each: impl Fn(T) + Sync) {
    let work = Mutex::new(work);
    thread::scope(|scope| {
        for _ in 0..thread::available_parallelism().map_or(2, usize::from) {
            scope.spawn(|| {
                loop {
                    let next = work.lock().unwrap_or_else(PoisonError::into_inner).next();
                    let Some(next) = next else { break };
                    each(next);
                }
            });
        }
    });
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
    let mut at_once = [0; 2];
    for word in words().filter(|word| word.contains(".64") || word.contains(".128")) {
        match word.starts_with("LDG.") {
            true => at_once[0] += 1,
            false if word.starts_with("STG.") => at_once[0] = 0,
            false => {}
        }
        at_once[1] = at_once[1].max(at_once[0]);
    }
    if at_once[1] < limits.loads_at_once {
        return Err(format!("{kernel} has {} wide loads before a store", at_once[1]));
    }
    let products = products_at_once(body);
    if products < limits.products_at_once {
        return Err(format!("{kernel} has {products} products without a branch between"));
    }
    let wide = |kind: &str| words().any(|word| word.starts_with(kind) && word.contains(".128"));
    if (limits.wide_loads && !wide("LDG.")) || (limits.wide_stores && !wide("STG.")) {
        return Err(format!("{kernel} does not move 16 bytes at a time"));
    }
    Ok(())
}

/// The most products of tensor cores without a branch between.
fn products_at_once(body: &str) -> usize {
    let (mut most, mut count) = (0, 0);
    for word in body.split_whitespace() {
        if word.starts_with("HMMA.") {
            count += 1;
        } else if ["BRA", "BRX", "CALL", "RET", "EXIT"].iter().any(|kind| word.starts_with(kind)) {
            count = 0;
        }
        most = most.max(count);
    }
    most
}
