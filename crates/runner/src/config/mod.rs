//! Configuration files: TOML or JSON in, typed values out, every mistake with file, line and column.
//!
//! A [`Config`] is read section by section. Whoever owns a part of the file takes its keys out of
//! a [`Section`] one by one, which states the key's name, its type and its default in one line of
//! code, and then calls [`Section::finish`]: any key that nobody took is an error naming the
//! nearest key that was asked for. Reading has no side effects, so a whole configuration is
//! checked before anything is created on disk.
//!
//! Before that, a file may inherit from others (`inherit`), mention variables (`interpolate`), and be
//! overridden from the command line (`options`): MMEngine's rules, without its Python. Every value keeps
//! its span through all of that.
//!
//! `{{ $NAME }}` and `{{ $NAME:default }}` in a string put the variable's text in as it is, blanks and commas
//! included. A string that is nothing else is also the number, boolean or array that the text is, where a key
//! wants one.

mod inherit;
mod interpolate;
mod json;
mod mistakes;
mod options;
mod section;
mod show;
mod toml;
mod tree;

use std::path::Path;

pub(crate) use json::STRICT as STRICT_JSON;
pub(crate) use mistakes::Mistakes;
pub use section::{ConfigValue, FromConfig, Section};
pub(crate) use section::{choose, parse_duration, unknown};
pub use tree::Span;
use tree::{Node, Source, Value};

use crate::Result;

/// A parsed configuration.
#[derive(Debug)]
pub struct Config {
    root: Node,
    /// As it was read, if that is all there is to it.
    text: Option<String>,
    name: String,
}

impl Config {
    /// Reads and parses a TOML or, if its name ends so, JSON file, and those it inherits from.
    ///
    /// # Errors
    ///
    /// [`Error::Config`](crate::Error::Config) if one cannot be read or parsed, with line and column.
    pub fn from_file(path: impl AsRef<Path>) -> Result<Self> {
        let path = path.as_ref();
        let (root, text) = inherit::read(path)?;
        Ok(Self { root, text, name: path.display().to_string() })
    }

    /// Parses TOML (or, if `name` ends so, JSON) text; `name` is the file's name in messages. Text cannot
    /// inherit.
    ///
    /// # Errors
    ///
    /// [`Error::Config`](crate::Error::Config) if it cannot be parsed, with line and column.
    pub fn from_text(name: &str, text: impl Into<String>) -> Result<Self> {
        let text = text.into();
        let mut root = parse(name, &text)?;
        interpolate::interpolate(&mut root, Path::new(name), None)?;
        Ok(Self { root, text: Some(text), name: name.to_owned() })
    }

    /// Overrides values: each option is `dotted.key=value`, where a number in the key is a place in an
    /// array. A table, or an array of tables, is written as in TOML; any other value is read as MMEngine's
    /// `--cfg-options` reads it. It replaces what was there.
    ///
    /// # Errors
    ///
    /// [`Error::Config`](crate::Error::Config) naming the option.
    pub fn override_with<S: AsRef<str>>(
        &mut self,
        cfg_options: impl IntoIterator<Item = S>,
    ) -> Result<()> {
        for option in cfg_options {
            options::apply(&mut self.root, option.as_ref())?;
            self.text = None;
        }
        Ok(())
    }

    /// The text as it was read; or, if more than one file or an override had a say, the whole of it as
    /// TOML.
    #[must_use]
    pub fn text(&self) -> String {
        self.text.clone().unwrap_or_else(|| self.show(false))
    }

    /// All values as TOML, one a line; with `origin`, each with its span.
    #[must_use]
    pub fn show(&self, origin: bool) -> String {
        show::show(&self.root, origin)
    }

    /// The file that it was read from, or the name of its text.
    pub(crate) fn path(&self) -> &Path {
        Path::new(&self.name)
    }

    /// The file's name without directory, as it should be called where a copy is kept.
    #[must_use]
    pub fn file_name(&self) -> String {
        let is_json = self.text.is_some() && is_json(&self.name);
        let stem = self.path().file_stem().unwrap_or_default().to_string_lossy();
        format!("{stem}.{}", if is_json { "json" } else { "toml" })
    }

    /// The root table, to be taken apart.
    #[must_use]
    pub fn into_section(self) -> Section {
        let entries = match self.root.value {
            Value::Table(entries) => entries,
            _ => Vec::new(),
        };
        Section::new(String::new(), self.root.place, entries)
    }
}

/// The tree of one file's text.
fn parse(name: &str, text: &str) -> Result<Node> {
    let source = Source::file(name, text);
    if is_json(name) { json::parse(&source, text) } else { toml::parse(&source, text) }
}

fn is_json(name: &str) -> bool {
    Path::new(name).extension().is_some_and(|e| e.eq_ignore_ascii_case("json"))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// What MMEngine 0.10.7 made of values, merges and dotted keys.
    pub(super) fn recorded() -> serde_json::Value {
        serde_json::from_str(include_str!("../../tests/vectors/config.json")).unwrap()
    }

    /// A tree as text, for comparison.
    pub(super) fn toml_of(node: &Node) -> String {
        show::show(node, false)
    }

    #[test]
    fn json_and_toml_say_the_same() {
        let json = Config::from_text("c.json", "{\"a\": {\"b\": [1, 2.5, \"x\"], \"c\": null}}");
        let toml = Config::from_text("c.toml", "[a]\nb = [1, 2.5, 'x']\n");
        let (mut json, mut toml) = (json.unwrap().into_section(), toml.unwrap().into_section());
        for root in [&mut json, &mut toml] {
            let mut a = root.section("a").unwrap();
            assert!(!a.has("c"));
            assert_eq!(a.optional::<usize>("c").unwrap(), None);
            let error = a.required::<Vec<f64>>("b").unwrap_err().to_string();
            assert!(error.contains("`b` must be an array"), "{error}");
            a.finish().unwrap();
        }
    }

    proptest::proptest! {
        #[test]
        fn what_is_shown_is_the_same_configuration(values in proptest::collection::btree_map(
            ".{1,6}", (proptest::num::f64::ANY, "(\\{\\{|\\}\\}|[ $:x{}]){0,6}|.{0,8}", 0i64..), 0..4)
        ) {
            let object = |(key, (float, text, integer)): (String, (f64, String, i64))| {
                let float = if float.is_finite() { float } else { 0.5 };
                (key, serde_json::json!({ "f": float, "t": text, "a": [integer, text] }))
            };
            let map: serde_json::Map<_, _> = values.into_iter().map(object).collect();
            let json = serde_json::Value::Object(map).to_string();
            // Braces as they are after interpolation.
            let root = parse("c.json", &json).unwrap();
            let shown = show::show(&root, false);
            let again = Config::from_text("c.toml", shown.clone()).unwrap();
            proptest::prop_assert_eq!(again.show(false), shown);
        }
    }
}
