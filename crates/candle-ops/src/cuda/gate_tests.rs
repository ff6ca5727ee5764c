//! NVRTC's machine code of the kernels: no spills, no generic accesses, few registers, accesses of 16 bytes.
//!
//! Needs NVRTC and `nvdisasm`, which `.ci/kernels` installs from PyPI.

use std::path::Path;
use std::process::Command;
use std::{env, fs, process};

use cuda_rt::{Kernels, Nvrtc};

use super::{KERNELS, SOURCE, macros};

/// Registers that a thread may have: two blocks of 256 fit a processor's 65 536.
const BUDGET: u32 = 96;

#[test]
#[ignore = "needs NVIDIA's NVRTC and nvdisasm: .ci/kernels"]
fn kernels_compile_without_spills_for_every_architecture() {
    let nvrtc = Nvrtc::global().unwrap();
    assert!(nvrtc.version().0 > 0, "NVRTC_LIBRARY names NVIDIA's compiler, not the fake one");
    let tool = env::var_os("NVDISASM").expect("NVDISASM is nvdisasm's path");
    // 13 has no sm_70, 12.1 nothing after sm_90.
    let all: &[i32] = if nvrtc.version().0 >= 13 { &[80, 90, 100, 120] } else { &[70, 80, 90] };
    for arch in all {
        for macros in macros() {
            let code = compile(nvrtc, &macros, *arch);
            // nvdisasm knows nothing before sm_75.
            if *arch >= 75 {
                machine_code(tool.as_ref(), &code);
            }
        }
    }
}

fn compile(nvrtc: &Nvrtc, macros: &[String], arch: i32) -> Vec<u8> {
    let mut options = Kernels::options(macros, arch);
    options.push("--ptxas-options=-v".into());
    let cubin = nvrtc.compile(&Kernels::source(SOURCE), &options).unwrap();
    let entries: Vec<&str> = cubin.log.split("Compiling entry function '").skip(1).collect();
    assert_eq!(entries.len(), KERNELS.len(), "{}", cubin.log);
    for entry in entries {
        let clean = "0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads";
        assert!(entry.contains(clean), "sm_{arch} {macros:?}: {entry}");
        let used = entry.split("Used ").nth(1).and_then(|text| text.split(' ').next());
        let used: u32 = used.unwrap().parse().unwrap();
        assert!(used <= BUDGET, "sm_{arch} {macros:?}: {entry}");
    }
    cubin.code
}

/// Checks each kernel's instructions.
fn machine_code(tool: &Path, code: &[u8]) {
    let file = env::temp_dir().join(format!("gate-{}.cubin", process::id()));
    fs::write(&file, code).unwrap();
    let output = Command::new(tool).arg("-c").arg(&file).output().unwrap();
    fs::remove_file(&file).unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let text = String::from_utf8_lossy(&output.stdout);
    for kernel in KERNELS {
        let body = text.split(&format!("\n.text.{kernel}:")).nth(1).unwrap();
        let body = body.split("\n.text.").next().unwrap();
        let words = || body.split_whitespace();
        let generic = ["LD.", "ST.", "LDL", "STL"];
        let found = words().find(|word| generic.iter().any(|kind| word.starts_with(kind)));
        assert_eq!(found, None, "{kernel} has generic or local accesses");
        let wide = |kind: &str| words().any(|word| word.starts_with(kind) && word.contains(".128"));
        let (loads, stores) = match *kernel {
            // Gathers, and rows of any alignment.
            "col2im" | "max_pool" | "max_pool_backward" | "column_sums" => (false, false),
            "layer_norm" | "layer_norm_backward" | "softmax" | "softmax_backward" => (false, false),
            "cross_entropy" | "cross_entropy_backward" => (false, false),
            // Few numbers are written or read.
            "moments" | "norm_sums" | "mean_pool" => (true, false),
            "mean_pool_backward" => (false, true),
            _ => (true, true),
        };
        assert!(!loads || wide("LDG."), "{kernel} does not load 16 bytes at a time");
        assert!(!stores || wide("STG."), "{kernel} does not store 16 bytes at a time");
    }
}
