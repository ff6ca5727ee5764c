//! Runs over a stream: equal samples and bits after kills, errors, evaluations on ranks with
//! different numbers of samples.

use parking_lot::Mutex;
use runner::data::{Stream, StreamOptions};
use runner::engine::Losses;

use super::midway::{assert_same_state, by_iters};
use super::*;
use crate::common::shards;

/// As [`MLP`], over shards in `dir` and by iterations.
fn config(dir: &Path, more: &str) -> String {
    let files = dir.join("*.jsonl");
    let data =
        format!("dataset = {{ type = \"JsonStream\", files = {files:?}, shuffle_buffer = 20 }}");
    let train = "train_cfg = { by_epoch = false, max_iters = 24, val_interval = 9 }";
    let checkpoint =
        "default_hooks.checkpoint = { by_epoch = false, interval = 5, max_keep_ckpts = 2 }";
    let ema = "custom_hooks = [{ type = \"EMAHook\", momentum = 0.1 }]";
    let mlp = MLP
        .replace(
            "batch_size = 64, dataset = { type = \"Digits\" }",
            &format!("batch_size = 8, {data}"),
        )
        .replace("train_cfg = { max_epochs = 2 }", train)
        .replace("accumulative_counts = 1", "accumulative_counts = 2");
    format!("{checkpoint}\n{ema}\n{more}\n{mlp}")
}

/// Records the rows of each trained batch, by rank.
struct Rows(usize, Arc<Mutex<Vec<Vec<i64>>>>);

impl Hook for Rows {
    fn name(&self) -> &'static str {
        "Rows"
    }

    fn after_train_iter(&mut self, runner: &mut Runner, batch: &Batch, _: &Losses) -> Result<()> {
        let ArrayData::I64(rows) = batch.get("row")?.data() else { panic!("{batch:?}") };
        let mut all = self.1.lock();
        let taken = &mut all[self.0];
        // A resumed run repeats iterations after its checkpoint.
        taken.truncate(runner.position().iter * rows.len());
        taken.extend(rows);
        Ok(())
    }
}

/// Trains until a kill before iteration `kill`, adding to the rows of `seen`.
fn train_rows(config: &str, dir: &Path, kill: usize, seen: &Arc<Mutex<Vec<Vec<i64>>>>) {
    let ranks = seen.lock().len();
    let outcome = run(config, dir, ranks, |builder, rank| {
        let builder = builder.resume(true).hook(Box::new(Rows(rank, Arc::clone(seen))));
        builder.hook(before_iter(kill, |_| Err(Error::data("killed"))))
    });
    assert!(outcome.iter().all(|outcome| outcome.is_ok() == (kill >= 24)), "{outcome:?}");
}

#[test]
fn killed_run_resumes_with_equal_samples_and_bits() {
    let dir = tempfile::tempdir().unwrap();
    // Shards distributed over ranks, one of them empty; and one shard shared by two ranks.
    for (name, lens) in [("dealt", &[33, 0, 50, 21, 40][..]), ("shared", &[144])] {
        let data = dir.path().join(name);
        std::fs::create_dir(&data).unwrap();
        shards::write(&data, lens);
        let config = config(&data, "");
        let seen = |ranks| Arc::new(Mutex::new(vec![Vec::new(); ranks]));
        let (whole, rows) = (data.join("whole"), seen(2));
        train_rows(&config, &whole, 99, &rows);
        for kills in [&[3][..], &[8, 12], &[5, 6, 22]] {
            let (broken, again) = (data.join(format!("{kills:?}")), seen(2));
            for (kill, workers) in kills.iter().chain(&[99]).zip([1, 3, 0, 2]) {
                let workers = format!("num_workers = {workers}, batch_size = 8,");
                train_rows(&config.replace("batch_size = 8,", &workers), &broken, *kill, &again);
            }
            assert_eq!(*again.lock(), *rows.lock(), "{name} {kills:?}");
            assert_same_state(&whole, &broken, "iter_24");
        }
        // 24 batches of 8 on 2 ranks are two passes and a part of the third, which ranks may begin
        // at different times.
        let taken = rows.lock().concat();
        for row in 0..144 {
            let count = taken.iter().filter(|taken| **taken == row).count();
            assert!((1..=5).contains(&count), "{name}: row {row} was taken {count} times");
        }
    }
}

#[test]
fn another_batch_size_resumes_at_the_next_sample() {
    let dir = tempfile::tempdir().unwrap();
    shards::write(dir.path(), &[60]);
    let seen = Arc::new(Mutex::new(vec![Vec::new()]));
    let work_dir = dir.path().join("run");
    let config =
        config(dir.path(), "").replace("accumulative_counts = 2", "accumulative_counts = 1");
    let iters = |iters: usize| config.replace("max_iters = 24", &format!("max_iters = {iters}"));
    train_rows(&iters(5), &work_dir, 99, &seen);
    let first = seen.lock()[0].clone();
    assert_eq!(first.len(), 40);
    let smaller = Arc::new(Mutex::new(vec![Vec::new()]));
    train_rows(&iters(10).replace("batch_size = 8", "batch_size = 4"), &work_dir, 99, &smaller);
    let mut pass = [first, smaller.lock()[0][..20].to_vec()].concat();
    pass.sort_unstable();
    assert_eq!(pass, (0..60).collect::<Vec<_>>());
}

#[test]
fn another_number_of_ranks_and_other_shards_are_refused() {
    let dir = tempfile::tempdir().unwrap();
    shards::write(dir.path(), &[33, 50, 21, 40]);
    let (config, work_dir) = (config(dir.path(), ""), dir.path().join("run"));
    killed(&config, &work_dir, 2, 11);
    let before = checkpoints(&work_dir);
    let refused = |config: &str, ranks, elastic| {
        let outcome = run(config, &work_dir, ranks, |b, _| b.resume(true).elastic(elastic));
        assert_eq!(checkpoints(&work_dir), before);
        let errors = outcome.into_iter().map(|outcome| outcome.unwrap_err().to_string());
        errors.last().unwrap()
    };
    for (ranks, elastic) in [(1, true), (3, true)] {
        let error = refused(&config, ranks, elastic);
        assert!(error.contains("iter_10, rank"), "{error}");
        let says =
            format!("it has ranks 2, the stream {ranks}: resume with as many ranks as before");
        assert!(error.contains(&says), "{error}");
    }
    let error = refused(&config.replace("shuffle_buffer = 20", "shuffle_buffer = 21"), 2, false);
    assert!(error.contains("it has shuffle_buffer 20, the stream 21"), "{error}");
    std::fs::rename(dir.path().join("0.jsonl"), dir.path().join("4.jsonl")).unwrap();
    let error = refused(&config, 2, false);
    assert!(error.contains("the names or sizes of the shards are not as before"), "{error}");
    let error = refused(&by_iters(MLP), 2, false);
    assert!(
        error.contains("was saved by a run over a stream, but this run uses a data set"),
        "{error}"
    );
}

#[test]
fn epochs_and_samplers_are_refused_for_a_stream() {
    let dir = tempfile::tempdir().unwrap();
    shards::write(dir.path(), &[9]);
    let config = config(dir.path(), "");
    let error = |from: &str, to: &str| {
        assert!(config.contains(from));
        let config = config.replace(from, to);
        let outcome = run(&config, &dir.path().join("run"), 1, |builder, _| builder).remove(0);
        assert!(!dir.path().join("run").exists());
        outcome.unwrap_err().to_string()
    };
    for (from, to, says) in [
        (
            "by_epoch = false, max_iters = 24, val_interval = 9",
            "max_epochs = 2",
            "a stream has no epochs: count iterations, by train_cfg = { by_epoch = false, max_iters",
        ),
        (
            "batch_size = 8,",
            "batch_size = 8, sampler = { shuffle = true },",
            "streams have no sampler: remove it; to shuffle, set `shuffle_buffer`",
        ),
        ("JsonStream", "JsonStraem", "unknown data set `JsonStraem`; did you mean `JsonStream`?"),
        (
            "randomness",
            "param_scheduler = { type = 'LinearLR', end = 1, convert_to_iter_based = true }\nrandomness",
            "a stream has no epochs that a scheduler could be converted from",
        ),
        ("*.jsonl", "none-*.jsonl", "none-*.jsonl: there is no such file"),
    ] {
        let error = error(from, to);
        assert!(error.contains(says), "{to}: {error}");
    }
}

#[test]
fn ranks_with_different_shards_are_refused() {
    let dir = tempfile::tempdir().unwrap();
    let data = [0, 1].map(|rank| dir.path().join(format!("data_{rank}")));
    for (data, len) in data.iter().zip([9, 10]) {
        std::fs::create_dir(data).unwrap();
        shards::write(data, &[len, 7]);
    }
    let outcome = run(&config(&data[0], ""), &dir.path().join("run"), 2, |builder, rank| {
        let files = data[rank].join("*.jsonl").to_str().unwrap().to_owned();
        let stream = Box::new(move |options| Ok(Stream::json([files], options)?));
        builder.train_dataloader(DataLoaderConfig::stream(stream, 2))
    });
    let says = "rank 1 found other shards of the stream than rank 0";
    for outcome in outcome {
        let error = outcome.unwrap_err().to_string();
        assert!(error.contains(says), "{error}");
    }
    assert!(!dir.path().join("run").exists());
}

type Change = fn(StreamOptions) -> StreamOptions;

#[test]
fn factory_that_ignores_the_options_is_refused() {
    let dir = tempfile::tempdir().unwrap();
    shards::write(dir.path(), &[9, 7]);
    let files = dir.path().join("*.jsonl").to_str().unwrap().to_owned();
    let outcome = |ranks, change: Change, shuffled: bool| {
        run(&config(dir.path(), ""), &dir.path().join("run"), ranks, |builder, _| {
            let files = files.clone();
            let stream = Box::new(move |options| Ok(Stream::json([files], change(options))?));
            let loader = DataLoaderConfig::stream(stream, 2);
            builder.train_dataloader(if shuffled { loader.shuffled() } else { loader })
        })
    };
    let changes: [(Change, &str); 4] = [
        (|_| StreamOptions::default(), "world_size: 1"),
        (|options| StreamOptions { repeat: false, ..options }, "repeat: false"),
        (|options| StreamOptions { rank: 1 - options.rank, ..options }, "rank: 1"),
        (|options| StreamOptions { seed: 1, ..options }, "seed: 1"),
    ];
    for (change, says) in changes {
        for outcome in outcome(2, change, false) {
            let error = outcome.unwrap_err().to_string();
            assert!(
                error.contains(says) && error.contains("the stream was created with"),
                "{error}"
            );
            assert!(
                error.contains("pass the options on, and change only `shuffle_buffer`"),
                "{error}"
            );
        }
    }
    let error = outcome(1, |options| options, true).remove(0).unwrap_err().to_string();
    assert!(error.contains("set `shuffle_buffer` of the stream's options"), "{error}");
    assert!(!dir.path().join("run").exists());
    // A stream with the same order in each pass causes a warning.
    let log_with = |change| {
        outcome(1, change, false).remove(0).unwrap();
        log(&dir.path().join("run"))
    };
    let says = "WARNING - the training stream is not shuffled: set its `shuffle_buffer`";
    assert!(log_with(|options| options).contains(says));
    std::fs::remove_dir_all(dir.path().join("run")).unwrap();
    assert!(!log_with(|options| StreamOptions { shuffle_buffer: 1, ..options }).contains(says));
}

#[test]
fn evaluation_uses_each_sample_once_with_uneven_ranks() {
    let dir = tempfile::tempdir().unwrap();
    let (data, val) = (dir.path().join("data"), dir.path().join("val"));
    std::fs::create_dir(&data).unwrap();
    std::fs::create_dir(&val).unwrap();
    shards::write(&data, &[64, 64, 64]);
    shards::write(&val, &[8]);
    let more = format!(
        "val_dataloader = {{ batch_size = 4, num_workers = 1, dataset = {{ type = \"JsonStream\", files = {:?} }} }}\n\
         val_evaluator = {{ type = \"Accuracy\" }}",
        val.join("*.jsonl")
    );
    let config = config(&data, &more);
    let work_dir = dir.path().join("run");
    resume(&config, &work_dir, 1);
    let accuracy = |ranks| {
        let groups = ProcessGroup::threads(ranks, Duration::from_secs(60)).unwrap();
        let metrics: Vec<_> = std::thread::scope(|scope| {
            let validate = |group: ProcessGroup| {
                let builder = from_config(Config::from_text("c.toml", &config).unwrap()).unwrap();
                let builder = builder.work_dir(&work_dir).process_group(group).resume(true);
                let mut run = builder.build().unwrap();
                [run.validate().unwrap(), run.validate().unwrap()]
            };
            let threads: Vec<_> =
                groups.into_iter().map(|group| scope.spawn(move || validate(group))).collect();
            threads.into_iter().map(|thread| thread.join().unwrap()).collect()
        });
        assert!(metrics.iter().flatten().all(|all| *all == metrics[0][0]), "{metrics:?}");
        metrics[0][0].clone()
    };
    // Ranks with many samples, with some and with none; one shard that they share.
    for lens in [&[90, 0, 13][..], &[70], &[0, 0, 5, 0, 31]] {
        std::fs::remove_dir_all(&val).unwrap();
        std::fs::create_dir(&val).unwrap();
        shards::write(&val, lens);
        let one = accuracy(1);
        assert_eq!([2, 3].map(accuracy), [one.clone(), one], "{lens:?}");
    }
}
