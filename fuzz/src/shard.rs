//! Reads arbitrary bytes as a shard of a stream: as lines, compressed lines, and an archive; and
//! each record of text as JSON.
//!
//! Checks: every record that was read is read again from its own place, and skipping it leads to
//! the same place; records of a file that is not compressed are no larger than the file; numbers of
//! JSON are finite.

use train_data::stream::{Source, TarFiles, TextFiles, parse_json};
use train_data::{ArrayData, Error, Sample};

/// Checks one input.
pub fn check(bytes: &[u8]) {
    let folder = std::env::temp_dir().join(format!("fuzz-shard-{}", std::process::id()));
    std::fs::create_dir_all(&folder).expect("a folder for the shard");
    for name in ["shard.txt", "shard.gz", "shard.tar", "shard.tar.gz"] {
        let path = folder.join(name);
        std::fs::write(&path, bytes).expect("the shard is written");
        let files = [path.to_str().expect("the path is text")];
        let max = if name.ends_with(".gz") { usize::MAX } else { bytes.len() };
        match name.contains(".tar") {
            true => check_source(TarFiles::new(files), max),
            false => check_source(TextFiles::new(files), max),
        }
    }
    std::fs::remove_dir_all(&folder).expect("the folder is removed");
}

/// Reads at most this many records of a shard: compressed ones have millions in a few bytes.
const MOST: usize = 64;

fn check_source(source: Result<impl Source, Error>, max: usize) {
    let source = source.expect("there is one file");
    let Ok(mut records) = source.open(0, 0) else { return };
    let mut place = 0;
    for _ in 0..MOST {
        let Ok(Some(sample)) = records.next() else { return };
        // Its key besides, which is a part of the names.
        assert!(bytes(&sample) <= max.saturating_mul(2), "{} bytes of {max}", bytes(&sample));
        let mut again = source.open(0, place).expect("the place of a record that was read");
        assert_eq!(again.next().expect("it was read before").as_ref(), Some(&sample));
        assert_eq!(again.place(), records.place());
        let mut skipped = source.open(0, place).expect("the place of a record that was read");
        assert!(skipped.skip().expect("it was read before"));
        assert_eq!(skipped.place(), records.place());
        place = records.place();
        check_json(sample);
    }
}

fn check_json(record: Sample) {
    let Ok(fields) = parse_json(record) else { return };
    for (name, array) in fields.iter() {
        if let ArrayData::F32(values) = array.data() {
            assert!(values.iter().all(|value| value.is_finite()), "{name}: {values:?}");
        }
    }
}

fn bytes(sample: &Sample) -> usize {
    sample.iter().map(|(_, array)| array.data().len()).sum()
}
