//! Steps of candle's variables on a GPU, by their addresses, in candle's own stream: nothing is copied.

use std::fmt::Debug;
use std::thread::{self, ThreadId};

use candle_core::{Error, Result, Tensor, Var, bail};

use super::{OverVars, label};
use crate::cuda::{DeviceFed, DeviceHyper, DeviceParam, DeviceParams, DeviceSlice, Gpu};
use crate::{Applied, DeviceOptimizer, HalfWeights, ParamGroup, StepCtl};

/// The GPU of all variables, in candle's stream there.
#[derive(Debug)]
pub(super) struct OnGpu {
    gpu: Gpu,
    /// The thread whose stream it is: candle's is another one for each thread.
    thread: ThreadId,
}

impl OnGpu {
    /// Checks that all of `vars` are on one GPU and can be stepped.
    pub(super) fn new(vars: &[Var], names: &[String]) -> Result<Self> {
        let gpu = gpu_of(vars)?;
        let device = vars[0].device();
        for (index, var) in vars.iter().enumerate() {
            DeviceSlice::try_from(var.as_tensor()).map_err(|e| e.context(label(names, index)))?;
            if !var.device().same_device(device) {
                let (at, other) = (var.device().location(), device.location());
                bail!("{} is on {at:?}; expected {other:?}, as the first", label(names, index));
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
        if thread::current().id() != self.thread {
            bail!("step on another thread than made the optimizer; candle's streams differ there");
        }
        let mut params = Vec::with_capacity(vars.len());
        let mut memory = Vec::new();
        for (var, grad) in vars.iter().zip(grads) {
            let weight = DeviceSlice::try_from(var.as_tensor())?;
            let grad = grad.as_ref().map(DeviceSlice::try_from).transpose()?;
            memory.push((range(weight), true));
            memory.extend(grad.map(|grad| (range(grad), false)));
            params.push(DeviceParam::new(weight, grad));
        }
        if shares_a_weight(&mut memory) {
            bail!("a variable is listed twice, or shares memory with another or with a gradient");
        }
        // SAFETY: `DeviceSlice::try_from` gives address, length and type of a tensor on candle's device, which is
        // that of `gpu`. candle orders its own writes, reads and frees in its stream of this thread, the one of
        // `gpu`, so all that this step launches goes before what candle does afterwards. `vars` and `grads` outlive
        // the step. No weight shares memory, as was seen above.
        #[expect(unsafe_code, reason = "an address is only a number")]
        let lent = unsafe { DeviceParams::new(&self.gpu, &params) };
        optimizer.step_on_device(lent, ctl).map_err(Error::wrap)
    }
}

impl<H: DeviceHyper + Debug> OverVars for DeviceFed<H> {
    type Hyper = H;

    /// Half weights have f32 masters.
    fn over(vars: &[Var], hyper: H) -> Result<Self> {
        let groups = [ParamGroup::new(hyper, 0..vars.len())];
        Self::new(gpu_of(vars)?, groups, HalfWeights::Master).map_err(Error::wrap)
    }
}

/// candle's stream, on this thread, of the first variable's GPU.
fn gpu_of(vars: &[Var]) -> Result<Gpu> {
    let Some(first) = vars.first() else { bail!("no variables of floats: on which GPU?") };
    Gpu::on(first.device().as_cuda_device()?.cuda_stream()).map_err(Error::wrap)
}

/// First and last address, and whether it is a weight's.
type Memory = ((u64, u64), bool);

fn range(slice: DeviceSlice) -> (u64, u64) {
    (slice.ptr, slice.ptr + (slice.len * slice.dtype.size()) as u64)
}

/// Whether a weight shares memory with anything.
fn shares_a_weight(memory: &mut [Memory]) -> bool {
    memory.sort_unstable();
    // The ends of all so far, and of the weights among them.
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
