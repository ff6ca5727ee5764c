//! `WorkDirLock`: one training run at a time writes to a work directory.
//!
//! It is a lock of the operating system (`flock`) on the file `.runner.lock` there, which ends with its process,
//! however that ends; so a killed run leaves none behind. The file stays, and names the last run that began there and
//! its launcher.

use std::fs::{self, File, TryLockError};
use std::io::Write;
use std::path::Path;
use std::time::{Duration, Instant};

use jiff::Zoned;

use crate::sinks::hostname;
use crate::{Error, Result};

/// Name of the locked file.
const NAME: &str = ".runner.lock";
/// How long a process of this host may hold the lock while it ends.
const PATIENCE: Duration = Duration::from_secs(10);
/// The same for another host, of which the file server has to notice that it is gone: NFS takes 90 s.
const PATIENCE_ELSEWHERE: Duration = Duration::from_secs(120);

/// Holds the lock until it is dropped. It has none where the file system has no locks.
#[derive(Debug)]
pub(crate) struct WorkDirLock {
    file: Option<File>,
    /// What the last holder wrote.
    last: String,
}

impl WorkDirLock {
    /// Creates `work_dir` and locks it. Waits for a holder that may be about to end. Calls `warn` if it waits, or if
    /// there are no locks.
    ///
    /// # Errors
    ///
    /// [`Error::Checkpoint`] that names the holder.
    pub(crate) fn acquire(work_dir: &Path, warn: &mut dyn FnMut(&str)) -> Result<Self> {
        let path = work_dir.join(NAME);
        let open = || {
            fs::create_dir_all(work_dir)?;
            File::options().create(true).truncate(false).read(true).write(true).open(&path)
        };
        let start = Instant::now();
        let mut has_waited = false;
        loop {
            // Opened anew, because the directory may have been removed meanwhile.
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
                        "cannot lock {path}: {why}: start no second run in this work directory"
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
                warn(&format!("{text}: waiting up to {} s for its end", patience.as_secs()));
            }
            std::thread::sleep(Duration::from_millis(50));
        }
    }

    /// Writes into the file who holds it, now that its run begins. The lock is as good without.
    pub(crate) fn sign(&self) {
        let Some(mut file) = self.file.as_ref() else { return };
        let (since, launcher) = (Zoned::now().strftime("%Y-%m-%d %H:%M:%S"), launcher());
        let text = format!("{} since {since}\n{}\n", name(), launcher.unwrap_or_default());
        let _ = file.set_len(0).and_then(|()| file.write_all(text.as_bytes()));
    }

    /// Whether the last run that began here was started by the launcher of this one.
    pub(crate) fn is_of_same_launcher(&self) -> bool {
        launcher().is_some_and(|launcher| self.last.lines().nth(1) == Some(&launcher))
    }
}

/// The launcher that has started this rank, by the directory of its error files (`DIR/attempt_N/LOCAL_RANK/error.json`),
/// whose name is random, in torchrun as here. A script may stand between the two, so the parent process does not tell.
fn launcher() -> Option<String> {
    let error_file = std::env::var("TORCHELASTIC_ERROR_FILE").ok()?;
    Some(Path::new(&error_file).ancestors().nth(3)?.display().to_string())
}

/// This process, as a holder.
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
    fn a_lock_names_its_holder_and_ends_with_it() {
        let dir = tempfile::tempdir().unwrap();
        let (first, warnings) = acquire(dir.path());
        let first = first.unwrap();
        assert!(first.file.is_some() && warnings.is_empty(), "{warnings:?}");
        first.sign();
        let said = acquire(dir.path()).0.unwrap_err().to_string();
        assert!(said.contains(&format!(" is in use by {}", name())), "{said}");
        // Another process of this host may be about to end.
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
    fn a_directory_that_has_no_locks_is_a_warning() {
        let dir = tempfile::tempdir().unwrap();
        // It cannot be opened for writing.
        fs::create_dir(dir.path().join(NAME)).unwrap();
        let (lock, warnings) = acquire(dir.path());
        assert!(lock.unwrap().file.is_none());
        assert!(warnings.len() == 1 && warnings[0].starts_with("cannot lock "), "{warnings:?}");
    }
}
