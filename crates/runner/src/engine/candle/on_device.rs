//! Gradients that stay on a GPU, an optimizer's step there, and averages of what it steps on.
//!
//! Everything is done in the one stream of the engine's candle device, the optimizer's kernels among it, and
//! candle frees memory in order of it: so no address is used before it is written, or after it is freed.

#![cfg_attr(
    feature = "candle-cuda",
    expect(unsafe_code, reason = "lends tensors' addresses to an optimizer")
)]

use std::any::Any;
use std::sync::Arc;
#[cfg(feature = "candle-cuda")]
use std::sync::Weak;

use candle_core::{DType, Device, Tensor};
use fused_optim::Slice;
use half::{bf16, f16};
use parking_lot::Mutex;

use crate::engine::{DeviceTensor, HostTensor};
use crate::{Error, Result};

#[cfg(feature = "candle-cuda")]
pub(super) use lending::{Averages, address_of, lend, of, open, place_of, tune};

/// A gradient: contiguous, of the type of a parameter. Where it lies may change as long as this is kept: a graph
/// writes the next one where it was (`graph/mod.rs`).
#[derive(Debug)]
pub(super) struct OnDevice(Arc<Mutex<Tensor>>);

impl OnDevice {
    pub(super) fn new(tensor: Tensor) -> Self {
        Self(Arc::new(Mutex::new(tensor)))
    }

    pub(super) fn tensor(&self) -> Tensor {
        self.0.lock().clone()
    }

    /// For whoever is to write where it lies.
    #[cfg(feature = "candle-cuda")]
    pub(super) fn downgrade(&self) -> Weak<Mutex<Tensor>> {
        Arc::downgrade(&self.0)
    }

    fn set(&self, sum: candle_core::Result<Tensor>) -> Result<()> {
        *self.0.lock() = sum.map_err(|e| failed("adding gradients", e))?;
        Ok(())
    }
}

impl DeviceTensor for OnDevice {
    fn dtype(&self) -> fused_optim::DType {
        match self.tensor().dtype() {
            DType::F16 => fused_optim::DType::F16,
            DType::BF16 => fused_optim::DType::Bf16,
            _ => fused_optim::DType::F32,
        }
    }

    fn count(&self) -> usize {
        self.tensor().elem_count()
    }

    fn add(&mut self, term: &dyn DeviceTensor) -> Result<()> {
        self.set(self.tensor() + own(term)?.tensor())
    }

    fn add_host(&mut self, term: Slice<'_>) -> Result<()> {
        let sum = || {
            let own = self.tensor();
            let term = send(term, own.device())?.reshape(own.shape())?;
            own + term
        };
        self.set(sum())
    }

    fn to_host(&self) -> Result<HostTensor> {
        let copy = || {
            let flat = self.tensor().flatten_all()?;
            Ok(match flat.dtype() {
                DType::F16 => HostTensor::F16(flat.to_vec1::<f16>()?),
                DType::BF16 => HostTensor::Bf16(flat.to_vec1::<bf16>()?),
                _ => HostTensor::F32(flat.to_vec1::<f32>()?),
            })
        };
        copy().map_err(|e| failed("copying a gradient", e))
    }
}

fn send(values: Slice<'_>, device: &Device) -> candle_core::Result<Tensor> {
    match values {
        Slice::F32(v) => Tensor::from_slice(v, v.len(), device),
        Slice::F16(v) => Tensor::from_slice(v, v.len(), device),
        Slice::Bf16(v) => Tensor::from_slice(v, v.len(), device),
    }
}

fn own(tensor: &dyn DeviceTensor) -> Result<&OnDevice> {
    let any: &dyn Any = tensor;
    any.downcast_ref().ok_or_else(|| Error::Engine(FOREIGN.to_owned()))
}

const FOREIGN: &str = "a gradient that is of another engine";

#[cfg(feature = "candle-cuda")]
mod lending {
    use std::collections::BTreeMap;
    use std::ops::Range;

    use fused_optim::cuda::{
        self, DeviceParam, DeviceParams, DeviceSlice, Gpu, LaunchShape, Tuned,
    };
    use fused_optim::{DeviceOptimizer, Optimizer};

    use super::super::buckets::Average;
    use super::super::params::Tensors;
    use super::{Any, Device, Error, FOREIGN, Result, Tensor, failed, own, send};
    use crate::engine::{DeviceAverages, DeviceTensor, Gradient, TensorSpec};

    /// A device by the stream in which candle works on it; none if it is the host.
    pub(in super::super) fn open(device: &Device) -> Result<Option<Gpu>> {
        let Device::Cuda(device) = device else { return Ok(None) };
        let opened = Gpu::on(device.cuda_stream());
        opened
            .map(Some)
            .map_err(|e| Error::Engine(format!("opening the GPU for an optimizer: {e}")))
    }

    /// Lends `params`, which are on the device of `gpu`, and their gradients to an optimizer's call.
    pub(in super::super) fn lend<R>(
        (params, device, gpu): (&Tensors, &Device, &Gpu),
        grads: &[Option<Gradient<'_>>],
        call: impl FnOnce(DeviceParams<'_>) -> fused_optim::Result<R>,
    ) -> Result<R> {
        // Copies of what is on the host, until the step has been put into the stream.
        let mut sent = Vec::new();
        let mut grad_at = |grad: &Gradient<'_>| match grad {
            Gradient::Device(grad) => address_of(*grad, gpu),
            Gradient::Host(grad) => {
                let copy = send(*grad, device).map_err(|e| failed("copying a gradient", e))?;
                let at = address(&copy);
                sent.push(copy);
                at
            }
        };
        let mut all = Vec::with_capacity(grads.len());
        for ((spec, weight), grad) in params.specs.iter().zip(&params.tensors).zip(grads) {
            let (weight, grad) = (address(weight)?, grad.as_ref().map(&mut grad_at).transpose()?);
            all.push(DeviceParam { rows: spec.rows(), ..DeviceParam::new(weight, grad) });
        }
        check_apart(&params.specs, &all)?;
        // SAFETY: the addresses of tensors that `params`, `grads` and `sent` own, of these types and lengths; a
        // weight has storage of its own, apart from all gradients, as was just checked. candle writes, reads and
        // frees them in order of the stream of `gpu` alone, behind which averages are, and none of them is freed
        // before this returns.
        let lent = unsafe { DeviceParams::new(gpu, &all) };
        Ok(call(lent)?)
    }

    /// An optimizer that steps on a device's memory.
    pub(in super::super) fn of(
        optimizer: &mut dyn Optimizer,
    ) -> fused_optim::Result<&mut dyn DeviceOptimizer> {
        let what = "a step of the host's optimizer on a device's memory";
        optimizer.as_device().ok_or(fused_optim::Error::Unsupported { what })
    }

    /// Has `optimizer` search for its launches on parameters like these; says what it found, or why it did not.
    pub(in super::super) fn tune(
        params: &[TensorSpec],
        optimizer: &mut dyn Optimizer,
    ) -> std::result::Result<String, String> {
        let like = |spec: &TensorSpec| {
            let weight = DeviceSlice { ptr: 0, len: spec.count(), dtype: spec.dtype };
            DeviceParam { rows: spec.rows(), ..DeviceParam::new(weight, None) }
        };
        let params: Vec<_> = params.iter().map(like).collect();
        let device = optimizer.as_device().ok_or("the optimizer is on the host")?;
        let tuned = device.tune(&params).map_err(|e| e.to_string())?;
        let each = tuned.iter().map(|Tuned { types: (weight, _), shape, searched }| {
            let how = match searched.len() {
                0 => "as an earlier search found".to_owned(),
                tried => format!("the fastest of {tried}"),
            };
            let LaunchShape { blocks, sweep, pack } = shape;
            format!(
                "{weight} weights by up to {blocks} blocks a multiprocessor, {sweep} elements a warp \
                 and {pack} a thread at a time ({how})"
            )
        });
        let each = each.collect::<Vec<_>>().join(", ");
        Ok(format!("a search for the optimizer's launches: {each}"))
    }

    /// Moving averages of tensors, kept where those are.
    #[derive(Debug)]
    pub(in super::super) struct Averages {
        of: Vec<Tensor>,
        kept: cuda::Averages,
    }

    impl Averages {
        /// Of tensors on the device of `gpu`, which keep their memory.
        pub(in super::super) fn new(gpu: &Gpu, of: Vec<Tensor>) -> Result<Self> {
            let counts: Vec<usize> = of.iter().map(Tensor::elem_count).collect();
            let kept = cuda::Averages::new(gpu.clone(), &counts).map_err(averaging)?;
            Ok(Self { of, kept })
        }
    }

    impl DeviceAverages for Averages {
        fn update(&mut self, share: Option<f32>) -> Result<()> {
            let of = self.of.iter().map(address).collect::<Result<Vec<_>>>()?;
            // SAFETY: tensors that this keeps, which candle and optimizers write in order of the same stream.
            unsafe { self.kept.update(&of, share) }.map_err(averaging)
        }

        fn to_host(&self) -> Result<Vec<Vec<f32>>> {
            self.kept.to_host().map_err(averaging)
        }

        fn load(&mut self, averages: &[Vec<f32>]) -> Result<()> {
            self.kept.load(averages).map_err(averaging)
        }
    }

    fn averaging(error: fused_optim::Error) -> Error {
        Error::Engine(format!("averaging parameters: {error}"))
    }

    /// Where a gradient lies, or its average, that is used in the stream of `gpu`.
    pub(in super::super) fn address_of(grad: &dyn DeviceTensor, gpu: &Gpu) -> Result<DeviceSlice> {
        let any: &dyn Any = grad;
        let (at, stream) = match any.downcast_ref::<Average>() {
            Some(average) => (average.address(), Some(average.stream())),
            None => {
                let tensor = own(grad)?.tensor();
                let stream = tensor.device().as_cuda_device().map(|device| device.cuda_stream());
                (address(&tensor)?, stream.ok())
            }
        };
        match stream.as_ref() == Some(gpu.stream()) {
            true => Ok(at),
            false => Err(Error::Engine(FOREIGN.to_owned())),
        }
    }

    /// Where a weight or a buffer lies.
    pub(in super::super) fn place_of(tensor: &Tensor) -> Result<u64> {
        Ok(address(tensor)?.ptr)
    }

    fn address(tensor: &Tensor) -> Result<DeviceSlice> {
        tensor.try_into().map_err(|e| failed("lending a tensor", e))
    }

    /// Refuses a gradient that is the memory of a weight: a model's own operator may hand one back.
    fn check_apart(specs: &[TensorSpec], params: &[DeviceParam]) -> Result<()> {
        let bytes = |slice: DeviceSlice| -> Range<u64> {
            slice.ptr..slice.ptr + (slice.len * slice.dtype.size()) as u64
        };
        let weights = params.iter().map(|param| bytes(param.weight));
        let weights: BTreeMap<u64, u64> =
            weights.filter(|at| !at.is_empty()).map(|at| (at.start, at.end)).collect();
        for (spec, param) in specs.iter().zip(params) {
            let Some(grad) = param.grad.map(bytes) else { continue };
            // Weights are apart from one another: the last that begins before its end reaches furthest.
            let last = weights.range(..grad.end).next_back();
            if last.is_some_and(|(_, end)| *end > grad.start) {
                let text = format!("the gradient of `{}` is a parameter's own memory", spec.name);
                return Err(Error::Engine(text));
            }
        }
        Ok(())
    }
}

fn failed(during: &str, error: candle_core::Error) -> Error {
    Error::Engine(format!("{during}: {error}"))
}
