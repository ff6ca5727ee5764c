//! Compares the kernels with the CPU's rules, bit for bit: on the GPU that `$CUDA_TEST_DEVICE`
//! names, or else compiled for the CPU. Tests whose names end with `on_the_shim` need the latter.

#![expect(unsafe_code, reason = "kernels access the test's memory")]

mod mutants;
pub(super) mod tree;

use cuda_rt::testing::{Shim, TestBuffer, TestDevice};
use half::{bf16, f16};

use super::rules::DeviceHyper;
use super::table::Types;
use super::{CudaOptimizer, DType, DeviceParam, LaunchShape, validate};
use crate::core::Core;
use crate::*;

const SHIM: Shim = Shim { launch: include_str!("launch.h"), types };

/// The device of a test. On the CPU, blocks and threads run in an order drawn from `seed`.
pub(super) fn test_device(seed: u64) -> TestDevice {
    TestDevice::new(SHIM, seed)
}

/// Number of the types in `macros`. Changes `macros` so that a rule's kernels are compiled for all
/// types together, or, if `alone`, only for these.
fn types(macros: &mut Vec<String>, alone: bool) -> u32 {
    let Some([grad, weight, master]) = macros.get_mut(2..5) else { return 0 };
    let number = |text: &str| {
        let is = |name: &&str| text.ends_with(&format!("={name}"));
        ["F32", "F16", "Bf16"].iter().position(is).unwrap() as u32
    };
    let types = number(grad) + 3 * number(weight) + 9 * u32::from(master.ends_with("true"));
    match alone {
        true => macros.push(format!("-DONLY={types}")),
        false => {
            (*grad, *weight, *master) =
                ("-DGRAD=F32".into(), "-DWEIGHT=F32".into(), "-DMASTER=false".into());
        }
    }
    types
}

/// A pseudo-random generator.
struct Random(u64);

impl Random {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let x = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let x = (x ^ (x >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        x ^ (x >> 31)
    }

    fn below(&mut self, end: usize) -> usize {
        (self.next() % end as u64) as usize
    }

    /// In `-1.0..1.0`; sometimes zero or tiny.
    fn number(&mut self) -> f32 {
        let x = (self.next() >> 40) as f32 / (1 << 23) as f32 - 1.0;
        match self.next() % 16 {
            0 => 0.0,
            1 => x * 1e-6,
            2 => x * 1e-38,
            _ => x,
        }
    }
}

/// Values of one type.
#[derive(Clone)]
enum Values {
    F32(Vec<f32>),
    F16(Vec<f16>),
    Bf16(Vec<bf16>),
}

impl Values {
    fn new(dtype: DType, wide: &[f32]) -> Self {
        let wide = wide.iter().copied();
        match dtype {
            DType::F32 => Self::F32(wide.collect()),
            DType::F16 => Self::F16(wide.map(f16::from_f32).collect()),
            DType::Bf16 => Self::Bf16(wide.map(bf16::from_f32).collect()),
        }
    }

    fn view(&mut self) -> SliceMut<'_> {
        match self {
            Self::F32(v) => SliceMut::F32(v),
            Self::F16(v) => SliceMut::F16(v),
            Self::Bf16(v) => SliceMut::Bf16(v),
        }
    }

    /// Copies to the device, `skip` elements after an aligned address.
    fn upload(&self, device: &TestDevice, skip: usize) -> TestBuffer {
        match self {
            Self::F32(v) => device.upload_at(skip, v),
            Self::F16(v) => device.upload_at(skip, v),
            Self::Bf16(v) => device.upload_at(skip, v),
        }
    }

    fn set(&self, buffer: &mut TestBuffer) {
        match self {
            Self::F32(v) => buffer.set(v),
            Self::F16(v) => buffer.set(v),
            Self::Bf16(v) => buffer.set(v),
        }
    }

    fn get(buffer: &TestBuffer) -> Self {
        match buffer.slice().dtype {
            DType::F32 => Self::F32(buffer.get()),
            DType::F16 => Self::F16(buffer.get()),
            DType::Bf16 => Self::Bf16(buffer.get()),
        }
    }

    /// Bits; those of one NaN for all NaNs.
    fn bits(&self) -> Vec<u32> {
        match self {
            Self::F32(v) => v.iter().map(canonical).collect(),
            Self::F16(v) => {
                v.iter().map(|x| u32::from(if x.is_nan() { 0x7e00 } else { x.to_bits() })).collect()
            }
            Self::Bf16(v) => {
                v.iter().map(|x| u32::from(if x.is_nan() { 0x7fc0 } else { x.to_bits() })).collect()
            }
        }
    }
}

fn canonical(x: &f32) -> u32 {
    if x.is_nan() { 0x7fc0_0000 } else { x.to_bits() }
}

/// A tensor on the CPU.
struct One {
    weight: Values,
    grad: Values,
    ema: Vec<f32>,
    /// Elements between an aligned address and the weight and gradient on the device.
    skip: [usize; 2],
    rows: usize,
    clear: bool,
    averaged: bool,
    has_grad: bool,
}

/// Types and launch parameters of a case.
#[derive(Clone, Copy, Debug)]
pub(super) struct Kind {
    grad: DType,
    pub(super) weight: DType,
    pub(super) how: HalfWeights,
    launch: LaunchShape,
}

impl Kind {
    const fn new(grad: DType, weight: DType, how: HalfWeights) -> Self {
        Self { grad, weight, how, launch: LaunchShape::DEFAULT }
    }
}

const TYPES: [DType; 3] = [DType::F32, DType::F16, DType::Bf16];

pub(super) fn kinds() -> Vec<Kind> {
    let all = TYPES.iter().flat_map(|&grad| {
        TYPES.iter().flat_map(move |&weight| {
            [HalfWeights::Master, HalfWeights::Nearest].map(|how| Kind::new(grad, weight, how))
        })
    });
    all.filter(|kind| kind.weight != DType::F32 || kind.how == HalfWeights::Master).collect()
}

/// Element counts and rows: empty, less than a pack, around a warp's chunk, a block, a span.
const SIZES: [(usize, usize); 17] = [
    (0, 0),
    (1, 0),
    (7, 0),
    (64, 4),
    (31, 0),
    (256, 2),
    (1000, 8),
    (1024, 0),
    (1023, 3),
    (1025, 5),
    (4096, 64),
    (4097, 1),
    (9 * 40, 40),
    (5000, 5),
    (16384, 0),
    (33000, 2),
    (70001, 0),
];

impl One {
    fn new(random: &mut Random, kind: Kind, (count, rows): (usize, usize)) -> Self {
        // AdamP projects some tensors and not others.
        let along = if random.below(2) == 0 { 0.0 } else { 0.5 };
        let weight: Vec<f32> = (0..count).map(|_| random.number()).collect();
        let ema: Vec<f32> = weight.iter().map(|w| 0.9 * w).collect();
        let grad: Vec<f32> = weight.iter().map(|w| 64.0 * (random.number() + along * w)).collect();
        let mut skip = || if random.below(3) == 0 { random.below(8) } else { 0 };
        Self {
            skip: [skip(), skip()],
            weight: Values::new(kind.weight, &weight),
            grad: Values::new(kind.grad, &grad),
            ema,
            rows,
            clear: random.below(2) == 0,
            averaged: random.below(3) == 0,
            has_grad: random.below(8) != 0,
        }
    }

    fn set_grad(&mut self, element: u64, value: f32) {
        let mut grad = self.grad.view();
        if !grad.is_empty() {
            let at = (element % grad.len() as u64) as usize;
            match &mut grad {
                SliceMut::F32(v) => v[at] = value,
                SliceMut::F16(v) => v[at] = f16::from_f32(value),
                SliceMut::Bf16(v) => v[at] = bf16::from_f32(value),
            }
        }
    }

    fn on_cpu(&mut self) -> ParamMut<'_> {
        let mut param = ParamMut::new(self.weight.view(), None);
        param.rows = self.rows;
        if self.has_grad {
            let grad = self.grad.view();
            param.grad = Some(match (self.clear, grad) {
                (true, grad) => Grad::Clear(grad),
                (false, SliceMut::F32(s)) => Grad::Keep(Slice::F32(s)),
                (false, SliceMut::F16(s)) => Grad::Keep(Slice::F16(s)),
                (false, SliceMut::Bf16(s)) => Grad::Keep(Slice::Bf16(s)),
            });
        }
        if self.averaged {
            param = param.with_ema(&mut self.ema, 0.9);
        }
        param
    }

    fn bits(&self) -> [Vec<u32>; 3] {
        [self.weight.bits(), self.grad.bits(), self.ema.iter().map(canonical).collect()]
    }
}

/// The same tensor on the device.
struct Twin {
    weight: TestBuffer,
    grad: TestBuffer,
    ema: TestBuffer,
    param: DeviceParam,
}

impl Twin {
    fn new(one: &One, device: &TestDevice) -> Self {
        let weight = one.weight.upload(device, one.skip[0]);
        let grad = one.grad.upload(device, one.skip[1]);
        let ema = device.upload(&one.ema);
        let param = DeviceParam {
            weight: weight.slice(),
            grad: one.has_grad.then(|| grad.slice()),
            rows: one.rows,
            clear: one.clear,
            ema: one.averaged.then(|| (ema.slice().ptr, 0.9)),
        };
        Self { weight, grad, ema, param }
    }

    fn bits(&self) -> [Vec<u32>; 3] {
        [
            Values::get(&self.weight).bits(),
            Values::get(&self.grad).bits(),
            Values::get(&self.ema).bits(),
        ]
    }
}

/// Options of steps, all kinds.
fn controls() -> Vec<StepCtl> {
    let plain = StepCtl { grad_scale: 1.0 / 64.0, ..StepCtl::PLAIN };
    let check = StepCtl { found_inf: FoundInf::Check, ..plain };
    vec![
        check,
        StepCtl { clip: Some(Clip::norm(1.5)), ..check },
        StepCtl { clip: Some(Clip::Value(0.25)), ..plain },
        StepCtl { found_inf: FoundInf::Known(true), ..plain },
        StepCtl { grad_scale: 1e-8, clip: Some(Clip::norm(1e-7)), ..plain },
        StepCtl { clip: Some(Clip::Value(0.5)), ..check },
        plain,
        StepCtl { clip: Some(Clip::Norm(ClipNorm::new(1.5).with_total_norm(7.25))), ..check },
    ]
}

/// Returns where weights, gradients or averages first differ.
fn same_tensors(ones: &[One], twins: &[Twin]) -> std::result::Result<(), String> {
    for (tensor, (one, twin)) in ones.iter().zip(twins).enumerate() {
        let (expected, got) = (one.bits(), twin.bits());
        for (what, (expected, got)) in
            ["weight", "gradient", "average"].iter().zip(expected.iter().zip(&got))
        {
            if let Some(i) = (0..got.len()).find(|i| expected[*i] != got[*i]) {
                let bits = (expected[i], got[i]);
                return Err(format!("{what} {tensor}, element {i}: {bits:x?}"));
            }
        }
    }
    Ok(())
}

/// Steps on CPU and device, on tensors of these kinds in turn. Returns their first difference.
pub(super) fn compare<H: DeviceHyper>(
    hypers: [H; 2],
    on: TestDevice,
    kinds: &[Kind],
    sizes: &[(usize, usize)],
    seed: u64,
) -> std::result::Result<(), String> {
    let mut random = Random(seed);
    let all = sizes.iter().zip(kinds.iter().cycle());
    let mut ones: Vec<One> = all.map(|(size, kind)| One::new(&mut random, *kind, *size)).collect();
    let mut twins: Vec<Twin> = Vec::new();
    let groups = || {
        let of = |group: usize| (0..sizes.len()).filter(move |i| i % 3 / 2 == group);
        hypers.clone().into_iter().enumerate().map(move |(at, h)| ParamGroup::new(h, of(at)))
    };
    let mut cpu = Core::on_device(groups(), kinds[0].how).unwrap();
    let mut device = CudaOptimizer::new(on, groups(), kinds[0].how).unwrap();
    for kind in kinds {
        let master = kind.weight != DType::F32 && kind.how == HalfWeights::Master;
        let types = Types { grad: kind.grad.number(), weight: kind.weight.number(), master };
        let launches = hypers.each_ref().map(|hyper| ((hyper.rule_type(), types), kind.launch));
        device.launch_shapes.extend(launches);
    }
    for (at, ctl) in controls().iter().enumerate() {
        if at == 4 {
            cpu.refresh_masters();
            device.refresh_masters().unwrap();
        }
        // Tensors have new addresses in each step; sometimes others have gradients.
        if at % 3 == 0 {
            ones.iter_mut().for_each(|one| one.has_grad = random.below(8) != 0);
        }
        let next = ones.iter().map(|one| Twin::new(one, &device.device)).collect();
        let before = std::mem::replace(&mut twins, next);
        let params: Vec<DeviceParam> = twins.iter().map(|twin| twin.param).collect();
        // SAFETY: `twins` live until others are bound.
        unsafe { device.bind(&params) }.unwrap();
        drop(before);
        overflow(at, &mut Random(seed), &mut ones, &mut twins);
        let mut params: Vec<ParamMut<'_>> = ones.iter_mut().map(One::on_cpu).collect();
        let applied = cpu.step(&mut params, ctl).unwrap();
        // SAFETY: as above.
        let found = unsafe { device.found_inf(ctl) }.unwrap();
        if ctl.found_inf == FoundInf::Check && found == (applied == Applied::Applied) {
            return Err(format!("step {at}: an overflow found: {found}"));
        }
        take_some_stats(&mut device, &mut Random(seed ^ at as u64), &twins, ctl);
        // SAFETY: as above.
        unsafe { device.step(ctl) }.unwrap();
        let status = device.status().unwrap();
        if status.last_skipped != (applied == Applied::SkippedNonFinite) {
            return Err(format!("step {at}: skipped {}", status.last_skipped));
        }
        if let (Some(Clip::Norm(_)), Some(norm)) = (ctl.clip, cpu.grad_norm())
            && status.grad_norm.to_bits() != norm.to_bits()
        {
            return Err(format!("step {at}: norm {} instead of {norm}", status.grad_norm));
        }
        same_tensors(&ones, &twins).map_err(|text| format!("step {at}, {text}"))?;
        let (expected, got) = (cpu.state_dict(), device.state_dict().unwrap());
        if expected.to_safetensors().unwrap() != got.to_safetensors().unwrap() {
            return Err(format!("step {at}: {}", difference(&expected, &got)));
        }
    }
    // The device loads what the CPU saved.
    let dict = cpu.state_dict();
    device.load_state_dict(&dict).unwrap();
    assert_eq!(device.state_dict().unwrap(), dict);
    Ok(())
}

/// Sets a random element to an overflow in step 5, and to a finite value in step 6.
fn overflow(at: usize, random: &mut Random, ones: &mut [One], twins: &mut [Twin]) {
    if at == 5 || at == 6 {
        let (target, element) = (random.below(ones.len()), random.next());
        let value = if at == 6 { 0.5 } else { [f32::INFINITY, f32::NAN][element as usize % 2] };
        ones[target].set_grad(element, value);
        ones[target].grad.set(&mut twins[target].grad);
    }
}

/// Takes statistics of none, some or all gradients, in parts in any order.
fn take_some_stats<H: DeviceHyper>(
    device: &mut CudaOptimizer<H, TestDevice>,
    random: &mut Random,
    twins: &[Twin],
    ctl: &StepCtl,
) {
    let often = random.below(3);
    let mut parts = vec![Vec::new(); 3];
    for (index, _) in twins.iter().enumerate().filter(|(_, twin)| twin.param.grad.is_some()) {
        if random.below(8) < 4 * often {
            parts[random.below(3)].push(index);
        }
    }
    for part in parts {
        // Statistics for another step are discarded.
        let other = StepCtl { grad_scale: 0.5, ..*ctl };
        if random.below(8) == 0 && ctl.found_inf != FoundInf::Check {
            // SAFETY: `twins` are bound.
            unsafe { device.take_grad_stats(&part, &other, None) }.unwrap();
        }
        // SAFETY: as above.
        unsafe { device.take_grad_stats(&part, ctl, None) }.unwrap();
    }
}

fn difference(expected: &StateDict, got: &StateDict) -> String {
    for (index, state) in &expected.state {
        let Some(other) = got.state.get(index) else { return format!("no state {index}") };
        if state.step != other.step {
            return format!("state {index}: step {} instead of {}", other.step, state.step);
        }
        for (name, values) in &state.tensors {
            let other = other.tensors.get(name).map(Vec::as_slice).unwrap_or_default();
            let differs = |(a, b): (&f32, &f32)| canonical(a) != canonical(b);
            if let Some(at) = values.iter().zip(other).position(differs) {
                return format!("{name} {index}, element {at}: {} {}", values[at], other[at]);
            }
        }
    }
    "NaNs, or something else".into()
}

/// Some of [`SIZES`], with at most one large one.
fn some_sizes(random: &mut Random) -> Vec<(usize, usize)> {
    let large = random.below(8);
    let size = |(at, size): (usize, (usize, usize))| {
        let taken = if size.0 > 10_000 { at % 8 == large } else { random.below(3) != 0 };
        taken.then_some(size)
    };
    SIZES.into_iter().enumerate().filter_map(size).chain([(8200, 0), (9, 3)]).collect()
}

/// Compares two groups of a rule, with all types, by `$FUSED_OPTIM_SEEDS` seeds (default: 1).
fn agree<H: DeviceHyper>(hyper: H, other: H) {
    agree_on(&kinds(), hyper, other);
}

fn agree_on<H: DeviceHyper>(kinds: &[Kind], hyper: H, other: H) {
    let seeds = std::env::var("FUSED_OPTIM_SEEDS").map_or(1, |text| text.parse().unwrap());
    for (at, kind) in kinds.iter().enumerate() {
        for seed in 0..seeds {
            let seed = 100 * seed + at as u64;
            let sizes = some_sizes(&mut Random(seed));
            let hypers = [hyper.clone(), other.clone()];
            if let Err(text) = compare(hypers, test_device(seed), &[*kind], &sizes, seed) {
                panic!("{}, {kind:?}, seed {seed}: {text}", H::KIND);
            }
        }
    }
}

#[test]
fn adadelta() {
    let hyper = AdadeltaHyper { weight_decay: 0.1, ..Default::default() };
    agree(hyper, AdadeltaHyper { lr: 0.5, maximize: true, ..hyper });
}

#[test]
fn adam() {
    for amsgrad in [false, true] {
        let hyper = AdamHyper { weight_decay: 0.1, amsgrad, ..Default::default() };
        agree(hyper, AdamHyper { lr: 0.5, maximize: true, amsgrad: false, ..hyper });
    }
}

#[test]
fn adamp() {
    let hyper = AdamPHyper { weight_decay: 0.1, ..Default::default() };
    let cos_eps = CosineEps::Max;
    agree(hyper, AdamPHyper { lr: 0.5, nesterov: true, cos_eps, maximize: true, ..hyper });
}

#[test]
fn adamw() {
    for amsgrad in [false, true] {
        let hyper = AdamWHyper { amsgrad, ..Default::default() };
        agree(hyper, AdamWHyper { lr: 0.5, betas: (0.5, 0.9), maximize: true, ..hyper });
    }
}

#[test]
fn bert_adam() {
    for schedule in [Schedule::Linear, Schedule::Cosine, Schedule::Constant, Schedule::Poly] {
        let hyper = BertAdamHyper { schedule, warmup: 0.3, t_total: 5, ..Default::default() };
        let clip = ClipScope::Tensor;
        let other = BertAdamHyper { clip, max_grad_norm: 0.1, maximize: true, ..hyper };
        let kinds = if schedule == Schedule::Linear { kinds() } else { kinds()[4..7].to_vec() };
        agree_on(&kinds, hyper, other);
    }
}

#[test]
fn lamb() {
    let hyper = LambHyper { weight_decay: 0.1, ..Default::default() };
    agree(hyper, LambHyper { adam: true, maximize: true, ..hyper });
    agree_on(&kinds()[4..7], hyper, LambHyper { use_global_grad_norm: true, ..hyper });
}

#[test]
fn rmsprop() {
    for (momentum, centered) in [(0.0, false), (0.9, false), (0.0, true), (0.9, true)] {
        let hyper = RmsPropHyper { momentum, centered, weight_decay: 0.1, ..Default::default() };
        agree(hyper, RmsPropHyper { lr: 0.5, maximize: true, ..hyper });
    }
}

#[test]
fn rmsprop_tf() {
    for (momentum, centered) in [(0.0, false), (0.9, false), (0.0, true), (0.9, true)] {
        let hyper = RmsPropTfHyper { momentum, centered, weight_decay: 0.1, ..Default::default() };
        let decoupled_lr = centered;
        let other =
            RmsPropTfHyper { decoupled_decay: true, decoupled_lr, lr_in_momentum: false, ..hyper };
        agree(hyper, RmsPropTfHyper { maximize: true, ..other });
    }
}

#[test]
fn sgd() {
    for (momentum, nesterov) in [(0.0, false), (0.9, false), (0.9, true)] {
        let hyper = SgdHyper { momentum, nesterov, weight_decay: 0.1, ..Default::default() };
        let dampening = if nesterov { 0.0 } else { 0.1 };
        agree(hyper, SgdHyper { lr: 0.5, dampening, maximize: true, ..hyper });
    }
}

/// The size of blocks changes no bit.
#[test]
fn blocks_of_1024_threads_have_the_same_bits_on_the_shim() {
    fn same<H: DeviceHyper>(hyper: H) {
        let kind = Kind::new(DType::F16, DType::Bf16, HalfWeights::Master);
        // More chunks than a block has warps; a length that is not aligned.
        let sizes = [(140_000, 0), (3, 0), (1025, 5), (0, 0), (4097, 17)];
        let replaced = Some(("THREADS = 256", "THREADS = 1024"));
        let device = TestDevice::on_the_shim(SHIM, 1, replaced);
        let hypers = [hyper.clone(), hyper];
        assert_eq!(compare(hypers, device, &[kind], &sizes, 1), Ok(()), "{}", H::KIND);
    }
    same(AdadeltaHyper { weight_decay: 0.1, ..Default::default() });
    same(AdamHyper { amsgrad: true, ..Default::default() });
    same(AdamPHyper { weight_decay: 0.1, ..Default::default() });
    same(AdamWHyper::default());
    same(BertAdamHyper::default());
    same(LambHyper { weight_decay: 0.1, ..Default::default() });
    same(RmsPropHyper { momentum: 0.9, centered: true, ..Default::default() });
    same(RmsPropTfHyper { momentum: 0.9, ..Default::default() });
    same(SgdHyper { momentum: 0.9, nesterov: true, ..Default::default() });
}

/// Launch parameters change no bit.
#[test]
fn every_launch_has_the_same_bits() {
    fn same<H: DeviceHyper>(hyper: H) {
        let sizes = [(40_000, 0), (3, 0), (1025, 5), (0, 0), (4097, 17)];
        for launch in LaunchShape::ALL.into_iter().filter(|launch| launch.blocks == 8) {
            for (at, weight) in [DType::F32, DType::Bf16].into_iter().enumerate() {
                let kind = Kind { launch, ..Kind::new(TYPES[at], weight, HalfWeights::Master) };
                let hypers = [hyper.clone(), hyper.clone()];
                let compared = compare(hypers, test_device(1), &[kind], &sizes, 1);
                assert_eq!(compared, Ok(()), "{}, {kind:?}", H::KIND);
            }
        }
    }
    same(AdamWHyper::default());
    same(LambHyper { weight_decay: 0.1, ..Default::default() });
}

#[test]
fn misaligned_addresses_are_errors() {
    for [weight, grad, ema] in [[2, 8, 16], [4, 2, 16], [4, 8, 2]] {
        let slice = |ptr| super::DeviceSlice { ptr, len: 2, dtype: DType::F32 };
        let mut param = DeviceParam::new(slice(weight), Some(slice(grad)));
        param.ema = Some((ema, 0.5));
        let error = validate(&param, 0).unwrap_err();
        assert!(matches!(error, Error::MisalignedPointer { ptr: 2, .. }));
    }
}
