//! Placement of gradients, state and steps of a run: on the host; with the model on a CUDA GPU
//! (feature `cuda`); or, for the optimizer only, on an Ascend NPU (feature `npu`).
//!
//! [`DeviceConfig`] is the key `device` of a configuration; each rank turns it into a [`Placement`]
//! once. Besides the candle engine this is the only module with `#[cfg]` for devices.
//!
//! With `device = "cuda"`:
//!
//! * Forward, backward, autocast and validation run on the GPU, by candle's operators; under
//!   `compile` by the engine's own kernels and, if requested, as CUDA graphs.
//! * Parameters and buffers are in GPU memory, and are copied for checkpoints and for averaging
//!   buffers over ranks. Gradients are, too, also during accumulation, unless the host averages
//!   them. So are averages of the model ([`EMAHook`](crate::hooks::EmaHook)), which are copied for
//!   checkpoints and validations.
//! * The optimizer's state, its step, unscaling, clipping and the check for overflows are on the
//!   GPU, by kernels of `fused-optim`, bit for bit as on the host. A step updates weights in place.
//! * Gradients are averaged over ranks on the GPUs by NCCL, during backward, if the group uses it
//!   (`backend = "auto"` with NCCL on all ranks); otherwise on the host, with
//!   copies in both directions.
//!
//! With `device = "npu"`:
//!
//! * Model, gradients and averages of the model are on the host.
//! * The optimizer's state, its step, unscaling, clipping and the check for overflows are on the
//!   NPU, by CANN's operators. Each step copies gradients to the NPU and weights back.
//! * Gradients are averaged over ranks on the NPUs by HCCL, if the group uses it
//!   (`backend = "auto"` with HCCL on all ranks); otherwise on the host.
//!
//! On the host in both cases: data, labels, random numbers, metrics, checkpoints, the policy of the
//! loss scale, and all other communication between ranks.
//!
//! If the host does not average gradients, a step copies only the following between a GPU and the
//! host: the batch, the loss for the log, and the addresses of gradients; under `AmpOptimWrapper`,
//! whether gradients are finite, for which the host waits to update the loss scale; with clipping
//! by norm, the norm for the log; and hyper-parameters when they change. With NCCL gradients keep
//! their addresses, which are sent once. The statistics that a step of `AmpOptimWrapper`, or one
//! with clipping by norm, needs before it begins are computed for each bucket after its all-reduce,
//! so that the step reads gradients once; with one optimizer per part (`OptimWrapperDict`) it reads
//! them twice. Checkpoints do not depend on the optimizer's device: a run may resume on another
//! one.
//!
//! `device = { type = "cuda", offload_optimizer = true }` keeps the optimizer and its state on the
//! host, for a model whose state does not fit into GPU memory, or for an optimizer without GPU
//! support: each step copies gradients to the host and weights back.
//!
//! [`Topology::device`] selects the device of a rank under every launcher: by local rank, among
//! those visible by `CUDA_VISIBLE_DEVICES` or `ASCEND_RT_VISIBLE_DEVICES`.
//!
//! A run that only validates or tests opens no NPU, and has no optimizer on a GPU. There is no
//! silent fallback to the host: a missing device or library, a model or optimizer on the host that
//! should be on the device, and unsupported options are errors that name the cause.
//!
//! With the feature `cuda` a runner is built with `nvcc` and linked to the libraries of
//! driver and toolkit (libcuda, cuBLAS, cuRAND), without which it does not start. It has been run
//! on one H100, and in tests on a fake GPU whose kernels are candle's compiled for the CPU; not on
//! several GPUs.
//!
//! # Mixed precision on an NPU
//!
//! Chips of the first generation (Ascend 910A and older) train in mixed precision only; MMEngine
//! silently replaces any wrapper by an `AmpOptimWrapper` there. So does this crate, with a warning
//! in the log; `device = { type = "npu", switch_to_amp = false }` prevents it. In f16 these chips
//! saturate instead of overflowing to inf: `AmpOptimWrapper` checks both the gradients before they
//! are copied to the NPU and the device's overflow flag, and all ranks agree on the result before
//! any steps.
//!
//! Prototypes match CANN's headers, and the protocol is tested on a simulator that checks CANN's
//! rules: the NPU support has not been run on Ascend hardware.

#[cfg(feature = "npu")]
mod npu;

use std::fmt;
use std::time::Duration;

#[cfg(feature = "cuda")]
use candle_core::cuda_backend::cudarc::driver::CudaContext;
use collective::{GroupOptions, ProcessGroup, Topology, Transport, init::Accelerator};
use fused_optim::{Clip, Optimizer};
use parking_lot::Mutex;

use crate::config::Section;
use crate::{Error, Result};

/// Device of a model.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub enum ComputeDevice {
    /// The host.
    #[default]
    Cpu,
    /// A CUDA GPU, by its index among those visible to this process.
    Cuda(usize),
}

impl fmt::Display for ComputeDevice {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Cpu => f.write_str("cpu"),
            Self::Cuda(index) => write!(f, "cuda:{index}"),
        }
    }
}

/// Device of an optimizer's state and steps, with a handle to it.
#[derive(Clone, Debug, Default)]
#[non_exhaustive]
pub enum OptimizerDevice {
    /// The host.
    #[default]
    Host,
    /// A GPU, by the stream in which the model computes.
    #[cfg(feature = "cuda")]
    Cuda(fused_optim::cuda::Gpu),
    /// An NPU, by its operators.
    #[cfg(feature = "npu")]
    Npu(fused_optim::npu::Operators),
}

/// The key `device` of a configuration.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub enum DeviceConfig {
    /// The host.
    #[default]
    Cpu,
    /// The CUDA GPU of this rank, for the model and its optimizer.
    Cuda {
        /// Whether the optimizer and its state are on the host.
        offload_optimizer: bool,
    },
    /// The Ascend NPU of this rank, for the optimizer.
    Npu {
        /// Whether `OptimWrapper` becomes `AmpOptimWrapper` on chips that train in mixed precision
        /// only. Defaults to true.
        switch_to_amp: bool,
    },
}

impl DeviceConfig {
    /// Same as `device = "cuda"`.
    #[must_use]
    pub const fn cuda() -> Self {
        Self::Cuda { offload_optimizer: false }
    }

    /// Same as `device = "npu"`.
    #[must_use]
    pub const fn npu() -> Self {
        Self::Npu { switch_to_amp: true }
    }

    /// Reads `device = "cuda"`, or a table.
    pub(crate) fn read(root: &mut Section) -> Result<Self> {
        let key = "device";
        let names = [("cpu", Self::Cpu), ("cuda", Self::cuda()), ("npu", Self::npu())];
        let place = root.offset_of(key);
        let device = if root.is_table(key) {
            let mut table = root.section(key)?;
            let mut device = table.choice("type", "cpu", &names)?;
            match &mut device {
                Self::Cpu => {}
                Self::Cuda { offload_optimizer } => {
                    *offload_optimizer = table.or("offload_optimizer", false)?;
                }
                Self::Npu { switch_to_amp } => *switch_to_amp = table.or("switch_to_amp", true)?,
            }
            table.finish()?;
            device
        } else {
            root.choice(key, "cpu", &names)?
        };
        match device {
            Self::Cuda { .. } if !cfg!(feature = "cuda") => Err(place.error(NO_CUDA)),
            Self::Npu { .. } if !cfg!(feature = "npu") => Err(place.error(NO_NPU)),
            device => Ok(device),
        }
    }

    /// Returns the devices that a run needs: without training, no device for an optimizer.
    pub(crate) fn needed(self, trains: bool) -> Self {
        match self {
            Self::Npu { .. } if !trains => Self::Cpu,
            Self::Cuda { .. } if !trains => Self::Cuda { offload_optimizer: true },
            device => device,
        }
    }

    /// Returns the index of this rank's device among those visible to the process, after checking
    /// that it exists; `None` for the host. If the launcher sets no local rank, the ranks exchange
    /// their host names, for at most `timeout`.
    ///
    /// # Errors
    ///
    /// Those of [`Topology::locate`]. [`Error::Config`] if the device's feature is missing, if CANN
    /// is missing (with the library, the searched paths and what to install), or if there is no
    /// device for this rank.
    pub(crate) fn find(
        self,
        topology: impl FnOnce() -> Result<Topology>,
        timeout: Duration,
    ) -> Result<Option<u32>> {
        let (device, kind, name) = match self {
            Self::Cpu => return Ok(None),
            Self::Cuda { .. } => ("cuda", Accelerator::Cuda, "GPU"),
            Self::Npu { .. } => ("npu", Accelerator::Npu, "NPU"),
        };
        let mut topology = topology()?;
        topology.locate(timeout)?;
        let index = topology.device(kind)?;
        let (count, there) = self.count(index).map_err(|why| refused(device, why))?;
        if let Some(found) = u32::try_from(index).ok().filter(|_| index < count) {
            return Ok(Some(found));
        }
        let variable = kind.variable();
        let why = match std::env::var(variable) {
            Ok(list) => format!("{variable}={list:?} makes no others visible"),
            Err(_) => format!("the launcher started more ranks than there are {name}s"),
        };
        let text = format!("this rank needs {name} {index}, but there are {there}: {why}");
        Err(refused(device, text))
    }

    /// Returns the number of visible devices, and its description. An error is the reason for which
    /// the device `index` cannot be found.
    fn count(self, index: usize) -> Result<(usize, String), String> {
        match self {
            Self::Cpu => Ok((0, String::new())),
            #[cfg(feature = "cuda")]
            Self::Cuda { .. } => {
                let _ = index;
                let count = CudaContext::device_count().map_err(|e| e.to_string())?;
                Ok((usize::try_from(count).unwrap_or(0), count.to_string()))
            }
            #[cfg(not(feature = "cuda"))]
            Self::Cuda { .. } => Err(format!("GPU {index}: {NO_CUDA}")),
            #[cfg(feature = "npu")]
            Self::Npu { .. } => {
                let found = fused_optim::npu::probe().map_err(|e| e.to_string())?;
                Ok((found.count, format!("{} ({found})", found.count)))
            }
            #[cfg(not(feature = "npu"))]
            Self::Npu { .. } => Err(format!("NPU {index}: {NO_NPU}")),
        }
    }

    /// Opens the device found by [`find`](Self::find), for a member of the group.
    pub(crate) fn open(self, own: Option<u32>, group: &ProcessGroup) -> Result<Placement> {
        match (self, own) {
            #[cfg(feature = "npu")]
            (Self::Npu { switch_to_amp }, Some(index)) => {
                let npu = npu::Npu::open(index, switch_to_amp, group)?;
                Ok(Placement::on_npu(npu))
            }
            (Self::Cuda { offload_optimizer }, Some(index)) => {
                let model = ComputeDevice::Cuda(index as usize);
                Ok(Placement { model, offload: offload_optimizer, ..Placement::host() })
            }
            _ => {
                let _ = group;
                Ok(Placement::host())
            }
        }
    }
}

/// Adds the device to a group's options, so that the group averages in its memory, if it has more
/// than one rank. A rank without device joins the group, too, to report the error to the others.
pub(crate) fn group_options(
    options: GroupOptions,
    (wanted, found): (DeviceConfig, &Result<Option<u32>>),
    world_size: usize,
) -> Result<GroupOptions> {
    use DeviceConfig::{Cuda, Npu};
    Ok(match (wanted, found, options.transport) {
        (Npu { .. }, Ok(Some(_)), Transport::Auto) if world_size == 1 => options,
        (Npu { .. }, Ok(Some(index)), _) => options.with_npu_device(*index),
        (Cuda { offload_optimizer }, Ok(Some(_)), Transport::Auto)
            if world_size == 1 || offload_optimizer =>
        {
            options
        }
        (Cuda { .. }, Ok(Some(index)), Transport::Auto | Transport::Nccl) => {
            options.with_cuda_device(*index)
        }
        (_, Ok(_), Transport::Hccl) => {
            let text = "backend = \"hccl\" needs device = \"npu\"";
            return Err(Error::config(text));
        }
        (_, Err(error), Transport::Hccl) => return Err(Error::config(error.to_string())),
        _ => options,
    })
}

/// Setting that keeps the optimizer of a model on a GPU on the host.
const OFFLOAD: &str = "device = { type = \"cuda\", offload_optimizer = true }";
const NO_CUDA: &str = "device `cuda` needs `runner` built with the feature `cuda`";
const NO_NPU: &str = "device `npu` needs `runner` built with the feature `npu`";

fn refused(device: &str, why: impl fmt::Display) -> Error {
    Error::config(format!("device = \"{device}\": {why}"))
}

/// Creates an optimizer on the device of a placement: `optimizer!(placement, SgdHyper, groups)`.
macro_rules! optimizer {
    ($placement:expr, $hyper:ident, $groups:expr) => {
        match $placement.optimizer() {
            $crate::placement::OptimizerDevice::Host => {
                Box::new(fused_optim::CpuOptimizer::<$hyper>::new($groups)?)
            }
            #[cfg(feature = "cuda")]
            $crate::placement::OptimizerDevice::Cuda(gpu) => {
                let how = fused_optim::HalfWeights::Master;
                let gpu = gpu.clone();
                Box::new(fused_optim::cuda::CudaDeviceOptimizer::<$hyper>::new(gpu, $groups, how)?)
            }
            #[cfg(feature = "npu")]
            $crate::placement::OptimizerDevice::Npu(on) => {
                let how = fused_optim::HalfWeights::Master;
                let on = on.clone();
                Box::new(fused_optim::npu::HostOptimizer::<$hyper>::new(on, $groups, how)?)
            }
        }
    };
}
pub(crate) use optimizer;

pub use train_step::Overflows;

/// Devices of a rank's model, gradients and optimizer, passed to factories of optimizers and
/// wrappers.
#[derive(Debug, Default)]
pub struct Placement {
    model: ComputeDevice,
    /// Whether the optimizer of a model on a GPU is on the host.
    offload: bool,
    optimizer: OptimizerDevice,
    #[cfg(feature = "npu")]
    npu: Option<npu::Npu>,
    warnings: Mutex<Vec<String>>,
}

impl Placement {
    /// Places everything on the host.
    #[must_use]
    pub fn host() -> Self {
        Self::default()
    }

    #[cfg(feature = "npu")]
    fn on_npu(npu: npu::Npu) -> Self {
        let optimizer = OptimizerDevice::Npu(npu.operators().clone());
        Self { optimizer, npu: Some(npu), ..Self::host() }
    }

    /// Name of the optimizer's device: `cpu`, or for example `cuda:0`.
    #[must_use]
    pub fn name(&self) -> String {
        if self.steps_on_gpu() {
            return self.model.to_string();
        }
        #[cfg(feature = "npu")]
        if let Some(npu) = &self.npu {
            return npu.name();
        }
        "cpu".to_owned()
    }

    /// Returns the device of the model.
    #[must_use]
    pub const fn model(&self) -> ComputeDevice {
        self.model
    }

    /// Returns the device of the optimizer's state and steps.
    #[must_use]
    pub const fn optimizer(&self) -> &OptimizerDevice {
        &self.optimizer
    }

    /// Returns whether both the model and its optimizer are on a GPU.
    pub(crate) fn steps_on_gpu(&self) -> bool {
        !self.offload && self.model != ComputeDevice::Cpu
    }

    /// Sets the stream for an optimizer on the model's GPU, taken from the engine; `on` is the
    /// engine's device, `None` for the host. Returns an error if that is not the model's configured
    /// device.
    pub(crate) fn for_engine(self, on: Option<(ComputeDevice, OptimizerDevice)>) -> Result<Self> {
        let (on, stream) = on.unwrap_or_default();
        if self.model != ComputeDevice::Cpu && on != self.model {
            return Err(Error::config(format!(
                "device = \"cuda\": the model computes on {on}, not on {}: create it on the device of its \
                 `ModelContext`, as `CandleEngine::factory` and the zoo's models do",
                self.model
            )));
        }
        Ok(if self.steps_on_gpu() { Self { optimizer: stream, ..self } } else { self })
    }

    /// Returns an error for gradient clipping that an optimizer on this device does not support.
    pub(crate) fn check_clip(&self, clip: Option<Clip>) -> Result<()> {
        let on_gpu = self.steps_on_gpu();
        let what = match clip {
            Some(Clip::Norm(norm)) if on_gpu && norm.norm_type != 2.0 => "norm_type",
            Some(Clip::Norm(norm)) if on_gpu && norm.error_if_nonfinite => "error_if_nonfinite",
            _ => return Ok(()),
        };
        Err(Error::config(format!(
            "device = \"cuda\": `clip_grad.{what}` is not supported by optimizers on a GPU; use the 2-norm without \
             `error_if_nonfinite`, or {OFFLOAD}"
        )))
    }

    /// Returns whether a full-precision wrapper becomes one of mixed precision; if so, records a
    /// warning.
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

    /// Returns a detector of overflows that do not show in the gradients' values, on chips whose
    /// f16 saturates. All ranks get the same result.
    #[must_use]
    pub fn overflows(&self) -> Option<Overflows> {
        #[cfg(feature = "npu")]
        return self.npu.as_ref().and_then(npu::Npu::overflows);
        #[cfg(not(feature = "npu"))]
        None
    }

    /// Returns the warnings so far.
    pub(crate) fn take_warnings(&self) -> Vec<String> {
        std::mem::take(&mut *self.warnings.lock())
    }

    /// Returns a line for the beginning of the log, unless everything is on the host; and warnings.
    pub(crate) fn describe(&self, group: &ProcessGroup) -> (Option<String>, Vec<String>) {
        let warnings = self.take_warnings();
        #[cfg(feature = "npu")]
        if let Some(npu) = &self.npu {
            let (line, more) = npu.describe(group);
            return (Some(line), warnings.into_iter().chain(more).collect());
        }
        let _ = group;
        let line = match self.model {
            ComputeDevice::Cpu => None,
            model if self.offload => {
                Some(format!("device {model}: the model; an optimizer is on the host"))
            }
            model if group.backend_name() == "nccl" => Some(format!(
                "device {model}: the model, its gradients and its optimizer; gradients are averaged by NCCL ({})",
                group.backend_reason()
            )),
            model if group.world_size() > 1 => Some(format!(
                "device {model}: the model and its optimizer; gradients are averaged on the host by backend \
                 `{}`, not by NCCL: {}",
                group.backend_name(),
                group.backend_reason()
            )),
            model => Some(format!("device {model}: the model, its gradients and its optimizer")),
        };
        (line, warnings)
    }

    /// Returns an error for an optimizer that is not on the configured device.
    pub(crate) fn check(&self, optimizer: &dyn Optimizer) -> Result<()> {
        let (name, on, kind) = (self.name(), optimizer.device(), optimizer.kind());
        if on == name {
            return Ok(());
        }
        let (asked, other) = match self.model {
            ComputeDevice::Cpu if name == "cpu" => return Ok(()),
            ComputeDevice::Cpu => ("npu", String::new()),
            ComputeDevice::Cuda(_) => ("cuda", format!(", or set {OFFLOAD}")),
        };
        Err(Error::config(format!(
            "device = \"{asked}\": the optimizer `{kind}` computes on {on}, not on {name}: use one of the nine \
             named `NpuFused...`, create your own on the device of the `Placement` passed to its \
             factory{other}"
        )))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn group_options_contain_the_device_that_averages() {
        use Transport::{Auto, Hccl, Host, Nccl, Tcp};
        let cuda = DeviceConfig::cuda();
        let offloaded = DeviceConfig::Cuda { offload_optimizer: true };
        let npu = DeviceConfig::Npu { switch_to_amp: true };
        let (host, gpu, ascend) = ((None, None), (Some(3), None), (None, Some(3)));
        for (device, transport, world_size, expected) in [
            (cuda, Auto, 2, gpu),
            (cuda, Nccl, 2, gpu),
            (cuda, Nccl, 1, gpu),
            (cuda, Auto, 1, host),
            (cuda, Host, 2, host),
            (cuda, Tcp, 2, host),
            (offloaded, Auto, 2, host),
            (offloaded, Nccl, 2, gpu),
            (npu, Auto, 2, ascend),
            (npu, Hccl, 1, ascend),
            (npu, Auto, 1, host),
        ] {
            let options = GroupOptions::default().with_transport(transport);
            let options = group_options(options, (device, &Ok(Some(3))), world_size).unwrap();
            let got = (options.cuda_device, options.npu_device);
            assert_eq!(got, expected, "{device:?}, {transport:?}, {world_size} ranks");
            assert_eq!(options.transport, transport);
        }
        for found in [Ok(None), Err(Error::config("no NPU"))] {
            let group = |transport| {
                let options = GroupOptions::default().with_transport(transport);
                group_options(options, (DeviceConfig::Cpu, &found), 2)
            };
            assert_eq!(group(Auto).unwrap().npu_device, None);
            let error = group(Hccl).unwrap_err();
            assert!(matches!(error, Error::Config { .. }));
            assert!(error.to_string().to_lowercase().contains("npu"), "{error}");
        }
    }
}
