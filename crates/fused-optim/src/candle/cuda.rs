//! Steps on candle's variables on a GPU, through device pointers, in candle's stream. Nothing is
//! copied.

use std::fmt::Debug;
use std::thread::{self, ThreadId};

use candle_core::{Error, Result, Tensor, Var, bail};

use super::{FromVars, label};
use crate::cuda::{CudaDeviceOptimizer, DeviceHyper, DeviceParam, DeviceParams, DeviceSlice, Gpu};
use crate::{Applied, DeviceOptimizer, HalfWeights, ParamGroup, StepCtl};

/// The variables' GPU, with candle's stream.
#[derive(Debug)]
pub(super) struct OnGpu {
    gpu: Gpu,
    /// The thread of this stream: candle has one stream per thread.
    thread: ThreadId,
}

impl OnGpu {
    /// Checks that all of `vars` are on one GPU and of a supported type.
    pub(super) fn new(vars: &[Var], names: &[String]) -> Result<Self> {
        let gpu = gpu_of(vars)?;
        let device = vars[0].device();
        for (index, var) in vars.iter().enumerate() {
            DeviceSlice::try_from(var.as_tensor()).map_err(|e| e.context(label(names, index)))?;
            if !var.device().same_device(device) {
                let (at, other) = (var.device().location(), device.location());
                let label = label(names, index);
                bail!("{label} is on {at:?}; expected {other:?}, the device of the first variable");
            }
        }
        Ok(Self { gpu, thread: thread::current().id() })
    }

    pub(super) fn step(
        &self,
        optimizer: &mut dyn DeviceOptimizer,
        (vars, names): (&[Var], &[String]),
        grads: &[Option<Tensor>],
        ctl: &StepCtl,
    ) -> Result<Applied> {
        let slice = |grad: &Option<Tensor>| grad.as_ref().map(DeviceSlice::try_from).transpose();
        let slices = grads.iter().map(slice).collect::<Result<Vec<_>>>()?;
        // SAFETY: `DeviceSlice::try_from` gives address, length and type of a tensor on candle's
        // device, which is that of `gpu`; `grads` outlive the step.
        #[expect(unsafe_code, reason = "the addresses are raw device pointers")]
        unsafe {
            self.step_slices(optimizer, (vars, names), &slices, ctl)
        }
    }

    /// # Safety
    ///
    /// The gradients are memory of the GPU, written and freed in order of its stream after the
    /// step.
    #[expect(unsafe_code, reason = "the addresses are raw device pointers")]
    pub(super) unsafe fn step_slices(
        &self,
        optimizer: &mut dyn DeviceOptimizer,
        (vars, names): (&[Var], &[String]),
        grads: &[Option<DeviceSlice>],
        ctl: &StepCtl,
    ) -> Result<Applied> {
        if thread::current().id() != self.thread {
            bail!(
                "step on another thread than the one that created the optimizer; candle's stream differs there"
            );
        }
        let tensors: Vec<_> = vars.iter().map(Var::as_tensor).collect();
        let step = |params: DeviceParams<'_>| optimizer.step_on_device(params, ctl);
        // SAFETY: `new` has checked that `vars`, which outlive the step, are on the device of
        // `gpu`. candle orders its own writes, reads and frees in its stream of this thread, the
        // one of `gpu`, so the kernels of this step run before candle's later work. Gradients by
        // the caller's word.
        unsafe { lend_on_gpu(&self.gpu, &tensors, |index| label(names, index), grads, step) }?
            .map_err(Error::wrap)
    }
}

/// Lends tensors on a GPU, with their gradients, to `call`, an optimizer's step in the stream of
/// `gpu`. `label` names a tensor in an error.
///
/// # Errors
///
/// A tensor that is not contiguous, of another type than f32, f16 and bf16, listed twice, or in the
/// memory of another one or of a gradient; nothing was called then.
///
/// # Safety
///
/// Tensors and gradients are memory of the GPU, complete in order of the stream of `gpu`, and
/// written or freed only in order of it after the call.
#[expect(unsafe_code, reason = "the addresses are raw device pointers")]
pub unsafe fn lend_on_gpu<R>(
    gpu: &Gpu,
    tensors: &[&Tensor],
    label: impl Fn(usize) -> String,
    grads: &[Option<DeviceSlice>],
    call: impl FnOnce(DeviceParams<'_>) -> R,
) -> Result<R> {
    if grads.len() != tensors.len() {
        bail!("{} gradients for {} tensors", grads.len(), tensors.len());
    }
    let mut params = Vec::with_capacity(tensors.len());
    let mut memory = Vec::new();
    for (index, (tensor, grad)) in tensors.iter().zip(grads).enumerate() {
        let weight = DeviceSlice::try_from(*tensor).map_err(|e| e.context(label(index)))?;
        memory.push((range(weight), true, index));
        memory.extend(grad.map(|grad| (range(grad), false, index)));
        let rows = crate::param::rows(tensor.dims());
        params.push(DeviceParam { rows, ..DeviceParam::new(weight, *grad) });
    }
    if let Some(index) = shares_a_weight(&mut memory) {
        let label = label(index);
        bail!(
            "{label} is listed twice, or it or its gradient is in the memory of another variable or gradient"
        );
    }
    // SAFETY: `DeviceSlice::try_from` gives address, length and type of a tensor on candle's
    // device, that of `gpu` by the caller's word, as is the order of all uses. No weight shares
    // memory, as checked above.
    Ok(call(unsafe { DeviceParams::new(gpu, &params) }))
}

impl<H: DeviceHyper + Debug> FromVars for CudaDeviceOptimizer<H> {
    type Hyper = H;

    /// Half weights get f32 masters.
    fn from_vars(vars: &[Var], hyper: H) -> Result<Self> {
        Self::from_groups(vars, [ParamGroup::new(hyper, 0..vars.len())])
    }

    fn from_groups(vars: &[Var], groups: impl IntoIterator<Item = ParamGroup<H>>) -> Result<Self> {
        Self::new(gpu_of(vars)?, groups, HalfWeights::Master).map_err(Error::wrap)
    }
}

/// GPU of the first variable, with candle's stream of this thread.
fn gpu_of(vars: &[Var]) -> Result<Gpu> {
    let Some(first) = vars.first() else { bail!("no float variables, so no GPU to step on") };
    Gpu::try_from(first.device())
}

/// Start and end address, whether it is a weight, and of which variable.
type Memory = ((u64, u64), bool, usize);

fn range(slice: DeviceSlice) -> (u64, u64) {
    (slice.ptr, slice.ptr + (slice.len * slice.dtype.size()) as u64)
}

/// A variable whose weight or gradient is in the memory of another weight, or its weight in that of
/// a gradient.
fn shares_a_weight(memory: &mut [Memory]) -> Option<usize> {
    memory.sort_unstable();
    // Largest end address so far, of all tensors and of weights.
    let (mut all, mut weights) = (0, 0);
    let mut memory = memory.iter().filter(|((start, end), ..)| start < end);
    let shares = |&&((start, end), is_weight, _): &&Memory| {
        let shares = start < weights || is_weight && start < all;
        all = all.max(end);
        weights = if is_weight { weights.max(end) } else { weights };
        shares
    };
    memory.find(shares).map(|(.., index)| *index)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_gradients_may_share_memory() {
        let shares = |memory: &[((u64, u64), bool)]| {
            let memory = memory.iter().enumerate().map(|(i, (range, is))| (*range, *is, i));
            shares_a_weight(&mut memory.collect::<Vec<_>>())
        };
        assert_eq!(shares(&[((8, 16), true), ((0, 8), true), ((16, 24), false)]), None);
        let apart = [((0, 8), true), ((8, 24), false), ((16, 24), false), ((8, 8), true)];
        assert_eq!(shares(&apart), None);
        assert_eq!(shares(&[((0, 8), true), ((0, 8), true)]), Some(1));
        assert_eq!(shares(&[((0, 8), false), ((4, 12), true)]), Some(1));
        assert_eq!(shares(&[((0, 8), true), ((4, 12), false)]), Some(1));
        assert_eq!(shares(&[((0, 32), true), ((4, 8), false), ((16, 20), false)]), Some(1));
    }
}
