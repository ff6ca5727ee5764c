//! Whole steps of optimizers by CANN's own kernels.

#![expect(unsafe_code, reason = "calls C")]

use std::{iter, ptr};

use super::{Operators, View};
use crate::Result;

/// Kernels on lists give a core whole tensors of the list, so a vector is given to them in so many pieces:
/// chips of the second generation have 40 to 50 such cores, and a piece more than cores would take as
/// long as all of them again. Reasoned, not measured.
const PIECES: usize = 40;
/// Pieces begin at multiples of so many numbers: of 64 bytes whatever the type.
const ALIGN: usize = 32;

/// What [`Operators::apply_adamw_v2`] and [`Operators::fused_adamw`] work on; all as long as `p`, but for
/// `step`.
#[derive(Clone, Copy, Debug)]
pub struct AdamWTensors<'a> {
    /// Parameters.
    pub p: &'a View,
    /// First moments.
    pub m: &'a View,
    /// Second moments.
    pub v: &'a View,
    /// Their maxima, with amsgrad.
    pub max_v: Option<&'a View>,
    /// Gradients.
    pub g: &'a View,
    /// Steps taken before, one number of f32.
    pub step: &'a View,
}

/// The numbers of those two.
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

/// The numbers of [`Operators::fused_sgd`].
#[derive(Clone, Copy, Debug)]
pub struct SgdNumbers {
    /// Weight decay, added to the gradient.
    pub weight_decay: f32,
    /// Momentum.
    pub momentum: f32,
    /// Learning rate.
    pub lr: f32,
    /// What is taken off a gradient on its way into the buffer.
    pub dampening: f32,
    /// Whether the step looks ahead.
    pub nesterov: bool,
    /// Whether the buffer is nothing yet: it becomes the gradient.
    pub is_first_step: bool,
}

impl Operators {
    /// AdamW of PyTorch by CANN's own kernel, one launch: moves `p` by the `step + 1`-th step, `step`
    /// being one number on the device that the caller sets before every call.
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
            // SAFETY: as in `muls`; null stands for no maxima.
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

    /// The same by the kernel that CANN has had since 9.2, on whole vectors: one launch. `step` must be above
    /// zero, as its documents ask, so it is no kernel for the first step.
    ///
    /// # Errors
    ///
    /// As [`muls`](Self::muls).
    pub fn fused_adamw(&self, tensors: AdamWTensors<'_>, numbers: AdamWNumbers) -> Result<()> {
        let AdamWTensors { p, m, v, max_v, g, step } = tensors;
        let AdamWNumbers { lr, betas: (b1, b2), weight_decay, eps } = numbers;
        let (p, g, m, v) = (pieces(p)?, pieces(g)?, pieces(m)?, pieces(v)?);
        let most = max_v.map_or(Ok(Vec::new()), pieces)?;
        let steps: Vec<View> = iter::repeat_n(step.clone(), p.len()).collect();
        let [lr, b1, b2, decay, eps] = [lr, b1, b2, weight_decay, eps].map(f64::from);
        let (none, amsgrad) = (ptr::null(), max_v.is_some());
        let lists = [&p, &g, &m, &v, &most, &steps].map(Vec::as_slice);
        self.run_lists(lists, |ops, [p, g, m, v, most, steps]| {
            // SAFETY: `run_lists` makes lists that live until the plan is in the stream; null stands for no
            // maxima, no scale and no verdict.
            unsafe {
                ops.aclnnFusedAdamw(
                    p, g, m, v, most, steps, none, none, lr, b1, b2, decay, eps, amsgrad, false,
                )
            }
        })
    }

    /// SGD of PyTorch by the kernel that CANN has had since 9.1, on whole vectors: one launch. `buffer` is
    /// there with momentum, which must then be at least 1e-6, and not without.
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
        let buffer = buffer.map_or(Ok(Vec::new()), pieces)?;
        let none = ptr::null();
        self.run_lists([&p, &g, &buffer].map(Vec::as_slice), |ops, [p, g, buffer]| {
            // SAFETY: as above; null stands for no buffer and no scale.
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

/// A vector, cut evenly.
fn pieces(view: &View) -> Result<Vec<View>> {
    let (count, most) = (view.count(), view.count().div_ceil(PIECES).next_multiple_of(ALIGN));
    let starts = (0..count).step_by(most.max(1));
    starts.map(|from| view.part(from, most.min(count - from))).collect()
}
