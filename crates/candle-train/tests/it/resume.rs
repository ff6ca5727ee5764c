//! Tests that a resumed run equals an uninterrupted one bit by bit.

use std::fs;
use std::path::Path;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use candle_core::{DType, Device, Module};
use candle_nn::VarMap;
use candle_ops::{cross_entropy, randn};
use candle_train::train_data::{
    Array, ArrayData, Batch, BoxError, DataLoader, Dataset, DefaultSampler, Sample, SampleRng,
    Stream, StreamLoader, StreamOptions, Workers,
};
use candle_train::{AdamWHyper, Trainer, seeded, tensor};
use collective::ProcessGroup;
use rand_chacha::rand_core::Rng;

use super::{Net, SAMPLES, batch, model, ranks, weights};

fn trainer(vars: &VarMap, group: &ProcessGroup) -> Trainer {
    Trainer::builder(vars)
        .group(group.clone())
        .f16()
        .schedule(|step| 1.0 / (1.0 + step as f64))
        .build(AdamWHyper { lr: 1e-2, ..AdamWHyper::default() })
        .unwrap()
}

fn run(train: &mut Trainer, net: &Net, path: &Path, epochs: usize) -> Vec<f32> {
    let mut losses = Vec::new();
    for epoch in train.resume(path).unwrap()..epochs {
        for rows in train.batches(SAMPLES, 16, epoch).unwrap() {
            let (x, y) = batch(&rows);
            let loss = train.step(|| cross_entropy(&net.forward(&x)?, &y)).unwrap().loss;
            losses.push(loss.to_scalar::<f32>().unwrap());
        }
        train.save(path, epoch + 1).unwrap();
    }
    losses
}

#[test]
fn a_resumed_run_has_the_bits_of_the_undisturbed() {
    let directory = tempfile::tempdir().unwrap();
    let (whole, parts) = (directory.path().join("whole"), directory.path().join("in/parts"));
    ranks(2, |group| {
        let (vars, net) = model(1);
        let undisturbed = run(&mut trainer(&vars, &group), &net, &whole, 4);
        let expected = weights(&vars);
        let (vars, net) = model(1);
        let mut losses = run(&mut trainer(&vars, &group), &net, &parts, 2);
        // A new process, with other initial weights.
        let (vars, net) = model(9);
        let mut train = trainer(&vars, &group);
        losses.extend(run(&mut train, &net, &parts, 4));
        assert_eq!(losses, undisturbed);
        assert_eq!(weights(&vars), expected);
        assert_eq!(train.resume(&parts).unwrap(), 4);
    });
    assert_eq!(fs::read(&whole).unwrap().len(), fs::read(&parts).unwrap().len());
}

#[test]
fn two_seeded_starts_are_equal_and_noise_is_resumed() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("run");
    let train = |seed, epochs: [usize; 2]| {
        let vars = VarMap::new();
        let net = Net::new(seeded(&vars, seed, DType::F32, &Device::Cpu)).unwrap();
        let mut train = Trainer::builder(&vars).seed(seed).build(AdamWHyper::default()).unwrap();
        if epochs[0] > 0 {
            assert_eq!(train.resume(&path).unwrap(), epochs[0]);
        }
        for epoch in epochs[0]..epochs[1] {
            let (x, y) = batch(&[epoch as u32, 5, 9]);
            let loss = || {
                let noise = randn(0.0, 0.5, x.shape(), DType::F32, &Device::Cpu)?;
                cross_entropy(&net.forward(&(&x + noise)?)?, &y)
            };
            train.step(loss).unwrap();
            train.save(&path, epoch + 1).unwrap();
        }
        weights(&vars)
    };
    let whole = train(1, [0, 4]);
    assert_eq!(train(1, [0, 4]), whole);
    assert_ne!(train(2, [0, 4]), whole);
    train(1, [0, 2]);
    assert_eq!(train(1, [2, 4]), whole);
}

#[test]
fn candle_loads_the_variables_of_a_saved_run() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("run.safetensors");
    ranks(1, |group| {
        let (vars, _net) = model(3);
        trainer(&vars, &group).save(&path, 0).unwrap();
        let (mut others, _net) = model(4);
        others.load(&path).unwrap();
        assert_eq!(weights(&others), weights(&vars));
    });
}

#[test]
fn a_damaged_file_is_refused_by_name() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("run.safetensors");
    ranks(1, |group| {
        let (vars, _net) = model(3);
        let mut train = trainer(&vars, &group);
        train.save(&path, 1).unwrap();
        let whole = fs::read(&path).unwrap();
        let before = weights(&vars);
        for at in (0..whole.len()).step_by(97) {
            let mut damaged = whole.clone();
            damaged[at] ^= 4;
            fs::write(&path, damaged).unwrap();
            let error = train.resume(&path).unwrap_err().to_string();
            assert!(error.contains("run.safetensors"), "byte {at}: {error}");
        }
        assert_eq!(weights(&vars), before);
        fs::write(&path, whole).unwrap();
        assert_eq!(train.resume(&path).unwrap(), 1);
    });
}

/// Writes the numbers of the 96 samples as the lines of three files.
fn write_shards(folder: &Path) {
    for (shard, rows) in [0..40, 40..47, 47..SAMPLES].into_iter().enumerate() {
        let lines: String = rows.map(|row| format!("{row}\n")).collect();
        fs::write(folder.join(format!("{shard}.txt")), lines).unwrap();
    }
}

/// A loader of these lines, in batches of four.
fn stream(folder: &Path, group: &ProcessGroup) -> StreamLoader {
    let (rank, world_size) = (group.rank(), group.world_size());
    let options = StreamOptions { shuffle_buffer: 10, seed: 3, rank, world_size, repeat: true };
    let files = [folder.join("*.txt").to_str().unwrap().to_owned()];
    let stream = Stream::text(files, options).unwrap().map(|mut sample, _| {
        let ArrayData::U8(line) = sample.take("text")?.into_data() else {
            return Err("no line".into());
        };
        Ok(sample.with("row", Array::scalar(String::from_utf8(line)?.parse::<i64>()?)))
    });
    StreamLoader::new(stream, 4, Workers::new(2)).unwrap()
}

/// Trains up to step `until`, and saves after every third step; returns the rows and losses of each
/// step.
fn run_stream(
    (train, net): (&mut Trainer, &Net),
    loader: &mut StreamLoader,
    path: &Path,
    until: u64,
) -> Vec<(u64, Vec<u32>, f32)> {
    let mut steps = Vec::new();
    if let (_, Some(position)) = train.resume_with(path).unwrap() {
        loader.resume(position).unwrap();
    }
    while train.steps() < until {
        let read = loader.next_batch().unwrap().unwrap();
        let ArrayData::I64(rows) = read.get("row").unwrap().data() else { panic!("{read:?}") };
        let rows: Vec<_> = rows.iter().map(|row| u32::try_from(*row).unwrap()).collect();
        let (x, y) = batch(&rows);
        let loss = train.step(|| cross_entropy(&net.forward(&x)?, &y)).unwrap().loss;
        steps.push((train.steps(), rows, loss.to_scalar::<f32>().unwrap()));
        if train.steps().is_multiple_of(3) {
            train.save_with(path, 0, &loader.position()).unwrap();
        }
    }
    steps
}

#[test]
fn a_stream_goes_on_after_the_batch_that_the_saved_model_was_trained_on() {
    let directory = tempfile::tempdir().unwrap();
    let (folder, last) = (directory.path(), 40);
    write_shards(folder);
    let trainer = |vars: &VarMap, group: &ProcessGroup| {
        let builder = Trainer::builder(vars).group(group.clone());
        builder.build(AdamWHyper { lr: 1e-2, ..AdamWHyper::default() }).unwrap()
    };
    ranks(2, |group| {
        let (vars, net) = model(1);
        let (mut train, mut loader) = (trainer(&vars, &group), stream(folder, &group));
        let whole = run_stream((&mut train, &net), &mut loader, &folder.join("whole"), last);
        let (expected, path) = (weights(&vars), folder.join("parts"));
        // Each is a new process, which ends between two saves, or at one.
        let mut saved = 0;
        for until in [2, 5, 7, 12, 23, last] {
            let (vars, net) = model(if saved == 0 { 1 } else { 9 });
            let (mut train, mut loader) = (trainer(&vars, &group), stream(folder, &group));
            let steps = run_stream((&mut train, &net), &mut loader, &path, until);
            assert_eq!(steps, whole[saved..until as usize]);
            saved = until as usize / 3 * 3;
            if until == last {
                assert_eq!(weights(&vars), expected);
            }
        }
    });
    ranks(3, |group| {
        let (vars, _net) = model(5);
        let mut train = trainer(&vars, &group);
        let error = train.resume_with::<u32>(folder.join("parts")).unwrap_err().to_string();
        assert!(error.contains("2 ranks saved it, each with data of its own"), "{error}");
        assert!(error.contains("this run has 3: resume with 2"), "{error}");
        assert_eq!((train.steps(), weights(&vars)), (0, weights(&model(5).0)));
        train.save(folder.join("plain"), 1).unwrap();
        let error = train.resume_with::<u32>(folder.join("plain")).unwrap_err().to_string();
        assert!(
            error.contains("it was saved by `save`, without data of the ranks: call `resume`"),
            "{error}"
        );
    });
}

#[test]
fn a_loader_resumes_after_the_last_batch_of_an_epoch() {
    let (vars, net) = model(1);
    let group = ProcessGroup::threads(1, Duration::from_secs(10)).unwrap().remove(0);
    let builder = Trainer::builder(&vars).group(group);
    let mut train = builder.build(AdamWHyper::default()).unwrap();
    let builder = DataLoader::builder(Arc::new(Rows), train.sampler(SAMPLES));
    let mut loader = builder.batch_size(5).build().unwrap();
    let len = loader.batches_per_epoch();
    assert_eq!(train.batches_of(&loader, 0).unwrap().count(), len);
    loader.resume(loader.position()).unwrap();
    assert_eq!(train.batches_of(&loader, 0).unwrap().count(), 0);
    assert_eq!(train.batches_of(&loader, 1).unwrap().take(len - 1).count(), len - 1);
    loader.resume(loader.position()).unwrap();
    assert_eq!(train.batches_of(&loader, 1).unwrap().count(), 1);
    let (x, y) = batch(&[0, 1, 2, 3]);
    train.step(|| cross_entropy(&net.forward(&x)?, &y)).unwrap();
    assert_eq!(train.steps(), 1);
}

#[test]
fn a_position_of_another_seed_is_refused() {
    let loader = |seed| {
        let (vars, _net) = model(1);
        let group = ProcessGroup::threads(1, Duration::from_secs(10)).unwrap().remove(0);
        let builder = Trainer::builder(&vars).group(group).seed(seed);
        let train = builder.build(AdamWHyper::default()).unwrap();
        let builder = DataLoader::builder(Arc::new(Rows), train.sampler(SAMPLES));
        builder.batch_size(5).build().unwrap()
    };
    let error = loader(1).resume(loader(2).position()).unwrap_err().to_string();
    assert!(error.contains("seed 2, this loader 1"), "{error}");
    loader(2).resume(loader(2).position()).unwrap();
}

/// Rows with their number, and a random number of each sample.
pub(super) struct Rows;

impl Dataset for Rows {
    fn len(&self) -> usize {
        SAMPLES
    }

    fn sample(&self, index: usize, random: &mut SampleRng) -> Result<Sample, BoxError> {
        let row = Sample::new().with("row", Array::scalar(index as i64));
        Ok(row.with("factor", Array::scalar(random.next_u32() as f32 / u32::MAX as f32)))
    }
}

/// Trains on at most `most` more batches, and saves after every step; then the program is as if
/// killed. Returns the losses, and whether all batches are trained.
fn run_loader(
    (train, net): (&mut Trainer, &Net),
    workers: usize,
    path: &Path,
    mut most: usize,
) -> (Vec<f32>, bool) {
    let builder = DataLoader::builder(Arc::new(Rows), train.sampler(SAMPLES)).batch_size(5);
    let mut loader = builder.workers(Workers::new(workers).persistent()).build().unwrap();
    if let (_, Some(position)) = train.resume_with(path).unwrap() {
        loader.resume(position).unwrap();
    }
    let mut losses = Vec::new();
    for epoch in loader.position().epoch()..3 {
        for loaded in train.batches_of(&loader, epoch).unwrap() {
            if most == 0 {
                return (losses, false);
            }
            let loaded = loaded.unwrap();
            let ArrayData::I64(rows) = loaded.get("row").unwrap().data() else {
                panic!("{loaded:?}")
            };
            let rows: Vec<_> = rows.iter().map(|row| u32::try_from(*row).unwrap()).collect();
            let (x, y) = batch(&rows);
            let factor = tensor(loaded.get("factor").unwrap(), &Device::Cpu).unwrap();
            let x = x.broadcast_mul(&factor.unsqueeze(1).unwrap()).unwrap();
            let before = train.steps();
            let loss = train.step(|| cross_entropy(&net.forward(&x)?, &y)).unwrap().loss;
            losses.push(loss.to_scalar::<f32>().unwrap());
            most -= 1;
            if train.steps() > before {
                train.save_with(path, epoch, &loader.position()).unwrap();
            }
        }
    }
    (losses, true)
}

#[test]
fn a_loader_goes_on_within_an_epoch_with_any_number_of_workers() {
    let directory = tempfile::tempdir().unwrap();
    // An epoch has ten batches, so its last step has one batch.
    let trainer = |vars: &VarMap, group: &ProcessGroup| {
        let builder = Trainer::builder(vars).group(group.clone()).accumulate(3);
        builder.build(AdamWHyper { lr: 1e-2, ..AdamWHyper::default() }).unwrap()
    };
    ranks(2, |group| {
        let (vars, net) = model(1);
        let mut train = trainer(&vars, &group);
        let (whole, path) = (directory.path().join("whole"), directory.path().join("parts"));
        let (undisturbed, _) = run_loader((&mut train, &net), 0, &whole, usize::MAX);
        assert_eq!((undisturbed.len(), train.steps()), (30, 12));
        let expected = weights(&vars);
        let (mut done, mut losses) = (false, Vec::new());
        for (part, workers) in [0, 1, 3].into_iter().cycle().enumerate() {
            if done {
                break;
            }
            // Each is a new process, with other initial weights.
            let (vars, net) = model(if part == 0 { 1 } else { 9 });
            let mut train = trainer(&vars, &group);
            let more;
            (more, done) = run_loader((&mut train, &net), workers, &path, 5);
            // Batches after the last save are trained again.
            losses.truncate(losses.len() / 10 * 10 + losses.len() % 10 / 3 * 3);
            losses.extend(more);
            if done {
                assert_eq!(weights(&vars), expected);
            }
        }
        assert_eq!(losses, undisturbed);
        let own = train.sampler(SAMPLES);
        for (other, says) in [
            (DefaultSampler { rank: 0, world_size: 1, ..own }, "for rank 0 of 1 with"),
            (
                DefaultSampler { rank: 1 - own.rank, ..own },
                "of 2 with round_up = true, this is rank",
            ),
            (DefaultSampler { round_up: false, ..own }, "with round_up = false, this is rank"),
        ] {
            let builder = DataLoader::builder(Arc::new(Rows), other);
            let loader = builder.batch_size(5).build().unwrap();
            let error = train.batches_of(&loader, 0).err().unwrap().to_string();
            assert!(error.contains(says), "{error}");
        }
    });
}

#[test]
fn an_epoch_resumes_on_another_number_of_ranks() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("run");
    let loader = |train: &Trainer| {
        let builder = DataLoader::builder(Arc::new(Rows), train.sampler(SAMPLES)).batch_size(4);
        builder.build().unwrap()
    };
    let rows = |loaded: &Batch| match loaded.get("row").unwrap().data() {
        ArrayData::I64(rows) => rows.iter().map(|row| *row as u32).collect::<Vec<_>>(),
        _ => panic!("{loaded:?}"),
    };
    let seen = Mutex::new(Vec::new());
    let train_on = |(train, net): (&mut Trainer, &Net), loaded: &Batch| {
        let (x, y) = batch(&rows(loaded));
        train.step(|| cross_entropy(&net.forward(&x)?, &y)).unwrap();
        seen.lock().unwrap().extend(rows(loaded));
    };
    ranks(2, |group| {
        let (vars, net) = model(1);
        let mut train = trainer(&vars, &group);
        let loader = loader(&train);
        for loaded in train.batches_of(&loader, 0).unwrap().take(5) {
            train_on((&mut train, &net), &loaded.unwrap());
        }
        train.save_with(&path, 0, &loader.position()).unwrap();
    });
    assert_eq!(seen.lock().unwrap().len(), 40);
    ranks(3, |group| {
        let (vars, net) = model(9);
        let (mut train, before) = (trainer(&vars, &group), weights(&vars));
        let mut loader = loader(&train);
        let (_, positions) = train.resume_with_all(&path).unwrap();
        assert_ne!(weights(&vars), before);
        loader.resume(positions.unwrap()[1]).unwrap();
        // 56 samples are left to three ranks: five batches each, the first of them of a whole step.
        for loaded in train.batches_of(&loader, loader.position().epoch()).unwrap() {
            train_on((&mut train, &net), &loaded.unwrap());
        }
        assert_eq!(train.steps(), 10);
    });
    let mut seen = seen.into_inner().unwrap();
    seen.sort_unstable();
    // One of them pads the last round of the three ranks.
    assert_eq!(seen.len(), SAMPLES + 1);
    seen.dedup();
    assert!(seen.into_iter().eq(0..SAMPLES as u32));
}
