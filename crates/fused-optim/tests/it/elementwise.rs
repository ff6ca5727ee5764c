//! A user-defined rule: it equals a plain loop bit for bit. `props.rs` tests it together with the
//! crate's rules: splitting, threads, masters, skipping, saving.

use fused_optim::{
    Clip, CpuOptimizer, ElementwiseRule, Error, FoundInf, HyperParam, Optimizer, ParamGroup,
    ParamMut, Result, Slice, StepCtl,
};
use proptest::prelude::*;
use serde::{Deserialize, Serialize};

/// Momentum divided by the largest gradient so far, and a count of steps.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub(crate) struct OwnHyper {
    pub(crate) lr: f64,
    pub(crate) momentum: f64,
    pub(crate) maximize: bool,
}

impl Default for OwnHyper {
    fn default() -> Self {
        Self { lr: 0.1, momentum: 0.75, maximize: false }
    }
}

#[derive(Clone, Copy)]
pub(crate) struct Numbers {
    lr: f32,
    momentum: f32,
}

impl ElementwiseRule for OwnHyper {
    const KIND: &'static str = "own";
    const SLOTS: &'static [&'static str] = &["momentum_buffer", "largest", "count"];
    type State = [f32; 3];
    type Numbers = Numbers;

    fn validate(&self) -> Result<()> {
        let value = self.lr;
        if value < 0.0 {
            return Err(Error::InvalidHyper { name: "lr", value });
        }
        Ok(())
    }

    fn param_mut(&mut self, param: HyperParam) -> Option<&mut f64> {
        match param {
            HyperParam::Lr => Some(&mut self.lr),
            HyperParam::Momentum => Some(&mut self.momentum),
            _ => None,
        }
    }

    fn maximize(&self) -> bool {
        self.maximize
    }

    fn initial(&self, slot: &str) -> f32 {
        if slot == "largest" { 0.5 } else { 0.0 }
    }

    fn numbers(&self, step: u64) -> Numbers {
        Numbers { lr: (self.lr / (step as f64).sqrt()) as f32, momentum: self.momentum as f32 }
    }

    #[inline(always)]
    fn update(n: &Numbers, p: f32, g: f32, [b, largest, count]: [f32; 3]) -> (f32, [f32; 3]) {
        let b = b * n.momentum + g;
        let largest = if g.abs() > largest { g.abs() } else { largest };
        (p - n.lr * (b / largest), [b, largest, count + 1.0])
    }
}

/// The rule as a plain loop over one tensor.
fn plain(hyper: OwnHyper, weight: &mut [f32], grads: &[Vec<f32>], scale: f32, limit: f32) {
    let mut state = vec![(0.0_f32, 0.5_f32); weight.len()];
    for (step, grad) in grads.iter().enumerate() {
        let lr = (hyper.lr / ((step + 1) as f64).sqrt()) as f32;
        for ((p, g), (b, largest)) in weight.iter_mut().zip(grad).zip(&mut state) {
            let g = (g * scale).clamp(-limit, limit);
            let g = if hyper.maximize { -g } else { g };
            *b = *b * hyper.momentum as f32 + g;
            *largest = largest.max(g.abs());
            *p -= lr * (*b / *largest);
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    #[test]
    fn a_user_defined_rule_equals_a_plain_loop(
        (weight, grads) in (0..3000_usize).prop_flat_map(|count| {
            let values = || prop::collection::vec(-8.0_f32..8.0, count);
            (values(), prop::collection::vec(values(), 3))
        }),
        offset in 0..9_usize,
        threads in 1..4_usize,
        maximize in any::<bool>(),
    ) {
        let hyper = OwnHyper { maximize, ..OwnHyper::default() };
        let group = ParamGroup::new(hyper, [0]);
        let mut own = CpuOptimizer::new([group]).unwrap().with_threads(threads);
        let mut padded = [vec![0.0; offset], weight.clone()].concat();
        let ctl = StepCtl {
            grad_scale: 0.25,
            found_inf: FoundInf::Check,
            clip: Some(Clip::Value(1.5)),
        };
        for grad in &grads {
            let param = ParamMut::new(&mut padded[offset..], Some(Slice::F32(grad)));
            let _ = own.step(&mut [param], &ctl).unwrap();
        }
        let mut expected = weight;
        plain(hyper, &mut expected, &grads, 0.25, 1.5);
        prop_assert_eq!(&padded[offset..], &expected[..]);
    }
}

#[test]
fn a_user_defined_rule_has_a_kind_and_hyper_parameters() {
    let mut own = CpuOptimizer::with_one_group(OwnHyper::default(), 1).unwrap();
    let boxed: &mut dyn Optimizer = &mut own;
    assert_eq!((boxed.kind(), boxed.lr(0).unwrap()), ("own", 0.1));
    boxed.set_momentum(0, 0.5).unwrap();
    assert_eq!(boxed.momentum(0).unwrap(), Some(0.5));
    assert_eq!(boxed.weight_decay(0).unwrap(), None);
    let refused = boxed.set_weight_decay(0, 0.5).unwrap_err();
    assert_eq!(refused.to_string(), "own has no weight decay");
    assert_eq!(boxed.set_lr(0, -1.0).unwrap_err().to_string(), "invalid learning rate: -1");
    let mut weight = [half::bf16::ONE; 2];
    let param = ParamMut::new(&mut weight[..], Some(Slice::F32(&[1.0, -1.0])));
    let _ = boxed.step(&mut [param], &StepCtl::PLAIN).unwrap();
    let state = &own.state_dict().unwrap().state[&0];
    assert_eq!(state.tensors["count"], [1.0, 1.0]);
    assert_eq!(state.tensors["master"], [0.9, 1.1]);
}

/// Hyper-parameters are saved by name.
#[test]
fn hyper_parameters_without_names_are_an_error() {
    #[derive(Clone, Debug, Serialize, Deserialize)]
    struct Unnamed(f64);

    impl ElementwiseRule for Unnamed {
        const KIND: &'static str = "unnamed";
        const SLOTS: &'static [&'static str] = &[];
        type State = [f32; 0];
        type Numbers = f32;

        fn param_mut(&mut self, _: HyperParam) -> Option<&mut f64> {
            None
        }

        fn numbers(&self, _: u64) -> f32 {
            self.0 as f32
        }

        fn update(lr: &f32, p: f32, g: f32, _: [f32; 0]) -> (f32, [f32; 0]) {
            (p - lr * g, [])
        }
    }

    let refused = CpuOptimizer::with_one_group(Unnamed(0.1), 1).unwrap_err();
    assert_eq!(refused.to_string(), "cannot save hyper-parameters that have no names");
}

/// State dicts use these names themselves.
#[test]
fn names_of_a_rules_state_must_be_unique() {
    macro_rules! refused {
        ($slots:expr, $field:ident) => {{
            #[derive(Clone, Debug, Serialize, Deserialize)]
            struct Rule {
                $field: f64,
            }

            impl ElementwiseRule for Rule {
                const KIND: &'static str = "rule";
                const SLOTS: &'static [&'static str] = &$slots;
                type State = [f32; 2];
                type Numbers = f32;

                fn param_mut(&mut self, _: HyperParam) -> Option<&mut f64> {
                    None
                }

                fn numbers(&self, _: u64) -> f32 {
                    self.$field as f32
                }

                fn update(lr: &f32, p: f32, g: f32, state: [f32; 2]) -> (f32, [f32; 2]) {
                    (p - lr * g, state)
                }
            }

            CpuOptimizer::with_one_group(Rule { $field: 0.1 }, 1).unwrap_err().to_string()
        }};
    }
    for (error, name) in [
        (refused!(["a", "a"], lr), "a"),
        (refused!(["master", "a"], lr), "master"),
        (refused!(["a", "step"], lr), "step"),
        (refused!(["a", "b"], params), "params"),
    ] {
        assert!(error.contains(name) && error.contains("reserved for state dicts"), "{error}");
    }
}
