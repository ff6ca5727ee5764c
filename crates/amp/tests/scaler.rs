//! The scaler against recorded runs of PyTorch's, and against a ten-line model of its rule.

#![expect(clippy::unwrap_used, reason = "a test that cannot go on stops there")]

use std::collections::BTreeMap;
use std::path::Path;

use amp::{Error, LossScaler, LossScalerOptions, Policy, ScalerState};
use proptest::prelude::*;
use serde::Deserialize;

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

fn traces() -> Vec<Trace> {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/vectors/scaler_trace.json");
    let text = std::fs::read(&path).unwrap_or_else(|error| panic!("{}: {error}", path.display()));
    serde_json::from_slice::<Recorded>(&text).unwrap().traces
}

/// Runs a trace; an `Err` says where it left the record.
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
    let mut scaler = LossScaler::new(options).map_err(text)?;
    if trace.load_state_dict.is_some() {
        scaler.load_state_dict(trace.load_state_dict.as_ref()).map_err(text)?;
    }
    let hex = |bits: &str| u32::from_str_radix(bits, 16).unwrap();
    for (i, (row, &flag)) in trace.rows.iter().zip(&trace.flags).enumerate() {
        let (used, stepped, _, after, tracker) = row;
        let found_inf = flag != 0;
        assert_eq!(found_inf, *stepped == 0);
        let before = scaler.scale().to_bits();
        match trace.set_scale.as_ref().and_then(|all| all.get(&i)) {
            Some(scale) => scaler.set_scale(*scale).map_err(text)?,
            None => drop(scaler.update(found_inf).map_err(text)?),
        }
        let got = (before, scaler.scale().to_bits(), scaler.growth_tracker());
        if got != (hex(used), hex(after), *tracker) {
            return Err(format!("iteration {i}: {got:x?} is not {row:?}"));
        }
    }
    assert_eq!(scaler.state_dict(), Some(trace.final_state_dict));
    Ok(())
}

#[test]
fn torch_policy_reproduces_every_trace() {
    let traces = traces();
    assert_eq!(traces.len(), 14);
    for (i, trace) in traces.iter().enumerate() {
        replay(trace, Policy::Torch).unwrap_or_else(|why| panic!("trace {i}: {why}"));
    }
}

#[test]
fn the_default_policy_departs_only_where_torch_goes_wrong() {
    let policy = LossScalerOptions::default().policy;
    for (i, trace) in traces().iter().enumerate() {
        // A scale that sank until its reciprocal was infinite, or a stale tracker.
        let sank = trace.rows.iter().any(|row| row.2 == 1);
        let stale = (trace.load_state_dict).is_some_and(|s| s.growth_tracker >= s.growth_interval);
        let result = replay(trace, policy);
        assert_eq!(result.is_err(), sank || stale, "trace {i}: {result:?}");
    }
}

#[test]
fn state_has_pytorchs_names() {
    let scaler = LossScaler::new(LossScalerOptions::default()).unwrap();
    let json = serde_json::to_string(&scaler.state_dict()).unwrap();
    let names = r#"{"scale":65536.0,"growth_factor":2.0,"backoff_factor":0.5,"growth_interval":2000,"_growth_tracker":0}"#;
    assert_eq!(json, names);
    assert!(serde_json::from_str::<ScalerState>(r#"{"scale":1.0}"#).is_err());
}

/// PyTorch's rule in ten lines.
fn model(scale: &mut f32, tracker: &mut u64, options: &LossScalerOptions, found_inf: bool) {
    if found_inf {
        *scale = (f64::from(*scale) * options.backoff_factor) as f32;
        *tracker = 0;
        return;
    }
    *tracker += 1;
    if *tracker == options.growth_interval {
        let grown = (f64::from(*scale) * options.growth_factor) as f32;
        *scale = if grown.is_finite() { grown } else { *scale };
        *tracker = 0;
    }
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
    fn follows_the_model(options in options(), verdicts in prop::collection::vec(any::<bool>(), 0..300)) {
        let mut torch = LossScaler::new(options).unwrap();
        let policy = Policy::Guarded { min_scale: 1e-4 };
        let mut guarded = LossScaler::new(LossScalerOptions { policy, ..options }).unwrap();
        let (mut scale, mut tracker) = (options.init_scale, 0);
        let mut above_floor = true;
        for found_inf in verdicts {
            model(&mut scale, &mut tracker, &options, found_inf);
            torch.update(found_inf).unwrap();
            prop_assert_eq!(torch.scale().to_bits(), scale.to_bits());
            prop_assert_eq!(torch.growth_tracker(), tracker);
            // Guarded is the same until the floor is reached, and never below it.
            let refused = guarded.update(found_inf).is_err();
            above_floor &= scale >= 1e-4;
            if above_floor {
                prop_assert_eq!(guarded.scale().to_bits(), scale.to_bits());
            }
            prop_assert!(guarded.scale() >= 1e-4);
            prop_assert!(!refused || (found_inf && guarded.scale() == 1e-4));
        }
    }

    #[test]
    fn going_on_after_a_load_is_the_same(
        options in options(),
        verdicts in prop::collection::vec(any::<bool>(), 0..60),
        stop in 0..60_usize,
    ) {
        let mut first = LossScaler::new(options).unwrap();
        let mut second = LossScaler::new(LossScalerOptions { init_scale: 1.0, ..options }).unwrap();
        for (i, &found_inf) in verdicts.iter().enumerate() {
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
