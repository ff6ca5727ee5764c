//! Configuration files: TOML or JSON in, typed values out, each error with file, line and column.
//!
//! A [`Config`] is read section by section. The reader of a section takes its keys one by one, each
//! with name, type and default in one line of code, and then calls [`Section::finish`]: any key
//! that was not read is an error with the nearest valid key. Reading has no side effects, so a
//! whole configuration is checked before anything is created on disk.
//!
//! First a file may inherit from others (`inherit`), contain variables (`interpolate`), and be
//! overridden from the command line (`options`), by MMEngine's rules, but without Python. Every
//! value keeps its span throughout.
//!
//! `{{ $NAME }}` and `{{ $NAME:default }}` in a string insert the variable's text unchanged, with
//! spaces and commas. If the string contains nothing else, the text is also parsed as a number,
//! boolean or array, for keys of these types.

mod inherit;
mod interpolate;
mod json;
mod mistakes;
mod names;
mod options;
mod section;
mod show;
mod toml;
mod tree;

use std::path::Path;

pub(crate) use json::STRICT as STRICT_JSON;
pub(crate) use mistakes::Mistakes;
pub(crate) use names::{choose, unknown};
pub(crate) use section::parse_duration;
pub use section::{ConfigValue, FromConfig, Section};
pub use tree::Span;
use tree::{Node, Source, Value};

use crate::Result;

/// A parsed configuration.
#[derive(Debug)]
pub struct Config {
    root: Node,
    /// The original text, if it is the whole configuration.
    text: Option<String>,
    name: String,
}

impl Config {
    /// Reads and parses a TOML file, or a JSON file if its name ends with `.json`, and its bases.
    ///
    /// # Errors
    ///
    /// [`Error::Config`](crate::Error::Config) with line and column if a file cannot be read or
    /// parsed.
    pub fn from_file(path: impl AsRef<Path>) -> Result<Self> {
        let path = path.as_ref();
        let (root, text) = inherit::read(path)?;
        Ok(Self { root, text, name: path.display().to_string() })
    }

    /// Parses TOML text, or JSON if `name` ends with `.json`; `name` is the file's name in
    /// messages. The text cannot have a base.
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

    /// Overrides values: each option is `dotted.key=value`, where a number in the key is an index
    /// of an array. A table, or an array of tables, is written as in TOML; any other value is
    /// parsed as MMEngine's `--cfg-options` does. The old value is replaced.
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

    /// Returns the original text; if there are bases or overrides, the merged configuration as
    /// TOML.
    #[must_use]
    pub fn text(&self) -> String {
        self.text.clone().unwrap_or_else(|| self.show(false))
    }

    /// Returns all values as TOML, one per line; with `origin`, each with its span as a comment.
    #[must_use]
    pub fn show(&self, origin: bool) -> String {
        show::show(&self.root, origin)
    }

    /// Path of the file, or the name of the text.
    pub(crate) fn path(&self) -> &Path {
        Path::new(&self.name)
    }

    /// File name, without directory, for a copy of this configuration.
    #[must_use]
    pub fn file_name(&self) -> String {
        let is_json = self.text.is_some() && is_json(&self.name);
        let stem = self.path().file_stem().unwrap_or_default().to_string_lossy();
        format!("{stem}.{}", if is_json { "json" } else { "toml" })
    }

    /// Returns the root table for reading.
    #[must_use]
    pub fn into_section(self) -> Section {
        let entries = match self.root.value {
            Value::Table(entries) => entries,
            _ => Vec::new(),
        };
        Section::new(String::new(), self.root.place, entries)
    }
}

/// Parses the text of one file.
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

    /// Values, merges and dotted keys as parsed by MMEngine 0.10.7.
    pub(super) fn recorded() -> serde_json::Value {
        serde_json::from_str(include_str!("../../tests/vectors/config.json")).unwrap()
    }

    /// A tree as text, for comparison.
    pub(super) fn toml_of(node: &Node) -> String {
        show::show(node, false)
    }

    #[test]
    fn json_and_toml_parse_alike() {
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
        fn shown_text_parses_to_an_equal_configuration(values in proptest::collection::btree_map(
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

    #[test]
    fn dates_and_nothing_in_lists_are_shown_as_they_are_read() {
        let text = "day = 2026-11-28\nat = [2026-11-28T10:00:00Z, 07:32:00]\n\
                    list = ['{{ $RUNNER_TEST_UNSET:None }}', 1]";
        let config = Config::from_text("c.toml", text).unwrap();
        let shown = config.show(false);
        let expected = "day = 2026-11-28\nat = [2026-11-28T10:00:00Z, 07:32:00]\n\
                        list = [\"{{ $:None }}\", 1]\n";
        assert_eq!(shown, expected);
        assert_eq!(Config::from_text("again.toml", shown).unwrap().show(false), expected);
        let said = config.into_section().required::<String>("day").unwrap_err().to_string();
        assert_eq!(said, "c.toml:1:7: `day` must be a string, got a date");
    }
}
