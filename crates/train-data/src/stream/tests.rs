//! Tests that compare streams with a reference that lists all samples: the samples, their ranks and
//! their order, from every position.

use std::path::Path;
use std::sync::atomic::{AtomicUsize, Ordering};

use proptest::prelude::*;
use rand_chacha::rand_core::Rng;

use super::*;
use crate::{Array, ArrayData, Batch, StreamLoader, Workers};

/// Shards of numbered records, `lens[shard]` of them. A place is a record's index.
struct Numbers {
    lens: Vec<u64>,
    shards: Vec<Shard>,
}

impl Numbers {
    fn new(lens: &[u64]) -> Self {
        let shard = |(k, len)| Shard { name: format!("folder/shard {k}"), bytes: len };
        let shards = lens.iter().copied().enumerate().map(shard).collect();
        Self { lens: lens.to_vec(), shards }
    }
}

impl Source for Numbers {
    fn shards(&self) -> &[Shard] {
        &self.shards
    }

    fn open(&self, shard: usize, place: u64) -> Result<Box<dyn Records>, BoxError> {
        assert!(place <= self.lens[shard], "{place}");
        Ok(Box::new(Range { shard, next: place, len: self.lens[shard] }))
    }

    fn unit(&self) -> &'static str {
        "record"
    }
}

struct Range {
    shard: usize,
    next: u64,
    len: u64,
}

impl Records for Range {
    fn next(&mut self) -> Result<Option<Sample>, BoxError> {
        if self.next == self.len {
            return Ok(None);
        }
        let id = (self.shard as u64 * 1000 + self.next).cast_signed();
        self.next += 1;
        Ok(Some(Sample::new().with("id", Array::scalar(id))))
    }

    fn place(&self) -> u64 {
        self.next
    }
}

fn ids(batch: &Batch) -> Vec<i64> {
    match batch.get("id").unwrap().data() {
        ArrayData::I64(ids) => ids.clone(),
        other => panic!("{other:?}"),
    }
}

pub(super) fn loader(
    lens: &[u64],
    options: StreamOptions,
    batch_size: usize,
    workers: usize,
) -> StreamLoader {
    loader_of(Stream::new(Numbers::new(lens), options).unwrap(), batch_size, workers)
}

fn loader_of(stream: Stream, batch_size: usize, workers: usize) -> StreamLoader {
    let stream = stream.map(|sample, random| {
        let number = random.next_u64().cast_signed();
        Ok(sample.with("random", Array::scalar(number)))
    });
    StreamLoader::new(stream, batch_size, Workers::new(workers)).unwrap()
}

/// The records of [`Numbers`] in files: as lines, compressed lines, or archives.
fn files(dir: &Path, kind: &str, lens: &[u64], options: StreamOptions) -> Stream {
    for (shard, len) in lens.iter().enumerate() {
        let ids = (0..*len).map(|k| format!("{}", shard as u64 * 1000 + k));
        let bytes: Vec<u8> = match kind {
            "tar" => ids
                .flat_map(|id| tar::tests::file(&format!("{id}.id"), b'0', id.as_bytes()))
                .chain(tar::tests::END)
                .collect(),
            _ => ids.flat_map(|id| (id + "\n").into_bytes()).collect(),
        };
        let bytes = if kind == "gz" { text::tests::gz(&bytes) } else { bytes };
        std::fs::write(dir.join(format!("{shard}.{kind}")), bytes).unwrap();
    }
    let pattern = dir.join(format!("*.{kind}"));
    let pattern = [pattern.to_str().unwrap()];
    if kind == "tar" {
        let stream = Stream::tar(pattern, options).unwrap();
        return stream.map(|sample, _| select(sample, &[("id", "id")]));
    }
    Stream::text(pattern, options).unwrap().map(|mut sample, _| {
        let ArrayData::U8(bytes) = sample.take("text")?.into_data() else {
            return Err("no bytes".into());
        };
        Ok(Sample::new().with("id", Array::scalar(String::from_utf8(bytes)?.parse::<i64>()?)))
    })
}

/// The next `count` batches, each with the position before it.
fn batches(loader: &mut StreamLoader, count: usize) -> Vec<(StreamPosition, Batch)> {
    let mut all = Vec::new();
    while all.len() < count {
        let position = loader.position();
        let Some(batch) = loader.next_batch().unwrap() else { break };
        all.push((position, batch));
    }
    all
}

/// Numbers of records of shards, some of them empty, and options; `rank` is 0.
fn streams() -> impl Strategy<Value = (Vec<u64>, StreamOptions)> {
    let lens = prop::collection::vec(prop_oneof![Just(0_u64), 1..9_u64], 1..7);
    let options = (0..12_usize, 1..6_usize, any::<bool>(), 0..3_u64);
    (lens, options).prop_map(|(lens, (shuffle_buffer, world_size, repeat, seed))| {
        (lens, StreamOptions { shuffle_buffer, seed, rank: 0, world_size, repeat })
    })
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(128))]

    #[test]
    fn a_pass_of_all_ranks_is_each_record_once((lens, options) in streams()) {
        let options = StreamOptions { repeat: false, ..options };
        let ranks = |pass: u64| -> Vec<Vec<i64>> {
            (0..options.world_size).map(|rank| {
                let mut loader = loader(&lens, StreamOptions { rank, ..options }, 1, 0);
                let start = position::Cursor { pass, ..Default::default() };
                loader.resume(StreamPosition { start, ..loader.position() }).unwrap();
                batches(&mut loader, usize::MAX).iter().flat_map(|(_, batch)| ids(batch)).collect()
            }).collect()
        };
        let all = |ranks: &[Vec<i64>]| {
            let mut all = ranks.concat();
            all.sort_unstable();
            all
        };
        let records = lens.iter().zip(0_i64..).flat_map(|(len, shard)| {
            (0..len.cast_signed()).map(move |k| shard * 1000 + k)
        });
        let records: Vec<_> = records.collect();
        for pass in 0..3 {
            prop_assert_eq!(&all(&ranks(pass)), &records);
        }
        if options.world_size == 1 && options.shuffle_buffer == 0 {
            prop_assert_eq!(&ranks(1)[0], &records);
        }
        // Ranks that share shards differ by one record at most.
        if lens.len() < options.world_size {
            let lens: Vec<_> = ranks(0).iter().map(Vec::len).collect();
            prop_assert!(lens.iter().max().unwrap() - lens.iter().min().unwrap() <= 1);
        }
    }

    #[test]
    fn a_stream_goes_on_at_every_position(
        (lens, options) in streams(),
        rank in 0..6_usize,
        batch_size in 1..4_usize,
        workers in prop::sample::select(vec![0, 0, 0, 2]),
        kind in prop::sample::select(vec!["numbers", "numbers", "txt", "gz", "tar"]),
    ) {
        let dir = tempfile::tempdir().unwrap();
        let options = StreamOptions { rank: rank % options.world_size, ..options };
        let records: u64 = lens.iter().sum();
        // Of some shards a rank never has a record.
        let has_records = match (lens.len() < options.world_size, options.shuffle_buffer) {
            (true, _) => records > options.rank as u64,
            (false, 0) => !lens.contains(&0),
            (false, _) => records > 0,
        };
        let is_endless = options.repeat && has_records;
        let options = StreamOptions { repeat: is_endless, ..options };
        let loader = || match kind {
            "numbers" => loader(&lens, options, batch_size, workers),
            _ => loader_of(files(dir.path(), kind, &lens, options), batch_size, workers),
        };
        // Two or three passes.
        let count = 1 + 3 * usize::try_from(records).unwrap() / batch_size;
        let whole = batches(&mut loader(), count);
        prop_assert_eq!(is_endless, whole.len() == count);
        for (k, (position, _)) in whole.iter().enumerate() {
            let mut resumed = loader();
            // As it comes back from a checkpoint.
            let position = serde_json::to_string(position).unwrap();
            resumed.resume(serde_json::from_str(&position).unwrap()).unwrap();
            let rest = batches(&mut resumed, whole.len() - k);
            prop_assert!(rest.iter().map(|r| &r.1).eq(whole[k..].iter().map(|r| &r.1)), "{}", k);
            if !is_endless {
                prop_assert!(resumed.next_batch().unwrap().is_none());
            }
        }
    }
}

#[test]
fn order_and_random_numbers_do_not_change_between_versions() {
    let options = StreamOptions { shuffle_buffer: 4, seed: 7, repeat: true, ..Default::default() };
    let first = batches(&mut loader(&[3, 0, 4], options, 14, 0), 1).remove(0).1;
    assert_eq!(ids(&first), [0, 1, 2000, 2, 2002, 2003, 2001, 1, 0, 2000, 2, 2003, 2002, 2001_i64]);
    let ArrayData::I64(random) = first.get("random").unwrap().data() else { panic!("{first:?}") };
    assert_eq!(random[..2], [-4351420130647557517, 4688491599005477223]);
}

#[test]
fn a_pass_is_complete_with_its_last_record() {
    for (shuffle_buffer, workers) in [(0, 0), (1, 0), (7, 0), (8, 0), (7, 2)] {
        let options = StreamOptions { shuffle_buffer, repeat: true, ..Default::default() };
        let mut endless = loader(&[8, 0, 16, 0], options, 1, workers);
        let mut records = 0;
        while endless.position().pass() < 2 {
            assert_eq!(endless.position().pass(), records / 24);
            endless.next_batch().unwrap().unwrap();
            records += 1;
        }
        assert_eq!(records, 48);
        let options = StreamOptions { repeat: false, ..options };
        let mut once = loader(&[8, 0, 16, 0], options, 1, workers);
        assert_eq!(batches(&mut once, 99).len(), 24);
        assert_eq!(once.position().pass(), 0);
    }
}

/// Writes a shard of a kind with records of about ten bytes.
fn shard_of(kind: &str, count: usize) -> Vec<u8> {
    // Without a compressible pattern.
    let number = |k: usize| (k as u64).wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 40;
    let ids = (0..count).map(|k| format!("1{:08}", number(k)));
    match kind {
        "tar" => ids
            .flat_map(|id| tar::tests::file(&format!("{id}.id"), b'0', b"7"))
            .chain(tar::tests::END)
            .collect(),
        "jsonl" => ids.flat_map(|id| format!("{{\"id\": {}}}\n", id).into_bytes()).collect(),
        _ => ids.flat_map(|id| format!("{}\n", id).into_bytes()).collect(),
    }
}

/// Reads until an error, and returns it; the end would be a loss without a word.
fn error_of(loader: &mut StreamLoader) -> String {
    for _ in 0..200_000 {
        match loader.next_batch() {
            Ok(Some(_)) => {}
            Ok(None) => panic!("the end"),
            Err(error) => return error.to_string(),
        }
    }
    panic!("no error");
}

#[test]
fn a_shard_that_changes_is_an_error() {
    let dir = tempfile::tempdir().unwrap();
    let now = std::time::SystemTime::now();
    let write = |path: &Path, content: &[u8], age: u64| {
        std::fs::write(path, content).unwrap();
        let file = std::fs::File::options().write(true).open(path).unwrap();
        file.set_modified(now - std::time::Duration::from_secs(age)).unwrap();
    };
    for kind in ["txt", "gz", "jsonl", "tar", "tgz"] {
        let compressed = |count| {
            let bytes = shard_of(if kind == "tgz" { "tar" } else { kind }, count);
            if ["gz", "tgz"].contains(&kind) { text::tests::gz(&bytes) } else { bytes }
        };
        let path = dir.path().join(format!("a.{kind}"));
        let pattern = [path.to_str().unwrap()];
        // Larger than all buffers, and smaller.
        for count in [if ["tar", "tgz"].contains(&kind) { 500 } else { 20_000 }, 10] {
            let whole = compressed(count);
            let half = &whole[..whole.len() / 2 / 512 * 512];
            let grown = [&whole[..], &compressed(1)].concat();
            for (changed, age, repeat, after) in [
                (half, 9, false, 1),
                (&grown, 9, false, 1),
                (&whole, 8, false, 1),
                (half, 9, true, count),
                (&grown, 9, true, count),
                (&whole, 8, true, count),
                (b"", 9, false, 0),
            ] {
                write(&path, &whole, 9);
                let options = StreamOptions { repeat, ..Default::default() };
                let stream = match kind {
                    "tar" | "tgz" => Stream::tar(pattern, options),
                    "jsonl" => Stream::json(pattern, options),
                    _ => Stream::text(pattern, options),
                };
                let mut loader = StreamLoader::new(stream.unwrap(), 1, Workers::new(0)).unwrap();
                loader = loader.collate(|_| Ok(Batch::new()));
                (0..after).for_each(|_| drop(loader.next_batch().unwrap().unwrap()));
                write(&path, changed, age);
                let error = error_of(&mut loader);
                let named = format!("{}, record at byte ", path.display());
                let says = if age == 8 { "was written to" } else { "it had " };
                let is_named = error.starts_with(&named) && error.contains(says);
                assert!(
                    is_named && error.contains("the file has changed"),
                    "{kind} {age}: {error}"
                );
            }
        }
        let stream = Stream::text(pattern, StreamOptions { repeat: true, ..Default::default() });
        let stream = if kind == "txt" { stream.unwrap() } else { continue };
        let mut loader = StreamLoader::new(stream, 1, Workers::new(0)).unwrap();
        std::fs::remove_file(&path).unwrap();
        let error = error_of(&mut loader);
        assert!(error.contains("a.txt, record at byte 0: No such file"), "{error}");
    }
}

#[cfg(feature = "parquet")]
#[test]
fn a_parquet_file_that_changes_is_an_error() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("a.parquet");
    let whole = include_bytes!("../../tests/vectors/zstd.parquet");
    let other = include_bytes!("../../tests/vectors/gzip.parquet");
    for repeat in [false, true] {
        for changed in [&whole[..whole.len() / 2], other, b""] {
            std::fs::write(&path, whole).unwrap();
            let options = StreamOptions { repeat, ..Default::default() };
            let stream = Stream::parquet([path.to_str().unwrap()], options).unwrap();
            let mut loader = StreamLoader::new(stream, 1, Workers::new(0)).unwrap();
            loader.next_batch().unwrap().unwrap();
            std::fs::write(&path, changed).unwrap();
            let error = error_of(&mut loader);
            assert!(error.contains("a.parquet, record at row "), "{error}");
            assert!(error.contains("the file has changed: it had "), "{error}");
        }
    }
}

#[test]
fn a_rank_without_records_is_an_error_if_the_stream_repeats() {
    for lens in [&[0, 0][..], &[0], &[1]] {
        let options = StreamOptions { rank: 1, world_size: 2, repeat: true, ..Default::default() };
        let error = loader(lens, options, 1, 0).next_batch().unwrap_err().to_string();
        assert!(error.starts_with("rank 1 of 2 finds no record in 1000 passes"), "{error}");
        let once = StreamOptions { repeat: false, ..options };
        assert_eq!(loader(lens, once, 1, 0).next_batch().unwrap(), None);
    }
    let wrong = |lens: &[u64], rank| {
        let options = StreamOptions { rank, ..Default::default() };
        Stream::new(Numbers::new(lens), options).unwrap_err().to_string()
    };
    assert!(wrong(&[], 0).contains("no shards"));
    assert!(wrong(&[1], 1).contains("`rank` must be below `world_size`, got 1 of 1"));
}

#[test]
fn a_sample_that_fails_is_named_and_a_broken_record_keeps_the_position() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("a.txt");
    std::fs::write(&path, b"1\n22\n333\n\xff\n").unwrap();
    let pattern = path.to_str().unwrap();
    let stream = |shuffle_buffer| {
        Stream::text([pattern], StreamOptions { shuffle_buffer, ..Default::default() }).unwrap()
    };
    for workers in [0, 2] {
        let loader = |stream, size| StreamLoader::new(stream, size, Workers::new(workers)).unwrap();
        let picky = stream(0).map(|sample, _| match sample.get("text")?.shape() {
            [2] => Err("two letters".into()),
            _ => Ok(sample),
        });
        let mut picky = loader(picky, 1);
        picky.next_batch().unwrap().unwrap();
        let error = picky.next_batch().unwrap_err().to_string();
        assert_eq!(error, format!("{pattern}, record at byte 2: two letters"));
        // Lines of different lengths do not stack.
        let error = loader(stream(0), 2).next_batch().unwrap_err().to_string();
        assert!(error.starts_with(&format!("{pattern}, record at byte 2: sample 1 of")), "{error}");
        let mut broken = loader(stream(0), 1);
        (0..3).for_each(|_| drop(broken.next_batch().unwrap().unwrap()));
        let before = broken.position();
        let error = broken.next_batch().unwrap_err().to_string();
        assert!(
            error.starts_with(&format!("{pattern}, record at byte 9: the line is not text")),
            "{error}"
        );
        assert_eq!(broken.position(), before);
        assert_eq!(broken.next_batch().unwrap(), None);
    }
    let none = StreamLoader::new(stream(0), 0, Workers::new(0)).unwrap_err().to_string();
    assert!(none.contains("batch_size"), "{none}");
}

#[test]
fn a_panic_names_the_record() {
    for workers in [0, 2] {
        let stream = || Stream::new(Numbers::new(&[3]), StreamOptions::default()).unwrap();
        let mapped = stream().map(|sample, _| {
            assert_ne!(sample.get("id")?.data(), &ArrayData::I64(vec![1]), "no ones");
            Ok(sample)
        });
        let mut mapped = StreamLoader::new(mapped, 1, Workers::new(workers)).unwrap();
        mapped.next_batch().unwrap().unwrap();
        let error = mapped.next_batch().unwrap_err().to_string();
        assert!(error.starts_with("folder/shard 0, record at record 1: panicked: "), "{error}");
        assert!(mapped.next_batch().unwrap().is_some());
        let collated = StreamLoader::new(stream(), 2, Workers::new(workers)).unwrap();
        let error = collated.collate(|_| panic!("no batch")).next_batch().unwrap_err().to_string();
        assert_eq!(error, "folder/shard 0, record at record 0: panicked: no batch");
    }
}

/// Shards that panic when they are opened.
struct Panicking(Numbers);

impl Source for Panicking {
    fn shards(&self) -> &[Shard] {
        self.0.shards()
    }

    fn open(&self, _: usize, _: u64) -> Result<Box<dyn Records>, BoxError> {
        panic!("no shard")
    }
}

#[test]
fn to_resume_workers_read() {
    let options = StreamOptions { shuffle_buffer: 3, ..Default::default() };
    let mut whole = loader(&[9], options, 1, 0);
    whole.next_batch().unwrap();
    for workers in [0, 1] {
        let stream = Stream::new(Panicking(Numbers::new(&[9])), options).unwrap();
        let mut broken = StreamLoader::new(stream, 1, Workers::new(workers)).unwrap();
        broken.resume(whole.position()).unwrap();
        let error = broken.next_batch().unwrap_err().to_string();
        assert_eq!(error, "the stream: panicked: no shard");
        assert_eq!(broken.position(), whole.position());
    }
}

#[test]
fn blank_lines_of_json_are_no_records() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("a.jsonl");
    std::fs::write(&path, "\n{\"id\": 0}\r\n \r\n{\"id\": 1}\n{\"id\": 2}\n\n\n").unwrap();
    for world_size in 1..4 {
        let mut taken: Vec<_> = (0..world_size)
            .flat_map(|rank| {
                let options = StreamOptions { rank, world_size, ..Default::default() };
                let stream = Stream::json([path.to_str().unwrap()], options).unwrap();
                let mut loader = StreamLoader::new(stream, 1, Workers::new(0)).unwrap();
                let all = batches(&mut loader, 9);
                all.into_iter().flat_map(|(_, batch)| ids(&batch)).collect::<Vec<_>>()
            })
            .collect();
        taken.sort_unstable();
        assert_eq!(taken, [0, 1, 2]);
    }
}

#[test]
fn a_collate_function_and_drop_last_make_the_batches() {
    let len = |loader: StreamLoader| {
        let mut loader = loader.collate(|samples| {
            Ok(Batch::new().with("count", Array::new([1], vec![samples.len() as i64])?))
        });
        let count = |(_, batch): (_, Batch)| batch.get("count").unwrap().data().clone();
        batches(&mut loader, 9).into_iter().map(count).collect::<Vec<_>>()
    };
    let [three, one] = [3, 1].map(|count| ArrayData::I64(vec![count]));
    let options = StreamOptions::default();
    assert_eq!(len(loader(&[2, 2], options, 3, 0)), [three.clone(), one]);
    assert_eq!(len(loader(&[2, 2], options, 3, 0).drop_last()), [three]);
}

/// Counts the records that are read.
struct Counting(Numbers, Arc<AtomicUsize>);

struct Counted(Box<dyn Records>, Arc<AtomicUsize>);

impl Source for Counting {
    fn shards(&self) -> &[Shard] {
        self.0.shards()
    }

    fn open(&self, shard: usize, place: u64) -> Result<Box<dyn Records>, BoxError> {
        Ok(Box::new(Counted(self.0.open(shard, place)?, Arc::clone(&self.1))))
    }
}

impl Records for Counted {
    fn next(&mut self) -> Result<Option<Sample>, BoxError> {
        // Nothing else is told by it.
        self.1.fetch_add(1, Ordering::Relaxed);
        self.0.next()
    }

    fn place(&self) -> u64 {
        self.0.place()
    }
}

#[test]
fn dropping_a_loader_ends_the_reading_of_its_window() {
    let read = Arc::new(AtomicUsize::new(0));
    let source = Counting(Numbers::new(&[1 << 40]), Arc::clone(&read));
    let options = StreamOptions { shuffle_buffer: usize::MAX, ..Default::default() };
    let stream = Stream::new(source, options).unwrap();
    let workers = Workers::new(1).timeout(std::time::Duration::from_millis(1));
    let mut endless = StreamLoader::new(stream, 1, workers).unwrap();
    assert!(endless.next_batch().is_err());
    // It waits for the threads, at most five seconds.
    drop(endless);
    assert_eq!(Arc::strong_count(&read), 1, "the threads have ended");
}

#[test]
fn at_most_a_window_and_the_prefetched_batches_are_read_ahead() {
    let options = StreamOptions { shuffle_buffer: 10, repeat: true, ..Default::default() };
    for workers in [0, 2] {
        let read = Arc::new(AtomicUsize::new(0));
        let source = Counting(Numbers::new(&[500, 500]), Arc::clone(&read));
        let stream = Stream::new(source, options).unwrap();
        let mut loader = StreamLoader::new(stream, 4, Workers::new(workers)).unwrap();
        for taken in 1..100 {
            loader.next_batch().unwrap().unwrap();
            // A permit is returned with a batch, so that one more may be in the making.
            let ahead = if workers == 0 { 0 } else { 4 * (2 * workers + 1) };
            let most = 4 * taken + ahead + 10;
            assert!(read.load(Ordering::Relaxed) <= most, "{workers} {taken}");
        }
    }
}
