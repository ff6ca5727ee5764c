//! The directory of a run's log.

use std::io::ErrorKind;
use std::path::{Path, PathBuf};

use jiff::Zoned;

use crate::{Error, Result};

/// Maximum number of other runs that begin in the same second.
const MOST_IN_A_SECOND: usize = 1000;

/// Returns the present local time as directories of runs are named: `20261130_133040`.
#[must_use]
pub fn timestamp() -> String {
    Zoned::now().strftime("%Y%m%d_%H%M%S").to_string()
}

/// Creates the directory of a run, `work_dir/timestamp`, and `vis_data` in it, the same places as
/// MMEngine's. Returns the directory and its name: that of a run which began in the same second as
/// another one ends in `_1`.
///
/// # Errors
///
/// If one cannot be created.
pub fn create_run_dir(work_dir: &Path, timestamp: &str) -> Result<(PathBuf, String)> {
    let error = |path: &Path| {
        let path = path.to_owned();
        move |source| Error::new("create", &path, source)
    };
    std::fs::create_dir_all(work_dir).map_err(error(work_dir))?;
    let mut name = timestamp.to_owned();
    let mut others = 0;
    loop {
        let dir = work_dir.join(&name);
        match std::fs::create_dir(&dir) {
            Err(e) if e.kind() == ErrorKind::AlreadyExists && others < MOST_IN_A_SECOND => {
                others += 1;
                name = format!("{timestamp}_{others}");
            }
            created => {
                created.map_err(error(&dir))?;
                let vis = dir.join("vis_data");
                std::fs::create_dir(&vis).map_err(error(&vis))?;
                return Ok((dir, name));
            }
        }
    }
}
