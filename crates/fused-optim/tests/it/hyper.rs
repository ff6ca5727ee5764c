//! Hyper-parameters: defaults, errors with PyTorch's names, saving and loading.

use fused_optim::{
    Adadelta, AdadeltaHyper, Adafactor, AdafactorHyper, Adam, AdamHyper, AdamP, AdamPHyper, AdamW,
    AdamWHyper, AdjustLr, BertAdam, BertAdamHyper, Clip, ClipScope, CosineEps, Error, HyperParam,
    Lamb, LambHyper, Lion, LionHyper, Muon, MuonHyper, Optimizer, ParamMut, RmsProp, RmsPropHyper,
    RmsPropTf, RmsPropTfHyper, Schedule, ScheduleFreeAdamW, ScheduleFreeAdamWHyper, Sgd, SgdHyper,
    Slice, StateDict, StepCtl,
};
use serde_json::{Value, json};

/// An optimizer over one tensor with some hyper-parameters replaced, or the error.
macro_rules! with {
    ($optimizer:ident, $hyper:ident { $($field:ident: $value:expr),* }) => {{
        let hyper = $hyper { $($field: $value,)* ..Default::default() };
        let made = $optimizer::with_one_group(hyper, 1);
        let boxed = |one| -> Box<dyn Optimizer> { Box::new(one) };
        made.map(boxed).map_err(|error| error.to_string())
    }};
}

#[test]
fn values_out_of_range_are_errors_with_pytorchs_names() {
    let beta = "invalid beta parameter at index 0: 1";
    let cases = [
        (with!(Adadelta, AdadeltaHyper { lr: -1.0 }), "invalid learning rate: -1"),
        (with!(Adadelta, AdadeltaHyper { rho: 1.5 }), "invalid rho value: 1.5"),
        (with!(Adadelta, AdadeltaHyper { eps: -1.0 }), "invalid epsilon value: -1"),
        (with!(Adadelta, AdadeltaHyper { weight_decay: -1.0 }), "invalid weight_decay value: -1"),
        (with!(Adafactor, AdafactorHyper { beta2_decay: 0.5 }), "invalid beta2_decay value: 0.5"),
        (with!(Adafactor, AdafactorHyper { d: 0.5 }), "invalid d value: 0.5"),
        (with!(Adafactor, AdafactorHyper { eps: (0.0, -1.0) }), "invalid epsilon value: -1"),
        (with!(Muon, MuonHyper { momentum: 1.0 }), "invalid momentum value: 1"),
        (with!(Muon, MuonHyper { ns_steps: 100 }), "invalid ns_steps value: 100"),
        (with!(Muon, MuonHyper { betas: (1.0, 0.9) }), beta),
        (with!(Adam, AdamHyper { betas: (1.0, 0.9) }), beta),
        (with!(AdamP, AdamPHyper { betas: (1.0, 0.9) }), beta),
        (with!(AdamP, AdamPHyper { delta: f64::NAN }), "invalid delta value: NaN"),
        (with!(AdamP, AdamPHyper { wd_ratio: -0.5 }), "invalid wd_ratio value: -0.5"),
        (with!(Lamb, LambHyper { betas: (1.0, 0.9) }), beta),
        (with!(Lamb, LambHyper { weight_decay: -1.0 }), "invalid weight_decay value: -1"),
        (with!(BertAdam, BertAdamHyper { b1: 1.0 }), beta),
        (with!(BertAdam, BertAdamHyper { warmup: 1.0 }), "invalid warmup: 1"),
        (with!(BertAdam, BertAdamHyper { warmup: -0.5 }), "invalid warmup: -0.5"),
        (with!(BertAdam, BertAdamHyper { t_total: 0 }), "invalid t_total: 0"),
        (with!(RmsProp, RmsPropHyper { alpha: -0.5 }), "invalid alpha value: -0.5"),
        (with!(RmsProp, RmsPropHyper { momentum: -0.5 }), "invalid momentum value: -0.5"),
        (with!(RmsPropTf, RmsPropTfHyper { eps: f64::INFINITY }), "invalid epsilon value: inf"),
        (with!(RmsPropTf, RmsPropTfHyper { lr: f64::NAN }), "invalid learning rate: NaN"),
    ];
    for (made, expected) in cases {
        assert_eq!(made.unwrap_err(), expected);
    }
}

/// Copied by hand from the constructors of torch and torch_npu.
#[test]
fn defaults_are_those_of_torch_and_torch_npu() {
    let cases = [
        (
            with!(Adadelta, AdadeltaHyper {}),
            json!({ "lr": 1.0, "rho": 0.9, "eps": 1e-6, "weight_decay": 0.0 }),
        ),
        (
            with!(Adam, AdamHyper {}),
            json!({ "lr": 1e-3, "betas": [0.9, 0.999], "eps": 1e-8, "weight_decay": 0.0,
                "amsgrad": false }),
        ),
        (
            with!(AdamP, AdamPHyper {}),
            json!({ "lr": 1e-3, "betas": [0.9, 0.999], "eps": 1e-8, "weight_decay": 0.0,
                "delta": 0.1, "wd_ratio": 0.1, "nesterov": false, "cos_eps": "add" }),
        ),
        (
            with!(AdamW, AdamWHyper {}),
            json!({ "lr": 1e-3, "betas": [0.9, 0.999], "eps": 1e-8, "weight_decay": 1e-2,
                "amsgrad": false }),
        ),
        (
            with!(BertAdam, BertAdamHyper {}),
            json!({ "lr": 1e-3, "warmup": -1.0, "t_total": -1, "schedule": "warmup_linear",
                "b1": 0.9, "b2": 0.999, "e": 1e-6, "weight_decay": 0.01, "max_grad_norm": 1.0,
                "clip": "group" }),
        ),
        (
            with!(Lamb, LambHyper {}),
            json!({ "lr": 1e-3, "betas": [0.9, 0.999], "eps": 1e-6, "weight_decay": 0.0,
                "adam": false, "use_global_grad_norm": false }),
        ),
        (
            with!(RmsProp, RmsPropHyper {}),
            json!({ "lr": 1e-2, "alpha": 0.99, "eps": 1e-8, "weight_decay": 0.0, "momentum": 0.0,
                "centered": false }),
        ),
        (
            with!(RmsPropTf, RmsPropTfHyper {}),
            json!({ "lr": 1e-2, "alpha": 0.9, "eps": 1e-10, "weight_decay": 0.0, "momentum": 0.0,
                "centered": false, "decoupled_decay": false, "decoupled_lr": false,
                "lr_in_momentum": true }),
        ),
        (
            with!(Sgd, SgdHyper {}),
            json!({ "lr": 1e-3, "momentum": 0.0, "dampening": 0.0, "weight_decay": 0.0,
                "nesterov": false }),
        ),
    ];
    assert_defaults(cases);
}

/// Copied by hand from the authors' code, and from torch's for Adafactor and Muon.
#[test]
fn defaults_of_newer_rules_are_those_of_their_authors() {
    let cases = [
        (
            with!(Adafactor, AdafactorHyper {}),
            json!({ "lr": 1e-2, "beta2_decay": -0.8, "eps": [f32::EPSILON, 1e-3], "d": 1.0,
                "weight_decay": 0.0 }),
        ),
        (
            with!(Muon, MuonHyper {}),
            json!({ "lr": 1e-3, "momentum": 0.95, "nesterov": true, "weight_decay": 0.1, "eps": 1e-7,
                "ns_steps": 5, "adjust_lr_fn": "original", "use_muon": true, "betas": [0.9, 0.95],
                "adamw_eps": 1e-10 }),
        ),
        (
            with!(Lion, LionHyper {}),
            json!({ "lr": 1e-4, "betas": [0.9, 0.99], "weight_decay": 0.0 }),
        ),
        (
            with!(ScheduleFreeAdamW, ScheduleFreeAdamWHyper {}),
            json!({ "lr": 2.5e-3, "betas": [0.9, 0.999], "eps": 1e-8, "weight_decay": 0.0,
                "warmup_steps": 0 }),
        ),
    ];
    assert_defaults(cases);
}

type Made = Result<Box<dyn Optimizer>, String>;

fn assert_defaults<const N: usize>(cases: [(Made, Value); N]) {
    let group = |optimizer: Box<dyn Optimizer>| -> Value {
        let groups: Value =
            serde_json::from_str(&optimizer.state_dict().unwrap().param_groups).unwrap();
        groups[0].clone()
    };
    for (made, mut expected) in cases {
        expected["maximize"] = false.into();
        expected["params"] = json!([0]);
        assert_eq!(group(made.unwrap()), expected);
    }
}

/// Enums and flags survive serialization.
#[test]
fn options_are_saved_and_loaded() {
    let made = [
        with!(AdamP, AdamPHyper { cos_eps: CosineEps::Max, nesterov: true }),
        with!(
            BertAdam,
            BertAdamHyper { schedule: Schedule::Cosine, clip: ClipScope::Tensor, t_total: 9 }
        ),
        with!(RmsPropTf, RmsPropTfHyper { decoupled_decay: true, decoupled_lr: true }),
        with!(Lamb, LambHyper { use_global_grad_norm: true, maximize: true }),
        with!(Muon, MuonHyper { adjust_lr_fn: AdjustLr::MatchRmsAdamW, nesterov: false }),
    ];
    let fresh = [
        with!(AdamP, AdamPHyper {}),
        with!(BertAdam, BertAdamHyper {}),
        with!(RmsPropTf, RmsPropTfHyper {}),
        with!(Lamb, LambHyper {}),
        with!(Muon, MuonHyper {}),
    ];
    for (one, other) in made.into_iter().zip(fresh) {
        let (mut one, mut other) = (one.unwrap(), other.unwrap());
        let mut weight = [1.0_f32; 6];
        let param = ParamMut::new(&mut weight[..], Some(Slice::F32(&[0.5; 6])));
        let _ = one.step(&mut [param.with_shape(&[2, 3])], &StepCtl::PLAIN).unwrap();
        let bytes = one.state_dict().unwrap().to_safetensors().unwrap();
        other.load_state_dict(&StateDict::from_safetensors(&bytes).unwrap()).unwrap();
        assert_eq!(other.state_dict().unwrap(), one.state_dict().unwrap());
    }
}

/// A configuration contains only values that differ from the defaults.
#[test]
fn missing_hyper_parameters_are_read_as_defaults() {
    macro_rules! check {
        ($($hyper:ident),*) => {$(
            let read = serde_json::from_str::<$hyper>;
            assert_eq!(read("{}").unwrap(), $hyper::default());
            let some = read(r#"{"lr": 0.5, "weight_decay": 0.25}"#).unwrap();
            assert_eq!(some, $hyper { lr: 0.5, weight_decay: 0.25, ..Default::default() });
            let error = read(r#"{"lr": 0.5, "wieght_decay": 0.25}"#).unwrap_err().to_string();
            assert!(error.contains("unknown field `wieght_decay`"), "{error}");
        )*};
    }
    check!(
        AdadeltaHyper,
        AdafactorHyper,
        AdamHyper,
        AdamPHyper,
        AdamWHyper,
        BertAdamHyper,
        LambHyper,
        LionHyper,
        MuonHyper,
        RmsPropHyper,
        RmsPropTfHyper,
        ScheduleFreeAdamWHyper,
        SgdHyper
    );
}

#[test]
fn uneven_rows_and_short_averages_are_errors() {
    let mut adamp = with!(AdamP, AdamPHyper {}).unwrap();
    let mut weight = [1.0_f32; 6];
    let grad = Some(Slice::F32(&[0.5; 6]));
    let param = ParamMut::new(&mut weight[..], grad).with_shape(&[4, 2]);
    let error = adamp.step(&mut [param], &StepCtl::PLAIN).unwrap_err();
    assert_eq!(error.to_string(), "parameter 0: 6 elements are not 4 rows of equal length");
    let mut short = [0.0; 5];
    let param = ParamMut::new(&mut weight[..], grad).with_ema(&mut short, 0.5);
    let error = adamp.step(&mut [param], &StepCtl::PLAIN).unwrap_err();
    assert_eq!(error.to_string(), "parameter 0: the weight has 6 elements, its moving average 5");
    let mut ema = [0.0; 6];
    let param = ParamMut::new(&mut weight[..], grad).with_ema(&mut ema, 1.5);
    let error = adamp.step(&mut [param], &StepCtl::PLAIN).unwrap_err();
    assert_eq!(error.to_string(), "invalid ema decay: 1.5");
    assert_eq!((weight, adamp.state_dict().unwrap().state.len()), ([1.0; 6], 0));
}

#[test]
fn set_momentum_never_adds_or_removes_a_buffer() {
    let with_one = [
        with!(Adam, AdamHyper {}),
        with!(AdamP, AdamPHyper {}),
        with!(AdamW, AdamWHyper {}),
        with!(BertAdam, BertAdamHyper {}),
        with!(Lamb, LambHyper {}),
        with!(Lion, LionHyper {}),
        with!(Muon, MuonHyper { momentum: 0.9 }),
        with!(RmsProp, RmsPropHyper { momentum: 0.9 }),
        with!(RmsPropTf, RmsPropTfHyper { momentum: 0.9 }),
        with!(Sgd, SgdHyper { lr: 0.1, momentum: 0.9 }),
    ];
    for optimizer in with_one {
        let mut optimizer = optimizer.unwrap();
        assert_eq!(optimizer.momentum(0).unwrap(), Some(0.9));
        optimizer.set_momentum(0, 0.25).unwrap();
        assert_eq!(optimizer.momentum(0).unwrap(), Some(0.25));
        assert!(optimizer.state_dict().unwrap().param_groups.contains("0.25"));
        for wrong in [-1.0, f64::NAN] {
            assert!(matches!(optimizer.set_momentum(0, wrong), Err(Error::InvalidHyper { .. })));
        }
        assert!(matches!(optimizer.set_momentum(1, 0.5), Err(Error::NoSuchGroup { .. })));
        assert_eq!(optimizer.momentum(0).unwrap(), Some(0.25));
    }
    let mut sgd = with!(Sgd, SgdHyper { lr: 0.1 }).unwrap();
    assert!(matches!(sgd.set_momentum(0, 0.5), Err(Error::MomentumFromZero { value: 0.5 })));
    // The weights of a schedule-free optimizer are averages with the `β1` of all steps so far.
    let without =
        [with!(Adadelta, AdadeltaHyper {}), with!(ScheduleFreeAdamW, ScheduleFreeAdamWHyper {})];
    for optimizer in without {
        let mut optimizer = optimizer.unwrap();
        assert_eq!(optimizer.momentum(0).unwrap(), None);
        let refused = optimizer.set_momentum(0, 0.5);
        assert!(matches!(refused, Err(Error::NoHyperParam { param: HyperParam::Momentum, .. })));
    }
}

/// A matrix whose gradient is zero in its first step, as that of an unused head is.
#[test]
fn adafactor_outlives_a_finite_gradient_whose_square_is_not() {
    for shape in [&[2, 3][..], &[6]] {
        let mut adafactor = Adafactor::with_one_group(AdafactorHyper::default(), 1).unwrap();
        let mut weight = [0.5_f32; 6];
        for first in [1.0, 1e25, 1.0, 1.0] {
            let gradient = [first, 1.0, 1.0, 1.0, 1.0, 1.0];
            let param = ParamMut::new(&mut weight[..], Some(Slice::F32(&gradient)));
            let _ = adafactor.step(&mut [param.with_shape(shape)], &StepCtl::PLAIN).unwrap();
            assert!(weight.iter().all(|w| w.is_finite()), "{shape:?}: {weight:?}");
        }
        let state = &adafactor.state_dict().unwrap().state[&0];
        assert!(state.tensors.values().flatten().all(|v| v.is_finite()), "{state:?}");
    }
}

#[test]
fn adafactor_without_epsilon_leaves_a_matrix_without_gradient_unchanged() {
    let hyper = AdafactorHyper { eps: (0.0, 1e-3), weight_decay: 0.0, ..Default::default() };
    let mut adafactor = Adafactor::with_one_group(hyper, 1).unwrap();
    let mut weight = [1.0_f32; 6];
    let param = ParamMut::new(&mut weight[..], Some(Slice::F32(&[0.0; 6]))).with_shape(&[2, 3]);
    let _ = adafactor.step(&mut [param], &StepCtl::PLAIN).unwrap();
    assert_eq!(weight, [1.0; 6]);
}

#[test]
fn set_weight_decay_applies_to_the_next_step() {
    let made = |weight_decay| {
        let decay = weight_decay;
        [
            with!(Adadelta, AdadeltaHyper { weight_decay: decay }),
            with!(Adafactor, AdafactorHyper { weight_decay: decay }),
            with!(Adam, AdamHyper { weight_decay: decay }),
            with!(AdamP, AdamPHyper { weight_decay: decay }),
            with!(AdamW, AdamWHyper { weight_decay: decay }),
            with!(BertAdam, BertAdamHyper { weight_decay: decay }),
            with!(Lamb, LambHyper { weight_decay: decay }),
            with!(Lion, LionHyper { weight_decay: decay }),
            with!(Muon, MuonHyper { weight_decay: decay }),
            with!(ScheduleFreeAdamW, ScheduleFreeAdamWHyper { weight_decay: decay }),
            with!(RmsProp, RmsPropHyper { weight_decay: decay }),
            with!(RmsPropTf, RmsPropTfHyper { weight_decay: decay }),
            with!(Sgd, SgdHyper { weight_decay: decay }),
        ]
    };
    for (set, from_start) in made(0.0).into_iter().zip(made(0.25)) {
        let weights = [set, from_start].map(|optimizer| {
            let mut optimizer = optimizer.unwrap();
            optimizer.set_weight_decay(0, 0.25).unwrap();
            assert_eq!(optimizer.weight_decay(0).unwrap(), Some(0.25));
            let wrong = optimizer.set_weight_decay(0, -0.25).unwrap_err().to_string();
            assert_eq!(wrong, "invalid weight_decay value: -0.25");
            let mut weight = [1.0_f32, -2.0];
            let param = ParamMut::new(&mut weight[..], Some(Slice::F32(&[0.5, 0.25])));
            let _ = optimizer.step(&mut [param], &StepCtl::PLAIN).unwrap();
            (weight, optimizer.state_dict().unwrap())
        });
        assert_eq!(weights[0], weights[1]);
    }
}

#[test]
fn errors_of_an_invalid_state_dict_name_the_entry() {
    let mut adamw = AdamW::with_one_group(AdamWHyper::default(), 2).unwrap();
    let (mut weight, mut empty) = ([1.0_f32; 3], [0.0_f32; 0]);
    let param = ParamMut::new(&mut weight[..], Some(Slice::F32(&[1.0; 3])));
    let other = ParamMut::new(&mut empty[..], None);
    let _ = adamw.step(&mut [param, other], &StepCtl::PLAIN).unwrap();
    let before = adamw.state_dict().unwrap();

    type Spoil = fn(&mut StateDict);
    let cases: [(Spoil, &str); 9] = [
        (|d| d.kind = "sgd".into(), r#"cannot load a state dict of "sgd" into "adamw""#),
        (|d| drop(tensors(d).remove("exp_avg_sq")), "state dict, state.0.exp_avg_sq: missing"),
        (
            |d| drop(tensors(d).insert("exp_agv".into(), vec![0.0; 3])),
            "state dict, state.0.exp_agv: unknown",
        ),
        (
            |d| tensors(d).get_mut("exp_avg").unwrap().push(0.0),
            "state dict, state.0.exp_avg: expected 3 elements, got 4",
        ),
        (
            |d| d.state.get_mut(&0).unwrap().step = 0,
            "state dict, state.0.step: 0 is not a step count",
        ),
        (|d| drop(d.state.insert(2, d.state[&0].clone())), "state dict, state.2: unknown"),
        (|d| d.param_groups = "[]".into(), "state dict, param_groups: expected 1 groups, got 0"),
        (
            |d| d.param_groups = d.param_groups.replace("[0,1]", "[1,0]"),
            "state dict, param_groups[0]: `params` differ from this optimizer's: [0, 1]",
        ),
        (
            |d| d.param_groups = d.param_groups.replace("0.001", "-0.001"),
            "state dict, param_groups[0]: invalid learning rate: -0.001",
        ),
    ];
    for (spoil, text) in cases {
        let mut dict = before.clone();
        spoil(&mut dict);
        assert_ne!(dict, before, "{text}");
        assert_eq!(adamw.load_state_dict(&dict).unwrap_err().to_string(), text);
        assert_eq!(adamw.state_dict().unwrap(), before);
    }
    for (from, to, named) in [
        ("eps", "epsilon", "unknown field `epsilon`"),
        (r#""lr":0.001,"#, "", "missing field `lr`"),
    ] {
        let mut dict = before.clone();
        dict.param_groups = dict.param_groups.replace(from, to);
        let text = adamw.load_state_dict(&dict).unwrap_err().to_string();
        assert!(text.contains(named), "{text}");
    }
}

fn tensors(dict: &mut StateDict) -> &mut std::collections::BTreeMap<String, Vec<f32>> {
    &mut dict.state.get_mut(&0).unwrap().tensors
}

/// Weights after three steps of an optimizer, on one tensor.
fn after_steps(
    mut optimizer: impl Optimizer,
    weight: &[f32],
    grad: &[f32],
    clearing: bool,
) -> Vec<u32> {
    let mut weight = weight.to_vec();
    for step in 1..4_u8 {
        let mut grad: Vec<f32> = grad.iter().map(|g| g * f32::from(step)).collect();
        let mut params = [match clearing {
            true => ParamMut::new(&mut weight[..], None).clearing(&mut grad[..]),
            false => ParamMut::new(&mut weight[..], Some(Slice::F32(&grad))),
        }];
        let ctl = StepCtl { grad_scale: 0.5, clip: Some(Clip::Value(0.3)), ..StepCtl::PLAIN };
        let _applied = optimizer.step(&mut params, &ctl).unwrap();
        assert!(!clearing || grad.iter().all(|g| *g == 0.0));
    }
    weight.iter().map(|w| w.to_bits()).collect()
}

#[test]
fn short_tensors_are_updated_as_the_start_of_a_long_one() {
    let values = |by: usize| -> Vec<f32> {
        (0..5000).map(|i| ((i * by) % 997) as f32 / 499.0 - 1.0).collect()
    };
    let (weight, grad) = (values(7919), values(613));
    let adamw = || AdamW::with_one_group(AdamWHyper::default(), 1).unwrap();
    let sgd = SgdHyper { momentum: 0.9, ..SgdHyper::default() };
    let sgd = || Sgd::with_one_group(sgd, 1).unwrap();
    let long =
        [after_steps(adamw(), &weight, &grad, false), after_steps(sgd(), &weight, &grad, false)];
    for count in [0, 1, 15, 16, 17, 64, 1023, 1024] {
        for clearing in [false, true] {
            let (weight, grad) = (&weight[..count], &grad[..count]);
            assert_eq!(after_steps(adamw(), weight, grad, clearing), long[0][..count], "{count}");
            assert_eq!(after_steps(sgd(), weight, grad, clearing), long[1][..count], "{count}");
        }
    }
}
