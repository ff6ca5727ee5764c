//! Compiles the shim over libgloo, if the feature `gloo` asks for it; otherwise does nothing.

fn main() {
    println!("cargo:rerun-if-changed=build.rs");
    #[cfg(feature = "gloo")]
    gloo();
}

#[cfg(feature = "gloo")]
fn gloo() {
    println!("cargo:rerun-if-changed=shim");
    println!("cargo:rerun-if-env-changed=CXX");
    println!("cargo:rerun-if-env-changed=CXXFLAGS");
    let mut build = cc::Build::new();
    build.cpp(true).std("c++17").file("shim/gloo.cc");
    build.flag("-idirafter").flag("shim/missing");
    // Gloo's headers are not ours to warn about.
    build.warnings(false);
    if let Err(error) = build.try_compile("collective_gloo_shim") {
        println!(
            "cargo:warning=the feature `gloo` of `collective` needs a C++17 compiler and libgloo with \
             its headers; on Debian: apt-get install g++ libgloo-dev"
        );
        println!("cargo:warning={error}");
        std::process::exit(1);
    }
    println!("cargo:rustc-link-lib=dylib=gloo");
}
