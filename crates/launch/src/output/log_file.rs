//! A rank's log file.

use std::fs::File;
use std::io::{self, ErrorKind, Write};
use std::path::PathBuf;

/// A rank's log file. If a write fails, for example on a full disk, later output is still tried, so
/// logging resumes once there is space.
pub(crate) struct LogFile<F = File> {
    pub(super) path: PathBuf,
    pub(super) file: F,
    /// Number of bytes lost since the last successful write.
    pub(super) missing: u64,
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

#[cfg(test)]
mod tests {
    use super::*;

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
}
