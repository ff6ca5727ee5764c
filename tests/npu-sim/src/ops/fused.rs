//! Operators that are a whole step of an optimizer, or of the loss scale.
//!
//! The rules are those of the documents and the host code in CANN's public repositories. The host
//! code decides if the two differ over optional arguments (`aclnnFusedSgd`'s gradient scale).

use std::sync::Arc;

use npu_sys::sys::*;

use super::foreach::{TILING, list};
use super::{NO_KERNEL, Planned, computes, larger, tensors};
use crate::kernels::{Kernel, Numbers};
use crate::nnop::{INVALID, Tensor};
use crate::world::world;

/// `aclnnFusedSgd` treats a momentum below this as none.
const NO_MOMENTUM: f32 = 1e-6;
/// Most dimensions of its tensors.
const DIMS: usize = 8;

/// Whether the chip has such operators.
fn has_fused() -> Result<(), i32> {
    if world().config.soc.has_foreach() { Ok(()) } else { Err(NO_KERNEL) }
}

/// A list, whose tensors are of the types, the dimensions and the number of `like`.
fn alike(handle: *const AclTensorList, like: &[Tensor]) -> Result<Vec<Tensor>, i32> {
    let all = list(&mut world(), handle)?;
    let same = |(a, b): (&Tensor, &Tensor)| (a.dtype, &a.dims) == (b.dtype, &b.dims);
    let fits = all.len() == like.len() && all.iter().zip(like).all(same);
    if fits { Ok(all) } else { Err(INVALID) }
}

/// As [`alike`], or nothing: null, or an empty list.
fn alike_or_none(
    handle: *const AclTensorList,
    like: &[Tensor],
) -> Result<Option<Vec<Tensor>>, i32> {
    if handle.is_null() || list(&mut world(), handle)?.is_empty() {
        return Ok(None);
    }
    alike(handle, like).map(Some)
}

/// One number, if there is one.
fn number(handle: *const AclTensor, types: &[AclDataType]) -> Result<Option<Tensor>, i32> {
    if handle.is_null() {
        return Ok(None);
    }
    let found = tensors([handle])?.remove(0);
    let fits = found.count() == 1 && types.contains(&found.dtype);
    if fits { Ok(Some(found)) } else { Err(INVALID) }
}

/// Numbers of an attribute that may not be below zero.
fn at_least_zero<T: PartialOrd + Default>(all: &[T]) -> Result<(), i32> {
    if all.iter().all(|one| *one >= T::default()) { Ok(()) } else { Err(INVALID) }
}

/// The numbers of AdamW, as its kernels have them.
#[derive(Clone, Copy)]
struct AdamW {
    lr: f32,
    betas: [f32; 2],
    weight_decay: f32,
    eps: f32,
    maximize: bool,
}

impl AdamW {
    /// PyTorch's formula for one tensor; `steps` are those before. Gives p, m, v and the largest v.
    fn step(self, steps: f64, [p, m, v, g]: [&Numbers; 4], most: Option<&Numbers>) -> [Numbers; 4] {
        let (step, [beta1, beta2]) = (steps as f32 + 1.0, self.betas);
        let (bias1, bias2) = (1.0 - beta1.powf(step), 1.0 - beta2.powf(step));
        let mut out = [const { Numbers::new() }; 4];
        for i in 0..p.len() {
            let [p, m, v, g] = [p, m, v, g].map(|numbers| numbers[i] as f32);
            let g = if self.maximize { -g } else { g };
            let m = beta1 * m + (1.0 - beta1) * g;
            let v = beta2 * v + (1.0 - beta2) * g * g;
            let largest = most.map_or(v, |most| larger(most[i] as f32, v));
            let p = p * (1.0 - self.lr * self.weight_decay);
            let p = p - self.lr / bias1 * m / (largest.sqrt() / bias2.sqrt() + self.eps);
            for (list, number) in out.iter_mut().zip([p, m, v, largest]) {
                list.push(f64::from(number));
            }
        }
        out
    }
}

/// AdamW. The step counter is read as one less than the step, and not written.
pub(crate) fn aclnnApplyAdamWV2(
    p: *mut AclTensor,
    m: *mut AclTensor,
    v: *mut AclTensor,
    max_v: *mut AclTensor,
    g: *const AclTensor,
    step: *const AclTensor,
    lr: f32,
    beta1: f32,
    beta2: f32,
    weight_decay: f32,
    eps: f32,
    amsgrad: bool,
    maximize: bool,
) -> Planned {
    has_fused()?;
    let mut inputs = tensors([p.cast_const(), m, v, g])?;
    computes(&inputs)?;
    if inputs.iter().any(|tensor| tensor.dims != inputs[0].dims) {
        return Err(INVALID);
    }
    let mut outputs = inputs[..3].to_vec();
    inputs.extend(tensors([step])?);
    if inputs[4].count() != 1 {
        return Err(INVALID);
    }
    if amsgrad {
        let largest = tensors([max_v.cast_const()])?;
        if (largest[0].dtype, &largest[0].dims) != (inputs[0].dtype, &inputs[0].dims) {
            return Err(INVALID);
        }
        outputs.extend(largest.clone());
        inputs.extend(largest);
    }
    let rule = AdamW { lr, betas: [beta1, beta2], weight_decay, eps, maximize };
    let compute = Arc::new(move |x: &[Numbers]| {
        let out = rule.step(x[4][0], [&x[0], &x[1], &x[2], &x[3]], x.get(5));
        out[..x.len() - 2].to_vec()
    });
    Ok(Kernel { inputs, outputs, compute })
}

/// AdamW on lists. Counters of steps are read as one less than the step, and not written; the
/// documents ask for more than zero. The numbers are rounded to f32.
pub(crate) fn aclnnFusedAdamw(
    p: *const AclTensorList,
    g: *const AclTensorList,
    m: *const AclTensorList,
    v: *const AclTensorList,
    max_v: *const AclTensorList,
    steps: *const AclTensorList,
    grad_scale: *const AclTensor,
    found_inf: *const AclTensor,
    lr: f64,
    beta1: f64,
    beta2: f64,
    weight_decay: f64,
    eps: f64,
    amsgrad: bool,
    maximize: bool,
) -> Planned {
    has_fused()?;
    at_least_zero(&[lr, beta1, beta2, weight_decay])?;
    let p = list(&mut world(), p)?;
    computes(&p)?;
    let (g, m, v) = (alike(g, &p)?, alike(m, &p)?, alike(v, &p)?);
    let most = alike_or_none(max_v, &p)?;
    if amsgrad && most.is_none() {
        return Err(INVALID);
    }
    let most = most.filter(|_| amsgrad);
    let steps = list(&mut world(), steps)?;
    let counts = |one: &Tensor| {
        one.dtype == steps[0].dtype
            && [AclDataType::FLOAT, AclDataType::INT64].contains(&one.dtype)
            && one.count() == 1
    };
    if steps.len() != p.len() || !steps.iter().all(counts) {
        return Err(INVALID);
    }
    let float = [AclDataType::FLOAT];
    let (scale, found) = (number(grad_scale, &float)?, number(found_inf, &float)?);
    let (count, is_scaled, is_told) = (p.len(), scale.is_some(), found.is_some());
    let outputs = [&p, &m, &v].into_iter().chain(&most).flatten().cloned().collect();
    let inputs = [&p, &m, &v].into_iter().chain(&most).chain([&g, &steps]).flatten();
    let inputs = inputs.cloned().chain(scale).chain(found).collect();
    let betas = [beta1, beta2].map(|beta| beta as f32);
    let (lr, weight_decay, eps) = (lr as f32, weight_decay as f32, eps as f32);
    let rule = AdamW { lr, betas, weight_decay, eps, maximize };
    let slots = 3 + usize::from(amsgrad);
    let compute = Arc::new(move |x: &[Numbers]| {
        let (x, ends) = x.split_at((slots + 2) * count);
        if is_told && ends[ends.len() - 1][0] == 1.0 {
            return x[..slots * count].to_vec();
        }
        let scale = if is_scaled { 1.0 / ends[0][0] as f32 } else { 1.0 };
        adamw_on_lists(rule, count, scale, &x.chunks(count).collect::<Vec<_>>())
    });
    Ok(Kernel { inputs, outputs, compute })
}

/// Lists of parameters, moments, perhaps maxima, gradients and steps; nothing of steps that are
/// none.
fn adamw_on_lists(rule: AdamW, count: usize, scale: f32, lists: &[&[Numbers]]) -> Vec<Numbers> {
    let [slots @ .., gradients, steps] = lists else { return Vec::new() };
    let mut out = vec![Numbers::new(); slots.len() * count];
    for at in 0..count {
        if steps[at][0] <= 0.0 {
            return Vec::new();
        }
        let g = gradients[at].iter().map(|g| f64::from(*g as f32 * scale)).collect();
        let most = slots.get(3).map(|most| &most[at]);
        let old = [&slots[0][at], &slots[1][at], &slots[2][at], &g];
        let new = rule.step(steps[at][0], old, most);
        for (list, numbers) in new.into_iter().take(slots.len()).enumerate() {
            out[list * count + at] = numbers;
        }
    }
    out
}

/// SGD on lists, PyTorch's formula; the gradients, divided by the scale, are written back.
pub(crate) fn aclnnFusedSgd(
    p: *const AclTensorList,
    g: *const AclTensorList,
    buffer: *const AclTensorList,
    grad_scale: *const AclTensor,
    weight_decay: f32,
    momentum: f32,
    lr: f32,
    dampening: f32,
    nesterov: bool,
    maximize: bool,
    is_first_step: bool,
) -> Planned {
    has_fused()?;
    at_least_zero(&[weight_decay, momentum, lr, dampening])?;
    if nesterov && (momentum <= 0.0 || dampening >= NO_MOMENTUM) {
        return Err(INVALID);
    }
    let p = list(&mut world(), p)?;
    computes(&p)?;
    if p.iter().any(|tensor| tensor.count() == 0 || tensor.dims.len() > DIMS) {
        return Err(INVALID);
    }
    let (g, buffer) = (alike(g, &p)?, alike_or_none(buffer, &p)?);
    if buffer.is_some() == (momentum < NO_MOMENTUM) {
        return Err(INVALID);
    }
    let floats = [AclDataType::FLOAT, AclDataType::FLOAT16, AclDataType::BF16];
    let scale = number(grad_scale, &floats)?;
    let (count, has_buffer, is_scaled) = (p.len(), buffer.is_some(), scale.is_some());
    let outputs: Vec<Tensor> = [&p, &g].into_iter().chain(&buffer).flatten().cloned().collect();
    let inputs = outputs.iter().cloned().chain(scale).collect();
    let compute = Arc::new(move |x: &[Numbers]| {
        let scale = if is_scaled { x[x.len() - 1][0] as f32 } else { 1.0 };
        if scale == 0.0 {
            return Vec::new();
        }
        let mut out = x[..x.len() - usize::from(is_scaled)].to_vec();
        for (at, place) in (0..count).flat_map(|at| (0..x[at].len()).map(move |place| (at, place)))
        {
            let of = |list: usize| x[list * count + at][place] as f32;
            let scaled = of(1) * (1.0 / scale);
            let g = if maximize { -scaled } else { scaled };
            let g = g + weight_decay * of(0);
            let mut step = g;
            if has_buffer {
                let new = if is_first_step { g } else { momentum * of(2) + (1.0 - dampening) * g };
                step = if nesterov { g + momentum * new } else { new };
                out[2 * count + at][place] = f64::from(new);
            }
            out[at][place] = f64::from(of(0) - lr * step);
            out[count + at][place] = f64::from(scaled);
        }
        out
    });
    Ok(Kernel { inputs, outputs, compute })
}

/// The loss scale after a step, by PyTorch's rule; one that would not be finite does not grow.
pub(crate) fn aclnnAmpUpdateScale(
    scale: *const AclTensor,
    growth_tracker: *const AclTensor,
    found_inf: *const AclTensor,
    growth_factor: f64,
    backoff_factor: f64,
    growth_interval: i64,
    new_scale: *const AclTensor,
    new_growth_tracker: *const AclTensor,
) -> Planned {
    has_fused()?;
    let floats = tensors([scale, found_inf, new_scale])?;
    computes(&floats)?;
    let trackers = tensors([growth_tracker, new_growth_tracker])?;
    if trackers.iter().any(|tracker| tracker.dtype != AclDataType::INT32) {
        return Err(INVALID);
    }
    let fits = floats.iter().chain(&trackers).all(|tensor| tensor.count() == 1);
    if !fits || !(1..=i64::from(i32::MAX)).contains(&growth_interval) {
        return Err(TILING);
    }
    let (growth, backoff) = (growth_factor as f32, backoff_factor as f32);
    let compute = Arc::new(move |x: &[Numbers]| {
        let (scale, tracker, found) = (x[0][0] as f32, x[1][0] + 1.0, x[2][0] != 0.0);
        let grows = !found && tracker == growth_interval as f64;
        let grown = scale * growth;
        let new = match (found, grows && grown.is_finite()) {
            (true, _) => scale * backoff,
            (_, true) => grown,
            _ => scale,
        };
        let tracker = if found || grows { 0.0 } else { tracker };
        vec![vec![f64::from(new)], vec![tracker]]
    });
    let inputs = vec![floats[0].clone(), trackers[0].clone(), floats[1].clone()];
    let outputs = vec![floats[2].clone(), trackers[1].clone()];
    Ok(Kernel { inputs, outputs, compute })
}
