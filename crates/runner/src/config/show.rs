//! Prints a configuration as TOML, one value per line, which parses to an equal configuration.

use super::tree::{Node, Value};

/// Returns all values under their dotted keys; with `origin`, each with its span as a comment.
pub(super) fn show(root: &Node, origin: bool) -> String {
    let mut lines = String::new();
    walk(root, "", origin, &mut lines);
    lines
}

fn walk(node: &Node, path: &str, origin: bool, lines: &mut String) {
    let line = match &node.value {
        Value::Table(entries) if !entries.is_empty() || path.is_empty() => {
            for entry in entries {
                let key = key(&entry.key);
                let path = if path.is_empty() { key } else { format!("{path}.{key}") };
                walk(&entry.node, &path, origin, lines);
            }
            return;
        }
        // `null` means absent, except for a default hook, which `false` disables.
        Value::Null if path.starts_with("default_hooks.") => format!("{path} = false"),
        Value::Null => format!("# {path} = null"),
        value => format!("{path} = {}", inline(value)),
    };
    *lines += &line;
    if origin {
        *lines += &format!("  # {}", node.place);
    }
    lines.push('\n');
}

fn inline(value: &Value) -> String {
    match value {
        // TOML has no null; a variable with this text has none as its value.
        Value::Null => quote("{{ $:None }}"),
        // Escaped, so that it is not interpolated again.
        Value::String(s) => quote(&s.replace("{{", "{{ $:{{ }}")),
        Value::Integer(i) => i.to_string(),
        Value::Float(f) if f.is_finite() => format!("{f:?}"),
        Value::Float(f) => f.to_string().to_lowercase(),
        Value::Boolean(b) => b.to_string(),
        Value::Array(nodes) => {
            let items: Vec<_> = nodes.iter().map(|n| inline(&n.value)).collect();
            format!("[{}]", items.join(", "))
        }
        Value::Table(entries) if entries.is_empty() => "{}".to_owned(),
        Value::Table(entries) => {
            let items = entries.iter().filter(|e| !matches!(e.node.value, Value::Null));
            let items: Vec<_> =
                items.map(|e| format!("{} = {}", key(&e.key), inline(&e.node.value))).collect();
            format!("{{ {} }}", items.join(", "))
        }
        Value::Datetime(date) => date.clone(),
        Value::Variable(text, other) if text.contains("}}") => inline(other),
        // A variable without a name, so that the text is kept as well.
        Value::Variable(text, _) => quote(&format!("{{{{ $:{text} }}}}")),
    }
}

fn key(key: &str) -> String {
    let is_bare = |c: char| c.is_ascii_alphanumeric() || c == '_' || c == '-';
    if !key.is_empty() && key.chars().all(is_bare) { key.to_owned() } else { quote(key) }
}

/// Escapes as in JSON, and the delete character in addition.
fn quote(text: &str) -> String {
    serde_json::Value::from(text).to_string().replace('\u{7f}', "\\u007f")
}
