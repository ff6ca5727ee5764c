//! Tensors of any type, and an optimizer for each variant of each rule.

use fused_optim::{
    Adadelta, AdadeltaHyper, Adafactor, AdafactorHyper, Adam, AdamHyper, AdamP, AdamPHyper, AdamW,
    AdamWHyper, Applied, BertAdam, BertAdamHyper, ClipScope, CpuOptimizer, DType, FoundInf,
    HalfWeights, Lamb, LambHyper, Lion, LionHyper, Muon, MuonHyper, Optimizer, ParamMut, RmsProp,
    RmsPropHyper, RmsPropTf, RmsPropTfHyper, ScheduleFreeAdamW, ScheduleFreeAdamWHyper, Sgd,
    SgdHyper, Slice, SliceMut, StepCtl,
};
use half::{bf16, f16};

use crate::elementwise::OwnHyper;

/// A tensor that owns its elements.
#[derive(Clone, Debug)]
pub(crate) enum Owned {
    F32(Vec<f32>),
    F16(Vec<f16>),
    Bf16(Vec<bf16>),
}

impl Owned {
    pub(crate) fn new(dtype: DType, values: &[f32]) -> Self {
        let values = values.iter().copied();
        match dtype {
            DType::F32 => Self::F32(values.collect()),
            DType::F16 => Self::F16(values.map(f16::from_f32).collect()),
            DType::Bf16 => Self::Bf16(values.map(bf16::from_f32).collect()),
        }
    }

    pub(crate) fn part(&self, range: std::ops::Range<usize>) -> Slice<'_> {
        match self {
            Self::F32(values) => Slice::F32(&values[range]),
            Self::F16(values) => Slice::F16(&values[range]),
            Self::Bf16(values) => Slice::Bf16(&values[range]),
        }
    }

    pub(crate) fn all(&self) -> Slice<'_> {
        self.part(0..self.bits().len())
    }

    pub(crate) fn all_mut(&mut self) -> SliceMut<'_> {
        match self {
            Self::F32(values) => SliceMut::F32(values),
            Self::F16(values) => SliceMut::F16(values),
            Self::Bf16(values) => SliceMut::Bf16(values),
        }
    }

    /// Splits it into pieces of these lengths.
    pub(crate) fn pieces(&mut self, lengths: &[usize]) -> Vec<SliceMut<'_>> {
        fn cut<'a, T>(mut rest: &'a mut [T], lengths: &[usize]) -> Vec<&'a mut [T]> {
            let mut pieces = Vec::new();
            for &length in lengths {
                let (piece, tail) = rest.split_at_mut(length);
                pieces.push(piece);
                rest = tail;
            }
            pieces
        }
        match self {
            Self::F32(all) => cut(all, lengths).into_iter().map(SliceMut::F32).collect(),
            Self::F16(all) => cut(all, lengths).into_iter().map(SliceMut::F16).collect(),
            Self::Bf16(all) => cut(all, lengths).into_iter().map(SliceMut::Bf16).collect(),
        }
    }

    pub(crate) fn bits(&self) -> Vec<u32> {
        match self {
            Self::F32(values) => values.iter().map(|x| x.to_bits()).collect(),
            Self::F16(values) => values.iter().map(|x| x.to_bits().into()).collect(),
            Self::Bf16(values) => values.iter().map(|x| x.to_bits().into()).collect(),
        }
    }
}

/// An optimizer for each variant of each element-wise rule, over tensors `0..count`.
pub(crate) fn elementwise(count: usize, how: HalfWeights) -> Vec<Box<dyn Optimizer>> {
    let sgd = SgdHyper { lr: 0.1, weight_decay: 0.01, ..Default::default() };
    let momentum = SgdHyper { momentum: 0.9, dampening: 0.1, ..sgd };
    let nesterov = SgdHyper { momentum: 0.9, nesterov: true, maximize: true, ..sgd };
    let adamw = AdamWHyper { lr: 0.1, ..Default::default() };
    let amsgrad = AdamWHyper { amsgrad: true, maximize: true, ..adamw };
    let bert =
        BertAdamHyper { max_grad_norm: -1.0, t_total: 10, warmup: 0.2, ..Default::default() };
    let mut all: Vec<Box<dyn Optimizer>> = Vec::new();
    for hyper in [sgd, momentum, nesterov] {
        all.push(Box::new(Sgd::with_one_group(hyper, count).unwrap().with_half_weights(how)));
    }
    for hyper in [adamw, amsgrad] {
        all.push(Box::new(AdamW::with_one_group(hyper, count).unwrap().with_half_weights(how)));
    }
    for (momentum, centered) in [(0.0, false), (0.5, false), (0.0, true), (0.5, true)] {
        let rms = RmsPropHyper { momentum, centered, ..Default::default() };
        let tf = RmsPropTfHyper { momentum, centered, ..Default::default() };
        all.push(Box::new(RmsProp::with_one_group(rms, count).unwrap().with_half_weights(how)));
        all.push(Box::new(RmsPropTf::with_one_group(tf, count).unwrap().with_half_weights(how)));
    }
    all.push(Box::new(
        Adam::with_one_group(AdamHyper::default(), count).unwrap().with_half_weights(how),
    ));
    all.push(Box::new(
        Adadelta::with_one_group(AdadeltaHyper::default(), count).unwrap().with_half_weights(how),
    ));
    all.push(Box::new(BertAdam::with_one_group(bert, count).unwrap().with_half_weights(how)));
    let lion = Lion::with_one_group(LionHyper { lr: 0.1, ..Default::default() }, count);
    all.push(Box::new(lion.unwrap().with_half_weights(how)));
    let free = ScheduleFreeAdamWHyper { lr: 0.1, warmup_steps: 2, ..Default::default() };
    let free = ScheduleFreeAdamW::with_one_group(free, count).unwrap();
    all.push(Box::new(free.with_half_weights(how)));
    let own = CpuOptimizer::with_one_group(OwnHyper::default(), count).unwrap();
    all.push(Box::new(own.with_half_weights(how)));
    all
}

/// An optimizer for each variant of each rule, over tensors `0..count`.
pub(crate) fn optimizers(count: usize) -> Vec<Box<dyn Optimizer>> {
    optimizers_with(count, HalfWeights::Master)
}

pub(crate) fn optimizers_with(count: usize, how: HalfWeights) -> Vec<Box<dyn Optimizer>> {
    let mut all = elementwise(count, how);
    for clip in [ClipScope::Group, ClipScope::Tensor] {
        let bert = BertAdamHyper { clip, ..Default::default() };
        all.push(Box::new(BertAdam::with_one_group(bert, count).unwrap().with_half_weights(how)));
    }
    for amsgrad in [false, true] {
        let hyper = AdamWHyper { amsgrad, ..Default::default() };
        let adamw = AdamW::with_one_group(hyper, count).unwrap().with_8bit_state();
        all.push(Box::new(adamw.with_half_weights(how)));
    }
    let adam = Adam::with_one_group(AdamHyper::default(), count).unwrap().with_8bit_state();
    all.push(Box::new(adam.with_half_weights(how)));
    for flag in [false, true] {
        let lamb =
            LambHyper { use_global_grad_norm: flag, weight_decay: 0.1, ..Default::default() };
        let adamp =
            AdamPHyper { nesterov: flag, delta: 0.5, weight_decay: 0.1, ..Default::default() };
        all.push(Box::new(Lamb::with_one_group(lamb, count).unwrap().with_half_weights(how)));
        all.push(Box::new(AdamP::with_one_group(adamp, count).unwrap().with_half_weights(how)));
        let muon = MuonHyper { lr: 0.1, nesterov: flag, ..Default::default() };
        all.push(Box::new(Muon::with_one_group(muon, count).unwrap().with_half_weights(how)));
    }
    let adafactor = AdafactorHyper { weight_decay: 0.1, ..Default::default() };
    all.push(Box::new(Adafactor::with_one_group(adafactor, count).unwrap().with_half_weights(how)));
    all
}

/// A tensor, as a matrix of three rows if its length is divisible by 3.
pub(crate) fn param<'a>(weight: impl Into<SliceMut<'a>>, grad: Option<Slice<'a>>) -> ParamMut<'a> {
    let param = ParamMut::new(weight, grad);
    let count = param.weight.len();
    if count.is_multiple_of(3) { param.with_shape(&[3, count / 3]) } else { param }
}

pub(crate) fn step(
    optimizer: &mut dyn Optimizer,
    weights: &mut [Owned],
    grads: &[Option<Owned>],
    ctl: StepCtl,
) -> fused_optim::Result<Applied> {
    let mut params: Vec<_> = (weights.iter_mut().zip(grads))
        .map(|(weight, grad)| param(weight.all_mut(), grad.as_ref().map(Owned::all)))
        .collect();
    optimizer.step(&mut params, &ctl)
}

pub(crate) fn bits(weights: &[Owned]) -> Vec<Vec<u32>> {
    weights.iter().map(Owned::bits).collect()
}

pub(crate) const SCALED: StepCtl = StepCtl { grad_scale: 0.125, ..StepCtl::PLAIN };
pub(crate) const CHECK: StepCtl = StepCtl { found_inf: FoundInf::Check, ..SCALED };
