//! Clipping compared with values recorded from real PyTorch, and in a step compared with the
//! clipping functions.

use std::env;
use std::fs;
use std::path::{Path, PathBuf};

use fused_optim::{
    AdamW, AdamWHyper, Applied, Clip, ClipNorm, Error, FoundInf, Lamb, LambHyper, Optimizer,
    ParamGroup, ParamMut, Slice, SliceMut, StepCtl, clip_grad_norm, clip_grad_value,
};
use half::f16;
use serde::Deserialize;
use serde_json::Value;

#[derive(Deserialize)]
struct Case {
    max_norm: f64,
    norm_type: Value,
    grad_bits: Vec<Vec<u32>>,
    total_norm: f64,
    clipped: Vec<Vec<f32>>,
}

#[test]
fn norms_and_gradients_agree_with_pytorch() {
    let own = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/vectors");
    let mut files = vec![own.join("clip.json")];
    if let Some(folder) = env::var_os("ORACLE_DIR").map(PathBuf::from) {
        assert!(folder.is_dir(), "ORACLE_DIR: {} is not a folder", folder.display());
        match folder.join("clip.json") {
            file if file.exists() => files.push(file),
            _ => println!("ORACLE_DIR has no clip.json"),
        }
    }
    for file in files {
        let text = fs::read_to_string(file).unwrap();
        let cases: Vec<Case> = serde_json::from_str(&text).unwrap();
        assert!(!cases.is_empty());
        for case in cases {
            let start = case.grad_bits.iter();
            let start: Vec<Vec<f32>> =
                start.map(|bits| bits.iter().map(|b| f32::from_bits(*b)).collect()).collect();
            let mut grads = start.clone();
            let mut views: Vec<_> = grads.iter_mut().map(|g| SliceMut::F32(g)).collect();
            // JSON has no infinity; it is a string.
            let norm_type = case.norm_type.as_f64().unwrap_or(f64::INFINITY);
            let clip =
                ClipNorm { norm_type, error_if_nonfinite: true, ..ClipNorm::new(case.max_norm) };
            let norm = clip_grad_norm(&mut views, clip).unwrap();
            // PyTorch sums in f32, eight terms at a time, with a rounding error of 2^-24 each.
            let terms: usize = start.iter().map(Vec::len).sum();
            let tolerance = 1e-6 + terms as f64 / 8.0 * 2.0_f64.powi(-24);
            let close =
                |got: f64, expected: f64| (got - expected).abs() <= tolerance * expected.abs();
            assert!(close(norm, case.total_norm), "{norm}, not {}", case.total_norm);
            for (got, expected) in grads.concat().iter().zip(case.clipped.concat()) {
                assert!(close((*got).into(), expected.into()), "{got}, not {expected}");
            }
            // Compare with f64, whose rounding errors are negligible.
            let sizes = || start.iter().flatten().map(|x| f64::from(x.abs()));
            let exact = match norm_type {
                f64::INFINITY => sizes().fold(0.0, f64::max),
                power => sizes().map(|x| x.powf(power)).sum::<f64>().powf(power.recip()),
            };
            assert!((norm - exact).abs() <= 1e-9 * exact, "{norm}, not {exact}");
            let factor = (case.max_norm / (exact + 1e-6)).min(1.0);
            for (got, x) in grads.concat().iter().zip(start.concat()) {
                let (got, expected) = (f64::from(*got), f64::from(x) * factor);
                assert!((got - expected).abs() <= 2e-7 * expected.abs(), "{got}, not {expected}");
            }
        }
    }
}

fn adamw() -> AdamW {
    AdamW::with_one_group(AdamWHyper { lr: 0.1, ..Default::default() }, 2).unwrap()
}

/// One step of two tensors.
fn step(
    optimizer: &mut dyn Optimizer,
    weights: &mut [Vec<f32>; 2],
    grads: &[Vec<f32>; 2],
    ctl: StepCtl,
) -> fused_optim::Result<Applied> {
    let mut params: Vec<_> = (weights.iter_mut().zip(grads))
        .map(|(weight, grad)| ParamMut::new(&mut weight[..], Some(Slice::F32(grad))))
        .collect();
    optimizer.step(&mut params, &ctl)
}

#[test]
fn a_step_that_clips_equals_clipping_and_then_a_step() {
    let grads = [vec![3.0, -4.0, 0.5], vec![12.0]];
    for clip in [
        Clip::norm(1.0),
        Clip::norm(100.0),
        Clip::Norm(ClipNorm { norm_type: f64::INFINITY, ..ClipNorm::new(2.0) }),
        Clip::Norm(ClipNorm { norm_type: 1.0, ..ClipNorm::new(2.0) }),
        Clip::Value(0.75),
    ] {
        for found_inf in [FoundInf::Check, FoundInf::Known(false)] {
            let (mut fused, mut apart) = (adamw(), adamw());
            let mut weights = [vec![1.0, 2.0, 3.0], vec![-1.0]];
            let mut others = weights.clone();
            for _ in 0..3 {
                let ctl = StepCtl { grad_scale: 0.25, found_inf, clip: Some(clip) };
                let _ = step(&mut fused, &mut weights, &grads, ctl).unwrap();

                let mut clipped = grads.clone().map(|grad| grad.iter().map(|g| g * 0.25).collect());
                let clipped: &mut [Vec<f32>; 2] = &mut clipped;
                let mut views: Vec<_> = clipped.iter_mut().map(|g| SliceMut::F32(g)).collect();
                match clip {
                    Clip::Norm(clip) => {
                        let norm = clip_grad_norm(&mut views, clip).unwrap();
                        assert_eq!(fused.grad_norm(), Some(norm));
                    }
                    Clip::Value(value) => clip_grad_value(&mut views, value).unwrap(),
                    _ => unreachable!(),
                }
                let _ = step(&mut apart, &mut others, clipped, StepCtl::PLAIN).unwrap();
            }
            for (one, other) in weights.concat().iter().zip(others.concat()) {
                assert!((one - other).abs() <= 4e-7 * other.abs(), "{one} {other} {clip:?}");
            }
            let moment = &fused.state_dict().unwrap().state[&0].tensors["exp_avg"];
            assert!((moment[1] / moment[0] + 4.0 / 3.0).abs() < 1e-6 || clip == Clip::Value(0.75));
        }
    }
}

/// Two ranks with a part of the gradients each, and one rank with all of them.
#[test]
fn total_norm_clips_sharded_gradients_as_the_whole() {
    let grads = [vec![3.0, -4.0, 0.5], vec![12.0]];
    let clip = ClipNorm::new(1.0);
    let mut weights = [vec![1.0, 2.0, 3.0], vec![-1.0]];
    let mut parts = weights.clone();
    let ctl = |clip| StepCtl {
        grad_scale: 0.25,
        found_inf: FoundInf::Check,
        clip: Some(Clip::Norm(clip)),
    };
    let mut whole = adamw();
    let hyper = AdamWHyper { lr: 0.1, ..Default::default() };
    let mut ranks = [0, 1].map(|_| AdamW::with_one_group(hyper, 1).unwrap());
    for _ in 0..3 {
        let _ = step(&mut whole, &mut weights, &grads, ctl(clip)).unwrap();
        let known = clip.with_total_norm(whole.grad_norm().unwrap());
        for (at, rank) in ranks.iter_mut().enumerate() {
            let part = ParamMut::new(&mut parts[at][..], Some(Slice::F32(&grads[at])));
            let _ = rank.step(&mut [part], &ctl(known)).unwrap();
            assert_eq!(rank.grad_norm(), whole.grad_norm());
        }
        assert_eq!(parts, weights);
    }
    // A norm that is not finite skips the step on all ranks, also on those whose gradients are
    // finite.
    let before = parts.clone();
    for norm in [f64::INFINITY, f64::NAN] {
        let part = ParamMut::new(&mut parts[0][..], Some(Slice::F32(&grads[0])));
        let skipped = ranks[0].step(&mut [part], &ctl(clip.with_total_norm(norm))).unwrap();
        assert_eq!(skipped, Applied::SkippedNonFinite);
    }
    assert_eq!(parts, before);
    let mut negative = [ParamMut::new(&mut parts[0][..], None)];
    let refused = ranks[0].step(&mut negative, &ctl(clip.with_total_norm(-1.0))).unwrap_err();
    assert_eq!(refused.to_string(), "invalid total_norm: -1");
    // SAFETY: the CPU does not read the address.
    #[expect(unsafe_code, reason = "an address is only a number")]
    let at = unsafe { clip.with_total_norm_at(64) };
    let expected = "a `total_norm` at a CUDA device address is not supported on this device";
    for found_inf in [FoundInf::Check, FoundInf::Known(true)] {
        let part = ParamMut::new(&mut parts[0][..], Some(Slice::F32(&grads[0])));
        let ctl = StepCtl { found_inf, ..ctl(at) };
        assert_eq!(ranks[0].step(&mut [part], &ctl).unwrap_err().to_string(), expected);
    }
    assert_eq!(parts, before);
    let mut grad = [3.0_f32, 4.0];
    let views = &mut [SliceMut::F32(&mut grad)];
    assert_eq!(clip_grad_norm(views, at).unwrap_err().to_string(), expected);
    assert_eq!(clip_grad_norm(views, clip.with_total_norm(10.0)).unwrap(), 10.0);
    assert!((grad[0] - 0.3).abs() < 1e-6 && (grad[1] - 0.4).abs() < 1e-6);
}

#[test]
fn non_finite_gradients_skip_the_step_are_an_error_or_spread() {
    let grads = [vec![1.0, f32::INFINITY, 0.0], vec![1.0]];
    for norm_type in [2.0, f64::INFINITY, 3.0] {
        let strict = ClipNorm { norm_type, error_if_nonfinite: true, ..ClipNorm::new(1.0) };
        let mut optimizer = adamw();
        let mut weights = [vec![1.0, 2.0, 3.0], vec![-1.0]];
        let start = weights.clone();

        let ctl = StepCtl {
            found_inf: FoundInf::Check,
            clip: Some(Clip::Norm(strict)),
            ..StepCtl::PLAIN
        };
        let applied = step(&mut optimizer, &mut weights, &grads, ctl).unwrap();
        assert_eq!(applied, Applied::SkippedNonFinite, "the check comes before the refusal");

        let ctl = StepCtl { clip: Some(Clip::Norm(strict)), ..StepCtl::PLAIN };
        let error = step(&mut optimizer, &mut weights, &grads, ctl).unwrap_err();
        assert_eq!(error.to_string(), "the norm of the gradients is inf");
        assert_eq!((&weights, optimizer.state_dict().unwrap().state.len()), (&start, 0));

        let lax = Clip::Norm(ClipNorm { error_if_nonfinite: false, ..strict });
        let ctl = StepCtl { clip: Some(lax), ..StepCtl::PLAIN };
        let _ = step(&mut optimizer, &mut weights, &grads, ctl).unwrap();
        assert!(weights[0][1].is_nan() && weights[0][0].is_finite(), "inf · 0, and 1 · 0");
    }
}

#[test]
fn clip_functions_handle_halves_and_reject_invalid_values() {
    let mut halves = [f16::from_f32(3.0), f16::from_f32(-4.0), f16::NAN];
    let norm = clip_grad_norm(&mut [SliceMut::F16(&mut halves[..2])], ClipNorm::new(1.0)).unwrap();
    assert_eq!((norm, halves[0], halves[1]), (5.0, f16::from_f32(0.6), f16::from_f32(-0.8)));
    clip_grad_value(&mut [SliceMut::F16(&mut halves)], 0.5).unwrap();
    assert_eq!((halves[0], halves[1]), (f16::from_f32(0.5), f16::from_f32(-0.5)));
    assert!(halves[2].is_nan());
    assert_eq!(clip_grad_norm(&mut [], ClipNorm::new(1.0)).unwrap(), 0.0);

    let mut one = [1.0_f32];
    let mut views = [SliceMut::F32(&mut one)];
    let zero = ClipNorm { norm_type: 0.0, ..ClipNorm::new(1.0) };
    for clip in [ClipNorm::new(-1.0), ClipNorm::new(f64::NAN), zero] {
        let error = clip_grad_norm(&mut views, clip).unwrap_err();
        assert!(matches!(error, Error::InvalidHyper { .. }));
    }
    assert!(clip_grad_value(&mut views, -1.0).is_err());
    assert_eq!(one, [1.0]);
}

#[test]
fn a_rules_own_clip_applies_after_clipping_by_value() {
    let hyper = LambHyper { use_global_grad_norm: true, ..LambHyper::default() };
    let moment = |grad: &[f32], clip| {
        let mut lamb = Lamb::new([ParamGroup::new(hyper, [0])]).unwrap();
        let mut weight = [1.0_f32, -2.0, 3.0];
        let mut params = [ParamMut::new(&mut weight[..], Some(Slice::F32(grad)))];
        let _ = lamb.step(&mut params, &StepCtl { clip, ..StepCtl::PLAIN }).unwrap();
        lamb.state_dict().unwrap().state[&0].tensors["exp_avg"].clone()
    };
    let mut grad = [30.0_f32, -0.5, 2.0];
    let in_one = moment(&grad, Some(Clip::Value(4.0)));
    clip_grad_value(&mut [SliceMut::F32(&mut grad)], 4.0).unwrap();
    let by_hand = moment(&grad, None);
    for (a, b) in in_one.iter().zip(&by_hand) {
        assert!((a - b).abs() <= 1e-6 * b.abs(), "{in_one:?}, not {by_hand:?}");
    }
}
