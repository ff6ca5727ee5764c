//! The dependency rules of ARCHITECTURE.md, checked in the manifests.

use std::collections::BTreeSet;

use toml::{Table, Value};

/// Each crate, and the workspace crates it may depend on.
const ALLOWED: &[(&str, &[&str])] = &[
    ("npu-sys", &[]),
    ("amp", &["npu-sys"]),
    ("collective", &["npu-sys"]),
    ("fused-optim", &["npu-sys"]),
    ("runner", &["amp", "collective", "fused-optim"]),
];

#[test]
fn crates_import_only_what_the_rules_allow() {
    for (krate, allowed) in ALLOWED {
        let dependencies = dependencies(&manifest(krate));
        for dependency in &dependencies {
            let ours = ALLOWED.iter().any(|(name, _)| name == dependency);
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
