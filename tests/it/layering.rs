//! The dependency rules of ARCHITECTURE.md: between crates, checked in the manifests; between the
//! folders of each crate, checked in their imports.

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};

use toml::{Table, Value};

/// Each crate, and the workspace crates it may depend on.
const ALLOWED: &[(&str, &[&str])] = &[
    ("cuda-rt", &[]),
    ("npu-sys", &[]),
    ("amp", &["cuda-rt", "npu-sys"]),
    ("candle-ops", &["amp", "cuda-rt"]),
    ("collective", &["cuda-rt", "npu-sys"]),
    ("fused-optim", &["cuda-rt", "npu-sys"]),
    ("launch", &["collective"]),
    ("train-data", &[]),
    ("train-log", &[]),
    ("train-step", &["amp", "collective", "fused-optim"]),
    (
        "candle-train",
        &["amp", "candle-ops", "collective", "fused-optim", "train-data", "train-step"],
    ),
    (
        "runner",
        &[
            "amp",
            "candle-ops",
            "candle-train",
            "collective",
            "fused-optim",
            "launch",
            "train-data",
            "train-log",
            "train-step",
        ],
    ),
];

#[test]
fn crates_import_only_what_the_rules_allow() {
    for (krate, allowed) in ALLOWED {
        let dependencies = dependencies(&manifest(krate));
        for dependency in &dependencies {
            // A crate names itself among what its tests need, to have them cover its features.
            let ours = ALLOWED.iter().any(|(name, _)| name == dependency && name != krate);
            assert!(
                !ours || allowed.contains(&dependency.as_str()),
                "{krate} must not depend on {dependency}"
            );
        }
        assert!(!dependencies.is_empty(), "{krate}'s manifest lists no dependency");
    }
}

#[test]
fn every_kind_of_dependency_is_read() {
    let manifest = r#"
        [dependencies]
        a.workspace = true
        renamed = { package = "b", version = "1" }
        [dev-dependencies]
        c = "1"
        [build-dependencies]
        d = { version = "1", optional = true }
        [target.'cfg(unix)'.dependencies]
        e = "1"
    "#;
    let names = dependencies(&toml::from_str(manifest).unwrap());
    assert_eq!(names, ["a", "b", "c", "d", "e"].map(str::to_owned).into());
}

fn manifest(krate: &str) -> Table {
    let path = tests::root().join("crates").join(krate).join("Cargo.toml");
    toml::from_str(&std::fs::read_to_string(path).unwrap()).unwrap()
}

/// Names of the crates that a manifest, or the part for one target, depends on: optional ones too.
fn dependencies(manifest: &Table) -> BTreeSet<String> {
    let kinds = ["dependencies", "dev-dependencies", "build-dependencies"];
    let tables = kinds.iter().filter_map(|kind| manifest.get(*kind)?.as_table());
    let name = |(key, value): (&String, &Value)| {
        let package = value.get("package").and_then(Value::as_str).unwrap_or(key);
        package.strip_prefix("gradstack-").unwrap_or(package).to_owned()
    };
    let own = tables.flatten().map(name);
    let targets = manifest.get("target").and_then(Value::as_table).into_iter().flatten();
    let targets = targets.filter_map(|(_, part)| part.as_table()).flat_map(dependencies);
    own.chain(targets).collect()
}

/// `runner`'s folders (a file beside them is one, too), from the bottom up: each imports only from
/// those before it.
const FOLDERS: &[&str] = &[
    "error",
    "signals",
    "pretrained",
    "config",
    "registry",
    "data",
    "evaluate",
    "losses",
    "schedulers",
    "sinks",
    "placement",
    "engine",
    "model",
    "optim_wrapper",
    "checkpoint",
    "runner",
    "hooks",
    "from_config",
    "zoo",
    "cli",
];

/// The same for `launch`.
const LAUNCH_FOLDERS: &[&str] =
    &["error", "address", "options", "rank", "output", "job", "nodes", "cli"];

/// The same for `candle-ops`. An operator finds its kernel by a trait of `kernels`, which `cuda`
/// implements.
const OPERATOR_FOLDERS: &[&str] = &[
    "error",
    "sizes",
    "kernels",
    "cpu",
    "state",
    "graph",
    "cuda",
    "autocast",
    "elementwise",
    "activation",
    "linear",
    "recurrent",
    "index",
    "conv",
    "norm",
    "image",
    "attention",
    "loss",
    "nn",
];

/// The same for `amp`.
const AMP_FOLDERS: &[&str] = &[
    "dtype",
    "error",
    "autocast",
    "cpu",
    "cast",
    "found_inf",
    "unscale",
    "scaler",
    "overflow",
    "grad_scaler",
    "cuda",
    "npu",
];

/// The same for `fused-optim`.
const OPTIM_FOLDERS: &[&str] = &[
    "param",
    "hyper_param",
    "error",
    "state_dict",
    "layout",
    "names",
    "cpu",
    "rule",
    "clip",
    "step",
    "norms",
    "state",
    "sweep",
    "core",
    "device",
    "optimizer",
    "averaged",
    "cpu_optimizer",
    "elementwise",
    "rules",
    "torch",
    "cuda",
    "npu",
    "candle",
];

/// The same for `train-data`.
const DATA_FOLDERS: &[&str] = &[
    "workers",
    "error",
    "named",
    "array",
    "collate",
    "dataset",
    "sampler",
    "transforms",
    "image_folder",
    "loader",
    "stream",
    "tokens",
    "metrics",
];

/// The same for `train-log`.
const LOG_FOLDERS: &[&str] = &[
    "error",
    "format",
    "appender",
    "json",
    "run_dir",
    "scalar_file",
    "event_file",
    "chrome_trace",
    "logger",
    "train_log",
];

/// The same for `cuda-rt`.
const CUDA_FOLDERS: &[&str] = &[
    "cache", "slice", "error", "device", "library", "driver", "nvrtc", "staging", "gpu", "kernels",
    "candle",
];

/// The same for `npu-sys`.
const NPU_FOLDERS: &[&str] = &[
    "installed",
    "loader",
    "types",
    "status",
    "returned",
    "plan",
    "table",
    "sys",
    "headers",
    "result",
    "probe",
    "soc",
    "safe",
];

/// The same for `candle-train`.
const TRAIN_FOLDERS: &[&str] = &[
    "error",
    "process",
    "device",
    "age",
    "data",
    "tensors",
    "gpu",
    "pinned",
    "inputs",
    "graph",
    "eval",
    "backward",
    "variables",
    "gradient_check",
    "first_step",
    "compile",
    "averages",
    "pass",
    "trainer",
    "step_on",
    "stored",
    "sums",
    "batches",
    "mean_loss",
    "builder",
    "parts",
    "trainers",
    "resumable",
];

/// The same for `train-step`.
const STEP_FOLDERS: &[&str] = &[
    "error",
    "spec",
    "compile",
    "accumulation",
    "groups",
    "schedule",
    "device",
    "context",
    "model",
    "averages",
    "optim",
    "checkpoint",
    "trainer",
];

/// The same for `collective`.
const COLLECTIVE_FOLDERS: &[&str] = &[
    "error", "sync", "op", "memory", "simd", "net", "store", "options", "algo", "backend", "sim",
    "work", "flight", "device", "group", "reducer", "init", "dist",
];

/// The same within `collective`'s `backend`, whose `mod.rs` has the trait.
const BACKEND_FOLDERS: &[&str] = &[
    "device_memory",
    "failure",
    "frame",
    "core",
    "peer_queue",
    "shared_config",
    "rendezvous",
    "host",
    "tcp",
    "gloo",
    "device",
    "nccl",
    "hccl",
    "transport",
];

#[test]
fn no_import_between_folders_runs_back_up() {
    check_imports("runner", &[], FOLDERS);
    check_imports("launch", &[], LAUNCH_FOLDERS);
    check_imports("candle-ops", &[], OPERATOR_FOLDERS);
    check_imports("collective", &[], COLLECTIVE_FOLDERS);
    check_imports("amp", &[], AMP_FOLDERS);
    check_imports("fused-optim", &[], OPTIM_FOLDERS);
    check_imports("train-data", &[], DATA_FOLDERS);
    check_imports("train-log", &[], LOG_FOLDERS);
    check_imports("cuda-rt", &[], CUDA_FOLDERS);
    check_imports("npu-sys", &[], NPU_FOLDERS);
    check_imports("train-step", &[], STEP_FOLDERS);
    check_imports("candle-train", &[], TRAIN_FOLDERS);
    check_imports("collective", &["backend"], BACKEND_FOLDERS);
}

/// Fails if a folder in a crate's module `root` imports from one behind it in `folders`.
fn check_imports(krate: &str, root: &[&str], folders: &[&str]) {
    let src = tests::root().join("crates").join(krate).join("src");
    let src = root.iter().fold(src, |path, name| path.join(name));
    let file = src.join(if root.is_empty() { "lib.rs" } else { "mod.rs" });
    let reexports = reexports(&std::fs::read_to_string(file).unwrap());
    let absolute: String = root.iter().map(|name| format!("{name}::")).collect();
    let mut wrong = Vec::new();
    for file in rust_files(&src) {
        let name = file.strip_prefix(&src).unwrap();
        let folder = name.components().next().unwrap().as_os_str().to_str().unwrap();
        let folder = folder.trim_end_matches(".rs");
        let stem = file.file_stem().unwrap().to_str().unwrap();
        // The roots of the library, the program and the module, and files of tests alone.
        let is_root = ["lib", "main", "mod"].contains(&folder);
        if is_root || ["tests", "testing"].contains(&folder) || stem.ends_with("tests") {
            continue;
        }
        let rank = |name: &str| {
            let folder = reexports.get(name).map_or(name, String::as_str);
            folders.iter().position(|known| *known == folder)
        };
        let own =
            rank(folder).unwrap_or_else(|| panic!("the folders of {krate} do not have `{folder}`"));
        let depth = name.components().count() - usize::from(stem == "mod");
        let roots = [format!("crate::{absolute}"), "super::".repeat(depth)];
        for (line, import) in imports(&std::fs::read_to_string(&file).unwrap(), &roots) {
            // Items that the root itself defines, such as `crate::Rank`, have no folder.
            let Some(other) = rank(&import).filter(|other| *other > own) else { continue };
            let to = folders[other];
            wrong.push(format!("{}:{line}: {folder} imports {import} ({to})", name.display()));
        }
    }
    assert!(wrong.is_empty(), "imports that run back up:\n{}", wrong.join("\n"));
}

#[test]
fn every_form_of_import_is_read() {
    let text = "use crate::a::b;\nuse crate::{Error, b::{self, C}, c, d as e};\nfn f() { crate::f::g() }\n\
                pub use crate::{\n    g::h,\n    i,\n};\n/// [`crate::docs`]\n// crate::comment\n\
                #[cfg(test)]\nmod tests {\n    use crate::only::tests;\n}\n";
    let expected =
        [(1, "a"), (2, "Error"), (2, "b"), (2, "c"), (2, "d"), (3, "f"), (4, "g"), (4, "i")];
    let roots = ["crate::".to_owned(), "super::super::".to_owned()];
    assert_eq!(imports(text, &roots), expected.map(|(line, name)| (line, name.to_owned())));
    let text = "use super::super::a;\nuse super::b;\nuse super::c::d;\n\
                #[cfg(doc)]\nuse crate::{\n    d,\n};\nuse crate::e;\n";
    let expected = [(8, "e"), (1, "a")];
    assert_eq!(imports(text, &roots), expected.map(|(line, name)| (line, name.to_owned())));
    let text = "mod a;\npub use a::{A, b::C};\npub(crate) use self::d::e::{\n    F,\n};\npub use g::H;\n\
                use std::fmt;\n";
    let expected = [("A", "a"), ("C", "a"), ("F", "d"), ("H", "g")];
    let expected = expected.map(|(name, folder)| (name.to_owned(), folder.to_owned()));
    assert_eq!(reexports(text), expected.into());
}

fn rust_files(folder: &Path) -> Vec<PathBuf> {
    let entries = std::fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path());
    let (folders, files): (Vec<_>, Vec<_>) = entries.partition(|path| path.is_dir());
    let files = files.into_iter().filter(|path| path.extension().is_some_and(|e| e == "rs"));
    files.chain(folders.iter().flat_map(|folder| rust_files(folder))).collect()
}

/// The imports of a file: the line, counted from 1, and the first path segment after each of
/// `roots`, such as `crate::`; for a group `crate::{..}`, the first segment of each of its paths.
/// Tests and imports for the documentation alone are skipped.
fn imports(text: &str, roots: &[String]) -> Vec<(usize, String)> {
    let lines = text.lines().take_while(|line| !line.starts_with("#[cfg(test)]"));
    let mut doc = false;
    let code = lines.map(|line| {
        let code = line.split("//").next().unwrap();
        let skipped = doc || code == "#[cfg(doc)]";
        doc = skipped && !code.ends_with(';');
        if skipped { "" } else { code }
    });
    let code = code.collect::<Vec<_>>().join("\n");
    let mut found = Vec::new();
    for (at, path) in roots.iter().flat_map(|root| code.match_indices(root.as_str())) {
        if code[..at].ends_with("super::") {
            continue;
        }
        let line = code[..at].matches('\n').count() + 1;
        let rest = &code[at + path.len()..];
        let names = rest.strip_prefix('{').map_or_else(|| vec![head(rest)], heads);
        found.extend(names.into_iter().map(|name| (line, name)));
    }
    found
}

/// The names that a module re-exports, and the folder of each.
fn reexports(text: &str) -> BTreeMap<String, String> {
    let uses = text.split(';').filter_map(|item| item.rsplit_once("use "));
    let uses = uses
        .filter(|(before, _)| before.trim_end().rsplit('\n').next().unwrap().starts_with("pub"));
    let mut found = BTreeMap::new();
    for (_, path) in uses {
        let path = path.trim_start_matches("self::").trim_start_matches("crate::");
        let names = path.split(['{', '}', ',']).filter(|name| !name.trim().ends_with("::"));
        let names = names.map(|name| name.rsplit("::").next().unwrap().trim());
        let names = names.filter(|name| !name.is_empty());
        found.extend(names.map(|name| (name.to_owned(), head(path))));
    }
    found
}

/// The names that begin the paths of a group, up to its closing brace.
fn heads(group: &str) -> Vec<String> {
    let (mut depth, mut start, mut names) = (0, 0, Vec::new());
    for (at, c) in group.char_indices() {
        match c {
            '{' => depth += 1,
            '}' if depth > 0 => depth -= 1,
            ',' | '}' if depth == 0 => {
                names.push(head(&group[start..at]));
                start = at + 1;
                if c == '}' {
                    break;
                }
            }
            _ => {}
        }
    }
    names.retain(|name| !name.is_empty());
    names
}

fn head(path: &str) -> String {
    path.trim_start().chars().take_while(|c| c.is_alphanumeric() || *c == '_').collect()
}
