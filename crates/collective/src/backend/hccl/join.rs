//! How the ranks of a communicator meet: the root's info through our store, and an init that can be
//! left to itself.
//!
//! HCCL's init blocks until all ranks have come, or until `HCCL_CONNECT_TIMEOUT` is over, and names
//! nobody. So it runs on a thread of its own, while this one looks at the host's side of the group and
//! at the clock. By the time a rank gets here all ranks have met on the host, so one that is missing has
//! stopped or died since.

use std::sync::{Arc, mpsc};
use std::time::{Duration, Instant};

use npu_sys::sys::HcclRootInfo;

use super::communicator::Communicator;
use super::npu::Device;
use super::result::{TIMEOUT, hccl_code};
use super::{Config, Libraries};
use crate::backend::device::{self, DeviceGroup, Manner, Meeting, device_of};
use crate::backend::meet::{Joining, garbled};
use crate::store::Store;
use crate::{Error, Result, Transport};

/// Between two looks at what may end the wait for the init.
const TICK: Duration = Duration::from_millis(1);

/// Joins a group; returns when all ranks have.
pub(crate) fn join(
    store: &Arc<dyn Store>,
    joining: &Joining<'_>,
    reason: String,
    libraries: Result<Libraries>,
    config: &Config,
) -> Result<DeviceGroup<Communicator>> {
    let libraries = libraries?;
    let asks = "HCCL is made for an NPU: GroupOptions::with_npu_device";
    let index = device_of(joining, ("hccl", Transport::Hccl), asks)?;
    let (timeout, checks) = (joining.options.timeout, config.checks);
    let manner = Manner { reason, timeout, checks, can_split: false };
    device::join(store, joining, manner, |meeting| connect(meeting, &libraries, index, config))
}

fn connect(
    meeting: &Meeting<'_>,
    libraries: &Libraries,
    index: u32,
    config: &Config,
) -> Result<(Arc<Device>, Communicator)> {
    let joining = meeting.joining;
    let device = Device::open(libraries, index)?;
    if joining.rank == 0 {
        meeting.set("-root", &device.root_info()?.internal)?;
    }
    let internal = meeting.value("-root", 0, "HCCL's root info")?;
    let root = HcclRootInfo { internal: internal.try_into().map_err(|_| garbled(0))? };
    meeting.enter()?;
    let (made, answer) = mpsc::channel();
    let (on, ranks) = (Arc::clone(&device), (joining.rank, joining.world()));
    let (name, config) = (joining.options.name.clone(), config.clone());
    let thread = std::thread::Builder::new().name("collective-init".into());
    let spawned = thread.spawn(move || {
        // Nobody may be waiting any more; then it is destroyed here.
        drop(made.send(Communicator::join(on, ranks, &root, &name, &config)));
    });
    spawned.map_err(|error| Error::io("starting the thread for HCCL's init", &error))?;
    loop {
        match answer.recv_timeout(TICK) {
            Ok(Ok(communicator)) => return Ok((device, communicator)),
            Ok(Err(error)) => {
                // A peer that has given up is why, if there is one.
                meeting.host.health()?;
                return Err(match hccl_code(&error) {
                    Some(TIMEOUT) => late(meeting, Some(error)),
                    _ => error,
                });
            }
            Err(mpsc::RecvTimeoutError::Disconnected) => {
                return Err(late(meeting, None));
            }
            Err(mpsc::RecvTimeoutError::Timeout) => meeting.host.health()?,
        }
        if Instant::now() >= joining.deadline {
            return Err(late(meeting, None));
        }
    }
}

/// Time is over, the group's or HCCL's.
fn late(meeting: &Meeting<'_>, error: Option<Error>) -> Error {
    let init = "HCCL's init (HCCL_CONNECT_TIMEOUT says how long HCCL waits)";
    meeting.late(init, || Error::Backend {
        backend: "hccl",
        during: format!("joining {}", meeting.joining.group()),
        name: "HCCL_E_TIMEOUT".into(),
        code: TIMEOUT,
        text: format!(
            "all ranks have begun, and HCCL's init is not over: they do not reach one another on \
             HCCL's network, or HCCL_CONNECT_TIMEOUT, 120 s unless set, is too short{}",
            error.map_or_else(String::new, |error| format!(" ({error})"))
        ),
    })
}
