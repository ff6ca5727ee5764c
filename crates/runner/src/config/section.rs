//! `Section`: reads one table of a configuration key by key.

use std::time::Duration;

use super::mistakes::Mistakes;
use super::names::{choose, distance, near, unknown};
use super::tree::{Entry, Node, Span, Value};
use crate::{Error, Result};

/// A table being read. Each key is read at most once; [`finish`](Self::finish) returns an error for
/// unread keys.
#[derive(Debug)]
pub struct Section {
    /// Dotted path from the root, empty for the root.
    path: String,
    /// Span of the table, for errors about missing keys.
    place: Span,
    entries: Vec<Entry>,
    /// Every key asked for so far: the valid names.
    known: Vec<&'static str>,
    /// Keys read so far, with the spans of their values.
    taken: Vec<(&'static str, Span)>,
    /// List for errors, if reading continues after the first.
    mistakes: Option<Mistakes>,
}

impl Section {
    pub(super) fn new(path: String, place: Span, entries: Vec<Entry>) -> Self {
        Self { path, place, entries, known: Vec::new(), taken: Vec::new(), mistakes: None }
    }

    /// Collects errors from now on instead of returning the first one, here and in inner tables. A
    /// wrong value is treated as absent.
    pub(crate) fn collect_mistakes(&mut self) -> Mistakes {
        self.mistakes.get_or_insert_default().clone()
    }

    /// Records an error after which reading continues; returns it if errors are not collected.
    pub(crate) fn note(&self, error: Error) -> Result<()> {
        let Some(mistakes) = &self.mistakes else { return Err(error) };
        mistakes.add(error);
        Ok(())
    }

    /// Returns the result of `read`, or `None` after a collected error.
    pub(crate) fn attempt<T>(
        &mut self,
        read: impl FnOnce(&mut Self) -> Result<T>,
    ) -> Result<Option<T>> {
        match read(self) {
            Ok(value) => Ok(Some(value)),
            Err(error) => self.note(error).map(|()| None),
        }
    }

    /// As [`attempt`](Self::attempt); `None` also if `read` collected an error and returned a
    /// value.
    pub(crate) fn attempt_whole<T>(
        &mut self,
        read: impl FnOnce(&mut Self) -> Result<T>,
    ) -> Result<Option<T>> {
        let count = |section: &Self| section.mistakes.as_ref().map_or(0, Mistakes::len);
        let before = count(self);
        let value = self.attempt(read)?;
        Ok(value.filter(|_| count(self) == before))
    }

    /// Returns the value of `key`, `None` if absent.
    ///
    /// # Errors
    ///
    /// [`Error::Config`] if the value is of another type.
    pub fn optional<T: FromConfig>(&mut self, key: &'static str) -> Result<Option<T>> {
        let Some(entry) = self.take(key) else { return Ok(None) };
        match self.convert(key, &entry.node) {
            Ok(value) => Ok(Some(value)),
            Err(error) => self.note(error).map(|()| None),
        }
    }

    /// Returns the value of `key`, or `default` if absent.
    ///
    /// # Errors
    ///
    /// [`Error::Config`] if the value is of another type.
    pub fn or<T: FromConfig>(&mut self, key: &'static str, default: T) -> Result<T> {
        Ok(self.optional(key)?.unwrap_or(default))
    }

    /// Returns the value of `key`.
    ///
    /// # Errors
    ///
    /// [`Error::Config`] if it is missing or of another type.
    pub fn required<T: FromConfig>(&mut self, key: &'static str) -> Result<T> {
        match self.take(key) {
            Some(entry) => self.convert(key, &entry.node),
            None => Err(self.missing(key)),
        }
    }

    /// Returns the value of `key` if `valid` accepts it; `range` describes valid values in the
    /// error.
    ///
    /// # Errors
    ///
    /// [`Error::Config`] if it is of another type or out of range.
    pub fn or_checked<T: FromConfig + std::fmt::Display>(
        &mut self,
        key: &'static str,
        default: T,
        range: &str,
        valid: impl FnOnce(&T) -> bool,
    ) -> Result<T> {
        let offset = self.offset_of(key);
        let given = self.optional(key)?;
        let value = given.as_ref().unwrap_or(&default);
        if valid(value) {
            return Ok(given.unwrap_or(default));
        }
        self.note(offset.error(format!("`{key}` must be {range}, got {value}")))?;
        Ok(default)
    }

    /// Returns the value of `key`, a count of at least 1.
    ///
    /// # Errors
    ///
    /// [`Error::Config`] if it is of another type or 0.
    pub fn count<T: FromConfig + std::fmt::Display + PartialOrd + From<u8>>(
        &mut self,
        key: &'static str,
        default: T,
    ) -> Result<T> {
        self.or_checked(key, default, "at least 1", |count| *count >= T::from(1))
    }

    /// Returns the value for `key` among `choices`, which are pairs of name and value.
    ///
    /// # Errors
    ///
    /// [`Error::Config`] for another name, with the nearest one.
    pub fn choice<T: Clone>(
        &mut self,
        key: &'static str,
        default: &'static str,
        choices: &[(&str, T)],
    ) -> Result<T> {
        let place = self.offset_of(key);
        let value: String = self.or(key, default.to_owned())?;
        let error = match choose("value", &value, choices, &place) {
            Ok(choice) => return Ok(choice),
            Err(error) => error,
        };
        match choose("value", default, choices, &place) {
            // The valid keys of a table depend on its type.
            Ok(default) if key != "type" => self.note(error).map(|()| default),
            _ => Err(error),
        }
    }

    /// Returns the sub-table `key`, `None` if absent.
    ///
    /// # Errors
    ///
    /// [`Error::Config`] if it is not a table.
    pub fn optional_section(&mut self, key: &'static str) -> Result<Option<Self>> {
        if !self.has(key) {
            self.take(key);
            return Ok(None);
        }
        self.attempt(|section| section.section(key))
    }

    /// Returns the sub-table `key`.
    ///
    /// # Errors
    ///
    /// [`Error::Config`] if it is missing or not a table.
    pub fn section(&mut self, key: &'static str) -> Result<Self> {
        match self.take(key) {
            Some(entry) => self.subsection(key, entry.node),
            None => Err(self.missing(key)),
        }
    }

    /// Returns the sub-tables of the array `key`, none if absent. A single table counts as an array
    /// of one.
    ///
    /// # Errors
    ///
    /// [`Error::Config`] if it is anything else.
    pub fn sections(&mut self, key: &'static str) -> Result<Vec<Self>> {
        let Some(entry) = self.take(key) else { return Ok(Vec::new()) };
        let nodes = one_or_more(entry.node).into_iter();
        let sections = nodes.map(|node| self.attempt(|s| s.subsection(key, node)));
        Ok(sections.collect::<Result<Vec<_>>>()?.into_iter().flatten().collect())
    }

    /// Returns every key not read yet, with its sub-table: for tables with user-defined keys. Call
    /// it last.
    ///
    /// # Errors
    ///
    /// [`Error::Config`] if one of them is not a table.
    pub fn named_sections(&mut self) -> Result<Vec<(String, Self)>> {
        self.named(|section, key, node| section.subsection(key, node))
    }

    /// Returns every key not read yet, with its value: for tables with user-defined keys. Call it
    /// last.
    ///
    /// # Errors
    ///
    /// [`Error::Config`] if a value is of another type.
    pub fn named_values<T: FromConfig>(&mut self) -> Result<Vec<(String, T)>> {
        self.named(|section, key, node| section.convert(key, &node))
    }

    /// As [`named_sections`](Self::named_sections), with one table or an array of tables per key.
    pub(crate) fn named_lists(&mut self) -> Result<Vec<(String, Vec<Self>)>> {
        self.named(|section, key, node| {
            one_or_more(node).into_iter().map(|node| section.subsection(key, node)).collect()
        })
    }

    /// Returns every key not read yet and not `null`, with the result of `read`.
    fn named<T>(
        &mut self,
        read: impl Fn(&Self, &str, Node) -> Result<T>,
    ) -> Result<Vec<(String, T)>> {
        let mut all = Vec::new();
        for entry in std::mem::take(&mut self.entries) {
            if matches!(entry.node.value, Value::Null) {
                continue;
            }
            let value = self.attempt(|section| read(section, &entry.key, entry.node))?;
            all.extend(value.map(|value| (entry.key, value)));
        }
        Ok(all)
    }

    /// Returns the remaining tables that have the key `inner`. Call it last.
    pub(crate) fn tables_with(&mut self, inner: &str) -> Result<Vec<Self>> {
        let has = |entry: &Entry| match &entry.node.value {
            Value::Table(entries) => entries.iter().any(|e| e.key == inner),
            _ => false,
        };
        let (tables, rest) = std::mem::take(&mut self.entries).into_iter().partition(has);
        self.entries = rest;
        let tables: Vec<Entry> = tables;
        tables.into_iter().map(|entry| self.subsection(&entry.key, entry.node)).collect()
    }

    /// Keys whose values are tables.
    pub(crate) fn tables(&self) -> Vec<String> {
        let is_table = |e: &&Entry| matches!(e.node.value, Value::Table(_));
        self.entries.iter().filter(is_table).map(|e| e.key.clone()).collect()
    }

    /// Returns whether `key` is a table without the key `inner`.
    pub(crate) fn has_table_without(&self, key: &str, inner: &str) -> bool {
        match self.peek(key) {
            Some(Value::Table(entries)) => entries.iter().all(|e| e.key != inner),
            _ => false,
        }
    }

    /// Returns an error for keys that were not asked for. A key that is `null` is absent, unless it
    /// differs from a valid key by a letter or two.
    ///
    /// # Errors
    ///
    /// [`Error::Config`] for the first unknown key, with the nearest valid one.
    pub fn finish(self) -> Result<()> {
        let place =
            if self.path.is_empty() { String::new() } else { format!(" in [{}]", self.path) };
        let is_misspelt = |key: &str| {
            let distances = self.known.iter().map(|known| distance(known, key));
            distances.min().is_some_and(|least| least <= 2 && near(least, key))
        };
        let is_absent = |e: &&Entry| matches!(e.node.value, Value::Null) && !is_misspelt(&e.key);
        for entry in self.entries.iter().filter(|entry| !is_absent(entry)) {
            let text = unknown("key", &entry.key, &self.known);
            self.note(entry.key_place.error(format!("{text}{place}")))?;
        }
        Ok(())
    }

    /// Returns whether the file has `key`.
    #[must_use]
    pub fn has(&self, key: &str) -> bool {
        self.peek(key).is_some()
    }

    /// Returns whether `key` is `false`, or `null` in JSON, which disables a component; if so,
    /// marks the key as read.
    pub fn is_off(&mut self, key: &'static str) -> bool {
        let is_off =
            |e: &&Entry| matches!(e.node.value.plain(), Value::Null | Value::Boolean(false));
        let off = self.entries.iter().find(|e| e.key == key).filter(is_off).is_some();
        if off {
            self.take(key);
        }
        off
    }

    /// Returns the values of `key`: an array or a single value; none if absent.
    ///
    /// # Errors
    ///
    /// [`Error::Config`] if a value is of another type.
    pub fn one_or_more<T: FromConfig>(&mut self, key: &'static str) -> Result<Vec<T>> {
        match self.peek(key) {
            Some(Value::Array(_)) => self.or(key, Vec::new()),
            _ => Ok(self.optional(key)?.into_iter().collect()),
        }
    }

    /// Returns an error for `key`, a key of MMEngine that is not supported, unless it is `false` or
    /// `null`.
    ///
    /// # Errors
    ///
    /// [`Error::Config`] if the file has it; `why` is the reason or the alternative.
    pub fn refuse(&mut self, key: &'static str, why: &str) -> Result<()> {
        let known = self.known.len();
        let entry = if self.is_off(key) { None } else { self.take(key) };
        // Unsupported keys are not listed among the valid ones.
        self.known.truncate(known);
        let Some(entry) = entry else { return Ok(()) };
        self.note(entry.key_place.error(format!("`{key}` is not supported: {why}")))
    }

    /// Returns whether the value of `key` is a number.
    #[must_use]
    pub fn is_number(&self, key: &str) -> bool {
        matches!(self.peek(key), Some(Value::Integer(_) | Value::Float(_)))
    }

    /// Returns the string value of `key` without marking the key as read.
    pub(crate) fn text_of(&self, key: &str) -> Option<&str> {
        match self.peek(key) {
            Some(Value::String(text)) => Some(text),
            _ => None,
        }
    }

    /// Returns whether the value of `key` is a string.
    #[must_use]
    pub fn is_string(&self, key: &str) -> bool {
        matches!(self.peek(key), Some(Value::String(_)))
    }

    /// Returns whether the value of `key` is a table.
    #[must_use]
    pub fn is_table(&self, key: &str) -> bool {
        matches!(self.peek(key), Some(Value::Table(_)))
    }

    /// Returns an empty sub-table, for a component without a table in the file.
    pub(crate) fn empty(&self, key: &str) -> Self {
        let section = Self::new(key.to_owned(), self.place.clone(), Vec::new());
        Self { mistakes: self.mistakes.clone(), ..section }
    }

    /// Creates an error at this table that also names the spans of values from other sources.
    #[must_use]
    pub fn error(&self, message: impl std::fmt::Display) -> Error {
        let elsewhere = self.taken.iter().filter(|(_, place)| !place.is_beside(&self.place));
        let places: Vec<_> = elsewhere.map(|(_, place)| place.to_string()).collect();
        if places.is_empty() {
            return self.place.error(message);
        }
        self.place.error(format!("{message} (with {})", places.join(", ")))
    }

    /// Creates an error at the value of `key` if it was read, or else at this table.
    pub(crate) fn error_about(&self, key: &str, message: impl std::fmt::Display) -> Error {
        match self.taken.iter().find(|(taken, _)| *taken == key) {
            Some((_, place)) => place.error(message),
            None => self.error(message),
        }
    }

    /// Returns the span of the value of `key`, or of the table if absent. Call it before reading
    /// the value.
    #[must_use]
    pub fn offset_of(&self, key: &str) -> Span {
        let entry = self.entries.iter().find(|e| e.key == key);
        entry.map_or(&self.place, |e| &e.node.place).clone()
    }

    fn peek(&self, key: &str) -> Option<&Value> {
        let value = self.entries.iter().find(|e| e.key == key).map(|e| e.node.value.plain());
        value.filter(|value| !matches!(value, Value::Null))
    }

    fn take(&mut self, key: &'static str) -> Option<Entry> {
        self.known.push(key);
        let index = self.entries.iter().position(|e| e.key == key)?;
        let entry = self.entries.remove(index);
        self.taken.push((key, entry.node.place.clone()));
        (!matches!(entry.node.value, Value::Null)).then_some(entry)
    }

    fn convert<T: FromConfig>(&self, key: &str, node: &Node) -> Result<T> {
        from_value(&node.value).ok_or_else(|| {
            let want = T::EXPECTED;
            let got = match node.value.plain() {
                // The kind may be right and the value out of range.
                Value::Integer(i) => i.to_string(),
                other => other.kind().to_owned(),
            };
            node.place.error(format!("`{key}` must be {want}, got {got}"))
        })
    }

    fn subsection(&self, key: &str, node: Node) -> Result<Self> {
        let path =
            if self.path.is_empty() { key.to_owned() } else { format!("{}.{key}", self.path) };
        match node.value {
            Value::Table(entries) => {
                let section = Self::new(path, node.place, entries);
                Ok(Self { mistakes: self.mistakes.clone(), ..section })
            }
            other => {
                let text = format!("`{path}` must be a table, got {}", other.kind());
                Err(node.place.error(text))
            }
        }
    }

    fn missing(&mut self, key: &str) -> Error {
        let place =
            if self.path.is_empty() { "at the top".into() } else { format!("in [{}]", self.path) };
        let distances = self.entries.iter().map(|e| distance(&e.key, key)).enumerate();
        let nearest = distances.min_by_key(|(_, distance)| *distance);
        let hint = match nearest.filter(|(_, distance)| near(*distance, key)) {
            Some((index, _)) => {
                // Reported here, so not reported again as unknown.
                let entry = self.entries.remove(index);
                let there = entry.key_place.line_from(&self.place);
                format!(" (is `{}` {there} meant for it?)", entry.key)
            }
            None => String::new(),
        };
        self.place.error(format!("missing key `{key}` {place}{hint}"))
    }
}

/// Returns the elements of an array; any other value counts as one element.
fn one_or_more(node: Node) -> Vec<Node> {
    match node {
        Node { value: Value::Array(nodes), .. } => nodes,
        node => vec![node],
    }
}

/// A value of the file; implementations of [`FromConfig`] pass it on to other implementations.
#[derive(Clone, Copy, Debug)]
pub struct ConfigValue<'a>(&'a Value);

/// A type that a configuration value can be converted to.
pub trait FromConfig: Sized {
    /// Description of the expected value, as in "an integer".
    const EXPECTED: &'static str;

    /// Converts the value, `None` if it is of another type.
    fn from_node(value: ConfigValue<'_>) -> Option<Self>;
}

/// Converts a value; for an environment variable, either its parsed value or its text.
fn from_value<T: FromConfig>(value: &Value) -> Option<T> {
    T::from_node(ConfigValue(value.plain())).or_else(|| T::from_node(ConfigValue(value)))
}

/// Implements [`FromConfig`] from rows of type, description, and accepted kinds of value.
macro_rules! from_config {
    ($($type:ty, $expected:literal: $($kind:pat => $value:expr),+;)*) => {$(
        impl FromConfig for $type {
            const EXPECTED: &'static str = $expected;
            fn from_node(value: ConfigValue<'_>) -> Option<Self> {
                match value.0 {
                    $($kind => $value,)+
                    _ => None,
                }
            }
        }
    )*};
}

from_config! {
    u32, "a non-negative integer": Value::Integer(i) => Self::try_from(*i).ok();
    u64, "a non-negative integer": Value::Integer(i) => Self::try_from(*i).ok();
    usize, "a non-negative integer": Value::Integer(i) => Self::try_from(*i).ok();
    i64, "an integer": Value::Integer(i) => Some(*i);
    // `lr = 1` is a valid number.
    f64, "a number": Value::Float(f) => Some(*f), Value::Integer(i) => Some(*i as Self);
    f32, "a number in the range of f32": Value::Float(f) => narrow(*f), Value::Integer(i) => narrow(*i as f64);
    bool, "true or false": Value::Boolean(b) => Some(*b);
    String, "a string": Value::String(s) | Value::Variable(s, _) => Some(s.clone());
}

/// Rounds to `f32`; `None` for a number that would become infinite.
fn narrow(value: f64) -> Option<f32> {
    let narrow = value as f32;
    (narrow.is_finite() || !value.is_finite()).then_some(narrow)
}

impl FromConfig for Duration {
    const EXPECTED: &'static str = "a duration (seconds, or text such as \"90s\", \"15m\", \"2h\")";
    fn from_node(value: ConfigValue<'_>) -> Option<Self> {
        match value.0 {
            Value::String(s) => parse_duration(s),
            _ => f64::from_node(value).and_then(|s| Self::try_from_secs_f64(s).ok()),
        }
    }
}

impl<T: FromConfig> FromConfig for Vec<T> {
    const EXPECTED: &'static str = "an array of values of one type";
    fn from_node(value: ConfigValue<'_>) -> Option<Self> {
        match value.0 {
            Value::Array(nodes) => nodes.iter().map(|n| from_value(&n.value)).collect(),
            _ => None,
        }
    }
}

impl FromConfig for (f64, f64) {
    const EXPECTED: &'static str = "two numbers";
    fn from_node(value: ConfigValue<'_>) -> Option<Self> {
        match Vec::from_node(value)?[..] {
            [a, b] => Some((a, b)),
            _ => None,
        }
    }
}

/// Parses `90s`, `1.5m`, `2h`, `250ms`, or seconds without a unit.
#[must_use]
pub(crate) fn parse_duration(text: &str) -> Option<Duration> {
    let text = text.trim();
    let digits = text.find(|c: char| c.is_ascii_alphabetic()).unwrap_or(text.len());
    let number: f64 = text[..digits].trim().parse().ok()?;
    let unit = match &text[digits..] {
        "" | "s" => 1.0,
        "ms" => 1e-3,
        "m" => 60.0,
        "h" => 3600.0,
        _ => return None,
    };
    Duration::try_from_secs_f64(number * unit).ok()
}

#[cfg(test)]
mod tests {
    use super::super::Config;
    use super::*;

    fn section(text: &str) -> Section {
        Config::from_text("c.toml", text).unwrap().into_section()
    }

    #[test]
    fn values_are_converted_to_their_types() {
        let mut s = section("a = 1\nb = 2.5\nc = [1, 2]\nd = \"90s\"\n[t]\nx = true\n");
        assert_eq!(s.required::<usize>("a").unwrap(), 1);
        assert_eq!(s.or("b", 0.0).unwrap(), 2.5);
        assert_eq!(s.required::<Vec<usize>>("c").unwrap(), [1, 2]);
        assert_eq!(s.required::<Duration>("d").unwrap(), Duration::from_secs(90));
        let mut t = s.section("t").unwrap();
        assert!(t.required::<bool>("x").unwrap());
        t.finish().unwrap();
        s.finish().unwrap();
    }

    #[test]
    fn unknown_key_error_has_position_and_nearest_key() {
        let mut s = section("[opt]\nlr = 0.1\nmomentun = 0.9\n");
        let mut opt = s.section("opt").unwrap();
        opt.required::<f64>("lr").unwrap();
        opt.or("momentum", 0.0).unwrap();
        let error = opt.finish().unwrap_err().to_string();
        assert_eq!(
            error,
            "c.toml:3:1: unknown key `momentun`; did you mean `momentum`? (valid: lr, momentum) in [opt]"
        );
    }

    #[test]
    fn wrong_type_error_has_position_and_expected_type() {
        // Columns count characters, not bytes.
        let mut s = section("\nt = { k = \"é\", a = \"x\" }\n").section("t").unwrap();
        let error = s.required::<usize>("a").unwrap_err().to_string();
        assert_eq!(error, "c.toml:2:20: `a` must be a non-negative integer, got a string");
    }

    #[test]
    fn missing_key_error_names_the_table() {
        let mut s = section("\n[opt]\nx = 1\n");
        let error = s.section("opt").unwrap().required::<f64>("lr").unwrap_err().to_string();
        assert!(error.contains("missing key `lr` in [opt]"), "{error}");
        assert!(error.starts_with("c.toml:2:"), "{error}");
    }

    #[test]
    fn invalid_toml_error_has_position() {
        let error = Config::from_text("c.toml", "a = 1\nb = = 2\n").unwrap_err().to_string();
        assert!(error.starts_with("c.toml:2:"), "{error}");
    }

    #[test]
    fn durations_parse_with_units() {
        assert_eq!(parse_duration("60s"), Some(Duration::from_secs(60)));
        assert_eq!(parse_duration("1.5m"), Some(Duration::from_secs(90)));
        assert_eq!(parse_duration("250ms"), Some(Duration::from_millis(250)));
        assert_eq!(parse_duration("-1s"), None);
        assert_eq!(parse_duration("soon"), None);
    }

    proptest::proptest! {
        #[test]
        fn any_text_parses_or_fails_with_a_position(text in ".{0,80}") {
            if let Err(error) = Config::from_text("c.toml", text) {
                proptest::prop_assert!(error.to_string().starts_with("c.toml:"));
            }
        }
    }

    proptest::proptest! {
        #[test]
        fn null_is_an_absent_key(key in "[a-z]{1,8}") {
            let mut s = Config::from_text("c.json", format!("{{\"{key}\": null}}"))
                .unwrap()
                .into_section();
            proptest::prop_assert_eq!(s.or("accumulative_counts", 1_usize).unwrap(), 1);
            proptest::prop_assert!(s.finish().is_ok());
        }
    }

    #[test]
    fn all_wrong_values_of_a_table_are_reported() {
        let mut s = section("a = [1, 'x']\n[t]\nx = 1\ny = 2\n[u]\nz = {}\n[v]\nw = 'w'");
        let mistakes = s.collect_mistakes();
        s.one_or_more::<usize>("a").unwrap();
        s.section("t").unwrap().named_sections().unwrap();
        s.section("u").unwrap().named_values::<usize>().unwrap();
        s.section("v").unwrap().named_lists().unwrap();
        s.finish().unwrap();
        let said = mistakes.check().unwrap_err().to_string();
        let lines: Vec<_> = said.lines().map(|line| line.split(' ').next().unwrap()).collect();
        assert_eq!(
            lines,
            ["c.toml:1:5:", "c.toml:3:5:", "c.toml:4:5:", "c.toml:6:5:", "c.toml:8:5:"]
        );
    }

    #[test]
    fn numbers_beyond_f32_are_refused() {
        let mut s = section("a = 1e39\nb = [1.0, -1e300]\nc = inf\nd = 3e38");
        assert!(s.required::<f32>("a").is_err() && s.required::<Vec<f32>>("b").is_err());
        assert!(s.required::<f32>("c").unwrap().is_infinite());
        assert_eq!(s.required::<f32>("d").unwrap(), 3e38);
    }
}
