//! `StreamPosition`: position of a rank in a stream, to resume from.

use serde::{Deserialize, Serialize};

use super::StreamOptions;
use super::source::{Shard, Source};
use crate::{Error, Result};

/// Position of a rank in a stream: a few numbers, to be saved with the model.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct StreamPosition {
    /// Start of the window of the next sample.
    pub(super) start: Cursor,
    /// Number of samples taken from that window.
    pub(super) taken: usize,
    pub(super) layout: StreamLayout,
}

impl StreamPosition {
    /// Number of passes completed, which grows with the last record of a pass. Of a stream that
    /// does not repeat it stays 0.
    #[must_use]
    pub const fn pass(&self) -> u64 {
        self.start.pass
    }

    /// Returns the layout, which the stream must share with that of the position.
    #[must_use]
    pub const fn layout(&self) -> StreamLayout {
        self.layout
    }
}

/// Position of the next record to read.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Cursor {
    /// Number of the pass.
    pub(super) pass: u64,
    /// Index of the shard in the rank's order of the pass.
    pub(super) shard: usize,
    /// Position in the shard.
    pub(super) place: u64,
    /// Number of records before it in the pass, including those of other ranks in the same shards.
    pub(super) record: u64,
    /// Number of windows before it in the pass.
    pub(super) window: u64,
}

/// Properties that determine a rank's samples and their order; a position is valid for one layout.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct StreamLayout {
    /// Number of ranks.
    pub world_size: usize,
    /// The rank.
    pub rank: usize,
    /// Number of shards.
    pub shards: usize,
    /// Hash of the names, sizes and checksums of all shards, without their common folder.
    pub fingerprint: u64,
    /// As in [`StreamOptions`].
    pub shuffle_buffer: usize,
    /// As in [`StreamOptions`].
    pub seed: u64,
    /// As in [`StreamOptions`]. A stream that repeats takes a position of one that does not.
    #[serde(default)]
    pub repeat: bool,
}

impl StreamLayout {
    /// Computes the layout and checks the options.
    pub(super) fn new(source: &dyn Source, options: &StreamOptions) -> Result<Self> {
        let StreamOptions { shuffle_buffer, seed, rank, world_size, repeat } = *options;
        let shards = source.shards();
        if rank >= world_size {
            let text = format!("`rank` must be below `world_size`, got {rank} of {world_size}");
            return Err(Error::Options(text));
        }
        if shards.is_empty() {
            return Err(Error::Options("the stream has no shards: name at least one".into()));
        }
        let (shards, fingerprint) = (shards.len(), fingerprint(source));
        Ok(Self { world_size, rank, shards, fingerprint, shuffle_buffer, seed, repeat })
    }

    /// Returns an error for a position of another layout.
    ///
    /// # Errors
    ///
    /// [`Error::Position`] with the first difference, and advice.
    pub fn check(&self, position: &StreamPosition) -> Result<()> {
        let saved = &position.layout;
        let differ = |what: &str, saved: u64, now: u64, help: &str| {
            Err(Error::Position(format!("it has {what} {saved}, the stream {now}: {help}")))
        };
        let as_before = "set it as before, or begin anew";
        if saved.world_size != self.world_size {
            let help = "resume with as many ranks as before, as each goes on in its own shards";
            return differ("ranks", saved.world_size as u64, self.world_size as u64, help);
        }
        for (what, saved, now, help) in [
            ("rank", saved.rank as u64, self.rank as u64, "give each rank its own position"),
            ("shards", saved.shards as u64, self.shards as u64, "list the same files"),
            ("shuffle_buffer", saved.shuffle_buffer as u64, self.shuffle_buffer as u64, as_before),
            ("seed", saved.seed, self.seed, as_before),
        ] {
            if saved != now {
                return differ(what, saved, now, help);
            }
        }
        if saved.fingerprint != self.fingerprint {
            let text = "the names or sizes of the shards are not as before, or their order or content: list the same \
                        files";
            return Err(Error::Position(text.into()));
        }
        if saved.repeat && !self.repeat {
            let text = "it is of a stream that repeats, this one ends after a pass: set `repeat`, or begin anew";
            return Err(Error::Position(text.into()));
        }
        Ok(())
    }
}

/// Hash of the shards: their names without the common folder, sizes and checksums.
fn fingerprint(source: &dyn Source) -> u64 {
    let shards = source.shards();
    let parts = |shard: &Shard| -> Vec<String> {
        shard.name.split(['/', '\\']).map(str::to_owned).collect()
    };
    let names: Vec<_> = shards.iter().map(parts).collect();
    let first = names.first().map(Vec::as_slice).unwrap_or_default();
    let folder = &first[..first.len().saturating_sub(1)];
    let common = |len: usize, name: &Vec<String>| {
        name[..name.len() - 1].iter().zip(&folder[..len]).take_while(|(a, b)| a == b).count()
    };
    let common = names.iter().fold(folder.len(), common);
    let mut state = HASH;
    for (index, (shard, name)) in shards.iter().zip(&names).enumerate() {
        state = hash(state, name[common..].join("/").as_bytes());
        state = hash(state, &[0]);
        state = hash(state, &shard.bytes.to_le_bytes());
        state = hash(state, &source.checksum(index).to_le_bytes());
    }
    state
}

/// Continues an FNV-1a hash, which begins with [`HASH`].
pub(super) fn hash(state: u64, bytes: &[u8]) -> u64 {
    let step = |state: u64, byte: &u8| (state ^ u64::from(*byte)).wrapping_mul(0x100_0000_01b3);
    bytes.iter().fold(state, step)
}

/// FNV-1a hash of no bytes.
pub(super) const HASH: u64 = 0xcbf2_9ce4_8422_2325;

#[cfg(test)]
mod tests {
    use super::*;
    use crate::stream::Stream;
    use crate::stream::tests::loader;
    use crate::{StreamLoader, Workers};

    #[test]
    fn a_position_of_another_layout_is_refused() {
        let options = StreamOptions { world_size: 2, shuffle_buffer: 4, ..Default::default() };
        let lens = [3, 3, 4];
        let saved = loader(&lens, options, 1, 0).position();
        let refused = |lens: &[u64], options| {
            loader(lens, options, 1, 0).resume(saved).map_err(|error| error.to_string())
        };
        refused(&lens, StreamOptions { repeat: true, ..options }).unwrap();
        let endless = loader(&lens, StreamOptions { repeat: true, ..options }, 1, 0).position();
        let error = loader(&lens, options, 1, 0).resume(endless).unwrap_err().to_string();
        assert!(error.contains("it is of a stream that repeats, this one ends"), "{error}");
        for (lens, options, says) in [
            (
                &lens[..],
                StreamOptions { world_size: 3, ..options },
                "it has ranks 2, the stream 3: resume with",
            ),
            (
                &lens,
                StreamOptions { rank: 1, ..options },
                "it has rank 0, the stream 1: give each rank",
            ),
            (
                &lens,
                StreamOptions { seed: 1, ..options },
                "it has seed 0, the stream 1: set it as before",
            ),
            (
                &lens,
                StreamOptions { shuffle_buffer: 5, ..options },
                "it has shuffle_buffer 4, the stream 5",
            ),
            (&lens[1..], options, "it has shards 3, the stream 2: list the same files"),
            (&[3, 4, 3], options, "the names or sizes of the shards are not as before"),
        ] {
            let error = refused(lens, options).unwrap_err();
            assert!(error.starts_with("the loader cannot resume at this position: "), "{error}");
            assert!(error.contains(says), "{error}");
        }
        let mut behind = loader(&lens, options, 1, 0);
        behind.resume(StreamPosition { taken: 5, ..saved }).unwrap();
        assert!(behind.next_batch().unwrap_err().to_string().contains("behind the end"));
    }

    #[test]
    fn a_position_of_other_files_is_refused() {
        let dir = tempfile::tempdir().unwrap();
        let write = |name: &str, content: &[u8]| {
            let path = dir.path().join(name);
            std::fs::create_dir_all(path.parent().unwrap()).unwrap();
            std::fs::write(path, content).unwrap();
        };
        let large = |byte: u8, at: usize| {
            let mut lines = b"0\n".repeat(30_000);
            lines[at] = byte;
            lines
        };
        for folder in ["x", "moved", "changed"] {
            for (name, byte) in [("a", b'1'), ("b", b'2')] {
                write(&format!("{folder}/{name}/0.txt"), &[byte, b'\n'].repeat(20));
                write(&format!("{folder}/{name}/large.txt"), &large(b'0', 0));
            }
        }
        write("changed/a/0.txt", &[b'3', b'\n'].repeat(20));
        let loader = |names: &[&str]| {
            let paths: Vec<_> = names.iter().map(|name| dir.path().join(name)).collect();
            let names = paths.iter().map(|path| path.to_str().unwrap());
            let stream = Stream::text(names, StreamOptions::default()).unwrap();
            StreamLoader::new(stream, 1, Workers::new(0)).unwrap()
        };
        let position = |names: &[&str]| {
            let mut loader = loader(names);
            loader.next_batch().unwrap();
            loader.position()
        };
        let saved = position(&["x/a/0.txt", "x/b/0.txt"]);
        loader(&["moved/a/0.txt", "moved/b/0.txt"]).resume(saved).unwrap();
        let one = position(&["x/a/0.txt"]);
        loader(&["moved/a/0.txt"]).resume(one).unwrap();
        for (saved, names) in [
            (saved, &["x/b/0.txt", "x/a/0.txt"][..]),
            (saved, &["changed/a/0.txt", "changed/b/0.txt"]),
            (saved, &["x/a/0.txt", "moved/b/0.txt"]),
            (one, &["x/b/0.txt"]),
        ] {
            let error = loader(names).resume(saved).unwrap_err().to_string();
            assert!(
                error.contains("the shards are not as before, or their order or content"),
                "{error}"
            );
        }
        // Of a large file three blocks are compared.
        let saved = position(&["x/a/large.txt"]);
        for (at, is_noticed) in [(0, true), (30_000, true), (59_998, true), (10_000, false)] {
            write("changed/a/large.txt", &large(b'1', at));
            assert_eq!(loader(&["changed/a/large.txt"]).resume(saved).is_err(), is_noticed, "{at}");
        }
    }
}
