//! The same trajectories by operators of CANN, on its simulator.

use fused_optim::npu::{NpuOptimizer, NpuParam, Operators};
use fused_optim::{
    AdadeltaHyper, AdamHyper, AdamPHyper, AdamWHyper, Applied, BertAdamHyper, DType, FoundInf,
    HalfWeights, LambHyper, RmsPropHyper, RmsPropTfHyper, SgdHyper, Slice, StateDict, StepCtl,
};
use half::f16;
use npu_sim::{Config, Session, Soc, acl, nnop, ops, start};
use npu_sys::safe::{Context, Stream};
use serde_json::Value;

use crate::oracle::{Loaded, Subject, check, load};
use crate::{Golden, Ours, groups, vectors};

/// An optimizer of any rule.
trait Any {
    fn combine(&mut self, params: &[NpuParam]);
    fn write(&mut self, index: usize, weight: Option<Slice<'_>>, grad: Option<Slice<'_>>);
    fn read(&self, index: usize) -> Vec<f32>;
    fn step(&mut self, has_grad: &[bool], ctl: &StepCtl) -> Applied;
    fn state_dict(&self) -> StateDict;
}

macro_rules! any {
    ($($hyper:ident),*) => {$(
        impl Any for NpuOptimizer<$hyper> {
            fn combine(&mut self, params: &[NpuParam]) {
                self.combine(params).unwrap();
            }

            fn write(&mut self, index: usize, weight: Option<Slice<'_>>, grad: Option<Slice<'_>>) {
                weight.map(|weight| self.write_weight(index, weight).unwrap());
                grad.map(|grad| self.write_grad(index, grad).unwrap());
            }

            fn read(&self, index: usize) -> Vec<f32> {
                self.read_weight(index).unwrap()
            }

            fn step(&mut self, has_grad: &[bool], ctl: &StepCtl) -> Applied {
                self.step(has_grad, ctl).unwrap()
            }

            fn state_dict(&self) -> StateDict {
                self.state_dict().unwrap()
            }
        }
    )*};
}
any!(
    AdadeltaHyper,
    AdamHyper,
    AdamPHyper,
    AdamWHyper,
    BertAdamHyper,
    LambHyper,
    RmsPropHyper,
    RmsPropTfHyper,
    SgdHyper
);

fn operators() -> Operators {
    let stream = Stream::new(&Context::new(acl(), 0).unwrap()).unwrap();
    Operators::new(stream, nnop(), ops()).unwrap()
}

fn optimizer(kind: &str, json: &[Value], kernels: bool) -> Box<dyn Any> {
    macro_rules! new {
        ($hyper:ident) => {
            Box::new(
                NpuOptimizer::<$hyper>::new(operators(), groups(json), HalfWeights::Master)
                    .unwrap()
                    .with_kernels(kernels),
            )
        };
    }
    match kind {
        "adadelta" => new!(AdadeltaHyper),
        "adam" => new!(AdamHyper),
        "adamp" => new!(AdamPHyper),
        "adamw" => new!(AdamWHyper),
        "bert_adam" => new!(BertAdamHyper),
        "lamb" => new!(LambHyper),
        "rmsprop" => new!(RmsPropHyper),
        "rmsprop_tf" => new!(RmsPropTfHyper),
        "sgd" => new!(SgdHyper),
        other => panic!("no optimizer {other}"),
    }
}

struct OnNpu {
    optimizer: Box<dyn Any>,
    tensors: usize,
    look: bool,
}

impl OnNpu {
    fn new(loaded: &Loaded, look: bool, kernels: bool) -> Self {
        let mut optimizer = optimizer(&loaded.case.kind, &loaded.case.groups, kernels);
        let shapes = loaded.shapes.iter();
        let params: Vec<_> =
            shapes.map(|shape| NpuParam::new(0, DType::F32).with_shape(shape)).collect();
        optimizer.combine(&params);
        for (index, weight) in loaded.split().iter().enumerate() {
            optimizer.write(index, Some(Slice::F32(weight)), None);
        }
        Self { optimizer, tensors: params.len(), look }
    }
}

impl Subject for OnNpu {
    fn step(&mut self, grads: &[Option<Vec<f32>>], grad_scale: f32, found_inf: bool) {
        let mut grads = grads.to_vec();
        let mut verdict = FoundInf::Known(found_inf);
        if self.look {
            verdict = FoundInf::Check;
            let last = grads.iter_mut().flatten().filter_map(|grad| grad.last_mut()).last();
            if let (true, Some(last)) = (found_inf, last) {
                *last = f32::INFINITY;
            }
        }
        for (index, grad) in grads.iter().enumerate() {
            self.optimizer.write(index, None, grad.as_deref().map(Slice::F32));
        }
        let has_grad: Vec<bool> = grads.iter().map(Option::is_some).collect();
        let ctl = StepCtl { grad_scale, found_inf: verdict, ..StepCtl::PLAIN };
        let applied = self.optimizer.step(&has_grad, &ctl);
        assert_eq!(applied == Applied::SkippedNonFinite, found_inf);
    }

    fn weights(&self) -> Vec<f32> {
        (0..self.tensors).flat_map(|index| self.optimizer.read(index)).collect()
    }

    fn state(&self, tensor: usize, name: &str) -> (u64, Option<Vec<f32>>) {
        match self.optimizer.state_dict().state.get(&tensor) {
            Some(state) => (state.step, state.tensors.get(name).cloned()),
            None => (0, None),
        }
    }
}

fn session(soc: Soc) -> Session {
    start(Config { soc, ..Config::default() })
}

#[test]
fn every_case_is_reproduced_on_the_simulator() {
    let cases = load(&vectors());
    assert_eq!(cases.len(), 108);
    let mut failures = Vec::new();
    for (at, loaded) in cases.iter().enumerate() {
        // Chips have other operators; each case on one of them with a look at the gradients, on the
        // other without.
        for (look, soc) in [(at % 2 == 0, Soc::Ascend910A), (at % 2 == 1, Soc::Ascend910B)] {
            let sim = session(soc);
            failures.extend(check(loaded, &mut OnNpu::new(loaded, look, false)).err());
            failures.extend(sim.finish());
        }
    }
    assert!(failures.is_empty(), "{failures:#?}");
}

/// CANN's kernel takes its rates in f32, so it is held against the CPU with such rates. The weights are
/// within the vectors' tolerance as they are.
#[test]
fn the_kernel_of_adamw_is_adamw_with_rates_of_f32() {
    let mut cases = load(&vectors());
    cases.retain(|loaded| loaded.case.kind == "adamw");
    assert!(cases.len() > 5);
    for loaded in &mut cases {
        for group in &mut loaded.case.groups {
            for beta in group["betas"].as_array_mut().unwrap() {
                *beta = f64::from(beta.as_f64().unwrap() as f32).into();
            }
        }
        let sim = session(Soc::Ascend910B);
        // What the CPU comes to takes the place of what the vectors say of the state; within a
        // tolerance that lets any state pass, the check only takes the steps.
        let tolerances = loaded.case.naive_f32_state_err.clone();
        loaded.case.naive_f32_state_err.values_mut().for_each(|naive| *naive = f64::INFINITY);
        let mut cpu = Ours::new(loaded, false);
        check(loaded, &mut cpu).unwrap();
        loaded.case.naive_f32_state_err = tolerances;
        let states = loaded.case.states.iter();
        loaded.state = states
            .map(|name| {
                let tensors = loaded.counts.iter().enumerate();
                let all = tensors.flat_map(|(tensor, count)| {
                    let values = cpu.state(tensor, name).1.unwrap_or_else(|| vec![0.0; *count]);
                    values.into_iter().map(f64::from)
                });
                (name.clone(), all.collect())
            })
            .collect();
        check(loaded, &mut OnNpu::new(loaded, true, true)).unwrap();
        assert_eq!(sim.finish(), [""; 0]);
    }
}

#[test]
fn sums_recorded_by_ascend_are_met_on_the_simulator() {
    for golden in Golden::all() {
        let sim = session(Soc::Ascend910B);
        let mut optimizer = optimizer(golden.kind, std::slice::from_ref(&golden.group), true);
        let dtype = if golden.is_half { DType::F16 } else { DType::F32 };
        optimizer.combine(&[NpuParam::new(0, dtype).with_shape(&golden.shape)]);
        let weight = golden.weight();
        let grad: Vec<f32> = weight.iter().map(|p| p / 100.0).collect();
        let half = |values: &[f32]| values.iter().map(|x| f16::from_f32(*x)).collect::<Vec<_>>();
        if golden.is_half {
            let (weight, grad) = (half(&weight), half(&grad));
            optimizer.write(0, Some(Slice::F16(&weight)), Some(Slice::F16(&grad)));
        } else {
            optimizer.write(0, Some(Slice::F32(&weight)), Some(Slice::F32(&grad)));
        }
        for _ in 0..10 {
            let _ = optimizer.step(&[true], &StepCtl::PLAIN);
        }
        golden.meets(&optimizer.read(0));
        drop(optimizer);
        assert_eq!(sim.finish(), [""; 0]);
    }
}
