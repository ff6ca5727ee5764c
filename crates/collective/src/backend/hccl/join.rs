//! Rendezvous of a communicator's ranks: HCCL's root info over the host side, and an init with a
//! deadline.
//!
//! HCCL's init blocks until all ranks have joined or `HCCL_CONNECT_TIMEOUT` expires, and does not
//! name a missing rank. So it runs on a separate thread, while the caller's thread polls the host
//! side of the group and the deadline. It starts on a rank once all ranks are ready for it.

use std::sync::{Arc, mpsc};
use std::time::{Duration, Instant};

use npu_sys::sys::HcclRootInfo;

use super::communicator::Communicator;
use super::npu::Device;
use super::result::{TIMEOUT, hccl_code};
use super::{Config, Libraries};
use crate::backend::device::{self, DeviceGroup, GroupConfig, Rendezvous, device_of};
use crate::backend::rendezvous::Joining;
use crate::store::Store;
use crate::{Error, Result, Transport};

/// Time between two polls.
const TICK: Duration = Duration::from_millis(1);

/// Joins a group. Returns when all ranks have joined.
pub(crate) fn join(
    store: &Arc<dyn Store>,
    joining: &Joining<'_>,
    reason: String,
    libraries: Result<Libraries>,
    config: &Config,
) -> Result<DeviceGroup<Communicator>> {
    let libraries = libraries?;
    let requirement = "HCCL needs an NPU: call GroupOptions::with_npu_device";
    let index = device_of(joining, ("hccl", Transport::Hccl), requirement)?;
    let (timeout, checks) = (joining.options.timeout, config.checks);
    let group = GroupConfig { reason, timeout, checks, can_split: false };
    device::join(store, joining, group, |rendezvous| connect(rendezvous, &libraries, index, config))
}

fn connect(
    rendezvous: &Rendezvous<'_>,
    libraries: &Libraries,
    index: u32,
    config: &Config,
) -> Result<(Arc<Device>, Communicator)> {
    let joining = rendezvous.joining;
    let device = Device::open(libraries, index)?;
    // HCCL_CONNECT_TIMEOUT begins with the root info.
    rendezvous.barrier()?;
    let mut root = match joining.rank {
        0 => device.root_info()?,
        _ => HcclRootInfo { internal: [0; 4108] },
    };
    rendezvous.broadcast(&mut root.internal, 0)?;
    let (made, answer) = mpsc::channel();
    let (on, ranks) = (Arc::clone(&device), (joining.rank, joining.world()));
    let (name, device_abort) = (joining.options.name.clone(), config.device_abort);
    let thread = std::thread::Builder::new().name("collective-init".into());
    let spawned = thread.spawn(move || {
        // If the receiver is gone, the communicator is destroyed here.
        drop(made.send(Communicator::join(on, ranks, &root, &name, device_abort)));
    });
    spawned.map_err(|error| Error::io("starting the thread for HCCL's init", &error))?;
    loop {
        match answer.recv_timeout(TICK) {
            Ok(Ok(communicator)) => return Ok((device, communicator)),
            Ok(Err(error)) => {
                // If a peer has failed, its failure is the cause.
                rendezvous.host.health()?;
                return Err(match hccl_code(&error) {
                    Some(TIMEOUT) => timeout_error(rendezvous, &format!(" ({error})")),
                    _ => error,
                });
            }
            Err(mpsc::RecvTimeoutError::Disconnected) => return Err(timeout_error(rendezvous, "")),
            Err(mpsc::RecvTimeoutError::Timeout) => rendezvous.host.health()?,
        }
        if Instant::now() >= joining.deadline {
            return Err(timeout_error(rendezvous, ""));
        }
    }
}

/// Returns the error for an init that has exceeded the deadline or HCCL's own timeout.
fn timeout_error(rendezvous: &Rendezvous<'_>, detail: &str) -> Error {
    let text = format!(
        "all ranks have started HCCL's init, but it has not completed; check HCCL's network \
         between the ranks, or increase HCCL_CONNECT_TIMEOUT (120 s by default){detail}"
    );
    rendezvous.timeout_error(("HCCL_E_TIMEOUT", TIMEOUT), text)
}
