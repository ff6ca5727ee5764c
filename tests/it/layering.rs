//! The dependency rules of ARCHITECTURE.md, checked.

use std::process::Command;

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
        let dependencies = dependencies(krate);
        for dependency in &dependencies {
            let ours = ALLOWED.iter().any(|(name, _)| name == dependency);
            assert!(
                !ours || allowed.contains(&dependency.as_str()),
                "{krate} must not depend on {dependency}"
            );
        }
        // The list is really read: a crate without any dependency would hide a broken command.
        assert!(!dependencies.is_empty(), "`cargo tree` lists no dependency of {krate}");
    }
}

/// Every feature but `candle-cuda`, which has the dependencies of `candle`, and others of candle's own that
/// are on few machines.
fn features(krate: &str) -> String {
    let path = tests::root().join("crates").join(krate).join("Cargo.toml");
    let manifest = std::fs::read_to_string(path).unwrap();
    let table = manifest.split("\n[features]\n").nth(1).unwrap_or_default();
    let lines = table.lines().take_while(|line| !line.starts_with('['));
    let names = lines.filter_map(|line| Some(line.split_once(" = ")?.0));
    let names: Vec<_> =
        names.filter(|name| !name.starts_with('#') && *name != "candle-cuda").collect();
    names.join(",")
}

fn dependencies(krate: &str) -> Vec<String> {
    let output = Command::new(env!("CARGO"))
        .args(["tree", "--offline", "-p", krate, "-e", "normal,build,dev", "--depth", "1"])
        .args(["--features", &features(krate), "--prefix", "none", "-f", "{p}"])
        .current_dir(tests::root())
        .output()
        .unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let text = String::from_utf8_lossy(&output.stdout);
    let names = text.lines().skip(1).filter_map(|line| line.split(' ').next());
    names.filter(|name| !name.is_empty()).map(str::to_owned).collect()
}
