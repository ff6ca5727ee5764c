//! A run that was saved and goes on has the bits of one that was not interrupted.

use std::fs;
use std::path::Path;

use candle_core::Module;
use candle_nn::VarMap;
use candle_ops::cross_entropy;
use candle_train::{AdamWHyper, Trainer};
use collective::ProcessGroup;

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
            let loss = train.step(|| cross_entropy(&net.forward(&x)?, &y)).unwrap();
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
        // A new process, whose own first weights are others.
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
