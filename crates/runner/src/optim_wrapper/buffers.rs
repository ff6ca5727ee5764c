//! Restores a model's buffers after a skipped step.
//!
//! Forward updates running statistics before it is known whether the step will be skipped. PyTorch
//! keeps the statistics of a skipped step, including a NaN, which then stays forever; here they are
//! restored. In a batch that is only accumulated, whose gradients have not been checked yet,
//! buffers are restored if one becomes non-finite.

use crate::Result;
use crate::engine::{Averaged, DeviceAverages, Engine, round_into, to_f32};

use super::has_non_finite;

/// A model's buffers before a batch.
#[derive(Debug)]
pub(super) enum BuffersBefore {
    Host(Vec<Vec<f32>>),
    /// Copies on the device, and memory for copies of the current buffers.
    Device([Box<dyn DeviceAverages>; 2]),
}

impl BuffersBefore {
    /// Creates an empty copy.
    pub(super) const fn new() -> Self {
        Self::Host(Vec::new())
    }

    /// Copies the buffers; if the optimizer steps on a device, there and in order of its stream.
    pub(super) fn keep(&mut self, engine: &mut dyn Engine, steps_there: bool) -> Result<()> {
        if engine.buffers().is_empty() {
            return Ok(());
        }
        if let Self::Device([before, _]) = self {
            return before.update(None);
        }
        if let Some(device) = engine.device().filter(|_| steps_there) {
            let mut copies =
                [device.averages(Averaged::Buffers)?, device.averages(Averaged::Buffers)?];
            copies[0].update(None)?;
            *self = Self::Device(copies);
            return Ok(());
        }
        engine.with_buffers(&mut |buffers| {
            let copies = buffers.iter().map(|buffer| to_f32(buffer.as_slice()).into_owned());
            *self = Self::Host(copies.collect());
            Ok(())
        })
    }

    /// Returns whether a buffer is not finite.
    pub(super) fn has_non_finite(&mut self, engine: &mut dyn Engine) -> Result<bool> {
        if let Self::Device([_, present]) = self {
            present.update(None)?;
            return Ok(present.to_host()?.iter().any(|copy| ::amp::has_non_finite(copy)));
        }
        let mut found = false;
        engine.with_buffers(&mut |buffers| {
            found = buffers.iter().any(|buffer| has_non_finite(buffer.as_slice()));
            Ok(())
        })?;
        Ok(found)
    }

    /// Restores the buffers.
    pub(super) fn restore(&self, engine: &mut dyn Engine) -> Result<()> {
        if engine.buffers().is_empty() {
            return Ok(());
        }
        let copies = match self {
            Self::Host(copies) => copies,
            Self::Device([before, _]) => &before.to_host()?,
        };
        engine.with_buffers(&mut |buffers| {
            buffers.iter_mut().zip(copies).for_each(|(buffer, copy)| round_into(buffer, copy));
            Ok(())
        })
    }
}
