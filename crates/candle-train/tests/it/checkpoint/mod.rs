//! Tests of the rules of checkpoints: a refused call changes nothing on any rank, ranks have the
//! same file, and a file belongs to one run.

mod file;
mod processes;

use std::cell::RefCell;
use std::fs;
use std::path::{Path, PathBuf};

use candle_core::{DType, Device, Module, ModuleT, Tensor, Var};
use candle_nn::{VarBuilder, VarMap};
use candle_ops::{cross_entropy, nn};
use candle_train::{AdamWHyper, Trainer};
use collective::ProcessGroup;
use fused_optim::StateDict;
use serde::de::IgnoredAny;
use serde::{Deserialize, Serialize};

use super::{Net, batch, model, ranks, weights};

fn trainer(vars: &VarMap, group: &ProcessGroup) -> Trainer {
    let hyper = AdamWHyper { lr: 1e-2, ..AdamWHyper::default() };
    Trainer::builder(vars).group(group.clone()).f16().build(hyper).unwrap()
}

fn alone() -> ProcessGroup {
    ProcessGroup::threads(1, std::time::Duration::from_secs(10)).unwrap().remove(0)
}

fn step(train: &mut Trainer, net: &Net, first: u32) {
    let (x, y) = batch(&[first, first + 1, first + 2, first + 3]);
    train.step(|| cross_entropy(&net.forward(&x)?, &y)).unwrap();
}

/// Trains a model for three steps and saves it.
fn save_a_run(path: &Path, seed: u32, epoch: usize) {
    let (vars, net) = model(seed);
    let mut train = trainer(&vars, &alone());
    (0..3).for_each(|first| step(&mut train, &net, first));
    train.save(path, epoch).unwrap();
}

/// Everything that a resume changes.
type State = (Vec<Vec<f32>>, StateDict, f32, f64, u64);

fn state(train: &mut Trainer, vars: &VarMap) -> State {
    let (scale, lr, steps) = (train.loss_scale(), train.learning_rate(), train.steps());
    (weights(vars), train.optimizer().state_dict().unwrap(), scale, lr, steps)
}

/// Resumes on two ranks, of which each has a file of its own, and returns the errors. Asserts that
/// nothing was changed.
fn refusal(files: [&Path; 2]) -> Vec<String> {
    let undisturbed = ranks(2, |group| {
        let (vars, net) = model(9);
        let mut train = trainer(&vars, &group);
        (0..3).for_each(|first| step(&mut train, &net, first));
        state(&mut train, &vars)
    });
    let all = ranks(2, |group| {
        let (vars, net) = model(9);
        let mut train = trainer(&vars, &group);
        let before = state(&mut train, &vars);
        let error = train.resume(files[group.rank()]).unwrap_err().to_string();
        assert_eq!(state(&mut train, &vars), before);
        (0..3).for_each(|first| step(&mut train, &net, first));
        (error, state(&mut train, &vars))
    });
    let (errors, states): (Vec<_>, Vec<_>) = all.into_iter().unzip();
    assert_eq!(states, undisturbed);
    errors
}

#[test]
fn resume_refuses_files_of_different_runs() {
    let directory = tempfile::tempdir().unwrap();
    let [a, b, later] = ["a", "b", "later"].map(|name| directory.path().join(name));
    save_a_run(&a, 1, 3);
    save_a_run(&b, 2, 3);
    save_a_run(&later, 1, 6);
    for files in [[&a, &b], [&a, &later]] {
        for error in refusal(files.map(|path| &**path)) {
            assert!(error.contains("rank 1 has another file than rank 0"), "{error}");
        }
    }
}

#[test]
fn a_file_damaged_on_one_rank_changes_nothing_on_any() {
    let directory = tempfile::tempdir().unwrap();
    let [good, bad] = ["good", "bad"].map(|name| directory.path().join(name));
    save_a_run(&good, 1, 3);
    let mut bytes = fs::read(&good).unwrap();
    let middle = bytes.len() / 2;
    bytes[middle] ^= 1;
    fs::write(&bad, bytes).unwrap();
    for (files, rank) in [([&good, &bad], 1), ([&bad, &good], 0)] {
        for error in refusal(files.map(|path| &**path)) {
            let expected = format!("rank {rank}: its checksum does not match");
            assert!(error.contains(&expected), "{error}");
        }
    }
}

#[test]
fn resume_begins_anew_only_if_no_rank_has_the_file() {
    let directory = tempfile::tempdir().unwrap();
    let [good, none] = ["good", "none"].map(|name| directory.path().join(name));
    save_a_run(&good, 1, 3);
    for (files, has) in [([&good, &none], [0, 1]), ([&none, &good], [1, 0])] {
        for error in refusal(files.map(|path| &**path)) {
            let expected = format!("rank {} has it, rank {} does not", has[0], has[1]);
            assert!(error.contains(&expected), "{error}");
        }
    }
    ranks(2, |group| {
        let (vars, _net) = model(9);
        assert_eq!(trainer(&vars, &group).resume(&none).unwrap(), 0);
    });
}

#[test]
fn resume_reports_a_path_that_cannot_be_looked_at() {
    let directory = tempfile::tempdir().unwrap();
    let path = |name: &str| directory.path().join(name);
    fs::write(path("file"), "text").unwrap();
    std::os::unix::fs::symlink(path("loop"), path("loop")).unwrap();
    let _socket = std::os::unix::net::UnixListener::bind(path("socket")).unwrap();
    for (name, says) in [
        ("file/run", "Not a directory"),
        ("loop", "symbolic links"),
        ("socket", "not a regular file"),
        (".", "is a directory"),
        ("file", "no checksum"),
    ] {
        let (vars, net) = model(1);
        let mut train = trainer(&vars, &alone());
        step(&mut train, &net, 0);
        let before = state(&mut train, &vars);
        let error = train.resume(path(name)).unwrap_err().to_string();
        assert!(error.contains(says), "{name}: {error}");
        assert_eq!(state(&mut train, &vars), before);
        if name != "file" {
            let error = train.save(path(name), 1).unwrap_err().to_string();
            assert!(error.contains(says), "{name}: {error}");
        }
    }
    assert_eq!(fs::read_dir(directory.path()).unwrap().count(), 3);
}

#[test]
fn data_of_any_serde_type_are_resumed() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("run");
    let (vars, _net) = model(1);
    let mut train = trainer(&vars, &alone());
    let odd = (f64::INFINITY, f32::NEG_INFINITY, f64::NAN, None::<u8>, Some(3), u128::MAX);
    train.save_with(&path, 4, &odd).unwrap();
    let (epoch, resumed) = train.resume_with::<(f64, f32, f64, _, _, _)>(&path).unwrap();
    let resumed = resumed.unwrap();
    assert!(resumed.2.is_nan());
    assert_eq!((epoch, (resumed.0, resumed.1)), (4, (odd.0, odd.1)));
    assert_eq!((resumed.3, resumed.4, resumed.5), (odd.3, odd.4, odd.5));
    train.save_with(&path, 5, &None::<usize>).unwrap();
    assert_eq!(train.resume_with::<Option<usize>>(&path).unwrap(), (5, Some(None)));
    assert_eq!(train.resume(&path).unwrap(), 5);
    let error = train.resume_with::<String>(&path).unwrap_err().to_string();
    assert!(error.contains("not of the type to resume"), "{error}");
}

/// They are sent as bytes, because an object of [`collective`] has at most 256 MiB as JSON, in
/// which a byte has up to four.
#[test]
fn large_data_of_the_ranks_are_resumed() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("run");
    let data = |rank: usize| ["a", "z"][rank].repeat((80 << 20) * rank + 1);
    ranks(2, |group| {
        let (vars, _net) = model(1);
        let mut train = trainer(&vars, &group);
        let own = data(group.rank());
        train.save_with(&path, 2, &own).unwrap();
        assert!(train.resume_with::<String>(&path).unwrap() == (2, Some(own)));
    });
}

#[test]
fn data_that_one_rank_cannot_save_fail_on_all() {
    struct Fails(bool);
    impl Serialize for Fails {
        fn serialize<S: serde::Serializer>(&self, to: S) -> Result<S::Ok, S::Error> {
            match self.0 {
                true => Err(serde::ser::Error::custom("no bytes today")),
                false => to.serialize_u8(1),
            }
        }
    }
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("run");
    ranks(2, |group| {
        let (vars, _net) = model(1);
        let train = trainer(&vars, &group);
        let own = Fails(group.rank() == 1);
        let error = train.save_with(&path, 0, &own).unwrap_err().to_string();
        assert!(error.contains("rank 1: the data cannot be saved: no bytes today"), "{error}");
        let nested = (0..300).fold(serde_json::Value::Null, |inner, _| vec![inner].into());
        let error = train.save_with(&path, 0, &nested).unwrap_err().to_string();
        assert!(error.contains("the data could not be resumed"), "{error}");
        let error = train.save(&path, group.rank()).unwrap_err().to_string();
        assert!(error.contains("the epoch to save: rank 0 has 0, rank 1 1"), "{error}");
        assert!(!path.exists());
        train.save(&path, 0).unwrap();
    });
}

#[test]
fn data_of_the_ranks_are_neither_dropped_nor_taken_for_others() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("run");
    ranks(2, |group| {
        let (vars, _net) = model(1);
        trainer(&vars, &group).save_with(&path, 2, &(7 + group.rank())).unwrap();
    });
    let (vars, _net) = model(1);
    let mut train = trainer(&vars, &alone());
    let error = train.resume(&path).unwrap_err().to_string();
    assert!(error.contains("call `resume_with`"), "{error}");
    let error = train.resume_with::<usize>(&path).unwrap_err().to_string();
    assert!(error.contains("this run has 1: resume with 2"), "{error}");
    assert_eq!(train.resume_with_all(&path).unwrap(), (2, Some(vec![7, 8])));
    assert_eq!(train.resume_with_all::<IgnoredAny>(&path).unwrap().1.unwrap().len(), 2);
    let error = train.save(&path, 3).unwrap_err().to_string();
    assert!(error.contains("it has data of each rank"), "{error}");
    let path = path.with_extension("other");
    train.save(&path, 3).unwrap();
    let error = train.resume_with::<usize>(&path).unwrap_err().to_string();
    assert!(error.contains("it was saved by `save`"), "{error}");
    assert_eq!(train.resume_with_all::<usize>(&path).unwrap(), (3, Some(vec![])));
}

#[test]
fn resume_drops_batches_in_hand() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("run");
    let var = Var::new(&[0_f32], &Device::Cpu).unwrap();
    let vars = VarMap::new();
    vars.data().lock().unwrap().insert("w".to_owned(), var.clone());
    let hyper = candle_train::SgdHyper { lr: 1.0, ..Default::default() };
    let builder = Trainer::builder(&vars).group(alone()).accumulate(2);
    let mut train = builder.build(hyper).unwrap();
    let batch = |train: &mut Trainer, gradient: f64| {
        train.step(|| (var.as_tensor() * gradient)?.sum_all()).unwrap();
    };
    train.save(&path, 0).unwrap();
    batch(&mut train, 100.0);
    train.resume(&path).unwrap();
    batch(&mut train, 1.0);
    assert_eq!(weights(&vars), [[0.0]]);
    batch(&mut train, 1.0);
    assert_eq!(weights(&vars), [[-1.0]]);
}

#[test]
fn resume_refuses_another_seed() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("run");
    let build = |seed| {
        let (vars, _net) = model(1);
        let builder = Trainer::builder(&vars).group(alone()).seed(seed);
        builder.build(AdamWHyper::default()).unwrap()
    };
    build(1).save(&path, 2).unwrap();
    let error = build(2).resume(&path).unwrap_err().to_string();
    assert!(error.contains("seed 1") && error.contains("`.seed(1)`"), "{error}");
    assert_eq!(build(1).resume(&path).unwrap(), 2);
}

#[test]
fn replaced_and_removed_variables_are_named() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("run");
    let (vars, net) = model(1);
    let mut train = trainer(&vars, &alone());
    train.save(&path, 0).unwrap();
    let (x, y) = batch(&[0, 1]);
    for is_replaced in [true, false] {
        let mut map = vars.data().lock().unwrap();
        let old = map.remove("a.weight").unwrap();
        if is_replaced {
            map.insert(
                "a.weight".to_owned(),
                Var::zeros((4, 32), DType::F32, old.device()).unwrap(),
            );
        }
        drop(map);
        let stepped = train.step(|| cross_entropy(&net.forward(&x)?, &y));
        let errors = [stepped.map(drop), train.save(&path, 0), train.resume(&path).map(drop)];
        for error in errors {
            let error = error.unwrap_err().to_string();
            let what = if is_replaced { "has been replaced" } else { "has been removed" };
            assert!(error.contains("`a.weight`") && error.contains(what), "{error}");
        }
        vars.data().lock().unwrap().insert("a.weight".to_owned(), old);
        train.resume(&path).unwrap();
    }
}

#[test]
fn a_variable_of_two_names_has_one_value_in_a_file() {
    let directory = tempfile::tempdir().unwrap();
    let [equal, differ] = ["equal", "differ"].map(|name| directory.path().join(name));
    let build = |is_tied: bool| {
        let (vars, net) = model(1);
        let weight = vars.data().lock().unwrap()["a.weight"].clone();
        let second =
            if is_tied { weight } else { Var::from_tensor(&weight.copy().unwrap()).unwrap() };
        vars.data().lock().unwrap().insert("tied.weight".to_owned(), second);
        let builder = Trainer::builder(&vars).group(alone());
        let builder = if is_tied { builder } else { builder.frozen(["tied.*"]) };
        (builder.build(AdamWHyper::default()).unwrap(), vars, net)
    };
    let (mut train, _, net) = build(false);
    train.save(&equal, 1).unwrap();
    step(&mut train, &net, 0);
    train.save(&differ, 1).unwrap();
    let (mut train, vars, net) = build(true);
    step(&mut train, &net, 0);
    let before = state(&mut train, &vars);
    let error = train.resume(&differ).unwrap_err().to_string();
    assert!(error.contains("`a.weight` and `tied.weight` have different values"), "{error}");
    assert_eq!(state(&mut train, &vars), before);
    assert_eq!(train.resume(&equal).unwrap(), 1);
}

thread_local! {
    /// A file that is cut when [`Cuts`] is read.
    static CUT: RefCell<Option<PathBuf>> = const { RefCell::new(None) };
}

/// Data that are read after the file was verified and before it is read again.
struct Cuts;

impl<'de> Deserialize<'de> for Cuts {
    fn deserialize<D: serde::Deserializer<'de>>(from: D) -> Result<Self, D::Error> {
        if let Some(path) = CUT.take() {
            let file = fs::File::options().write(true).open(path).unwrap();
            file.set_len(file.metadata().unwrap().len() / 2).unwrap();
        }
        u8::deserialize(from).map(|_| Self)
    }
}

#[test]
fn a_file_lost_while_the_state_changes_stops_all_ranks_until_they_have_resumed() {
    let directory = tempfile::tempdir().unwrap();
    let [good, bad] = ["good", "bad"].map(|name| directory.path().join(name));
    // Longer than what is read at once.
    let build = |vars: &VarMap, group: &ProcessGroup| {
        let large = Var::zeros(1 << 20, DType::F32, &Device::Cpu).unwrap();
        vars.data().lock().unwrap().insert("large".to_owned(), large);
        let builder = Trainer::builder(vars).group(group.clone()).frozen(["large"]);
        builder.build(AdamWHyper::default()).unwrap()
    };
    ranks(2, |group| {
        let (vars, _net) = model(1);
        build(&vars, &group).save_with(&good, 2, &7_u8).unwrap();
    });
    fs::copy(&good, &bad).unwrap();
    ranks(2, |group| {
        let (vars, net) = model(9);
        let mut train = build(&vars, &group);
        let path = if group.rank() == 1 { &bad } else { &good };
        CUT.set((group.rank() == 1).then(|| bad.clone()));
        let error = train.resume_with::<Cuts>(path).err().unwrap().to_string();
        assert!(error.contains("rank 1: ") && error.contains("has been changed"), "{error}");
        let error = train.save(directory.path().join("other"), 0).unwrap_err().to_string();
        assert!(error.contains("resume again"), "{error}");
        let (x, y) = batch(&[0, 1]);
        let error = train.step(|| cross_entropy(&net.forward(&x)?, &y)).unwrap_err().to_string();
        assert!(error.contains("resume again"), "{error}");
        assert_eq!(train.resume_with::<u8>(&good).unwrap(), (2, Some(7)));
        assert_eq!(weights(&vars)[..4], weights(&model(1).0));
        step(&mut train, &net, 0);
    });
}

#[test]
fn an_evaluation_has_the_same_statistics_on_all_ranks_and_after_a_resume() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("run");
    let build = |group: &ProcessGroup| {
        let (vars, net) = model(3);
        let vb = VarBuilder::from_varmap(&vars, DType::F32, &Device::Cpu);
        let norm = nn::batch_norm(16, 1e-5, vb.pp("norm")).unwrap();
        let builder = Trainer::builder(&vars).group(group.clone()).f16();
        let hyper = AdamWHyper { lr: 1e-2, ..AdamWHyper::default() };
        (builder.accumulate(2).build(hyper).unwrap(), norm, net)
    };
    // The same samples on all ranks, so that only statistics can differ.
    let evaluate = |train: &mut Trainer, norm: &nn::BatchNorm, net: &Net| {
        let (x, y) = batch(&[60, 61, 62, 63]);
        let loss = train.evaluate(|| cross_entropy(&net.forward(&norm.forward_t(&x, false)?)?, &y));
        loss.unwrap().to_scalar::<f32>().unwrap()
    };
    let losses = ranks(2, |group| {
        let (mut train, norm, net) = build(&group);
        for row in 0..8 {
            let (x, y) = batch(&[row * 2 + group.rank() as u32, 40 + row]);
            let forward = || cross_entropy(&net.forward(&norm.forward_t(&x, true)?)?, &y);
            train.step(forward).unwrap();
        }
        let before = evaluate(&mut train, &norm, &net);
        train.save(&path, 1).unwrap();
        let (mut train, norm, net) = build(&group);
        train.resume(&path).unwrap();
        [before, evaluate(&mut train, &norm, &net)]
    });
    let first = losses[0][0];
    assert_eq!(losses, [[first; 2]; 2]);
}

#[test]
fn variables_of_all_types_are_saved() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("run");
    let (vars, _net) = model(1);
    let types = [DType::U8, DType::U32, DType::I16, DType::I32, DType::I64, DType::F64];
    let halves = [DType::F16, DType::BF16];
    for (at, dtype) in types.into_iter().chain(halves).enumerate() {
        let values = Tensor::arange(0_f32, 5.0, &Device::Cpu).unwrap().to_dtype(dtype).unwrap();
        let name = format!("constant.{at}");
        vars.data().lock().unwrap().insert(name, Var::from_tensor(&values).unwrap());
    }
    let builder = Trainer::builder(&vars).group(alone()).frozen(["constant.*"]);
    let mut train = builder.build(AdamWHyper::default()).unwrap();
    train.save(&path, 1).unwrap();
    let constants = || {
        let map = vars.data().lock().unwrap();
        let all: Vec<_> = (0..8).map(|at| map[&format!("constant.{at}")].clone()).collect();
        all
    };
    let saved = candle_core::safetensors::load(&path, &Device::Cpu).unwrap();
    for (at, var) in constants().iter().enumerate() {
        assert_eq!(saved[&format!("constant.{at}")].dtype(), var.dtype());
        var.set(&var.zeros_like().unwrap()).unwrap();
    }
    train.resume(&path).unwrap();
    for var in constants() {
        let values = var.to_dtype(DType::F32).unwrap().to_vec1::<f32>().unwrap();
        assert_eq!(values, [0.0, 1.0, 2.0, 3.0, 4.0]);
    }
}
