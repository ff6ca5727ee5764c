//! Undoes what a batch has done to a model's buffers.
//!
//! Forward moves running statistics before anybody knows whether the step will be skipped. PyTorch keeps what a
//! skipped step has made of them, also a NaN, which stays for ever; here they are as before the batch. Of batches that
//! only add up, whose gradients nobody has checked yet, one that leaves a buffer that is not finite is undone.

use crate::Result;
use crate::engine::{Averaged, DeviceAverages, Engine, round_into, to_f32};

use super::has_non_finite;

/// A model's buffers as they were before a batch.
#[derive(Debug)]
pub(super) enum BuffersBefore {
    Host(Vec<Vec<f32>>),
    /// Copies on the device, and there a place for copies of the present ones.
    Device([Box<dyn DeviceAverages>; 2]),
}

impl BuffersBefore {
    /// None yet.
    pub(super) const fn new() -> Self {
        Self::Host(Vec::new())
    }

    /// Copies the buffers; on their device, in order of its stream, if the optimizer steps there.
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

    /// Whether a buffer is not finite.
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
