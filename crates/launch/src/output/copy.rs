//! Threads that write to the console.

use std::fs::File;
use std::io::{self, ErrorKind, Read};
use std::os::fd::OwnedFd;
use std::sync::mpsc::{Sender, channel};
use std::thread::JoinHandle;

use rustix::io::ioctl_fionbio;

use super::lines::Lines;
use super::log_file::LogFile;
use super::{Sink, lock};

/// A thread that writes to the console: a rank's output, or the launcher's messages.
pub(crate) struct CopyThread {
    thread: JoinHandle<()>,
    /// The pipe it reads and the log file it writes.
    log: Option<(File, File)>,
}

impl CopyThread {
    /// Starts to copy `pipe` to `sink` with the prefix, and to `log` unchanged, until end of file.
    /// Write errors are reported to the second sink.
    pub(crate) fn start(
        (rank, prefix): (usize, &str),
        pipe: OwnedFd,
        mut log: Option<LogFile>,
        (sink, reports): (&Sink, &Sink),
    ) -> io::Result<Self> {
        let (mut from, sink, reports) = (File::from(pipe), Sink::clone(sink), Sink::clone(reports));
        let (pipe, file) =
            (from.try_clone()?, log.as_ref().map(|log| log.file.try_clone()).transpose()?);
        let mut lines = Lines::new(prefix);
        let report = move |text: String| {
            // An error of this write cannot be reported anywhere.
            let _ = write(&reports, format!("launch: rank {rank}: {text}\n").as_bytes());
        };
        let thread = std::thread::Builder::new().name(format!("launch-output-{rank}"));
        let thread = thread.spawn(move || {
            let (mut chunk, mut reported) = ([0; 8192], false);
            let mut show = |text: &[u8]| match write(&sink, text) {
                // Without a reader the rank continues, and its pipe is still drained.
                Err(error) if error.kind() != ErrorKind::BrokenPipe && !reported => {
                    reported = true;
                    report(format!("cannot write its output to the console: {error}"));
                }
                _ => {}
            };
            loop {
                let read = match from.read(&mut chunk) {
                    Ok(0) => break,
                    Ok(len) => &chunk[..len],
                    Err(error) if error.kind() == ErrorKind::Interrupted => continue,
                    Err(_) => break,
                };
                // If the disk is full, the rank is not blocked and its console output continues.
                log.as_mut().and_then(|log| log.append(read)).into_iter().for_each(&report);
                show(&lines.push(read));
            }
            show(&lines.finish());
            log.and_then(|log| log.finish()).into_iter().for_each(&report);
        })?;
        Ok(Self { thread, log: file.map(|file| (pipe, file)) })
    }

    /// Starts to write messages to `sink`, until their sender is dropped. Senders never wait for a
    /// slow console.
    pub(crate) fn messages(sink: &Sink) -> io::Result<(Sender<String>, Self)> {
        let ((sender, messages), sink) = (channel::<String>(), Sink::clone(sink));
        let thread = std::thread::Builder::new().name("launch-messages".to_owned());
        let thread = thread.spawn(move || {
            for text in messages {
                // An error of this write cannot be reported anywhere.
                let _ = write(&sink, text.as_bytes());
            }
        })?;
        Ok((sender, Self { thread, log: None }))
    }

    pub(crate) fn is_finished(&self) -> bool {
        self.thread.is_finished()
    }

    /// Copies the rest of the pipe to the log file only.
    pub(crate) fn finish_file(self) {
        if let Some((pipe, mut file)) = self.log
            && ioctl_fionbio(&pipe, true).is_ok()
        {
            // Ends with an error if a process that is not of the job holds the pipe open.
            let _ = io::copy(&mut pipe.take(LARGEST_PIPE), &mut file);
        }
    }
}

/// Writes to the console and flushes.
fn write(sink: &Sink, text: &[u8]) -> io::Result<()> {
    if text.is_empty() {
        return Ok(());
    }
    let mut sink = lock(sink);
    sink.write_all(text).and_then(|()| sink.flush())
}

/// Maximum capacity of a pipe in bytes.
const LARGEST_PIPE: u64 = 1 << 20;
