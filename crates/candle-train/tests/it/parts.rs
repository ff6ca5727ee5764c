//! Tests of several trainers with one checkpoint.

use std::path::Path;
use std::time::Duration;

use candle_core::{DType, Device, Module};
use candle_nn::VarMap;
use candle_ops::{cross_entropy, randn};
use candle_train::{AdamWHyper, Clip, Parts, SgdHyper, Trainer, seeded, train_step};
use collective::ProcessGroup;

use super::process::{self, Process};
use super::{Net, SAMPLES, batch, ranks, weights};

/// Two nets with the same names of variables.
fn nets() -> [(VarMap, Net); 2] {
    [1, 2].map(|seed| {
        let vars = VarMap::new();
        let net = Net::new(seeded(&vars, seed, DType::F32, &Device::Cpu)).unwrap();
        (vars, net)
    })
}

/// A trainer in f16 with a schedule, and one in f32 that clips.
fn trainers([(a, _), (b, _)]: &[(VarMap, Net); 2], group: &ProcessGroup) -> [Trainer; 2] {
    let first = Trainer::builder(a).part("first").group(group.clone()).f16();
    let first = first.schedule(|step| 1.0 / (1.0 + step as f64));
    let second = Trainer::builder(b).part("second").group(group.clone()).clip(Clip::norm(0.5));
    let sgd = SgdHyper { lr: 0.1, momentum: 0.9, ..SgdHyper::default() };
    [first.build(AdamWHyper::default()).unwrap(), second.build(sgd).unwrap()]
}

/// Trains the second net on each batch, and the first one on each other.
fn epoch([a, b]: &mut [Trainer; 2], [(_, first), (_, second)]: &[(VarMap, Net); 2], epoch: usize) {
    for (index, rows) in b.batches(SAMPLES, 16, epoch).unwrap().into_iter().enumerate() {
        let (x, y) = batch(&rows);
        let noisy = || &x + randn(0.0, 0.3, x.shape(), DType::F32, &Device::Cpu)?;
        b.step(|| cross_entropy(&second.forward(&noisy()?)?, &y)).unwrap();
        if index % 2 == 1 {
            let teacher = second.forward(&x).unwrap().detach();
            let loss =
                || (first.forward(&noisy()?)?.to_dtype(DType::F32)? - &teacher)?.sqr()?.mean_all();
            a.step(loss).unwrap();
        }
    }
}

/// Trains to an epoch, from the file's.
fn run(group: &ProcessGroup, path: &Path, epochs: usize) -> Vec<Vec<f32>> {
    let nets = nets();
    let mut both = trainers(&nets, group);
    let start = Parts::of(&mut both).resume(path).unwrap();
    for at in start..epochs {
        epoch(&mut both, &nets, at);
        Parts::of(&mut both).save(path, at + 1).unwrap();
    }
    assert!(both[1].steps() > both[0].steps());
    nets.iter().flat_map(|(vars, _)| weights(vars)).collect()
}

#[test]
fn two_trainers_resume_from_one_file_bit_for_bit() {
    let directory = tempfile::tempdir().unwrap();
    let (whole, parts) = (directory.path().join("whole"), directory.path().join("parts"));
    let weights = ranks(2, |group| {
        let expected = run(&group, &whole, 4);
        run(&group, &parts, 2);
        assert_eq!(run(&group, &parts, 4), expected);
        expected
    });
    assert_eq!(weights[0], weights[1]);
    let names = |path: &Path| {
        let bytes = std::fs::read(path).unwrap();
        let file = safetensors::SafeTensors::deserialize(&bytes).unwrap();
        file.names().iter().map(|name| (*name).to_owned()).collect::<Vec<_>>()
    };
    for name in ["first.a.weight", "second.a.weight"] {
        assert!(names(&parts).iter().any(|other| other == name), "{name}");
    }
}

#[test]
fn files_of_other_trainers_are_refused_by_name() {
    let directory = tempfile::tempdir().unwrap();
    let (both, one) = (directory.path().join("both"), directory.path().join("one"));
    ranks(1, |group| {
        let nets = nets();
        let mut all = trainers(&nets, &group);
        Parts::of(&mut all).save_with(&both, 1, &7).unwrap();
        all[0].save(&one, 1).unwrap();
        let before = nets.each_ref().map(|(vars, _)| weights(vars));
        let said = |result: candle_train::Result<usize>| result.unwrap_err().to_string();
        let error = said(all[0].resume(&both));
        assert!(error.contains(r#"it has several trainers, ["first", "second"]"#), "{error}");
        let error = said(Parts::of(&mut all).resume(&one));
        assert!(error.contains("it has one trainer: resume it with `Trainer::resume`"), "{error}");
        let error = said(Parts::of(&mut all[..1]).resume(&both));
        assert!(error.contains(r#"and this program ["first"]"#), "{error}");
        let error = said(Parts::of(&mut all).resume(&both));
        assert!(error.contains("call `resume_with`"), "{error}");
        // Each in the other's place: the second has no loss scale.
        let [(a, _), (b, _)] = &nets;
        let build = |vars, name: &str| {
            let builder = Trainer::builder(vars).part(name).group(group.clone());
            builder.build(AdamWHyper::default()).unwrap()
        };
        let mut others = [build(a, "first"), build(b, "second")];
        let error = said(Parts::of(&mut others).resume(&both).map(drop).map(|()| 0));
        assert!(error.contains("call `resume_with`"), "{error}");
        let error = Parts::of(&mut others).resume_with::<i32>(&both).unwrap_err().to_string();
        assert!(error.contains("part `first`: it was saved with a loss scale"), "{error}");
        assert_eq!(before, nets.each_ref().map(|(vars, _)| weights(vars)));
        let mut same = [build(a, "first"), build(b, "first")];
        let error = said(Parts::of(&mut same).resume(&both));
        assert!(error.contains("two trainers of `Parts` are named `first`"), "{error}");
        let unnamed = Trainer::builder(a).group(group.clone()).build(AdamWHyper::default());
        let error = said(Parts::of([&mut unnamed.unwrap()]).resume(&both));
        assert!(error.contains("`TrainerBuilder::part`"), "{error}");
        // A file of no trainer.
        vars_of(&nets[0]).save(&one).unwrap();
        let error = said(Parts::of(&mut all).resume(&one));
        assert!(error.contains("no checksum"), "{error}");
        // A file of this run keeps its trainers and their data.
        let bytes = std::fs::read(&both).unwrap();
        let error = all[0].save(&both, 2).unwrap_err().to_string();
        assert!(error.contains(r#"it has the trainers ["first", "second"]"#), "{error}");
        let error = Parts::of(&mut all).save(&both, 2).unwrap_err().to_string();
        assert!(error.contains("it has data of each rank"), "{error}");
        assert!(std::fs::read(&both).unwrap() == bytes);
        let error = train_step::optimizer_state(&both).unwrap_err().to_string();
        assert!(error.contains(r#"it has several trainers, ["first", "second"]"#), "{error}");
        // The order of a call does not matter.
        let [first, second] = &mut all;
        assert_eq!(Parts::of([second, first]).resume_with(&both).unwrap(), (1, Some(7)));
        std::fs::remove_file(&both).unwrap();
        let [first, second] = &mut all;
        Parts::of([second, first]).save(&both, 2).unwrap();
        Parts::of(&mut all).save(&both, 3).unwrap();
        assert_eq!(Parts::of(&mut all).resume(&both).unwrap(), 3);
    });
}

/// Trains two trainers with a file each to an epoch, and returns their numbers of steps, as an
/// error if the files are of two epochs. `between` is called between both saves.
fn run_two_files(folder: &Path, epochs: usize, between: impl Fn()) -> Result<[u64; 2], [u64; 2]> {
    let group = ProcessGroup::threads(1, Duration::from_secs(5)).unwrap().remove(0);
    let nets = nets();
    let mut both = trainers(&nets, &group);
    let [a, b] = ["a", "b"].map(|name| folder.join(name));
    let start = both[0].resume(&a).unwrap();
    if both[1].resume(&b).unwrap() != start {
        return Err(both.map(|train| train.steps()));
    }
    for at in start..epochs {
        epoch(&mut both, &nets, at);
        both[1].save(&b, at + 1).unwrap();
        between();
        both[0].save(&a, at + 1).unwrap();
    }
    Ok(both.map(|train| train.steps()))
}

#[test]
fn two_files_of_a_run_killed_between_its_saves_differ_in_their_epochs() {
    let test = "parts::two_files_of_a_run_killed_between_its_saves_differ_in_their_epochs";
    if let Some(folder) = process::folder() {
        let between = || {
            std::fs::write(folder.join("between"), "").unwrap();
            std::thread::sleep(Duration::from_secs(3600));
        };
        run_two_files(&folder, usize::MAX, between).unwrap();
    }
    // Killed in the first epoch, and in the second one.
    for before in [0, 1] {
        let directory = tempfile::tempdir().unwrap();
        let folder = directory.path();
        let [a, b] = run_two_files(folder, before, || ()).unwrap();
        let mut process = Process::start(test, folder);
        process.wait_for(&folder.join("between"));
        drop(process);
        assert_eq!(run_two_files(folder, 3, || ()).unwrap_err(), [a, b + 6]);
    }
    // Whole pairs go on, whatever their numbers of steps.
    let directory = tempfile::tempdir().unwrap();
    for epochs in 1..4 {
        let [a, b] = run_two_files(directory.path(), epochs, || ()).unwrap();
        assert_eq!((a < b, b), (true, 6 * epochs as u64));
    }
}

#[test]
fn two_files_of_one_epoch_differ_in_their_data() {
    let directory = tempfile::tempdir().unwrap();
    let [first, second] = ["a", "b"].map(|name| directory.path().join(name));
    ranks(2, |group| {
        let nets = nets();
        let [mut a, mut b] = trainers(&nets, &group);
        let mut is_equal =
            || a.resume_with::<u64>(&first).unwrap() == b.resume_with(&second).unwrap();
        assert!(is_equal());
        for batches in [3_u64, 4] {
            let [a, b] = trainers(&nets, &group);
            b.save_with(&second, 0, &batches).unwrap();
            assert!(!is_equal());
            a.save_with(&first, 0, &batches).unwrap();
            assert!(is_equal());
        }
    });
}

fn vars_of((vars, _): &(VarMap, Net)) -> &VarMap {
    vars
}

#[test]
fn parts_of_different_groups_and_names_of_entries_are_refused() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("run");
    ranks(2, |group| {
        let nets = nets();
        let alone = ProcessGroup::threads(1, Duration::from_secs(5)).unwrap().remove(0);
        let [mut a, _] = trainers(&nets, &group);
        let [_, mut b] = trainers(&nets, &alone);
        let error = Parts::of([&mut a, &mut b]).save(&path, 1).unwrap_err().to_string();
        assert!(
            error.contains("parts `first` and `second` have process groups of their own"),
            "{error}"
        );
    });
    // Equal ranks of equally large groups.
    let both = nets();
    let group = || ProcessGroup::threads(1, Duration::from_secs(5)).unwrap().remove(0);
    let ([mut a, _], [_, mut b]) = (trainers(&both, &group()), trainers(&both, &group()));
    let error = Parts::of([&mut a, &mut b]).save(&path, 1).unwrap_err().to_string();
    assert!(error.contains("have process groups of their own"), "{error}");
    for name in ["train_step", "candle_train", "", "a.b"] {
        let builder = Trainer::builder(&nets()[0].0).part(name);
        let error = builder.build(AdamWHyper::default()).unwrap_err().to_string();
        assert!(error.contains("`part` is"), "{error}");
    }
}

#[test]
fn ranks_that_step_different_trainers_are_named() {
    let groups = ProcessGroup::threads(2, Duration::from_secs(5)).unwrap();
    let errors = std::thread::scope(|scope| {
        let rank = |group: ProcessGroup| {
            let nets = nets();
            let mut both = trainers(&nets, &group);
            let (x, y) = batch(&[0, 1, 2, 3]);
            let rank = group.rank();
            let (train, net) = (&mut both[rank], &nets[rank].1);
            train.step(|| cross_entropy(&net.forward(&x)?, &y)).unwrap_err().to_string()
        };
        let threads: Vec<_> =
            groups.into_iter().map(|group| scope.spawn(move || rank(group))).collect();
        threads.into_iter().map(|thread| thread.join().unwrap()).collect::<Vec<_>>()
    });
    for error in errors {
        assert!(error.contains("rank 0: `Trainer::step` of part `first`"), "{error}");
        assert!(error.contains("rank 1: `Trainer::step` of part `second`"), "{error}");
    }
}
