//! Copies the ranks' output to the console line by line, each with a prefix, and prints the
//! launcher's own messages.
//!
//! A line ends with `\n`, `\r` (so that progress bars redraw) or `\r\n`. Each line is written in
//! one piece, so lines of different ranks do not mix. An unterminated last line gets a `\n`.

use std::fs::File;
use std::io::{self, ErrorKind, Read};
use std::os::fd::OwnedFd;
use std::sync::mpsc::{Sender, channel};
use std::thread::JoinHandle;

use rustix::io::ioctl_fionbio;

use super::logs::LogFile;
use super::{Sink, lock};

/// A thread that writes to the console: a rank's output, or the launcher's messages.
pub(super) struct Copy {
    thread: JoinHandle<()>,
    /// The pipe it reads and the log file it writes.
    log: Option<(File, File)>,
}

impl Copy {
    /// Starts to copy `pipe` to `sink` with the prefix, and to `log` unchanged, until end of file.
    /// Write errors are reported to the second sink.
    pub(super) fn start(
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
    pub(super) fn messages(sink: &Sink) -> io::Result<(Sender<String>, Self)> {
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

    pub(super) fn is_finished(&self) -> bool {
        self.thread.is_finished()
    }

    /// Copies the rest of the pipe to the log file only.
    pub(super) fn finish_file(self) {
        if let Some((pipe, mut file)) = self.log
            && ioctl_fionbio(&pipe, true).is_ok()
        {
            // Ends with an error if a process that left its group still holds the pipe open.
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

/// Splits a stream into lines and adds the prefix to each.
struct Lines {
    prefix: Vec<u8>,
    /// Beginning of a line whose end has not been read yet.
    partial: Vec<u8>,
    /// Whether the last line ended with `\r`; a `\n` right after it belongs to that line.
    after_return: bool,
}

impl Lines {
    fn new(prefix: &str) -> Self {
        Self { prefix: prefix.into(), partial: Vec::new(), after_return: false }
    }

    /// Returns the lines that `chunk` completes.
    fn push(&mut self, chunk: &[u8]) -> Vec<u8> {
        let mut out = Vec::new();
        for piece in chunk.split_inclusive(|byte| matches!(byte, b'\n' | b'\r')) {
            if self.after_return && piece == b"\n" {
                out.push(b'\n');
                self.after_return = false;
                continue;
            }
            self.partial.extend_from_slice(piece);
            self.after_return = piece.ends_with(b"\r");
            if self.after_return || piece.ends_with(b"\n") {
                self.end_line(&mut out);
            } else if self.partial.len() >= LONGEST_LINE {
                self.partial.push(b'\n');
                self.end_line(&mut out);
            }
        }
        out
    }

    /// Returns the last line if it is unterminated.
    fn finish(&mut self) -> Vec<u8> {
        let mut out = Vec::new();
        if !self.partial.is_empty() {
            self.partial.push(b'\n');
            self.end_line(&mut out);
        } else if self.after_return {
            // Later output does not overwrite the last state of a progress bar.
            out.push(b'\n');
        }
        out
    }

    fn end_line(&mut self, out: &mut Vec<u8>) {
        out.extend_from_slice(&self.prefix);
        out.append(&mut self.partial);
    }
}

/// Maximum capacity of a pipe in bytes.
const LARGEST_PIPE: u64 = 1 << 20;
/// Maximum length of a line in bytes; longer lines are split.
const LONGEST_LINE: usize = 1 << 16;

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn whole(pieces: &[&[u8]]) -> String {
        let mut lines = Lines::new("[rank 3] ");
        let mut out: Vec<u8> = pieces.iter().flat_map(|piece| lines.push(piece)).collect();
        out.extend(lines.finish());
        String::from_utf8(out).unwrap()
    }

    #[test]
    fn every_line_gets_the_prefix() {
        assert_eq!(whole(&[b"a\nb\n\nc"]), "[rank 3] a\n[rank 3] b\n[rank 3] \n[rank 3] c\n");
        assert_eq!(whole(&[b"10%\r20%\r", b"\rdone\r\n"]), {
            "[rank 3] 10%\r[rank 3] 20%\r[rank 3] \r[rank 3] done\r\n"
        });
        assert_eq!(whole(&[b"10%\r"]), "[rank 3] 10%\r\n");
        assert_eq!(whole(&[]), "");
    }

    proptest! {
        #[test]
        fn lines_do_not_depend_on_chunk_boundaries(text in "[ab\r\n]{0,40}", cut in 0..40_usize) {
            let cut = cut.min(text.len());
            let (left, right) = text.as_bytes().split_at(cut);
            prop_assert_eq!(whole(&[left, right]), whole(&[text.as_bytes()]));
        }
    }
}
