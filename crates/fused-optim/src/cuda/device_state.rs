//! One tensor's state on a device.

use cuda_rt::Device;

use super::device::read_floats;
use crate::Result;
use crate::rule::Hyper;
use crate::state::TensorState;

/// The state of one tensor in device memory.
#[derive(Debug)]
pub(super) struct DeviceState<M> {
    /// The step count when the tensor was last bound; the device has the current one.
    pub(super) step: u64,
    /// Element count; `None` for loaded state without vectors.
    pub(super) count: Option<usize>,
    pub(super) memory: M,
    /// Bytes from one vector to the next: the slots, then the master.
    pub(super) stride: usize,
    pub(super) master: bool,
}

impl<M> DeviceState<M> {
    /// The initial state of a tensor of `count` elements. A master is all zeros.
    pub(super) fn new<D: Device<Memory = M>>(
        device: &D,
        hyper: &impl Hyper,
        count: usize,
        master: bool,
    ) -> Result<Self> {
        let (slots, stride) = (hyper.slots(), stride(Some(count)));
        let mut memory = device.alloc(stride * (slots.len() + usize::from(master)))?;
        let values = slots.iter().map(|slot| hyper.initial(slot).to_bits()).enumerate();
        for (at, value) in values.filter(|(_, value)| *value != 0) {
            device.fill(&mut memory, at * stride / 4..at * stride / 4 + count, value)?;
        }
        Ok(Self { step: 0, count: Some(count), memory, stride, master })
    }

    /// Uploads a state; `count` is the tensor's element count if known. A `master` that the state
    /// lacks is all zeros.
    pub(super) fn upload<D: Device<Memory = M>>(
        device: &D,
        state: &TensorState,
        count: Option<usize>,
        master: bool,
    ) -> Result<Self> {
        let stride = stride(count);
        let master = master || state.master.is_some();
        let mut memory = device.alloc(stride * (state.slots.len() + usize::from(master)))?;
        for (at, values) in state.vectors().enumerate() {
            device.write(&mut memory, at * stride, bytemuck::cast_slice(values))?;
        }
        Ok(Self { step: state.step, count, memory, stride, master })
    }

    /// Reads the state of a tensor of `count` elements.
    pub(super) fn read<D: Device<Memory = M>>(
        &self,
        device: &D,
        hyper: &impl Hyper,
        count: usize,
    ) -> Result<TensorState> {
        TensorState::read(self.step, hyper.slots().len(), self.master, |at| {
            read_floats(device, &self.memory, at * self.stride, count)
        })
    }
}

/// Size in bytes of a vector, rounded up for alignment.
fn stride(count: Option<usize>) -> usize {
    (count.unwrap_or(0) * 4).next_multiple_of(256)
}
