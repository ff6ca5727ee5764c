//! Processes that tests kill: this test binary runs one of its tests.

use std::os::unix::process::parent_id;
use std::path::{Path, PathBuf};
use std::process::{Child, Command};
use std::time::{Duration, Instant};

/// The name of this variable is a folder in which the process trains.
const FOLDER: &str = "CANDLE_TRAIN_TEST_FOLDER";

/// The folder of [`Process::start`]; `None` if the test was not started by it.
pub(super) fn folder() -> Option<PathBuf> {
    let folder = std::env::var_os(FOLDER)?;
    let parent = parent_id();
    // Without the process that would kill it, this one would train for ever.
    std::thread::spawn(move || {
        while parent_id() == parent {
            std::thread::sleep(Duration::from_secs(1));
        }
        std::process::exit(1);
    });
    Some(folder.into())
}

/// A process that is killed when dropped.
pub(super) struct Process(Child);

impl Process {
    /// Runs the test of this path, in which [`folder`] returns this one.
    pub(super) fn start(test: &str, folder: &Path) -> Self {
        let mut command = Command::new(std::env::current_exe().unwrap());
        Self(command.args(["--exact", test]).env(FOLDER, folder).spawn().unwrap())
    }

    pub(super) fn is_running(&mut self) -> bool {
        self.0.try_wait().unwrap().is_none()
    }

    /// Waits until the file is written or replaced, or the process has ended.
    pub(super) fn wait_for(&mut self, file: &Path) {
        let modified = || std::fs::metadata(file).and_then(|data| data.modified()).ok();
        let (before, start) = (modified(), Instant::now());
        while modified() == before && self.is_running() {
            assert!(start.elapsed() < Duration::from_secs(120), "no {}", file.display());
            std::thread::sleep(Duration::from_millis(1));
        }
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        // It may have ended.
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}
