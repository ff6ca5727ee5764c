//! Event files for TensorBoard: each record is a protocol buffer framed as TFRecord.
//!
//! The few fields needed are encoded by hand, which avoids a protocol buffer library and
//! TensorFlow's schemas. Follows: TensorFlow's `event.proto`, `summary.proto` and the record format
//! in the documentation of `tf.data.TFRecordDataset`.

use std::path::Path;
use std::time::{SystemTime, UNIX_EPOCH};

use crate::Result;
use crate::appender::Appender;

/// An event file, which TensorBoard shows: `tensorboard --logdir DIR`.
///
/// Scalars are buffered until [`flush`](Self::flush), or until there are 64 KiB.
#[derive(Debug)]
pub struct EventFile(Appender);

impl EventFile {
    /// Creates `events.out.tfevents.SECONDS.HOST.PID.0` in the directory `dir`.
    ///
    /// # Errors
    ///
    /// If it cannot be created.
    pub fn create(dir: &Path) -> Result<Self> {
        let (seconds, host, pid) = (now() as u64, hostname(), std::process::id());
        let path = dir.join(format!("events.out.tfevents.{seconds}.{host}.{pid}.0"));
        let mut events = Self(Appender::open(&path)?);
        let mut event = Vec::new();
        double(&mut event, 1, now());
        bytes(&mut event, 3, b"brain.Event:2");
        events.0.push(&[&frame(&event)])?;
        events.flush()?;
        Ok(events)
    }

    /// Appends the scalars of one step: names and values, which are stored as f32.
    ///
    /// # Errors
    ///
    /// If the buffer is full and cannot be written.
    pub fn write(&mut self, values: &[(&str, f64)], step: usize) -> Result<()> {
        let mut summary = Vec::new();
        for (tag, value) in values {
            let mut entry = Vec::new();
            bytes(&mut entry, 1, tag.as_bytes());
            float(&mut entry, 2, *value as f32);
            bytes(&mut summary, 1, &entry);
        }
        let mut event = Vec::new();
        double(&mut event, 1, now());
        event.push(2 << 3);
        varint(&mut event, step as u64);
        bytes(&mut event, 5, &summary);
        self.0.push(&[&frame(&event)])
    }

    /// Writes the buffer.
    ///
    /// # Errors
    ///
    /// If it cannot be written; what it had is lost.
    pub fn flush(&mut self) -> Result<()> {
        self.0.flush()
    }
}

/// Name of this host, as an event file's name has it.
#[must_use]
pub fn hostname() -> String {
    let host = std::fs::read("/proc/sys/kernel/hostname");
    let text = |name: Vec<u8>| String::from_utf8_lossy(&name).trim().to_owned();
    host.map_or_else(|_| "localhost".to_owned(), text)
}

/// Current time in seconds since 1970.
fn now() -> f64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0.0, |t| t.as_secs_f64())
}

/// Frames a record: length, its checksum, data, their checksum.
fn frame(data: &[u8]) -> Vec<u8> {
    let len = (data.len() as u64).to_le_bytes();
    [&len[..], &masked_crc32c(&len), data, &masked_crc32c(data)].concat()
}

/// CRC-32C, rotated so that data which contain checksums can be checked as well.
fn masked_crc32c(data: &[u8]) -> [u8; 4] {
    crc32c(data).rotate_right(15).wrapping_add(0xa282_ead8).to_le_bytes()
}

/// CRC-32C (Castagnoli), bit by bit: it is used for a few hundred bytes every few iterations.
fn crc32c(data: &[u8]) -> u32 {
    let step = |crc: u32, byte: &u8| {
        (0..8).fold(crc ^ u32::from(*byte), |crc, _| (crc >> 1) ^ (0x82f6_3b78 * (crc & 1)))
    };
    !data.iter().fold(!0, step)
}

fn varint(to: &mut Vec<u8>, mut value: u64) {
    while value >= 0x80 {
        to.push(value as u8 | 0x80);
        value >>= 7;
    }
    to.push(value as u8);
}

fn double(to: &mut Vec<u8>, field: u8, value: f64) {
    to.push(field << 3 | 1);
    to.extend(value.to_le_bytes());
}

fn float(to: &mut Vec<u8>, field: u8, value: f32) {
    to.push(field << 3 | 5);
    to.extend(value.to_le_bytes());
}

fn bytes(to: &mut Vec<u8>, field: u8, value: &[u8]) {
    to.push(field << 3 | 2);
    varint(to, value.len() as u64);
    to.extend(value);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn checksums_match_rfc_3720() {
        // RFC 3720, B.4.
        assert_eq!(crc32c(&[0; 32]), 0x8a91_36aa);
        assert_eq!(crc32c(&[0xff; 32]), 0x62a8_ab43);
        assert_eq!(crc32c(b"123456789"), 0xe306_9283);
    }

    /// A file written by TensorBoard's own writer: the frames are equal byte by byte.
    #[test]
    fn frames_match_tensorboard() {
        let recorded = include_bytes!("../tests/vectors/events.out.tfevents");
        let (mut rest, mut count) = (&recorded[..], 0);
        while !rest.is_empty() {
            let len = u64::from_le_bytes(rest[..8].try_into().unwrap()) as usize;
            let (record, after) = rest.split_at(len + 16);
            assert_eq!(frame(&record[12..12 + len]), record, "record {count}");
            (rest, count) = (after, count + 1);
        }
        assert!(count > 10, "{count}");
    }

    #[test]
    fn scalars_are_encoded_as_expected() {
        let dir = tempfile::tempdir().unwrap();
        let mut events = EventFile::create(dir.path()).unwrap();
        events.write(&[("loss", 0.5), ("lr", 0.25)], 300).unwrap();
        events.flush().unwrap();
        let file = std::fs::read_dir(dir.path()).unwrap().next().unwrap().unwrap().path();
        let written = std::fs::read(file).unwrap();
        let first = u64::from_le_bytes(written[..8].try_into().unwrap()) as usize + 16;
        let data = &written[first + 12..written.len() - 4];
        // Nine bytes of time come first, then the step and the summary.
        let expected = b"\x10\xac\x02\x2a\x18\x0a\x0b\x0a\x04loss\x15\x00\x00\x00\x3f\x0a\x09\x0a\x02lr\x15\x00\x00\x80\x3e";
        assert_eq!(&data[9..], expected);
    }
}
