//! The dependency rules of ARCHITECTURE.md: between crates, checked in the manifests; between the folders of `runner`
//! and of `launch`, checked in their imports.

use std::collections::BTreeSet;
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
    ("candle-train", &["amp", "candle-ops", "collective", "fused-optim", "train-data"]),
    (
        "runner",
        &["amp", "candle-ops", "candle-train", "collective", "fused-optim", "launch", "train-data"],
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
        value.get("package").and_then(Value::as_str).unwrap_or(key).to_owned()
    };
    let own = tables.flatten().map(name);
    let targets = manifest.get("target").and_then(Value::as_table).into_iter().flatten();
    let targets = targets.filter_map(|(_, part)| part.as_table()).flat_map(dependencies);
    own.chain(targets).collect()
}

/// `runner`'s folders (a file beside them is one, too), from the bottom up: each imports only from those before it.
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
    "cli",
];

/// The same for `launch`.
const LAUNCH_FOLDERS: &[&str] =
    &["error", "address", "options", "rank", "output", "job", "nodes", "cli"];

/// Imports of `runner` that run back up and are still there: from, to.
const EXCEPTIONS: &[(&str, &str)] = &[("engine", "model")];

#[test]
fn no_import_between_folders_runs_back_up() {
    check_imports("runner", FOLDERS, EXCEPTIONS);
    check_imports("launch", LAUNCH_FOLDERS, &[]);
}

/// Fails if a folder of a crate imports from one behind it in `folders`, unless that is one of `exceptions`, or if no
/// import needs an exception.
fn check_imports(krate: &str, folders: &[&str], exceptions: &[(&str, &str)]) {
    let src = tests::root().join("crates").join(krate).join("src");
    let (mut wrong, mut excused) = (Vec::new(), BTreeSet::new());
    for file in rust_files(&src) {
        let name = file.strip_prefix(&src).unwrap();
        let folder = name.components().next().unwrap().as_os_str().to_str().unwrap();
        let folder = folder.trim_end_matches(".rs");
        let stem = file.file_stem().unwrap().to_str().unwrap();
        // The roots of the library and the program, and files of tests alone.
        if ["lib", "main", "testing"].contains(&folder) || stem.ends_with("tests") {
            continue;
        }
        let rank = |name: &str| folders.iter().position(|folder| *folder == name);
        let own =
            rank(folder).unwrap_or_else(|| panic!("the folders of {krate} do not have `{folder}`"));
        for (line, import) in imports(&std::fs::read_to_string(&file).unwrap()) {
            // What the root of the library re-exports has no folder: `crate::Result`.
            let Some(other) = rank(&import).filter(|other| *other > own) else { continue };
            match exceptions.iter().find(|known| **known == (folder, folders[other])) {
                Some(known) => drop(excused.insert(*known)),
                None => wrong.push(format!("{}:{line}: {folder} imports {import}", name.display())),
            }
        }
    }
    assert!(wrong.is_empty(), "imports that run back up:\n{}", wrong.join("\n"));
    let unused = exceptions.iter().find(|known| !excused.contains(*known));
    assert!(unused.is_none(), "no import needs the exception {unused:?} any more");
}

#[test]
fn every_form_of_import_is_read() {
    let text = "use crate::a::b;\nuse crate::{Error, b::{self, C}, c, d as e};\nfn f() { crate::f::g() }\n\
                pub use crate::{\n    g::h,\n    i,\n};\n/// [`crate::docs`]\n// crate::comment\n\
                #[cfg(test)]\nmod tests {\n    use crate::only::tests;\n}\n";
    let expected =
        [(1, "a"), (2, "Error"), (2, "b"), (2, "c"), (2, "d"), (3, "f"), (4, "g"), (4, "i")];
    assert_eq!(imports(text), expected.map(|(line, name)| (line, name.to_owned())));
}

fn rust_files(folder: &Path) -> Vec<PathBuf> {
    let entries = std::fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path());
    let (folders, files): (Vec<_>, Vec<_>) = entries.partition(|path| path.is_dir());
    let files = files.into_iter().filter(|path| path.extension().is_some_and(|e| e == "rs"));
    files.chain(folders.iter().flat_map(|folder| rust_files(folder))).collect()
}

/// What stands behind each `crate::` before a file's tests, and its line, counted from 1; of `crate::{..}` each name
/// that begins a path.
fn imports(text: &str) -> Vec<(usize, String)> {
    let lines: Vec<_> = text.lines().take_while(|line| !line.starts_with("#[cfg(test)]")).collect();
    let code: Vec<_> = lines.iter().map(|line| line.split("//").next().unwrap()).collect();
    let code = code.join("\n");
    let mut found = Vec::new();
    for (at, path) in code.match_indices("crate::") {
        let line = code[..at].matches('\n').count() + 1;
        let rest = &code[at + path.len()..];
        let names = rest.strip_prefix('{').map_or_else(|| vec![head(rest)], heads);
        found.extend(names.into_iter().map(|name| (line, name)));
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
