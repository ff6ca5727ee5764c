//! The same trajectories on the simulator of CANN.

use fused_optim::npu::{HostFed, Operators};
use fused_optim::{
    AdadeltaHyper, AdamHyper, AdamPHyper, AdamWHyper, BertAdamHyper, HalfWeights, LambHyper,
    Optimizer, RmsPropHyper, RmsPropTfHyper, SgdHyper,
};
use npu_sim::{Config, Session, Soc, start};
use serde_json::Value;

use crate::oracle::{check, load};
use crate::{Golden, Ours, groups, vectors};

fn operators() -> Operators {
    npu_sim::operators(0).unwrap()
}

fn session(soc: Soc) -> Session {
    start(Config { soc, ..Config::default() })
}

fn optimizer(kind: &str, json: &[Value]) -> Box<dyn Optimizer> {
    macro_rules! new {
        ($hyper:ident) => {
            Box::new(
                HostFed::<$hyper>::new(operators(), groups(json), HalfWeights::Master).unwrap(),
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

#[test]
fn every_case_is_reproduced_on_the_simulator() {
    let cases = load(&vectors());
    assert_eq!(cases.len(), 108);
    let (mut failures, mut kernels) = (Vec::new(), 0);
    for (at, loaded) in cases.iter().enumerate() {
        // Chips have other operators; each case on one of them with a look at the gradients, on the
        // other without.
        for (look, soc) in [(at % 2 == 0, Soc::Ascend910A), (at % 2 == 1, Soc::Ascend910B)] {
            let sim = session(soc);
            let optimizer = optimizer(&loaded.case.kind, &loaded.case.groups);
            failures.extend(check(loaded, &mut Ours::over(loaded, look, optimizer)).err());
            kernels += sim.calls("aclnnApplyAdamWV2");
            failures.extend(sim.finish());
        }
    }
    assert!(failures.is_empty(), "{failures:#?}");
    assert!(kernels > 30, "CANN's own kernel of AdamW was called {kernels} times");
}

#[test]
fn sums_recorded_by_ascend_are_met_on_the_simulator() {
    for golden in Golden::all() {
        let sim = session(Soc::Ascend910B);
        golden.run(&mut *optimizer(golden.kind, std::slice::from_ref(&golden.group)), true);
        assert_eq!(sim.finish(), [""; 0]);
    }
}
