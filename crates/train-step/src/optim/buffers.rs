//! Restores a model's buffers after a skipped step.
//!
//! Forward updates running statistics before it is known whether the step will be skipped. PyTorch
//! keeps the statistics of a skipped step, including a NaN, which then stays forever; here they are
//! restored. In a batch that is only accumulated, whose gradients have not been checked yet,
//! buffers are restored if one becomes non-finite.

use std::borrow::Cow;

use fused_optim::{Slice, SliceMut};

use crate::model::{has_non_finite, round_into, to_f32};
use crate::{Averaged, DeviceAverages, HostTensor, Model, Result};

/// A model's buffers before a batch.
#[derive(Debug)]
pub(crate) enum BuffersBefore {
    /// Copies in the buffers' own types, allocated once.
    Host(Vec<HostTensor>),
    /// Copies on the device, and memory for copies of the current buffers.
    Device([Box<dyn DeviceAverages>; 2]),
}

impl BuffersBefore {
    /// Creates an empty copy.
    pub(crate) const fn new() -> Self {
        Self::Host(Vec::new())
    }

    /// Copies the buffers; if the optimizer steps on a device, there and in order of its stream.
    pub(crate) fn keep(&mut self, model: &mut dyn Model, steps_there: bool) -> Result<()> {
        if model.buffers().is_empty() {
            return Ok(());
        }
        if let Self::Device([before, _]) = self {
            return before.update(None);
        }
        if let Some(device) = model.on_device().filter(|_| steps_there) {
            let mut copies =
                [device.averages(Averaged::Buffers)?, device.averages(Averaged::Buffers)?];
            copies[0].update(None)?;
            *self = Self::Device(copies);
            return Ok(());
        }
        let Self::Host(copies) = self else { return Ok(()) };
        model.with_buffers(&mut |buffers| {
            copies.resize_with(buffers.len(), || HostTensor::F32(Vec::new()));
            copies.iter_mut().zip(&*buffers).for_each(|(copy, buffer)| fill(copy, buffer));
            Ok(())
        })
    }

    /// Returns whether a buffer is not finite.
    pub(crate) fn has_non_finite(&mut self, model: &mut dyn Model) -> Result<bool> {
        if let Self::Device([_, present]) = self {
            present.update(None)?;
            return Ok(present.to_host()?.iter().any(|copy| amp::has_non_finite(copy)));
        }
        let mut found = false;
        model.with_buffers(&mut |buffers| {
            found = buffers.iter().any(|buffer| has_non_finite(buffer.as_slice()));
            Ok(())
        })?;
        Ok(found)
    }

    /// Restores the buffers.
    pub(crate) fn restore(&self, model: &mut dyn Model) -> Result<()> {
        if model.buffers().is_empty() {
            return Ok(());
        }
        let copies = match self {
            Self::Host(copies) => Cow::Borrowed(copies),
            Self::Device([before, _]) => {
                Cow::Owned(before.to_host()?.into_iter().map(HostTensor::F32).collect())
            }
        };
        model.with_buffers(&mut |buffers| {
            buffers.iter_mut().zip(&*copies).for_each(|(buffer, copy)| write(buffer, copy));
            Ok(())
        })
    }
}

/// Copies a buffer into the memory of its last copy.
fn fill(copy: &mut HostTensor, buffer: &SliceMut<'_>) {
    match (copy, buffer.as_slice()) {
        (HostTensor::F32(copy), Slice::F32(buffer)) => refill(copy, buffer),
        (HostTensor::F16(copy), Slice::F16(buffer)) => refill(copy, buffer),
        (HostTensor::Bf16(copy), Slice::Bf16(buffer)) => refill(copy, buffer),
        (copy, Slice::F32(buffer)) => *copy = HostTensor::F32(buffer.to_vec()),
        (copy, Slice::F16(buffer)) => *copy = HostTensor::F16(buffer.to_vec()),
        (copy, Slice::Bf16(buffer)) => *copy = HostTensor::Bf16(buffer.to_vec()),
    }
}

fn refill<T: Copy>(copy: &mut Vec<T>, buffer: &[T]) {
    copy.clear();
    copy.extend_from_slice(buffer);
}

/// Writes a copy back into its buffer.
fn write(buffer: &mut SliceMut<'_>, copy: &HostTensor) {
    match (buffer, copy) {
        (SliceMut::F16(buffer), HostTensor::F16(copy)) => buffer.copy_from_slice(copy),
        (SliceMut::Bf16(buffer), HostTensor::Bf16(copy)) => buffer.copy_from_slice(copy),
        (buffer, copy) => round_into(buffer, &to_f32(copy.as_slice())),
    }
}

#[cfg(test)]
mod tests {
    use half::f16;

    use super::*;
    use crate::testing::{FakeModel, Values};

    #[test]
    fn copies_are_allocated_once_and_restore_each_type() {
        let nan = f16::from_bits(0x7e01);
        let buffers = [
            ("mean", Values::F32(vec![1.0, f32::MIN_POSITIVE / 4.0])),
            ("half", Values::F16(vec![nan, f16::ONE])),
        ];
        let mut model = FakeModel::new(&[], &buffers);
        let mut kept = BuffersBefore::new();
        let addresses = |kept: &BuffersBefore| match kept {
            BuffersBefore::Host(copies) => copies
                .iter()
                .map(|copy| match copy {
                    HostTensor::F32(copy) => copy.as_ptr() as usize,
                    HostTensor::F16(copy) => copy.as_ptr() as usize,
                    HostTensor::Bf16(copy) => copy.as_ptr() as usize,
                })
                .collect::<Vec<_>>(),
            BuffersBefore::Device(_) => panic!("on a device"),
        };
        kept.keep(&mut model, false).unwrap();
        let first = addresses(&kept);
        for value in [2.0, 3.0] {
            model.buffers[0] = Values::F32(vec![value; 2]);
            kept.keep(&mut model, false).unwrap();
            assert_eq!(addresses(&kept), first);
            model.buffers[0] = Values::F32(vec![f32::NAN; 2]);
            model.buffers[1] = Values::F16(vec![f16::ZERO; 2]);
            kept.restore(&mut model).unwrap();
            assert_eq!(model.buffers[0], Values::F32(vec![value; 2]));
            let Values::F16(half) = &model.buffers[1] else { panic!("not f16") };
            assert_eq!([half[0].to_bits(), half[1].to_bits()], [0x7e01, 0x3c00]);
        }
    }
}
