//! The pages of the book, and the READMEs, beside the code: what they quote, list and configure is
//! as the source has it.

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;

use runner::RunnerBuilder;
use runner::config::Config;

fn read(path: impl AsRef<Path>) -> String {
    std::fs::read_to_string(tests::root().join(path)).unwrap()
}

fn page(name: &str) -> String {
    read(format!("crates/gradstack/src/{name}.md"))
}

/// Returns the code blocks in `language`.
fn blocks<'a>(page: &'a str, language: &str) -> Vec<&'a str> {
    let fence = format!("```{language}\n");
    page.split(&fence).skip(1).map(|rest| rest.split("```").next().unwrap()).collect()
}

/// Returns the text between backticks.
fn code(text: &str) -> impl Iterator<Item = &str> {
    text.split('`').skip(1).step_by(2)
}

/// Every line of the two blocks that are not compiled here is in the example they are from, in its
/// order.
#[test]
fn quotes_are_from_the_examples() {
    for (name, file) in [("burn", "examples/burn/src/full.rs"), ("tch", "tests/tch/src/lib.rs")] {
        let (page, source) = (page(name), read(file));
        assert!(page.contains(&format!("From `{file}`")), "{name}");
        let quotes = blocks(&page, "rust,ignore");
        assert_eq!(quotes.len(), 1, "{name}");
        let mut rest = source.lines().map(|line| line.trim_start_matches("//!").trim());
        for line in quotes[0].lines().map(str::trim).filter(|line| !line.is_empty()) {
            assert!(rest.any(|known| known == line), "{file} does not have this line: {line}");
        }
    }
}

/// Numbers of lines with code, of the files in the table of a folder's README, which has them.
fn code_lines(folder: &str) -> BTreeMap<String, usize> {
    let text = read(format!("{folder}/README.md"));
    let rows = text.lines().filter(|line| line.starts_with("| [`"));
    let counted = rows.map(|row| {
        let file = code(row).next().unwrap();
        let source = read(format!("{folder}/{file}"));
        let lines = source.lines().map(str::trim);
        let count = lines.filter(|line| !line.is_empty() && !line.starts_with("//")).count();
        assert!(row.contains(&format!("| {count} |")), "{folder}: {count} lines: {row}");
        (file.to_owned(), count)
    });
    counted.collect()
}

/// A loop with all of `train-step` is at most 15 lines longer than one without.
#[test]
fn everything_takes_at_most_15_lines() {
    let burn = ("examples/burn", "src/plain.rs", "src/full.rs");
    let tch = ("tests/tch", "examples/base.rs", "examples/trainer.rs");
    for (folder, plain, full) in [burn, tch] {
        let lines = code_lines(folder);
        assert!(lines[full] <= lines[plain] + 15, "{folder}: {lines:?}");
    }
}

/// Each variant of the errors has a row that says what to do.
#[test]
fn every_error_has_a_row() {
    let page = page("hangs");
    for krate in ["collective", "launch", "runner"] {
        let source = read(format!("crates/{krate}/src/error.rs"));
        let body = source.split("pub enum Error {").nth(1).unwrap().split("\n}").next().unwrap();
        let variants = body.lines().filter_map(|line| line.strip_prefix("    "));
        let variants = variants.filter(|line| line.starts_with(|c: char| c.is_ascii_uppercase()));
        let name = |line: &str| line.split([' ', '(', ',']).next().unwrap().to_owned();
        let variants: Vec<_> = variants.map(name).collect();
        assert!(variants.len() > 3, "{variants:?}");
        for variant in variants {
            let link = format!("[`{variant}`]({krate}::Error::{variant})");
            assert!(page.contains(&link), "hangs.md has no row for {link}");
        }
    }
}

/// Reads the configuration on the page with overrides.
fn configured(page: &str, options: &[String]) -> Result<(), String> {
    runner::zoo::register();
    let text = blocks(page, "toml")[0];
    let mut config = Config::from_text("page.toml", text).unwrap();
    config.override_with(options).map_err(|error| error.to_string())?;
    RunnerBuilder::from_config(config).map(drop).map_err(|error| error.to_string())
}

#[test]
fn the_configuration_for_mmengine_is_right() {
    configured(&page("mmengine"), &[]).unwrap();
}

/// Keys and types in the table of what is not supported.
fn unsupported(page: &str) -> Vec<String> {
    let table = page.split("# Not supported").nth(1).unwrap();
    let rows = table.lines().filter(|line| line.starts_with("| `"));
    rows.flat_map(|row| code(row.split('|').nth(1).unwrap()).map(str::to_owned)).collect()
}

#[test]
fn unsupported_keys_on_the_page_are_errors_that_name_them() {
    let page = page("mmengine");
    let keys = unsupported(&page);
    assert!(keys.len() > 40, "{keys:?}");
    for key in keys {
        let options = match key.split_once('=') {
            Some((list @ ("custom_hooks" | "train_dataloader.dataset.pipeline"), name)) => {
                vec![format!("{list}=[{{ type = '{name}' }}]")]
            }
            Some(_) => vec![key.clone()],
            None if key.starts_with("default_hooks.ema") => {
                vec!["default_hooks.ema.type=EMAHook".to_owned(), format!("{key}=1")]
            }
            None => vec![format!("{key}=1")],
        };
        let refusal = configured(&page, &options).expect_err(&key);
        let name = key.rsplit(['.', '=']).next().unwrap();
        let name = if key.ends_with("mmdet.ResNet") { "mmdet.ResNet" } else { name };
        let wanted = format!("`{name}` is not supported");
        assert!(refusal.contains(&wanted), "{key}: {refusal}");
    }
}

/// Each name that the source refuses is in the table.
#[test]
fn every_unsupported_key_is_on_the_page() {
    let listed = page("mmengine");
    let listed: BTreeSet<_> = unsupported(&listed)
        .iter()
        .flat_map(|key| key.split(['.', '=']).map(str::to_owned))
        .collect();
    let mut names = BTreeSet::new();
    for file in ["registry.rs", "from_config.rs"] {
        let source = read(Path::new("crates/runner/src").join(file));
        for start in ["const LEFT_OUT", "const SERVICES"] {
            let Some(table) = source.split(start).nth(1) else { continue };
            let table = table.split("];").next().unwrap();
            let strings = table.split('"').skip(1).step_by(2);
            names.extend(strings.filter(|s| !s.contains(' ')).map(str::to_owned));
        }
    }
    for file in [
        "from_config.rs",
        "optim_wrapper/builtin.rs",
        "hooks/ema.rs",
        "hooks/logger.rs",
        "hooks/checkpoint.rs",
    ] {
        let source = read(Path::new("crates/runner/src").join(file));
        let calls =
            source.split("refuse(").skip(1).filter_map(|rest| rest.trim_start().strip_prefix('"'));
        names.extend(calls.map(|rest| rest.split('"').next().unwrap().to_owned()));
    }
    // Of a stream, which MMEngine does not have.
    names.remove("sampler");
    assert!(names.len() > 35, "{names:?}");
    let missing: Vec<_> = names.difference(&listed).collect();
    assert!(missing.is_empty(), "mmengine.md does not list {missing:?}");
}

/// Returns the crates except the book.
fn crates() -> Vec<String> {
    let folders = std::fs::read_dir(tests::root().join("crates")).unwrap();
    let names = folders.map(|folder| folder.unwrap().file_name().into_string().unwrap());
    names.filter(|name| name != "gradstack").collect()
}

/// A README begins with the program of `tests/consumers`, which depends on that crate of ours
/// alone.
#[test]
fn readmes_begin_with_the_consumers_programs() {
    assert_eq!(crates().len(), 12);
    for krate in crates() {
        let readme = read(format!("crates/{krate}/README.md"));
        let (fence, rest) = readme.split("```").nth(1).unwrap().split_once('\n').unwrap();
        assert!(["rust", "rust,no_run"].contains(&fence), "{krate}: {fence}");
        let program = read(format!("tests/consumers/{krate}/src/main.rs"));
        let (_, program) = program.split_once("\n\n").unwrap();
        assert_eq!(rest, program, "{krate}'s README and tests/consumers/{krate} differ");

        let manifest: toml::Table =
            toml::from_str(&read(format!("tests/consumers/{krate}/Cargo.toml"))).unwrap();
        for (name, version) in manifest["dependencies"].as_table().unwrap() {
            let wanted = match version.as_str() {
                Some(version) => format!("`{name} = \"{version}\"`"),
                None => format!("`{name} = {{ path = \"../gradstack/crates/{krate}\" }}`"),
            };
            assert!(readme.contains(&wanted), "{krate}'s README does not have {wanted}");
        }
        let ours = |(_, value): &(&String, &toml::Value)| value.get("path").is_some();
        let ours: Vec<_> =
            manifest["dependencies"].as_table().unwrap().iter().filter(ours).collect();
        assert!(
            matches!(ours[..], [(name, _)] if *name == format!("gradstack-{krate}")),
            "{ours:?}"
        );
    }
}

#[test]
fn the_readme_counts_the_optimizers_right() {
    let rules = read("crates/fused-optim/src/rules/mod.rs");
    let count =
        rules.lines().filter(|line| line.starts_with("pub use") && line.contains("Hyper")).count();
    assert_eq!(count, 13);
    let readme = read("README.md").to_lowercase();
    assert_eq!(readme.matches("thirteen").count(), 2, "README.md counts other optimizers");
    assert!(!readme.contains("eleven"));
}
