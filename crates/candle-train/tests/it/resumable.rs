//! Tests of runs that save and resume by themselves.

use std::path::Path;
use std::sync::Arc;

use candle_core::{DType, Device, Module};
use candle_nn::VarMap;
use candle_ops::{cross_entropy, randn};
use candle_train::train_data::{
    ArrayData, Batch, DataLoader, Stream, StreamLoader, StreamOptions, Workers,
};
use candle_train::{AdamWHyper, Outcome, Parts, SgdHyper, Trainer, seeded};
use collective::ProcessGroup;

use super::resume::Rows;
use super::{Net, SAMPLES, batch, model, ranks, weights};

/// Trains until `last` batches of this process have been trained, or to the end. Returns the rows
/// of each batch, and the epochs that ended.
fn run_resumable(
    (vars, net): (&VarMap, &Net),
    group: &ProcessGroup,
    path: &Path,
    last: usize,
) -> (Vec<Vec<u32>>, Vec<usize>) {
    let builder = Trainer::builder(vars).group(group.clone()).accumulate(2).f16();
    let mut train = builder.build(AdamWHyper { lr: 1e-2, ..AdamWHyper::default() }).unwrap();
    let builder = DataLoader::builder(Arc::new(Rows), train.sampler(SAMPLES)).batch_size(10);
    let loader = builder.workers(Workers::new(1)).build().unwrap();
    let mut run = train.resumable(loader, path, 3).unwrap().every(1);
    let (mut batches, mut ended) = (Vec::new(), Vec::new());
    while let Some(epoch) = run.next_epoch(&mut train).unwrap() {
        while let Some(read) = run.next_batch(&mut train).unwrap() {
            if batches.len() == last {
                return (batches, ended);
            }
            let ArrayData::I64(rows) = read.get("row").unwrap().data() else { panic!("{read:?}") };
            let rows: Vec<_> = rows.iter().map(|row| u32::try_from(*row).unwrap()).collect();
            let (x, y) = batch(&rows);
            train.step(|| cross_entropy(&net.forward(&x)?, &y)).unwrap();
            batches.push(rows);
        }
        ended.push(epoch);
    }
    assert_eq!(run.epoch(), 3);
    (batches, ended)
}

#[test]
fn a_resumable_run_goes_on_after_a_kill_at_any_batch() {
    let directory = tempfile::tempdir().unwrap();
    let folder = directory.path();
    let seeded_model = |seed| {
        let vars = VarMap::new();
        let net = Net::new(seeded(&vars, seed, DType::F32, &Device::Cpu)).unwrap();
        (vars, net)
    };
    ranks(2, |group| {
        let (vars, net) = seeded_model(1);
        let whole = run_resumable((&vars, &net), &group, &folder.join("whole"), usize::MAX);
        assert_eq!((whole.0.len(), &whole.1), (15, &vec![0, 1, 2]));
        for killed in 0..15 {
            let path = folder.join(format!("killed-{killed}"));
            let (first, net) = seeded_model(1);
            run_resumable((&first, &net), &group, &path, killed);
            let (other, net) = seeded_model(if killed < 2 { 1 } else { 9 });
            let (batches, ended) = run_resumable((&other, &net), &group, &path, usize::MAX);
            // Steps end after the second, fourth and fifth batch of an epoch.
            let saved = killed / 5 * 5 + killed % 5 / 2 * 2;
            assert_eq!(batches, whole.0[saved..], "{killed}");
            assert_eq!(ended, (saved / 5..3).collect::<Vec<_>>(), "{killed}");
            assert_eq!(weights(&other), weights(&vars), "{killed}");
        }
        // A complete run has nothing left.
        let again = run_resumable((&vars, &net), &group, &folder.join("whole"), usize::MAX);
        assert_eq!(again, (Vec::new(), Vec::new()));
    });
    // One rank takes the samples that two have left: 96 samples in batches of 10 each.
    ranks(2, |group| {
        let (vars, net) = seeded_model(1);
        run_resumable((&vars, &net), &group, &folder.join("elastic"), 5 + 2);
    });
    ranks(1, |group| {
        let (vars, net) = seeded_model(9);
        let path = folder.join("elastic");
        let (batches, ended) = run_resumable((&vars, &net), &group, &path, usize::MAX);
        let taken: usize = batches.iter().map(Vec::len).sum();
        assert_eq!((taken, ended), (96 - 2 * 2 * 10 + 96, vec![1, 2]));
    });
}

#[test]
fn a_resumable_run_refuses_files_without_its_position_before_it_changes_anything() {
    let directory = tempfile::tempdir().unwrap();
    let [plain, other] = ["plain", "other"].map(|name| directory.path().join(name));
    let loader = |train: &Trainer, batch_size| {
        let builder = DataLoader::builder(Arc::new(Rows), train.sampler(SAMPLES));
        builder.batch_size(batch_size).build().unwrap()
    };
    let (vars, net) = model(1);
    let build = || Trainer::builder(&vars).build(AdamWHyper::default()).unwrap();
    let mut train = build();
    let (x, y) = batch(&[0, 1, 2, 3]);
    train.step(|| cross_entropy(&net.forward(&x)?, &y)).unwrap();
    train.save(&plain, 0).unwrap();
    train.save_with(&other, 0, &loader(&train, 5).position()).unwrap();
    drop(train);
    let mut train = build();
    let error = train.resumable(loader(&train, 10), &plain, 1).unwrap_err().to_string();
    assert!(error.contains("it was saved by `save`, without a position in the data"), "{error}");
    let error = train.resumable(loader(&train, 10), &other, 1).unwrap_err().to_string();
    assert!(error.contains("batch_size 5, this loader 10"), "{error}");
    assert_eq!(train.steps(), 0);
    assert_eq!(train.resumable(loader(&train, 5), &other, 1).unwrap().epoch(), 0);
    assert_eq!(train.steps(), 1);
}

#[test]
fn a_run_that_one_rank_stops_goes_on_when_started_again() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("run");
    ranks(2, |group| {
        let (mut seen, mut starts) = (Vec::new(), 0);
        loop {
            starts += 1;
            let vars = VarMap::new();
            let net = Net::new(seeded(&vars, 1, DType::F32, &Device::Cpu)).unwrap();
            let builder = Trainer::builder(&vars).group(group.clone());
            let mut train = builder.build(AdamWHyper::default()).unwrap();
            let builder = DataLoader::builder(Arc::new(Rows), train.sampler(SAMPLES));
            let loader = builder.batch_size(10).build().unwrap();
            let is_last = group.rank() == 1;
            let run = train.resumable(loader, &path, 2).unwrap();
            let mut run = run.every(3).stop_when(move || is_last);
            while run.next_epoch(&mut train).unwrap().is_some() {
                while run.next_batch(&mut train).unwrap().is_some() {
                    let (x, y) = batch(&[0, 1, 2, 3]);
                    train.step(|| cross_entropy(&net.forward(&x)?, &y)).unwrap();
                    seen.push(train.steps());
                }
            }
            if !run.is_stopped() {
                break;
            }
        }
        // Stopped after batches 3 and 5 of the first epoch, and 3 of the last.
        assert_eq!((starts, seen), (4, (1..=10).collect()));
    });
}

/// A model whose initial weights depend on `seed`.
fn start(seed: u64) -> (VarMap, Net) {
    let vars = VarMap::new();
    let net = Net::new(seeded(&vars, seed, DType::F32, &Device::Cpu)).unwrap();
    (vars, net)
}

fn loader(train: &Trainer, batch_size: usize) -> DataLoader {
    let builder = DataLoader::builder(Arc::new(Rows), train.sampler(SAMPLES));
    builder.batch_size(batch_size).build().unwrap()
}

/// Inputs and labels of a batch, whose field is `name`.
fn of(read: &Batch, name: &str) -> (candle_core::Tensor, candle_core::Tensor) {
    let ArrayData::I64(rows) = read.get(name).unwrap().data() else { panic!("{read:?}") };
    let rows: Vec<_> = rows.iter().map(|row| u32::try_from(*row).unwrap()).collect();
    batch(&rows)
}

/// Trains two nets by trainers that accumulate, one of them on each batch. Ends after `last`
/// batches. Returns all weights.
fn run_parts(group: &ProcessGroup, path: &Path, last: usize, seed: u64) -> Vec<Vec<f32>> {
    let [(a_vars, a), (b_vars, b)] = [start(seed), start(seed + 1)];
    let builder = Trainer::builder(&a_vars).part("a").group(group.clone());
    let mut first = builder.build(AdamWHyper::default()).unwrap();
    let builder = Trainer::builder(&b_vars).part("b").group(group.clone()).accumulate(2);
    let mut second = builder.build(SgdHyper { lr: 0.1, ..SgdHyper::default() }).unwrap();
    let loader = loader(&first, 10);
    let run = Parts::of([&mut first, &mut second]).resumable(loader, path, 2);
    let (mut run, mut count) = (run.unwrap().every(1), 0);
    while run.next_epoch(&mut Parts::of([&mut first, &mut second])).unwrap().is_some() {
        loop {
            let read = run.next_batch(&mut Parts::of([&mut first, &mut second])).unwrap();
            let Some(read) = read.filter(|_| count < last) else { break };
            let (x, y) = of(&read, "row");
            if second.steps() % 2 == 1 {
                let noisy = || &x + randn(0.0, 0.3, x.shape(), DType::F32, &Device::Cpu)?;
                first.step(|| cross_entropy(&a.forward(&noisy()?)?, &y)).unwrap();
            }
            second.step(|| cross_entropy(&b.forward(&x)?, &y)).unwrap();
            count += 1;
        }
        if count == last {
            break;
        }
    }
    [a_vars, b_vars].iter().flat_map(weights).collect()
}

#[test]
fn parts_that_accumulate_resume_after_a_kill_at_any_batch() {
    let directory = tempfile::tempdir().unwrap();
    ranks(2, |group| {
        let whole = run_parts(&group, &directory.path().join("whole"), usize::MAX, 1);
        for killed in 0..10 {
            let path = directory.path().join(format!("killed-{killed}"));
            run_parts(&group, &path, killed, 1);
            let seed = if killed < 3 { 1 } else { 8 };
            assert_eq!(run_parts(&group, &path, usize::MAX, seed), whole, "{killed}");
        }
    });
}

/// Trains to a number of steps, and ends before it after `last` batches of this process. Returns
/// the weights.
fn run_steps(
    group: &ProcessGroup,
    path: &Path,
    (last, seed): (usize, u64),
    stream: Option<&str>,
) -> Vec<Vec<f32>> {
    let (vars, net) = start(seed);
    let builder = Trainer::builder(&vars).group(group.clone()).accumulate(2);
    let mut train = builder.build(AdamWHyper::default()).unwrap();
    let run = match stream {
        None => train.resumable_steps(loader(&train, 10), path, 7),
        Some(files) => {
            let (rank, world_size) = (group.rank(), group.world_size());
            let options =
                StreamOptions { shuffle_buffer: 8, seed: 1, rank, world_size, repeat: true };
            let stream = Stream::json([files], options).unwrap();
            train.resumable_steps(StreamLoader::new(stream, 5, Workers::new(1)).unwrap(), path, 7)
        }
    };
    let (mut run, mut count) = (run.unwrap().every(3), 0);
    while let Some(read) = run.next_batch(&mut train).unwrap() {
        if count == last {
            return Vec::new();
        }
        let (x, y) = of(&read, "row");
        train.step(|| cross_entropy(&net.forward(&x)?, &y)).unwrap();
        count += 1;
    }
    assert_eq!(train.steps(), 7);
    weights(&vars)
}

#[test]
fn runs_of_steps_over_a_loader_or_a_stream_resume_after_a_kill_at_any_batch() {
    let directory = tempfile::tempdir().unwrap();
    let lines: Vec<_> = (0..60).map(|row| format!("{{\"row\": {row}}}")).collect();
    std::fs::write(directory.path().join("0.jsonl"), lines.join("\n")).unwrap();
    std::fs::write(directory.path().join("1.jsonl"), lines.join("\n")).unwrap();
    let files = format!("{}/*.jsonl", directory.path().display());
    for stream in [None, Some(&files[..])] {
        let name = |end: &str| directory.path().join(format!("{}-{end}", stream.is_some()));
        ranks(2, |group| {
            let whole = run_steps(&group, &name("whole"), (usize::MAX, 1), stream);
            for killed in 0..14 {
                let path = name(&killed.to_string());
                run_steps(&group, &path, (killed, 1), stream);
                let seed = if killed < 4 { 1 } else { 8 };
                let resumed = run_steps(&group, &path, (usize::MAX, seed), stream);
                assert_eq!(resumed, whole, "{killed} {stream:?}");
            }
            // Nothing is left.
            assert_eq!(run_steps(&group, &name("whole"), (usize::MAX, 8), stream), whole);
        });
    }
}

/// Gives the values of epochs to `keep_best`, from the run's epoch on; ends after `last` epochs of
/// this process. Returns the epochs that were the best, and those that ran.
fn run_best(path: &Path, values: &[f64], last: usize) -> (Vec<usize>, Vec<usize>) {
    let (vars, net) = start(1);
    let mut train = Trainer::builder(&vars).build(AdamWHyper::default()).unwrap();
    let run = train.resumable(loader(&train, 48), path, values.len()).unwrap();
    let (mut run, mut best, mut ran) = (run.patience(2), Vec::new(), Vec::new());
    while let Some(epoch) = run.next_epoch(&mut train).unwrap() {
        if ran.len() == last {
            break;
        }
        while let Some(read) = run.next_batch(&mut train).unwrap() {
            let (x, y) = of(&read, "row");
            train.step(|| cross_entropy(&net.forward(&x)?, &y)).unwrap();
        }
        let is_best = run.keep_best(&mut train, values[epoch]).unwrap();
        // A second value of the same steps does not count.
        assert_eq!(run.keep_best(&mut train, values[epoch]).unwrap(), is_best);
        if is_best {
            assert!(run.best_path().ends_with("run.best.safetensors"));
            best.push(epoch);
        }
        ran.push(epoch);
    }
    (best, ran)
}

#[test]
fn the_best_epoch_is_kept_and_patience_ends_the_run_also_after_a_kill() {
    let values = [0.5, f64::NAN, 0.7, 0.6, 0.7, 0.9, 0.9];
    let ended = (vec![0, 2], vec![0, 1, 2, 3, 4]);
    for killed in 0..=5 {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("run.safetensors");
        let (mut best, mut ran) = run_best(&path, &values, killed);
        let (later_best, later) = run_best(&path, &values, usize::MAX);
        best.extend(later_best);
        ran.extend(later);
        assert_eq!((best, ran), ended, "{killed}");
        let steps = |path: &Path| {
            let (vars, _net) = start(1);
            let mut train = Trainer::builder(&vars).build(AdamWHyper::default()).unwrap();
            train.resumable(loader(&train, 48), path, 7).unwrap();
            train.steps()
        };
        assert_eq!((steps(&path), steps(&path.with_extension("best.safetensors"))), (10, 6));
    }
}

#[test]
fn a_run_of_steps_that_patience_ends_is_saved() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("run");
    let run = |accumulate| {
        let (vars, net) = start(1);
        let train = Trainer::builder(&vars).accumulate(accumulate);
        let mut train = train.build(AdamWHyper::default()).unwrap();
        let run = train.resumable_steps(loader(&train, 16), &path, 100).unwrap();
        let (start, mut run) = (train.steps(), run.every(50).patience(1));
        while let Some(read) = run.next_batch(&mut train).unwrap() {
            let (x, y) = of(&read, "row");
            let step = train.step(|| cross_entropy(&net.forward(&x)?, &y)).unwrap();
            if step.outcome == Outcome::Updated && train.steps().is_multiple_of(3) {
                let value = -(train.steps() as f64);
                run.keep_best(&mut train, value).unwrap();
            }
        }
        (start, train.steps())
    };
    // The second value, after six steps, is not above the first one.
    assert_eq!([run(1), run(1)], [(0, 6), (6, 6)]);
    std::fs::remove_file(&path).unwrap();
    assert_eq!([run(2), run(2)], [(0, 6), (6, 6)]);
}

#[test]
fn a_run_of_steps_saves_after_each_epoch() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("run");
    let run = |steps| {
        let (vars, net) = start(1);
        let mut train = Trainer::builder(&vars).build(AdamWHyper::default()).unwrap();
        let run = train.resumable_steps(loader(&train, 48), &path, 7).unwrap();
        let (mut run, mut seen) = (run.stop_when(|| false), Vec::new());
        while let Some(read) = run.next_batch(&mut train).unwrap() {
            if train.steps() == steps {
                return seen;
            }
            let (x, y) = of(&read, "row");
            train.step(|| cross_entropy(&net.forward(&x)?, &y)).unwrap();
            seen.push(train.steps());
        }
        seen
    };
    // Two steps an epoch.
    assert_eq!(run(5), [1, 2, 3, 4, 5]);
    assert_eq!(run(7), [5, 6, 7]);
}

#[test]
fn data_that_do_not_end_or_end_too_early_are_refused_with_the_call_to_use() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("run");
    let (vars, net) = model(1);
    let mut train = Trainer::builder(&vars).accumulate(2).build(AdamWHyper::default()).unwrap();
    let builder = DataLoader::builder(Arc::new(Rows), train.sampler(SAMPLES)).batch_size(10);
    let infinite = builder.infinite().build().unwrap();
    let error = train.resumable(infinite.clone(), &path, 1).unwrap_err().to_string();
    assert!(error.contains("give `resumable_steps` the number of steps"), "{error}");
    let mut run = train.resumable_steps(infinite, &path, 1).unwrap();
    let error = run.next_epoch(&mut train).unwrap_err().to_string();
    assert!(error.contains("call `next_batch` until it returns `None`"), "{error}");
    let error = run.next_batch(&mut train).unwrap_err().to_string();
    assert!(error.contains("call `every` with a number of batches"), "{error}");
    std::fs::write(directory.path().join("0.txt"), "a\nb\n").unwrap();
    let options =
        StreamOptions { shuffle_buffer: 1, seed: 1, rank: 0, world_size: 1, repeat: false };
    let stream = Stream::text([format!("{}/*.txt", directory.path().display())], options).unwrap();
    let stream = StreamLoader::new(stream, 2, Workers::new(0)).unwrap();
    let error = train.resumable_steps(stream, &path, 1).unwrap_err().to_string();
    assert!(error.contains("set `repeat`"), "{error}");
    // An epoch that is left within a step.
    let mut run = train.resumable(loader(&train, 10), &path, 2).unwrap();
    run.next_epoch(&mut train).unwrap();
    let read = run.next_batch(&mut train).unwrap().unwrap();
    let (x, y) = of(&read, "row");
    train.step(|| cross_entropy(&net.forward(&x)?, &y)).unwrap();
    let error = run.next_epoch(&mut train).unwrap_err().to_string();
    assert!(error.contains("epoch 0 was left after batch 1 of 10"), "{error}");
}
