//! `GradScaler`: compared with recorded call sequences of PyTorch and with a reference scaler;
//! several ranks; devices with an overflow flag.

use std::sync::Mutex;
use std::sync::mpsc::{Receiver, Sender, channel};

use amp::{
    Error, GradScaler, InValues, LossScaler, LossScalerOptions, OverflowSource, Policy,
    ScaleChange, ScalerState, has_non_finite,
};
use proptest::prelude::*;
use serde::Deserialize;
use serde_json::{Value, json};

use crate::common;
use crate::twin::{Op, Real, Sgd, compare};

#[derive(Deserialize)]
struct Sequence {
    enabled: bool,
    params_without_grad: Vec<usize>,
    ops: Vec<String>,
    /// `["ok", value]` or `[exception, message]`.
    result: Vec<(String, Value)>,
    params: Vec<f32>,
}

/// PyTorch's exception and message for our `error`.
fn raised(error: &Error) -> (&'static str, String) {
    match error {
        Error::NotScaled { call } => {
            let call = if *call == "unscale" { "unscale_" } else { call };
            let hint = "This may indicate your script did not use scaler.scale(loss or outputs) \
                        earlier in the iteration.";
            ("AssertionError", format!("Attempted {call} but _scale is None.  {hint}"))
        }
        Error::UnscaledTwice { .. } => {
            let already =
                "unscale_() has already been called on this optimizer since the last update().";
            ("RuntimeError", already.into())
        }
        Error::UnscaledAfterStep { .. } => {
            ("RuntimeError", "unscale_() is being called after step().".into())
        }
        Error::SteppedTwice { .. } => {
            ("RuntimeError", "step() has already been called since the last update().".into())
        }
        Error::NothingChecked { optimizer } => {
            let which = if optimizer.is_some() { "for this optimizer" } else { "prior to update" };
            ("AssertionError", format!("No inf checks were recorded {which}."))
        }
        other => panic!("PyTorch has no such error: {other}"),
    }
}

fn apply(real: &mut Real, op: &str, without_grad: &[usize]) -> Result<Value, Error> {
    let (name, index) = op.split_at(op.trim_end_matches(|c: char| c.is_ascii_digit()).len());
    let index = || index.parse::<usize>().unwrap();
    match name {
        "scale" => {
            for (i, optimizer) in real.optimizers.iter_mut().enumerate() {
                optimizer.grad = (!without_grad.contains(&i)).then_some(8.0);
            }
            real.scaler.scale().map(Value::from)
        }
        "inf" => {
            real.optimizers[index()].grad = Some(f32::INFINITY);
            Ok(Value::Null)
        }
        "unscale" => real.unscale(index()).map(Value::from),
        "step" => real.step(index()).map(Value::from),
        "update" => real.scaler.update().map(|_| Value::Null),
        "setf" => real.scaler.update_to(4.0).map(Value::from),
        "get_scale" => Ok(real.scaler.loss_scaler().scale().into()),
        "state_dict" => {
            let state = real.scaler.loss_scaler().state_dict();
            Ok(state.map_or_else(|| json!({}), |state| serde_json::to_value(state).unwrap()))
        }
        other => panic!("unknown operation {other}"),
    }
}

#[test]
fn calls_return_what_pytorch_returned() {
    let files = common::vectors("scaler_ops.json");
    let count = |file: &[u8]| serde_json::from_slice::<Vec<Sequence>>(file).unwrap().len();
    assert_eq!(count(&files[0]), 77);
    for file in files {
        for sequence in serde_json::from_slice::<Vec<Sequence>>(&file).unwrap() {
            let scaler = match sequence.enabled {
                true => LossScaler::new(LossScalerOptions {
                    init_scale: 8.0,
                    growth_interval: 2,
                    policy: Policy::Torch,
                    ..Default::default()
                })
                .unwrap(),
                false => LossScaler::disabled(),
            };
            let optimizers = vec![Sgd::default(); sequence.params.len()];
            let mut real = Real { scaler: GradScaler::new(scaler, InValues), optimizers };
            assert_eq!(sequence.ops.len(), sequence.result.len());
            for (at, (op, (kind, value))) in sequence.ops.iter().zip(&sequence.result).enumerate() {
                let got = match apply(&mut real, op, &sequence.params_without_grad) {
                    Ok(value) => ("ok", value),
                    Err(error) => {
                        let (kind, message) = raised(&error);
                        (kind, message.into())
                    }
                };
                assert_eq!(got, (kind.as_str(), value.clone()), "{at} of {:?}", sequence.ops);
            }
            let params: Vec<f32> = real.optimizers.iter().map(|sgd| sgd.param).collect();
            assert_eq!(params, sequence.params, "{:?}", sequence.ops);
        }
    }
}

fn op(optimizers: usize) -> impl Strategy<Value = Op> {
    let gradient = prop_oneof![
        Just(None),
        Just(Some(f32::INFINITY)),
        Just(Some(f32::NAN)),
        Just(Some(3e38)),
        (-10.0_f32..10.0).prop_map(Some),
    ];
    let i = 0..optimizers;
    prop_oneof![
        4 => Just(Op::Scale),
        4 => (i.clone(), gradient).prop_map(|(i, grad)| Op::Gradient(i, grad)),
        3 => i.clone().prop_map(Op::Unscale),
        4 => i.prop_map(Op::Step),
        4 => Just(Op::Update),
        1 => prop_oneof![Just(0.0), Just(1e-42), Just(f32::INFINITY), 1e-3_f32..1e6].prop_map(Op::UpdateTo),
        1 => (0..9_u64).prop_map(Op::Load),
        1 => (0..5_u64).prop_map(Op::SetGrowthInterval),
    ]
}

fn options() -> impl Strategy<Value = LossScalerOptions> {
    let policy = prop_oneof![
        Just(Policy::Torch),
        Just(Policy::Guarded { min_scale: 1.0 }),
        Just(Policy::Guarded { min_scale: 1e-6 }),
    ];
    // A factor of 1e-30 soon reaches subnormal scales and 0.
    let backoff = prop_oneof![Just(1e-30), Just(0.5), 0.1_f64..0.99];
    (1.0_f32..1e6, 1.01_f64..4.0, backoff, 1..5_u64, policy).prop_map(
        |(init_scale, growth_factor, backoff_factor, growth_interval, policy)| LossScalerOptions {
            init_scale,
            growth_factor,
            backoff_factor,
            growth_interval,
            policy,
        },
    )
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(2000))]
    #[test]
    fn scaler_equals_the_reference(
        options in options(),
        enabled in prop::bool::weighted(0.95),
        ops in prop::collection::vec(op(3), 0..80),
    ) {
        compare(options, enabled, 3, &ops);
    }
}

/// A maximum over ranks, which are threads, with one channel for each pair of ranks.
#[derive(Default)]
struct Ranks {
    to: Vec<Sender<Option<bool>>>,
    from: Vec<Receiver<Option<bool>>>,
}

impl Ranks {
    fn new(count: usize) -> Vec<Self> {
        let mut ranks: Vec<Self> = (0..count).map(|_| Self::default()).collect();
        for sender in 0..count {
            for receiver in 0..count {
                let (to, from) = channel();
                ranks[sender].to.push(to);
                ranks[receiver].from.push(from);
            }
        }
        ranks
    }

    fn max(&self, local: Option<bool>) -> Option<bool> {
        self.to.iter().for_each(|to| to.send(local).unwrap());
        self.from.iter().map(|from| from.recv().unwrap()).max().unwrap()
    }
}

fn scaler() -> LossScaler {
    LossScaler::new(LossScalerOptions { init_scale: 8.0, ..Default::default() }).unwrap()
}

/// Each rank has a shard; rank 1's overflows in the first iteration, rank 2 never has a gradient.
#[test]
fn all_ranks_skip_the_step_if_one_overflows() {
    for fused in [false, true] {
        let applied = Mutex::new(Vec::new());
        std::thread::scope(|scope| {
            for (rank, ranks) in Ranks::new(3).into_iter().enumerate() {
                let applied = &applied;
                scope.spawn(move || {
                    let mut scaler =
                        GradScaler::new(scaler(), |local| Ok::<_, Error>(ranks.max(local)));
                    for iteration in 0..2 {
                        let scale = scaler.scale().unwrap();
                        let bad = rank == 1 && iteration == 0;
                        let mut grads = vec![if bad { f32::NAN } else { scale }; 5];
                        grads.truncate(if rank == 2 { 0 } else { 5 });
                        let mut shards: Vec<&mut [f32]> = grads.chunks_mut(2).collect();
                        if !fused {
                            let found = scaler.unscale(7, &mut shards).unwrap();
                            assert_eq!(found, iteration == 0);
                        }
                        let check = || shards.iter().map(|shard| has_non_finite(shard)).max();
                        let permit = scaler.step(7, check).unwrap();
                        let change = scaler.update().unwrap();
                        let loss_scale = scaler.loss_scaler().scale();
                        applied.lock().unwrap().push((iteration, permit, change, loss_scale));
                    }
                });
            }
        });
        let mut applied = applied.into_inner().unwrap();
        applied.sort_by_key(|one| one.0);
        let permit = Some(if fused { 0.25 } else { 1.0 });
        let (skipped, stepped) =
            ((0, None, ScaleChange::BackedOff, 4.0), (1, permit, ScaleChange::Kept, 4.0));
        assert_eq!(applied, [[skipped; 3], [stepped; 3]].concat());
    }
}

/// A device whose f16 saturates at 65504 and sets an overflow flag.
#[derive(Default)]
struct Saturating {
    flag: bool,
    cleared: usize,
}

impl Saturating {
    fn backward(&mut self, grad: f32, scale: f32) -> f32 {
        self.flag |= grad * scale > 65504.0;
        (grad * scale).min(65504.0)
    }
}

struct Status<'a>(&'a Mutex<Saturating>);

impl OverflowSource for Status<'_> {
    type Error = Error;

    fn clear(&mut self) -> Result<(), Error> {
        let mut device = self.0.lock().unwrap();
        *device = Saturating { flag: false, cleared: device.cleared + 1 };
        Ok(())
    }

    fn overflowed(&mut self, local: Option<bool>) -> Result<Option<bool>, Error> {
        Ok(local.map(|found| found || self.0.lock().unwrap().flag))
    }
}

#[test]
fn overflow_flag_of_a_saturating_device_skips_the_step() {
    let device = Mutex::new(Saturating::default());
    let mut scaler = GradScaler::new(scaler(), Status(&device));
    // An overflow before `scale` does not count.
    device.lock().unwrap().flag = true;
    let mut run = |micro_batches: [f32; 2]| {
        let mut grads = [0.0];
        for grad in micro_batches {
            let scale = scaler.scale().unwrap();
            grads[0] += device.lock().unwrap().backward(grad, scale);
        }
        let permit = scaler.step(0, || Some(has_non_finite(&grads))).unwrap();
        (permit, scaler.update().unwrap())
    };
    assert_eq!(run([1.0, 1.0]), (Some(0.125), ScaleChange::Kept));
    // The first of two backward passes overflows: the second must not clear the flag.
    assert_eq!(run([1e4, 1.0]), (None, ScaleChange::BackedOff));
    assert_eq!(run([1e4, 1.0]), (Some(0.25), ScaleChange::Kept));
    assert_eq!(device.lock().unwrap().cleared, 3);
}

#[derive(Debug, PartialEq)]
enum Lost {
    Peer,
    Amp(Error),
}

impl From<Error> for Lost {
    fn from(error: Error) -> Self {
        Self::Amp(error)
    }
}

#[test]
fn a_failed_reduction_permits_no_step() {
    let mut peers = [Err(Lost::Peer), Err(Lost::Peer), Ok(Some(false))].into_iter();
    let mut scaler = GradScaler::new(scaler(), |_| peers.next().unwrap());
    scaler.scale().unwrap();
    let mut grads = [8.0_f32];
    assert_eq!(scaler.unscale(0, [&mut grads]), Err(Lost::Peer));
    assert_eq!(grads, [1.0]);
    let nothing = Error::NothingChecked { optimizer: Some(0) };
    assert_eq!(scaler.step(0, || unreachable!()), Err(Lost::Amp(nothing)));
    let twice = Error::UnscaledTwice { optimizer: 0 };
    assert_eq!(scaler.unscale(0, [&mut grads]), Err(Lost::Amp(twice)));
    // A fused step has written nothing, so it may be repeated.
    assert_eq!(scaler.step(1, || Some(false)), Err(Lost::Peer));
    assert_eq!(scaler.step(1, || Some(false)), Ok(Some(0.125)));
    assert_eq!(scaler.update(), Ok(ScaleChange::Kept));
}

#[test]
fn overflow_in_any_tensor_skips_the_step() {
    for bad in 0..3 {
        let mut scaler = GradScaler::new(scaler(), InValues);
        scaler.scale().unwrap();
        let mut grads = [[8.0_f32], [16.0], [24.0]];
        grads[bad] = [f32::NEG_INFINITY];
        assert_eq!(scaler.unscale(0, grads), Ok(true));
        assert_eq!(scaler.step(0, || unreachable!()), Ok(None));
    }
}

#[test]
fn an_error_at_the_floor_ends_the_iteration() {
    let policy = Policy::Guarded { min_scale: 8.0 };
    let options = LossScalerOptions { init_scale: 8.0, policy, ..Default::default() };
    let mut scaler = GradScaler::new(LossScaler::new(options).unwrap(), InValues);
    for _ in 0..2 {
        scaler.scale().unwrap();
        assert_eq!(scaler.step(0, || Some(true)), Ok(None));
        assert_eq!(scaler.update(), Err(Error::ScaleAtFloor { min_scale: 8.0 }));
    }
}

#[test]
fn only_the_guarded_policy_reports_an_overflowing_quotient() {
    let at = |policy| {
        let options = LossScalerOptions { init_scale: 1e-3, policy, ..Default::default() };
        LossScaler::new(options).unwrap()
    };
    for large in [3e38_f32, -3e38] {
        assert!(at(LossScalerOptions::default().policy).unscale(&mut [1.0, large]));
        assert!(!at(Policy::Torch).unscale(&mut [1.0, large]));
    }
    assert!(LossScaler::fixed(0.75).unwrap().unscale(&mut [3e38]));
}

#[test]
fn a_non_finite_unscale_factor_permits_no_step() {
    for init_scale in [0.0, 1e-40, f32::NAN] {
        let options = LossScalerOptions { init_scale, policy: Policy::Torch, ..Default::default() };
        let mut scaler = GradScaler::new(LossScaler::new(options).unwrap(), InValues);
        scaler.scale().unwrap();
        let mut grads = [1.0];
        assert_eq!(scaler.unscale(0, [&mut grads]), Ok(false));
        assert_eq!(grads, [1.0]);
        assert_eq!(scaler.step(0, || unreachable!()), Ok(None));
        assert_eq!(scaler.step(1, || Some(false)), Ok(None));
    }
}

#[test]
fn setting_an_invalid_factor_is_an_error_and_changes_nothing() {
    let mut scaler = scaler();
    scaler.set_growth_factor(3.0).unwrap();
    scaler.set_backoff_factor(0.25).unwrap();
    scaler.set_growth_interval(7).unwrap();
    let before = scaler.state_dict().unwrap();
    let expected = ScalerState {
        scale: 8.0,
        growth_factor: 3.0,
        backoff_factor: 0.25,
        growth_interval: 7,
        growth_tracker: 0,
    };
    assert_eq!(before, expected);
    assert!(scaler.set_growth_factor(1.0).is_err() && scaler.set_growth_factor(f64::NAN).is_err());
    assert!(scaler.set_backoff_factor(1.0).is_err() && scaler.set_backoff_factor(0.0).is_err());
    assert!(scaler.set_growth_interval(0).is_err());
    assert_eq!(scaler.state_dict(), Some(before));
    assert_eq!(LossScaler::disabled().set_growth_factor(2.0), Err(Error::NotDynamic));
}
