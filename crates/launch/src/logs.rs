//! Log files of the ranks, in torchrun's layout:
//! `DIR/RUN_ID_xxxxxxxx/attempt_N/LOCAL_RANK/{stdout,stderr}.log`, beside `error.json`.
//!
//! Each run creates a new directory, so two runs never share one. Without a log directory the error
//! files are in a temporary directory, which the guard removes.

use std::collections::BTreeMap;
use std::fs::{DirBuilder, File};
use std::io::{self, ErrorKind, Write};
use std::os::unix::fs::DirBuilderExt;
use std::path::{Path, PathBuf};
use std::str::FromStr;

use crate::nodes::address::host_name;
use crate::{Error, LaunchOptions, Result, random_number};

/// Log files and console output of the ranks.
#[derive(Clone, Debug, Default)]
#[non_exhaustive]
pub struct Logs {
    /// Parent of this run's log directory. Default with redirection: the system's temporary
    /// directory.
    pub dir: Option<PathBuf>,
    /// Streams written to a file and not to the console.
    pub redirects: Streams,
    /// Streams written to a file and to the console.
    pub tee: Streams,
    /// Local ranks with console output. Default: all.
    pub shown: Option<Vec<usize>>,
    /// Prefix of each line on the console, in which `${role_name}`, `${local_rank}`, `${rank}` and
    /// `${hostname}` are replaced. Default: `[rank ${rank}] `.
    pub prefix: Option<String>,
}

impl Logs {
    /// Returns the prefix of a rank's lines.
    pub(super) fn prefix(&self, role: &str, local: usize, rank: usize) -> String {
        let template = self.prefix.as_deref().unwrap_or("[rank ${rank}] ");
        template
            .replace("${local_rank}", &local.to_string())
            .replace("${rank}", &rank.to_string())
            .replace("${hostname}", &host_name())
            .replace("${role_name}", role)
    }
}

/// Output streams by rank, in torchrun's notation: `0` none, `1` standard output, `2` standard
/// error, `3` both; either for all ranks, or by local rank (`0:3,1:1`), with none for the others.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Streams(BTreeMap<Option<usize>, u8>);

impl Streams {
    /// Returns whether `stream` (1 or 2) of the local rank is selected.
    fn has(&self, rank: usize, stream: u8) -> bool {
        let streams = self.0.get(&Some(rank)).or_else(|| self.0.get(&None));
        streams.is_some_and(|streams| streams & stream != 0)
    }

    fn is_none(&self) -> bool {
        self.0.values().all(|&streams| streams == 0)
    }

    /// Returns the largest local rank in the list.
    fn last(&self) -> Option<usize> {
        self.0.last_key_value().and_then(|(&rank, _)| rank)
    }
}

impl FromStr for Streams {
    type Err = String;

    fn from_str(text: &str) -> std::result::Result<Self, String> {
        let invalid =
            || format!("`{text}` is not 0, 1, 2 or 3, or a list by local rank such as 0:3,1:1");
        let mut streams = BTreeMap::new();
        for part in text.split(',') {
            let (rank, which) = match part.split_once(':') {
                Some((rank, which)) => (Some(rank.parse().map_err(|_| invalid())?), which),
                None if part == text => (None, text),
                None => return Err(invalid()),
            };
            let which = ["0", "1", "2", "3"].iter().position(|known| *known == which);
            let which = which.ok_or_else(invalid)? as u8;
            if streams.insert(rank, which).is_some() {
                let rank = rank.unwrap_or_default();
                return Err(format!("`{text}` names local rank {rank} twice"));
            }
        }
        Ok(Self(streams))
    }
}

/// Destination of one stream of one rank.
pub(super) struct OutputTarget {
    pub(super) file: Option<LogFile>,
    pub(super) console: bool,
}

/// A rank's log file. If a write fails, for example on a full disk, later output is still tried, so
/// logging resumes once there is space.
pub(super) struct LogFile<F = File> {
    path: PathBuf,
    pub(super) file: F,
    /// Number of bytes lost since the last successful write.
    missing: u64,
}

impl<F: Write> LogFile<F> {
    /// Appends a rank's output. Returns a message when writes start to fail and when they succeed
    /// again; the number of lost bytes is then written to the file, too.
    pub(super) fn append(&mut self, text: &[u8]) -> Option<String> {
        let (path, before) = (self.path.display(), self.missing);
        let mark = match before {
            0 => String::new(),
            _ => format!("\n[launch: {before} bytes are missing here]\n"),
        };
        let mut rest = text;
        let wrote =
            self.file.write_all(mark.as_bytes()).and_then(|()| write(&mut self.file, &mut rest));
        self.missing += rest.len() as u64;
        match wrote {
            Err(error) if before == 0 => Some(format!(
                "{path}: {error}; the rank's output is not logged until writes succeed again"
            )),
            Err(_) => None,
            Ok(()) => {
                self.missing = 0;
                (before > 0).then(|| format!("{path}: logging again; {before} bytes are missing"))
            }
        }
    }

    /// Returns a message at the end of the output if its last bytes are missing in the file.
    pub(super) fn finish(&self) -> Option<String> {
        let Self { path, missing, .. } = self;
        (*missing > 0).then(|| format!("{}: the last {missing} bytes are missing", path.display()))
    }
}

/// `write_all` that leaves the unwritten rest in `text`.
fn write(file: &mut impl Write, text: &mut &[u8]) -> io::Result<()> {
    while !text.is_empty() {
        match file.write(text) {
            Ok(0) => return Err(ErrorKind::WriteZero.into()),
            Ok(len) => *text = &text[len..],
            Err(error) if error.kind() == ErrorKind::Interrupted => {}
            Err(error) => return Err(error),
        }
    }
    Ok(())
}

/// The directory of this run's log and error files.
pub(super) struct RunDir {
    pub(super) path: PathBuf,
    /// Whether the directory is removed at the end of the run.
    pub(super) temporary: bool,
    logs: Logs,
}

impl RunDir {
    /// Checks the options and creates the directory.
    pub(super) fn new(options: &LaunchOptions) -> Result<Self> {
        let logs = options.logs.clone();
        let named = [logs.redirects.last(), logs.tee.last()];
        let shown = logs.shown.iter().flatten().copied();
        let ranks = options.nproc_per_node;
        if let Some(rank) = named.into_iter().flatten().chain(shown).find(|&rank| rank >= ranks) {
            let flags = "--redirects, --tee or --local-ranks-filter";
            let text = format!("{flags}: no local rank {rank} (--nproc-per-node is {ranks})");
            return Err(Error::Options(text));
        }
        let temporary = logs.dir.is_none() && logs.redirects.is_none() && logs.tee.is_none();
        let random = random_number() as u32;
        let path = match &logs.dir {
            Some(dir) => dir.join(format!("{}_{random:08x}", file_name(&options.run_id))),
            None => {
                let name = format!("runner-launch-{}-{random:08x}", std::process::id());
                std::env::temp_dir().join(name)
            }
        };
        // Absolute, because a rank may change its working directory.
        let path = std::path::absolute(&path).map_err(create_error(&path))?;
        let parent = path.parent().unwrap_or_else(|| Path::new("."));
        let made = std::fs::create_dir_all(parent).and_then(|()| {
            DirBuilder::new().mode(if temporary { 0o700 } else { 0o755 }).create(&path)
        });
        made.map_err(create_error(&path))?;
        Ok(Self { path, temporary, logs })
    }

    fn of_rank(&self, attempt: u32, rank: usize) -> PathBuf {
        self.path.join(format!("attempt_{attempt}/{rank}"))
    }

    pub(super) fn error_file(&self, attempt: u32, rank: usize) -> PathBuf {
        self.of_rank(attempt, rank).join("error.json")
    }

    /// Returns the targets of standard output and standard error of a local rank.
    pub(super) fn targets(&self, attempt: u32, rank: usize) -> Result<[OutputTarget; 2]> {
        let shown = self.logs.shown.as_ref().is_none_or(|shown| shown.contains(&rank));
        let run_dir = self.of_rank(attempt, rank);
        // Created here and not by the rank, which may outlive a temporary directory.
        std::fs::create_dir_all(&run_dir).map_err(create_error(&run_dir))?;
        let target = |stream: u8, name: &str| -> Result<OutputTarget> {
            let tee = self.logs.tee.has(rank, stream);
            let redirected = self.logs.redirects.has(rank, stream);
            let path = run_dir.join(name);
            let file = (tee || redirected).then(|| File::create(&path)).transpose();
            let file = file.map_err(create_error(&path))?;
            let file = file.map(|file| LogFile { path, file, missing: 0 });
            Ok(OutputTarget { file, console: shown && (tee || !redirected) })
        };
        Ok([target(1, "stdout.log")?, target(2, "stderr.log")?])
    }
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
    fn streams_parse_torchruns_notation() {
        let streams = |text: &str| text.parse::<Streams>();
        let both = streams("3").unwrap();
        assert!(both.has(0, 1) && both.has(7, 2) && !both.is_none());
        let some = streams("0:3,2:1").unwrap();
        assert!(some.has(0, 1) && some.has(0, 2) && some.has(2, 1));
        assert!(!some.has(2, 2) && !some.has(1, 1));
        assert_eq!(some.last(), Some(2));
        assert!(streams("0").unwrap().is_none() && streams("1:0").unwrap().is_none());
        for wrong in ["", "4", "-1", "both", "0:4", "0:", ":1", "0:1,0:2", "0:1,"] {
            assert!(streams(wrong).is_err(), "{wrong}");
        }
    }

    /// A disk with space for `room` bytes.
    struct Disk {
        text: Vec<u8>,
        room: usize,
    }

    impl Write for Disk {
        fn write(&mut self, text: &[u8]) -> io::Result<usize> {
            let len = text.len().min(self.room);
            if len == 0 {
                return Err(ErrorKind::StorageFull.into());
            }
            self.text.extend_from_slice(&text[..len]);
            self.room -= len;
            Ok(len)
        }

        fn flush(&mut self) -> io::Result<()> {
            Ok(())
        }
    }

    #[test]
    fn log_file_resumes_after_a_full_disk_and_counts_missing_bytes() {
        let disk = Disk { text: Vec::new(), room: 8 };
        let mut log = LogFile { path: "/l/out".into(), file: disk, missing: 0 };
        assert_eq!(log.append(b"first\n"), None);
        let said = log.append(b"second\n").unwrap();
        assert!(said.starts_with("/l/out: no storage space; "), "{said}");
        assert_eq!(log.append(b"third\n"), None);
        assert_eq!(log.finish().unwrap(), "/l/out: the last 11 bytes are missing");
        log.file.room = 1000;
        let said = log.append(b"fourth\n");
        assert_eq!(said.unwrap(), "/l/out: logging again; 11 bytes are missing");
        assert_eq!((log.append(b"fifth\n"), log.finish()), (None, None));
        let want = "first\nse\n[launch: 11 bytes are missing here]\nfourth\nfifth\n";
        assert_eq!(String::from_utf8(log.file.text).unwrap(), want);
    }

    #[test]
    fn prefix_replaces_torchruns_macros() {
        let mut logs = Logs::default();
        assert_eq!(logs.prefix("trainer", 1, 5), "[rank 5] ");
        logs.prefix = Some("${hostname}:${role_name}${local_rank} ${rank} $x: ".to_owned());
        assert_eq!(logs.prefix("trainer", 1, 5), format!("{}:trainer1 5 $x: ", host_name()));
    }

    #[test]
    fn run_id_cannot_leave_the_log_directory() {
        assert_eq!(file_name("../../etc/x y"), ".._.._etc_x_y");
    }
}
