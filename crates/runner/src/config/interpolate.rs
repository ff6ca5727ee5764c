//! `{{ ... }}` in strings: parts of the file's path, environment variables, values of a base.
//!
//! `{{ fileDirname }}`, `{{ fileBasename }}`, `{{ fileBasenameNoExtension }}`, `{{ fileExtname }}`;
//! `{{ $NAME }}` and `{{ $NAME:default }}`; `{{ _base_.dotted.key }}`.
//!
//! Text is inserted unchanged, with spaces, commas and quotes. If a string consists only of
//! `{{ $NAME }}`, the variable's text is also parsed as a number, boolean or array in brackets, for
//! keys of these types; `None` means that the key is absent. A string that consists only of
//! `{{ _base_.key }}` is the base's value, of any type. A variable without a name has its default
//! as value: a saved copy of a configuration uses `{{ $:007 }}` to keep both the text and the
//! number.

use std::path::Path;

use super::options::parse_variable;
use super::tree::{Node, Span, Value};
use crate::Result;

/// Replaces variables in all strings of `node`, a node of the file `path`.
pub(super) fn interpolate(node: &mut Node, path: &Path, base: Option<&Node>) -> Result<()> {
    match &mut node.value {
        Value::Table(entries) => {
            entries.iter_mut().try_for_each(|e| interpolate(&mut e.node, path, base))
        }
        Value::Array(nodes) => nodes.iter_mut().try_for_each(|n| interpolate(n, path, base)),
        Value::String(text) if text.contains("{{") => {
            *node = replace(&text.clone(), &node.place, path, base)?;
            Ok(())
        }
        _ => Ok(()),
    }
}

fn replace(text: &str, place: &Span, path: &Path, base: Option<&Node>) -> Result<Node> {
    let mut result = String::new();
    let mut rest = text;
    while let Some((before, after)) = rest.split_once("{{") {
        let Some((inside, after)) = after.split_once("}}") else { break };
        let is_all = before.is_empty() && after.is_empty() && result.is_empty();
        let inside = inside.trim();
        result += before;
        if let Some(variable) = inside.strip_prefix('$') {
            let value = environment(variable, place)?;
            if is_all {
                return Ok(Node { value: parse_variable(value, place)?, place: place.clone() });
            }
            result += &value;
        } else if let Some(key) = inside.strip_prefix("_base_.") {
            let found = find(base, key, place)?;
            match &found.value {
                _ if is_all => return Ok(found.clone()),
                Value::String(text) | Value::Variable(text, _) => result += text,
                Value::Integer(i) => result += &i.to_string(),
                Value::Float(f) => result += &f.to_string(),
                Value::Boolean(b) => result += &b.to_string(),
                other => {
                    let text = format!(
                        "`{key}` is {}, which cannot be inserted into a string",
                        other.kind()
                    );
                    return Err(place.error(text));
                }
            }
        } else {
            result += &file_part(inside, path, place)?;
        }
        rest = after;
    }
    result += rest;
    Ok(Node { value: Value::String(result), place: place.clone() })
}

fn environment(variable: &str, place: &Span) -> Result<String> {
    let (name, default) = match variable.split_once(':') {
        Some((name, default)) => (name.trim(), Some(default.trim())),
        None => (variable.trim(), None),
    };
    match (std::env::var(name), default) {
        (Ok(value), _) => Ok(value),
        (Err(_), Some(default)) => Ok(default.to_owned()),
        (Err(e), None) => {
            Err(place.error(format!("`{name}`: {e}; give a default: `{{{{ ${name}:value }}}}`")))
        }
    }
}

fn find<'a>(base: Option<&'a Node>, key: &str, place: &Span) -> Result<&'a Node> {
    let Some(mut node) = base else {
        return Err(place.error("reference to `_base_` in a file without `_base_`"));
    };
    for part in key.split('.') {
        let found = match &node.value {
            Value::Table(entries) => entries.iter().find(|e| e.key == part).map(|e| &e.node),
            Value::Array(nodes) => part.parse().ok().and_then(|i: usize| nodes.get(i)),
            _ => None,
        };
        node = found.ok_or_else(|| place.error(format!("the base has no key `{key}`")))?;
    }
    Ok(node)
}

fn file_part(name: &str, path: &Path, place: &Span) -> Result<String> {
    let text =
        |part: Option<&std::ffi::OsStr>| part.unwrap_or_default().to_string_lossy().into_owned();
    Ok(match name {
        "fileDirname" => path.parent().unwrap_or_else(|| Path::new("")).display().to_string(),
        "fileBasename" => text(path.file_name()),
        "fileBasenameNoExtension" => text(path.file_stem()),
        "fileExtname" => path.extension().map_or(String::new(), |e| format!(".{}", e.display())),
        other => {
            let known = ["fileDirname", "fileBasename", "fileBasenameNoExtension", "fileExtname"];
            return Err(place.error(super::unknown("variable", other, &known)));
        }
    })
}

#[cfg(test)]
mod tests {
    use super::super::Config;

    #[test]
    fn variable_is_converted_to_the_type_of_its_key() {
        let text = "job = '{{ $RUNNER_TEST_UNSET:007 }}'\nlr = '{{ $RUNNER_TEST_UNSET:1e-3 }}'\n\
                    on = '{{ $RUNNER_TEST_UNSET:False }}'\nlist = '{{ $RUNNER_TEST_UNSET:[1, 2] }}'\n\
                    none = '{{ $RUNNER_TEST_UNSET:None }}'\nword = '{{ $RUNNER_TEST_UNSET:a b }}'\n\
                    all = ['{{ $RUNNER_TEST_UNSET:3 }}', 4]";
        let mut root = Config::from_text("c.toml", text).unwrap().into_section();
        assert!(root.is_number("job") && !root.is_string("job") && !root.has("none"));
        assert_eq!(root.required::<String>("job").unwrap(), "007");
        assert_eq!(root.required::<f64>("lr").unwrap(), 1e-3);
        assert!(root.is_off("on"));
        assert_eq!(root.required::<Vec<usize>>("list").unwrap(), [1, 2]);
        assert_eq!(root.required::<Vec<usize>>("all").unwrap(), [3, 4]);
        let error = root.required::<f64>("word").unwrap_err().to_string();
        assert_eq!(error, "c.toml:6:8: `word` must be a number, got a string");
    }

    #[test]
    fn saved_copy_keeps_text_and_number_of_a_variable() {
        let text = "job = '{{ $RUNNER_TEST_UNSET:007 }}'\nlr = '{{ $RUNNER_TEST_UNSET:1e-3 }}'\n\
                    names = ['{{ $RUNNER_TEST_UNSET:3 }}', 'x']\n\
                    list = { of = '{{ $RUNNER_TEST_UNSET:[1, 2] }}' }\n\
                    braces = '{{ $RUNNER_TEST_UNSET:{{ }}fileDirname}}'\n\
                    name = '{{ $RUNNER_TEST_UNSET:nan }}'";
        let mut config = Config::from_text("c.toml", text).unwrap();
        config.override_with(["more=1"]).unwrap();
        let copy = config.text();
        let mut root = Config::from_text("c.toml", copy.clone()).unwrap().into_section();
        assert_eq!(root.required::<String>("job").unwrap(), "007", "{copy}");
        assert_eq!(root.required::<f64>("lr").unwrap(), 1e-3);
        assert_eq!(root.required::<Vec<String>>("names").unwrap(), ["3", "x"]);
        assert_eq!(root.required::<String>("braces").unwrap(), "{{fileDirname}}");
        let mut list = root.section("list").unwrap();
        assert_eq!(list.required::<Vec<usize>>("of").unwrap(), [1, 2]);
        assert_eq!(root.required::<String>("name").unwrap(), "nan");
    }

    #[test]
    fn variables_are_replaced() {
        let text = "dir = '{{ fileDirname }}/out/{{fileBasenameNoExtension}}{{ fileExtname }}'\n\
                    lr = '{{ $RUNNER_TEST_UNSET:0.5 }}'\n\
                    home = 'at {{ $RUNNER_TEST_UNSET:x }} {'\n\
                    list = '{{ $RUNNER_TEST_UNSET:[1, a] }}'\n\
                    dirs = '{{ $RUNNER_TEST_UNSET:runs/my set, b }}'\n\
                    path = ['{{ $PATH }}!']";
        let shown = Config::from_text("conf/run.toml", text).unwrap().show(false);
        let path = std::env::var("PATH").unwrap();
        for line in [
            "dir = \"conf/out/run.toml\"".to_owned(),
            "lr = \"{{ $:0.5 }}\"".to_owned(),
            "home = \"at x {\"".to_owned(),
            "list = \"{{ $:[1, a] }}\"".to_owned(),
            format!("path = [{}]", serde_json::to_string(&format!("{path}!")).unwrap()),
            // Spaces and commas are kept.
            "dirs = \"runs/my set, b\"".to_owned(),
        ] {
            assert!(shown.lines().any(|l| l == line), "{line}: {shown}");
        }
        for (text, says) in [
            ("a = '{{ $RUNNER_TEST_UNSET }}'", "c.toml:1:5: `RUNNER_TEST_UNSET`: "),
            ("a = '{{ fileDirnam }}'", "c.toml:1:5: unknown variable `fileDirnam`; did you mean"),
            ("a = '{{ _base_.x }}'", "c.toml:1:5: reference to `_base_` in a file without"),
        ] {
            let error = Config::from_text("c.toml", text).map(drop).unwrap_err().to_string();
            assert!(error.starts_with(says), "{error}");
        }
    }
}
