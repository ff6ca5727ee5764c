//! Optimizer steps by CANN's fused kernels.

#![expect(unsafe_code, reason = "calls C")]

use std::{iter, ptr};

use super::{Operators, View};
use crate::Result;

/// Number of pieces of a vector: kernels on lists give each core whole tensors. Chips of the second
/// generation have 40 to 50 such cores; more pieces than cores would double the time. Not measured.
const PIECES: usize = 40;
/// Alignment of the pieces in elements: at least 64 bytes for each type.
const ALIGN: usize = 32;

/// The tensors of [`Operators::apply_adamw_v2`] and [`Operators::fused_adamw`]; all except `step`
/// are as long as `p`.
#[derive(Clone, Copy, Debug)]
pub struct AdamWTensors<'a> {
    /// Parameters.
    pub p: &'a View,
    /// First moments.
    pub m: &'a View,
    /// Second moments.
    pub v: &'a View,
    /// Maxima of the second moments, with amsgrad.
    pub max_v: Option<&'a View>,
    /// Gradients.
    pub g: &'a View,
    /// Number of previous steps, one f32.
    pub step: &'a View,
}

/// The hyperparameters of [`Operators::apply_adamw_v2`] and [`Operators::fused_adamw`].
#[derive(Clone, Copy, Debug)]
pub struct AdamWNumbers {
    /// Learning rate.
    pub lr: f32,
    /// Decay rates of the moments.
    pub betas: (f32, f32),
    /// Weight decay, which is multiplied by `lr`.
    pub weight_decay: f32,
    /// Added to the denominator.
    pub eps: f32,
}

/// The hyperparameters of [`Operators::fused_sgd`].
#[derive(Clone, Copy, Debug)]
pub struct SgdNumbers {
    /// Weight decay, added to the gradient.
    pub weight_decay: f32,
    /// Momentum.
    pub momentum: f32,
    /// Learning rate.
    pub lr: f32,
    /// Dampening of the gradient in the momentum buffer.
    pub dampening: f32,
    /// Whether to use Nesterov momentum.
    pub nesterov: bool,
    /// Whether this is the first step, which initializes the momentum buffer with the gradient.
    pub is_first_step: bool,
}

impl Operators {
    /// Runs step `step + 1` of PyTorch's AdamW by one kernel. The caller sets `step` on the device
    /// before every call.
    ///
    /// # Errors
    ///
    /// As [`muls`](Self::muls).
    pub fn apply_adamw_v2(&self, tensors: AdamWTensors<'_>, numbers: AdamWNumbers) -> Result<()> {
        let AdamWTensors { p, m, v, max_v, g, step } = tensors;
        let AdamWNumbers { lr, betas, weight_decay, eps } = numbers;
        let amsgrad = max_v.is_some();
        let mut views = vec![p, m, v, g, step];
        views.extend(max_v);
        self.run(&views, &[], |ops, t, _| {
            let max = t.get(5).copied().unwrap_or(ptr::null_mut());
            let (b1, b2) = betas;
            // SAFETY: as in `muls`; null means no maxima.
            unsafe {
                ops.aclnnApplyAdamWV2(
                    t[0],
                    t[1],
                    t[2],
                    max,
                    t[3],
                    t[4],
                    lr,
                    b1,
                    b2,
                    weight_decay,
                    eps,
                    amsgrad,
                    false,
                )
            }
        })
    }

    /// As [`apply_adamw_v2`](Self::apply_adamw_v2), by one kernel of CANN 9.2. `step` must be above
    /// 0, as its documentation requires, so it cannot run the first step.
    ///
    /// # Errors
    ///
    /// As [`muls`](Self::muls).
    pub fn fused_adamw(&self, tensors: AdamWTensors<'_>, numbers: AdamWNumbers) -> Result<()> {
        let AdamWTensors { p, m, v, max_v, g, step } = tensors;
        let AdamWNumbers { lr, betas: (b1, b2), weight_decay, eps } = numbers;
        let amsgrad = max_v.is_some();
        let (p, g, m, v) = (pieces(p)?, pieces(g)?, pieces(m)?, pieces(v)?);
        let max_v = max_v.map(pieces).transpose()?;
        let steps: Vec<View> = iter::repeat_n(step.clone(), p.len()).collect();
        let [lr, b1, b2, decay, eps] = [lr, b1, b2, weight_decay, eps].map(f64::from);
        let none = ptr::null();
        let [p, g, m, v, steps] = [&p, &g, &m, &v, &steps].map(|views| Some(&views[..]));
        let lists = [p, g, m, v, max_v.as_deref(), steps];
        self.run_lists(lists, |ops, [p, g, m, v, max_v, steps]| {
            // SAFETY: the lists made by `run_lists` live until the plan is enqueued; null means no
            // maxima, no scale and no `found_inf`.
            unsafe {
                ops.aclnnFusedAdamw(
                    p, g, m, v, max_v, steps, none, none, lr, b1, b2, decay, eps, amsgrad, false,
                )
            }
        })
    }

    /// Runs a step of PyTorch's SGD by one kernel of CANN 9.1. `buffer` is required with momentum,
    /// which must be at least 1e-6, and must be `None` without.
    ///
    /// # Errors
    ///
    /// As [`muls`](Self::muls).
    pub fn fused_sgd(
        &self,
        [p, g]: [&View; 2],
        buffer: Option<&View>,
        numbers: SgdNumbers,
    ) -> Result<()> {
        let SgdNumbers { weight_decay, momentum, lr, dampening, nesterov, is_first_step } = numbers;
        let (p, g) = (pieces(p)?, pieces(g)?);
        let buffer = buffer.map(pieces).transpose()?;
        let none = ptr::null();
        self.run_lists([Some(&p), Some(&g), buffer.as_deref()], |ops, [p, g, buffer]| {
            // SAFETY: as above; null means no buffer and no scale.
            unsafe {
                ops.aclnnFusedSgd(
                    p,
                    g,
                    buffer,
                    none,
                    weight_decay,
                    momentum,
                    lr,
                    dampening,
                    nesterov,
                    false,
                    is_first_step,
                )
            }
        })
    }
}

/// Splits a vector into up to `PIECES` pieces of equal length.
fn pieces(view: &View) -> Result<Vec<View>> {
    let (count, len) = (view.count(), view.count().div_ceil(PIECES).next_multiple_of(ALIGN));
    let starts = (0..count).step_by(len.max(1));
    starts.map(|from| view.part(from, len.min(count - from))).collect()
}
