//! Writes candle-transformers' files of BERT and Llama with `candle_ops::nn` in place of
//! `candle_nn`.

use std::path::PathBuf;
use std::process::Command;
use std::{env, fs};

fn main() {
    println!("cargo::rerun-if-changed=build.rs");
    let source = source();
    let out = PathBuf::from(env::var_os("OUT_DIR").expect("cargo sets it"));
    let files = ["bert.rs", "llama.rs", "with_tracing.rs"];
    for file in files {
        let text = fs::read_to_string(source.join("src/models").join(file))
            .expect("a file of candle-transformers");
        fs::write(out.join(file), moved(&text)).expect("written");
    }
}

/// The model with the other layers, and, so that differences of `f64` can be taken, without casts
/// to `f32`.
fn moved(text: &str) -> String {
    let lines = text.lines().filter(|line| !line.starts_with("//!"));
    let text: String = lines.flat_map(|line| [line, "\n"]).collect();
    // Quantized wrappers beside the layers need another module of candle-transformers.
    let text = match (
        text.find("// QMatMul wrapper"),
        text.find("#[derive(Clone, Debug)]\npub struct LayerNorm"),
    ) {
        (Some(start), Some(end)) if start < end => format!("{}{}", &text[..start], &text[end..]),
        _ => text,
    };
    let mut text = text
        .replace("candle_nn::", "candle_ops::nn::")
        .replace("crate::utils", "candle_transformers::utils")
        .replace("on_true: f32)", "on_true: crate::Wide)")
        .replace("f32::NEG_INFINITY", "crate::Wide::NEG_INFINITY");
    for name in ["q", "k", "v", "logits"] {
        let cast = |to: &str| format!("{name}.to_dtype({to})");
        text = text.replace(&cast("DType::F32"), &cast("crate::WIDE"));
    }
    text
}

/// The folder of candle-transformers' sources, from `cargo metadata`.
fn source() -> PathBuf {
    let cargo = env::var_os("CARGO").expect("cargo sets it");
    let output = Command::new(cargo)
        .args(["metadata", "--format-version", "1", "--offline"])
        .output()
        .expect("cargo metadata");
    let text = String::from_utf8(output.stdout).expect("JSON");
    let metadata: serde_json::Value = serde_json::from_str(&text).expect("JSON");
    let packages = metadata["packages"].as_array().expect("packages");
    let package =
        packages.iter().find(|p| p["name"] == "candle-transformers").expect("a dependency");
    let manifest = PathBuf::from(package["manifest_path"].as_str().expect("a path"));
    manifest.parent().expect("a folder").to_owned()
}
