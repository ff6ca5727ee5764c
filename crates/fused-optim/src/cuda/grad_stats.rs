//! Statistics of gradients, taken before the step as soon as the gradients are final.

#![expect(unsafe_code, reason = "kernels read at the caller's addresses")]

use std::ops::Range;
use std::sync::{Arc, Mutex, PoisonError};

use cuda_rt::Device;

use super::device::launch;
use super::fused::{BLOCKS, Fused, UNBOUND, read_answer};
use super::requests::request;
use super::rules::DeviceHyper;
use super::table::{Answer, Bytes, Job};
use super::{CudaOptimizer, DeviceSlice, Gpu};
use crate::{Error, Result, StepCtl, norms};

/// Takes statistics of gradients (their norm, whether they are finite) before the step, for example of a bucket
/// behind its all-reduce, while the bucket is in the device's cache: the step does not read them again. From
/// [`DeviceOptimizer::grad_stats`](crate::DeviceOptimizer::grad_stats); good until that step.
#[derive(Clone, Debug)]
pub struct GradStats {
    optimizer: Arc<Mutex<dyn TakesStats>>,
    ctl: StepCtl,
}

impl GradStats {
    /// Reads some gradients, given with the index of each one's tensor, in the stream of `on`. Gradients that the
    /// last step had not, or had elsewhere, are left to the step.
    ///
    /// # Errors
    ///
    /// [`Error::Cuda`].
    ///
    /// # Safety
    ///
    /// The next thing that the optimizer does is a step on these gradients, as they are once the stream of `on`
    /// has come this far. That stream is one of the optimizer's device, in which this comes behind all that the
    /// optimizer's own has to do by now; and the optimizer's own waits for it before the step, and before the
    /// optimizer and this are dropped.
    pub unsafe fn take(&self, grads: &[(usize, DeviceSlice)], on: &Gpu) -> Result<()> {
        let mut optimizer = self.optimizer.lock().unwrap_or_else(PoisonError::into_inner);
        // SAFETY: the caller's promise.
        unsafe { optimizer.take_where_bound(grads, &self.ctl, on) }
    }
}

trait TakesStats: Send + std::fmt::Debug {
    /// # Safety
    ///
    /// As [`GradStats::take`].
    unsafe fn take_where_bound(
        &mut self,
        grads: &[(usize, DeviceSlice)],
        ctl: &StepCtl,
        on: &Gpu,
    ) -> Result<()>;
}

impl<H: DeviceHyper + std::fmt::Debug> TakesStats for CudaOptimizer<H> {
    unsafe fn take_where_bound(
        &mut self,
        grads: &[(usize, DeviceSlice)],
        ctl: &StepCtl,
        on: &Gpu,
    ) -> Result<()> {
        let bound = self.0.bound_at(grads);
        if bound.is_empty() {
            return Ok(());
        }
        // SAFETY: where `bind` was told, as was just compared; the streams are the caller's promise.
        unsafe { self.0.look_part(&bound, ctl, Some(on)) }
    }
}

/// Prepares `optimizer` for statistics taken before a step with this `ctl`; `None` if the step needs none.
pub(super) fn grad_stats<H: DeviceHyper + std::fmt::Debug>(
    optimizer: &Arc<Mutex<CudaOptimizer<H>>>,
    ctl: &StepCtl,
) -> Result<Option<GradStats>> {
    let ready = optimizer.lock().unwrap_or_else(PoisonError::into_inner).0.expect_stats(ctl)?;
    Ok(ready.then(|| GradStats { optimizer: optimizer.clone(), ctl: *ctl }))
}

impl<H: DeviceHyper, D: Device> Fused<H, D> {
    /// Sends what a step with this `ctl` asks, so that no look has to, and forgets earlier looks. False if nothing
    /// is bound, or the step needs no look.
    pub(super) fn expect_stats(&mut self, ctl: &StepCtl) -> Result<bool> {
        let ctl = &ctl.validated()?;
        if self.bound.is_none() || !norms::needed(ctl, &self.core.own_clips()) {
            return Ok(false);
        }
        self.forget_stats()?;
        let request = request(ctl, self.core.groups(), self.loss_scale)?.bytes();
        self.send(request, None, None)?;
        Ok(true)
    }

    /// Which tensors are bound with these very gradients.
    pub(super) fn bound_at(&self, grads: &[(usize, DeviceSlice)]) -> Vec<usize> {
        let Some(bound) = &self.bound else { return Vec::new() };
        let is_bound = |(index, grad): &&(usize, DeviceSlice)| {
            let at = bound.indices.binary_search(index);
            at.is_ok_and(|at| bound.at[at].grad == grad.ptr)
        };
        grads.iter().filter(is_bound).map(|(index, _)| *index).collect()
    }

    /// Has the step look for itself, whatever has been found so far.
    pub(super) fn forget_stats(&mut self) -> Result<()> {
        let Some(bound) = &mut self.bound else { return Ok(()) };
        match bound.taken.forget() {
            true => Ok(self.device.write(&mut bound.ctl, Answer::BAD, &0_u32.bytes())?),
            false => Ok(()),
        }
    }

    /// # Safety
    ///
    /// As [`CudaOptimizer::look_part`](super::CudaOptimizer::look_part).
    pub(super) unsafe fn look_part(
        &mut self,
        indices: &[usize],
        ctl: &StepCtl,
        on: Option<&D>,
    ) -> Result<()> {
        let ctl = &ctl.validated()?;
        let request = request(ctl, self.core.groups(), self.loss_scale)?.bytes();
        let bound = self.bound.as_mut().ok_or(UNBOUND)?;
        let at = |&index: &usize| {
            let missing = Error::MissingParam { index, count: bound.indices.len() };
            bound.indices.binary_search(&index).map_err(|_| missing)
        };
        let members = indices.iter().map(at).collect::<Result<Vec<_>>>()?;
        let parts = bound.taken.begin(&members, &request);
        self.send(request, None, on)?;
        let device = on.unwrap_or(&self.device);
        for part in &parts {
            // SAFETY: the caller vouches for these gradients.
            unsafe { self.look_at(device, part) }?;
        }
        self.bound.iter_mut().for_each(|bound| bound.taken.end(&members));
        Ok(())
    }

    /// Whether a gradient that is bound is not finite. Waits for the device.
    ///
    /// # Safety
    ///
    /// As [`CudaOptimizer::look_part`](super::CudaOptimizer::look_part), for all that are bound.
    pub(super) unsafe fn found_inf(&mut self, ctl: &StepCtl) -> Result<bool> {
        let all = self.bound.as_ref().ok_or(UNBOUND)?.indices.clone();
        // SAFETY: the caller vouches for the gradients.
        unsafe { self.look_part(&all, ctl, None) }?;
        let bad = read_answer(&self.device, self.bound.as_ref().ok_or(UNBOUND)?)?.bad != 0;
        // The step looks for itself, at these or at others.
        self.forget_stats()?;
        Ok(bad)
    }

    /// # Safety
    ///
    /// The gradients of these chunks must lie where `bind` was told until the device has read them.
    pub(super) unsafe fn look_at(&self, device: &D, chunks: &Range<u32>) -> Result<()> {
        let bound = self.bound.as_ref().ok_or(UNBOUND)?;
        let job = Job { first: chunks.start, chunks: chunks.end, ..bound.look };
        // SAFETY: the tables were made for this kernel and live as long as `bound`; the caller
        // vouches for the gradients.
        unsafe { launch(device, &bound.look_part, self.blocks(chunks.len() as u32, BLOCKS), &job) }
    }
}
