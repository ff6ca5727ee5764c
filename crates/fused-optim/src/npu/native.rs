//! Steps with CANN's fused kernels, one launch per span.

use npu_sys::safe::{AdamWTensors, View};

use super::flat::Span;
use super::fused::NpuOptimizer;
use super::rules::{Native, NpuHyper};
use crate::Result;

#[expect(private_bounds, reason = "sealed: the nine rules only")]
impl<H: NpuHyper> NpuOptimizer<H> {
    /// Takes a span's step with a fused kernel; returns `false` and does nothing if no kernel
    /// supports it.
    pub(super) fn step_native(&self, span: &Span, grad: &View) -> Result<bool> {
        if !self.kernels || !self.on.soc().is_second_generation() {
            return Ok(false);
        }
        let flat = &self.flats[span.flat];
        let p = self.parameters(span)?;
        let slot = |at: usize| flat.slots[at].part(span.start, span.count);
        match self.core.groups()[flat.kind.group].hyper.native(span.step) {
            Some(Native::Sgd(numbers)) if self.on.has("aclnnFusedSgd") => {
                let buffer = (numbers.momentum > 0.0).then(|| slot(0)).transpose()?;
                self.on.fused_sgd([&p, grad], buffer.as_ref(), numbers)?;
            }
            Some(Native::AdamW(numbers, corrections)) => {
                // The newer kernel requires a step above zero; both increment it themselves.
                let is_fused = span.step > 1 && self.on.has("aclnnFusedAdamw");
                if !is_fused && !self.on.has("aclnnApplyAdamWV2") {
                    return Ok(false);
                }
                let (m, v) = (slot(0)?, slot(1)?);
                let max_v = (flat.slots.len() > 2).then(|| slot(2)).transpose()?;
                let (max_v, step) = (max_v.as_ref(), &self.scratch.step);
                self.on.fill(step, (span.step - 1) as f32)?;
                let tensors = AdamWTensors { p: &p, m: &m, v: &v, max_v, g: grad, step };
                match is_fused {
                    true => self.on.fused_adamw(tensors, numbers)?,
                    false => self.on.apply_adamw_v2(tensors, numbers)?,
                }
                self.launch(&corrections, span, grad)?;
            }
            _ => return Ok(false),
        }
        Ok(true)
    }
}
