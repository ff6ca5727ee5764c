//! Log files of the ranks, in torchrun's layout:
//! `DIR/RUN_ID_xxxxxxxx/attempt_N/LOCAL_RANK/{stdout,stderr}.log`, beside `error.json`.
//!
//! Each run creates a new directory, so two runs never share one. Without a log directory the error
//! files are in a temporary directory, which the guard removes.

use std::fs::{DirBuilder, File};
use std::io;
use std::os::unix::fs::DirBuilderExt;
use std::path::{Path, PathBuf};
use std::process::Stdio;

use super::log_file::LogFile;
use crate::address::{host_name, random_number};
use crate::options::{LaunchOptions, Logs};
use crate::{Error, Result};

/// Destination of one stream of one rank.
pub(crate) struct OutputTarget {
    pub(crate) file: Option<LogFile>,
    pub(crate) console: bool,
}

impl OutputTarget {
    /// Returns the standard stream for the rank: a pipe if the output goes to the console,
    /// otherwise the log file itself.
    pub(crate) fn stdio(&self) -> io::Result<Stdio> {
        match (&self.file, self.console) {
            (_, true) => Ok(Stdio::piped()),
            (Some(log), false) => Ok(Stdio::from(log.file.try_clone()?)),
            (None, false) => Ok(Stdio::null()),
        }
    }
}

/// The directory of this run's log and error files.
pub(crate) struct RunDir {
    pub(crate) path: PathBuf,
    /// Whether the directory is removed at the end of the run.
    pub(crate) temporary: bool,
    logs: Logs,
}

impl RunDir {
    /// Checks the options and creates the directory.
    pub(crate) fn new(options: &LaunchOptions) -> Result<Self> {
        let logs = options.logs.clone();
        let ranks = options.nproc_per_node;
        let named = [("--redirects", logs.redirects.last()), ("--tee", logs.tee.last())];
        let named = named.into_iter().filter_map(|(flag, rank)| Some((flag, rank?)));
        let shown = logs.shown.iter().flatten().map(|&rank| ("--local-ranks-filter", rank));
        if let Some((flag, rank)) = named.chain(shown).find(|&(_, rank)| rank >= ranks) {
            let flags = "--redirects, --tee or --local-ranks-filter";
            let text = format!("{flags}: no local rank {rank} (--nproc-per-node is {ranks})");
            return Err(Error::options(flag, text));
        }
        let temporary = logs.dir.is_none() && logs.redirects.is_none() && logs.tee.is_none();
        let random = random_number() as u32;
        let path = match &logs.dir {
            Some(dir) => dir.join(format!("{}_{random:08x}", file_name(&options.run_id))),
            None => {
                let name = format!("launch-{}-{random:08x}", std::process::id());
                std::env::temp_dir().join(name)
            }
        };
        // Absolute, because a rank may change its working directory.
        let path = std::path::absolute(&path).map_err(create_error(&path))?;
        let parent = path.parent().unwrap_or_else(|| Path::new("."));
        let made = std::fs::create_dir_all(parent).and_then(|()| {
            DirBuilder::new().mode(if temporary { 0o700 } else { 0o755 }).create(&path)
        });
        made.map_err(|error| {
            let advice = match &logs.dir {
                Some(_) => "set --log-dir to a directory",
                None => "set TMPDIR to a directory, or use --log-dir",
            };
            let name = path.display();
            Error::io(format!("create {name} ({advice} in which files can be created)"))(error)
        })?;
        Ok(Self { path, temporary, logs })
    }

    fn of_rank(&self, attempt: u32, rank: usize) -> PathBuf {
        self.path.join(format!("attempt_{attempt}/{rank}"))
    }

    pub(crate) fn error_file(&self, attempt: u32, rank: usize) -> PathBuf {
        self.of_rank(attempt, rank).join("error.json")
    }

    /// Returns the targets of standard output and standard error of a local rank.
    pub(crate) fn targets(&self, attempt: u32, rank: usize) -> Result<[OutputTarget; 2]> {
        let shown = self.logs.shown.as_ref().is_none_or(|shown| shown.contains(&rank));
        let run_dir = self.of_rank(attempt, rank);
        // Created here and not by the rank, which may outlive a temporary directory.
        std::fs::create_dir_all(&run_dir).map_err(create_error(&run_dir))?;
        let target = |stream: u8, name: &str| -> Result<OutputTarget> {
            let tee = self.logs.tee.has(rank, stream);
            let redirected = self.logs.redirects.has(rank, stream);
            let path = run_dir.join(name);
            // A rank of an earlier attempt may have made a FIFO of that name, which would block.
            let file = (tee || redirected).then(|| File::create_new(&path)).transpose();
            let file = file.map_err(create_error(&path))?;
            let file = file.map(|file| LogFile { path, file, missing: 0 });
            Ok(OutputTarget { file, console: shown && (tee || !redirected) })
        };
        Ok([target(1, "stdout.log")?, target(2, "stderr.log")?])
    }
}

/// Returns the prefix of a rank's lines on the console.
pub(crate) fn line_prefix(logs: &Logs, role: &str, local: usize, rank: usize) -> String {
    let template = logs.prefix.as_deref().unwrap_or("[rank ${rank}] ");
    template
        .replace("${local_rank}", &local.to_string())
        .replace("${rank}", &rank.to_string())
        .replace("${hostname}", &host_name())
        .replace("${role_name}", role)
}

/// Returns the error for a file or directory that cannot be created.
fn create_error(path: &Path) -> impl FnOnce(io::Error) -> Error {
    Error::io(format!("create {}", path.display()))
}

/// Replaces characters of a run id that are unsuitable for file names.
fn file_name(run_id: &str) -> String {
    let allowed = |c: char| c.is_alphanumeric() || matches!(c, '-' | '_' | '.');
    run_id.chars().map(|c| if allowed(c) { c } else { '_' }).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn prefix_replaces_torchruns_macros() {
        assert_eq!(line_prefix(&Logs::default(), "trainer", 1, 5), "[rank 5] ");
        let prefix = Some("${hostname}:${role_name}${local_rank} ${rank} $x: ".to_owned());
        let logs = Logs { prefix, ..Logs::default() };
        let expected = format!("{}:trainer1 5 $x: ", host_name());
        assert_eq!(line_prefix(&logs, "trainer", 1, 5), expected);
    }

    #[test]
    fn run_id_cannot_leave_the_log_directory() {
        assert_eq!(file_name("../../etc/x y"), ".._.._etc_x_y");
    }
}
