//! Properties of every rule, for every mix of types and any input: splitting tensors never changes
//! a bit, a skipped or failed step never changes a byte, and training resumes with the same bits.

use fused_optim::{
    Adafactor, AdafactorHyper, AdamW, AdamWHyper, Applied, Clip, DType, Error, FoundInf,
    HalfWeights, Muon, MuonHyper, Optimizer, ParamGroup, ParamMut, ParamSpec, RmsProp,
    RmsPropHyper, RmsPropTf, RmsPropTfHyper, Sgd, SgdHyper, Slice, SliceMut, StateDict, StepCtl,
};
use proptest::prelude::*;

use crate::common::{
    CHECK, Owned, SCALED, bits, elementwise, optimizers, optimizers_with, param, step,
};

fn dtype() -> impl Strategy<Value = DType> {
    prop_oneof![Just(DType::F32), Just(DType::F16), Just(DType::Bf16)]
}

fn values(count: usize) -> impl Strategy<Value = Vec<f32>> {
    prop::collection::vec(-4.0_f32..4.0, count)
}

/// Types of weight and gradient, lengths to split at, weights, three gradients.
fn run() -> impl Strategy<Value = (DType, DType, Vec<usize>, Vec<f32>, Vec<Vec<f32>>)> {
    let lengths = prop::collection::vec(prop_oneof![0..40_usize, 1020..1030_usize], 1..5);
    (dtype(), dtype(), lengths).prop_flat_map(|(weight, grad, lengths)| {
        let count = lengths.iter().sum();
        let grads = prop::collection::vec(values(count), 3);
        (Just(weight), Just(grad), Just(lengths), values(count), grads)
    })
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    #[test]
    fn splitting_a_tensor_never_changes_a_bit((weight, grad, lengths, start, grads) in run()) {
        for (mut whole, mut cut) in elementwise(1, HalfWeights::Master).into_iter().zip(elementwise(lengths.len(), HalfWeights::Master)) {
            let mut whole_weight = [Owned::new(weight, &start)];
            let mut cut_weight = Owned::new(weight, &start);
            for values in &grads {
                let grad = Owned::new(grad, values);
                let some = [Some(grad.clone())];
                let _ = step(&mut *whole, &mut whole_weight, &some, SCALED).unwrap();
                let mut at = 0;
                let mut params: Vec<_> = (cut_weight.pieces(&lengths).into_iter())
                    .map(|piece| {
                        at += piece.len();
                        let grad = grad.part(at - piece.len()..at);
                        ParamMut::new(piece, Some(grad))
                    })
                    .collect();
                let _ = cut.step(&mut params, &SCALED).unwrap();
            }
            prop_assert_eq!(whole_weight[0].bits(), cut_weight.bits());
            // The concatenated state is the same too.
            let (whole, cut) = (whole.state_dict().unwrap(), cut.state_dict().unwrap());
            for (name, all) in &whole.state[&0].tensors {
                let joined = cut.state.values().flat_map(|state| state.tensors[name].clone());
                prop_assert_eq!(all, &joined.collect::<Vec<f32>>());
            }
        }
    }

    #[test]
    fn a_skipped_step_changes_no_byte(
        (weight, grad, lengths, start, grads) in run(),
        bad in prop_oneof![Just(f32::INFINITY), Just(f32::NEG_INFINITY), Just(f32::NAN)],
        at in any::<prop::sample::Index>(),
    ) {
        prop_assume!(!start.is_empty());
        let _ = lengths;
        for mut optimizer in optimizers(2) {
            let mut weights = [Owned::new(weight, &start), Owned::new(weight, &start)];
            let finite = Some(Owned::new(grad, &grads[0]));
            let _ = step(&mut *optimizer, &mut weights, &[finite.clone(), None], CHECK).unwrap();
            let before = (bits(&weights), optimizer.state_dict().unwrap());

            let mut values = grads[1].clone();
            values[at.index(start.len())] = bad;
            let broken = [finite.clone(), Some(Owned::new(grad, &values))];
            let skipped = step(&mut *optimizer, &mut weights, &broken, CHECK).unwrap();
            prop_assert_eq!(skipped, Applied::SkippedNonFinite);
            let known = StepCtl { found_inf: FoundInf::Known(true), ..SCALED };
            let skipped = step(&mut *optimizer, &mut weights, &[finite, None], known).unwrap();
            prop_assert_eq!(skipped, Applied::SkippedNonFinite);
            prop_assert_eq!(&before, &(bits(&weights), optimizer.state_dict().unwrap()));
        }
    }

    #[test]
    fn training_resumes_with_the_same_bits(
        (weight, grad, _, start, grads) in run(),
        stop in 0..4_usize,
        late in any::<bool>(),
    ) {
        for (mut first, mut second) in optimizers(2).into_iter().zip(optimizers(2)) {
            let mut weights = [Owned::new(weight, &start), Owned::new(weight, &start)];
            let grad = |values: &[f32]| Some(Owned::new(grad, values));
            let both = |values: &Vec<f32>, i| [grad(values), (i > 0 || !late).then(|| grad(values)).flatten()];
            for (i, values) in grads.iter().enumerate().take(stop) {
                let _ = step(&mut *first, &mut weights, &both(values, i), SCALED).unwrap();
                first.set_lr(0, 0.1 / (i + 3) as f64).unwrap();
            }
            let bytes = first.state_dict().unwrap().to_safetensors().unwrap();
            second.load_state_dict(&StateDict::from_safetensors(&bytes).unwrap()).unwrap();
            prop_assert_eq!(second.lr(0).unwrap().to_bits(), first.lr(0).unwrap().to_bits());
            let mut others = weights.clone();
            for (i, values) in grads.iter().enumerate().skip(stop) {
                let _ = step(&mut *first, &mut weights, &both(values, i), SCALED).unwrap();
                let _ = step(&mut *second, &mut others, &both(values, i), SCALED).unwrap();
            }
            prop_assert_eq!(bits(&weights), bits(&others));
            prop_assert_eq!(first.state_dict().unwrap(), second.state_dict().unwrap());
        }
    }

    #[test]
    fn moving_averages_and_clearing_do_not_change_the_step(
        (weight, grad, _, start, grads) in run(),
        decay in 0.0_f32..=1.0,
    ) {
        for (mut plain, mut more) in optimizers(1).into_iter().zip(optimizers(1)) {
            let mut weights = [Owned::new(weight, &start)];
            let mut other = Owned::new(weight, &start);
            let (mut ema, mut expected) = (start.clone(), start.clone());
            for values in &grads {
                let mut grad = Owned::new(grad, values);
                let _ = step(&mut *plain, &mut weights, &[Some(grad.clone())], SCALED).unwrap();
                let param = param(other.all_mut(), None)
                    .clearing(grad.all_mut())
                    .with_ema(&mut ema, decay);
                let _ = more.step(&mut [param], &SCALED).unwrap();
                prop_assert!(grad.bits().iter().all(|bits| *bits == 0));
                prop_assert_eq!(weights[0].bits(), other.bits());
                let dict = more.state_dict().unwrap();
                let values = dict.state[&0].tensors.get("master").cloned();
                let values = values.unwrap_or_else(|| other.bits().into_iter().map(f32::from_bits).collect());
                for (e, p) in expected.iter_mut().zip(values) {
                    *e = *e * decay + p * (1.0 - decay);
                }
                prop_assert_eq!(&ema, &expected);
            }
            prop_assert_eq!(plain.state_dict().unwrap(), more.state_dict().unwrap());

            // A skipped step leaves both as they are.
            let mut grad = Owned::new(grad, &grads[0]);
            let before = grad.bits();
            let param = param(other.all_mut(), None).clearing(grad.all_mut()).with_ema(&mut ema, decay);
            let ctl = StepCtl { found_inf: FoundInf::Known(true), ..SCALED };
            let _ = more.step(&mut [param], &ctl).unwrap();
            prop_assert_eq!((grad.bits(), &ema), (before, &expected));
        }
    }

    #[test]
    fn state_with_any_values_can_be_saved_and_loaded(
        weight in dtype(),
        numbers in prop::collection::vec(any::<[u32; 2]>(), 1..300),
    ) {
        let [start, grad] =
            [0, 1].map(|at| numbers.iter().map(|x| f32::from_bits(x[at])).collect::<Vec<f32>>());
        // A NaN's payload may differ.
        let bits = |dict: StateDict| -> Vec<u32> {
            let values = dict.state.into_values().flat_map(|state| state.tensors.into_values());
            values.flatten().map(|x| if x.is_nan() { u32::MAX } else { x.to_bits() }).collect()
        };
        for (mut one, mut other) in optimizers(1).into_iter().zip(optimizers(1)) {
            let mut weights = [Owned::new(weight, &start)];
            let grad = [Some(Owned::new(DType::F32, &grad))];
            let _ = step(&mut *one, &mut weights, &grad, SCALED).unwrap();
            let bytes = one.state_dict().unwrap().to_safetensors().unwrap();
            other.load_state_dict(&StateDict::from_safetensors(&bytes).unwrap()).unwrap();
            prop_assert_eq!(bits(other.state_dict().unwrap()), bits(one.state_dict().unwrap()), "{}", one.kind());
        }
    }

    #[test]
    fn a_half_weight_is_its_rounded_master((weight, grad, _, start, grads) in run()) {
        // The master changes as an f32 weight that starts at the same value.
        let narrow = Owned::new(weight, &start);
        let widened = match &narrow {
            Owned::F32(values) => values.clone(),
            Owned::F16(values) => values.iter().map(|x| x.to_f32()).collect(),
            Owned::Bf16(values) => values.iter().map(|x| x.to_f32()).collect(),
        };
        for (mut half, mut full) in optimizers(1).into_iter().zip(optimizers(1)) {
            let (mut half_weight, mut full_weight) = ([narrow.clone()], [Owned::F32(widened.clone())]);
            for values in &grads {
                let grad = [Some(Owned::new(grad, values))];
                let _ = step(&mut *half, &mut half_weight, &grad, SCALED).unwrap();
                let _ = step(&mut *full, &mut full_weight, &grad, SCALED).unwrap();
                let Owned::F32(master) = &full_weight[0] else { unreachable!() };
                prop_assert_eq!(half_weight[0].bits(), Owned::new(weight, master).bits());
                if weight != DType::F32 {
                    prop_assert_eq!(&half.state_dict().unwrap().state[&0].tensors["master"], master);
                }
            }
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(6))]

    #[test]
    fn threads_and_alignment_never_change_a_bit(
        (weight, grad) in (dtype(), dtype()),
        lengths in prop::collection::vec(prop_oneof![0..70_usize, 40_000..90_000_usize], 1..6),
        rows in prop::sample::select(vec![0, 1, 3, 64, 300]),
        (threads, offset) in (2..6_usize, 0..9_usize),
        how in prop::sample::select(vec![
            HalfWeights::Master, HalfWeights::Nearest, HalfWeights::Stochastic { seed: 7 },
        ]),
        seed in 1..1000_usize,
    ) {
        // Arbitrary values, the same for both.
        let values = |count: usize, seed: usize| -> Vec<f32> {
            (0..count).map(|i| ((i * 7919 + seed * 104_729) % 2003) as f32 / 500.0 - 2.0).collect()
        };
        let lengths: Vec<usize> = lengths.iter().map(|n| n / rows.max(1) * rows.max(1)).collect();
        let clip = StepCtl { clip: Some(Clip::norm(1.0)), found_inf: FoundInf::Check, ..SCALED };
        let ones = optimizers_with(lengths.len(), how).into_iter();
        for (mut one, mut many) in ones.zip(optimizers_with(lengths.len(), how)) {
            many.set_threads(threads);
            let mut results = Vec::new();
            for (optimizer, offset) in [(&mut one, 0), (&mut many, offset)] {
                // The padding comes first; the values after it are the same for both.
                let padded = |n: &usize| [vec![0.0; offset], values(*n, seed)].concat();
                let mut weights: Vec<Owned> =
                    lengths.iter().map(|n| Owned::new(weight, &padded(n))).collect();
                let from = |owned: &Owned| owned.bits().split_off(offset);
                for turn in 0..2 {
                    let grads: Vec<Owned> =
                        lengths.iter().map(|n| Owned::new(grad, &values(n + offset, turn + seed)[..])).collect();
                    let mut params: Vec<_> = weights.iter_mut().zip(&lengths).zip(&grads).map(|((w, n), g)| {
                        let [_, weight] = <[SliceMut<'_>; 2]>::try_from(w.pieces(&[offset, *n])).unwrap();
                        let mut param = ParamMut::new(weight, Some(g.part(0..*n)));
                        param.rows = rows;
                        param
                    }).collect();
                    let ctl = if turn == 0 { SCALED } else { clip };
                    let _ = optimizer.step(&mut params, &ctl).unwrap();
                }
                let norm = optimizer.grad_norm().map(f64::to_bits);
                results.push((weights.iter().map(from).collect::<Vec<_>>(), optimizer.state_dict().unwrap(), norm));
            }
            prop_assert!(results[0] == results[1], "{}", one.kind());
        }
    }
}

/// The state of many tensors shares one mapping; the state of a single tensor has its own memory.
#[test]
fn memory_layout_of_state_never_changes_a_bit() {
    let counts: Vec<usize> = (0..30).map(|i| [0, 1, 1000, 20_011, 70_000][i % 5] + i).collect();
    // All tensors together fill a huge page with each slot, but no tensor alone does.
    assert!(counts.iter().sum::<usize>() > 1 << 19 && counts.iter().all(|count| *count < 1 << 17));
    let values = |count: usize, seed: usize| -> Vec<f32> {
        (0..count).map(|i| ((i * 7919 + seed * 104_729) % 2003) as f32 / 500.0 - 2.0).collect()
    };
    let weight = |at: usize| {
        let dtype = if at % 3 == 1 { DType::F16 } else { DType::F32 };
        Owned::new(dtype, &values(counts[at], at))
    };
    let apart = (0..counts.len()).map(|_| elementwise(1, HalfWeights::Master));
    let mut apart: Vec<_> = apart.map(Vec::into_iter).collect();
    for mut together in elementwise(counts.len(), HalfWeights::Master) {
        let mut alone: Vec<_> = apart.iter_mut().map(|each| each.next().unwrap()).collect();
        let mut weights: Vec<_> = (0..counts.len()).map(weight).collect();
        let mut others = weights.clone();
        for turn in 0..3 {
            // One tensor's state is created later than the others'.
            let grad = |at| Owned::new(DType::F32, &values(counts[at], at + turn + 7));
            let grads: Vec<_> =
                (0..counts.len()).map(|at| (at != 4 || turn > 0).then(|| grad(at))).collect();
            let _ = step(&mut *together, &mut weights, &grads, SCALED).unwrap();
            for ((optimizer, weight), grad) in alone.iter_mut().zip(&mut others).zip(&grads) {
                let (weight, grad) = (std::slice::from_mut(weight), std::slice::from_ref(grad));
                let _ = step(&mut **optimizer, weight, grad, SCALED).unwrap();
            }
            assert_eq!(bits(&weights), bits(&others), "{} {turn}", together.kind());
            let dict = together.state_dict().unwrap();
            for (at, one) in alone.iter().enumerate() {
                assert_eq!(dict.state.get(&at), one.state_dict().unwrap().state.get(&0), "{at}");
            }
            if turn == 1 {
                together.load_state_dict(&dict).unwrap();
            }
        }
    }
}

/// Compares any processor with hashes from x86-64; without Muon, whose products are `gemm`'s.
#[test]
fn every_processor_gives_the_same_bits() {
    let values = |count: usize, seed: usize| -> Vec<f32> {
        (0..count).map(|i| ((i * 7919 + seed * 104_729) % 2003) as f32 / 500.0 - 2.0).collect()
    };
    // Hashes of the nine rules of devices, and of all others.
    let mut hashes = [0xcbf2_9ce4_8422_2325_u64; 2];
    let nine = "adadelta adam adamp adamw bert_adam lamb rmsprop rmsprop_tf sgd";
    let types = [DType::F32, DType::F16, DType::Bf16];
    let hows = [HalfWeights::Master, HalfWeights::Nearest, HalfWeights::Stochastic { seed: 7 }];
    for (how, weight, grad) in
        hows.into_iter().flat_map(|how| types.map(|w| types.map(|g| (how, w, g)))).flatten()
    {
        let clip = StepCtl { clip: Some(Clip::norm(1.0)), found_inf: FoundInf::Check, ..SCALED };
        let all = optimizers_with(1, how).into_iter();
        for mut optimizer in all.filter(|optimizer| optimizer.kind() != "muon") {
            let hash =
                &mut hashes[usize::from(!nine.split(' ').any(|one| one == optimizer.kind()))];
            let mut add =
                |bits: u32| *hash = (*hash ^ u64::from(bits)).wrapping_mul(0x0100_0000_01b3);
            let mut weights = Owned::new(weight, &values(3 * 1039, 1));
            for (turn, ctl) in [SCALED, clip, SCALED].iter().enumerate() {
                let grad = Owned::new(grad, &values(3 * 1039, turn + 2));
                let param = ParamMut::new(weights.all_mut(), Some(grad.all()));
                let _ = optimizer.step(&mut [param.with_shape(&[3, 1039])], ctl).unwrap();
            }
            weights.bits().into_iter().for_each(&mut add);
            let state = optimizer.state_dict().unwrap().state.remove(&0).unwrap();
            state.tensors.values().flatten().for_each(|x| add(x.to_bits()));
        }
    }
    assert_eq!(hashes, [0x5607_7141_5bf4_3943, 0x75ad_cb57_3029_aa2c], "{hashes:#x?}");
}

#[test]
fn stochastic_weights_take_small_updates_and_repeat_by_seed() {
    let hyper = SgdHyper { lr: 1.0, ..Default::default() };
    let run = |how| {
        let mut sgd = Sgd::with_one_group(hyper, 1).unwrap().with_half_weights(how);
        let mut weights = [Owned::new(DType::Bf16, &[1.0; 5000])];
        // A tenth of bf16's resolution below 1, two hundred times.
        let grad = [Some(Owned::new(DType::F32, &[1.0 / 2560.0; 5000]))];
        for _ in 0..200 {
            let _ = step(&mut sgd, &mut weights, &grad, StepCtl::PLAIN).unwrap();
        }
        assert!(!sgd.state_dict().unwrap().state[&0].tensors.contains_key("master"));
        let Owned::Bf16(values) = &weights[0] else { unreachable!() };
        let mean = values.iter().map(|x| f64::from(x.to_f32())).sum::<f64>() / 5000.0;
        (mean, bits(&weights))
    };
    assert_eq!(run(HalfWeights::Nearest).0, 1.0);
    let (mean, first) = run(HalfWeights::Stochastic { seed: 1 });
    assert!((mean - (1.0 - 200.0 / 2560.0)).abs() < 1e-3, "{mean}");
    assert_eq!(first, run(HalfWeights::Stochastic { seed: 1 }).1);
    assert_ne!(first, run(HalfWeights::Stochastic { seed: 2 }).1);
}

#[test]
fn eight_bit_state_converges_as_well_as_f32() {
    // Minimizes a quadratic with noisy gradients whose sizes differ a hundredfold: after 3000 steps
    // the error is due to the noise, and eight bits increase it by at most a fifth.
    let target = |i: usize| (i as f32 * 0.37).sin();
    let size = |i: usize| 10.0_f32.powi(i as i32 % 3 - 1);
    let left = |mut adamw: AdamW| {
        let mut weight = vec![0.0_f32; 1000];
        let mut noise = 1_u32;
        let mut sum = 0.0;
        for step in 0..3000 {
            adamw.set_lr(0, 0.02 * (1.0 - f64::from(step) / 3000.0)).unwrap();
            let grad: Vec<f32> = (0..weight.len())
                .map(|i| {
                    noise = noise.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
                    let noise = (noise >> 8) as f32 / (1 << 24) as f32 - 0.5;
                    size(i) * (weight[i] - target(i) + noise)
                })
                .collect();
            let params = &mut [ParamMut::new(&mut weight[..], Some(Slice::F32(&grad)))];
            let _ = adamw.step(params, &StepCtl::PLAIN).unwrap();
            if step >= 2900 {
                let off = weight.iter().enumerate().map(|(i, w)| f64::from(w - target(i)).powi(2));
                sum += off.sum::<f64>();
            }
        }
        (sum / 100.0 / 1000.0).sqrt()
    };
    let adamw = || {
        AdamW::with_one_group(AdamWHyper { weight_decay: 0.0, ..Default::default() }, 1).unwrap()
    };
    let (full, eight) = (left(adamw()), left(adamw().with_8bit_state()));
    assert!(full < 0.05 && eight < 1.2 * full, "{full} {eight}");
}

#[test]
fn centered_rules_stay_finite_with_a_constant_gradient() {
    // With PyTorch's formula about half of these become NaN: the variance is rounded below zero.
    let hyper = RmsPropHyper { alpha: 0.9, centered: true, ..Default::default() };
    let tf = RmsPropTfHyper { alpha: 0.9, centered: true, ..Default::default() };
    let rules: [Box<dyn Optimizer>; 2] = [
        Box::new(RmsProp::with_one_group(hyper, 1).unwrap()),
        Box::new(RmsPropTf::with_one_group(tf, 1).unwrap()),
    ];
    for mut rule in rules {
        let values: Vec<f32> = (1..200).map(|i| i as f32 * 0.0137).collect();
        let mut weights = [Owned::new(DType::F32, &values)];
        let grads = [Some(weights[0].clone())];
        for _ in 0..3000 {
            let _ = step(&mut *rule, &mut weights, &grads, StepCtl::PLAIN).unwrap();
        }
        assert!(
            bits(&weights)[0].iter().all(|x| f32::from_bits(*x).is_finite()),
            "{}",
            rule.kind()
        );
    }
}

/// Weights loaded between steps: after `refresh_masters` the step starts from them.
#[test]
fn refreshed_masters_are_copied_from_loaded_weights() {
    for (mut refreshed, mut stale) in optimizers(2).into_iter().zip(optimizers(2)) {
        let start = [1.5, -0.75, 3.0];
        let loaded = [-8.0, 16.0, 0.125];
        let grad = [Some(Owned::new(DType::F32, &[0.5, -1.0, 0.25])), None];
        let both = [DType::Bf16, DType::F16].map(|dtype| Owned::new(dtype, &start));
        let mut weights = [both.clone(), both];
        for (optimizer, weights) in [&mut refreshed, &mut stale].into_iter().zip(&mut weights) {
            let _ = step(&mut **optimizer, weights, &grad, SCALED).unwrap();
            *weights = [DType::Bf16, DType::F16].map(|dtype| Owned::new(dtype, &loaded));
        }
        let before = refreshed.state_dict().unwrap();
        refreshed.refresh_masters().unwrap();
        let mut dropped = refreshed.state_dict().unwrap();
        let master = before.state[&0].tensors["master"].clone();
        let was = dropped.state.get_mut(&0).unwrap().tensors.insert("master".into(), master);
        assert_eq!((was, &dropped), (None, &before), "only masters are dropped");
        // Its `z` pulls the weights back.
        if refreshed.kind() == "schedule_free_adamw" {
            continue;
        }
        let _ = step(&mut *refreshed, &mut weights[0], &grad, SCALED).unwrap();
        let _ = step(&mut *stale, &mut weights[1], &grad, SCALED).unwrap();
        let master = |optimizer: &dyn Optimizer, at: usize| {
            optimizer.state_dict().unwrap().state[&0].tensors["master"][at]
        };
        for at in 0..3 {
            let (new, old) = (master(&*refreshed, at), master(&*stale, at));
            assert!((new - loaded[at]).abs() < 2.0 && (old - start[at]).abs() < 2.0);
        }
    }
}

#[test]
fn a_failed_step_changes_no_byte() {
    for mut optimizer in optimizers(2) {
        let grad = |count| Some(Owned::new(DType::F32, &vec![1.0; count]));
        let mut weights = [Owned::new(DType::F16, &[1.0; 3]), Owned::new(DType::F32, &[1.0; 5])];
        let _ = step(&mut *optimizer, &mut weights, &[grad(3), grad(5)], SCALED).unwrap();
        let before = (bits(&weights), optimizer.state_dict().unwrap());

        let short = step(&mut *optimizer, &mut weights, &[grad(3), grad(4)], SCALED).unwrap_err();
        assert_eq!(short.to_string(), "parameter 1: the weight has 5 elements, its gradient 4");
        let missing = step(&mut *optimizer, &mut weights[..1], &[grad(3)], SCALED).unwrap_err();
        let text = "a parameter group contains parameter 1, but the step was given 1";
        assert_eq!(missing.to_string(), text);
        for grad_scale in [-1.0, f32::NAN, f32::INFINITY] {
            let ctl = StepCtl { grad_scale, ..SCALED };
            let error = step(&mut *optimizer, &mut weights, &[grad(3), grad(5)], ctl).unwrap_err();
            assert!(matches!(error, Error::InvalidGradScale { .. }));
        }
        let mut full = [Owned::new(DType::F32, &[1.0; 3]), weights[1].clone()];
        let error = step(&mut *optimizer, &mut full, &[grad(3), grad(5)], SCALED).unwrap_err();
        assert_eq!(error.to_string(), "parameter 0: the weight is f32, but its state has a master");
        assert_eq!(bits(&full[..1]), [[1.0_f32.to_bits(); 3]]);
        let mut long = [Owned::new(DType::F16, &[1.0; 4]), weights[1].clone()];
        let error = step(&mut *optimizer, &mut long, &[grad(4), grad(5)], SCALED).unwrap_err();
        let text = match optimizer.kind() {
            "adafactor" | "muon" => {
                "parameter 0: its state is for another shape; pass the shape of earlier steps"
            }
            _ => "parameter 0: the weight has 4 elements, its state 3",
        };
        assert_eq!(error.to_string(), text);
        assert_eq!(before, (bits(&weights), optimizer.state_dict().unwrap()));
    }
}

/// State of matrices has other lengths than the weight. State of another shape is an error in a
/// step, and in a load if the shape is known.
#[test]
fn state_of_another_shape_is_an_error() {
    let make = || -> [(Box<dyn Optimizer>, &[&str]); 2] {
        [
            (
                Box::new(Muon::with_one_group(MuonHyper::default(), 1).unwrap()),
                &["momentum_buffer"],
            ),
            (
                Box::new(Adafactor::with_one_group(AdafactorHyper::default(), 1).unwrap()),
                &["col_var", "row_var"],
            ),
        ]
    };
    for ((mut optimizer, slots), (mut other, _)) in make().into_iter().zip(make()) {
        let mut weight = [1.0_f32; 6];
        let mut step = |shape: &[usize]| {
            let grad = Some(Slice::F32(&[0.5, -1.0, 0.25, 2.0, 1.0, -0.5]));
            let param = ParamMut::new(&mut weight[..], grad).with_shape(shape);
            optimizer.step(&mut [param], &StepCtl::PLAIN)
        };
        let _ = step(&[2, 3]).unwrap();
        assert!(matches!(step(&[6]), Err(Error::StateShape { index: 0 })));
        let dict = optimizer.state_dict().unwrap();
        assert!(dict.state[&0].tensors.keys().eq(slots), "{:?}", dict.state[&0].tensors.keys());
        other.set_param_names(&[ParamSpec::new("w", &[6])]).unwrap();
        let error = other.load_state_dict(&dict).unwrap_err().to_string();
        assert_eq!(error, "state dict, state.0: not of shape [6]");
        other.set_param_names(&[ParamSpec::new("w", &[2, 3])]).unwrap();
        other.load_state_dict(&dict).unwrap();
        assert_eq!(other.state_dict().unwrap().state, dict.state);
    }
}

#[test]
fn groups_can_be_added_later_and_tensors_are_in_one_only() {
    let mut adamw = AdamW::new([]).unwrap();
    let hyper = AdamWHyper { lr: 0.5, weight_decay: 0.0, ..Default::default() };
    let mut weights = [Owned::new(DType::F32, &[1.0]), Owned::new(DType::F32, &[1.0])];
    let grads = [Some(weights[0].clone()), Some(weights[1].clone())];
    let _ = step(&mut adamw, &mut weights, &grads, SCALED).unwrap();
    assert_eq!(bits(&weights), [[1.0_f32.to_bits()]; 2], "in no group: not touched");

    adamw.add_param_group(ParamGroup::new(hyper, [1])).unwrap();
    let _ = step(&mut adamw, &mut weights, &grads, SCALED).unwrap();
    adamw.add_param_group(ParamGroup::new(hyper, [0])).unwrap();
    let _ = step(&mut adamw, &mut weights, &grads, SCALED).unwrap();
    let dict = adamw.state_dict().unwrap();
    assert_eq!((dict.state[&0].step, dict.state[&1].step), (1, 2));

    for params in [vec![1], vec![2, 2]] {
        let error = adamw.add_param_group(ParamGroup::new(hyper, params)).unwrap_err();
        assert!(matches!(error, Error::DuplicateParam { .. }));
    }
    assert_eq!(adamw.group_count(), 2);
}
