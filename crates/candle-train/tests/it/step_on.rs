//! A step that is given its batch has the bits of one whose closure refers to tensors.

use candle_core::{Device, Module};
use candle_ops::cross_entropy;
use candle_train::train_data::{Array, Batch};
use candle_train::{
    AdamWHyper, CompileMode, CompileOptions, Fields, Outcome, Trainer, TrainerBuilder, tensor,
};
use collective::ProcessGroup;

use super::{FEATURES, batch, model, ranks, weights};

fn arrays(rows: &[u32]) -> Batch {
    let (x, y) = batch(rows);
    let x = x.flatten_all().unwrap().to_vec1::<f32>().unwrap();
    let y = y.to_vec1::<i64>().unwrap();
    Batch::new()
        .with("x", Array::new([rows.len(), FEATURES], x).unwrap())
        .with("y", Array::new([rows.len()], y).unwrap())
}

/// Losses, outcomes and weights of some steps.
fn run(
    group: ProcessGroup,
    with: impl Fn(TrainerBuilder) -> TrainerBuilder,
    on_batch: bool,
    weighted: bool,
) -> (Vec<f32>, Vec<Outcome>, Vec<Vec<f32>>) {
    let (vars, net) = model(3);
    let builder = with(Trainer::builder(&vars).group(group)).accumulate(2);
    let mut train = builder.build(AdamWHyper { lr: 0.01, ..AdamWHyper::default() }).unwrap();
    let (mut losses, mut outcomes) = (Vec::new(), Vec::new());
    for index in 0..8 {
        let first = 8 * index + 4 * train.rank() as u32;
        let rows: Vec<u32> = (first..first + 4 - index % 2).collect();
        let of = |fields: &Fields| cross_entropy(&net.forward(fields.get("x")?)?, fields.get("y")?);
        let (x, y) = batch(&rows);
        let forward = || cross_entropy(&net.forward(&x)?, &y);
        let step = match (on_batch, weighted) {
            (true, false) => train.step_on(&arrays(&rows), of),
            (true, true) => train.step_on_weighted(rows.len(), &arrays(&rows), of),
            (false, false) => train.step(forward),
            (false, true) => train.step_weighted(rows.len(), forward),
        };
        let step = step.unwrap();
        losses.push(step.loss.to_dtype(candle_core::DType::F32).unwrap().to_scalar().unwrap());
        outcomes.push(step.outcome);
    }
    (losses, outcomes, weights(&vars))
}

#[test]
fn a_batch_gives_the_bits_of_its_tensors() {
    let mode = CompileMode::MaxAutotune;
    let options = CompileOptions { mode, fullgraph: true, ..CompileOptions::default() };
    let compiled = |builder: TrainerBuilder| builder.compile(options.clone());
    let all: [&(dyn Fn(TrainerBuilder) -> TrainerBuilder + Sync); 3] =
        [&|builder| builder, &TrainerBuilder::bf16, &compiled];
    for with in all {
        for weighted in [false, true] {
            let run = |on_batch| ranks(2, |group| run(group, with, on_batch, weighted));
            assert_eq!(run(true), run(false));
        }
    }
}

#[test]
fn a_missing_field_is_an_error_with_the_others() {
    let (vars, net) = model(3);
    let builder = Trainer::builder(&vars).group(super::recovery::alone());
    let mut train = builder.build(AdamWHyper::default()).unwrap();
    let error = train.step_on(&arrays(&[1, 2]), |fields| net.forward(fields.get("z")?));
    let error = error.unwrap_err().to_string();
    assert!(error.contains("the batch has no field `z`; it has [\"x\", \"y\"]"), "{error}");
}

#[test]
fn fields_keep_the_order_of_the_batch() {
    let fields = Fields::of(&arrays(&[1]), |array| tensor(array, &Device::Cpu)).unwrap();
    let names: Vec<_> = fields.iter().map(|(name, _)| name).collect();
    assert_eq!(names, ["x", "y"]);
    assert!(fields.find("z").is_none());
}
