//! `_base_`: a file inherits from other files and overrides some of their keys.
//!
//! Tables are merged key by key; any other value is replaced. A table with `_delete_ = true`
//! replaces the base's table. Two bases of one file must not share a key.

use std::path::{Path, PathBuf};

use super::interpolate::interpolate;
use super::tree::{Entry, Node, Value};
use crate::{Error, Result};

/// Maximum number of files in a chain of bases.
const MAX_CHAIN: usize = 32;

/// Reads a file and its bases. Also returns its text if it has no base.
pub(super) fn read(path: &Path) -> Result<(Node, Option<String>)> {
    read_inner(path, &mut Vec::new())
}

fn read_inner(path: &Path, open: &mut Vec<PathBuf>) -> Result<(Node, Option<String>)> {
    let name = path.display().to_string();
    let extension = path.extension().unwrap_or_default().to_string_lossy().to_lowercase();
    if ["py", "yaml", "yml"].contains(&extension.as_str()) {
        let text = format!("{name}: .{extension} is not supported: write it as TOML or JSON");
        return Err(Error::config(text));
    }
    let text = std::fs::read_to_string(path)
        .map_err(|e| Error::config(format!("{name}: cannot read: {e}")))?;
    let mut root = super::parse(&name, &text)?;
    let bases = take_bases(&mut root)?;
    if bases.is_empty() {
        let before = super::show::show(&root, false);
        interpolate(&mut root, path, None)?;
        // After replacement of variables the text is no longer the whole configuration.
        let is_plain = before == super::show::show(&root, false);
        return Ok((root, is_plain.then_some(text)));
    }
    open.push(identity(path));
    let mut merged: Option<Node> = None;
    for base in bases {
        let (node, place) = (base.node, base.key_place);
        let Value::String(relative) = node.value else {
            let kind = node.value.kind();
            return Err(place.error(format!("`_base_` must be a path or paths, got {kind}")));
        };
        let file = path.parent().unwrap_or_else(|| Path::new("")).join(&relative);
        if open.contains(&identity(&file)) {
            let text = format!("`_base_`: {} inherits from itself", file.display());
            return Err(node.place.error(text));
        }
        if open.len() == MAX_CHAIN {
            let text = format!(
                "`_base_`: {} would be number {} in a chain of bases; a chain has at most {MAX_CHAIN} files",
                file.display(),
                MAX_CHAIN + 1
            );
            return Err(node.place.error(text));
        }
        // A missing base is reported at this file's `_base_`.
        if !file.is_file() {
            return Err(node.place.error(format!("`_base_`: no such file: {}", file.display())));
        }
        let (base, _) = read_inner(&file, open)?;
        merged = Some(match merged {
            None => base,
            Some(others) => join(others, base)?,
        });
    }
    open.pop();
    let base = merged.unwrap_or_else(|| root.clone());
    interpolate(&mut root, path, Some(&base))?;
    Ok((merge(base, root)?, None))
}

/// Path that is equal for all names of a file.
fn identity(path: &Path) -> PathBuf {
    std::fs::canonicalize(path).unwrap_or_else(|_| path.to_owned())
}

/// Removes `_base_` from a file; returns one entry per base.
fn take_bases(root: &mut Node) -> Result<Vec<Entry>> {
    let Value::Table(entries) = &mut root.value else { return Ok(Vec::new()) };
    let Some(index) = entries.iter().position(|e| e.key == "_base_") else {
        return Ok(Vec::new());
    };
    let entry = entries.remove(index);
    match entry.node.value {
        Value::Array(nodes) if nodes.is_empty() => {
            Err(entry.key_place.error("`_base_` is an empty array"))
        }
        Value::Array(nodes) => {
            let one = |node| Entry { node, key: String::new(), key_place: entry.key_place.clone() };
            Ok(nodes.into_iter().map(one).collect())
        }
        _ => Ok(vec![entry]),
    }
}

/// Joins two bases, which must not share a key.
fn join(mut one: Node, other: Node) -> Result<Node> {
    let (Value::Table(entries), Value::Table(more)) = (&mut one.value, other.value) else {
        return Ok(one);
    };
    for entry in more {
        if let Some(first) = entries.iter().find(|e| e.key == entry.key) {
            let (key, place) = (&entry.key, &first.key_place);
            return Err(entry
                .key_place
                .error(format!("`{key}` is set by two bases, also at {place}")));
        }
        entries.push(entry);
    }
    Ok(one)
}

/// Merges `child` over `base`.
pub(super) fn merge(base: Node, child: Node) -> Result<Node> {
    let Node { value: child_value, place } = child;
    let Value::Table(mut entries) = child_value else {
        return Ok(Node { value: child_value, place });
    };
    let deletes = take_delete(&mut entries)?;
    let base_entries = match base.value {
        Value::Table(base) if !deletes => base,
        Value::Table(_) | Value::Null => Vec::new(),
        _ if deletes => Vec::new(),
        // A table with indices as keys changes elements of the base's array, as in MMEngine.
        Value::Array(nodes) if is_numbered(&entries) => {
            return merge_numbered(nodes, entries, base.place);
        }
        other => {
            return Err(place.error(format!(
                "this is a table, but the base has {} at {}; set `_delete_ = true` to replace it",
                other.kind(),
                base.place
            )));
        }
    };
    let mut merged = base_entries;
    for entry in entries {
        match merged.iter_mut().find(|e| e.key == entry.key) {
            Some(old) => {
                let node = std::mem::replace(&mut old.node.value, Value::Null);
                let node = Node { value: node, place: old.node.place.clone() };
                *old = Entry { node: merge(node, entry.node)?, ..entry };
            }
            None => {
                // Also removes `_delete_` from tables that have no base.
                let nothing = Node { value: Value::Null, place: entry.node.place.clone() };
                merged.push(Entry { node: merge(nothing, entry.node)?, ..entry });
            }
        }
    }
    Ok(Node { value: Value::Table(merged), place })
}

fn take_delete(entries: &mut Vec<Entry>) -> Result<bool> {
    let Some(index) = entries.iter().position(|e| e.key == "_delete_") else { return Ok(false) };
    let entry = entries.remove(index);
    match entry.node.value {
        Value::Boolean(deletes) => Ok(deletes),
        other => {
            let text = format!("`_delete_` must be true or false, got {}", other.kind());
            Err(entry.node.place.error(text))
        }
    }
}

fn is_numbered(entries: &[Entry]) -> bool {
    !entries.is_empty() && entries.iter().all(|e| e.key.parse::<usize>().is_ok())
}

fn merge_numbered(
    mut nodes: Vec<Node>,
    entries: Vec<Entry>,
    place: super::tree::Span,
) -> Result<Node> {
    for entry in entries {
        let index: usize = entry.key.parse().unwrap_or(usize::MAX);
        let len = nodes.len();
        let Some(node) = nodes.get_mut(index) else {
            let text = format!("`{}` is not an index of an array of length {len}", entry.key);
            return Err(entry.key_place.error(text));
        };
        *node = merge(node.clone(), entry.node)?;
    }
    Ok(Node { value: Value::Array(nodes), place })
}

#[cfg(test)]
mod tests {
    use super::super::Config;
    use super::*;
    use crate::config::tests::{recorded, toml_of};

    fn write(dir: &Path, name: &str, text: &str) -> PathBuf {
        std::fs::write(dir.join(name), text).unwrap();
        dir.join(name)
    }

    #[test]
    fn merges_match_mmengine() {
        for case in recorded()["merge"].as_array().unwrap() {
            let parse =
                |what: &str| super::super::parse("c.json", &case[what].to_string()).unwrap();
            let merged = merge(parse("base"), parse("child"));
            match case["result"].get("error") {
                Some(_) => {
                    let error = merged.map(drop).unwrap_err().to_string();
                    assert!(error.starts_with("c.json:1:"), "{case}: {error}");
                }
                None => assert_eq!(
                    toml_of(&merged.unwrap()),
                    toml_of(&super::super::parse("c.json", &case["result"].to_string()).unwrap()),
                    "{case}"
                ),
            }
        }
    }

    #[test]
    fn inherited_values_keep_their_spans() {
        let dir = tempfile::tempdir().unwrap();
        write(dir.path(), "model.toml", "[model]\ntype = 'A'\nwidth = 8\n");
        write(dir.path(), "data.json", "{\"data\": {\"type\": \"D\", \"batch\": 4}}");
        let text = "_base_ = ['model.toml', 'data.json']\nmodel.width = 16\n\
                    data = { _delete_ = true, type = 'E' }\ncopy = '{{ _base_.model.type }}'\n";
        let path = write(dir.path(), "run.toml", text);
        let config = Config::from_file(&path).unwrap();
        let shown = config.show(true);
        let at = |file: &str, place: &str| format!("# {}:{place}", dir.path().join(file).display());
        for (line, place) in [
            ("model.type = \"A\"", at("model.toml", "2:8")),
            ("model.width = 16", at("run.toml", "2:15")),
            ("data.type = \"E\"", at("run.toml", "3:34")),
            ("copy = \"A\"", at("model.toml", "2:8")),
        ] {
            let found = shown.lines().find(|l| l.starts_with(line)).unwrap_or_default();
            assert!(found.ends_with(&place), "{line}: {shown}");
        }
        assert!(!shown.contains("batch"), "{shown}");
        // The shown configuration parses to an equal configuration.
        let again = Config::from_text("again.toml", config.text()).unwrap();
        assert_eq!(again.show(false), config.show(false));
        // An error in an inherited value names the base file.
        let mut model = config.into_section().section("model").unwrap();
        let error = model.required::<usize>("type").unwrap_err().to_string();
        assert!(error.starts_with(&at("model.toml", "2:8")[2..]), "{error}");
    }

    #[test]
    fn inheritance_errors_name_file_and_reason() {
        let dir = tempfile::tempdir().unwrap();
        write(dir.path(), "a.toml", "x = 1\n");
        write(dir.path(), "b.toml", "\nx = 2\n");
        write(dir.path(), "loop.toml", "_base_ = 'loop2.toml'\n");
        write(dir.path(), "loop2.toml", "_base_ = 'loop.toml'\n");
        for (text, says) in [
            ("_base_ = ['a.toml', 'b.toml']", "b.toml:2:1: `x` is set by two bases, also at "),
            ("_base_ = 'c.toml'", "run.toml:1:10: `_base_`: no such file: "),
            ("_base_ = 3", "run.toml:1:1: `_base_` must be a path or paths, got an integer"),
            ("_base_ = []", "run.toml:1:1: `_base_` is an empty array"),
            ("_base_ = 'loop.toml'", "inherits from itself"),
            ("_base_ = 'a.py'", "a.py"),
            (
                "_base_ = 'a.toml'\n[x]\ny = 1",
                "run.toml:2:1: this is a table, but the base has an integer at ",
            ),
            ("_base_ = 'a.toml'\n[x]\n_delete_ = 1", "run.toml:3:12: `_delete_` must be true"),
            ("_base_ = 'a.toml'\ny = '{{ _base_.z }}'", "run.toml:2:5: the base has no key `z`"),
        ] {
            let path = write(dir.path(), "run.toml", text);
            let error = Config::from_file(&path).map(drop).unwrap_err().to_string();
            assert!(error.contains(says), "{text}: {error}");
        }
    }

    #[test]
    fn chain_of_bases_that_is_too_long_is_not_a_circle() {
        let dir = tempfile::tempdir().unwrap();
        write(dir.path(), "c0.toml", "x = 1\n");
        for n in 1..40 {
            write(dir.path(), &format!("c{n}.toml"), &format!("_base_ = 'c{}.toml'\n", n - 1));
        }
        let read = |n: usize| Config::from_file(dir.path().join(format!("c{n}.toml")));
        assert_eq!(read(31).unwrap().show(false), "x = 1\n");
        let said = read(32).unwrap_err().to_string();
        assert!(said.contains("c0.toml would be number 33 in a chain of bases"), "{said}");
        assert!(said.ends_with("at most 32 files"), "{said}");
        // A circle is one also under other names.
        let text = format!("_base_ = '../{}/a.toml'", dir.path().file_name().unwrap().display());
        let path = write(dir.path(), "a.toml", &text);
        let said = Config::from_file(path).unwrap_err().to_string();
        assert!(said.ends_with("a.toml inherits from itself") && said.contains("1:10"), "{said}");
    }
}
