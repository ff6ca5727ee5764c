//! What NVRTC makes of the kernels: no spills, no generic accesses, 16 bytes at a time, few registers.
//!
//! Needs NVRTC and no GPU; `.ci/kernels` gets it, and `nvdisasm`, from PyPI.

use std::ffi::OsStr;
use std::path::Path;
use std::process::Command;
use std::sync::Mutex;
use std::{env, fs, process, thread};

use cuda_rt::{Nvrtc, options};

use super::Program;

/// Registers a thread of each kernel may have: so many blocks of 256 fit a processor's 65 536.
const BUDGET: [(&str, u32); 3] = [("cast", 64), ("unscale", 96), ("update", 40)];

fn programs(_: i32) -> Vec<Program> {
    let types = [[0, 1], [0, 2], [1, 0], [1, 2], [2, 0], [2, 1]];
    let casts = types.map(|types| Program { cast: Some(types) });
    [Program::SCALER].into_iter().chain(casts).collect()
}

/// The architectures each version is asked for: 13 has no sm_70, 12.1 nothing after sm_90.
const fn architectures(major: i32) -> &'static [i32] {
    if major >= 13 { &[80, 90, 100, 120] } else { &[70, 80, 90] }
}

#[test]
#[ignore = "needs NVIDIA's NVRTC and nvdisasm: .ci/kernels"]
fn kernels_compile_without_spills_for_every_architecture() {
    let nvrtc = Nvrtc::global().unwrap();
    let nvdisasm = env::var_os("NVDISASM").expect("NVDISASM is nvdisasm's path");
    let all = architectures(nvrtc.version().0)
        .iter()
        .flat_map(|arch| programs(*arch).into_iter().map(|program| (program, *arch)));
    let (work, problems) = (Mutex::new(all), Mutex::new(Vec::new()));
    thread::scope(|scope| {
        for _ in 0..2 {
            scope.spawn(|| {
                loop {
                    let Some((program, arch)) = work.lock().unwrap().next() else { break };
                    if let Err(text) = check(nvrtc, program, arch, &nvdisasm) {
                        problems.lock().unwrap().push(format!("sm_{arch}, {program:?}: {text}"));
                    }
                }
            });
        }
    });
    let problems = problems.into_inner().unwrap();
    assert!(problems.is_empty(), "{}", problems.join("\n"));
}

fn check(nvrtc: &Nvrtc, program: Program, arch: i32, nvdisasm: &OsStr) -> Result<(), String> {
    let mut options = options(&program.macros(), arch);
    options.push("--ptxas-options=-v".into());
    let cubin = nvrtc.compile(&Program::source(), &options).map_err(|error| error.to_string())?;
    let mut seen = 0;
    for entry in cubin.log.split("Compiling entry function '").skip(1) {
        seen += 1;
        let name = entry.split('\'').next().unwrap_or_default();
        let clean = "0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads";
        if !entry.contains(clean) {
            return Err(format!("{name} spills: {entry}"));
        }
        let used = entry.split("Used ").nth(1).and_then(|text| text.split(' ').next());
        let used: u32 = used.and_then(|text| text.parse().ok()).ok_or("no registers in the log")?;
        let budget = BUDGET.iter().find(|(kernel, _)| *kernel == name).map(|(_, budget)| *budget);
        if used > budget.ok_or_else(|| format!("{name} has no budget"))? {
            return Err(format!("{name} has {used} registers"));
        }
    }
    if seen != kernels(program).len() {
        return Err(format!("{seen} kernels in the log: {}", cubin.log));
    }
    // nvdisasm knows nothing before sm_75.
    match arch {
        75.. => machine_code(nvdisasm.as_ref(), program, &cubin.code),
        _ => Ok(()),
    }
}

/// Looks at each kernel's instructions.
fn machine_code(tool: &Path, program: Program, code: &[u8]) -> Result<(), String> {
    let id = format!("{:?}", thread::current().id()).replace(['(', ')'], "-");
    let file = env::temp_dir().join(format!("gate-{}-{id}.cubin", process::id()));
    fs::write(&file, code).unwrap();
    let output = Command::new(tool).arg("-c").arg(&file).output().map_err(|e| e.to_string())?;
    fs::remove_file(&file).unwrap();
    if !output.status.success() {
        return Err(String::from_utf8_lossy(&output.stderr).into_owned());
    }
    let text = String::from_utf8_lossy(&output.stdout);
    for kernel in kernels(program) {
        let head = format!("\n.text.{kernel}:");
        let body = text.split(&head).nth(1).ok_or_else(|| format!("no section of {kernel}"))?;
        let body = body.split("\n.text.").next().unwrap_or_default();
        let has = |what: &str, more: &str| {
            body.lines().any(|line| {
                line.split_whitespace().any(|word| word.starts_with(what) && word.contains(more))
            })
        };
        if has("LD.", "") || has("ST.", "") || has("LDL", "") || has("STL", "") {
            return Err(format!("{kernel} has generic or local accesses"));
        }
        let (loads, stores) = (has("LDG.", ".128"), has("STG.", ".128"));
        let (load, store) = match *kernel {
            "update" => (false, false),
            _ => (true, true),
        };
        if (load && !loads) || (store && !stores) {
            return Err(format!("{kernel} does not move 16 bytes at a time"));
        }
    }
    Ok(())
}

/// The names of a program's kernels.
const fn kernels(program: Program) -> &'static [&'static str] {
    if program.cast.is_some() { &["cast"] } else { &["unscale", "update"] }
}
