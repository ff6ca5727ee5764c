//! Configuration files: TOML in, typed values out, every mistake with file, line and column.
//!
//! A [`Config`] is read section by section. Whoever owns a part of the file takes its keys out of
//! a [`Section`] one by one, which states the key's name, its type and its default in one line of
//! code, and then calls [`Section::finish`]: any key that nobody took is an error naming the
//! nearest key that was asked for. Reading has no side effects, so a whole configuration is
//! checked before anything is created on disk.

mod section;
mod tree;

use std::path::Path;

pub use section::{ConfigValue, FromConfig, Section};
pub(crate) use section::{parse_duration, unknown};

use crate::{Error, Result};

/// A parsed configuration file.
#[derive(Debug)]
pub struct Config {
    root: Section,
    text: String,
}

impl Config {
    /// Reads and parses a TOML file.
    ///
    /// # Errors
    ///
    /// [`Error::Config`] if it cannot be read or is not TOML, with line and column.
    pub fn from_file(path: impl AsRef<Path>) -> Result<Self> {
        let path = path.as_ref();
        let text = std::fs::read_to_string(path)
            .map_err(|e| Error::Config(format!("{}: cannot read: {e}", path.display())))?;
        Self::from_text(&path.display().to_string(), text)
    }

    /// Parses TOML text; `name` stands for the file in messages.
    ///
    /// # Errors
    ///
    /// [`Error::Config`] if it is not TOML, with line and column.
    pub fn from_text(name: &str, text: impl Into<String>) -> Result<Self> {
        let text = text.into();
        let root = tree::parse(name, &text)?;
        Ok(Self { root, text })
    }

    /// The text as it was read.
    #[must_use]
    pub fn text(&self) -> &str {
        &self.text
    }

    /// The root table, to be taken apart.
    #[must_use]
    pub fn into_section(self) -> Section {
        self.root
    }
}
