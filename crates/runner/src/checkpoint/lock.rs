//! `WorkDirLock`: a work directory has at most one training run at a time.
//!
//! The lock is an `flock` on the file `.runner.lock` in the directory. The operating system
//! releases it at the end of the process, so a killed run leaves no lock behind. The file stays,
//! with the process and launcher of the last run.

use std::fs::{self, File, TryLockError};
use std::io::{ErrorKind, Read, Seek, Write};
use std::os::unix::fs::MetadataExt;
use std::path::Path;
use std::time::{Duration, Instant};

use jiff::Zoned;
use train_log::hostname;

use super::files::io;
use crate::{Error, Result};

/// Name of the lock file.
const NAME: &str = ".runner.lock";
/// Time that another process on this host may hold the lock while it exits.
const PATIENCE: Duration = Duration::from_secs(10);
/// The same for a process on another host: the file server must detect that it is gone, which takes
/// NFS 90 s.
const PATIENCE_ELSEWHERE: Duration = Duration::from_secs(120);

/// Maximum number of attempts to lock the file that has the path: on a file system whose files
/// change their numbers, none would succeed.
const MOST_TRIES: u32 = 100;

/// Holds the lock until dropped; holds nothing if the file system does not support locks.
#[derive(Debug)]
pub(crate) struct WorkDirLock {
    file: Option<File>,
    /// Contents of the file before this run.
    last: String,
}

impl WorkDirLock {
    /// Creates `work_dir` and locks it. Waits for a holder that may be exiting. Calls `warn` before
    /// it waits, and if locks are not supported.
    ///
    /// # Errors
    ///
    /// [`Error::Checkpoint`] naming the holder, or a lock file that is not a regular file;
    /// [`Error::Io`] if the directory cannot be created.
    pub(crate) fn acquire(work_dir: &Path, warn: &mut dyn FnMut(&str)) -> Result<Self> {
        Self::acquire_by(File::try_lock, work_dir, warn)
    }

    fn acquire_by(
        lock: impl Fn(&File) -> Result<(), TryLockError>,
        work_dir: &Path,
        warn: &mut dyn FnMut(&str),
    ) -> Result<Self> {
        let path = work_dir.join(NAME);
        let start = Instant::now();
        let (mut has_waited, mut tries) = (false, 0);
        loop {
            tries += 1;
            // Created and opened in each attempt, because the directory may have been removed
            // meanwhile.
            fs::create_dir_all(work_dir).map_err(io("create", work_dir))?;
            check_regular(&path)?;
            let open =
                File::options().create(true).truncate(false).read(true).write(true).open(&path);
            let locked = open.map_err(TryLockError::Error).and_then(|file| {
                lock(&file)?;
                Ok(file)
            });
            match locked {
                Ok(mut file) if is_at(&file, &path) || tries == MOST_TRIES => {
                    let mut last = String::new();
                    let _ = file.read_to_string(&mut last);
                    return Ok(Self { file: Some(file), last });
                }
                // The file was removed or replaced while it was locked, or a signal arrived.
                Ok(_) => continue,
                Err(TryLockError::Error(why)) if why.kind() == ErrorKind::Interrupted => continue,
                Err(TryLockError::Error(why)) => {
                    let path = path.display();
                    warn(&format!(
                        "cannot lock {path}: {why}: do not start a second run in this work directory"
                    ));
                    return Ok(Self { file: None, last: String::new() });
                }
                Err(TryLockError::WouldBlock) => {}
            }
            let holder = fs::read_to_string(&path).unwrap_or_default();
            let patience = match &holder {
                // Another run in this process.
                _ if holder.starts_with(&name()) => Duration::ZERO,
                _ if holder.contains(&format!(" on {},", hostname())) => PATIENCE,
                _ => PATIENCE_ELSEWHERE,
            };
            let holder = holder.lines().next().unwrap_or("another process");
            let text = format!("work directory {} is in use by {holder}", work_dir.display());
            if start.elapsed() >= patience {
                return Err(Error::checkpoint(
                    Some(work_dir),
                    format!("{text}: wait until that run has ended, or choose another work_dir"),
                ));
            }
            if !std::mem::replace(&mut has_waited, true) {
                warn(&format!("{text}: waiting up to {} s for it to end", patience.as_secs()));
            }
            std::thread::sleep(Duration::from_millis(50));
        }
    }

    /// Locks the directory again if its lock file is no longer the locked one, because file or
    /// directory were removed or moved.
    ///
    /// # Errors
    ///
    /// [`Error::Checkpoint`] if another run has locked the directory since.
    pub(crate) fn renew(&mut self, work_dir: &Path, warn: &mut dyn FnMut(&str)) -> Result<()> {
        let path = work_dir.join(NAME);
        if self.file.as_ref().is_none_or(|file| is_at(file, &path)) {
            return Ok(());
        }
        warn(&format!(
            "the lock file {} was removed or moved: locking the work directory again",
            path.display()
        ));
        // Released first: where files change their numbers, it may be the same lock.
        self.file = None;
        let last = std::mem::take(&mut self.last);
        *self = Self { last, ..Self::acquire(work_dir, warn)? };
        self.sign();
        Ok(())
    }

    /// Writes process and launcher of this run to the file. Errors are ignored: the lock does not
    /// depend on it.
    pub(crate) fn sign(&self) {
        let Some(mut file) = self.file.as_ref() else { return };
        let (since, launcher) = (Zoned::now().strftime("%Y-%m-%d %H:%M:%S"), launcher());
        let text = format!("{} since {since}\n{}\n", name(), launcher.unwrap_or_default());
        let written = file.rewind().and_then(|()| file.set_len(0));
        let _ = written.and_then(|()| file.write_all(text.as_bytes()));
    }

    /// Returns whether the last run in this directory had the same launcher as this one.
    pub(crate) fn is_of_same_launcher(&self) -> bool {
        launcher().is_some_and(|launcher| self.last.lines().nth(1) == Some(&launcher))
    }
}

/// Returns an error if anything but a regular file has the name of the lock file: a link would be
/// followed, and a pipe would block.
fn check_regular(path: &Path) -> Result<()> {
    match path.symlink_metadata() {
        Ok(found) if !found.is_file() => Err(Error::checkpoint(
            Some(path),
            format!(
                "{} is the lock file of a work directory, but not a regular file: remove it",
                path.display()
            ),
        )),
        _ => Ok(()),
    }
}

/// Returns whether the file has this path.
fn is_at(file: &File, path: &Path) -> bool {
    let of = |data: fs::Metadata| (data.dev(), data.ino());
    let found = path.symlink_metadata().map(of);
    file.metadata().map(of).is_ok_and(|own| found.is_ok_and(|found| found == own))
}

/// Identifies the launcher of this rank by the directory of its error files
/// (`DIR/attempt_N/LOCAL_RANK/error.json`), which has a random name with torchrun and with
/// `launch`. The parent process would not do: a script may run between launcher and rank.
fn launcher() -> Option<String> {
    let error_file = std::env::var("TORCHELASTIC_ERROR_FILE").ok()?;
    Some(Path::new(&error_file).ancestors().nth(3)?.display().to_string())
}

/// Description of this process as a holder.
fn name() -> String {
    format!("process {} on {},", std::process::id(), hostname())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn acquire(dir: &Path) -> (Result<WorkDirLock>, Vec<String>) {
        let mut warnings = Vec::new();
        let lock = WorkDirLock::acquire(dir, &mut |text| warnings.push(text.to_owned()));
        (lock, warnings)
    }

    #[test]
    fn lock_error_names_the_holder_until_it_is_dropped() {
        let dir = tempfile::tempdir().unwrap();
        let (first, warnings) = acquire(dir.path());
        let first = first.unwrap();
        assert!(first.file.is_some() && warnings.is_empty(), "{warnings:?}");
        first.sign();
        let said = acquire(dir.path()).0.unwrap_err().to_string();
        assert!(said.contains(&format!(" is in use by {}", name())), "{said}");
        // Another process on this host may be exiting.
        let holder = format!("process 1 on {}, since yesterday\n", hostname());
        fs::write(dir.path().join(NAME), &holder).unwrap();
        std::thread::scope(|scope| {
            scope.spawn(move || {
                std::thread::sleep(Duration::from_millis(200));
                drop(first);
            });
            let (lock, warnings) = acquire(dir.path());
            assert!(lock.unwrap().file.is_some());
            assert!(warnings.len() == 1 && warnings[0].contains(holder.trim()), "{warnings:?}");
        });
    }

    /// Locks with a function in place of `flock`.
    fn acquire_by(
        dir: &Path,
        lock: impl Fn(&File) -> Result<(), TryLockError>,
    ) -> (Result<WorkDirLock>, Vec<String>) {
        let mut warnings = Vec::new();
        let lock = WorkDirLock::acquire_by(lock, dir, &mut |text| warnings.push(text.to_owned()));
        (lock, warnings)
    }

    #[test]
    fn unsupported_locks_are_a_warning() {
        let dir = tempfile::tempdir().unwrap();
        let fail = |_: &File| Err(TryLockError::Error(ErrorKind::Unsupported.into()));
        let (lock, warnings) = acquire_by(dir.path(), fail);
        assert!(lock.unwrap().file.is_none());
        assert!(warnings.len() == 1 && warnings[0].starts_with("cannot lock "), "{warnings:?}");
    }

    #[test]
    fn interrupted_lock_is_tried_again() {
        let dir = tempfile::tempdir().unwrap();
        let calls = std::cell::Cell::new(0);
        let (lock, warnings) = acquire_by(dir.path(), |file| {
            calls.set(calls.get() + 1);
            match calls.get() {
                1 => Err(TryLockError::Error(ErrorKind::Interrupted.into())),
                _ => file.try_lock(),
            }
        });
        assert!(lock.unwrap().file.is_some() && warnings.is_empty(), "{warnings:?}");
    }

    #[test]
    fn lock_file_must_be_a_regular_file() {
        let dir = tempfile::tempdir().unwrap();
        let (path, target) = (dir.path().join(NAME), dir.path().join("notes.txt"));
        fs::write(&target, "kept").unwrap();
        std::os::unix::fs::symlink(&target, &path).unwrap();
        let said = acquire(dir.path()).0.unwrap_err().to_string();
        assert!(said.ends_with("but not a regular file: remove it"), "{said}");
        assert_eq!(fs::read_to_string(&target).unwrap(), "kept");
        fs::remove_file(&path).unwrap();
        assert!(std::process::Command::new("mkfifo").arg(&path).status().unwrap().success());
        let said = acquire(dir.path()).0.unwrap_err().to_string();
        assert!(said.contains(NAME), "{said}");
    }

    #[test]
    fn directory_that_cannot_be_created_is_an_error_without_a_warning() {
        let dir = tempfile::tempdir().unwrap();
        fs::write(dir.path().join("file"), "").unwrap();
        let (lock, warnings) = acquire(&dir.path().join("file/run"));
        let said = lock.unwrap_err().to_string();
        assert!(said.starts_with("cannot create ") && warnings.is_empty(), "{said} {warnings:?}");
    }

    #[test]
    fn lock_is_renewed_unless_another_run_has_it() {
        let dir = tempfile::tempdir().unwrap();
        let renew = |lock: &mut WorkDirLock, warnings: &mut Vec<String>| {
            lock.renew(dir.path(), &mut |text| warnings.push(text.to_owned()))
        };
        let mut first = acquire(dir.path()).0.unwrap();
        let mut warnings = Vec::new();
        renew(&mut first, &mut warnings).unwrap();
        assert!(warnings.is_empty(), "{warnings:?}");
        fs::remove_file(dir.path().join(NAME)).unwrap();
        renew(&mut first, &mut warnings).unwrap();
        assert!(warnings.len() == 1 && warnings[0].contains("locking the work directory again"));
        assert!(acquire(dir.path()).0.is_err());
        fs::rename(dir.path().join(NAME), dir.path().join("moved")).unwrap();
        let second = acquire(dir.path()).0.unwrap();
        second.sign();
        let said = renew(&mut first, &mut warnings).unwrap_err().to_string();
        assert!(said.contains(" is in use by "), "{said}");
    }
}
