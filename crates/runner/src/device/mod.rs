//! Where a run's optimizer computes: on the host, or on an Ascend NPU (feature `npu`).
//!
//! The engine, and so the model, computes where the engine does; candle's is the host. With
//! `device = "npu"` this is what is the NPU's:
//!
//! | what | where |
//! |---|---|
//! | forward, backward, autocast, validation, data | the host |
//! | the optimizer's state and its step, unscaling, clipping, the look for overflows | the NPU, by operators of CANN |
//! | averages of gradients over ranks | the NPUs, by HCCL, if the group is over it (`backend = "auto"` with HCCL on all ranks); else the host |
//! | weights | both: each step takes gradients there and weights back |
//! | buffers, metrics, checkpoints, everything else that ranks tell one another | the host |
//!
//! Which of the NPUs is a rank's own is [`Topology::device`]'s to say: the local rank, among those that
//! `ASCEND_RT_VISIBLE_DEVICES` leaves, under every launcher.
//!
//! A run that only validates or tests opens no device. Nothing falls back to the host silently: without CANN or an NPU, with an optimizer that computes on
//! the host, or with something that the device does not do, the run is refused by name.
//!
//! # Mixed precision
//!
//! Chips of the first generation (Ascend 910A and older) train in mixed precision only; MMEngine makes an
//! `AmpOptimWrapper` of any wrapper there, without a word. So does this crate, with a warning in the log,
//! and `device = { type = "npu", switch_to_amp = false }` declines. Their f16 saturates, so an overflow shows
//! in no value: [`AmpOptimWrapper`](crate::optim_wrapper::AmpOptimWrapper) looks at the gradients before
//! they go there, and at the device's overflow flag, and all ranks agree before any steps.
//!
//! Prototypes match CANN's headers and the protocol is tested on a simulator that checks rules: none of
//! this has been run on Ascend hardware.

#[cfg(feature = "npu")]
mod npu;

use std::fmt;

use ::amp::OverflowSource;
use collective::{Accelerator, GroupOptions, ProcessGroup, Topology, Transport};
use fused_optim::Optimizer;
use parking_lot::Mutex;

use crate::config::Section;
use crate::{Error, Result};

/// What a run asks for with `device`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub enum DeviceConfig {
    /// The host.
    #[default]
    Cpu,
    /// An Ascend NPU of this rank's own.
    Npu {
        /// Whether a chip that trains in mixed precision only makes an `AmpOptimWrapper` of an
        /// `OptimWrapper`, as it does unless set.
        switch_to_amp: bool,
    },
}

impl DeviceConfig {
    /// An Ascend NPU, as `device = "npu"` says.
    #[must_use]
    pub const fn npu() -> Self {
        Self::Npu { switch_to_amp: true }
    }

    /// Reads `device = "npu"`, or a table.
    pub(crate) fn read(root: &mut Section) -> Result<Self> {
        let key = "device";
        let names = [("cpu", Self::Cpu), ("npu", Self::npu())];
        let place = root.offset_of(key);
        let device = if root.is_table(key) {
            let mut table = root.section(key)?;
            let mut device = table.choice("type", "cpu", &names)?;
            if let Self::Npu { switch_to_amp } = &mut device {
                *switch_to_amp = table.or("switch_to_amp", true)?;
            }
            table.finish()?;
            device
        } else {
            root.choice(key, "cpu", &names)?
        };
        match device {
            Self::Npu { .. } if !cfg!(feature = "npu") => Err(place.error(NOT_BUILT)),
            device => Ok(device),
        }
    }

    /// Which device is this rank's own, if it is to have one; it has been found.
    ///
    /// # Errors
    ///
    /// [`Error::Config`]: without the feature `npu`; without CANN, with the library that was looked for,
    /// where, and what to install; without an NPU for this rank.
    pub(crate) fn find(self, topology: impl FnOnce() -> Result<Topology>) -> Result<Option<u32>> {
        let Self::Npu { .. } = self else { return Ok(None) };
        let index = topology()?.device(Accelerator::Npu)?;
        let index =
            u32::try_from(index).map_err(|_| refused(format!("there is no NPU {index}")))?;
        #[cfg(feature = "npu")]
        return npu::find(index).map(Some);
        #[cfg(not(feature = "npu"))]
        Err(refused(format!("NPU {index}: {NOT_BUILT}")))
    }

    /// Opens what [`find`](Self::find) has found, for a member of the group.
    pub(crate) fn open(self, index: Option<u32>, group: &ProcessGroup) -> Result<Device> {
        match (self, index) {
            #[cfg(feature = "npu")]
            (Self::Npu { switch_to_amp }, Some(index)) => {
                let npu = npu::Npu::open(index, switch_to_amp, group)?;
                Ok(Device { npu: Some(npu), warnings: Mutex::default() })
            }
            _ => {
                let _ = group;
                Ok(Device::cpu())
            }
        }
    }
}

/// A group's options, for the memory of the NPU that was found, unless it would have it to itself. A rank
/// that found none joins all the same, to tell the others.
pub(crate) fn group_options(
    options: GroupOptions,
    found: &Result<Option<u32>>,
    world_size: usize,
) -> Result<GroupOptions> {
    Ok(match (found, options.transport) {
        (Ok(None), Transport::Hccl) => {
            let text = "backend = \"hccl\" moves the memory of NPUs: it needs device = \"npu\"";
            return Err(Error::Config(text.to_owned()));
        }
        (Err(error), Transport::Hccl) => return Err(Error::Config(error.to_string())),
        (Ok(Some(_)), Transport::Auto) if world_size == 1 => options,
        (Ok(Some(index)), _) => options.with_npu_device(*index),
        _ => options,
    })
}

const NOT_BUILT: &str = "device `npu` is not built in: it needs the feature `npu`";

fn refused(why: impl fmt::Display) -> Error {
    Error::Config(format!("device = \"npu\": {why}"))
}

/// A source of overflows that values do not show.
pub type Overflows = Box<dyn OverflowSource<Error = Error> + Send>;

/// Where the optimizer of a run computes: what the makers of optimizers and their wrappers are given.
#[derive(Debug, Default)]
pub struct Device {
    #[cfg(feature = "npu")]
    npu: Option<npu::Npu>,
    warnings: Mutex<Vec<String>>,
}

impl Device {
    /// The host.
    #[must_use]
    pub fn cpu() -> Self {
        Self::default()
    }

    /// Its name: `cpu`, or for example `npu:0`.
    #[must_use]
    pub fn name(&self) -> String {
        #[cfg(feature = "npu")]
        if let Some(npu) = &self.npu {
            return npu.name();
        }
        "cpu".to_owned()
    }

    /// Where operators of an NPU go, if it is one.
    #[cfg(feature = "npu")]
    #[must_use]
    pub fn npu(&self) -> Option<&fused_optim::npu::Operators> {
        self.npu.as_ref().map(npu::Npu::operators)
    }

    /// Whether a wrapper of full precision is to become one of mixed precision; notes a warning that
    /// says so if it is.
    #[must_use]
    pub fn switches_to_amp(&self, wrapper: &str) -> bool {
        #[cfg(feature = "npu")]
        if let Some(why) = self.npu.as_ref().and_then(|npu| npu.needs_amp()) {
            self.warnings.lock().push(format!(
                "{why}: {wrapper} becomes AmpOptimWrapper (float16, dynamic loss scale), as with MMEngine; \
                 device = {{ type = \"npu\", switch_to_amp = false }} keeps {wrapper}"
            ));
            return true;
        }
        let _ = wrapper;
        false
    }

    /// What tells of overflows beside the gradients' values, on chips whose f16 saturates. Its verdicts
    /// are all ranks'.
    #[must_use]
    pub fn overflows(&self) -> Option<Overflows> {
        #[cfg(feature = "npu")]
        return self.npu.as_ref().and_then(npu::Npu::overflows);
        #[cfg(not(feature = "npu"))]
        None
    }

    /// What the log is to say of it at the beginning, if it is no host: what it is; and warnings.
    pub(crate) fn words(&self, group: &ProcessGroup) -> (Option<String>, Vec<String>) {
        let warnings = std::mem::take(&mut *self.warnings.lock());
        #[cfg(feature = "npu")]
        if let Some(npu) = &self.npu {
            let (line, more) = npu.words(group);
            return (Some(line), warnings.into_iter().chain(more).collect());
        }
        let _ = group;
        (None, warnings)
    }

    /// Refuses an optimizer that computes on the host although a device was asked for.
    pub(crate) fn check(&self, optimizer: &dyn Optimizer) -> Result<()> {
        let (name, on, kind) = (self.name(), optimizer.device(), optimizer.kind());
        if name == "cpu" || on == name {
            return Ok(());
        }
        Err(refused(format!(
            "the optimizer `{kind}` computes on {on}, not on {name}: the nine that a configuration can \
             name do, one of a program's own must be made for the device that its maker is given"
        )))
    }
}
