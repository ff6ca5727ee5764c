//! Opens a GPU with one stream.
//!
//! cudarc would record an event at each use of a tensor and wait for it at the next, to order the
//! streams of a device. With one stream these events do nothing, and a capture of the stream as a
//! CUDA graph cannot have them.

#![cfg_attr(
    feature = "cuda",
    expect(unsafe_code, reason = "disables the event tracking of cudarc")
)]

use candle_core::{Device, Result};

/// Opens a GPU with one stream for all threads and without cudarc's events, as `runner` does: for
/// steps as CUDA graphs ([`Trainer::step_on`](crate::Trainer::step_on)). `Device::new_cuda` instead
/// makes one stream for each thread, and tracks tensors by events.
///
/// All work on this device's tensors, also that of other threads, runs in the one stream, in the
/// order in which it is submitted. A program that makes another stream of this device, by cudarc or
/// by a library, has to order it before and after candle's by events of its own, and keep the
/// tensors that it uses until then.
///
/// # Errors
///
/// No such GPU; a build without the feature `cuda`.
pub fn cuda_device(index: usize) -> Result<Device> {
    let device = Device::new_cuda_with_stream(index)?;
    // SAFETY: events order streams. This context has one stream, in which candle allocates, uses
    // and frees all tensors, and optimizers work; averages and copies of batches are ordered after
    // and before it by events of their own. Other streams are the caller's to order, as documented.
    #[cfg(feature = "cuda")]
    unsafe {
        device.as_cuda_device()?.disable_event_tracking();
    }
    Ok(device)
}
