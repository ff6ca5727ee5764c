//! Loading of saved state by parameter name, and errors for state that does not match.

use std::collections::HashMap;

use fused_optim::{
    AdamW, AdamWHyper, Applied, Error, Optimizer, ParamGroup, ParamMut, ParamSpec, Result, Sgd,
    SgdHyper, Slice, StateDict, StepCtl,
};
use proptest::prelude::*;
use safetensors::Dtype;
use safetensors::tensor::TensorView;

/// Four tensors of equal size, in the order of one process.
const NAMES: [&str; 4] = ["fc1.weight", "fc1.bias", "fc2.weight", "fc2.bias"];

/// Weights and gradients are functions of the name.
fn value(name: &str, turn: usize) -> f32 {
    let hash = name.bytes().fold(turn + 1, |hash, byte| (hash * 31 + usize::from(byte)) % 1009);
    hash as f32 / 504.0 - 1.0
}

fn specs(names: &[&str]) -> Vec<ParamSpec> {
    names.iter().map(|name| ParamSpec::new(*name, &[2, 3])).collect()
}

/// An optimizer with its weights, in one process' order of names.
struct Process {
    optimizer: AdamW,
    names: Vec<&'static str>,
    weights: Vec<Vec<f32>>,
}

impl Process {
    /// `decayed` are in the first group, the others in the second.
    fn new(names: &[&'static str], decayed: &[&str]) -> Self {
        let group = |lr, first| {
            let members = names.iter().enumerate().filter(|(_, n)| decayed.contains(n) == first);
            let hyper = AdamWHyper { lr, ..Default::default() };
            ParamGroup::new(hyper, members.map(|(index, _)| index))
        };
        let mut optimizer = AdamW::new([group(0.1, true), group(0.2, false)]).unwrap();
        optimizer.set_param_names(&specs(names)).unwrap();
        let weights = names.iter().map(|name| vec![value(name, 0); 6]).collect();
        Self { optimizer, names: names.to_vec(), weights }
    }

    fn step(&mut self, turn: usize) {
        let grads: Vec<_> = self.names.iter().map(|name| vec![value(name, turn); 6]).collect();
        let _ = step(&mut self.optimizer, &mut self.weights, &grads).unwrap();
    }

    fn by_name(&self) -> HashMap<&str, (Vec<f32>, fused_optim::ParamState)> {
        let state = self.optimizer.state_dict().unwrap().state;
        let all = self.names.iter().zip(&self.weights).enumerate();
        all.map(|(at, (name, weight))| (*name, (weight.clone(), state[&at].clone()))).collect()
    }
}

fn step(optimizer: &mut AdamW, weights: &mut [Vec<f32>], grads: &[Vec<f32>]) -> Result<Applied> {
    let both = weights.iter_mut().zip(grads);
    let mut params: Vec<_> =
        both.map(|(w, g)| ParamMut::new(&mut w[..], Some(Slice::F32(g)))).collect();
    optimizer.step(&mut params, &StepCtl::PLAIN)
}

proptest! {
    #[test]
    fn state_follows_its_parameter_whatever_the_order(
        saved in Just(NAMES.to_vec()).prop_shuffle(),
        loading in Just(NAMES.to_vec()).prop_shuffle(),
        decayed in prop::sample::subsequence(NAMES.to_vec(), 0..=4),
    ) {
        let mut undisturbed = Process::new(&saved, &decayed);
        undisturbed.step(1);
        let bytes = undisturbed.optimizer.state_dict().unwrap().to_safetensors().unwrap();
        let mut resumed = Process::new(&loading, &decayed);
        for (name, weight) in resumed.names.iter().zip(&mut resumed.weights) {
            let at = saved.iter().position(|other| other == name).unwrap();
            weight.clone_from(&undisturbed.weights[at]);
        }
        resumed.optimizer.load_state_dict(&StateDict::from_safetensors(&bytes).unwrap()).unwrap();
        for turn in 2..4 {
            undisturbed.step(turn);
            resumed.step(turn);
        }
        prop_assert_eq!(undisturbed.by_name(), resumed.by_name());
    }
}

#[test]
fn state_with_other_names_is_rejected_and_nothing_changes() {
    let mut one = Process::new(&NAMES, &NAMES[..2]);
    one.step(1);
    let before = one.optimizer.state_dict().unwrap();
    type Spoil = fn(&mut StateDict);
    let cases: [(Spoil, &str); 8] = [
        (|d| rename(d, 1, "fc1.gain"), "state dict, fc1.bias: missing"),
        (|d| drop(d.params.remove(&3)), "state dict, fc2.bias: missing"),
        (
            |d| drop(d.params.insert(4, ParamSpec::from("fc3.bias"))),
            "state dict, fc3.bias: unknown",
        ),
        (|d| rename(d, 3, "fc1.bias"), "state dict, fc1.bias: name of parameters 1 and 3"),
        (
            |d| d.params.get_mut(&2).unwrap().shape = Some(vec![3, 2]),
            "state dict, fc2.weight: expected shape [2, 3], got [3, 2]",
        ),
        (
            |d| d.param_groups = d.param_groups.replace("[0,1]", "[0,1,2]"),
            "state dict, param_groups[0]: has `fc2.weight`, which is not in this optimizer's group",
        ),
        (
            |d| d.param_groups = d.param_groups.replace("[0,1]", "[1]"),
            "state dict, param_groups[0]: lacks `fc1.weight`, which is in this optimizer's group",
        ),
        (|d| drop(d.state.insert(7, d.state[&0].clone())), "state dict, state.7: unknown"),
    ];
    for (spoil, text) in cases {
        let mut dict = before.clone();
        spoil(&mut dict);
        assert_ne!(dict, before, "{text}");
        assert_eq!(one.optimizer.load_state_dict(&dict).unwrap_err().to_string(), text);
        assert_eq!(one.optimizer.state_dict().unwrap(), before);
    }
}

fn rename(dict: &mut StateDict, index: usize, name: &str) {
    dict.params.get_mut(&index).unwrap().name = name.into();
}

#[test]
fn lengths_are_known_from_shapes_before_the_first_step() {
    let mut one = Process::new(&NAMES, &NAMES);
    one.step(1);
    let mut dict = one.optimizer.state_dict().unwrap();
    dict.params.clear();
    for state in dict.state.values_mut() {
        state.tensors.values_mut().for_each(|values| values.truncate(5));
    }
    let error = Process::new(&NAMES, &NAMES).optimizer.load_state_dict(&dict).unwrap_err();
    assert_eq!(error.to_string(), "state dict, state.0.exp_avg: expected 6 elements, got 5");
}

#[test]
fn state_without_names_is_loaded_by_position() {
    let mut one = Process::new(&NAMES, &NAMES);
    one.step(1);
    let named = one.optimizer.state_dict().unwrap();
    let unnamed = StateDict { params: std::collections::BTreeMap::new(), ..named.clone() };
    // A file of an older version, into an optimizer with names; and the other way round.
    let bytes = unnamed.to_safetensors().unwrap();
    assert!(!String::from_utf8_lossy(&bytes).contains("fc1.weight"));
    let mut other = Process::new(&NAMES, &NAMES);
    other.optimizer.load_state_dict(&StateDict::from_safetensors(&bytes).unwrap()).unwrap();
    assert_eq!(other.optimizer.state_dict().unwrap(), named);
    let groups = one.optimizer.groups().to_vec();
    let mut plain = AdamW::new(groups).unwrap();
    plain.load_state_dict(&named).unwrap();
    assert_eq!(plain.state_dict().unwrap(), unnamed);
}

#[test]
fn a_step_with_a_wrong_number_of_tensors_is_an_error() {
    let values = |count: usize| vec![vec![1.0_f32; 3]; count];
    let text = |expected, got| {
        format!(
            "expected {expected} parameters, got {got}; pass all, in the same order, to each step and as names"
        )
    };
    let mut one = AdamW::with_one_group(AdamWHyper::default(), 2).unwrap();
    let mut weights = values(3);
    let error = step(&mut one, &mut weights, &values(3)).unwrap_err();
    assert_eq!(error.to_string(), text(2, 3));
    let error = step(&mut one, &mut weights[..1], &values(1)).unwrap_err();
    assert!(matches!(error, Error::MissingParam { index: 1, count: 1 }));
    assert_eq!((weights, one.state_dict().unwrap().state.len()), (values(3), 0));

    // A group added later adds its tensors to the expected number.
    one.add_param_group(ParamGroup::new(AdamWHyper::default(), [2])).unwrap();
    let _ = step(&mut one, &mut values(3), &values(3)).unwrap();
    let error = step(&mut one, &mut values(4), &values(4)).unwrap_err();
    assert_eq!(error.to_string(), text(3, 4));

    // Tensors in no group are allowed, unless names set the expected number.
    let mut some = AdamW::new([ParamGroup::new(AdamWHyper::default(), [1])]).unwrap();
    let _ = step(&mut some, &mut values(4), &values(4)).unwrap();
    some.set_param_names(&["a", "b", "c"].map(ParamSpec::from)).unwrap();
    let error = step(&mut some, &mut values(4), &values(4)).unwrap_err();
    assert_eq!(error.to_string(), text(3, 4));
    let _ = step(&mut some, &mut values(3), &values(3)).unwrap();
}

#[test]
fn invalid_names_are_rejected() {
    let mut one = AdamW::with_one_group(AdamWHyper::default(), 2).unwrap();
    for wrong in [&["a"][..], &["a", "b", "c"]] {
        let error = one.set_param_names(&specs(wrong)).unwrap_err();
        assert!(matches!(error, Error::ParamCount { expected: 2, got } if got == wrong.len()));
    }
    let error = one.set_param_names(&specs(&["a", "a"])).unwrap_err();
    assert_eq!(error.to_string(), r#"two parameters are named "a"; names must be unique"#);
    assert!(one.state_dict().unwrap().params.is_empty());

    one.set_param_names(&[ParamSpec::from("a"), ParamSpec::new("b", &[2, 2])]).unwrap();
    let mut weights = vec![vec![1.0_f32; 3]; 2];
    let grads = weights.clone();
    let error = step(&mut one, &mut weights, &grads).unwrap_err();
    assert_eq!(error.to_string(), "parameter 1: the weight has 3 elements, its shape 4");
    assert_eq!(weights, grads);

    // After a group with another tensor is added, names must be set again.
    one.set_param_names(&["a", "b"].map(ParamSpec::from)).unwrap();
    one.add_param_group(ParamGroup::new(AdamWHyper::default(), [2])).unwrap();
    let (mut weights, grads) = (vec![vec![1.0_f32; 3]; 3], vec![vec![1.0_f32; 3]; 3]);
    let error = step(&mut one, &mut weights, &grads).unwrap_err();
    assert!(matches!(error, Error::ParamCount { expected: 2, got: 3 }));
    one.set_param_names(&["a", "b", "c"].map(ParamSpec::from)).unwrap();
    let _ = step(&mut one, &mut weights, &grads).unwrap();
}

/// A `torch.optim` optimizer created with `named_parameters()` saves `param_names`.
#[test]
fn pytorch_param_names_are_read() {
    let bytes = |header: &str| {
        let values: Vec<u8> = (0..6_u8).flat_map(|x| f32::from(x).to_le_bytes()).collect();
        let view = |at: usize| {
            let name = format!("state.{at}.momentum_buffer");
            (name, TensorView::new(Dtype::F32, vec![2, 3], &values).unwrap())
        };
        let metadata = HashMap::from([("torch_optim".to_owned(), header.to_owned())]);
        safetensors::serialize([view(0), view(2)], Some(metadata)).unwrap()
    };
    let header = r#"{"kind": "SGD", "param_groups": [{"params": [0, 1, 2], "lr": 0.5,
        "momentum": 0.5, "dampening": 0.0, "weight_decay": 0.0, "nesterov": false,
        "param_names": ["w", "b", "v"]}]}"#;
    let dict = StateDict::from_torch(&bytes(header)).unwrap();
    let expected =
        [ParamSpec::new("w", &[2, 3]), ParamSpec::from("b"), ParamSpec::new("v", &[2, 3])];
    assert!(dict.params.values().eq(&expected));

    let hyper = SgdHyper { momentum: 0.9, ..Default::default() };
    let mut sgd = Sgd::with_one_group(hyper, 3).unwrap();
    let names = [ParamSpec::from("b"), ParamSpec::new("v", &[2, 3]), ParamSpec::new("w", &[2, 3])];
    sgd.set_param_names(&names).unwrap();
    sgd.load_state_dict(&dict).unwrap();
    assert!(sgd.state_dict().unwrap().state.keys().eq(&[1, 2]));
    assert!(sgd.state_dict().unwrap().params.values().eq(&names));

    let short = header.replace(r#""w", "b", "v""#, r#""w", "b""#);
    let error = StateDict::from_torch(&bytes(&short)).unwrap_err().to_string();
    assert_eq!(error, "state dict, param_names: the number of names is not that of `params`");
}
