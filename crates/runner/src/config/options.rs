//! `--cfg-options dotted.key=value`: overrides of a configuration on the command line, as in
//! MMEngine.
//!
//! Numbers, words and lists are written as in MMEngine (`lr=0.1`, `hidden=3,4`,
//! `betas=(0.9,0.99)`), a table or an array of tables as in TOML:
//! `optimizer={ type = "SGD", lr = 0.1 }`. The old value is replaced.

use super::toml;
use super::tree::{Entry, MAX_DEPTH, Node, Source, Span, Value, shortened};
use crate::Result;

/// Applies one override. Missing tables on the path of the key are created.
pub(super) fn apply(root: &mut Node, option: &str) -> Result<()> {
    let source = Source::cfg_option(option);
    let place = source.at(0);
    let Some((key, text)) = option.split_once('=') else {
        return Err(place.error("expected `dotted.key=value`"));
    };
    let parts: Vec<_> = key.trim().split('.').collect();
    if parts.iter().any(|part| part.is_empty()) {
        return Err(place.error("empty part in the dotted key"));
    }
    if parts.len() > MAX_DEPTH {
        return Err(place.error(format!("the dotted key has more than {MAX_DEPTH} parts")));
    }
    let mut node = root;
    for (index, part) in parts.iter().enumerate() {
        let so_far = || parts[..index].join(".");
        if matches!(node.value, Value::Null) {
            *node = Node { value: Value::Table(Vec::new()), place: place.clone() };
        }
        node = match &mut node.value {
            Value::Table(entries) => entry(entries, part, &place),
            Value::Array(nodes) => {
                let len = nodes.len();
                part.parse().ok().and_then(|i: usize| nodes.get_mut(i)).ok_or_else(|| {
                    let text = format!(
                        "`{part}` is not an index of `{}`, an array of length {len}",
                        so_far()
                    );
                    place.error(text)
                })?
            }
            other => {
                let text = format!("`{}` is {} and has no `{part}`", so_far(), other.kind());
                return Err(place.error(text));
            }
        };
    }
    let text = text.trim();
    let has_tables = text.starts_with('{') || text.starts_with('[') && text.contains('{');
    let value =
        if has_tables { toml::parse_value(&source, text)? } else { parse_value(text, &place)? };
    *node = Node { value, place };
    Ok(())
}

/// Returns the value of `key`, created if absent.
fn entry<'a>(entries: &'a mut Vec<Entry>, key: &str, place: &Span) -> &'a mut Node {
    let index = entries.iter().position(|e| e.key == key).unwrap_or_else(|| {
        let node = Node { value: Value::Null, place: place.clone() };
        entries.push(Entry { key: key.to_owned(), key_place: place.clone(), node });
        entries.len() - 1
    });
    &mut entries[index].node
}

/// Returns an error for lists that are nested too deeply to be parsed recursively.
fn check_depth(text: &str, place: &Span) -> Result<()> {
    let mut depth = 0_usize;
    for byte in text.bytes() {
        match byte {
            b'[' | b'(' => depth += 1,
            b']' | b')' => depth = depth.saturating_sub(1),
            _ => {}
        }
        if depth > MAX_DEPTH {
            let text = format!("the lists in this value are nested deeper than {MAX_DEPTH} levels");
            return Err(place.error(text));
        }
    }
    Ok(())
}

/// Parses a value as MMEngine's `DictAction` does: an integer, a float, `true` or `false` in any
/// case, `None`, a list of these in brackets, in parentheses or separated by commas, or else text.
/// Spaces and surrounding quotes are ignored.
pub(super) fn parse_value(text: &str, place: &Span) -> Result<Value> {
    check_depth(text, place)?;
    parse_nested(text, place)
}

fn parse_nested(text: &str, place: &Span) -> Result<Value> {
    let text: String = text.trim_matches(['\'', '"']).chars().filter(|c| *c != ' ').collect();
    let inside = |open, close| text.strip_prefix(open).and_then(|t| t.strip_suffix(close));
    let items = match inside('[', ']').or_else(|| inside('(', ')')) {
        Some(items) => items,
        None if text.contains(',') => &text,
        None => return parse_scalar(&text, place),
    };
    let no_list =
        || place.error(format!("`{}` is not a list: unbalanced brackets", shortened(&text)));
    let count = |bracket| items.matches(bracket).count();
    if count('(') != count(')') || count('[') != count(']') {
        return Err(no_list());
    }
    let mut rest = items;
    let mut nodes = Vec::new();
    while !rest.is_empty() {
        let (item, after) = match next_comma(rest) {
            Some(comma) => (&rest[..comma], &rest[comma + 1..]),
            // A comma inside unbalanced brackets: splitting would recurse forever.
            None if rest.len() == text.len() => return Err(no_list()),
            None => (rest, ""),
        };
        nodes.push(Node { value: parse_nested(item, place)?, place: place.clone() });
        rest = after;
    }
    Ok(Value::Array(nodes))
}

/// Parses the text of an environment variable: a string, and possibly another type as well.
///
/// # Errors
///
/// For a list that is nested too deeply.
pub(super) fn parse_variable(text: String, place: &Span) -> Result<Value> {
    let is_list = text.starts_with('[') && text.ends_with(']');
    if is_list {
        check_depth(&text, place)?;
    }
    let other = if is_list { parse_nested(&text, place) } else { parse_scalar(&text, place) };
    Ok(match other {
        Ok(Value::Null) => Value::Null,
        Err(_) | Ok(Value::String(_)) => Value::String(text),
        Ok(other) => Value::Variable(text, Box::new(other)),
    })
}

/// Position of the first comma outside brackets.
fn next_comma(text: &str) -> Option<usize> {
    let mut depth = 0;
    text.char_indices().find_map(|(index, c)| {
        match c {
            '[' | '(' => depth += 1,
            ']' | ')' => depth -= 1,
            _ => {}
        }
        (c == ',' && depth == 0).then_some(index)
    })
}

fn parse_scalar(text: &str, place: &Span) -> Result<Value> {
    // Python allows underscores between digits, but not at the beginning or end.
    let grouped = text.contains("__") || text.starts_with('_') || text.ends_with('_');
    let digits = text.replace('_', "");
    if !grouped && let Ok(integer) = digits.parse() {
        return Ok(Value::Integer(integer));
    }
    if !grouped && let Ok(float) = digits.parse() {
        return parse_float(&digits, float, place);
    }
    Ok(match text.to_lowercase().as_str() {
        "true" => Value::Boolean(true),
        "false" => Value::Boolean(false),
        _ if text == "None" => Value::Null,
        _ => Value::String(text.to_owned()),
    })
}

/// Returns a float, unless its text is an integer or a finite number that is too large.
pub(super) fn parse_float(text: &str, float: f64, place: &Span) -> Result<Value> {
    let is_integer = text.trim_start_matches(['-', '+']).bytes().all(|b| b.is_ascii_digit());
    let overflows = float.is_infinite() && text.contains(|c: char| c.is_ascii_digit());
    if is_integer || overflows {
        let text = shortened(text);
        let hint = if is_integer && !overflows { " as an integer; a float has a `.`" } else { "" };
        return Err(place.error(format!("`{text}` does not fit into 64 bits{hint}")));
    }
    Ok(Value::Float(float))
}

#[cfg(test)]
mod tests {
    use super::super::Config;
    use super::*;
    use crate::config::tests::{recorded, toml_of};

    #[test]
    fn values_parse_as_in_mmengine() {
        let place = Source::cfg_option("x").at(0);
        for case in recorded()["parse"].as_array().unwrap() {
            let input = case["input"].as_str().unwrap();
            let value = parse_value(input, &place).unwrap();
            match (case["type"].as_str().unwrap(), &value) {
                ("NoneType", Value::Null) => continue,
                ("float", Value::Float(f)) if case["value"].is_string() => {
                    assert_eq!(f.to_string().to_lowercase(), case["value"].as_str().unwrap());
                    continue;
                }
                ("float", value) => assert!(matches!(value, Value::Float(_)), "{input}: {value:?}"),
                _ => {}
            }
            // A tuple is an array here.
            let text = format!("{{\"v\": {}}}", case["value"]);
            let text = text.replace("{\"tuple\":[", "[").replace("]}", "]");
            let text = if text.ends_with('}') { text } else { text + "}" };
            let expected = super::super::parse("c.json", &text).unwrap();
            let entry = Entry {
                key: "v".into(),
                key_place: place.clone(),
                node: Node { value, place: place.clone() },
            };
            let read = Node { value: Value::Table(vec![entry]), place: place.clone() };
            assert_eq!(toml_of(&read), toml_of(&expected), "{input}");
        }
    }

    #[test]
    fn dotted_keys_address_tables_and_arrays() {
        let text = "hooks = [{ type = 'A' }, { type = 'B' }]\noptim_wrapper.optimizer = { lr = 0.1, type = 'SGD' }";
        let mut config = Config::from_text("c.toml", text).unwrap();
        let options = ["optim_wrapper.optimizer.lr=0.2", "hooks.1.type=C", "brand.new.key=1"];
        config.override_with(options).unwrap();
        let wanted = recorded()["dotted"].to_string();
        let wanted = super::super::parse("c.json", &wanted).unwrap();
        let sorted = |text: String| {
            let mut lines: Vec<_> = text.lines().map(str::to_owned).collect();
            lines.sort();
            lines
        };
        let read = Config::from_text("c.toml", config.text()).unwrap();
        // The order of keys inside an inline table is not kept.
        assert_eq!(sorted(read.show(false)).len(), sorted(toml_of(&wanted)).len());
        for line in ["optim_wrapper.optimizer.lr = 0.2", "brand.new.key = 1"] {
            assert!(read.show(false).lines().any(|l| l == line), "{}", read.show(false));
        }
        assert!(config.show(true).contains("# --cfg-options brand.new.key=1"));
        for (option, says) in [
            ("hooks.2.type=C", "--cfg-options hooks.2.type=C: `2` is not an index of `hooks`"),
            ("brand.new.key.more=1", "`brand.new.key` is an integer and has no `more`"),
            ("lr", "--cfg-options lr: expected `dotted.key=value`"),
            ("a..b=1", "empty part"),
            ("lr=[1,2", "--cfg-options lr=[1,2: `[1,2` is not a list: unbalanced brackets"),
            ("lr=1,[2,3", "`1,[2,3` is not a list"),
            ("lr=[1]2]", "`[1]2]` is not a list"),
            ("lr=]1,2[", "`]1,2[` is not a list"),
            // Without quotes the shell has removed the inner ones.
            ("lr={type=SGD}", "--cfg-options lr={type=SGD}: not a TOML value: "),
            ("lr=[{a=1}", "--cfg-options lr=[{a=1}: not a TOML value: "),
        ] {
            let error = config.override_with([option]).unwrap_err().to_string();
            assert!(error.contains(says), "{error}");
        }
        config
            .override_with([
                "optim_wrapper={ type = \"O\", optimizer = { type = \"a b\", betas = [0.9, 0.99] } }",
                "hooks=[{type=\"A\"}, {type=\"B\", n=2}]",
                "brand={new.key=1}",
                "brand.new.more=2",
            ])
            .unwrap();
        let shown = config.show(false);
        for line in [
            "optim_wrapper.type = \"O\"",
            "optim_wrapper.optimizer.type = \"a b\"",
            "optim_wrapper.optimizer.betas = [0.9, 0.99]",
            "hooks = [{ type = \"A\" }, { type = \"B\", n = 2 }]",
            "brand.new.key = 1",
            "brand.new.more = 2",
        ] {
            assert!(shown.lines().any(|l| l == line), "{line}: {shown}");
        }
        // The old table was replaced.
        assert!(!shown.contains("optimizer.lr"), "{shown}");
        config.override_with(["hooks.1.type=C"]).unwrap();
        let mut hooks = config.into_section().sections("hooks").unwrap();
        let error = hooks.remove(1).required::<usize>("type").unwrap_err().to_string();
        assert!(error.starts_with("--cfg-options hooks.1.type=C: `type` must be"), "{error}");
    }

    #[test]
    fn deep_nesting_is_refused_in_an_option_and_in_a_variable() {
        let refused = |text: &str, option: &str| {
            let made = Config::from_text("c.toml", text);
            let done = made.and_then(|mut config| config.override_with([option]));
            done.unwrap_err().to_string()
        };
        let deep = "[(".repeat(30_000);
        let closed = format!("{deep}{}", ")]".repeat(30_000));
        for value in [&deep, &closed, &"[[1],".repeat(30_000)] {
            let said = refused("", &format!("lr={value}"));
            assert!(said.starts_with("--cfg-options lr=[") && said.len() < 400, "{said}");
            assert!(said.ends_with("nested deeper than 64 levels"), "{said}");
        }
        let variable = format!("a = '{{{{ $RUNNER_TEST_UNSET:{closed} }}}}'");
        let said = refused(&variable, "b=1");
        assert!(said.starts_with("c.toml:1:5: the lists in this value are nested"), "{said}");
        let said = refused("", &format!("{}=1", ["a"; 30_000].join(".")));
        assert!(said.ends_with("the dotted key has more than 64 parts"), "{said}");
        // The deepest that are read, and many flat ones.
        let mut config = Config::from_text("c.toml", "").unwrap();
        let list = format!("{}1{}", "[".repeat(64), "]".repeat(64));
        let key = ["a"; 64].join(".");
        let flat = "[1],".repeat(30_000) + "1";
        config.override_with([format!("{key}={list}"), format!("b={flat}")]).unwrap();
        assert!(config.show(true).lines().count() == 2);
    }

    #[test]
    fn numbers_beyond_64_bits_are_refused() {
        let mut config = Config::from_text("c.toml", "").unwrap();
        for option in [
            "seed=18446744073709551615",
            "seed=-9223372036854775809",
            "seed=[1,99999999999999999999]",
            "lr=1e999",
            "lr=-1e999",
        ] {
            let said = config.override_with([option]).unwrap_err().to_string();
            assert!(said.contains("does not fit into 64 bits"), "{said}");
        }
        let mut config = Config::from_text("c.toml", "").unwrap();
        config.override_with(["a=inf", "b=-9223372036854775808", "c=1e300"]).unwrap();
        assert_eq!(config.show(false), "a = inf\nb = -9223372036854775808\nc = 1e300\n");
        for (name, text) in [
            ("c.toml", "a = 1e999"),
            ("c.toml", "a = 18446744073709551615"),
            ("c.json", "{\"a\": 1e999}"),
            ("c.json", "{\"a\": 18446744073709551615}"),
        ] {
            let said = Config::from_text(name, text).unwrap_err().to_string();
            assert!(said.starts_with(name), "{said}");
        }
        // A variable stays a text.
        let text = "a = '{{ $RUNNER_TEST_UNSET:18446744073709551615 }}'";
        let mut root = Config::from_text("c.toml", text).unwrap().into_section();
        assert_eq!(root.required::<String>("a").unwrap(), "18446744073709551615");
    }
}
