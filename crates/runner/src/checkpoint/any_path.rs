//! Paths in JSON: as text, or as an array of bytes if a path is not valid UTF-8.

use std::ffi::OsString;
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::path::{Path, PathBuf};

use serde::{Deserialize, Deserializer, Serialize, Serializer};

#[derive(Serialize, Deserialize)]
#[serde(untagged)]
enum Encoded {
    Text(String),
    Bytes(Vec<u8>),
}

fn encoded(path: &Path) -> Encoded {
    match path.to_str() {
        Some(text) => Encoded::Text(text.to_owned()),
        None => Encoded::Bytes(path.as_os_str().as_bytes().to_vec()),
    }
}

fn decoded(encoded: Encoded) -> PathBuf {
    match encoded {
        Encoded::Text(text) => PathBuf::from(text),
        Encoded::Bytes(bytes) => PathBuf::from(OsString::from_vec(bytes)),
    }
}

pub(super) fn serialize<S: Serializer>(path: &Option<PathBuf>, to: S) -> Result<S::Ok, S::Error> {
    path.as_deref().map(encoded).serialize(to)
}

pub(super) fn deserialize<'de, D: Deserializer<'de>>(from: D) -> Result<Option<PathBuf>, D::Error> {
    Ok(Option::<Encoded>::deserialize(from)?.map(decoded))
}

/// The same for lists.
pub(super) mod list {
    use super::{Deserialize, Deserializer, Encoded, PathBuf, Serialize, Serializer};

    pub(in crate::checkpoint) fn serialize<S: Serializer>(
        paths: &[PathBuf],
        to: S,
    ) -> Result<S::Ok, S::Error> {
        paths.iter().map(|path| super::encoded(path)).collect::<Vec<_>>().serialize(to)
    }

    pub(in crate::checkpoint) fn deserialize<'de, D: Deserializer<'de>>(
        from: D,
    ) -> Result<Vec<PathBuf>, D::Error> {
        Ok(Vec::<Encoded>::deserialize(from)?.into_iter().map(super::decoded).collect())
    }
}
