//! Steps on candle's variables on a GPU, through device pointers, in candle's stream. Nothing is copied.

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
        vars: &[Var],
        grads: &[Option<Tensor>],
        ctl: &StepCtl,
    ) -> Result<Applied> {
        let slice = |grad: &Option<Tensor>| grad.as_ref().map(DeviceSlice::try_from).transpose();
        let slices = grads.iter().map(slice).collect::<Result<Vec<_>>>()?;
        // SAFETY: `DeviceSlice::try_from` gives address, length and type of a tensor on candle's device, which is
        // that of `gpu`; `grads` outlive the step.
        #[expect(unsafe_code, reason = "the addresses are raw device pointers")]
        unsafe {
            self.step_slices(optimizer, vars, &slices, ctl)
        }
    }

    /// # Safety
    ///
    /// The gradients are memory of the GPU, written and freed in order of its stream after the step.
    #[expect(unsafe_code, reason = "the addresses are raw device pointers")]
    pub(super) unsafe fn step_slices(
        &self,
        optimizer: &mut dyn DeviceOptimizer,
        vars: &[Var],
        grads: &[Option<DeviceSlice>],
        ctl: &StepCtl,
    ) -> Result<Applied> {
        if thread::current().id() != self.thread {
            bail!(
                "step on another thread than the one that created the optimizer; candle's stream differs there"
            );
        }
        let mut params = Vec::with_capacity(vars.len());
        let mut memory = Vec::new();
        for (var, grad) in vars.iter().zip(grads) {
            let (weight, grad) = (DeviceSlice::try_from(var.as_tensor())?, *grad);
            memory.push((range(weight), true));
            memory.extend(grad.map(|grad| (range(grad), false)));
            let rows = crate::param::rows(var.dims());
            params.push(DeviceParam { rows, ..DeviceParam::new(weight, grad) });
        }
        if shares_a_weight(&mut memory) {
            bail!("a variable is listed twice, or shares memory with another or with a gradient");
        }
        // SAFETY: `DeviceSlice::try_from` gives address, length and type of a tensor on candle's device, which is
        // that of `gpu`. candle orders its own writes, reads and frees in its stream of this thread, the one of
        // `gpu`, so the kernels of this step run before candle's later work. `vars` outlive the step, gradients by
        // the caller's word. No weight shares memory, as checked above.
        let params = unsafe { DeviceParams::new(&self.gpu, &params) };
        optimizer.step_on_device(params, ctl).map_err(Error::wrap)
    }
}

impl<H: DeviceHyper + Debug> FromVars for CudaDeviceOptimizer<H> {
    type Hyper = H;

    /// Half weights get f32 masters.
    fn from_vars(vars: &[Var], hyper: H) -> Result<Self> {
        let groups = [ParamGroup::new(hyper, 0..vars.len())];
        Self::new(gpu_of(vars)?, groups, HalfWeights::Master).map_err(Error::wrap)
    }
}

/// GPU of the first variable, with candle's stream of this thread.
fn gpu_of(vars: &[Var]) -> Result<Gpu> {
    let Some(first) = vars.first() else { bail!("no float variables, so no GPU to step on") };
    Gpu::on(first.device().as_cuda_device()?.cuda_stream()).map_err(Error::wrap)
}

/// Start and end address, and whether it is a weight.
type Memory = ((u64, u64), bool);

fn range(slice: DeviceSlice) -> (u64, u64) {
    (slice.ptr, slice.ptr + (slice.len * slice.dtype.size()) as u64)
}

/// Whether a weight shares memory with another weight or with a gradient.
fn shares_a_weight(memory: &mut [Memory]) -> bool {
    memory.sort_unstable();
    // Largest end address so far, of all tensors and of weights.
    let (mut all, mut weights) = (0, 0);
    memory.iter().filter(|((start, end), _)| start < end).any(|&((start, end), is_weight)| {
        let shares = start < weights || is_weight && start < all;
        all = all.max(end);
        weights = if is_weight { weights.max(end) } else { weights };
        shares
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_gradients_may_share_memory() {
        let shares = |memory: &[Memory]| shares_a_weight(&mut memory.to_vec());
        assert!(!shares(&[((8, 16), true), ((0, 8), true), ((16, 24), false)]));
        assert!(!shares(&[((0, 8), true), ((8, 24), false), ((16, 24), false), ((8, 8), true)]));
        assert!(shares(&[((0, 8), true), ((0, 8), true)]));
        assert!(shares(&[((0, 8), false), ((4, 12), true)]));
        assert!(shares(&[((0, 8), true), ((4, 12), false)]));
        assert!(shares(&[((0, 32), true), ((4, 8), false), ((16, 20), false)]));
    }
}
