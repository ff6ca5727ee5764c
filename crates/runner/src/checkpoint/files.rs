//! Files and directories that are there whole or not at all.

use std::fs::{self, File};
use std::io::Write;
use std::path::{Path, PathBuf};

use super::FileMeta;
use crate::{Error, Result};

/// The line that `seal` puts behind the opening brace.
const SEAL: &str = "{\n  \"crc32\": \"";

/// Puts a checksum of everything else into a pretty-printed JSON object, as its first key.
pub(super) fn seal(json: &str) -> String {
    let rest = json.strip_prefix('{').unwrap_or(json);
    format!("{SEAL}{:08x}\",{rest}", crc32(rest.as_bytes()))
}

/// Whether the checksum of a sealed object is that of its text; the text says why not.
pub(super) fn check_seal(text: &[u8]) -> Result<(), String> {
    let rest = text.strip_prefix(SEAL.as_bytes()).ok_or("has no checksum at its head")?;
    let (sum, rest) = rest.split_at_checked(10).ok_or("ends in its checksum")?;
    if sum == format!("{:08x}\",", crc32(rest)).as_bytes() {
        return Ok(());
    }
    Err("damaged: its checksum is of another text".to_owned())
}

/// CRC-32 of `bytes`.
pub(super) fn crc32(bytes: &[u8]) -> u32 {
    let mut crc = flate2::Crc::new();
    crc.update(bytes);
    crc.sum()
}

/// Length and checksum of a file to be.
pub(super) fn file_meta(name: &str, bytes: &[u8]) -> FileMeta {
    FileMeta { name: name.to_owned(), bytes: bytes.len(), crc32: crc32(bytes) }
}

pub(super) fn io<'a>(what: &'a str, path: &'a Path) -> impl FnOnce(std::io::Error) -> Error + 'a {
    move |source| Error::Io { what: format!("cannot {what} {}", path.display()), source }
}

pub(super) fn write_synced(path: &Path, bytes: &[u8]) -> Result<()> {
    let write = || {
        let mut file = File::create(path)?;
        file.write_all(bytes)?;
        file.sync_all()
    };
    write().map_err(io("write", path))
}

/// Flushes a directory's entries, so that a rename in it survives a power cut.
pub(super) fn sync_dir(path: &Path) -> Result<()> {
    File::open(path).and_then(|d| d.sync_all()).map_err(io("flush", path))
}

/// Where a checkpoint waits while another takes its place.
pub(super) fn aside(path: &Path) -> PathBuf {
    let mut old = path.as_os_str().to_owned();
    old.push(".old");
    PathBuf::from(old)
}

/// Puts `fresh` in the place of `path`. A checkpoint already there steps aside first and goes
/// last, so that at every moment, and after a power cut, one of the two is whole.
pub(super) fn replace_dir(fresh: &Path, path: &Path) -> Result<()> {
    let old = aside(path);
    if path.exists() {
        if old.exists() {
            fs::remove_dir_all(&old).map_err(io("remove", &old))?;
        }
        fs::rename(path, &old).map_err(io("rename", path))?;
    }
    fs::rename(fresh, path).map_err(io("rename to", path))?;
    if let Some(dir) = path.parent() {
        sync_dir(dir)?;
    }
    if old.exists() {
        fs::remove_dir_all(&old).map_err(io("remove", &old))?;
    }
    Ok(())
}
