//! A rank's device, and the process group of ranks on such devices.
//!
//! A GPU is opened with one stream. To order the streams of a device, cudarc would record an event
//! at each use of a tensor and wait for it at the next. With one stream these events do nothing,
//! and a capture of the stream as a CUDA graph cannot have them.

#![cfg_attr(
    feature = "cuda",
    expect(unsafe_code, reason = "disables the event tracking of cudarc")
)]

use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use candle_core::Device;
use collective::init::Accelerator;
use collective::{GroupOptions, ProcessGroup, Topology, Transport, init_process_group};

use crate::{Error, Result, process};

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
pub fn cuda_device(index: usize) -> candle_core::Result<Device> {
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

/// The device of this rank: with the feature `cuda` the GPU with the index of the local rank, as
/// [`cuda_device`] opens it; otherwise the CPU. Call it before the first tensor is created: if
/// several ranks share a machine, it limits candle's own operators to one thread
/// (`RAYON_NUM_THREADS`, unless it is set).
///
/// # Errors
///
/// An environment that no launcher sets, with the variable; a GPU that does not exist.
pub fn device() -> Result<Device> {
    process::limit_threads();
    let topology = topology()?;
    if !cfg!(feature = "cuda") {
        return Ok(Device::Cpu);
    }
    match cuda_device(topology.device(Accelerator::Cuda)?) {
        // The other ranks wait in `build`, and learn there why this one does not come. If the
        // program joins in another way, nobody is there, and this one gives up.
        Err(error) if topology.world_size > 1 => {
            match join_gpus(&topology, group_options().with_timeout(TELLING)) {
                Err(Error::Step(train_step::Error::Collective(told)))
                    if !told.is_caused_by_peer() =>
                {
                    Err(told.into())
                }
                _ => Err(error.into()),
            }
        }
        opened => Ok(opened?),
    }
}

/// Time that a rank without its GPU has to tell the others.
const TELLING: Duration = Duration::from_secs(60);

pub(crate) fn topology() -> Result<Topology> {
    Ok(Topology::from_env(|name| std::env::var(name).ok())?)
}

/// Initializes the process group described by the launcher's environment.
pub(crate) fn join(device: &Device) -> Result<ProcessGroup> {
    let topology = topology()?;
    if cfg!(feature = "cuda") && device.is_cuda() && topology.world_size > 1 {
        return join_gpus(&topology, group_options());
    }
    Ok(init_process_group(&topology, group_options())?)
}

/// As [`join`], of ranks on GPUs.
fn join_gpus(topology: &Topology, options: GroupOptions) -> Result<ProcessGroup> {
    let index = topology.device(Accelerator::Cuda)?;
    let index =
        u32::try_from(index).map_err(|_| Error::InvalidArgument(format!("CUDA device {index}")))?;
    let options = options.with_transport(Transport::Nccl).with_cuda_device(index);
    Ok(init_process_group(topology, options)?)
}

fn group_options() -> GroupOptions {
    // Each trainer of a program has its own process group.
    static COUNT: AtomicUsize = AtomicUsize::new(0);
    // Relaxed: only a counter.
    let name = format!("candle-train-{}", COUNT.fetch_add(1, Ordering::Relaxed));
    GroupOptions::default().with_name(name)
}
