//! Writes files and directories atomically.

use std::ffi::{OsStr, OsString};
use std::fs::{self, File};
use std::io::Write;
use std::path::{Path, PathBuf};

use train_step::BoxError;

use super::find::is_file;
use super::{FileMeta, LAST, MODEL, STATE, load_meta};
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

/// Writes `dir/name`, a directory that `fill` fills under a temporary name, atomically. Returns its
/// path.
pub(super) fn write_dir(
    dir: &Path,
    name: &str,
    fill: impl FnOnce(&Path) -> Result<()>,
) -> Result<PathBuf> {
    let (fresh, path) = (temporary(dir, name), dir.join(name));
    fs::create_dir_all(dir).map_err(io("create", dir))?;
    // Left by a killed run.
    if fresh.exists() {
        remove(&fresh).map_err(io("remove", &fresh))?;
    }
    fs::create_dir(&fresh).map_err(io("create", &fresh))?;
    let written = fill(&fresh).and_then(|()| {
        sync_dir(&fresh)?;
        replace_dir(&fresh, &path)
    });
    written.inspect_err(|_| {
        let _ = fs::remove_dir_all(&fresh);
    })?;
    Ok(path)
}

/// Returns an error if a checkpoint, or a published model, cannot have this name: it must be one
/// name in the work directory, not hidden, and none that the runner uses itself.
pub(crate) fn check_name(name: &str) -> Result<()> {
    let is_one = Path::new(name).file_name().is_some_and(|file| file == name);
    let is_valid = is_one && !name.contains('\0') && !name.starts_with('.') && name != LAST;
    if is_valid && name.len() <= LONGEST_NAME {
        return Ok(());
    }
    Err(Error::checkpoint(
        None,
        format!(
            "a checkpoint cannot be called {name:?}: the name must have 1 to {LONGEST_NAME} bytes, no `/`, no `.` at its \
         beginning, and not be `{LAST}`"
        ),
    ))
}

/// Maximum length of a checkpoint's name: file systems allow 255 bytes, of which the names of
/// temporary directories and of published models take some.
const LONGEST_NAME: usize = 200;

/// Returns an error if the file `out` would be in a checkpoint, whose files it must not replace.
pub(crate) fn check_outside(out: &Path) -> Result<()> {
    let Ok(path) = std::path::absolute(out) else { return Ok(()) };
    // Of directories to be created, the first that exists counts.
    let existing = path.ancestors().skip(1).find_map(|dir| dir.canonicalize().ok());
    for dir in existing.unwrap_or_default().ancestors() {
        if is_file(&dir.join(STATE))? && is_file(&dir.join(MODEL))? {
            return Err(Error::checkpoint(
                Some(out),
                format!(
                    "{} is inside the checkpoint {}, which would be damaged: choose a path outside of it",
                    out.display(),
                    dir.display()
                ),
            ));
        }
    }
    Ok(())
}

/// Writes a file outside of checkpoints: atomically, or to a device or pipe.
pub(crate) fn write_output(out: &Path, bytes: &[u8]) -> Result<()> {
    check_outside(out)?;
    let is_special = out.metadata().is_ok_and(|found| !found.is_file() && !found.is_dir());
    match (out.parent(), out.file_name()) {
        (Some(dir), Some(name)) if !is_special => {
            write_users(&dir.join("."), name, |file| write_bytes(file, bytes))
        }
        _ => fs::write(out, bytes).map_err(io("write", out)),
    }
}

/// Writes the file `dir/name` atomically, in a directory that is not the runner's, in which every
/// other file is the user's. If `dir/name` is a link, the link is replaced.
pub(super) fn write_users(
    dir: &Path,
    name: impl AsRef<OsStr>,
    write: impl FnOnce(&File) -> Result<Sum, BoxError>,
) -> Result<()> {
    let path = dir.join(name.as_ref());
    let (process, mut attempt) = (std::process::id(), 0_u64);
    loop {
        let fresh = dir.join(format!(".runner-{process}-{attempt}{TEMPORARY}"));
        match File::create_new(&fresh) {
            Err(e) if e.kind() == std::io::ErrorKind::AlreadyExists => attempt += 1,
            Err(e) => return Err(io("write", &path)(e)),
            Ok(file) => return replace_file(&file, &fresh, &path, write),
        }
    }
}

/// Writes the file `dir/name`, in a directory of the runner's own, atomically.
pub(super) fn write_file(dir: &Path, name: &str, bytes: &[u8]) -> Result<()> {
    let fresh = temporary(dir, name);
    let file = create(&fresh).map_err(io("write", &fresh))?;
    replace_file(&file, &fresh, &dir.join(name), |file| write_bytes(file, bytes))
}

/// Writes `file`, the new file `fresh`, and renames it to `path`.
fn replace_file(
    file: &File,
    fresh: &Path,
    path: &Path,
    write: impl FnOnce(&File) -> Result<Sum, BoxError>,
) -> Result<()> {
    let write = || {
        write(file).map_err(|why| unwritten(fresh, why))?;
        fs::rename(fresh, path).map_err(io("rename to", path))?;
        path.parent().map_or(Ok(()), sync_dir)
    };
    write().inspect_err(|_| {
        let _ = fs::remove_file(fresh);
    })
}

/// Returns the temporary name of `name` while it is written.
fn temporary(dir: &Path, name: &str) -> PathBuf {
    dir.join(format!(".{name}{TEMPORARY}"))
}

const TEMPORARY: &str = ".tmp";

/// Removes incomplete checkpoints of killed runs and those that were being replaced, but no other
/// files with such names; a checkpoint whose replacement is missing gets its name back. No run may
/// write to `work_dir` meanwhile.
pub(crate) fn remove_leftovers(work_dir: &Path) -> Result<()> {
    let Ok(entries) = fs::read_dir(work_dir) else { return Ok(()) };
    for path in entries.flatten().map(|entry| entry.path()) {
        if let Some(name) = replaced(&path) {
            let current = work_dir.join(name);
            match current.symlink_metadata() {
                // It is complete, because its files were flushed before it was renamed.
                Ok(_) if load_meta(&current).is_ok() && is_checkpoint(&path) => {
                    fs::remove_dir_all(&path).map_err(io("remove", &path))?;
                }
                Err(e) if e.kind() == std::io::ErrorKind::NotFound && load_meta(&path).is_ok() => {
                    fs::rename(&path, &current).map_err(io("rename to", &current))?;
                }
                _ => {}
            }
            continue;
        }
        let name = path.file_name().unwrap_or_default().to_string_lossy();
        if !(name.starts_with('.') && name.ends_with(TEMPORARY)) {
            // A run was killed while it recorded the best metric.
            let unfinished = temporary(&path, STATE);
            if path.join(STATE).is_file() && unfinished.is_file() {
                fs::remove_file(&unfinished).map_err(io("remove", &unfinished))?;
            }
        } else if path.is_dir() && is_checkpoint(&path) {
            fs::remove_dir_all(&path).map_err(io("remove", &path))?;
        } else if path == temporary(work_dir, LAST) {
            fs::remove_file(&path).map_err(io("remove", &path))?;
        }
    }
    Ok(())
}

/// Returns the name of the checkpoint that was replaced while it had the name `path`, see
/// [`aside`]; `None` for other paths.
pub(super) fn replaced(path: &Path) -> Option<&str> {
    let name = path.file_name()?.to_str()?;
    let name = name.strip_prefix('.')?.strip_suffix(".old")?;
    // `replace_dir` adds dots if a name is taken.
    let (mut name, mut taken) = (name, true);
    while taken {
        taken = name.strip_prefix('.').and_then(|n| n.strip_suffix(".old")).is_some_and(|inner| {
            name = inner;
            true
        });
    }
    check_name(name).ok().map(|()| name)
}

/// Removes a checkpoint, unless its directory contains other files.
pub(crate) fn remove(path: &Path) -> std::io::Result<()> {
    if is_checkpoint(path) {
        return fs::remove_dir_all(path);
    }
    Err(std::io::Error::other(
        "it contains files that are not part of a checkpoint, or cannot be read",
    ))
}

/// Returns whether a directory can be read and contains only files of a checkpoint.
fn is_checkpoint(dir: &Path) -> bool {
    let of = |path: &Path| path.extension().is_some_and(|e| e == "safetensors");
    let unfinished = temporary(dir, STATE);
    let is_part = |path: &Path| of(path) || path.ends_with(STATE) || path == unfinished;
    let Ok(mut entries) = fs::read_dir(dir) else { return false };
    // An entry that cannot be read may be a user's.
    entries.all(|entry| entry.is_ok_and(|entry| is_part(&entry.path())))
}

/// Length and CRC-32 of a file that has been written, and synced to disk.
pub(super) struct Sum {
    pub(super) bytes: u64,
    pub(super) crc32: u32,
}

/// Writes a new file.
pub(super) fn write_new(
    path: &Path,
    write: impl FnOnce(&File) -> Result<Sum, BoxError>,
) -> Result<Sum> {
    let file = create(path).map_err(io("write", path))?;
    write(&file).map_err(|why| unwritten(path, why))
}

/// Writes and syncs the content of a file.
pub(super) fn write_bytes(mut file: &File, bytes: &[u8]) -> Result<Sum, BoxError> {
    file.write_all(bytes)?;
    file.sync_all()?;
    Ok(Sum { bytes: bytes.len() as u64, crc32: crc32(bytes) })
}

/// Creates an error of a file that could not be written.
fn unwritten(path: &Path, why: BoxError) -> Error {
    let why = why.downcast().map(|why| io("write", path)(*why));
    let why = why.or_else(|why| why.downcast().map(|why| Error::Optim(*why)));
    why.unwrap_or_else(|why| Error::Checkpoint {
        path: Some(path.to_owned()),
        message: format!("{}: {why}", path.display()),
        source: Some(why),
    })
}

/// Creates a file of the runner's own. One left by a killed process is removed; a link is not
/// followed.
fn create(path: &Path) -> std::io::Result<File> {
    match fs::remove_file(path) {
        Err(e) if e.kind() != std::io::ErrorKind::NotFound => Err(e),
        _ => File::create_new(path),
    }
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
