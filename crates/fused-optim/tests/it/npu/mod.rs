//! Optimizers on the CANN simulator compared with those of the CPU: types, clipping, late
//! gradients, saving, launches, misuse, and calls that fail.

use fused_optim::npu::{HostOptimizer, NpuOptimizer, NpuParam, Operators};
use fused_optim::*;
use half::{bf16, f16};
use npu_sim::{Config, Session, Soc, start};

/// A tensor: shape, type of weight, type of gradient.
type Shape = (&'static [usize], DType, DType);

fn session(soc: Soc) -> Session {
    start(Config { soc, ..Config::default() })
}

fn operators() -> Operators {
    npu_sim::operators(0).unwrap()
}

fn number(seed: u64) -> f32 {
    let x = (seed + 1).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    let x = (x ^ (x >> 29)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    (x >> 40) as f32 / (1 << 23) as f32 - 1.0
}

/// Numbers of one type.
#[derive(Clone)]
enum Values {
    F32(Vec<f32>),
    F16(Vec<f16>),
    Bf16(Vec<bf16>),
}

impl Values {
    fn new(dtype: DType, values: impl Iterator<Item = f32>) -> Self {
        match dtype {
            F32 => Self::F32(values.collect()),
            F16 => Self::F16(values.map(f16::from_f32).collect()),
            Bf16 => Self::Bf16(values.map(bf16::from_f32).collect()),
        }
    }

    fn slice(&self) -> Slice<'_> {
        match self {
            Self::F32(v) => Slice::F32(v),
            Self::F16(v) => Slice::F16(v),
            Self::Bf16(v) => Slice::Bf16(v),
        }
    }

    fn slice_mut(&mut self) -> SliceMut<'_> {
        match self {
            Self::F32(v) => SliceMut::F32(v),
            Self::F16(v) => SliceMut::F16(v),
            Self::Bf16(v) => SliceMut::Bf16(v),
        }
    }

    fn wide(&self) -> Vec<f32> {
        match self {
            Self::F32(v) => v.clone(),
            Self::F16(v) => v.iter().map(|x| x.to_f32()).collect(),
            Self::Bf16(v) => v.iter().map(|x| x.to_f32()).collect(),
        }
    }
}

/// Both optimizers, and the weights of the CPU optimizer.
struct Pair<H, C> {
    npu: NpuOptimizer<H>,
    cpu: C,
    shapes: Vec<Shape>,
    weights: Vec<Values>,
}

macro_rules! pair {
    ($cpu:ident, $groups:expr, $shapes:expr, $how:expr) => {
        pair!($cpu, $groups, $shapes, $how, false)
    };
    ($cpu:ident, $groups:expr, $shapes:expr, $how:expr, $kernels:expr) => {{
        let shapes: Vec<Shape> = $shapes.to_vec();
        let npu = NpuOptimizer::new(operators(), $groups, $how).unwrap().with_kernels($kernels);
        let cpu = $cpu::new($groups).unwrap().with_half_weights($how);
        let weight = |(at, (shape, dtype, _)): (usize, &Shape)| {
            let count = shape.iter().product::<usize>() as u64;
            Values::new(*dtype, (0..count).map(|i| number(1000 * at as u64 + i)))
        };
        let weights = shapes.iter().enumerate().map(weight).collect();
        let mut pair = Pair { npu, cpu, shapes, weights };
        pair.npu.combine(&params(&pair.shapes)).unwrap();
        for (index, weight) in pair.weights.iter().enumerate() {
            pair.npu.write_weight(index, weight.slice()).unwrap();
        }
        pair
    }};
}

fn params(shapes: &[Shape]) -> Vec<NpuParam> {
    let param = |(shape, weight, grad): &Shape| NpuParam {
        grad: *grad,
        ..NpuParam::new(0, *weight).with_shape(shape)
    };
    shapes.iter().map(param).collect()
}

macro_rules! step {
    ($pair:ident, $seed:expr, $has:expr, $ctl:expr, $bad:expr) => {{
        let has: &[bool] = $has;
        let grad = |(at, (shape, _, dtype)): (usize, &Shape)| {
            let (count, seed) = (shape.iter().product::<usize>() as u64, 7777 * $seed + at as u64);
            let number = move |i| match (i, $bad) {
                (0, Some(bad)) if at == 1 => bad,
                _ => 8.0 * number(seed * 100 + i),
            };
            Values::new(*dtype, (0..count).map(number))
        };
        let grads: Vec<Values> = $pair.shapes.iter().enumerate().map(grad).collect();
        let tensors = $pair.weights.iter_mut().zip(&grads).zip(&$pair.shapes).zip(has);
        let mut params: Vec<ParamMut<'_>> = tensors
            .map(|(((weight, grad), (shape, _, _)), has)| {
                ParamMut::new(weight.slice_mut(), has.then(|| grad.slice())).with_shape(shape)
            })
            .collect();
        let applied = $pair.cpu.step(&mut params, $ctl).unwrap();
        for (index, grad) in grads.iter().enumerate() {
            $pair.npu.write_grad(index, grad.slice()).unwrap();
        }
        assert_eq!($pair.npu.step(has, $ctl).unwrap(), applied);
        applied
    }};
}

/// Asserts that values agree within a relative error.
#[track_caller]
fn close(got: &[f32], expected: &[f32], relative: f32, what: &str) {
    assert_eq!(got.len(), expected.len(), "{what}");
    for (at, (got, expected)) in got.iter().zip(expected).enumerate() {
        let within = (got - expected).abs() <= relative * expected.abs().max(0.05);
        assert!(within, "{what}[{at}]: {got}, not {expected}");
    }
}

macro_rules! same {
    ($pair:ident) => {{
        for (index, (weight, (_, dtype, _))) in $pair.weights.iter().zip(&$pair.shapes).enumerate()
        {
            // A value that rounds the other way is off by one unit in the last place.
            let unit = [2e-5, 1e-3, 8e-3][*dtype as usize];
            let what = format!("{} weight {index}", $pair.cpu.kind());
            close(&$pair.npu.read_weight(index).unwrap(), &weight.wide(), unit, &what);
        }
        let (got, expected) = ($pair.npu.state_dict().unwrap(), $pair.cpu.state_dict().unwrap());
        assert_eq!(got.param_groups, expected.param_groups);
        assert_eq!(got.state.len(), expected.state.len());
        for (index, expected) in &expected.state {
            let got = &got.state[index];
            assert_eq!(got.step, expected.step);
            assert!(got.tensors.keys().eq(expected.tensors.keys()));
            for (name, values) in &expected.tensors {
                close(&got.tensors[name], values, 3e-5, &format!("{name} {index}"));
            }
        }
    }};
}

use DType::{Bf16, F16, F32};

/// Weights of all types, an empty tensor, and gradients of other types.
const MIXED: [Shape; 7] = [
    (&[5, 7], F32, F32),
    (&[33], F16, F16),
    (&[], F32, F32),
    (&[0, 4], F32, F32),
    (&[4, 3], Bf16, Bf16),
    (&[40], F16, F32),
    (&[2, 9], F32, F16),
];

/// Options of a step, and a non-finite gradient to inject.
fn controls() -> [(StepCtl, Option<f32>); 7] {
    let scaled = StepCtl { grad_scale: 0.125, ..StepCtl::PLAIN };
    let check = StepCtl { found_inf: FoundInf::Check, ..scaled };
    [
        (scaled, None),
        (StepCtl { clip: Some(Clip::norm(1.5)), ..check }, None),
        (StepCtl { clip: Some(Clip::Value(0.25)), ..scaled }, None),
        (check, Some(f32::NAN)),
        (StepCtl { clip: Some(Clip::norm(1.0)), ..check }, Some(f32::INFINITY)),
        (StepCtl { clip: Some(Clip::Value(0.5)), ..check }, None),
        (
            StepCtl { clip: Some(Clip::Norm(ClipNorm::new(1.0).with_total_norm(9.0))), ..check },
            None,
        ),
    ]
}

/// Which gradients are present: some missing first, some later, some never.
const PRESENT: [[bool; 7]; 4] = [
    [true, false, true, true, true, true, false],
    [true, true, true, true, true, true, true],
    [false, true, true, false, true, false, true],
    [true; 7],
];

macro_rules! agree {
    ($cpu:ident, $hyper:expr, $other:expr) => {
        agree!($cpu, $hyper, $other, false, Soc::Ascend910B);
    };
    ($cpu:ident, $hyper:expr, $other:expr, $kernels:expr, $soc:expr) => {
        for how in [HalfWeights::Master, HalfWeights::Nearest] {
            let sim = session($soc);
            let groups =
                || [ParamGroup::new($hyper, [0, 1, 3, 4]), ParamGroup::new($other, [2, 5, 6])];
            let mut pair = pair!($cpu, groups(), MIXED, how, $kernels);
            for (at, (ctl, bad)) in controls().iter().chain(&controls()).enumerate() {
                let has = if bad.is_some() { &PRESENT[1] } else { &PRESENT[at % 4] };
                let applied = step!(pair, at as u64, has, ctl, *bad);
                assert_eq!(applied == Applied::SkippedNonFinite, bad.is_some());
                if how == HalfWeights::Master {
                    same!(pair);
                }
            }
            if let (Some(got), Some(norm)) = (pair.npu.grad_norm().unwrap(), pair.cpu.grad_norm()) {
                // On the device a skipped step sets the norm too.
                assert!(!got.is_finite() || (got / norm - 1.0).abs() < 1e-5, "{got} {norm}");
            }
            drop(pair);
            assert_eq!(sim.finish(), [""; 0]);
        }
    };
}

#[test]
fn rules_agree_with_the_cpu() {
    let hyper = SgdHyper { lr: 0.1, momentum: 0.9, dampening: 0.1, ..Default::default() };
    agree!(Sgd, hyper, SgdHyper { nesterov: true, dampening: 0.0, weight_decay: 0.1, ..hyper });
    let hyper = AdamHyper { weight_decay: 0.1, amsgrad: true, ..Default::default() };
    agree!(Adam, hyper, AdamHyper { maximize: true, amsgrad: false, ..hyper });
    let hyper = AdadeltaHyper { weight_decay: 0.1, ..Default::default() };
    agree!(Adadelta, hyper, AdadeltaHyper { lr: 0.5, maximize: true, ..hyper });
    let hyper = RmsPropHyper { momentum: 0.9, weight_decay: 0.1, ..Default::default() };
    agree!(RmsProp, hyper, RmsPropHyper { momentum: 0.0, ..hyper });
    let hyper = RmsPropTfHyper { momentum: 0.9, weight_decay: 0.1, ..Default::default() };
    let other = RmsPropTfHyper { decoupled_decay: true, lr_in_momentum: false, ..hyper };
    agree!(RmsPropTf, hyper, other);
}

#[test]
fn rules_with_norms_agree_with_the_cpu() {
    let hyper = AdamPHyper { weight_decay: 0.1, delta: 2.0, ..Default::default() };
    agree!(AdamP, hyper, AdamPHyper { nesterov: true, delta: 0.0, maximize: true, ..hyper });
    let hyper = LambHyper { weight_decay: 0.1, ..Default::default() };
    agree!(Lamb, hyper, LambHyper { adam: true, use_global_grad_norm: true, ..hyper });
    let hyper = BertAdamHyper { warmup: 0.3, t_total: 20, ..Default::default() };
    agree!(BertAdam, hyper, BertAdamHyper { clip: ClipScope::Tensor, max_grad_norm: 0.1, ..hyper });
}

#[test]
fn a_checkpoint_moves_to_the_device_and_back() {
    for soc in [Soc::Ascend910A, Soc::Ascend910B] {
        let sim = session(soc);
        let shapes: [Shape; 3] = [(&[5, 7], F32, F32), (&[33], F16, F16), (&[3], F32, F32)];
        let hyper = AdamWHyper { amsgrad: true, ..Default::default() };
        let groups = || [ParamGroup::new(hyper, 0..3)];
        let mut pair = pair!(AdamW, groups(), shapes, HalfWeights::Master);
        let _ = step!(pair, 1, &[true, true, false], &StepCtl::PLAIN, None);
        let saved = pair.npu.state_dict().unwrap();
        let saved = StateDict::from_safetensors(&saved.to_safetensors().unwrap()).unwrap();
        // From the device to the CPU, and to another device before `combine`.
        pair.cpu.load_state_dict(&saved).unwrap();
        let mut other = NpuOptimizer::new(operators(), groups(), HalfWeights::Master).unwrap();
        other = other.with_kernels(false);
        other.load_state_dict(&saved).unwrap();
        assert_eq!(other.state_dict().unwrap(), saved);
        other.combine(&params(&shapes)).unwrap();
        assert_eq!(other.state_dict().unwrap(), saved);
        for (index, weight) in pair.weights.iter().enumerate() {
            other.write_weight(index, weight.slice()).unwrap();
        }
        pair.npu = other;
        let _ = step!(pair, 2, &[true; 3], &StepCtl::PLAIN, None);
        same!(pair);
        // From the CPU to a device with other state.
        let saved = pair.cpu.state_dict().unwrap();
        let _ = pair.npu.step(&[true; 3], &StepCtl::PLAIN).unwrap();
        pair.npu.load_state_dict(&saved).unwrap();
        assert_eq!(pair.npu.state_dict().unwrap(), saved);
        // Another `combine` keeps the state.
        pair.npu.combine(&params(&shapes)).unwrap();
        assert_eq!(pair.npu.state_dict().unwrap(), saved);
        drop(pair);
        assert_eq!(sim.finish(), [""; 0]);
    }
}

/// State with other slots than those of the flat buffers is loaded into new slots.
#[test]
fn loaded_hyper_parameters_change_the_slots() {
    for (before, after) in [(0.0, 0.9), (0.9, 0.0)] {
        let sim = session(Soc::Ascend910B);
        let groups =
            |momentum| [ParamGroup::new(SgdHyper { momentum, ..Default::default() }, 0..2)];
        let shapes: [Shape; 2] = [(&[33], F16, F16), (&[5, 7], F32, F32)];
        let mut pair = pair!(Sgd, groups(after), shapes, HalfWeights::Master);
        let _ = step!(pair, 1, &[true; 2], &StepCtl::PLAIN, None);
        let saved = pair.cpu.state_dict().unwrap();
        pair.npu = NpuOptimizer::new(operators(), groups(before), HalfWeights::Master).unwrap();
        pair.npu.combine(&params(&shapes)).unwrap();
        let _ = pair.npu.step(&[true; 2], &StepCtl::PLAIN).unwrap();
        pair.npu.load_state_dict(&saved).unwrap();
        assert_eq!(pair.npu.state_dict().unwrap(), saved);
        for (index, weight) in pair.weights.iter().enumerate() {
            pair.npu.write_weight(index, weight.slice()).unwrap();
        }
        let _ = step!(pair, 2, &[true; 2], &StepCtl::PLAIN, None);
        same!(pair);
        drop(pair);
        assert_eq!(sim.finish(), [""; 0]);
    }
}

/// A step of any optimizer on these tensors.
fn host_step(
    optimizer: &mut dyn Optimizer,
    (shapes, weights, grads): (&[Shape], &mut [Values], &[Values]),
    has: &[bool],
    ctl: &StepCtl,
) -> Applied {
    let tensors = weights.iter_mut().zip(grads).zip(shapes).zip(has);
    let mut params: Vec<ParamMut<'_>> = tensors
        .map(|(((weight, grad), (shape, _, _)), has)| {
            ParamMut::new(weight.slice_mut(), has.then(|| grad.slice())).with_shape(shape)
        })
        .collect();
    optimizer.step(&mut params, ctl).unwrap()
}

/// Numbers for all tensors, of their weights' types or of their gradients'.
fn numbers(shapes: &[Shape], of_grad: bool, seed: u64) -> Vec<Values> {
    let one = |(at, (shape, weight, grad)): (usize, &Shape)| {
        let count = shape.iter().product::<usize>() as u64;
        let number = move |i| number(seed * 7777 + 100 * at as u64 + i);
        Values::new(if of_grad { *grad } else { *weight }, (0..count).map(number))
    };
    shapes.iter().enumerate().map(one).collect()
}

/// Steps through the trait with weights in host memory, on the device and on the CPU.
#[test]
fn host_optimizer_agrees_with_the_cpu() {
    for (soc, how) in [
        (Soc::Ascend910B, HalfWeights::Master),
        (Soc::Ascend910B, HalfWeights::Nearest),
        (Soc::Ascend910A, HalfWeights::Master),
    ] {
        let sim = session(soc);
        let known = |dtype| if soc == Soc::Ascend910A && dtype == Bf16 { F16 } else { dtype };
        let shapes = MIXED.map(|(shape, weight, grad)| (shape, known(weight), known(grad)));
        let hyper = AdamWHyper { weight_decay: 0.1, ..Default::default() };
        let other = AdamWHyper { maximize: true, ..hyper };
        let groups = || [ParamGroup::new(hyper, [0, 1, 3, 4]), ParamGroup::new(other, [2, 5, 6])];
        let mut npu = HostOptimizer::new(operators(), groups(), how).unwrap();
        let mut cpu = AdamW::new(groups()).unwrap().with_half_weights(how);
        assert_eq!((npu.device(), cpu.device()), ("npu:0".to_owned(), "cpu".to_owned()));
        let mut weights = numbers(&shapes, false, 0);
        let mut own = weights.clone();
        for (at, (ctl, bad)) in controls().iter().chain(&controls()).enumerate() {
            let has = if bad.is_some() { &PRESENT[1] } else { &PRESENT[at % 4] };
            let mut grads = numbers(&shapes, true, 1 + at as u64);
            if let (Some(bad), Values::F16(grad)) = (bad, &mut grads[1]) {
                grad[0] = f16::from_f32(*bad);
            }
            let got = host_step(&mut npu, (&shapes, &mut own, &grads), has, ctl);
            let expected = host_step(&mut cpu, (&shapes, &mut weights, &grads), has, ctl);
            assert_eq!((got, got == Applied::SkippedNonFinite), (expected, bad.is_some()));
            for (index, (got, expected)) in own.iter().zip(&weights).enumerate() {
                let unit = [2e-5, 1e-3, 8e-3][shapes[index].1 as usize];
                if how == HalfWeights::Master {
                    close(&got.wide(), &expected.wide(), unit, &format!("{soc:?} {at} {index}"));
                }
            }
            // The host changes an f32 weight.
            for weights in [&mut own, &mut weights] {
                weights[0] = Values::new(F32, (0..35).map(|i| (at + i) as f32));
            }
            if let (Some(Clip::Norm(_)), None) = (ctl.clip, bad) {
                let (got, expected) = (npu.grad_norm().unwrap(), cpu.grad_norm().unwrap());
                assert!((got / expected - 1.0).abs() < 1e-5, "{got} {expected}");
            }
            if at == 3 {
                npu.refresh_masters().unwrap();
                cpu.refresh_masters().unwrap();
            }
            if at == 5 {
                // Another optimizer continues with the saved state.
                let saved = npu.state_dict().unwrap();
                npu = HostOptimizer::new(operators(), groups(), how).unwrap();
                npu.load_state_dict(&saved).unwrap();
                let both: [&mut dyn Optimizer; 2] = [&mut npu, &mut cpu];
                for optimizer in both {
                    optimizer.set_lr(1, 0.01).unwrap();
                    optimizer.set_momentum(0, 0.8).unwrap();
                    assert_eq!(optimizer.lr(1).unwrap(), 0.01);
                    assert_eq!(optimizer.momentum(0).unwrap(), Some(0.8));
                }
            }
        }
        let (got, expected) = (npu.state_dict().unwrap(), cpu.state_dict().unwrap());
        assert_eq!((got.kind, got.param_groups), (expected.kind, expected.param_groups));
        for (index, expected) in expected.state.iter().filter(|_| how == HalfWeights::Master) {
            assert_eq!(got.state[index].step, expected.step);
            for (name, values) in &expected.tensors {
                close(&got.state[index].tensors[name], values, 3e-5, &format!("{name} {index}"));
            }
        }
        drop(npu);
        assert_eq!(sim.finish(), [""; 0]);
    }
}

#[test]
fn host_optimizer_checks_arguments_and_clears_gradients() {
    let sim = session(Soc::Ascend910B);
    let groups = [ParamGroup::new(SgdHyper { lr: 1.0, ..Default::default() }, 0..1)];
    let mut sgd = HostOptimizer::new(operators(), groups, HalfWeights::Master).unwrap();
    let (mut weight, mut grad, mut average) = ([1.0_f32; 3], [0.5_f32; 3], [1.0_f32; 3]);
    let short = [0.5_f32; 2];
    let plain = StepCtl::PLAIN;
    assert!(matches!(sgd.step(&mut [], &plain), Err(Error::MissingParam { .. })));
    let param = ParamMut::new(&mut weight[..], Some(Slice::F32(&short)));
    assert!(matches!(sgd.step(&mut [param], &plain), Err(Error::LengthMismatch { .. })));
    let param = ParamMut::new(&mut weight[..], Some(Slice::F32(&grad))).with_ema(&mut average, 0.5);
    assert!(matches!(sgd.step(&mut [param], &plain), Err(Error::Unsupported { .. })));
    // Clipping that is not supported is refused before anything is sent.
    let cube = ClipNorm { norm_type: 3.0, ..ClipNorm::new(1.0) };
    let cube = StepCtl { clip: Some(Clip::Norm(cube)), ..plain };
    let before = sim.calls_of(|_| true);
    let param = ParamMut::new(&mut weight[..], Some(Slice::F32(&grad)));
    assert!(matches!(sgd.step(&mut [param], &cube), Err(Error::Unsupported { .. })));
    assert_eq!(sim.calls_of(|_| true), before);
    let skip = StepCtl { found_inf: FoundInf::Known(true), ..plain };
    let param = ParamMut::new(&mut weight[..], None).clearing(&mut grad[..]);
    assert_eq!(sgd.step(&mut [param], &skip).unwrap(), Applied::SkippedNonFinite);
    assert_eq!((weight, grad), ([1.0; 3], [0.5; 3]));
    let param = ParamMut::new(&mut weight[..], None).clearing(&mut grad[..]);
    assert_eq!(sgd.step(&mut [param], &plain).unwrap(), Applied::Applied);
    assert_eq!((weight, grad), ([0.5; 3], [0.0; 3]));
    let other = StateDict { kind: "adam".into(), ..StateDict::default() };
    assert!(matches!(sgd.load_state_dict(&other), Err(Error::WrongKind { .. })));
    // A failure of the device is an error.
    sim.fail("aclrtSynchronizeStream", 1, 507_035);
    let param = ParamMut::new(&mut weight[..], Some(Slice::F32(&grad)));
    assert!(matches!(sgd.step(&mut [param], &plain), Err(Error::Npu(_))));
}

/// Loads state that a CPU optimizer saved with another order of tensors.
#[test]
fn state_is_loaded_by_name() {
    let sim = session(Soc::Ascend910B);
    let groups = || [ParamGroup::new(AdamWHyper::default(), 0..2)];
    let names = |names: [&str; 2]| names.map(|name| ParamSpec::new(name, &[3]));
    let mut cpu = AdamW::new(groups()).unwrap();
    cpu.set_param_names(&names(["a", "b"])).unwrap();
    let (mut a, mut b) = ([1.0_f32; 3], [2.0_f32; 3]);
    let (one, other) = ([0.5_f32; 3], [-3.0_f32; 3]);
    let params = &mut [
        ParamMut::new(&mut a[..], Some(Slice::F32(&one))),
        ParamMut::new(&mut b[..], Some(Slice::F32(&other))),
    ];
    let _ = cpu.step(params, &StepCtl::PLAIN).unwrap();

    let mut npu = HostOptimizer::new(operators(), groups(), HalfWeights::Master).unwrap();
    npu.set_param_names(&names(["b", "a"])).unwrap();
    let mut third = [1.0_f32; 3];
    let params =
        &mut [&mut b, &mut a, &mut third].map(|weight| ParamMut::new(&mut weight[..], None));
    let three = npu.step(params, &StepCtl::PLAIN).unwrap_err();
    assert!(matches!(three, Error::ParamCount { expected: 2, got: 3 }));
    let (saved, before) = (cpu.state_dict().unwrap(), npu.state_dict().unwrap());
    let mut wrong = saved.clone();
    wrong.params.get_mut(&0).unwrap().name = "c".into();
    assert_eq!(npu.load_state_dict(&wrong).unwrap_err().to_string(), "state dict, a: missing");
    assert_eq!(npu.state_dict().unwrap(), before);
    npu.load_state_dict(&saved).unwrap();
    let loaded = npu.state_dict().unwrap();
    assert_eq!((&loaded.state[&0], &loaded.state[&1]), (&saved.state[&1], &saved.state[&0]));
    assert_eq!((&*loaded.params[&0].name, &*loaded.params[&1].name), ("b", "a"));
    drop(npu);
    assert_eq!(sim.finish(), [""; 0]);
}

#[test]
fn misuse_is_a_typed_error() {
    let sim = session(Soc::Ascend910A);
    let groups = || [ParamGroup::new(SgdHyper::default(), 0..2)];
    let random = HalfWeights::Stochastic { seed: 1 };
    assert!(matches!(
        NpuOptimizer::new(operators(), groups(), random),
        Err(Error::Unsupported { .. })
    ));
    let mut sgd = NpuOptimizer::new(operators(), groups(), HalfWeights::Master).unwrap();
    let plain = StepCtl::PLAIN;
    let early = sgd.step(&[true; 2], &plain).unwrap_err();
    assert_eq!(early.to_string(), "`step` called before `combine`");
    assert!(matches!(sgd.weight(0), Err(Error::MissingParam { .. })));
    let one = NpuParam::new(6, F32);
    assert!(matches!(sgd.combine(&[one]), Err(Error::MissingParam { index: 1, count: 1 })));
    let uneven = NpuParam { rows: 4, ..one };
    assert!(matches!(sgd.combine(&[one, uneven]), Err(Error::UnevenRows { index: 1, .. })));
    let bf16 = NpuParam::new(6, Bf16);
    assert!(matches!(sgd.combine(&[one, bf16]), Err(Error::Unsupported { .. })));
    sgd.combine(&[one, one]).unwrap();
    let write = sgd.write_weight(0, Slice::F32(&[1.0; 5]));
    assert!(matches!(write, Err(Error::LengthMismatch { expected: 6, got: 5, .. })));
    let write = sgd.write_grad(0, Slice::F16(&[f16::ONE; 6]));
    assert!(matches!(write, Err(Error::Unsupported { .. })));
    assert!(matches!(sgd.step(&[true], &plain), Err(Error::MissingParam { .. })));
    let scale = StepCtl { grad_scale: f32::NAN, ..plain };
    assert!(matches!(sgd.step(&[true; 2], &scale), Err(Error::InvalidGradScale { .. })));
    let clip = ClipNorm { norm_type: 3.0, ..ClipNorm::new(1.0) };
    // SAFETY: an NPU does not read the address.
    #[expect(unsafe_code, reason = "an address is only a number")]
    let at = unsafe { ClipNorm::new(1.0).with_total_norm_at(64) };
    for clip in [clip, at] {
        let ctl = StepCtl { clip: Some(Clip::Norm(clip)), ..plain };
        assert!(matches!(sgd.step(&[true; 2], &ctl), Err(Error::Unsupported { .. })));
    }
    let of_adam = StateDict { kind: "adam".into(), ..StateDict::default() };
    assert!(matches!(sgd.load_state_dict(&of_adam), Err(Error::WrongKind { .. })));
    sgd.add_param_group(ParamGroup::new(SgdHyper::default(), [2])).unwrap();
    assert!(matches!(sgd.step(&[true; 3], &plain), Err(Error::CalledBefore { .. })));
    sgd.combine(&[one; 3]).unwrap();
    assert_eq!(sgd.step(&[true; 3], &plain).unwrap(), Applied::Applied);
    drop(sgd);
    assert_eq!(sim.finish(), [""; 0]);
}

/// Lets each call of a step fail once: each is an error, and nothing is used after it is freed.
macro_rules! faults {
    ($hyper:expr, $functions:expr) => {{
        let sim = session(Soc::Ascend910B);
        let groups = [ParamGroup::new($hyper, 0..2)];
        let mut npu = NpuOptimizer::new(operators(), groups, HalfWeights::Master).unwrap();
        npu.combine(&[NpuParam::new(6, F32), NpuParam::new(6, F16)]).unwrap();
        npu.write_weight(0, Slice::F32(&[1.0; 6])).unwrap();
        let check = StepCtl { found_inf: FoundInf::Check, ..StepCtl::PLAIN };
        let _ = npu.step(&[true; 2], &check).unwrap();
        for function in $functions.into_iter().chain([
            "aclnnCast",
            "aclnnReduceSumGetWorkspaceSize",
            "aclrtMalloc",
            "aclCreateTensor",
            "aclCreateTensorList",
            "aclCreateScalar",
            "aclrtMemcpyAsync",
            "aclrtSynchronizeStream",
        ]) {
            let before = sim.calls(function);
            let _ = npu.step(&[true; 2], &check).unwrap();
            let calls = sim.calls(function) - before;
            assert!(calls > 0, "{function} is not called");
            for nth in 1..=calls {
                sim.fail(function, nth, 507_035);
                let failed = npu.step(&[true; 2], &check);
                assert!(matches!(failed, Err(Error::Npu(_))), "{function} {nth}");
            }
        }
        drop(npu);
        let left = sim.finish();
        // A plan that could not run cannot be freed either; and memory that a copy may still
        // write is leaked, with its context.
        let expected = ["executors", "pinned allocations", "contexts"];
        let is_expected =
            |what: &String| expected.iter().any(|m| what.ends_with(&format!("{m} are left")));
        assert!(left.iter().all(is_expected), "{left:?}");
    }};
}

#[test]
fn every_failing_call_of_a_step_is_an_error() {
    let sequence = ["aclnnInplaceMulsGetWorkspaceSize", "aclnnInplaceMuls", "aclnnForeachNorm"];
    faults!(LambHyper::default(), sequence);
    faults!(AdamWHyper::default(), ["aclnnFusedAdamwGetWorkspaceSize", "aclnnFusedAdamw"]);
    let momentum = SgdHyper { momentum: 0.9, ..Default::default() };
    faults!(momentum, ["aclnnFusedSgdGetWorkspaceSize", "aclnnFusedSgd"]);
}

// After the macros that it uses.
mod launches;
