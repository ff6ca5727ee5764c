//! Writes files and directories atomically.

use std::ffi::OsString;
use std::fs::{self, File};
use std::io::Write;
use std::path::{Path, PathBuf};

use super::{FileMeta, LAST, STATE};
use crate::{Error, Result};

/// First bytes of a JSON object with a checksum.
const SEAL: &str = "{\n  \"crc32\": \"";

/// Adds a checksum of the rest to a pretty-printed JSON object, as its first key.
pub(super) fn seal(json: &str) -> String {
    let rest = json.strip_prefix('{').unwrap_or(json);
    format!("{SEAL}{:08x}\",{rest}", crc32(rest.as_bytes()))
}

/// Verifies the checksum added by [`seal`]; the error text is the reason.
pub(super) fn check_seal(text: &[u8]) -> Result<(), String> {
    let rest = text.strip_prefix(SEAL.as_bytes()).ok_or("does not begin with a checksum")?;
    let (sum, rest) = rest.split_at_checked(10).ok_or("truncated inside its checksum")?;
    if sum == format!("{:08x}\",", crc32(rest)).as_bytes() {
        return Ok(());
    }
    Err("damaged: checksum mismatch".to_owned())
}

/// CRC-32 of `bytes`.
pub(super) fn crc32(bytes: &[u8]) -> u32 {
    let mut crc = flate2::Crc::new();
    crc.update(bytes);
    crc.sum()
}

/// Returns name, length and checksum of a file.
pub(super) fn file_meta(name: &str, bytes: &[u8]) -> FileMeta {
    FileMeta { name: name.to_owned(), bytes: bytes.len(), crc32: crc32(bytes) }
}

/// Creates an error of an operation on `path`, with advice if the disk is full.
pub(super) fn io<'a>(what: &'a str, path: &'a Path) -> impl FnOnce(std::io::Error) -> Error + 'a {
    move |source| {
        let mut what = format!("cannot {what} {}", path.display());
        if is_full(&source) {
            what += " (earlier checkpoints are intact: free disk space, then resume)";
        }
        Error::Io { what, source }
    }
}

/// Returns whether the error is a full disk, an exceeded quota or a file size limit.
pub(crate) fn is_full(error: &std::io::Error) -> bool {
    use std::io::ErrorKind::{FileTooLarge, QuotaExceeded, StorageFull};
    matches!(error.kind(), FileTooLarge | QuotaExceeded | StorageFull)
}

/// Writes `dir/name`, a directory of `files`, atomically. Returns its path.
pub(super) fn write_dir(dir: &Path, name: &str, files: &[(String, Vec<u8>)]) -> Result<PathBuf> {
    let (fresh, path) = (temporary(dir, name), dir.join(name));
    fs::create_dir_all(dir).map_err(io("create", dir))?;
    // Left by a killed run.
    if fresh.exists() {
        remove(&fresh).map_err(io("remove", &fresh))?;
    }
    fs::create_dir(&fresh).map_err(io("create", &fresh))?;
    let write = || {
        for (name, bytes) in files {
            write_synced(&fresh.join(name), bytes)?;
        }
        sync_dir(&fresh)?;
        replace_dir(&fresh, &path)
    };
    write().inspect_err(|_| {
        let _ = fs::remove_dir_all(&fresh);
    })?;
    Ok(path)
}

/// Writes the file `dir/name` atomically.
pub(super) fn write_file(dir: &Path, name: &str, bytes: &[u8]) -> Result<()> {
    let (fresh, path) = (temporary(dir, name), dir.join(name));
    let write = || {
        write_synced(&fresh, bytes)?;
        fs::rename(&fresh, &path).map_err(io("rename to", &path))?;
        sync_dir(dir)
    };
    write().inspect_err(|_| {
        let _ = fs::remove_file(&fresh);
    })
}

/// Returns the temporary name of `name` while it is written.
fn temporary(dir: &Path, name: &str) -> PathBuf {
    dir.join(format!(".{name}{TEMPORARY}"))
}

const TEMPORARY: &str = ".tmp";

/// Removes incomplete checkpoints of killed runs, but no other files with such names. No run may
/// write to `work_dir` meanwhile.
pub(crate) fn remove_leftovers(work_dir: &Path) -> Result<()> {
    let Ok(entries) = fs::read_dir(work_dir) else { return Ok(()) };
    for path in entries.flatten().map(|entry| entry.path()) {
        let name = path.file_name().unwrap_or_default().to_string_lossy();
        if !(name.starts_with('.') && name.ends_with(TEMPORARY)) {
            continue;
        }
        if path.is_dir() && is_checkpoint(&path) {
            fs::remove_dir_all(&path).map_err(io("remove", &path))?;
        } else if path == temporary(work_dir, LAST) {
            fs::remove_file(&path).map_err(io("remove", &path))?;
        }
    }
    Ok(())
}

/// Removes a checkpoint, unless its directory contains other files.
pub(crate) fn remove(path: &Path) -> std::io::Result<()> {
    if is_checkpoint(path) {
        return fs::remove_dir_all(path);
    }
    Err(std::io::Error::other("it contains files that are not part of a checkpoint"))
}

/// Returns whether a directory contains only files of a checkpoint.
fn is_checkpoint(dir: &Path) -> bool {
    let of = |path: &Path| path.extension().is_some_and(|e| e == "safetensors");
    let mut entries = fs::read_dir(dir).into_iter().flatten().flatten().map(|entry| entry.path());
    let unfinished = temporary(dir, STATE);
    entries.all(|path| of(&path) || path.ends_with(STATE) || path == unfinished)
}

fn write_synced(path: &Path, bytes: &[u8]) -> Result<()> {
    let write = || {
        let mut file = File::create(path)?;
        file.write_all(bytes)?;
        file.sync_all()
    };
    write().map_err(io("write", path))
}

/// Flushes a directory's entries, so that a rename in it survives a power failure.
fn sync_dir(path: &Path) -> Result<()> {
    File::open(path).and_then(|d| d.sync_all()).map_err(io("flush", path))
}

/// Returns the name of a checkpoint while another one replaces it. It begins with a dot, because
/// `epoch_1.old` may be a user's backup.
pub(crate) fn aside(path: &Path) -> PathBuf {
    let mut name = OsString::from(".");
    name.push(path.file_name().unwrap_or_default());
    name.push(".old");
    path.with_file_name(name)
}

/// Renames `fresh` to `path`. An existing checkpoint is renamed first and removed last, so that at
/// every moment, also after a power failure, one of the two is intact. A failure to remove it is
/// ignored.
fn replace_dir(fresh: &Path, path: &Path) -> Result<()> {
    let mut old = aside(path);
    if path.exists() {
        while old.exists() && remove(&old).is_err() {
            old = aside(&old);
        }
        fs::rename(path, &old).map_err(io("rename", path))?;
    }
    fs::rename(fresh, path).map_err(io("rename to", path))?;
    if let Some(dir) = path.parent() {
        sync_dir(dir)?;
    }
    let _ = remove(&old);
    Ok(())
}
