//! `WorkDirLock`: a work directory has at most one training run at a time.
//!
//! The lock is an `flock` on the file `.runner.lock` in the directory. The operating system
//! releases it at the end of the process, so a killed run leaves no lock behind. The file stays,
//! with the process and launcher of the last run.

use std::fs::{self, File, TryLockError};
use std::io::Write;
use std::path::Path;
use std::time::{Duration, Instant};

use jiff::Zoned;

use crate::sinks::hostname;
use crate::{Error, Result};

/// Name of the lock file.
const NAME: &str = ".runner.lock";
/// Time that another process on this host may hold the lock while it exits.
const PATIENCE: Duration = Duration::from_secs(10);
/// The same for a process on another host: the file server must detect that it is gone, which takes
/// NFS 90 s.
const PATIENCE_ELSEWHERE: Duration = Duration::from_secs(120);

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
    /// [`Error::Checkpoint`] naming the holder.
    pub(crate) fn acquire(work_dir: &Path, warn: &mut dyn FnMut(&str)) -> Result<Self> {
        let path = work_dir.join(NAME);
        let open = || {
            fs::create_dir_all(work_dir)?;
            File::options().create(true).truncate(false).read(true).write(true).open(&path)
        };
        let start = Instant::now();
        let mut has_waited = false;
        loop {
            // Opened again in each attempt, because the directory may have been removed meanwhile.
            let locked = open().map_err(TryLockError::Error).and_then(|file| {
                file.try_lock()?;
                Ok(file)
            });
            match locked {
                Ok(file) => {
                    let last = fs::read_to_string(&path).unwrap_or_default();
                    return Ok(Self { file: Some(file), last });
                }
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
                return Err(Error::Checkpoint(format!(
                    "{text}: wait until that run has ended, or choose another work_dir"
                )));
            }
            if !std::mem::replace(&mut has_waited, true) {
                warn(&format!("{text}: waiting up to {} s for it to end", patience.as_secs()));
            }
            std::thread::sleep(Duration::from_millis(50));
        }
    }

    /// Writes process and launcher of this run to the file. Errors are ignored: the lock does not
    /// depend on it.
    pub(crate) fn sign(&self) {
        let Some(mut file) = self.file.as_ref() else { return };
        let (since, launcher) = (Zoned::now().strftime("%Y-%m-%d %H:%M:%S"), launcher());
        let text = format!("{} since {since}\n{}\n", name(), launcher.unwrap_or_default());
        let _ = file.set_len(0).and_then(|()| file.write_all(text.as_bytes()));
    }

    /// Returns whether the last run in this directory had the same launcher as this one.
    pub(crate) fn is_of_same_launcher(&self) -> bool {
        launcher().is_some_and(|launcher| self.last.lines().nth(1) == Some(&launcher))
    }
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

    #[test]
    fn unsupported_locks_are_a_warning() {
        let dir = tempfile::tempdir().unwrap();
        // A directory of this name cannot be opened for writing.
        fs::create_dir(dir.path().join(NAME)).unwrap();
        let (lock, warnings) = acquire(dir.path());
        assert!(lock.unwrap().file.is_none());
        assert!(warnings.len() == 1 && warnings[0].starts_with("cannot lock "), "{warnings:?}");
    }
}
