//! Checks, unscaling, casts and the overflow flag on the simulator of CANN, for every chip.

use std::cell::Cell;
use std::rc::Rc;

use amp::npu::{DeviceOverflow, Operators, View, cast, has_non_finite, unscale};
use amp::{Error, GradScaler, LossScaler, LossScalerOptions, OverflowSource, Policy, ScaleChange};
use half::{bf16, f16};
use npu_sim::{Config, LATER, Session, Soc, operators, operators_of, ops, ops_without, start};
use npu_sys::sys::AclDataType;

const SOCS: [Soc; 3] = [Soc::Ascend910A, Soc::Ascend910B, Soc::Ascend910C];
const F32: AclDataType = AclDataType::FLOAT;
const F16: AclDataType = AclDataType::FLOAT16;
const BF16: AclDataType = AclDataType::BF16;

fn session(soc: Soc) -> Session {
    start(Config { soc, ..Config::default() })
}

fn bytes(values: &[f32], dtype: AclDataType) -> Vec<u8> {
    let all = values.iter();
    match dtype {
        F16 => all.flat_map(|x| f16::from_f32(*x).to_ne_bytes()).collect(),
        BF16 => all.flat_map(|x| bf16::from_f32(*x).to_ne_bytes()).collect(),
        _ => all.flat_map(|x| x.to_ne_bytes()).collect(),
    }
}

fn upload(on: &Operators, values: &[f32], dtype: AclDataType) -> View {
    let view = on.alloc(values.len(), dtype).unwrap();
    on.write(&view, &bytes(values, dtype)).unwrap();
    view
}

fn read(on: &Operators, view: &View) -> Vec<f32> {
    let bytes = on.read(view).unwrap();
    bytes.as_chunks().0.iter().map(|word| f32::from_ne_bytes(*word)).collect()
}

#[test]
fn unscale_equals_the_cpu_bit_for_bit() {
    let options =
        |init_scale, policy| LossScalerOptions { init_scale, policy, ..Default::default() };
    let guarded = LossScalerOptions::default().policy;
    let older = ops_without(LATER);
    for (soc, ops) in SOCS.iter().flat_map(|soc| [(*soc, ops()), (*soc, older)]) {
        let sim = session(soc);
        let on = operators_of(0, ops).unwrap();
        for (scale, policy) in [
            (65536.0, guarded),
            (3.0, guarded),
            (1.0, guarded),
            (1e-6, guarded),
            (1e-6, Policy::Torch),
        ] {
            let scaler = LossScaler::new(options(scale, policy)).unwrap();
            for bad in
                [None, Some(f32::INFINITY), Some(f32::NEG_INFINITY), Some(f32::NAN), Some(3e38)]
            {
                let mut first: Vec<f32> = (0..37).map(|i| 0.37 * i as f32 - 5.0).collect();
                let mut second = vec![-1.5_f32; 300];
                second[299] = bad.unwrap_or(2.0);
                let views =
                    [upload(&on, &first, F32), upload(&on, &[], F32), upload(&on, &second, F32)];
                let found = unscale(&on, &views, &scaler).unwrap();
                // Without short-circuit: both are unscaled.
                let expected = scaler.unscale(&mut first) | scaler.unscale(&mut second);
                assert_eq!(found, Some(expected), "{soc:?} {scale} {bad:?}");
                for (view, expected) in [(&views[0], &first), (&views[2], &second)] {
                    let bits = |x: &[f32]| {
                        x.iter()
                            .map(|x| if x.is_nan() { 0 } else { x.to_bits() })
                            .collect::<Vec<_>>()
                    };
                    assert_eq!(bits(&read(&on, view)), bits(expected), "{soc:?} {scale} {bad:?}");
                }
            }
            assert_eq!(unscale(&on, &[], &scaler).unwrap(), None);
        }
        drop(on);
        assert_eq!(sim.finish(), [""; 0]);
    }
}

#[test]
fn long_tensor_lists_are_split_at_canns_limit() {
    let sim = session(Soc::Ascend910B);
    let on = operators(0).unwrap();
    let mut views: Vec<View> = (0..600).map(|_| upload(&on, &[4.0], F32)).collect();
    let scaler = LossScaler::fixed(2.0).unwrap();
    assert_eq!(unscale(&on, &views, &scaler).unwrap(), Some(false));
    assert_eq!(sim.calls("aclnnForeachNonFiniteCheckAndUnscale"), 3);
    assert!(views.iter().all(|view| read(&on, view) == [2.0]));
    views[0] = upload(&on, &[f32::INFINITY], F32);
    assert_eq!(
        unscale(&on, &views, &scaler).unwrap(),
        Some(true),
        "the first list's result is kept"
    );
    drop((views, on));
    assert_eq!(sim.finish(), [""; 0]);
}

#[test]
fn one_non_finite_element_is_found_at_any_position() {
    for soc in [Soc::Ascend910B, Soc::Ascend910C] {
        let sim = session(soc);
        let on = operators(0).unwrap();
        for dtype in [F32, F16, BF16] {
            for at in [0, 16, 40] {
                let mut values = [65504.0; 41];
                let fine = upload(&on, &values, dtype);
                assert_eq!(has_non_finite(&on, std::slice::from_ref(&fine)).unwrap(), Some(false));
                values[at] = if at == 16 { f32::NAN } else { f32::NEG_INFINITY };
                let bad = upload(&on, &values, dtype);
                let waits = sim.calls("aclrtSynchronizeStream");
                assert_eq!(has_non_finite(&on, &[fine.clone(), bad.clone()]).unwrap(), Some(true));
                assert_eq!(has_non_finite(&on, &[bad, fine]).unwrap(), Some(true));
                assert_eq!(sim.calls("aclrtSynchronizeStream") - waits, 2, "one copy each");
            }
        }
        assert_eq!(has_non_finite(&on, &[]).unwrap(), None);
        drop(on);
        assert_eq!(sim.finish(), [""; 0]);
    }
}

#[test]
fn casts_round_to_nearest_even() {
    for soc in SOCS {
        let sim = session(soc);
        let on = operators(0).unwrap();
        let values: Vec<f32> = (0..500).map(|i| (i as f32 - 250.0) * 1.000_37).collect();
        let from = upload(&on, &values, F32);
        for dtype in [F16, BF16] {
            let to = on.alloc(values.len(), dtype).unwrap();
            let done = cast(&on, &from, &to);
            if (soc, dtype) == (Soc::Ascend910A, BF16) {
                assert_eq!(done, Err(Error::Unsupported { what: "bf16 on this chip" }));
                continue;
            }
            done.unwrap();
            assert_eq!(on.read(&to).unwrap(), bytes(&values, dtype));
            let back = on.alloc(values.len(), F32).unwrap();
            cast(&on, &to, &back).unwrap();
            let expected: Vec<f32> = match dtype {
                F16 => values.iter().map(|x| f16::from_f32(*x).to_f32()).collect(),
                _ => values.iter().map(|x| bf16::from_f32(*x).to_f32()).collect(),
            };
            assert_eq!(read(&on, &back), expected);
        }
        let short = on.alloc(3, F16).unwrap();
        assert_eq!(cast(&on, &from, &short), Err(Error::LengthMismatch { expected: 500, got: 3 }));
        let number = on.alloc(500, AclDataType::INT64).unwrap();
        assert!(matches!(cast(&on, &from, &number), Err(Error::Unsupported { .. })));
        let half = upload(&on, &[1.0], F16);
        let scaler = LossScaler::fixed(2.0).unwrap();
        assert!(matches!(unscale(&on, &[half], &scaler), Err(Error::Unsupported { .. })));
        drop((from, short, number, on));
        assert_eq!(sim.finish(), [""; 0]);
    }
}

/// Runs one rank's iteration, whose backward pass may overflow in f16; returns whether it stepped.
fn iterate<R>(scaler: &mut GradScaler<DeviceOverflow<R>>, on: &Operators, factor: f32) -> bool
where
    R: FnMut(Option<bool>) -> Result<Option<bool>, Error>,
{
    scaler.scale().unwrap();
    let grad = upload(on, &[60000.0, 1.0], F16);
    on.muls(&grad, &grad, factor).unwrap();
    let found = has_non_finite(on, &[grad]).unwrap();
    let taken = scaler.step(0, || found).unwrap().is_some();
    let change = scaler.update().unwrap();
    assert_eq!(change == ScaleChange::BackedOff, !taken);
    taken
}

#[test]
fn an_overflow_on_one_rank_skips_the_step_on_all() {
    for soc in SOCS {
        let sim = session(soc);
        let on = operators(0).unwrap();
        let (other, reported) = (Rc::new(Cell::new(None)), Rc::new(Cell::new(None)));
        let (theirs, mine) = (Rc::clone(&other), Rc::clone(&reported));
        let source = DeviceOverflow::new(on.clone(), move |local: Option<bool>| {
            mine.set(local);
            Ok::<_, Error>(local.max(theirs.get()))
        });
        assert_eq!(source.is_flag(), soc == Soc::Ascend910A);
        let scaler = LossScaler::new(LossScalerOptions::default()).unwrap();
        let mut scaler = GradScaler::new(scaler, source);
        assert!(iterate(&mut scaler, &on, 1.0));
        assert!(!iterate(&mut scaler, &on, 2.0), "{soc:?}: this rank overflows");
        assert_eq!(reported.get(), Some(true));
        assert!(iterate(&mut scaler, &on, 1.0), "{soc:?}: the flag is cleared");
        other.set(Some(true));
        assert!(!iterate(&mut scaler, &on, 1.0), "{soc:?}: another rank overflows");
        assert_eq!(reported.get(), Some(false));
        other.set(Some(false));
        assert_eq!(scaler.loss_scaler().scale(), 16384.0);
        drop((scaler, on));
        assert_eq!(sim.finish(), [""; 0]);
    }
}

#[test]
fn a_failed_device_reports_an_overflow_to_the_other_ranks() {
    let sim = session(Soc::Ascend910A);
    let reported = Rc::new(Cell::new(None));
    let mine = Rc::clone(&reported);
    let mut source = DeviceOverflow::new(operators(0).unwrap(), move |local: Option<bool>| {
        mine.set(local);
        Ok::<_, Error>(local)
    });
    source.clear().unwrap();
    sim.fail("aclrtGetOverflowStatus", 1, 507_035);
    assert!(matches!(source.overflowed(Some(false)), Err(Error::Npu(_))));
    assert_eq!(reported.get(), Some(true));
    sim.fail("aclrtResetOverflowStatus", 1, 507_035);
    assert!(matches!(source.clear(), Err(Error::Npu(_))));
    drop(source);
    assert_eq!(sim.finish(), [""; 0]);
}
