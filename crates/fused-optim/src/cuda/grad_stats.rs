//! Statistics of gradients, taken before the step as soon as the gradients are final.

#![expect(unsafe_code, reason = "kernels read at the caller's addresses")]

use std::ops::Range;
use std::sync::{Arc, Mutex, PoisonError};

use bytemuck::bytes_of;
use cuda_rt::Device;

use super::device::{blocks, launch};
use super::fused::{BLOCKS, Bound, NOT_BOUND, read_status};
use super::requests::request;
use super::rules::DeviceHyper;
use super::table::{DeviceStatus, Job};
use super::{CudaOptimizer, DeviceSlice, Gpu};
use crate::device::{GradStats, TakesStats};
use crate::{Error, Result, StepCtl, norms};

impl<H: DeviceHyper + std::fmt::Debug> TakesStats for CudaOptimizer<H> {
    unsafe fn take_bound(
        &mut self,
        grads: &[(usize, DeviceSlice)],
        ctl: &StepCtl,
        on: &Gpu,
    ) -> Result<()> {
        let bound = self.bound_at(grads);
        if bound.is_empty() {
            return Ok(());
        }
        // SAFETY: these gradients are bound at the addresses given; the caller guarantees the rest.
        unsafe { self.take_grad_stats(&bound, ctl, Some(on)) }
    }
}

/// Prepares `optimizer` for statistics taken before a step with this `ctl`; `None` if the step
/// needs none.
pub(super) fn grad_stats<H: DeviceHyper + std::fmt::Debug>(
    optimizer: &Arc<Mutex<CudaOptimizer<H>>>,
    ctl: &StepCtl,
) -> Result<Option<GradStats>> {
    let ready = optimizer.lock().unwrap_or_else(PoisonError::into_inner).prepare_stats(ctl)?;
    Ok(ready.then(|| GradStats { optimizer: optimizer.clone(), ctl: *ctl }))
}

#[expect(private_bounds, reason = "sealed: the nine rules only")]
impl<H: DeviceHyper, D: Device> CudaOptimizer<H, D> {
    /// Discards earlier statistics and uploads the arguments of those for a step with this `ctl`.
    /// Returns `false` if nothing is bound or the step needs no statistics.
    pub(super) fn prepare_stats(&mut self, ctl: &StepCtl) -> Result<bool> {
        let ctl = &ctl.validated()?;
        if self.bound.is_none() || !norms::needed(ctl, &self.core.own_clips()) {
            return Ok(false);
        }
        self.forget_stats()?;
        let request = request(ctl, self.core.groups(), self.loss_scale)?;
        self.upload(&request, None, None)?;
        Ok(true)
    }

    /// Indices of the tensors that are bound with these gradients.
    pub(super) fn bound_at(&self, grads: &[(usize, DeviceSlice)]) -> Vec<usize> {
        let Some(bound) = &self.bound else { return Vec::new() };
        let is_bound = |(index, grad): &&(usize, DeviceSlice)| {
            let at = bound.indices.binary_search(index);
            at.is_ok_and(|at| bound.tensors[at].grad == grad.ptr)
        };
        grads.iter().filter(is_bound).map(|(index, _)| *index).collect()
    }

    /// Discards the statistics taken so far, so the step reads all gradients.
    pub(super) fn forget_stats(&mut self) -> Result<()> {
        let Some(bound) = &mut self.bound else { return Ok(()) };
        if bound.taken.forget() {
            self.device.write(&mut bound.ctl, DeviceStatus::NONFINITE, &[0; 4])?;
        }
        Ok(())
    }

    /// Takes statistics (the norm, whether they are finite) of some tensors' gradients before the
    /// step, for example of a bucket after its all-reduce, while it is in the device's cache. `on`
    /// is a `Gpu` of the same device on the stream to launch in; `None` is the optimizer's own.
    ///
    /// The next step, if it has the same `ctl`, reads only the remaining gradients for its
    /// statistics, and has the same bits. Tensors may be split into calls in any order. A further
    /// call for a tensor replaces its norm, but a gradient that was not finite in any call skips
    /// the step.
    ///
    /// # Errors
    ///
    /// [`Error::MissingParam`](crate::Error::MissingParam) for a tensor that is not bound or has no
    /// gradient; an invalid `ctl`; [`Error::CalledBefore`](crate::Error::CalledBefore)
    /// [`bind`](Self::bind); [`Error::Cuda`](crate::Error::Cuda).
    ///
    /// # Safety
    ///
    /// These gradients must still be valid, and must not change before the step. If `on` is another
    /// stream, this must come after the last step there, and the optimizer's stream must wait for
    /// it before the next step.
    pub unsafe fn take_grad_stats(
        &mut self,
        indices: &[usize],
        ctl: &StepCtl,
        on: Option<&D>,
    ) -> Result<()> {
        let ctl = &ctl.validated()?;
        let request = request(ctl, self.core.groups(), self.loss_scale)?;
        let needed = "bind";
        let bound = self.bound.as_mut();
        let bound = bound.ok_or(Error::CalledBefore { call: "take_grad_stats", needed })?;
        let at = |&index: &usize| {
            let missing = Error::MissingParam { index, count: bound.indices.len() };
            bound.indices.binary_search(&index).map_err(|_| missing)
        };
        let members = indices.iter().map(at).collect::<Result<Vec<_>>>()?;
        let ranges = bound.taken.begin(&members, bytes_of(&request));
        self.upload(&request, None, on)?;
        let bound = self.bound.as_mut().ok_or(NOT_BOUND)?;
        for chunks in &ranges {
            // SAFETY: guaranteed by the caller.
            unsafe { bound.launch_stats(on.unwrap_or(&self.device), chunks) }?;
        }
        bound.taken.end(&members);
        Ok(())
    }

    /// Whether a bound gradient, times the gradient factor, is not finite. Waits for the device.
    ///
    /// # Safety
    ///
    /// As [`take_grad_stats`](Self::take_grad_stats), for all bound gradients.
    pub(super) unsafe fn found_inf(&mut self, ctl: &StepCtl) -> Result<bool> {
        let all = self.bound.as_ref().ok_or(NOT_BOUND)?.indices.clone();
        // SAFETY: guaranteed by the caller.
        unsafe { self.take_grad_stats(&all, ctl, None) }?;
        let status = read_status(&self.device, self.bound.as_ref().ok_or(NOT_BOUND)?)?;
        // The gradients may change before the step.
        self.forget_stats()?;
        Ok(status.nonfinite != 0)
    }
}

impl<D: Device> Bound<D> {
    /// Takes statistics of these chunks of gradients.
    ///
    /// # Safety
    ///
    /// The gradients of these chunks must be valid until the device has read them.
    pub(super) unsafe fn launch_stats(&self, device: &D, chunks: &Range<u32>) -> Result<()> {
        let job = Job { first: chunks.start, chunks: chunks.end, ..self.stats_job };
        let blocks = blocks(device, chunks.len() as u32, BLOCKS);
        // SAFETY: the tables were made for this kernel and live as long as `self`; the caller
        // guarantees the gradients.
        unsafe { launch(device, &self.grad_stats, blocks, &job) }
    }
}
