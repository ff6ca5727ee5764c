//! One tensor's state on a device.

use cuda_rt::Device;

use super::table::Bytes;
use crate::cpu::pages::Pages;
use crate::rule::Hyper;
use crate::state::{Slot, TensorState, problem};
use crate::{Error, ParamState, Result, StateProblem};

/// The state of one tensor, on the device.
#[derive(Debug)]
pub(super) struct Held<M> {
    /// As it was when the tensor was last bound; the truth is on the device.
    pub(super) step: u64,
    /// Unknown as long as it was loaded and has no vectors.
    pub(super) count: Option<usize>,
    pub(super) memory: M,
    /// Bytes from one of its vectors to the next: the slots', then the master's.
    pub(super) stride: usize,
    pub(super) master: bool,
}

impl<M> Held<M> {
    /// Makes the state that a rule begins with, for a tensor of `count` elements. A master is all zeros.
    pub(super) fn fresh<D: Device<Memory = M>>(
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

    /// Puts a state on a device; `count` is the tensor's, where known. A `master` that the state lacks is all zeros.
    pub(super) fn send<D: Device<Memory = M>>(
        device: &D,
        state: &TensorState,
        count: Option<usize>,
        master: bool,
    ) -> Result<Self> {
        let stride = stride(count);
        let master = master || state.master.is_some();
        let mut memory = device.alloc(stride * (state.slots.len() + usize::from(master)))?;
        let slots = state.slots.iter().map(|slot| match slot {
            Slot::F32(values) => Ok(&values[..]),
            Slot::Codes(_) => Err(Error::Unsupported { what: "state in eight bits" }),
        });
        for (at, values) in slots.chain(state.master.iter().map(|m| Ok(&m[..]))).enumerate() {
            device.write(&mut memory, at * stride, &values?.bytes())?;
        }
        Ok(Self { step: state.step, count, memory, stride, master })
    }

    /// Refuses a saved state of another length.
    pub(super) fn fits(&self, index: usize, saved: &ParamState) -> Result<()> {
        for (name, values) in &saved.tensors {
            let got = values.len();
            if let Some(expected) = self.count
                && got != expected
            {
                let key = format!("state.{index}.{name}");
                return Err(problem(key, StateProblem::Length { expected, got }));
            }
        }
        Ok(())
    }

    /// Reads it back, for a tensor of `count` elements.
    pub(super) fn read<D: Device<Memory = M>>(
        &self,
        device: &D,
        hyper: &impl Hyper,
        count: usize,
    ) -> Result<TensorState> {
        let mut state = TensorState::new(hyper, count, 0, false, &mut Pages::new(0));
        state.step = self.step;
        let read = |at: usize| -> Result<Vec<f32>> {
            let mut bytes = vec![0; 4 * count];
            device.read(&self.memory, at * self.stride, &mut bytes)?;
            let (words, _) = bytes.as_chunks();
            Ok(words.iter().map(|word| f32::from_ne_bytes(*word)).collect())
        };
        for (at, slot) in state.slots.iter_mut().enumerate() {
            if let Slot::F32(values) = slot {
                values.copy_from_slice(&read(at)?);
            }
        }
        let slots = state.slots.len();
        state.master = self.master.then(|| read(slots).map(Into::into)).transpose()?;
        Ok(state)
    }
}

/// Bytes from one vector of a state to the next.
fn stride(count: Option<usize>) -> usize {
    (count.unwrap_or(0) * 4).next_multiple_of(256)
}
