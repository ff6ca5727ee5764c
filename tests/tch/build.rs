//! Compiles `src/shim.cpp` against the libtorch that `LIBTORCH` names, which is where tch takes its
//! from.

use std::path::PathBuf;

fn main() {
    for input in ["src/shim.cpp", "build.rs"] {
        println!("cargo::rerun-if-changed={input}");
    }
    println!("cargo::rerun-if-env-changed=LIBTORCH");
    let torch = std::env::var_os("LIBTORCH").expect("LIBTORCH names a libtorch, see .ci/tch");
    let include = PathBuf::from(torch).join("include");
    cc::Build::new()
        .cpp(true)
        .std("c++20")
        .file("src/shim.cpp")
        .warnings(false)
        .include(include.join("torch/csrc/api/include"))
        .include(include)
        .compile("tch_engine");
}
