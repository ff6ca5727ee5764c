//! Tests that a rule with weights for evaluation is evaluated and saved with these, and trains on
//! with its own.

use candle_core::{DType, Device, Module, Tensor, Var};
use candle_nn::VarMap;
use candle_ops::cross_entropy;
use candle_train::{ScheduleFreeAdamWHyper, SgdHyper, Trainer, WeightAverage};
use collective::ProcessGroup;
use fused_optim::candle::FromVars;
use fused_optim::{CpuOptimizer, Optimizer};

use super::{Net, batch, model, ranks};

const HYPER: ScheduleFreeAdamWHyper = ScheduleFreeAdamWHyper {
    lr: 0.05,
    betas: (0.9, 0.999),
    eps: 1e-8,
    weight_decay: 0.01,
    warmup_steps: 2,
    maximize: false,
};

/// On the CPU. `build` does not take this rule with the feature `cuda`: there is no kernel of it.
fn optimizer(named: &[(String, Var)], _: &Device) -> candle_train::Result<Box<dyn Optimizer>> {
    let vars: Vec<_> = named.iter().map(|(_, var)| var.clone()).collect();
    Ok(Box::new(CpuOptimizer::from_vars(&vars, HYPER)?))
}

/// A model with variables of this type, and a trainer of it.
fn trainer(group: &ProcessGroup, dtype: DType) -> (VarMap, Net, Trainer) {
    let (started, _net) = model(3);
    let vars = VarMap::new();
    let net = Net::new(candle_nn::VarBuilder::from_varmap(&vars, dtype, &Device::Cpu)).unwrap();
    let started = started.data().lock().unwrap().clone();
    for (name, var) in vars.data().lock().unwrap().iter() {
        var.set(&started[name].to_dtype(dtype).unwrap()).unwrap();
    }
    let train = Trainer::builder(&vars).group(group.clone()).seed(7).build_with(optimizer).unwrap();
    (vars, net, train)
}

fn step(train: &mut Trainer, net: &Net, dtype: DType) {
    let from = 8 * (train.steps() as u32 % 8) + train.rank() as u32;
    let (x, y) = batch(&[from, from + 1, from + 2]);
    let x = x.to_dtype(dtype).unwrap();
    train.step(|| cross_entropy(&net.forward(&x)?, &y)).unwrap();
}

/// All values, sorted by names.
fn values(vars: &VarMap) -> Vec<Vec<f32>> {
    let mut named: Vec<_> = vars.data().lock().unwrap().clone().into_iter().collect();
    named.sort_by(|(a, _), (b, _)| a.cmp(b));
    named.iter().map(|(_, var)| floats(var)).collect()
}

fn floats(tensor: &Tensor) -> Vec<f32> {
    tensor.to_dtype(DType::F32).unwrap().flatten_all().unwrap().to_vec1().unwrap()
}

/// The averages of a trainer's weights, by its state.
fn averages(train: &mut Trainer, trained: &[Vec<f32>], dtype: DType) -> Vec<Vec<f32>> {
    let dict = train.optimizer().state_dict().unwrap();
    let b1 = HYPER.betas.0;
    let average = |(index, y): (usize, &Vec<f32>)| {
        let state = &dict.state[&index].tensors;
        let y = state.get("master").unwrap_or(y);
        let x = |(y, z): (&f32, &f32)| ((f64::from(*y) - (1.0 - b1) * f64::from(*z)) / b1) as f32;
        let x: Vec<f32> = y.iter().zip(&state["z"]).map(x).collect();
        floats(&Tensor::new(x, &Device::Cpu).unwrap().to_dtype(dtype).unwrap())
    };
    trained.iter().enumerate().map(average).collect()
}

#[test]
fn averaged_weights_are_evaluated_and_saved_and_training_resumes_bit_for_bit() {
    let directory = tempfile::tempdir().unwrap();
    for dtype in [DType::F32, DType::BF16, DType::F16] {
        for count in [1, 2] {
            let path = directory.path().join(format!("{dtype:?}{count}"));
            ranks(count, |group| {
                let (vars, net, mut train) = trainer(&group, dtype);
                (0..4).for_each(|_| step(&mut train, &net, dtype));
                let trained = values(&vars);
                let expected = averages(&mut train, &trained, dtype);
                assert_ne!(expected, trained);
                assert_eq!(train.evaluate(|| values(&vars)), expected);
                assert_eq!(values(&vars), trained);
                train.save(&path, 1).unwrap();
                assert_eq!(values(&vars), trained);
                let saved = candle_core::safetensors::load(&path, &Device::Cpu).unwrap();
                let names = ["a.bias", "a.weight", "b.bias", "b.weight"];
                assert_eq!(names.map(|name| floats(&saved[name])).to_vec(), expected);
                drop(saved);
                (0..3).for_each(|_| step(&mut train, &net, dtype));
                let undisturbed = values(&vars);
                drop(train);

                let (vars, net, mut train) = trainer(&group, dtype);
                assert_eq!(train.resume(&path).unwrap(), 1);
                assert_eq!(values(&vars), trained);
                assert_eq!(train.evaluate(|| values(&vars)), expected);
                (0..3).for_each(|_| step(&mut train, &net, dtype));
                assert_eq!(values(&vars), undisturbed);
            });
        }
    }
}

#[test]
fn the_trained_weights_of_two_names_are_resumed() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("run");
    let build = || {
        let group = ranks(1, |group| group).remove(0);
        let (vars, net) = model(3);
        let first = vars.data().lock().unwrap()["a.weight"].clone();
        vars.data().lock().unwrap().insert("tied".to_owned(), first);
        let train = Trainer::builder(&vars).group(group).build_with(optimizer).unwrap();
        (vars, net, train)
    };
    let (vars, net, mut train) = build();
    (0..3).for_each(|_| step(&mut train, &net, DType::F32));
    train.save(&path, 1).unwrap();
    let trained = values(&vars);
    let saved = candle_core::safetensors::load(&path, &Device::Cpu).unwrap();
    assert_eq!(floats(&saved["tied"]), floats(&saved["a.weight"]));
    assert_ne!(floats(&saved["tied"]), trained[1]);
    let (vars, _net, mut train) = build();
    train.resume(&path).unwrap();
    assert_eq!(values(&vars), trained);
}

#[test]
fn averages_of_weights_are_evaluated_saved_and_resumed() {
    let directory = tempfile::tempdir().unwrap();
    let rules = [WeightAverage::Ema { decay: 0.7 }, WeightAverage::Swa { start: 3 }];
    for (rule, name) in rules.into_iter().zip(["ema", "swa"]) {
        let path = directory.path().join(name);
        ranks(2, |group| {
            let build = |vars: &VarMap| {
                let builder = Trainer::builder(vars).group(group.clone()).average(rule);
                builder.build(SgdHyper { lr: 0.1, ..SgdHyper::default() }).unwrap()
            };
            let (vars, net) = model(3);
            let (mut train, mut after) = (build(&vars), Vec::new());
            for at in 0..6 {
                if at == 4 {
                    train.save(&path, 1).unwrap();
                }
                step(&mut train, &net, DType::F32);
                after.push(values(&vars));
            }
            let mut expected = after[0].clone();
            for (at, weights) in after.iter().enumerate().skip(1) {
                let share = match rule {
                    WeightAverage::Ema { decay } => 1.0 - decay as f32,
                    WeightAverage::Swa { .. } if at < 3 => 1.0,
                    WeightAverage::Swa { .. } => 1.0 / (at - 1) as f32,
                };
                for (mean, new) in expected.iter_mut().flatten().zip(weights.iter().flatten()) {
                    *mean += share * (new - *mean);
                }
            }
            let evaluated = train.evaluate(|| values(&vars));
            for (mean, found) in expected.iter().flatten().zip(evaluated.iter().flatten()) {
                assert!((mean - found).abs() < 1e-6, "{rule:?}");
            }
            assert_eq!(values(&vars), after[5]);
            // The file has the averages as the model's weights.
            let read = candle_core::safetensors::load(&path, &Device::Cpu).unwrap();
            let (others, net) = model(9);
            let mut train = build(&others);
            assert_eq!(train.resume(&path).unwrap(), 1);
            assert_eq!(values(&others), after[3]);
            let means = train.evaluate(|| values(&others));
            let mut names: Vec<_> = others.data().lock().unwrap().keys().cloned().collect();
            names.sort();
            assert_eq!(names.iter().map(|name| floats(&read[name])).collect::<Vec<_>>(), means);
            for _ in 0..2 {
                step(&mut train, &net, DType::F32);
            }
            assert_eq!(values(&others), after[5]);
            assert_eq!(train.evaluate(|| values(&others)), evaluated);
        });
    }
}
