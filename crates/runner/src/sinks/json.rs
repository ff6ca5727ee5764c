//! `vis_data/scalars.json`: one JSON object per line, as MMEngine writes it.

use std::fs::File;
use std::io::Write;
use std::path::Path;

use serde_json::{Map, Value};

use crate::{Error, Result};

/// An open `scalars.json`.
#[derive(Debug)]
pub(crate) struct ScalarsFile {
    file: File,
}

impl ScalarsFile {
    /// Opens `dir/scalars.json` to append, and creates what is not there.
    pub(crate) fn create(dir: &Path) -> Result<Self> {
        let path = dir.join("scalars.json");
        std::fs::create_dir_all(dir)
            .and_then(|()| File::options().create(true).append(true).open(&path))
            .map(|file| Self { file })
            .map_err(|source| Error::Io {
                what: format!("cannot create {}", path.display()),
                source,
            })
    }

    /// Appends one line.
    pub(crate) fn write(&mut self, line: Map<String, Value>) -> Result<()> {
        writeln!(self.file, "{}", Value::Object(line))
            .map_err(|source| Error::Io { what: "cannot write scalars.json".into(), source })
    }
}
