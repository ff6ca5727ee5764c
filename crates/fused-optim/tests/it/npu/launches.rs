//! Which of CANN's fused kernels a step uses, that they give the same results, and the number of
//! launches of a step.

use npu_sim::{LATER, ops, ops_without};

use super::*;

const KERNELS: [&str; 3] = ["aclnnFusedSgd", "aclnnFusedAdamw", "aclnnApplyAdamWV2"];

#[test]
fn rules_with_fused_kernels_agree_with_the_cpu() {
    let hyper = SgdHyper { lr: 0.1, momentum: 0.9, dampening: 0.1, ..Default::default() };
    let other = SgdHyper { nesterov: true, dampening: 0.0, weight_decay: 0.1, ..hyper };
    agree!(Sgd, hyper, SgdHyper { maximize: true, ..other }, true, Soc::Ascend910C);
    let bare = SgdHyper { momentum: 0.0, dampening: 0.5, weight_decay: 0.1, ..hyper };
    agree!(Sgd, bare, hyper, true, Soc::Ascend910B);
    let hyper = AdamWHyper { weight_decay: 0.1, ..Default::default() };
    let exact = AdamWHyper { amsgrad: true, betas: (0.875, 0.96875), ..hyper };
    agree!(AdamW, hyper, AdamWHyper { maximize: true, ..hyper }, true, Soc::Ascend910B);
    agree!(AdamW, exact, hyper, true, Soc::Ascend910C);
}

/// The kernel of a step depends on CANN's version, chip, hyper-parameters, step, and
/// `with_kernels`.
#[test]
fn fused_kernels_are_used_where_supported() {
    let (new, sgd, adamw) = (ops(), SgdHyper::default(), AdamWHyper::default());
    let momentum = SgdHyper { momentum: 0.9, ..sgd };
    let (b, c) = (Soc::Ascend910B, Soc::Ascend910C);
    macro_rules! used {
        ($soc:expr, $ops:expr, $hyper:expr) => {
            used!($soc, $ops, $hyper, true)
        };
        ($soc:expr, $ops:expr, $hyper:expr, $wanted:expr) => {{
            let sim = session($soc);
            let on = npu_sim::operators_of(0, $ops).unwrap();
            let groups = [ParamGroup::new($hyper, 0..1)];
            let npu = NpuOptimizer::new(on, groups, HalfWeights::Master).unwrap();
            let mut npu = npu.with_kernels($wanted);
            npu.combine(&[NpuParam::new(5000, F32)]).unwrap();
            for _ in 0..3 {
                let _ = npu.step(&[true], &StepCtl::PLAIN).unwrap();
            }
            let used = KERNELS.map(|kernel| sim.calls(kernel));
            drop(npu);
            assert_eq!(sim.finish(), [""; 0]);
            used
        }};
    }
    for soc in [b, c] {
        assert_eq!(used!(soc, new, momentum), [3, 0, 0]);
        assert_eq!(used!(soc, new, adamw), [0, 2, 1]);
    }
    assert_eq!(used!(b, new, momentum, false), [0; 3]);
    assert_eq!(used!(b, new, adamw, false), [0; 3]);
    assert_eq!(used!(Soc::Ascend910A, new, momentum), [0; 3]);
    assert_eq!(used!(Soc::Ascend910A, new, adamw), [0; 3]);
    let older = ops_without(LATER);
    assert_eq!(used!(b, older, momentum), [0; 3]);
    assert_eq!(used!(b, older, adamw), [0, 0, 3]);
    // Without the older kernel the first step uses operators.
    assert_eq!(used!(b, ops_without(&["aclnnApplyAdamWV2"]), adamw), [0, 2, 0]);
    assert_eq!(used!(b, ops_without(&KERNELS), adamw), [0; 3]);
    // Not faster fused, not supported by the kernels, or results that cannot be corrected.
    assert_eq!(used!(b, new, sgd), [0; 3]);
    assert_eq!(used!(b, new, SgdHyper { weight_decay: 0.1, ..sgd }), [3, 0, 0]);
    assert_eq!(used!(b, new, SgdHyper { momentum: 1e-6, ..sgd }), [0; 3]);
    assert_eq!(used!(b, new, SgdHyper { dampening: -0.5, ..momentum }), [0; 3]);
    assert_eq!(used!(b, new, AdamWHyper { amsgrad: true, ..adamw }), [0; 3]);
    let exact = AdamWHyper { amsgrad: true, betas: (0.875, 0.96875), ..adamw };
    assert_eq!(used!(b, new, exact), [0, 2, 1]);
}

/// Number of launches of a step, and of waits of the host.
fn cost<R>(sim: &Session, step: impl FnOnce() -> R) -> (usize, usize) {
    let launches =
        || sim.calls_of(|name| name.starts_with("aclnn") && !name.ends_with("GetWorkspaceSize"));
    let waits = || sim.calls_of(|name| name.starts_with("aclrtSynchronize"));
    let before = (launches(), waits());
    step();
    (launches() - before.0, waits() - before.1)
}

macro_rules! costs {
    ($soc:expr, $hyper:expr, $dtype:expr, $ctl:expr) => {
        costs!($soc, $hyper, $dtype, $ctl, ops())
    };
    ($soc:expr, $hyper:expr, $dtype:expr, $ctl:expr, $ops:expr) => {{
        let sim = session($soc);
        let groups = [ParamGroup::new($hyper, 0..100)];
        let on = npu_sim::operators_of(0, $ops).unwrap();
        let mut npu = NpuOptimizer::new(on, groups, HalfWeights::Master).unwrap();
        npu.combine(&[NpuParam::new(0, $dtype).with_shape(&[2, 3]); 100]).unwrap();
        let first = cost(&sim, || npu.step(&[true; 100], &$ctl).unwrap());
        let then = cost(&sim, || npu.step(&[true; 100], &$ctl).unwrap());
        drop(npu);
        assert_eq!(sim.finish(), [""; 0]);
        (first, then)
    }};
}

/// With a hundred tensors.
#[test]
fn launch_counts_are_as_documented() {
    let (a, b, plain) = (Soc::Ascend910A, Soc::Ascend910B, StepCtl::PLAIN);
    let same = |cost| (cost, cost);
    let sgd = SgdHyper::default();
    assert_eq!(costs!(b, sgd, F32, plain), same((1, 0)));
    let (momentum, older) = (SgdHyper { momentum: 0.9, ..sgd }, ops_without(LATER));
    assert_eq!(costs!(b, momentum, F32, plain), same((1, 0)));
    assert_eq!(costs!(b, momentum, F32, plain, older), ((2, 0), (3, 0)));
    assert_eq!(costs!(a, momentum, F32, plain), ((2, 0), (3, 0)));
    let all = SgdHyper { weight_decay: 0.1, nesterov: true, ..momentum };
    assert_eq!(costs!(b, all, F32, plain), same((1, 0)));
    assert_eq!(costs!(b, all, F32, plain, older), ((4, 0), (5, 0)));
    let adam = AdamHyper::default();
    assert_eq!(costs!(b, adam, F32, plain), same((8, 0)));
    assert_eq!(costs!(b, AdamHyper { amsgrad: true, ..adam }, F32, plain), same((9, 0)));
    assert_eq!(costs!(b, AdamHyper { weight_decay: 0.1, ..adam }, F32, plain), same((9, 0)));
    let adamw = AdamWHyper::default();
    // The error of an f32 β is corrected: of 0.999, not of values that are exact in f32; not in
    // maxima.
    assert_eq!(costs!(b, adamw, F32, plain), same((3, 0)));
    assert_eq!(costs!(b, adamw, F32, plain, older), same((3, 0)));
    assert_eq!(costs!(b, adamw, F32, plain, ops_without(&KERNELS)), same((9, 0)));
    assert_eq!(costs!(b, AdamWHyper { betas: (0.5, 0.75), ..adamw }, F32, plain), same((2, 0)));
    assert_eq!(costs!(b, AdamWHyper { amsgrad: true, ..adamw }, F32, plain), same((10, 0)));
    let exact = AdamWHyper { amsgrad: true, betas: (0.875, 0.96875), ..adamw };
    assert_eq!(costs!(b, exact, F32, plain), same((2, 0)));
    assert_eq!(costs!(a, AdamWHyper::default(), F32, plain), same((9, 0)));
    assert_eq!(costs!(b, AdadeltaHyper::default(), F32, plain), same((11, 0)));
    let rms = RmsPropHyper::default();
    assert_eq!(costs!(b, rms, F32, plain), same((5, 0)));
    assert_eq!(costs!(b, RmsPropHyper { momentum: 0.9, ..rms }, F32, plain), same((7, 0)));
    let tf = RmsPropTfHyper::default();
    assert_eq!(costs!(b, tf, F32, plain), same((6, 0)));
    assert_eq!(costs!(b, RmsPropTfHyper { momentum: 0.9, ..tf }, F32, plain), same((8, 0)));
    let bert = BertAdamHyper { max_grad_norm: 0.0, weight_decay: 0.0, ..Default::default() };
    assert_eq!(costs!(b, bert, F32, plain), same((8, 0)));
    // Two lists of norms, and no scaling as all weights are zero; or 100 sums of each.
    assert_eq!(costs!(b, LambHyper::default(), F32, plain).0, (8 + 2 + 1, 1));
    assert_eq!(costs!(a, LambHyper::default(), F32, plain).0, (8 + 2 * 101 + 1, 1));
    assert_eq!(costs!(b, AdamPHyper::default(), F32, plain).0, (9 + 4 * 101, 1));
    // Casts for half weights: the gradient, the master in the first step, the weight.
    assert_eq!(costs!(b, sgd, F16, plain), ((4, 0), (3, 0)));
    // The check: two launches and a copy to the host, combined with another copy if there is one.
    let check = StepCtl { found_inf: FoundInf::Check, ..plain };
    assert_eq!(costs!(b, sgd, F32, check), same((1 + 3, 1)));
    assert_eq!(costs!(b, LambHyper::default(), F32, check).0.1, 1);
    assert_eq!(costs!(b, AdamPHyper::default(), F32, check).0.1, 1);
}
