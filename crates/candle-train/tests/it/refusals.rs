//! Tests of models and ranks that a trainer refuses by name, and of unusual ones that it trains.

use std::cell::Cell;
use std::rc::Rc;

use candle_core::{DType, Device, Result, Tensor, Var};
use candle_nn::VarMap;
use candle_train::{SgdHyper, Trainer};

use super::recovery::{alone, loss, model, sgd, value};
use super::{ranks, weights};

#[test]
fn ranks_with_other_rates_are_named_in_the_same_step() {
    let errors = ranks(3, |group| {
        let (vars, all) = model(&["w"]);
        let rank = group.rank();
        let factor = move |step| if step == 1 && rank == 2 { 0.5 } else { 1.0 };
        let mut train = sgd(Trainer::builder(&vars).group(group.clone()).schedule(factor));
        train.step(|| loss(&all[0], 1.0)).unwrap();
        let schedules = train.step(|| loss(&all[0], 1.0)).unwrap_err().to_string();
        drop(train);
        let mut train = sgd(Trainer::builder(&vars).group(group));
        let param = fused_optim::HyperParam::WeightDecay;
        if rank == 1 {
            train.optimizer().set_hyper_param(0, param, 0.25).unwrap();
        }
        let set = train.step(|| loss(&all[0], 1.0)).unwrap_err().to_string();
        train.optimizer().set_hyper_param(0, param, 0.0).unwrap();
        train.step(|| loss(&all[0], 1.0)).unwrap();
        assert_eq!(value(&all[0]), -2.0);
        [schedules, set]
    });
    for [schedules, set] in errors {
        assert!(schedules.contains("rank 0 has learning rate 1.0"), "{schedules}");
        assert!(schedules.contains("rank 2 learning rate 0.5"), "{schedules}");
        assert!(set.contains("rank 1") && set.contains("weight decay 0.25"), "{set}");
    }
}

#[test]
fn a_rank_that_cannot_build_its_trainer_is_an_error_on_all() {
    let hyper = SgdHyper { lr: 1.0, ..SgdHyper::default() };
    let builds = |kind: usize, is_bad: bool, group| {
        let (vars, _all) = model(&["w"]);
        let vars = if is_bad && kind == 3 { VarMap::new() } else { vars };
        let builder = Trainer::builder(&vars).group(group);
        match kind {
            _ if !is_bad => builder.build(hyper),
            0 => builder.frozen(["head.*"]).build(hyper),
            1 => builder.accumulate(0).build(hyper),
            2 => builder.build(SgdHyper { lr: -1.0, ..hyper }),
            _ => builder.build(hyper),
        }
    };
    let errors = ranks(2, |group| {
        let errors = [0, 1, 2, 3].map(|kind| {
            let built = builds(kind, group.rank() == 1, group.clone());
            built.map(drop).unwrap_err().to_string()
        });
        builds(0, false, group).unwrap();
        errors
    });
    for (first, second) in errors[0].iter().zip(&errors[1]) {
        assert!(first.contains("rank 1 cannot build its trainer"), "{first}");
        assert!(first.contains(second.as_str()), "{first}: {second}");
    }
    assert!(errors[1][0].contains("head.*"), "{errors:?}");
}

#[test]
fn ranks_with_other_variables_are_named_on_all() {
    let insert = |vars: &VarMap, name: &str, values: Tensor| {
        let var = Var::from_tensor(&values).unwrap();
        vars.data().lock().unwrap().insert(name.to_owned(), var);
    };
    let errors = ranks(2, |group| {
        let errors = [0, 1, 2].map(|kind| {
            let (vars, _all) = model(&["a", "b"]);
            let mut builder = Trainer::builder(&vars).group(group.clone());
            match kind {
                _ if group.rank() == 0 => {}
                0 => insert(&vars, "steps", Tensor::zeros(3, DType::I64, &Device::Cpu).unwrap()),
                1 => insert(&vars, "b", Tensor::zeros(2, DType::F32, &Device::Cpu).unwrap()),
                _ => builder = builder.frozen(["b"]),
            }
            builder.build(SgdHyper::default()).map(drop).unwrap_err().to_string()
        });
        Trainer::builder(&model(&["a"]).0).group(group).build(SgdHyper::default()).unwrap();
        errors
    });
    for errors in errors {
        for (error, says) in errors.iter().zip([
            "rank 0 has nothing; rank 1 other variable `steps` [3] I64",
            "rank 0 has trained variable `b` [1] F32; rank 1 trained variable `b` [2] F32",
            "rank 0 has trained variable `b` [1] F32; rank 1 other variable `b` [1] F32",
        ]) {
            assert!(error.contains(says), "{error}");
        }
    }
}

#[test]
fn a_variable_with_two_names_is_frozen_by_either() {
    for frozen in ["a", "b"] {
        let (vars, all) = model(&["a", "c"]);
        vars.data().lock().unwrap().insert("b".to_owned(), all[0].clone());
        let mut train = sgd(Trainer::builder(&vars).group(alone()).frozen([frozen]));
        train.step(|| loss(&all[0], 1.0)? + loss(&all[1], 1.0)?).unwrap();
        assert_eq!((value(&all[0]), value(&all[1])), (0.0, -1.0));
        let builder = Trainer::builder(&vars).group(alone()).frozen([frozen, "c"]);
        let error = builder.build(SgdHyper::default()).unwrap_err().to_string();
        assert!(error.contains("all are frozen"), "{error}");
    }
}

#[test]
fn names_that_a_checkpoint_needs_are_refused_for_variables() {
    for name in ["__metadata__", "candle_train.trainer"] {
        let build = || Trainer::builder(&model(&["w", name]).0).build(SgdHyper::default());
        let error = build().unwrap_err().to_string();
        assert!(error.contains(name) && error.contains("are reserved"), "{error}");
    }
}

#[test]
fn a_detached_loss_is_refused_also_with_unused_parameters() {
    for count in [1, 2] {
        for (accumulate, find_unused) in [(1, true), (1, false), (2, true), (2, false)] {
            let errors = ranks(count, |group| {
                let (vars, all) = model(&["w"]);
                let detaches = group.rank() + 1 == count;
                let builder = Trainer::builder(&vars).group(group).accumulate(accumulate);
                let mut train =
                    sgd(if find_unused { builder.find_unused_parameters() } else { builder });
                for _ in 1..accumulate {
                    train.step(|| loss(&all[0], 1.0)).unwrap();
                }
                let bad =
                    || if detaches { Ok(loss(&all[0], 1.0)?.detach()) } else { loss(&all[0], 1.0) };
                let error = train.step(bad).unwrap_err().to_string();
                assert_eq!((train.steps(), value(&all[0])), (0, 0.0));
                for _ in 0..accumulate {
                    train.step(|| loss(&all[0], 1.0)).unwrap();
                }
                assert_eq!((train.steps(), value(&all[0])), (1, -1.0));
                error
            });
            assert!(errors[count - 1].contains("without `detach`"), "{errors:?}");
            assert!(count == 1 || errors[0].contains("rank 1 failed"), "{errors:?}");
        }
    }
}

#[test]
fn a_parameter_unused_on_one_rank_is_named_on_all_and_the_next_step_is_right() {
    let errors = ranks(2, |group| {
        let (vars, all) = model(&["a", "b"]);
        let rank = group.rank();
        let mut train = sgd(Trainer::builder(&vars).group(group));
        let good = || loss(&all[0], 1.0)? + loss(&all[1], 1.0)?;
        let error = train.step(|| if rank == 1 { loss(&all[0], 100.0) } else { good() });
        train.step(good).unwrap();
        assert_eq!(weights(&vars), [[-1.0], [-1.0]]);
        error.unwrap_err().to_string()
    });
    assert!(errors[1].contains("find_unused_parameters"), "{errors:?}");
    assert!(
        errors.iter().all(|error| error.contains("rank 1") && error.contains('b')),
        "{errors:?}"
    );
}

#[test]
fn a_mean_that_one_rank_cannot_read_is_an_error_on_all() {
    let errors = ranks(2, |group| {
        let (vars, _all) = model(&["w"]);
        let train = sgd(Trainer::builder(&vars).group(group));
        let value = Tensor::ones(1 + train.rank(), DType::F32, &Device::Cpu).unwrap();
        let error = train.mean(&value).unwrap_err().to_string();
        assert_eq!(train.mean(&value.get(0).unwrap()).unwrap(), 1.0);
        error
    });
    assert!(errors[0].contains("`Trainer::mean` failed on rank 1"), "{errors:?}");
    assert!(errors[1].contains("[2]"), "{errors:?}");
}

#[test]
fn state_of_an_earlier_step_must_be_detached() {
    let forwards: [fn(&Tensor, &Tensor) -> Result<Tensor>; 3] = [
        |w, h| (w * h)?.tanh(),
        |w, h| candle_ops::relu(&(w * h)?),
        |w, h| {
            candle_ops::linear(&candle_ops::relu(h)?.reshape((1, 1))?, &w.reshape((1, 1))?, None)?
                .reshape(1)
        },
    ];
    for (index, forward) in forwards.into_iter().enumerate() {
        let (vars, all) = model(&["w"]);
        all[0].set(&Tensor::new(&[0.5_f32], &Device::Cpu).unwrap()).unwrap();
        let mut train = sgd(Trainer::builder(&vars).group(alone()).check_gradients(false));
        let state = Rc::new(Cell::new(Some(Tensor::ones(1, DType::F32, &Device::Cpu).unwrap())));
        let run = |detach: bool| {
            let h = state.take().unwrap();
            let h = forward(&all[0], &if detach { h.detach() } else { h })?;
            state.set(Some(h.clone()));
            h.sum_all()
        };
        train.step(|| run(false)).unwrap();
        let error = train.step(|| run(false)).unwrap_err().to_string();
        assert!(
            error.contains("state of an earlier batch") && error.contains("`detach`"),
            "{index}: {error}"
        );
        for _ in 0..3 {
            train.step(|| run(true)).unwrap();
        }
    }
}

#[test]
fn a_parameter_used_only_in_an_earlier_batch_of_a_step_is_averaged() {
    for count in [1, 2] {
        for find_unused in [false, true] {
            let all = ranks(count, |group| {
                let (vars, all) = model(&["a", "b"]);
                let builder = Trainer::builder(&vars).group(group).accumulate(2);
                let mut train =
                    sgd(if find_unused { builder.find_unused_parameters() } else { builder });
                for _ in 0..2 {
                    train.step(|| loss(&all[0], 1.0)? + loss(&all[1], 4.0)?).unwrap();
                    train.step(|| loss(&all[0], 1.0)).unwrap();
                }
                weights(&vars)
            });
            assert!(all.iter().all(|w| *w == [[-2.0], [-4.0]]), "{all:?}");
        }
    }
}

#[test]
fn a_variable_of_two_names_is_trained_once_and_saved_by_both() {
    let directory = tempfile::tempdir().unwrap();
    for count in [1, 2] {
        ranks(count, |group| {
            let path = directory.path().join(format!("run{count}"));
            let (vars, all) = model(&["a", "b"]);
            vars.data().lock().unwrap().insert("z.tied".to_owned(), all[0].clone());
            let mut train = sgd(Trainer::builder(&vars).group(group));
            train.step(|| loss(&all[0], 1.0)? + loss(&all[1], 4.0)?).unwrap();
            assert_eq!(weights(&vars), [[-1.0], [-4.0], [-1.0]]);
            train.save(&path, 1).unwrap();
            train.step(|| loss(&all[0], 1.0)? + loss(&all[1], 4.0)?).unwrap();
            assert_eq!(train.resume(&path).unwrap(), 1);
            assert_eq!(weights(&vars), [[-1.0], [-4.0], [-1.0]]);
            train.step(|| loss(&all[0], 1.0)? + loss(&all[1], 4.0)?).unwrap();
            assert_eq!(weights(&vars), [[-2.0], [-8.0], [-2.0]]);
        });
    }
}

#[test]
fn constants_of_all_integer_types_are_broadcast() {
    for dtype in [DType::U8, DType::U32, DType::I16, DType::I32, DType::I64] {
        let all = ranks(2, |group| {
            let (vars, all) = model(&["w"]);
            let ids = Tensor::new(&[3_u8 + group.rank() as u8, 7], &Device::Cpu).unwrap();
            let ids = Var::from_tensor(&ids.to_dtype(dtype).unwrap()).unwrap();
            vars.data().lock().unwrap().insert("ids".to_owned(), ids.clone());
            let mut train = sgd(Trainer::builder(&vars).group(group));
            train.step(|| loss(&all[0], 1.0)).unwrap();
            ids.to_dtype(DType::F32).unwrap().to_vec1::<f32>().unwrap()
        });
        assert_eq!(all, [[3.0, 7.0]; 2], "{dtype:?}");
    }
}

#[test]
fn an_optimizer_whose_groups_lack_variables_is_refused() {
    use fused_optim::{CpuOptimizer, Optimizer, ParamGroup};
    let (vars, all) = model(&["a", "b", "c"]);
    let built = |params: Vec<usize>| {
        Trainer::builder(&vars).group(alone()).build_with(move |_, _| {
            let group = ParamGroup::new(SgdHyper { lr: 1.0, ..Default::default() }, params);
            let optimizer = CpuOptimizer::new([group]).map_err(candle_core::Error::wrap)?;
            let optimizer: Box<dyn Optimizer> = Box::new(optimizer);
            Ok(optimizer)
        })
    };
    let error = built(vec![1]).unwrap_err().to_string();
    assert!(error.contains("no parameter group") && error.contains("a, c"), "{error}");
    let mut train = built(vec![1, 2, 0]).unwrap();
    train.step(|| (loss(&all[0], 1.0)? + loss(&all[1], 1.0)?)? + loss(&all[2], 1.0)?).unwrap();
}
