//! Gradients that stay on a GPU, and an optimizer's step there.
//!
//! Everything is done in the one stream of the engine's candle device, the optimizer's kernels among it, and
//! candle frees memory in order of it: so no address is used before it is written, or after it is freed.

#![cfg_attr(
    feature = "candle-cuda",
    expect(unsafe_code, reason = "lends tensors' addresses to an optimizer")
)]

use std::any::Any;

use candle_core::{DType, Tensor};
use half::{bf16, f16};

use crate::engine::{DeviceTensor, HostTensor};
use crate::{Error, Result};

#[cfg(feature = "candle-cuda")]
pub(super) use lending::{open, step, tune};

/// A gradient: contiguous, of the type of a parameter.
#[derive(Debug)]
pub(super) struct OnDevice(pub(super) Tensor);

impl DeviceTensor for OnDevice {
    fn dtype(&self) -> fused_optim::DType {
        match self.0.dtype() {
            DType::F16 => fused_optim::DType::F16,
            DType::BF16 => fused_optim::DType::Bf16,
            _ => fused_optim::DType::F32,
        }
    }

    fn count(&self) -> usize {
        self.0.elem_count()
    }

    fn add(&mut self, term: &dyn DeviceTensor) -> Result<()> {
        self.0 = (&self.0 + &own(term)?.0).map_err(|e| failed("adding gradients", e))?;
        Ok(())
    }

    fn to_host(&self) -> Result<HostTensor> {
        let copy = || {
            let flat = self.0.flatten_all()?;
            Ok(match flat.dtype() {
                DType::F16 => HostTensor::F16(flat.to_vec1::<f16>()?),
                DType::BF16 => HostTensor::Bf16(flat.to_vec1::<bf16>()?),
                _ => HostTensor::F32(flat.to_vec1::<f32>()?),
            })
        };
        copy().map_err(|e| failed("copying a gradient", e))
    }
}

fn own(tensor: &dyn DeviceTensor) -> Result<&OnDevice> {
    let any: &dyn Any = tensor;
    any.downcast_ref()
        .ok_or_else(|| Error::Engine("a gradient that is of another engine".to_owned()))
}

#[cfg(feature = "candle-cuda")]
mod lending {
    use std::collections::BTreeMap;
    use std::ops::Range;

    use candle_core::{Device, Storage, bail};
    use fused_optim::cuda::{DeviceParam, DeviceParams, DeviceSlice, Gpu, LaunchShape, Tuned};
    use fused_optim::{Applied, Optimizer, Slice, StepCtl};

    use super::super::params::Tensors;
    use super::{DType, Error, Result, Tensor, bf16, f16, failed, own};
    use crate::engine::{Gradient, TensorSpec};

    /// A device by the stream in which candle works on it; none if it is the host.
    pub(in super::super) fn open(device: &Device) -> Result<Option<Gpu>> {
        let Device::Cuda(device) = device else { return Ok(None) };
        let opened = Gpu::on(device.cuda_stream());
        opened
            .map(Some)
            .map_err(|e| Error::Engine(format!("opening the GPU for an optimizer: {e}")))
    }

    /// Has `optimizer` step on `params`, which are on the device of `gpu`.
    pub(in super::super) fn step(
        (params, device, gpu): (&Tensors, &Device, &Gpu),
        optimizer: &mut dyn Optimizer,
        grads: &[Option<Gradient<'_>>],
        ctl: &StepCtl,
    ) -> Result<Applied> {
        let tensor = |grad: &Option<Gradient<'_>>| match grad {
            None => Ok(None),
            Some(Gradient::Device(grad)) => own(*grad).map(|grad| Some(grad.0.clone())),
            Some(Gradient::Host(grad)) => {
                let sent = send(*grad, device).map_err(|e| failed("copying a gradient", e));
                sent.map(Some)
            }
        };
        let grads = grads.iter().map(tensor).collect::<Result<Vec<_>>>()?;
        let param = |((spec, weight), grad): ((&TensorSpec, &Tensor), &Option<Tensor>)| {
            let weight = address(weight)?;
            let grad = grad.as_ref().map(address).transpose()?;
            Ok(DeviceParam { rows: spec.rows(), ..DeviceParam::new(weight, grad) })
        };
        let all = params.specs.iter().zip(&params.tensors).zip(&grads).map(param);
        let all: Vec<_> =
            all.collect::<candle_core::Result<_>>().map_err(|e| failed("lending parameters", e))?;
        check_apart(&params.specs, &all)?;
        // SAFETY: the addresses of tensors that `params` and `grads` own, of these types and lengths; a weight
        // has storage of its own, apart from all gradients, as was just checked. candle writes, reads and frees
        // them in order of the stream of `gpu` alone, and none of them is freed before `grads` goes.
        let lent = unsafe { DeviceParams::new(gpu, &all) };
        Ok(optimizer.step_on_device(lent, ctl)?)
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
        let tuned = optimizer.tune_on_device(&params).map_err(|e| e.to_string())?;
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

    fn send(values: Slice<'_>, device: &Device) -> candle_core::Result<Tensor> {
        match values {
            Slice::F32(v) => Tensor::from_slice(v, v.len(), device),
            Slice::F16(v) => Tensor::from_slice(v, v.len(), device),
            Slice::Bf16(v) => Tensor::from_slice(v, v.len(), device),
        }
    }

    /// Where a tensor's elements lie.
    fn address(tensor: &Tensor) -> candle_core::Result<DeviceSlice> {
        let (storage, layout) = tensor.storage_and_layout();
        let (Storage::Cuda(storage), Some((start, end))) = (&*storage, layout.contiguous_offsets())
        else {
            bail!("a tensor that is not contiguous, or not on a GPU: {tensor:?}")
        };
        let whole = match tensor.dtype() {
            DType::F32 => DeviceSlice::from(storage.as_cuda_slice::<f32>()?),
            DType::F16 => DeviceSlice::from(storage.as_cuda_slice::<f16>()?),
            DType::BF16 => DeviceSlice::from(storage.as_cuda_slice::<bf16>()?),
            other => bail!("no optimizer is for {other:?}"),
        };
        let ptr = whole.ptr + (start * tensor.dtype().size_in_bytes()) as u64;
        Ok(DeviceSlice { ptr, len: end - start, ..whole })
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
