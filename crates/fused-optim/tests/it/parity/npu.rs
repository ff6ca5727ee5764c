//! The same trajectories on the CANN simulator.

use fused_optim::npu::HostOptimizer;
use fused_optim::{
    AdadeltaHyper, AdamHyper, AdamPHyper, AdamWHyper, BertAdamHyper, HalfWeights, LambHyper,
    Optimizer, RmsPropHyper, RmsPropTfHyper, SgdHyper,
};
use npu_sim::{Config, LATER, Session, Soc, operators_of, ops, ops_without, start};
use npu_sys::sys::Ops;
use serde_json::Value;

use super::oracle::{check, load};
use super::{Golden, Ours, groups, vectors};

fn session(soc: Soc) -> Session {
    start(Config { soc, ..Config::default() })
}

fn optimizer(kind: &str, json: &[Value], ops: &'static Ops) -> Box<dyn Optimizer> {
    let on = operators_of(0, ops).unwrap();
    macro_rules! new {
        ($hyper:ident) => {
            Box::new(HostOptimizer::<$hyper>::new(on, groups(json), HalfWeights::Master).unwrap())
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

#[test]
fn every_case_is_reproduced_on_the_simulator() {
    let cases = load(&vectors());
    assert_eq!(cases.len(), 108);
    let (older, names) =
        (ops_without(LATER), ["aclnnFusedSgd", "aclnnFusedAdamw", "aclnnApplyAdamWV2"]);
    let (mut failures, mut kernels) = (Vec::new(), [0; 3]);
    for (at, loaded) in cases.iter().enumerate() {
        // Operators differ between chips and versions. Each case checks the gradients on one chip
        // and not on the other.
        let mut ways =
            vec![(at % 2 == 0, Soc::Ascend910A, ops()), (at % 2 == 1, Soc::Ascend910B, ops())];
        if ["sgd", "adamw"].contains(&loaded.case.kind.as_str()) {
            ways.push((at % 2 == 0, Soc::Ascend910B, older));
        }
        for (check_finite, soc, ops) in ways {
            let sim = session(soc);
            let optimizer = optimizer(&loaded.case.kind, &loaded.case.groups, ops);
            let run = |mut ours: Ours| check(loaded, &mut ours).err();
            failures.extend(run(Ours::with_optimizer(loaded, check_finite, optimizer)));
            for (calls, name) in kernels.iter_mut().zip(names) {
                *calls += sim.calls(name);
            }
            failures.extend(sim.finish());
        }
    }
    assert!(failures.is_empty(), "{failures:#?}");
    assert!(kernels.iter().all(|calls| *calls > 30), "CANN's fused kernels ran {kernels:?} times");
}

#[test]
fn sums_of_ascends_tests_are_reproduced_on_the_simulator() {
    for golden in Golden::all() {
        let sim = session(Soc::Ascend910B);
        let group = std::slice::from_ref(&golden.group);
        golden.run(&mut *optimizer(golden.kind, group, ops()), true);
        assert_eq!(sim.finish(), [""; 0]);
    }
}
