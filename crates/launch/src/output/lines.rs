//! Splits output into lines and adds the prefix of the rank.
//!
//! A line ends with `\n`, `\r` (so that progress bars redraw) or `\r\n`. Each line is written in
//! one piece, so lines of different ranks do not mix. An unterminated last line gets a `\n`.

/// Splits a stream into lines and adds the prefix to each.
pub(super) struct Lines {
    prefix: Vec<u8>,
    /// Beginning of a line whose end has not been read yet.
    partial: Vec<u8>,
    /// Whether the last line ended with `\r`; a `\n` right after it belongs to that line.
    after_return: bool,
}

impl Lines {
    pub(super) fn new(prefix: &str) -> Self {
        Self { prefix: prefix.into(), partial: Vec::new(), after_return: false }
    }

    /// Returns the lines that `chunk` completes.
    pub(super) fn push(&mut self, chunk: &[u8]) -> Vec<u8> {
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
    pub(super) fn finish(&mut self) -> Vec<u8> {
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
