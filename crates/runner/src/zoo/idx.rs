//! The IDX format of the MNIST data sets: a header with the number of bytes, and the bytes.
//!
//! Two zero bytes, the element type (8: unsigned bytes, the only one supported), the number of
//! dimensions, each extent as a big-endian 32-bit number, then the elements in row-major order. The
//! header is checked against the caller's limit before any allocation.

use std::io::Read;

use crate::{Error, Result};

/// An array of bytes.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Idx {
    pub(super) extents: Vec<usize>,
    pub(super) bytes: Vec<u8>,
}

/// Reads an array of `dimensions` dimensions and at most `limit` bytes from `source`, up to its
/// end. `what` names the source in errors.
///
/// # Errors
///
/// [`Error::Data`] for another format or type, or for a truncated, overlong or too large file.
pub(super) fn read(source: &mut dyn Read, what: &str, dimensions: u8, limit: usize) -> Result<Idx> {
    let wrong = |problem: String| Error::data_of(what, problem);
    let mut header = vec![0; 4 + 4 * usize::from(dimensions)];
    source.read_exact(&mut header).map_err(|e| wrong(format!("no IDX header: {e}")))?;
    let (magic, extents) = header.split_at(4);
    let expected = [0, 0, UNSIGNED_BYTE, dimensions];
    if magic != expected {
        return Err(wrong(format!("magic {magic:02x?} instead of {expected:02x?}")));
    }
    let (extents, _) = extents.as_chunks::<4>();
    let extents: Vec<_> = extents.iter().map(|e| u32::from_be_bytes(*e) as usize).collect();
    let count = extents.iter().try_fold(1usize, |count, extent| count.checked_mul(*extent));
    let Some(count) = count.filter(|count| *count <= limit) else {
        return Err(wrong(format!("extents {extents:?} are more than {limit} bytes")));
    };
    let mut bytes = Vec::with_capacity(count);
    // Reads one more byte than announced, to detect an overlong file.
    let mut rest = source.take(count as u64 + 1);
    rest.read_to_end(&mut bytes).map_err(|e| wrong(e.to_string()))?;
    if bytes.len() != count {
        let got = if bytes.len() > count { "more" } else { &bytes.len().to_string() };
        return Err(wrong(format!("extents {extents:?} are {count} bytes, the file has {got}")));
    }
    Ok(Idx { extents, bytes })
}

/// Code of the element type.
const UNSIGNED_BYTE: u8 = 8;

#[cfg(test)]
mod tests {
    use super::*;

    fn file(magic: [u8; 4], extents: &[u32], bytes: &[u8]) -> Vec<u8> {
        let mut file = magic.to_vec();
        extents.iter().for_each(|e| file.extend(e.to_be_bytes()));
        file.extend(bytes);
        file
    }

    fn problem(file: &[u8]) -> String {
        read(&mut &file[..], "f", 2, 100).unwrap_err().to_string()
    }

    #[test]
    fn array_is_read_by_its_header() {
        let file = file([0, 0, 8, 2], &[2, 3], &[1, 2, 3, 4, 5, 6]);
        let idx = read(&mut &file[..], "f", 2, 6).unwrap();
        assert_eq!(idx, Idx { extents: vec![2, 3], bytes: vec![1, 2, 3, 4, 5, 6] });
    }

    #[test]
    fn damaged_files_are_refused() {
        let whole = file([0, 0, 8, 2], &[2, 3], &[0; 6]);
        assert!(problem(&whole[..7]).starts_with("f: no IDX header"));
        assert_eq!(
            problem(&whole[..whole.len() - 1]),
            "f: extents [2, 3] are 6 bytes, the file has 5"
        );
        let overlong = file([0, 0, 8, 2], &[2, 3], &[0; 7]);
        assert_eq!(problem(&overlong), "f: extents [2, 3] are 6 bytes, the file has more");
        let floats = file([0, 0, 13, 2], &[2, 3], &[0; 24]);
        assert_eq!(problem(&floats), "f: magic [00, 00, 0d, 02] instead of [00, 00, 08, 02]");
        let error = read(&mut &floats[..], "f", 2, 100).unwrap_err();
        assert!(matches!(error, Error::Data { what: Some(what), .. } if what == "f"));
        let labels = file([0, 0, 8, 1], &[2], &[0; 12]);
        assert!(problem(&labels).contains("magic"));
    }

    #[test]
    fn extents_above_the_limit_are_refused() {
        let large = file([0, 0, 8, 2], &[2, 51], &[]);
        assert_eq!(problem(&large), "f: extents [2, 51] are more than 100 bytes");
        let overflowing = file([0, 0, 8, 2], &[u32::MAX, u32::MAX], &[]);
        assert!(problem(&overflowing).contains("more than 100 bytes"));
    }
}
