//! The place of a checkpoint: a file that is replaced as a whole, by one run.
//!
//! A new file is written beside the last one, in `.NAME.PID-COUNT.new`, and renamed. Meanwhile, and
//! until another place is saved to, this process holds a lock (`flock`) on `.NAME.lock`, which
//! names it; the operating system releases it when the process ends, however it ends. Hence a new
//! file found under the lock was left by a process that was killed, and is removed. It stays on a
//! file system without locks. There, and between two runs that do not overlap, a run still notices
//! that the file is not the one which it has read or written.

use std::collections::HashMap;
use std::ffi::{OsStr, OsString};
use std::fs::{self, File, TryLockError};
use std::io::{self, Write};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};

use parking_lot::Mutex;
use tracing::warn;

use super::file::Id;
use crate::BoxError;

/// The places that a trainer has resumed from or saved to.
#[derive(Debug, Default)]
pub struct Places {
    /// Content of the file that this trainer has read or written; `None` if there was no file.
    known: HashMap<PathBuf, Option<Id>>,
    /// The lock of the last place that was saved to.
    lock: Option<Arc<Lock>>,
}

impl Places {
    /// Remembers the content of the file at `path`, and removes what killed saves have left.
    pub fn resumed(&mut self, path: &Path, id: Option<Id>) {
        let Ok(target) = Target::of(path) else { return };
        if !target.leftovers().is_empty()
            && let Ok(lock) = Lock::attempt(&target.lock_path())
            && lock.file.is_some()
            && let Some(_turn) = lock.turn.try_lock()
        {
            target.remove_leftovers();
        }
        self.known.insert(target.path(), id);
    }

    /// Whether this trainer has resumed from or saved to this path, and found or left a file there.
    pub fn knows(&self, path: &Path) -> bool {
        let target = Target::of(path).ok();
        target.and_then(|target| *self.known.get(&target.path())?).is_some()
    }

    /// Replaces the file at `path` by one that `write` writes, and returns. `describe` tells about
    /// a checkpoint of another run.
    ///
    /// # Errors
    ///
    /// Another run that saves there, or has done so; errors of the file system. The last file is
    /// unchanged then, unless the error says otherwise.
    pub fn save(
        &mut self,
        path: &Path,
        write: impl FnOnce(&File) -> Result<Id, BoxError>,
        describe: impl FnOnce(&Path) -> String,
    ) -> Result<(), BoxError> {
        let target = Target::of(path)?;
        target.check()?;
        fs::create_dir_all(&target.directory)?;
        let lock = self.acquire(&target)?;
        let _turn = lock.turn.lock();
        if lock.file.is_some() {
            target.remove_leftovers();
        }
        let there = Id::of(&target.path())?;
        let known = self.known.get(&target.path());
        // This trainer has it twice.
        let is_shared = Arc::strong_count(&lock) > 2;
        if known.is_none() && there.is_some() && is_shared {
            self.lock = None;
            let text = "another trainer of this process saves there: drop it first, or give each a path of its own";
            return Err(text.into());
        }
        if let (Some(known), Some(other)) = (known, there)
            && *known != Some(other)
        {
            self.lock = None;
            let since = if known.is_some() {
                "since this run read or wrote it"
            } else {
                "since this run began"
            };
            return Err(format!(
                "another run has saved there {since}{}: end one of both, or give each a path of its own, or \
                 remove the file, and this run saves again",
                describe(&target.path())
            )
            .into());
        }
        // Opened before anything is written: some file systems have no directories to sync.
        let directory = File::open(&target.directory);
        let new = NewFile::create(&target)?;
        if let Ok(last) = fs::metadata(target.path()) {
            new.file.set_permissions(last.permissions())?;
        }
        let id = write(&new.file)?;
        new.persist(&target.path())?;
        self.known.insert(target.path(), Some(id));
        match directory.and_then(|directory| directory.sync_all()) {
            // Makes the rename durable.
            Err(error) if !is_unsupported(&error) => Err(format!(
                "the new file is complete and in its place, but its directory cannot be synced ({error}): after a \
                 power failure the last file may be there instead"
            )
            .into()),
            _ => Ok(()),
        }
    }

    /// Locks a place instead of the last one.
    fn acquire(&mut self, target: &Target) -> Result<Arc<Lock>, BoxError> {
        let path = target.lock_path();
        let lock = match self.lock.take().filter(|lock| lock.path == path) {
            Some(lock) => lock,
            None => Lock::acquire(&path)?,
        };
        self.lock = Some(Arc::clone(&lock));
        Ok(lock)
    }
}

/// Whether a file system refuses to open or sync any directory.
fn is_unsupported(error: &io::Error) -> bool {
    use io::ErrorKind::{InvalidInput, PermissionDenied, Unsupported};
    matches!(error.kind(), InvalidInput | PermissionDenied | Unsupported)
}

/// A file by its directory and name, behind all symbolic links.
struct Target {
    directory: PathBuf,
    name: OsString,
}

impl Target {
    fn of(path: &Path) -> io::Result<Self> {
        let mut path = path.to_owned();
        for _ in 0..MAX_LINKS {
            let link = match fs::symlink_metadata(&path) {
                Ok(metadata) if metadata.is_symlink() => fs::read_link(&path)?,
                Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
                _ => {
                    let name = path.file_name().ok_or(io::ErrorKind::IsADirectory)?.to_owned();
                    let directory = resolve(&std::path::absolute(&path)?);
                    return Ok(Self { directory, name });
                }
            };
            path = path.parent().unwrap_or_else(|| Path::new(".")).join(link);
        }
        Err(io::Error::other("too many symbolic links"))
    }

    fn path(&self) -> PathBuf {
        self.directory.join(&self.name)
    }

    fn lock_path(&self) -> PathBuf {
        self.beside("lock")
    }

    /// A hidden file beside this one.
    fn beside(&self, suffix: &str) -> PathBuf {
        let mut name = OsString::from(".");
        name.push(&self.name);
        name.push(".");
        name.push(suffix);
        self.directory.join(name)
    }

    /// Returns an error unless a file can be there.
    fn check(&self) -> io::Result<()> {
        match fs::metadata(self.path()) {
            Ok(metadata) if metadata.is_dir() => Err(io::ErrorKind::IsADirectory.into()),
            Ok(metadata) if !metadata.is_file() => Err(io::Error::other("not a regular file")),
            Err(error) if error.kind() != io::ErrorKind::NotFound => Err(error),
            _ => Ok(()),
        }
    }

    /// New files of this place.
    fn leftovers(&self) -> Vec<PathBuf> {
        let prefix = self.beside("");
        let prefix = prefix.file_name().map_or(&[][..], OsStr::as_encoded_bytes);
        let is_new = |name: &OsStr| {
            let middle = name.as_encoded_bytes().strip_prefix(prefix)?.strip_suffix(b".new")?;
            let (process, count) = std::str::from_utf8(middle).ok()?.split_once('-')?;
            let is_number = |text: &str| text.parse::<u64>().is_ok();
            (is_number(process) && is_number(count)).then_some(())
        };
        let entries = fs::read_dir(&self.directory).into_iter().flatten().flatten();
        entries.filter(|e| is_new(&e.file_name()).is_some()).map(|e| e.path()).collect()
    }

    /// Only under the lock, in a turn. Errors are ignored: the next save tries again.
    fn remove_leftovers(&self) {
        for left in self.leftovers() {
            let _ = fs::remove_file(left);
        }
    }
}

/// The directory of an absolute path, behind all symbolic links, also if it does not exist yet.
fn resolve(path: &Path) -> PathBuf {
    let directories = path.ancestors().skip(1);
    let mut resolved = directories.filter_map(|directory| {
        let rest = path.parent()?.strip_prefix(directory).ok()?;
        Some(fs::canonicalize(directory).ok()?.join(rest))
    });
    resolved.next().unwrap_or_else(|| path.parent().unwrap_or(path).to_owned())
}

/// As the kernel's.
const MAX_LINKS: usize = 40;

/// A file that is removed unless it is renamed.
struct NewFile {
    file: File,
    path: Option<PathBuf>,
}

impl NewFile {
    fn create(target: &Target) -> io::Result<Self> {
        static COUNT: AtomicU64 = AtomicU64::new(0);
        loop {
            // Relaxed: only a counter.
            let count = COUNT.fetch_add(1, Ordering::Relaxed);
            let path = target.beside(&format!("{}-{count}.new", std::process::id()));
            match File::options().write(true).create_new(true).open(&path) {
                // Of a process on another host.
                Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {}
                file => return Ok(Self { file: file?, path: Some(path) }),
            }
        }
    }

    fn persist(mut self, to: &Path) -> io::Result<()> {
        let path = self.path.take().expect("taken only here");
        fs::rename(&path, to).inspect_err(|_| self.path = Some(path))
    }
}

impl Drop for NewFile {
    fn drop(&mut self) {
        if let Some(path) = &self.path {
            let _ = fs::remove_file(path);
        }
    }
}

/// A lock of this process. Its file is removed when the last trainer drops it.
#[derive(Debug)]
struct Lock {
    path: PathBuf,
    /// `None` where locks are not supported.
    file: Option<File>,
    /// Held by the trainer of this process that saves.
    turn: Mutex<()>,
}

/// The locks of this process: its trainers share them, because they notice each other's files.
static HELD: Mutex<Vec<Weak<Lock>>> = Mutex::new(Vec::new());

/// Time that another process on this host may hold a lock while it exits.
const PATIENCE: Duration = Duration::from_secs(5);
/// The same for a process on another host: the file server must detect that it is gone, which takes
/// NFS 90 s.
const PATIENCE_ELSEWHERE: Duration = Duration::from_secs(120);

impl Lock {
    /// Waits for a holder that may be exiting.
    ///
    /// # Errors
    ///
    /// A holder that does not exit, by name.
    fn acquire(path: &Path) -> Result<Arc<Self>, BoxError> {
        let start = Instant::now();
        loop {
            let holder = match Self::attempt(path) {
                Ok(lock) => return Ok(lock),
                Err(holder) => holder,
            };
            let is_here = holder.is_empty() || holder.ends_with(&format!(" on {}", hostname()));
            if start.elapsed() >= if is_here { PATIENCE } else { PATIENCE_ELSEWHERE } {
                return Err(format!(
                    "another run saves there: {holder}; wait until it has ended, or give each run a path of its own"
                )
                .into());
            }
            std::thread::sleep(Duration::from_millis(50));
        }
    }

    /// Warns where locks are not supported.
    ///
    /// # Errors
    ///
    /// The name of the process that holds it.
    fn attempt(path: &Path) -> Result<Arc<Self>, String> {
        let mut held = HELD.lock();
        held.retain(|lock| lock.strong_count() > 0);
        if let Some(lock) = held.iter().filter_map(Weak::upgrade).find(|lock| lock.path == path) {
            return Ok(lock);
        }
        let file = match Self::open(path) {
            Ok(file) => Some(Self::sign(file, path)?),
            Err(TryLockError::WouldBlock) => {
                return Err(fs::read_to_string(path).unwrap_or_default());
            }
            Err(TryLockError::Error(error)) => {
                let path = path.display();
                warn!(
                    "cannot lock {path}: {error}: do not start a second run with this checkpoint"
                );
                None
            }
        };
        let lock = Arc::new(Self { path: path.to_owned(), file, turn: Mutex::new(()) });
        held.push(Arc::downgrade(&lock));
        Ok(lock)
    }

    /// Opens and locks a file. No new file stays if locks are not supported.
    fn open(path: &Path) -> Result<File, TryLockError> {
        let options = File::options().read(true).write(true).clone();
        let new = options.clone().create_new(true).open(path);
        let is_new = new.is_ok();
        let file = new.or_else(|_| options.clone().create(true).truncate(false).open(path));
        let file = file.map_err(TryLockError::Error)?;
        let locked = file.try_lock();
        if is_new && matches!(locked, Err(TryLockError::Error(_))) {
            let _ = fs::remove_file(path);
        }
        locked.map(|()| file)
    }

    /// Writes the name of this process to a locked file, unless its last holder has removed it.
    fn sign(mut file: File, path: &Path) -> Result<File, String> {
        let inode = |metadata: io::Result<fs::Metadata>| metadata.ok().map(|m| (m.dev(), m.ino()));
        if inode(fs::metadata(path)) != inode(file.metadata()) {
            return Err(String::new());
        }
        let name = format!("process {} on {}", std::process::id(), hostname());
        // The lock does not depend on the name.
        let _ = file.set_len(0).and_then(|()| file.write_all(name.as_bytes()));
        Ok(file)
    }
}

impl Drop for Lock {
    fn drop(&mut self) {
        if self.file.is_some() {
            let _ = fs::remove_file(&self.path);
        }
    }
}

fn hostname() -> String {
    let name = fs::read_to_string("/proc/sys/kernel/hostname").unwrap_or_default();
    name.trim().to_owned()
}
