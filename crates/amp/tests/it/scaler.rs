//! `LossScaler`: compared with recorded runs of PyTorch's; saving and loading.

use std::collections::BTreeMap;

use amp::{
    Error, GradScaler, InValues, LossScaler, LossScalerOptions, Policy, ScalerState, has_non_finite,
};
use proptest::prelude::*;
use serde::Deserialize;

use crate::common;

#[derive(Deserialize)]
struct Recorded {
    traces: Vec<Trace>,
}

#[derive(Deserialize)]
struct Trace {
    config: BTreeMap<String, f64>,
    load_state_dict: Option<ScalerState>,
    set_scale: Option<BTreeMap<usize, f32>>,
    flags: Vec<u8>,
    /// Scale used, stepped, parameter became non-finite, scale after, tracker after.
    rows: Vec<(String, u8, u8, String, u64)>,
    final_state_dict: ScalerState,
}

/// The traces of each file.
fn traces() -> Vec<Vec<Trace>> {
    let parse = |text: Vec<u8>| serde_json::from_slice::<Recorded>(&text).unwrap().traces;
    common::vectors("scaler_trace.json").into_iter().map(parse).collect()
}

/// Replays a trace; `Err` describes the first difference.
fn replay(trace: &Trace, policy: Policy) -> Result<(), String> {
    let mut options = LossScalerOptions { policy, ..Default::default() };
    for (name, &value) in &trace.config {
        match name.as_str() {
            "init_scale" => options.init_scale = value as f32,
            "growth_factor" => options.growth_factor = value,
            "backoff_factor" => options.backoff_factor = value,
            "growth_interval" => options.growth_interval = value as u64,
            other => panic!("unknown option {other}"),
        }
    }
    let text = |error: Error| error.to_string();
    let mut scaler = GradScaler::new(LossScaler::new(options).map_err(text)?, InValues);
    if let Some(state) = &trace.load_state_dict {
        scaler.loss_scaler_mut().load_state_dict(Some(state)).map_err(text)?;
    }
    let hex = |bits: &str| u32::from_str_radix(bits, 16).unwrap();
    for (i, (row, &flag)) in trace.rows.iter().zip(&trace.flags).enumerate() {
        let (used, stepped, became_nonfinite, after, tracker) = row;
        let before = scaler.scale().map_err(text)?;
        let values = [0.0, f32::INFINITY, f32::NAN, f32::NEG_INFINITY];
        let grads = [1.0, values[usize::from(flag)]];
        let permit = scaler.step(0, || Some(has_non_finite(&grads))).map_err(text)?;
        match trace.set_scale.as_ref().and_then(|all| all.get(&i)) {
            Some(scale) => scaler.update_to(*scale).map_err(text)?,
            None => drop(scaler.update().map_err(text)?),
        }
        // If PyTorch applied an infinite gradient, we must not step.
        let expected = (hex(used), *stepped == 1 && *became_nonfinite == 0, hex(after), *tracker);
        let after = scaler.loss_scaler();
        let got =
            (before.to_bits(), permit.is_some(), after.scale().to_bits(), after.growth_tracker());
        if got != expected {
            return Err(format!("iteration {i}: {got:x?} is not {expected:x?}"));
        }
    }
    assert_eq!(scaler.loss_scaler().state_dict(), Some(trace.final_state_dict));
    Ok(())
}

#[test]
fn torch_policy_reproduces_every_trace() {
    let files = traces();
    assert_eq!(files[0].len(), 14);
    for (i, trace) in files.iter().flatten().enumerate() {
        replay(trace, Policy::Torch).unwrap_or_else(|why| panic!("trace {i}: {why}"));
    }
}

#[test]
fn guarded_policy_differs_from_torch_only_in_its_edge_cases() {
    let policy = LossScalerOptions::default().policy;
    for (i, trace) in traces()[0].iter().enumerate() {
        // The scale's reciprocal became infinite, or a loaded count was past the interval.
        let underflowed = trace.rows.iter().any(|row| row.2 == 1);
        let stale = (trace.load_state_dict).is_some_and(|s| s.growth_tracker >= s.growth_interval);
        let result = replay(trace, policy);
        assert_eq!(result.is_err(), underflowed || stale, "trace {i}: {result:?}");
    }
}

#[test]
fn state_has_pytorchs_keys() {
    let scaler = LossScaler::new(LossScalerOptions::default()).unwrap();
    let json = serde_json::to_string(&scaler.state_dict()).unwrap();
    let names = r#"{"scale":65536.0,"growth_factor":2.0,"backoff_factor":0.5,"growth_interval":2000,"_growth_tracker":0}"#;
    assert_eq!(json, names);
    assert!(serde_json::from_str::<ScalerState>(r#"{"scale":1.0}"#).is_err());
}

fn options() -> impl Strategy<Value = LossScalerOptions> {
    (1e-3_f32..1e6, 1.01_f64..4.0, 0.1_f64..0.99, 1..6_u64).prop_map(
        |(init_scale, growth_factor, backoff_factor, growth_interval)| LossScalerOptions {
            init_scale,
            growth_factor,
            backoff_factor,
            growth_interval,
            policy: Policy::Torch,
        },
    )
}

proptest! {
    #[test]
    fn a_loaded_scaler_continues_like_the_saved_one(
        options in options(),
        overflows in prop::collection::vec(any::<bool>(), 0..60),
        stop in 0..60_usize,
    ) {
        let mut first = LossScaler::new(options).unwrap();
        let mut second = LossScaler::new(LossScalerOptions { init_scale: 1.0, ..options }).unwrap();
        for (i, &found_inf) in overflows.iter().enumerate() {
            if i == stop {
                let json = serde_json::to_string(&first.state_dict().unwrap()).unwrap();
                let state: ScalerState = serde_json::from_str(&json).unwrap();
                second.load_state_dict(Some(&state)).unwrap();
            }
            first.update(found_inf).unwrap();
            if i >= stop {
                second.update(found_inf).unwrap();
                prop_assert_eq!(first.scale().to_bits(), second.scale().to_bits());
                prop_assert_eq!(first.growth_tracker(), second.growth_tracker());
            }
        }
    }
}

#[test]
fn missing_options_deserialize_to_their_defaults() {
    let read = |text: &str| serde_json::from_str::<LossScalerOptions>(text);
    assert_eq!(read("{}").unwrap(), LossScalerOptions::default());
    let some = read(r#"{"init_scale": 1024.0, "policy": "torch"}"#).unwrap();
    let torch = LossScalerOptions {
        init_scale: 1024.0,
        policy: Policy::Torch,
        ..LossScalerOptions::default()
    };
    assert_eq!(some, torch);
    let floor = read(r#"{"policy": {"guarded": {"min_scale": 0.5}}}"#).unwrap();
    assert_eq!(floor.policy, Policy::Guarded { min_scale: 0.5 });
    for options in [LossScalerOptions::default(), torch, floor] {
        assert_eq!(read(&serde_json::to_string(&options).unwrap()).unwrap(), options);
    }
    for unknown in [r#"{"scale": 1.0}"#, r#"{"policy": {"guarded": {"min_scale": 1.0, "max": 2}}}"#]
    {
        assert!(read(unknown).unwrap_err().to_string().contains("unknown field"), "{unknown}");
    }
}

#[test]
fn a_fixed_scale_is_saved_and_restored() {
    let saved = LossScaler::fixed(512.0).unwrap().state_dict().expect("the state of a fixed scale");
    let json = serde_json::to_string(&saved).unwrap();
    // PyTorch's keys; factors of 1 mark a fixed scale.
    let text = r#"{"scale":512.0,"growth_factor":1.0,"backoff_factor":1.0,"growth_interval":2000,"_growth_tracker":0}"#;
    assert_eq!(json, text);
    let mut other = LossScaler::fixed(1024.0).unwrap();
    other.load_state_dict(Some(&serde_json::from_str(&json).unwrap())).unwrap();
    assert_eq!(other.scale(), 512.0);
    assert!(other.options().is_none(), "still fixed");
    // Older versions saved no state.
    other.load_state_dict(None).unwrap();
    assert_eq!(other.scale(), 512.0);

    let mut dynamic = LossScaler::new(LossScalerOptions::default()).unwrap();
    let of_dynamic = dynamic.state_dict().unwrap();
    let text = |result: amp::Result<()>| result.unwrap_err().to_string();
    assert_eq!(
        text(dynamic.load_state_dict(Some(&saved))),
        "cannot load a fixed scaler's state into a scaler that is dynamic"
    );
    assert_eq!(
        text(other.load_state_dict(Some(&of_dynamic))),
        "cannot load a dynamic scaler's state into a scaler that is fixed"
    );
    assert_eq!(
        text(LossScaler::disabled().load_state_dict(Some(&saved))),
        "cannot load a fixed scaler's state into a scaler that is disabled"
    );
    for scale in [0.0, -1.0, f32::NAN, f32::INFINITY] {
        assert!(other.load_state_dict(Some(&ScalerState { scale, ..saved })).is_err());
    }
    assert_eq!(other.scale(), 512.0);
}
