//! `vis_data/scalars.json`: one JSON object per line, as MMEngine writes it.

use std::fs::File;
use std::io::Write;
use std::path::{Path, PathBuf};

use serde_json::{Map, Value};

use crate::{Error, Result};

/// Open files of scalars, all with the same lines.
#[derive(Debug)]
pub(crate) struct ScalarsFile {
    files: Vec<(PathBuf, File)>,
}

impl ScalarsFile {
    /// Opens files to append, and creates what is not there.
    pub(crate) fn create(paths: &[PathBuf]) -> Result<Self> {
        let open = |path: &PathBuf| {
            let file = File::options().create(true).append(true).open(path);
            file.map(|file| (path.clone(), file)).map_err(|e| io("create", path, e))
        };
        Ok(Self { files: paths.iter().map(open).collect::<Result<_>>()? })
    }

    /// Appends one line.
    pub(crate) fn write(&mut self, line: Map<String, Value>) -> Result<()> {
        // One write each: whoever reads along sees whole lines.
        let line = format!("{}\n", Value::Object(line));
        for (path, file) in &mut self.files {
            file.write_all(line.as_bytes()).map_err(|e| io("write", path, e))?;
        }
        Ok(())
    }
}

fn io(what: &str, path: &Path, source: std::io::Error) -> Error {
    Error::Io { what: format!("cannot {what} {}", path.display()), source }
}
