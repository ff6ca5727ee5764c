//! Where gradients, state and steps of a run live: on the host; with the model on a CUDA GPU (feature
//! `candle-cuda`); or, of the optimizer alone, on an Ascend NPU (feature `npu`).
//!
//! [`DeviceConfig`] is the key `device` of a configuration, [`Placement`] what a rank makes of it, once. This is the
//! only module with `#[cfg]` for devices besides the candle engine.
//!
//! | what | `device = "cuda"` | `device = "npu"` |
//! |---|---|---|
//! | forward, backward, autocast, validation | the GPU, by candle's operators; under `compile` by kernels of the engine's own where it has them, and as one launch if that is asked for | the host |
//! | parameters and buffers | the GPU; copies for checkpoints and for buffers that are averaged over ranks | the host |
//! | gradients | the GPU, also those of an accumulation under way; where averages are the host's, it | the host |
//! | averages of the model ([`EMAHook`](crate::hooks::EmaHook)) | the GPU; copies for checkpoints and validations | the host |
//! | a step's weights | stay where they are | each step takes gradients there and weights back |
//! | the optimizer's state and its step, unscaling, clipping, the check for overflows | the GPU, by kernels of `fused-optim`, with the bits of the host's | the NPU, by operators of CANN |
//! | averages of gradients over ranks | the GPUs, by NCCL, during backward, if the group is over it (feature `nccl`; `backend = "auto"` with NCCL on all ranks); else the host: gradients come to it, and averages go back | the NPUs, by HCCL, if the group is over it (`backend = "auto"` with HCCL on all ranks); else the host |
//! | data, labels and random numbers, metrics, checkpoints, the loss scale's policy, everything else that ranks exchange | the host | the host |
//!
//! What a step moves between a GPU and the host, where averages are not the host's: the batch, the loss for the log,
//! and the gradients' addresses; under `AmpOptimWrapper` the verdict on the gradients, for the loss scale's policy,
//! which the host waits for; where gradients are clipped by norm, that norm, for the log; hyper-parameters when they
//! change. Over NCCL gradients lie where they lay before, so their addresses are sent once, and what a step of
//! `AmpOptimWrapper` or one that clips by norm has to know of all of them before it begins is taken of each bucket
//! behind its all-reduce, so that the step reads them once; with an optimizer for each part (`OptimWrapperDict`) the
//! step reads them twice. Checkpoints are the same wherever the optimizer is: a run goes on from one of the host on a GPU, and the
//! other way round.
//!
//! `device = { type = "cuda", offload_optimizer = true }` has the optimizer and its state on the host, for a
//! model whose state the GPU has no room for, or an optimizer of a program's own: gradients come to the host, and
//! weights from there and back, at each step.
//!
//! Which of the devices is a rank's own is [`Topology::device`]'s to say: the local rank, among those that
//! `CUDA_VISIBLE_DEVICES` or `ASCEND_RT_VISIBLE_DEVICES` leaves, under every launcher.
//!
//! A run that only validates or tests opens no NPU, and has no optimizer on a GPU. Nothing falls back to the host silently: without the
//! device or its libraries, with a model or an optimizer that computes on the host although it was to compute
//! there, or with something that the device does not do, the run is refused by name.
//!
//! A runner with the feature `candle-cuda` is built with `nvcc`, and linked with the driver's and the toolkit's
//! libraries (libcuda, cuBLAS, cuRAND): without them it does not start. It has been run on one H100, and
//! by the tests on a fake GPU, whose kernels are candle's compiled for the CPU; not on several GPUs.
//!
//! # Mixed precision on an NPU
//!
//! Chips of the first generation (Ascend 910A and older) train in mixed precision only; MMEngine makes an
//! `AmpOptimWrapper` of any wrapper there, without a word. So does this crate, with a warning in the log,
//! and `device = { type = "npu", switch_to_amp = false }` declines. Their f16 saturates, so an overflow shows
//! in no value: `AmpOptimWrapper` checks the gradients before
//! they go there, and at the device's overflow flag, and all ranks agree before any steps.
//!
//! Prototypes match CANN's headers and the protocol is tested on a simulator that checks rules: nothing of
//! NPUs has been run on Ascend hardware.

#[cfg(feature = "npu")]
mod npu;

use std::fmt;
use std::time::Duration;

use ::amp::OverflowSource;
#[cfg(feature = "candle-cuda")]
use candle_core::cuda_backend::cudarc::driver::CudaContext;
use collective::{GroupOptions, ProcessGroup, Topology, Transport, init::Accelerator};
use fused_optim::{Clip, Optimizer};
use parking_lot::Mutex;

use crate::config::Section;
use crate::{Error, Result};

/// Where a model computes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub enum ComputeDevice {
    /// The host.
    #[default]
    Cpu,
    /// A CUDA GPU, by its number among those that this process sees.
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

/// Where an optimizer keeps its state and steps, with what it works through there.
#[derive(Clone, Debug, Default)]
#[non_exhaustive]
pub enum OptimizerDevice {
    /// The host.
    #[default]
    Host,
    /// A GPU, by the stream that the model computes in.
    #[cfg(feature = "candle-cuda")]
    Cuda(fused_optim::cuda::Gpu),
    /// An NPU, by its operators.
    #[cfg(feature = "npu")]
    Npu(fused_optim::npu::Operators),
}

/// What a run asks for with `device`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub enum DeviceConfig {
    /// The host.
    #[default]
    Cpu,
    /// A CUDA GPU of this rank's own, for the model and its optimizer.
    Cuda {
        /// Whether the optimizer and its state are on the host.
        offload_optimizer: bool,
    },
    /// An Ascend NPU of this rank's own, for the optimizer.
    Npu {
        /// Whether a chip that trains in mixed precision only makes an `AmpOptimWrapper` of an
        /// `OptimWrapper`, as it does unless set.
        switch_to_amp: bool,
    },
}

impl DeviceConfig {
    /// A CUDA GPU, as `device = "cuda"` says.
    #[must_use]
    pub const fn cuda() -> Self {
        Self::Cuda { offload_optimizer: false }
    }

    /// An Ascend NPU, as `device = "npu"` says.
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
            Self::Cuda { .. } if !cfg!(feature = "candle-cuda") => Err(place.error(NO_CUDA)),
            Self::Npu { .. } if !cfg!(feature = "npu") => Err(place.error(NO_NPU)),
            device => Ok(device),
        }
    }

    /// What of it a run needs: one that does not train has no optimizer that a device could step.
    pub(crate) fn needed(self, trains: bool) -> Self {
        match self {
            Self::Npu { .. } if !trains => Self::Cpu,
            Self::Cuda { .. } if !trains => Self::Cuda { offload_optimizer: true },
            device => device,
        }
    }

    /// The number of this rank's own device among those that the process sees, which is there; `None` is the host. If the
    /// launcher gives no local rank, the ranks tell one another on which host they are, for at most `timeout`.
    ///
    /// # Errors
    ///
    /// Those of [`Topology::locate`]. [`Error::Config`]: without the device's feature; without CANN, with the
    /// library that was looked for, where, and what to install; without a device for this rank.
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
            Ok(list) => format!("{variable}={list:?} leaves no more"),
            Err(_) => format!("the launcher starts more ranks than there are {name}s"),
        };
        let text = format!("this rank's own is {name} {index}, and there are {there}: {why}");
        Err(refused(device, text))
    }

    /// Number of devices that the environment leaves, and the same in words. The error is the reason why the device
    /// `index` cannot be looked for.
    fn count(self, index: usize) -> Result<(usize, String), String> {
        match self {
            Self::Cpu => Ok((0, String::new())),
            #[cfg(feature = "candle-cuda")]
            Self::Cuda { .. } => {
                let _ = index;
                let count = CudaContext::device_count().map_err(|e| e.to_string())?;
                Ok((usize::try_from(count).unwrap_or(0), count.to_string()))
            }
            #[cfg(not(feature = "candle-cuda"))]
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

    /// Opens what [`find`](Self::find) has found, for a member of the group.
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

/// A group's options, for the memory of the device that was found, unless it would have it to itself. A rank
/// that found none joins all the same, to tell the others.
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
            let text = "backend = \"hccl\" moves the memory of NPUs: it needs device = \"npu\"";
            return Err(Error::Config(text.to_owned()));
        }
        (_, Err(error), Transport::Hccl) => return Err(Error::Config(error.to_string())),
        _ => options,
    })
}

/// What has the optimizer of a model on a GPU on the host.
const OFFLOAD: &str = "device = { type = \"cuda\", offload_optimizer = true }";
const NO_CUDA: &str = "device `cuda` is not built in: it needs the feature `candle-cuda`";
const NO_NPU: &str = "device `npu` is not built in: it needs the feature `npu`";

fn refused(device: &str, why: impl fmt::Display) -> Error {
    Error::Config(format!("device = \"{device}\": {why}"))
}

/// Makes an optimizer where a placement has it: `optimizer!(placement, Sgd, SgdHyper, groups)`.
macro_rules! optimizer {
    ($placement:expr, $optimizer:ident, $hyper:ident, $groups:expr) => {
        match $placement.optimizer() {
            $crate::placement::OptimizerDevice::Host => Box::new($optimizer::new($groups)?),
            #[cfg(feature = "candle-cuda")]
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

/// A source of overflows that values do not show.
pub type Overflows = Box<dyn OverflowSource<Error = Error> + Send>;

/// Where a rank's model, gradients and optimizer are: what the makers of optimizers and their wrappers are given.
#[derive(Debug, Default)]
pub struct Placement {
    model: ComputeDevice,
    /// Of a model on a GPU: whether its optimizer is on the host.
    offload: bool,
    optimizer: OptimizerDevice,
    #[cfg(feature = "npu")]
    npu: Option<npu::Npu>,
    warnings: Mutex<Vec<String>>,
}

impl Placement {
    /// Everything on the host.
    #[must_use]
    pub fn host() -> Self {
        Self::default()
    }

    #[cfg(feature = "npu")]
    fn on_npu(npu: npu::Npu) -> Self {
        let optimizer = OptimizerDevice::Npu(npu.operators().clone());
        Self { optimizer, npu: Some(npu), ..Self::host() }
    }

    /// The optimizer's device by name: `cpu`, or for example `cuda:0`.
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

    /// Where the model computes.
    #[must_use]
    pub const fn model(&self) -> ComputeDevice {
        self.model
    }

    /// Where the optimizer keeps its state and steps.
    #[must_use]
    pub const fn optimizer(&self) -> &OptimizerDevice {
        &self.optimizer
    }

    /// Whether the model and its optimizer are on a GPU.
    pub(crate) fn steps_on_gpu(&self) -> bool {
        !self.offload && self.model != ComputeDevice::Cpu
    }

    /// Takes the stream for an optimizer on the model's GPU from its engine, which is `on` this device; `None` is
    /// the host. Refuses an engine on another device than the model is to be on.
    pub(crate) fn for_engine(self, on: Option<(ComputeDevice, OptimizerDevice)>) -> Result<Self> {
        let (on, stream) = on.unwrap_or_default();
        if self.model != ComputeDevice::Cpu && on != self.model {
            return Err(Error::Config(format!(
                "device = \"cuda\": the model computes on {on}, not on {}: the zoo's and those that \
                 `CandleEngine::factory` makes do, another must be made for the device of its `ModelContext`",
                self.model
            )));
        }
        Ok(if self.steps_on_gpu() { Self { optimizer: stream, ..self } } else { self })
    }

    /// Refuses bounds on gradients that an optimizer on this device does not know.
    pub(crate) fn check_clip(&self, clip: Option<Clip>) -> Result<()> {
        let on_gpu = self.steps_on_gpu();
        let what = match clip {
            Some(Clip::Norm(norm)) if on_gpu && norm.norm_type != 2.0 => "norm_type",
            Some(Clip::Norm(norm)) if on_gpu && norm.error_if_nonfinite => "error_if_nonfinite",
            _ => return Ok(()),
        };
        Err(Error::Config(format!(
            "device = \"cuda\": `clip_grad.{what}`: an optimizer on a GPU clips by the 2-norm, and skips steps; \
             {OFFLOAD} has the optimizer on the host, which does that"
        )))
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

    /// A line for the log at the beginning, unless everything is on the host; and warnings.
    pub(crate) fn describe(&self, group: &ProcessGroup) -> (Option<String>, Vec<String>) {
        let warnings = std::mem::take(&mut *self.warnings.lock());
        #[cfg(feature = "npu")]
        if let Some(npu) = &self.npu {
            let (line, more) = npu.describe(group);
            return (Some(line), warnings.into_iter().chain(more).collect());
        }
        let _ = group;
        let line = match self.model {
            ComputeDevice::Cpu => None,
            model if self.offload => {
                Some(format!("device {model}: the model; the optimizer, if any, is on the host"))
            }
            model if group.backend_name() == "nccl" => Some(format!(
                "device {model}: the model, its gradients and its optimizer; gradients are averaged by NCCL ({})",
                group.backend_reason()
            )),
            model if group.world_size() > 1 => Some(format!(
                "device {model}: the model and its optimizer; gradients are averaged by the host's backend `{}`, not \
                 by NCCL: {}",
                group.backend_name(),
                group.backend_reason()
            )),
            model => Some(format!("device {model}: the model, its gradients and its optimizer")),
        };
        (line, warnings)
    }

    /// Refuses an optimizer that computes on the host although a device was asked for.
    pub(crate) fn check(&self, optimizer: &dyn Optimizer) -> Result<()> {
        let (name, on, kind) = (self.name(), optimizer.device(), optimizer.kind());
        if on == name {
            return Ok(());
        }
        let (asked, other) = match self.model {
            ComputeDevice::Cpu if name == "cpu" => return Ok(()),
            ComputeDevice::Cpu => ("npu", String::new()),
            ComputeDevice::Cuda(_) => ("cuda", format!("; {OFFLOAD} has it on the host")),
        };
        Err(Error::Config(format!(
            "device = \"{asked}\": the optimizer `{kind}` computes on {on}, not on {name}: the nine \
             with a name `NpuFused...` do, one of a program's own must be made for the device that its maker is \
             given{other}"
        )))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn group_options_name_the_device_whose_memory_is_averaged() {
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
        for found in [Ok(None), Err(Error::Config("no NPU".to_owned()))] {
            let group = |transport| {
                let options = GroupOptions::default().with_transport(transport);
                group_options(options, (DeviceConfig::Cpu, &found), 2)
            };
            assert_eq!(group(Auto).unwrap().npu_device, None);
            assert!(matches!(group(Hccl), Err(Error::Config(text)) if text.contains("NPU")));
        }
    }
}
